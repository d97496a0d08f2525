"""Autocast in dry runs and traces, whose tensors PyTorch's own autocast does not support.

A dispatch mode applies the rules of ``torch.autocast("cuda")`` (`graphrun.sim.autocast`) to
decomposed operators. Code asks PyTorch whether autocast is on, and for its dtype: that state exists
without CUDA too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from graphrun.sim.autocast import FP32, LOWER, WIDEST

AUTOCAST_DEVICE_TYPE = "cuda"
"""The device type whose autocast dry runs and traces follow."""
_FP32_PARTS = "_log_softmax _softmax _cdist_forward native_group_norm"
"""Operators into which composite operators of the list decompose."""
_RULES = {
    **dict.fromkeys(LOWER.split(), "lower"),
    **dict.fromkeys((*FP32.split(), *_FP32_PARTS.split()), "fp32"),
    **dict.fromkeys(WIDEST.split(), "widest"),
}
_METHODS = ("__init__", "__enter__", "__exit__")
_in_dry_run: ContextVar[bool] = ContextVar("graphrun_follows_autocast", default=False)
_lower: ContextVar[torch.dtype | None] = ContextVar("graphrun_autocast_dtype", default=None)
"""Needed because PyTorch's own state reads as off inside a dispatch mode."""


def dtype_on(device_type: str) -> torch.dtype | None:
    """Return the dtype of the active autocast for ``device_type``; None if it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


@contextmanager
def follow_autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """A context for code that runs under autocast to ``dtype`` on the planned device; None: off.

    Inside, ``torch.autocast`` for CUDA works without CUDA, for this thread. If the context is
    entered after a dispatch mode, casts are applied before that mode.
    """
    was_enabled, previous_dtype = (
        torch.is_autocast_enabled(AUTOCAST_DEVICE_TYPE),
        torch.get_autocast_dtype(AUTOCAST_DEVICE_TYPE),
    )
    tokens = _in_dry_run.set(True), _lower.set(dtype)
    try:
        torch.set_autocast_enabled(AUTOCAST_DEVICE_TYPE, dtype is not None)
        if dtype is not None:
            torch.set_autocast_dtype(AUTOCAST_DEVICE_TYPE, dtype)
        with _Redirected(), nullcontext() if dtype is None else _Casts():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_autocast_enabled(AUTOCAST_DEVICE_TYPE, was_enabled)
        torch.set_autocast_dtype(AUTOCAST_DEVICE_TYPE, previous_dtype)
        _in_dry_run.reset(tokens[0])
        _lower.reset(tokens[1])


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Casts the floating-point arguments of operators by the rules of autocast, while it is on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (lower_dtype := _lower.get()) is None or (rule := _rule_of(func)) is None:
            return func(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        tree_map_only(
            torch.Tensor,
            lambda tensor: tensors.append(tensor) if _is_eligible(tensor) else None,
            (args, kwargs),
        )
        if not tensors:
            return func(*args, **kwargs)
        is_wide = rule == "fp32" or (
            rule == "widest" and any(tensor.dtype == torch.float32 for tensor in tensors)
        )
        dtype = torch.float32 if is_wide else lower_dtype
        # a sum is accumulated in fp32 without casting its inputs
        if rule == "fp32" and _takes_dtype(func):
            return func(*args, **{**kwargs, "dtype": kwargs.get("dtype") or dtype})

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if _is_eligible(tensor) and tensor.dtype != dtype else tensor

        args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
        return func(*args, **kwargs)


@cache
def _rule_of(func: Any) -> str | None:
    return None if func._schema.is_mutable else _RULES.get(func._schema.name.removeprefix("aten::"))


@cache
def _takes_dtype(func: Any) -> bool:
    return any(argument.name == "dtype" for argument in func._schema.arguments)


def _is_eligible(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


class _Redirected:
    """A context where ``torch.autocast`` for CUDA works without CUDA, in dry-run threads."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _entry_count: ClassVar[int] = 0
    _original: ClassVar[tuple[Any, ...]]

    def __enter__(self) -> None:
        shared, autocast = _Redirected, torch.autocast
        with shared._lock:
            if not shared._entry_count:
                shared._original = tuple(getattr(autocast, name) for name in _METHODS)
                for name, method in zip(_METHODS, _REPLACEMENTS, strict=True):
                    setattr(autocast, name, method)
            shared._entry_count += 1

    def __exit__(self, *_: object) -> None:
        shared, autocast = _Redirected, torch.autocast
        with shared._lock:
            shared._entry_count -= 1
            if not shared._entry_count:
                for name, method in zip(_METHODS, shared._original, strict=True):
                    setattr(autocast, name, method)


def _construct(
    autocast: Any,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    if not _in_dry_run.get() or device_type not in (AUTOCAST_DEVICE_TYPE, "meta"):
        _Redirected._original[0](autocast, device_type, dtype, enabled, cache_enabled)
        return
    if dtype == torch.float32:  # Mochi's positions: PyTorch turns autocast off, with a warning
        dtype, enabled = None, False
    autocast.device = AUTOCAST_DEVICE_TYPE
    autocast.fast_dtype = dtype or torch.get_autocast_dtype(AUTOCAST_DEVICE_TYPE)
    autocast.custom_backend_name = torch._C._get_privateuse1_backend_name()
    autocast._enabled, autocast._cache_enabled = enabled, False
    autocast.graphrun_casts = []


def _enter(autocast: Any) -> Any:
    result = _Redirected._original[1](autocast)
    if (contexts := vars(autocast).get("graphrun_casts")) is not None:
        contexts.append(ExitStack())
        token = _lower.set(autocast.fast_dtype if autocast._enabled else None)
        contexts[-1].callback(_lower.reset, token)
        contexts[-1].enter_context(_Casts())  # type: ignore[no-untyped-call]
    return result


def _exit(autocast: Any, *error: Any) -> Any:
    if contexts := vars(autocast).get("graphrun_casts"):
        contexts.pop().close()
    return _Redirected._original[2](autocast, *error)


_REPLACEMENTS: tuple[Any, ...] = (_construct, _enter, _exit)

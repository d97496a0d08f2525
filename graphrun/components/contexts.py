"""What holds while modules are made: no progress bars, a dtype, parameters without bytes. Knows no graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# What gives a parameter its first values, by name: in place of functions of `torch.nn.init` transformers puts its own. On meta
# torch runs reference code in Python for each, a third of a ghost's time.
_DRAWS = frozenset({"kaiming_uniform_", "normal_", "uniform_"})


class _Undrawn(TorchFunctionMode):
    """Random numbers for a tensor on meta are not drawn."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _DRAWS and (tensor := args[0] if args else kwargs["tensor"]).is_meta:
            return tensor
        return func(*args, **(kwargs or {}))


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars that transformers and diffusers draw while they read files."""
    import diffusers.utils.logging
    import transformers.utils.logging

    shown = [library for library in (transformers.utils.logging, diffusers.utils.logging) if library.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()


@contextmanager
def unasked() -> Iterator[None]:
    """transformers does not ask on stdin whether to run code that came with a checkpoint (`resolve_trust_remote_code`), but raises
    ValueError: a configuration inside another (LLaVA's ``text_config``) may name code too, and no argument says no to that."""
    from transformers import dynamic_module_utils

    before = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = before


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Tensors are of ``dtype`` where nothing else is said."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def on_host() -> Iterator[None]:
    """Tensors are in host memory where nothing else is said, also for a caller who chose otherwise (`torch.set_default_device`)."""
    if torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Parameters are constructed on meta, buffers for real: those that are not saved with the weights are computed there."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False), _Undrawn():
        yield


@contextmanager
def on_meta() -> Iterator[None]:
    """Every tensor is constructed on meta."""
    with torch.device("meta"), _Undrawn():
        yield

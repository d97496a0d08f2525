"""A simulated device for dry runs: PyTorch's own name for it, and nothing registered with PyTorch.

The tensors are those of the simulated accelerator. Python reads `PLANNED` as their device, as it
would on a card. C++ sees meta tensors, for which every build of PyTorch has kernels. A dispatch
mode turns whatever is made on the planned device or on meta into simulated tensors, so a dry run
needs no backend, initializes none, and works the same next to one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphrun.sim.active import is_simulated
from graphrun.sim.casts import following
from graphrun.sim.dispatch import dispatch
from graphrun.sim.machine import Machine
from graphrun.sim.tensor import SimTensor

PLANNED = torch.device("cuda", 0)
"""The device that tensors report in a dry run. Plans for the simulated accelerator are made with it
too: ``sim`` stands for a card."""
_SHELL = torch.device("meta")
# PyTorch initializes no device while a mode of this kind is active (`device_lazy_init` in
# torch/csrc/utils/device_lazy_init.cpp): fake tensors on CUDA need no CUDA either.
_MODE_KEY = torch._C._TorchDispatchModeKey.FAKE
_FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor})
_INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})
_INTERCEPTED = _FROM_DATA | _INDEXING | {torch.Tensor.to, torch.Tensor.cuda}


class DryMachine(Machine):
    """A machine without limits for dry runs. Its context leaves PyTorch as it was: devices,
    autocast, CUDA's calls that wait for initialization."""

    def __enter__(self) -> DryMachine:
        super().__enter__()
        self._contexts = ExitStack()
        for context in (
            _OnPlannedDevice(),
            _Calls(),
            following(None),
            _without_monitor(),
            _cards_untouched(),
        ):
            self._contexts.enter_context(context)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._contexts.close()
        super().__exit__(kind, error, trace)

    def _devices(self, number: int) -> tuple[torch.device, torch.device]:
        return torch.device(PLANNED.type, number), _SHELL


class _OnPlannedDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators on simulated tensors, and on anything that is made on the planned device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode_key = _MODE_KEY

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = kwargs.get("device") if kwargs else None
        if SimTensor in types or (device is not None and is_simulated(device)):
            return dispatch(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """Calls of Python's interface that C++ answers without the dispatch mode: tensors from Python's
    data, lists as indices, moves to a device without a number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func not in _INTERCEPTED or torch._C._get_dispatch_mode(_MODE_KEY) is None
        ):  # traces run without the mode
            return func(*args, **kwargs)
        source: Any = args[0] if args else None
        if func is torch.Tensor.cuda:
            return source.to(PLANNED if len(args) < 2 or args[1] is None else args[1])
        if func is torch.Tensor.to:
            return func(
                *map(_numbered, args), **{name: _numbered(value) for name, value in kwargs.items()}
            )
        if func in _INDEXING:
            return (
                func(source, _on_device(args[1]), *args[2:])
                if type(source) is SimTensor
                else func(*args)
            )
        device = kwargs.get("device", source.device if isinstance(source, SimTensor) else None)
        if device is None or not is_simulated(device):
            return func(*args, **kwargs)
        if isinstance(source, SimTensor) and func is not torch.Tensor.new_tensor:
            copied = source.to(device=device, dtype=kwargs.get("dtype"))
            return copied.clone() if copied is source and func is torch.tensor else copied
        return func(*args, **{**kwargs, "device": "cpu"}).to(device)


def _numbered(value: Any) -> Any:
    """``value``, with a number if it is the planned device without one."""
    named = isinstance(value, (str, torch.device)) and str(value) == PLANNED.type
    return PLANNED if named else value


def _on_device(index: Any) -> Any:
    """``index`` with a tensor on the device in place of each list."""
    if isinstance(index, tuple):
        return tuple(map(_on_device, index))
    return (
        torch.tensor(index, device="cpu").to(PLANNED)
        if isinstance(index, list) and _is_data(index)
        else index
    )


def _is_data(values: list[Any]) -> bool:
    return all(
        isinstance(value, (int, list)) and (isinstance(value, int) or _is_data(value))
        for value in values
    )


@contextmanager
def _without_monitor() -> Iterator[None]:
    """A context in which progress bars start no thread: pipelines make bars, and tqdm a monitor of
    all of them."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    interval, tqdm.monitor_interval = tqdm.monitor_interval, 0
    try:
        yield
    finally:
        tqdm.monitor_interval = interval


@contextmanager
def _cards_untouched() -> Iterator[None]:
    """A context after which the random states of cards are as before: GLM-Image seeds them. Where
    CUDA is not initialized yet, PyTorch keeps such calls for later."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    waiting = len(torch.cuda._queued_calls)
    states = torch.cuda.get_rng_state_all() if initialized else []
    try:
        yield
    finally:
        if initialized:
            torch.cuda.set_rng_state_all(states)
        else:
            del torch.cuda._queued_calls[waiting:]

"""A simulated device for dry runs, under PyTorch's own name for it, without registration.

Tensors are those of the simulated accelerator. Python reads `PLANNED` as their device, as on a
card. C++ sees meta tensors, for which every build of PyTorch has kernels. A dispatch mode turns
whatever is created on the planned device or on meta into simulated tensors. So a dry run needs and
initializes no backend, and also works if one is in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from threading import get_ident
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphrun.sim.active import is_simulated
from graphrun.sim.casts import follow_autocast
from graphrun.sim.dispatch import dispatch
from graphrun.sim.machine import Machine
from graphrun.sim.tensor import SimTensor

PLANNED = torch.device("cuda", 0)
"""The device that tensors report in a dry run, also for plans for the simulated accelerator:
``sim`` represents a card."""
_SHELL = torch.device("meta")
# PyTorch initializes no device while a mode of this kind is active (`device_lazy_init` in
# torch/csrc/utils/device_lazy_init.cpp): fake tensors on CUDA need no CUDA either
_MODE_KEY = torch._C._TorchDispatchModeKey.FAKE
_FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor})
_INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})
_INTERCEPTED = _FROM_DATA | _INDEXING | {torch.Tensor.to, torch.Tensor.cuda}


class DryMachine(Machine):
    """A machine without limits for dry runs.

    ``unified``: the device shares its memory with the host: operators take tensors of both, and the
    host reads the device's. The context leaves PyTorch unchanged: devices, autocast, CUDA's calls
    that wait for initialization.
    """

    def __init__(self, *, unified: bool = False) -> None:
        super().__init__()
        self.unified = unified

    def __enter__(self) -> DryMachine:
        super().__enter__()
        self._contexts = ExitStack()
        for context in (
            _PlannedDeviceMode(),
            _FunctionMode(),
            follow_autocast(None),
            _without_bars(),
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


class _PlannedDeviceMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators on simulated tensors, and on anything created on the planned device."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode_key = _MODE_KEY

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = kwargs.get("device") if kwargs else None
        if SimTensor in types or (device is not None and is_simulated(device)):
            return dispatch(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class _FunctionMode(TorchFunctionMode):
    """Handles Python calls that C++ answers without the dispatch mode: tensors from Python data,
    lists as indices, and moves to a device without a number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # traces run without the mode
        if func not in _INTERCEPTED or torch._C._get_dispatch_mode(_MODE_KEY) is None:
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
            copy = source.to(device=device, dtype=kwargs.get("dtype"))
            return copy.clone() if copy is source and func is torch.tensor else copy
        return func(*args, **{**kwargs, "device": "cpu"}).to(device)


@contextmanager
def without_planned_device() -> Iterator[None]:
    """A context for traces on meta tensors, without the modes of a dry run."""
    depth = torch._C._len_torch_function_stack()
    is_on_top = depth and isinstance(torch._C._get_function_stack_at(depth - 1), _FunctionMode)
    with _disable_current_modes(), _pop_mode_temporarily() if is_on_top else nullcontext():
        yield


def _numbered(value: Any) -> Any:
    """Return ``value``, with number 0 if it is the planned device without a number."""
    is_planned_device = isinstance(value, (str, torch.device)) and str(value) == PLANNED.type
    return PLANNED if is_planned_device else value


def _on_device(index: Any) -> Any:
    """Return ``index`` with a tensor on the device in place of each list."""
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
def _without_bars() -> Iterator[None]:
    """A context without this thread's progress bars, which loops of blocks make by themselves, and
    without the thread that tqdm starts to monitor bars."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    thread, initialize = get_ident(), tqdm.__init__

    def initialize_disabled(bar: Any, *args: Any, **kwargs: Any) -> None:
        initialize(bar, *args, **kwargs | {"disable": True} if get_ident() == thread else kwargs)

    interval, tqdm.monitor_interval = tqdm.monitor_interval, 0
    tqdm.__init__ = initialize_disabled
    try:
        yield
    finally:
        tqdm.__init__ = initialize
        tqdm.monitor_interval = interval


@contextmanager
def _cards_untouched() -> Iterator[None]:
    """A context that restores the random states of cards: GLM-Image seeds them. Before CUDA is
    initialized, PyTorch queues such calls; the context removes them."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    queue_length = len(torch.cuda._queued_calls)
    states = torch.cuda.get_rng_state_all() if initialized else []
    try:
        yield
    finally:
        if initialized:
            torch.cuda.set_rng_state_all(states)
        else:
            del torch.cuda._queued_calls[queue_length:]

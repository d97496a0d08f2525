"""Register the device ``sim`` with PyTorch, in its one PrivateUse1 slot.

The registration is process-wide, happens once, and cannot be undone. Operators on simulated tensors
arrive through the subclass (``__torch_dispatch__``). Explicit kernels are needed where that path
does not exist: factory functions, which have no simulated argument; C++ code that excludes Python
dispatch (``torch.tensor``, lists as indices); and composite operators that must not be decomposed
(``special.LEAVES``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch

from graphrun.errors import GraphrunError
from graphrun.sim import autocast
from graphrun.sim.active import active, active_machine
from graphrun.sim.clock import Clock
from graphrun.sim.clock import TimelineName as Timeline
from graphrun.sim.dispatch import dispatch
from graphrun.sim.special import LEAVES, SPECIAL

try:  # experimental in PyTorch 2.13: it may move or change
    from torch.utils import backend_registration

    _setup: Any = backend_registration._setup_privateuseone_for_python_backend
except (ImportError, AttributeError):  # pragma: no cover - depends on the PyTorch that is installed
    _setup = None

NAME = "sim"


class SimStream:
    """``torch.sim.Stream``: a timeline of the active machine. A new stream is the copy timeline, on
    which ``non_blocking`` copies are asynchronous; the default stream is compute."""

    def __init__(self, device: Any = None, *, timeline: Timeline = "copy") -> None:
        self.timeline = timeline

    def synchronize(self) -> None:
        active_machine().join(self.timeline)

    def wait_stream(self, other: SimStream) -> None:
        machine = active_machine()
        machine.wait(self.timeline, machine.record(other.timeline))


class DeviceModule:
    """The module ``torch.sim``: device functions that PyTorch and pipelines call."""

    def __init__(self, *libraries: Any) -> None:
        self._libraries = libraries  # kernels are unregistered when these are freed

    def is_initialized(self) -> bool:
        """Return True: there is nothing to initialize."""
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        machine = active.get()
        return 1 if machine is None else len(machine.machines)

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: random numbers on ``sim`` come from the CPU's generator."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return the state of the CPU generator, for ``torch.random.fork_rng``."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes of ``torch.autocast("sim")`` (`graphrun.sim.autocast`)."""
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: Any = None) -> None:
        """Wait for all timelines of the active machine, if there is one."""
        machine = active.get()
        if machine is not None:
            machine.synchronize()

    Stream = SimStream

    def current_stream(self, device: Any = None) -> SimStream:
        return SimStream(timeline=active_machine().clock.current)

    def stream(self, stream: SimStream) -> AbstractContextManager[None]:
        clock: Clock = active_machine().clock
        return clock.use_stream(stream.timeline, synchronous=True)

    def empty_cache(self) -> None:
        """Do nothing: freed memory is available immediately."""

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return (free, capacity) of the active machine; without a limit, capacity is 2**62."""
        machine = active_machine(device)
        capacity = 2**62 if machine.capacity_bytes is None else machine.capacity_bytes
        return capacity - machine.allocated_bytes, capacity


def available() -> bool:
    """Return whether this PyTorch can have a device ``sim``: it supports backends in Python, and no
    other backend uses the one slot."""
    return _setup is not None and torch._C._get_privateuse1_backend_name() in (
        "privateuseone",
        NAME,
    )


@cache
def register() -> None:
    """Register ``torch.device("sim")``. Raises GraphrunError if that is impossible
    (`available`)."""
    if not available():
        backend = torch._C._get_privateuse1_backend_name()
        reason = (
            "it cannot host a backend written in Python"
            if _setup is None
            else f"its one backend slot is taken by {backend!r}"
        )
        raise GraphrunError(
            f"there is no simulated device in this PyTorch {torch.__version__}: {reason}; "
            "2.13 is known to work"
        )
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in (name.removeprefix("aten::") for name in (*SPECIAL, *sorted(LEAVES))):
        library.impl(name, _kernel(name), "PrivateUse1")
    _setup(NAME, backend_module=DeviceModule(library, *autocast.register()))


def _kernel(name: str) -> Any:
    packet, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return dispatch(func, (), args, kwargs)

    return kernel

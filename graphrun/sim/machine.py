"""A simulated accelerator: memory ledger, virtual clock, copy counters, and its context.

The context makes the machine active. Tensors and operators report allocations, FLOPs and copies to
the machine, which contains no operators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import Token
from math import inf
from types import TracebackType
from typing import Any, ClassVar

import torch

from graphrun.sim import flex
from graphrun.sim.active import active
from graphrun.sim.clock import Clock, TimelineName
from graphrun.sim.ledger import Ledger, Pages, positive
from graphrun.sim.ordering import Agent, Ordering
from graphrun.sim.register import register
from graphrun.units import show_size


class SimulatedCopyError(RuntimeError):
    """A copy between host and simulated device failed because a fault was injected."""


class Machine(Ledger):
    """A simulated accelerator. Tensors that are created on ``sim`` inside its context belong to it.

        capacity_bytes               hard limit; None for none
        h2d_bytes_per_second and
        d2h_bytes_per_second         bandwidths of the copy engine
        flops_per_second             of matrix products, convolutions and attention; other operators
                                     take no time on the device
        pageable_bytes_per_second    maximum bandwidth of copies from and to host memory that
                                     `page_lock` has not locked (None: no maximum); the host waits
                                     for such copies
        disk_bytes_per_second        of `read`
        launch_seconds               of the host, per kernel and copy
        copy_start_seconds           of the copy engine, per copy
        page_lock_seconds            to page-lock one byte
        fail_allocation, fail_copy   the n-th from now (1 is the next) fails, once, with
                                     SimulatedOutOfMemory or SimulatedCopyError
        check_ordering               whether to search for data races (`ordering`); None: the class
                                     attribute
        pages                        an allocator model; memory counts as the model reserves it
        sibling                      a machine of the same host. This machine is the next device,
                                     ``sim:1`` and so on; the context of the first machine activates
                                     all. Operators compute on one device; copies between two
                                     devices have the rate of the slower one

    ``hollow_bytes``: operators on larger tensors, and operators that create them from a size,
    allocate their results and compute nothing, for dry runs, whose values are not used; None (the
    default) computes everything. ``on_cut``: called with the operands, on the host, of each
    operator whose results have shapes that depend on values.

    Operators count on the machine of their inputs, also after the context is left; only new tensors
    need the context. Raises InputError for a size or rate that is not positive, and GraphrunError
    if the backend cannot be registered.
    """

    check_ordering: ClassVar[bool] = False
    unified = False  # operators also take tensors of the host

    def __init__(
        self,
        capacity_bytes: int | None = None,
        h2d_bytes_per_second: float = 1e9,
        d2h_bytes_per_second: float = 1e9,
        flops_per_second: float = 1e11,
        fail_allocation: int | None = None,
        fail_copy: int | None = None,
        pageable_bytes_per_second: float | None = None,
        disk_bytes_per_second: float = 1e9,
        check_ordering: bool | None = None,
        pages: Pages | None = None,
        launch_seconds: float = 0.0,
        copy_start_seconds: float = 0.0,
        page_lock_seconds: float = 0.0,
        sibling: Machine | None = None,
    ) -> None:
        super().__init__(capacity_bytes, fail_allocation, pages)
        self.h2d_bytes_per_second = positive("h2d_bytes_per_second", h2d_bytes_per_second)
        self.d2h_bytes_per_second = positive("d2h_bytes_per_second", d2h_bytes_per_second)
        self.pageable_bytes_per_second = positive(
            "pageable_bytes_per_second", pageable_bytes_per_second or inf
        )
        self.disk_bytes_per_second = positive("disk_bytes_per_second", disk_bytes_per_second)
        self.flops_per_second = positive("flops_per_second", flops_per_second)
        self.fail_copy = fail_copy
        # all machines of the host
        self.machines: list[Machine] = [] if sibling is None else sibling.machines
        self.machines.append(self)
        number = len(self.machines) - 1
        self.first_key = number << 40
        self.device, self.shell_device = self._devices(number)
        self.device_types: Collection[str] = {self.device.type, self.shell_device.type}
        self.name = str(self.device)
        self.clock: Clock = Clock(
            launch_seconds, copy_start_seconds, None if sibling is None else sibling.clock
        )
        self._page_lock_seconds = page_lock_seconds
        if sibling is None:
            self.ordering = (
                Ordering()
                if (self.check_ordering if check_ordering is None else check_ordering)
                else None
            )
        else:
            self.ordering = sibling.ordering
        self._agents = dict[str, Agent]() if self.ordering is None else self.ordering.agents(number)
        self.copies_in = self.copies_out = self.bytes_in = self.bytes_out = self.bytes_read = (
            self.charge_flops
        ) = 0
        self.bytes_across = 0
        self.hollow_bytes: int | None = None
        self.on_cut: Callable[[list[torch.Tensor]], None] | None = None
        self._token: Token[Any] | None = None

    def _devices(self, number: int) -> tuple[torch.device, torch.device]:
        """Return the device that tensors of machine ``number`` report, and the one in C++.
        Registers ``sim``."""
        register()
        device = torch.device("sim", number)
        return device, device

    def release(self, key: int, size: int) -> None:
        super().release(key, size)
        if self.ordering is not None:
            self.ordering.freed(key, size)

    def agent(self, stream: TimelineName | None = None) -> Agent:
        """Return the ordering checker's name of ``stream``; None: the current stream."""
        return self._agents[stream or self.clock.current]

    # -- copies and work

    @property
    def fail_copy(self) -> int | None:
        """n: the n-th copy from now, in either direction, fails, once. None: no copy fails."""
        return self._fail_copy_in

    @fail_copy.setter
    def fail_copy(self, count: int | None) -> None:
        self._fail_copy_in = positive("fail_copy", count)

    def copy_in(self, nbytes: int, non_blocking: bool = False, pageable: bool = True) -> bool:
        """Count and charge a copy to the device; return whether it blocks. Raises
        SimulatedCopyError."""
        self._maybe_fail(nbytes, "to")
        self.copies_in += 1
        self.bytes_in += nbytes
        return self._copy(nbytes, self.h2d_bytes_per_second, non_blocking, pageable)

    def read(self, nbytes: int) -> None:
        self.bytes_read += nbytes
        with self.clock.use_stream("disk"):
            self.clock.work(nbytes / self.disk_bytes_per_second)

    def copy_out(self, nbytes: int, non_blocking: bool = False, pageable: bool = True) -> bool:
        self._maybe_fail(nbytes, "from")
        self.copies_out += 1
        self.bytes_out += nbytes
        return self._copy(nbytes, self.d2h_bytes_per_second, non_blocking, pageable)

    def copy_across(self, nbytes: int, other: Machine) -> None:
        """Count and charge a copy of ``nbytes`` to ``other``. Raises SimulatedCopyError."""
        self._maybe_fail(nbytes, "from")
        other._maybe_fail(nbytes, "to")
        self.bytes_across += nbytes
        self.clock.transfer(
            other.clock, nbytes / min(self.d2h_bytes_per_second, other.h2d_bytes_per_second)
        )

    def _copy(
        self, nbytes: int, bytes_per_second: float, non_blocking: bool, pageable: bool
    ) -> bool:
        bytes_per_second = (
            min(bytes_per_second, self.pageable_bytes_per_second) if pageable else bytes_per_second
        )
        return self.clock.copy(nbytes / bytes_per_second, non_blocking, pageable)

    def page_lock(self, memory: torch.Tensor, *, in_background: bool = True) -> None:
        """Page-lock the storage of ``memory``, and charge the time to a thread or to the host."""
        memory.untyped_storage().graphrun_page_locked = True  # type: ignore[attr-defined]
        seconds = memory.nbytes * self._page_lock_seconds
        if in_background:
            with self.clock.use_stream("lock"):
                self.clock.work(seconds)
        else:
            self.clock.host_work(seconds)

    def _maybe_fail(self, nbytes: int, direction: str) -> None:
        if self._fail_copy_in is None:
            return
        self._fail_copy_in -= 1
        if self._fail_copy_in == 0:
            self._fail_copy_in = None
            raise SimulatedCopyError(
                f"sim: injected fault in a copy of {show_size(nbytes)} ({nbytes} bytes) "
                f"{direction} {self.name}"
            )

    def charge(self, flops: int) -> None:
        self.charge_flops += flops
        self.clock.work(flops / self.flops_per_second)

    # -- time

    def seconds(self, stream: TimelineName = "compute") -> float:
        return self.clock.seconds(stream)

    @contextmanager
    def on_copy_stream(self) -> Iterator[None]:
        """Charge copies inside the context to the copy timeline, asynchronously to compute. They
        are asynchronous to the host too if memory is page-locked."""
        with self.clock.use_stream("copy"):
            yield

    def record(self, stream: TimelineName = "compute") -> float:
        seconds = self.clock.record(stream)
        return seconds if self.ordering is None else self.ordering.mark(self.agent(stream), seconds)

    def wait(self, stream: TimelineName, event: float) -> None:
        """Start work issued to ``stream`` from now on after ``event``."""
        self.clock.wait(stream, event)
        if self.ordering is not None:
            self.ordering.wait(self.agent(stream), event)

    def synchronize(self) -> None:
        """Let the host wait for all timelines; they all continue from the latest time."""
        self.clock.synchronize()
        if self.ordering is not None:
            self.ordering.barrier(self.agent("compute"), self.agent("copy"))

    def join(self, stream: TimelineName) -> None:
        self.clock.join(stream)
        if self.ordering is not None:
            self.ordering.join(self.agent(stream))

    # -- being the active machine

    def __enter__(self) -> Machine:
        if active.get() is not None:
            raise RuntimeError(
                "a simulated machine is already active; leave its context before entering one"
            )
        self._token = active.set(self)
        flex.enter(id(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        token, self._token = self._token, None
        if token is not None:
            active.reset(token)
            flex.leave(id(self))

"""A simulated accelerator: memory ledger, virtual clock, copy counters, and the context that makes
it active.

Tensors and operators report allocations, FLOPs and copies to it; it knows no operators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import Token
from math import inf
from types import TracebackType
from typing import Any, ClassVar

import torch

from graphrun.sim.active import active
from graphrun.sim.clock import Clock, Stream
from graphrun.sim.ledger import Ledger, Pages, positive
from graphrun.sim.ordering import Agent, Ordering
from graphrun.sim.register import register
from graphrun.units import show_size


class SimulatedCopyError(RuntimeError):
    """A copy between host and simulated device failed because a fault was injected."""


class Machine(Ledger):
    """A simulated accelerator. Inside ``with machine:`` tensors created on device ``sim`` belong to
    it.

    ``capacity_bytes``: hard limit, None for none. Bandwidths in bytes per second, both of the copy
    engine; ``flops_per_second`` of matrix products, convolutions and attention (other operators
    take no time on the device). Copies from and to host memory that is not locked by `page_lock`
    are no faster than ``pageable_bytes_per_second`` (None: no slower), and the host waits for them;
    `read` charges the disk. ``launch_seconds``: of the host, for each kernel and copy.
    ``copy_start_seconds``: of the copy engine, for each copy. ``page_lock_seconds``: to page-lock
    one byte. ``fail_allocation`` and ``fail_copy``: the n-th from now (1 is the next) fails, once,
    with SimulatedOutOfMemory or SimulatedCopyError.

    ``hollow_bytes``: operators on larger tensors allocate their results and compute nothing, for
    dry runs, whose values are not used; None (the default) computes everything. ``on_cut``: called
    with the operands, on the host, of each operator whose results have shapes that depend on
    values.

    Operators count on the machine that holds their inputs, also after the context was left; only
    new tensors need the context. Raises InputError for a size or rate that is not positive,
    GraphrunError if the backend cannot be registered.

    ``beside``: a machine of the same host. This one is its next device, ``sim:1`` and so on; the
    context of the first makes all of them active. Operators compute on one device; copies between
    two take the rate of the slower one.

    ``check_ordering``: whether data races are looked for (`ordering`); None takes the class
    attribute. ``pages``: memory counts as this model of an allocator reserves it.
    """

    check_ordering: ClassVar[bool] = False

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
        beside: Machine | None = None,
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
        self.machines: list[Machine] = [] if beside is None else beside.machines  # all of the host
        self.machines.append(self)
        number = len(self.machines) - 1
        self.first_key = number << 40
        self.device, self.shell_device = self._devices(number)
        self.device_types: Collection[str] = {self.device.type, self.shell_device.type}
        self.name = str(self.device)
        self.clock: Clock = Clock(
            launch_seconds, copy_start_seconds, None if beside is None else beside.clock
        )
        self._page_lock_seconds = page_lock_seconds
        if beside is None:
            self.ordering = (
                Ordering()
                if (self.check_ordering if check_ordering is None else check_ordering)
                else None
            )
        else:
            self.ordering = beside.ordering
        self._agents = dict[str, Agent]() if self.ordering is None else self.ordering.agents(number)
        self.copies_in = self.copies_out = self.bytes_in = self.bytes_out = self.bytes_read = (
            self.charge_flops
        ) = 0
        self.bytes_across = 0
        self.hollow_bytes: int | None = None
        self.on_cut: Callable[[list[torch.Tensor]], None] | None = None
        self._token: Token[Any] | None = None

    def _devices(self, number: int) -> tuple[torch.device, torch.device]:
        """The device that tensors of machine ``number`` report, and the one that C++ sees.
        Registers ``sim``."""
        register()
        device = torch.device("sim", number)
        return device, device

    def release(self, key: int, size: int) -> None:
        """Stops counting storage ``key`` of ``size`` bytes."""
        super().release(key, size)
        if self.ordering is not None:
            self.ordering.freed(key, size)

    def agent(self, stream: Stream | None = None) -> Agent:
        """What the ordering checker calls ``stream``; None: the current one."""
        return self._agents[stream or self.clock.current]

    # -- copies and work

    @property
    def fail_copy(self) -> int | None:
        """n: the n-th copy from now, in either direction, fails, once. None: none fails."""
        return self._fail_copy_in

    @fail_copy.setter
    def fail_copy(self, count: int | None) -> None:
        self._fail_copy_in = positive("fail_copy", count)

    def copy_in(self, nbytes: int, non_blocking: bool = False, pageable: bool = True) -> bool:
        """Counts and charges a copy of ``nbytes`` to the device. Returns whether it was issued as a
        blocking one. Raises SimulatedCopyError for an injected fault."""
        self._maybe_fail(nbytes, "to")
        self.copies_in += 1
        self.bytes_in += nbytes
        return self._copy(nbytes, self.h2d_bytes_per_second, non_blocking, pageable)

    def read(self, nbytes: int) -> None:
        """Counts and charges a read of ``nbytes`` from disk."""
        self.bytes_read += nbytes
        with self.clock.on("disk"):
            self.clock.work(nbytes / self.disk_bytes_per_second)

    def copy_out(self, nbytes: int, non_blocking: bool = False, pageable: bool = True) -> bool:
        """As `copy_in`, for a copy of ``nbytes`` from the device."""
        self._maybe_fail(nbytes, "from")
        self.copies_out += 1
        self.bytes_out += nbytes
        return self._copy(nbytes, self.d2h_bytes_per_second, non_blocking, pageable)

    def copy_across(self, nbytes: int, other: Machine) -> None:
        """Counts and charges a copy of ``nbytes`` to ``other``. Raises SimulatedCopyError for an
        injected fault."""
        self._maybe_fail(nbytes, "from")
        other._maybe_fail(nbytes, "to")
        self.bytes_across += nbytes
        self.clock.cross(
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
        """Page-locks the storage of ``memory``; charges a thread for that, or else the host."""
        memory.untyped_storage().graphrun_page_locked = True  # type: ignore[attr-defined]
        seconds = memory.nbytes * self._page_lock_seconds
        if in_background:
            with self.clock.on("lock"):
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
                f"sim: injected fault in a copy of {show_size(nbytes)} ({nbytes} bytes) {direction} {self.name}"
            )

    def charge(self, flops: int) -> None:
        """Counts ``flops`` and charges them to the current stream."""
        self.charge_flops += flops
        self.clock.work(flops / self.flops_per_second)

    # -- time

    def seconds(self, stream: Stream = "compute") -> float:
        """Virtual time in seconds at which the work issued to ``stream`` so far is finished."""
        return self.clock.seconds(stream)

    @contextmanager
    def on_copy_stream(self) -> Iterator[None]:
        """Charges copies inside to the copy timeline, asynchronously to compute, and to the host
        where memory is page-locked."""
        with self.clock.on("copy"):
            yield

    def record(self, stream: Stream = "compute") -> float:
        """An event: the time at which all work issued to ``stream`` so far is finished."""
        seconds = self.clock.record(stream)
        return seconds if self.ordering is None else self.ordering.mark(self.agent(stream), seconds)

    def wait(self, stream: Stream, event: float) -> None:
        """Work issued to ``stream`` from now on starts after ``event``."""
        self.clock.wait(stream, event)
        if self.ordering is not None:
            self.ordering.wait(self.agent(stream), event)

    def synchronize(self) -> None:
        """The host waits for all timelines; they all continue from the latest time."""
        self.clock.synchronize()
        if self.ordering is not None:
            self.ordering.barrier(self.agent("compute"), self.agent("copy"))

    def join(self, stream: Stream) -> None:
        """The host waits for what was issued to ``stream`` so far."""
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

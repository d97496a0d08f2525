"""Decides what one simulated accelerator is: a ledger of memory, a clock, counters of copies, and which machine is active.

It must not know operators: tensors ask it for bytes and hand it FLOPs and copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Token
from types import TracebackType
from typing import ClassVar

import torch

from graphrun.sim.active import ActiveMachine, active
from graphrun.sim.clock import Clock, Stream
from graphrun.sim.ledger import Ledger, Listener, positive
from graphrun.sim.ordering import Ordering
from graphrun.sim.register import register
from graphrun.units import show_size


class SimulatedCopyError(RuntimeError):
    """A copy between host and simulated device failed because a fault was injected."""


class Machine:
    """A simulated accelerator. Inside ``with machine:`` tensors made on device ``sim`` are its own.

    ``capacity_bytes``: hard limit, None for none. Bandwidths in bytes per second, both of the copy engine; ``flops_per_second``
    of matrix products, convolutions and attention (all else costs no time). Copies inside `on_copy_stream` may be from pageable
    memory, at a rate of their own (None: the same); `read` charges the disk. ``fail_allocation`` and ``fail_copy``: the n-th from
    now (1 is the next) fails, once, with SimulatedOutOfMemory or SimulatedCopyError.

    ``hollow_bytes``: operators on larger tensors take their memory and compute nothing, for a dry run of which nobody reads the
    values; None (the default) computes everything.

    Operators count on the machine that holds their inputs, also after the context was left; only making new tensors needs the
    context. Raises InputError on a size or rate that is not positive, GraphrunError where the backend cannot be registered.

    ``check_ordering``: whether races between the host, the disk reader and the streams are looked for; None: as the class says.
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
    ) -> None:
        register()
        self.pageable_bytes_per_second = pageable_bytes_per_second or h2d_bytes_per_second
        for name, rate in (
            ("h2d_bytes_per_second", h2d_bytes_per_second),
            ("d2h_bytes_per_second", d2h_bytes_per_second),
            ("pageable_bytes_per_second", self.pageable_bytes_per_second),
            ("disk_bytes_per_second", disk_bytes_per_second),
        ):
            positive(name, rate)
        self.disk_bytes_per_second = disk_bytes_per_second
        self.bytes_read = 0
        self._pageable = False
        positive("flops_per_second", flops_per_second)
        self.device = torch.device("sim:0")
        self.ledger = Ledger()
        self.clock = Clock()
        self.ordering = Ordering() if (self.check_ordering if check_ordering is None else check_ordering) else None
        self.h2d_bytes_per_second = h2d_bytes_per_second
        self.d2h_bytes_per_second = d2h_bytes_per_second
        self.flops_per_second = flops_per_second
        self.copies_in = self.copies_out = 0
        self.bytes_in = self.bytes_out = 0
        self.charge_flops = 0
        self.capacity_bytes = capacity_bytes
        self.fail_allocation = fail_allocation
        self.fail_copy = fail_copy
        self.hollow_bytes: int | None = None
        self._token: Token[ActiveMachine | None] | None = None

    # -- memory

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes physically there, None for no limit. May be set at any time, also below what is allocated."""
        return self.ledger.capacity_bytes

    @capacity_bytes.setter
    def capacity_bytes(self, nbytes: int | None) -> None:
        if nbytes is not None:
            positive("capacity_bytes", nbytes)
        self.ledger.capacity_bytes = nbytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all storages that live now, each rounded up to 512."""
        return self.ledger.allocated_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated since the start or the last ``reset_peak``."""
        return self.ledger.peak_bytes

    def reset_peak(self) -> None:
        """Lets the peak start again from what is allocated now."""
        self.ledger.peak_bytes = self.ledger.allocated_bytes

    @property
    def allocations(self) -> int:
        """How many storages were allocated so far."""
        return self.ledger.allocations

    @property
    def listener(self) -> Listener | None:
        """Who is told of each allocation and free, in order; None for nobody."""
        return self.ledger.listener

    @listener.setter
    def listener(self, listener: Listener | None) -> None:
        self.ledger.listener = listener

    def live(self) -> list[tuple[int, tuple[int, ...], torch.dtype]]:
        """(nbytes, shape, dtype) of every storage that lives, largest first: what a leak report shows.

        Shape and dtype are those of the tensor that brought the storage into being.
        """
        return sorted(self.ledger.live.values(), key=lambda entry: -entry[0])

    @property
    def fail_allocation(self) -> int | None:
        """The n-th allocation from now fails (None: none will). Setting it counts from now; the fault happens once."""
        return self.ledger.fail_in

    @fail_allocation.setter
    def fail_allocation(self, count: int | None) -> None:
        if count is not None:
            positive("fail_allocation", count)
        self.ledger.fail_in = count

    # -- copies and work

    @property
    def fail_copy(self) -> int | None:
        """The n-th copy from now, in either direction, fails (None: none will). The fault happens once."""
        return self._fail_copy_in

    @fail_copy.setter
    def fail_copy(self, count: int | None) -> None:
        if count is not None:
            positive("fail_copy", count)
        self._fail_copy_in = count

    def copy_in(self, nbytes: int, non_blocking: bool = False) -> bool:
        """Counts and charges a copy of ``nbytes`` to the device that is about to happen, and whether the host waits for it. Raises
        SimulatedCopyError on a fault."""
        self._maybe_fail(nbytes, "to")
        self.copies_in += 1
        self.bytes_in += nbytes
        rate = self.pageable_bytes_per_second if self._pageable else self.h2d_bytes_per_second
        return self.clock.copy(nbytes / rate, non_blocking)

    def read(self, nbytes: int) -> None:
        """Counts and charges ``nbytes`` that are read from disk."""
        self.bytes_read += nbytes
        with self.clock.on("disk"):
            self.clock.work(nbytes / self.disk_bytes_per_second)

    def copy_out(self, nbytes: int, non_blocking: bool = False) -> bool:
        """The same for a copy of ``nbytes`` from the device."""
        self._maybe_fail(nbytes, "from")
        self.copies_out += 1
        self.bytes_out += nbytes
        return self.clock.copy(nbytes / self.d2h_bytes_per_second, non_blocking)

    def _maybe_fail(self, nbytes: int, direction: str) -> None:
        if self._fail_copy_in is None:
            return
        self._fail_copy_in -= 1
        if self._fail_copy_in == 0:
            self._fail_copy_in = None
            raise SimulatedCopyError(f"sim: injected fault in a copy of {show_size(nbytes)} ({nbytes} bytes) {direction} sim:0")

    def charge(self, flops: int) -> None:
        """Charges ``flops`` of device work to the current stream."""
        self.charge_flops += flops
        self.clock.work(flops / self.flops_per_second)

    # -- time

    def seconds(self, stream: Stream = "compute") -> float:
        """Virtual seconds at which the work issued to ``stream`` so far is finished."""
        return self.clock.seconds(stream)

    @contextmanager
    def on_copy_stream(self, pageable: bool = False) -> Iterator[None]:
        """Copies inside are charged to the copy timeline, asynchronous to compute and to the host."""
        self._pageable = pageable
        try:
            with self.clock.on("copy"):
                yield
        finally:
            self._pageable = False

    def record(self, stream: Stream = "compute") -> float:
        """An event: when everything issued to ``stream`` so far will be finished."""
        seconds = self.clock.record(stream)
        return seconds if self.ordering is None else self.ordering.mark(stream, seconds)

    def wait(self, stream: Stream, event: float) -> None:
        """What is issued to ``stream`` from now on starts after ``event``."""
        self.clock.wait(stream, event)
        if self.ordering is not None:
            self.ordering.wait(stream, event)

    def synchronize(self) -> None:
        """The host waits for all timelines; they continue from the latest of them."""
        self.clock.synchronize()
        if self.ordering is not None:
            self.ordering.barrier()

    def join(self, stream: Stream) -> None:
        """The host waits for what was issued to ``stream`` so far."""
        self.clock.join(stream)
        if self.ordering is not None:
            self.ordering.join(stream)

    # -- being the active machine

    def __enter__(self) -> Machine:
        if active.get() is not None:
            raise RuntimeError("a simulated machine is already active; leave its context before entering one")
        self._token = active.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        token, self._token = self._token, None
        if token is not None:
            active.reset(token)

"""Virtual clock of a simulated machine: a host timeline, a disk timeline and two device timelines,
advanced by work only.

Pure: works on seconds, knows no tensors and no memory.

    host     |-A-B-a-b---------------(waits)|--              advances by launches, and when it waits
    for the device compute    |=====A=====|=====B=====|====C===| copy     |==a==|==b==|      |==c==|
    starts when it is issued and what it waits for is done disk     |==r==|==s==|
    reads, as on a background thread of the host
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Stream = Literal["compute", "copy", "disk", "lock"]


class Clock:
    """Virtual seconds of the ``compute`` and the ``copy`` stream of the device, and of what runs on
    threads of the host: reads from ``disk``, and page locking (``lock``). All start at 0.

    Work in a stream starts when the stream is free and the host has launched it, which takes the
    host ``launch_seconds``. So the host is ahead of work that takes longer than its launch, until
    it waits: after a synchronous copy, and at ``synchronize``. A copy takes its stream
    ``copy_start_seconds`` beyond the time for its bytes. ``beside``: the clock of another device of
    the same host, with which the host and its threads are shared.
    """

    def __init__(
        self,
        launch_seconds: float = 0.0,
        copy_start_seconds: float = 0.0,
        beside: Clock | None = None,
    ) -> None:
        own: tuple[str, ...] = ("compute", "copy")
        self._host: dict[str, float] = (
            {"host": 0.0, "disk": 0.0, "lock": 0.0} if beside is None else beside._host
        )
        self._times: ChainMap[str, float] = ChainMap(dict.fromkeys(own, 0.0), self._host)
        self._launch_seconds, self._copy_start_seconds = launch_seconds, copy_start_seconds
        self._synchronous = True
        self.current: Stream = "compute"

    def seconds(self, stream: Stream = "compute") -> float:
        """Time at which the work issued to ``stream`` so far is finished."""
        return self._times[stream]

    def launch(self) -> None:
        """The host launches a kernel or a copy."""
        self.host_work(self._launch_seconds)

    def host_work(self, seconds: float) -> None:
        """Charges ``seconds`` to the host."""
        self._host["host"] += seconds

    def work(self, seconds: float) -> None:
        """Charges ``seconds`` to the current stream; the host does not wait."""
        self._set(self.current, max(self._times[self.current], self._host["host"]) + seconds)

    def copy(self, seconds: float, non_blocking: bool = False, pageable: bool = False) -> bool:
        """Charges a copy between host and device. Returns whether it was issued as a blocking one:
        it is not ``non_blocking``, and the stream was entered with ``synchronous``.

        The host waits for a blocking copy, and as on CUDA for one from or to ``pageable`` memory.
        That one is no promise: CUDA may return before the bytes have arrived (CUDA runtime API,
        "API synchronization behavior").
        """
        self.launch()
        self.work(self._copy_start_seconds + seconds)
        waits = self._synchronous and not non_blocking
        if waits or pageable:
            self.join(self.current)
        return waits

    @contextmanager
    def on(self, stream: Stream, synchronous: bool = False) -> Iterator[None]:
        """Work inside goes to ``stream``. With ``synchronous``, as at first, the host waits for
        copies that are not ``non_blocking``."""
        before = self.current, self._synchronous
        self.current, self._synchronous = stream, synchronous
        try:
            yield
        finally:
            self.current, self._synchronous = before

    def cross(self, other: Clock, seconds: float) -> None:
        """Charges a copy to the current streams of this device and of ``other``, which wait for
        each other before and after it; the host does not wait."""
        self.launch()
        begin = max(self._times[self.current], other._times[other.current], self._host["host"])
        for clock in (self, other):
            clock._set(clock.current, begin + self._copy_start_seconds + seconds)

    def join(self, stream: Stream) -> None:
        """The host waits for the work issued to ``stream`` so far."""
        self._host["host"] = max(self._host["host"], self._times[stream])

    def record(self, stream: Stream) -> float:
        """An event: the time at which all work issued to ``stream`` so far is finished."""
        return max(self._times[stream], self._host["host"])

    def wait(self, stream: Stream, event: float) -> None:
        """Work issued to ``stream`` from now on starts after ``event``. The host does not wait."""
        self._set(stream, max(self._times[stream], event))

    def synchronize(self) -> None:
        """The host waits for all streams."""
        now = max(self._times.values())
        for stream in self._times:
            self._set(stream, now)

    def _set(self, stream: str, seconds: float) -> None:
        (self._host if stream in self._host else self._times)[stream] = seconds

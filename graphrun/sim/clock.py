"""Virtual clock of a simulated machine: timelines of the host, the disk, and two device streams.

Only work advances the clock. Pure: seconds only, no tensors or memory.

    host     |-A-B-a-b---------------(waits)|--   advances by launches, and while it waits for the
                                                  device
    compute    |=====A=====|=====B=====|====C===|
    copy     |==a==|==b==|      |==c==|           a copy starts when it is issued and the events
                                                  that it waits for are done
    disk     |==r==|==s==|                        reads, as on a background thread of the host
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

TimelineName = Literal["compute", "copy", "disk", "lock"]


class Clock:
    """Virtual seconds of a device's ``compute`` and ``copy`` streams and of threads of the host.

    The host's threads are reads from ``disk`` and page locking (``lock``). All timelines start at
    0.

    Work in a stream starts when the stream is free and the host has launched it, which takes the
    host ``launch_seconds``. So the host is ahead of work that takes longer than its launch, until
    it waits: after a synchronous copy, and at ``synchronize``. A copy takes its stream
    ``copy_start_seconds`` in addition to the time for its bytes. ``sibling``: the clock of another
    device of the same host, whose host timelines are shared.
    """

    def __init__(
        self,
        launch_seconds: float = 0.0,
        copy_start_seconds: float = 0.0,
        sibling: Clock | None = None,
    ) -> None:
        device_streams: tuple[str, ...] = ("compute", "copy")
        self._host: dict[str, float] = (
            {"host": 0.0, "disk": 0.0, "lock": 0.0} if sibling is None else sibling._host
        )
        self._times: ChainMap[str, float] = ChainMap(dict.fromkeys(device_streams, 0.0), self._host)
        self._launch_seconds, self._copy_start_seconds = launch_seconds, copy_start_seconds
        self._synchronous = True
        self.current: TimelineName = "compute"

    def seconds(self, stream: TimelineName = "compute") -> float:
        """Return the time at which the work issued to ``stream`` so far is finished."""
        return self._times[stream]

    def launch(self) -> None:
        self.host_work(self._launch_seconds)

    def host_work(self, seconds: float) -> None:
        self._host["host"] += seconds

    def work(self, seconds: float) -> None:
        """Charge ``seconds`` to the current stream; the host does not wait."""
        self._set(self.current, max(self._times[self.current], self._host["host"]) + seconds)

    def copy(self, seconds: float, non_blocking: bool = False, pageable: bool = False) -> bool:
        """Charge a copy between host and device, and return whether it was issued as blocking.

        A blocking copy is not ``non_blocking``, and its stream was entered with ``synchronous``.
        The host waits for a blocking copy and, as on CUDA, for a copy from or to ``pageable``
        memory. CUDA does not guarantee the latter: it may return before the bytes have arrived
        (CUDA runtime API, "API synchronization behavior").
        """
        self.launch()
        self.work(self._copy_start_seconds + seconds)
        is_blocking = self._synchronous and not non_blocking
        if is_blocking or pageable:
            self.join(self.current)
        return is_blocking

    @contextmanager
    def use_stream(self, stream: TimelineName, synchronous: bool = False) -> Iterator[None]:
        """Issue work inside the context to ``stream``. With ``synchronous``, as initially, the host
        waits for copies that are not ``non_blocking``."""
        previous = self.current, self._synchronous
        self.current, self._synchronous = stream, synchronous
        try:
            yield
        finally:
            self.current, self._synchronous = previous

    def transfer(self, other: Clock, seconds: float) -> None:
        """Charge a copy to the current streams of this device and of ``other``. The streams wait
        for each other before and after the copy; the host does not wait."""
        self.launch()
        begin = max(self._times[self.current], other._times[other.current], self._host["host"])
        for clock in (self, other):
            clock._set(clock.current, begin + self._copy_start_seconds + seconds)

    def join(self, stream: TimelineName) -> None:
        """Let the host wait for the work issued to ``stream`` so far."""
        self._host["host"] = max(self._host["host"], self._times[stream])

    def record(self, stream: TimelineName) -> float:
        """Return an event: the time at which all work issued to ``stream`` so far is finished."""
        return max(self._times[stream], self._host["host"])

    def wait(self, stream: TimelineName, event: float) -> None:
        """Delay work that is issued to ``stream`` from now on until ``event``. The host goes on."""
        self._set(stream, max(self._times[stream], event))

    def synchronize(self) -> None:
        """Let the host wait for all streams."""
        latest = max(self._times.values())
        for stream in self._times:
            self._set(stream, latest)

    def _set(self, stream: str, seconds: float) -> None:
        (self._host if stream in self._host else self._times)[stream] = seconds

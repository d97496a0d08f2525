"""Virtual clock of a simulated machine: a host timeline, a disk timeline and two device timelines, advanced by work only.

Pure: works on seconds, knows no tensors and no memory.

    host     |--issue--issue-----------(waits)|--            advances only when it waits for the device
    compute  |=====A=====|=====B=====|====C===|
    copy     |==a==|==b==|      |==c==|                      starts when it is issued and what it waits for is done
    disk     |==r==|==s==|                                   reads, as on a background thread of the host
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Stream = Literal["compute", "copy", "disk"]


class Clock:
    """Virtual seconds of the ``compute``, the ``copy`` and the ``disk`` stream, all starting at 0.

    Work in a stream starts when the stream is free and the host has issued it. The host is ahead of the device (issuing costs
    nothing) until it waits: after a synchronous copy, and at ``synchronize``.
    """

    def __init__(self) -> None:
        self._times: dict[str, float] = {"compute": 0.0, "copy": 0.0, "disk": 0.0}
        self._host = 0.0
        self._synchronous = False
        self.current: Stream = "compute"

    def seconds(self, stream: Stream = "compute") -> float:
        """Time at which the work issued to ``stream`` so far is finished."""
        return self._times[stream]

    def work(self, seconds: float) -> None:
        """Charges ``seconds`` to the current stream; the host does not wait."""
        self._times[self.current] = max(self._times[self.current], self._host) + seconds

    def copy(self, seconds: float, non_blocking: bool = False) -> bool:
        """Charges a copy between host and device. It is asynchronous on the copy stream; otherwise the host waits for its end.
        Returns whether the host waits.

        If the stream was entered with ``synchronous``, only ``non_blocking`` copies are asynchronous, as on CUDA.
        """
        self.work(seconds)
        waits = self.current == "compute" or (self._synchronous and not non_blocking)
        if waits:
            self.join(self.current)
        return waits

    @contextmanager
    def on(self, stream: Stream, synchronous: bool = False) -> Iterator[None]:
        """Work inside goes to ``stream``. With ``synchronous``, the host waits for copies that are not ``non_blocking``."""
        before = self.current, self._synchronous
        self.current, self._synchronous = stream, synchronous
        try:
            yield
        finally:
            self.current, self._synchronous = before

    def join(self, stream: Stream) -> None:
        """The host waits for the work issued to ``stream`` so far."""
        self._host = max(self._host, self._times[stream])

    def record(self, stream: Stream) -> float:
        """An event: the time at which all work issued to ``stream`` so far is finished."""
        return max(self._times[stream], self._host)

    def wait(self, stream: Stream, event: float) -> None:
        """Work issued to ``stream`` from now on starts after ``event``. The host does not wait."""
        self._times[stream] = max(self._times[stream], event)

    def synchronize(self) -> None:
        """The host waits for all streams."""
        self._host = max(self._host, *self._times.values())
        self._times = dict.fromkeys(self._times, self._host)

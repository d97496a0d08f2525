"""What one device of a placement does: runs of its stages, with values from other devices; as bytes
in and bytes out."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from graphrun import errors
from graphrun.batch.cache.pack import pack, unpack
from graphrun.batch.running import Running
from graphrun.batch.schedule import Segment
from graphrun.graph.graph import Reference
from graphrun.ops.outlines import outlined
from graphrun.runtime.devices.open import open_device
from graphrun.trace import Trace


class LostValue(Exception):
    """A value that another device made is gone."""


class Visit(NamedTuple):
    """An item in a run: it goes through ``stages``, one part of the device's, with resolved
    ``inputs``. ``values`` are what other workers made for it, as the crew names them."""

    stages: tuple[str, ...]
    inputs: Mapping[str, Any]
    values: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Report:
    """What a run took: ``seconds`` of the device's clock, and the ``trace`` without outputs. It
    begins with what was loaded ahead, which took ``ahead_seconds`` more.

    ``lost``: (number of the visit, of its value) of what was gone, ``error``: type and text of the
    error; nothing was made then.
    """

    seconds: float = 0.0
    trace: Trace | None = None
    lost: tuple[tuple[int, int], ...] = ()
    ahead_seconds: float = 0.0
    error: tuple[str, str] | None = None

    def require(self) -> None:
        """Raises the run's error."""
        if self.error is not None:
            kind = getattr(errors, self.error[0], errors.GraphrunError)
            raise kind(self.error[1])


def _is_given(of: Reference, stages: Collection[str]) -> bool:
    return of.kind == "stage" and of.name not in stages


class Worker:
    """A session of ``segment`` on the device or devices that its plan is for, of which this process
    is the only user. ``name``: of these in messages. Nothing is built before the first run."""

    def __init__(
        self, segment: Segment, name: str, modules: Mapping[str, Any] | None = None
    ) -> None:
        self._segment, self._name, self._modules = segment, name, modules
        self._running: Running | None = None
        self._ahead_seconds = 0.0

    def load_ahead(self) -> Report:
        """Loads what the first run begins with, before its values are there; nothing after a run.
        An error is left to that run: it begins with an empty device and may plan again."""
        try:
            running = self._open()
            begin = self._clock(running)
            running.load_ahead()
            self._ahead_seconds = self._clock(running) - begin
            return Report(self._ahead_seconds)
        except errors.GraphrunError:
            return Report()

    def run(self, visits: Sequence[Visit]) -> tuple[list[bytes], Report]:
        """One run of ``visits``, the values of which return what other workers made, or raise
        LostValue. Returns what was made in each: outputs of its stages, which
        `graphrun.batch.cache.pack` unpacks; and the report."""
        nothing = [b""] * len(visits)
        lost, precomputed, outlines_of = (
            list[tuple[int, int]](),
            dict[str, Any](),
            dict[str, dict[str, Any]](),
        )
        elsewhere = {str(of)[1:] for of in self._segment.graph.precomputed}
        for at, visit in enumerate(visits):
            found = dict[str, Any]()
            for number, value in enumerate(visit.values):
                try:
                    found |= unpack(value())
                except LostValue:
                    lost.append((at, number))
            for stage in visit.stages if not lost else ():
                read = [
                    str(of)[1:]
                    for of in self._segment.graph.stage(stage).references
                    if _is_given(of, visit.stages)
                ]
                precomputed |= {name: found[name] for name in read if name in elsewhere}
                outlines_of[stage] = {
                    name: outlined(found[name]) for name in read if name not in elsewhere
                }
        if lost:
            return nothing, Report(lost=tuple(lost))
        try:
            running = self._open()
            ahead, begin = (
                self._ahead_seconds if running.loaded_ahead else 0.0,
                self._clock(running),
            )
            inputs_of = {stage: visit.inputs for visit in visits for stage in visit.stages}
            trace = running.run(
                visits[0].inputs,
                precomputed=precomputed,
                inputs_of=inputs_of,
                outlines_of=outlines_of,
            )
            report = Report(
                self._clock(running) - begin, replace(trace, outputs={}), ahead_seconds=ahead
            )
            outputs = self._segment.graph.outputs
            made = [
                {
                    name: of
                    for name, of in trace.outputs.items()
                    if outputs[name].name in visit.stages
                }
                for visit in visits
            ]
            return [pack(of) for of in made], report
        except errors.GraphrunError as error:
            return nothing, Report(error=(type(error).__name__, f"device {self._name}: {error}"))

    def close(self) -> None:
        """Leaves the device empty."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _open(self) -> Running:
        if self._running is None:
            self._running = Running(
                self._segment, open_device(self._segment.solution.problem), self._modules
            )
        return self._running

    @staticmethod
    def _clock(running: Running) -> float:
        """Seconds, with everything done that was begun: virtual ones on the simulated device."""
        if running.device.name != "sim":
            return time.perf_counter()  # a run ends with a barrier
        running.device.barrier()
        return running.device.seconds_at(running.device.mark("compute"))

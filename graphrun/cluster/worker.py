"""One device of a placement: run its stages with values from other devices, exchanged as bytes."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from graphrun import errors
from graphrun.batch.cache.pack import pack, unpack
from graphrun.batch.running import Running
from graphrun.batch.schedule import StageSegment
from graphrun.device_kinds import kind_called
from graphrun.graph.parts import Reference
from graphrun.ops.outlines import outline_tensors
from graphrun.runtime.devices.open import open_device
from graphrun.trace import Trace


class LostValue(Exception):
    """A value that another device made is lost."""


class Visit(NamedTuple):
    """An item in a run: it passes ``stages``, one part of the device, with resolved ``inputs``.
    ``values``: results of other workers for the item, as handles of the crew."""

    stages: tuple[str, ...]
    inputs: Mapping[str, Any]
    values: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a run: ``seconds`` of the device's clock, and the ``trace`` without outputs.

    Before it, blocks were loaded ahead in ``ahead_seconds``. ``lost_values``: (visit number, value
    number) of each lost value. ``error``: type and text. A run with lost values or an error has no
    results. ``process``: id of the process that made the report; 0: unknown.
    """

    seconds: float = 0.0
    trace: Trace | None = None
    lost_values: tuple[tuple[int, int], ...] = ()
    ahead_seconds: float = 0.0
    error: tuple[str, str] | None = None
    process: int = 0

    def require(self) -> None:
        if self.error is not None:
            kind = getattr(errors, self.error[0], errors.GraphrunError)
            raise kind(self.error[1])


def _is_given(reference: Reference, stages: Collection[str]) -> bool:
    return reference.kind == "stage" and reference.name not in stages


class StageWorker:
    """A session of ``segment`` on the devices of its plan, which no other process may use.
    ``name``: of the devices, in messages. Nothing is built before the first run."""

    def __init__(
        self, segment: StageSegment, name: str, modules: Mapping[str, Any] | None = None
    ) -> None:
        self._segment, self._name, self._modules = segment, name, modules
        self._segment_run: Running | None = None
        self._ahead_seconds = 0.0

    def load_ahead(self) -> Report:
        """Load the blocks of the first run before its values arrive. Do nothing after a run. Errors
        are ignored: the first run starts with an empty device and may plan again."""
        try:
            segment_run = self._open()
            begin = self._clock(segment_run)
            segment_run.load_ahead()
            self._ahead_seconds = self._clock(segment_run) - begin
            return Report(self._ahead_seconds)
        except errors.GraphrunError:
            return Report()

    def run(self, visits: Sequence[Visit]) -> tuple[list[bytes], Report]:
        """Run ``visits`` once. Their values are functions that return results or raise LostValue.

        Return the outputs of each visit's stages, for `graphrun.batch.cache.pack.unpack`, and the
        report.
        """
        nothing = [b""] * len(visits)
        lost_values, precomputed, outlines_of = (
            list[tuple[int, int]](),
            dict[str, Any](),
            dict[str, dict[str, Any]](),
        )
        precomputed_names = {str(reference)[1:] for reference in self._segment.graph.precomputed}
        for index, visit in enumerate(visits):
            values = dict[str, Any]()
            for number, value in enumerate(visit.values):
                try:
                    values |= unpack(value())
                except LostValue:
                    lost_values.append((index, number))
            for stage in visit.stages if not lost_values else ():
                names = [
                    str(reference)[1:]
                    for reference in self._segment.graph.stage(stage).references
                    if _is_given(reference, visit.stages)
                ]
                precomputed |= {name: values[name] for name in names if name in precomputed_names}
                outlines_of[stage] = {
                    name: outline_tensors(values[name])
                    for name in names
                    if name not in precomputed_names
                }
        if lost_values:
            return nothing, Report(lost_values=tuple(lost_values))
        try:
            segment_run = self._open()
            ahead_seconds, begin = (
                self._ahead_seconds if segment_run.loaded_ahead else 0.0,
                self._clock(segment_run),
            )
            inputs_of = {stage: visit.inputs for visit in visits for stage in visit.stages}
            trace = segment_run.run(
                visits[0].inputs,
                precomputed=precomputed,
                inputs_of=inputs_of,
                outlines_of=outlines_of,
            )
            report = Report(
                self._clock(segment_run) - begin,
                replace(trace, outputs={}),
                ahead_seconds=ahead_seconds,
            )
            outputs = self._segment.graph.outputs
            visit_outputs = [
                {
                    name: value
                    for name, value in trace.outputs.items()
                    if outputs[name].name in visit.stages
                }
                for visit in visits
            ]
            return [pack(contents) for contents in visit_outputs], report
        except errors.GraphrunError as error:
            return nothing, Report(error=(type(error).__name__, f"device {self._name}: {error}"))

    def close(self) -> None:
        if self._segment_run is not None:
            self._segment_run.close()
            self._segment_run = None

    def _open(self) -> Running:
        if self._segment_run is None:
            self._segment_run = Running(
                self._segment, open_device(self._segment.solution.problem), self._modules
            )
        return self._segment_run

    @staticmethod
    def _clock(segment_run: Running) -> float:
        """Return the device's clock once all started work is done; virtual on the simulated
        device."""
        if not kind_called(segment_run.device.name).has_virtual_clock:
            return time.perf_counter()  # a run ends with a barrier
        segment_run.device.barrier()
        return segment_run.device.seconds_at(segment_run.device.mark("compute"))

"""Run requests of one shape as a batch, stage by stage, with `graphrun.batch.queue`.

Also defines the saved state of every run. Only the worker process imports this module, because it
imports torch. Each run of a batch reports its steps and can be cancelled. A run that fails in the
batch runs by itself afterwards.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graphrun import api
from graphrun.batch.cache.reuse import reuse_for
from graphrun.batch.journal import Journal, RequestJournal
from graphrun.batch.queue import BatchContext, run_requests
from graphrun.batch.requests import Request
from graphrun.batch.schedule import StageSegment
from graphrun.batch.watch import LeftOut, Watcher
from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.ops.pipeline import frames_per_second
from graphrun.report.outputs import FPS, provenance, save_outputs
from graphrun.runtime.host import Host
from graphrun.serve.bodies import VIDEO
from graphrun.serve.log import note
from graphrun.trace import Overrun, Trace

PREVIEW_SECONDS = 0.5  # least time between previews


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Run ``number`` of request ``id``. ``folder``: for its state and its pictures. ``loras``: for
    the metadata of the pictures, with their scales."""

    id: str
    number: int
    inputs: Mapping[str, Any]
    folder: Path
    suffix: str
    preview: bool
    loras: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True)
class RunFigures:
    """The planned and measured numbers of a run, in total and by stage, on the device's clock.
    Peaks are of the whole device, other sessions included."""

    stages: dict[str, tuple[float, float]] = field(default_factory=dict)
    seconds: tuple[float, float] = (0.0, 0.0)
    peak_bytes: tuple[int, int] = (0, 0)
    plan: str = ""
    notes: tuple[str, ...] = ()
    overruns: tuple[Overrun, ...] = ()

    def add(self, trace: Trace, solution: Solution, is_warm: bool, others_bytes: int) -> None:
        """Add a run of ``solution``. ``is_warm``: the weights of the previous run were on the
        device. ``others_bytes``: device memory of other sessions."""
        simulation, stage_of = (
            solution.simulation,
            {phase.name: phase.stage for phase in solution.chosen.phases},
        )
        planned_slots = (
            simulation.further_slots if is_warm and simulation.further_slots else simulation.slots
        )
        seconds: dict[str, list[float]] = {}
        durations = [(slot.phase, 0, slot.seconds) for slot in planned_slots]
        durations += [
            (slot.phase, 1, slot.end_seconds - slot.start_seconds) for slot in trace.slots
        ]
        for phase, index, slot_seconds in durations:
            if (stage := stage_of.get(phase)) is not None:
                seconds.setdefault(stage, [0.0, 0.0])[index] += slot_seconds
        overhead_bytes = solution.problem.overhead_bytes - solution.problem.reserve_bytes
        peaks = (
            overhead_bytes + others_bytes + simulation.peak_bytes,
            overhead_bytes + trace.peak_bytes,
        )
        self.stages |= {stage: (pair[0], pair[1]) for stage, pair in seconds.items()}
        self.seconds = (
            self.seconds[0] + sum(slot.seconds for slot in planned_slots),
            self.seconds[1] + trace.seconds,
        )
        self.peak_bytes = max(self.peak_bytes[0], peaks[0]), max(self.peak_bytes[1], peaks[1])
        self.plan, self.notes = solution.plan.digest, (*self.notes, *trace.notes)
        self.overruns += trace.overruns


def save_pictures(
    run: RunRequest,
    outputs: Mapping[str, Any],
    graph: Graph,
    version: str,
    figures: RunFigures,
    problem: str,
) -> dict[str, Any]:
    """Save the pictures or the video among ``outputs``; return the fields of the message to the
    server. ``problem``: the digest for the metadata of the files."""
    kinds = graph.kinds()
    pictures = {name: value for name, value in outputs.items() if kinds[name] in ("image", "video")}
    metadata = provenance(graph.name, run.inputs, problem, version)
    if run.loras:
        metadata["loras"] = dict(run.loras)
    fps = frames_per_second(graph, run.inputs) if run.suffix == VIDEO else None
    path = run.folder / f"picture{run.suffix}"
    files = save_outputs(pictures, path, fps or FPS, source=metadata, rescues=False)
    names = ("stages", "seconds", "peak_bytes", "plan", "notes", "overruns")
    entries = {name: getattr(figures, name) for name in names}
    return {"files": list(files), **entries}


class Keeper(RequestJournal):
    """The saved state of a run. Reports each step, with a preview if the request wants one.

    A run whose state cannot be written, for instance to a full disk, goes on without it.
    """

    def __init__(self, run: RunRequest, notify: Callable[..., None]) -> None:
        super().__init__(run.folder)
        self._notify, self._preview = notify, run.preview
        self._aspect = float(run.inputs.get("height") or 1) / float(run.inputs.get("width") or 1)
        self._last_preview, self._has_noted = 0.0, False

    def wants(self, stage: str, step: int, steps: int) -> bool:
        """Report the step. Return whether to save the state: a loop can only resume with two or
        more steps left (`graphrun.Session.submit`)."""
        self._notify(stage=stage, done=step, steps=steps)
        return step <= steps - 2

    def save(self, stage: str, state: Any) -> None:
        try:
            super().save(stage, state)
        except InputError as error:
            if not self._has_noted:
                note(str(error))
            self._has_noted = True
        if self._preview and time.monotonic() - self._last_preview >= PREVIEW_SECONDS:
            from graphrun.report.preview import preview_of

            self._last_preview, file = time.monotonic(), io.BytesIO()
            preview_of(state.latents, self._aspect).save(file, format="PNG")
            self._notify(
                stage=stage, done=state.finished_steps, steps=state.steps, preview=file.getvalue()
            )

    def values(self, stage: str) -> None:
        """Return None: a resumed run recomputes the stages before its loop."""

    def keep(self, stage: str, outputs: Mapping[str, Any]) -> None:
        self.forget(stage)

    def finish(self, files: Iterable[Path]) -> None:
        """Do nothing: the server deletes the folder."""


class _Keepers(Journal):
    """The saved states of the runs of a batch, each in its own folder."""

    def __init__(self, keepers: Sequence[Keeper]) -> None:
        self._keepers = keepers

    def close(self) -> None:
        """Do nothing: nothing is locked."""

    def require(self, entries: Mapping[str, str], kind: str = "") -> None:
        """Do nothing: the folders are new, so there is nothing to compare."""

    def request(self, number: int) -> Keeper:
        """Return the state of run ``number``, counted from 1."""
        return self._keepers[number - 1]


class _RunWatcher(Watcher):
    """Reports how each run of a batch ended."""

    def __init__(
        self,
        runs: Sequence[RunRequest],
        send: Callable[..., None],
        is_cancelled: Callable[[str], bool],
        others_bytes: int,
    ) -> None:
        self._runs, self._send, self._is_cancelled, self._others_bytes = (
            runs,
            send,
            is_cancelled,
            others_bytes,
        )
        self._figures = [RunFigures() for _ in runs]
        self._is_warm = self._is_active = False

    def figures_of(self, request: Request) -> RunFigures:
        return self._figures[request.number - 1]

    def segment(self, segment: StageSegment, runs: int) -> None:
        self._is_warm = False

    def run(self, segment: StageSegment, request: Request) -> Callable[[int, int, int], None]:
        run = self._runs[request.number - 1]

        def progress(*_: int) -> None:
            if self._is_cancelled(run.id):
                raise LeftOut("cancelled")

        progress()
        self._is_active = True
        self._send("begins", id=run.id)
        return progress

    def ran(self, segment: StageSegment, requests: Sequence[Request], trace: Trace) -> None:
        for request in requests:
            self.figures_of(request).add(trace, segment.solution, self._is_warm, self._others_bytes)
        self._is_warm, self._is_active = True, False

    def left_out(self, request: Request) -> None:
        # an aborted run leaves an empty device
        self._is_warm, self._is_active = (
            self._is_warm and not self._is_active,
            False,
        )
        run = self._runs[request.number - 1]
        self._send(
            "cancelled" if self._is_cancelled(run.id) else "apart",
            id=run.id,
            number=run.number,
        )


def run_together(
    runs: Sequence[RunRequest],
    graph: Graph,
    segments: tuple[tuple[str, ...], ...],
    arguments: Mapping[str, Any],
    host: Host,
    reuse: Any,
    send: Callable[..., None],
    is_cancelled: Callable[[str], bool],
    version: str,
    others_bytes: int,
) -> None:
    """Run ``runs``, all of one shape, as a batch in ``segments``.

    Sends ``begins`` and ``step`` messages, and one message at the end of each run: ``done`` (id,
    number, ...), ``cancelled``, or ``apart`` if the run failed in the batch. ``arguments``: of
    `graphrun.estimate`, with the open device. ``host``: backing stores of the whole graph.
    """
    budgets = dict(arguments)
    device, cache, cards = budgets.pop("device"), budgets["cache"], budgets["hardware"]
    allow = graph.allowed(budgets.get("allow", ()))
    watching = _RunWatcher(runs, send, is_cancelled, others_bytes)

    def solve(problem: Problem) -> Solution:
        return api.plan(session_of(problem), cache=cache)

    def sink(request: Request, outputs: Mapping[str, Any]) -> list[Path]:
        run, figures = runs[request.number - 1], watching.figures_of(request)
        entries = save_pictures(run, outputs, graph, version, figures, figures.plan)
        send("done", id=run.id, number=run.number, **entries)
        return []

    def notify_of(id: str) -> Callable[..., None]:
        return lambda **content: send("step", id=id, **content)

    context = BatchContext(
        estimate=lambda values: api.estimate(graph, inputs=values, **budgets, runs=api.RUNS),
        solve=solve,
        device_name=cards[0].label,
        reuse=None
        if reuse == "none"
        else lambda values: reuse_for(graph, values, cards[0].label, cache, reuse, allow, None),
        modules=None,
        journal=_Keepers([Keeper(run, notify_of(run.id)) for run in runs]),
        device=device,
        sink=sink,
        watcher=watching,
        strict=False,
        segments=segments,
        host=host,
    )
    run_requests(
        graph, [Request(number, run.inputs) for number, run in enumerate(runs, 1)], context
    )


def session_of(problem: Problem) -> Problem:
    """Return ``problem`` as the session of all requests, which is planned only once."""
    return replace(problem, runs=api.RUNS)

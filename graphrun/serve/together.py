"""Runs of one shape that go together, stage by stage, as lists of requests do
(`graphrun.batch.queue`); and what every run of a server keeps on disk. In the worker process alone:
it imports torch.

Each run tells its steps and is cancelled as one by itself is. What cannot end here is left to run
by itself.
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
from graphrun.batch.schedule import Segment
from graphrun.batch.watch import LeftOut, Watcher
from graphrun.graph.graph import Graph
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.report.outputs import made_of, save_outputs
from graphrun.runtime.host import Host
from graphrun.trace import Overrun, Trace

PREVIEW_SECONDS = 0.5  # at least, from one preview to the next


@dataclass(frozen=True, slots=True)
class Asked:
    """A run: the ``number``-th of request ``id``, whose state and pictures are in ``folder``."""

    id: str
    number: int
    inputs: Mapping[str, Any]
    folder: Path
    suffix: str
    preview: bool


@dataclass(slots=True)
class Measured:
    """What a run took, in all and by stage, beside what was planned; seconds of the device's clock.
    Peaks are of the device, with those of other sessions."""

    stages: dict[str, tuple[float, float]] = field(default_factory=dict)
    seconds: tuple[float, float] = (0.0, 0.0)
    peak_bytes: tuple[int, int] = (0, 0)
    plan: str = ""
    notes: tuple[str, ...] = ()
    overruns: tuple[Overrun, ...] = ()

    def add(self, trace: Trace, solution: Solution, again: bool, others_bytes: int) -> None:
        """Adds a run by ``solution``. ``again``: it found the weights of the run before.
        ``others_bytes``: of other sessions."""
        simulation, stage_of = (
            solution.simulation,
            {phase.name: phase.stage for phase in solution.chosen.phases},
        )
        planned = simulation.again if again and simulation.again else simulation.slots
        seconds: dict[str, list[float]] = {}
        took = [(slot.phase, 0, slot.seconds) for slot in planned]
        took += [(slot.phase, 1, slot.end_seconds - slot.start_seconds) for slot in trace.slots]
        for phase, column, each in took:
            if (stage := stage_of.get(phase)) is not None:
                seconds.setdefault(stage, [0.0, 0.0])[column] += each
        overhead_bytes = solution.problem.overhead_bytes - solution.problem.reserve_bytes
        peaks = (
            overhead_bytes + others_bytes + simulation.peak_bytes,
            overhead_bytes + trace.peak_bytes,
        )
        self.stages |= {stage: (pair[0], pair[1]) for stage, pair in seconds.items()}
        self.seconds = (
            self.seconds[0] + sum(slot.seconds for slot in planned),
            self.seconds[1] + trace.seconds,
        )
        self.peak_bytes = max(self.peak_bytes[0], peaks[0]), max(self.peak_bytes[1], peaks[1])
        self.plan, self.notes = solution.plan.digest, (*self.notes, *trace.notes)
        self.overruns += trace.overruns


def saved(
    asked: Asked,
    outputs: Mapping[str, Any],
    graph: Graph,
    version: str,
    measured: Measured,
    problem: str,
) -> dict[str, Any]:
    """Saves the pictures among ``outputs``. Returns what the server is told. ``problem``: digest,
    for the metadata."""
    pictures = {name: value for name, value in outputs.items() if graph.kinds()[name] == "image"}
    about = made_of(graph.name, asked.inputs, problem, version)
    files = save_outputs(pictures, asked.folder / f"picture{asked.suffix}", made_of=about)
    names = ("stages", "seconds", "peak_bytes", "plan", "notes", "overruns")
    told = {name: getattr(measured, name) for name in names}
    return {"files": list(files), **told}


class Keeper(RequestJournal):
    """The state of a run on disk, which tells each step, with a preview where that is wanted."""

    def __init__(self, asked: Asked, tell: Callable[..., None]) -> None:
        super().__init__(asked.folder)
        self._tell, self._preview = tell, asked.preview
        self._aspect = float(asked.inputs.get("height") or 1) / float(
            asked.inputs.get("width") or 1
        )
        self._shown = 0.0

    def wants(self, stage: str, done: int, steps: int) -> bool:
        """Tells the step. A loop resumes with two steps or more (`graphrun.Session.submit`)."""
        self._tell(stage=stage, done=done, steps=steps)
        return done <= steps - 2

    def save(self, stage: str, state: Any) -> None:
        """Saves ``state``, and shows it."""
        super().save(stage, state)
        if self._preview and time.monotonic() - self._shown >= PREVIEW_SECONDS:
            from graphrun.report.preview import preview_of

            self._shown, file = time.monotonic(), io.BytesIO()
            preview_of(state.latents, self._aspect).save(file, format="PNG")
            self._tell(stage=stage, done=state.done, steps=state.steps, preview=file.getvalue())

    def values(self, stage: str) -> None:
        """None: a run that was interrupted goes on by itself, and computes what is before its loop
        again."""

    def keep(self, stage: str, outputs: Mapping[str, Any]) -> None:
        """Deletes the state of the loop of ``stage``."""
        self.forget(stage)

    def finish(self, files: Iterable[Path]) -> None:
        """Nothing: the server deletes the folder."""


class _Keepers(Journal):
    """The state of runs that go together, each in its own folder."""

    def __init__(self, keepers: Sequence[Keeper]) -> None:
        self._keepers = keepers

    def close(self) -> None:
        """Nothing is locked."""

    def require(self, entries: Mapping[str, str], kind: str = "") -> None:
        """Nothing to compare: these folders are new."""

    def request(self, number: int) -> Keeper:
        """The state of run ``number``, from 1."""
        return self._keepers[number - 1]


class _Watching(Watcher):
    """Sends how each run ended."""

    def __init__(
        self,
        every: Sequence[Asked],
        send: Callable[..., None],
        is_cancelled: Callable[[str], bool],
        others: int,
    ) -> None:
        self._every, self._send, self._is_cancelled, self._others_bytes = (
            every,
            send,
            is_cancelled,
            others,
        )
        self._measured = [Measured() for _ in every]
        self._again = self._begun = False

    def measured(self, request: Request) -> Measured:
        """What ``request`` took until now."""
        return self._measured[request.number - 1]

    def segment(self, segment: Segment, runs: int) -> None:
        self._again = False

    def run(self, segment: Segment, request: Request) -> Callable[[int, int, int], None]:
        asked = self._every[request.number - 1]

        def progress(*_: int) -> None:
            if self._is_cancelled(asked.id):
                raise LeftOut("cancelled")

        progress()
        self._begun = True
        self._send("begins", id=asked.id)
        return progress

    def ran(self, segment: Segment, requests: Sequence[Request], trace: Trace) -> None:
        for request in requests:
            self.measured(request).add(trace, segment.solution, self._again, self._others_bytes)
        self._again, self._begun = True, False

    def left_out(self, request: Request) -> None:
        # a run that breaks off leaves an empty device
        self._again, self._begun = (
            self._again and not self._begun,
            False,
        )
        asked = self._every[request.number - 1]
        self._send(
            "cancelled" if self._is_cancelled(asked.id) else "apart",
            id=asked.id,
            number=asked.number,
        )


def run_together(
    every: Sequence[Asked],
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
    """Runs ``every`` of one shape by ``segments``. Sends ``begins``, ``step``, and at the end of
    each ``done`` (id, number, ...), ``cancelled``, or ``apart`` where it failed here.
    ``arguments``: of `graphrun.estimate`, with the open device. ``host``: backing stores of the
    whole graph."""
    budgets = dict(arguments)
    device, cache, cards = budgets.pop("device"), budgets["cache"], budgets["hardware"]
    allow = graph.allowed(budgets.get("allow", ()))
    watching = _Watching(every, send, is_cancelled, others_bytes)

    def solve(problem: Problem) -> Solution:
        return api.plan(session_of(problem), cache=cache)

    def sink(request: Request, outputs: Mapping[str, Any]) -> list[Path]:
        asked, measured = every[request.number - 1], watching.measured(request)
        told = saved(asked, outputs, graph, version, measured, measured.plan)
        send("done", id=asked.id, number=asked.number, **told)
        return []

    def tell(id: str) -> Callable[..., None]:
        return lambda **content: send("step", id=id, **content)

    context = BatchContext(
        estimate=lambda values: api.estimate(graph, inputs=values, **budgets, runs=api.RUNS),
        solve=solve,
        device_name=cards[0].label,
        reuse=None
        if reuse == "none"
        else lambda values: reuse_for(graph, values, cards[0].label, cache, reuse, allow, None),
        modules=None,
        journal=_Keepers([Keeper(asked, tell(asked.id)) for asked in every]),
        device=device,
        sink=sink,
        watcher=watching,
        strict=False,
        segments=segments,
        host=host,
    )
    run_requests(
        graph, [Request(number, asked.inputs) for number, asked in enumerate(every, 1)], context
    )


def session_of(problem: Problem) -> Problem:
    """``problem`` of a session as all of a server's are, however many runs go together: planned
    once."""
    return replace(problem, runs=api.RUNS)

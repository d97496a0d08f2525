"""The command ``run``: one run of a graph or a saved plan, or one for every line of a file; planned beside measured.

The first interrupt ends a run at the end of its step, a second one at once.
"""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphrun import api
from graphrun.batch.watch import Watcher
from graphrun.cli.common import (
    AsJson,
    GraphFile,
    Planned,
    app,
    cache_folder,
    hardware_for,
    load,
    plan_screen_of,
    planned,
    reused,
    show,
    summary_of,
)
from graphrun.cli.options import Asked, Outputs, Reuse, shared
from graphrun.errors import InputError
from graphrun.report import plan_files as planfile
from graphrun.report.outputs import FILMS, FPS, OutputFile, output_file_of, save_outputs
from graphrun.units import show_seconds, show_size

if TYPE_CHECKING:
    from graphrun.batch.queue import Batch
    from graphrun.batch.requests import Request
    from graphrun.batch.schedule import Schedule, Segment
    from graphrun.graph.graph import Graph


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What ``graphrun run`` is told beyond one run: a list of inputs, whether to go on, whether a broken line stops it."""

    source: Path
    random_weights: bool
    inputs: Path | None
    resume: bool
    strict: bool
    reuse: str
    output: Sequence[str] | None
    as_json: bool


@app.command()
@shared
def run(
    graph: GraphFile,
    asked: Asked,
    prompt: Annotated[str | None, typer.Option(help="Short for --set prompt=...", show_default=False)] = None,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Random weights instead of the graph's source.")] = False,
    output: Outputs = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Save the plan to this file.", show_default=False)] = None,
    trace_file: Annotated[
        Path | None, typer.Option("--trace", help="Save the trace here; for a viewer: *.perfetto.json.", show_default=False)
    ] = None,
    inputs: Annotated[
        Path | None, typer.Option(help="Run for every line of this file: JSON lines or CSV.", show_default=False)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the run's state beside its output; the same command again goes on from there.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="A broken line of --inputs stops everything.")] = False,
    reuse: Reuse = "encoded",
    as_json: AsJson = False,
) -> None:
    """Run a graph, or a saved plan, and show what was planned beside what was measured; or run it for every line of a file."""
    if prompt is not None:
        asked = replace(asked, set_=[*(asked.set_ or []), f"prompt={prompt}"])
    if inputs is not None or resume:
        if plan_file is not None or trace_file is not None:
            raise InputError("--plan and --trace are of one run; leave them out with --inputs and --resume")
        run_with(RunOptions(graph, random_weights, inputs, resume, strict, reuse, output, as_json), asked)
        return
    planfile.require_writable(plan_file, trace_file)
    place = place_for(graph, asked, output)
    made = planned(graph, asked, to_run=True, reuse=reuse, random_weights=random_weights)
    _run_once(made, asked, random_weights, reuse, (place, plan_file, trace_file), as_json)


def _run_once(
    made: Planned,
    asked: Asked,
    random_weights: bool,
    reuse: str,
    files: tuple[Any, Path | None, Path | None],
    as_json: bool,
) -> None:
    from graphrun.report.perfetto import trace_json
    from graphrun.report.progress import Progress
    from graphrun.report.screen import measured_screen
    from graphrun.report.summary import broken_caps
    from graphrun.verify.simulate import simulate

    place, plan_file, trace_file = files
    if not as_json:
        typer.echo(plan_screen_of(made))
    solution, say = made.solution, None if as_json else functools.partial(typer.echo, err=True)
    simulation = simulate(solution.problem, solution.plan)
    with Progress(solution.plan, simulation, say) as progress, stopping(say) as stop:
        trace = api.run(
            solution,
            made.graph,
            made.inputs,
            random_weights=random_weights,
            progress=stop.watched(progress),
            tell=say,
            cache=cache_folder(asked.no_cache),
            precomputed=made.precomputed,
            reuse=reused(reuse),
            note=say,
        )
    summary = summary_of(made, trace)
    if plan_file is not None:
        planfile.save(plan_file, made.source, made.solution, summary)
    if trace_file is not None:
        whole = planfile.content(trace_file, made.source, made.solution, summary)
        planfile.write_json(trace_file, trace_json(trace_file.name, trace, whole))
    written = saved(trace.outputs, place, made.graph, made.inputs)
    show(summary, as_json, measured_screen(made.solution, trace, [str(path) for path in written]))
    if broken_caps(made.solution, trace):
        raise typer.Exit(4)


class Stop:
    """Whether an interrupt came."""

    def __init__(self) -> None:
        self.asked = False

    def watched(self, told: Callable[[int, int, int], None] | None) -> Callable[[int, int, int], None]:
        """``told``, and before it an end to the run where one was asked for: a call begins where the last step ended."""

        def called(slot: int, call: int, calls: int) -> None:
            if self.asked:
                raise KeyboardInterrupt
            if told is not None:
                told(slot, call, calls)

        return called


@contextlib.contextmanager
def stopping(say: Callable[[str], None] | None) -> Iterator[Stop]:
    """Interrupts wait for a step's end while this stands."""
    stop = Stop()

    def asked(_: int, __: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        if say is not None:
            say("  stopping at the end of this step; once more stops at once")

    try:
        before = signal.signal(signal.SIGINT, asked)
    except ValueError:  # not the main thread: interrupts go where they went
        yield stop
        return
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def place_for(source: Path, asked: Asked, output: Sequence[str] | None) -> OutputFile:
    """Where the outputs of the graph, or of the plan, at ``source`` go. Raises InputError where that cannot be."""
    if source.suffix == ".json":
        problem, _, saved_plan = planfile.read(source)
        source, asked = planfile.graph_path(source, saved_plan), replace(asked, until=problem.until or None)
    graph = load(source, asked)
    return output_file_of(output or (), graph.kinds(), Path("out") / graph.name)


def saved(outputs: Mapping[str, Any], place: OutputFile, graph: Graph, inputs: Mapping[str, Any]) -> list[Path]:
    """``outputs`` as files; a video is as fast as ``graph`` or its pipeline says."""
    from graphrun.ops.pipeline import frames_per_second

    fast = any(path.suffix.lower() in FILMS for path in (place.base, *place.named.values()))
    return save_outputs(outputs, place, (frames_per_second(graph, inputs) if fast else None) or FPS)


def run_with(order: RunOptions, asked: Asked) -> None:
    """A list of inputs, or one set of them that can be gone on with: runs, shows, and leaves with 2 where lines were left out."""
    from graphrun.batch.requests import Request as OneRequest
    from graphrun.batch.requests import read_requests
    from graphrun.report.progress import BatchProgress

    if order.source.suffix == ".json":
        raise InputError(f"{order.source} is a plan for one run; --inputs and --resume plan for themselves: give the graph")
    if asked.vram is None:
        raise InputError("a graph needs a budget: add --vram, such as --vram 8G")
    graph, what = api.load(order.source, trust=asked.trust_package or ()), reused(order.reuse)
    cache = cache_folder(asked.no_cache)
    place = hardware_for(asked.hardware, asked.device, True, cache)
    where = place_for(order.source, asked, order.output)
    many = order.inputs is not None
    requests = read_requests(order.inputs) if order.inputs is not None else [OneRequest(1, {}, where="the inputs")]
    say = None if order.as_json else functools.partial(typer.echo, err=True)
    with BatchProgress(len(requests), say) as progress, stopping(say) as stop:
        watcher = _Watched(progress, stop)
        files: dict[int, list[str]] = {}

        def sink(request: Request, outputs: Mapping[str, Any]) -> list[Path]:
            written = saved(outputs, where.numbered(request.number) if many else where, graph, request.inputs)
            files[request.number] = [str(each) for each in written]
            return written

        batch = api.run_many(
            graph,
            requests,
            vram=asked.vram,
            hardware=place,
            common=asked.inputs,
            random_weights=order.random_weights,
            cache=cache,
            reuse=what,
            resume=where.first.parent / f".{where.first.stem}.resume" if order.resume else None,
            strict=order.strict or not many,
            sink=sink,
            watcher=watcher,
            note=functools.partial(typer.echo, err=True),
            **asked.demands,
        )
    show(_batch_json(batch, len(requests), files), order.as_json, _batch_screen(batch, len(requests)))
    if batch.errors:
        raise typer.Exit(2)


class _Watched(Watcher):
    """A batch's progress, whose runs end at a step's end when they are asked to."""

    def __init__(self, progress: Any, stop: Stop) -> None:
        self._progress, self._stop = progress, stop

    def schedule(self, schedule: Schedule, counts: Mapping[str, int]) -> None:
        self._progress.schedule(schedule, counts)

    def segment(self, segment: Segment, runs: int) -> None:
        self._progress.segment(segment, runs)

    def run(self, segment: Segment, request: Request) -> Callable[[int, int, int], None]:
        return self._stop.watched(self._progress.run(segment, request))

    def planned_again(self, line: str) -> None:
        typer.echo(line, err=True)

    def done(self, request: Request, files: Sequence[Path]) -> None:
        self._progress.done(request, files)

    def left_out(self, request: Request) -> None:
        self._progress.left_out(request)

    def restarts(self, stage: str, why: str) -> None:
        self._progress.restarts(stage, why)


def _batch_json(batch: Batch, requests: int, files: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    return {
        "requests": requests,
        "done": len(files),
        "done_before": list(batch.done_before),
        "left_out": {str(number): error for number, error in batch.errors.items()},
        "files": {str(number): list(names) for number, names in files.items()},
        "courses": [
            {
                "name": schedule.name,
                "requests": schedule.requests,
                "group": schedule.group,
                "segments": [list(segment.stages) for segment in schedule.segments],
                "predicted_seconds": schedule.seconds,
                "moved_bytes": schedule.moved_bytes,
                "waiting_bytes": schedule.waiting_bytes,
            }
            for schedule in batch.schedules
        ],
        "shared": batch.shared,
        "measured": {"seconds": batch.seconds, "moved_bytes": batch.moved_bytes},
    }


def _batch_screen(batch: Batch, requests: int) -> str:
    predicted, moved = (
        sum(schedule.seconds for schedule in batch.schedules),
        sum(schedule.moved_bytes for schedule in batch.schedules),
    )
    done = requests - len(batch.errors) - len(batch.done_before)
    before = f", {len(batch.done_before)} done before" if batch.done_before else ""
    left = f", {len(batch.errors)} left out" if batch.errors else ""
    lines = [f"{done} of {requests} items run{before}{left}"]
    if batch.schedules:
        names = ", ".join(dict.fromkeys(schedule.name for schedule in batch.schedules))
        lines.append(f"{names}  predicted {show_seconds(predicted)}, moves {show_size(moved)} in")
    if batch.traces:
        lines.append(f"measured {show_seconds(batch.seconds)}, moved {show_size(batch.moved_bytes)} in {len(batch.traces)} runs")
    if shared := ", ".join(f"{name} {number}" for name, number in batch.shared.items() if number):
        lines.append(f"runs not needed, since their outputs were there: {shared}")
    return "\n".join(lines)

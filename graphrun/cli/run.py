"""The command ``run``: runs a graph or a saved plan once, or a graph for every line of a file, and shows planned and measured.

The first interrupt (Ctrl-C) stops a run at the end of the current step, a second one immediately.
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
    checked_reuse,
    hardware_for,
    load,
    plan_screen_of,
    planned,
    show,
    summary_of,
)
from graphrun.cli.options import Asked, Outputs, Reuse, shared
from graphrun.errors import InputError
from graphrun.report import plan_files as planfile
from graphrun.report.outputs import FPS, VIDEOS, Files, numbered, output_files, save_outputs
from graphrun.units import show_seconds, show_size

if TYPE_CHECKING:
    from graphrun.batch.queue import Batch
    from graphrun.batch.requests import Request
    from graphrun.batch.schedule import Schedule, Segment
    from graphrun.graph.graph import Graph


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The options of ``graphrun run`` with ``--inputs`` or ``--resume``. ``source``: the graph file."""

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
        Path | None,
        typer.Option("--trace", help="Save the trace to this file; *.perfetto.json for a trace viewer.", show_default=False),
    ] = None,
    inputs: Annotated[
        Path | None, typer.Option(help="Run once for every line of this file: JSON lines or CSV.", show_default=False)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Save the run's state beside its output; the same command resumes from it.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first broken line of --inputs, before anything runs.")
    ] = False,
    reuse: Reuse = "encoded",
    check_ordering: Annotated[
        bool, typer.Option("--check-ordering", help="With --device sim: look for data races between copies and compute.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a graph or a saved plan and show planned and measured numbers; or run a graph for every line of a file."""
    if prompt is not None:
        asked = replace(asked, set_=[*(asked.set_ or []), f"prompt={prompt}"])
    if inputs is not None or resume:
        if plan_file is not None or trace_file is not None or check_ordering:
            raise InputError("--plan, --trace and --check-ordering are for a single run; leave them out with --inputs and --resume")
        run_batch(BatchOptions(graph, random_weights, inputs, resume, strict, reuse, output, as_json), asked)
        return
    planfile.require_writable(plan_file, trace_file)
    target = output_file_for(graph, asked, output)
    made = planned(graph, asked, to_run=True, reuse=reuse, random_weights=random_weights)
    _run_once(made, asked, random_weights, reuse, (target, plan_file, trace_file), check_ordering, as_json)


def _run_once(
    made: Planned,
    asked: Asked,
    random_weights: bool,
    reuse: str,
    files: tuple[Any, Path | None, Path | None],
    check_ordering: bool,
    as_json: bool,
) -> None:
    from graphrun.report.perfetto import trace_json
    from graphrun.report.progress import Progress
    from graphrun.report.screen import measured_screen
    from graphrun.report.summary import broken_caps
    from graphrun.verify.simulate import simulate

    target, plan_file, trace_file = files
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
            reuse=checked_reuse(reuse),
            note=say,
            check_ordering=check_ordering,
        )
    summary = summary_of(made, trace)
    if plan_file is not None:
        planfile.save(plan_file, made.source, made.solution, summary)
    if trace_file is not None:
        plan = planfile.content(trace_file, made.source, made.solution, summary)
        planfile.write_json(trace_file, trace_json(trace_file.name, trace, plan))
    written = saved(trace.outputs, target, made.graph, made.inputs)
    show(summary, as_json, measured_screen(made.solution, trace, [str(path) for path in written]))
    if broken_caps(made.solution, trace):
        raise typer.Exit(4)


class Stop:
    """Whether an interrupt was received."""

    def __init__(self) -> None:
        self.requested = False

    def watched(self, progress: Callable[[int, int, int], None] | None) -> Callable[[int, int, int], None]:
        """``progress``, which raises KeyboardInterrupt at the start of a call (the end of a step) after an interrupt."""

        def called(slot: int, call: int, calls: int) -> None:
            if self.requested:
                raise KeyboardInterrupt
            if progress is not None:
                progress(slot, call, calls)

        return called


@contextlib.contextmanager
def stopping(say: Callable[[str], None] | None) -> Iterator[Stop]:
    """A context in which the first SIGINT only sets a flag, and the second one raises KeyboardInterrupt."""
    stop = Stop()

    def interrupted(_: int, __: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        if say is not None:
            say("  stopping at the end of this step; interrupt again to stop now")

    try:
        before = signal.signal(signal.SIGINT, interrupted)
    except ValueError:  # not the main thread, which alone may set handlers
        yield stop
        return
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def output_file_for(source: Path, asked: Asked, output: Sequence[str] | None) -> Files:
    """The output files of the graph, or of the saved plan, at ``source``. Raises InputError where they cannot be written."""
    if source.suffix == ".json":
        problem, _, saved_plan = planfile.read(source)
        source, asked = planfile.graph_path(source, saved_plan), replace(asked, until=problem.until or None)
    graph = load(source, asked)
    return output_files(output or (), graph.kinds(), Path("out") / graph.name)


def saved(outputs: Mapping[str, Any], target: Files, graph: Graph, inputs: Mapping[str, Any]) -> list[Path]:
    """Writes ``outputs`` and returns the files; videos with the frame rate of ``graph`` or of its pipeline."""
    from graphrun.ops.pipeline import frames_per_second

    video = any(path.suffix.lower() in VIDEOS for path in target.values())
    return save_outputs(outputs, target, (frames_per_second(graph, inputs) if video else None) or FPS)


def run_batch(options: BatchOptions, asked: Asked) -> None:
    """Runs a list of requests, or a single one that can be resumed, and shows the results.

    Exits with 2 where requests were left out.
    """
    from graphrun.batch.requests import Request as OneRequest
    from graphrun.batch.requests import read_requests
    from graphrun.report.progress import BatchProgress

    if options.source.suffix == ".json":
        raise InputError(f"{options.source} is a plan for one run, and --inputs and --resume make their own plans: name the graph")
    if asked.vram is None:
        raise InputError("a graph needs a budget: add --vram, such as --vram 8G")
    graph, what = api.load(options.source, trust=asked.trust_package or ()), checked_reuse(options.reuse)
    cache = cache_folder(asked.no_cache)
    hardware = hardware_for(asked.hardware, asked.device, True, cache)
    target = output_file_for(options.source, asked, options.output)
    many, first = options.inputs is not None, next(iter(target.values()))
    requests = read_requests(options.inputs) if options.inputs is not None else [OneRequest(1, {}, where="the inputs")]
    say = None if options.as_json else functools.partial(typer.echo, err=True)
    with BatchProgress(len(requests), say) as progress, stopping(say) as stop:
        watcher = _Watched(progress, stop)
        files: dict[int, list[str]] = {}

        def sink(request: Request, outputs: Mapping[str, Any]) -> list[Path]:
            written = saved(outputs, numbered(target, request.number) if many else target, graph, request.inputs)
            files[request.number] = [str(each) for each in written]
            return written

        batch = api.run_many(
            graph,
            requests,
            vram=asked.vram,
            hardware=hardware,
            common=asked.inputs,
            random_weights=options.random_weights,
            cache=cache,
            reuse=what,
            resume=first.parent / f".{first.stem}.resume" if options.resume else None,
            strict=options.strict or not many,
            sink=sink,
            watcher=watcher,
            note=functools.partial(typer.echo, err=True),
            **asked.estimate_arguments,
        )
    show(_batch_json(batch, len(requests), files), options.as_json, _batch_screen(batch, len(requests)))
    if batch.errors:
        raise typer.Exit(2)


class _Watched(Watcher):
    """Forwards the progress of a batch, and stops its runs at the end of a step after an interrupt."""

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
        "schedules": [
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
    lines = [f"{done} of {requests} requests run{before}{left}"]
    if batch.schedules:
        names = ", ".join(dict.fromkeys(schedule.name for schedule in batch.schedules))
        lines.append(f"{names}  predicted {show_seconds(predicted)}, moves {show_size(moved)} in")
    if batch.traces:
        lines.append(f"measured {show_seconds(batch.seconds)}, moved {show_size(batch.moved_bytes)} in {len(batch.traces)} runs")
    if shared := ", ".join(f"{name} {number}" for name, number in batch.shared.items() if number):
        lines.append(f"runs saved, since their outputs were cached or equal: {shared}")
    return "\n".join(lines)

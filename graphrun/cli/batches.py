"""More of the command line: lists of inputs, runs that go on, kept outputs. Joins `cli`'s app and prints as it does.

The first interrupt ends a run at the step's end, a second one at once.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

import graphrun
from graphrun.batch.watch import Watcher
from graphrun.cli import app as cli
from graphrun.cli.app import AsJson
from graphrun.errors import InputError
from graphrun.options import Asked
from graphrun.report import plan_files as planfile
from graphrun.report.outputs import FILMS, FPS, OutputFile, output_file_of, save_outputs
from graphrun.units import show_seconds, show_size

if TYPE_CHECKING:
    from graphrun.batch.queue import Batch
    from graphrun.batch.requests import Request
    from graphrun.batch.schedule import Schedule, Segment
    from graphrun.graph.graph import Graph

caches = typer.Typer(no_args_is_help=True, help="Look after the outputs of stages that runs keep for later ones.")
cli.app.add_typer(caches, name="cache")
Keys = Annotated[list[str] | None, typer.Argument(help="Entries, by the first digits of their keys.", show_default=False)]


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


def reused(reuse: str) -> Any:
    """``--reuse`` as it is meant. Raises InputError for anything else."""
    if reuse not in ("encoded", "all", "none"):
        raise InputError(f"--reuse {reuse!r} is not known; it is encoded, all or none")
    return reuse


def kept_for(
    graph: Graph, inputs: Mapping[str, Any], place: Any, cache: Path | None, reuse: str, random: bool, allow: Sequence[str]
) -> dict[str, Any]:
    """Outputs of stages that earlier runs kept for these inputs. ``random``: those of random weights."""
    if reused(reuse) == "none" or cache is None:
        return {}
    graph = graph.without_sources() if random else graph
    return graphrun.kept(graph, inputs, hardware=place, cache=cache, what=reused(reuse), allow=allow)


def kind_of(graph: Graph, given: Sequence[str]) -> str:
    """The ``--reuse`` that finds outputs of the stages ``given``."""
    encoded = all(graph.stage(name).op == "encode_prompt" for name in given)
    return "none" if not given else "encoded" if encoded else "all"


def place_for(source: Path, asked: Asked, output: Sequence[str] | None) -> OutputFile:
    """Where the outputs of the graph, or of the plan, at ``source`` go. Raises InputError where that cannot be."""
    if source.suffix == ".json":
        problem, _, saved_plan = planfile.read(source)
        source, asked = planfile.graph_path(source, saved_plan), replace(asked, until=problem.until or None)
    graph = cli.load(source, asked)
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
    graph, what = graphrun.load(order.source, trust=asked.trust_package or ()), reused(order.reuse)
    cache = cli._cache(asked.no_cache)
    place = cli._hardware(asked.hardware, asked.device, True, cache)
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

        batch = graphrun.run_many(
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
    cli._show(_batch_json(batch, len(requests), files), order.as_json, _batch_screen(batch, len(requests)))
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


@caches.command("ls")
def list_kept(as_json: AsJson = False) -> None:
    """Show what is kept: key, stage, size, age, and the inputs it is for."""
    from graphrun.report.table import table

    index = _index()
    entries = index.entries()
    data = [
        {"key": e.key, "graph": e.graph, "stage": e.stage, "about": e.about, "nbytes": e.nbytes, "made": e.made, "used": e.used}
        for e in entries
    ]
    now = time.time()
    rows = [["key", "stage", "size", "used", "for"]]
    rows += [
        [e.key[:12], f"{e.graph}/{e.stage}", show_size(e.nbytes), f"{show_seconds(max(0.0, now - e.used))} ago", e.about]
        for e in entries
    ]
    total = (
        f"{len(entries)} entries, {show_size(sum(e.nbytes for e in entries))} of {show_size(index.limit_bytes)} in {index.folder}"
    )
    screen = f"{table(rows, left=(0, 1, 4))}\n{total}" if entries else f"nothing is kept in {index.folder}"
    cli._show({"folder": str(index.folder), "limit_bytes": index.limit_bytes, "entries": data}, as_json, screen)


@caches.command("rm")
def remove_kept(keys: Keys = None, every: Annotated[bool, typer.Option("--all", help="Everything that is kept.")] = False) -> None:
    """Remove entries, by the first digits of their keys, or all of them."""
    index = _index()
    if bool(keys) == every:
        raise InputError("name the entries to remove (graphrun cache ls shows them), or add --all")
    chosen = None
    if keys:
        known = [entry.key for entry in index.entries()]
        found = {start: [key for key in known if key.startswith(start)] for start in keys}
        if missing := [start for start, matching in found.items() if not matching]:
            raise InputError(f"no entry begins with {', '.join(missing)}; graphrun cache ls shows what is kept")
        chosen = sorted({key for matching in found.values() for key in matching})
    typer.echo(f"removed {index.remove(chosen)} entries")


@caches.command("verify")
def verify_kept() -> None:
    """Read every entry, and take out those that are damaged: they are computed again when they are needed."""
    index = _index()
    broken = index.verify()
    for entry in broken:
        typer.echo(f"damaged, and taken out: {entry.key[:12]} {entry.graph}/{entry.stage} {entry.about}")
    typer.echo(f"{len(index.entries())} entries are whole, {len(broken)} were not")


def _index() -> Any:
    from graphrun.batch.cache.index import Index

    return Index((cli._cache(False) or Path()) / "outputs")

"""``graphrun run`` for a list of requests (--inputs), or for a resumable run (--resume)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from graphrun import api
from graphrun.batch.requests import Request, read_requests, refuse_broken, resolved
from graphrun.batch.watch import Watcher
from graphrun.cli.common import (
    cache_folder,
    cards_for,
    parse_reuse,
    say,
    show,
    solving,
    with_budget,
)
from graphrun.cli.downloads import download_all, required_downloads
from graphrun.cli.options import PlanOptions
from graphrun.cli.placing import open_cluster
from graphrun.cli.planning import chooses_checkpoints, precisions_of
from graphrun.cli.running import (
    RunOptions,
    Stop,
    files_for,
    refuse_rate,
    save,
    state_folder,
    stop_on_interrupt,
)
from graphrun.errors import InputError, Interrupted
from graphrun.graph.graph import Graph
from graphrun.many import run_many
from graphrun.reading import is_url
from graphrun.report import plan_files as planfile
from graphrun.report.outputs import Files, refuse_existing, request_files
from graphrun.report.progress import BatchProgress
from graphrun.units import show_seconds, show_size

if TYPE_CHECKING:
    from graphrun.batch.queue import Batch


def run_batch(graph: Graph, options: PlanOptions, run_options: RunOptions) -> None:
    """Run ``graph`` for the requests in the file of ``--inputs``, and show the results.

    Without a file there is one request. Exits with 2 if requests were left out, with 4 if a run
    took more memory than planned.
    """
    file, cache, notify = run_options.inputs, cache_folder(options.no_cache), run_options.notify
    requests = read_requests(file) if file is not None else [Request(1, {}, location="the inputs")]
    resolved_requests = resolved(requests, graph, options.inputs)
    if all(request.error for request in resolved_requests):
        refuse_broken(resolved_requests)  # before torch is imported
    arguments = _arguments(options, run_options, cache)
    planfile.require_writable(run_options.trace_file)
    target = files_for(
        graph,
        run_options.output,
        options.inputs,
        overwrite=run_options.overwrite,
        of_list=file is not None,
        resume=run_options.resume,
    )
    state = state_folder(target) if run_options.resume else None
    requests = [_with_rate(request, graph, target, options.inputs) for request in requests]
    places = {1: target}
    if file is not None:
        places = _places(target, resolved_requests, graph)
        if not run_options.overwrite and (state is None or not state.exists()):
            for request_target in places.values():
                refuse_existing(request_target, graph.kinds())
    _download(graph, options, run_options, arguments, resolved_requests)
    files = dict[int, list[str]]()

    def sink(request: Request, outputs: Mapping[str, Any]) -> list[Path]:
        paths = save(outputs, places[request.number], graph, request.inputs, progress.plans)
        files[request.number] = [str(path) for path in paths]
        return paths

    try:
        with (
            stop_on_interrupt(notify) as stop,
            _Progress(_count(resolved_requests, graph), notify, stop) as progress,
        ):
            batch = run_many(
                graph,
                requests,
                common=options.inputs,
                random_weights=run_options.random_weights,
                cache=cache,
                reuse=parse_reuse(run_options.reuse),
                resume=state,
                strict=run_options.strict or file is None,
                sink=sink,
                watcher=progress,
                note=say,
                **arguments,
            )
    except KeyboardInterrupt:
        state_note = "their files are kept; with --resume from the start, the list could continue"
        if state is not None:
            state_note = f"the state is in {state}; the same command continues from there"
        raise Interrupted(
            f"interrupted: {len(files)} of {len(requests)} requests are done, {state_note}"
        ) from None
    if (trace_file := run_options.trace_file) is not None:
        from graphrun.report.lanes import lanes_json

        planfile.write_json(trace_file, lanes_json(trace_file.name, batch.lanes))
    show(
        _batch_json(batch, len(requests), files),
        run_options.as_json,
        _batch_screen(batch, len(requests), files),
    )
    if batch.errors:
        raise typer.Exit(2)
    if batch.overruns:
        raise typer.Exit(4)


def _arguments(options: PlanOptions, run_options: RunOptions, cache: Path | None) -> dict[str, Any]:
    """Return the budgets and devices for `graphrun.run_many`: of a cluster file, or as typed."""
    if (cluster := run_options.cluster) is not None:
        return {
            "cluster": open_cluster(cluster, options),
            "objective": run_options.objective or "throughput",
            **options.cluster_arguments,
        }
    cards = cards_for(options, cache, to_run=True)
    return {**with_budget(options, cards[0]).estimate_arguments, "hardware": cards}


def _download(
    graph: Graph,
    options: PlanOptions,
    run_options: RunOptions,
    arguments: Mapping[str, Any],
    requests: Sequence[Request],
) -> None:
    """Download what the runs need. If a plan chooses checkpoints, the plan of the first of the
    resolved ``requests`` tells which files. In a cluster, each machine copies from a URL what its
    stages need, when it loads them."""
    notify, precisions = run_options.notify, None
    if run_options.cluster is not None and is_url(graph.source or ""):
        return
    if run_options.random_weights:
        graph = graph.without_sources()
    elif run_options.cluster is None and chooses_checkpoints(graph, options):
        first = next(request for request in requests if not request.error)
        cache = cache_folder(options.no_cache)
        with solving():
            problem = api.estimate(graph, **arguments, inputs=first.inputs, cache=cache)
            precisions = precisions_of(api.plan(problem, cache=cache))
    download_all(required_downloads(graph, notify, precisions), notify)


def _count(requests: Sequence[Request], graph: Graph) -> int:
    """Return the number of resolved ``requests``, or of all items in their lists."""
    if not (name := graph.list_input):
        return len(requests)
    return sum(
        1 if request.error else len(graph.inputs[name].items(request.inputs[name]))
        for request in requests
    )


def _places(target: Files, requests: Sequence[Request], graph: Graph) -> dict[int, Files]:
    """Return the output files of each resolved request that can be run. Raises InputError if two
    requests have the same file."""
    request_targets, owners = dict[int, Files](), dict[Path, int]()
    for request in requests:
        if not request.error:
            request_targets[request.number] = request_files(
                target, request.number, request.inputs, graph.kinds()
            )
            for path in request_targets[request.number].values():
                if (other := owners.setdefault(path, request.number)) != request.number:
                    raise InputError(
                        f"{path}: lines {other} and {request.number} would write this file: add "
                        f"{{line:04d}} to -o"
                    )
    return request_targets


def _with_rate(request: Request, graph: Graph, target: Files, common: Mapping[str, Any]) -> Request:
    """Return ``request``, with an error if its videos cannot be saved at its frame rate."""
    try:
        refuse_rate(target, graph, {**common, **request.inputs})
    except InputError as error:
        return replace(request, error=request.error or str(error))
    return request


class _Progress(BatchProgress, Watcher):
    """The progress of a batch. After an interrupt, its runs stop at the end of a step."""

    def __init__(self, requests: int, notify: Callable[[str], None] | None, stop: Stop) -> None:
        super().__init__(requests, notify)
        self._stop, self.plans = stop, ""

    def schedule(self, schedule: Any, counts: Mapping[str, int]) -> None:
        """Record the digests of the schedule's plans, for the metadata of the outputs."""
        super().schedule(schedule, counts)
        self.plans = " ".join(segment.solution.problem.digest for segment in schedule.segments)

    def run(self, segment: Any, request: Any) -> Callable[[int, int, int], None]:
        return self._stop.watch(super().run(segment, request))

    def waits(self) -> None:
        self._stop.watch(None)(0, 0, 0)

    def planned_again(self, line: str) -> None:
        say(line)

    def restarts_on(self, device: str) -> None:
        say(f"{device}: its process ended and was started again")


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
        "restarts": batch.restarts,
        "measured": {
            "seconds": batch.seconds,
            "moved_bytes": batch.moved_bytes,
            "verdict": batch.verdict,
            "overruns": [asdict(overrun) for overrun in batch.overruns],
        },
    }


def _batch_screen(batch: Batch, requests: int, files: Mapping[int, Sequence[str]]) -> str:
    predicted = sum(schedule.seconds for schedule in batch.schedules)
    moved_bytes = sum(schedule.moved_bytes for schedule in batch.schedules)
    run_count = requests - len(batch.errors) - len(batch.done_before)
    before_text = f", {len(batch.done_before)} done before" if batch.done_before else ""
    omitted_text = f", {len(batch.errors)} left out" if batch.errors else ""
    lines = [f"{run_count} of {requests} requests run{before_text}{omitted_text}"]
    if batch.schedules:
        names = ", ".join(dict.fromkeys(schedule.name for schedule in batch.schedules))
        lines.append(
            f"{names}  predicted {show_seconds(predicted)}, moves {show_size(moved_bytes)} in"
        )
    if batch.traces:
        lines.append(
            f"measured {show_seconds(batch.seconds)}, moved {show_size(batch.moved_bytes)} "
            f"in {len(batch.traces)} runs"
        )
        lines.append(batch.verdict)
    if shared := ", ".join(f"{name} {number}" for name, number in batch.shared.items() if number):
        lines.append(f"runs saved, since their outputs were cached or equal: {shared}")
    if restarts := ", ".join(f"{name} {number}" for name, number in batch.restarts.items()):
        lines.append(f"processes that ended and were started again: {restarts}")
    if paths := [path for number in sorted(files) for path in files[number]]:
        lines.append(f"wrote {paths[0]}" + f" to {paths[-1]}" * (len(paths) > 1))
    return "\n".join(lines)

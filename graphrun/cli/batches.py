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
    cards_for,
    chooses_checkpoints,
    precisions_of,
    say,
    show,
    solving,
    with_budget,
)
from graphrun.cli.downloads import download_all, required_downloads
from graphrun.cli.options import PlanOptions
from graphrun.cli.placing import open_cluster
from graphrun.cli.running import Stop, files_for, refuse_rate, save, state_folder, stop_on_interrupt
from graphrun.errors import InputError, Interrupted
from graphrun.graph.graph import Graph
from graphrun.many import run_many
from graphrun.report import plan_files as planfile
from graphrun.report.outputs import Files, refuse_existing, request_files
from graphrun.report.progress import BatchProgress
from graphrun.units import show_seconds, show_size

if TYPE_CHECKING:
    from graphrun.batch.queue import Batch


def run_batch(
    graph: Graph,
    options: PlanOptions,
    inputs: Path | None,
    output: list[str] | None,
    *,
    as_json: bool,
    resume: bool,
    strict: bool,
    overwrite: bool,
    cache: Path | None,
    cluster: Path | None = None,
    trace_file: Path | None = None,
    **run_options: Any,
) -> None:
    """Run ``graph`` for the requests in the file ``inputs``, and show the results.

    Without ``inputs`` there is one request. ``run_options``: for `graphrun.run_many`. Exits with 2
    if requests were left out, with 4 if a run took more than planned.
    """
    requests = (
        read_requests(inputs) if inputs is not None else [Request(1, {}, location="the inputs")]
    )
    resolved_requests = resolved(requests, graph, options.inputs)
    if all(request.error for request in resolved_requests):
        refuse_broken(resolved_requests)  # before torch is imported
    arguments = options.estimate_arguments
    if cluster is None:
        cards = cards_for(options, cache, to_run=True)
        options = with_budget(options, cards[0])
        arguments |= {"vram": options.vram, "memory": options.memory, "hardware": cards}
    else:
        shared_names = ("allow", "keep", "exclude", "pin", "reserve", "until")
        arguments = {
            "cluster": open_cluster(cluster, options),
            **{name: arguments[name] for name in shared_names},
        }
    planfile.require_writable(trace_file)
    of_list = inputs is not None
    target = files_for(
        graph, output, options.inputs, overwrite=overwrite, of_list=of_list, resume=resume
    )
    state = state_folder(target) if resume else None
    requests = [_with_rate(request, graph, target, options.inputs) for request in requests]
    if inputs is not None:
        places = _places(target, resolved_requests, graph)
        for files_of_request in (
            places.values() if not overwrite and (state is None or not state.exists()) else ()
        ):
            refuse_existing(files_of_request, graph.kinds())
    notify, files = None if as_json else say, dict[int, list[str]]()
    precisions: Mapping[str, str] | None = None
    if (
        cluster is None
        and not run_options["random_weights"]
        and chooses_checkpoints(graph, options)
    ):
        # the plan of the first request tells which files the requests need
        first = next(request for request in resolved_requests if not request.error)
        with solving():
            problem = api.estimate(graph, **arguments, inputs=first.inputs, cache=cache)
            precisions = precisions_of(api.plan(problem, cache=cache))
    download_all(
        required_downloads(
            graph.without_sources() if run_options["random_weights"] else graph, notify, precisions
        ),
        notify,
    )

    def sink(request: Request, outputs: Mapping[str, Any]) -> list[Path]:
        targets = places[request.number] if inputs is not None else target
        paths = save(outputs, targets, graph, request.inputs, progress.plans)
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
                cache=cache,
                resume=state,
                strict=strict or inputs is None,
                sink=sink,
                watcher=progress,
                note=say,
                **arguments,
                **run_options,
            )
    except KeyboardInterrupt:
        state_note = "their files are kept; add --resume, and an interrupted list continues"
        if state is not None:
            state_note = f"the state is in {state}; the same command continues from there"
        raise Interrupted(
            f"interrupted: {len(files)} of {len(requests)} requests are done, {state_note}"
        ) from None
    if trace_file is not None:
        from graphrun.report.lanes import lanes_json

        planfile.write_json(trace_file, lanes_json(trace_file.name, batch.lanes))
    show(
        _batch_json(batch, len(requests), files),
        as_json,
        _batch_screen(batch, len(requests), files),
    )
    if batch.errors:
        raise typer.Exit(2)
    if batch.overruns:
        raise typer.Exit(4)


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
    if paths := [path for number in sorted(files) for path in files[number]]:
        lines.append(f"wrote {paths[0]}" + f" to {paths[-1]}" * (len(paths) > 1))
    return "\n".join(lines)

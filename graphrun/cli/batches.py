"""``graphrun run`` with ``--inputs`` or ``--resume``: a list of requests, or a single one that can
be resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from graphrun.batch.requests import Request, read_requests, refuse_broken, resolved
from graphrun.batch.watch import Watcher
from graphrun.cli.common import budgeted, hardware_for, say, show
from graphrun.cli.downloads import asked_for, downloaded
from graphrun.cli.options import Asked
from graphrun.cli.placing import cluster_of
from graphrun.cli.running import Stop, files_for, refuse_rate, saved, state_folder, stopping
from graphrun.errors import InputError, Interrupted
from graphrun.graph.graph import Graph
from graphrun.many import run_many
from graphrun.profile.several import per_device
from graphrun.report import plan_files as planfile
from graphrun.report.outputs import Files, named, refuse_existing
from graphrun.report.progress import BatchProgress
from graphrun.units import show_seconds, show_size

if TYPE_CHECKING:
    from graphrun.batch.queue import Batch


def run_batch(
    graph: Graph,
    asked: Asked,
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
    **options: Any,
) -> None:
    """Runs ``graph`` for the requests in the file ``inputs``, or for a single one, and shows the
    results. ``options`` are as for `graphrun.run_many`.

    Exits with 2 where requests were left out, with 4 where a run took more than planned.
    """
    requests = read_requests(inputs) if inputs is not None else [Request(1, {}, where="the inputs")]
    found = resolved(requests, graph, asked.inputs)
    if all(request.error for request in found):
        refuse_broken(found)  # before torch is imported
    arguments = asked.estimate_arguments
    if cluster is None:
        cards = [
            hardware_for(of.hardware, of.device, True, cache)
            for of in per_device(asked.vram, asked.hardware, asked.device)
        ]
        arguments |= {"vram": budgeted(asked, cards[0]).vram, "hardware": cards}
    else:
        alike = ("allow", "keep", "exclude", "pin", "reserve", "until")
        arguments = {
            "cluster": cluster_of(cluster, asked),
            **{name: arguments[name] for name in alike},
        }
    planfile.require_writable(trace_file)
    of_list = inputs is not None
    target = files_for(
        graph, output, asked.inputs, overwrite=overwrite, of_list=of_list, resume=resume
    )
    state = state_folder(target) if resume else None
    requests = [_with_rate(request, graph, target, asked.inputs) for request in requests]
    if inputs is not None:
        places = _places(target, found, graph)
        for of in (
            places.values() if not overwrite and (state is None or not state.exists()) else ()
        ):
            refuse_existing(of, graph.kinds())
    told, files = None if as_json else say, dict[int, list[str]]()
    downloaded(
        asked_for(graph.without_sources() if options["random_weights"] else graph, told), told
    )

    def sink(request: Request, outputs: Mapping[str, Any]) -> list[Path]:
        to = places[request.number] if inputs is not None else target
        written = saved(outputs, to, graph, request.inputs, progress.plans)
        files[request.number] = [str(each) for each in written]
        return written

    try:
        with stopping(told) as stop, _Progress(_count(found, graph), told, stop) as progress:
            batch = run_many(
                graph,
                requests,
                common=asked.inputs,
                cache=cache,
                resume=state,
                strict=strict or inputs is None,
                sink=sink,
                watcher=progress,
                note=say,
                **arguments,
                **options,
            )
    except KeyboardInterrupt:
        kept = "their files stay; --resume saves the state of a list, so that it can go on"
        if state is not None:
            kept = f"the state is in {state}; the same command goes on from there"
        raise Interrupted(
            f"interrupted: {len(files)} of {len(requests)} requests are done, {kept}"
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
    """The number of the resolved ``requests``, or of all items of their lists."""
    if not (name := graph.list_input):
        return len(requests)
    return sum(
        1 if request.error else len(graph.inputs[name].items(request.inputs[name]))
        for request in requests
    )


def _places(target: Files, requests: Sequence[Request], graph: Graph) -> dict[int, Files]:
    """The output files of each of the resolved ``requests`` that can be run. Raises InputError
    where two have the same."""
    made, seen = dict[int, Files](), dict[Path, int]()
    for request in requests:
        if not request.error:
            made[request.number] = named(target, request.number, request.inputs, graph.kinds())
            for path in made[request.number].values():
                if (other := seen.setdefault(path, request.number)) != request.number:
                    raise InputError(
                        f"{path}: lines {other} and {request.number} have this file: add {{line:04d}} to -o"
                    )
    return made


def _with_rate(request: Request, graph: Graph, target: Files, common: Mapping[str, Any]) -> Request:
    """``request``, with an error where its videos cannot be saved at its frame rate."""
    try:
        refuse_rate(target, graph, {**common, **request.inputs})
    except InputError as error:
        return replace(request, error=request.error or str(error))
    return request


class _Progress(BatchProgress, Watcher):
    """The progress of a batch, whose runs stop at the end of a step after an interrupt."""

    def __init__(self, requests: int, told: Callable[[str], None] | None, stop: Stop) -> None:
        super().__init__(requests, told)
        self._stop, self.plans = stop, ""

    def schedule(self, schedule: Any, counts: Mapping[str, int]) -> None:
        """Remembers the digests of the schedule's plans, for the metadata of what it makes."""
        super().schedule(schedule, counts)
        self.plans = " ".join(segment.solution.problem.digest for segment in schedule.segments)

    def run(self, segment: Any, request: Any) -> Callable[[int, int, int], None]:
        return self._stop.watched(super().run(segment, request))

    def waits(self) -> None:
        self._stop.watched(None)(0, 0, 0)

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
    moved = sum(schedule.moved_bytes for schedule in batch.schedules)
    done = requests - len(batch.errors) - len(batch.done_before)
    before = f", {len(batch.done_before)} done before" if batch.done_before else ""
    left = f", {len(batch.errors)} left out" if batch.errors else ""
    lines = [f"{done} of {requests} requests run{before}{left}"]
    if batch.schedules:
        names = ", ".join(dict.fromkeys(schedule.name for schedule in batch.schedules))
        lines.append(f"{names}  predicted {show_seconds(predicted)}, moves {show_size(moved)} in")
    if batch.traces:
        lines.append(
            f"measured {show_seconds(batch.seconds)}, moved {show_size(batch.moved_bytes)} in {len(batch.traces)} runs"
        )
        lines.append(batch.verdict)
    if shared := ", ".join(f"{name} {number}" for name, number in batch.shared.items() if number):
        lines.append(f"runs saved, since their outputs were cached or equal: {shared}")
    if written := [path for number in sorted(files) for path in files[number]]:
        lines.append(f"wrote {written[0]}" + f" to {written[-1]}" * (len(written) > 1))
    return "\n".join(lines)

"""Items on the devices of a placement, in one process: bits, order and times; what is lost is made
again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaign import sampled
from placing import BUDGET, GRAPH, SMALL, Here, Losing, cluster_of, placed, ran_by, requests

import graphrun
from graphrun.batch.journal import Journal
from graphrun.batch.queue import Batch
from graphrun.batch.watch import LeftOut, Watcher
from graphrun.cluster import files
from graphrun.cluster.flow import LOSSES
from graphrun.cluster.machines import read_cluster
from graphrun.cluster.place import place
from graphrun.cluster.placement import Assignment, Placement, separable
from graphrun.cluster.worker import Report, StageWorker
from graphrun.errors import BrokenPlan, InputError, PlanError
from graphrun.limits import LIMITS
from graphrun.model.problem import ValueNumbers
from graphrun.model.splits import computing_on
from graphrun.profile.hardware_profiles import hardware
from graphrun.report.lanes import lanes_from_json, lanes_json, lanes_page
from graphrun.report.outputs import save_outputs
from graphrun.runtime.devices.open import open_device

pytestmark = pytest.mark.long
REQUESTS = [{"prompt": f"prompt {number}", "seed": number} for number in range(3)]


@pytest.fixture(scope="module")
def pipeline(flux: Any, cached_dry_runs: Path) -> Placement:
    return placed(flux, len(REQUESTS), cached_dry_runs)


@pytest.fixture(scope="module")
def single(flux: Any, cached_dry_runs: Path) -> list[tuple[int, bytes]]:
    """The pictures of one device."""
    return single_runs(flux, REQUESTS, cached_dry_runs)


def single_runs(
    flux: Any, requests: list[dict[str, Any]], cached_dry_runs: Path
) -> list[tuple[int, bytes]]:
    """The number and the picture of each of ``requests``, run one by one on one device."""
    problem = graphrun.estimate(flux, inputs=SMALL, cache=cached_dry_runs, **BUDGET)
    solution = graphrun.plan(problem, cache=cached_dry_runs)
    traces = [graphrun.run(solution, flux, request) for request in requests]
    return [(n, trace.outputs["image"].tobytes()) for n, trace in enumerate(traces, 1)]


@pytest.fixture
def crew(flux: Any) -> Any:
    crews = []

    def begin(placement: Placement, before_run: Callable[[Here, int], None] | None = None) -> Here:
        crews.append(Here(flux, placement, before_run))
        return crews[-1]

    yield begin
    for crew_instance in crews:
        crew_instance.close()


RETURNING = [  # parts of devices to which items come back
    [("encode", "decode"), ("denoise",)],
    [("encode", "decode"), ("denoise",), ("denoise",)],
    [("encode", "decode"), ("encode", "decode"), ("denoise",)],
    [
        ("encode", "decode"),
        ("encode", "denoise"),
        ("decode",),
    ],  # what the first one encodes, none would denoise
]


def held_by(pipeline: Placement, stage_sets: list[tuple[str, ...]]) -> Placement:
    """``pipeline`` with devices that hold ``held``, for a crew that runs nothing: plans are those
    of any stages."""
    cluster = cluster_of(len(stage_sets))
    assignments = [
        Assignment(device, replace(pipeline.assignments[0].column, stages=stage_names))
        for device, stage_names in zip(cluster.devices, stage_sets, strict=True)
    ]
    return replace(pipeline, cluster=cluster, assignments=tuple(assignments))


def pictures(batch: Batch) -> list[tuple[int, bytes]]:
    return [(number, outputs["image"].tobytes()) for number, outputs in batch.outputs.items()]


def test_items_have_the_bits_of_one_device_in_order_at_the_planned_time(
    flux: Any, crew: Any, pipeline: Placement, single: Any
) -> None:
    batch = ran_by(flux, pipeline, crew(pipeline), REQUESTS)
    assert pictures(batch) == single
    assert sorted(lane.stages for lane in batch.lanes) == sorted(
        assignment.stages for assignment in pipeline.assignments for _ in REQUESTS
    )
    assert batch.seconds == pytest.approx(pipeline.seconds, rel=0.05)
    data = lanes_json("trace.json", batch.lanes)
    assert lanes_page(lanes_from_json(data)).count("<title>request") == len(batch.lanes)
    events = lanes_json("trace.perfetto.json", batch.lanes)["traceEvents"]
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    # of microseconds; the products round differently
    assert max(ends) <= 1e6 * batch.seconds + 1e-6
    assert {event["pid"] for event in events} == {1, 2, 3}


def test_a_batch_counts_the_processes_that_were_started_again(
    flux: Any, crew: Any, pipeline: Placement, single: Any
) -> None:
    """The second device's process ends twice; the others' go on."""
    local_crew, restarts = crew(pipeline), list[str]()
    report_of, counts = local_crew.report, [0, 0, 0]

    def report(ticket: int) -> Any:
        if ticket not in local_crew.worker_of:
            return report_of(ticket)
        worker = local_crew.worker_of[ticket]
        counts[worker] += 1
        return replace(report_of(ticket), process=counts[worker] if worker == 1 else 7)

    class Watching(Watcher):
        def restarts_on(self, device: str) -> None:
            restarts.append(device)

    local_crew.report = report
    batch = ran_by(flux, pipeline, local_crew, REQUESTS, watcher=Watching())
    name = pipeline.assignments[1].name
    assert pictures(batch) == single
    assert batch.restarts == {name: counts[1] - 1}
    assert restarts == [name] * (counts[1] - 1)


def test_a_batch_has_what_took_more_than_planned_on_a_device(
    flux: Any, crew: Any, cached_dry_runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimate = graphrun.estimate

    def lowered(*args: Any, **kwargs: Any) -> Any:
        problem = estimate(*args, **kwargs)
        phases = (replace(phase, first_bytes=phase.first_bytes // 2) for phase in problem.phases)
        return replace(problem, phases=tuple(phases))

    monkeypatch.setattr(graphrun, "estimate", lowered)
    low = placed(flux, 3, cached_dry_runs)
    batch = ran_by(flux, low, crew(low), REQUESTS[:1])
    assert batch.verdict.startswith("the run took more memory than planned: ")
    slots = {overrun.slot for overrun in batch.overruns}
    assert {slot.partition("/")[0] for slot in slots} == {"encode", "denoise", "decode"}


@pytest.mark.sweep("more")
@pytest.mark.parametrize("items", [1, 3])
def test_a_device_that_waits_for_values_loads_meanwhile(
    flux: Any, crew: Any, single: Any, cached_dry_runs: Path, items: int
) -> None:
    """What it loads is the first slot of its plan. With nothing loaded ahead, an item takes longer
    than planned."""
    card = replace(hardware("sim", None), h2d_bytes_per_second=2e8)
    slow = placed(flux, items, cached_dry_runs, cluster=cluster_of(card=card))
    local_crew, late = crew(slow), crew(slow)
    batch = ran_by(flux, slow, local_crew, REQUESTS[:items])
    assert local_crew.ahead_loads == [1, 2]
    assert batch.seconds == pytest.approx(slow.seconds, rel=0.01)
    late.load_ahead = lambda _: late.answer(Report())
    delayed_batch = ran_by(flux, slow, late, REQUESTS[:items])
    encode, denoise, _ = (assignment.column for assignment in slow.assignments)
    assert delayed_batch.seconds > batch.seconds + 0.9 * min(
        encode.cold_seconds, denoise.ahead_seconds
    )
    assert pictures(batch) == pictures(delayed_batch) == single[:items]
    for lane, other in zip(batch.lanes, delayed_batch.lanes, strict=True):
        assert lane.trace is not None
        assert other.trace is not None
        for own_slot, other_slot in zip(lane.trace.slots, other.trace.slots, strict=True):
            assert (own_slot.phase, own_slot.part, own_slot.moved_bytes) == (
                other_slot.phase,
                other_slot.part,
                other_slot.moved_bytes,
            )
            assert own_slot.peak_bytes <= other_slot.peak_bytes, "without values, or as before"
        starts = [slot.start_seconds for slot in lane.trace.slots]
        assert starts == sorted(starts)
        assert lane.start_seconds >= 0


def test_equal_plans_of_a_file_are_counted_once(
    flux: Any, cached_dry_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan for 128 devices has a few different plans, and its file is below every limit."""
    path, texts = tmp_path / "plan.json", set[str]()
    for count in (2, 4):
        placement = placed(flux, 3, cached_dry_runs, (("encode", "denoise", "decode"),) * count)
        files.save(path, GRAPH, placement, {})
        assert files.read(path)[0] == placement
        with monkeypatch.context() as patch:
            patch.setattr(LIMITS, "block_calls", 1)
            with pytest.raises(PlanError, match="its calls compute [0-9,]+ blocks") as raised:
                files.read(path)
        texts.add(str(raised.value))
    assert len(texts) == 1


@pytest.mark.sweep("more")
def test_two_devices_of_a_host_hold_stages_together(
    flux: Any, crew: Any, single: Any, cached_dry_runs: Path, tmp_path: Path
) -> None:
    """Some blocks of the transformer compute on the second one, and nothing else changes."""
    team = placed(flux, 3, cached_dry_runs, (("denoise", "decode"), ("encode",)), team_sizes=(2, 1))
    column = team.assignments[0].column
    assert column.solution is not None
    assert computing_on(column.solution.chosen, 1) == ["transformer (4 of 13 blocks)"]
    batch = ran_by(flux, team, crew(team), REQUESTS)
    assert pictures(batch) == single
    assert batch.seconds == pytest.approx(team.seconds, rel=0.05)
    assert {lane.device for lane in batch.lanes} == {"a/0+a/1", "b/2"}

    files.save(path := tmp_path / "plan.json", GRAPH, team, {})
    assert files.read(path)[0] == team
    data = json.loads(path.read_text())
    for old, new, message in (
        ("a/0+a/1", "a/0", "device a/0: its plan is for 2 devices of one host"),
        ("a/0+a/1", "a/0+b/2", "device b/2 has two sections"),
        ("a/0+a/1", "a/0+a/7", "there is no device a/7"),
    ):
        path.write_text(
            json.dumps({**data, "actions": [line.replace(old, new) for line in data["actions"]]})
        )
        with pytest.raises(PlanError, match=message):
            files.read(path)


@pytest.mark.sweep("more")
def test_two_devices_of_a_host_make_both_calls_of_guidance_at_once(
    cached_dry_runs: Path, tmp_path: Path
) -> None:
    graph = graphrun.load("wan-tiny")
    (path := tmp_path / "cluster.yaml").write_text(
        "graphrun: 1\nhosts: {a: {ram: 8G, devices: [{id: 0, hardware: sim, vram: 64M}, "
        "{id: 1, hardware: sim, vram: 64M}]}}"
    )
    inputs = {**SMALL, "height": 64, "width": 64}
    team = place(
        graph,
        read_cluster(path),
        objective="latency",
        inputs=inputs,
        cache=cached_dry_runs,
        gains=False,
    ).placement
    (assignment,) = team.assignments
    assert assignment.plan.copies == (("transformer", 1),)
    requests = [{**inputs, **request} for request in REQUESTS[:2]]
    local_crew = Here(graph, team)
    try:
        batch = ran_by(graph, team, local_crew, requests)
    finally:
        local_crew.close()
    with graphrun.Session(
        graph, inputs=inputs, cache=cached_dry_runs, **{**BUDGET, "vram": "64M"}
    ) as session:
        expected = [session.run(request).outputs["image"] for request in requests]
    for outputs, frames in zip(batch.outputs.values(), expected, strict=True):
        assert np.array_equal(np.asarray(outputs["image"]), np.asarray(frames))
    lane = batch.lanes[0]
    assert "transformer@1" in {event.component for event in lane.trace.events}


@pytest.mark.sweep("more")
def test_a_device_encodes_and_decodes_while_another_denoises(
    flux: Any, crew: Any, cached_dry_runs: Path, tmp_path: Path
) -> None:
    """A run of it encodes one item and decodes another one; the first and the last runs do one of
    these."""
    gapped = placed(flux, 4, cached_dry_runs, (("encode", "decode"), ("denoise",)))
    assert gapped.spans(gapped.assignments[0]) == ((0, 1), (2, 3))
    requests = [{"prompt": f"prompt {number}", "seed": number} for number in range(4)]
    batch = ran_by(flux, gapped, crew(gapped), requests)
    reference = single_runs(flux, requests, cached_dry_runs)
    assert pictures(batch) == reference
    assert batch.seconds == pytest.approx(gapped.seconds, rel=0.05)

    local_crew = crew(gapped)
    report = local_crew.report
    local_crew.report = lambda ticket: replace(
        answer := report(ticket),
        seconds=answer.seconds / (50 if local_crew.worker_of[ticket] else 1),
    )
    batch = ran_by(flux, gapped, local_crew, requests)  # as if the other one were fast
    assert pictures(batch) == reference
    assert len(requests) < local_crew.ran.count(0) < 2 * len(requests), "most runs take two items"
    lanes = sorted(
        (lane for lane in batch.lanes if lane.device == "a/0"), key=lambda lane: lane.start_seconds
    )
    assert sorted(lane.stages[0] for lane in lanes) == ["decode"] * 4 + ["encode"] * 4
    for lane, next_lane in pairwise(lanes):
        assert lane.trace is not None
        assert {slot.phase.partition("/")[0] for slot in lane.trace.slots if slot.calls} == set(
            lane.stages
        )
        assert lane.end_seconds <= next_lane.start_seconds + 1e-9

    files.save(path := tmp_path / "plan.json", GRAPH, gapped, {})
    assert files.read(path)[0] == gapped
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "stages": ["decode", "denoise", "encode"]}))
    with pytest.raises(
        PlanError, match="device a/0: encode decode are not stages of the graph, in its order"
    ):
        files.read(path)


def test_a_value_that_two_parts_read_keeps_them_on_separate_devices(pipeline: Placement) -> None:
    stages = ("a", "b", "c", "d")
    values = [
        ValueNumbers("a.x", 1, "a", ("b", "d"), 0, 0),
        ValueNumbers("c.x", 1, "c", ("d",), 0, 0),
    ]
    assert separable(stages, values, ((0, 1), (2, 3)))
    assert not separable(stages, values, ((0, 1), (3, 4))), "made in one and read in the other"
    assert not separable(stages, values, ((1, 2), (3, 4))), "read in both"


def test_parts_after_which_no_device_goes_on_get_no_items(pipeline: Placement) -> None:
    placement = held_by(pipeline, [("encode", "decode"), ("encode", "denoise"), ("decode",)])
    assert [placement.spans(assignment) for assignment in placement.assignments] == [
        ((2, 3),),
        ((0, 2),),
        ((2, 3),),
    ]


@pytest.mark.sweep("more")
def test_what_fails_in_a_run_of_two_items_fails_alone(
    flux: Any, crew: Any, cached_dry_runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gapped = placed(flux, 4, cached_dry_runs, (("encode", "decode"), ("denoise",)))
    local_crew, run = crew(gapped), StageWorker.run

    def fails(self: StageWorker, visits: Any) -> Any:
        if any(visit.inputs["seed"] == 2 and visit.stages == ("decode",) for visit in visits):
            return [b""] * len(visits), Report(error=("BrokenPlan", "device a/0: broken"))
        return run(self, visits)

    monkeypatch.setattr(StageWorker, "run", fails)
    requests = [{"prompt": f"prompt {number}", "seed": number} for number in range(4)]
    batch = ran_by(flux, gapped, local_crew, requests)
    assert batch.errors == {3: "device a/0: broken"}
    assert list(batch.outputs) == [1, 2, 4]


@pytest.mark.sweep("more")
def test_a_slow_link_holds_devices_back_and_changes_no_bit(
    flux: Any, crew: Any, pipeline: Placement, single: Any
) -> None:
    slow = replace(pipeline, cluster=cluster_of(3, 1e4))
    batch = ran_by(flux, slow, crew(slow), REQUESTS)
    assert pictures(batch) == single
    sent_bytes = sum(
        transfer.nbytes
        for transfer in pipeline.transfers()
        if transfer.reader_stages == ("decode",)
    )
    assert batch.seconds > len(REQUESTS) * sent_bytes / 1e4
    starts = sorted(lane.start_seconds for lane in batch.lanes if lane.stages == ("decode",))
    assert starts[1] - starts[0] == pytest.approx(sent_bytes / 1e4, rel=0.05)


@pytest.mark.sweep("more")
def test_equal_stages_run_once_and_replicas_share_items(
    flux: Any, crew: Any, cached_dry_runs: Path
) -> None:
    team = placed(
        flux, 3, cached_dry_runs, (("encode",), ("denoise", "decode"), ("denoise", "decode"))
    )
    equal = [{"prompt": "a", "seed": number} for number in (0, 1, 1)]
    batch = ran_by(flux, team, crew(team), equal)
    ran = [(lane.device, lane.stages[0], lane.request) for lane in batch.lanes]
    assert sorted(ran) == [("a/0", "encode", 1), ("a/1", "denoise", 1), ("b/2", "denoise", 2)]
    assert batch.shared == {"encode": 2, "denoise": 1, "decode": 1}
    assert (
        batch.outputs[2]["image"].tobytes()
        == batch.outputs[3]["image"].tobytes()
        != batch.outputs[1]["image"].tobytes()
    )


@pytest.mark.parametrize("count", sampled([2, 5], [5], "cluster"))
def test_the_last_items_go_to_the_devices_that_finish_them_first(
    flux: Any, crew: Any, cached_dry_runs: Path, count: int
) -> None:
    """One of two replicas takes three times as long: of two items it gets none, of five one."""
    stages = ("encode", "denoise", "decode")
    team = placed(flux, count, cached_dry_runs, (stages, stages))
    fast, slow = team.assignments
    column = replace(
        slow.column,
        cold_seconds=3 * slow.column.cold_seconds,
        steady_seconds=3 * slow.column.steady_seconds,
    )
    team = replace(team, assignments=(fast, replace(slow, column=column)))
    batch = ran_by(flux, team, crew(team), requests(count))
    devices = [lane.device for lane in batch.lanes]
    assert devices.count(slow.name) == {2: 0, 5: 1}[count]
    assert len(batch.outputs) == count


@pytest.mark.sweep("more")
def test_lost_values_are_made_again(flux: Any, crew: Any, pipeline: Placement, single: Any) -> None:
    def lose(crew_instance: Here, run: int) -> None:
        if run in (3, 5):
            crew_instance.values.clear()

    local_crew = crew(pipeline, lose)
    assert pictures(ran_by(flux, pipeline, local_crew, REQUESTS)) == single
    assert len(local_crew.ran) > 3 * len(REQUESTS)
    failures = ran_by(
        flux, pipeline, crew(pipeline, lambda local, _: local.values.clear()), REQUESTS[:1]
    )
    assert failures.errors == {1: f"its values were lost {LOSSES + 1} times"}


@pytest.mark.parametrize(
    "seeds", sampled((range(8), range(8, 20)), (range(8),), "cluster"), ids=str
)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.1])
def test_items_that_are_sent_back_are_not_held_back_by_those_that_wait_for_them(
    flux: Any, pipeline: Placement, share: float, seeds: range
) -> None:
    requests = [{"prompt": f"prompt {number % 5}", "seed": number % 9} for number in range(12)]
    placements, max_visits = (
        [pipeline, *(held_by(pipeline, stage_sets) for stage_sets in RETURNING)],
        list[int](),
    )
    for seed in seeds:
        for placement in placements:
            batch = ran_by(flux, placement, crew := Losing(seed, share), requests)
            assert sorted([*batch.outputs, *batch.errors]) == list(range(1, 13))
            assert share or not batch.errors
            assert list(batch.outputs) == sorted(batch.outputs)
            max_visits.append(crew.max_visits)
    assert max(max_visits[:: len(placements)]) == 1
    assert max(max_visits) == 2


def test_a_request_that_is_left_out_holds_nobody_up_who_would_share_its_runs(
    flux: Any, pipeline: Placement
) -> None:
    class Leaves(Watcher):
        def begins_on(self, device: str, stages: Any, request: Any) -> None:
            if request.number % 3 == 1:
                raise LeftOut("cancelled")

    requests = [{"prompt": f"prompt {number % 2}", "seed": number % 4} for number in range(12)]
    for seed in range(5):
        batch = ran_by(flux, pipeline, Losing(seed, 0.0), requests, watcher=Leaves())
        assert batch.errors.keys() <= {1, 4, 7, 10}
        assert set(batch.errors.values()) == {"cancelled"}
        assert sorted([*batch.outputs, *batch.errors]) == list(range(1, 13))


def test_items_that_wait_for_cancelled_requests_have_lost_no_values(
    flux: Any, pipeline: Placement
) -> None:
    """Each of the cancelled requests was to encode the prompt of the last one."""

    class Leaves(Watcher):
        def begins_on(self, device: str, stages: Any, request: Any) -> None:
            if request.number <= LOSSES + 1:
                raise LeftOut("cancelled")

    requests = [{"prompt": "equal", "seed": number} for number in range(LOSSES + 2)]
    batch = ran_by(flux, pipeline, Losing(0, 0.0), requests, watcher=Leaves())
    assert set(batch.errors.values()) == {"cancelled"}
    assert list(batch.outputs) == [LOSSES + 2]


class FailsAfter(Watcher):
    """Ends the process, in effect, after so many runs."""

    def __init__(self, runs: int) -> None:
        self.rest_runs = runs

    def ran_on(self, *_: Any) -> None:
        self.rest_runs -= 1
        if not self.rest_runs:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "runs",
    [
        4,
        *(pytest.param(seed, marks=pytest.mark.sweep("cluster")) for seed in (1, 2, 3, 5, 6, 7, 8)),
    ],
)
def test_a_batch_that_was_interrupted_resumes_after_its_stages(
    flux: Any, crew: Any, pipeline: Placement, single: Any, tmp_path: Path, runs: int
) -> None:
    def sink(request: Any, outputs: Any) -> list[Path]:
        return save_outputs(outputs, tmp_path / f"{request.number}.png")

    with pytest.raises(KeyboardInterrupt):
        ran_by(
            flux,
            pipeline,
            crew(pipeline),
            REQUESTS,
            journal=Journal(tmp_path / "state"),
            watcher=FailsAfter(runs),
            sink=sink,
        )
    local_crew = crew(pipeline)
    batch = ran_by(flux, pipeline, local_crew, REQUESTS, journal=Journal(tmp_path / "state"))
    assert len(local_crew.ran) + runs <= 3 * len(REQUESTS) + 1, (
        "but for a last stage whose file was not written"
    )
    assert [(n, picture) for n, picture in single if n not in batch.done_before] == pictures(batch)
    assert sorted([*batch.done_before, *batch.outputs]) == [1, 2, 3]


@pytest.mark.sweep("more")
def test_a_device_with_less_memory_than_planned_plans_again_or_says_so(
    flux: Any, crew: Any, pipeline: Placement, single: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shrunk(share: float) -> Here:
        def small(problem: Any) -> Any:
            device: Any = open_device(problem)
            if "denoise" in {phase.stage for phase in problem.phases}:
                device.machine.capacity_bytes = int(
                    share * pipeline.assignments[1].column.solution.simulation.peak_bytes
                )
            return device

        monkeypatch.setattr("graphrun.cluster.worker.open_device", small)
        return crew(pipeline)

    notes: list[str] = []

    class Told(Watcher):
        def planned_again(self, line: str) -> None:
            notes.append(line)

    assert pictures(ran_by(flux, pipeline, shrunk(0.9), REQUESTS[:1], watcher=Told())) == single[:1]
    assert notes
    assert all(line.startswith("a/1: ") for line in notes)
    with pytest.raises(BrokenPlan, match=r"device a/1: .*no plan"):
        ran_by(flux, pipeline, shrunk(0.001), REQUESTS[:1])


@pytest.mark.sweep("more")
def test_a_secondary_with_less_memory_than_planned_plans_again(
    flux: Any, crew: Any, single: Any, cached_dry_runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = placed(flux, 3, cached_dry_runs, (("denoise", "decode"), ("encode",)), team_sizes=(2, 1))
    solution = team.assignments[0].column.solution
    assert solution is not None
    peak = max(slot.secondary_peaks[0] for slot in solution.simulation.slots)

    def small(problem: Any) -> Any:
        device: Any = open_device(problem)
        for secondary in device.secondaries:
            secondary.machine.capacity_bytes = peak // 2
        return device

    monkeypatch.setattr("graphrun.cluster.worker.open_device", small)
    batch = ran_by(flux, team, crew(team), REQUESTS[:1])
    assert pictures(batch) == single[:1]
    traces = [
        lane.trace for lane in batch.lanes if lane.device == "a/0+a/1" and lane.trace is not None
    ]
    notes = [note for trace in traces for note in trace.notes]
    assert notes
    assert all("planned again" in note for note in notes)


def test_devices_that_would_make_different_bits_are_refused(
    flux: Any, crew: Any, pipeline: Placement
) -> None:
    encode, denoise, decode = pipeline.assignments
    solution = denoise.column.solution
    assert solution is not None
    transformer = solution.chosen.component("transformer")
    other = replace(transformer, variants=(replace(transformer.variants[0], precision="float32"),))
    simulation = replace(solution.simulation, problem=replace(solution.chosen, components=(other,)))
    column = replace(denoise.column, solution=replace(solution, simulation=simulation))
    with pytest.raises(PlanError, match="b/2 runs transformer in another way"):
        crew(replace(pipeline, assignments=(encode, denoise, replace(decode, column=column))))


def test_what_a_cluster_takes_the_place_of_is_refused_and_ray_is_asked_for(
    flux: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="vram, hardware: leave out with a cluster"):
        graphrun.run_many(flux, ["a"], cluster=cluster_of(), **{**BUDGET, "ram": None})
    with pytest.raises(InputError, match="objective 'fast' is not known"):
        graphrun.run_many(flux, ["a"], cluster=cluster_of(), objective="fast")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install -e '.*\[cluster\]'"):
        graphrun.run_many(flux, ["a"], cluster=cluster_of())

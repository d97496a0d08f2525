"""Lists of requests: the schedule that is predicted fastest, with the bits of single runs; equal
work is done once."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphrun
from graphrun.batch.queue import restarting_loops
from graphrun.batch.schedule import schedules
from graphrun.batch.waiting import WaitingValues
from graphrun.batch.watch import Watcher
from graphrun.errors import BrokenPlan, InputError
from graphrun.model.problem import Problem
from graphrun.modules.build import build
from graphrun.runtime.devices.open import open_device
from graphrun.solve.infeasible import smallest_budget
from graphrun.units import MIB
from graphrun.verify.simulate import simulate

REQUESTS = [{"prompt": f"prompt {number % 2}", "seed": number} for number in range(4)]
SMALL = {"height": 32, "width": 32, "steps": 3, "max_sequence_length": 16}


def encoders(batch: Any) -> int:
    """Bytes of text encoders that were copied to the device."""
    events = [
        event
        for _, _, trace in batch.traces
        for event in trace.events
        if event.kind in ("load", "stream")
    ]
    return sum(event.nbytes for event in events if "text_encoder" in event.component)


def test_every_request_has_the_bits_of_its_own_run_and_a_prompt_is_encoded_once(
    flux: Any, batch: Any, problem: Problem, cached_dry_runs: Path
) -> None:
    results = batch(REQUESTS)
    solution = graphrun.plan(problem, cache=cached_dry_runs)
    single = simulate(solution.problem, solution.plan)
    for number in (1, 4):
        trace = graphrun.run(solution, flux, REQUESTS[number - 1])
        assert results.outputs[number]["image"].tobytes() == trace.outputs["image"].tobytes()
    assert results.shared == {"encode": 2, "denoise": 0, "decode": 0}
    assert results.moved_bytes < len(REQUESTS) * single.moved_bytes
    assert results.seconds < len(REQUESTS) * single.seconds
    assert results.seconds == pytest.approx(results.schedules[0].seconds, rel=0.02)
    assert encoders(results) <= sum(
        c.weight_bytes() for c in problem.components if "text_encoder" in c.name
    )


@pytest.mark.sweep("secondaries")
def test_on_two_devices_every_request_has_the_bits_of_one(batch: Any) -> None:
    single, results = batch(REQUESTS[:2]), batch(REQUESTS[:2], vram="3M,6M")
    assert all(
        results.outputs[n]["image"].tobytes() == single.outputs[n]["image"].tobytes()
        for n in (1, 2)
    )
    slots = [slot for _, _, trace in results.traces for slot in trace.slots]
    assert max(slot.peak_bytes for slot in slots) <= 3 * MIB
    assert 0 < max(slot.secondary_peaks[0] for slot in slots) <= 6 * MIB


@pytest.mark.sweep("more")
def test_a_batch_that_finds_cached_embeddings_loads_no_encoder(
    batch: Any, planned_before: Path
) -> None:
    first = batch(REQUESTS[:2], cache=planned_before, reuse="encoded")
    assert encoders(first) > 0
    resumed_batch = batch(
        [{"prompt": "prompt 0", "seed": 9}, REQUESTS[0]], cache=planned_before, reuse="encoded"
    )
    assert encoders(resumed_batch) == 0
    moved_bytes = {
        component.name
        for segment in resumed_batch.schedules[0].segments
        for component in segment.solution.problem.components
    }
    assert moved_bytes == {"transformer", "vae"}
    assert resumed_batch.outputs[2]["image"].tobytes() == first.outputs[1]["image"].tobytes()


@pytest.mark.sweep("more")
def test_a_broken_request_is_left_out_and_the_others_run_unless_strict(batch: Any) -> None:
    requests = [REQUESTS[0], {"prompt": "b", "steps": "many"}]
    with pytest.raises(InputError, match="request 2: input 'steps'"):
        batch(requests, strict=True)
    results = batch(requests)
    assert list(results.outputs) == [1]
    assert results.errors == {2: "input 'steps': 'many' is not an int"}


class FailsIn(Watcher):
    """Fails the n-th run with an error of the device."""

    def __init__(self, number: int) -> None:
        self.runs, self.number, self.calls = 0, number, list[tuple[int, str]]()

    def run(self, segment: Any, request: Any) -> Any:
        self.runs += 1
        if self.runs != self.number:
            return None

        def progress(slot: int, call: int, calls: int) -> None:
            if call:
                raise BrokenPlan("the card is gone")

        return progress

    def left_out(self, request: Any) -> None:
        self.calls.append((request.number, request.error))


@pytest.mark.parametrize(
    ("run", "failed"),
    [
        (1, [1, 3]),
        *(pytest.param(*case, marks=pytest.mark.sweep("faults")) for case in ((3, [1]), (8, [2]))),
    ],
)
def test_a_request_whose_run_fails_is_reported_and_the_others_run(
    batch: Any, run: int, failed: list[int], tmp_path: Path
) -> None:
    requests = [
        {"prompt": "a", "seed": 1},
        {"prompt": "b", "seed": 2},
        {"prompt": "a", "seed": 3},
        {"prompt": "b", "seed": 4},
    ]
    watcher = FailsIn(run)
    results = batch(requests, watcher=watcher, resume=tmp_path)
    assert [schedule.name for schedule in results.schedules] == ["stage by stage"]
    assert watcher.calls == [(number, "the card is gone") for number in failed]
    assert list(results.errors) == failed
    assert sorted(results.outputs) == [number for number in (1, 2, 3, 4) if number not in failed]
    with pytest.raises(BrokenPlan, match="the card is gone"):
        batch(requests, watcher=FailsIn(run), strict=True)
    resumed_batch = batch(requests, resume=tmp_path)
    assert sorted(resumed_batch.outputs) == failed, (
        "the same batch again runs those that are missing"
    )


def test_loops_that_would_restart_are_named_with_the_reason(flux: Any) -> None:
    assert restarting_loops(flux) == []
    ((stage, reason),) = restarting_loops(
        replace(flux, pipeline="diffusers.StableCascadeDecoderPipeline")
    )
    assert stage == "denoise"
    assert "loops over timesteps" in reason


@pytest.mark.sweep("more")
def test_other_sizes_have_a_schedule_of_their_own(batch: Any) -> None:
    results = batch([{"prompt": "a"}, {"prompt": "a", "steps": 1}])
    assert [schedule.requests for schedule in results.schedules] == [1, 1]
    assert sorted(results.outputs) == [1, 2]


@pytest.fixture
def plan(cached_dry_runs: Path) -> Any:
    """`graphrun.plan`, which solves nothing twice."""
    return functools.partial(graphrun.plan, cache=cached_dry_runs)


@pytest.mark.sweep("more")
def test_the_schedule_with_the_least_predicted_time_comes_first(
    flux: Any, problem: Problem, plan: Any
) -> None:
    counts = {"encode": 8, "denoise": 8, "decode": 8}
    choices = schedules(flux, problem, counts, 8, plan)
    assert [
        len(schedule.segments)
        for schedule in sorted(choices, key=lambda schedule: len(schedule.segments))
    ] == [1, 2, 2, 3]
    assert [schedule.seconds for schedule in choices] == sorted(
        schedule.seconds for schedule in choices
    )
    staged = next(schedule for schedule in choices if schedule.name == "stage by stage")
    whole = next(schedule for schedule in choices if schedule.name == "request by request")
    assert staged.moved_bytes < whole.moved_bytes
    assert staged.group == 8
    encoded = schedules(flux, problem, {**counts, "encode": 0}, 8, plan)
    assert all(
        "encode" not in segment.stages for schedule in encoded for segment in schedule.segments
    )


def test_groups_are_as_large_as_ram_and_disk_allow(flux: Any, problem: Problem, plan: Any) -> None:
    def staged(problem_part: Problem) -> Any:
        counts = {"encode": 8, "denoise": 8, "decode": 8}
        return next(
            schedule
            for schedule in schedules(flux, problem_part, counts, 8, plan)
            if schedule.name == "stage by stage"
        )

    ample = staged(problem)
    assert ample.group == 8
    waiting_bytes = ample.waiting_bytes // 8
    tight = staged(
        replace(
            problem,
            ram_bytes=problem.ram_bytes - ample.room_bytes + 3 * waiting_bytes,
            disk_bytes=2 * waiting_bytes,
        )
    )
    assert tight.group == 5
    assert tight.waiting_bytes == 5 * waiting_bytes
    assert tight.seconds > ample.seconds, "weights are loaded for each group"


def test_on_a_cpu_values_wait_in_the_room_that_the_plans_leave_of_the_budget(
    flux: Any, plan: Any, cached_dry_runs: Path
) -> None:
    problem = graphrun.estimate(
        flux, inputs=SMALL, cache=cached_dry_runs, hardware="cpu", memory="600M"
    )
    for schedule in schedules(flux, problem, {"encode": 8, "denoise": 8, "decode": 8}, 8, plan):
        peak_bytes = max(s.solution.simulation.peak_bytes for s in schedule.segments)
        assert peak_bytes > 0
        assert schedule.room_bytes == problem.effective_bytes - peak_bytes


def test_values_beyond_their_ram_wait_on_disk() -> None:
    import torch

    with WaitingValues(1000) as values:
        values.put(1, "encode.embeds", {"a": torch.ones(200)})
        values.put(2, "encode.embeds", {"a": torch.full((200,), 2.0)})
        assert values.held_bytes == 800
        assert torch.equal(values.get(2, "encode.embeds")["a"], torch.full((200,), 2.0))
        values.drop(1)
        values.drop(2)
        assert values.held_bytes == 0
        assert not values.has(2, "encode.embeds")


@pytest.mark.sweep("more")
def test_memory_that_vanishes_during_a_request_has_its_unblocked_planned_again(
    batch: Any, flux: Any, problem: Problem
) -> None:
    modules = {name: build(component, flux) for name, component in flux.components.items()}
    device, calls, lines = open_device(problem), list[int](), list[str]()
    budget_bytes = smallest_budget(problem) + 200_000

    def shrink(*_: Any) -> None:
        calls.append(len(calls))
        if len(calls) == 5:  # the second step of the second request
            device.machine.capacity_bytes = budget_bytes  # type: ignore[attr-defined]

    class Listener(Watcher):
        def planned_again(self, line: str) -> None:
            lines.append(line)

    requests = [*REQUESTS[:2], REQUESTS[0] | {"seed": 5}]
    expected = batch(requests, modules=modules)
    hook = modules["transformer"].register_forward_pre_hook(shrink)
    try:
        results = batch(
            requests,
            modules=modules,
            device=device,
            watcher=Listener(),
        )
    finally:
        hook.remove()
    for number in (1, 2, 3):
        assert np.array_equal(
            np.asarray(results.outputs[number]["image"]),
            np.asarray(expected.outputs[number]["image"]),
        )
    assert results.outputs.keys() == {1, 2, 3}, "later requests run too, in the memory that is left"
    assert lines[0].endswith("continuing from denoise, after step 1 of 3")
    assert len(calls) == 3 * 3 + 1, "one step is taken twice"
    assert device.allocated_bytes == 0

"""Out of memory: the remaining stages are planned again and the run continues; if no plan fits,
values are saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_component import Small, plan_of, small_hardware, small_problem, use
from whole_pipelines import TinyPipeline, pixels, planned

from graphrun.errors import OutOfMemory
from graphrun.model.problem import Problem, Secondary, StageOption, ValueNumbers
from graphrun.runtime.recovery import execute, remaining_problem
from graphrun.trace import Trace
from graphrun.units import MIB
from graphrun.verify.simulate import simulate
from graphrun.verify.solution import solution_of


@pytest.fixture(scope="module")
def whole() -> TinyPipeline:
    return TinyPipeline("flux-tiny", {"steps": 2, "height": 64, "width": 64})


def run(
    whole: TinyPipeline, problem: Problem, messages: list[str], keep: Path | None = None
) -> Trace:
    solution = solution_of(problem, planned(problem))
    return execute(
        solution,
        whole.graph,
        whole.inputs,
        whole.device,
        host=whole.host,
        tell=messages.append,
        keep=keep,
        ram_bytes=solution.simulation.host_peak_bytes,
    )


@contextmanager
def shrinking(
    whole: TinyPipeline, component: str, capacity_bytes: int, call: int = 1
) -> Iterator[list[str]]:
    """The machine has ``capacity_bytes`` from call number ``call`` of ``component`` on; yields the
    components entered."""
    calls: list[str] = []

    def enter(name: str) -> Any:
        def before(*_: Any) -> None:
            calls.append(name)
            if name == component and calls.count(name) == call:
                whole.device.machine.capacity_bytes = capacity_bytes

        return before

    hooks = [
        whole.modules[name].register_forward_pre_hook(enter(name))
        for name in ("text_encoder", "text_encoder_2", "transformer")
        if name in whole.modules
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
        whole.device.machine.capacity_bytes = None


def roomy(whole: TinyPipeline) -> Problem:
    """With room for the transformer to stay whole."""
    return whole.within(whole.largest_with_activation() + (1 << 20))


def test_memory_that_vanishes_in_a_stage_has_the_remaining_stages_planned_again(
    whole: TinyPipeline,
) -> None:
    problem, messages = roomy(whole), list[str]()
    budget_bytes = whole.smallest().budget_bytes + 200_000
    with shrinking(whole, "transformer", budget_bytes) as calls:
        trace = run(whole, problem, messages)
    assert np.array_equal(pixels(trace.outputs["image"]), whole.image)
    assert len(messages) == len(trace.notes) == 1
    assert "slot denoise/0:transformer first: sim out of memory" in messages[0]
    assert "planned again with" in messages[0]
    assert messages[0].endswith("continuing from denoise, from its start")
    assert calls.count("text_encoder") == calls.count("text_encoder_2") == 1, (
        "what was finished is not done again"
    )
    assert (
        max(slot.peak_bytes for slot in trace.slots if slot.phase.startswith(("denoise", "decode")))
        <= budget_bytes
    )
    assert [slot.part for slot in trace.slots][-1] == "end"
    assert trace.slots[0].start_seconds == pytest.approx(0, abs=1e-3)
    for slot, next_slot in pairwise(trace.slots):
        assert slot.start_seconds <= slot.end_seconds <= next_slot.start_seconds
    for event in trace.events:
        slot = trace.slots[event.slot]
        assert slot.start_seconds <= event.start_seconds
        assert event.end_seconds <= slot.end_seconds
    assert whole.device.allocated_bytes == 0


@pytest.mark.parametrize("call", [2, 5])
def test_it_continues_after_the_last_finished_step(call: int) -> None:
    whole, messages = (
        TinyPipeline("flux-tiny", {"steps": 5, "height": 64, "width": 64}),
        list[str](),
    )
    problem = roomy(whole)
    with shrinking(whole, "transformer", whole.smallest().budget_bytes + 200_000, call) as calls:
        trace = run(whole, problem, messages)
    assert np.array_equal(pixels(trace.outputs["image"]), whole.image)
    assert len(messages) == 1
    assert messages[0].endswith(f"continuing from denoise, after step {call - 1} of 5")
    assert calls.count("transformer") == 5 + 1, (
        "the step that broke is taken twice, and no other one"
    )
    assert (
        sum(
            slot.calls
            for slot in trace.slots
            if slot.phase.startswith("denoise") and slot.part != "load"
        )
        == 6 - call
    )
    assert whole.device.allocated_bytes == 0


@pytest.mark.sweep("more")
def test_a_loop_that_cannot_resume_restarts_and_the_note_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "graphrun.ops.steps.resume_obstacle",
        lambda _: "as for pipelines whose loops are not understood",
    )
    whole, messages = TinyPipeline("wan-tiny", {"steps": 2}), list[str]()
    with shrinking(whole, "transformer", whole.smallest().budget_bytes + 200_000, 4) as calls:
        trace = run(whole, roomy(whole), messages)
    assert np.array_equal(pixels(trace.outputs["image"]), whole.image)
    assert messages[0].endswith("continuing from denoise, from its start")
    assert calls.count("transformer") == 3 + 1 + 4


def test_memory_that_vanished_is_noticed_before_a_stage_begins(whole: TinyPipeline) -> None:
    problem, messages = roomy(whole), list[str]()
    encoding = max(
        slot.peak_bytes
        for slot in simulate(problem, planned(problem)).slots
        if slot.phase.startswith("encode/1")
    )
    with shrinking(whole, "text_encoder_2", max(encoding, whole.smallest().budget_bytes)) as calls:
        trace = run(whole, problem, messages)
    assert np.array_equal(pixels(trace.outputs["image"]), whole.image)
    assert len(messages) == 1
    assert "before denoise, " in messages[0]
    assert " are available of the " in messages[0]
    assert messages[0].endswith("continuing from denoise")
    assert calls.count("transformer") == 2, "the stage did not have to fail"


def test_a_process_whose_other_tensors_exceed_the_budget_is_told_by_how_much(
    whole: TinyPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_bytes = property(lambda device: device.available_bytes + (3 << 20))
    monkeypatch.setattr(type(whole.device), "foreign_bytes", other_bytes)
    messages: list[str] = []
    with pytest.raises(OutOfMemory) as error_info:
        run(whole, roomy(whole), messages)
    text = str(error_info.value)
    assert text.startswith(
        "before encode, 3.00 MiB too much is in use, and nothing is available of"
    )
    assert "free other tensors of this process, or raise its memory budget by more than 3" in text
    assert not messages


def test_memory_that_no_remaining_stage_needs_may_vanish(whole: TinyPipeline) -> None:
    problem, messages = roomy(whole), list[str]()
    peaks = {slot.phase: slot.peak_bytes for slot in simulate(problem, planned(problem)).slots}
    assert peaks["decode/0:vae"] < peaks["denoise/0:transformer"] - 4096
    calls = count(1)

    def after(*_: object) -> None:
        if next(calls) == 2:
            whole.device.machine.capacity_bytes = peaks["denoise/0:transformer"] - 4096

    hook = whole.modules["transformer"].register_forward_hook(after)
    try:
        run(whole, problem, messages)
    finally:
        hook.remove()
        whole.device.machine.capacity_bytes = None
    assert (next(calls), messages) == (3, [])


def test_a_run_that_is_out_of_memory_whatever_is_planned_ends(whole: TinyPipeline) -> None:
    def refuse(*_: object) -> None:
        whole.device.machine.fail_allocation = 1

    hook, messages = whole.modules["text_encoder"].register_forward_pre_hook(refuse), list[str]()
    try:
        with pytest.raises(OutOfMemory, match="remaining stages .planned again 8 times.$"):
            run(whole, replace(whole.problem, budget_bytes=1 << 30), messages)
    finally:
        hook.remove()
        whole.device.machine.fail_allocation = None
    assert len(messages) == 8


def test_an_activation_that_was_estimated_too_low_is_raised_to_what_was_seen(
    whole: TinyPipeline,
) -> None:
    messages: list[str] = []
    smallest = whole.smallest()
    low = tuple(
        replace(p, first_bytes=p.first_bytes // 4, steady_bytes=p.steady_bytes // 4)
        if p.stage == "denoise"
        else p
        for p in smallest.phases
    )
    problem = replace(smallest, phases=low, budget_bytes=smallest.budget_bytes + 100_000)
    trace = run(whole, problem, messages)
    assert np.array_equal(pixels(trace.outputs["image"]), whole.image)
    assert 1 <= len(messages) <= 4
    assert trace.peak_bytes <= problem.effective_bytes


def test_when_no_plan_fits_it_stops_with_finished_values_saved_and_named(
    whole: TinyPipeline, tmp_path: Path
) -> None:
    problem, messages = roomy(whole), list[str]()
    with shrinking(whole, "transformer", 100_000, 2), pytest.raises(OutOfMemory) as error_info:
        run(whole, problem, messages, tmp_path / "new" / "kept")
    assert not messages
    text = str(error_info.value)
    assert "no plan fits the remaining stages (nothing fits: " in text
    assert f"finished values are saved in {tmp_path}/new/kept/values.safetensors: " in text
    assert text.endswith(": denoise.latents after step 1 of 2, encode.embeds")
    tensors = load_file(tmp_path / "new" / "kept" / "values.safetensors")
    # nothing is left behind by the failure
    embeds = whole.run(whole.problem, planned(whole.problem))
    assert np.array_equal(pixels(embeds.outputs["image"]), whole.image)
    assert {"encode.embeds.prompt_embeds", "encode.embeds.pooled_prompt_embeds"} <= tensors.keys()
    assert "denoise.latents after step 1 of 2" in tensors
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert [file.name for file in (tmp_path / "new" / "kept").iterdir()] == ["values.safetensors"]
    assert whole.device.allocated_bytes == 0


def test_values_that_the_disk_does_not_take_are_said_to_be_lost(
    whole: TinyPipeline, tmp_path: Path
) -> None:
    (tmp_path / "kept").touch()
    with (
        shrinking(whole, "transformer", 100_000),
        pytest.raises(OutOfMemory, match="could not be saved: .*File exists"),
    ):
        run(whole, roomy(whole), [], tmp_path / "kept")


def test_a_run_as_planned_is_not_planned_again(whole: TinyPipeline) -> None:
    messages: list[str] = []
    problem = whole.smallest()
    trace = run(whole, problem, messages)
    assert not messages
    assert trace.notes == ()
    assert [slot.phase for slot in trace.slots] == [
        slot.phase for slot in simulate(problem, planned(problem)).slots
    ]


def test_values_that_cannot_be_copied_from_the_device_end_the_run(whole: TinyPipeline) -> None:
    def broken(*_: Any) -> None:
        whole.device.machine.fail_copy = 1

    hook = whole.modules["transformer"].register_forward_pre_hook(broken)
    try:
        with shrinking(whole, "transformer", 100_000), pytest.raises(OutOfMemory) as error_info:
            run(whole, roomy(whole), [])
    finally:
        hook.remove()
        whole.device.machine.fail_copy = None
    assert (
        "no plan fits the remaining stages (encode.embeds could not be copied from the device)"
        in str(error_info.value)
    )
    assert whole.device.allocated_bytes == 0


TWO = """
    slot s0/0:a load
      load a all from pinned
    slot s0/0:a first
      run
    slot s1/0:b load
      evict a all
      load b all from pinned
    slot s1/0:b first
      run
    slot end
      evict b all
"""


def small_case() -> Problem:
    """Two stages with 64 MiB for tensors, and two secondary devices with 32 MiB."""
    uses = [[use(name, 1, small_hardware())] for name in ("a", "b")]
    problem = small_problem({"a": Small(), "b": Small()}, uses, budget=64 * MIB)
    return replace(problem, secondaries=(Secondary(small_hardware(), 32 * MIB),) * 2)


def out_of_memory(part: str, used_bytes: int, available_bytes: int) -> OutOfMemory:
    """The second stage had ``used_bytes`` of 10 MiB, and could not allocate 3 MiB more."""
    error = OutOfMemory("sim out of memory: tried to allocate 3.00 MiB")
    error.phase, error.part, error.planned_bytes = "s1/0:b", part, 10 * MIB
    error.peak_bytes, error.available_bytes = used_bytes, available_bytes
    return error


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("load", {"input_bytes"}),
        ("first", {"first_bytes"}),
        ("steady", {"steady_bytes"}),
        ("first", {"first_bytes", "pipeline_code_bytes"}),
        ("steady", {"steady_bytes", "pipeline_code_bytes"}),
        ("", set[str]()),
    ],
)
@pytest.mark.parametrize(("used_bytes", "more_bytes"), [(9 * MIB, 2 * MIB), (7 * MIB, MIB)])
def test_the_phase_that_ran_out_of_memory_is_planned_with_what_it_lacked(
    part: str, fields: set[str], used_bytes: int, more_bytes: int
) -> None:
    """At least a 64th of the budget more."""
    problem = small_case()
    first, second = problem.phases
    second = replace(second, pipeline_code_bytes=4096 * ("pipeline_code_bytes" in fields))
    problem = replace(problem, phases=(first, second))
    plan, error = plan_of(problem, TWO), out_of_memory(part, used_bytes, 64 * MIB)
    new_problem = remaining_problem(problem, plan, ["s0", "s1"], error)
    increased = {name: getattr(second, name) + more_bytes for name in fields}
    basis = {"basis": "measured"} if fields else {}
    assert new_problem.phases == (first, replace(second, **basis, **increased))
    assert (new_problem.budget_bytes, new_problem.runs) == (64 * MIB, 1)
    assert remaining_problem(problem, plan, ["s1"], error).phases == new_problem.phases[1:]


def test_values_options_and_order_of_finished_stages_are_left_out() -> None:
    problem = small_case()
    stages, error = ("s0", "s1"), out_of_memory("first", 9 * MIB, 64 * MIB)
    problem = replace(
        problem,
        values=tuple(
            ValueNumbers(f"for {stage}", 512, "input", (stage,), 0, number)
            for number, stage in enumerate(stages)
        ),
        options=tuple(
            StageOption(stage, "tiles", (phase,))
            for stage, phase in zip(stages, problem.phases, strict=True)
        ),
        precedence=(stages,),
    )
    plan = plan_of(problem, TWO)
    for todo, precedence in ((stages, (stages,)), (stages[1:], ())):
        new_problem = remaining_problem(problem, plan, todo, error)
        assert [value.name for value in new_problem.values] == [f"for {stage}" for stage in todo]
        assert [option.stage for option in new_problem.options] == [*todo]
        assert new_problem.precedence == precedence
    assert new_problem.options[0].phases == new_problem.phases, "both have the measured bytes"


@pytest.mark.parametrize(
    ("available_bytes", "budget_bytes"), [(64 * MIB - 1, 64 * MIB - 1), (0, 1)]
)
def test_a_device_with_less_memory_than_planned_is_planned_with_what_it_has(
    available_bytes: int, budget_bytes: int
) -> None:
    problem = replace(small_case(), runs=3)
    error = out_of_memory("first", 9 * MIB, available_bytes)
    new_problem = remaining_problem(problem, plan_of(problem, TWO), ["s0", "s1"], error)
    assert (new_problem.budget_bytes, new_problem.runs) == (budget_bytes, 1)
    assert new_problem.phases == problem.phases
    assert new_problem.secondaries == problem.secondaries


@pytest.mark.parametrize(
    ("used_bytes", "available_bytes", "expected_bytes"),
    [
        (9 * MIB, 64 * MIB, 30 * MIB),
        (7 * MIB, 64 * MIB, 32 * MIB - MIB // 2),
        (9 * MIB, 20 * MIB, 20 * MIB),
        (99 * MIB, 64 * MIB, 1),
        (9 * MIB, -MIB, 1),
    ],
)
def test_a_secondary_device_that_ran_out_of_memory_is_planned_with_less(
    used_bytes: int, available_bytes: int, expected_bytes: int
) -> None:
    problem = small_case()
    error = out_of_memory("first", used_bytes, available_bytes)
    error.secondary = 1
    new_problem = remaining_problem(problem, plan_of(problem, TWO), ["s0", "s1"], error)
    assert [secondary.budget_bytes for secondary in new_problem.secondaries] == [
        expected_bytes,
        32 * MIB,
    ]
    assert (new_problem.budget_bytes, new_problem.phases) == (problem.budget_bytes, problem.phases)

"""Copies of components on secondary devices: their seconds and bytes, the rules of `check`, and
when the solver chooses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planner_problems import component, hardware, problem

from graphrun.disk_store import Store
from graphrun.model.choices import apply_choices
from graphrun.model.copies import copyable_to, least_copy_bytes, with_copies, without_pairs
from graphrun.model.phase_trace import CALL, CallTrace, PhaseTrace
from graphrun.model.plan import Plan, parse
from graphrun.model.problem import PhaseNumbers, Problem, Secondary, StageOption, Use
from graphrun.report.verdicts import gain_text
from graphrun.solve import copying, pages, search
from graphrun.solve.solve import solve
from graphrun.store import fitting_for
from graphrun.verify.check import check
from graphrun.verify.coherence import incoherent
from graphrun.verify.simulate import simulate

PAIRS = 3
PLAN = """plan {digest}
variant dit bfloat16 pinned device
copy dit device1
slot s/0:dit@1+dit load
  load dit@1 all from pinned
  load dit all from pinned
slot s/0:dit@1+dit first
  run
slot s/0:dit@1+dit steady x2
  run
slot end
  evict dit all
  evict dit@1 all
"""
WEIGHTS, ACTIVATION, ARGUMENTS = 2 * 1024, 512, 512


def guided(
    slowdown: float = 1.0,
    budget_bytes: int = 8000,
    secondary_bytes: int = 8000,
    *,
    read_seconds: tuple[float, ...] = (),
) -> Problem:
    """A transformer of two blocks, called twice a step: 6 s a call on the main device. Transfers
    take 1 s to the secondary device and 2 s back. A block is loaded in 1 s."""
    links = replace(hardware(), d2h_bytes_per_second=512.0, h2d_bytes_per_second=512.0)
    dit = component("dit", ("k", 2, 1024), seconds_per_byte=1 / 1024)
    main = replace(dit.variants[0], read_seconds=read_seconds)
    twin = replace(main, device="device1", streamable=False, slowdown=slowdown)
    use = Use("dit", 2 * PAIRS, (2 * PAIRS,), (3.0,), transfer=(512, 1024), pairs=(1.0, 1.0))
    phases = (PhaseNumbers("s", 0, (use,), 0, ACTIVATION, ACTIVATION),)
    instance = problem(budget_bytes, (replace(dit, variants=(main, twin)),), phases, card=links)
    return replace(instance, secondaries=(Secondary(links, secondary_bytes),))


def plan_for(instance: Problem, text: str = PLAN) -> Plan:
    return parse(text.format(digest=instance.digest))


@pytest.mark.parametrize(
    ("slowdown", "pair_seconds"), [(1.5, 1 + 9 + 2), (1.0, 1 + 6 + 2), (0.5, 1 + 6 + 2)]
)
def test_a_pair_takes_the_longer_call_and_the_transfers(
    slowdown: float, pair_seconds: float
) -> None:
    instance = guided(slowdown)
    plan = plan_for(instance)
    assert check(instance, plan) == ()
    load, first, steady, _ = simulate(instance, plan).slots
    # each device has its own link
    assert load.seconds == pytest.approx(2)
    assert first.seconds == pytest.approx(pair_seconds)
    assert steady.seconds == pytest.approx(2 * pair_seconds)
    assert steady.compute_seconds == pytest.approx(2 * max(6, 6 * slowdown))
    assert steady.peak_bytes == WEIGHTS + ACTIVATION
    assert steady.secondary_peaks == (WEIGHTS + ACTIVATION + ARGUMENTS,)


def test_the_calls_of_a_pair_may_take_different_seconds() -> None:
    instance = guided()
    (phase,) = instance.phases
    for pairs, pair_seconds in (((0.5, 1.5), 1 + 9 + 2), ((1.5, 0.5), 1 + 9 + 2)):
        use = replace(phase.uses[0], pairs=pairs)
        uneven = replace(instance, phases=(replace(phase, uses=(use,)),))
        first = simulate(uneven, plan_for(uneven)).slots[1]
        assert first.seconds == pytest.approx(pair_seconds)


def test_the_text_of_a_copy_is_read_back() -> None:
    plan = plan_for(guided())
    assert plan.copies == (("dit", 1),)
    assert parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (("copy dit device1", "copy dit device2"), "copy"),
        (("copy dit device1", "copy vae device1"), "copy"),
        (("copy dit device1", "copy dit device1\ncopy dit device1"), "copy"),
        (("dit bfloat16 pinned device\n", "dit bfloat16 pinned device1\n"), "copy"),
        (("copy dit device1\n", ""), "structure"),
        (("  load dit@1 all from pinned\n", ""), "not-streamable"),
        (("  evict dit@1 all\n", ""), "baseline"),
    ],
)
def test_check_refuses_a_wrong_copy(change: tuple[str, str], rule: str) -> None:
    instance = guided()
    assert PLAN.replace(*change) != PLAN
    violations = check(instance, plan_for(instance, PLAN.replace(*change)))
    assert rule in {violation.rule for violation in violations}


def test_check_counts_the_copy_on_its_device() -> None:
    need = WEIGHTS + ACTIVATION + ARGUMENTS
    for nbytes, rules in ((need, set()), (need - 1, {"secondary"})):
        instance = guided(secondary_bytes=nbytes)
        assert {v.rule for v in check(instance, plan_for(instance))} == rules


def test_a_component_without_pairs_has_no_copy() -> None:
    instance = without_pairs(guided())
    assert copyable_to(instance, "dit") == ()
    assert {v.rule for v in check(instance, plan_for(instance))} == {"copy"}


@pytest.mark.parametrize(
    "change",
    [
        {"calls": 5, "group_calls": (5,)},
        {"group_calls": (3,)},
        {"transfer": ()},
        {"pairs": (1.0,)},
    ],
)
def test_a_problem_whose_calls_are_not_pairs_is_refused(change: dict[str, Any]) -> None:
    instance = guided()
    (phase,) = instance.phases
    odd = replace(instance, phases=(replace(phase, uses=(replace(phase.uses[0], **change),)),))
    assert any("are not pairs" in text for text in incoherent(odd))


def test_a_problem_with_a_wrong_copy_is_refused() -> None:
    problem_with_copy = with_copies(guided(), [("dit", 1)])
    assert not [*incoherent(problem_with_copy)]
    original, copy = problem_with_copy.components
    (phase,) = problem_with_copy.phases
    for components, uses in (
        ((original, replace(copy, copy_of="vae")), phase.uses),
        ((copy, original), phase.uses),
        ((original, replace(copy, variants=original.variants)), phase.uses),
        ((original, copy), phase.uses[::-1]),
        ((original, copy), (phase.uses[0], replace(phase.uses[1], calls=2))),
    ):
        changed_problem = replace(
            problem_with_copy, components=components, phases=(replace(phase, uses=uses),)
        )
        assert [*incoherent(changed_problem)]
        assert {
            v.rule for v in check(changed_problem, replace(plan_for(changed_problem), copies=()))
        } == {"problem"}


def test_a_copy_in_another_precision_is_refused() -> None:
    main, twin = guided().components[0].variants
    variants = (main, twin, *(replace(v, precision="int8") for v in (main, twin)))
    instance = guided()
    dit = replace(instance.components[0], variants=variants)
    instance = with_copies(replace(instance, components=(dit,)), [("dit", 1)])
    plan = replace(plan_for(instance), copies=())
    for name, rules in (("bfloat16", set()), ("int8", {"copy"})):
        names = (("dit", "bfloat16 pinned device"), ("dit@1", f"{name} pinned device1"))
        violations = check(instance, replace(plan, variants=names))
        assert {violation.rule for violation in violations} == rules


def test_a_copy_waits_for_the_backing_store_of_its_original() -> None:
    """Blocks are read in 4 s each, one after another, and copied in 1 s."""
    instance = guided(read_seconds=(4.0,))
    unread = plan_for(instance)
    assert {v.rule for v in check(instance, unread)} == {"host-missing"}
    plan = plan_for(instance, PLAN.replace("  load dit@1 all", "  read dit\n  load dit@1 all", 1))
    assert check(instance, plan) == ()
    load = simulate(instance, plan).slots[0]
    assert load.seconds == pytest.approx(4 + 4 + 1)
    assert load.host_bytes == WEIGHTS, "the copy has no backing store of its own"


def test_a_copy_is_chosen_where_it_is_faster() -> None:
    instance = guided()
    solution = solve(instance)
    assert solution.plan.copies == (("dit", 1),)
    assert check(solution.problem, solution.plan) == ()
    single = solve(without_pairs(instance))
    assert solution.seconds == pytest.approx(2 + PAIRS * 9, rel=1e-6)
    assert single.seconds == pytest.approx(1 + PAIRS * 2 * 6, rel=0.05)
    assert solution.seconds >= solution.bound_seconds * (1 - 1e-6)
    assert solution.objective_seconds == pytest.approx(solution.seconds)
    assert simulate(instance, solution.plan).total_seconds == solution.seconds


def test_a_plan_of_a_frontier_or_a_cluster_may_have_a_copy_too(tmp_path: Path) -> None:
    instance, store = guided(), Store(tmp_path)
    solution = fitting_for(instance, store)
    assert solution is not None
    assert solution.plan == solve(instance).plan
    # other commands read the stored plan
    stored_solution = fitting_for(instance, store)
    assert stored_solution is not None
    assert stored_solution.plan.copies == (("dit", 1),)


@pytest.mark.parametrize("runs", [1, 3, 100])
def test_a_session_keeps_the_copy(runs: int) -> None:
    solution = solve(replace(guided(), runs=runs))
    assert solution.plan.copies == (("dit", 1),)
    assert check(solution.problem, solution.plan) == ()
    if runs > 1:
        assert ("dit@1", None) in solution.plan.leaves
        assert solution.simulation.further_seconds == pytest.approx(PAIRS * 9)
        assert solution.simulation.further_moved_bytes == 0


def test_a_copy_halves_what_the_main_device_streams() -> None:
    tight = guided(budget_bytes=ACTIVATION + 1024)
    solution, single = solve(tight), solve(without_pairs(tight))
    assert solution.plan.copies == (("dit", 1),)
    assert [slot.streamed_bytes for slot in single.simulation.slots[1:3]] == [2048, 5 * 2048]
    assert [slot.streamed_bytes for slot in solution.simulation.slots[1:3]] == [2048, 2 * 2048]


@pytest.mark.parametrize(
    ("slowdown", "secondary_bytes"),
    [(3.0, 8000), (1.0, WEIGHTS + ACTIVATION - 1), (1.0, WEIGHTS + ACTIVATION)],
)
def test_a_copy_is_not_chosen_where_it_is_slower_or_does_not_fit(
    slowdown: float, secondary_bytes: int
) -> None:
    instance = guided(slowdown, secondary_bytes=secondary_bytes)
    solution = solve(instance)
    assert solution.plan.copies == ()
    assert solution.seconds == pytest.approx(solve(without_pairs(instance)).seconds)


def test_equal_devices_are_tried_once() -> None:
    instance = guided()
    doubled = replace(instance, secondaries=(*instance.secondaries, *instance.secondaries))
    third = replace(instance.secondaries[0], budget_bytes=10**6)
    assert [*copying.copies_that_fit(doubled)] == [(("dit", 1),)]
    variants = instance.components[0].variants
    other = replace(variants[1], device="device2")
    mixed = replace(
        instance,
        components=(replace(instance.components[0], variants=(*variants, other)),),
        secondaries=(*instance.secondaries, third),
    )
    assert [*copying.copies_that_fit(mixed)] == [(("dit", 1),), (("dit", 2),)]


def test_a_copy_has_the_precision_of_its_original() -> None:
    """A copy in bfloat16 does not fit, and the main device is slower in int8. A pair takes 10 s in
    int8, and 12 s without a copy. It would take 9 s if only the copy were in int8."""
    instance = guided(secondary_bytes=WEIGHTS // 2 + ACTIVATION + ARGUMENTS)
    main, twin = instance.components[0].variants
    halves = {"block_bytes": (512,), "load_seconds": (0.5,), "host_bytes": WEIGHTS // 2}
    small = replace(main, precision="int8", block_seconds=(0.5,), **halves)
    small_twin = replace(twin, precision="int8", block_seconds=(0.0,), **halves)
    dit = replace(instance.components[0], variants=(main, small, twin, small_twin))
    mixed = replace(instance, components=(dit,))
    solution = solve(mixed)
    assert solution.plan.copies == (("dit", 1),)
    names = {c.name: c.variants[0].name for c in solution.chosen.components}
    assert names == {"dit": "int8 pinned device", "dit@1": "int8 pinned device1"}
    assert solution.simulation.slots[2].seconds == pytest.approx(2 * 10)
    assert least_copy_bytes(mixed, "dit", 1) == WEIGHTS // 2 + ACTIVATION


def test_a_copy_is_not_loaded_before_its_original_is_read() -> None:
    """RAM has room for one backing store, and the encoder takes long to load. The copy would be
    loaded meanwhile."""
    instance = guided(read_seconds=(1.0,))
    dit = instance.components[0]
    main, twin = dit.variants
    slow_twin = replace(twin, load_seconds=(15.0,))
    encoder = component("te", ("k", 2, 1024), seconds_per_byte=20 / 1024)
    encoder = replace(
        encoder, variants=(replace(encoder.variants[0], read_seconds=(0.0,), movable=True),)
    )
    encode = PhaseNumbers("e", 0, (Use("te", 1, (1,), (10.0,), transfer=(512, 512)),), 0, 512, 512)
    instance = replace(
        instance,
        components=(encoder, replace(dit, variants=(main, slow_twin))),
        phases=(encode, *instance.phases),
        ram_bytes=WEIGHTS,
    )
    copy_problem = with_copies(instance, [("dit", 1)])
    solution = pages.solved(replace(copy_problem, secondaries=instance.secondaries))
    assert solution is not None
    assert check(solution.problem, solution.plan) == ()


def test_pageable_memory_is_chosen_for_both_where_pinned_memory_is_short() -> None:
    instance = guided()
    main, twin = instance.components[0].variants
    slow_main, slow_twin = (
        replace(variant, backing_store="pageable", load_seconds=(1.25,)) for variant in (main, twin)
    )
    variants = (main, slow_main, twin, slow_twin)
    dit = replace(instance.components[0], variants=variants)
    solution = solve(replace(instance, components=(dit,), pinned_bytes=WEIGHTS - 1))
    assert solution.plan.copies == (("dit", 1),)
    assert {c.variants[0].backing_store for c in solution.chosen.components} == {"pageable"}


def test_large_programs_have_no_plan_on_the_main_device_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "LARGE", 0)
    assert solve(guided()).plan.copies == (("dit", 1),)


def test_the_trace_of_a_phase_alternates_between_copy_and_original() -> None:
    calls = (CallTrace("dit", ((1, 512), (1, 0))), CallTrace("dit", ((1, 1024), (1, 0))))
    first = ((0, CALL), (10, 512))
    steady = ((1, CALL), (11, 512), (10, 0), (0, CALL), (12, 512), (1, CALL), (13, 512))
    instance = guided()
    traced = replace(instance.phases[0], trace=PhaseTrace(calls, first, steady))
    trace = with_copies(replace(instance, phases=(traced,)), [("dit", 1)]).phases[0].trace
    assert [call.component for call in trace.calls] == ["dit", "dit", "dit@1"]
    assert trace.first == ((2, CALL), (10, 512), (1, CALL), (11, 512), (10, 0))
    assert trace.steady == ((2, CALL), (12, 512), (1, CALL), (13, 512))


def test_the_phase_of_a_copy_has_half_the_calls_of_each() -> None:
    instance = guided()
    applied = apply_choices(instance, plan_for(instance))
    assert [(use.component, use.calls) for use in applied.phases[0].uses] == [
        ("dit@1", PAIRS),
        ("dit", PAIRS),
    ]


@pytest.mark.parametrize(
    ("slowdown", "secondary_bytes", "text"),
    [
        (1.0, 8000, "; both calls of guidance run at once, with a copy of dit on device1"),
        (3.0, 8000, "; both calls of guidance at once: a copy of dit on device1 is not faster"),
        (
            1.0,
            2048,
            "; both calls of guidance at once: a copy of dit on device1 needs 2.50 KiB of 2.00 KiB",
        ),
    ],
)
def test_the_second_line_says_how_guidance_runs(
    slowdown: float, secondary_bytes: int, text: str
) -> None:
    instance = guided(slowdown, secondary_bytes=secondary_bytes)
    solution = solve(instance)
    seconds = solve(without_pairs(instance)).seconds
    assert text in gain_text(solution, seconds)
    assert text in gain_text(solution, None)
    assert "guidance" not in gain_text(solve(without_pairs(instance)), seconds)


def test_the_second_line_names_the_permission_to_split_a_batch_of_two() -> None:
    batched = without_pairs(guided())
    solution = solve(batched)
    assert "--allow split lets both halves" in gain_text(solution, None, may_split=True)
    assert "split" not in gain_text(solution, None)
    assert "split" not in gain_text(solve(guided()), None, may_split=True)


def test_the_second_line_says_why_an_option_with_pairs_is_not_chosen() -> None:
    instance = guided(3.0)
    (phase,) = instance.phases
    batch = replace(phase, uses=tuple(replace(use, pairs=()) for use in phase.uses))
    option = StageOption(phase.stage, "split", (phase,), "split")
    with_option = replace(instance, phases=(batch,), options=(option,), allow=("split",))
    solution = solve(with_option)
    assert solution.plan.copies == ()
    assert "a copy of dit on device1 is not faster" in gain_text(solution, None)

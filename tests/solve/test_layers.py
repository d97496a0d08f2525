"""Splitting into layers where blocks do not fit or layers are faster; ring buffers that use
activation bytes free while a layer runs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import planner_problems as make
import pytest

from graphrun.errors import PlanError
from graphrun.model import problem as problem_module
from graphrun.model.least_memory import least_memory
from graphrun.model.plan import Stream
from graphrun.model.problem import BlockGroup, ComponentNumbers, Problem, Use
from graphrun.report.screen import proof
from graphrun.solve.alternatives import alternatives
from graphrun.solve.fastest import fastest
from graphrun.solve.granularity import split_into_layers, splittable
from graphrun.solve.infeasible import Infeasible, smallest_budget
from graphrun.solve.pages import solved
from graphrun.solve.solve import solve
from graphrun.solve.suggestions import predicted_seconds
from graphrun.units import GIB, MIB
from graphrun.verify.check import check
from graphrun.verify.simulate import simulate

MB = 1_000_000


def problem(budget_bytes: int) -> Problem:
    """One component: a remainder of 8 MB and four blocks of 8 MB; as layers, sixteen of 2 MB and
    four of 1 MB. While a layer of 2 MB runs, 3 of 5 MB of activation are allocated."""
    problem = make.flux(budget_bytes)
    variant = problem.components[0].variants[0]

    def variants_of(sizes: tuple[int, ...]) -> tuple[object, ...]:
        seconds = tuple(nbytes / 1e9 for nbytes in sizes)
        return (
            replace(
                variant,
                block_bytes=sizes,
                load_seconds=seconds,
                host_bytes=40 * MB,
                read_seconds=(),
                disk_seconds=(),
            ),
        )

    blocks = (
        BlockGroup("unblocked", ("",), False),
        BlockGroup("b", tuple(f"b.{n}" for n in range(4)), True),
    )
    wide, narrow = (
        tuple(f"b.{n}.{m}" for n in range(4) for m in range(4)),
        tuple(f"b.{n}.n" for n in range(4)),
    )
    layers = (
        BlockGroup("unblocked", ("",), False),
        BlockGroup("b_2", wide, True),
        BlockGroup("b_3", narrow, True),
    )
    finer = ComponentNumbers("m", 1, layers, variants_of((512, 2 * MB, MB)), granularity="layers")  # type: ignore[arg-type]
    component = ComponentNumbers("m", 1, blocks, variants_of((8 * MB, 8 * MB)), layers=finer)  # type: ignore[arg-type]
    order = tuple(
        item
        for n in range(4)
        for item in (*((1, 4 * n + m, 0.001) for m in range(4)), (2, n, 0.001))
    )
    use = Use("m", 2, (2, 2, 2), (0.0, 0.001, 0.001), order, (1, 1, 1), (5 * MB, 3 * MB, 5 * MB))
    phase = replace(
        problem.phases[-1],
        uses=(Use("m", 2, (2, 2), (0.001, 0.005), (), layers=use),),
        input_bytes=0,
        first_bytes=5 * MB,
        steady_bytes=5 * MB,
    )
    problem = replace(
        problem, hardware=replace(problem.hardware, context_bytes=0, workspace_bytes=0)
    )
    return replace(
        problem,
        components=(component,),
        phases=(phase,),
        values=(),
        precedence=None,
        options=(),
        directives=(),
    )


def by_block_alone(original: Problem) -> Problem:
    components = tuple(replace(component, layers=None) for component in original.components)
    uses = tuple(
        replace(phase, uses=tuple(replace(use, layers=None) for use in phase.uses))
        for phase in original.phases
    )
    return replace(original, components=components, phases=uses)


def test_layers_are_used_where_blocks_do_not_fit() -> None:
    tight = solve(problem(12 * MB))
    assert [c.granularity for c in tight.problem.components] == ["layers"]
    assert not check(tight.problem, tight.plan)
    assert simulate(tight.problem, tight.plan).peak_bytes <= 12 * MB
    with pytest.raises(Infeasible):
        solve(by_block_alone(problem(12 * MB)))


def test_a_plan_by_layer_of_the_problem_by_block_is_refused_with_the_reason() -> None:
    instance = problem(12 * MB)
    plan = solve(instance).plan
    with pytest.raises(
        PlanError, match=r"m has no blocks b_3\[.*: they are layers, .* plan's `Solution.problem`"
    ):
        simulate(instance, plan)
    with pytest.raises(PlanError, match=r"m has no blocks b_3\[[0-9, ]*\]$"):
        simulate(by_block_alone(instance), plan)


def test_where_blocks_fit_layers_are_used_if_they_save_a_thousandth() -> None:
    quick = problem(100 * MB)
    (phase,) = quick.phases
    (use,) = phase.uses
    assert use.layers is not None
    slower = replace(
        use, seconds=(1.0, 5.0), layers=replace(use.layers, order=(), seconds=(1.0, 1.0, 1.0))
    )
    slow = replace(quick, phases=(replace(phase, uses=(slower,)),))
    assert [solve(case).problem.components[0].granularity for case in (quick, slow)] == [
        "layers",
        "blocks",
    ]
    seconds = [
        solution.objective_seconds
        for case in (quick, slow)
        for solution in (solve(by_block_alone(case)), solve(case))
    ]
    assert seconds[0] - seconds[1] > 0.005, "compute no longer waits for all 8 MB of the remainder"
    assert seconds[2] == seconds[3] > 8 * seconds[0]


@pytest.mark.long
def test_more_memory_costs_no_time_where_plans_change_from_layers_to_blocks() -> None:
    budgets = [nbytes * MB for nbytes in (10, 12, 16, 20, 22, 24, 28, 32, 36, 40, 44, 48, 56, 100)]
    seconds = [
        simulate(solution.problem, solution.plan).seconds
        for solution in (solve(problem(nbytes)) for nbytes in budgets)
    ]
    assert all(current <= 1.001 * previous for previous, current in pairwise(seconds)), seconds


def test_the_smallest_budget_holds_the_largest_layer_beside_all_activation() -> None:
    instance = problem(12 * MB)
    (need,) = least_memory(split_into_layers(instance, splittable(instance)))
    assert need.ring_buffer_bytes == 2_000_384, "the largest layer"
    minimum = smallest_budget(instance)
    solution = solve(replace(instance, budget_bytes=minimum))
    simulation = simulate(solution.problem, solution.plan)
    assert simulation.peak_bytes == minimum - instance.overhead_bytes
    with pytest.raises(Infeasible) as error_info:
        solve(replace(instance, budget_bytes=minimum - 1))
    assert error_info.value.smallest_budget_bytes == minimum


def test_a_ring_buffer_that_is_too_small_is_a_violation() -> None:
    instance = problem(12 * MB)
    solution = solve(replace(instance, budget_bytes=smallest_budget(instance)))
    slots = tuple(
        replace(
            slot,
            actions=tuple(
                replace(a, ring_buffer_bytes=a.ring_buffer_bytes - 512)
                if isinstance(a, Stream)
                else a
                for a in slot.actions
            ),
        )
        for slot in solution.plan.slots
    )
    assert "ring_buffer" in {
        violation.rule for violation in check(solution.problem, replace(solution.plan, slots=slots))
    }


def test_a_session_with_layers_repeats_the_plan_of_one_run() -> None:
    instance = replace(problem(24 * MB), runs=3)
    by_blocks, single_run, session_solution = (
        solve(by_block_alone(instance)),
        solve(replace(instance, runs=1)),
        solve(instance),
    )
    assert [
        c.granularity
        for c in (*single_run.problem.components, *session_solution.problem.components)
    ] == [
        "layers",
        "layers",
    ]
    assert (
        session_solution.plan.further_slots == session_solution.plan.slots == single_run.plan.slots
    )
    assert not check(session_solution.problem, session_solution.plan)
    seconds = simulate(session_solution.problem, session_solution.plan).total_seconds
    assert seconds == pytest.approx(3 * simulate(single_run.problem, single_run.plan).seconds)
    assert 1.02 * seconds < simulate(by_blocks.problem, by_blocks.plan).total_seconds
    assert session_solution.bound_seconds <= session_solution.objective_seconds
    assert not session_solution.proven_optimal


def test_a_session_with_layers_from_disk_copies_nothing_again_where_everything_stays() -> None:
    instance = replace(problem(100 * MB), runs=2, ram_bytes=10 * MB)

    def on_disk(component: ComponentNumbers) -> ComponentNumbers:
        (plain,) = component.variants
        read_seconds = tuple(nbytes / 1e9 for nbytes in plain.block_bytes)
        disk = replace(
            plain,
            backing_store="disk",
            host_bytes=2 * max(plain.block_bytes),
            disk_seconds=read_seconds,
        )
        return replace(
            component, variants=(disk,), layers=component.layers and on_disk(component.layers)
        )

    solution = solve(replace(instance, components=tuple(map(on_disk, instance.components))))
    assert [c.granularity for c in solution.problem.components] == ["layers"], (
        "blocks need a bounce buffer of 16 MB"
    )
    assert simulate(solution.problem, solution.plan).further_moved_bytes == 0


def test_layers_may_be_faster_with_another_variant_than_blocks() -> None:
    """Blocks are slow to read while others are copied, layers to read into RAM first."""
    instance = problem(100 * MB)

    def both(
        component: ComponentNumbers, read_factor: float, disk_factor: float
    ) -> ComponentNumbers:
        (plain,) = component.variants
        reads, disks = (
            tuple(factor * nbytes / 1e9 for nbytes in plain.block_bytes)
            for factor in (read_factor, disk_factor)
        )
        pinned = replace(plain, read_seconds=reads)
        on_disk = replace(plain, backing_store="disk", host_bytes=16 * MB, disk_seconds=disks)
        return replace(
            component,
            variants=(pinned, on_disk),
            layers=component.layers and both(component.layers, 3, 1),
        )

    components = tuple(both(component, 1, 3) for component in instance.components)
    instance = replace(instance, components=components)
    by_blocks, solution = solve(by_block_alone(instance)), solve(instance)
    assert dict(by_blocks.plan.variants) == {"m": "bfloat16 pinned device"}
    assert dict(solution.plan.variants) == {"m": "bfloat16 disk device"}
    assert [c.granularity for c in solution.problem.components] == ["layers"]
    assert solution.bound_seconds < solution.seconds < 0.95 * by_blocks.bound_seconds


@pytest.mark.sweep("more")
def test_the_bound_of_a_plan_with_blocks_covers_plans_with_layers(make_problem: Any) -> None:
    """Qwen-Image in 12 GiB: layers are faster by the program, and slower when simulated."""
    instance = make_problem("qwen-image", 12 * GIB, hardware="rtx4090")
    solution = solved(instance)
    assert solution is not None
    assert {component.granularity for component in solution.problem.components} == {"blocks"}
    by_layers = fastest(split_into_layers(instance, {"transformer"}), layers=False)
    assert by_layers is not None
    assert solution.bound_seconds <= by_layers.objective_seconds < solution.objective_seconds
    gap = solution.seconds / solution.bound_seconds - 1
    assert proof(solution) == f"at most {100 * gap:.2g} % slower than the best possible plan"


@pytest.mark.parametrize(("share", "slower"), [(0.8, "25 %"), (0.95, "5.3 %"), (0.4, "150 %")])
def test_how_much_slower_a_plan_is_counts_from_the_bound(share: float, slower: str) -> None:
    solution = solve(problem(12 * MB))
    solution = replace(solution, bound_seconds=share * solution.seconds)
    assert proof(solution) == f"at most {slower} slower than the best possible plan"


def with_a_large_variant(budget_bytes: int) -> Problem:
    """`problem` with a second variant of four times the bytes, which needs permission."""
    instance = problem(budget_bytes)

    def both(component: ComponentNumbers) -> ComponentNumbers:
        (plain,) = component.variants
        wide = tuple(4 * nbytes for nbytes in plain.block_bytes)
        large = replace(
            plain, precision="float64", block_bytes=wide, host_bytes=160 * MB, needs="float64"
        )
        return replace(
            component, variants=(plain, large), layers=component.layers and both(component.layers)
        )

    return replace(instance, components=tuple(both(component) for component in instance.components))


def test_a_component_held_as_one_variant_is_split_into_layers_of_that_variant() -> None:
    (component,) = with_a_large_variant(100 * MB).components
    large = component.stored_as("float64 pinned device")
    assert large.layers is not None
    for candidate, sizes in (
        (large, (32 * MB, 32 * MB)),
        (large.layers, (4 * 512, 8 * MB, 4 * MB)),
    ):
        assert [(v.precision, v.block_bytes, v.needs) for v in candidate.variants] == [
            ("float64", sizes, "")
        ]
    solution = solve(with_a_large_variant(50 * MB))
    _, (plan_row, *other_rows) = alternatives(solution, "m")
    assert plan_row.moved_bytes == 36 * MB + 512, "each of its layers once"
    (row,) = (candidate for candidate in other_rows if candidate.variant)
    assert row.fits, "as layers"
    assert row.moved_bytes > 128 * MB, "they are those of the large variant"


def test_only_the_chosen_variant_has_a_ring_buffer_for_layers() -> None:
    instance = problem(12 * MB)
    minimum = smallest_budget(instance)
    two_variants = replace(with_a_large_variant(minimum), allow=("float64",))
    assert smallest_budget(two_variants) == minimum
    assert (
        predicted_seconds(two_variants)
        == predicted_seconds(replace(instance, budget_bytes=minimum))
        is not None
    )


def stored_as(
    component: ComponentNumbers, *blocks: int, layers: tuple[int, ...], **fields: object
) -> ComponentNumbers:
    """``component`` with these sizes of blocks and layers."""
    (plain,) = component.variants
    assert component.layers is not None
    seconds = tuple(nbytes / 1e9 for nbytes in blocks)
    variant = replace(plain, block_bytes=blocks, load_seconds=seconds, **fields)  # type: ignore[arg-type]
    finer = replace(
        variant, block_bytes=layers, load_seconds=tuple(nbytes / 1e9 for nbytes in layers)
    )
    return replace(
        component, variants=(variant,), layers=replace(component.layers, variants=(finer,))
    )


def with_experts(budget_bytes: int) -> Problem:
    """``m``, which needs less as layers, then ``e``, which needs more: its remainder, which cannot
    be streamed, grows. A variant of ``e`` that needs less as layers is not allowed."""
    instance = problem(budget_bytes)
    ((component,), (phase,)) = instance.components, instance.phases
    (use,) = phase.uses
    assert component.layers is not None
    assert use.layers is not None
    m = stored_as(component, 24 * MB, 8 * MB, layers=(512, 2 * MB, MB))
    e = stored_as(
        replace(component, name="e", layers=replace(component.layers, name="e")),
        8 * MB,
        8 * MB,
        layers=(20 * MB, 2 * MB, MB),
    )
    small = stored_as(e, 4 * MB, 8 * MB, layers=(512, 512, 512), precision="nf4", needs="nf4")
    assert e.layers is not None
    assert small.layers is not None
    layers = replace(e.layers, variants=e.layers.variants + small.layers.variants)
    e = replace(e, variants=e.variants + small.variants, layers=layers)
    of_e = replace(use, component="e", layers=replace(use.layers, component="e"))
    return replace(
        instance, components=(m, e), phases=(phase, replace(phase, stage="then", uses=(of_e,)))
    )


@pytest.mark.parametrize("runs", [1, 2])
def test_the_smallest_budget_uses_layers_only_where_they_need_less(runs: int) -> None:
    instance = replace(with_experts(12 * MB), runs=runs)
    with pytest.raises(Infeasible) as error_info:
        solve(instance)
    minimum = error_info.value.smallest_budget_bytes
    assert minimum == smallest_budget(instance) == 21 * MB, (
        "the remainder of e, one block of it, and 5 MB of activation"
    )
    assert error_info.value.suggestions[0].change == (("--vram", str(minimum)),)
    solution = solve(replace(instance, budget_bytes=minimum))
    assert [c.granularity for c in solution.problem.components] == ["layers", "blocks"]
    with pytest.raises(Infeasible):
        solve(replace(instance, budget_bytes=minimum - 1))


def test_a_component_that_needs_less_host_memory_as_layers_is_split_if_the_device_has_enough() -> (
    None
):
    instance = problem(18 * MB)
    component = stored_as(
        instance.components[0],
        512,
        8 * MB,
        layers=(5 * MB, 4 * MB, 4 * MB),
        backing_store="disk",
        host_bytes=16 * MB,
    )
    (variant,) = component.variants
    assert component.layers is not None
    layers = replace(
        component.layers,
        variants=(
            replace(component.layers.variants[0], host_bytes=10 * MB, disk_seconds=(0.01,) * 3),
        ),
    )
    component = replace(
        component, variants=(replace(variant, disk_seconds=(0.01, 0.01)),), layers=layers
    )
    instance = replace(instance, components=(component,), ram_bytes=12 * MB)
    assert [c.granularity for c in solve(instance).problem.components] == ["layers"]
    tight = replace(instance, budget_bytes=13 * MB + 512)
    assert [c.granularity for c in solve(replace(tight, ram_bytes=16 * MB)).problem.components] == [
        "blocks"
    ]
    with pytest.raises(Infeasible) as error_info:
        solve(tight)
    assert (error_info.value.needs, error_info.value.smallest_ram_bytes) == ((), 16 * MB), (
        "as layers VRAM would be short"
    )
    assert error_info.value.smallest_budget_bytes == smallest_budget(tight) == 14 * MB + 448, (
        "of its layers"
    )
    assert {suggestion.change[0][0] for suggestion in error_info.value.suggestions} == {
        "--vram",
        "--ram",
    }


def test_splitting_twice_changes_nothing_and_a_split_problem_has_another_digest() -> None:
    instance = problem(12 * MB)
    split = split_into_layers(instance, ["m"])
    assert split_into_layers(split, ["m"]) == split
    assert split.digest != instance.digest
    assert not splittable(split)


def test_a_digest_is_of_the_canonical_json_whatever_was_digested_before() -> None:
    instance = problem(12 * MB)
    for variant in (
        instance,
        replace(instance, budget_bytes=13 * MB),
        replace(instance, phases=instance.phases[:1]),
        split_into_layers(instance, ["m"]),
        replace(instance, graph='of "m", \x000'),
    ):
        text = json.dumps(
            variant, default=problem_module._fields_of, sort_keys=True, separators=(",", ":")
        )
        assert variant.digest == hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.sweep("more")
def test_layers_are_tried_where_the_plan_with_blocks_simulates_slower(make_problem: Any) -> None:
    """The program of layers predicts no fewer seconds than the program of blocks."""
    solution = solved(make_problem("shapes", 6 * MIB, 8 * GIB))
    assert solution is not None
    granularities = {numbers.name: numbers.granularity for numbers in solution.problem.components}
    assert granularities["transformer"] == "layers"

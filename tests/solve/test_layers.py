"""Splitting into layers where blocks do not fit or layers are faster; ring buffers that use
activation bytes free while a layer runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import planner_problems as make
import pytest

from graphrun.errors import PlanError
from graphrun.model.least_memory import least_memory
from graphrun.model.plan import Stream
from graphrun.model.problem import BlockGroup, ComponentNumbers, Problem, Use
from graphrun.solve.alternatives import alternatives
from graphrun.solve.granularity import split_into_layers, splittable
from graphrun.solve.infeasible import Infeasible, smallest_budget
from graphrun.solve.repairs import predicted_seconds
from graphrun.solve.solve import solve
from graphrun.verify.check import check
from graphrun.verify.simulate import simulate

MB = 1_000_000


def problem(budget_bytes: int) -> Problem:
    """One component: a remainder of 8 MB and four blocks of 8 MB; as layers, sixteen of 2 MB and
    four of 1 MB. While a layer of 2 MB runs, 3 of 5 MB of activation are allocated."""
    of = make.flux(budget_bytes)
    variant = of.components[0].variants[0]

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
    own = ComponentNumbers("m", 1, blocks, variants_of((8 * MB, 8 * MB)), layers=finer)  # type: ignore[arg-type]
    order = tuple(
        item
        for n in range(4)
        for item in (*((1, 4 * n + m, 0.001) for m in range(4)), (2, n, 0.001))
    )
    use = Use("m", 2, (2, 2, 2), (0.0, 0.001, 0.001), order, (1, 1, 1), (5 * MB, 3 * MB, 5 * MB))
    phase = replace(
        of.phases[-1],
        uses=(Use("m", 2, (2, 2), (0.001, 0.005), (), layers=use),),
        input_bytes=0,
        first_bytes=5 * MB,
        steady_bytes=5 * MB,
    )
    of = replace(of, hardware=replace(of.hardware, context_bytes=0, workspace_bytes=0))
    return replace(
        of,
        components=(own,),
        phases=(phase,),
        values=(),
        precedence=None,
        options=(),
        directives=(),
    )


def by_block_alone(of: Problem) -> Problem:
    components = tuple(replace(component, layers=None) for component in of.components)
    uses = tuple(
        replace(phase, uses=tuple(replace(use, layers=None) for use in phase.uses))
        for phase in of.phases
    )
    return replace(of, components=components, phases=uses)


def test_layers_are_used_where_blocks_do_not_fit() -> None:
    tight = solve(problem(12 * MB))
    assert [c.granularity for c in tight.problem.components] == ["layers"]
    assert not check(tight.problem, tight.plan)
    assert simulate(tight.problem, tight.plan).peak_bytes <= 12 * MB
    with pytest.raises(Infeasible):
        solve(by_block_alone(problem(12 * MB)))


def test_a_plan_by_layer_of_the_problem_by_block_is_refused_with_the_reason() -> None:
    of = problem(12 * MB)
    plan = solve(of).plan
    with pytest.raises(
        PlanError, match=r"m has no blocks b_2\[.*: they are layers, .* use `Solution.problem`"
    ):
        simulate(of, plan)
    with pytest.raises(PlanError, match=r"m has no blocks b_2\[[0-9, ]*\]$"):
        simulate(by_block_alone(of), plan)


def test_where_blocks_fit_layers_are_used_if_they_save_a_thousandth() -> None:
    quick = problem(100 * MB)
    (phase,) = quick.phases
    (use,) = phase.uses
    assert use.layers is not None
    slower = replace(
        use, seconds=(1.0, 5.0), layers=replace(use.layers, order=(), seconds=(1.0, 1.0, 1.0))
    )
    slow = replace(quick, phases=(replace(phase, uses=(slower,)),))
    assert [solve(of).problem.components[0].granularity for of in (quick, slow)] == [
        "layers",
        "blocks",
    ]
    seconds = [
        solution.objective_seconds
        for of in (quick, slow)
        for solution in (solve(by_block_alone(of)), solve(of))
    ]
    assert seconds[0] - seconds[1] > 0.005, "compute no longer waits for all 8 MB of the remainder"
    assert seconds[2] == seconds[3] > 8 * seconds[0]


@pytest.mark.long
def test_more_memory_costs_no_time_where_plans_change_from_layers_to_blocks() -> None:
    budgets = [nbytes * MB for nbytes in (10, 12, 16, 20, 22, 24, 28, 32, 36, 40, 44, 48, 56, 100)]
    seconds = [
        simulate(of.problem, of.plan).seconds
        for of in (solve(problem(nbytes)) for nbytes in budgets)
    ]
    assert all(more <= 1.001 * less for less, more in pairwise(seconds)), seconds


def test_the_smallest_budget_holds_the_largest_layer_beside_all_activation() -> None:
    of = problem(12 * MB)
    (need,) = least_memory(split_into_layers(of, splittable(of)))
    assert need.ring_buffer_bytes == 2_000_384, "the largest layer"
    least = smallest_budget(of)
    solution = solve(replace(of, budget_bytes=least))
    found = simulate(solution.problem, solution.plan)
    assert found.peak_bytes == least - of.overhead_bytes
    with pytest.raises(Infeasible) as refused:
        solve(replace(of, budget_bytes=least - 1))
    assert refused.value.smallest_budget_bytes == least


def test_a_ring_buffer_that_is_too_small_is_a_violation() -> None:
    of = problem(12 * MB)
    solution = solve(replace(of, budget_bytes=smallest_budget(of)))
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
    of = replace(problem(24 * MB), runs=3)
    before, once, found = solve(by_block_alone(of)), solve(replace(of, runs=1)), solve(of)
    assert [c.granularity for c in (*once.problem.components, *found.problem.components)] == [
        "layers",
        "layers",
    ]
    assert found.plan.again == found.plan.slots == once.plan.slots
    assert not check(found.problem, found.plan)
    seconds = simulate(found.problem, found.plan).total_seconds
    assert seconds == pytest.approx(3 * simulate(once.problem, once.plan).seconds)
    assert 1.02 * seconds < simulate(before.problem, before.plan).total_seconds
    assert found.bound_seconds <= found.objective_seconds
    assert not found.proven_optimal


def test_a_session_with_layers_from_disk_copies_nothing_again_where_everything_stays() -> None:
    of = replace(problem(100 * MB), runs=2, ram_bytes=10 * MB)

    def on_disk(component: ComponentNumbers) -> ComponentNumbers:
        (plain,) = component.variants
        read = tuple(nbytes / 1e9 for nbytes in plain.block_bytes)
        disk = replace(
            plain, backing_store="disk", host_bytes=2 * max(plain.block_bytes), disk_seconds=read
        )
        return replace(
            component, variants=(disk,), layers=component.layers and on_disk(component.layers)
        )

    found = solve(replace(of, components=tuple(map(on_disk, of.components))))
    assert [c.granularity for c in found.problem.components] == ["layers"], (
        "blocks need a bounce buffer of 16 MB"
    )
    assert simulate(found.problem, found.plan).again_moved_bytes == 0


def with_a_large_variant(budget_bytes: int) -> Problem:
    """`problem` with a second variant of four times the bytes, which needs permission."""
    of = problem(budget_bytes)

    def both(component: ComponentNumbers) -> ComponentNumbers:
        (plain,) = component.variants
        wide = tuple(4 * nbytes for nbytes in plain.block_bytes)
        large = replace(
            plain, precision="float64", block_bytes=wide, host_bytes=160 * MB, needs="float64"
        )
        return replace(
            component, variants=(plain, large), layers=component.layers and both(component.layers)
        )

    return replace(of, components=tuple(both(component) for component in of.components))


def test_a_component_held_as_one_variant_is_split_into_layers_of_that_variant() -> None:
    (own,) = with_a_large_variant(100 * MB).components
    large = own.stored_as("float64 pinned device")
    assert large.layers is not None
    for of, sizes in ((large, (32 * MB, 32 * MB)), (large.layers, (4 * 512, 8 * MB, 4 * MB))):
        assert [(v.precision, v.block_bytes, v.needs) for v in of.variants] == [
            ("float64", sizes, "")
        ]
    solution = solve(with_a_large_variant(50 * MB))
    _, (planned, *others) = alternatives(solution, "m")
    assert planned.moved_bytes == 36 * MB + 512, "each of its layers once"
    (found,) = (of for of in others if of.variant)
    assert found.fits, "as layers"
    assert found.moved_bytes > 128 * MB, "they are those of the large variant"


def test_only_the_chosen_variant_has_a_ring_buffer_for_layers() -> None:
    of = problem(12 * MB)
    least = smallest_budget(of)
    both = replace(with_a_large_variant(least), allow=("float64",))
    assert smallest_budget(both) == least
    assert predicted_seconds(both) == predicted_seconds(replace(of, budget_bytes=least)) is not None


def stored_as(
    component: ComponentNumbers, *blocks: int, layers: tuple[int, ...], **others: object
) -> ComponentNumbers:
    """``component`` with these sizes of blocks and layers."""
    (plain,) = component.variants
    assert component.layers is not None
    seconds = tuple(nbytes / 1e9 for nbytes in blocks)
    variant = replace(plain, block_bytes=blocks, load_seconds=seconds, **others)  # type: ignore[arg-type]
    finer = replace(
        variant, block_bytes=layers, load_seconds=tuple(nbytes / 1e9 for nbytes in layers)
    )
    return replace(
        component, variants=(variant,), layers=replace(component.layers, variants=(finer,))
    )


def with_experts(budget_bytes: int) -> Problem:
    """``m``, which needs less as layers, then ``e``, which needs more: its remainder, which cannot
    be streamed, grows. A variant of ``e`` that needs less as layers is not allowed."""
    of = problem(budget_bytes)
    ((own,), (phase,)) = of.components, of.phases
    (use,) = phase.uses
    assert own.layers is not None
    assert use.layers is not None
    m = stored_as(own, 24 * MB, 8 * MB, layers=(512, 2 * MB, MB))
    e = stored_as(
        replace(own, name="e", layers=replace(own.layers, name="e")),
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
        of, components=(m, e), phases=(phase, replace(phase, stage="then", uses=(of_e,)))
    )


@pytest.mark.parametrize("runs", [1, 2])
def test_the_smallest_budget_uses_layers_only_where_they_need_less(runs: int) -> None:
    of = replace(with_experts(12 * MB), runs=runs)
    with pytest.raises(Infeasible) as refused:
        solve(of)
    least = refused.value.smallest_budget_bytes
    assert least == smallest_budget(of) == 21 * MB, (
        "the remainder of e, one block of it, and 5 MB of activation"
    )
    assert refused.value.repairs[0].change == (("--vram", str(least)),)
    found = solve(replace(of, budget_bytes=least))
    assert [c.granularity for c in found.problem.components] == ["layers", "blocks"]
    with pytest.raises(Infeasible):
        solve(replace(of, budget_bytes=least - 1))


def test_a_component_that_needs_less_host_memory_as_layers_is_split_if_the_device_has_enough() -> (
    None
):
    of = problem(18 * MB)
    own = stored_as(
        of.components[0],
        512,
        8 * MB,
        layers=(5 * MB, 4 * MB, 4 * MB),
        backing_store="disk",
        host_bytes=16 * MB,
    )
    (variant,) = own.variants
    assert own.layers is not None
    layers = replace(
        own.layers,
        variants=(replace(own.layers.variants[0], host_bytes=10 * MB, disk_seconds=(0.01,) * 3),),
    )
    own = replace(own, variants=(replace(variant, disk_seconds=(0.01, 0.01)),), layers=layers)
    of = replace(of, components=(own,), ram_bytes=12 * MB)
    assert [c.granularity for c in solve(of).problem.components] == ["layers"]
    tight = replace(of, budget_bytes=13 * MB + 512)
    assert [c.granularity for c in solve(replace(tight, ram_bytes=16 * MB)).problem.components] == [
        "blocks"
    ]
    with pytest.raises(Infeasible) as refused:
        solve(tight)
    assert (refused.value.needs, refused.value.smallest_ram_bytes) == ((), 16 * MB), (
        "as layers VRAM would be short"
    )
    assert refused.value.smallest_budget_bytes == smallest_budget(tight) == 14 * MB + 448, (
        "of its layers"
    )
    assert {repair.change[0][0] for repair in refused.value.repairs} == {"--vram", "--ram"}


def test_splitting_twice_changes_nothing_and_a_split_problem_has_another_digest() -> None:
    of = problem(12 * MB)
    once = split_into_layers(of, ["m"])
    assert split_into_layers(once, ["m"]) == once
    assert once.digest != of.digest
    assert not splittable(once)

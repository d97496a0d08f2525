"""Choices other than blocks (variants, orders, options, sessions): properties of all solutions, and
pruning that loses none."""

from __future__ import annotations

import sys
import tracemalloc
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from planner_problems import GIB, MIB, component, flux, hardware, problem
from planner_random import random_problem

from graphrun.model.plan import Drop, Read, Restore, Spill
from graphrun.model.problem import PhaseNumbers, Problem, StageOption, Use, ValueNumbers
from graphrun.solve.actions import plan_of
from graphrun.solve.baselines import BASELINES, fitting
from graphrun.solve.least import has_usable_variants
from graphrun.solve.milp import Formulation
from graphrun.solve.orders import (
    MOST_STAGE_CHOICES,
    MOST_STAGE_COLUMNS,
    stage_choices,
    topological_orders,
)
from graphrun.solve.pages import solved
from graphrun.solve.program import program_of
from graphrun.solve.search import Answer, choose
from graphrun.solve.solve import solve
from graphrun.verify.simulate import simulate

SEEDS = st.integers(0, 10**6)
QUICK = settings(max_examples=25, deadline=None)


def best(of: Problem, *, all_variants: bool = False) -> Answer | None:
    if not has_usable_variants(of):
        return None
    return choose(
        [Formulation(each.program) for each in stage_choices(of, dominated=all_variants)[0]]
    )


def seconds(of: Problem) -> float:
    found = best(of)
    return float("inf") if found is None else found.program.seconds(found.choice)


@pytest.mark.long
@QUICK
@given(SEEDS)
@example(13452)  # a backing store held from the start, and one read when another was dropped
def test_pruning_dominated_variants_keeps_the_optimum(seed: int) -> None:
    of = random_problem(seed)
    one, other = best(of), best(of, all_variants=True)
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert one.program.seconds(one.choice) == pytest.approx(
            other.program.seconds(other.choice), abs=1e-6
        )
        assert one.program.moved_bytes(one.choice) == other.program.moved_bytes(other.choice)


@pytest.mark.long
@QUICK
@given(SEEDS, st.sampled_from(["vram", "ram", "pinned", "allow", "spill"]))
@pytest.mark.long
def test_more_of_anything_never_costs_time(seed: int, what: str) -> None:
    of = random_problem(seed)
    more = {
        "vram": replace(of, budget_bytes=of.budget_bytes + 1000),
        "ram": replace(of, ram_bytes=of.ram_bytes + 700),
        "pinned": replace(of, pinned_bytes=None),
        "allow": replace(of, allow=("nf4", "tiling")),
        "spill": replace(
            of,
            hardware=replace(of.hardware, d2h_bytes_per_second=4096.0, h2d_bytes_per_second=4096.0),
        ),
    }[what]
    assert seconds(more) <= seconds(of) + 1e-6


@QUICK
@given(SEEDS, st.integers(0, 2))
def test_fewer_variants_never_save_time(seed: int, which: int) -> None:
    of = random_problem(seed)
    numbers = of.components[which % len(of.components)]
    assume(len(numbers.variants) > 1)
    fewer = replace(numbers, variants=numbers.variants[:-1])
    less = replace(
        of, components=tuple(fewer if c.name == numbers.name else c for c in of.components)
    )
    assert seconds(of) <= seconds(less) + 1e-6


@pytest.mark.long
@QUICK
@given(SEEDS)
def test_equal_problems_have_plans_that_are_equal_byte_for_byte(seed: int) -> None:
    of = random_problem(seed)
    one, other = solved(of), solved(replace(of))
    assert (one is None and other is None) or (
        one is not None and other is not None and str(one.plan) == str(other.plan)
    )


def encoders() -> Problem:
    """Two independent encoders, then a stage that needs both. The output of the first leaves no
    memory for the second's activation."""
    made = tuple(
        component(name, ("unblocked", 1, 2 * MIB), seconds_per_byte=1 / MIB) for name in "abc"
    )
    uses = [Use(name, 1, (1,), (1.0,)) for name in "abc"]
    stages = zip(("sa", "sb", "sc"), uses, (0, 4 * MIB, 0), strict=True)
    phases = tuple(
        PhaseNumbers(stage, 0, (use,), 0, activation, 0) for stage, use, activation in stages
    )
    values = (
        ValueNumbers("va", 4 * MIB, "sa", ("sc",), 1, 2),
        ValueNumbers("vb", 0, "sb", ("sc",), 2, 2),
    )
    slow = replace(hardware(), h2d_bytes_per_second=MIB, d2h_bytes_per_second=MIB)
    return replace(
        problem(9 * MIB, made, phases, values, on=slow), precedence=(("sa", "sc"), ("sb", "sc"))
    )


def ordered(stages: tuple[str, ...], pairs: tuple[tuple[str, str], ...] | None) -> Problem:
    """A problem of these stages, which take nothing, with ``pairs`` as its precedence."""
    made = component("a", ("unblocked", 1, MIB))
    phases = tuple(
        PhaseNumbers(stage, 0, (Use("a", 1, (1,), (1.0,)),), 0, 0, 0) for stage in stages
    )
    return replace(problem(9 * MIB, (made,), phases), precedence=pairs)


@QUICK
@given(st.integers(1, 5), st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4))))
def test_orders_are_all_that_precedence_allows_in_the_sequence_of_permutations(
    count: int, among: set[tuple[int, int]]
) -> None:
    stages = tuple("edcba"[:count])
    pairs = tuple((stages[low], stages[high]) for low, high in sorted(among) if low < high < count)
    allowed = [
        each
        for each in permutations(stages)
        if all(each.index(low) < each.index(high) for low, high in pairs)
    ]
    assert list(topological_orders(ordered(stages, pairs))) == allowed
    assert list(topological_orders(ordered(stages, None))) == [stages]


def test_no_more_orders_are_looked_at_than_the_bound() -> None:
    # 30! orders, less those that break the pair
    stages = tuple(f"s{number}" for number in range(30))
    found = list(topological_orders(ordered(stages, ((stages[0], stages[29]),))))
    assert len(set(found)) == len(found) == MOST_STAGE_CHOICES + 1
    assert found[0] == stages
    assert all(
        sorted(each) == sorted(stages) and each.index("s0") < each.index("s29") for each in found
    )


def columns(problem: Problem) -> list[int]:
    return [Formulation(each.program).model.size for each in stage_choices(problem)[0]]


@pytest.mark.long
def test_no_more_is_solved_than_the_bounds() -> None:
    few, many = (tuple(f"s{number}" for number in range(count)) for count in (4, 30))
    assert len(columns(ordered(few, ()))) == 24
    choices, every = stage_choices(ordered(many, ()))
    assert (choices[0].order, every) == ((), False)
    found = columns(ordered(many, ()))
    assert 24 < len(found) < MOST_STAGE_CHOICES
    assert sum(found) <= MOST_STAGE_COLUMNS + max(found)


@pytest.mark.long
def test_combinations_of_options_are_not_all_made() -> None:
    stages = tuple(f"s{number}" for number in range(11))
    of = ordered(stages, None)
    options = [StageOption(phase.stage, name, (phase,)) for phase in of.phases for name in "xy"]
    tracemalloc.start()
    choices, every = stage_choices(replace(of, options=tuple(options)))  # 3^11 combinations
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not every
    assert peak < 20 * MIB


def test_a_chain_is_ordered_without_networkx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    assert list(topological_orders(ordered(("x", "y"), (("x", "y"),)))) == [("x", "y")]
    assert list(topological_orders(ordered(("x", "y"), None))) == [("x", "y")]
    with pytest.raises(ImportError):
        list(topological_orders(ordered(("x", "y"), ())))


def test_every_order_is_tried_and_the_plan_names_the_best() -> None:
    of = encoders()
    assert list(topological_orders(of)) == [("sa", "sb", "sc"), ("sb", "sa", "sc")]
    solution = solve(of)
    assert solution.plan.order == ("sb", "sa", "sc"), (
        "4 + 2 + 4 MiB do not fit, unless the value is spilled"
    )
    fixed = solve(replace(of, precedence=None))
    assert [
        type(a) for slot in fixed.plan.slots for a in slot.actions if isinstance(a, Spill | Restore)
    ] == [Spill, Restore]
    assert fixed.objective_seconds > solution.objective_seconds


def test_backing_stores_are_dropped_only_where_ram_binds() -> None:
    of = flux(24 * GIB)
    from_disk = replace(
        of,
        components=tuple(
            replace(
                c,
                variants=(
                    replace(
                        c.variants[0],
                        read_seconds=tuple(b / 1e9 for b in c.variants[0].block_bytes),
                    ),
                ),
            )
            for c in of.components
        ),
    )
    actions = [a for slot in solve(from_disk).plan.slots for a in slot.actions]
    assert len([a for a in actions if isinstance(a, Read)]) == 4
    assert not [a for a in actions if isinstance(a, Drop)]
    tight = solve(replace(from_disk, ram_bytes=16 * GIB))
    dropped = [
        a.component for slot in tight.plan.slots for a in slot.actions if isinstance(a, Drop)
    ]
    assert "text_encoder_2" in dropped, (
        "9.3 GiB that are not needed after encoding; the transformer takes 11.3 GiB"
    )
    assert simulate(tight.problem, tight.plan).host_peak_bytes <= 16 * GIB


def test_a_session_with_enough_memory_copies_nothing_in_further_runs() -> None:
    of = replace(flux(24 * GIB, steps=4), runs=10)
    roomy = replace(of, budget_bytes=40 * GIB, hardware=replace(of.hardware, capacity_bytes=2**40))
    solution = solve(roomy)
    found = simulate(roomy, solution.plan)
    assert found.again_moved_bytes == 0, "everything fits"
    assert solution.objective_seconds == pytest.approx(
        found.seconds + 9 * found.again_seconds, rel=1e-3
    )


@pytest.mark.long
@pytest.mark.parametrize("gib", [6, 12, 16, 24])
def test_no_baseline_is_faster(gib: int) -> None:
    of = flux(gib * GIB)
    ours = simulate(of, solve(of).plan)
    program = program_of(of)
    for baseline in BASELINES:
        for choice in fitting(program, baseline):
            assert simulate(of, plan_of(program, choice)).seconds >= ours.seconds * (1 - 1e-9), (
                baseline
            )


def test_with_free_copies_and_unlimited_memory_the_objective_is_the_compute_time() -> None:
    of = flux(24 * GIB)
    free = replace(
        of,
        hardware=replace(of.hardware, capacity_bytes=2**50),
        budget_bytes=2**50,
        components=tuple(
            replace(c, variants=(replace(c.variants[0], load_seconds=(0.0,) * len(c.groups)),))
            for c in of.components
        ),
    )
    solution = solve(free)
    assert solution.objective_seconds == pytest.approx(
        simulate(free, solution.plan).compute_seconds
    )


@pytest.mark.long
def test_further_runs_of_flux_in_24_gib_are_bound_by_compute(make_problem: Any) -> None:
    problem = replace(make_problem("flux-dev", 24 * 2**30, hardware="rtx4090"), runs=10)
    found = simulate(problem, solve(problem).plan)
    compute_seconds = sum(slot.compute_seconds for slot in found.again)
    assert compute_seconds <= found.again_seconds <= 1.01 * compute_seconds

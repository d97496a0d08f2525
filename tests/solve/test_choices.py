"""Choices other than blocks (variants, orders, options, sessions): properties of all solutions, and
pruning that loses none."""

from __future__ import annotations

import sys
import tracemalloc
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from planner_problems import GIB, MIB, component, flux, hardware, problem
from planner_random import random_problem

from graphrun.model.plan import Drop, Read, Restore, Spill
from graphrun.model.problem import PhaseNumbers, Problem, StageOption, Use, ValueNumbers
from graphrun.solve.actions import plan_of
from graphrun.solve.baselines import BASELINES, fitting
from graphrun.solve.dominance import only_blocks_to_choose, simplest_variants
from graphrun.solve.least import has_usable_variants
from graphrun.solve.milp import Formulation
from graphrun.solve.orders import (
    MOST_STAGE_CHOICES,
    MOST_STAGE_COLUMNS,
    stage_choices,
    topological_orders,
)
from graphrun.solve.pages import solved
from graphrun.solve.program import Choice
from graphrun.solve.programs import program_of
from graphrun.solve.rows import rows_of
from graphrun.solve.search import Answer, choose
from graphrun.solve.solve import solve
from graphrun.verify.simulate import simulate

SEEDS = st.integers(0, 10**6)
QUICK = settings(max_examples=25, deadline=None)


def best(problem: Problem, *, all_variants: bool = False) -> Answer | None:
    if not has_usable_variants(problem):
        return None
    return choose(
        [
            Formulation(stage_choice.program)
            for stage_choice in stage_choices(problem, dominated=all_variants)[0]
        ]
    )


def seconds(problem: Problem) -> float:
    answer = best(problem)
    return float("inf") if answer is None else answer.rows.seconds()


@pytest.mark.sweep("more")
@pytest.mark.long
@QUICK
@given(SEEDS)
@example(13452)  # a backing store held from the start, and one read when another was dropped
def test_pruning_dominated_variants_keeps_the_optimum(seed: int) -> None:
    problem = random_problem(seed)
    pruned, other = best(problem), best(problem, all_variants=True)
    assert (pruned is None) == (other is None)
    if pruned is not None and other is not None:
        assert pruned.rows.seconds() == pytest.approx(other.rows.seconds(), abs=1e-6)
        assert pruned.rows.moved_bytes() == other.rows.moved_bytes()


@pytest.mark.long
@QUICK
@given(SEEDS, st.sampled_from(["vram", "ram", "pinned", "allow", "spill"]))
@pytest.mark.long
def test_more_of_anything_never_costs_time(seed: int, quantity: str) -> None:
    problem = random_problem(seed)
    larger = {
        "vram": replace(problem, budget_bytes=problem.budget_bytes + 1000),
        "ram": replace(problem, ram_bytes=problem.ram_bytes + 700),
        "pinned": replace(problem, pinned_bytes=None),
        "allow": replace(problem, allow=("nf4", "tiling")),
        "spill": replace(
            problem,
            hardware=replace(
                problem.hardware, d2h_bytes_per_second=4096.0, h2d_bytes_per_second=4096.0
            ),
        ),
    }[quantity]
    assert seconds(larger) <= seconds(problem) + 1e-6


@QUICK
@given(SEEDS, st.integers(0, 2))
def test_fewer_variants_never_save_time(seed: int, number: int) -> None:
    problem = random_problem(seed)
    numbers = problem.components[number % len(problem.components)]
    assume(len(numbers.variants) > 1)
    fewer = replace(numbers, variants=numbers.variants[:-1])
    smaller = replace(
        problem,
        components=tuple(fewer if c.name == numbers.name else c for c in problem.components),
    )
    assert seconds(problem) <= seconds(smaller) + 1e-6


@pytest.mark.sweep("more")
@pytest.mark.long
@QUICK
@given(SEEDS)
def test_equal_problems_have_plans_that_are_equal_byte_for_byte(seed: int) -> None:
    problem = random_problem(seed)
    first, other = solved(problem), solved(replace(problem))
    assert (first is None and other is None) or (
        first is not None and other is not None and str(first.plan) == str(other.plan)
    )


def encoders() -> Problem:
    """Two independent encoders, then a stage that needs both. The output of the first leaves no
    memory for the second's activation."""
    components = tuple(
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
        problem(9 * MIB, components, phases, values, card=slow),
        precedence=(("sa", "sc"), ("sb", "sc")),
    )


def ordered(stages: tuple[str, ...], pairs: tuple[tuple[str, str], ...] | None) -> Problem:
    """A problem of these stages, which take nothing, with ``pairs`` as its precedence."""
    one_component = component("a", ("unblocked", 1, MIB))
    phases = tuple(
        PhaseNumbers(stage, 0, (Use("a", 1, (1,), (1.0,)),), 0, 0, 0) for stage in stages
    )
    return replace(problem(9 * MIB, (one_component,), phases), precedence=pairs)


@QUICK
@given(st.integers(1, 5), st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4))))
def test_orders_are_all_that_precedence_allows_in_the_sequence_of_permutations(
    count: int, precedence: set[tuple[int, int]]
) -> None:
    stages = tuple("edcba"[:count])
    pairs = tuple(
        (stages[low], stages[high]) for low, high in sorted(precedence) if low < high < count
    )
    expected = [
        order
        for order in permutations(stages)
        if all(order.index(low) < order.index(high) for low, high in pairs)
    ]
    assert list(topological_orders(ordered(stages, pairs))) == expected
    assert list(topological_orders(ordered(stages, None))) == [stages]


def test_no_more_orders_are_looked_at_than_the_bound() -> None:
    # 30! orders, less those that break the pair
    stages = tuple(f"s{number}" for number in range(30))
    orders = list(topological_orders(ordered(stages, ((stages[0], stages[29]),))))
    assert len(set(orders)) == len(orders) == MOST_STAGE_CHOICES + 1
    assert orders[0] == stages
    assert all(
        sorted(order) == sorted(stages) and order.index("s0") < order.index("s29")
        for order in orders
    )


def columns(problem: Problem) -> list[int]:
    return [
        Formulation(stage_choice.program).model.size for stage_choice in stage_choices(problem)[0]
    ]


@pytest.mark.sweep("more")
@pytest.mark.long
def test_no_more_is_solved_than_the_bounds() -> None:
    chain_stages, many_stages = (
        tuple(f"s{number}" for number in range(count)) for count in (4, 30)
    )
    assert len(columns(ordered(chain_stages, ()))) == 24
    choices, is_complete = stage_choices(ordered(many_stages, ()))
    assert (choices[0].order, is_complete) == ((), False)
    column_counts = columns(ordered(many_stages, ()))
    assert 24 < len(column_counts) < MOST_STAGE_CHOICES
    assert sum(column_counts) <= MOST_STAGE_COLUMNS + max(column_counts)


def test_a_permitted_option_is_a_choice() -> None:
    plain = ordered(("a", "b"), None)
    (phase, _) = plain.phases
    assert only_blocks_to_choose(plain)
    for needs, allow, choosable in (("", (), True), ("x", ("x",), True), ("x", ("y",), False)):
        option = StageOption(phase.stage, "tiled", (phase,), needs)
        candidate = replace(plain, options=(option,), allow=allow)
        assert only_blocks_to_choose(candidate) != choosable


@pytest.mark.sweep("more")
@pytest.mark.long
def test_combinations_of_options_are_not_all_made() -> None:
    stages = tuple(f"s{number}" for number in range(11))
    problem = ordered(stages, None)
    options = [
        StageOption(phase.stage, name, (phase,)) for phase in problem.phases for name in "xy"
    ]
    tracemalloc.start()
    choices, is_complete = stage_choices(
        replace(problem, options=tuple(options))
    )  # 3^11 combinations
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not is_complete
    assert peak < 20 * MIB


def test_a_chain_is_ordered_without_networkx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    assert list(topological_orders(ordered(("x", "y"), (("x", "y"),)))) == [("x", "y")]
    assert list(topological_orders(ordered(("x", "y"), None))) == [("x", "y")]
    with pytest.raises(ImportError):
        list(topological_orders(ordered(("x", "y"), ())))


def test_every_order_is_tried_and_the_plan_names_the_best() -> None:
    problem = encoders()
    assert list(topological_orders(problem)) == [("sa", "sb", "sc"), ("sb", "sa", "sc")]
    solution = solve(problem)
    assert solution.plan.order == ("sb", "sa", "sc"), (
        "4 + 2 + 4 MiB do not fit, unless the value is spilled"
    )
    fixed = solve(replace(problem, precedence=None))
    assert [
        type(a) for slot in fixed.plan.slots for a in slot.actions if isinstance(a, Spill | Restore)
    ] == [Spill, Restore]
    assert fixed.objective_seconds > solution.objective_seconds


def test_backing_stores_are_dropped_only_where_ram_binds() -> None:
    problem = flux(24 * GIB)
    from_disk = replace(
        problem,
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
            for c in problem.components
        ),
    )
    actions = [a for slot in solve(from_disk).plan.slots for a in slot.actions]
    assert len([a for a in actions if isinstance(a, Read)]) == 4
    assert not [a for a in actions if isinstance(a, Drop)]
    tight = solve(replace(from_disk, ram_bytes=16 * GIB))
    drops = [a.component for slot in tight.plan.slots for a in slot.actions if isinstance(a, Drop)]
    assert "text_encoder_2" in drops, (
        "9.3 GiB that are not needed after encoding; the transformer takes 11.3 GiB"
    )
    assert simulate(tight.problem, tight.plan).host_peak_bytes <= 16 * GIB


def test_a_session_with_enough_memory_copies_nothing_in_further_runs() -> None:
    problem = replace(flux(24 * GIB, steps=4), runs=10)
    roomy = replace(
        problem, budget_bytes=40 * GIB, hardware=replace(problem.hardware, capacity_bytes=2**40)
    )
    solution = solve(roomy)
    simulation = simulate(roomy, solution.plan)
    assert simulation.further_moved_bytes == 0, "everything fits"
    assert solution.objective_seconds == pytest.approx(
        simulation.seconds + 9 * simulation.further_seconds, rel=1e-3
    )


@pytest.mark.sweep("more", sample=2)
@pytest.mark.long
@pytest.mark.parametrize("gib", [6, 12, 16, 24])
def test_no_baseline_is_faster(gib: int) -> None:
    problem = flux(gib * GIB)
    simulation = simulate(problem, solve(problem).plan)
    program = program_of(problem)
    for baseline in BASELINES:
        for choice in fitting(program, baseline):
            assert simulate(problem, plan_of(program, choice)).seconds >= simulation.seconds * (
                1 - 1e-9
            ), baseline


def test_each_baseline_keeps_what_its_name_says() -> None:
    """Moved bytes of FLUX.1-dev: with one K, each further block is copied once, not 28 times."""
    program = program_of(flux(44 * GIB))
    weights = sum(int(group.count * group.block_bytes) for group in program.groups)
    moved_bytes = {
        baseline: [rows_of(program, choice).moved_bytes() for choice in fitting(program, baseline)]
        for baseline in BASELINES
    }
    assert set(moved_bytes["resident"]) == set(moved_bytes["one by one"]) == {weights}
    assert min(moved_bytes["single K"]) == weights
    assert moved_bytes["single K"] == sorted(moved_bytes["single K"])
    assert moved_bytes["streamed"] == moved_bytes["single K"][-1:]
    assert moved_bytes["streamed"][0] > 10 * weights


def test_with_free_copies_and_unlimited_memory_the_objective_is_the_compute_time() -> None:
    problem = flux(24 * GIB)
    free = replace(
        problem,
        hardware=replace(problem.hardware, capacity_bytes=2**50),
        budget_bytes=2**50,
        components=tuple(
            replace(c, variants=(replace(c.variants[0], load_seconds=(0.0,) * len(c.groups)),))
            for c in problem.components
        ),
    )
    solution = solve(free)
    assert solution.objective_seconds == pytest.approx(
        simulate(free, solution.plan).compute_seconds
    )


@pytest.mark.sweep("more")
@pytest.mark.long
def test_further_runs_of_flux_in_24_gib_are_bound_by_compute(make_problem: Any) -> None:
    problem = replace(make_problem("flux-dev", 24 * 2**30, hardware="rtx4090"), runs=10)
    simulation = simulate(problem, solve(problem).plan)
    compute_seconds = sum(slot.compute_seconds for slot in simulation.further_slots)
    assert compute_seconds <= simulation.further_seconds <= 1.01 * compute_seconds


@pytest.mark.parametrize(
    ("change", "streams", "is_taken"),
    [
        ({"host_bytes": 0}, True, True),
        ({"streamable": False}, True, False),
        ({"movable": False}, False, False),
        ({"read_seconds": (0.0, 1.0)}, True, False),
        ({"device": "cpu", "slowdown": 0.0}, True, False),
    ],
)
def test_an_earlier_variant_takes_over_only_where_the_same_integers_are_its_plan(
    change: dict[str, Any], streams: bool, is_taken: bool
) -> None:
    instance = component("dit", ("block", 4, MIB, streams), ("rest", 1, MIB))
    (variant,) = instance.variants
    instance = replace(instance, variants=(replace(variant, **change), variant))
    phases = (PhaseNumbers("denoise", 0, (Use("dit", 2, (2, 2), (1.0, 1.0)),), 0, 0, 0),)
    choices = problem(8 * MIB, (instance,), phases)
    counts = np.array([[0, 0], [4, 1], [4, 1]])
    loads = np.array([[4, 1], [0, 0], [0, 0]])
    choice = Choice(counts, loads, np.full((3, 2), 2), (-1,), (-1,), ())
    assert simplest_variants(choices, (1,), choice)[0] == (1 - is_taken,)

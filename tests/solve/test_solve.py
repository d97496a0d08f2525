"""Plans of the solver pass the checker, and properties that hold for all problems."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_problems import GIB, MIB, component, flux, problem
from test_solve_oracle import random_problem

from graphrun.model.plan import Load, Plan, Stream, parse
from graphrun.model.problem import PhaseNumbers, Problem, Use
from graphrun.report.plan_files import problem_from
from graphrun.solve.infeasible import smallest_budget
from graphrun.solve.solve import solve
from graphrun.verify.check import check
from graphrun.verify.simulate import simulate

SEEDS = st.integers(0, 10**6)
QUICK = settings(max_examples=25, deadline=None)


def affordable(seed: int, spare: int) -> Problem:
    problem = random_problem(seed)
    return replace(problem, budget_bytes=smallest_budget(problem) + spare)


def blocks(plan: Plan) -> list[object]:
    """Everything in a plan except the digest and ring buffer sizes."""
    return [
        (
            slot.phase,
            slot.part,
            slot.calls,
            [replace(a, ring_buffer_bytes=0) if isinstance(a, Stream) else a for a in slot.actions],
        )
        for slot in plan.slots
    ]


@pytest.mark.parametrize("budget", [24, 16, 10, 8, 6, 4, 3])
def test_flux_on_one_card_after_another(budget: int) -> None:
    solution = solve(flux(budget * GIB))
    simulation = simulate(solution.problem, solution.plan)
    assert check(solution.problem, solution.plan) == ()
    assert solution.objective_seconds * (1 - 1e-3) <= solution.bound_seconds
    assert solution.bound_seconds <= solution.objective_seconds
    assert simulation.seconds == pytest.approx(solution.objective_seconds, rel=0.03)


def test_the_plan_of_flux_at_8_gib() -> None:
    plan = solve(flux(8 * GIB)).plan
    steady = next(slot for slot in plan.slots if slot.part == "steady")
    (stream,) = (action for action in steady.actions if isinstance(action, Stream))
    assert stream.component == "transformer"
    assert ("unblocked", (0,)) in (stream.keep or ())
    assert [action for action in steady.actions if isinstance(action, Load)] == [
        Load("vae", None)
    ], "overlaps 27 calls at no cost"


def ring_buffers(plan: Plan) -> list[int]:
    return [
        action.ring_buffer_bytes
        for slot in plan.slots
        for action in slot.actions
        if isinstance(action, Stream)
    ]


@pytest.mark.parametrize(("compute", "depth"), [(0.0625, 1), (1.0, 2)])
def test_a_ring_buffer_for_one_block_pays_where_copies_take_much_longer_than_compute(
    compute: float, depth: int
) -> None:
    # four of ten blocks fit: three resident and seven streamed one by one, or two resident and
    # eight copied during compute
    only_component = component("one", ("layers", 10, MIB), seconds_per_byte=2 / MIB)
    instance = problem(
        4 * MIB,
        (only_component,),
        (PhaseNumbers("s", 0, (Use("one", 9, (9,), (compute,)),), 0, 0, 0),),
    )
    solution = solve(instance)
    assert check(instance, solution.plan) == ()
    assert ring_buffers(solution.plan)[-1] == depth * MIB
    steady = simulate(instance, solution.plan).slots[-2]
    # resident blocks compute while the next one is copied
    per_call = {1: 7 * (2.0 + compute), 2: max(8 * 2.0, 10 * compute)}[depth]
    assert steady.seconds == pytest.approx(8 * per_call, rel=0.01)


def test_a_component_may_be_used_by_several_phases() -> None:
    te = component("te", ("layers", 4, MIB), ("unblocked", 1, MIB))
    other = component("other", ("layers", 4, MIB), ("unblocked", 1, MIB))
    phases = tuple(
        PhaseNumbers("encode", i, (Use(name, 1, (1, 1), (1e-4, 1e-4)),), 0, 0, 0)
        for i, name in enumerate(("te", "other", "te", "other"))
    )
    roomy = solve(problem(10 * MIB, (te, other), phases))
    assert simulate(roomy.problem, roomy.plan).moved_bytes == 10 * MIB, "each is loaded once"
    tight = solve(problem(8 * MIB, (te, other), phases))
    assert check(tight.problem, tight.plan) == ()
    assert simulate(tight.problem, tight.plan).moved_bytes == 14 * MIB, (
        "two of four blocks of each component do not fit and are loaded again"
    )


def test_nothing_is_loaded_twice_where_everything_fits() -> None:
    problem = flux(24 * GIB)
    problem = replace(
        problem, hardware=replace(problem.hardware, capacity_bytes=2**40), budget_bytes=2**40
    )
    simulation = simulate(problem, solve(problem).plan)
    assert simulation.moved_bytes == sum(c.weight_bytes() for c in problem.components)


def test_a_single_component_takes_its_copy_time_plus_its_compute_time() -> None:
    only_component = component("one", ("unblocked", 1, MIB), seconds_per_byte=2 / MIB)
    instance = problem(
        2**40, (only_component,), (PhaseNumbers("s", 0, (Use("one", 3, (3,), (5.0,)),), 0, 0, 0),)
    )
    solution = solve(instance)
    assert (solution.objective_seconds, simulate(instance, solution.plan).seconds) == (17.0, 17.0)
    assert solution.proven_optimal


def test_a_phase_without_components_runs_once() -> None:
    pipeline_code = problem(MIB, (), (PhaseNumbers("pipeline_code", 0, (), 0, 10, 0),))
    assert str(solve(pipeline_code).plan).splitlines()[1:] == [
        "slot pipeline_code/0: first",
        "  run",
        "slot end",
    ]


@QUICK
@given(SEEDS, st.integers(0, 6000))
def test_plans_pass_the_checker_and_are_deterministic(seed: int, spare: int) -> None:
    problem = affordable(seed, spare)
    solution = solve(problem)
    assert check(problem, solution.plan) == ()
    assert parse(str(solution.plan)) == solution.plan
    assert str(solve(problem_from(problem.to_json())).plan) == str(solution.plan)


@pytest.mark.sweep("more")
@QUICK
@given(SEEDS, st.integers(0, 6000), st.integers(1, 4000))
def test_more_budget_never_costs_time(seed: int, spare: int, extra_bytes: int) -> None:
    """A plan for less is one for more, so the bound for more holds for it."""
    smaller_budget = solve(affordable(seed, spare))
    assert (
        solve(affordable(seed, spare + extra_bytes)).bound_seconds
        <= smaller_budget.simulation.total_seconds + 1e-4
    )


@QUICK
@given(SEEDS, st.integers(0, 6000))
def test_names_do_not_matter(seed: int, spare: int) -> None:
    problem = affordable(seed, spare)
    renamed = replace(
        problem,
        components=tuple(replace(c, name=c.name.upper()) for c in problem.components),
        phases=tuple(
            replace(p, uses=tuple(replace(u, component=u.component.upper()) for u in p.uses))
            for p in problem.phases
        ),
    )
    phases = {
        new.name: old.name for new, old in zip(renamed.phases, problem.phases, strict=True)
    } | {"": ""}
    reversed_back = tuple(
        replace(
            slot,
            phase=phases[slot.phase],
            actions=tuple(
                replace(a, component=a.component.lower()) if hasattr(a, "component") else a
                for a in slot.actions
            ),
        )
        for slot in solve(renamed).plan.slots
    )
    assert reversed_back == solve(problem).plan.slots


@QUICK
@given(SEEDS, st.integers(0, 6000), st.sampled_from([2, 8, 1024]))
def test_bytes_and_budget_scale_together(seed: int, spare: int, factor: int) -> None:
    problem = whole(affordable(seed, 512 * (spare // 512)))
    scaled = replace(
        problem,
        hardware=replace(
            problem.hardware,
            context_bytes=factor * problem.hardware.context_bytes,
            workspace_bytes=0,
        ),
        budget_bytes=factor * problem.budget_bytes,
        components=tuple(
            replace(
                c,
                variants=tuple(
                    replace(v, block_bytes=tuple(factor * b for b in v.block_bytes), host_bytes=0)
                    for v in c.variants
                ),
            )
            for c in problem.components
        ),
        phases=tuple(
            replace(
                p,
                input_bytes=factor * p.input_bytes,
                first_bytes=factor * p.first_bytes,
                steady_bytes=factor * p.steady_bytes,
            )
            for p in problem.phases
        ),
        values=tuple(replace(v, nbytes=factor * v.nbytes) for v in problem.values),
    )
    small, large = solve(problem), solve(scaled)
    assert large.objective_seconds == pytest.approx(small.objective_seconds)
    assert blocks(large.plan) == blocks(small.plan)


def whole(problem: Problem) -> Problem:
    """The problem with block sizes rounded up to whole allocations, so that rounding scales too."""
    components = tuple(
        replace(
            c,
            variants=tuple(
                replace(v, block_bytes=tuple(512 * -(-b // 512) for b in v.block_bytes))
                for v in c.variants
            ),
        )
        for c in problem.components
    )
    problem = replace(
        problem, components=components, hardware=replace(problem.hardware, workspace_bytes=0)
    )
    return replace(problem, budget_bytes=max(problem.budget_bytes, smallest_budget(problem)))

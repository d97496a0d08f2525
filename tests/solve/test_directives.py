"""Directives: their meaning, their enforcement by `check`, and the refusal of those that no plan
can satisfy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_problems import GIB, MIB, component, flux, problem

from graphrun.errors import InputError
from graphrun.model.directives import directed
from graphrun.model.plan import Load, Plan, Stream
from graphrun.model.problem import ComponentPlacement, Directive, PhaseNumbers, Problem, Use
from graphrun.report.plan_files import problem_from
from graphrun.solve.infeasible import Infeasible, smallest_budget
from graphrun.solve.solve import solve
from graphrun.verify.check import check
from graphrun.verify.simulate import simulate


def twice() -> Problem:
    """A component used in the first and the last of three phases, and another one between. Both fit
    on the device together."""
    te = component("te", ("layers", 4, MIB), ("unblocked", 1, MIB))
    other = component("other", ("layers", 4, MIB), ("unblocked", 1, MIB))
    uses = [(name, Use(name, 2, (2, 2), (1e-3, 1e-3))) for name in ("te", "other", "te")]
    phases = tuple(PhaseNumbers(f"s{i}", 0, (use,), 0, 0, 0) for i, (_, use) in enumerate(uses))
    return problem(11 * MIB, (te, other), phases)


def with_directives(problem: Problem, *directives: tuple[ComponentPlacement, str]) -> Problem:
    return directed(problem, [Directive(*directive) for directive in directives])


def broken_rules(problem: Problem, plan: Plan) -> set[str]:
    return {violation.rule for violation in check(problem, replace(plan, problem=problem.digest))}


def loads(plan: Plan, name: str) -> list[str]:
    return [
        slot.phase
        for slot in plan.slots
        for a in slot.actions
        if isinstance(a, Load) and a.component == name
    ]


@pytest.mark.parametrize(
    ("problem", "placement", "name"),
    [
        (twice(), "exclude", "te"),
        (twice(), "drop", "te"),
        (replace(twice(), budget_bytes=8 * MIB), "keep", "te"),
        (flux(8 * GIB, steps=4), "exclude", "transformer"),
    ],
)
def test_a_plan_against_a_directive_is_refused_and_the_solver_satisfies_it(
    problem: Problem, placement: ComponentPlacement, name: str
) -> None:
    free, directed_problem = solve(problem), with_directives(problem, (placement, name))
    assert placement in broken_rules(directed_problem, free.plan)
    solution = solve(directed_problem)
    assert check(directed_problem, solution.plan) == ()
    assert solution.objective_seconds >= free.objective_seconds - 1e-6, (
        "a directive never saves time"
    )


def test_whole_forbids_streaming() -> None:
    problem = replace(flux(3 * GIB, steps=4))
    roomy = replace(problem, budget_bytes=24 * GIB)
    streaming = solve(problem).plan
    assert "whole" in broken_rules(with_directives(problem, ("whole", "text_encoder_2")), streaming)
    plan = solve(with_directives(roomy, ("whole", "text_encoder_2"))).plan
    assert not [
        a
        for slot in plan.slots
        for a in slot.actions
        if isinstance(a, Stream) and a.component == "text_encoder_2"
    ]


def test_the_effect_of_each_directive_when_everything_fits() -> None:
    problem = twice()
    assert set(loads(solve(problem).plan, "te")) == {"s0/0:te"}, (
        "it stays on the device without a directive"
    )
    drop_plan = solve(with_directives(problem, ("drop", "te"))).plan
    assert set(loads(drop_plan, "te")) == {"s0/0:te", "s2/0:te"}
    excluded = solve(with_directives(problem, ("exclude", "te")))
    load_slots = [
        a.blocks
        for slot in excluded.plan.slots
        for a in slot.actions
        if isinstance(a, Load) and a.component == "te"
    ]
    assert set(load_slots) == {(("unblocked", (0,)),)}, (
        "only blocks that cannot be streamed are loaded"
    )
    assert (
        simulate(excluded.problem, excluded.plan).moved_bytes
        > simulate(problem, solve(problem).plan).moved_bytes
    )
    keep_plan = solve(with_directives(problem, ("keep", "other"))).plan
    assert "keep" not in broken_rules(with_directives(problem, ("keep", "other")), keep_plan)


def test_the_digest_depends_on_directives_but_not_on_their_order() -> None:
    problem = twice()
    first_plan, other = (
        with_directives(problem, ("keep", "te"), ("drop", "other")),
        with_directives(problem, ("drop", "other"), ("keep", "te"), ("keep", "te")),
    )
    assert first_plan == other
    assert first_plan.digest != problem.digest
    assert problem_from(first_plan.to_json()) == first_plan
    assert with_directives(first_plan).digest == problem.digest, "without directives"


@pytest.mark.parametrize(
    ("directives", "words"),
    [
        ((("keep", "vea"),), "no such component"),
        ((("exclude", "vae"),), "none of its blocks can be streamed"),
        ((("keep", "transformer"), ("exclude", "transformer")), "do without one of them"),
        ((("keep", "transformer"), ("drop", "transformer")), "do without one of them"),
        ((("whole", "transformer"), ("exclude", "transformer")), "do without one of them"),
    ],
)
def test_a_directive_that_no_plan_can_satisfy_is_refused(
    directives: tuple[tuple[ComponentPlacement, str], ...], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        with_directives(flux(8 * GIB), *directives)


def test_an_immovable_component_can_be_neither_excluded_nor_dropped() -> None:
    immovable = component("te", ("layers", 4, MIB), movable=False)
    instance = problem(
        GIB, (immovable,), (PhaseNumbers("s", 0, (Use("te", 1, (1,), (1.0,)),), 0, 0, 0),)
    )
    for placement in ("exclude", "drop"):
        with pytest.raises(InputError, match=placement):
            with_directives(instance, (placement, "te"))


def test_removing_an_infeasible_directive_is_among_the_suggestions() -> None:
    problem = with_directives(flux(8 * GIB), ("keep", "text_encoder_2"))
    with pytest.raises(Infeasible) as error_info:
        solve(problem)
    assert "leave out 'keep text_encoder_2'" in [
        suggestion.text for suggestion in error_info.value.suggestions
    ]
    solve(with_directives(problem))
    minimum = smallest_budget(problem)
    sufficient = replace(problem, budget_bytes=minimum)
    assert check(sufficient, solve(sufficient).plan) == ()
    with pytest.raises(Infeasible):
        solve(replace(problem, budget_bytes=minimum - 1))


def test_a_reserve_reduces_the_effective_budget_exactly() -> None:
    problem = flux(24 * GIB, steps=4)
    minimum = smallest_budget(problem)
    with_reserve = replace(problem, reserve_bytes=GIB)
    assert with_reserve.effective_bytes == problem.effective_bytes - GIB
    assert smallest_budget(with_reserve) == minimum + GIB
    assert with_reserve.digest != problem.digest
    sufficient, short = (
        replace(with_reserve, budget_bytes=minimum + GIB),
        replace(with_reserve, budget_bytes=minimum + GIB - 1),
    )
    assert check(sufficient, solve(sufficient).plan) == ()
    assert (
        str(solve(sufficient).plan).splitlines()[1:]
        == str(solve(replace(problem, budget_bytes=minimum)).plan).splitlines()[1:]
    )
    assert "vram" in broken_rules(short, solve(sufficient).plan)
    with pytest.raises(Infeasible) as error_info:
        solve(short)
    suggestion = next(
        suggestion for suggestion in error_info.value.suggestions if "reserve" in suggestion.text
    )
    assert suggestion.text == "lower the reserve from 1G to 1023.99M"
    assert 'reserve="1023.99M": lower the reserve' in str(error_info.value)
    solve(replace(short, reserve_bytes=GIB - 1))

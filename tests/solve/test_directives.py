"""Directives: their meaning, their enforcement by `check`, and the refusal of those that no plan
can satisfy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_problems import GIB, MIB, component, flux, problem

from graphrun.errors import InputError
from graphrun.model.directives import directed
from graphrun.model.plan import Load, Plan, Stream
from graphrun.model.problem import Directive, PhaseNumbers, Placement, Problem, Use
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


def with_directives(of: Problem, *directives: tuple[Placement, str]) -> Problem:
    return directed(of, [Directive(*directive) for directive in directives])


def broken_rules(of: Problem, plan: Plan) -> set[str]:
    return {violation.rule for violation in check(of, replace(plan, problem=of.digest))}


def loads(plan: Plan, name: str) -> list[str]:
    return [
        slot.phase
        for slot in plan.slots
        for a in slot.actions
        if isinstance(a, Load) and a.component == name
    ]


@pytest.mark.parametrize(
    ("of", "placement", "name"),
    [
        (twice(), "exclude", "te"),
        (twice(), "drop", "te"),
        (replace(twice(), budget_bytes=8 * MIB), "keep", "te"),
        (flux(8 * GIB, steps=4), "exclude", "transformer"),
    ],
)
def test_a_plan_against_a_directive_is_refused_and_the_solver_satisfies_it(
    of: Problem, placement: Placement, name: str
) -> None:
    free, directed_problem = solve(of), with_directives(of, (placement, name))
    assert placement in broken_rules(directed_problem, free.plan)
    solution = solve(directed_problem)
    assert check(directed_problem, solution.plan) == ()
    assert solution.objective_seconds >= free.objective_seconds - 1e-6, (
        "a directive never saves time"
    )


def test_whole_forbids_streaming() -> None:
    of = replace(flux(3 * GIB, steps=4))
    roomy = replace(of, budget_bytes=24 * GIB)
    streaming = solve(of).plan
    assert "whole" in broken_rules(with_directives(of, ("whole", "text_encoder_2")), streaming)
    plan = solve(with_directives(roomy, ("whole", "text_encoder_2"))).plan
    assert not [
        a
        for slot in plan.slots
        for a in slot.actions
        if isinstance(a, Stream) and a.component == "text_encoder_2"
    ]


def test_the_effect_of_each_directive_when_everything_fits() -> None:
    of = twice()
    assert set(loads(solve(of).plan, "te")) == {"s0/0:te"}, (
        "it stays on the device without a directive"
    )
    dropped = solve(with_directives(of, ("drop", "te"))).plan
    assert set(loads(dropped, "te")) == {"s0/0:te", "s2/0:te"}
    excluded = solve(with_directives(of, ("exclude", "te")))
    loaded = [
        a.blocks
        for slot in excluded.plan.slots
        for a in slot.actions
        if isinstance(a, Load) and a.component == "te"
    ]
    assert set(loaded) == {(("unblocked", (0,)),)}, "only blocks that cannot be streamed are loaded"
    assert (
        simulate(excluded.problem, excluded.plan).moved_bytes
        > simulate(of, solve(of).plan).moved_bytes
    )
    kept = solve(with_directives(of, ("keep", "other"))).plan
    assert "keep" not in broken_rules(with_directives(of, ("keep", "other")), kept)


def test_the_digest_depends_on_directives_but_not_on_their_order() -> None:
    of = twice()
    one, other = (
        with_directives(of, ("keep", "te"), ("drop", "other")),
        with_directives(of, ("drop", "other"), ("keep", "te"), ("keep", "te")),
    )
    assert one == other
    assert one.digest != of.digest
    assert problem_from(one.to_json()) == one
    assert with_directives(one).digest == of.digest, "without directives"


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
    directives: tuple[tuple[Placement, str], ...], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        with_directives(flux(8 * GIB), *directives)


def test_an_immovable_component_can_be_neither_excluded_nor_dropped() -> None:
    immovable = component("te", ("layers", 4, MIB), movable=False)
    of = problem(GIB, (immovable,), (PhaseNumbers("s", 0, (Use("te", 1, (1,), (1.0,)),), 0, 0, 0),))
    for placement in ("exclude", "drop"):
        with pytest.raises(InputError, match=placement):
            with_directives(of, (placement, "te"))


def test_removing_an_infeasible_directive_is_among_the_repairs() -> None:
    of = with_directives(flux(8 * GIB), ("keep", "text_encoder_2"))
    with pytest.raises(Infeasible) as caught:
        solve(of)
    assert "do without the directive keep text_encoder_2" in [
        repair.text for repair in caught.value.repairs
    ]
    solve(with_directives(of))
    least = smallest_budget(of)
    enough = replace(of, budget_bytes=least)
    assert check(enough, solve(enough).plan) == ()
    with pytest.raises(Infeasible):
        solve(replace(of, budget_bytes=least - 1))


def test_a_reserve_reduces_the_effective_budget_exactly() -> None:
    of = flux(24 * GIB, steps=4)
    least = smallest_budget(of)
    reserved = replace(of, reserve_bytes=GIB)
    assert reserved.effective_bytes == of.effective_bytes - GIB
    assert smallest_budget(reserved) == least + GIB
    assert reserved.digest != of.digest
    enough, short = (
        replace(reserved, budget_bytes=least + GIB),
        replace(reserved, budget_bytes=least + GIB - 1),
    )
    assert check(enough, solve(enough).plan) == ()
    assert (
        str(solve(enough).plan).splitlines()[1:]
        == str(solve(replace(of, budget_bytes=least)).plan).splitlines()[1:]
    )
    assert "vram" in broken_rules(short, solve(enough).plan)
    with pytest.raises(Infeasible) as caught:
        solve(short)
    repair = next(repair for repair in caught.value.repairs if "reserve" in repair.text)
    assert repair.text == "lower the reserve from 1G to 1023.99M"
    assert 'reserve="1023.99M": lower the reserve' in str(caught.value)
    solve(replace(short, reserve_bytes=GIB - 1))

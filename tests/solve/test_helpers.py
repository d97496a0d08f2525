"""Components on helpers: the solver against brute force, the rules of `check`, and what a helper's budget decides."""

from __future__ import annotations

import pytest
from campaign import sampled
from planner_oracle import Oracle
from planner_random import with_helpers

from graphrun.model.plan import parse
from graphrun.model.problem import Problem
from graphrun.solve.actions import plan_of
from graphrun.solve.milp import Formulation
from graphrun.solve.orders import stage_choices
from graphrun.solve.search import choose
from graphrun.verify.check import check
from graphrun.verify.simulate import simulate

SEEDS = 500
BLOCKS = [range(start, start + 25) for start in range(0, SEEDS, 25)]


def on_helpers(of: Problem, variants: tuple[tuple[str, str], ...]) -> list[str]:
    """Components that ``variants`` of a plan place on helpers."""
    only = [(component.name, component.variants[0].name) for component in of.components if len(component.variants) == 1]
    return [name for name, variant in (*variants, *only) if variant.split()[2] not in ("device", "cpu")]


@pytest.mark.long
@pytest.mark.parametrize("seeds", sampled(BLOCKS, BLOCKS[:1], "random"), ids=str)
def test_solver_agrees_with_brute_force(seeds: range) -> None:
    placed = 0
    for seed in seeds:
        of = with_helpers(seed)
        best = Oracle(of).best(of.effective_bytes)
        found, _ = stage_choices(of, dominated=True)
        answer = choose([Formulation(reordered.program) for reordered in found])
        assert (answer is None) == (best is None), f"{seed}: feasible is {best is not None}"
        if answer is None or best is None:
            continue
        program, choice, chosen = answer.program, answer.choice, found[answer.number]
        assert answer.proven, seed
        assert program.seconds(choice) == pytest.approx(best[0], rel=1e-6, abs=1e-6), seed
        assert program.moved_bytes(choice) == best[1], seed
        plan = plan_of(program, choice, of, chosen.options, chosen.order)
        assert check(of, plan) == (), seed
        assert parse(str(plan)) == plan, seed
        run = simulate(of, plan)
        assert run.total_moved_bytes == best[1], seed
        assert run.peak_bytes <= of.effective_bytes, seed
        for number, helper in enumerate(of.helpers):
            peaks = [slot.helper_peaks[number] for slot in (*run.slots, *run.again)]
            assert max(peaks) == max(program.helper_bytes(choice, number + 1), default=0) <= helper.effective_bytes, seed
        placed += bool(on_helpers(of, plan.variants))
    assert placed, "no problem of these places a component on a helper"

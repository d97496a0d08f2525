"""Chooses: the plan of least predicted time within both budgets, with its proof. Sizes and times come from the problem alone.

program (exact, integers) -> HiGHS: seconds, then bytes moved, then memory -> plan -> simulated -> slower than promised?
    ^                                                                                              |
    '---------- copy times of the slots that were, raised; three times at most; the fastest plan stays
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphrun.errors import BrokenPlan
from graphrun.planner.check import check
from graphrun.planner.infeasible import require_feasible, ring_bytes
from graphrun.planner.keep import keep_order
from graphrun.planner.matrix import Answer, Matrix, Sum
from graphrun.planner.plan import Action, Blocks, Evict, Load, Plan, Run, Slot, Stream
from graphrun.planner.problem import Problem
from graphrun.planner.program import Choice, Program, program_of
from graphrun.planner.simulate import Simulation, simulate
from graphrun.planner.solution import Solution

TOLERATED = 1.01  # simulated over promised seconds
ROUNDS = 3
SLACK = 1e-6  # by how much a goal may be missed (relatively) for the sake of the next one; HiGHS warns on stdout about tighter rows
PROVEN_GAP = 1e-5


def solve(problem: Problem) -> Solution:
    """The fastest plan within the budgets; among equally fast ones the one that moves fewest bytes, then the one that peaks lowest.

    Deterministic: equal problems give plans that are equal byte for byte. Raises Infeasible.
    """
    require_feasible(problem)
    program = program_of(problem)
    factors = (1.0,) * len(program.intervals)
    first = answer = choose(program, factors)
    best: tuple[Simulation, Choice, Plan] | None = None
    for trial in range(ROUNDS + 1):
        plan = plan_of(program, answer.choice)
        simulation = simulate(problem, plan)
        if best is None or _rank(simulation) < _rank(best[0]):
            best = (simulation, answer.choice, plan)
        promised = program.slot_seconds(answer.choice, factors)
        if trial == ROUNDS or simulation.seconds <= TOLERATED * sum(promised):
            break
        late = (slot.seconds / seconds if seconds > 0 else 1.0 for slot, seconds in zip(simulation.slots, promised, strict=False))
        factors = tuple(factor * max(1.0, by) for factor, by in zip(factors, late, strict=True))
        answer = choose(program, factors)
    assert best is not None
    if broken := check(problem, best[2]):
        raise BrokenPlan(f"the planner broke its own rules, which is a bug: {broken[0]}")
    objective = sum(program.slot_seconds(best[1]))
    gap = max(0.0, objective - first.bound) / objective if objective > 0 else 0.0
    return Solution(problem, best[2], first.proven and gap <= PROVEN_GAP, min(first.bound, objective), objective, gap)


def _rank(simulation: Simulation) -> tuple[float, int, int]:
    return simulation.seconds, simulation.moved_bytes, simulation.peak_bytes


def choose(program: Program, factors: Sequence[float]) -> Answer:
    """The best integers, with the bound in seconds; copy times of interval t are multiplied by ``factors[t]``.

    Sums are checked in integers: where rounding let a slot exceed the budget, that much is kept free, and the program solved again.
    """
    spare = [0] * len(program.intervals)
    for _ in range(ROUNDS):
        answer = _least(Matrix(program, factors, spare))
        if answer is None:
            break
        excess = program.excess_bytes(answer.choice)
        if max(excess, default=0) <= 0:
            return answer
        spare = [kept + max(0, over) for kept, over in zip(spare, excess, strict=True)]
    raise BrokenPlan("the solver found no plan where one exists, which is a bug; the problem's JSON form shows it")


def _least(matrix: Matrix) -> Answer | None:
    """Seconds first, then bytes moved, then memory: each goal bounds the search for the next."""
    best = matrix.solve(matrix.seconds)
    if best is None:
        return None
    answer, limits = best, list[tuple[Sum, float]]()
    for goal, following in ((matrix.seconds, matrix.moved), (matrix.moved, matrix.memory)):
        limits.append((goal, answer.value * (1 + SLACK)))
        finer = matrix.solve(following, limits)
        if finer is None:
            break
        answer = finer
    return replace(answer, bound=best.bound * matrix.seconds_unit, proven=best.proven)


def plan_of(program: Program, choice: Choice) -> Plan:
    """The plan that ``choice`` means: kept blocks are the first of their class's `keep_order`."""
    problem = program.problem
    orders = tuple(keep_order(cell.count) for cell in program.cells)
    slots, held = list[Slot](), [0] * len(program.cells)
    for t, interval in enumerate(program.intervals):
        phase, present, loaded = problem.phases[interval.phase], choice.present[t], choice.loaded[t]
        after = [k + d for k, d in zip(present, loaded, strict=True)]
        evicts = _blocks(program, [order[k:h] for order, k, h in zip(orders, present, held, strict=True)])
        loads = _blocks(program, [order[k:a] for order, k, a in zip(orders, present, after, strict=True)])
        keeps = _blocks(program, [order[:a] for order, a in zip(orders, after, strict=True)])
        actions: list[Action] = [Evict(name, blocks) for name, blocks in evicts.items()]
        for use in phase.uses if interval.part != "load" else ():
            component = next(c for c, numbers in enumerate(problem.components) if numbers.name == use.component)
            if streamed := program.streamed(choice, t, component):
                actions.append(Stream(use.component, keeps.get(use.component, ()), ring_bytes(streamed)))
        actions += [
            Load(name, loads[name], problem.component(name).variants[0].home)
            for name in _by_next_use(problem, interval.phase)
            if name in loads
        ]
        actions += [Run()] if interval.rounds else []
        slots.append(Slot(phase.name, interval.part, interval.rounds, tuple(actions)))
        held = after
    rest = _blocks(program, [order[:h] for order, h in zip(orders, held, strict=True)])
    slots.append(Slot("", "end", 0, tuple(Evict(name, blocks) for name, blocks in rest.items())))
    return Plan(problem.digest, tuple(slots))


def _by_next_use(problem: Problem, phase: int) -> tuple[str, ...]:
    """Components in the order in which they are entered from ``phase`` on; then the others."""
    following = (use.component for later in problem.phases[phase:] for use in later.uses)
    return tuple(dict.fromkeys((*following, *(component.name for component in problem.components))))


def _blocks(program: Program, chosen: Sequence[tuple[int, ...]]) -> dict[str, Blocks]:
    """Components of which blocks are chosen (one tuple per cell), as plans name them; all of a component is None."""
    found: dict[str, Blocks] = {}
    for number, component in enumerate(program.problem.components):
        cells = [(cell, indices) for cell, indices in zip(program.cells, chosen, strict=True) if cell.component == number]
        if not any(indices for _, indices in cells):
            continue
        every = all(len(indices) == cell.count for cell, indices in cells)
        named = tuple((component.classes[cell.index].name, tuple(sorted(indices))) for cell, indices in cells if indices)
        found[component.name] = None if every else named
    return found

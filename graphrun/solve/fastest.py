"""Finds the plan of least predicted time within all budgets, with a proof of how close to optimal
it is. Uses only the problem's numbers.

orders, options -> programs -> HiGHS: seconds, bytes moved, memory -> plan -> simulation -> slower
than predicted?
                     ^                                                                        |
                     '---- copy times of the slower slots raised; at most three rounds; the fastest
                     plan is kept
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from graphrun.errors import BrokenPlan
from graphrun.model.choices import BUFFERED_BLOCKS, reorder
from graphrun.model.plan import Drop, Plan, Read
from graphrun.model.problem import ComponentNumbers, Problem
from graphrun.model.simulation import Simulation
from graphrun.model.solution import Solution
from graphrun.solve.actions import plan_of
from graphrun.solve.baselines import BASELINES, fitting
from graphrun.solve.dominance import simplest_variants, undominated_variants
from graphrun.solve.granularity import smaller_as_layers, split_into_layers
from graphrun.solve.interrupts import Candidate, offer
from graphrun.solve.least import ever_finer, surely_infeasible
from graphrun.solve.milp import Formulation
from graphrun.solve.orders import StageChoice, stage_choices
from graphrun.solve.program import Choice, Program, program_of
from graphrun.solve.search import REFINE_GOALS, SLACK, Answer, can_reach, choose, least_seconds
from graphrun.solve.sessions import choose_for, many_runs
from graphrun.verify.check import check
from graphrun.verify.simulate import simulate
from graphrun.verify.solution import checked_solution

ROUNDS = 3  # large programs, and of many runs: one
# ring buffer depths to try where compute waits for a ring buffer of two blocks; of many runs, the
# first
DEEPER = (
    3,
    4,
)
# simulated over predicted seconds above which a better plan is sought; least gain of splitting into
# layers
TOLERANCE = 1.001
# values of K that are tried for the baseline single K, the largest that fit: smaller ones are
# hardly ever faster
MOST_SINGLE_K = 6


def fastest(problem: Problem, *, layers: bool = True, enough: float = 0.0) -> Solution | None:
    """The fastest plan within the budgets, where memory is counted in bytes of tensors; None where
    nothing fits.

    Among equally fast plans the one that moves fewest bytes, then the one with the lowest peak. The
    solution's problem is ``problem`` with components split into layers as needed, and where that is
    faster (``layers``). Deterministic: equal problems give plans that are equal byte for byte.

    ``enough``: seconds within TOLERANCE of which a plan is not refined further.
    """
    found = find(problem, layers=layers, enough=enough)
    return None if found is None else found.solution


@dataclass(frozen=True, slots=True)
class Found:
    """A solution, and the integers of its program; None where it is the plan of another one."""

    solution: Solution
    choice: Choice | None


def find(
    problem: Problem, *, layers: bool = True, enough: float = 0.0, like: Found | None = None
) -> Found | None:
    """As `fastest`, for `find_near`. ``like``: what was found with more memory; what it splits into
    layers is split at once."""
    split = (
        as_split(problem, like.solution)
        if like is not None and like.choice is not None
        else problem
    )
    if (
        split is not problem
        and (known := _solve_as_split(split, enough=enough, baselines=False)) is not None
    ):
        return known
    tried = (_solve_as_split(each, enough=enough) for each in ever_finer(problem))
    found = next((of for of in tried if of is not None), None)
    if found is None:
        return None
    if layers and (worth := _worth_splitting(found.solution)) is not None:
        finer, once = split_into_layers(found.solution.problem, {worth[0]}), problem.runs == 1
        other = (
            _solve_as_split(finer, worth[1], enough, baselines=False)
            if once
            else _repeated_run(finer, worth[1], enough)
        )
        if other is not None and _seconds(other) * TOLERANCE <= _seconds(found):
            return other
    return found


def find_near(problem: Problem, known: Found) -> Found | None:
    """A plan with the stage order, options, variants, granularity and depth of ring buffers of
    ``known`` that keeps nearly as many blocks in every slot and takes at most TOLERANCE of its
    time; None where there is none. A fraction of the time of `find`.

    ``problem`` differs from that of ``known`` in budgets and in what is set aside."""
    if (
        known.choice is None or many_runs(problem) or known.solution.plan.splits
    ):  # of many runs, each is solved alone
        return None
    plan, of = known.solution.plan, as_split(problem, known.solution)
    programs = [each.program for each in stage_choices(_with_choices_of(of, plan))[0]]
    depth = max(BUFFERED_BLOCKS, int(known.choice.depths.max()))
    answer = choose(
        [Formulation(program, depth=depth, near=known.choice) for program in programs], REFINE_GOALS
    )
    if answer is None:
        return None
    near = plan_of(answer.program, answer.choice, of, plan.options, plan.order)
    objective = answer.program.seconds(answer.choice)
    found = Found(
        Solution(
            of, near, simulate(of, near), min(known.solution.bound_seconds, objective), objective
        ),
        answer.choice,
    )
    offer(Candidate(of, near, _seconds(found), objective, 0.0))
    return found if _seconds(found) <= TOLERANCE * _seconds(known) else None


def faster_baselines(solution: Solution) -> Iterator[Solution]:
    """Baselines with the order, options, variants and granularity of ``solution`` that simulate
    faster than it and keep to the budgets in bytes of tensors. Of each the fastest first: of single
    K the largest K, until one is no faster."""
    problem, plan = solution.problem, solution.plan
    program = program_of(_with_choices_of(problem, plan))
    for baseline in BASELINES if not plan.splits else ():
        for choice in fitting(program, baseline, most=MOST_SINGLE_K):
            if program.seconds(choice, full_overlap=True) >= solution.simulation.total_seconds:
                break
            other = plan_of(program, choice, problem, plan.options, plan.order)
            found = checked_solution(
                problem, other, solution.bound_seconds, program.seconds(choice)
            )
            if found is None or found.simulation.total_seconds >= solution.simulation.total_seconds:
                break
            yield found


def as_split(problem: Problem, found: Solution) -> Problem:
    """``problem`` with the components split into layers that ``found`` has so."""
    return split_into_layers(
        problem, {c.name for c in found.problem.components if c.granularity == "layers"}
    )


def _seconds(found: Found) -> float:
    return found.solution.simulation.total_seconds


def _worth_splitting(found: Solution) -> tuple[str, Formulation] | None:
    """The largest component that can be split into layers, if a faster plan with the choices of
    ``found`` is then possible: smaller ring buffers leave more memory for resident blocks, and
    weights outside of blocks need no longer be loaded all at once before a slot. Also the
    formulation that tells."""
    problem = found.problem
    if not (names := smaller_as_layers(problem)):
        return None
    name = max(sorted(names), key=lambda name: problem.component(name).weight_bytes())
    # Of a session, one run is compared with the average run.
    once = split_into_layers(replace(_with_choices_of(problem, found.plan), runs=1), {name})
    formulation = Formulation(program_of(once, undominated_variants(once)))
    return (
        (name, formulation)
        if can_reach(formulation, found.objective_seconds / problem.runs / TOLERANCE)
        else None
    )


def _with_choices_of(problem: Problem, plan: Plan) -> Problem:
    """``problem`` with the order, options and variants of ``plan`` alone. Components can still be
    split into layers."""
    names = dict(plan.variants)

    def only(component: ComponentNumbers) -> ComponentNumbers:
        variants = tuple(
            v for v in component.variants if names.get(component.name, v.name) == v.name
        )
        return replace(
            component,
            variants=variants,
            layers=None if component.layers is None else only(component.layers),
        )

    applied = reorder(problem, plan.order, dict(plan.options))
    return replace(applied, components=tuple(only(component) for component in applied.components))


def _repeated_run(problem: Problem, known: Formulation, enough: float) -> Found | None:
    """A session's plan that repeats the plan of one run; None where backing stores do not fit for
    all runs. Used with layers: to solve a session with layers takes minutes, and where memory is
    that scarce little can stay for the next run."""
    found = _solve_as_split(replace(problem, runs=1), known, enough / problem.runs)
    if found is None:
        return None
    once = found.solution
    first = tuple(
        replace(s, actions=tuple(a for a in s.actions if not isinstance(a, Drop)))
        for s in once.plan.slots
    )
    again = tuple(
        replace(s, actions=tuple(a for a in s.actions if not isinstance(a, Read))) for s in first
    )
    plan = replace(once.plan, problem=problem.digest, slots=first, again=again)
    objective = problem.runs * once.objective_seconds
    least_further = (
        problem.runs - 1
    ) * once.simulation.compute_seconds  # as if every copy of the further runs overlapped compute
    bound = min(once.bound_seconds + least_further, objective)
    repeated = checked_solution(problem, plan, bound, objective)
    return None if repeated is None else Found(repeated, None)


def _solve_as_split(
    problem: Problem,
    known: Formulation | None = None,
    enough: float = 0.0,
    *,
    baselines: bool = True,
) -> Found | None:
    """The best plan at the granularity of ``problem``; None: nothing fits. ``known``: a
    formulation, used for the program that it states. ``baselines``: `BASELINES` are tried too."""
    if surely_infeasible(problem):
        return None
    found, every = stage_choices(problem)
    programs = [each.program for each in found]
    first = choose([known]) if known and [known.program] == programs else choose_for(programs)
    if first is None:
        return None
    pairs = [(first, found[first.number])]
    if (
        first.large and problem.secondaries
    ):  # found within a gap, in which a plan for the first device alone may be faster
        alone = [
            replace(each, program=of)
            for each in found
            if (of := each.program.on_first_device()) is not None
        ]
        if (second := choose_for([each.program for each in alone])) is not None:
            pairs.append((second, alone[second.number]))
    refined = [_refined(problem, chosen, answer, enough, baselines) for answer, chosen in pairs]
    program, best = min(refined, key=lambda each: each[1].rank())
    objective, bound = program.seconds(best.choice), first.bound
    if best.simulation.total_seconds < bound * (
        1 - SLACK
    ):  # its copies overlap more than the compute of their own groups
        bound = least_seconds([Formulation(replace(of, full_overlap=True)) for of in programs])
    return Found(
        Solution(
            problem, best.plan, best.simulation, min(bound, objective) if every else 0.0, objective
        ),
        best.choice,
    )


def _refined(
    problem: Problem, chosen: StageChoice, first: Answer, enough: float, baselines: bool
) -> tuple[Program, _Candidate]:
    """The best plan for the chosen stage order, options and variants. Solves again, with higher
    copy times for the slots in question, while the simulator needs longer than predicted and than
    ``enough``; then tries deeper ring buffers and baselines."""
    variants, choice = simplest_variants(
        first.program.problem,
        tuple(variant_choice.index for variant_choice in first.program.variant_choices),
        first.choice,
    )
    program = first.program.with_variants(variants)

    def candidate_of(choice: Choice) -> _Candidate:
        plan = plan_of(program, choice, problem, chosen.options, chosen.order)
        return _Candidate(choice, plan, simulate(problem, plan))

    def offered(candidate: _Candidate) -> _Candidate:
        seconds, objective = candidate.simulation.total_seconds, program.seconds(candidate.choice)
        offer(Candidate(problem, candidate.plan, seconds, objective, first.bound))
        return candidate

    factors = (1.0,) * len(program.intervals)
    best = last = offered(candidate_of(choice))
    for _ in range(1 if first.large or many_runs(problem) else ROUNDS):
        if last.simulation.total_seconds <= TOLERANCE * max(
            enough, program.seconds(last.choice, factors)
        ):
            break
        predicted = program.slot_seconds(last.choice, factors)
        slots = (*last.simulation.slots[: program.run_length], *last.simulation.again)
        delays = (
            slot.seconds / seconds if seconds > 0 else 1.0
            for slot, seconds in zip(slots, predicted, strict=False)
        )
        factors = tuple(factor * max(1.0, by) for factor, by in zip(factors, delays, strict=True))
        answer = choose_for([program], factors, REFINE_GOALS)
        if answer is None:
            break
        last = candidate_of(answer.choice)
        if many_runs(problem) and best.rank() <= last.rank():
            break
        best = min(best, last, key=_Candidate.rank)
    if broken := check(problem, best.plan):
        raise BrokenPlan(
            f"the planner made a plan that breaks its rules, which is a bug: {broken[0]}"
        )
    for others in (
        _deeper_ring_buffers(program, best.choice),
        _baseline_choices(program) if baselines else (),
    ):
        for choice in others:
            if best.simulation.total_seconds <= TOLERANCE * max(
                enough, program.seconds(best.choice)
            ):
                break
            if program.seconds(choice, full_overlap=True) >= best.simulation.total_seconds:
                continue
            other = candidate_of(choice)
            if other.rank() < best.rank() and not check(problem, other.plan):
                best = other
    return program, offered(best)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Integers of the program, their plan, and what it takes."""

    choice: Choice
    plan: Plan
    simulation: Simulation

    def rank(self) -> tuple[float, int, int]:
        return (
            self.simulation.total_seconds,
            self.simulation.total_moved_bytes,
            self.simulation.peak_bytes,
        )


def _deeper_ring_buffers(program: Program, choice: Choice) -> Iterator[Choice]:
    """Choices with deeper ring buffers: ``choice`` itself where its headroom allows, and the best
    choice with such ring buffers."""
    for depth in DEEPER[:1] if many_runs(program.problem) else DEEPER:
        if not program.excess_bytes(
            wider := replace(choice, depths=np.maximum(depth, choice.depths))
        ):
            yield wider
        if (answer := choose_for([program], (), REFINE_GOALS, depth)) is not None:
            yield answer.choice


def _baseline_choices(program: Program) -> Iterator[Choice]:
    """Baselines that fit. The program does not model the order of events within a slot, so one of
    them may simulate faster."""
    for baseline in BASELINES:
        yield from fitting(program, baseline, most=MOST_SINGLE_K)

"""The plan of least predicted time within all budgets, and a bound on its gap to the optimum.

    orders, options -> programs -> HiGHS -> plan -> simulation -> slower than predicted?
                                                                     |
                       deeper ring buffers, baselines -> plan <------'

HiGHS minimises seconds, then bytes moved, then memory. The plan that simulates fastest wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from graphrun.errors import BrokenPlan
from graphrun.model.choices import BUFFERED_BLOCKS, reorder, with_each_variant
from graphrun.model.plan import Drop, Plan, Read
from graphrun.model.problem import ComponentNumbers, Problem
from graphrun.model.simulation import Simulation
from graphrun.model.solution import Solution
from graphrun.solve.actions import plan_of
from graphrun.solve.baselines import BASELINES, fitting
from graphrun.solve.dominance import simplest_variants, undominated_variants
from graphrun.solve.granularity import smaller_as_layers, split_as, split_into_layers
from graphrun.solve.interrupts import Candidate, offer
from graphrun.solve.least import ever_finer, surely_infeasible
from graphrun.solve.milp import Formulation
from graphrun.solve.orders import StageChoice, stage_choices
from graphrun.solve.program import Choice, Program
from graphrun.solve.programs import on_first_device, program_of, with_variants
from graphrun.solve.rows import excess_bytes, rows_of
from graphrun.solve.search import (
    COMMON_GOALS,
    SLACK,
    Answer,
    Minimum,
    can_reach,
    choose,
    fewest_seconds,
    least_seconds,
)
from graphrun.solve.sessions import choose_for, many_runs
from graphrun.solve.strategies import Strategy, has
from graphrun.verify.check import check
from graphrun.verify.simulate import simulate
from graphrun.verify.solution import checked_solution

# Ring buffer depths to try where compute waits for double buffering. Sessions of many runs try only
# the first.
DEEPER = (
    3,
    4,
)
# Ratio of simulated to predicted seconds above which deeper ring buffers and baselines are tried.
# Also the least factor by which a plan with layers must be faster to replace a plan with blocks.
TOLERANCE = 1.001
# Factor by which a plan with layers must be faster than the program of blocks predicts, so that the
# plan with blocks is not searched. Simulated, it could be a little faster than predicted.
CLEARLY = 1.01
# Values of K to try for single K, from the largest that fits: smaller ones are hardly ever faster.
MOST_SINGLE_K = 6


def fastest(
    problem: Problem, *, layers: bool = True, target_seconds: float = 0.0
) -> Solution | None:
    """Return the fastest plan within the budgets, in bytes of tensors; None if nothing fits.

    Ties are broken by bytes moved, then by peak. The solution's problem is ``problem`` with
    components split into layers as needed; with ``layers`` also where that is faster.
    Deterministic: equal problems give equal plans, byte for byte. If the solver's plan is within
    TOLERANCE of ``target_seconds``, no other is tried.
    """
    result = find(problem, layers=layers, target_seconds=target_seconds)
    return None if result is None else result.solution


@dataclass(frozen=True, slots=True)
class ProgramSolution:
    """A solution with the integers of its program.

    ``choice``: None if the plan repeats the plan of one run.
    """

    solution: Solution
    choice: Choice | None

    @property
    def seconds(self) -> float:
        return self.solution.seconds


def find(
    problem: Problem,
    *,
    layers: bool = True,
    target_seconds: float = 0.0,
    template: ProgramSolution | None = None,
) -> ProgramSolution | None:
    """Return the solution of `fastest` with its integers, for `find_near`.

    ``template``: a result for a larger budget. First, the components that it splits into layers are
    split here too. If a plan fits, nothing else is tried.
    """
    split = (
        split_as(problem, template.solution.problem)
        if template is not None and template.choice is not None
        else problem
    )
    if (
        split is not problem
        and (split_result := _solve_as_split(split, target_seconds=target_seconds, baselines=False))
        is not None
    ):
        return split_result
    searches = (search for candidate in ever_finer(problem) if (search := _search(candidate)))
    for search in searches:
        finer = _faster_layers(search, target_seconds) if layers else None
        if (
            finer is not None
            and search.minimum is not None
            and finer.seconds * CLEARLY <= search.minimum.value
        ):
            return finer
        if (best := _solved(search, target_seconds)) is not None:
            return _with_layers(best, finer, target_seconds) if layers else best
    return None


def _faster_layers(search: _Search, target_seconds: float) -> ProgramSolution | None:
    """Return a plan with layers if it may be clearly faster than any plan of ``search``.

    Only for a single run. Its bound holds for the plans of ``search`` too.
    """
    problem, minimum = search.problem, search.minimum
    if minimum is None or problem.runs > 1:
        return None
    number = min(minimum.results)
    formulation = search.formulations[number]
    numbers = formulation.chosen_in(minimum.results[number].values)
    choices = [formulation.program.variant_choices[n] for n in numbers]
    pairs = zip(problem.components, choices, strict=True)
    variants = {component.name: choice.variant.name for component, choice in pairs}
    stage_choice = search.stage_choices[number]
    with_choices = _with_choices(problem, stage_choice.order, stage_choice.options, variants)
    if (layers := _worth_splitting(problem, with_choices, minimum.value / CLEARLY)) is None:
        return None
    name, layer_formulation = layers
    return _solve_as_split(
        split_into_layers(problem, {name}),
        layer_formulation,
        target_seconds,
        baselines=False,
        other_bound=minimum.bound,
    )


def _with_layers(
    best: ProgramSolution, finer: ProgramSolution | None, target_seconds: float
) -> ProgramSolution:
    """Return ``best``, or a plan with layers if that is faster by TOLERANCE.

    ``finer``: that plan, if already searched. The bound is the lower one of both searches.
    """
    problem, bound = best.solution.problem, best.solution.bound_seconds
    if finer is None:
        with_choices = _with_choices_of(problem, best.solution.plan)
        # A session's average run is compared with a single run with layers.
        seconds = max(best.solution.objective_seconds, best.seconds / CLEARLY)
        limit_seconds = seconds / problem.runs / TOLERANCE
        layers = _worth_splitting(problem, with_choices, limit_seconds, from_disk=True)
        if layers is None:
            return best
        split, formulation = split_into_layers(problem, {layers[0]}), layers[1]
        finer = (
            _solve_as_split(split, formulation, target_seconds, baselines=False, other_bound=bound)
            if problem.runs == 1
            else _repeated_run(split, formulation, target_seconds, bound)
        )
    if finer is None:
        return best
    if finer.seconds * TOLERANCE <= best.seconds:
        return finer
    bound = min(bound, finer.solution.bound_seconds)
    return replace(best, solution=replace(best.solution, bound_seconds=bound))


def find_near(
    problem: Problem, previous: ProgramSolution, smaller: Problem | None = None
) -> ProgramSolution | None:
    """Return a plan close to ``previous``, at most TOLERANCE times as slow; None if none is found.

    It differs only in the resident blocks of each slot, and little. Takes a fraction of the time of
    `find`. ``smaller``: the problem of ``previous`` with other budgets or other bytes kept free
    (`graphrun.solve.pages.with_overheads`), which limits the plan; None: ``problem``. The solution
    is for ``problem``.
    """
    if previous.choice is None or previous.solution.plan.splits:
        return None
    plan, split = previous.solution.plan, split_as(problem, previous.solution.problem)
    smaller_with_choices = _with_choices_of(split_as(smaller or problem, split), plan)
    programs = [stage_choice.program for stage_choice in stage_choices(smaller_with_choices)[0]]
    depth = max(BUFFERED_BLOCKS, int(previous.choice.depths.max()))
    if (answer := choose_for(programs, COMMON_GOALS, depth, previous.choice)) is None:
        return None
    near_plan = plan_of(answer.program, answer.choice, split, plan.options, plan.order)
    objective = answer.rows.seconds()
    result = ProgramSolution(
        Solution(
            split,
            near_plan,
            simulate(split, near_plan),
            min(previous.solution.bound_seconds, objective),
            objective,
        ),
        answer.choice,
    )
    offer(Candidate(split, near_plan, result.seconds, objective, 0.0))
    return result if result.seconds <= TOLERANCE * previous.seconds else None


def faster_baselines(solution: Solution) -> Iterator[Solution]:
    """Yield the baselines that simulate faster than ``solution`` and fit in bytes of tensors.

    They share its order, options, variants and granularity. Single K stops at the first K that is
    not faster.
    """
    problem, plan = solution.problem, solution.plan
    program = program_of(_with_choices_of(problem, plan))
    for baseline in BASELINES if not plan.splits else ():
        for choice in fitting(program, baseline, limit=MOST_SINGLE_K):
            if least_seconds_of(program, choice) >= solution.seconds:
                break
            other = plan_of(program, choice, problem, plan.options, plan.order)
            candidate = checked_solution(
                problem, other, solution.bound_seconds, rows_of(program, choice).seconds()
            )
            if candidate is None or candidate.seconds >= solution.seconds:
                break
            yield candidate


def least_seconds_of(program: Program, choice: Choice) -> float:
    """Return a lower bound on the simulated seconds of ``choice``: all copies overlap compute."""
    return rows_of(program, choice, full_overlap=True).seconds()


def _worth_splitting(
    problem: Problem, with_choices: Problem, seconds: float, *, from_disk: bool = False
) -> tuple[str, Formulation] | None:
    """Return the largest component that layers may make faster, and its formulation; None if none.

    Layers can be faster for two reasons. Smaller ring buffers leave more memory for resident
    blocks. Weights outside of any block need not be loaded all at once before a slot.
    ``with_choices``: ``problem`` with its choices made. ``seconds``: a single run with layers must
    be able to reach them. ``from_disk``: or a run that reads the component from disk, if the
    choices read it into RAM first. Layers are read while others compute, blocks often are not.
    """
    if not (names := smaller_as_layers(problem)) or not has("layers"):
        return None
    component = max(
        (problem.component(name) for name in sorted(names)),
        key=lambda component: component.weight_bytes(),
    )
    candidates = [with_choices]
    if from_disk and (other := _from_disk(with_choices, component)) is not None:
        candidates.append(other)
    for candidate in candidates:
        single_run = split_into_layers(replace(candidate, runs=1), {component.name})
        formulation = Formulation(program_of(single_run, undominated_variants(single_run)))
        if can_reach(formulation, seconds):
            return component.name, formulation
    return None


def _from_disk(with_choices: Problem, component: ComponentNumbers) -> Problem | None:
    """Return ``with_choices`` with the variant of ``component`` that is read from disk; None if it
    has it, or there is none in its precision."""
    (variant,) = with_choices.component(component.name).variants
    disk_name = replace(variant, backing_store="disk").name
    if variant.backing_store == "disk" or disk_name not in {v.name for v in component.variants}:
        return None
    on_disk = _with_variants(component, {component.name: disk_name})
    components = (on_disk if c.name == component.name else c for c in with_choices.components)
    return replace(with_choices, components=tuple(components))


def _with_choices_of(problem: Problem, plan: Plan) -> Problem:
    """Return ``problem`` with only the order, options and variants of ``plan``."""
    return _with_choices(problem, plan.order, plan.options, dict(plan.variants))


def _with_choices(
    problem: Problem,
    order: Sequence[str],
    options: Sequence[tuple[str, str]],
    names: Mapping[str, str],
) -> Problem:
    """Return ``problem`` with ``order``, ``options``, and the variants ``names`` of components."""
    applied = reorder(problem, tuple(order), dict(options))
    return replace(applied, components=tuple(_with_variants(c, names) for c in applied.components))


def _with_variants(component: ComponentNumbers, names: Mapping[str, str]) -> ComponentNumbers:
    """Return ``component`` with the variant that ``names`` has for it; all if it has none."""
    variants = tuple(v for v in component.variants if names.get(component.name, v.name) == v.name)
    layers = component.layers and _with_variants(component.layers, names)
    return replace(component, variants=variants, layers=layers)


def _repeated_run(
    problem: Problem, formulation: Formulation, target_seconds: float, other_bound: float
) -> ProgramSolution | None:
    """Return a session plan that repeats the plan of one run; None if it does not fit.

    Used with layers, where solving a whole session takes minutes. VRAM is then scarce, so few
    blocks could stay for the next run. ``other_bound``: as for `_solve_as_split`.
    """
    result = _solve_as_split(replace(problem, runs=1), formulation, target_seconds / problem.runs)
    if result is None:
        return None
    single_solution = result.solution
    first = tuple(
        replace(s, actions=tuple(a for a in s.actions if not isinstance(a, Drop)))
        for s in single_solution.plan.slots
    )
    further_slots = tuple(
        replace(s, actions=tuple(a for a in s.actions if not isinstance(a, Read))) for s in first
    )
    plan = replace(
        single_solution.plan, problem=problem.digest, slots=first, further_slots=further_slots
    )
    objective = problem.runs * single_solution.objective_seconds
    # as if every copy of the further runs overlapped compute
    single_run = single_solution.problem
    free_reads = with_each_variant(single_run, lambda variant: replace(variant, lost_seconds=()))
    simulation = single_solution.simulation
    if free_reads != single_run:
        simulation = simulate(free_reads, single_solution.plan)
    least_further = (problem.runs - 1) * simulation.compute_seconds
    bound = min(single_solution.bound_seconds + least_further, objective, other_bound)
    repeated = checked_solution(problem, plan, bound, objective)
    return None if repeated is None else ProgramSolution(repeated, None)


@dataclass(frozen=True, slots=True)
class _Search:
    """The programs of ``problem`` at its granularity, solved for seconds.

    ``is_complete``: as of `stage_choices`. ``minimum``: None in a session of many runs, which is
    solved run by run.
    """

    problem: Problem
    stage_choices: list[StageChoice]
    is_complete: bool
    formulations: list[Formulation]
    minimum: Minimum | None


def _search(problem: Problem, formulation: Formulation | None = None) -> _Search | None:
    """Return the search of ``problem`` at its granularity; None if nothing fits.

    ``formulation``: reused if it has the only program of the problem.
    """
    if surely_infeasible(problem):
        return None
    choices, is_complete = stage_choices(problem)
    if formulation is not None and [choice.program for choice in choices] == [formulation.program]:
        formulations = [formulation]
    elif many_runs(problem):
        return _Search(problem, choices, is_complete, [], None)
    else:
        formulations = [Formulation(choice.program) for choice in choices]
    minimum = fewest_seconds(formulations)
    return (
        _Search(problem, choices, is_complete, formulations, minimum) if minimum.results else None
    )


def _solve_as_split(
    problem: Problem,
    formulation: Formulation | None = None,
    target_seconds: float = 0.0,
    *,
    baselines: bool = True,
    other_bound: float = inf,
) -> ProgramSolution | None:
    """Return the best plan at the granularity of ``problem``; None if nothing fits.

    ``formulation``: as for `_search`. ``other_bound``: a bound on plans of other granularities,
    which the bound of the result covers too.
    """
    search = _search(problem, formulation)
    return (
        _solved(search, target_seconds, baselines=baselines, other_bound=other_bound)
        if search is not None
        else None
    )


def _solved(
    search: _Search, target_seconds: float, *, baselines: bool = True, other_bound: float = inf
) -> ProgramSolution | None:
    """Return the best plan of ``search``. Arguments are as for `_solve_as_split`."""
    problem, choices = search.problem, search.stage_choices
    programs = [choice.program for choice in choices]
    first = (
        choose(search.formulations, first=search.minimum)
        if search.minimum is not None
        else choose_for(programs)
    )
    if first is None:
        return None
    first = replace(first, bound=min(first.bound, other_bound))
    pairs = [(first, choices[first.number])]
    # A large program is solved to a gap only: a plan that uses the main device alone may be faster
    # than the plan found.
    if first.large and problem.secondaries and has("main device"):
        main_choices = [
            replace(stage_choice, program=main_program)
            for stage_choice in choices
            if (main_program := on_first_device(stage_choice.program)) is not None
        ]
        # none where a component has variants on secondary devices only
        second = choose_for([choice.program for choice in main_choices]) if main_choices else None
        if second is not None:
            pairs.append((second, main_choices[second.number]))
    plans = [
        _best_plan(problem, stage_choice, answer, target_seconds, baselines)
        for answer, stage_choice in pairs
    ]
    program, best = min(plans, key=lambda result: result[1].rank())
    objective, bound = rows_of(program, best.choice).seconds(), first.bound
    # The simulation may overlap more copies with compute than the program does, so the plan can
    # beat the program's bound. The minimum with `Program.full_overlap` bounds every plan.
    if best.seconds < bound * (1 - SLACK):
        bound = least_seconds(
            [Formulation(replace(candidate, full_overlap=True)) for candidate in programs]
        )
    return ProgramSolution(
        Solution(
            problem,
            best.plan,
            best.simulation,
            min(bound, objective, other_bound) if search.is_complete else 0.0,
            objective,
        ),
        best.choice,
    )


def _best_plan(
    problem: Problem,
    stage_choice: StageChoice,
    first: Answer,
    target_seconds: float,
    baselines: bool,
) -> tuple[Program, _SimulatedChoice]:
    """Return the best plan for the chosen stage order, options and variants.

    Try deeper ring buffers and baselines while the best plan simulates slower than the solver
    predicted, and slower than ``target_seconds``.
    """
    variants, choice = simplest_variants(
        first.program.problem,
        tuple(variant_choice.index for variant_choice in first.program.variant_choices),
        first.choice,
    )
    program = with_variants(first.program, variants)

    def simulated_choice(choice: Choice) -> _SimulatedChoice:
        plan = plan_of(program, choice, problem, stage_choice.options, stage_choice.order)
        return _SimulatedChoice(choice, plan, simulate(problem, plan))

    def offered(candidate: _SimulatedChoice) -> _SimulatedChoice:
        seconds = candidate.seconds
        objective = rows_of(program, candidate.choice).seconds()
        offer(Candidate(problem, candidate.plan, seconds, objective, first.bound))
        return candidate

    def is_slow(candidate: _SimulatedChoice) -> bool:
        predicted_seconds = rows_of(program, candidate.choice).seconds()
        return candidate.seconds > TOLERANCE * max(target_seconds, predicted_seconds)

    best = offered(simulated_choice(choice))
    if violations := check(problem, best.plan):
        raise BrokenPlan(
            f"the planner made a plan that breaks its rules, which is a bug: {violations[0]}"
        )
    attempts: dict[Strategy, Iterator[Choice]] = {
        "deeper ring buffers": _deeper_ring_buffers(program, best.choice)
    }
    if baselines:
        attempts["baselines"] = _baseline_choices(program)
    for strategy, choices in attempts.items():
        while is_slow(best) and has(strategy) and (attempt := next(choices, None)) is not None:
            if least_seconds_of(program, attempt) >= best.seconds:
                continue
            other = simulated_choice(attempt)
            if other.rank() < best.rank() and not check(problem, other.plan):
                best = other
    return program, offered(best)


@dataclass(frozen=True, slots=True)
class _SimulatedChoice:
    choice: Choice
    plan: Plan
    simulation: Simulation

    @property
    def seconds(self) -> float:
        return self.simulation.total_seconds

    def rank(self) -> tuple[float, int, int]:
        return (
            self.seconds,
            self.simulation.total_moved_bytes,
            self.simulation.peak_bytes,
        )


def _deeper_ring_buffers(program: Program, choice: Choice) -> Iterator[Choice]:
    """Yield choices with each depth of ring buffers in DEEPER.

    For each depth: ``choice`` with that depth, if it fits, then the solver's best choice.
    """
    for depth in DEEPER[:1] if many_runs(program.problem) else DEEPER:
        wider = replace(choice, depths=np.maximum(depth, choice.depths))
        if not excess_bytes(program, wider):
            yield wider
        if (answer := choose_for([program], COMMON_GOALS, depth)) is not None:
            yield answer.choice


def _baseline_choices(program: Program) -> Iterator[Choice]:
    """Yield the baselines that fit, which may simulate faster than the program predicts."""
    for baseline in BASELINES:
        yield from fitting(program, baseline, limit=MOST_SINGLE_K)

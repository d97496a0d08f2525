"""Solve programs of the same problem: minimise seconds, then bytes moved, then memory.

for each goal:
    relaxations of all programs
    -> exact programs in the order of their bounds, while the bound is no worse than the best
       value found
    -> programs that reach the best value go on to the next goal
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from graphrun.errors import BrokenPlan
from graphrun.solve.linear import (
    GAP,
    NODES,
    ROUGH_GAP,
    Linear,
    MilpResult,
    Row,
)
from graphrun.solve.milp import Formulation
from graphrun.solve.program import Choice, Program
from graphrun.solve.rows import Rows, excess_bytes, rows_of
from graphrun.solve.strategies import has

# HiGHS tolerates errors of 1e-6, so a choice may exceed a budget. A memory row is scaled to 1000:
# with a budget of 8 GiB, the error is 8 bytes. A number of blocks may be off by 1e-6: 400 bytes if
# a block has 400 MB. `choose` then solves again with the excess kept free, multiplied by another
# MARGIN_GROWTH in each further round: by 65,536 in the last.
ROUNDS = 4
MARGIN_GROWTH = 256
# Columns above which a program is solved to the relative LARGE_GAPS of seconds, bytes moved and
# memory. Of several fastest solutions, the first then fixes variants, stage order and options.
LARGE = 850
LARGE_GAPS = (1e-4, 1e-3, 1e-3)
# The first of several fastest solutions fixes them too if all equally fast programs together have
# more columns than this. A single program above it is not tried by `can_reach`, and its layers are
# rounded to a wider gap.
MOST_LARGE = 4000
# Branch-and-bound nodes: for ties in a large program; and with COMMON_GOALS or for `least_seconds`
# of a large program.
TIE_NODES, COMMON_NODES = (
    200,
    500,
)
# More columns than any reference graph has. Above, the gap of every goal is at least HUGE_GAP.
HUGE, HUGE_GAP = 8000, 1e-3
# gaps when counts of layers are rounded; the second above MOST_LARGE columns
ROUNDING_GAPS = (
    1e-4,
    3e-3,
)
# weight of a second of copying relative to a second of the plan, in a common goal
COPY_WEIGHT = 0.01
# relative loss of a goal allowed for the next goal; HiGHS warns on stdout about tighter rows
SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal to minimise.

    ``objective``: returns a linear expression and the value of its unit. ``gap``: relative
    optimality gap. ``nodes``: maximum number of nodes.
    """

    objective: Callable[[Formulation], tuple[Linear, float]]
    gap: float = GAP
    nodes: int = NODES


GOALS = (
    Goal(lambda formulation: (formulation.seconds, formulation.seconds_unit)),
    Goal(lambda formulation: (formulation.moved_bytes, formulation.bytes_unit)),
    Goal(lambda formulation: (formulation.memory, formulation.bytes_unit), 1e-3),
)
SECONDS = GOALS[:1]


def _common_goal(formulation: Formulation) -> tuple[Linear, float]:
    """Return seconds, plus a hundredth of the copy time, plus a tie-breaker for memory."""
    return (
        formulation.seconds + COPY_WEIGHT * formulation.copying + 1e-6 * formulation.memory,
        formulation.seconds_unit,
    )


# For a solution that is simulated anyway: nearly as fast ones are compared by copy time, then by
# memory.
COMMON_GOALS = (Goal(_common_goal, 1e-4, COMMON_NODES),)
# Goals if a component is split into layers: the program counts layers as fractions, which are
# rounded afterwards.
LAYER_GOALS = (
    *SECONDS,
    *COMMON_GOALS,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The best choice found.

    ``number``: index of its program. ``program``: that program with one variant per component.
    ``bound``: lower bound on seconds over all programs. ``large``: slow to solve again.
    """

    number: int
    program: Program
    choice: Choice
    bound: float
    large: bool = False

    @property
    def rows(self) -> Rows[float]:
        return rows_of(self.program, self.choice)


class Minimum(NamedTuple):
    """The results that reach the least ``value`` of a goal, by index of their formulation.

    ``value``, ``bound``: in seconds or bytes.
    """

    results: dict[int, MilpResult]
    value: float
    bound: float


def choose(
    formulations: Sequence[Formulation],
    goals: Sequence[Goal] = GOALS,
    first: Minimum | None = None,
) -> Answer | None:
    """Return the best choice over ``formulations``; None if nothing fits. ``goals``: by priority.

    Budgets are checked in integers. Where rounding exceeds a budget, the excess is kept free and
    the programs are solved again. ``first``: the `fewest_seconds` of ``formulations``, if already
    solved for. Raises BrokenPlan if no rounding fits.
    """
    formulations = list(formulations)
    for trial in range(ROUNDS):
        layered = goals is GOALS and any(formulation.layer_columns for formulation in formulations)
        result = _minimise_in_order(
            formulations, LAYER_GOALS if layered else goals, None if trial else first
        )
        if result is None:
            return None
        number, answer, bound = result
        formulation = formulations[number]
        if layers := formulation.layer_columns:
            answer = (
                formulation.model.rounded(
                    answer,
                    layers,
                    _common_goal(formulation)[0],
                    ROUNDING_GAPS[formulation.model.size > MOST_LARGE],
                )
                or answer
            )
        program, choice = formulation.choice(answer.values)
        excess = excess_bytes(program, choice)
        if not excess:
            return Answer(number, program, choice, bound, formulation.model.size > LARGE)
        margins = {
            memory: formulation.margins.get(memory, 0) + MARGIN_GROWTH**trial * nbytes
            for memory, nbytes in excess.items()
        }
        formulations[number] = Formulation(
            formulation.program,
            {**formulation.margins, **margins},
            None,
            formulation.depth,
            formulation.leaves,
            formulation.neighbour,
        )
    raise BrokenPlan(
        "the solver found no plan where one exists, which is a bug; report it with the JSON form"
        " of the problem"
    )


def can_reach(formulation: Formulation, seconds: float) -> bool:
    """Whether the program has a solution within ``seconds``; False if quick checks cannot tell."""
    model, objective, limits = (
        formulation.model,
        formulation.seconds,
        [formulation.seconds <= seconds / formulation.seconds_unit],
    )
    if model.size > MOST_LARGE or model.minimise(objective, limits, whole=False) is None:
        return False
    return model.minimise(objective, limits, gap=1.0) is not None


def least_seconds(formulations: Sequence[Formulation]) -> float:
    """Return a lower bound on the seconds of all ``formulations``."""
    large = any(formulation.model.size > LARGE for formulation in formulations)
    goal = replace(SECONDS[0], gap=LARGE_GAPS[0], nodes=COMMON_NODES) if large else SECONDS[0]
    return minimise_over(formulations, range(len(formulations)), goal, staged=large).bound


def fewest_seconds(formulations: Sequence[Formulation]) -> Minimum:
    """Return the results with the fewest seconds, the first of the goals of `choose`."""
    return _minimise_goal(formulations, list(range(len(formulations))), GOALS[0], LARGE_GAPS[0])


def _minimise_in_order(
    formulations: list[Formulation], goals: Sequence[Goal], first: Minimum | None
) -> tuple[int, MilpResult, float] | None:
    """Minimise ``goals`` by priority; each result limits the search for the next goal.

    Return the index of the formulation, its result and the bound of the first goal. ``first``: the
    minimum of the first goal, if known.
    """
    candidates: dict[int, MilpResult] = {}
    limits = list[tuple[Goal, float]]()
    bound = 0.0
    fixed: dict[int, float] | None = None
    for goal, large_gap in zip(goals, LARGE_GAPS, strict=False):
        numbers = list(candidates) if limits else list(range(len(formulations)))
        large = _are_large(formulations, numbers)
        results, best, lower_bound = (
            first
            if first is not None and not limits
            else _minimise_goal(
                formulations, numbers, goal, large_gap, limits, fixed=fixed, starts=candidates
            )
        )
        if not results:
            break
        candidates = dict(results)
        if not limits:
            bound = lower_bound
            if large or sum(formulations[n].model.size for n in candidates) > MOST_LARGE:
                number = min(candidates)
                variant_numbers = formulations[number].chosen_in(candidates[number].values)
                candidates, fixed = (
                    {number: candidates[number]},
                    formulations[number].variant_columns(variant_numbers),
                )
        elif large or formulations[min(candidates)].program.only_run:
            number = min(candidates)
            candidates = {number: candidates[number]}
            # K and d stay fixed in the slots that compute with the blocks: the last goal, memory,
            # then only moves loads for later use, which is a small search
            fixed = (fixed or {}) | formulations[number].compute_slot_columns(
                candidates[number].values
            )
        limits.append((goal, best))
    number = min(candidates, default=0)
    return (number, candidates[number], bound) if candidates else None


def _are_large(formulations: Sequence[Formulation], numbers: Iterable[int]) -> bool:
    return any(formulations[n].model.size > LARGE for n in numbers)


def _minimise_goal(
    formulations: Sequence[Formulation],
    numbers: Sequence[int],
    goal: Goal,
    large_gap: float,
    limits: Sequence[tuple[Goal, float]] = (),
    *,
    fixed: Mapping[int, float] | None = None,
    starts: Mapping[int, MilpResult] | None = None,
) -> Minimum:
    """Return `minimise_over`, to the relative ``large_gap`` if a program is large."""
    large = _are_large(formulations, numbers)
    if large:
        is_huge = any(formulations[n].model.size > HUGE for n in numbers)
        gap = max(goal.gap, large_gap, HUGE_GAP if is_huge else 0.0)
        goal = replace(goal, gap=gap, nodes=TIE_NODES if limits else goal.nodes)
    return minimise_over(
        formulations, numbers, goal, limits, staged=large, fixed=fixed, starts=starts
    )


def minimise_over(
    formulations: Sequence[Formulation],
    candidates: Sequence[int],
    goal: Goal,
    limits: Sequence[tuple[Goal, float]] = (),
    *,
    staged: bool = False,
    fixed: Mapping[int, float] | None = None,
    starts: Mapping[int, MilpResult] | None = None,
) -> Minimum:
    """Minimise ``goal`` over the formulations ``candidates``.

    ``limits``: earlier goals and their values. ``starts``: solutions within these limits.
    ``fixed``: column -> value, as in `MilpModel.minimise`. ``staged``: as in `_minimise_staged`.
    """
    objectives = {n: goal.objective(formulations[n]) for n in candidates}
    rows: dict[int, list[Row]] = {n: [] for n in candidates}
    for n in candidates:
        for limit_goal, limit_value in limits:
            objective, unit = limit_goal.objective(formulations[n])
            rows[n].append(objective <= limit_value / unit * (1 + SLACK))
    bounds = dict.fromkeys(candidates, 0.0)
    for n in candidates if len(candidates) > 1 else ():
        relaxed = formulations[n].model.minimise(objectives[n][0], rows[n], whole=False)
        if relaxed is None:
            del bounds[n]
        else:
            bounds[n] = relaxed.value * objectives[n][1]
    answers: dict[int, MilpResult] = {}
    best, lower_bound = float("inf"), float("inf")
    for n in sorted(bounds, key=lambda n: (bounds[n], n)):
        objective, unit = objectives[n]
        if bounds[n] > best * (1 + SLACK):
            lower_bound = min(lower_bound, bounds[n])
            continue
        cutoff = [objective <= best / unit * (1 + SLACK)] if answers else []
        start = None if cutoff else (starts or {}).get(n)
        answer = _minimise_staged(
            formulations[n], objective, [*rows[n], *cutoff], goal, staged, fixed, start
        )
        if answer is None:
            continue
        answers[n] = answer
        # HiGHS may return -1e-15 for 0, which as a later limit would exclude the answer.
        best = min(best, max(0.0, answer.value * unit))
        lower_bound = min(lower_bound, answer.bound * unit)
    limit_value = best * (1 + 2 * SLACK)  # the cutoff row may be violated too
    good = {
        n: answer
        for n, answer in sorted(answers.items())
        if answer.value * objectives[n][1] <= limit_value
    }
    return Minimum(good, best, min(lower_bound, best))


def _minimise_staged(
    formulation: Formulation,
    objective: Linear,
    rows: Sequence[Row],
    goal: Goal,
    staged: bool,
    fixed: Mapping[int, float] | None,
    start: MilpResult | None,
) -> MilpResult | None:
    """Minimise ``objective``.

    ``staged``, for large programs: first with one variant per component, then from that solution
    over all variants. The variants for the start are, in this order:

    - the first variant of each component, if the relaxation is no worse with them
    - otherwise the variants with the largest share in the relaxation
    - if no solution has these variants: the variants of a solution within ROUGH_GAP, which is
      the result if the goal allows that gap
    """
    model, trial_columns, gap = (
        formulation.model,
        formulation.variant_columns(formulation.first_choices),
        goal.gap,
    )
    if start is None and staged and trial_columns and has("likely variants"):
        relaxed = model.minimise(objective, rows, whole=False)
        if relaxed is None:
            return None
        if any(relaxed.values[column] != value for column, value in trial_columns.items()):
            simplest = model.minimise(objective, rows, whole=False, fixed=trial_columns)
            if simplest is None or simplest.value > relaxed.value * (1 + gap):
                trial_columns = formulation.variant_columns(formulation.chosen_in(relaxed.values))
        start = model.minimise(objective, rows, gap=gap, fixed=trial_columns)
        if start is None and (rough := model.minimise(objective, rows, gap=ROUGH_GAP)) is not None:
            if fixed is None and gap >= ROUGH_GAP:
                return rough
            fixed_variants = formulation.variant_columns(formulation.chosen_in(rough.values))
            start = (
                model.minimise(objective, rows, gap=gap, fixed=fixed_variants, start=rough) or rough
            )
    return model.minimise(objective, rows, gap=gap, fixed=fixed, start=start, nodes=goal.nodes)

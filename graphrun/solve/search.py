"""The best integers of one or several programs of the same problem: least seconds, then bytes moved, then memory. Makes no plan.

for each goal:  relaxations of all programs -> exact programs in order of their bounds, while the bound is no worse than the
                best value found -> programs that reach the best value go on to the next goal
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from graphrun.errors import BrokenPlan
from graphrun.model.least_memory import DEPTH
from graphrun.solve.dominance import budget_excess
from graphrun.solve.milp import GAP, ROUGH_GAP, Formulation, Linear, Margins, MilpResult, linear_sum
from graphrun.solve.program import Choice, Program

ROUNDS = 3
MARGIN_GROWTH = 256  # per round, where keeping the excess free was not enough: HiGHS exceeds 8 GiB by up to 8 bytes
# Columns of one program, and of all programs that are equally fast. Above either, variants, order and options are those of the
# first fastest solution found, even if others are as fast. LARGE_GAPS: relative gaps of seconds, bytes moved and memory in a large
# program.
LARGE, MOST_LARGE = 850, 4000
LARGE_GAPS = (1e-4, 1e-3, 1e-3)
HUGE, HUGE_GAP = 8000, 1e-3  # gap of seconds above this many columns, which no reference graph has
ROUNDING_GAPS = (2e-4, 3e-3)  # gap when counts of layers are rounded; the second above MOST_LARGE columns
COPY_WEIGHT = 0.01  # weight of a second of copying relative to a second of the plan, where both are in one goal
SLACK = 1e-6  # relative loss of a goal allowed for the next one; HiGHS warns on stdout about tighter rows


@dataclass(frozen=True, slots=True)
class Goal:
    """What to minimise: a linear expression and the value of its unit; ``gap``: relative optimality gap."""

    of: Callable[[Formulation], tuple[Linear, float]]
    gap: float = GAP


GOALS = (
    Goal(lambda formulation: (formulation.seconds, formulation.seconds_unit)),
    Goal(lambda formulation: (formulation.moved, formulation.bytes_unit)),
    Goal(lambda formulation: (formulation.memory, formulation.bytes_unit), 1e-3),
)
SECONDS = GOALS[:1]


def _refine_goal(formulation: Formulation) -> tuple[Linear, float]:
    """Seconds, plus a hundredth of the copy time, plus a tie-breaker for memory."""
    return linear_sum(
        (1.0, formulation.seconds), (COPY_WEIGHT, formulation.copying), (1e-6, formulation.memory)
    ), formulation.seconds_unit


# Goal when a program is solved again because the simulator found its plan slower than predicted: among plans that are nearly as
# fast, bytes moved decide, then memory. The simulator judges the result again.
REFINE_GOALS = (Goal(_refine_goal, 1e-4),)
LAYER_GOALS = (*SECONDS, *REFINE_GOALS)  # for layers: their counts are fractions, rounded afterwards


@dataclass(frozen=True, slots=True)
class Answer:
    """The best choice found. ``number``: index of its program among those given; ``program``: that program with one variant per
    component; ``bound``: lower bound on seconds over all programs; ``large``: solving it is slow, so avoid doing it again."""

    number: int
    program: Program
    choice: Choice
    bound: float
    proven: bool
    large: bool = False


def choose(
    programs: Sequence[Program] | Program, factors: Sequence[float] = (), *, goals: Sequence[Goal] = GOALS, depth: int = DEPTH
) -> Answer | None:
    """The best choice over ``programs``, with the bound in seconds; None: nothing fits. Copy times of interval t are multiplied by
    ``factors[t]``. ``goals``: in order of priority; ``depth``: blocks that rings hold at once.

    Budgets are checked in integers. Where rounding let a slot exceed one, that much is kept free and the programs are solved again.
    Raises BrokenPlan if that does not help.
    """
    programs = [programs] if isinstance(programs, Program) else programs
    margins = [Margins() for _ in programs]
    for trial in range(ROUNDS):
        formulations = [
            Formulation(program, factors or (1.0,) * len(program.intervals), margin, depth=depth)
            for program, margin in zip(programs, margins, strict=True)
        ]
        layered = goals is GOALS and any(formulation.layer_columns for formulation in formulations)
        found = _minimise_in_order(formulations, LAYER_GOALS if layered else goals)
        if found is None:
            return None
        number, answer, bound, proven = found
        if layers := formulations[number].layer_columns:
            model, (light, _) = formulations[number].model, _refine_goal(formulations[number])
            answer = model.rounded(answer, layers, light, ROUNDING_GAPS[model.size > MOST_LARGE]) or answer
        variants, choice = formulations[number].choice(answer.values)
        program = formulations[number].program.with_variants(variants)
        excess = budget_excess(program, choice)
        if not excess:
            return Answer(number, program, choice, bound, proven, formulations[number].model.size > LARGE)
        margins[number] = _larger_margins(margins[number], excess, MARGIN_GROWTH**trial)
    raise BrokenPlan("the solver found no plan where one exists, which is a bug; report it with the JSON form of the problem")


def can_reach(program: Program, seconds: float) -> bool:
    """Whether ``program`` has a solution within ``seconds``, as far as that is quick to find out: the relaxation is tried first,
    and programs with many columns count as False."""
    formulation = Formulation(program, (1.0,) * len(program.intervals))
    of, unit = GOALS[0].of(formulation)
    enough = [(of, seconds / unit)]
    if formulation.model.size > MOST_LARGE or formulation.model.minimise(of, enough, whole=False) is None:
        return False
    return formulation.model.minimise(of, enough, gap=1.0) is not None


def _larger_margins(margins: Margins, excess: Mapping[str, Mapping[int, int]], times: int) -> Margins:
    def added(now: Mapping[int, int], more: Mapping[int, int]) -> dict[int, int]:
        return {t: now.get(t, 0) + times * more.get(t, 0) for t in {*now, *more}}

    of = [added(getattr(margins, tier), excess.get(tier, {})) for tier in ("device", "ram", "pinned")]
    return Margins(*of)


def _minimise_in_order(formulations: list[Formulation], goals: Sequence[Goal]) -> tuple[int, MilpResult, float, bool] | None:
    """Minimises ``goals`` in order of priority; each result limits the search for the next. Returns the index of the formulation,
    its result, the bound of the first goal and whether it was proven."""
    candidates: dict[int, MilpResult] = {}
    limits = list[tuple[Goal, float]]()
    bound, proven = 0.0, False
    fixed: dict[int, float] | None = None
    for goal, most in zip(goals, LARGE_GAPS, strict=False):
        of = list(candidates) if limits else list(range(len(formulations)))
        large = any(formulations[n].model.size > LARGE for n in of)
        most = max(most, HUGE_GAP) if any(formulations[n].model.size > HUGE for n in of) else most
        wanted = replace(goal, gap=max(goal.gap, most)) if large else goal
        results, best, least = minimise_over(formulations, of, wanted, limits, staged=large, fixed=fixed, known=candidates)
        if not results:
            break
        candidates = dict(results)
        if not limits:
            bound, proven = least, all(found.proven for found in results.values())
            if large or sum(formulations[n].model.size for n in candidates) > MOST_LARGE:
                number = min(candidates)
                candidates, fixed = {number: candidates[number]}, formulations[number].variant_columns(candidates[number].values)
        elif large:  # the remaining choice is when blocks are loaded for later use
            ((number, found),) = candidates.items()
            fixed = (fixed or {}) | formulations[number].compute_slot_columns(found.values)
        limits.append((goal, best))
    number = min(candidates, default=0)
    return (number, candidates[number], bound, proven) if candidates else None


def minimise_over(
    formulations: Sequence[Formulation],
    candidates: Sequence[int],
    goal: Goal,
    limits: Sequence[tuple[Goal, float]] = (),
    *,
    staged: bool = False,
    fixed: Mapping[int, float] | None = None,
    known: Mapping[int, MilpResult] | None = None,
) -> tuple[dict[int, MilpResult], float, float]:
    """Minimises ``goal`` over the formulations ``candidates``: results that reach the best value, by index; the best value and the
    bound on it, in seconds or bytes. ``limits``: earlier goals and their values; ``known``: solutions within these."""
    rows = {
        n: [(by.of(formulations[n])[0], most / by.of(formulations[n])[1] * (1 + SLACK)) for by, most in limits] for n in candidates
    }
    bounds = {n: _relaxation_bound(formulations[n], goal, rows[n]) if len(candidates) > 1 else 0.0 for n in candidates}
    found: dict[int, MilpResult] = {}
    best, least = float("inf"), float("inf")
    for n in sorted((n for n in candidates if bounds[n] is not None), key=lambda n: (bounds[n], n)):
        of, unit = goal.of(formulations[n])
        low = bounds[n] or 0.0
        if low > best * (1 + SLACK):
            least = min(least, low)
            continue
        cutoff = [(of, best / unit * (1 + SLACK))] if found else []
        start = None if cutoff else (known or {}).get(n)
        answer = _minimise_staged(formulations[n], of, [*rows[n], *cutoff], goal.gap, staged, fixed, start)
        if answer is None:
            continue
        found[n] = answer
        best = min(best, answer.value * unit)
        least = min(least, answer.bound * unit)
    most = best * (1 + 2 * SLACK)  # HiGHS may violate the cutoff row by its tolerance
    good = {n: answer for n, answer in sorted(found.items()) if answer.value * goal.of(formulations[n])[1] <= most}
    return good, best, min(least, best)


def _minimise_staged(
    formulation: Formulation,
    of: Linear,
    rows: Sequence[tuple[Linear, float]],
    gap: float,
    staged: bool,
    fixed: Mapping[int, float] | None,
    start: MilpResult | None,
) -> MilpResult | None:
    """Minimises ``of``. ``staged``, for large programs: first with variants fixed, then over all variants from that start. The
    fixed variants are the first ones if the relaxation is no worse with them, else those with the largest share in the relaxation,
    else those of a solution within ROUGH_GAP."""
    model = formulation.model
    if start is None and staged and formulation.first_variant_columns:
        relaxed = model.minimise(of, rows, whole=False)
        if relaxed is None:
            return None
        first = model.minimise(of, rows, whole=False, fixed=formulation.first_variant_columns)
        near = (
            formulation.first_variant_columns
            if first is not None and first.value <= relaxed.value * (1 + gap)
            else formulation.variant_columns(relaxed.values)
        )
        start = model.minimise(of, rows, gap=gap, fixed=near)
        if start is None and (rough := model.minimise(of, rows, gap=ROUGH_GAP)) is not None:
            start = model.minimise(of, rows, gap=gap, fixed=formulation.variant_columns(rough.values), start=rough) or rough
    return model.minimise(of, rows, gap=gap, fixed=fixed, start=start)


def _relaxation_bound(formulation: Formulation, goal: Goal, rows: Sequence[tuple[Linear, float]]) -> float | None:
    """A lower bound from the relaxation; None: infeasible."""
    of, unit = goal.of(formulation)
    found = formulation.model.minimise(of, rows, whole=False)
    return None if found is None else found.value * unit

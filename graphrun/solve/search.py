"""The best integers of one or several programs of the same problem: least seconds, then bytes
moved, then memory. Makes no plan.

for each goal:  relaxations of all programs -> exact programs in order of their bounds, while the
bound is no worse than the
                best value found -> programs that reach the best value go on to the next goal
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from graphrun.errors import BrokenPlan
from graphrun.solve.linear import GAP, NODES, ROUGH_GAP, Linear, MilpResult, Row
from graphrun.solve.milp import Formulation
from graphrun.solve.program import Choice, Program

# HiGHS takes a row as kept, and a value as whole, within 1e-6: 8 GiB are exceeded by up to 8 bytes,
# and a block of 400 MB by 400. The margin grows per round, where keeping the excess free was not
# enough: the last is 65,536 times the excess.
ROUNDS = 4
MARGIN_GROWTH = 256
# Columns of one program, and of all programs that are equally fast. Above either, variants, order
# and options are those of the first fastest solution found, even if others are as fast. LARGE_GAPS:
# relative gaps of seconds, bytes moved and memory in a large program.
LARGE, MOST_LARGE = 850, 4000
LARGE_GAPS = (1e-4, 1e-3, 1e-3)
# of a search that breaks a tie in a large program; of one with higher copy times
TIE_NODES, REFINE_NODES = (
    200,
    500,
)
HUGE, HUGE_GAP = 8000, 1e-3  # gap of seconds above this many columns, which no reference graph has
# gap when counts of layers are rounded; the second above MOST_LARGE columns
ROUNDING_GAPS = (
    2e-4,
    3e-3,
)
# weight of a second of copying relative to a second of the plan, where both are in one goal
COPY_WEIGHT = 0.01
# relative loss of a goal allowed for the next one; HiGHS warns on stdout about tighter rows
SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class Goal:
    """What to minimise: a linear expression and the value of its unit. ``gap``: relative optimality
    gap; ``nodes``: most nodes."""

    of: Callable[[Formulation], tuple[Linear, float]]
    gap: float = GAP
    nodes: int = NODES


GOALS = (
    Goal(lambda formulation: (formulation.seconds, formulation.seconds_unit)),
    Goal(lambda formulation: (formulation.moved, formulation.bytes_unit)),
    Goal(lambda formulation: (formulation.memory, formulation.bytes_unit), 1e-3),
)
SECONDS = GOALS[:1]


def _refine_goal(of: Formulation) -> tuple[Linear, float]:
    """Seconds, plus a hundredth of the copy time, plus a tie-breaker for memory."""
    return of.seconds + COPY_WEIGHT * of.copying + 1e-6 * of.memory, of.seconds_unit


# Goal when a program is solved again because the simulator found its plan slower than predicted:
# among plans that are nearly as fast, bytes moved decide, then memory. The simulator judges the
# result again.
REFINE_GOALS = (Goal(_refine_goal, 1e-4, REFINE_NODES),)
# for layers: their counts are fractions, rounded afterwards
LAYER_GOALS = (
    *SECONDS,
    *REFINE_GOALS,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The best choice found. ``number``: index of its program among those given; ``program``: that
    program with one variant per component; ``bound``: lower bound on seconds over all programs;
    ``large``: solving it is slow, so avoid doing it again."""

    number: int
    program: Program
    choice: Choice
    bound: float
    large: bool = False


def choose(formulations: Sequence[Formulation], goals: Sequence[Goal] = GOALS) -> Answer | None:
    """The best choice over the programs of ``formulations``, with the bound in seconds; None:
    nothing fits. ``goals``: in order of priority.

    Budgets are checked in integers. Where rounding let a slot exceed one, that much is kept free
    and the programs are solved again. Raises BrokenPlan if that does not help.
    """
    formulations = list(formulations)
    for trial in range(ROUNDS):
        layered = goals is GOALS and any(formulation.layer_columns for formulation in formulations)
        found = _minimise_in_order(formulations, LAYER_GOALS if layered else goals)
        if found is None:
            return None
        number, answer, bound = found
        of = formulations[number]
        if layers := of.layer_columns:
            answer = (
                of.model.rounded(
                    answer, layers, _refine_goal(of)[0], ROUNDING_GAPS[of.model.size > MOST_LARGE]
                )
                or answer
            )
        program, choice = of.choice(answer.values)
        excess = program.excess_bytes(choice)
        if not excess:
            return Answer(number, program, choice, bound, of.model.size > LARGE)
        more = {
            tier: of.margins.get(tier, 0) + MARGIN_GROWTH**trial * nbytes
            for tier, nbytes in excess.items()
        }
        formulations[number] = Formulation(
            of.program, of.factors, {**of.margins, **more}, None, of.depth, of.leaves, of.near
        )
    raise BrokenPlan(
        "the solver found no plan where one exists, which is a bug; report it with the JSON form of the problem"
    )


def can_reach(formulation: Formulation, seconds: float) -> bool:
    """Whether the program has a solution within ``seconds``, as far as that is quick to find out:
    the relaxation is tried first, and programs with many columns count as False."""
    model, of, enough = (
        formulation.model,
        formulation.seconds,
        [formulation.seconds <= seconds / formulation.seconds_unit],
    )
    if model.size > MOST_LARGE or model.minimise(of, enough, whole=False) is None:
        return False
    return model.minimise(of, enough, gap=1.0) is not None


def least_seconds(formulations: Sequence[Formulation]) -> float:
    """A lower bound on the seconds of all programs of ``formulations``."""
    large = any(formulation.model.size > LARGE for formulation in formulations)
    goal = replace(SECONDS[0], gap=LARGE_GAPS[0], nodes=REFINE_NODES) if large else SECONDS[0]
    return minimise_over(formulations, range(len(formulations)), goal, staged=large)[2]


def _minimise_in_order(
    formulations: list[Formulation], goals: Sequence[Goal]
) -> tuple[int, MilpResult, float] | None:
    """Minimises ``goals`` in order of priority; each result limits the search for the next. Returns
    the index of the formulation, its result and the bound of the first goal."""
    candidates: dict[int, MilpResult] = {}
    limits = list[tuple[Goal, float]]()
    bound = 0.0
    fixed: dict[int, float] | None = None
    for goal, most in zip(goals, LARGE_GAPS, strict=False):
        of = list(candidates) if limits else list(range(len(formulations)))
        large = any(formulations[n].model.size > LARGE for n in of)
        most = max(most, HUGE_GAP) if any(formulations[n].model.size > HUGE for n in of) else most
        wanted = (
            replace(goal, gap=max(goal.gap, most), nodes=TIE_NODES if limits else goal.nodes)
            if large
            else goal
        )
        results, best, least = minimise_over(
            formulations, of, wanted, limits, staged=large, fixed=fixed, known=candidates
        )
        if not results:
            break
        candidates = dict(results)
        if not limits:
            bound = least
            if large or sum(formulations[n].model.size for n in candidates) > MOST_LARGE:
                number = min(candidates)
                of_variants = formulations[number].chosen_in(candidates[number].values)
                candidates, fixed = (
                    {number: candidates[number]},
                    formulations[number].variant_columns(of_variants),
                )
        elif (
            large or formulations[min(candidates)].program.part
        ):  # what remains is when blocks are loaded for later use
            number = min(candidates)
            candidates = {number: candidates[number]}
            fixed = (fixed or {}) | formulations[number].compute_slot_columns(
                candidates[number].values
            )
        limits.append((goal, best))
    number = min(candidates, default=0)
    return (number, candidates[number], bound) if candidates else None


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
    """Minimises ``goal`` over the formulations ``candidates``: results that reach the best value,
    by index; the best value and the bound on it, in seconds or bytes. ``limits``: earlier goals and
    their values; ``known``: solutions within these."""
    goals = {n: goal.of(formulations[n]) for n in candidates}
    rows: dict[int, list[Row]] = {n: [] for n in candidates}
    for n in candidates:
        for earlier, most in limits:
            of, unit = earlier.of(formulations[n])
            rows[n].append(of <= most / unit * (1 + SLACK))
    bounds = dict.fromkeys(candidates, 0.0)
    for n in candidates if len(candidates) > 1 else ():
        relaxed = formulations[n].model.minimise(goals[n][0], rows[n], whole=False)
        if relaxed is None:
            del bounds[n]
        else:
            bounds[n] = relaxed.value * goals[n][1]
    found: dict[int, MilpResult] = {}
    best, least = float("inf"), float("inf")
    for n in sorted(bounds, key=lambda n: (bounds[n], n)):
        of, unit = goals[n]
        if bounds[n] > best * (1 + SLACK):
            least = min(least, bounds[n])
            continue
        cutoff = [of <= best / unit * (1 + SLACK)] if found else []
        start = None if cutoff else (known or {}).get(n)
        answer = _minimise_staged(
            formulations[n], of, [*rows[n], *cutoff], goal, staged, fixed, start
        )
        if answer is None:
            continue
        found[n] = answer
        # 0 may come as -1e-15, which its own limit would exclude
        best = min(best, max(0.0, answer.value * unit))
        least = min(least, answer.bound * unit)
    most = best * (1 + 2 * SLACK)  # HiGHS may violate the cutoff row by its tolerance
    good = {n: answer for n, answer in sorted(found.items()) if answer.value * goals[n][1] <= most}
    return good, best, min(least, best)


def _minimise_staged(
    formulation: Formulation,
    of: Linear,
    rows: Sequence[Row],
    goal: Goal,
    staged: bool,
    fixed: Mapping[int, float] | None,
    start: MilpResult | None,
) -> MilpResult | None:
    """Minimises ``of``. ``staged``, for large programs: first with variants fixed, then over all
    variants from that start. The fixed variants are the first ones if the relaxation is no worse
    with them, else those with the largest share in the relaxation, else those of a solution within
    ROUGH_GAP."""
    model, first, gap = (
        formulation.model,
        formulation.variant_columns(formulation.first_choices),
        goal.gap,
    )
    if start is None and staged and first:
        relaxed = model.minimise(of, rows, whole=False)
        if relaxed is None:
            return None
        simplest = model.minimise(of, rows, whole=False, fixed=first)
        if simplest is None or simplest.value > relaxed.value * (1 + gap):
            first = formulation.variant_columns(formulation.chosen_in(relaxed.values))
        start = model.minimise(of, rows, gap=gap, fixed=first)
        if start is None and (rough := model.minimise(of, rows, gap=ROUGH_GAP)) is not None:
            chosen = formulation.variant_columns(formulation.chosen_in(rough.values))
            start = model.minimise(of, rows, gap=gap, fixed=chosen, start=rough) or rough
    return model.minimise(of, rows, gap=gap, fixed=fixed, start=start, nodes=goal.nodes)

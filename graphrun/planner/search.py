"""The best integers of one or several programs of the same problem: seconds, then bytes moved, then memory. Makes no plan.

for each goal:  relaxations of all programs -> in order of bound, the exact program, while the bound is no worse than the best found
                -> those that are as good as the best go on to the next goal
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from graphrun.errors import BrokenPlan
from graphrun.planner.matrix import Matrix, Spare
from graphrun.planner.model import GAP, Found, Sum
from graphrun.planner.program import Choice, Program
from graphrun.planner.variants import over

ROUNDS = 3
FURTHER = 256  # times as much is kept free when keeping a slot's excess did not help: HiGHS takes 8 bytes too many for 8 GiB
LARGE = 2000  # columns: above, variants, order and options are those of the first fastest plan found, whatever others tie with it
SLACK = 1e-6  # by how much a goal may be missed (relatively) for the sake of the next one; HiGHS warns on stdout about tighter rows


@dataclass(frozen=True, slots=True)
class Answer:
    """The best found: of which of the programs, with one way to a component; the bound on seconds over all of them."""

    number: int
    program: Program
    choice: Choice
    bound: float
    proven: bool


def choose(programs: Sequence[Program] | Program, factors: Sequence[float] = (), *, goals: int = 3) -> Answer | None:
    """The best integers, with the bound in seconds; copy times of interval t are multiplied by ``factors[t]``. None: nothing fits.

    ``goals``: how many of seconds, bytes moved and memory count.
    Sums are checked in integers: where rounding let a slot exceed a budget, that much is kept free, and the programs solved again.
    """
    programs = [programs] if isinstance(programs, Program) else programs
    spares = [Spare() for _ in programs]
    for trial in range(ROUNDS):
        matrices = [
            Matrix(program, factors or (1.0,) * len(program.intervals), spare)
            for program, spare in zip(programs, spares, strict=True)
        ]
        found = _least(matrices, _GOALS[:goals])
        if found is None:
            return None
        number, answer, bound, proven = found
        variants, choice = matrices[number].choice(answer.values)
        program = matrices[number].program.taking(variants)
        excess = over(program, choice)
        if not excess:
            return Answer(number, program, choice, bound, proven)
        spares[number] = _more(spares[number], excess, FURTHER**trial)
    raise BrokenPlan("the solver found no plan where one exists, which is a bug; the problem's JSON form shows it")


def _more(spare: Spare, excess: Mapping[str, Mapping[int, int]], times: int) -> Spare:
    def added(kept: Mapping[int, int], more: Mapping[int, int]) -> dict[int, int]:
        return {t: kept.get(t, 0) + times * more.get(t, 0) for t in {*kept, *more}}

    of = [added(getattr(spare, tier), excess.get(tier, {})) for tier in ("device", "ram", "pinned")]
    return Spare(*of)


Goal = Callable[[Matrix], tuple[Sum, float]]  # terms, and what a unit of them is

_GOALS: tuple[Goal, ...] = (
    lambda matrix: (matrix.seconds, matrix.seconds_unit),
    lambda matrix: (matrix.moved, matrix.bytes_unit),
    lambda matrix: (matrix.memory, matrix.bytes_unit),
)


def _least(matrices: list[Matrix], goals: Sequence[Goal]) -> tuple[int, Found, float, bool] | None:
    """Seconds first, then bytes moved, then memory: each goal bounds the search for the next."""
    alive: dict[int, Found | None] = dict.fromkeys(range(len(matrices)))
    limits = list[tuple[Goal, float]]()
    bound, proven = 0.0, False
    for goal in goals:
        finer, best, least = passed(matrices, list(alive), goal, limits)
        if not finer:
            break
        alive = dict(finer)
        if not limits:
            bound, proven = least, all(found.proven for found in finer.values())
            if sum(matrices[n].model.size for n in alive) > LARGE:
                number = min(alive)
                matrices[number] = _settled(matrices[number], finer[number])
                alive = {number: matrices[number].model.minimise(matrices[number].seconds)}
        limits.append((goal, best))
    number = min(alive, default=0)
    answer = alive.get(number)
    return (number, answer, bound, proven) if answer is not None else None


def _settled(matrix: Matrix, found: Found) -> Matrix:
    """``matrix`` with the variants of ``found`` alone: a large program is searched for ties among blocks only."""
    variants, _ = matrix.choice(found.values)
    return Matrix(matrix.program.taking(variants), matrix.factors, matrix.spare)


def passed(
    matrices: Sequence[Matrix], alive: Sequence[int], goal: Goal, limits: Sequence[tuple[Goal, float]] = (), *, gap: float = GAP
) -> tuple[dict[int, Found], float, float]:
    """Answers as good as the best by number, the best value, and the bound on it, in seconds or bytes."""
    rows = {n: [(of(matrices[n])[0], most / of(matrices[n])[1] * (1 + SLACK)) for of, most in limits] for n in alive}
    bounds = {n: _relaxed(matrices[n], goal, rows[n]) if len(alive) > 1 else 0.0 for n in alive}
    found: dict[int, Found] = {}
    best, least = float("inf"), float("inf")
    for n in sorted((n for n in alive if bounds[n] is not None), key=lambda n: (bounds[n], n)):
        of, unit = goal(matrices[n])
        low = bounds[n] or 0.0
        if low > best * (1 + SLACK):
            least = min(least, low)
            continue
        cutoff = [(of, best / unit * (1 + SLACK))] if found else []
        answer = matrices[n].model.minimise(of, [*rows[n], *cutoff], gap=gap)
        if answer is None:
            continue
        found[n] = answer
        best = min(best, answer.value * unit)
        least = min(least, answer.bound * unit)
    good = {n: answer for n, answer in sorted(found.items()) if answer.value * goal(matrices[n])[1] <= best * (1 + SLACK)}
    return good, best, min(least, best)


def _relaxed(matrix: Matrix, goal: Goal, rows: Sequence[tuple[Sum, float]]) -> float | None:
    """A bound on what ``matrix`` can reach; None where it can reach nothing."""
    of, unit = goal(matrix)
    found = matrix.model.minimise(of, rows, whole=False)
    return None if found is None else found.value * unit

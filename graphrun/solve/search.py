"""The best integers of one or several programs of the same problem: seconds, then bytes moved, then memory. Makes no plan.

for each goal:  relaxations of all programs -> in order of bound, the exact program, while the bound is no worse than the best found
                -> those that are as good as the best go on to the next goal
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from graphrun.errors import BrokenPlan
from graphrun.model.least_memory import DEPTH
from graphrun.solve.matrix import GAP, ROUGH, Found, Matrix, Spare, Sum, plus
from graphrun.solve.program import Choice, Program
from graphrun.solve.variants import over

ROUNDS = 3
FURTHER = 256  # times as much is kept free when keeping a slot's excess did not help: HiGHS takes 8 bytes too many for 8 GiB
# Columns of one program, and of all that are equally fast: above, variants, order and options are those of the first fastest plan
# found, whatever others tie with it. In a large one seconds, bytes moved and memory may be so far from the least, relatively.
LARGE, MOST_LARGE = 850, 4000
LARGE_GAPS = (1e-4, 1e-3, 1e-3)
HUGE, HUGE_GAP = 8000, 1e-3  # of seconds, from so many columns on: no reference graph has them
WHOLE_GAPS = (2e-4, 3e-3)  # of layers made whole, and in programs of more than MOST_LARGE columns
LIGHT = 0.01  # what a second of copying weighs beside a second, where both are in one goal
SLACK = 1e-6  # by how much a goal may be missed (relatively) for the sake of the next one; HiGHS warns on stdout about tighter rows


@dataclass(frozen=True, slots=True)
class Goal:
    """What is made least: terms, and what a unit of them is; how far from the least an answer may be, relatively."""

    of: Callable[[Matrix], tuple[Sum, float]]
    gap: float = GAP


GOALS = (
    Goal(lambda matrix: (matrix.seconds, matrix.seconds_unit)),
    Goal(lambda matrix: (matrix.moved, matrix.bytes_unit)),
    Goal(lambda matrix: (matrix.memory, matrix.bytes_unit), 1e-3),
)
SECONDS = GOALS[:1]


def _light(matrix: Matrix) -> tuple[Sum, float]:
    """Seconds, a hundredth of what copies take, and as good as nothing for memory."""
    return plus((1.0, matrix.seconds), (LIGHT, matrix.copying), (1e-6, matrix.memory)), matrix.seconds_unit


# What is solved once more, since the simulator, which judges it again, found it slower than promised: bytes moved decide among
# plans that are nearly as fast, and memory among those.
AGAIN = (Goal(_light, 1e-4),)
BY_LAYER = (*SECONDS, *AGAIN)  # of parts of layers, that are made whole afterwards


@dataclass(frozen=True, slots=True)
class Answer:
    """The best found: of which of the programs, with one way to a component; the bound on seconds over all of them. ``large``: it
    took a large program, which is not solved often."""

    number: int
    program: Program
    choice: Choice
    bound: float
    proven: bool
    large: bool = False


def choose(
    programs: Sequence[Program] | Program, factors: Sequence[float] = (), *, goals: Sequence[Goal] = GOALS, depth: int = DEPTH
) -> Answer | None:
    """The best integers, with the bound in seconds; copy times of interval t are multiplied by ``factors[t]``. None: nothing fits.

    ``goals``: what counts, one after another; ``depth``: of rings.
    Sums are checked in integers: where rounding let a slot exceed a budget, that much is kept free, and the programs solved again.
    """
    programs = [programs] if isinstance(programs, Program) else programs
    spares = [Spare() for _ in programs]
    for trial in range(ROUNDS):
        matrices = [
            Matrix(program, factors or (1.0,) * len(program.intervals), spare, depth=depth)
            for program, spare in zip(programs, spares, strict=True)
        ]
        layered = goals is GOALS and any(matrix.layers for matrix in matrices)
        found = _least(matrices, BY_LAYER if layered else goals)
        if found is None:
            return None
        number, answer, bound, proven = found
        if layers := matrices[number].layers:
            model, (light, _) = matrices[number].model, _light(matrices[number])
            answer = model.nearest(answer, layers, light, WHOLE_GAPS[model.size > MOST_LARGE]) or answer
        variants, choice = matrices[number].choice(answer.values)
        program = matrices[number].program.taking(variants)
        excess = over(program, choice)
        if not excess:
            return Answer(number, program, choice, bound, proven, matrices[number].model.size > LARGE)
        spares[number] = _more(spares[number], excess, FURTHER**trial)
    raise BrokenPlan("the solver found no plan where one exists, which is a bug; the problem's JSON form shows it")


def undercuts(program: Program, seconds: float) -> bool:
    """Whether some answer of ``program`` takes no more than ``seconds``, as far as is quick to see: with fractions for integers
    first, and not where there are many columns."""
    matrix = Matrix(program, (1.0,) * len(program.intervals))
    of, unit = GOALS[0].of(matrix)
    enough = [(of, seconds / unit)]
    if matrix.model.size > MOST_LARGE or matrix.model.minimise(of, enough, whole=False) is None:
        return False
    return matrix.model.minimise(of, enough, gap=1.0) is not None


def _more(spare: Spare, excess: Mapping[str, Mapping[int, int]], times: int) -> Spare:
    def added(kept: Mapping[int, int], more: Mapping[int, int]) -> dict[int, int]:
        return {t: kept.get(t, 0) + times * more.get(t, 0) for t in {*kept, *more}}

    of = [added(getattr(spare, tier), excess.get(tier, {})) for tier in ("device", "ram", "pinned")]
    return Spare(*of)


def _least(matrices: list[Matrix], goals: Sequence[Goal]) -> tuple[int, Found, float, bool] | None:
    """Seconds first, then bytes moved, then memory: each goal bounds the search for the next."""
    alive: dict[int, Found] = {}
    limits = list[tuple[Goal, float]]()
    bound, proven = 0.0, False
    settled: dict[int, float] | None = None
    for goal, most in zip(goals, LARGE_GAPS, strict=False):
        of = list(alive) if limits else list(range(len(matrices)))
        large = any(matrices[n].model.size > LARGE for n in of)
        most = max(most, HUGE_GAP) if any(matrices[n].model.size > HUGE for n in of) else most
        wanted = replace(goal, gap=max(goal.gap, most)) if large else goal
        finer, best, least = passed(matrices, of, wanted, limits, staged=large, fixed=settled, known=alive)
        if not finer:
            break
        alive = dict(finer)
        if not limits:
            bound, proven = least, all(found.proven for found in finer.values())
            if large or sum(matrices[n].model.size for n in alive) > MOST_LARGE:
                number = min(alive)
                alive, settled = {number: alive[number]}, matrices[number].taken(alive[number].values)
        elif large:  # what is left to choose is when blocks are loaded for later
            ((number, found),) = alive.items()
            settled = (settled or {}) | matrices[number].computing(found.values)
        limits.append((goal, best))
    number = min(alive, default=0)
    return (number, alive[number], bound, proven) if alive else None


def passed(
    matrices: Sequence[Matrix],
    alive: Sequence[int],
    goal: Goal,
    limits: Sequence[tuple[Goal, float]] = (),
    *,
    staged: bool = False,
    fixed: Mapping[int, float] | None = None,
    known: Mapping[int, Found] | None = None,
) -> tuple[dict[int, Found], float, float]:
    """Answers as good as the best by number, the best value, and the bound on it, in seconds or bytes. ``known``: answers that keep
    ``limits``."""
    rows = {n: [(by.of(matrices[n])[0], most / by.of(matrices[n])[1] * (1 + SLACK)) for by, most in limits] for n in alive}
    bounds = {n: _relaxed(matrices[n], goal, rows[n]) if len(alive) > 1 else 0.0 for n in alive}
    found: dict[int, Found] = {}
    best, least = float("inf"), float("inf")
    for n in sorted((n for n in alive if bounds[n] is not None), key=lambda n: (bounds[n], n)):
        of, unit = goal.of(matrices[n])
        low = bounds[n] or 0.0
        if low > best * (1 + SLACK):
            least = min(least, low)
            continue
        cutoff = [(of, best / unit * (1 + SLACK))] if found else []
        start = None if cutoff else (known or {}).get(n)
        answer = _minimised(matrices[n], of, [*rows[n], *cutoff], goal.gap, staged, fixed, start)
        if answer is None:
            continue
        found[n] = answer
        best = min(best, answer.value * unit)
        least = min(least, answer.bound * unit)
    most = best * (1 + 2 * SLACK)  # an answer to the very row above may exceed that by as much as HiGHS lets rows be violated
    good = {n: answer for n, answer in sorted(found.items()) if answer.value * goal.of(matrices[n])[1] <= most}
    return good, best, min(least, best)


def _minimised(
    matrix: Matrix,
    of: Sum,
    rows: Sequence[tuple[Sum, float]],
    gap: float,
    staged: bool,
    fixed: Mapping[int, float] | None,
    start: Found | None,
) -> Found | None:
    """The least ``of``. In a large program first with the earliest variants where the relaxation is no worse with them, or with
    those that it is nearest to, or that a rough answer takes; then whether any others are better."""
    model = matrix.model
    if start is None and staged and matrix.first:
        relaxed = model.minimise(of, rows, whole=False)
        if relaxed is None:
            return None
        first = model.minimise(of, rows, whole=False, fixed=matrix.first)
        near = matrix.first if first is not None and first.value <= relaxed.value * (1 + gap) else matrix.taken(relaxed.values)
        start = model.minimise(of, rows, gap=gap, fixed=near)
        if start is None and (rough := model.minimise(of, rows, gap=ROUGH)) is not None:
            start = model.minimise(of, rows, gap=gap, fixed=matrix.taken(rough.values), start=rough) or rough
    return model.minimise(of, rows, gap=gap, fixed=fixed, start=start)


def _relaxed(matrix: Matrix, goal: Goal, rows: Sequence[tuple[Sum, float]]) -> float | None:
    """A bound on what ``matrix`` can reach; None where it can reach nothing."""
    of, unit = goal.of(matrix)
    found = matrix.model.minimise(of, rows, whole=False)
    return None if found is None else found.value * unit

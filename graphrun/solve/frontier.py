"""Time against budget: one problem solved for several VRAM budgets of one device.

seconds
  |x           a plan for a smaller budget is also one for a larger budget,
  |  x         so the curve falls until all transfers overlap compute
  |     x   x
  '-----------> budget
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf

from graphrun.errors import InputError
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.solve.infeasible import smallest_budget, smallest_ram
from graphrun.solve.pages import carried_over, solved, sufficient_budget
from graphrun.solve.strategies import without
from graphrun.units import MIB, html_table, parse_size, show_seconds, show_size

# Limit of `sizes_between` and `values_between`. Each budget takes a solve; each value of an input
# takes a dry run, which lasts seconds. A table shows far fewer.
MOST_POINTS = 1000
VISIBLE = 1 / 100  # of a curve's height: a smaller difference is 3 pixels at most
WIDE = 1 / 8  # of a curve's width: a narrower part is not halved


@dataclass(frozen=True, slots=True, repr=False)
class FrontierPoint:
    """The result for one budget of device number ``device``.

    ``solution``: None if nothing fits. Seconds and bytes are simulated, of all runs together; 0
    without a plan. ``peak_bytes``: on that device. ``smallest_budget_bytes``,
    ``smallest_ram_bytes``: minimum VRAM and RAM for which a plan exists; 0 if not computed (VRAM of
    a secondary device, RAM of a `curve`).
    """

    budget_bytes: int
    smallest_budget_bytes: int
    smallest_ram_bytes: int
    solution: Solution | None
    seconds: float = 0.0
    compute_seconds: float = 0.0
    peak_bytes: int = 0
    moved_bytes: int = 0
    device: int = 0

    def __repr__(self) -> str:
        return f"<Point {', '.join(self.cells)}>"

    @property
    def fits(self) -> bool:
        return self.solution is not None

    @property
    def cells(self) -> tuple[str, ...]:
        """Budget, seconds, peak and bytes moved as text; without a plan, the minimum budget."""
        if self.solution is None:
            hint = (
                f" below {show_size(self.smallest_budget_bytes)}"
                if self.smallest_budget_bytes
                else ""
            )
            return show_size(self.budget_bytes), f"nothing fits{hint}", "", ""
        sizes = show_size(self.peak_bytes), show_size(self.moved_bytes)
        return show_size(self.budget_bytes), show_seconds(self.seconds), *sizes


class Frontier(tuple[FrontierPoint, ...]):
    """Points in the order of their budgets."""

    def _repr_html_(self) -> str:
        return html_table(
            "time against budget",
            [("budget", "time", "peak", "moves"), *(point.cells for point in self)],
        )


def frontier(
    problem: Problem,
    budgets: Iterable[int],
    solve: Callable[[Problem], Solution | None] = solved,
    device: int = 0,
    least_bytes: int | None = None,
) -> Frontier:
    """Return a point for each of ``budgets`` (bytes of VRAM of ``device``), in their order.

    If the plan for a smaller budget is faster, the larger budget has it too. Budgets beyond the
    card's memory share one plan. ``solve``: returns None if nothing fits. ``least_bytes``: the
    minimum VRAM of the points, whose minimum RAM is then not computed.
    """
    budget_list, counts_ram = list(budgets), least_bytes is None
    if least_bytes is None:
        least_bytes = smallest_budget(problem) if not device else 0
    capacity = (problem.secondaries[device - 1] if device else problem).hardware.capacity_bytes
    points, best, capacity_solution = dict[int, FrontierPoint](), None, None
    for budget in sorted(set(budget_list)):
        budget_problem = at_budget(problem, budget, device)
        if budget <= capacity:
            solution = solve(budget_problem)
        else:
            capacity_solution = capacity_solution or solve(at_budget(problem, capacity, device))
            solution = (
                None
                if capacity_solution is None
                else carried_over(
                    budget_problem, capacity_solution, capacity_solution.bound_seconds
                )
            )
        if best is not None and (solution is None or best.seconds < solution.seconds):
            solution = (
                carried_over(
                    budget_problem,
                    best,
                    best.bound_seconds if solution is None else solution.bound_seconds,
                )
                or solution
            )
        least_ram = smallest_ram(budget_problem) if counts_ram else 0
        points[budget] = _point(budget_problem, (budget, least_bytes, least_ram), solution, device)
        best = solution or best
    return Frontier(points[budget] for budget in budget_list)


def quickly_solved(problem: Problem) -> Solution | None:
    """Return a plan as `solved` does, in less time. The plan may be a few per cent slower."""
    with without(
        "deeper ring buffers",
        "baselines",
        "layers",
        "paged baselines",
        "slower disk",
    ):
        return solved(problem)


def curve(
    problem: Problem,
    solution: Solution,
    solve: Callable[[Problem], Solution | None] = quickly_solved,
) -> Frontier:
    """Return the points of a drawn curve: its ends, ``solution``, and points between.

    The middle between two points is solved if they are far apart and their seconds differ visibly.
    """
    budget = min(problem.budget_bytes, problem.hardware.capacity_bytes)
    minimum, maximum = curve_ends(problem)
    maximum = max(maximum, budget)
    solutions = {budget: carried_over(at_budget(problem, budget), solution, solution.bound_seconds)}

    def seconds(nbytes: int) -> float:
        if nbytes not in solutions:
            solutions[nbytes] = solve(at_budget(problem, nbytes))
        return inf if (candidate := solutions[nbytes]) is None else candidate.seconds

    # the curve falls; ``solve`` may find no plan at the minimum
    highest = next((s for s in map(seconds, (minimum, budget)) if s < inf), inf)
    parts = [(minimum, budget), (budget, maximum)]
    while parts:
        low, high = parts.pop()
        if seconds(low) - seconds(high) > VISIBLE * highest and high - low > WIDE * (
            maximum - minimum
        ):
            middle = (low + high) // 2
            parts += [(low, middle), (middle, high)]
    return frontier(
        problem,
        sorted(solutions),
        lambda budget_problem: solutions[budget_problem.budget_bytes],
        least_bytes=minimum,
    )


def curve_ends(problem: Problem) -> tuple[int, int]:
    """Return the first and last budget of a curve of ``problem``, in bytes.

    First is `sufficient_budget`; last has room for all components at once, at most the card's
    memory.
    """
    minimum = sufficient_budget(problem)
    weights = sum(
        max(component.weight_bytes(n) for n in problem.usable(component))
        for component in problem.components
    )
    slot_bytes = max(
        (max(p.first_bytes, p.steady_bytes) + p.input_bytes for p in problem.phases), default=0
    )
    values = sum(value.nbytes for value in problem.values)
    whole = problem.budget_for(weights + slot_bytes + values)
    return minimum, max(minimum, min(whole, problem.hardware.capacity_bytes))


def at_budget(problem: Problem, nbytes: int, device: int = 0) -> Problem:
    """Return ``problem`` with a budget of ``nbytes`` for device number ``device``."""
    if not device:
        return problem.with_budget(nbytes)
    secondaries = enumerate(problem.secondaries, 1)
    return replace(
        problem,
        secondaries=tuple(
            replace(secondary, budget_bytes=nbytes) if n == device else secondary
            for n, secondary in secondaries
        ),
    )


def _point(
    problem: Problem, sizes: tuple[int, int, int], solution: Solution | None, device: int
) -> FrontierPoint:
    if solution is None:
        return FrontierPoint(*sizes, None, device=device)
    simulation = solution.simulation
    compute = simulation.compute_seconds + (problem.runs - 1) * sum(
        slot.compute_seconds for slot in simulation.further_slots
    )
    slots = simulation.all_slots
    peak_bytes = (
        max(slot.secondary_peaks[device - 1] for slot in slots) if device else simulation.peak_bytes
    )
    return FrontierPoint(
        *sizes,
        solution,
        simulation.total_seconds,
        compute,
        peak_bytes,
        simulation.total_moved_bytes,
        device,
    )


def sizes_between(
    text: str, *, whole_bytes: int | None = None, name: str = "vram"
) -> tuple[int, ...]:
    """Return the budgets of ``text`` in bytes: ``8G``, or FROM:TO:STEP as ``4G:48G:4G``.

    ``4G:48G`` means both ends and the usual card sizes between them: powers of two and 1.5 times
    these, from 1 MiB up. ``whole_bytes``: what 100% means. ``name``: the option, for error
    messages. Raises InputError.
    """
    ends = [parse_size(part, whole_bytes=whole_bytes, name=name) for part in text.split(":")]
    if len(ends) == 1:
        return tuple(ends)
    if len(ends) > 3 or ends[0] > ends[1]:
        raise InputError(
            f"{name}: {text!r} is not a range; write it as FROM:TO or FROM:TO:STEP, such as 4G:48G"
        )
    if len(ends) == 3:
        _refuse_many(text, (ends[1] - ends[0]) // ends[2], name)
        return tuple(range(ends[0], ends[1] + 1, ends[2]))
    usual = {size for power in range(30) for size in (MIB << power, 3 * (MIB << power) // 2)}
    return tuple(sorted({size for size in usual if ends[0] < size < ends[1]} | set(ends)))


def values_between(text: str) -> tuple[str, tuple[int, ...]]:
    """Return an input's name and values from ``text``, such as ``height=512:2048:256`` (inclusive).

    Raises InputError.
    """
    name, equals, range_ = text.partition("=")
    try:
        low, high, step = (int(part) for part in range_.split(":"))
    except ValueError:
        low, high, step = 0, 0, 0
    if not (name and equals and step > 0 and low <= high):
        raise InputError(
            f"sweep: {text!r} is not a range of an input; write it as NAME=FROM:TO:STEP, such as"
            " height=512:2048:256"
        )
    _refuse_many(range_, (high - low) // step, "sweep")
    return name.strip(), tuple(range(low, high + 1, step))


def _refuse_many(text: str, steps: int, name: str) -> None:
    if steps >= MOST_POINTS:
        raise InputError(
            f"{name}: {text!r} has {steps + 1} values, more than {MOST_POINTS}; take a larger step"
        )

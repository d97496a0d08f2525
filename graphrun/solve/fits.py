"""The fastest plan of a problem by the program, without simulation, for each class of precisions.

    class     precisions
    none      all that leave the output as in 16 bits
    8bit      also weights of about 8 bits: published checkpoints, or quantized when read
    6bit      also weights of about 6 bits; in the same way 5bit and 4bit

Solved for seconds only and to ROUGH_GAP, which takes a fraction of a plan's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from graphrun.graph.precisions import CLASSES
from graphrun.model.problem import ComponentNumbers, Problem
from graphrun.solve.dominance import restrict_variants
from graphrun.solve.least import ever_finer, has_usable_variants
from graphrun.solve.linear import SearchBudget, SearchEnded
from graphrun.solve.milp import Formulation
from graphrun.solve.orders import stage_choices
from graphrun.solve.search import Answer, choose
from graphrun.solve.suggestions import ATTEMPTS, NODES, OUTPUT_FACTOR, ROUGH_SECONDS


@dataclass(frozen=True, slots=True)
class Fit:
    """A choice that runs within the budgets.

    ``allow``: the class of precisions to allow, if any. ``components``: each with only the chosen
    variant. ``seconds``: predicted, of one run. ``device_bytes``: peak on the device, with the
    context, workspace and reserve. ``ram_bytes``: peak in RAM.
    """

    allow: tuple[str, ...]
    components: tuple[ComponentNumbers, ...]
    seconds: float
    device_bytes: int
    ram_bytes: int

    @property
    def precisions(self) -> tuple[tuple[str, str], ...]:
        """(component, precision) pairs."""
        return tuple((item.name, item.variants[0].precision) for item in self.components)

    @property
    def rank(self) -> float:
        """Seconds for ranking; a changed output counts OUTPUT_FACTOR times."""
        return self.seconds * (OUTPUT_FACTOR if self.allow else 1.0)


def fits_of(problem: Problem) -> tuple[Fit, ...]:
    """Return the choices that run within the budgets of ``problem``, best first.

    Each class of `CLASSES` is allowed alone. A class that gives the same precisions as another is
    left out. The search may do as much work as the search for suggestions (ATTEMPTS, NODES).
    """
    fits, budget = list[Fit](), SearchBudget(ATTEMPTS, NODES)
    for allow, permitted_problem in _permitted(problem):
        try:
            with budget.limiting():
                answer = _answer(permitted_problem)
        except SearchEnded:
            break
        if answer is None:
            continue
        fit = _fit(permitted_problem, allow, answer)
        if not any(fit.precisions == other.precisions for other in fits):
            fits.append(fit)
    return tuple(sorted(fits, key=lambda fit: fit.rank))


def _permitted(problem: Problem) -> Iterator[tuple[tuple[str, ...], Problem]]:
    """Yield ``problem`` unchanged, then with each class of precisions allowed."""
    yield (), problem
    names = {variant.needs for component in problem.components for variant in component.variants}
    for name, formats in CLASSES.items():
        if members := sorted(names.intersection(formats) - set(problem.allow)):
            yield (name,), replace(problem, allow=tuple(sorted({*problem.allow, *members})))


def _answer(problem: Problem) -> Answer | None:
    for split in ever_finer(problem) if has_usable_variants(problem) else ():
        formulations = [Formulation(choice.program) for choice in stage_choices(split)[0]]
        if (answer := choose(formulations, ROUGH_SECONDS)) is not None:
            return answer
    return None


def _fit(problem: Problem, allow: Sequence[str], answer: Answer) -> Fit:
    best_problem = restrict_variants(
        answer.program.problem, tuple(choice.index for choice in answer.program.variant_choices)
    )
    rows = answer.rows
    overhead_bytes = problem.budget_bytes - problem.effective_bytes
    return Fit(
        tuple(allow),
        best_problem.components,
        float(rows.seconds()) / problem.runs,
        overhead_bytes + int(rows.peak_bytes(0)),
        int(rows.peak_bytes("ram")),
    )

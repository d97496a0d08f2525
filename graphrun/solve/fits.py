"""The fastest plan of a problem by the program, without simulation, for each class of precisions.

    class     precisions
    none      all that leave the output as in 16 bits
    8bit      also weights of about 8 bits: published checkpoints, or quantized when read
    6bit      also weights of about 6 bits; in the same way 5bit and 4bit

Solved for seconds to ROUGH_GAP and then for memory, which takes a fraction of a plan's time. A plan
is up to ROUGH_GAP faster with all of its budget.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from graphrun.graph.precisions import CLASSES
from graphrun.model.allocator import LARGE_PAGE_BYTES
from graphrun.model.fit import Fit
from graphrun.model.problem import Problem
from graphrun.solve.least import ever_finer, has_usable_variants
from graphrun.solve.linear import SearchBudget, SearchEnded
from graphrun.solve.milp import Formulation
from graphrun.solve.orders import stage_choices
from graphrun.solve.search import GOALS, Answer, choose
from graphrun.solve.suggestions import ATTEMPTS, NODES, OUTPUT_FACTOR, ROUGH_SECONDS
from graphrun.units import MIB, round_up

# the program counts bytes, and a plan for a card pages of the allocator: room for partly used ones
PAGES_BYTES = 3 * LARGE_PAGE_BYTES
MIN_GAIN = 0.05  # of seconds, VRAM or RAM, for which a choice may change the output
# memory after seconds: the least that runs as fast, nearly
LEAST_MEMORY = replace(GOALS[2], gap=0.05, nodes=50)


def fits_of(problem: Problem, classes: Collection[str] = tuple(CLASSES)) -> tuple[Fit, ...]:
    """Return the choices that run within the budgets of ``problem``, best first.

    Each of ``classes``, of `CLASSES`, is allowed alone. A class that gives the same precisions as
    another is left out, as is a class that changes the output for less than MIN_GAIN. The search
    may do as much work as the search for suggestions (ATTEMPTS, NODES).
    """
    fits, budget = list[Fit](), SearchBudget(ATTEMPTS, NODES)
    for allow, permitted_problem in _permitted(problem, classes):
        try:
            with budget.limiting():
                answer = _answer(permitted_problem)
        except SearchEnded:
            break
        if answer is None:
            continue
        fit = _fit(permitted_problem, allow, answer)
        if not any(fit.precisions(problem) == other.precisions(problem) for other in fits):
            fits.append(fit)
    plain = next((fit for fit in fits if not fit.allow), None)
    if plain is not None:
        fits = [fit for fit in fits if fit is plain or _gains(fit, plain)]
    # a changed output counts OUTPUT_FACTOR times
    return tuple(sorted(fits, key=lambda fit: fit.seconds * (OUTPUT_FACTOR if fit.allow else 1.0)))


def _gains(fit: Fit, plain: Fit) -> bool:
    """Return whether ``fit`` takes less of anything than ``plain``, which keeps the output."""
    pairs = (
        (fit.seconds, plain.seconds),
        (fit.device_bytes, plain.device_bytes),
        (fit.ram_bytes, plain.ram_bytes),
    )
    return any(number < (1 - MIN_GAIN) * plain_number for number, plain_number in pairs)


def _permitted(
    problem: Problem, classes: Collection[str]
) -> Iterator[tuple[tuple[str, ...], Problem]]:
    """Yield ``problem`` unchanged, then with each of ``classes`` of precisions allowed."""
    yield (), problem
    names = {variant.needs for component in problem.components for variant in component.variants}
    for name in classes:
        formats = CLASSES[name]
        if members := sorted(names.intersection(formats) - set(problem.allow)):
            yield (name,), replace(problem, allow=tuple(sorted({*problem.allow, *members})))


def _answer(problem: Problem) -> Answer | None:
    for split in ever_finer(problem) if has_usable_variants(problem) else ():
        formulations = [Formulation(choice.program) for choice in stage_choices(split)[0]]
        if (answer := choose(formulations, (*ROUGH_SECONDS, LEAST_MEMORY))) is not None:
            return answer
    return None


def _fit(problem: Problem, allow: Sequence[str], answer: Answer) -> Fit:
    rows = answer.rows
    overhead_bytes = problem.budget_bytes - problem.effective_bytes
    device_bytes = overhead_bytes + math.ceil(rows.peak_bytes(0)) + PAGES_BYTES
    return Fit(
        tuple(allow),
        tuple(choice.index for choice in answer.program.variant_choices),
        float(rows.seconds()) / problem.runs,
        min(problem.budget_bytes, device_bytes),
        min(problem.ram_bytes, round_up(math.ceil(rows.peak_bytes("ram")), MIB)),
    )

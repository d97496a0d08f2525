"""Suggestions that make a plan faster if it fits but mostly waits for copies or the disk. Each is a
changed problem, which is solved.

Without changes of the output: all of the card, RAM for all weights, a session, weights stored in
the precision they are used in. With changes: permissions. `graphrun.solve.setting_suggestions` has
the options of stages, which need a dry run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from graphrun.model.choices import with_each_variant
from graphrun.model.least_memory import used_components
from graphrun.model.problem import Problem, Variant
from graphrun.model.solution import Solution
from graphrun.solve.suggestions import Proposal, Suggestion, best_first, permissions

LEAST_GAIN = 0.1  # minimum share of a run's time that a suggestion saves
SESSION = 8  # runs
GIB = 2**30


def speedups(problem: Problem, options: Iterable[Suggestion]) -> Iterator[Suggestion]:
    """Yield changes of ``problem``, then ``options``: suggestions of other stage options.

    All have the predicted seconds of one run.
    """
    for proposal in _proposals(problem):
        if (suggestion := proposal.verified()) is not None:
            runs = proposal.problems[0].runs
            yield replace(suggestion, seconds=suggestion.seconds / runs)
    yield from (
        replace(suggestion, seconds=suggestion.seconds / problem.runs) for suggestion in options
    )


def worthwhile(suggestions: Iterable[Suggestion], solution: Solution) -> tuple[Suggestion, ...]:
    """Return the ``suggestions`` that save at least LEAST_GAIN: first those without changes of the
    output, then by time."""
    limit_seconds = (1 - LEAST_GAIN) * solution.simulation.total_seconds / solution.problem.runs
    return best_first(item for item in suggestions if item.seconds <= limit_seconds)


def _proposals(problem: Problem) -> Iterator[Proposal]:
    capacity = problem.hardware.capacity_bytes
    if (
        problem.budget_bytes < capacity
        and problem.hardware.device != "sim"
        and not problem.secondaries
    ):
        text = "all of the machine's memory" if problem.hardware.unified else "all of the card"
        change = problem.budget_change(capacity)
        yield Proposal(text, (change,), (problem.with_budget(capacity),))
    if not problem.hardware.unified and (ram := _ample_ram(problem)) > problem.ram_bytes:
        ample = replace(problem, ram_bytes=ram)
        yield Proposal("RAM for all weights", (("--ram", str(ram)),), (ample,))
    if problem.runs == 1:
        text, session = f"per run, in a session of {SESSION} runs", replace(problem, runs=SESSION)
        yield Proposal(text, (("--runs", str(SESSION)),), (session,))
    files_text, files_option = "a checkpoint in the precision of use", ("--source", "FOLDER")
    if (stored_problem := _as_used(problem)) != problem:
        yield Proposal(files_text, (files_option,), (stored_problem,))
    for proposal in permissions(problem):
        yield proposal
        if (stored_problem := _as_used(proposal.problems[0])) != proposal.problems[0]:
            text, change_both = (
                f"{proposal.text}, with {files_text}",
                (*proposal.change, files_option),
            )
            yield Proposal(text, change_both, (stored_problem,), changes_output=True)


def _ample_ram(problem: Problem) -> int:
    """Return the RAM for the backing stores of all components, in bytes, rounded up to GiB.

    Each component in the first usable variant whose backing store is in RAM.
    """
    in_ram = [
        [v for v in (c.variants[n] for n in problem.usable(c)) if v.backing_store != "disk"]
        for c in used_components(problem)
    ]
    store_bytes = [
        variants[0].host_bytes + variants[0].transient_bytes for variants in in_ram if variants
    ]
    return -(-sum(store_bytes) // GIB) * GIB


def _as_used(problem: Problem) -> Problem:
    """Return ``problem`` with checkpoints already in the precision of use: only the bytes of the
    device weights are read, and no conversion is needed."""

    def stored(variant: Variant) -> Variant:
        if not variant.read_bytes or (variant.needs and variant.needs not in problem.allow):
            return variant
        read_seconds = tuple(
            nbytes / problem.hardware.disk_bytes_per_second for nbytes in variant.block_bytes
        )
        seconds = (
            {"disk_seconds": read_seconds}
            if variant.backing_store == "disk"
            else {"read_seconds": read_seconds}
        )
        return replace(variant, read_bytes=(), transient_bytes=0, **seconds)  # type: ignore[arg-type]

    return with_each_variant(problem, stored)

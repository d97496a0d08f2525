"""What would make a plan faster that fits and mostly waits for copies or the disk. Each is a change
of the problem, solved for.

Without changes of the output: all of the card, RAM for all weights, a session, weights stored as
they are used. With: what is not allowed. Options of stages, which need a dry run, are in
`graphrun.solve.remedies`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from graphrun.model.choices import with_each_variant
from graphrun.model.least_memory import used_components
from graphrun.model.problem import Problem, Variant
from graphrun.model.solution import Solution
from graphrun.solve.repairs import Repair, permissions, predicted_seconds

LEAST_GAIN = 0.1  # of a run's time that advice saves at least
SESSION = 8  # runs
GIB = 2**30


def advice(problem: Problem, options: Iterable[Repair]) -> Iterator[Repair]:
    """Changes of ``problem``, and those of its stages' ``options``, with the predicted seconds of
    one run."""
    for text, change, changed, changes_output in _proposals(problem):
        if (seconds := predicted_seconds(changed)) is not None:
            yield Repair(text, change, seconds / changed.runs, changes_output)
    yield from (replace(repair, seconds=repair.seconds / problem.runs) for repair in options)


def worthwhile(found: Iterable[Repair], solution: Solution) -> tuple[Repair, ...]:
    """Those of ``found`` that save enough, those without changes of the output first, then by
    time."""
    most = (1 - LEAST_GAIN) * solution.simulation.total_seconds / solution.problem.runs
    return tuple(
        sorted(
            (of for of in found if of.seconds <= most),
            key=lambda of: (of.changes_output, of.seconds),
        )
    )


_Proposal = tuple[str, tuple[tuple[str, str], ...], Problem, bool]


def _proposals(problem: Problem) -> Iterator[_Proposal]:
    capacity = problem.hardware.capacity_bytes
    if (
        problem.budget_bytes < capacity
        and problem.hardware.device != "sim"
        and not problem.secondaries
    ):
        yield (
            "all of the card",
            (("--vram", str(capacity)),),
            replace(problem, budget_bytes=capacity),
            False,
        )
    if (ram := _ample_ram(problem)) > problem.ram_bytes:
        yield "RAM for all weights", (("--ram", str(ram)),), replace(problem, ram_bytes=ram), False
    if problem.runs == 1:
        yield (
            f"a session of {SESSION} runs, each",
            (("--runs", str(SESSION)),),
            replace(problem, runs=SESSION),
            False,
        )
    files = "files with the weights as they are used", ("--source", "FOLDER")
    if (stored := _as_used(problem)) != problem:
        yield files[0], (files[1],), stored, False
    for proposal in permissions(problem):
        yield proposal.text, proposal.change, proposal.problems[0], True
        if (stored := _as_used(proposal.problems[0])) != proposal.problems[0]:
            yield f"{proposal.text}, with {files[0]}", (*proposal.change, files[1]), stored, True


def _ample_ram(problem: Problem) -> int:
    """RAM in which every component has a backing store in its first precision, in whole GiB."""
    in_ram = [
        [v for v in (c.variants[n] for n in problem.usable(c)) if v.backing_store != "disk"]
        for c in used_components(problem)
    ]
    held = [variants[0].host_bytes + variants[0].transient_bytes for variants in in_ram if variants]
    return -(-sum(held) // GIB) * GIB


def _as_used(problem: Problem) -> Problem:
    """``problem`` with files that hold every weight in the precision it may be used in: nothing
    more is read, nothing converted."""

    def stored(variant: Variant) -> Variant:
        if not variant.read_bytes or (variant.needs and variant.needs not in problem.allow):
            return variant
        read = tuple(
            nbytes / problem.hardware.disk_bytes_per_second for nbytes in variant.block_bytes
        )
        seconds = (
            {"disk_seconds": read} if variant.backing_store == "disk" else {"read_seconds": read}
        )
        return replace(variant, read_bytes=(), transient_bytes=0, **seconds)  # type: ignore[arg-type]

    return with_each_variant(problem, stored)

"""Commands for plans in a repository: ``check``, ``diff``, and the limits of ``plan``,
``--fail-over`` and ``--fail-peak``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphrun.cli.common import AsJson, app, say, show
from graphrun.cli.options import option
from graphrun.errors import PlanError
from graphrun.reading import read_json
from graphrun.report import plan_files as planfile
from graphrun.units import parse_seconds, parse_size, show_seconds, show_size

if TYPE_CHECKING:
    from graphrun.model.solution import Solution

SavedPlan = Annotated[Path, typer.Argument(help="A plan saved with -o.", show_default=False)]
FailOver = Annotated[
    str | None,
    option(
        "Exit with 1 if the predicted time (not its range) is longer: 60s, 2min.",
        "TIME",
        "--fail-over",
    ),
]
FailPeak = Annotated[
    str | None,
    option(
        "Exit with 1 if the plan's peak is higher, counted as for --vram: 7.5G.",
        "SIZE",
        "--fail-peak",
    ),
]


@app.command()
def check(
    plan: SavedPlan,
    as_json: AsJson = False,
) -> None:
    """Check a saved plan, without the solver.

    Lists every broken rule with its slot, action and bytes.
    """
    from graphrun.cluster import files
    from graphrun.report.screen import check_screen

    if files.is_placement(read_json(plan, PlanError)):
        placement = files.read(plan)[0]
        ok = (
            f"ok: {sum(len(assignment.devices) for assignment in placement.assignments)} "
            f"devices, {placement.items} items take {show_seconds(placement.seconds)}"
        )
        show({"ok": True, "violations": []}, as_json, ok)
        return
    try:
        solution = planfile.read_solution(plan)[0]
    except planfile.BrokenRules as error:
        if as_json:
            show(check_json(None, [asdict(violation) for violation in error.violations]), True, "")
        raise
    show(check_json(solution, []), as_json, check_screen(solution))


def check_json(solution: Solution | None, violations: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what ``check --json`` prints: violations, or the figures of a valid plan."""
    if solution is None:
        return {"ok": False, "violations": violations}
    slots, simulation = solution.plan.all_slots, solution.simulation
    return {
        "ok": True,
        "violations": violations,
        "slots": len(slots),
        "actions": sum(len(slot.actions) for slot in slots),
        "peak_bytes": simulation.peak_bytes,
        "effective_bytes": solution.problem.effective_bytes,
        "predicted_seconds": simulation.seconds,
    }


@app.command()
def diff(
    a: SavedPlan,
    b: Annotated[Path, typer.Argument(help="Another one.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Compare two saved plans.

    Shows differences in settings, seconds, peaks and placement of components.
    """
    from graphrun.report.comparison import compare, comparison_screen

    comparison = compare(*(planfile.read_solution(path)[0] for path in (a, b)))
    show(comparison, as_json, comparison_screen(comparison, a.name, b.name))


class FailLimits:
    """The limits of ``--fail-over`` and ``--fail-peak``. Raises InputError for an invalid one."""

    def __init__(self, time_limit: str | None, peak_limit: str | None) -> None:
        self._seconds = (
            None if time_limit is None else parse_seconds(time_limit, name="--fail-over")
        )
        self._nbytes = None if peak_limit is None else parse_size(peak_limit, name="--fail-peak")

    def check(self, solution: Solution) -> None:
        """Exit with code 1 if ``solution`` is over a limit, and print both numbers."""
        problem, simulation = solution.problem, solution.simulation
        # the part of a budget that is not for tensors: context, workspace and reserve
        overhead_bytes = (
            min(problem.budget_bytes, problem.hardware.capacity_bytes) - problem.effective_bytes
        )
        nbytes, excesses = simulation.peak_bytes + overhead_bytes, list[str]()
        if self._seconds is not None and simulation.seconds > self._seconds:
            excesses.append(
                f"--fail-over: predicted {show_seconds(simulation.seconds)} > "
                f"{show_seconds(self._seconds)}; graphrun explain shows where the time goes"
            )
        if self._nbytes is not None and nbytes > self._nbytes:
            excesses.append(f"--fail-peak: takes {show_size(nbytes)} > {show_size(self._nbytes)}")
        for line in excesses:
            say(f"graphrun: {line}")
        if excesses:
            raise typer.Exit(1)

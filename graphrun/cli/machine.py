"""More of the command line: comparing plans, looking at the machine. Joins `cli`'s app and prints as it does; nothing else may."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import graphrun
import graphrun.cli.interop  # noqa: F401  (a further command)
from graphrun.cli import app as cli
from graphrun.cli.app import AsJson
from graphrun.errors import InputError, PlanError
from graphrun.options import Asked, NoCache, shared
from graphrun.report import plan_files as planfile

if TYPE_CHECKING:
    from graphrun.model.problem import Problem
    from graphrun.model.solution import Solution
    from graphrun.solve.whatif.frontier import Point


@cli.app.command()
@shared
def frontier(
    graph: cli.OnlyGraph,
    asked: Asked,
    sweep: Annotated[
        str | None, typer.Option(help="Values of an input to try: height=512:2048:256.", metavar="NAME=FROM:TO:STEP")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curve to this file (SVG).", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Show predicted time against VRAM budget (--vram 4G:48G, 4G:48G:4G, or a single one), and with --sweep the largest value of an
    input that fits each budget."""
    from graphrun.report.frontier import frontier_json, frontier_screen, frontier_svg

    planfile.require_writable(plot)
    swept, name = _swept(graph, asked, sweep)
    problem = swept[0][0]
    rows = [(value, points) for _, value, points in swept]
    if plot is not None:
        planfile.write_text(plot, frontier_svg(problem, rows, name))
    typer.echo(json.dumps(frontier_json(problem, rows, name), indent=1) if as_json else frontier_screen(problem, rows, name))
    if not any(point.fits for _, points in rows for point in points):
        raise typer.Exit(3)


@cli.app.command()
def report(
    trace: Annotated[Path, typer.Argument(help="A trace saved with run --trace, or a plan saved with -o.", show_default=False)],
    out: Annotated[Path, typer.Option("-o", help="Where the page goes.")] = Path("report.html"),
) -> None:
    """Make one page (HTML, no network) of a run: its timeline, its plan, planned against measured, time against budget."""
    from graphrun.report.page import Measured, report_page
    from graphrun.solve.whatif.frontier import budgets_around
    from graphrun.solve.whatif.frontier import frontier as solve_all

    data = planfile.read_json(trace)
    traced = isinstance(data, dict) and "events" in data
    problem, plan, saved = planfile.plan_in(data.get("plan") if traced else data, trace)
    planfile.refuse_violations(trace, problem, plan)
    planfile.require_writable(out)
    try:
        measured = Measured.of(data) if traced else None
    except (KeyError, TypeError) as error:
        raise PlanError(f"is a damaged trace: {type(error).__name__} {error}", str(trace)) from error
    with cli._stdout_kept_clean():
        points = solve_all(problem, budgets_around(problem), _planner(cli._cache(False)))
    planfile.write_text(out, report_page(planfile.solution_of(problem, plan, saved), measured, points))
    typer.echo(f"wrote {out}")


@cli.app.command()
def doctor(no_cache: NoCache = False, as_json: AsJson = False) -> None:
    """Show what is here: device, driver, versions and what they allow or break, limits of memory, disk, cache."""
    from graphrun.profile.doctor import examine
    from graphrun.report.doctor import doctor_screen

    found = examine(cli._cache(no_cache))
    cli._show(found, as_json, doctor_screen(found))


@cli.app.command()
def calibrate(
    device: Annotated[
        str | None, typer.Option(help="cuda, sim or cpu; default: the card found, else cpu.", show_default=False)
    ] = None,
    name: Annotated[str, typer.Option(help="The profile's name; default: the device's.", show_default=False)] = "",
    seconds: Annotated[float, typer.Option(help="How long measuring may take.", min=0.1)] = 20.0,
    as_json: AsJson = False,
) -> None:
    """Measure this machine in under 30 s and keep a profile: used as --hardware NAME, and by default for the card it is of."""
    from graphrun.profile.calibrate import measure_and_keep
    from graphrun.report.calibrate import calibrate_screen

    if device not in (None, "cuda", "sim", "cpu"):
        raise InputError(f"device {device!r} cannot be calibrated; it is cuda, sim or cpu")
    found = measure_and_keep(device, cli._cache(False) or Path(), name, seconds)  # type: ignore[arg-type]
    cli._show(found, as_json, calibrate_screen(found))


def _swept(path: Path, asked: Asked, sweep: str | None) -> tuple[list[tuple[Problem, str, tuple[Point, ...]]], str]:
    """Problem, value and points for each value of the swept input (one dry run each; one in all where none is swept), its name."""
    from graphrun.solve.whatif.frontier import frontier as solve_all
    from graphrun.solve.whatif.frontier import sizes_between, values_between

    if path.suffix == ".json":
        raise InputError(f"{path} is a plan; a frontier is of a graph (YAML)")
    name, values = values_between(sweep) if sweep is not None else ("", ())
    if asked.vram is None:
        raise InputError("a frontier needs budgets: add --vram, such as --vram 4G:48G")
    inputs, cache = asked.inputs, cli._cache(asked.no_cache)
    graph = cli.load(path, asked)
    tried = [(str(value), {**inputs, name: str(value)}) for value in values] or [("", inputs)]
    for _, given in tried:
        graph.for_planning(given)  # a value that the graph refuses is better said now than after minutes
    place = cli._hardware(asked.hardware, asked.device, False, cache)
    budgets = sizes_between(asked.vram, whole_bytes=place.capacity_bytes if place.device != "sim" else None)
    found = []
    for value, given in tried:
        if name:
            typer.echo(f"  {name}={value}", err=True)
        problem = graphrun.estimate(graph, vram=budgets[0], hardware=place, inputs=given, cache=cache, **asked.demands)
        with cli._stdout_kept_clean():
            found.append((problem, value, solve_all(problem, budgets, _planner(cache))))
    return found, name


def _planner(cache: Path | None) -> Callable[[Problem], Solution | None]:
    """What finds plans, and keeps them in ``cache``."""
    from graphrun.files import Store
    from graphrun.store import fitting_for

    store = Store(cache) if cache is not None else None
    return lambda problem: fitting_for(problem, store)

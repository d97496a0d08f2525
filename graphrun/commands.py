"""More of the command line: comparing plans, looking at the machine. Joins `cli`'s app and prints as it does; nothing else may."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import graphrun
from graphrun import cli
from graphrun.cli import AsJson, DeviceName, Exclude, HardwareName, Keep, NoCache, Ram, Reserve, Sets, Until
from graphrun.errors import InputError
from graphrun.report import planfile

if TYPE_CHECKING:
    from graphrun.planner.frontier import Point
    from graphrun.planner.problem import Problem

Budgets = Annotated[str, typer.Option(help="VRAM budgets: 4G:48G, 4G:48G:4G, or a single one.", show_default=False)]


@cli.app.command()
def frontier(
    graph: Annotated[Path, typer.Argument(help="A graph (YAML).", show_default=False)],
    vram: Budgets,
    ram: Ram = "auto",
    hardware: HardwareName = None,
    device: DeviceName = None,
    set_: Sets = None,
    keep: Keep = None,
    exclude: Exclude = None,
    reserve: Reserve = None,
    until: Until = None,
    sweep: Annotated[
        str | None, typer.Option(help="Values of an input to try: height=512:2048:256.", metavar="NAME=FROM:TO:STEP")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curve to this file (SVG).", show_default=False)] = None,
    no_cache: NoCache = False,
    as_json: AsJson = False,
) -> None:
    """Show predicted time against VRAM budget, and with --sweep the largest value of an input that fits each budget."""
    from graphrun.report.frontier import frontier_json, frontier_screen, frontier_svg

    planfile.require_writable(plot)
    demands = {**cli._demands(keep, exclude, reserve, until), "cache": cli._cache(no_cache)}
    swept, name = _swept(graph, vram, ram, hardware, device, set_, demands, sweep)
    problem = swept[0][0]
    rows = [(value, points) for _, value, points in swept]
    if plot is not None:
        planfile.write_text(plot, frontier_svg(problem, rows, name))
    typer.echo(json.dumps(frontier_json(problem, rows, name), indent=1) if as_json else frontier_screen(problem, rows, name))
    if not any(point.fits for _, points in rows for point in points):
        raise typer.Exit(3)


@cli.app.command()
def doctor(no_cache: NoCache = False, as_json: AsJson = False) -> None:
    """Show what is here: device, driver, versions and what they allow or break, limits of memory, disk, cache."""
    from graphrun.estimator.doctor import examine
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
    from graphrun.estimator.calibrate import measure_and_keep
    from graphrun.report.calibrate import calibrate_screen

    if device not in (None, "cuda", "sim", "cpu"):
        raise InputError(f"device {device!r} cannot be calibrated; it is cuda, sim or cpu")
    found = measure_and_keep(device, cli._cache(False) or Path(), name, seconds)  # type: ignore[arg-type]
    cli._show(found, as_json, calibrate_screen(found))


def _swept(
    path: Path,
    vram: str,
    ram: str,
    hardware: str | None,
    device: str | None,
    sets: list[str] | None,
    demands: dict[str, Any],
    sweep: str | None,
) -> tuple[list[tuple[Problem, str, tuple[Point, ...]]], str]:
    """Problem, value and points for each value of the swept input (one dry run each; one in all where none is swept), its name."""
    from graphrun.planner.frontier import frontier as solve_all
    from graphrun.planner.frontier import sizes_between, values_between

    if path.suffix == ".json":
        raise InputError(f"{path} is a plan; a frontier is of a graph (YAML)")
    name, values = values_between(sweep) if sweep is not None else ("", ())
    inputs = cli._inputs(sets)
    graph = cli._load(path, demands["until"])
    tried = [(str(value), {**inputs, name: str(value)}) for value in values] or [("", inputs)]
    for _, given in tried:
        graph.for_planning(given)  # a value that the graph refuses is better said now than after minutes
    place = cli._hardware(hardware, device, False, demands["cache"])
    budgets = sizes_between(vram, whole_bytes=place.capacity_bytes if place.device != "sim" else None)
    found = []
    for value, given in tried:
        if name:
            typer.echo(f"  {name}={value}", err=True)
        problem = graphrun.estimate(graph, vram=budgets[0], ram=ram, hardware=place, inputs=given, **demands)
        with cli._stdout_kept_clean():
            found.append((problem, value, solve_all(problem, budgets)))
    return found, name

"""More of the command line: commands that compare plans. They join `cli`'s app, and print as it does; nothing else may."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import graphrun
from graphrun import cli
from graphrun.cli import AsJson, DeviceName, Exclude, HardwareName, Keep, Ram, Reserve, Sets, Until
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
    as_json: AsJson = False,
) -> None:
    """Show predicted time against VRAM budget, and with --sweep the largest value of an input that fits each budget."""
    from graphrun.report.frontier import frontier_json, frontier_screen, frontier_svg

    planfile.require_writable(plot)
    swept, name = _swept(graph, vram, ram, hardware, device, set_, cli._demands(keep, exclude, reserve, until), sweep)
    problem = swept[0][0]
    rows = [(value, points) for _, value, points in swept]
    if plot is not None:
        planfile.write_text(plot, frontier_svg(problem, rows, name))
    typer.echo(json.dumps(frontier_json(problem, rows, name), indent=1) if as_json else frontier_screen(problem, rows, name))
    if not any(point.fits for _, points in rows for point in points):
        raise typer.Exit(3)


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
    place = cli._hardware(hardware, device, to_run=False)
    budgets = sizes_between(vram, whole_bytes=place.capacity_bytes if place.device != "sim" else None)
    found = []
    for value, given in tried:
        if name:
            typer.echo(f"  {name}={value}", err=True)
        problem = graphrun.estimate(graph, vram=budgets[0], ram=ram, hardware=place, inputs=given, **demands)
        with cli._stdout_kept_clean():
            found.append((problem, value, solve_all(problem, budgets)))
    return found, name

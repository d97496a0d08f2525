"""The commands ``plan``, ``explain``, ``check``, ``estimate``, ``frontier``, ``report`` and ``schema``. None runs a graph."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphrun import api
from graphrun.cli.common import (
    AsJson,
    GraphFile,
    OnlyGraph,
    Planned,
    app,
    cache_folder,
    hardware_for,
    load,
    native_stdout_to_stderr,
    plan_screen_of,
    planned,
    show,
    summary_of,
)
from graphrun.cli.options import Asked, DeviceName, HardwareName, NoCache, Reuse, Sets, Trust, shared
from graphrun.errors import InputError, PlanError
from graphrun.report import plan_files as planfile

if TYPE_CHECKING:
    from graphrun.model.problem import Problem
    from graphrun.model.solution import Solution
    from graphrun.solve.frontier import Point


@app.command()
@shared
def plan(
    graph: GraphFile,
    asked: Asked,
    out: Annotated[Path | None, typer.Option("-o", help="Save the plan to this file.", show_default=False)] = None,
    reuse: Reuse = "none",
    as_json: AsJson = False,
) -> None:
    """Plan a graph within a VRAM and a RAM budget, and show the plan. Needs no weights and no GPU."""
    made = planned(graph, asked, reuse=reuse)
    summary = summary_of(made)
    if out is not None:
        planfile.save(out, made.source, made.solution, summary)
    show(summary, as_json, plan_screen_of(made))


@app.command()
@shared
def explain(
    graph: GraphFile,
    asked: Asked,
    component: Annotated[
        str | None, typer.Argument(help="Show the cost of other placements of this component.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show every slot of a plan: actions, bytes, seconds. With COMPONENT: why it is placed as it is, and what others would cost."""
    from graphrun.report.screen import explain_screen

    made = planned(graph, asked)
    if component is not None:
        data, screen = _alternatives(made, component)
        show(data, as_json, screen)
    else:
        show(summary_of(made), as_json, explain_screen(made.solution))


@app.command()
def check(
    plan: Annotated[Path, typer.Argument(help="A plan saved with -o.", show_default=False)],
) -> None:
    """Check a saved plan: every rule that it breaks, with slot, action and bytes."""
    from graphrun.report.screen import check_screen
    from graphrun.verify.simulate import simulate

    problem, candidate, _ = planfile.read(plan)
    planfile.refuse_violations(plan, problem, candidate)
    typer.echo(check_screen(problem, candidate, simulate(problem, candidate)))


@app.command()
def estimate(
    graph: OnlyGraph,
    hardware: HardwareName = None,
    device: DeviceName = None,
    set_: Sets = None,
    trust_package: Trust = None,
    as_json: AsJson = False,
    no_cache: NoCache = False,
) -> None:
    """Show what a graph needs, without a budget: weights, activations, values, FLOPs, seconds. Needs no weights and no GPU."""
    from graphrun.report.estimate_screen import estimate_screen

    asked = Asked(hardware=hardware, device=device, set_=set_, trust_package=trust_package)
    loaded, cache = load(graph, asked), cache_folder(no_cache)
    found = api.survey(loaded, hardware=hardware_for(hardware, device, False, cache), inputs=asked.inputs, cache=cache)
    show(found, as_json, estimate_screen(found))


@app.command()
@shared
def frontier(
    graph: OnlyGraph,
    asked: Asked,
    sweep: Annotated[
        str | None, typer.Option(help="Values of an input to try: height=512:2048:256.", metavar="NAME=FROM:TO:STEP")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curve to this file (SVG).", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Show predicted time against VRAM budget (--vram 4G:48G, 4G:48G:4G, or a single one), and with --sweep the largest value of an
    input that fits each budget."""
    from graphrun.report.whatif_screens import frontier_json, frontier_screen, frontier_svg

    planfile.require_writable(plot)
    swept, name = _swept(graph, asked, sweep)
    problem = swept[0][0]
    rows = [(value, points) for _, value, points in swept]
    if plot is not None:
        planfile.write_text(plot, frontier_svg(problem, rows, name))
    typer.echo(json.dumps(frontier_json(problem, rows, name), indent=1) if as_json else frontier_screen(problem, rows, name))
    if not any(point.fits for _, points in rows for point in points):
        raise typer.Exit(3)


@app.command()
def report(
    trace: Annotated[Path, typer.Argument(help="A trace saved with run --trace, or a plan saved with -o.", show_default=False)],
    out: Annotated[Path, typer.Option("-o", help="The HTML file.")] = Path("report.html"),
) -> None:
    """Write a self-contained HTML page about a run: timeline, plan, planned and measured numbers, time against budget."""
    from graphrun.report.page import measured_in, report_page
    from graphrun.solve.frontier import budgets_around
    from graphrun.solve.frontier import frontier as solve_all

    data = planfile.read_json(trace)
    traced = isinstance(data, dict) and "events" in data
    problem, plan, saved = planfile.plan_in(data.get("plan") if traced else data, trace)
    planfile.refuse_violations(trace, problem, plan)
    planfile.require_writable(out)
    try:
        measured = measured_in(data) if traced else None
    except (KeyError, TypeError) as error:
        raise PlanError(f"is a damaged trace: {type(error).__name__} {error}", str(trace)) from error
    with native_stdout_to_stderr():
        points = solve_all(problem, budgets_around(problem), _planner(cache_folder(False)))
    planfile.write_text(out, report_page(planfile.solution_of(problem, plan, saved), measured, points))
    typer.echo(f"wrote {out}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of graph files, for editors."""
    from graphrun.graph.schema import schema_text

    typer.echo(schema_text(), nl=False)


def _alternatives(made: Planned, component: str) -> tuple[dict[str, Any], str]:
    from graphrun.report.whatif_screens import alternatives_json, alternatives_screen
    from graphrun.solve.alternatives import alternatives

    with native_stdout_to_stderr():
        found = alternatives(made.solution, component)
    return alternatives_json(made.solution, component, found), alternatives_screen(made.solution, component, found)


def _swept(path: Path, asked: Asked, sweep: str | None) -> tuple[list[tuple[Problem, str, tuple[Point, ...]]], str]:
    """(problem, value, points) for each value of the swept input, and the input's name.

    Each value needs a dry run of its own. Without ``sweep`` there is one entry, with the value "".
    """
    from graphrun.solve.frontier import frontier as solve_all
    from graphrun.solve.frontier import sizes_between, values_between

    if path.suffix == ".json":
        raise InputError(f"{path} is a plan; frontier needs a graph (YAML)")
    name, values = values_between(sweep) if sweep is not None else ("", ())
    if asked.vram is None:
        raise InputError("a frontier needs budgets: add --vram, such as --vram 4G:48G")
    inputs, cache = asked.inputs, cache_folder(asked.no_cache)
    graph = load(path, asked)
    swept = [(str(value), {**inputs, name: str(value)}) for value in values] or [("", inputs)]
    for _, own in swept:
        graph.for_planning(own)  # refuse bad values before minutes of planning
    hardware = hardware_for(asked.hardware, asked.device, False, cache)
    budgets = sizes_between(asked.vram, whole_bytes=hardware.capacity_bytes if hardware.device != "sim" else None)
    found = []
    for value, own in swept:
        if name:
            typer.echo(f"  {name}={value}", err=True)
        problem = api.estimate(graph, vram=budgets[0], hardware=hardware, inputs=own, cache=cache, **asked.estimate_arguments)
        with native_stdout_to_stderr():
            found.append((problem, value, solve_all(problem, budgets, _planner(cache))))
    return found, name


def _planner(cache: Path | None) -> Callable[[Problem], Solution | None]:
    """A function that returns the best plan for a problem, or None, and caches it in ``cache``."""
    from graphrun.files import Store
    from graphrun.store import fitting_for

    store = Store(cache) if cache is not None else None
    return lambda problem: fitting_for(problem, store)

"""The commands ``compare``, ``export`` and ``map``: other engines, plans for them, and device maps
as plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphrun import api
from graphrun.cli.common import (
    AsJson,
    OnlyGraph,
    app,
    cache_folder,
    say,
    show,
    solving,
    write_or_print,
)
from graphrun.cli.options import NoCache, PlanFile, PlanOptions, TextFile, Trust, shared
from graphrun.cli.planning import GraphPlanner, open_graph
from graphrun.cli.terminal import alive, width
from graphrun.errors import InputError, PlanError
from graphrun.reading import read_json
from graphrun.report import plan_files as planfile

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph
    from graphrun.model.solution import Solution
    from graphrun.profile.engines import Engine


Engines = Annotated[
    str,
    typer.Option(
        "--engines",
        help="Engines to compare: all, or names joined by commas.",
        metavar="NAMES",
    ),
]


@app.command()
@shared(
    "vram",
    "ram",
    "pinned",
    "hardware",
    "device",
    "set_",
    "keep",
    "exclude",
    "reserve",
    "trust_package",
    "source",
    "dtype",
    "no_cache",
)
def compare(
    graph: OnlyGraph, options: PlanOptions, engines: Engines = "all", as_json: AsJson = False
) -> None:
    """Compare graphrun with other engines within a budget.

    Shows seconds of a warm run and peak of each engine's best setting, by
    simulation, and what to type. Needs no weights and no GPU.
    """
    from graphrun.comparing import EngineComparison, engines_called
    from graphrun.report.engines_screen import compare_screen

    chosen_engines = engines_called(engines.split(","))
    options = replace(options, runs=api.RUNS)
    graph_plan = GraphPlanner(options).plan(open_graph(graph, options))
    with solving(), alive(f"other engines for {graph_plan.graph.name}"):
        comparison = EngineComparison(
            graph_plan.graph, graph_plan.solution, cache_folder(options.no_cache)
        )
        rows = [comparison.row(engine, comparison.best(engine)) for engine in chosen_engines]
    summary = comparison.summary(rows)
    show(summary, as_json, compare_screen(summary, width()))


@app.command()
def export(
    plan: Annotated[Path, typer.Argument(help="Plan saved with -o.", show_default=False)],
    name: Annotated[
        str,
        typer.Option(
            "--to",
            "--as",
            help="diffusers (a Python script), accelerate (device maps as JSON; with -o FILE.py a "
            "script), sglang, vllm-omni, sd.cpp or comfyui (a command line), or an installed "
            "package's exporter.",
            metavar="ENGINE",
        ),
    ],
    output_file: TextFile = None,
    trust_package: Trust = None,
    no_cache: NoCache = False,
) -> None:
    """Translate a plan for another engine.

    The nearest equivalent: stderr says what is lost, and what that costs by
    simulation.
    """
    from graphrun.comparing import engines_called, exporter_called
    from graphrun.profile.engines import ENGINES
    from graphrun.report.engines_screen import export_lines

    if name == "all":
        raise InputError(
            f"--to all: a plan is exported to one engine: {', '.join(ENGINES)}; graphrun compare "
            "shows all"
        )
    exporter = exporter_called(name)
    engines = engines_called([name]) if exporter is None else []
    solution, entries = planfile.read_solution(plan)
    problem, source = solution.problem, planfile.graph_path(plan, entries)
    graph = api.load(source, trust=trust_package or (), absent=problem.absent)
    graph = graph.in_dtypes(dict(problem.dtypes))
    graph = graph.until(problem.until)
    if graph.digest != problem.graph_digest:
        raise PlanError(
            f"is for another version of {source}: plan again: graphrun plan {source} -o {plan}",
            str(plan),
        )
    if exporter is not None:
        text, summary = exporter(graph, solution), None
    else:
        with solving():
            text, summary = _exported(
                engines[0], graph, solution, output_file, cache_folder(no_cache)
            )
    write_or_print(text, output_file)
    for line in export_lines(summary) if summary is not None else []:
        say(line)


def _exported(
    engine: Engine,
    graph: Graph,
    solution: Solution,
    output_file: Path | None,
    cache: Path | None,
) -> tuple[str, dict[str, Any] | None]:
    """Return the text for ``engine``, and the comparison with it; None for a plan of a CPU, whose
    placements are not simulated."""
    from graphrun.comparing import EngineComparison
    from graphrun.diffusers_.device_map import device_maps, maps_of, placements_of
    from graphrun.diffusers_.script import accelerate_script, diffusers_script, script_placements

    text = diffusers_script(graph, solution) if engine.name == "diffusers" else ""
    maps = device_maps(graph, solution) if engine.name == "accelerate" else {}
    random = [item.name for item in graph.components.values() if item.source is None]
    if random and not text and not maps:
        raise InputError(
            f"{', '.join(random)}: random weights are graphrun's own; to export its plan, give "
            "the graph file a source: (docs/sources.md)"
        )
    comparison = None
    if not solution.problem.hardware.unified or not (text or maps):
        comparison = EngineComparison(graph, solution, cache)
    setting = None
    if comparison is not None:
        dry_run = comparison.scene.dry_run
        if text:
            setting = comparison.setting(script_placements(graph, solution))
        elif maps:
            placements, best = placements_of(dry_run, maps), comparison.best(engine)
            setting = comparison.setting(placements) if placements else None
            if setting is None or (best.fits and not setting.fits):
                setting, maps = best, maps_of(graph, dry_run, best.placements)
        else:
            setting = comparison.best(engine)
    if maps and output_file is not None and output_file.suffix == ".py":
        text = accelerate_script(graph, solution, maps)
    elif maps:
        text = json.dumps(maps, indent=1) + "\n"
    if comparison is None or setting is None:
        return text, None
    row = comparison.row(engine, setting)
    return text or f"{row['command']}\n", comparison.summary([row])


@app.command("map")
def map_(
    plan: Annotated[
        Path,
        typer.Argument(help="Plan saved with -o. Its graph and budgets apply.", show_default=False),
    ],
    maps: Annotated[
        Path,
        typer.Argument(
            help="Device maps by component (JSON), as export --as accelerate writes them."
        ),
    ],
    output_file: PlanFile = None,
    as_json: AsJson = False,
) -> None:
    """Show memory and time of accelerate's device maps, as a plan.

    Refused if the plan does not fit the budgets.
    """
    from graphrun.diffusers_.device_map import plan_for
    from graphrun.report.screen import plan_screen
    from graphrun.report.summary import summarize

    problem, _, entries = planfile.read(plan)
    solution = plan_for(problem, _maps_in(maps))
    planfile.refuse_violations(maps, solution.problem, solution.plan)
    summary = summarize(solution, None)
    if output_file is not None:
        planfile.save(output_file, planfile.graph_path(plan, entries), solution, summary)
    show(summary, as_json, plan_screen(solution))


def _maps_in(path: Path) -> dict[str, dict[str, int | str]]:
    """Return the device maps in the file at ``path``. Raises InputError for other content."""
    maps = read_json(path, PlanError)
    # `hf_device_map` of a pipeline loaded with device_map="balanced" has a device per component
    if isinstance(maps, dict):
        maps = {
            name: {"": value} if isinstance(value, int | str) else value
            for name, value in maps.items()
        }
    inner = list(maps.values()) if isinstance(maps, dict) else [None]
    if not all(
        isinstance(device_map, dict)
        and all(isinstance(device, int | str) for device in device_map.values())
        for device_map in inner
    ):
        raise InputError(
            f'{path}: has no device maps by component, such as {{"transformer": '
            f'{{"transformer_blocks": "cpu", "": 0}}}}'
        )
    return maps  # type: ignore[no-any-return]

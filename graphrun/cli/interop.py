"""The commands ``export`` and ``map``: plans to diffusers calls and device maps, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from graphrun import api
from graphrun.cli.common import AsJson, app, show, write_or_print
from graphrun.cli.options import Trust
from graphrun.errors import InputError, PlanError
from graphrun.reading import read_json
from graphrun.report import plan_files as planfile


@app.command()
def export(
    plan: Annotated[Path, typer.Argument(help="Plan saved with -o.", show_default=False)],
    kind: Annotated[
        str,
        typer.Option(
            "--as",
            help="diffusers (a Python script) or accelerate (device maps as JSON).",
            metavar="FORMAT",
        ),
    ],
    output_file: Annotated[
        Path | None,
        typer.Option(
            "-o", help="Output file. Default: stdout.", metavar="FILE", show_default=False
        ),
    ] = None,
    trust_package: Trust = None,
) -> None:
    """Translate a plan to diffusers calls or accelerate device maps.

    The nearest equivalent: comments say what is lost.
    """
    solution, entries = planfile.read_solution(plan)
    problem, source = solution.problem, planfile.graph_path(plan, entries)
    graph = api.load(source, trust=trust_package or ()).in_dtypes(dict(problem.dtypes))
    graph = graph.until(problem.until)
    if graph.digest != problem.graph_digest:
        raise PlanError(f"is for an earlier version of {source}: plan again", str(plan))
    if kind == "diffusers":
        from graphrun.diffusers_.script import diffusers_script

        text = diffusers_script(graph, solution)
    elif kind == "accelerate":
        from graphrun.diffusers_.device_map import device_maps

        text = json.dumps(device_maps(graph, solution), indent=1) + "\n"
    else:
        raise InputError(f"--as {kind!r} is not known; it is diffusers or accelerate")
    write_or_print(text, output_file)


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
    output_file: Annotated[
        Path | None,
        typer.Option("-o", help="Save the plan to this file.", metavar="FILE", show_default=False),
    ] = None,
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

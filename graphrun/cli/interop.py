"""The commands ``export`` and ``map``: plans to and from diffusers calls and accelerate device
maps."""

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
    plan: Annotated[Path, typer.Argument(help="A plan saved with -o.", show_default=False)],
    kind: Annotated[
        str,
        typer.Option(
            "--as", help="diffusers (a script of plain calls) or accelerate (device maps, JSON)."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", help="The output file; default: stdout.", show_default=False),
    ] = None,
    trust_package: Trust = None,
) -> None:
    """Translate a plan to diffusers calls or accelerate device maps, as nearly as possible;
    comments say what is lost."""
    solution, saved = planfile.read_solution(plan)
    problem, source = solution.problem, planfile.graph_path(plan, saved)
    graph = api.load(source, trust=trust_package or ()).until(problem.until)
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
    write_or_print(text, out)


@app.command("map")
def map_(
    plan: Annotated[
        Path,
        typer.Argument(
            help="A plan saved with -o: its graph and budgets apply.", show_default=False
        ),
    ],
    maps: Annotated[
        Path,
        typer.Argument(
            help="Device maps by component, JSON, as export --as accelerate writes them."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("-o", help="Save the plan to this file.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the plan that accelerate's device maps amount to, with its memory and time. Refused
    where it does not fit."""
    from graphrun.diffusers_.device_map import plan_for
    from graphrun.report.screen import plan_screen
    from graphrun.report.summary import summarize

    problem, _, saved = planfile.read(plan)
    solution = plan_for(problem, _maps_in(maps))
    planfile.refuse_violations(maps, solution.problem, solution.plan)
    summary = summarize(solution, None)
    if out is not None:
        planfile.save(out, planfile.graph_path(plan, saved), solution, summary)
    show(summary, as_json, plan_screen(solution))


def _maps_in(path: Path) -> dict[str, dict[str, int | str]]:
    """The device maps in the file at ``path``. Raises InputError where it holds something else."""
    found = read_json(path, PlanError)
    if isinstance(
        found, dict
    ):  # `hf_device_map` of a pipeline loaded with device_map="balanced" has a device per component
        found = {name: {"": at} if isinstance(at, int | str) else at for name, at in found.items()}
    inner = list(found.values()) if isinstance(found, dict) else [None]
    if not all(
        isinstance(each, dict) and all(isinstance(at, int | str) for at in each.values())
        for each in inner
    ):
        raise InputError(
            f'{path}: does not hold device maps by component, such as {{"transformer": {{"transformer_blocks": "cpu", "": 0}}}}'
        )
    return found  # type: ignore[no-any-return]

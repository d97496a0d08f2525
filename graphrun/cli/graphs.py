"""The command that draws a graph: ``graph``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from graphrun import api
from graphrun.cli.common import OnlyGraph, app, cache_folder, hardware_for, load, say
from graphrun.cli.options import Asked, DeviceName, HardwareName, NoCache, Sets, Trust
from graphrun.errors import GraphrunError, InputError
from graphrun.report import plan_files as planfile

KINDS = ("mermaid", "dot", "svg")


@app.command()
def graph(
    graph: OnlyGraph,
    kind: Annotated[str, typer.Option("--as", help="mermaid or dot (text), or svg (a picture).")],
    out: Annotated[Path | None, typer.Option("-o", help="Where it goes; default: the screen.", show_default=False)] = None,
    hardware: HardwareName = None,
    device: DeviceName = None,
    set_: Sets = None,
    trust_package: Trust = None,
    no_cache: NoCache = False,
) -> None:
    """Draw a graph: its stages, the components they use, the values between them, with bytes as in estimate. No weights, no GPU."""
    if kind not in KINDS:
        raise InputError(f"--as {kind!r} is not known; it is mermaid, dot or svg")
    asked = Asked(hardware=hardware, device=device, set_=set_, trust_package=trust_package)
    loaded, cache = load(graph, asked), cache_folder(no_cache)
    planfile.require_writable(out)
    estimate = _estimate(loaded, asked, hardware_for(hardware, device, False, cache), cache)
    text = _drawing(loaded, kind, estimate)
    if out is None:
        typer.echo(text, nl=False)
    else:
        planfile.write_text(out, text)
        typer.echo(f"wrote {out}")


def _estimate(graph: Any, asked: Asked, hardware: Any, cache: Path | None) -> dict[str, Any] | None:
    """What ``graph`` takes; None where no dry run can be made, which is said. Raises InputError for the inputs given."""
    inputs = asked.inputs
    if inputs:
        graph.for_planning(inputs)
    try:
        return api.survey(graph, hardware=hardware, inputs=inputs, cache=cache)
    except Exception as error:  # noqa: BLE001  (whatever the pipeline's own code raises: a graph can be drawn without it)
        what = str(error) if isinstance(error, GraphrunError) else f"{type(error).__name__}: {error}"
        say(f"graphrun: drawn without bytes, since there is no dry run: {what}")
        return None


def _drawing(graph: Any, kind: str, estimate: dict[str, Any] | None) -> str:
    from graphrun.report.graph_svg import graph_svg
    from graphrun.report.graph_text import dot, drawn, mermaid

    shown = drawn(graph.to_networkx(estimate))
    if kind == "svg":
        return graph_svg(shown, _note(estimate))
    return mermaid(shown) if kind == "mermaid" else dot(shown)


def _note(estimate: dict[str, Any] | None) -> str:
    if estimate is None:
        return "sizes are not known"
    settings = " ".join(f"{name}={value}" for name, value in estimate["settings"].items())
    return f"{estimate['hardware']['name']}  {settings}"

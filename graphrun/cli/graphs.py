"""The command that draws a graph: ``graph``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphrun import api
from graphrun.cli.common import OnlyGraph, app, cache_folder, hardware_for, load, say, write_or_print
from graphrun.cli.options import Asked, shared
from graphrun.errors import GraphrunError, InputError
from graphrun.report import plan_files as planfile

KINDS = ("mermaid", "dot", "svg")


@app.command()
@shared("hardware", "device", "set_", "trust_package", "source", "no_cache")
def graph(
    graph: OnlyGraph,
    asked: Asked,
    kind: Annotated[str, typer.Option("--as", help="mermaid or dot (text), or svg (a picture).")],
    out: Annotated[Path | None, typer.Option("-o", help="Where it goes; default: the screen.", show_default=False)] = None,
) -> None:
    """Draw a graph: its stages, the components they use, the values between them, with bytes as in estimate. No weights, no GPU."""
    from graphrun.report.graph_svg import graph_svg
    from graphrun.report.graph_text import dot, drawn, mermaid

    if kind not in KINDS:
        raise InputError(f"--as {kind!r} is not known; it is mermaid, dot or svg")
    loaded, cache, inputs = load(graph, asked), cache_folder(asked.no_cache), asked.inputs
    planfile.require_writable(out)
    hardware = hardware_for(asked.hardware, asked.device, False, cache)
    if inputs:
        loaded.for_planning(inputs)
    estimate, note = None, "sizes are not known"
    try:
        estimate = api.survey(loaded, hardware=hardware, inputs=inputs, cache=cache)
        note = "  ".join((hardware.name, " ".join(f"{name}={value}" for name, value in estimate["settings"].items())))
    except Exception as error:  # noqa: BLE001  (whatever the pipeline's own code raises: a graph can be drawn without it)
        what = str(error) if isinstance(error, GraphrunError) else f"{type(error).__name__}: {error}"
        say(f"graphrun: drawn without bytes, since there is no dry run: {what}")
    shown = drawn(loaded.to_networkx(estimate))
    write_or_print(graph_svg(shown, note) if kind == "svg" else mermaid(shown) if kind == "mermaid" else dot(shown), out)

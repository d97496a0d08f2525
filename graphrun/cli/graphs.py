"""The commands ``graph``, which draws a graph, and ``list``, which lists graphrun's own graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from graphrun import api
from graphrun.cli.common import (
    AsJson,
    OnlyGraph,
    app,
    cache_folder,
    load,
    say,
    show,
    write_or_print,
)
from graphrun.cli.fitting import (
    Card,
    RamOf,
    budget_notes,
    card_called,
    choices_for,
    ram_for_weights,
)
from graphrun.cli.options import NoCache, PlanOptions, TextFile, option, shared
from graphrun.cli.terminal import width
from graphrun.devices import hardware_for
from graphrun.errors import GraphrunError, InputError
from graphrun.graph.shipped import graph_file, graphs_folder, shipped_graphs
from graphrun.report import plan_files as planfile
from graphrun.report.table import table

# in the folder of graphs: benchmarks/graph_table.py's measurements of each graph
FIGURES = "figures.json"


@app.command()
@shared("hardware", "device", "set_", "trust_package", "source", "dtype", "no_cache")
def graph(
    graph: OnlyGraph,
    options: PlanOptions,
    kind: Annotated[str, typer.Option("--as", help="mermaid or dot.", metavar="FORMAT")],
    output_file: TextFile = None,
) -> None:
    """Draw a graph: stages, components, and values with their bytes.

    Needs no weights and no GPU.
    """
    from graphrun.report.graph_text import dot, drawing_graph, mermaid

    draw = {"mermaid": mermaid, "dot": dot}.get(kind)
    if draw is None:
        raise InputError(f"--as {kind!r} is not known; use mermaid or dot")
    pipeline_graph, cache = load(graph, options), cache_folder(options.no_cache)
    planfile.require_writable(output_file)
    hardware = hardware_for(options.hardware, options.device, cache)
    if inputs := options.inputs:
        pipeline_graph.for_planning(inputs)
    estimate = None
    try:
        estimate = api.survey(pipeline_graph, hardware=hardware, inputs=inputs, cache=cache)
    # the pipeline's own code may raise anything; a graph can be drawn without the dry run
    except Exception as error:  # noqa: BLE001
        reason = (
            str(error) if isinstance(error, GraphrunError) else f"{type(error).__name__}: {error}"
        )
        say(f"graphrun: drawn without bytes, since there is no dry run: {reason}")
    write_or_print(draw(drawing_graph(pipeline_graph.to_networkx(estimate))), output_file)


@app.command("list")
def list_graphs(
    card: Card = None,
    ram: RamOf = "auto",
    vram: Annotated[
        str | None,
        option("With --card: VRAM budget. Default: all of the card.", "SIZE", "--vram"),
    ] = None,
    no_cache: NoCache = False,
    as_json: AsJson = False,
) -> None:
    """List graphrun's graphs.

    Shows parameters, the smallest of 8, 12, 16 and 24 GiB that is enough,
    seconds on an RTX 4090 with that much, and the license of the weights. With
    --card and --ram: the best format on that machine, as in fit.
    """
    from graphrun.graph.document import read_document, read_json

    if card is not None:
        _list_fits(card, ram, vram, cache_folder(no_cache), as_json)
        return
    figures, rows = read_json(graphs_folder() / FIGURES), []
    for name in shipped_graphs():
        data = read_document(graph_file(name)).data
        if "source" in data or name in figures:
            rows.append({"name": name, **figures.get(name, {}), "license": data.get("license", "")})
    head = ("graph", "parameters", "least VRAM", "seconds", "license")
    lines = [
        (
            str(row["name"]),
            f"{row['parameters'] / 1e9:.1f} B" if "parameters" in row else "-",
            f"{row['card_gib']} GiB" if "card_gib" in row else "-",
            f"{row['seconds']:.0f}" if "seconds" in row else "-",
            str(row["license"]),
        )
        for row in rows
    ]
    ram_gib = max((row["ram_gib"] for row in rows if "ram_gib" in row), default=0)
    screen = (
        table([head, *lines], left_columns=(0, 4)),
        f" least VRAM: the smallest of 8, 12, 16 and 24 GiB that fits with {ram_gib} GiB of RAM",
        " seconds: of one cold run with both, predicted for an RTX 4090",
        "next: graphrun plan flux-dev",
    )
    show({"graphs": rows}, as_json, "\n".join(screen))


def _list_fits(card: str, ram: str, vram: str | None, cache: Path | None, as_json: bool) -> None:
    """Show the best choice of `graphrun.fitting.fit` for each of graphrun's own graphs."""
    from graphrun.graph.document import read_document
    from graphrun.report.fit_screen import fits_screen

    hardware, rows = card_called(card, cache), list[dict[str, Any]]()
    budget = ram_for_weights(ram)
    names = [
        name
        for name in shipped_graphs()
        if "source" in read_document(graph_file(name)).data and name != "shapes"
    ]
    for number, name in enumerate(names, 1):
        row: dict[str, Any] = {"name": name, "best": None}
        progress = f" ({number} of {len(names)})"
        try:
            choices = choices_for(api.load(name), hardware, vram, budget, cache, progress=progress)
            row["best"] = next(iter(choices), None)
        except GraphrunError as error:  # such as code that only the caller may trust
            row["error"] = str(error)
        rows.append(row)
    summary = {
        "hardware": hardware.name,
        "basis": hardware.basis,
        "ram": ram,
        "notes": budget_notes(hardware, vram, budget),
        "graphs": rows,
    }
    show(summary, as_json, fits_screen(summary, width()))

"""The command ``fit``: which format of a model to take on a machine, and what to expect."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphrun import api
from graphrun.cli.common import (
    AsJson,
    app,
    cache_folder,
    native_stdout_to_stderr,
    show,
    solving,
    system_bytes,
)
from graphrun.cli.options import NoCache, Sets, Trust, option, pair
from graphrun.cli.terminal import alive, width
from graphrun.devices import hardware_for
from graphrun.errors import InputError
from graphrun.graph.shipped import shipped_graphs
from graphrun.units import parse_seconds, parse_size

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph
    from graphrun.model.hardware import Hardware

Card = Annotated[
    str | None,
    typer.Option(
        "--card",
        help="Card, as for --hardware of plan. Default: the card here, else rtx4090.",
        metavar="NAME",
    ),
]
RamOf = Annotated[
    str,
    typer.Option(
        "--ram",
        help="RAM of that machine: 16G (4 GiB are left to the system); auto: free here.",
        metavar="SIZE",
    ),
]


@app.command("fit")
def fit_command(
    model: Annotated[
        str,
        typer.Argument(
            help="Graph file, name of a graph (graphrun list), folder of a pipeline, or hub id "
            "(owner/name; reads configurations and headers).",
            show_default=False,
        ),
    ],
    card: Card = None,
    ram: RamOf = "auto",
    vram: Annotated[
        str | None,
        option("VRAM budget. Default: all of the card.", "SIZE", "--vram"),
    ] = None,
    want: Annotated[
        str | None,
        option("Longest time for a run: '30 s', '2 min'.", "TIME", "--want"),
    ] = None,
    set_: Sets = None,
    trust_package: Trust = None,
    no_cache: NoCache = False,
    as_json: AsJson = False,
) -> None:
    """Show which formats of a model fit a machine, best first.

    Shows seconds, memory, download and command of each. Needs no weights and no
    GPU.
    """
    from graphrun.report.fit_screen import fit_screen

    cache, limit_seconds = (
        cache_folder(no_cache),
        parse_seconds(want, name="--want") if want else None,
    )
    hardware, ram = card_called(card, cache), ram_for_weights(ram)
    inputs = dict(pair("--set", text, may_be_empty=True) for text in set_ or [])
    with _graph_file(model, trust_package) as (file, notes):
        graph = api.load(file, trust=trust_package or ())
        rows = choices_for(graph, hardware, vram, ram, cache, inputs, with_planned_only=True)
    trusted = [word for name in trust_package or [] for word in ("--trust-package", name)]
    file_name = model if _is_graph(model) else f"{graph.name}.yaml"
    words = ["graphrun", "plan", file_name, "--vram", vram or _gib(hardware.capacity_bytes)]
    words += ["--ram", ram] if ram != "auto" else []
    words += ["--hardware", card or hardware.name]
    words += [word for text in set_ or [] for word in ("--set", text)]
    words += trusted
    # a folder or a repository is planned by a graph file
    first = ["graphrun", "import", model, *trusted, "-o", file_name]
    start = "" if file_name == model else f"{shlex.join(first)} && "
    command = start + shlex.join(words)
    for row in rows:
        options = [word for name in row["allow"] for word in ("--allow", name)]
        row["command"] = start + shlex.join([*words, *options])
        row["within"] = limit_seconds is None or row["seconds"] <= limit_seconds
    summary = {
        "graph": graph.name,
        "hardware": hardware.name,
        "basis": hardware.basis,
        "want_seconds": limit_seconds,
        "notes": [*budget_notes(hardware, vram, ram), *notes],
        "choices": rows,
    }
    show(summary, as_json, fit_screen(summary, command, width(), faster_options(graph, inputs)))
    if not any(row["within"] for row in rows if not row["planned_only"]):
        raise typer.Exit(1 if rows else 3)


def faster_options(graph: Graph, inputs: Mapping[str, Any]) -> str:
    """Return options with half of the steps, and with three quarters of the height and width, as
    text; "" for a graph without such inputs."""
    shares = {"steps": 0.5, "height": 0.75, "width": 0.75}
    values = {}
    for name, share in shares.items():
        if (graph_input := graph.inputs.get(name)) is None:
            continue
        value, step = inputs.get(name, graph_input.default), graph_input.multiple_of or 1
        if isinstance(value, int | str) and str(value).isdigit():
            smaller = int(share * int(value)) // step * step
            if max(1, graph_input.minimum or 0) <= smaller < int(value):
                values[name] = smaller
    texts = [f"--set steps={values.pop('steps')}"] if "steps" in values else []
    texts += [" ".join(f"--set {name}={value}" for name, value in values.items())]
    return " or ".join(filter(None, texts))


def card_called(name: str | None, cache: Path | None) -> Hardware:
    """Return the hardware of ``--card``. Raises InputError for a CPU and the simulated device."""
    hardware = hardware_for(name, None, cache)
    if hardware.kind.is_host or hardware.kind.free_memory == "none":
        raise InputError(
            f"{hardware.name} is no card: name one such as --card rtx4060; for a CPU, type "
            "graphrun plan GRAPH --device cpu"
        )
    return hardware


def ram_for_weights(ram: str) -> str:
    """Return the RAM budget for weights, as text, on a machine with ``ram``.

    A size has `system_bytes` less; ``auto`` and shares of it are of free RAM already.
    """
    if ram == "auto" or ram.strip().endswith("%"):
        return ram
    nbytes = parse_size(ram, name="--ram")
    return _gib(nbytes - system_bytes(nbytes))


def budget_notes(hardware: Hardware, vram: str | None, ram: str) -> list[str]:
    """Return what a screen says about the budgets of `choices_for`."""
    from graphrun.cli.planning import desktop_note

    notes = [] if ram == "auto" else [f"{ram} of the RAM for weights; the rest is the system's"]
    budget_bytes = (
        hardware.capacity_bytes
        if vram is None
        else parse_size(vram, whole_bytes=hardware.capacity_bytes, name="--vram")
    )
    return notes + list(filter(None, [desktop_note(hardware, budget_bytes)]))


def choices_for(
    graph: Graph,
    hardware: Hardware,
    vram: str | None,
    ram: str,
    cache: Path | None,
    inputs: Mapping[str, Any] | None = None,
    *,
    with_planned_only: bool = False,
    progress: str = "",
) -> list[dict[str, Any]]:
    """Return the choices of `graphrun.fitting.fit`. ``vram``: None is all of the card; ``ram``: the
    budget for weights. ``with_planned_only``: also one that graphrun does not run.
    ``progress``: shown after the name of the graph."""
    from graphrun.fitting import fit

    with solving(), alive(f"what fits of {graph.name}{progress}"):
        budget = vram or hardware.capacity_bytes
        return fit(
            graph,
            hardware,
            budget,
            ram,
            inputs=inputs,
            cache=cache,
            with_planned_only=with_planned_only,
        )


def _is_graph(model: str) -> bool:
    """Return whether ``model`` is a graph file or the name of a shipped graph."""
    return model in shipped_graphs() or Path(model).suffix in (".yaml", ".yml")


@contextmanager
def _graph_file(model: str, trust: list[str] | None) -> Iterator[tuple[Path, list[str]]]:
    """Provide the graph file of ``model``, and what a screen says about it; import a folder or
    repository without weights."""
    if _is_graph(model):
        yield Path(model), []
        return
    from graphrun.diffusers_.importing.imported import ImportOptions, import_source

    with tempfile.TemporaryDirectory() as folder:
        options = ImportOptions({}, {}, (), {}, None, False, tuple(trust or ()))
        with native_stdout_to_stderr(), alive(f"import of {model}"):
            imported = import_source(model, options)
            description = imported.description.from_headers()
            file = Path(folder) / f"{description.name}.yaml"
            replace(imported, description=description).write(file, overwrite=False)
        names = ", ".join(imported.description.without_headers())
        text = f"{names}: planned by the configuration alone, without a header of the weights"
        yield file, [text] if names else []


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:g}G"

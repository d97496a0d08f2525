"""The command ``graphrun import``: writes a graph file for an existing pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphrun.cli.common import app, native_stdout_to_stderr
from graphrun.cli.options import Names, Trust, pair
from graphrun.cli.terminal import width
from graphrun.errors import InputError
from graphrun.report.command_lines import folded_command

if TYPE_CHECKING:
    from graphrun.diffusers_.importing.imported import Imported


@app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder of a diffusers pipeline, a hub id (owner/name; no weights are fetched), a checkpoint in one file "
            "(safetensors, GGUF), or a pipeline's class.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            help="The graph file; configurations go to configs/ beside it.",
            show_default=False,
        ),
    ],
    config: Annotated[
        Names,
        typer.Option(
            help="Of one file: the folder or hub id with its configurations. Of a class: a component's, NAME=FILE.json or "
            "NAME=CLASS:FILE.json; a tokenizer's folder; a plain argument. Repeatable.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        Names,
        typer.Option(
            help="bfloat16, float16, float32 for all components, or NAME=DTYPE. Repeatable.",
            show_default=False,
        ),
    ] = None,
    without: Annotated[
        Names,
        typer.Option(help="A part to leave out: safety_checker. Repeatable.", show_default=False),
    ] = None,
    set_: Annotated[
        Names,
        typer.Option(
            "--set",
            help="An input's default, or another argument: name=value. Repeatable.",
            show_default=False,
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="A commit, branch or tag on the hub.", show_default=False)
    ] = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole", help="A single stage, even where the pipeline can be split into stages."
        ),
    ] = False,
    trust_package: Trust = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the graph file.")] = False,
) -> None:
    """Write a graph file for an existing pipeline, from its configurations and a dry run of its own
    code.

    No weights are fetched or read, and no code that comes with a checkpoint is run.
    """
    from graphrun.diffusers_.importing.imported import Asked, import_source, refuse_existing
    from graphrun.report.plan_files import require_writable

    if out.suffix not in (".yaml", ".yml"):
        raise InputError(f"-o {out}: a graph file ends in .yaml")
    refuse_existing(out, force)
    require_writable(out)
    configs = dict(pair("--config", text) if "=" in text else ("", text) for text in config or [])
    dtypes = {name: value for name, _, value in (text.rpartition("=") for text in dtype or [])}
    sets = {
        name: _value(name, value)
        for name, value in (pair("--set", text, may_be_empty=True) for text in set_ or [])
    }
    asked = Asked(
        configs, dtypes, tuple(without or ()), sets, revision, whole, tuple(trust_package or ())
    )
    with native_stdout_to_stderr():
        imported = import_source(source, asked)
        imported.write(out, force=force)
    typer.echo(imported_screen(imported, out))


def imported_screen(imported: Imported, path: Path) -> str:
    """The summary of an import: the stages with the components they call, and the next command."""
    layout, found = imported.layout, imported.found
    lines = [f"wrote {path}: {found.pipeline}, {len(found.components)} components"]
    wide = max(len(stage.name) for stage in layout.stages)
    for stage in layout.stages:
        names = dict.fromkeys(str(entered) for entered in layout.entered[stage.name])
        lines.append(f"  {stage.name:{max(wide, 8)}} {stage.op:14} {', '.join(names)}")
    if layout.why:
        lines.append(f"  one stage: {layout.why}")
    lines.append(folded_command(f"next: graphrun plan {path} --vram 8G", width()))
    return "\n".join(lines)


def _value(name: str, text: str) -> Any:
    """``text`` parsed as YAML: 512, 0.5, true, [1, 2], or a string, which may be empty. Raises
    InputError."""
    import yaml

    try:
        value = yaml.safe_load(text) if text else ""
    except yaml.YAMLError as error:
        raise InputError(f"--set {name}: {text!r} cannot be read: {error}") from error
    if value is None:
        raise InputError(f"--set {name}: give it a value, or leave it out")
    return value

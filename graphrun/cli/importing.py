"""The command ``graphrun import``: writes a graph file for an existing pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphrun.cli.common import app, native_stdout_to_stderr
from graphrun.cli.options import NameList, Trust, option, pair
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
            help="Folder of a diffusers pipeline, hub id (owner/name), checkpoint in one file "
            "(safetensors, GGUF), or pipeline class.",
            show_default=False,
        ),
    ],
    output_file: Annotated[
        Path,
        option("Graph file. Configurations go to configs/ next to it.", "FILE", "-o"),
    ],
    config: Annotated[
        NameList,
        option(
            "For one file: folder or hub id of its configurations. For a class: "
            "NAME=FILE.json or NAME=CLASS:FILE.json (component), NAME=FOLDER (tokenizer), "
            "NAME=VALUE (argument). Repeatable.",
            "SOURCE",
        ),
    ] = None,
    dtype: Annotated[
        NameList,
        option("bfloat16, float16 or float32; NAME=DTYPE for one component. Repeatable.", "DTYPE"),
    ] = None,
    excluded_parts: Annotated[
        NameList,
        option(
            "Leave this component out, such as safety_checker. Repeatable.", "NAME", "--without"
        ),
    ] = None,
    set_: Annotated[
        NameList,
        option(
            "Default of an input, or another argument of the call. Repeatable.",
            "NAME=VALUE",
            "--set",
        ),
    ] = None,
    revision: Annotated[
        str | None,
        option("Commit, branch or tag on the hub.", "NAME"),
    ] = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole", help="Write one stage, even if the pipeline can be split into stages."
        ),
    ] = False,
    trust_package: Trust = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Overwrite the graph file.")
    ] = False,
) -> None:
    """Write a graph file for an existing pipeline.

    Uses its configurations, headers of weights, and a dry run of its code. Reads no
    weights, and runs no code that comes with a checkpoint.
    """
    from graphrun.diffusers_.importing.imported import ImportOptions, import_source, refuse_existing
    from graphrun.report.plan_files import require_writable

    if output_file.suffix not in (".yaml", ".yml"):
        raise InputError(f"-o {output_file}: a graph file ends in .yaml")
    refuse_existing(output_file, overwrite)
    require_writable(output_file)
    configs = dict(pair("--config", text) if "=" in text else ("", text) for text in config or [])
    dtypes = {name: value for name, _, value in (text.rpartition("=") for text in dtype or [])}
    sets = {
        name: set_value(name, value)
        for name, value in (pair("--set", text, may_be_empty=True) for text in set_ or [])
    }
    options = ImportOptions(
        configs,
        dtypes,
        tuple(excluded_parts or ()),
        sets,
        revision,
        whole,
        tuple(trust_package or ()),
    )
    with native_stdout_to_stderr():
        imported = import_source(source, options)
        imported.write(output_file, overwrite=overwrite)
    typer.echo(imported_screen(imported, output_file))


def imported_screen(imported: Imported, path: Path) -> str:
    """Return the summary of an import: stages, the components they call, the next command."""
    layout, pipeline = imported.layout, imported.description
    lines = [f"wrote {path}: {pipeline.pipeline}, {len(pipeline.components)} components"]
    name_columns = max(len(stage.name) for stage in layout.stages)
    for stage in layout.stages:
        names = dict.fromkeys(str(call) for call in layout.component_calls[stage.name])
        lines.append(f"  {stage.name:{max(name_columns, 8)}} {stage.op:14} {', '.join(names)}")
    if layout.reason:
        lines.append(f"  one stage: {layout.reason}")
    lines.append(folded_command(f"next: graphrun plan {path} --vram 8G", width()))
    return "\n".join(lines)


def set_value(name: str, text: str) -> Any:
    """Return ``text`` parsed as YAML: 512, 0.5, true, [1, 2], {a: 1}, or a string.

    What is no YAML ("[verse] ..."), or reads as a mapping without braces ("Verse: ..."), is a text.
    Raises InputError for null.
    """
    import yaml

    try:
        value = yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        return text
    if isinstance(value, dict) and not text.lstrip().startswith("{"):
        return text
    if value is None:
        raise InputError(f"--set {name}: null is no value; give another one, or leave it out")
    return value

"""The command ``comfyui install``: the nodes for ComfyUI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphrun.cli.common import app, echo
from graphrun.extras import install_command

comfyui = typer.Typer(no_args_is_help=True, help="Install graphrun's nodes in ComfyUI.")
app.add_typer(comfyui, name="comfyui")


@comfyui.callback()
def about_nodes() -> None:
    """Install graphrun's nodes in ComfyUI."""


@comfyui.command("install")
def install_nodes(
    folder: Annotated[
        Path, typer.Argument(help="ComfyUI's folder, with main.py.", show_default=False)
    ],
    remove: Annotated[bool, typer.Option("--remove", help="Remove what was installed.")] = False,
) -> None:
    """Write the line that loads graphrun's nodes into ComfyUI (docs/howto/comfyui.md).

    Also example workflows. Files that graphrun did not write stay as they are.
    """
    from graphrun.comfyui import install

    if remove:
        for path in install.remove(folder.expanduser()):
            echo(f"removed {path}")
        echo("next: start ComfyUI again")
        return
    for path in install.install(folder.expanduser()):
        echo(f"wrote {path}")
    echo(
        f"next: in ComfyUI's Python, {install_command()}; then start ComfyUI again: the nodes "
        "are under Add Node, graphrun"
    )

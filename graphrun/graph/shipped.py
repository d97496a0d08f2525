"""The graphs that come with graphrun, found by name: ``flux-dev`` is ``graphs/flux-dev.yaml``.

They lie in the folder ``graphs`` of the installed package, or beside the package in a checkout.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from graphrun.errors import GraphError

_PACKAGE = Path(__file__).parent.parent


def graphs_folder() -> Path:
    """The folder of the graphs that come with graphrun."""
    installed = _PACKAGE / "graphs"
    return installed if installed.is_dir() else _PACKAGE.parent / "graphs"


def shipped_graphs() -> tuple[str, ...]:
    """Their names, sorted."""
    return tuple(sorted(path.stem for path in graphs_folder().glob("*.yaml")))


def graph_file(path: str | Path) -> Path:
    """The file of a graph: ``path``, or the shipped graph called so where no file is. A name has neither folder nor file suffix.

    Raises GraphError, with the name that was meant, for a name that no shipped graph has, and where there is no file at a path
    like ``graphs/flux-dev.yaml``. Other paths are returned as they are, for the reader to refuse.
    """
    path, names = Path(path), shipped_graphs()
    is_name = path.name == os.fspath(path) and path.suffix not in (".yaml", ".yml", ".json")
    if path.is_file() or (path.is_dir() and path.name not in names):
        return path
    if is_name and path.name in names:
        return graphs_folder() / f"{path.name}.yaml"
    if is_name:
        close = difflib.get_close_matches(path.name, names, n=1)
        full = ", ".join(name for name in names if not name.endswith("-tiny"))
        hint = f"did you mean {close[0]}?" if close else f"these are {full}, and tiny ones such as flux-tiny"
        raise GraphError(f"no such file, and no graph of graphrun's own has this name; {hint}", str(path))
    if path.stem in names:
        raise GraphError(f"no such file; graphrun's own graph is called {path.stem}", str(path))
    return path


def shipped_name(path: Path) -> str | None:
    """The name of the shipped graph that ``path`` names or is the file of; None for another graph."""
    file = graph_file(path).resolve()
    return file.stem if file.parent == graphs_folder().resolve() else None

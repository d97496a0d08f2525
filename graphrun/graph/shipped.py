"""The graphs that come with graphrun, found by name: ``flux-dev`` is ``graphs/flux-dev.yaml``.

The folder ``graphs`` is in the installed package, or next to the package in a checkout.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from pathlib import Path

from graphrun.errors import GraphError

_PACKAGE = Path(__file__).parent.parent
_HUB_PAGE = re.compile(r"https?:/+(?:huggingface|hf)\.co/")
_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([^/]+))?")
_CHECKPOINTS = (".safetensors", ".gguf")


def graphs_folder() -> Path:
    """Return the folder of the shipped graphs."""
    installed = _PACKAGE / "graphs"
    return installed if installed.is_dir() else _PACKAGE.parent / "graphs"


def shipped_graphs() -> tuple[str, ...]:
    """Return the names of the shipped graphs, sorted."""
    return tuple(sorted(path.stem for path in graphs_folder().glob("*.yaml")))


def graph_file(path: str | Path) -> Path:
    """Return the file of a graph: ``path``, or the shipped graph of that name.

    An existing file comes first. A name has neither folder nor file suffix. Raises GraphError for a
    folder, a checkpoint, and a name or repository without a file; the message names the shipped
    graph that was meant or the import to type. Other paths are returned unchanged for the reader to
    refuse.
    """
    path, names = Path(path), shipped_graphs()
    is_yaml, is_name = path.suffix in (".yaml", ".yml", ".json"), path.name == os.fspath(path)
    if path.is_file() and path.suffix not in _CHECKPOINTS:
        return path
    if is_name and path.name in names:
        return graphs_folder() / f"{path.name}.yaml"
    if path.is_dir() or path.is_file():
        kind = "folder" if path.is_dir() else "checkpoint"
        raise GraphError(
            f"is a {kind}, not a graph file; to make one: {_import(path.as_posix(), path.stem)}",
            str(path),
        )
    if path.stem in names:
        raise GraphError(f"no such file; graphrun's own graph is called {path.stem}", str(path))
    if is_name and not is_yaml:
        raise GraphError(f"no such file{hint_for_name(path.name)}", str(path))
    repository = _REPOSITORY.fullmatch(_HUB_PAGE.sub("", path.as_posix()))
    if repository is not None and not is_yaml and not path.parent.exists():
        raise GraphError(f"no such file{_hint_for_repository(*repository.groups())}", str(path))
    return path


def hint_for_name(name: str) -> str:
    """Return a hint at the shipped graph that ``name`` probably means; it may be a repository's
    name."""
    names, sources = shipped_graphs(), _sources()
    if name in names:
        return f"; it is a graph of graphrun's own: type its name: graphrun plan {name}"
    repositories = {source.partition("/")[2]: source for source in sources}
    plain = re.sub(r"[\W_]", "", name).lower()
    for repository, source in repositories.items():
        if re.sub(r"[\W_]", "", repository).lower() == plain:
            return _called(source, sources[source])
    unknown = ", and no graph of graphrun's own has this name"
    if not (matches := difflib.get_close_matches(name, (*names, *repositories), n=1)):
        full = ", ".join(graph_name for graph_name in names if not graph_name.endswith("-tiny"))
        return f"{unknown}; these are {full}, and tiny ones such as flux-tiny"
    if matches[0] in names:
        return f"{unknown}; did you mean {matches[0]}?"
    source = repositories[matches[0]]
    return f"{unknown}; did you mean {source}, which is called {sources[source][0]}?"


def _hint_for_repository(repository: str, revision: str | None) -> str:
    """Return a hint at shipped graphs of a hub ``repository``, else the command to import it."""
    for source, graphs in _sources().items():
        if source.lower() == repository.lower():
            return _called(source, graphs)
    imported = _import(repository, repository.partition("/")[2], revision)
    return f", and graphrun has no graph of a repository with this name; to make one: {imported}"


def _called(source: str, graphs: tuple[str, ...]) -> str:
    suffix = f"; others with its weights: {', '.join(graphs[1:])}" if len(graphs) > 1 else ""
    return f"; graphrun's own graph of {source} is called {graphs[0]}{suffix}"


def _import(source: str, name: str, revision: str | None = None) -> str:
    options = ["--revision", revision] if revision else []
    return shlex.join(["graphrun", "import", source, *options, "-o", f"{name}.yaml"])


def _sources() -> dict[str, tuple[str, ...]]:
    """Return the hub repositories that are sources of shipped graphs, each with its graphs. The
    graph with the shortest name is first."""
    from graphrun.graph.document import read_document

    sources: dict[str, tuple[str, ...]] = {}
    for name in sorted(shipped_graphs(), key=len):
        source = str(read_document(graphs_folder() / f"{name}.yaml").data.get("source", ""))
        if _REPOSITORY.fullmatch(source):
            sources[source] = (*sources.get(source, ()), name)
    return sources


def shipped_name(path: Path) -> str | None:
    """Return the name of the shipped graph that ``path`` names or is; None for another graph."""
    file = graph_file(path).resolve()
    return file.stem if file.parent == graphs_folder().resolve() else None

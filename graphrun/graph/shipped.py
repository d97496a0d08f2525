"""The graphs that come with graphrun, found by name: ``flux-dev`` is ``graphs/flux-dev.yaml``.

They lie in the folder ``graphs`` of the installed package, or beside the package in a checkout.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from pathlib import Path

from graphrun.errors import GraphError
from graphrun.graph.document import read_document

_PACKAGE = Path(__file__).parent.parent
_HUB_PAGE = re.compile(r"https?:/+(?:huggingface|hf)\.co/")
_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([^/]+))?")
_CHECKPOINTS = (".safetensors", ".gguf")


def graphs_folder() -> Path:
    """The folder of the graphs that come with graphrun."""
    installed = _PACKAGE / "graphs"
    return installed if installed.is_dir() else _PACKAGE.parent / "graphs"


def shipped_graphs() -> tuple[str, ...]:
    """Their names, sorted."""
    return tuple(sorted(path.stem for path in graphs_folder().glob("*.yaml")))


def graph_file(path: str | Path) -> Path:
    """The file of a graph: ``path``, or the shipped graph called so where no file is. A name has
    neither folder nor file suffix.

    Raises GraphError for a folder, a checkpoint, and a name or repository without a file, with the
    shipped graph that was meant or the import to type. Returns other paths unchanged, for the
    reader to refuse.
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
        raise GraphError(f"no such file{_hint_for_name(path.name, names)}", str(path))
    repository = _REPOSITORY.fullmatch(_HUB_PAGE.sub("", path.as_posix()))
    if repository is not None and not is_yaml and not path.parent.exists():
        raise GraphError(f"no such file{_hint_for_repository(*repository.groups())}", str(path))
    return path


def _hint_for_name(name: str, names: tuple[str, ...]) -> str:
    """The shipped graph that was probably meant by ``name``, which may be a repository's name
    without its owner."""
    sources = _sources()
    repositories = {source.partition("/")[2]: source for source in sources}
    plain = re.sub(r"[\W_]", "", name).lower()
    for repository, source in repositories.items():
        if re.sub(r"[\W_]", "", repository).lower() == plain:
            return _called(source, sources[source])
    unknown = ", and no graph of graphrun's own has this name"
    if not (near := difflib.get_close_matches(name, (*names, *repositories), n=1)):
        full = ", ".join(each for each in names if not each.endswith("-tiny"))
        return f"{unknown}; these are {full}, and tiny ones such as flux-tiny"
    if near[0] in names:
        return f"{unknown}; did you mean {near[0]}?"
    source = repositories[near[0]]
    return f"{unknown}; did you mean {source}, which is called {sources[source][0]}?"


def _hint_for_repository(repository: str, revision: str | None) -> str:
    """The shipped graphs of a ``repository`` of the hub, or else the command that imports it."""
    for source, graphs in _sources().items():
        if source.lower() == repository.lower():
            return _called(source, graphs)
    imported = _import(repository, repository.partition("/")[2], revision)
    return f", and graphrun has no graph of a repository with this name; to make one: {imported}"


def _called(source: str, graphs: tuple[str, ...]) -> str:
    others = f"; others with its weights: {', '.join(graphs[1:])}" if len(graphs) > 1 else ""
    return f"; graphrun's own graph of {source} is called {graphs[0]}{others}"


def _import(source: str, name: str, revision: str | None = None) -> str:
    options = ["--revision", revision] if revision else []
    return shlex.join(["graphrun", "import", source, *options, "-o", f"{name}.yaml"])


def _sources() -> dict[str, tuple[str, ...]]:
    """Repositories on the hub that shipped graphs have as their source, each with these graphs, the
    shortest name first."""
    sources: dict[str, tuple[str, ...]] = {}
    for name in sorted(shipped_graphs(), key=len):
        source = str(read_document(graphs_folder() / f"{name}.yaml").data.get("source", ""))
        if _REPOSITORY.fullmatch(source):
            sources[source] = (*sources.get(source, ()), name)
    return sources


def shipped_name(path: Path) -> str | None:
    """The name of the shipped graph that ``path`` names or is the file of; None for another
    graph."""
    file = graph_file(path).resolve()
    return file.stem if file.parent == graphs_folder().resolve() else None

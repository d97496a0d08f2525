"""What a component's weights were read from: source, commit, files with size, time of writing and content where it is known.

Decides what a trace says of sources and when two are at different commits. Reads no file's content. Must not know plans.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from graphrun.components.weights import commit_of, local_place, split_source, weights_in
from graphrun.graph.graph import Component


def origin_of(component: Component, precision: str) -> dict[str, Any] | None:
    """JSON-ready: ``source``, ``commit`` ("" where it is no repository's) and ``files``, each with name, bytes, ``mtime_ns`` and,
    where the hub's cache names it by its content, ``sha256``. None for random weights."""
    source = component.source_in(precision)
    place = local_place(source) if source is not None else None
    if source is None or place is None:
        return None
    files = [place] if place.is_file() else weights_in(place, component.where, component.variant)
    read = [*files, *(Path(lora.file) for lora in component.loras)]
    return {"component": component.name, "source": source, "commit": commit_of(source), "files": [_file(path) for path in read]}


def commits_of(components: Iterable[Component]) -> tuple[tuple[str, str], ...]:
    """(``owner/name`` or ``owner/name@revision``, commit) for each repository that ``components`` have weights from, where the
    hub's cache on this machine knows the commit."""
    found = {}
    for component in components:
        for source in (component.source, component.gguf):
            if source and (commit := commit_of(source)):
                repository, revision, _ = split_source(source)
                found[f"{repository}@{revision.replace('/', '%2F')}" if revision else repository] = commit
    return tuple(sorted(found.items()))


def blob(path: Path) -> str:
    """The content's SHA-256 where the hub's cache names the file by it; else nothing."""
    name = path.resolve().name
    return name if path.is_symlink() and len(name) == 64 and path.resolve().parent.name == "blobs" else ""


def _file(path: Path) -> dict[str, Any]:
    status = path.stat()
    named = {"name": path.name, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    return {**named, "sha256": content} if (content := blob(path)) else named

"""Files that a run needs from the hub: found, checked at the hub, and downloaded before the run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from graphrun.errors import GraphError
from graphrun.graph.graph import Graph
from graphrun.modules import hub
from graphrun.modules.source_files import (
    OF_COMPONENT,
    OF_PART,
    WEIGHT_FILES,
    complete,
    find_folder,
    hub_query,
    local_folder,
    remote_files,
    split_source,
)
from graphrun.reading import is_url
from graphrun.units import show_size


@dataclass(frozen=True, slots=True)
class Need:
    """Files of the hub path ``source`` for the component or part at ``file_line``."""

    source: str
    file_line: str
    patterns: tuple[str, ...] = OF_PART
    variant: str = ""


@dataclass(frozen=True, slots=True)
class Download:
    """Files of one repository at a commit that are not on this machine: ``files`` of ``nbytes`` in
    all. ``licence``: as the repository's card states it, or "". Of a URL, ``repository`` is the
    URL, and ``commit`` is ""."""

    repository: str
    commit: str
    licence: str
    files: int
    nbytes: int
    needs: tuple[Need, ...]


def find_missing(graph: Graph, precisions: Mapping[str, str] | None = None) -> list[Need]:
    """Return the needs that the hub's cache does not meet, without using the network.

    ``precisions``: of each component in a plan; by default the first one. Raises GraphError for a
    folder or file that does not exist.
    """
    component_names = {name for stage in graph.stages for name in stage.uses}
    needs = []
    for name, component in graph.components.items():
        precision = (precisions or {}).get(name, component.precision[0])
        source = component.source_in(precision)
        if name in component_names and source is not None:
            variant = component.variant if component.checkpoint(precision) is None else ""
            needs.append(Need(source, component.file_line, OF_COMPONENT, variant))
    needs += [
        Need(part.source, part.file_line)
        for part in graph.parts.values()
        if part.source and (part.file or not part.has_config)
    ]
    for need in needs:
        if Path(need.source).is_absolute():
            find_folder(need.source, need.patterns, need.file_line)
    remote = [need for need in needs if not Path(need.source).is_absolute()]
    return [need for need in remote if not _is_local(need)]


def _is_local(need: Need) -> bool:
    """Return whether the cache has all weights of a component, or any file of a part."""
    if need.patterns == OF_PART:
        return local_folder(need.source) is not None
    return complete(need.source, need.file_line, need.variant)


def look(needs: Sequence[Need]) -> list[Download]:
    """Return one download for each repository and URL of ``needs``, with one or two requests each.

    Downloads nothing. Raises GraphError if a repository may not be read or does not have the files,
    and if the disk is too small for all of them.
    """
    from huggingface_hub import constants

    groups: dict[tuple[str, str | None, str], list[Need]] = {}
    for need in needs:
        if not is_url(need.source):
            repository, revision = split_source(need.source)[0], hub_query(need.source, ())[0]
            groups.setdefault((repository, revision, need.variant), []).append(need)
    downloads = [_look_at_url(need) for need in needs if is_url(need.source)]
    downloads += [
        _look(repository, revision, group) for (repository, revision, _), group in groups.items()
    ]
    folder = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(
        next(path for path in (folder, *folder.absolute().parents) if path.exists())
    ).free
    if (total := sum(download.nbytes for download in downloads)) > free:
        text = f"{show_size(total)} are to be downloaded, and {folder} has {show_size(free)} free"
        raise GraphError(
            f"{text}: make room, or name a folder on another disk in HF_HOME", needs[0].file_line
        )
    return downloads


def _look_at_url(need: Need) -> Download:
    listing = remote_files(need.source, need.patterns, need.file_line, need.variant)
    names = [file.name for file in listing.files]
    if need.patterns == OF_COMPONENT and not any(name.endswith(WEIGHT_FILES) for name in names):
        raise GraphError(f"{need.source} has no safetensors", need.file_line)
    files = listing.missing()
    nbytes = sum(file.nbytes for file in files)
    return Download(need.source, "", "", len(files), nbytes, (need,))


def _look(repository: str, revision: str | None, needs: Sequence[Need]) -> Download:
    listing, required_files = hub.look(repository, revision, needs[0].file_line), set[str]()
    for need in needs:
        _, allow, ignore = hub_query(need.source, need.patterns, need.variant)
        files = {
            file for file in listing.sizes if _matches(file, allow) and not _matches(file, ignore)
        }
        if need.patterns == OF_COMPONENT and not any(file.endswith(WEIGHT_FILES) for file in files):
            subfolder = split_source(need.source)[2]
            raise GraphError(
                f"the repository {repository} has no "
                f"safetensors{f' in {subfolder}' if subfolder else ''}",
                need.file_line,
            )
        required_files |= files
    absent_files = [
        file for file in required_files if not hub.cached(repository, listing.commit, file)
    ]
    nbytes = sum(listing.sizes[file] for file in absent_files)
    return Download(
        repository, listing.commit, listing.licence, len(absent_files), nbytes, tuple(needs)
    )


def _matches(file: str, patterns: Sequence[str]) -> bool:
    """Return whether ``file`` matches, as in huggingface_hub: ``*`` matches ``/`` too."""
    return any(fnmatch(file, pattern) for pattern in patterns)


def download(request: Download, progress: hub.DownloadCallback | None = None) -> None:
    """Download the files of ``request``. Raises GraphError; complete files stay, and the next call
    continues with the others."""
    if is_url(request.repository):
        need = request.needs[0]
        remote_files(need.source, need.patterns, need.file_line, need.variant).copy(progress)
        return
    queries = [hub_query(need.source, need.patterns, need.variant) for need in request.needs]
    allow = list(dict.fromkeys(pattern for _, patterns, _ in queries for pattern in patterns))
    hub.snapshot(
        request.repository,
        queries[0][0],
        allow,
        queries[0][2],
        file_line=request.needs[0].file_line,
        progress=progress,
    )

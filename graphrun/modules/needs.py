"""What a run of a graph takes from the hub and this machine lacks: found, asked for at the hub,
downloaded, all before the run."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
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
    asked_of,
    complete,
    find_folder,
    local_folder,
    split_source,
)
from graphrun.units import show_size


@dataclass(frozen=True, slots=True)
class Need:
    """Files of the hub path ``source`` for the component or part at ``where``; of a part, no
    weights."""

    source: str
    where: str
    patterns: tuple[str, ...] = OF_PART
    variant: str = ""


@dataclass(frozen=True, slots=True)
class Download:
    """Files of one repository at a commit: ``files`` of ``nbytes`` in all are not here. ``licence``
    as its card names it, or ""."""

    repository: str
    commit: str
    licence: str
    files: int
    nbytes: int
    needs: tuple[Need, ...]


def missing(graph: Graph) -> list[Need]:
    """The needs that the hub's cache does not meet, without a network. Raises GraphError for a
    folder or file that is not there."""
    used = {name for stage in graph.stages for name in stage.uses}
    sources = [
        (of, of.source_in(of.precision[0])) for name, of in graph.components.items() if name in used
    ]
    needs = [
        Need(source, of.where, OF_COMPONENT, of.variant)
        for of, source in sources
        if source is not None
    ]
    needs += [
        Need(of.source, of.where)
        for of in graph.parts.values()
        if of.source and (of.file or not of.has_config)
    ]
    for need in needs:
        if Path(need.source).is_absolute():
            find_folder(need.source, need.patterns, need.where)
    remote = [need for need in needs if not Path(need.source).is_absolute()]
    return [need for need in remote if not _here(need)]


def _here(need: Need) -> bool:
    """Whether the cache has it: all weights of a component, any file of a part."""
    if need.patterns == OF_PART:
        return local_folder(need.source) is not None
    return complete(need.source, need.where, need.variant)


def look(needs: Sequence[Need]) -> list[Download]:
    """One download for each repository of ``needs``: one or two requests each, and nothing is
    downloaded.

    Raises GraphError where a repository may not be read or lacks what is needed, and where the disk
    is too small for all of it.
    """
    from huggingface_hub import constants

    groups: dict[tuple[str, str | None, str], list[Need]] = {}
    for need in needs:
        groups.setdefault(
            (split_source(need.source)[0], asked_of(need.source, ())[0], need.variant), []
        ).append(need)
    found = [_look(repository, revision, of) for (repository, revision, _), of in groups.items()]
    folder = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(
        next(path for path in (folder, *folder.absolute().parents) if path.exists())
    ).free
    if (total := sum(of.nbytes for of in found)) > free:
        text = f"{show_size(total)} are to be downloaded, and {folder} has {show_size(free)} free"
        raise GraphError(
            f"{text}: make room, or name a folder on another disk in HF_HOME", needs[0].where
        )
    return found


def _look(repository: str, revision: str | None, needs: Sequence[Need]) -> Download:
    listing, wanted = hub.look(repository, revision, needs[0].where), set[str]()
    for need in needs:
        _, allow, ignore = asked_of(need.source, need.patterns, need.variant)
        files = {
            file for file in listing.sizes if _matches(file, allow) and not _matches(file, ignore)
        }
        if need.patterns == OF_COMPONENT and not any(file.endswith(WEIGHT_FILES) for file in files):
            inside = split_source(need.source)[2]
            raise GraphError(
                f"the repository {repository} has no safetensors{f' in {inside}' if inside else ''}",
                need.where,
            )
        wanted |= files
    lacking = [file for file in wanted if not hub.cached(repository, listing.commit, file)]
    nbytes = sum(listing.sizes[file] for file in lacking)
    return Download(repository, listing.commit, listing.licence, len(lacking), nbytes, tuple(needs))


def _matches(file: str, patterns: Sequence[str]) -> bool:
    """As huggingface_hub does it: ``*`` matches ``/`` too."""
    return any(fnmatch(file, pattern) for pattern in patterns)


def download(of: Download, progress: hub.Progress | None = None) -> None:
    """Downloads it. Raises GraphError; files that are complete by then stay, and the next call goes
    on with the others."""
    asked = [asked_of(need.source, need.patterns, need.variant) for need in of.needs]
    allow = list(dict.fromkeys(pattern for _, patterns, _ in asked for pattern in patterns))
    hub.snapshot(
        of.repository, asked[0][0], allow, asked[0][2], where=of.needs[0].where, progress=progress
    )

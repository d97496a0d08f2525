"""What a run downloads from the hub: asked for before planning, which then takes seconds, and
downloaded after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from graphrun.cli.terminal import alive
from graphrun.errors import Interrupted
from graphrun.graph.graph import Graph
from graphrun.units import show_size

if TYPE_CHECKING:
    from graphrun.modules.needs import Download

Told = Callable[[str], None] | None


def asked_for(graph: Graph, told: Told) -> list[Download]:
    """What is to be downloaded to run ``graph``, after asking the hub for it. Raises GraphError
    where a run would fail for it: a source that is not there or may not be read, a full disk."""
    from graphrun.modules.needs import look, missing

    if not (needs := missing(graph)):
        return []
    with alive("asking the hub"):
        found = look(needs)
    for of in found:
        licence = f", licence {of.licence}" if of.licence else ""
        if told is not None:
            told(
                f"{of.repository} at {of.commit[:8]}: {show_size(of.nbytes)} in {of.files} files to download{licence}"
            )
    return found


def downloaded(found: Sequence[Download], told: Told) -> None:
    """Downloads what `asked_for` found, and shows bytes and the time left."""
    from graphrun.modules.needs import download
    from graphrun.report.progress import DownloadProgress

    for of in found:
        with DownloadProgress(of.repository, told) as progress:
            try:
                download(of, progress)
            except KeyboardInterrupt:
                text = f"interrupted: files of {of.repository} that are complete are kept; the same command goes on with the others"
                raise Interrupted(text) from None

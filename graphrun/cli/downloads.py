"""Downloads from the hub for a run. The hub is asked before planning, which takes seconds; the
files are downloaded after planning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from graphrun.cli.terminal import alive
from graphrun.errors import Interrupted
from graphrun.units import show_size

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph
    from graphrun.modules.needs import Download

Told = Callable[[str], None] | None


def required_downloads(
    graph: Graph, notify: Told, precisions: Mapping[str, str] | None = None
) -> list[Download]:
    """Ask the hub for the files that ``graph`` needs to run, and return those missing here.

    ``precisions``: as for `graphrun.modules.needs.find_missing`. Raises GraphError if a run would
    fail: a source is missing or may not be read, or the disk is full.
    """
    from graphrun.modules.needs import find_missing, look

    if not (needs := find_missing(graph, precisions)):
        return []
    with alive("asking the hub"):
        downloads = look(needs)
    for download in downloads:
        licence = f", licence {download.licence}" if download.licence else ""
        commit = f" at {download.commit[:8]}" if download.commit else ""
        if notify is not None and download.files:
            notify(
                f"{download.repository}{commit}: "
                f"{show_size(download.nbytes)} in {download.files} files to "
                f"download{licence}"
            )
    return downloads


def download_all(downloads: Sequence[Download], notify: Told) -> None:
    """Download ``downloads``, and show bytes and the remaining time."""
    from graphrun.modules.needs import download
    from graphrun.report.progress import DownloadProgress

    for item in downloads:
        with DownloadProgress(item.repository, notify) as progress:
            try:
                download(item, progress)
            except KeyboardInterrupt:
                text = (
                    f"interrupted: files of {item.repository} that are complete are kept; the "
                    "same command continues with the others"
                )
                raise Interrupted(text) from None

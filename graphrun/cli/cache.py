"""The commands ``cache ls``, ``cache rm`` and ``cache verify``, for the cache of stage outputs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from graphrun.cli.common import AsJson, app, cache_folder, show
from graphrun.errors import InputError
from graphrun.units import show_seconds, show_size

caches = typer.Typer(no_args_is_help=True, help="Show, remove and verify cached stage outputs.")
app.add_typer(caches, name="cache")
Keys = Annotated[list[str] | None, typer.Argument(help="Entries, by the first digits of their keys.", show_default=False)]


@caches.command("ls")
def list_entries(as_json: AsJson = False) -> None:
    """List the cached stage outputs: key, stage, size, age, and the inputs they are for."""
    from graphrun.report.table import table

    index = _index()
    entries = index.entries()
    data = [
        {"key": e.key, "graph": e.graph, "stage": e.stage, "about": e.about, "nbytes": e.nbytes, "made": e.made, "used": e.used}
        for e in entries
    ]
    now = time.time()
    rows = [["key", "stage", "size", "used", "for"]]
    rows += [
        [e.key[:12], f"{e.graph}/{e.stage}", show_size(e.nbytes), f"{show_seconds(max(0.0, now - e.used))} ago", e.about]
        for e in entries
    ]
    total = (
        f"{len(entries)} entries, {show_size(sum(e.nbytes for e in entries))} of {show_size(index.limit_bytes)} in {index.folder}"
    )
    screen = f"{table(rows, left=(0, 1, 4))}\n{total}" if entries else f"no cached outputs in {index.folder}"
    show({"folder": str(index.folder), "limit_bytes": index.limit_bytes, "entries": data}, as_json, screen)


@caches.command("rm")
def remove_entries(keys: Keys = None, every: Annotated[bool, typer.Option("--all", help="All entries.")] = False) -> None:
    """Remove entries, by the first digits of their keys, or all of them."""
    index = _index()
    if bool(keys) == every:
        raise InputError("name the entries to remove (graphrun cache ls shows them), or add --all")
    chosen = None
    if keys:
        all_keys = [entry.key for entry in index.entries()]
        found = {start: [key for key in all_keys if key.startswith(start)] for start in keys}
        if missing := [start for start, matching in found.items() if not matching]:
            raise InputError(f"no entry begins with {', '.join(missing)}; graphrun cache ls shows the entries")
        chosen = sorted({key for matching in found.values() for key in matching})
    typer.echo(f"removed {index.remove(chosen)} entries")


@caches.command("verify")
def verify_entries() -> None:
    """Read every entry, and remove those that are damaged: they are computed again when needed."""
    index = _index()
    broken = index.verify()
    for entry in broken:
        typer.echo(f"damaged, removed: {entry.key[:12]} {entry.graph}/{entry.stage} {entry.about}")
    typer.echo(f"{len(index.entries())} entries are intact, {len(broken)} were damaged")


def _index() -> Any:
    from graphrun.batch.cache.index import Index

    return Index((cache_folder(False) or Path()) / "outputs")

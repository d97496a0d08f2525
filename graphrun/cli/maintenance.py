"""The commands ``doctor`` and ``calibrate`` for this machine, and ``cache`` for cached outputs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from graphrun.cli.common import AsJson, app, cache_folder, echo, show
from graphrun.cli.options import NoCache, option
from graphrun.cli.terminal import width
from graphrun.errors import InputError
from graphrun.units import show_seconds, show_size

caches = typer.Typer(no_args_is_help=True, help="List, remove and verify cached stage outputs.")
app.add_typer(caches, name="cache")
KeyArguments = Annotated[
    list[str] | None,
    typer.Argument(help="First digits of the keys of entries.", show_default=False),
]


@caches.command("ls")
def list_entries(as_json: AsJson = False) -> None:
    """List cached stage outputs: key, stage, size, age and inputs."""
    from graphrun.report.table import table

    store = _outputs()
    entries = store.entries()
    clock_seconds = time.time()
    rows = [["key", "stage", "size", "used", "for"]]
    rows += [
        [
            e.key[:12],
            f"{e.graph}/{e.stage}",
            show_size(e.nbytes),
            f"{show_seconds(max(0.0, clock_seconds - e.used_seconds))} ago",
            e.inputs_text,
        ]
        for e in entries
    ]
    files = _spool().files
    weight_bytes = sum(file.stat().st_size for file in files)
    weights = (
        f"\n{len(files)} files of quantized weights, {show_size(weight_bytes)}" if files else ""
    )
    total = (
        f"{len(entries)} entries, {show_size(sum(e.nbytes for e in entries))} of "
        f"{show_size(store.limit_bytes)} in {store.folder}"
    )
    screen = (
        f"{table(rows, left_columns=(0, 1, 4))}\n{total}"
        if entries
        else f"no cached outputs in {store.folder}"
    )
    show(
        {
            "folder": str(store.folder),
            "limit_bytes": store.limit_bytes,
            "entries": [e.to_json() for e in entries],
            "quantized": {"files": len(files), "nbytes": weight_bytes},
        },
        as_json,
        f"{screen}{weights}",
    )


@caches.command("rm")
def remove_entries(
    keys: KeyArguments = None,
    remove_all: Annotated[bool, typer.Option("--all", help="Remove all entries.")] = False,
) -> None:
    """Remove cached outputs by the first digits of their keys, or all.

    --all also removes quantized weights.
    """
    store = _outputs()
    if bool(keys) == remove_all:
        raise InputError("name entries (graphrun cache ls shows them) or add --all, not both")
    selection = None
    if keys:
        all_keys = [entry.key for entry in store.entries()]
        if unknown_keys := [
            start for start in keys if not any(key.startswith(start) for key in all_keys)
        ]:
            raise InputError(
                f"no entry begins with {', '.join(unknown_keys)}; graphrun cache ls shows "
                "the entries"
            )
        selection = sorted(key for key in all_keys if key.startswith(tuple(keys)))
    files = _spool().files if remove_all else []
    for file in files:
        file.unlink(missing_ok=True)
    weights = f" and {len(files)} files of quantized weights" if files else ""
    echo(f"removed {store.remove(selection)} entries{weights}")


@caches.command("verify")
def verify_entries() -> None:
    """Read all cached outputs and quantized weights, and remove damaged ones."""
    store = _outputs()
    damaged_entries = store.verify()
    for entry in damaged_entries:
        echo(f"damaged, removed: {entry.key[:12]} {entry.graph}/{entry.stage} {entry.inputs_text}")
    echo(f"{len(store.entries())} entries are intact, {len(damaged_entries)} were damaged")
    for file in _spool().damaged():
        file.unlink(missing_ok=True)
        echo(f"damaged, removed: {file}")


def _outputs() -> Any:
    from graphrun.batch.cache.reuse import output_store

    return output_store(cache_folder(False) or Path())


def _spool() -> Any:
    from graphrun.runtime.spool import spool_in

    return spool_in(cache_folder(False) or Path())


@app.command()
def doctor(no_cache: NoCache = False, as_json: AsJson = False) -> None:
    """Check this machine: GPU, driver, libraries, memory, disk, caches."""
    from graphrun.profile.doctor import examine
    from graphrun.report.machine_screens import doctor_screen

    findings = examine(cache_folder(no_cache))
    show(findings, as_json, doctor_screen(findings, width()))


@app.command()
def calibrate(
    device: Annotated[
        str | None,
        option("cuda, sim or cpu. Default: the card here, else cpu.", "NAME"),
    ] = None,
    name: Annotated[
        str,
        option("Name of the profile. Default: the device's.", "NAME"),
    ] = "",
    seconds: Annotated[
        float | None,
        option("Seconds for measuring. Default: 20, on a CPU 60.", "N", min=0.1),
    ] = None,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled",
            help="Also measure the gain of compiled blocks, for --allow compile. Slower.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine and save a profile.

    Plans for its card or CPU then use the profile; --hardware NAME names it.
    """
    from graphrun.profile.calibrate import measure_and_keep
    from graphrun.report.machine_screens import calibrate_screen
    from graphrun.runtime.read_rates import measure_reads

    calibration = measure_and_keep(
        device,
        cache_folder(False) or Path(),
        name,
        seconds,
        measure_reads=measure_reads,
        compiled=compiled,
    )
    show(calibration, as_json, calibrate_screen(calibration))

"""The commands ``doctor`` and ``calibrate``, about this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphrun.cli.common import AsJson, app, cache_folder, show
from graphrun.cli.options import NoCache
from graphrun.errors import InputError


@app.command()
def doctor(no_cache: NoCache = False, as_json: AsJson = False) -> None:
    """Show this machine: device, driver, library versions and their limitations, limits of memory and disk, caches."""
    from graphrun.profile.doctor import examine
    from graphrun.report.doctor import doctor_screen

    found = examine(cache_folder(no_cache))
    show(found, as_json, doctor_screen(found))


@app.command()
def calibrate(
    device: Annotated[
        str | None, typer.Option(help="cuda, sim or cpu; default: the card found, else cpu.", show_default=False)
    ] = None,
    name: Annotated[str, typer.Option(help="The profile's name; default: the device's.", show_default=False)] = "",
    seconds: Annotated[float, typer.Option(help="How long measuring may take.", min=0.1)] = 20.0,
    as_json: AsJson = False,
) -> None:
    """Measure this machine in under 30 s and save a profile: used with --hardware NAME, and by default for its card."""
    from graphrun.profile.calibrate import measure_and_keep
    from graphrun.report.calibrate import calibrate_screen

    if device not in (None, "cuda", "sim", "cpu"):
        raise InputError(f"device {device!r} cannot be calibrated; it is cuda, sim or cpu")
    found = measure_and_keep(device, cache_folder(False) or Path(), name, seconds)  # type: ignore[arg-type]
    show(found, as_json, calibrate_screen(found))

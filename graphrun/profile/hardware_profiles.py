"""Profiles of measured devices, kept as files beside the cache: by name, and for the device that is found.

    <cache>/profiles/<name>.json     {"hardware": {...}, "device": name of the card it was measured on, "figures": {...}, ...}

A file that does not read back as a profile is no profile. Measures nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graphrun.errors import InputError
from graphrun.model.problem import Hardware
from graphrun.profile import hardware as devices


def kept(cache: Path | None) -> dict[str, Hardware]:
    """Every profile by name, the one written last first."""
    return {profile["hardware"].name: profile["hardware"] for profile in _profiles(cache)}


def keep(cache: Path, hardware: Hardware, device: str, facts: Mapping[str, Any]) -> Path:
    """Write a profile measured on the card called ``device``. Raises InputError for a name that is taken or cannot be a file's."""
    if hardware.name in devices.priors():
        raise InputError(f"{hardware.name} is the name of a prior: give the profile another one with --name")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", hardware.name):
        raise InputError(f"{hardware.name!r} cannot be a profile's name: letters, digits, dots and dashes, at most 64")
    path = cache / "profiles" / f"{hardware.name}.json"
    text = json.dumps({**facts, "device": device, "hardware": asdict(hardware)}, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(text)
        new.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def hardware(name: str, cache: Path | None) -> Hardware:
    """The profile called ``name``, else the prior. InputError naming the nearest one if there is neither."""
    known = kept(cache)
    return known[name] if name in known else devices.hardware(name, known)


def found(cache: Path | None) -> Hardware | None:
    """This machine's CUDA device: by its newest profile, else by the prior that `hardware.found` takes. None without one."""
    card = devices.found()
    if card is None:
        return None
    for profile in _profiles(cache):
        measured: Hardware = profile["hardware"]
        if profile["device"] == card.name and measured.device == "cuda" and measured.capacity_bytes == card.capacity_bytes:
            return measured
    return card


def _profiles(cache: Path | None) -> list[dict[str, Any]]:
    """The contents of the files that are profiles, the one written last first."""
    made: list[tuple[int, int, dict[str, Any]]] = []
    for path in sorted((cache / "profiles").glob("*.json")) if cache is not None else []:
        try:
            data = json.loads(path.read_text())
            profile = {**data, "hardware": Hardware(**data["hardware"]), "device": str(data["device"])}
            made.append((path.stat().st_mtime_ns, len(made), profile))
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return [profile for _, _, profile in sorted(made, key=lambda item: item[:2], reverse=True)]


def chosen(given: str | Hardware | None, cache: Path | None) -> Hardware:
    """The hardware meant: as it is, by name (a profile or a prior), or where nothing is given the card found, else a prior."""
    if given is None:
        return found(cache) or devices.hardware(devices.DEFAULT)
    return hardware(given, cache) if isinstance(given, str) else given

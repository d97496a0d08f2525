"""Hardware profiles of measured devices, stored as files in the cache folder.

    <cache>/profiles/<name>.json     {"hardware": {...}, "device": name of the measured card,
                                     "figures": {...}, ...}

A profile is found by its name, or for this machine's device. A file that cannot be read as a
profile, or lacks rates that this version uses, is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from graphrun.device_kinds import DeviceKind
from graphrun.errors import InputError
from graphrun.files import write_whole
from graphrun.host_ram import total_ram_bytes
from graphrun.model.hardware import Hardware, KernelRates, ProcessorRates
from graphrun.profile import hardware as devices
from graphrun.profile import processor
from graphrun.reading import read_json, validated


def stored_profiles(cache: Path | None) -> dict[str, Hardware]:
    """Return all profiles by name, the most recently written first."""
    return {profile["hardware"].name: profile["hardware"] for profile in _profiles(cache)}


def keep(cache: Path, hardware: Hardware, device: str, record: Mapping[str, Any]) -> Path:
    """Write a profile that was measured on the card called ``device``, and return its path.

    ``device``: for a CPU its `processor.cpu_key`. Raises InputError for a name that is taken or not
    valid as a file name, or if the file cannot be written.
    """
    refuse_taken(hardware.name)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", hardware.name):
        raise InputError(
            f"{hardware.name!r} is no valid profile name: use letters, digits, dots, dashes "
            "and underscores, at most 64"
        )
    path = cache / "profiles" / f"{hardware.name}.json"
    text = json.dumps({**record, "device": device, "hardware": asdict(hardware)}, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def refuse_taken(name: str) -> None:
    """Raise InputError if ``name`` is the name of a data-sheet estimate (`hardware`)."""
    if name in devices.data_sheet_estimates():
        raise InputError(f"{name} is the name of a built-in card: choose another name with --name")


def hardware(name: str, cache: Path | None) -> Hardware:
    """Return the profile called ``name``, else the estimate, else raise InputError."""
    profiles_by_name = stored_profiles(cache)
    return (
        profiles_by_name[name]
        if name in profiles_by_name
        else devices.hardware(name, profiles_by_name)
    )


def detect_card(cache: Path | None, kind: DeviceKind | None = None) -> Hardware | None:
    """Return this machine's device (default: first card) with its latest profile, or None."""
    card = devices.detect(kind)
    if card is None or card.kind.has_virtual_clock:
        return card
    for profile in _profiles(cache):
        profile_hardware: Hardware = profile["hardware"]
        if (
            profile["device"] == card.name
            and profile_hardware.device == card.device
            and profile_hardware.capacity_bytes == card.capacity_bytes
        ):
            return profile_hardware
    return card


def detect_cpu(cache: Path | None) -> Hardware:
    """Return this machine's CPU, from its most recent profile if any, else the data-sheet estimate.

    A profile counts if it was measured with this model of CPU, as many threads and this PyTorch.
    """
    key = processor.cpu_key()
    for profile in _profiles(cache):
        profile_hardware: Hardware = profile["hardware"]
        if profile["device"] == key and profile_hardware.kind.is_host:
            return replace(profile_hardware, capacity_bytes=total_ram_bytes())
    return processor.cpu_estimate()


def other_cpu_profiles(cache: Path | None) -> list[str]:
    """Return the names of profiles that were measured on another CPU, or otherwise."""
    key = processor.cpu_key()
    return [
        profile["hardware"].name
        for profile in _profiles(cache)
        if profile["hardware"].kind.is_host and profile["device"] != key
    ]


def _has_all_classes(kernels: KernelRates | ProcessorRates | None) -> bool:
    """Return whether a profile has the rates that estimates of a CPU have: others were measured by
    another version of graphrun."""
    estimate = processor.cpu_estimate().kernels
    if not isinstance(kernels, ProcessorRates) or not isinstance(estimate, ProcessorRates):
        return True
    return dict(estimate.rates).keys() <= dict(kernels.rates).keys()


def _profiles(cache: Path | None) -> list[dict[str, Any]]:
    """Return the contents of all valid profile files, the most recently written first."""
    dated_profiles: list[tuple[int, dict[str, Any]]] = []
    for path in sorted((cache / "profiles").glob("*.json")) if cache is not None else []:
        try:
            data = read_json(path)
            profile_hardware = validated(Hardware, data["hardware"])
            if _has_all_classes(profile_hardware.kernels):
                if isinstance(profile_hardware.kernels, ProcessorRates):
                    profile_hardware = processor.in_this_process(profile_hardware)
                profile = {**data, "hardware": profile_hardware, "device": str(data["device"])}
                dated_profiles.append((path.stat().st_mtime_ns, profile))
        except (InputError, OSError, TypeError, ValueError, KeyError):
            continue
    return [profile for _, profile in reversed(sorted(dated_profiles, key=lambda item: item[0]))]

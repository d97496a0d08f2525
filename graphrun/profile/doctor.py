"""Reports what graphrun finds on this machine and what of it is unsupported. Measures nothing: `calibrate` does.

Returns plain data; `graphrun.report.machine_screens` formats it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from graphrun.files import Store
from graphrun.profile import hardware
from graphrun.profile import hardware_profiles as profiles
from graphrun.profile.host_ram import available_bytes, host_ram_bytes, memory_limits
from graphrun.profile.precision import NEEDS, flags, new_enough
from graphrun.systems import pinned_limit_bytes
from graphrun.units import GIB, show_size


class Rule(NamedTuple):
    """What a ``package`` ``provides`` from the version ``since`` on, and what is so ``before`` it."""

    package: str
    since: str
    provides: str
    before: str


# Sources: bitsandbytes' release notes 0.43.2 (4-bit modules move between devices) and 0.48 (8-bit ones do; accelerate and
# transformers blocked that on some paths); the others are the versions that graphrun's own code needs and is tested with.
RULES = (
    Rule("torch", "2.11", "a device written in Python (sim), expandable segments", "older versions are untested"),
    Rule("diffusers", "0.42", "the pipelines that the reference graphs name", "older versions are untested"),
    Rule(
        "transformers",
        "5.20",
        "text encoders from configs, in the dtypes that from_pretrained gives",
        "older versions are untested",
    ),
    Rule("transformers", "4.58", "8-bit modules move", "8-bit text encoders may refuse to move"),
    Rule("accelerate", "1.13", "8-bit modules move", "8-bit modules that accelerate dispatched may refuse to move"),
    Rule("bitsandbytes", "0.43.2", "4-bit modules (nf4) move", "4-bit modules stay on the device where they are made"),
    Rule(
        "bitsandbytes", "0.48", "8-bit modules move", "8-bit modules stay on the device where they are made until they are deleted"
    ),
)
WITHOUT = {
    "torch": "nothing runs",
    "diffusers": "no pipeline can be planned or run",
    "transformers": "no text encoder can be planned or run",
    "accelerate": "large components take twice their memory while they are read",
    "bitsandbytes": "no nf4 and no int8 components",
}


def examine(cache: Path | None) -> dict[str, Any]:
    """Everything that was found, JSON-ready: device, versions, memory, disk, cache, and ``problems``, texts for the user to
    act on."""
    versions = [about(name, _version(name)) for name in WITHOUT]
    device, memory, disk = _device(), _memory(), _disk(cache)
    problems = [
        *(f"{item['name']} {item['version'] or 'is not installed'}: {text}" for item in versions for text in item["breaks"]),
        *device.pop("problems"),
        *_memory_problems(memory, device),
    ]
    store = Store(cache).entries() if cache is not None else []
    return {
        "python": sys.version.split()[0],
        "platform": sys.platform,
        "device": device,
        "versions": versions,
        "precisions": {name: asdict(flags(name, {of["name"]: of["version"] for of in versions})) for name in NEEDS},
        "memory": memory,
        "disk": disk,
        "cache": {
            "folder": str(cache) if cache is not None else None,
            "entries": len(store),
            "nbytes": sum(path.stat().st_size for path in store if path.is_file()),
        },
        "profiles": list(profiles.kept(cache)),
        "problems": problems,
    }


def about(name: str, installed: str | None) -> dict[str, Any]:
    """What version ``installed`` of the package ``name`` supports (``allows``) and does not (``breaks``). None: it is not
    installed."""
    if installed is None:
        return {"name": name, "version": None, "allows": [], "breaks": [WITHOUT[name]]}
    rules = [rule for rule in RULES if rule.package == name]
    allows = [rule.provides for rule in rules if new_enough(installed, rule.since)]
    breaks = [f"{rule.before} (needs {rule.since})" for rule in rules if not new_enough(installed, rule.since)]
    return {"name": name, "version": installed, "allows": allows, "breaks": breaks}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device() -> dict[str, Any]:
    """The CUDA device, its driver, and whether the simulated accelerator works here."""
    import torch

    from graphrun import sim

    problems = []
    nodes = [node for node in hardware.DEVICE_NODES if Path(node).exists()]
    found = hardware.found()
    if found is None and nodes:
        why = "this torch is built for the CPU" if torch.version.cuda is None else "torch cannot open it: is the driver new enough?"
        problems.append(f"there is a device ({', '.join(nodes)}), and {why}")
    if not sim.available():
        problems.append(
            "the simulated accelerator is not available: torch is too old for Python devices, or another backend uses PrivateUse1"
        )
    card: dict[str, Any] | None = None
    if found is not None:
        free_bytes, total_bytes = torch.cuda.mem_get_info(0)
        major, minor = torch.cuda.get_device_capability(0)
        card = {**asdict(found), "free_bytes": free_bytes, "total_bytes": total_bytes, "capability": f"{major}.{minor}"}
        if (major, minor) < (8, 0):
            problems.append(f"{found.name} (compute capability {major}.{minor}) has no bfloat16 units: use float16")
    return {
        "card": card,
        "driver": driver(),
        "cuda": torch.version.cuda,
        "sim": sim.available(),
        "problems": problems,
    }


def driver(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of the NVIDIA kernel module, such as ``570.86.15``; None without one."""
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), None)


def _memory() -> dict[str, Any]:
    whole = psutil.virtual_memory()
    return {
        "total_bytes": int(whole.total),
        "available_bytes": available_bytes(),
        "swap_bytes": int(psutil.swap_memory().total),
        "usable_bytes": host_ram_bytes(),
        "limits": [asdict(limit) for limit in memory_limits()],
        "pinned_limit_bytes": pinned_limit_bytes(),
    }


def _memory_problems(memory: Mapping[str, Any], device: Mapping[str, Any]) -> list[str]:
    problems = []
    pinned = memory["pinned_limit_bytes"]
    if device["card"] is not None and pinned is not None and pinned < memory["usable_bytes"] // 2:
        text = (
            f"this process may lock {show_size(pinned)} of memory (ulimit -l); raise it if a run reports that pinning was refused"
        )
        problems.append(text)
    for limit in memory["limits"][:1]:
        if limit["nbytes"] < memory["total_bytes"]:
            left = f"--ram auto uses what is left of it, now {show_size(memory['usable_bytes'])}"
            problems.append(f"{limit['path']} limits this process to {show_size(limit['nbytes'])}: {left}")
    return problems


def _disk(cache: Path | None) -> list[dict[str, Any]]:
    """Free bytes on the disks of the working directory and of the cache."""
    found = []
    for folder in (Path.cwd(), *([cache] if cache is not None else [])):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        usage = shutil.disk_usage(existing)
        found.append({"folder": str(folder), "free_bytes": usage.free, "total_bytes": usage.total, "low": usage.free < 2 * GIB})
    return found

"""Check this machine for what graphrun needs, and say what to type. Measures nothing."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
from huggingface_hub.constants import HF_HUB_CACHE

from graphrun import device_kinds
from graphrun.disk_store import Store
from graphrun.errors import InputError
from graphrun.extras import install_command
from graphrun.host_ram import host_ram_bytes
from graphrun.kernel_memory import available_bytes, memory_limits
from graphrun.memory_group import enforceable
from graphrun.model.hardware import Hardware, ProcessorRates
from graphrun.profile import hardware
from graphrun.profile import hardware_profiles as profiles
from graphrun.profile.precision import NEEDS, flags, new_enough
from graphrun.profile.processor import bfloat16_instructions, core_count
from graphrun.systems import huge_pages_mode, pinned_limit_bytes, reads_directly
from graphrun.units import GIB, show_size


class Rule(NamedTuple):
    """A feature of a package; ``limitation``: what applies before ``first_version``."""

    package: str
    first_version: str
    provides: str
    limitation: str


# Sources: bitsandbytes' release notes 0.43.2 (4-bit modules move between devices) and 0.48 (8-bit
# modules move; accelerate and transformers blocked that on some paths). The others are the versions
# that graphrun is tested with.
RULES = (
    Rule(
        "torch",
        "2.11",
        "a device written in Python (sim), expandable segments",
        "older versions are untested",
    ),
    Rule(
        "diffusers",
        "0.42",
        "the pipelines that the reference graphs name",
        "older versions are untested",
    ),
    Rule(
        "transformers",
        "5.20",
        "text encoders from configs, in the dtypes that from_pretrained gives",
        "older versions are untested",
    ),
    Rule("transformers", "4.58", "8-bit modules move", "8-bit text encoders may refuse to move"),
    Rule(
        "accelerate",
        "1.13",
        "8-bit modules move",
        "8-bit modules that accelerate dispatched may refuse to move",
    ),
    Rule(
        "bitsandbytes",
        "0.43.2",
        "4-bit modules (nf4) move",
        "4-bit modules stay on the device where they are made",
    ),
    Rule(
        "bitsandbytes",
        "0.48",
        "8-bit modules move",
        "8-bit modules stay on the device where they are made until they are deleted",
    ),
)
WITHOUT = {
    "torch": "nothing runs",
    "diffusers": "no pipeline can be planned or run",
    "transformers": "no text encoder can be planned or run",
    "accelerate": "large components take twice their memory while they are read",
    "bitsandbytes": "no nf4 and no int8 components",
}
RUN_ANYWAY = "graphrun plan flux-schnell --device cpu --memory auto"
TORCH_BUILDS = "https://pytorch.org/get-started/locally"


@dataclass(frozen=True, slots=True)
class Check:
    """The verdict on one thing.

    ``verdict``: ``note`` means a limit, or something missing that is not needed. ``fix``: what to
    type or do, or empty.
    """

    name: str
    verdict: Literal["ok", "note", "problem"]
    text: str
    fix: str = ""


def examine(cache: Path | None) -> dict[str, Any]:
    """Return all findings, JSON-ready, with the texts of the checks that are ``problems``."""
    versions = [package_status(name, _version(name)) for name in WITHOUT]
    device, memory, disk = _device(), _memory(), _disk(cache)
    processor = _processor(cache)
    findings = {
        "python": sys.version.split()[0],
        "platform": sys.platform,
        "device": device,
        "versions": versions,
        "precisions": {
            name: asdict(flags(name, {package["name"]: package["version"] for package in versions}))
            for name in NEEDS
        },
        "processor": processor,
        "memory": memory,
        "disk": disk,
        "cache": _cache(cache),
        "profiles": list(profiles.stored_profiles(cache)),
        "other_cpu_profiles": profiles.other_cpu_profiles(cache),
    }
    checks = list(_checks(findings))
    problems = [f"{check.name}: {check.text}" for check in checks if check.verdict == "problem"]
    return {**findings, "checks": [asdict(check) for check in checks], "problems": problems}


def _checks(findings: Mapping[str, Any]) -> Iterator[Check]:
    yield Check("python", "ok", f"{findings['python']} on {findings['platform']}")
    yield device_check(findings["device"])
    card = findings["device"]["card"]
    if card is not None and card["capability"] is not None and float(card["capability"]) < 8:
        text = (
            f"{card['name']} (compute capability {card['capability']}) has no bfloat16 units: use "
            "float16"
        )
        yield Check(
            "bfloat16", "problem", text, "write dtype: float16 for each component of the graph file"
        )
    if findings["device"]["sim"]:
        yield Check("simulated", "ok", "--device sim works")
    else:
        text = (
            "--device sim does not work: torch has no Python devices, or another backend uses "
            "PrivateUse1"
        )
        yield Check(
            "simulated", "problem", text, f"pip install -U 'torch>={RULES[0].first_version}'"
        )
    yield from processor_checks(findings["processor"])
    yield from memory_checks(findings["memory"], card=card is not None)
    yield from map(_disk_check, findings["disk"])
    yield _cache_check(findings["cache"])
    yield from _profile_checks(
        findings["profiles"], findings["other_cpu_profiles"], card=card is not None
    )
    yield from (
        _precision_check(name, precision_flags)
        for name, precision_flags in findings["precisions"].items()
    )
    yield from map(_version_check, findings["versions"])


def package_status(name: str, installed: str | None) -> dict[str, Any]:
    """Return what version ``installed`` of a package supports and does not; None: absent.

    ``needs``: the version that supports everything.
    """
    rules = [rule for rule in RULES if rule.package == name]
    needs = rules[-1].first_version
    if installed is None:
        return {
            "name": name,
            "version": None,
            "allows": [],
            "breaks": [WITHOUT[name]],
            "needs": needs,
        }
    allows = [rule.provides for rule in rules if new_enough(installed, rule.first_version)]
    breaks = [
        f"{rule.limitation} (needs {rule.first_version})"
        for rule in rules
        if not new_enough(installed, rule.first_version)
    ]
    return {"name": name, "version": installed, "allows": allows, "breaks": breaks, "needs": needs}


def _version_check(package: Mapping[str, Any]) -> Check:
    version_text = package["version"] or "not installed"
    if not package["breaks"]:
        return Check(package["name"], "ok", f"{version_text}: {'; '.join(package['allows'])}")
    fix = f"pip install -U '{package['name']}>={package['needs']}'"
    return Check(package["name"], "problem", f"{version_text}: {'; '.join(package['breaks'])}", fix)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device() -> dict[str, Any]:
    """Return the device that torch opens, its driver, signs of a card, and `sim` support."""
    import torch

    from graphrun import sim

    kinds, card = device_kinds.built_in(), hardware.detect_card()
    tool = shutil.which("nvidia-smi")
    return {
        "card": None if card is None else _card(card),
        "driver": driver(),
        "cuda": torch.version.cuda,
        "build": torch_build(torch.version),
        "signs": [
            *dict.fromkeys(sign for kind in kinds for sign in kind.signs if Path(sign).exists()),
            *([tool] if tool else []),
        ],
        **{kind.name: sim.available() for kind in kinds if kind.has_virtual_clock},
    }


def _card(card: Hardware) -> dict[str, Any]:
    """Return the figures of this machine's card.

    ``capability``: NVIDIA's compute capability. ``architecture``: the same as text, or AMD's name,
    such as gfx1100. Both are None for other vendors.
    """
    import torch

    memory_of = getattr(torch.get_device_module(card.device), "mem_get_info", None)
    free_bytes, total_bytes = (
        (host_ram_bytes(), card.capacity_bytes)
        if memory_of is None or card.unified
        else memory_of(0)
    )
    capability = architecture = None
    if card.kind.visibility:  # a card of torch.cuda
        properties: Any = torch.cuda.get_device_properties(0)
        capability = None if torch.version.hip else f"{properties.major}.{properties.minor}"
        architecture = (
            properties.gcnArchName.partition(":")[0]
            if torch.version.hip
            else f"compute capability {capability}"
        )
    return {
        **asdict(card),
        "free_bytes": free_bytes,
        "total_bytes": total_bytes,
        "capability": capability,
        "architecture": architecture,
    }


def torch_build(versions: Any) -> str:
    """Return what torch is built for: ``CUDA 12.8``, ``ROCm 6.4``, ``XPU 2025``, ``the CPU``."""
    for attribute, name in (("hip", "ROCm"), ("xpu", "XPU"), ("cuda", "CUDA")):
        if number := getattr(versions, attribute, None):
            return f"{name} {number}"
    return "the CPU"


def device_check(device: Mapping[str, Any]) -> Check:
    """Check whether torch opens a device. If not, say why, and what to install or try."""
    build, card, signs = device["build"], device["card"], device["signs"]
    if card is not None:
        free = f"{show_size(card['free_bytes'])} of {show_size(card['total_bytes'])} free"
        driver_text = f"driver {device['driver']}" if device["driver"] else ""
        parts = (card["name"], free, card["architecture"], driver_text, build)
        return Check("device", "ok", ", ".join(filter(None, parts)))
    kinds = _builds_for(signs)
    is_xpu = build.startswith("XPU")
    if not signs or (kinds == ("XPU",) and not is_xpu):
        # most machines with an Intel processor have its graphics and another torch
        hint = f"; torch for XPU opens the Intel GPU here: {TORCH_BUILDS}" if signs else ""
        label = "XPU" if is_xpu else "CUDA"
        return Check(
            "device",
            "note",
            f"no {label} device; this torch is built for {build}{hint}",
            RUN_ANYWAY,
        )
    if build.partition(" ")[0] not in kinds:
        fix = f"install torch for {' or '.join(kinds)}: {TORCH_BUILDS}"
        return Check(
            "device",
            "problem",
            f"there is a device ({', '.join(signs)}), and this torch is built for {build}",
            fix,
        )
    text = f"there is a device ({', '.join(signs)}), and torch, built for {build}, cannot open it"
    if build.startswith("ROCm") or (is_xpu and kinds == ("XPU",)):
        text += ": may this user open it? Log in again afterwards"
        return Check("device", "problem", text, "sudo usermod -aG render,video $USER")
    return Check("device", "problem", f"{text}: is the driver new enough?", "nvidia-smi")


def _builds_for(signs: Sequence[str]) -> tuple[str, ...]:
    """Return the builds of torch that open the card with these ``signs``, the best card's first."""
    # the Windows Subsystem for Linux does not say which vendor's card it is
    vendor_signs = [sign for sign in signs if sign != "/dev/dxg"]
    if not vendor_signs:
        return "CUDA", "ROCm", "XPU"
    if all(sign.startswith("/sys/module/") for sign in vendor_signs):
        return ("XPU",)
    is_amd = all(sign == "/dev/kfd" or sign.startswith("/sys/") for sign in vendor_signs)
    return ("ROCm",) if is_amd else ("CUDA",)


def driver(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of the NVIDIA kernel module, such as ``570.86.15``; None without one."""
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), None)


def _processor(cache: Path | None) -> dict[str, Any]:
    """Return what the device ``cpu`` can do here.

    ``bfloat16_is_slow``: computing in it takes longer than in float32, by the profile or data
    sheet.
    ``huge_pages``: what gets them (`huge_pages_mode`).
    ``direct_reads``: whether the folders' file systems have reads past the page cache; None where
    that cannot be tried. ``unenforceable``: why ``run --enforce`` cannot limit memory, or "".
    """
    cpu = profiles.detect_cpu(cache)
    assert isinstance(cpu.kernels, ProcessorRates)
    folders = [Path(HF_HUB_CACHE), *([cache] if cache is not None else [])]
    return {
        "name": cpu.name,
        "basis": cpu.basis,
        "cores": core_count(),
        "bfloat16_instructions": list(bfloat16_instructions()),
        "bfloat16_is_slow": cpu.kernels.is_slow("bfloat16"),
        "huge_pages": huge_pages_mode(),
        "unenforceable": enforceable(),
        "direct_reads": [
            {"folder": str(folder), "direct": _direct_reads(folder)} for folder in folders
        ],
    }


def _direct_reads(folder: Path) -> bool | None:
    existing_folder = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        return reads_directly(existing_folder)
    except OSError:
        return None


def processor_checks(processor: Mapping[str, Any]) -> Iterator[Check]:
    """Check the device ``cpu``: instructions, calibration, huge pages, --enforce, and reads of
    weights."""
    cores, instructions = f"{processor['cores']} cores", processor["bfloat16_instructions"]
    ability = f"bfloat16 by {', '.join(instructions)}" if instructions else "no bfloat16"
    if processor["bfloat16_is_slow"]:
        reason = ", which is slower than float32 here" if instructions else ""
        yield Check("cpu", "note", f"{cores}, {ability}{reason}: graphs compute in float32")
    else:
        yield Check("cpu", "ok", f"{cores}, {ability}")
    if processor["basis"] == "data sheet":
        text = "not calibrated: seconds on the CPU are data-sheet estimates"
        yield Check("calibration", "note", text, "graphrun calibrate --device cpu")
    else:
        yield Check("calibration", "ok", f"profile {processor['name']} ({processor['basis']})")
    if processor["huge_pages"] == "never":
        text = "transparent huge pages are off: decoding on the CPU takes longer"
        command = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        yield Check("huge pages", "note", text, command)
    if reason := processor["unenforceable"]:
        yield Check("enforce", "note", f"run --enforce has no effect here: {reason}")
    else:
        yield Check("enforce", "ok", "run --enforce limits a run to its --memory by a cgroup")
    for row in processor["direct_reads"]:
        folder, is_direct = row["folder"], row["direct"]
        if is_direct:
            yield Check("reads", "ok", f"past the page cache (O_DIRECT) in {folder}")
        elif is_direct is None:
            yield Check("reads", "note", f"O_DIRECT is not known: no file can be made in {folder}")
        else:
            text = (
                f"no O_DIRECT in {folder}: weights there are read through the page cache, which "
                "takes more CPU time"
            )
            yield Check("reads", "note", text)


def _memory() -> dict[str, Any]:
    whole = psutil.virtual_memory()
    return {
        "total_bytes": int(whole.total),
        "available_bytes": available_bytes(),
        "swap_bytes": int(psutil.swap_memory().total),
        "usable_bytes": host_ram_bytes(),
        "auto_bytes": hardware.budget_of(hardware.available_memory()),
        "limits": [asdict(limit) for limit in memory_limits()],
        "pinned_limit_bytes": pinned_limit_bytes(),
    }


def memory_checks(memory: Mapping[str, Any], *, card: bool) -> Iterator[Check]:
    """Check RAM, swap and limits; ``card``: whether a device copies from locked pages."""
    usable, budget, available, total, swap = (
        show_size(memory[f"{name}_bytes"])
        for name in ("usable", "auto", "available", "total", "swap")
    )
    text = f"{available} of {total} available; --memory auto is {budget}, --ram auto {usable}"
    yield Check("memory", "ok", text)
    yield Check("swap", "ok", f"{swap}: ignored")
    for limit in memory["limits"]:
        text = (
            f"v{limit['version']}: {show_size(limit['nbytes'])} ({show_size(limit['used_bytes'])} "
            f"used) {limit['path']}"
        )
        if limit["nbytes"] < memory["total_bytes"]:
            yield Check("cgroup", "note", f"{text}; --memory and --ram auto use what is left of it")
        else:
            yield Check("cgroup", "ok", text)
    if not memory["limits"]:
        yield Check("cgroup", "ok", "no limit")
    pinned = memory["pinned_limit_bytes"]
    if pinned is None:
        yield Check("pinned", "ok", "no limit")
    elif card and pinned < memory["usable_bytes"] // 2:
        text = (
            f"this process may lock {show_size(pinned)}; raise it if a run reports that pinning "
            "was refused"
        )
        yield Check("pinned", "note", text, "ulimit -l unlimited")
    else:
        yield Check("pinned", "ok", f"{show_size(pinned)} (RLIMIT_MEMLOCK)")


def _disk(cache: Path | None) -> list[dict[str, Any]]:
    """Return the free bytes on the disks of the working directory and of the cache."""
    disks = []
    for folder in (Path.cwd(), *([cache] if cache is not None else [])):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        usage = shutil.disk_usage(existing)
        disks.append(
            {
                "folder": str(folder),
                "free_bytes": usage.free,
                "total_bytes": usage.total,
                "low": usage.free < 2 * GIB,
            }
        )
    return disks


def _disk_check(disk: Mapping[str, Any]) -> Check:
    text = f"{show_size(disk['free_bytes'])} free at {disk['folder']}"
    return (
        Check("disk", "problem", text, "graphrun cache rm --all")
        if disk["low"]
        else Check("disk", "ok", text)
    )


def _cache(cache: Path | None) -> dict[str, Any]:
    """Return the counts of the cache of dry runs and plans; an unreadable one counts as empty."""
    if cache is None:
        return {"folder": None, "entries": 0, "nbytes": 0}
    sizes: list[int] = []
    with contextlib.suppress(InputError):
        sizes = [entry.nbytes for entry in Store(cache).entries()]
    return {"folder": str(cache), "entries": len(sizes), "nbytes": sum(sizes)}


def _cache_check(cache: Mapping[str, Any]) -> Check:
    if cache["folder"] is None:
        return Check("cache", "note", "off (--no-cache)")
    return Check(
        "cache",
        "ok",
        f"{cache['entries']} entries, {show_size(cache['nbytes'])} in {cache['folder']}",
    )


def _profile_checks(
    names: Sequence[str], other_cpu_names: Sequence[str], *, card: bool
) -> Iterator[Check]:
    yield from (Check("profile", "ok", name) for name in names if name not in other_cpu_names)
    yield from (
        Check(
            "profile",
            "note",
            f"{name} was measured on another CPU, with other threads or another PyTorch: "
            "--device cpu takes data-sheet estimates",
            "graphrun calibrate --device cpu",
        )
        for name in other_cpu_names
    )
    if card and not names:
        yield Check(
            "profile",
            "note",
            "none: seconds are data-sheet estimates until this card is measured",
            "graphrun calibrate",
        )


def _precision_check(name: str, precision_flags: Mapping[str, Any]) -> Check:
    if not precision_flags["available"]:
        fix = install_command("gguf") if name == "gguf" else ""
        return Check(name, "note", f"unavailable: {precision_flags['reason']}", fix)
    may = {
        "movable": "moves",
        "streamable": "is streamed by blocks",
        "disk_able": "may stay on disk",
    }
    text = ", ".join(text for key, text in may.items() if precision_flags[key])
    return Check(name, "ok", text) if text else Check(name, "note", precision_flags["reason"])

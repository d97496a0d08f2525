"""Screens about this machine: ``graphrun doctor``, with problems last, and ``graphrun calibrate``, measured beside assumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphrun.report.table import table
from graphrun.units import show_size


def calibrate_screen(found: Mapping[str, Any]) -> str:
    """The result of `graphrun.profile.calibrate.measure_and_keep` as text. For a CPU there are no assumed figures."""
    rows, figures = [["", "measured", "assumed"]], found["figures"]
    for name, title in (
        ("h2d_bytes_per_second", "host to device, pinned"),
        ("pageable_bytes_per_second", "host to device, pageable"),
        ("d2h_bytes_per_second", "device to host, pinned"),
        ("bidirectional", "host to device, during copies back"),
        ("copy_start_seconds", "latency of a copy"),
        ("disk_bytes_per_second", "disk, cold"),
        ("flops_per_second", "compute"),
        ("context_bytes", "context"),
    ):
        rows.append([title, *(_show(name, of[name]) if of is not None else "-" for of in (found["hardware"], found["assumed"]))])
    single = ", ".join(f"{name} {_show('flops', figures[f'{name}_flops_per_second'])}" for name in ("matmul", "attention"))
    title = f"profile {found['hardware']['name']}  measured in {found['measured_in_seconds']:.1f} s"
    return "\n".join([title, "", table(rows, {0}), "", f" compute: {single}", f" saved in {found['path']}"])


def _show(name: str, value: float) -> str:
    if name == "bidirectional":
        return f"{value:.0%}"
    if name == "copy_start_seconds":
        return f"{1e6 * value:.1f} us"
    if "flops" in name:
        return f"{value / 1e12:.2f} TFLOP/s" if value >= 1e11 else f"{value / 1e9:.2f} GFLOP/s"
    return show_size(value) if name == "context_bytes" else f"{value / 1e9:.2f} GB/s"


def doctor_screen(found: Mapping[str, Any]) -> str:
    """The result of `graphrun.profile.doctor.examine` as text."""
    memory = found["memory"]
    pinned = memory["pinned_limit_bytes"]
    rows = [
        ["python", f"{found['python']} on {found['platform']}"],
        ["device", _card(found["device"])],
        ["simulated", "works" if found["device"]["sim"] else "does not work here"],
        [
            "RAM",
            f"{show_size(memory['usable_bytes'])} for --ram auto, {show_size(memory['available_bytes'])} of "
            f"{show_size(memory['total_bytes'])} available",
        ],
        ["swap", f"{show_size(memory['swap_bytes'])}, which does not count"],
    ]
    for limit in memory["limits"]:
        rows.append(
            [f"cgroup v{limit['version']}", f"{show_size(limit['nbytes'])} ({show_size(limit['used_bytes'])} used) {limit['path']}"]
        )
    if not memory["limits"]:
        rows.append(["cgroup", "no limit"])
    rows.append(["pinned", "no limit" if pinned is None else f"{show_size(pinned)} (RLIMIT_MEMLOCK)"])
    rows += [["disk", f"{show_size(disk['free_bytes'])} free at {disk['folder']}"] for disk in found["disk"]]
    cache = found["cache"]
    content = f"{cache['entries']} entries, {show_size(cache['nbytes'])} in {cache['folder']}"
    rows.append(["cache", content if cache["folder"] else "off"])
    rows += [["profile", text] for text in found["profiles"]]
    rows += [["precision", f"{name}: {_precision(of)}"] for name, of in found["precisions"].items()]
    versions = [["", item["name"], item["version"] or "-", "; ".join(item["allows"]) or "-"] for item in found["versions"]]
    lines = [table(rows, {0, 1}), "", table([["", "package", "version", "allows"], *versions], {0, 1, 2, 3})]
    if found["problems"]:
        lines += ["", *(f" ! {text}" for text in found["problems"])]
    else:
        lines += ["", " no problems found"]
    return "\n".join(lines)


def _precision(of: Mapping[str, Any]) -> str:
    if not of["available"]:
        return f"unavailable: {of['reason']}"
    may = ", ".join(
        text
        for key, text in (("movable", "moves"), ("streamable", "is streamed by blocks"), ("disk_able", "may stay on disk"))
        if of[key]
    )
    return may or of["reason"]


def _card(device: Mapping[str, Any]) -> str:
    card = device["card"]
    if card is None:
        return f"no CUDA device (torch's CUDA: {device['cuda'] or 'none, a CPU build'}; driver: {device['driver'] or 'none'})"
    free = f"{show_size(card['free_bytes'])} of {show_size(card['total_bytes'])} free"
    return f"{card['name']}, {free}, compute capability {card['capability']}, driver {device['driver']}, CUDA {device['cuda']}"

"""Screens about this machine: ``graphrun doctor``, problems first, and ``graphrun calibrate``, measured beside assumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphrun.report.table import table
from graphrun.units import show_size


def calibrate_screen(found: Mapping[str, Any]) -> str:
    """The result of `graphrun.profile.calibrate.measure_and_keep` as text. For a CPU there are no assumed figures."""
    rows, figures = [["", "measured", "assumed"]], found["figures"]
    for name, title, show in (
        ("h2d_bytes_per_second", "host to device, pinned", _bandwidth),
        ("pageable_bytes_per_second", "host to device, pageable", _bandwidth),
        ("d2h_bytes_per_second", "device to host, pinned", _bandwidth),
        ("bidirectional", "host to device, during copies back", "{:.0%}".format),
        ("copy_start_seconds", "latency of a copy", lambda seconds: f"{1e6 * seconds:.1f} us"),
        ("disk_bytes_per_second", "disk, cold", _bandwidth),
        ("flops_per_second", "compute", _compute),
        ("context_bytes", "context", show_size),
    ):
        rows.append([title, *(show(of[name]) if of is not None else "-" for of in (found["hardware"], found["assumed"]))])
    single = ", ".join(f"{name} {_compute(figures[f'{name}_flops_per_second'])}" for name in ("matmul", "attention"))
    if found["hardware"]["compiled_gain"]:
        rows.append(["compiled blocks", f"{found['hardware']['compiled_gain']:.2f} times as fast", "-"])
    title = f"profile {found['hardware']['name']}  measured in {found['measured_in_seconds']:.1f} s"
    return "\n".join([title, "", table(rows, {0}), "", f" compute: {single}", f" saved in {found['path']}"])


def _bandwidth(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def _compute(flops: float) -> str:
    return f"{flops / 1e12:.2f} TFLOP/s" if flops >= 1e11 else f"{flops / 1e9:.2f} GFLOP/s"


def doctor_screen(found: Mapping[str, Any]) -> str:
    """The result of `graphrun.profile.doctor.examine` as text."""
    memory, cache, pinned = found["memory"], found["cache"], found["memory"]["pinned_limit_bytes"]
    usable, available, total, swap = (show_size(memory[f"{name}_bytes"]) for name in ("usable", "available", "total", "swap"))
    limits = [
        [f"cgroup v{limit['version']}", f"{show_size(limit['nbytes'])} ({show_size(limit['used_bytes'])} used) {limit['path']}"]
        for limit in memory["limits"]
    ]
    rows = [
        ["python", f"{found['python']} on {found['platform']}"],
        ["device", _card(found["device"])],
        ["simulated", "works" if found["device"]["sim"] else "does not work here"],
        ["RAM", f"{usable} for --ram auto, {available} of {total} available"],
        ["swap", f"{swap}, which does not count"],
        *(limits or [["cgroup", "no limit"]]),
        ["pinned", "no limit" if pinned is None else f"{show_size(pinned)} (RLIMIT_MEMLOCK)"],
        *(["disk", f"{show_size(disk['free_bytes'])} free at {disk['folder']}"] for disk in found["disk"]),
        [
            "cache",
            f"{cache['entries']} entries, {show_size(cache['nbytes'])} in {cache['folder']}" if cache["folder"] else "off",
        ],
        *(["profile", text] for text in found["profiles"]),
        *(["precision", f"{name}: {_precision(of)}"] for name, of in found["precisions"].items()),
    ]
    versions = [["", item["name"], item["version"] or "-", "; ".join(item["allows"]) or "-"] for item in found["versions"]]
    problems = [f"! {text}" for text in found["problems"]] or ["no problems found"]
    shown = table([["", "package", "version", "allows"], *versions], {0, 1, 2, 3})
    return "\n".join([_first(found["device"]), *problems, "", table(rows, {0, 1}), "", shown])


def _first(device: Mapping[str, Any]) -> str:
    if (card := device["card"]) is not None:
        return f"ready: {card['name']}, {show_size(card['free_bytes'])} of {show_size(card['total_bytes'])} free"
    runs = "run on the simulated accelerator (--device sim)" if device["sim"] else "do not run here"
    return f"no CUDA device: graphs can be planned for any card (--hardware),\nand {runs}"


def _precision(of: Mapping[str, Any]) -> str:
    if not of["available"]:
        return f"unavailable: {of['reason']}"
    may = {"movable": "moves", "streamable": "is streamed by blocks", "disk_able": "may stay on disk"}
    return ", ".join(text for key, text in may.items() if of[key]) or of["reason"]


def _card(device: Mapping[str, Any]) -> str:
    card = device["card"]
    if card is None:
        return f"no CUDA device (torch's CUDA: {device['cuda'] or 'none, a CPU build'}; driver: {device['driver'] or 'none'})"
    free = f"{show_size(card['free_bytes'])} of {show_size(card['total_bytes'])} free"
    return f"{card['name']}, {free}, compute capability {card['capability']}, driver {device['driver']}, CUDA {device['cuda']}"

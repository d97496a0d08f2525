"""The screen of ``graphrun calibrate``: each measured figure next to the one assumed before."""

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

"""Screens about this machine: ``graphrun doctor`` and ``graphrun calibrate``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphrun.device_kinds import kind_called
from graphrun.report.table import table
from graphrun.units import show_size


def calibrate_screen(calibration: Mapping[str, Any]) -> str:
    """Return the result of `graphrun.profile.calibrate.measure_and_keep` as text. A CPU copies
    nothing, so only compute and reads of files are shown."""
    rows, figures = [["", "measured", "assumed"]], calibration["figures"]
    is_cpu = kind_called(calibration["hardware"]["device"]).is_host
    sources = [calibration["hardware"], calibration["assumed"]]
    if is_cpu:
        sources = [source and source | dict(source["kernels"]["rates"]) for source in sources]
    for name, title, show in (
        (
            ("disk_bytes_per_second", "disk, while computing", _bandwidth),
            ("copy_start_seconds", "latency of a read", lambda seconds: f"{1e3 * seconds:.1f} ms"),
            ("matmul bfloat16", "matrix products, bf16", _compute),
            ("matmul float32", "matrix products, fp32", _compute),
            ("memory_bytes_per_second", "copies in memory", _bandwidth),
            ("first_touch_seconds", "new memory", lambda seconds: _bandwidth(1 / seconds)),
        )
        if is_cpu
        else (
            ("h2d_bytes_per_second", "host to device, pinned", _bandwidth),
            ("pageable_bytes_per_second", "host to device, pageable", _bandwidth),
            ("d2h_bytes_per_second", "device to host, pinned", _bandwidth),
            ("bidirectional", "host to device, during copies back", "{:.0%}".format),
            ("copy_start_seconds", "latency of a copy", lambda seconds: f"{1e6 * seconds:.1f} us"),
            ("disk_bytes_per_second", "disk, cold", _bandwidth),
            ("flops_per_second", "compute", _compute),
            ("context_bytes", "context", show_size),
        )
    ):
        rows.append(
            [
                title,
                *(
                    show(source[name]) if source is not None and source.get(name) else "-"
                    for source in sources
                ),
            ]
        )
    single = ", ".join(
        f"{name} {_compute(figures[f'{name}_flops_per_second'])}"
        for name in ("matmul", "attention")
    )
    if calibration["hardware"]["compiled_gain"]:
        rows.append(
            [
                "compiled blocks",
                f"{calibration['hardware']['compiled_gain']:.2f} times as fast",
                "-",
            ]
        )
    if "cpu_seconds_per_gb_read" in figures:
        single += (
            f"\n disk alone: {_bandwidth(figures['disk_alone_bytes_per_second'])}, "
            f"{figures['cpu_seconds_per_gb_read']:.3f} CPU s per GB"
        )
    title = (
        f"profile {calibration['hardware']['name']}  measured in "
        f"{calibration['measured_in_seconds']:.1f} s"
    )
    return "\n".join(
        [title, "", table(rows, {0}), "", f" compute: {single}", f" saved in {calibration['path']}"]
    )


def _bandwidth(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def _compute(flops: float) -> str:
    return f"{flops / 1e12:.2f} TFLOP/s" if flops >= 1e11 else f"{flops / 1e9:.2f} GFLOP/s"


def doctor_screen(findings: Mapping[str, Any], width: int = 80) -> str:
    """Return the result of `graphrun.profile.doctor.examine` as text: a row per check with its
    verdict, and below it what to do."""
    checks = findings["checks"]
    name_columns = max(len(check["name"]) for check in checks)
    lines = []
    for check in checks:
        head = f" {check['verdict']:7}  {check['name']:{name_columns}}  "
        fold = textwrap.TextWrapper(
            width, head, " " * len(head), break_long_words=False, break_on_hyphens=False
        )
        lines.append(fold.fill(check["text"]))
        lines += [f"{' ' * 10}next: {check['fix']}"] if check["fix"] else []
    return "\n".join(
        [
            *_verdict(
                findings["device"],
                findings["memory"],
                [check["name"] for check in checks if check["verdict"] == "problem"],
            ),
            "",
            *lines,
        ]
    )


def _verdict(
    device: Mapping[str, Any], memory: Mapping[str, Any], problems: Sequence[str]
) -> Iterator[str]:
    """Yield whether runs are possible here, and the checks that found problems."""
    if (card := device["card"]) is not None:
        yield (
            f"ready: {card['name']}, {show_size(card['free_bytes'])} of "
            f"{show_size(card['total_bytes'])} free"
        )
    else:
        yield (
            f"ready: the CPU (--device cpu) within {show_size(memory['auto_bytes'])}; no CUDA "
            "device,\nand graphs can be planned for any card (--hardware)"
        )
    yield f"problems: {', '.join(problems)}" if problems else "no problems found"

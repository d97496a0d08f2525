"""The screen of ``graphrun estimate``, made from the JSON form of the estimate."""

from __future__ import annotations

from typing import Any

from graphrun.report.screen import Look
from graphrun.report.table import Units, table
from graphrun.report.verdicts import estimate_verdict, mode_text
from graphrun.units import show_range, show_size

# column of a phase's table -> key of the estimate
SIZES = {"allocated": "allocated_bytes", "reserved": "reserved_bytes", "values": "values_bytes"}
ALL_SIZES = {
    "allocated": "allocated_bytes",
    "reserved": "reserved_bytes",
    "native": "reserved_native_bytes",
    "values": "values_bytes",
    "inputs": "input_bytes",
}
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def estimate_screen(estimate: dict[str, Any], look: Look | None = None) -> str:
    """Return the graph with its totals, a row per component, and a row per phase."""
    look = look or Look()
    return "\n\n".join(
        (
            look.first(estimate_verdict(estimate)),
            look.folded(*_head(estimate)),
            _components(estimate, look),
            _phases(estimate["phases"], verbose=look.verbose),
        )
    )


def _head(estimate: dict[str, Any]) -> tuple[str, ...]:
    hardware, mode = estimate["hardware"], estimate["mode"]
    settings = " ".join(f"{name}={value}" for name, value in estimate["settings"].items())
    overhead_bytes = hardware["context_bytes"] + hardware["workspace_bytes"]
    copy_bytes = mode["copied_in_bytes"], mode["copied_out_bytes"]
    copies = (
        f"; copies {show_size(copy_bytes[0])} to the device, {show_size(copy_bytes[1])} back"
        if any(copy_bytes)
        else ""
    )
    if mode["read_bytes"]:
        copies += (
            f"; {show_size(mode['ram_bytes'])} of RAM: reads {show_size(mode['read_bytes'])} from "
            "disk"
        )
    default_bytes = mode["reserved_bytes"] + hardware["context_bytes"]
    unreturned = (
        f" ({show_size(default_bytes)} by PyTorch's default)"
        if default_bytes > mode["peak_bytes"]
        else ""
    )
    kernel = estimate.get("attention")
    attention = f"; attention by {kernel}" if kernel else ""
    absent = f" without {', '.join(estimate['absent'])}" if estimate["absent"] else ""
    overhead = "process" if hardware["unified"] else "context and workspace"
    formats = "".join(f"  {name} in {precision}" for name, precision in mode["formats"].items())
    return (
        f"estimate {estimate['graph']}{absent}  {settings}{formats}",
        f"hardware {hardware['name']} ({hardware['basis']})  {overhead} "
        f"{show_size(overhead_bytes)}",
        f"with {mode_text(estimate)}: peak {show_size(mode['peak_bytes'])} reserved, {overhead} "
        f"included{unreturned}; weights {show_size(mode['weights_bytes'])}{copies}",
        f"predicted {show_range(mode['seconds'], mode['seconds_range'], mode['range_reason'])}"
        f"{attention}",
    )


def _components(estimate: dict[str, Any], look: Look) -> str:
    components, has_host = estimate["components"], not estimate["hardware"]["unified"]
    units = Units(max(row["weights"][row["dtype"]]["bytes"] for row in components))
    rows, sources = (
        [
            [
                "component",
                "millions",
                "16 bit",
                "32 bit",
                "int8",
                "nf4",
                *(["host"] if has_host else []),
                "blocks",
            ]
        ],
        [],
    )
    for row in components:
        half = row["dtype"] if row["dtype"] != "float32" else "bfloat16"
        weights = [row["weights"][precision] for precision in (half, "float32", "int8", "nf4")]
        cells = [
            units.row(weight["bytes"])[0] + ("*" if weight["allowed"] else " ")
            for weight in weights
        ]
        blocks = " + ".join(str(k["count"]) for k in row["blocks"] if k["streamable"]) or "-"
        rows.append(
            units.row(
                row["name"],
                f"{row['parameters'] / 1e6:,.1f}",
                *cells,
                *([row["host_bytes"]] if has_host else []),
                blocks,
            )
        )
        if source := row["source"]:
            dtypes = ", ".join(
                f"{SHORT.get(dtype, dtype)} {show_size(nbytes)}"
                for dtype, nbytes in source["dtypes"].items()
            )
            missing_note = (
                f"; {source['missing']} of its tensors are missing by name"
                if source["missing"]
                else ""
            )
            read_as = f"read as {SHORT.get(source['read_as'], source['read_as'])}{missing_note}"
            sources.append(
                f" {row['name']} on disk: {source['tensors']} tensors, {dtypes}, {read_as} "
                f" {source['folder']}"
            )
    legend = (
        "millions: of parameters; *: allowed by the graph; 16 and 32 bit from the "
        "configuration, int8 and nf4 by formula"
    )
    note = look.folded(f"weights{' and host' * has_host} in {units.size}; {legend}")
    return "\n".join([table(rows, left_columns=(0,), width=look.width), f" {note}", *sources])


def _phases(phases: list[dict[str, Any]], *, verbose: bool) -> str:
    units = Units(
        max(row["reserved_bytes"] for row in phases), sum(row["seconds"] for row in phases)
    )
    sizes, legend = SIZES, "without weights; -v shows all figures and their basis"
    if verbose:
        sizes = ALL_SIZES
        legend = (
            "without weights; reserved: with expandable segments, native: without; basis: of "
            "sizes, of seconds"
        )
    rows = [["phase", "calls", *sizes, "TFLOP", f"compute {units.time}", *["basis"] * verbose]]
    for row in phases:
        basis = ", ".join(dict.fromkeys((row["basis"], row["seconds_basis"])))
        cells = (
            row["phase"],
            str(row["calls"]),
            *(row[key] for key in sizes.values()),
            f"{row['flops'] / 1e12:.2f}",
            float(row["seconds"]),
            *[basis] * verbose,
        )
        rows.append(units.row(*cells))
    return f"{table(rows, left_columns=(0, 9))}\n sizes in {units.size}, {legend}"

"""The screen of ``graphrun estimate``, from the estimate's JSON form: weights by precision, then memory and time per phase."""

from __future__ import annotations

from typing import Any

from graphrun.report.table import scale_of, seconds_of, size, table
from graphrun.units import gib, show_seconds, show_size

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int8": "int8", "nf4": "nf4"}


def estimate_screen(estimate: dict[str, Any]) -> str:
    """Three parts: the graph with its totals, a row per component, a row per phase."""
    return "\n\n".join((_head(estimate), _components(estimate["components"]), _phases(estimate["phases"])))


def _head(estimate: dict[str, Any]) -> str:
    hardware, total = estimate["hardware"], estimate["all_resident"]
    settings = " ".join(f"{name}={value}" for name, value in estimate["settings"].items())
    outside = hardware["context_bytes"] + hardware["workspace_bytes"]
    return "\n".join(
        (
            f"estimate {estimate['graph']}  {settings}",
            f"hardware {hardware['name']} ({hardware['basis']})  context and workspace {show_size(outside)}",
            f"all resident: peak {show_size(total['peak_bytes'])} = {gib(total['weights_bytes'])} weights"
            f" + {gib(total['peak_bytes'] - total['weights_bytes'] - outside)} activation, reserved + {gib(outside)}"
            f"  compute {show_seconds(total['seconds'])}",
        )
    )


def _components(components: list[dict[str, Any]]) -> str:
    sixteen = [row["dtype"] if row["dtype"] != "float32" else "bfloat16" for row in components]
    unit, scale = scale_of(max(row["weights"][row["dtype"]]["bytes"] for row in components))
    rows = [["component", "parameters", "16 bit", "32 bit", "int8", "nf4", "host", "blocks"]]
    for row, half in zip(components, sixteen, strict=True):
        rows.append(
            [
                row["name"],
                f"{row['parameters']:,}",
                *(_weights(row["weights"][precision], scale) for precision in (half, "float32", "int8", "nf4")),
                size(row["host_bytes"], scale),
                " + ".join(str(k["count"]) for k in row["blocks"] if k["streamable"]) or "-",
            ]
        )
    note = f" weights and host in {unit}; *: allowed by the graph; 16 and 32 bit from the configuration, int8 and nf4 by formula"
    return "\n".join([table(rows, left=(0,)), note, *(_source(row) for row in components if row["source"])])


def _source(row: dict[str, Any]) -> str:
    source = row["source"]
    dtypes = ", ".join(f"{SHORT.get(dtype, dtype)} {show_size(nbytes)}" for dtype, nbytes in source["dtypes"].items())
    missing = f"; {source['missing']} of its tensors are missing by name" if source["missing"] else ""
    read_as = f"read as {SHORT[source['read_as']]}{missing}"
    return f" {row['name']} on disk: {source['tensors']} tensors, {dtypes}, {read_as}  {source['folder']}"


def _weights(weights: dict[str, Any], scale: int) -> str:
    return f"{size(weights['bytes'], scale)}{'*' if weights['allowed'] else ' '}"


def _phases(phases: list[dict[str, Any]]) -> str:
    unit, scale = scale_of(max(row["reserved_bytes"] for row in phases))
    clock, second = seconds_of(sum(row["seconds"] for row in phases))
    rows = [["phase", "calls", "allocated", "reserved", "native", "values", "live-in", "TFLOP", f"compute {clock}", "basis"]]
    for row in phases:
        sizes = ("allocated_bytes", "reserved_bytes", "reserved_native_bytes", "values_bytes", "live_in_bytes")
        rows.append(
            [
                row["phase"],
                str(row["calls"]),
                *(size(row[name], scale) for name in sizes),
                f"{row['flops'] / 1e12:.2f}",
                f"{row['seconds'] / second:.3f}",
                row["basis"] if row["basis"] == row["seconds_basis"] else f"{row['basis']}, {row['seconds_basis']}",
            ]
        )
    note = f" sizes in {unit}, without weights; reserved: with expandable segments, native: without; basis: of sizes, of seconds"
    return f"{table(rows, left=(0, 9))}\n{note}"

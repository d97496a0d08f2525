"""Tables and charts of the results of `cpu.py`. Computes medians, ratios and the limit.

The limit is what no tool can be faster than on the machine of the reference: its compute seconds,
or the bytes that must be read over the rate of direct reads, whichever takes longer. A call of the
denoiser finds in memory at most the cap, less what the process took before it opened any weights.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

GIB = 2**30
DENOISERS = ("transformer", "unet")
GRAPHRUN, REFERENCE, MMAP = "graphrun", "block by block", "from_pretrained, mmap"
Cell = dict[str, Any]


def cell_line(cell: Cell) -> str:
    """Return one line about a cell."""
    cap = f"{cell['cap_gib']:g} GiB" if cell["cap_gib"] else "no cap"
    name = f"{cell['model']}, {cap}, {cell['tool']}" + ("" if cell["run"] else ", its copies")
    if cell["outcome"] != "done":
        message = f": {cell['message']}" if "message" in cell else ""
        return f"{name}: {cell['outcome']} after {cell['process_seconds']:.0f} s{message}"
    parts = [f"{cell['seconds']:.1f} s"] if "seconds" in cell else []
    if "step_seconds" in cell:
        parts.append(f"{cell['step_seconds']:.2f} s a step")
    parts.append(f"{cell['read_bytes'] / 1e9:.1f} GB read")
    if "peak_bytes" in cell:
        parts.append(f"peak {cell['peak_bytes'] / GIB:.2f} GiB")
        parts.append(f"{cell['usage_peak_bytes'] / GIB:.2f} with page cache")
    return f"{name}: {', '.join(parts)}"


def limits(reference: Cell, cap_gib: float) -> tuple[float, float]:
    """Return the least seconds of a run, and of a denoising step, within a cap."""
    weights = reference["weight_bytes"]
    denoiser = next(weights[name] for name in DENOISERS if name in weights)
    streamed_bytes = max(0.0, denoiser - (cap_gib * GIB - reference["begin_bytes"]))
    calls, rate = reference["calls"], reference["disk_bytes_per_second"]
    steps = max(1, reference["steps"])
    run_bytes = sum(weights.values()) + (calls - 1) * streamed_bytes
    return (
        max(reference["compute_seconds"], run_bytes / rate),
        max(reference["step_compute_seconds"], calls / steps * streamed_bytes / rate),
    )


def median(cells: Sequence[Cell], key: str) -> float | None:
    """Return the median of the cells that have ``key``; None if none has it."""
    values = [cell[key] for cell in cells if key in cell]
    return statistics.median(values) if values else None


HEADER = (
    "GiB",
    "tool",
    "seconds",
    "a step",
    "GB read",
    "a step",
    "peak, GiB",
    "with page cache",
    "CPU",
    "picture",
)


def table(cells: Sequence[Cell]) -> str:
    """Return the table of one model, and graphrun's ratios to plan, limit and best other tool."""
    reference = next((cell for cell in cells if cell["tool"] == REFERENCE), None)
    lines = [
        f"**{cells[0]['model']}** ({_machine(cells)})",
        "",
        f"| {' | '.join(HEADER)} |",
        f"|{'---|' * len(HEADER)}",
    ]
    notes = []
    for cap in sorted({cell["cap_gib"] for cell in cells if cell["cap_gib"]}):
        at_cap = [cell for cell in cells if cell["cap_gib"] == cap]
        if reference and "compute_seconds" in reference:
            seconds, step_seconds = limits(reference, cap)
            row = [f"{cap:g}", "limit", f"{seconds:.1f}", f"{step_seconds:.2f}"]
            lines.append(f"| {' | '.join(row + [''] * (len(HEADER) - len(row)))} |")
        for tool in dict.fromkeys(cell["tool"] for cell in at_cap):
            group = [cell for cell in at_cap if cell["tool"] == tool]
            lines.append(f"| {cap:g} | {' | '.join(_row(tool, group, cells))} |")
        if note := _note(cap, at_cap, reference):
            notes.append(note)
    return "\n".join([*lines, "", *notes]) if notes else "\n".join(lines)


def _machine(cells: Sequence[Cell]) -> str:
    machine = cells[-1]["machine"]
    enforced = "enforced by the kernel" if cells[-1]["enforced"] else "not enforced"
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['ram_bytes'] / GIB:.0f} GiB, "
        f"{cells[-1]['date'][:10]}; caps {enforced}"
    )


def _row(tool: str, group: Sequence[Cell], cells: Sequence[Cell]) -> list[str]:
    ends = [cell for cell in group if cell["outcome"] == "done"]
    runs = f" ({len(group)} runs)" if len(group) > 1 else ""
    if not ends:
        return [f"{tool}{runs}", group[0]["outcome"], *[""] * (len(HEADER) - 3)]
    if failures := len(group) - len(ends):
        runs = f" ({failures} of {len(group)} {_outcomes(group)})"
    share = None
    if (seconds := median(ends, "step_seconds")) and (cpu := median(ends, "step_cpu_seconds")):
        share = cpu / seconds / ends[0]["machine"]["cores"]
    return [
        tool + runs,
        _number(median(ends, "seconds"), 1),
        _number(median(ends, "step_seconds"), 2),
        _number(median(ends, "read_bytes"), 1, 1e9),
        _number(median(ends, "step_read_bytes"), 2, 1e9),
        _number(max((c["peak_bytes"] for c in ends if "peak_bytes" in c), default=None), 2, GIB),
        _number(median(ends, "usage_peak_bytes"), 2, GIB),
        f"{share:.0%}" if share else "",
        ", ".join(dict.fromkeys(_picture(cell, cells) for cell in ends)),
    ]


def _outcomes(group: Sequence[Cell]) -> str:
    return ", ".join(dict.fromkeys(cell["outcome"] for cell in group if cell["outcome"] != "done"))


def _number(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.{digits}f}"


def _picture(cell: Cell, cells: Iterable[Cell]) -> str:
    """Return whether a picture is the reference's, or the one that mmap makes."""
    if not cell.get("finite", True):
        return "not finite"
    if cell.get("equal"):
        return "equal"
    is_mmap = any(o["tool"] == MMAP and o.get("digest") == cell.get("digest") for o in cells)
    if is_mmap and cell["tool"] != MMAP:
        return "as mmap"
    return f"differs by {cell['difference']:.1g}" if "difference" in cell else ""


def _note(cap: float, cells: Sequence[Cell], reference: Cell | None) -> str:
    """Return graphrun's ratios at a cap."""
    ends = [cell for cell in cells if cell["outcome"] == "done"]
    runs = [cell for cell in ends if cell["tool"] == GRAPHRUN]
    seconds, step_seconds = median(runs, "seconds"), median(runs, "step_seconds")
    if seconds is None or step_seconds is None:
        return ""
    parts = []
    if reference and "compute_seconds" in reference:
        limit, step_limit = limits(reference, cap)
        parts.append(f"{seconds / limit:.2f} of the limit, a step {step_seconds / step_limit:.2f}")
    tools = {cell["tool"] for cell in ends} - {GRAPHRUN}
    medians = {
        tool: median([cell for cell in ends if cell["tool"] == tool], "seconds") or 0.0
        for tool in tools
    }
    if medians:
        best = min(medians, key=medians.__getitem__)
        parts.append(f"{seconds / medians[best]:.2f} of {best}")
    if (plan_seconds := median(runs, "planned_seconds")) is not None:
        run_seconds = seconds - (median(runs, "ready_seconds") or 0.0)
        parts.append(f"run {run_seconds:.1f} s, planned {plan_seconds:.1f}")
    if (plan_bytes := median(runs, "planned_peak_bytes")) is not None and "peak_bytes" in runs[0]:
        peak_bytes = max(cell["peak_bytes"] for cell in runs)
        parts.append(f"peak {peak_bytes / GIB:.2f} GiB, planned {plan_bytes / GIB:.2f}")
    return f"- graphrun at {cap:g} GiB: {'; '.join(parts)}"


def chart(cells: Sequence[Cell], results: Path) -> Path:
    """Write seconds against caps as a picture beside ``results``; return its path."""
    from peers_plots import plot

    lines: dict[str, list[tuple[float, float]]] = {}
    for tool in dict.fromkeys(cell["tool"] for cell in cells if cell["cap_gib"]):
        for cap in sorted({cell["cap_gib"] for cell in cells if cell["cap_gib"]}):
            group = [c for c in cells if (c["tool"], c["cap_gib"]) == (tool, cap)]
            if (seconds := median(group, "seconds")) is not None:
                lines.setdefault(tool, []).append((cap, seconds))
    reference = next((cell for cell in cells if cell["tool"] == REFERENCE), None)
    if reference and "compute_seconds" in reference:
        caps = sorted({cell["cap_gib"] for cell in cells if cell["cap_gib"]})
        lines["limit"] = [(cap, limits(reference, cap)[0]) for cap in caps]
    name = cells[0]["model"]
    path = results.with_name(f"{results.stem}-{name}.png")
    title = f"{name}: seconds from files to picture"
    plot(title, lines, "memory cap, GiB", "seconds", GRAPHRUN).savefig(path)
    return path

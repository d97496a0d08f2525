"""Report the results of `cpu.py`: lines, tables, docs/cpu-measured.md, charts, README.

The limit is the least time of any tool that computes with PyTorch on the machine of the reference:
its compute seconds, or the bytes that must be read over the rate of direct reads, whichever is
longer. A call of the denoiser finds in memory at most the cap, minus the bytes of the process
before it opened any weights.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from page_text import folded

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/cpu.json"
PAGE = ROOT / "docs/cpu-measured.md"
CHARTS = ROOT / "docs/img"
README = ROOT / "README.md"
TRADEMARKS = re.compile(r"\((?:R|TM)\)")
REGION = re.compile(
    r"(?<=<!-- written by benchmarks/cpu.py --report -->\n).*?(?=<!-- end -->)", re.S
)
GIB = 2**30
DENOISERS = ("transformer", "unet")
GRAPHRUN, REFERENCE, MMAP = "graphrun", "reference", "mmap"
TITLES = {
    GRAPHRUN: "graphrun",
    MMAP: "diffusers `from_pretrained` (mmap)",
    "resident": "diffusers, all weights in memory",
    "disk-offload": "accelerate `disk_offload`",
    "device-map": "accelerate `device_map`, offload folder",
    "group-offload": "diffusers group offload, disk",
    "sd.cpp": "stable-diffusion.cpp, mmap",
}
BASES = {"measured": "profile of `graphrun calibrate`"}
SD_CPP = (
    "\n- stable-diffusion.cpp copies all weights into memory at its start, so it needs a cap "
    "above their size. It runs SDXL only, from one GGUF file."
)
OWN_SAMPLERS = ("sd.cpp",)  # tools whose pictures cannot be equal
Cell = dict[str, Any]
Spread = tuple[float, float, float, float, int]
"""Ratio of the slowest to the fastest run, cap, seconds of both, number of runs."""


def cell_line(cell: Cell) -> str:
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


def speed_of(cells: Sequence[Cell], key: str = "speeds") -> float | None:
    """Return the median speed of the machine before and after ``cells``.

    ``key``: ``speeds``, of products in FLOP/s, or ``disk_speeds``, in bytes per second.
    """
    speeds = [speed for cell in cells for speed in cell.get(key, ())]
    return statistics.median(speeds) if speeds else None


def median(cells: Sequence[Cell], key: str) -> float | None:
    """Return the median of the cells that have ``key``; None if none has it."""
    values = [cell[key] for cell in cells if key in cell]
    return statistics.median(values) if values else None


HEADER = (
    "cap, GiB",
    "tool",
    "seconds",
    "seconds / limit",
    "step, s",
    "step / limit",
    "GB read",
    "GB a step",
    "peak, GiB",
    "with page cache",
    "CPU",
    "TFLOP/s",
    "disk, GB/s",
    "picture",
)
PLAN_HEADER = ("cap, GiB", "s", "planned s", "GB read", "planned GB", "peak, GiB", "planned GiB")


def table(cells: Sequence[Cell]) -> str:
    """Return the tables of one model: all cells, and graphrun's plans next to measurements."""
    reference = next((c for c in cells if c["tool"] == REFERENCE and "compute_seconds" in c), None)
    rows, plans = list[Sequence[str]](), list[Sequence[str]]()
    for cap in caps_of(cells):
        at_cap = [cell for cell in cells if cell["cap_gib"] == cap and _is_measured(cell)]
        bound = limits(reference, cap) if reference and cap else None
        if bound:
            speed = _number(speed_of([reference]), 2, 1e12) if reference else ""
            blanks = [""] * (HEADER.index("TFLOP/s") - 5)
            disk = _number(reference["disk_bytes_per_second"], 2, 1e9) if reference else ""
            limit = ["limit", f"{bound[0]:.1f}", "", f"{bound[1]:.2f}", *blanks, speed, disk]
            rows.append([_cap(cap), *limit])
        for tool in TITLES:
            if group := [cell for cell in at_cap if cell["tool"] == tool]:
                rows.append([_cap(cap), *_row(tool, group, cells, bound)])
                plans += [_plan_row(cap, group)] if tool == GRAPHRUN else []
    parts = [f"**{cells[0]['model']}** ({_machine(cells)})", _lines(HEADER, rows)]
    if reference:
        weight_bytes = sum(reference["weight_bytes"].values())
        touch_seconds = median(cells, "first_touch_seconds")
        new_memory = f"; new memory {1e-9 / touch_seconds:.2f} GB/s" if touch_seconds else ""
        parts.append(
            f"Computing takes {reference['step_compute_seconds']:.2f} s a step and "
            f"{reference['compute_seconds']:.1f} s in all; {weight_bytes / 1e9:.1f} GB of weights; "
            f"direct reads {reference['disk_bytes_per_second'] / 1e9:.2f} GB/s{new_memory}."
        )
    if plans := [row for row in plans if row]:
        bases = {c["basis"] for c in cells if "basis" in c}
        parts += [
            "graphrun without the seconds of planning, next to its plans with the "
            f"{' and the '.join(sorted(BASES.get(basis, basis) for basis in bases))}:"
        ]
        parts += [_lines(PLAN_HEADER, plans)]
    return "\n\n".join(parts)


def caps_of(cells: Sequence[Cell]) -> list[float | None]:
    """Return the caps of measured cells, smallest first; None, no cap, last."""
    caps = {cell["cap_gib"] for cell in cells if _is_measured(cell)}
    return sorted(caps, key=lambda cap: (cap is None, cap))


def _is_measured(cell: Cell) -> bool:
    return cell["tool"] != REFERENCE and cell["run"] > 0


def _cap(cap: float | None) -> str:
    return f"{cap:g}" if cap else "none"


def _lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    width = len(header)
    lines = [header, ["---"] * width, *([*row, *[""] * (width - len(row))] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _machine(cells: Sequence[Cell]) -> str:
    machine = cells[-1]["machine"]
    capped = [cell for cell in cells if cell["cap_gib"]]
    enforced = "enforced by the kernel" if all(c["enforced"] for c in capped) else "not enforced"
    dates = sorted({cell["date"][:10] for cell in cells})
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['ram_bytes'] / GIB:.0f} GiB, "
        f"{machine['dtype']}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; caps {enforced}"
    )


def _row(
    tool: str, group: Sequence[Cell], cells: Sequence[Cell], bound: tuple[float, float] | None
) -> list[str]:
    ends = [cell for cell in group if cell["outcome"] == "done"]
    runs = f" ({len(group)} runs)" if len(group) > 1 else ""
    if not ends:
        return [TITLES[tool] + runs, _outcomes(group)]
    if failures := len(group) - len(ends):
        runs = f" ({failures} of {len(group)} {_outcomes(group)})"
    seconds, step_seconds = median(ends, "seconds"), median(ends, "step_seconds")
    cpu_seconds, share = median(ends, "step_cpu_seconds"), None
    if step_seconds and cpu_seconds:
        share = cpu_seconds / step_seconds / ends[0]["machine"]["cores"]
    return [
        TITLES[tool] + runs,
        _number(seconds, 1),
        _number(seconds, 2, bound[0]) if bound else "",
        _number(step_seconds, 2),
        _number(step_seconds, 2, bound[1]) if bound else "",
        _number(median(ends, "read_bytes"), 1, 1e9),
        _number(median(ends, "step_read_bytes"), 2, 1e9),
        _number(max((c["peak_bytes"] for c in ends if "peak_bytes" in c), default=None), 2, GIB),
        _number(median(ends, "usage_peak_bytes"), 2, GIB),
        f"{share:.0%}" if share else "",
        _number(speed_of(ends), 2, 1e12),
        _number(speed_of(ends, "disk_speeds"), 2, 1e9),
        ", ".join(dict.fromkeys(_picture(cell, cells) for cell in ends)),
    ]


def _plan_row(cap: float | None, group: Sequence[Cell]) -> list[str]:
    """Return measured figures of the runs that ended, each next to the planned one."""
    ends = [cell for cell in group if cell["outcome"] == "done" and "planned_seconds" in cell]
    if not ends:
        return []
    peak_bytes = max((cell["peak_bytes"] for cell in ends if "peak_bytes" in cell), default=None)
    return [
        _cap(cap),
        _number(median(ends, "run_seconds"), 1),
        _number(median(ends, "planned_seconds"), 1),
        _number(median(ends, "run_read_bytes"), 2, 1e9),
        _number(median(ends, "planned_read_bytes"), 2, 1e9),
        _number(peak_bytes, 3, GIB),
        _number(median(ends, "planned_peak_bytes"), 3, GIB),
    ]


def _outcomes(group: Sequence[Cell]) -> str:
    return ", ".join(dict.fromkeys(cell["outcome"] for cell in group if cell["outcome"] != "done"))


def _number(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.{digits}f}"


def _picture(cell: Cell, cells: Iterable[Cell]) -> str:
    """Return whether a picture is equal to the reference's or to mmap's."""
    if not cell.get("finite", True):
        return "not finite"
    if cell["tool"] in OWN_SAMPLERS:
        return "own sampler"
    if cell.get("equal"):
        return "equal"
    is_mmap = any(o["tool"] == MMAP and o.get("digest") == cell.get("digest") for o in cells)
    if is_mmap and cell["tool"] != MMAP:
        return "as mmap"
    return f"differs by {cell['difference']:.1g}" if "difference" in cell else ""


def by_machine(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Yield the cells of each model on each processor, if any is measured. Models are in order."""
    for name in dict.fromkeys(cell["model"] for cell in cells):
        rows = [cell for cell in cells if cell["model"] == name]
        for processor in dict.fromkeys(processor_of(row) for row in rows):
            group = [row for row in rows if processor_of(row) == processor]
            if caps_of(group):
                yield group


def processor_of(cell: Cell) -> str:
    processor: str = cell["machine"]["processor"]
    return processor


def _file_name(cells: Sequence[Cell]) -> str:
    """Return the name of the chart of a model on a processor, without its ending."""
    words = re.findall(r"[a-z0-9.]+", TRADEMARKS.sub("", processor_of(cells[0])).lower())
    return "-".join(["cpu", cells[0]["model"], *words])


def page(cells: Sequence[Cell]) -> str:
    parts = [
        "# Measured on the CPU",
        "<!-- Written by benchmarks/cpu.py --report from benchmarks/results/cpu.json. -->",
        "Whole pipelines with random weights of the full size, from files to picture, in a memory "
        "cgroup of exactly the cap. Unlike [a budget](cpu.md#what-is-counted), the cap includes "
        "the page cache. Every tool starts from the same "
        "diffusers folder, cap, prompt and seed, with an empty page cache.",
        "<!-- not run: hours, and 80 GB of disk -->\n```sh\n"
        "pip install stable-diffusion-cpp-python   # compiles; left out without it\n"
        "graphrun calibrate --device cpu\n"
        "python benchmarks/cpu.py --weights FOLDER --delete # typed again, it continues\n"
        "python benchmarks/cpu.py --report\n```",
        "- *seconds*: the median from the first open file to the picture; *step*: the median "
        "denoising step.\n"
        "- *limit*: a lower bound for tools on PyTorch, measured once: the longer of computing, "
        "with one block in memory at a time, and direct reads of all weights, embedding tables "
        "included, that do not fit the cap next to the process. A row below 1.00 ran while the "
        "machine was faster (*TFLOP/s*). "
        "New memory counts as free: where a virtual machine's host gives it slowly, no plan for "
        "few steps reaches the limit.\n"
        "- *GB read*: bytes that the process had read from the disk. *peak*: the most anonymous, "
        "shared, locked and kernel bytes. *CPU*: the share of all cores during a step.\n"
        "- *TFLOP/s*, *disk*: the speed of the rented machine, by products and direct reads before "
        "and after each run. It varies, so graphrun was calibrated before each of its runs, and "
        "runs of graphrun and mmap take turns. From 29 November 2026 on, graphrun's process asks "
        "for [pages of 2 "
        "MiB](cpu.md#plan-and-run), as its commands do.\n"
        "- *killed*: by the kernel, because of the cap. *picture*: *equal* is the reference's bit "
        "for bit; a difference is the largest of all pixels, of 0 to 1; "
        "*own sampler*: another program with its own noise."
        + (SD_CPP if any(cell["tool"] == "sd.cpp" for cell in cells) else ""),
    ]
    for group in by_machine(cells):
        if (heading := f"## {group[0]['model']}") not in parts:
            parts.append(heading)
        parts.append(f"{_drawing(group, 'light')}\n{_drawing(group, 'dark')}")
        parts.append(table(group))
    if len(parts) == 5:
        parts.append("No cell has run yet.")
    return folded("\n\n".join(parts)) + "\n"


def _drawing(cells: Sequence[Cell], theme: str) -> str:
    """Return the Markdown of the drawing of ``cells`` that pages of a ``theme`` show."""
    file = f"{_file_name(cells)}{'-dark' if theme == 'dark' else ''}.svg"
    return f"![{cells[0]['model']}: seconds against the cap](img/{file}#gh-{theme}-mode-only)"


def readme(cells: Sequence[Cell]) -> str:
    """Return README's lines on the first model that graphrun and mmap ran, on the machine with
    the most caps, or \"\"."""
    models = [cell["model"] for cell in cells]
    groups = sorted(
        by_machine(cells), key=lambda group: (models.index(group[0]["model"]), -len(caps_of(group)))
    )
    for group in groups:
        rows, spreads = [], list[Spread]()
        for cap in caps_of(group):
            medians = [
                median([c for c in group if c["cap_gib"] == cap and c["tool"] == tool], "seconds")
                for tool in (GRAPHRUN, MMAP)
            ]
            if cap and None not in medians:
                rows.append((cap, *medians))
                runs = [
                    cell["seconds"]
                    for cell in group
                    if (cell["cap_gib"], cell["tool"]) == (cap, GRAPHRUN) and "seconds" in cell
                ]
                spreads.append((max(runs) / min(runs), cap, min(runs), max(runs), len(runs)))
        if rows:
            name, file = group[0]["model"], _file_name(group)
            return (
                "\n<picture>\n"
                '  <source media="(prefers-color-scheme: dark)" '
                f'srcset="docs/img/{file}-dark.svg">\n'
                '  <img alt="Seconds from files to picture against the memory cap: graphrun and '
                f'other tools" src="docs/img/{file}.svg">\n'
                f"</picture>\n\nOn a CPU, {name} within a memory cap, seconds "
                "from files to picture (mmap: diffusers' `from_pretrained`):\n"
                + "; ".join(
                    f"{cap:g} GiB: graphrun {run:.0f}, mmap {mmap:.0f}" for cap, run, mmap in rows
                )
                + _spread_text(max(spreads))
                + f"\n({_machine(group)};\n`python benchmarks/cpu.py --only {name}`, "
                "[all tables](docs/cpu-measured.md)).\n\n"
            )
    return ""


def _spread_text(spread: Spread) -> str:
    """Return how much equal runs differ: medians at several caps may differ by as much."""
    _, cap, fewest, longest, count = spread
    if count == 1:
        return ""
    return (
        f".\nThe speed of the rented machine varies: at {cap:g} GiB, {count} runs of graphrun took "
        f"{fewest:.0f} to {longest:.0f} s"
    )


def write_report(cells: Sequence[Cell]) -> Iterator[Path]:
    """Write docs/cpu-measured.md, the charts and README's lines; yield the files."""
    for group in by_machine(cells):
        yield chart(group, CHARTS)
    PAGE.write_text(page(cells), encoding="utf-8")
    yield PAGE
    text = README.read_text(encoding="utf-8")
    README.write_text(REGION.sub(lambda _: readme(cells), text), encoding="utf-8")
    yield README


def recorded() -> list[Cell]:
    if not RESULTS.exists():
        return []
    cells: list[Cell] = json.loads(RESULTS.read_text(encoding="utf-8"))["cells"]
    return cells


def chart(cells: Sequence[Cell], folder: Path) -> Path:
    """Write seconds against caps as a light and a dark drawing to ``folder``; return the light
    one's path."""
    import matplotlib
    from peers_plots import plot, save

    lines: dict[str, list[tuple[float, float]]] = {}
    caps = [cap for cap in caps_of(cells) if cap]
    for tool in TITLES:
        for cap in caps:
            group = [c for c in cells if (c["tool"], c["cap_gib"]) == (tool, cap)]
            if (seconds := median(group, "seconds")) is not None:
                lines.setdefault(TITLES[tool].replace("`", ""), []).append((cap, seconds))
    reference = next((c for c in cells if c["tool"] == REFERENCE and "compute_seconds" in c), None)
    if reference:
        lines["limit"] = [(cap, limits(reference, cap)[0]) for cap in caps]
    name = cells[0]["model"]
    path = folder / f"{_file_name(cells)}.svg"
    title = f"{name}: seconds from files to picture"
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        save(
            lambda: plot(title, lines, "memory cap, GiB", "seconds", GRAPHRUN),
            path,
            metadata={"Date": None},
        )
    return path

"""Whole pipelines on the CPU within memory caps that the kernel enforces: graphrun and other tools.

.venv/bin/python benchmarks/cpu.py --weights FOLDER [--delete]     FLUX.1-schnell, SDXL, Wan 1.3B
.venv/bin/python benchmarks/cpu.py --tiny                          small models, minutes
.venv/bin/python benchmarks/cpu.py --trial                         3 GB under 2 GiB: `make cpu`
.venv/bin/python benchmarks/cpu.py --report                        table and chart of the results

A cell is one model, tool, cap and run, from files to picture, in a process of its own, which is
in a memory cgroup of exactly the cap (page cache included, no swap). Where groups cannot be made,
cells run without a limit, and the results say so. The page cache is dropped before each cell.
Cells that the results have are not run again; --forget TOOL removes those of a tool.

seconds    from the first open file to the picture; a step: the median between two ends of steps
read       bytes that the process had read from block devices
peak       the most bytes that the kernel counted, without and with page cache
reference  the pipeline with one block in memory at a time: its picture, and its compute seconds
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from cpu_cell import read_bytes  # noqa: E402
from cpu_models import FULL, GIB, MODELS, TINY, TRIAL, Model, weight_bytes, write  # noqa: E402
from cpu_report import cell_line, chart, table  # noqa: E402
from cpu_tools import GRAPHRUN, MMAP, REFERENCE, TOOLS, Tool  # noqa: E402

from graphrun.errors import InputError  # noqa: E402
from graphrun.memory_group import MemoryGroup, enforceable  # noqa: E402
from graphrun.systems import forget_cached  # noqa: E402

RESULTS = ROOT / "benchmarks/results/cpu.json"
CELL = ROOT / "benchmarks/cpu_cell.py"
LIMIT_SECONDS = 1200.0
POLL_SECONDS = 0.05
REPEATS = 3
SPARE_DISK_BYTES = 10**9


def machine() -> dict[str, Any]:
    """Return what describes this machine."""
    text = Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "ram_bytes": ram_bytes,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "bfloat16": sorted({word for word in text.split() if word in ("avx512_bf16", "amx_bf16")}),
    }


@dataclass
class Results:
    """Cells in a JSON file, which is written after each."""

    path: Path
    cells: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path.exists():
            self.cells = json.loads(self.path.read_text())["cells"]

    def find(self, model: str, tool: str, cap: float | None, run: int) -> dict[str, Any] | None:
        """Return a cell, None if it has not run."""
        key = (model, tool, cap, run)
        return next(
            (
                cell
                for cell in self.cells
                if (cell["model"], cell["tool"], cell["cap_gib"], cell["run"]) == key
            ),
            None,
        )

    def add(self, cell: dict[str, Any]) -> None:
        """Add a cell and write the file."""
        self.cells.append(cell)
        self.write()

    def remove(self, model: str, tool: str, cap: float | None, run: int) -> None:
        """Remove a cell, if it is there."""
        cell = self.find(model, tool, cap, run)
        self.cells = [other for other in self.cells if other is not cell]

    def forget(self, tool: str) -> None:
        """Remove the cells of a tool and write the file."""
        self.cells = [cell for cell in self.cells if cell["tool"] != tool]
        self.write()

    def write(self) -> None:
        """Write the file whole, or leave it as it was."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".partial")
        temporary.write_text(json.dumps({"cells": self.cells}, indent=1) + "\n")
        temporary.rename(self.path)


def drop_page_cache(folders: Sequence[Path], *, whole: bool) -> None:
    """Drop the cached pages of files in ``folders``; ``whole``: of all files, where root may."""
    os.sync()
    for folder in folders:
        for file in folder.rglob("*"):
            if file.is_file():
                handle = os.open(file, os.O_RDONLY)
                forget_cached(handle)
                os.close(handle)
    caches = Path("/proc/sys/vm/drop_caches")
    if whole and os.access(caches, os.W_OK):
        caches.write_text("1")


@dataclass(frozen=True)
class Ended:
    """How a process ended. ``use``: its peaks and kills; empty without a group."""

    outcome: str
    seconds: float
    cpu_seconds: float
    read_bytes: int
    use: dict[str, int]


def run_limited(
    command: Sequence[str], cap_bytes: int | None, limit_seconds: float, log: Path
) -> Ended:
    """Run ``command`` in a memory group of ``cap_bytes``; None: of all memory.

    The outcome is ``done``, ``killed`` by the kernel because of the limit, ``failed``, or
    ``timed out`` after ``limit_seconds``. All processes of the command have ended on return.
    """
    group = None
    if not enforceable():
        group = MemoryGroup.create(cap_bytes or machine()["ram_bytes"], "cell")
    start, last_read_bytes, timed_out = time.monotonic(), 0, False
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["/bin/sh", "-c", 'read -r line && exec "$@"', "sh", *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        assert process.stdin is not None
        try:
            if group:
                group.enter(process.pid)
            process.stdin.write(b"\n")
            process.stdin.close()
            while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                last_read_bytes = max(last_read_bytes, _read_bytes(process.pid))
                timed_out = time.monotonic() - start > limit_seconds
                if timed_out:
                    break
                time.sleep(POLL_SECONDS)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # what it started too; it is not reaped yet
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        use = (
            {
                "peak_bytes": group.peak_bytes,
                "usage_peak_bytes": group.usage_peak_bytes,
                "kills": group.kills,
            }
            if group
            else {}
        )
    finally:
        if group:
            group.remove()
    outcome = "failed" if process.returncode else "done"
    if timed_out:
        outcome = "timed out"
    elif use.get("kills"):
        outcome = "killed"
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Ended(outcome, time.monotonic() - start, cpu_seconds, last_read_bytes, use)


def _read_bytes(process: int) -> int:
    try:
        return read_bytes(process)
    except (OSError, ValueError):  # the process is ending
        return 0


@dataclass
class Bench:
    """Models' files in ``weights``, and results. ``whole_cache``: see `drop_page_cache`."""

    weights: Path
    results: Results
    limit_seconds: float = LIMIT_SECONDS
    whole_cache: bool = True

    def run(self, model: Model, tool: str, cap: float | None, run: int) -> dict[str, Any]:
        """Run a cell and add it to the results. ``run`` 0 makes a tool's copies of the weights."""
        folder, copies = self.weights / model.name, self.copies(model, tool)
        output = self.weights / "pictures" / f"{model.name}, {tool}, {cap}, {run}.npy"
        output.parent.mkdir(parents=True, exist_ok=True)
        reference = self.results.find(model.name, REFERENCE, None, 1) or {}
        cap_bytes = int(cap * GIB) if cap else None
        drop_page_cache([folder, copies], whole=self.whole_cache)
        with tempfile.TemporaryDirectory(prefix="graphrun-cpu-") as temporary:
            events, log = Path(temporary, "events.jsonl"), Path(temporary, "log")
            job = {
                "model": model.name,
                "tool": tool,
                "folder": str(folder),
                "cap_bytes": cap_bytes or 0,
                "floor_bytes": reference.get("peak_bytes", 0),
                "copies": str(copies),
                "opens_only": run == 0,
                "events": str(events),
                "output": str(output),
            }
            file = Path(temporary, "job.json")
            file.write_text(json.dumps(job))
            command = [sys.executable, str(CELL), str(file)]
            ended = run_limited(command, cap_bytes, self.limit_seconds, log)
            rows = _rows(events)
            message = _last_line(log) if ended.outcome == "failed" else ""
        cell = {
            "model": model.name,
            "tool": tool,
            "cap_gib": cap,
            "run": run,
            **summary(rows, ended),
            **({"message": message} if message else {}),
            "enforced": bool(ended.use) and cap is not None,
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
            "machine": machine(),
            "versions": TOOLS[tool].versions if tool in TOOLS else {},
        }
        if "digest" in cell and "digest" in reference:
            cell["equal"] = cell["digest"] == reference["digest"]
            picture = output.with_name(f"{model.name}, {REFERENCE}, None, 1.npy")
            if not cell["equal"] and picture.exists():
                cell["difference"] = difference(output, picture)
        self.results.add(cell)
        return cell

    def copies(self, model: Model, tool: str) -> Path:
        """Return the folder of a tool's copies of the weights."""
        name = TOOLS[tool].copies if tool in TOOLS else ""
        return self.weights / f"{model.name}-{name or 'none'}"

    def missing(
        self, model: Model, tools: Sequence[Tool], caps: Sequence[float]
    ) -> Iterator[tuple[Tool, float, int]]:
        """Yield the cells that the results do not have: tool, cap and run."""
        for tool in tools:
            for cap in sorted(set(caps) & set(model.caps), reverse=True):
                repeats = tool.name in (GRAPHRUN, MMAP) and cap in model.repeated
                for run in range(1, (REPEATS if repeats else 1) + 1):
                    if self.results.find(model.name, tool.name, cap, run) is None:
                        yield tool, cap, run

    def model(
        self, model: Model, tools: Sequence[Tool], caps: Sequence[float], *, reference: bool = True
    ) -> None:
        """Run the missing cells of ``model``; its weights are written if they are needed."""
        has_reference = self.results.find(model.name, REFERENCE, None, 1) is not None
        if not [*self.missing(model, tools, caps)] and (has_reference or not reference):
            return
        print(f"{model.name}: {self.weights / model.name}", flush=True)
        write(model, self.weights / model.name)
        if reference and not has_reference:
            print(cell_line(self.run(model, REFERENCE, None, 1)), flush=True)
        for name in dict.fromkeys(tool.copies for tool in tools):
            users = [tool for tool in tools if tool.copies == name]
            cells = [*self.missing(model, users, caps)]
            if not cells or (name and not self.make_copies(model, name)):
                continue
            for tool, cap, run in cells:
                print(cell_line(self.run(model, tool.name, cap, run)), flush=True)
            if name:
                shutil.rmtree(self.copies(model, users[0].name), ignore_errors=True)

    def make_copies(self, model: Model, name: str) -> bool:
        """Let a tool copy the weights, without a cap; return whether it did."""
        maker = next(tool.name for tool in TOOLS.values() if tool.copies == name)
        copy_bytes = weight_bytes(self.weights / model.name) + SPARE_DISK_BYTES
        free_bytes = shutil.disk_usage(self.weights).free
        if free_bytes < copy_bytes:
            print(
                f"{maker}: its copies need {copy_bytes / 1e9:.0f} GB of disk, and "
                f"{free_bytes / 1e9:.0f} GB are free"
            )
            return False
        shutil.rmtree(self.copies(model, maker), ignore_errors=True)
        self.results.remove(model.name, maker, None, 0)
        cell = self.run(model, maker, None, 0)
        print(cell_line(cell), flush=True)
        return bool(cell["outcome"] == "done")


def _rows(events: Path) -> list[dict[str, Any]]:
    lines = events.read_text().split("\n") if events.exists() else []
    return [json.loads(line) for line in lines[:-1]]  # the last one is empty, or cut off by a kill


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def difference(output: Path, reference: Path) -> float:
    """Return the largest difference of two pictures."""
    import numpy

    values = [numpy.load(path) for path in (output, reference)]
    return float(abs(values[0] - values[1]).max())


def summary(rows: list[dict[str, Any]], ended: Ended) -> dict[str, Any]:
    """Return the figures of a cell from its events, as far as it came.

    Steps before ``ready`` are those of dry runs.
    """
    events = {row["event"]: row for row in rows}
    begin, ready, end = (events.get(name) for name in ("begin", "ready", "end"))
    stages = rows[rows.index(ready) :] if ready else []
    stages = [row for row in stages if row["event"] in ("ready", "denoise", "step", "end")]
    steps = [row for row in stages if row["event"] == "step"]
    result: dict[str, Any] = {"outcome": ended.outcome, "process_seconds": round(ended.seconds, 2)}
    result |= {"cpu_seconds": round(ended.cpu_seconds, 2), "read_bytes": ended.read_bytes}
    result |= {key: value for key, value in ended.use.items() if key != "kills"}
    result["steps"] = len(steps)
    if begin:
        result["begin_bytes"] = begin["process_bytes"]
    if begin and ready:
        result["ready_seconds"] = round(ready["seconds"] - begin["seconds"], 3)
    if begin and end:
        result["seconds"] = round(end["seconds"] - begin["seconds"], 3)
        result["read_bytes"] = end["read_bytes"] - begin["read_bytes"]
    if steps and end:
        first = stages.index(steps[0])
        periods = {
            "encode": stages[:first],
            "first_step": stages[first - 1 : first + 1],
            "decode": [steps[-1], end],
        }
        for name, period in periods.items():
            result[f"{name}_seconds"] = round(period[-1]["seconds"] - period[0]["seconds"], 3)
    if len(steps) > 1:
        pairs = list(zip(steps, steps[1:], strict=False))
        for key in ("seconds", "cpu_seconds", "read_bytes", "load_seconds"):
            if key in steps[0]:
                differences = [second[key] - first[key] for first, second in pairs]
                result[f"step_{key}"] = round(statistics.median(differences), 3)
    described = {"event", "seconds", "cpu_seconds", "read_bytes", "load_seconds", "process_bytes"}
    for name in ("rate", "plan", "end", "picture"):
        result |= {k: v for k, v in events.get(name, {}).items() if k not in described}
    if end and ready and "load_seconds" in end:
        loads = end["load_seconds"] - ready.get("load_seconds", 0.0)
        result["compute_seconds"] = round(end["seconds"] - ready["seconds"] - loads, 3)
        result["step_compute_seconds"] = round(
            result["step_seconds"] - result["step_load_seconds"], 3
        )
    return result


def is_installed(tool: Tool) -> bool:
    """Return whether a tool's packages are installed; print which one is not."""
    try:
        return bool(tool.versions)
    except InputError as error:
        print(f"{tool.name}: {error}", flush=True)
        return False


def main() -> None:
    """Run the missing cells, and print tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, help="the folder for weights and copies of them")
    parser.add_argument("--delete", action="store_true", help="delete a model's weights after it")
    parser.add_argument("--out", type=Path, help="the results")
    parser.add_argument("--models", nargs="*", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--tools", nargs="*", help=f"of {'; '.join(TOOLS)}")
    parser.add_argument("--caps", nargs="*", type=float, help="GiB; default: all of a model")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds of a cell")
    parser.add_argument("--forget", metavar="TOOL", help="remove a tool's cells first")
    parser.add_argument("--tiny", action="store_true", help="small models of the same classes")
    parser.add_argument("--trial", action="store_true", help="3 GB under 2 GiB beside mmap")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    weights = options.weights or Path(tempfile.gettempdir(), "graphrun-cpu")
    models: Sequence[Model] = TINY if options.tiny else (TRIAL,) if options.trial else FULL
    if options.models:
        models = tuple(MODELS[name] for name in options.models)
    tools = (GRAPHRUN, MMAP) if options.trial else tuple(TOOLS)
    is_small = options.tiny or options.trial
    file = options.out or (weights / "results.json" if is_small else RESULTS)
    if options.trial:
        file.unlink(missing_ok=True)
    results = Results(file)
    if options.forget:
        results.forget(options.forget)
    if not options.report:
        if reason := enforceable():
            print(f"cells run without a limit: {reason}", flush=True)
        bench = Bench(weights, results, options.limit, whole_cache=not options.tiny)
        for model in models:
            bench.model(
                model,
                [TOOLS[name] for name in options.tools or tools if is_installed(TOOLS[name])],
                options.caps or model.caps,
                reference=not options.trial,
            )
            if options.delete:
                shutil.rmtree(weights / model.name, ignore_errors=True)
    for model in models:
        cells = [cell for cell in results.cells if cell["model"] == model.name]
        if cells:
            print(f"\n{table(cells)}")
            if options.report:
                print(f"\n{chart(cells, file)}")


if __name__ == "__main__":
    main()

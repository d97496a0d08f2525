"""Run whole pipelines on the CPU within memory caps that the kernel enforces, by several tools.

    python benchmarks/cpu.py --weights FOLDER [--delete]     FLUX.1-schnell, SDXL, Wan 1.3B
    python benchmarks/cpu.py --only flux --caps 6,8 --tools graphrun,mmap --minutes 30
    python benchmarks/cpu.py --tiny                          small models, minutes
    python benchmarks/cpu.py --trial                         3 GB under 2 GiB: `make cpu`
    python benchmarks/cpu.py --report                        docs/cpu-measured.md and charts

A cell is one model, tool, cap and run, from files to picture, in a process in a memory cgroup of
exactly the cap (page cache included, no swap). If groups are not available, cells run without a
limit, and the results say so. The page cache is dropped before each cell. Each cell is saved when
it ends; the same command run again continues with the cells that the results lack of this
processor. --forget TOOL removes the cells of a tool. Next to the weights, the copies of one tool at
a time are on disk; they are deleted after its cells.

    seconds    from the first open file to the picture; a step: median time between ends of steps
    read       bytes that the process read from block devices
    peak       the most bytes that the kernel counted, without and with page cache
    reference  the pipeline with one block in memory at a time: its picture, its compute seconds
    speed      FLOP/s of matrix products and bytes per second of direct reads before and after a
               cell: other users of a rented machine change them. graphrun is calibrated before each
               of its cells (not with --tiny, --trial)
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import functools
import itertools
import json
import math
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
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from cpu_cell import disk_rate, read_bytes  # noqa: E402
from cpu_models import (  # noqa: E402
    FULL,
    GIB,
    TINY,
    TRIAL,
    Model,
    fast_dtype,
    needed_bytes,
    weight_bytes,
    write,
)
from cpu_report import (  # noqa: E402
    GRAPHRUN,
    MMAP,
    REFERENCE,
    RESULTS,
    cell_line,
    processor_of,
    table,
    write_report,
)
from cpu_tools import TOOLS, Tool  # noqa: E402

from graphrun.errors import InputError  # noqa: E402
from graphrun.memory_group import MemoryGroup, enforceable  # noqa: E402
from graphrun.profile.processor import cpu_name  # noqa: E402
from graphrun.systems import forget_cached  # noqa: E402

CELL = ROOT / "benchmarks/cpu_cell.py"
LIMIT_SECONDS = 1200.0
POLL_SECONDS = 0.05
PROBE_SECONDS, PROBE_BYTES = 1.0, 2 * 10**9
REPEATS = 3
SPARE_DISK_BYTES = 10**9
# before a cell: a virtual machine returns freed memory to its host within seconds, and getting it
# back takes longer than reading a file into it, so all cells start without such memory
REST_SECONDS = 15.0
RAM_SHARE = 0.7  # of all memory, for weights of cells without a cap


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Lock ``folder`` against other benchmarks. Raises InputError if one uses it. The kernel
    releases the lock when this process ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "lock"
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            process = os.pread(handle, 32, 0).decode()
            raise InputError(
                f"{file}: the benchmark in process {process} uses these weights: wait until it "
                "ends, or add --weights OTHER_FOLDER"
            ) from None
        os.truncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(handle)


@functools.cache
def machine() -> dict[str, Any]:
    """Return a description of this machine."""
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": cpu_name(),
        "cores": os.cpu_count(),
        "ram_bytes": ram_bytes,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "dtype": fast_dtype(),
    }


def product_rate() -> float:
    """Return FLOP/s of transformer-sized matrix products, for a second on all cores."""
    import torch

    dtype = getattr(torch, fast_dtype())
    source, weights = torch.randn(512, 3072).to(dtype), torch.randn(8, 3072, 3072).to(dtype)
    flops, start = 0, time.perf_counter()
    with torch.no_grad():
        for number in itertools.count():
            torch.nn.functional.linear(source, weights[number % len(weights)])
            flops += 2 * source.shape[0] * weights[0].numel()
            if (seconds := time.perf_counter() - start) > PROBE_SECONDS:
                return flops / seconds
    raise AssertionError


@dataclass
class Results:
    """Cells in a JSON file, which is written after each."""

    path: Path
    cells: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.read()

    def read(self) -> None:
        """Read the file, to which another benchmark with other weights may have added cells."""
        if self.path.exists():
            self.cells = json.loads(self.path.read_text())["cells"]

    def find(self, model: str, tool: str, cap: float | None, run: int) -> dict[str, Any] | None:
        """Return a cell of this machine; None if it has not run."""
        key = (model, tool, cap, run, machine()["processor"])
        return next((cell for cell in self.cells if _key(cell) == key), None)

    def add(self, cell: dict[str, Any]) -> None:
        """Add a cell, replacing an older one of its run, and write the file."""
        self.read()
        self.cells = [*(other for other in self.cells if _key(other) != _key(cell)), cell]
        self.write()

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)
        self.cells = []

    def forget(self, tool: str) -> None:
        self.cells = [cell for cell in self.cells if cell["tool"] != tool]
        self.write()

    def write(self) -> None:
        """Write the file completely or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".partial")
        temporary.write_text(json.dumps({"cells": self.cells}, indent=1) + "\n")
        temporary.rename(self.path)


def _key(cell: dict[str, Any]) -> tuple[Any, ...]:
    return *(cell[name] for name in ("model", "tool", "cap_gib", "run")), processor_of(cell)


def drop_page_cache(folders: Sequence[Path], *, whole: bool) -> None:
    """Drop the cached pages of files in ``folders``; ``whole``: of all files, if root permits."""
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
    """The outcome of a process. ``use``: its peaks and kills; empty without a group."""

    outcome: str
    seconds: float
    cpu_seconds: float
    read_bytes: int
    use: dict[str, int]


def run_limited(
    command: Sequence[str], cap_bytes: int | None, limit_seconds: float, log: Path
) -> Ended:
    """Run ``command`` in a memory group of ``cap_bytes``; None: of all memory.

    The outcome is ``done``, ``killed`` by the kernel because of the limit, ``failed``, or ``timed
    out`` after ``limit_seconds``. All processes of the command have ended on return.
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
            os.killpg(process.pid, signal.SIGKILL)  # also its child processes; it is not reaped yet
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
    """The results, and the models' files in ``weights``. ``whole_cache``: see `drop_page_cache`.

    ``calibrates``: calibrate before each cell of graphrun, and rest before each cell. ``end``: the
    value of the monotonic clock after which no cell starts.
    """

    weights: Path
    results: Results
    limit_seconds: float = LIMIT_SECONDS
    whole_cache: bool = True
    calibrates: bool = False
    end: float = math.inf

    def run(self, model: Model, tool: str, cap: float | None, run: int) -> dict[str, Any]:
        """Run a cell and add it to the results. ``run`` 0 makes a tool's copies of the weights."""
        folder, copies = self.weights / model.name, self.copies(model, tool)
        output = self.weights / "pictures" / f"{model.name}, {tool}, {cap}, {run}.npy"
        output.parent.mkdir(parents=True, exist_ok=True)
        reference = self.results.find(model.name, REFERENCE, None, 1) or {}
        cap_bytes = int(cap * GIB) if cap else None
        drop_page_cache([folder, copies], whole=self.whole_cache)
        work = self.weights / "cell"  # a killed benchmark may leave it behind
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        events, log, file = work / "events.jsonl", work / "log", work / "job.json"
        job = {
            "benchmark": os.getpid(),
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
        file.write_text(json.dumps(job))
        if self.calibrates and tool == GRAPHRUN:
            time.sleep(REST_SECONDS)  # calibration measures new memory too
            calibrate = [sys.executable, "-m", "graphrun", "calibrate", "--device", "cpu"]
            subprocess.run(calibrate, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        command, speeds = [sys.executable, str(CELL), str(file)], [product_rate()]
        disk_speeds = [disk_rate(folder, PROBE_BYTES)]
        time.sleep(REST_SECONDS if self.calibrates else 0)
        ended = run_limited(command, cap_bytes, self.limit_seconds, log)
        speeds.append(product_rate())
        disk_speeds.append(disk_rate(folder, PROBE_BYTES))
        rows, message = _rows(events), _last_line(log) if ended.outcome == "failed" else ""
        shutil.rmtree(work)
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
            "speeds": [round(speed) for speed in speeds],
            "disk_speeds": [round(speed) for speed in disk_speeds],
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
        name = TOOLS[tool].copies if tool in TOOLS else ""
        return self.weights / f"{model.name}-{name or 'none'}"

    def missing(
        self, model: Model, tools: Sequence[Tool], caps: Sequence[float]
    ) -> list[tuple[Tool, float | None, int]]:
        """Return the cells that the results do not have: tool, cap and run."""
        cells = list[tuple[Tool, float | None, int]]()
        ram_bytes = RAM_SHARE * machine()["ram_bytes"]
        for tool in tools:
            if not model.name.startswith(tool.models):
                continue
            if tool.resident and needed_bytes(model.name) < ram_bytes:
                cells.append((tool, None, 1))
            for cap in sorted(set(caps) & set(model.caps), reverse=True):
                repeats = tool.name in (GRAPHRUN, MMAP) and cap in model.repeated
                cells += [(tool, cap, run + 1) for run in range(REPEATS if repeats else 1)]
        # runs of tools to be compared are close in time
        cells.sort(key=lambda cell: (-(cell[1] or math.inf), cell[2]))
        return [
            (tool, cap, run)
            for tool, cap, run in cells
            if self.results.find(model.name, tool.name, cap, run) is None
        ]

    def model(
        self, model: Model, tools: Sequence[Tool], caps: Sequence[float], *, reference: bool = True
    ) -> int:
        """Run the missing cells of ``model``; return how many are left. Writes its weights if they
        are needed. Raises InputError if the disk is too small."""
        is_missing = self.results.find(model.name, REFERENCE, None, 1) is None
        if reference and is_missing and not self.is_over():
            self.write_weights(model)
            print(cell_line(self.run(model, REFERENCE, None, 1)), flush=True)
        for name in dict.fromkeys(tool.copies for tool in tools):
            users = [tool for tool in tools if tool.copies == name]
            if not self.missing(model, users, caps) or self.is_over():
                continue
            self.write_weights(model)
            if name and not self.make_copies(model, name):
                continue
            for tool, cap, run in self.missing(model, users, caps):
                if not self.is_over():
                    print(cell_line(self.run(model, tool.name, cap, run)), flush=True)
            if not self.missing(model, users, caps):
                self.delete_copies(model)
        return len(self.missing(model, tools, caps))

    def is_over(self) -> bool:
        """Return whether the time for new cells is over."""
        return time.monotonic() > self.end

    def write_weights(self, model: Model) -> None:
        """Write the weights of ``model`` if they do not exist. Raises InputError without space."""
        folder = self.weights / model.name
        if not folder.is_dir():
            print(f"{model.name}: {folder}", flush=True)
            self.delete(model)  # incomplete weights of a killed benchmark take space
            if problem := self.lacking_disk(needed_bytes(model.name)):
                raise InputError(f"{folder}: {problem}")
            write(model, folder)

    def lacking_disk(self, nbytes: int) -> str:
        """Return what to do if the disk has no space for ``nbytes``; "" if it has."""
        free_bytes, nbytes = shutil.disk_usage(self.weights).free, nbytes + SPARE_DISK_BYTES
        if free_bytes >= nbytes:
            return ""
        return (
            f"{nbytes / 1e9:.0f} GB of disk are needed, and {free_bytes / 1e9:.0f} GB are free: "
            "free some, or add --weights OTHER_FOLDER on a larger disk"
        )

    def make_copies(self, model: Model, name: str) -> bool:
        """Let a tool copy the weights, without a cap; return whether the copies are complete.
        Copies of other tools are deleted first."""
        maker = next(tool.name for tool in TOOLS.values() if tool.copies == name)
        complete = self.copies(model, maker) / "complete"
        if complete.exists():  # made by an earlier benchmark
            return True
        self.delete_copies(model)
        if problem := self.lacking_disk(weight_bytes(self.weights / model.name)):
            print(f"{model.name}, {maker}, its copies: {problem}", flush=True)
            return False
        cell = self.run(model, maker, None, 0)
        print(cell_line(cell), flush=True)
        if cell["outcome"] == "done":
            complete.touch()
        return complete.exists()

    def delete_copies(self, model: Model) -> None:
        for name in {tool.name for tool in TOOLS.values() if tool.copies}:
            shutil.rmtree(self.copies(model, name), ignore_errors=True)

    def delete(self, model: Model) -> None:
        """Delete the weights of ``model``, and what tools or a killed benchmark left of them."""
        self.delete_copies(model)
        shutil.rmtree(self.weights / model.name, ignore_errors=True)
        shutil.rmtree(self.weights / f"{model.name}.partial", ignore_errors=True)


def _rows(events: Path) -> list[dict[str, Any]]:
    lines = events.read_text().split("\n") if events.exists() else []
    return [json.loads(line) for line in lines[:-1]]  # the last line is empty, or cut off by a kill


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def difference(output: Path, reference: Path) -> float:
    """Return the largest difference of two pictures."""
    import numpy

    values = [numpy.load(path) for path in (output, reference)]
    return float(abs(values[0] - values[1]).max())


def summary(rows: list[dict[str, Any]], ended: Ended) -> dict[str, Any]:
    """Return the figures of a cell from its events so far. Steps before ``ready`` belong to dry
    runs."""
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
    if ready and end:
        result["run_seconds"] = round(end["seconds"] - ready["seconds"], 3)
        result["run_read_bytes"] = end["read_bytes"] - ready["read_bytes"]
    if steps and end and "denoise" in events:
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
    for name in ("rate", "plan", "slots", "end", "picture"):
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


def selected(text: str, names: Sequence[str]) -> list[str]:
    """Return the ``names`` that begin with one of the comma-separated words in ``text``. Raises
    InputError for a word that begins none."""
    selection = list[str]()
    for word in text.split(","):
        matches = [name for name in names if name.startswith(word.strip())]
        if not matches:
            raise InputError(f"{word!r} is none of {', '.join(names)}")
        selection += matches
    return [name for name in names if name in selection]


def selected_caps(text: str, caps: Sequence[float]) -> list[float]:
    """Return the ``caps`` in the comma-separated ``text``. Raises InputError for others."""
    names = {f"{cap:g}": cap for cap in caps}
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in names:
            raise InputError(f"no model has a cap of {word} GiB: type --caps {','.join(names)}")
    return [names[word] for word in words]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, help="the folder for weights and copies of them")
    parser.add_argument("--delete", action="store_true", help="delete a model's weights after it")
    parser.add_argument("--out", type=Path, help="the results")
    parser.add_argument("--only", metavar="MODEL,...", help="models, by the start of their names")
    parser.add_argument("--tools", metavar="TOOL,...", help=f"of {', '.join(TOOLS)}")
    parser.add_argument("--caps", metavar="GIB,...", help="default: all of a model")
    parser.add_argument("--minutes", type=float, default=math.inf, help="then start no more cells")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds of a cell")
    parser.add_argument("--forget", metavar="TOOL", help="remove a tool's cells first")
    parser.add_argument("--tiny", action="store_true", help="small models of the same classes")
    parser.add_argument("--trial", action="store_true", help="3 GB under 2 GiB beside mmap")
    parser.add_argument("--report", action="store_true", help="run nothing; write page and charts")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the missing cells and print tables, or write the report."""
    options = parsed(arguments)
    try:
        run_all(options)
    except InputError as error:
        sys.exit(f"error: {error}")


def run_all(options: argparse.Namespace) -> None:
    """Carry out ``options``. Raises InputError."""
    weights = options.weights or Path(tempfile.gettempdir(), "graphrun-cpu")
    models: Sequence[Model] = TINY if options.tiny else (TRIAL,) if options.trial else FULL
    if options.only:
        names = selected(options.only, [model.name for model in models])
        models = [model for model in models if model.name in names]
    names = [GRAPHRUN, MMAP] if options.trial else [*TOOLS]
    tools = [TOOLS[name] for name in selected(options.tools or ",".join(names), [*TOOLS])]
    caps = sorted({cap for model in models for cap in model.caps})
    if options.caps:
        caps = selected_caps(options.caps, caps)
    is_small = options.tiny or options.trial
    results = Results(options.out or (weights / "results.json" if is_small else RESULTS))
    if options.report:
        for path in write_report(results.cells):
            print(f"wrote {path}")
        return
    with exclusive(weights):
        if options.trial:
            results.clear()
        if options.forget:
            results.forget(options.forget)
        if reason := enforceable():
            print(f"cells run without a limit: {reason}", flush=True)
        end = time.monotonic() + 60 * options.minutes
        bench = Bench(weights, results, options.limit, not options.tiny, not is_small, end)
        tools = [tool for tool in tools if is_installed(tool)]
        remaining_cells = 0
        for model in models:
            cells = bench.model(model, tools, caps, reference=not options.trial)
            remaining_cells += cells
            if options.delete and not cells:
                bench.delete(model)
    for model in models:
        rows = [cell for cell in results.cells if cell["model"] == model.name]
        if rows := [row for row in rows if processor_of(row) == machine()["processor"]]:
            print(f"\n{table(rows)}")
    if remaining_cells:
        print(f"\n{remaining_cells} cells are left: type the same command again")


if __name__ == "__main__":
    main()

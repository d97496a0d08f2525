"""Measure commands from a shell: CPU seconds, and the most memory.

    python benchmarks/start_up.py                        writes results/start_up.json
    python benchmarks/start_up.py --only help,list       measures these commands, writes nothing
    python benchmarks/start_up.py --tree FOLDER          measures another checkout, writes nothing

    shipped  empty cache, dry run of the wheel: numbers, solver, screen
    cached   everything cached: no torch, no solver
    cold     empty cache, no dry run: imports of torch and diffusers, dry run, numbers, solver,
             screen

Compare user CPU: wall-clock seconds mean something on an idle machine only.
"""

from __future__ import annotations

import argparse
import compileall
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RUNS = 5
PLAN = "plan flux-dev --vram 8G --ram 64G --hardware rtx4090"
# command, package (with or without dry runs), and whether the cache is that of the first plan
COMMANDS = {
    "help": ("--help", "checkout", False),
    "list": ("list", "checkout", False),
    "plan, shipped": (PLAN, "wheel", False),
    "plan, cached": (PLAN, "checkout", True),
    "plan, cold": (PLAN, "checkout", False),
    "report": ("report plan.json -o report.html", "checkout", False),
    "explain": ("explain plan.json", "checkout", False),
    "explain a component": ("explain plan.json transformer", "checkout", False),
    "doctor": ("doctor", "checkout", False),
}
# seconds of user CPU that a command may take
LIMITS = {
    "help": 0.3,
    "list": 1.0,
    "plan, shipped": 1.2,
    "plan, cached": 0.5,
    "plan, cold": 6.0,
    "report": 3.0,
    "explain": 5.0,
    "explain a component": 5.0,
    "doctor": 3.0,
}


def measure(arguments: list[str], package: Path, folder: Path, cache: Path) -> dict[str, float]:
    """Run graphrun of ``package`` in ``folder``: seconds, and its peak RSS."""
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(cache),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(package),
    }
    command = [sys.executable, "-m", "graphrun", *arguments]
    start = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    message = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):  # doctor ends with 1 if it finds a problem
        raise SystemExit(f"graphrun {' '.join(arguments)} failed:\n{message}")
    return {
        "user_seconds": usage.ru_utime,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "wall_seconds": time.perf_counter() - start,
        "peak_rss_mib": usage.ru_maxrss / 1024,
    }


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    return {
        name: {
            "median": round(statistics.median(run[name] for run in runs), 2),
            "least": round(min(run[name] for run in runs), 2),
            "most": round(max(run[name] for run in runs), 2),
        }
        for name in runs[0]
    }


def copy_package(tree: Path, folder: Path, *, dry_runs: bool) -> Path:
    """Copy the package and the graphs of ``tree`` to ``folder``, as a wheel has them."""
    skip = shutil.ignore_patterns("__pycache__", "dry_runs")
    shutil.copytree(tree / "graphrun", folder / "graphrun", ignore=skip)
    shutil.copytree(tree / "graphs", folder / "graphrun" / "graphs", ignore=skip)
    compileall.compile_dir(folder, quiet=1)  # as pip does
    if dry_runs:
        code = "from graphrun.store import ship; ship(['flux-dev'])"
        environment = {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
        subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True)
    return folder


def measure_all(tree: Path, names: list[str], runs: int) -> dict[str, Any]:
    """Measure the commands called ``names``, one after the other, ``runs`` times."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packages = {
            kind: copy_package(tree, folder / kind, dry_runs=kind == "wheel")
            for kind in sorted({COMMANDS[name][1] for name in names} | {"checkout"})
        }
        first_cache = folder / "cache"
        # fills the cache, and makes the plan that report and explain read
        measure([*PLAN.split(), "-o", "plan.json"], packages["checkout"], folder, first_cache)
        for _ in range(runs):
            for name in names:
                command, kind, is_cached = COMMANDS[name]
                with tempfile.TemporaryDirectory() as cache:
                    results[name].append(
                        measure(
                            command.split(),
                            packages[kind],
                            folder,
                            first_cache if is_cached else Path(cache),
                        )
                    )
    return {name: summary(figures) for name, figures in results.items()}


def main() -> None:
    """Measure and print; write if all commands of this tree were measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(key for key in COMMANDS), type=str)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--runs", type=int, default=RUNS)
    options = parser.parse_args()
    names = [name for name in COMMANDS if options.only in ("", name) or name in options.only]
    load_before = os.getloadavg()
    figures = measure_all(options.tree.resolve(), names, options.runs)
    for name, row in figures.items():
        print(f"{row['user_seconds']['median']:6.2f} s  of {LIMITS[name]:4.1f}  {name}")
    if options.tree != ROOT or len(names) < len(COMMANDS):
        return
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}",
        "versions": {
            name: version(name) for name in ("torch", "diffusers", "transformers", "highspy")
        },
        "load_average": {
            "before": [round(x, 2) for x in load_before],
            "after": [round(x, 2) for x in os.getloadavg()],
        },
        "commands": {
            name: {"command": f"graphrun {COMMANDS[name][0]}", "limit": LIMITS[name], **row}
            for name, row in figures.items()
        },
    }
    path = ROOT / "benchmarks/results/start_up.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()

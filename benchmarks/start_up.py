"""How long `graphrun plan graphs/flux-dev.yaml` takes from a shell, cold and warm, and the most
memory it takes.

.venv/bin/python benchmarks/start_up.py      writes benchmarks/results/start_up.json

cold     empty cache: imports, dry run, numbers, solver, screen
traced   dry run cached, another budget: numbers and solver
warm     everything cached: no torch, no solver

Wall-clock seconds mean something on an idle machine only, so processor seconds and the load are
reported too.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
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
COMMAND = [
    sys.executable,
    "-c",
    "from graphrun.cli.main import main; main()",
    "plan",
    "graphs/flux-dev.yaml",
    "--ram",
    "64G",
]


def measure(cache: str, vram: str) -> dict[str, float]:
    """One command: wall and processor seconds, and its peak RSS."""
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": cache,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    start = time.perf_counter()
    arguments = [*COMMAND, "--vram", vram, "--hardware", "rtx4090"]
    process = subprocess.Popen(
        arguments, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"graphrun plan failed with exit code {process.returncode}")
    return {
        "wall_seconds": time.perf_counter() - start,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "peak_rss_mib": usage.ru_maxrss / 1024,
    }


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Median, least and most of every figure."""
    return {
        name: {
            "median": round(statistics.median(run[name] for run in runs), 2),
            "least": round(min(run[name] for run in runs), 2),
            "most": round(max(run[name] for run in runs), 2),
        }
        for name in runs[0]
    }


def main() -> None:
    """Measure, write, and say where."""
    runs_by_state: dict[str, list[dict[str, float]]] = {"cold": [], "traced": [], "warm": []}
    load_before = os.getloadavg()
    for number in range(RUNS):
        with tempfile.TemporaryDirectory() as cache:
            runs_by_state["cold"].append(measure(cache, "8G"))
            runs_by_state["traced"].append(measure(cache, f"{9 + number}G"))
            runs_by_state["warm"] += [measure(cache, "8G") for _ in range(2)]
    result = {
        "command": "graphrun plan graphs/flux-dev.yaml --vram 8G --ram 64G --hardware rtx4090",
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
        **{name: summary(runs) for name, runs in runs_by_state.items()},
    }
    path = ROOT / "benchmarks/results/start_up.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()

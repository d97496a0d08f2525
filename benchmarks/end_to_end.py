"""Measure the time of planning FLUX.1-dev by part, and small runs, planned and measured.

python benchmarks/end_to_end.py    writes results/end_to_end.json
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RUNS = 3
OPTIONS = ("--vram", "8G", "--ram", "64G", "--hardware", "rtx4090", "--no-cache")
os.environ.update(TRANSFORMERS_VERBOSITY="error", DIFFUSERS_VERBOSITY="error", HF_HUB_OFFLINE="1")


def command_seconds() -> list[float]:
    """Return the wall seconds of the whole command, imports included, a few times."""
    command = [Path(sys.executable).parent / "graphrun", "plan", ROOT / "graphs/flux-dev.yaml"]
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        subprocess.run([*command, *OPTIONS], check=True, capture_output=True)
        seconds.append(round(time.perf_counter() - start, 2))
    return seconds


def inside() -> dict[str, Any]:
    """Return the seconds of each part in one process, and the calls that the dry run traced."""
    start = time.perf_counter()
    import diffusers
    import highspy  # noqa: F401
    import torch
    import transformers

    for name in (
        "AutoencoderKL",
        "FluxPipeline",
        "FluxTransformer2DModel",
        "FlowMatchEulerDiscreteScheduler",
    ):
        getattr(diffusers, name)
    for name in ("CLIPTextModel", "T5EncoderModel", "PreTrainedTokenizerFast"):
        getattr(transformers, name)
    imported = time.perf_counter()

    import graphrun
    from graphrun.profile.dry_run import probe

    graph = graphrun.load(ROOT / "graphs/flux-dev.yaml")
    recording = probe(graph, graph.for_planning({}))
    dry_run = time.perf_counter()
    problem = graphrun.estimate(graph, vram="8G", ram="64G", hardware="rtx4090")
    estimated = time.perf_counter()
    solution = graphrun.plan(problem)
    solve_end = time.perf_counter()
    from graphrun.report.screen import plan_screen

    plan_screen(solution)
    screen_end = time.perf_counter()
    calls = {call.component: call for _, call in recording.recording.entries()}
    return {
        "threads": torch.get_num_threads(),
        "import_seconds": round(imported - start, 2),
        "load_and_dry_run_seconds": round(dry_run - imported, 2),
        "estimate_seconds (a second dry run and the numbers)": round(estimated - dry_run, 2),
        "solve_seconds": round(solve_end - estimated, 2),
        "screen_seconds": round(screen_end - solve_end, 2),
        "traced_mib (inputs included, scratch apart)": {
            name: round((call.peak_bytes + call.input_bytes) / 2**20, 1)
            for name, call in calls.items()
        },
        "predicted_seconds": solution.objective_seconds,
        "proven_optimal": solution.proven_optimal,
    }


def small_runs() -> dict[str, Any]:
    """Run the small graphs on the simulated accelerator under budgets that force streaming."""
    import graphrun
    from graphrun.verify.simulate import simulate

    results = {}
    for name, vram in (("flux-tiny", "6M"), ("sdxl-tiny", "13M")):
        graph = graphrun.load(ROOT / f"graphs/{name}.yaml")
        solution = graphrun.plan(graphrun.estimate(graph, vram=vram, hardware="sim"))
        simulation, trace = simulate(solution.problem, solution.plan), graphrun.run(solution, graph)
        results[f"{name} within {vram}"] = {
            "peak_bytes": {"planned": simulation.peak_bytes, "measured": trace.peak_bytes},
            "moved_bytes": {"planned": simulation.moved_bytes, "measured": trace.moved_bytes},
            "virtual_seconds": {
                "planned": round(simulation.seconds, 6),
                "measured": round(trace.seconds, 6),
            },
            "left_bytes": trace.left_bytes,
        }
    return results


def main() -> None:
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}",
        "versions": {
            name: version(name) for name in ("torch", "diffusers", "transformers", "highspy")
        },
        "command_seconds (graphrun plan flux-dev --vram 8G, imports included)": command_seconds(),
        "inside": inside(),
        "small_runs": small_runs(),
    }
    path = ROOT / "benchmarks/results/end_to_end.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()

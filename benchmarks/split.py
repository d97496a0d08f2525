"""What a second card brings to the reference graphs: plans for two cards, which may split a component, and for the first alone.

.venv/bin/python benchmarks/split.py [GRAPH ...]      some minutes; writes benchmarks/results/split.json

For each pair of budgets a session of ten runs with 64 GiB of RAM: seconds of the first run and of a further one, bytes streamed per
call of the denoiser, bound and gap, the split, and CPU seconds to plan (other programs run on the machine). ``alone``: the same
for the first card. All seconds are predictions of priors.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
os.environ.update(TRANSFORMERS_VERBOSITY="error", DIFFUSERS_VERBOSITY="error", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import graphrun  # noqa: E402
from graphrun.model.plan import blocks_text  # noqa: E402
from graphrun.model.problem import Problem  # noqa: E402

SMALL = {"height": 512, "width": 512}  # a call of FLUX.1-dev takes a fifth of the time that it takes for a picture of 1024 x 1024
CASES: tuple[tuple[str, dict[str, int], tuple[str, str], tuple[str, str]], ...] = (
    ("flux-dev", SMALL, ("24G", "8G"), ("rtx4090", "rtx3060")),
    ("flux-dev", SMALL, ("12G", "12G"), ("rtx4070ti", "rtx4070ti")),
    ("flux-dev", SMALL, ("8G", "8G"), ("rtx4060", "rtx4060")),
    ("flux-dev", {}, ("24G", "8G"), ("rtx4090", "rtx3060")),
    ("flux-dev", {}, ("24G", "12G"), ("rtx4090", "rtx3060")),
    ("flux-dev", {}, ("12G", "12G"), ("rtx3060", "rtx3060")),
    ("flux-dev", {}, ("8G", "8G"), ("rtx3060", "rtx3060")),
    ("wan-14b", {}, ("16G", "16G"), ("rtx4080", "rtx4080")),
    ("hunyuan-video", {}, ("24G", "24G"), ("rtx4090", "rtx4090")),
)
RUNS, RAM = 10, "64G"


def planned(problem: Problem) -> dict[str, Any]:
    """Figures of the plan for ``problem``."""
    start = time.process_time()
    solution = graphrun.plan(problem)
    seconds, of = time.process_time() - start, solution.simulation
    calls = max(use.calls for phase in solution.chosen.phases for use in phase.uses)
    return {
        "first_seconds": round(of.seconds, 2),
        "further_seconds": round(of.again_seconds, 2),
        "streamed_gib_per_call": round(sum(slot.streamed_bytes for slot in of.again) / calls / 2**30, 3),
        "peak_gib": round(max(slot.peak_bytes for slot in of.again) / 2**30, 2),
        "helper_peak_gib": [round(max(of) / 2**30, 2) for of in zip(*(slot.helper_peaks for slot in of.again), strict=True)],
        "bound_seconds": round(solution.bound_seconds, 2),
        "gap": round(solution.gap, 4),
        "split": [f"{name} device{helper} {blocks_text(blocks)}" for name, helper, blocks in solution.plan.splits],
        "on_helper": [component.name for component in solution.chosen.components if component.variants[0].helper],
        "plan_seconds": round(seconds, 1),
    }


def main() -> None:
    path, rows = HERE / "results" / "split.json", []
    names = sys.argv[1:]
    made = {"command": " ".join(["python benchmarks/split.py", *names]), "date": datetime.date.today().isoformat()}
    made |= {name: version(name) for name in ("torch", "diffusers", "highspy")}
    for name, inputs, vram, hardware in CASES:
        if names and name not in names:
            continue
        graph = graphrun.load(name)
        problem = graphrun.estimate(graph, vram=vram, ram=RAM, hardware=hardware, runs=RUNS, inputs=inputs)
        alone = graphrun.estimate(graph, vram=vram[0], ram=RAM, hardware=hardware[0], runs=RUNS, inputs=inputs)
        row = {
            "graph": name,
            "inputs": inputs,
            "vram": vram,
            "hardware": hardware,
            "two": planned(problem),
            "alone": planned(alone),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
        path.write_text(json.dumps(made | {"ram": RAM, "runs": RUNS, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

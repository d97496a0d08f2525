"""Compare plans for two cards, which may split a component, with other ways to use the cards.

    python benchmarks/split.py [GRAPH ...]    half an hour; writes results/split.json

For each pair of budgets a session of ten runs with 64 GiB of RAM: seconds of the first run and of a
further one, bytes streamed per call of the transformer, and how many of them are its own, bound and
gap, the split, and CPU seconds to plan (other programs run on the machine).

    two        both cards                       alone      the first card alone
    keep       both cards, the transformer stays on them: nothing of it is streamed
    halves     both cards, the last half of the transformer's blocks on the second
    balanced   both cards, blocks on the second as accelerate's ``device_map="balanced"`` has them

``halves`` and ``balanced`` are the planner's best plans with these splits, better than libraries
with fixed maps: those neither overlap copies with compute nor choose what else stays. null: nothing
fits, or the component cannot be split so. All seconds are predictions from data-sheet estimates.
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
os.environ.update(
    TRANSFORMERS_VERBOSITY="error",
    DIFFUSERS_VERBOSITY="error",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)

from accelerate import infer_auto_device_map  # noqa: E402
from accelerate.utils import get_balanced_memory, modeling  # noqa: E402

import graphrun  # noqa: E402
from graphrun.errors import PlanError  # noqa: E402
from graphrun.graph.graph import Graph  # noqa: E402
from graphrun.model.plan import blocks_text  # noqa: E402
from graphrun.model.problem import Problem  # noqa: E402
from graphrun.model.splits import with_splits  # noqa: E402
from graphrun.modules.build import meta_module  # noqa: E402
from graphrun.solve.milp import Formulation  # noqa: E402
from graphrun.solve.programs import program_of  # noqa: E402
from graphrun.solve.search import choose  # noqa: E402

# a call of FLUX.1-dev takes a fifth of its time for a picture of 1024 x 1024
SMALL = {
    "height": 512,
    "width": 512,
}
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


def planned(problem: Problem) -> dict[str, Any] | None:
    """Return figures of the plan for ``problem``."""
    start = time.process_time()
    try:
        solution = graphrun.plan(problem)
    except graphrun.Infeasible:
        return None
    seconds, simulation = time.process_time() - start, solution.simulation
    denoising = [slot for slot in simulation.further_slots if slot.phase.endswith(":transformer")]
    calls = sum(
        use.calls
        for phase in solution.chosen.phases
        for use in phase.uses
        if use.component == "transformer"
    )
    splits = [
        f"{name} device{secondary} {blocks_text(blocks)}"
        for name, secondary, blocks in solution.plan.splits
    ]
    return {
        "first_seconds": round(simulation.seconds, 2),
        "further_seconds": round(simulation.further_seconds, 2),
        "streamed_gib_per_call": round(
            sum(slot.streamed_bytes for slot in simulation.further_slots) / calls / 2**30, 3
        ),
        "transformer_gib_per_call": round(
            sum(slot.streamed_bytes for slot in denoising) / calls / 2**30, 3
        ),
        "peak_gib": round(max(slot.peak_bytes for slot in simulation.further_slots) / 2**30, 2),
        "secondary_peak_gib": [
            round(max(peaks) / 2**30, 2)
            for peaks in zip(
                *(slot.secondary_peaks for slot in simulation.further_slots), strict=True
            )
        ],
        "bound_seconds": round(solution.bound_seconds, 2),
        "gap": round(solution.gap, 4),
        "split": splits,
        "on_secondary": [
            component.name
            for component in solution.chosen.components
            if component.variants[0].secondary
        ],
        "plan_seconds": round(seconds, 1),
    }


def seconds_with(problem: Problem, paths: list[str]) -> dict[str, float] | None:
    """Return the best seconds with the transformer's blocks ``paths`` on the second card."""
    groups = problem.component("transformer").groups
    group_splits = [
        (group.name, tuple(i for i, path in enumerate(group.blocks) if path in paths))
        for group in groups
    ]
    try:
        program = program_of(
            with_splits(
                problem,
                [
                    (
                        "transformer",
                        1,
                        tuple(group_split for group_split in group_splits if group_split[1]),
                    )
                ],
            )
        )
    except PlanError:
        return None
    if (answer := choose([Formulation(program)])) is None:
        return None
    seconds = [answer.rows.slot_seconds(t) for t in range(len(answer.program.intervals))]
    first, further_seconds = seconds[: program.run_length], seconds[program.run_length :]
    return {
        "first_seconds": round(sum(first), 2),
        "further_seconds": round(sum(further_seconds), 2),
    }


def balanced(graph: Graph, problem: Problem) -> list[str]:
    """Return the blocks of the transformer that accelerate puts on the second card."""
    (phase,) = (
        candidate
        for candidate in problem.phases
        if candidate.uses and candidate.uses[0].component == "transformer"
    )
    working_bytes = max(phase.first_bytes, phase.steady_bytes) + phase.input_bytes
    budgets = {
        0: problem.effective_bytes - working_bytes,
        1: problem.secondaries[0].effective_bytes - working_bytes,
        "cpu": 1 << 40,
    }
    modeling.get_max_memory = lambda limits_dict: (
        limits_dict
    )  # accelerate omits cards that this machine does not have
    module = meta_module(graph.component("transformer"), graph.trust)
    whole = list(module._no_split_modules or ())
    limits = get_balanced_memory(module, budgets, no_split_module_classes=whole)
    device_map = infer_auto_device_map(module, limits, no_split_module_classes=whole)
    return [path for path, device in device_map.items() if device == 1]


def main() -> None:
    path, rows = HERE / "results" / "split.json", []
    names = sys.argv[1:]
    versions = {
        "command": " ".join(["python benchmarks/split.py", *names]),
        "date": datetime.date.today().isoformat(),
    }
    versions |= {name: version(name) for name in ("torch", "diffusers", "accelerate", "highspy")}
    for name, inputs, vram, hardware in CASES:
        if names and name not in names:
            continue
        graph = graphrun.load(name)
        problem = graphrun.estimate(
            graph, vram=vram, ram=RAM, hardware=hardware, runs=RUNS, inputs=inputs
        )
        resident_problem = graphrun.estimate(
            graph,
            vram=vram,
            ram=RAM,
            hardware=hardware,
            runs=RUNS,
            inputs=inputs,
            keep=["transformer"],
        )
        single_problem = graphrun.estimate(
            graph, vram=vram[0], ram=RAM, hardware=hardware[0], runs=RUNS, inputs=inputs
        )
        blocks = [
            path
            for group in problem.component("transformer").groups
            for path in group.blocks
            if path
        ]
        row: dict[str, Any] = {"graph": name, "inputs": inputs, "vram": vram, "hardware": hardware}
        row |= {
            "two": planned(problem),
            "alone": planned(single_problem),
            "keep": planned(resident_problem),
        }
        row["halves"] = seconds_with(problem, blocks[len(blocks) // 2 :])
        row["balanced"] = seconds_with(problem, balanced(graph, problem))
        rows.append(row)
        print(json.dumps(row), flush=True)
        path.write_text(
            json.dumps(versions | {"ram": RAM, "runs": RUNS, "rows": rows}, indent=1) + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()

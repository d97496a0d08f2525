"""Run full-size models one after another on the card, two denoising steps each.

    python benchmarks/card_models.py    minutes; adds to results/card-models.json, next to the
                                        measured bytes of each slot, what this version plans for it

Each model has a process, forked from one that has imported everything. Several processes estimate
and plan at a time; one at a time has the card.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

GRAPHS = Path(__file__).parent.parent / "graphs"
MODELS = (
    "sdxl",
    "sd35-large",
    "wan-14b",
    "z-image",
    "cogview4",
    "hunyuan-video15",
    "qwen-image",
    "sana",
    "ltx",
    "flux2-klein",
    "hidream",
    "auraflow",
    "kandinsky5",
    "pixart-sigma",
    "stable-cascade",
    "cogvideox-5b",
    "chroma",
    "sd3",
    "hunyuan-dit",
    "stable-audio",
)
"""Graphs in the order in which they are started."""
BUDGET, REHEARSAL_BUDGET = "8G", "4M"
PROCESSES = 4
STEPS = 2
CARD_SECONDS, REHEARSAL_SECONDS = 90, 300
"""Longest time of a process on the card; then it is ended."""
LONG_SECONDS = 15
"""A model whose first run takes longer has only this run."""


def model(name: str, path: Path, gate: Path, rehearse: bool) -> None:
    """Run one model by a plan for `BUDGET` twice, then with everything resident.

    If minimum VRAM is above `BUDGET`, that is the budget. The first and the last run must have the
    same bits. The second run has no digests, for its seconds. The card records the first run's
    allocations.
    """
    import torch
    from card_memory import compared, recorded
    from gpu_graphs import Bench, planned_figures
    from gpu_lab import Lab, Log

    import graphrun
    from graphrun.solve.infeasible import smallest_budget
    from graphrun.units import parse_size

    torch.set_num_threads(2)
    log = Log(path)
    bench = Bench(f"{name}-tiny" if rehearse else name, Lab(rehearse), STEPS, full_size=True)
    solutions: dict[str, Any] = {}
    with log.part("prepare") as record:
        bench.prepare(record)
        budget = parse_size(REHEARSAL_BUDGET if rehearse else BUDGET, name="budget")
        minimum = int(smallest_budget(bench.ample))
        record["minimum_bytes"], record["budget_bytes"] = minimum, max(budget, minimum)
        start = time.perf_counter()
        solutions["budget"] = graphrun.plan(bench.problem(max(budget, minimum)))
        record["solve_seconds"] = round(time.perf_counter() - start, 3)
        solutions["resident"] = graphrun.plan(bench.ample)
    if len(solutions) < 2:
        return
    torch.set_num_threads(8)
    with gate.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        signal.alarm(REHEARSAL_SECONDS if rehearse else CARD_SECONDS)
        with log.part("open") as record:
            bench.open(record)
        if bench.host is None:
            return
        for key, solution in solutions.items():
            with log.part(key) as record:
                simulation = solution.simulation
                record["planned"] = planned_figures(simulation)
                record["effective_bytes"] = solution.problem.effective_bytes
                record["plan"] = str(solution.plan).splitlines()
                record["layers"] = [
                    component.name
                    for component in solution.problem.components
                    if component.granularity == "layers"
                ]
                record["runs"] = []
                with recorded(bench.device) if key == "budget" else nullcontext() as events:
                    record["runs"].append(_followed(bench, solution, digests=True))
                log.save()
                if events is not None:
                    record["allocator"] = compared(events)
                    if record["runs"][0]["peak_bytes"] != simulation.peak_bytes:
                        events.write(Path(os.environ.get("OUT", path.parent)) / f"{name}.json.gz")
                seconds = record["runs"][0]["wall_seconds"]
                if seconds > LONG_SECONDS:
                    break
                if key == "budget":
                    record["runs"].append(_followed(bench, solution, digests=False))


def _followed(bench: Any, solution: Any, *, digests: bool) -> dict[str, Any]:
    trace, fingerprints, seconds = bench.follow(solution, digests=digests)
    bench.resident = bench.resident or fingerprints
    run: dict[str, Any] = bench.compared(
        solution.problem, solution.simulation, trace, fingerprints, seconds
    )
    return run


def run(arguments: argparse.Namespace) -> None:
    """Run as many models as the step's time allows, writing each result to ``--out``.

    A process that opened the card, or that has OpenMP threads, cannot be forked: importing
    bitsandbytes opens the card.
    """
    os.environ.update(PYTORCH_NVML_BASED_CUDA_CHECK="1", OMP_NUM_THREADS="1")
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    import diffusers  # noqa: F401 - imported once for all processes
    import torch
    import transformers  # noqa: F401

    import graphrun  # noqa: F401
    import graphrun.runtime.executor  # noqa: F401
    from graphrun.solve import infeasible  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()
    context: Any = multiprocessing.get_context("fork")
    folder = arguments.out.parent
    gate = folder / "gate"
    gate.touch()
    start_seconds = time.perf_counter()
    names, processes = list(MODELS), dict[str, Any]()
    if arguments.rehearse:
        names = [name for name in names if _tiny(name)]
    names = [name for name in names if not arguments.models or name in arguments.models.split(",")]
    results: dict[str, Any] = {}
    while names or processes:
        seconds_left = arguments.limit - (time.perf_counter() - start_seconds)
        while names and len(processes) < PROCESSES and seconds_left > 30:
            name = names.pop(0)
            process = context.Process(
                target=model, args=(name, folder / f"{name}.json", gate, arguments.rehearse)
            )
            process.start()
            processes[name] = process
        if seconds_left <= 30:
            names.clear()
        if seconds_left <= 0:
            for process in processes.values():
                process.kill()
        for name, process in list(processes.items()):
            if process.is_alive():
                continue
            process.join()
            del processes[name]
            path = folder / f"{name}.json"
            results[name] = json.loads(path.read_text()) if path.exists() else {}
            if process.exitcode:
                ended = "had no time left" if seconds_left <= 0 else "was ended"
                results[name]["ended"] = f"the process {ended} ({process.exitcode})"
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{name}: {time.perf_counter() - start_seconds:.0f} s", flush=True)
        time.sleep(0.05)


INPUTS = {"prompt": "a lighthouse at dusk, oil on canvas", "steps": STEPS, "seed": 3}


def replayed(name: str, budget_bytes: int, record: dict[str, Any]) -> Any:
    """Return the simulation of the plan in ``record`` as this version makes it."""
    import graphrun
    from graphrun.model.plan import parse
    from graphrun.solve.granularity import split_into_layers
    from graphrun.verify.solution import solution_of

    graph = graphrun.load(GRAPHS / f"{name}.yaml").without_sources()
    options: dict[str, Any] = {"vram": budget_bytes, "ram": "120G", "hardware": "h100"}
    problem = graphrun.estimate(graph, **options, inputs=INPUTS)
    problem = split_into_layers(problem, set(record["layers"]))
    text = "\n".join([f"plan {problem.digest}", *record["plan"][1:]])
    return solution_of(problem, parse(text)).simulation


def replay(results: dict[str, Any]) -> None:
    """Add to every plan in ``results`` the peaks of its slots as this version plans them."""
    for name, parts in results.items():
        for key in ("budget", "resident"):
            record = parts.get(key, {})
            if record.get("runs"):
                budget = parts["prepare"]["budget_bytes"] if key == "budget" else RESIDENT_BYTES
                simulation = replayed(name, budget, record)
                record["replayed"] = {
                    "peak_bytes": [slot.peak_bytes for slot in simulation.slots],
                    "seconds": simulation.seconds,
                }
                print(name, key, flush=True)


RESULTS = Path(__file__).parent / "results/card-models.json"
RESIDENT_BYTES = 84 * 10**9


def _tiny(name: str) -> bool:
    return (GRAPHS / f"{name}-tiny.yaml").exists()


if __name__ == "__main__":
    recorded_results = json.loads(RESULTS.read_text())
    replay(recorded_results["models"]["results"])
    RESULTS.write_text(json.dumps(recorded_results, indent=1) + "\n")

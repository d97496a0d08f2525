"""Measure the overhead of following a plan, and the overlap of copies with compute.

python benchmarks/executor.py [--overlap] [GRAPH ...]    minutes a graph; writes
                                                         results/executor.json
                                                         --overlap: only these figures

resident   CPU seconds of a run with everything resident, over diffusers' own pipeline as its
           users call it, on the same CPU: FLUX with a transformer of 218 M parameters. The two
           take turns in pairs; the median of the pairs' ratios, and its range (bootstrap, 95 %)
overhead   the same on sim, over the same stages without graphrun, so including the cost of
           simulating
overlap    seconds, on the simulated accelerator's clock, of the slot that streams most, over
           the bound 1.03 x max(compute, transfer) + one block. With the minimum budget, whose
           ring buffer has room for one layer, so that copies and compute take turns; and by
           block with room for one more, so that they need not
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ.update(
    TRANSFORMERS_VERBOSITY="error",
    DIFFUSERS_VERBOSITY="error",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)

import torch  # noqa: E402
from gpu_lab import placed  # noqa: E402

PAIRS, PAIRS_RESIDENT = 5, 24
STEPS = 8
# bytes per second to the device: from copy-bound to compute-bound
RATES = (
    2e8,
    5e8,
    1e9,
    2e9,
    5e9,
)
SLACK = 1.03
AMPLE = 1 << 40
LARGER = {
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56],
    "num_layers": 2,
    "num_single_layers": 1,
}


class Prepared:
    """A graph, its dry run, and its components."""

    def __init__(self, name: str, larger: Mapping[str, Any] | None = None, **inputs: Any) -> None:
        """Prepare graph ``name``. ``larger``: entries of the transformer's configuration."""
        import graphrun
        from graphrun.modules.build import build, build_part, meta_module
        from graphrun.profile.dry_run import probe

        self.graph = graphrun.load(HERE.parent / "graphs" / f"{name}.yaml")
        if larger:
            transformer = self.graph.components["transformer"]
            transformer = replace(transformer, config={**transformer.config, **larger})
            self.graph = replace(
                self.graph, components={**self.graph.components, "transformer": transformer}
            )
        self.inputs = self.graph.resolve({"steps": STEPS, **inputs})
        self.recording = probe(self.graph, self.inputs)
        self.modules = {
            n: build(component, self.graph) for n, component in self.graph.components.items()
        }
        self.parts = {n: build_part(part, self.graph) for n, part in self.graph.parts.items()}
        self.meta_modules = {
            n: meta_module(component, self.graph.trust)
            for n, component in self.graph.components.items()
        }

    def problem(self, budget_bytes: int, rate: float = 1e9) -> Any:
        """Return the problem on the simulated accelerator with ``rate`` bytes per second to it."""
        from graphrun.profile.hardware import simulated
        from graphrun.profile.problems import ProblemLimits, problem_of

        hardware = replace(simulated(), h2d_bytes_per_second=rate, d2h_bytes_per_second=rate)
        return problem_of(
            self.graph, self.recording, hardware, ProblemLimits(budget_bytes, AMPLE), self.inputs
        )

    def stages(self, place: torch.device) -> None:
        """Run the graph's stages without graphrun's executor."""
        from graphrun.ops import Stages

        Stages(self.graph, self.modules, place, self.inputs, self.parts, self.meta_modules).run()


def resident_plan(problem: Any) -> Any:
    """Return a plan that loads every component before its phase and keeps it to the end."""
    from graphrun.model.plan import parse

    lines, components = [f"plan {problem.digest}"], []
    for phase in problem.phases:
        lines.append(f"slot {phase.name} load")
        new = [use.component for use in phase.uses if use.component not in components]
        lines += [f"  load {name} all from pinned" for name in new]
        components += new
        lines += [f"slot {phase.name} first", "  run"]
        lines += (
            [f"slot {phase.name} steady x{phase.steady_calls}", "  run"]
            if phase.steady_calls
            else []
        )
    return parse("\n".join([*lines, "slot end", *(f"  evict {name} all" for name in components)]))


def paired(
    plain: Callable[[], object], graphrun_call: Callable[[], object], pairs: int = PAIRS
) -> dict[str, Any]:
    """Return ratios of CPU seconds, graphrun over plain, alternating which runs first. Other
    programs may share the cores."""
    seconds: list[tuple[float, float]] = []
    for number in range(pairs + 1):
        cpu_seconds = {}
        for kind, run in (
            (("plain", plain), ("ours", graphrun_call))
            if number % 2
            else (("ours", graphrun_call), ("plain", plain))
        ):
            gc.collect()
            start = time.process_time()
            run()
            cpu_seconds[kind] = time.process_time() - start
        seconds.append((cpu_seconds["plain"], cpu_seconds["ours"]))
    ratios = sorted(
        graphrun_seconds / plain for plain, graphrun_seconds in seconds[1:]
    )  # the first pair warms up
    return {
        "median_ratio": round(statistics.median(ratios), 4),
        "median_lies_between": interval(ratios),
        "quartiles": [round(q, 4) for q in statistics.quantiles(ratios, n=4)],
        "plain_seconds": round(statistics.median(plain for plain, _ in seconds[1:]), 4),
        "load": [round(load, 1) for load in os.getloadavg()],
        "pairs": pairs,
    }


def interval(ratios: list[float]) -> list[float]:
    """Return the range of the median of these ratios in 95 of 100 samples drawn from them."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return [round(medians[50], 4), round(medians[-51], 4)]


def resident() -> dict[str, Any]:
    """Compare graphrun with diffusers' pipeline: FLUX on the CPU, resident. Pictures are equal."""
    import numpy as np

    import graphrun
    from graphrun.modules.build import resolve_class

    prepared = Prepared("flux-tiny", LARGER, steps=8)
    graph, inputs = prepared.graph, prepared.inputs
    kind = resolve_class(graph.pipeline, graph.trust)
    pipeline = kind(
        **prepared.modules, **prepared.parts, image_encoder=None, feature_extractor=None
    )
    pipeline.set_progress_bar_config(disable=True)
    call = {
        name: inputs[name]
        for name in ("prompt", "height", "width", "guidance_scale", "max_sequence_length")
    }

    def plain() -> Any:
        generator = torch.Generator("cpu").manual_seed(inputs["seed"])
        return pipeline(**call, num_inference_steps=inputs["steps"], generator=generator).images[0]

    with graphrun.Session(graph, inputs=inputs, memory="auto") as session:

        def ours() -> Any:
            return session.run().outputs["image"]

        if not np.array_equal(np.asarray(plain()), np.asarray(ours())):
            raise AssertionError("the pictures differ")
        ratios = paired(plain, ours, PAIRS_RESIDENT)
    parameters = sum(p.numel() for p in prepared.modules["transformer"].parameters())
    return {
        "transformer_parameters": parameters,
        "steps": inputs["steps"],
        **ratios,
        "within": ratios["median_ratio"] <= 1.01,
    }


def overhead(name: str) -> dict[str, Any]:
    """Measure resident runs of graph ``name`` on sim."""
    from graphrun.runtime.devices.simulated import SimulatedDevice
    from graphrun.runtime.host import Host
    from graphrun.runtime.recovery import execute
    from graphrun.sim import Machine
    from graphrun.verify.solution import solution_of

    prepared = Prepared(name)
    problem = prepared.problem(AMPLE)
    plan, device = resident_plan(problem), SimulatedDevice(Machine())
    host = Host.of_graph(prepared.graph, problem, device, prepared.modules)

    def on_sim() -> None:
        with device.capped(AMPLE), placed(prepared.modules, device.torch_device), torch.no_grad():
            prepared.stages(device.torch_device)

    def planned() -> None:
        execute(solution_of(problem, plan), prepared.graph, prepared.inputs, device, host=host)

    return {"on sim, the whole executor": paired(on_sim, planned)}


def overlap(name: str) -> list[dict[str, Any]]:
    """Measure the slot that streams the largest component, at several rates. Budgets: the minimum,
    and with room for another block."""
    import graphrun
    from graphrun.runtime.devices.simulated import SimulatedDevice
    from graphrun.runtime.host import Host
    from graphrun.runtime.recovery import execute
    from graphrun.sim import Machine
    from graphrun.solve.infeasible import smallest_budget
    from graphrun.verify.simulate import simulate

    prepared, rows = Prepared(name), []
    for rate, room in ((rate, room) for room in ("least", "another block") for rate in RATES):
        problem = prepared.problem(AMPLE, rate)
        if room == "least":
            problem = replace(problem, budget_bytes=smallest_budget(problem))
        else:
            problem = replace(
                problem,
                components=tuple(
                    replace(component, layers=None) for component in problem.components
                ),
            )
            streamed = (
                (k, b)
                for c in problem.components
                for k, b in zip(c.groups, c.variants[0].block_bytes, strict=True)
            )
            another_bytes = max(nbytes for k, nbytes in streamed if k.streamable)
            problem = replace(problem, budget_bytes=smallest_budget(problem) + another_bytes)
        solution = graphrun.plan(problem)
        problem = solution.problem
        device = SimulatedDevice(
            Machine(h2d_bytes_per_second=rate, d2h_bytes_per_second=rate, flops_per_second=1e11)
        )
        host = Host.of_graph(prepared.graph, problem, device, prepared.modules)
        trace = execute(solution, prepared.graph, prepared.inputs, device, host=host)
        reports = simulate(problem, solution.plan).slots
        index = max(range(len(reports)), key=lambda i: reports[i].streamed_bytes)
        slot, report = trace.slots[index], reports[index]
        seconds, transfer = slot.end_seconds - slot.start_seconds, slot.moved_bytes / rate
        phase = next(p for p in problem.phases if p.name == slot.phase)
        block = max(
            b / rate + s
            for use in phase.uses
            for k, b, s in zip(
                problem.component(use.component).groups,
                problem.component(use.component).variants[0].block_bytes,
                use.seconds,
                strict=True,
            )
            if k.streamable
        )
        bound = SLACK * max(report.compute_seconds, transfer) + block
        rows.append(
            {
                "bytes_per_second": rate,
                "room": room,
                "by": "layer"
                if any(
                    problem.component(use.component).granularity == "layers" for use in phase.uses
                )
                else "block",
                "slot": f"{slot.phase} {slot.part}",
                "seconds": seconds,
                "planned_seconds": report.seconds,
                "compute_seconds": report.compute_seconds,
                "transfer_seconds": transfer,
                "one_block_seconds": block,
                "over_bound": round(seconds / bound, 4),
                "within": seconds <= bound,
                "by_class_seconds": (groups := by_class(problem, solution.plan.slots[index], rate)),
                "within_by_class": seconds <= SLACK * max(groups, transfer) + block,
            }
        )
    return rows


def by_class(problem: Any, slot: Any, rate: float) -> float:
    """Return the longer of compute and transfer, summed over the component's block groups."""
    from graphrun.model.plan import Stream

    (stream,) = (action for action in slot.actions if isinstance(action, Stream))
    component, resident_counts = (
        problem.component(stream.component),
        {name: len(blocks) for name, blocks in stream.keep or ()},
    )
    phase = next(phase for phase in problem.phases if phase.name == slot.phase)
    use, total = next(use for use in phase.uses if use.component == stream.component), 0.0
    calls, sizes = use.group_calls_in(slot.part), component.variants[0].block_bytes
    for k, group in enumerate(component.groups):
        copy_bytes = (
            (len(group.blocks) - resident_counts.get(group.name, 0)) * sizes[k] * use.passes_of(k)
            if group.streamable
            else 0
        )
        total += calls[k] * max(len(group.blocks) * use.seconds[k], copy_bytes / rate)
    return total


def main() -> None:
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread, Python "
        f"{platform.python_version()}",
        "versions": {name: version(name) for name in ("torch", "diffusers", "transformers")},
        "steps": STEPS,
    }
    path = HERE / "results" / "executor.json"
    names = [name for name in sys.argv[1:] if name != "--overlap"] or ["flux-tiny", "sdxl-tiny"]
    only_overlap = "--overlap" in sys.argv
    if only_overlap:
        result = json.loads(path.read_text())
    else:
        result["resident, on the CPU"] = resident()
    for name in names:
        result[name] = {**result.get(name, {}), "overlap": overlap(name)}
        if not only_overlap:
            result[name]["overhead"] = overhead(name)
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()

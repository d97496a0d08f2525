"""Measure repeated work on the simulated accelerator, in virtual time.

    python benchmarks/repeated.py [--quick]    writes results/repeated.json

Many prompts, sessions, kills and resumes, a shared cache.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import multiprocessing
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FORK = multiprocessing.get_context("fork")
SMALL = {"height": 32, "width": 32, "steps": 4, "max_sequence_length": 16}
# flux-tiny's transformer does not fit whole, its encoders do, as FLUX.1-dev within 12 GiB
BUDGET = {"vram": "6M", "ram": "8G", "hardware": "sim"}
os.environ.update(
    TRANSFORMERS_VERBOSITY="error",
    DIFFUSERS_VERBOSITY="error",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)


def graph() -> Any:
    import graphrun

    return graphrun.load(ROOT / "graphs/flux-tiny.yaml")


def prompts(count: int) -> list[dict[str, Any]]:
    """Return ``count`` different prompts."""
    return [{"prompt": f"a lighthouse, take {number}", "seed": number} for number in range(count)]


def many(count: int) -> dict[str, Any]:
    """Compare bytes and seconds of prompts by the chosen schedule with other ways. These are
    separate cold runs, and diffusers' model offload."""
    import graphrun
    from graphrun.verify.simulate import simulate

    pipeline_graph = graph()
    batch = graphrun.run_many(pipeline_graph, prompts(count), common=SMALL, **BUDGET)
    schedule = batch.schedules[0]
    solution = graphrun.plan(graphrun.estimate(pipeline_graph, inputs=SMALL, **BUDGET))
    cold = simulate(solution.problem, solution.plan)
    traces = [graphrun.run(solution, pipeline_graph, request) for request in prompts(2)]
    is_equal = all(
        trace.outputs["image"].tobytes() == batch.outputs[number + 1]["image"].tobytes()
        for number, trace in enumerate(traces)
    )
    offload = offloaded(pipeline_graph, min(count, 4))
    return {
        "prompts": count,
        "chosen": schedule.name,
        "segments": [list(segment.stages) for segment in schedule.segments],
        "predicted_seconds": schedule.seconds,
        "measured_seconds": batch.seconds,
        "predicted_bytes": schedule.moved_bytes,
        "measured_bytes": batch.moved_bytes,
        "request by request, cold": {
            "predicted_seconds": count * cold.seconds,
            "predicted_bytes": count * cold.moved_bytes,
            "measured_seconds_each": [trace.seconds for trace in traces],
        },
        "diffusers' model offload": {
            "measured_prompts": offload["prompts"],
            "seconds": count * offload["seconds_each"],
            "bytes": count * offload["bytes_each"],
            "peak_bytes": offload["peak_bytes"],
            "budget_bytes": solution.problem.budget_bytes,
        },
        "pictures equal those of single runs": is_equal,
    }


def offloaded(pipeline_graph: Any, count: int) -> dict[str, Any]:
    """Return seconds and bytes of a later prompt under ``enable_model_cpu_offload``, uncapped."""
    import torch

    from graphrun import sim
    from graphrun.modules.build import build, build_part
    from graphrun.profile import hardware as devices

    from diffusers import FluxPipeline  # isort: skip

    parts = {
        name: build(component, pipeline_graph)
        for name, component in pipeline_graph.components.items()
    }
    parts |= {name: build_part(part, pipeline_graph) for name, part in pipeline_graph.parts.items()}
    pipeline = FluxPipeline(**parts)
    pipeline.set_progress_bar_config(disable=True)
    rates = devices.hardware("sim")
    torch.__future__.set_swap_module_params_on_conversion(True)
    with (
        sim.Machine(
            h2d_bytes_per_second=rates.h2d_bytes_per_second,
            d2h_bytes_per_second=rates.d2h_bytes_per_second,
            flops_per_second=rates.flops_per_second,
        ) as machine,
        torch.no_grad(),
    ):
        pipeline.enable_model_cpu_offload(device=sim.device)
        marks = []
        for request in prompts(count):
            pipeline(
                prompt=request["prompt"],
                height=SMALL["height"],
                width=SMALL["width"],
                num_inference_steps=SMALL["steps"],
                max_sequence_length=SMALL["max_sequence_length"],
                generator=torch.Generator("cpu").manual_seed(request["seed"]),
            )
            machine.synchronize()
            marks.append((machine.seconds(), machine.bytes_in))
        pipeline.remove_all_hooks()
        peak = machine.peak_bytes
    torch.__future__.set_swap_module_params_on_conversion(False)
    (first_seconds, first_bytes), (seconds, nbytes) = marks[0], marks[-1]
    return {
        "prompts": count,
        "seconds_each": (seconds - first_seconds) / (count - 1),
        "bytes_each": (nbytes - first_bytes) // (count - 1),
        "peak_bytes": peak,
    }


def full_size(count: int) -> dict[str, Any]:
    """Plan and simulate the same comparison at full size: FLUX.1-dev within 12 GiB, without
    weights."""
    import graphrun
    from graphrun.batch.schedule import schedules
    from graphrun.verify.simulate import simulate

    pipeline_graph = graphrun.load(ROOT / "graphs/flux-dev.yaml")
    problem = graphrun.estimate(pipeline_graph, vram="12G", ram="64G", hardware="rtx4090")
    solution = graphrun.plan(problem)
    cold = simulate(solution.problem, solution.plan)
    schedule_list = schedules(
        pipeline_graph,
        problem,
        {stage.name: count for stage in pipeline_graph.stages},
        count,
        graphrun.plan,
    )
    return {
        "prompts": count,
        "request by request, cold": {
            "predicted_seconds": count * cold.seconds,
            "predicted_bytes": count * cold.moved_bytes,
        },
        "schedules": {
            schedule.name: {
                "predicted_seconds": schedule.seconds,
                "predicted_bytes": schedule.moved_bytes,
            }
            for schedule in schedule_list
        },
        "chosen": schedule_list[0].name,
    }


def session(runs: int) -> dict[str, Any]:
    """Compare runs 2 to ``runs`` of a session with run 2, in actions and virtual seconds; and what
    closing leaves."""
    import graphrun

    with graphrun.Session(graph(), inputs=SMALL, runs=runs, **BUDGET) as session_object:
        traces = session_object.map(prompts(runs))
        tiers = session_object.close()
    events = [
        [(e.kind, e.component, e.slot, e.detail, e.nbytes) for e in trace.events]
        for trace in traces
    ]
    seconds = [trace.seconds for trace in traces]
    return {
        "runs": runs,
        "first_seconds": seconds[0],
        "further_seconds": [min(seconds[1:]), max(seconds[1:])],
        "same_actions": all(actions == events[1] for actions in events[1:]),
        "drift": (max(seconds[1:]) - min(seconds[1:])) / min(seconds[1:]),
        "same_peaks": len({trace.peak_bytes for trace in traces[1:]}) == 1,
        "left_bytes_after_close": {tier.name: tier.left_bytes for tier in tiers},
    }


def repeated_prompts(times: int) -> dict[str, Any]:
    """Run three prompts, each with several seeds: how often encoders were loaded, in a batch and
    with its cached outputs."""
    import graphrun

    requests = [{"prompt": f"prompt {number % 3}", "seed": number} for number in range(3 * times)]
    with tempfile.TemporaryDirectory() as cache:
        first = graphrun.run_many(graph(), requests, common=SMALL, cache=Path(cache), **BUDGET)
        second = graphrun.run_many(graph(), requests, common=SMALL, cache=Path(cache), **BUDGET)
    with (
        tempfile.TemporaryDirectory() as cache,
        graphrun.Session(graph(), inputs=SMALL, cache=Path(cache), **BUDGET) as session_object,
    ):
        traces = session_object.map(requests)
    return {
        "requests": len(requests),
        "runs of a session that loaded encoders": sum(bool(encoders_in(trace)) for trace in traces),
        "runs of encode": sum("encode" in stages for stages, _, _ in first.traces),
        "bytes of encoders": encoder_bytes(first),
        "encoders are": sum(
            sum(b * len(k.blocks) for k, b in zip(c.groups, c.variants[0].block_bytes, strict=True))
            for segment in first.schedules[0].segments
            for c in segment.solution.problem.components
            if "text_encoder" in c.name
        ),
        "runs of encode, again": sum("encode" in stages for stages, _, _ in second.traces),
        "bytes of encoders, again": encoder_bytes(second),
    }


def encoder_bytes(batch: Any) -> int:
    """Return the bytes of text encoders that were copied to the device."""
    return sum(encoders_in(trace) for _, _, trace in batch.traces)


def encoders_in(trace: Any) -> int:
    """Return `encoder_bytes` of one run."""
    return sum(
        e.nbytes
        for e in trace.events
        if e.kind in ("load", "stream") and "text_encoder" in e.component
    )


def kills(count: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Kill a batch ``count`` times for each of ``seeds`` at random moments, resuming each time;
    then compare every file in the folder, hidden ones too, with an unbroken batch."""
    import graphrun
    from graphrun.report.outputs import save_outputs

    pipeline_graph, requests = graph(), 8
    root = Path(tempfile.mkdtemp(prefix="graphrun-kills-"))

    def batch(name: str, requests: int) -> Any:
        folder = root / name
        folder.mkdir(exist_ok=True)

        def sink(request: Any, outputs: Any) -> list[Path]:
            return save_outputs(outputs, folder / f"{request.number:04d}.png")

        return graphrun.run_many(
            pipeline_graph,
            prompts(requests),
            common=SMALL,
            cache=root / "cache",
            reuse="none",
            sink=sink,
            resume=root / f"{name}.state",
            **BUDGET,
        )

    def killed_until_done(moments: random.Random, seconds: float, limit: int) -> int:
        """Return the number of kills of one batch, ``limit`` at most."""
        for name in ("broken", "broken.state"):
            shutil.rmtree(root / name, ignore_errors=True)
        for number in range(limit + 1):
            child = FORK.Process(target=lambda: batch("broken", requests))
            child.start()
            child.join(moments.uniform(0.02, 0.4) * seconds if number < limit else None)
            if child.exitcode is not None:
                assert child.exitcode == 0, "the batch failed"
                return number
            child.kill()
            child.join()
        raise AssertionError("the last one has no deadline")

    try:
        batch("warm", 2)
        start = time.monotonic()
        batch("whole", requests)
        seconds = time.monotonic() - start
        expected, seed_results = digests(root / "whole"), []
        for seed in seeds:
            moments, kill_count, rounds, wrong = random.Random(seed), 0, 0, list[str]()
            while kill_count < count and not wrong:  # as many batches as it takes
                kill_count, rounds = (
                    kill_count + killed_until_done(moments, seconds, count - kill_count),
                    rounds + 1,
                )
                results = digests(root / "broken")
                wrong = sorted(
                    name
                    for name in results.keys() | expected.keys()
                    if results.get(name) != expected.get(name)
                )
            seed_results.append(
                {"seed": seed, "kills": kill_count, "batches": rounds, "unequal": wrong}
            )
        return {
            "kills": sum(result["kills"] for result in seed_results),
            "batches": sum(result["batches"] for result in seed_results),
            "requests": requests,
            "every request done once, equal to the uninterrupted run": not any(
                result["unequal"] for result in seed_results
            ),
            "seeds": seed_results,
        }
    finally:
        shutil.rmtree(root)


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def two_on_one_cache(seconds: float, seed: int) -> dict[str, Any]:
    """Let two processes write, read and evict in one cache; return torn values, errors and lost
    entries."""
    import torch

    from graphrun.batch.cache.pack import pack, unpack
    from graphrun.disk_store import Store

    root = Path(tempfile.mkdtemp(prefix="graphrun-cache-"))

    def value(number: int) -> Any:
        return {"number": number, "tensor": torch.full((64 * (1 + number % 7),), number)}

    def work(name: int) -> None:
        chance, store = random.Random(seed + name), Store(root / "cache", limit_bytes=64 * 1024)
        roomy = Store(root / "roomy")  # nothing is evicted from here, so a missing entry was lost
        counts = {"puts": 0, "hits": 0, "misses": 0, "torn": 0}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            number = chance.randrange(40)
            if chance.random() < 0.3:
                store.put(f"{number:064x}", pack(value(number)))
                counts["puts"] += 1
                roomy.put(f"{name}-{counts['puts']}", pack(value(number)))
                continue
            data = store.get(f"{number:064x}")
            counts["misses" if data is None else "hits"] += 1
            if data is not None and not same(unpack(data), value(number)):
                counts["torn"] += 1
        (root / f"{name}.json").write_text(json.dumps(counts))

    def same(left_value: Any, right_value: Any) -> bool:
        return left_value["number"] == right_value["number"] and torch.equal(
            left_value["tensor"], right_value["tensor"]
        )

    try:
        children = [FORK.Process(target=work, args=(name,)) for name in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        codes = [child.exitcode for child in children]
        counts = (
            [json.loads((root / f"{name}.json").read_text()) for name in range(2)]
            if not any(codes)
            else []
        )
        store = Store(root / "cache")
        damaged = store.verify()
        entries = store.entries()
        return {
            "seconds": seconds,
            "failed": sum(bool(code) for code in codes),
            "counts": counts,
            "entries": len(entries),
            "damaged": len(damaged),
            "lost": sum(count["puts"] for count in counts) - len(Store(root / "roomy").entries()),
        }
    finally:
        shutil.rmtree(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer prompts, runs, kills and seconds; nothing is written",
    )
    parser.add_argument(
        "--only",
        action="append",
        help="this part alone (the beginning of its name); the others' results stay",
    )
    options = parser.parse_args()
    quick, path = options.quick, ROOT / "benchmarks/results/repeated.json"
    import torch

    torch.set_num_threads(1)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "many prompts, flux-tiny": lambda: many(4 if quick else 32),
        "many prompts, FLUX.1-dev within 12 GiB (predicted)": lambda: full_size(32),
        "session": lambda: session(5 if quick else 50),
        "three prompts repeated": lambda: repeated_prompts(2 if quick else 4),
        "two processes on one cache": lambda: two_on_one_cache(3 if quick else 60, 1),
        "killed and gone on": lambda: kills(2 if quick else 30, (3,) if quick else (3, 4, 5)),
    }
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}",
        "versions": {
            name: version(name) for name in ("torch", "diffusers", "transformers", "highspy")
        },
    }
    if options.only and path.exists():
        result = {**json.loads(path.read_text()), **result}
    for name, measure in parts.items():
        if options.only and not any(name.startswith(start) for start in options.only):
            continue
        result[name] = measure()
        print(name, json.dumps(result[name], indent=1), flush=True)
        if not quick:
            path.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0)


if __name__ == "__main__":
    main()

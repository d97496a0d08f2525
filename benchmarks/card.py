"""Run one step of the card script (`benchmarks/card.sh`): at most six minutes.

    python benchmarks/card.py STEP [--rehearse] [--out FILE] [--limit SECONDS]

Results are written after every part. A part is a process of its own, because a CUDA error breaks
its process; it is ended when the step's time is over. Exit code 1: a part failed or a promise was
broken; the results say which.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
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

from gpu import about, broken  # noqa: E402

STEPS = ("rates", "flux", "check", "peers", "models")
LIMIT_SECONDS, REHEARSAL_SECONDS = 350, 1800
CELLS = (
    ("graphrun", "8G"),
    ("graphrun.attach", "8G"),
    ("graphrun.attach", "24G"),
    ("graphrun", "24G"),
    ("graphrun, session of 2", "8G"),
    ("diffusers group offload, block, stream", "8G"),
    ("diffusers sequential offload", "8G"),
    ("diffusers group offload, leaf, stream", "8G"),
    ("graphrun, session of 2", "24G"),
    ("diffusers model offload", "24G"),
    ("mmgp", "24G"),
    ("diffusers-mm auto", "24G"),
    ("mmgp", "8G"),
    ("diffusers-mm auto", "8G"),
    ("accelerate dispatch", "24G"),
    ("diffusers group offload, block, stream", "24G"),
    ("diffusers model offload", "8G"),
)
"""Tool and cap, in the order in which they run until the step's time is over."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=STEPS)
    parser.add_argument(
        "--rehearse", action="store_true", help="on the simulated accelerator, with graphs tiny"
    )
    parser.add_argument(
        "--limit",
        type=float,
        help=f"seconds for the step; default {LIMIT_SECONDS}, in a rehearsal {REHEARSAL_SECONDS}",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="the results; default benchmarks/results/card-STEP.json, or in $OUT",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        help="peers: the results of an earlier run, whose finished cells are kept",
    )
    parser.add_argument("--models", default="", help="models: these graphs, comma-separated")
    parser.add_argument(
        "--part", choices=("flux", "attach", "peers", "models"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    arguments.limit = arguments.limit or (
        REHEARSAL_SECONDS if arguments.rehearse else LIMIT_SECONDS
    )
    return arguments


class Step:
    """The parts of one step, and where their results go."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.start_seconds = arguments, time.perf_counter()
        default = (
            Path("out") if arguments.rehearse else Path(os.environ.get("OUT", HERE / "results"))
        )
        self.path: Path = (
            arguments.out
            or default / f"card-{arguments.step}{'-rehearsal' if arguments.rehearse else ''}.json"
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, Any] = {"about": about(arguments.rehearse)}

    @property
    def seconds_left(self) -> float:
        """Seconds left of the step's time."""
        return float(self.arguments.limit - (time.perf_counter() - self.start_seconds))

    def part(self, name: str, command: list[str], results: Path | None = None) -> None:
        """Run ``command`` and store its ``results`` file, or else the last lines of its output."""
        start, record = time.perf_counter(), dict[str, Any]()
        if self.seconds_left < 5:
            record["failed"] = "no time was left"
        else:
            try:
                process = subprocess.run(
                    command, capture_output=True, text=True, timeout=self.seconds_left, check=False
                )
                output_lines = (process.stdout + process.stderr).strip().splitlines()
                if process.returncode:
                    record["failed"] = f"ended with {process.returncode}: " + " | ".join(
                        output_lines[-60:]
                    )
                elif results is None:
                    record["output"] = _json_or_lines(process.stdout)
            except subprocess.TimeoutExpired as late:
                record["failed"] = f"ended after {late.timeout:.0f} s"
        if results is not None and results.exists():
            record["results"] = json.loads(results.read_text())
        record["took_seconds"] = round(time.perf_counter() - start, 2)
        self.results[name] = record
        self.results["broken"] = broken(self.results)
        self.path.write_text(json.dumps(self.results, indent=1) + "\n")
        print(
            f"{name}: {record['took_seconds']} "
            f"s{'  FAILED: ' + record['failed'][:300] if 'failed' in record else ''}",
            flush=True,
        )

    def gpu(self, sections: str, *extra: str) -> None:
        """Run sections of benchmarks/gpu.py as parts."""
        for section in sections.split(","):
            with tempfile.TemporaryDirectory() as folder:
                output_file = Path(folder) / "gpu.json"
                command = [
                    sys.executable,
                    str(HERE / "gpu.py"),
                    "--sections",
                    section,
                    "--out",
                    str(output_file),
                    *extra,
                ]
                command += ["--limit", f"{max(self.seconds_left - 5, 1):.0f}", *self._rehearse]
                self.part(section, command, output_file)

    def own(self, part: str, *extra: str) -> None:
        """Run a part of this file in a process of its own."""
        with tempfile.TemporaryDirectory() as folder:
            output_file = Path(folder) / "part.json"
            command = [
                sys.executable,
                __file__,
                self.arguments.step,
                "--part",
                part,
                "--out",
                str(output_file),
                *self._rehearse,
                *extra,
            ]
            self.part(part, [*command, "--limit", f"{self.seconds_left - 5:.0f}"], output_file)

    @property
    def _rehearse(self) -> list[str]:
        return ["--rehearse"] if self.arguments.rehearse else []


def _json_or_lines(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.strip().splitlines()[-40:]


def check(step: Step) -> None:
    """Test the machine, the contract of devices, and tiny graphs."""
    step.part("doctor", [sys.executable, "-m", "graphrun", "doctor", "--json"])
    step.own("attach")
    device = ("--device", "sim") if step.arguments.rehearse else ()
    for precision in "int8", "nf4", "bfloat16":
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "graphrun", "run", _graph_in(precision, folder)]
            output = ("--vram", "12M" if device else "1G", "--output", f"{folder}/picture.png")
            step.part(f"run, {precision}", [*command, *device, *output])
    contract = ["tests/runtime/test_contract.py", "tests/runtime/test_cuda.py"]
    contract = [path for path in contract if (HERE.parent / path).exists()]
    step.part(
        "contract",
        [sys.executable, "-m", "pytest", "-q", "-rfs", "-p", "no:cacheprovider", *contract],
    )
    step.gpu("tiny")


def _graph_in(precision: str, folder: str) -> str:
    """Return a file of graph flux-tiny in ``folder`` whose transformer has ``precision``."""
    graphs = HERE.parent / "graphs"
    text = (graphs / "flux-tiny.yaml").read_text()
    text = re.sub(r"(configs|tokenizers)/", rf"{graphs}/\1/", text)
    transformer = "tiny-flux-transformer.json, dtype: bfloat16"
    assert transformer in text
    path = Path(folder) / "graph.yaml"
    path.write_text(text.replace(transformer, f"{transformer}, precision: [{precision}]"))
    return str(path)


def rates(step: Step) -> None:
    """Calibrate, and measure context, copies and kernels one by one. Later steps plan with this
    profile."""
    device = "sim" if step.arguments.rehearse else "cuda"
    step.part(
        "calibrate",
        [
            sys.executable,
            "-m",
            "graphrun",
            "calibrate",
            "--device",
            device,
            "--seconds",
            "20",
            "--json",
        ],
    )
    if not step.arguments.rehearse:
        step.gpu("machine")


def flux(step: Step) -> None:
    """Run FLUX.1-dev at full size."""
    step.own("flux")


def peers(step: Step) -> None:
    """Run other tools at equal caps."""
    record = step.arguments.resume
    step.own("peers", *(("--resume", str(record)) if record else ()))


def models(step: Step) -> None:
    """Run other models at full size."""
    names = step.arguments.models
    step.own("models", *(("--models", names) if names else ()))


def full_size(arguments: argparse.Namespace) -> None:
    """Run FLUX at full size by `gpu_graphs.graph`. Then run it once more within 8 GiB and once at
    minimum VRAM, recording the card's allocations."""
    from card_memory import compared, growth, recorded
    from gpu_graphs import graph
    from gpu_lab import Lab, Log

    import graphrun
    from graphrun.solve.infeasible import smallest_budget

    log, lab = Log(arguments.out), Lab(arguments.rehearse)
    name, budgets = (
        ("flux-tiny", ("16M", "4M", "smallest"))
        if arguments.rehearse
        else ("flux-dev", ("8G", "24G", "smallest"))
    )
    bench = graph(log, lab, name, list(budgets), 4, 2, full_size=True)
    minimum = smallest_budget(bench.ample)
    for budget, suffix in ((budgets[0], ""), (minimum, "-minimum")):
        with log.part(f"allocator{suffix}") as record:
            solution = graphrun.plan(bench.problem(budget))
            with recorded(bench.device) as events:
                trace, _, seconds = bench.follow(solution)
            record |= {
                "budget": budget,
                "effective_bytes": solution.problem.effective_bytes,
                "peak_bytes": trace.peak_bytes,
                "wall_seconds": seconds,
            }
            record |= compared(events)
            record["cap_kept"] = trace.peak_bytes <= solution.problem.effective_bytes
            record["growth: event, reserved, allocated"] = growth(events)
            folder = Path(os.environ.get("OUT", arguments.out.parent))
            events.write(folder / f"card-flux-events{suffix}.json.gz")


def attached(arguments: argparse.Namespace) -> None:
    """Call diffusers' pipelines with small models twice after `graphrun.attach`, once without."""
    import torch
    from gpu_lab import Log
    from peers_cell import Subject, fingerprint

    import graphrun

    log = Log(arguments.out)
    for model in ("flux", "sdxl", "wan"):
        with log.part(model) as record:
            subject = Subject(model, "sim", 4)
            pipeline = subject.pipeline()
            if arguments.rehearse:
                graphrun.attach(pipeline, vram="16M", hardware="sim")
            else:
                with torch.no_grad():
                    expected = fingerprint(subject.call(pipeline.to("cuda")))
                pipeline.to("cpu")
                torch.cuda.empty_cache()
                record["bytes before"] = torch.cuda.memory_allocated()
                graphrun.attach(pipeline, vram="1G")
            results = [fingerprint(subject.call(pipeline)) for _ in range(2)]
            record["next run has the same bits"] = results[0] == results[1]
            if not arguments.rehearse:
                record["plain pipeline has the same picture"] = results[0] == expected
                record["bytes after"] = torch.cuda.memory_allocated()


def compare(arguments: argparse.Namespace) -> None:
    """Run each tool at each cap twice, as benchmarks/peers.py does.

    Cells are forked from this process and share its weights. A process that opened the card, or
    that has OpenMP threads, cannot be forked: importing bitsandbytes opens the card.
    """
    os.environ.update(PYTORCH_NVML_BASED_CUDA_CHECK="1", OMP_NUM_THREADS="1")
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    import torch

    torch.set_num_threads(1)
    from peers import Bench, options, subject

    from graphrun.units import parse_size

    start_seconds = time.perf_counter()
    device, steps = "sim" if arguments.rehearse else "cuda", 4
    with tempfile.TemporaryDirectory() as cache:
        command = ["--device", device, "--models", "flux", "--steps", str(steps)]
        bench = Bench(options(command), cache, forks=True)
        bench.options.limit = arguments.limit / 3
        subject("flux", device, steps).pipeline()
        gc.freeze()  # forked cells share the weights: collectors must not write to them
        record: dict[str, Any] = {"cells": []}
        if arguments.resume is not None:
            record = json.loads(arguments.resume.read_text())["peers"]["results"]
        reference = record.get("reference") or bench.facts("flux", encodes=False)
        if "failed" in reference:
            print(f"cells cannot be forked: {reference['failed']}", flush=True)
            bench = Bench(options(command), cache)
            bench.options.limit = arguments.limit / 3
            reference = bench.facts("flux", encodes=False)
        bench.results["models"]["flux"] = reference
        cells = [cell for cell in record["cells"] if cell["status"] in ("finished", "oom")]
        results: dict[str, Any] = {"reference": reference, "steps": steps, "cells": cells}
        finished_cells = {(cell["tool"], cell["cap_bytes"]) for cell in cells}
        for tool, cap in CELLS:
            seconds_left = arguments.limit - (time.perf_counter() - start_seconds)
            if seconds_left < 20:
                break
            bench.options.limit = min(arguments.limit / 3, seconds_left - 5)
            size = {"8G": "4M", "24G": "16M"}[cap] if arguments.rehearse else cap
            cap_bytes = parse_size(size, name="cap")
            if (tool, cap_bytes) in finished_cells:
                continue
            results["cells"].append(bench.cell("flux", tool, cap_bytes=cap_bytes))
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    """Run the step, or one part of it in this process."""
    arguments = options()
    if arguments.part == "models":
        import card_models

        return card_models.run(arguments)
    if arguments.part:
        return {"flux": full_size, "attach": attached, "peers": compare}[arguments.part](arguments)
    import torch

    if not arguments.rehearse and not torch.cuda.is_available():
        return print(
            "there is no CUDA device here: nothing to measure (--rehearse runs the step on "
            "the simulated accelerator)"
        )
    step = Step(arguments)
    {"rates": rates, "flux": flux, "check": check, "peers": peers, "models": models}[
        arguments.step
    ](step)
    print(f"wrote {step.path} after {time.perf_counter() - step.start_seconds:.0f} s")
    for line in step.results.get("broken", []):
        print(f"  BROKEN {line}")
    sys.exit(1 if step.results.get("broken") else 0)


if __name__ == "__main__":
    main()

"""One step of the card script (`benchmarks/card.sh`): at most six minutes, results written after
every part.

python benchmarks/card.py STEP [--rehearse] [--out FILE] [--limit SECONDS]

A part is a process of its own, because an error of CUDA spoils its process; it is ended when the
step's time is over. Exit 1: a part failed, or a promise was broken; the results say which.
"""

from __future__ import annotations

import argparse
import json
import os
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

STEPS = ("check", "memory", "flux", "peers")
LIMIT_SECONDS, REHEARSAL_SECONDS = 350, 1800
PEERS = (
    "graphrun",
    "diffusers model offload",
    "diffusers group offload, block, stream",
    "diffusers sequential offload",
    "mmgp",
)
CAPS = ("8G", "24G")
STEPS_OF = {"diffusers sequential offload": 2}
"""It copies every leaf in every step: two steps show what one takes."""


def options() -> argparse.Namespace:
    """The command line."""
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
    parser.add_argument("--part", choices=("snapshot", "peers"), help=argparse.SUPPRESS)
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
        """Of the step's time."""
        return float(self.arguments.limit - (time.perf_counter() - self.start_seconds))

    def part(self, name: str, command: list[str], results: Path | None = None) -> None:
        """Runs ``command`` and keeps what it wrote to ``results``, or else its output's last
        lines."""
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
                        output_lines[-12:]
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
        """Sections of benchmarks/gpu.py as parts."""
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
        """A part of this file in a process of its own."""
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
    """What the machine is, the contract of devices, rates and bytes of the card, graphs in
    small."""
    step.part("doctor", [sys.executable, "-m", "graphrun", "doctor", "--json"])
    contract = ["tests/runtime/test_contract.py", "tests/runtime/test_cuda.py"]
    contract = [path for path in contract if (HERE.parent / path).exists()]
    step.part(
        "contract",
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *contract],
    )
    step.gpu("tiny" if step.arguments.rehearse else "machine,tiny")


def memory(step: Step) -> None:
    """Calibration, and the allocator's record of one run beside the model of it."""
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
    step.own("snapshot")


def flux(step: Step) -> None:
    """FLUX.1-dev at full size."""
    step.gpu("flux", "--flux-budgets", "8G,24G,smallest", "--steps", "4", "--runs", "2")


def peers(step: Step) -> None:
    """Other tools at equal caps."""
    step.own("peers")


def snapshot(arguments: argparse.Namespace) -> None:
    """Two runs of FLUX at 8 GiB; the second is recorded."""
    from card_memory import compared, growth, recorded
    from gpu_graphs import Bench
    from gpu_lab import Lab, Log

    import graphrun

    log, lab = Log(arguments.out), Lab(arguments.rehearse)
    bench = Bench("flux-tiny" if arguments.rehearse else "flux-dev", lab, 3, full_size=True)
    with log.part("build") as record:
        bench.build(record)
    with log.part("run within 8 GiB") as record:
        solution = graphrun.plan(bench.problem("4M" if arguments.rehearse else "8G"))
        bench.follow(solution)
        with recorded(bench.device) as events:
            trace, _, seconds = bench.follow(solution)
        record |= {
            "effective_bytes": solution.problem.effective_bytes,
            "peak_bytes": trace.peak_bytes,
            "wall_seconds": seconds,
        }
        record |= compared(events)
        record["cap_kept"] = trace.peak_bytes <= solution.problem.effective_bytes
        record["growth: event, reserved, allocated"] = growth(events)
        events.write(
            Path(os.environ.get("OUT", arguments.out.parent)) / "card-memory-events.json.gz"
        )


def compare(arguments: argparse.Namespace) -> None:
    """Each tool at each cap: two runs, as benchmarks/peers.py runs them."""
    from peers import Bench, options, subject

    from graphrun.units import parse_size

    start_seconds = time.perf_counter()
    device = "sim" if arguments.rehearse else "cuda"
    results: dict[str, Any] = {"cells": []}
    references: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for tool in PEERS:
            steps = STEPS_OF.get(tool, 4)
            bench = Bench(
                options(
                    ["--device", device, "--models", "flux", "--tools", tool, "--steps", str(steps)]
                ),
                cache,
            )
            bench.options.limit = arguments.limit / 3
            if steps not in references:
                if arguments.rehearse:
                    subject("flux", device, steps).pipeline()
                references[steps] = results[f"reference, {steps} steps"] = bench.facts("flux")
            bench.results["models"]["flux"] = references[steps]
            for cap in ("4M", "16M") if arguments.rehearse else CAPS:
                if time.perf_counter() - start_seconds > arguments.limit - 20:
                    results["cells"].append(
                        {
                            "tool": tool,
                            "cap": cap,
                            "status": "failed",
                            "message": "no time was left",
                        }
                    )
                    continue
                cell = bench.cell("flux", tool, cap_bytes=parse_size(cap, name="cap"))
                results["cells"].append(cell | {"steps": steps})
                arguments.out.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    """Runs the step, or one part of it in this process."""
    arguments = options()
    if arguments.part:
        return {"snapshot": snapshot, "peers": compare}[arguments.part](arguments)
    import torch

    if not arguments.rehearse and not torch.cuda.is_available():
        return print(
            "there is no CUDA device here: nothing to measure (--rehearse runs the step on "
            "the simulated accelerator)"
        )
    step = Step(arguments)
    {"check": check, "memory": memory, "flux": flux, "peers": peers}[arguments.step](step)
    print(f"wrote {step.path} after {time.perf_counter() - step.start_seconds:.0f} s")
    for line in step.results.get("broken", []):
        print(f"  BROKEN {line}")
    sys.exit(1 if step.results.get("broken") else 0)


if __name__ == "__main__":
    main()

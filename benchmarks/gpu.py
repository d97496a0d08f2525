"""Measure everything that only a card can show: bytes, rates, and whole graphs against their plans.

    python benchmarks/gpu.py                      eight minutes; writes results/gpu-<card>.json
    python benchmarks/gpu.py --sections tiny      some of: machine tiny sdxl flux
    python benchmarks/gpu.py --rehearse           the same code on the simulated accelerator, with
                                                  tiny graphs

FLUX.1-dev and SDXL run at full size with random weights, under several budgets, so no checkpoint is
needed. Each section is a process of its own (a CUDA error breaks a process) and writes its results
after every part. Without a CUDA device it says so, exit code 0. Exit code 1: a part failed, or a
promise was broken; the results say which.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
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

SECTIONS = ("machine", "tiny", "sdxl", "flux")
BUDGETS = {"sdxl": "smallest,4G,6G,12G,24G", "flux": "smallest,8G,12G,24G,48G"}
PROMISES = (
    "cap_kept",
    "baseline_restored",
    "device_empty",
    "refused",
    "close",
    "second resident run has the same bits",
    "plain pipeline has the same picture",
    "next run has the same bits",
)
"""Entries of the results that must be true. Comparisons of planned and measured figures are for
reading."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sections", default=",".join(SECTIONS), help="comma-separated: " + " ".join(SECTIONS)
    )
    parser.add_argument("--steps", type=int, default=8, help="denoising steps at full size")
    parser.add_argument(
        "--runs", type=int, default=2, help="runs per budget; the first may load kernels"
    )
    parser.add_argument("--flux-budgets", default=BUDGETS["flux"])
    parser.add_argument("--sdxl-budgets", default=BUDGETS["sdxl"])
    parser.add_argument(
        "--limit",
        type=float,
        default=540,
        help="seconds for everything; a section is ended when they are over",
    )
    parser.add_argument(
        "--out", type=Path, help="the results; default benchmarks/results/gpu-<card>.json"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="on the simulated accelerator, with graphs tiny"
    )
    parser.add_argument("--section", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.sections.split(",")) - set(SECTIONS):
        parser.error(
            f"--sections: there is no {', '.join(sorted(unknown))}; take some of "
            f"{' '.join(SECTIONS)}"
        )
    return arguments


def section(arguments: argparse.Namespace) -> None:
    """Run one section in this process; its results go to ``--out``."""
    from gpu_lab import Lab, Log

    log, lab = Log(arguments.out), Lab(arguments.rehearse)
    if arguments.section == "machine":
        from gpu_machine import machine

        return machine(log)
    import gpu_graphs

    if arguments.section == "tiny":
        for name in ("flux-tiny", "sdxl-tiny"):
            gpu_graphs.graph(
                log,
                lab,
                name,
                ["smallest", "16M" if arguments.rehearse else "1G"],
                3,
                2,
                full_size=False,
            )
        return None
    name, budgets = (
        ("flux", arguments.flux_budgets)
        if arguments.section == "flux"
        else ("sdxl", arguments.sdxl_budgets)
    )
    section_budgets = "smallest,16M" if arguments.rehearse else budgets
    graph = f"{name}-tiny" if arguments.rehearse else {"flux": "flux-dev"}.get(name, name)
    steps = 3 if arguments.rehearse else arguments.steps
    gpu_graphs.graph(
        log, lab, graph, section_budgets.split(","), steps, arguments.runs, full_size=True
    )
    return None


def about(rehearse: bool) -> dict[str, Any]:
    """Return date, machine and versions."""
    import torch

    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}",
        "versions": {},
        "cuda": torch.version.cuda,
        "card": "simulated",
    }
    for name in ("torch", "diffusers", "transformers", "accelerate", "bitsandbytes", "highspy"):
        try:
            facts["versions"][name] = version(name)
        except PackageNotFoundError:
            facts["versions"][name] = None
    if not rehearse:
        properties = torch.cuda.get_device_properties(0)
        facts["card"] = properties.name
        facts["card_bytes"] = properties.total_memory
        facts["capability"] = f"{properties.major}.{properties.minor}"
        command = [
            "nvidia-smi",
            "--query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current",
            "--format=csv,noheader",
        ]
        try:
            facts["driver and link"] = subprocess.run(
                command, capture_output=True, text=True, timeout=20, check=True
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError) as error:
            facts["driver and link"] = repr(error)
    return facts


def broken(value: Any, path: str = "") -> list[str]:
    """Return the places in the results with a failure or a broken promise."""
    if not isinstance(value, dict):
        return (
            [p for i, item in enumerate(value) for p in broken(item, f"{path}[{i}]")]
            if isinstance(value, list)
            else []
        )
    faults = [f"{path}: {key}" for key in PROMISES if value.get(key) is False]
    if "failed" in value:
        faults.append(f"{path}: {value['failed'][:200]}")
    equal_stages = value.get("same_bits_as_resident", {})
    faults += [
        f"{path}: {stage} differs from resident"
        for stage, equal in equal_stages.items()
        if not equal
    ]
    return faults + [p for key, item in value.items() for p in broken(item, f"{path}/{key}")]


def run_section(name: str, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run section ``name`` in a process of its own; return its results so far."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "section.json"
        command = [
            sys.executable,
            __file__,
            "--section",
            name,
            "--out",
            str(path),
            "--steps",
            str(arguments.steps),
        ]
        command += [
            "--runs",
            str(arguments.runs),
            "--flux-budgets",
            arguments.flux_budgets,
            "--sdxl-budgets",
            arguments.sdxl_budgets,
        ]
        start = time.perf_counter()
        ended: dict[str, Any] = {}
        try:
            code = subprocess.run(
                [*command, *(["--rehearse"] if arguments.rehearse else [])],
                timeout=seconds,
                check=False,
            ).returncode
            if code:
                ended["failed"] = f"the process ended with {code}"
        except subprocess.TimeoutExpired:
            ended["failed"] = f"ended after {seconds:.0f} s"
        results = json.loads(path.read_text()) if path.exists() else {}
    return {**ended, **results, "section_seconds": round(time.perf_counter() - start, 2)}


def main() -> None:
    arguments = options()
    if arguments.section:
        return section(arguments)
    import torch

    if not arguments.rehearse and not torch.cuda.is_available():
        return print(
            "there is no CUDA device here: nothing to measure (--rehearse runs the same "
            "code on the simulated accelerator)"
        )
    start = time.perf_counter()
    results: dict[str, Any] = {"about": about(arguments.rehearse)}
    card = "".join(c if c.isalnum() else "-" for c in results["about"]["card"].lower())
    path = arguments.out or HERE / "results" / f"gpu-{card}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in arguments.sections.split(","):
        seconds_left = arguments.limit - (time.perf_counter() - start)
        print(f"{name} ({seconds_left:.0f} s left)", flush=True)
        if arguments.rehearse and name == "machine":
            continue
        results[name] = (
            run_section(name, arguments, seconds_left)
            if seconds_left > 20
            else {"failed": "no time was left"}
        )
        results["broken"] = broken(results)
        path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {path} after {time.perf_counter() - start:.0f} s")
    for line in results.get("broken", []):
        print(f"  BROKEN {line}")
    sys.exit(1 if results.get("broken") else 0)


if __name__ == "__main__":
    main()

"""Measure the first call of an attached pipeline, and a second one with another text.

    python benchmarks/attach_calls.py [--out FILE] [NAME ...]    writes results/attach_calls.json

Tiny pipelines of tests/attach/tiny_pipelines.yaml (of ten families, or the named ones) on the
simulated accelerator, within 95 % of the bytes of their weights, compared with a call of the plain
pipeline. CPU seconds on one thread, the least of three rounds in which both take turns, so that
other work on the machine matters little.

    first     the first call minus a plain call: dry run, problem, plan
    second    the second call, with another text if the pipeline takes one, over a plain call on the
              same accelerator
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / part) for part in ("attach", "sweep"))]
os.environ.update(
    TRANSFORMERS_VERBOSITY="error",
    DIFFUSERS_VERBOSITY="error",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)

import torch  # noqa: E402
from test_attach_pipelines import SHARE, weight_bytes  # noqa: E402
from test_attach_warm import TABLE  # noqa: E402
from tiny_pipelines import cases  # noqa: E402

import graphrun  # noqa: E402
from graphrun import sim  # noqa: E402
from graphrun.runtime.devices.simulated import SimulatedDevice  # noqa: E402

ROUNDS = 3


def seconds(work: Callable[[], Any]) -> float:
    """Return the CPU seconds of ``work``."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(name: str) -> dict[str, float]:
    case = cases()[name]
    plain, pipe = case.build(), case.build()
    prompt_input = {"prompt": "a harbour in the fog"} if "prompt" in case.arguments() else {}
    resized_case = replace(case, arguments=lambda: {**case.arguments(), **prompt_input})

    def put(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(sim.device)

    torch.__future__.set_swap_module_params_on_conversion(True)
    machine = sim.Machine()
    with machine:
        plain.to(sim.device)
        case.call(plain, put)
    plains, firsts, seconds_resized = list[float](), list[float](), list[float]()
    for _ in range(ROUNDS):
        with graphrun.attach(
            pipe, vram=int(SHARE * weight_bytes(pipe)), device=SimulatedDevice(sim.Machine())
        ):
            firsts.append(seconds(lambda: case.call(pipe)))
            with machine:
                plains.append(seconds(lambda: case.call(plain, put)))
            seconds_resized.append(seconds(lambda: resized_case.call(pipe)))
            with machine:
                plains.append(seconds(lambda: case.call(plain, put)))
    plain_seconds = min(plains)
    return {
        "plain": plain_seconds,
        "first": min(firsts) - plain_seconds,
        "second": min(seconds_resized) / plain_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/attach_calls.json")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: dict[str, dict[str, float]] = {}
    for name in options.names or TABLE:
        try:
            rows[name] = {key: round(value, 3) for key, value in measure(name).items()}
            print(
                f"{name:45} {rows[name]['first']:7.2f} s more   {rows[name]['second']:5.2f} x",
                flush=True,
            )
        except Exception as error:  # noqa: BLE001  (a pipeline that does not run so is left out, and said)
            print(f"{name:45} left out: {type(error).__name__}: {str(error)[:80]}", flush=True)
    ratios = {
        key: {"median": statistics.median(values), "most": max(values)}
        for key in ("first", "second")
        if (values := [row[key] for row in rows.values()])
    }
    for key, values in ratios.items():
        print(f"{key}: median {values['median']:.2f}, most {values['most']:.2f} of {len(rows)}")
    result = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        **ratios,
        "pipelines": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

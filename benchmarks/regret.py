"""Measure what plans lose if their times are wrong, by graphrun's own simulator.

    python benchmarks/regret.py [GRAPH ...] [--draws N] [--minutes N]    writes results/regret.json

Each reference graph x VRAM, on an RTX 4090 with 32 GiB of RAM, is planned with its times, and again
for each draw, in which every class of kernel and of copy, the launches and the disk are 30 % too
slow or 30 % too fast, at random. Each plan is then simulated with the right times: its excess over
the best plan is its regret. Graphs of earlier runs stay; ``--minutes``: start no graph after that.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
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

import graphrun  # noqa: E402
from graphrun.model.hardware import Hardware  # noqa: E402
from graphrun.model.problem import Problem  # noqa: E402
from graphrun.model.solution import Solution  # noqa: E402
from graphrun.profile.hardware import hardware  # noqa: E402
from graphrun.profile.problems import ProblemLimits, problem_of  # noqa: E402
from graphrun.solve.pages import carried_over, solved  # noqa: E402
from graphrun.store import dry_run  # noqa: E402

GRAPHS = HERE.parent / "graphs"
RESULTS = HERE / "results" / "regret.json"
CARD, VRAM, RAM, GIB = "rtx4090", (8, 12, 16, 24), 32, 2**30
SEED, WRONG = 29, 0.3
# 2 M parameters fit anywhere; classes of a package that is not installed
LEFT_OUT = (
    "shapes",
    "pyramid-flow",
)
# class -> fields of `Hardware` and of its `KernelRates`: rates, except for the seconds named at the
# end
CLASSES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "matrix products": (
        ("flops_per_second",),
        ("fp32_flops_per_second", "fp8_flops_per_second", "int8_flops_per_second"),
    ),
    "attention": ((), ("attention_flops_per_second", "exponentials_per_second")),
    "convolutions": ((), ("convolution_flops_per_second", "fp32_convolution_flops_per_second")),
    "elementwise": (("memory_bytes_per_second",), ()),
    "launches": (("launch_seconds",), ()),
    "copies to the device": (("h2d_bytes_per_second", "pageable_bytes_per_second"), ()),
    "copies back": (("d2h_bytes_per_second", "d2h_pageable_bytes_per_second"), ()),
    "disk": (("disk_bytes_per_second",), ()),
    "page locking": (("page_lock_seconds",), ()),
}
SECONDS = ("launch_seconds", "page_lock_seconds")


def wrong(card: Hardware, errors: Mapping[str, float]) -> Hardware:
    """Return ``card`` with times wrong by the factor in ``errors`` for each of `CLASSES`."""
    assert card.kernels is not None
    whole, kernels = {}, {}
    for name, (fields, of_kernels) in CLASSES.items():
        for field in fields:
            whole[field] = getattr(card, field) * (
                errors[name] if field in SECONDS else 1 / errors[name]
            )
        for field in of_kernels:
            kernels[field] = getattr(card.kernels, field) / errors[name]
    return replace(card, **whole, kernels=replace(card.kernels, **kernels))


def draws(count: int) -> list[dict[str, float]]:
    """Return errors by class, one dict per draw."""
    rng = random.Random(SEED)
    return [{name: rng.choice((1 - WRONG, 1 + WRONG)) for name in CLASSES} for _ in range(count)]


def problems(name: str, cards: list[Hardware]) -> list[Problem]:
    """Return the problem of a graph on each of ``cards``, from one dry run."""
    graph = graphrun.load(GRAPHS / f"{name}.yaml")
    inputs = graph.for_planning({})
    run = dry_run(graph, inputs, None)
    return [
        problem_of(graph, run, card, ProblemLimits(VRAM[0] * GIB, RAM * GIB), inputs)
        for card in cards
    ]


def seconds_with(right: Problem, plan: Solution | None) -> float | None:
    """Return the seconds of ``plan``, made with other times, with the times of ``right``."""
    solution = carried_over(right, plan, 0.0) if plan is not None else None
    return solution.simulation.total_seconds if solution is not None else None


def graph_rows(name: str, errors: list[dict[str, float]]) -> Iterator[dict[str, Any]]:
    card = hardware(CARD)
    card_problems = problems(name, [card, *(wrong(card, error) for error in errors)])
    for gib in VRAM:
        right, *wrong_problems = (
            replace(problem, budget_bytes=gib * GIB) for problem in card_problems
        )
        row: dict[str, Any] = {"vram_gib": gib}
        if (right_solution := solved(right)) is not None:
            plan_seconds = [
                seconds_with(right, solved(wrong_problem)) for wrong_problem in wrong_problems
            ]
            best = min(
                right_solution.simulation.total_seconds,
                *(seconds for seconds in plan_seconds if seconds is not None),
            )
            losses = [
                None if seconds is None else round(100 * (seconds / best - 1), 3)
                for seconds in plan_seconds
            ]
            row |= {
                "best_seconds": round(best, 4),
                "own_lost_percent": round(
                    100 * (right_solution.simulation.total_seconds / best - 1), 3
                ),
            }
            row |= {"lost_percent": losses}
        yield row


def summary(graphs: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the number of plans made with wrong times, and their losses."""
    losses = [
        loss for rows in graphs.values() for row in rows for loss in row.get("lost_percent", ())
    ]
    allowed_losses = sorted(loss for loss in losses if loss is not None)
    large_losses = [
        f"{name} in {row['vram_gib']} GiB: {max(row_losses)} %"
        for name, rows in graphs.items()
        for row in rows
        if (
            row_losses := [
                loss for loss in row.get("lost_percent", ()) if loss is not None and loss > 3
            ]
        )
    ]
    return {
        "plans": len(losses),
        "not_allowed_with_right_times": len(losses) - len(allowed_losses),
        "median_lost_percent": round(statistics.median(allowed_losses), 3)
        if allowed_losses
        else None,
        "most_lost_percent": max(allowed_losses, default=None),
        "over_3_percent": large_losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("graphs", nargs="*")
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    graph_names = sorted(
        path.stem
        for path in GRAPHS.glob("*.yaml")
        if "-tiny" not in path.stem and path.stem not in LEFT_OUT
    )
    errors, deadline = draws(options.draws), time.monotonic() + 60 * options.minutes
    earlier_results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    graphs: dict[str, Any] = (
        earlier_results.get("graphs", {}) if earlier_results.get("errors") == errors else {}
    )
    for name in options.graphs or [name for name in graph_names if name not in graphs]:
        if time.monotonic() > deadline:
            break
        graphs[name] = list(graph_rows(name, errors))
        result = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
            f"{platform.python_version()}",
            "versions": {
                library: version(library) for library in ("torch", "diffusers", "highspy", "numpy")
            },
            "command": f"python benchmarks/regret.py --draws {options.draws}",
            "hardware": CARD,
            "ram_gib": RAM,
            "summary": summary(graphs),
            "errors": errors,
            "left_out": [
                missing_name for missing_name in graph_names if missing_name not in graphs
            ],
            "graphs": dict(sorted(graphs.items())),
        }
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        print(
            name,
            *(f"{row['vram_gib']} GiB {row.get('lost_percent')}" for row in graphs[name]),
            flush=True,
        )
    print(json.dumps(summary(graphs), indent=1))


if __name__ == "__main__":
    main()

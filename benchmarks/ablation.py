"""Measure what each strategy of the search gains, over a sample of the cells of `planner.py`.

    python benchmarks/ablation.py [MINUTES]      60 by default, after ten of dry runs; goes on with
                                                 results/ablation.json
    python benchmarks/ablation.py --report       writes results/ablation.md

A cell is a graph, its budgets of VRAM and RAM, what is allowed, one run or ten, one card or two.
Cells are solved in a random order, always the same, each with all strategies and without each of
the strategies that this search asked for. "Ratio" is without over with.

    slower     ratio of the plans' seconds, minus 1: the largest, and the cells above 0.05 %
    faster     the smallest ratio, minus 1: a search within a gap may find a better plan by chance
    CPU        ratio of the CPU seconds of planning, all cells together
    no plan    cells without a plan
"""

from __future__ import annotations

import functools
import json
import random
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from page_text import folded  # noqa: E402
from planner import GRAPHS, cells  # noqa: E402

import graphrun  # noqa: E402
from graphrun.model.problem import Problem  # noqa: E402
from graphrun.solve import pages  # noqa: E402
from graphrun.solve.strategies import STRATEGIES, Strategy, without  # noqa: E402

RESULTS, PAGE = HERE / "results" / "ablation.json", HERE / "results" / "ablation.md"
NOTICEABLE = 5e-4  # relative difference of seconds
SECOND_CARD = (0, 0, 8, 12)  # GiB of VRAM of a second card; 0: none
Row = dict[str, Any]


def all_cells() -> list[tuple[Row, Problem]]:
    """Return the conditions and the problem of each cell, in a random order."""
    random_numbers = random.Random(0)
    pairs = list[tuple[Row, Problem]]()
    for name in GRAPHS:
        for runs in (1, 10):
            for conditions, problem in cells(name, runs):
                second = random_numbers.choice(SECOND_CARD) if runs == 1 else 0
                if second:
                    problem = _with_second_card(name, problem, second)
                pairs.append(
                    ({"graph": name, "runs": runs, "second_gib": second, **conditions}, problem)
                )
    random_numbers.shuffle(pairs)
    return pairs


def _with_second_card(name: str, problem: Problem, vram: int) -> Problem:
    pair = _on_two_cards(name, vram)
    budget_bytes, ram_bytes = problem.budget_bytes, problem.ram_bytes
    return replace(pair, budget_bytes=budget_bytes, ram_bytes=ram_bytes, allow=problem.allow)


@functools.cache
def _on_two_cards(name: str, vram: int) -> Problem:
    graph = graphrun.load(HERE.parent / "graphs" / f"{name}.yaml")
    return graphrun.estimate(graph, vram=f"8G,{vram}G", ram="32G", hardware="rtx4090,rtx4090")


def solve(problem: Problem, *strategies: Strategy) -> tuple[float | None, float, set[Strategy]]:
    """Return the plan's seconds without ``strategies``, or None; planning's CPU seconds; and the
    strategies that the search asked for."""
    pages.forget_least()
    start = time.process_time()
    with without(*strategies) as consulted:
        solution = pages.solved(problem)
    seconds = None if solution is None else solution.simulation.total_seconds
    return seconds, time.process_time() - start, consulted


def measure(minutes: float) -> None:
    """Solve cells for ``minutes``, and add their rows to the results."""
    rows: list[Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    unsolved_cells = all_cells()[len(rows) :]
    end = time.monotonic() + 60 * minutes
    for conditions, problem in unsolved_cells:
        if time.monotonic() > end:
            break
        seconds, cpu_seconds, consulted = solve(problem)
        row = {**conditions, "seconds": seconds, "cpu_seconds": cpu_seconds, "without": {}}
        for strategy in STRATEGIES if seconds is not None else ():
            if strategy in consulted:
                row["without"][strategy] = solve(problem, strategy)[:2]
        rows.append(row)
        print(json.dumps(row), flush=True)
        RESULTS.write_text("[" + ",\n ".join(map(json.dumps, rows)) + "]\n")


def table(rows: list[Row]) -> str:
    lines = [
        "| without | what it does | problems | slower, at most | problems slower | faster, at most "
        "| no plan | CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    cpu_seconds = sum(row["cpu_seconds"] for row in rows)
    for strategy in STRATEGIES:
        results = [
            (row["seconds"], row["cpu_seconds"], *row["without"][strategy])
            for row in rows
            if strategy in row["without"]
        ]
        if not results:
            continue
        losses = [other / seconds - 1 for seconds, _, other, _ in results if other is not None]
        cpu = 1 + sum(other - cpu for _, cpu, _, other in results) / cpu_seconds
        lines.append(
            f"| {strategy} | {meanings()[strategy]} | {len(results)} | "
            f"{100 * max([0.0, *losses]):.2f} % | "
            f"{sum(loss > NOTICEABLE for loss in losses)} | "
            f"{abs(100 * min([0.0, *losses])):.2f} % | {len(results) - len(losses)} | {cpu:.2f} |"
        )
    return "\n".join(lines)


def meanings() -> dict[str, str]:
    """Return what each strategy does, from the docstring of its module."""
    text = (HERE.parent / "graphrun/solve/strategies.py").read_text(encoding="utf-8")
    lines = (re.match(r"    (\S[^.]*?)  +(\S.*)", line) for line in text.splitlines())
    return {line[1]: line[2] for line in lines if line}


def page(rows: list[Row]) -> str:
    rows = [row for row in rows if row["seconds"] is not None]
    return folded(
        "# What each strategy of the search gains\n\n"
        "<!-- Written by benchmarks/ablation.py --report. -->\n\n"
        f"{len(rows)} problems, drawn at random: {', '.join(GRAPHS)}, budgets of VRAM and RAM,"
        " allowed precisions, one run or ten, one RTX 4090 or two. Each was planned with all"
        " strategies, and without each strategy that its search used.\n\n"
        f"{table(rows)}\n\n"
        "Slower, faster: seconds of the plan without the strategy. CPU: CPU seconds of planning"
        " without it, over those with it. Baselines and *main device* gain little, and stay: they"
        " guarantee that no baseline, and no plan without the second card, is faster.\n\n"
        "Measured by `python benchmarks/ablation.py`.\n"
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--report"]:
        PAGE.write_text(page(json.loads(RESULTS.read_text())))
    else:
        measure(float(sys.argv[1]) if sys.argv[1:] else 60.0)

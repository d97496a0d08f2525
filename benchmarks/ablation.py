"""Measure what each strategy of the search gains, over the cells of `planner.py`.

    python benchmarks/ablation.py [GRAPH ...]    an hour; writes results/ablation.json
    python benchmarks/ablation.py --report       writes docs/ablation.md

Each cell is solved with all strategies and without each of them. "Ratio" is without over with.

    slower     ratio of the plans' seconds, minus 1: the largest, and the cells above 0.05 %
    CPU        ratio of the CPU seconds of planning, all cells together
    no plan    cells without a plan
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from planner import GRAPHS, cells  # noqa: E402

from graphrun.model.problem import Problem  # noqa: E402
from graphrun.solve import pages  # noqa: E402
from graphrun.solve.strategies import STRATEGIES, Strategy, without  # noqa: E402

RESULTS, PAGE = HERE / "results" / "ablation.json", HERE.parent / "docs" / "ablation.md"
NOTICEABLE = 5e-4  # relative difference of seconds
Row = dict[str, Any]


def solve(problem: Problem, *strategies: Strategy) -> tuple[float | None, float]:
    """Return the plan's seconds without ``strategies``, or None, and planning's CPU seconds."""
    pages.forget_least()
    start = time.process_time()
    with without(*strategies):
        solution = pages.solved(problem)
    seconds = None if solution is None else solution.simulation.total_seconds
    return seconds, time.process_time() - start


def rows_of(name: str) -> Iterator[Row]:
    """Yield a row for each cell of graph ``name`` that has a plan."""
    for conditions, problem in cells(name):
        seconds, cpu_seconds = solve(problem)
        if seconds is None:
            continue
        row: Row = {**conditions, "graph": name, "seconds": seconds, "cpu_seconds": cpu_seconds}
        row["without"] = {strategy: solve(problem, strategy) for strategy in STRATEGIES}
        yield row


def table(rows: list[Row]) -> str:
    lines = [
        "| without | slower, at most | cells slower | no plan | CPU |",
        "|---|---|---|---|---|",
    ]
    cpu_seconds = sum(row["cpu_seconds"] for row in rows)
    for strategy in STRATEGIES:
        pairs = [(row["seconds"], *row["without"][strategy]) for row in rows]
        losses = [other / seconds - 1 for seconds, other, _ in pairs if other is not None]
        slower = sum(loss > NOTICEABLE for loss in losses)
        cpu = sum(cpu for _, _, cpu in pairs) / cpu_seconds
        lines.append(
            f"| {strategy} | {100 * max(losses, default=0.0):.2f} % | {slower} | "
            f"{len(pairs) - len(losses)} | {cpu:.2f} |"
        )
    return "\n".join(lines)


def page(rows: list[Row]) -> str:
    graphs = ", ".join(dict.fromkeys(row["graph"] for row in rows))
    return (
        "# What each strategy of the search buys\n\n"
        "<!-- Written by benchmarks/ablation.py --report. -->\n\n"
        f"{len(rows)} problems of the graphs {graphs} (VRAM x RAM x permissions of "
        "`benchmarks/planner.py`), each planned with all strategies of "
        "`graphrun/solve/strategies.py`, and without each of them. *slower, at most*: the seconds "
        "of the plan, by the simulator; *cells slower*: by more than 0.05 %; *CPU*: CPU seconds of "
        "planning, over those with all strategies.\n\n" + table(rows) + "\n"
    )


def main() -> None:
    rows: list[Row] = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    if sys.argv[1:] == ["--report"]:
        PAGE.write_text(page(rows), encoding="utf-8")
        print(f"wrote {PAGE}")
        return
    for name in sys.argv[1:] or GRAPHS:
        rows = [row for row in rows if row["graph"] != name]
        for row in rows_of(name):
            rows.append(row)
            RESULTS.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        print(f"{name}\n{table([row for row in rows if row['graph'] == name])}", flush=True)


if __name__ == "__main__":
    main()

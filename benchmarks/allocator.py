"""Check plans of the reference graphs with a second model of PyTorch's caching allocator.

    python benchmarks/allocator.py plan FOLDER [GRAPH ...]    plan files: RTX 4090, 64 GiB of RAM
    python benchmarks/allocator.py judge FOLDER               a row per plan, and their sums

The model (`tests/standins/linked_blocks.py`) replays every event of a plan. Both commands skip what
FOLDER already contains, so each can be stopped and started again. Needs no weights and no GPU. For
another version's plans: `PYTHONPATH=CHECKOUT python benchmarks/allocator.py plan FOLDER`.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import graphrun
from graphrun.model.choices import apply_choices
from graphrun.profile.dry_run import probe
from graphrun.profile.hardware import hardware
from graphrun.profile.problems import ProblemLimits, problem_of
from graphrun.report.plan_files import read, save
from graphrun.report.summary import summarize
from graphrun.solve.pages import smallest_budget, solved
from graphrun.verify import pages

ROOT = Path(__file__).parent.parent
LEFT_OUT = ("pyramid-flow", "shapes")  # needs code that is no package; is small
BUDGETS_GIB = {"least": 0, "8": 8, "12": 12, "16": 16, "24": 24}
NO_PLAN = "null\n"
SUMS = (
    ("peak planned too low", "replayed", "planned"),
    ("peak over the budget", "replayed", "budget"),
    ("PyTorch's limit has to be over the budget", "limit", "budget"),
    ("the judge reserves other bytes after an event", "differ", ""),
)


def plan(folder: Path, name: str) -> None:
    files = {budget: folder / f"{name}-{budget}.json" for budget in BUDGETS_GIB}
    if all(file.is_file() for file in files.values()):
        return
    graph = graphrun.load(ROOT / "graphs" / f"{name}.yaml")
    inputs = graph.for_planning({})
    problem = problem_of(
        graph, probe(graph, inputs), hardware("rtx4090"), ProblemLimits(24 << 30, 64 << 30), inputs
    )
    for budget, file in files.items():
        if file.is_file():
            continue
        budget_bytes = BUDGETS_GIB[budget] << 30 or smallest_budget(problem)
        if solution := solved(replace(problem, budget_bytes=budget_bytes)):
            save(file, graph.path, solution, summarize(solution, None))
        else:
            file.write_text(NO_PLAN)
    print(name, flush=True)


def judge(file: Path) -> dict[str, int]:
    """Return the peaks of a plan in bytes, without cuBLAS's workspace."""
    sys.path.insert(0, str(ROOT / "tests" / "standins"))
    from linked_blocks import LinkedBlocks
    from recorded_replay import replay_events

    graphrun.raise_limits(text_bytes=1 << 26)  # plans of videos
    problem, actions, entries = read(file)
    choice = apply_choices(problem, actions)
    peak, limit = max(pages.reserved_bytes(choice, actions)), pages.limit_bytes(choice, actions)
    blocks = LinkedBlocks(expandable=True, card_bytes=problem.hardware.capacity_bytes)
    events, differ = replay_events(choice, actions), 0
    for event in events:
        getattr(blocks, event.action)(*event.arguments)
        differ += blocks.used_bytes != event.reserved_bytes
    sizes = {
        "planned": entries["peak_bytes"],
        "replayed": peak,
        "limit": limit,
        "budget": problem.effective_bytes,
    }
    return sizes | {"events": len(events), "differ": differ}


def main(command: str, folder: Path, names: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    if command == "plan":
        graphs = sorted(
            file.stem for file in (ROOT / "graphs").glob("*.yaml") if "-tiny" not in file.stem
        )
        for name in names or [name for name in graphs if name not in LEFT_OUT]:
            plan(folder, name)
        return
    rows_file = folder / "judged"
    rows = json.loads(rows_file.read_text()) if rows_file.is_file() else {}
    for file in sorted(folder.glob("*.json")):
        if file.stem not in rows and file.read_text() != NO_PLAN:
            rows[file.stem] = judge(file)
            rows_file.write_text(json.dumps(rows))
    for name, row in rows.items():
        print(
            f"{name:24}",
            *(f"{key} {row[key] / 2**20:.1f}" for key in ("planned", "replayed", "budget")),
            "MiB",
        )
    print(f"{len(rows)} plans, {sum(row['events'] for row in rows.values())} events")
    for text, larger, smaller in SUMS:
        print(f"{text}: {sum(row[larger] > row.get(smaller, 0) for row in rows.values())}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])

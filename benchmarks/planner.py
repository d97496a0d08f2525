"""Measure the planner: speed, gaps, and its plans against fixed modes, by its own simulator.

    python benchmarks/planner.py [GRAPH ...] [random] [sessions] [least]    minutes; writes
                                                                            results/planner.json

    graphs     each graph x VRAM x RAM, with no change of the output allowed and with all: seconds
               to solve, gap, predicted time, bytes moved, regime, and the fixed modes' times over
               the plan's (never below 1)
    sessions   the same for ten runs, cold then warm, with ample RAM and without; also CPU seconds,
               since other programs run on the machine
    random     12 components x 20 stages, seeded: seconds to solve and gap
    least      each reference graph: the smallest budget, CPU seconds to find it, and whether one
               byte less is refused

A graph with a single variant per component gets more by rule (three precisions x three backing
stores); the results mark this.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator
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

from fixed_modes import compared  # noqa: E402

from graphrun.model.hardware import Hardware  # noqa: E402
from graphrun.model.problem import (  # noqa: E402
    BlockGroup,
    ComponentNumbers,
    PhaseNumbers,
    Problem,
    Use,
    ValueNumbers,
    Variant,
)
from graphrun.solve.pages import smallest_budget, solved  # noqa: E402
from graphrun.verify.simulate import simulate  # noqa: E402

GRAPHS = ("flux-dev", "sdxl", "hidream", "cogview4", "wan-14b", "auraflow")
VRAM, RAM = (6, 8, 12, 16, 24, 48), (16, 32, 64)
GIB, MIB = 2**30, 2**20
# Bytes of a parameter over bfloat16's, what must be allowed, and compute beyond bfloat16's per byte
# of the block.
PRECISIONS = (
    ("bfloat16", 1.0, "", 0.0),
    ("int8", 0.5, "int8", 1e-12),
    ("nf4", 0.28125, "nf4", 4e-12),
)


def varied(problem: Problem) -> Problem:
    """Return ``problem`` with three precisions x three backing stores for each component. Unchanged
    if its dry run had several variants."""
    if any(len(component.variants) > 1 for component in problem.components):
        return problem

    def with_more(component: ComponentNumbers) -> ComponentNumbers:
        layers = None if component.layers is None else with_more(component.layers)
        return replace(
            component, variants=tuple(_variants(component, problem.hardware)), layers=layers
        )

    return replace(
        problem, components=tuple(with_more(component) for component in problem.components)
    )


def _variants(component: ComponentNumbers, hardware: Hardware) -> Iterator[Variant]:
    plain = component.variants[0]
    rates = {
        "pinned": hardware.h2d_bytes_per_second,
        "pageable": hardware.pageable_bytes_per_second,
    }
    for precision, share, needs, slower in PRECISIONS:
        sizes = tuple(int(share * nbytes) for nbytes in plain.block_bytes)
        total = sum(
            len(group.blocks) * nbytes
            for group, nbytes in zip(component.groups, sizes, strict=True)
        )
        for backing_store in ("pinned", "pageable", "disk"):
            disk = backing_store == "disk"
            yield replace(
                plain,
                precision=precision,
                backing_store=backing_store,  # type: ignore[arg-type]
                block_bytes=sizes,
                load_seconds=tuple(
                    hardware.copy_start_seconds + n / rates.get(backing_store, rates["pinned"])
                    for n in sizes
                ),
                host_bytes=2 * max(sizes) if disk else total,
                disk_seconds=tuple(nbytes / hardware.disk_bytes_per_second for nbytes in sizes)
                if disk
                else (),
                block_seconds=tuple(slower * nbytes for nbytes in sizes) if slower else (),
                needs=needs,
            )


def measured(problem: Problem) -> dict[str, Any]:
    """Return the time and the figures of one solve."""
    begin, busy = time.perf_counter(), time.process_time()
    solution = solved(problem)
    seconds, cpu_seconds = (
        round(time.perf_counter() - begin, 3),
        round(time.process_time() - busy, 3),
    )
    if solution is None:
        return {"feasible": False, "solve_seconds": seconds, "cpu_seconds": cpu_seconds}
    simulation = simulate(solution.problem, solution.plan)
    return {
        "feasible": True,
        "solve_seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "gap": round(solution.gap, 8),
        "proven": solution.proven_optimal,
        "regime": "cold" if problem.runs == 1 else f"session of {problem.runs}",
        "objective_seconds": round(solution.objective_seconds, 4),
        "predicted_seconds": round(simulation.total_seconds, 4),
        "moved_gib": round(simulation.total_moved_bytes / GIB, 3),
        "peak_gib": round(simulation.peak_bytes / GIB, 3),
        "variants": dict(solution.plan.variants),
        "fixed_modes": compared(problem, solution.plan, simulation.total_seconds),
        "by_layer": solution.problem is not problem,
    }


def cells(name: str, runs: int = 1) -> Iterator[tuple[dict[str, Any], Problem]]:
    """Yield the conditions and the problem of every budget of graph ``name``."""
    import graphrun

    path = HERE.parent / "graphs" / f"{name}.yaml"
    base = graphrun.estimate(graphrun.load(path), vram="8G", ram="32G", hardware="rtx4090")
    problem = varied(base)
    everything = tuple(
        sorted({variant.needs for c in problem.components for variant in c.variants} - {""})
    )
    for vram in VRAM:
        for ram in RAM if runs == 1 else (32, 64):
            for allow in dict.fromkeys(((), everything)):
                extended = replace(
                    problem,
                    budget_bytes=vram * GIB,
                    ram_bytes=ram * GIB,
                    hardware=replace(
                        problem.hardware,
                        capacity_bytes=max(problem.hardware.capacity_bytes, vram * GIB),
                    ),
                    allow=allow,
                    runs=runs,
                )
                conditions = {
                    "vram_gib": vram,
                    "ram_gib": ram,
                    "allow": list(allow),
                    "variants_by_rule": problem is not base,
                }
                yield conditions, extended


def graph_rows(name: str, runs: int) -> Iterator[dict[str, Any]]:
    """Yield a row for every budget of graph ``name``."""
    for conditions, problem in cells(name, runs):
        yield conditions | measured(problem)


def least_row(name: str) -> dict[str, Any]:
    """Return the smallest budget of graph ``name`` with 64 GiB of RAM."""
    import graphrun

    problem = graphrun.estimate(
        graphrun.load(HERE.parent / "graphs" / f"{name}.yaml"),
        vram="8G",
        ram="64G",
        hardware="rtx4090",
    )
    busy = time.process_time()
    minimum = smallest_budget(problem)
    minimum_seconds, busy = time.process_time() - busy, time.process_time()
    has_plan, has_smaller_plan = (
        solved(replace(problem, budget_bytes=nbytes)) is not None
        for nbytes in (minimum, minimum - 1)
    )
    plan_seconds = time.process_time() - busy
    seconds = {
        "cpu_seconds": round(minimum_seconds, 3),
        "cpu_seconds_to_plan_both": round(plan_seconds, 3),
    }
    return {
        "graph": name,
        "smallest_budget_bytes": minimum,
        "plans": has_plan,
        "a_byte_less_plans": has_smaller_plan,
        **seconds,
    }


def random_problem(seed: int, components: int = 12, stages: int = 20) -> Problem:
    """Return a chain of stages that use one or two of the components each. Components have two
    precisions and three backing stores."""
    from graphrun.profile.hardware import data_sheet_estimates

    rng, card = random.Random(seed), data_sheet_estimates()["rtx4090"]
    component_numbers = tuple(_random_component(rng, number, card) for number in range(components))
    phases = []
    for stage in range(stages):
        uses = []
        for component in rng.sample(component_numbers, rng.choice((1, 1, 1, 2))):
            calls = rng.choice((1, 1, 2, 20, 40))
            block_seconds = tuple(
                nbytes * rng.choice((0.5, 1, 2)) / 15e9
                for nbytes in component.variants[0].block_bytes
            )
            uses.append(Use(component.name, calls, (calls,) * len(component.groups), block_seconds))
        activation = rng.choice((50, 200, 500, 1500)) * MIB
        phases.append(PhaseNumbers(f"s{stage}", 0, tuple(uses), 0, activation, activation))
    values = []
    for stage in range(stages - 1):
        consumer_numbers = sorted(
            rng.sample(range(stage + 1, stages), min(stages - 1 - stage, rng.choice((1, 1, 2))))
        )
        consumers = tuple(f"s{consumer}" for consumer in consumer_numbers)
        values.append(
            ValueNumbers(
                f"v{stage}",
                rng.choice((1, 10, 100)) * MIB,
                f"s{stage}",
                consumers,
                stage + 1,
                consumer_numbers[-1],
            )
        )
    return Problem(
        f"random-{seed}",
        "0" * 16,
        (),
        card,
        12 * GIB,
        48 * GIB,
        component_numbers,
        tuple(phases),
        tuple(values),
        allow=("int8",),
    )


def _random_component(rng: random.Random, number: int, card: Hardware) -> ComponentNumbers:
    groups = (
        [("blocks", rng.choice((12, 24, 32, 48)), rng.choice((20, 80, 200, 400)) * MIB)]
        if rng.random() < 0.8
        else []
    )
    if groups and rng.random() < 0.4:
        groups.append(("more", rng.choice((8, 16, 32)), rng.choice((20, 80, 200, 400)) * MIB))
    groups.append(("unblocked", 1, rng.choice((50, 100, 400)) * MIB))
    blocks = tuple(
        BlockGroup(name, tuple(f"{name}.{i}" for i in range(count)), count > 1)
        for name, count, _ in groups
    )
    sizes = tuple(nbytes for _, _, nbytes in groups)
    plain = Variant(
        "bfloat16",
        "pinned",
        "device",
        sizes,
        sizes,
        sum(count * nbytes for _, count, nbytes in groups),
    )
    base = ComponentNumbers(f"c{number}", plain.host_bytes // 2, blocks, (plain,))
    return replace(
        base,
        variants=tuple(variant for variant in _variants(base, card) if variant.precision != "nf4"),
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return median and worst of the rows that have a plan."""
    solved_rows = [row for row in rows if row["feasible"]]
    times = [
        mode["times_ours"] for row in solved_rows for mode in row["fixed_modes"].values() if mode
    ]
    return {
        "rows": len(rows),
        "with_a_plan": len(solved_rows),
        "median_solve_seconds": statistics.median(row["solve_seconds"] for row in rows),
        "median_cpu_seconds": statistics.median(row["cpu_seconds"] for row in rows),
        "worst_cpu_seconds": max(row["cpu_seconds"] for row in rows),
        "worst_solve_seconds": max(row["solve_seconds"] for row in rows),
        "worst_gap": max((row["gap"] for row in solved_rows), default=0.0),
        "least_of_fixed_modes_over_ours": min(times, default=None),
        "median_of_fixed_modes_over_ours": statistics.median(times) if times else None,
    }


def main() -> None:
    part_names = sys.argv[1:] or [*GRAPHS, "sessions", "random", "least"]
    path = HERE / "results" / "planner.json"
    # parts that are not measured now stay
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    result |= {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}",
        "versions": {name: version(name) for name in ("highspy", "numpy")},
        "hardware": "rtx4090",
    }
    graphs = [name for name in GRAPHS if name in part_names] or list(GRAPHS)
    parts = [(name, name, 1) for name in graphs if name in part_names]
    parts += [(f"{name}, session", name, 10) for name in graphs if "sessions" in part_names]
    for title, name, runs in parts:
        if not (HERE.parent / "graphs" / f"{name}.yaml").exists():
            print(f"{title}: skipped, there is no graphs/{name}.yaml")
            continue
        rows = []
        for row in graph_rows(name, runs):
            rows.append(row)
            print(title, _line(row), flush=True)
        result[title] = {"summary": summary(rows), "rows": rows}
        print(title, result[title]["summary"])
        path.write_text(json.dumps(result, indent=1) + "\n")
    # 2 M parameters; classes of a package that is not installed
    left_out = (
        "shapes",
        "pyramid-flow",
    )
    graph_names = sorted(
        path.stem for path in (HERE.parent / "graphs").glob("*.yaml") if "-tiny" not in path.stem
    )
    minimum_rows: list[dict[str, Any]] = []
    for name in graph_names if "least" in part_names else ():
        if name not in left_out:
            minimum_rows.append(least_row(name))
            print(minimum_rows[-1], flush=True)
            result["smallest budgets"] = {
                "most_cpu_seconds": max(row["cpu_seconds"] for row in minimum_rows),
                "rows": minimum_rows,
            }
            path.write_text(json.dumps(result, indent=1) + "\n")
    if "random" in part_names:
        rows = []
        for seed in range(10):
            rows.append({"seed": seed} | measured(random_problem(seed)))
            print("random", seed, _line(rows[-1]), flush=True)
        result["random, 12 components x 20 stages"] = {"summary": summary(rows), "rows": rows}
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


def _line(row: dict[str, Any]) -> str:
    title = (
        f"{row['vram_gib']} GiB, RAM {row['ram_gib']}, allow "
        f"{' '.join(row['allow']) or 'nothing'}: "
        if "vram_gib" in row
        else ""
    )
    if not row["feasible"]:
        return f"{title}no plan ({row['solve_seconds']} s)"
    modes = ", ".join(
        f"{name} x{mode['times_ours']}" if mode else f"{name} -"
        for name, mode in row["fixed_modes"].items()
    )
    return (
        f"{title}{row['predicted_seconds']} s, {row['moved_gib']} GiB moved, gap "
        f"{100 * row['gap']:.4f} %,"
        f" solved in {row['solve_seconds']} s; {modes}"
    )


if __name__ == "__main__":
    main()

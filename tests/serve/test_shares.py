"""Graphs that share one budget: who stays on the device is decided by predicted seconds of the runs
of late."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import graphrun
from graphrun.model.problem import Problem
from graphrun.profile.hardware import hardware
from graphrun.serve.catalog import GraphVariant
from graphrun.serve.line import Cost, Line, QueueEntry
from graphrun.serve.planner import share_of
from graphrun.serve.shares import SHARES, WHOLE, Arrangement, arrangements, best, seconds_of
from graphrun.serve.worker import RequestWorker, SessionBudget

SMALL = {"height": 32, "width": 32, "steps": 2, "max_sequence_length": 16}


def costs_of(
    graphs: str, first: float, again_seconds: float, slower: float
) -> dict[tuple[str, float], Cost]:
    """Runs within a share take ``slower`` times the seconds for each halving of it."""
    factors = {share: slower ** (WHOLE / share - 1) for share in (*SHARES, WHOLE)}
    return {
        (graph, share): Cost(first * factor, again_seconds * factor)
        for graph in graphs
        for share, factor in factors.items()
    }


def test_graphs_that_take_turns_stay_together_and_bursts_of_one_have_everything() -> None:
    costs = costs_of("AB", first=10.0, again_seconds=1.0, slower=1.5)
    assert best({}, "AB" * 20, costs) == {"A": 0.5, "B": 0.5}
    assert best({}, "A" * 20 + "B" * 20, costs) == {}
    assert best({"A": 0.5, "B": 0.5}, "A" * 40, costs) == {}, "the other is not asked for any more"


def test_the_larger_share_of_the_budget_is_for_the_larger_share_of_the_traffic() -> None:
    assert best({}, "AAAAAAAB" * 8, costs_of("AB", first=5.0, again_seconds=1.0, slower=1.2)) == {
        "A": 0.75,
        "B": 0.25,
    }


def test_a_change_is_made_where_it_pays_for_loading_anew() -> None:
    costs = costs_of("AB", first=10.0, again_seconds=1.0, slower=1.0)
    assert best({}, "AB", costs) == {}, "two runs do not pay for it"
    slightly = {**costs, ("A", 0.75): Cost(10.0, 0.9)}
    assert best({"A": 0.5, "B": 0.5}, "AB" * 20, slightly) == {"A": 0.5, "B": 0.5}, (
        "2 s in 40 runs, and 20 s to load"
    )


def test_a_share_that_nothing_fits_is_no_choice() -> None:
    costs = costs_of("AB", first=10.0, again_seconds=1.0, slower=1.1)
    possible_costs = {
        key: cost for key, cost in costs.items() if key != ("B", 0.25) and key != ("B", 0.5)
    }
    assert best({}, "AB" * 20, possible_costs) == {"A": 0.25, "B": 0.75}


def test_what_is_seldom_used_takes_everything_in_turn() -> None:
    costs = costs_of("AB", first=10.0, again_seconds=1.0, slower=1.2) | {
        ("C", WHOLE): Cost(12.0, 2.0)
    }
    assert best({}, ("AB" * 15 + "C") * 2, costs) == {"A": 0.5, "B": 0.5}


@pytest.mark.parametrize("seed", range(8))
def test_predicted_seconds_are_those_of_the_queue(seed: int) -> None:
    """`Line`, which keeps the promises, and `seconds_of`, which decides, say the same of the same
    runs."""
    choose = random.Random(seed)
    costs = {
        (graph, share): Cost(choose.uniform(2, 9), choose.uniform(0.1, 2))
        for graph in "ABC"
        for share in (*SHARES, WHOLE)
    }
    runs = choose.choices("ABC", k=30)
    for arrangement in arrangements(runs):
        assert sum(arrangement.values()) <= WHOLE
        assert seconds_of(arrangement, runs, costs) == pytest.approx(
            line_seconds(arrangement, runs, costs)
        )


def line_seconds(
    arrangement: Arrangement, runs: Sequence[str], costs: Mapping[tuple[str, float], Cost]
) -> float:
    line, clock = Line(), 0.0
    for graph in runs:
        share = arrangement.get(graph, WHOLE)
        resident_groups = frozenset(arrangement.items()) if graph in arrangement else frozenset()
        line.add(
            QueueEntry(
                graph,
                (graph, share),
                "any",
                costs[graph, share],
                1,
                resident_groups=resident_groups,
            ),
            clock,
            clock,
        )
        clock = line.end(clock)
        line.pop()
    return clock


def test_shares_are_of_what_is_left_beside_the_overhead() -> None:
    card = replace(hardware("rtx4090"), context_bytes=100, workspace_bytes=20, capacity_bytes=10**6)
    problem = Problem("g", "0", (), card, 1000, 4000, (), (), (), reserve_bytes=80, disk_bytes=400)
    assert problem.effective_bytes == 800
    budgets = share_of(problem, 0.25)
    assert (budgets["ram"], budgets["disk"]) == (1000, 100)
    assert "pinned" not in budgets, "there is no limit but that of RAM"
    assert replace(problem, reserve_bytes=budgets["reserve"]).effective_bytes == 200
    assert share_of(replace(problem, pinned_bytes=1000), 0.75)["pinned"] == 750


class Told(list[tuple[str, dict[str, Any]]]):
    """Messages of a worker."""

    def __call__(self, kind: str, **content: Any) -> None:
        if kind != "step":
            self.append((kind, content))


@pytest.mark.sweep("serve")
def test_sessions_in_shares_find_their_weights_and_keep_to_the_budget(tmp_path: Path) -> None:
    """Two graphs in turn: in shares both run as a further run does; alone each run loads again."""
    from graphrun.serve.settings import Settings

    budgets = {"vram": 12 * 2**20, "ram": 2**33}
    graphs = (Path("flux-tiny"), Path("flux-schnell-tiny"))
    settings = Settings(
        graphs, (), budgets, (hardware("sim"),), tmp_path / "cache", "none", tmp_path, {}, "1"
    )
    worker = RequestWorker(settings, messages := Told())
    problem = graphrun.estimate(
        graphrun.load(graphs[0]), **budgets, inputs=SMALL, hardware="sim", cache=settings.cache
    )
    halves = share_of(problem, 0.5)
    both_groups = frozenset((str(graph), 0.5) for graph in graphs)
    number = 0

    def run(
        graph: Path, share: float, resident_groups: frozenset[Any], limits: dict[str, int]
    ) -> dict[str, Any]:
        nonlocal number
        number += 1
        pipeline = graphrun.load(graph)
        inputs = pipeline.resolve({**SMALL, "prompt": "a"})
        fields = {
            "id": str(number),
            "number": 0,
            "inputs": inputs,
            "folder": tmp_path / str(number),
            "suffix": ".png",
            "preview": False,
        }
        fields["folder"].mkdir()
        group = str(graph), share
        worker.run(fields, SessionBudget(group, GraphVariant(pipeline), limits, resident_groups))
        assert messages[-1][0] == "done", messages[-1]
        return messages[-1][1]

    shared = [run(graph, 0.5, both_groups, halves) for graph in graphs * 2]
    turn_runs = [run(graph, 1.0, frozenset(), {}) for graph in (*graphs, graphs[0])]
    for graph in (0, 1):
        assert shared[graph + 2]["seconds"][1] < shared[graph]["seconds"][1], (
            "its weights were there"
        )
    assert turn_runs[2]["seconds"][1] == pytest.approx(turn_runs[0]["seconds"][1], rel=1e-6), (
        "they were not"
    )
    for run_result in (*shared, *turn_runs):
        assert run_result["seconds"][1] == pytest.approx(run_result["seconds"][0], rel=0.05)
        assert run_result["peak_bytes"][1] <= run_result["peak_bytes"][0] <= budgets["vram"]

"""Requests of one shape that go together, stage by stage: the same pictures, in the seconds that
were predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import graphrun
from graphrun.profile.hardware import hardware
from graphrun.serve.catalog import GraphVariant
from graphrun.serve.planner import _plan_batch
from graphrun.serve.settings import Settings
from graphrun.serve.worker import RequestWorker, SessionBudget

SMALL = {"height": 32, "width": 32, "steps": 3, "max_sequence_length": 16}
GROUP = ("flux-tiny", 1.0)


@pytest.mark.sweep("serve")
def test_the_pictures_are_those_of_runs_one_by_one_and_the_seconds_those_predicted(
    tmp_path: Path,
) -> None:
    graph, messages = graphrun.load("flux-tiny"), list[tuple[str, dict[str, Any]]]()
    budgets = {"vram": 6 * 2**20, "ram": 2**33}
    settings = Settings(
        (Path("flux-tiny"),),
        (),
        budgets,
        (hardware("sim"),),
        tmp_path / "cache",
        "none",
        tmp_path,
        {},
        "1",
    )
    segments = _plan_batch(graph, {"inputs": SMALL, "budgets": {}}, settings, lambda: False)
    assert segments == {
        ("encode",): segments[("encode",)],
        ("denoise", "decode"): segments[("denoise", "decode")],
    }
    worker = RequestWorker(settings, lambda kind, **content: messages.append((kind, content)))

    def asked(seed: int, folder_name: str) -> dict[str, Any]:
        (folder := tmp_path / f"{folder_name}-{seed}").mkdir()
        inputs = graph.resolve({**SMALL, "prompt": str(seed), "seed": seed})
        return {
            "id": str(seed),
            "number": 0,
            "inputs": inputs,
            "folder": folder,
            "suffix": ".png",
            "preview": False,
        }

    for number in range(3):
        worker.run(
            asked(number, "alone"), SessionBudget(GROUP, GraphVariant(graph), {}, frozenset())
        )
    single_runs = [content for kind, content in messages if kind == "done"]
    took = sum(result["seconds"][1] for result in single_runs)
    assert worker.clock_seconds == pytest.approx(took, rel=0.01), (
        "weights without a source were created before the first run"
    )
    messages.clear()
    worker.cancelled.add("9")
    start = worker.clock_seconds
    runs = [asked(number, "together") for number in (0, 1, 9, 2)]
    budget = SessionBudget(GROUP, GraphVariant(graph), {}, frozenset())
    worker.run_together(runs, budget, tuple(segments))
    took = worker.clock_seconds - start
    batch_runs = [content for kind, content in messages if kind == "done"]
    assert [kind for kind, _ in messages if kind not in ("begins", "step")] == [
        "cancelled",
        "done",
        "done",
        "done",
        "together",
    ]
    assert took == pytest.approx(
        sum(first + 2 * repeat_seconds for first, repeat_seconds in segments.values()), rel=0.02
    )
    assert (
        took
        < sum(result["seconds"][1] for result in single_runs)
        + single_runs[0]["seconds"][1]
        - single_runs[1]["seconds"][1]
    )
    for single, other in zip(single_runs, batch_runs, strict=True):
        assert Image.open(single["files"][0]).tobytes() == Image.open(other["files"][0]).tobytes()
        assert other["peak_bytes"][1] <= other["peak_bytes"][0] <= budgets["vram"]
        assert other["seconds"][1] == pytest.approx(other["seconds"][0], rel=0.02)

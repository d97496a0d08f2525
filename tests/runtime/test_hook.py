"""A hook sees every slot and call of a run in the plan's order, and may end the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import graphrun
from graphrun.model.plan import Slot
from graphrun.trace import SlotTrace

GRAPH = Path(__file__).parents[2] / "graphs" / "flux-tiny.yaml"
SMALL = {"prompt": "a fox", "height": 32, "width": 32, "steps": 2, "max_sequence_length": 16}


class Notes(graphrun.Hook):
    """Notes each moment; raises an error when the calls of a component begin."""

    def __init__(self, failing: str = "") -> None:
        self.moments: list[tuple[str, Any]] = []
        self.slot_traces: list[SlotTrace] = []
        self.failing = failing

    def slot_opens(self, index: int, slot: Slot) -> None:
        self.moments.append(("opens", (index, slot.phase, slot.part)))

    def call_begins(
        self, component: str, entry: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if component == self.failing:
            raise ZeroDivisionError("enough")
        assert torch.is_tensor(next(iter([*args, *kwargs.values()])))
        self.moments.append(("begins", (component, entry)))

    def call_ends(self, component: str, entry: str, result: Any) -> None:
        self.moments.append(("ends", (component, entry)))

    def slot_closes(self, index: int, slot_trace: SlotTrace) -> None:
        self.moments.append(("closes", (index, slot_trace.phase, slot_trace.part)))
        self.slot_traces.append(slot_trace)


@pytest.fixture(scope="module")
def solution(cached_dry_runs: Path) -> Any:
    graph = graphrun.load(GRAPH)
    problem = graphrun.estimate(
        graph, inputs=SMALL, vram="64M", ram="8G", hardware="sim", cache=cached_dry_runs
    )
    return graphrun.plan(problem)


def run(solution: Any, hook: graphrun.Hook) -> Any:
    return graphrun.run(solution, graphrun.load(GRAPH), SMALL, random_weights=True, progress=hook)


def test_a_hook_sees_the_slots_and_calls_of_the_trace_in_order(solution: Any) -> None:
    notes = Notes()
    trace = run(solution, notes)
    slots = [(n, slot.phase, slot.part) for n, slot in enumerate(solution.plan.slots)]
    assert [item for kind, item in notes.moments if kind == "opens"] == slots
    assert [item for kind, item in notes.moments if kind == "closes"] == slots
    assert tuple(notes.slot_traces) == trace.slots
    runs = [event for event in trace.events if event.kind == "run"]
    assert {event.nbytes for event in runs} == {0}
    calls = [(event.component, event.detail) for event in runs]
    assert [item for kind, item in notes.moments if kind == "begins"] == calls
    # each moment inside its slot, and a call ends before the next begins
    depth = {"opens": 0, "begins": 1, "ends": 2, "closes": 1}
    level_after = {"opens": 1, "begins": 2, "ends": 1, "closes": 0}
    level = 0
    for kind, _ in notes.moments:
        assert level == depth[kind]
        level = level_after[kind]
    assert level == 0


def test_an_error_of_a_hook_ends_the_run_with_an_empty_device(solution: Any) -> None:
    notes = Notes(failing="transformer")
    with pytest.raises(graphrun.StageError, match="enough") as raised:
        run(solution, notes)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert notes.moments[-1][0] == "opens"  # of the slot whose first call was refused
    later_notes = Notes()
    trace = run(solution, later_notes)
    assert trace.left_bytes == 0
    assert tuple(later_notes.slot_traces) == trace.slots

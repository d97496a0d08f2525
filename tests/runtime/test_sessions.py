"""Several runs of one plan: kept weights stay, later runs execute their own slots, closing releases
everything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_component import (
    WIDE,
    Small,
    calls_to,
    device_of,
    plain,
    plan_of,
    small_hardware,
    small_problem,
    use,
)
from stored_component import host_of, in_backing_store, saved

from graphrun.errors import OutOfMemory, PlanError, TransferFailed
from graphrun.runtime.executor import PlanSession
from graphrun.verify.simulate import simulate
from graphrun.verify.solution import solution_of

ON = replace(small_hardware(), disk_bytes_per_second=4e8)
CALLS = ["a", "b"]
TEXT = f"""
    leaves a unblocked[0] wide[0,2]
    slot s0/0:a load
      read a
      load a unblocked[0] wide[0,2] from pinned
    slot s0/0:a first
      read b
      stream a keep unblocked[0] wide[0,2] ring buffer {2 * WIDE} B
      run
    slot s1/0:b load
      load b all from pinned
    slot s1/0:b first
      run
    slot end
      evict b all
    again
    slot s0/0:a load
    slot s0/0:a first
      stream a keep unblocked[0] wide[0,2] ring buffer {2 * WIDE} B
      run
    slot s1/0:b load
      load b all from pinned
    slot s1/0:b first
      run
    slot end
      evict b all
"""


class Case:
    def __init__(self, folder: Path) -> None:
        problem = small_problem({}, [[use("a", 1, ON)], [use("b", 1, ON)]], ON)
        self.problem = replace(
            problem,
            runs=3,
            components=tuple(in_backing_store("pinned", name, ON) for name in ("a", "b")),
        )
        self.plan = plan_of(self.problem, TEXT)
        self.device = device_of(self.problem)
        self.host = host_of(
            self.problem, {"a": saved(folder / "a"), "b": saved(folder / "b", 1)}, self.device
        )
        self.expected = plain({"a": Small(), "b": Small(1)}, CALLS)

    def work(self) -> dict[str, torch.Tensor]:
        return calls_to(self.host.modules, CALLS, self.device.torch_device)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_further_runs_find_what_the_first_kept_and_closing_returns_everything(case: Case) -> None:
    with PlanSession(solution_of(case.problem, case.plan), case.host, case.device) as session:
        traces = [session.run(case.work) for _ in range(3)]
        assert case.device.allocated_bytes > 0
        assert (
            case.device.arenas.nbytes("pinned")
            == 2 * case.problem.components[0].variants[0].host_bytes
        )
    simulation = simulate(case.problem, case.plan)
    assert [trace.moved_bytes for trace in traces] == [
        simulation.moved_bytes,
        *[simulation.further_moved_bytes] * 2,
    ]
    assert simulation.further_moved_bytes < simulation.moved_bytes
    assert [trace.seconds for trace in traces] == pytest.approx(
        [simulation.seconds, *[simulation.further_seconds] * 2], rel=0.02
    )
    assert all(torch.equal(trace.outputs["x"], case.expected) for trace in traces)
    assert {trace.plan_digest for trace in traces} == {case.plan.digest}
    assert [len([e for e in trace.events if e.kind == "read"]) for trace in traces] == [22, 0, 0]
    assert case.device.allocated_bytes == case.device.arenas.nbytes("arenas") == 0


def test_a_run_that_fails_ends_the_session_and_the_next_is_a_first_one(case: Case) -> None:
    with PlanSession(solution_of(case.problem, case.plan), case.host, case.device) as session:
        first = session.run(case.work)
        case.device.machine.fail_copy = 3
        with pytest.raises(TransferFailed):
            session.run(case.work)
        assert case.device.allocated_bytes == case.device.arenas.nbytes("arenas") == 0
        further_run = session.run(case.work)
    assert further_run.moved_bytes == first.moved_bytes
    assert torch.equal(further_run.outputs["x"], case.expected)


def test_the_first_slot_may_be_performed_ahead_and_an_error_in_it_empties_the_device(
    case: Case,
) -> None:
    with PlanSession(solution_of(case.problem, case.plan), case.host, case.device) as session:
        whole = session.run(case.work)
        session.close()
        session.load_ahead()
        loaded_bytes = case.device.allocated_bytes
        assert session.loaded_ahead
        assert loaded_bytes > 0
        session.load_ahead()
        assert case.device.allocated_bytes == loaded_bytes, "once"
        first_run = session.run(case.work)
        session.load_ahead()
        assert not session.loaded_ahead, "a further run finds what the first one left"
        further_run = session.run(case.work)
        session.close()
        assert case.device.allocated_bytes == case.device.arenas.nbytes("arenas") == 0
        case.device.machine.fail_copy = 2
        with pytest.raises(TransferFailed):
            session.load_ahead()
        assert case.device.allocated_bytes == case.device.arenas.nbytes("arenas") == 0
        next_run = session.run(case.work)
    for trace in (first_run, next_run):
        assert [(slot.phase, slot.part, slot.moved_bytes) for slot in trace.slots] == [
            (slot.phase, slot.part, slot.moved_bytes) for slot in whole.slots
        ]
        assert torch.equal(trace.outputs["x"], case.expected)
        assert [slot.start_seconds for slot in trace.slots] == sorted(
            slot.start_seconds for slot in trace.slots
        )
    assert further_run.moved_bytes < first_run.moved_bytes


@pytest.mark.parametrize("is_ahead", [True, False])
def test_an_allocation_refused_in_the_first_slot_names_it_and_measures_the_device(
    case: Case, is_ahead: bool
) -> None:
    with PlanSession(solution_of(case.problem, case.plan), case.host, case.device) as session:
        case.device.machine.fail_allocation = 2
        with pytest.raises(OutOfMemory) as error_info:
            session.load_ahead() if is_ahead else session.run(case.work)
    error = error_info.value
    assert (error.secondary, error.phase, error.part) == (0, "s0/0:a", "load")
    assert error.available_bytes == case.problem.effective_bytes
    assert 0 < error.peak_bytes < error.planned_bytes
    assert error.planned_bytes == simulate(case.problem, case.plan).slots[0].peak_bytes


def test_a_plan_for_one_run_is_not_run_twice_in_a_session(case: Case) -> None:
    single = replace(case.problem, runs=1)
    text = TEXT.split("again")[0].replace(
        "evict b all", "evict a unblocked[0] wide[0,2]\n      evict b all"
    )
    with PlanSession(solution_of(single, plan_of(single, text)), case.host, case.device) as session:
        session.run(case.work)
        with pytest.raises(PlanError, match="the plan is for one run"):
            session.run(case.work)

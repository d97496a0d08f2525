"""A component that computes on the CPU: weights stay on the host, inputs and outputs are copied,
time is the CPU's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_component import (
    GROUPS,
    Small,
    device_of,
    plain,
    plan_of,
    run,
    small_hardware,
    small_problem,
    use,
)
from stored_component import host_of, in_backing_store, saved

from graphrun.model.problem import Problem
from graphrun.verify.simulate import simulate

ON = small_hardware()
SLOWDOWN = 10.0
CALLS = ["a", "b", "a"]
TEXT = """
    slot s0/0:a load
      read a
    slot s0/0:a first
      run
    slot s1/0:b load
      load b all from pinned
    slot s1/0:b first
      run
    slot s2/0:a load
    slot s2/0:a first
      run
    slot end
      evict b all
"""


def case(slowdown: float) -> Problem:
    problem = small_problem(
        {"b": Small()}, [[use("a", 1, ON)], [use("b", 1, ON)], [use("a", 1, ON)]], ON
    )
    on_cpu = in_backing_store(
        "pageable",
        "a",
        ON,
        device="cpu",
        streamable=False,
        slowdown=slowdown,
        load_seconds=(0.0,) * 3,
    )
    return replace(problem, components=(on_cpu, *problem.components))


READ_BEFORE, READ_MEANWHILE = (
    TEXT,
    TEXT.replace("      read a\n", "").replace("a first\n", "a first\n      read a\n", 1),
)


@pytest.mark.parametrize(
    "text", [READ_BEFORE, READ_MEANWHILE], ids=["read before", "read in the slot of the call"]
)
def test_it_gives_the_same_bits_and_its_weights_never_reach_the_device(
    tmp_path: Path, text: str
) -> None:
    problem = case(SLOWDOWN)
    device = device_of(problem)
    host = host_of(problem, {"a": saved(tmp_path / "a"), "b": saved(tmp_path / "b", 1)}, device)
    devices: list[tuple[str, str]] = []
    host.modules["a"].callback = lambda x: devices.append(
        (x.device.type, host.modules["a"].device.type)
    )
    trace = run(problem, plan_of(problem, text), host, device, CALLS)
    assert torch.equal(trace.outputs["x"], plain({"a": Small(), "b": Small(1)}, CALLS))
    assert devices == [("cpu", "cpu")] * 2
    assert trace.moved_bytes == sum(
        e.nbytes for e in trace.events if e.kind == "load" and e.component == "b"
    )
    first_call = next(e for e in trace.events if e.kind == "run")
    computed = first_call.end_seconds - max(e.end_seconds for e in trace.events if e.kind == "read")
    assert computed >= 0.95 * SLOWDOWN * sum(
        s * len(k.blocks) for s, k in zip(use("a", 1, ON).seconds, GROUPS, strict=True)
    )
    expected = simulate(problem, plan_of(problem, text)).seconds
    if text is READ_BEFORE:
        assert trace.seconds == pytest.approx(expected, rel=0.05)
    assert device.allocated_bytes == 0

"""Copies overlap with compute: a streamed stage takes at most 1.03 x max(compute, transfer) plus
one block."""

from __future__ import annotations

import pytest
from small_component import WIDE, Small, device_of, plan_of, run, small_hardware, small_problem, use

from graphrun.runtime.host import Host
from graphrun.verify.simulate import simulate

CALLS = 6
PLAN = """
    slot s0/0:a load
      load a unblocked[0] from pinned
    slot s0/0:a first
      stream a keep unblocked[0] ring buffer {ring_buffer} B
      run
    slot s0/0:a steady x5
      stream a keep unblocked[0] ring buffer {ring_buffer} B
      run
    slot end
      evict a unblocked[0]
"""


@pytest.mark.parametrize("rate", [2e8, 1e9, 3e9, 1e10, 1e11])
def test_a_streamed_stage_takes_no_longer_than_its_slower_half_and_one_block(rate: float) -> None:
    hardware = small_hardware(h2d=rate, flops=1e10)
    modules = {"a": Small()}
    problem = small_problem(modules, [[use("a", CALLS, hardware)]], hardware)
    plan, device = plan_of(problem, PLAN.format(ring_buffer=2 * WIDE)), device_of(problem)
    trace = run(problem, plan, Host(modules, problem, device), device, ["a"] * CALLS)
    slot, report = trace.slots[2], simulate(problem, plan).slots[2]
    block = WIDE / rate + problem.phases[0].uses[0].seconds[1]
    bound = 1.03 * max(report.compute_seconds, slot.moved_bytes / rate) + block
    assert slot.moved_bytes > 0
    assert slot.end_seconds - slot.start_seconds <= bound

"""Copies overlap with compute: a streamed stage takes at most 1.03 x max(compute, transfer) plus
one block."""

from __future__ import annotations

import pytest
from small_component import WIDE, Small, device_of, hardware, plan_of, problem, run, use

from graphrun.runtime.host import Host
from graphrun.verify.simulate import simulate

CALLS = 6
PLAN = """
    slot s0/0:a load
      load a remainder[0] from pinned
    slot s0/0:a first
      stream a keep remainder[0] ring buffer {ring buffer} B
      run
    slot s0/0:a steady x5
      stream a keep remainder[0] ring buffer {ring buffer} B
      run
    slot end
      evict a remainder[0]
"""


@pytest.mark.parametrize("rate", [2e8, 1e9, 3e9, 1e10, 1e11])
def test_a_streamed_stage_takes_no_longer_than_its_slower_half_and_one_block(rate: float) -> None:
    on = hardware(h2d=rate, flops=1e10)
    modules = {"a": Small()}
    of = problem(modules, [[use("a", CALLS, on)]], on)
    plan, device = plan_of(of, PLAN.format(ring_buffer=2 * WIDE)), device_of(of)
    trace = run(of, plan, Host(modules, of, device), device, ["a"] * CALLS)
    slot, report = trace.slots[2], simulate(of, plan).slots[2]
    block = WIDE / rate + of.phases[0].uses[0].seconds[1]
    bound = 1.03 * max(report.compute_seconds, slot.moved_bytes / rate) + block
    assert slot.moved_bytes > 0
    assert slot.end_seconds - slot.start_seconds <= bound

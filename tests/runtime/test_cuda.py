"""Bitwise results, cleanup and the memory limit on a CUDA device; skipped without one."""

from __future__ import annotations

import copy

import pytest
import torch
from small_component import PREFETCH, WIDE, Small, calls_to, hardware, plan_of, problem, tensors, use

from graphrun.errors import OutOfMemory
from graphrun.runtime.executor import follow
from graphrun.runtime.host import Host
from graphrun.units import GIB, MIB
from graphrun.verify.solution import solution_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CALLS = ["a"] * 4 + ["b"]


def test_streaming_on_cuda_gives_the_bits_of_resident_weights_and_leaves_nothing() -> None:
    from graphrun.runtime.devices.cuda import CudaDevice

    modules = {"a": Small(), "b": Small(1)}
    on = hardware(h2d=20e9, flops=1e13)
    of = problem(modules, [[use("a", 4, on)], [use("b", 1, on)]], on)
    plan, device = plan_of(of, PREFETCH.format(ring=2 * WIDE)), CudaDevice(workspace_bytes=64 * MIB)
    with torch.no_grad():
        expected = calls_to({n: copy.deepcopy(m).cuda() for n, m in modules.items()}, CALLS, device.torch_device)["x"]
    torch._C._cuda_clearCublasWorkspaces()
    host = Host(modules, of, device)
    assert all(residency.arena.is_pinned("cuda") for residency in host.residencies.values())
    for _ in range(5):
        trace = follow(solution_of(of, plan), host, device, lambda: calls_to(host.modules, CALLS, device.torch_device))
        assert torch.equal(trace.outputs["x"], expected)
        assert trace.left_bytes == 0
        assert all(t.device.type == "cpu" for module in modules.values() for t in tensors(module))
        assert all(0 <= e.start_seconds <= e.end_seconds for e in trace.events)


def test_the_allocator_refuses_more_than_the_cap_and_recovers() -> None:
    from graphrun.runtime.devices.cuda import CudaDevice

    device = CudaDevice()
    with device.session(64 * MIB), pytest.raises(torch.OutOfMemoryError) as caught:
        device.allocate(GIB)
    assert isinstance(device.explain(caught.value), OutOfMemory)
    with device.session(2 * GIB):
        assert device.allocate(GIB).numel() == GIB

"""S2: streaming. Device from the plan, one mover per module, same bits, planned bytes, time not
underestimated."""

from __future__ import annotations

from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from small_component import (
    PREFETCH,
    WIDE,
    Small,
    device_of,
    plan_of,
    run,
    small_hardware,
    small_problem,
    use,
)
from whole_pipelines import TinyPipeline, pixels, planned, streamed

import graphrun
from graphrun.errors import InputError
from graphrun.runtime.host import Host
from graphrun.solve.solve import solve
from graphrun.verify.simulate import simulate


@pytest.fixture(scope="module", params=["cogview4-tiny", "wan-tiny"])
def whole(request: pytest.FixtureRequest) -> TinyPipeline:
    """A GLM encoder and guidance in two calls; a video whose frames pass the decoder one by one."""
    # a plan is for the longest text, and CogView4 pads no further than a text goes
    long = "a lighthouse at dusk, " * 8
    texts = {"prompt": long, "negative_prompt": long} if request.param == "cogview4-tiny" else {}
    return TinyPipeline(request.param, {"steps": 2, **texts})


def test_s2_1_the_device_is_the_plans_although_the_parameters_are_elsewhere() -> None:
    modules = {"a": Small(), "b": Small(1)}
    problem = small_problem(
        modules, [[use("a", 4, small_hardware())], [use("b", 1, small_hardware())]]
    )
    device = device_of(problem)
    host = Host(modules, problem, device)
    devices: list[tuple[str, str]] = []
    modules["a"].callback = lambda _: devices.append(
        (modules["a"].device.type, modules["a"].wide[0].expand.weight.device.type)
    )
    run(
        problem,
        plan_of(problem, PREFETCH.format(ring_buffer=2 * WIDE)),
        host,
        device,
        ["a"] * 4 + ["b"],
    )
    assert devices == [("sim", "cpu")] * 4


def test_s2_1_under_accelerates_offloading_the_device_is_meta() -> None:
    module = accelerate.cpu_offload(Small(), "cpu")
    assert next(module.parameters()).device.type == "meta"


def test_s2_2_a_module_that_accelerate_moves_is_refused_before_the_run(
    make_problem: Any, dry: Any
) -> None:
    graph, _, _ = dry("flux-tiny")
    from graphrun.modules.build import build

    offloaded_module = accelerate.cpu_offload(build(graph.components["transformer"], graph), "cpu")
    solution = graphrun.plan(make_problem("flux-tiny", 1 << 30))
    with pytest.raises(InputError, match="transformer.* carries accelerate's AlignDevicesHook"):
        graphrun.run(solution, graph, modules={"transformer": offloaded_module})


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("room", [0.0, 0.5])
def test_s2_3_streamed_output_is_the_plain_pipelines_and_s2_4_the_peak_is_the_plans(
    whole: TinyPipeline, room: float
) -> None:
    minimum_bytes = whole.smallest().budget_bytes
    problem = whole.within(
        int(minimum_bytes + room * (whole.largest_with_activation() - minimum_bytes))
    )
    plan = planned(problem)
    assert "transformer" in streamed(plan)
    trace = whole.run(problem, plan)
    assert np.array_equal(pixels(trace.outputs["image"]), whole.image)
    for m, p in zip(trace.slots, simulate(problem, plan).slots, strict=True):
        assert m.peak_bytes <= p.peak_bytes
        if p.ring_buffer_bytes:
            assert m.peak_bytes >= 0.97 * p.peak_bytes
    assert trace.left_bytes == whole.device.allocated_bytes == 0


def test_s2_3_resident_output_is_the_same(whole: TinyPipeline) -> None:
    plan = planned(whole.problem)
    assert np.array_equal(pixels(whole.run(whole.problem, plan).outputs["image"]), whole.image)


def test_s2_4_tables_and_ring_buffers_are_counted(whole: TinyPipeline) -> None:
    """The largest leaf, an embedding table, is never streamed: it is resident in every slot of its
    component."""
    numbers = whole.problem.component("text_encoder")
    unblocked_bytes = numbers.variants[0].block_bytes[
        [k.name for k in numbers.groups].index("unblocked")
    ]
    module = whole.modules["text_encoder"]
    table = max(m.weight.nbytes for m in module.modules() if isinstance(m, torch.nn.Embedding))
    assert unblocked_bytes >= table
    problem = whole.smallest()
    for slot in simulate(problem, planned(problem)).slots:
        if "text_encoder" in slot.phase and slot.part == "first":
            assert slot.resident_bytes >= unblocked_bytes


@pytest.mark.parametrize("mib", [6, 8, 16])
def test_s2_6_seconds_are_never_below_bytes_over_bandwidth(make_problem: Any, mib: int) -> None:
    problem = make_problem("flux-tiny", mib << 20)
    solution = solve(problem)
    simulated = simulate(solution.problem, solution.plan)
    assert simulated.seconds >= simulated.moved_bytes / problem.hardware.h2d_bytes_per_second
    assert solution.bound_seconds <= simulated.seconds * 1.0001

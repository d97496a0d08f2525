"""S3.3: a hundred runs without drift. S4: a GLM encoder whose inputs go to the plan's device."""

from __future__ import annotations

import gc
import sys

import accelerate
import psutil
import pytest
import torch
from scenario_graphs import AMPLE, GLM_ENCODE, Encoding, encode, equal, graph_of
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

from graphrun.model.plan import Load, Stream
from graphrun.runtime.host import Host
from graphrun.solve.infeasible import smallest_budget
from graphrun.solve.solve import solve

RUNS = 100
WARM = 20  # runs after which Python's own caches (classes, code, free lists) are full


@pytest.mark.sweep("more")
def test_s3_3_a_hundred_runs_have_equal_actions_peaks_and_seconds_and_no_drift() -> None:
    """Python's heap is counted in objects and in blocks: tracemalloc sees what was allocated since
    it began alone, so that whatever replaces something older looks as if it had been added (12 KB a
    run, the first ten runs)."""
    modules = {"a": Small(), "b": Small(1)}
    problem = small_problem(
        modules, [[use("a", 2, small_hardware())], [use("b", 1, small_hardware())]]
    )
    device = device_of(problem)
    host, plan = (
        Host(modules, problem, device),
        plan_of(problem, PREFETCH.replace("x3", "x1").format(ring_buffer=2 * WIDE)),
    )
    calls = ["a"] * 2 + ["b"]
    hashes, first, worst = set(), [], 1.0
    objects = blocks = rss_bytes = 0
    process = psutil.Process()
    for number in range(RUNS):
        trace = run(problem, plan, host, device, calls)
        actions = tuple((e.kind, e.component, e.slot, e.detail, e.nbytes) for e in trace.events)
        hashes.add(hash((actions, tuple(s.peak_bytes for s in trace.slots), trace.tiers)))
        seconds = [slot.end_seconds - slot.start_seconds for slot in trace.slots]
        first = first or seconds
        worst = max(
            worst,
            *(
                (own_seconds + 1e-9) / (other + 1e-9)
                for own_seconds, other in zip(seconds, first, strict=True)
            ),
        )
        assert all(tier.before_bytes == tier.after_bytes for tier in trace.tiers), (
            "device, arenas, pinned"
        )
        del trace, actions, seconds
        if number in (WARM, RUNS - 1):
            gc.collect()
            objects, blocks = len(gc.get_objects()) - objects, sys.getallocatedblocks() - blocks
            rss_bytes = process.memory_info().rss - rss_bytes
    assert len(hashes) == 1, "actions, peaks and tiers"
    assert worst <= 1.05
    assert device.allocated_bytes == 0
    assert objects < (RUNS - WARM) / 4, "no tensor, event, hook or list stays"
    assert blocks < 4 * (RUNS - WARM), "free lists and tables of the interpreter's own come and go"
    assert rss_bytes < 16 << 20


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Encoding:
    return Encoding(graph_of(GLM_ENCODE, tmp_path_factory.mktemp("glm")))


def test_s4_1_no_input_goes_where_a_parameter_is(glm: Encoding) -> None:
    """What pipelines do (``input_ids.to(self.text_encoder.device)``) goes to the plan's device;
    weights are on the host."""
    devices: list[tuple[str, str]] = []
    module = glm.modules["text_encoder"]
    hook = module.register_forward_pre_hook(
        lambda m, args: devices.append((m.device.type, args[0].device.type))
    )
    problem = glm.smallest()
    try:
        glm.run(problem, solve(problem).plan)
    finally:
        hook.remove()
    assert devices == [("sim", "sim")] * 2
    assert module.device.type == "cpu"


def test_s4_1_under_accelerates_offloading_the_inputs_go_to_meta(glm: Encoding) -> None:
    pipeline = glm.pipeline(torch.device("cpu"))
    accelerate.cpu_offload(pipeline.text_encoder, "cpu")
    assert pipeline.text_encoder.device.type == "meta"
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        pipeline.text_encoder(
            torch.ones(1, 16, dtype=torch.long).to(pipeline.text_encoder.device)
        ).last_hidden_state.cpu()
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            encode(glm.pipeline(torch.device("cpu")), glm.inputs), glm.plain, strict=True
        )
    )


@pytest.mark.parametrize("mode", ["resident", "swapped", "by block", "by layer"])
def test_s4_2_glm_gives_the_same_bits_resident_swapped_and_streamed(
    glm: Encoding, mode: str
) -> None:
    problem = glm.smallest() if mode == "by block" else glm.ample
    if mode == "by layer":
        whole = glm.within(AMPLE, by_layer=True)
        assert smallest_budget(whole) < glm.smallest().budget_bytes
        problem = glm.within(smallest_budget(whole), by_layer=True)
    solution = solve(problem)
    problem, plan = solution.problem, solution.plan
    if mode == "swapped":  # loaded whole before the first call, no copies during compute
        text = (
            "slot encode/0:text_encoder load\n  load text_encoder all from pinned\nslot "
            "encode/0:text_encoder first\n  run\n"
        )
        plan = plan_of(
            problem,
            text
            + "slot encode/0:text_encoder steady x1\n  run\nslot end\n  evict text_encoder all",
        )
    actions = [a for slot in plan.slots for a in slot.actions]
    assert any(isinstance(a, Stream) for a in actions) == mode.startswith("by")
    assert any(isinstance(a, Load) for a in actions) or mode == "by layer"
    assert problem.component("text_encoder").granularity == (
        "layers" if mode == "by layer" else "blocks"
    )
    trace = glm.run(problem, plan)
    assert equal(trace.outputs["embeds"], glm.plain)
    assert trace.left_bytes == glm.device.allocated_bytes == 0

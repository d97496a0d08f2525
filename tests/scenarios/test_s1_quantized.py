"""S1: quantized components are loaded, streamed, evicted and released like others; unreleased
memory is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scenario_graphs import GRAPHS
from small_component import Small, device_of, run, small_hardware, small_problem, use
from torch import nn

from graphrun import sim
from graphrun.errors import BrokenPlan
from graphrun.graph.loading import load
from graphrun.model.blocks import all_blocks
from graphrun.model.plan import Plan, parse
from graphrun.model.problem import (
    ALLOCATION_BYTES,
    BlockGroup,
    ComponentNumbers,
    PhaseNumbers,
    Problem,
    Use,
    Variant,
)
from graphrun.modules.blocks import lay_out
from graphrun.modules.build import build, draft
from graphrun.profile.quantized import layer_tensors
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.runtime.executor import follow
from graphrun.runtime.host import Host
from graphrun.solve.infeasible import Infeasible, smallest_budget
from graphrun.solve.solve import solve
from graphrun.trace import Trace
from graphrun.units import round_up
from graphrun.verify.simulate import simulate
from graphrun.verify.solution import solution_of

bnb = pytest.importorskip("bitsandbytes")
PRECISIONS = ["int8", "nf4", "fp8"]
TEXT = """
    slot s/0:te load
      load te {kept} from pinned
    slot s/0:te first
      {stream}
      run
    slot s/0:te steady x1
      {stream}
      run
    slot end
      evict te {kept}
"""
TOKENS_BYTES = 512


class Encoder:
    """FLUX's T5 tiny, in a precision, with plans that keep it resident or stream its blocks."""

    def __init__(self, precision: str) -> None:
        self.precision = precision
        graph = load(GRAPHS / "flux-tiny.yaml")
        component = replace(graph.components["text_encoder_2"], name="te")
        self.plain = build(component, graph)
        self.module, writer = draft(component, graph, precision)
        blocks = tuple(f"encoder.block.{i}" for i in range(len(self.module.encoder.block)))
        layouts = lay_out(self.module, ["", *blocks])
        sizes = tuple(round_up(layouts[path].nbytes, ALLOCATION_BYTES) for path in ("", blocks[0]))
        hardware = small_hardware()
        groups = (BlockGroup("unblocked", ("",), False), BlockGroup("block", blocks, True))
        loads = tuple(size / hardware.h2d_bytes_per_second for size in sizes)
        host_bytes = sizes[0] + len(blocks) * sizes[1]
        variant = Variant(precision, "pinned", "device", sizes, loads, host_bytes)
        phase = PhaseNumbers("s", 0, (Use("te", 2, (2, 2), (0.0, 0.0)),), 1 << 20, 8 << 20, 8 << 20)
        numbers = ComponentNumbers("te", 0, groups, (variant,))
        self.problem = Problem("small", "0", (), hardware, 1 << 30, 1 << 40, (numbers,), (phase,))
        self.device = SimulatedDevice(sim.Machine())
        self.host = Host({"te": self.module}, self.problem, self.device, {"te": writer})
        self.ring_buffer, self.sizes, self.paths = 2 * sizes[1], sizes, all_blocks(numbers).paths
        self.tokens = torch.arange(32).reshape(1, 32)

    def plan(self, streamed: bool) -> Plan:
        stream = f"stream te keep unblocked[0] ring buffer {self.ring_buffer} B" if streamed else ""
        return parse(
            f"plan {self.problem.digest}\n"
            + TEXT.format(kept="unblocked[0]" if streamed else "all", stream=stream)
        )

    def work(self) -> dict[str, torch.Tensor]:
        for _ in range(2):
            output = self.host.modules["te"](self.tokens.to(self.device.torch_device))[0]
        return {"x": output.cpu()}

    def run(self, streamed: bool = False) -> Trace:
        return follow(
            solution_of(self.problem, self.plan(streamed)), self.host, self.device, self.work
        )


@pytest.fixture(scope="module", params=PRECISIONS)
def encoder(request: pytest.FixtureRequest) -> Encoder:
    return Encoder(request.param)


def test_s1_streamed_by_block_gives_the_bits_of_resident(encoder: Encoder) -> None:
    resident, streamed = encoder.run(), encoder.run(streamed=True)
    assert torch.equal(resident.outputs["x"], streamed.outputs["x"])
    assert streamed.moved_bytes > resident.moved_bytes


def test_s1_1_what_cannot_move_is_in_every_later_slot_planned_and_measured() -> None:
    """As int8 modules were before bitsandbytes 0.48. The same with one that moves: it is gone when
    the next one runs."""
    modules = {"a": Small(), "b": Small(1)}
    plain = small_problem(
        modules, [[use("a", 1, small_hardware())], [use("b", 2, small_hardware())]]
    )
    size = plain.components[0].weight_bytes()
    stuck = replace(
        plain.components[0], variants=(replace(plain.components[0].variants[0], movable=False),)
    )
    pinned = replace(plain, components=(stuck, plain.components[1]))
    minimum_budgets = [smallest_budget(problem) for problem in (plain, pinned)]
    assert minimum_budgets[1] == minimum_budgets[0] + size
    for budget_problem, resident_bytes in (
        (replace(plain, budget_bytes=minimum_budgets[1] - 1), 0),
        (replace(pinned, budget_bytes=minimum_budgets[1]), size),
    ):
        plan, device = solve(budget_problem).plan, device_of(budget_problem)
        simulation = simulate(budget_problem, plan)
        trace = run(
            budget_problem, plan, Host(modules, budget_problem, device), device, ["a", "b", "b"]
        )
        slots = [number for number, slot in enumerate(plan.slots) if slot.phase.startswith("s1/0")]
        assert all(
            (simulation.slots[number].resident_bytes >= resident_bytes)
            and (trace.slots[number].peak_bytes >= resident_bytes)
            for number in slots
        )
        assert trace.left_bytes == device.allocated_bytes == 0
    with pytest.raises(Infeasible):
        solve(replace(pinned, budget_bytes=minimum_budgets[1] - 1))


def test_s1_2_release_returns_the_device_to_its_baseline(encoder: Encoder) -> None:
    for streamed in (False, True, False):
        trace = encoder.run(streamed)
        assert trace.left_bytes == encoder.device.allocated_bytes == 0
        assert all(tier.left_bytes == 0 for tier in trace.tiers)


def test_s1_2_a_second_owner_of_a_weights_bytes_is_named_with_them(encoder: Encoder) -> None:
    layer = encoder.module.encoder.block[1].layer[0].SelfAttention.q
    hook = layer.register_forward_hook(
        lambda module, args, output: setattr(module, "kept", module.weight.detach())
    )
    nbytes = round_up(
        encoder.host.residencies["te"].buffer_bytes("encoder.block.1"), ALLOCATION_BYTES
    )
    try:
        with pytest.raises(BrokenPlan, match="stayed on the device after the run") as error_info:
            encoder.run()
    finally:
        hook.remove()
    assert "te.encoder.block.1.layer.0.SelfAttention.q.kept (" in str(error_info.value)
    assert encoder.device.allocated_bytes == nbytes
    del layer.kept
    assert encoder.device.allocated_bytes == 0


def test_s1_3_aliases_are_counted_once_and_go_together(encoder: Encoder) -> None:
    loaded_bytes = sum(
        round_up(encoder.host.residencies["te"].buffer_bytes(path), ALLOCATION_BYTES)
        for path in encoder.paths
    )
    trace = encoder.run()
    assert trace.slots[0].peak_bytes == loaded_bytes + TOKENS_BYTES
    linear = encoder.plain.encoder.block[0].layer[0].SelfAttention.q.weight
    layer = encoder.module.encoder.block[0].layer[0].SelfAttention.q
    layout = lay_out(nn.ModuleList([layer]), [])[""]
    precision = encoder.precision
    expected_bytes = (
        linear.numel() if precision == "fp8" else sum(layer_tensors(*linear.shape, precision))
    )
    assert sum(entry.nbytes for entry in layout.entries) == expected_bytes


def test_s1_4_its_size_is_measured_again_after_the_first_call(encoder: Encoder) -> None:
    layer = encoder.module.encoder.block[0].layer[0].SelfAttention.q
    hook = layer.register_forward_pre_hook(lambda module, args: (args[0] * 100, *args[1:]))
    try:
        trace = encoder.run()
    finally:
        hook.remove()
    sizes = [event for event in trace.events if event.kind == "size"]
    assert [(event.component, event.detail) for event in sizes] == [("te", "after its first call")]
    added_bytes = sizes[0].nbytes - (trace.slots[0].peak_bytes - TOKENS_BYTES)
    assert added_bytes == (1024 if encoder.precision == "int8" else 0), (
        "8-bit layers keep the columns of their last call's outliers"
    )
    assert encoder.device.allocated_bytes == 0, "until they are evicted"


def test_s1_a_module_quantized_elsewhere_may_be_passed_in(encoder: Encoder) -> None:
    precision = encoder.precision
    if precision == "fp8":
        pytest.skip("a layer of graphrun's own")
    expected = encoder.run().outputs["x"]
    module = quantized_by_bitsandbytes(build_again(), precision)
    host = Host({"te": module}, encoder.problem, encoder.device)

    def work() -> dict[str, torch.Tensor]:
        for _ in range(2):
            output = host.modules["te"](encoder.tokens.to(encoder.device.torch_device))[0]
        return {"x": output.cpu()}

    trace = follow(solution_of(encoder.problem, encoder.plan(True)), host, encoder.device, work)
    assert torch.equal(trace.outputs["x"], expected)
    assert encoder.device.allocated_bytes == 0
    with torch.no_grad():
        assert torch.isfinite(module(encoder.tokens)[0]).all(), "it is its owner's again"


def build_again() -> nn.Module:
    graph = load(GRAPHS / "flux-tiny.yaml")
    return build(replace(graph.components["text_encoder_2"], name="te"), graph)


def quantized_by_bitsandbytes(module: nn.Module, precision: str) -> nn.Module:
    """Linear layers replaced and quantized by bitsandbytes' own ``to("cpu")``, but for T5's ``wo``,
    as transformers leaves it."""
    for path, child in list(module.named_modules()):
        if not isinstance(child, nn.Linear) or path.endswith("wo"):
            continue
        layer: Any
        if precision == "nf4":
            layer = bnb.nn.Linear4bit(
                child.in_features, child.out_features, False, child.weight.dtype, False, "nf4"
            )
            layer.weight = bnb.nn.Params4bit(
                child.weight.data, False, quant_type="nf4", compress_statistics=False, module=layer
            )
        else:
            layer = bnb.nn.Linear8bitLt(
                child.in_features, child.out_features, False, has_fp16_weights=False, threshold=6.0
            )
            layer.weight = bnb.nn.Int8Params(
                child.weight.data, has_fp16_weights=False, requires_grad=False
            )
        parent, _, key = path.rpartition(".")
        setattr(module.get_submodule(parent), key, layer.to("cpu").eval())
    return module.requires_grad_(False)

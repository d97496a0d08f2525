"""Tiny FLUX and SDXL under budgets that force streaming: the plain pipeline's image, planned bytes,
nothing left behind."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from campaign import sampled
from torch import nn
from whole_pipelines import TinyPipeline, pixels, planned, ranges_of, streamed

from graphrun.errors import OutOfMemory, TransferFailed
from graphrun.model.choices import apply_choices
from graphrun.model.precomputed import without
from graphrun.modules.trees import walk
from graphrun.runtime.host import Host
from graphrun.trace import Trace
from graphrun.verify.simulate import simulate

ONE_STEP = {"steps": 1, "height": 32, "width": 32}


@pytest.fixture(
    scope="module", params=sampled(["flux-tiny", "sdxl-tiny"], ["flux-tiny"], "reference")
)
def whole(request: pytest.FixtureRequest) -> TinyPipeline:
    return TinyPipeline(request.param, {"steps": 3})


def peaks(trace: Trace) -> list[int]:
    return [slot.peak_bytes for slot in trace.slots]


def as_built(whole: TinyPipeline) -> bool:
    """All tensors on the CPU, classes as they were, and no hook of graphrun's (transformers leaves
    its own on text encoders)."""
    inner = [m for module in whole.modules.values() for m in module.modules()]
    hooks = [
        hook for m in inner for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
    ]
    hooked = any(hook.__module__.startswith("graphrun") for hook in hooks)
    is_on_cpu = all(
        t.device.type == "cpu"
        for module in whole.modules.values()
        for t in (*module.parameters(), *module.buffers())
    )
    return (
        is_on_cpu
        and not hooked
        and {name: type(module) for name, module in whole.modules.items()} == whole.kinds
    )


@pytest.mark.parametrize(
    "room",
    sampled([0.0, 0.1, 0.6], [0.0, 0.6], "reference"),
    ids=["smallest", "a tenth more", "more"],
)
def test_the_image_is_the_plain_pipelines_in_the_planned_bytes(
    whole: TinyPipeline, room: float
) -> None:
    smallest = whole.smallest()
    problem = whole.within(
        int(
            smallest.budget_bytes + room * (whole.largest_with_activation() - smallest.budget_bytes)
        )
    )
    assert problem.budget_bytes < whole.largest_with_activation()
    plan = planned(problem)
    largest = max(problem.components, key=lambda c: c.weight_bytes()).name
    assert largest in streamed(plan)
    trace = whole.run(problem, plan)
    assert np.array_equal(pixels(trace.outputs["image"]), whole.image)
    simulated = simulate(problem, plan)
    assert all(m <= p.peak_bytes for m, p in zip(peaks(trace), simulated.slots, strict=True))
    assert trace.peak_bytes <= problem.effective_bytes
    assert trace.moved_bytes == pytest.approx(simulated.moved_bytes, rel=0.01)
    assert trace.left_bytes == whole.device.allocated_bytes == 0
    assert as_built(whole)


def test_with_room_for_all_nothing_streams_and_the_image_is_the_same(whole: TinyPipeline) -> None:
    plan = planned(whole.problem)
    assert np.array_equal(pixels(whole.run(whole.problem, plan).outputs["image"]), whole.image)


def test_tables_that_modules_keep_in_attributes_go_with_their_stage(whole: TinyPipeline) -> None:
    """Also where the module itself would keep them for its next call (AnyFlow's rotary
    frequencies)."""
    layer = next(whole.modules[name] for name in ("transformer", "unet") if name in whole.modules)
    hook = layer.register_forward_hook(
        lambda module, args, output: setattr(module, "table", torch.ones_like(output[0]))
    )
    problem = whole.within(4 * whole.largest_with_activation())
    try:
        trace = whole.run(problem, planned(problem))
    finally:
        hook.remove()
    assert trace.left_bytes == whole.device.allocated_bytes == 0
    assert not hasattr(layer, "table")


def test_a_second_run_has_the_same_peaks_and_actions(whole: TinyPipeline) -> None:
    problem = whole.smallest()
    plan = planned(problem)
    first, second = whole.run(problem, plan), whole.run(problem, plan)
    assert peaks(first) == peaks(second)
    events = [
        [(e.kind, e.component, e.slot, e.detail, e.nbytes) for e in trace.events]
        for trace in (first, second)
    ]
    assert events[0] == events[1]


def test_peaks_do_not_depend_on_when_garbage_is_collected(whole: TinyPipeline) -> None:
    problem = whole.smallest()
    plan = planned(problem)
    expected = peaks(whole.run(problem, plan))
    gc.disable()
    try:
        assert peaks(whole.run(problem, plan)) == expected
    finally:
        gc.enable()


class Faulty:
    """One denoising step of FLUX on a small picture, run again and again with one fault each; with
    ``parts`` of it alone."""

    def __init__(self, whole: TinyPipeline, parts: Sequence[str] = ()) -> None:
        self.whole, self.graph, self.precomputed = whole, whole.graph, dict[str, Any]()
        self.problem = whole.smallest()
        self.plan = planned(self.problem)
        if parts:
            self._leave_out([stage.name for stage in whole.graph.stages if stage.name not in parts])
        self.machine = self.whole.device.machine
        copies = self.machine.copies_in + self.machine.copies_out
        allocations = self.machine.allocations
        self.succeeds()
        self.copies = self.machine.copies_in + self.machine.copies_out - copies
        self.allocations = self.machine.allocations - allocations

    def _leave_out(self, stages: Sequence[str]) -> None:
        def keep(stage: str, outputs: Mapping[str, Any]) -> None:
            self.precomputed |= {
                f"{stage}.{name}": walk(value, lambda tensor: tensor.cpu())
                for name, value in outputs.items()
            }

        self.whole.run(self.problem, self.plan, after_stage=keep)
        self.graph = self.graph.with_precomputed(stages)
        self.precomputed = {
            str(reference)[1:]: self.precomputed[str(reference)[1:]]
            for reference in self.graph.precomputed
        }
        self.problem = without(
            self.problem, [stage.name for stage in self.graph.stages], stages, self.graph.digest
        )
        self.plan = planned(self.problem)
        modules = {
            component.name: self.whole.modules[component.name]
            for component in self.problem.components
        }
        self.whole.host = Host.of_graph(
            self.graph, apply_choices(self.problem, self.plan), self.whole.device, modules
        )

    def run(self) -> Trace:
        return self.whole.run(self.problem, self.plan, self.graph, precomputed=self.precomputed)

    def succeeds(self) -> None:
        assert np.array_equal(pixels(self.run().outputs["image"]), self.whole.image)

    def fails_clean(self, error: type[Exception]) -> None:
        with pytest.raises(error, match="injected fault"):
            self.run()
        assert self.whole.device.allocated_bytes == 0, self.whole.device.holders()
        assert as_built(self.whole)

    def sweep_copies(self, numbers: Iterable[int]) -> None:
        for n in numbers:
            self.machine.fail_copy = n
            self.fails_clean(TransferFailed)

    def sweep_allocations(self, numbers: Iterable[int]) -> None:
        for n in numbers:
            self.machine.fail_allocation = n
            self.fails_clean(OutOfMemory)


@pytest.fixture(scope="module")
def faulty() -> Faulty:
    case = Faulty(TinyPipeline("flux-tiny", ONE_STEP))
    gc.freeze()  # each failed run collects garbage, and the pipeline was imported only now
    return case


@pytest.mark.parametrize("step", sampled([5, 1], [5], "faults"))
def test_every_copy_of_a_run_may_fail(faulty: Faulty, step: int) -> None:
    """Every fifth in the small case."""
    assert faulty.copies > 30
    faulty.sweep_copies(range(1, faulty.copies + 1, step))
    faulty.succeeds()


def sweep_allocations_in(faulty: Faulty, module: nn.Module, step: int = 1) -> None:
    allocations = ranges_of(faulty.machine, {"": module}, faulty.run)[""]
    assert len(allocations) > 20
    faulty.sweep_allocations(allocations[::step])
    faulty.succeeds()


@pytest.mark.sweep("more")
def test_allocations_of_a_block_may_fail(faulty: Faulty) -> None:
    sweep_allocations_in(faulty, faulty.whole.modules["transformer"].transformer_blocks[1], step=7)


def test_allocations_of_the_encoder_may_fail(faulty: Faulty) -> None:
    sweep_allocations_in(faulty, faulty.whole.modules["text_encoder"], step=7)


@pytest.mark.sweep("faults")
def test_every_allocation_of_the_decoder_alone_may_fail() -> None:
    """Each in a run that gets the outputs of the stages before it as precomputed values."""
    decoder_run = Faulty(TinyPipeline("flux-tiny", ONE_STEP), ["decode"])
    sweep_allocations_in(decoder_run, decoder_run.whole.modules["vae"].decoder)


@pytest.mark.sweep("more")
def test_eight_other_allocations_may_fail(faulty: Faulty) -> None:
    faulty.sweep_allocations(random.Random(0).sample(range(1, faulty.allocations + 1), 8))
    faulty.succeeds()


@pytest.mark.sweep("faults")
@pytest.mark.parametrize("first", range(1, 21))
def test_every_allocation_of_a_run_may_fail(faulty: Faulty, first: int) -> None:
    """A twentieth of them in each test."""
    faulty.sweep_allocations(range(first, faulty.allocations + 1, 20))
    faulty.succeeds()

"""Guidance in parallel: a copy on a secondary device makes every other call of a denoiser. Outputs
are those of diffusers' pipeline; seconds and bytes are as planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_component import (
    ROWS,
    WIDTH,
    Small,
    device_of,
    in_layers,
    plan_of,
    small_hardware,
    small_problem,
    tensors,
    untouched,
    use,
)
from stored_component import host_of, in_backing_store, saved
from whole_pipelines import GRAPHS, pixels, plain_image

import graphrun
from graphrun.graph.graph import Graph
from graphrun.model.copies import with_copies
from graphrun.model.problem import Problem, Secondary
from graphrun.modules.build import build
from graphrun.modules.weight_reads import DeferredTensor
from graphrun.ops.stage_options import apply_option
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.executor import follow
from graphrun.runtime.host import Host
from graphrun.session import Session
from graphrun.solve import copying
from graphrun.verify.check import check
from graphrun.verify.solution import solution_of

SMALL = {"seed": 3, "steps": 3, "height": 64, "width": 64}
# graphs whose guidance calls the denoiser twice a step
GUIDED = ("wan-tiny", "chroma-tiny", "wan22-t2v-tiny", "hunyuan-video15-tiny")
# graphs whose guidance is one call with a batch of two
BATCHED = ("sdxl-tiny", "sd35-large-tiny")
# Code of this denoiser makes the host wait for a mask, so the second call is launched later.
WITH_WAITS = ("hunyuan-video15-tiny",)


ON, PASSED, STEPS = small_hardware(), ROWS * WIDTH * 4, 2
TEXT = """
    copy a device1
    slot s0/0:a@1+a load
      load a@1 all from pinned
      load a {loaded} from pinned
    slot s0/0:a@1+a first
      {stream}run
    slot s0/0:a@1+a steady x1
      {stream}run
    slot end
      evict a {loaded}
      evict a@1 all
"""
RESIDENT = TEXT.format(loaded="all", stream="")
STREAMED = TEXT.format(
    loaded="unblocked[0]", stream="stream a keep unblocked[0] ring buffer 200 KiB\n      "
)


def small_case() -> Problem:
    """A component that is called twice a step, on two equal devices."""
    calls = replace(use("a", 2 * STEPS, ON), transfer=(PASSED, PASSED), pairs=(1.0, 1.0))
    problem = small_problem({"a": Small()}, [[calls]], ON)
    (component,) = problem.components
    variant = component.variants[0]
    twin = replace(variant, device="device1", streamable=False)
    return replace(
        problem,
        components=(replace(component, variants=(variant, twin)),),
        secondaries=(Secondary(ON, 1 << 30),),
    )


def guided(modules: Mapping[str, Any], device: torch.device | None) -> dict[str, torch.Tensor]:
    """Two steps, each with two calls that do not need one another."""
    x = torch.linspace(-1, 1, ROWS * WIDTH, device="cpu").reshape(ROWS, WIDTH)
    x = x if device is None else x.to(device)
    for _ in range(STEPS):
        halved = x / 2
        first = modules["a"](x)
        second = modules["a"](halved)
        x = second + 3 * (first - second)
    return {"x": x.cpu()}


def chained(modules: Mapping[str, Any], device: torch.device | None) -> dict[str, torch.Tensor]:
    """The second call needs the first, which no plan with a copy expects."""
    x = torch.linspace(-1, 1, ROWS * WIDTH, device="cpu").reshape(ROWS, WIDTH)
    x = x if device is None else x.to(device)
    for _ in range(STEPS):
        x = x + modules["a"](modules["a"](x))
    return {"x": x.cpu()}


def assert_planned(trace: Any, reports: Any, *, waits: bool = False) -> None:
    """The slots of ``trace`` take at most the bytes of ``reports``, and calls on both devices the
    seconds. ``waits``: the denoiser makes the host wait."""
    for report, actual in trace.pairs_with(reports):
        assert actual.peak_bytes <= report.peak_bytes
        assert actual.secondary_peaks[0] <= report.secondary_peaks[0]
        seconds = actual.end_seconds - actual.start_seconds
        if "@1" in report.phase and waits:
            assert report.seconds <= seconds <= 1.5 * report.seconds
        elif "@1" in report.phase:
            # on sim, tensors of the pipeline's own code take time too
            assert seconds == pytest.approx(report.seconds, rel=0.05, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "code"), [(RESIDENT, guided), (STREAMED, guided), (RESIDENT, chained)]
)
def test_a_small_component_and_its_copy(
    text: str, code: Callable[[Mapping[str, Any], torch.device | None], dict[str, torch.Tensor]]
) -> None:
    problem, modules = small_case(), {"a": Small()}
    plan = plan_of(problem, f"variant a float32 pinned device{text}")
    assert check(problem, plan) == ()
    with torch.no_grad():
        expected = code(modules, None)["x"]
    device = device_of(problem)
    solution = solution_of(problem, plan)
    host = Host(modules, solution.chosen, device)
    trace = follow(
        solution, host, device, lambda: code(host.modules, device.torch_device), checked=True
    )
    assert torch.equal(trace.outputs["x"], expected)
    for report, actual in list(trace.pairs_with(solution.simulation.slots))[1:3]:
        seconds = actual.end_seconds - actual.start_seconds
        if code is guided:
            # the output is copied to the host in the last slot
            assert seconds == pytest.approx(report.seconds, rel=0.01, abs=1.1 * PASSED / 1e9)
        else:
            assert seconds > 1.5 * report.seconds, "the calls are not at once"
        assert actual.peak_bytes <= report.peak_bytes
        assert actual.secondary_peaks[0] <= report.secondary_peaks[0]
    runs = [event for event in trace.events if event.kind == "run"]
    assert [event.component for event in runs] == ["a@1", "a"] * STEPS
    if code is guided:
        for first, second in zip(runs[::2], runs[1::2], strict=True):
            assert second.start_seconds < first.end_seconds, "both compute at once"
    assert [accelerator.allocated_bytes for accelerator in device.all_devices] == [0, 0]
    assert untouched(modules["a"])


def test_a_copy_has_no_weights_and_stays_loaded_until_its_original_is_laid_out_again() -> None:
    problem, module = small_case(), Small()
    module.head.requires_grad_(True)
    plan = plan_of(problem, f"variant a float32 pinned device{RESIDENT}")
    problem = solution_of(problem, plan).chosen
    host = Host({"a": module}, problem, device_of(problem))
    held_attributes = len(host.held_attributes)
    host.match_layout(problem)
    copy, residency = host.copies["a@1"], host.residencies["a@1"]
    assert all(tensor.is_meta for tensor in tensors(copy))
    assert [parameter.requires_grad for parameter in copy.parameters()] == [
        parameter.requires_grad for parameter in module.parameters()
    ]
    assert len(host.held_attributes) == 2 * held_attributes > 0
    host.match_layout(problem)
    assert host.residencies["a@1"] is residency
    host.match_layout(replace(problem, components=(in_layers(problem.component("a")),)))
    host.match_layout(problem)
    assert host.residencies["a@1"].backing_store is host.residencies["a"].backing_store
    assert host.residencies["a@1"] is not residency


def test_a_copy_is_loaded_from_the_backing_store_that_the_plan_reads(tmp_path: Path) -> None:
    problem = small_case()
    component = in_backing_store("pinned", "a", ON)
    twin = replace(component.variants[0], device="device1", streamable=False)
    problem = replace(
        problem, components=(replace(component, variants=(*component.variants, twin)),)
    )
    text = RESIDENT.replace("      load a@1", "      read a\n      load a@1", 1)
    plan = plan_of(problem, f"variant a float32 pinned device{text}")
    assert check(problem, plan) == ()
    with torch.no_grad():
        expected = guided({"a": Small()}, None)["x"]
    device, solution = device_of(problem), solution_of(problem, plan)
    host = host_of(problem=solution.chosen, folders={"a": saved(tmp_path)}, device=device)
    for _ in range(2):
        trace = follow(solution, host, device, lambda: guided(host.modules, device.torch_device))
        assert torch.equal(trace.outputs["x"], expected)
        (report, load), *_ = trace.pairs_with(solution.simulation.slots)
        assert load.end_seconds - load.start_seconds == pytest.approx(report.seconds, rel=0.01)
        assert load.host_bytes <= report.host_bytes
    assert device.all_devices[1].allocated_bytes == 0


OUTPUTS = ("image", "images", "video", "frames")


def output(outputs: Any) -> Any:
    return pixels(next(outputs[name] for name in OUTPUTS if name in outputs))


def small_inputs(graph: Graph) -> dict[str, int]:
    """Of some graphs, a prediction of a smaller picture is as small as a time step."""
    names = SMALL if graph.name == "wan-tiny" else ("seed", "steps")
    return {name: SMALL[name] for name in names}


@pytest.mark.sweep("more")
@pytest.mark.parametrize("name", GUIDED)
def test_a_copy_computes_every_other_call_at_the_same_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "CLEARLY", 0.0)  # a copy gains little where all is tiny
    graph = graphrun.load(GRAPHS / f"{name}.yaml")
    inputs = small_inputs(graph)
    modules = {key: build(component, graph) for key, component in graph.components.items()}
    expected = pixels(plain_image(graph, modules, graph.resolve(inputs)))
    options = {"inputs": inputs, "vram": "1G,1G", "ram": "8G", "hardware": "sim", "runs": 3}
    device = open_device(graphrun.estimate(graph, **options), check_ordering=True)
    # modules are passed in, and built on meta
    for arguments in ({"modules": modules}, {}):
        with Session(graph, device=device, **arguments, **options) as session:
            solution = session.solution
            assert solution.plan.copies
            for reports in (solution.simulation.slots, solution.simulation.further_slots):
                trace = session.run()
                assert np.array_equal(output(trace.outputs), expected)
                assert_planned(trace, reports, waits=name in WITH_WAITS)
        assert [accelerator.allocated_bytes for accelerator in device.all_devices] == [0, 0]


@pytest.mark.sweep("more")
@pytest.mark.parametrize("name", BATCHED)
def test_a_copy_computes_the_first_sample_of_a_batch_of_two(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "CLEARLY", 0.0)
    graph = graphrun.load(GRAPHS / f"{name}.yaml")
    stages = (
        replace(stage, options=("split",)) if stage.op == "denoise" else stage
        for stage in graph.stages
    )
    graph = replace(graph, stages=tuple(stages))
    inputs = {"steps": 3}
    modules = {key: build(component, graph) for key, component in graph.components.items()}
    denoisers = {key: modules[key] for key in graph.stage("denoise").uses}
    # diffusers' pipeline, whose denoiser gets one sample at a time
    with apply_option("split", None, denoisers, torch.device("cpu")):
        expected = pixels(plain_image(graph, modules, graph.resolve(inputs)))
    options: dict[str, Any] = {"inputs": inputs, "vram": "1G,1G", "ram": "8G", "hardware": "sim"}
    options["runs"] = 3
    problem = graphrun.estimate(graph, **options)
    assert graphrun.plan(problem).plan.copies == ()  # split is not allowed
    device = open_device(problem, check_ordering=True)
    with Session(graph, device=device, modules=modules, allow=["split"], **options) as session:
        solution = session.solution
        assert solution.plan.copies
        assert dict(solution.plan.options) == {"denoise": "split"}
        for reports in (solution.simulation.slots, solution.simulation.further_slots):
            trace = session.run()
            assert np.array_equal(output(trace.outputs), expected)
            assert_planned(trace, reports)
    assert [accelerator.allocated_bytes for accelerator in device.all_devices] == [0, 0]


@pytest.mark.sweep("more")
def test_what_the_main_device_streams_and_a_failed_allocation_beside_a_copy() -> None:
    graph = graphrun.load(GRAPHS / "wan-tiny.yaml")
    modules = {key: build(component, graph) for key, component in graph.components.items()}
    expected = pixels(plain_image(graph, modules, graph.resolve(SMALL)))
    options: dict[str, Any] = {"inputs": SMALL, "vram": "7M,64M", "ram": "8G", "hardware": "sim"}
    device = open_device(graphrun.estimate(graph, **options), check_ordering=True)
    for fault in (None, 12, None):
        device.secondaries[0].machine.fail_allocation = fault
        with Session(graph, device=device, modules=modules, **options) as session:
            slots = session.solution.simulation.slots
            assert session.solution.plan.copies == (("transformer", 1),)
            assert any(slot.streamed_bytes for slot in slots if "transformer" in slot.phase)
            trace = session.run()
            assert np.array_equal(output(trace.outputs), expected)
            # a run whose allocation failed has planned its remaining stages again
            assert device.secondaries[0].machine.fail_allocation is None
            if fault is None:
                assert trace.moved_bytes == pytest.approx(
                    sum(slot.loaded_bytes + slot.streamed_bytes for slot in slots), rel=0.01
                )
        assert [accelerator.allocated_bytes for accelerator in device.all_devices] == [0, 0]
        assert all(
            tensor.device.type == "cpu"
            for module in modules.values()
            for tensor in module.state_dict().values()
        )


def test_a_deferred_tensor_is_copied_once_and_not_by_reading_a_part_of_it() -> None:
    source, copies = torch.arange(6.0).reshape(2, 3), list[torch.Tensor]()

    def copy() -> torch.Tensor:
        copies.append(source.clone())
        return copies[-1]

    tensor = DeferredTensor.of(source, torch.device("cpu"), copy)
    part = tensor[:, :2]
    assert (part.shape, part.dtype, part.device) == ((2, 2), source.dtype, source.device)
    assert tensor.shape == (2, 3)
    assert not copies
    assert torch.equal(part + 1, source[:, :2] + 1)
    assert torch.equal(tensor - tensor[0], source - source[0])
    assert torch.equal(tensor[torch.tensor([True, False])], source[:1])
    assert len(copies) == 1


@pytest.mark.sweep("more")
def test_a_copy_needs_room_on_the_second_device() -> None:
    graph = graphrun.load(GRAPHS / "wan-tiny.yaml")
    options: dict[str, Any] = {"inputs": SMALL, "ram": "8G", "hardware": "sim"}
    problem = graphrun.estimate(graph, vram="64M,2M", **options)
    assert isinstance(problem.secondaries[0], Secondary)
    assert [bool(u.pairs) for phase in problem.phases for u in phase.uses] == [False, True, False]
    assert with_copies(problem, [("transformer", 1)]).component("transformer@1").copy_of
    assert graphrun.plan(problem).plan.copies == ()

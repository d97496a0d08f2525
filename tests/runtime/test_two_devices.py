"""Pipelines whose components lie on several devices: the plain pipeline's image, caps and time as
planned, nothing left."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from campaign import sampled
from whole_pipelines import GRAPHS, TinyPipeline, pixels, plain_image

import graphrun
from graphrun.errors import OutOfMemory, TransferFailed
from graphrun.graph.graph import Graph
from graphrun.model.allocator import LARGE_PAGE_BYTES
from graphrun.model.choices import apply_choices
from graphrun.model.problem import ComponentNumbers, Problem
from graphrun.model.splits import secondaries_for, transfers
from graphrun.modules.build import build
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.host import Host
from graphrun.runtime.recovery import execute
from graphrun.session import Session
from graphrun.trace import Trace

SMALL = {"seed": 3, "steps": 2, "height": 64, "width": 64}
PIPELINES = ("flux-tiny", "wan-tiny", "sdxl-tiny", "hidream-tiny")
# Pipelines with the budgets of the devices, as shares of the transformer's weights.
SPLITS = (
    ("flux-tiny", (0.75, 0.6)),
    ("flux-tiny", (0.6, 0.45, 0.4)),
    ("wan-tiny", (0.75, 0.6)),
    ("wan-tiny", (0.6, 0.3, 0.3)),
    ("sdxl-tiny", (0.75, 0.6)),
    ("sdxl-tiny", (0.68, 0.32, 0.32)),
    ("hidream-tiny", (0.6, 0.6)),
    ("hidream-tiny", (0.4, 0.5, 0.5)),
)


def budgets(graph: Graph, secondaries: int) -> tuple[list[int], str]:
    """For the largest component with its own phases, and for a share of all others on each
    secondary device, so that no single device holds the pipeline; and the largest component's
    name."""
    problem = graphrun.estimate(graph, vram="1G", ram="8G", hardware="sim", inputs=SMALL)
    *other_components, largest = sorted(
        problem.components, key=lambda component: component.weight_bytes()
    )
    largest_bytes, rest_bytes = list[int](), list[int]()
    for phase in problem.phases:
        group_bytes = (
            largest_bytes if largest.name in {use.component for use in phase.uses} else rest_bytes
        )
        group_bytes.append(max(phase.first_bytes, phase.steady_bytes) + phase.input_bytes)
    pipeline_code = max(phase.pipeline_code_bytes + phase.input_bytes for phase in problem.phases)
    first = (
        largest.weight_bytes()
        + max(*largest_bytes, pipeline_code)
        + sum(value.nbytes for value in problem.values)
    )
    shared = sum(component.weight_bytes() for component in other_components)
    budget_bytes = [first, *[shared // secondaries + max(rest_bytes)] * secondaries]
    assert max(budget_bytes) < largest.weight_bytes() + shared + max(*largest_bytes, *rest_bytes)
    return budget_bytes, largest.name


@pytest.mark.long
@pytest.mark.parametrize("secondaries", sampled((1, 2), (1,), "secondaries"))
@pytest.mark.parametrize("name", sampled(PIPELINES, PIPELINES[:1], "secondaries"))
def test_a_session_keeps_what_no_single_device_holds(name: str, secondaries: int) -> None:
    graph = graphrun.load(GRAPHS / f"{name}.yaml")
    modules = {key: build(component, graph) for key, component in graph.components.items()}
    image = pixels(plain_image(graph, modules, graph.resolve(SMALL)))
    vram, largest = budgets(graph, secondaries)
    options = {
        "inputs": SMALL,
        "vram": vram,
        "ram": "8G",
        "hardware": "sim",
        "runs": 5,
        "keep": [largest],
    }
    device = open_device(graphrun.estimate(graph, **options), check_ordering=True)
    with Session(graph, modules=modules, device=device, **options) as session:
        solution = session.solution
        secondary_numbers = {
            component.variants[0].secondary for component in solution.chosen.components
        }
        assert (secondary_numbers | {secondary for _, secondary, _ in solution.plan.splits}) - {0}
        moved_bytes = list[int]()
        for reports, seconds in (
            (solution.simulation.slots, solution.simulation.seconds),
            (solution.simulation.further_slots, solution.simulation.further_seconds),
        ):
            trace = session.run()
            assert np.array_equal(
                pixels(trace.outputs["image" if "image" in trace.outputs else "video"]), image
            )
            assert trace.moved_bytes == pytest.approx(
                sum(slot.loaded_bytes + slot.streamed_bytes for slot in reports), rel=0.01
            )
            decoding = [
                slot
                for slot in trace.slots
                if name == "wan-tiny" and slot.phase.startswith("decode")
            ]
            # on one device it is off by as much
            odd = sum(slot.end_seconds - slot.start_seconds for slot in decoding)
            odd -= sum(
                slot.seconds for slot in reports if decoding and slot.phase.startswith("decode")
            )
            assert trace.seconds - odd == pytest.approx(seconds, rel=0.03)
            moved_bytes.append(trace.moved_bytes)
            for report, actual in trace.pairs_with(reports):
                assert actual.peak_bytes <= report.peak_bytes <= solution.problem.effective_bytes
                for peak, peak_limit, secondary in zip(
                    actual.secondary_peaks,
                    report.secondary_peaks,
                    solution.problem.secondaries,
                    strict=True,
                ):
                    assert peak <= peak_limit <= secondary.effective_bytes
        assert (
            moved_bytes[0] - moved_bytes[1] >= solution.chosen.component(largest).weight_bytes()
        ), "it stays"
    assert [accelerator.allocated_bytes for accelerator in device.all_devices] == [0] * (
        secondaries + 1
    )


@pytest.mark.long
@pytest.mark.parametrize("case", sampled(SPLITS, SPLITS[:1], "secondaries"), ids=str)
def test_a_transformer_that_no_device_holds_is_split_and_not_streamed(
    case: tuple[str, tuple[float, ...]],
) -> None:
    name, shares = case
    graph = graphrun.load(GRAPHS / f"{name}.yaml")
    modules = {key: build(component, graph) for key, component in graph.components.items()}
    image = pixels(plain_image(graph, modules, graph.resolve(SMALL)))
    whole = graphrun.estimate(graph, vram="1G", ram="8G", hardware="sim", inputs=SMALL)
    largest = max(whole.components, key=lambda component: component.weight_bytes())
    vram = [
        int(share * largest.weight_bytes()) + activation_bytes
        for share, activation_bytes in zip(shares, working(whole, largest, shares), strict=True)
    ]
    assert max(vram) < largest.weight_bytes() + max(working(whole, largest, shares))
    # with less on the second of them, what one holds might be streamed as fast; the VAE of wan-tiny
    # needs the main device
    keep = [] if name == "wan-tiny" or (name, len(vram)) == ("flux-tiny", 2) else [largest.name]
    options = {
        "inputs": SMALL,
        "vram": vram,
        "ram": "8G",
        "hardware": "sim",
        "runs": 100,
        "keep": keep,
    }
    device = open_device(graphrun.estimate(graph, **options), check_ordering=True)
    with Session(graph, modules=modules, device=device, **options) as session:
        solution = session.solution
        assert [split[:2] for split in solution.plan.splits] == [
            (largest.name, n) for n in range(1, len(shares))
        ]
        session.run()
        previous_bytes = [accelerator.machine.bytes_across for accelerator in device.all_devices]
        trace, reports = session.run(), solution.simulation.further_slots
        assert np.array_equal(
            pixels(trace.outputs["image" if "image" in trace.outputs else "video"]), image
        )
        for report, actual in trace.pairs_with(reports):
            assert actual.peak_bytes <= report.peak_bytes <= solution.problem.effective_bytes
            for peak, peak_limit, secondary in zip(
                actual.secondary_peaks,
                report.secondary_peaks,
                solution.problem.secondaries,
                strict=True,
            ):
                assert peak <= peak_limit <= secondary.effective_bytes
            if largest.name in report.phase:
                assert actual.end_seconds - actual.start_seconds == pytest.approx(
                    report.seconds, rel=3e-3, abs=1e-6
                )
        assert [
            accelerator.machine.bytes_across - previous
            for accelerator, previous in zip(device.all_devices, previous_bytes, strict=True)
        ] == crossed(solution.chosen)
        assert trace.moved_bytes == pytest.approx(
            sum(slot.loaded_bytes + slot.streamed_bytes for slot in reports), rel=0.01
        )
        denoise = next(
            slot
            for slot in reports
            if slot.phase == f"denoise/0:{largest.name}" and slot.part == "steady"
        )
        assert denoise.streamed_bytes == 0
    assert not any(accelerator.allocated_bytes for accelerator in device.all_devices)


def working(problem: Problem, largest: ComponentNumbers, shares: Sequence[float]) -> list[int]:
    """Bytes for the main device, and for secondary devices, beside shares of the weights of
    ``largest``: none, except where phases have more activation than it has weights. Secondary
    devices have room for that of its own."""
    nbytes = [
        max(phase.first_bytes, phase.steady_bytes) + phase.input_bytes + problem.value_bytes(n)
        for n, phase in enumerate(problem.phases)
    ]
    largest_bytes = [
        phase_bytes
        for phase_bytes, phase in zip(nbytes, problem.phases, strict=True)
        if largest.name in {use.component for use in phase.uses}
    ]
    return (
        [max(nbytes), *[max(largest_bytes)] * (len(shares) - 1)]
        if max(nbytes) > largest.weight_bytes()
        else [0] * len(shares)
    )


def crossed(problem: Problem) -> list[int]:
    """Bytes that cross from the device and from each secondary device in one run, by the tensors
    that pass between blocks and other code."""
    device_bytes = [0] * (1 + len(problem.secondaries))
    for use in (use for phase in problem.phases for use in phase.uses):
        component = problem.component(use.component)
        byte_counts = [
            (transfer.secondary, sum(transfer.to_bytes), sum(transfer.back_bytes))
            for transfer in transfers(use, component).values()
        ]
        if component.variants[0].secondary:
            byte_counts = [(component.variants[0].secondary, *use.transfer)]
        for secondary, to_bytes, back_bytes in byte_counts:
            device_bytes[0] += use.calls * to_bytes
            device_bytes[secondary] += use.calls * back_bytes
    return device_bytes


class Faulty:
    """One denoising step of a pipeline on a small picture over two devices, of which neither holds
    the largest component; run again and again with one fault each."""

    def __init__(self, name: str) -> None:
        self.whole = TinyPipeline(name, {"steps": 1, "height": 32, "width": 32})
        largest = max(self.whole.problem.components, key=lambda component: component.weight_bytes())
        vram = [largest.weight_bytes() * 3 // 4, largest.weight_bytes() * 3 // 5]
        options = {
            "inputs": self.whole.inputs,
            "vram": vram,
            "ram": "8G",
            "hardware": "sim",
            "keep": [largest.name],
        }
        self.problem = graphrun.estimate(self.whole.graph, **options)
        solution = graphrun.plan(self.problem)
        self.plan = solution.plan
        assert self.plan.splits
        self.whole.device = self.device = open_device(self.problem)
        self.whole.host = Host.of_graph(
            self.whole.graph, solution.chosen, self.device, self.whole.modules
        )
        previous_counts = [
            accelerator.machine.allocations for accelerator in self.device.all_devices
        ]
        self.succeeds()
        self.allocations = [
            accelerator.machine.allocations - previous
            for accelerator, previous in zip(self.device.all_devices, previous_counts, strict=True)
        ]
        gc.freeze()  # each failed run collects garbage, and the pipeline was imported only now

    def run(self) -> Trace:
        return self.whole.run(self.problem, self.plan)

    def succeeds(self) -> None:
        assert np.array_equal(pixels(self.run().outputs["image"]), self.whole.image)

    def fails_clean(self, number: int, fault: str, operation: int) -> bool:
        """Whether the run had so many allocations or copies on the device ``number`` that one
        failed. Nothing is left then."""
        setattr(self.device.all_devices[number].machine, fault, operation)
        failure = None
        try:
            self.run()
        except (OutOfMemory, TransferFailed) as error:
            failure = str(error), getattr(error, "secondary", number)
        if failure is None:
            return False
        assert "injected fault" in failure[0]
        assert failure[1] == number
        assert [accelerator.allocated_bytes for accelerator in self.device.all_devices] == [0, 0]
        assert all(
            tensor.device.type == "cpu"
            for module in self.whole.modules.values()
            for tensor in module.state_dict().values()
        )
        return True


@pytest.fixture(scope="module")
def faulty() -> Faulty:
    return Faulty("flux-tiny")


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    "series", sampled([(1, 150), *((n, 10) for n in range(1, 11))], [(1, 150)], "faults"), ids=str
)
def test_every_allocation_on_either_device_may_fail(
    faulty: Faulty, series: tuple[int, int], number: int
) -> None:
    """A tenth of them in each test."""
    first, step = series
    assert faulty.allocations[number] > 400
    for operation in range(first, faulty.allocations[number] + 1, step):
        assert faulty.fails_clean(number, "fail_allocation", operation)
    faulty.succeeds()


@pytest.mark.sweep("faults")
@pytest.mark.parametrize("name", ["flux-tiny", "sdxl-tiny"])
@pytest.mark.parametrize("number", [0, 1])
def test_every_copy_to_or_from_either_device_may_fail(
    name: str, number: int, faulty: Faulty
) -> None:
    """Also those from one to the other, which both count."""
    case = faulty if name == "flux-tiny" else Faulty(name)
    machine = case.device.all_devices[number].machine
    previous_copies = machine.copies_in + machine.copies_out
    case.succeeds()
    copies = machine.copies_in + machine.copies_out - previous_copies
    assert copies
    operation, applied = 1, apply_choices(case.problem, case.plan)
    while case.fails_clean(number, "fail_copy", operation):
        operation += 1
    machine.fail_copy = None
    uses = [use for phase in applied.phases for use in phase.uses]
    split = [
        hop for use in uses for hop in transfers(use, applied.component(use.component)).values()
    ]
    assert (
        operation > copies + sum(len(hop.to_bytes) + len(hop.back_bytes) for hop in split) > copies
    )
    case.succeeds()


def test_an_encoder_that_returns_what_every_block_does_is_not_split() -> None:
    problem = graphrun.estimate(
        graphrun.load(GRAPHS / "sdxl-tiny.yaml"), vram="1G,1G", hardware="sim", until="encode"
    )
    assert [secondaries_for(problem, component) for component in problem.components] == [(), ()]


@pytest.fixture(scope="module")
def flux() -> tuple[Graph, Problem]:
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    return graph, graphrun.estimate(
        graph, vram=budgets(graph, 1)[0], ram="8G", hardware="sim", inputs=SMALL
    )


def encoders_on_secondary(problem: Problem) -> tuple[Problem, list[str]]:
    """Return ``problem`` with room, where encoders may be on the secondary device and the plan has
    some of them, and their names."""
    roomy_problem = replace(problem, budget_bytes=problem.budget_bytes * 2)
    for name in ("text_encoder", "text_encoder_2"):
        secondary_variants = tuple(v for v in roomy_problem.component(name).variants if v.secondary)
        components = (
            replace(component, variants=(*secondary_variants, component.variants[0]))
            if component.name == name
            else component
            for component in roomy_problem.components
        )
        roomy_problem = replace(roomy_problem, components=tuple(components))
    secondary_components = [
        component.name
        for component in graphrun.plan(roomy_problem).chosen.components
        if component.variants[0].secondary
    ]
    assert secondary_components, "nothing is on the secondary device"
    return roomy_problem, secondary_components


@pytest.mark.sweep("secondaries")
def test_memory_that_vanishes_on_a_secondary_has_the_remaining_stages_planned_again(
    flux: tuple[Graph, Problem],
) -> None:
    graph, problem = flux
    roomy_problem, secondary_components = encoders_on_secondary(problem)
    modules = {key: build(component, graph) for key, component in graph.components.items()}
    solution = graphrun.plan(roomy_problem)
    device, messages = open_device(roomy_problem), list[str]()
    expected = pixels(plain_image(graph, modules, graph.resolve(SMALL)))

    def lose(*_: object) -> None:
        device.secondaries[0].machine.capacity_bytes = 1024

    hook = modules[secondary_components[0]].register_forward_pre_hook(lose)
    trace = execute(solution, graph, graph.resolve(SMALL), device, modules, tell=messages.append)
    hook.remove()
    assert np.array_equal(pixels(trace.outputs["image"]), expected)
    assert len(messages) == 1
    assert "sim:1 has a capacity of 1.00 KiB" in messages[0]
    assert [accelerator.allocated_bytes for accelerator in device.all_devices] == [0, 0]


@pytest.mark.sweep("secondaries")
def test_a_secondary_that_other_tensors_fill_is_planned_around(
    flux: tuple[Graph, Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, problem = flux
    roomy_problem, _ = encoders_on_secondary(problem)
    modules = {key: build(component, graph) for key, component in graph.components.items()}
    device, messages = open_device(roomy_problem), list[str]()
    full = device.secondaries[0]
    other_bytes = property(lambda self: self.available_bytes + 4096 if self is full else 0)
    monkeypatch.setattr(type(full), "foreign_bytes", other_bytes)
    values = graph.resolve(SMALL)
    solution = graphrun.plan(roomy_problem)
    trace = execute(solution, graph, values, device, modules, tell=messages.append)
    expected = pixels(plain_image(graph, modules, values))
    assert np.array_equal(pixels(trace.outputs["image"]), expected)
    assert len(messages) == 1
    assert "before encode, 4.00 KiB too much is in use on sim:1, and nothing is" in messages[0]


@pytest.mark.sweep("secondaries")
def test_a_secondary_that_no_remaining_stage_needs_may_be_full(
    flux: tuple[Graph, Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, problem = flux
    problem = replace(problem, budget_bytes=problem.budget_bytes * 8)
    first_variants = (replace(c, variants=c.variants[:1], layers=None) for c in problem.components)
    problem = replace(problem, components=tuple(first_variants))
    modules = {key: build(component, graph) for key, component in graph.components.items()}
    device, messages = open_device(problem), list[str]()
    full = device.secondaries[0]
    other_bytes = property(lambda self: self.available_bytes + 4096 if self is full else 0)
    monkeypatch.setattr(type(full), "foreign_bytes", other_bytes)
    execute(
        graphrun.plan(problem), graph, graph.resolve(SMALL), device, modules, tell=messages.append
    )
    assert not messages


@pytest.mark.sweep("secondaries")
def test_a_split_component_is_planned_again_with_less_on_the_secondary(
    flux: tuple[Graph, Problem],
) -> None:
    graph, _ = flux
    nbytes = (
        graphrun.estimate(graph, vram="1G", ram="8G", hardware="sim", inputs=SMALL)
        .component("transformer")
        .weight_bytes()
    )
    vram = [f"{nbytes // 2}B", f"{nbytes}B"]
    problem = graphrun.estimate(graph, vram=vram, ram="8G", hardware="sim", inputs=SMALL)
    modules = {key: build(component, graph) for key, component in graph.components.items()}
    solution = graphrun.plan(problem)
    ((name, _, blocks),) = solution.plan.splits
    device, messages = open_device(problem), list[str]()
    expected = pixels(plain_image(graph, modules, graph.resolve(SMALL)))

    def lose(*_: object) -> None:
        device.secondaries[0].machine.capacity_bytes = nbytes // 4

    assert blocks
    group = next(
        candidate for candidate in problem.component(name).groups if candidate.name == blocks[0][0]
    )
    hook = (
        modules[name].get_submodule(group.blocks[blocks[0][1][0]]).register_forward_pre_hook(lose)
    )
    trace = execute(solution, graph, graph.resolve(SMALL), device, modules, tell=messages.append)
    hook.remove()
    assert np.array_equal(pixels(trace.outputs["image"]), expected)
    assert "sim:1 has a capacity of" in messages[0]
    assert [accelerator.allocated_bytes for accelerator in device.all_devices] == [0, 0]


@pytest.mark.sweep("secondaries")
def test_a_secondary_reserves_the_pages_that_were_planned(flux: tuple[Graph, Problem]) -> None:
    graph, _ = flux
    problem = graphrun.estimate(
        graph, vram=budgets(graph, 1)[0], ram="8G", hardware="sim:pages=0.0005", inputs=SMALL
    )
    solution = graphrun.plan(
        replace(
            problem,
            components=tuple(
                _on_secondary(problem, component.name) for component in problem.components
            ),
        )
    )
    trace = graphrun.run(solution, graph, SMALL)
    pages = 2 * int(LARGE_PAGE_BYTES * problem.hardware.page_scale)
    for report, actual in trace.pairs_with(solution.simulation.slots):
        assert actual.secondary_peaks[0] <= report.secondary_peaks[0] + pages
        assert report.secondary_peaks[0] <= problem.secondaries[0].effective_bytes
    assert any(slot.secondary_pages[0] for slot in solution.simulation.slots)


@pytest.mark.sweep("more")
def test_a_plan_for_two_devices_runs_from_the_graph_alone_without_races(
    flux: tuple[Graph, Problem],
) -> None:
    graph, problem = flux
    solution = graphrun.plan(
        replace(
            problem,
            components=tuple(
                _on_secondary(problem, component.name) for component in problem.components
            ),
        )
    )
    assert solution.chosen.component("vae").variants[0].name == "bfloat16 pinned device1"
    trace = graphrun.run(solution, graph, SMALL, check_ordering=True)
    assert not trace.overruns
    assert trace.to_json()["slots"][0]["secondary_peaks"]


def _on_secondary(problem: Problem, name: str) -> ComponentNumbers:
    """The component called ``name``; the VAE only as it may be on the secondary device."""
    component = problem.component(name)
    return (
        replace(
            component, variants=tuple(v for v in component.variants if v.secondary), layers=None
        )
        if name == "vae"
        else component
    )

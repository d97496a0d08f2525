"""S0: only the prompt is encoded (HiDream's four encoders). What stays loaded, peaks of a second
run, order of evictions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scenario_graphs import GRAPHS, Encoding, Pages, encode, equal, nbytes, offloaded
from small_component import Small, small_hardware, small_problem, use
from whole_pipelines import TinyPipeline, pixels

from graphrun import sim
from graphrun.graph.loading import load
from graphrun.model.plan import Evict, Load, Plan
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.runtime.executor import follow, stages_for
from graphrun.runtime.host import Host
from graphrun.solve.solve import solve
from graphrun.verify.simulate import simulate
from graphrun.verify.solution import solution_of


@pytest.fixture(scope="module")
def hidream() -> Encoding:
    return Encoding(load(GRAPHS / "hidream-encode-tiny.yaml"))


def loads(plan: Plan) -> dict[str, int]:
    """How often a component is loaded whole or in part, one per block named."""
    load_counts: dict[str, int] = {}
    for action in (a for slot in plan.slots for a in slot.actions if isinstance(a, Load)):
        load_counts[action.component] = load_counts.get(action.component, 0) + sum(
            len(indices) for _, indices in action.blocks or ()
        )
    return load_counts


def evictions_before_a_use(problem: object, plan: Plan) -> list[str]:
    """Components evicted in a slot although a later phase uses them."""
    names = [phase.name for phase in problem.phases]  # type: ignore[attr-defined]
    uses = {p.name: {u.component for u in p.uses} for p in problem.phases}  # type: ignore[attr-defined]
    evictions = []
    for slot in plan.slots:
        later_names = names[names.index(slot.phase) :] if slot.phase in names else []
        evictions += [
            a.component
            for a in slot.actions
            if isinstance(a, Evict) and any(a.component in uses[name] for name in later_names)
        ]
    return evictions


def test_s0_1_encoding_alone_ends_at_the_baseline_with_valid_outputs(hidream: Encoding) -> None:
    problem = hidream.smallest()
    trace = hidream.run(problem, solve(problem).plan)
    assert equal(trace.outputs["embeds"], hidream.plain)
    assert trace.left_bytes == hidream.device.allocated_bytes == 0


def test_s0_1_under_diffusers_offloading_llama_stays_on_the_device(hidream: Encoding) -> None:
    pipeline = hidream.pipeline(torch.device("cpu"))
    llama_bytes = sum(t.nbytes for t in pipeline.text_encoder_4.parameters())
    with offloaded(pipeline) as machine:
        outputs = encode(pipeline, hidream.inputs)
        assert all(torch.equal(a, b) for a, b in zip(outputs, hidream.plain, strict=True))
        del outputs
        assert llama_bytes <= machine.allocated_bytes < 1.2 * llama_bytes, "and it alone"


def test_s0_2_encoding_twice_has_the_peak_of_encoding_once(hidream: Encoding) -> None:
    problem = hidream.within(hidream.ample.component("text_encoder_4").weight_bytes() * 2)
    plan = solve(problem).plan
    first, second = hidream.run(problem, plan), hidream.run(problem, plan)
    assert [slot.peak_bytes for slot in first.slots] == [slot.peak_bytes for slot in second.slots]


def test_s0_2_under_diffusers_offloading_the_second_time_holds_two_encoders(
    hidream: Encoding,
) -> None:
    pipeline = hidream.pipeline(torch.device("cpu"))
    peaks = []
    with offloaded(pipeline) as machine:
        for _ in range(2):
            machine.reset_peak()
            encode(pipeline, hidream.inputs)
            peaks.append(machine.peak_bytes)
    assert peaks[1] > 1.2 * peaks[0]


def test_s0_2_guidance_peaks_at_the_largest_encoder_and_not_at_two(hidream: Encoding) -> None:
    problem = hidream.ample
    heaviest = max(
        sum(problem.component(use.component).weight_bytes() for use in phase.uses)
        + phase.input_bytes
        + problem.value_bytes(number)
        + max(phase.first_bytes, phase.steady_bytes)
        for number, phase in enumerate(problem.phases)
    )
    tight_problem = hidream.within(heaviest)
    trace = hidream.run(tight_problem, solve(tight_problem).plan)
    assert trace.peak_bytes <= heaviest
    assert all(phase.steady_calls == 1 for phase in problem.phases), (
        "each encoder is entered for the prompt and for its negative"
    )


def refiner(room: float) -> tuple[object, Plan]:
    """te, vae.encode, unet, vae.decode: the VAE's true next use comes after the UNet."""
    modules = {"te": Small(), "vae": Small(1), "unet": Small(2)}
    hardware = small_hardware(h2d=1e9, flops=1e9)
    uses = [
        [use("te", 1, hardware)],
        [use("vae", 1, hardware)],
        [use("unet", 20, hardware)],
        [use("vae", 1, hardware)],
    ]
    whole = small_problem(modules, uses, hardware)
    weight_bytes = whole.components[0].weight_bytes()
    problem = small_problem(
        modules,
        uses,
        hardware,
        int(room * weight_bytes) + whole.phases[0].first_bytes + whole.phases[0].input_bytes,
    )
    return problem, solve(problem).plan


def test_s0_3_with_room_for_two_the_vae_stays_beside_the_unet_and_the_encoder_goes() -> None:
    problem, plan = refiner(2.1)
    assert set(loads(plan)) == {"te", "vae", "unet"}
    assert not evictions_before_a_use(problem, plan)
    unet = next(
        i for i, slot in enumerate(plan.slots) if "unet" in slot.phase and slot.part == "first"
    )
    evicted = [
        a.component for slot in plan.slots[: unet + 1] for a in slot.actions if isinstance(a, Evict)
    ]
    assert "te" in evicted


def test_s0_3_with_room_for_one_the_vae_comes_twice() -> None:
    problem, plan = refiner(1.05)
    weights = sum(c.weight_bytes() for c in problem.components)  # type: ignore[attr-defined]
    assert simulate(problem, plan).moved_bytes > weights  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["flux-tiny", "sdxl-tiny"])
def test_s0_4_an_unlimited_budget_evicts_nothing_that_is_used_again_and_loads_nothing_twice(
    make_problem, name: str
) -> None:
    problem = make_problem(name, 1 << 40)
    solution = solve(problem)
    assert not evictions_before_a_use(problem, solution.plan)
    assert simulate(solution.problem, solution.plan).moved_bytes <= sum(
        c.weight_bytes() for c in problem.components
    )


class Reserving(SimulatedDevice):
    """Caches memory as PyTorch does on a card, whose pages go back when it is told."""

    def __init__(self) -> None:
        super().__init__(sim.Machine())
        self.pages = Pages(self.machine)

    def release_cached(self) -> None:
        self.pages.trim()


def test_s0_5_what_was_evicted_is_no_longer_reserved(flux: TinyPipeline) -> None:
    problem, device = flux.within(flux.largest_with_activation() + (1 << 18)), Reserving()
    plan = solve(problem).plan
    slots = [
        slot.phase
        for slot in plan.slots
        if any(isinstance(a, Evict) and a.component == "transformer" for a in slot.actions)
    ]
    assert slots == ["decode/0:vae"], "the picture is decoded when the transformer is gone"
    host = Host.of_graph(flux.graph, problem, device, flux.modules)
    reserved_bytes: dict[str, int] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda *_, name=name: reserved_bytes.update({name: device.pages.allocator.used_bytes})
        )
        for name, module in (
            ("transformer", flux.modules["transformer"].proj_out),
            ("vae", flux.modules["vae"].decoder),
        )
    ]
    trace = follow(
        solution_of(problem, plan),
        host,
        device,
        stages_for(plan, flux.graph, flux.inputs, device, host),
    )
    for hook in hooks:
        hook.remove()
    assert np.array_equal(pixels(trace.outputs["image"]), flux.image)
    weights = nbytes(flux.modules["transformer"])
    assert reserved_bytes["transformer"] >= weights
    assert reserved_bytes["vae"] < reserved_bytes["transformer"] - weights, (
        "not only allocated: pages that nothing lies on are given back"
    )
    assert device.pages.allocator.used_bytes == 0

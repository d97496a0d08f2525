"""S0: only the prompt is encoded (HiDream's four encoders). What stays loaded, peaks of a second
run, order of evictions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scenario_graphs import GRAPHS, Encoding, Pages, encode, equal, nbytes, offloaded
from small_component import Small, hardware, problem, use
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
    found: dict[str, int] = {}
    for action in (a for slot in plan.slots for a in slot.actions if isinstance(a, Load)):
        found[action.component] = found.get(action.component, 0) + sum(
            len(indices) for _, indices in action.blocks or ()
        )
    return found


def evictions_before_a_use(of: object, plan: Plan) -> list[str]:
    """Components evicted in a slot although a later phase uses them."""
    names = [phase.name for phase in of.phases]  # type: ignore[attr-defined]
    uses = {p.name: {u.component for u in p.uses} for p in of.phases}  # type: ignore[attr-defined]
    found = []
    for slot in plan.slots:
        later = names[names.index(slot.phase) :] if slot.phase in names else []
        found += [
            a.component
            for a in slot.actions
            if isinstance(a, Evict) and any(a.component in uses[name] for name in later)
        ]
    return found


def test_s0_1_encoding_alone_ends_at_the_baseline_with_valid_outputs(hidream: Encoding) -> None:
    of = hidream.smallest()
    trace = hidream.run(of, solve(of).plan)
    assert equal(trace.outputs["embeds"], hidream.plain)
    assert trace.left_bytes == hidream.device.allocated_bytes == 0


def test_s0_1_under_diffusers_offloading_llama_stays_on_the_device(hidream: Encoding) -> None:
    pipeline = hidream.pipeline(torch.device("cpu"))
    llama_bytes = sum(t.nbytes for t in pipeline.text_encoder_4.parameters())
    with offloaded(pipeline) as machine:
        found = encode(pipeline, hidream.inputs)
        assert all(torch.equal(a, b) for a, b in zip(found, hidream.plain, strict=True))
        del found
        assert llama_bytes <= machine.allocated_bytes < 1.2 * llama_bytes, "and it alone"


def test_s0_2_encoding_twice_has_the_peak_of_encoding_once(hidream: Encoding) -> None:
    of = hidream.within(hidream.ample.component("text_encoder_4").weight_bytes() * 2)
    plan = solve(of).plan
    first, second = hidream.run(of, plan), hidream.run(of, plan)
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
    of = hidream.ample
    heaviest = max(
        sum(of.component(use.component).weight_bytes() for use in phase.uses)
        + phase.input_bytes
        + of.value_bytes(number)
        + max(phase.first_bytes, phase.steady_bytes)
        for number, phase in enumerate(of.phases)
    )
    within = hidream.within(heaviest)
    trace = hidream.run(within, solve(within).plan)
    assert trace.peak_bytes <= heaviest
    assert all(phase.steady_calls == 1 for phase in of.phases), (
        "each encoder is entered for the prompt and for its negative"
    )


def refiner(room: float) -> tuple[object, Plan]:
    """te, vae.encode, unet, vae.decode: the VAE's true next use comes after the UNet."""
    modules = {"te": Small(), "vae": Small(1), "unet": Small(2)}
    on = hardware(h2d=1e9, flops=1e9)
    uses = [[use("te", 1, on)], [use("vae", 1, on)], [use("unet", 20, on)], [use("vae", 1, on)]]
    whole = problem(modules, uses, on)
    one = whole.components[0].weight_bytes()
    of = problem(
        modules,
        uses,
        on,
        int(room * one) + whole.phases[0].first_bytes + whole.phases[0].input_bytes,
    )
    return of, solve(of).plan


def test_s0_3_with_room_for_two_the_vae_stays_beside_the_unet_and_the_encoder_goes() -> None:
    of, plan = refiner(2.1)
    assert set(loads(plan)) == {"te", "vae", "unet"}
    assert not evictions_before_a_use(of, plan)
    unet = next(
        i for i, slot in enumerate(plan.slots) if "unet" in slot.phase and slot.part == "first"
    )
    evicted = [
        a.component for slot in plan.slots[: unet + 1] for a in slot.actions if isinstance(a, Evict)
    ]
    assert "te" in evicted


def test_s0_3_with_room_for_one_the_vae_comes_twice() -> None:
    of, plan = refiner(1.05)
    weights = sum(c.weight_bytes() for c in of.components)  # type: ignore[attr-defined]
    assert simulate(of, plan).moved_bytes > weights  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["flux-tiny", "sdxl-tiny"])
def test_s0_4_an_unlimited_budget_evicts_nothing_that_is_used_again_and_loads_nothing_twice(
    make_problem, name: str
) -> None:
    of = make_problem(name, 1 << 40)
    solution = solve(of)
    assert not evictions_before_a_use(of, solution.plan)
    assert simulate(solution.problem, solution.plan).moved_bytes <= sum(
        c.weight_bytes() for c in of.components
    )


class Reserving(SimulatedDevice):
    """Caches memory as PyTorch does on a card, whose pages go back when it is told."""

    def __init__(self) -> None:
        super().__init__(sim.Machine())
        self.pages = Pages(self.machine)

    def release_cached(self) -> None:
        self.pages.trim()


def test_s0_5_what_was_evicted_is_no_longer_reserved(flux: TinyPipeline) -> None:
    of, device = flux.within(flux.largest_with_activation() + (1 << 18)), Reserving()
    plan = solve(of).plan
    slots = [
        slot.phase
        for slot in plan.slots
        if any(isinstance(a, Evict) and a.component == "transformer" for a in slot.actions)
    ]
    assert slots == ["decode/0:vae"], "the picture is decoded when the transformer is gone"
    host = Host.of_graph(flux.graph, of, device, flux.modules)
    reserved: dict[str, int] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda *_, name=name: reserved.update({name: device.pages.reserved.used_bytes})
        )
        for name, module in (
            ("transformer", flux.modules["transformer"].proj_out),
            ("vae", flux.modules["vae"].decoder),
        )
    ]
    trace = follow(
        solution_of(of, plan), host, device, stages_for(plan, flux.graph, flux.inputs, device, host)
    )
    for hook in hooks:
        hook.remove()
    assert np.array_equal(pixels(trace.outputs["image"]), flux.image)
    weights = nbytes(flux.modules["transformer"])
    assert reserved["transformer"] >= weights
    assert reserved["vae"] < reserved["transformer"] - weights, (
        "not only allocated: pages that nothing lies on are given back"
    )
    assert device.pages.reserved.used_bytes == 0

"""Pipelines attached to two devices: components stay on both between calls, and detaching empties
both."""

from __future__ import annotations

import pytest
from campaign import sampled
from test_attach_pipelines import equal, weight_bytes
from tiny_pipelines import cases

import graphrun
from graphrun.errors import InputError
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine

CASES = cases()
NAMES = ("StableDiffusionPipeline", "FluxPipeline", "WanPipeline")


def two_devices() -> SimulatedDevice:
    main = Machine()
    device = SimulatedDevice(main)
    device.with_secondaries([SimulatedDevice(Machine(sibling=main))])
    return device


@pytest.mark.long
@pytest.mark.parametrize("name", sampled(NAMES, NAMES[:1], "secondaries"))
def test_what_one_device_cannot_hold_stays_on_two(name: str) -> None:
    case, device = CASES[name], two_devices()
    plain, pipe = case.build(), case.build()
    vram = [int(0.8 * weight_bytes(pipe)), weight_bytes(pipe)]
    with graphrun.attach(pipe, vram=vram, device=device) as attachment:
        loads = []
        for _ in range(3):
            assert equal(case.call(pipe), case.call(plain))
            assert attachment.solution is not None
            assert attachment.trace is not None
            assert attachment.trace.overruns == ()
            assert any(
                component.variants[0].secondary
                for component in attachment.solution.chosen.components
            )
            loads.append(attachment.trace.moved_bytes)
            assert attachment.held_bytes == sum(
                single.allocated_bytes for single in device.all_devices
            )
        assert loads[1] == loads[2] <= loads[0]
        attachment.release()
        assert attachment.held_bytes == 0
        assert equal(case.call(pipe), case.call(plain))
    assert [one_device.allocated_bytes for one_device in device.all_devices] == [0, 0]


@pytest.mark.sweep("secondaries")
def test_the_largest_component_is_split() -> None:
    case, device = CASES["FluxPipeline"], two_devices()
    plain, pipe = case.build(), case.build()
    with graphrun.attach(pipe, vram=[1_130_000, 1_300_000], device=device) as attachment:
        for _ in range(2):
            assert equal(case.call(pipe), case.call(plain))
            assert attachment.solution is not None
            assert attachment.trace is not None
            assert [name for name, _, _ in attachment.solution.plan.splits] == ["text_encoder_2"]
        assert attachment.trace.overruns == ()
        assert attachment.held_bytes == sum(single.allocated_bytes for single in device.all_devices)
        attachment.release()
        assert [one_device.allocated_bytes for one_device in device.all_devices] == [0, 0]


def test_a_batch_of_guidance_is_not_split_and_the_error_says_what_to_type() -> None:
    pipe = CASES["StableDiffusionPipeline"].build()
    with pytest.raises(InputError, match=r"allow split: .* graphrun run NAME.yaml --allow split"):
        graphrun.attach(pipe, vram=["1G", "1G"], device=two_devices(), allow=["split"])


def test_each_device_has_a_budget() -> None:
    pipe = CASES["StableDiffusionPipeline"].build()
    with pytest.raises(InputError, match="vram has budgets of 1 devices, and device is 2"):
        graphrun.attach(pipe, vram="1G", device=two_devices())

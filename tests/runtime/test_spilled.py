"""Values that are spilled to the host and restored: equal, tied tensors once, and in order with
what computes on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_component import small_problem

from graphrun.errors import BrokenPlan
from graphrun.model.plan import Restore, Slot, Spill
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.runtime.events import EventRecorder
from graphrun.runtime.slot import OpenSlot
from graphrun.runtime.spilled import RunValues
from graphrun.sim import Machine


class Holder:
    excluded_stages = frozenset[str]()

    def __init__(self, **values: Any) -> None:
        self.values: dict[str, Any] = values


def test_a_restored_value_is_computed_with_at_once() -> None:
    device = SimulatedDevice(Machine())
    with device.capped(1 << 30):
        tensor = torch.arange(64.0).to(device.torch_device)
        holder = Holder(embeds={"prompt": tensor, "pooled": [tensor, torch.ones(2)]})
        values = RunValues(device, holder)
        device.barrier()
        del tensor
        assert values.spill("embeds") == 64 * 4 + 2 * 4
        assert device.arenas.nbytes("arenas") == 64 * 4, "the other tensor is on the host"
        device.barrier()
        values.release_originals()
        assert device.allocated_bytes == 0
        values.restore("embeds")
        doubled = holder.values["embeds"]["prompt"] * 2
        device.barrier()
        values.release_originals()
        assert torch.equal(doubled.cpu(), torch.arange(64.0) * 2)
        assert holder.values["embeds"]["pooled"][0] is holder.values["embeds"]["prompt"]


def test_the_trace_has_the_times_of_both_copies() -> None:
    device = SimulatedDevice(Machine(h2d_bytes_per_second=1e9, d2h_bytes_per_second=5e8))
    with device.capped(1 << 30):
        holder = Holder(embeds=torch.ones(1000).to(device.torch_device))
        recorder, values = EventRecorder(device, device.mark("compute")), RunValues(device, holder)
        device.barrier()
        for index, action in enumerate((Spill("embeds"), Restore("embeds"))):
            slot = OpenSlot(
                index, Slot("", "end", 0, (action,)), small_problem({}, []), {}, recorder, values
            )
            slot.open()
            slot.close()
        del slot
    spill_event, restore_event = recorder.events
    assert (spill_event.kind, spill_event.nbytes, restore_event.kind, restore_event.nbytes) == (
        "spill",
        4000,
        "restore",
        4000,
    )
    assert (spill_event.start_seconds, spill_event.end_seconds) == pytest.approx((0.0, 8e-6))
    assert (restore_event.start_seconds, restore_event.end_seconds) == pytest.approx((8e-6, 12e-6))


@pytest.mark.parametrize("stages", [Holder(), None])
def test_a_value_that_no_stage_has_produced_is_an_error(stages: Holder | None) -> None:
    with pytest.raises(BrokenPlan, match="moves the value embeds, which no stage has produced"):
        RunValues(SimulatedDevice(Machine()), stages).spill("embeds")


def test_a_value_that_only_stages_which_are_left_out_read_stays_away() -> None:
    absent = Holder()
    with pytest.raises(BrokenPlan, match="which no stage has produced"):
        RunValues(SimulatedDevice(Machine()), absent).restore("decode.x")
    absent.excluded_stages = frozenset({"decode"})
    device = SimulatedDevice(Machine())
    values = RunValues(device, absent)
    assert values.restore("decode.x") == 0
    absent.values["decode.x"] = torch.ones(2)
    with device.capped(1 << 30):
        assert values.restore("decode.x") == 8, "another stage has produced it"
        device.barrier()
        absent.values.clear()

"""Values that are spilled to the host and restored: equal, tied tensors once, and in order with what computes on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrun.errors import BrokenPlan
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.runtime.spilled import Values
from graphrun.sim import Machine


class Holder:
    def __init__(self, **named: Any) -> None:
        self.named: dict[str, Any] = named


def test_a_restored_value_is_computed_with_at_once() -> None:
    device = SimulatedDevice(Machine())
    with device.session(1 << 30):
        tensor = torch.arange(64.0).to(device.torch_device)
        holder = Holder(embeds={"prompt": tensor, "pooled": [tensor, torch.ones(2)]})
        values = Values(device, holder)
        device.barrier()
        del tensor
        assert values.spill("embeds") == 64 * 4 + 2 * 4
        device.barrier()
        values.release_originals()
        assert device.allocated_bytes == 0
        values.restore("embeds")
        doubled = holder.named["embeds"]["prompt"] * 2
        device.barrier()
        values.release_originals()
        assert torch.equal(doubled.cpu(), torch.arange(64.0) * 2)
        assert holder.named["embeds"]["pooled"][0] is holder.named["embeds"]["prompt"]


def test_a_value_that_no_stage_has_produced_is_an_error() -> None:
    with pytest.raises(BrokenPlan, match="moves the value embeds, which no stage has produced"):
        Values(SimulatedDevice(Machine()), Holder()).spill("embeds")

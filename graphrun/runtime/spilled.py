"""Values between stages, copied out to the host and back when the plan says so. Decides nothing about when.

stages' values    encode.embeds -> tensors on the device     spill: tensors on the host     restore: tensors on the device again
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol

import torch

from graphrun.errors import BrokenPlan
from graphrun.modules.trees import walk
from graphrun.runtime.devices.device import Device


class Held(Protocol):
    """Whoever keeps the values of stages while they wait for their consumers."""

    @property
    def named(self) -> MutableMapping[str, Any]:
        """Values by name, as in ``encode.embeds``; what is put here is what consumers get."""


class Values:
    """The values that ``held`` keeps (None: a run that has none). What leaves the device is dropped when its slot ends."""

    def __init__(self, held: Held | None) -> None:
        self._held = held
        self._leaving: list[torch.Tensor] = []

    def spill(self, name: str, device: Device) -> int:
        """Queues copies of the tensors of ``name`` to the host, which consumers would now get: bytes."""
        device.wait("copy", device.mark("compute"))

        def out(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "cpu":
                return tensor
            there = torch.empty_like(tensor, device="cpu")
            device.arenas.count("arenas", there)
            device.copy_out(there, tensor)
            self._leaving.append(tensor)
            return there

        return self._replace(name, out)

    def restore(self, name: str, device: Device) -> int:
        """Queues copies of what was spilled back; compute waits for them: bytes."""

        def back(tensor: torch.Tensor) -> torch.Tensor:
            there = torch.empty_like(tensor, device=device.torch_device)
            device.wait("copy", device.mark("compute"))
            device.copy_in(there, tensor, pageable=True)
            self._leaving.append(tensor)
            return there

        nbytes = self._replace(name, back)
        device.wait("compute", device.mark("copy"))
        return nbytes

    def settle(self) -> None:
        """Drops what was copied away. Behind a barrier."""
        self._leaving.clear()

    def _replace(self, name: str, change: Any) -> int:
        if self._held is None or name not in self._held.named:
            raise BrokenPlan(f"the plan moves the value {name}, which no stage has made: plan again with the inputs of this run")
        moved: dict[int, torch.Tensor] = {}

        def once(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in moved:
                moved[id(tensor)] = change(tensor)
            return moved[id(tensor)]

        self._held.named[name] = walk(self._held.named[name], once)
        return sum(tensor.nbytes for tensor in moved.values())

"""Spills values between stages to the host and restores them, as the plan says.

encode.embeds   tensors on the device --spill--> tensors on the host --restore--> tensors on the
device
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from typing import Any, Protocol

import torch

from graphrun.errors import BrokenPlan
from graphrun.modules.trees import walk
from graphrun.runtime.devices.device import Device


class NamedValues(Protocol):
    """Holder of the values of stages (`graphrun.ops.Stages`)."""

    @property
    def named(self) -> MutableMapping[str, Any]:
        """Name (``encode.embeds``) -> value. Stages read their inputs from it."""

    @property
    def left_out(self) -> Collection[str]:
        """Stages of the plan that this run leaves out."""


class Values:
    """Moves the values in ``stages`` (None: a run without values). The originals are released at
    the end of the slot."""

    def __init__(self, device: Device, stages: NamedValues | None) -> None:
        self._device, self._stages = device, stages
        self._originals: list[torch.Tensor] = []

    def spill(self, name: str) -> int:
        """Replaces the tensors of value ``name`` by copies on the host, and queues these copies.
        Returns their bytes. Call after a barrier, behind which nothing has computed yet."""
        device = self._device

        def out(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "cpu":
                return tensor
            copied = torch.empty_like(tensor, device="cpu")
            device.arenas.count("arenas", copied)
            device.copy(copied, tensor)
            self._originals.append(tensor)
            return copied

        return self._replace(name, out)

    def restore(self, name: str) -> int:
        """Replaces the tensors of value ``name`` by copies on the device; compute waits for these
        copies. Returns their bytes."""
        device = self._device

        def back(tensor: torch.Tensor) -> torch.Tensor:
            copied = torch.empty_like(tensor, device=device.torch_device)
            device.wait("copy", device.mark("compute"))
            device.copy(copied, tensor)
            self._originals.append(tensor)
            return copied

        nbytes = self._replace(name, back)
        device.wait("compute", device.mark("copy"))
        return nbytes

    def release_originals(self) -> None:
        """Releases tensors that were copied. Call after a barrier."""
        self._originals.clear()

    def _replace(self, name: str, change: Any) -> int:
        if self._stages is not None and self._stages.left_out and name not in self._stages.named:
            return 0  # only stages that the run leaves out read it
        if self._stages is None or name not in self._stages.named:
            raise BrokenPlan(
                f"the plan moves the value {name}, which no stage has produced: plan again with the inputs of this run"
            )
        moved: dict[int, torch.Tensor] = {}

        def once(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in moved:
                moved[id(tensor)] = change(tensor)
            return moved[id(tensor)]

        self._stages.named[name] = walk(self._stages.named[name], once)
        return sum(tensor.nbytes for tensor in moved.values())

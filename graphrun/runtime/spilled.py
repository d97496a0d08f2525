"""Spill values between stages to the host and restore them, as the plan says.

encode.embeds   tensors on the device --spill--> on the host --restore--> on the device
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
    def values(self) -> MutableMapping[str, Any]:
        """Name (``encode.embeds``) -> value. Stages read their inputs from here."""

    @property
    def excluded_stages(self) -> Collection[str]:
        """Stages of the plan that this run skips."""


class RunValues:
    """Moves the values in ``stages`` (None: a run without values)."""

    def __init__(self, device: Device, stages: NamedValues | None) -> None:
        self._device, self._stages = device, stages
        self._originals: list[torch.Tensor] = []

    def spill(self, name: str) -> int:
        """Replace the tensors of value ``name`` by copies on the host, and return their bytes.

        Queues the copies. Call after a barrier, before anything computes.
        """
        device = self._device

        def to_host(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "cpu":
                return tensor
            host_copy = torch.empty_like(tensor, device="cpu")
            device.arenas.count("arenas", host_copy)
            device.copy(host_copy, tensor)
            self._originals.append(tensor)
            return host_copy

        return self._replace(name, to_host)

    def restore(self, name: str) -> int:
        """Replace the tensors of value ``name`` by copies on the device, and return their bytes.

        Compute waits for these copies.
        """
        device = self._device

        def to_device(tensor: torch.Tensor) -> torch.Tensor:
            device_copy = torch.empty_like(tensor, device=device.torch_device)
            device.wait("copy", device.mark("compute"))
            device.copy(device_copy, tensor)
            self._originals.append(tensor)
            return device_copy

        nbytes = self._replace(name, to_device)
        device.wait("compute", device.mark("copy"))
        return nbytes

    def release_originals(self) -> None:
        """Release the originals of copied tensors. Call after a barrier."""
        self._originals.clear()

    def _replace(self, name: str, change: Any) -> int:
        if (
            self._stages is not None
            and self._stages.excluded_stages
            and name not in self._stages.values
        ):
            return 0  # only excluded stages read the value
        if self._stages is None or name not in self._stages.values:
            raise BrokenPlan(
                f"the plan moves the value {name}, which no stage has produced: plan again with "
                "the inputs of this run"
            )
        copies: dict[int, torch.Tensor] = {}

        def once(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = change(tensor)
            return copies[id(tensor)]

        self._stages.values[name] = walk(self._stages.values[name], once)
        return sum(tensor.nbytes for tensor in copies.values())

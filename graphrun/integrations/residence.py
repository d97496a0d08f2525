"""The weights of a live pipeline in host arenas, laid out as the plan at hand needs them; and what a call left on the device.

Decides nothing about when. A component is laid out anew where a new kind of call has shown other blocks in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from graphrun.estimator.probe import tensors_in, walk
from graphrun.executor.device import Device
from graphrun.executor.host import Host
from graphrun.executor.movers import refuse_movers
from graphrun.executor.residency import Residency
from graphrun.integrations.live import pipelines_in
from graphrun.planner.problem import ALLOCATION_BYTES, ComponentNumbers, Problem
from graphrun.units import round_up

# What every module has; none of it is a tensor that a call left.
OWN = frozenset(vars(nn.Module()))


class LiveHost(Host):
    """``modules`` where they are, until a plan uses them; then in arenas. `restore` gives them memory of their own again."""

    def __init__(self, modules: Mapping[str, nn.Module], device: Device) -> None:
        refuse_movers(modules, adapters=True)
        self.modules = dict(modules)
        self.residencies: dict[str, Residency] = {}
        self._device = device
        self._numbers: dict[str, ComponentNumbers] = {}
        self._trained = {
            (id(child), key) for child in self._children() for key, p in child._parameters.items() if p is not None and p.requires_grad
        }

    def prepare(self, problem: Problem) -> None:
        """Every component of ``problem`` is laid out as it says. Between runs, or with nothing on the device."""
        for numbers in problem.components:
            if self._numbers.get(numbers.name) != numbers or not self._current(numbers.name):
                self.residencies.pop(numbers.name, None)
                self.residencies[numbers.name] = Residency(self.modules[numbers.name], numbers, self._device)
                self._numbers[numbers.name] = numbers

    def refuse_other(self, problem: Problem) -> None:
        """Nothing to refuse: `prepare` has laid out what ``problem`` says."""

    def restore(self) -> None:
        """Every weight has memory of its own, outside of arenas, and may be trained if it might before."""
        for name in list(self.residencies):
            del self.residencies[name]
            made: dict[int, torch.Tensor] = {}
            for child in self.modules[name].modules():
                for tensors in (child._parameters, child._buffers):
                    for key, tensor in tensors.items():
                        if tensor is not None:
                            trained = (id(child), key) in self._trained
                            tensors[key] = made.setdefault(id(tensor), _own(tensor, trained))
        self._numbers.clear()

    def _current(self, name: str) -> bool:
        """Whether the component's tensors are those that were laid out: loading other weights replaces them."""
        residency = self.residencies[name]
        return all(
            getattr(place.module, place.kind).get(place.key) is entry.host
            for block in residency._blocks.values()
            for entry in block.entries
            for place in entry.places
        )

    def _children(self) -> Iterator[nn.Module]:
        for module in self.modules.values():
            yield from module.modules()


def _own(tensor: torch.Tensor, trained: bool) -> torch.Tensor:
    copied = tensor.detach().clone()
    return nn.Parameter(copied, requires_grad=trained) if isinstance(tensor, nn.Parameter) else copied


def sweep(pipe: Any, modules: Mapping[str, nn.Module], device: torch.device) -> None:
    """What a call left on ``device`` outside of weights goes to the host: a scheduler's timesteps, a cache in a module."""
    for owner in pipelines_in(pipe).values():
        _sweep(owner, device, frozenset())
        for value in list(vars(owner).values()):
            if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
                _sweep(value, device, frozenset())
    for module in modules.values():
        for child in module.modules():
            _sweep(child, device, OWN)


def _sweep(holder: Any, device: torch.device, besides: frozenset[str]) -> None:
    for key, value in list(vars(holder).items()):
        if key not in besides and not isinstance(value, (nn.Module, str, int, float, type(None))) and device_bytes(value, device):
            vars(holder)[key] = walk(value, lambda tensor: tensor.cpu())


def device_bytes(value: Any, device: torch.device, besides: Any = ()) -> int:
    """Bytes on ``device`` of the tensors in ``value``, those of ``besides`` apart."""
    known = _storages(besides, device)
    return sum(nbytes for key, nbytes in _storages(value, device).items() if key not in known)


def _storages(value: Any, device: torch.device) -> dict[int, int]:
    raws = (getattr(tensor, "raw", tensor) for tensor in tensors_in(value) if tensor.device.type == device.type)
    found = (raw.untyped_storage() for raw in raws)
    return {storage._cdata: round_up(storage.nbytes(), ALLOCATION_BYTES) for storage in found}

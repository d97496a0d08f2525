"""Where the weights of one component are: in a host arena always, and block by block on the device when the plan says so.

Decides nothing about when. Tensors are placed by replacing entries of ``module._parameters`` and ``module._buffers`` (``module.to``
and ``param.data = ...`` fail across some devices, and part tied weights); a tied tensor stays one tensor in every place.

    host arena   | block 0 | block 1 | block 2 |    one flat buffer; the module's own tensors are views of it
                      |copy     |copy
    device       | block 0 |                        present: a buffer of its own, until evicted
                 | ring: 1 . . . . |                staged: a view of the ring, for as long as the block runs
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from graphrun.components.blocks import BlockLayout, Place, TensorEntry, lay_out
from graphrun.errors import InputError
from graphrun.executor.device import Device, Mark
from graphrun.planner.problem import ALLOCATION_BYTES, ComponentNumbers
from graphrun.units import round_up


@dataclass(frozen=True, slots=True)
class _Entry:
    """One distinct tensor of a block."""

    offset: int
    nbytes: int
    host: torch.Tensor
    places: tuple[Place, ...]

    def put(self, tensor: torch.Tensor) -> None:
        for place in self.places:
            getattr(place.module, place.kind)[place.key] = tensor

    def view_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """This tensor as it lies in ``buffer`` (flat uint8, the block's own)."""
        view = buffer[self.offset : self.offset + self.nbytes].view(self.host.dtype).view(self.host.shape)
        return nn.Parameter(view, requires_grad=False) if isinstance(self.host, nn.Parameter) else view


@dataclass(slots=True)
class _Block:
    host: torch.Tensor  # flat uint8, the block's part of the arena
    entries: tuple[_Entry, ...]
    buffer: torch.Tensor | None = None


class Residency:
    """The blocks of ``module``, all on the host. The module's tensors become views of one arena, pinned for ``device`` if asked.

    Building it moves block after block, so that at most one block exists twice. Raises InputError when the module is not the one
    that ``numbers`` describe, or is not on the CPU.
    """

    def __init__(self, module: nn.Module, numbers: ComponentNumbers, device: Device) -> None:
        self.name = numbers.name
        self.module = module
        paths = [path for k in numbers.classes for path in k.blocks]
        layouts = lay_out(module, paths)
        _refuse_other_module(numbers, layouts)
        self.arena = device.arena(sum(layout.nbytes for layout in layouts.values()))
        self._blocks: dict[str, _Block] = {}
        start = 0
        for path in list(layouts):
            layout = layouts.pop(path)
            host = self.arena[start : start + layout.nbytes]
            self._blocks[path] = _Block(host, tuple(_move(entry, host) for entry in layout.entries))
            start += layout.nbytes
        if numbers.variants[0].home == "pinned":
            device.pin(self.arena)
        self._arrivals: dict[str, Mark] = {}

    def nbytes(self, path: str) -> int:
        """Bytes of block ``path``, alignment included."""
        return self._blocks[path].host.numel()

    def allocate(self, path: str, device: Device) -> None:
        """Block ``path`` gets a buffer of its own on the device, still empty."""
        self._blocks[path].buffer = device.allocate(self.nbytes(path))

    def load(self, path: str, device: Device) -> tuple[Mark, Mark]:
        """Queues the copy of block ``path`` into its buffer and places its tensors there: marks before and after the copy.

        Who computes with the block before the next barrier calls `await_arrival` first.
        """
        block = self._blocks[path]
        assert block.buffer is not None, f"{self.name} {path!r} was not allocated"
        marks = self.stage(path, block.buffer, device)
        self._arrivals[path] = marks[1]
        self.bind(path, block.buffer)
        return marks

    def await_arrival(self, path: str, device: Device) -> None:
        """Compute waits for the copy of block ``path``, if one is under way."""
        if path in self._arrivals:
            device.wait("compute", self._arrivals.pop(path))

    def bind(self, path: str, buffer: torch.Tensor) -> None:
        """The tensors of block ``path`` are those that lie in ``buffer``."""
        for entry in self._blocks[path].entries:
            entry.put(entry.view_in(buffer))

    def unbind(self, path: str) -> None:
        """The tensors of block ``path`` are the host's again."""
        for entry in self._blocks[path].entries:
            entry.put(entry.host)

    def stage(self, path: str, buffer: torch.Tensor, device: Device) -> tuple[Mark, Mark]:
        """Queues the copy of block ``path`` into ``buffer`` without placing its tensors: marks before and after the copy."""
        start = device.mark("copy")
        device.copy_in(buffer, self._blocks[path].host)
        return start, device.mark("copy")

    def present(self) -> list[str]:
        """Paths of the blocks that have a buffer on the device."""
        return [path for path, block in self._blocks.items() if block.buffer is not None]

    def evict(self, path: str) -> None:
        """The device copy of block ``path`` is dropped; it moves no bytes, since weights are read-only. Only behind a barrier."""
        self.unbind(path)
        self._arrivals.pop(path, None)
        self._blocks[path].buffer = None

    def release(self) -> None:
        """Every tensor is the host's again and every buffer is dropped, whatever was under way."""
        for path in self._blocks:
            self.evict(path)


def _move(entry: TensorEntry, block: torch.Tensor) -> _Entry:
    """``entry`` with its tensor copied into ``block`` and replaced there in every place."""
    tensor = entry.tensor
    view = block[entry.offset : entry.offset + entry.nbytes].view(tensor.dtype).view(tensor.shape)
    view.copy_(tensor.detach())
    host = nn.Parameter(view, requires_grad=False) if isinstance(tensor, nn.Parameter) else view
    moved = _Entry(entry.offset, entry.nbytes, host, entry.places)
    moved.put(host)
    return moved


def _refuse_other_module(numbers: ComponentNumbers, layouts: dict[str, BlockLayout]) -> None:
    for k, block_bytes in zip(numbers.classes, numbers.variants[0].block_bytes, strict=True):
        for path in k.blocks:
            layout = layouts.get(path)
            found = round_up(layout.nbytes, ALLOCATION_BYTES) if layout else 0
            if found > block_bytes:
                raise InputError(
                    f"{numbers.name}: block {path or 'rest'!r} has {found} bytes, and the problem says {block_bytes}: "
                    "the module is not the one that was planned for"
                )
            for entry in layout.entries if layout else ():
                if entry.tensor.device.type != "cpu":
                    raise InputError(f"{numbers.name}: block {path or 'rest'!r} is on {entry.tensor.device}; hand it in on the CPU")


def blocks_of(numbers: ComponentNumbers, chosen: Iterable[tuple[str, tuple[int, ...]]] | None) -> list[str]:
    """Paths of the blocks that an action names (all of them for None), in call order."""
    if chosen is None:
        return [path for k in numbers.classes for path in k.blocks]
    picked = {name: set(indices) for name, indices in chosen}
    return [path for k in numbers.classes for i, path in enumerate(k.blocks) if i in picked.get(k.name, ())]

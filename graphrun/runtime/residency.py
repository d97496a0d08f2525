"""Where the weights of one component are: in its backing store, and block by block on the device when the plan says so.

Decides nothing about when. Tensors are placed by replacing entries of ``module._parameters`` and ``module._buffers`` (``module.to``
and ``param.data = ...`` fail across some devices, and part tied weights), and what quantized layers hold beside them; a tied tensor
stays one tensor in every place.

    backing store         | block 0 | block 1 | block 2 |    in RAM or on disk (backing stores.py); in RAM, the module's own tensors are views of it
                      |copy     |copy
    device       | block 0 |                        present: a buffer of its own, until evicted
                 | ring: 1 . . . . |                staged: a view of the ring, for as long as the block runs
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphrun.errors import InputError
from graphrun.model.problem import ALLOCATION_BYTES, ComponentNumbers
from graphrun.modules.blocks import BlockLayout, TensorLocation, lay_out
from graphrun.modules.quantize import normalize_quantized_layers
from graphrun.runtime.backing import Arena, Blocks, Disk
from graphrun.runtime.devices.device import Device, Mark
from graphrun.units import round_up


@dataclass(slots=True)
class _Entry:
    """One distinct tensor of a block. ``host``: what stands in its places off the device (on meta without a backing store)."""

    offset: int
    nbytes: int
    absent: torch.Tensor
    host: torch.Tensor
    locations: tuple[TensorLocation, ...]
    strides: tuple[int, ...]

    def put(self, tensor: torch.Tensor) -> None:
        for place in self.locations:
            place.put(tensor)

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """This tensor as it lies in ``flat``, the block's own buffer in this dtype, with what its library hung on it."""
        offset = flat.storage_offset() + self.offset // flat.element_size()
        view = flat.as_strided(self.absent.shape, self.strides, offset)
        if not isinstance(self.absent, nn.Parameter):
            return view
        made = nn.Parameter(view, requires_grad=False)
        made.__dict__.update(self.absent.__dict__)
        return made


@dataclass(slots=True)
class _Block:
    nbytes: int
    entries: tuple[_Entry, ...]
    states: tuple[Any, ...]  # of 8-bit layers: they keep a tensor of their last call
    buffer: torch.Tensor | None = None

    def views_in(self, buffer: torch.Tensor) -> Iterator[tuple[_Entry, torch.Tensor]]:
        """Each entry with its tensor as it lies in ``buffer`` (flat uint8, the block's own), by two operators: blocks that stream
        are placed at every step."""
        flat = {dtype: buffer.view(dtype) for dtype in dict.fromkeys(entry.absent.dtype for entry in self.entries)}
        return ((entry, entry.view_in(flat[entry.absent.dtype])) for entry in self.entries)


class Residency:
    """The blocks of ``module``, none of them on the device.

    Without ``writer`` the module was handed in, with its weights: its tensors become views of one arena, block after block, so that
    at most one block exists twice. With one, its tensors are on meta, and get their bytes when its backing store is held. Raises InputError
    when the module is not the one that ``numbers`` describe, or is not on the CPU.
    """

    def __init__(self, module: nn.Module, numbers: ComponentNumbers, device: Device, writer: Blocks | None = None) -> None:
        self.name = numbers.name
        self.module = module
        self.given = writer is None
        self.granularity, self.device = numbers.granularity, device
        self._writer = writer
        normalize_quantized_layers(module)
        order = blocks_of(numbers, None)
        layouts = lay_out(module, order, split_layers=numbers.granularity == "layers")
        layouts = {path: layouts[path] for path in dict.fromkeys((*order, *layouts))}
        _refuse_other_module(numbers, layouts, given=self.given)
        self._variant = variant = numbers.variants[0]
        if variant.backing_store == "disk":
            if writer is None:
                raise InputError(f"{self.name} was handed in, and the plan reads it from disk: leave it out of modules=")
            self.backing_store: Arena | Disk = Disk(layouts, device, writer, variant.host_bytes)
        else:
            kept = {path: replace(layout, entries=()) for path, layout in layouts.items()} if self.given else layouts
            self.backing_store = Arena(kept, device, variant.backing_store == "pinned")
        self._blocks = {path: _block(layout) for path, layout in layouts.items()}
        self.joined = True  # the module is in the form that these blocks are of
        self._arrivals: dict[str, Mark] = {}
        if writer is None and isinstance(self.backing_store, Arena):
            self._move(self.backing_store, layouts)

    @property
    def arena(self) -> torch.Tensor:
        """The backing store's memory: the arena, or the bounce buffer of a backing store on disk."""
        assert self.backing_store.memory is not None
        return self.backing_store.memory

    @property
    def held(self) -> bool:
        """Whether the backing store is there (it may still be filling)."""
        return self.backing_store.memory is not None

    @property
    def loaded_bytes(self) -> int:
        """What its blocks on the device take there."""
        return sum(round_up(block.nbytes, ALLOCATION_BYTES) for block in self._blocks.values() if block.buffer is not None)

    def held_bytes(self) -> int:
        """What the module's tensors take on the device now, every storage once: also what quantized layers hang on themselves."""
        kind, sizes = self.device.torch_device.type, dict[int, int]()
        for child in self.module.modules():
            state = child.__dict__.get("state")
            statistics = getattr(child._parameters.get("weight"), "quant_state", None)
            more = [getattr(holder, "__dict__", {}) for holder in (state, statistics)]
            held: list[dict[str, Any]] = [child._parameters, child._buffers, *more]
            for tensor in (tensor for inner in held for tensor in inner.values()):
                if isinstance(tensor, torch.Tensor) and tensor.device.type == kind:
                    key, nbytes = self.device.storage_of(tensor)
                    sizes[key] = nbytes
        return sum(sizes.values())

    def holds_module(self) -> bool:
        """Whether the module's tensors are those of the backing store. Loading other weights replaces them, or what they point to."""
        assert isinstance(self.backing_store, Arena)
        return self.backing_store.memory is not None and all(
            getattr(place.owner, place.kind).get(place.key) is entry.host
            and entry.host.data_ptr() == self.backing_store.block(path).data_ptr() + entry.offset
            and entry.host.dtype == entry.absent.dtype
            for path, block in self._blocks.items()
            for entry in block.entries
            if entry.nbytes
            for place in entry.locations
        )

    def nbytes(self, path: str) -> int:
        """Bytes of block ``path``, alignment included."""
        return self._blocks[path].nbytes

    def fill(self) -> list[tuple[str, int]]:
        """Makes the backing store, and begins to read all blocks into it: paths and bytes. A backing store on disk gets its bounce buffer alone; what
        was handed in is there already."""
        if self.held or self._writer is None:
            return []
        self.backing_store.hold()
        if isinstance(self.backing_store, Disk):
            return []
        self.backing_store.lock()
        for path, block in self._blocks.items():
            for entry, view in block.views_in(self.backing_store.block(path)):
                entry.host = view
            self.unbind(path)
        return self.backing_store.fill(self._writer)

    def free(self) -> None:
        """Drops the backing store. The module's tensors are on meta, but for those on the device. Behind a barrier."""
        for path, block in self._blocks.items():
            for entry in block.entries:
                entry.host = entry.absent
            if block.buffer is None:
                self.unbind(path)
        self.backing_store.drop()

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

    def await_backing_store(self) -> None:
        """The host waits until its backing store is filled, and compute for when that was: the component computes there."""
        assert isinstance(self.backing_store, Arena)
        for path in self._blocks:
            if (marks := self.backing_store.filled(path)) is not None:
                self.device.wait("compute", marks[1])

    def bind(self, path: str, buffer: torch.Tensor) -> None:
        """The tensors of block ``path`` are those that lie in ``buffer``."""
        for entry, view in self._blocks[path].views_in(buffer) if self.joined else ():
            entry.put(view)

    def unbind(self, path: str) -> None:
        """The tensors of block ``path`` are the host's again, or on meta where no backing store holds them."""
        block = self._blocks[path]
        for entry in block.entries if self.joined else ():
            entry.put(entry.host)
        for state in block.states:
            state.idx = None  # the columns of the last call's outliers, on the device

    def leave(self) -> None:
        """The module gets tensors of another form from now on: its own are the host's; blocks on the device wait to be evicted."""
        for path in self._blocks:
            self.unbind(path)
        self.joined = False

    def join(self) -> None:
        """The module has the host's tensors of these blocks again: it gets those that are on the device from there."""
        self.joined = True
        for path, block in self._blocks.items():
            if block.buffer is not None:
                self.bind(path, block.buffer)

    def stage(self, path: str, buffer: torch.Tensor, device: Device) -> tuple[Mark, Mark]:
        """Queues the copy of block ``path`` into ``buffer`` without placing its tensors: marks before and after the copy."""
        return self.backing_store.copy(path, buffer)

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

    def _move(self, backing_store: Arena, layouts: dict[str, BlockLayout]) -> None:
        backing_store.hold()
        for path, block in self._blocks.items():
            layouts.pop(path)
            for entry, view in block.views_in(backing_store.block(path)):
                view.copy_(entry.host.detach())
                entry.host = entry.absent = view
                entry.put(view)
        backing_store.lock()


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Those of ``tensor`` where they leave no gap, as in channels_last; else the usual ones of its shape."""
    usual = torch.empty(tensor.shape, device="meta").stride()
    dense = tensor.stride() != usual and torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return tensor.stride() if dense else usual


def _block(layout: BlockLayout) -> _Block:
    entries = tuple(_Entry(e.offset, e.nbytes, e.tensor, e.tensor, e.locations, _strides(e.tensor)) for e in layout.entries)
    states = tuple(place.owner for entry in entries for place in entry.locations if place.key == "SCB")
    return _Block(layout.nbytes, entries, states)


def _refuse_other_module(numbers: ComponentNumbers, layouts: dict[str, BlockLayout], *, given: bool) -> None:
    for k, block_bytes in zip(numbers.groups, numbers.variants[0].block_bytes, strict=True):
        for path in k.blocks:
            layout = layouts.get(path)
            found = round_up(layout.nbytes, ALLOCATION_BYTES) if layout else 0
            if found > block_bytes:
                raise InputError(
                    f"{numbers.name}: block {path or 'remainder'!r} has {found} bytes, and the problem says {block_bytes}: "
                    "the module is not the one that was planned for"
                )
            for entry in layout.entries if layout else ():
                if given and entry.tensor.device.type != "cpu":
                    raise InputError(
                        f"{numbers.name}: block {path or 'remainder'!r} is on {entry.tensor.device}; hand it in on the CPU"
                    )


def blocks_of(numbers: ComponentNumbers, chosen: Iterable[tuple[str, tuple[int, ...]]] | None) -> list[str]:
    """Paths of the blocks that an action names (all of them for None), in call order."""
    if chosen is None:
        return [path for k in numbers.groups for path in k.blocks]
    picked = {name: set(indices) for name, indices in chosen}
    return [path for k in numbers.groups for i, path in enumerate(k.blocks) if i in picked.get(k.name, ())]

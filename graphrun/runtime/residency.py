"""Moves the weights of one component between its backing store and the device, block by block.

Tensors are moved by replacing entries of ``module._parameters`` and ``module._buffers``, and the
further tensors of quantized layers (``module.to`` and ``param.data = ...`` fail across some
devices, and they untie tied weights). A tied tensor stays one tensor at all of its locations. When
to move is the plan's decision, not this module's.

    backing store    | block 0 | block 1 | block 2 |    in RAM or on disk (backing.py); in RAM, the
    module's tensors are views of it
                         |copy     |copy
    device           | block 0 |   |                    loaded: a buffer of its own, until evicted
                     | ring buffer: 1 . . . . |                streamed: a view of the ring buffer,
                     while the block runs
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphrun.errors import InputError
from graphrun.model.problem import ALLOCATION_BYTES, ComponentNumbers
from graphrun.modules.blocks import BlockLayout, TensorLocation, lay_out
from graphrun.modules.compiled import outermost_compiled
from graphrun.modules.quantize import normalize_quantized_layers
from graphrun.runtime.backing import Arena, BlockWriter, Disk, Marks
from graphrun.runtime.devices.device import Device, Mark
from graphrun.units import round_up


@dataclass(slots=True)
class _Entry:
    """One distinct tensor of a block.

    ``host``: the tensor at ``locations`` while the block is not on the device. ``template``: a
    tensor of its dtype and shape, on meta where the weights come from a writer; it is ``host``
    while there is no backing store.
    """

    offset: int
    nbytes: int
    template: torch.Tensor
    host: torch.Tensor
    locations: tuple[TensorLocation, ...]
    strides: tuple[int, ...]

    def put(self, tensor: torch.Tensor) -> None:
        for location in self.locations:
            location.put(tensor)

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """View of this tensor in ``flat``, the block's buffer viewed in this dtype, with the
        attributes of the original parameter."""
        offset = flat.storage_offset() + self.offset // flat.element_size()
        view = flat.as_strided(self.template.shape, self.strides, offset)
        if not isinstance(self.template, nn.Parameter):
            return view
        if type(view) is torch.Tensor:
            made: Any = nn.Parameter(view, requires_grad=False)
        else:
            # `nn.Parameter` does the same with tensors of other classes, after one more operator
            # that detaches them
            made = view
            made._is_param = True
        made.__dict__.update(self.template.__dict__)
        return made  # type: ignore[no-any-return]


@dataclass(slots=True)
class _Block:
    nbytes: int
    entries: tuple[_Entry, ...]
    states: tuple[Any, ...]  # `state` of 8-bit layers, which keeps a tensor of the last call
    buffer: torch.Tensor | None = None
    views: tuple[torch.Tensor, ...] = ()  # of the entries in ``buffer``, once they were bound there
    bound: bool = False  # whether the module has views of a device buffer

    def views_in(self, buffer: torch.Tensor) -> Iterator[tuple[_Entry, torch.Tensor]]:
        """Each entry with its view in ``buffer`` (flat uint8, one block). Only two operators per
        tensor, since streamed blocks are bound at every step."""
        flat = {
            dtype: buffer.view(dtype)
            for dtype in dict.fromkeys(entry.template.dtype for entry in self.entries)
        }
        return ((entry, entry.view_in(flat[entry.template.dtype])) for entry in self.entries)


class Residency:
    """The blocks of ``module``; initially none is on the device.

    Without ``writer`` the module brings its weights: its tensors become views of one arena, block
    after block, so that at most one block is in memory twice. With ``writer``, its tensors are on
    meta until its backing store is read. Raises InputError when the module does not match
    ``numbers``, or is not on the CPU.
    """

    def __init__(
        self,
        module: nn.Module,
        numbers: ComponentNumbers,
        device: Device,
        writer: BlockWriter | None = None,
    ) -> None:
        self.name = numbers.name
        self.module = module
        self.caller_owned = writer is None
        self.granularity = numbers.granularity
        self.device, self._elsewhere = _devices(numbers, device)
        device = self.device
        normalize_quantized_layers(module)
        order = blocks_of(numbers, None)
        layouts = lay_out(module, order, split_layers=numbers.granularity == "layers")
        layouts = {path: layouts[path] for path in dict.fromkeys((*order, *layouts))}
        _refuse_other_module(numbers, layouts, on_cpu=self.caller_owned)
        _refuse_inside_compiled(numbers, module)
        variant = numbers.variants[0]
        if variant.backing_store == "disk":
            if writer is None:
                raise InputError(
                    f"{self.name} was passed in, but the plan reads it from disk: leave it out of modules="
                )
            self.backing_store: Arena | Disk = Disk(layouts, device, writer, variant.host_bytes)
        else:
            own = (
                {path: replace(layout, entries=()) for path, layout in layouts.items()}
                if self.caller_owned
                else layouts
            )
            self.backing_store = Arena(own, device, writer, variant.backing_store == "pinned")
        self._blocks = {path: _block(layout) for path, layout in layouts.items()}
        planned = zip(numbers.groups, variant.block_bytes, strict=True)
        self._planned_bytes = {path: nbytes for group, nbytes in planned for path in group.blocks}
        # whether the module has these tensors, and not those of another dtype variant
        self.joined = True
        self.last_use = 0  # a count of runs: the higher, the later the last run that used it
        self._noted: tuple[int, torch.Tensor] | None = None  # `_contents` at the end of a run
        self._arrivals: dict[str, Mark] = {}
        if writer is None and isinstance(self.backing_store, Arena):
            self._move_into_arena(self.backing_store, layouts)

    def place(self, numbers: ComponentNumbers, device: Device) -> None:
        """Makes those of ``device``, the main one, and its secondary devices on which ``numbers``
        compute the ones that blocks are copied to. Evicts all blocks where that changes anything.
        Call while none is read."""
        main, elsewhere = _devices(numbers, device)
        before = self.device.memory, {path: of.memory for path, of in self._elsewhere.items()}
        if before != (main.memory, {path: of.memory for path, of in elsewhere.items()}):
            self.release()
            self.device = self.backing_store.device = main
            self._elsewhere = elsewhere

    def device_of(self, path: str) -> Device:
        """The device of block ``path``."""
        return self._elsewhere.get(path, self.device)

    @property
    def splits(self) -> list[tuple[Device, tuple[str, ...]]]:
        """Of a split component, each secondary device with the paths of its blocks there, in call
        order."""
        paths: dict[int, tuple[Device, list[str]]] = {}
        for path, device in self._elsewhere.items():
            paths.setdefault(id(device), (device, []))[1].append(path)
        return [(device, tuple(own)) for device, own in paths.values()]

    def loaded_bytes(self, device: Device | None = None) -> int:
        """Bytes of the loaded blocks, on ``device`` or on all."""
        on = (
            path
            for path in self._blocks
            if device is None or self.device_of(path).memory == device.memory
        )
        return sum(map(self.held_bytes, on))

    def held_bytes(self, path: str) -> int:
        """Bytes that the device buffer of block ``path`` takes; 0 where there is none."""
        buffer = self._blocks[path].buffer
        return (
            0
            if buffer is None
            else round_up(self.device_of(path).storage_of(buffer)[1], ALLOCATION_BYTES)
        )

    @property
    def loaded(self) -> tuple[str, ...]:
        """Paths of the loaded blocks, in the order of the backing store."""
        return tuple(path for path, block in self._blocks.items() if block.buffer is not None)

    def note_contents(self) -> None:
        """To be called at the end of a run after which loaded blocks stay; see `changed`."""
        self._noted = self._contents()

    def changed(self) -> bool:
        """Whether the host copy was written to since `note_contents`, so that loaded blocks are no
        copies of it any more.

        A write through a tensor is noticed by torch's version counter, one through ``tensor.data``
        (as peft merges a LoRA) only where it changes one of eight places of a tensor.
        """
        if self._noted is None:
            return False
        (version, sample), (version_now, sample_now) = self._noted, self._contents()
        return version != version_now or not torch.equal(sample, sample_now)

    def _contents(self) -> tuple[int, torch.Tensor]:
        memory = self.backing_store.memory
        assert memory is not None
        version = 0 if memory.is_inference() else memory._version
        # blocks are multiples of eight bytes
        return version, memory.view(torch.int64)[self._sampled]

    @functools.cached_property
    def _sampled(self) -> torch.Tensor:
        """Indices of eight-byte words of the arena: up to eight of each tensor."""
        store, found = self.backing_store, list[int]()
        assert isinstance(store, Arena)
        assert store.memory is not None
        for path, block in self._blocks.items():
            begin = int(store.block(path).storage_offset())
            for entry in block.entries:
                words = range(
                    (begin + entry.offset) // 8,
                    round_up(begin + entry.offset + entry.nbytes, 8) // 8,
                )
                found += words[:: max(1, len(words) // 8)]
        return torch.tensor(found, dtype=torch.int64)

    def measured_bytes(self) -> int:
        """Bytes of the module's tensors on the device now, each storage once; includes those that
        quantized layers add in a call."""
        kind, sizes = self.device.torch_device.type, dict[int, int]()
        for child in self.module.modules():
            state, statistics = (
                child.__dict__.get("state"),
                getattr(child._parameters.get("weight"), "quant_state", None),
            )
            held: list[dict[str, Any]] = [
                child._parameters,
                child._buffers,
                *(getattr(of, "__dict__", {}) for of in (state, statistics)),
            ]
            tensors = (
                tensor
                for inner in held
                for tensor in inner.values()
                if isinstance(tensor, torch.Tensor)
            )
            sizes |= dict(
                self.device.storage_of(tensor) for tensor in tensors if tensor.device.type == kind
            )
        return sum(sizes.values())

    def holds_module(self) -> bool:
        """Whether the module's tensors are still those of the backing store.

        Loading other weights into the module replaces them.
        """
        assert isinstance(self.backing_store, Arena)
        return self.backing_store.memory is not None and all(
            entry.host.data_ptr() == start + entry.offset
            and entry.host.dtype == entry.template.dtype
            and all(getattr(of.owner, of.kind).get(of.key) is entry.host for of in entry.locations)
            for path, block in self._blocks.items()
            for start in (self.backing_store.block(path).data_ptr(),)
            for entry in block.entries
            if entry.nbytes
        )

    def nbytes(self, path: str) -> int:
        """Bytes of block ``path``, including alignment."""
        return self._blocks[path].nbytes

    def buffer_bytes(self, path: str) -> int:
        """Bytes of the device buffer of block ``path``: as many as the plan counts, which are those
        of the largest block of its group, so that what is allocated later lies where it does in the
        plan."""
        return max(self.nbytes(path), self._planned_bytes[path])

    def prepare_reads(self) -> None:
        """Allocates the backing store, unless it is there already, and prepares the read of every
        block into it.

        A disk backing store only gets its bounce buffer.
        """
        store = self.backing_store
        if store.memory is not None or self.caller_owned:
            return
        store.allocate()
        if isinstance(store, Arena):
            for path, block in self._blocks.items():
                for entry, view in block.views_in(store.block(path)):
                    entry.host = view
                self.unbind(path)
            store.prepare_reads()
        else:
            store.pin()

    def drop(self) -> None:
        """Drops the backing store. The module's tensors are on meta then, except those on the
        device. Call after a barrier."""
        for path, block in self._blocks.items():
            for entry in block.entries:
                entry.host = entry.template
            if block.buffer is None:
                self.unbind(path)
        self.backing_store.drop()

    def allocate(self, path: str) -> None:
        """Allocates the device buffer of block ``path``, of `buffer_bytes`. Its contents are
        undefined."""
        self._blocks[path].buffer = self.device_of(path).allocate(self.buffer_bytes(path))[
            : self.nbytes(path)
        ]

    def load(self, path: str) -> Marks:
        """Queues the copy of block ``path`` into its buffer and binds its tensors to it. Returns
        marks before and after the copy.

        Call `wait_copy` before computing with the block, unless a barrier came in between.
        """
        block = self._blocks[path]
        assert block.buffer is not None, f"{self.name} {path!r} was not allocated"
        marks = self.copy(path, block.buffer)
        self._arrivals[path] = marks[1]
        self.bind(path, block.buffer)
        return marks

    def wait_copy(self, path: str) -> None:
        """Makes the compute stream wait for the copy of block ``path``, if one is under way."""
        if path in self._arrivals:
            self.device_of(path).wait("compute", self._arrivals.pop(path))

    def wait_read(self) -> None:
        """Waits until the backing store is read, on the host and on the compute stream: the
        component computes on the CPU."""
        assert isinstance(self.backing_store, Arena)
        for path in self._blocks:
            self.backing_store.wait_read(path, "compute", self.device)

    def bind(self, path: str, buffer: torch.Tensor) -> None:
        """Makes the tensors of block ``path`` views of ``buffer``."""
        block = self._blocks[path]
        if not self.joined:
            return
        block.bound = True
        if buffer is not block.buffer:
            for entry, view in block.views_in(buffer):
                entry.put(view)
            return
        block.views = block.views or tuple(view for _, view in block.views_in(buffer))
        for entry, view in zip(block.entries, block.views, strict=True):
            entry.put(view)

    def unbind(self, path: str) -> None:
        """Makes the tensors of block ``path`` those of the backing store again, or meta tensors
        where there is none in RAM."""
        block = self._blocks[path]
        block.bound = False
        for entry in block.entries if self.joined else ():
            entry.put(entry.host)
        for state in block.states:
            state.idx = None  # outlier columns of the last call, on the device

    def leave(self) -> None:
        """Call before the module gets the tensors of another dtype variant. Loaded blocks stay on
        the device until evicted."""
        for path, block in self._blocks.items():
            if block.bound:
                self.unbind(path)
        self.joined = False

    def join(self) -> None:
        """Call after the module has the host tensors of these blocks again. Binds loaded blocks to
        their device buffers."""
        self.joined = True
        for path, block in self._blocks.items():
            if block.buffer is not None:
                self.bind(path, block.buffer)

    def copy(self, path: str, buffer: torch.Tensor) -> Marks:
        """Queues the copy of block ``path`` into ``buffer`` without binding its tensors.

        Returns marks before and after the copy.
        """
        device = self.device_of(path)
        device.annotate(block=f"{self.name} {path or 'unblocked'}")
        return self.backing_store.copy(path, buffer, device)

    def evict(self, path: str) -> None:
        """Releases the device copy of block ``path``. No bytes are copied, since weights are
        read-only. Call after a barrier."""
        if self._blocks[path].bound:
            self.unbind(path)
        self._arrivals.pop(path, None)
        self._blocks[path].buffer, self._blocks[path].views = None, ()

    def release(self) -> None:
        """Evicts every block, also after a failure."""
        for path in self._blocks:
            self.evict(path)

    def _move_into_arena(self, store: Arena, layouts: dict[str, BlockLayout]) -> None:
        store.allocate()
        for path, block in self._blocks.items():
            layouts.pop(path)
            for entry, view in block.views_in(store.block(path)):
                view.copy_(entry.host.detach())
                entry.host = entry.template = view
                entry.put(view)
        store.pin()


def _devices(numbers: ComponentNumbers, device: Device) -> tuple[Device, dict[str, Device]]:
    """Of ``device`` and its secondary devices: the one of the component, and of its blocks that
    compute elsewhere."""
    elsewhere = {
        path: device.every[of.secondary]
        for of in numbers.groups
        if of.secondary
        for path in of.blocks
    }
    return device.every[numbers.variants[0].secondary], elsewhere


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of ``tensor`` if it is dense (such as channels_last); else the contiguous ones of its
    shape."""
    usual = torch.empty(tensor.shape, device="meta").stride()
    dense = (
        tensor.stride() != usual
        and torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    )
    return tensor.stride() if dense else usual


def _block(layout: BlockLayout) -> _Block:
    entries = tuple(
        _Entry(e.offset, e.nbytes, e.tensor, e.tensor, e.locations, _strides(e.tensor))
        for e in layout.entries
    )
    states = tuple(
        location.owner for entry in entries for location in entry.locations if location.key == "SCB"
    )
    return _Block(layout.nbytes, entries, states)


def _refuse_other_module(
    numbers: ComponentNumbers, layouts: dict[str, BlockLayout], *, on_cpu: bool
) -> None:
    for k, block_bytes in zip(numbers.groups, numbers.variants[0].block_bytes, strict=True):
        for layout in (layouts[path] for path in k.blocks):
            block = f"{numbers.name}: block {layout.path or 'unblocked'!r}"
            if (found := round_up(layout.nbytes, ALLOCATION_BYTES)) > block_bytes:
                raise InputError(
                    f"{block} has {found} bytes, but the problem says {block_bytes}: "
                    "this is not the module that the plan was made for"
                )
            away = next(
                (
                    entry.tensor.device
                    for entry in layout.entries
                    if entry.tensor.device.type != "cpu"
                ),
                None,
            )
            if on_cpu and away is not None:
                raise InputError(f"{block} is on {away}; pass it in on the CPU")


def _refuse_inside_compiled(numbers: ComponentNumbers, module: nn.Module) -> None:
    streamed = (path for k in numbers.groups if k.streamable for path in k.blocks)
    if inside := next(
        (
            path
            for path in streamed
            if outermost_compiled(module, path) is not module.get_submodule(path)
        ),
        None,
    ):
        raise InputError(
            f"{numbers.name}: {inside} is moved by itself, but is a part of what is compiled: compile it alone, or pass in an "
            "uncompiled module"
        )


def blocks_of(
    numbers: ComponentNumbers, chosen: Iterable[tuple[str, tuple[int, ...]]] | None
) -> list[str]:
    """Paths of the blocks in ``chosen``, pairs of group and indices as in an action (None: all), in
    call order."""
    if chosen is None:
        return [path for k in numbers.groups for path in k.blocks]
    picked = {name: set(indices) for name, indices in chosen}
    return [
        path
        for k in numbers.groups
        for i, path in enumerate(k.blocks)
        if i in picked.get(k.name, ())
    ]

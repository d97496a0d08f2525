"""Move the weights of one component between its backing store and the device, block by block.

Tensors are moved by replacing entries of ``module._parameters`` and ``module._buffers``, and the
extra tensors of quantized layers. (``module.to`` and ``param.data = ...`` fail across some devices,
and untie tied weights.) A tied tensor stays one tensor at all of its locations. The plan decides
when to move blocks.

    backing store    | block 0 | block 1 | block 2 |   in RAM or on disk (backing.py); in RAM, the
                          |copy     |copy              module's tensors are views of it
    device           | block 0 |    |                  loaded: its own buffer, until evicted
                     | ring buffer: 1 . . . . |        streamed: a view of the ring buffer, while
                                                       the block runs

The weights outside of all blocks form a further block, with the path "".
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphrun.errors import InputError
from graphrun.model.blocks import all_blocks
from graphrun.model.problem import ALLOCATION_BYTES, ComponentNumbers
from graphrun.modules.blocks import BlockLayout, TensorLocation, lay_out
from graphrun.modules.compiled import outermost_compiled
from graphrun.modules.mapped import MappedTensors, MappedWriter
from graphrun.modules.quantize import normalize_quantized_layers
from graphrun.runtime.backing import Arena, BlockWriter, Disk, Marks
from graphrun.runtime.devices.device import Device, Mark
from graphrun.runtime.files import FileBlock, FileStore, file_block
from graphrun.runtime.table_rows import TableRows
from graphrun.units import round_up


@dataclass(slots=True)
class _Entry:
    """One distinct tensor of a block.

    ``host``: the tensor at ``locations`` while the block is not on the device; while there is no
    backing store, ``host`` is ``template``. ``template``: a tensor with the dtype and shape, on
    meta if a writer has the weights. ``bound``: a buffer's view on the device and its version,
    while the module has it. ``written_values``: what the module's code last wrote to a buffer
    that is read from files.
    """

    offset: int
    nbytes: int
    template: torch.Tensor
    host: torch.Tensor
    locations: tuple[TensorLocation, ...]
    strides: tuple[int, ...]
    bound: tuple[torch.Tensor, int] | None = None
    written_values: torch.Tensor | None = None

    def assign(self, tensor: torch.Tensor) -> None:
        for location in self.locations:
            location.assign(tensor)

    def bind(self, view: torch.Tensor) -> None:
        """Give the module ``view``, on the device."""
        if self.written_values is not None:
            view.copy_(self.written_values)
        if self.locations[0].kind == "_buffers" and not view.is_inference():
            view = view.data  # copies to the device do not count in its version
            self.bound = view, view._version
        self.assign(view)

    def unbind(self) -> torch.Tensor | None:
        """Give the module ``host``; return the buffer's values if the module's code wrote them."""
        value, bound, self.bound = self._value, self.bound, None
        self.assign(self.host)
        if bound is None:
            return None
        view, version = bound
        if (
            value is not view
            and isinstance(value, torch.Tensor)
            and (value.shape, value.dtype) == (view.shape, view.dtype)
        ):
            view.copy_(value)  # the block may stay on the device
        return view if view._version != version else None

    @property
    def is_replaced(self) -> bool:
        """Whether the module's code put another tensor in the place of a buffer."""
        return self.bound is not None and self._value is not self.bound[0]

    @property
    def _value(self) -> Any:
        location = self.locations[0]
        return getattr(location.owner, location.kind).get(location.key)

    @property
    def is_in_place(self) -> bool:
        """Whether the module has ``host`` at all ``locations``."""
        return all(
            getattr(location.owner, location.kind).get(location.key) is self.host
            for location in self.locations
        )

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view in ``flat`` (of this dtype), with the parameter's attributes."""
        offset = flat.storage_offset() + self.offset // flat.element_size()
        view = flat.as_strided(self.template.shape, self.strides, offset)
        if not isinstance(self.template, nn.Parameter):
            return view
        # torch chooses other operators for a product if the weight requires a gradient, even under
        # `no_grad`: outputs are bit-identical only if the view requires it too
        has_gradient = self.template.requires_grad
        if type(view) is torch.Tensor:
            parameter: Any = nn.Parameter(view, requires_grad=has_gradient)
        else:
            # `nn.Parameter` does the same for tensors of other classes, but with one more operator
            parameter = view
            parameter._is_param = True
            if has_gradient:
                parameter.requires_grad_(True)
        parameter.__dict__.update(self.template.__dict__)
        return parameter  # type: ignore[no-any-return]


@dataclass(slots=True)
class _Block:
    nbytes: int
    entries: tuple[_Entry, ...]
    states: tuple[Any, ...]  # `state` of 8-bit layers, which keeps a tensor of the last call
    buffer: torch.Tensor | None = None
    views: tuple[torch.Tensor, ...] = ()  # entries' views in ``buffer``, once bound
    bound: bool = False  # whether the module has views of a device buffer

    def views_in(self, buffer: torch.Tensor) -> Iterator[tuple[_Entry, torch.Tensor]]:
        """Return each entry with its view in ``buffer`` (flat uint8, one block).

        Only two operators per tensor, because streamed blocks are bound at every step.
        """
        flat = {
            dtype: buffer.view(dtype)
            for dtype in dict.fromkeys(entry.template.dtype for entry in self.entries)
        }
        return ((entry, entry.view_in(flat[entry.template.dtype])) for entry in self.entries)


class Residency:
    """The blocks of ``module``; at first none is on the device.

    Without ``writer``, the module brings its weights. Its tensors become views of one arena, block
    after block, so that at most one block is in memory twice. With ``writer``, its tensors are on
    meta until its backing store is read. With a `MappedWriter`, blocks contain only the tensors
    that the module has memory-mapped from files; they stay the host tensors, and all other tensors
    stay where they are. ``original``: instead, ``module`` is a copy on meta of the module of this
    residency, and has its backing store. Raises InputError if the module does not match ``numbers``
    or is not on the CPU.
    """

    def __init__(
        self,
        module: nn.Module,
        numbers: ComponentNumbers,
        device: Device,
        writer: BlockWriter | None = None,
        original: Residency | None = None,
    ) -> None:
        self.name = numbers.name
        self.module = module
        self._is_copy = original is not None
        # the module that brings the weights
        self.source_module = module if original is None else original.module
        self.caller_owned = writer is None or isinstance(writer, MappedWriter)
        self._writer = writer
        self.granularity = numbers.granularity
        self.device, self._secondary_devices = _devices(numbers, device)
        device = self.device
        normalize_quantized_layers(module)
        order = all_blocks(numbers).paths
        layouts = lay_out(module, order, split_layers=numbers.granularity == "layers")
        layouts = {path: layouts[path] for path in dict.fromkeys((*order, *layouts))}
        variant, file_blocks = numbers.variants[0], dict[str, FileBlock]()
        if variant.tables:
            if writer is not None and not self.caller_owned:
                _leave_in_files(numbers, layouts, writer)
            layouts = {path: layout.without(variant.tables) for path, layout in layouts.items()}
        if isinstance(writer, MappedWriter):
            layouts = writer.mapped_tensors.layouts(layouts)
        if variant.backing_store == "file" and writer is not None:
            file_blocks = _file_blocks(layouts, numbers, writer)
            layouts = {path: block.layout for path, block in file_blocks.items()}
        _refuse_other_module(numbers, layouts, on_cpu=self.caller_owned and not self._is_copy)
        _refuse_inside_compiled(numbers, module)
        if original is not None:
            self.backing_store: Arena | Disk | FileStore = original.backing_store
        elif variant.backing_store == "disk":
            if writer is None:
                raise InputError(
                    f"{self.name} was passed in, but the plan reads it from disk: leave it out of "
                    "modules="
                )
            self.backing_store = Disk(layouts, device, writer, variant.host_bytes)
        elif variant.backing_store == "file":
            if writer is None:
                raise InputError(
                    f"{self.name} was passed in, but the plan reads it from its files: leave it "
                    "out of modules="
                )
            self.backing_store = FileStore(file_blocks, device, writer)
        else:
            # `_move_into_arena` fills the arena with the caller's weights, so no tensors are read
            arena_layouts = (
                {path: replace(layout, entries=()) for path, layout in layouts.items()}
                if self.caller_owned
                else layouts
            )
            self.backing_store = Arena(
                arena_layouts, device, writer, variant.backing_store == "pinned"
            )
        self._blocks = {path: _block(layout) for path, layout in layouts.items()}
        group_bytes = zip(numbers.groups, variant.block_bytes, strict=True)
        self._planned_bytes = {
            path: nbytes for group, nbytes in group_bytes for path in group.blocks
        }
        # A pipeline may cast the module during a run. Each dtype variant
        # (`graphrun.modules.dtype_variants`) has its own residency; the module has the tensors of
        # the active one.
        self.is_active = True
        self.last_use = 0  # number of the last run that used the component
        # `_contents` at the end of a run
        self._noted_contents: tuple[int, torch.Tensor] | None = None
        # block -> mark after its copy to the device, until compute waits for it
        self._arrivals: dict[str, Mark] = {}
        if writer is None and original is None and isinstance(self.backing_store, Arena):
            self._move_into_arena(self.backing_store, layouts)

    def place(self, numbers: ComponentNumbers, device: Device) -> None:
        """Set the target device of every block. Call while no block is being read.

        ``numbers`` has the device number of the component and of its block groups: 0 is ``device``,
        others are its secondary devices. Evicts all blocks if any target changes.
        """
        main, secondary_devices = _devices(numbers, device)
        # `Device.memory` is equal for devices that share a memory
        previous_memory = (
            self.device.memory,
            {path: secondary.memory for path, secondary in self._secondary_devices.items()},
        )
        if previous_memory != (
            main.memory,
            {path: secondary.memory for path, secondary in secondary_devices.items()},
        ):
            self.release()
            self.device = main
            if not self._is_copy:
                self.backing_store.device = main
            self._secondary_devices = secondary_devices

    def device_of(self, path: str) -> Device:
        return self._secondary_devices.get(path, self.device)

    @property
    def splits(self) -> list[tuple[Device, tuple[str, ...]]]:
        """The secondary devices of a split component, each with its block paths in call order."""
        paths: dict[int, tuple[Device, list[str]]] = {}
        for path, device in self._secondary_devices.items():
            paths.setdefault(id(device), (device, []))[1].append(path)
        return [(device, tuple(block_paths)) for device, block_paths in paths.values()]

    def loaded_bytes(self, device: Device | None = None) -> int:
        """Return the bytes of the loaded blocks, on ``device`` or on all devices."""
        paths = (
            path
            for path in self._blocks
            if device is None or self.device_of(path).memory == device.memory
        )
        return sum(map(self.allocated_bytes, paths))

    def allocated_bytes(self, path: str) -> int:
        """Return the bytes of the device buffer of block ``path``; 0 if there is none."""
        buffer = self._blocks[path].buffer
        return (
            0
            if buffer is None
            else round_up(self.device_of(path).storage_of(buffer)[1], ALLOCATION_BYTES)
        )

    @property
    def loaded_paths(self) -> tuple[str, ...]:
        """Paths of the loaded blocks, in the order of the backing store."""
        return tuple(path for path, block in self._blocks.items() if block.buffer is not None)

    def note_contents(self) -> None:
        """Record the host copy for `changed`, after a run that leaves blocks on the device.

        Not needed for mapped tensors: `MappedTensors` compares their writes and files.
        """
        if isinstance(self.backing_store, Arena):
            self._noted_contents = self._contents()

    def changed(self) -> bool:
        """Return whether the host copy changed since `note_contents`: loaded blocks are then stale.

        torch's version counter detects writes through a tensor. A write through ``tensor.data`` (as
        peft merges a LoRA) is detected only if it changes one of eight sampled words of a tensor.
        """
        if self._noted_contents is None:
            return False
        (version, sample), (version_now, sample_now) = self._noted_contents, self._contents()
        return version != version_now or not torch.equal(sample, sample_now)

    def _contents(self) -> tuple[int, torch.Tensor]:
        memory = self.backing_store.memory
        assert memory is not None
        version = 0 if memory.is_inference() else memory._version
        # blocks are multiples of eight bytes
        return version, memory.view(torch.int64)[self._sampled]

    @functools.cached_property
    def _sampled(self) -> torch.Tensor:
        """Indices of the sampled eight-byte words of the arena: up to eight for each tensor."""
        store, indices = self.backing_store, list[int]()
        assert isinstance(store, Arena)
        assert store.memory is not None
        for path, block in self._blocks.items():
            begin = int(store.block(path).storage_offset() - store.memory.storage_offset())
            for entry in block.entries:
                words = range(
                    (begin + entry.offset) // 8,
                    round_up(begin + entry.offset + entry.nbytes, 8) // 8,
                )
                indices += words[:: len(words) // 8 + 1]
        return torch.tensor(indices, dtype=torch.int64)

    def measured_bytes(self) -> int:
        """Return the bytes of the module's device tensors, also those added in a call."""
        kind, sizes = self.device.torch_device.type, dict[int, int]()
        for child in self.module.modules():
            state, quant_state = (  # of 8-bit and of 4-bit weights
                child.__dict__.get("state"),
                getattr(child._parameters.get("weight"), "quant_state", None),
            )
            attribute_dicts: list[dict[str, Any]] = [
                child._parameters,
                child._buffers,
                *(getattr(holder, "__dict__", {}) for holder in (state, quant_state)),
            ]
            tensors = (
                tensor
                for inner in attribute_dicts
                for tensor in inner.values()
                if isinstance(tensor, torch.Tensor)
            )
            sizes |= dict(
                self.device.storage_of(tensor) for tensor in tensors if tensor.device.type == kind
            )
        return sum(sizes.values())

    def holds_module(self, mapped_tensors: MappedTensors | None = None) -> bool:
        """Return whether the module's tensors are still views of the backing store.

        Loading other weights into the module replaces them. ``mapped_tensors``: the current
        mapping, if the tensors are mapped; they must then be the same tensors of the same files.
        """
        if isinstance(writer := self._writer, MappedWriter):
            return mapped_tensors is not None and all(
                entry.is_in_place
                and writer.mapped_tensors.place_of(entry.host)
                == mapped_tensors.place_of(entry.host)
                for block in self._blocks.values()
                for entry in block.entries
            )
        assert isinstance(self.backing_store, Arena)
        return self.backing_store.memory is not None and all(
            entry.host.data_ptr() == start + entry.offset
            and entry.host.dtype == entry.template.dtype
            and entry.is_in_place
            for path, block in self._blocks.items()
            for start in (self.backing_store.block(path).data_ptr(),)
            for entry in block.entries
            if entry.nbytes
        )

    def nbytes(self, path: str) -> int:
        """Return the bytes of block ``path``, including alignment."""
        return self._blocks[path].nbytes

    def buffer_bytes(self, path: str) -> int:
        """Return the bytes of the device buffer of block ``path``, as the plan counts them.

        These are the bytes of the largest block of its group. With equal sizes, the allocator
        places later allocations as in the replay of the plan (`graphrun.verify.pages`).
        """
        return max(self.nbytes(path), self._planned_bytes[path])

    def prepare_reads(self) -> None:
        """Allocate the store if missing, and prepare its reads (disk: only a bounce buffer)."""
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
        """Drop the backing store, after a barrier. Tensors not on the device are then on meta."""
        for path, block in self._blocks.items():
            for entry in block.entries:
                entry.host = entry.template
            if block.buffer is None:
                self.unbind(path)
        self.backing_store.drop()

    def allocate(self, path: str) -> None:
        """Allocate the device buffer of block ``path``; its contents are undefined."""
        self._blocks[path].buffer = self.device_of(path).allocate(self.buffer_bytes(path))[
            : self.nbytes(path)
        ]

    def load(self, path: str) -> Marks:
        """Queue the copy of block ``path`` into its buffer and bind its tensors to the buffer.

        Return marks before and after the copy. Call `wait_copy` before computing with the block,
        unless a barrier came in between.
        """
        block = self._blocks[path]
        assert block.buffer is not None, f"{self.name} {path!r} was not allocated"
        marks = self.copy(path, block.buffer)
        self._arrivals[path] = marks[1]
        self.bind(path, block.buffer)
        return marks

    def wait_copy(self, path: str) -> None:
        """Make the compute stream wait for the copy of block ``path``, if one is under way."""
        if path in self._arrivals:
            self.device_of(path).wait("compute", self._arrivals.pop(path))

    def wait_read(self) -> None:
        """Wait for the backing store on host and compute stream, for compute on the CPU."""
        assert isinstance(self.backing_store, Arena)
        for path in self._blocks:
            self.backing_store.wait_read(path, "compute", self.device)

    def read(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of ``tensor``, which the module has as ``name``, on the host.

        Waits for the read of its block, or reads the block, if the block is not in host memory.
        """
        owner_path, _, key = name.rpartition(".")
        owner = self.module.get_submodule(owner_path)

        def is_named(entry: _Entry) -> bool:
            return any(place.owner is owner and place.key == key for place in entry.locations)

        if isinstance(tensor, TableRows):
            return tensor.rows(range(tensor.shape[0]))
        path = next(
            (path for path, block in self._blocks.items() if any(map(is_named, block.entries))),
            None,
        )
        if path is None:  # never moved: no weight, or not mapped from a file
            return tensor
        if isinstance(self.backing_store, Arena) and self.backing_store.memory is not None:
            self.backing_store.wait_read(path, "compute", self.device)
            return tensor
        buffer = torch.empty(self.nbytes(path), dtype=torch.uint8, device="cpu")
        self.backing_store.read(path, buffer)
        views = self._blocks[path].views_in(buffer)
        return next(view.detach() for entry, view in views if is_named(entry))

    def bind(self, path: str, buffer: torch.Tensor) -> None:
        """Make the tensors of block ``path`` views of ``buffer``."""
        block = self._blocks[path]
        if not self.is_active:
            return
        block.bound = True
        if any(entry.written_values is not None for entry in block.entries):
            self.wait_copy(path)
        if buffer is not block.buffer:
            for entry, view in block.views_in(buffer):
                entry.bind(view)
            return
        block.views = block.views or tuple(view for _, view in block.views_in(buffer))
        for entry, view in zip(block.entries, block.views, strict=True):
            entry.bind(view)

    def unbind(self, path: str) -> None:
        """Give block ``path`` its host tensors back: in the backing store, or on meta.

        What the module's code wrote to buffers is copied to the host, and back at the next load.
        """
        block = self._blocks[path]
        block.bound = False
        for entry in block.entries if self.is_active else ():
            if (value := entry.unbind()) is not None:
                self._save(entry, value)
        for state in block.states:
            state.idx = None  # outlier columns of the last call, on the device

    def rebind(self) -> None:
        """Move what the module's code put in the place of buffers into the loaded blocks."""
        for path, block in self._blocks.items():
            if block.buffer is not None and any(entry.is_replaced for entry in block.entries):
                self.unbind(path)
                self.bind(path, block.buffer)

    @torch.no_grad()
    def _save(self, entry: _Entry, value: torch.Tensor) -> None:
        if self.caller_owned and not entry.host.is_meta:
            entry.host.copy_(value)
        if not (self.caller_owned and isinstance(self.backing_store, Arena)):
            entry.written_values = value.to("cpu", copy=True)

    def deactivate(self) -> None:
        """Prepare for another dtype variant; loaded blocks stay on the device until evicted."""
        for path, block in self._blocks.items():
            if block.bound:
                self.unbind(path)
        self.is_active = False

    def activate(self) -> None:
        """Bind loaded blocks to their buffers, once the module has its host tensors again."""
        self.is_active = True
        for path, block in self._blocks.items():
            if block.buffer is not None:
                self.bind(path, block.buffer)

    def copy(self, path: str, buffer: torch.Tensor) -> Marks:
        """Queue the copy of block ``path`` into ``buffer``; return marks around it."""
        device = self.device_of(path)
        device.annotate(block=f"{self.name} {path or 'unblocked'}")
        return self.backing_store.copy(path, buffer, device)

    def evict(self, path: str) -> None:
        """Release the device copy of block ``path``. Call after a barrier."""
        if self._blocks[path].bound:
            self.unbind(path)
        self._arrivals.pop(path, None)
        self._blocks[path].buffer, self._blocks[path].views = None, ()

    def release(self) -> None:
        for path in self._blocks:
            self.evict(path)

    def _move_into_arena(self, store: Arena, layouts: dict[str, BlockLayout]) -> None:
        store.allocate()
        for path, block in self._blocks.items():
            layouts.pop(path)
            for entry, view in block.views_in(store.block(path)):
                view.detach().copy_(entry.host.detach())
                entry.host = entry.template = view
                entry.assign(view)
        store.pin()


def _leave_in_files(
    numbers: ComponentNumbers, layouts: Mapping[str, BlockLayout], writer: BlockWriter
) -> None:
    """Replace the tables of the plan by `TableRows`. Raises InputError without such files."""
    entries = [entry for layout in layouts.values() for entry in layout.entries]
    for entry in entries:
        for table in set(entry.names).intersection(numbers.variants[0].tables):
            if (file_tensor := writer.table(entry)) is None:
                raise InputError(
                    f"{numbers.name}: the plan reads rows of {table} from its files, which do not "
                    "have it in this form: plan again with these files"
                )
            rows = TableRows.of(file_tensor, entry.tensor)
            for location in entry.locations:
                location.assign(rows)


def _file_blocks(
    layouts: Mapping[str, BlockLayout], numbers: ComponentNumbers, writer: BlockWriter
) -> dict[str, FileBlock]:
    """Return each block's places in its files, within the bytes of the plan."""
    planned_bytes = {
        path: nbytes
        for group, nbytes in zip(numbers.groups, numbers.variants[0].block_bytes, strict=True)
        for path in group.blocks
    }
    return {
        path: file_block(layout, writer, planned_bytes.get(path, 0))
        for path, layout in layouts.items()
    }


def _devices(numbers: ComponentNumbers, device: Device) -> tuple[Device, dict[str, Device]]:
    """Return the component's device, and the secondary device of each block that has one."""
    secondary_devices = {
        path: device.all_devices[group.secondary]
        for group in numbers.groups
        if group.secondary
        for path in group.blocks
    }
    return device.all_devices[numbers.variants[0].secondary], secondary_devices


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a dense ``tensor`` (such as channels_last), else contiguous strides."""
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
    for group, block_bytes in zip(numbers.groups, numbers.variants[0].block_bytes, strict=True):
        for layout in (layouts[path] for path in group.blocks):
            block = f"{numbers.name}: block {layout.path or 'unblocked'!r}"
            if (layout_bytes := round_up(layout.nbytes, ALLOCATION_BYTES)) > block_bytes:
                raise InputError(
                    f"{block} has {layout_bytes} bytes, but {block_bytes} in the problem: "
                    "this is not the module that the plan was made for"
                )
            other_device = next(
                (
                    entry.tensor.device
                    for entry in layout.entries
                    if entry.tensor.device.type != "cpu"
                ),
                None,
            )
            if on_cpu and other_device is not None:
                raise InputError(f"{block} is on {other_device}; pass it in on the CPU")


def _refuse_inside_compiled(numbers: ComponentNumbers, module: nn.Module) -> None:
    streamed = (path for group in numbers.groups if group.streamable for path in group.blocks)
    if inner_path := next(
        (
            path
            for path in streamed
            if outermost_compiled(module, path) is not module.get_submodule(path)
        ),
        None,
    ):
        raise InputError(
            f"{numbers.name}: {inner_path} is moved by itself, but is a part of what is compiled: "
            "compile it alone, or pass in an "
            "uncompiled module"
        )

"""The recording of a dry run: every allocation and release, calls into components, ends of stages.

It does not depend on hardware. What a card adds (kernel scratch, reserved memory, seconds) is
computed from the recording afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import PlainSerializer

from graphrun.model.problem import BlockGroup
from graphrun.reading import adapter_of, validated

SortedNames = Annotated[set[str], PlainSerializer(sorted)]
"""An unordered set of names; sorted in JSON, so that equal recordings have equal digests."""


KernelClass = Literal[
    "matmul", "convolution", "attention", "wide attention", "elementwise", "transfer"
]
"""Classes of kernels.

Matrix products; convolutions; fused attention; fused attention with more features per head than
flash kernels support; all other kernels, such as normalization, activations, copies and casts;
transfers between processes (collectives of torch.distributed).
"""


FLEX = "flex"
"""`Kernel.operator` of flex attention."""
MASKED = "masked"
"""`Kernel.operator` of attention with a mask that differs by query."""
KEY_MASKED = "key masked"
"""`Kernel.operator` of attention with a mask that is the same for all queries."""
RMS_NORM = "rms_norm"
"""`Kernel.operator` of an RMS norm as one kernel. Its `Kernel.shape`: rows and elements of the
input, bytes of each element, and whether it has a weight."""


class MemoryEvent(NamedTuple):
    """Storage ``key`` is allocated with ``nbytes``, or released (0).

    ``scratch``: instead, kernel number ``key`` of the call takes ``nbytes`` of a card while it
    runs, possibly 0, and ``hopper_bytes`` of one of compute capability 9.0
    (`Hardware.is_hopper`); of a CPU `graphrun.profile.corrections.cpu_scratch`.
    """

    key: int
    nbytes: int
    scratch: bool = False
    hopper_bytes: int = 0


class Product(NamedTuple):
    """A product of ``rows`` tokens with the weight ``name``, allocated by event ``event``."""

    event: int
    name: str
    rows: int


class Kernel(NamedTuple):
    """An operator's work on the device, which `graphrun.profile.costs` turns into seconds.

    ``dtype``: of the output. ``nbytes``: read and written; transfers: sent by this process, which
    gets as many. ``tiles``: tiles of 128 x 128 outputs
    (attention: of 128 queries), one at a time per multiprocessor; group norm: groups of all
    pictures; 0 for other elementwise work. ``scores``: exponentials that attention computes, one
    per query and key; group norm: elements. ``operator``: name of elementwise work, such as "gelu".
    ``shape``: sizes that a CPU's bytes and seconds depend on:

        matmul        batch, rows, inner size, columns
        convolution   the fields of `ConvolutionShape`
        attention     batch times heads, queries, keys, features; features are 0 where the tensors
                      are not four-dimensional, or values have other features than keys
        elementwise   bytes of the results, 0 where they are written in place
    """

    kind: KernelClass
    dtype: str
    flops: float
    nbytes: int
    tiles: int = 0
    scores: int = 0
    operator: str = ""
    shape: tuple[int, ...] = ()


class ConvolutionShape(NamedTuple):
    """Sizes of a convolution: `Kernel.shape`.

    ``inputs``, ``outputs``: channels. Pixels: of one channel, in all dimensions. ``input_rows``:
    pixels without the last dimension. ``channels_last``: whether the input's channels are adjacent.
    ``dimensions``: of the pixels.
    """

    batch: int
    inputs: int
    outputs: int
    taps: int
    groups: int
    input_rows: int
    input_pixels: int
    output_pixels: int
    channels_last: int
    dimensions: int


class LayerSpan(NamedTuple):
    """A call of the layer ``path`` during a call of its component: half-open range of events."""

    path: str
    begin: int
    end: int


class Hop(NamedTuple):
    """Device tensors, except weights, that pass into or out of a block or are read or written.

    ``path``: the block; "" for operators, in blocks and in other code. ``tensors``: (number, bytes)
    of each tensor. One tensor object has one number, negative if it exists before the call. An
    operator that reads a tensor's storage, also through a view, reads the tensor. Operators that
    read no numbered tensor are recorded too.
    """

    kind: Literal["gets", "gives", "reads", "writes"]
    path: str
    tensors: tuple[tuple[int, int], ...]

    def numbered(self, new_number: Callable[[int], int]) -> Hop:
        return Hop(
            self.kind,
            self.path,
            tuple([(new_number(number), nbytes) for number, nbytes in self.tensors]),
        )


@dataclass(slots=True)
class Call:
    """One kind of call into a component, traced once per signature of argument shapes.

    Also a section of a call. Fields:

        events                  allocations and releases; every key is released before the end
        work                    kernels in execution order, as indices into ``kernels``, with the
                                path of the layer or block that runs (``""`` outside of all)
        kernels                 the distinct kernels; sections of one call share the list
        products                matrix products with a weight
        spans                   calls of layers, in order
        entered_blocks          paths of the called blocks, in order
        read_weights            names of the parameters and buffers that an operator read
        table_rows              those of them that belong to an embedding: the most rows that one
                                lookup reads, or 0 if another operator reads the table
        externally_read_layers  layers with a tensor that is read outside of their own calls
        loose_modules           modules inside a block that are called, or have a tensor read,
                                while the block does not run
        input_bytes             bytes of the device tensors among the arguments
        output_bytes            bytes of the device tensors among the results
        persistent_keys         keys of tensors that the component keeps after the call, and reuses
                                (position tables) or replaces (frames for the next piece) in later
                                calls; in a section, keys of its results
        lasting_keys            those of them that a graph's run frees when the stage ends; it frees
                                the others, such as results in `functools.lru_cache`, when the phase
                                ends
        results                 keys of the results' storages, in their order
        hops                    tensors that pass between blocks and other code, in order; at the
                                end, the returned tensors
    """

    component: str = ""
    entry: str = ""
    events: list[MemoryEvent] = field(default_factory=list)
    work: list[tuple[str, list[int]]] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    spans: list[LayerSpan] = field(default_factory=list)
    entered_blocks: list[str] = field(default_factory=list)
    read_weights: SortedNames = field(default_factory=set)
    table_rows: dict[str, int] = field(default_factory=dict)
    externally_read_layers: SortedNames = field(default_factory=set)
    loose_modules: SortedNames = field(default_factory=set)
    input_bytes: int = 0
    output_bytes: int = 0
    persistent_keys: list[int] = field(default_factory=list)
    lasting_keys: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    hops: list[Hop] = field(default_factory=list)

    def levels(self) -> list[int]:
        """Return the allocated bytes before the first and after each event, without scratch."""
        sizes, levels = dict[int, int](), [0]
        for key, nbytes, scratch, _ in self.events:
            change = 0 if scratch else nbytes or -sizes[key]
            if nbytes and not scratch:
                sizes[key] = nbytes
            levels.append(levels[-1] + change)
        return levels

    @property
    def flops(self) -> float:
        return sum(self.kernels[number].flops for _, numbers in self.work for number in numbers)

    @property
    def peak_bytes(self) -> int:
        return max(self.levels())

    @property
    def transfers(self) -> list[Kernel]:
        """The transfers to other processes, in order."""
        kernels = (self.kernels[number] for _, numbers in self.work for number in numbers)
        return [kernel for kernel in kernels if kernel.kind == "transfer"]

    def note_table(self, name: str, rows: int) -> None:
        """Record that an operator reads ``rows`` of the table ``name``; 0: all."""
        most_rows = self.table_rows.get(name, rows)
        self.table_rows[name] = max(rows, most_rows) if rows and most_rows else 0

    def extend(self, section: Call) -> None:
        """Append the recording of ``section``, which shares this call's ``kernels``."""
        start = len(self.events)
        self.events += section.events
        # copies, since the recorder appends to the last entry
        self.work += [(path, [*numbers]) for path, numbers in section.work]
        self.products += [
            Product(start + event, name, rows) for event, name, rows in section.products
        ]
        self.spans += [
            LayerSpan(path, start + begin, start + end) for path, begin, end in section.spans
        ]
        self.entered_blocks += section.entered_blocks
        self.read_weights |= section.read_weights
        for name, rows in section.table_rows.items():
            self.note_table(name, rows)
        self.externally_read_layers |= section.externally_read_layers
        self.loose_modules |= section.loose_modules
        self.hops += section.hops

    def renamed(self, path: str, new_path: str) -> Call:
        """Return this section of the block at ``path`` as recorded at ``new_path``."""

        def rename(name: str) -> str:
            return (
                new_path + name[len(path) :]
                if name == path or name.startswith(f"{path}.")
                else name
            )

        return replace(
            self,
            work=[(rename(name), numbers) for name, numbers in self.work],
            products=[Product(event, rename(name), rows) for event, name, rows in self.products],
            spans=[LayerSpan(rename(path), begin, end) for path, begin, end in self.spans],
            entered_blocks=[*map(rename, self.entered_blocks)],
            read_weights={*map(rename, self.read_weights)},
            table_rows={rename(name): rows for name, rows in self.table_rows.items()},
            externally_read_layers={*map(rename, self.externally_read_layers)},
            loose_modules={*map(rename, self.loose_modules)},
            hops=[Hop(kind, rename(path), tensors) for kind, path, tensors in self.hops],
        )

    def without_flex_scratch(self) -> Call:
        """Return the call with flex attention as one compiled kernel."""
        events = [
            event._replace(nbytes=0, hopper_bytes=0)
            if event.scratch and self.kernels[event.key].operator == FLEX
            else event
            for event in self.events
        ]
        return replace(self, events=events)

    def plain(self) -> Any:
        return adapter_of(Call).dump_python(self, mode="json")


class StageEnd(NamedTuple):
    """The end of the stage ``name``."""

    name: str


@dataclass(slots=True)
class Recording:
    """Allocations, releases, calls into components and ends of stages of a whole dry run, in order.

    ``values``: stage output -> keys of its storages when its stage ends. ``keeps_tensors``:
    components keep the tensors in `Call.persistent_keys` until the end, as in a live pipeline, and
    not for one phase.
    """

    items: list[MemoryEvent | Call | StageEnd] = field(default_factory=list)
    values: dict[str, frozenset[int]] = field(default_factory=dict)
    keeps_tensors: bool = False

    def allocated(self, key: int, nbytes: int) -> None:
        """Record a new storage. Called by the simulated accelerator."""
        self.items.append(MemoryEvent(key, nbytes))

    def freed(self, key: int) -> None:
        """Record a released storage. Called by the simulated accelerator."""
        self.items.append(MemoryEvent(key, 0))

    def as_compiled(self, names: Collection[str]) -> Recording:
        """Return the recording with the components ``names`` compiled: their flex attention has no
        scratch."""
        if not names:
            return self
        calls = {
            id(item): item.without_flex_scratch()
            for item in self.items
            if isinstance(item, Call) and item.component in names
        }
        return replace(self, items=[calls.get(id(item), item) for item in self.items])

    def entries(self) -> list[tuple[str, Call]]:
        """Return (stage, call) for every call into a component, in order."""
        entries: list[tuple[str, Call]] = []
        for item in self.items:
            if isinstance(item, Call):
                entries.append(("", item))
            elif isinstance(item, StageEnd):
                entries = [(stage or item.name, call) for stage, call in entries]
        return [(stage, call) for stage, call in entries if stage]


@dataclass(frozen=True, slots=True)
class ComponentProfile:
    """Facts about a component from its structure and its traced calls.

    ``block_bytes``: for each group, bytes of its largest block in the dtype from the graph file.
    ``precisions``: the same in every precision. ``layers``: (outputs, inputs) of each weight that
    int8, nf4 and fp8 quantize. ``widened``: GGUF precision -> for each of its quantized weights,
    (peak bytes before its dequantized form exists, bytes written while it is dequantized); both are
    0 for SVDQuant, which dequantizes nothing.
    ``as_stored``: the quantized precisions of the source files. ``tables``: names of the embedding
    tables of which calls read few rows (`graphrun.profile.tables`). ``without_tables``: precision
    -> ``block_bytes`` without them, where files have these rows. ``layer_split``: the profile with
    layers, None where the component cannot be split.
    """

    parameters: int
    groups: tuple[BlockGroup, ...]
    block_bytes: tuple[int, ...]
    precisions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    widened: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    as_stored: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    without_tables: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layer_split: ComponentProfile | None = None


@dataclass(frozen=True, slots=True)
class DryRun:
    """The result of a dry run: the recording, and the profile of every component."""

    recording: Recording
    profiles: Mapping[str, ComponentProfile]

    def to_json(self) -> Any:
        """Return the dry run as JSON-ready data, without its modules."""
        calls = {id(item): item for item in self.recording.items if isinstance(item, Call)}
        numbers = {key: number for number, key in enumerate(calls)}
        items = [
            numbers[id(item)] if isinstance(item, Call) else item for item in self.recording.items
        ]
        document = _DryRunDocument([*calls.values()], items, self.recording.values, self.profiles)
        return adapter_of(_DryRunDocument).dump_python(document, mode="json")

    @staticmethod
    def from_json(data: Any) -> DryRun:
        """Return the dry run from `to_json`. Raises ValueError or IndexError for other data."""
        document: _DryRunDocument = validated(_DryRunDocument, data)
        items = [document.calls[item] if isinstance(item, int) else item for item in document.items]
        return DryRun(Recording(items, document.values), document.profiles)


@dataclass(frozen=True, slots=True)
class _DryRunDocument:
    """A dry run as it is written: ``calls`` has every call once, and ``items`` has its index."""

    calls: list[Call]
    items: list[MemoryEvent | int | StageEnd]
    values: dict[str, frozenset[int]]
    profiles: Mapping[str, ComponentProfile]

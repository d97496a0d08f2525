"""The recording of a dry run: every allocation and release in order, with marks where components
are entered and stages end.

Independent of hardware: what a card adds (kernel scratch, reserved memory, seconds) is computed
from it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import PlainSerializer, TypeAdapter

from graphrun.model.problem import BlockGroup

Names = Annotated[set[str], PlainSerializer(sorted)]
"""Names in no order; sorted in JSON, so that equal recordings have equal digests."""


KernelClass = Literal["matmul", "convolution", "attention", "wide attention", "elementwise"]
"""Matrix products; convolutions; fused attention, also with more features per head than flash
kernels take; all other kernels, such as normalisation, activations, copies and casts."""


class Event(NamedTuple):
    """Storage ``key`` is allocated with ``nbytes``, or released (0).

    ``scratch``: instead, a kernel takes ``nbytes`` while it runs, of which ``spared_bytes`` are not
    needed on cards that avoid large copies (`Hardware.spares_large_copies`).
    """

    key: int
    nbytes: int
    scratch: bool = False
    spared_bytes: int = 0


class Product(NamedTuple):
    """A matrix product of ``rows`` tokens with the weight ``name``. Event number ``event`` of its
    call allocates the result."""

    event: int
    name: str
    rows: int


class Kernel(NamedTuple):
    """An operator's work on the device, which `graphrun.profile.costs` turns into seconds.

    ``dtype``: of its output. ``nbytes``: bytes of the tensors that it reads and writes. ``tiles``:
    tiles of 128 x 128 outputs (attention: of 128 queries), which the multiprocessors take one at a
    time; 0 for elementwise work. ``scores``: exponentials that attention takes, one per query and
    key.
    """

    kind: KernelClass
    dtype: str
    flops: float
    nbytes: int
    tiles: int = 0
    scores: int = 0


class Span(NamedTuple):
    """A call of the layer ``path`` during a call of its component: events ``begin`` to ``end``
    (half-open)."""

    path: str
    begin: int
    end: int


class Hop(NamedTuple):
    """Tensors on the device that the block ``path`` gets or gives back, or that operators read or
    write, apart from weights.

    ``tensors``: number and bytes of each. The same tensor object has the same number, negative if
    it was there before the call; an operator that reads its storage, also through a view, reads it.
    ``path`` is "" for operators, of blocks and of other code; those that read none of the numbered
    tensors are noted too.
    """

    kind: Literal["gets", "gives", "reads", "writes"]
    path: str
    tensors: tuple[tuple[int, int], ...]

    def numbered(self, numbers: Callable[[int], int]) -> Hop:
        """The same with other numbers of tensors."""
        return self._replace(
            tensors=tuple((numbers(number), nbytes) for number, nbytes in self.tensors)
        )


@dataclass(slots=True)
class Call:
    """One kind of call into a component, traced once for each signature of argument shapes; or a
    section of one.

    ``events``: what it allocates and releases. Every key is released before the end. ``work``:
    kernels in execution order, as numbers in ``kernels``, with the path of the layer or block that
    ran (``""`` outside of all). ``kernels``: the distinct ones; sections of one call share it.
    ``products``: matrix products with a weight. ``spans``: calls of layers, in order. ``entered``:
    paths of the blocks that were called, in order. ``touched``: names of the parameters and buffers
    that an operator read. ``outside``: layers with a tensor that was read outside of their own
    calls. ``loose``: modules inside a block that were called, or of which a tensor was read, while
    the block did not run. ``input_bytes``: bytes of the device tensors among the arguments;
    ``output_bytes``: among the results. ``kept``: keys of tensors that the component keeps after
    the call and reuses (position tables) or replaces (frames for the next piece) in later calls; of
    a section, keys of its results. ``results``: keys of the results' storages, in their order.
    ``hops``: in order, what passes between blocks and other code; at the end, what is returned.
    """

    component: str = ""
    entry: str = ""
    events: list[Event] = field(default_factory=list)
    work: list[tuple[str, list[int]]] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    entered: list[str] = field(default_factory=list)
    touched: Names = field(default_factory=set)
    outside: Names = field(default_factory=set)
    loose: Names = field(default_factory=set)
    input_bytes: int = 0
    output_bytes: int = 0
    kept: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    hops: list[Hop] = field(default_factory=list)

    def levels(self) -> list[int]:
        """The bytes allocated before the first event and after each, without scratch."""
        sizes, levels = dict[int, int](), [0]
        for key, nbytes, scratch, _ in self.events:
            change = 0 if scratch else nbytes or -sizes[key]
            if nbytes and not scratch:
                sizes[key] = nbytes
            levels.append(levels[-1] + change)
        return levels

    @property
    def flops(self) -> float:
        """FLOPs of the whole call."""
        return sum(self.kernels[number].flops for _, numbers in self.work for number in numbers)

    @property
    def peak_bytes(self) -> int:
        """The most bytes allocated at once, without scratch."""
        return max(self.levels())

    def extend(self, section: Call) -> None:
        """Appends what was recorded in ``section``, whose kernels have the same numbers."""
        start = len(self.events)
        self.events += section.events
        # the recorder appends to the last entry
        self.work += [(path, [*numbers]) for path, numbers in section.work]
        self.products += [
            product._replace(event=start + product.event) for product in section.products
        ]
        self.spans += [
            span._replace(begin=start + span.begin, end=start + span.end) for span in section.spans
        ]
        self.entered += section.entered
        self.touched |= section.touched
        self.outside |= section.outside
        self.loose |= section.loose
        self.hops += section.hops

    def renamed(self, path: str, other: str) -> Call:
        """This section, of the block at ``path``, as the equal block at ``other`` would give it:
        with its names of modules and tensors."""

        def rename(name: str) -> str:
            return (
                other + name[len(path) :] if name == path or name.startswith(f"{path}.") else name
            )

        return replace(
            self,
            work=[(rename(name), numbers) for name, numbers in self.work],
            products=[product._replace(name=rename(product.name)) for product in self.products],
            spans=[span._replace(path=rename(span.path)) for span in self.spans],
            entered=[*map(rename, self.entered)],
            touched={*map(rename, self.touched)},
            outside={*map(rename, self.outside)},
            loose={*map(rename, self.loose)},
            hops=[hop._replace(path=rename(hop.path)) for hop in self.hops],
        )

    def plain(self) -> Any:
        """The call as JSON-ready data."""
        return TypeAdapter(Call).dump_python(self, mode="json")


class StageEnd(NamedTuple):
    """The end of the stage ``name``."""

    name: str


@dataclass(slots=True)
class Recording:
    """Allocations, releases, entries into components and ends of stages of a whole dry run, in
    order.

    ``values``: per stage output, the keys of the storages that it holds when its stage ends.
    ``keeps``: components keep the tensors in `Call.kept` until the end, as those of a live pipeline
    may, and not for a phase.
    """

    items: list[Event | Call | StageEnd] = field(default_factory=list)
    values: dict[str, frozenset[int]] = field(default_factory=dict)
    keeps: bool = False

    def allocated(self, key: int, nbytes: int) -> None:
        """Called by the simulated accelerator for every new storage."""
        self.items.append(Event(key, nbytes))

    def freed(self, key: int) -> None:
        """Called by the simulated accelerator for every released storage."""
        self.items.append(Event(key, 0))

    def entries(self) -> list[tuple[str, Call]]:
        """(stage, call) for every entry into a component, in order."""
        found: list[tuple[str, Call]] = []
        for item in self.items:
            if isinstance(item, Call):
                found.append(("", item))
            elif isinstance(item, StageEnd):
                found = [(stage or item.name, call) for stage, call in found]
        return [(stage, call) for stage, call in found if stage]


@dataclass(frozen=True, slots=True)
class ComponentProfile:
    """What is known of a component from its structure and its traced calls.

    ``parameters``: their number. ``groups``: its block groups. ``block_bytes``: for each group,
    bytes of its largest block in the dtype that the graph declares; ``precisions``: the same in
    every precision. ``layers``: (outputs, inputs) of each weight that int8, nf4 and fp8 quantize.
    ``widened``: for each weight of a GGUF file, (peak bytes before its dequantized form exists,
    bytes written while it is dequantized). ``as_stored``: the quantized precisions in which the
    source files already hold the component. ``layer_split``: the profile with the component split
    into layers, None where it cannot be.
    """

    parameters: int
    groups: tuple[BlockGroup, ...]
    block_bytes: tuple[int, ...]
    precisions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    widened: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    as_stored: tuple[str, ...] = ()
    layer_split: ComponentProfile | None = None


@dataclass(frozen=True, slots=True)
class DryRun:
    """The result of a dry run: the recording, and the profile of every component."""

    recording: Recording
    profiles: Mapping[str, ComponentProfile]

    def to_json(self) -> Any:
        """The dry run as JSON-ready data, without its modules."""
        calls = {id(item): item for item in self.recording.items if isinstance(item, Call)}
        numbers = {key: number for number, key in enumerate(calls)}
        items = [
            numbers[id(item)] if isinstance(item, Call) else item for item in self.recording.items
        ]
        stored = _Stored([*calls.values()], items, self.recording.values, self.profiles)
        return TypeAdapter(_Stored).dump_python(stored, mode="json")

    @staticmethod
    def from_json(data: Any) -> DryRun:
        """The dry run from `to_json`. Raises ValueError or IndexError for any other ``data``."""
        stored = TypeAdapter(_Stored).validate_python(data)
        items = [stored.calls[item] if isinstance(item, int) else item for item in stored.items]
        return DryRun(Recording(items, stored.values), stored.profiles)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A dry run as it is written: every call once, with its number in its place."""

    calls: list[Call]
    items: list[Event | int | StageEnd]
    values: dict[str, frozenset[int]]
    profiles: Mapping[str, ComponentProfile]

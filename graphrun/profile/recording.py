"""The recording of a dry run: every allocation and release in order, with marks where components are entered and stages end.

Independent of hardware: what a card adds (kernel scratch, reserved memory, seconds) is computed from it afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from graphrun.model.problem import BlockGroup


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of ``rows`` tokens with the weight ``name``. Event number ``event`` of its call allocates the result."""

    event: int
    name: str
    rows: int


@dataclass(frozen=True, slots=True)
class Span:
    """A call of the layer ``path`` during a call of its component: events ``begin`` to ``end`` (half-open)."""

    path: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Call:
    """One kind of call into a component, traced once for each signature of argument shapes.

    ``events``: (key, nbytes) in order; nbytes > 0 is an allocation, 0 a release. Every key is released before the end. nbytes
    < 0 is kernel scratch of that size, of which ``key`` bytes are not needed on cards that avoid large copies
    (`Hardware.spares_large_copies`). ``peak_bytes``: most bytes allocated at once, without scratch. ``input_bytes``: bytes of
    the device tensors among the arguments. ``touched``: names of the parameters and buffers that an operator read. ``flops``:
    FLOPs in execution order, each with the path of the layer or block that ran (``""`` outside of all). ``products``: matrix
    products with a weight. ``spans``: calls of layers, in order. ``outside``: layers with a tensor that was read outside of
    their own calls. ``loose``: modules inside a block that were called, or of which a tensor was read, while the block did not
    run. ``kept``: keys of tensors that the component keeps after the call (position tables) and reuses in later calls of the
    phase.
    """

    component: str
    entry: str
    events: tuple[tuple[int, int], ...]
    peak_bytes: int
    input_bytes: int
    touched: frozenset[str]
    flops: tuple[tuple[str, float], ...]
    products: tuple[Product, ...] = ()
    spans: tuple[Span, ...] = ()
    outside: frozenset[str] = frozenset()
    loose: frozenset[str] = frozenset()
    kept: tuple[int, ...] = ()

    def plain(self) -> dict[str, Any]:
        """The call as a JSON-ready dictionary, with sets as sorted lists."""
        return {**asdict(self), **{name: sorted(getattr(self, name)) for name in ("touched", "outside", "loose")}}


@dataclass(frozen=True, slots=True)
class Mark:
    """A position in the recording: component ``name`` was entered (``call``: what happened inside), or stage ``name`` has
    ended."""

    kind: Literal["enter", "stage"]
    name: str
    call: Call | None = None


@dataclass(slots=True)
class Recording:
    """Allocations (key, nbytes > 0), releases (key, 0) and marks of a whole dry run in order. What happens inside components
    is in the marks' calls.

    ``values``: per stage output, the keys of the storages that it holds when its stage ends.
    """

    items: list[tuple[int, int] | Mark] = field(default_factory=list)
    values: dict[str, frozenset[int]] = field(default_factory=dict)

    def allocated(self, key: int, nbytes: int) -> None:
        """Called by the simulated accelerator for every new storage."""
        self.items.append((key, nbytes))

    def freed(self, key: int) -> None:
        """Called by the simulated accelerator for every released storage."""
        self.items.append((key, 0))

    def entries(self) -> list[tuple[str, Call]]:
        """(stage, call) for every entry into a component, in order."""
        found: list[tuple[str, Call]] = []
        open_calls: list[Call] = []
        for item in self.items:
            if isinstance(item, Mark):
                if item.call is not None:
                    open_calls.append(item.call)
                else:
                    found += [(item.name, call) for call in open_calls]
                    open_calls = []
        return found


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """A component split into layers: its groups, the bytes of the largest layer of each group, and the same in other
    precisions."""

    groups: tuple[BlockGroup, ...]
    block_bytes: tuple[int, ...]
    precisions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ComponentProfile:
    """What is known of a component from its structure and its traced calls.

    ``parameters``: their number. ``groups``: its block groups. ``block_bytes``: for each group, bytes of its largest block in
    the dtype that the graph declares; ``precisions``: the same in every precision. ``layers``: (outputs, inputs) of each
    weight that int8, nf4 and fp8 quantize. ``widened``: for each weight of a GGUF file, (peak bytes before its dequantized
    form exists, bytes written while it is dequantized). ``as_stored``: the quantized precisions in which the source files
    already hold the component. ``layer_split``: the component split into layers, None where it cannot be.
    """

    parameters: int
    groups: tuple[BlockGroup, ...]
    block_bytes: tuple[int, ...]
    precisions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    widened: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    as_stored: tuple[str, ...] = ()
    layer_split: LayerSplit | None = None


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of a dry run: the recording, and the profile of every component."""

    recording: Recording
    profiles: Mapping[str, ComponentProfile]

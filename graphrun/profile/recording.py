"""The record of a dry run: every allocation and release in order, and the marks at which stages and components begin.

Hardware-independent: what a card adds (scratch, reserved memory, seconds) is computed from it afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from graphrun.model.problem import BlockGroup


@dataclass(frozen=True, slots=True)
class Product:
    """A product of ``rows`` tokens with the weight ``name``; its result is allocated by the event number ``event`` of its call."""

    event: int
    name: str
    rows: int


@dataclass(frozen=True, slots=True)
class Span:
    """A call of the layer ``path`` within a call of its component: from event ``begin`` to ``end`` (half-open)."""

    path: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Call:
    """One kind of call into a component, traced once for a signature of argument shapes.

    ``events``: (key, nbytes) with nbytes > 0 for an allocation, 0 for a release, in order; every key is released before the end.
    nbytes < 0 is scratch of that size, of which ``key`` bytes are not taken by cards that spare large copies.
    ``peak_bytes``: most allocated at once, scratch apart. ``input_bytes``: what was handed in.
    ``touched``: names of parameters and buffers an op read. ``flops``: stretches of compute in order,
    each with the path of the layer or block it ran in (``""`` outside of all). ``products``: the matrix products with a weight.
    ``spans``: the calls of layers, in order. ``outside``: layers of which a tensor was read outside of their own calls.
    ``loose``: modules in a block of which a tensor was read, or that were called, while the block was not.
    ``kept``: keys of what the component keeps (tables of positions), and has at hand in further calls of its phase.
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
        """As a JSON-ready dictionary, sets in order."""
        return {**asdict(self), **{name: sorted(getattr(self, name)) for name in ("touched", "outside", "loose")}}


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on the tape: a component is entered (``name`` is it, ``call`` what happened inside), or a stage has ended."""

    kind: Literal["enter", "stage"]
    name: str
    call: Call | None = None


@dataclass(slots=True)
class Recording:
    """Allocations (key, nbytes > 0), releases (key, 0) and marks of a whole dry run, outside of components and in order.

    ``values``: per stage output, the keys of the storages it holds when its stage ends.
    """

    items: list[tuple[int, int] | Mark] = field(default_factory=list)
    values: dict[str, frozenset[int]] = field(default_factory=dict)

    def allocated(self, key: int, nbytes: int) -> None:
        """Called by the simulated accelerator for every storage that comes to life on it."""
        self.items.append((key, nbytes))

    def freed(self, key: int) -> None:
        """Called by the simulated accelerator for every storage that goes."""
        self.items.append((key, 0))

    def entries(self) -> list[tuple[str, Call]]:
        """(stage, call) in order."""
        found: list[tuple[str, Call]] = []
        waiting: list[Call] = []
        for item in self.items:
            if isinstance(item, Mark):
                if item.call is not None:
                    waiting.append(item.call)
                else:
                    found += [(item.name, call) for call in waiting]
                    waiting = []
        return found


@dataclass(frozen=True, slots=True)
class Cut:
    """Another way to cut a component: its classes of blocks, bytes of a block per class, and those in other precisions."""

    groups: tuple[BlockGroup, ...]
    block_bytes: tuple[int, ...]
    precisions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ComponentProfile:
    """What a component's structure says: its parameters, its classes of blocks, per class the bytes of its largest block, as the
    graph declares it, and in every precision. ``layers``: the weights that int8 and nf4 quantize, each (outputs, inputs);
    ``widened``: those of a GGUF file, each with the bytes that making it numbers takes at most, and writes. ``as_stored``:
    quantized precisions that files hold as they are."""

    parameters: int
    groups: tuple[BlockGroup, ...]
    block_bytes: tuple[int, ...]
    precisions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    widened: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    as_stored: tuple[str, ...] = ()
    by_layer: Cut | None = None


@dataclass(frozen=True, slots=True)
class Probed:
    """A dry run: the tape, and the facts of every component. ``meta_modules`` are the modules themselves, none where it was read from
    the cache: no number may come from them."""

    recording: Recording
    profiles: Mapping[str, ComponentProfile]
    meta_modules: Mapping[str, Any] = field(default_factory=dict, compare=False)

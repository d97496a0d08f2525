"""The numbers a plan is made from: what is large, how long things take, what fits. Complete, frozen, replayable.

A `Problem` knows no torch, no file and no clock; its JSON form is the whole of a bug report.

    weights           components -> classes of equal blocks, in call order; one class of one for what belongs to no block
    activation        phases     -> bytes over time, relative to what lives when the phase is entered
    values            what flows between stages, and from which phase to which it lives on the device

    bytes on the device while a phase runs
    |              .-- activation --.
    |   values + carry   ___    ___
    |  ________________|   |__|   |_____
    |  weights: present + loaded + staging ring
    +-----------------------------------------> slots: load | first | rest
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Granularity = Literal["blocks", "layers"]
Basis = Literal["measured", "traced", "declared", "prior"]
BackingStore = Literal["pinned", "pageable", "disk"]
Placement = Literal["pin", "keep", "exclude", "whole", "drop"]

# A device allocation takes a multiple of this many bytes (kMinBlockSize of PyTorch's CUDA caching allocator; sim does the same).
ALLOCATION_BYTES = 512

# Fields that a digest leaves out where they have their defaults.
LATER = {
    "directives": (),
    "reserve_bytes": 0,
    "until": "",
    "precomputed": (),
    "pinned_bytes": None,
    "disk_bytes": None,
    "runs": 1,
    "precedence": None,
    "options": (),
    "allow": (),
    "commits": (),
    "read_seconds": (),
    "disk_seconds": (),
    "block_seconds": (),
    "slowdown": 1.0,
    "scratch_bytes": 0,
    "transient_bytes": 0,
    "stored_bytes": 0,
    "read_bytes": (),
    "needs": "",
    "cpu_flops_per_second": 3e11,
    "memory_bytes_per_second": 1e12,
    "granularity": "blocks",
    "layers": None,
    "passes": (),
    "beside_bytes": (),
    "glue_bytes": 0,
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device and the roads to it. Bytes, bytes per second, floating point operations per second."""

    name: str
    device: str  # "cuda" or "sim"
    capacity_bytes: int
    context_bytes: int  # what the driver takes before the first tensor; 0 on sim
    workspace_bytes: int  # cuBLAS; 0 on sim
    h2d_bytes_per_second: float  # from pinned memory
    pageable_bytes_per_second: float
    d2h_bytes_per_second: float
    bidirectional: float  # share of h2d that remains while d2h runs
    disk_bytes_per_second: float
    flops_per_second: float  # 16-bit dense, as used by real models, not the data sheet
    convolution_scratch: bool = True  # whether convolutions take scratch that no dispatcher sees (cuDNN does)
    caching_allocator: bool = True  # whether a caching allocator reserves more than is allocated
    cpu_flops_per_second: float = 3e11  # of the host's cores together, 16-bit
    memory_bytes_per_second: float = 1e12  # the device's own memory, read or written
    copy_start_seconds: float = 0.0  # of one copy to the device, whatever its size
    spares_large_copies: bool = False  # whether convolutions do without copies of outputs where tensors have 2 GiB or more
    basis: Basis = "prior"


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Blocks of equal size that are called in a row; of a component cut into layers, equal layers of one of its children, which
    alternate with others of it. ``blocks`` are module paths in the order of their first calls.

    A tensor belongs to the block with the longest path that is a prefix of the tensor's name; the path ``""`` takes the rest.
    A class that is not streamable is a class of one: present whole or absent.
    """

    name: str
    blocks: tuple[str, ...]
    streamable: bool


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to hold a component: precision x backing store x where it computes. Per class: bytes of a block, seconds to copy one.

    backing store      holds in RAM        a copy to the device takes          filled
    pinned    host_bytes, locked  load_seconds                        by a fill, or before the run where fill_seconds is ()
    pageable  host_bytes          load_seconds (slower)               likewise
    disk      a bounce buffer of  disk_seconds to read, beside        never: the buffer is there from the start
              host_bytes, locked  load_seconds to copy on

    One that computes on the CPU is never copied; its backing store is filled before it is entered.
    """

    precision: str
    backing_store: BackingStore
    device: str  # where it computes: "device" or "cpu"
    block_bytes: tuple[int, ...]
    load_seconds: tuple[float, ...]
    host_bytes: int
    movable: bool = True  # False: once loaded it stays until the end
    streamable: bool = True
    read_seconds: tuple[float, ...] = ()  # to read one block from disk into its backing store
    disk_seconds: tuple[float, ...] = ()  # to read one block from disk whenever it is copied
    block_seconds: tuple[float, ...] = ()  # compute of one block in one call beyond the use's: dequantization
    slowdown: float = 1.0  # what the use's compute is multiplied by: the device's rate over the CPU's
    scratch_bytes: int = 0  # activation beyond the phase's while the component computes
    transient_bytes: int = 0  # in RAM beyond host_bytes while the backing store is filled
    stored_bytes: int = 0  # on disk, because of this variant
    read_bytes: tuple[int, ...] = ()  # what files hold of one block, per class, where that is not block_bytes
    needs: str = ""  # what must be allowed, since the output changes: a precision, "cpu"; "": nothing changes

    @property
    def name(self) -> str:
        """``precision backing_store device``, as in a plan's text."""
        return f"{self.precision} {self.backing_store} {self.device}"

    @property
    def locked_bytes(self) -> int:
        """Page-locked bytes that the backing store holds."""
        return 0 if self.backing_store == "pageable" else self.host_bytes


@dataclass(frozen=True, slots=True)
class ComponentNumbers:
    """A component: its parameters, its classes of blocks in call order, and the variants the graph allows.

    ``layers``: the same component cut into layers, where that can be done; ``granularity`` says how this one is cut.
    """

    name: str
    parameters: int
    groups: tuple[BlockGroup, ...]
    variants: tuple[Variant, ...]
    basis: Basis = "declared"
    granularity: Granularity = "blocks"
    layers: ComponentNumbers | None = None

    def weight_bytes(self, variant: int = 0) -> int:
        """Bytes on the device when all blocks of ``variant`` are present."""
        return sum(len(k.blocks) * b for k, b in zip(self.groups, self.variants[variant].block_bytes, strict=True))

    def held_as(self, variant: str) -> ComponentNumbers:
        """The component with the variant of this name alone, its layers too; nothing need be allowed for it any more."""
        kept = tuple(replace(of, needs="") for of in self.variants if of.name == variant)
        layers = self.layers and self.layers.held_as(variant)
        return replace(self, variants=kept, layers=layers if layers and layers.streamable else None)

    @property
    def streamable(self) -> bool:
        """Whether one of the variants may be streamed."""
        return any(variant.streamable for variant in self.variants)


@dataclass(frozen=True, slots=True)
class Use:
    """How a phase uses a component.

    ``calls``: entries from outside. ``group_calls[k]``: in how many of them the blocks of class k run (0: not needed here).
    ``seconds[k]``: compute of ONE block of class k in ONE call. ``order``: the compute of one call as it happens, as (class, block
    in it, seconds), the rest's before, between and behind the blocks'; empty: class after class, block after block.
    ``passes[k]``: how often a block of class k runs in one call (empty: once); ``seconds`` are of all of them. ``beside_bytes[k]``:
    the most that lives beyond weights, values and carry while a block of class k runs (empty: as much as at any time).
    ``layers``: the same use of the component cut into layers.
    """

    component: str
    calls: int
    group_calls: tuple[int, ...]
    seconds: tuple[float, ...]
    order: tuple[tuple[int, int, float], ...] = ()
    passes: tuple[int, ...] = ()
    beside_bytes: tuple[int, ...] = ()
    layers: Use | None = None

    def passes_of(self, number: int) -> int:
        """How often a block of class ``number`` runs in one call."""
        return self.passes[number] if self.passes else 1

    def group_calls_in(self, part: str) -> tuple[int, ...]:
        """Calls per class in ``part``: at most one in ``first``, the others in ``rest``, none in ``load``."""
        if part == "first":
            return tuple(min(1, n) for n in self.group_calls)
        return tuple(max(0, n - 1) for n in self.group_calls) if part == "steady" else tuple(0 for _ in self.group_calls)


@dataclass(frozen=True, slots=True)
class PhaseNumbers:
    """A stretch of a stage in which the same components are entered, from its first entry to the next phase's first entry.

    ``live_in_bytes``: device bytes at its entry beyond weights and `values` (the op's inputs and locals); they bind the load slot.
    ``first_bytes``, ``steady_bytes``: the most that lives beyond weights, values and carry, up to and during the first call of
    every component, and during the others. ``glue_bytes``: as much of them as lives there where all components compute on the
    CPU: what the op's own code makes, and what the calls return.
    """

    stage: str
    index: int
    uses: tuple[Use, ...]
    live_in_bytes: int
    first_bytes: int
    steady_bytes: int
    basis: Basis = "traced"
    glue_bytes: int = 0

    @property
    def name(self) -> str:
        """``stage/index:component+component``, the phase's name in a plan's text."""
        return f"{self.stage}/{self.index}:{'+'.join(use.component for use in self.uses)}"

    @property
    def steady_calls(self) -> int:
        """The most calls any of its components has beyond the first; 0 means that there is no rest slot."""
        return max((use.calls - 1 for use in self.uses), default=0)


@dataclass(frozen=True, slots=True)
class ValueNumbers:
    """A value between stages: device bytes, and the phases (inclusive indices into `Problem.phases`) at whose entry it lives."""

    name: str
    nbytes: int
    producer: str
    consumers: tuple[str, ...]
    first_phase: int
    last_phase: int
    basis: Basis = "traced"


@dataclass(frozen=True, slots=True)
class Directive:
    """What is demanded of a component, whether it saves time or not.

    pin       its backing store is pinned
    keep      every block is on the device from its first use to the end of the run
    exclude   no block that can be streamed stays: all of them pass through the ring in every call
    whole     not streamed: whole on the device in every slot that computes with it
    drop      on the device in its own phases only, loaded anew for each of them

        phase     a        b        a
        keep      ####     ####     ####
        exclude   ~~~~              ~~~~     # held   ~ streamed
        whole     ####     (may)    ####
        drop      (may)             (may)
    """

    placement: Placement
    component: str


@dataclass(frozen=True, slots=True)
class StageOption:
    """Another way to run ``stage``: its phases where ``name`` (tiling, slicing, ...) is chosen in place of the plain way.

    ``needs``: what must be allowed, since the output changes; "": nothing changes.
    """

    stage: str
    name: str
    phases: tuple[PhaseNumbers, ...]
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything a plan depends on. Equal problems have equal digests, and equal plans. ``directives``: as `directed` puts them.

    The first variant of a component, the phases and the order of stages as they stand are what a graph says plainly; `apply_choices` turns
    a problem and a plan's choices into a problem that has just these. ``runs`` above 1 makes it a session: a first run, and
    ``runs - 1`` further ones that begin with what is on the device and the host by then.
    """

    graph: str
    graph_digest: str
    settings: tuple[tuple[str, str], ...]
    hardware: Hardware
    budget_bytes: int
    ram_bytes: int
    components: tuple[ComponentNumbers, ...]
    phases: tuple[PhaseNumbers, ...]
    values: tuple[ValueNumbers, ...] = ()
    versions: tuple[tuple[str, str], ...] = field(default=())
    directives: tuple[Directive, ...] = ()
    reserve_bytes: int = 0  # of the budget, left to other programs
    until: str = ""  # the stage that the graph was cut behind; "": the whole graph
    precomputed: tuple[str, ...] = ()  # stages whose outputs are handed in: neither planned nor run
    pinned_bytes: int | None = None  # budget of page-locked RAM; None: what RAM allows
    disk_bytes: int | None = None  # budget of bytes to be written to disk; None: none is set
    runs: int = 1
    precedence: tuple[tuple[str, str], ...] | None = None  # (earlier, later) stages; None: the order of the phases
    options: tuple[StageOption, ...] = ()
    allow: tuple[str, ...] = ()  # what of the variants' and options' needs may be used
    commits: tuple[tuple[str, str], ...] = ()  # (repository, commit) of what weights are read from, where that is known

    @property
    def overhead_bytes(self) -> int:
        """What of the budget no tensor may use: context, workspace and the reserve."""
        return self.hardware.context_bytes + self.hardware.workspace_bytes + self.reserve_bytes

    @property
    def effective_bytes(self) -> int:
        """What tensors may use: the budget (or the capacity, if less) minus context, workspace and the reserve."""
        return min(self.budget_bytes, self.hardware.capacity_bytes) - self.overhead_bytes

    def component(self, name: str) -> ComponentNumbers:
        """The component called ``name``; KeyError if there is none."""
        for numbers in self.components:
            if numbers.name == name:
                return numbers
        raise KeyError(name)

    def value_bytes(self, phase: int) -> int:
        """Bytes of the values that live on the device when phase number ``phase`` is entered."""
        return sum(v.nbytes for v in self.values if v.first_phase <= phase <= v.last_phase)

    def demanded(self, component: str) -> frozenset[Placement]:
        """What directives demand of ``component``."""
        return frozenset(of.placement for of in self.directives if of.component == component)

    def usable(self, component: ComponentNumbers) -> tuple[int, ...]:
        """Indices of the variants that a plan may choose: what they need is allowed, and the backing store pinned where demanded."""
        pinned = "pin" in self.demanded(component.name)
        return tuple(
            index
            for index, variant in enumerate(component.variants)
            if (not variant.needs or variant.needs in self.allow) and (variant.backing_store == "pinned" or not pinned)
        )

    @property
    def digest(self) -> str:
        """SHA-256 over the canonical JSON form, first 16 hexadecimal digits. What came later counts only where it is used, so that
        plans made before keep their digests."""
        return _digest_of(_Itself(self))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary, complete: an equal problem can be made from it."""
        return asdict(self)


class _Itself:
    """A problem that is equal to itself alone: 1 and 1.0 are equal, their JSON forms are not."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.problem is other.problem

    def __hash__(self) -> int:
        return id(self.problem)


@functools.lru_cache(maxsize=16)  # asked for with every plan that is made or checked
def _digest_of(itself: _Itself) -> str:
    text = json.dumps(_used(asdict(itself.problem)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _used(content: Any) -> Any:
    """``content`` without the `LATER` fields that have their defaults."""
    if isinstance(content, dict):
        return {key: _used(value) for key, value in content.items() if key not in LATER or value != LATER[key]}
    return [_used(item) for item in content] if isinstance(content, (list, tuple)) else content

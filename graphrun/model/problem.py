"""A `Problem`: the sizes, times and limits a plan is computed from. Pure, frozen data: no torch, no
I/O.

A problem is complete: its JSON form is enough to reproduce a plan, for example in a bug report.

    components    weights: groups of equal blocks, in call order; tensors outside all blocks form a
    group of one, the remainder phases        activation: bytes beyond those that are live at the
    phase's entry values        tensors that flow between stages, with the phases in which they are
    live on the device

    bytes on the device while a phase runs
    |                   .-- activation --.
    |  values + inputs    ___    ___
    |  __________________|   |__|   |_____
    |  weights: resident + loaded + ring buffer
    +-------------------------------------------> slots: load | first | steady
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from graphrun.model.phase_trace import PhaseTrace

Granularity = Literal["blocks", "layers"]
Basis = Literal["measured", "traced", "declared", "prior"]
BackingStore = Literal["pinned", "pageable", "disk"]
Placement = Literal["pin", "keep", "exclude", "whole", "drop"]

# Device allocations are multiples of this many bytes (kMinBlockSize of PyTorch's CUDA caching
# allocator; sim uses the same).
ALLOCATION_BYTES = 512

# Seconds computed with a prior are within this share of most published ones, of sources that it was
# not fitted on (benchmarks/results/published.json).
PRIOR_ERROR = 0.25

# Fields that the JSON form leaves out where they are empty: those of further devices, and what few
# calibrations measure.
_OPTIONAL = (
    "secondaries",
    "transfer",
    "secondary_bytes",
    "live_tensors",
    "secondary",
    "compiled_gain",
)


def _fields_of(record: Any) -> dict[str, Any]:
    """A dataclass as `json` writes it; it calls this for each. `dataclasses.asdict` copies every
    number, which takes seconds."""
    pairs = ((of.name, getattr(record, of.name)) for of in fields(record))
    return {name: of for name, of in pairs if of or name not in _OPTIONAL}


@dataclass(frozen=True, slots=True)
class KernelRates:
    """What kernels reach on a card, by class (`graphrun.profile.costs`), beside
    `Hardware.flops_per_second` and `Hardware.memory_bytes_per_second`. FLOPs per second; matrix
    products in fp32 do not use TF32, convolutions do, as in PyTorch.
    """

    fp32_flops_per_second: float
    convolution_flops_per_second: float
    fp32_convolution_flops_per_second: float
    attention_flops_per_second: float  # its matrix products alone
    exponentials_per_second: float  # of attention's softmax
    fp8_flops_per_second: float  # 0: no tensor cores for fp8
    int8_flops_per_second: float
    multiprocessors: int
    wave_seconds: float  # that a wave of tiles takes beside its multiplications
    bfloat16: bool = True  # False: products in bfloat16 take as long as in fp32


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device and its links to host and disk. Units: bytes, bytes per second, floating point
    operations per second."""

    name: str
    device: str  # "cuda" or "sim"
    capacity_bytes: int
    context_bytes: int  # of the driver context, before the first tensor; 0 on sim
    workspace_bytes: int  # of cuBLAS; 0 on sim
    h2d_bytes_per_second: float  # from page-locked memory
    pageable_bytes_per_second: float
    d2h_bytes_per_second: float
    bidirectional: float  # fraction of h2d bandwidth left while a d2h copy runs
    disk_bytes_per_second: float
    flops_per_second: (
        float  # of large matrix products in 16 bits, as achieved, not from the data sheet
    )
    # whether convolutions use workspace that the dispatcher does not see (cuDNN does)
    convolution_scratch: bool = True
    caching_allocator: bool = True  # whether a caching allocator reserves more than is allocated
    cpu_flops_per_second: float = 3e11  # of all host cores together, 16-bit
    memory_bytes_per_second: float = 1e12  # device memory, read or write
    # latency of one copy between host and device, independent of its size
    copy_start_seconds: float = 0.0
    launch_seconds: float = 0.0  # of the host, to launch a kernel or a copy
    page_lock_seconds: float = 0.0  # to page-lock one byte of host memory
    spares_large_copies: bool = False  # whether convolutions avoid copying outputs of 2 GiB or more
    # of a caching allocator: size of its pages, relative to those of PyTorch's
    page_scale: float = 1.0
    # None: all FLOPs take the same time, and nothing else takes any (sim)
    kernels: KernelRates | None = None
    d2h_pageable_bytes_per_second: float = (
        1e9  # to pageable memory that is newly allocated, as ``.to("cpu")`` does
    )
    # seconds of a transformer block over those of its compiled code; 0: not measured
    compiled_gain: float = 0.0
    basis: Basis = "prior"

    @property
    def label(self) -> str:
        """Device and name, as keys of cached outputs have them."""
        return f"{self.device} {self.name}"

    def seconds_range(self, seconds: float) -> tuple[float, float]:
        """The range in which ``seconds`` computed with these rates probably are; a single number
        unless they are a prior's."""
        factor = 1 + PRIOR_ERROR if self.basis == "prior" else 1.0
        return seconds / factor, seconds * factor


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Blocks of equal size that are called one after another. In a component split into layers:
    equal layers of one child module, whose calls may alternate with those of the child's other
    layers.

    ``blocks``: module paths in the order of their first calls. A tensor belongs to the block with
    the longest path that is a prefix of the tensor's name; the path ``""`` holds all remaining
    tensors. A group that is not streamable has one block, which is either resident or absent.
    ``secondary``: number of the secondary device that the blocks of a split component compute on
    (`graphrun.model.splits`).
    """

    name: str
    blocks: tuple[str, ...]
    streamable: bool
    secondary: int = 0


@dataclass(frozen=True, slots=True)
class Variant:
    """How a component is held: precision x backing store x compute device. Tuples have one entry
    per block group.

    backing store   in RAM                        copying a block to the device       read from disk
    pinned          host_bytes, page-locked       load_seconds                        by a `Read`
    action; before the run if
                                                                                      read_seconds
                                                                                      is ()
    pageable        host_bytes                    load_seconds (slower)               likewise disk
    host_bytes of bounce buffer,  disk_seconds to read, overlapping   at every copy; the bounce
    buffer exists
                    page-locked                   load_seconds to copy                from the start

    A variant that computes on the CPU is never copied to the device; its backing store is read
    before the component is called. One that computes on a secondary device is copied there, is
    never streamed, and its seconds and rates are those of the secondary device.
    """

    precision: str
    backing_store: BackingStore
    device: str  # where it computes: "device", "cpu", or a secondary device: "device1", "device2"
    block_bytes: tuple[int, ...]  # of one block on the device
    load_seconds: tuple[float, ...]  # to copy one block to the device
    host_bytes: int
    movable: bool = True  # False: once loaded, it stays on the device until the end
    streamable: bool = True
    read_seconds: tuple[float, ...] = ()  # to read one block from disk into the backing store
    disk_seconds: tuple[float, ...] = ()  # to read one block from disk for each copy
    block_seconds: tuple[
        float, ...
    ] = ()  # extra compute of one block in one call: dequantization; negative: faster
    slowdown: float = 1.0  # factor on compute time: the device's rate over the CPU's
    scratch_bytes: int = 0  # extra activation while the component computes
    transient_bytes: int = 0  # extra RAM while the backing store is read from disk
    stored_bytes: int = 0  # written to disk for this variant
    read_bytes: tuple[int, ...] = ()  # size of one block in the files, if not block_bytes
    needs: str = (
        ""  # permission required because the output changes: a precision or "cpu"; "": none
    )

    @property
    def name(self) -> str:
        """``precision backing_store device``, as in a plan's text."""
        return f"{self.precision} {self.backing_store} {self.device}"

    @property
    def secondary(self) -> int:
        """Number of the secondary device that it computes on, from 1; 0: the device itself, or the
        CPU."""
        number = self.device.removeprefix("device")
        return int(number) if number.isdecimal() else 0

    @property
    def locked_bytes(self) -> int:
        """Page-locked bytes of the backing store."""
        return 0 if self.backing_store == "pageable" else self.host_bytes


@dataclass(frozen=True, slots=True)
class ComponentNumbers:
    """A component: number of parameters, block groups in call order, and the variants that the
    graph offers.

    ``granularity``: what the groups consist of. ``layers``: the same component split into layers,
    None if that is not possible.
    """

    name: str
    parameters: int
    groups: tuple[BlockGroup, ...]
    variants: tuple[Variant, ...]
    basis: Basis = "declared"
    granularity: Granularity = "blocks"
    layers: ComponentNumbers | None = None

    def weight_bytes(self, variant: int = 0) -> int:
        """Device bytes of all blocks of variant number ``variant``."""
        return sum(
            len(k.blocks) * b
            for k, b in zip(self.groups, self.variants[variant].block_bytes, strict=True)
        )

    def stored_as(self, variant: str, *, anywhere: bool = False) -> ComponentNumbers:
        """The component, and its `layers`, with only the variant of this name, which no longer
        requires a permission. ``anywhere``: if that computes on the device or a secondary device,
        also those that differ from it in which of these they compute on."""
        names, weights = {variant}, variant.rpartition(" ")[0]
        if anywhere and not variant.endswith(" cpu"):
            names |= {
                of.name
                for of in self.variants
                if of.device != "cpu" and of.name.rpartition(" ")[0] == weights
            }
        kept = tuple(replace(of, needs="") for of in self.variants if of.name in names)
        layers = self.layers and self.layers.stored_as(variant, anywhere=anywhere)
        return replace(self, variants=kept, layers=layers if layers and layers.streamable else None)

    @property
    def streamable(self) -> bool:
        """Whether at least one variant may be streamed."""
        return any(variant.streamable for variant in self.variants)


class LiveTensor(NamedTuple):
    """A tensor of ``nbytes`` that blocks of a call get or return.

    ``maker``: number of the block that makes it; 0: other code. ``users``: numbers of the blocks
    that get it, sorted, and 0 first where other code may read it. Blocks are numbered from 1 in
    call order, without the remainder. ``given``: it is there before the call.

        block    1        2       code      3          tensor  maker  users a        makes -> gets
        a       1      (2,)      stays where both are b                 makes --> reads
        b       2      (0,)      crosses back c                           makes --> gets     c
        0      (3,)      crosses to where 3 is d        gets     gets                gets     d
        0      (1, 2, 3) crosses once
    """

    nbytes: int
    maker: int
    users: tuple[int, ...]
    given: bool = False


@dataclass(frozen=True, slots=True)
class Use:
    """How a phase uses a component. Indices k are block groups.

    ``calls``: calls of the component. ``group_calls[k]``: calls in which the blocks of group k run
    (0: not needed in this phase). ``seconds[k]``: compute of ONE block of group k in ONE call, all
    its passes together. ``order``: compute of one call in order, as (group, block within it,
    seconds), with the remainder's compute before, between and after the blocks; empty: group by
    group, block by block. ``passes[k]``: how often a block of group k runs in one call; empty:
    once. ``layers``: the same use with the component split into layers. ``transfer``: bytes of the
    tensors that one call gets and of those that it returns, which cross to a secondary device and
    back where it computes there; only in problems with secondary devices. ``live_tensors``: those
    that pass between the blocks of a call, and between them and other code; empty where blocks may
    not compute on several devices, and without secondary devices.
    """

    component: str
    calls: int
    group_calls: tuple[int, ...]
    seconds: tuple[float, ...]
    order: tuple[tuple[int, int, float], ...] = ()
    passes: tuple[int, ...] = ()
    layers: Use | None = None
    transfer: tuple[int, ...] = ()
    live_tensors: tuple[LiveTensor, ...] = ()

    def passes_of(self, number: int) -> int:
        """How often a block of group ``number`` runs in one call."""
        return self.passes[number] if self.passes else 1

    def calls_in(self, part: str) -> int:
        """Calls of the component in the slot ``part``."""
        return {"first": min(1, self.calls), "steady": max(0, self.calls - 1)}.get(part, 0)

    def group_calls_in(self, part: str) -> tuple[int, ...]:
        """Calls per group in the slot ``part``: at most one in ``first``, all others in ``steady``,
        none elsewhere."""
        if part == "first":
            return tuple(min(1, n) for n in self.group_calls)
        return (
            tuple(max(0, n - 1) for n in self.group_calls)
            if part == "steady"
            else tuple(0 for _ in self.group_calls)
        )


@dataclass(frozen=True, slots=True)
class PhaseNumbers:
    """A part of a stage in which the same components are called, from its first call to the first
    call of the next phase.

    ``input_bytes``: device bytes live at its entry beyond weights and `values`: the op's inputs and
    locals. They count in the load slot too. ``first_bytes``, ``steady_bytes``: peak bytes beyond
    weights, values and inputs bytes, up to the end of every component's first call, and after it.
    ``pipeline_code_bytes``: that peak if all components compute on the CPU: tensors made by the
    op's own code, and what the calls return. ``secondary_bytes``: per secondary device, bytes of
    activation and of what crossed to it, in the first and in the steady slot; `apply_choices` sets
    it.
    """

    stage: str
    index: int
    uses: tuple[Use, ...]
    input_bytes: int
    first_bytes: int
    steady_bytes: int
    basis: Basis = "traced"
    pipeline_code_bytes: int = 0
    trace: PhaseTrace = PhaseTrace()
    secondary_bytes: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        """``stage/index:component+component``, the phase's name in a plan's text."""
        return f"{self.stage}/{self.index}:{'+'.join(use.component for use in self.uses)}"

    @property
    def steady_calls(self) -> int:
        """Calls after the first, of the component with the most; 0 means that the phase has no
        steady slot."""
        return max((use.calls - 1 for use in self.uses), default=0)


@dataclass(frozen=True, slots=True)
class ValueNumbers:
    """A value that flows between stages. ``nbytes``: on the device. It is live at the entry of the
    phases ``first_phase`` to ``last_phase`` (inclusive indices into `Problem.phases`)."""

    name: str
    nbytes: int
    producer: str
    consumers: tuple[str, ...]
    first_phase: int
    last_phase: int
    basis: Basis = "traced"
    storages: tuple[int, ...] = ()  # keys in the phases' traces

    def copy_seconds(self, hardware: Hardware, *, to_host: bool) -> float:
        """To copy it to the host or back. It is not page-locked there. One copy for each
        storage."""
        rate = hardware.d2h_bytes_per_second if to_host else hardware.h2d_bytes_per_second
        return len(self.storages) * hardware.copy_start_seconds + self.nbytes / min(
            rate, hardware.pageable_bytes_per_second
        )


@dataclass(frozen=True, slots=True)
class Directive:
    """A placement that every plan must follow for a component, even if another one is faster.

    pin       the backing store is pinned keep      all blocks stay on the device from their first
    use to the end of the run exclude   no streamable block stays on the device: all are streamed in
    every call whole     never streamed: all blocks are on the device in every slot that computes
    with the component drop      on the device during its own phases only, and loaded again for each
    of them

        phase     a        b        a
        keep      ####     ####     ####
        exclude   ~~~~              ~~~~     # resident   ~ streamed
        whole     ####     (may)    ####
        drop      (may)             (may)
    """

    placement: Placement
    component: str


@dataclass(frozen=True, slots=True)
class StageOption:
    """An alternative way to run ``stage``: ``phases`` replace the stage's own if ``name`` (tiling,
    slicing, ...) is chosen.

    ``needs``: permission required because the output changes; "": none.
    """

    stage: str
    name: str
    phases: tuple[PhaseNumbers, ...]
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Secondary:
    """A further device of the machine, on which components, or blocks of one, may compute. Nothing
    is streamed to it."""

    hardware: Hardware
    budget_bytes: int

    @property
    def effective_bytes(self) -> int:
        """Bytes for tensors: the smaller of budget and capacity, minus context and workspace; not
        below 0."""
        hardware = self.hardware
        return max(
            0,
            min(self.budget_bytes, hardware.capacity_bytes)
            - hardware.context_bytes
            - hardware.workspace_bytes,
        )


@dataclass(frozen=True)
class Problem:
    """Everything a plan depends on. Equal problems have equal digests and equal plans.

    A component's first variant, ``phases`` and their order are the graph's defaults;
    `apply_choices` returns the problem with a plan's choices in their place. ``directives``:
    sorted, as `directed` returns them. ``runs`` above 1 makes the problem a session: a first run,
    and ``runs - 1`` runs that start with the device and host state that the previous run left.
    ``secondaries``: further devices, numbered from 1 in `Variant.device`.
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
    reserve_bytes: int = 0  # part of the budget left to other programs
    until: str = ""  # last stage of a truncated graph; "": the whole graph
    precomputed: tuple[
        str, ...
    ] = ()  # stages whose outputs are precomputed: neither planned nor run
    pinned_bytes: int | None = None  # limit of page-locked RAM; None: ram_bytes
    disk_bytes: int | None = None  # limit of bytes written to disk; None: no limit
    runs: int = 1
    # (earlier, later) stages; None: the order is fixed
    precedence: tuple[tuple[str, str], ...] | None = None
    options: tuple[StageOption, ...] = ()
    allow: tuple[
        str, ...
    ] = ()  # permissions granted, of those in Variant.needs and StageOption.needs
    commits: tuple[tuple[str, str], ...] = ()  # (repository, commit) of the weights, where known
    secondaries: tuple[Secondary, ...] = ()

    @property
    def overhead_bytes(self) -> int:
        """Bytes of the budget that are not for tensors: context, workspace and reserve."""
        return self.hardware.context_bytes + self.hardware.workspace_bytes + self.reserve_bytes

    def vram_option(self, nbytes: int) -> str:
        """``--vram`` with ``nbytes`` for the device, and the budgets of the secondary devices as
        they are."""
        if not self.secondaries:
            return str(nbytes)
        return ",".join(
            f"{of}B" for of in (nbytes, *(secondary.budget_bytes for secondary in self.secondaries))
        )

    @property
    def effective_bytes(self) -> int:
        """Bytes for tensors: the smaller of budget and capacity, minus context, workspace and
        reserve."""
        return min(self.budget_bytes, self.hardware.capacity_bytes) - self.overhead_bytes

    @property
    def counts_pages(self) -> bool:
        """Whether peaks are in pages: the device's allocator reserves these, and every phase has a
        trace."""
        return self.hardware.caching_allocator and all(phase.trace.first for phase in self.phases)

    def transfer_seconds(self, secondary: int, transfer: Sequence[int]) -> tuple[float, float]:
        """Seconds in which the two numbers of bytes ``transfer`` get to a secondary device and back
        (`Use.transfer`).

        A copy between two cards without direct access to each other passes through the host, a part
        at a time, at the rate of the slower one (CUDA driver API, ``cuMemcpyPeer``)."""
        if not transfer:
            return 0.0, 0.0
        one, other = self.hardware, self.secondaries[secondary - 1].hardware
        ways = zip(transfer, ((one, other), (other, one)), strict=True)
        found = [
            a.copy_start_seconds + n / min(a.d2h_bytes_per_second, b.h2d_bytes_per_second)
            if n
            else 0.0
            for n, (a, b) in ways
        ]
        return found[0], found[1]

    def tensors_cross_seconds(
        self, secondary: int, to: Sequence[int], back: Sequence[int]
    ) -> tuple[float, float]:
        """As `transfer_seconds`, for tensors of so many bytes each, one copy for each."""
        there = sum(self.transfer_seconds(secondary, (nbytes, 0))[0] for nbytes in to)
        return there, sum(self.transfer_seconds(secondary, (0, nbytes))[1] for nbytes in back)

    def component(self, name: str) -> ComponentNumbers:
        """The component called ``name``; KeyError if there is none."""
        for numbers in self.components:
            if numbers.name == name:
                return numbers
        raise KeyError(name)

    def value_bytes(self, phase: int) -> int:
        """Bytes of all values that are live on the device at the entry of phase number
        ``phase``."""
        return sum(v.nbytes for v in self.values if v.first_phase <= phase <= v.last_phase)

    def demanded(self, component: str) -> frozenset[Placement]:
        """Placements that directives demand of ``component``."""
        return frozenset(of.placement for of in self.directives if of.component == component)

    def usable(self, component: ComponentNumbers) -> tuple[int, ...]:
        """Indices of the variants that a plan may choose: permitted, and with a pinned backing
        store if ``pin`` is demanded."""
        pinned = "pin" in self.demanded(component.name)
        return tuple(
            index
            for index, variant in enumerate(component.variants)
            if (not variant.needs or variant.needs in self.allow)
            and (variant.backing_store == "pinned" or not pinned)
        )

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON form, first 16 hexadecimal digits."""
        return hashlib.sha256(
            json.dumps(self, default=_fields_of, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """A JSON-serializable dictionary from which an equal problem can be made. That of a problem
        with one device does not mention others."""
        plain: dict[str, Any] = json.loads(json.dumps(self, default=_fields_of))
        return plain

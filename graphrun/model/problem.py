"""A `Problem`: the sizes, times and limits from which a plan is computed. Pure, frozen data.

A problem is complete: its JSON form is enough to reproduce a plan, for example in a bug report.

    components    weights: groups of equal blocks, in call order; tensors outside all blocks form a
                  group of one, the unblocked weights
    phases        activation: bytes beyond those that are live at the start of the phase
    values        tensors that flow between stages, with the phases in which they are live on the
                  device

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from graphrun.model.canonical import Canonical
from graphrun.model.hardware import Basis, Hardware
from graphrun.model.phase_trace import PhaseTrace
from graphrun.units import PAGE_BYTES

Granularity = Literal["blocks", "layers"]
BackingStoreKind = Literal["pinned", "pageable", "disk", "file"]
ComponentPlacement = Literal["pin", "keep", "exclude", "whole", "drop"]

# Device allocations are multiples of this (kMinBlockSize of PyTorch's CUDA caching allocator; sim
# uses the same).
ALLOCATION_BYTES = 512
# On a CPU the kernel's memory for a process counts too: eight bytes of page tables per page, stacks
# of threads, file objects, and charges in batches. A run of FLUX at 8 GiB took 18 MiB where page
# tables are 16 MiB. This is four times the page tables, as a margin.
BYTES_PER_KERNEL_BYTE = PAGE_BYTES // 32

# left out of the JSON form if empty, because few problems have them
_OPTIONAL = (
    "secondaries",
    "transfer",
    "secondary_bytes",
    "live_tensors",
    "secondary",
    "copy_of",
    "pairs",
    "compiled_gain",
    "dtypes",
    "serial_copies",
    "first_touch_seconds",
    "lost_seconds",
    "tables",
    "unfolds_bfloat16",
)


def _fields_of(record: Any) -> dict[str, Any]:
    """Return a dataclass's fields for `json`; `dataclasses.asdict` slowly copies numbers."""
    pairs = (
        (record_field.name, getattr(record, record_field.name)) for record_field in fields(record)
    )
    plain = {name: value for name, value in pairs if value or name not in _OPTIONAL}
    if isinstance(record, Hardware) and record.unified == record.kind.is_host:
        del plain["unified"]  # as in problems that are older than the field
    return plain


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Blocks of equal size that are called one after another.

    With layers: equal layers of one child module, whose calls may alternate with its other layers.

    ``blocks``: module paths in the order of first calls. A tensor belongs to the block with the
    longest path that is a prefix of its name; the path ``""`` stands for all other tensors. A group
    that is not streamable has one block, which is either resident or absent. ``secondary``: number
    of the device on which blocks of a split component compute.
    """

    name: str
    blocks: tuple[str, ...]
    streamable: bool
    secondary: int = 0

    @property
    def is_unblocked(self) -> bool:
        """Whether the only block is the weights outside of any block, with the path ``""``."""
        return "" in self.blocks


@dataclass(frozen=True, slots=True)
class Variant:
    """Form of a component: precision x backing store x compute device. Tuples are per block group.

    backing store   in RAM                 copy of a block to device   read from disk
    pinned          host_bytes,            load_seconds                by a `Read` action; before
                    page-locked                                        the run if read_seconds is ()
    pageable        host_bytes             load_seconds (slower)       as pinned
    disk            bounce buffer of       disk_seconds to read,       at every copy; the bounce
                    host_bytes,            overlapping load_seconds    buffer exists from the start
                    page-locked            to copy
    file            nothing                load_seconds to read the    the copy is the read (only on
                                           block into device memory    unified memory)

    A variant on the CPU is never copied to the device; its backing store is read before the
    component is called. A variant on a secondary device is copied there, with that device's seconds
    and rates, and never streamed.
    """

    precision: str
    backing_store: BackingStoreKind
    device: str  # where it computes: "device", "cpu", or a secondary device: "device1", "device2"
    block_bytes: tuple[int, ...]  # of one block on the device
    load_seconds: tuple[float, ...]  # to copy one block to the device
    host_bytes: int
    movable: bool = True  # False: once loaded, it stays on the device until the end
    streamable: bool = True
    read_seconds: tuple[float, ...] = ()  # to read one block from disk into the backing store
    disk_seconds: tuple[float, ...] = ()  # to read one block from disk for each copy
    # extra compute of one block in one call, such as dequantization; negative: faster
    block_seconds: tuple[float, ...] = ()
    slowdown: float = 1.0  # factor on compute time: the device's rate over the CPU's
    scratch_bytes: int = 0  # extra activation while the component computes
    transient_bytes: int = 0  # extra RAM while the backing store is read from disk
    stored_bytes: int = 0  # written to disk for this variant
    read_bytes: tuple[int, ...] = ()  # size of one block in the files, if not block_bytes
    # of compute that streaming one block takes, where the same cores do both
    lost_seconds: tuple[float, ...] = ()
    # names of embedding tables that stay in their files; their rows are read when looked up
    tables: tuple[str, ...] = ()
    # permission required because the output changes: a precision or "cpu"; "": none
    needs: str = ""

    @property
    def name(self) -> str:
        """As in a plan's text."""
        return f"{self.precision} {self.backing_store} {self.device}"

    @property
    def secondary(self) -> int:
        """Number of the secondary device on which the variant computes; 0: none."""
        number = self.device.removeprefix("device")
        return int(number) if number.isdecimal() else 0

    @property
    def is_read_by_plan(self) -> bool:
        """Whether a `Read` action fills the backing store; otherwise it exists before the run."""
        return bool(self.read_seconds)

    @property
    def locked_bytes(self) -> int:
        return 0 if self.backing_store == "pageable" else self.host_bytes


@dataclass(frozen=True, slots=True)
class ComponentNumbers:
    """A component: block groups in call order, and the variants of the graph.

    ``granularity``: whether the groups consist of blocks or layers. ``layers``: the same component
    split into layers; None if that is not possible. ``copy_of``: the component whose weights this
    copy on a secondary device has (`graphrun.model.copies`).
    """

    name: str
    parameters: int
    groups: tuple[BlockGroup, ...]
    variants: tuple[Variant, ...]
    basis: Basis = "graph file"
    granularity: Granularity = "blocks"
    layers: ComponentNumbers | None = None
    copy_of: str = ""

    def weight_bytes(self, variant: int = 0) -> int:
        """Return the device bytes of all blocks of variant number ``variant``."""
        return sum(
            len(k.blocks) * b
            for k, b in zip(self.groups, self.variants[variant].block_bytes, strict=True)
        )

    def stored_as(self, variant: str, *, anywhere: bool = False) -> ComponentNumbers:
        """Return the component with only this variant, which then needs no permission.

        ``anywhere``: also keep variants that differ from it only in the device (main or secondary).
        """
        names, weights = {variant}, variant.rpartition(" ")[0]
        if anywhere and not variant.endswith(" cpu"):
            names |= {
                candidate.name
                for candidate in self.variants
                if candidate.device != "cpu" and candidate.name.rpartition(" ")[0] == weights
            }
        variants = tuple(
            replace(candidate, needs="") for candidate in self.variants if candidate.name in names
        )
        layers = self.layers and self.layers.stored_as(variant, anywhere=anywhere)
        return replace(
            self, variants=variants, layers=layers if layers and layers.streamable else None
        )

    @property
    def streamable(self) -> bool:
        return any(variant.streamable for variant in self.variants)


class LiveTensor(NamedTuple):
    """A tensor that blocks of a call receive or return.

    ``maker``: number of the block that produces it; 0: other code. ``users``: sorted numbers of the
    blocks that receive it, with 0 if other code may read it. Blocks are numbered from 1 in call
    order, without the unblocked weights. ``is_input``: it exists before the call.

        block    1        2       code      3       tensor  maker  users
        a        makes -> gets                      a       1      (2,)       stays on one device
        b                 makes --> reads           b       2      (0,)       is transferred back
        c                           makes --> gets  c       0      (3,)       to the device of 3
        d        gets     gets                gets  d       0      (1, 2, 3)  is transferred once
    """

    nbytes: int
    maker: int
    users: tuple[int, ...]
    is_input: bool = False


@dataclass(frozen=True, slots=True)
class Use:
    """How a phase uses a component. Indices k are block groups.

    ``calls``: calls of the component. ``group_calls[k]``: calls in which the blocks of group k run;
    0: not needed in this phase. ``seconds[k]``: compute of ONE block of group k in ONE call, all
    its passes together. ``passes[k]``: runs of a block in one call; empty: 1. ``order``: compute of
    one call as (group, block within it, seconds), with the unblocked weights before, between and
    after the blocks; empty: group by group, block by block. ``layers``: the same use with layers.

    Only with secondary devices: ``transfer``, bytes of the tensors that one call on such a device
    receives and returns; ``live_tensors``, passed between blocks of a call, and between blocks and
    other code. No live tensors: the blocks may not compute on several devices. ``pairs``: two calls
    follow one another in each step, and the second needs nothing from the first; factors of the
    first and of the second on ``seconds``.
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
    pairs: tuple[float, ...] = ()

    def passes_of(self, number: int) -> int:
        return self.passes[number] if self.passes else 1

    def calls_in(self, part: str) -> int:
        """Return the calls of the component in the slot ``part``."""
        return {"first": min(1, self.calls), "steady": max(0, self.calls - 1)}.get(part, 0)

    def group_calls_in(self, part: str) -> tuple[int, ...]:
        """Return the calls per group: at most one in ``first``, the others in ``steady``."""
        if part == "first":
            return tuple(min(1, n) for n in self.group_calls)
        return (
            tuple(max(0, n - 1) for n in self.group_calls)
            if part == "steady"
            else tuple(0 for _ in self.group_calls)
        )


@dataclass(frozen=True, slots=True)
class PhaseNumbers:
    """A part of a stage in which the same components are called.

    It lasts from its first call to the next phase's first call. ``input_bytes``: device bytes live
    at its start beyond weights and `values`: inputs and locals of the op, also in the load slot.
    ``first_bytes``, ``steady_bytes``: peak bytes beyond weights, values and inputs, up to the end
    of every component's first call, and after it. ``pipeline_code_bytes``: the same peak if all
    components compute on the CPU: tensors of the op's own code, and results of the calls.
    ``secondary_bytes``: per secondary device, activation and transferred tensors in the first and
    the steady slot; set by `apply_choices`.
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
        return f"{self.stage}/{self.index}:{'+'.join(use.component for use in self.uses)}"

    @property
    def steady_calls(self) -> int:
        """Calls after the first, of the component with the most calls; 0: no steady slot."""
        return max((use.calls - 1 for use in self.uses), default=0)

    def activation_bytes(self, part: str) -> int:
        """Return the peak activation in the slot ``part``; 0 without compute."""
        return {"first": self.first_bytes, "steady": self.steady_bytes}.get(part, 0)


@dataclass(frozen=True, slots=True)
class ValueNumbers:
    """A value that flows between stages.

    It is live at the start of phases ``first_phase`` to ``last_phase``, indices into
    `Problem.phases`.
    """

    name: str
    nbytes: int
    producer: str
    consumers: tuple[str, ...]
    first_phase: int
    last_phase: int
    basis: Basis = "traced"
    storages: tuple[int, ...] = ()  # keys in the phases' traces

    def copy_seconds(self, hardware: Hardware, *, to_host: bool) -> float:
        """Return the seconds to copy the value to or from pageable memory, one copy per storage."""
        rate = hardware.d2h_bytes_per_second if to_host else hardware.h2d_bytes_per_second
        return len(self.storages) * hardware.copy_start_seconds + self.nbytes / min(
            rate, hardware.pageable_bytes_per_second
        )


@dataclass(frozen=True, slots=True)
class Directive:
    """A placement that every plan must follow for a component, even if another one is faster.

    pin       the backing store is pinned
    keep      all blocks stay on the device from their first use to the end of the run
    exclude   no streamable block stays on the device: all are streamed in every call
    whole     never streamed: all blocks are on the device in every slot that uses the component
    drop      on the device during its own phases only, and loaded again for each of them

        phase     a        b        a
        keep      ####     ####     ####
        exclude   ~~~~              ~~~~     # resident   ~ streamed
        whole     ####     (may)    ####
        drop      (may)             (may)
    """

    placement: ComponentPlacement
    component: str


@dataclass(frozen=True, slots=True)
class StageOption:
    """An alternative way to run ``stage``, such as tiling: ``phases`` replace the stage's own.

    ``needs``: permission required because the output changes; "": none.
    """

    stage: str
    name: str
    phases: tuple[PhaseNumbers, ...]
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Secondary:
    """A further device, on which components or blocks compute. Nothing is streamed to it."""

    hardware: Hardware
    budget_bytes: int

    @property
    def effective_bytes(self) -> int:
        """Bytes for tensors: the smaller of budget and capacity, minus context and workspace."""
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

    A component's first variant, ``phases`` and their order are the graph's defaults, which
    `apply_choices` replaces. ``directives``: as `directed` returns them. ``runs`` above 1 makes a
    session: a first run, and ``runs - 1`` further runs that start with the device and host state of
    the previous run. ``secondaries``: numbered from 1 in `Variant.device`.
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
    dtypes: tuple[tuple[str, str], ...] = ()  # as `Graph.dtypes`
    absent: tuple[str, ...] = ()  # as `Graph.absent`
    # stages whose outputs are precomputed: neither planned nor run
    precomputed: tuple[str, ...] = ()
    pinned_bytes: int | None = None  # limit of page-locked RAM; None: ram_bytes
    disk_bytes: int | None = None  # limit of bytes written to disk; None: no limit
    runs: int = 1
    # (earlier, later) stages; None: the order is fixed
    precedence: tuple[tuple[str, str], ...] | None = None
    options: tuple[StageOption, ...] = ()
    # granted permissions, from Variant.needs and StageOption.needs
    allow: tuple[str, ...] = ()
    commits: tuple[tuple[str, str], ...] = ()  # (repository, commit) of the weights, where known
    secondaries: tuple[Secondary, ...] = ()

    @property
    def overhead_bytes(self) -> int:
        hardware = self.hardware
        return (
            hardware.context_bytes
            + hardware.workspace_bytes
            + self.kernel_bytes
            + self.reserve_bytes
        )

    @property
    def kernel_bytes(self) -> int:
        """Bytes that the kernel uses for a process and counts as its memory; 0 on cards.

        Mostly page tables. The kernel keeps a table for each huge page too, in case it has to split
        the page.
        """
        return self.budget_bytes // BYTES_PER_KERNEL_BYTE if self.hardware.unified else 0

    def budget_for(self, tensor_bytes: int) -> int:
        """Return the smallest budget that leaves ``tensor_bytes``, whatever the capacity."""
        nbytes = replace(self, budget_bytes=0).overhead_bytes + tensor_bytes
        if not self.hardware.unified:
            return nbytes
        # the kernel's part of the budget
        return nbytes + (nbytes - 1) // (BYTES_PER_KERNEL_BYTE - 1)

    def with_budget(self, nbytes: int) -> Problem:
        """Return the problem with another device budget (and host, if memory is unified)."""
        ram_bytes = nbytes if self.hardware.unified else self.ram_bytes
        return replace(self, budget_bytes=nbytes, ram_bytes=ram_bytes)

    def budget_change(self, nbytes: int) -> tuple[str, str]:
        """Return the option and its value that set the device's budget to ``nbytes``."""
        if not self.secondaries:
            return self.hardware.budget_option, str(nbytes)
        sizes = (nbytes, *(secondary.budget_bytes for secondary in self.secondaries))
        return self.hardware.budget_option, ",".join(f"{size}B" for size in sizes)

    @property
    def effective_bytes(self) -> int:
        """Bytes for tensors: the smaller of budget and capacity, minus `overhead_bytes`."""
        return min(self.budget_bytes, self.hardware.capacity_bytes) - self.overhead_bytes

    @property
    def counts_pages(self) -> bool:
        """Whether peaks are counted in pages: an allocator with pages, and complete traces."""
        return self.hardware.caching_allocator and all(phase.trace.first for phase in self.phases)

    def transfer_seconds(self, secondary: int, transfer: Sequence[int]) -> tuple[float, float]:
        """Return the seconds to transfer these bytes (`Use.transfer`) to a device and back.

        A copy between two cards without direct access to each other passes through the host, a part
        at a time, at the rate of the slower link (CUDA driver API, ``cuMemcpyPeer``).
        """
        if not transfer:
            return 0.0, 0.0
        main, secondary_hardware = self.hardware, self.secondaries[secondary - 1].hardware
        ways = zip(transfer, ((main, secondary_hardware), (secondary_hardware, main)), strict=True)
        seconds = [
            a.copy_start_seconds + n / min(a.d2h_bytes_per_second, b.h2d_bytes_per_second)
            if n
            else 0.0
            for n, (a, b) in ways
        ]
        return seconds[0], seconds[1]

    def tensor_transfer_seconds(
        self, secondary: int, to_bytes: Sequence[int], back_bytes: Sequence[int]
    ) -> tuple[float, float]:
        """Return `transfer_seconds` of tensors with these bytes, one copy each."""
        to_seconds = sum(self.transfer_seconds(secondary, (nbytes, 0))[0] for nbytes in to_bytes)
        return to_seconds, sum(
            self.transfer_seconds(secondary, (0, nbytes))[1] for nbytes in back_bytes
        )

    def component(self, name: str) -> ComponentNumbers:
        """Return the component called ``name``; raises KeyError."""
        for numbers in self.components:
            if numbers.name == name:
                return numbers
        raise KeyError(name)

    def value_bytes(self, phase: int) -> int:
        """Return the bytes of all values that are live at the start of ``phase``."""
        return sum(v.nbytes for v in self.values if v.first_phase <= phase <= v.last_phase)

    def demanded(self, component: str) -> frozenset[ComponentPlacement]:
        return frozenset(
            directive.placement for directive in self.directives if directive.component == component
        )

    def named_variants(self, names: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        """Return `Plan.variants` from ``names``, which has a variant for each component."""
        return tuple(
            (component.name, names[component.name])
            for component in self.components
            if len(component.variants) > 1
        )

    def usable(self, component: ComponentNumbers) -> tuple[int, ...]:
        """Return the indices of the variants that permissions and ``pin`` directives allow."""
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
        return hashlib.sha256(_CANONICAL.json(self).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dictionary from which an equal problem can be made."""
        plain: dict[str, Any] = json.loads(json.dumps(self, default=_fields_of))
        return plain


@dataclass(frozen=True, slots=True)
class ProblemLimits:
    """Limits of a problem, which also depends on graph, inputs and hardware; None: no limit.

    ``keeps_quantized``: a run keeps the weights that it quantizes in files, for later runs.
    """

    budget_bytes: int
    ram_bytes: int
    pinned_bytes: int | None = None
    disk_bytes: int | None = None
    runs: int = 1
    allow: tuple[str, ...] = ()
    secondaries: tuple[Secondary, ...] = ()
    keeps_quantized: bool = False

    @property
    def backing_stores(self) -> tuple[str, ...]:
        """Backing stores to consider: pageable memory only if pinned memory is limited."""
        return ("pinned", "disk") if self.pinned_bytes is None else ("pinned", "pageable", "disk")


_CANONICAL = Canonical(
    _fields_of, (Problem, PhaseNumbers, StageOption), (ComponentNumbers, Use, PhaseTrace)
)

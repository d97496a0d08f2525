"""Simulates a plan: bytes and seconds per slot and per block. The only source of a plan's peak and
time.

Works on the problem with the plan's choices applied (`apply_choices`). Three channels run
concurrently, each one block after another; a barrier ends every slot. Bytes on the device: weights
resident or loaded by the slot, ring buffers, activation, values and inputs bytes; the highest sum
of a slot is its peak. A secondary device has a copy channel of its own; its loads are issued in the
order of all. The compute channel is shared, since one device at a time computes; a call on a
secondary device, and each block there of one that is split, begins and ends with what crosses to it
and back.

Copy channel and compute (`Timeline`):

    copy     |d3 |s8 |s9 |f |s1 |  |s2 |  |s8 |f            s  streamed: waits for compute with the
    blocks it overwrites compute      |  d3  |  s8   |  s9  |  s1   |  s2  |     d  loaded by the
    slot that computes with it
             ^ start                                        f  prefetch: loaded for a later slot

Streamed blocks, and blocks that the slot loads for itself, are copied in call order, across calls.
A prefetch is copied when the ring buffer is full, in proportion to the streamed bytes, and only
once it is in RAM; from a backing store on disk, the next block is read meanwhile. The executor uses
the same rule, since it cannot know how long copies take. Remaining prefetches come last, those
whose backing store is read in the same slot after the others. Prefetches from pageable memory are
the last: the host waits for their copies, and has then queued all of the slot's compute. For the
same reason a block is copied from pageable memory when the host has queued what comes before it. A
block's compute waits for its copy; on the CPU, for its read in the same slot.

Disk channel (`DiskChannel`), with reads into backing stores (r) and fetches for copies from backing
stores on disk (d, s). Memory is page-locked while it is filled, and copied from when both are done:

    disk   |d3  |d8  |r a|s1  |r b|r b|      one after another copy        |d3  |d8    |s1  |
    a block's copy waits for its own fetch, or for its own read

A fetched block occupies its component's bounce buffer until it is copied; a fetch waits for room
there. Reads into backing stores take place when a bounce buffer is full, in proportion to the
fetched bytes, as a prefetch does beside streamed blocks; those that a copy or a computation waits
for are done at once, and the others last.

RAM (`HostMemory`), in bytes per slot:

    slot      0       1       2       3 te        ####    ####    drop                  read before
    the run dit                T###   ####    ####          T  transient bytes while the backing
    store is read embeds                    ####    ####          spilled in 2, restored in 3
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Literal, NamedTuple

from graphrun.errors import PlanError
from graphrun.model.choices import apply_choices, reorder
from graphrun.model.plan import (
    Blocks,
    Drop,
    Evict,
    Load,
    Plan,
    Read,
    Restore,
    Run,
    Slot,
    Spill,
    Stream,
)
from graphrun.model.problem import (
    ALLOCATION_BYTES,
    ComponentNumbers,
    PhaseNumbers,
    Problem,
    Use,
    Variant,
)
from graphrun.model.ring_buffer import RingBuffer
from graphrun.model.simulation import Moment, Simulation, SlotReport
from graphrun.model.splits import transfers
from graphrun.trace import Event
from graphrun.units import round_up

Key = tuple[str, int, int]  # component, block group, block within the group


@dataclass(frozen=True, slots=True)
class Size:
    """A block: ``nbytes`` on the device, ``seconds`` to copy it there; ``disk_seconds`` to read its
    ``read_bytes`` from disk, into its backing store or for its copy."""

    nbytes: int
    seconds: float
    disk_seconds: float = 0.0
    read_bytes: int = 0


class DiskChannel:
    """Reads from disk in one slot, from ``start_seconds`` on.

    ``reads``: blocks to read into backing stores, in order. ``bounce_bytes``: size of the bounce
    buffer of each component whose backing store is on disk. ``fetch_bytes``: bytes that the slot
    will fetch for copies. ``locked_seconds``: component -> when the memory that it is read into is
    page-locked; copies wait for that, and reads do not. ``spans``: (``read`` or ``fetch``, block,
    start, end).
    """

    def __init__(
        self,
        start_seconds: float,
        reads: Iterable[Key],
        sizes: Mapping[Key, Size],
        bounce_bytes: Mapping[str, int],
        fetch_bytes: int,
        locked_seconds: Mapping[str, float],
    ) -> None:
        self.spans: list[tuple[str, Key, float, float]] = []
        self.free_seconds = self._start = start_seconds
        self._sizes, self._locked = sizes, locked_seconds
        self._reads = list(reversed(list(reads)))  # still to do; the next one is last
        self._read_components = {key[0] for key in self._reads}
        self._all_read_bytes, self._all_fetch_bytes = (
            sum(sizes[key].nbytes for key in self._reads),
            fetch_bytes,
        )
        self._read_bytes = self._fetched_bytes = 0
        self._read_end: dict[Key, float] = {}
        self._bounce_ring_buffers = {
            name: RingBuffer(nbytes) for name, nbytes in bounce_bytes.items()
        }
        # of each fetched block
        self._copy_ends: dict[str, list[float]] = {name: [] for name in bounce_bytes}
        self._fetch_ends: dict[Key, float] = {}  # of fetches started ahead of their copies
        if not fetch_bytes:
            self.finish()

    @property
    def end_seconds(self) -> float:
        """When all that was started is done."""
        return max(self.free_seconds, *self._locked.values(), self._start)

    def in_ram(self, key: Key) -> float:
        """When the block is in RAM for a copy: the end of its fetch (one per copy), or of its read
        and of the page locking; the slot's start without either."""
        if key[0] not in self._bounce_ring_buffers:
            return max(self._read_until(key), self._locked.get(key[0], self._start))
        self.start_fetch(key)
        return self._fetch_ends.pop(key)

    def start_fetch(self, key: Key) -> None:
        """Start the fetch for the block's next copy, unless it was started. No effect if its
        backing store is not on disk."""
        if key[0] in self._bounce_ring_buffers and key not in self._fetch_ends:
            self._fetch_ends[key] = self._fetch(key)

    def is_in_ram(self, key: Key, at_seconds: float) -> bool:
        """Whether the block is in RAM at that time, by the reads and fetches started so far."""
        if key[0] in self._bounce_ring_buffers:
            return self._fetch_ends.get(key, at_seconds + 1.0) <= at_seconds
        never = at_seconds + 1.0
        read = key[0] not in self._read_components or self._read_end.get(key, never) <= at_seconds
        return read and self._locked.get(key[0], at_seconds) <= at_seconds

    def reads(self, component: str) -> bool:
        """Whether the component's backing store is read in this slot."""
        return component in self._read_components

    def copied(self, key: Key, end_seconds: float) -> None:
        """Record the end of the block's copy, which frees its bytes in the bounce buffer."""
        if key[0] in self._bounce_ring_buffers:
            self._copy_ends[key[0]].append(end_seconds)

    def finish(self) -> None:
        """Do all remaining reads into backing stores."""
        while self._reads:
            self._read_next()

    def _read_until(self, key: Key) -> float:
        """The end of the block's read; the slot's start if its backing store is not read in this
        slot."""
        if key[0] not in self._read_components:
            return self._start
        while key not in self._read_end:
            self._read_next()
        return self._read_end[key]

    def _read_next(self) -> None:
        key = self._reads.pop()
        self._read_bytes += self._sizes[key].nbytes
        self._read_end[key] = self._occupy("read", key, self._start)

    def _fetch(self, key: Key) -> float:
        try:
            released = self._bounce_ring_buffers[key[0]].place(self._sizes[key].nbytes).released
        except ValueError as error:
            raise PlanError(f"the bounce buffer of {key[0]}: {error}") from error
        if released:
            while (
                self._reads
                and self._read_bytes * self._all_fetch_bytes
                <= self._fetched_bytes * self._all_read_bytes
            ):
                self._read_next()
        self._fetched_bytes += self._sizes[key].nbytes
        return self._occupy(
            "fetch", key, self._copy_ends[key[0]][released[-1]] if released else self._start
        )

    def _occupy(self, kind: str, key: Key, ready: float) -> float:
        start = max(self.free_seconds, ready)
        self.free_seconds = start + self._sizes[key].disk_seconds
        self.spans.append((kind, key, start, self.free_seconds))
        return self.free_seconds


Source = Literal["resident", "load", "stream", "host"]


class Work(NamedTuple):
    """Compute of one block in call number ``call`` of its component. ``source``: how the block gets
    to the device; ``host``: not at all, since the component computes on the CPU."""

    key: Key
    seconds: float
    call: int
    source: Source


class Span(NamedTuple):
    """An interval of time: ``load`` or ``stream`` of a block, or ``run`` of a call, whose first
    block is ``key``."""

    kind: str
    key: Key
    call: int
    start_seconds: float
    end_seconds: float


class Timeline:
    """Copies and compute of one slot, from ``start_seconds`` on.

    ``works``: all compute in order. ``prefetch``: blocks loaded for later slots, in order.
    ``ring_buffer_bytes``: per streamed component. ``copies_from_seconds``: when copies may begin,
    after spills and restores. ``pageable``: components whose backing stores are pageable.
    ``secondaries``: number of the secondary device of each (component, block group) that computes
    on one; ``transfers``: by component that computes there, seconds in which what a call needs gets
    there, and its results back; and its calls. ``hops``: the same seconds of each block on a
    secondary device.
    """

    def __init__(
        self,
        start_seconds: float,
        works: Sequence[Work],
        prefetch: Iterable[Key],
        sizes: Mapping[Key, Size],
        ring_buffer_bytes: Mapping[str, int],
        disk: DiskChannel,
        copies_from_seconds: float,
        pageable: Collection[str] = (),
        secondaries: Mapping[tuple[str, int], int] = MappingProxyType({}),
        transfers: Mapping[str, tuple[float, float, int]] = MappingProxyType({}),
        hops: Mapping[Key, tuple[float, float]] = MappingProxyType({}),
    ) -> None:
        self.copies: list[Span] = []
        self.calls: dict[tuple[str, int], Span] = {}
        self._sizes, self._disk = sizes, disk
        self._compute_free = self._start = start_seconds  # when the compute channel is free
        self._secondaries, self._transfers, self._hops = secondaries, transfers, hops
        # when the copy channel of the device, and that of each secondary device, is free
        self._copy_frees = {
            0: copies_from_seconds,
            **dict.fromkeys(secondaries.values(), start_seconds),
        }
        self._prefetch = sorted(prefetch, key=lambda key: (key[0] in pageable, disk.reads(key[0])))[
            ::-1
        ]
        self._pageable = pageable
        self._prefetch_bytes = sum(sizes[key].nbytes for key in self._prefetch)
        self._stream_bytes = sum(
            sizes[work.key].nbytes for work in works if work.source == "stream"
        )
        self._prefetched_bytes = self._streamed_bytes = 0
        self._load_ends: dict[Key, float] = {}
        self._ring_buffers = {
            name: RingBuffer(nbytes) for name, nbytes in ring_buffer_bytes.items()
        }
        # of each placed block
        self._compute_ends: dict[str, list[float]] = {name: [] for name in ring_buffer_bytes}
        streamed = [work for work in works if work.source == "stream"]
        # of the streamed blocks of each component, in order
        sizes_of = {name: list[int]() for name in ring_buffer_bytes}
        for work in streamed:
            sizes_of[work.key[0]].append(sizes[work.key].nbytes)
        # bytes of the block behind each one
        self._following = {name: iter(of[1:]) for name, of in sizes_of.items()}
        for (name, call), of in groupby(works, key=lambda work: (work.key[0], work.call)):
            self._call(name, call, list(of))
        ran = Counter(name for name, _ in self.calls)
        for name, (to_secondary, back, calls) in transfers.items():  # of calls that run no block
            self._compute_free += (calls - ran[name]) * (to_secondary + back)
        while self._prefetch:
            self._issue_prefetch()
        disk.finish()
        self.end_seconds = max(*self._copy_frees.values(), self._compute_free, disk.end_seconds)

    def _call(self, name: str, call: int, works: Sequence[Work]) -> None:
        """Compute of one call of a component, with the copies that it waits for."""
        began: float | None = None
        to_secondary, back, _ = self._transfers.get(name, (0.0, 0.0, 0))
        self._compute_free += to_secondary
        hops = {work.key: self._hops[work.key] for work in works if work.key in self._hops}
        for work in works:
            to_block, back_from_block = hops.pop(work.key, (0.0, 0.0))
            self._compute_free += to_block
            if work.source != "resident":
                self._compute_free = max(self._compute_free, self._available(work))
            began = self._compute_free if began is None else began
            self._compute_free += work.seconds + back_from_block
            if work.source == "stream":
                self._compute_ends[name].append(self._compute_free)
        self._compute_free += back
        span = self.calls.get((name, call), Span("run", works[0].key, call, began or 0.0, 0.0))
        self.calls[name, call] = span._replace(end_seconds=self._compute_free)

    def _available(self, work: Work) -> float:
        """When the block of ``work`` is available to compute with."""
        if work.source == "stream":
            return self._stream(work.key)
        if work.source == "host":
            return self._disk.in_ram(work.key)
        if work.key not in self._load_ends:
            self._load_ends[work.key] = self._copy("load", work.key, self._disk.in_ram(work.key))
        return self._load_ends[work.key]

    def _stream(self, key: Key) -> float:
        try:
            ring_buffer_slot = self._ring_buffers[key[0]].place(
                self._sizes[key].nbytes, next(self._following[key[0]], 0)
            )
        except ValueError as error:
            raise PlanError(f"stream {key[0]}: {error}") from error
        ready = (
            self._compute_ends[key[0]][ring_buffer_slot.released[-1]]
            if ring_buffer_slot.released
            else self._start
        )
        if ring_buffer_slot.released:
            self._issue_due_prefetch(self._copy_frees[0])
            self._issue_due_prefetch(max(self._copy_frees[0], ready))
        self._streamed_bytes += self._sizes[key].nbytes
        return self._copy("stream", key, max(ready, self._disk.in_ram(key)))

    def _issue_due_prefetch(self, at_seconds: float) -> None:
        """Issue prefetches in proportion to the streamed bytes, up to the first block that is not
        in RAM at that time."""
        while self._prefetch:
            self._disk.start_fetch(self._prefetch[-1])
            due = (
                self._prefetched_bytes * self._stream_bytes
                <= self._streamed_bytes * self._prefetch_bytes
            )
            if (
                not due
                or self._prefetch[-1][0] in self._pageable
                or not self._disk.is_in_ram(self._prefetch[-1], at_seconds)
            ):
                break
            self._issue_prefetch(at_seconds)

    def _issue_prefetch(self, at_seconds: float = 0.0) -> None:
        key = self._prefetch.pop()
        self._prefetched_bytes += self._sizes[key].nbytes
        self._copy("load", key, max(at_seconds, self._disk.in_ram(key)))

    def _copy(self, kind: str, key: Key, ready: float) -> float:
        secondary = self._secondaries.get(key[:2], 0)
        start = max(self._copy_frees[secondary], ready)
        end = self._copy_frees[secondary] = start + self._sizes[key].seconds
        self._disk.copied(key, end)
        self.copies.append(Span(kind, key, 0, start, end))
        return end


class HostMemory:
    """RAM in use, at first that before the run. ``reordered``: problem with order and options
    applied; ``applied``: all choices."""

    def __init__(self, applied: Problem, reordered: Problem) -> None:
        self._variants = {component.name: component.variants[0] for component in applied.components}
        self._values = {value.name: value.nbytes for value in applied.values}
        used = {use.component for phase in applied.phases for use in phase.uses}
        self._held = {
            name
            for name, variant in self._variants.items()
            if name in used and _in_ram_before_run(variant)
        }
        self._spilled: set[str] = set()
        self._on_cpu = {
            phase.name: phase for phase in reordered.phases if self._computes_on_cpu(phase)
        }

    def slot(self, slot: Slot) -> tuple[int, int]:
        """Apply the slot's actions. Returns its peak bytes in RAM and its page-locked bytes."""
        actions = slot.actions
        self._held -= {action.component for action in actions if isinstance(action, Drop)}
        reading = {action.component for action in actions if isinstance(action, Read)}
        self._held |= reading
        self._spilled |= {action.value for action in actions if isinstance(action, Spill)}
        nbytes = sum(self._variants[name].host_bytes for name in self._held)
        nbytes += sum(self._variants[name].transient_bytes for name in reading)
        nbytes += sum(self._values[name] for name in self._spilled)
        if slot.phase in self._on_cpu:
            phase = self._on_cpu[slot.phase]
            nbytes += {"first": phase.first_bytes, "steady": phase.steady_bytes}.get(slot.part, 0)
        self._spilled -= {action.value for action in actions if isinstance(action, Restore)}
        return nbytes, sum(self._variants[name].locked_bytes for name in self._held)

    def spilled_bytes(self, slot: Slot) -> int:
        """Bytes of values that are on the host only throughout ``slot``. To be called before
        `slot`."""
        restored = {action.value for action in slot.actions if isinstance(action, Restore)}
        return sum(self._values[name] for name in self._spilled - restored)

    def _computes_on_cpu(self, phase: PhaseNumbers) -> bool:
        return bool(phase.uses) and all(
            self._variants[use.component].device == "cpu" for use in phase.uses
        )


def _in_ram_before_run(variant: Variant) -> bool:
    return variant.backing_store == "disk" or not variant.read_seconds


def simulate(problem: Problem, plan: Plan) -> Simulation:
    """Bytes and seconds of ``plan``, which should be valid by `check`.

    Raises PlanError if the plan cannot be executed at all: a needed block is not available or does
    not fit its ring buffer, a name is unknown, or the problem does not have or allow a choice.
    """
    applied = apply_choices(problem, plan)
    state = _State(
        applied, HostMemory(applied, reorder(problem, plan.order, dict(plan.options))), plan.finds
    )
    first = tuple(state.slot(index, slot) for index, slot in enumerate(plan.slots))
    seconds = state.now
    again = tuple(
        state.slot(index, slot) for index, slot in enumerate(plan.again, start=len(plan.slots))
    )
    return Simulation(
        applied,
        tuple(state.moments),
        first,
        tuple(state.events),
        seconds,
        again,
        state.now - seconds,
    )


class _State:
    """State of the simulation: blocks on the device (at first ``finds``), host memory, time. `slot`
    advances it by one slot."""

    def __init__(
        self, problem: Problem, host: HostMemory, finds: Iterable[tuple[str, Blocks]]
    ) -> None:
        self.problem, self.host = problem, host
        self.components = {component.name: component for component in problem.components}
        self.phases = {phase.name: (index, phase) for index, phase in enumerate(problem.phases)}
        self.values = {value.name: value for value in problem.values}
        self.sizes: dict[Key, Size] = {}
        for component in problem.components:
            variant = component.variants[0]
            read = variant.disk_seconds or variant.read_seconds or (0.0,) * len(variant.block_bytes)
            held = variant.read_bytes or variant.block_bytes
            for key in self._keys(component.name, None):
                k = key[1]
                self.sizes[key] = Size(
                    variant.block_bytes[k], variant.load_seconds[k], read[k], held[k]
                )
        self.pageable = {
            of.name for of in problem.components if of.variants[0].backing_store == "pageable"
        }
        self.secondaries = {
            (of.name, k): secondary
            for of in problem.components
            for k, group in enumerate(of.groups)
            if (secondary := of.variants[0].secondary or group.secondary)
        }
        self.resident = {key for name, blocks in finds for key in self._keys(name, blocks)}
        self.now = 0.0
        self.events: list[Event] = []
        self.moments: list[Moment] = []

    def slot(self, index: int, slot: Slot) -> SlotReport:
        start = self.now
        keys = [
            self._keys(a.component, a.blocks) if isinstance(a, Load | Evict) else []
            for a in slot.actions
        ]
        evicted = [
            key
            for action, of in zip(slot.actions, keys, strict=True)
            if isinstance(action, Evict)
            for key in of
        ]
        loads = [
            key
            for action, of in zip(slot.actions, keys, strict=True)
            if isinstance(action, Load)
            for key in of
        ]
        ring_buffers = {
            action.component: action.ring_buffer_bytes
            for action in slot.actions
            if isinstance(action, Stream)
        }
        value_copies, copies_from = self._value_copies(index, slot)
        self.resident -= set(evicted)
        works, activation, values = self._works(index, slot, set(loads), ring_buffers)
        used = {work.key for work in works}
        disk = self._disk(slot, [*loads, *(work.key for work in works if work.source == "stream")])
        later = (key for key in loads if key not in used)
        transfers, hops = self._transfers(slot)
        line = Timeline(
            start,
            works,
            later,
            self.sizes,
            ring_buffers,
            disk,
            copies_from,
            self.pageable,
            self.secondaries,
            transfers,
            hops,
        )
        self.now = line.end_seconds
        held = self._device_bytes(self.resident | set(loads))
        ring_buffer = sum(round_up(nbytes, ALLOCATION_BYTES) for nbytes in ring_buffers.values())
        host, pinned = self.host.slot(slot)
        report = SlotReport(
            phase=slot.phase,
            part=slot.part,
            peak_bytes=held + ring_buffer + activation + values,
            resident_bytes=held,
            ring_buffer_bytes=ring_buffer,
            activation_bytes=activation,
            values_bytes=values,
            streamed_bytes=sum(
                self.sizes[work.key].nbytes for work in works if work.source == "stream"
            ),
            loaded_bytes=sum(self.sizes[key].nbytes for key in loads),
            seconds=self.now - start,
            compute_seconds=sum(work.seconds for work in works),
            restored_bytes=sum(
                event.nbytes for event in value_copies.values() if event.kind == "restore"
            ),
            host_bytes=host,
            pinned_bytes=pinned,
            disk_bytes_read=sum(self.sizes[key].read_bytes for _, key, _, _ in disk.spans),
            secondary_peaks=self._secondary_peaks(slot, self.resident | set(loads)),
        )
        self.events += [self._event(index, Span("evict", key, 0, start, start)) for key in evicted]
        spans = (
            *(Span(kind, key, 0, begin, end) for kind, key, begin, end in disk.spans),
            *line.copies,
            *line.calls.values(),
        )
        timed = [*value_copies.values(), *(self._event(index, span) for span in spans)]
        self.events += sorted(timed, key=lambda event: event.start_seconds)
        self._add_moments(
            index,
            slot,
            keys,
            values + self._device_bytes((*self.resident, *evicted)),
            activation,
            timed,
            start,
        )
        self.resident |= set(loads)
        return report

    def _value_copies(self, index: int, slot: Slot) -> tuple[dict[int, Event], float]:
        """Spills and restores by action number, one after another from the slot's start; and the
        end of the last one."""
        found, now, hardware = dict[int, Event](), self.now, self.problem.hardware
        for number, action in enumerate(slot.actions):
            if isinstance(action, Spill | Restore):
                if action.value not in self.values:
                    raise PlanError(f"slot {index}: the problem has no value {action.value!r}")
                value, spill = self.values[action.value], isinstance(action, Spill)
                end = now + value.copy_seconds(hardware, to_host=spill)
                found[number] = Event(
                    "spill" if spill else "restore", "", index, action.value, value.nbytes, now, end
                )
                now = end
        return found, now

    def _disk(self, slot: Slot, copied: Iterable[Key]) -> DiskChannel:
        """The slot's disk channel: reads of its `Read` actions, and fetches for copies from backing
        stores on disk."""
        reads = [
            key
            for action in slot.actions
            if isinstance(action, Read)
            for key in self._keys(action.component, None)
        ]
        variants = {name: component.variants[0] for name, component in self.components.items()}
        bounce_bytes = {
            name: variant.host_bytes
            for name, variant in variants.items()
            if variant.backing_store == "disk"
        }
        fetch_bytes = sum(self.sizes[key].nbytes for key in copied if key[0] in bounce_bytes)
        locked, now = dict[str, float](), self.now
        for name in dict.fromkeys(key[0] for key in reads):
            if variants[name].locked_bytes:
                now = locked[name] = (
                    now + variants[name].locked_bytes * self.problem.hardware.page_lock_seconds
                )
        return DiskChannel(self.now, reads, self.sizes, bounce_bytes, fetch_bytes, locked)

    def _works(
        self, index: int, slot: Slot, loads: set[Key], ring_buffers: dict[str, int]
    ) -> tuple[list[Work], int, int]:
        """All compute in order, the bytes of activation, and the bytes of values and inputs
        tensors."""
        if slot.part == "end":
            return [], 0, 0
        if slot.phase not in self.phases:
            raise PlanError(f"slot {index}: the problem has no phase {slot.phase!r}")
        number, phase = self.phases[slot.phase]
        source_of = dict[Key, Source]()
        for use in phase.uses:
            on_cpu = self._component(use.component).variants[0].device == "cpu"
            for key in self._keys(use.component, None):
                here: Source = (
                    "resident" if key in self.resident else "load" if key in loads else "stream"
                )
                source_of[key] = "host" if on_cpu else here
        works = [
            Work(key, seconds, call, source_of[key])
            for key, seconds, call in self._blocks_in_order(phase, slot)
        ]
        if missing := next(
            (w.key for w in works if w.source == "stream" and w.key[0] not in ring_buffers), None
        ):
            raise PlanError(
                f"slot {index}: {self._path(missing)} of {missing[0]} is needed, but neither resident, loaded nor streamed"
            )
        activation = {"first": phase.first_bytes, "steady": phase.steady_bytes}.get(slot.part, 0)
        values = self.problem.value_bytes(number) - self.host.spilled_bytes(slot)
        return works, activation, values + phase.input_bytes

    def _blocks_in_order(self, phase: PhaseNumbers, slot: Slot) -> Iterator[tuple[Key, float, int]]:
        """(block, seconds, call) in order: in each call all components in turn. A group runs in its
        first calls only."""
        for call in range(slot.calls):
            for use in phase.uses:
                calls = use.group_calls_in(slot.part)
                for k, i, seconds in use.order or self._in_group_order(use):
                    if call < calls[k]:
                        yield (use.component, k, i), seconds, call

    def _in_group_order(self, use: Use) -> list[tuple[int, int, float]]:
        groups = self._component(use.component).groups
        return [
            (k, i, use.seconds[k]) for k, of in enumerate(groups) for i in range(len(of.blocks))
        ]

    def _add_moments(
        self,
        index: int,
        slot: Slot,
        keys: list[list[Key]],
        held: int,
        activation: int,
        timed: list[Event],
        start: float,
    ) -> None:
        """Append one moment per action. ``held``: bytes on the device before the first action."""
        # by kind, component and what was moved
        moved = defaultdict[tuple[str, str, str], list[Event]](list)
        for event in timed:
            if event.kind in ("load", "read", "spill", "restore"):
                moved[
                    event.kind, event.component, "" if event.kind == "read" else event.detail
                ].append(event)
        for number, (action, of) in enumerate(zip(slot.actions, keys, strict=True)):
            begin = end = start
            if isinstance(action, Evict):
                held -= self._device_bytes(of)
            elif isinstance(action, Run | Stream):
                held += (
                    activation
                    if isinstance(action, Run)
                    else round_up(action.ring_buffer_bytes, ALLOCATION_BYTES)
                )
                end = self.now
            elif not isinstance(action, Drop):
                held += self._device_bytes(of)
                if isinstance(action, Load):
                    keys_moved = [("load", action.component, self._path(key)) for key in of]
                elif isinstance(action, Read):
                    keys_moved = [("read", action.component, "")]
                else:
                    keys_moved = [
                        ("spill" if isinstance(action, Spill) else "restore", "", action.value)
                    ]
                if own := [event for key in keys_moved for event in moved[key]]:
                    begin, end = (
                        min(event.start_seconds for event in own),
                        max(event.end_seconds for event in own),
                    )
            self.moments.append(Moment(index, number, held, begin, end))

    def _component(self, name: str) -> ComponentNumbers:
        if name not in self.components:
            raise PlanError(f"the problem has no component {name!r}")
        return self.components[name]

    def _keys(self, component: str, blocks: Blocks) -> list[Key]:
        groups = self._component(component).groups
        if blocks is None:
            return [(component, k, i) for k, of in enumerate(groups) for i in range(len(of.blocks))]
        index = {of.name: k for k, of in enumerate(groups)}
        for name, indices in blocks:
            if name not in index or any(
                not 0 <= i < len(groups[index[name]].blocks) for i in indices
            ):
                layers = self._component(component).layers
                by_layer = layers is not None and name in {of.name for of in layers.groups}
                why = (
                    ": they are layers, and in this problem it is split into blocks; use `Solution.problem`"
                    if by_layer
                    else ""
                )
                raise PlanError(f"{component} has no blocks {name}{list(indices)}{why}")
        return [(component, index[name], i) for name, indices in blocks for i in indices]

    def _device_bytes(self, keys: Iterable[Key], secondary: int = 0) -> int:
        """Bytes of those of ``keys`` that are for the device, or for a secondary device."""
        own = (key for key in keys if self.secondaries.get(key[:2], 0) == secondary)
        return sum(round_up(self.sizes[key].nbytes, ALLOCATION_BYTES) for key in own)

    def _secondary_peaks(self, slot: Slot, keys: Collection[Key]) -> tuple[int, ...]:
        """Bytes on each secondary device."""
        working = [0] * len(self.problem.secondaries)
        if slot.part in ("first", "steady"):
            working = [
                of[slot.part == "steady"] for of in self.phases[slot.phase][1].secondary_bytes
            ]
        return tuple(
            self._device_bytes(keys, number) + more for number, more in enumerate(working, 1)
        )

    def _transfers(
        self, slot: Slot
    ) -> tuple[dict[str, tuple[float, float, int]], dict[Key, tuple[float, float]]]:
        """For each component that the slot calls on a secondary device, seconds in which arguments
        and results of a call cross, and calls; and for each block on a secondary device of one that
        is split, seconds in which what it gets and gives crosses."""
        whole, hops = dict[str, tuple[float, float, int]](), dict[Key, tuple[float, float]]()
        for use in self.phases[slot.phase][1].uses if slot.part in ("first", "steady") else ():
            component = self._component(use.component)
            if secondary := component.variants[0].secondary:
                whole[use.component] = (
                    *self.problem.transfer_seconds(secondary, use.transfer),
                    use.calls_in(slot.part),
                )
            for (k, i), of in transfers(use, component).items():
                hops[use.component, k, i] = self.problem.tensors_cross_seconds(
                    of.secondary, of.to, of.back
                )
        return whole, hops

    def _path(self, key: Key) -> str:
        return self.components[key[0]].groups[key[1]].blocks[key[2]]

    def _event(self, slot: int, span: Span) -> Event:
        detail = f"call {span.call}" if span.kind == "run" else self._path(span.key)
        nbytes = 0 if span.kind == "run" else self.sizes[span.key].nbytes
        return Event(
            span.kind, span.key[0], slot, detail, nbytes, span.start_seconds, span.end_seconds
        )

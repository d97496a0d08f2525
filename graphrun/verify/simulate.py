"""Simulate a plan: bytes and seconds of every slot and block.

This is the only source of a plan's peak and time. The simulation works on the problem with the
plan's choices applied (`apply_choices`).

Three channels run concurrently: copies, compute and the disk. Each processes one block after
another, and a barrier ends every slot. The bytes on the device are weights (resident or loaded by
the slot), ring buffers, activation, values and inputs. The peak of a slot is their highest sum.

Each secondary device has its own copy channel. The slot's loads are issued in one order for all
devices, but a copy waits only for earlier copies to the same device. All devices share the compute
channel, because one of them computes at a time. A call on a secondary device begins and ends with
transfers between the devices. So does each block there of a split component.

Copy channel and compute (`Timeline`):

    copy     |d3 |s8 |s9 |f |s1 |  |s2 |  |s8 |f     s  streamed: waits for compute with the blocks
    compute      |  d3  |  s8   |  s9  |  s1   |        that it overwrites
             ^ start                                 d  loaded by the slot that computes with it
                                                     f  prefetch: loaded for a later slot

Blocks that are streamed, or loaded for the slot's own compute, are copied in the order in which the
calls compute with them. A prefetch is copied when the ring buffer is full, in proportion to the
streamed bytes, and only once its block is in RAM. If the backing store is on disk, the block is
fetched while the prefetch waits. The rule depends on bytes and not on copy times, because the
executor follows it too and cannot know copy times in advance. Remaining prefetches come after all
other copies; those whose backing store is read in the same slot come last of these.

A copy from pageable memory makes the host wait. Prefetches from pageable memory therefore come at
the very end, when all of the slot's compute is queued. A streamed or loaded block is copied from
pageable memory when all compute before it is queued. The compute of a block waits for its copy; on
the CPU, for its read in the same slot.

Disk channel (`DiskChannel`), with reads into backing stores (r, of blocks a and b) and fetches for
copies from backing stores on disk (d, s):

    disk   |d3  |d8  |r a|s1  |r b|r b|      one after another
    copy        |d3  |d8    |s1  |           a copy waits for the fetch or read of its block

The memory of a backing store is page-locked while blocks are read into it. A copy waits until its
block is read and the memory is page-locked.

A fetched block occupies the bounce buffer of its component until it is copied. A fetch waits for
room there. Reads into backing stores take place when a bounce buffer is full, in proportion to the
fetched bytes, like prefetches between streamed blocks. A read that a copy or a computation waits
for is done at once. The others come last.

RAM (`HostMemory`), in bytes per slot:

    slot      0       1       2       3
    te        ####    ####    drop                  read before the run
    dit                T###   ####    ####          T  transient bytes while the store is read
    embeds                    ####    ####          spilled in 2, restored in 3
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf
from types import MappingProxyType
from typing import Literal, NamedTuple

from graphrun.errors import PlanError
from graphrun.model.blocks import named
from graphrun.model.choices import apply_choices, reorder
from graphrun.model.plan import (
    BlockNames,
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
class BlockSize:
    """Bytes and seconds of a block.

    ``nbytes``: bytes on the device. ``seconds``: time to copy the block there. ``disk_seconds``:
    time to read its ``read_bytes`` from disk, into its backing store or for its copy.
    """

    nbytes: int
    seconds: float
    disk_seconds: float = 0.0
    read_bytes: int = 0


class DiskChannel:
    """Reads from disk in one slot, from ``start_seconds`` on.

    ``reads``: blocks to read into backing stores, in order. ``bounce_bytes``: size of the bounce
    buffer of each component whose backing store is on disk. ``fetch_bytes``: bytes that the slot
    will fetch for copies. ``locked_seconds``: component -> time at which its memory is page-locked;
    copies wait for page locking, reads do not. ``spans``: (``read`` or ``fetch``, block, start,
    end).
    """

    def __init__(
        self,
        start_seconds: float,
        reads: Iterable[Key],
        sizes: Mapping[Key, BlockSize],
        bounce_bytes: Mapping[str, int],
        fetch_bytes: int,
        locked_seconds: Mapping[str, float],
    ) -> None:
        self.spans: list[tuple[str, Key, float, float]] = []
        self.free_from_seconds = self._start = start_seconds
        self._sizes, self._lock_end_seconds = sizes, locked_seconds
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
        # end of the copy of each fetched block
        self._copy_ends: dict[str, list[float]] = {name: [] for name in bounce_bytes}
        self._fetch_ends: dict[Key, float] = {}  # fetches ahead of their copies
        if not fetch_bytes:
            self.finish()

    @property
    def end_seconds(self) -> float:
        """Time at which all reads, fetches and page locking so far are done."""
        return max(self.free_from_seconds, *self._lock_end_seconds.values(), self._start)

    def arrival_seconds(self, key: Key) -> float:
        """Return the time at which the block is in RAM for a copy.

        This is the end of its fetch (one per copy), or of its read and page locking. It is the
        slot's start if there is neither. Starts the fetch, or the reads up to the block, if needed.
        """
        if key[0] not in self._bounce_ring_buffers:
            return max(self._read_until(key), self._lock_end_seconds.get(key[0], self._start))
        self.start_fetch(key)
        return self._fetch_ends.pop(key)

    def start_fetch(self, key: Key) -> None:
        """Start the fetch for the block's next copy, unless it was started.

        No effect if the backing store is not on disk.
        """
        if key[0] in self._bounce_ring_buffers and key not in self._fetch_ends:
            self._fetch_ends[key] = self._fetch(key)

    def is_in_ram(self, key: Key, at_seconds: float) -> bool:
        """Return whether the block is in RAM at that time, given the reads and fetches so far."""
        if key[0] in self._bounce_ring_buffers:
            return self._fetch_ends.get(key, inf) <= at_seconds
        is_read = key[0] not in self._read_components or self._read_end.get(key, inf) <= at_seconds
        return is_read and self._lock_end_seconds.get(key[0], at_seconds) <= at_seconds

    def has_reads_of(self, component: str) -> bool:
        """Return whether the component's backing store is read in this slot."""
        return component in self._read_components

    def record_copy_end(self, key: Key, end_seconds: float) -> None:
        """Record the end of the block's copy, which frees its bytes in the bounce buffer."""
        if key[0] in self._bounce_ring_buffers:
            self._copy_ends[key[0]].append(end_seconds)

    def finish(self) -> None:
        """Do all remaining reads into backing stores."""
        while self._reads:
            self._read_next()

    def _read_until(self, key: Key) -> float:
        """Return the end of the block's read; the slot's start if there is no read in this slot."""
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
            overwritten_placements = (
                self._bounce_ring_buffers[key[0]].place(self._sizes[key].nbytes).released_numbers
            )
        except ValueError as error:
            raise PlanError(f"the bounce buffer of {key[0]}: {error}") from error
        if overwritten_placements:
            while (
                self._reads
                and self._read_bytes * self._all_fetch_bytes
                <= self._fetched_bytes * self._all_read_bytes
            ):
                self._read_next()
        self._fetched_bytes += self._sizes[key].nbytes
        return self._occupy(
            "fetch",
            key,
            self._copy_ends[key[0]][overwritten_placements[-1]]
            if overwritten_placements
            else self._start,
        )

    def _occupy(self, kind: str, key: Key, ready: float) -> float:
        start = max(self.free_from_seconds, ready)
        self.free_from_seconds = start + self._sizes[key].disk_seconds
        self.spans.append((kind, key, start, self.free_from_seconds))
        return self.free_from_seconds


BlockOrigin = Literal["resident", "load", "stream", "host"]


class BlockWork(NamedTuple):
    """Compute of one block in call number ``call`` of its component.

    ``source``: how the block gets to the device. ``host``: the component computes on the CPU.
    """

    key: Key
    seconds: float
    call: int
    source: BlockOrigin


class TimeSpan(NamedTuple):
    """Time interval of the ``load`` or ``stream`` of a block, or the ``run`` of a call.

    ``key``: the block; for a call, its first block.
    """

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
    ``secondaries``: (component, block group) -> number of its secondary device. ``transfers``:
    component on a secondary device -> (seconds to transfer the arguments of a call there, seconds
    to transfer the results back, number of calls). ``hops``: block of a split component on a
    secondary device -> (seconds to transfer its inputs there, seconds to transfer its outputs
    back).
    """

    def __init__(
        self,
        start_seconds: float,
        works: Sequence[BlockWork],
        prefetch: Iterable[Key],
        sizes: Mapping[Key, BlockSize],
        ring_buffer_bytes: Mapping[str, int],
        disk: DiskChannel,
        copies_from_seconds: float,
        pageable: Collection[str] = (),
        secondaries: Mapping[tuple[str, int], int] = MappingProxyType({}),
        transfers: Mapping[str, tuple[float, float, int]] = MappingProxyType({}),
        hops: Mapping[Key, tuple[float, float]] = MappingProxyType({}),
    ) -> None:
        self.copies: list[TimeSpan] = []
        self.calls: dict[tuple[str, int], TimeSpan] = {}
        self._sizes, self._disk = sizes, disk
        self._compute_free = self._start = start_seconds  # when the compute channel is free
        self._secondaries, self._transfers, self._hops = secondaries, transfers, hops
        # times at which the copy channels of the device and the secondary devices are free
        self._copy_frees = {
            0: copies_from_seconds,
            **dict.fromkeys(secondaries.values(), start_seconds),
        }
        self._prefetch = sorted(
            prefetch, key=lambda key: (key[0] in pageable, disk.has_reads_of(key[0]))
        )[::-1]
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
        # end of compute with each placed block
        self._compute_ends: dict[str, list[float]] = {name: [] for name in ring_buffer_bytes}
        streamed_works = [work for work in works if work.source == "stream"]
        # bytes of the streamed blocks of each component, in order
        stream_sizes = {name: list[int]() for name in ring_buffer_bytes}
        for work in streamed_works:
            stream_sizes[work.key[0]].append(sizes[work.key].nbytes)
        # bytes of the block after each streamed block
        self._next_block_bytes = {
            name: iter(block_sizes[1:]) for name, block_sizes in stream_sizes.items()
        }
        for (name, call), call_works in groupby(works, key=lambda work: (work.key[0], work.call)):
            self._call(name, call, list(call_works))
        ran = Counter(name for name, _ in self.calls)
        # Calls that run no block transfer their tensors too.
        for name, (to_secondary_seconds, back_seconds, calls) in transfers.items():
            self._compute_free += (calls - ran[name]) * (to_secondary_seconds + back_seconds)
        while self._prefetch:
            self._issue_prefetch()
        disk.finish()
        self.end_seconds = max(*self._copy_frees.values(), self._compute_free, disk.end_seconds)

    def _call(self, name: str, call: int, works: Sequence[BlockWork]) -> None:
        """Simulate one call of a component, with the copies that it waits for."""
        begin_seconds: float | None = None
        to_secondary_seconds, back_seconds, _ = self._transfers.get(name, (0.0, 0.0, 0))
        self._compute_free += to_secondary_seconds
        hops = {work.key: self._hops[work.key] for work in works if work.key in self._hops}
        for work in works:
            to_block_seconds, from_block_seconds = hops.pop(work.key, (0.0, 0.0))
            self._compute_free += to_block_seconds
            if work.source != "resident":
                self._compute_free = max(self._compute_free, self._available(work))
            begin_seconds = self._compute_free if begin_seconds is None else begin_seconds
            self._compute_free += work.seconds + from_block_seconds
            if work.source == "stream":
                self._compute_ends[name].append(self._compute_free)
        self._compute_free += back_seconds
        span = self.calls.get(
            (name, call), TimeSpan("run", works[0].key, call, begin_seconds or 0.0, 0.0)
        )
        self.calls[name, call] = span._replace(end_seconds=self._compute_free)

    def _available(self, work: BlockWork) -> float:
        """Return the time at which the block of ``work`` is available for compute."""
        if work.source == "stream":
            return self._stream(work.key)
        if work.source == "host":
            return self._disk.arrival_seconds(work.key)
        if work.key not in self._load_ends:
            self._load_ends[work.key] = self._copy(
                "load", work.key, self._disk.arrival_seconds(work.key)
            )
        return self._load_ends[work.key]

    def _stream(self, key: Key) -> float:
        try:
            # the size of the next block, so that it need not overwrite this one
            placement = self._ring_buffers[key[0]].place(
                self._sizes[key].nbytes, next(self._next_block_bytes[key[0]], 0)
            )
        except ValueError as error:
            raise PlanError(f"stream {key[0]}: {error}") from error
        ready = (
            self._compute_ends[key[0]][placement.released_numbers[-1]]
            if placement.released_numbers
            else self._start
        )
        # first prefetches that may start at once, then those that are in RAM while the copy waits
        if placement.released_numbers:
            self._issue_due_prefetch(self._copy_frees[0])
            self._issue_due_prefetch(max(self._copy_frees[0], ready))
        self._streamed_bytes += self._sizes[key].nbytes
        return self._copy("stream", key, max(ready, self._disk.arrival_seconds(key)))

    def _issue_due_prefetch(self, at_seconds: float) -> None:
        """Issue prefetches in proportion to the streamed bytes.

        Stop at the first block that is not in RAM at that time.
        """
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
        self._copy("load", key, max(at_seconds, self._disk.arrival_seconds(key)))

    def _copy(self, kind: str, key: Key, ready: float) -> float:
        secondary = self._secondaries.get(key[:2], 0)
        start = max(self._copy_frees[secondary], ready)
        end = self._copy_frees[secondary] = start + self._sizes[key].seconds
        self._disk.record_copy_end(key, end)
        self.copies.append(TimeSpan(kind, key, 0, start, end))
        return end


class HostMemory:
    """RAM in use, starting before the run.

    ``applied``: the problem with all choices applied. ``reordered``: with order and options only. A
    phase on the CPU has its whole activation only there: in ``applied`` it is the part on the
    device.
    """

    def __init__(self, applied: Problem, reordered: Problem) -> None:
        self._variants = {component.name: component.variants[0] for component in applied.components}
        self._values = {value.name: value.nbytes for value in applied.values}
        used_components = {use.component for phase in applied.phases for use in phase.uses}
        self._stores_in_ram = {
            name
            for name, variant in self._variants.items()
            if name in used_components and _exists_before_run(variant)
        }
        self._spilled_values: set[str] = set()
        self._on_cpu = {
            phase.name: phase for phase in reordered.phases if self._computes_on_cpu(phase)
        }

    def slot(self, slot: Slot) -> tuple[int, int]:
        """Apply the slot's actions. Return its peak bytes in RAM and its page-locked bytes."""
        actions = slot.actions
        self._stores_in_ram -= {action.component for action in actions if isinstance(action, Drop)}
        slot_reads = {action.component for action in actions if isinstance(action, Read)}
        self._stores_in_ram |= slot_reads
        self._spilled_values |= {action.value for action in actions if isinstance(action, Spill)}
        nbytes = sum(self._variants[name].host_bytes for name in self._stores_in_ram)
        nbytes += sum(self._variants[name].transient_bytes for name in slot_reads)
        nbytes += sum(self._values[name] for name in self._spilled_values)
        if slot.phase in self._on_cpu:
            phase = self._on_cpu[slot.phase]
            nbytes += {"first": phase.first_bytes, "steady": phase.steady_bytes}.get(slot.part, 0)
        self._spilled_values -= {action.value for action in actions if isinstance(action, Restore)}
        return nbytes, sum(self._variants[name].locked_bytes for name in self._stores_in_ram)

    def spilled_bytes(self, slot: Slot) -> int:
        """Return the bytes of values that stay spilled throughout ``slot``. Call before `slot`."""
        restored_values = {action.value for action in slot.actions if isinstance(action, Restore)}
        return sum(self._values[name] for name in self._spilled_values - restored_values)

    def _computes_on_cpu(self, phase: PhaseNumbers) -> bool:
        return bool(phase.uses) and all(
            self._variants[use.component].device == "cpu" for use in phase.uses
        )


def _exists_before_run(variant: Variant) -> bool:
    """Whether the backing store needs no `Read` action: it is on disk, or in RAM before the run."""
    return variant.backing_store == "disk" or not variant.read_seconds


def simulate(problem: Problem, plan: Plan) -> Simulation:
    """Return the bytes and seconds of ``plan``, which should be valid by `check`.

    Raises PlanError if the plan cannot be executed at all: a needed block is unavailable or does
    not fit its ring buffer, a name is unknown, or the problem does not have or allow a choice.
    """
    applied = apply_choices(problem, plan)
    state = _State(
        applied, HostMemory(applied, reorder(problem, plan.order, dict(plan.options))), plan.finds
    )
    first_slots = tuple(state.slot(index, slot) for index, slot in enumerate(plan.slots))
    seconds = state.now_seconds
    # one further run, if the plan is of a session
    further_slots = tuple(
        state.slot(index, slot)
        for index, slot in enumerate(plan.further_slots, start=len(plan.slots))
    )
    return Simulation(
        applied,
        tuple(state.moments),
        first_slots,
        tuple(state.events),
        seconds,
        further_slots,
        state.now_seconds - seconds,
    )


class _State:
    """State of the simulation: blocks on the device, host memory and time.

    ``start_blocks``: blocks on the device at the start. `slot` advances the state by one slot.
    """

    def __init__(
        self, problem: Problem, host: HostMemory, start_blocks: Iterable[tuple[str, BlockNames]]
    ) -> None:
        self.problem, self.host = problem, host
        self.components = {component.name: component for component in problem.components}
        self.phases = {phase.name: (index, phase) for index, phase in enumerate(problem.phases)}
        self.values = {value.name: value for value in problem.values}
        self.sizes: dict[Key, BlockSize] = {}
        for component in problem.components:
            variant = component.variants[0]
            read_seconds = (
                variant.disk_seconds or variant.read_seconds or (0.0,) * len(variant.block_bytes)
            )
            read_bytes = variant.read_bytes or variant.block_bytes
            for key in self._keys(component.name, None):
                k = key[1]
                self.sizes[key] = BlockSize(
                    variant.block_bytes[k], variant.load_seconds[k], read_seconds[k], read_bytes[k]
                )
        self.pageable = {
            component.name
            for component in problem.components
            if component.variants[0].backing_store == "pageable"
        }
        self.secondaries = {
            (component.name, k): secondary
            for component in problem.components
            for k, group in enumerate(component.groups)
            if (secondary := component.variants[0].secondary or group.secondary)
        }
        self.resident = {key for name, blocks in start_blocks for key in self._keys(name, blocks)}
        self.now_seconds = 0.0
        self.events: list[Event] = []
        self.moments: list[Moment] = []

    def slot(self, index: int, slot: Slot) -> SlotReport:
        start = self.now_seconds
        keys = [
            self._keys(a.component, a.blocks) if isinstance(a, Load | Evict) else []
            for a in slot.actions
        ]
        evicted = [
            key
            for action, action_keys in zip(slot.actions, keys, strict=True)
            if isinstance(action, Evict)
            for key in action_keys
        ]
        loads = [
            key
            for action, action_keys in zip(slot.actions, keys, strict=True)
            if isinstance(action, Load)
            for key in action_keys
        ]
        ring_buffers = {
            action.component: action.ring_buffer_bytes
            for action in slot.actions
            if isinstance(action, Stream)
        }
        value_copies, copies_from = self._value_copies(index, slot)
        self.resident -= set(evicted)
        works, activation, values = self._works(index, slot, set(loads), ring_buffers)
        used_keys = {work.key for work in works}
        disk = self._disk(slot, [*loads, *(work.key for work in works if work.source == "stream")])
        prefetch_keys = (key for key in loads if key not in used_keys)
        transfers, hops = self._transfers(slot)
        line = Timeline(
            start,
            works,
            prefetch_keys,
            self.sizes,
            ring_buffers,
            disk,
            copies_from,
            self.pageable,
            self.secondaries,
            transfers,
            hops,
        )
        self.now_seconds = line.end_seconds
        weight_bytes = self._device_bytes(self.resident | set(loads))
        ring_buffer = sum(round_up(nbytes, ALLOCATION_BYTES) for nbytes in ring_buffers.values())
        host, pinned = self.host.slot(slot)
        report = SlotReport(
            phase=slot.phase,
            part=slot.part,
            peak_bytes=weight_bytes + ring_buffer + activation + values,
            resident_bytes=weight_bytes,
            ring_buffer_bytes=ring_buffer,
            activation_bytes=activation,
            values_bytes=values,
            streamed_bytes=sum(
                self.sizes[work.key].nbytes for work in works if work.source == "stream"
            ),
            loaded_bytes=sum(self.sizes[key].nbytes for key in loads),
            seconds=self.now_seconds - start,
            compute_seconds=sum(work.seconds for work in works),
            restored_bytes=sum(
                event.nbytes for event in value_copies.values() if event.kind == "restore"
            ),
            host_bytes=host,
            pinned_bytes=pinned,
            disk_bytes_read=sum(self.sizes[key].read_bytes for _, key, _, _ in disk.spans),
            secondary_peaks=self._secondary_peaks(slot, self.resident | set(loads)),
        )
        self.events += [
            self._event(index, TimeSpan("evict", key, 0, start, start)) for key in evicted
        ]
        spans = (
            *(TimeSpan(kind, key, 0, begin, end) for kind, key, begin, end in disk.spans),
            *line.copies,
            *line.calls.values(),
        )
        slot_events = [*value_copies.values(), *(self._event(index, span) for span in spans)]
        self.events += sorted(slot_events, key=lambda event: event.start_seconds)
        self._add_moments(
            index,
            slot,
            keys,
            values + self._device_bytes((*self.resident, *evicted)),
            activation,
            slot_events,
            start,
        )
        self.resident |= set(loads)
        return report

    def _value_copies(self, index: int, slot: Slot) -> tuple[dict[int, Event], float]:
        """Return the spills and restores by action number, and the end of the last one.

        They run one after another from the slot's start.
        """
        copies, clock_seconds, hardware = (
            dict[int, Event](),
            self.now_seconds,
            self.problem.hardware,
        )
        for number, action in enumerate(slot.actions):
            if isinstance(action, Spill | Restore):
                if action.value not in self.values:
                    raise PlanError(f"slot {index}: the problem has no value {action.value!r}")
                value, spill = self.values[action.value], isinstance(action, Spill)
                end = clock_seconds + value.copy_seconds(hardware, to_host=spill)
                copies[number] = Event(
                    "spill" if spill else "restore",
                    "",
                    index,
                    action.value,
                    value.nbytes,
                    clock_seconds,
                    end,
                )
                clock_seconds = end
        return copies, clock_seconds

    def _disk(self, slot: Slot, copied_keys: Iterable[Key]) -> DiskChannel:
        """Return the slot's disk channel.

        It serves the slot's `Read` actions, and fetches for copies from backing stores on disk.
        """
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
        fetch_bytes = sum(self.sizes[key].nbytes for key in copied_keys if key[0] in bounce_bytes)
        lock_end_seconds, clock_seconds = dict[str, float](), self.now_seconds
        for name in dict.fromkeys(key[0] for key in reads):
            if variants[name].locked_bytes:
                clock_seconds = lock_end_seconds[name] = (
                    clock_seconds
                    + variants[name].locked_bytes * self.problem.hardware.page_lock_seconds
                )
        return DiskChannel(
            self.now_seconds, reads, self.sizes, bounce_bytes, fetch_bytes, lock_end_seconds
        )

    def _works(
        self, index: int, slot: Slot, loads: set[Key], ring_buffers: dict[str, int]
    ) -> tuple[list[BlockWork], int, int]:
        """Return all compute in order, activation bytes, and the bytes of values and inputs."""
        if slot.part == "end":
            return [], 0, 0
        if slot.phase not in self.phases:
            raise PlanError(f"slot {index}: the problem has no phase {slot.phase!r}")
        number, phase = self.phases[slot.phase]
        sources = dict[Key, BlockOrigin]()
        for use in phase.uses:
            on_cpu = self._component(use.component).variants[0].device == "cpu"
            for key in self._keys(use.component, None):
                source: BlockOrigin = (
                    "resident" if key in self.resident else "load" if key in loads else "stream"
                )
                sources[key] = "host" if on_cpu else source
        works = [
            BlockWork(key, seconds, call, sources[key])
            for key, seconds, call in self._blocks_in_order(phase, slot)
        ]
        if unavailable_key := next(
            (w.key for w in works if w.source == "stream" and w.key[0] not in ring_buffers), None
        ):
            raise PlanError(
                f"slot {index}: {self._path(unavailable_key)} of {unavailable_key[0]} is needed, "
                "but neither resident, loaded nor streamed"
            )
        activation = {"first": phase.first_bytes, "steady": phase.steady_bytes}.get(slot.part, 0)
        values = self.problem.value_bytes(number) - self.host.spilled_bytes(slot)
        return works, activation, values + phase.input_bytes

    def _blocks_in_order(self, phase: PhaseNumbers, slot: Slot) -> Iterator[tuple[Key, float, int]]:
        """Return (block, seconds, call) in order: in each call all components in turn.

        A group with fewer calls than its component runs in the first calls of the component.
        """
        for call in range(slot.calls):
            for use in phase.uses:
                calls = use.group_calls_in(slot.part)
                for k, i, seconds in use.order or self._in_group_order(use):
                    if call < calls[k]:
                        yield (use.component, k, i), seconds, call

    def _in_group_order(self, use: Use) -> list[tuple[int, int, float]]:
        groups = self._component(use.component).groups
        return [
            (k, i, use.seconds[k])
            for k, group in enumerate(groups)
            for i in range(len(group.blocks))
        ]

    def _add_moments(
        self,
        index: int,
        slot: Slot,
        keys: list[list[Key]],
        device_bytes: int,
        activation: int,
        slot_events: list[Event],
        start: float,
    ) -> None:
        """Append a `Moment` for each action: when it begins and ends, and the bytes on the device.

        ``device_bytes``: bytes on the device before the first action.
        """
        # key: kind, component, and the block or value
        events_by_move = defaultdict[tuple[str, str, str], list[Event]](list)
        for event in slot_events:
            if event.kind in ("load", "read", "spill", "restore"):
                events_by_move[
                    event.kind, event.component, "" if event.kind == "read" else event.detail
                ].append(event)
        for number, (action, action_keys) in enumerate(zip(slot.actions, keys, strict=True)):
            begin = end = start
            if isinstance(action, Evict):
                device_bytes -= self._device_bytes(action_keys)
            elif isinstance(action, Run | Stream):
                device_bytes += (
                    activation
                    if isinstance(action, Run)
                    else round_up(action.ring_buffer_bytes, ALLOCATION_BYTES)
                )
                end = self.now_seconds
            elif not isinstance(action, Drop):
                device_bytes += self._device_bytes(action_keys)
                if isinstance(action, Load):
                    moves = [("load", action.component, self._path(key)) for key in action_keys]
                elif isinstance(action, Read):
                    moves = [("read", action.component, "")]
                else:
                    moves = [
                        ("spill" if isinstance(action, Spill) else "restore", "", action.value)
                    ]
                if action_events := [event for key in moves for event in events_by_move[key]]:
                    begin, end = (
                        min(event.start_seconds for event in action_events),
                        max(event.end_seconds for event in action_events),
                    )
            self.moments.append(Moment(index, number, device_bytes, begin, end))

    def _component(self, name: str) -> ComponentNumbers:
        if name not in self.components:
            raise PlanError(f"the problem has no component {name!r}")
        return self.components[name]

    def _keys(self, component: str, blocks: BlockNames) -> list[Key]:
        return [(component, k, i) for k, i in named(self._component(component), blocks)]

    def _device_bytes(self, keys: Iterable[Key], secondary: int = 0) -> int:
        """Return the bytes of the blocks in ``keys`` that belong on device number ``secondary``.

        0 is the main device.
        """
        device_keys = (key for key in keys if self.secondaries.get(key[:2], 0) == secondary)
        return sum(round_up(self.sizes[key].nbytes, ALLOCATION_BYTES) for key in device_keys)

    def _secondary_peaks(self, slot: Slot, keys: Collection[Key]) -> tuple[int, ...]:
        """Return the peak bytes on each secondary device."""
        compute_bytes = [0] * len(self.problem.secondaries)
        if slot.part in ("first", "steady"):
            compute_bytes = [
                part_bytes[slot.part == "steady"]
                for part_bytes in self.phases[slot.phase][1].secondary_bytes
            ]
        return tuple(
            self._device_bytes(keys, number) + nbytes
            for number, nbytes in enumerate(compute_bytes, 1)
        )

    def _transfers(
        self, slot: Slot
    ) -> tuple[dict[str, tuple[float, float, int]], dict[Key, tuple[float, float]]]:
        """Return the transfers of the slot, as `Timeline` takes them: per component and per block.

        The first are of components that compute on a secondary device as a whole, the second of
        split components' blocks on secondary devices.
        """
        call_transfers, hops = (
            dict[str, tuple[float, float, int]](),
            dict[Key, tuple[float, float]](),
        )
        for use in self.phases[slot.phase][1].uses if slot.part in ("first", "steady") else ():
            component = self._component(use.component)
            if secondary := component.variants[0].secondary:
                call_transfers[use.component] = (
                    *self.problem.transfer_seconds(secondary, use.transfer),
                    use.calls_in(slot.part),
                )
            for (k, i), transfer in transfers(use, component).items():
                hops[use.component, k, i] = self.problem.tensor_transfer_seconds(
                    transfer.secondary, transfer.to_bytes, transfer.back_bytes
                )
        return call_transfers, hops

    def _path(self, key: Key) -> str:
        return self.components[key[0]].groups[key[1]].blocks[key[2]]

    def _event(self, slot: int, span: TimeSpan) -> Event:
        detail = f"call {span.call}" if span.kind == "run" else self._path(span.key)
        nbytes = 0 if span.kind == "run" else self.sizes[span.key].nbytes
        return Event(
            span.kind, span.key[0], slot, detail, nbytes, span.start_seconds, span.end_seconds
        )

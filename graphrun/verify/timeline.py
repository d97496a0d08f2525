"""Copies, compute and disk reads of one slot, in order and in seconds.

Copy channel and compute (`Timeline`):

    copy     |d1 |s2 |s3 |f |f |s4 |f |s5 |
    compute      |  d1  |  s2  |  s3  |  s4  |  s5  |

    d1         block 1, loaded by the slot that computes with it
    s2 ... s5  blocks 2 to 5, streamed: each waits for compute with the blocks that it overwrites.
               Here the ring buffer has room for two, so s4 waits for compute with s2.
    f          prefetch: loaded for a later slot

Blocks that are streamed, or loaded for the slot's own compute, are copied in the order of compute.
A prefetch is copied when the ring buffer is full, in proportion to the streamed bytes, and only
once its block is in RAM. If the backing store is on disk, the block is fetched while the prefetch
waits. The rule depends on bytes because the executor follows it too and cannot know copy times in
advance. Remaining prefetches come after all other copies; those whose backing store is read in the
same slot come last of these.

A copy from pageable memory makes the host wait. Prefetches from pageable memory therefore come at
the very end, when all of the slot's compute is queued. A streamed or loaded block is copied from
pageable memory when all compute before it is queued. The compute of a block waits for its copy; on
the CPU, for its read in the same slot.

Disk channel (`DiskChannel`), with reads of the blocks a, b and c into a backing store (r), and
fetches of the blocks 1 to 4 from a backing store on disk, for their copies (d, s):

    disk   |d1 |s2 |r a|r b|s3 |r c|s4 |        one after another
    copy       |d1 |s2 |       |s3 |   |s4 |    a copy waits for the fetch or read of its block

A copy waits until its block is read and the memory is page-locked. Both happen at the same time.

A fetched block occupies the bounce buffer of its component until it is copied. A fetch waits for
room there. Reads into backing stores take place when a bounce buffer is full, in proportion to the
fetched bytes, like prefetches between streamed blocks. A read that a copy or a computation waits
for is done at once. The others come last.

A copy of a component (`graphrun.model.copies`) computes from the transfer of its arguments on,
while the component computes. The prediction is transferred when both are done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from math import inf
from operator import attrgetter
from types import MappingProxyType
from typing import Literal, NamedTuple

from graphrun.errors import PlanError
from graphrun.model.ring_buffer import RingBuffer, release_distances
from graphrun.model.simulation import RepeatedSpans, TimeSpan

Key = tuple[str, int, int]  # component, block group, block within the group


@dataclass(frozen=True, slots=True)
class BlockSize:
    """Bytes and seconds of a block.

    ``nbytes``, ``seconds``: on the device, and of the copy there. ``disk_seconds``: to read its
    ``read_bytes`` from disk, into its backing store or for its copy.
    """

    nbytes: int
    seconds: float
    disk_seconds: float = 0.0
    read_bytes: int = 0


# Two states are the same if their times differ by SAME of the seconds between them: by rounding.
SAME = 1e-10


def _is_later(start_seconds: float, end_seconds: float, seconds: float) -> bool:
    """Whether ``end_seconds`` is ``seconds`` after ``start_seconds``."""
    return abs(end_seconds - start_seconds - seconds) <= SAME * seconds


def _repeat_times(times_list: list[float], count: int, repeats: int, seconds: float) -> None:
    """Append the last ``count`` times again, ``repeats`` times, each ``seconds`` later."""
    cycle = times_list[len(times_list) - count :]
    for number in range(1, repeats + 1):
        times_list += [time + number * seconds for time in cycle]


class DiskState(NamedTuple):
    """What later fetches depend on, and the number of ``spans`` so far.

    By component: the layout of its bounce buffer, and the number of copies.
    """

    free_from: float
    layouts: Mapping[str, tuple[int, ...]]
    counts: Mapping[str, int]
    spans: int


class DiskChannel:
    """Reads from disk in one slot, from ``start_seconds`` on.

    ``reads``: blocks to read into backing stores, in order. ``bounce_bytes``: size of the bounce
    buffer of each component whose backing store is on disk. ``fetch_bytes``: bytes that the slot
    will fetch for copies. ``locked_seconds``: component -> time at which its memory is page-locked;
    copies wait for that, reads do not. ``originals``: copy of a component -> the component with its
    backing store. ``spans``: reads and fetches.
    """

    def __init__(
        self,
        start_seconds: float,
        reads: Iterable[Key],
        sizes: Mapping[Key, BlockSize],
        bounce_bytes: Mapping[str, int],
        fetch_bytes: int,
        locked_seconds: Mapping[str, float],
        originals: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._originals = originals
        self.spans: list[TimeSpan] = []
        self.repeated_spans: list[RepeatedSpans] = []
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

        The end of its fetch (one per copy), or of its read and page locking; else the slot's start.
        Starts the fetch, or the reads up to the block, if needed.
        """
        key = self._in_store(key)
        if key[0] not in self._bounce_ring_buffers:
            return max(self._read_until(key), self._lock_end_seconds.get(key[0], self._start))
        self.start_fetch(key)
        return self._fetch_ends.pop(key)

    def _in_store(self, key: Key) -> Key:
        """Return the block in whose backing store the block ``key`` is."""
        return (self._originals.get(key[0], key[0]), *key[1:]) if self._originals else key

    def constant_arrival_seconds(self, component: str) -> float | None:
        """Return `arrival_seconds` of all its blocks; None if the slot reads or fetches them."""
        if component in self._bounce_ring_buffers or component in self._read_components:
            return None
        return self._lock_end_seconds.get(component, self._start)

    def state(self) -> DiskState | None:
        """Return the state, None while reads remain that no copy waits for."""
        if self._reads or self._fetch_ends:
            return None
        layouts = {name: ring.layout() for name, ring in self._bounce_ring_buffers.items()}
        counts = {name: len(ends) for name, ends in self._copy_ends.items()}
        return DiskState(self.free_from_seconds, layouts, counts, len(self.spans))

    def repeats(self, start: DiskState, end: DiskState, seconds: float) -> bool:
        """Whether what happens after ``start`` happens after ``end`` too, ``seconds`` later."""
        if start.spans == end.spans:
            return True
        if start.layouts != end.layouts or not _is_later(start.free_from, end.free_from, seconds):
            return False
        for name, ends in self._copy_ends.items():
            start_count, end_count = start.counts[name], end.counts[name]
            depth = self._bounce_ring_buffers[name].oldest_distance
            if start_count == end_count:
                continue
            if depth > start_count or not all(
                _is_later(ends[start_count - distance], ends[end_count - distance], seconds)
                for distance in range(1, depth + 1)
            ):
                return False
        return True

    def repeat(self, start: DiskState, times: int, seconds: float) -> None:
        """Do what was done since ``start`` again, ``times`` times, each ``seconds`` later."""
        if spans := tuple(self.spans[start.spans :]):
            self.repeated_spans.append(RepeatedSpans(spans, times, seconds))
            self.free_from_seconds += times * seconds
        for name, ends in self._copy_ends.items():
            count = len(ends) - start.counts[name]
            self._bounce_ring_buffers[name].renumber(times * count)
            _repeat_times(ends, count, times, seconds)

    def start_fetch(self, key: Key) -> None:
        """Start the fetch for the block's next copy, if its backing store is on disk."""
        if key[0] in self._bounce_ring_buffers and key not in self._fetch_ends:
            self._fetch_ends[key] = self._fetch(key)

    def is_in_ram(self, key: Key, at_seconds: float) -> bool:
        """Return whether the block is in RAM at that time, given the reads and fetches so far."""
        key = self._in_store(key)
        if key[0] in self._bounce_ring_buffers:
            return self._fetch_ends.get(key, inf) <= at_seconds
        is_read = key[0] not in self._read_components or self._read_end.get(key, inf) <= at_seconds
        return is_read and self._lock_end_seconds.get(key[0], at_seconds) <= at_seconds

    def has_reads_of(self, component: str) -> bool:
        return self._originals.get(component, component) in self._read_components

    def record_copy_end(self, key: Key, end_seconds: float) -> None:
        """Free the block's bytes in the bounce buffer from the end of its copy on."""
        if key[0] in self._bounce_ring_buffers:
            self._copy_ends[key[0]].append(end_seconds)

    def finish(self) -> None:
        while self._reads:
            self._read_next()

    def _read_until(self, key: Key) -> float:
        """Return the end of the block's read; the slot's start without a read in this slot."""
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
        self.spans.append(TimeSpan(kind, key, 0, start, self.free_from_seconds))
        return self.free_from_seconds


BlockOrigin = Literal["resident", "load", "stream", "host"]


class BlockWork(NamedTuple):
    """Compute of a block; ``source``: its way to the device; ``host``: on the CPU."""

    key: Key
    seconds: float
    source: BlockOrigin


class SlotCall(NamedTuple):
    """One call into a component, the number ``call`` of its slot: blocks in order."""

    component: str
    call: int
    works: Sequence[BlockWork]


# streamed block, None if the block is on the device; its compute seconds; copy seconds and bytes
_Step = tuple[Key | None, float, float, int]


# rounds of calls after which the order of copies and compute may repeat
MOST_ROUNDS = 12


def _distances(
    component: str,
    capacity_bytes: int,
    calls: Sequence[Sequence[BlockWork]],
    sizes: Mapping[Key, BlockSize],
) -> tuple[tuple[int, ...], int]:
    """Return the `release_distances` of all blocks that ``calls`` stream, and their bytes."""
    sizes_by_works = {
        id(works): tuple(sizes[work.key].nbytes for work in works if work.source == "stream")
        for works in {id(works): works for works in calls}.values()
    }
    call_sizes = [sizes_by_works[id(works)] for works in calls]
    nbytes = sum(map(sum, call_sizes))
    if len(set(call_sizes)) > 1:
        call_sizes = [tuple(chain.from_iterable(call_sizes))]
    try:
        distances = release_distances(
            capacity_bytes, call_sizes[0] if call_sizes else (), len(call_sizes)
        )
    except ValueError as error:
        raise PlanError(f"stream {component}: {error}") from error
    return distances, nbytes


class _Moment(NamedTuple):
    """The state between two rounds of calls, and the number of ``copies`` so far.

    ``copy_frees``: by device. ``counts``: placements in each ring buffer.
    """

    compute_free: float
    copy_frees: Mapping[int, float]
    counts: Mapping[str, int]
    copies: int
    disk: DiskState


class Timeline:
    """Copies and compute of one slot, from ``start_seconds`` on.

    ``calls``: all compute in order. ``prefetch``: blocks loaded for later slots, in order.
    ``ring_buffer_bytes``: per streamed component. ``copies_from_seconds``: end of spills and
    restores. ``pageable``: components with pageable backing stores. ``secondaries``: (component,
    block group) -> its secondary device. ``transfers``: component on a secondary device -> (seconds
    to transfer the arguments of a call, seconds to transfer its results back, number of calls).
    ``hops``: block of a split component on a secondary device -> (seconds to transfer its inputs,
    seconds to transfer its outputs back). ``copied_components``: copies that compute while the next
    call does. ``serial_copies``: copies to the main device and compute exclude each other.
    """

    def __init__(
        self,
        start_seconds: float,
        calls: Sequence[SlotCall],
        prefetch: Iterable[Key],
        sizes: Mapping[Key, BlockSize],
        ring_buffer_bytes: Mapping[str, int],
        disk: DiskChannel,
        copies_from_seconds: float,
        pageable: Collection[str] = (),
        secondaries: Mapping[tuple[str, int], int] = MappingProxyType({}),
        transfers: Mapping[str, tuple[float, float, int]] = MappingProxyType({}),
        hops: Mapping[Key, tuple[float, float]] = MappingProxyType({}),
        *,
        copied_components: Collection[str] = (),
        serial_copies: bool = False,
    ) -> None:
        self.copies: list[TimeSpan | RepeatedSpans] = []
        self.calls: dict[tuple[str, int], TimeSpan] = {}
        self._sizes, self._disk = sizes, disk
        self._compute_free = self._start = start_seconds  # when the compute channel is free
        self._serial_copies = serial_copies
        self._copied_components = copied_components
        # of a copy's call that has not been joined: its end, and seconds to transfer its results
        self._copy_call: tuple[float, float] | None = None
        if serial_copies:
            self._compute_free = copies_from_seconds
        self._secondaries, self._transfers, self._hops = secondaries, transfers, hops
        # times at which the copy channels are free, by device
        self._copy_frees = {
            0: copies_from_seconds,
            **dict.fromkeys(secondaries.values(), start_seconds),
        }
        self._prefetch = sorted(
            prefetch, key=lambda key: (key[0] in pageable, disk.has_reads_of(key[0]))
        )[::-1]
        self._pageable = pageable
        self._prefetch_bytes = sum(sizes[key].nbytes for key in self._prefetch)
        self._prefetched_bytes = self._streamed_bytes = 0
        self._load_ends: dict[Key, float] = {}
        # end of compute with each placed block
        self._compute_ends: dict[str, list[float]] = {name: [] for name in ring_buffer_bytes}
        # how many placements before a block the last one is that it overwrites; 0: none
        self._distances = dict[str, tuple[int, ...]]()
        self._stream_bytes = 0
        for name, capacity_bytes in ring_buffer_bytes.items():
            component_calls = [call.works for call in calls if call.component == name]
            self._distances[name], nbytes = _distances(name, capacity_bytes, component_calls, sizes)
            self._stream_bytes += nbytes
        # steps of calls whose works `_simple_steps` has read before, by the id of the works
        self._steps = dict[int, list[_Step] | None]()
        self._run(calls)
        ran = Counter(name for name, _ in self.calls)
        # calls that run no block transfer their tensors too
        for name, (to_secondary_seconds, back_seconds, call_count) in transfers.items():
            self._compute_free += (call_count - ran[name]) * (to_secondary_seconds + back_seconds)
        while self._prefetch:
            self._issue_prefetch()
        disk.finish()
        self.end_seconds = max(*self._copy_frees.values(), self._compute_free, disk.end_seconds)

    def _run(self, calls: Sequence[SlotCall]) -> None:
        """Run ``calls``. Rounds that do the same as earlier ones, later, are not run one by one.

        Copies and compute depend on nothing but the state: what the channels and ring buffers wait
        for. After a state that comes again, all times are those of its first time plus the seconds
        between the two.
        """
        rounds = [list(group) for _, group in groupby(calls, key=attrgetter("call"))]
        works = [[id(call.works) for call in round_calls] for round_calls in rounds]
        moments, number = list[_Moment](), 0
        while number < len(rounds):
            if number and works[number] != works[number - 1]:
                moments = []
            disk_state = self._disk.state()
            is_steady = not self._prefetch and all(work in self._steps for work in works[number])
            if disk_state is None or not is_steady:
                moments = []
            else:
                moments.append(self._moment(rounds[number], disk_state))
                if skipped := self._skip_repetitions(moments, rounds, works, number):
                    number, moments = number + skipped, []
                    continue
            for call in rounds[number]:
                if steps := self._steps.get(id(call.works)):
                    self._call_again(call, steps)
                else:
                    self._call(call)
                    if id(call.works) not in self._steps:
                        self._steps[id(call.works)] = self._simple_steps(call)
            number += 1

    def _moment(self, calls: Sequence[SlotCall], disk_state: DiskState) -> _Moment:
        names = {call.component for call in calls if call.component in self._compute_ends}
        counts = {name: len(self._compute_ends[name]) for name in sorted(names)}
        return _Moment(
            self._compute_free, dict(self._copy_frees), counts, len(self.copies), disk_state
        )

    def _skip_repetitions(
        self,
        moments: Sequence[_Moment],
        rounds: Sequence[Sequence[SlotCall]],
        works: Sequence[Sequence[int]],
        number: int,
    ) -> int:
        """Skip rounds from ``number`` on that repeat the last ones; return how many.

        ``moments``: before each of the last rounds, and before ``number``.
        """
        end_moment, limit = moments[-1], number
        while limit < len(works) and works[limit] == works[number]:
            limit += 1
        for length in range(1, min(MOST_ROUNDS, len(moments) - 1, limit - number) + 1):
            start_moment = moments[-1 - length]
            times = self._repetitions(start_moment, end_moment, (limit - number) // length)
            if not times:
                continue
            seconds = end_moment.compute_free - start_moment.compute_free
            spans = self.copies[start_moment.copies :]
            if copies := tuple(span for span in spans if isinstance(span, TimeSpan)):
                self.copies.append(RepeatedSpans(copies, times, seconds))
            for device, copy_free in end_moment.copy_frees.items():
                if copy_free != start_moment.copy_frees[device]:
                    self._copy_frees[device] += times * seconds
            self._compute_free += times * seconds
            for name, count in start_moment.counts.items():
                ends = self._compute_ends[name]
                _repeat_times(ends, len(ends) - count, times, seconds)
            self._disk.repeat(start_moment.disk, times, seconds)
            for n in range(number, number + times * length):
                for call, twin in zip(rounds[n], rounds[n - length], strict=True):
                    _, key, _, begin, end = self.calls[twin.component, twin.call]
                    self.calls[call.component, call.call] = TimeSpan(
                        "run", key, call.call, begin + seconds, end + seconds
                    )
            return times * length
        return 0

    def _repetitions(self, start: _Moment, end: _Moment, limit: int) -> int:
        """Return how often the time from ``start`` to ``end`` comes again, at most ``limit``."""
        seconds = end.compute_free - start.compute_free
        if not self._disk.repeats(start.disk, end.disk, seconds) or any(
            copy_free != start.copy_frees[device]
            and not _is_later(start.copy_frees[device], copy_free, seconds)
            for device, copy_free in end.copy_frees.items()
        ):
            return 0
        for name, end_count in end.counts.items():
            start_count, ends = start.counts[name], self._compute_ends[name]
            pattern = self._distances[name][start_count:end_count]
            depth = max(pattern, default=0)
            if depth > start_count or not all(
                _is_later(ends[start_count - distance], ends[end_count - distance], seconds)
                for distance in range(1, depth + 1)
            ):
                return 0
            if pattern:
                rest = self._distances[name][end_count:]
                differs = (
                    n
                    for n in range(limit)
                    if rest[n * len(pattern) : (n + 1) * len(pattern)] != pattern
                )
                limit = next(differs, limit)
        return limit

    def _call_beside(self, call: SlotCall) -> None:
        """Compute ``call`` of a copy while the next call computes."""
        to_secondary_seconds, back_seconds, _ = self._transfers.get(call.component, (0.0, 0.0, 0))
        self._compute_free += to_secondary_seconds
        clock_seconds, begin_seconds = self._compute_free, None
        for work in call.works:
            if work.source != "resident":
                clock_seconds = max(clock_seconds, self._available(work))
            begin_seconds = clock_seconds if begin_seconds is None else begin_seconds
            clock_seconds += work.seconds
        self._copy_call = clock_seconds, back_seconds
        self._record_call(call, begin_seconds, clock_seconds)

    def _join(self) -> None:
        """Wait for the copy's call, and transfer its results."""
        if self._copy_call is not None:
            end_seconds, back_seconds = self._copy_call
            self._compute_free = max(self._compute_free, end_seconds) + back_seconds
            self._copy_call = None

    def _call(self, call: SlotCall) -> None:
        name, _, works = call
        if name in self._copied_components:
            self._call_beside(call)
            return
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
        self._record_call(call, begin_seconds, self._compute_free)
        self._join()

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

    def _simple_steps(self, call: SlotCall) -> list[_Step] | None:
        """Return the steps of `_call_again` for the works of ``call``; None if it cannot do them.

        It can if every block is on the device, or streamed there from RAM.
        """
        if (
            self._serial_copies
            or call.component in self._copied_components
            or self._disk.constant_arrival_seconds(call.component) is None
            or any(
                work.source == "host"
                or work.key in self._hops
                or (work.source == "stream" and self._secondaries.get(work.key[:2]))
                for work in call.works
            )
        ):
            return None
        return [
            (
                work.key if work.source == "stream" else None,
                work.seconds,
                self._sizes[work.key].seconds,
                self._sizes[work.key].nbytes,
            )
            for work in call.works
        ]

    def _call_again(self, call: SlotCall, steps: Sequence[_Step]) -> None:
        """Do what `_call` does, where only streamed blocks move.

        An earlier call with the same works has waited for the blocks that the slot loads.
        """
        name = call.component
        to_secondary_seconds, back_seconds, _ = self._transfers.get(name, (0.0, 0.0, 0))
        ends, distances = self._compute_ends.get(name, []), self._distances.get(name, ())
        arrival_seconds = self._disk.constant_arrival_seconds(name) or 0.0
        compute_free, copy_free = self._compute_free + to_secondary_seconds, self._copy_frees[0]
        begin_seconds: float | None = None
        for key, seconds, copy_seconds, nbytes in steps:
            if key is not None:
                ready = self._start
                if distance := distances[len(ends)]:
                    ready = ends[-distance]
                    if self._prefetch:
                        self._copy_frees[0] = copy_free
                        self._issue_due_prefetches(ready)
                        copy_free = self._copy_frees[0]
                self._streamed_bytes += nbytes
                start = max(copy_free, ready, arrival_seconds)
                copy_free = start + copy_seconds
                self.copies.append(TimeSpan("stream", key, 0, start, copy_free))
                if compute_free < copy_free:
                    compute_free = copy_free
            if begin_seconds is None:
                begin_seconds = compute_free
            compute_free += seconds
            if key is not None:
                ends.append(compute_free)
        self._compute_free, self._copy_frees[0] = compute_free + back_seconds, copy_free
        self._record_call(call, begin_seconds, self._compute_free)
        self._join()

    def _record_call(self, call: SlotCall, begin_seconds: float | None, end_seconds: float) -> None:
        span = self.calls.get(
            (call.component, call.call),
            TimeSpan("run", call.works[0].key, call.call, begin_seconds or 0.0, 0.0),
        )
        self.calls[call.component, call.call] = span._replace(end_seconds=end_seconds)

    def _stream(self, key: Key) -> float:
        ready, ends = self._start, self._compute_ends[key[0]]
        if distance := self._distances[key[0]][len(ends)]:
            ready = ends[-distance]
            self._issue_due_prefetches(ready)
        self._streamed_bytes += self._sizes[key].nbytes
        return self._copy("stream", key, max(ready, self._disk.arrival_seconds(key)))

    def _issue_due_prefetches(self, ready: float) -> None:
        """Issue prefetches before a copy that may start at ``ready``.

        First those whose blocks are in RAM when the copy channel is free. Then those whose blocks
        arrive in RAM before the copy may start.
        """
        self._issue_due_prefetch(self._copy_frees[0])
        self._issue_due_prefetch(max(self._copy_frees[0], ready))

    def _issue_due_prefetch(self, at_seconds: float) -> None:
        """Issue prefetches in proportion to streamed bytes, while their blocks are in RAM."""
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
        is_serial = self._serial_copies and not secondary
        start = max(
            self._copy_frees[secondary], ready, self._compute_free if is_serial else self._start
        )
        end = self._copy_frees[secondary] = start + self._sizes[key].seconds
        if is_serial:
            self._compute_free = end
        self._disk.record_copy_end(key, end)
        self.copies.append(TimeSpan(kind, key, 0, start, end))
        return end

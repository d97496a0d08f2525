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
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Literal, NamedTuple

from graphrun.errors import PlanError
from graphrun.model.ring_buffer import RingBuffer
from graphrun.model.simulation import TimeSpan

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


class DiskChannel:
    """Reads from disk in one slot, from ``start_seconds`` on.

    ``reads``: blocks to read into backing stores, in order. ``bounce_bytes``: size of the bounce
    buffer of each component whose backing store is on disk. ``fetch_bytes``: bytes that the slot
    will fetch for copies. ``locked_seconds``: component -> time at which its memory is page-locked;
    copies wait for that, reads do not. ``spans``: (``read`` or ``fetch``, block, start, end).
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

        The end of its fetch (one per copy), or of its read and page locking; else the slot's start.
        Starts the fetch, or the reads up to the block, if needed.
        """
        if key[0] not in self._bounce_ring_buffers:
            return max(self._read_until(key), self._lock_end_seconds.get(key[0], self._start))
        self.start_fetch(key)
        return self._fetch_ends.pop(key)

    def start_fetch(self, key: Key) -> None:
        """Start the fetch for the block's next copy, if its backing store is on disk."""
        if key[0] in self._bounce_ring_buffers and key not in self._fetch_ends:
            self._fetch_ends[key] = self._fetch(key)

    def is_in_ram(self, key: Key, at_seconds: float) -> bool:
        """Return whether the block is in RAM at that time, given the reads and fetches so far."""
        if key[0] in self._bounce_ring_buffers:
            return self._fetch_ends.get(key, inf) <= at_seconds
        is_read = key[0] not in self._read_components or self._read_end.get(key, inf) <= at_seconds
        return is_read and self._lock_end_seconds.get(key[0], at_seconds) <= at_seconds

    def has_reads_of(self, component: str) -> bool:
        return component in self._read_components

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
        self.spans.append((kind, key, start, self.free_from_seconds))
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


class Timeline:
    """Copies and compute of one slot, from ``start_seconds`` on.

    ``calls``: all compute in order. ``prefetch``: blocks loaded for later slots, in order.
    ``ring_buffer_bytes``: per streamed component. ``copies_from_seconds``: end of spills and
    restores. ``pageable``: components with pageable backing stores. ``secondaries``: (component,
    block group) -> its secondary device. ``transfers``: component on a secondary device -> (seconds
    to transfer the arguments of a call, seconds to transfer its results back, number of calls).
    ``hops``: block of a split component on a secondary device -> (seconds to transfer its inputs,
    seconds to transfer its outputs back). ``serial_copies``: copies to the main device and compute
    exclude each other.
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
        serial_copies: bool = False,
    ) -> None:
        self.copies: list[TimeSpan] = []
        self.calls: dict[tuple[str, int], TimeSpan] = {}
        self._sizes, self._disk = sizes, disk
        self._compute_free = self._start = start_seconds  # when the compute channel is free
        self._serial_copies = serial_copies
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
        self._ring_buffers = {
            name: RingBuffer(nbytes) for name, nbytes in ring_buffer_bytes.items()
        }
        # end of compute with each placed block
        self._compute_ends: dict[str, list[float]] = {name: [] for name in ring_buffer_bytes}
        # sizes of the streamed blocks of each component, in order
        stream_sizes = {name: list[int]() for name in ring_buffer_bytes}
        for call in calls:
            if call.component in stream_sizes:
                stream_sizes[call.component] += [
                    sizes[work.key].nbytes for work in call.works if work.source == "stream"
                ]
        self._stream_bytes = sum(map(sum, stream_sizes.values()))
        # size of the block after each streamed block
        self._next_block_bytes = {
            name: iter(block_sizes[1:]) for name, block_sizes in stream_sizes.items()
        }
        for call in calls:
            self._call(*call)
        ran = Counter(name for name, _ in self.calls)
        # calls that run no block transfer their tensors too
        for name, (to_secondary_seconds, back_seconds, call_count) in transfers.items():
            self._compute_free += (call_count - ran[name]) * (to_secondary_seconds + back_seconds)
        while self._prefetch:
            self._issue_prefetch()
        disk.finish()
        self.end_seconds = max(*self._copy_frees.values(), self._compute_free, disk.end_seconds)

    def _call(self, name: str, call: int, works: Sequence[BlockWork]) -> None:
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
            # given the size of the next block, `place` puts this one where the next need not
            # overwrite it
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
        # First the prefetches whose blocks are in RAM when the copy channel is free. Then those
        # whose blocks arrive in RAM before this copy may start.
        if placement.released_numbers:
            self._issue_due_prefetch(self._copy_frees[0])
            self._issue_due_prefetch(max(self._copy_frees[0], ready))
        self._streamed_bytes += self._sizes[key].nbytes
        return self._copy("stream", key, max(ready, self._disk.arrival_seconds(key)))

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

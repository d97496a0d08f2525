"""Backing stores: a component's weights on the host or on disk, and copies of its blocks.

pinned, pageable    | block 0 | block 1 | block 2 |   one flat buffer in RAM, read in call order; a
                         |copy                        block's copy waits for the block's own read
disk                files --read--> | bounce buffer | twice the largest block; a read waits for the
                                         |copy        copies of the bytes that it overwrites

The plan decides when to read, copy and drop. A barrier (`Device.barrier`) waits until all streams
of a device are empty.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from graphrun.errors import GraphrunError
from graphrun.model.ring_buffer import RingBuffer
from graphrun.modules.blocks import BlockLayout, TensorEntry
from graphrun.modules.source_files import Stored
from graphrun.runtime.devices.device import Device, Mark, StreamName

Marks = tuple[Mark, Mark]
"""Start and end of a read or copy."""


class BlockWriter(Protocol):
    """Source of a component's weights, block by block."""

    def write(
        self, layout: BlockLayout, buffer: torch.Tensor, count: Callable[[torch.Tensor], None]
    ) -> int:
        """Fill ``buffer``; return bytes read from disk. ``count`` gets temporary host tensors."""

    def stored(self, entry: TensorEntry) -> Stored | None:
        """Return the tensor of a file that has the bytes of ``entry`` unchanged, if any."""

    def table(self, entry: TensorEntry) -> Stored | None:
        """Return the tensor of a file that has the rows of ``entry``, in any dtype, if any."""

    def close(self) -> None:
        """Close files."""


@dataclass(slots=True)
class _BlockRead:
    """A background job: the read of one block into ``buffer``, or the page locking of ``buffer``.

    ``number``: in a bounce buffer, the number (from 0) of the `RingBuffer.place` call that placed
    ``buffer``. After ``join``, ``marks`` are the start and end of the read, or the end of page
    locking; ``nbytes`` were read from files.
    """

    buffer: torch.Tensor
    number: int = 0
    marks: tuple[Mark, ...] = ()
    nbytes: int = 0
    join: Callable[[], None] = lambda: None


class BackingStore:
    """Host memory of ``nbytes`` that ``writer`` fills and that blocks are copied from.

    ``memory`` is None until allocated. ``pacer``: decides when the pending reads of the open
    slot begin.
    """

    def __init__(
        self,
        layouts: Mapping[str, BlockLayout],
        device: Device,
        writer: BlockWriter | None,
        nbytes: int,
        pinned: bool,
    ) -> None:
        self._layouts, self.device, self._pinned, self.nbytes = (
            dict(layouts),
            device,
            pinned,
            nbytes,
        )
        self._writer: Any = writer
        self.memory: torch.Tensor | None = None
        self.pacer: PacedReads | None = None
        # reads that have begun; for a store on disk, only blocks not yet copied
        self._reads: dict[str, _BlockRead] = {}
        self._finished: list[tuple[str, int, Marks]] = []
        self._is_dropped = False

    @property
    def pageable(self) -> bool:
        """Whether copies from the memory make the host wait."""
        return not self._pinned

    def allocate(self) -> None:
        """Allocate the memory; its contents are undefined."""
        self.memory, self._is_dropped = self.device.arena(self.nbytes, pinned=self._pinned), False

    def pin(self) -> None:
        if self._pinned and self.memory is not None:
            self.device.pin(self.memory)

    def size(self, path: str) -> int:
        """Return the bytes of block ``path``, including alignment."""
        return self._layouts[path].nbytes

    def request(self, path: str) -> bool:
        """Begin the read of block ``path`` if needed; return whether its copy can be queued now.

        True also if the copy stream would then wait for the read; False if the host would have to.
        """
        raise NotImplementedError

    def ready(self, path: str) -> bool:
        """Return whether the read of block ``path`` ends before the copies queued so far end.

        If so, a copy of the block delays no later copies. See `Device.reached`.
        """
        return path not in self._reads or self.device.reached(self._reads[path].marks)

    def copy(self, path: str, target: torch.Tensor, device: Device) -> Marks:
        """Queue the copy of block ``path`` into ``target`` on ``device``.

        The host waits for the block's read, and for the copy if the memory is pageable.
        """
        source = self._source(path, device)
        start = device.mark("copy")
        device.copy(target, source)
        return start, device.mark("copy")

    def _source(self, path: str, device: Device) -> torch.Tensor:
        """Return block ``path`` in host memory, after its read (host and copy stream wait)."""
        raise NotImplementedError

    def read(self, path: str, buffer: torch.Tensor) -> None:
        """Read block ``path`` into ``buffer``, after the reads that have begun."""
        self.device.background(
            lambda: self._writer.write(self._layouts[path], buffer, lambda _: None)
        )()

    def finish_reads(self) -> list[tuple[str, int, Marks]]:
        """Return the blocks read since the last call: path, bytes from files, marks."""
        blocks, self._finished = self._finished, []
        return blocks

    def drop(self) -> None:
        """Cancel reads and release the memory, freed with its last view. Call after a barrier."""
        self._is_dropped = True
        self.abandon()
        self.memory = None

    def _read(
        self, path: str, buffer: torch.Tensor, number: int = 0, awaited_marks: Sequence[Mark] = ()
    ) -> None:
        """Begin the background read of block ``path``, after ``awaited_marks``."""
        block_read, device = _BlockRead(buffer, number), self.device

        def job() -> None:
            if self._is_dropped:
                return
            for mark in awaited_marks:
                device.wait("disk", mark)
            start = device.mark("disk")
            # temporary tensors count as RAM of backing stores (the tier "arenas")
            block_read.nbytes = self._writer.write(
                self._layouts[path], buffer, lambda tensor: device.arenas.count("arenas", tensor)
            )
            # on the simulated accelerator, advances the clock; elsewhere no effect
            device.read(buffer, block_read.nbytes)
            block_read.marks = start, device.mark("disk")

        block_read.join = device.background(job)
        self._reads[path] = block_read

    def abandon(self) -> None:
        """Wait for the reads under way, which still write to the memory, and ignore their errors.

        No further read begins, and no read of a failed slot is counted later.
        """
        self.pacer = None
        self._finished.clear()
        for block_read in self._reads.values():
            with contextlib.suppress(GraphrunError, OSError, RuntimeError):
                block_read.join()
        self._reads.clear()


class Arena(BackingStore):
    """A backing store in RAM: all blocks in one buffer, in the order of ``layouts``."""

    def __init__(
        self,
        layouts: Mapping[str, BlockLayout],
        device: Device,
        writer: BlockWriter | None,
        pinned: bool,
    ) -> None:
        starts, nbytes = dict[str, int](), 0
        for path, layout in layouts.items():
            starts[path] = nbytes
            nbytes += layout.nbytes
        super().__init__(layouts, device, writer, nbytes, pinned)
        self._starts = starts
        # page locking, until a copy has waited for it
        self._locking: _BlockRead | None = None
        self.pending: deque[str] = deque()  # blocks whose reads have not begun, in order

    def block(self, path: str) -> torch.Tensor:
        """Return block ``path`` in RAM, flat."""
        assert self.memory is not None, f"the backing store of block {path!r} is not allocated"
        return self.memory[self._starts[path] : self._starts[path] + self.size(path)]

    def prepare_reads(self) -> None:
        """Make the reads of all blocks pending, and begin page locking, which copies wait for."""
        self.pending.extend(self._layouts)
        if not self._pinned or self.memory is None:
            return
        page_lock, device = _BlockRead(self.memory), self.device

        def job() -> None:
            self.pin()
            page_lock.marks = (device.mark("lock"),)

        page_lock.join = device.background(job, "lock")
        self._locking = page_lock

    def begin_next(self) -> None:
        """Start the next pending read in the background."""
        path = self.pending.popleft()
        self._read(path, self.block(path))
        if not self.pending:
            self.device.background(self._writer.close)

    def request(self, path: str) -> bool:
        """As `BackingStore.request`; begins all pending reads up to the one of block ``path``."""
        while path in self.pending:
            (self.begin_next if self.pacer is None else self.pacer.begin_next)()
        awaited = [
            block_read
            for block_read in (self._locking, self._reads.get(path))
            if block_read is not None
        ]
        # True if the copy stream itself waits for the ends of these jobs, so the host need not
        return all(self.device.queues_behind(block_read.marks) for block_read in awaited)

    def ready(self, path: str) -> bool:
        """As `BackingStore.ready`; False if the read has not begun."""
        is_locked = self._locking is None or self.device.reached(self._locking.marks)
        return is_locked and path not in self.pending and super().ready(path)

    def wait_read(self, path: str, stream: StreamName, device: Device) -> None:
        """Wait until block ``path`` is read, on the host and on ``stream`` of ``device``."""
        self.request(path)
        if path in self._reads:
            self._reads[path].join()
            device.wait(stream, self._reads[path].marks[1])

    def _source(self, path: str, device: Device) -> torch.Tensor:
        self.wait_read(path, "copy", device)
        if self._locking is not None:
            self._locking.join()
            for accelerator in self.device.all_devices:
                accelerator.wait("copy", self._locking.marks[-1])
            self._locking = None
        return self.block(path)

    def finish_reads(self) -> list[tuple[str, int, Marks]]:
        """As `BackingStore.finish_reads`, after all pending reads."""
        while self.pending:
            self.begin_next()
        for path, block_read in self._reads.items():
            block_read.join()
            self._finished.append(
                (path, block_read.nbytes, (block_read.marks[0], block_read.marks[1]))
            )
        self._reads.clear()
        return super().finish_reads()

    def abandon(self) -> None:
        self.pending.clear()
        if self._locking is not None:
            with contextlib.suppress(GraphrunError, RuntimeError):
                self._locking.join()
            self._locking = None
        super().abandon()


class Disk(BackingStore):
    """A backing store on disk: each copy of a block reads it through a bounce buffer."""

    def __init__(
        self,
        layouts: Mapping[str, BlockLayout],
        device: Device,
        writer: BlockWriter,
        bounce_bytes: int,
    ) -> None:
        super().__init__(layouts, device, writer, bounce_bytes, pinned=True)
        self.abandon()  # creates an empty ring buffer

    def request(self, path: str) -> bool:
        """As `BackingStore.request`; the read waits for copies of overwritten bytes."""
        if self.size(path) == 0:
            return True
        if path not in self._reads:
            assert self.memory is not None, f"the bounce buffer of block {path!r} is not allocated"
            place = self._ring_buffer.place(self.size(path))
            if self.pacer is not None:
                self.pacer.before_fetch(self.size(path), full=bool(place.released_numbers))
            # A call may skip a block that was read. A new read may overwrite it; it is read again
            # when needed.
            self._reads = {
                name: block_read
                for name, block_read in self._reads.items()
                if block_read.number not in place.released_numbers
            }
            copy_ends = [
                self._copy_ends.pop(number)
                for number in place.released_numbers
                if number in self._copy_ends
            ]
            self._read(
                path,
                self.memory[place.offset : place.offset + self.size(path)],
                self._placements,
                copy_ends,
            )
            self._placements += 1
        return self.device.queues_behind(self._reads[path].marks)

    def copy(self, path: str, target: torch.Tensor, device: Device) -> Marks:
        marks = super().copy(path, target, device)
        if path in self._reads:
            self._copy_ends[self._reads.pop(path).number] = marks[1]
        return marks

    def _source(self, path: str, device: Device) -> torch.Tensor:
        self.request(path)
        if path not in self._reads:
            return torch.empty(0, dtype=torch.uint8)
        block_read = self._reads[path]
        block_read.join()
        self._finished.append((path, block_read.nbytes, (block_read.marks[0], block_read.marks[1])))
        device.wait("copy", block_read.marks[1])
        return block_read.buffer

    def drop(self) -> None:
        super().drop()
        self._writer.close()

    def abandon(self) -> None:
        """As `BackingStore.abandon`. Afterwards the whole bounce buffer is free.

        Call when no copy from the bounce buffer is under way.
        """
        super().abandon()
        self._ring_buffer, self._placements = RingBuffer(self.nbytes), 0
        self._copy_ends: dict[int, Mark] = {}  # by number of the placement


class PacedReads:
    """Reads of backing stores during a slot, in step with fetches.

    A read fills a block of a backing store in RAM, for the plan's `Read` action. A fetch reads one
    block from a backing store on disk into its bounce buffer, for one copy to the device. Both
    share the disk:

        disk     | fetch 1 | fetch 2 | read a | fetch 3 | read b |

    A fetch that overwrites earlier blocks of the bounce buffer must wait, so reads are inserted
    before it: until the begun fraction of all bytes to read exceeds the fetched fraction of all
    bytes to fetch. If a copy needs a block that is not read yet, this read and all reads before it
    start at once. Without fetches, all reads start at once. The simulator
    (`graphrun.verify.simulate`) follows the same rules.

    ``stores``: the stores to read, in order, and the stores on disk from which ``fetch_bytes`` are
    fetched.
    """

    def __init__(self, stores: Iterable[BackingStore], fetch_bytes: int) -> None:
        self._pending: deque[tuple[Arena, int]] = deque()  # one item for each read
        for store in stores:
            store.pacer = self
            if isinstance(store, Arena):
                self._pending += [(store, store.size(path)) for path in store.pending]
        self._fetch_bytes, self._read_bytes = (
            fetch_bytes,
            sum(nbytes for _, nbytes in self._pending),
        )
        self._fetched_bytes = self._begun_bytes = 0
        if not fetch_bytes:
            self.finish()

    def finish(self) -> None:
        while self._pending:
            self.begin_next()

    def begin_next(self) -> None:
        store, nbytes = self._pending.popleft()
        self._begun_bytes += nbytes
        store.begin_next()

    def before_fetch(self, nbytes: int, *, full: bool) -> None:
        """Start reads due before a fetch of ``nbytes``; ``full``: it overwrites earlier blocks."""
        while (
            full
            and self._pending
            and self._begun_bytes * self._fetch_bytes <= self._fetched_bytes * self._read_bytes
        ):
            self.begin_next()
        self._fetched_bytes += nbytes

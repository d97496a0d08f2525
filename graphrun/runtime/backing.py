"""Backing stores: the host or disk copy of a component's weights, and the copies of its blocks to
the device.

pinned, pageable    | block 0 | block 1 | block 2 |      one flat buffer in RAM, read in call order;
the copy of a block waits
                         |copy                           for that block's own read
disk                files --read--> | bounce buffer |    two of the largest blocks; a read waits for
the copy out of the bytes
                                         |copy           that it overwrites

When to read, copy and drop is the plan's decision, not this module's.
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
from graphrun.modules.blocks import BlockLayout
from graphrun.runtime.devices.device import Device, Mark, Stream

Marks = tuple[Mark, Mark]
"""Start and end of a read or copy."""


class BlockWriter(Protocol):
    """Source of a component's weights: writes the bytes of a block into a buffer."""

    def write(
        self, layout: BlockLayout, buffer: torch.Tensor, count: Callable[[torch.Tensor], None]
    ) -> int:
        """Fills ``buffer`` with the block. Returns the bytes read from disk. ``count`` is called
        with temporary host tensors."""

    def close(self) -> None:
        """Closes files."""


@dataclass(slots=True)
class _BlockRead:
    """The read of one block into ``buffer``, which is placement ``number`` of a bounce buffer.
    ``join`` waits for its end; ``marks`` then hold its start and end (of page-locking its end),
    ``nbytes`` the bytes from files."""

    buffer: torch.Tensor
    number: int
    marks: tuple[Mark, ...] = ()
    nbytes: int = 0
    join: Callable[[], None] = lambda: None


class BackingStore:
    """Host memory of ``nbytes`` that reads in the background fill from ``writer``, block by block,
    and that blocks are copied from.

    ``memory`` is None until it is allocated. ``paced`` paces the reads of the open slot.
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
        self.paced: PacedReads | None = None
        self._reads: dict[
            str, _BlockRead
        ] = {}  # reads begun; from disk, those whose block was not copied yet
        self._finished: list[tuple[str, int, Marks]] = []
        self._dropped = False

    @property
    def pageable(self) -> bool:
        """Whether the host waits for copies from the memory."""
        return not self._pinned

    def allocate(self) -> None:
        """Allocates the memory. Its contents are undefined."""
        self.memory, self._dropped = self.device.arena(self.nbytes), False

    def pin(self) -> None:
        """Page-locks the memory, if this backing store is pinned."""
        if self._pinned and self.memory is not None:
            self.device.pin(self.memory)

    def size(self, path: str) -> int:
        """Bytes of block ``path``, including alignment."""
        return self._layouts[path].nbytes

    def request(self, path: str) -> bool:
        """Begins the read of block ``path`` unless it was begun. Returns whether a copy of the
        block can be queued without making the host wait for the read."""
        raise NotImplementedError

    def ready(self, path: str) -> bool:
        """Whether a copy of block ``path``, whose read was begun, would wait for earlier copies
        only."""
        return path not in self._reads or self.device.reached(self._reads[path].marks)

    def copy(self, path: str, target: torch.Tensor, device: Device) -> Marks:
        """Queues the copy of block ``path`` into ``target`` on ``device``. The host waits for the
        block's read; if the memory is pageable, for the copy too."""
        source = self._source(path, device)
        start = device.mark("copy")
        device.copy(target, source)
        return start, device.mark("copy")

    def _source(self, path: str, device: Device) -> torch.Tensor:
        """The bytes of block ``path`` in host memory, read; the copy stream of ``device`` waits for
        the read."""
        raise NotImplementedError

    def finish_reads(self) -> list[tuple[str, int, Marks]]:
        """The blocks read since the last call: path, bytes from files, marks."""
        found, self._finished = self._finished, []
        return found

    def drop(self) -> None:
        """Releases the memory (freed when no views of it are left) and cancels pending reads. Call
        after a barrier."""
        self._dropped = True
        self.abandon()
        self.memory = None

    def _read(
        self, path: str, buffer: torch.Tensor, number: int = 0, after: Sequence[Mark] = ()
    ) -> None:
        """Begins the read of block ``path`` into ``buffer`` in the background, behind reads begun
        before and marks ``after``."""
        found, device = _BlockRead(buffer, number), self.device

        def job() -> None:
            if self._dropped:
                return
            for mark in after:
                device.wait("disk", mark)
            start = device.mark("disk")
            found.nbytes = self._writer.write(
                self._layouts[path], buffer, lambda held: device.arenas.count("arenas", held)
            )
            device.read(buffer, found.nbytes)
            found.marks = start, device.mark("disk")

        found.join = device.background(job)
        self._reads[path] = found

    def abandon(self) -> None:
        """Waits for the reads under way, which still write to the memory, and ignores their errors.
        Begins no other."""
        self.paced = None
        for found in self._reads.values():
            with contextlib.suppress(GraphrunError, OSError, RuntimeError):
                found.join()
        self._reads.clear()


class Arena(BackingStore):
    """A backing store in RAM: all blocks in one buffer, in the order of ``layouts``; page-locked if
    ``pinned``."""

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
        # under way, or done and not yet waited for by a copy
        self._locking: _BlockRead | None = None
        self.pending: deque[str] = deque()  # blocks whose reads are not yet begun, in order

    def block(self, path: str) -> torch.Tensor:
        """The bytes of block ``path`` in RAM, flat."""
        assert self.memory is not None, f"the backing store of block {path!r} is not allocated"
        return self.memory[self._starts[path] : self._starts[path] + self.size(path)]

    def prepare_reads(self) -> None:
        """Makes the reads of all blocks pending; `begin_next` starts each. Begins to page-lock the
        memory beside them: copies wait for that."""
        self.pending.extend(self._layouts)
        if not self._pinned or self.memory is None:
            return
        found, device = _BlockRead(self.memory, 0), self.device

        def job() -> None:
            self.pin()
            found.marks = (device.mark("lock"),)

        found.join = device.background(job, "lock")
        self._locking = found

    def begin_next(self) -> None:
        """Starts the next pending read in the background, after those started before."""
        path = self.pending.popleft()
        self._read(path, self.block(path))
        if not self.pending:
            self.device.background(self._writer.close)

    def request(self, path: str) -> bool:
        """As `BackingStore.request`: also begins the slot's reads before that of block ``path``."""
        while path in self.pending:
            (self.begin_next if self.paced is None else self.paced.begin_next)()
        awaited = [found for found in (self._locking, self._reads.get(path)) if found is not None]
        return all(self.device.queues_behind(found.marks) for found in awaited)

    def ready(self, path: str) -> bool:
        """As `BackingStore.ready`; False before the read was begun."""
        locked = self._locking is None or self.device.reached(self._locking.marks)
        return locked and path not in self.pending and super().ready(path)

    def wait_read(self, path: str, stream: Stream, device: Device) -> None:
        """Waits until block ``path`` is read, on the host and on ``stream`` of ``device``."""
        self.request(path)
        if path in self._reads:
            self._reads[path].join()
            device.wait(stream, self._reads[path].marks[1])

    def _source(self, path: str, device: Device) -> torch.Tensor:
        self.wait_read(path, "copy", device)
        if self._locking is not None:
            self._locking.join()
            for each in self.device.every:
                each.wait("copy", self._locking.marks[-1])
            self._locking = None
        return self.block(path)

    def finish_reads(self) -> list[tuple[str, int, Marks]]:
        """As `BackingStore.finish_reads`, after starting all pending reads and waiting for them."""
        while self.pending:
            self.begin_next()
        for path, found in self._reads.items():
            found.join()
            self._finished.append((path, found.nbytes, (found.marks[0], found.marks[1])))
        self._reads.clear()
        return super().finish_reads()

    def abandon(self) -> None:
        """As `BackingStore.abandon`."""
        self.pending.clear()
        if self._locking is not None:
            with contextlib.suppress(GraphrunError, RuntimeError):
                self._locking.join()
            self._locking = None
        super().abandon()


class Disk(BackingStore):
    """A backing store on disk: every copy of a block reads it from ``writer``, through a bounce
    buffer of ``bounce_bytes``."""

    def __init__(
        self,
        layouts: Mapping[str, BlockLayout],
        device: Device,
        writer: BlockWriter,
        bounce_bytes: int,
    ) -> None:
        super().__init__(layouts, device, writer, bounce_bytes, pinned=True)
        self.abandon()

    def request(self, path: str) -> bool:
        """As `BackingStore.request`, for one copy. The read waits for copies out of the bytes that
        it overwrites."""
        if self.size(path) == 0:
            return True
        if path not in self._reads:
            assert self.memory is not None, f"the bounce buffer of block {path!r} is not allocated"
            slot = self._ring_buffer.place(self.size(path))
            if self.paced is not None:
                self.paced.before_fetch(self.size(path), full=bool(slot.released))
            # A block that was read and not copied, because its call left it out, is overwritten: it
            # is read again when needed.
            self._reads = {
                name: found
                for name, found in self._reads.items()
                if found.number not in slot.released
            }
            after = [self._copied.pop(number) for number in slot.released if number in self._copied]
            self._read(
                path,
                self.memory[slot.offset : slot.offset + self.size(path)],
                self._placements,
                after,
            )
            self._placements += 1
        return self.device.queues_behind(self._reads[path].marks)

    def copy(self, path: str, target: torch.Tensor, device: Device) -> Marks:
        marks = super().copy(path, target, device)
        if path in self._reads:
            self._copied[self._reads.pop(path).number] = marks[1]
        return marks

    def _source(self, path: str, device: Device) -> torch.Tensor:
        self.request(path)
        if path not in self._reads:
            return torch.empty(0, dtype=torch.uint8)
        found = self._reads[path]
        found.join()
        self._finished.append((path, found.nbytes, (found.marks[0], found.marks[1])))
        device.wait("copy", found.marks[1])
        return found.buffer

    def drop(self) -> None:
        """As `BackingStore.drop`; closes files."""
        super().drop()
        self._writer.close()

    def abandon(self) -> None:
        """As `BackingStore.abandon`. Called at the end of a slot, whose barrier empties the bounce
        buffer."""
        super().abandon()
        self._ring_buffer, self._placements = RingBuffer(self.nbytes), 0
        self._copied: dict[int, Mark] = {}  # number of a placement -> end of its copy


class PacedReads:
    """Reads backing stores from disk during a slot, in step with fetches.

    A read fills a block of a backing store in RAM, which is the plan's `Read` action. A fetch reads
    one block from a backing store on disk into its bounce buffer, for one copy to the device. Both
    share the disk:

        disk     | fetch 1 | fetch 2 | read a | fetch 3 | read b |

    A read is inserted before a fetch that overwrites earlier blocks of the bounce buffer, since
    that must wait. The fraction of all reads that was started stays at most one block ahead of the
    fraction of all fetched bytes. If a copy needs a block that was not read yet, that block and all
    reads before it start at once. Without fetches, all reads start at once. The simulator
    (`graphrun.verify.simulate`) follows the same rules.

    ``stores``: those that the slot reads, in order, and those on disk, from which it fetches
    ``fetch_bytes`` in total."""

    def __init__(self, stores: Iterable[BackingStore], fetch_bytes: int) -> None:
        self._pending: deque[tuple[Arena, int]] = deque()  # one item for each read
        for store in stores:
            store.paced = self
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
        """Starts all pending reads."""
        while self._pending:
            self.begin_next()

    def begin_next(self) -> None:
        """Starts the next pending read."""
        store, nbytes = self._pending.popleft()
        self._begun_bytes += nbytes
        store.begin_next()

    def before_fetch(self, nbytes: int, *, full: bool) -> None:
        """Called before each fetch of ``nbytes``. ``full``: it overwrites earlier blocks of the
        bounce buffer."""
        while (
            full
            and self._pending
            and self._begun_bytes * self._fetch_bytes <= self._fetched_bytes * self._read_bytes
        ):
            self.begin_next()
        self._fetched_bytes += nbytes

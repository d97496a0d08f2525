"""Backing stores: the host or disk copy of a component's weights, and the copies of its blocks to the device.

pinned, pageable    | block 0 | block 1 | block 2 |      one flat buffer in RAM, read in call order; the copy of a block waits
                         |copy                           for that block's own read
disk                files --read--> | bounce buffer |    two of the largest blocks; a read waits for the copy out of the bytes
                                         |copy           that it overwrites

When to read, copy and drop is the plan's decision, not this module's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from graphrun.errors import GraphrunError
from graphrun.model.ring import Ring
from graphrun.modules.blocks import BlockLayout
from graphrun.runtime.devices.device import Device, Mark

Marks = tuple[Mark, Mark]
"""Start and end of a read or copy."""


class BlockWriter(Protocol):
    """Source of a component's weights: writes the bytes of a block into a buffer."""

    def write(self, layout: BlockLayout, buffer: torch.Tensor, count: Callable[[torch.Tensor], None]) -> int:
        """Fills ``buffer`` with the block. Returns the bytes read from disk. ``count`` is called with temporary host tensors."""

    def close(self) -> None:
        """Closes files."""


@dataclass(slots=True)
class _BlockRead:
    """The read of one block. ``join`` waits for its end; ``marks`` then hold its start and end, ``read`` the bytes from files."""

    join: Callable[[], None]
    marks: list[Mark]
    read: list[int]

    def abandon(self) -> None:
        """Waits for the end of the read and ignores its errors."""
        with contextlib.suppress(GraphrunError, OSError, RuntimeError):
            self.join()


@dataclass(frozen=True, slots=True)
class _BufferedBlock:
    """A block on its way through the bounce buffer: its number in the ring's order, and its bytes there."""

    number: int
    buffer: torch.Tensor
    block_read: _BlockRead


class Arena:
    """A backing store in RAM: all blocks in one buffer, in the order of ``layouts``; page-locked if ``pinned``."""

    def __init__(self, layouts: Mapping[str, BlockLayout], device: Device, pinned: bool) -> None:
        self._layouts, self._device, self._pinned = dict(layouts), device, pinned
        self._starts: dict[str, int] = {}
        self.nbytes = 0
        for path, layout in self._layouts.items():
            self._starts[path] = self.nbytes
            self.nbytes += layout.nbytes
        self.memory: torch.Tensor | None = None
        self._pending: dict[str, _BlockRead] = {}  # reads not yet begun
        self._reads: dict[str, _BlockRead] = {}  # reads begun
        self._writer: BlockWriter | None = None
        self.begin_through: Callable[[str], None] | None = None  # called for a block that is needed before its read was begun
        self._dropped = False

    def allocate(self) -> None:
        """Allocates the buffer. Its contents are undefined."""
        self.memory, self._dropped = self._device.arena(self.nbytes), False

    def pin(self) -> None:
        """Page-locks the buffer, if this backing store is ``pinned``."""
        if self._pinned and self.memory is not None:
            self._device.pin(self.memory)

    def block(self, path: str) -> torch.Tensor:
        """The bytes of block ``path`` in RAM, flat."""
        assert self.memory is not None, f"the backing store of block {path!r} is not allocated"
        return self.memory[self._starts[path] : self._starts[path] + self._layouts[path].nbytes]

    def prepare_reads(self, writer: BlockWriter) -> list[tuple[str, int]]:
        """Prepares the read of every block from ``writer``; `begin` starts each. Returns (path, bytes) in order."""
        for path, layout in self._layouts.items():
            marks, read = list[Mark](), list[int]()
            job = _read_job(self._device, writer, layout, self.block(path), marks, read, lambda: self._dropped)
            self._pending[path] = _BlockRead(job, marks, read)
        self._writer = writer
        return [(path, layout.nbytes) for path, layout in self._layouts.items()]

    def begin(self, path: str) -> None:
        """Starts the read of block ``path`` in the background, after those started before."""
        if (block_read := self._pending.pop(path, None)) is None:
            return
        self._reads[path] = replace(block_read, join=self._device.background(block_read.join))
        if not self._pending and self._writer is not None:
            self._device.background(self._writer.close)

    def wait_read(self, path: str) -> Marks | None:
        """Waits until block ``path`` is read. Returns start and end of the read; None if it was in RAM before the run."""
        if path in self._pending:
            (self.begin_through or self.begin)(path)
        if path not in self._reads:
            return None
        block_read = self._reads[path]
        block_read.join()
        return block_read.marks[0], block_read.marks[1]

    def ready(self, path: str) -> bool:
        """Whether a copy of block ``path`` would wait for earlier copies only."""
        if path in self._pending:
            return False
        return path not in self._reads or self._device.reached(self._reads[path].marks)

    def finish_reads(self) -> list[tuple[str, int, Marks]]:
        """Starts all pending reads and waits for them.

        Returns the blocks read since the last call: path, bytes from files, marks.
        """
        for path in list(self._pending):
            self.begin(path)
        found = [(path, sum(self._reads[path].read), marks) for path in self._reads if (marks := self.wait_read(path))]
        self._reads.clear()
        self.begin_through = None
        return found

    def copy(self, path: str, target: torch.Tensor) -> Marks:
        """Queues the copy of block ``path`` into ``target`` on the device, after its read."""
        if (marks := self.wait_read(path)) is not None:
            self._device.wait("copy", marks[1])
        start = self._device.mark("copy")
        self._device.copy_in(target, self.block(path), pageable=not self._pinned)
        return start, self._device.mark("copy")

    def drop(self) -> None:
        """Releases the buffer (freed when no views of it are left) and cancels pending reads."""
        self._dropped = True
        for block_read in self._reads.values():
            block_read.abandon()
        self._reads.clear()
        self._pending.clear()
        self.begin_through = None
        self.memory = None


class Disk:
    """A backing store on disk: every copy of a block reads it from ``writer``, through a bounce buffer of ``bounce_bytes``."""

    def __init__(self, layouts: Mapping[str, BlockLayout], device: Device, writer: BlockWriter, bounce_bytes: int) -> None:
        self._layouts, self._device, self._writer = dict(layouts), device, writer
        self.nbytes = bounce_bytes
        self.memory: torch.Tensor | None = None
        self._ring = Ring(bounce_bytes)
        self.before_read: Callable[[int, bool], None] = (
            _ignore  # called with the bytes of each read, and whether the buffer is full
        )
        self._copied: dict[int, Mark] = {}  # number of a placement -> end of its copy
        self._ahead: dict[str, _BufferedBlock] = {}  # read begun, not yet copied
        self._dropped = False
        self._placements = 0
        self.reads: list[tuple[str, int, Marks]] = []

    def allocate(self) -> None:
        """Allocates the bounce buffer and page-locks it."""
        self.memory, self._dropped = self._device.arena(self.nbytes), False
        self._device.pin(self.memory)

    def begin(self, path: str) -> None:
        """Starts the read of block ``path`` for one copy. The read waits for copies out of the bytes that it overwrites."""
        layout, device = self._layouts[path], self._device
        if path in self._ahead or layout.nbytes == 0:
            return
        assert self.memory is not None, f"the bounce buffer of block {path!r} is not allocated"
        slot = self._ring.place(layout.nbytes)
        self.before_read(layout.nbytes, bool(slot.released))
        buffer = self.memory[slot.offset : slot.offset + layout.nbytes]
        marks, read = list[Mark](), list[int]()
        wait = self._wait_for_copies(slot.released)
        job = _read_job(device, self._writer, layout, buffer, marks, read, lambda: self._dropped, wait)
        self._ahead[path] = _BufferedBlock(self._placements, buffer, _BlockRead(device.background(job), marks, read))
        self._placements += 1

    def ready(self, path: str) -> bool:
        """Whether the read of block ``path`` was begun and is done."""
        return self._layouts[path].nbytes == 0 or (path in self._ahead and self._device.reached(self._ahead[path].block_read.marks))

    def copy(self, path: str, target: torch.Tensor) -> Marks:
        """Queues the copy of block ``path`` into ``target`` on the device, after its read."""
        device = self._device
        if self._layouts[path].nbytes == 0:
            return device.mark("copy"), device.mark("copy")
        self.begin(path)
        buffered = self._ahead.pop(path)
        block_read = buffered.block_read
        block_read.join()
        self.reads.append((path, sum(block_read.read), (block_read.marks[0], block_read.marks[1])))
        device.wait("copy", block_read.marks[1])
        start = device.mark("copy")
        device.copy_in(target, buffered.buffer, pageable=False)
        end = self._copied[buffered.number] = device.mark("copy")
        return start, end

    def _wait_for_copies(self, numbers: Iterable[int]) -> Callable[[], None]:
        """A function that makes the disk stream wait for the copies of these placements."""
        marks = [self._copied.pop(number) for number in numbers]

        def wait() -> None:
            for mark in marks:
                self._device.wait("disk", mark)

        return wait

    def finish_reads(self) -> list[tuple[str, int, Marks]]:
        """As `Arena.finish_reads`. Called at the end of a slot, whose barrier empties the bounce buffer."""
        found = list(self.reads)
        self.reads.clear()
        self._restart()
        return found

    def _restart(self) -> None:
        self.before_read = _ignore
        for buffered in self._ahead.values():
            buffered.block_read.abandon()
        self._ahead.clear()
        self._ring, self._placements = Ring(self.nbytes), 0
        self._copied.clear()

    def drop(self) -> None:
        """Releases the bounce buffer and closes files. Call after a barrier."""
        self._dropped = True
        self._restart()
        self.memory = None
        self._writer.close()


def _ignore(nbytes: int, full: bool) -> None:
    pass


def _read_job(
    device: Device,
    writer: BlockWriter,
    layout: BlockLayout,
    buffer: torch.Tensor,
    marks: list[Mark],
    read_bytes: list[int],
    dropped: Callable[[], bool],
    wait: Callable[[], None] | None = None,
) -> Callable[[], None]:
    """A function that reads the block into ``buffer``, unless ``dropped()``. Calls ``wait`` first; appends to ``marks`` the start
    and end of the read, to ``read_bytes`` the bytes from files."""

    def read() -> None:
        if dropped():
            return
        if wait is not None:
            wait()
        start = device.mark("disk")
        read_bytes.append(writer.write(layout, buffer, lambda held: device.arenas.count("arenas", held)))
        device.read(buffer, read_bytes[0])
        marks.extend((start, device.mark("disk")))

    return read

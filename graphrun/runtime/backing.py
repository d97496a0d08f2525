"""Where the master copy of a component's weights lies, and how a block gets from there to the device. Decides nothing about when.

pinned, pageable    | block 0 | block 1 | block 2 |      one flat buffer in RAM, filled in call order; a copy of a block waits
                         |copy                           for the block's own fill
disk                files --read--> | bounce buffer |    two of the largest blocks; a read waits for the copy out of its place
                                         |copy
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


class Blocks(Protocol):
    """Whoever gives a block's bytes."""

    def write(self, layout: BlockLayout, buffer: torch.Tensor, count: Callable[[torch.Tensor], None]) -> int:
        """Fills ``buffer``: bytes that came from disk."""

    def close(self) -> None:
        """Lets go of files."""


@dataclass(slots=True)
class _Filling:
    """A block's read: ``join`` returns when it is done, and then ``marks`` say from when to when it was read."""

    join: Callable[[], None]
    marks: list[Mark]
    read: list[int]  # bytes, once it is done

    def abandon(self) -> None:
        """Returns when it is done or has failed: whoever waited for it was told."""
        with contextlib.suppress(GraphrunError, OSError, RuntimeError):
            self.join()


@dataclass(frozen=True, slots=True)
class _Reading:
    """A block on its way into the bounce buffer, where it has this placement."""

    number: int
    buffer: torch.Tensor
    filling: _Filling


class Arena:
    """A backing store in RAM: all blocks in one buffer, in the order of ``layouts``; its pages are locked where ``pinned``."""

    def __init__(self, layouts: Mapping[str, BlockLayout], device: Device, pinned: bool) -> None:
        self._layouts, self._device, self._pinned = dict(layouts), device, pinned
        self._starts: dict[str, int] = {}
        self.nbytes = 0
        for path, layout in self._layouts.items():
            self._starts[path] = self.nbytes
            self.nbytes += layout.nbytes
        self.memory: torch.Tensor | None = None
        self._fillings: dict[str, _Filling] = {}
        self._jobs: dict[str, _Filling] = {}  # to be begun
        self._writer: Blocks | None = None
        self.wanted: Callable[[str], None] | None = None  # called for a block that is needed before its fill was begun
        self._dropped = False

    def hold(self) -> None:
        """The memory is there, its bytes are not yet."""
        self.memory, self._dropped = self._device.arena(self.nbytes), False

    def lock(self) -> None:
        """Locks the pages, where the backing store asks for it."""
        if self._pinned and self.memory is not None:
            self._device.pin(self.memory)

    def block(self, path: str) -> torch.Tensor:
        """Block ``path`` in RAM, flat."""
        assert self.memory is not None, f"the backing store of block {path!r} is not held"
        return self.memory[self._starts[path] : self._starts[path] + self._layouts[path].nbytes]

    def fill(self, writer: Blocks) -> list[tuple[str, int]]:
        """Blocks that `begin` is to read from ``writer``, in order: paths and bytes."""
        for path, layout in self._layouts.items():
            marks, read = list[Mark](), list[int]()
            job = _job(self._device, writer, layout, self.block(path), marks, read, lambda: self._dropped)
            self._jobs[path] = _Filling(job, marks, read)
        self._writer = writer
        return [(path, layout.nbytes) for path, layout in self._layouts.items()]

    def begin(self, path: str) -> None:
        """Begins to read block ``path``, beside what else happens; one block after another."""
        if (filling := self._jobs.pop(path, None)) is None:
            return
        self._fillings[path] = replace(filling, join=self._device.background(filling.join))
        if not self._jobs and self._writer is not None:
            self._device.background(self._writer.close)

    def filled(self, path: str) -> Marks | None:
        """Waits for the fill of block ``path``: from when to when it was read; None if it was there before the run."""
        if path in self._jobs:
            (self.wanted or self.begin)(path)
        if path not in self._fillings:
            return None
        filling = self._fillings[path]
        filling.join()
        return filling.marks[0], filling.marks[1]

    def ready(self, path: str) -> bool:
        """Whether a copy of block ``path`` would wait for nothing but copies."""
        if path in self._jobs:
            return False
        return path not in self._fillings or self._device.reached(self._fillings[path].marks)

    def settle(self) -> list[tuple[str, int, Marks]]:
        """Begins and awaits what is to be filled: blocks that were read since the last call, with the bytes that files gave for
        them and their marks."""
        for path in list(self._jobs):
            self.begin(path)
        found = [(path, sum(self._fillings[path].read), marks) for path in self._fillings if (marks := self.filled(path))]
        self._fillings.clear()
        self.wanted = None
        return found

    def copy(self, path: str, target: torch.Tensor) -> Marks:
        """Queues the copy of block ``path`` into ``target`` on the device, behind its fill."""
        if (marks := self.filled(path)) is not None:
            self._device.wait("copy", marks[1])
        start = self._device.mark("copy")
        self._device.copy_in(target, self.block(path), pageable=not self._pinned)
        return start, self._device.mark("copy")

    def drop(self) -> None:
        """The memory is gone, when nothing else holds views of it. What is still to be read is not."""
        self._dropped = True
        for filling in self._fillings.values():
            filling.abandon()
        self._fillings.clear()
        self._jobs.clear()
        self.wanted = None
        self.memory = None


class Disk:
    """A backing store on disk: blocks are read by ``writer`` whenever they are copied, through a bounce buffer of ``bounce_bytes``."""

    def __init__(self, layouts: Mapping[str, BlockLayout], device: Device, writer: Blocks, bounce_bytes: int) -> None:
        self._layouts, self._device, self._writer = dict(layouts), device, writer
        self.nbytes = bounce_bytes
        self.memory: torch.Tensor | None = None
        self._ring = Ring(bounce_bytes)
        self.before_read: Callable[[int, bool], None] = _nothing  # told of each read: its bytes, and whether the buffer was full
        self._copied: dict[int, Mark] = {}
        self._ahead: dict[str, _Reading] = {}  # begun, and not yet copied
        self._dropped = False
        self._placements = 0
        self.reads: list[tuple[str, int, Marks]] = []

    def hold(self) -> None:
        """The bounce buffer is there, with locked pages."""
        self.memory, self._dropped = self._device.arena(self.nbytes), False
        self._device.pin(self.memory)

    def begin(self, path: str) -> None:
        """Begins to read block ``path``, which is copied once. The read waits for copies out of the place it takes."""
        layout, device = self._layouts[path], self._device
        if path in self._ahead or layout.nbytes == 0:
            return
        assert self.memory is not None, f"the bounce buffer of block {path!r} is not held"
        place = self._ring.place(layout.nbytes)
        self.before_read(layout.nbytes, bool(place.released))
        buffer = self.memory[place.offset : place.offset + layout.nbytes]
        marks, read = list[Mark](), list[int]()
        job = _job(device, self._writer, layout, buffer, marks, read, lambda: self._dropped, self._leaving(place.released))
        self._ahead[path] = _Reading(self._placements, buffer, _Filling(device.background(job), marks, read))
        self._placements += 1

    def ready(self, path: str) -> bool:
        """Whether block ``path`` was begun and is read."""
        return self._layouts[path].nbytes == 0 or (path in self._ahead and self._device.reached(self._ahead[path].filling.marks))

    def copy(self, path: str, target: torch.Tensor) -> Marks:
        """Queues the copy of block ``path`` into ``target``, behind its read."""
        device = self._device
        if self._layouts[path].nbytes == 0:
            return device.mark("copy"), device.mark("copy")
        self.begin(path)
        reading = self._ahead.pop(path)
        filling = reading.filling
        filling.join()
        self.reads.append((path, sum(filling.read), (filling.marks[0], filling.marks[1])))
        device.wait("copy", filling.marks[1])
        start = device.mark("copy")
        device.copy_in(target, reading.buffer, pageable=False)
        end = self._copied[reading.number] = device.mark("copy")
        return start, end

    def _leaving(self, numbers: Iterable[int]) -> Callable[[], None]:
        marks = [self._copied.pop(number) for number in numbers]

        def wait() -> None:
            for mark in marks:
                self._device.wait("disk", mark)

        return wait

    def settle(self) -> list[tuple[str, int, Marks]]:
        """Blocks that were read since the last call, as of an `Arena`. Called when a slot ends: a barrier empties the buffer."""
        found = list(self.reads)
        self.reads.clear()
        self._restart()
        return found

    def _restart(self) -> None:
        self.before_read = _nothing
        for reading in self._ahead.values():
            reading.filling.abandon()
        self._ahead.clear()
        self._ring, self._placements = Ring(self.nbytes), 0
        self._copied.clear()

    def drop(self) -> None:
        """The bounce buffer is gone, and files are closed. Behind a barrier."""
        self._dropped = True
        self._restart()
        self.memory = None
        self._writer.close()


def _nothing(nbytes: int, full: bool) -> None:
    pass


def _job(
    device: Device,
    writer: Blocks,
    layout: BlockLayout,
    buffer: torch.Tensor,
    marks: list[Mark],
    read_bytes: list[int],
    dropped: Callable[[], bool],
    wait: Callable[[], None] | None = None,
) -> Callable[[], None]:
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

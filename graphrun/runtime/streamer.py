"""Streams the blocks of one component through a staging ring while it runs. The plan sets the blocks and the size of the ring.

A pass is one copy of a block into the ring and one run of it.

    queue    load 0   pass 1   load 2   pass 3   pass 1   pass 3 ...     passes in call order, repeated; each load once
    ring               | 1      | 3   |                                  copies are issued ahead while the ring has free bytes
    hooks    before 1: issue its copy, compute waits for it, bind tensors     after 1: unbind tensors, mark, issue more copies

Blocks that the slot loads and keeps are copied in the same queue, so that copies arrive in the order of use. The host never waits:
a copy that overwrites a block waits on the copy stream for the mark after that block's compute. A block larger than the ring gets a
buffer of its own when compute reaches it; the ring is released for that time. Copies are issued ahead only for the passes that the
slot expects. If the component runs more often, the copies of a further call are issued when that call begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from graphrun.errors import BrokenPlan
from graphrun.model.ring import Ring, RingSlot
from graphrun.runtime.devices.device import Device, Mark
from graphrun.runtime.residency import Residency

Note = Callable[[str, str, str, int, tuple[Mark, Mark]], None]
"""Called for each copy and each run of a streamed block: kind (``load``, ``stream``, ``block``), component, block, bytes, marks."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """A block whose copy was issued: number of its placement in the ring, its buffer, and the mark after its copy."""

    number: int
    path: str
    buffer: torch.Tensor
    copied: Mark


@dataclass(frozen=True, slots=True)
class Streaming:
    """What a slot streams of one component. Paths of blocks are in call order."""

    paths: tuple[str, ...]  # streamed blocks; a layer that runs several times in a call is listed several times
    passes: int  # passes that the slot expects in all its calls
    ring_bytes: int
    loads: tuple[str, ...]  # blocks that the slot loads and keeps, already allocated
    order: tuple[str, ...]  # all blocks
    rooms: Mapping[str, int] = field(default_factory=dict)  # block -> bytes of the activation that are free while it runs


class Streamer:
    """Streams a component for one slot. ``idle`` is called when no further copy can be issued, and before a copy that has to wait
    for compute: other copies fit in there. Raises what the device raises."""

    def __init__(self, device: Device, residency: Residency, streaming: Streaming, note: Note, idle: Callable[[], None]) -> None:
        self._device, self._residency = device, residency
        self._paths = streaming.paths
        self._indices: dict[str, list[int]] = {}  # block -> its indices in paths
        for index, path in enumerate(self._paths):
            self._indices.setdefault(path, []).append(index)
        self._rooms = streaming.rooms
        self._limit = streaming.passes
        self._loads = _loads_before(streaming)
        self._note, self._idle = note, idle
        self._ring = Ring(streaming.ring_bytes)
        self._buffer: torch.Tensor | None = device.allocate(streaming.ring_bytes)
        self._due_reached = False  # whether compute has reached the due pass
        self._issued: deque[_Pass] = deque()
        self._due = 0  # the pass that compute runs next; pass p is of block paths[p % len(paths)]
        self._next = 0  # the pass whose copy is issued next
        self._placements = 0
        self._reserved: RingSlot | None = None  # ring slot of the next pass, which may wait for blocks in it to finish
        self._done: dict[int, Mark | None] = {}  # finished placements -> mark after their compute (None: the block did not run)
        self._last = -1  # index in paths of the last block that ran in this call
        self._bound: str | None = None  # the block that runs now
        self._began: Mark = None  # start of its compute
        self._hooks: list[RemovableHandle] = []

    def open(self) -> None:
        """Registers hooks and issues the first copies."""
        for path in self._indices:
            block = self._residency.module.get_submodule(path)
            self._hooks.append(block.register_forward_pre_hook(self._before(path)))
            self._hooks.append(block.register_forward_hook(self._after(path)))
        self.issue_ahead()

    def begin_call(self) -> None:
        """Call at the start of each call into the component."""
        self._last = -1
        if self._due >= self._limit:
            self._limit = self._due + len(self._paths)
        self.issue_ahead()

    def issue_ahead(self) -> None:
        """Issues copies until the next one would overwrite a block that compute has not run yet."""
        while True:
            for path in self._loads.pop(self._next, ()):
                self.load(path)
            if self._next >= self._limit or not self._issue():
                break
        self._idle()

    def load(self, path: str) -> None:
        """Issues the copy of a block that the slot loads and keeps."""
        marks = self._residency.load(path, self._device)
        self._note("load", self._residency.name, path, self._residency.nbytes(path), marks)

    def load_now(self, path: str) -> None:
        """Issues the load of ``path`` if it is still queued: compute has reached it."""
        for number, paths in self._loads.items():
            if path in paths:
                self._loads[number] = tuple(other for other in paths if other != path)
                self.load(path)
                return

    def finish(self) -> None:
        """Issues the loads that are still queued."""
        for paths in self._loads.values():
            for path in paths:
                self.load(path)
        self._loads.clear()

    def release(self) -> None:
        """Removes hooks, unbinds the running block and releases the ring. Call after a barrier or a failure."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._bound is not None:
            self._residency.unbind(self._bound)
        self._bound, self._buffer = None, None
        self._issued.clear()

    def _issue(self) -> bool:
        """Issues the copy of the next pass; False if it would overwrite a block that compute has not run yet."""
        path, following = (self._paths[number % len(self._paths)] for number in (self._next, self._next + 1))
        nbytes = self._residency.nbytes(path)
        after = self._residency.nbytes(following) if self._next + 1 < self._limit else 0
        slot = self._reserved = self._reserved or self._ring.place(nbytes, after, self._rooms.get(path, 0))
        if any(number not in self._done for number in slot.released) or (slot.alone and not self._due_reached):
            return False
        self._wait_for(slot)
        buffer = self._buffer_of(slot, nbytes)
        if slot.released or slot.alone:
            self._idle()
        marks = self._residency.copy(path, buffer)
        self._note("stream", self._residency.name, path, nbytes, marks)
        self._issued.append(_Pass(self._placements, path, buffer, marks[1]))
        self._placements += 1
        self._next += 1
        return True

    def _buffer_of(self, slot: RingSlot, nbytes: int) -> torch.Tensor:
        """The bytes of ``slot`` in the ring; for a block larger than the ring, a new buffer in place of the ring."""
        if slot.alone:
            self._buffer = None
            buffer = self._device.allocate(nbytes)
            self._device.wait("copy", self._device.mark("compute"))
            return buffer
        if self._buffer is None:
            self._buffer = self._device.allocate(self._ring.capacity_bytes)
            self._device.wait("copy", self._device.mark("compute"))
        return self._buffer[slot.offset : slot.offset + nbytes]

    def _wait_for(self, slot: RingSlot) -> None:
        """Makes the copy stream wait until compute has finished the blocks that ``slot`` overwrites."""
        self._reserved = None
        marks = [mark for number in slot.released if (mark := self._done.pop(number)) is not None]
        if marks:
            self._device.wait("copy", marks[-1])

    def _before(self, path: str) -> Callable[[nn.Module, object], None]:
        def before(_: nn.Module, __: object) -> None:
            if not self._residency.joined:
                return  # another dtype variant of the component runs
            self._advance_to(path)
            if not self._issued:
                self._limit, self._due_reached = max(self._limit, self._due + 1), True
                self.issue_ahead()
                self._due_reached = False
            due = self._issued[0]
            self._device.wait("compute", due.copied)
            self._bound = path
            self._residency.bind(path, due.buffer)
            self._began = self._device.mark("compute")

        return before

    def _after(self, path: str) -> Callable[[nn.Module, object, object], None]:
        def after(_: nn.Module, __: object, ___: object) -> None:
            if not self._residency.joined:
                return
            self._residency.unbind(path)
            self._bound = None
            end = self._done[self._issued.popleft().number] = self._device.mark("compute")
            self._note("block", self._residency.name, path, 0, (self._began, end))
            self._due += 1
            self.issue_ahead()

        return after

    def _advance_to(self, path: str) -> None:
        """Advances to the pass of ``path``. Passes that this call skips (an entry point may use some blocks only) are discarded.

        Raises BrokenPlan when the blocks of a call do not run in the plan's order.
        """
        index = next((index for index in self._indices[path] if index > self._last), -1)
        if index < 0 or self._bound is not None:
            before = self._bound or self._paths[self._last]
            raise BrokenPlan(
                f"{self._residency.name}: block {path} ran after {before}, which is not the order of the plan's blocks"
            )
        self._last = index
        while self._due % len(self._paths) != index:
            if self._issued:
                self._done[self._issued.popleft().number] = None
            else:
                self._skip()
            self._due += 1

    def _skip(self) -> None:
        """Skips the due pass, whose copy was not issued. Its ring slot, if it was reserved, stays empty.

        The copy stream waits for the blocks that were in that slot all the same: the ring no longer tracks them, and the next
        placement may overlap them although it lies next to the empty slot.
        """
        if self._reserved is not None:
            self._wait_for(self._reserved)
            self._done[self._placements] = None
            self._placements += 1
        self._next += 1


def _loads_before(streaming: Streaming) -> dict[int, tuple[str, ...]]:
    """Number of a pass -> the loads needed before it. Those after the last streamed block: under the number of passes in a call."""
    found: dict[int, tuple[str, ...]] = {}
    number = 0
    streamed, loads = set(streaming.paths), set(streaming.loads)
    for path in streaming.order:
        if path in loads:
            found[number] = (*found.get(number, ()), path)
            loads.remove(path)
        number += path in streamed
    return found

"""Blocks of one component passing through a staging ring while it runs. Which blocks, and how large a ring, the plan has said.

    queue    load 0   pass 1   load 2   pass 3   pass 1   pass 3 ...     call order, over and over; loads once
    ring               | 1      | 3   |                                  filled ahead as far as computed blocks leave room
    hooks    before 1: copy issued, compute waits for it, tensors placed      after 1: host tensors back, mark, fill ahead

Blocks that the slot loads and keeps are copied in the same queue, so that what is needed first arrives first. The host never waits:
a copy over a block's place waits on the copy stream for the mark made after that block. A block that the ring is too small for
comes in its place, in a buffer of its own, when compute has come to it. Prefetch stops at the passes that the slot
expects; a component that runs on beyond them is still served, block by block.
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
"""Told of each copy: kind (``load`` or ``stream``), component, block, bytes, marks before and after."""


@dataclass(frozen=True, slots=True)
class _Passing:
    """A block that was placed in the ring: the placement's number, its bytes, and the mark after its copy."""

    number: int
    path: str
    buffer: torch.Tensor
    arrived: Mark


@dataclass(frozen=True, slots=True)
class Streaming:
    """What a slot streams of one component. Paths are in call order."""

    paths: tuple[str, ...]  # the blocks that pass through the ring; a layer may pass several times in a call
    passes: int  # how often one is expected to, in all
    ring_bytes: int
    loads: tuple[str, ...]  # blocks that the slot loads and keeps, already allocated
    order: tuple[str, ...]  # all blocks
    rooms: Mapping[str, int] = field(default_factory=dict)  # what a block finds beside the ring while it runs


class Streamer:
    """Streams a component for one slot. ``idle`` is called when the ring has no room left, and when it has
    some again. Raises what the device raises."""

    def __init__(self, device: Device, residency: Residency, streaming: Streaming, note: Note, idle: Callable[[], None]) -> None:
        self._device, self._residency = device, residency
        self._paths = streaming.paths
        self._places: dict[str, list[int]] = {}
        for index, path in enumerate(self._paths):
            self._places.setdefault(path, []).append(index)
        self._rooms = streaming.rooms
        self._limit = streaming.passes
        self._loads = _loads_before(streaming)
        self._note, self._idle = note, idle
        self._ring = Ring(streaming.ring_bytes)
        self._buffer: torch.Tensor | None = device.allocate(streaming.ring_bytes)
        self._arrived = False  # compute has come to the pass that is due
        self._issued: deque[_Passing] = deque()
        self._due = 0  # the pass that compute comes to next; pass p is of block p % len(paths)
        self._next = 0  # the pass whose copy is issued next
        self._placements = 0
        self._waiting: RingSlot | None = None  # the next pass has this place, once the blocks that lie there are done
        self._done: dict[int, Mark | None] = {}  # placements that compute has left, and when
        self._last = -1  # index of the last block of this call
        self._bound: str | None = None
        self._began: Mark = None  # when the block that is bound could begin
        self._hooks: list[RemovableHandle] = []

    def open(self) -> None:
        """Hooks are set and the ring is filled."""
        for path in self._places:
            block = self._residency.module.get_submodule(path)
            self._hooks.append(block.register_forward_pre_hook(self._before(path)))
            self._hooks.append(block.register_forward_hook(self._after(path)))
        self.fill()

    def begin_call(self) -> None:
        """The component is entered: its blocks come in order from the first again."""
        self._last = -1
        if self._due >= self._limit:
            self._limit = self._due + len(self._paths)
        self.fill()

    def fill(self) -> None:
        """Issues copies as far ahead as the ring has room that compute will have left."""
        while True:
            for path in self._loads.pop(self._next, ()):
                self.load(path)
            if self._next >= self._limit or not self._issue():
                break
        self._idle()

    def load(self, path: str) -> None:
        """Issues the copy of a block that the slot keeps."""
        marks = self._residency.load(path, self._device)
        self._note("load", self._residency.name, path, self._residency.nbytes(path), marks)

    def load_now(self, path: str) -> None:
        """Issues the copy of ``path`` if it was kept waiting for its turn: compute has come to it first."""
        for turn, paths in self._loads.items():
            if path in paths:
                self._loads[turn] = tuple(other for other in paths if other != path)
                self.load(path)
                return

    def finish(self) -> None:
        """Issues the loads whose turn did not come."""
        for paths in self._loads.values():
            for path in paths:
                self.load(path)
        self._loads.clear()

    def release(self) -> None:
        """Hooks, staged views and the ring are gone, whatever was under way. Behind a barrier, or after a failure."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._bound is not None:
            self._residency.unbind(self._bound)
        self._bound, self._buffer = None, None
        self._issued.clear()

    def _issue(self) -> bool:
        """Issues the next pass's copy, unless it has to wait for a block that compute has not come to yet."""
        path, following = (self._paths[turn % len(self._paths)] for turn in (self._next, self._next + 1))
        nbytes = self._residency.nbytes(path)
        after = self._residency.nbytes(following) if self._next + 1 < self._limit else 0
        place = self._waiting = self._waiting or self._ring.place(nbytes, after, self._rooms.get(path, 0))
        if any(number not in self._done for number in place.released) or (place.alone and not self._arrived):
            return False
        self._wait_for(place)
        buffer = self._room_for(place, nbytes)
        if place.released or place.alone:
            self._idle()
        marks = self._residency.stage(path, buffer, self._device)
        self._note("stream", self._residency.name, path, nbytes, marks)
        self._issued.append(_Passing(self._placements, path, buffer, marks[1]))
        self._placements += 1
        self._next += 1
        return True

    def _room_for(self, place: RingSlot, nbytes: int) -> torch.Tensor:
        """The bytes of ``place``: of the ring, or in its place while compute is where it is now."""
        if place.alone:
            self._buffer = None
            buffer = self._device.allocate(nbytes)
            self._device.wait("copy", self._device.mark("compute"))
            return buffer
        if self._buffer is None:
            self._buffer = self._device.allocate(self._ring.capacity_bytes)
            self._device.wait("copy", self._device.mark("compute"))
        return self._buffer[place.offset : place.offset + nbytes]

    def _wait_for(self, place: RingSlot) -> None:
        """The copy stream waits until compute has left the blocks that lay in ``place``."""
        self._waiting = None
        marks = [mark for number in place.released if (mark := self._done.pop(number)) is not None]
        if marks:
            self._device.wait("copy", marks[-1])

    def _before(self, path: str) -> Callable[[nn.Module, object], None]:
        def before(_: nn.Module, __: object) -> None:
            if not self._residency.joined:
                return  # another form of the component computes
            self._come_to(path)
            if not self._issued:
                self._limit, self._arrived = max(self._limit, self._due + 1), True
                self.fill()
                self._arrived = False
            passing = self._issued[0]
            self._device.wait("compute", passing.arrived)
            self._bound = path
            self._residency.bind(path, passing.buffer)
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
            self.fill()

        return after

    def _come_to(self, path: str) -> None:
        """Moves on to ``path``. Blocks between were left out by this call (an entry point may use a part): their copies are lost.

        Raises BrokenPlan when the blocks of one call do not come in the plan's order.
        """
        index = next((index for index in self._places[path] if index > self._last), -1)
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
                self._leave_out()
            self._due += 1

    def _leave_out(self) -> None:
        """The pass that is due goes by without a copy. Its place, if it waited for one, stays empty.

        The copy stream waits for the blocks that lay there all the same: the ring has forgotten them, and what is placed next may
        lie beside the empty place and still over them.
        """
        if self._waiting is not None:
            self._wait_for(self._waiting)
            self._done[self._placements] = None
            self._placements += 1
        self._next += 1


def _loads_before(streaming: Streaming) -> dict[int, tuple[str, ...]]:
    """The loads by the pass before which each is needed; those behind the last streamed block by the number of passes in a call."""
    turns: dict[int, tuple[str, ...]] = {}
    turn = 0
    streamed, loads = set(streaming.paths), set(streaming.loads)
    for path in streaming.order:
        if path in loads:
            turns[turn] = (*turns.get(turn, ()), path)
            loads.remove(path)
        turn += path in streamed
    return turns

"""Blocks of one component passing through a staging ring while it runs. Which blocks, and how large a ring, the plan has said.

    queue    load 0   pass 1   load 2   pass 3   pass 1   pass 3 ...     call order, over and over; loads once
    ring               | 1      | 3   |                                  filled ahead as far as computed blocks leave room
    hooks    before 1: copy issued, compute waits for it, tensors placed      after 1: host tensors back, mark, fill ahead

Blocks that the slot loads and keeps are copied in the same queue, so that what is needed first arrives first. The host never waits:
a copy over a block's place waits on the copy stream for the mark made after that block. Prefetch stops at the passes that the slot
expects; a component that runs on beyond them is still served, block by block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from graphrun.errors import BrokenPlan
from graphrun.executor.device import Device, Mark
from graphrun.executor.residency import Residency
from graphrun.planner.ring import Ring

Note = Callable[[str, str, str, int, tuple[Mark, Mark]], None]
"""Told of each copy: kind (``load`` or ``stream``), component, block, bytes, marks before and after."""


@dataclass(frozen=True, slots=True)
class _Passing:
    """A block that was placed in the ring: the placement's number, its bytes, and the mark after its copy."""

    number: int
    path: str
    buffer: torch.Tensor
    arrived: Mark


class Streamer:
    """Streams the blocks ``paths`` (call order) of a component for one slot.

    ``passes``: how many block passes the slot expects. ``loads``: blocks that the slot loads and keeps, already allocated.
    ``order``: all blocks in call order. ``after_pass`` is called when a block is done. Raises what the device raises.
    """

    def __init__(
        self,
        device: Device,
        residency: Residency,
        paths: Sequence[str],
        passes: int,
        ring_bytes: int,
        order: Sequence[str],
        loads: Sequence[str],
        note: Note,
        after_pass: Callable[[], None],
    ) -> None:
        self._device, self._residency = device, residency
        self._paths = tuple(paths)
        self._index = {path: index for index, path in enumerate(self._paths)}
        self._limit = passes
        self._loads = _loads_before(self._paths, order, loads)
        self._note, self._after_pass = note, after_pass
        self._ring = Ring(ring_bytes)
        self._buffer: torch.Tensor | None = device.allocate(ring_bytes)
        self._issued: deque[_Passing] = deque()
        self._due = 0  # the pass that compute comes to next; pass p is of block p % len(paths)
        self._next = 0  # the pass whose copy is issued next
        self._placements = 0
        self._waiting: tuple[int, tuple[int, ...]] | None = None  # the next pass has this offset, once these placements are done
        self._done: dict[int, Mark | None] = {}
        self._last = -1  # index of the last block of this call
        self._bound: str | None = None
        self._hooks: list[RemovableHandle] = []

    def open(self) -> None:
        """Hooks are set and the ring is filled."""
        for path in self._paths:
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
                return

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

    def close(self) -> None:
        """Issues the loads that are still due, then lets go of hooks. The ring stays until `release`."""
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
        path = self._paths[self._next % len(self._paths)]
        nbytes = self._residency.nbytes(path)
        offset, released = self._waiting or self._ring.place(nbytes)
        self._waiting = (offset, released)
        if any(number not in self._done for number in released):
            return False
        self._waiting = None
        marks = [self._done.pop(number) for number in released]
        if marks and marks[-1] is not None:
            self._device.wait("copy", marks[-1])
        assert self._buffer is not None
        buffer = self._buffer[offset : offset + nbytes]
        copied = self._residency.stage(path, buffer, self._device)
        self._note("stream", self._residency.name, path, nbytes, copied)
        self._issued.append(_Passing(self._placements, path, buffer, copied[1]))
        self._placements += 1
        self._next += 1
        return True

    def _before(self, path: str) -> Callable[[nn.Module, object], None]:
        def before(_: nn.Module, __: object) -> None:
            self._come_to(path)
            if not self._issued:
                self._limit = max(self._limit, self._due + 1)
                self.fill()
            passing = self._issued[0]
            self._device.wait("compute", passing.arrived)
            self._residency.bind(path, passing.buffer)
            self._bound = path

        return before

    def _after(self, path: str) -> Callable[[nn.Module, object, object], None]:
        def after(_: nn.Module, __: object, ___: object) -> None:
            self._residency.unbind(path)
            self._bound = None
            self._done[self._issued.popleft().number] = self._device.mark("compute")
            self._due += 1
            self.fill()
            self._after_pass()

        return after

    def _come_to(self, path: str) -> None:
        """Moves on to ``path``. Blocks between were left out by this call (an entry point may use a part): their copies are lost."""
        index = self._index[path]
        if index <= self._last or self._bound is not None:
            raise BrokenPlan(
                f"{self._residency.name}: block {path} ran out of the planned order, after {self._bound or self._paths[self._last]}; "
                "plan again with the inputs of this run"
            )
        self._last = index
        while self._due % len(self._paths) != index:
            if self._issued:
                self._done[self._issued.popleft().number] = None
            else:
                self._leave_out()
            self._due += 1

    def _leave_out(self) -> None:
        """The pass that is due was not issued: its turn goes by. A place that waits in the ring is taken by the next block."""
        raise NotImplementedError


def _loads_before(paths: Sequence[str], order: Sequence[str], loads: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """``loads`` by the pass before which each is needed; those behind the last streamed block by the number of passes in a call."""
    turns: dict[int, tuple[str, ...]] = {}
    streamed, kept, turn = set(paths), set(loads), 0
    for path in order:
        if path in kept:
            turns[turn] = (*turns.get(turn, ()), path)
        turn += path in streamed
    return turns

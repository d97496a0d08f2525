"""Copies the blocks of one component to the device while it runs: streamed ones through a staging
ring buffer, and those that the slot loads and keeps. The plan sets the blocks and the size of the
ring buffer.

A pass is one copy of a block into the ring buffer and one run of it.

    queue    load 0   pass 1   load 2   pass 3   pass 1   pass 3 ...     passes in call order,
    repeated; each load once ring buffer               | 1      | 3   | copies are issued ahead
    while the ring buffer has free bytes hooks    before 1: issue its copy, compute waits for it,
    bind tensors     after 1: unbind tensors, mark, issue more copies

All copies are issued in the order of use. The host waits only for the read of a block that compute
has reached: where the next block is not in RAM yet, its read is begun, and its copy is issued in a
later hook. A copy from pageable memory makes the host wait for its end. It is issued when compute
reaches its block: the device then computes what is queued before it. A copy that overwrites a block
waits on the copy stream for the mark after that block's compute. Copies are issued ahead only for
the passes that the slot expects. If the component runs more often, the copies of a further call are
issued when that call begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphrun.errors import BrokenPlan
from graphrun.model.ring_buffer import RingBuffer, RingSlot
from graphrun.modules.compiled import Handle, hook_around, outermost_compiled
from graphrun.runtime.devices.device import Mark
from graphrun.runtime.events import EventRecorder
from graphrun.runtime.residency import Residency


@dataclass(frozen=True, slots=True)
class _Pass:
    """A block whose copy was issued: number of its placement in the ring buffer, its buffer, and
    the mark after its copy."""

    number: int
    path: str
    buffer: torch.Tensor
    copied: Mark


@dataclass(frozen=True, slots=True)
class Streaming:
    """What a slot copies of a component that it computes with. Paths of blocks are in call
    order."""

    order: Sequence[str]  # all blocks
    loads: Sequence[str]  # blocks that the slot loads and keeps, already allocated
    # (block, calls of the slot in which it runs); a layer that runs twice in a call, twice
    streamed: Sequence[tuple[str, int]]
    ring_buffer_bytes: int


class Streamer:
    """Copies the blocks of a component for one slot. ``idle`` is called when no further copy can be
    issued, and before a copy that has to wait for compute: other copies fit in there. Raises what
    the device raises."""

    def __init__(
        self,
        residency: Residency,
        streaming: Streaming,
        recorder: EventRecorder,
        idle: Callable[[], None],
    ) -> None:
        self._device, self._residency, self._recorder, self._idle = (
            residency.device,
            residency,
            recorder,
            idle,
        )
        self._paths = [path for path, _ in streaming.streamed]
        self._limit = sum(calls for _, calls in streaming.streamed)  # passes that the slot expects
        self._loads = _loads_before(streaming)
        self._ring_buffer = RingBuffer(streaming.ring_buffer_bytes)
        self._buffer = self._device.allocate(streaming.ring_buffer_bytes) if self._paths else None
        self.streamed_bytes = 0  # issued so far
        self.waiting = False  # whether the next copy waits for the read of its block
        self._issued: deque[_Pass] = deque()
        self._due = 0  # the pass that compute runs next; pass p is of block paths[p % len(paths)]
        self._due_reached = False  # whether compute has reached the due pass
        self._next = 0  # the pass whose copy is issued next
        self._placements = 0
        # ring buffer slot of the next pass, which may wait for blocks in it to finish
        self._reserved: RingSlot | None = None
        self._done: dict[
            int, Mark | None
        ] = {}  # finished placements -> mark after their compute (None: the block did not run)
        self._last = -1  # index in paths of the last block that ran in this call
        self._bound: str | None = None  # the block that runs now
        self._began: Mark = None  # start of its compute
        self._hooks: list[Handle] = []

    def open(self) -> None:
        """Registers hooks and issues the first copies."""
        for path in dict.fromkeys(self._paths):
            self._hook(path, self._before, self._after)
        for _, path in self._loads:
            self._hook(path, self._before_loaded)
        self.issue_ahead()

    def begin_call(self) -> None:
        """Call at the start of each call into the component."""
        self._last = -1
        if self._due >= self._limit:
            self._limit = self._due + len(self._paths)
        self.issue_ahead()

    def issue_ahead(self) -> None:
        """Issues copies until the next one would overwrite a block that compute has not run yet,
        would make the host wait, or its block is not in RAM."""
        while True:
            due = self._due_reached and self._next == self._due
            if self._residency.backing_store.pageable and not due:
                self.waiting = False
                break
            if self._loads and self._loads[0][0] <= self._next:
                path, issue = self._loads[0][1], self._load_next
            elif self._next < self._limit and self._place():
                path, issue = self._paths[self._next % len(self._paths)], self._issue
            else:
                self.waiting = False
                break
            self.waiting = not self._residency.backing_store.request(path)
            if self.waiting and not due:
                break
            issue()
        self._idle()

    def finish(self) -> None:
        """Issues the loads that are still queued."""
        while self._loads:
            self._load_next()

    def release(self) -> None:
        """Removes hooks, unbinds the running block and releases the ring buffer. Call after a
        barrier or a failure."""
        for hook in reversed(self._hooks):
            hook.remove()
        self._hooks.clear()
        if self._bound is not None:
            self._residency.unbind(self._bound)
        self._bound, self._buffer = None, None
        self._issued.clear()

    def _load(self, path: str) -> None:
        """Issues the copy of a block that the slot loads and keeps."""
        marks = self._residency.load(path)
        self._recorder.note(
            "load", self._residency.name, path, self._residency.nbytes(path), marks, self._device
        )

    def _load_next(self) -> None:
        self._load(self._loads.popleft()[1])

    def _place(self) -> bool:
        """Reserves the ring buffer slot of the next pass. False if its copy would overwrite a block
        that compute has not run yet."""
        path, following = (
            self._paths[number % len(self._paths)] for number in (self._next, self._next + 1)
        )
        after = self._residency.nbytes(following) if self._next + 1 < self._limit else 0
        slot = self._reserved = self._reserved or self._ring_buffer.place(
            self._residency.nbytes(path), after
        )
        return all(number in self._done for number in slot.released)

    def _issue(self) -> None:
        """Issues the copy of the next pass into its reserved ring buffer slot."""
        path, slot = self._paths[self._next % len(self._paths)], self._reserved
        assert slot is not None
        nbytes = self._residency.nbytes(path)
        self._wait_for(slot)
        assert self._buffer is not None
        buffer = self._buffer[slot.offset : slot.offset + nbytes]
        if slot.released:
            self.waiting = False
            self._idle()
        marks = self._residency.copy(path, buffer)
        self._recorder.note("stream", self._residency.name, path, nbytes, marks)
        self.streamed_bytes += nbytes
        self._issued.append(_Pass(self._placements, path, buffer, marks[1]))
        self._placements += 1
        self._next += 1

    def _wait_for(self, slot: RingSlot) -> None:
        """Makes the copy stream wait until compute has finished the blocks that ``slot``
        overwrites."""
        self._reserved = None
        marks = [mark for number in slot.released if (mark := self._done.pop(number)) is not None]
        if marks:
            self._device.wait("copy", marks[-1])

    def _hook(
        self, path: str, before: Callable[[str], None], after: Callable[[str], None] | None = None
    ) -> None:
        """Calls ``before`` and ``after`` with ``path`` around each run of the block, unless another
        dtype variant of the component runs."""

        def around(act: Callable[[str], None]) -> Callable[[], None]:
            def hook() -> None:
                if self._residency.joined:
                    act(path)

            return hook

        block = outermost_compiled(self._residency.module, path)
        self._hooks += hook_around(block, around(before), None if after is None else around(after))

    def _before_loaded(self, path: str) -> None:
        """Compute has reached a block that the slot loads."""
        queued = next((load for load in self._loads if load[1] == path), None)
        if queued is not None:
            self._loads.remove(queued)
            self._load(path)
        self._residency.wait_copy(path)

    def _before(self, path: str) -> None:
        """Compute has reached a streamed block."""
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

    def _after(self, path: str) -> None:
        self._residency.unbind(path)
        self._bound = None
        end = self._done[self._issued.popleft().number] = self._device.mark("compute")
        self._recorder.note("block", self._residency.name, path, 0, (self._began, end))
        self._due += 1
        self.issue_ahead()

    def _advance_to(self, path: str) -> None:
        """Advances to the pass of ``path``. Passes that this call skips (an entry point may use
        some blocks only) are discarded.

        Raises BrokenPlan when the blocks of a call do not run in the plan's order.
        """
        index = next(
            (n for n in range(self._last + 1, len(self._paths)) if self._paths[n] == path), -1
        )
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
        """Skips the due pass, whose copy was not issued. Its ring buffer slot, if it was reserved,
        stays empty.

        The copy stream waits for the blocks that were in that slot all the same: the ring buffer no
        longer tracks them, and the next placement may overlap them although it lies next to the
        empty slot.
        """
        if self._reserved is not None:
            self._wait_for(self._reserved)
            self._done[self._placements] = None
            self._placements += 1
        self._next += 1


def _loads_before(streaming: Streaming) -> deque[tuple[int, str]]:
    """(number of a pass, load needed before it), in call order. Loads after the last streamed
    block, and at the end those that no call runs: the number of passes in a call."""
    found: dict[str, int] = {}
    number, streamed, loads = 0, {path for path, _ in streaming.streamed}, set(streaming.loads)
    for path in streaming.order:
        if path in loads:
            found.setdefault(path, number)
        number += path in streamed
    return deque(
        (found.get(path, number), path) for path in dict.fromkeys((*found, *streaming.loads))
    )

"""Copy the blocks of one component to the device while it runs.

Streamed blocks pass through a ring buffer. Other blocks are loaded by the slot and stay. A pass is
one copy of a block into the ring buffer and one run of the block.

    queue         load 0   pass 1   load 2   pass 3   pass 1   pass 3 ...
    ring buffer        | 1      | 3   |

    Here "pass 1" is a pass of block 1. Passes are in call order and repeat; each load happens once.
    Copies are issued ahead while the ring buffer has free bytes.

    hooks         before 1: issue its copy, make compute wait for it, bind tensors
                  after 1: unbind tensors, mark, issue more copies

All copies are issued in the order of use. The host waits for the read of a block only when the
model's code has come to the block (its hook runs). If the next block is not in RAM yet, its read
begins, and a later hook issues its copy.

A copy from pageable memory makes the host wait for its end. It is issued when the code comes to its
block, so that the device computes what is queued before it. A copy that overwrites a block waits on
the copy stream for the mark after that block's compute.

Copies are issued ahead only for the passes that the slot expects. If the component runs more often,
the copies of a further call are issued when that call begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphrun.errors import BrokenPlan
from graphrun.model.ring_buffer import RingBuffer, RingPlace
from graphrun.modules.compiled import HookHandle, hook_around, outermost_compiled
from graphrun.runtime.devices.device import Mark
from graphrun.runtime.events import EventRecorder
from graphrun.runtime.residency import Residency


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass whose copy was issued.

    ``number``: of its placement in the ring buffer, from 0; skipped passes may have no placement.
    ``copy_end``: mark after the copy.
    """

    number: int
    path: str
    buffer: torch.Tensor
    copy_end: Mark


@dataclass(frozen=True, slots=True)
class Streaming:
    """Copies of one slot for a component that the slot computes with, by path in call order."""

    order: Sequence[str]  # all blocks
    loads: Sequence[str]  # that the slot loads and keeps, already allocated
    # (block, calls of the slot in which it runs); a layer that runs twice in a call is here twice
    streamed: Sequence[tuple[str, int]]
    ring_buffer_bytes: int


class Streamer:
    """Copies the blocks of a component for one slot. Raises the errors of the device.

    ``idle`` is called when no further copy can be issued, and before a copy that has to wait for
    compute: other copies can be issued then.
    """

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
        self.is_waiting = False  # the next copy waits for the read of its block
        self._issued: deque[_Pass] = deque()
        # the pass that compute runs next; pass p is of block paths[p % len(paths)]
        self._due_pass = 0
        self._due_reached = False  # compute has reached the due pass
        self._next_pass = 0  # the pass whose copy is issued next
        self._placements = 0
        # the next pass's place in the ring buffer; compute may still need the blocks in it
        self._reserved_place: RingPlace | None = None
        # finished placement -> mark after its compute (None: the block did not run)
        self._compute_ends: dict[int, Mark | None] = {}
        self._last_index = -1  # index in paths of the last block that ran in this call
        self._bound_path: str | None = None  # the block that runs now
        self._begin_mark: Mark = None  # start of compute with this block
        self._hooks: list[HookHandle] = []

    def open(self) -> None:
        """Register hooks and issue the first copies."""
        for path in dict.fromkeys(self._paths):
            self._hook(path, self._before, self._after)
        for _, path in self._loads:
            self._hook(path, self._before_loaded)
        self.issue_ahead()

    def begin_call(self) -> None:
        """Call at the start of each call into the component."""
        self._last_index = -1
        if self._due_pass >= self._limit:
            self._limit = self._due_pass + len(self._paths)
        self.issue_ahead()

    def issue_ahead(self) -> None:
        """Issue copies until the next copy must wait.

        It waits if it would overwrite a block that compute has not run yet, would make the host
        wait, or if its block is not in RAM.
        """
        while True:
            # compute waits for the next copy
            due = self._due_reached and self._next_pass == self._due_pass
            if self._residency.backing_store.pageable and not due:
                self.is_waiting = False
                break
            if self._loads and self._loads[0][0] <= self._next_pass:
                path, issue = self._loads[0][1], self._load_next
            elif self._next_pass < self._limit and self._place():
                path, issue = self._paths[self._next_pass % len(self._paths)], self._issue
            else:
                self.is_waiting = False
                break
            self.is_waiting = not self._residency.backing_store.request(path)
            if self.is_waiting and not due:
                break
            issue()
        self._idle()

    def finish(self) -> None:
        while self._loads:
            self._load_next()

    def release(self) -> None:
        """Remove hooks, unbind the block, free the ring buffer; after a barrier or failure."""
        for hook in reversed(self._hooks):
            hook.remove()
        self._hooks.clear()
        if self._bound_path is not None:
            self._residency.unbind(self._bound_path)
        self._bound_path, self._buffer = None, None
        self._issued.clear()

    def _load(self, path: str) -> None:
        """Issue the copy of a block that the slot loads and keeps."""
        marks = self._residency.load(path)
        self._recorder.note(
            "load", self._residency.name, path, self._residency.nbytes(path), marks, self._device
        )

    def _load_next(self) -> None:
        self._load(self._loads.popleft()[1])

    def _place(self) -> bool:
        """Reserve the next pass's place in the ring buffer.

        Return False if its copy would overwrite a block that compute has not run yet.
        """
        path, next_path = (
            self._paths[number % len(self._paths)]
            for number in (self._next_pass, self._next_pass + 1)
        )
        next_bytes = self._residency.nbytes(next_path) if self._next_pass + 1 < self._limit else 0
        place = self._reserved_place = self._reserved_place or self._ring_buffer.place(
            self._residency.nbytes(path), next_bytes
        )
        return all(number in self._compute_ends for number in place.released_numbers)

    def _issue(self) -> None:
        """Issue the copy of the next pass into its reserved place."""
        path, place = self._paths[self._next_pass % len(self._paths)], self._reserved_place
        assert place is not None
        nbytes = self._residency.nbytes(path)
        self._wait_for(place)
        assert self._buffer is not None
        buffer = self._buffer[place.offset : place.offset + nbytes]
        if place.released_numbers:
            self.is_waiting = False
            self._idle()
        marks = self._residency.copy(path, buffer)
        self._recorder.note("stream", self._residency.name, path, nbytes, marks)
        self.streamed_bytes += nbytes
        self._issued.append(_Pass(self._placements, path, buffer, marks[1]))
        self._placements += 1
        self._next_pass += 1

    def _wait_for(self, place: RingPlace) -> None:
        """Make the copy stream wait for compute with the blocks that ``place`` overwrites."""
        self._reserved_place = None
        marks = [
            mark
            for number in place.released_numbers
            if (mark := self._compute_ends.pop(number)) is not None
        ]
        if marks:
            self._device.wait("copy", marks[-1])

    def _hook(
        self,
        path: str,
        on_begin: Callable[[str], None],
        on_end: Callable[[str], None] | None = None,
    ) -> None:
        """Call ``on_begin`` and ``on_end`` around runs of the block in this dtype variant."""

        def around(act: Callable[[str], None]) -> Callable[[], None]:
            def hook() -> None:
                if self._residency.is_active:
                    act(path)

            return hook

        block = outermost_compiled(self._residency.module, path)
        self._hooks += hook_around(
            block, around(on_begin), None if on_end is None else around(on_end)
        )

    def _before_loaded(self, path: str) -> None:
        """Handle that compute has reached a block that the slot loads."""
        queued = next((load for load in self._loads if load[1] == path), None)
        if queued is not None:
            self._loads.remove(queued)
            self._load(path)
        self._residency.wait_copy(path)

    def _before(self, path: str) -> None:
        """Handle that compute has reached a streamed block."""
        self._advance_to(path)
        if not self._issued:
            self._limit, self._due_reached = max(self._limit, self._due_pass + 1), True
            self.issue_ahead()
            self._due_reached = False
        due = self._issued[0]  # the due pass
        self._device.wait("compute", due.copy_end)
        self._bound_path = path
        self._residency.bind(path, due.buffer)
        self._begin_mark = self._device.mark("compute")

    def _after(self, path: str) -> None:
        self._residency.unbind(path)
        self._bound_path = None
        end = self._compute_ends[self._issued.popleft().number] = self._device.mark("compute")
        self._recorder.note("block", self._residency.name, path, 0, (self._begin_mark, end))
        self._due_pass += 1
        self.issue_ahead()

    def _advance_to(self, path: str) -> None:
        """Advance to the pass of ``path``, and discard the passes that this call skips.

        A call may use only some blocks, and may run them again from the first. Raises BrokenPlan if
        the blocks of a call do not run in the plan's order.
        """
        index = next(
            (n for n in range(self._last_index + 1, len(self._paths)) if self._paths[n] == path), -1
        )
        if path == self._paths[0] and index < 0 and self._bound_path is None:
            self.begin_call()  # one call runs all blocks again, as `generate` does for each token
            index = 0
        if index < 0 or self._bound_path is not None:
            previous = self._bound_path or self._paths[self._last_index]
            raise BrokenPlan(
                f"{self._residency.name}: block {path} ran after {previous}, which is not the "
                "order of the plan's blocks"
            )
        self._last_index = index
        while self._due_pass % len(self._paths) != index:
            if self._issued:
                self._compute_ends[self._issued.popleft().number] = None
            else:
                self._skip()
            self._due_pass += 1

    def _skip(self) -> None:
        """Skip the due pass, whose copy was not issued.

        Its place in the ring buffer, if reserved, stays empty. A block that it overwrites may also
        cover bytes of the next place. But `RingPlace.released_numbers` names each overwritten block
        once, here for the skipped place, so the next copy would not wait for compute with it. The
        copy stream therefore waits here, although nothing is copied.
        """
        if self._reserved_place is not None:
            self._wait_for(self._reserved_place)
            self._compute_ends[self._placements] = None
            self._placements += 1
        self._next_pass += 1


def _loads_before(streaming: Streaming) -> deque[tuple[int, str]]:
    """Return (number of a pass, load needed before it), in call order.

    A load after the last streamed block has the number of the second call's first pass. Loads that
    no call runs have the same number and come last.
    """
    pass_numbers: dict[str, int] = {}
    number, streamed_paths, loads = (
        0,
        {path for path, _ in streaming.streamed},
        set(streaming.loads),
    )
    for path in streaming.order:
        if path in loads:
            pass_numbers.setdefault(path, number)
        number += path in streamed_paths
    return deque(
        (pass_numbers.get(path, number), path)
        for path in dict.fromkeys((*pass_numbers, *streaming.loads))
    )

"""Perform the actions of one slot of a plan.

    slot opens   drop | evict | reset peak | spill and restore | begin reads | allocate loads and
                 ring buffers | issue copies
    calls run    a block waits for its copy; a component on the CPU waits for its backing store
    slot closes  issue the remaining prefetch | barrier | release ring buffers and hooks | measure

Prefetch means loads for a later slot. The loads that the slot computes with are issued before the
prefetch. If a component is streamed, prefetch is issued in step with its streamed blocks, whenever
its ring buffer is full. Prefetch thus uses time in which the copy stream would be idle.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from graphrun.model.blocks import named
from graphrun.model.plan import Drop, Evict, Load, Read, Restore, Slot, Spill, Stream
from graphrun.model.problem import Problem, Use
from graphrun.runtime.backing import Arena, Disk, PacedReads
from graphrun.runtime.devices.device import Mark
from graphrun.runtime.events import EventRecorder
from graphrun.runtime.residency import Residency
from graphrun.runtime.spilled import RunValues
from graphrun.runtime.streamer import Streamer, Streaming
from graphrun.trace import SlotTrace


class OpenSlot:
    """Slot ``index`` of a plan: call `open`, `enter` before each call of a component, `close`.

    ``uses``: component -> its use in the phase; empty in a load slot.
    """

    def __init__(
        self,
        index: int,
        slot: Slot,
        problem: Problem,
        residencies: Mapping[str, Residency],
        recorder: EventRecorder,
        values: RunValues,
    ) -> None:
        self.index, self.slot = index, slot
        self._entries: Counter[str] = Counter()  # calls so far, by component
        self._problem, self._residencies, self._recorder, self._values = (
            problem,
            residencies,
            recorder,
            values,
        )
        self._device = recorder.device
        phase = next(
            (phase for phase in problem.phases if phase.name == slot.phase and slot.part != "load"),
            None,
        )
        self.uses: dict[str, Use] = {use.component: use for use in phase.uses} if phase else {}
        self._streamers: dict[str, Streamer] = {}
        self._prefetch: deque[tuple[Residency, str]] = deque()  # (component, block) not yet issued
        # bytes of all prefetch in the slot, and bytes issued so far
        self._prefetch_bytes = self._prefetched_bytes = 0
        self._stream_bytes = 0  # bytes of all streamed copies in the slot
        self._allocates_late = False  # whether each buffer is allocated when its copy is issued
        self._start: Mark = None
        self._reads: PacedReads | None = None

    def open(self) -> None:
        """Perform or begin the slot's actions. Call after a barrier."""
        device = self._device
        self._recorder.slot, self._recorder.moved_bytes = self.index, 0
        device.annotate(slot=f"slot {self.slot.phase} {self.slot.part}")
        self._start = device.mark("compute")
        self._release_weights()
        for accelerator in device.all_devices:
            if self.slot.part == "load":
                accelerator.release_cached()
            accelerator.reset_peak()
        device.arenas.reset_peaks()
        self._move_values()
        self._begin_copies()

    def _release_weights(self) -> None:
        """Drop backing stores and evict blocks."""
        marks = (self._start, self._start)
        for action in self.slot.actions:
            if isinstance(action, Drop):
                residency = self._residencies[action.component]
                store = residency.backing_store
                nbytes = 0 if store.memory is None else store.nbytes
                residency.drop()
                self._recorder.note("drop", action.component, "backing_store", nbytes, marks)
            elif isinstance(action, Evict):
                for residency, path in self._blocks(action):
                    residency.evict(path)
                    nbytes = residency.nbytes(path)
                    self._recorder.note("evict", residency.name, path, nbytes, marks)

    def _move_values(self) -> None:
        """Spill and restore values."""
        for action in self.slot.actions:
            if isinstance(action, Spill | Restore):
                kind, move = (
                    ("spill", self._values.spill)
                    if isinstance(action, Spill)
                    else ("restore", self._values.restore)
                )
                start = self._device.mark("copy")
                nbytes = move(action.value)
                marks = (start, self._device.mark("copy"))
                self._recorder.note(kind, "", action.value, nbytes, marks)

    def _begin_copies(self) -> None:
        """Begin reads, allocate what loads and streams need, and issue the first copies."""
        device, recorder, residencies = self._device, self._recorder, self._residencies
        loads = [
            block
            for action in self.slot.actions
            if isinstance(action, Load)
            for block in self._blocks(action)
        ]
        names = dict.fromkeys(
            action.component for action in self.slot.actions if isinstance(action, Stream)
        )
        names |= dict.fromkeys(residency.name for residency, _ in loads)
        streamings = [
            (residencies[name], self._streaming(name, loads)) for name in names if name in self.uses
        ]
        residencies_to_read = [
            residencies[action.component]
            for action in self.slot.actions
            if isinstance(action, Read)
        ]
        self._begin_reads(residencies_to_read, loads, streamings)
        # Components whose backing store this slot reads come late: their blocks must be read before
        # they are copied. Copies from pageable memory come last, because they make the host wait:
        # when the slot closes, all its compute is queued, so the device computes meanwhile.
        prefetch = sorted(
            (block for block in loads if block[0].name not in self.uses),
            key=lambda block: (block[0].backing_store.pageable, block[0] in residencies_to_read),
        )
        # On a card, allocating maps pages, which takes the host 0.07 ms for 20 MiB. So in a slot
        # that only loads, each buffer is allocated just before its copy, while the card copies the
        # block before. Only if that keeps the plan's order of allocations (prefetch == loads).
        pageable = any(residency.backing_store.pageable for residency, _ in loads)
        self._allocates_late = prefetch == loads and not streamings and not pageable
        if not self._allocates_late:
            for residency, path in loads:
                residency.allocate(path)
        for residency, streaming in streamings:
            if streaming.streamed or streaming.loads:
                self._streamers[residency.name] = Streamer(
                    residency, streaming, recorder, self._pace
                )
            self._stream_bytes += sum(n * residency.nbytes(path) for path, n in streaming.streamed)
        if not self._allocates_late:
            for accelerator in device.all_devices:
                accelerator.wait("copy", accelerator.mark("compute"))
        for streamer in self._streamers.values():
            streamer.open()
        self._prefetch.extend(prefetch)
        self._prefetch_bytes = sum(residency.nbytes(path) for residency, path in prefetch)
        self._pace()

    @property
    def calls(self) -> int:
        """Calls in this slot so far, of the component with the most calls."""
        return max(self._entries.values(), default=0)

    def enter(self, component: str) -> Mark:
        """Call before each call into ``component``. Returns the mark at which the call starts."""
        self._entries[component] += 1
        for accelerator in self._device.all_devices:
            accelerator.before_call(first=self.slot.part == "first")
        if component in self._streamers:
            self._streamers[component].begin_call()
        else:
            self._pace()
        return self._device.mark("compute")

    def close(self) -> SlotTrace:
        """Issue the remaining copies and reads, wait for all streams, and return measurements."""
        device, recorder = self._device, self._recorder
        for streamer in self._streamers.values():
            streamer.finish()
        while self._prefetch:
            self._issue_prefetch()
        if self._reads is not None:
            self._reads.finish()
        for name, residency in self._residencies.items():
            kind = "read" if isinstance(residency.backing_store, Arena) else "fetch"
            for path, nbytes, marks in residency.backing_store.finish_reads():
                recorder.note(kind, name, path, nbytes, marks)
        for stream in ("copy", "disk", "lock"):
            device.wait("compute", device.mark(stream))
        for secondary in device.secondaries:
            device.wait("compute", secondary.mark("copy"))
        end = device.mark("compute")
        for accelerator in reversed(device.all_devices):
            accelerator.barrier()
        self.release()
        self._values.release_originals()
        recorder.resolve_marks()
        return SlotTrace(
            phase=self.slot.phase,
            part=self.slot.part,
            calls=self.calls,
            peak_bytes=device.peak_bytes,
            moved_bytes=recorder.moved_bytes,
            start_seconds=recorder.seconds(self._start),
            end_seconds=recorder.seconds(end),
            host_bytes=device.arenas.peak_bytes("arenas"),
            locked_bytes=device.arenas.peak_bytes("pinned"),
            secondary_peaks=tuple(secondary.peak_bytes for secondary in device.secondaries),
        )

    def release(self) -> None:
        """Remove hooks, free ring buffers, wait for reads under way. Loaded blocks stay."""
        for streamer in self._streamers.values():
            streamer.release()
        self._streamers.clear()
        for residency in self._residencies.values():
            residency.backing_store.abandon()

    def _blocks(self, action: Load | Evict) -> list[tuple[Residency, str]]:
        residency = self._residencies[action.component]
        return [
            (residency, path)
            for path in named(self._problem.component(action.component), action.blocks).paths
        ]

    def _begin_reads(
        self,
        residencies_to_read: list[Residency],
        loads: list[tuple[Residency, str]],
        streamings: list[tuple[Residency, Streaming]],
    ) -> None:
        """Begin the slot's `Read` actions, paced by its fetches.

        Fetches are the reads of blocks that the slot copies from backing stores on disk, for loads
        and for every copy of a streamed block.
        """
        for residency in residencies_to_read:
            residency.prepare_reads()
        passes = [
            (residency, path, n)
            for residency, streaming in streamings
            for path, n in streaming.streamed
        ]
        copies = [*((residency, path, 1) for residency, path in loads), *passes]
        fetches = [copy for copy in copies if isinstance(copy[0].backing_store, Disk)]
        stores = dict.fromkeys(
            residency.backing_store
            for residency in (*residencies_to_read, *(residency for residency, _, _ in fetches))
        )
        self._reads = PacedReads(
            stores, sum(n * residency.nbytes(path) for residency, path, n in fetches)
        )

    def _streaming(self, component: str, loads: list[tuple[Residency, str]]) -> Streaming:
        """Return the copies of the slot for ``component``, with which the slot computes."""
        numbers, use = self._problem.component(component), self.uses[component]
        # ``order`` has a layer once for each of its runs in a call. Weights outside of layers are
        # never streamed, and not in it.
        if numbers.granularity == "layers":
            order = [
                (k, numbers.groups[k].blocks[i])
                for k, i, _ in use.order
                if numbers.groups[k].streamable
            ]
        else:
            order = [(k, path) for k, group in enumerate(numbers.groups) for path in group.blocks]
        action = next(
            (a for a in self.slot.actions if isinstance(a, Stream) and a.component == component),
            None,
        )
        calls, kept_blocks = (
            use.group_calls_in(self.slot.part),
            set(named(numbers, action.keep if action else None).paths),
        )
        return Streaming(
            order=[path for _, path in order],
            loads=[path for residency, path in loads if residency.name == component],
            streamed=[
                (path, calls[k]) for k, path in order if calls[k] and path not in kept_blocks
            ],
            ring_buffer_bytes=action.ring_buffer_bytes if action else 0,
        )

    def _pace(self) -> None:
        """Issue prefetch in step with streaming.

        Prefetches are issued until the issued fraction of all bytes to prefetch exceeds the
        streamed fraction of all bytes to stream. If nothing is streamed, all prefetch is due. Only
        blocks in RAM are issued. If the next block is on disk, its read begins.
        """
        streamed_bytes = sum(streamer.streamed_bytes for streamer in self._streamers.values())
        while self._prefetch and not any(
            streamer.is_waiting for streamer in self._streamers.values()
        ):
            residency, path = self._prefetch[0]
            store = residency.backing_store
            if isinstance(store, Disk):
                store.request(path)
            due = (
                self._prefetched_bytes * self._stream_bytes <= streamed_bytes * self._prefetch_bytes
            )
            if not due or store.pageable or not store.ready(path):
                break  # streamed blocks must not queue behind a copy that waits for its read
            self._issue_prefetch()

    def _issue_prefetch(self) -> None:
        residency, path = self._prefetch.popleft()
        self._prefetched_bytes += residency.nbytes(path)
        if self._allocates_late:
            device = residency.device_of(path)
            residency.allocate(path)
            device.wait("copy", device.mark("compute"))
        marks = residency.load(path)
        self._recorder.note(
            "load", residency.name, path, residency.nbytes(path), marks, residency.device_of(path)
        )

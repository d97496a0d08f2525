"""One open slot: its actions are performed at its start, its calls are served while it lasts, and a barrier ends it.

    open     free | evict | spill | peak restarts | restore | fill | allocate loads and rings | issue copies | run -->
    serve    an entry waits for what its component needs; blocks wait for their own copies; prefetch is paced behind streamed blocks
    close    issue what prefetch is left | barrier | rings and hooks go | what was measured

Decides nothing: every byte that moves is in the plan's text. Loads that the phase computes with come before prefetch; where a
component streams, prefetch is issued in step with its blocks, when its ring is full, so that it fills the copy stream's idle time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.utils.hooks import RemovableHandle

from graphrun.executor.device import Device, Mark
from graphrun.executor.fills import Fills
from graphrun.executor.homes import Arena, Disk
from graphrun.executor.residency import Residency, blocks_of
from graphrun.executor.stream import Streamer, Streaming
from graphrun.executor.values import Values
from graphrun.planner.needs import room_bytes
from graphrun.planner.plan import Evict, Fill, Free, Load, Restore, Slot, Spill, Stream
from graphrun.planner.problem import Problem, Use
from graphrun.trace import Event, SlotTrace


@dataclass(slots=True)
class Recorder:
    """What was done, with marks that become seconds at a barrier."""

    device: Device
    origin: Mark
    slot: int = -1
    moved_bytes: int = 0
    events: list[Event] = field(default_factory=list)
    _open: list[tuple[str, str, int, str, int, Mark, Mark]] = field(default_factory=list)

    def note(self, kind: str, component: str, detail: str, nbytes: int, marks: tuple[Mark, Mark]) -> None:
        """Something that took from the first mark to the second. ``load`` and ``stream`` count as moved bytes."""
        if kind in ("load", "stream"):
            self.moved_bytes += nbytes
        self._open.append((kind, component, self.slot, detail, nbytes, *marks))

    def seconds(self, mark: Mark) -> float:
        """Seconds from the run's start. Behind a barrier."""
        return self.device.seconds_at(mark) - self.device.seconds_at(self.origin)

    def settle(self) -> None:
        """Turns marks into seconds. Behind a barrier."""
        for kind, component, slot, detail, nbytes, start, end in self._open:
            self.events.append(Event(kind, component, slot, detail, nbytes, self.seconds(start), self.seconds(end)))
        self._open.clear()


class OpenSlot:
    """Slot number ``index`` of a plan, being executed."""

    def __init__(
        self,
        index: int,
        slot: Slot,
        problem: Problem,
        residencies: Mapping[str, Residency],
        device: Device,
        recorder: Recorder,
        values: Values,
    ) -> None:
        self.index, self.slot = index, slot
        self._entries: Counter[str] = Counter()
        self._problem, self._residencies, self._device, self._recorder = problem, residencies, device, recorder
        self._values = values
        phase = next((phase for phase in problem.phases if phase.name == slot.phase), None)
        self._uses: dict[str, Use] = {use.component: use for use in phase.uses} if phase and slot.part != "load" else {}
        self._streamers: dict[str, Streamer] = {}
        self._hooks: list[RemovableHandle] = []
        self._prefetch: deque[tuple[Residency, str]] = deque()
        self._prefetch_bytes = self._prefetched_bytes = 0  # in all, and issued
        self._stream_bytes = self._streamed_bytes = 0
        self._start: Mark = None
        self._fills: Fills | None = None

    def open(self) -> None:
        """Performs the slot's actions up to ``run``. Behind a barrier."""
        recorder, device = self._recorder, self._device
        recorder.slot, recorder.moved_bytes = self.index, 0
        self._start = device.mark("compute")
        for action in self.slot.actions:
            if isinstance(action, Free):
                self._free(action)
            elif isinstance(action, Evict):
                self._evict(action)
        if self.slot.part == "load":
            device.release_cached()
        device.reset_peak()
        device.arenas.reset_peaks()
        for action in self.slot.actions:
            if isinstance(action, (Spill, Restore)):
                self._move_value(action)
        self._fills = self._begin_fills()
        loads: dict[str, list[str]] = {}
        for action in self.slot.actions:
            if isinstance(action, Load):
                loads.setdefault(action.component, []).extend(self._allocate(action))
        for action in self.slot.actions:
            if isinstance(action, Stream):
                self._stream(action, loads.get(action.component, []))
        device.wait("copy", device.mark("compute"))
        filled = {action.component for action in self.slot.actions if isinstance(action, Fill)}
        later = sorted((name for name in loads if name not in self._uses), key=lambda name: name in filled)
        for streamer in self._streamers.values():
            streamer.open()
        for name in loads:
            if name in self._uses:
                self._load_for_use(name, loads[name])
        self._prefetch += [(self._residencies[name], path) for name in later for path in loads[name]]
        self._prefetch_bytes = sum(residency.nbytes(path) for residency, path in self._prefetch)
        self._pace()

    def begin(self, component: str) -> None:
        """The component is entered, and computes on the host: its home must be filled."""
        self._residencies[component].await_home()

    @property
    def calls(self) -> int:
        """Rounds so far: the most entries into one component."""
        return max(self._entries.values(), default=0)

    def enter(self, component: str) -> Mark:
        """A call into ``component`` may begin when this returns: a mark at its start."""
        self._entries[component] += 1
        if component in self._streamers:
            self._streamers[component].begin_call()
        else:
            self._pace()
        return self._device.mark("compute")

    def close(self) -> SlotTrace:
        """What was measured from the slot's opening to now, with both streams empty."""
        for streamer in self._streamers.values():
            streamer.finish()
        while self._prefetch:
            self._issue_prefetch()
        if self._fills is not None:
            self._fills.finish()
        self._note_reads()
        for stream in ("copy", "disk"):
            self._device.wait("compute", self._device.mark(stream))
        end = self._device.mark("compute")
        self._device.barrier()
        self.release()
        self._values.settle()
        self._recorder.settle()
        return SlotTrace(
            phase=self.slot.phase,
            part=self.slot.part,
            calls=self.calls,
            peak_bytes=self._device.peak_bytes,
            moved_bytes=self._recorder.moved_bytes,
            start_seconds=self._recorder.seconds(self._start),
            end_seconds=self._recorder.seconds(end),
            host_bytes=self._device.arenas.peak_bytes("arenas"),
            locked_bytes=self._device.arenas.peak_bytes("pinned"),
        )

    def release(self) -> None:
        """Hooks, staged views and rings are gone. Loaded blocks stay."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for streamer in self._streamers.values():
            streamer.release()
        self._streamers.clear()

    def _begin_fills(self) -> Fills:
        """Fills, paced by what the slot reads of homes on disk: its loads, and streamed blocks in every call."""
        filling, reading, read_bytes = [], [], 0
        for action in self.slot.actions:
            if isinstance(action, Fill):
                filling.append(self._residencies[action.component])
            elif isinstance(action, (Load, Stream)) and action.component in self._residencies:
                residency = self._residencies[action.component]
                if isinstance(residency.home, Disk):
                    reading.append(residency)
                    blocks = self._streamed(action) if isinstance(action, Stream) else [(p, 1) for p in self._paths(action)]
                    read_bytes += sum(n * residency.nbytes(path) for path, n in blocks)
        return Fills(filling, reading, read_bytes)

    def _free(self, action: Free) -> None:
        residency = self._residencies[action.component]
        nbytes = residency.home.nbytes if residency.held else 0
        residency.free()
        self._recorder.note("free", action.component, "home", nbytes, (self._start, self._start))

    def _move_value(self, action: Spill | Restore) -> None:
        kind, move = ("spill", self._values.spill) if isinstance(action, Spill) else ("restore", self._values.restore)
        start = self._device.mark("copy")
        nbytes = move(action.value, self._device)
        self._recorder.note(kind, "", action.value, nbytes, (start, self._device.mark("copy")))

    def _note_reads(self) -> None:
        """Waits for what is being read from disk, and notes it."""
        for name, residency in self._residencies.items():
            kind = "fill" if isinstance(residency.home, Arena) else "read"
            for path, nbytes, marks in residency.home.settle():
                self._recorder.note(kind, name, path, nbytes, marks)

    def _evict(self, action: Evict) -> None:
        residency = self._residencies[action.component]
        for path in blocks_of(self._problem.component(action.component), action.blocks):
            residency.evict(path)
            self._recorder.note("evict", action.component, path, residency.nbytes(path), (self._start, self._start))

    def _allocate(self, action: Load) -> list[str]:
        paths = self._paths(action)
        for path in paths:
            self._residencies[action.component].allocate(path, self._device)
        return paths

    def _paths(self, action: Load) -> list[str]:
        return blocks_of(self._problem.component(action.component), action.blocks)

    def _streamed(self, action: Stream) -> list[tuple[str, int]]:
        """The blocks that pass through the ring, and in how many calls."""
        numbers = self._problem.component(action.component)
        calls = self._uses[action.component].class_calls_in(self.slot.part)
        kept = set(blocks_of(numbers, action.keep))
        order = [(numbers.classes[k].blocks[i], calls[k]) for k, i in self._order(action.component)]
        return [(path, n) for path, n in order if n and path not in kept]

    def _order(self, component: str) -> list[tuple[int, int]]:
        """The blocks in the order in which a call comes to them, as (class, block in it); a layer may be there several times."""
        numbers = self._problem.component(component)
        if numbers.grain == "layers":
            return [(k, i) for k, i, _ in self._uses[component].order if numbers.classes[k].streamable]
        return [(k, i) for k, of in enumerate(numbers.classes) for i in range(len(of.blocks))]

    def _stream(self, action: Stream, loads: list[str]) -> None:
        numbers, streamed = self._problem.component(action.component), self._streamed(action)
        if not streamed:
            return
        streaming = Streaming(
            paths=tuple(path for path, _ in streamed),
            passes=sum(n for _, n in streamed),
            ring_bytes=action.ring_bytes,
            loads=tuple(loads),
            order=tuple(numbers.classes[k].blocks[i] for k, i in self._order(action.component)),
            rooms=self._rooms(action.component),
        )
        residency = self._residencies[action.component]
        self._streamers[action.component] = Streamer(self._device, residency, streaming, self._note, self._pace)
        self._stream_bytes += sum(n * residency.nbytes(path) for path, n in streamed)

    def _rooms(self, component: str) -> dict[str, int]:
        """What of the slot's activation is not there while a block runs."""
        phase = next(phase for phase in self._problem.phases if phase.name == self.slot.phase)
        nbytes, use = phase.first_bytes if self.slot.part == "first" else phase.rest_bytes, self._uses[component]
        classes = self._problem.component(component).classes if use.beside_bytes else ()
        return {path: room_bytes(nbytes, use, k) for k, of in enumerate(classes) for path in of.blocks}

    def _note(self, kind: str, component: str, path: str, nbytes: int, marks: tuple[Mark, Mark]) -> None:
        self._streamed_bytes += nbytes if kind == "stream" else 0
        self._recorder.note(kind, component, path, nbytes, marks)

    def _pace(self) -> None:
        """Issues prefetch in step with streaming, as far as it is in RAM: the share of it that was issued stays at most one block
        ahead of the other's. Of a home on disk the next block is read meanwhile."""
        while self._prefetch:
            residency, path = self._prefetch[0]
            if isinstance(residency.home, Disk):
                residency.home.begin(path)
            due = self._prefetched_bytes * self._stream_bytes <= self._streamed_bytes * self._prefetch_bytes
            if not due or not residency.home.ready(path):
                break  # streamed blocks do not wait behind it
            self._issue_prefetch()

    def _issue_prefetch(self) -> None:
        residency, path = self._prefetch.popleft()
        self._prefetched_bytes += residency.nbytes(path)
        self._load(residency, path)

    def _load(self, residency: Residency, path: str) -> None:
        marks = residency.load(path, self._device)
        self._recorder.note("load", residency.name, path, residency.nbytes(path), marks)

    def _load_for_use(self, component: str, paths: list[str]) -> None:
        """Issues loads of a component that this slot computes with, as a call comes to them. Its blocks wait for their own copies
        when compute comes to them; what cannot be streamed was there before the slot.
        """
        residency = self._residencies[component]
        numbers = self._problem.component(component)
        turns = {numbers.classes[k].blocks[i]: -n for n, (k, i) in enumerate(reversed(self._order(component)))}
        paths = sorted(paths, key=lambda path: turns.get(path, 1))
        streamable = {path for k in numbers.classes if k.streamable for path in k.blocks}
        if component not in self._streamers:
            for path in paths:
                self._load(residency, path)
        for path in paths:
            if path in streamable:
                block = residency.module.get_submodule(path)
                self._hooks.append(block.register_forward_pre_hook(self._arrival_of(component, path)))

    def _arrival_of(self, component: str, path: str) -> Callable[[nn.Module, object], None]:
        def arrive(_: nn.Module, __: object) -> None:
            self._arrive(component, path)

        return arrive

    def _arrive(self, component: str, path: str) -> None:
        if component in self._streamers:
            self._streamers[component].load_now(path)
        self._residencies[component].await_arrival(path, self._device)

"""One run of a plan's slots: entries move a cursor over them, and each is opened, served and closed in turn. Decides nothing.

entry of a component --> Turns: which slots now? --> OpenSlot: close | open --> the component's own code

Whose turn it is: which slots of a plan an entry into a component opens.

    plan     a load | a first | a rest x3 | b load | b first | end
    entry    a                  a a a       b                  finish
    opens    0 1                2 . .       3 4                5

Knows names and counts, and neither device nor bytes.

The disk in one slot: backing stores that it fills, beside blocks that are read for copies. Decides nothing: it keeps the plan's pace.

    disk   |r1|r2|fill a|r3|fill b|      a fill goes in where a bounce buffer is full, in step with the bytes read

What a copy waits for is filled at once, up to there; what is left comes last. Where nothing is read, all fills begin at once.
The simulator does the same (`graphrun.verify.simulate`).

One open slot: its actions are performed at its start, its calls are served while it lasts, and a barrier ends it.

    open     free | evict | spill | peak restarts | restore | fill | allocate loads and rings | issue copies | run -->
    serve    an entry waits for what its component needs; blocks wait for their own copies; prefetch is paced behind streamed blocks
    close    issue what prefetch is left | barrier | rings and hooks go | what was measured

Decides nothing: every byte that moves is in the plan's text. Loads that the phase computes with come before prefetch; where a
component streams, prefetch is issued in step with its blocks, when its ring is full, so that it fills the copy stream's idle time.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from graphrun.errors import BrokenPlan, OutOfMemory
from graphrun.model.choices import apply_choices
from graphrun.model.least_memory import room_bytes
from graphrun.model.plan import Drop, Evict, Load, Plan, Read, Restore, Slot, Spill, Stream, slot_text
from graphrun.model.problem import PhaseNumbers, Problem, Use
from graphrun.modules.interceptor import CallInterceptor
from graphrun.modules.precisions import QUANTIZED
from graphrun.modules.trees import computing_on, walk
from graphrun.ops import Stages
from graphrun.runtime.backing import Arena, Disk
from graphrun.runtime.devices.device import Device, Mark
from graphrun.runtime.host import Host
from graphrun.runtime.leftovers import leftovers
from graphrun.runtime.residency import Residency, blocks_of
from graphrun.runtime.spilled import Values
from graphrun.runtime.streamer import Streamer, Streaming
from graphrun.trace import Event, SlotTrace, Tier, Trace
from graphrun.units import show_size

AGAIN = "plan again with the inputs of this run"


class SlotCursor:
    """A cursor over the slots of ``plan``, moved by entries."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self._phases = {phase.name: phase for phase in problem.phases}
        self._slots = plan.slots
        self._slot = -1
        self._entered: Counter[str] = Counter()

    def enter(self, component: str) -> list[int]:
        """The slots to open now, in order; none when the entry belongs to the slot that is open.

        ``first`` lasts until every component of the phase was entered. An entry stays in its phase unless the next phase uses the
        same component and this one has had its planned calls of it. Raises BrokenPlan when the plan has no place for the entry.
        """
        phase = self._current()
        if phase is not None and self._slots[self._slot].part == "load":
            opened = self._first_of(phase, component)
        elif phase is None or not self._stays(phase, component):
            opened = self._next_phase(component)
        elif self._slots[self._slot].part == "first" and all(self._entered[use.component] for use in phase.uses):
            opened = [self._slot + 1]
            if self._slots[opened[0]].part != "steady":
                raise BrokenPlan(f"{component} was entered again in {phase.name}, for which the plan has one call; {AGAIN}")
        else:
            opened = []
        if opened:
            self._slot = opened[-1]
        self._entered[component] += 1
        return opened

    def begin(self, stage: str) -> list[int]:
        """The slots to open when ``stage`` begins, before its op sees a value: its load slot, where this restores one."""
        after = self._slot + 1
        if after >= len(self._slots) or not any(isinstance(action, Restore) for action in self._slots[after].actions):
            return []
        phase = self._phases.get(self._slots[after].phase)
        if phase is None or phase.stage != stage or self._slots[after].part != "load":
            return []
        self._slot = after
        self._entered.clear()
        return [after]

    def finish(self) -> list[int]:
        """The slots to open when all stages are done. Raises BrokenPlan when the plan expects more entries."""
        left = list(range(self._slot + 1, len(self._slots)))
        if any(self._slots[i].part == "steady" or self._uses(self._slots[i].phase) for i in left):
            raise BrokenPlan(f"the run ended {self._where()}, before the plan did; {AGAIN}")
        self._slot += len(left)
        return left

    def _first_of(self, phase: PhaseNumbers, component: str) -> list[int]:
        """Behind a load slot that was opened when its stage began."""
        if component not in self._uses(phase.name):
            names = " or ".join(self._uses(phase.name))
            raise BrokenPlan(f"{component} was entered out of turn {self._where()}: the plan expects {names} next; {AGAIN}")
        return [self._slot + 1]

    def _next_phase(self, component: str) -> list[int]:
        following = self._following()
        if component not in (expected := self._uses(following)):
            names = " or ".join(expected) or "nothing more"
            raise BrokenPlan(f"{component} was entered out of turn {self._where()}: the plan expects {names} next; {AGAIN}")
        last = next(i for i, slot in enumerate(self._slots) if slot.phase == following and slot.part == "first")
        opened = list(range(self._slot + 1, last + 1))
        if any(self._slots[i].part == "steady" for i in opened):
            raise BrokenPlan(f"{component} was entered {self._where()}, before that phase had its planned calls; {AGAIN}")
        self._entered.clear()
        return opened

    def _stays(self, phase: PhaseNumbers, component: str) -> bool:
        use = next((use for use in phase.uses if use.component == component), None)
        if use is None:
            return False
        return component not in self._uses(self._following()) or self._entered[component] < use.calls

    def _current(self) -> PhaseNumbers | None:
        return self._phases.get(self._slots[self._slot].phase) if self._slot >= 0 else None

    def _following(self) -> str:
        """The name of the next phase that uses a component; "" if there is none."""
        current = self._slots[self._slot].phase if self._slot >= 0 else ""
        later = (slot.phase for slot in self._slots[self._slot + 1 :] if slot.phase != current)
        return next((name for name in later if self._uses(name)), "")

    def _uses(self, phase: str) -> list[str]:
        return [use.component for use in self._phases[phase].uses] if phase in self._phases else []

    def _where(self) -> str:
        return f"in {slot_text(self._slots[self._slot])}" if self._slot >= 0 else "at the start"


class Fills:
    """``filling``: residencies whose backing stores the slot fills, in order. ``reading``: those on disk, ``read_bytes`` of them."""

    def __init__(self, filling: Iterable[Residency], reading: Iterable[Residency], read_bytes: int) -> None:
        self._waiting: deque[tuple[Arena, str, int]] = deque()
        self._read_bytes = read_bytes
        self._read_so_far = self._filled_so_far = 0
        for residency in filling:
            blocks = residency.fill()
            if isinstance(residency.backing_store, Arena):
                backing_store = residency.backing_store
                self._waiting += [(backing_store, path, nbytes) for path, nbytes in blocks]
                backing_store.wanted = self._until(backing_store)
        self._fill_bytes = sum(nbytes for _, _, nbytes in self._waiting)
        for residency in reading:
            if isinstance(residency.backing_store, Disk):
                residency.backing_store.before_read = self._beside
        if not read_bytes:
            self.finish()

    def finish(self) -> None:
        """Begins what is left."""
        while self._waiting:
            self._begin()

    def _begin(self) -> None:
        backing_store, path, nbytes = self._waiting.popleft()
        self._filled_so_far += nbytes
        backing_store.begin(path)

    def _beside(self, nbytes: int, full: bool) -> None:
        while full and self._waiting and self._filled_so_far * self._read_bytes <= self._read_so_far * self._fill_bytes:
            self._begin()
        self._read_so_far += nbytes

    def _until(self, backing_store: Arena) -> Callable[[str], None]:
        def until(path: str) -> None:
            while self._waiting:
                done = self._waiting[0][0] is backing_store and self._waiting[0][1] == path
                self._begin()
                if done:
                    break

        return until


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
            if isinstance(action, Drop):
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
        filled = {action.component for action in self.slot.actions if isinstance(action, Read)}
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
        """The component is entered, and computes on the host: its backing store must be filled."""
        self._residencies[component].await_backing_store()

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
        """Fills, paced by what the slot reads of backing stores on disk: its loads, and streamed blocks in every call."""
        filling, reading, read_bytes = [], [], 0
        for action in self.slot.actions:
            if isinstance(action, Read):
                filling.append(self._residencies[action.component])
            elif isinstance(action, (Load, Stream)) and action.component in self._residencies:
                residency = self._residencies[action.component]
                if isinstance(residency.backing_store, Disk):
                    reading.append(residency)
                    blocks = self._streamed(action) if isinstance(action, Stream) else [(p, 1) for p in self._paths(action)]
                    read_bytes += sum(n * residency.nbytes(path) for path, n in blocks)
        return Fills(filling, reading, read_bytes)

    def _free(self, action: Drop) -> None:
        residency = self._residencies[action.component]
        nbytes = residency.backing_store.nbytes if residency.held else 0
        residency.free()
        self._recorder.note("drop", action.component, "backing_store", nbytes, (self._start, self._start))

    def _move_value(self, action: Spill | Restore) -> None:
        kind, move = ("spill", self._values.spill) if isinstance(action, Spill) else ("restore", self._values.restore)
        start = self._device.mark("copy")
        nbytes = move(action.value, self._device)
        self._recorder.note(kind, "", action.value, nbytes, (start, self._device.mark("copy")))

    def _note_reads(self) -> None:
        """Waits for what is being read from disk, and notes it."""
        for name, residency in self._residencies.items():
            kind = "read" if isinstance(residency.backing_store, Arena) else "fetch"
            for path, nbytes, marks in residency.backing_store.settle():
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
        calls = self._uses[action.component].group_calls_in(self.slot.part)
        kept = set(blocks_of(numbers, action.keep))
        order = [(numbers.groups[k].blocks[i], calls[k]) for k, i in self._order(action.component)]
        return [(path, n) for path, n in order if n and path not in kept]

    def _order(self, component: str) -> list[tuple[int, int]]:
        """The blocks in the order in which a call comes to them, as (class, block in it); a layer may be there several times."""
        numbers = self._problem.component(component)
        if numbers.granularity == "layers":
            return [(k, i) for k, i, _ in self._uses[component].order if numbers.groups[k].streamable]
        return [(k, i) for k, of in enumerate(numbers.groups) for i in range(len(of.blocks))]

    def _stream(self, action: Stream, loads: list[str]) -> None:
        numbers, streamed = self._problem.component(action.component), self._streamed(action)
        if not streamed:
            return
        streaming = Streaming(
            paths=tuple(path for path, _ in streamed),
            passes=sum(n for _, n in streamed),
            ring_bytes=action.ring_bytes,
            loads=tuple(loads),
            order=tuple(numbers.groups[k].blocks[i] for k, i in self._order(action.component)),
            rooms=self._rooms(action.component),
        )
        residency = self._residencies[action.component]
        self._streamers[action.component] = Streamer(self._device, residency, streaming, self._note, self._pace)
        self._stream_bytes += sum(n * residency.nbytes(path) for path, n in streamed)

    def _rooms(self, component: str) -> dict[str, int]:
        """What of the slot's activation is not there while a block runs."""
        phase = next(phase for phase in self._problem.phases if phase.name == self.slot.phase)
        nbytes, use = phase.first_bytes if self.slot.part == "first" else phase.steady_bytes, self._uses[component]
        groups = self._problem.component(component).groups if use.beside_bytes else ()
        return {path: room_bytes(nbytes, use, k) for k, of in enumerate(groups) for path in of.blocks}

    def _note(self, kind: str, component: str, path: str, nbytes: int, marks: tuple[Mark, Mark]) -> None:
        self._streamed_bytes += nbytes if kind == "stream" else 0
        self._recorder.note(kind, component, path, nbytes, marks)

    def _pace(self) -> None:
        """Issues prefetch in step with streaming, as far as it is in RAM: the share of it that was issued stays at most one block
        ahead of the other's. Of a backing store on disk the next block is read meanwhile."""
        while self._prefetch:
            residency, path = self._prefetch[0]
            if isinstance(residency.backing_store, Disk):
                residency.backing_store.begin(path)
            due = self._prefetched_bytes * self._stream_bytes <= self._streamed_bytes * self._prefetch_bytes
            if not due or not residency.backing_store.ready(path):
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
        turns = {numbers.groups[k].blocks[i]: -n for n, (k, i) in enumerate(reversed(self._order(component)))}
        paths = sorted(paths, key=lambda path: turns.get(path, 1))
        streamable = {path for k in numbers.groups if k.streamable for path in k.blocks}
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


Progress = Callable[[int, int, int], None]
"""Told of each call: index of the slot, number of the call in it (0 when the slot opens), planned calls of the slot."""

Proceed = Callable[..., Any]
Work = Callable[[], dict[str, Any]]
"""What computes: the stages of a graph, or anything that calls the components. Returns the run's outputs, on the host."""


HandedOut = Callable[[Mapping[str, Any]], int]
"""Bytes on the device of the outputs that the caller gets there."""


class Replan(Protocol):
    """Who makes a plan for an entry that the plan in force does not have: whatever a pipeline does that graphrun is attached to."""

    def holds(self, component: str, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this entry is as the plan in force expects it."""

    def around(
        self, component: str, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any], live_bytes: int
    ) -> tuple[Problem, Plan]:
        """A plan that begins with this entry. No weights are on the device, and ``live_bytes`` of other tensors."""


class Running:
    """One execution of ``plan``'s slots on the settled ``problem``; ``slowdowns``: of the components that compute on the host;
    ``peaks``: planned bytes of each slot.

    Holds no tensor itself, so that an error's frames in it may live.
    """

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        device: Device,
        host: Host,
        slowdowns: Mapping[str, float],
        peaks: Sequence[int],
        progress: Progress | None,
    ) -> None:
        self._problem, self._plan = problem, plan
        self._device, self._host, self._slowdowns, self._progress = device, host, slowdowns, progress
        self._peaks = peaks
        self._cursor = SlotCursor(problem, plan)
        self._values = Values(None)
        self._variants = {numbers.name: numbers.variants[0] for numbers in problem.components}
        self._measured: set[str] = set()
        self._slots: list[SlotTrace] = []
        self._open: OpenSlot | None = None
        self._recorder: Recorder | None = None
        self._interceptor: CallInterceptor | None = None
        self.replan: Replan | None = None
        self.handed_out: HandedOut | None = None
        self._baseline_bytes = device.allocated_bytes - self._loaded_bytes()
        self._before = self._tiers()
        self._seen = (0, 0)  # when it failed: peak bytes in the slot that was open, bytes that the device had for this process

    @property
    def where(self) -> str:
        """The slot that is open, for an error's text."""
        return "the run before its first slot" if self._open is None else slot_text(self._open.slot)

    def perform(self, work: Work | Stages, *, kept: bool) -> Trace:
        """The whole run. Leaves no hook on a module, by an exception neither; and no weights on the device, unless ``kept``."""
        device, done = self._device, False
        beside_bytes = min(self._problem.reserve_bytes, self._baseline_bytes)  # the reserve is where others' tensors are
        with device.session(self._problem.effective_bytes + beside_bytes), torch.no_grad():
            try:
                device.barrier()
                self._recorder = Recorder(device, device.mark("compute"))
                outside = {name: own for name, (own, _) in self._host.casts.items()}
                told: dict[str, Any] = {"reads": self._read, "dtypes": outside, "casts": self._host.dtype_variants}
                self._interceptor = CallInterceptor(self._host.modules, device.torch_device, around=self._around, **told)
                with self._interceptor:
                    outputs = self._work(work)
                self._finish()
                done = True
            finally:
                self._interceptor = None  # it holds this run, and this run what the caller handed in
                self._note_failure(done)
                self._release(evict=not (kept and done))
            if not kept:
                self._host.finish()
            device.release_cached()
        glue_bytes = self.handed_out(outputs) if self.handed_out is not None else 0
        after = self._after(glue_bytes)
        if any(after[name] > before_bytes for name, before_bytes in self._before.items()):
            gc.collect()  # cycles of the ops' code, which reference counts do not free; it takes a tenth of a second and more
            device.release_cached()
            after = self._after(glue_bytes)
        tiers = tuple(Tier(name, self._before[name], after_bytes) for name, after_bytes in after.items())
        self._refuse_leftovers(tiers, kept)
        return Trace(
            plan_digest=self._plan.digest,
            device=device.name,
            slots=tuple(self._slots),
            events=tuple(self._recorder.events),
            baseline_bytes=self._baseline_bytes,
            left_bytes=0,
            outputs=outputs,
            tiers=tiers,
        )

    def _work(self, work: Work | Stages) -> dict[str, Any]:
        if not isinstance(work, Stages):
            return work()
        self._values = Values(work)
        work.before_stage = self._begin
        try:
            return work.run()
        finally:
            work.before_stage = None

    def _begin(self, stage: str) -> None:
        """A stage begins: what is left of the plan must still fit, and values that it takes come back before its op sees them."""
        after = self._open.index + 1 if self._open is not None else 0
        available, needed = self._device.available_bytes, max(self._peaks[after:], default=0)
        if available < needed:
            raise OutOfMemory(f"before {stage}, {show_size(available)} are left of the {show_size(needed)} that the plan needs")
        for index in self._cursor.begin(stage):
            self._turn_to(index)

    def _around(self, component: str, entry: str, proceed: Proceed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for index in self._cursor_of(component, entry, args, kwargs):
            self._turn_to(index)
        assert self._open is not None
        assert self._recorder is not None
        begun: Mark = self._open.enter(component)
        self._tell(self._open.calls)
        if component in self._host.casts:
            proceed = _cast(proceed, *self._host.casts[component])
        on_host = component in self._slowdowns
        result = self._on_host(component, proceed, args, kwargs) if on_host else proceed(*args, **kwargs)
        ended = self._device.mark("compute")
        self._recorder.note("run", component, entry, 0, (begun, ended))
        if self._variants[component].precision in QUANTIZED and component not in self._measured:
            self._measured.add(component)  # 8-bit layers have been seen to grow in their first call
            size = self._host.residencies[component].held_bytes()
            self._recorder.note("size", component, "after its first call", size, (ended, ended))
        return result

    def _cursor_of(self, component: str, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        if self.replan is None:
            return self._cursor.enter(component)
        if self.replan.holds(component, entry, args, kwargs):
            with contextlib.suppress(BrokenPlan):
                return self._cursor.enter(component)
        self._close()
        for residency in self._host.residencies.values():
            residency.release()
        self._device.release_cached()
        problem, self._plan = self.replan.around(component, entry, args, kwargs, self._device.allocated_bytes)
        self._problem = apply_choices(problem, self._plan)
        self._variants = {numbers.name: numbers.variants[0] for numbers in self._problem.components}
        self._cursor = SlotCursor(self._problem, self._plan)
        return self._cursor.enter(component)

    def _read(self, component: str, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """A weight that code outside of its component looks at, where that code computes."""
        return tensor.to(self._device.torch_device, copy=True)

    def _finish(self) -> None:
        """The slots that no entry opens any more."""
        try:
            for index in self._cursor.finish():
                self._turn_to(index)
        except BrokenPlan:
            if self.replan is None:
                raise
        self._close()

    def _on_host(self, component: str, proceed: Proceed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The component's own code on the CPU: its inputs are copied there, its outputs to the device."""
        assert self._open is not None
        assert self._interceptor is not None
        self._open.begin(component)
        here, there = self._device.torch_device, torch.device("cpu")
        args, kwargs = computing_on(there, *walk((args, kwargs), lambda tensor: tensor.to(there)))
        self._interceptor.device = there
        try:
            with self._device.on_host(self._slowdowns[component]):
                result = proceed(*args, **kwargs)
        finally:
            self._interceptor.device = here
        return walk(result, lambda tensor: tensor.to(here))

    def note_in(self, error: OutOfMemory) -> None:
        """``error`` says where it happened, and what was planned and seen there."""
        error.peak_bytes, error.available_bytes = self._seen
        if self._open is not None:
            error.phase, error.part = self._open.slot.phase, self._open.slot.part
            error.planned_bytes = self._peaks[self._open.index]

    def finished(self, todo: Sequence[str]) -> Trace:
        """What was measured of the stages that are not ``todo``."""
        stages = {phase.name: phase.stage for phase in self._problem.phases}
        kept = tuple(slot for slot in self._slots if stages.get(slot.phase) not in (None, *todo))
        events = tuple(e for e in self._recorder.events if e.slot < len(kept)) if self._recorder is not None else ()
        return Trace(self._plan.digest, self._device.name, kept, events, self._baseline_bytes, 0)

    def _turn_to(self, index: int) -> None:
        """Closes the slot that is open and opens slot number ``index``."""
        self._close()
        assert self._recorder is not None
        slot, residencies = self._plan.slots[index], self._host.residencies
        if self._open is not None and slot.phase != self._open.slot.phase:
            self._forget()
        self._open = OpenSlot(index, slot, self._problem, residencies, self._device, self._recorder, self._values)
        self._tell(0)
        self._open.open()

    def _close(self) -> None:
        if self._open is not None:
            self._slots.append(self._open.close())

    def _tell(self, call: int) -> None:
        if self._progress is not None and self._open is not None:
            self._progress(self._open.index, call, self._open.slot.calls)

    def _note_failure(self, done: bool) -> None:
        if not done:
            self._seen = self._device.peak_bytes, self._device.available_bytes

    def _release(self, *, evict: bool) -> None:
        """Everything that a failure may have left: a copy under way, hooks, staged views, loaded blocks."""
        with contextlib.suppress(RuntimeError):  # a device in error cannot be waited for; the error that matters is on its way
            self._device.barrier()
        if self._open is not None:
            self._open.release()
        self._values.settle()
        self._forget()
        for residency in self._host.residencies.values() if evict else ():
            residency.release()

    def _forget(self) -> None:
        for memo in self._host.memos:
            memo.cache_clear()

    def _after(self, glue_bytes: int) -> dict[str, int]:
        found = self._tiers()
        return {**found, "device": found["device"] - glue_bytes}

    def _tiers(self) -> dict[str, int]:
        """Bytes by tier; on the device those of loaded blocks apart, which a session keeps by plan."""
        arenas = {name: self._device.arenas.nbytes(name) for name in ("arenas", "pinned")}
        return {"device": self._device.allocated_bytes - self._loaded_bytes(), **arenas}

    def _loaded_bytes(self) -> int:
        return sum(residency.loaded_bytes for residency in self._host.residencies.values())

    def _refuse_leftovers(self, tiers: tuple[Tier, ...], kept: bool) -> None:
        """Raises BrokenPlan when a tier holds more than before the run; a session's backing stores stay."""
        for tier in tiers:
            if tier.left_bytes and not (kept and tier.name != "device"):
                found = leftovers(self._device, self._host.modules)
                holders = f"on the device after the run: {found}" if tier.name == "device" else f"in {tier.name} on the host"
                raise BrokenPlan(f"{show_size(tier.left_bytes)} stayed {holders}")


def _cast(proceed: Proceed, outside: torch.dtype, inside: torch.dtype) -> Proceed:
    """``proceed`` of a component that computes in dtype ``inside`` where its pipeline hands it, and wants, ``outside``."""

    def cast(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = (walk(given, lambda t: t.to(inside) if t.dtype == outside else t) for given in (args, kwargs))
        return walk(proceed(*args, **kwargs), lambda t: t.to(outside) if t.dtype == inside else t)

    return cast

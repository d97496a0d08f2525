"""Executes the slots of a plan. Calls into components open and close the slots, in the order of the plan.

    Run             one run of a plan: intercepts every call into a component and executes the slots
    SlotCursor      finds which slots a call opens
    OpenSlot        performs the actions of one slot
    PacedReads      reads backing stores from disk during a slot, in step with the reads of blocks that are copied from disk
    EventRecorder   collects the events of the trace

The slots that calls into the components a and b open:

    plan     a load | a first | a steady x3 | b load | b first | end
    call     a                  a a a         b                  end of run
    opens    0 1                2 . .         3 4                5

What happens in one slot:

    it opens     drop | evict | reset peak | spill and restore | begin reads | allocate loads and rings | issue copies
    calls run    a block waits for its own copy, and a component on the CPU for the read of its backing store
    it closes    issue the remaining prefetch | barrier | release rings and hooks | measure

Prefetch means loads for a later slot. Every copy is in the plan, and the loads that the slot computes with are issued before
prefetch. Where a component is streamed, prefetch is issued in step with its streamed blocks, each time its ring is full. So it
uses time in which the copy stream would be idle."""

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
from graphrun.model.least_memory import room_bytes
from graphrun.model.plan import Drop, Evict, Load, Plan, Read, Restore, Slot, Spill, Stream, slot_text
from graphrun.model.problem import PhaseNumbers, Problem, Use
from graphrun.model.solution import Solution
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

AGAIN = "plan again with the inputs of this run"  # advice at the end of the errors of `SlotCursor`

Progress = Callable[[int, int, int], None]
"""Called at each call: index of the slot, number of the call in it (0: the slot opens), planned calls of the slot."""

Proceed = Callable[..., Any]
"""Runs the component's own code for an intercepted call (see `CallInterceptor`)."""

Work = Callable[[], dict[str, Any]]
"""The code of the run: calls the components and returns the outputs by name."""

HandedOut = Callable[[Mapping[str, Any]], int]
"""Returns how many bytes of these outputs stay on the device, because the caller receives them there."""


class Replan(Protocol):
    """Supplies a new plan when an attached pipeline makes a call that the current plan does not have."""

    def expects(self, component: str, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the current plan has this call."""

    def plan_from(self, component: str, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any], live_bytes: int) -> Solution:
        """A plan that starts with this call. At that time the device holds no weights, and ``live_bytes`` of other
        tensors."""


class Run:
    """One run of ``plan``. ``problem`` is the plan's problem with the plan's choices applied (`apply_choices`).

    ``slowdowns``: component -> factor on its compute time, for the components that compute on the CPU. ``peaks``: planned peak
    bytes of each slot. ``progress`` is called at each call.

    No attribute holds a tensor: the traceback of an error may keep this object alive, and must not keep device memory with it.
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
        self._measured: set[str] = set()  # quantized components whose size was measured
        self._slots: list[SlotTrace] = []
        self._open: OpenSlot | None = None
        self._recorder: EventRecorder | None = None
        self._interceptor: CallInterceptor | None = None
        self.replan: Replan | None = None
        self.handed_out: HandedOut | None = None
        self._baseline_bytes = device.allocated_bytes - self._loaded_bytes()
        self._before = self._tiers()  # bytes by memory tier
        self._at_failure = (0, 0)  # peak bytes of the open slot, and bytes that this process could allocate in total

    @property
    def where(self) -> str:
        """Text that says for an error message which slot is open."""
        return "the run before its first slot" if self._open is None else slot_text(self._open.slot)

    def execute(self, work: Work | Stages, *, keep: bool) -> Trace:
        """Executes the run and returns its trace. Hooks are removed from the modules even if it fails.

        ``keep``: weights stay on the device, and backing stores in RAM, as a session needs it; after a failure weights are
        evicted all the same. Raises BrokenPlan when the run deviates from the plan, or leaves bytes allocated that it should
        have freed."""
        device, done = self._device, False
        # Tensors of other code, such as the caller's, are allocated on the device too. The reserve, which is not part of
        # `effective_bytes`, is for them.
        foreign_bytes = min(self._problem.reserve_bytes, self._baseline_bytes)
        with device.session(self._problem.effective_bytes + foreign_bytes), torch.no_grad():
            try:
                device.barrier()
                self._recorder = EventRecorder(device, device.mark("compute"))
                self._interceptor = CallInterceptor(
                    self._host.modules,
                    device.torch_device,
                    around=self._on_call,
                    reads=self._read_weight,
                    dtypes={name: dtype_in_graph for name, (dtype_in_graph, _) in self._host.casts.items()},
                    casts=self._host.dtype_variants,
                )
                with self._interceptor:
                    outputs = self._work(work)
                self._finish()
                done = True
            finally:
                self._interceptor = None  # breaks a reference cycle that would keep the caller's objects alive
                self._note_failure(done)
                self._release(evict=not (keep and done))
            if not keep:
                self._host.finish()
            device.release_cached()
        output_bytes = self.handed_out(outputs) if self.handed_out is not None else 0
        after = self._tiers_after(output_bytes)
        if any(after[name] > before_bytes for name, before_bytes in self._before.items()):
            gc.collect()  # frees reference cycles that the ops' code made; only where needed, since it takes 0.1 s or more
            device.release_cached()
            after = self._tiers_after(output_bytes)
        tiers = tuple(Tier(name, self._before[name], after_bytes) for name, after_bytes in after.items())
        self._refuse_leftovers(tiers, keep)
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
        work.before_stage = self._before_stage
        try:
            return work.run()
        finally:
            work.before_stage = None

    def _before_stage(self, stage: str) -> None:
        """Called before each stage. Opens its load slot if that restores values which the stage reads.

        Raises OutOfMemory when the device has less memory than the remaining slots need.
        """
        after = self._open.index + 1 if self._open is not None else 0
        available, needed = self._device.available_bytes, max(self._peaks[after:], default=0)
        if available < needed:
            raise OutOfMemory(
                f"before {stage}, {show_size(available)} are available of the {show_size(needed)} that the plan needs"
            )
        for index in self._cursor.begin(stage):
            self._advance_to(index)

    def _on_call(self, component: str, entry: str, proceed: Proceed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called by the interceptor in place of every call into a component; returns the call's result."""
        for index in self._slots_to_open(component, entry, args, kwargs):
            self._advance_to(index)
        assert self._open is not None
        assert self._recorder is not None
        start: Mark = self._open.enter(component)
        self._report_progress(self._open.calls)
        if component in self._host.casts:
            proceed = _cast(proceed, *self._host.casts[component])
        on_cpu = component in self._slowdowns
        result = self._run_on_cpu(component, proceed, args, kwargs) if on_cpu else proceed(*args, **kwargs)
        end = self._device.mark("compute")
        self._recorder.note("run", component, entry, 0, (start, end))
        if self._variants[component].precision in QUANTIZED and component not in self._measured:
            self._measured.add(component)  # not before: 8-bit layers may take more memory after their first call
            size = self._host.residencies[component].measured_bytes()
            self._recorder.note("size", component, "after its first call", size, (end, end))
        return result

    def _slots_to_open(self, component: str, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """Indices of the slots that this call opens. If the current plan does not have the call, a new plan replaces it first."""
        if self.replan is None:
            return self._cursor.enter(component)
        if self.replan.expects(component, entry, args, kwargs):
            with contextlib.suppress(BrokenPlan):  # the plan has such a call, but not at this point: a new plan, too
                return self._cursor.enter(component)
        self._close()
        for residency in self._host.residencies.values():
            residency.release()
        self._device.release_cached()
        solution = self.replan.plan_from(component, entry, args, kwargs, self._device.allocated_bytes)
        self._problem, self._plan = solution.chosen, solution.plan
        self._variants = {numbers.name: numbers.variants[0] for numbers in self._problem.components}
        self._cursor = SlotCursor(self._problem, self._plan)
        return self._cursor.enter(component)

    def _read_weight(self, component: str, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """What code outside the component gets when it reads one of its weights: a copy on the device."""
        return tensor.to(self._device.torch_device, copy=True)

    def _finish(self) -> None:
        """Opens and closes the slots after the last call."""
        try:
            for index in self._cursor.finish():
                self._advance_to(index)
        except BrokenPlan:
            if self.replan is None:
                raise
        self._close()

    def _run_on_cpu(self, component: str, proceed: Proceed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the component on the CPU: copies its inputs there and its outputs to the device."""
        assert self._open is not None
        assert self._interceptor is not None
        self._open.wait_read(component)
        device, cpu = self._device.torch_device, torch.device("cpu")
        args, kwargs = computing_on(cpu, *walk((args, kwargs), lambda tensor: tensor.to(cpu)))
        self._interceptor.device = cpu
        try:
            with self._device.on_host(self._slowdowns[component]):
                result = proceed(*args, **kwargs)
        finally:
            self._interceptor.device = device
        return walk(result, lambda tensor: tensor.to(device))

    def annotate(self, error: OutOfMemory) -> None:
        """Sets the fields of ``error``: the slot in which it happened, its planned bytes and its measured bytes."""
        error.peak_bytes, error.available_bytes = self._at_failure
        if self._open is not None:
            error.phase, error.part = self._open.slot.phase, self._open.slot.part
            error.planned_bytes = self._peaks[self._open.index]

    def finished(self, todo: Sequence[str]) -> Trace:
        """Trace of the stages that a failed run has finished: those not in ``todo``."""
        stages = {phase.name: phase.stage for phase in self._problem.phases}
        slots = tuple(slot for slot in self._slots if stages.get(slot.phase) not in (None, *todo))
        events = tuple(e for e in self._recorder.events if e.slot < len(slots)) if self._recorder is not None else ()
        return Trace(self._plan.digest, self._device.name, slots, events, self._baseline_bytes, 0)

    def _advance_to(self, index: int) -> None:
        """Closes the open slot and opens slot number ``index``."""
        self._close()
        assert self._recorder is not None
        slot, residencies = self._plan.slots[index], self._host.residencies
        if self._open is not None and slot.phase != self._open.slot.phase:
            self._clear_memos()
        self._open = OpenSlot(index, slot, self._problem, residencies, self._device, self._recorder, self._values)
        self._report_progress(0)
        self._open.open()

    def _close(self) -> None:
        if self._open is not None:
            self._slots.append(self._open.close())

    def _report_progress(self, call: int) -> None:
        if self._progress is not None and self._open is not None:
            self._progress(self._open.index, call, self._open.slot.calls)

    def _note_failure(self, done: bool) -> None:
        if not done:
            self._at_failure = self._device.peak_bytes, self._device.available_bytes

    def _release(self, *, evict: bool) -> None:
        """Waits for copies under way, removes hooks and frees rings, also after a failure. ``evict``: frees loaded blocks too."""
        # A device in an error state cannot be synchronized. The original error is raised already.
        with contextlib.suppress(RuntimeError):
            self._device.barrier()
        if self._open is not None:
            self._open.release()
        self._values.release_originals()
        self._clear_memos()
        for residency in self._host.residencies.values() if evict else ():
            residency.release()

    def _clear_memos(self) -> None:
        """Frees tensors that modules cache on the device (see `graphrun.modules.memos`)."""
        for memo in self._host.memos:
            memo.cache_clear()

    def _tiers_after(self, output_bytes: int) -> dict[str, int]:
        """As `_tiers`, without the ``output_bytes`` that the caller received on the device."""
        found = self._tiers()
        return {**found, "device": found["device"] - output_bytes}

    def _tiers(self) -> dict[str, int]:
        """Bytes in use by memory tier (see `graphrun.trace.Tier`). On the device without loaded blocks: a session keeps these."""
        arenas = {name: self._device.arenas.nbytes(name) for name in ("arenas", "pinned")}
        return {"device": self._device.allocated_bytes - self._loaded_bytes(), **arenas}

    def _loaded_bytes(self) -> int:
        return sum(residency.loaded_bytes for residency in self._host.residencies.values())

    def _refuse_leftovers(self, tiers: tuple[Tier, ...], keep: bool) -> None:
        """Raises BrokenPlan when a tier holds more than before the run. With ``keep``, backing stores may stay."""
        for tier in tiers:
            if tier.left_bytes and not (keep and tier.name != "device"):
                found = leftovers(self._device, self._host.modules)
                holders = f"on the device after the run: {found}" if tier.name == "device" else f"in {tier.name} on the host"
                raise BrokenPlan(f"{show_size(tier.left_bytes)} stayed {holders}")


def _cast(proceed: Proceed, outside: torch.dtype, inside: torch.dtype) -> Proceed:
    """``proceed`` with tensors of dtype ``outside`` cast to ``inside`` in its arguments, and back in its results."""

    def cast(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = (walk(tree, lambda t: t.to(inside) if t.dtype == outside else t) for tree in (args, kwargs))
        return walk(proceed(*args, **kwargs), lambda t: t.to(outside) if t.dtype == inside else t)

    return cast


class SlotCursor:
    """The position in ``plan``: which slots a call into a component opens. Only counts calls; uses no device and no bytes."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self._phases = {phase.name: phase for phase in problem.phases}
        self._slots = plan.slots
        self._slot = -1
        self._entered: Counter[str] = Counter()

    def enter(self, component: str) -> list[int]:
        """Indices of the slots that a call into ``component`` opens, in order; empty when the call belongs to the open slot.

        The first slot lasts until every component of the phase has been called. The call belongs to the current phase if that uses
        ``component``; but if the next phase uses it too, only as long as the current phase has planned calls of it left. Raises
        BrokenPlan when the plan does not have this call.
        """
        phase = self._current()
        if phase is not None and self._slots[self._slot].part == "load":
            opened = self._after_load(phase, component)
        elif phase is None or not self._belongs(phase, component):
            opened = self._next_phase(component)
        elif self._slots[self._slot].part == "first" and all(self._entered[use.component] for use in phase.uses):
            opened = [self._slot + 1]
            if self._slots[opened[0]].part != "steady":
                raise BrokenPlan(f"{component} was called again in {phase.name}, for which the plan has one call; {AGAIN}")
        else:
            opened = []
        if opened:
            self._slot = opened[-1]
        self._entered[component] += 1
        return opened

    def begin(self, stage: str) -> list[int]:
        """Indices of the slots to open when ``stage`` starts, before its op reads values: its load slot, if that restores a value.
        Empty otherwise: the stage's first call opens the load slot then."""
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
        """Indices of the slots to open when all stages are done. Raises BrokenPlan when the plan expects more calls."""
        left = list(range(self._slot + 1, len(self._slots)))
        if any(self._slots[i].part == "steady" or self._uses(self._slots[i].phase) for i in left):
            raise BrokenPlan(f"the run ended {self._where()}, before the plan did; {AGAIN}")
        self._slot += len(left)
        return left

    def _after_load(self, phase: PhaseNumbers, component: str) -> list[int]:
        """The slots to open where only the phase's load slot was opened so far, by `begin`: its first slot."""
        if component not in self._uses(phase.name):
            raise self._out_of_order(component, self._uses(phase.name))
        return [self._slot + 1]

    def _next_phase(self, component: str) -> list[int]:
        """The slots to open up to the first slot of the next phase that uses a component."""
        following = self._following()
        if component not in (expected := self._uses(following)):
            raise self._out_of_order(component, expected)
        last = next(i for i, slot in enumerate(self._slots) if slot.phase == following and slot.part == "first")
        opened = list(range(self._slot + 1, last + 1))
        if any(self._slots[i].part == "steady" for i in opened):
            raise BrokenPlan(f"{component} was called {self._where()}, before that phase had its planned calls; {AGAIN}")
        self._entered.clear()
        return opened

    def _belongs(self, phase: PhaseNumbers, component: str) -> bool:
        """Whether a call into ``component`` belongs to the current phase, as `enter` says."""
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

    def _out_of_order(self, component: str, expected: list[str]) -> BrokenPlan:
        names = " or ".join(expected) or "nothing more"
        return BrokenPlan(f"{component} was called out of order {self._where()}: the plan expects {names} next; {AGAIN}")

    def _where(self) -> str:
        return f"in {slot_text(self._slots[self._slot])}" if self._slot >= 0 else "at the start"


class OpenSlot:
    """Executes slot number ``index`` of a plan: `open`, then `enter` before each call, then `close`."""

    def __init__(
        self,
        index: int,
        slot: Slot,
        problem: Problem,
        residencies: Mapping[str, Residency],
        device: Device,
        recorder: EventRecorder,
        values: Values,
    ) -> None:
        self.index, self.slot = index, slot
        self._entries: Counter[str] = Counter()  # calls so far, by component
        self._problem, self._residencies, self._device, self._recorder = problem, residencies, device, recorder
        self._values = values
        phase = next((phase for phase in problem.phases if phase.name == slot.phase), None)
        self._uses: dict[str, Use] = {use.component: use for use in phase.uses} if phase and slot.part != "load" else {}
        self._streamers: dict[str, Streamer] = {}
        self._hooks: list[RemovableHandle] = []
        self._prefetch: deque[tuple[Residency, str]] = deque()  # (component, block) not yet issued
        self._prefetch_bytes = self._prefetched_bytes = 0  # of all prefetch in the slot, and issued so far
        self._stream_bytes = self._streamed_bytes = 0  # of all streamed copies in the slot, and issued so far
        self._start: Mark = None
        self._reads: PacedReads | None = None

    def open(self) -> None:
        """Performs or begins the slot's actions; calls into components may follow. Call after a barrier."""
        recorder, device = self._recorder, self._device
        recorder.slot, recorder.moved_bytes = self.index, 0
        device.annotate(slot=f"slot {self.slot.phase} {self.slot.part}")
        self._start = device.mark("compute")
        for action in self.slot.actions:
            if isinstance(action, Drop):
                self._drop(action)
            elif isinstance(action, Evict):
                self._evict(action)
        if self.slot.part == "load":
            device.release_cached()
        device.reset_peak()
        device.arenas.reset_peaks()
        for action in self.slot.actions:
            if isinstance(action, (Spill, Restore)):
                self._move_value(action)
        self._reads = self._begin_reads()
        loads: dict[str, list[str]] = {}
        for action in self.slot.actions:
            if isinstance(action, Load):
                loads.setdefault(action.component, []).extend(self._allocate(action))
        for action in self.slot.actions:
            if isinstance(action, Stream):
                self._stream(action, loads.get(action.component, []))
        device.wait("copy", device.mark("compute"))
        read = {action.component for action in self.slot.actions if isinstance(action, Read)}
        # Components to prefetch, last those whose backing store this slot reads: their blocks must be read before they are copied.
        prefetched = sorted((name for name in loads if name not in self._uses), key=lambda name: name in read)
        for streamer in self._streamers.values():
            streamer.open()
        for name in loads:
            if name in self._uses:
                self._load_for_use(name, loads[name])
        self._prefetch += [(self._residencies[name], path) for name in prefetched for path in loads[name]]
        self._prefetch_bytes = sum(residency.nbytes(path) for residency, path in self._prefetch)
        self._pace()

    def wait_read(self, component: str) -> None:
        """Waits until the backing store of ``component``, which computes on the CPU, is read."""
        self._residencies[component].wait_read()

    @property
    def calls(self) -> int:
        """Calls in this slot so far, of the component that was called most."""
        return max(self._entries.values(), default=0)

    def enter(self, component: str) -> Mark:
        """To be called before each call into ``component``. Returns the mark at which the call starts."""
        self._entries[component] += 1
        if component in self._streamers:
            self._streamers[component].begin_call()
        else:
            self._pace()
        return self._device.mark("compute")

    def close(self) -> SlotTrace:
        """Issues the copies and reads that are left, waits for all streams, and returns the measurements of the slot."""
        for streamer in self._streamers.values():
            streamer.finish()
        while self._prefetch:
            self._issue_prefetch()
        if self._reads is not None:
            self._reads.finish()
        self._note_reads()
        for stream in ("copy", "disk"):
            self._device.wait("compute", self._device.mark(stream))
        end = self._device.mark("compute")
        self._device.barrier()
        self.release()
        self._values.release_originals()
        self._recorder.resolve_marks()
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
        """Removes hooks and frees rings. Loaded blocks stay on the device."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for streamer in self._streamers.values():
            streamer.release()
        self._streamers.clear()

    def _begin_reads(self) -> PacedReads:
        """Begins the slot's `Read` actions. They are paced by its fetches: the reads of blocks that it copies from backing
        stores on disk, for loads and for every pass of a streamed block."""
        reading, fetching, fetch_bytes = [], [], 0
        for action in self.slot.actions:
            if isinstance(action, Read):
                reading.append(self._residencies[action.component])
            elif isinstance(action, (Load, Stream)) and action.component in self._residencies:
                residency = self._residencies[action.component]
                if isinstance(residency.backing_store, Disk):
                    fetching.append(residency)
                    blocks = self._streamed(action) if isinstance(action, Stream) else [(p, 1) for p in self._paths(action)]
                    fetch_bytes += sum(n * residency.nbytes(path) for path, n in blocks)
        return PacedReads(reading, fetching, fetch_bytes)

    def _drop(self, action: Drop) -> None:
        residency = self._residencies[action.component]
        nbytes = residency.backing_store.nbytes if residency.backed else 0
        residency.drop()
        self._recorder.note("drop", action.component, "backing_store", nbytes, (self._start, self._start))

    def _move_value(self, action: Spill | Restore) -> None:
        kind, move = ("spill", self._values.spill) if isinstance(action, Spill) else ("restore", self._values.restore)
        start = self._device.mark("copy")
        nbytes = move(action.value, self._device)
        self._recorder.note(kind, "", action.value, nbytes, (start, self._device.mark("copy")))

    def _note_reads(self) -> None:
        """Waits for all reads from disk, and records them."""
        for name, residency in self._residencies.items():
            kind = "read" if isinstance(residency.backing_store, Arena) else "fetch"
            for path, nbytes, marks in residency.backing_store.finish_reads():
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
        """(block, number of the slot's calls in which it runs) for each streamed block, in call order; a layer that runs several
        times in a call is listed as often."""
        numbers = self._problem.component(action.component)
        calls = self._uses[action.component].group_calls_in(self.slot.part)
        kept = set(blocks_of(numbers, action.keep))
        order = [(numbers.groups[k].blocks[i], calls[k]) for k, i in self._order(action.component)]
        return [(path, n) for path, n in order if n and path not in kept]

    def _order(self, component: str) -> list[tuple[int, int]]:
        """The blocks in the order in which a call runs them, as (index of the group, index in the group). A layer that runs several
        times is listed as often. At layer granularity without the remainder."""
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
        """For each block, its room: bytes of the slot's activation that are unused while the block runs (see `room_bytes`)."""
        phase = next(phase for phase in self._problem.phases if phase.name == self.slot.phase)
        nbytes, use = phase.first_bytes if self.slot.part == "first" else phase.steady_bytes, self._uses[component]
        groups = self._problem.component(component).groups if use.beside_bytes else ()
        return {path: room_bytes(nbytes, use, k) for k, of in enumerate(groups) for path in of.blocks}

    def _note(self, kind: str, component: str, path: str, nbytes: int, marks: tuple[Mark, Mark]) -> None:
        self._streamed_bytes += nbytes if kind == "stream" else 0
        self._recorder.note(kind, component, path, nbytes, marks)

    def _pace(self) -> None:
        """Issues prefetch in step with streaming: the fraction of all prefetch that is issued is at most one block ahead of the
        fraction of all streamed bytes. If nothing is streamed, all prefetch is due.

        Only blocks that are in RAM are issued. If the next block is on disk, its read is begun.
        """
        while self._prefetch:
            residency, path = self._prefetch[0]
            if isinstance(residency.backing_store, Disk):
                residency.backing_store.begin(path)
            due = self._prefetched_bytes * self._stream_bytes <= self._streamed_bytes * self._prefetch_bytes
            if not due or not residency.backing_store.ready(path):
                break  # streamed blocks must not queue behind a copy that waits for its read
            self._issue_prefetch()

    def _issue_prefetch(self) -> None:
        residency, path = self._prefetch.popleft()
        self._prefetched_bytes += residency.nbytes(path)
        self._load(residency, path)

    def _load(self, residency: Residency, path: str) -> None:
        marks = residency.load(path, self._device)
        self._recorder.note("load", residency.name, path, residency.nbytes(path), marks)

    def _load_for_use(self, component: str, paths: list[str]) -> None:
        """Issues the loads of a component that this slot computes with, in the order in which a call runs the blocks. If the
        component is streamed, its `Streamer` issues them between the streamed copies.

        When compute reaches a streamable block, it waits for the block's own copy. Blocks that are not streamable were loaded
        before this slot."""
        residency = self._residencies[component]
        numbers = self._problem.component(component)
        order = [numbers.groups[k].blocks[i] for k, i in self._order(component)]
        first_run = {path: n for n, path in reversed(list(enumerate(order)))}  # position in a call; blocks not in it come last
        paths = sorted(paths, key=lambda path: first_run.get(path, len(order)))
        streamable = {path for k in numbers.groups if k.streamable for path in k.blocks}
        if component not in self._streamers:
            for path in paths:
                self._load(residency, path)
        for path in paths:
            if path in streamable:
                block = residency.module.get_submodule(path)
                self._hooks.append(block.register_forward_pre_hook(self._wait_hook(component, path)))

    def _wait_hook(self, component: str, path: str) -> Callable[[nn.Module, object], None]:
        def wait(_: nn.Module, __: object) -> None:
            self._wait_copy(component, path)

        return wait

    def _wait_copy(self, component: str, path: str) -> None:
        if component in self._streamers:
            self._streamers[component].load_now(path)
        self._residencies[component].wait_copy(path, self._device)


class PacedReads:
    """Reads backing stores from disk during a slot, in step with fetches.

    A read fills a block of a backing store in RAM, which is the plan's `Read` action. A fetch reads one block from a backing
    store on disk into its bounce buffer, for one copy to the device. Both share the disk:

        disk     | fetch 1 | fetch 2 | read a | fetch 3 | read b |

    A read is inserted before a fetch that overwrites earlier blocks of the bounce buffer, since that must wait. The fraction of
    all reads that was started stays at most one block ahead of the fraction of all fetched bytes. If a copy needs a block that
    was not read yet, that block and all reads before it start at once. Without fetches, all reads start at once. The simulator
    (`graphrun.verify.simulate`) follows the same rules.

    ``reading``: components whose backing stores the slot reads, in order. ``fetching``: components with a backing store on
    disk, from which the slot fetches ``fetch_bytes`` in total."""

    def __init__(self, reading: Iterable[Residency], fetching: Iterable[Residency], fetch_bytes: int) -> None:
        self._pending: deque[tuple[Arena, str, int]] = deque()
        self._fetch_bytes = fetch_bytes
        self._fetched_bytes = self._begun_bytes = 0
        for residency in reading:
            blocks = residency.prepare_reads()
            if isinstance(residency.backing_store, Arena):
                backing_store = residency.backing_store
                self._pending += [(backing_store, path, nbytes) for path, nbytes in blocks]
                backing_store.begin_through = self._begin_through(backing_store)
        self._read_bytes = sum(nbytes for _, _, nbytes in self._pending)
        for residency in fetching:
            if isinstance(residency.backing_store, Disk):
                residency.backing_store.before_read = self._before_fetch
        if not fetch_bytes:
            self.finish()

    def finish(self) -> None:
        """Starts all pending reads."""
        while self._pending:
            self._begin()

    def _begin(self) -> None:
        backing_store, path, nbytes = self._pending.popleft()
        self._begun_bytes += nbytes
        backing_store.begin(path)

    def _before_fetch(self, nbytes: int, full: bool) -> None:
        """Called before each fetch of ``nbytes``. ``full``: it overwrites earlier blocks of the bounce buffer."""
        while full and self._pending and self._begun_bytes * self._fetch_bytes <= self._fetched_bytes * self._read_bytes:
            self._begin()
        self._fetched_bytes += nbytes

    def _begin_through(self, backing_store: Arena) -> Callable[[str], None]:
        """A function that starts the pending reads up to a block of ``backing_store``."""

        def begin_through(path: str) -> None:
            while self._pending:
                last = self._pending[0][0] is backing_store and self._pending[0][1] == path
                self._begin()
                if last:
                    break

        return begin_through


@dataclass(slots=True)
class EventRecorder:
    """Collects the events of a run. Their times are marks of the device; `resolve_marks` turns these into seconds after a barrier.

    ``origin``: start of the run. ``slot``: index of the open slot; ``moved_bytes``: weights copied to the device in it. ``events``:
    those with known seconds.
    """

    device: Device
    origin: Mark
    slot: int = -1
    moved_bytes: int = 0
    events: list[Event] = field(default_factory=list)
    _unresolved: list[tuple[str, str, int, str, int, Mark, Mark]] = field(default_factory=list)

    def note(self, kind: str, component: str, detail: str, nbytes: int, marks: tuple[Mark, Mark]) -> None:
        """Records an `Event` with its start and end marks. The bytes of ``load`` and ``stream`` events count as moved."""
        if kind in ("load", "stream"):
            self.moved_bytes += nbytes
        self._unresolved.append((kind, component, self.slot, detail, nbytes, *marks))

    def seconds(self, mark: Mark) -> float:
        """Seconds from the start of the run to ``mark``. Call after a barrier."""
        return self.device.seconds_at(mark) - self.device.seconds_at(self.origin)

    def resolve_marks(self) -> None:
        """Turns the marks of new events into seconds. Call after a barrier."""
        for kind, component, slot, detail, nbytes, start, end in self._unresolved:
            self.events.append(Event(kind, component, slot, detail, nbytes, self.seconds(start), self.seconds(end)))
        self._unresolved.clear()

"""One run of a plan's slots: entries move a cursor over them, and each is opened, served and closed in turn. Decides nothing.

entry of a component --> Turns: which slots now? --> OpenSlot: close | open --> the component's own code
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from graphrun.components.entry import Boundary
from graphrun.components.precisions import QUANTIZED
from graphrun.components.trees import computing_on, walk
from graphrun.errors import BrokenPlan, OutOfMemory
from graphrun.executor.device import Device, Mark
from graphrun.executor.holders import leftovers
from graphrun.executor.host import Host
from graphrun.executor.slot import OpenSlot, Recorder
from graphrun.executor.turns import Turns
from graphrun.executor.values import Values
from graphrun.ops import Stages
from graphrun.planner.plan import Plan, slot_text
from graphrun.planner.problem import Problem
from graphrun.planner.settle import settle
from graphrun.trace import SlotTrace, Tier, Trace
from graphrun.units import show_size

Progress = Callable[[int, int, int], None]
"""Told of each call: index of the slot, number of the call in it (0 when the slot opens), planned calls of the slot."""

Proceed = Callable[..., Any]
Work = Callable[[], dict[str, Any]]
"""What computes: the stages of a graph, or anything that calls the components. Returns the run's outputs, on the host."""


HandedOut = Callable[[Mapping[str, Any]], int]
"""Bytes on the device of the outputs that the caller gets there."""


class Detour(Protocol):
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
        self._turns = Turns(problem, plan)
        self._values = Values(None)
        self._variants = {numbers.name: numbers.variants[0] for numbers in problem.components}
        self._measured: set[str] = set()
        self._slots: list[SlotTrace] = []
        self._open: OpenSlot | None = None
        self._recorder: Recorder | None = None
        self._boundary: Boundary | None = None
        self.detour: Detour | None = None
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
                told: dict[str, Any] = {"reads": self._read, "dtypes": outside, "casts": self._host.forms}
                self._boundary = Boundary(self._host.modules, device.torch_device, around=self._around, **told)
                with self._boundary:
                    outputs = self._work(work)
                self._finish()
                done = True
            finally:
                self._boundary = None  # it holds this run, and this run what the caller handed in
                self._note_failure(done)
                self._release(evict=not (kept and done))
            if not kept:
                self._host.finish()
            device.release_cached()
        handed_bytes = self.handed_out(outputs) if self.handed_out is not None else 0
        after = self._after(handed_bytes)
        if any(after[name] > before_bytes for name, before_bytes in self._before.items()):
            gc.collect()  # cycles of the ops' code, which reference counts do not free; it takes a tenth of a second and more
            device.release_cached()
            after = self._after(handed_bytes)
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
        for index in self._turns.begin(stage):
            self._turn_to(index)

    def _around(self, component: str, entry: str, proceed: Proceed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for index in self._turns_of(component, entry, args, kwargs):
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

    def _turns_of(self, component: str, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        if self.detour is None:
            return self._turns.enter(component)
        if self.detour.holds(component, entry, args, kwargs):
            with contextlib.suppress(BrokenPlan):
                return self._turns.enter(component)
        self._close()
        for residency in self._host.residencies.values():
            residency.release()
        self._device.release_cached()
        problem, self._plan = self.detour.around(component, entry, args, kwargs, self._device.allocated_bytes)
        self._problem = settle(problem, self._plan)
        self._variants = {numbers.name: numbers.variants[0] for numbers in self._problem.components}
        self._turns = Turns(self._problem, self._plan)
        return self._turns.enter(component)

    def _read(self, component: str, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """A weight that code outside of its component looks at, where that code computes."""
        return tensor.to(self._device.torch_device, copy=True)

    def _finish(self) -> None:
        """The slots that no entry opens any more."""
        try:
            for index in self._turns.finish():
                self._turn_to(index)
        except BrokenPlan:
            if self.detour is None:
                raise
        self._close()

    def _on_host(self, component: str, proceed: Proceed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The component's own code on the CPU: its inputs are copied there, its outputs to the device."""
        assert self._open is not None
        assert self._boundary is not None
        self._open.begin(component)
        here, there = self._device.torch_device, torch.device("cpu")
        args, kwargs = computing_on(there, *walk((args, kwargs), lambda tensor: tensor.to(there)))
        self._boundary.device = there
        try:
            with self._device.on_host(self._slowdowns[component]):
                result = proceed(*args, **kwargs)
        finally:
            self._boundary.device = here
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

    def _after(self, handed_bytes: int) -> dict[str, int]:
        found = self._tiers()
        return {**found, "device": found["device"] - handed_bytes}

    def _tiers(self) -> dict[str, int]:
        """Bytes by tier; on the device those of loaded blocks apart, which a session keeps by plan."""
        arenas = {name: self._device.arenas.nbytes(name) for name in ("arenas", "pinned")}
        return {"device": self._device.allocated_bytes - self._loaded_bytes(), **arenas}

    def _loaded_bytes(self) -> int:
        return sum(residency.loaded_bytes for residency in self._host.residencies.values())

    def _refuse_leftovers(self, tiers: tuple[Tier, ...], kept: bool) -> None:
        """Raises BrokenPlan when a tier holds more than before the run; a session's homes stay."""
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

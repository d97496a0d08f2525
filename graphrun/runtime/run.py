"""One run of a plan. Calls into components open and close the slots, in the order of the plan.

Run             intercepts every call into a component and executes the slots
SlotCursor      finds which slots a call opens (cursor.py)
OpenSlot        performs the actions of one slot (slot.py)
EventRecorder   collects the events of the trace (events.py)
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from graphrun.errors import BrokenPlan, OutOfMemory
from graphrun.model.plan import Plan, slot_text
from graphrun.model.problem import Problem
from graphrun.model.simulation import SlotReport
from graphrun.model.solution import Solution
from graphrun.model.splits import transfers
from graphrun.modules.interceptor import CallInterceptor
from graphrun.modules.precisions import QUANTIZED
from graphrun.modules.trees import computing_on, walk
from graphrun.ops import Stages
from graphrun.runtime.cursor import SlotCursor
from graphrun.runtime.devices.device import Device
from graphrun.runtime.events import EventRecorder
from graphrun.runtime.host import Host
from graphrun.runtime.leftovers import leftovers
from graphrun.runtime.slot import OpenSlot
from graphrun.runtime.spilled import Values
from graphrun.runtime.transfer import call_split, moved
from graphrun.trace import SlotTrace, Tier, Trace
from graphrun.units import show_size

Progress = Callable[[int, int, int], None]
"""Called at each call: index of the slot, number of the call in it (0: the slot opens), planned
calls of the slot."""

Proceed = Callable[..., Any]
"""Runs the component's own code for an intercepted call (see `CallInterceptor`)."""

Work = Callable[[], dict[str, Any]]
"""The code of the run: calls the components and returns the outputs by name."""

HandedOut = Callable[[Mapping[str, Any]], int]
"""Returns how many bytes of these outputs stay on the device, because the caller receives them
there."""


class Replan(Protocol):
    """Supplies a new plan when an attached pipeline makes a call that the current plan does not
    have."""

    def expects(
        self, component: str, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether the current plan has this call."""

    def plan_from(
        self,
        component: str,
        entry: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        live_bytes: int,
    ) -> Solution:
        """A plan that starts with this call. At that time the device holds no weights, and
        ``live_bytes`` of other tensors."""


def planned_peaks(slots: Sequence[SlotReport]) -> list[tuple[int, ...]]:
    """Planned peak bytes of each slot, on the device and on each secondary device."""
    return [(slot.peak_bytes, *slot.secondary_peaks) for slot in slots]


@dataclass(frozen=True)
class Setting:
    """What all runs of a session share. ``problem`` is the plan's problem with the plan's choices
    applied (`apply_choices`).

    ``slowdowns``: component -> factor on its compute time, for the components that compute on the
    CPU. ``limits``: of each device, `verify.pages.limit_bytes`; 0 where memory is not counted in
    pages.
    """

    problem: Problem
    plan: Plan
    host: Host
    device: Device
    slowdowns: Mapping[str, float]
    replan: Replan | None
    handed_out: HandedOut | None
    limits: Sequence[int]


class Run:
    """One run with the slots of ``plan``. ``peaks``: planned peak bytes of each slot, by device.
    ``progress`` is called at each call.

    No attribute holds a tensor: the traceback of an error may keep this object alive, and must not
    keep device memory with it.
    """

    def __init__(
        self,
        setting: Setting,
        plan: Plan,
        peaks: Sequence[Sequence[int]],
        progress: Progress | None,
    ) -> None:
        self._setting, self._device, self._host = setting, setting.device, setting.host
        self.progress = progress
        self._recorder = EventRecorder(self._device)
        self._values = Values(self._device, None)
        self._measured: set[str] = set()  # quantized components whose size was measured
        self._slots: list[SlotTrace] = []
        self._open: OpenSlot | None = None
        self._closed = False  # whether that is closed
        self._follow(setting.problem, plan, peaks)
        # on the device since an earlier phase or run
        self._cached_bytes = setting.host.cached_bytes
        self._before = self._tiers()  # bytes by memory tier
        # of each device: peak bytes of the open slot, and bytes that this process could allocate in
        # total
        self._at_failure = [(0, 0)] * len(self._device.every)

    def _follow(self, problem: Problem, plan: Plan, peaks: Sequence[Sequence[int]]) -> None:
        self._problem, self._plan, self._cursor = problem, plan, SlotCursor(problem, plan)
        self._peaks = peaks
        self._variants = {numbers.name: numbers.variants[0] for numbers in problem.components}

    @property
    def where(self) -> str:
        """Text that says for an error message which slot is open."""
        return "the run before its first slot" if self._open is None else slot_text(self._open.slot)

    def execute(self, work: Work | Stages, *, keep: bool) -> Trace:
        """Executes the run and returns its trace. Hooks are removed from the modules even if it
        fails.

        ``keep``: weights stay on the device, and backing stores in RAM, as a session needs it.
        Raises BrokenPlan when the run deviates from the plan, or leaves bytes allocated that it
        should have freed."""
        device, host, setting = self._device, self._host, self._setting
        with self._on_devices():
            try:
                self._interceptor: CallInterceptor | None = CallInterceptor(
                    host.modules,
                    device.torch_device,
                    around=self._on_call,
                    reads=self._read_weight,
                    dtypes={
                        name: dtype_in_graph for name, (dtype_in_graph, _) in host.casts.items()
                    },
                    casts=host.dtype_variants,
                )
                with self._interceptor:
                    outputs = self._work(work)
                self._finish()
            except BaseException:
                self._at_failure = [
                    (each.peak_bytes, each.available_bytes) for each in device.every
                ]
                raise
            finally:
                # breaks a reference cycle that would keep the caller's objects alive
                self._interceptor = None
                self._release()
            if not keep:
                host.evict()
                host.finish()
            self._release_cached()
        output_bytes = setting.handed_out(outputs) if setting.handed_out is not None else 0
        after = self._tiers(output_bytes)
        if any(after[name] > before_bytes for name, before_bytes in self._before.items()):
            # frees reference cycles that the ops' code made; only where needed, since it takes 0.1
            # s or more
            gc.collect()
            self._release_cached()
            after = self._tiers(output_bytes)
        found = tuple(
            Tier(name, self._before[name], after_bytes) for name, after_bytes in after.items()
        )
        for tier in found:
            if tier.left_bytes and tier.name.startswith("device"):
                where = device.every[int(tier.name.removeprefix("device") or 0)]
                held = leftovers(where, host.modules)
                raise BrokenPlan(
                    f"{show_size(tier.left_bytes)} stayed on the {tier.name} after the run: {held}"
                )
            if tier.left_bytes and not keep:
                raise BrokenPlan(f"{show_size(tier.left_bytes)} stayed in {tier.name} on the host")
        return self._trace(self._slots, outputs=outputs, tiers=found, sources=host.sources)

    def load_ahead(self) -> None:
        """Performs the first slot, if that loads, before the run has its inputs; `execute` goes on
        behind it."""
        with self._on_devices():
            try:
                self._advance(self._cursor.ahead())
                self._close()
            except BaseException:
                self._at_failure = [
                    (each.peak_bytes, each.available_bytes) for each in self._device.every
                ]
                raise
            finally:
                self._release()

    @contextlib.contextmanager
    def _on_devices(self) -> Iterator[None]:
        """The devices within the plan's budgets, and the clock of the trace, which goes on behind
        the slots that are done."""
        device = self._device
        # Tensors of other code, such as the caller's, are allocated on the device too. The reserve,
        # which is not part of `effective_bytes`, is for them.
        foreign_bytes = (
            min(self._problem.reserve_bytes, self._before["device"]) + self._host.outside_bytes
        )
        limit_bytes, *limits = self._setting.limits
        with contextlib.ExitStack() as stack:
            for secondary, of, limit in zip(
                device.secondaries, self._problem.secondaries, limits, strict=False
            ):
                stack.enter_context(secondary.session(of.effective_bytes, limit))
            cap_bytes = self._problem.effective_bytes
            stack.enter_context(
                device.session(cap_bytes + foreign_bytes, limit_bytes + foreign_bytes)
            )
            stack.enter_context(torch.no_grad())
            for each in reversed(device.every):
                each.barrier()
            self._recorder.origin = device.mark("compute")
            self._recorder.offset_seconds = self._slots[-1].end_seconds if self._slots else 0.0
            yield

    def finished(self, todo: Sequence[str]) -> Trace:
        """Trace of the stages that a failed run has finished: those not in ``todo``."""
        stages = {phase.name: phase.stage for phase in self._problem.phases}
        return self._trace(
            [slot for slot in self._slots if stages.get(slot.phase) not in (None, *todo)]
        )

    def _trace(self, slots: Sequence[SlotTrace], **more: Any) -> Trace:
        events = tuple(event for event in self._recorder.events if event.slot < len(slots))
        return Trace(
            self._setting.plan.digest,
            self._device.name,
            tuple(slots),
            events,
            self._before["device"],
            0,
            **more,
        )

    def _work(self, work: Work | Stages) -> dict[str, Any]:
        if not isinstance(work, Stages):
            return work()
        self._values = Values(self._device, work)
        self._cursor.leave_out(work.left_out)
        work.before_stage = self._before_stage
        try:
            return work.run()
        finally:
            work.before_stage = None
            self._clear_attributes()

    def _before_stage(self, stage: str) -> None:
        """Called before each stage. Frees what modules keep in their attributes of the stage
        before, and opens the load slot if that restores values which the stage reads.

        Raises OutOfMemory when the device has less memory than the remaining slots need.
        """
        self._clear_attributes()
        after = self._open.index + 1 if self._open is not None else 0
        for number, device in enumerate(self._device.every[: len(self._problem.secondaries) + 1]):
            available, needed = (
                device.available_bytes,
                max((peaks[number] for peaks in self._peaks[after:]), default=0),
            )
            if available < needed:
                self._at_failure[number] = device.peak_bytes, available
                where = f" on {device.torch_device}" if number else ""
                raise OutOfMemory(
                    f"before {stage}, {show_size(available)} are available{where} of the {show_size(needed)} that the plan needs"
                )
        self._advance(self._cursor.begin(stage))

    def _on_call(
        self,
        component: str,
        entry: str,
        proceed: Proceed,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Called by the interceptor in place of every call into a component; returns the call's
        result."""
        self._advance(self._slots_to_open(component, entry, args, kwargs))
        assert self._open is not None
        start = self._open.enter(component)
        self._report_progress()
        if component in self._host.casts:
            proceed = _cast(proceed, *self._host.casts[component])
        if component in self._setting.slowdowns:
            result = self._run_on_cpu(component, proceed, args, kwargs)
        elif (secondary := self._variants[component].secondary) > 0:
            result = self._run_on_secondary(self._device.every[secondary], proceed, args, kwargs)
        else:
            residency = self._host.residencies[component]
            stays = self._stays(component) if residency.splits else {}
            result = call_split(self._device, residency, stays, proceed, args, kwargs)
        end = self._device.mark("compute")
        self._recorder.note("run", component, entry, 0, (start, end))
        if self._variants[component].precision in QUANTIZED and component not in self._measured:
            # not before: 8-bit layers may take more memory after their first call
            self._measured.add(component)
            size = self._host.residencies[component].measured_bytes()
            self._recorder.note("size", component, "after its first call", size, (end, end))
        return result

    def _stays(self, component: str) -> dict[str, frozenset[int]]:
        """`Stays` of ``component`` in the phase of the open slot."""
        assert self._open is not None
        numbers, phase = self._problem.component(component), self._open.slot.phase
        uses = (
            use
            for of in self._problem.phases
            if of.name == phase
            for use in of.uses
            if use.component == component
        )
        return {
            numbers.groups[k].blocks[i]: of.stay
            for use in uses
            for (k, i), of in transfers(use, numbers).items()
        }

    def _slots_to_open(
        self, component: str, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[int]:
        """Indices of the slots that this call opens. If the current plan does not have the call, a
        new plan replaces it first."""
        replan = self._setting.replan
        if replan is None:
            return self._cursor.enter(component)
        if replan.expects(component, entry, args, kwargs):
            with contextlib.suppress(
                BrokenPlan
            ):  # the plan has such a call, but not at this point: a new plan, too
                return self._cursor.enter(component)
        self._close()
        self._host.evict()
        self._release_cached()
        solution = replan.plan_from(component, entry, args, kwargs, self._device.allocated_bytes)
        self._follow(solution.chosen, solution.plan, planned_peaks(solution.simulation.slots))
        return self._cursor.enter(component)

    def _read_weight(self, component: str, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """What code outside the component gets when it reads one of its weights: a copy on the
        device."""
        return tensor.to(self._device.torch_device, copy=True)

    def _finish(self) -> None:
        """Opens and closes the slots after the last call."""
        try:
            self._advance(self._cursor.finish())
        except BrokenPlan:
            if self._setting.replan is None:
                raise
        self._close()

    def _run_on_cpu(
        self, component: str, proceed: Proceed, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the component on the CPU: copies its inputs there and its outputs to the device."""
        assert self._interceptor is not None
        self._host.residencies[component].wait_read()
        device, cpu = self._device.torch_device, torch.device("cpu")
        args, kwargs = computing_on(cpu, *walk((args, kwargs), lambda tensor: tensor.to(cpu)))
        self._interceptor.device = cpu
        try:
            with self._device.on_host(self._setting.slowdowns[component]):
                result = proceed(*args, **kwargs)
        finally:
            self._interceptor.device = device
        return walk(result, lambda tensor: tensor.to(device))

    def _run_on_secondary(
        self, secondary: Device, proceed: Proceed, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the component on ``secondary``: copies there what it gets from the device, once
        each, and what it returns back."""
        assert self._interceptor is not None
        device, there = self._device.torch_device, secondary.torch_device
        arguments = computing_on(there, *moved((args, kwargs), device, there))
        self._interceptor.device = there
        try:
            with secondary.current():
                result = proceed(*arguments[0], **arguments[1])
        finally:
            self._interceptor.device = device
        return moved(result, there, device)

    def annotate(self, error: OutOfMemory) -> None:
        """Sets the fields of ``error``: the device and the slot in which it happened, its planned
        bytes and its measured bytes."""
        error.secondary = next(
            (
                n
                for n, secondary in enumerate(self._device.secondaries, 1)
                if secondary.refused(error)
            ),
            0,
        )
        error.peak_bytes, error.available_bytes = self._at_failure[error.secondary]
        if self._open is not None:
            error.phase, error.part = self._open.slot.phase, self._open.slot.part
            error.planned_bytes = self._peaks[self._open.index][error.secondary]

    def _advance(self, indices: Sequence[int]) -> None:
        """Closes the open slot and opens the slots ``indices`` one after another."""
        for index in indices:
            self._close()
            slot = self._plan.slots[index]
            if self._open is not None and slot.phase != self._open.slot.phase:
                self._clear_memos()
            self._closed = False
            self._open = OpenSlot(
                index, slot, self._problem, self._host.residencies, self._recorder, self._values
            )
            self._report_progress()
            self._open.open()

    def _close(self) -> None:
        if self._open is not None and not self._closed:
            closed = self._open.close()
            self._closed = True
            peak_bytes = max(0, closed.peak_bytes - self._cached_bytes)
            planned = self._planned_with_others(self._peaks[self._open.index])
            self._slots.append(replace(closed, peak_bytes=peak_bytes, planned_peaks=planned))

    def _planned_with_others(self, peaks: Sequence[int]) -> tuple[int, ...]:
        """``peaks`` of a slot, each with the bytes on its device that are not the plan's: those
        before the run, and blocks of components that the plan does not use."""
        residencies = self._host.residencies.items()
        others = [residency for name, residency in residencies if name not in self._variants]
        return tuple(
            peak
            + self._before[f"device{number or ''}"]
            + sum(other.loaded_bytes(self._device.every[number]) for other in others)
            for number, peak in enumerate(peaks)
        )

    def _report_progress(self) -> None:
        if self.progress is not None and self._open is not None:
            self.progress(self._open.index, self._open.calls, self._open.slot.calls)

    def _release(self) -> None:
        """Waits for copies under way, removes hooks and frees ring buffers, also after a
        failure."""
        try:
            # A device in an error state cannot be synchronized. The original error is raised
            # already.
            with contextlib.suppress(RuntimeError):
                for each in reversed(self._device.every):
                    each.barrier()
        finally:  # the ordering checker raises a race at a barrier
            if self._open is not None:
                self._open.release()
            self._values.release_originals()
            self._clear_memos()

    def _release_cached(self) -> None:
        for device in self._device.every:
            device.release_cached()

    def _clear_memos(self) -> None:
        self._host.clear_memos()
        self._cached_bytes = self._host.cached_bytes

    def _clear_attributes(self) -> None:
        for attributes in self._host.held_attributes:
            attributes.cache_clear()

    def _tiers(self, output_bytes: int = 0) -> dict[str, int]:
        """Bytes in use by memory tier. On the device without loaded blocks and caches, which a
        session keeps, and without ``output_bytes``, which the caller received."""
        found = self._device.tiers()
        found["device"] -= output_bytes + self._host.cached_bytes
        for number, device in enumerate(self._device.every):
            own = self._host.residencies.values()
            found[f"device{number or ''}"] -= sum(
                residency.loaded_bytes(device) for residency in own
            )
        return found


def _cast(proceed: Proceed, outside: torch.dtype, inside: torch.dtype) -> Proceed:
    """``proceed`` with tensors of dtype ``outside`` cast to ``inside`` in its arguments, and back
    in its results."""

    def cast(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = walk((args, kwargs), lambda t: t.to(inside) if t.dtype == outside else t)
        return walk(proceed(*args, **kwargs), lambda t: t.to(outside) if t.dtype == inside else t)

    return cast

"""Execute one run of a plan: calls into components open and close the slots in order."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from graphrun.errors import BrokenPlan, OutOfMemory
from graphrun.graph.precisions import QUANTIZED
from graphrun.hook import Hook
from graphrun.model.plan import Plan, slot_text
from graphrun.model.problem import Problem
from graphrun.model.simulation import SlotReport
from graphrun.model.solution import Solution
from graphrun.model.splits import transfers
from graphrun.modules.interceptor import CallInterceptor, entry_of
from graphrun.modules.trees import walk, with_device_arguments
from graphrun.ops import Stages
from graphrun.runtime.cursor import SlotCursor
from graphrun.runtime.devices.device import Device
from graphrun.runtime.events import EventRecorder
from graphrun.runtime.host import Host
from graphrun.runtime.leftovers import leftovers
from graphrun.runtime.slot import OpenSlot
from graphrun.runtime.spilled import RunValues
from graphrun.runtime.transfer import call_split, deferred_tensors, move_tensors
from graphrun.trace import SlotTrace, Tier, Trace
from graphrun.units import show_size

Proceed = Callable[..., Any]
"""Runs the component's own code for an intercepted call (see `CallInterceptor`)."""

PipelineCode = Callable[[], dict[str, Any]]
"""The code of the run: calls the components and returns the outputs by name."""

HandedOut = Callable[[Mapping[str, Any]], int]
"""Returns the bytes of the outputs that the caller receives on the device."""


class Replan(Protocol):
    """Source of new plans for calls of an attached pipeline that the current plan does not have."""

    def expects(
        self, component: str, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Return whether the current plan has this call."""

    def plan_from(
        self,
        component: str,
        entry: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        live_bytes: int,
    ) -> Solution:
        """Return a plan from this call on; the device then has ``live_bytes``, and no weights."""


def planned_peaks(slots: Sequence[SlotReport]) -> list[tuple[int, ...]]:
    """Return the planned peak bytes of each slot, on the device and on each secondary device."""
    return [(slot.peak_bytes, *slot.secondary_peaks) for slot in slots]


@dataclass(frozen=True)
class Setting:
    """The parts that all runs of a session share.

    ``problem``: with the plan's choices applied. ``slowdowns``: component on the CPU -> factor on
    its compute time. ``limits``: `verify.pages.limit_bytes` of each device.
    """

    problem: Problem
    plan: Plan
    host: Host
    device: Device
    slowdowns: Mapping[str, float]
    replan: Replan | None
    handed_out: HandedOut | None
    limits: Sequence[int]


class PlanRun:
    """One run of the slots of ``plan``.

    ``peaks``: planned peak bytes of each slot, by device.

    No attribute refers to a tensor: the traceback of an error may keep this object alive, and must
    not keep device memory allocated.
    """

    def __init__(
        self,
        setting: Setting,
        plan: Plan,
        peaks: Sequence[Sequence[int]],
    ) -> None:
        self._setting, self._device, self._host = setting, setting.device, setting.host
        self.hook = Hook()
        self._recorder = EventRecorder(self._device)
        self._values = RunValues(self._device, None)
        self._measured_components: set[str] = set()  # quantized, and their size was measured
        self._slots: list[SlotTrace] = []
        self._open: OpenSlot | None = None
        self._closed = False  # whether the slot in `_open` is closed
        self._follow(setting.problem, plan, peaks)
        # of tensors that modules cached on the device in earlier phases or runs
        self._cached_bytes = setting.host.cached_bytes
        self._bytes_before_run = self._tiers()  # by memory tier
        # for each device, at a failure: peak bytes of the open slot, and bytes that this process
        # can allocate in total
        self._failure_bytes = [(0, 0)] * len(self._device.all_devices)

    def _follow(self, problem: Problem, plan: Plan, peaks: Sequence[Sequence[int]]) -> None:
        self._problem, self._plan, self._cursor = problem, plan, SlotCursor(problem, plan)
        self._peaks = peaks
        self._variants = {numbers.name: numbers.variants[0] for numbers in problem.components}

    @property
    def where(self) -> str:
        """The open slot, for error messages."""
        return "the run before its first slot" if self._open is None else slot_text(self._open.slot)

    def execute(self, work: PipelineCode | Stages, *, keep: bool) -> Trace:
        """Execute the run and return its trace. Hooks are always removed from the modules.

        ``keep``: keep weights on the device and backing stores in RAM for the next run of a
        session. Raises BrokenPlan if the run deviates from the plan, or leaves bytes allocated that
        it should have freed.
        """
        device, host, setting = self._device, self._host, self._setting
        with self._on_devices():
            try:
                self._interceptor: CallInterceptor | None = CallInterceptor(
                    host.modules | host.copies,
                    device.torch_device,
                    handle_call=self._on_call,
                    reads=self._read_weight,
                    # `dtypes`: for components that the plan runs in another dtype than the graph's.
                    # `casts`: for modules that the pipeline itself casts.
                    dtypes={
                        name: dtype_in_graph for name, (dtype_in_graph, _) in host.casts.items()
                    },
                    casts=host.dtype_variants,
                )
                with self._interceptor:
                    outputs = self._work(work)
                self._finish()
            except BaseException:
                self._failure_bytes = [
                    (accelerator.peak_bytes, accelerator.plannable_bytes)
                    for accelerator in device.all_devices
                ]
                raise
            finally:
                # breaks a reference cycle that would keep the caller's objects alive
                self._interceptor = None
                self._release()
            if not keep:
                host.evict()
                host.finish()
            for residency in host.residencies.values():
                residency.rebind()
            self._release_cached()
        output_bytes = setting.handed_out(outputs) if setting.handed_out is not None else 0
        usage = self._tiers(output_bytes)
        if any(usage[name] > before_bytes for name, before_bytes in self._bytes_before_run.items()):
            # frees reference cycles of the stages' code; only if needed: it takes 0.1 s or more
            gc.collect()
            self._release_cached()
            usage = self._tiers(output_bytes)
        tiers = tuple(
            Tier(name, self._bytes_before_run[name], after_bytes)
            for name, after_bytes in usage.items()
        )
        for tier in tiers:
            if tier.left_bytes and tier.name.startswith("device"):
                tier_device = device.all_devices[int(tier.name.removeprefix("device") or 0)]
                holders = leftovers(tier_device, host.modules)
                raise BrokenPlan(
                    f"{show_size(tier.left_bytes)} stayed on the {tier.name} after the run: "
                    f"{holders}"
                )
            if tier.left_bytes and not keep:
                raise BrokenPlan(f"{show_size(tier.left_bytes)} stayed in {tier.name} on the host")
        return self._trace(self._slots, outputs=outputs, tiers=tiers, sources=host.sources)

    def load_ahead(self) -> None:
        """Perform the first slot, if it only loads; `execute` then continues after it."""
        with self._on_devices():
            try:
                self._advance(self._cursor.open_ahead())
                self._close()
            except BaseException:
                self._failure_bytes = [
                    (accelerator.peak_bytes, accelerator.plannable_bytes)
                    for accelerator in self._device.all_devices
                ]
                raise
            finally:
                self._release()

    @contextlib.contextmanager
    def _on_devices(self) -> Iterator[None]:
        """Activate each device, cap its allocations (`Device.capped`), and set the trace's clock.

        The clock continues after the slots that are done.
        """
        device = self._device
        # The cap leaves room for what is on the device without being planned:
        # - weights of attached pipelines with other budgets (`outside_bytes`)
        # - the caller's tensors from before the run: the plan leaves `reserve_bytes` of the budget
        #   to them and to other programs, so the cap grows by at most these bytes
        # - tensors of other code in this process (`foreign_bytes`)
        # On unified memory the last two are among the process's bytes, and the device itself lowers
        # the cap if these are more than planned (`CpuDevice.capped`).
        unplanned_bytes = self._host.outside_bytes
        if not device.unified:
            unplanned_bytes += min(self._problem.reserve_bytes, self._bytes_before_run["device"])
            unplanned_bytes += device.foreign_bytes
        # limits of the allocator's reserved pages
        page_limit_bytes, *limits = self._setting.limits
        with contextlib.ExitStack() as stack:
            for secondary, numbers, limit in zip(
                device.secondaries, self._problem.secondaries, limits, strict=False
            ):
                stack.enter_context(secondary.capped(numbers.effective_bytes, limit))
            tensor_limit_bytes = self._problem.effective_bytes
            stack.enter_context(
                device.capped(
                    tensor_limit_bytes + unplanned_bytes, page_limit_bytes + unplanned_bytes
                )
            )
            stack.enter_context(torch.no_grad())
            for accelerator in reversed(device.all_devices):
                accelerator.barrier()
            self._recorder.origin = device.mark("compute")
            self._recorder.offset_seconds = self._slots[-1].end_seconds if self._slots else 0.0
            yield

    def partial_trace(self, unfinished_stages: Sequence[str]) -> Trace:
        """Return the trace of a failed run without the slots of ``unfinished_stages``."""
        stages = {phase.name: phase.stage for phase in self._problem.phases}
        return self._trace(
            [
                slot
                for slot in self._slots
                if stages.get(slot.phase) not in (None, *unfinished_stages)
            ]
        )

    def _trace(self, slots: Sequence[SlotTrace], **fields: Any) -> Trace:
        events = tuple(event for event in self._recorder.events if event.slot < len(slots))
        hardware = self._problem.hardware
        if hardware.unified:
            fields["process_bytes"] = hardware.context_bytes + hardware.workspace_bytes
        return Trace(
            self._setting.plan.digest,
            self._device.name,
            tuple(slots),
            events,
            self._bytes_before_run["device"],
            left_bytes=0,
            **fields,
        )

    def _work(self, work: PipelineCode | Stages) -> dict[str, Any]:
        if not isinstance(work, Stages):
            return work()
        self._values = RunValues(self._device, work)
        self._cursor.leave_out(work.excluded_stages)
        work.before_stage, work.reads = self._before_stage, self._read_weight
        try:
            return work.run()
        finally:
            work.before_stage = work.reads = None
            self._clear_attributes()

    def _before_stage(self, stage: str) -> None:
        """Prepare a stage: called before each one.

        Frees tensors of the previous stage in attributes of modules. Opens the load slot if it
        restores values that the stage reads. Raises OutOfMemory if the device has less memory than
        the remaining slots need.
        """
        self._clear_attributes()
        next_slot = self._open.index + 1 if self._open is not None else 0
        for number, device in enumerate(
            self._device.all_devices[: len(self._problem.secondaries) + 1]
        ):
            available_bytes, needed_bytes = (
                device.plannable_bytes,
                max((peaks[number] for peaks in self._peaks[next_slot:]), default=0),
            )
            if needed_bytes and available_bytes < needed_bytes:
                self._failure_bytes[number] = device.peak_bytes, available_bytes
                place = f" on {device.torch_device}" if number else ""
                available = (
                    f"{show_size(available_bytes)} are available{place}"
                    if available_bytes >= 0
                    else f"{show_size(-available_bytes)} too much is in use{place}, and nothing is "
                    "available"
                )
                raise OutOfMemory(
                    f"before {stage}, {available} of the {show_size(needed_bytes)} that the plan "
                    "needs"
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
        """Run a call into a component, for the interceptor, and return its result."""
        original = component
        component, indices = self._caller_and_slots(original, entry, args, kwargs)
        is_copy = component != original
        if is_copy:
            proceed = entry_of(self._host.copies[component], entry)
        self._advance(indices)
        assert self._open is not None
        start = self._open.enter(component)
        clock_device = self._device
        if is_copy:
            clock_device = self._device.all_devices[self._variants[component].secondary]
            start = clock_device.mark("compute")
        self.hook.call_begins(component, entry, args, kwargs)
        if original in self._host.casts:
            proceed = _cast(proceed, *self._host.casts[original])
        if component in self._setting.slowdowns:
            result = self._run_on_cpu(component, proceed, args, kwargs)
        elif (secondary := self._variants[component].secondary) > 0:
            result = self._run_on_secondary(
                self._device.all_devices[secondary], proceed, args, kwargs, is_deferred=is_copy
            )
        else:
            residency = self._host.residencies[component]
            staying_outputs = self._staying_outputs(component) if residency.splits else {}
            result = call_split(self._device, residency, staying_outputs, proceed, args, kwargs)
        end = clock_device.mark("compute")
        self._recorder.note("run", component, entry, 0, (start, end), clock_device)
        if (
            self._variants[component].precision in QUANTIZED
            and component not in self._measured_components
        ):
            # not earlier: 8-bit layers may take more memory after their first call
            self._measured_components.add(component)
            size = self._host.residencies[component].measured_bytes()
            self._recorder.note(
                "size", component, "after its first call", size, (end, end), clock_device
            )
        self.hook.call_ends(component, entry, result)
        return result

    def _staying_outputs(self, component: str) -> dict[str, frozenset[int]]:
        """Return which outputs of ``component`` stay on secondary devices in the open slot's phase.

        Path of a block on a secondary device -> numbers of its output tensors that only blocks on
        the same device receive.
        """
        assert self._open is not None
        numbers, use = self._problem.component(component), self._open.uses[component]
        return {
            numbers.groups[k].blocks[i]: transfer.stay
            for (k, i), transfer in transfers(use, numbers).items()
        }

    def _caller_and_slots(
        self, component: str, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, list[int]]:
        """Return who makes this call (`SlotCursor.caller`), and the slots that it opens, after a
        replan if the plan has no such call."""
        replan = self._setting.replan
        if replan is None:
            return self._entered(component)
        if replan.expects(component, entry, args, kwargs):
            # a plan that has such a call, but not at this point, is replaced too
            with contextlib.suppress(BrokenPlan):
                return self._entered(component)
        self._close()
        self._host.evict()
        self._release_cached()
        solution = replan.plan_from(component, entry, args, kwargs, self._device.allocated_bytes)
        self._follow(solution.chosen, solution.plan, planned_peaks(solution.simulation.slots))
        return self._entered(component)

    def _entered(self, component: str) -> tuple[str, list[int]]:
        caller = self._cursor.caller(component)
        return caller, self._cursor.enter(caller)

    def _read_weight(self, component: str, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a weight on the device, for code outside the component that reads it."""
        # also of a meta module, in a stage that does not list the component
        if tensor.is_meta and component in self._host.modules:
            tensor = self._host.tensor(component, path)
        if tensor.device.type in ("cpu", "meta") and component in self._host.residencies:
            tensor = self._host.residencies[component].read(path, tensor)
        return tensor.to(self._device.torch_device, copy=True)

    def _finish(self) -> None:
        try:
            self._advance(self._cursor.finish())
        except BrokenPlan:
            if self._setting.replan is None:
                raise
        self._close()

    def _run_on_cpu(
        self, component: str, proceed: Proceed, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the component on the CPU: copy its inputs there and its outputs to the device."""
        assert self._interceptor is not None
        self._host.residencies[component].wait_read()
        device, cpu = self._device.torch_device, torch.device("cpu")
        args, kwargs = with_device_arguments(
            cpu, *walk((args, kwargs), lambda tensor: tensor.to(cpu))
        )
        self._interceptor.device = cpu
        try:
            with self._device.on_host(self._setting.slowdowns[component]):
                result = proceed(*args, **kwargs)
        finally:
            self._interceptor.device = device
        return walk(result, lambda tensor: tensor.to(device))

    def _run_on_secondary(
        self,
        secondary: Device,
        proceed: Proceed,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_deferred: bool,
    ) -> Any:
        """Run the component on ``secondary``: copy its inputs there and its results back.

        ``is_deferred``: results are copied back when code computes with them.
        """
        assert self._interceptor is not None
        device, target = self._device.torch_device, secondary.torch_device
        arguments = with_device_arguments(target, *move_tensors((args, kwargs), device, target))
        self._interceptor.device = target
        try:
            with secondary.current():
                result = proceed(*arguments[0], **arguments[1])
        finally:
            self._interceptor.device = device
        if is_deferred:
            return deferred_tensors(result, target, device)
        return move_tensors(result, target, device)

    def annotate(self, error: OutOfMemory) -> None:
        """Set the fields of ``error``: its device and slot, and the planned and measured bytes."""
        error.secondary = next(
            (
                n
                for n, secondary in enumerate(self._device.secondaries, 1)
                if secondary.refused(error)
            ),
            0,
        )
        error.peak_bytes, error.available_bytes = self._failure_bytes[error.secondary]
        if self._open is not None:
            error.phase, error.part = self._open.slot.phase, self._open.slot.part
            error.planned_bytes = self._peaks[self._open.index][error.secondary]

    def _advance(self, indices: Sequence[int]) -> None:
        """Close the open slot, and open the slots ``indices`` one after another."""
        for index in indices:
            self._close()
            slot = self._plan.slots[index]
            if self._open is not None and slot.phase != self._open.slot.phase:
                self._clear_memos()
            self._closed = False
            self._open = OpenSlot(
                index, slot, self._problem, self._host.residencies, self._recorder, self._values
            )
            self.hook.slot_opens(index, slot)
            self._open.open()

    def _close(self) -> None:
        if self._open is not None and not self._closed:
            closed = self._open.close()
            self._closed = True
            peak_bytes = max(0, closed.peak_bytes - self._cached_bytes)
            slot_peaks = self._planned_with_others(self._peaks[self._open.index])
            self._slots.append(replace(closed, peak_bytes=peak_bytes, planned_peaks=slot_peaks))
            self.hook.slot_closes(self._open.index, self._slots[-1])

    def _planned_with_others(self, peaks: Sequence[int]) -> tuple[int, ...]:
        """Return ``peaks`` of a slot plus the bytes on each device that are not part of the plan.

        These are the bytes before the run, and blocks of components that the plan does not use.
        """
        residencies = self._host.residencies.items()
        other_residencies = [
            residency for name, residency in residencies if name not in self._variants
        ]
        return tuple(
            peak
            + self._bytes_before_run[f"device{number or ''}"]
            + sum(
                other.loaded_bytes(self._device.all_devices[number]) for other in other_residencies
            )
            for number, peak in enumerate(peaks)
        )

    def _release(self) -> None:
        """Wait for copies under way, remove hooks and free ring buffers, also after a failure."""
        try:
            # a device in an error state cannot be synchronized; the original error is already
            # raised
            with contextlib.suppress(RuntimeError):
                for accelerator in reversed(self._device.all_devices):
                    accelerator.barrier()
        # also if a barrier raises, as with races that the simulated accelerator found
        finally:
            if self._open is not None:
                self._open.release()
            self._values.release_originals()  # of spilled and restored values
            self._clear_memos()

    def _release_cached(self) -> None:
        for device in self._device.all_devices:
            device.release_cached()

    def _clear_memos(self) -> None:
        self._host.clear_memos()
        self._cached_bytes = self._host.cached_bytes

    def _clear_attributes(self) -> None:
        for attributes in self._host.held_attributes:
            attributes.cache_clear()

    def _tiers(self, output_bytes: int = 0) -> dict[str, int]:
        """Return the bytes in use by memory tier.

        Not counted: loaded blocks and caches on the device, which a session keeps, and
        ``output_bytes``, which the caller received.
        """
        usage = self._device.tiers()
        usage["device"] -= output_bytes + self._host.cached_bytes
        for number, device in enumerate(self._device.all_devices):
            residencies = self._host.residencies.values()
            usage[f"device{number or ''}"] -= sum(
                residency.loaded_bytes(device) for residency in residencies
            )
        return usage


def _cast(proceed: Proceed, graph_dtype: torch.dtype, plan_dtype: torch.dtype) -> Proceed:
    """Return ``proceed`` with arguments cast to ``plan_dtype``, results to ``graph_dtype``."""

    def cast(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = walk(
            (args, kwargs), lambda t: t.to(plan_dtype) if t.dtype == graph_dtype else t
        )
        return walk(
            proceed(*args, **kwargs), lambda t: t.to(graph_dtype) if t.dtype == plan_dtype else t
        )

    return cast

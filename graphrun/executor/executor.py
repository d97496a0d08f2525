"""Follows a plan. Decides nothing: what the plan says is what happens, and where reality differs the run stops and says so.

The stages' own code runs on; entering a component is what moves the plan forward.

    op's code    ... | text_encoder(...) | ... | transformer(...) | ... transformer(...) ... | vae.decode(...) | ...
    Boundary         v entry             .     v entry                  v entry             v
    Turns            slots 0, 1          .     slots 2, 3               slot 4              slots 5, 6
    OpenSlot         close - open        .     close - open             close - open        close - open

Whatever happens, in the end hooks and boundaries are gone, modules have their host tensors back, and the device holds what it held.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from graphrun.components.entry import Boundary
from graphrun.errors import BrokenPlan, PlanError
from graphrun.executor.device import Device, Mark
from graphrun.executor.failure import settled
from graphrun.executor.host import Host
from graphrun.executor.slot import OpenSlot, Recorder
from graphrun.executor.turns import Turns
from graphrun.graph.graph import Graph
from graphrun.ops import run_stages
from graphrun.planner.check import check
from graphrun.planner.plan import Free, Plan, Restore, Spill, action_text, slot_text
from graphrun.planner.problem import Problem
from graphrun.trace import SlotTrace, Tier, Trace
from graphrun.units import show_size

Progress = Callable[[int, int, int], None]
"""Told of each call: index of the slot, number of the call in it (0 when the slot opens), planned calls of the slot."""

Work = Callable[[], dict[str, Any]]
"""What computes: the stages of a graph, or anything that calls the components. Returns the run's outputs, on the host."""

LEFTOVERS_SHOWN = 5


def execute(
    problem: Problem,
    plan: Plan,
    graph: Graph,
    inputs: Mapping[str, Any],
    device: Device,
    modules: Mapping[str, nn.Module] | None = None,
    progress: Progress | None = None,
    *,
    host: Host | None = None,
    stages: Mapping[str, Any] | None = None,
) -> Trace:
    """Runs ``graph`` on resolved ``inputs`` by ``plan`` and returns what was measured, with the graph's outputs on the host.

    ``modules``: components built before. ``host``: arenas of an earlier run, in place of ``modules``; without it they are built for
    this run and dropped with it. ``stages``: more arguments of `run_stages`. Raises PlanError before anything is loaded when the plan
    is not to be run; OutOfMemory or TransferFailed when the device refuses, BrokenPlan when reality leaves the plan. After any error
    the device is back at its baseline and the next run starts as if there had been none.
    """
    refuse_unfit(problem, plan, graph)
    if host is None:
        host = Host.of_graph(graph, problem, device, modules)
    modules, parts, ghosts, place = host.modules, host.parts, host.ghosts, device.torch_device
    more = dict(stages or {})
    return follow(
        problem, plan, host, device, lambda: run_stages(graph, modules, place, inputs, parts=parts, ghosts=ghosts, **more), progress
    )


def follow(problem: Problem, plan: Plan, host: Host, device: Device, work: Work, progress: Progress | None = None) -> Trace:
    """Lets ``work`` run, whose calls into ``host.modules`` move ``plan`` forward. ``work`` computes on ``device.torch_device``.

    Errors as for `execute`; an error of ``work``'s own code is raised as it is.
    """
    _refuse_plan(problem, plan)
    host.refuse_other(problem)
    run = _Run(problem, plan, device, host, progress)
    try:
        return run.perform(work)
    except BaseException as error:  # an interrupt too must leave the device empty
        failure = settled(error, device, run.where)
        gc.collect()
        with contextlib.suppress(RuntimeError):
            device.release_cached()
        if (left_bytes := device.allocated_bytes - run.baseline_bytes) > 0:
            failure.add_note(f"{show_size(left_bytes)} stayed on the device: {_leftovers(device)}")
        if failure is error:
            raise
        raise failure from None


def refuse_unfit(problem: Problem, plan: Plan, graph: Graph) -> None:
    """Raises PlanError when ``plan`` may not be run: it is not for this problem or graph, breaks a rule, or asks for too much."""
    if problem.graph_digest != graph.digest:
        raise PlanError(
            f"the plan is for a graph {problem.graph!r} with digest {problem.graph_digest}, this one has {graph.digest}: plan again"
        )
    _refuse_plan(problem, plan)


def _refuse_plan(problem: Problem, plan: Plan) -> None:
    if plan.problem != problem.digest:
        raise PlanError(f"the plan is for the problem with digest {plan.problem}, this one has {problem.digest}: plan again")
    for component in problem.components:
        variant = component.variants[0]
        if variant.home == "disk" or variant.device != "device":
            raise PlanError(
                f"{component.name}: home {variant.home}, computing on {variant.device}, is not supported by this version"
            )
    for slot in plan.slots:
        for action in slot.actions:
            if isinstance(action, (Spill, Restore, Free)):
                raise PlanError(f"{slot_text(slot)}: {action_text(action)!r} is not supported by this version")
    if violations := check(problem, plan):
        lines = [f"{v.rule}, slot {v.slot}{f', action {v.action}' if v.action >= 0 else ''}: {v.detail}" for v in violations]
        raise PlanError("\n".join(["the plan may not be run:", *lines]))


class _Run:
    """One execution. Holds no tensor itself, so that an error's frames in it may live."""

    def __init__(self, problem: Problem, plan: Plan, device: Device, host: Host, progress: Progress | None) -> None:
        self._problem, self._plan = problem, plan
        self._device, self._host, self._progress = device, host, progress
        self._turns = Turns(problem, plan)
        self._slots: list[SlotTrace] = []
        self._open: OpenSlot | None = None
        self._recorder: Recorder | None = None
        self._call: tuple[str, Mark] = ("", None)
        self.baseline_bytes = device.allocated_bytes
        self._before = _tiers(device)

    @property
    def where(self) -> str:
        """The slot that is open, for an error's text."""
        return "the run before its first slot" if self._open is None else slot_text(self._open.slot)

    def perform(self, work: Work) -> Trace:
        """The whole run. Leaves no weights on the device and no hook on a module, also by an exception."""
        device = self._device
        with device.session(self._problem.effective_bytes), torch.no_grad():
            try:
                device.barrier()
                self._recorder = Recorder(device, device.mark("compute"))
                with Boundary(self._host.modules, device.torch_device, self._enter, self._exit):
                    outputs = work()
                for index in self._turns.finish():
                    self._turn_to(index)
                self._close()
            finally:
                self._release()
            gc.collect()
            device.release_cached()
        tiers = tuple(Tier(name, self._before[name], after_bytes) for name, after_bytes in _tiers(device).items())
        _refuse_leftovers(tiers, device)
        return Trace(
            plan_digest=self._plan.digest,
            device=device.name,
            slots=tuple(self._slots),
            events=tuple(self._recorder.events),
            baseline_bytes=self.baseline_bytes,
            left_bytes=0,
            outputs=outputs,
            tiers=tiers,
        )

    def _enter(self, component: str, entry: str) -> None:
        for index in self._turns.enter(component):
            self._turn_to(index)
        assert self._open is not None
        self._call = (component, self._open.enter(component))
        self._tell(self._open.calls)

    def _exit(self, component: str, entry: str) -> None:
        assert self._recorder is not None
        self._recorder.note("run", component, entry, 0, (self._call[1], self._device.mark("compute")))

    def _turn_to(self, index: int) -> None:
        """Closes the slot that is open and opens slot number ``index``."""
        self._close()
        assert self._recorder is not None
        slot = self._plan.slots[index]
        self._open = OpenSlot(index, slot, self._problem, self._host.residencies, self._device, self._recorder)
        self._tell(0)
        self._open.open()

    def _close(self) -> None:
        if self._open is not None:
            self._slots.append(self._open.close())

    def _tell(self, call: int) -> None:
        if self._progress is not None and self._open is not None:
            self._progress(self._open.index, call, self._open.slot.calls)

    def _release(self) -> None:
        """Everything that a failure may have left: a copy under way, hooks, staged views, loaded blocks."""
        with contextlib.suppress(RuntimeError):  # a device in error cannot be waited for; the error that matters is on its way
            self._device.barrier()
        if self._open is not None:
            self._open.release()
        for residency in self._host.residencies.values():
            residency.release()


def _tiers(device: Device) -> dict[str, int]:
    return {"device": device.allocated_bytes, **{name: device.arenas.nbytes(name) for name in ("arenas", "pinned")}}


def _refuse_leftovers(tiers: tuple[Tier, ...], device: Device) -> None:
    """Raises BrokenPlan when a tier holds more than before the run."""
    for tier in tiers:
        if tier.left_bytes:
            holders = (
                f"on the device after the run: {_leftovers(device)}" if tier.name == "device" else f"in {tier.name} on the host"
            )
            raise BrokenPlan(f"{show_size(tier.left_bytes)} stayed {holders}")


def _leftovers(device: Device) -> str:
    holders = device.holders()
    more = f" and {len(holders) - LEFTOVERS_SHOWN} more" if len(holders) > LEFTOVERS_SHOWN else ""
    return ", ".join(holders[:LEFTOVERS_SHOWN]) + more

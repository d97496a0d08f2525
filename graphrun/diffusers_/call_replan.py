"""Plan calls into components of an attached pipeline that the plan of the call does not contain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch

from graphrun.diffusers_.dry_call import MetaPipeline
from graphrun.diffusers_.residence import LiveHost
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.modules.dtype_variants import DtypeVariant
from graphrun.profile.recording import MemoryEvent, Recording, StageEnd
from graphrun.runtime.devices.cpu import CpuDevice
from graphrun.runtime.devices.device import Device
from graphrun.units import MIB, round_up


class CallPlanning(NamedTuple):
    """The part of the attachment that planning inside a call uses.

    ``pipeline_name``: for messages. ``meta_pipeline``, ``autocast``: return the meta pipeline and
    the dtype of the active autocast. ``problem``, ``solve``: a recording as a problem, and its
    plan. ``make_room``: evicts weights so that a plan fits. ``say``: prints a line.
    """

    pipeline_name: str
    device: Device
    host: LiveHost
    meta_pipeline: Callable[[], MetaPipeline]
    autocast: Callable[[], torch.dtype | None]
    problem: Callable[[Recording, int], Problem]
    solve: Callable[[Problem], Solution]
    make_room: Callable[[Solution, Collection[str]], None]
    say: Callable[[str], None]


class CallReplan:
    """The executor's `Replan`: plans calls into components that the plan does not contain.

    ``call_signatures``: of the calls into components in the current plan. ``reserve_bytes``: the
    caller's own bytes on the device. ``component_calls``: newly planned, as ``component.method``.
    """

    def __init__(
        self, planning: CallPlanning, call_signatures: frozenset[str], reserve_bytes: int
    ) -> None:
        self.component_calls: list[str] = []
        self._planning, self._reserve_bytes = planning, reserve_bytes
        self._call_signatures = call_signatures

    def expects(
        self, component: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Return whether the current plan contains this call into a component. A call with another
        text counts if the component computes the same for both."""
        if self._signature(component, method, args, kwargs) in self._call_signatures:
            return True
        planning = self._planning
        return planning.meta_pipeline().serves(
            self._call_signatures,
            self._dtype_variants()[component],
            method,
            args,
            kwargs,
            planning.autocast(),
        )

    def plan_from(
        self,
        component: str,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        live_bytes: int,
    ) -> Solution:
        """Return a plan for this call into a component and later ones of the same signature.
        ``live_bytes``: bytes allocated on the device."""
        planning, dtype_variants = self._planning, self._dtype_variants()
        planning.say(
            f"{planning.pipeline_name}: {component}.{method} is not in the plan of the call: "
            "planning it"
        )
        call, returned = planning.meta_pipeline().trace(
            dtype_variants[component], method, args, kwargs, planning.autocast()
        )
        device = planning.device
        input_bytes = (
            round_up(max(0, device.other_bytes - device.context_bytes), MIB)
            if isinstance(device, CpuDevice)
            else max(0, live_bytes - self._reserve_bytes - planning.host.held_bytes())
        )
        # One stage that calls the component twice, so that the plan has a first and a steady slot;
        # later calls use the steady slot. Event keys: 1 is live before, 2 and 3 are the results of
        # the two calls.
        recording = Recording(
            [
                MemoryEvent(1, input_bytes),
                call,
                MemoryEvent(2, returned.nbytes),
                call,
                MemoryEvent(3, returned.nbytes),
                StageEnd(method),
            ],
            keeps_tensors=True,
        )
        solution = planning.solve(planning.problem(recording, self._reserve_bytes))
        planning.host.lay_out(solution.chosen, dtype_variants)
        planning.make_room(solution, {numbers.name for numbers in solution.problem.components})
        self._call_signatures = frozenset({self._signature(component, method, args, kwargs)})
        self.component_calls.append(f"{component}.{method}")
        return solution

    def _dtype_variants(self) -> Mapping[str, DtypeVariant]:
        dtype_variants = self._planning.host.dtype_variants
        assert dtype_variants is not None
        return dtype_variants.variants

    def _signature(
        self, component: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        planning = self._planning
        device_type = planning.device.torch_device.type
        prober = planning.meta_pipeline().prober
        return repr(prober.signature(component, method, args, kwargs, device_type))

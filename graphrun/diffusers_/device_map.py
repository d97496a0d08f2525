"""Conversion between plans and accelerate's device maps (`dispatch_model`).

A device map assigns each block to one device for the whole run. Converting a plan loses detail:

    block that the component's last stream keeps on the device   0
    streamed block                                               "cpu"; "disk" if stored there
    component that computes on a secondary device                number of that device

A plan made from a map can be checked and simulated before anything runs: whether the map fits, and
what it costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.model.plan import Stream
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.modules.build import meta_module
from graphrun.profile.engines import HOOKED, HOOKED_WHOLE, RESIDENT
from graphrun.profile.placements import WeightPlacement
from graphrun.profile.recording import DryRun
from graphrun.solve.actions import plan_of
from graphrun.solve.baselines import mapped
from graphrun.solve.programs import program_of
from graphrun.solve.rows import rows_of
from graphrun.verify.solution import solution_of

DevicePlacement = int | str
Maps = Mapping[str, Mapping[str, DevicePlacement]]


def device_maps(graph: Graph, solution: Solution) -> dict[str, dict[str, DevicePlacement]]:
    """Return {component: {path of a module or bare parameter: ``0``, ``"cpu"`` or ``"disk"``}}.
    Pass each map to ``dispatch_model(module, map, main_device=0)``. ``graph``: of ``solution``."""
    maps: dict[str, dict[str, DevicePlacement]] = {}
    for numbers in solution.components:
        streams = [
            action
            for slot in solution.plan.slots
            for action in slot.actions
            if isinstance(action, Stream) and action.component == numbers.name
        ]
        variant = numbers.variants[0]
        backing_store: DevicePlacement = "disk" if variant.backing_store == "disk" else "cpu"
        placements: dict[str, DevicePlacement] = {}
        if variant.device != "device":
            maps[numbers.name] = {"": variant.secondary or "cpu"}
            continue
        kept_blocks = dict(streams[-1].keep) if streams and streams[-1].keep is not None else None
        has_secondary_group = any(group.secondary for group in numbers.groups)
        for group in numbers.groups if kept_blocks is not None or has_secondary_group else ():
            resident = (
                range(len(group.blocks)) if kept_blocks is None else kept_blocks.get(group.name, ())
            )
            placements |= {
                path: group.secondary if index in resident else backing_store
                for index, path in enumerate(group.blocks)
                if path
            }
        module = meta_module(graph.component(numbers.name), graph.trust)
        maps[numbers.name] = (
            dict(_complete(module, "", placements)) if set(placements.values()) - {0} else {"": 0}
        )
    return maps


def maps_of(
    graph: Graph, dry_run: DryRun, placements: Mapping[str, WeightPlacement]
) -> dict[str, dict[str, DevicePlacement]]:
    """Return the device maps of ``placements`` of accelerate, as `device_maps` does."""
    maps: dict[str, dict[str, DevicePlacement]] = {}
    for name, placement in placements.items():
        if placement in (RESIDENT, HOOKED_WHOLE):
            maps[name] = {"": 0 if placement == RESIDENT else "cpu"}
            continue
        counts, paths = iter(placement.blocks), dict[str, DevicePlacement]()
        for group in dry_run.profiles[name].groups:
            if group.streamable:
                count = next(counts, 0)
                paths |= {
                    path: 0 if number < count else "cpu" for number, path in enumerate(group.blocks)
                }
        module = meta_module(graph.component(name), graph.trust)
        maps[name] = dict(_complete(module, "", paths))
    return maps


def placements_of(dry_run: DryRun, maps: Maps) -> dict[str, WeightPlacement]:
    """Return the placements of accelerate with the device maps ``maps``; none if a map splits a
    block, whose layers have no placement of their own."""
    placements = dict[str, WeightPlacement]()
    for name, device_map in maps.items():
        if not any(isinstance(place, str) for place in device_map.values()):
            placements[name] = RESIDENT
        elif set(device_map) == {""}:
            placements[name] = HOOKED_WHOLE
        else:
            groups = [group for group in dry_run.profiles[name].groups if group.streamable]
            if any(
                key.startswith(f"{path}.")
                for group in groups
                for path in group.blocks
                for key in device_map
            ):
                return {}
            counts = (
                sum(_placement_of(name, path, device_map) == 0 for path in group.blocks)
                for group in groups
            )
            placements[name] = replace(HOOKED, blocks=tuple(counts))
    return placements


def plan_for(problem: Problem, maps: Maps) -> Solution:
    """Return the plan that follows the device maps.

    A block on a device stays there from the first slot to the last; other blocks are streamed.
    Device 1 is the first secondary device. Components without a map are loaded for their phases.
    `check` and `simulate` report whether the plan fits and what it costs.

    Raises InputError for a map that omits a block, names no component of the problem, or puts part
    of a component on a device other than 0.
    """
    resident_counts: dict[str, tuple[int, ...]] = {}
    variant_numbers: dict[str, int] = {}
    for name, placements in maps.items():
        if name not in {component.name for component in problem.components}:
            component_names = ", ".join(component.name for component in problem.components)
            raise InputError(
                f"device map for {name}: there is no such component; the problem has "
                f"{component_names}"
            )
        groups = problem.component(name).groups
        group_placements = [
            [_placement_of(name, path, placements) for path in group.blocks] for group in groups
        ]
        resident_counts[name] = tuple(
            sum(not isinstance(placement, str) for placement in group) for group in group_placements
        )
        variant_numbers[name] = _device_of(
            problem, name, {placement for group in group_placements for placement in group}
        )
    program = program_of(
        problem, [(variant_numbers.get(component.name, 0),) for component in problem.components]
    )
    choice = mapped(program, resident_counts)
    plan = plan_of(program, choice, problem)
    return solution_of(problem, plan, objective_seconds=rows_of(program, choice).seconds())


def _device_of(problem: Problem, name: str, placements: set[DevicePlacement]) -> int:
    """Return the number of the component's first variant on the device of ``placements``."""
    devices = {placement for placement in placements if not isinstance(placement, str)}
    if devices <= {0}:
        return 0
    device_count = len(problem.secondaries) + 1
    if len(placements) > 1 or max(devices) >= device_count:
        device_list = ", ".join(sorted(map(str, placements)))
        raise InputError(
            f"device map for {name}: it is on {device_list}; the plan has {device_count} "
            "devices, and only on 0 may a component be in part"
        )
    device = f"device{devices.pop()}"
    return next(
        number
        for number, variant in enumerate(problem.component(name).variants)
        if variant.device == device
    )


def _placement_of(
    component: str, path: str, placements: Mapping[str, DevicePlacement]
) -> DevicePlacement:
    """Return the device of ``path``: the placement of its longest prefix in ``placements``.

    Without a prefix, the placements below ``path`` decide: a host device if any of them is one. The
    unblocked weights (path "") are on a device if any placement is. Raises InputError if the map
    does not cover ``path``.
    """
    if not path and "" not in placements:
        return next(
            (placement for placement in placements.values() if not isinstance(placement, str)),
            "cpu",
        )
    prefix = max(
        (key for key in placements if not key or path == key or path.startswith(f"{key}.")),
        key=len,
        default=None,
    )
    inner_placements = [value for key, value in placements.items() if key.startswith(f"{path}.")]
    if prefix is None and not inner_placements:
        raise InputError(f"device map for {component}: it has no entry for {path}")
    device = (
        placements[prefix]
        if prefix is not None
        else next(
            (value for value in inner_placements if isinstance(value, str)), inner_placements[0]
        )
    )
    return "cpu" if device in ("cpu", "disk", "meta") else 0 if isinstance(device, str) else device


def _complete(
    module: nn.Module, path: str, placements: Mapping[str, DevicePlacement]
) -> list[tuple[str, DevicePlacement]]:
    """Return ``placements`` with device 0 added for all other tensors: a map must name every tensor
    once, by its module or by its own path."""
    if path in placements:
        return [(path, placements[path])]
    if not any(key.startswith(f"{path}.") if path else True for key in placements):
        return [(path, 0)]
    start = f"{path}." if path else ""
    pairs: list[tuple[str, DevicePlacement]] = [
        (f"{start}{key}", 0) for key, p in module.named_parameters(recurse=False)
    ]
    pairs += [(f"{start}{key}", 0) for key, b in module.named_buffers(recurse=False)]
    return pairs + [
        pair
        for key, child in module.named_children()
        for pair in _complete(child, f"{start}{key}", placements)
    ]

"""Conversion between plans and accelerate's device maps (`dispatch_model`).

A device map assigns each block one device for good. A plan says more, and that is lost on the way
to a map:

    blocks kept on the device in the component's last stream    0 blocks streamed "cpu", or "disk"
    where the backing store is on disk component that computes on a secondary device the secondary
    device's number, for all of it

A plan made from a map can be checked and simulated: it says whether the map fits, and what it
costs, before anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.model.plan import Stream
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.modules.build import meta_module
from graphrun.solve.actions import plan_of
from graphrun.solve.baselines import mapped
from graphrun.solve.program import program_of
from graphrun.verify.solution import solution_of

Placement = int | str
Maps = Mapping[str, Mapping[str, Placement]]


def device_maps(graph: Graph, solution: Solution) -> dict[str, dict[str, Placement]]:
    """{component: {path of a module or bare parameter: ``0``, ``"cpu"`` or ``"disk"``}}.

    Each map is for ``dispatch_model(module, map, main_device=0)``. ``graph`` is the one that
    ``solution`` is for.
    """
    found: dict[str, dict[str, Placement]] = {}
    for numbers in solution.chosen.components:
        streams = [
            a
            for slot in solution.plan.slots
            for a in slot.actions
            if isinstance(a, Stream) and a.component == numbers.name
        ]
        variant = numbers.variants[0]
        backing_store: Placement = "disk" if variant.backing_store == "disk" else "cpu"
        placements: dict[str, Placement] = {}
        if variant.device != "device":
            found[numbers.name] = {"": variant.secondary or "cpu"}
            continue
        kept = dict(streams[-1].keep) if streams and streams[-1].keep is not None else None
        for group in (
            numbers.groups if kept is not None or any(of.secondary for of in numbers.groups) else ()
        ):
            resident = range(len(group.blocks)) if kept is None else kept.get(group.name, ())
            placements |= {
                path: group.secondary if index in resident else backing_store
                for index, path in enumerate(group.blocks)
                if path
            }
        module = meta_module(graph.component(numbers.name), graph.trust)
        found[numbers.name] = (
            dict(_complete(module, "", placements)) if set(placements.values()) - {0} else {"": 0}
        )
    return found


def plan_for(problem: Problem, maps: Maps) -> Solution:
    """The plan that follows the device maps: a block on a device stays from the first slot to the
    last, the others are streamed. A component on device 1 is on the first secondary device.

    Components without a map are loaded for their phases. `check` and `simulate` tell whether the
    plan fits and what it costs. Raises InputError for a map that leaves out a block, that names no
    component of the problem, or that has a component partly on another device than 0.
    """
    kept: dict[str, tuple[int, ...]] = {}
    numbers: dict[str, int] = {}  # of the variant of a component
    for name, placements in maps.items():
        if name not in {component.name for component in problem.components}:
            known = ", ".join(component.name for component in problem.components)
            raise InputError(
                f"device map for {name}: there is no such component; the problem has {known}"
            )
        groups = problem.component(name).groups
        placed = [
            [_placement_of(name, path, placements) for path in group.blocks] for group in groups
        ]
        kept[name] = tuple(sum(not isinstance(at, str) for at in of) for of in placed)
        numbers[name] = _device_of(problem, name, {at for of in placed for at in of})
    program = program_of(
        problem, [(numbers.get(component.name, 0),) for component in problem.components]
    )
    choice = mapped(program, kept)
    plan = plan_of(program, choice, problem)
    return solution_of(problem, plan, objective_seconds=program.seconds(choice))


def _device_of(problem: Problem, name: str, placements: set[Placement]) -> int:
    """The number of the first variant of the component that computes on the device of
    ``placements``."""
    devices = {at for at in placements if not isinstance(at, str)}
    if devices <= {0}:
        return 0
    known = len(problem.secondaries) + 1
    if len(placements) > 1 or max(devices) >= known:
        where = ", ".join(sorted(map(str, placements)))
        raise InputError(
            f"device map for {name}: it is on {where}; the plan has {known} devices, and only on 0 may a component be in part"
        )
    device = f"device{devices.pop()}"
    return next(
        n for n, variant in enumerate(problem.component(name).variants) if variant.device == device
    )


def _placement_of(component: str, path: str, placements: Mapping[str, Placement]) -> Placement:
    """The device of ``path``: that of its longest prefix in ``placements``.

    Without one it is read from the entries below ``path``: a host device if any of them has one.
    The remainder block (path "") is on a device if any entry is. Raises InputError where the map
    does not cover ``path``.
    """
    if not path and "" not in placements:
        return next(
            (placement for placement in placements.values() if not isinstance(placement, str)),
            "cpu",
        )
    best = max(
        (key for key in placements if not key or path == key or path.startswith(f"{key}.")),
        key=len,
        default=None,
    )
    inside = [placement for key, placement in placements.items() if key.startswith(f"{path}.")]
    if best is None and not inside:
        raise InputError(f"device map for {component}: it has no entry for {path}")
    found = (
        placements[best]
        if best is not None
        else next((placement for placement in inside if isinstance(placement, str)), inside[0])
    )
    return "cpu" if found in ("cpu", "disk", "meta") else 0 if isinstance(found, str) else found


def _complete(
    module: nn.Module, path: str, placements: Mapping[str, Placement]
) -> list[tuple[str, Placement]]:
    """``placements`` completed with device 0 for everything else: a map must name every tensor
    once, by its module or itself."""
    if path in placements:
        return [(path, placements[path])]
    if not any(key.startswith(f"{path}.") if path else True for key in placements):
        return [(path, 0)]
    start = f"{path}." if path else ""
    own: list[tuple[str, Placement]] = [
        (f"{start}{key}", 0) for key, p in module.named_parameters(recurse=False)
    ]
    own += [(f"{start}{key}", 0) for key, b in module.named_buffers(recurse=False)]
    return own + [
        entry
        for key, child in module.named_children()
        for entry in _complete(child, f"{start}{key}", placements)
    ]

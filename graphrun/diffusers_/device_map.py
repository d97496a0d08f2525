"""Plans as accelerate's device maps (`dispatch_model`), and device maps as plans: what they would take can be said before they run.

Decides which block a map puts where. A map says one place for each block, for good; a plan says more, which is lost:

    kept on the device in the component's longest phase      0
    streamed                                                 "cpu", or "disk" where its backing store is there
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.model.choices import apply_choices
from graphrun.model.plan import Plan, Stream
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.modules.build import meta_module
from graphrun.solve.actions import plan_of
from graphrun.solve.baselines import mapped
from graphrun.solve.program import program_of

Place = int | str
Maps = Mapping[str, Mapping[str, Place]]


def device_maps(graph: Graph, problem: Problem, plan: Plan) -> dict[str, dict[str, Place]]:
    """For each component its map: paths of modules and bare parameters to ``0``, ``"cpu"`` or ``"disk"``, for
    ``dispatch_model(module, map, main_device=0)``. ``graph`` is the one that ``plan`` was made for."""
    found: dict[str, dict[str, Place]] = {}
    for numbers in apply_choices(problem, plan).components:
        streams = [a for slot in plan.slots for a in slot.actions if isinstance(a, Stream) and a.component == numbers.name]
        variant = numbers.variants[0]
        backing_store: Place = "disk" if variant.backing_store == "disk" else "cpu"
        places: dict[str, Place] = {}
        if variant.device == "cpu":
            found[numbers.name] = {"": "cpu"}
            continue
        if streams and streams[-1].keep is not None:
            kept = dict(streams[-1].keep)
            for k in numbers.groups:
                stay = set(kept.get(k.name, ()))
                places |= {path: 0 if index in stay else backing_store for index, path in enumerate(k.blocks) if path}
        module = meta_module(graph.component(numbers.name), graph.trust)
        found[numbers.name] = dict(_covered(module, "", places)) if set(places.values()) - {0} else {"": 0}
    return found


def plan_for(problem: Problem, maps: Maps) -> Solution:
    """The plan that does with each component of ``maps`` what its device map says: blocks on a device stay from the first slot to
    the last, the others pass. Components without a map are loaded for their phases. `check` and `simulate` say whether it fits, and
    what it takes. Raises InputError for a map that says nothing of a block, or of no component."""
    kept: dict[str, tuple[int, ...]] = {}
    for name, places in maps.items():
        if name not in {component.name for component in problem.components}:
            known = ", ".join(component.name for component in problem.components)
            raise InputError(f"device map for {name}: there is no such component; the problem has {known}")
        groups = problem.component(name).groups
        kept[name] = tuple(sum(not isinstance(_place(name, path, places), str) for path in k.blocks) for k in groups)
    program = program_of(problem, [(0,)] * len(problem.components))
    choice = mapped(program, kept)
    plan = plan_of(program, choice, problem)
    seconds = program.seconds(choice)
    again = sum(program.slot_seconds(choice)[program.run_length :])
    return Solution(problem, plan, False, 0.0, seconds, 1.0, again)


def _place(component: str, path: str, places: Mapping[str, Place]) -> Place:
    """Where ``path`` is: the longest of its prefixes in ``places`` says it. The rest ("") is where most of its parts are."""
    if not path and "" not in places:
        return next((place for place in places.values() if not isinstance(place, str)), "cpu")
    best = max((key for key in places if not key or path == key or path.startswith(f"{key}.")), key=len, default=None)
    inside = [place for key, place in places.items() if key.startswith(f"{path}.")]
    if best is None and not inside:
        raise InputError(f"device map for {component}: it says nothing of {path}")
    found = places[best] if best is not None else next((place for place in inside if isinstance(place, str)), inside[0])
    return "cpu" if found in ("cpu", "disk", "meta") else 0 if isinstance(found, str) else found


def _covered(module: nn.Module, path: str, places: Mapping[str, Place]) -> list[tuple[str, Place]]:
    """``places`` with everything beside them on the device: a map must name every tensor once, by its module or itself."""
    if path in places:
        return [(path, places[path])]
    if not any(key.startswith(f"{path}.") if path else True for key in places):
        return [(path, 0)]
    start = f"{path}." if path else ""
    own: list[tuple[str, Place]] = [(f"{start}{key}", 0) for key, p in module.named_parameters(recurse=False)]
    own += [(f"{start}{key}", 0) for key, b in module.named_buffers(recurse=False)]
    return own + [entry for key, child in module.named_children() for entry in _covered(child, f"{start}{key}", places)]

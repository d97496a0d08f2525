"""One component over two devices: an interval of its blocks computes on a helper, everything else of it on the device. Pure.

    call       | remainder |  block 0  |  block 1  |  block 2  |  block 3  | remainder |
    device     |###########|###########|           |           |###########|###########|
    device1                > crosses   |###########|###########| crosses >

The blocks of the interval form groups of their own, ``NAME@1`` on the first helper. They are not streamed. Which components can be
split, and how many blocks of each group go where, is for the solver to decide; where in a group these are is fixed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphrun.errors import PlanError
from graphrun.model.plan import Blocks, Split
from graphrun.model.problem import BlockGroup, ComponentNumbers, Problem, Use, Variant


def helpers_for(problem: Problem, component: ComponentNumbers) -> tuple[int, ...]:
    """Numbers of the helpers over which ``component`` may be split: of the largest component whose blocks run one after another in
    every call (`Use.hops`), where no directive says how it is placed."""
    phases = (*problem.phases, *(phase for option in problem.options for phase in option.phases))
    uses = [use for phase in phases for use in phase.uses]
    able = [of for of in problem.components if all(use.hops for use in uses if use.component == of.name)]
    if not able or component != max(able, key=lambda of: of.weight_bytes()) or problem.demanded(component.name):
        return ()
    if any(group.helper for of in problem.components for group in of.groups):
        return ()
    numbers = range(1, len(problem.helpers) + 1)
    return tuple(n for n in numbers if any(twin(component, variant, n) for variant in component.variants))


def twin(component: ComponentNumbers, variant: Variant, helper: int) -> Variant | None:
    """The variant of ``component`` that is ``variant`` on ``helper``; None where it may not be split. One that is copied from disk
    each time may not, since its bounce buffer serves one device."""
    if variant.device != "device" or variant.backing_store == "disk":
        return None
    name = f"{variant.precision} {variant.backing_store} device{helper}"
    return next((of for of in component.variants if of.name == name), None)


def slowdown_of(component: ComponentNumbers, helper: int) -> float:
    """Factor on the compute seconds of a block that computes on ``helper``."""
    pairs = ((variant, twin(component, variant, helper)) for variant in component.variants)
    return next(there.slowdown / here.slowdown for here, there in pairs if there is not None)


def in_a_row(component: ComponentNumbers, counts: Mapping[int, int]) -> Blocks:
    """The blocks of an interval with ``counts`` blocks of each group: the last ones of its first group, else the first ones."""
    touched = [k for k, count in sorted(counts.items()) if count]
    found = []
    for k in touched:
        every = range(len(component.groups[k].blocks))
        found.append((component.groups[k].name, tuple(every[-counts[k] :] if k == touched[0] else every[: counts[k]])))
    return tuple(found)


def crossings(use: Use, component: ComponentNumbers) -> dict[int, tuple[int, int]]:
    """By helper: bytes that cross to it and back in one call of ``component``, which has its variant chosen."""
    if helper := component.variants[0].helper:
        to, back = use.crossing or (0, 0)
        return {helper: (to, back)}
    numbers = sorted({group.helper for group in component.groups if group.helper})
    hops = {n: [hop for hop, group in zip(use.hops, component.groups, strict=True) if group.helper == n] for n in numbers}
    return {n: (max(to for to, _ in own), max(back for _, back in own)) for n, own in hops.items()}


def with_splits(problem: Problem, splits: Sequence[Split]) -> Problem:
    """``problem`` with the blocks of ``splits`` on their helpers. Raises PlanError for a split that cannot be."""
    if len({name for name, _, _ in splits}) < len(splits):
        raise PlanError("split: a component is split twice")
    for name, helper, blocks in splits:
        problem = _split(problem, name, helper, blocks)
    return problem


def _split(problem: Problem, name: str, helper: int, blocks: Blocks) -> Problem:
    component = next((of for of in problem.components if of.name == name), None)
    if component is None or helper not in helpers_for(problem, component):
        raise PlanError(f"split: {name} cannot be split over device{helper}")
    moved = _moved(component, blocks)
    groups, sources, places = list[BlockGroup](), list[tuple[int, bool]](), dict[tuple[int, int], tuple[int, int]]()
    for away in (False, True):
        for k, of in enumerate(component.groups):
            own = [i for i in range(len(of.blocks)) if (i in moved.get(k, ())) == away]
            if own:
                places |= {(k, i): (len(groups), n) for n, i in enumerate(own)}
                paths = tuple(of.blocks[i] for i in own)
                groups.append(BlockGroup(f"{of.name}@{helper}", paths, False, helper) if away else replace(of, blocks=paths))
                sources.append((k, away))
    pairs = [(variant, other) for variant in component.variants if (other := twin(component, variant, helper)) is not None]
    variants = tuple(_variant(variant, other, sources) for variant, other in pairs)
    slowdown = slowdown_of(component, helper)
    there = replace(component, groups=tuple(groups), variants=variants, layers=None)

    def used(use: Use) -> Use:
        if use.component != name:
            return use
        return replace(
            use,
            group_calls=tuple(use.group_calls[k] for k, _ in sources),
            seconds=tuple(use.seconds[k] * (slowdown if away else 1.0) for k, away in sources),
            order=tuple(
                (*places[k, i], seconds * (slowdown if i in moved.get(k, ()) else 1.0))
                for k, i, seconds in _unbroken(use, component, moved)
            ),
            passes=tuple(use.passes[k] for k, _ in sources) if use.passes else (),
            hops=tuple(use.hops[k] for k, _ in sources),
            layers=None,
        )

    return replace(
        problem,
        components=tuple(there if of.name == name else of for of in problem.components),
        phases=tuple(replace(phase, uses=tuple(map(used, phase.uses))) for phase in problem.phases),
        options=tuple(
            replace(option, phases=tuple(replace(phase, uses=tuple(map(used, phase.uses))) for phase in option.phases))
            for option in problem.options
        ),
    )


def _unbroken(use: Use, component: ComponentNumbers, moved: Mapping[int, Sequence[int]]) -> list[tuple[int, int, float]]:
    """`Use.order`, or group by group, without entries of no compute between the blocks that move."""
    groups = enumerate(component.groups)
    order = use.order or [(k, i, use.seconds[k]) for k, of in groups for i in range(len(of.blocks))]
    away = [n for n, (k, i, _) in enumerate(order) if i in moved.get(k, ())]
    return [
        (k, i, seconds) for n, (k, i, seconds) in enumerate(order) if not away[0] < n < away[-1] or seconds or i in moved.get(k, ())
    ]


def _moved(component: ComponentNumbers, blocks: Blocks) -> dict[int, tuple[int, ...]]:
    """Indices of ``blocks`` by group. Raises PlanError where they are not blocks in a row."""
    number = {of.name: k for k, of in enumerate(component.groups) if "" not in of.blocks}
    moved = {number[name]: indices for name, indices in blocks or () if name in number and indices}
    order = [(k, i) for k in number.values() for i in range(len(component.groups[k].blocks))]
    chosen = [(k, i) for k, indices in sorted(moved.items()) for i in indices]
    begin = order.index(chosen[0]) if chosen and chosen[0] in order else -1
    if begin < 0 or len(moved) < len(blocks or ()) or order[begin : begin + len(chosen)] != chosen:
        raise PlanError(f"split: {component.name} is split at blocks that are not in a row, or that it does not have")
    return moved


def _variant(here: Variant, there: Variant, sources: Iterable[tuple[int, bool]]) -> Variant:
    """``here`` with the numbers of ``there`` for the groups on the helper."""
    pairs = [(there if away else here, k) for k, away in sources]
    each: dict[str, Any] = {
        field: tuple(getattr(of, field)[k] for of, k in pairs) if getattr(here, field) else ()
        for field in ("block_bytes", "load_seconds", "read_seconds", "disk_seconds", "block_seconds", "read_bytes")
    }
    return replace(here, **each)


def splits_of(of: Problem, split: Problem) -> tuple[Split, ...]:
    """The splits that make ``split`` from ``of``."""
    found = []
    for component in split.components:
        helper = max((group.helper for group in component.groups), default=0)
        if helper:
            paths = {path for group in component.groups if group.helper for path in group.blocks}
            whole = of.component(component.name).groups
            groups = [(group.name, tuple(i for i, path in enumerate(group.blocks) if path in paths)) for group in whole]
            found.append((component.name, helper, tuple(named for named in groups if named[1])))
    return tuple(found)


def computing_on(problem: Problem, helper: int) -> list[str]:
    """What computes on ``helper``: names of components, with the number of blocks where it is part of one. ``problem``: with a
    plan's choices applied."""
    found = []
    for component in problem.components:
        blocks = sum(len(group.blocks) for group in component.groups if group.helper == helper)
        every = sum(len(group.blocks) for group in component.groups)
        if component.variants[0].helper == helper or blocks:
            found.append(f"{component.name} ({blocks} of {every} blocks)" if blocks else component.name)
    return found

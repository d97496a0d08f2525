"""One component over several devices: an interval of its blocks computes on each of some helpers, the others on the device. Pure.

    call       | remainder |  block 0  |  block 1  |  block 2  |  block 3  | remainder |
    device     |###########|###########|           |           |###########|###########|
    device1                > crosses   |###########|###########| crosses >

The blocks of an interval form groups of their own, ``NAME@1`` on the first helper. They are not streamed. Which components can be
split, and how many blocks of each group go where, is for the solver to decide; where in a group these are is fixed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from graphrun.errors import PlanError
from graphrun.model.plan import Blocks, Split
from graphrun.model.problem import BlockGroup, ComponentNumbers, Problem, Use, Variant


def helpers_for(problem: Problem, component: ComponentNumbers) -> tuple[int, ...]:
    """Numbers of the helpers over which ``component`` may be split: of the largest component whose blocks run one after another in
    every call (`Use.hops`), where no directive demands that they leave the device."""
    phases = (*problem.phases, *(phase for option in problem.options for phase in option.phases))
    uses = [use for phase in phases for use in phase.uses]
    able = [of for of in problem.components if all(use.hops for use in uses if use.component == of.name)]
    if not able or component != max(able, key=lambda of: of.weight_bytes()):
        return ()
    if problem.demanded(component.name) & {"exclude", "drop"}:
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


def in_a_row(component: ComponentNumbers, counts: Mapping[int, Mapping[int, int]]) -> dict[int, Blocks]:
    """By helper, the blocks of its interval, of which ``counts[helper]`` has the number of each group. They are the first ones of
    a group if the interval began before it, else the last ones: those of the interval that goes on in the next group at the end,
    before them intervals within the group, by helper."""
    touched = {helper: sorted(k for k, count in own.items() if count) for helper, own in counts.items()}
    found = {helper: list[tuple[str, tuple[int, ...]]]() for helper in touched if touched[helper]}
    for k, group in enumerate(component.groups):
        stop = len(group.blocks)
        last = [helper for helper, own in touched.items() if own and own[0] == k]
        taken = {}
        for helper in sorted(last, key=lambda helper: (touched[helper][-1] == k, -helper)):
            taken[helper] = range(stop - counts[helper][k], stop)
            stop -= counts[helper][k]
        for helper, own in touched.items():
            if k in own:
                found[helper].append((group.name, tuple(taken.get(helper, range(counts[helper][k])))))
    return {helper: tuple(own) for helper, own in sorted(found.items())}


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
    found: dict[str, dict[int, Blocks]] = {}
    for name, helper, blocks in splits:
        if helper in found.setdefault(name, {}):
            raise PlanError(f"split: {name} is split twice over device{helper}")
        found[name][helper] = blocks
    for name, of in found.items():
        problem = _split(problem, name, of)
    return problem


def _split(problem: Problem, name: str, splits: Mapping[int, Blocks]) -> Problem:
    component = next((of for of in problem.components if of.name == name), None)
    helpers = helpers_for(problem, component) if component is not None else ()
    if component is None or not set(splits) <= set(helpers):
        raise PlanError(f"split: {name} cannot be split over device{min(set(splits) - set(helpers))}")
    moved = _moved(component, splits)
    groups, sources, places = list[BlockGroup](), list[tuple[int, int]](), dict[tuple[int, int], tuple[int, int]]()
    for helper in (0, *sorted(splits)):
        for k, of in enumerate(component.groups):
            own = [i for i in range(len(of.blocks)) if moved.get((k, i), 0) == helper]
            if own:
                places |= {(k, i): (len(groups), n) for n, i in enumerate(own)}
                paths = tuple(of.blocks[i] for i in own)
                groups.append(BlockGroup(f"{of.name}@{helper}", paths, False, helper) if helper else replace(of, blocks=paths))
                sources.append((k, helper))
    twins = [[variant, *(twin(component, variant, helper) for helper in sorted(splits))] for variant in component.variants]
    able = [[of for of in each if of is not None] for each in twins if None not in each]
    variants = tuple(_variant({of.helper: of for of in each}, sources) for each in able)
    slowdowns = {0: 1.0} | {helper: slowdown_of(component, helper) for helper in splits}
    there = replace(component, groups=tuple(groups), variants=variants, layers=None)

    def used(use: Use) -> Use:
        if use.component != name:
            return use
        return replace(
            use,
            group_calls=tuple(use.group_calls[k] for k, _ in sources),
            seconds=tuple(use.seconds[k] * slowdowns[helper] for k, helper in sources),
            order=tuple(
                (*places[k, i], seconds * slowdowns[moved.get((k, i), 0)]) for k, i, seconds in _unbroken(use, component, moved)
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


def _unbroken(use: Use, component: ComponentNumbers, moved: Mapping[tuple[int, int], int]) -> list[tuple[int, int, float]]:
    """`Use.order`, or group by group, without entries of no compute between the blocks of an interval."""
    groups = enumerate(component.groups)
    order = use.order or [(k, i, use.seconds[k]) for k, of in groups for i in range(len(of.blocks))]
    away = [(n, moved[k, i]) for n, (k, i, _) in enumerate(order) if (k, i) in moved]
    inside = {n for (a, one), (b, other) in pairwise(away) if one == other for n in range(a + 1, b)}
    return [entry for n, entry in enumerate(order) if n not in inside or entry[2]]


def _moved(component: ComponentNumbers, splits: Mapping[int, Blocks]) -> dict[tuple[int, int], int]:
    """The helper of each block that computes on one, by (group, index). Raises PlanError where these are not blocks in a row."""
    number = {of.name: k for k, of in enumerate(component.groups) if "" not in of.blocks}
    order = [(k, i) for k in number.values() for i in range(len(component.groups[k].blocks))]
    moved: dict[tuple[int, int], int] = {}
    for helper, blocks in splits.items():
        chosen = sorted((number[name], i) for name, indices in blocks or () if name in number for i in indices)
        begin = order.index(chosen[0]) if chosen and chosen[0] in order else -1
        if begin < 0 or len({k for k, _ in chosen}) < len(blocks or ()) or order[begin : begin + len(chosen)] != chosen:
            raise PlanError(f"split: {component.name} is split at blocks that are not in a row, or that it does not have")
        if moved.keys() & set(chosen):
            raise PlanError(f"split: {component.name} has blocks that are to compute on two devices")
        moved |= dict.fromkeys(chosen, helper)
    return moved


def _variant(by_helper: Mapping[int, Variant], sources: Iterable[tuple[int, int]]) -> Variant:
    """The variant ``by_helper[0]`` with the numbers of the others for the groups on their helpers."""
    here, pairs = by_helper[0], [(by_helper[helper], k) for k, helper in sources]
    each: dict[str, Any] = {
        field: tuple(getattr(of, field)[k] for of, k in pairs) if getattr(here, field) else ()
        for field in ("block_bytes", "load_seconds", "read_seconds", "disk_seconds", "block_seconds", "read_bytes")
    }
    return replace(here, **each)


def splits_of(of: Problem, split: Problem) -> tuple[Split, ...]:
    """The splits that make ``split`` from ``of``."""
    found = []
    for component in split.components:
        whole = of.component(component.name).groups
        for helper in sorted({group.helper for group in component.groups} - {group.helper for group in whole}):
            paths = {path for group in component.groups if group.helper == helper for path in group.blocks}
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

"""One component over several devices: an interval of its blocks computes on each of some secondary
devices, the others on the device. Pure.

    call       | remainder |  block 0  |  block 1  |  block 2  | remainder |  block 3  | remainder |
    device     |###########|###########|           |           |###########|###########|###########|
    device1                > crosses   |###########|###########| crosses >

The blocks of an interval form groups of their own, ``NAME@1`` on the first secondary device. They
are not streamed. Which components can be split, and how many blocks of each segment go where, is
for the solver to decide; where in a segment these are is fixed here.

What crosses follows from `Use.live_tensors`: a tensor that blocks on a secondary device get crosses
to it once a call, unless a block there made it; one that a block there makes crosses back where
anything else may read it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from graphrun.errors import PlanError
from graphrun.model.plan import Blocks, Split
from graphrun.model.problem import (
    ALLOCATION_BYTES,
    BlockGroup,
    ComponentNumbers,
    LiveTensor,
    Problem,
    Use,
    Variant,
)
from graphrun.units import round_up


def secondaries_for(problem: Problem, component: ComponentNumbers) -> tuple[int, ...]:
    """Numbers of the secondary devices over which ``component`` may be split: of the largest
    component whose blocks all run in every call (`Use.live_tensors`), where no directive demands
    that they leave the device."""
    uses = _uses(problem)
    able = [
        of
        for of in problem.components
        if all(use.live_tensors for use in uses if use.component == of.name)
    ]
    if not able or component != max(able, key=lambda of: of.weight_bytes()):
        return ()
    if problem.demanded(component.name) & {"exclude", "drop"}:
        return ()
    if any(group.secondary for of in problem.components for group in of.groups):
        return ()
    numbers = range(1, len(problem.secondaries) + 1)
    return tuple(
        n for n in numbers if any(twin(component, variant, n) for variant in component.variants)
    )


def twin(component: ComponentNumbers, variant: Variant, secondary: int) -> Variant | None:
    """The variant of ``component`` that is ``variant`` on ``secondary``; None where it may not be
    split. One that is copied from disk each time may not, since its bounce buffer serves one
    device."""
    if variant.device != "device" or variant.backing_store == "disk":
        return None
    name = f"{variant.precision} {variant.backing_store} device{secondary}"
    return next((of for of in component.variants if of.name == name), None)


def _uses(problem: Problem) -> list[Use]:
    phases = (*problem.phases, *(phase for option in problem.options for phase in option.phases))
    return [use for phase in phases for use in phase.uses]


def slowdown_of(component: ComponentNumbers, secondary: int) -> float:
    """Factor on the compute seconds of a block that computes on ``secondary``."""
    pairs = ((variant, twin(component, variant, secondary)) for variant in component.variants)
    return next(there.slowdown / here.slowdown for here, there in pairs if there is not None)


class Segment(NamedTuple):
    """Blocks ``start`` to ``stop`` (half-open) of group ``group``, for each of which the same
    crosses: see `segments_of`."""

    group: int
    start: int
    stop: int


def segments_of(problem: Problem, component: ComponentNumbers) -> list[Segment]:
    """The blocks of ``component`` in call order. Wherever in a segment an interval begins or ends,
    as many bytes cross in as many tensors: a block gets what the one before it made, and what all
    of them get."""
    uses = [_Tensors(use.live_tensors) for use in _uses(problem) if use.component == component.name]
    number, found = 0, list[Segment]()
    for k, group in enumerate(component.groups):
        for i in range(len(group.blocks) if "" not in group.blocks else 0):
            number += 1
            if i and all(of.alike(number - 1) for of in uses):
                found[-1] = found[-1]._replace(stop=i + 1)
            else:
                found.append(Segment(k, i, i + 1))
    return found


class _Tensors:
    """The tensors of a use by block: ``made`` and ``got`` have their places in ``rows`` by number
    of the block."""

    def __init__(self, rows: Sequence[LiveTensor]) -> None:
        self.rows, self.arguments = rows, block_arguments(rows)
        self.made, self.got = (defaultdict[int, set[int]](set) for _ in range(2))
        for place, row in enumerate(rows):
            self.made[row.maker].add(place)
            for n in row.users:
                self.got[n].add(place)

    def alike(self, n: int) -> bool:
        """Whether blocks n and n + 1 may be in one segment."""
        made, then = ([self.rows[place] for place in self.made[of]] for of in (n, n + 1))
        entering = [
            self.rows[of] for of in self.got[n] if self.rows[of].maker or of not in self.got[n + 1]
        ]
        later = [of for of in self.got[n + 1] if self.rows[of].maker != n]
        return (
            self.arguments[n] == self.arguments[n + 1]
            and all(row.users == (n + 1,) for row in made)
            and all(row.users in ((n,), (0, n)) for row in entering)
            and all(of in self.got[n] and not self.rows[of].maker for of in later)
            and sorted(row.nbytes for row in made)
            == sorted(row.nbytes for row in entering)
            == sorted(row.nbytes for row in then)
        )


def in_a_row(
    component: ComponentNumbers,
    segments: Sequence[Segment],
    counts: Mapping[int, Mapping[int, int]],
) -> dict[int, Blocks]:
    """By secondary device, the blocks of its interval, of which ``counts[secondary]`` has the
    number of each of ``segments``. They are the first ones of a segment if the interval began
    before it, else the last ones: those of the interval that goes on in the next one at the end,
    before them intervals within the segment, by secondary device."""
    touched = {
        secondary: sorted(k for k, count in own.items() if count)
        for secondary, own in counts.items()
    }
    found = {secondary: dict[str, tuple[int, ...]]() for secondary in touched if touched[secondary]}
    for k, segment in enumerate(segments):
        stop, name = segment.stop, component.groups[segment.group].name
        last = [secondary for secondary, own in touched.items() if own and own[0] == k]
        taken = {}
        for secondary in sorted(
            last, key=lambda secondary: (touched[secondary][-1] == k, -secondary)
        ):
            taken[secondary] = range(stop - counts[secondary][k], stop)
            stop -= counts[secondary][k]
        for secondary, own in touched.items():
            if k in own:
                more = taken.get(
                    secondary, range(segment.start, segment.start + counts[secondary][k])
                )
                found[secondary][name] = (*found[secondary].get(name, ()), *more)
    return {secondary: tuple(own.items()) for secondary, own in sorted(found.items())}


class Transfer(NamedTuple):
    """Tensors that cross to ``secondary`` before a block there computes, and back after it; bytes
    of each. ``stay``: of those that the block makes, numbers of the ones that only blocks there
    get."""

    secondary: int
    to: tuple[int, ...]
    back: tuple[int, ...]
    stay: frozenset[int]


def transfers(use: Use, component: ComponentNumbers) -> dict[tuple[int, int], Transfer]:
    """What crosses in one call of ``component``, which has its variant chosen, at each block on a
    secondary device, by (group, block)."""
    secondary_of = [group.secondary for group in component.groups]
    if component.variants[0].secondary or not any(secondary_of) or not use.live_tensors:
        return {}
    order = _blocks_in_order(use, component)
    on = {0: 0} | {n: secondary_of[k] for n, (k, _) in enumerate(order, 1)}
    to, back, stay = (defaultdict[int, list[int]](list) for _ in range(3))
    makes = Counter[int]()
    for row in use.live_tensors:
        first = dict[int, int]()  # by secondary device, the first block there that gets it
        for n in row.users:
            first.setdefault(on[n], n)
        for secondary, n in first.items():
            if secondary not in (0, on[row.maker]):
                to[n].append(row.nbytes)
        if row.maker:
            if first.keys() == {on[row.maker]}:
                stay[row.maker].append(makes[row.maker])
            else:
                back[row.maker].append(row.nbytes)
            makes[row.maker] += 1
    return {
        at: Transfer(on[n], tuple(to[n]), tuple(back[n]), frozenset(stay[n]))
        for n, at in enumerate(order, 1)
        if on[n]
    }


def _blocks_in_order(use: Use, component: ComponentNumbers) -> list[tuple[int, int]]:
    """(group, block) of each block of ``component``, without the remainder, in call order."""
    blocks = {k for k, of in enumerate(component.groups) if "" not in of.blocks}
    return list(dict.fromkeys((k, i) for k, i, _ in use.order if k in blocks))


def transfer_seconds(problem: Problem, use: Use, component: ComponentNumbers) -> dict[int, float]:
    """By secondary device: seconds in which what one call of ``component``, which has its variant
    chosen, needs crosses to it and back."""
    if secondary := component.variants[0].secondary:
        return {secondary: sum(problem.transfer_seconds(secondary, use.transfer))}
    found = defaultdict[int, float](float)
    for of in transfers(use, component).values():
        found[of.secondary] += sum(problem.tensors_cross_seconds(of.secondary, of.to, of.back))
    return dict(found)


def arguments_bytes(use: Use, component: ComponentNumbers) -> dict[int, int]:
    """By secondary device: bytes there beyond weights and activation as traced while ``component``,
    which has its variant chosen, computes: of what crosses to it, or the most for any of its blocks
    there."""
    if secondary := component.variants[0].secondary:
        return {secondary: (use.transfer or (0,))[0]}
    found = dict[int, int]()
    order = _blocks_in_order(use, component)
    for (k, _), nbytes in zip(order, block_arguments(use.live_tensors)[1:], strict=False):
        if secondary := component.groups[k].secondary:
            found[secondary] = max(found.get(secondary, 0), nbytes)
    return found


def block_arguments(rows: Sequence[LiveTensor]) -> list[int]:
    """By number of the block (`LiveTensor`): bytes of what it gets, and of what was given to the
    call and earlier blocks got. Other tensors are part of the activation as traced."""
    count = 1 + max((n for row in rows for n in (row.maker, *row.users)), default=0)
    found, given = [0] * count, [0] * count  # bytes at a block; bytes from a block on
    for row in rows:
        users = [n for n in row.users if n]
        for n in users[:1] if row.given else users:
            (given if row.given else found)[n] += round_up(row.nbytes, ALLOCATION_BYTES)
    return [nbytes + before for nbytes, before in zip(found, accumulate(given), strict=True)]


def block_seconds(use: Use, component: ComponentNumbers) -> list[float]:
    """For each group, seconds of one of its blocks in one call, without compute of the remainder
    that `Use.seconds` has there."""
    found = [0.0] * len(component.groups)
    for k, _, seconds in use.order:
        found[k] += seconds / len(component.groups[k].blocks)
    return found if use.order else list(use.seconds)


def with_splits(problem: Problem, splits: Sequence[Split]) -> Problem:
    """``problem`` with the blocks of ``splits`` on their secondary devices. Raises PlanError for a
    split that cannot be."""
    found: dict[str, dict[int, Blocks]] = {}
    for name, secondary, blocks in splits:
        if secondary in found.setdefault(name, {}):
            raise PlanError(f"split: {name} is split twice over device{secondary}")
        found[name][secondary] = blocks
    for name, of in found.items():
        problem = _split(problem, name, of)
    return problem


def _split(problem: Problem, name: str, splits: Mapping[int, Blocks]) -> Problem:
    component = next((of for of in problem.components if of.name == name), None)
    secondaries = secondaries_for(problem, component) if component is not None else ()
    if component is None or not set(splits) <= set(secondaries):
        raise PlanError(
            f"split: {name} cannot be split over device{min(set(splits) - set(secondaries))}"
        )
    moved = _moved(component, splits)
    groups, sources, places = (
        list[BlockGroup](),
        list[tuple[int, int]](),
        dict[tuple[int, int], tuple[int, int]](),
    )
    for secondary in (0, *sorted(splits)):
        for k, of in enumerate(component.groups):
            own = [i for i in range(len(of.blocks)) if moved.get((k, i), 0) == secondary]
            if own:
                places |= {(k, i): (len(groups), n) for n, i in enumerate(own)}
                paths = tuple(of.blocks[i] for i in own)
                groups.append(
                    BlockGroup(f"{of.name}@{secondary}", paths, False, secondary)
                    if secondary
                    else replace(of, blocks=paths)
                )
                sources.append((k, secondary))
    twins = [
        [variant, *(twin(component, variant, secondary) for secondary in sorted(splits))]
        for variant in component.variants
    ]
    able = [[of for of in each if of is not None] for each in twins if None not in each]
    variants = tuple(_variant({of.secondary: of for of in each}, sources) for each in able)
    slowdowns = {0: 1.0} | {secondary: slowdown_of(component, secondary) for secondary in splits}
    there = replace(component, groups=tuple(groups), variants=variants, layers=None)

    def used(use: Use) -> Use:
        if use.component != name:
            return use
        order = use.order or [
            (k, i, use.seconds[k])
            for k, of in enumerate(component.groups)
            for i in range(len(of.blocks))
        ]
        return replace(
            use,
            group_calls=tuple(use.group_calls[k] for k, _ in sources),
            seconds=tuple(_seconds(use, component, moved, sources, slowdowns)),
            order=tuple(
                (*places[k, i], seconds * slowdowns[moved.get((k, i), 0)])
                for k, i, seconds in order
            ),
            passes=tuple(use.passes[k] for k, _ in sources) if use.passes else (),
            layers=None,
        )

    return replace(
        problem,
        components=tuple(there if of.name == name else of for of in problem.components),
        phases=tuple(replace(phase, uses=tuple(map(used, phase.uses))) for phase in problem.phases),
        options=tuple(
            replace(
                option,
                phases=tuple(
                    replace(phase, uses=tuple(map(used, phase.uses))) for phase in option.phases
                ),
            )
            for option in problem.options
        ),
    )


def _seconds(
    use: Use,
    component: ComponentNumbers,
    moved: Mapping[tuple[int, int], int],
    sources: Sequence[tuple[int, int]],
    slowdowns: Mapping[int, float],
) -> Iterator[float]:
    """`Use.seconds` of the groups ``sources``. The remainder's compute that counts for a group
    stays with its blocks on the device, or where none is left, with the first group."""
    own, away = block_seconds(use, component), Counter(k for k, _ in moved)
    more = [
        len(of.blocks) * (use.seconds[k] - own[k]) if away[k] else 0.0
        for k, of in enumerate(component.groups)
    ]
    left = sum(of for k, of in enumerate(more) if (k, 0) not in sources)
    for k, secondary in sources:
        count = len(component.groups[k].blocks) - away[k]
        if secondary or not away[k]:
            yield (
                own[k] * slowdowns[secondary]
                if secondary
                else use.seconds[k] + left * (k == 0) / len(component.groups[k].blocks)
            )
        else:
            yield own[k] + more[k] / count


def _moved(component: ComponentNumbers, splits: Mapping[int, Blocks]) -> dict[tuple[int, int], int]:
    """The secondary device of each block that computes on one, by (group, index). Raises PlanError
    where these are not blocks in a row."""
    number = {of.name: k for k, of in enumerate(component.groups) if "" not in of.blocks}
    order = [(k, i) for k in number.values() for i in range(len(component.groups[k].blocks))]
    moved: dict[tuple[int, int], int] = {}
    for secondary, blocks in splits.items():
        chosen = sorted(
            (number[name], i) for name, indices in blocks or () if name in number for i in indices
        )
        begin = order.index(chosen[0]) if chosen and chosen[0] in order else -1
        if (
            begin < 0
            or len({k for k, _ in chosen}) < len(blocks or ())
            or order[begin : begin + len(chosen)] != chosen
        ):
            raise PlanError(
                f"split: {component.name} is split at blocks that are not in a row, or that it does not have"
            )
        if moved.keys() & set(chosen):
            raise PlanError(
                f"split: {component.name} has blocks that are to compute on two devices"
            )
        moved |= dict.fromkeys(chosen, secondary)
    return moved


def _variant(by_secondary: Mapping[int, Variant], sources: Iterable[tuple[int, int]]) -> Variant:
    """The variant ``by_secondary[0]`` with the numbers of the others for the groups on their
    secondary devices."""
    here, pairs = by_secondary[0], [(by_secondary[secondary], k) for k, secondary in sources]
    each: dict[str, Any] = {
        field: tuple(getattr(of, field)[k] for of, k in pairs) if getattr(here, field) else ()
        for field in (
            "block_bytes",
            "load_seconds",
            "read_seconds",
            "disk_seconds",
            "block_seconds",
            "read_bytes",
        )
    }
    return replace(here, **each)


def splits_of(of: Problem, split: Problem) -> tuple[Split, ...]:
    """The splits that make ``split`` from ``of``."""
    found = []
    for component in split.components:
        whole = of.component(component.name).groups
        for secondary in sorted(
            {group.secondary for group in component.groups} - {group.secondary for group in whole}
        ):
            paths = {
                path
                for group in component.groups
                if group.secondary == secondary
                for path in group.blocks
            }
            groups = [
                (group.name, tuple(i for i, path in enumerate(group.blocks) if path in paths))
                for group in whole
            ]
            found.append((component.name, secondary, tuple(named for named in groups if named[1])))
    return tuple(found)


def computing_on(problem: Problem, secondary: int) -> list[str]:
    """What computes on ``secondary``: names of components, with the number of blocks where it is
    part of one. ``problem``: with a plan's choices applied."""
    found = []
    for component in problem.components:
        blocks = sum(
            len(group.blocks) for group in component.groups if group.secondary == secondary
        )
        every = sum(len(group.blocks) for group in component.groups)
        if component.variants[0].secondary == secondary or blocks:
            found.append(
                f"{component.name} ({blocks} of {every} blocks)" if blocks else component.name
            )
    return found

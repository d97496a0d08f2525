"""How a phase uses a component, from the traced calls: calls and seconds per block group, and the
execution order within a call.

Independent of where weights are placed. For a component split into layers also how often a layer
runs in a call.

    call     | remainder |  block  |  block  | remainder |  block  | remainder |

Seconds of the remainder count for the blocks with whose copies they can overlap
(`model.choices.overlap_seconds`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from graphrun.model.choices import overlap_seconds
from graphrun.model.problem import ComponentNumbers, Hardware, LiveTensor, PhaseNumbers, Use
from graphrun.profile.costs import work_seconds
from graphrun.profile.recording import Call

Order = tuple[tuple[int, int, float], ...]
"""The compute of a call in order: (group, block in the group, seconds). Group 0 is the
remainder."""


def use_of(
    component: ComponentNumbers,
    calls: Sequence[Call],
    hardware: Hardware,
    *,
    transfer: bool = False,
    compiled: bool = False,
) -> Use:
    """How ``calls``, those of one phase, use ``component``; also split into layers, where it can
    be. ``transfer``: with the bytes that cross to a secondary device and back: the most of any
    call. ``compiled``: its blocks run as compiled code, which takes their seconds over
    `Hardware.compiled_gain`, where that was measured."""
    use = _block_use(component, calls, hardware, hardware.compiled_gain or 1.0 if compiled else 1.0)
    layers = _layer_use(component.layers, calls, hardware) if component.layers is not None else None
    if not transfer:
        return replace(use, layers=layers)
    both = max(call.input_bytes for call in calls), max(call.output_bytes for call in calls)
    live_tensors = (
        _live_tensors(component, calls) if all(n == use.calls for n in use.group_calls[1:]) else ()
    )
    return replace(
        use,
        transfer=both,
        live_tensors=live_tensors,
        layers=layers and replace(layers, transfer=both),
    )


def _live_tensors(component: ComponentNumbers, calls: Sequence[Call]) -> tuple[LiveTensor, ...]:
    """`Use.live_tensors`, with the most bytes of any call; () if calls differ in more than that, or
    one of them cannot be split."""
    number = {path: n for n, path in enumerate((path for path in _positions(component) if path), 1)}
    found = [live_tensors_of(call, number) for call in {id(call): call for call in calls}.values()]
    if len({tuple(row[1:] for row in rows) for rows in found}) > 1:
        return ()
    return tuple(
        LiveTensor(max(row.nbytes for row in rows), *rows[0][1:])
        for rows in zip(*found, strict=True)
    )


def live_tensors_of(call: Call, number: Mapping[str, int]) -> tuple[LiveTensor, ...]:
    """Those of ``call``, with these numbers of blocks. () unless it runs every block once, in their
    order, writes to nothing that passes, and returns of what blocks make only what the last of them
    does: an encoder may return hidden states of all layers.

    Other code may read what a block makes, unless only the next block gets it and no operator runs
    before that: on a secondary device, even ``x.to(hidden.device)`` is another tensor."""
    if call.loose:
        return ()
    sizes, made, used = dict[int, int](), dict[int, int](), defaultdict[int, set[int]](set)
    # the block that runs; the last one that began; blocks before which operators run
    running, last, gaps = (
        0,
        0,
        set[int](),
    )
    for hop in call.hops:
        block = number.get(hop.path, 0)
        known = {of for of, _ in hop.tensors} & sizes.keys()
        if hop.kind == "writes" and known:
            return ()
        if block:
            if (block, running) != ((last + 1, 0) if hop.kind == "gets" else (last, last)):
                return ()
            running, last = (block if hop.kind == "gets" else 0), block
            for of, nbytes in hop.tensors:
                if hop.kind == "gets":
                    used[of].add(block)
                elif of not in sizes:
                    made[of] = block
                sizes.setdefault(of, nbytes)
            continue
        if not running and (hop.kind, hop.path) != ("gives", ""):
            gaps.add(last + 1)
        elif not running and any(made.get(of, last) < last for of in known):
            return ()
        for of in known:
            if of in made and running not in used[of]:
                used[of].add(0)
    if last < max(1, len(number)):
        return ()
    for of, maker in made.items():
        if used[of] != {maker + 1} or maker + 1 in gaps:
            used[of].add(0)
    return tuple(
        LiveTensor(nbytes, made.get(of, 0), tuple(sorted(used[of])), of < 0)
        for of, nbytes in sizes.items()
    )


def splittable_components(phases: Iterable[PhaseNumbers]) -> set[str]:
    """Names of the components that every phase can use split into layers."""
    uses = [use for phase in phases for use in phase.uses]
    return {use.component for use in uses} - {use.component for use in uses if use.layers is None}


def _block_use(
    component: ComponentNumbers, calls: Sequence[Call], hardware: Hardware, gain: float
) -> Use:
    distinct = {id(call): call for call in calls}
    orders = {
        key: _compute_order(component, call, hardware, gain) for key, call in distinct.items()
    }
    positions = _positions(component)
    groups_of = {
        key: {_block_at(positions, name.rpartition(".")[0])[0] for name in call.touched}
        for key, call in distinct.items()
    }
    reads = [
        sum(number in groups_of[id(call)] for call in calls)
        for number in range(len(component.groups))
    ]
    # `Use` counts a group's first call in the component's first call: the group must be loaded for
    # it.
    group_calls = [
        count + (count > 0 and number not in groups_of[id(calls[0])])
        for number, count in enumerate(reads)
    ]
    if not group_calls[0]:
        orders = {key: _without_unblocked(order) for key, order in orders.items()}
    order = orders[id(calls[0])] if len(distinct) == 1 else ()
    return Use(
        component.name,
        len(calls),
        tuple(group_calls),
        _block_seconds(component, calls, orders, group_calls),
        order,
    )


def _block_seconds(
    component: ComponentNumbers,
    calls: Sequence[Call],
    orders: Mapping[int, Order],
    group_calls: Sequence[int],
) -> tuple[float, ...]:
    """For each group, seconds of one block in one call. ``orders``: the compute of each call, by
    its `id`."""
    overlap = {key: overlap_seconds(order, component.variants[0]) for key, order in orders.items()}
    totals = map(sum, zip(*(overlap[id(call)] for call in calls), strict=True))
    rows = zip(totals, component.groups, group_calls, strict=True)
    return tuple(total / (len(group.blocks) * max(1, count)) for total, group, count in rows)


def _positions(component: ComponentNumbers) -> dict[str, tuple[int, int]]:
    return {
        path: (number, i)
        for number, of in enumerate(component.groups)
        for i, path in enumerate(of.blocks)
    }


def _compute_order(
    component: ComponentNumbers, call: Call, hardware: Hardware, gain: float = 1.0
) -> Order:
    """The compute of a call in order: (group, block in the group, seconds). Group 0 is the
    remainder: compute outside of all blocks. ``gain``: blocks that may be streamed take their
    seconds over it."""
    positions = _positions(component)
    around = {
        path: component.groups[_block_at(positions, path.rpartition(".")[0])[0]]
        for path in positions
    }
    loose_paths = tuple(path for path, group in around.items() if group.streamable)
    positions = {path: position for path, position in positions.items() if path not in loose_paths}
    found: list[tuple[int, int, float]] = []
    for (path, _), seconds in zip(call.work, work_seconds(call, hardware), strict=True):
        position = _block_at(positions, path)
        if f"{path}.".startswith(tuple(f"{of}." for of in loose_paths)) and (
            not found or found[-1][:2] != position
        ):
            position = (0, 0)  # a loose module of a block computes while the block does not
        if component.groups[position[0]].streamable:
            seconds /= gain
        if (
            found
            and found[-1][:2] == position
            and (component.granularity == "blocks" or not position[0])
        ):
            seconds += found.pop()[2]
        found.append((*position, seconds))
    return tuple(found)


def _block_at(positions: Mapping[str, tuple[int, int]], path: str) -> tuple[int, int]:
    """(group, block) of the block at ``path`` or of the one that contains it; (0, 0), the
    remainder, if there is none."""
    while path and path not in positions:
        path = path.rpartition(".")[0]
    return positions.get(path, (0, 0))


def _layer_use(
    component: ComponentNumbers, calls: Sequence[Call], hardware: Hardware
) -> Use | None:
    """How ``calls`` use the layers of ``component``.

    None if the calls of the phase differ in which layers they call or in which order, since layers
    could then not be streamed in one order.
    """
    orders = {
        id(call): _compute_order(component, call, hardware)
        for call in {id(call): call for call in calls}.values()
    }
    if (
        len({tuple((number, i) for number, i, _ in order if number) for order in orders.values()})
        > 1
    ):
        return None
    layers = {path for group in component.groups for path in group.blocks if path}
    unblocked_calls = sum(
        any(name.rpartition(".")[0] not in layers for name in call.touched) for call in calls
    )
    if not component.variants[0].block_bytes[0]:  # the remainder only has names of tied tensors
        unblocked_calls = 0
    if not unblocked_calls:
        orders = {key: _without_unblocked(order) for key, order in orders.items()}
    order = orders[id(calls[0])]
    times = Counter(number for number, _, _ in order if number)
    group_calls = [
        unblocked_calls,
        *(len(calls) if times[number] else 0 for number in range(1, len(component.groups))),
    ]
    return Use(
        component.name,
        len(calls),
        tuple(group_calls),
        _block_seconds(component, calls, orders, group_calls),
        tuple(of for of in order if of[0] or of[2]),
        tuple(
            max(1, times[number] // len(group.blocks))
            for number, group in enumerate(component.groups)
        ),
    )


def _without_unblocked(order: Order) -> Order:
    """``order`` for calls that read nothing of the remainder: compute outside of blocks is added to
    the block before it."""
    found: list[tuple[int, int, float]] = []
    for number, i, seconds in order:
        if number or not found:
            found.append((number, i, seconds))
        else:
            found[-1] = (*found[-1][:2], found[-1][2] + seconds)
    if len(found) > 1 and not found[0][0]:
        found[:2] = [(*found[1][:2], found[0][2] + found[1][2])]
    return tuple(found)

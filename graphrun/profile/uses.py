"""How a phase uses a component, from the traced calls: calls and seconds per block group, and the execution order within a
call.

Independent of where weights are placed. For a component split into layers also how often a layer runs in a call.

    call     | remainder |  block  |  block  | remainder |  block  | remainder |

Seconds of the remainder count for the blocks with whose copies they can overlap (`model.choices.overlap_seconds`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from graphrun.model.choices import overlap_seconds
from graphrun.model.problem import ComponentNumbers, Hardware, PhaseNumbers, Use
from graphrun.profile.costs import work_seconds
from graphrun.profile.recording import Call

Order = tuple[tuple[int, int, float], ...]
"""The compute of a call in order: (group, block in the group, seconds). Group 0 is the remainder."""


def use_of(
    component: ComponentNumbers, calls: Sequence[Call], hardware: Hardware, *, crossing: bool = False, compiled: bool = False
) -> Use:
    """How ``calls``, those of one phase, use ``component``; also split into layers, where it can be. ``crossing``: with the
    bytes that cross to a helper and back: the most of any call. ``compiled``: its blocks run as compiled code, which takes their
    seconds over `Hardware.compiled_gain`, where that was measured."""
    use = _block_use(component, calls, hardware, hardware.compiled_gain or 1.0 if compiled else 1.0)
    layers = _layer_use(component.layers, calls, hardware) if component.layers is not None else None
    if not crossing:
        return replace(use, layers=layers)
    both = max(call.input_bytes for call in calls), max(call.output_bytes for call in calls)
    hops = _hops(component, calls, use)
    return replace(use, crossing=both, hops=hops, layers=layers and replace(layers, crossing=both))


def _hops(component: ComponentNumbers, calls: Sequence[Call], use: Use) -> tuple[tuple[int, int], ...]:
    """`Use.hops`: empty unless every call runs all blocks of all groups once, one directly after another, and returns no more than
    the last of them: otherwise it may return what other blocks do (``output_hidden_states`` of transformers)."""
    positions, most = _positions(component), [(0, 0)] * len(component.groups)
    every, distinct = [position for position in positions.values() if position[0]], {id(call): call for call in calls}.values()
    for call in distinct:
        ran = [_block_at(positions, path) for path, kernels in call.work if kernels]
        blocks = [n for n, (k, _) in enumerate(ran) if k]
        if list(dict.fromkeys(ran[blocks[0] : blocks[-1] + 1] if blocks else ())) != every or call.loose:
            return ()
    if any(n != use.calls for n in use.group_calls[1:]):
        return ()
    for call in distinct:
        if call.output_bytes > next((hop.output_bytes for hop in reversed(call.hops) if hop.path in positions), 0):
            return ()
    for hop in {hop for call in distinct for hop in call.hops if hop.path in positions}:
        k = positions[hop.path][0]
        most[k] = max(most[k][0], hop.input_bytes), max(most[k][1], hop.output_bytes)
    return tuple(most)


def splittable_components(phases: Iterable[PhaseNumbers]) -> set[str]:
    """Names of the components that every phase can use split into layers."""
    uses = [use for phase in phases for use in phase.uses]
    return {use.component for use in uses} - {use.component for use in uses if use.layers is None}


def _block_use(component: ComponentNumbers, calls: Sequence[Call], hardware: Hardware, gain: float) -> Use:
    distinct = {id(call): call for call in calls}
    orders = {key: _compute_order(component, call, hardware, gain) for key, call in distinct.items()}
    positions = _positions(component)
    groups_of = {key: {_block_at(positions, name.rpartition(".")[0])[0] for name in call.touched} for key, call in distinct.items()}
    reads = [sum(number in groups_of[id(call)] for call in calls) for number in range(len(component.groups))]
    # `Use` counts a group's first call in the component's first call: the group must be loaded for it.
    group_calls = [count + (count > 0 and number not in groups_of[id(calls[0])]) for number, count in enumerate(reads)]
    if not group_calls[0]:
        orders = {key: _without_remainder(order) for key, order in orders.items()}
    order = orders[id(calls[0])] if len(distinct) == 1 else ()
    return Use(component.name, len(calls), tuple(group_calls), _block_seconds(component, calls, orders, group_calls), order)


def _block_seconds(
    component: ComponentNumbers, calls: Sequence[Call], orders: Mapping[int, Order], group_calls: Sequence[int]
) -> tuple[float, ...]:
    """For each group, seconds of one block in one call. ``orders``: the compute of each call, by its `id`."""
    overlap = {key: overlap_seconds(order, component.variants[0]) for key, order in orders.items()}
    totals = map(sum, zip(*(overlap[id(call)] for call in calls), strict=True))
    rows = zip(totals, component.groups, group_calls, strict=True)
    return tuple(total / (len(group.blocks) * max(1, count)) for total, group, count in rows)


def _positions(component: ComponentNumbers) -> dict[str, tuple[int, int]]:
    return {path: (number, i) for number, of in enumerate(component.groups) for i, path in enumerate(of.blocks)}


def _compute_order(component: ComponentNumbers, call: Call, hardware: Hardware, gain: float = 1.0) -> Order:
    """The compute of a call in order: (group, block in the group, seconds). Group 0 is the remainder: compute outside of all
    blocks. ``gain``: blocks that may be streamed take their seconds over it."""
    positions = _positions(component)
    around = {path: component.groups[_block_at(positions, path.rpartition(".")[0])[0]] for path in positions}
    loose_paths = tuple(path for path, group in around.items() if group.streamable)
    positions = {path: position for path, position in positions.items() if path not in loose_paths}
    found: list[tuple[int, int, float]] = []
    for (path, _), seconds in zip(call.work, work_seconds(call, hardware), strict=True):
        position = _block_at(positions, path)
        if f"{path}.".startswith(tuple(f"{of}." for of in loose_paths)) and (not found or found[-1][:2] != position):
            position = (0, 0)  # a loose module of a block computes while the block does not
        if component.groups[position[0]].streamable:
            seconds /= gain
        if found and found[-1][:2] == position and (component.granularity == "blocks" or not position[0]):
            seconds += found.pop()[2]
        found.append((*position, seconds))
    return tuple(found)


def _block_at(positions: Mapping[str, tuple[int, int]], path: str) -> tuple[int, int]:
    """(group, block) of the block at ``path`` or of the one that contains it; (0, 0), the remainder, if there is none."""
    while path and path not in positions:
        path = path.rpartition(".")[0]
    return positions.get(path, (0, 0))


def _layer_use(component: ComponentNumbers, calls: Sequence[Call], hardware: Hardware) -> Use | None:
    """How ``calls`` use the layers of ``component``.

    None if the calls of the phase differ in which layers they call or in which order, since layers could then not be streamed
    in one order.
    """
    orders = {id(call): _compute_order(component, call, hardware) for call in {id(call): call for call in calls}.values()}
    if len({tuple((number, i) for number, i, _ in order if number) for order in orders.values()}) > 1:
        return None
    layers = {path for group in component.groups for path in group.blocks if path}
    remainder_calls = sum(any(name.rpartition(".")[0] not in layers for name in call.touched) for call in calls)
    if not component.variants[0].block_bytes[0]:  # the remainder only has names of tied tensors
        remainder_calls = 0
    if not remainder_calls:
        orders = {key: _without_remainder(order) for key, order in orders.items()}
    order = orders[id(calls[0])]
    times = Counter(number for number, _, _ in order if number)
    group_calls = [remainder_calls, *(len(calls) if times[number] else 0 for number in range(1, len(component.groups)))]
    return Use(
        component.name,
        len(calls),
        tuple(group_calls),
        _block_seconds(component, calls, orders, group_calls),
        tuple(of for of in order if of[0] or of[2]),
        tuple(max(1, times[number] // len(group.blocks)) for number, group in enumerate(component.groups)),
    )


def _without_remainder(order: Order) -> Order:
    """``order`` for calls that read nothing of the remainder: compute outside of blocks is added to the block before it."""
    found: list[tuple[int, int, float]] = []
    for number, i, seconds in order:
        if number or not found:
            found.append((number, i, seconds))
        else:
            found[-1] = (*found[-1][:2], found[-1][2] + seconds)
    if len(found) > 1 and not found[0][0]:
        found[:2] = [(*found[1][:2], found[0][2] + found[1][2])]
    return tuple(found)

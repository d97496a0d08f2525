"""How a phase uses a component, from the traced calls: calls and seconds per block group, and the execution order within a
call.

Independent of where weights are placed. For a component split into layers also how often a layer runs in a call, and how many
bytes are live beside it.

    call     | remainder |  block  |  block  | remainder |  block  | remainder |

Seconds of the remainder count for the blocks with whose copies they can overlap (`model.choices.overlap_seconds`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from graphrun.model.choices import overlap_seconds
from graphrun.model.problem import ComponentNumbers, Hardware, PhaseNumbers, Use
from graphrun.profile.phase_memory import PhaseMemory
from graphrun.profile.recording import Call


def use_of(component: ComponentNumbers, calls: Sequence[Call], hardware: Hardware, phase_memory: PhaseMemory) -> Use:
    """How ``calls``, those of one phase with ``phase_memory``, use ``component``; also split into layers, where it can be."""
    use = _block_use(component, calls, hardware)
    if component.layers is None:
        return use
    return replace(use, layers=_layer_use(component.layers, calls, hardware, phase_memory))


def splittable_components(phases: Iterable[PhaseNumbers]) -> set[str]:
    """Names of the components that every phase can use split into layers."""
    uses = [use for phase in phases for use in phase.uses]
    return {use.component for use in uses} - {use.component for use in uses if use.layers is None}


def _block_use(component: ComponentNumbers, calls: Sequence[Call], hardware: Hardware) -> Use:
    distinct = {id(call): call for call in calls}.values()
    reads = {id(call): frozenset(_group_of(component, name) for name in call.touched) for call in distinct}
    orders = {id(call): _compute_order(component, call, hardware) for call in distinct}
    plain = component.variants[0]
    overlap = {key: overlap_seconds(order, plain) for key, order in orders.items()}
    group_calls, seconds = [], []
    for number, group in enumerate(component.groups):
        read = sum(number in reads[id(call)] for call in calls)
        if read and number not in reads[id(calls[0])]:
            read += 1  # `Use` counts a group's first call in the component's first call: the group must be loaded for it
        group_calls.append(read)
        seconds.append(sum(overlap[id(call)][number] for call in calls) / (len(group.blocks) * max(1, read)))
    return Use(component.name, len(calls), tuple(group_calls), tuple(seconds), orders[id(calls[0])] if len(distinct) == 1 else ())


def _compute_order(component: ComponentNumbers, call: Call, hardware: Hardware) -> tuple[tuple[int, int, float], ...]:
    """The compute of a call in order: (group, block in the group, seconds). Group 0 is the remainder: compute outside of all
    blocks."""
    positions = {path: (number, i) for number, of in enumerate(component.groups) for i, path in enumerate(of.blocks)}
    loose_paths = tuple(path for path in positions if _block_at(positions, path.rpartition(".")[0])[0])
    positions = {path: position for path, position in positions.items() if path not in loose_paths}
    found: list[tuple[int, int, float]] = []
    for path, flops in call.flops:
        position = _block_at(positions, path)
        if f"{path}.".startswith(tuple(f"{of}." for of in loose_paths)) and (not found or found[-1][:2] != position):
            position = (0, 0)  # a loose module of a block computes while the block does not
        if found and found[-1][:2] == position and (component.granularity == "blocks" or not position[0]):
            flops += found.pop()[2]
        found.append((*position, flops))
    return tuple((number, i, flops / hardware.flops_per_second) for number, i, flops in found)


def _block_at(positions: Mapping[str, tuple[int, int]], path: str) -> tuple[int, int]:
    """(group, block) of the block at ``path`` or of the one that contains it; (0, 0), the remainder, if there is none."""
    while path and path not in positions:
        path = path.rpartition(".")[0]
    return positions.get(path, (0, 0))


def _layer_use(component: ComponentNumbers, calls: Sequence[Call], hardware: Hardware, phase_memory: PhaseMemory) -> Use | None:
    """How ``calls`` use the layers of ``component``.

    None if the calls of the phase differ in which layers they call or in which order, since layers could then not be streamed
    in one order.
    """
    distinct = list({id(call): call for call in calls}.values())
    orders = [_compute_order(component, call, hardware) for call in distinct]
    if len({tuple((number, i) for number, i, _ in order if number) for order in orders}) > 1:
        return None
    layers = {path for group in component.groups for path in group.blocks if path}
    remainder_bytes = component.variants[0].block_bytes[0]  # 0 if the remainder only has names of tied tensors
    remainder_calls = (
        sum(any(name.rpartition(".")[0] not in layers for name in call.touched) for call in calls) if remainder_bytes else 0
    )
    orders = [order if remainder_calls else _without_remainder(order) for order in orders]
    times = Counter(number for number, _, _ in orders[0] if number)
    counts = [len(group.blocks) for group in component.groups]
    order_of = {id(call): order for call, order in zip(distinct, orders, strict=True)}
    overlap = [
        sum(seconds)
        for seconds in zip(*(overlap_seconds(order_of[id(call)], component.variants[0]) for call in calls), strict=True)
    ]
    group_calls = (remainder_calls, *(len(calls) if times[number] else 0 for number in range(1, len(counts))))
    found = {
        key[1]: nbytes - phase_memory.entry_bytes for key, nbytes in phase_memory.beside_bytes.items() if key[0] == component.name
    }
    whole = max(phase_memory.first_bytes, phase_memory.steady_bytes) - phase_memory.entry_bytes
    beside = tuple(max((found.get(path, whole) for path in group.blocks), default=whole) for group in component.groups)
    return Use(
        component.name,
        len(calls),
        group_calls,
        tuple(total / (count * max(1, n)) for total, count, n in zip(overlap, counts, group_calls, strict=True)),
        tuple(of for of in orders[0] if of[0] or of[2]),
        tuple(max(1, times[number] // count) for number, count in enumerate(counts)),
        beside if found else (),
    )


def _without_remainder(order: Sequence[tuple[int, int, float]]) -> tuple[tuple[int, int, float], ...]:
    """``order`` for calls that read nothing of the remainder: compute outside of layers is added to the layer before it."""
    found: list[tuple[int, int, float]] = []
    for number, i, seconds in order:
        if number or not found:
            found.append((number, i, seconds))
        else:
            found[-1] = (*found[-1][:2], found[-1][2] + seconds)
    if len(found) > 1 and not found[0][0]:
        found[:2] = [(*found[1][:2], found[0][2] + found[1][2])]
    return tuple(found)


def _group_of(component: ComponentNumbers, tensor: str) -> int:
    """Number of the group with the block whose path is the longest prefix of the tensor's name."""
    best, length = 0, -1
    for number, group in enumerate(component.groups):
        for path in group.blocks:
            if len(path) > length and (not path or tensor.startswith(f"{path}.")):
                best, length = number, len(path)
    return best

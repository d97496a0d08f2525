"""How a phase uses a component, from the traced calls: calls and seconds per class of blocks, and the order within a call.

Decides nothing about where weights are. By layer it says besides how often a layer runs in a call, and what lives beside it then.

    call     | rest |  block  |  block  | rest |  block  | rest |     seconds of the rest count where copies can hide in them
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
    """How ``calls``, those of one phase with ``phase_memory``, use ``component``; by layer too, where it is cut so."""
    use = _by_block(component, calls, hardware)
    if component.layers is None:
        return use
    return replace(use, layers=_by_layer(component.layers, calls, hardware, phase_memory))


def cuttable(phases: Iterable[PhaseNumbers]) -> set[str]:
    """Components that every phase can use layer by layer."""
    uses = [use for phase in phases for use in phase.uses]
    return {use.component for use in uses} - {use.component for use in uses if use.layers is None}


def _by_block(component: ComponentNumbers, calls: Sequence[Call], hardware: Hardware) -> Use:
    kinds = {id(call): call for call in calls}.values()
    reads = {id(call): frozenset(_class_of(component, name) for name in call.touched) for call in kinds}
    orders = {id(call): _stretches(component, call, hardware) for call in kinds}
    plain = component.variants[0]
    hiding = {key: overlap_seconds(order, plain) for key, order in orders.items()}
    group_calls, seconds = [], []
    for number, k in enumerate(component.groups):
        read = sum(number in reads[id(call)] for call in calls)
        if read and number not in reads[id(calls[0])]:
            read += 1  # `Use` has the first of a class's calls in the first of the component's: be there then, too
        group_calls.append(read)
        seconds.append(sum(hiding[id(call)][number] for call in calls) / (len(k.blocks) * max(1, read)))
    return Use(component.name, len(calls), tuple(group_calls), tuple(seconds), orders[id(calls[0])] if len(kinds) == 1 else ())


def _stretches(component: ComponentNumbers, call: Call, hardware: Hardware) -> tuple[tuple[int, int, float], ...]:
    """The call's compute in order: class, block in it, seconds. What ran in no block of a class is the rest's (class 0)."""
    places = {path: (k, i) for k, of in enumerate(component.groups) for i, path in enumerate(of.blocks)}
    nested = tuple(path for path in places if _place(places, path.rpartition(".")[0])[0])
    places = {path: place for path, place in places.items() if path not in nested}
    found: list[tuple[int, int, float]] = []
    for path, flops in call.flops:
        place = _place(places, path)
        if f"{path}.".startswith(tuple(f"{of}." for of in nested)) and (not found or found[-1][:2] != place):
            place = (0, 0)  # what is held of a block computes while the block does not
        if found and found[-1][:2] == place and (component.granularity == "blocks" or not place[0]):
            flops += found.pop()[2]
        found.append((*place, flops))
    return tuple((k, i, flops / hardware.flops_per_second) for k, i, flops in found)


def _place(places: Mapping[str, tuple[int, int]], path: str) -> tuple[int, int]:
    """The block at ``path`` or around it; the rest."""
    while path and path not in places:
        path = path.rpartition(".")[0]
    return places.get(path, (0, 0))


def _by_layer(component: ComponentNumbers, calls: Sequence[Call], hardware: Hardware, phase_memory: PhaseMemory) -> Use | None:
    """None where calls of the phase differ in which layers they call, or in which order: they could not pass one after another."""
    kinds = list({id(call): call for call in calls}.values())
    orders = [_stretches(component, call, hardware) for call in kinds]
    if len({tuple((k, i) for k, i, _ in order if k) for order in orders}) > 1:
        return None
    layers = {path for k in component.groups for path in k.blocks if path}
    held = component.variants[0].block_bytes[0]  # of tied tensors the rest may have the name alone
    rest = sum(any(name.rpartition(".")[0] not in layers for name in call.touched) for call in calls) if held else 0
    orders = [order if rest else _without_rest(order) for order in orders]
    times = Counter(k for k, _, _ in orders[0] if k)
    counts = [len(k.blocks) for k in component.groups]
    share = {id(call): order for call, order in zip(kinds, orders, strict=True)}
    hiding = [
        sum(seconds) for seconds in zip(*(overlap_seconds(share[id(call)], component.variants[0]) for call in calls), strict=True)
    ]
    group_calls = (rest, *(len(calls) if times[k] else 0 for k in range(1, len(counts))))
    found = {
        key[1]: nbytes - phase_memory.entry_bytes for key, nbytes in phase_memory.beside_bytes.items() if key[0] == component.name
    }
    whole = max(phase_memory.first_bytes, phase_memory.steady_bytes) - phase_memory.entry_bytes
    beside = tuple(max((found.get(path, whole) for path in k.blocks), default=whole) for k in component.groups)
    return Use(
        component.name,
        len(calls),
        group_calls,
        tuple(total / (count * max(1, n)) for total, count, n in zip(hiding, counts, group_calls, strict=True)),
        tuple(of for of in orders[0] if of[0] or of[2]),
        tuple(max(1, times[k] // count) for k, count in enumerate(counts)),
        beside if found else (),
    )


def _without_rest(order: Sequence[tuple[int, int, float]]) -> tuple[tuple[int, int, float], ...]:
    """``order`` where nothing of the rest is read: what computes outside of layers follows the layer before it."""
    found: list[tuple[int, int, float]] = []
    for k, i, seconds in order:
        if k or not found:
            found.append((k, i, seconds))
        else:
            found[-1] = (*found[-1][:2], found[-1][2] + seconds)
    if len(found) > 1 and not found[0][0]:
        found[:2] = [(*found[1][:2], found[0][2] + found[1][2])]
    return tuple(found)


def _class_of(component: ComponentNumbers, tensor: str) -> int:
    """The class whose block has the longest path that is a prefix of the tensor's name."""
    best, length = 0, -1
    for number, k in enumerate(component.groups):
        for path in k.blocks:
            if len(path) > length and (not path or tensor.startswith(f"{path}.")):
                best, length = number, len(path)
    return best

"""Whether the numbers of a problem fit each other: names are unique and known, there is one number
per block group, blocks exist.

A problem from a dry run always does; one from a plan file may say anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from graphrun.model.phase_trace import CALL, PhaseTrace
from graphrun.model.problem import ComponentNumbers, Hardware, PhaseNumbers, Problem, Use, Variant
from graphrun.reading import printable

# Larger numbers of bytes, seconds and calls overflow 64 bits when they are added up.
_MOST = 2.0**53
_PER_GROUP = ("block_bytes", "load_seconds")
_PER_GROUP_OR_EMPTY = ("read_seconds", "disk_seconds", "block_seconds", "read_bytes")


def incoherent(problem: Problem) -> Iterator[str]:
    """What does not fit, as text; nothing where all does."""
    yield from _odd_numbers("problem", problem)
    if problem.runs < 1:
        yield f"problem.runs is {problem.runs}"
    names = [
        group.name
        for c in problem.components
        for of in (c, c.layers)
        if of is not None
        for group in of.groups
    ]
    names += [
        *(component.name for component in problem.components),
        *(value.name for value in problem.values),
    ]
    names += [text for option in problem.options for text in (option.stage, option.name)]
    for name in (*names, *(phase.stage for phase in problem.phases)):
        if printable(name) != name or set(name) & set(
            '\n\t"\\'
        ):  # it may be written into a script or a plan's text
            yield f"{name!r} is no name"
    yield from _twice("components", [component.name for component in problem.components])
    yield from _twice("phases", [phase.name for phase in problem.phases])
    yield from _twice("values", [value.name for value in problem.values])
    yield from _twice("options", [f"{option.stage} {option.name}" for option in problem.options])
    devices = [
        "device",
        "cpu",
        *(f"device{number}" for number in range(1, len(problem.secondaries) + 1)),
    ]
    for component in problem.components:
        yield from _component(component, devices)
    components = {component.name: component for component in problem.components}
    stages = {phase.stage for phase in problem.phases}
    for phase in (
        *problem.phases,
        *(phase for option in problem.options for phase in option.phases),
    ):
        yield from _phase(phase, components)
    for option in problem.options:
        if (
            any(phase.stage != option.stage for phase in option.phases)
            or option.stage not in stages
        ):
            yield f"the option {option.name} of {option.stage} has phases of other stages, or there is no such stage"
    for pair in problem.precedence or ():
        if not stages.issuperset(pair):
            yield f"precedence {' before '.join(pair)}: no such stage"
    for value in problem.values:
        if value.first_phase < 0 or value.last_phase < -1:
            yield f"{value.name} is live from phase {value.first_phase} to {value.last_phase}"
    for hardware in (problem.hardware, *(secondary.hardware for secondary in problem.secondaries)):
        yield from _hardware(hardware)


def _hardware(hardware: Hardware) -> Iterator[str]:
    for name in ("h2d", "pageable", "d2h", "disk", "memory"):
        if not getattr(hardware, f"{name}_bytes_per_second") > 0:
            yield f"hardware.{name}_bytes_per_second is not positive"
    if not 1e-6 <= hardware.page_scale <= 1:
        yield f"hardware.page_scale is {hardware.page_scale}"
    if not (
        hardware.flops_per_second > 0
        and hardware.cpu_flops_per_second > 0
        and 0 < hardware.bidirectional <= 1
    ):
        yield "a rate of the hardware is not positive"


def _odd_numbers(where: str, of: Any) -> Iterator[str]:
    """Numbers below ``of`` that are negative, not finite or too large. `Variant.block_seconds` may
    be negative."""
    if isinstance(of, tuple):
        for item in of:
            yield from _odd_numbers(where, item)
    elif is_dataclass(of) and not isinstance(of, PhaseTrace):
        name = getattr(of, "name", "")
        for field in fields(of):
            yield from _odd_numbers(f"{name or where}.{field.name}", getattr(of, field.name))
    elif isinstance(of, int | float) and not where.endswith("_phase"):
        least = -_MOST if where.endswith(".block_seconds") else 0
        if not (math.isfinite(of) and least <= of <= _MOST):
            yield f"{where} is {of}"


def _twice(what: str, names: Sequence[str]) -> Iterator[str]:
    for name in (name for name, count in Counter(names).items() if count > 1):
        yield f"{what}: {name} is there twice"


def _component(component: ComponentNumbers, devices: Sequence[str]) -> Iterator[str]:
    name, groups = component.name, component.groups
    if not component.variants:
        yield f"{name} has no variant"
    yield from _twice(name, [variant.name for variant in component.variants])
    yield from _twice(name, [group.name for group in groups])
    yield from _twice(name, [path for group in groups for path in group.blocks])
    for group in groups:
        if not group.blocks:
            yield f"{name}: the block group {group.name} has no blocks"
        if group.secondary:
            yield f"{name}: the block group {group.name} is on a secondary device, which only a plan may say"
    for variant in component.variants:
        yield from _variant(name, variant, len(groups), devices)
    if component.layers is not None:
        if component.layers.name != name or component.layers.layers is not None:
            yield f"{name}.layers is not {name} split into layers"
        yield from _component(component.layers, devices)


def _variant(name: str, variant: Variant, groups: int, devices: Sequence[str]) -> Iterator[str]:
    lengths = {field: len(getattr(variant, field)) for field in (*_PER_GROUP, *_PER_GROUP_OR_EMPTY)}
    for field, length in lengths.items():
        if length != groups and (length or field in _PER_GROUP):
            yield f"{name} {variant.name}: {field} has {length} numbers for {groups} block groups"
    if variant.device not in devices or variant.slowdown <= 0:
        yield f"{name} {variant.name} computes on {variant.device} with the slowdown {variant.slowdown}"


def _phase(phase: PhaseNumbers, components: dict[str, ComponentNumbers]) -> Iterator[str]:
    yield from _twice(phase.name, [use.component for use in phase.uses])
    yield from _trace(phase.name, phase.trace, components)
    for use in phase.uses:
        if use.component not in components:
            yield f"{phase.name} uses {use.component}, which is no component"
            continue
        yield from _use(phase.name, use, components[use.component])
        layers = components[use.component].layers
        if use.layers is not None and layers is not None:
            yield from _use(phase.name, use.layers, layers)


def _trace(phase: str, trace: PhaseTrace, components: dict[str, ComponentNumbers]) -> Iterator[str]:
    """Calls are of components, and release what they allocated; sizes are sizes."""
    for call in trace.calls:
        kept = {*call.kept}
        live, once = set[int](), Counter(key for key, nbytes in call.events if nbytes)
        for key, nbytes in call.events:
            if not 0 <= nbytes <= _MOST or (key in live) == bool(nbytes):
                yield f"{phase}: the trace of {call.component} allocates or releases {key} with {nbytes} bytes"
                return
            live ^= {key}
        if call.component not in components or live - kept:
            yield f"{phase}: the trace of {call.component} is of no component, or does not release what it allocates"
            return
        if len({*call.results}) < len(call.results) or any(
            once[key] != 1 or key in kept for key in call.results
        ):
            yield f"{phase}: the trace of {call.component} has results that it does not allocate once, or keeps"
            return
    for key, nbytes in (*trace.prelude, *trace.first, *trace.steady):
        if not (0 <= key < len(trace.calls) if nbytes == CALL else 0 <= nbytes <= _MOST):
            yield f"{phase}: the trace has an item of {nbytes} bytes with key {key}"
            return


def _live_tensors(where: str, use: Use, component: ComponentNumbers) -> Iterator[str]:
    groups = enumerate(component.groups)
    blocks = [
        (k, i) for k, group in groups if "" not in group.blocks for i in range(len(group.blocks))
    ]
    for of in use.live_tensors:
        users = [*of.users]
        if not users or users != sorted({*users}) or max(of.maker, *users) > len(blocks):
            yield f"{where}: live_tensors has one that block {of.maker} makes and blocks {users} get, of {len(blocks)} blocks"
    if {n for of in use.live_tensors for n in (of.maker, *of.users)} - {0} != {
        *range(1, len(blocks) + 1)
    }:
        yield f"{where}: live_tensors are not of {len(blocks)} blocks"
    if rare := sorted({use.group_calls[k] for k, _ in blocks} - {use.calls}):
        yield f"{where}: live_tensors are of blocks that run in each of {use.calls} calls, and some run in {rare[0]}"
    known = {*blocks}
    if (
        use.order
        and [of for of in dict.fromkeys((k, i) for k, i, _ in use.order) if of in known] != blocks
    ):
        yield f"{where}: order has not the {len(blocks)} blocks of live_tensors in a row"


def _use(phase: str, use: Use, component: ComponentNumbers) -> Iterator[str]:
    where, counts = f"{phase}: {use.component}", [len(group.blocks) for group in component.groups]
    if len(use.transfer) not in (0, 2):
        yield f"{where}: transfer is {list(use.transfer)}"
    for field in ("group_calls", "seconds", "passes"):
        length = len(getattr(use, field))
        if length != len(counts) and (length or field in ("group_calls", "seconds")):
            yield f"{where}: {field} has {length} numbers for {len(counts)} block groups"
            return
    if use.live_tensors:
        yield from _live_tensors(where, use, component)
    if use.calls < 1 or any(calls > use.calls for calls in use.group_calls):
        yield f"{where}: {use.calls} calls, and of block groups {list(use.group_calls)}"
    ran = {(k, index) for k, index, _ in use.order}
    if odd := sorted((k, i) for k, i in ran if not (0 <= k < len(counts) and 0 <= i < counts[k])):
        yield f"{where}: order has block {odd[0][1]} of group {odd[0][0]}, which does not exist"
        return
    # Blocks of a component that is split into layers are streamed in this order; an order of blocks
    # is that of one of the calls.
    layered = component.granularity == "layers" and bool(use.order)
    streamed = [
        k
        for k, group in enumerate(component.groups)
        if layered and group.streamable and use.group_calls[k]
    ]
    needed = {(k, i) for k in streamed for i in range(counts[k])}
    if missing := sorted(needed - ran):
        k, index = missing[0]
        yield f"{where}: order lacks {component.groups[k].blocks[index] or component.name}, which runs in the phase"

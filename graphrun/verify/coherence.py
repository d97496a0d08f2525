"""Check that the numbers of a problem are consistent.

Names are unique and known, blocks exist, and lists per block group (`_PER_GROUP`) have one number
for each group. Dry runs make consistent problems; a plan file may contain anything.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from graphrun.model.hardware import Hardware
from graphrun.model.phase_trace import CALL, PhaseTrace
from graphrun.model.problem import ComponentNumbers, PhaseNumbers, Problem, Use, Variant
from graphrun.reading import printable

# Larger bytes, seconds and calls overflow 64 bits when added up.
_MOST = 2.0**53
MOST_KEPT = 128  # records whose inconsistencies are kept
_PER_GROUP = ("block_bytes", "load_seconds")
_PER_GROUP_OR_EMPTY = (
    *("read_seconds", "disk_seconds", "block_seconds", "read_bytes", "lost_seconds"),
)


def incoherent(problem: Problem) -> Iterator[str]:
    """Yield each inconsistency as text."""
    yield from _invalid_numbers("problem", problem)
    if problem.runs < 1:
        yield f"problem.runs is {problem.runs}"
    names = [
        group.name
        for c in problem.components
        for numbers in (c, c.layers)
        if numbers is not None
        for group in numbers.groups
    ]
    names += [
        *(component.name for component in problem.components),
        *(value.name for value in problem.values),
    ]
    names += [text for option in problem.options for text in (option.stage, option.name)]
    for name in (*names, *(phase.stage for phase in problem.phases)):
        # names may be written into a script or the text of a plan
        if printable(name) != name or set(name) & set('\n\t"\\'):
            yield f"{name!r} is not a valid name"
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
    yield from _copies(problem)
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
            yield (
                f"the option {option.name} of {option.stage} has phases of other stages, or there "
                "is no such stage"
            )
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


@functools.lru_cache(maxsize=MOST_KEPT)
def _invalid_in(path: str, record: ComponentNumbers | PhaseNumbers) -> tuple[str, ...]:
    """Return `_invalid_numbers`. Problems of one search share most of these records."""
    return tuple(_invalid_in_fields(path, record))


def _invalid_numbers(path: str, value: Any) -> Iterator[str]:
    """Yield numbers inside ``value`` that are negative, not finite or too large.

    `Variant.block_seconds` may be negative. `incoherent` checks fields that end in ``_phase``.
    """
    if isinstance(value, str):
        return
    if isinstance(value, tuple):
        # most values are tuples of numbers, and most of these are valid
        minimum = -_MOST if path.endswith(".block_seconds") else 0
        for item in value:
            if type(item) not in (int, float) or not minimum <= item <= _MOST:
                yield from _invalid_numbers(path, item)
    elif isinstance(value, ComponentNumbers | PhaseNumbers):
        yield from _invalid_in(path, value)
    elif is_dataclass(value) and not isinstance(value, PhaseTrace):
        yield from _invalid_in_fields(path, value)
    elif isinstance(value, int | float) and not path.endswith("_phase"):
        minimum = -_MOST if path.endswith(".block_seconds") else 0
        if not (math.isfinite(value) and minimum <= value <= _MOST):
            yield f"{path} is {value}"


def _invalid_in_fields(path: str, record: Any) -> Iterator[str]:
    name = getattr(record, "name", "")
    for field in fields(record):
        yield from _invalid_numbers(f"{name or path}.{field.name}", getattr(record, field.name))


def _twice(kind: str, names: Sequence[str]) -> Iterator[str]:
    for name in (name for name, count in Counter(names).items() if count > 1):
        yield f"{kind}: {name} appears twice"


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
            yield (
                f"{name}: the block group {group.name} is on a secondary device; only the `split` "
                "of a plan puts it there"
            )
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
        yield (
            f"{name} {variant.name} computes on {variant.device} with the slowdown "
            f"{variant.slowdown}"
        )


def _copies(problem: Problem) -> Iterator[str]:
    """Check components that are copies, which only the solver makes, and the phases with them."""
    originals: dict[str, ComponentNumbers] = {}
    for component in problem.components:
        original = originals.get(component.copy_of)
        if not component.copy_of:
            originals[component.name] = component
        elif (
            original is None
            or original.groups != component.groups
            or component.granularity == "layers"
            or any(not v.secondary or v.host_bytes or v.read_seconds for v in component.variants)
        ):
            yield f"{component.name} is not a copy of {component.copy_of}"
    copies = {component.name: component.copy_of for component in problem.components}
    for phase in (
        *problem.phases,
        *(phase for option in problem.options for phase in option.phases),
    ):
        names = [use.component for use in phase.uses]
        for name in names:
            if copies.get(name) and (
                names != [name, copies[name]] or phase.uses[0].calls != phase.uses[1].calls
            ):
                yield f"{phase.name} does not call {copies[name]} after each call of its copy"


def _phase(phase: PhaseNumbers, components: dict[str, ComponentNumbers]) -> Iterator[str]:
    yield from _twice(phase.name, [use.component for use in phase.uses])
    yield from _wrong_items(phase.name, phase.trace, frozenset(components))
    for use in phase.uses:
        if use.pairs and (
            len(use.pairs) != 2
            or len(phase.uses) > 1
            or use.calls % 2
            or {*use.group_calls} - {0, use.calls}
            or len(use.transfer) != 2
        ):
            yield f"{phase.name}: the calls of {use.component} are not pairs"
        if use.component not in components:
            yield f"{phase.name} uses {use.component}, which is not a component"
            continue
        yield from _use(phase.name, use, components[use.component])
        layers = components[use.component].layers
        if use.layers is not None and layers is not None:
            yield from _use(phase.name, use.layers, layers)


@functools.lru_cache(maxsize=MOST_KEPT)
def _wrong_items(phase: str, trace: PhaseTrace, components: frozenset[str]) -> tuple[str, ...]:
    return tuple(_trace(phase, trace, components))


def _trace(phase: str, trace: PhaseTrace, components: Collection[str]) -> Iterator[str]:
    """Check recorded calls: known components, valid sizes, and a release of every allocation."""
    for call in trace.calls:
        kept_keys = {*call.persistent_keys}
        live, allocation_counts = set[int](), Counter(key for key, nbytes in call.events if nbytes)
        for key, nbytes in call.events:
            if not 0 <= nbytes <= _MOST or (key in live) == bool(nbytes):
                yield (
                    f"{phase}: the trace of {call.component} allocates or releases {key} with "
                    f"{nbytes} bytes"
                )
                return
            live ^= {key}
        if call.component not in components or live - kept_keys:
            yield (
                f"{phase}: the trace of {call.component} is of no component, or does not release "
                "what it allocates"
            )
            return
        if len({*call.results}) < len(call.results) or any(
            allocation_counts[key] != 1 or key in kept_keys for key in call.results
        ):
            yield (
                f"{phase}: the trace of {call.component} has results that it does not allocate "
                "once, or that are also among its persistent tensors"
            )
            return
    # ``key``: index of a call if ``nbytes`` is CALL, else a storage
    for key, nbytes in (*trace.prelude, *trace.first, *trace.steady):
        if not (0 <= key < len(trace.calls) if nbytes == CALL else 0 <= nbytes <= _MOST):
            yield f"{phase}: the trace has an item of {nbytes} bytes with key {key}"
            return


def _live_tensors(label: str, use: Use, component: ComponentNumbers) -> Iterator[str]:
    groups = enumerate(component.groups)
    blocks = [
        (k, i) for k, group in groups if not group.is_unblocked for i in range(len(group.blocks))
    ]
    # `LiveTensor` numbers blocks from 1; 0 is other code
    for tensor in use.live_tensors:
        users = [*tensor.users]
        if not users or users != sorted({*users}) or max(tensor.maker, *users) > len(blocks):
            yield (
                f"{label}: live_tensors has a tensor with maker {tensor.maker} and users {users}; "
                f"blocks are numbered 1 to {len(blocks)}, and users are in ascending order"
            )
    if {n for tensor in use.live_tensors for n in (tensor.maker, *tensor.users)} - {0} != {
        *range(1, len(blocks) + 1)
    }:
        yield f"{label}: live_tensors does not name each of the {len(blocks)} blocks"
    if rare := sorted({use.group_calls[k] for k, _ in blocks} - {use.calls}):
        yield (
            f"{label}: with live_tensors every block must run in each of the {use.calls} calls; "
            f"some run in {rare[0]}"
        )
    block_set = {*blocks}
    if (
        use.order
        and [
            block for block in dict.fromkeys((k, i) for k, i, _ in use.order) if block in block_set
        ]
        != blocks
    ):
        yield f"{label}: order does not list the {len(blocks)} blocks in ascending order"


def _use(phase: str, use: Use, component: ComponentNumbers) -> Iterator[str]:
    label, counts = f"{phase}: {use.component}", [len(group.blocks) for group in component.groups]
    if len(use.transfer) not in (0, 2):
        yield f"{label}: transfer is {list(use.transfer)}"
    for field in ("group_calls", "seconds", "passes"):
        length = len(getattr(use, field))
        if length != len(counts) and (length or field in ("group_calls", "seconds")):
            yield f"{label}: {field} has {length} numbers for {len(counts)} block groups"
            return
    if use.live_tensors:
        yield from _live_tensors(label, use, component)
    if use.calls < 1 or any(calls > use.calls for calls in use.group_calls):
        yield (
            f"{label}: {use.calls} calls, but its block groups run in {list(use.group_calls)} calls"
        )
    blocks_in_order = {(k, index) for k, index, _ in use.order}
    if odd := sorted(
        (k, i) for k, i in blocks_in_order if not (0 <= k < len(counts) and 0 <= i < counts[k])
    ):
        yield f"{label}: order has block {odd[0][1]} of group {odd[0][0]}, which does not exist"
        return
    # Layers are streamed in this order, so it must have all layers. An order of blocks may be
    # incomplete: it was recorded in one call, and other calls may run other blocks.
    layered = component.granularity == "layers" and bool(use.order)
    streamed = [
        k
        for k, group in enumerate(component.groups)
        if layered and group.streamable and use.group_calls[k]
    ]
    needed_blocks = {(k, i) for k in streamed for i in range(counts[k])}
    if missing_blocks := sorted(needed_blocks - blocks_in_order):
        k, index = missing_blocks[0]
        yield (
            f"{label}: order does not have {component.groups[k].blocks[index] or component.name}, "
            "which runs in the phase"
        )

"""How a phase uses a component: calls and seconds per block group, and execution order.

These numbers come from the traced calls, wherever weights are placed. With layers they include how
often a layer runs in a call.

    call     | unblocked |  block  |  block  | unblocked |  block  | unblocked |

Seconds of unblocked weights count for the blocks whose copies they can overlap
(`model.choices.overlap_seconds`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from graphrun.model.choices import overlap_seconds
from graphrun.model.hardware import Hardware
from graphrun.model.problem import ComponentNumbers, LiveTensor, PhaseNumbers, Use
from graphrun.profile.costs import work_seconds
from graphrun.profile.recording import Call

Order = tuple[tuple[int, int, float], ...]
"""The compute of a call in order: (group, block in the group, seconds); group 0: unblocked
weights."""


def use_of(
    component: ComponentNumbers,
    calls: Sequence[Call],
    hardware: Hardware,
    *,
    transfer: bool = False,
    compiled: bool = False,
    has_pairs: bool = False,
) -> Use:
    """Return how ``calls``, the calls of one phase, use ``component``, with layers where possible.

    ``transfer``: include the bytes transferred to a secondary device and back, the maximum over the
    calls. ``compiled``: blocks run as compiled code, so their seconds are divided by
    `Hardware.compiled_gain` if that was measured. ``has_pairs``: the calls come in pairs
    (`Use.pairs`); left out unless every block runs in both calls of a pair.
    """
    use = _block_use(component, calls, hardware, hardware.compiled_gain or 1.0 if compiled else 1.0)
    layers = _layer_use(component.layers, calls, hardware) if component.layers is not None else None
    if not transfer:
        return replace(use, layers=layers)
    transfer_bytes = (
        max(call.input_bytes for call in calls),
        max(call.output_bytes for call in calls),
    )
    live_tensors = (
        _live_tensors(component, calls) if all(n == use.calls for n in use.group_calls[1:]) else ()
    )
    return replace(
        use,
        transfer=transfer_bytes,
        live_tensors=live_tensors,
        pairs=_pair_factors(calls, hardware)
        if has_pairs and {*use.group_calls} <= {0, use.calls}
        else (),
        layers=layers and replace(layers, transfer=transfer_bytes),
    )


def _pair_factors(calls: Sequence[Call], hardware: Hardware) -> tuple[float, float]:
    """Return the mean seconds of the first and of the second calls, relative to all calls."""
    seconds = {id(call): sum(work_seconds(call, hardware)) for call in calls}
    first, second = (sum(seconds[id(call)] for call in calls[start::2]) for start in (0, 1))
    total = first + second
    return (2 * first / total, 2 * second / total) if total else (1.0, 1.0)


def _live_tensors(component: ComponentNumbers, calls: Sequence[Call]) -> tuple[LiveTensor, ...]:
    """Return `Use.live_tensors`, with the maximum bytes over the calls.

    () if calls differ in anything but bytes, or if one of them cannot be split.
    """
    block_numbers = {
        path: n for n, path in enumerate((path for path in _positions(component) if path), 1)
    }
    tensors_by_call = [
        live_tensors_of(call, block_numbers) for call in {id(call): call for call in calls}.values()
    ]
    if len({tuple(row[1:] for row in rows) for rows in tensors_by_call}) > 1:
        return ()
    return tuple(
        LiveTensor(max(row.nbytes for row in rows), *rows[0][1:])
        for rows in zip(*tensors_by_call, strict=True)
    )


def live_tensors_of(call: Call, block_numbers: Mapping[str, int]) -> tuple[LiveTensor, ...]:
    """Return the live tensors of ``call``, or () if it cannot be split.

    A call can be split if it runs every block once in the order of ``block_numbers``, no operator
    writes to a passed tensor, and the call returns no block output except the last block's. (An
    encoder may return hidden states of all layers.)

    A block's output may also be read by other code, unless only the next block receives it and no
    operator runs in between: on a secondary device, even ``x.to(hidden.device)`` is another tensor.
    """
    if call.loose_modules:
        return ()
    sizes, producers, consumers = (
        dict[int, int](),
        dict[int, int](),
        defaultdict[int, set[int]](set),
    )
    # the block that runs (0: none), the last block that began, blocks before which operators run
    active_block, last_block, gap_blocks = 0, 0, set[int]()
    for hop in call.hops:
        block = block_numbers.get(hop.path, 0)
        tensor_numbers = {tensor_number for tensor_number, _ in hop.tensors} & sizes.keys()
        if hop.kind == "writes" and tensor_numbers:
            return ()
        if block:
            if (block, active_block) != (
                (last_block + 1, 0) if hop.kind == "gets" else (last_block, last_block)
            ):
                return ()
            active_block, last_block = (block if hop.kind == "gets" else 0), block
            for tensor_number, nbytes in hop.tensors:
                if hop.kind == "gets":
                    consumers[tensor_number].add(block)
                elif tensor_number not in sizes:
                    producers[tensor_number] = block
                sizes.setdefault(tensor_number, nbytes)
            continue
        if not active_block and (hop.kind, hop.path) != ("gives", ""):
            gap_blocks.add(last_block + 1)
        elif not active_block and any(
            producers.get(tensor_number, last_block) < last_block
            for tensor_number in tensor_numbers
        ):
            return ()
        for tensor_number in tensor_numbers:
            if tensor_number in producers and active_block not in consumers[tensor_number]:
                consumers[tensor_number].add(0)
    if last_block < max(1, len(block_numbers)):
        return ()
    for tensor_number, producer in producers.items():
        if consumers[tensor_number] != {producer + 1} or producer + 1 in gap_blocks:
            consumers[tensor_number].add(0)
    return tuple(
        LiveTensor(
            nbytes,
            producers.get(tensor_number, 0),
            tuple(sorted(consumers[tensor_number])),
            tensor_number < 0,
        )
        for tensor_number, nbytes in sizes.items()
    )


def splittable_components(phases: Iterable[PhaseNumbers]) -> set[str]:
    """Return names of the components that every phase can use split into layers."""
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
    read_groups = {
        key: {_block_at(positions, name.rpartition(".")[0])[0] for name in call.read_weights}
        for key, call in distinct.items()
    }
    read_counts = [
        sum(number in read_groups[id(call)] for call in calls)
        for number in range(len(component.groups))
    ]
    # A group's first call counts in the component's first call, since the group must be loaded by
    # then.
    group_calls = [
        count + (count > 0 and number not in read_groups[id(calls[0])])
        for number, count in enumerate(read_counts)
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
    """Return, for each group, seconds of one block in one call; ``orders``: by `id` of the call."""
    overlaps = {key: overlap_seconds(order, component.variants[0]) for key, order in orders.items()}
    totals = map(sum, zip(*(overlaps[id(call)] for call in calls), strict=True))
    rows = zip(totals, component.groups, group_calls, strict=True)
    return tuple(total / (len(group.blocks) * max(1, count)) for total, group, count in rows)


def _positions(component: ComponentNumbers) -> dict[str, tuple[int, int]]:
    return {
        path: (number, block)
        for number, group in enumerate(component.groups)
        for block, path in enumerate(group.blocks)
    }


def _compute_order(
    component: ComponentNumbers, call: Call, hardware: Hardware, gain: float = 1.0
) -> Order:
    """Return the compute of a call in order; group 0 is compute outside of all blocks.

    ``gain``: seconds of streamable blocks are divided by it.
    """
    positions = _positions(component)
    enclosing_groups = {
        path: component.groups[_block_at(positions, path.rpartition(".")[0])[0]]
        for path in positions
    }
    loose_paths = tuple(path for path, group in enclosing_groups.items() if group.streamable)
    positions = {path: position for path, position in positions.items() if path not in loose_paths}
    steps: list[tuple[int, int, float]] = []
    for (path, _), seconds in zip(call.work, work_seconds(call, hardware), strict=True):
        position = _block_at(positions, path)
        if f"{path}.".startswith(tuple(f"{loose_path}." for loose_path in loose_paths)) and (
            not steps or steps[-1][:2] != position
        ):
            position = (0, 0)  # a loose module of a block computes while the block does not
        if component.groups[position[0]].streamable:
            seconds /= gain
        if (
            steps
            and steps[-1][:2] == position
            and (component.granularity == "blocks" or not position[0])
        ):
            seconds += steps.pop()[2]
        steps.append((*position, seconds))
    return tuple(steps)


def _block_at(positions: Mapping[str, tuple[int, int]], path: str) -> tuple[int, int]:
    """Return (group, block) of the block at or around ``path``; (0, 0): unblocked."""
    while path and path not in positions:
        path = path.rpartition(".")[0]
    return positions.get(path, (0, 0))


def _layer_use(
    component: ComponentNumbers, calls: Sequence[Call], hardware: Hardware
) -> Use | None:
    """Return how ``calls`` use the layers of ``component``.

    None if the calls of the phase call different layers or in different orders: layers could then
    not be streamed in one order.
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
        any(name.rpartition(".")[0] not in layers for name in call.read_weights) for call in calls
    )
    if not component.variants[0].block_bytes[0]:  # only names of tied tensors
        unblocked_calls = 0
    if not unblocked_calls:
        orders = {key: _without_unblocked(order) for key, order in orders.items()}
    order = orders[id(calls[0])]
    run_counts = Counter(number for number, _, _ in order if number)
    group_calls = [
        unblocked_calls,
        *(len(calls) if run_counts[number] else 0 for number in range(1, len(component.groups))),
    ]
    return Use(
        component.name,
        len(calls),
        tuple(group_calls),
        _block_seconds(component, calls, orders, group_calls),
        tuple(step for step in order if step[0] or step[2]),
        tuple(
            max(1, run_counts[number] // len(group.blocks))
            for number, group in enumerate(component.groups)
        ),
    )


def _without_unblocked(order: Order) -> Order:
    """Return ``order`` with compute outside of blocks added to the block before."""
    steps: list[tuple[int, int, float]] = []
    for number, block, seconds in order:
        if number or not steps:
            steps.append((number, block, seconds))
        else:
            steps[-1] = (*steps[-1][:2], steps[-1][2] + seconds)
    if len(steps) > 1 and not steps[0][0]:
        steps[:2] = [(*steps[1][:2], steps[0][2] + steps[1][2])]
    return tuple(steps)

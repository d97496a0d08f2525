"""Run of a session plan that starts with blocks left on the device by other plans.

    on the device    transformer[0-11]  vae          from another resolution, which keeps 12 blocks
    this plan keeps  transformer[0-7]   vae   te     between its runs
    the run          evicts transformer[8-11], loads te in the slot that first computes with it;
                     otherwise as every further run

A block that the plan keeps stays if it is on the device. A block that the plan neither keeps nor
moves stays too, as long as the slot with the largest peak has room: the plan that left it may need
it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from graphrun.model.plan import Action, Blocks, Evict, Load, Slot, Stream
from graphrun.model.problem import ALLOCATION_BYTES, ComponentNumbers, Problem, Use
from graphrun.model.solution import Solution
from graphrun.units import round_up
from graphrun.verify.simulate import simulate

BlockKeys = set[tuple[str, int, int]]  # component, block group, block within it


def continued(solution: Solution, resident_paths: Mapping[str, Collection[str]]) -> Solution:
    """Adapt the session plan of ``solution`` to blocks that are already on the device.

    ``resident_paths``: component -> module paths of these blocks. If none of them is of use to the
    plan, all are evicted and the first run stays unchanged.
    """
    problem, plan = solution.chosen, solution.plan
    components = {component.name: component for component in problem.components}
    start = {
        key
        for name, paths in resident_paths.items()
        if name in components
        for key in _keys_of_paths(components[name], paths)
    }
    if not start:
        return solution
    keeps = {
        key for name, blocks in plan.leaves for key in _keys_of_blocks(components[name], blocks)
    }
    extra_blocks = _additional_blocks(solution, start - keeps)
    # `Plan.finds`: the blocks on the device when the run begins
    if not (start & keeps) and not extra_blocks:
        slots = _evicting(components, plan.slots, start)
        new_plan = replace(plan, finds=_blocks_of_keys(components, start), slots=slots)
    else:
        further_slots = tuple(
            _with_kept(components, slot, extra_blocks) for slot in plan.further_slots
        )
        slots = _loading(
            problem,
            _evicting(components, further_slots, start - keeps - extra_blocks),
            keeps - start,
        )
        leaves = _blocks_of_keys(components, keeps | extra_blocks)
        new_plan = replace(
            plan,
            finds=_blocks_of_keys(components, start),
            leaves=leaves,
            slots=slots,
            further_slots=further_slots,
        )
    return replace(solution, plan=new_plan, simulation=simulate(solution.problem, new_plan))


def _additional_blocks(solution: Solution, candidates: BlockKeys) -> BlockKeys:
    """Return the blocks of ``candidates`` that may stay during the further runs: not moved by them,
    not excluded, and with room."""
    problem, reports = solution.chosen, solution.simulation.further_slots
    components = {component.name: component for component in problem.components}
    peaks = [(report.peak_bytes, *report.secondary_peaks) for report in reports]
    limits = (
        solution.problem.effective_bytes,
        *(secondary.effective_bytes for secondary in solution.problem.secondaries),
    )
    room_bytes = [
        limit - max((peaks_of_slot[number] for peaks_of_slot in peaks), default=0)
        for number, limit in enumerate(limits)
    ]
    actions = (
        action
        for slot in solution.plan.further_slots
        for action in slot.actions
        if isinstance(action, Load | Evict)
    )
    moved_blocks = {
        key
        for action in actions
        for key in _keys_of_blocks(components[action.component], action.blocks)
    }
    extra_blocks: BlockKeys = set()
    for key in sorted(candidates - moved_blocks):
        component = components[key[0]]
        nbytes, device = (
            _held_bytes(component, key),
            component.variants[0].secondary or component.groups[key[1]].secondary,
        )
        if not problem.demanded(key[0]) & {"exclude", "drop"} and nbytes <= room_bytes[device]:
            extra_blocks.add(key)
            room_bytes[device] -= nbytes
    return extra_blocks


def _evicting(
    components: Mapping[str, ComponentNumbers], slots: tuple[Slot, ...], evicted_blocks: BlockKeys
) -> tuple[Slot, ...]:
    """Return ``slots`` with ``evicted_blocks`` evicted at the start of the first slot."""
    evicts = [Evict(name, blocks) for name, blocks in _blocks_of_keys(components, evicted_blocks)]
    return (_with_actions(slots[0], evicts), *slots[1:])


def _loading(
    problem: Problem, slots: tuple[Slot, ...], missing_blocks: BlockKeys
) -> tuple[Slot, ...]:
    """Return ``slots`` with loads of ``missing_blocks``, which they expect on the device.

    A block is loaded in the first phase of its component: during compute, or before it if the block
    cannot be streamed. A block that is evicted before use is not loaded.
    """
    components = {component.name: component for component in problem.components}
    phases = {phase.name: phase for phase in problem.phases}
    pending_blocks, loads, new_slots = set(missing_blocks), dict[int, BlockKeys](), list[Slot]()
    for number, slot in enumerate(slots):
        kept_actions = list[Action]()
        for action in slot.actions:
            if isinstance(action, Evict) and (
                absent := pending_blocks
                & _keys_of_blocks(components[action.component], action.blocks)
            ):
                pending_blocks -= absent
                rest = _keys_of_blocks(components[action.component], action.blocks) - absent
                kept_actions += [
                    Evict(name, blocks) for name, blocks in _blocks_of_keys(components, rest)
                ]
            else:
                kept_actions.append(action)
        new_slots.append(replace(slot, actions=tuple(kept_actions)))
        if slot.part == "first":
            uses = {use.component: use for use in phases[slot.phase].uses}
            used_blocks = {key for key in pending_blocks if key[0] in uses}
            streamed = {
                key for key in used_blocks if _streamable(components[key[0]], uses[key[0]], key[1])
            }
            pending_blocks -= used_blocks
            loads[number] = streamed
            loads.setdefault(number - 1, set()).update(used_blocks - streamed)
    loads.setdefault(0, set()).update(pending_blocks)
    for number, keys in loads.items():
        load_actions = [
            Load(c, blocks, components[c].variants[0].backing_store)
            for c, blocks in _blocks_of_keys(components, keys)
        ]
        new_slots[number] = _with_actions(new_slots[number], load_actions)
    return tuple(new_slots)


def _streamable(component: ComponentNumbers, use: Use, number: int) -> bool:
    """Whether the phase of ``use`` runs blocks of group ``number``, and these may be copied
    meanwhile."""
    variant = component.variants[0]
    return (
        bool(use.group_calls[number])
        and component.groups[number].streamable
        and variant.streamable
        and variant.movable
    )


def _with_kept(
    components: Mapping[str, ComponentNumbers], slot: Slot, extra_blocks: BlockKeys
) -> Slot:
    """Return ``slot`` with ``extra_blocks`` also on the device."""
    actions = []
    for action in slot.actions:
        if isinstance(action, Stream) and (
            component_blocks := {key for key in extra_blocks if key[0] == action.component}
        ):
            kept_blocks = (
                _keys_of_blocks(components[action.component], action.keep) | component_blocks
            )
            action = replace(
                action, keep=dict(_blocks_of_keys(components, kept_blocks))[action.component]
            )
        actions.append(action)
    return replace(slot, actions=tuple(actions))


def _with_actions(slot: Slot, actions: Collection[Evict | Load]) -> Slot:
    """Return ``slot`` with more ``actions``: evictions first, loads before its run."""
    evicts = tuple(action for action in actions if isinstance(action, Evict))
    loads = tuple(action for action in actions if isinstance(action, Load))
    run = len(slot.actions) - (slot.part in ("first", "steady"))
    return replace(slot, actions=(*evicts, *slot.actions[:run], *loads, *slot.actions[run:]))


def _keys_of_paths(component: ComponentNumbers, paths: Collection[str]) -> BlockKeys:
    return {
        (component.name, k, i)
        for k, group in enumerate(component.groups)
        for i, path in enumerate(group.blocks)
        if path in paths
    }


def _keys_of_blocks(component: ComponentNumbers, blocks: Blocks) -> BlockKeys:
    """Return the keys of ``blocks``, which a plan names; the reverse of `_blocks_of_keys`."""
    if blocks is None:
        return {
            (component.name, k, i)
            for k, group in enumerate(component.groups)
            for i in range(len(group.blocks))
        }
    number = {group.name: k for k, group in enumerate(component.groups)}
    return {(component.name, number[name], i) for name, indices in blocks for i in indices}


def _blocks_of_keys(
    components: Mapping[str, ComponentNumbers], keys: BlockKeys
) -> tuple[tuple[str, Blocks], ...]:
    """Return the blocks ``keys`` by component, as a plan names them."""
    rows: list[tuple[str, Blocks]] = []
    for name, component in components.items():
        block_keys = {(k, i) for c, k, i in keys if c == name}
        groups = (
            (group.name, tuple(i for i in range(len(group.blocks)) if (k, i) in block_keys))
            for k, group in enumerate(component.groups)
        )
        if block_keys:
            whole = len(block_keys) == sum(len(group.blocks) for group in component.groups)
            rows.append((name, None if whole else tuple(group for group in groups if group[1])))
    return tuple(rows)


def _held_bytes(component: ComponentNumbers, key: tuple[str, int, int]) -> int:
    return round_up(component.variants[0].block_bytes[key[1]], ALLOCATION_BYTES)

"""Run of a session plan that starts with blocks left on the device by other plans.

    on the device    transformer[0-11]  vae          from another resolution, which keeps 12 blocks
    this plan keeps  transformer[0-7]   vae   te     between its runs
    the run          evicts transformer[8-11], loads te in the slot that first computes with it;
                     otherwise as every further run

Blocks that the plan keeps stay on the device. Blocks that it neither keeps nor moves stay while the
slot with the largest peak has room: the plan that left them may need them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from graphrun.model.blocks import Blocks, at_paths, named
from graphrun.model.plan import Action, BlockNames, Evict, Load, Slot, Stream
from graphrun.model.problem import ComponentNumbers, Problem, Use
from graphrun.model.solution import Solution
from graphrun.verify.simulate import simulate

# component -> its blocks, for every component of the problem
BlocksByName = dict[str, Blocks]


def continued(solution: Solution, resident_paths: Mapping[str, Collection[str]]) -> Solution:
    """Adapt the session plan of ``solution`` to blocks that are already on the device.

    ``resident_paths``: component -> module paths of these blocks. If the plan can use none of them,
    all are evicted and the first run stays unchanged.
    """
    problem, plan = solution.chosen, solution.plan
    leaves = dict(plan.leaves)
    start, keeps, extra, evicted = (dict[str, Blocks]() for _ in range(4))
    for component in problem.components:
        name = component.name
        start[name] = at_paths(component, resident_paths.get(name, ()))
        keeps[name] = named(component, leaves.get(name, ()))
        extra[name] = start[name] - keeps[name]
    if not any(start.values()):
        return solution
    extra = _with_room(solution, extra)
    for name, blocks in start.items():
        evicted[name] = blocks - keeps[name] - extra[name]
    # `Plan.finds`: the blocks on the device when the run begins
    finds = _names(start)
    if not any(extra.values()) and not any(start[name] & keeps[name] for name in start):
        new_plan = replace(plan, finds=finds, slots=_evicting(plan.slots, start))
    else:
        further_slots = tuple(_with_kept(slot, extra) for slot in plan.further_slots)
        absent = {name: blocks - start[name] for name, blocks in keeps.items()}
        new_plan = replace(
            plan,
            finds=finds,
            leaves=_names({name: blocks | extra[name] for name, blocks in keeps.items()}),
            slots=_loading(problem, _evicting(further_slots, evicted), absent),
            further_slots=further_slots,
        )
    return replace(solution, plan=new_plan, simulation=simulate(solution.problem, new_plan))


def _with_room(solution: Solution, candidates: BlocksByName) -> BlocksByName:
    """Return the blocks of ``candidates`` that may stay: not moved, not excluded, with room."""
    problem, reports = solution.chosen, solution.simulation.further_slots
    limits = [solution.problem.effective_bytes]
    limits += [secondary.effective_bytes for secondary in solution.problem.secondaries]
    peaks = [(report.peak_bytes, *report.secondary_peaks) for report in reports]
    room_bytes = [
        limit - max((slot_peaks[number] for slot_peaks in peaks), default=0)
        for number, limit in enumerate(limits)
    ]
    extra: BlocksByName = {}
    for component in sorted(problem.components, key=lambda component: component.name):
        name = component.name
        blocks = candidates[name]
        for slot in solution.plan.further_slots:
            for action in slot.actions:
                if isinstance(action, Load | Evict) and action.component == name:
                    blocks = blocks - named(component, action.blocks)
        keys = []
        for k, i in blocks if not problem.demanded(name) & {"exclude", "drop"} else ():
            block = Blocks(component, frozenset({(k, i)}))
            device_number = component.variants[0].secondary or component.groups[k].secondary
            if block.nbytes <= room_bytes[device_number]:
                keys.append((k, i))
                room_bytes[device_number] -= block.nbytes
        extra[name] = Blocks(component, frozenset(keys))
    return extra


def _evicting(slots: tuple[Slot, ...], evicted: BlocksByName) -> tuple[Slot, ...]:
    """Return ``slots`` with ``evicted`` blocks evicted at the start."""
    evicts = [Evict(name, blocks) for name, blocks in _names(evicted)]
    return (_with_actions(slots[0], evicts), *slots[1:])


def _loading(problem: Problem, slots: tuple[Slot, ...], absent: BlocksByName) -> tuple[Slot, ...]:
    """Return ``slots`` with loads of the blocks ``absent``, which they expect on the device.

    A block is loaded in the first phase of its component: during compute, or before it if the block
    cannot be streamed. Blocks of components that no phase uses are loaded in the first slot. A
    block that is evicted before use is not loaded.
    """
    components = {component.name: component for component in problem.components}
    phases = {phase.name: phase for phase in problem.phases}
    pending, new_slots = dict(absent), list[Slot]()
    loads: list[BlocksByName] = [{} for _ in slots]
    for number, slot in enumerate(slots):
        kept_actions = list[Action]()
        for action in slot.actions:
            if not isinstance(action, Evict):
                kept_actions.append(action)
                continue
            blocks = named(components[action.component], action.blocks)
            rest = blocks - pending[action.component]
            pending[action.component] = pending[action.component] - blocks
            if rest:
                kept_actions.append(replace(action, blocks=rest.names))
        new_slots.append(replace(slot, actions=tuple(kept_actions)))
        for use in phases[slot.phase].uses if slot.part == "first" else ():
            component, blocks = components[use.component], pending[use.component]
            streamed = blocks.in_groups(_streamable_groups(component, use))
            loads[number][use.component] = streamed
            loads[number - 1][use.component] = blocks - streamed
            pending[use.component] = blocks - blocks
    # ``pending`` has every component, so no load of the first slot is lost
    loads[0] = {name: blocks | loads[0].get(name, blocks) for name, blocks in pending.items()}
    for number, slot_loads in enumerate(loads):
        load_actions = [
            Load(name, blocks, components[name].variants[0].backing_store)
            for name, blocks in _names({c: slot_loads[c] for c in components if c in slot_loads})
        ]
        new_slots[number] = _with_actions(new_slots[number], load_actions)
    return tuple(new_slots)


def _streamable_groups(component: ComponentNumbers, use: Use) -> set[int]:
    """Return the groups whose blocks the phase of ``use`` runs and may copy during compute."""
    variant = component.variants[0]
    return {
        k
        for k, group in enumerate(component.groups)
        if use.group_calls[k] and group.streamable and variant.streamable and variant.movable
    }


def _with_kept(slot: Slot, extra: BlocksByName) -> Slot:
    """Return ``slot`` with the blocks ``extra`` kept on the device."""

    def kept(action: Action) -> Action:
        if not isinstance(action, Stream) or not extra[action.component]:
            return action
        blocks = extra[action.component]
        return replace(action, keep=(named(blocks.component, action.keep) | blocks).names)

    return replace(slot, actions=tuple(map(kept, slot.actions)))


def _with_actions(slot: Slot, actions: Collection[Evict | Load]) -> Slot:
    """Return ``slot`` with more ``actions``: evictions first, loads before its run."""
    evicts = tuple(action for action in actions if isinstance(action, Evict))
    loads = tuple(action for action in actions if isinstance(action, Load))
    run = len(slot.actions) - (slot.part in ("first", "steady"))
    return replace(slot, actions=(*evicts, *slot.actions[:run], *loads, *slot.actions[run:]))


def _names(blocks_by_name: BlocksByName) -> tuple[tuple[str, BlockNames], ...]:
    """Return the components that have blocks, with the blocks as a plan names them."""
    return tuple((name, blocks.names) for name, blocks in blocks_by_name.items() if blocks)

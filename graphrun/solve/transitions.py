"""The run of a session's plan that begins with blocks which runs of other plans left on the device.

    on the device    transformer[0-11]  vae          of another resolution: it kept 12 blocks, this
    plan keeps 8 this plan keeps  transformer[0-7]   vae   te     between its runs the run
    evicts transformer[8-11], loads te in the slot that first computes with it; else as every
    further run

A block that the plan keeps and that is there already stays. One that this plan neither keeps nor
moves stays too, as long as the highest slot leaves room for it: it may be of use to the plan that
left it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from graphrun.model.plan import Action, Blocks, Evict, Load, Slot, Stream
from graphrun.model.problem import ALLOCATION_BYTES, ComponentNumbers, Problem, Use
from graphrun.model.solution import Solution
from graphrun.units import round_up
from graphrun.verify.simulate import simulate

Keys = set[tuple[str, int, int]]  # component, block group, block within it


def continued(solution: Solution, found: Mapping[str, Collection[str]]) -> Solution:
    """``solution``, of a session, with a first run that begins with the blocks ``found`` (component
    -> module paths) on the device.

    Where none of them is of use to the plan, they are evicted and the first run is as planned.
    """
    problem, plan = solution.chosen, solution.plan
    components = {component.name: component for component in problem.components}
    start = {
        key
        for name, paths in found.items()
        if name in components
        for key in _keys_of(components[name], paths)
    }
    if not start:
        return solution
    keeps = {key for name, blocks in plan.leaves for key in _named(components[name], blocks)}
    beside = _beside(solution, start - keeps)
    if not (start & keeps) and not beside:
        slots = _evicting(components, plan.slots, start)
        continued = replace(plan, finds=_blocks(components, start), slots=slots)
    else:
        again = tuple(_with_kept(components, slot, beside) for slot in plan.again)
        slots = _loading(
            problem, _evicting(components, again, start - keeps - beside), keeps - start
        )
        leaves = _blocks(components, keeps | beside)
        continued = replace(
            plan, finds=_blocks(components, start), leaves=leaves, slots=slots, again=again
        )
    return replace(solution, plan=continued, simulation=simulate(solution.problem, continued))


def _beside(solution: Solution, others: Keys) -> Keys:
    """Those of ``others`` that may stay beside the plan's further runs: not moved by these, not
    excluded, and with room."""
    problem, again = solution.chosen, solution.simulation.again
    components = {component.name: component for component in problem.components}
    peaks = [(report.peak_bytes, *report.secondary_peaks) for report in again]
    limits = (
        solution.problem.effective_bytes,
        *(secondary.effective_bytes for secondary in solution.problem.secondaries),
    )
    room_bytes = [
        limit - max((of[number] for of in peaks), default=0) for number, limit in enumerate(limits)
    ]
    actions = (
        action
        for slot in solution.plan.again
        for action in slot.actions
        if isinstance(action, Load | Evict)
    )
    moved = {
        key for action in actions for key in _named(components[action.component], action.blocks)
    }
    found: Keys = set()
    for key in sorted(others - moved):
        of = components[key[0]]
        nbytes, device = (
            _held_bytes(of, key),
            of.variants[0].secondary or of.groups[key[1]].secondary,
        )
        if not problem.demanded(key[0]) & {"exclude", "drop"} and nbytes <= room_bytes[device]:
            found.add(key)
            room_bytes[device] -= nbytes
    return found


def _evicting(
    components: Mapping[str, ComponentNumbers], slots: tuple[Slot, ...], gone: Keys
) -> tuple[Slot, ...]:
    """``slots`` with ``gone`` evicted when the first of them begins."""
    evicts = [Evict(name, blocks) for name, blocks in _blocks(components, gone)]
    return (_with_actions(slots[0], evicts), *slots[1:])


def _loading(problem: Problem, slots: tuple[Slot, ...], missing: Keys) -> tuple[Slot, ...]:
    """``slots``, which expect ``missing`` on the device when they begin, with loads of these in the
    first phase of their component: while it computes with them, or before that where they cannot be
    streamed. A block that is evicted unused is not loaded."""
    components = {component.name: component for component in problem.components}
    phases = {phase.name: phase for phase in problem.phases}
    left, loads, found = set(missing), dict[int, Keys](), list[Slot]()
    for number, slot in enumerate(slots):
        kept_actions = list[Action]()
        for action in slot.actions:
            if isinstance(action, Evict) and (
                absent := left & _named(components[action.component], action.blocks)
            ):
                left -= absent
                rest = _named(components[action.component], action.blocks) - absent
                kept_actions += [Evict(name, blocks) for name, blocks in _blocks(components, rest)]
            else:
                kept_actions.append(action)
        found.append(replace(slot, actions=tuple(kept_actions)))
        if slot.part == "first":
            uses = {use.component: use for use in phases[slot.phase].uses}
            needed = {key for key in left if key[0] in uses}
            streamed = {
                key for key in needed if _streamable(components[key[0]], uses[key[0]], key[1])
            }
            left -= needed
            loads[number] = streamed
            loads.setdefault(number - 1, set()).update(needed - streamed)
    loads.setdefault(0, set()).update(left)
    for number, keys in loads.items():
        more = [
            Load(c, blocks, components[c].variants[0].backing_store)
            for c, blocks in _blocks(components, keys)
        ]
        found[number] = _with_actions(found[number], more)
    return tuple(found)


def _streamable(component: ComponentNumbers, use: Use, number: int) -> bool:
    """Whether the phase of ``use`` runs blocks of group ``number``, and they may be copied while it
    does."""
    variant = component.variants[0]
    return (
        bool(use.group_calls[number])
        and component.groups[number].streamable
        and variant.streamable
        and variant.movable
    )


def _with_kept(components: Mapping[str, ComponentNumbers], slot: Slot, more: Keys) -> Slot:
    """``slot`` with ``more`` on the device, too."""
    actions = []
    for action in slot.actions:
        if isinstance(action, Stream) and (
            own := {key for key in more if key[0] == action.component}
        ):
            held = _named(components[action.component], action.keep) | own
            action = replace(action, keep=dict(_blocks(components, held))[action.component])
        actions.append(action)
    return replace(slot, actions=tuple(actions))


def _with_actions(slot: Slot, more: Collection[Evict | Load]) -> Slot:
    """``slot`` with ``more``: evictions first, loads before its run."""
    evicts = tuple(action for action in more if isinstance(action, Evict))
    loads = tuple(action for action in more if isinstance(action, Load))
    run = len(slot.actions) - (slot.part in ("first", "steady"))
    return replace(slot, actions=(*evicts, *slot.actions[:run], *loads, *slot.actions[run:]))


def _keys_of(component: ComponentNumbers, paths: Collection[str]) -> Keys:
    return {
        (component.name, k, i)
        for k, of in enumerate(component.groups)
        for i, path in enumerate(of.blocks)
        if path in paths
    }


def _named(component: ComponentNumbers, blocks: Blocks) -> Keys:
    if blocks is None:
        return {
            (component.name, k, i)
            for k, of in enumerate(component.groups)
            for i in range(len(of.blocks))
        }
    number = {of.name: k for k, of in enumerate(component.groups)}
    return {(component.name, number[name], i) for name, indices in blocks for i in indices}


def _blocks(
    components: Mapping[str, ComponentNumbers], keys: Keys
) -> tuple[tuple[str, Blocks], ...]:
    """``keys`` as a plan names them, by component."""
    found: list[tuple[str, Blocks]] = []
    for name, component in components.items():
        own = {(k, i) for c, k, i in keys if c == name}
        groups = (
            (of.name, tuple(i for i in range(len(of.blocks)) if (k, i) in own))
            for k, of in enumerate(component.groups)
        )
        if own:
            whole = len(own) == sum(len(of.blocks) for of in component.groups)
            found.append((name, None if whole else tuple(group for group in groups if group[1])))
    return tuple(found)


def _held_bytes(component: ComponentNumbers, key: tuple[str, int, int]) -> int:
    return round_up(component.variants[0].block_bytes[key[1]], ALLOCATION_BYTES)

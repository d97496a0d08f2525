"""The least that each phase takes on the device: exact byte arithmetic with one variant to a component. No solver.

The least a phase needs. What it uses and cannot stream must be whole; of a component's streamable classes the largest may be held
whole and the others streamed through one ring of twice the largest of them (holding a class in part saves no byte). Cut into
layers, each passes alone if it must: the ring has the bytes that a layer does not find among the activation's. What is held
in `rest` must have been held in `first`, so both slots are weighed together; `load` never needs more than `first`.

    first   | fixed: used | held | ring | first activation | values + carry |
    rest    | fixed: used | held | ring | rest activation  | values + carry |  <= effective budget
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from graphrun.planner.problem import ALLOCATION_BYTES, ComponentNumbers, PhaseNumbers, Placement, Problem, Use
from graphrun.planner.settle import activation_bytes
from graphrun.units import round_up


@dataclass(frozen=True, slots=True)
class Need:
    """The least that a phase takes in its tighter slot ``part``. ``weights_bytes`` must be whole (what cannot be streamed, or takes
    less than its ring would), ``values_bytes`` includes carry; ``available_bytes`` is the effective budget."""

    stage: str
    phase: str
    part: str
    weights_bytes: int
    ring_bytes: int
    activation_bytes: int
    values_bytes: int
    available_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of the terms."""
        return self.weights_bytes + self.ring_bytes + self.activation_bytes + self.values_bytes

    @property
    def short_bytes(self) -> int:
        """Bytes missing; 0 or less where the phase fits."""
        return self.total_bytes - self.available_bytes


def used_components(problem: Problem) -> tuple[ComponentNumbers, ...]:
    """Components that some phase enters, in the problem's order."""
    names = {use.component for phase in problem.phases for use in phase.uses}
    return tuple(component for component in problem.components if component.name in names)


def needed_components(problem: Problem) -> tuple[ComponentNumbers, ...]:
    """Components of which some phase runs a block; the home of any other is not needed, and freed before the first slot."""
    names = {use.component for phase in problem.phases for use in phase.uses if any(use.class_calls) or problem.runs > 1}
    return tuple(component for component in problem.components if component.name in names)


def streamable_classes(component: ComponentNumbers, number: int = 0) -> tuple[bool, ...]:
    """Which classes may be streamed in variant ``number``. What cannot be moved cannot be streamed either."""
    variant = component.variants[number]
    return tuple(of.streamable and variant.streamable and variant.movable for of in component.classes)


def ring_bytes(streamed: Iterable[tuple[int, int]]) -> int:
    """Bytes of the ring for ``(bytes of a block, blocks streamed)`` per class: room for two of the largest, or for the only one."""
    some = [(nbytes, count) for nbytes, count in streamed if count > 0]
    total = sum(count for _, count in some)
    return round_up(min(2, total) * max((nbytes for nbytes, _ in some), default=0), ALLOCATION_BYTES)


def room_bytes(phase_bytes: int, use: Use, number: int) -> int:
    """What of an activation of ``phase_bytes`` is not there while a block of class ``number`` runs: so much of it passes without a
    ring."""
    return max(0, phase_bytes - use.beside_bytes[number]) if use.beside_bytes else 0


def least_ring_bytes(streamed: Iterable[tuple[int, int]]) -> int:
    """Bytes of the ring of a component cut into layers, for ``(bytes of a block, room beside it)`` per class that is streamed: each
    passes alone, if it must."""
    return round_up(max((nbytes - room for nbytes, room in streamed if nbytes > room), default=0), ALLOCATION_BYTES)


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to hold a component in a phase with the least bytes: weights and ring in first, weights and ring in rest."""

    first: tuple[int, int] = (0, 0)
    rest: tuple[int, int] = (0, 0)

    def __add__(self, other: _Option) -> _Option:
        first = (self.first[0] + other.first[0], self.first[1] + other.first[1])
        return _Option(first, (self.rest[0] + other.rest[0], self.rest[1] + other.rest[1]))


def least_needs(problem: Problem) -> tuple[Need, ...]:
    """What each phase takes at least with the first variants, in the slot (first or rest) that decides; nothing is spilled."""
    needs, held = [], dict[str, set[int]]()
    for index, phase in enumerate(problem.phases):
        values = problem.value_bytes(index) + phase.carry_bytes
        options = [_Option()]
        for component in problem.components:
            use = next((use for use in phase.uses if use.component == component.name), None)
            if component.variants[0].device == "cpu":
                continue
            if not component.variants[0].movable or "keep" in problem.demanded(component.name):
                here = {k for k, calls in enumerate(use.class_calls if use else ()) if calls}
                held[component.name] = held.get(component.name, set()) | here
                kept = _whole(component, held[component.name])
                options = [option + _Option((kept, 0), (kept, 0)) for option in options]
            elif use:
                demanded = problem.demanded(component.name)
                options = _pareto(option + more for option in options for more in _options(component, phase, use, demanded))
        needs.append(min((_need(problem, phase, values, option) for option in options), key=lambda need: need.total_bytes))
    return tuple(needs)


def _need(problem: Problem, phase: PhaseNumbers, values: int, option: _Option) -> Need:
    available, variants = problem.effective_bytes, [problem.component(use.component).variants[0] for use in phase.uses]
    activation = [activation_bytes(nbytes, variants) for nbytes in (phase.first_bytes, phase.rest_bytes)]
    first = Need(phase.stage, phase.name, "first", *option.first, activation[0], values, available)
    rest = Need(phase.stage, phase.name, "rest", *option.rest, activation[1], values, available)
    return rest if phase.rest_calls and rest.total_bytes > first.total_bytes else first


def _options(component: ComponentNumbers, phase: PhaseNumbers, use: Use, demanded: Collection[Placement]) -> list[_Option]:
    """Ways to hold ``component``. In rest: the classes above some size. In first: those, and the classes above some size.

    ``exclude`` leaves the way that holds nothing, ``whole`` the one that streams nothing. Of layers the size counts for which there
    is no room.
    """
    if component.grain == "layers":
        return _by_layer(component, phase, use, demanded)
    sizes = component.variants[0].block_bytes
    streamable = {k for k, yes in enumerate(streamable_classes(component)) if yes and "whole" not in demanded}
    limits = {max(sizes)} if "exclude" in demanded else {-1, *sizes}
    used = [{k for k, calls in enumerate(use.class_calls_in(part)) if calls} for part in ("first", "rest")]
    found = []
    for rest_above in limits:
        rest_held = {k for k in used[1] if k not in streamable or sizes[k] > rest_above}
        for first_above in limits:
            first_held = rest_held | {k for k in used[0] if k not in streamable or sizes[k] > first_above}
            slots = (
                (_whole(component, held), ring_bytes((sizes[k], len(component.classes[k].blocks)) for k in needed - held))
                for needed, held in ((used[0], first_held), (used[1], rest_held))
            )
            found.append(_Option(*slots))
    return _pareto(found)


def _by_layer(component: ComponentNumbers, phase: PhaseNumbers, use: Use, demanded: Collection[Placement]) -> list[_Option]:
    sizes, streamable = component.variants[0].block_bytes, streamable_classes(component)
    parts = (("first", phase.first_bytes), ("rest", phase.rest_bytes))
    used = [{k for k, calls in enumerate(use.class_calls_in(part)) if calls} for part, _ in parts]
    short = [{k: max(0, sizes[k] - room_bytes(nbytes, use, k)) for k in used[0]} for _, nbytes in parts]
    most = max((n for of in short for k, n in of.items() if streamable[k]), default=0)
    limits = {most} if "exclude" in demanded else {-1} if "whole" in demanded else {-1, *(n for of in short for n in of.values())}
    found = []
    for above in limits:
        held = {k for k in used[0] if not streamable[k] or max(of[k] for of in short) > above}
        found.append(
            _Option(
                *((_whole(component, held & of), max((short[n][k] for k in of - held), default=0)) for n, of in enumerate(used))
            )
        )
    return _pareto(found)


def _whole(component: ComponentNumbers, classes: Iterable[int]) -> int:
    sizes = component.variants[0].block_bytes
    return sum(len(component.classes[k].blocks) * round_up(sizes[k], ALLOCATION_BYTES) for k in classes)


def _pareto(options: Iterable[_Option]) -> list[_Option]:
    """Options of which no other takes less in both slots."""
    best: list[_Option] = []
    for option in sorted(set(options), key=lambda o: (sum(o.first), sum(o.rest), o.first, o.rest)):
        if not best or sum(option.rest) < sum(best[-1].rest):
            best.append(option)
    return best

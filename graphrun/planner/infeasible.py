"""Why nothing fits, and the least that would: exact byte arithmetic on a problem, and data for the screen that explains it.

The least a phase needs. What it uses and cannot stream must be whole; of a component's streamable classes the largest may be held
whole and the others streamed through one ring of twice the largest of them (holding a class in part saves no byte). What is held
in `rest` must have been held in `first`, so both slots are weighed together; `load` never needs more than `first`.

    first   | fixed: used | held | ring | first activation | values + carry |
    rest    | fixed: used | held | ring | rest activation  | values + carry |  <= effective budget
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from graphrun.errors import GraphrunError
from graphrun.planner.problem import ALLOCATION_BYTES, ComponentNumbers, PhaseNumbers, Placement, Problem, Use
from graphrun.units import round_up, show_size


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


class Infeasible(GraphrunError):
    """No plan exists. ``needs``: the phases that cannot fit (empty where only RAM is short). ``smallest_budget_bytes`` and
    ``smallest_ram_bytes`` are exact: with them a plan exists, with a byte less none does. ``repairs`` each suffice alone for what
    they name."""

    exit_code = 3

    def __init__(self, problem: Problem, needs: tuple[Need, ...]) -> None:
        self.graph = problem.graph
        self.hardware = problem.hardware.name
        self.problem = problem
        self.budget_bytes = problem.budget_bytes
        self.effective_bytes = problem.effective_bytes
        self.capacity_bytes = problem.hardware.capacity_bytes
        self.ram_bytes = problem.ram_bytes
        self.needs = needs
        self.binding = "VRAM" if needs else "RAM"
        self.smallest_budget_bytes = smallest_budget(problem)
        self.smallest_ram_bytes = smallest_ram(problem)
        self.host_bytes = tuple((c.name, c.variants[0].host_bytes) for c in used_components(problem))
        self.repairs = _repairs(problem, needs)
        super().__init__(self._message())

    def _message(self) -> str:
        lines = [
            f"{need.phase} {need.part} needs {show_size(need.total_bytes)} = {show_size(need.weights_bytes)} fixed weights"
            f" + {show_size(need.ring_bytes)} ring + {show_size(need.activation_bytes)} activation"
            f" + {show_size(need.values_bytes)} values > {show_size(need.available_bytes)}"
            for need in self.needs
        ]
        if self.smallest_ram_bytes > self.ram_bytes:
            lines.append(f"the host's copies take {show_size(self.smallest_ram_bytes)} > {show_size(self.ram_bytes)} of RAM")
        return "nothing fits: " + "; ".join(lines) + ". Do one of: " + "; ".join(self.repairs)


def require_feasible(problem: Problem) -> None:
    """Raises Infeasible unless a plan exists."""
    needs = tuple(need for need in least_needs(problem) if need.short_bytes > 0)
    if needs or smallest_ram(problem) > problem.ram_bytes:
        raise Infeasible(problem, needs)


def smallest_budget(problem: Problem) -> int:
    """The least total budget (context, workspace and reserve included) for which a plan exists, whatever the card's capacity."""
    return problem.overhead_bytes + max((need.total_bytes for need in least_needs(problem)), default=0)


def smallest_ram(problem: Problem) -> int:
    """Host bytes of all components that some phase uses: every home is filled before the run starts."""
    return sum(component.variants[0].host_bytes for component in used_components(problem))


def used_components(problem: Problem) -> tuple[ComponentNumbers, ...]:
    """Components that some phase enters, in the problem's order."""
    names = {use.component for phase in problem.phases for use in phase.uses}
    return tuple(component for component in problem.components if component.name in names)


def streamable_classes(component: ComponentNumbers) -> tuple[bool, ...]:
    """Which classes may be streamed. A component that cannot be moved cannot be streamed either."""
    variant = component.variants[0]
    return tuple(of.streamable and variant.streamable and variant.movable for of in component.classes)


def ring_bytes(streamed: Iterable[tuple[int, int]]) -> int:
    """Bytes of the ring for ``(bytes of a block, blocks streamed)`` per class: room for two of the largest, or for the only one."""
    some = [(nbytes, count) for nbytes, count in streamed if count > 0]
    total = sum(count for _, count in some)
    return round_up(min(2, total) * max((nbytes for nbytes, _ in some), default=0), ALLOCATION_BYTES)


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to hold a component in a phase with the least bytes: weights and ring in first, weights and ring in rest."""

    first: tuple[int, int] = (0, 0)
    rest: tuple[int, int] = (0, 0)

    def __add__(self, other: _Option) -> _Option:
        first = (self.first[0] + other.first[0], self.first[1] + other.first[1])
        return _Option(first, (self.rest[0] + other.rest[0], self.rest[1] + other.rest[1]))


def least_needs(problem: Problem) -> tuple[Need, ...]:
    """What each phase takes at least, in the slot (first or rest) that decides."""
    needs, held = [], dict[str, set[int]]()
    for index, phase in enumerate(problem.phases):
        values = problem.value_bytes(index) + phase.carry_bytes
        options = [_Option()]
        for component in problem.components:
            use = next((use for use in phase.uses if use.component == component.name), None)
            if not component.variants[0].movable or "keep" in problem.demanded(component.name):
                here = {k for k, calls in enumerate(use.class_calls if use else ()) if calls}
                held[component.name] = held.get(component.name, set()) | here
                kept = _whole(component, held[component.name])
                options = [option + _Option((kept, 0), (kept, 0)) for option in options]
            elif use:
                options = _pareto(
                    option + more for option in options for more in _options(component, use, problem.demanded(component.name))
                )
        needs.append(min((_need(problem, phase, values, option) for option in options), key=lambda need: need.total_bytes))
    return tuple(needs)


def _need(problem: Problem, phase: PhaseNumbers, values: int, option: _Option) -> Need:
    available = problem.effective_bytes
    first = Need(phase.stage, phase.name, "first", *option.first, phase.first_bytes, values, available)
    rest = Need(phase.stage, phase.name, "rest", *option.rest, phase.rest_bytes, values, available)
    return rest if phase.rest_calls and rest.total_bytes > first.total_bytes else first


def _options(component: ComponentNumbers, use: Use, demanded: Collection[Placement]) -> list[_Option]:
    """Ways to hold ``component``. In rest: the classes above some size. In first: those, and the classes above some size.

    ``exclude`` leaves the way that holds nothing, ``whole`` the one that streams nothing.
    """
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


def _repairs(problem: Problem, needs: tuple[Need, ...]) -> tuple[str, ...]:
    """What would help, each checked: after it, `least_needs` (or the sum of host bytes) fits."""
    repairs = []
    if needs:
        smallest = smallest_budget(problem)
        capacity = problem.hardware.capacity_bytes
        if smallest <= capacity:
            repairs.append(
                f"raise the VRAM budget from {show_size(problem.budget_bytes)} to {smallest} bytes ({show_size(smallest)})"
            )
        else:
            repairs.append(
                f"use a device with {smallest} bytes ({show_size(smallest)}) or more: this one has {show_size(capacity)}"
            )
        limits = {need.phase: need.available_bytes - need.total_bytes + need.activation_bytes for need in needs}
        if all(limit > 0 for limit in limits.values()):
            parts = [f"{need.phase} from {show_size(need.activation_bytes)} to {show_size(limits[need.phase])}" for need in needs]
            smaller = tuple(_limit(phase, limits.get(phase.name)) for phase in problem.phases)
            if all(need.short_bytes <= 0 for need in least_needs(replace(problem, phases=smaller))):
                repairs.append(f"shrink the activation of {', '.join(parts)}: a smaller image, fewer images at once, tiling")
        if (rest := problem.reserve_bytes - max(need.short_bytes for need in needs)) >= 0:
            repairs.append(f"lower the reserve from {show_size(problem.reserve_bytes)} to {rest} bytes ({show_size(rest)})")
        for directive in problem.directives:
            others = tuple(other for other in problem.directives if other != directive)
            if all(need.short_bytes <= 0 for need in least_needs(replace(problem, directives=others))):
                repairs.append(f"do without the directive {directive.placement} {directive.component}")
    ram = smallest_ram(problem)
    if ram > problem.ram_bytes:
        repairs.append(f"raise the RAM budget from {show_size(problem.ram_bytes)} to {ram} bytes ({show_size(ram)})")
    return tuple(repairs)


def _limit(phase: PhaseNumbers, activation: int | None) -> PhaseNumbers:
    if activation is None:
        return phase
    return replace(phase, first_bytes=min(phase.first_bytes, activation), rest_bytes=min(phase.rest_bytes, activation))

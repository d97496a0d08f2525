"""Stores what runs measured for later plans: activation bytes per phase and slot part, seconds per
call and component.

    planned peak    | weights | ring buffer | values, inputs bytes | activation    |
    measured peak   | weights | ring buffer | values, inputs bytes | activation'   |

Everything but the activation is known exactly (except for blocks smaller than the largest of their
group), so the difference of the peaks is the difference of the activations.

Of several runs the largest activation counts, and never less than the traced one: a plan counts
every block with the bytes of its group's largest, so a run of many blocks takes less than planned,
which is not due to the activation and does not hold for a plan that keeps few blocks. Seconds are
taken from streamed blocks, group by group, and from calls of which no block was copied in the slot
(a streamed call also waits for copies); the seconds of a call are divided among its blocks in
proportion to their FLOPs. A stored figure is replaced when it changed by more than `TOLERANCE`, so
that plans do not change with the noise of every run.

Measurements are keyed by the component and the shapes of its calls (`keep_shapes`), not by the
graph:

    seconds      device, versions, component (class, config, dtype), its distinct calls in the phase
    activation   device, versions, components of the phase with their calls, and the activation that
    was traced there

Another graph with the same component at the same size has the same keys and uses the same
measurements. If the dry run is no longer available, the keys are derived from the graph, and
nothing is shared.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from graphrun.files import Store, digest_of
from graphrun.graph.graph import Component, Graph
from graphrun.model.plan import Load, Stream
from graphrun.model.problem import PhaseNumbers, Problem, Use
from graphrun.model.solution import Solution
from graphrun.profile.problems import phase_spans
from graphrun.profile.recording import Call, DryRun
from graphrun.trace import Trace

TOLERANCE = 0.02
PARTS = ("first_bytes", "steady_bytes")

# Largest plausible ratio between measured and expected seconds, either way. Figures beyond it are
# not used.
PLAUSIBLE = 100.0


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a phase's measurements: of its ``activation``, and of the ``seconds`` of each
    component."""

    activation: str
    seconds: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a phase. ``sizes``: its activation in bytes, in the first call and in
    later ones, by `PARTS`. ``seconds``: of one call by component, of one block by
    ``component/group``."""

    sizes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def keep_shapes(graph: Graph, probed: DryRun, problem: Problem, store: Store) -> None:
    """Store the measurement keys of ``problem``'s phases, for later use without the dry run.
    ``problem`` was made from ``probed`` without measurements."""
    entries = probed.recording.entries()
    found = {}
    for phase, (begin, end) in zip(problem.phases, phase_spans(entries), strict=True):
        calls = [call for _, call in entries[begin:end]]
        digests = {
            use.component: _component_digest(graph.components[use.component], calls, problem.allow)
            for use in phase.uses
        }
        activation = digest_of(
            [_environment(problem), sorted(digests.values()), phase.first_bytes, phase.steady_bytes]
        )
        found[phase.name] = asdict(
            Keys(
                activation,
                {name: digest_of([_environment(problem), of]) for name, of in digests.items()},
            )
        )
    store.put("shapes", _graph_key(problem), found)


def _known_keys(problem: Problem, store: Store) -> dict[str, Keys]:
    """By phase, the measurement keys stored for ``problem``'s graph and settings, else keys that
    only this graph with these settings has."""
    graph_key = _graph_key(problem)
    try:
        stored = TypeAdapter(dict[str, Keys]).validate_python(store.get("shapes", graph_key))
    except ValidationError:
        stored = {}
    return {
        phase.name: stored.get(phase.name) or _derived_keys([graph_key, phase.name], phase)
        for phase in problem.phases
    }


def _derived_keys(base: list[str], phase: PhaseNumbers) -> Keys:
    return Keys(
        digest_of(base), {use.component: digest_of([*base, use.component]) for use in phase.uses}
    )


def _component_digest(component: Component, calls: Sequence[Call], allow: Collection[str]) -> str:
    own = {id(call): call for call in calls if call.component == component.name}.values()
    # a component's name depends on the graph
    kinds = {digest_of(replace(call, component="").plain()) for call in own}
    made_of = component.config if component.has_config else component.source
    compiled = [component.compile] if component.is_compiled(allow) else []
    return digest_of([component.class_path, made_of, component.dtype, sorted(kinds), *compiled])


def _environment(problem: Problem) -> list[Any]:
    return [problem.hardware.device, problem.hardware.name, problem.versions]


def _graph_key(problem: Problem) -> str:
    compiled = [of for of in problem.allow if of == "compile"]
    return digest_of([_environment(problem), problem.graph_digest, problem.settings, *compiled])


def remember(solution: Solution, trace: Trace, store: Store) -> None:
    """Store what ``trace``, a run by ``solution``, measured, merged with the results of earlier
    runs."""
    keys, earlier = _known_keys(solution.problem, store), measurements(solution.problem, store)
    for name, new in measured_in(solution, trace).items():
        before = earlier.get(name, Measured())
        sizes = before.sizes | {
            part: max(nbytes, before.sizes.get(part, 0)) for part, nbytes in new.sizes.items()
        }
        if sizes != before.sizes:
            store.put("activation", keys[name].activation, sizes)
        old = {of: before.seconds.get(of, 0.0) for of in new.seconds}
        changed = {
            of: seconds
            for of, seconds in new.seconds.items()
            if abs(seconds - old[of]) > TOLERANCE * old[of]
        }
        for component in {of.partition("/")[0] for of in changed}:
            merged = {
                of: seconds
                for of, seconds in (before.seconds | changed).items()
                if of.partition("/")[0] == component
            }
            found = {of.removeprefix(component): seconds for of, seconds in merged.items()}
            store.put("seconds", keys[name].seconds[component], found)


def informed(problem: Problem, store: Store | None) -> Problem:
    """``problem`` with measured figures in place of traced ones where there are any; these phases
    have basis ``measured``."""
    earlier = measurements(problem, store) if store is not None else {}
    phases = (
        _measured_phase(problem, phase, earlier[phase.name]) if phase.name in earlier else phase
        for phase in problem.phases
    )
    return replace(problem, phases=tuple(phases)) if earlier else problem


def measurements(problem: Problem, store: Store) -> dict[str, Measured]:
    """The measurements stored for ``problem``'s phases, by phase.

    They may come from any graph with the same components at the same shapes, on the same device
    with the same versions. Entries that are not valid measurements are ignored.
    """
    found: dict[str, Measured] = {}
    for phase, keys in zip(problem.phases, _known_keys(problem, store).values(), strict=True):
        stored = _items(store.get("activation", keys.activation))
        sizes = {
            part: nbytes
            for part, nbytes in stored
            if part in PARTS and type(nbytes) is int and nbytes >= 0
        }
        seconds = {
            f"{use.component}{part}": figure
            for use in phase.uses
            for part, figure in _items(store.get("seconds", keys.seconds[use.component]))
            if part[:1] in ("", "/") and type(figure) is float and figure > 0
        }
        if sizes or seconds:
            found[phase.name] = Measured(sizes, seconds)
    return found


def _items(entry: Any) -> list[tuple[str, Any]]:
    return [*entry.items()] if isinstance(entry, dict) else []


def measured_in(solution: Solution, trace: Trace) -> dict[str, Measured]:
    """What ``trace`` measured, by phase, of the phases that ran as they were traced."""
    problem, found = solution.problem, dict[str, Measured]()
    comparable = _as_traced(solution)
    for planned, slot in trace.beside(solution.simulation.slots):
        if slot.part in ("first", "steady") and slot.phase in comparable:
            activation = max(0, planned.activation_bytes + slot.peak_bytes - planned.peak_bytes)
            found.setdefault(slot.phase, Measured()).sizes[f"{slot.part}_bytes"] = activation
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    groups = {
        (c.name, path): group.name
        for c in problem.components
        for group in c.groups
        for path in group.blocks
    }
    for event in trace.events:
        slot_plan = solution.plan.slots[event.slot]
        copied = {
            action.component for action in slot_plan.actions if isinstance(action, (Load, Stream))
        }
        name = event.component
        if event.kind == "block":
            if problem.component(name).granularity == "layers":
                continue  # its layer groups are not those of its blocks
            name = f"{name}/{groups[event.component, event.detail]}"
        elif event.kind != "run" or name in copied:
            continue
        durations[slot_plan.phase, name].append(event.end_seconds - event.start_seconds)
    for (phase, name), seconds in durations.items():
        if phase in found and (median := statistics.median(seconds)) > 0:
            found[phase].seconds[name] = median
    return found


def _as_traced(solution: Solution) -> set[str]:
    """Names of the phases that ran as traced: without a stage option, on the device, each component
    in the precision of the trace."""
    problem, other = solution.problem, dict(solution.plan.options)
    chosen = {component.name: component.variants[0] for component in solution.chosen.components}
    changed = {
        component.name
        for component in problem.components
        if (chosen[component.name].precision, chosen[component.name].device)
        != (component.variants[0].precision, "device")
    }
    return {
        p.name
        for p in problem.phases
        if p.stage not in other and not changed & {use.component for use in p.uses}
    }


def _measured_phase(problem: Problem, phase: PhaseNumbers, earlier: Measured) -> PhaseNumbers:
    """What was measured beyond the traced bytes counts in every call of the phase's trace."""
    first_bytes = max(phase.first_bytes, earlier.sizes.get("first_bytes", 0))
    steady_bytes = max(phase.steady_bytes, earlier.sizes.get("steady_bytes", 0))
    more = max(first_bytes - phase.first_bytes, steady_bytes - phase.steady_bytes)
    return replace(
        phase,
        uses=tuple(_measured_use(problem, use, earlier.seconds) for use in phase.uses),
        first_bytes=first_bytes,
        steady_bytes=steady_bytes,
        trace=phase.trace.with_scratch({use.component: more for use in phase.uses}),
        basis="measured",
    )


def _measured_use(problem: Problem, use: Use, earlier: Mapping[str, float]) -> Use:
    """``use`` with its seconds scaled so that a call, or a block of a group, takes what was
    measured."""
    groups = problem.component(use.component).groups
    rows = zip(groups, use.group_calls, use.seconds, strict=True)
    call_seconds = sum(len(group.blocks) * calls * seconds for group, calls, seconds in rows) / max(
        1, use.calls
    )
    factors = [_ratio(earlier.get(use.component), call_seconds)] * len(groups)
    for number, group in enumerate(groups):
        traced = [seconds for of, _, seconds in use.order if of == number] or [use.seconds[number]]
        if (block_seconds := earlier.get(f"{use.component}/{group.name}")) is not None:
            factors[number] = _ratio(block_seconds, statistics.median(traced))
    if use.layers is not None:
        total = sum(seconds for _, _, seconds in use.order)
        mean = sum(factors[number] * seconds for number, _, seconds in use.order) / max(
            total, 1e-12
        )
        layer_factors = [mean or factors[0]] * len(use.layers.seconds)
        use = replace(use, layers=_scaled(use.layers, layer_factors))
    return _scaled(use, factors)


def _scaled(use: Use, factors: Sequence[float]) -> Use:
    """``use`` with the seconds of each group multiplied by its factor."""
    order = tuple(
        (number, block, seconds * factors[number]) for number, block, seconds in use.order
    )
    return replace(
        use,
        seconds=tuple(
            seconds * factor for seconds, factor in zip(use.seconds, factors, strict=True)
        ),
        order=order,
    )


def _ratio(measured: float | None, expected: float) -> float:
    """The factor for expected seconds: 1 if nothing plausible was measured, or if the difference is
    only clock rounding."""
    if measured is None or expected <= 0 or not 1 / PLAUSIBLE < measured / expected < PLAUSIBLE:
        return 1.0
    factor = measured / expected
    return factor if abs(factor - 1) > 1e-6 else 1.0

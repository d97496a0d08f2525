"""Stores what runs measured for later plans: activation bytes per phase and slot part, seconds per call and component.

    planned peak    | weights | ring | values, live-in bytes | activation    |
    measured peak   | weights | ring | values, live-in bytes | activation'   |

Everything but the activation is known exactly (except for blocks smaller than the largest of their group), so the difference
of the peaks is the difference of the activations.

Of several runs the largest activation counts, and never less than the traced one: a plan counts every block with the bytes of
its group's largest, so a run of many blocks takes less than planned, which is not due to the activation and does not hold for
a plan that keeps few blocks. Seconds are taken from streamed blocks, group by group, and from calls of which no block was
copied in the slot (a streamed call also waits for copies); the seconds of a call are divided among its blocks in proportion to
their FLOPs. A stored figure is replaced when it changed by more than `TOLERANCE`, so that plans do not change with the noise
of every run.

Measurements are keyed by the component and the shapes of its calls (`shapes_of`), not by the graph:

    seconds      device, versions, component (class, config, dtype), its distinct calls in the phase
    activation   device, versions, components of the phase with their calls, and the activation that was traced there

Another graph with the same component at the same size has the same keys and uses the same measurements. If the dry run is no
longer available, the keys are derived from the graph, and nothing is shared.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphrun.files import Store, digest_of
from graphrun.graph.graph import Component, Graph
from graphrun.model.plan import Load, Stream
from graphrun.model.problem import PhaseNumbers, Problem, Use
from graphrun.model.solution import Solution
from graphrun.profile.problems import phase_spans
from graphrun.profile.recording import Call, Probed
from graphrun.trace import Trace

# For each phase: the key of its activation ("activation"), and for each component the key of its seconds ("seconds").
Keys = Mapping[str, Mapping[str, Any]]


def shapes_of(graph: Graph, probed: Probed, problem: Problem) -> dict[str, dict[str, Any]]:
    """The measurement keys of every phase of ``problem``, which was made from ``probed`` without measurements."""
    entries = probed.recording.entries()
    found: dict[str, dict[str, Any]] = {}
    for phase, (begin, end) in zip(problem.phases, phase_spans(entries), strict=True):
        calls = [call for _, call in entries[begin:end]]
        digests = {use.component: _component_digest(graph.components[use.component], calls) for use in phase.uses}
        found[phase.name] = {
            "activation": digest_of([_environment(problem), sorted(digests.values()), phase.first_bytes, phase.steady_bytes]),
            "seconds": {name: digest_of([_environment(problem), key]) for name, key in digests.items()},
        }
    return found


def keep_shapes(graph: Graph, probed: Probed, problem: Problem, store: Store) -> None:
    """Store the measurement keys of ``problem``'s phases, for later use without the dry run."""
    store.put("shapes", _graph_key(problem), shapes_of(graph, probed, problem))


def known_shapes(problem: Problem, store: Store) -> Keys:
    """The measurement keys stored for ``problem``'s graph and settings, else keys that only this graph with these settings
    has."""
    graph_key = _graph_key(problem)
    stored = store.get("shapes", graph_key)
    return {phase.name: _valid_keys(stored, phase.name) or _derived_keys(graph_key, phase.name) for phase in problem.phases}


def _valid_keys(stored: Any, phase: str) -> Mapping[str, Any] | None:
    found = stored.get(phase) if isinstance(stored, dict) else None
    if not isinstance(found, dict) or not isinstance(found.get("activation"), str) or not isinstance(found.get("seconds"), dict):
        return None
    return found if all(isinstance(key, str) for key in found["seconds"].values()) else None


class _DerivedKeys(dict[str, str]):
    """Keys of components, computed on first access."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = base

    def __missing__(self, name: str) -> str:
        return digest_of([self.base, name])


def _derived_keys(graph_key: str, phase: str) -> Mapping[str, Any]:
    return {"activation": digest_of([graph_key, phase]), "seconds": _DerivedKeys(digest_of([graph_key, phase, "seconds"]))}


def _component_digest(component: Component, calls: Sequence[Call]) -> str:
    kinds = {digest_of(_call_contents(call)) for call in {id(c): c for c in calls if c.component == component.name}.values()}
    made_of = component.config if component.has_config else component.source
    return digest_of([component.class_path, made_of, component.dtype, sorted(kinds)])


def _call_contents(call: Call) -> dict[str, Any]:
    """Everything that was traced of a call, except the component's name, which depends on the graph."""
    return {**call.plain(), "component": ""}


def _environment(problem: Problem) -> list[Any]:
    return [problem.hardware.device, problem.hardware.name, problem.versions]


def _graph_key(problem: Problem) -> str:
    return digest_of([_environment(problem), problem.graph_digest, problem.settings])


TOLERANCE = 0.02
PARTS = ("first_bytes", "steady_bytes")

# Largest plausible ratio between measured and expected seconds, either way. Figures beyond it are not used.
PLAUSIBLE = 100.0


def remember(solution: Solution, trace: Trace, store: Store) -> None:
    """Store what ``trace``, a run by ``solution``, measured, merged with the results of earlier runs."""
    keys, earlier = known_shapes(solution.problem, store), measurements(solution.problem, store)
    for name, new in measured_in(solution, trace).items():
        before = earlier.get(name, {})
        merged = _merge(before, new)
        sizes = {part: merged[part] for part in PARTS if part in merged}
        if sizes != {part: before[part] for part in PARTS if part in before}:
            store.put("activation", keys[name]["activation"], sizes)
        for component in {of.partition("/")[0] for of in new["seconds"]}:
            found, old = _seconds_of(merged, component), _seconds_of(before, component)
            if found != old:
                store.put("seconds", keys[name]["seconds"][component], found)


def informed(problem: Problem, store: Store | None) -> Problem:
    """``problem`` with measured figures in place of traced ones where there are any; these phases have basis ``measured``."""
    earlier = measurements(problem, store) if store is not None else {}
    if not earlier:
        return problem
    phases = tuple(
        _measured_phase(problem, phase, earlier[phase.name]) if phase.name in earlier else phase for phase in problem.phases
    )
    return replace(problem, phases=phases)


def measurements(problem: Problem, store: Store) -> dict[str, dict[str, Any]]:
    """The measurements stored for ``problem``'s phases, in the form of `measured_in`.

    They may come from any graph with the same components at the same shapes, on the same device with the same versions.
    Entries that are not valid measurements are ignored.
    """
    keys = known_shapes(problem, store)
    found: dict[str, dict[str, Any]] = {}
    for phase in problem.phases:
        sizes = store.get("activation", keys[phase.name]["activation"])
        kept = sizes.items() if isinstance(sizes, dict) else ()
        row: dict[str, Any] = {part: n for part, n in kept if part in PARTS and _is_size(n)}
        row["seconds"] = {}
        for use in phase.uses:
            times = store.get("seconds", keys[phase.name]["seconds"][use.component])
            for part, seconds in times.items() if isinstance(times, dict) else ():
                if part[:1] in ("", "/") and type(seconds) is float and seconds > 0:
                    row["seconds"][f"{use.component}{part}"] = seconds
        if row["seconds"] or len(row) > 1:
            found[phase.name] = row
    return found


def _seconds_of(row: Mapping[str, Any], component: str) -> dict[str, float]:
    """The seconds of one component in ``row``: ``""`` -> those of a call, ``"/group"`` -> those of a block."""
    parts = ((name.partition("/"), seconds) for name, seconds in row.get("seconds", {}).items())
    return {f"{slash}{group}": seconds for (owner, slash, group), seconds in parts if owner == component}


def _is_size(n: Any) -> bool:
    return type(n) is int and n >= 0


def measured_in(solution: Solution, trace: Trace) -> dict[str, dict[str, Any]]:
    """For each phase that ran as it was traced, what ``trace`` measured.

    ``first_bytes`` and ``steady_bytes``: bytes of activation in the first call and in later ones. ``seconds``: by component
    the seconds of one call, by ``component/group`` those of one block.
    """
    problem, found = solution.problem, dict[str, dict[str, Any]]()
    comparable = _as_traced(solution)
    for planned, slot in trace.beside(solution.simulation.slots):
        if slot.part in ("first", "steady") and slot.phase in comparable:
            activation = max(0, planned.activation_bytes + slot.peak_bytes - planned.peak_bytes)
            found.setdefault(slot.phase, {"seconds": {}})[f"{slot.part}_bytes"] = activation
    durations: dict[tuple[str, str], list[float]] = {}
    groups = {(c.name, path): group.name for c in problem.components for group in c.groups for path in group.blocks}
    for event in trace.events:
        slot_plan = solution.plan.slots[event.slot]
        copied = {action.component for action in slot_plan.actions if isinstance(action, (Load, Stream))}
        name = event.component
        if event.kind == "block":
            if problem.component(name).granularity == "layers":
                continue  # its layer groups are not those of its blocks
            name = f"{name}/{groups[event.component, event.detail]}"
        elif event.kind != "run" or name in copied:
            continue
        durations.setdefault((slot_plan.phase, name), []).append(event.end_seconds - event.start_seconds)
    for (phase, name), seconds in durations.items():
        if phase in found and statistics.median(seconds) > 0:
            found[phase]["seconds"][name] = statistics.median(seconds)
    return found


def _as_traced(solution: Solution) -> set[str]:
    """Names of the phases that ran as traced: without a stage option, on the device, each component in the precision of the
    trace."""
    problem, other = solution.problem, dict(solution.plan.options)
    chosen = {component.name: component.variants[0] for component in solution.chosen.components}
    changed = {
        component.name
        for component in problem.components
        if (chosen[component.name].precision, chosen[component.name].device) != (component.variants[0].precision, "device")
    }
    return {p.name for p in problem.phases if p.stage not in other and not changed & {use.component for use in p.uses}}


def _merge(earlier: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {"seconds": dict(earlier.get("seconds", {}))}
    for part in PARTS:
        if part in earlier or part in found:
            merged[part] = max(earlier.get(part, 0), found.get(part, 0))
    for component, seconds in found["seconds"].items():
        before = merged["seconds"].get(component)
        if before is None or abs(seconds - before) > TOLERANCE * before:
            merged["seconds"][component] = seconds
    return merged


def _measured_phase(problem: Problem, phase: PhaseNumbers, earlier: Mapping[str, Any]) -> PhaseNumbers:
    return replace(
        phase,
        uses=tuple(_measured_use(problem, use, earlier["seconds"]) for use in phase.uses),
        first_bytes=max(phase.first_bytes, earlier.get("first_bytes", 0)),
        steady_bytes=max(phase.steady_bytes, earlier.get("steady_bytes", 0)),
        basis="measured",
    )


def _measured_use(problem: Problem, use: Use, earlier: Mapping[str, float]) -> Use:
    """``use`` with its seconds scaled so that a call, or a block of a group, takes what was measured."""
    groups = problem.component(use.component).groups
    rows = zip(groups, use.group_calls, use.seconds, strict=True)
    call_seconds = sum(len(group.blocks) * calls * seconds for group, calls, seconds in rows) / max(1, use.calls)
    factors = [_ratio(earlier.get(use.component), call_seconds)] * len(groups)
    for number, group in enumerate(groups):
        traced = [seconds for of, _, seconds in use.order if of == number] or [use.seconds[number]]
        if (block_seconds := earlier.get(f"{use.component}/{group.name}")) is not None:
            factors[number] = _ratio(block_seconds, statistics.median(traced))
    if all(factor == 1.0 for factor in factors):
        return use
    if use.layers is not None:
        total = sum(seconds for _, _, seconds in use.order)
        mean = sum(factors[number] * seconds for number, _, seconds in use.order) / max(total, 1e-12)
        use = replace(use, layers=scaled(use.layers, mean or factors[0]))
    order = tuple((number, block, seconds * factors[number]) for number, block, seconds in use.order)
    return replace(use, seconds=tuple(seconds * factor for seconds, factor in zip(use.seconds, factors, strict=True)), order=order)


def scaled(use: Use, factor: float) -> Use:
    """``use`` with all its seconds multiplied by ``factor``."""
    order = tuple((number, block, seconds * factor) for number, block, seconds in use.order)
    return replace(use, seconds=tuple(seconds * factor for seconds in use.seconds), order=order)


def _ratio(measured: float | None, expected: float) -> float:
    """The factor for expected seconds: 1 if nothing plausible was measured, or if the difference is only clock rounding."""
    if measured is None or expected <= 0 or not 1 / PLAUSIBLE < measured / expected < PLAUSIBLE:
        return 1.0
    factor = measured / expected
    return factor if abs(factor - 1) > 1e-6 else 1.0

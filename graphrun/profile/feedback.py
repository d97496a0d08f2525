"""What runs measured, kept for the next plan: activations per phase and part, seconds per call and component.

    planned peak    | weights | ring | values, carry | activation       |
    measured peak   | weights | ring | values, carry | activation' |          all but the activation is known (but for blocks
                                                                              below their class's largest), so the difference
                                                                              of the peaks is the activation's

Kept per device, versions of the libraries, component and shapes (`estimator.shapes`). Of several runs the largest activation
counts, and never less than was traced: a class of blocks is planned with its largest, so a run of many blocks takes less than
planned, which is not the activation's doing and does not hold for a plan that keeps few. Seconds are those of streamed
blocks, class by class, and of calls of which no block was copied in the slot (a call that is streamed also waits); a call's
are shared among its blocks as its FLOPs are. A figure is replaced when it moved by more than `TOLERATED`, so that plans do
not change with every run's noise.

By what a measurement is known again: the component and the shapes of its calls, not the graph that they stand in.

    seconds      device, versions, component (class, config, dtype), its distinct calls in the phase
    activation   device, versions, components of the phase with their calls, and the activation that was traced there

Another graph with the same component at the same size has the same keys, and profits. Where the dry run is no longer at hand the
keys are the graph's own: nothing is shared then, and nothing is mixed up.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphrun.files import Store, digest_of
from graphrun.graph.graph import Component, Graph
from graphrun.model.choices import apply_choices
from graphrun.model.plan import Load, Plan, Stream
from graphrun.model.problem import PhaseNumbers, Problem, Use
from graphrun.profile.problems import phase_spans
from graphrun.profile.recording import Call, Probed
from graphrun.trace import Trace
from graphrun.verify.simulate import simulate

# Per phase: the key of its activation, and of each component's seconds.
Keys = Mapping[str, Mapping[str, Any]]


def shapes_of(graph: Graph, probed: Probed, problem: Problem) -> dict[str, dict[str, Any]]:
    """The keys of every phase of ``problem``, which was made from ``probed`` and not informed by measurements."""
    entries = probed.recording.entries()
    found: dict[str, dict[str, Any]] = {}
    for phase, (begin, end) in zip(problem.phases, phase_spans(entries), strict=True):
        calls = [call for _, call in entries[begin:end]]
        own = {use.component: _component(graph.components[use.component], calls) for use in phase.uses}
        found[phase.name] = {
            "activation": digest_of([_place(problem), sorted(own.values()), phase.first_bytes, phase.steady_bytes]),
            "seconds": {name: digest_of([_place(problem), key]) for name, key in own.items()},
        }
    return found


def keep_shapes(graph: Graph, probed: Probed, problem: Problem, store: Store) -> None:
    """Note the keys of ``problem``'s phases, for whoever has the problem alone."""
    store.put("shapes", _graph_key(problem), shapes_of(graph, probed, problem))


def known_shapes(problem: Problem, store: Store) -> Keys:
    """The keys that were noted for ``problem``'s graph and settings, else such as only this graph with these settings has."""
    own = _graph_key(problem)
    noted = store.get("shapes", own)
    return {phase.name: _sound(noted, phase.name) or _own(own, phase.name) for phase in problem.phases}


def _sound(noted: Any, phase: str) -> Mapping[str, Any] | None:
    found = noted.get(phase) if isinstance(noted, dict) else None
    if not isinstance(found, dict) or not isinstance(found.get("activation"), str) or not isinstance(found.get("seconds"), dict):
        return None
    return found if all(isinstance(key, str) for key in found["seconds"].values()) else None


class _Anyone(dict[str, str]):
    """Keys of components that are made when they are asked for."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = base

    def __missing__(self, name: str) -> str:
        return digest_of([self.base, name])


def _own(graph_key: str, phase: str) -> Mapping[str, Any]:
    return {"activation": digest_of([graph_key, phase]), "seconds": _Anyone(digest_of([graph_key, phase, "seconds"]))}


def _component(component: Component, calls: Sequence[Call]) -> str:
    kinds = {digest_of(_call(call)) for call in {id(c): c for c in calls if c.component == component.name}.values()}
    made_of = component.config if component.has_config else component.source
    return digest_of([component.class_path, made_of, component.dtype, sorted(kinds)])


def _call(call: Call) -> dict[str, Any]:
    """All that a call did but the name of its component, which is the graph's."""
    return {**call.plain(), "component": ""}


def _place(problem: Problem) -> list[Any]:
    return [problem.hardware.device, problem.hardware.name, problem.versions]


def _graph_key(problem: Problem) -> str:
    return digest_of([_place(problem), problem.graph_digest, problem.settings])


TOLERATED = 0.02
PARTS = ("first_bytes", "steady_bytes")

# A call that took this many times more or less than its FLOPs say was not of these numbers; such a figure is not used.
PLAUSIBLE = 100.0


def remember(problem: Problem, plan: Plan, trace: Trace, store: Store) -> None:
    """Keep what ``trace``, a run of ``plan``, measured, together with what earlier runs did."""
    keys, known = known_shapes(problem, store), measurements(problem, store)
    for name, fresh in measured_in(problem, plan, trace).items():
        before = known.get(name, {})
        merged = _merge(before, fresh)
        sizes = {part: merged[part] for part in PARTS if part in merged}
        if sizes != {part: before[part] for part in PARTS if part in before}:
            store.put("activation", keys[name]["activation"], sizes)
        for component in {of.partition("/")[0] for of in fresh["seconds"]}:
            found, old = _of(merged, component), _of(before, component)
            if found != old:
                store.put("seconds", keys[name]["seconds"][component], found)


def informed(problem: Problem, store: Store | None) -> Problem:
    """``problem`` with measured figures, where there are some, in place of traced ones; those phases have basis ``measured``."""
    known = measurements(problem, store) if store is not None else {}
    if not known:
        return problem
    phases = tuple(_phase(problem, phase, known[phase.name]) if phase.name in known else phase for phase in problem.phases)
    return replace(problem, phases=phases)


def measurements(problem: Problem, store: Store) -> dict[str, dict[str, Any]]:
    """What is kept for ``problem``'s phases, in the form of `measured_in`: from any graph with the same components at the same
    shapes, on the same device with the same versions. What does not look like a measurement is left out."""
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


def _of(row: Mapping[str, Any], component: str) -> dict[str, float]:
    """The seconds of one component in ``row``: ``""`` is a call's, ``"/class"`` a block's."""
    parts = ((name.partition("/"), seconds) for name, seconds in row.get("seconds", {}).items())
    return {f"{slash}{k}": seconds for (owner, slash, k), seconds in parts if owner == component}


def _is_size(n: Any) -> bool:
    return type(n) is int and n >= 0


def measured_in(problem: Problem, plan: Plan, trace: Trace) -> dict[str, dict[str, Any]]:
    """Per phase, where a run shows them: ``first_bytes`` and ``steady_bytes`` of activation; ``seconds``, by component those of one
    call, and by ``component/class`` those of one block."""
    found: dict[str, dict[str, Any]] = {}
    plain = _as_traced(problem, plan)
    for planned, slot in trace.beside(simulate(problem, plan).slots):
        if slot.part in ("first", "steady") and slot.phase in plain:
            activation = max(0, planned.activation_bytes + slot.peak_bytes - planned.peak_bytes)
            found.setdefault(slot.phase, {"seconds": {}})[f"{slot.part}_bytes"] = activation
    durations: dict[tuple[str, str], list[float]] = {}
    groups = {(c.name, path): k.name for c in problem.components for k in c.groups for path in k.blocks}
    for event in trace.events:
        slot_plan = plan.slots[event.slot]
        copied = {action.component for action in slot_plan.actions if isinstance(action, (Load, Stream))}
        name = event.component
        if event.kind == "block":
            if problem.component(name).granularity == "layers":
                continue  # their classes are other ones
            name = f"{name}/{groups[event.component, event.detail]}"
        elif event.kind != "run" or name in copied:
            continue
        durations.setdefault((slot_plan.phase, name), []).append(event.end_seconds - event.start_seconds)
    for (phase, name), seconds in durations.items():
        if phase in found and statistics.median(seconds) > 0:
            found[phase]["seconds"][name] = statistics.median(seconds)
    return found


def _as_traced(problem: Problem, plan: Plan) -> set[str]:
    """Phases that ran as they were traced: the stage plainly, on the device, each component in the precision it has there."""
    other = dict(plan.options)
    chosen = {component.name: component.variants[0] for component in apply_choices(problem, plan).components}
    changed = {
        component.name
        for component in problem.components
        if (chosen[component.name].precision, chosen[component.name].device) != (component.variants[0].precision, "device")
    }
    return {p.name for p in problem.phases if p.stage not in other and not changed & {use.component for use in p.uses}}


def _merge(known: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {"seconds": dict(known.get("seconds", {}))}
    for part in PARTS:
        if part in known or part in found:
            merged[part] = max(known.get(part, 0), found.get(part, 0))
    for component, seconds in found["seconds"].items():
        before = merged["seconds"].get(component)
        if before is None or abs(seconds - before) > TOLERATED * before:
            merged["seconds"][component] = seconds
    return merged


def _phase(problem: Problem, phase: PhaseNumbers, known: Mapping[str, Any]) -> PhaseNumbers:
    return replace(
        phase,
        uses=tuple(_use(problem, use, known["seconds"]) for use in phase.uses),
        first_bytes=max(phase.first_bytes, known.get("first_bytes", 0)),
        steady_bytes=max(phase.steady_bytes, known.get("steady_bytes", 0)),
        basis="measured",
    )


def _use(problem: Problem, use: Use, known: Mapping[str, float]) -> Use:
    """``use`` with its seconds scaled so that a call, or a block of a class, takes what was measured."""
    groups = problem.component(use.component).groups
    parts = zip(groups, use.group_calls, use.seconds, strict=True)
    whole = sum(len(k.blocks) * calls * seconds for k, calls, seconds in parts) / max(1, use.calls)
    by = [_ratio(known.get(use.component), whole)] * len(groups)
    for number, k in enumerate(groups):
        own = [seconds for of, _, seconds in use.order if of == number] or [use.seconds[number]]
        if (block_seconds := known.get(f"{use.component}/{k.name}")) is not None:
            by[number] = _ratio(block_seconds, statistics.median(own))
    if all(factor == 1.0 for factor in by):
        return use
    if use.layers is not None:
        times = sum(by[k] * seconds for k, _, seconds in use.order) / max(sum(seconds for _, _, seconds in use.order), 1e-12)
        use = replace(use, layers=scaled(use.layers, times or by[0]))
    order = tuple((k, block, seconds * by[k]) for k, block, seconds in use.order)
    return replace(use, seconds=tuple(seconds * factor for seconds, factor in zip(use.seconds, by, strict=True)), order=order)


def scaled(use: Use, by: float) -> Use:
    """``use`` with all its seconds multiplied."""
    order = tuple((k, block, seconds * by) for k, block, seconds in use.order)
    return replace(use, seconds=tuple(seconds * by for seconds in use.seconds), order=order)


def _ratio(measured: float | None, expected: float) -> float:
    """By what expected seconds are multiplied; 1 where nothing plausible was measured, or only what a clock rounds."""
    if measured is None or expected <= 0 or not 1 / PLAUSIBLE < measured / expected < PLAUSIBLE:
        return 1.0
    by = measured / expected
    return by if abs(by - 1) > 1e-6 else 1.0

"""What runs measured, kept for the next plan: activations per phase and part, seconds per call and component.

    planned peak    | weights | ring | values, carry | activation       |
    measured peak   | weights | ring | values, carry | activation' |          all but the activation is known to the byte,
                                                                              so the difference of the peaks is the activation's

Kept per device, versions of the libraries, graph, and settings, which say every shape. Of several runs the largest activation
counts. Seconds are those of streamed blocks, class by class, and of calls of which no block was copied in the slot (a call that is
streamed also waits); a call's are shared among its blocks as its FLOPs are. A figure is replaced when it moved by more than
`TOLERATED`, so that plans do not change with every run's noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graphrun.estimator.store import Store, digest_of
from graphrun.planner.plan import Load, Plan, Stream
from graphrun.planner.problem import PhaseNumbers, Problem, Use
from graphrun.planner.simulate import simulate
from graphrun.trace import Trace

TOLERATED = 0.02

# A call that took this many times more or less than its FLOPs say was not of these numbers; such a figure is not used.
PLAUSIBLE = 100.0


def remember(problem: Problem, plan: Plan, trace: Trace, store: Store) -> None:
    """Keep what ``trace``, a run of ``plan``, measured, together with what earlier runs did."""
    known = _read(problem, store)
    fresh = measured_in(problem, plan, trace)
    merged = {name: _merge(known.get(name, {}), found) for name, found in fresh.items()}
    if {**known, **merged} != known:
        store.put("measured", _key(problem), {"phases": {**known, **merged}})


def informed(problem: Problem, store: Store | None) -> Problem:
    """``problem`` with measured figures, where there are some, in place of traced ones; those phases have basis ``measured``."""
    known = _read(problem, store) if store is not None else {}
    if not known:
        return problem
    phases = tuple(_phase(problem, phase, known[phase.name]) if phase.name in known else phase for phase in problem.phases)
    return replace(problem, phases=phases)


def measured_in(problem: Problem, plan: Plan, trace: Trace) -> dict[str, dict[str, Any]]:
    """Per phase, where a run shows them: ``first_bytes`` and ``rest_bytes`` of activation; ``seconds``, by component those of one
    call, and by ``component/class`` those of one block."""
    found: dict[str, dict[str, Any]] = {}
    for planned, slot in zip(simulate(problem, plan).slots, trace.slots, strict=True):
        if slot.part in ("first", "rest"):
            activation = max(0, planned.activation_bytes + slot.peak_bytes - planned.peak_bytes)
            found.setdefault(slot.phase, {"seconds": {}})[f"{slot.part}_bytes"] = activation
    durations: dict[tuple[str, str], list[float]] = {}
    classes = {(c.name, path): k.name for c in problem.components for k in c.classes for path in k.blocks}
    for event in trace.events:
        slot_plan = plan.slots[event.slot]
        copied = {action.component for action in slot_plan.actions if isinstance(action, (Load, Stream))}
        name = event.component
        if event.kind == "block":
            name = f"{name}/{classes[event.component, event.detail]}"
        elif event.kind != "run" or name in copied:
            continue
        durations.setdefault((slot_plan.phase, name), []).append(event.end_seconds - event.start_seconds)
    for (phase, name), seconds in durations.items():
        if phase in found and statistics.median(seconds) > 0:
            found[phase]["seconds"][name] = statistics.median(seconds)
    return found


def _merge(known: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {"seconds": dict(known.get("seconds", {}))}
    for part in ("first_bytes", "rest_bytes"):
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
        first_bytes=known.get("first_bytes", phase.first_bytes),
        rest_bytes=known.get("rest_bytes", phase.rest_bytes),
        basis="measured",
    )


def _use(problem: Problem, use: Use, known: Mapping[str, float]) -> Use:
    """``use`` with its seconds scaled so that a call, or a block of a class, takes what was measured."""
    classes = problem.component(use.component).classes
    parts = zip(classes, use.class_calls, use.seconds, strict=True)
    whole = sum(len(k.blocks) * calls * seconds for k, calls, seconds in parts) / max(1, use.calls)
    by = [_ratio(known.get(use.component), whole)] * len(classes)
    for number, k in enumerate(classes):
        own = [seconds for of, _, seconds in use.order if of == number] or [use.seconds[number]]
        if (block_seconds := known.get(f"{use.component}/{k.name}")) is not None:
            by[number] = _ratio(block_seconds, statistics.median(own))
    if all(factor == 1.0 for factor in by):
        return use
    order = tuple((k, block, seconds * by[k]) for k, block, seconds in use.order)
    return replace(use, seconds=tuple(seconds * factor for seconds, factor in zip(use.seconds, by, strict=True)), order=order)


def _ratio(measured: float | None, expected: float) -> float:
    """By what expected seconds are multiplied; 1 where nothing plausible was measured, or only what a clock rounds."""
    if measured is None or expected <= 0 or not 1 / PLAUSIBLE < measured / expected < PLAUSIBLE:
        return 1.0
    by = measured / expected
    return by if abs(by - 1) > 1e-6 else 1.0


def _key(problem: Problem) -> str:
    place = [problem.hardware.device, problem.hardware.name]
    return digest_of([place, problem.versions, problem.graph_digest, problem.settings])


def _read(problem: Problem, store: Store) -> dict[str, dict[str, Any]]:
    """What is kept for ``problem``'s device, versions, graph and settings; what does not look like it is left out."""
    data = store.get("measured", _key(problem))
    phases = data.get("phases") if isinstance(data, dict) else None
    return {name: found for name, found in phases.items() if _sound(found)} if isinstance(phases, dict) else {}


def _sound(found: Any) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("seconds"), dict):
        return False
    sizes = [found[part] for part in ("first_bytes", "rest_bytes") if part in found]
    times = list(found["seconds"].values())
    return all(type(n) is int and n >= 0 for n in sizes) and all(type(t) is float and t > 0 for t in times)

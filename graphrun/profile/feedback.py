"""Store what runs measured for later plans: activation bytes and seconds.

Activation bytes are stored per phase and slot part, seconds per call and component.

    planned peak    | weights | ring buffer | values, inputs bytes | activation    |
    measured peak   | weights | ring buffer | values, inputs bytes | activation'   |

Everything but the activation is known exactly (except for blocks smaller than the largest of their
group). So the difference of the peaks is the difference of the activations.

Activations: the largest of several runs counts, and at least the traced one. A plan counts every
block with the bytes of its group's largest. A run of many blocks therefore takes less than planned,
which does not apply to a plan that keeps few blocks.

Seconds are measured for streamed blocks, group by group, and for calls without block copies in the
slot, since a streamed call also waits for copies. What reads took of a block's seconds on a CPU is
not counted: plans add it to the blocks that they stream (`Variant.lost_seconds`). The seconds of a
call are divided among its blocks in proportion to their FLOPs. A new figure replaces a stored one
if they differ by more than `TOLERANCE`, so plans do not change with the noise of every run.

Measurements are keyed by the component and the shapes of its calls (`store_measurement_keys`), not
by the graph:

    seconds      device, versions, component (class, config, dtype), its distinct calls in the phase
    activation   device, versions, components of the phase with their calls, traced activation

Another graph with the same component at the same size uses the same measurements. If the dry run is
no longer available, keys are derived from the graph, and nothing is shared.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from graphrun.disk_store import Store
from graphrun.files import digest_of
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Component
from graphrun.model.plan import Load, Stream
from graphrun.model.problem import ComponentNumbers, PhaseNumbers, Problem, Use
from graphrun.model.solution import Solution
from graphrun.profile.variants import streaming_code_seconds
from graphrun.reading import validated
from graphrun.trace import Trace

if TYPE_CHECKING:
    from graphrun.profile.recording import Call, DryRun

TOLERANCE = 0.02
PARTS = ("first_bytes", "steady_bytes")

# largest plausible ratio between measured and expected seconds, either way; others are not used
PLAUSIBLE = 100.0


@dataclass(frozen=True, slots=True)
class MeasurementKeys:
    """Keys of a phase's measurements: ``activation``, and component -> key of its ``seconds``."""

    activation: str
    seconds: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of a phase.

    ``sizes``: activation bytes in the first call and in later ones, by `PARTS`. ``seconds``: of one
    call by component, of one block by ``component/group``.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def store_measurement_keys(graph: Graph, dry_run: DryRun, problem: Problem, store: Store) -> None:
    """Store the measurement keys of ``problem``'s phases, for later use without the dry run.

    ``problem`` was made from ``dry_run`` without measurements.
    """
    from graphrun.profile.problems import phase_spans

    entries = dry_run.recording.entries()
    keys_by_phase = {}
    for phase, (begin, end) in zip(problem.phases, phase_spans(entries), strict=True):
        calls = [call for _, call in entries[begin:end]]
        digests = {
            use.component: _component_digest(graph.components[use.component], calls, problem.allow)
            for use in phase.uses
        }
        activation = digest_of(
            [_environment(problem), sorted(digests.values()), phase.first_bytes, phase.steady_bytes]
        )
        keys_by_phase[phase.name] = asdict(
            MeasurementKeys(
                activation,
                {
                    name: digest_of([_environment(problem), digest])
                    for name, digest in digests.items()
                },
            )
        )
    store.put_json("shapes", _graph_key(problem), keys_by_phase)


def _measurement_keys(problem: Problem, store: Store) -> dict[str, MeasurementKeys]:
    """Return the measurement keys of each phase: those stored for ``problem``, or derived ones."""
    graph_key = _graph_key(problem)
    try:
        stored_keys = validated(dict[str, MeasurementKeys], store.get_json("shapes", graph_key))
    except ValidationError:
        stored_keys = {}
    return {
        phase.name: stored_keys.get(phase.name) or _derived_keys([graph_key, phase.name], phase)
        for phase in problem.phases
    }


def _derived_keys(base: list[str], phase: PhaseNumbers) -> MeasurementKeys:
    return MeasurementKeys(
        digest_of(base), {use.component: digest_of([*base, use.component]) for use in phase.uses}
    )


def _component_digest(component: Component, calls: Sequence[Call], allow: Collection[str]) -> str:
    component_calls = {
        id(call): call for call in calls if call.component == component.name
    }.values()
    # without the name, which depends on the graph
    kinds = {digest_of(replace(call, component="").plain()) for call in component_calls}
    origin = component.config if component.has_config else component.source
    settings = [component.compile] if component.is_compiled(allow) else []
    settings += [] if component.keep_fp32 else ["no fp32"]
    return digest_of([component.class_path, origin, component.dtype, sorted(kinds), *settings])


def _environment(problem: Problem) -> list[Any]:
    return [problem.hardware.device, problem.hardware.name, problem.versions]


def _graph_key(problem: Problem) -> str:
    permissions = [permission for permission in problem.allow if permission == "compile"]
    return digest_of([_environment(problem), problem.graph_digest, problem.settings, *permissions])


def remember(solution: Solution, trace: Trace, store: Store) -> None:
    """Store the measurements of ``trace``, a run of ``solution``, merged with earlier ones."""
    keys, measurements_by_phase = (
        _measurement_keys(solution.problem, store),
        measurements(solution.problem, store),
    )
    for name, new in measure_phases(solution, trace).items():
        previous = measurements_by_phase.get(name, Measurements())
        sizes = previous.sizes | {
            part: max(nbytes, previous.sizes.get(part, 0)) for part, nbytes in new.sizes.items()
        }
        if sizes != previous.sizes:
            store.put_json("activation", keys[name].activation, sizes)
        old_seconds = {key: previous.seconds.get(key, 0.0) for key in new.seconds}
        changed_seconds = {
            key: seconds
            for key, seconds in new.seconds.items()
            if abs(seconds - old_seconds[key]) > TOLERANCE * old_seconds[key]
        }
        for component in {key.partition("/")[0] for key in changed_seconds}:
            merged_seconds = {
                key: seconds
                for key, seconds in (previous.seconds | changed_seconds).items()
                if key.partition("/")[0] == component
            }
            entry = {
                key.removeprefix(component): seconds for key, seconds in merged_seconds.items()
            }
            store.put_json("seconds", keys[name].seconds[component], entry)


def with_measurements(problem: Problem, store: Store | None) -> Problem:
    """Return ``problem`` with measured figures in place of traced ones where they exist."""
    measurements_by_phase = measurements(problem, store) if store is not None else {}
    phases = (
        _measured_phase(problem, phase, measurements_by_phase[phase.name])
        if phase.name in measurements_by_phase
        else phase
        for phase in problem.phases
    )
    return replace(problem, phases=tuple(phases)) if measurements_by_phase else problem


def measurements(problem: Problem, store: Store) -> dict[str, Measurements]:
    """Return the valid measurements stored for ``problem``, by phase."""
    measurements_by_phase: dict[str, Measurements] = {}
    for phase, keys in zip(problem.phases, _measurement_keys(problem, store).values(), strict=True):
        items = _items(store.get_json("activation", keys.activation))
        sizes = {
            part: nbytes
            for part, nbytes in items
            if part in PARTS and type(nbytes) is int and nbytes >= 0
        }
        seconds = {
            f"{use.component}{part}": figure
            for use in phase.uses
            for part, figure in _items(store.get_json("seconds", keys.seconds[use.component]))
            if part[:1] in ("", "/") and type(figure) is float and figure > 0
        }
        if sizes or seconds:
            measurements_by_phase[phase.name] = Measurements(sizes, seconds)
    return measurements_by_phase


def _items(entry: Any) -> list[tuple[str, Any]]:
    return [*entry.items()] if isinstance(entry, dict) else []


def measure_phases(solution: Solution, trace: Trace) -> dict[str, Measurements]:
    """Return the measurements in ``trace``, by phase, for phases that ran as they were traced."""
    problem, measured_phases = solution.problem, dict[str, Measurements]()
    comparable_phases = _phases_as_traced(solution)
    for planned_slot, measured_slot in trace.pairs_with(solution.simulation.slots):
        if measured_slot.part in ("first", "steady") and measured_slot.phase in comparable_phases:
            activation = max(
                0,
                planned_slot.activation_bytes + measured_slot.peak_bytes - planned_slot.peak_bytes,
            )
            measured_phases.setdefault(measured_slot.phase, Measurements()).sizes[
                f"{measured_slot.part}_bytes"
            ] = activation
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    groups = {
        (c.name, path): (group.name, lost_seconds)
        for c in solution.chosen.components
        for group, lost_seconds in zip(c.groups, _reading_seconds(problem, c), strict=True)
        for path in group.blocks
    }
    for event in trace.events:
        slot_plan = solution.plan.slots[event.slot]
        copied_components = {
            action.component for action in slot_plan.actions if isinstance(action, (Load, Stream))
        }
        name, elapsed = event.component, event.end_seconds - event.start_seconds
        if event.kind == "block":
            if problem.component(name).granularity == "layers":
                continue  # layer groups differ from block groups
            group_name, reading_seconds = groups[name, event.detail]
            name, elapsed = f"{name}/{group_name}", elapsed - reading_seconds
        elif event.kind != "run" or name in copied_components:
            continue
        durations[slot_plan.phase, name].append(elapsed)
    for (phase, name), seconds in durations.items():
        if phase in measured_phases and (median := statistics.median(seconds)) > 0:
            measured_phases[phase].seconds[name] = median
    return measured_phases


def _reading_seconds(problem: Problem, component: ComponentNumbers) -> list[float]:
    """Return per group the compute seconds that reads take from a streamed block."""
    lost_seconds = component.variants[0].lost_seconds or (0.0,) * len(component.groups)
    code_seconds = streaming_code_seconds(problem.hardware)  # not in the seconds of a block
    return [max(0.0, seconds - code_seconds) for seconds in lost_seconds]


def _phases_as_traced(solution: Solution) -> set[str]:
    """Return the phases that ran as traced: no options, on the device, in the same precision."""
    problem, options = solution.problem, dict(solution.plan.options)
    variants = {component.name: component.variants[0] for component in solution.chosen.components}
    changed_components = {
        component.name
        for component in problem.components
        if (variants[component.name].precision, variants[component.name].device)
        != (component.variants[0].precision, "device")
    }
    return {
        p.name
        for p in problem.phases
        if p.stage not in options and not changed_components & {use.component for use in p.uses}
    }


def _measured_phase(
    problem: Problem, phase: PhaseNumbers, measurement: Measurements
) -> PhaseNumbers:
    """Return ``phase`` as measured; bytes beyond the trace are added to each call in it."""
    first_bytes = max(phase.first_bytes, measurement.sizes.get("first_bytes", 0))
    steady_bytes = max(phase.steady_bytes, measurement.sizes.get("steady_bytes", 0))
    extra_bytes = max(first_bytes - phase.first_bytes, steady_bytes - phase.steady_bytes)
    return replace(
        phase,
        uses=tuple(_measured_use(problem, use, measurement.seconds) for use in phase.uses),
        first_bytes=first_bytes,
        steady_bytes=steady_bytes,
        trace=phase.trace.with_scratch({use.component: extra_bytes for use in phase.uses}),
        basis="measured",
    )


def _measured_use(problem: Problem, use: Use, measured_seconds: Mapping[str, float]) -> Use:
    """Return ``use`` with seconds scaled to measured seconds, per call or per block of a group."""
    groups = problem.component(use.component).groups
    rows = zip(groups, use.group_calls, use.seconds, strict=True)
    call_seconds = sum(len(group.blocks) * calls * seconds for group, calls, seconds in rows) / max(
        1, use.calls
    )
    factors = [_ratio(measured_seconds.get(use.component), call_seconds)] * len(groups)
    for number, group in enumerate(groups):
        traced = [seconds for group_number, _, seconds in use.order if group_number == number] or [
            use.seconds[number]
        ]
        if (block_seconds := measured_seconds.get(f"{use.component}/{group.name}")) is not None:
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


def _ratio(measured_seconds: float | None, expected_seconds: float) -> float:
    """Return the factor for expected seconds; 1 if implausible, or only clock rounding."""
    if (
        measured_seconds is None
        or expected_seconds <= 0
        or not 1 / PLAUSIBLE < measured_seconds / expected_seconds < PLAUSIBLE
    ):
        return 1.0
    factor = measured_seconds / expected_seconds
    return factor if abs(factor - 1) > 1e-6 else 1.0

"""Data of ``graphrun estimate``, JSON-ready: sizes and times, each with its basis; no budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from graphrun.disk_store import Store
from graphrun.graph.graph import Graph
from graphrun.graph.precisions import QUANTIZED
from graphrun.model.allocator import Caching, Native
from graphrun.model.choices import use_with
from graphrun.model.hardware import Hardware
from graphrun.model.problem import PhaseNumbers, Problem, ProblemLimits
from graphrun.model.ranges import probable_range
from graphrun.modules.build import meta_modules
from graphrun.modules.stored import holding
from graphrun.profile.corrections import CORRECTIONS
from graphrun.profile.feedback import (
    Measurements,
    measurements,
    store_measurement_keys,
    with_measurements,
)
from graphrun.profile.modes import Mode, estimate_mode, weight_bytes
from graphrun.profile.phase_memory import phase_memories_of
from graphrun.profile.problems import phase_spans, problem_of
from graphrun.profile.quantized import PRECISIONS, weights_by_precision
from graphrun.profile.recording import DryRun

HARDWARE_KEYS = (
    "name",
    "device",
    "basis",
    "capacity_bytes",
    "context_bytes",
    "workspace_bytes",
    "unified",
)


def survey(
    graph: Graph,
    dry_run: DryRun,
    hardware: Hardware,
    inputs: Mapping[str, Any],
    store: Store | None = None,
    mode: Mode | None = None,
) -> dict[str, Any]:
    """Return the estimate of ``graph`` on ``hardware``, JSON-ready.

    It has components (weights by precision, host bytes), phases (activation, values, FLOPs,
    seconds), the totals with everything resident, and the totals of ``mode`` (default: the same).
    Per phase, ``allocated_bytes`` is the peak of allocated bytes without weights,
    ``reserved_bytes`` the same as reserved with expandable segments, and ``reserved_native_bytes``
    what PyTorch reserves by default: native segments, unused ones of earlier phases included. All
    three include storages that are live at the phase's entry.
    Measurements of runs in ``store`` replace reserved bytes and seconds; ``traced`` then has the
    original figures.
    """
    problem = problem_of(
        graph, dry_run, hardware, ProblemLimits(hardware.capacity_bytes, 1), inputs
    )
    phases = phase_rows(problem, dry_run, hardware)
    if store is not None:
        store_measurement_keys(graph, dry_run, problem, store)
        phases = _with_measurements(phases, problem, store)
    mode = mode or Mode()
    with meta_modules(graph) as modules:
        components = [
            _component(graph, name, modules[name], dry_run, problem) for name in dry_run.profiles
        ]
        component_bytes = {
            name: weight_bytes(graph, name, modules[name], mode) for name in dry_run.profiles
        }
    return {
        "graph": graph.name,
        "absent": list(graph.absent),
        "settings": dict(problem.settings),
        "versions": dict(problem.versions),
        "hardware": {name: getattr(hardware, name) for name in HARDWARE_KEYS},
        "components": components,
        "phases": phases,
        "values": [
            {"name": value.name, "bytes": value.nbytes, "basis": value.basis}
            for value in problem.values
        ],
        "all_resident": {
            "weights_bytes": sum(component_bytes.values()),
            **_peaks(hardware, phases, [sum(component_bytes.values())] * len(phases)),
            "seconds": sum(row["seconds"] for row in phases),
        },
        "mode": _mode(graph, dry_run, hardware, mode, component_bytes, phases),
        "corrections": [c.name for c in CORRECTIONS] if hardware.convolution_scratch else [],
    }


def _mode(
    graph: Graph,
    dry_run: DryRun,
    hardware: Hardware,
    mode: Mode,
    component_bytes: Mapping[str, int],
    phases: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the totals of ``mode``, and its seconds by stage."""
    estimate = estimate_mode(graph, dry_run, hardware, mode, component_bytes)
    entries = dry_run.recording.entries()
    weights = [max(map(int, estimate.on_device[begin:end])) for begin, end in phase_spans(entries)]
    seconds = sum(estimate.seconds.values())
    likely = probable_range(hardware, seconds, seconds - estimate.compute_seconds)
    return {
        "name": mode.name,
        "formats": dict(mode.formats),
        "weights_bytes": sum(
            nbytes for name, nbytes in component_bytes.items() if name not in mode.cpu
        ),
        **_peaks(hardware, phases, weights),
        "copied_in_bytes": int(estimate.copied_in_bytes),
        "copied_out_bytes": int(estimate.copied_out_bytes),
        "ram_bytes": mode.ram_bytes if mode.name != "resident" else None,
        "read_bytes": int(estimate.read_bytes),
        "seconds": seconds,
        "seconds_range": likely.bounds,
        "range_reason": likely.reason,
        "stages": estimate.seconds,
    }


def _peaks(
    hardware: Hardware, phases: Sequence[Mapping[str, Any]], weights: Sequence[int]
) -> dict[str, int]:
    """Return the peaks over ``phases`` with ``weights``, the bytes of weights in each."""
    rows = list(zip(phases, weights, strict=True))
    return {
        "peak_bytes": hardware.context_bytes
        + hardware.workspace_bytes
        + max(row["reserved_bytes"] + nbytes for row, nbytes in rows),
        "reserved_bytes": hardware.workspace_bytes
        + max(row["reserved_native_bytes"] + nbytes for row, nbytes in rows),
        "allocated_bytes": hardware.workspace_bytes
        + max(row["allocated_bytes"] + nbytes for row, nbytes in rows),
    }


def _component(
    graph: Graph, name: str, module: nn.Module, dry_run: DryRun, problem: Problem
) -> dict[str, Any]:
    component, profile = graph.components[name], dry_run.profiles[name]
    sizes = weights_by_precision(module, component.dtype, allocated=True)
    files = holding(component, module)
    basis = {
        precision: "formula" if precision in QUANTIZED else "graph file" for precision in PRECISIONS
    }
    basis[component.dtype] = (
        "files" if files is not None and not files.absent_count else "graph file"
    )
    precisions = {component.dtype, *component.precision}
    numbers = next((c for c in problem.components if c.name == name), None)
    return {
        "name": name,
        "class": component.class_path,
        "parameters": profile.parameters,
        "dtype": component.dtype,
        "weights": {
            precision: {
                "bytes": sizes[precision],
                "allowed": precision in precisions,
                "basis": basis[precision],
            }
            for precision in PRECISIONS
        },
        "source": {**asdict(files), "dtypes": dict(files.dtypes), "read_as": component.dtype}
        if files is not None
        else None,
        "host_bytes": numbers.variants[0].host_bytes if numbers else 0,
        "blocks": [
            {"group": group.name, "count": len(group.blocks), "streamable": group.streamable}
            for group in profile.groups
        ],
        "basis": numbers.basis if numbers else "graph file",
    }


def phase_rows(problem: Problem, dry_run: DryRun, hardware: Hardware) -> list[dict[str, Any]]:
    """Return the rows of `survey` for the phases of ``problem``, which comes from ``dry_run``."""
    entries = dry_run.recording.entries()
    spans = phase_spans(entries)
    counting = phase_memories_of(dry_run.recording, spans, hardware)
    expandable = (
        phase_memories_of(dry_run.recording, spans, hardware, Caching)
        if hardware.caching_allocator
        else counting
    )
    native = (
        phase_memories_of(dry_run.recording, spans, hardware, Native, returns=False)
        if hardware.caching_allocator
        else counting
    )
    # scratch of quantized layers, in the components' first precision
    scratch = [
        max(problem.component(use.component).variants[0].scratch_bytes for use in phase.uses)
        for phase in problem.phases
    ]
    return [
        {
            "stage": phase.stage,
            "phase": phase.name,
            "components": [use.component for use in phase.uses],
            "calls": end - begin,
            "allocated_bytes": counting[n].peak_bytes + scratch[n],
            "reserved_bytes": expandable[n].peak_bytes + scratch[n],
            "reserved_native_bytes": native[n].peak_bytes + scratch[n],
            "values_bytes": problem.value_bytes(n),
            "input_bytes": phase.input_bytes,
            "flops": sum(call.flops for _, call in entries[begin:end]),
            "seconds": _seconds(problem, phase),
            "basis": phase.basis,
            "seconds_basis": problem.hardware.basis,
        }
        for n, (phase, (begin, end)) in enumerate(zip(problem.phases, spans, strict=True))
    ]


def _seconds(problem: Problem, phase: PhaseNumbers) -> float:
    result = 0.0
    for traced in phase.uses:
        component = problem.component(traced.component)
        groups, use = component.groups, use_with(traced, component, component.variants[0])
        result += sum(
            n * len(group.blocks) * s
            for n, group, s in zip(use.group_calls, groups, use.seconds, strict=True)
        )
    return result


def _with_measurements(
    rows: Sequence[dict[str, Any]], problem: Problem, store: Store
) -> list[dict[str, Any]]:
    """Return the phases' ``rows`` with the measurements in ``store``, where there are any."""
    measurements_by_phase = measurements(problem, store)
    measured_problem = with_measurements(problem, store)
    return [
        _measured(row, measured_problem, number, measurements_by_phase[row["phase"]])
        if row["phase"] in measurements_by_phase
        else row
        for number, row in enumerate(rows)
    ]


def _measured(
    row: dict[str, Any], problem: Problem, number: int, measurement: Measurements
) -> dict[str, Any]:
    """Return ``row`` with the ``measurement`` of its phase, which ``problem`` has too."""
    phase, result = problem.phases[number], dict(row)
    if measurement.sizes:
        result["reserved_bytes"] = (
            problem.value_bytes(number)
            + phase.input_bytes
            + max(phase.first_bytes, phase.steady_bytes)
        )
        result["basis"] = "measured"
    if {name.partition("/")[0] for name in measurement.seconds} >= set(row["components"]):
        result["seconds"] = _seconds(problem, phase)
        result["seconds_basis"] = "measured"
    return {**result, "traced": {name: row[name] for name in ("reserved_bytes", "seconds")}}

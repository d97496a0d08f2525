"""The data of ``graphrun estimate``: every size and time of a graph on a device, each with its basis, without any budget.

Combines what the dry run, the configurations and the allocator models give into JSON-ready data; `graphrun.report.estimate_screen`
formats it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from graphrun.files import Store
from graphrun.graph.graph import Graph
from graphrun.model.allocator import Caching, Native
from graphrun.model.problem import Hardware, PhaseNumbers, Problem
from graphrun.modules.build import meta_modules
from graphrun.modules.precisions import QUANTIZED
from graphrun.modules.stored import holding
from graphrun.profile.corrections import CORRECTIONS
from graphrun.profile.feedback import Measured, informed, keep_shapes, measurements
from graphrun.profile.phase_memory import phase_memories_of
from graphrun.profile.problems import Limits, phase_spans, problem_of
from graphrun.profile.quantized import PRECISIONS, weights_by_precision
from graphrun.profile.recording import DryRun


def survey(
    graph: Graph, probed: DryRun, hardware: Hardware, inputs: Mapping[str, Any], store: Store | None = None
) -> dict[str, Any]:
    """Components (weights by precision, host bytes), phases (activation, values, FLOPs, seconds) and the totals of keeping all
    on the device.

    ``allocated_bytes`` of a phase: peak of the bytes allocated beside weights. ``reserved_bytes``: the same as reserved with
    expandable segments, ``reserved_native_bytes`` with native ones. All three include what is live at the phase's entry.
    Measurements of runs in ``store`` replace reserved bytes and seconds; ``traced`` then has the original figures.
    """
    problem = problem_of(graph, probed, hardware, Limits(hardware.capacity_bytes, 1), inputs)
    phases = _phases(problem, probed, hardware)
    if store is not None:
        keep_shapes(graph, probed, problem, store)
        measured, with_measurements = measurements(problem, store), informed(problem, store)
        phases = [_measured(row, with_measurements, n, measured.get(row["phase"])) for n, row in enumerate(phases)]
    with meta_modules(graph) as modules:
        components = [_component(graph, name, modules[name], probed, problem) for name in probed.profiles]
    weights = sum(row["weights"][row["dtype"]]["bytes"] for row in components)
    outside = hardware.context_bytes + hardware.workspace_bytes
    return {
        "graph": graph.name,
        "settings": dict(problem.settings),
        "versions": dict(problem.versions),
        "hardware": {
            name: getattr(hardware, name) for name in ("name", "basis", "capacity_bytes", "context_bytes", "workspace_bytes")
        },
        "components": components,
        "phases": phases,
        "values": [{"name": value.name, "bytes": value.nbytes, "basis": value.basis} for value in problem.values],
        "all_resident": {
            "weights_bytes": weights,
            "peak_bytes": weights + outside + max(row["reserved_bytes"] for row in phases),
            "allocated_bytes": weights + hardware.workspace_bytes + max(row["allocated_bytes"] for row in phases),
            "seconds": sum(row["seconds"] for row in phases),
        },
        "corrections": [c.name for c in CORRECTIONS] if hardware.convolution_scratch else [],
    }


def _component(graph: Graph, name: str, module: nn.Module, probed: DryRun, problem: Problem) -> dict[str, Any]:
    component, profile = graph.components[name], probed.profiles[name]
    sizes = weights_by_precision(module, component.dtype, allocated=True)
    files = holding(component, module)
    basis = {precision: "formula" if precision in QUANTIZED else "declared" for precision in PRECISIONS}
    basis[component.dtype] = "files" if files is not None and not files.missing else "declared"
    allowed = {component.dtype, *component.precision}
    planned = next((c for c in problem.components if c.name == name), None)
    return {
        "name": name,
        "class": component.class_path,
        "parameters": profile.parameters,
        "dtype": component.dtype,
        "weights": {
            precision: {"bytes": sizes[precision], "allowed": precision in allowed, "basis": basis[precision]}
            for precision in PRECISIONS
        },
        "source": {**asdict(files), "dtypes": dict(files.dtypes), "read_as": component.dtype} if files is not None else None,
        "host_bytes": planned.variants[0].host_bytes if planned else 0,
        "blocks": [{"group": group.name, "count": len(group.blocks), "streamable": group.streamable} for group in profile.groups],
        "basis": planned.basis if planned else "declared",
    }


def _phases(problem: Problem, probed: DryRun, hardware: Hardware) -> list[dict[str, Any]]:
    entries = probed.recording.entries()
    spans = phase_spans(entries)
    counting = phase_memories_of(probed.recording, spans, hardware)
    expandable = phase_memories_of(probed.recording, spans, hardware, Caching) if hardware.caching_allocator else counting
    native = phase_memories_of(probed.recording, spans, hardware, Native) if hardware.caching_allocator else counting
    return [
        {
            "stage": phase.stage,
            "phase": phase.name,
            "components": [use.component for use in phase.uses],
            "calls": end - begin,
            "allocated_bytes": counting[n].peak_bytes,
            "reserved_bytes": expandable[n].peak_bytes,
            "reserved_native_bytes": native[n].peak_bytes,
            "values_bytes": problem.value_bytes(n),
            "live_in_bytes": phase.live_in_bytes,
            "flops": sum(flops for _, call in entries[begin:end] for _, flops in call.flops),
            "seconds": _seconds(problem, phase),
            "basis": phase.basis,
            "seconds_basis": problem.hardware.basis,
        }
        for n, (phase, (begin, end)) in enumerate(zip(problem.phases, spans, strict=True))
    ]


def _seconds(problem: Problem, phase: PhaseNumbers) -> float:
    result = 0.0
    for use in phase.uses:
        groups = problem.component(use.component).groups
        result += sum(n * len(group.blocks) * s for n, group, s in zip(use.group_calls, groups, use.seconds, strict=True))
    return result


def _measured(row: dict[str, Any], problem: Problem, number: int, measured: Measured | None) -> dict[str, Any]:
    """``row`` with the measurements of its phase, taken from ``problem``, where there are any."""
    if measured is None:
        return row
    phase, result = problem.phases[number], dict(row)
    if measured.sizes:
        result["reserved_bytes"] = problem.value_bytes(number) + phase.live_in_bytes + max(phase.first_bytes, phase.steady_bytes)
        result["basis"] = "measured"
    if {name.partition("/")[0] for name in measured.seconds} >= set(row["components"]):
        result["seconds"] = _seconds(problem, phase)
        result["seconds_basis"] = "measured"
    return {**result, "traced": {name: row[name] for name in ("reserved_bytes", "seconds")}}

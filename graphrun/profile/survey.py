"""What ``graphrun estimate`` knows: every size and time of a graph on a device, each with its basis, before any budget is given.

Decides nothing: it lays side by side what the dry run, the configurations and the allocator's models say. JSON-ready data; how it
is shown is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from graphrun.files import Store
from graphrun.graph.graph import Graph
from graphrun.model.allocator import Counting, Native
from graphrun.model.problem import Hardware, PhaseNumbers, Problem
from graphrun.modules.build import meta_module
from graphrun.modules.stored import holding
from graphrun.profile.corrections import CORRECTIONS
from graphrun.profile.feedback import informed, keep_shapes, measurements
from graphrun.profile.phase_memory import PhaseMemory, phase_memories_of
from graphrun.profile.problems import Limits, phase_spans, problem_of
from graphrun.profile.quantized import PRECISIONS, weights_by_precision
from graphrun.profile.recording import Call, Probed


def survey(
    graph: Graph, probed: Probed, hardware: Hardware, inputs: Mapping[str, Any], store: Store | None = None
) -> dict[str, Any]:
    """Components (weights by precision, host bytes), phases (activation, values, FLOPs, seconds) and the total of keeping all.

    ``allocated_bytes`` of a phase is the most allocated beside weights; ``reserved_bytes`` the same with expandable segments,
    ``reserved_native_bytes`` with native ones: what lived at its entry is in all three. What runs measured, as ``store``
    has it, takes the place of reserved bytes and seconds; ``traced`` has these as they were.
    """
    problem = problem_of(graph, probed, hardware, Limits(hardware.capacity_bytes, 1), inputs)
    phases = _phases(problem, probed, hardware)
    if store is not None:
        keep_shapes(graph, probed, problem, store)
        known, better = measurements(problem, store), informed(problem, store)
        phases = [_measured(row, better, n, known.get(row["phase"])) for n, row in enumerate(phases)]
    components = [_component(graph, name, probed, problem) for name in probed.profiles]
    weights = sum(row["weights"][row["dtype"]]["bytes"] for row in components)
    outside = hardware.context_bytes + hardware.workspace_bytes
    return {
        "graph": graph.name,
        "settings": dict(problem.settings),
        "versions": dict(problem.versions),
        "hardware": {
            "name": hardware.name,
            "basis": hardware.basis,
            "context_bytes": hardware.context_bytes,
            "workspace_bytes": hardware.workspace_bytes,
        },
        "components": components,
        "phases": phases,
        "values": [{"name": v.name, "bytes": v.nbytes, "basis": v.basis} for v in problem.values],
        "all_resident": {
            "weights_bytes": weights,
            "peak_bytes": weights + outside + max(row["reserved_bytes"] for row in phases),
            "allocated_bytes": weights + hardware.workspace_bytes + max(row["allocated_bytes"] for row in phases),
            "seconds": sum(row["seconds"] for row in phases),
        },
        "corrections": [c.name for c in CORRECTIONS] if hardware.convolution_scratch else [],
    }


def _component(graph: Graph, name: str, probed: Probed, problem: Problem) -> dict[str, Any]:
    declared = graph.components[name]
    module = probed.meta_modules[name] if name in probed.meta_modules else meta_module(declared, graph.trust)
    sizes = weights_by_precision(module, declared.dtype, allocated=True)
    allowed = {declared.dtype, *declared.precision}
    held = holding(declared, module)
    known = "files" if held is not None and not held.missing else "declared"
    numbers = next((c for c in problem.components if c.name == name), None)
    return {
        "name": name,
        "class": declared.class_path,
        "parameters": probed.profiles[name].parameters,
        "dtype": declared.dtype,
        "weights": {
            precision: {
                "bytes": sizes[precision],
                "allowed": precision in allowed,
                "basis": "formula" if precision in ("fp8", "int8", "nf4") else known if precision == declared.dtype else "declared",
            }
            for precision in PRECISIONS
        },
        "source": {**asdict(held), "dtypes": dict(held.dtypes), "read_as": declared.dtype} if held is not None else None,
        "host_bytes": numbers.variants[0].host_bytes if numbers else 0,
        "blocks": [{"class": k.name, "count": len(k.blocks), "streamable": k.streamable} for k in probed.profiles[name].groups],
        "basis": numbers.basis if numbers else "declared",
    }


def _phases(problem: Problem, probed: Probed, hardware: Hardware) -> list[dict[str, Any]]:
    entries = probed.recording.entries()
    spans = phase_spans(entries)
    counted = phase_memories_of(probed.recording, spans, replace(hardware, caching_allocator=False), Counting)
    expandable = phase_memories_of(probed.recording, spans, hardware)
    native = phase_memories_of(probed.recording, spans, hardware, Native) if hardware.caching_allocator else counted
    return [
        _phase(problem, phase, [call for _, call in entries[begin:end]], counted[n], expandable[n], native[n], n)
        for n, (phase, (begin, end)) in enumerate(zip(problem.phases, spans, strict=True))
    ]


def _phase(
    problem: Problem,
    phase: PhaseNumbers,
    calls: Sequence[Call],
    counted: PhaseMemory,
    expandable: PhaseMemory,
    native: PhaseMemory,
    number: int,
) -> dict[str, Any]:
    return {
        "stage": phase.stage,
        "phase": phase.name,
        "components": [use.component for use in phase.uses],
        "calls": len(calls),
        "allocated_bytes": _most(counted),
        "reserved_bytes": _most(expandable),
        "reserved_native_bytes": _most(native),
        "values_bytes": problem.value_bytes(number),
        "live_in_bytes": phase.live_in_bytes,
        "flops": sum(flops for call in calls for _, flops in call.flops),
        "seconds": _seconds(problem, phase),
        "basis": phase.basis,
        "seconds_basis": problem.hardware.basis,
    }


def _seconds(problem: Problem, phase: PhaseNumbers) -> float:
    found = 0.0
    for use in phase.uses:
        groups = problem.component(use.component).groups
        found += sum(n * len(k.blocks) * s for n, k, s in zip(use.group_calls, groups, use.seconds, strict=True))
    return found


def _measured(row: dict[str, Any], problem: Problem, number: int, known: Mapping[str, Any] | None) -> dict[str, Any]:
    """``row`` with what runs measured of its phase (``known``), which ``problem`` holds."""
    if known is None:
        return row
    phase, found = problem.phases[number], dict(row)
    if len(known) > 1:
        found["reserved_bytes"] = problem.value_bytes(number) + phase.live_in_bytes + max(phase.first_bytes, phase.steady_bytes)
        found["basis"] = "measured"
    if {name.partition("/")[0] for name in known["seconds"]} >= set(row["components"]):
        found["seconds"] = _seconds(problem, phase)
        found["seconds_basis"] = "measured"
    return {**found, "traced": {name: row[name] for name in ("reserved_bytes", "seconds")}}


def _most(phase_memory: PhaseMemory) -> int:
    return max(phase_memory.entry_bytes, phase_memory.first_bytes, phase_memory.steady_bytes)

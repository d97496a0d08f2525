"""The data of ``graphrun estimate``: every size and time of a graph on a device, each with its
basis, without any budget.

Combines what the dry run, the configurations and the allocator models give into JSON-ready data;
`graphrun.report.estimate_screen` formats it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from graphrun.files import Store
from graphrun.graph.graph import Graph
from graphrun.model.allocator import Caching, Native
from graphrun.model.choices import use_with
from graphrun.model.problem import Hardware, PhaseNumbers, Problem
from graphrun.modules.build import meta_modules
from graphrun.modules.precisions import QUANTIZED
from graphrun.modules.stored import holding
from graphrun.profile.corrections import CORRECTIONS
from graphrun.profile.feedback import Measured, informed, keep_shapes, measurements
from graphrun.profile.modes import Mode, estimated, weight_bytes
from graphrun.profile.phase_memory import phase_memories_of
from graphrun.profile.problems import Limits, phase_spans, problem_of
from graphrun.profile.quantized import PRECISIONS, weights_by_precision
from graphrun.profile.recording import DryRun


def survey(
    graph: Graph,
    probed: DryRun,
    hardware: Hardware,
    inputs: Mapping[str, Any],
    store: Store | None = None,
    chosen: Mode | None = None,
) -> dict[str, Any]:
    """Components (weights by precision, host bytes), phases (activation, values, FLOPs, seconds),
    the totals of keeping all on the device, and those of the mode ``chosen`` (by default the same).

    ``allocated_bytes`` of a phase: peak of the bytes allocated beside weights. ``reserved_bytes``:
    the same as reserved with expandable segments, ``reserved_native_bytes`` with native ones. All
    three include what is live at the phase's entry. Measurements of runs in ``store`` replace
    reserved bytes and seconds; ``traced`` then has the original figures.
    """
    problem = problem_of(graph, probed, hardware, Limits(hardware.capacity_bytes, 1), inputs)
    phases = _phases(problem, probed, hardware)
    if store is not None:
        keep_shapes(graph, probed, problem, store)
        measured, with_measurements = measurements(problem, store), informed(problem, store)
        phases = [
            _measured(row, with_measurements, n, measured.get(row["phase"]))
            for n, row in enumerate(phases)
        ]
    chosen = chosen or Mode()
    with meta_modules(graph) as modules:
        components = [
            _component(graph, name, modules[name], probed, problem) for name in probed.profiles
        ]
        held = {
            name: weight_bytes(graph, name, modules[name], chosen.formats)
            for name in probed.profiles
        }
    weights = sum(held.values())
    outside = hardware.context_bytes + hardware.workspace_bytes
    return {
        "graph": graph.name,
        "settings": dict(problem.settings),
        "versions": dict(problem.versions),
        "hardware": {
            name: getattr(hardware, name)
            for name in ("name", "basis", "capacity_bytes", "context_bytes", "workspace_bytes")
        },
        "components": components,
        "phases": phases,
        "values": [
            {"name": value.name, "bytes": value.nbytes, "basis": value.basis}
            for value in problem.values
        ],
        "all_resident": {
            "weights_bytes": weights,
            "peak_bytes": weights + outside + max(row["reserved_bytes"] for row in phases),
            "allocated_bytes": weights
            + hardware.workspace_bytes
            + max(row["allocated_bytes"] for row in phases),
            "seconds": sum(row["seconds"] for row in phases),
        },
        "mode": _mode(graph, probed, hardware, chosen, held, phases),
        "corrections": [c.name for c in CORRECTIONS] if hardware.convolution_scratch else [],
    }


def _mode(
    graph: Graph,
    probed: DryRun,
    hardware: Hardware,
    chosen: Mode,
    held: Mapping[str, int],
    phases: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """What the mode takes in all and by stage. ``held``: bytes of each component's weights."""
    found = estimated(graph, probed, hardware, chosen, held)
    entries = probed.recording.entries()
    weights = [max(map(int, found.on_device[begin:end])) for begin, end in phase_spans(entries)]
    own = [row["allocated_bytes"] for row in phases]
    outside = hardware.context_bytes + hardware.workspace_bytes
    rows = list(zip(phases, weights, strict=True))
    seconds = sum(found.seconds.values())
    return {
        "name": chosen.name,
        "formats": dict(chosen.formats),
        "weights_bytes": sum(nbytes for name, nbytes in held.items() if name not in chosen.cpu),
        "allocated_bytes": hardware.workspace_bytes
        + max(a + b for a, b in zip(own, weights, strict=True)),
        "peak_bytes": outside + max(row["reserved_bytes"] + nbytes for row, nbytes in rows),
        "copied_in_bytes": int(found.copied_in_bytes),
        "copied_out_bytes": int(found.copied_out_bytes),
        "seconds": seconds,
        "seconds_range": hardware.seconds_range(seconds),
        "stages": found.seconds,
    }


def _component(
    graph: Graph, name: str, module: nn.Module, probed: DryRun, problem: Problem
) -> dict[str, Any]:
    component, profile = graph.components[name], probed.profiles[name]
    sizes = weights_by_precision(module, component.dtype, allocated=True)
    files = holding(component, module)
    basis = {
        precision: "formula" if precision in QUANTIZED else "declared" for precision in PRECISIONS
    }
    basis[component.dtype] = "files" if files is not None and not files.missing else "declared"
    allowed = {component.dtype, *component.precision}
    planned = next((c for c in problem.components if c.name == name), None)
    return {
        "name": name,
        "class": component.class_path,
        "parameters": profile.parameters,
        "dtype": component.dtype,
        "weights": {
            precision: {
                "bytes": sizes[precision],
                "allowed": precision in allowed,
                "basis": basis[precision],
            }
            for precision in PRECISIONS
        },
        "source": {**asdict(files), "dtypes": dict(files.dtypes), "read_as": component.dtype}
        if files is not None
        else None,
        "host_bytes": planned.variants[0].host_bytes if planned else 0,
        "blocks": [
            {"group": group.name, "count": len(group.blocks), "streamable": group.streamable}
            for group in profile.groups
        ],
        "basis": planned.basis if planned else "declared",
    }


def _phases(problem: Problem, probed: DryRun, hardware: Hardware) -> list[dict[str, Any]]:
    entries = probed.recording.entries()
    spans = phase_spans(entries)
    counting = phase_memories_of(probed.recording, spans, hardware)
    expandable = (
        phase_memories_of(probed.recording, spans, hardware, Caching)
        if hardware.caching_allocator
        else counting
    )
    native = (
        phase_memories_of(probed.recording, spans, hardware, Native)
        if hardware.caching_allocator
        else counting
    )
    # of quantized layers, in the components' first precision
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


def _measured(
    row: dict[str, Any], problem: Problem, number: int, measured: Measured | None
) -> dict[str, Any]:
    """``row`` with the measurements of its phase, taken from ``problem``, where there are any."""
    if measured is None:
        return row
    phase, result = problem.phases[number], dict(row)
    if measured.sizes:
        result["reserved_bytes"] = (
            problem.value_bytes(number)
            + phase.input_bytes
            + max(phase.first_bytes, phase.steady_bytes)
        )
        result["basis"] = "measured"
    if {name.partition("/")[0] for name in measured.seconds} >= set(row["components"]):
        result["seconds"] = _seconds(problem, phase)
        result["seconds_basis"] = "measured"
    return {**result, "traced": {name: row[name] for name in ("reserved_bytes", "seconds")}}

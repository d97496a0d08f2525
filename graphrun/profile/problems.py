"""Turn a dry run into a `Problem` for one device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import chain, pairwise
from typing import Any

from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.graph.order import read_by
from graphrun.graph.parts import Reference
from graphrun.graph.settings import settings_of
from graphrun.model.allocator import ROUND_BYTES
from graphrun.model.directives import directed
from graphrun.model.hardware import Hardware
from graphrun.model.phase_trace import PhaseTrace
from graphrun.model.problem import (
    ComponentNumbers,
    ComponentPlacement,
    Directive,
    Granularity,
    PhaseNumbers,
    Problem,
    ProblemLimits,
    StageOption,
    ValueNumbers,
)
from graphrun.modules.source_files import commits_of
from graphrun.profile.pairs import spans_with_pairs
from graphrun.profile.phase_memory import phase_memories_of, pipeline_code_of
from graphrun.profile.phase_traces import phase_traces_of, traces_of_option
from graphrun.profile.recording import Call, ComponentProfile, DryRun, MemoryEvent, Recording
from graphrun.profile.uses import splittable_components, use_of
from graphrun.profile.variants import variants_of
from graphrun.units import round_up

LONGEST_PATTERN = 6  # maximum number of calls in a pattern of alternating components
ALTERNATIONS = 3  # components that alternate at least this many times are one phase


def problem_of(
    graph: Graph,
    dry_run: DryRun,
    hardware: Hardware,
    limits: ProblemLimits,
    inputs: Mapping[str, Any],
    stage_options: Iterable[tuple[str, str, DryRun]] = (),
    *,
    copyable: Collection[str] = (),
) -> Problem:
    """Return the problem of running ``graph``, as recorded in ``dry_run``, on ``hardware``.

    ``stage_options``: (stage, option, dry run with it) for each stage option that a plan may
    choose. ``copyable``: the components with copies of which a run of the problem can compute
    (`graphrun.model.copies`). Raises InputError for directives that cannot be obeyed.
    """
    components = _components(graph, dry_run, hardware, limits)
    copyable = copyable if limits.secondaries else ()
    phases, values = _phases(graph, dry_run, components, hardware, limits.allow, copyable)
    options = []
    for stage, name, option_run in stage_options:
        option_phases = _option_phases(
            graph, stage, option_run, components, hardware, values, limits.allow, copyable
        )
        if [replace(phase, trace=PhaseTrace()) for phase in option_phases] != [
            replace(phase, trace=PhaseTrace()) for phase in phases if phase.stage == stage
        ]:
            options.append(
                StageOption(stage, name, option_phases, graph.stage(stage).operation.options[name])
            )
    component_names = {use.component for phase in phases for use in phase.uses}
    splittable = splittable_components(
        (*phases, *(phase for option in options for phase in option.phases))
    )
    problem = Problem(
        graph=graph.name,
        graph_digest=graph.digest,
        settings=settings_of(graph, inputs),
        hardware=hardware,
        budget_bytes=limits.budget_bytes,
        ram_bytes=limits.ram_bytes,
        components=tuple(
            component if name in splittable else replace(component, layers=None)
            for name, component in components.items()
            if name in component_names
        ),
        phases=phases,
        values=values,
        versions=tuple((name, version(name)) for name in ("torch", "diffusers", "transformers")),
        dtypes=graph.dtypes,
        absent=graph.absent,
        reserve_bytes=graph.directives.reserve_bytes,
        pinned_bytes=limits.pinned_bytes,
        disk_bytes=limits.disk_bytes,
        runs=limits.runs,
        precedence=precedence_of(graph, phases),
        options=tuple(options),
        allow=tuple(sorted(limits.allow)),
        secondaries=limits.secondaries,
        commits=commits_of(graph.components[name] for name in sorted(component_names)),
    )
    placements: tuple[ComponentPlacement, ...] = ("keep", "exclude", "pin")
    if hardware.unified:  # no copies to page-lock; a graph may name some for cards
        placements = ("keep", "exclude")
    return directed(
        problem,
        [
            Directive(placement, name)
            for placement in placements
            for name in getattr(graph.directives, placement)
        ],
    )


def _components(
    graph: Graph, dry_run: DryRun, hardware: Hardware, limits: ProblemLimits
) -> dict[str, ComponentNumbers]:
    calls: dict[str, list[Call]] = defaultdict(list)
    for call in {id(call): call for _, call in dry_run.recording.entries()}.values():
        calls[call.component].append(call)

    def numbers(name: str, profile: ComponentProfile, granularity: Granularity) -> ComponentNumbers:
        variants = variants_of(
            graph.components[name],
            profile,
            calls[name],
            hardware,
            limits.backing_stores,
            limits.allow,
            granularity,
            limits.secondaries,
            keeps_quantized=limits.keeps_quantized,
        )
        compiled = graph.components[name].is_compiled(limits.allow)
        if compiled and not any(group.streamable for group in profile.groups):
            reason = (
                "has no repeated blocks, and a component is not compiled as a whole, since its "
                "weights are placed block by block"
            )
            raise InputError(
                f"components.{name}.compile: {name} {reason}: leave it out",
                graph.components[name].file_line,
            )
        split = None if compiled else profile.layer_split
        layers = numbers(name, split, "layers") if split is not None else None
        layers = layers if layers is not None and layers.streamable else None
        return ComponentNumbers(
            name,
            profile.parameters,
            profile.groups,
            variants,
            granularity=granularity,
            layers=layers,
        )

    return {name: numbers(name, profile, "blocks") for name, profile in dry_run.profiles.items()}


def option_phases_of(graph: Graph, allow: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Return (stage, option) that a plan may choose: same output, or its change is in ``allow``."""
    stage_options = [
        (stage.name, name, stage.operation.options[name])
        for stage in graph.stages
        for name in stage.options
    ]
    return tuple(
        (stage, name) for stage, name, needs in stage_options if not needs or needs in allow
    )


def _phases(
    graph: Graph,
    dry_run: DryRun,
    components: Mapping[str, ComponentNumbers],
    hardware: Hardware,
    allow: Collection[str],
    copyable: Collection[str],
) -> tuple[tuple[PhaseNumbers, ...], tuple[ValueNumbers, ...]]:
    compiled_names = {name for name in components if graph.components[name].is_compiled(allow)}
    recording = dry_run.recording.as_compiled(compiled_names)
    entries = recording.entries()
    spans = phase_spans(entries)
    stages = [entries[begin][0] for begin, _ in spans]
    values = _values(graph, recording, stages)
    memories = phase_memories_of(recording, spans, hardware)
    component_items = components.items()
    off_device_names = {
        name
        for name, component in component_items
        if any(variant.device != "device" for variant in component.variants)
    }
    secondary_names = {
        name
        for name, component in component_items
        if any(variant.secondary for variant in component.variants)
    }
    pipeline_code = (
        pipeline_code_of(recording, spans, hardware) if off_device_names else [0] * len(spans)
    )
    traces = phase_traces_of(recording, spans, hardware)
    pair_spans = spans_with_pairs(recording, spans) if copyable else set()
    phases = []
    for number, (stage, (begin, end), memory) in enumerate(
        zip(stages, spans, memories, strict=True)
    ):
        calls: dict[str, list[Call]] = defaultdict(list)
        for _, call in entries[begin:end]:
            calls[call.component].append(call)
        value_bytes = sum(
            value.nbytes for value in values if value.first_phase <= number <= value.last_phase
        )
        phase = PhaseNumbers(
            stage=stage,
            index=stages[:number].count(stage),
            uses=tuple(
                use_of(
                    components[name],
                    component_calls,
                    hardware,
                    transfer=name in secondary_names,
                    compiled=name in compiled_names,
                    has_pairs=(begin, end) in pair_spans
                    and name in copyable
                    and name not in compiled_names,
                )
                for name, component_calls in calls.items()
            ),
            input_bytes=max(0, memory.entry_bytes - value_bytes),
            first_bytes=max(0, memory.first_bytes - memory.entry_bytes),
            steady_bytes=max(0, memory.steady_bytes - memory.entry_bytes),
            pipeline_code_bytes=pipeline_code[number] if calls.keys() <= off_device_names else 0,
            trace=traces[number],
        )
        phases.append(phase)
    return tuple(phases), values


def _option_phases(
    graph: Graph,
    stage: str,
    option_run: DryRun,
    components: Mapping[str, ComponentNumbers],
    hardware: Hardware,
    values: Sequence[ValueNumbers],
    allow: Collection[str],
    copyable: Collection[str],
) -> tuple[PhaseNumbers, ...]:
    """Return the phases of ``stage`` in ``option_run``; ``values``: without the option."""
    phases, option_values = _phases(graph, option_run, components, hardware, allow, copyable)
    stage_phases = [phase for phase in phases if phase.stage == stage]
    storages = {value.name: value.storages for value in values}
    keys = [
        zip(value.storages, storages.get(value.name, ()), strict=False)
        for value in option_values
        if value.producer == stage
    ]
    traces = traces_of_option(
        [phase.trace for phase in stage_phases], dict(chain.from_iterable(keys))
    )
    return tuple(
        replace(phase, trace=trace) for phase, trace in zip(stage_phases, traces, strict=True)
    )


def precedence_of(
    graph: Graph, phases: Iterable[PhaseNumbers]
) -> tuple[tuple[str, str], ...] | None:
    """Return pairs of stages with ``phases`` (earlier, later); None if only one order is
    possible. A stage that calls no component has no phase: its producers come before its
    consumers."""
    stages = {phase.stage for phase in phases}

    def producers(name: str) -> Iterator[str]:
        for producer in graph.producers(name):
            yield from [producer] if producer in stages else producers(producer)

    names = [stage.name for stage in graph.stages if stage.name in stages]
    pairs = tuple(dict.fromkeys((producer, name) for name in names for producer in producers(name)))
    return None if all(pair in pairs for pair in pairwise(names)) else pairs


def phase_spans(entries: Sequence[tuple[str, Call]]) -> list[tuple[int, int]]:
    """Return ranges of ``entries``: calls of one component, or a loop alternating several."""
    names = [(stage, call.component) for stage, call in entries]
    spans: list[tuple[int, int]] = []
    begin = 0
    while begin < len(names):
        lengths = {
            period: _run_length(names, begin, period) for period in range(1, LONGEST_PATTERN + 1)
        }
        end = begin + max(
            length
            for period, length in lengths.items()
            if period == 1 or length >= ALTERNATIONS * period
        )
        spans.append((begin, end))
        begin = end
    return spans


def _run_length(names: Sequence[Any], begin: int, period: int) -> int:
    """Return how many entries from ``begin`` on repeat the first ``period``, within one stage."""
    end = begin + period
    while (
        end < len(names) and names[end] == names[end - period] and names[end][0] == names[begin][0]
    ):
        end += 1
    return min(end, len(names)) - begin


def _values(graph: Graph, recording: Recording, stages: Sequence[str]) -> tuple[ValueNumbers, ...]:
    """Return the values that later stages consume. ``stages``: the stage of each phase."""
    sizes = {
        item.key: round_up(item.nbytes, ROUND_BYTES)
        for item in recording.items
        if isinstance(item, MemoryEvent) and item.nbytes
    }
    order = {stage.name: number for number, stage in enumerate(graph.stages)}
    values = []
    for name, keys in recording.values.items():
        producer, output = name.split(".", 1)
        reference = Reference("stage", producer, output)
        consumers = tuple(stage.name for stage in graph.stages if reference in read_by(stage))
        phases = [
            n
            for n, stage in enumerate(stages)
            if consumers and order[producer] < order[stage] <= order[consumers[-1]]
        ]
        if phases and keys:
            values.append(
                ValueNumbers(
                    name,
                    sum(sizes[key] for key in keys),
                    producer,
                    consumers,
                    phases[0],
                    phases[-1],
                    storages=tuple(sorted(keys)),
                )
            )
    return tuple(values)

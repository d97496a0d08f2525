"""Turns a dry run into a `Problem` for one device: phases, activations, blocks, values and seconds, each with its basis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from typing import Any

from graphrun.graph.graph import Graph, Reference
from graphrun.graph.ops import OPERATIONS
from graphrun.graph.order import read_by
from graphrun.graph.settings import settings_of
from graphrun.model.allocator import ROUND_BYTES
from graphrun.model.directives import directed
from graphrun.model.problem import (
    ComponentNumbers,
    Directive,
    Granularity,
    Hardware,
    PhaseNumbers,
    Placement,
    Problem,
    StageOption,
    ValueNumbers,
)
from graphrun.modules.source_files import commits_of
from graphrun.profile.phase_memory import PhaseMemory, glue_of, phase_memories_of
from graphrun.profile.recording import Call, ComponentProfile, Event, Probed, Recording
from graphrun.profile.uses import splittable_components, use_of
from graphrun.profile.variants import variants_of
from graphrun.units import round_up

LONGEST_PATTERN = 6  # most calls in a pattern of alternating components
ALTERNATIONS = 3  # components that alternate at least this many times are one phase


@dataclass(frozen=True, slots=True)
class Limits:
    """What a problem depends on besides graph, inputs and hardware: budgets in bytes (None: no limit), the number of runs in a
    session, and the output changes that are allowed."""

    budget_bytes: int
    ram_bytes: int
    pinned_bytes: int | None = None
    disk_bytes: int | None = None
    runs: int = 1
    allow: tuple[str, ...] = ()

    @property
    def backing_stores(self) -> tuple[str, ...]:
        """The backing stores worth considering: pageable memory only where page-locked memory is limited."""
        return ("pinned", "disk") if self.pinned_bytes is None else ("pinned", "pageable", "disk")


def problem_of(
    graph: Graph,
    probed: Probed,
    hardware: Hardware,
    limits: Limits,
    inputs: Mapping[str, Any],
    stage_options: Iterable[tuple[str, str, Probed]] = (),
) -> Problem:
    """The problem of running ``graph``, as recorded in ``probed``, on ``hardware`` within ``limits``.

    ``stage_options``: (stage, option, dry run with it) for each stage option that a plan may choose. Raises InputError for
    directives that cannot be obeyed.
    """
    components = _components(graph, probed, hardware, limits)
    phases, values = _phases(graph, probed, components, hardware)
    options = []
    for stage, name, option_run in stage_options:
        own = tuple(phase for phase in _phases(graph, option_run, components, hardware)[0] if phase.stage == stage)
        if own != tuple(phase for phase in phases if phase.stage == stage):
            options.append(StageOption(stage, name, own, OPERATIONS[graph.stage(stage).op].options[name]))
    used = {use.component for phase in phases for use in phase.uses}
    splittable = splittable_components((*phases, *(phase for option in options for phase in option.phases)))
    problem = Problem(
        graph=graph.name,
        graph_digest=graph.digest,
        settings=settings_of(graph, inputs),
        hardware=hardware,
        budget_bytes=limits.budget_bytes,
        ram_bytes=limits.ram_bytes,
        components=tuple(of if name in splittable else replace(of, layers=None) for name, of in components.items() if name in used),
        phases=phases,
        values=values,
        versions=tuple((name, version(name)) for name in ("torch", "diffusers", "transformers")),
        reserve_bytes=graph.directives.reserve_bytes,
        pinned_bytes=limits.pinned_bytes,
        disk_bytes=limits.disk_bytes,
        runs=limits.runs,
        precedence=precedence_of(graph),
        options=tuple(options),
        allow=tuple(sorted(limits.allow)),
        commits=commits_of(graph.components[name] for name in sorted(used)),
    )
    directives = graph.directives
    placements: tuple[tuple[Placement, tuple[str, ...]], ...] = (
        ("keep", directives.keep),
        ("exclude", directives.exclude),
        ("pin", directives.pin),
    )
    return directed(problem, [Directive(placement, name) for placement, names in placements for name in names])


def _components(graph: Graph, probed: Probed, hardware: Hardware, limits: Limits) -> dict[str, ComponentNumbers]:
    calls: dict[str, list[Call]] = defaultdict(list)
    for call in {id(call): call for _, call in probed.recording.entries()}.values():
        calls[call.component].append(call)

    def numbers(name: str, profile: ComponentProfile, granularity: Granularity = "blocks") -> ComponentNumbers:
        more = calls.get(name, []), hardware
        variants = variants_of(
            graph.components[name],
            profile,
            *more,
            backing_stores=limits.backing_stores,
            allow=limits.allow,
            granularity=granularity,
        )
        return ComponentNumbers(name, profile.parameters, profile.groups, variants, granularity=granularity)

    found = {}
    for name, profile in probed.profiles.items():
        found[name] = numbers(name, profile)
        if profile.layer_split is not None:
            layers = numbers(name, profile.layer_split, "layers")
            found[name] = replace(found[name], layers=layers if layers.streamable else None)
    return found


def option_phases_of(graph: Graph, allow: Collection[str]) -> tuple[tuple[str, str], ...]:
    """(stage, option) for each stage option that ``graph`` lists and that does not change the output or is in ``allow``."""
    listed = [(stage.name, name, OPERATIONS[stage.op].options[name]) for stage in graph.stages for name in stage.options]
    return tuple((stage, name) for stage, name, needs in listed if not needs or needs in allow)


def _phases(
    graph: Graph, probed: Probed, components: Mapping[str, ComponentNumbers], hardware: Hardware
) -> tuple[tuple[PhaseNumbers, ...], tuple[ValueNumbers, ...]]:
    entries = probed.recording.entries()
    spans = phase_spans(entries)
    phase_memories = phase_memories_of(probed.recording, spans, hardware)
    glue = glue_of(probed.recording, spans, hardware) if _may_be_on_cpu(components) else [0] * len(spans)
    values = _values(graph, probed.recording, [entries[begin][0] for begin, _ in spans])
    phases = tuple(
        _phase(
            entries[begin:end],
            number - _first_of_stage(spans, entries, begin),
            phase_memories[number],
            glue[number],
            sum(value.nbytes for value in values if value.first_phase <= number <= value.last_phase),
            components,
            hardware,
        )
        for number, (begin, end) in enumerate(spans)
    )
    return phases, values


def precedence_of(graph: Graph) -> tuple[tuple[str, str], ...] | None:
    """Pairs of stages of which the first must run before the second; None if only one order of the stages is possible."""
    pairs = tuple((producer, stage.name) for stage in graph.stages for producer in graph.producers(stage.name))
    names = [stage.name for stage in graph.stages]
    return None if all(pair in pairs for pair in pairwise(names)) else pairs


def phase_spans(entries: Sequence[tuple[str, Call]]) -> list[tuple[int, int]]:
    """Half-open ranges of ``entries``, one for each phase: consecutive calls of one component, or a loop that alternates
    several."""
    names = [(stage, call.component) for stage, call in entries]
    spans: list[tuple[int, int]] = []
    begin = 0
    while begin < len(names):
        end = begin + max(_run_length(names, begin, 1), _longest_alternation(names, begin))
        spans.append((begin, end))
        begin = end
    return spans


def _run_length(names: Sequence[Any], begin: int, period: int) -> int:
    """How many entries, from ``begin`` on and within one stage, repeat their first ``period``."""
    end = begin + period
    while end < len(names) and names[end] == names[end - period] and names[end][0] == names[begin][0]:
        end += 1
    return min(end, len(names)) - begin


def _longest_alternation(names: Sequence[Any], begin: int) -> int:
    found = [
        (length, period)
        for period in range(2, LONGEST_PATTERN + 1)
        if (length := _run_length(names, begin, period)) >= ALTERNATIONS * period
    ]
    return max((length for length, _ in found), default=0)


def _first_of_stage(spans: Sequence[tuple[int, int]], entries: Sequence[tuple[str, Call]], begin: int) -> int:
    stage = entries[begin][0]
    return next(number for number, (start, _) in enumerate(spans) if entries[start][0] == stage)


def _phase(
    entries: Sequence[tuple[str, Call]],
    index: int,
    phase_memory: PhaseMemory,
    glue_bytes: int,
    value_bytes: int,
    components: Mapping[str, ComponentNumbers],
    hardware: Hardware,
) -> PhaseNumbers:
    calls: dict[str, list[Call]] = defaultdict(list)
    for _, call in entries:
        calls[call.component].append(call)
    return PhaseNumbers(
        stage=entries[0][0],
        index=index,
        uses=tuple(use_of(components[name], made, hardware, phase_memory) for name, made in calls.items()),
        live_in_bytes=max(0, phase_memory.entry_bytes - value_bytes),
        first_bytes=max(0, phase_memory.first_bytes - phase_memory.entry_bytes),
        steady_bytes=max(0, phase_memory.steady_bytes - phase_memory.entry_bytes),
        glue_bytes=glue_bytes if _may_be_on_cpu({name: components[name] for name in calls}, all) else 0,
    )


def _may_be_on_cpu(components: Mapping[str, ComponentNumbers], of: Callable[[Iterable[bool]], bool] = any) -> bool:
    return of(any(variant.device == "cpu" for variant in component.variants) for component in components.values())


def _values(graph: Graph, recording: Recording, stages: Sequence[str]) -> tuple[ValueNumbers, ...]:
    """The values that later stages consume. ``stages``: the stage of each phase."""
    sizes = {item.key: round_up(item.nbytes, ROUND_BYTES) for item in recording.items if isinstance(item, Event) and item.nbytes}
    order = {stage.name: number for number, stage in enumerate(graph.stages)}
    found = []
    for name, keys in recording.values.items():
        producer, output = name.split(".", 1)
        wanted = Reference("stage", producer, output)
        consumers = tuple(stage.name for stage in graph.stages if wanted in read_by(stage))
        phases = [n for n, stage in enumerate(stages) if consumers and order[producer] < order[stage] <= order[consumers[-1]]]
        if phases and keys:
            found.append(ValueNumbers(name, sum(sizes[key] for key in keys), producer, consumers, phases[0], phases[-1]))
    return tuple(found)

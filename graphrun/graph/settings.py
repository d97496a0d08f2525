"""The settings of a plan: the inputs that sizes and times depend on. Example: ``height=1024
image=1024x768 steps=30``; texts and seeds may differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphrun.errors import PlanError
from graphrun.graph.graph import Graph
from graphrun.graph.media import size_text
from graphrun.graph.ops import MEDIA_KINDS
from graphrun.graph.parts import Reference


def seeds_of(graph: Graph) -> set[str]:
    """Return the names of the inputs that are seeds."""
    arguments = (stage.arguments.get("seed") for stage in graph.stages)
    return {value.name for value in arguments if isinstance(value, Reference)}


def settings_of(graph: Graph, inputs: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the inputs that sizes and times depend on, as sorted (name, text).

    Texts and seeds are omitted, because pipelines pad texts to a fixed length. A list of texts
    counts by its length; an image, mask, video or audio counts by its size.
    """
    seeds = seeds_of(graph)
    names = (
        name for name in sorted(inputs) if not isinstance(inputs[name], str) and name not in seeds
    )
    return tuple((name, size_text(inputs[name])) for name in names)


def completed(
    graph: Graph, settings: Iterable[tuple[str, str]], inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``inputs`` completed from a plan's ``settings`` and the graph's defaults. Raises
    PlanError if an input that the plan depends on differs from the planned value."""
    plan_settings = dict(settings)
    definitions = {name: graph.inputs[name] for name in plan_settings}
    plain = {
        name: text
        for name, text in plan_settings.items()
        if not (definitions[name].accepts_list or definitions[name].type in MEDIA_KINDS)
        and (text != size_text(None) or definitions[name].required)
    }
    values = graph.resolve({**plain, **inputs})
    run_settings = dict(settings_of(graph, values))
    for name in sorted(plan_settings.keys() | run_settings.keys()):
        plan_text, run_text = (
            plan_settings.get(name, "one text"),
            run_settings.get(name, "one text"),
        )
        if plan_text != run_text:
            raise PlanError(
                f"the plan is for {name}={plan_text}, this run has {name}={run_text}: plan again, "
                f"or leave {name} out"
            )
    return values

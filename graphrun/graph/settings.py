"""The settings of a plan: those inputs that sizes and times depend on. Knows neither plans nor
problems.

height=1024 image=1024x768 steps=30        a plan is for these; texts and seeds may differ
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphrun.errors import PlanError
from graphrun.graph.graph import Graph, Reference
from graphrun.graph.media import told
from graphrun.graph.ops import MEDIA_KINDS


def seeds_of(graph: Graph) -> set[str]:
    """Names of the inputs that are seeds."""
    arguments = (stage.arguments.get("seed") for stage in graph.stages)
    return {value.name for value in arguments if isinstance(value, Reference)}


def settings_of(graph: Graph, inputs: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The inputs that sizes and times depend on, as sorted (name, text): all but texts and seeds.

    Pipelines pad texts to a fixed length; a list of texts counts by its length, an image, mask,
    video or audio by its size.
    """
    seeds = seeds_of(graph)
    kept = (
        name for name in sorted(inputs) if not isinstance(inputs[name], str) and name not in seeds
    )
    return tuple((name, told(inputs[name])) for name in kept)


def completed(
    graph: Graph, settings: Iterable[tuple[str, str]], inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """``inputs`` completed from a plan's ``settings`` and the graph's defaults.

    Raises PlanError where an input that the plan depends on differs from the planned one.
    """
    planned = dict(settings)
    own = {name: graph.inputs[name] for name in planned}
    plain = {
        name: text
        for name, text in planned.items()
        if not (own[name].many or own[name].type in MEDIA_KINDS)
        and (text != told(None) or own[name].required)
    }
    values = graph.resolve({**plain, **inputs})
    now = dict(settings_of(graph, values))
    for name in sorted(planned.keys() | now.keys()):
        there, here = planned.get(name, "one text"), now.get(name, "one text")
        if there != here:
            raise PlanError(
                f"the plan is for {name}={there}, this run has {name}={here}: plan again, or leave {name} out"
            )
    return values

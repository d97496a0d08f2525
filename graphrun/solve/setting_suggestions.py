"""Suggestions that need another dry run: another option of a stage, or a smaller image.

Each is estimated and solved before it is offered. `graphrun.solve.suggestions` has the suggestions
that need no dry run, because they change only numbers of the problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from graphrun.errors import GraphrunError
from graphrun.graph.graph import Graph
from graphrun.model.problem import Problem
from graphrun.solve.suggestions import Suggestion, predicted_seconds

SIZES = ("height", "width", "num_frames", "frames")
# sizes to try, in eighths of the original size; each is a dry run of some seconds
EIGHTHS = (7, 6, 5, 4, 3, 2)

EstimateFunction = Callable[[Mapping[str, Any], tuple[str, ...]], Problem]


def setting_suggestions(
    graph: Graph, inputs: Mapping[str, Any], allow: tuple[str, ...], estimate: EstimateFunction
) -> tuple[Suggestion, ...]:
    """Return the changes that each suffice alone: options of the graph without permission, and the
    largest size of `EIGHTHS` that fits.

    ``estimate(inputs, allow)`` returns the problem for these. A change whose dry run fails is left
    out.
    """
    return (*options_of(graph, inputs, allow, estimate), *_sizes(graph, inputs, allow, estimate))


def options_of(
    graph: Graph, inputs: Mapping[str, Any], allow: tuple[str, ...], estimate: EstimateFunction
) -> Iterator[Suggestion]:
    """Yield the options of the graph without permission, each with its predicted seconds."""
    stages_by_permission: dict[str, list[str]] = {}
    for stage in graph.stages:
        for name in stage.options:
            if (needs := stage.operation.options[name]) and needs not in allow:
                stages_by_permission.setdefault(needs, []).append(stage.name)
    for needs, stages in stages_by_permission.items():
        seconds = _seconds_or_none(lambda needs=needs: estimate(inputs, (*allow, needs)))  # type: ignore[misc]
        if seconds is not None:
            yield Suggestion(
                f"allow {needs} (of {', '.join(stages)})", (("--allow", needs),), seconds, True
            )


def _sizes(
    graph: Graph, inputs: Mapping[str, Any], allow: tuple[str, ...], estimate: EstimateFunction
) -> Iterator[Suggestion]:
    values = graph.for_planning(inputs)
    sizes = {
        name: values[name]
        for name in SIZES
        if name in graph.inputs and isinstance(values[name], int)
    }
    for eighths in EIGHTHS if sizes else ():
        smaller = {
            name: _scaled(value, eighths, graph.inputs[name].multiple_of or 1)
            for name, value in sizes.items()
        }
        seconds = _seconds_or_none(lambda smaller=smaller: estimate({**inputs, **smaller}, allow))  # type: ignore[misc]
        if seconds is not None:
            text = " ".join(f"{name}={value}" for name, value in smaller.items())
            yield Suggestion(
                f"make it smaller: {text}",
                tuple(("--set", f"{k}={v}") for k, v in smaller.items()),
                seconds,
                True,
            )
            return


def _scaled(value: int, eighths: int, step: int) -> int:
    return max(step, value * eighths // 8 // step * step)


def _seconds_or_none(problem: Callable[[], Problem]) -> float | None:
    try:
        return predicted_seconds(problem())
    except GraphrunError:
        return None

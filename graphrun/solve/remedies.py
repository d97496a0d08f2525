"""Repairs that need another dry run to verify: another option of a stage, or a smaller image.

Each is estimated and solved before it is offered. Repairs that the problem itself can verify are in
`graphrun.solve.repairs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from graphrun.errors import GraphrunError
from graphrun.graph.graph import Graph
from graphrun.model.problem import Problem
from graphrun.solve.repairs import Repair, predicted_seconds

SIZES = ("height", "width", "num_frames", "frames")
# of the original size, largest first; each is a dry run of some seconds
EIGHTHS = (
    7,
    6,
    5,
    4,
    3,
    2,
)

Estimate = Callable[[Mapping[str, Any], tuple[str, ...]], Problem]


def remedies(
    graph: Graph, inputs: Mapping[str, Any], allow: tuple[str, ...], estimate: Estimate
) -> tuple[Repair, ...]:
    """Changes that suffice alone: options that the graph lists and that were not allowed, and the
    largest size of `EIGHTHS` that fits.

    ``estimate(inputs, allow)`` returns the problem for these. A change whose dry run fails is left
    out.
    """
    return (*options_of(graph, inputs, allow, estimate), *_sizes(graph, inputs, allow, estimate))


def options_of(
    graph: Graph, inputs: Mapping[str, Any], allow: tuple[str, ...], estimate: Estimate
) -> Iterator[Repair]:
    """Options that the graph lists and that were not allowed, each with what it takes."""
    wanted: dict[str, list[str]] = {}
    for stage in graph.stages:
        for name in stage.options:
            if (needs := stage.operation.options[name]) and needs not in allow:
                wanted.setdefault(needs, []).append(stage.name)
    for needs, stages in wanted.items():
        seconds = _seconds_or_none(lambda needs=needs: estimate(inputs, (*allow, needs)))  # type: ignore[misc]
        if seconds is not None:
            yield Repair(
                f"allow {needs} (of {', '.join(stages)})", (("--allow", needs),), seconds, True
            )


def _sizes(
    graph: Graph, inputs: Mapping[str, Any], allow: tuple[str, ...], estimate: Estimate
) -> Iterator[Repair]:
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
            yield Repair(
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

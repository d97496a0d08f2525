"""The topological order of stages, and the values that a stage reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from graphlib import TopologicalSorter

from graphrun.graph.parts import Reference, Stage


def order_stages(stages: Mapping[str, Stage]) -> tuple[Stage, ...]:
    """Return ``stages`` in topological order, ties in the order of ``stages``.

    Raises `graphlib.CycleError` for a cycle; its second argument lists the members, the first one
    again at the end.
    """
    producers = {
        name: [r.name for r in stage.references if r.kind == "stage" and r.name in stages]
        for name, stage in stages.items()
    }
    TopologicalSorter(producers).prepare()
    order: dict[str, Stage] = {}
    while len(order) < len(stages):
        name = next(
            name
            for name in stages
            if name not in order and all(producer in order for producer in producers[name])
        )
        order[name] = stages[name]
    return tuple(order.values())


def read_by(stage: Stage) -> frozenset[Reference]:
    """Return the references that ``stage`` reads not only for shapes (`Operation.outlined`)."""
    outlined = stage.operation.outlined
    numbers = {name: value for name, value in stage.arguments.items() if name not in outlined}
    return frozenset(replace(stage, arguments=numbers).references)

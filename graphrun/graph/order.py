"""The topological order of stages, and the values that a stage reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from graphlib import TopologicalSorter

from graphrun.graph.graph import Reference, Stage


def order_stages(stages: Mapping[str, Stage]) -> tuple[Stage, ...]:
    """``stages`` in topological order, ties in the order of ``stages``.

    Raises `graphlib.CycleError` where there is a cycle; its second argument names the members, the
    first one again at the end.
    """
    producers = {
        name: [r.name for r in of.references if r.kind == "stage" and r.name in stages]
        for name, of in stages.items()
    }
    TopologicalSorter(producers).prepare()
    found: dict[str, Stage] = {}
    while len(found) < len(stages):
        name = next(
            name
            for name in stages
            if name not in found and all(producer in found for producer in producers[name])
        )
        found[name] = stages[name]
    return tuple(found.values())


def read_by(stage: Stage) -> frozenset[Reference]:
    """The references whose values ``stage`` reads; of the others the op reads only shapes and
    dtypes (`Operation.outlined`)."""
    outlined = stage.operation.outlined
    numbers = {name: value for name, value in stage.arguments.items() if name not in outlined}
    return frozenset(replace(stage, arguments=numbers).references)

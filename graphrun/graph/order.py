"""The topological order of stages, cycles among them, and the values that a stage reads."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from graphrun.graph.graph import Reference, Stage
from graphrun.graph.ops import OPERATIONS


def order_stages(stages: Mapping[str, Stage]) -> tuple[Stage, ...]:
    """``stages`` in topological order, ties in the order of ``stages``. Raises CycleError where there is a cycle."""
    names, sorter = list(stages), TopologicalSorter(_producers(stages))
    sorter.prepare()
    found: list[Stage] = []
    waiting: list[int] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(waiting, names.index(name))
        name = names[heapq.heappop(waiting)]
        found.append(stages[name])
        sorter.done(name)
    return tuple(found)


def find_cycle(stages: Mapping[str, Stage]) -> tuple[str, ...]:
    """The stages of a cycle, each the producer of the next; empty where there is none."""
    try:
        TopologicalSorter(_producers(stages)).prepare()
    except CycleError as error:
        members = tuple(error.args[1][:-1])
        first = members.index(min(members, key=list(stages).index))
        return members[first:] + members[:first]
    return ()


def read_by(stage: Stage) -> frozenset[Reference]:
    """The references whose values ``stage`` reads; of the others the op reads only shapes and dtypes (`Operation.outlined`)."""
    outlined = OPERATIONS[stage.op].outlined
    numbers = {name: value for name, value in stage.arguments.items() if name not in outlined}
    return frozenset(replace(stage, arguments=numbers).references)


def _producers(stages: Mapping[str, Stage]) -> dict[str, list[str]]:
    return {name: [r.name for r in stage.references if r.kind == "stage" and r.name in stages] for name, stage in stages.items()}

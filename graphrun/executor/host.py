"""The weights of a graph's components in host memory, ready to run. Built once; good for any number of runs with equal numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from graphrun.components.build import build, build_part, ghost
from graphrun.errors import InputError
from graphrun.executor.device import Device
from graphrun.executor.residency import Residency
from graphrun.graph.graph import Graph
from graphrun.planner.problem import Problem


class Host:
    """Components in arenas, pinned for ``device`` where their home is pinned memory; and tokenizers and schedulers.

    ``modules``: components that were built before; the others are built here, one after another. A module handed in keeps its
    values, but its tensors are views of the arena from now on. Raises InputError where a module is not what ``problem`` describes.
    """

    def __init__(self, graph: Graph, problem: Problem, device: Device, modules: Mapping[str, nn.Module] | None = None) -> None:
        self._numbers = _shape(problem)
        given = modules or {}
        self.modules: dict[str, nn.Module] = {}
        self.residencies: dict[str, Residency] = {}
        for numbers in problem.components:
            module = given[numbers.name] if numbers.name in given else build(graph.component(numbers.name), graph)
            self.modules[numbers.name] = module
            self.residencies[numbers.name] = Residency(module, numbers, device)
        for name, component in graph.components.items():
            if name not in self.modules:  # a stage may list it, but no call enters it
                self.modules[name] = ghost(component, graph.allow)
        self.parts: dict[str, Any] = {name: build_part(part, graph) for name, part in graph.parts.items()}

    def refuse_other(self, problem: Problem) -> None:
        """Raises InputError unless ``problem`` has the graph and the blocks that this was built for."""
        if _shape(problem) != self._numbers:
            raise InputError("the host memory was built for another graph or other blocks; build it again for this problem")


def _shape(problem: Problem) -> tuple[Any, ...]:
    return problem.graph_digest, tuple((c.name, c.classes, c.variants) for c in problem.components)

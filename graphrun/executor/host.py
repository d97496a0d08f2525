"""The weights of components in host memory, ready to run. Built once; good for any number of runs with equal numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from graphrun.components.build import build, build_part, ghost
from graphrun.errors import InputError
from graphrun.executor.device import Device
from graphrun.executor.movers import refuse_movers
from graphrun.executor.residency import Residency
from graphrun.graph.graph import Graph
from graphrun.planner.problem import ComponentNumbers, Problem


class Host:
    """``modules`` in arenas, pinned for ``device`` where their home is pinned memory.

    A module keeps its values, but its tensors are views of the arena from now on. ``modules`` holds all components of ``problem``.
    Raises InputError where a module is not what ``problem`` describes, or where something else moves it too.
    """

    def __init__(self, modules: Mapping[str, nn.Module], problem: Problem, device: Device) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.residencies: dict[str, Residency] = {}
        self.parts: dict[str, Any] = {}
        self.ghosts: dict[str, nn.Module] = {}
        self._shape = _shape(problem)
        refuse_movers(modules)
        for numbers in problem.components:
            self._add(modules[numbers.name], numbers, device)

    @classmethod
    def of_graph(cls, graph: Graph, problem: Problem, device: Device, modules: Mapping[str, nn.Module] | None = None) -> Host:
        """The components of ``graph``, those in ``modules`` as they are, the others built one after another; and its parts."""
        host = cls({}, replace(problem, components=()), device)
        host._shape = _shape(problem)
        given = modules or {}
        refuse_movers(given)
        for numbers in problem.components:
            module = given[numbers.name] if numbers.name in given else build(graph.component(numbers.name), graph)
            host._add(module, numbers, device)
        host.ghosts = {name: ghost(component, graph.allow) for name, component in graph.components.items()}
        host.modules = {**host.ghosts, **host.modules}  # a stage may list a component that no call enters
        host.parts = {name: build_part(part, graph) for name, part in graph.parts.items()}
        return host

    def _add(self, module: nn.Module, numbers: ComponentNumbers, device: Device) -> None:
        self.modules[numbers.name] = module
        self.residencies[numbers.name] = Residency(module, numbers, device)

    def refuse_other(self, problem: Problem) -> None:
        """Raises InputError unless ``problem`` has the graph and the blocks that this was built for."""
        if _shape(problem) != self._shape:
            raise InputError("the host memory was built for another graph or other blocks; build it again for this problem")


def _shape(problem: Problem) -> tuple[Any, ...]:
    return problem.graph_digest, tuple((c.name, c.classes, c.variants) for c in problem.components)

"""The graphs and LoRAs that a server offers, read at the start and again on SIGHUP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from graphrun.errors import InputError
from graphrun.graph.loras import (
    LoraFile,
    LoraUse,
    known_permissions,
    lora_files,
    with_loras,
)
from graphrun.serve.bodies import Body, body_model

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph
    from graphrun.serve.bodies import PictureRequest
    from graphrun.serve.settings import Settings


@dataclass(frozen=True, slots=True)
class GraphVariant:
    """A graph as a request uses it. ``edition``: counts the changes of its file, so that requests
    which were admitted before a change keep their graph."""

    graph: Graph
    edition: int = 0
    loras: tuple[LoraUse, ...] = ()

    @classmethod
    def of(cls, request: PictureRequest) -> GraphVariant:
        assert request.definition is not None
        return cls(request.definition, request.shape.edition, request.shape.loras)

    def settings_of(self, settings: Settings, graph: Graph) -> Settings:
        """Return ``settings`` for ``graph``, of this variant: LoRAs leave fewer precisions to
        allow."""
        if not self.loras:
            return settings
        allow = known_permissions(graph, settings.budgets.get("allow", ()))
        return replace(settings, budgets={**settings.budgets, "allow": allow})

    @property
    def weights(self) -> tuple[object, ...]:
        """What two variants have in common if they have the same weights."""
        return self.graph.name, self.edition, self.loras


class Variants:
    """The graphs of variants in a worker or planner process. One graph for each edition, since a
    graph keeps the modules that were built for it."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[str, int], Graph] = {}

    def graph_of(self, variant: GraphVariant) -> Graph:
        """Return the graph of ``variant``, with its LoRAs."""
        graph = self._graphs.setdefault((variant.graph.name, variant.edition), variant.graph)
        return with_loras(graph, variant.loras)


@dataclass(frozen=True, slots=True)
class Catalog:
    """``editions`` and ``bodies`` (the models of requests): by the name of a graph."""

    graphs: Mapping[str, Graph]
    loras: Mapping[str, LoraFile] = field(default_factory=dict)
    editions: Mapping[str, int] = field(default_factory=dict)
    bodies: Mapping[str, type[Body]] = field(default_factory=dict)

    @classmethod
    def read(cls, settings: Settings, previous: Catalog | None = None) -> Catalog:
        """Read the graph files and the folder of LoRAs again. ``previous``: the present catalog.

        Raises InputError if a file is wrong, or if a graph has another name than before.
        """
        graphs = settings.loaded_graphs()
        loras = lora_files(settings.loras) if settings.loras is not None else {}
        if previous is not None and graphs.keys() != previous.graphs.keys():
            raise InputError(
                f"the graphs are called {', '.join(graphs)} now: restart the server to rename one"
            )
        editions = {
            name: 0 if previous is None else previous.editions[name] + previous.differs(graph)
            for name, graph in graphs.items()
        }
        bodies = {
            name: body_model(graph, settings.bounds, loras, editions[name])
            for name, graph in graphs.items()
        }
        return cls(graphs, loras, editions, bodies)

    @property
    def variants(self) -> dict[str, GraphVariant]:
        """The graphs without LoRAs, by name."""
        return {
            name: GraphVariant(graph, self.editions[name]) for name, graph in self.graphs.items()
        }

    def is_newer(self, name: str, previous: Catalog) -> bool:
        """Whether the graph called ``name`` has changed since ``previous``."""
        return self.editions[name] > previous.editions[name]

    def differs(self, graph: Graph) -> bool:
        """Whether ``graph`` is another one than the graph of its name."""
        return self.graphs[graph.name] != graph

"""By what a measurement is known again: the component and the shapes of its calls, not the graph that they stand in.

    seconds      device, versions, component (class, config, dtype), its distinct calls in the phase
    activation   device, versions, components of the phase with their calls, and the activation that was traced there

Another graph with the same component at the same size has the same keys, and profits. Where the dry run is no longer at hand the
keys are the graph's own: nothing is shared then, and nothing is mixed up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphrun.estimator.events import Call, Probed
from graphrun.estimator.numbers import phase_spans
from graphrun.estimator.store import Store, digest_of
from graphrun.graph.graph import Component, Graph
from graphrun.planner.problem import Problem

# Per phase: the key of its activation, and of each component's seconds.
Keys = Mapping[str, Mapping[str, Any]]


def shapes_of(graph: Graph, probed: Probed, problem: Problem) -> dict[str, dict[str, Any]]:
    """The keys of every phase of ``problem``, which was made from ``probed`` and not informed by measurements."""
    entries = probed.tape.entries()
    found: dict[str, dict[str, Any]] = {}
    for phase, (begin, end) in zip(problem.phases, phase_spans(entries), strict=True):
        calls = [call for _, call in entries[begin:end]]
        own = {use.component: _component(graph.components[use.component], calls) for use in phase.uses}
        found[phase.name] = {
            "activation": digest_of([_place(problem), sorted(own.values()), phase.first_bytes, phase.rest_bytes]),
            "seconds": {name: digest_of([_place(problem), key]) for name, key in own.items()},
        }
    return found


def keep_shapes(graph: Graph, probed: Probed, problem: Problem, store: Store) -> None:
    """Note the keys of ``problem``'s phases, for whoever has the problem alone."""
    store.put("shapes", _graph_key(problem), shapes_of(graph, probed, problem))


def known_shapes(problem: Problem, store: Store) -> Keys:
    """The keys that were noted for ``problem``'s graph and settings, else such as only this graph with these settings has."""
    own = _graph_key(problem)
    noted = store.get("shapes", own)
    return {phase.name: _sound(noted, phase.name) or _own(own, phase.name) for phase in problem.phases}


def _sound(noted: Any, phase: str) -> Mapping[str, Any] | None:
    found = noted.get(phase) if isinstance(noted, dict) else None
    if not isinstance(found, dict) or not isinstance(found.get("activation"), str) or not isinstance(found.get("seconds"), dict):
        return None
    return found if all(isinstance(key, str) for key in found["seconds"].values()) else None


class _Anyone(dict[str, str]):
    """Keys of components that are made when they are asked for."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = base

    def __missing__(self, name: str) -> str:
        return digest_of([self.base, name])


def _own(graph_key: str, phase: str) -> Mapping[str, Any]:
    return {"activation": digest_of([graph_key, phase]), "seconds": _Anyone(digest_of([graph_key, phase, "seconds"]))}


def _component(component: Component, calls: Sequence[Call]) -> str:
    kinds = {digest_of(_call(call)) for call in {id(c): c for c in calls if c.component == component.name}.values()}
    made_of = component.config if component.has_config else component.source
    return digest_of([component.class_path, made_of, component.dtype, sorted(kinds)])


def _call(call: Call) -> dict[str, Any]:
    """All that a call did but the name of its component, which is the graph's."""
    return {**call.plain(), "component": ""}


def _place(problem: Problem) -> list[Any]:
    return [problem.hardware.device, problem.hardware.name, problem.versions]


def _graph_key(problem: Problem) -> str:
    return digest_of([_place(problem), problem.graph_digest, problem.settings])

"""A live pipeline as something that can be planned without being run: for any card and budget, with weights or on meta."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graphrun.errors import InputError
from graphrun.estimator.numbers import Limits, problem_of
from graphrun.integrations.live import components_of, graph_of
from graphrun.integrations.rehearsal import Call, Rehearsal
from graphrun.planner.problem import Hardware, Problem


class LivePipeline:
    """What `graphrun.from_pipeline` returns: `graphrun.estimate` takes it like a graph, with a call's arguments as inputs."""

    def __init__(self, pipe: Any) -> None:
        from diffusers import DiffusionPipeline

        if not isinstance(pipe, DiffusionPipeline):
            raise InputError(f"from_pipeline takes a diffusers pipeline, not {type(pipe).__name__}")
        self.pipe = pipe
        self.modules = components_of(pipe)
        self._rehearsal = Rehearsal(pipe, self.modules)

    def problem(self, inputs: Mapping[str, Any], hardware: Hardware, budget_bytes: int, ram_bytes: int, demands: Any) -> Problem:
        """The problem of ``pipe(**inputs)``; ``demands`` as `Graph.directed` takes them. Raises what the probe of a call raises."""
        tape = self._rehearsal.probe(Call("call", self.pipe, lambda rehearsal: rehearsal.pipe, (), dict(inputs)))
        graph = graph_of(self.pipe, self.modules, self._rehearsal.forms.known.values()).directed(*demands)
        problem = problem_of(graph, self._rehearsal.probed(tape), hardware, Limits(budget_bytes, ram_bytes), {})
        plain = ((name, str(value)) for name, value in sorted(inputs.items()) if isinstance(value, (bool, int, float)))
        return replace(problem, settings=tuple(plain))

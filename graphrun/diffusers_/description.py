"""A live pipeline as something that can be planned without being run: for any card and budget, with weights or on meta."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrun.diffusers_.dry_call import Call, Rehearsal
from graphrun.diffusers_.live import components_of, graph_of, is_pipeline, joined
from graphrun.errors import InputError
from graphrun.model.problem import Hardware, Problem
from graphrun.profile.problems import Limits, problem_of

if TYPE_CHECKING:
    from graphrun.diffusers_.importing.imported import Imported
    from graphrun.graph.graph import Graph


class LivePipeline:
    """What `graphrun.from_pipeline` returns: `graphrun.estimate` takes it like a graph, with a call's arguments as inputs.

    ``graph`` is the same pipeline as stages, as `graphrun import` would write it; `to_yaml` writes it.
    """

    def __init__(self, pipe: Any) -> None:
        if not is_pipeline(pipe):
            raise InputError(f"from_pipeline takes a diffusers pipeline, not {type(pipe).__name__}")
        self.pipe = pipe
        self.modules = joined(components_of(pipe))
        self._rehearsal = Rehearsal(pipe, self.modules)

    def problem(self, inputs: Mapping[str, Any], hardware: Hardware, budget_bytes: int, ram_bytes: int, demands: Any) -> Problem:
        """The problem of ``pipe(**inputs)``; ``demands`` as `Graph.directed` takes them. Raises what the probe of a call raises."""
        tape = self._rehearsal.probe(Call("call", self.pipe, lambda rehearsal: rehearsal.pipe, (), dict(inputs)))
        graph = graph_of(self.pipe, self.modules, self._rehearsal.dtype_variants.known.values()).directed(*demands)
        problem = problem_of(graph, self._rehearsal.probed(tape), hardware, Limits(budget_bytes, ram_bytes), {})
        plain = ((name, str(value)) for name, value in sorted(inputs.items()) if isinstance(value, (bool, int, float)))
        return replace(problem, settings=tuple(plain))

    @cached_property
    def graph(self) -> Graph:
        """The pipeline as a graph of stages, for inputs as its call has them by default. Its files live as long as this object.

        Run it with ``modules=pipeline.graph_modules`` for these weights. Raises InputError for what a graph cannot hold, ProbeError
        where its call cannot be probed.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="graphrun-")
        return self._imported({}).write(Path(self._folder.name, "pipeline.yaml"))

    @property
    def graph_modules(self) -> dict[str, Any]:
        """The components of ``graph`` by name, with their weights."""
        from graphrun.diffusers_.importing.from_live import of_pipeline

        return {name: member.live for name, member in of_pipeline(self.pipe).components.items()}

    def to_yaml(self, path: Path, *, inputs: Mapping[str, Any] | None = None, whole: bool = False, force: bool = False) -> Graph:
        """Writes the graph file ``path``, and configurations and tokenizers beside it: the graph as it is loaded from there.

        ``inputs``: defaults in place of the pipeline's. ``whole``: one stage, even where the call could be cut. Weights are those
        of the folder or repository that the pipeline was loaded from; where there is none, the file has no source. Raises what
        ``graph`` raises, and InputError where there is such a file and ``force`` is not set.
        """
        return self._imported(inputs or {}, whole=whole).write(path, force=force)

    def _imported(self, sets: Mapping[str, Any], *, whole: bool = False) -> Imported:
        from graphrun.diffusers_.importing.from_live import of_pipeline
        from graphrun.diffusers_.importing.imported import stage

        return stage(of_pipeline(self.pipe), sets, whole=whole)

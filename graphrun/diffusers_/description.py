"""Planning a live pipeline without running it: for any hardware and budget, with weights in memory
or on meta."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrun.diffusers_.dry_call import Call, MetaPipeline
from graphrun.diffusers_.live import components_of, is_pipeline, merge_shared
from graphrun.errors import InputError
from graphrun.graph.graph import Directives
from graphrun.model.problem import Hardware, Problem
from graphrun.profile.problems import Limits

if TYPE_CHECKING:
    from graphrun.diffusers_.importing.imported import Imported
    from graphrun.graph.graph import Graph


class LivePipeline:
    """What `graphrun.from_pipeline` returns. `graphrun.estimate` takes it like a graph, with the
    arguments of a call as inputs.

    ``graph`` is the pipeline as stages, as `graphrun import` would write it; `to_yaml` writes it to
    a file.
    """

    def __init__(self, pipe: Any) -> None:
        if not is_pipeline(pipe):
            raise InputError(f"from_pipeline takes a diffusers pipeline, not {type(pipe).__name__}")
        self.pipe = pipe
        self.modules = merge_shared(components_of(pipe))
        self._meta_pipeline = MetaPipeline(pipe, self.modules)

    def problem(
        self, inputs: Mapping[str, Any], hardware: Hardware, limits: Limits, demands: Directives
    ) -> Problem:
        """The problem of ``pipe(**inputs)``, planned by a dry run.

        Raises ProbeError where the dry run fails, and what the pipeline itself raises about its
        arguments.
        """
        recording = self._meta_pipeline.probe(
            Call("call", self.pipe, lambda meta_pipeline: meta_pipeline.pipe, (), dict(inputs))
        )
        problem = self._meta_pipeline.problem(recording, demands, hardware, limits)
        plain = (
            (name, str(value))
            for name, value in sorted(inputs.items())
            if isinstance(value, (bool, int, float))
        )
        return replace(problem, settings=tuple(plain))

    @cached_property
    def graph(self) -> Graph:
        """The pipeline as a graph of stages, with the defaults of its call as inputs. Its files are
        removed with this object.

        Pass ``modules=pipeline.graph_modules`` to `graphrun.run` to run it with these weights.
        Raises InputError for what a graph file cannot express, ProbeError where the dry run of the
        call fails.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="graphrun-")
        return self._imported({}).write(Path(self._folder.name, "pipeline.yaml"))

    @property
    def graph_modules(self) -> dict[str, Any]:
        """The components of ``graph`` by name, with their weights."""
        from graphrun.diffusers_.importing.from_live import of_pipeline

        found = of_pipeline(self.pipe)
        return {name: found.live[name] for name in found.components}

    def to_yaml(
        self,
        path: Path,
        *,
        inputs: Mapping[str, Any] | None = None,
        whole: bool = False,
        force: bool = False,
    ) -> Graph:
        """Writes the graph file ``path``, with configurations and tokenizers beside it, and returns
        the graph loaded from there.

        ``inputs``: defaults in place of the pipeline's. ``whole``: one stage, even where the call
        could be split. The file's source is the folder or repository that the pipeline was loaded
        from; without one, the file has no source. Raises what ``graph`` raises, and InputError
        where the file exists and ``force`` is not set.
        """
        return self._imported(inputs or {}, whole=whole).write(path, force=force)

    def _imported(self, sets: Mapping[str, Any], *, whole: bool = False) -> Imported:
        from graphrun.diffusers_.importing.from_live import of_pipeline
        from graphrun.diffusers_.importing.imported import stage

        return stage(of_pipeline(self.pipe), sets, whole=whole)

"""Plan a live pipeline, with weights in memory or on meta, without running it, for any hardware."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from graphrun.diffusers_.dry_call import AttachedCall, MetaPipeline
from graphrun.diffusers_.live import components_of, is_pipeline, merge_shared
from graphrun.errors import InputError
from graphrun.graph.parts import Directives
from graphrun.model.hardware import Hardware
from graphrun.model.problem import Problem, ProblemLimits
from graphrun.modules.mapped import MappedTensors

if TYPE_CHECKING:
    from graphrun.diffusers_.importing.imported import Imported
    from graphrun.graph.graph import Graph


class LivePipeline:
    """The result of `graphrun.from_pipeline`.

    Pass it to `graphrun.estimate` like a graph, with the arguments of a call as inputs. ``graph``
    is the pipeline as stages, as `graphrun import` would write it; `to_yaml` writes it to a file.
    """

    def __init__(self, pipe: Any) -> None:
        if not is_pipeline(pipe):
            raise InputError(f"from_pipeline takes a diffusers pipeline, not {type(pipe).__name__}")
        self.pipe = pipe
        self.modules = merge_shared(components_of(pipe))
        self._meta_pipeline = MetaPipeline(pipe, self.modules)

    def problem(
        self,
        inputs: Mapping[str, Any],
        hardware: Hardware,
        limits: ProblemLimits,
        demands: Directives,
    ) -> Problem:
        """Return the problem of ``pipe(**inputs)``, from a dry run. Raises ProbeError if the dry
        run fails. Errors of the pipeline about its arguments pass."""
        recording = self._meta_pipeline.probe(
            AttachedCall(
                "call", self.pipe, lambda meta_pipeline: meta_pipeline.pipe, (), dict(inputs)
            )
        )
        mapped_tensors = MappedTensors(self.modules.values()) if hardware.unified else None
        problem = self._meta_pipeline.problem(
            recording, demands, hardware, limits, mapped_tensors=mapped_tensors
        )
        settings = (
            (name, str(value))
            for name, value in sorted(inputs.items())
            if isinstance(value, (bool, int, float))
        )
        return replace(problem, settings=tuple(settings))

    @cached_property
    def graph(self) -> Graph:
        """The pipeline as a graph of stages, with the defaults of its call as inputs.

        The graph's files are removed with this object. Pass ``modules=pipeline.graph_modules`` to
        `graphrun.run` to run the graph with these weights. Raises InputError if a graph file cannot
        express the pipeline, ProbeError if the dry run of the call fails.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="graphrun-")
        return self._imported({}).write(Path(self._folder.name, "pipeline.yaml"))

    @property
    def graph_modules(self) -> dict[str, Any]:
        """The components of ``graph`` by name, with their weights. A graph has a component for each
        name, so a module's second name has a copy that shares its tensors."""
        from graphrun.diffusers_.importing.from_live import of_pipeline

        description = of_pipeline(self.pipe)
        modules = dict[str, Any]()
        for name in description.components:
            module = description.live[name]
            is_taken = any(module is other for other in modules.values())
            modules[name] = _sharing_copy(module) if is_taken else module
        return modules

    def to_yaml(
        self,
        path: str | Path,
        *,
        inputs: Mapping[str, Any] | None = None,
        whole: bool = False,
        overwrite: bool = False,
    ) -> Graph:
        """Write the graph file ``path`` with its configurations and tokenizers; return the graph.

        ``inputs``: defaults that replace the pipeline's. ``whole``: one stage, even if the call
        could be split. The file's source is the folder or repository that the pipeline was loaded
        from, if any. Raises the errors of ``graph``, and InputError if the file exists and
        ``overwrite`` is not set.
        """
        return self._imported(inputs or {}, whole=whole).write(Path(path), overwrite=overwrite)

    def _imported(self, inputs: Mapping[str, Any], *, whole: bool = False) -> Imported:
        from graphrun.diffusers_.importing.from_live import of_pipeline
        from graphrun.diffusers_.importing.imported import stage
        from graphrun.modules.texts import restored_limits

        with restored_limits(self.pipe.components.values()):
            return stage(of_pipeline(self.pipe), inputs, whole=whole)


def _sharing_copy(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` with parameters of its own on the same storages."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in module.buffers()}
    for tensor in module.parameters():
        memo[id(tensor)] = (
            nn.Parameter(tensor.detach(), tensor.requires_grad)
            if type(tensor) is nn.Parameter
            else tensor
        )
    return copy.deepcopy(module, memo)

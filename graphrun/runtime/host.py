"""The components of a problem in host memory, ready to run. Built once; good for any number of runs with equal numbers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.model.problem import BlockGroup, ComponentNumbers, Granularity, Problem, Variant
from graphrun.modules.build import build_part, draft, meta_module
from graphrun.modules.dtype_variants import DtypeVariants
from graphrun.modules.memos import memos
from graphrun.modules.precisions import QUANTIZED
from graphrun.modules.quantize import ill_suited
from graphrun.modules.source_files import origin_of
from graphrun.runtime.backing import Blocks, Disk
from graphrun.runtime.devices.device import Device
from graphrun.runtime.movers import refuse_movers
from graphrun.runtime.residency import Residency
from graphrun.runtime.spool import Spool


class Host:
    """``modules`` in their backing stores, for ``device``. ``problem`` is settled: every component has one variant.

    ``writers``: of modules whose weights are on meta, and come when their backing store is filled. Others have them: they keep their values,
    but their tensors are views of an arena from now on. ``modules`` holds all components of ``problem``. What ``spool`` gets is
    written there once: weights for a backing store on disk that no file holds as they are. Raises InputError where a module is not what
    ``problem`` describes, or where something else moves it too.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        problem: Problem,
        device: Device,
        writers: Mapping[str, Blocks] | None = None,
        spool: Spool | None = None,
    ) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.residencies: dict[str, Residency] = {}
        self.dtype_variants: DtypeVariants | None = None  # of modules that a pipeline may cast while it runs
        self.parts: dict[str, Any] = {}
        self.meta_modules: dict[str, nn.Module] = {}
        self.casts: dict[str, tuple[torch.dtype, torch.dtype]] = {}  # the graph's dtype and the plan's, where they differ
        self.sources: tuple[dict[str, Any], ...] = ()  # what weights are read from
        self._spool = spool or Spool()
        self._variants: dict[str, Variant] = {}
        self._writers: dict[str, Blocks | None] = {}
        self._shape = _shape(problem)
        writers = writers or {}
        refuse_movers({name: module for name, module in modules.items() if name not in writers})
        for numbers in problem.components:
            self._add(modules[numbers.name], numbers, device, writers.get(numbers.name))
        self.prepare()

    @classmethod
    def of_graph(
        cls,
        graph: Graph,
        problem: Problem,
        device: Device,
        modules: Mapping[str, nn.Module] | None = None,
        spool: Spool | None = None,
    ) -> Host:
        """The components of ``graph``: those in ``modules`` as they are, the others drafted and filled one by one; its parts."""
        host = cls({}, replace(problem, components=()), device, spool=spool)
        host._shape = _shape(problem)
        given = modules or {}
        host._spool.remove_stale()
        refuse_movers(given)
        used = {use.component for phase in problem.phases for use in phase.uses}
        host.meta_modules = {name: meta_module(component, graph.trust) for name, component in graph.components.items()}
        host.modules = dict(host.meta_modules)  # a stage may list a component that no call enters
        for numbers in problem.components:
            if numbers.name in given and graph.component(numbers.name).loras:
                raise InputError(f"{numbers.name} was handed in, and the graph fuses a LoRA into it: leave it out of modules=")
            if numbers.name in given:
                host._add(given[numbers.name], numbers, device, None)
            elif numbers.name in used:
                component, precision = graph.component(numbers.name), numbers.variants[0].precision
                module, writer = draft(component, graph, precision)
                host._add(module, numbers, device, writer)
                if (origin := origin_of(component, precision)) is not None:
                    host.sources = (*host.sources, origin)
                if device.torch_device.type != "cuda" and (why := ill_suited(module, numbers.name)):
                    warnings.warn(why, RuntimeWarning, stacklevel=2)
                if precision not in (component.dtype, *QUANTIZED):
                    host.casts[numbers.name] = getattr(torch, component.dtype), getattr(torch, precision)
            else:
                continue
            host.prepare()
        host.parts = {name: build_part(part, graph) for name, part in graph.parts.items()}
        return host

    @functools.cached_property
    def memos(self) -> tuple[Any, ...]:
        """What its modules memoize: caches to be emptied."""
        return memos(self.modules.values())

    def prepare(self, used: Collection[str] | None = None) -> None:
        """Backing stores that a run begins with are held and filled: those that no action fills, and the buffers of those on disk.

        ``used``: the components that the run uses; None: all.
        """
        for name, residency in self.residencies.items():
            if used is not None and name not in used:
                continue
            if not residency.held and not self._variants[name].read_seconds:
                residency.fill()
                residency.backing_store.settle()

    def finish(self) -> None:
        """Backing stores that the plan filled are dropped: the next run begins as this one did. Behind a barrier."""
        for name, residency in self.residencies.items():
            if self._variants[name].read_seconds and not residency.given:
                residency.free()

    def close(self) -> None:
        """Backing stores and files are gone at once, not when garbage is collected; what was handed in stays its owner's."""
        for residency in self.residencies.values():
            if not residency.given:
                residency.free()
        self._spool.close()

    def fits(self, problem: Problem) -> bool:
        """Whether ``problem``, settled, has the graph and the blocks that this was built for."""
        return _shape(problem) == self._shape

    def settle_in(self, problem: Problem) -> None:
        """Components that ``problem``, which is settled, cuts into layers and that lie in blocks, or the reverse, are laid out
        anew. At the begin of a run. Raises InputError where it is of another graph, or holds a component otherwise."""
        shape = _shape(problem)
        if shape != self._shape and not _cut_alone(shape, self._shape):
            raise InputError("the host memory was built for another graph or other blocks; build it again for this problem")
        for numbers in problem.components:
            before = self.residencies.get(numbers.name)
            if before is None or before.granularity == numbers.granularity:
                continue
            on_disk = isinstance(before.backing_store, Disk)
            if on_disk:
                before.free()
            writer = None if before.given or (before.held and not on_disk) else self._writers[numbers.name]
            self.residencies[numbers.name] = Residency(self.modules[numbers.name], numbers, before.device, writer)
        self._shape = shape

    def _add(self, module: nn.Module, numbers: ComponentNumbers, device: Device, writer: Blocks | None) -> None:
        if writer is not None and numbers.variants[0].backing_store == "disk":
            writer = self._spool.stored(module, numbers, writer)
        self.modules[numbers.name] = module
        self.residencies[numbers.name] = Residency(module, numbers, device, writer)
        self._variants[numbers.name] = numbers.variants[0]
        self._writers[numbers.name] = writer


Shape = tuple[str, dict[str, tuple[Granularity, tuple[BlockGroup, ...], Variant]]]


def _shape(problem: Problem) -> Shape:
    """What must be equal: what settling a problem makes of a variant's compute does not count."""
    held = {c.name: replace(c.variants[0], slowdown=1.0, block_seconds=(), scratch_bytes=0, needs="") for c in problem.components}
    return problem.graph_digest, {c.name: (c.granularity, c.groups, held[c.name]) for c in problem.components}


def _cut_alone(one: Shape, other: Shape) -> bool:
    """Whether these are of one graph, and differ in nothing but which components are cut into layers."""
    ((digest, these), (theirs, those)) = one, other
    pairs = [(these[name], those[name]) for name in these.keys() & those.keys()]
    alike = (a == b or (a[0] != b[0] and a[2].name == b[2].name) for a, b in pairs)
    return digest == theirs and these.keys() == those.keys() and all(alike)

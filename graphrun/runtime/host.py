"""Host side of the components of a problem: their modules and backing stores. Built once, used by
any number of runs."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.model.problem import ComponentNumbers, Granularity, Problem, Variant
from graphrun.modules.build import build_part, draft, meta_modules
from graphrun.modules.compiled import compile_blocks
from graphrun.modules.dtype_variants import DtypeVariants
from graphrun.modules.memos import HeldAttributes, memos, owned
from graphrun.modules.precisions import QUANTIZED
from graphrun.modules.quantize import ill_suited
from graphrun.modules.source_files import origin_of
from graphrun.runtime.backing import BlockWriter, Disk
from graphrun.runtime.devices.device import Device
from graphrun.runtime.movers import refuse_movers
from graphrun.runtime.residency import Residency
from graphrun.runtime.spool import Spool


class Host:
    """``modules`` in their backing stores, for ``device``. ``problem`` has its choices applied:
    every component has one variant.

    ``modules`` holds all components of ``problem``. Those named in ``writers`` have their
    parameters on meta and get their weights from the writer when their backing store is read. The
    others bring their weights: values stay, but their tensors become views of an arena. ``spool``
    stores weights of a disk backing store that no file contains in the needed form. Raises
    InputError when a module does not match ``problem``, or when another library moves its weights.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        problem: Problem,
        device: Device,
        writers: Mapping[str, BlockWriter] | None = None,
        spool: Spool | None = None,
    ) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.residencies: dict[str, Residency] = {}
        # for modules that a pipeline may cast during a run
        self.dtype_variants: DtypeVariants | None = None
        self.parts: dict[str, Any] = {}
        self.meta_modules: dict[str, nn.Module] = {}
        self.casts: dict[
            str, tuple[torch.dtype, torch.dtype]
        ] = {}  # component -> (dtype in the graph, dtype in the plan), where they differ
        self.sources: tuple[dict[str, Any], ...] = ()  # where weights are read from
        self._spool, self._device = spool or Spool(), device
        self._variants: dict[str, Variant] = {}
        self._writers: dict[str, BlockWriter | None] = {}
        self._borrowed = ExitStack()
        self._layout = _layout_key(problem)
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
        """Host memory for ``graph``: components in ``modules`` as passed in, the others built on
        meta with a writer; and its parts."""
        host = cls({}, replace(problem, components=()), device, spool=spool)
        host._layout = _layout_key(problem)
        passed = modules or {}
        host._spool.remove_stale()
        refuse_movers(passed)
        used = {use.component for phase in problem.phases for use in phase.uses}
        host.meta_modules = host._borrowed.enter_context(meta_modules(graph))
        host.modules = dict(host.meta_modules)  # a stage may list a component that it never calls
        for numbers in problem.components:
            if numbers.name in passed and graph.component(numbers.name).loras:
                raise InputError(
                    f"{numbers.name} was passed in, but the graph fuses a LoRA into it: leave it out of modules="
                )
            if numbers.name in passed:
                host._add(passed[numbers.name], numbers, device, None)
            elif numbers.name in used:
                component, precision = graph.component(numbers.name), numbers.variants[0].precision
                module, writer = draft(component, graph, precision)
                if component.is_compiled(problem.allow):
                    compile_blocks(
                        module, (path for k in numbers.groups if k.streamable for path in k.blocks)
                    )
                host._add(module, numbers, device, writer)
                if (origin := origin_of(component, precision)) is not None:
                    host.sources = (*host.sources, origin)
                if device.torch_device.type != "cuda" and (why := ill_suited(module, numbers.name)):
                    warnings.warn(why, RuntimeWarning, stacklevel=2)
                if precision not in (component.dtype, *QUANTIZED):
                    host.casts[numbers.name] = (
                        getattr(torch, component.dtype),
                        getattr(torch, precision),
                    )
            else:
                continue
            host.prepare()
        host.parts = {name: build_part(part, graph) for name, part in graph.parts.items()}
        return host

    @property
    def outside_bytes(self) -> int:
        """Bytes of weights on the device that count neither in the plan's budget nor as the
        caller's."""
        return 0

    @functools.cached_property
    def memos(self) -> tuple[Any, ...]:
        """Caches in the modules (functools.cache and the like) that hold tensors and are cleared
        between phases."""
        return memos(self.modules)

    def clear_memos(self) -> None:
        """Frees tensors that modules cache on the device (see `graphrun.modules.memos`)."""
        for memo in self.memos:
            memo.cache_clear()

    @property
    def cached_bytes(self) -> int:
        """Bytes on the device that `clear_memos` left there."""
        return 0

    @functools.cached_property
    def held_attributes(self) -> tuple[HeldAttributes, ...]:
        """The attributes of all modules, in which stages may leave tables on the device. Without
        those of bitsandbytes' layers, which are a part of their weights."""
        return tuple(
            HeldAttributes(child, held)
            for _, child, held in owned(self.modules)
            if not any("bitsandbytes" in kind.__module__ for kind in type(child).mro())
        )

    def prepare(self, used: Collection[str] | None = None) -> None:
        """Reads the backing stores that are there before the run (no action of the plan reads
        them), and allocates bounce buffers.

        ``used``: the components that the run uses; None: all.
        """
        for name, residency in self.residencies.items():
            if (
                (used is None or name in used)
                and residency.backing_store.memory is None
                and not self._variants[name].read_seconds
            ):
                residency.prepare_reads()
                residency.backing_store.finish_reads()

    def evict(self) -> None:
        """Evicts all weights from the device. Call after a barrier."""
        for residency in self.residencies.values():
            residency.release()

    def finish(self) -> None:
        """Drops the backing stores that the plan has read, so that the next run starts as this one
        did. Call after a barrier."""
        for name, residency in self.residencies.items():
            if self._variants[name].read_seconds and not residency.caller_owned:
                residency.drop()

    def close(self) -> None:
        """Drops backing stores and deletes spooled files now, not at garbage collection. Modules
        passed in keep their weights."""
        for residency in self.residencies.values():
            if not residency.caller_owned:
                residency.drop()
        self._spool.close()
        self._borrowed.close()

    def fits(self, problem: Problem) -> bool:
        """Whether ``problem``, with choices applied, has the graph and the blocks that this was
        built for."""
        return _layout_key(problem) == self._layout

    def part(self, problem: Problem) -> Host:
        """This host memory for ``problem`` of a part of its graph, with choices applied. Both have
        the same backing stores: use one at a time. Raises InputError where ``problem`` holds a
        component in another way."""
        layout = _layout_key(problem)
        if not layout[1].items() <= self._layout[1].items():
            raise InputError(
                "the host memory was built for other blocks; build it again for this problem"
            )
        found = copy.copy(self)
        found._layout = layout
        found.residencies = {name: of for name, of in self.residencies.items() if name in layout[1]}
        return found

    def match_layout(self, problem: Problem) -> None:
        """Lays out again the components whose granularity (block or layer) differs in ``problem``,
        which has its choices applied.

        Called at the start of a run. Raises InputError when ``problem`` differs in anything else:
        graph, blocks or variants.
        """
        layout = _layout_key(problem)
        for numbers in problem.components:
            if (residency := self.residencies.get(numbers.name)) is not None:
                residency.place(numbers, self._device)
        if layout != self._layout and not _differ_in_granularity_only(layout, self._layout):
            raise InputError(
                "the host memory was built for another graph or other blocks; build it again for this problem"
            )
        for numbers in problem.components:
            before = self.residencies.get(numbers.name)
            if before is None or before.granularity == numbers.granularity:
                continue
            on_disk = isinstance(before.backing_store, Disk)
            if on_disk:
                before.drop()
            in_ram = before.backing_store.memory is not None and not on_disk
            writer = None if before.caller_owned or in_ram else self._writers[numbers.name]
            self.residencies[numbers.name] = Residency(
                self.modules[numbers.name], numbers, self._device, writer
            )
        self._layout = layout

    def _add(
        self,
        module: nn.Module,
        numbers: ComponentNumbers,
        device: Device,
        writer: BlockWriter | None,
    ) -> None:
        if writer is not None and numbers.variants[0].backing_store == "disk":
            writer = self._spool.writer_for(module, numbers, writer)
        self.modules[numbers.name] = module
        self.residencies[numbers.name] = Residency(module, numbers, device, writer)
        self._variants[numbers.name] = numbers.variants[0]
        self._writers[numbers.name] = writer


Layout = tuple[Granularity, frozenset[tuple[str, int]], Variant]
_LayoutKey = tuple[str, dict[str, Layout]]


def layout_of(numbers: ComponentNumbers) -> Layout:
    """What decides the layout of a component in memory: its blocks with their bytes. Fields of a
    variant that only concern compute and that `apply_choices` changes are neutral, and so is on
    which devices it computes."""
    variant = replace(
        numbers.variants[0], slowdown=1.0, block_seconds=(), scratch_bytes=0, needs=""
    )
    if variant.secondary:
        variant = replace(variant, device="device")
    pairs = zip(numbers.groups, variant.block_bytes, strict=True)
    blocks = frozenset((path, nbytes) for group, nbytes in pairs for path in group.blocks)
    variant = replace(
        variant,
        load_seconds=(),
        disk_seconds=(),
        read_seconds=(),
        block_bytes=(),
        read_bytes=(),
        streamable=True,
    )
    return numbers.granularity, blocks, variant


def _layout_key(problem: Problem) -> _LayoutKey:
    """Digest of the graph, and the layout of each component."""
    return problem.graph_digest, {c.name: layout_of(c) for c in problem.components}


def _differ_in_granularity_only(one: _LayoutKey, other: _LayoutKey) -> bool:
    """Whether both are of one graph and differ only in which components are split into layers."""
    ((digest, these), (theirs, those)) = one, other
    pairs = [(these[name], those[name]) for name in these.keys() & those.keys()]
    alike = (a == b or (a[0] != b[0] and a[2].name == b[2].name) for a, b in pairs)
    return digest == theirs and these.keys() == those.keys() and all(alike)

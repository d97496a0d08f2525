"""The host side of components: modules and backing stores, built once for any number of runs."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Component
from graphrun.graph.precisions import QUANTIZED
from graphrun.model.problem import ComponentNumbers, Granularity, Problem, Variant
from graphrun.modules.build import build_part, draft, meta_modules
from graphrun.modules.compiled import compile_blocks
from graphrun.modules.dtype_variants import DtypeVariants
from graphrun.modules.memos import HeldAttributes, MovedTables, attributes_of, memos, moved_tables
from graphrun.modules.quantize import ill_suited
from graphrun.modules.source_files import origin_of
from graphrun.modules.sources import Writer
from graphrun.runtime.backing import BlockWriter, Disk
from graphrun.runtime.devices.device import Device
from graphrun.runtime.files import FileStore
from graphrun.runtime.movers import refuse_movers
from graphrun.runtime.residency import Residency
from graphrun.runtime.spool import Spool, quantizing_on, weights_key


class Host:
    """``modules`` in their backing stores, for ``device``.

    ``problem``: with choices applied. ``modules``: all its components. A component in ``writers``
    has its parameters on meta and gets its weights when its backing store is read. The other
    components bring their weights, whose tensors are replaced by views of an arena. ``spool``
    writes temporary files, for components that the plan reads from disk but whose weights no file
    contains in the needed form.

    Raises InputError if a module does not match ``problem``, or if another library moves its
    weights.
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
        self.copies: dict[str, nn.Module] = {}  # of modules, by name (`graphrun.model.copies`)
        # dtype variants of modules that a pipeline may cast during a run
        self.dtype_variants: DtypeVariants | None = None
        self.parts: dict[str, Any] = {}  # built for the graph's ``parts``, by name
        self.meta_modules: dict[str, nn.Module] = {}
        # component -> (dtype in the graph, dtype in the plan), where they differ
        self.casts: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        self.sources: tuple[dict[str, Any], ...] = ()  # where weights are read from
        self._spool, self._device = spool or Spool(), device
        self._variants: dict[str, Variant] = {}
        self._writers: dict[str, BlockWriter | None] = {}
        self._leases = ExitStack()  # return the meta modules to the graph when closed
        self._layout = _layout_key(problem)
        writers = writers or {}
        refuse_movers({name: module for name, module in modules.items() if name not in writers})
        self._drafts: dict[str, Callable[[], nn.Module]] = {}  # of modules that a graph builds
        # of components that no call of the plan enters: the module with its weights, or how to
        # read them
        self._uncalled_modules: dict[str, nn.Module] = {}
        self._uncalled_writers: dict[str, Callable[[], Writer]] = {}
        for numbers in problem.components:
            if not numbers.copy_of:
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
        """Return the host side of ``graph``, with its ``parts`` (tokenizers, for example) built.

        Components in ``modules`` are used as passed in. The others are built on meta with a writer.
        """
        host = cls({}, replace(problem, components=()), device, spool=spool)
        host._layout = _layout_key(problem)
        prebuilt_modules = modules or {}
        host._spool.remove_stale()
        refuse_movers(prebuilt_modules)
        used_components = {use.component for phase in problem.phases for use in phase.uses}
        is_divided = False
        host.meta_modules = host._leases.enter_context(meta_modules(graph))
        host.modules = dict(host.meta_modules)  # a stage may list a component that it never calls
        for numbers in problem.components:
            if numbers.copy_of:
                continue  # `match_layout` adds them
            if numbers.name in prebuilt_modules and graph.component(numbers.name).loras:
                raise InputError(
                    f"{numbers.name} was passed in, but the graph fuses a LoRA into it: leave it "
                    "out of modules="
                )
            if numbers.name in prebuilt_modules:
                host._add(prebuilt_modules[numbers.name], numbers, device, None)
            elif numbers.name in used_components:
                component, precision = graph.component(numbers.name), numbers.variants[0].precision
                module, writer = draft(component, graph, precision)
                if graph.processes > 1:
                    from graphrun.modules.context_parallel import divide, divides_sequence

                    if divides_sequence(module):
                        divide(module, graph.processes)
                        is_divided = True
                host._drafts[numbers.name] = functools.partial(
                    _drafted, component, graph, precision
                )
                if component.is_compiled(problem.allow):
                    compile_blocks(
                        module,
                        (
                            path
                            for group in numbers.groups
                            if group.streamable
                            for path in group.blocks
                        ),
                    )
                if numbers.variants[0].stored_bytes and precision in QUANTIZED:
                    key = weights_key(component, precision, problem.hardware)
                    with quantizing_on(device, writer, problem.effective_bytes):
                        host._add(module, numbers, device, writer, key)
                else:
                    host._add(module, numbers, device, writer)
                if (origin := origin_of(component, precision)) is not None:
                    host.sources = (*host.sources, origin)
                if problem.hardware.kind.has_host_kernels and (
                    warning := ill_suited(module, numbers.name)
                ):
                    warnings.warn(warning, RuntimeWarning, stacklevel=2)
                if precision not in (component.dtype, *QUANTIZED):
                    host.casts[numbers.name] = (
                        getattr(torch, component.dtype),
                        getattr(torch, precision),
                    )
            else:
                continue
            host.prepare()
        if graph.processes > 1 and not is_divided:
            raise InputError(
                f"{graph.name} has no component whose sequence can be divided: leave out --divide"
            )
        for name, component in graph.components.items():
            if name in host.residencies:
                continue
            if name in prebuilt_modules:
                host._uncalled_modules[name] = prebuilt_modules[name]
            else:
                host._uncalled_writers[name] = functools.partial(_writer, component, graph)
        host.parts = {name: build_part(part, graph) for name, part in graph.parts.items()}
        return host

    def tensor(self, component: str, path: str) -> torch.Tensor:
        """Return the weight ``path`` as the module of ``component`` has it: its values may be in
        the backing store only. Of a component that no call enters, return its values."""
        module = self._uncalled_modules.get(component, self.modules[component])
        owner_path, _, name = path.rpartition(".")
        owner = module.get_submodule(owner_path)
        tensor = (owner._parameters | owner._buffers)[name]
        assert tensor is not None  # code read it
        if tensor.is_meta and component in self._uncalled_writers:
            values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            writer = self._uncalled_writers[component]()
            writer.read_into(path, values)
            writer.close()
            return values
        return tensor

    @property
    def outside_bytes(self) -> int:
        """Bytes on the device of other attached pipelines, which have budgets of their own.

        Here 0; overridden in `graphrun.diffusers_.residence`.
        """
        return 0

    @property
    def loaded_bytes(self) -> int:
        """Bytes of weights on all devices now."""
        return sum(residency.loaded_bytes() for residency in self.residencies.values())

    @property
    def _all_modules(self) -> dict[str, nn.Module]:
        return self.modules | self.copies

    @functools.cached_property
    def memos(self) -> tuple[Any, ...]:
        """Caches in the modules (such as functools.cache) with tensors; cleared between phases."""
        return memos(self._all_modules)

    @functools.cached_property
    def moved_tables(self) -> tuple[MovedTables, ...]:
        """Tables that stages move to the device; moved back between phases, as plans expect."""
        return tuple(moved_tables(self._all_modules))

    def clear_memos(self) -> None:
        for memo in (*self.memos, *self.moved_tables):
            memo.cache_clear()

    @property
    def cached_bytes(self) -> int:
        """Bytes on the device that `clear_memos` leaves in caches of modules.

        Here 0; overridden in `graphrun.diffusers_.residence`.
        """
        return 0

    @functools.cached_property
    def held_attributes(self) -> tuple[HeldAttributes, ...]:
        """Attributes of modules where stages may leave device tensors, such as position tables.

        Attributes of bitsandbytes' layers are part of their weights and do not count.
        """
        return tuple(
            HeldAttributes(child, attributes)
            for _, child, attributes in attributes_of(self._all_modules)
            if not any("bitsandbytes" in kind.__module__ for kind in type(child).mro())
        )

    def prepare(self, used_components: Collection[str] | None = None) -> None:
        """Read the backing stores that must be in RAM before the run, and allocate bounce buffers.

        ``used_components``: the components that the run uses; None: all.
        """
        for name, residency in self.residencies.items():
            if (
                (used_components is None or name in used_components)
                and residency.backing_store.memory is None
                and not self._variants[name].is_read_by_plan
            ):
                residency.prepare_reads()
                residency.backing_store.finish_reads()

    def evict(self) -> None:
        """Evict all weights from the device. Call after a barrier."""
        for residency in self.residencies.values():
            residency.release()

    def finish(self) -> None:
        """Drop the backing stores that the plan has read. Call after a barrier."""
        for name, residency in self.residencies.items():
            if self._variants[name].is_read_by_plan and not residency.caller_owned:
                residency.drop()

    def close(self) -> None:
        """Drop backing stores and spooled files now; modules passed in keep their weights."""
        for residency in self.residencies.values():
            if not residency.caller_owned:
                residency.drop()
        self._spool.close()
        self._leases.close()

    def fits(self, problem: Problem) -> bool:
        """Return whether this host has the graph and blocks of ``problem`` with choices applied."""
        return _layout_key(problem) == self._layout

    def restricted_to(self, problem: Problem) -> Host:
        """Return a host with only the components of ``problem``, which is for a part of the graph.

        ``problem``: with choices applied. Both hosts share the backing stores: use one at a time.
        Raises InputError if ``problem`` lays out a component in another way.
        """
        layout = _layout_key(problem)
        if not layout[1].items() <= self._layout[1].items():
            raise InputError(
                "the host memory was built for other blocks; build it again for this problem"
            )
        host = copy.copy(self)
        host._layout = layout
        host.residencies = {
            name: residency for name, residency in self.residencies.items() if name in layout[1]
        }
        return host

    def match_layout(self, problem: Problem) -> None:
        """Lay out again the components whose granularity differs in ``problem``.

        Called at the start of a run. First sets the target devices of all blocks
        (`Residency.place`), which evicts blocks if a target changes; then raises InputError for
        another graph, other blocks or variants.
        """
        layout = _layout_key(problem)
        for numbers in problem.components:
            if (residency := self.residencies.get(numbers.name)) is not None:
                residency.place(numbers, self._device)
        if layout != self._layout and not _differ_in_granularity_only(layout, self._layout):
            raise InputError(
                "the host memory was built for another graph or other blocks; build it again for "
                "this problem"
            )
        for numbers in problem.components:
            old_residency = self.residencies.get(numbers.name)
            if old_residency is None or old_residency.granularity == numbers.granularity:
                continue
            on_disk = isinstance(old_residency.backing_store, (Disk, FileStore))
            if on_disk:
                old_residency.drop()
            in_ram = old_residency.backing_store.memory is not None and not on_disk
            writer = None if old_residency.caller_owned or in_ram else self._writers[numbers.name]
            self.residencies[numbers.name] = Residency(
                self.modules[numbers.name], numbers, self._device, writer
            )
        self._layout = layout
        for numbers in problem.components:
            if numbers.copy_of:
                self._add_copy(numbers)

    def _add_copy(self, numbers: ComponentNumbers) -> None:
        """Add the copy ``numbers`` of a component, unless it is there with its backing store."""
        original, residency = self.residencies[numbers.copy_of], self.residencies.get(numbers.name)
        if residency is not None and residency.backing_store is original.backing_store:
            return
        if numbers.name not in self.copies:
            draft_module = self._drafts.get(numbers.copy_of)
            self.copies[numbers.name] = (
                draft_module() if draft_module is not None else _on_meta(original.module)
            )
            self._forget_memos()
        self.residencies[numbers.name] = Residency(
            self.copies[numbers.name], numbers, self._device, original=original
        )
        self._variants[numbers.name] = numbers.variants[0]

    def _forget_memos(self) -> None:
        """Search the modules again for what they cache."""
        for name in ("memos", "moved_tables", "held_attributes"):
            self.__dict__.pop(name, None)

    def _add(
        self,
        module: nn.Module,
        numbers: ComponentNumbers,
        device: Device,
        writer: BlockWriter | None,
        key: str = "",
    ) -> None:
        variant = numbers.variants[0]
        if writer is not None and (
            variant.stored_bytes or variant.backing_store in ("disk", "file")
        ):
            writer = self._spool.writer_for(module, numbers, writer, key)
        self.modules[numbers.name] = module
        self.residencies[numbers.name] = Residency(module, numbers, device, writer)
        self._variants[numbers.name] = numbers.variants[0]
        self._writers[numbers.name] = writer


def _drafted(component: Component, graph: Graph, precision: str) -> nn.Module:
    return draft(component, graph, precision)[0]


def _writer(component: Component, graph: Graph) -> Writer:
    return draft(component, graph, component.precision[0])[1]


def _on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` with its parameters and buffers on meta."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if type(tensor) is nn.Parameter:
            meta_tensor = torch.empty_like(tensor, device="meta")
            memo[id(tensor)] = nn.Parameter(meta_tensor, requires_grad=tensor.requires_grad)
        elif type(tensor) is torch.Tensor:
            memo[id(tensor)] = torch.empty_like(tensor, device="meta")
    return copy.deepcopy(module, memo)


StoreLayout = tuple[Granularity, frozenset[tuple[str, int]], Variant]
_LayoutKey = tuple[str, dict[str, StoreLayout]]


def layout_of(numbers: ComponentNumbers) -> StoreLayout:
    """Return what determines the memory layout of a component: its blocks with their bytes.

    Fields of the variant that concern only compute do not count: `apply_choices` resets them, but
    ``numbers`` may be of a problem without choices applied. All devices on which the component may
    compute count as equal, except the CPU.
    """
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
        lost_seconds=(),
        read_seconds=(),
        block_bytes=(),
        read_bytes=(),
        streamable=True,
    )
    return numbers.granularity, blocks, variant


def _layout_key(problem: Problem) -> _LayoutKey:
    return problem.graph_digest, {c.name: layout_of(c) for c in problem.components if not c.copy_of}


def _differ_in_granularity_only(layout: _LayoutKey, other_layout: _LayoutKey) -> bool:
    """Return whether both have the same graph and differ only in components split into layers."""
    ((digest, components), (other_digest, other_components)) = layout, other_layout
    pairs = [
        (components[name], other_components[name])
        for name in components.keys() & other_components.keys()
    ]
    alike = (a == b or (a[0] != b[0] and a[2].name == b[2].name) for a, b in pairs)
    return digest == other_digest and components.keys() == other_components.keys() and all(alike)

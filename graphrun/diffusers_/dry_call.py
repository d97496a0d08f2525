"""Dry run of one call of a live pipeline: its own code on meta, on a simulated accelerator.

The accelerator has unlimited memory; budgets, plans and the device do not matter.

    live pipeline   pipe(prompt, image=..., generator=...)     text_encoder, unet, vae with weights
    meta pipeline   pipe(prompt, image=copy, generator=copy)   the same on meta; each signature of a
                                                               call into them is traced once
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from graphrun.diffusers_.call_arguments import copy_for_dry_run, describe_arguments
from graphrun.diffusers_.live import graph_of, kept_signatures, meta_module_of
from graphrun.diffusers_.text_lengths import TextLengths
from graphrun.errors import GraphrunError, InputError
from graphrun.graph.parts import Component, Directives
from graphrun.model.hardware import Hardware
from graphrun.model.problem import Problem, ProblemLimits
from graphrun.modules.blocks import lay_out
from graphrun.modules.build import on_host
from graphrun.modules.dtype_variants import DtypeVariant, DtypeVariants
from graphrun.modules.interceptor import entry_of
from graphrun.modules.mapped import MappedTensors, MappedWriter
from graphrun.modules.memos import HeldAttributes, attributes_of, is_helper
from graphrun.profile.dry_run import Prober
from graphrun.profile.problems import problem_of
from graphrun.profile.recording import Call as Traced
from graphrun.profile.recording import ComponentProfile, DryRun, Recording, StageEnd
from graphrun.profile.returned import Returned
from graphrun.runtime.files import file_block
from graphrun.sim.casts import follow_autocast
from graphrun.sim.dry import PLANNED, DryMachine

OF_ANOTHER_DEVICE = "device type for generator"  # in PyTorch's error
DRAWS_ON_DEVICE = "Its code draws random numbers on the device"


@dataclass(frozen=True, slots=True)
class AttachedCall:
    """A call of an attached pipeline.

    ``name``: for messages. ``proceed``: runs the call on the live pipeline. ``find``: returns the
    same callable of a meta pipeline. ``autocast``: the dtype of the device's active autocast, or
    None.
    """

    name: str
    proceed: Callable[..., Any]
    find: Callable[[MetaPipeline], Callable[..., Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None = None


class ProbeError(InputError):
    """The dry run of a call failed, so the pipeline cannot be planned."""


class MetaPipeline:
    """A meta copy of a pipeline, in the state of the pipeline at that time, with all its traces.

    If a dry run leaves tensors in the copy, or a call leaves tensors in the pipeline, the pipeline
    is copied again. ``unified``: the planned device shares its memory with the host.
    """

    @on_host()
    def __init__(
        self, pipe: Any, modules: Mapping[str, nn.Module], *, unified: bool = False
    ) -> None:
        self._live_pipe, self._modules, self._unified = pipe, modules, unified
        self._profiles: tuple[int, Mapping[str, ComponentProfile]] = (-1, {})
        self._copy()

    def _copy(self, previous_prober: LiveProber | None = None) -> None:
        """Copy the pipeline. ``previous_prober``: of an earlier copy."""
        self.pipe, self.meta_modules = meta_module_of(self._live_pipe, PLANNED, self._modules)
        self.prober = LiveProber(
            self.meta_modules, self._modules, previous_prober, unified=self._unified
        )
        self.dtype_variants = self.prober.dtype_variants
        self._meta_modules_by_id = {
            id(module): self.meta_modules[name] for name, module in self._modules.items()
        }
        owned_modules = attributes_of(self.meta_modules)
        helpers = {
            id(value): value
            for _, _, attributes in owned_modules
            for value in attributes.values()
            if is_helper(value)
        }
        self._attributes = [
            HeldAttributes(child, child_attributes) for _, child, child_attributes in owned_modules
        ]
        self._attributes += [
            HeldAttributes(helper, {**vars(helper)}) for helper in helpers.values()
        ]

    @on_host()
    def probe(self, call: AttachedCall) -> Recording:
        """Record a dry run of ``call``, without changing arguments, generators or random state.

        Raises ProbeError naming what failed. A ValueError or TypeError before the first call into a
        component is about the pipeline's arguments, and passes unchanged.
        """
        if kept_signatures(self.pipe) != kept_signatures(self._live_pipe):
            self._copy(self.prober)
        # drop position tables of an earlier dry run: the call computes them again
        for attributes in self._attributes:
            attributes.forget()
        recording = self.prober.begin(Recording(keeps_tensors=True))
        self.prober.call_signatures.clear()
        self.prober.text_lengths = TextLengths()
        self.dtype_variants.begin()
        component_names: list[Any] = []
        try:
            with (
                _preserve_random_state(),
                torch.no_grad(),
                DryMachine(unified=self._unified) as machine,
                self.prober.interceptor,
                self.prober.text_lengths.watch(self.pipe),
                follow_autocast(call.autocast),
            ):
                args, kwargs = copy_for_dry_run(
                    (call.args, call.kwargs),
                    PLANNED,
                    self._meta_modules_by_id,
                    unified=self._unified,
                )
                machine.on_cut = self.prober.text_lengths.add_masks
                # set after copying the arguments: the caller's tensors are not part of the call
                machine.listener = recording
                call.find(self)(*args, **kwargs)
                recording.items.append(StageEnd(call.name))
        except GraphrunError:
            raise
        except Exception as error:
            component_names = [
                item.component for item in recording.items if isinstance(item, Traced)
            ]
            if not component_names and isinstance(error, (ValueError, TypeError)):
                raise
            moment = (
                f"after {component_names[-1]} was called"
                if component_names
                else "before any component was called"
            )
            suggestion = (
                f"{DRAWS_ON_DEVICE}: pass a generator of the device"
                if OF_ANOTHER_DEVICE in str(error)
                else "A dry run puts zeros in place of the components' outputs; if the pipeline "
                "needs their values, write its stages as a graph file"
            )
            raise ProbeError(
                f"the dry run of {call.name}({describe_arguments(call.args, call.kwargs)}) failed "
                f"{moment}, in the pipeline's own code: {type(error).__name__}: {error}. "
                f"{suggestion}"
            ) from error
        return recording

    @on_host()
    def trace(
        self,
        dtype_variant: DtypeVariant,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        autocast: torch.dtype | None = None,
    ) -> tuple[Traced, Returned]:
        """Trace one call into a component in ``dtype_variant``; return the trace and the result."""
        self.prober.register(dtype_variant)
        with self.dtype_variants.using(dtype_variant), follow_autocast(autocast):
            proceed = entry_of(self.meta_modules[dtype_variant.component], method)
            return self.prober.trace(dtype_variant.name, method, proceed, args, kwargs)

    def serves(
        self,
        expected: Collection[str],
        dtype_variant: DtypeVariant,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        autocast: torch.dtype | None,
    ) -> bool:
        """Return whether a planned call into a component serves this one, which has another text.

        ``expected``: signatures of the planned calls. A component that takes texts may pad them to
        one length; then calls that differ only in their texts compute the same.
        """
        with follow_autocast(autocast):
            signatures = self.prober.differing_in_texts(
                dtype_variant.name, method, args, kwargs, expected
            )
        return bool(signatures) and self.prober.has_equal_trace(
            signatures, self.trace(dtype_variant, method, args, kwargs, autocast)[0]
        )

    @property
    def profiles(self) -> Mapping[str, ComponentProfile]:
        """The component profiles from all traces so far."""
        if self._profiles[0] != self.prober.traces:
            self._profiles = self.prober.traces, self.prober.profiles()
        return self._profiles[1]

    def problem(
        self,
        recording: Recording,
        demands: Directives,
        hardware: Hardware,
        limits: ProblemLimits,
        profiles: Mapping[str, ComponentProfile] | None = None,
        mapped_tensors: MappedTensors | None = None,
        copyable: Collection[str] = (),
    ) -> Problem:
        """Return the problem for ``recording``.

        ``profiles``: of components; None: from all traces so far. ``mapped_tensors``: on unified
        memory, the tensors that are mapped from files, which alone are blocks. ``copyable``: as for
        `problem_of`.
        """
        graph = graph_of(self._live_pipe, self._modules, self.dtype_variants.variants.values())
        graph = graph.directed(demands.keep, demands.exclude, demands.reserve_bytes, demands.pin)
        profiles = self.profiles if profiles is None else profiles
        if mapped_tensors is not None:
            profiles = {
                name: self._with_mapped_blocks(graph.components[name], profile, mapped_tensors)
                for name, profile in profiles.items()
            }
        return problem_of(
            graph,
            DryRun(recording, profiles),
            hardware,
            limits,
            {},
            copyable=copyable,
        )

    def _with_mapped_blocks(
        self,
        component: Component,
        profile: ComponentProfile,
        mapped_tensors: MappedTensors,
        *,
        by_layer: bool = False,
    ) -> ComponentProfile:
        """Return ``profile`` with the bytes of the mapped tensors of each block. No file contains a
        cast of a component (`DtypeVariant`)."""
        variant = self.dtype_variants.variants[component.name]
        is_cast = variant.name != variant.component
        layouts = lay_out(
            self._modules[variant.component],
            [path for group in profile.groups for path in group.blocks],
            split_layers=by_layer,
        )
        writer = MappedWriter(mapped_tensors)
        layouts = mapped_tensors.layouts(layouts)

        def bytes_without(tables: Sequence[str]) -> tuple[int, ...]:
            block_bytes = {
                path: 0 if is_cast else file_block(layout.without(tables), writer).layout.nbytes
                for path, layout in layouts.items()
            }
            return tuple(
                max(block_bytes[path] for path in group.blocks) for group in profile.groups
            )

        split = profile.layer_split
        return replace(
            profile,
            block_bytes=bytes_without(()),
            without_tables={component.dtype: bytes_without(profile.tables)}
            if profile.tables
            else {},
            as_stored=component.precision,
            layer_split=None
            if split is None
            else self._with_mapped_blocks(component, split, mapped_tensors, by_layer=True),
        )


class LiveProber(Prober):
    """A prober of meta modules that uses the weights of ``live_modules`` if it computes on the CPU.
    ``previous_prober``: of an earlier copy, whose traces are reused."""

    def __init__(
        self,
        meta_modules: Mapping[str, nn.Module],
        live_modules: Mapping[str, nn.Module],
        previous_prober: LiveProber | None = None,
        *,
        unified: bool = False,
    ) -> None:
        self.dtype_variants = DtypeVariants(meta_modules)
        variants = self.dtype_variants.variants
        super().__init__(
            meta_modules, self.dtype_variants, lambda name: live_modules[variants[name].component]
        )
        self.host_type = "" if unified else self.host_type
        self.call_signatures: set[str] = set()  # of the call in the dry run, as text
        self.text_lengths = TextLengths()  # of the same call
        # by signature without texts: the signatures with texts
        self._by_shape = defaultdict[Any, dict[Any, None]](dict)
        if previous_prober is not None:
            self._traces, self.routed, self._by_shape = (
                previous_prober._traces,
                previous_prober.routed,
                previous_prober._by_shape,
            )
            for dtype_variant in previous_prober.dtype_variants.variants.values():
                self.register(dtype_variant)

    def answer(
        self,
        component: str,
        method: str,
        proceed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Answer as `Prober.answer`, and record the call's signature."""
        self.register(self.dtype_variants.variants[component])
        signature = self.signature(component, method, args, kwargs)
        self.call_signatures.add(repr(signature))
        self.text_lengths.add_inputs((args, kwargs))
        self._by_shape[self.signature(component, method, args, kwargs, texts=False)][signature] = (
            None
        )
        return super().answer(component, method, proceed, args, kwargs)

    def differing_in_texts(
        self, component: str, method: str, args: Any, kwargs: Any, expected: Collection[str]
    ) -> list[Any]:
        """Return the signatures in ``expected`` that differ from this call's only in texts."""
        candidates = self._by_shape.get(
            self.signature(component, method, args, kwargs, texts=False), {}
        )
        return [
            signature
            for signature in candidates
            if repr(signature) in expected and signature in self._traces
        ]

    def has_equal_trace(self, signatures: Iterable[Any], call: Traced) -> bool:
        return any(self._traces[signature][0] == call for signature in signatures)

    def register(self, dtype_variant: DtypeVariant) -> None:
        """Add ``dtype_variant`` as a component with its own profile."""
        self.dtype_variants.variants[dtype_variant.name] = dtype_variant
        if dtype_variant.name not in self.meta_modules:
            self.meta_modules[dtype_variant.name] = self.meta_modules[dtype_variant.component]

    def as_traced(self, name: str) -> AbstractContextManager[None]:
        return self.dtype_variants.using(self.dtype_variants.variants[name])

    @property
    def traces(self) -> int:
        """The number of signatures traced so far."""
        return len(self._traces)

    def _untraceable(
        self,
        component: str,
        method: str,
        args: Any,
        kwargs: Any,
        on_meta: Exception,
        on_cpu: Exception,
    ) -> Exception:
        attempts = [
            f"on {place} ({type(error).__name__}: {error})"
            for place, error in (("meta", on_meta), ("the CPU", on_cpu))
        ]
        return ProbeError(
            f"{component}.{method}({describe_arguments(args, kwargs)}) cannot be traced, neither "
            f"{' nor '.join(attempts)}: write the pipeline's stages as a graph file, or replace "
            f"{component} by a module that can be traced"
        )


@contextmanager
def _preserve_random_state() -> Iterator[None]:
    """Restore the random state of Python, NumPy and torch (CPU) on exit."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)

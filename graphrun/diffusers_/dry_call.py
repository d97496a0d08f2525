"""Dry run of one call of a live pipeline: its own code on a meta copy, on an unlimited simulated
accelerator.

Knows no budgets, no plans, and not the device that the call will run on.

    live pipeline    pipe(prompt, image=..., generator=...)         text_encoder, unet, vae with
    weights meta pipeline    pipe(prompt, image=copy, generator=copy)       the same on meta; each
    entry signature is traced once
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from graphrun.diffusers_.call_arguments import copy_for_dry_run, describe_arguments
from graphrun.diffusers_.live import graph_of, kept_by, meta_module_of
from graphrun.diffusers_.text_lengths import TextLengths
from graphrun.errors import GraphrunError, InputError
from graphrun.graph.graph import Directives
from graphrun.model.problem import Hardware, Problem
from graphrun.modules.build import on_host
from graphrun.modules.dtype_variants import DtypeVariant, DtypeVariants
from graphrun.modules.interceptor import entry_of
from graphrun.modules.memos import HeldAttributes, is_helper, owned
from graphrun.profile.dry_run import Prober
from graphrun.profile.problems import Limits, problem_of
from graphrun.profile.recording import Call as Traced
from graphrun.profile.recording import ComponentProfile, DryRun, Recording, StageEnd
from graphrun.profile.returned import Returned
from graphrun.sim.casts import following
from graphrun.sim.dry import PLANNED, DryMachine


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an attached pipeline.

    ``name`` is used in messages. ``proceed`` runs it on the live pipeline; ``find`` returns the
    same callable of a meta pipeline. ``autocast``: the dtype of the autocast that it is called
    under, on the device; None: none.
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
    """A copy of a pipeline on meta, in the state of the pipeline when it was made, with the traces
    of all its dry runs.

    The copy is made anew where it holds other tensors than the pipeline: a dry run left some in it,
    or calls left some in the pipeline."""

    @on_host()
    def __init__(self, pipe: Any, modules: Mapping[str, nn.Module]) -> None:
        self._live_pipe, self._modules = pipe, modules
        self._profiles: tuple[int, Mapping[str, ComponentProfile]] = (-1, {})
        self._copy()

    def _copy(self, traced: LiveProber | None = None) -> None:
        """Copies the pipeline. ``traced``: the prober of an earlier copy."""
        self.pipe, self.meta_modules = meta_module_of(self._live_pipe, PLANNED, self._modules)
        self.prober = LiveProber(self.meta_modules, self._modules, traced)
        self.dtype_variants = self.prober.dtype_variants
        self._meta_modules_by_id = {
            id(module): self.meta_modules[name] for name, module in self._modules.items()
        }
        found = owned(self.meta_modules)
        helpers = {
            id(value): value for _, _, own in found for value in own.values() if is_helper(value)
        }
        self._tables = [HeldAttributes(child, own) for _, child, own in found]
        self._tables += [HeldAttributes(helper, {**vars(helper)}) for helper in helpers.values()]

    @on_host()
    def probe(self, call: Call) -> Recording:
        """Records a dry run of ``call``. Arguments, generators and the global random state are not
        changed.

        Raises ProbeError naming what failed. A ValueError or TypeError that the pipeline raises
        before any component is entered is about its arguments, and is raised as it is.
        """
        if kept_by(self.pipe) != kept_by(self._live_pipe):
            self._copy(self.prober)
        for tables in (
            self._tables
        ):  # those of positions, which an earlier dry run made; the call makes them anew
            tables.forget()
        recording = self.prober.begin(Recording(keeps=True))
        self.prober.entry_signatures.clear()
        self.prober.text_lengths = TextLengths()
        self.dtype_variants.begin()
        entered: list[Any] = []
        try:
            with (
                _preserve_random_state(),
                torch.no_grad(),
                DryMachine() as machine,
                self.prober.interceptor,
                self.prober.text_lengths.watching(self.pipe),
                following(call.autocast),
            ):
                args = copy_for_dry_run(call.args, PLANNED, self._meta_modules_by_id)
                kwargs = copy_for_dry_run(call.kwargs, PLANNED, self._meta_modules_by_id)
                machine.on_cut = self.prober.text_lengths.cut
                # set after copying the arguments: the caller's tensors are not part of the call
                machine.listener = recording
                call.find(self)(*args, **kwargs)
                recording.items.append(StageEnd(call.name))
        except GraphrunError:
            raise
        except Exception as error:
            entered = [item.component for item in recording.items if isinstance(item, Traced)]
            if not entered and isinstance(error, (ValueError, TypeError)):
                raise
            after = (
                f"after {entered[-1]} was entered"
                if entered
                else "before any component was entered"
            )
            raise ProbeError(
                f"the dry run of {call.name}({describe_arguments(call.args, call.kwargs)}) failed {after}, in the pipeline's own "
                f"code: {type(error).__name__}: {error}. A dry run puts zeros in place of the components' outputs; if the pipeline "
                "needs their values, write its stages as a graph file"
            ) from error
        return recording

    @on_host()
    def trace(
        self,
        dtype_variant: DtypeVariant,
        entry: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        autocast: torch.dtype | None = None,
    ) -> tuple[Traced, Returned]:
        """Traces one entry into a component in ``dtype_variant``, under ``autocast``: (what it
        allocates and enters, what it returns)."""
        self.prober.register(dtype_variant)
        with self.dtype_variants.within(dtype_variant), following(autocast):
            proceed = entry_of(self.meta_modules[dtype_variant.component], entry)
            return self.prober.trace(dtype_variant.name, entry, proceed, args, kwargs)

    def serves(
        self,
        expected: Collection[str],
        dtype_variant: DtypeVariant,
        entry: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        autocast: torch.dtype | None,
    ) -> bool:
        """Whether an entry computes what one with a signature in ``expected`` does that differs
        from it in texts only: a component that takes texts itself may pad them to one length."""
        with following(autocast):
            like = self.prober.differing_in_texts(dtype_variant.name, entry, args, kwargs, expected)
        return bool(like) and self.prober.same(
            like, self.trace(dtype_variant, entry, args, kwargs, autocast)[0]
        )

    @property
    def profiles(self) -> Mapping[str, ComponentProfile]:
        """The component profiles, taken from all traces so far."""
        if self._profiles[0] != self.prober.traces:
            self._profiles = self.prober.traces, self.prober.profiles()
        return self._profiles[1]

    def problem(
        self,
        recording: Recording,
        demands: Directives,
        hardware: Hardware,
        limits: Limits,
        profiles: Mapping[str, ComponentProfile] | None = None,
    ) -> Problem:
        """The problem for ``recording``, with the component ``profiles``; None: those taken from
        all traces so far."""
        graph = graph_of(self._live_pipe, self._modules, self.dtype_variants.known.values())
        graph = graph.directed(demands.keep, demands.exclude, demands.reserve_bytes, demands.pin)
        return problem_of(
            graph,
            DryRun(recording, self.profiles if profiles is None else profiles),
            hardware,
            limits,
            {},
        )


class LiveProber(Prober):
    """A prober of ``live`` modules, whose own weights it uses for an entry that it computes on the
    CPU. ``traced``: a prober of an earlier copy of them, whose traces it takes over."""

    def __init__(
        self,
        meta_modules: Mapping[str, nn.Module],
        live: Mapping[str, nn.Module],
        traced: LiveProber | None = None,
    ) -> None:
        self.dtype_variants = DtypeVariants(meta_modules)
        known = self.dtype_variants.known
        super().__init__(
            meta_modules, self.dtype_variants, lambda name: live[known[name].component]
        )
        self.entry_signatures: set[str] = set()  # of the call that is being probed, as text
        self.text_lengths = TextLengths()  # of that call
        # signatures with texts, by those without
        self._by_shape = defaultdict[Any, dict[Any, None]](dict)
        if traced is not None:
            self._traces, self.routed, self._by_shape = (
                traced._traces,
                traced.routed,
                traced._by_shape,
            )
            for dtype_variant in traced.dtype_variants.known.values():
                self.register(dtype_variant)

    def answer(
        self,
        component: str,
        entry: str,
        proceed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """As `Prober.answer`; also notes the entry's signature."""
        self.register(self.dtype_variants.known[component])
        signature = self.signature(component, entry, args, kwargs)
        self.entry_signatures.add(repr(signature))
        self.text_lengths.enter((args, kwargs))
        self._by_shape[self.signature(component, entry, args, kwargs, texts=False)][signature] = (
            None
        )
        return super().answer(component, entry, proceed, args, kwargs)

    def differing_in_texts(
        self, component: str, entry: str, args: Any, kwargs: Any, expected: Collection[str]
    ) -> list[Any]:
        """The signatures among ``expected`` that differ from that of this entry in texts only."""
        alike = self._by_shape.get(self.signature(component, entry, args, kwargs, texts=False), {})
        return [
            signature
            for signature in alike
            if repr(signature) in expected and signature in self._traces
        ]

    def same(self, signatures: Iterable[Any], call: Traced) -> bool:
        """Whether one of the entries with these ``signatures`` was traced as ``call`` was."""
        return any(self._traces[signature][0] == call for signature in signatures)

    def register(self, dtype_variant: DtypeVariant) -> None:
        """Adds ``dtype_variant`` as a component with a profile of its own."""
        self.dtype_variants.known[dtype_variant.name] = dtype_variant
        if dtype_variant.name not in self.meta_modules:
            self.meta_modules[dtype_variant.name] = self.meta_modules[dtype_variant.component]

    def as_traced(self, name: str) -> AbstractContextManager[None]:
        return self.dtype_variants.within(self.dtype_variants.known[name])

    @property
    def traces(self) -> int:
        """The number of entry signatures traced so far."""
        return len(self._traces)

    def _untraceable(
        self,
        component: str,
        entry: str,
        args: Any,
        kwargs: Any,
        on_meta: Exception,
        on_cpu: Exception,
    ) -> Exception:
        tried = [
            f"on {where} ({type(error).__name__}: {error})"
            for where, error in (("meta", on_meta), ("the CPU", on_cpu))
        ]
        return ProbeError(
            f"{component}.{entry}({describe_arguments(args, kwargs)}) cannot be traced, neither {' nor '.join(tried)}: write the "
            f"pipeline's stages as a graph file, or replace {component} by a module that can be traced"
        )


@contextmanager
def _preserve_random_state() -> Iterator[None]:
    """Restores the random state of Python, NumPy and torch (CPU) on exit."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)

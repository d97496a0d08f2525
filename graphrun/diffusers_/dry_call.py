"""The dry run of one call of a live pipeline: its own code on its meta module, on an unlimited simulated accelerator.

Decides what a failing probe says. Must not know budgets, plans or the device that the call will compute on.

    live      pipe(prompt, image=..., generator=...)          meta module     pipe(prompt, image=copy, generator=copy)
              text_encoder, unet, vae: weights                          on meta: each kind of call traced once
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn

from graphrun import sim
from graphrun.diffusers_.call import described, rehearsed
from graphrun.diffusers_.live import components_of, joined, meta_module_of
from graphrun.errors import GraphrunError, InputError
from graphrun.modules.blocks import TensorLocation, held
from graphrun.modules.build import on_host
from graphrun.modules.dtype_variants import DtypeVariant, DtypeVariants
from graphrun.modules.interceptor import entry_of
from graphrun.profile.dry_run import Prober
from graphrun.profile.recorder import META
from graphrun.profile.recording import Call as Traced
from graphrun.profile.recording import ComponentProfile, Mark, Probed, Recording
from graphrun.profile.returned import Returned
from graphrun.units import show_size


@dataclass(frozen=True, slots=True)
class Call:
    """One call from outside: how it is named, what it calls (in the live pipeline, or found in its meta module), and with what."""

    name: str
    proceed: Callable[..., Any]
    find: Callable[[Rehearsal], Callable[..., Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ProbeError(InputError):
    """A pipeline cannot be planned from its own code: the dry run of a call failed."""


class Rehearsal:
    """A pipeline's meta module in the state that the pipeline is in now, and every trace made with it so far."""

    @on_host()
    def __init__(self, pipe: Any, modules: Mapping[str, nn.Module]) -> None:
        self.pipe = meta_module_of(pipe, sim.device)
        self.meta_modules = joined(components_of(self.pipe))
        self.prober = LiveProber(self.meta_modules, modules)
        self.dtype_variants = self.prober.dtype_variants
        self._twins = {id(module): self.meta_modules[name] for name, module in modules.items()}
        self._facts: tuple[int, Mapping[str, ComponentProfile]] = (-1, {})

    @on_host()
    def probe(self, call: Call) -> Recording:
        """The tape of ``call``. Arguments, generators and global random state are left as they are.

        Raises ProbeError naming what failed; an error that the pipeline raises about its arguments before any component is
        entered is raised as it is.
        """
        recording = self.prober.recording = Recording()
        self.prober.answered.clear()
        self.dtype_variants.begin()
        entered: list[Any] = []
        try:
            with _same_randomness(), torch.no_grad(), sim.Machine() as machine, self.prober.interceptor:
                args, kwargs = rehearsed(call.args, sim.device, self._twins), rehearsed(call.kwargs, sim.device, self._twins)
                machine.listener = recording  # what the caller has on the device is no part of the call
                call.find(self)(*args, **kwargs)
                recording.items.append(Mark("stage", call.name))
        except GraphrunError:
            raise
        except Exception as error:
            entered = [item.name for item in recording.items if isinstance(item, Mark)]
            if not entered and isinstance(error, (ValueError, TypeError)):
                raise
            after = f"after {entered[-1]} was entered" if entered else "before any component was entered"
            raise ProbeError(
                f"the dry run of {call.name}({described(call.args, call.kwargs)}) failed {after}, in the pipeline's own code: "
                f"{type(error).__name__}: {error}. It runs on zeros in place of the components' outputs; if it needs their values, "
                "write the pipeline's stages as a graph file, which names what is run when"
            ) from error
        return recording

    @on_host()
    def trace(
        self, dtype_variant: DtypeVariant, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Traced, Returned]:
        """An entry into a component in ``dtype_variant``, wherever it comes: what it takes, and what it returns."""
        self.prober.know(dtype_variant)
        with self.dtype_variants.within(dtype_variant):
            proceed = entry_of(self.meta_modules[dtype_variant.component], entry)
            return self.prober.trace(dtype_variant.name, entry, proceed, args, kwargs)

    def probed(self, recording: Recording) -> Probed:
        """``recording`` with the facts of all components, as all traces so far show them."""
        if self._facts[0] != self.prober.traces:
            self._facts = self.prober.traces, self.prober.profiles()
        return Probed(recording, self._facts[1], self.meta_modules)


class LiveProber(Prober):
    """A prober that runs what cannot be traced on meta once on the CPU, with the weights of ``live``."""

    def __init__(self, meta_modules: Mapping[str, nn.Module], live: Mapping[str, nn.Module]) -> None:
        self.dtype_variants = DtypeVariants(meta_modules)
        super().__init__(meta_modules, self.dtype_variants)
        self._live = dict(live)
        self.answered: set[Any] = set()  # signatures of the entries of the call that is probed
        self._cached: dict[int, int] = {}  # by id of a trace: bytes that the component keeps beyond its call
        self._keys = count(1 << 40)  # beside those of the tape's machine

    def answer(self, component: str, entry: str, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As for every probe; the entry's signature is kept, and what the component has cached stays until the end."""
        self.know(self.dtype_variants.known[component])
        signature = self.signature(component, entry, args, kwargs)
        answer = super().answer(component, entry, proceed, args, kwargs)
        if signature not in self.answered:
            self.answered.add(signature)
            self.recording.items.append((next(self._keys), self._cached.get(id(self._traces[signature][0]), 0)))
        return answer

    def know(self, dtype_variant: DtypeVariant) -> None:
        """``dtype_variant`` is entered, and has facts of its own."""
        self.dtype_variants.known[dtype_variant.name] = dtype_variant
        if dtype_variant.name not in self.meta_modules:
            self.meta_modules[dtype_variant.name] = self.meta_modules[dtype_variant.component]
            self.entered[dtype_variant.name], self.repeated[dtype_variant.name], self.routed[dtype_variant.name] = {}, set(), set()

    def as_traced(self, name: str) -> AbstractContextManager[None]:
        return self.dtype_variants.within(self.dtype_variants.known[name])

    @property
    def traces(self) -> int:
        """How many kinds of calls were traced so far."""
        return len(self._traces)

    def _trace(
        self, component: str, entry: str, proceed: Callable[..., Any], args: Any, kwargs: Any, device: torch.device = META
    ) -> tuple[Traced, Returned]:
        try:
            call, made = super()._trace(component, entry, proceed, args, kwargs)
            traced = replace(call, kept=()), made
            self._cached[id(traced[0])] = sum(nbytes for key, nbytes in call.events if key in call.kept)
            return traced
        except GraphrunError:
            raise
        except Exception as error:  # noqa: BLE001  (whatever the component's code raises where there are no numbers)
            first = f"{type(error).__name__}: {error}"
        live = self._live[self.dtype_variants.known[component].component]
        size = show_size(sum(tensor.nbytes for tensor in (*live.parameters(), *live.buffers())))
        warnings.warn(
            f"{component}.{entry} looks at numbers ({first.splitlines()[0]}): it is computed once on the CPU, with all {size} of "
            "its weights, before the call is planned",
            RuntimeWarning,
            stacklevel=2,
        )
        try:
            with _lent(live, self.meta_modules[component]):
                call, made = super()._trace(component, entry, proceed, args, kwargs, torch.device("cpu"))
                return replace(call, kept=()), made
        except Exception as error:
            raise ProbeError(
                f"{component}.{entry}({described(args, kwargs)}) cannot be traced, neither without numbers ({first}) nor on the "
                f"CPU ({type(error).__name__}: {error}): write the pipeline's stages as a graph file, or call it with {component} "
                "replaced by what can be traced"
            ) from error


@contextmanager
def _lent(live: nn.Module, meta_module: nn.Module) -> Iterator[None]:
    """``meta_module`` has the weights of ``live``, where they are."""
    pairs = [pair for mine, other in zip(meta_module.modules(), live.modules(), strict=True) for pair in _paired(mine, other)]
    for place, _, lent in pairs:
        place.put(lent)
    try:
        yield
    finally:
        for place, tensor, _ in pairs:
            place.put(tensor)


def _paired(mine: nn.Module, other: nn.Module) -> list[tuple[TensorLocation, torch.Tensor, torch.Tensor]]:
    """Each place in ``mine``, with the tensor that is there, and that which ``other`` has there."""
    tensors = zip(held(mine), held(other), strict=True)
    return [(place, tensor, _as(lent, tensor)) for (tensor, _, place, _), (lent, *_) in tensors]


def _as(tensor: Any, mine: Any) -> Any:
    """``tensor`` in the dtype of ``mine``."""
    if tensor.dtype == mine.dtype:
        return tensor
    cast = tensor.detach().to(mine.dtype)
    return nn.Parameter(cast, requires_grad=False) if isinstance(tensor, nn.Parameter) else cast


@contextmanager
def _same_randomness() -> Iterator[None]:
    """The process's random numbers go on afterwards as if nothing had been drawn."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)

"""Fingerprint runs: dry runs that show whether a pipeline split into stages computes the same as
one call.

Each entry into a component is recorded with a digest of all its arguments, and returns random
numbers seeded by that digest. If one run passes another tensor than the other, in another order, or
enters a component once more, every later digest differs. No weights are used; a component's own
code runs once per signature, on meta, for the output shapes.

    one call    text_encoder 3f1a   transformer 90c2   transformer 7be0   vae.decode 12dd stages
    text_encoder 3f1a | transformer 90c2   transformer 7be0 | vae.decode 12dd     equal: the same
    pipeline
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphrun.diffusers_.call_arguments import describe_arguments
from graphrun.diffusers_.dry_call import ProbeError
from graphrun.errors import GraphrunError
from graphrun.graph.graph import Graph
from graphrun.modules.trees import walk
from graphrun.profile.dry_run import HOLLOW_BYTES, Prober, random_weights
from graphrun.sim.dry import PLANNED, DryMachine
from graphrun.sim.tensor import SimTensor


@dataclass(frozen=True, slots=True)
class EntryRecord:
    """One entry into a component, with a digest of its arguments."""

    component: str
    entry: str
    digest: str

    def __str__(self) -> str:
        return self.component if self.entry == "forward" else f"{self.component}.{self.entry}"


class FingerprintRun(Prober):
    """A prober that returns random numbers seeded by the arguments' digest. ``entries`` are those
    of the last run.

    ``call_locals``: the numbers among the local variables of the function ``observed`` at the last
    entry into a component.
    """

    def __init__(
        self, graph: Graph, meta_modules: Mapping[str, nn.Module], observed: Callable[..., Any]
    ) -> None:
        super().__init__(meta_modules, weights=random_weights(graph))
        self.entries: list[EntryRecord] = []
        self.call_locals: dict[str, Any] = {}
        self._code = inspect.unwrap(observed).__code__

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of one fingerprint run, on an unlimited simulated accelerator. Restores the
        global random state on exit."""
        self.entries, self.call_locals = [], {}
        self.recording.items.clear()
        with (
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            DryMachine() as machine,
            self.interceptor,
        ):
            machine.hollow_bytes = HOLLOW_BYTES
            yield

    def answer(
        self,
        component: str,
        entry: str,
        proceed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Records the entry, and returns random tensors in the shapes of its outputs. Raises
        ProbeError if it cannot be traced."""
        self._capture_locals()
        try:
            _, made = self.trace(component, entry, proceed, args, kwargs)
        except GraphrunError:
            raise
        except Exception as error:
            what = f"{component}.{entry}({describe_arguments(args, kwargs)})"
            raise ProbeError(
                f"{what} cannot be traced without weights: {type(error).__name__}: {error}"
            ) from error
        digest = digest_of((component, entry, args, kwargs))
        self.entries.append(EntryRecord(component, entry, digest))
        generator = torch.Generator("cpu").manual_seed(int(digest[:15], 16))
        return walk(
            made.template, lambda t: _random_like(t, generator).to(PLANNED) if t.is_meta else t
        )

    def _capture_locals(self) -> None:
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code is self._code:
                self.call_locals = {
                    name: value
                    for name, value in frame.f_locals.items()
                    if isinstance(value, (int, float))
                }
                return


def _random_like(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Normal random numbers in the shape and dtype of ``like``; zeros for integer dtypes and above
    `HOLLOW_BYTES`."""
    nbytes = like.numel() * like.element_size()
    if not like.is_floating_point() or nbytes > HOLLOW_BYTES:
        return torch.zeros(like.shape, dtype=like.dtype, device="cpu")
    return torch.randn(like.shape, generator=generator, device="cpu").to(like.dtype)


def digest_of(value: Any) -> str:
    """A digest (16 hexadecimal digits) of every tensor's dtype, shape and values, and of every
    plain value in ``value``."""
    found = hashlib.sha256()
    _digest(value, found.update)
    return found.hexdigest()[:16]


def _digest(value: Any, update: Callable[[bytes], None]) -> None:
    if isinstance(value, torch.Tensor):
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.numel() * value.element_size() <= HOLLOW_BYTES and not value.is_meta:
            raw = value.raw if isinstance(value, SimTensor) else value
            flat = torch.empty(raw.numel(), dtype=raw.dtype, device="cpu").copy_(
                raw.detach().reshape(-1)
            )
            update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            update(str(key).encode())
            _digest(item, update)
    elif isinstance(value, (list, tuple)):
        update(f"[{len(value)}".encode())
        for item in value:
            _digest(item, update)
    elif isinstance(value, (str, bool, int, float, type(None))):
        update(repr(value).encode())
    elif isinstance(
        value, torch.Generator
    ):  # some pipelines pass one to `vae.decode`, which does not draw from it
        update(repr(None).encode())
    else:
        update(type(value).__name__.encode())

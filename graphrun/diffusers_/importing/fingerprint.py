"""Fingerprint runs: dry runs that show whether stages compute the same as one call.

Each call into a component is recorded with a digest of its arguments, and returns random numbers
seeded by that digest. If two runs differ in one tensor, in the order of calls, or in their number,
all later digests differ. No weights are used. A component's own code runs once per signature, on
meta, for the output shapes.

    one call   text_encoder 3f1a   transformer 90c2   transformer 7be0   vae.decode 12dd
    stages     text_encoder 3f1a | transformer 90c2   transformer 7be0 | vae.decode 12dd

Here both compute the same.
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
from graphrun.modules.trees import holders_in, put_content, tensors_in, walk
from graphrun.profile.dry_run import HOLLOW_BYTES, Prober, random_weights
from graphrun.profile.returned import continued_prompt
from graphrun.sim.dry import PLANNED, DryMachine
from graphrun.sim.tensor import SimTensor


@dataclass(frozen=True, slots=True)
class ComponentCall:
    """One call into a component, with a digest of its arguments."""

    component: str
    method: str
    digest: str

    def __str__(self) -> str:
        return self.component if self.method == "forward" else f"{self.component}.{self.method}"


class FingerprintRun(Prober):
    """A prober that returns random numbers seeded by the digest of the arguments.

    ``component_calls``: of the last run. ``call_locals``: the numbers among the local variables of
    the function ``observed`` at the last call into a component.
    """

    def __init__(
        self, graph: Graph, meta_modules: Mapping[str, nn.Module], observed: Callable[..., Any]
    ) -> None:
        super().__init__(meta_modules, weights=random_weights(graph))
        self.component_calls: list[ComponentCall] = []
        self.call_locals: dict[str, Any] = {}
        self._code = inspect.unwrap(observed).__code__

    @contextmanager
    def record_run(self) -> Iterator[None]:
        """Record a run on an unlimited simulated accelerator; restore the random state on exit."""
        self.component_calls, self.call_locals = [], {}
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
        method: str,
        proceed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Record the call, and return random tensors in the shapes of its outputs. Generated tokens
        repeat the prompt's.

        Objects among the arguments that the call changes, such as a cache of keys and values, get
        random tensors too. Raises ProbeError if the call cannot be traced.
        """
        self._capture_locals()
        try:
            _, result = self.trace(component, method, proceed, args, kwargs)
        except GraphrunError:
            raise
        except Exception as error:
            call_text = f"{component}.{method}({describe_arguments(args, kwargs)})"
            raise ProbeError(
                f"{call_text} cannot be traced without weights: {type(error).__name__}: {error}"
            ) from error
        digest = digest_of((component, method, args, kwargs))
        self.component_calls.append(ComponentCall(component, method, digest))
        generator = torch.Generator("cpu").manual_seed(int(digest[:15], 16))
        argument_tensors = tensors_in((args, kwargs)) if method == "generate" else []

        def tensor_like(template: torch.Tensor) -> torch.Tensor:
            if not template.is_meta:
                return template
            tokens = continued_prompt(argument_tensors, template)
            return (_random_like(template, generator) if tokens is None else tokens).to(PLANNED)

        template, argument_contents = walk((result.template, result.argument_contents), tensor_like)
        holders = holders_in((args, kwargs))
        for number, content in argument_contents.items():
            put_content(holders[number], content)
        return template

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


def _random_like(template: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return normal random numbers in the shape and dtype of ``template``; zeros for integer dtypes
    and above `HOLLOW_BYTES`."""
    nbytes = template.numel() * template.element_size()
    if not template.is_floating_point() or nbytes > HOLLOW_BYTES:
        return torch.zeros(template.shape, dtype=template.dtype, device="cpu")
    return torch.randn(template.shape, generator=generator, device="cpu").to(template.dtype)


def digest_of(value: Any) -> str:
    """Return 16 hexadecimal digits of a digest of ``value``: dtype, shape and values of every
    tensor, and every plain value."""
    digest = hashlib.sha256()
    _digest(value, digest.update)
    return digest.hexdigest()[:16]


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
    # some pipelines pass a generator to `vae.decode`, which does not draw from it
    elif isinstance(value, torch.Generator):
        update(repr(None).encode())
    else:
        update(type(value).__name__.encode())
        for tensor in tensors_in(value):
            _digest(tensor, update)

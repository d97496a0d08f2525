"""The dtypes of a component's tensors in a run: some pipelines cast a component and cast it back.

    variant    vae                      vae@float32                   vae
    pipeline   ... vae.to(float32) ---> ... vae.decode(latents) ... vae.to(float16) --->

Widening is exact, so casting back returns the original variant. Narrowing rounds: widening a
rounded component gives a variant of its own. The values of every variant are computed from the
original ones, so they can be copied to a device before the cast happens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphrun.modules.blocks import TensorEntry, lay_out

Dtypes = tuple[torch.dtype, ...]
"""The dtypes of a module's distinct tensors, in the order of `nn.Module.modules`."""
Switched = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DtypeVariant:
    """A component's current ``dtypes``, and the earlier ``rounded`` ones, oldest first."""

    component: str
    rounded: tuple[Dtypes, ...]
    dtypes: Dtypes

    def cast(self, dtypes: Dtypes) -> DtypeVariant:
        exact = all(
            torch.promote_types(rounded, target) == target
            for rounded, target in zip(self.rounded[-1], dtypes, strict=True)
        )
        return DtypeVariant(
            self.component, self.rounded if exact else (*self.rounded, dtypes), dtypes
        )

    def to_json(self) -> list[Any]:
        names = [
            [str(dtype).removeprefix("torch.") for dtype in dtypes]
            for dtypes in (self.dtypes, *self.rounded)
        ]
        return [self.component, *names]

    @staticmethod
    def from_json(data: Any) -> DtypeVariant:
        dtypes, *rounded = (tuple(getattr(torch, name) for name in names) for names in data[1:])
        return DtypeVariant(data[0], tuple(rounded), dtypes)

    @property
    def name(self) -> str:
        """The component's own name for its original variant, else ``component@dtype``."""
        if self.rounded == (self.dtypes,):
            return self.component
        floating = sorted(
            {str(dtype).removeprefix("torch.") for dtype in self.dtypes if dtype.is_floating_point}
        )
        unambiguous = len(floating) == 1 and len(self.rounded) == 1
        suffix = (
            ""
            if unambiguous
            else "-" + hashlib.sha256(repr((self.rounded, self.dtypes)).encode()).hexdigest()[:4]
        )
        return f"{self.component}@{'+'.join(floating)}{suffix}"


def _nothing(_: str) -> None:
    """Do nothing: the default callback of `DtypeVariants`."""


class DtypeVariants:
    """The dtype variants that the components ``modules`` have had.

    A module's own parameters and buffers are those of its current variant. ``leave(name)`` is
    called before the tensors of a variant are taken out of its module, ``join(name)`` after the
    tensors of a variant were put into it.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        leave: Switched = _nothing,
        join: Switched = _nothing,
    ) -> None:
        self._modules = dict(modules)
        self._leave, self._join = leave, join
        original_dtypes = {
            name: tuple(tensor.dtype for tensor in _distinct(module))
            for name, module in modules.items()
        }
        self._current = {
            name: DtypeVariant(name, (dtypes,), dtypes) for name, dtypes in original_dtypes.items()
        }
        self.variants = dict(self._current)  # by name
        self._tensors: dict[str, list[torch.Tensor]] = {}
        self._computed: set[str] = set()

    def current(self, component: str) -> DtypeVariant:
        return self._current[component]

    def cast(self, component: str, change: Callable[[], object]) -> DtypeVariant:
        """Switch ``component`` to the variant that ``change`` casts it to, and return the variant.
        ``change`` casts in place, and gets meta copies of the tensors."""
        module = self._modules[component]
        originals = _distinct(module)
        _replace_tensors(
            module, [_like(tensor, torch.empty_like(tensor, device="meta")) for tensor in originals]
        )
        try:
            change()
            dtypes = tuple(tensor.dtype for tensor in _distinct(module))
        finally:
            _replace_tensors(module, originals)
        return self.become(self._current[component].cast(dtypes))

    def become(self, dtype_variant: DtypeVariant) -> DtypeVariant:
        """Switch the variant's component to it, and return it."""
        previous = self._current[dtype_variant.component]
        if dtype_variant != previous:
            self.variants[dtype_variant.name] = dtype_variant
            module = self._modules[dtype_variant.component]
            self._leave(previous.name)
            self._tensors[previous.name] = _distinct(module)
            _replace_tensors(module, self._values(dtype_variant))
            self._current[dtype_variant.component] = dtype_variant
            self._join(dtype_variant.name)
        return dtype_variant

    @contextmanager
    def using(self, dtype_variant: DtypeVariant) -> Iterator[None]:
        """Switch the component to ``dtype_variant`` inside this context."""
        previous = self._current[dtype_variant.component]
        self.become(dtype_variant)
        try:
            yield
        finally:
            self.become(previous)

    @property
    def first(self) -> bool:
        """Whether every component has its original variant."""
        return all(dtype_variant.name == name for name, dtype_variant in self._current.items())

    def begin(self) -> None:
        """Switch every component to its original variant, whose values may have changed since. All
        other values are computed again."""
        for name in self._modules:
            self.become(self.variants[name])
        self._computed.clear()

    def _values(self, dtype_variant: DtypeVariant) -> list[torch.Tensor]:
        """Return the tensors of ``dtype_variant``, with values computed from the original ones."""
        originals, tensors = (
            self._tensors.get(dtype_variant.component, []),
            self._tensors.get(dtype_variant.name),
        )
        if tensors is not None and (
            dtype_variant.name == dtype_variant.component or dtype_variant.name in self._computed
        ):
            return tensors
        self._computed.add(dtype_variant.name)
        steps = (*dtype_variant.rounded[1:], dtype_variant.dtypes)
        values = [
            _cast_through(tensor, [dtypes[n] for dtypes in steps])
            for n, tensor in enumerate(originals)
        ]
        if tensors is None:
            return values
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data.copy_(value.data)
        return tensors


class HostCasts:
    """Casts of components while all weights are in host memory: the modules' own code runs."""

    def current(self, component: str) -> DtypeVariant:
        """Return the only variant of the component."""
        return DtypeVariant(component, ((),), ())

    def cast(self, component: str, change: Callable[[], object]) -> DtypeVariant:
        change()
        return self.current(component)


def _cast_through(tensor: torch.Tensor, steps: list[torch.dtype]) -> torch.Tensor:
    value = tensor.detach()
    for dtype in steps:
        value = value.to(dtype)
    return _like(tensor, value)


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return (
        nn.Parameter(value.detach(), requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else value
    )


def _entries(module: nn.Module) -> list[TensorEntry]:
    """Return the distinct parameters and buffers of ``module``, in order, with locations."""
    return [
        entry for entry in lay_out(module, ())[""].entries if entry.locations[0].kind != "__dict__"
    ]


def _distinct(module: nn.Module) -> list[torch.Tensor]:
    return [entry.tensor for entry in _entries(module)]


def _replace_tensors(module: nn.Module, tensors: list[torch.Tensor]) -> None:
    """Replace the distinct tensors of ``module`` by ``tensors``, in the same order."""
    for entry, tensor in zip(_entries(module), tensors, strict=True):
        for location in entry.locations:
            location.assign(tensor)

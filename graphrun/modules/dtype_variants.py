"""The dtypes that a component's tensors have during a run: some pipelines cast a component while
they run, and cast it back.

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
    """A component's current ``dtypes``, and the dtypes that its values were rounded to on the way,
    oldest first."""

    component: str
    rounded: tuple[Dtypes, ...]
    dtypes: Dtypes

    def cast(self, dtypes: Dtypes) -> DtypeVariant:
        """The variant that a cast to ``dtypes`` leads to."""
        exact = all(
            torch.promote_types(one, other) == other
            for one, other in zip(self.rounded[-1], dtypes, strict=True)
        )
        return DtypeVariant(
            self.component, self.rounded if exact else (*self.rounded, dtypes), dtypes
        )

    def to_json(self) -> list[Any]:
        """The variant as JSON-ready data."""
        names = [
            [str(dtype).removeprefix("torch.") for dtype in dtypes]
            for dtypes in (self.dtypes, *self.rounded)
        ]
        return [self.component, *names]

    @staticmethod
    def from_json(data: Any) -> DtypeVariant:
        """The variant from `to_json`."""
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
    """The default for what `DtypeVariants` calls."""


class DtypeVariants:
    """The dtype variants that the components ``modules`` have had. A module's own parameters and
    buffers are those of its current variant.

    ``leave(name)`` is called before the tensors of a variant are taken out of its module,
    ``join(name)`` after those of one were put in.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        leave: Switched = _nothing,
        join: Switched = _nothing,
    ) -> None:
        self._modules = dict(modules)
        self._leave, self._join = leave, join
        own = {
            name: tuple(tensor.dtype for tensor in _distinct(module))
            for name, module in modules.items()
        }
        self._now = {name: DtypeVariant(name, (dtypes,), dtypes) for name, dtypes in own.items()}
        self.known = dict(self._now)  # variants by name
        self._tensors: dict[str, list[torch.Tensor]] = {}
        self._computed: set[str] = set()

    def now(self, component: str) -> DtypeVariant:
        """The current variant of ``component``."""
        return self._now[component]

    def cast(self, component: str, change: Callable[[], object]) -> DtypeVariant:
        """Switches ``component`` to the variant that ``change`` casts it to. ``change`` casts in
        place and gets meta copies of the tensors. Returns the variant.
        """
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
        return self.become(self._now[component].cast(dtypes))

    def become(self, dtype_variant: DtypeVariant) -> DtypeVariant:
        """Switches the variant's component to it, and returns it."""
        before = self._now[dtype_variant.component]
        if dtype_variant != before:
            self.known[dtype_variant.name] = dtype_variant
            module = self._modules[dtype_variant.component]
            self._leave(before.name)
            self._tensors[before.name] = _distinct(module)
            _replace_tensors(module, self._values(dtype_variant))
            self._now[dtype_variant.component] = dtype_variant
            self._join(dtype_variant.name)
        return dtype_variant

    @contextmanager
    def within(self, dtype_variant: DtypeVariant) -> Iterator[None]:
        """Switches the component to ``dtype_variant`` inside this context."""
        before = self._now[dtype_variant.component]
        self.become(dtype_variant)
        try:
            yield
        finally:
            self.become(before)

    @property
    def first(self) -> bool:
        """Whether every component has its original variant."""
        return all(dtype_variant.name == name for name, dtype_variant in self._now.items())

    def begin(self) -> None:
        """Switches every component to its original variant, whose values may have changed since:
        all other values will be computed again.
        """
        for name in self._modules:
            self.become(self.known[name])
        self._computed.clear()

    def _values(self, dtype_variant: DtypeVariant) -> list[torch.Tensor]:
        """The tensors of ``dtype_variant``, with values computed from the original ones."""
        first, found = (
            self._tensors.get(dtype_variant.component, []),
            self._tensors.get(dtype_variant.name),
        )
        if found is not None and (
            dtype_variant.name == dtype_variant.component or dtype_variant.name in self._computed
        ):
            return found
        self._computed.add(dtype_variant.name)
        steps = (*dtype_variant.rounded[1:], dtype_variant.dtypes)
        made = [
            _cast_through(tensor, [dtypes[n] for dtypes in steps]) for n, tensor in enumerate(first)
        ]
        if found is None:
            return made
        for tensor, value in zip(found, made, strict=True):
            tensor.data.copy_(value.data)
        return found


class AtRest:
    """Casts for components whose weights are all in host memory: the module's own code does
    them."""

    def now(self, component: str) -> DtypeVariant:
        """The only variant of the component."""
        return DtypeVariant(component, ((),), ())

    def cast(self, component: str, change: Callable[[], object]) -> DtypeVariant:
        """Calls ``change``."""
        change()
        return self.now(component)


def _cast_through(tensor: torch.Tensor, steps: list[torch.dtype]) -> torch.Tensor:
    """``tensor`` cast to each of the dtypes ``steps`` in turn."""
    made = tensor.detach()
    for dtype in steps:
        made = made.to(dtype)
    return _like(tensor, made)


def _like(tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """``made`` as a parameter, if ``tensor`` is one."""
    return (
        nn.Parameter(made.detach(), requires_grad=False)
        if isinstance(tensor, nn.Parameter)
        else made
    )


def _entries(module: nn.Module) -> list[TensorEntry]:
    """The distinct parameters and buffers of ``module``, in order, each with its locations."""
    return [
        entry for entry in lay_out(module, ())[""].entries if entry.locations[0].kind != "__dict__"
    ]


def _distinct(module: nn.Module) -> list[torch.Tensor]:
    return [entry.tensor for entry in _entries(module)]


def _replace_tensors(module: nn.Module, tensors: list[torch.Tensor]) -> None:
    """Replaces the distinct tensors of ``module`` by ``tensors``, in the same order."""
    for entry, tensor in zip(_entries(module), tensors, strict=True):
        for location in entry.locations:
            location.put(tensor)

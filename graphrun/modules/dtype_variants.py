"""The forms of a component: the dtypes that its tensors are in. Some pipelines cast one while they run, and cast it back.

Decides what a form is, how it is called, and what its tensors are. Must not know plans, or where the bytes of a form lie.

    form       vae                      vae@float32                   vae
    pipeline   ... vae.to(float32) ---> ... vae.decode(latents) ... vae.to(float16) --->

Widening loses nothing, so the way back leads to the first form. Rounding does: what is widened behind it is a form of its own.
Every form's values follow from the first one's, so that they can be copied to a device before the cast comes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

Dtypes = tuple[torch.dtype, ...]
"""Of the distinct tensors of a module, in the order in which its parts have them."""
Switched = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DtypeVariant:
    """``dtypes`` now, and those that the values were rounded to on the way, the first ones in front."""

    component: str
    rounded: tuple[Dtypes, ...]
    dtypes: Dtypes

    def cast(self, dtypes: Dtypes) -> DtypeVariant:
        """What a cast to ``dtypes`` makes of it."""
        exact = all(torch.promote_types(one, other) == other for one, other in zip(self.rounded[-1], dtypes, strict=True))
        return DtypeVariant(self.component, self.rounded if exact else (*self.rounded, dtypes), dtypes)

    @property
    def name(self) -> str:
        """The component's own for its first form."""
        if self.rounded == (self.dtypes,):
            return self.component
        floating = sorted({str(dtype).removeprefix("torch.") for dtype in self.dtypes if dtype.is_floating_point})
        plain = len(floating) == 1 and len(self.rounded) == 1
        more = "" if plain else "-" + hashlib.sha256(repr((self.rounded, self.dtypes)).encode()).hexdigest()[:4]
        return f"{self.component}@{'+'.join(floating)}{more}"


class DtypeVariants:
    """The forms of ``modules`` since this was made. Their tensors are in the modules' own tables when they are in that form.

    ``leave(name)`` is called before the tensors of a form are taken out of its module, ``join(name)`` once those of one are in it.
    """

    def __init__(self, modules: Mapping[str, nn.Module], leave: Switched | None = None, join: Switched | None = None) -> None:
        self._modules = dict(modules)
        self._leave, self._join = leave, join
        own = {name: tuple(tensor.dtype for tensor in _distinct(module)) for name, module in modules.items()}
        self._now = {name: DtypeVariant(name, (dtypes,), dtypes) for name, dtypes in own.items()}
        self.known = dict(self._now)  # by name
        self._tensors: dict[str, list[torch.Tensor]] = {}
        self._filled: set[str] = set()

    def now(self, component: str) -> DtypeVariant:
        """The form in which ``component`` is."""
        return self._now[component]

    def cast(self, component: str, change: Callable[[], object]) -> DtypeVariant:
        """``component`` is in the form in which ``change`` leaves it, which casts its tensors in place: it meets twins on meta."""
        module = self._modules[component]
        kept = _distinct(module)
        _put(module, [_like(tensor, torch.empty_like(tensor, device="meta")) for tensor in kept])
        try:
            change()
            dtypes = tuple(tensor.dtype for tensor in _distinct(module))
        finally:
            _put(module, kept)
        return self.become(self._now[component].cast(dtypes))

    def become(self, dtype_variant: DtypeVariant) -> DtypeVariant:
        """The form's component is in it."""
        before = self._now[dtype_variant.component]
        if dtype_variant != before:
            self.known[dtype_variant.name] = dtype_variant
            module = self._modules[dtype_variant.component]
            if self._leave is not None:
                self._leave(before.name)
            self._tensors[before.name] = _distinct(module)
            _put(module, self._values(dtype_variant))
            self._now[dtype_variant.component] = dtype_variant
            if self._join is not None:
                self._join(dtype_variant.name)
        return dtype_variant

    @contextmanager
    def within(self, dtype_variant: DtypeVariant) -> Iterator[None]:
        """The component is in ``dtype_variant`` for as long as this lasts."""
        before = self._now[dtype_variant.component]
        self.become(dtype_variant)
        try:
            yield
        finally:
            self.become(before)

    @property
    def first(self) -> bool:
        """Whether every component is in its first form."""
        return all(dtype_variant.name == name for name, dtype_variant in self._now.items())

    def begin(self) -> None:
        """Every component is in its first form, and the values of others follow from it anew: it may have been changed."""
        for name in self._modules:
            self.become(self.known[name])
        self._filled.clear()

    def _values(self, dtype_variant: DtypeVariant) -> list[torch.Tensor]:
        """The tensors of ``dtype_variant``, with values that follow from those of the first."""
        first, found = self._tensors.get(dtype_variant.component, []), self._tensors.get(dtype_variant.name)
        if found is not None and (dtype_variant.name == dtype_variant.component or dtype_variant.name in self._filled):
            return found
        self._filled.add(dtype_variant.name)
        steps = (*dtype_variant.rounded[1:], dtype_variant.dtypes)
        made = [_through(tensor, [dtypes[n] for dtypes in steps]) for n, tensor in enumerate(first)]
        if found is None:
            return made
        for tensor, value in zip(found, made, strict=True):
            tensor.data.copy_(value.data)
        return found


class AtRest:
    """Casts where all weights are the host's: the module's own code carries them out."""

    def now(self, component: str) -> DtypeVariant:
        """The one form that the component has."""
        return DtypeVariant(component, ((),), ())

    def cast(self, component: str, change: Callable[[], object]) -> DtypeVariant:
        """As ``change`` does."""
        change()
        return self.now(component)


def _through(tensor: torch.Tensor, steps: list[torch.dtype]) -> torch.Tensor:
    made = tensor.detach()
    for dtype in steps:
        made = made.to(dtype)
    return _like(tensor, made)


def _like(tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """``made`` as a parameter, if ``tensor`` is one."""
    return nn.Parameter(made.detach(), requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def _places(module: nn.Module) -> Iterator[tuple[dict[str, torch.Tensor | None], str]]:
    for child in module.modules():
        tables: tuple[dict[str, torch.Tensor | None], ...] = (child._parameters, child._buffers)  # type: ignore[assignment]
        for table in tables:
            yield from ((table, key) for key, tensor in table.items() if tensor is not None)


def _distinct(module: nn.Module) -> list[torch.Tensor]:
    """The distinct tensors of ``module``, in order."""
    held = (table[key] for table, key in _places(module))
    return list({id(tensor): tensor for tensor in held if tensor is not None}.values())


def _put(module: nn.Module, tensors: list[torch.Tensor]) -> None:
    """``tensors`` in the places of those that ``module`` has, one for each distinct one."""
    places = list(_places(module))
    order = {id(tensor): number for number, tensor in enumerate(_distinct(module))}
    for table, key in places:
        table[key] = tensors[order[id(table[key])]]

"""What modules memoize: tensors on the device that are no weights of theirs, and would stay there. `functools.lru_cache` keeps
some, `torch.nn.utils.weight_norm` the weight that it computes before each call, and objects that are no modules (Z-Image's
`RopeEmbedder`) their tables of positions.

Decides where such tensors are looked for. Must not know when they should be emptied.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.weight_norm import WeightNorm

from graphrun.modules.trees import tensors_in, walk


def memos(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """What ``modules`` memoize, to be emptied with ``cache_clear()``: caches of their methods, what `WeightNorm` computed, and what
    plain objects in them will have put on the device since now."""
    children = [inner for module in modules for inner in module.modules()]
    kinds: set[Any] = {type(child) for child in children}
    caches = {id(cache): cache for kind in kinds for cache in _caches_of(kind)}
    hooks = [(child, hook) for child in children for hook in child._forward_pre_hooks.values()]
    computed = (_Computed(child, hook.name) for child, hook in hooks if isinstance(hook, WeightNorm))
    helpers = {id(value): value for child in children for value in vars(child).values() if is_helper(value)}
    return *caches.values(), *computed, *(_Tables(helper, dict(vars(helper))) for helper in helpers.values())


def is_helper(value: Any) -> bool:
    """Whether ``value`` is an object of a library in which a module keeps something, and no module itself: a table of positions."""
    library = type(value).__module__.startswith(("diffusers", "transformers"))
    return library and hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type))


def forget(modules: Iterable[nn.Module]) -> None:
    """Empties what ``modules`` memoize and what is in it, such as Qwen-Image's tables of rotary frequencies."""
    for memo in memos(modules):
        memo.cache_clear()


@dataclass(frozen=True, slots=True)
class _Computed:
    """A weight that is computed before each call."""

    module: nn.Module
    name: str

    def cache_clear(self) -> None:
        """Of the weight, its shape is left."""
        value = vars(self.module).get(self.name)
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            vars(self.module)[self.name] = torch.empty(value.shape, dtype=value.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class _Tables:
    """What ``helper`` keeps, which was ``before``."""

    helper: Any
    before: dict[str, Any]

    def cache_clear(self) -> None:
        """What lies on the device is what it was, or goes to the CPU where that lay there too."""
        for key, value in list(vars(self.helper).items()):
            if _on_device(value):
                was = self.before.get(key)
                vars(self.helper)[key] = walk(value, torch.Tensor.cpu) if _on_device(was) else was


def _on_device(value: Any) -> bool:
    held = isinstance(value, (torch.Tensor, list, tuple, dict))
    return held and any(tensor.device.type not in ("cpu", "meta") for tensor in tensors_in(value))


@functools.cache
def _caches_of(kind: Any) -> tuple[Any, ...]:
    members = (member for base in kind.__mro__ if base is not nn.Module for member in vars(base).values())
    return tuple(cache for member in members for cache in _caches(member))


def _caches(member: Any) -> Iterator[Any]:
    """``member`` itself, or what it wraps: diffusers wraps its caches once more, to leave them out while it exports."""
    inside = (cell.cell_contents for cell in getattr(member, "__closure__", None) or () if _filled(cell))
    yield from (found for found in (member, *inside) if callable(getattr(found, "cache_clear", None)))


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False

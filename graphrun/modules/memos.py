"""Finds tensors that modules cache on the device outside their weights, so that they can be freed.

Three kinds: results in `functools.lru_cache`, the weight that `torch.nn.utils.weight_norm` computes before each call, and the
position tables of helper objects that are not modules (Z-Image's `RopeEmbedder`).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.weight_norm import WeightNorm

from graphrun.modules.trees import LIBRARIES, PLAIN, found_in, may_hold, replace_in

# The attribute with diffusers' hooks on a module. What they keep is the state of a call, which later calls need until the pipeline
# resets it.
DIFFUSERS_HOOKS = "_diffusers_hook"

# Attributes that every module has. None of them is a tensor that a call left behind.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_WITHOUT_HELPERS = MODULE_ATTRIBUTES | {DIFFUSERS_HOOKS}


def memos(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """The caches of ``modules``, each emptied by its ``cache_clear()``: caches of methods, weights of `WeightNorm`, and tensors
    that helper objects put on the device after this call.
    """
    children = [inner for module in modules for inner in module.modules()]
    kinds: set[Any] = {type(child) for child in children}
    caches = {id(cache): cache for kind in kinds for cache in _caches_of(kind)}
    hooks = [(child, hook) for child in children for hook in child._forward_pre_hooks.values()]
    computed = (_NormalizedWeight(child, hook.name) for child, hook in hooks if isinstance(hook, WeightNorm))
    attributes = ((key, value) for child in children for key, value in vars(child).items() if key not in _WITHOUT_HELPERS)
    helpers = {id(value): value for _, value in attributes if is_helper(value)}
    return *caches.values(), *computed, *map(HeldAttributes, helpers.values())


def is_helper(value: Any) -> bool:
    """Whether ``value`` is an object of diffusers or transformers that is not a module but may hold tensors, such as a table of
    positions. Objects of other classes may hold the state of a call, which a module needs later on.
    """
    return type(value).__module__.startswith(LIBRARIES) and may_hold(value)


def forget(modules: Iterable[nn.Module]) -> None:
    """Empties the caches of ``modules`` and of the modules in them, such as Qwen-Image's tables of rotary frequencies."""
    for memo in memos(modules):
        memo.cache_clear()


@dataclass(frozen=True, slots=True)
class _NormalizedWeight:
    """A weight that `WeightNorm` computes before each call."""

    module: nn.Module
    name: str

    def cache_clear(self) -> None:
        """Replaces the weight by a meta tensor of its shape."""
        value = vars(self.module).get(self.name)
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            vars(self.module)[self.name] = torch.empty(value.shape, dtype=value.dtype, device="meta")


class HeldAttributes:
    """The attributes of ``holder``, a module or a helper object, with the values that they have now."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        found = ((key, value) for key, value in vars(holder).items() if key not in MODULE_ATTRIBUTES)
        # name -> (value, a copy of it if it is a container)
        self._before = {key: (v, v.copy() if isinstance(v, (list, dict, deque)) else None) for key, v in found}

    def restore(self, key: str) -> None:
        """Gives the attribute its earlier value, or removes it where there was none."""
        table = vars(self.holder)
        if key not in self._before:
            del table[key]
            return
        table[key], content = self._before[key]
        if content is not None:
            table[key].clear()
            table[key].update(content) if isinstance(content, dict) else table[key].extend(content)

    def cache_clear(self) -> None:
        """Restores every attribute that is on the device. What was on the device before, too, moves to the CPU."""
        for key, value in list(vars(self.holder).items()):
            if key not in MODULE_ATTRIBUTES and type(value) not in PLAIN and _on_device(value):
                self.restore(key)
                if _on_device(vars(self.holder).get(key)):
                    vars(self.holder)[key] = replace_in(vars(self.holder)[key], torch.Tensor.cpu)


def _on_device(value: Any) -> bool:
    return any(tensor.device.type not in ("cpu", "meta") for tensor in found_in(value, torch.Tensor))


@functools.cache
def _caches_of(kind: Any) -> tuple[Any, ...]:
    members = (member for base in kind.__mro__ if base is not nn.Module for member in vars(base).values())
    return tuple(cache for member in members for cache in _caches(member))


def _caches(member: Any) -> Iterator[Any]:
    """``member`` itself if it is a cache, or the cache it wraps: diffusers wraps its caches to bypass them during export."""
    inside = (cell.cell_contents for cell in getattr(member, "__closure__", None) or () if has_value(cell))
    yield from (found for found in (member, *inside) if callable(getattr(found, "cache_clear", None)))


def has_value(cell: Any) -> bool:
    """Whether the closure cell has a value."""
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False

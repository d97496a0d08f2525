"""What modules memoize: tensors on the device that are no weights of theirs, and would stay there. `functools.lru_cache` keeps
some, and `torch.nn.utils.weight_norm` the weight that it computes before each call.

Decides where such tensors are looked for. Must not know when they should be emptied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.weight_norm import WeightNorm


def forget(modules: Iterable[nn.Module]) -> None:
    """Empties the caches of the methods of ``modules`` and what is in them, such as Qwen-Image's tables of rotary frequencies; of a
    weight that was computed on a device, its shape is left."""
    modules = list(modules)
    for child in (inner for module in modules for inner in module.modules() if inner._forward_pre_hooks):
        _forget_computed(child)
    kinds = {kind for module in modules for inner in module.modules() for kind in type(inner).__mro__ if kind is not nn.Module}
    for kind in kinds:
        for member in vars(kind).values():
            for cache in _caches(member):
                cache.cache_clear()


def _forget_computed(module: nn.Module) -> None:
    for hook in module._forward_pre_hooks.values():
        value = vars(module).get(name := str(getattr(hook, "name", ""))) if isinstance(hook, WeightNorm) else None
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            vars(module)[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")


def _caches(member: Any) -> Iterator[Any]:
    """``member`` itself, or what it wraps: diffusers wraps its caches once more, to leave them out while it exports."""
    inside = (cell.cell_contents for cell in getattr(member, "__closure__", None) or () if _filled(cell))
    yield from (found for found in (member, *inside) if callable(getattr(found, "cache_clear", None)))


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False

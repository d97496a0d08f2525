"""What modules memoize with `functools.lru_cache`: tensors on the device that belong to no module, and would stay there.

Decides where such caches are looked for. Must not know when they should be emptied.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn


def memos(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """The caches of the methods of ``modules``, to be emptied with ``cache_clear()``."""
    kinds: set[Any] = {type(inner) for module in modules for inner in module.modules()}
    return tuple({id(cache): cache for kind in kinds for cache in _caches_of(kind)}.values())


def forget(modules: Iterable[nn.Module]) -> None:
    """Empties the caches of the methods of ``modules`` and what is in them, such as Qwen-Image's tables of rotary frequencies."""
    for cache in memos(modules):
        cache.cache_clear()


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

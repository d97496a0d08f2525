"""Find tensors that modules cache on the device outside their weights, so that they can be freed.

Three kinds: results in `functools.lru_cache`, the weight that `torch.nn.utils.weight_norm` computes
before each call, and the position tables of helper objects that are not modules (Z-Image's
`RopeEmbedder`).
"""

from __future__ import annotations

import functools
import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.weight_norm import WeightNorm

from graphrun.modules.trees import LIBRARIES, PLAIN, found_in, may_hold, modules_below, replace_in

# diffusers' hooks on a module; hooks store the state of a call, which later calls need until the
# pipeline resets it
DIFFUSERS_HOOKS = "_diffusers_hook"

# attributes that every module has; none is a tensor left behind by a call
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))

Owned = tuple[str, nn.Module, dict[str, Any]]
"""A component's name, a module in it, and the module's attributes beyond `MODULE_ATTRIBUTES`."""


def attributes_of(modules: Mapping[str, nn.Module]) -> list[Owned]:
    """Return every module in ``modules`` with its current attributes."""
    return [
        (
            name,
            child,
            {key: value for key, value in vars(child).items() if key not in MODULE_ATTRIBUTES},
        )
        for name, module in modules.items()
        for child in modules_below(module)
    ]


def memos(modules: Mapping[str, nn.Module]) -> tuple[Any, ...]:
    """Return the caches of ``modules``, each with a method ``cache_clear()`` that empties it.

    They are caches of methods, weights of `WeightNorm`, and tensors that helper objects put on the
    device after this call.
    """
    owners = attributes_of(modules)
    children = [child for _, child, _ in owners]
    caches = _method_caches(children)
    hooks = [(child, hook) for child in children for hook in child._forward_pre_hooks.values()]
    computed = (
        _NormalizedWeight(child, hook.name) for child, hook in hooks if isinstance(hook, WeightNorm)
    )
    values = (
        value
        for _, _, attributes in owners
        for key, value in attributes.items()
        if type(value) not in PLAIN and key != DIFFUSERS_HOOKS
    )
    helpers = {id(value): value for value in values if is_helper(value)}
    return (
        *caches,
        *computed,
        *(HeldAttributes(helper, {**vars(helper)}) for helper in helpers.values()),
    )


def lasting_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors in attributes of ``module`` beyond its weights, except its `memos`: a run
    frees memos when the phase ends, and these when the stage ends."""
    for _, child, attributes in attributes_of({"": module}):
        hooks = child._forward_pre_hooks.values()
        computed = {hook.name for hook in hooks if isinstance(hook, WeightNorm)}
        for key, value in attributes.items():
            if type(value) in PLAIN or key == DIFFUSERS_HOOKS or key in computed:
                continue
            if not is_helper(value):
                yield from found_in(value, torch.Tensor)


def moved_tables(modules: Mapping[str, nn.Module]) -> Iterator[MovedTables]:
    """Yield the tables of ``modules``: attributes beyond weights with tensors, now on the CPU."""
    for _, child, attributes in attributes_of(modules):
        tables = {
            key: value
            for key, value in attributes.items()
            if isinstance(value, (list, tuple, dict))
            and next(found_in(value, torch.Tensor), None) is not None
        }
        if tables and not on_device(tables):
            yield MovedTables(child, tables)


def lru_caches(modules: Mapping[str, nn.Module]) -> tuple[Any, ...]:
    """Return the `memos` made by `functools.lru_cache`, which all instances of a class share."""
    caches = _method_caches(
        [child for module in modules.values() for child in modules_below(module)]
    )
    return tuple(cache for cache in caches if isinstance(cache, functools._lru_cache_wrapper))


def cached_in(cache: Any) -> list[Any]:
    """Return the results, and the dict of results, in a `functools.lru_cache`, among other objects.
    The cache has no method for them, but reports its references to the garbage collector."""
    return [value for value in gc.get_referents(cache) if not isinstance(value, type)]


def _method_caches(children: Iterable[nn.Module]) -> list[Any]:
    kinds: dict[Any, None] = dict.fromkeys(type(child) for child in children)
    return list({id(cache): cache for kind in kinds for cache in _caches_of(kind)}.values())


def is_helper(value: Any) -> bool:
    """Return whether ``value`` is a helper object of diffusers or transformers with tensors.

    It is not a module; an example is a table of positions. Objects of other classes may hold the
    state of a call, which a module needs later on.
    """
    return type(value).__module__.startswith(LIBRARIES) and may_hold(value)


def forget(modules: Mapping[str, nn.Module]) -> None:
    """Empty the caches in ``modules``, such as Qwen-Image's tables of rotary frequencies."""
    for memo in memos(modules):
        memo.cache_clear()


@dataclass(frozen=True, slots=True)
class _NormalizedWeight:
    """A weight that `WeightNorm` computes before each call."""

    module: nn.Module
    name: str

    def cache_clear(self) -> None:
        value = vars(self.module).get(self.name)
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            vars(self.module)[self.name] = torch.empty(
                value.shape, dtype=value.dtype, device="meta"
            )


class HeldAttributes:
    """``attributes`` of ``holder``, a module or a helper object, with their current values."""

    def __init__(self, holder: Any, attributes: Mapping[str, Any]) -> None:
        self.holder, self._values = holder, attributes
        self._contents = {
            key: value.copy()
            for key, value in attributes.items()
            if isinstance(value, (list, dict, deque))
        }

    def restore(self, key: str) -> None:
        """Give the attribute its earlier value, or remove it if it had none."""
        table = vars(self.holder)
        if key not in self._values:
            del table[key]
            return
        table[key], content = self._values[key], self._contents.get(key)
        if content is not None:
            table[key].clear()
            table[key].update(content) if isinstance(content, dict) else table[key].extend(content)

    def forget(self) -> None:
        """Restore every attribute that got tensors since."""
        table = vars(self.holder)
        for key, value in list(table.items()):
            if key in MODULE_ATTRIBUTES or key == DIFFUSERS_HOOKS or type(value) in PLAIN:
                continue
            is_unchanged = value is self._values.get(key) and key not in self._contents
            if not is_unchanged and next(found_in(value, torch.Tensor), None) is not None:
                self.restore(key)

    def cache_clear(self) -> None:
        """Restore every attribute that is on the device. Values that were there before, too, move
        to the CPU."""
        table = vars(self.holder)
        for key in on_device(
            {key: value for key, value in table.items() if key not in MODULE_ATTRIBUTES}
        ):
            self.restore(key)
            if on_device({key: table.get(key)}):
                table[key] = replace_in(table[key], torch.Tensor.cpu)


class MovedTables(HeldAttributes):
    """Tables that code of ``holder`` may move to the device, such as Qwen-Image 2.1's list of
    rotary frequencies."""

    def cache_clear(self) -> None:
        """Put the tables that are on the device back on the CPU."""
        table = vars(self.holder)
        for key in on_device({key: table.get(key) for key in self._values}):
            self.restore(key)


def _is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def on_device(
    attributes: Mapping[str, Any], is_on_device: Callable[[torch.Tensor], bool] = _is_on_device
) -> list[str]:
    """Return the names of ``attributes`` with tensors on a device."""
    return [
        key
        for key, value in attributes.items()
        if type(value) not in PLAIN and any(map(is_on_device, found_in(value, torch.Tensor)))
    ]


@functools.cache
def _caches_of(kind: Any) -> tuple[Any, ...]:
    members = (
        member for base in kind.__mro__ if base is not nn.Module for member in vars(base).values()
    )
    return tuple(cache for member in members for cache in _caches(member))


def _caches(member: Any) -> Iterator[Any]:
    """Yield ``member`` if it is a cache, and the cache it wraps: diffusers wraps caches for
    export."""
    contents = (
        cell.cell_contents for cell in getattr(member, "__closure__", None) or () if has_value(cell)
    )
    yield from (
        candidate
        for candidate in (member, *contents)
        if callable(getattr(candidate, "cache_clear", None))
    )


def has_value(cell: Any) -> bool:
    """Return whether the closure cell has a value."""
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False

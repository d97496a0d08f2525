"""Finds and replaces tensors in nested containers and in objects that hold tensors, such as the
output classes of models."""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

LIBRARIES = ("diffusers", "transformers")
Change = Callable[[Any], Any]


def modules_below(module: nn.Module) -> list[nn.Module]:
    """``module`` and the modules inside it, each once, in the order of `nn.Module.modules`, but
    without its nested generators, which take most of the time of a loop."""
    found: dict[int, nn.Module] = {}

    def add(module: nn.Module) -> None:
        if id(module) not in found:
            found[id(module)] = module
            for child in module._modules.values():
                if child is not None:
                    add(child)

    add(module)
    return list(found.values())


def walk(value: Any, change: Change, kind: type[Any] = torch.Tensor) -> Any:
    """A copy of ``value`` with ``change`` applied to every tensor in it, or to every instance of
    ``kind``.

    Objects of diffusers and transformers are copied, those of other classes where they hold an
    instance of ``kind``; modules are not. An object that is there twice is copied once.
    """
    return _walk(value, change, kind, {})


def holders_in(arguments: Any) -> list[Any]:
    """The outermost lists, dicts, deques and objects in ``arguments``, the ``(args, kwargs)`` of a
    call: what the called code may put tensors in."""
    found = []
    for item in (*arguments[0], *arguments[1].values()):
        if isinstance(item, tuple):
            found += holders_in((item, {}))
        elif isinstance(item, (list, dict, deque)) or may_hold(item):
            found.append(item)
    return found


def content_of(holder: Any) -> Any:
    """What `holders_in` found holds: its items or attributes, as a list or dict."""
    return (
        list(holder)
        if isinstance(holder, (list, deque))
        else dict(holder if isinstance(holder, dict) else vars(holder))
    )


def put_content(holder: Any, content: Any) -> None:
    """Gives ``holder`` the ``content`` that `content_of` returned of another like it."""
    if isinstance(holder, (list, deque)):
        holder.clear()
        holder.extend(content)
    else:
        table = holder if isinstance(holder, dict) else vars(holder)
        table.clear()
        table.update(content)


def _walk(value: Any, change: Change, kind: type[Any], made: dict[int, Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        items = [_walk(item, change, kind, made) for item in value]
        return (
            items
            if isinstance(value, list)
            else type(value)(*items)
            if hasattr(value, "_fields")
            else tuple(items)
        )
    if isinstance(value, deque):
        return deque((_walk(item, change, kind, made) for item in value), value.maxlen)
    if isinstance(value, dict) and not hasattr(value, "to_tuple"):
        return {key: _walk(item, change, kind, made) for key, item in value.items()}
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, dict):
        twin = made[id(value)] = copy.copy(value)
        for key, item in value.items():
            setattr(twin, key, _walk(item, change, kind, made))
        return twin
    if may_hold(value) and (
        type(value).__module__.startswith(LIBRARIES)
        or next(found_in(value, kind), None) is not None
    ):
        twin = made[id(value)] = copy.copy(value)
        for key, item in vars(value).items():
            vars(twin)[key] = _walk(item, change, kind, made)
        return twin
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in ``value``, in the order of `walk`."""
    return list(found_in(value, torch.Tensor))


def found_in(value: Any, kind: type[Any], seen: set[int] | None = None) -> Iterator[Any]:
    """Every instance of ``kind`` in ``value``, in the order of `walk`. ``seen``: ids of objects
    that are left out."""
    if isinstance(value, kind):
        yield value
        return
    seen = set() if seen is None else seen
    if isinstance(value, (list, tuple, deque)):
        items: Any = value
    elif isinstance(value, dict) and not hasattr(value, "to_tuple"):
        items = value.values()
    elif id(value) not in seen and (isinstance(value, dict) or may_hold(value)):
        seen.add(id(value))
        items = (value if isinstance(value, dict) else vars(value)).values()
    else:
        return
    for item in items:
        if type(item) not in PLAIN:
            yield from found_in(item, kind, seen)


def replace_in(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], seen: set[int] | None = None
) -> Any:
    """``value`` with ``change`` applied to every tensor in it, in place: containers and objects
    stay the same ones, except tuples and ``value`` itself if it is a tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    seen = set() if seen is None else seen
    if isinstance(value, tuple):
        items = [replace_in(item, change, seen) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if id(value) in seen or type(value) in PLAIN:
        return value
    seen.add(id(value))
    if isinstance(value, (list, deque)):
        for number, item in enumerate(list(value)):
            value[number] = replace_in(item, change, seen)
    elif isinstance(value, dict) or may_hold(value):
        table = value if isinstance(value, dict) else vars(value)
        for key, item in list(table.items()):
            if type(item) not in PLAIN and (new := replace_in(item, change, seen)) is not item:
                table[key] = new
    return value


def computing_on(
    place: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every device except the CPU replaced by ``place``."""
    there = walk((args, kwargs), lambda own: own if own.type == "cpu" else place, torch.device)
    return there  # type: ignore[no-any-return]


PLAIN = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


def may_hold(value: Any) -> bool:
    """Whether ``value`` is an object, neither a module nor a container, whose attributes may hold
    tensors: a cache of keys and values, a distribution, a table of positions. Objects of Python's
    own library hold none, except simple namespaces."""
    kind: Any = type(value)
    return _may_hold(kind) and hasattr(value, "__dict__")


@functools.cache
def _may_hold(kind: Any) -> bool:
    if issubclass(kind, (nn.Module, type, torch.Tensor, list, tuple, dict, deque)):
        return False
    package = kind.__module__.partition(".")[0]
    return kind is types.SimpleNamespace or (
        package not in sys.stdlib_module_names and package not in ("graphrun", "numpy", "PIL")
    )

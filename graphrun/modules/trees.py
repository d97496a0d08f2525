"""Find and replace tensors in nested containers and in objects, such as the outputs of models."""

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
    """Return ``module`` and the modules inside it, each once, in the order of `nn.Module.modules`.
    Avoids its nested generators, which take most of the time of a loop."""
    modules: dict[int, nn.Module] = {}
    pending = [module]
    while pending:
        child = pending.pop()
        if id(child) not in modules:
            modules[id(child)] = child
            if parts := child._modules:
                pending += [part for part in reversed(parts.values()) if part is not None]
    return list(modules.values())


def named_modules_below(
    module: nn.Module, *, repeated: bool = False
) -> list[tuple[str, nn.Module]]:
    """Return `modules_below` with their paths; if ``repeated``, a module once for each of its
    paths."""
    modules: list[tuple[str, nn.Module]] = []
    visited_ids: set[int] = set()
    pending = [("", module)]
    while pending:
        path, child = pending.pop()
        if not repeated:
            if id(child) in visited_ids:
                continue
            visited_ids.add(id(child))
        modules.append((path, child))
        if parts := child._modules:
            prefix = f"{path}." if path else ""
            pending += [
                (prefix + name, part) for name, part in reversed(parts.items()) if part is not None
            ]
    return modules


def own_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of ``module`` itself, without its children's."""
    return [
        tensor
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]


def weights_below(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of ``module`` and of the modules inside it, each once."""
    tensors = (tensor for child in modules_below(module) for tensor in own_tensors(child))
    return list({id(tensor): tensor for tensor in tensors}.values())


def walk(value: Any, change: Change, kind: type[Any] = torch.Tensor) -> Any:
    """Return a copy of ``value`` with ``change`` applied to every instance of ``kind`` in it.

    Objects of diffusers and transformers are copied; objects of other classes if they contain an
    instance of ``kind``; modules are not. An object that occurs twice is copied once.
    """
    return _walk(value, change, kind, {})


def holders_in(arguments: Any) -> list[Any]:
    """Return the outermost lists, dicts, deques and objects in the arguments of a call.
    ``arguments``: ``(args, kwargs)``. The called code may put tensors in them."""
    holders = []
    for item in (*arguments[0], *arguments[1].values()):
        if isinstance(item, tuple):
            holders += holders_in((item, {}))
        elif isinstance(item, (list, dict, deque)) or may_hold(item):
            holders.append(item)
    return holders


def content_of(holder: Any) -> Any:
    """Return the items or attributes of a result of `holders_in`, as a list or dict."""
    return (
        list(holder)
        if isinstance(holder, (list, deque))
        else dict(holder if isinstance(holder, dict) else vars(holder))
    )


def put_content(holder: Any, content: Any) -> None:
    """Give ``holder`` the ``content`` that `content_of` returned for a similar holder."""
    if isinstance(holder, (list, deque)):
        holder.clear()
        holder.extend(content)
    else:
        table = holder if isinstance(holder, dict) else vars(holder)
        table.clear()
        table.update(content)


def _walk(value: Any, change: Change, kind: type[Any], copies: dict[int, Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        items = [_walk(item, change, kind, copies) for item in value]
        return (
            items
            if isinstance(value, list)
            else type(value)(*items)
            if hasattr(value, "_fields")
            else tuple(items)
        )
    if isinstance(value, deque):
        return deque((_walk(item, change, kind, copies) for item in value), value.maxlen)
    if isinstance(value, dict) and not hasattr(value, "to_tuple"):
        return {key: _walk(item, change, kind, copies) for key, item in value.items()}
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, dict):
        twin = copies[id(value)] = copy.copy(value)
        for key, item in value.items():
            setattr(twin, key, _walk(item, change, kind, copies))
        return twin
    if may_hold(value) and (
        type(value).__module__.startswith(LIBRARIES)
        or next(found_in(value, kind), None) is not None
    ):
        twin = copies[id(value)] = copy.copy(value)
        for key, item in vars(value).items():
            vars(twin)[key] = _walk(item, change, kind, copies)
        return twin
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor in ``value``, in the order of `walk`."""
    return list(found_in(value, torch.Tensor))


def found_in(value: Any, kind: type[Any], visited_ids: set[int] | None = None) -> Iterator[Any]:
    """Yield every instance of ``kind`` in ``value``, in the order of `walk`. ``visited_ids``: ids
    of objects to skip."""
    if isinstance(value, kind):
        yield value
        return
    visited_ids = set() if visited_ids is None else visited_ids
    if isinstance(value, (list, tuple, deque)):
        items: Any = value
    elif isinstance(value, dict) and not hasattr(value, "to_tuple"):
        items = value.values()
    elif id(value) not in visited_ids and (isinstance(value, dict) or may_hold(value)):
        visited_ids.add(id(value))
        items = (value if isinstance(value, dict) else vars(value)).values()
    else:
        return
    for item in items:
        if type(item) not in PLAIN:
            yield from found_in(item, kind, visited_ids)


def replace_in(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], visited_ids: set[int] | None = None
) -> Any:
    """Return ``value`` with ``change`` applied to every tensor in it, in place. Containers and
    objects stay the same, except tuples, and ``value`` itself if it is a tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    visited_ids = set() if visited_ids is None else visited_ids
    if isinstance(value, tuple):
        items = [replace_in(item, change, visited_ids) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if id(value) in visited_ids or type(value) in PLAIN:
        return value
    visited_ids.add(id(value))
    if isinstance(value, (list, deque)):
        for number, item in enumerate(list(value)):
            value[number] = replace_in(item, change, visited_ids)
    elif isinstance(value, dict) or may_hold(value):
        table = value if isinstance(value, dict) else vars(value)
        for key, item in list(table.items()):
            if (
                type(item) not in PLAIN
                and (new := replace_in(item, change, visited_ids)) is not item
            ):
                table[key] = new
    return value


def with_device_arguments(
    place: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with every device except the CPU replaced by ``place``."""
    arguments = walk(
        (args, kwargs), lambda device: device if device.type == "cpu" else place, torch.device
    )
    return arguments  # type: ignore[no-any-return]


PLAIN = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


def may_hold(value: Any) -> bool:
    """Return whether ``value`` is an object whose attributes may hold tensors.

    It is neither a module nor a container; examples are a cache of keys and values, a distribution,
    a table of positions. Objects of Python's own library hold none, except simple namespaces.
    """
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

"""Recipes of pipelines that are in memory: the classes, configurations and dtypes of their own modules, wherever their weights are.

Decides where the weights and tokenizers can be found again by a graph file. Reads no weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphrun.components.classes import resolve_class
from graphrun.errors import GraphError, InputError
from graphrun.graph.graph import DEFAULT_ALLOW
from graphrun.importing.recipe import OF_FILES, Recipe, Thing, plain_settings, slug
from graphrun.integrations.live import own_class


def of_pipeline(pipe: Any) -> Recipe:
    """The recipe of ``pipe``. Its weights count as those of the folder or repository it was loaded from, where it was.

    Raises InputError for what a graph cannot hold: a module without a configuration, pipelines inside it, lists of modules.
    """
    kind = own_class(pipe)
    origin = f"from_pipeline({kind.__name__})"
    path, allow = _path_of(kind)
    loaded = str(pipe.config.get("_name_or_path") or "")
    here = bool(loaded) and Path(loaded).is_dir()
    source = str(Path(loaded).resolve()) if here else None if loaded.startswith((".", "/")) else loaded or None
    things, lists = list[Thing](), dict[str, Any]()
    for name, value in pipe.components.items():
        nets = _several(value)
        for key, item in {f"{name}_{n}": net for n, net in enumerate(nets)}.items() if nets else [(name, value)]:
            if item is not None:
                things.append(_thing(key, item, origin))
                allow = (*allow, *_path_of(type(item))[1])
        if nets:
            lists[name] = [f"${name}_{number}" for number in range(len(nets))]
    absent = [name for name, value in pipe.components.items() if value is None]
    given = {name: _plain(value) for name, value in pipe.config.items() if name not in pipe.components and not name.startswith("_")}
    return Recipe(
        origin=origin,
        name=slug(kind.__name__.removesuffix("Pipeline")),
        pipeline=path,
        source=source,
        things=tuple(things),
        settings=plain_settings(kind, given | lists, absent),
        place=source if here else None,
        allow=tuple(dict.fromkeys(allow)),
    )


def _path_of(kind: type[Any]) -> tuple[str, tuple[str, ...]]:
    """The class path of ``kind``, and the packages that a graph has to allow for it."""
    package = kind.__module__.split(".")[0]
    allow = tuple(dict.fromkeys((*DEFAULT_ALLOW, package)))
    for path in (f"{package}.{kind.__name__}", f"{kind.__module__}.{kind.__qualname__}"):
        try:
            if resolve_class(path, allow) is kind:
                return path, allow
        except GraphError:
            continue
    raise InputError(f"{kind.__module__}.{kind.__qualname__} cannot be imported by its name: a graph file could not name it")


def _thing(name: str, value: Any, origin: str) -> Thing:
    path = _path_of(type(value))[0]
    config = getattr(value, "config", None)
    if not isinstance(value, nn.Module):
        plain = _json(config) if config is not None and hasattr(value, "from_config") else None
        return Thing(name, path, plain, live=value, source=_found_again(value) if plain is None else None)
    if config is None:
        raise InputError(f"{origin}: {name} is a {path} without a configuration, and a graph file needs one: give its class one")
    tensors = [(t, t.numel() * t.element_size()) for t in (*value.parameters(), *value.buffers()) if t.is_floating_point()]
    sizes: dict[str, int] = {}
    for tensor, nbytes in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        sizes[dtype] = sizes.get(dtype, 0) + nbytes
    dtype = max(sizes, key=lambda key: sizes[key], default="float32")
    return Thing(name, path, _json(config), dtype=dtype, why=OF_FILES, live=value)


def _several(value: Any) -> list[nn.Module]:
    """The modules of one that is a list of others and has no configuration of its own, such as several ControlNets."""
    listed = isinstance(value, nn.Module) and getattr(value, "config", None) is None
    inner = [child for child in value.children() if isinstance(child, nn.ModuleList)] if listed else []
    return list(inner[0]) if len(inner) == 1 else []


def _found_again(value: Any) -> str | None:
    """The folder that a tokenizer or processor was loaded from, if it is still there."""
    loaded = getattr(value, "name_or_path", "")
    return str(Path(loaded).resolve()) if loaded and Path(loaded).is_dir() else None


def _json(config: Any) -> dict[str, Any]:
    plain: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    found: dict[str, Any] = json.loads(json.dumps(_plain(dict(plain)), default=str, sort_keys=True))
    return {key: value for key, value in found.items() if key != "_name_or_path"}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value

"""What live pipelines are: the classes, configurations and dtypes of their modules. Reads no
weights.

Also decides from where a graph file can load the weights and tokenizers again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from graphrun.diffusers_.importing.found import (
    OF_FILES,
    Found,
    common_dtype,
    name_of,
    path_of,
    plain,
    plain_config,
    plain_settings,
)
from graphrun.diffusers_.importing.modular_spec import blocks_of, fresh_configs, loaded_from
from graphrun.diffusers_.live import own_class
from graphrun.errors import InputError
from graphrun.graph.graph import DEFAULT_ALLOW
from graphrun.ops.modular import is_modular_class


def of_pipeline(pipe: Any) -> Found:
    """What ``pipe`` is. The source is the folder or repository that it was loaded from, or each
    component of a modular pipeline.

    Raises InputError for what a graph file cannot express: a module without a configuration, a
    pipeline inside it, a list of modules, a class that cannot be imported by name, modular blocks
    that were changed by code.
    """
    kind = own_class(pipe)
    found = Found(f"from_pipeline({kind.__name__})", path_of(kind), name_of(kind))
    members, named, sources = dict[str, Any](), [found.pipeline], dict[str, str | None]()
    if is_modular_class(kind):
        found.settings, found.workflow = blocks_of(pipe._blocks, kind, found.origin)
        named += found.settings.values()
        found.settings |= {
            name: plain(pipe.config[name])
            for name, usual in fresh_configs(pipe).items()
            if pipe.config[name] != usual
        }
        members = dict(pipe.components)
        sources = {name: loaded_from(pipe._component_specs[name]) for name in members}
    else:
        loaded = str(pipe.config.get("_name_or_path") or "")
        if loaded and Path(loaded).is_dir():
            found.folder = Path(loaded).resolve()
            found.source = str(found.folder)
        elif not loaded.startswith((".", "/")):
            found.source = loaded or None
        components = _components(pipe)
        given = {
            name: plain(value)
            for name, value in pipe.config.items()
            if name not in components and not name.startswith("_")
        }
        for name, value in components.items():
            nets = {f"{name}_{number}": net for number, net in enumerate(_several(value))}
            members |= nets or {name: value}
            given |= {name: [f"${key}" for key in nets]} if nets else {}
        found.settings = plain_settings(
            kind, given, [name for name, value in components.items() if value is None]
        )
    members = {name: value for name, value in members.items() if value is not None}
    packages = (
        path.split(".")[0]
        for path in (*named, *(path_of(type(value)) for value in members.values()))
    )
    found.trust = tuple(
        dict.fromkeys(package for package in packages if package not in DEFAULT_ALLOW)
    )
    for name, value in members.items():
        _add(found, name, value, sources.get(name))
    return found


def _components(pipe: Any) -> dict[str, Any]:
    """The members of ``pipe``, and parts that its constructor creates when they are left out
    (LongCat's scheduler)."""
    named = {
        name: getattr(pipe, name, None)
        for name, entry in pipe.config.items()
        if isinstance(entry, (list, tuple))
    }
    return dict(pipe.components) | {
        name: part
        for name, part in named.items()
        if pipe.config[name][1:] == (type(part).__name__,)
    }


def _add(found: Found, name: str, value: Any, source: str | None) -> None:
    path, config = path_of(type(value)), getattr(value, "config", None)
    if not isinstance(value, nn.Module):
        own = plain_config(config) if config is not None and hasattr(value, "from_config") else None
        loaded = getattr(value, "name_or_path", "") if own is None else ""
        again = str(Path(loaded).resolve()) if loaded and Path(loaded).is_dir() else None
        found.add(name, path, own, source=source or again, live=value)
        return
    if config is None:
        raise InputError(
            f"{found.origin}: {name} is a {path} without a configuration, and a graph file needs one: give its class one"
        )
    tensors = (
        tensor for tensor in (*value.parameters(), *value.buffers()) if tensor.is_floating_point()
    )
    dtype = common_dtype(
        (str(t.dtype).removeprefix("torch."), t.numel() * t.element_size()) for t in tensors
    )
    found.add(
        name, path, plain_config(config), (dtype or "float32", OF_FILES), source=source, live=value
    )


def _several(value: Any) -> list[nn.Module]:
    """The modules in a wrapper that has no configuration of its own, such as several ControlNets;
    empty for anything else."""
    listed = isinstance(value, nn.Module) and getattr(value, "config", None) is None
    inner = (
        [child for child in value.children() if isinstance(child, nn.ModuleList)] if listed else []
    )
    return list(inner[0]) if len(inner) == 1 else []

"""Pipeline specs of live pipelines: the classes, configurations and dtypes of their modules. Reads no weights.

Also decides from where a graph file can load the weights and tokenizers again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from graphrun.diffusers_.importing.modular_spec import blocks_of, fresh_configs, loaded_from
from graphrun.diffusers_.importing.spec import (
    OF_FILES,
    MemberSpec,
    PipelineSpec,
    path_of,
    plain,
    plain_config,
    plain_settings,
    slug,
)
from graphrun.diffusers_.live import own_class
from graphrun.errors import InputError
from graphrun.ops.modular import is_modular_class


def of_pipeline(pipe: Any) -> PipelineSpec:
    """The spec of ``pipe``. The source is the folder or repository that it was loaded from, if there is one.

    Raises InputError for what a graph file cannot express: a module without a configuration, a pipeline inside it, a list of
    modules, a class that cannot be imported by name, modular blocks that were changed by code.
    """
    kind = own_class(pipe)
    origin = f"from_pipeline({kind.__name__})"
    path, trust = path_of(kind)
    if is_modular_class(kind):
        return of_blocks(pipe, path, trust, origin)
    loaded = str(pipe.config.get("_name_or_path") or "")
    here = bool(loaded) and Path(loaded).is_dir()
    source = str(Path(loaded).resolve()) if here else None if loaded.startswith((".", "/")) else loaded or None
    members, lists = list[MemberSpec](), dict[str, Any]()
    components = _components(pipe)
    for name, value in components.items():
        nets = _several(value)
        for key, item in {f"{name}_{n}": net for n, net in enumerate(nets)}.items() if nets else [(name, value)]:
            if item is not None:
                members.append(_member(key, item, origin))
                trust = (*trust, *path_of(type(item))[1])
        if nets:
            lists[name] = [f"${name}_{number}" for number in range(len(nets))]
    absent = [name for name, value in components.items() if value is None]
    given = {name: plain(value) for name, value in pipe.config.items() if name not in components and not name.startswith("_")}
    return PipelineSpec(
        origin=origin,
        name=slug(kind.__name__.removesuffix("Pipeline")),
        pipeline=path,
        source=source,
        members=tuple(members),
        settings=plain_settings(kind, given | lists, absent),
        folder=source if here else None,
        trust=tuple(dict.fromkeys(trust)),
    )


def _components(pipe: Any) -> dict[str, Any]:
    """The members of ``pipe``, and parts that its constructor creates when they are left out (LongCat's scheduler)."""
    named = {name: getattr(pipe, name, None) for name, entry in pipe.config.items() if isinstance(entry, (list, tuple))}
    return dict(pipe.components) | {name: part for name, part in named.items() if pipe.config[name][1:] == (type(part).__name__,)}


def of_blocks(pipe: Any, path: str, trust: tuple[str, ...], origin: str) -> PipelineSpec:
    """The spec of the modular pipeline ``pipe``. Each component has the source that it was loaded from."""
    settings, workflow, packages = blocks_of(pipe._blocks, own_class(pipe), origin)
    settings |= {name: plain(pipe.config[name]) for name, spec in fresh_configs(pipe).items() if pipe.config[name] != spec}
    members = list[MemberSpec]()
    for name, value in pipe.components.items():
        if value is not None:
            member, spec = _member(name, value, origin), pipe._component_specs[name]
            members.append(replace(member, source=loaded_from(spec) or member.source))
            packages = (*packages, *path_of(type(value))[1])
    return PipelineSpec(
        origin=origin,
        name=slug(own_class(pipe).__name__.removesuffix("ModularPipeline")),
        pipeline=path,
        source=None,
        members=tuple(members),
        settings=settings,
        trust=tuple(dict.fromkeys((*trust, *packages))),
        workflow=workflow,
    )


def _member(name: str, value: Any, origin: str) -> MemberSpec:
    path = path_of(type(value))[0]
    config = getattr(value, "config", None)
    if not isinstance(value, nn.Module):
        own = plain_config(config) if config is not None and hasattr(value, "from_config") else None
        return MemberSpec(name, path, own, live=value, source=_found_again(value) if own is None else None)
    if config is None:
        raise InputError(f"{origin}: {name} is a {path} without a configuration, and a graph file needs one: give its class one")
    tensors = [(t, t.numel() * t.element_size()) for t in (*value.parameters(), *value.buffers()) if t.is_floating_point()]
    sizes: dict[str, int] = {}
    for tensor, nbytes in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        sizes[dtype] = sizes.get(dtype, 0) + nbytes
    dtype = max(sizes, key=lambda key: sizes[key], default="float32")
    return MemberSpec(name, path, plain_config(config), dtype=dtype, dtype_reason=OF_FILES, live=value)


def _several(value: Any) -> list[nn.Module]:
    """The modules in a wrapper that has no configuration of its own, such as several ControlNets; empty for anything else."""
    listed = isinstance(value, nn.Module) and getattr(value, "config", None) is None
    inner = [child for child in value.children() if isinstance(child, nn.ModuleList)] if listed else []
    return list(inner[0]) if len(inner) == 1 else []


def _found_again(value: Any) -> str | None:
    """The folder that a tokenizer or processor was loaded from; None where it no longer exists."""
    loaded = getattr(value, "name_or_path", "")
    return str(Path(loaded).resolve()) if loaded and Path(loaded).is_dir() else None

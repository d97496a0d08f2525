"""Description of live pipelines: classes, configurations and dtypes of their modules. Reads no
weights. Also finds the source from which a graph file can load weights and tokenizers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphrun.diffusers_.importing.found import (
    OF_FILES,
    PipelineDescription,
    common_dtype,
    name_of,
    path_of,
    plain,
    plain_config,
    plain_settings,
)
from graphrun.diffusers_.importing.modular_spec import blocks_of, fresh_configs, source_of
from graphrun.diffusers_.live import own_class
from graphrun.errors import InputError
from graphrun.graph.graph import DEFAULT_ALLOW
from graphrun.graph.parts import Component
from graphrun.modules.build import meta_module
from graphrun.ops.modular import is_modular_class


def of_pipeline(pipe: Any) -> PipelineDescription:
    """Return the description of ``pipe``.

    The source is the folder or repository that the pipeline, or each component of a modular
    pipeline, was loaded from. Raises InputError if a graph file cannot express the pipeline: a
    module without a configuration, an inner pipeline, a list of modules, a class that cannot be
    imported by name, modular blocks changed by code.
    """
    kind = own_class(pipe)
    description = PipelineDescription(
        f"from_pipeline({kind.__name__})", path_of(kind), name_of(kind)
    )
    members, class_paths, sources = (
        dict[str, Any](),
        [description.pipeline],
        dict[str, str | None](),
    )
    if is_modular_class(kind):
        description.settings, description.workflow = blocks_of(
            pipe._blocks, kind, description.origin
        )
        class_paths += description.settings.values()
        description.settings |= {
            name: plain(pipe.config[name])
            for name, default in fresh_configs(pipe).items()
            if pipe.config[name] != default
        }
        members = dict(pipe.components)
        sources = {name: source_of(pipe._component_specs[name]) for name in members}
    else:
        location = str(pipe.config.get("_name_or_path") or "")
        if location and Path(location).is_dir():
            description.folder = Path(location).resolve()
            description.source = str(description.folder)
        elif not location.startswith((".", "/")):
            description.source = location or None
        components = _components(pipe)
        settings = {
            name: plain(value)
            for name, value in pipe.config.items()
            if name not in components and not name.startswith("_")
        }
        for name, value in components.items():
            modules = {
                f"{name}_{number}": module for number, module in enumerate(_inner_modules(value))
            }
            members |= modules or {name: value}
            settings |= {name: [f"${key}" for key in modules]} if modules else {}
        description.settings = plain_settings(
            kind, settings, [name for name, value in components.items() if value is None]
        )
    members = {name: value for name, value in members.items() if value is not None}
    packages = (
        path.split(".")[0]
        for path in (*class_paths, *(path_of(type(value)) for value in members.values()))
    )
    description.trust = tuple(
        dict.fromkeys(package for package in packages if package not in DEFAULT_ALLOW)
    )
    for name, value in members.items():
        _add(description, name, value, sources.get(name))
    return description


def _components(pipe: Any) -> dict[str, Any]:
    """Return the members of ``pipe``, with its constructor's defaults (LongCat's scheduler)."""
    candidates = {
        name: getattr(pipe, name, None)
        for name, entry in pipe.config.items()
        if isinstance(entry, (list, tuple))
    }
    return dict(pipe.components) | {
        name: part
        for name, part in candidates.items()
        if pipe.config[name][1:] == (type(part).__name__,)
    }


def _add(description: PipelineDescription, name: str, value: Any, source: str | None) -> None:
    path, config = path_of(type(value)), getattr(value, "config", None)
    if not isinstance(value, nn.Module):
        settings = (
            plain_config(config) if config is not None and hasattr(value, "from_config") else None
        )
        location = getattr(value, "name_or_path", "") if settings is None else ""
        local_source = (
            str(Path(location).resolve()) if location and Path(location).is_dir() else None
        )
        description.add(name, path, settings, source=source or local_source, live=value)
        return
    if config is None:
        raise InputError(
            f"{description.origin}: {name} is a {path} without a configuration, and a graph file "
            "needs one: give its class one"
        )
    tensors = (
        tensor for tensor in (*value.parameters(), *value.buffers()) if tensor.is_floating_point()
    )
    dtype = common_dtype(
        (str(t.dtype).removeprefix("torch."), t.numel() * t.element_size()) for t in tensors
    )
    description.add(
        name, path, plain_config(config), (dtype or "float32", OF_FILES), source=source, live=value
    )
    component = description.components[name]
    if _is_cast_as_a_whole(value, component, description.trust):
        description.components[name] = replace(component, keep_fp32=False)


def _is_cast_as_a_whole(module: nn.Module, component: Component, trust: tuple[str, ...]) -> bool:
    """Return whether ``module`` has all tensors in one 16-bit dtype, and, loaded as ``component``,
    would have some in float32."""
    if _floating_dtypes(module) not in ({torch.bfloat16}, {torch.float16}):
        return False
    return torch.float32 in _floating_dtypes(meta_module(component, trust))


def _floating_dtypes(module: nn.Module) -> set[torch.dtype]:
    tensors = (*module.parameters(), *module.buffers())
    return {tensor.dtype for tensor in tensors if tensor.is_floating_point()}


def _inner_modules(value: Any) -> list[nn.Module]:
    """Return the modules in a wrapper without a configuration, such as several ControlNets; empty
    for anything else."""
    has_no_config = isinstance(value, nn.Module) and getattr(value, "config", None) is None
    inner = (
        [child for child in value.children() if isinstance(child, nn.ModuleList)]
        if has_no_config
        else []
    )
    return list(inner[0]) if len(inner) == 1 else []

"""IP-Adapters: what their files add to a component, a projection of picture embeddings and more keys and values for attention.

Decides where their tensors stand in the module; the library's own loader says what each file is. The meta module gets them from the
file's header alone.

    image_proj.proj.weight         ->   encoder_hid_proj.image_projection_layers.0.image_embeds.weight
    ip_adapter.1.to_k_ip.weight    ->   down_blocks.1...attn2.processor.to_k_ip.0.weight
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphrun.errors import GraphError
from graphrun.graph.graph import Component
from graphrun.modules.sources import Source


def adapt(component: Component, module: Any) -> Any:
    """``module``, with what the IP-Adapters of ``component`` add to it, on meta and without data."""
    if component.ip_adapters:
        with torch.device("meta"):
            attention, layers = _made(component, module, _headers)
        from diffusers.models.embeddings import MultiIPAdapterImageProjection

        for processor in attention.values():
            if hasattr(processor, "scale"):
                processor.scale = [adapter.scale for adapter in component.ip_adapters]
        module.set_attn_processor(attention)
        module.encoder_hid_proj = MultiIPAdapterImageProjection(layers)
        module.register_to_config(encoder_hid_dim_type="ip_image_proj")
    return module


def adapter_tensors(component: Component, module: Any) -> dict[str, torch.Tensor]:
    """The tensors of its IP-Adapters by their names in ``module``, which `adapt` returned, in its dtype on the CPU."""
    if not component.ip_adapters:
        return {}
    attention, layers = _made(component, module, _contents)
    named: dict[str, nn.Module] = {name: part for name, part in attention.items() if isinstance(part, nn.Module)}
    named |= {f"encoder_hid_proj.image_projection_layers.{number}": layer for number, layer in enumerate(layers)}
    found = {f"{name}.{key}": tensor for name, part in named.items() for key, tensor in part.state_dict().items()}
    return {name: tensor.to(getattr(torch, component.dtype)) for name, tensor in found.items()}


def fill_adapters(component: Component, module: nn.Module) -> nn.Module:
    """``module`` with the data of its IP-Adapters in place."""
    for name, tensor in adapter_tensors(component, module).items():
        path, _, key = name.rpartition(".")
        module.get_submodule(path)._parameters[key] = nn.Parameter(tensor, requires_grad=False)
    return module


class AdapterSource:
    """``source``, and ``tensors`` that are an adapter's."""

    plain = False

    def __init__(self, source: Source, tensors: Mapping[str, torch.Tensor]) -> None:
        self._source, self._tensors = source, dict(tensors)

    def into(self, name: str, target: torch.Tensor) -> int:
        """Bytes that were read for ``target``."""
        if name not in self._tensors:
            return self._source.into(name, target)
        target.copy_(self._tensors[name])
        return target.numel() * target.element_size()

    def close(self) -> None:
        """Closes the source."""
        self._source.close()


def _made(component: Component, module: Any, read: Callable[[Path], dict[str, torch.Tensor]]) -> tuple[dict[str, Any], list[Any]]:
    """Attention processors by name and projections, made of what ``read`` finds in the files."""
    place = f"components.{component.name}.ip_adapters"
    if not hasattr(module, "_convert_ip_adapter_attn_to_diffusers"):
        raise GraphError(f"{place}: {component.class_path} takes none", component.where)
    states = []
    for adapter in component.ip_adapters:
        try:
            tensors = read(Path(adapter.file))
        except Exception as error:  # noqa: BLE001  (safetensors raises a class of its own for each fault)
            raise GraphError(f"{place}: {adapter.file} cannot be read: {error}", component.where) from error
        parts = ("image_proj", "ip_adapter")
        states.append({part: {k[len(part) + 1 :]: t for k, t in tensors.items() if k.startswith(f"{part}.")} for part in parts})
    try:
        attention = module._convert_ip_adapter_attn_to_diffusers(states, low_cpu_mem_usage=False)
        layers = [module._convert_ip_adapter_image_proj_to_diffusers(s["image_proj"], low_cpu_mem_usage=False) for s in states]
    except (KeyError, RuntimeError, IndexError, ValueError) as error:
        names = ", ".join(adapter.file for adapter in component.ip_adapters)
        text = " ".join(str(error).split())[:300]
        raise GraphError(f"{place}: {names} does not fit {component.class_path}: {text}", component.where) from error
    return attention, layers


def _headers(file: Path) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return {key: torch.empty(opened.get_slice(key).get_shape(), device="meta") for key in opened.keys()}  # noqa: SIM118


def _contents(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(file)

"""IP-Adapters: a projection of image embeddings, and key and value weights for cross-attention.

diffusers' own loader interprets the files; this module finds the names of their tensors in the
component. For a meta module only the header of a file is read.

    image_proj.proj.weight      -> encoder_hid_proj.image_projection_layers.0.image_embeds.weight
    ip_adapter.1.to_k_ip.weight -> down_blocks.1...attn2.processor.to_k_ip.0.weight
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from graphrun.graph.parts import Component
from graphrun.modules.classes import refusal
from graphrun.modules.source_files import refuse_uncomputable


def add_ip_adapters(component: Component, module: Any) -> Any:
    """Add the attention processors and projections of the IP-Adapters to ``module``, on meta."""
    if component.ip_adapters:
        with torch.device("meta"):
            attention, layers = _converted(component, module, meta=True)
        from diffusers.models.embeddings import MultiIPAdapterImageProjection

        for processor in attention.values():
            if hasattr(processor, "scale"):
                processor.scale = [adapter.scale for adapter in component.ip_adapters]
        module.set_attn_processor(attention)
        module.encoder_hid_proj = MultiIPAdapterImageProjection(layers)
        module.register_to_config(encoder_hid_dim_type="ip_image_proj")
    return module


def adapter_tensors(
    component: Component, module: Any, *, meta: bool = False
) -> dict[str, torch.Tensor]:
    """Return the tensors of ``component``'s IP-Adapters by their names in ``module``.

    They are on the CPU, in the component's dtype; with ``meta``, on meta without values.
    ``module``: a result of `add_ip_adapters`. Raises GraphError for a file that cannot be read or
    does not fit.
    """
    if not component.ip_adapters:
        return {}
    with torch.device("meta") if meta else nullcontext():
        attention, layers = _converted(component, module, meta=meta)
    adapter_modules: dict[str, nn.Module] = {
        name: part for name, part in attention.items() if isinstance(part, nn.Module)
    }
    adapter_modules |= {
        f"encoder_hid_proj.image_projection_layers.{number}": layer
        for number, layer in enumerate(layers)
    }
    tensors = {
        f"{name}.{key}": tensor
        for name, part in adapter_modules.items()
        for key, tensor in part.state_dict().items()
    }
    return {name: tensor.to(getattr(torch, component.dtype)) for name, tensor in tensors.items()}


def _converted(
    component: Component, module: Any, *, meta: bool
) -> tuple[dict[str, Any], list[Any]]:
    """Return the attention processors by name and the image projections, from diffusers. ``meta``:
    read only the headers of the files. Raises GraphError."""
    from safetensors import safe_open

    if not hasattr(module, "_convert_ip_adapter_attn_to_diffusers"):
        raise refusal(
            component, f"{component.class_path} does not support IP-Adapters", ".ip_adapters"
        )
    states, parts = [], ("image_proj.", "ip_adapter.")
    for adapter in component.ip_adapters:
        try:
            with safe_open(adapter.file, framework="pt") as file:
                keys = [key for key in file.keys() if key.startswith(parts)]  # noqa: SIM118
                refuse_uncomputable({key: file.get_slice(key).get_dtype() for key in keys})
                tensors = {
                    key: torch.empty(file.get_slice(key).get_shape(), device="meta")
                    if meta
                    else file.get_tensor(key)
                    for key in keys
                }
        except Exception as error:  # noqa: BLE001  (safetensors raises various exception classes)
            raise refusal(
                component, f"{adapter.file} cannot be read: {error}", ".ip_adapters"
            ) from error
        states.append(
            {
                part[:-1]: {
                    k.removeprefix(part): t for k, t in tensors.items() if k.startswith(part)
                }
                for part in parts
            }
        )
    try:
        attention = module._convert_ip_adapter_attn_to_diffusers(states, low_cpu_mem_usage=False)
        layers = [
            module._convert_ip_adapter_image_proj_to_diffusers(
                s["image_proj"], low_cpu_mem_usage=False
            )
            for s in states
        ]
    except (KeyError, RuntimeError, IndexError, ValueError) as error:
        names = ", ".join(adapter.file for adapter in component.ip_adapters)
        text = " ".join(str(error).split())[:300]
        raise refusal(
            component, f"{names} does not fit {component.class_path}: {text}", ".ip_adapters"
        ) from error
    return attention, layers

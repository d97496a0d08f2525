"""Fuse LoRAs into a component's weights while these are read: W + scale * alpha / rank * B A.

LoRAs take no memory of their own. Reads the layouts that diffusers writes: ``lora_A.weight`` with
``lora_B`` (peft's names), and ``lora.down.weight`` with ``up``; with or without the component's
name as prefix; ``alpha`` as a tensor or in the file's metadata, by default the rank. Rounds as
diffusers does with peft on the CPU: both factors are cast to the weight's dtype and multiplied in
fp32; the product is cast to the weight's dtype and added in that dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphrun.graph.loras import SUFFIXES, own_keys
from graphrun.graph.parts import Adapter, Component
from graphrun.modules.classes import refusal
from graphrun.modules.source_files import refuse_uncomputable
from graphrun.reading import parse_json


@dataclass(frozen=True, slots=True)
class Delta:
    """What one file adds to one weight: ``factor`` x up [out r] x down [r in]. ``down_key`` and
    ``up_key`` name the two tensors in ``file``, which are read when needed."""

    file: str
    down_key: str
    up_key: str
    factor: float

    def add_to(self, weight: torch.Tensor) -> None:
        """Add the delta to ``weight``, [out in] or [out in h w], in place."""
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as file:
            down_matrix, up_matrix = (
                file.get_tensor(name).to(weight.dtype).float()
                for name in (self.down_key, self.up_key)
            )
        weight += (
            (up_matrix.flatten(1) @ down_matrix.flatten(1) * self.factor)
            .reshape(weight.shape)
            .to(weight.dtype)
        )


def deltas_of(component: Component, module: nn.Module) -> dict[str, list[Delta]]:
    """Return the deltas of ``component``'s LoRAs, by the names of ``module``'s weights.

    Raises GraphError for a file that cannot be read, has no tensors for this component, or does not
    fit it.
    """
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    deltas: dict[str, list[Delta]] = {}
    for lora in component.loras:
        for name, delta in _deltas(component, lora, shapes).items():
            deltas.setdefault(name, []).append(delta)
    return deltas


def _deltas(
    component: Component, lora: Adapter, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Delta]:
    """Return the deltas of one LoRA by weight name. ``shapes``: of the component's parameters."""
    sizes, alphas, metadata = _contents(component, lora)
    prefix, keys = own_keys(sizes, component.name)
    halves: dict[str, dict[str, str]] = {}
    for key in keys:
        for suffix in filter(key.endswith, SUFFIXES):
            halves.setdefault(key[len(prefix) : -len(suffix)], {})[SUFFIXES[suffix]] = key
    if not halves:
        examples = ", ".join(sorted(sizes)[:3])
        raise refusal(
            component,
            f"{lora.file} has no tensors for {component.name}: it has {examples}, ...",
            ".loras",
        )
    deltas = {}
    for path, pair in halves.items():
        name, shape = f"{path}.weight", shapes.get(f"{path}.weight")
        if shape is None:
            raise refusal(
                component,
                f"{lora.file} changes {path}, which {component.class_path} does not have",
                ".loras",
            )
        if pair.keys() != {"down", "up"} or not _fit(sizes[pair["down"]], sizes[pair["up"]], shape):
            text = ", ".join(f"{half} {list(sizes[key])}" for half, key in sorted(pair.items()))
            raise refusal(
                component, f"{lora.file} does not fit {name} {list(shape)}: it has {text}", ".loras"
            )
        rank = sizes[pair["down"]][0]
        alpha = alphas.get(f"{prefix}{path}.alpha", metadata.get("lora_alpha", rank))
        if (
            isinstance(alpha, bool)
            or not isinstance(alpha, int | float)
            or not math.isfinite(alpha)
        ):
            raise refusal(
                component,
                f"{lora.file}: the alpha of {path} is {alpha!r}, and must be a finite number",
                ".loras",
            )
        deltas[name] = Delta(lora.file, pair["down"], pair["up"], lora.scale * alpha / rank)
    return deltas


def _fit(down_shape: tuple[int, ...], up_shape: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether up [out r ...] x down [r in ...] is a weight of ``shape``. The dimensions
    after the first count as one."""
    if min(len(down_shape), len(up_shape), len(shape)) < 2 or down_shape[0] == 0:
        return False
    return (up_shape[0], math.prod(up_shape[1:]), math.prod(down_shape[1:])) == (
        shape[0],
        down_shape[0],
        math.prod(shape[1:]),
    )


def _contents(
    component: Component, lora: Adapter
) -> tuple[dict[str, tuple[int, ...]], dict[str, float], dict[str, Any]]:
    """Return shapes by key, alphas by key, and metadata settings of this adapter."""
    from safetensors import SafetensorError, safe_open

    if not Path(lora.file).is_file():
        raise refusal(component, f"no such file: {lora.file}", ".loras")
    try:
        with safe_open(lora.file, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            refuse_uncomputable(
                {key: slices[key].get_dtype() for key in slices if key.endswith(tuple(SUFFIXES))}
            )
            sizes = {key: tuple(tensor_slice.get_shape()) for key, tensor_slice in slices.items()}
            alphas = {
                key: file.get_tensor(key).double().item() for key in sizes if key.endswith(".alpha")
            }
            settings = parse_json((file.metadata() or {}).get("lora_adapter_metadata", "{}"))
        if not isinstance(settings, dict):
            raise ValueError("lora_adapter_metadata is not a JSON object")
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise refusal(component, f"{lora.file} cannot be read: {error}", ".loras") from error
    prefix = f"{component.name}."
    return (
        sizes,
        alphas,
        {
            key.removeprefix(prefix): value
            for key, value in settings.items()
            if key.startswith(prefix)
        },
    )

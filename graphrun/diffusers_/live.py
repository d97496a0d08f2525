"""What a live pipeline consists of: its components, what else it holds, and its meta module.

Decides which modules count as components and how a pipeline is copied without its weights. Must not know plans or devices' memory.

    pipe                 text_encoder   transformer   vae   tokenizer   scheduler     prior_pipe.prior ...
    components           x              x             x                               x (once, by its first name)
    its meta module            on meta        on meta       on meta   shared  copied        on meta
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphrun.errors import InputError
from graphrun.graph.graph import Component, Graph
from graphrun.modules.blocks import held
from graphrun.modules.dtype_variants import DtypeVariant
from graphrun.modules.interceptor import plainly
from graphrun.modules.quantize import normalize_quantized_layers
from graphrun.ops.modular import blocks_in, is_modular_class

# Things of these packages that are no modules (tokenizers, processors) keep nothing of a call: a meta module shares them.
SHARED = ("transformers", "tokenizers", "sentencepiece")

# What peft's layers keep of which LoRAs are computed with: one that is fused takes no activation.
ADAPTED = ("_active_adapter", "_disable_adapters", "merged_adapters")


def is_modular(pipe: Any) -> bool:
    """Whether ``pipe`` is one of diffusers' modular pipelines, which share no class with the others."""
    return is_modular_class(type(pipe))


def is_pipeline(value: Any) -> bool:
    """Whether ``value`` is a pipeline of diffusers, modular or not."""
    from diffusers import DiffusionPipeline

    return isinstance(value, DiffusionPipeline) or is_modular(value)


def pipelines_in(pipe: Any) -> dict[str, Any]:
    """``pipe`` and the pipelines that it holds, by the path of attributes (``""``: itself)."""
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [("", pipe)]
    while waiting:
        path, owner = waiting.pop(0)
        if any(owner is other for other in found.values()):
            continue
        found[path] = owner
        inner = ((name, value) for name, value in vars(owner).items() if is_pipeline(value))
        waiting += [(f"{path}.{name}" if path else name, value) for name, value in inner]
    return found


def components_of(pipe: Any) -> dict[str, nn.Module]:
    """Every module with weights that ``pipe`` holds, by attribute; each once, and none that is a part of another.

    Raises InputError when there is none.
    """
    held = dict.fromkeys((name, module) for owner in pipelines_in(pipe).values() for name, module in _modules(vars(owner)))
    found: dict[str, nn.Module] = {}
    for name, module in held:
        if all(module is not other for other in found.values()) and any(True for _ in _tensors(module)):
            found[name if name not in found else f"{name}_{len(found)}"] = module
    inner = {id(part) for module in found.values() for part in module.modules() if part is not module}
    found = {name: module for name, module in found.items() if id(module) not in inner}
    if not found:
        raise InputError(f"{type(pipe).__name__} holds no module with weights: hand in a pipeline with its components")
    return found


class Joined(nn.Module):
    """Components that have weights in common, as one: what places them for one places them for all."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.config = {name: _plain(getattr(part, "config", {})) for name, part in parts.items()}


def joined(modules: Mapping[str, nn.Module], before: Iterable[nn.Module] = ()) -> dict[str, nn.Module]:
    """``modules``, those with weights in common as one component (Z-Image's ControlNet runs layers of the transformer).

    ``before``: earlier results, of which a component that has the same parts is taken.
    """
    groups: list[tuple[set[int], dict[str, nn.Module]]] = []
    for name, module in modules.items():
        held, parts = {id(tensor) for tensor in _tensors(module)}, {name: module}
        for group in [group for group in groups if group[0] & held]:
            groups.remove(group)
            held, parts = held | group[0], {**group[1], **parts}
        groups.append((held, parts))
    return {"_and_".join(parts): _one(parts, before) for _, parts in groups}


def _one(parts: dict[str, nn.Module], before: Iterable[nn.Module]) -> nn.Module:
    if len(parts) == 1:
        return next(iter(parts.values()))
    same = (old for old in before if isinstance(old, Joined) and old._modules == parts)  # modules are equal where they are the same
    return next(same, None) or Joined(parts)


def _modules(attributes: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    for name, value in attributes.items():
        if isinstance(value, nn.Module):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from _modules({f"{name}_{number}": item for number, item in enumerate(value)})
        elif isinstance(value, dict) and not name.startswith("_"):
            yield from _modules({f"{name}_{key}": item for key, item in value.items()})


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for child in module.modules():
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if tensor is not None:
                yield tensor


def meta_module_of(pipe: Any, device: torch.device) -> Any:
    """A copy of ``pipe`` without weights: its modules' parameters and buffers are on meta, and it computes on ``device``.

    Classes, configurations, processors and ties are the live pipeline's; tokenizers are shared, schedulers copied. No weight is
    read. Raises InputError when something in it cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in _all_modules(pipe):
        normalize_quantized_layers(module)
        for tensor in (tensor for child in module.modules() for tensor, *_ in held(child)):
            if id(tensor) not in memo:
                twin = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                twin = torch.empty_like(tensor, device="meta") if type(tensor) in (torch.Tensor, nn.Parameter) else twin
                memo[id(tensor)] = nn.Parameter(twin, requires_grad=False) if isinstance(tensor, nn.Parameter) else twin
        for tensor in _tensors(module):
            _hang_on(memo[id(tensor)], tensor, memo)
        for child in module.modules():  # computed from weights before each call, as torch's weight_norm does
            made = (value for value in vars(child).values() if isinstance(value, torch.Tensor) and not value.is_leaf)
            memo |= {id(tensor): torch.empty_like(tensor, device="meta").detach() for tensor in made}
    for owner in pipelines_in(pipe).values():
        for value in vars(owner).values():
            if not isinstance(value, nn.Module) and type(value).__module__.split(".")[0] in SHARED:
                memo[id(value)] = value
    try:
        meta_module = copy.deepcopy(pipe, memo)
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        raise InputError(f"{type(pipe).__name__} cannot be copied without its weights, for its probe: {error}") from error
    for owner in pipelines_in(meta_module).values():
        owner.__class__ = placed(own_class(owner), lambda: device)
        for showing in _showing_progress(owner):
            showing.set_progress_bar_config(disable=True)
    return meta_module


def _showing_progress(owner: Any) -> list[Any]:
    """``owner``, or of a modular pipeline its blocks that show their progress, at any depth."""
    if not is_modular(owner):
        return [owner]
    return [block for block in blocks_in(owner._blocks) if hasattr(block, "set_progress_bar_config")]


def _hang_on(twin: Any, tensor: Any, memo: dict[int, Any]) -> None:
    """What a layer of bitsandbytes looks for on its weight."""
    if getattr(tensor, "quant_state", None) is not None:
        twin.quant_state, twin.bnb_quantized = copy.deepcopy(tensor.quant_state, memo), True
    if hasattr(tensor, "SCB"):
        twin.CB = twin.SCB = None


def _all_modules(pipe: Any) -> Iterator[nn.Module]:
    for owner in pipelines_in(pipe).values():
        for _, module in _modules(vars(owner)):
            yield module


def placed(kind: type[Any], place: Callable[[], torch.device], **members: Any) -> type[Any]:
    """``kind`` as it answers on the device ``place()``, wherever its modules' parameters are. A copy of it is of ``kind``."""
    here = property(lambda _: place())
    own: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__, "_graphrun_places": kind}
    own["__reduce_ex__"] = lambda owner, protocol: plainly(kind, super(kind, owner).__reduce_ex__(protocol))
    return type(kind.__name__, (kind,), {**own, "_execution_device": here, "device": here, **members})


def own_class(owner: Any) -> type[Any]:
    """The class of a pipeline without what `placed` put around it."""
    return getattr(type(owner), "_graphrun_places", type(owner))


def graph_of(pipe: Any, modules: Mapping[str, nn.Module], dtype_variants: Iterable[DtypeVariant] = ()) -> Graph:
    """What a problem names of a live pipeline: its class, its components with class, configuration and dtype. No stages.

    ``dtype_variants``: those in which they are entered beside the one that they are in.
    """
    components = {name: _component(name, module) for name, module in modules.items()}
    for dtype_variant in dtype_variants:
        dtype = str(next((of for of in dtype_variant.dtypes if of.is_floating_point), torch.float32)).removeprefix("torch.")
        if dtype_variant.name not in components:
            components[dtype_variant.name] = replace(
                components[dtype_variant.component], name=dtype_variant.name, dtype=dtype, precision=(dtype,)
            )
    return Graph(
        name=type(pipe).__name__,
        path=None,
        pipeline=f"{type(pipe).__module__}.{type(pipe).__name__}",
        source=None,
        pipeline_config={},
        trust=(),
        inputs={},
        components=components,
        parts={},
        stages=(),
        outputs={},
    )


def _component(name: str, module: nn.Module) -> Component:
    floating = (tensor.dtype for tensor in _tensors(module) if tensor.is_floating_point())
    dtype = str(next(floating, torch.float32)).removeprefix("torch.")
    kind = type(module)
    config = json.loads(json.dumps(_plain(getattr(module, "config", {})), default=str, sort_keys=True))
    return Component(name, f"{kind.__module__}.{kind.__name__}", None, config, True, dtype, (dtype,))


def _plain(config: Any) -> dict[str, Any]:
    return dict(config.to_dict() if hasattr(config, "to_dict") else config)


def state_of(pipe: Any, modules: Mapping[str, nn.Module]) -> str:
    """A digest of what a probe of ``pipe`` depends on beside the call: classes, plain settings, tensors' shapes, schedulers.

    A VAE that tiles from now on, another scheduler or guider, a LoRA: each gives another digest.
    """
    content: list[Any] = []
    for name, module in modules.items():
        for path, child in module.named_modules():
            plain = {
                key: value for key, value in vars(child).items() if isinstance(value, (bool, int, float, str)) and key[0] != "_"
            }
            tensors = [
                (key, t.shape, t.dtype) for own in (child._parameters, child._buffers) for key, t in own.items() if t is not None
            ]
            processor = type(getattr(child, "processor", None)).__name__
            others = [key for key in ("_hf_hook", "_diffusers_hook", "_compiled_call_impl") if vars(child).get(key) is not None]
            adapted = [(key, vars(child)[key]) for key in ADAPTED if key in vars(child)]
            content.append((name, path, others, type(child).__qualname__, processor, plain, tensors, adapted))
    for path, owner in pipelines_in(pipe).items():
        for key, value in vars(owner).items():
            if hasattr(value, "set_timesteps") or hasattr(value, "prepare_inputs"):  # schedulers, and modular pipelines' guiders
                content.append((path, key, type(value).__qualname__, sorted(map(str, _plain(value.config).items()))))
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]

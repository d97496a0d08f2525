"""Components of a live pipeline, and its meta copy with all parameters and buffers on meta.

    pipe               text_encoder, transformer, vae   prior_pipe.prior   tokenizer   scheduler
    component          yes                              yes                no          no
    in the meta copy   on meta                          on meta            shared      copied

A module that several pipelines have is one component, under its first name.
"""

from __future__ import annotations

import copy
import functools
import json
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphrun.diffusers_.call_arguments import signature_of
from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Component
from graphrun.modules.blocks import direct_tensors
from graphrun.modules.compiled import is_compiled, run_as_written
from graphrun.modules.dtype_variants import DtypeVariant
from graphrun.modules.interceptor import reduced_as
from graphrun.modules.memos import DIFFUSERS_HOOKS, Owned, has_value
from graphrun.modules.quantize import normalize_quantized_layers
from graphrun.modules.torchao_files import CONFIGS as TORCHAO_CONFIGS
from graphrun.modules.trees import PLAIN, may_hold, modules_below
from graphrun.ops.modular import blocks_in, is_modular_class

# tokenizers and processors of these packages have no state of a call: the meta copy shares them
SHARED_LIBRARIES = ("transformers", "tokenizers", "sentencepiece")

# attributes of peft's layers that select the LoRAs of a forward; a fused LoRA needs no activation
ADAPTER_ATTRIBUTES = ("_active_adapter", "_disable_adapters", "merged_adapters")
_STATEFUL = frozenset({*ADAPTER_ATTRIBUTES, "_hf_hook", "processor", DIFFUSERS_HOOKS})

State = list[Any]
"""Plain values, shapes and texts; computing a digest would dominate the time of a short call."""


def is_modular(pipe: Any) -> bool:
    """Return whether ``pipe`` is a modular diffusers pipeline (no ``DiffusionPipeline``)."""
    return is_modular_class(type(pipe))


def is_pipeline(value: Any) -> bool:
    """Return whether ``value`` is a diffusers pipeline, modular or not."""
    from diffusers import DiffusionPipeline

    return isinstance(value, DiffusionPipeline) or is_modular(value)


def pipelines_in(pipe: Any) -> dict[str, Any]:
    """Return ``pipe`` (path ``""``) and the pipelines inside it, by attribute path."""
    pipelines: dict[str, Any] = {}
    queue: list[tuple[str, Any]] = [("", pipe)]
    while queue:
        path, owner = queue.pop(0)
        if any(owner is other for other in pipelines.values()):
            continue
        pipelines[path] = owner
        inner = ((name, value) for name, value in vars(owner).items() if is_pipeline(value))
        queue += [(f"{path}.{name}" if path else name, value) for name, value in inner]
    return pipelines


def components_of(
    pipe: Any, named_components: Mapping[str, nn.Module] | None = None
) -> dict[str, nn.Module]:
    """Return the modules with weights in ``pipe`` and in pipelines inside it, by attribute name.

    Each module appears once; submodules of another component are omitted. ``named_components``
    replaces the search. Raises InputError if there is no component, and for weights that cannot be
    placed.
    """
    if named_components is not None:
        _refuse_composed(named_components)
        return dict(named_components)
    components: dict[str, nn.Module] = {}
    for name, module in _modules_of(pipe):
        if all(module is not other for other in components.values()) and _has_tensors(module):
            components[name if name not in components else f"{name}_{len(components)}"] = module
    inner = {id(part) for module in components.values() for part in modules_below(module)[1:]}
    components = {name: module for name, module in components.items() if id(module) not in inner}
    if not components:
        raise InputError(
            f"{type(pipe).__name__} has no module with weights: pass a pipeline with its components"
        )
    _refuse_composed(components)
    return components


def _refuse_composed(components: Mapping[str, nn.Module]) -> None:
    """Raise InputError for weights that stand for several tensors, as those of torchao and quanto:
    a block has bytes, and such a weight has none of its own."""
    for name, module in components.items():
        for weight in module.parameters():
            if hasattr(weight, "__tensor_flatten__"):
                kind = type(weight)
                raise InputError(
                    f"{name} has weights of {kind.__module__}.{kind.__name__}, each made of "
                    "several tensors, which cannot be placed: load it in 16 bits or quantized by "
                    f"bitsandbytes, or, for torchao's {' and '.join(TORCHAO_CONFIGS)}, save the "
                    "pipeline (save_pretrained) and type graphrun import FOLDER"
                )


class MergedComponent(nn.Module):
    """A module for components that share weights, so that graphrun loads these weights once."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.config = {name: _plain(getattr(part, "config", {})) for name, part in parts.items()}


def merge_shared(
    modules: Mapping[str, nn.Module], previous: Iterable[nn.Module] = ()
) -> dict[str, nn.Module]:
    """Merge modules that share weights into one component ``a_and_b``.

    Z-Image's ControlNet, for example, runs layers of the transformer. ``previous``: modules from
    earlier results; a `MergedComponent` among them with the same parts is reused.
    """
    groups: list[tuple[set[int], dict[str, nn.Module]]] = []
    for name, module in modules.items():
        tensor_ids, parts = {id(tensor) for tensor in _tensors(module)}, {name: module}
        for group in [group for group in groups if group[0] & tensor_ids]:
            groups.remove(group)
            tensor_ids, parts = tensor_ids | group[0], {**group[1], **parts}
        groups.append((tensor_ids, parts))
    return {"_and_".join(parts): _merged(parts, previous) for _, parts in groups}


def _merged(parts: dict[str, nn.Module], previous: Iterable[nn.Module]) -> nn.Module:
    if len(parts) == 1:
        return next(iter(parts.values()))
    # modules compare by identity
    matches = (
        module
        for module in previous
        if isinstance(module, MergedComponent) and module._modules == parts
    )
    return next(matches, None) or MergedComponent(parts)


def _modules_of(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for every module of ``pipe`` and of pipelines inside it."""
    if not is_pipeline(pipe):
        return iter(modules_in(pipe).items())
    return (
        named_module
        for owner in pipelines_in(pipe).values()
        for named_module in _modules(vars(owner))
    )


def modules_in(program: Any) -> dict[str, nn.Module]:
    """Return the modules with weights in ``program``, which is not a diffusers pipeline.

    Searches attributes, lists, dicts and objects; for a module, its children. Names are paths
    joined by ``_`` (``models_dit``). Modules inside other modules are omitted.
    """
    modules: dict[str, nn.Module] = {}
    visited = {id(program)}

    def search(path: str, attributes: Iterable[tuple[Any, Any]]) -> None:
        for key, value in attributes:
            name = f"{path}_{key}" if path else str(key)
            if id(value) in visited or type(value) in PLAIN:
                continue
            visited.add(id(value))
            if isinstance(value, nn.Module):
                if _has_tensors(value):
                    modules[name] = value
            elif isinstance(value, (list, tuple, deque)):
                search(name, enumerate(value))
            elif isinstance(value, dict):
                search(name, value.items())
            elif may_hold(value):
                search(name, vars(value).items())

    search(
        "", program.named_children() if isinstance(program, nn.Module) else vars(program).items()
    )
    inner = {id(part) for module in modules.values() for part in modules_below(module)[1:]}
    return {name: module for name, module in modules.items() if id(module) not in inner}


def settings_of(program: Any, owned_modules: Iterable[Owned]) -> State:
    """Return settings that a dry run of ``program`` may depend on and a call may change.

    These are the plain private attributes of its modules (``_chunk_size``). For an object that is
    not a diffusers pipeline, also the plain values and tensor shapes in its public attributes.
    `state_of` returns everything else that a dry run depends on.
    """
    content: list[Any] = [
        (name, number, key, value)
        for number, (name, _, attributes) in enumerate(owned_modules)
        for key, value in attributes.items()
        if key[0] == "_" and type(value) in PLAIN
    ]
    if not is_pipeline(program):
        content += [
            (key, signature_of(value, texts=True))
            for key, value in sorted(vars(program).items())
            if key[0] != "_"
        ]
    return content


def kept_signatures(pipe: Any) -> tuple[Any, ...]:
    """Return hashable signatures of the tensors in attributes of ``pipe`` and its inner pipelines.

    A call may leave such tensors for later calls, which then compute less (Marigold stores the
    embedding of an empty text) or another size (LEdits++ edits the last inverted picture).
    """
    return tuple(
        (path, key, signature_of(value))
        for path, owner in pipelines_in(pipe).items()
        for key, value in vars(owner).items()
        if type(value) not in PLAIN and _is_or_lists_tensors(value)
    )


def _is_or_lists_tensors(value: Any) -> bool:
    items = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple, deque))
        else ()
    )
    return isinstance(value, torch.Tensor) or any(map(_is_or_lists_tensors, items))


def _modules(attributes: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    for name, value in attributes.items():
        if isinstance(value, nn.Module):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from _modules({f"{name}_{number}": item for number, item in enumerate(value)})
        elif isinstance(value, dict) and not name.startswith("_"):
            yield from _modules({f"{name}_{key}": item for key, item in value.items()})


def _has_tensors(module: nn.Module) -> bool:
    tables = (table for child in module.modules() for table in (child._parameters, child._buffers))
    return any(tensor is not None for table in tables for tensor in table.values())


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for child in modules_below(module):
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if tensor is not None:
                yield tensor


def meta_module_of(
    pipe: Any, device: torch.device, components: Mapping[str, nn.Module]
) -> tuple[Any, dict[str, nn.Module]]:
    """Return a copy of ``pipe`` with its modules on meta, and the copies of its ``components``.

    The copy reports ``device`` as its device. Classes, configurations, processors and tied weights
    are kept; tokenizers are shared, schedulers copied. No weight is read. Raises InputError if
    something in the pipeline cannot be copied.
    """
    memo: dict[int, Any] = {}
    for _, module in _modules_of(pipe):
        normalize_quantized_layers(module)
        for tensor in (
            tensor for child in module.modules() for tensor, *_ in direct_tensors(child)
        ):
            if id(tensor) not in memo:
                is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
                twin = (
                    torch.empty_like(tensor, device="meta")
                    if is_plain
                    else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                )
                memo[id(tensor)] = (
                    nn.Parameter(twin, requires_grad=tensor.requires_grad)
                    if isinstance(tensor, nn.Parameter)
                    else twin
                )
        for tensor in _tensors(module):
            _copy_bnb_state(memo[id(tensor)], tensor, memo)
        # tensors computed from weights before each call, as in torch's weight_norm
        for child in module.modules():
            derived_tensors = (
                value
                for value in vars(child).values()
                if isinstance(value, torch.Tensor) and not value.is_leaf
            )
            memo |= {
                id(tensor): torch.empty_like(tensor, device="meta").detach()
                for tensor in derived_tensors
            }
    for owner in pipelines_in(pipe).values():
        for value in vars(owner).values():
            if (
                not isinstance(value, nn.Module)
                and type(value).__module__.split(".")[0] in SHARED_LIBRARIES
            ):
                memo[id(value)] = value
    compiled = [
        child for _, module in _modules_of(pipe) for child in module.modules() if is_compiled(child)
    ]
    memo |= {
        id(ctx): ctx for child in compiled if (ctx := vars(child).get("dynamo_ctx")) is not None
    }
    functions = {id(function): function for function in _functions_in(pipe, memo)}
    memo |= {key: _with_own_cells(function) for key, function in functions.items()}
    try:
        meta_module = copy.deepcopy(pipe, memo)
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{type(pipe).__name__} cannot be copied to the meta device for its dry run: {error}"
        ) from error
    for key, function in functions.items():
        _refer_to_copies(memo[key], function, memo)
    for child in compiled:
        run_as_written(memo[id(child)])
    for owner in pipelines_in(meta_module).values():
        owner.__class__ = subclass_on_device(own_class(owner), lambda: device)
        for bar_owner in _progress_bar_owners(owner):
            bar_owner.set_progress_bar_config(disable=True)
    twins = {
        name: {key: memo[id(part)] for key, part in _parts(name, module)}
        for name, module in components.items()
    }
    return meta_module, {name: _merged(parts, ()) for name, parts in twins.items()}


def _functions_in(pipe: Any, excluded_ids: Iterable[int]) -> Iterator[types.FunctionType]:
    """Yield the functions in attributes of ``pipe``, its modules and its other objects.

    They may refer to the pipeline: a callback, or a ``forward`` that a diffusers hook replaced.
    ``excluded_ids``: ids of objects not to search.
    """
    visited = set(excluded_ids)
    queue: list[Any] = [*pipelines_in(pipe).values(), *(module for _, module in _modules_of(pipe))]
    while queue:
        value = queue.pop()
        if type(value) in PLAIN or isinstance(value, torch.Tensor) or id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, types.FunctionType):
            yield value
            queue += [cell.cell_contents for cell in value.__closure__ or () if has_value(cell)]
        elif isinstance(value, functools.partial):
            queue += [value.func, *value.args, *value.keywords.values(), *vars(value).values()]
        elif isinstance(value, types.MethodType):
            queue.append(value.__self__)
        elif isinstance(value, (list, tuple, deque)):
            queue += value
        elif isinstance(value, dict):
            queue += value.values()
        elif isinstance(value, nn.Module) or may_hold(value):
            queue += vars(value).values()


def _with_own_cells(function: types.FunctionType) -> types.FunctionType:
    """Return a copy of ``function`` with its own globals dict and empty closure cells."""
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    twin = types.FunctionType(
        function.__code__, {**function.__globals__}, function.__name__, function.__defaults__, cells
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__dict__.update(function.__dict__)
    return twin


def _refer_to_copies(
    twin: types.FunctionType, function: types.FunctionType, memo: Mapping[int, Any]
) -> None:
    """Fill the globals and closure of ``twin`` with the values of ``function``, or their copies.
    ``memo``: copies by the id of the original, as in `copy.deepcopy`."""
    for cell, twin_cell in zip(function.__closure__ or (), twin.__closure__ or (), strict=True):
        if has_value(cell):
            twin_cell.cell_contents = memo.get(id(cell.cell_contents), cell.cell_contents)
    global_values = {
        name: function.__globals__[name]
        for name in function.__code__.co_names
        if name in function.__globals__
    }
    twin.__globals__.update(
        {name: memo.get(id(value), value) for name, value in global_values.items()}
    )


def _parts(name: str, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Return the modules of a component: the parts of a `MergedComponent`, else the module."""
    return module.named_children() if isinstance(module, MergedComponent) else [(name, module)]


def _progress_bar_owners(owner: Any) -> list[Any]:
    """Return the objects with progress bars: ``owner``, or all blocks of a modular pipeline."""
    if not is_modular(owner):
        return [owner] if is_pipeline(owner) else []
    return [
        block for block in blocks_in(owner._blocks) if hasattr(block, "set_progress_bar_config")
    ]


def _copy_bnb_state(twin: Any, tensor: Any, memo: dict[int, Any]) -> None:
    """Copy the attributes that bitsandbytes layers read from their weight."""
    if getattr(tensor, "quant_state", None) is not None:
        twin.quant_state, twin.bnb_quantized = copy.deepcopy(tensor.quant_state, memo), True
    if hasattr(tensor, "SCB"):
        twin.CB = twin.SCB = None


def subclass_on_device(
    kind: type[Any], reported_device: Callable[[], torch.device], **members: Any
) -> type[Any]:
    """Return a subclass of ``kind`` whose device is ``reported_device()``, not its parameters'.
    ``members``: more attributes of the class. Copies and pickles of an instance are of ``kind``."""
    device_property = property(
        lambda _: reported_device(), lambda owner, value: vars(owner).update(device=value)
    )
    class_attributes: dict[str, Any] = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "_graphrun_original_class": kind,
    }
    class_attributes["__reduce_ex__"] = lambda owner, protocol: reduced_as(
        kind, super(kind, owner).__reduce_ex__(protocol)
    )
    return type(
        kind.__name__,
        (kind,),
        {
            **class_attributes,
            "_execution_device": device_property,
            "device": device_property,
            **members,
        },
    )


def own_class(owner: Any) -> type[Any]:
    """Return the pipeline's original class, even if `subclass_on_device` replaced it."""
    return getattr(type(owner), "_graphrun_original_class", type(owner))


def graph_of(
    pipe: Any, modules: Mapping[str, nn.Module], dtype_variants: Iterable[DtypeVariant] = ()
) -> Graph:
    """Return the live pipeline as a graph without stages.

    The graph has the pipeline's class, and the class, configuration and dtype of each component.
    ``dtype_variants``: more dtypes in which calls use components; each becomes a component.
    """
    components = {name: _component(name, module) for name, module in modules.items()}
    for dtype_variant in dtype_variants:
        if dtype_variant.name not in components:
            dtype = _floating_dtype(dtype_variant.dtypes)
            components[dtype_variant.name] = replace(
                components[dtype_variant.component],
                name=dtype_variant.name,
                dtype=dtype,
                precision=(dtype,),
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
    dtype, kind = _floating_dtype(tensor.dtype for tensor in _tensors(module)), type(module)
    config = json.loads(
        json.dumps(_plain(getattr(module, "config", {})), default=str, sort_keys=True)
    )
    return Component(
        name, f"{kind.__module__}.{kind.__name__}", None, config, True, dtype, (dtype,)
    )


def _floating_dtype(dtypes: Iterable[torch.dtype]) -> str:
    """Return the name of the first floating-point dtype in ``dtypes``, else float32."""
    return str(
        next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)
    ).removeprefix("torch.")


def _plain(config: Any) -> dict[str, Any]:
    settings = config.to_dict() if hasattr(config, "to_dict") else config
    return dict(settings if isinstance(settings, Mapping) else getattr(settings, "__dict__", {}))


def packages_of(pipe: Any, modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the packages of the classes of ``pipe``, its modules and its attributes. A call of
    ``pipe`` runs their code."""
    kinds = {type(child) for module in modules.values() for child in module.modules()}
    for owner in pipelines_in(pipe).values():
        kinds |= {own_class(owner), *(type(value) for value in vars(owner).values())}
    return {kind.__module__.partition(".")[0] for kind in kinds} - {"builtins", "collections"}


def state_of(pipe: Any, owned_modules: Iterable[Owned]) -> State:
    """Return the pipeline state that a dry run depends on, besides the call's arguments.

    The state covers classes, plain settings, shapes and dtypes of tensors, hooks, LoRAs, schedulers
    and guiders. It changes when the VAE starts to tile, a LoRA is loaded, or the scheduler or
    guider is replaced.
    """
    content: list[Any] = []
    for name, child, attributes in owned_modules:
        content.append((name, type(child).__qualname__, child.training, *child._modules.keys()))
        content += [
            (key, value)
            for key, value in attributes.items()
            if key[0] != "_" and isinstance(value, (bool, int, float, str))
        ]
        for tensors in (child._parameters, child._buffers):
            content += [
                (key, t.shape, t.dtype, t.requires_grad)
                for key, t in tensors.items()
                if t is not None
            ]
        if vars(child).get("_compiled_call_impl") is not None:
            content.append("_compiled_call_impl")
        if not _STATEFUL.isdisjoint(attributes):
            content += [
                (key, repr(attributes[key])) for key in ADAPTER_ATTRIBUTES if key in attributes
            ]
            content += [
                (key, type(attributes[key]).__name__)
                for key in ("_hf_hook", "processor")
                if attributes.get(key) is not None
            ]
            # diffusers creates an empty registry in the first call: it must not change the state
            hooks = getattr(attributes.get(DIFFUSERS_HOOKS), "hooks", {})
            for hook_name, hook in hooks.items():
                content += [
                    (hook_name, key, signature_of(value))
                    for key, value in vars(hook).items()
                    if key[0] != "_"
                ]
    for path, owner in pipelines_in(pipe).items():
        for key, value in vars(owner).items():
            # schedulers, and guiders of modular pipelines
            if hasattr(value, "set_timesteps") or hasattr(value, "prepare_inputs"):
                settings = sorted(map(str, _plain(getattr(value, "config", {})).items()))
                content.append((path, key, type(value).__qualname__, settings))
    return content

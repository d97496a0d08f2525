"""Components of a live pipeline, and its meta copy: the same pipeline with all parameters and
buffers on the meta device.

Decides which modules count as components and how a pipeline is copied without its weights. Knows no
plans and no device memory.

    pipe                 text_encoder   transformer   vae       tokenizer   scheduler
    prior_pipe.prior ... component            yes            yes           yes       no          no
    yes (once, by its first name) in the meta copy     on meta        on meta       on meta   shared
    copied      on meta
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
from graphrun.graph.graph import Component, Graph
from graphrun.modules.blocks import held
from graphrun.modules.compiled import is_compiled, run_as_written
from graphrun.modules.dtype_variants import DtypeVariant
from graphrun.modules.interceptor import reduced_as
from graphrun.modules.memos import DIFFUSERS_HOOKS, Owned, has_value
from graphrun.modules.quantize import normalize_quantized_layers
from graphrun.modules.trees import PLAIN, may_hold, modules_below
from graphrun.ops.modular import blocks_in, is_modular_class

# Objects of these packages that are not modules (tokenizers, processors) keep no state of a call:
# the meta copy shares them.
SHARED_LIBRARIES = ("transformers", "tokenizers", "sentencepiece")

# Attributes of peft's layers that say which LoRAs a forward computes: one that is fused takes no
# activation.
ADAPTER_ATTRIBUTES = ("_active_adapter", "_disable_adapters", "merged_adapters")
_STATEFUL = frozenset({*ADAPTER_ATTRIBUTES, "_hf_hook", "processor", DIFFUSERS_HOOKS})

State = list[Any]
"""Plain values, shapes and texts. Compared as they are, since a digest of them would take most of
the time of a short call."""


def is_modular(pipe: Any) -> bool:
    """Whether ``pipe`` is a modular pipeline of diffusers. Those do not derive from
    ``DiffusionPipeline``."""
    return is_modular_class(type(pipe))


def is_pipeline(value: Any) -> bool:
    """Whether ``value`` is a pipeline of diffusers, modular or not."""
    from diffusers import DiffusionPipeline

    return isinstance(value, DiffusionPipeline) or is_modular(value)


def pipelines_in(pipe: Any) -> dict[str, Any]:
    """``pipe`` and the pipelines inside it, by attribute path (``""`` for ``pipe`` itself)."""
    found: dict[str, Any] = {}
    queue: list[tuple[str, Any]] = [("", pipe)]
    while queue:
        path, owner = queue.pop(0)
        if any(owner is other for other in found.values()):
            continue
        found[path] = owner
        inner = ((name, value) for name, value in vars(owner).items() if is_pipeline(value))
        queue += [(f"{path}.{name}" if path else name, value) for name, value in inner]
    return found


def components_of(pipe: Any, named: Mapping[str, nn.Module] | None = None) -> dict[str, nn.Module]:
    """Every module with weights that ``pipe`` or a pipeline inside it holds, by attribute name;
    ``named`` where those are given. Each module appears once.

    Submodules of another component are left out. Raises InputError when there is no component.
    """
    if named is not None:
        return dict(named)
    found: dict[str, nn.Module] = {}
    for name, module in _modules_of(pipe):
        if all(module is not other for other in found.values()) and _has_tensors(module):
            found[name if name not in found else f"{name}_{len(found)}"] = module
    inner = {id(part) for module in found.values() for part in modules_below(module)[1:]}
    found = {name: module for name, module in found.items() if id(module) not in inner}
    if not found:
        raise InputError(
            f"{type(pipe).__name__} holds no module with weights: pass a pipeline with its components"
        )
    return found


class MergedComponent(nn.Module):
    """One module for components that share weights, so that the shared weights are placed once."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.config = {name: _plain(getattr(part, "config", {})) for name, part in parts.items()}


def merge_shared(
    modules: Mapping[str, nn.Module], previous: Iterable[nn.Module] = ()
) -> dict[str, nn.Module]:
    """``modules`` with those that share weights merged into one component ``a_and_b`` (Z-Image's
    ControlNet runs layers of the transformer).

    ``previous``: earlier results; a `MergedComponent` among them with the same parts is returned
    again.
    """
    groups: list[tuple[set[int], dict[str, nn.Module]]] = []
    for name, module in modules.items():
        held, parts = {id(tensor) for tensor in _tensors(module)}, {name: module}
        for group in [group for group in groups if group[0] & held]:
            groups.remove(group)
            held, parts = held | group[0], {**group[1], **parts}
        groups.append((held, parts))
    return {"_and_".join(parts): _merged(parts, previous) for _, parts in groups}


def _merged(parts: dict[str, nn.Module], previous: Iterable[nn.Module]) -> nn.Module:
    if len(parts) == 1:
        return next(iter(parts.values()))
    # modules compare by identity
    same = (old for old in previous if isinstance(old, MergedComponent) and old._modules == parts)
    return next(same, None) or MergedComponent(parts)


def _modules_of(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of every module that ``pipe`` or a pipeline inside it holds."""
    if not is_pipeline(pipe):
        return iter(modules_in(pipe).items())
    return (held for owner in pipelines_in(pipe).values() for held in _modules(vars(owner)))


def modules_in(program: Any) -> dict[str, nn.Module]:
    """The modules with weights that ``program``, no pipeline of diffusers, holds: in attributes,
    lists, dicts and objects of its own, by their path with ``_`` (``models_dit``). Modules inside
    others are left out. Of a module they are its children."""
    found: dict[str, nn.Module] = {}
    seen = {id(program)}

    def look(path: str, attributes: Iterable[tuple[Any, Any]]) -> None:
        for key, value in attributes:
            name = f"{path}_{key}" if path else str(key)
            if id(value) in seen or type(value) in PLAIN:
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module):
                if _has_tensors(value):
                    found[name] = value
            elif isinstance(value, (list, tuple, deque)):
                look(name, enumerate(value))
            elif isinstance(value, dict):
                look(name, value.items())
            elif may_hold(value):
                look(name, vars(value).items())

    look("", program.named_children() if isinstance(program, nn.Module) else vars(program).items())
    inner = {id(part) for module in found.values() for part in modules_below(module)[1:]}
    return {name: module for name, module in found.items() if id(module) not in inner}


def settings_of(program: Any, found: Iterable[Owned]) -> State:
    """What a dry run of ``program`` may depend on beside `state_of`, and a call may change too:
    plain private attributes of its modules, ``found`` (``_chunk_size``); of a program that is no
    pipeline of diffusers also plain values and shapes of tensors in its public attributes."""
    content: list[Any] = [
        (name, number, key, value)
        for number, (name, _, own) in enumerate(found)
        for key, value in own.items()
        if key[0] == "_" and type(value) in PLAIN
    ]
    if not is_pipeline(program):
        content += [
            (key, signature_of(value, texts=True))
            for key, value in sorted(vars(program).items())
            if key[0] != "_"
        ]
    return content


def kept_by(pipe: Any) -> tuple[Any, ...]:
    """The signatures of the tensors in attributes of ``pipe`` and of pipelines inside it, also in
    lists and dicts.

    They are what calls keep for further ones, which then compute less (Marigold keeps the embedding
    of an empty text) or another size (LEdits++ edits the picture that it inverted last).
    Hashable."""
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
    """A copy of ``pipe`` with the parameters and buffers of its modules on meta, which computes on
    ``device``; and in it the ``components`` of ``pipe``.

    Classes, configurations, processors and tied weights are those of the live pipeline; tokenizers
    are shared, schedulers copied. No weight is read. Raises InputError when something in the
    pipeline cannot be copied.
    """
    memo: dict[int, Any] = {}
    for _, module in _modules_of(pipe):
        normalize_quantized_layers(module)
        for tensor in (tensor for child in module.modules() for tensor, *_ in held(child)):
            if id(tensor) not in memo:
                plain = type(tensor) in (torch.Tensor, nn.Parameter)
                twin = (
                    torch.empty_like(tensor, device="meta")
                    if plain
                    else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                )
                memo[id(tensor)] = (
                    nn.Parameter(twin, requires_grad=False)
                    if isinstance(tensor, nn.Parameter)
                    else twin
                )
        for tensor in _tensors(module):
            _copy_bnb_state(memo[id(tensor)], tensor, memo)
        for child in (
            module.modules()
        ):  # tensors that are computed from weights before each call, as by torch's weight_norm
            made = (
                value
                for value in vars(child).values()
                if isinstance(value, torch.Tensor) and not value.is_leaf
            )
            memo |= {
                id(tensor): torch.empty_like(tensor, device="meta").detach() for tensor in made
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


def _functions_in(pipe: Any, known: Iterable[int]) -> Iterator[types.FunctionType]:
    """The functions in attributes of ``pipe``, of its modules and of other objects in it, which may
    refer to the pipeline: a ``forward`` that diffusers' hooks replace, a callback. ``known``: ids
    of objects that are not searched."""
    seen = set(known)
    queue: list[Any] = [*pipelines_in(pipe).values(), *(module for _, module in _modules_of(pipe))]
    while queue:
        value = queue.pop()
        if type(value) in PLAIN or isinstance(value, torch.Tensor) or id(value) in seen:
            continue
        seen.add(id(value))
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
    """A copy of ``function`` with globals of its own, and an empty cell for each variable of its
    closure."""
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
    """Makes ``twin``, of `_with_own_cells`, refer to what ``function`` does; to its copy where
    ``memo`` has one."""
    for cell, own in zip(function.__closure__ or (), twin.__closure__ or (), strict=True):
        if has_value(cell):
            own.cell_contents = memo.get(id(cell.cell_contents), cell.cell_contents)
    read = {
        name: function.__globals__[name]
        for name in function.__code__.co_names
        if name in function.__globals__
    }
    twin.__globals__.update({name: memo.get(id(value), value) for name, value in read.items()})


def _parts(name: str, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """The modules of a component: the parts of a `MergedComponent`, else itself."""
    return module.named_children() if isinstance(module, MergedComponent) else [(name, module)]


def _progress_bar_owners(owner: Any) -> list[Any]:
    """The objects that show progress bars: ``owner``, or the blocks of a modular pipeline, at any
    depth."""
    if not is_modular(owner):
        return [owner] if is_pipeline(owner) else []
    return [
        block for block in blocks_in(owner._blocks) if hasattr(block, "set_progress_bar_config")
    ]


def _copy_bnb_state(twin: Any, tensor: Any, memo: dict[int, Any]) -> None:
    """Copies the attributes that bitsandbytes' layers read from their weight."""
    if getattr(tensor, "quant_state", None) is not None:
        twin.quant_state, twin.bnb_quantized = copy.deepcopy(tensor.quant_state, memo), True
    if hasattr(tensor, "SCB"):
        twin.CB = twin.SCB = None


def subclass_on_device(
    kind: type[Any], reported_device: Callable[[], torch.device], **members: Any
) -> type[Any]:
    """A subclass of ``kind`` that reports the device ``reported_device()``, wherever its modules'
    parameters are.

    ``members`` are further attributes of the class. Copies and pickles of an instance are of
    ``kind`` itself.
    """
    here = property(
        lambda _: reported_device(), lambda owner, value: vars(owner).update(device=value)
    )
    own: dict[str, Any] = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "_graphrun_original_class": kind,
    }
    own["__reduce_ex__"] = lambda owner, protocol: reduced_as(
        kind, super(kind, owner).__reduce_ex__(protocol)
    )
    return type(
        kind.__name__, (kind,), {**own, "_execution_device": here, "device": here, **members}
    )


def own_class(owner: Any) -> type[Any]:
    """The pipeline's own class, also where `subclass_on_device` has replaced it."""
    return getattr(type(owner), "_graphrun_original_class", type(owner))


def graph_of(
    pipe: Any, modules: Mapping[str, nn.Module], dtype_variants: Iterable[DtypeVariant] = ()
) -> Graph:
    """The live pipeline as a graph without stages: its class, and its components with class,
    configuration and dtype.

    ``dtype_variants``: further dtypes in which components are entered, each listed as a component
    of its own.
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
    """The name of the first floating-point one of ``dtypes``, else float32."""
    return str(
        next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)
    ).removeprefix("torch.")


def _plain(config: Any) -> dict[str, Any]:
    found = config.to_dict() if hasattr(config, "to_dict") else config
    return dict(found if isinstance(found, Mapping) else getattr(found, "__dict__", {}))


def packages_of(pipe: Any, modules: Mapping[str, nn.Module]) -> set[str]:
    """The packages whose code a call of ``pipe`` runs: those of the classes of its modules, of
    itself and of what it holds."""
    kinds = {type(child) for module in modules.values() for child in module.modules()}
    for owner in pipelines_in(pipe).values():
        kinds |= {own_class(owner), *(type(value) for value in vars(owner).values())}
    return {kind.__module__.partition(".")[0] for kind in kinds} - {"builtins", "collections"}


def state_of(pipe: Any, found: Iterable[Owned]) -> State:
    """The state of the pipeline, with the modules ``found``, that a dry run depends on beside the
    call's arguments.

    That is: classes, plain settings, shapes and dtypes of tensors, hooks, LoRAs, schedulers and
    guiders. A VAE that now tiles, another scheduler or guider, or a LoRA each give another state.
    """
    content: list[Any] = []
    for name, child, own in found:
        content.append((name, type(child).__qualname__, child.training, *child._modules.keys()))
        content += [
            (key, value)
            for key, value in own.items()
            if key[0] != "_" and isinstance(value, (bool, int, float, str))
        ]
        for tensors in (child._parameters, child._buffers):
            content += [(key, t.shape, t.dtype) for key, t in tensors.items() if t is not None]
        if vars(child).get("_compiled_call_impl") is not None:
            content.append("_compiled_call_impl")
        if not _STATEFUL.isdisjoint(own):
            content += [(key, repr(own[key])) for key in ADAPTER_ATTRIBUTES if key in own]
            content += [
                (key, type(own[key]).__name__)
                for key in ("_hf_hook", "processor")
                if own.get(key) is not None
            ]
            # the first call makes an empty registry
            hooks = getattr(own.get(DIFFUSERS_HOOKS), "hooks", {})
            for hook, of in hooks.items():
                content += [
                    (hook, key, signature_of(value))
                    for key, value in vars(of).items()
                    if key[0] != "_"
                ]
    for path, owner in pipelines_in(pipe).items():
        for key, value in vars(owner).items():
            if hasattr(value, "set_timesteps") or hasattr(
                value, "prepare_inputs"
            ):  # schedulers, and guiders of modular pipelines
                settings = sorted(map(str, _plain(getattr(value, "config", {})).items()))
                content.append((path, key, type(value).__qualname__, settings))
    return content

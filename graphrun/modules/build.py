"""Build the components and parts of a graph: on meta, with random weights, or from a source.

On the CPU and on meta only; independent of plans and pipelines.

    meta_module   class + config                       on meta, no weights: for sizes
    build         class + config + source (or seed)    on the CPU, real weights
    draft         class + config + precision           parameters on meta, and a writer for the
                                                       bytes of each block

All three give the same tensors, shapes and dtypes (except for the precision), frozen, in eval mode.
"""

from __future__ import annotations

import copy
import inspect
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from graphrun.errors import GraphError, GraphrunError
from graphrun.graph.document import read_json
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Component, Part
from graphrun.graph.precisions import ONLY_IN_FILES, QUANTIZED, is_gguf
from graphrun.graph.values import did_you_mean
from graphrun.limits import require
from graphrun.modules.adapters import adapter_tensors, add_ip_adapters
from graphrun.modules.blocks import lay_out
from graphrun.modules.classes import refusal, resolve_class
from graphrun.modules.contents import (
    Content,
    as_stored,
    content_of,
    missing_tensors,
    read_as,
    refuse_differing,
    refuse_missing,
    replace_layers,
)
from graphrun.modules.lora import deltas_of
from graphrun.modules.processors import is_processor, processor_of_texts
from graphrun.modules.quantize import quantizable_layers
from graphrun.modules.source_files import (
    OF_COMPONENT,
    OF_PART,
    config_file,
    find_folder,
    local_folder,
)
from graphrun.modules.sources import FileSource, LoadedSource, RandomSource, Source, Writer
from graphrun.modules.stored import local_weights
from graphrun.modules.texts import with_length_limit
from graphrun.modules.trees import weights_below
from graphrun.reading import panics_as_errors

# Functions that initialize parameters, by name, because transformers replaces the functions of
# `torch.nn.init`. Their Python reference implementations on meta take a third of the time to build
# a meta module.
_INIT_FUNCTIONS = frozenset({"kaiming_uniform_", "normal_", "uniform_"})


class _SkipRandomInit(TorchFunctionMode):
    """Skips the random initialization of tensors on meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            getattr(func, "__name__", "") in _INIT_FUNCTIONS
            and (tensor := args[0] if args else kwargs["tensor"]).is_meta
        ):
            return tensor
        return func(*args, **(kwargs or {}))


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable the progress bars of transformers and diffusers."""
    import diffusers.utils.logging
    import transformers.utils.logging

    libraries = [
        library
        for library in (transformers.utils.logging, diffusers.utils.logging)
        if library.is_progress_bar_enabled()
    ]
    for library in libraries:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in libraries:
            library.enable_progress_bar()


@contextmanager
def no_code_prompt() -> Iterator[None]:
    """Make transformers raise ValueError instead of asking whether to run a checkpoint's code.

    Sets the timeout of `resolve_trust_remote_code` to 0. ``trust_remote_code=False`` is not enough:
    a nested configuration (LLaVA's ``text_config``) may name code too, and that argument does not
    reach it.
    """
    from transformers import dynamic_module_utils

    timeout = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = timeout


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype to ``dtype``."""
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous_dtype)


@contextmanager
def on_host() -> Iterator[None]:
    """Create tensors on the CPU by default, even if the caller set another default device."""
    if torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Construct parameters on meta, and buffers on the CPU. Buffers that are not saved with the
    weights are computed there."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False), _SkipRandomInit():
        yield


@contextmanager
def on_meta() -> Iterator[None]:
    """Construct every tensor on meta."""
    with torch.device("meta"), _SkipRandomInit():
        yield


__all__ = ["build", "build_part", "draft", "meta_module", "resolve_class"]

# keys of a configuration that a library saved; it also has keys of other versions and of the
# library itself, so its keys are not checked. A configuration written by hand has none of these.
_SAVED_KEYS = frozenset(
    {"_class_name", "_diffusers_version", "transformers_version", "model_type", "architectures"}
)
_IMAGES = "image_processor"  # settings of a processor's pictures, next to its tokenizer's
_TOKENIZER_KEYS = frozenset(
    {
        "model_max_length",
        "chat_template",
        "extra_special_tokens",
        "padding_side",
        "truncation_side",
        "model_input_names",
        "clean_up_tokenization_spaces",
    }
    | {f"{name}_token" for name in ("bos", "eos", "pad", "unk", "cls", "sep", "mask")}
)


@on_host()
def meta_module(component: Component, trust: Sequence[str]) -> nn.Module:
    """Return ``component`` on meta: its class, config, shapes and dtypes, without weights. Frozen,
    in eval mode. Raises GraphError at the component's line for an invalid class or config."""
    kind = resolve_class(component.class_path, trust, component.file_line, "component")
    with on_meta():
        module = add_ip_adapters(component, _construct(kind, component))
    if not all(tensor.is_meta for tensor in weights_below(module)):
        module.to("meta")  # `torch.Tensor([alpha])` ignores the default device, as in SVD's mixers
    return _as_loaded(module, component)


@contextmanager
def meta_modules(graph: Graph) -> Iterator[dict[str, nn.Module]]:
    """Provide the `meta_module` of every component of ``graph``, to read sizes from, never to call.

    Reuses modules that a dry run or an earlier context left behind. Nothing else uses them until
    the context ends.
    """
    modules: dict[str, nn.Module] = {}
    for name, component in graph.components.items():
        fingerprint, module = graph.spare.pop(name, (None, None))
        modules[name] = (
            module
            if fingerprint == _fingerprint(component)
            else meta_module(component, graph.trust)
        )
    yield modules
    leave_behind(graph, modules)


def leave_behind(graph: Graph, modules: Mapping[str, nn.Module]) -> None:
    """Keep the meta modules ``modules`` for the next `meta_modules` of ``graph``."""
    graph.spare.update(
        {name: (_fingerprint(graph.components[name]), module) for name, module in modules.items()}
    )


def _fingerprint(component: Component) -> tuple[Any, ...]:
    """Return everything that the `meta_module` of ``component`` depends on."""
    return (
        component.class_path,
        _config_of(component),
        component.dtype,
        component.keep_fp32,
        component.ip_adapters,
    )


@on_host()
def held_meta_module(
    component: Component, trust: Sequence[str], precision: str
) -> tuple[nn.Module, Content]:
    """Return the `meta_module` of ``component`` in ``precision``, and its files' content.

    The tensors have exactly the shapes and dtypes that `draft` returns. Without local files the
    content is empty. Raises GraphError for files that are broken or belong to another model, and
    for a single file in which a tensor is missing.
    """
    module, place = meta_module(component, trust), local_weights(component, precision)
    content = (
        content_of(component, module, place, precision)
        if place is not None
        else Content(Path(), {})
    )
    # tensors in a folder may have other names, which only the library's loader maps
    if place is not None and place.is_file():
        adapters = adapter_tensors(component, module, meta=True)
        refuse_missing(content, module.state_dict().keys() - adapters.keys(), component)
    replace_layers(module, precision, getattr(torch, component.dtype), content)
    return module, content


@on_host()
def build(component: Component, graph: Graph) -> nn.Module:
    """Return ``component`` on the CPU with its weights and its LoRAs fused. Weights come from its
    source, or are random and depend only on its name and seed. Values and errors as in `draft`."""
    module, writer = draft(component, graph, component.dtype)
    for entry in lay_out(module, ())[""].entries:
        tensor = torch.empty_like(entry.tensor, device="cpu")
        writer.read_into(entry.names[0], tensor)
        value = (
            nn.Parameter(tensor, entry.tensor.requires_grad)
            if isinstance(entry.tensor, nn.Parameter)
            else tensor
        )
        for location in entry.locations:
            location.assign(value)
    writer.close()
    return module


@on_host()
def draft(component: Component, graph: Graph, precision: str) -> tuple[nn.Module, Writer]:
    """Return ``component`` in ``precision`` without values, and the `Writer` of its blocks.

    Parameters are on meta, buffers on the CPU. A precision that is a dtype replaces the component's
    dtype; any other replaces its linear layers. The writer reads or generates weights when called,
    so no checkpoint is ever in memory whole. One exception: if the files of a folder name tensors
    differently than the module, the library's own loader reads them all, and the module stays in
    memory while blocks are written. Raises GraphError at the component's line for a missing folder
    or tensor, a corrupt file, or a source whose shapes differ from the config's.
    """
    if precision not in QUANTIZED:
        component = replace(component, dtype=precision)
    kind = resolve_class(component.class_path, graph.trust, component.file_line, "component")
    with empty_parameters():
        module = add_ip_adapters(component, _construct(kind, component))
    if hasattr(module, "tie_weights"):
        module.tie_weights()
    module = _as_loaded(module, component)
    adapters = adapter_tensors(component, module)
    source, content = _source_in(precision, component, kind, module, adapters)
    if component.loras and (is_gguf(precision) or precision == "fp8"):
        raise refusal(
            component,
            f"a LoRA cannot be fused into weights in {precision}: take another precision, or "
            "leave loras: out",
        )
    deltas = deltas_of(component, module)
    # without a source, all buffers have the values that their code computed
    source_names = set() if component.source_in(precision) is None else module.state_dict().keys()
    buffers = {
        name: tensor
        for name, tensor in module.named_buffers(remove_duplicate=False)
        if name not in source_names
    }
    shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
    if precision in QUANTIZED:
        dtype = getattr(torch, component.dtype)
        weights = {
            f"{path}.weight": layer.weight
            for path, layer in quantizable_layers(module, dtype).items()
        }
        if precision not in as_stored(content, weights):
            if precision in ONLY_IN_FILES:
                raise refusal(
                    component,
                    f"{precision} is read from files that torchao quantized, and its source has "
                    "none: take another precision",
                )
            shapes = {name: (weight.shape, weight.dtype) for name, weight in weights.items()}
        replace_layers(module, precision, dtype, content)
    return module, Writer(source, precision, shapes, buffers, adapters, deltas)


def _source_in(
    precision: str,
    component: Component,
    kind: type[Any],
    module: nn.Module,
    adapters: Mapping[str, torch.Tensor],
) -> tuple[Source, Content]:
    """Return the source of ``module``'s weights in ``precision``, and the content of its files.

    ``module``: ``component``, of class ``kind``, with its original layers. ``adapters``: its
    tensors that come from IP-Adapters. The content is empty for random weights, and for a folder
    that only the library's own loader can read.
    """
    location = component.source_in(precision)
    if location is None:
        if is_gguf(precision):
            raise refusal(
                component, f"{precision} has no random weights: add gguf: with the path of a file"
            )
        return RandomSource(module, f"{component.seed}/{component.name}"), Content(Path(), {})
    variant = component.variant if component.checkpoint(precision) is None else ""
    place = find_folder(location, OF_COMPONENT, component.file_line, variant)
    content = content_of(component, module, place, precision)
    state = module.state_dict(keep_vars=True)
    required_names = state.keys() - adapters.keys()
    if (
        not required_names <= content.pieces.keys()
        and not place.is_file()
        and hasattr(kind, "from_pretrained")
    ):
        tensors = dict(module.named_parameters(remove_duplicate=False)) | state
        shapes = {name: tensor.shape for name, tensor in tensors.items() if name not in adapters}
        load = partial(_load_folder, kind, component, place, shapes)
        return LoadedSource(load), Content(place, {})
    refuse_missing(content, required_names, component)
    if component.loras and content.packed and precision in as_stored(content, ()):
        raise refusal(
            component,
            f"a LoRA cannot be fused into weights that are in {precision} in {place}: take a "
            "source in 16 bits, or leave loras: out",
        )
    return FileSource(read_as(content, module, precision, getattr(torch, component.dtype))), content


@on_host()
def build_part(part: Part, graph: Graph, *, planning: bool = False) -> Any:
    """Return the tokenizer, scheduler or processor of ``part``.

    A tokenizer, or a processor for texts and images, comes from its source; without one, or if
    ``planning``, from its ``file``: a stand-in is enough to plan, because texts are padded. When
    planning, unpadded texts get the maximum length, because a plan must be valid for every prompt.
    Any other part comes from its config, or from its source if it has none. Raises GraphError at
    the part's line.
    """
    kind, label, length_source = (
        resolve_class(part.class_path, graph.trust, part.file_line, "part"),
        f"parts.{part.name}",
        part.file_line,
    )
    file = part.file or Path(length_source)
    with _graph_errors(label, part.class_path, part.file_line, part.source):
        if part.file is not None and (planning or part.source is None):
            instance = _tokenizer(part, kind, part.file)
        elif part.has_config and part.file is None:
            if hasattr(kind, "from_config") and not _SAVED_KEYS & part.config.keys():
                _check_keys(part.config, _parameters_of(kind), label, part.file_line)
            if hasattr(kind, "from_config"):
                _refuse_large(part.config, label, part.file_line)
            instance = (
                kind.from_config(part.config)
                if hasattr(kind, "from_config")
                else kind(**part.config)
            )
        elif part.source is None or not hasattr(kind, "from_pretrained"):
            raise GraphError(
                f"{label}: {part.class_path} needs a config or a source", part.file_line
            )
        else:
            local = local_folder(part.source) if planning else None
            folder = local or find_folder(part.source, OF_PART, part.file_line)
            with _graph_errors(
                label, f"{part.class_path} from {folder}", part.file_line, part.source
            ):
                if hasattr(kind, "load_config"):
                    _refuse_large(
                        kind.load_config(folder, local_files_only=True), label, part.file_line
                    )
                # diffusers' schedulers run no remote code and do not take the argument
                transformers_class = any(
                    base.__module__.startswith("transformers.") for base in kind.__mro__
                )
                instance = kind.from_pretrained(
                    folder, local_files_only=True, **(_NO_REMOTE_CODE if transformers_class else {})
                )
            file, length_source = folder, f"{folder}/tokenizer_config.json"
        return with_length_limit(
            instance, label, length_source, part.file_line, file, longest=planning
        )


def _refuse_large(config: Mapping[str, Any], label: str, file_line: str) -> None:
    """Raise GraphError for an integer in a scheduler's ``config`` that would exhaust memory."""
    for key, number in config.items():
        if isinstance(number, int):
            require(
                "timesteps", number, f"{label}.config: {key} is {number:,}", file_line, GraphError
            )


def _tokenizer(part: Part, kind: type[Any], file: Path) -> Any:
    """Return a tokenizer from ``file``, in a processor if ``kind`` is one."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    label, config = f"parts.{part.name}", dict(part.config)
    images = config.pop(_IMAGES, None) if is_processor(kind) else None
    _check_keys(config, _TOKENIZER_KEYS, label, part.file_line)
    with _graph_errors(label, str(file), part.file_line):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_file(str(file)), **config
        )
        return (
            processor_of_texts(kind, tokenizer, images or {}) if is_processor(kind) else tokenizer
        )


def _construct(kind: type[Any], component: Component) -> Any:
    """Return the module in the component's dtype, as `from_pretrained` constructs it."""
    label, dtype = f"components.{component.name}", getattr(torch, component.dtype)
    config = _config_of(component)
    if not _SAVED_KEYS & config.keys():
        _check_keys(config, _parameters_of(kind), label, component.file_line)
    with (
        _graph_errors(label, component.class_path, component.file_line, component.source),
        default_dtype(dtype),
    ):
        if hasattr(kind, "load_config"):  # diffusers
            return kind.from_config(config)
        if getattr(kind, "config_class", None) is not None:  # transformers
            return kind(kind.config_class(**{**config, "dtype": component.dtype}))
        return kind(**config)


def _config_of(component: Component) -> dict[str, Any]:
    """Return a copy of the configuration of ``component``: its own, or its source's."""
    if component.has_config:
        return copy.deepcopy(component.config)
    path = config_file(component.source)
    if path is None:
        path = (
            find_folder(component.source or "", ("config.json",), component.file_line)
            / "config.json"
        )
    return read_json(path, infinite=True)


def _load_folder(
    kind: type[Any], component: Component, folder: Path, expected_shapes: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    """Return the tensors in ``folder`` by name, as the library's own loader reads them. Raises
    GraphError if the shapes differ from ``expected_shapes``, which plans are computed from."""
    label, dtype = f"components.{component.name}", getattr(torch, component.dtype)
    options = {
        "use_safetensors": True,
        "local_files_only": True,
        "output_loading_info": True,
        "variant": component.variant or None,
    }
    options |= (
        {"torch_dtype": dtype}
        if hasattr(kind, "load_config")
        else {"dtype": dtype, **_NO_REMOTE_CODE}
    )
    with (
        _graph_errors(label, component.class_path, component.file_line, component.source),
        no_progress_bars(),
    ):
        module, report = kind.from_pretrained(folder, **options)
    if absent_names := sorted(report["missing_keys"]):
        raise missing_tensors(component, folder, absent_names)
    named_tensors = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    tensors = {name: tensor.detach() for name, tensor in named_tensors}
    shapes = {
        name: list(tensors[name].shape) if name in tensors else None for name in expected_shapes
    }
    refuse_differing(
        folder,
        [
            (n, f"{shapes[n]}", list(shape))
            for n, shape in expected_shapes.items()
            if shapes[n] != list(shape)
        ],
        component,
    )
    return tensors


_NO_REMOTE_CODE = {"trust_remote_code": False}  # by default transformers asks on stdin


def _as_loaded(module: Any, component: Component) -> nn.Module:
    """Put ``module`` into the state in which `from_pretrained` returns it: eval mode, and dtypes.
    Without ``component.keep_fp32``, all tensors have its dtype, as after `nn.Module.to`.

    Parameters still require gradients, as there. `torch.matmul` computes in another order if a
    weight does not (`should_fold` in ATen/native/LinearAlgebra.cpp), and outputs would differ.
    """
    component_dtype = getattr(torch, component.dtype)
    result: nn.Module = module.eval()
    if not component.keep_fp32:
        return result.to(component_dtype)
    for name, tensor in module.state_dict(keep_vars=True).items():
        dtype = _dtype_of(module, name, tensor.dtype, component_dtype)
        if tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)
    return result


def _dtype_of(
    module: Any, name: str, constructor_dtype: torch.dtype, dtype: torch.dtype
) -> torch.dtype:
    """Return the dtype of the tensor ``name`` after `from_pretrained` in ``dtype``.

    diffusers casts everything except the modules it keeps in fp32, matched by whole name components
    (`load_model_dict_into_meta`). transformers leaves the constructor's dtypes, and keeps T5's
    ``wo`` in fp32 in fp16 only, matched anywhere in the name (`_get_dtype_plan`).
    """
    if not constructor_dtype.is_floating_point or dtype == torch.float32:
        return constructor_dtype
    fp32_modules = getattr(module, "_keep_in_fp32_modules", None) or ()
    if hasattr(module, "load_config"):  # diffusers
        return torch.float32 if any(part in name.split(".") for part in fp32_modules) else dtype
    if dtype != torch.float16:
        fp32_modules = ()
    fp32_modules = [*fp32_modules, *(getattr(module, "_keep_in_fp32_modules_strict", None) or ())]
    return (
        torch.float32
        if any(re.search(pattern.replace("*", ".*"), name) for pattern in fp32_modules)
        else constructor_dtype
    )


def _parameters_of(kind: type[Any]) -> frozenset[str]:
    config_class = getattr(kind, "config_class", None)
    if config_class is None:
        # diffusers saves the settings of all parents, and `from_config` sets them
        kinds: tuple[Any, ...] = kind.__mro__ if hasattr(kind, "load_config") else (kind,)
        return frozenset(
            key for base in kinds for key in inspect.signature(base.__init__).parameters
        ) - {"self", "args", "kwargs"}
    field_names = {
        key for base in config_class.__mro__ for key in getattr(base, "__annotations__", {})
    }
    return frozenset(field_names | set(config_class.attribute_map))


def _check_keys(
    config: dict[str, Any], valid_keys: frozenset[str], label: str, file_line: str
) -> None:
    for key in config:
        if key not in valid_keys:
            raise GraphError(
                f"{label}.config: unknown key {key!r}{did_you_mean(key, valid_keys)}", file_line
            )


@contextmanager
def _bounded_modules(label: str, file_line: str) -> Iterator[None]:
    """Stop constructing a module beyond the limit of modules: a config may ask for 10**7 layers."""
    module_count, thread = 0, threading.get_ident()

    def count(*_: object) -> None:
        nonlocal module_count
        if threading.get_ident() == thread:
            module_count += 1
            require(
                "modules",
                module_count,
                f"{label} has {module_count:,} modules or more",
                file_line,
                GraphError,
            )

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _graph_errors(
    label: str, class_path: str, file_line: str, source: str | None = None
) -> Iterator[None]:
    """Turn exceptions of a library's constructor or loader into a GraphError at ``file_line``."""
    try:
        with (
            no_code_prompt(),
            _bounded_modules(f"{label}: {class_path}", file_line),
            panics_as_errors(),
        ):
            yield
    except GraphrunError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if isinstance(error, ValueError) and "trust_remote_code" in text:
            text = (
                f"{source or class_path} needs its own code (auto_map), and code that comes with "
                "a checkpoint is never run"
            )
            suggestions = (
                "name a transformers class, or install the package of the class, name that class "
                "and add --trust-package PACKAGE"
            )
            raise GraphError(f"{label}: {text}: {suggestions}", file_line) from error
        raise GraphError(
            f"{label}: {class_path} cannot be constructed: {type(error).__name__}: {text[:400]}",
            file_line,
        ) from error

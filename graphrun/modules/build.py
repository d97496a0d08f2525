"""Builds the components and parts that a graph declares: on meta, with random weights, or with the
weights of a source.

Runs on the CPU and meta only; knows no plans and no pipelines.

    meta_module   class + config                       on meta, no weights: for sizes build
    class + config + source (or seed)    on the CPU, real weights draft         class + config +
    precision           parameters on meta, and a writer for the bytes of each block all
    the same tensors, shapes and dtypes (except for the precision); frozen; in eval mode
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
from graphrun.graph.graph import Component, Graph, Part
from graphrun.graph.values import did_you_mean
from graphrun.limits import require
from graphrun.modules.adapters import adapter_tensors, add_ip_adapters
from graphrun.modules.blocks import lay_out
from graphrun.modules.classes import refusal, resolve_class
from graphrun.modules.contents import (
    Content,
    as_stored,
    content_of,
    lacking,
    read_as,
    refuse_differing,
    refuse_missing,
    replace_layers,
    scale_name,
)
from graphrun.modules.lora import deltas_of
from graphrun.modules.precisions import QUANTIZED
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
from graphrun.modules.texts import measured
from graphrun.reading import panics_as_errors

# Functions that initialize parameters, by name, because transformers replaces those of
# `torch.nn.init` by its own. On meta, torch runs Python reference implementations of them, which
# take a third of a meta module's time.
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
    """Disables the progress bars of transformers and diffusers."""
    import diffusers.utils.logging
    import transformers.utils.logging

    shown = [
        library
        for library in (transformers.utils.logging, diffusers.utils.logging)
        if library.is_progress_bar_enabled()
    ]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()


@contextmanager
def no_code_prompt() -> Iterator[None]:
    """Makes transformers raise ValueError where it would ask on stdin whether to run code that came
    with a checkpoint.

    Sets the timeout of `resolve_trust_remote_code` to 0. ``trust_remote_code=False`` is not enough:
    a nested configuration (LLaVA's ``text_config``) may name code too, and that argument does not
    reach it.
    """
    from transformers import dynamic_module_utils

    before = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = before


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets torch's default dtype to ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def on_host() -> Iterator[None]:
    """Creates tensors on the CPU by default, also for a caller who chose another device
    (`torch.set_default_device`)."""
    if torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Constructs parameters on meta and buffers for real: buffers that are not saved with the
    weights are computed there."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False), _SkipRandomInit():
        yield


@contextmanager
def on_meta() -> Iterator[None]:
    """Constructs every tensor on meta."""
    with torch.device("meta"), _SkipRandomInit():
        yield


__all__ = ["build", "build_part", "draft", "meta_module", "resolve_class"]

# A configuration that a library saved also has keys of other versions and of the library itself;
# its keys are not checked. One written by hand has none of these.
_SAVED_KEYS = frozenset(
    {"_class_name", "_diffusers_version", "transformers_version", "model_type", "architectures"}
)
_TOKENIZER_KEYS = frozenset(
    {
        "model_max_length",
        "chat_template",
        "padding_side",
        "truncation_side",
        "model_input_names",
        "clean_up_tokenization_spaces",
    }
    | {f"{name}_token" for name in ("bos", "eos", "pad", "unk", "cls", "sep", "mask")}
)


@on_host()
def meta_module(component: Component, trust: Sequence[str]) -> nn.Module:
    """``component`` on the meta device: its class, config, shapes and dtypes, without weights.
    Frozen and in eval mode.

    Raises GraphError at the component's line for an invalid class or config.
    """
    kind = resolve_class(component.class_path, trust, component.where, "component")
    with on_meta():
        module = add_ip_adapters(component, _construct(kind, component))
    if any(not tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        module.to("meta")  # `torch.Tensor([alpha])` ignores the default device, as in SVD's mixers
    return _freeze(module, component)


@contextmanager
def meta_modules(graph: Graph) -> Iterator[dict[str, nn.Module]]:
    """The `meta_module` of every component of ``graph``, to read sizes from and never to call.

    A module that a dry run, or an earlier context, left behind is used again. Nothing else uses it
    until the context ends.
    """
    found: dict[str, nn.Module] = {}
    for name, component in graph.components.items():
        made_of, module = graph.spare.pop(name, (None, None))
        found[name] = (
            module if made_of == _made_of(component) else meta_module(component, graph.trust)
        )
    yield found
    leave_behind(graph, found)


def leave_behind(graph: Graph, modules: Mapping[str, nn.Module]) -> None:
    """Keeps the meta modules ``modules`` for the next `meta_modules` of ``graph``."""
    graph.spare.update(
        {name: (_made_of(graph.components[name]), module) for name, module in modules.items()}
    )


def _made_of(component: Component) -> tuple[Any, ...]:
    """All that the `meta_module` of ``component`` depends on."""
    return component.class_path, _config_of(component), component.dtype, component.ip_adapters


@on_host()
def held_meta_module(
    component: Component, trust: Sequence[str], precision: str
) -> tuple[nn.Module, Content]:
    """The `meta_module` of ``component`` with its layers replaced for ``precision``, and the
    content of its local files (nothing without any).

    Its tensors have exactly the shapes and dtypes of those that `draft` returns. Raises GraphError
    for files that are broken or belong to another model, and for one file that lacks a tensor.
    """
    module, place = meta_module(component, trust), local_weights(component, precision)
    content = (
        content_of(component, module, place, precision)
        if place is not None
        else Content(Path(), {})
    )
    if (
        place is not None and place.is_file()
    ):  # the files of a folder may have other names, which the library's loader knows
        adapters = adapter_tensors(component, module, meta=True)
        refuse_missing(content, module.state_dict().keys() - adapters.keys(), component)
    replace_layers(module, precision, getattr(torch, component.dtype), content)
    return module, content


@on_host()
def build(component: Component, graph: Graph) -> nn.Module:
    """``component`` on the CPU with its weights, LoRAs fused: those of its source, or random ones
    that depend on its name and seed only. The values are those that the writer of `draft` writes,
    and the errors those of `draft`.
    """
    module, writer = draft(component, graph, component.dtype)
    for entry in lay_out(module, ())[""].entries:
        tensor = torch.empty_like(entry.tensor, device="cpu")
        writer.into(entry.names[0], tensor)
        made = (
            nn.Parameter(tensor, requires_grad=False)
            if isinstance(entry.tensor, nn.Parameter)
            else tensor
        )
        for location in entry.locations:
            location.put(made)
    writer.close()
    return module


@on_host()
def draft(component: Component, graph: Graph, precision: str) -> tuple[nn.Module, Writer]:
    """``component`` in ``precision`` with parameters on meta and buffers on the CPU, and the
    `Writer` of its blocks.

    A precision that is a dtype replaces the component's own; any other replaces its linear layers.
    Weights are read or generated when the writer is called, so no checkpoint is ever in memory
    whole. One exception: where the files of a folder name tensors differently than the module, the
    library's own loader reads them all and holds the module for as long as blocks are written.
    Raises GraphError at the component's line for a missing folder or tensor, a corrupt file, or a
    source whose shapes differ from the config's.
    """
    if precision not in QUANTIZED:
        component = replace(component, dtype=precision)
    kind = resolve_class(component.class_path, graph.trust, component.where, "component")
    own = getattr(torch, component.dtype)
    with empty_parameters():
        module = add_ip_adapters(component, _construct(kind, component))
    if hasattr(module, "tie_weights"):
        module.tie_weights()
    module = _freeze(module, component)
    adapters = adapter_tensors(component, module)
    read: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    source: Source = RandomSource(module, f"{component.seed}/{component.name}")
    content = Content(Path(), {})
    if (location := component.source_in(precision)) is not None:
        place = find_folder(location, OF_COMPONENT, component.where, component.variant)
        content = content_of(component, module, place, precision)
        saved = module.state_dict(keep_vars=True)
        read |= saved
        needed = saved.keys() - adapters.keys()
        if (
            needed <= content.pieces.keys()
            or place.is_file()
            or not hasattr(kind, "from_pretrained")
        ):
            refuse_missing(content, needed, component)
            read |= dict.fromkeys(map(scale_name, content.scales))
            source = FileSource(read_as(content, module, precision, own))
        else:
            wanted = {name: tensor.shape for name, tensor in read.items() if name not in adapters}
            content, source = (
                Content(place, {}),
                LoadedSource(partial(_load_folder, kind, component, place, wanted)),
            )
    elif precision == "gguf":
        raise refusal(component, "gguf has no random weights: add gguf: with the path of a file")
    if component.loras and precision in ("gguf", "fp8"):
        raise refusal(
            component,
            f"a LoRA cannot be fused into weights in {precision}: take another precision, or leave loras: out",
        )
    deltas = deltas_of(component, module)
    buffers = {
        name: tensor
        for name, tensor in module.named_buffers(remove_duplicate=False)
        if name not in read
    }
    shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
    if precision in QUANTIZED:
        weights = {
            f"{path}.weight": layer.weight
            for path, layer in quantizable_layers(module, own).items()
        }
        if precision not in as_stored(content, weights):
            shapes = {name: (weight.shape, weight.dtype) for name, weight in weights.items()}
        replace_layers(module, precision, own, content)
    return module, Writer(source, precision, shapes, buffers, adapters, deltas)


@on_host()
def build_part(part: Part, graph: Graph, *, planning: bool = False) -> Any:
    """The tokenizer, scheduler or processor that ``part`` declares.

    A tokenizer comes from its source. It comes from its ``file`` where there is no source or while
    ``planning``; a stand-in is enough then, because texts are padded. While planning, texts that
    are not padded to a fixed length get the maximum length, because a plan must hold for every
    prompt. Every other part comes from its config, or from its source without one. Raises
    GraphError at the part's line.
    """
    kind, label, said = (
        resolve_class(part.class_path, graph.trust, part.where, "part"),
        f"parts.{part.name}",
        part.where,
    )
    file = part.file or Path(said)
    with _graph_errors(label, part.class_path, part.where, part.source):
        if part.file is not None and (planning or part.source is None):
            made = _tokenizer(part, part.file)
        elif part.has_config and part.file is None:
            if hasattr(kind, "from_config") and not _SAVED_KEYS & part.config.keys():
                _check_keys(part.config, _parameters_of(kind), label, part.where)
            if hasattr(kind, "from_config"):
                _refuse_large(part.config, label, part.where)
            made = (
                kind.from_config(part.config)
                if hasattr(kind, "from_config")
                else kind(**part.config)
            )
        elif part.source is None or not hasattr(kind, "from_pretrained"):
            raise GraphError(f"{label}: {part.class_path} needs a config or a source", part.where)
        else:
            local = local_folder(part.source) if planning else None
            folder = local or find_folder(part.source, OF_PART, part.where)
            with _graph_errors(label, f"{part.class_path} from {folder}", part.where, part.source):
                if hasattr(kind, "load_config"):
                    _refuse_large(
                        kind.load_config(folder, local_files_only=True), label, part.where
                    )
                # diffusers' schedulers run no remote code and do not take the argument
                transformers_class = any(
                    base.__module__.startswith("transformers.") for base in kind.__mro__
                )
                made = kind.from_pretrained(
                    folder, local_files_only=True, **(_NO_REMOTE_CODE if transformers_class else {})
                )
            file, said = folder, f"{folder}/tokenizer_config.json"
        return measured(made, label, said, part.where, file, longest=planning)


def _refuse_large(config: Mapping[str, Any], label: str, where: str) -> None:
    """Raise GraphError for an integer in a scheduler's ``config`` for which diffusers would
    allocate all memory."""
    for key, number in config.items():
        if isinstance(number, int):
            require("timesteps", number, f"{label}.config: {key} is {number:,}", where, GraphError)


def _tokenizer(part: Part, file: Path) -> Any:
    """The fast tokenizer in ``file``."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    _check_keys(part.config, _TOKENIZER_KEYS, f"parts.{part.name}", part.where)
    with _graph_errors(f"parts.{part.name}", str(file), part.where):
        return PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_file(str(file)), **part.config
        )


def _construct(kind: type[Any], component: Component) -> Any:
    """The module as `from_pretrained` constructs it before it reads weights, with tensors in the
    component's dtype."""
    label, dtype = f"components.{component.name}", getattr(torch, component.dtype)
    config = _config_of(component)
    if not _SAVED_KEYS & config.keys():
        _check_keys(config, _parameters_of(kind), label, component.where)
    with (
        _graph_errors(label, component.class_path, component.where, component.source),
        default_dtype(dtype),
    ):
        if hasattr(kind, "load_config"):  # diffusers
            return kind.from_config(config)
        if getattr(kind, "config_class", None) is not None:  # transformers
            return kind(kind.config_class(**{**config, "dtype": component.dtype}))
        return kind(**config)


def _config_of(component: Component) -> dict[str, Any]:
    """A copy of the configuration of ``component``, its own or that of its source."""
    if component.has_config:
        return copy.deepcopy(component.config)
    found = config_file(component.source)
    if found is None:
        found = (
            find_folder(component.source or "", ("config.json",), component.where) / "config.json"
        )
    return read_json(found, infinite=True)


def _load_folder(
    kind: type[Any], component: Component, folder: Path, wanted: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    """The tensors in ``folder`` by name, as the library's own loader reads them. Raises GraphError
    where they are not those that are ``wanted``, which plans are computed from.
    """
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
        _graph_errors(label, component.class_path, component.where, component.source),
        no_progress_bars(),
    ):
        module, report = kind.from_pretrained(folder, **options)
    if missing := sorted(report["missing_keys"]):
        raise lacking(component, folder, missing)
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    found = {name: tensor.detach() for name, tensor in named}
    shapes = {name: list(found[name].shape) if name in found else None for name in wanted}
    refuse_differing(
        folder,
        [(n, f"{shapes[n]}", list(like)) for n, like in wanted.items() if shapes[n] != list(like)],
        component,
    )
    return found


_NO_REMOTE_CODE = {"trust_remote_code": False}  # the default of transformers is to ask on stdin


def _freeze(module: Any, component: Component) -> nn.Module:
    """Freezes ``module`` in eval mode and casts it to the dtypes of `from_pretrained`: fp32 where
    the class keeps it."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        tensor.data = tensor.data.to(
            _dtype_of(module, name, tensor.dtype, getattr(torch, component.dtype))
        )
    frozen: nn.Module = module.requires_grad_(False).eval()
    return frozen


def _dtype_of(module: Any, name: str, own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the tensor ``name`` after `from_pretrained` in ``dtype``; ``own`` is the dtype
    that the constructor gave it.

    diffusers casts everything except the modules it keeps in fp32, matched by whole name components
    (`load_model_dict_into_meta`). transformers leaves the constructor's dtypes, and keeps T5's
    ``wo`` in fp32 in fp16 only, matched anywhere in the name (`_get_dtype_plan`).
    """
    if not own.is_floating_point or dtype == torch.float32:
        return own
    kept = getattr(module, "_keep_in_fp32_modules", None) or ()
    if hasattr(module, "load_config"):  # diffusers
        return torch.float32 if any(keep in name.split(".") for keep in kept) else dtype
    if dtype != torch.float16:
        kept = ()
    kept = [*kept, *(getattr(module, "_keep_in_fp32_modules_strict", None) or ())]
    return torch.float32 if any(re.search(keep.replace("*", ".*"), name) for keep in kept) else own


def _parameters_of(kind: type[Any]) -> frozenset[str]:
    """The valid keys of a configuration of ``kind``."""
    config_class = getattr(kind, "config_class", None)
    if config_class is None:
        return frozenset(inspect.signature(kind.__init__).parameters) - {"self"}
    declared = {
        key for base in config_class.__mro__ for key in getattr(base, "__annotations__", {})
    }
    return frozenset(declared | set(config_class.attribute_map))


def _check_keys(config: dict[str, Any], known: frozenset[str], label: str, where: str) -> None:
    for key in config:
        if key not in known:
            raise GraphError(
                f"{label}.config: unknown key {key!r}{did_you_mean(key, known)}", where
            )


@contextmanager
def _bounded_modules(label: str, where: str) -> Iterator[None]:
    """Ends the construction of a module that has more modules than the limit, such as ten million
    layers in a configuration."""
    made, thread = 0, threading.get_ident()

    def count(*_: object) -> None:
        nonlocal made
        if threading.get_ident() == thread:
            made += 1
            require("modules", made, f"{label} has {made:,} modules or more", where, GraphError)

    counting = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        counting.remove()


@contextmanager
def _graph_errors(
    label: str, class_path: str, where: str, source: str | None = None
) -> Iterator[None]:
    """Turns every exception of a library's constructor or loader into a GraphError at ``where``."""
    try:
        with (
            no_code_prompt(),
            _bounded_modules(f"{label}: {class_path}", where),
            panics_as_errors(),
        ):
            yield
    except GraphrunError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if isinstance(error, ValueError) and "trust_remote_code" in text:
            text = f"{source or class_path} needs its own code (auto_map), and code that comes with a checkpoint is never run"
            advice = "name a transformers class, or install the package of the class, name that class and add --trust-package PACKAGE"
            raise GraphError(f"{label}: {text}: {advice}", where) from error
        raise GraphError(
            f"{label}: {class_path} cannot be constructed: {type(error).__name__}: {text[:400]}",
            where,
        ) from error

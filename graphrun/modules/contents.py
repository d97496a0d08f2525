"""Map the tensors in a component's files to the tensors of its module, from headers only.

A tensor is used as stored, or computed from stored tensors.

    folder, GGUF or single file --headers--> names --(conversion)--> the module's names, shapes
                                                                     checked
    fp8 with scales             weight and scale stay separate in precision fp8; otherwise the
                                weight is their product
    nf4, int8, int8wo, fp8wo    weights that bitsandbytes or torchao quantized stay so in that
                                precision; otherwise the weight is dequantized when it is read
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphrun.errors import GraphError, InputError
from graphrun.graph.parts import Component
from graphrun.graph.precisions import GGUF_MIXES, ONLY_IN_FILES, QUANTIZED, is_gguf
from graphrun.modules.bitsandbytes_files import PackedWeight, field_name, packed_weights
from graphrun.modules.classes import refusal
from graphrun.modules.conversions import Derivation, Piece, SymbolicTensors, converted
from graphrun.modules.gguf import dequantized, gguf_tensors, shape_of
from graphrun.modules.quantize import convert, quantizable_layers
from graphrun.modules.source_files import Stored, stored_tensors
from graphrun.modules.torchao_files import torchao_weights

FP8 = "float8_e4m3fn"
# suffixes of the scale of ``x.weight`` in fp8 files: ComfyUI's scaled fp8, and its later layouts
_SCALE_SUFFIXES = (".scale_weight", ".weight_scale")
# suffixes of tensors that only ComfyUI's own kernels use: activation scales, format markers
_IGNORED_SUFFIXES = (".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")


@dataclass(frozen=True, slots=True)
class Content:
    """The tensors in a component's files, for its module.

    ``pieces``: by the module's names; a tied tensor is under each of its names. ``scales``: of fp8
    weights, [out 1], by the weight's name. ``packed``: weights that were saved quantized by
    bitsandbytes or torchao, by the weight's name; ``pieces`` has them as numbers. ``tensors``: all
    tensors in the files.
    """

    place: Path
    pieces: Mapping[str, Piece]
    tensors: tuple[Stored, ...] = ()
    scales: Mapping[str, Piece] = field(default_factory=dict)
    packed: Mapping[str, PackedWeight] = field(default_factory=dict)

    @property
    def quantized(self) -> bool:
        """Whether the files have quantized GGUF types, which torch does not have."""
        return any(tensor.quant for tensor in self.tensors)

    def kind(self, name: str) -> str:
        """Return the type of a quantized GGUF tensor; "" for any other tensor."""
        return next((leaf.quant for leaf in self.pieces[name].leaves if leaf.quant), "")

    def plain(self, name: str) -> Piece:
        """Return the piece ``name`` as numbers: a quantized GGUF tensor is dequantized when
        read."""
        piece, kind = self.pieces[name], self.kind(name)
        if not kind:
            return piece
        return Derivation(
            name,
            "float16",
            shape_of(piece.shape, kind),
            piece.leaves,
            lambda values: dequantized(piece.make(values), kind),
        )


def tensors_in(place: Path, component: Component, precision: str) -> tuple[Stored, ...]:
    """Return every tensor in the files at ``place``, from their headers. Raises GraphError."""
    if is_gguf(precision):
        return gguf_tensors(place, component.file_line)
    variant = component.variant if component.checkpoint(precision) is None else ""
    return stored_tensors(place, component.file_line, variant)


def content_of(component: Component, module: nn.Module, place: Path, precision: str) -> Content:
    """Return the content of ``place`` for ``module``: ``component`` with its original layers.

    Raises GraphError for a broken file, a file of another model, or a tensor of another shape.
    Missing tensors are not an error here.
    """
    file_tensors = tensors_in(place, component, precision)
    by_name, packed = _unpacked_and_packed(file_tensors, place, component)
    scaled = _scales(by_name, place, component)
    symbols = SymbolicTensors(
        {name: tensor for name, tensor in by_name.items() if not name.endswith(_IGNORED_SUFFIXES)}
    )
    tensors = {
        name: tensor for name, tensor in symbols.tensors.items() if name not in scaled.values()
    }
    expanded = dict(tensors)
    with symbols:
        for name, scale in scaled.items():
            row = symbols.tensors[scale].reshape(-1, 1)
            if precision == "fp8":
                # one scale per element, so that the conversion moves it with its element
                expanded[name] = row.expand(tensors[name].shape)
            else:
                dtype = getattr(torch, component.dtype)
                tensors[name] = tensors[name].to(dtype) * row.to(dtype)
    module_tensors = _by_module_name(module, symbols, tensors, place, component)
    pieces = {name: symbols.piece(name, tensor) for name, tensor in module_tensors.items()}
    state = module.state_dict(keep_vars=True)
    module_packed = {
        name: packed[file_name].shaped(tuple(tensor.shape))
        for name, tensor in state.items()
        if (file_name := name_in_file(name, module, packed)) in packed
    }
    pieces |= {name: weight.plain(name, component.dtype) for name, weight in module_packed.items()}
    content = Content(place, pieces, file_tensors, packed=module_packed)
    _refuse_other_shapes(content, state, component)
    if not scaled or precision != "fp8":
        return content
    scales: dict[str, Piece] = {}
    for name, tensor in _by_module_name(module, symbols, expanded, place, component).items():
        if {leaf.name for leaf in content.pieces[name].leaves} & scaled.keys():
            with symbols:
                row = tensor[:, :1].contiguous()
            scales[name] = symbols.piece(name, row)
    return replace(content, scales=scales)


def _unpacked_and_packed(
    file_tensors: Sequence[Stored], place: Path, component: Component
) -> tuple[dict[str, Stored], dict[str, PackedWeight]]:
    """Return the tensors that torch can compute with, by name, and the weights that bitsandbytes or
    torchao quantized. Raises GraphError for others."""
    for tensor in file_tensors:
        if not hasattr(torch, tensor.dtype):
            raise refusal(
                component,
                f"{place} stores {tensor.name} as {tensor.dtype}, which torch cannot compute with",
            )
    by_name = {tensor.name: tensor for tensor in file_tensors}
    try:
        packed = packed_weights(by_name) | torchao_weights(by_name)
    except (ValueError, KeyError, TypeError, OSError, InputError) as error:
        problem = f"{place} has a quantized weight that cannot be read: {error}"
        raise refusal(component, problem) from error
    for name in {name for weight in packed.values() for name in weight.names}:
        del by_name[name]
    return by_name, packed


def _refuse_other_shapes(
    content: Content, state: Mapping[str, torch.Tensor], component: Component
) -> None:
    """Raise GraphError for tensors of ``content`` whose shapes are not those of ``state``."""
    shapes = {name: content.plain(name).shape for name in content.pieces}
    differing = [
        (
            name,
            f"{list(shape)} {content.kind(name) or content.pieces[name].dtype}",
            list(state[name].shape),
        )
        for name, shape in shapes.items()
        if shape != tuple(state[name].shape)
    ]
    refuse_differing(content.place, differing, component)


def as_stored(content: Content, weights: Collection[str]) -> tuple[str, ...]:
    """Return the precisions that need no quantization, because the files store ``weights`` in them:
    gguf with the mixes of GGUF files, nf4, int8, int8wo, fp8wo, fp8 or none."""
    if content.quantized:
        return ("gguf", *GGUF_MIXES)
    if content.packed:
        return tuple({weight.precision: None for weight in content.packed.values()})
    pieces = [content.pieces.get(name) for name in weights]
    return (
        ("fp8",)
        if pieces and all(piece is not None and piece.dtype == FP8 for piece in pieces)
        else ()
    )


def replace_layers(module: nn.Module, precision: str, dtype: torch.dtype, content: Content) -> None:
    """Replace the layers of ``module`` for ``precision``, with the shapes in ``content``."""
    rows = {
        name: (kind, piece.shape[-1])
        for name, piece in content.pieces.items()
        if (kind := content.kind(name))
    }
    packed = content.packed if precision in as_stored(content, ()) and content.packed else None
    convert(module, precision, dtype, rows, content.scales, packed)


def read_as(
    content: Content, module: nn.Module, precision: str, dtype: torch.dtype
) -> dict[str, Piece]:
    """Return the piece to read for each tensor of ``module`` in ``precision``, by name. ``module``
    has its original layers. Layers with quantized tensors read raw bytes, others numbers."""
    layers = (
        {f"{path}.weight" for path in quantizable_layers(module, dtype)}
        if precision in QUANTIZED
        else set()
    )
    pieces = {
        name: piece if is_gguf(precision) and name in layers else content.plain(name)
        for name, piece in content.pieces.items()
    }
    for name, weight in content.packed.items():
        if name in layers and weight.precision == precision:
            layer = name.removesuffix("weight")
            pieces |= {
                f"{layer}{key}" if precision in ONLY_IN_FILES else field_name(name, key): piece
                for key, piece in weight.fields.items()
            }
    for name, scale in content.scales.items():
        if name in layers:
            pieces[scale_name(name)] = scale
        else:
            pieces[name] = _product(pieces[name], scale, dtype)
    return pieces


def scale_name(weight: str) -> str:
    """Return the name of the scale of ``weight`` in an fp8 layer."""
    return f"{weight.removesuffix('.weight')}.scale"


def refuse_missing(content: Content, names: Collection[str], component: Component) -> None:
    """Raise GraphError naming the tensors in ``names`` that are missing from the files."""
    if absent_names := sorted(set(names) - content.pieces.keys()):
        if not content.pieces:
            raise refusal(
                component, f"{content.place} has no tensors for it: give it its own source:"
            )
        raise missing_tensors(component, content.place, absent_names)


def missing_tensors(component: Component, place: Path, names: Sequence[str]) -> GraphError:
    """Return the error for missing tensors ``names``."""
    count = "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
    return refusal(component, f"{place}: {count} missing, such as {', '.join(names[:3])}")


def refuse_differing(
    place: Path, differing: Sequence[tuple[str, str, object]], component: Component
) -> None:
    """Raise GraphError for tensors that differ from the module's. ``differing``: (name, description
    of the tensor in the files, expected description)."""
    if differing:
        suffix = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        text = "; ".join(
            f"{name} is {actual}, not {expected}" for name, actual, expected in differing[:3]
        )
        raise refusal(component, f"{place} does not match its config: {text}{suffix}")


def name_in_file(name: str, module: nn.Module, file_names: Mapping[str, Any]) -> str:
    """Return the name of the module's tensor ``name`` in a file: transformers adds or drops the
    base model's prefix."""
    prefix = getattr(module, "base_model_prefix", "") or ""
    if name not in file_names and prefix:
        for other in (f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
            if other in file_names:
                return other
    return name


def _by_module_name(
    module: nn.Module,
    symbols: SymbolicTensors,
    tensors: Mapping[str, torch.Tensor],
    place: Path,
    component: Component,
) -> dict[str, torch.Tensor]:
    """Return ``tensors`` by the module's names; a tied tensor is under each of its names."""
    state = module.state_dict(keep_vars=True)
    match_count = sum(name_in_file(name, module, tensors) in tensors for name in state)
    # otherwise the names are the module's, and a missing one is reported as missing
    if place.is_file() and 2 * match_count <= len(state):
        try:
            tensors = converted(module, symbols, tensors)
        except InputError as error:
            raise refusal(component, f"{place} cannot be used: {error}") from error
    module_tensors: dict[int, torch.Tensor] = {}
    for name, tensor in state.items():
        if (file_tensor := tensors.get(name_in_file(name, module, tensors))) is not None:
            module_tensors.setdefault(id(tensor), file_tensor)
    return {
        name: module_tensors[id(tensor)]
        for name, tensor in state.items()
        if id(tensor) in module_tensors
    }


def _product(weight: Piece, scale: Piece, dtype: torch.dtype) -> Derivation:
    """Return ``weight`` times ``scale``, each cast to ``dtype`` first, as a layer computes it."""
    count = len(weight.leaves)

    def make(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return weight.make(values[:count]).to(dtype) * scale.make(values[count:]).to(dtype)

    return Derivation(
        weight.name,
        str(dtype).removeprefix("torch."),
        weight.shape,
        (*weight.leaves, *scale.leaves),
        make,
    )


def _scales(by_name: Mapping[str, Stored], place: Path, component: Component) -> dict[str, str]:
    """Return fp8 weight -> its scale, of one element or one per row. Raises GraphError
    otherwise."""
    scales = {}
    for key, scale in by_name.items():
        weight = next(
            (f"{key.removesuffix(end)}.weight" for end in _SCALE_SUFFIXES if key.endswith(end)), ""
        )
        if weight in by_name and by_name[weight].dtype == FP8:
            shape = by_name[weight].shape
            if math.prod(scale.shape) not in (1, shape[0]) or len(shape) != 2:
                problem = (
                    f"{key} {list(scale.shape)} is not a supported scale of {weight} {list(shape)}"
                )
                raise refusal(
                    component, f"{place}: {problem}: it must have one element, or one per row"
                )
            scales[weight] = key
    return scales

"""What the files of a component hold for its module: each of the module's tensors, as it lies there or as it is made of what does.

Decides which tensor of which file becomes which of the module's, whatever layout the file has. Reads headers only, and must not
know plans.

    folder, GGUF or single file --headers--> names --(conversion)--> the module's names, shapes checked
    fp8 with scales             weight and scale stay apart for precision fp8, else the weight is their product
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
from graphrun.graph.graph import Component
from graphrun.modules.conversions import Derivation, Piece, Symbols, converted
from graphrun.modules.gguf import dequantized, gguf_tensors, shape_of
from graphrun.modules.precisions import QUANTIZED
from graphrun.modules.quantize import convert, quantizable_layers
from graphrun.modules.source_files import Stored, stored_tensors

FP8 = "float8_e4m3fn"
# What those who store weights in fp8 call the scale of ``x.weight``: ComfyUI's scaled fp8, and its later quantized layouts.
_SCALES = (".scale_weight", ".weight_scale")
# What stands beside them and is of no use without their kernels: the scale of activations, marks of the format.
_MARKS = (".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")


@dataclass(frozen=True, slots=True)
class Content:
    """``pieces``: by the module's names, a tied tensor under all of them. ``scales``: of weights in fp8, by the weight's name,
    [out 1]. ``tensors``: all that the files hold."""

    place: Path
    pieces: Mapping[str, Piece]
    tensors: tuple[Stored, ...] = ()
    scales: Mapping[str, Piece] = field(default_factory=dict)

    @property
    def quantized(self) -> bool:
        """Whether it is a GGUF file with types that torch does not have."""
        return any(tensor.quant for tensor in self.tensors)

    def kind(self, name: str) -> str:
        """The type of a quantized GGUF tensor; "" for any other."""
        return next((leaf.quant for leaf in _leaves(self.pieces[name]) if leaf.quant), "")

    def plain(self, name: str) -> Piece:
        """The piece ``name`` as numbers: a quantized tensor of a GGUF file where no layer takes it as it is."""
        piece, kind = self.pieces[name], self.kind(name)
        if not kind:
            return piece
        if isinstance(piece, Stored):
            return Derivation(name, "float16", shape_of(piece.shape, kind), (piece,), lambda values: dequantized(values[0], kind))
        made = piece.make
        return replace(piece, shape=shape_of(piece.shape, kind), make=lambda values: dequantized(made(values), kind))


def tensors_in(place: Path, component: Component, precision: str) -> tuple[Stored, ...]:
    """Every tensor in the files of ``place``, from their headers. Raises GraphError for a broken one."""
    if precision == "gguf":
        return gguf_tensors(place, component.where)
    return stored_tensors(place, component.where, component.variant)


def content_of(component: Component, module: nn.Module, place: Path, precision: str) -> Content:
    """What ``place`` holds for ``module``, which is ``component`` before its layers were replaced for ``precision``.

    Raises GraphError where a file is broken, another model's, or has a tensor of another shape; what it lacks is not an error here.
    """
    stored = tensors_in(place, component, precision)
    by_name = {tensor.name: tensor for tensor in stored if hasattr(torch, tensor.dtype)}
    scaled = _scales(by_name, place, component)
    symbols = Symbols({name: tensor for name, tensor in by_name.items() if not name.endswith(_MARKS)})
    tensors = {name: tensor for name, tensor in symbols.tensors.items() if name not in scaled.values()}
    spread = dict(tensors)
    with symbols:
        for name, scale in scaled.items():
            row = symbols.tensors[scale].reshape(-1, 1)
            if precision == "fp8":
                spread[name] = row.expand(tensors[name].shape)  # each element's scale, which goes where its element goes
            else:
                own = getattr(torch, component.dtype)
                tensors[name] = tensors[name].to(own) * row.to(own)
    named = _named(module, symbols, tensors, place, component)
    content = Content(place, {name: symbols.piece(name, tensor) for name, tensor in named.items()}, stored)
    _refuse_other_shapes(module, content, component)
    if not scaled or precision != "fp8":
        return content
    scales: dict[str, Piece] = {}
    for name, tensor in _named(module, symbols, spread, place, component).items():
        if {leaf.name for leaf in _leaves(content.pieces[name])} & scaled.keys():
            with symbols:
                row = tensor[:, :1].contiguous()
            scales[name] = symbols.piece(name, row)
    return replace(content, scales=scales)


def as_stored(content: Content, weights: Collection[str]) -> tuple[str, ...]:
    """The precisions of quantized layers, of which ``weights`` are the names, that files hold as they are: nothing is quantized."""
    if content.quantized:
        return ("gguf",)
    pieces = [content.pieces.get(name) for name in weights]
    return ("fp8",) if pieces and all(piece is not None and piece.dtype == FP8 for piece in pieces) else ()


def replace_layers(module: nn.Module, precision: str, own: torch.dtype, content: Content | None) -> None:
    """The layers of ``module`` that ``precision`` replaces are those that will hold what ``content`` has (None:
    made-up weights)."""
    rows, scaled = {}, set[str]()
    if content is not None:
        rows = {name: (kind, piece.shape[-1]) for name, piece in content.pieces.items() if (kind := content.kind(name))}
        scaled = set(content.scales)
    convert(module, precision, own, rows, scaled)


def read_as(content: Content, module: nn.Module, precision: str, own: torch.dtype) -> dict[str, Piece]:
    """What is read for each tensor of ``module`` held in ``precision``, before its layers are replaced: bytes of quantized tensors
    for the layers that take them, else numbers."""
    layers = {f"{path}.weight" for path in quantizable_layers(module, own)} if precision in QUANTIZED else set()
    raw = layers if precision == "gguf" else set()
    found = {name: content.pieces[name] if name in raw else content.plain(name) for name in content.pieces}
    for name, scale in content.scales.items():
        if name in layers:
            found[scale_name(name)] = scale
        else:
            found[name] = _product(found[name], scale, own)
    return found


def scale_name(weight: str) -> str:
    """What the scale of ``weight`` is called in a layer of fp8."""
    return f"{weight.removesuffix('.weight')}.scale"


def refuse_missing(content: Content, needed: Collection[str], component: Component) -> None:
    """Raises GraphError naming which of the tensors ``needed`` the file lacks."""
    if missing := sorted(set(needed) - content.pieces.keys()):
        if not content.pieces:
            text = f"{content.place} has nothing for it: give it a source: of its own"
        else:
            text = f"{content.place} lacks {len(missing)} tensors, such as {', '.join(missing[:3])}"
        raise GraphError(f"components.{component.name}: {text}", component.where)


def saved_as(name: str, module: nn.Module, saved: Mapping[str, Any]) -> str:
    """The name under which a file has the module's tensor ``name``: transformers adds or drops the base model's prefix."""
    prefix = getattr(module, "base_model_prefix", "") or ""
    if name not in saved and prefix:
        for other in (f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
            if other in saved:
                return other
    return name


def _named(
    module: nn.Module, symbols: Symbols, tensors: Mapping[str, torch.Tensor], place: Path, component: Component
) -> dict[str, torch.Tensor]:
    """``tensors`` by the module's names, a tied one under all of them."""
    state = module.state_dict(keep_vars=True)
    own = sum(saved_as(name, module, tensors) in tensors for name in state)
    if place.is_file() and 2 * own <= len(state):  # otherwise a tensor that lacks is better named than looked for
        try:
            tensors = converted(module, symbols, tensors)
        except InputError as error:
            raise GraphError(f"components.{component.name}: {place} will not do: {error}", component.where) from error
    found: dict[int, torch.Tensor] = {}
    for name, tensor in state.items():
        if (there := tensors.get(saved_as(name, module, tensors))) is not None:
            found.setdefault(id(tensor), there)
    return {name: found[id(tensor)] for name, tensor in state.items() if id(tensor) in found}


def _product(weight: Piece, scale: Piece, own: torch.dtype) -> Derivation:
    """``weight`` times ``scale``, each cast to ``own``, as a layer computes it."""
    leaves, others = _leaves(weight), _leaves(scale)

    def make(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return _made(weight, values[: len(leaves)]).to(own) * _made(scale, values[len(leaves) :]).to(own)

    return Derivation(weight.name, str(own).removeprefix("torch."), weight.shape, (*leaves, *others), make)


def _made(piece: Piece, values: Sequence[torch.Tensor]) -> torch.Tensor:
    return piece.make(values) if isinstance(piece, Derivation) else values[0]


def _leaves(piece: Piece) -> tuple[Stored, ...]:
    return piece.leaves if isinstance(piece, Derivation) else (piece,)


def _scales(by_name: Mapping[str, Stored], place: Path, component: Component) -> dict[str, str]:
    """Weight in fp8 -> its scale, one number or one for each row. Raises GraphError for scales of another kind."""
    found = {}
    for key, scale in by_name.items():
        weight = next((f"{key.removesuffix(end)}.weight" for end in _SCALES if key.endswith(end)), "")
        if weight in by_name and by_name[weight].dtype == FP8:
            shape = by_name[weight].shape
            if math.prod(scale.shape) not in (1, shape[0]) or len(shape) != 2:
                text = (
                    f"{place}: {key} {list(scale.shape)} is no scale of {weight} {list(shape)} that can be read: one, or one a row"
                )
                raise GraphError(f"components.{component.name}: {text}", component.where)
            found[weight] = key
    return found


def _refuse_other_shapes(module: nn.Module, content: Content, component: Component) -> None:
    differing = []
    for name, tensor in module.state_dict(keep_vars=True).items():
        if (piece := content.pieces.get(name)) is not None:
            kind = content.kind(name)
            shape = shape_of(piece.shape, kind) if kind else piece.shape
            if shape != tuple(tensor.shape):
                differing.append(f"{name} is {list(shape)} {kind or piece.dtype}, not {list(tensor.shape)}")
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        text = f"{content.place} is not what its config says: {'; '.join(differing[:3])}{more}"
        raise GraphError(f"components.{component.name}: {text}", component.where)

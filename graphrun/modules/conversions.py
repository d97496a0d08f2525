"""Find the tensors of a module in a checkpoint with the original authors' tensor names.

diffusers' own conversions (`diffusers.loaders.single_file_utils`) decide the names. They run once,
on meta tensors, and every operation is recorded. The record says which bytes of which file each
converted tensor is, or how to compute it.

    file    | qkv.weight [3n n] ..................... |
    meta      q = rows 0..n    k = rows n..2n   v = ...    chunk: each is a range of the file's
                                                           bytes (`Stored`)
              shift, scale -> cat([scale, shift])          others: repeated on the data when read
                                                           (`Derivation`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from graphrun.errors import InputError
from graphrun.modules.source_files import Stored

# copies of a whole tensor; a tensor read from disk needs none, so the tensor itself is returned
_COPIES = frozenset({"clone", "contiguous", "detach"})


@dataclass(frozen=True, slots=True)
class Derivation:
    """A tensor computed from others: ``make`` takes the values of ``leaves``, in that order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    leaves: tuple[Stored, ...]
    make: Callable[[Sequence[torch.Tensor]], torch.Tensor] = field(compare=False)

    @property
    def nbytes(self) -> int:
        """The bytes read to compute it."""
        return sum(leaf.nbytes for leaf in self.leaves)


Piece = Stored | Derivation


class SymbolicTensors(TorchFunctionMode):
    """Meta tensors for the stored tensors ``leaves``, by name in ``tensors``. Records the
    operations on them inside its context, for `piece`."""

    def __init__(self, leaves: Mapping[str, Stored]) -> None:
        super().__init__()
        self.tensors = {
            name: torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype), device="meta")
            for name, leaf in leaves.items()
        }
        self._alive: list[Any] = []  # keeps the tensors whose ids are keys below
        self._leaves = {id(tensor): leaves[name] for name, tensor in self.tensors.items()}
        self._by_storage = {
            tensor.untyped_storage()._cdata: leaves[name] for name, tensor in self.tensors.items()
        }
        # id of a result -> the operation, its arguments, and the result's number among several
        # (None for a single one)
        self._operations: dict[int, tuple[Callable[..., Any], Any, int | None]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _COPIES and args[0].is_contiguous():
            return args[0]
        if func is torch.cat and len(args[0]) == 1:  # FLUX's conversion concatenates single tensors
            return args[0][0]
        result = func(*args, **kwargs)
        for index, item in (
            enumerate(result) if isinstance(result, (list, tuple)) else ((None, result),)
        ):
            if isinstance(item, torch.Tensor) and id(item) not in self._leaves:
                self._operations[id(item)] = func, (args, kwargs), index
                self._alive.append(item)
        return result

    def piece(self, name: str, tensor: torch.Tensor) -> Piece:
        """Return where the values of ``tensor``, converted under ``name``, come from."""
        leaf = self._by_storage.get(tensor.untyped_storage()._cdata)
        if (
            leaf is not None
            and tensor.is_contiguous()
            and str(tensor.dtype).removeprefix("torch.") == leaf.dtype
        ):
            begin = leaf.begin + int(tensor.storage_offset()) * tensor.element_size()
            return replace(
                leaf,
                shape=tuple(tensor.shape),
                nbytes=tensor.numel() * tensor.element_size(),
                begin=begin,
            )
        leaves = self._leaves_of(tensor)

        def make(values: Sequence[torch.Tensor]) -> torch.Tensor:
            return self._value(tensor, dict(zip(leaves, values, strict=True)))

        dtype = str(tensor.dtype).removeprefix("torch.")
        return Derivation(name, dtype, tuple(tensor.shape), tuple(leaves.values()), make)

    def _leaves_of(self, tensor: torch.Tensor) -> dict[int, Stored]:
        """Return the stored tensors behind ``tensor``, by the id of their meta tensors."""
        if id(tensor) in self._leaves:
            return {id(tensor): self._leaves[id(tensor)]}
        leaves: dict[int, Stored] = {}
        for argument in (
            tree_leaves(self._operations[id(tensor)][1]) if id(tensor) in self._operations else ()
        ):
            leaves |= self._leaves_of(argument) if isinstance(argument, torch.Tensor) else {}
        return leaves

    def _value(self, tensor: torch.Tensor, values: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return the value of ``tensor``; a constant, which depends on no leaf, unchanged."""
        if id(tensor) in values or id(tensor) not in self._operations or not tensor.is_meta:
            return values.get(id(tensor), tensor)
        func, arguments, index = self._operations[id(tensor)]
        args, kwargs = tree_map_only(
            torch.Tensor, lambda operand: self._value(operand, values), arguments
        )
        result = func(*args, **kwargs)
        return result if index is None else result[index]  # type: ignore[no-any-return]


Tensors = Mapping[str, torch.Tensor]


def converted(
    module: nn.Module, symbols: SymbolicTensors, tensors: Tensors
) -> dict[str, torch.Tensor]:
    """Return ``tensors`` by the names of ``module``, as diffusers converts them.

    They are tensors of ``symbols`` or computed from these. Raises InputError if diffusers has no
    conversion for the class, or the file is of another model.
    """
    convert = _conversion(module)
    if convert is None:
        raise InputError(
            f"its tensor names are not those of {type(module).__name__}, and diffusers has no "
            "conversion for that class"
        )
    try:
        with symbols:
            module_tensors = convert(dict(tensors))
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())[:200]
        raise InputError(
            f"it is not a {type(module).__name__}: diffusers' conversion fails with "
            f"{type(error).__name__}: {text}"
        ) from error
    return {
        name: tensor for name, tensor in module_tensors.items() if isinstance(tensor, torch.Tensor)
    }


def _conversion(
    module: nn.Module,
) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None:
    import diffusers
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    model: Any = module
    for name, functions in SINGLE_FILE_LOADABLE_CLASSES.items():
        if isinstance(module, getattr(diffusers, name)):
            return lambda checkpoint: functions["checkpoint_mapping_fn"](
                config=dict(model.config), checkpoint=checkpoint
            )
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    if (architecture := _LLAMA_CPP.get(model_type)) is not None:
        return lambda checkpoint: _text_encoder(module, checkpoint, architecture)
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if kinds & {"CLIPTextModel", "CLIPTextModelWithProjection"}:
        return lambda checkpoint: _clip(module, checkpoint)
    return None


# transformers' model type -> architecture of llama.cpp (gguf's MODEL_ARCH_NAMES)
_LLAMA_CPP = {
    **{"t5": "t5encoder", "umt5": "t5encoder", "qwen2": "qwen2", "qwen3": "qwen3"},
    **{"llama": "llama", "mistral": "llama", "gemma2": "gemma2", "gemma3_text": "gemma3"},
}


def _text_encoder(
    module: Any, checkpoint: dict[str, torch.Tensor], architecture: str
) -> dict[str, torch.Tensor]:
    """Return the text encoder in ``checkpoint``: a GGUF file of llama.cpp, or T5 in a file of SD3.
    ``architecture``: as in the package gguf."""
    from diffusers.loaders.single_file_utils import convert_sd3_t5_checkpoint_to_diffusers

    if not any(name.startswith(("blk.", "enc.blk.")) for name in checkpoint):
        return dict(convert_sd3_t5_checkpoint_to_diffusers(checkpoint))
    import gguf

    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, module.config.num_hidden_layers)
    tensors = {}
    for name in module.state_dict():
        path, _, suffix = name.rpartition(".")
        original = names.get_name(path) or names.get_name(f"model.{path}")
        if original is not None and (tensor := checkpoint.get(f"{original}.{suffix}")) is not None:
            tensors[name] = _from_llama_cpp(tensor, original, architecture, module.config)
    return tensors


def _from_llama_cpp(
    tensor: torch.Tensor, name: str, architecture: str, config: Any
) -> torch.Tensor:
    """Return the ``tensor`` called ``name`` in a file of llama.cpp as transformers has it.

    llama.cpp's convert_hf_to_gguf.py orders the rows of Llama's queries and keys for its own rotary
    embedding, and adds 1 to the weights of Gemma's norms. Rows stay whole, so that quantized ones
    stay so.
    """
    if architecture == "llama" and name.endswith((".attn_q", ".attn_k")):
        is_key = name.endswith("k")
        heads = config.num_key_value_heads if is_key else config.num_attention_heads
        pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)
    if architecture.startswith("gemma") and name.endswith("norm"):
        return tensor - 1
    return tensor


def _clip(module: Any, checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the CLIP in ``checkpoint`` that has the width of ``module``.

    Of several (SDXL, SD3), the one whose position table fits, as diffusers'
    `create_diffusers_clip_model_from_ldm` chooses it. Raises ValueError if there is none.
    """
    from diffusers.loaders import single_file_utils

    text = getattr(module, "text_model", module)
    width = text.embeddings.position_embedding.weight.shape[-1]

    def fits(kind: str) -> bool:
        key = single_file_utils.CHECKPOINT_KEY_NAMES[kind]
        return key in checkpoint and checkpoint[key].shape[-1] == width

    open_clips = (
        (single_file_utils.is_open_clip_model(checkpoint), "cond_stage_model.model."),
        (fits("open_clip_sdxl"), "conditioner.embedders.1.model."),
        (
            single_file_utils.is_open_clip_sdxl_refiner_model(checkpoint),
            "conditioner.embedders.0.model.",
        ),
    )
    state: dict[str, torch.Tensor]
    if single_file_utils.is_clip_model(checkpoint) or fits("clip_sdxl"):
        state = single_file_utils.convert_ldm_clip_checkpoint(checkpoint)
    elif fits("clip_sd3"):
        state = single_file_utils.convert_ldm_clip_checkpoint(
            checkpoint, "text_encoders.clip_l.transformer."
        )
        # the file has none: diffusers uses the identity
        state["text_projection.weight"] = torch.eye(width, device="cpu")
    elif prefixes := [prefix for is_present, prefix in open_clips if is_present]:
        state = single_file_utils.convert_open_clip_checkpoint(
            module, checkpoint, prefix=prefixes[0]
        )
    elif fits("open_clip_sd3"):
        state = single_file_utils.convert_ldm_clip_checkpoint(
            checkpoint, "text_encoders.clip_g.transformer."
        )
    else:
        raise ValueError("no CLIP of this width")
    bare = not hasattr(module, "text_model")  # CLIPTextModel is flat from transformers 5.6 on
    return {
        name.removeprefix("text_model.") if bare else name: tensor for name, tensor in state.items()
    }

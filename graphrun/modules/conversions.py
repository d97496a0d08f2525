"""One file with the weights of a component, or of many, under the names of those who trained it: each tensor of a module found
there.

Decides names alone, by diffusers' own conversions (`diffusers.loaders.single_file_utils`), run on tensors without data. Must not
know precisions or plans.

Conversions of checkpoints, done once without data: which bytes of which file each converted tensor is, or how it is made of
them.

Decides nothing about names: a library's own function runs on tensors on meta, and what it does to them is written down. Must not
know modules.

    file    | qkv.weight [3n n] ..................... |          meta
              q = rows 0..n    k = rows n..2n   v = ...          chunk: each is a range of the file's bytes (`Stored`)
              shift, scale -> cat([scale, shift])                anything else is done again when it is read (`Derivation`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from graphrun.errors import InputError
from graphrun.modules.source_files import Stored

# Copies of a whole tensor: of what is read anew, the tensor itself.
_COPIES = frozenset({"clone", "contiguous", "detach"})


@dataclass(frozen=True, slots=True)
class Derivation:
    """A tensor that is made of others: ``leaves`` as they lie in files, in the order in which ``make`` takes their values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    leaves: tuple[Stored, ...]
    make: Callable[[Sequence[torch.Tensor]], torch.Tensor] = field(compare=False)

    @property
    def nbytes(self) -> int:
        """What is read for it."""
        return sum(leaf.nbytes for leaf in self.leaves)


Piece = Stored | Derivation


class Symbols(TorchFunctionMode):
    """Tensors on meta that stand for ``stored`` ones, by name in ``tensors``. What is done to them while this is entered can be
    told by `piece`."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        super().__init__()
        self.tensors = {
            name: torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype), device="meta") for name, leaf in stored.items()
        }
        self._kept: list[Any] = []  # what identities below are of
        self._leaves = {id(tensor): stored[name] for name, tensor in self.tensors.items()}
        self._by_storage = {tensor.untyped_storage()._cdata: stored[name] for name, tensor in self.tensors.items()}
        self._made: dict[int, tuple[Callable[..., Any], Any, Any, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _COPIES and args[0].is_contiguous():
            return args[0]
        if func is torch.cat and len(args[0]) == 1:  # as FLUX's conversion puts a query together
            return args[0][0]
        out = func(*args, **kwargs)
        for index, one in enumerate(out if isinstance(out, (list, tuple)) else (out,)):
            if isinstance(one, torch.Tensor) and id(one) not in self._leaves:
                self._made[id(one)] = (func, args, kwargs, index if isinstance(out, (list, tuple)) else -1)
                self._kept.append(one)
        return out

    def piece(self, name: str, tensor: torch.Tensor) -> Piece:
        """Where the values of ``tensor``, which came out of the conversion as ``name``, come from."""
        leaf = self._by_storage.get(tensor.untyped_storage()._cdata)
        if leaf is not None and tensor.is_contiguous() and str(tensor.dtype).removeprefix("torch.") == leaf.dtype:
            begin = leaf.begin + int(tensor.storage_offset()) * tensor.element_size()
            return replace(leaf, shape=tuple(tensor.shape), nbytes=tensor.numel() * tensor.element_size(), begin=begin)
        leaves: dict[int, Stored] = {}
        self._gather(tensor, leaves)
        keys = list(leaves)

        def make(values: Sequence[torch.Tensor]) -> torch.Tensor:
            return self._value(tensor, dict(zip(keys, values, strict=True)))

        dtype = str(tensor.dtype).removeprefix("torch.")
        return Derivation(name, dtype, tuple(tensor.shape), tuple(leaves.values()), make)

    def _gather(self, tensor: torch.Tensor, found: dict[int, Stored]) -> None:
        if id(tensor) in self._leaves:
            found[id(tensor)] = self._leaves[id(tensor)]
        elif id(tensor) in self._made:
            _, args, kwargs, _ = self._made[id(tensor)]
            tree_map_only(torch.Tensor, lambda one: self._gather(one, found), (args, kwargs))

    def _value(self, tensor: torch.Tensor, values: dict[int, torch.Tensor]) -> torch.Tensor:
        """``tensor`` for real; what is not made of leaves (a constant) is itself."""
        key = id(tensor)
        if key not in values:
            if key not in self._made or not tensor.is_meta:
                return tensor
            func, args, kwargs, index = self._made[key]
            args, kwargs = tree_map_only(torch.Tensor, lambda one: self._value(one, values), (args, kwargs))
            out = func(*args, **kwargs)
            values[key] = out[index] if index >= 0 else out
        return values[key]


Tensors = Mapping[str, torch.Tensor]


def converted(module: nn.Module, symbols: Symbols, tensors: Tensors) -> dict[str, torch.Tensor]:
    """``tensors``, those of ``symbols`` or made of them, by the names of ``module`` as diffusers converts them. Raises InputError
    where it has no conversion for the class, or the file is another model's."""
    convert = _conversion(module)
    if convert is None:
        raise InputError(f"its names are not those of {type(module).__name__}, and diffusers has no conversion for that class")
    try:
        with symbols:
            found = convert(dict(tensors))
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())[:200]
        raise InputError(
            f"it is no {type(module).__name__}: diffusers' conversion ends with {type(error).__name__}: {text}"
        ) from error
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


def _conversion(module: nn.Module) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None:
    import diffusers
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    of: Any = module
    for name, functions in SINGLE_FILE_LOADABLE_CLASSES.items():
        if isinstance(module, getattr(diffusers, name)):
            return lambda checkpoint: functions["checkpoint_mapping_fn"](config=dict(of.config), checkpoint=checkpoint)
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if kinds & {"CLIPTextModel", "CLIPTextModelWithProjection"}:
        return lambda checkpoint: _clip(module, checkpoint)
    if "T5EncoderModel" in kinds:
        return _t5
    return None


def _t5(checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from diffusers.loaders.single_file_utils import convert_sd3_t5_checkpoint_to_diffusers

    found: dict[str, torch.Tensor] = convert_sd3_t5_checkpoint_to_diffusers(checkpoint)
    return found


def _clip(module: Any, checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The CLIP of ``module``'s width in ``checkpoint``: of several (SDXL, SD3) the one whose position table fits, as diffusers'
    `create_diffusers_clip_model_from_ldm` chooses it. ValueError where there is none."""
    from diffusers.loaders import single_file_utils as theirs

    text = getattr(module, "text_model", module)
    width = text.embeddings.position_embedding.weight.shape[-1]

    def fits(kind: str) -> bool:
        key = theirs.CHECKPOINT_KEY_NAMES[kind]
        return key in checkpoint and checkpoint[key].shape[-1] == width

    found: dict[str, torch.Tensor]
    if theirs.is_clip_model(checkpoint) or fits("clip_sdxl"):
        found = theirs.convert_ldm_clip_checkpoint(checkpoint)
    elif fits("clip_sd3"):
        found = theirs.convert_ldm_clip_checkpoint(checkpoint, "text_encoders.clip_l.transformer.")
        found["text_projection.weight"] = torch.eye(width, device="cpu")  # the file has none: diffusers takes this
    elif theirs.is_open_clip_model(checkpoint):
        found = theirs.convert_open_clip_checkpoint(module, checkpoint, prefix="cond_stage_model.model.")
    elif fits("open_clip_sdxl"):
        found = theirs.convert_open_clip_checkpoint(module, checkpoint, prefix="conditioner.embedders.1.model.")
    elif theirs.is_open_clip_sdxl_refiner_model(checkpoint):
        found = theirs.convert_open_clip_checkpoint(module, checkpoint, prefix="conditioner.embedders.0.model.")
    elif fits("open_clip_sd3"):
        found = theirs.convert_ldm_clip_checkpoint(checkpoint, "text_encoders.clip_g.transformer.")
    else:
        raise ValueError("no CLIP of this width")
    bare = not hasattr(module, "text_model")  # CLIPTextModel is flat from transformers 5.6 on
    return {name.removeprefix("text_model.") if bare else name: tensor for name, tensor in found.items()}

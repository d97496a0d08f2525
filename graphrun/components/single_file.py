"""One file with the weights of a component, or of many, under the names of those who trained it: each tensor of a module found
there.

Decides names alone, by diffusers' own conversions (`diffusers.loaders.single_file_utils`), run on tensors without data. Must not
know precisions or plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from graphrun.components.symbolic import Symbols
from graphrun.errors import InputError

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

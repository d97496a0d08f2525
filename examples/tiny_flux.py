"""A FLUX pipeline tiny with random weights: what `from_pretrained` returns, without a download.
Its pictures are noise."""

from __future__ import annotations

import json
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from graphrun.graph.shipped import graphs_folder


def config(name: str) -> dict[str, Any]:
    """A configuration of the graph flux-tiny."""
    return json.loads((graphs_folder() / "configs" / name).read_text())  # type: ignore[no-any-return]


def tokenizer(length: int) -> PreTrainedTokenizerFast:
    """A token for each byte."""
    file = str(graphs_folder() / "tokenizers" / "bytes.json")
    return PreTrainedTokenizerFast(
        tokenizer_file=file,
        model_max_length=length,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )


def tiny_flux() -> FluxPipeline:
    """The pipeline on the CPU, in fp32."""
    torch.manual_seed(0)
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_config(config("flux-scheduler.json")),
        text_encoder=CLIPTextModel(CLIPTextConfig(**config("tiny-clip.json"))),
        tokenizer=tokenizer(77),
        text_encoder_2=T5EncoderModel(T5Config(**config("tiny-t5.json"))),
        tokenizer_2=tokenizer(512),
        transformer=FluxTransformer2DModel.from_config(config("tiny-flux-transformer.json")),
        vae=AutoencoderKL.from_config(config("tiny-flux-vae.json")),
    )
    pipe.default_sample_size = 128 // pipe.vae_scale_factor  # pictures of 128 x 128
    pipe.set_progress_bar_config(disable=True)
    for module in pipe.components.values():
        if isinstance(module, torch.nn.Module):
            module.eval()  # as `from_pretrained` does: otherwise dropout makes every call different
    return pipe

"""Tiny random FLUX and SDXL parts, small enough to run many times; the shapes of their networks are the real ones."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

TOKENS = 8


def _clip(width: int, projection: int = 16) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        projection_dim=projection,
        hidden_act="quick_gelu",
        bos_token_id=0,
        eos_token_id=1,
    )


def _vae(latent_channels: int) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=latent_channels,
        norm_num_groups=4,
        layers_per_block=1,
        shift_factor=0.1,
    )


def flux_parts(dtype: torch.dtype) -> dict[str, nn.Module]:
    """FLUX: CLIP, T5, transformer (2 double and 3 single blocks), VAE."""
    torch.manual_seed(0)
    parts: dict[str, nn.Module] = {
        "text_encoder": CLIPTextModel(_clip(16)),
        "text_encoder_2": T5EncoderModel(T5Config(vocab_size=64, d_model=24, d_kv=8, d_ff=48, num_layers=2, num_heads=3, feed_forward_proj="gated-gelu")),
        "transformer": FluxTransformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=24,
            pooled_projection_dim=16,
            guidance_embeds=True,
            axes_dims_rope=(4, 4, 8),
        ),
        "vae": _vae(4),
    }
    return {name: part.to(dtype).eval().requires_grad_(False) for name, part in parts.items()}


def sdxl_parts(dtype: torch.dtype) -> dict[str, nn.Module]:
    """SDXL: two CLIPs, UNet with cross attention, VAE."""
    torch.manual_seed(0)
    parts: dict[str, nn.Module] = {
        "text_encoder": CLIPTextModel(_clip(16)),
        "text_encoder_2": CLIPTextModelWithProjection(_clip(16, projection=16)),
        "unet": UNet2DConditionModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=2,
            attention_head_dim=(2, 4),
            use_linear_projection=True,
            cross_attention_dim=32,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=8 * 6 + 16,
            norm_num_groups=4,
        ),
        "vae": _vae(4),
    }
    return {name: part.to(dtype).eval().requires_grad_(False) for name, part in parts.items()}


def embed_ids(batch: int) -> torch.Tensor:
    """Token ids [batch TOKENS] that end with the end token."""
    ids = (torch.arange(TOKENS) * 7 % 60 + 2).repeat(batch, 1)
    ids[:, -1] = 1
    return ids

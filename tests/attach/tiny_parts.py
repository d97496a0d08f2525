"""Tiny components of the classes that pipelines are built from. Weights are random, and the same for a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers as d
import transformers as t
from tokenizers import Tokenizer

BYTES = Path(__file__).parent.parent.parent / "graphs" / "tokenizers" / "bytes.json"
WIDTH = 32  # of every text encoder
HIDDEN = 1024  # inside their layers: weights that take memory but little time
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TOKENS = {"bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 0, "vocab_size": 320}
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def tokenizer(length: int = 77) -> Any:
    words = Tokenizer.from_file(str(BYTES))
    marks = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return t.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=length, chat_template=CHAT, **marks)


def clip(kind: Any = t.CLIPTextModel, projection: int = WIDTH, **options: Any) -> Any:
    return kind(
        t.CLIPTextConfig(
            hidden_size=WIDTH,
            intermediate_size=HIDDEN,
            num_hidden_layers=4,
            num_attention_heads=4,
            projection_dim=projection,
            **TOKENS,
            **options,
        )
    )


def clip_projected(**options: Any) -> Any:
    return clip(t.CLIPTextModelWithProjection, **options)


def vision(size: int = 32, patch: int = 8) -> Any:
    return t.CLIPVisionModelWithProjection(
        t.CLIPVisionConfig(
            hidden_size=WIDTH,
            intermediate_size=HIDDEN,
            num_hidden_layers=4,
            num_attention_heads=4,
            projection_dim=WIDTH,
            image_size=size,
            patch_size=patch,
        )
    )


def vision_processor(size: int = 32) -> Any:
    return t.CLIPImageProcessor(crop_size={"height": size, "width": size}, size={"shortest_edge": size})


def t5(kind: Any = t.T5EncoderModel, config: Any = t.T5Config) -> Any:
    return kind(config(d_model=WIDTH, d_kv=8, d_ff=HIDDEN, num_layers=4, num_heads=4, decoder_start_token_id=0, **TOKENS))


def umt5() -> Any:
    return t5(t.UMT5EncoderModel, t.UMT5Config)


def gemma() -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    return t.Gemma2Model(t.Gemma2Config(hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=4, **heads, **TOKENS))


def qwen3() -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    return t.Qwen3Model(t.Qwen3Config(hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=4, **heads, **TOKENS))


def qwen_vl() -> Any:
    text = {
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"mrope_section": [2, 2, 4], "rope_type": "default", "rope_theta": 1e6},
        **TOKENS,
    }
    seen = {"depth": 2, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_heads": 2, "out_hidden_size": WIDTH}
    ids = {"vision_start_token_id": 300, "vision_end_token_id": 301, "vision_token_id": 302, "image_token_id": 303}
    return t.Qwen2_5_VLForConditionalGeneration(t.Qwen2_5_VLConfig(text_config=text, vision_config=seen, **ids))


def glm() -> Any:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = t.GlmConfig(hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=4, rope_parameters=rope, **heads, **TOKENS)
    return t.GlmModel(config)


def vae(latent: int = 4, **options: Any) -> Any:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    sizes = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 32}
    return d.AutoencoderKL(latent_channels=latent, **{**blocks, **sizes, **options})


def flow_vae(latent: int = 4) -> Any:
    return vae(latent, shift_factor=0.06, scaling_factor=1.5, use_quant_conv=False, use_post_quant_conv=False)


def unet(**options: Any) -> Any:
    usual = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": (2, 4),
        "cross_attention_dim": WIDTH,
        "norm_num_groups": 4,
    }
    return d.UNet2DConditionModel(**{**usual, **options})


def unet_xl(**options: Any) -> Any:
    xl = {
        "transformer_layers_per_block": (1, 2),
        "use_linear_projection": True,
        "cross_attention_dim": 2 * WIDTH,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + WIDTH,
    }
    return unet(**{**xl, **options})


def unet_if(channels: int = 3, **options: Any) -> Any:
    return unet(
        sample_size=16,
        in_channels=channels,
        out_channels=6,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        encoder_hid_dim=WIDTH,
        attention_head_dim=8,
        addition_embed_type="text",
        addition_embed_type_num_heads=2,
        cross_attention_norm="group_norm",
        resnet_time_scale_shift="scale_shift",
        act_fn="gelu",
        **options,
    )


def unet_kandinsky() -> Any:
    return unet(
        out_channels=8,
        block_out_channels=(32, 32),
        addition_embed_type="image",
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        encoder_hid_dim=WIDTH,
        encoder_hid_dim_type="image_proj",
        attention_head_dim=4,
        resnet_time_scale_shift="scale_shift",
    )


def prior() -> Any:
    made = d.PriorTransformer(num_attention_heads=2, attention_head_dim=12, embedding_dim=WIDTH, num_layers=4)
    made.clip_std.data.fill_(1.0)
    return made


def movq() -> Any:
    return d.VQModel(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
        up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=32,
        norm_type="spatial",
        num_vq_embeddings=12,
        vq_embed_dim=4,
    )


def flux(channels: int = 16, out: int | None = None, **options: Any) -> Any:
    return d.FluxTransformer2DModel(
        patch_size=1,
        in_channels=channels,
        out_channels=out,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
        **options,
    )


def sd3(kind: Any = d.SD3Transformer2DModel, layers: int = 6, channels: int = 4) -> Any:
    return kind(
        sample_size=32,
        patch_size=1,
        in_channels=channels,
        out_channels=channels,
        num_layers=layers,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=2 * WIDTH,
    )


def dit(kind: Any, **options: Any) -> Any:
    return kind(**{"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_attention_heads": 4, "num_layers": 6, **options})


def plain_unet() -> Any:
    return d.UNet2DModel(
        sample_size=8,
        layers_per_block=2,
        block_out_channels=(32, 64, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )


def wan(kind: Any = d.WanTransformer3DModel, channels: int = 16, **options: Any) -> Any:
    return kind(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=channels,
        out_channels=16,
        text_dim=WIDTH,
        freq_dim=32,
        ffn_dim=64,
        num_layers=6,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
        **options,
    )


def wan_vae() -> Any:
    return d.AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )


def cogvideox(channels: int = 4) -> Any:
    return d.CogVideoXTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=channels,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=WIDTH,
        num_layers=4,
        sample_width=2,
        sample_height=2,
        sample_frames=9,
        patch_size=2,
        max_text_seq_length=16,
    )


def cogvideox_vae() -> Any:
    return d.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    )


def ltx() -> Any:
    return d.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=6,
        caption_channels=WIDTH,
    )


def ltx_vae() -> Any:
    made = d.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    made.use_framewise_encoding = made.use_framewise_decoding = False
    return made


def cascade(kind: str) -> Any:
    usual = {
        "conditioning_dim": 32,
        "block_out_channels": (32, 32),
        "num_attention_heads": (2, 2),
        "down_num_layers_per_block": (1, 2),
        "up_num_layers_per_block": (2, 1),
        "clip_image_in_channels": WIDTH,
        "switch_level": (False,),
        "clip_text_in_channels": WIDTH,
        "clip_text_pooled_in_channels": WIDTH,
    }
    if kind == "prior":
        return d.StableCascadeUNet(in_channels=4, out_channels=4, **usual)
    decoder = {"in_channels": 4, "out_channels": 4, "effnet_in_channels": 4, "patch_size": 1}
    return d.StableCascadeUNet(**{**usual, **decoder, "switch_level": None, "clip_text_in_channels": None})


def animated() -> dict[str, Any]:
    motion = d.MotionAdapter(
        block_out_channels=(16, 32), motion_layers_per_block=1, motion_norm_num_groups=4, motion_num_attention_heads=2
    )
    return {"unet": unet(attention_head_dim=4), "motion_adapter": motion}


def controlnet(of: Any, **options: Any) -> Any:
    made = d.ControlNetModel.from_unet(of, conditioning_channels=3, **options)
    for module in made.controlnet_down_blocks:  # initialized to zero, so they would have no effect
        module.weight.data.normal_(std=0.1)
    return made

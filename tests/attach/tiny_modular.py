"""Tiny pipelines of this year's models, which diffusers has as modular pipelines only."""

from __future__ import annotations

from typing import Any

import diffusers as d
import torch
import transformers as t
from tiny_pipelines import frozen, tiny

WORDS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
VOCABULARY = 600


class TextProcessor(t.ProcessorMixin):  # type: ignore[misc]
    """Qwen3-VL's processor for texts alone. The whole one needs torchvision, for videos."""

    attributes = ("tokenizer",)
    tokenizer_class = "PreTrainedTokenizerFast"
    image_token_ids: tuple[int, ...] = ()
    video_token_ids: tuple[int, ...] = ()
    audio_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Any = None, **settings: Any) -> None:
        super().__init__(tokenizer)

    def __call__(self, text: list[str], **settings: Any) -> Any:
        return self.tokenizer(text, **settings)

    def apply_chat_template(self, messages: Any, **settings: Any) -> list[list[int]]:
        text = "".join(item["text"] for message in messages for item in message["content"])
        return [self.tokenizer(text).input_ids]


def qwen_tokenizer() -> Any:
    tokenizer = tiny("tokenizer", model_max_length=512)
    tokenizer.add_special_tokens({"additional_special_tokens": WORDS})
    return tokenizer


def qwen3_vl(tokenizer: Any, layers: int = 2) -> Any:
    """A tiny Qwen3-VL whose image slots are the words of ``tokenizer``."""
    start, end, image, video = tokenizer.convert_tokens_to_ids(WORDS)
    text = {
        "hidden_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 37,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [1, 1, 2],
        },
    }
    vision = {
        "depth": 2,
        "num_heads": 4,
        "hidden_size": 32,
        "intermediate_size": 37,
        "out_hidden_size": 16,
        "deepstack_visual_indexes": [0],
    }
    return t.Qwen3VLForConditionalGeneration(
        t.Qwen3VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=image,
            video_token_id=video,
            vision_start_token_id=start,
            vision_end_token_id=end,
        )
    )


def qwen_image_21() -> Any:
    """Qwen-Image 2.1: its denoising steps share a cache of keys and values."""
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    pipe = d.QwenImage21AutoBlocks().init_pipeline()
    pipe.update_components(
        text_encoder=qwen3_vl(tokenizer),
        processor=TextProcessor(tokenizer),
        transformer=d.QwenImage21Transformer2DModel(
            in_channels=8,
            out_channels=8,
            num_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=16,
            axes_dims_rope=(4, 6, 6),
        ),
        vae=d.AutoencoderKLQwenImage21(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=8,
            dim_mult=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.0] * 8,
            latents_std=[1.0] * 8,
        ),
        scheduler=d.FlowMatchEulerDiscreteScheduler(),
    )
    pipe.set_progress_bar_config(disable=True)
    return frozen(pipe)


def ltx_25_decoder() -> Any:
    """A pipeline of LTX-2.5's diffusion decoder."""
    torch.manual_seed(0)
    pipe = d.LTX2VideoDiffusionDecodePipeline(
        diffusion_decoder=diffusion_decoder(8), scheduler=d.FlowMatchEulerDiscreteScheduler()
    )
    pipe.set_progress_bar_config(disable=True)
    return frozen(pipe)


def diffusion_decoder(latent_channels: int) -> Any:
    """LTX-2.5's diffusion decoder, whose blocks use flex attention."""
    return d.LTX2VideoDiffusionDecoderModel(
        latent_channels=latent_channels,
        decoder_head_dim=16,
        decoder_stage_channels=(256, 128, 64, 64, 32),
        decoder_stage_depths=(1, 1, 1, 1, 2),
        decoder_stage_kernels=((1, 1, 1), (1, 3, 3), (1, 3, 3), (1, 3, 3)),
        decoder_stage5_kernel=(1, 3, 3),
        decoder_t_emb_dim=32,
    )


def minimax_h3() -> Any:
    """MiniMax-H3: text, sound and video are one packed sequence, whose rows are addressed by
    indices."""
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    pipe = d.MiniMaxH3Blocks().get_workflow("t2va").init_pipeline()
    pipe.update_components(
        text_encoder=qwen3_vl(tokenizer, layers=51),  # the 50th layer's output is what it reads
        tokenizer=tokenizer,
        processor=TextProcessor(tokenizer),
        transformer=d.MiniMaxH3Transformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            hidden_size=24,
            num_layers=3,
            num_refiner_layers=1,
            ffn_dim=48,
            in_channels=4,
            audio_in_channels=8,
            text_dim=16,
            freq_dim=16,
            time_embed_hidden_dim=24,
            time_embed_dim=16,
            rope_freq_dim=2,
        ),
        vae=d.AutoencoderKLMiniMaxH3(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            spatial_downsample_factors=(2, 2, 2, 2),
            temporal_downsample_factors=(1, 2, 2, 1),
            norm_num_groups=4,
            decoder_num_layers=3,
            decoder_num_attention_heads=2,
            decoder_attention_head_dim=16,
            decoder_num_register_tokens=2,
            decoder_ffn_mult=2,
            latents_mean=(0.0,) * 4,
            latents_std=(1.0,) * 4,
        ),
        audio_vae=d.AutoencoderKLMiniMaxH3Audio(
            encoder_dim=4,
            encoder_rates=(2, 2),
            latent_dim=32,
            latent_channels=8,
            num_attention_heads=2,
            decoder_dim=16,
            decoder_rates=(2, 2),
            decoder_kernel_sizes=(4, 4),
            resblock_kernel_sizes=(3, 7),
            resblock_dilation_sizes=((1, 3), (1, 3)),
            latents_mean=[0.0] * 8,
            latents_std=[1.0] * 8,
        ),
        scheduler=d.MiniMaxH3Scheduler(),
        audio_scheduler=d.MiniMaxH3Scheduler(shift=3.0),
    )
    pipe.set_progress_bar_config(disable=True)
    return frozen(pipe)


def cosmos3() -> Any:
    """Cosmos 3: one transformer reads the tokens of the text and of the video."""
    return _cosmos3(d.Cosmos3OmniModularPipeline(), d.UniPCMultistepScheduler())


def cosmos3_distilled() -> Any:
    """Cosmos 3 of four steps, whose noise levels are in its configuration."""
    pipe = _cosmos3(d.Cosmos3DistilledModularPipeline(), d.FlowMatchEulerDiscreteScheduler())
    pipe.update_components(distilled_sigmas=[1.0, 0.9, 0.75, 0.5])
    return pipe


def _cosmos3(pipe: Any, scheduler: Any) -> Any:
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    )
    pipe.update_components(
        text_tokenizer=tokenizer,
        transformer=d.Cosmos3OmniTransformer(
            head_dim=8,
            hidden_size=16,
            intermediate_size=32,
            latent_channel=16,
            latent_patch_size=1,
            num_attention_heads=2,
            num_hidden_layers=3,
            num_key_value_heads=1,
            patch_latent_dim=16,
            rope_axes_dim=[2, 1, 1],
            vocab_size=VOCABULARY,
        ),
        vae=tiny("AutoencoderKLWan", z_dim=16),
        scheduler=scheduler,
        enable_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return frozen(pipe)

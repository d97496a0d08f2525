"""Tiny pipelines of many classes: which parts each has, and how it is called. Data for the tests that attach to them.

A case makes its parts and its arguments anew each time, the same each time. What is called ``None`` is optional and absent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers as d
import numpy as np
import tiny_parts as p
import torch
from PIL import Image

from graphrun.report.summary import broken_caps

PROMPT = "a lighthouse at dusk"
SAFE = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
SMALL = {"height": 16, "width": 16}


@dataclass(frozen=True)
class Case:
    """A pipeline class to test. ``family``: its task. ``parts`` and ``arguments`` return what it is built from and called with."""

    kind: Any
    family: str
    parts: Callable[[], dict[str, Any]]
    arguments: Callable[[], dict[str, Any]]
    steps: int = 2

    def build(self) -> Any:
        """The pipeline on the CPU, in eval mode, with random weights."""
        torch.manual_seed(0)
        pipe = self.kind(**self.parts())
        pipe.set_progress_bar_config(disable=True)
        for module in pipe.components.values():
            if isinstance(module, torch.nn.Module):
                module.eval().requires_grad_(False)
        return pipe

    def call(self, pipe: Any, put: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu) -> Any:
        """The output of ``pipe`` for the arguments, with fresh generators. ``put`` moves argument tensors to a device."""
        torch.manual_seed(1)
        given = {name: put(value) if isinstance(value, torch.Tensor) else value for name, value in self.arguments().items()}
        generator = {} if self.steps == 0 else {"generator": torch.Generator().manual_seed(3)}
        return pipe(**{**({"num_inference_steps": self.steps} if self.steps else {}), **generator, **given})


def picture(size: int = 16, seed: int = 0) -> Any:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8))


def mask(size: int = 16) -> Any:
    half = np.zeros((size, size), dtype=np.uint8)
    half[: size // 2] = 255
    return Image.fromarray(half)


def film(frames: int, size: int = 16) -> list[Any]:
    return [picture(size, seed) for seed in range(frames)]


def texts(**more: Any) -> Callable[[], dict[str, Any]]:
    """Arguments: a prompt, arrays as output, and ``more``; callables in it are called."""

    def made() -> dict[str, Any]:
        filled = {name: value() if callable(value) else value for name, value in more.items()}
        return {"prompt": PROMPT, "output_type": "np", **filled}

    return made


def pictures(**more: Any) -> Callable[[], dict[str, Any]]:
    def made() -> dict[str, Any]:
        return {name: value for name, value in texts(**more)().items() if name != "prompt"}

    return made


# -- parts by family


def sd(**unet: Any) -> Callable[[], dict[str, Any]]:
    def parts() -> dict[str, Any]:
        return {
            "text_encoder": p.clip(),
            "tokenizer": p.tokenizer(),
            "unet": p.unet(**unet),
            "vae": p.vae(),
            "scheduler": d.DDIMScheduler(**p.BETAS, clip_sample=False, set_alpha_to_one=False),
            **SAFE,
        }

    return parts


def sdxl(refiner: bool = False, **unet: Any) -> Callable[[], dict[str, Any]]:
    def parts() -> dict[str, Any]:
        return {
            "text_encoder": p.clip(),
            "tokenizer": p.tokenizer(),
            "text_encoder_2": p.clip_projected(),
            "tokenizer_2": p.tokenizer(),
            "unet": p.unet_xl(**unet),
            "vae": p.vae(),
            "scheduler": d.EulerDiscreteScheduler(**p.BETAS),
        }

    return parts


def with_controlnet(base: Callable[[], dict[str, Any]], nets: int = 1) -> Callable[[], dict[str, Any]]:
    def parts() -> dict[str, Any]:
        made = base()
        found = [p.controlnet(made["unet"], conditioning_embedding_out_channels=(8, 8)) for _ in range(nets)]
        return {**made, "controlnet": found[0] if nets == 1 else found}

    return parts


def plus(base: Callable[[], dict[str, Any]], **more: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    def parts() -> dict[str, Any]:
        return {**base(), **{name: make() if callable(make) else make for name, make in more.items()}}

    return parts


def halved(base: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """The parts in float16, as ``torch_dtype=torch.float16`` loads them: pipelines cast their VAE to fp32 and back in the call."""
    return lambda: {name: part.half() if isinstance(part, torch.nn.Module) else part for name, part in base().items()}


def without(base: Callable[[], dict[str, Any]], *names: str) -> Callable[[], dict[str, Any]]:
    return lambda: {name: part for name, part in base().items() if name not in names}


def sd3(channels: int = 4, **more: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    def parts() -> dict[str, Any]:
        return {
            "transformer": p.sd3(channels=channels),
            "text_encoder": p.clip_projected(),
            "tokenizer": p.tokenizer(),
            "text_encoder_2": p.clip_projected(),
            "tokenizer_2": p.tokenizer(),
            "text_encoder_3": p.t5(),
            "tokenizer_3": p.tokenizer(),
            "vae": p.flow_vae(channels),
            "scheduler": d.FlowMatchEulerDiscreteScheduler(),
            **{name: make() for name, make in more.items()},
        }

    return parts


def flux(channels: int = 16, out: int | None = None, **more: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    def parts() -> dict[str, Any]:
        return {
            "transformer": p.flux(channels, out),
            "text_encoder": p.clip(),
            "tokenizer": p.tokenizer(),
            "text_encoder_2": p.t5(),
            "tokenizer_2": p.tokenizer(),
            "vae": p.flow_vae(),
            "scheduler": d.FlowMatchEulerDiscreteScheduler(),
            **{name: make() for name, make in more.items()},
        }

    return parts


def t5_and(**more: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    def parts() -> dict[str, Any]:
        usual = {"text_encoder": p.t5, "tokenizer": p.tokenizer, "vae": p.vae, "scheduler": d.FlowMatchEulerDiscreteScheduler}
        return {name: make() for name, make in {**usual, **more}.items()}

    return parts


def wan(channels: int = 16, **more: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return t5_and(**{"transformer": lambda: p.wan(channels=channels), "vae": p.wan_vae, **more})


def cogvideox(channels: int = 4) -> Callable[[], dict[str, Any]]:
    return t5_and(transformer=lambda: p.cogvideox(channels), vae=p.cogvideox_vae, scheduler=d.CogVideoXDDIMScheduler)


def kandinsky_prior() -> dict[str, Any]:
    return {
        "prior": p.prior(),
        "image_encoder": p.vision(),
        "text_encoder": p.clip_projected(),
        "tokenizer": p.tokenizer(),
        "scheduler": d.UnCLIPScheduler(variance_type="fixed_small_log", prediction_type="sample", clip_sample_range=10.0),
        "image_processor": p.vision_processor(),
    }


def kandinsky() -> dict[str, Any]:
    return {"unet": p.unet_kandinsky(), "movq": p.movq(), "scheduler": d.DDIMScheduler(**p.BETAS, clip_sample=False)}


def combined(prior: dict[str, Any], decoder: dict[str, Any]) -> dict[str, Any]:
    return {**decoder, **{f"prior_{name}": part for name, part in prior.items()}}


def embeds(*shape: int, seed: int = 0) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cascade_prior() -> dict[str, Any]:
    return {
        "prior": p.cascade("prior"),
        "text_encoder": p.clip_projected(),
        "tokenizer": p.tokenizer(),
        "scheduler": d.DDPMWuerstchenScheduler(),
        "feature_extractor": None,
        "image_encoder": None,
    }


def cascade_decoder() -> dict[str, Any]:
    from diffusers.pipelines.deprecated.wuerstchen import PaellaVQModel

    return {
        "decoder": p.cascade("decoder"),
        "text_encoder": p.clip_projected(),
        "tokenizer": p.tokenizer(),
        "vqgan": PaellaVQModel(bottleneck_blocks=1, num_vq_embeddings=2),
        "scheduler": d.DDPMWuerstchenScheduler(),
        "latent_dim_scale": 4.0,
    }


def deepfloyd(channels: int = 3, **more: Any) -> Callable[[], dict[str, Any]]:
    def parts() -> dict[str, Any]:
        options = {"class_embed_type": "timestep"} if channels == 6 else {}
        return {
            "text_encoder": p.t5(),
            "tokenizer": p.tokenizer(),
            "unet": p.unet_if(channels, **options),
            "scheduler": d.DDPMScheduler(variance_type="learned_range"),
            "watermarker": None,
            "safety_checker": None,
            "feature_extractor": None,
            "requires_safety_checker": False,
            **({"image_noising_scheduler": d.DDPMScheduler()} if channels == 6 else {}),
        }

    return parts


def unclip() -> dict[str, Any]:
    from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import StableUnCLIPImageNormalizer

    return {
        "prior_tokenizer": p.tokenizer(),
        "prior_text_encoder": p.clip_projected(),
        "prior": p.prior(),
        "prior_scheduler": d.DDPMScheduler(variance_type="fixed_small_log", prediction_type="sample"),
        "image_normalizer": StableUnCLIPImageNormalizer(embedding_dim=p.WIDTH),
        "image_noising_scheduler": d.DDPMScheduler(),
        "tokenizer": p.tokenizer(),
        "text_encoder": p.clip(),
        "unet": p.unet(class_embed_type="projection", projection_class_embeddings_input_dim=2 * p.WIDTH),
        "scheduler": d.DDIMScheduler(**p.BETAS),
        "vae": p.vae(),
    }


def stable_video() -> dict[str, Any]:
    unet = d.UNetSpatioTemporalConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=8,
        in_channels=8,
        out_channels=4,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=p.WIDTH,
        num_attention_heads=4,
        projection_class_embeddings_input_dim=3 * 8,
        addition_time_embed_dim=8,
    )
    vae = d.AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4, layers_per_block=1
    )
    return {
        "unet": unet,
        "vae": vae,
        "image_encoder": p.vision(224, 56),
        "feature_extractor": p.vision_processor(224),
        "scheduler": d.EulerDiscreteScheduler(**p.BETAS, prediction_type="v_prediction"),
    }


def stable_audio() -> dict[str, Any]:
    encoder = p.t5()
    return {
        "transformer": d.StableAudioDiTModel(
            sample_size=4,
            in_channels=3,
            num_layers=4,
            attention_head_dim=8,
            num_attention_heads=4,
            num_key_value_attention_heads=2,
            out_channels=3,
            cross_attention_dim=16,
            time_proj_dim=8,
            global_states_input_dim=32,
            cross_attention_input_dim=16,
        ),
        "scheduler": d.EDMDPMSolverMultistepScheduler(solver_order=2, prediction_type="v_prediction", sigma_data=1.0),
        "vae": d.AutoencoderOobleck(
            encoder_hidden_size=6,
            downsampling_ratios=[1, 2],
            decoder_channels=3,
            decoder_input_channels=3,
            audio_channels=2,
            channel_multiples=[2, 4],
            sampling_rate=4,
        ),
        "text_encoder": encoder,
        "tokenizer": p.tokenizer(25),
        "projection_model": d.StableAudioProjectionModel(p.WIDTH, 16, 0, 32),
    }


def sana() -> dict[str, Any]:
    blocks = ("ResBlock", "EfficientViTBlock")
    return {
        "transformer": d.SanaTransformer2DModel(
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            num_attention_heads=4,
            attention_head_dim=8,
            num_cross_attention_heads=4,
            cross_attention_head_dim=8,
            cross_attention_dim=32,
            caption_channels=p.WIDTH,
            sample_size=32,
        ),
        "vae": d.AutoencoderDC(
            in_channels=3,
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_types=blocks,
            decoder_block_types=blocks,
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            downsample_block_type="conv",
            upsample_block_type="interpolate",
            decoder_norm_types="rms_norm",
            decoder_act_fns="silu",
        ),
        "text_encoder": p.gemma(),
        "tokenizer": p.tokenizer(),
        "scheduler": d.FlowMatchEulerDiscreteScheduler(),
    }


def marigold() -> dict[str, Any]:
    return {
        **without(sd(in_channels=8), *SAFE)(),
        "scheduler": d.LCMScheduler(**p.BETAS, prediction_type="v_prediction", clip_sample=False),
        "prediction_type": "depth",
        "scale_invariant": True,
        "shift_invariant": True,
    }


def qwen_image() -> dict[str, Any]:
    return {
        "transformer": d.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=4,
            attention_head_dim=16,
            num_attention_heads=3,
            joint_attention_dim=p.WIDTH,
            axes_dims_rope=(8, 4, 4),
        ),
        "vae": d.AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 2, 4],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        "scheduler": d.FlowMatchEulerDiscreteScheduler(),
        "text_encoder": p.qwen_vl(),
        "tokenizer": p.tokenizer(512),
    }


def z_image() -> dict[str, Any]:
    transformer = d.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=4,
        dim=32,
        n_layers=4,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=p.WIDTH,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    transformer.x_pad_token.data.fill_(1.0)
    transformer.cap_pad_token.data.fill_(1.0)
    return {
        "transformer": transformer,
        "vae": p.flow_vae(),
        "scheduler": d.FlowMatchEulerDiscreteScheduler(),
        "text_encoder": p.qwen3(),
        "tokenizer": p.tokenizer(512),
    }


ATTENTION = {"attention_head_dim": 8}
IMAGE = {"image": picture, "strength": 0.9}
CONTROL = {"control_image": picture}
DIT = {
    "pixart": {"caption_channels": p.WIDTH, "cross_attention_dim": 32, "out_channels": 8, **ATTENTION},
    "aura": {"num_mmdit_layers": 2, "num_single_dit_layers": 4, "joint_attention_dim": p.WIDTH, "caption_projection_dim": 32},
    "cogview": {"text_embed_dim": p.WIDTH, "time_embed_dim": 8, "condition_dim": 2, "out_channels": 4, **ATTENTION},
}


def pixart() -> Any:
    return p.dit(d.PixArtTransformer2DModel, norm_type="ada_norm_single", attention_bias=True, **DIT["pixart"])


def aura() -> Any:
    sizes = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "attention_head_dim": 8}
    return d.AuraFlowTransformer2DModel(num_attention_heads=4, pos_embed_max_size=64, **sizes, **DIT["aura"])


def cogview4() -> dict[str, Any]:
    return t5_and(
        text_encoder=p.glm,
        transformer=lambda: p.dit(
            d.CogView4Transformer2DModel, attention_head_dim=32, num_attention_heads=2, rope_axes_dim=(32, 32), **COGVIEW4
        ),
    )()


COGVIEW4 = {key: value for key, value in DIT["cogview"].items() if key != "attention_head_dim"} | {"pos_embed_max_size": 32}


def cases() -> dict[str, Case]:
    """Every case by the name of its class, some with a suffix."""
    from tiny_cases import listed

    return {name: Case(*row) for name, row in listed().items()}


def checked_peak_bytes(attached: Any, device: Any) -> int:
    """The peak of the last run in bytes. Asserts that it left nothing on ``device``, was not replanned and broke no cap."""
    assert device.allocated_bytes == 0
    assert attached.solution is not None
    assert attached.trace is not None
    assert broken_caps(attached.solution, attached.trace) == []
    assert attached.replans == ()
    return int(attached.trace.peak_bytes)

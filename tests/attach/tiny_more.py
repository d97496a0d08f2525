"""More rows of the table of cases: classes built from the parts of other cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers as d
import tiny_parts as p
from tiny_pipelines import (
    CONTROL,
    IMAGE,
    SMALL,
    cogvideox,
    combined,
    embeds,
    kandinsky,
    kandinsky_prior,
    marigold,
    mask,
    picture,
    pictures,
    pixart,
    plus,
    qwen_image,
    sana,
    sd,
    sd3,
    sdxl,
    t5_and,
    texts,
    unclip,
    wan,
    with_controlnet,
    without,
    z_image,
)

Row = tuple[Any, ...]
MASKED = {"mask_image": mask, **IMAGE}
FLOW = {"max_sequence_length": 16}


def more() -> dict[str, Row]:
    """Rows by name."""
    groups = (guided(), controlled(), flows(), hints(), films())
    return {name: row for group in groups for name, row in group.items()}


def guided() -> dict[str, Row]:
    small = texts(**SMALL)
    return {
        "StableDiffusionPAGImg2ImgPipeline": (d.StableDiffusionPAGImg2ImgPipeline, "image to image", sd(), texts(**IMAGE)),
        "StableDiffusionPAGInpaintPipeline": (
            d.StableDiffusionPAGInpaintPipeline,
            "inpaint",
            sd(in_channels=9),
            texts(**MASKED, **SMALL),
        ),
        "StableDiffusionXLPAGImg2ImgPipeline": (d.StableDiffusionXLPAGImg2ImgPipeline, "image to image", sdxl(), texts(**IMAGE)),
        "StableDiffusionXLPAGInpaintPipeline": (
            d.StableDiffusionXLPAGInpaintPipeline,
            "inpaint",
            sdxl(in_channels=9),
            texts(**MASKED, **SMALL),
        ),
        "StableDiffusion3PAGPipeline": (
            d.StableDiffusion3PAGPipeline,
            "text to image",
            lambda: {**sd3()(), "pag_applied_layers": ["blocks.1"]},
            texts(**FLOW, **SMALL),
        ),
        "PixArtSigmaPAGPipeline": (
            d.PixArtSigmaPAGPipeline,
            "text to image",
            lambda: {
                **t5_and(transformer=pixart, scheduler=lambda: d.DDIMScheduler(**p.BETAS))(),
                "pag_applied_layers": ["blocks.1"],
            },
            texts(use_resolution_binning=False, **FLOW, **SMALL),
        ),
        "SanaPAGPipeline": (
            d.SanaPAGPipeline,
            "text to image",
            lambda: {**sana(), "pag_applied_layers": ["blocks.1"]},
            texts(height=32, width=32, complex_human_instruction=None, use_resolution_binning=False, **FLOW),
        ),
        "SemanticStableDiffusionPipeline": (d.SemanticStableDiffusionPipeline, "text to image", sd(), small),
        "StableDiffusionPanoramaPipeline": (d.StableDiffusionPanoramaPipeline, "text to image", sd(), small),
        "LatentConsistencyModelImg2ImgPipeline": (
            d.LatentConsistencyModelImg2ImgPipeline,
            "image to image",
            plus(sd(time_cond_proj_dim=16), scheduler=lambda: d.LCMScheduler(**p.BETAS)),
            texts(**IMAGE),
            4,
        ),
    }


def controlled() -> dict[str, Row]:
    sdxl_net = with_controlnet(sdxl())
    return {
        "StableDiffusionControlNetPAGPipeline": (
            d.StableDiffusionControlNetPAGPipeline,
            "ControlNet",
            with_controlnet(sd()),
            texts(image=picture),
            3,
        ),
        "StableDiffusionXLControlNetInpaintPipeline": (
            d.StableDiffusionXLControlNetInpaintPipeline,
            "ControlNet",
            sdxl_net,
            texts(**MASKED, **CONTROL, **SMALL),
            3,
        ),
    }


def flows() -> dict[str, Row]:
    small = {**FLOW, **SMALL}
    return {
        "QwenImageImg2ImgPipeline": (d.QwenImageImg2ImgPipeline, "image to image", qwen_image, texts(**IMAGE, **small)),
        "ZImageImg2ImgPipeline": (
            d.ZImageImg2ImgPipeline,
            "image to image",
            z_image,
            texts(image=lambda: picture(32), strength=0.9, height=32, width=32, **FLOW),
        ),
    }


def hints() -> dict[str, Row]:
    image = {"image_embeds": embeds(1, p.WIDTH), "negative_image_embeds": embeds(1, p.WIDTH, seed=1)}
    both: Callable[[], Any] = lambda: combined(kandinsky_prior(), kandinsky())  # noqa: E731
    size = {"height": 32, "width": 32}
    return {
        "KandinskyV22Img2ImgPipeline": (
            d.KandinskyV22Img2ImgPipeline,
            "decoder",
            kandinsky,
            pictures(image=lambda: picture(32), strength=0.9, **size, **image),
        ),
        "KandinskyV22InpaintPipeline": (
            d.KandinskyV22InpaintPipeline,
            "inpaint",
            lambda: {**kandinsky(), "unet": kandinsky_unet(9)},
            pictures(image=lambda: picture(32), mask_image=lambda: mask(32), **size, **image),
        ),
        "KandinskyV22Img2ImgCombinedPipeline": (
            d.KandinskyV22Img2ImgCombinedPipeline,
            "prior and decoder",
            both,
            texts(image=lambda: picture(32), strength=0.9, prior_num_inference_steps=2, **size),
        ),
        "KandinskyV22PriorEmb2EmbPipeline": (
            d.KandinskyV22PriorEmb2EmbPipeline,
            "prior",
            kandinsky_prior,
            texts(image=lambda: picture(32), strength=0.9),
        ),
        "StableUnCLIPImg2ImgPipeline": (
            d.StableUnCLIPImg2ImgPipeline,
            "image to image",
            lambda: {
                **without(lambda: {k: v for k, v in unclip().items() if not k.startswith("prior")})(),
                "feature_extractor": p.vision_processor(),
                "image_encoder": p.vision(),
            },
            texts(image=lambda: picture(32), **SMALL),
        ),
        "MarigoldNormalsPipeline": (
            d.MarigoldNormalsPipeline,
            "image to depth",
            lambda: {k: v for k, v in {**marigold(), "prediction_type": "normals"}.items() if "invariant" not in k},
            pictures(image=picture, processing_resolution=0),
        ),
    }


def kandinsky_unet(channels: int) -> Any:
    made = kandinsky()["unet"]
    return type(made).from_config({**made.config, "in_channels": channels})


def films() -> dict[str, Row]:
    clip = {"num_frames": 5, **FLOW, **SMALL}
    return {
        "CogVideoXImageToVideoPipeline": (
            d.CogVideoXImageToVideoPipeline,
            "image to video",
            cogvideox(8),
            texts(image=picture, num_frames=8, **FLOW, **SMALL),
        ),
        "LTXConditionPipeline": (
            d.LTXConditionPipeline,
            "video",
            t5_and(transformer=p.ltx, vae=p.ltx_vae),
            texts(image=lambda: picture(32), height=32, width=32, num_frames=9, **FLOW),
        ),
        "SkyReelsV2Pipeline": (
            d.SkyReelsV2Pipeline,
            "video",
            wan(
                transformer=lambda: p.wan(d.SkyReelsV2Transformer3DModel),
                scheduler=lambda: d.UniPCMultistepScheduler(flow_shift=8.0, use_flow_sigmas=True),
            ),
            texts(**clip),
        ),
    }

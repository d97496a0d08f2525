"""More rows of the table of cases, each for a behaviour that no other has; and classes that were tried by hand."""

from __future__ import annotations

from typing import Any

import diffusers as d
import tiny_parts as p
import transformers as t
from tiny_pipelines import SMALL, film, picture, plus, sdxl, t5_and, texts, wan

Row = tuple[Any, ...]
SIZE = {"height": 32, "width": 32}


def further() -> dict[str, Row]:
    """Rows by name."""
    return {
        # a view of what the VAE returned for the first video is kept while it encodes the second
        "WanVACEPipeline": (
            d.WanVACEPipeline,
            "video",
            wan(transformer=lambda: p.wan(d.WanVACETransformer3DModel, vace_layers=[0, 2], vace_in_channels=96)),
            texts(video=lambda: film(5), num_frames=5, max_sequence_length=16, **SMALL),
        ),
        # a table made on the host goes to the device inside the transformer
        "LuminaPipeline": (
            d.LuminaPipeline,
            "text to image",
            t5_and(text_encoder=gemma, transformer=lumina),
            texts(**SIZE),
        ),
        # the mask says how long a text is
        "Lumina2Pipeline": (
            d.Lumina2Pipeline,
            "text to image",
            t5_and(text_encoder=p.gemma, transformer=lumina2, vae=p.flow_vae),
            texts(max_sequence_length=16, **SIZE),
        ),
        # the UNet removes the adapter's features from the list that it receives
        "StableDiffusionXLAdapterPipeline": (
            d.StableDiffusionXLAdapterPipeline,
            "ControlNet",
            plus(sdxl(), adapter=adapter),
            texts(image=picture, **SMALL),
        ),
    }


def adapter() -> Any:
    widths = [16, 32, 32, 32]
    return d.T2IAdapter(in_channels=3, channels=widths, num_res_blocks=1, downscale_factor=4, adapter_type="full_adapter_xl")


def gemma() -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    return t.GemmaModel(t.GemmaConfig(hidden_size=p.WIDTH, intermediate_size=4096, num_hidden_layers=4, **heads, **p.TOKENS))


def lumina() -> Any:
    return d.LuminaNextDiT2DModel(
        sample_size=4,
        patch_size=2,
        in_channels=4,
        hidden_size=24,
        num_layers=2,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=16,
        cross_attention_dim=p.WIDTH,
    )


def lumina2() -> Any:
    return d.Lumina2Transformer2DModel(
        sample_size=4,
        patch_size=2,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=[8, 4, 4],
        axes_lens=[64, 64, 64],
        cap_feat_dim=p.WIDTH,
    )


# Classes that were tried once by hand, with diffusers 0.42, as the cases are, and worked: by family.
TRIED = {
    "text to image": (
        "AmusedPipeline",
        "BriaFiboPipeline",
        "BriaPipeline",
        "DreamLiteMobilePipeline",
        "DreamLitePipeline",
        "Flux2KleinPipeline",
        "Flux2Pipeline",
        "HiDreamImagePipeline",
        "HunyuanDiTPAGPipeline",
        "HunyuanDiTPipeline",
        "HunyuanImagePipeline",
        "Kandinsky3Pipeline",
        "Kandinsky5T2IPipeline",
        "Krea2Pipeline",
        "LDMTextToImagePipeline",
        "NucleusMoEImagePipeline",
        "OmniGenPipeline",
        "OvisImagePipeline",
        "PRXPipeline",
        "PRXPixelPipeline",
        "SanaSprintPipeline",
        "StableDiffusionGLIGENPipeline",
        "StableDiffusionLDM3DPipeline",
    ),
    "image to image": (
        "AmusedImg2ImgPipeline",
        "ChromaImg2ImgPipeline",
        "Flux2KleinKVPipeline",
        "FluxKontextPipeline",
        "Kandinsky3Img2ImgPipeline",
        "KandinskyImg2ImgPipeline",
        "SanaSprintImg2ImgPipeline",
        "StableDiffusion3PAGImg2ImgPipeline",
        "StableDiffusionDepth2ImgPipeline",
        "StableDiffusionDiffEditPipeline",
        "StableDiffusionXLInstructPix2PixPipeline",
    ),
    "inpaint": (
        "AmusedInpaintPipeline",
        "ChromaInpaintPipeline",
        "Flux2KleinInpaintPipeline",
        "FluxFillPipeline",
        "FluxKontextInpaintPipeline",
        "KandinskyV22InpaintCombinedPipeline",
        "QwenImageInpaintPipeline",
        "RePaintPipeline",
        "ZImageInpaintPipeline",
    ),
    "ControlNet": (
        "AnimateDiffControlNetPipeline",
        "AnimateDiffSparseControlNetPipeline",
        "AnimateDiffVideoToVideoControlNetPipeline",
        "CogView4ControlPipeline",
        "Cosmos2_5_TransferPipeline",
        "FluxControlImg2ImgPipeline",
        "FluxControlInpaintPipeline",
        "FluxControlNetImg2ImgPipeline",
        "FluxControlNetInpaintPipeline",
        "HunyuanDiTControlNetPipeline",
        "KandinskyV22ControlnetPipeline",
        "QwenImageControlNetInpaintPipeline",
        "QwenImageControlNetPipeline",
        "SanaControlNetPipeline",
        "StableDiffusion3ControlNetInpaintingPipeline",
        "StableDiffusionControlNetPAGInpaintPipeline",
        "StableDiffusionControlNetXSPipeline",
        "StableDiffusionXLControlNetPAGImg2ImgPipeline",
        "StableDiffusionXLControlNetPAGPipeline",
        "StableDiffusionXLControlNetXSPipeline",
    ),
    "video": (
        "AllegroPipeline",
        "AnimateDiffPAGPipeline",
        "AnimateDiffSDXLPipeline",
        "AnyFlowPipeline",
        "CogVideoXFunControlPipeline",
        "Cosmos2_5_PredictBasePipeline",
        "CosmosTextToWorldPipeline",
        "HeliosPipeline",
        "HunyuanVideo15Pipeline",
        "HunyuanVideoPipeline",
        "Kandinsky5T2VPipeline",
        "LTX2ConditionPipeline",
        "LTX2HDRPipeline",
        "LTX2InContextPipeline",
        "LTX2Pipeline",
        "LattePipeline",
        "LucyEditPipeline",
        "MochiPipeline",
        "MotifVideoPipeline",
        "SanaVideoPipeline",
        "SkyReelsV2DiffusionForcingPipeline",
        "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
        "TextToVideoSDPipeline",
        "TextToVideoZeroPipeline",
        "VideoToVideoSDPipeline",
    ),
    "image to video": (
        "ChronoEditPipeline",
        "HunyuanSkyreelsImageToVideoPipeline",
        "HunyuanVideoImageToVideoPipeline",
        "LTX2ImageToVideoPipeline",
        "PIAPipeline",
        "SkyReelsV2DiffusionForcingImageToVideoPipeline",
        "SkyReelsV2ImageToVideoPipeline",
    ),
    "image": (
        "ConsistencyModelPipeline",
        "DDPMPipeline",
    ),
    "image to depth": ("MarigoldIntrinsicsPipeline",),
    "prior": (
        "FluxPriorReduxPipeline",
        "KandinskyPriorPipeline",
    ),
    "prior and decoder": (
        "KandinskyCombinedPipeline",
        "KandinskyImg2ImgCombinedPipeline",
        "StableCascadeCombinedPipeline",
    ),
    "upscaling": (
        "LTXLatentUpsamplePipeline",
        "StableDiffusionLatentUpscalePipeline",
    ),
    "audio": (
        "AceStepPipeline",
        "AudioLDMPipeline",
        "LongCatAudioDiTPipeline",
        "StableAudio3Pipeline",
    ),
    "decoder": ("KandinskyPipeline",),
    "3D": (
        "ShapEImg2ImgPipeline",
        "ShapEPipeline",
    ),
}

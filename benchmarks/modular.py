"""Attach to and import every modular pipeline of diffusers, tiny, with random weights.

    python benchmarks/modular.py [CASE ...]    an hour on one core; writes results/modular.json

diffusers' own tests take such pipelines from the hub. Here they are made of the components of the
tiny reference graphs and of `tests/attach/tiny_components.yaml`. Needs torchvision.

A case is a class of blocks and a workflow. `ample` and `least`: the pipeline is attached on the
simulated accelerator with an ample budget and with exactly the least one, called with a text,
another one and the first again, detached, and called once more. `object` and `folder`: the pipeline
is imported, live and from the folder that `save_pretrained` wrote, and runs at its least budget.
Each cell is "equal", if all outputs are the plain pipeline's, bit for bit, and no plan was exceeded
or replaced; else what differs, or graphrun's refusal.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from offline import ROOT, torchvision_operators

OPERATORS = torchvision_operators()

import diffusers as d  # noqa: E402
import numpy as np  # noqa: E402
import tiny_modular  # noqa: E402
import torch  # noqa: E402
import transformers as t  # noqa: E402
from import_whole import GRAPHS, NAMES, SEED, plain, planned, run  # noqa: E402
from tiny_pipelines import cases as plain_cases  # noqa: E402
from tiny_pipelines import film, frozen, mask, picture, tiny  # noqa: E402

import graphrun  # noqa: E402
from graphrun.diffusers_.importing.imported import ImportOptions, import_source  # noqa: E402
from graphrun.errors import GraphrunError  # noqa: E402
from graphrun.graph.loading import load  # noqa: E402
from graphrun.modules.build import build, build_part  # noqa: E402
from graphrun.ops.call import Sound  # noqa: E402
from graphrun.runtime.devices.simulated import SimulatedDevice  # noqa: E402
from graphrun.sim import Machine  # noqa: E402
from graphrun.solve.infeasible import Infeasible  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "modular.json"
SECONDS = 900  # for one case
AMPLE_BYTES = 1 << 40
TEXTS = ("a lighthouse at dusk", "two ships")
TALK = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for item in message['content'] %}{% if item['type'] == 'text' %}{{ item['text'] "
    "}}{% elif item['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


# -- components


def twin(name: str) -> dict[str, Any]:
    """The components of the tiny reference graph ``name``."""
    graph = load(GRAPHS / f"{name}-tiny.yaml")
    parts = {key: build_part(part, graph) for key, part in graph.parts.items()}
    for part in parts.values():  # a graph's tokenizer has a class of its own, which checks texts
        part.__class__ = next(
            base
            for base in type(part).__mro__
            if getattr(importlib.import_module(base.__module__), base.__name__, None) is base
        )
    return parts | {key: build(component, graph) for key, component in graph.components.items()}


def deep_twin(name: str, layers: int) -> dict[str, Any]:
    """The components of `twin`, the text encoder with ``layers`` layers."""
    parts = twin(name)
    encoder = parts["text_encoder"]
    config = encoder.config.to_dict()
    for part in (config, config.get("text_config", {})):
        if "num_hidden_layers" in part:
            part["num_hidden_layers"] = layers
            if "layer_types" in part:
                part["layer_types"] = None
    # a cast would also round tables of positions, which a loaded model computes in fp32
    deep = type(encoder)._from_config(type(encoder.config)(**config), dtype=torch.bfloat16)
    return parts | {"text_encoder": deep}


def krea2() -> dict[str, Any]:
    parts = deep_twin("krea2", 36)
    config = dict(parts["transformer"].config) | {"num_text_layers": 12}
    return parts | {"transformer": d.Krea2Transformer2DModel.from_config(config).bfloat16()}


def of_tests(name: str) -> dict[str, Any]:
    """The components of the tiny pipeline ``name`` of the tests."""
    return plain_cases()[name].parts()


def qwen_processor(kind: str, tokenizer: Any) -> Any:
    version_3 = kind == "Qwen3VLProcessor"
    images = t.Qwen2VLImageProcessor(
        patch_size=16 if version_3 else 14, min_pixels=56 * 56, max_pixels=64 * 64
    )
    videos = (t.Qwen3VLVideoProcessor if version_3 else t.Qwen2VLVideoProcessor)()
    return getattr(t, kind)(images, tokenizer, videos, chat_template=TALK)


def qwen_image_edit() -> dict[str, Any]:
    tokenizer = tiny_modular.qwen_tokenizer()
    start, end, image, video = tokenizer.convert_tokens_to_ids(tiny_modular.WORDS)
    parts = of_tests("QwenImagePipeline")
    config = parts["text_encoder"].config.to_dict()
    config |= {"image_token_id": image, "video_token_id": video}
    config |= {"vision_start_token_id": start, "vision_end_token_id": end}
    config["text_config"]["vocab_size"] = tiny_modular.VOCABULARY
    encoder = t.Qwen2_5_VLForConditionalGeneration(t.Qwen2_5_VLConfig(**config))
    return parts | {
        "text_encoder": encoder,
        "tokenizer": tokenizer,
        "processor": qwen_processor("Qwen2VLProcessor", tokenizer),
        # pictures are resized to 1024 x 1024: a 16th of that makes 1,024 tokens
        "vae": tiny(
            "AutoencoderKLQwenImage",
            base_dim=4,
            dim_mult=[1, 1, 1, 1, 1],
            temperal_downsample=[False, False, True, True],
        ),
    }


def qwen_image_21(**changes: Any) -> dict[str, Any]:
    parts = with_processor(tiny_modular.qwen_image_21())
    parts["processor"].tokenizer.backend_tokenizer.post_processor = None  # it adds no tokens
    return parts | changes


def with_processor(pipe: Any) -> dict[str, Any]:
    """The components of ``pipe``, its processor the whole one."""
    parts = {key: part for key, part in pipe.components.items() if part is not None}
    tokenizer = parts["processor"].tokenizer
    return parts | {"processor": qwen_processor("Qwen3VLProcessor", tokenizer)}


def minimax_h3() -> dict[str, Any]:
    parts = with_processor(tiny_modular.minimax_h3())
    return parts | {"transformer_ref": parts["transformer"]}


def cosmos3(name: str) -> dict[str, Any]:
    pipe = getattr(tiny_modular, name)()
    settings = {
        key: getattr(pipe.config, key)
        for key in ("enable_safety_checker", "distilled_sigmas")
        if key in pipe.config
    }
    return pipe.components | settings


def flux3(flow_map: bool = False) -> dict[str, Any]:
    tokenizer = tiny_modular.qwen_tokenizer()
    tokenizer.chat_template = TALK
    encoder = tiny_modular.qwen3_vl(tokenizer, layers=36)
    width = encoder.config.text_config.hidden_size
    return {
        "text_encoder": encoder,
        "tokenizer": qwen_processor("Qwen3VLProcessor", tokenizer),
        "prompt_upsampler": qwen3_5(tokenizer),
        "prompt_upsampler_processor": qwen_processor("Qwen3VLProcessor", tokenizer),
        "vae": twin("flux2-dev")["vae"].float(),
        "transformer": d.Flux3Transformer2DModel(
            in_channels=16,
            cond_in_channels=16,
            num_layers=1,
            num_single_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=8 * width,
            timestep_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
            flow_map=flow_map,
        ),
    }


def qwen3_5(tokenizer: Any) -> Any:
    """A tiny Qwen3.5, with a linear and a full attention layer."""
    start, end, image, video = tokenizer.convert_tokens_to_ids(tiny_modular.WORDS)
    text = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 37,
        "head_dim": 8,
        "vocab_size": tiny_modular.VOCABULARY,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [1, 1, 2],
        },
    }
    vision = {"depth": 2, "num_heads": 4, "hidden_size": 32, "intermediate_size": 37}
    model = t.Qwen3_5ForConditionalGeneration(
        t.Qwen3_5Config(
            text_config=text,
            vision_config=vision | {"out_hidden_size": 16},
            image_token_id=image,
            video_token_id=video,
            vision_start_token_id=start,
            vision_end_token_id=end,
        )
    )
    model.generation_config.eos_token_id = None
    return model


def anima() -> dict[str, Any]:
    parts = twin("z-image")
    width = parts["text_encoder"].config.hidden_size
    return {
        "text_encoder": parts["text_encoder"].float(),
        "tokenizer": parts["tokenizer"],
        "t5_tokenizer": tiny("tokenizer"),
        "vae": tiny("AutoencoderKLQwenImage"),
        "text_conditioner": d.AnimaTextConditioner(
            source_dim=width,
            target_dim=16,
            model_dim=16,
            num_layers=2,
            num_attention_heads=4,
            target_vocab_size=600,
            min_sequence_length=16,
        ),
        "transformer": d.CosmosTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            mlp_ratio=2,
            text_embed_dim=16,
            adaln_lora_dim=4,
            max_size=(4, 32, 32),
            rope_scale=(1.0, 4.0, 4.0),
            extra_pos_embed_type=None,
        ),
        "scheduler": d.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def ltx25() -> dict[str, Any]:
    parts = twin("ltx2")
    decoder = tiny_modular.diffusion_decoder(parts["vae"].config.latent_channels)
    return parts | {"diffusion_decoder": decoder.bfloat16()}


def helios(stages: int = 3) -> dict[str, Any]:
    parts = of_tests("WanPipeline")
    return {
        "text_encoder": parts["text_encoder"],
        "tokenizer": parts["tokenizer"],
        "vae": parts["vae"],
        "transformer": d.HeliosTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=parts["transformer"].config.in_channels,
            out_channels=parts["transformer"].config.out_channels,
            text_dim=32,
            freq_dim=16,
            ffn_dim=32,
            num_layers=3,
            rope_dim=(4, 4, 4),
        ),
        "scheduler": d.HeliosScheduler(
            stages=stages,
            stage_range=[stage / stages for stage in range(stages + 1)],
            gamma=0.25,  # 1/3 by default, where the noise's covariance is singular but for rounding
        ),
    }


def wan_animate_2() -> dict[str, Any]:
    parts = of_tests("WanImageToVideoPipeline")
    del parts["image_processor"]  # these blocks have one of their own
    # the sizes of pictures and of their embeddings are constants of the blocks and the transformer
    config = t.CLIPVisionConfig(
        image_size=224,
        patch_size=56,
        hidden_size=1280,
        intermediate_size=32,
        num_attention_heads=4,
        num_hidden_layers=3,
    )
    return parts | {
        "image_encoder": t.CLIPVisionModel(config),
        "transformer": d.WanAnimate2Transformer3DModel(
            text_len=16,
            in_dim=36,
            dim=24,
            ffn_dim=32,
            freq_dim=16,
            text_dim=32,
            out_dim=16,
            num_heads=2,
            num_layers=3,
        ),
        "scheduler": d.FlowMatchEulerDiscreteScheduler(shift=5.0),
    }


def minimax_music3() -> dict[str, Any]:
    tokenizer = tiny_modular.qwen_tokenizer()
    return {
        "tokenizer": tokenizer,
        # the numbers of audio tokens are constants of the blocks: 151,675 + 16,384 codes
        "language_model": tiny("Qwen3ForCausalLM", vocab_size=168_064),
        "rvq_depth_decoder": d.MiniMaxMusic3RVQDepthDecoder(
            hidden_size=32,
            num_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            audio_vocab_size=32,
            num_codebooks=3,
        ),
        "condition_encoder": d.MiniMaxMusic3ConditionEncoder(
            condition_hidden_dim=32, num_condition_layers=3, out_dim=32
        ),
        "transformer": d.MiniMaxMusic3Transformer1DModel(
            in_channels=8,
            condition_dim=32,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            ff_inner_dim=32,
            rotary_dim=8,
            fourier_embedding_dim=16,
        ),
        "scheduler": d.FlowMatchEulerDiscreteScheduler(),
        "vocoder": d.MiniMaxMusic3Vocoder(
            latent_channels=8, decoder_input_dim=16, decoder_hidden_dim=32
        ),
    }


def wan_first_and_last() -> dict[str, Any]:
    parts = of_tests("WanImageToVideoPipeline")
    encoder = parts["image_encoder"].config
    tokens = 1 + (encoder.image_size // encoder.patch_size) ** 2
    sizes = {"in_channels": 36, "image_dim": 32, "pos_embed_seq_len": 2 * tokens}
    return parts | {"transformer": tiny("WanTransformer3DModel", **sizes)}


def vace() -> dict[str, Any]:
    parts = of_tests("WanVACEPipeline")
    return parts | {"transformer_2": parts["transformer"]}


def controlled(name: str, **settings: Any) -> dict[str, Any]:
    """SDXL with the ControlNet ``name``."""
    return of_tests("StableDiffusionXLPipeline") | {"controlnet": tiny(name, **settings)}


def controlled_union() -> dict[str, Any]:
    """SDXL with a ControlNet of several kinds."""
    config = tiny("ControlNetModel-xl").config
    names = d.ControlNetUnionModel.__init__.__wrapped__.__code__.co_varnames
    shared = {key: value for key, value in config.items() if key in names and value is not None}
    channels = shared["block_out_channels"][0]
    union = d.ControlNetUnionModel(
        **shared, num_trans_channel=channels, num_trans_head=2, num_proj_channel=channels
    )
    return of_tests("StableDiffusionXLPipeline") | {"controlnet": union}


def hunyuan_video_15() -> dict[str, Any]:
    parts = twin("hunyuan-video15")
    size = {"image_size": 28, "patch_size": 14}
    config = t.SiglipVisionConfig(
        **size,
        hidden_size=parts["transformer"].config.image_embed_dim,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return parts | {
        "image_encoder": t.SiglipVisionModel(config).bfloat16(),
        "feature_extractor": t.SiglipImageProcessor(size={"height": 28, "width": 28}),
    }


def qwen_controlled() -> dict[str, Any]:
    parts = of_tests("QwenImagePipeline")
    config = {
        key: value
        for key, value in parts["transformer"].config.items()
        if key in d.QwenImageControlNetModel.__init__.__wrapped__.__code__.co_varnames
    }
    return parts | {"controlnet": d.QwenImageControlNetModel(**config | {"num_layers": 1})}


# -- cases


@dataclass(frozen=True)
class Case:
    """Blocks of ``kind``, components, and the arguments of a call except the text. ``pruned``: the
    blocks are those of the workflow alone, since others need components."""

    kind: str
    parts: Callable[[], dict[str, Any]]
    arguments: dict[str, Any] = field(default_factory=dict)
    workflow: str = ""
    pruned: bool = False

    def build(self) -> Any:
        torch.manual_seed(0)
        blocks = getattr(d.modular_pipelines, self.kind)()
        if self.pruned:
            blocks = blocks.get_workflow(self.workflow)
        pipe = blocks.init_pipeline()
        names = {*pipe.component_names, *pipe._config_specs} - {"guider"}  # no folder has it
        parts = {key: part for key, part in self.parts().items() if key in names}
        pipe.update_components(**parts)
        pipe.set_progress_bar_config(disable=True)
        return frozen(pipe)

    def call(self, text: str = TEXTS[0]) -> dict[str, Any]:
        return {"prompt": text, "num_inference_steps": 2, **self.arguments}


SMALL = {"height": 32, "width": 32}
MIDDLE = {"height": 64, "width": 64}
SHORT = {"max_sequence_length": 16}
FEW_TOKENS = MIDDLE | {"max_new_tokens": 4}
FIVE = {"num_frames": 5}
NINE = {"num_frames": 9}
IMAGE = {"image": picture(32)}
LARGE_IMAGE = {"image": picture(64)}
MASKED = {"mask_image": mask(32)}
PART = {"strength": 0.9}
PIL = {"output_type": "pil"}  # these blocks paste the picture around the mask
CONTROL = {"control_image": picture(32, 5)}
SIZED = {**SMALL, **SHORT}


def of(name: str) -> Callable[[], dict[str, Any]]:
    return lambda: of_tests(name)


def by(name: str, **changes: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: twin(name) | {key: make() for key, make in changes.items()}


def cases() -> dict[str, Case]:
    """Every case by its name: blocks, and the workflow after a colon."""
    flux, sdxl, qwen = of("FluxPipeline"), of("StableDiffusionXLPipeline"), of("QwenImagePipeline")
    klein, edit = "flux2-klein", {**SIZED, **IMAGE, "_auto_resize": False, "max_area": 32 * 32}
    flux2, short = (lambda: deep_twin("flux2-dev", 31)), {**MIDDLE, **SHORT}
    wan, wan_image = of("WanPipeline"), of("WanImageToVideoPipeline")
    one_stage = partial(helios, 1)
    xl, tiny_video = SMALL, {**SMALL, **NINE, **SHORT}
    pasted = {**IMAGE, **MASKED, **PART, **PIL}
    cosmos, ltx2 = {**SMALL, **FIVE}, {**MIDDLE, **NINE, "max_sequence_length": 32}
    rows = [
        Case("FluxAutoBlocks", flux, SIZED, "text2image"),
        Case("FluxAutoBlocks", flux, {**SIZED, **IMAGE, **PART}, "image2image"),
        Case("FluxKontextAutoBlocks", flux, SIZED, "text2image"),
        Case("FluxKontextAutoBlocks", flux, edit, "image_conditioned"),
        Case("Flux2AutoBlocks", flux2, short, "text2image"),
        Case("Flux2AutoBlocks", flux2, short | LARGE_IMAGE, "image_conditioned"),
        *(
            Case(f"Flux2Klein{base}AutoBlocks", lambda: deep_twin(klein, 28), short | image, flow)
            for base in ("", "Base")
            for flow, image in (("text2image", {}), ("image_conditioned", LARGE_IMAGE))
        ),
        *(
            Case(f"Flux3{kind}AutoBlocks", partial(flux3, bool(kind)), FEW_TOKENS | image, flow)
            for kind in ("", "Distilled")
            for flow, image in (("text2image", {}), ("image_conditioned", LARGE_IMAGE))
        ),
        Case("StableDiffusion3AutoBlocks", of("StableDiffusion3Pipeline"), SIZED, "text2image"),
        Case(
            "StableDiffusion3AutoBlocks",
            of("StableDiffusion3Pipeline"),
            {**SIZED, **IMAGE, **PART},
            "image2image",
        ),
        Case("StableDiffusionXLAutoBlocks", sdxl, xl, "text2image"),
        Case("StableDiffusionXLAutoBlocks", sdxl, {**xl, **IMAGE, **PART}, "image2image"),
        Case("StableDiffusionXLAutoBlocks", sdxl, {**xl, **IMAGE, **MASKED, **PART}, "inpainting"),
        *(
            Case(
                "StableDiffusionXLAutoBlocks",
                lambda: controlled("ControlNetModel-xl"),
                {**xl, **CONTROL, **extra},
                flow,
            )
            for flow, extra in (
                ("controlnet_text2image", {}),
                ("controlnet_image2image", {**IMAGE, **PART}),
                ("controlnet_inpainting", {**IMAGE, **MASKED, **PART}),
            )
        ),
        Case(
            "StableDiffusionXLAutoBlocks",
            controlled_union,
            {**xl, **CONTROL, "control_mode": 0},
            "controlnet_union_text2image",
        ),
        Case("QwenImageAutoBlocks", qwen, SIZED, "text2image"),
        Case("QwenImageAutoBlocks", qwen, {**SIZED, **IMAGE, **PART}, "image2image"),
        Case("QwenImageAutoBlocks", qwen, {**SIZED, **pasted}, "inpainting"),
        *(
            Case("QwenImageAutoBlocks", qwen_controlled, {**SIZED, **CONTROL, **extra}, flow)
            for flow, extra in (
                ("controlnet_text2image", {}),
                ("controlnet_image2image", {**IMAGE, **PART}),
                ("controlnet_inpainting", pasted),
            )
        ),
        Case("QwenImageEditAutoBlocks", qwen_image_edit, {**SMALL, **IMAGE}, "image_conditioned"),
        Case(
            "QwenImageEditAutoBlocks",
            qwen_image_edit,
            pasted,  # in the size that the picture gets, 1024 x 1024
            "image_conditioned_inpainting",
        ),
        Case("QwenImageEditPlusAutoBlocks", qwen_image_edit, {**SMALL, **IMAGE}),
        Case("QwenImage21AutoBlocks", qwen_image_21, MIDDLE, "text2image"),
        Case(
            "QwenImage21AutoBlocks",
            qwen_image_21,
            MIDDLE | LARGE_IMAGE | {"output_resolution": 64},
            "image_conditioned",
        ),
        Case(
            "QwenImage21TurboAutoBlocks",
            lambda: qwen_image_21(sample_sigmas=[1.0, 0.5]),
            MIDDLE,
            "text2image",
        ),
        Case("WanBlocks", wan, tiny_video),
        Case("Wan22Blocks", of("WanPipeline-two-experts"), tiny_video),
        Case("WanImage2VideoAutoBlocks", wan_image, {**tiny_video, **IMAGE}, "image2video"),
        Case(
            "WanImage2VideoAutoBlocks",
            wan_first_and_last,
            {**tiny_video, **IMAGE, "last_image": picture(32, 7)},
            "flf2v",
        ),
        Case("Wan22Image2VideoBlocks", by("wan22-i2v"), {**MIDDLE, **FIVE, **SHORT, **LARGE_IMAGE}),
        Case("Wan22VaceBlocks", vace, tiny_video),
        Case("LTXAutoBlocks", of("LTXPipeline"), tiny_video, "text2video"),
        Case("LTXAutoBlocks", of("LTXPipeline"), {**tiny_video, **IMAGE}, "image2video"),
        Case("LTX2AutoBlocks", by("ltx2"), ltx2, "text2video"),
        Case("LTX2AutoBlocks", by("ltx2"), {**ltx2, **LARGE_IMAGE, "image_crf": 0}, "image2video"),
        Case("LTX25AutoBlocks", ltx25, ltx2, "text2video"),
        Case("LTX25AutoBlocks", ltx25, {**ltx2, **LARGE_IMAGE, "image_crf": 0}, "image2video"),
        Case("HunyuanVideo15AutoBlocks", by("hunyuan-video15"), {**MIDDLE, **FIVE}, "text2video"),
        Case(
            "HunyuanVideo15AutoBlocks",
            hunyuan_video_15,
            {**MIDDLE, **FIVE, **LARGE_IMAGE},
            "image2video",
        ),
        Case("HeliosAutoBlocks", one_stage, tiny_video, "text2video"),
        Case("HeliosAutoBlocks", one_stage, {**tiny_video, **IMAGE}, "image2video"),
        Case(
            "HeliosPyramidAutoBlocks",
            helios,
            {**MIDDLE, **NINE, **SHORT, "pyramid_num_inference_steps_list": [2, 2]},
            "text2video",
        ),
        Case("ErnieImageAutoBlocks", by("ernie-image"), MIDDLE, "text2image"),
        Case(
            "Ideogram4AutoBlocks",
            by("ideogram4"),
            {**MIDDLE, "guidance_schedule": [7.0, 3.0]},
            "text2image",
        ),
        Case("Krea2AutoBlocks", krea2, {**MIDDLE, **SHORT}, "text2image"),
        Case("Krea2TurboAutoBlocks", krea2, {**MIDDLE, **SHORT}, "text2image"),
        Case("ZImageAutoBlocks", of("ZImagePipeline"), SIZED, "text2image"),
        Case("ZImageAutoBlocks", of("ZImagePipeline"), {**SIZED, **IMAGE, **PART}, "image2image"),
        Case("AnimaAutoBlocks", anima, SIZED, "text2image"),
        Case("AnimaAutoBlocks", anima, {**SIZED, **IMAGE, **PART}, "img2img"),
        Case(
            "Cosmos3OmniBlocks",
            lambda: cosmos3("cosmos3"),
            {**SMALL, "num_frames": 1},
            "text2image",
        ),
        Case("Cosmos3OmniBlocks", lambda: cosmos3("cosmos3"), cosmos, "text2video"),
        Case("Cosmos3OmniBlocks", lambda: cosmos3("cosmos3"), {**cosmos, **IMAGE}, "image2video"),
        Case(
            "Cosmos3DistilledBlocks",
            lambda: cosmos3("cosmos3_distilled"),
            {**cosmos, "num_inference_steps": 4},
            "text2video",
        ),
        Case("MiniMaxH3Blocks", minimax_h3, {**SMALL, "num_frames": 124}, "t2va", True),
        Case("MiniMaxH3Blocks", minimax_h3, {**SMALL, "num_frames": 124, **IMAGE}, "fl2va", True),
        Case(
            "MiniMaxMusic3Blocks",
            minimax_music3,
            {"lyrics": "[verse]\nhello world\n[chorus]\nsing with me", "audio_duration": 0.2},
        ),
        Case(
            "WanAnimate2Blocks",
            wan_animate_2,
            {
                **MIDDLE,
                **SHORT,
                **LARGE_IMAGE,
                "driving_video": film(17, 32),
                "segment_frame_length": 9,
                "prev_segment_conditioning_frames": 1,
            },
        ),
    ]
    return {f"{row.kind}{':' * bool(row.workflow)}{row.workflow}": row for row in rows}


# -- what is seen


def outputs_of(pipe: Any, call: dict[str, Any]) -> list[Any]:
    """What ``pipe`` makes of ``call``: pictures, film, sound."""
    names = [n for n in ("images", "videos", "audio", "audios") if n in pipe.blocks.output_names]
    generator = {"generator": torch.Generator().manual_seed(SEED)}
    torch.manual_seed(1)
    result = pipe(**{"output_type": "np", **call}, **generator, output=names)
    return [arrays(result[name]) for name in names if result[name] is not None]


def arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().float().numpy()
    if isinstance(value, list | tuple):
        return np.stack([arrays(item) for item in value])
    return np.asarray(value)


def same(result: Iterable[Any], expected: Iterable[Any]) -> bool:
    return all(np.array_equal(*pair, equal_nan=True) for pair in zip(result, expected, strict=True))


def attached(case: Case, want: list[list[Any]]) -> dict[str, str]:
    """The cells of an attached pipeline."""
    pipe = case.build()
    with graphrun.attach(pipe, vram="1K", device=SimulatedDevice(Machine())):
        try:
            outputs_of(pipe, case.call())
        except Infeasible as error:
            least_bytes = int(error.smallest_budget_bytes)
        except GraphrunError as error:
            return dict.fromkeys(("ample", "least"), line(error))
    return {
        "ample": attached_cell(case, want, AMPLE_BYTES),
        "least": attached_cell(case, want, least_bytes),
    }


def attached_cell(case: Case, want: list[list[Any]], budget_bytes: int) -> str:
    pipe, device = case.build(), SimulatedDevice(Machine())
    faults = []
    try:
        with graphrun.attach(pipe, vram=budget_bytes, device=device) as attachment:
            for number in (0, 1, 0):
                result = outputs_of(pipe, case.call(TEXTS[number]))
                trace = attachment.trace
                faults += ["differs"] * (not same(result, want[number]))
                faults += ["replanned"] * (attachment.replans != ())
                faults += ["over plan"] * (trace.overruns != ())
                faults += ["over budget"] * (trace.peak_bytes > budget_bytes)
                faults += ["left on the device"] * (device.allocated_bytes != attachment.held_bytes)
    except Exception as error:  # noqa: BLE001 - of any code
        shown()
        return line(error)
    faults += ["left after detach"] * (device.allocated_bytes != 0)
    faults += ["differs after detach"] * (not same(outputs_of(pipe, case.call()), want[0]))
    return ", ".join(dict.fromkeys(faults)) or "equal"


def imported(case: Case, want: list[Any]) -> dict[str, str]:
    """The cells of an imported pipeline, live and from a folder."""
    cells = {}
    pipe = case.build()
    excluded_names = {"prompt", "output_type"}
    if "num_inference_steps" not in pipe.blocks.input_names:  # a step number for each stage
        excluded_names.add("num_inference_steps")
    sets: dict[str, Any] = {
        NAMES.get(key, key): value
        for key, value in case.call().items()
        if plain(value) and key not in excluded_names
    } | ({"workflow": case.workflow} if case.workflow else {})
    with tempfile.TemporaryDirectory() as folder:
        for source in ("object", "folder"):
            try:
                file = Path(folder) / f"{source}.yaml"
                if source == "object":
                    live = graphrun.from_pipeline(pipe)
                    graph, modules = live.to_yaml(file, inputs=sets), live.graph_modules
                else:
                    saved_folder = Path(folder) / "saved"
                    pipe.save_pretrained(str(saved_folder), overwrite_modular_index=True)
                    options = ImportOptions({}, {}, input_defaults=sets)
                    graph, modules = import_source(str(saved_folder), options).write(file), None
                inputs = {NAMES.get(k, k): v for k, v in case.call().items()} | {"seed": SEED}
                inputs = {k: v for k, v in inputs.items() if k in graph.inputs}
                solution = planned(graph, inputs, at_minimum=True)
                outputs = run(graph, solution, inputs, modules).outputs
                cells[source] = "equal" if same_media(outputs, want) else "differs"
            except Exception as error:  # noqa: BLE001 - of any code
                shown()
                cells[source] = line(error)
    return cells


def same_media(outputs: dict[str, Any], want: list[Any]) -> bool:
    """Whether a run makes the plain pipeline's first output; pictures are compared as 8 bits."""
    first = next(iter(outputs.values()))
    if isinstance(first, Sound):
        return bool(np.array_equal(first.samples.squeeze(), np.squeeze(want[0])))
    actual = arrays(first)
    expected = np.squeeze(want[0])
    if expected.dtype != np.uint8:
        expected = np.round(expected * 255).astype(np.uint8)
    return bool(actual.size == expected.size) and bool(
        np.array_equal(actual.reshape(expected.shape), expected)
    )


def row(name: str) -> dict[str, str]:
    case = cases()[name]
    try:
        pipe = case.build()
        want = [outputs_of(pipe, case.call(text)) for text in TEXTS]
    except Exception as error:  # noqa: BLE001 - of any code
        shown()
        return {"not_built": line(error)}
    if any(not np.isfinite(part).all() for outputs in want for part in outputs):
        return {"not_built": "its outputs are not finite"}
    return {**attached(case, want), **imported(case, want[0])}


def line(error: BaseException) -> str:
    kind = "" if isinstance(error, GraphrunError) else f"{type(error).__name__}: "
    text = (str(error) or "no text").splitlines()[0]
    return kind + (text if len(text) < 400 else f"{text[:100]}...{text[-297:]}")


def shown() -> None:
    if os.environ.get("MODULAR_TRACEBACKS"):
        traceback.print_exc()


def in_child(name: str) -> dict[str, str]:
    """The row of ``name`` from a process of its own, with a limit in seconds."""
    parent, child = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=lambda: child.send(row(name)))
    process.start()
    child.close()  # so that a process that ends shows as the end of the file
    try:
        return parent.recv() if parent.poll(SECONDS) else {"not_built": f"over {SECONDS} s"}
    except EOFError:
        process.join()
        return {"not_built": f"its process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("case", nargs="*")
    arguments = parser.parse_args()
    names = [n for n in cases() if not arguments.case or any(part in n for part in arguments.case)]
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    for name in names:
        rows[name] = in_child(name)
        print(name, json.dumps(rows[name]), flush=True)
        rows = {key: rows[key] for key in cases() if key in rows}
        counts = {
            cell: sum(cells.get(cell) == "equal" for cells in rows.values())
            for cell in ("ample", "least", "object", "folder")
        }
        versions = {part: version(part) for part in ("torch", "diffusers", "transformers")}
        text = {
            "date": datetime.date.today().isoformat(),
            "versions": versions,
            "cases": len(rows),
            "equal": counts,
            "rows": rows,
        }
        RESULTS.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The op `call` on the CPU: arguments of the pipeline's `__call__`, its outputs, and refusals with
their line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from stage_runs import stages_of

import graphrun
from graphrun.errors import GraphError, InputError
from graphrun.modules.build import build
from graphrun.ops.call import _rate, _refuse_mask_size
from graphrun.ops.diffusion import StageContext
from graphrun.ops.pipeline import frames_per_second
from graphrun.profile.dry_run import probe

GRAPHS = Path(__file__).parents[2] / "graphs"
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))


@pytest.fixture
def edit_graph(edit_graph: Callable[..., Any]) -> Callable[..., Any]:
    def edit(*changes: tuple[str, str], name: str = "sdxl-img2img-tiny") -> Any:
        return edit_graph(name, *changes)

    return edit


def run(graph: Any, **inputs: Any) -> dict[str, Any]:
    modules = {name: build(component, graph) for name, component in graph.components.items()}
    return stages_of(graph, modules, graph.resolve({"steps": 2, "image": PICTURE, **inputs})).run()


@pytest.mark.sweep("more")
def test_the_picture_depends_on_the_seed(edit_graph: Callable[..., Any]) -> None:
    first, second, third = (run(edit_graph(), seed=seed)["image"].tobytes() for seed in (1, 1, 2))
    assert first == second != third


@pytest.mark.sweep("more")
def test_latents_are_returned_where_a_stage_reads_them(edit_graph: Callable[..., Any]) -> None:
    outputs = run(
        edit_graph(("outputs: {image: $make.image}", "outputs: {latents: $make.latents}"))
    )
    assert tuple(outputs["latents"].shape) == (1, 4, 8, 8)


@pytest.mark.sweep("more")
def test_a_stage_says_whether_its_vae_decodes_in_tiles(
    edit_graph: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "diffusers.AutoencoderKL.enable_tiling", lambda vae: vae.register_to_config(tiles=True)
    )
    monkeypatch.setattr(
        "diffusers.AutoencoderKL.disable_tiling", lambda vae: vae.register_to_config(tiles=False)
    )
    for tiling in ("true", "false"):
        graph = edit_graph(("      seed: $seed\n", f"      seed: $seed\n      tiling: {tiling}\n"))
        modules = {name: build(component, graph) for name, component in graph.components.items()}
        stages_of(graph, modules, graph.resolve({"steps": 2, "image": PICTURE})).run()
        assert modules["vae"].config.tiles is (tiling == "true")
    graph = edit_graph(
        ("      seed: $seed\n", "      seed: $seed\n      tiling: true\n"),
        name="stable-cascade-tiny",
    )
    with pytest.raises(
        GraphError, match=r":\d+: stages\.embed: with\.tiling: .* has no VAE that decodes in tiles"
    ):
        probe(graph, graph.resolve({}))


@pytest.mark.sweep("more")
def test_several_prompts_and_images_make_several_pictures(edit_graph: Callable[..., Any]) -> None:
    graph = edit_graph(
        ("prompt: {type: str, default: a lighthouse at dusk}", "prompt: {type: str, many: true}"),
        ("image: {type: image}", "image: {type: image, many: true}"),
    )
    first, third = (
        run(graph, prompt=["a", "b"], image=[PICTURE, second])["image"]
        for second in (PICTURE, PICTURE.rotate(90))
    )
    assert [len(first), len(third)] == [2, 2]
    assert first[0].tobytes() == third[0].tobytes()
    assert first[1].tobytes() != third[1].tobytes()


@pytest.mark.sweep("more")
def test_latents_pass_from_one_call_to_the_next(edit_graph: Callable[..., Any]) -> None:
    second_stage = """  again:
    op: call
    uses: [text_encoder, text_encoder_2, unet, vae]
    with: {prompt: $prompt, image: $make.latents, strength: 0.5, num_inference_steps: $steps,
           seed: $seed}

outputs: {image: $again.image}"""
    graph = edit_graph(("\noutputs: {image: $make.image}", second_stage))
    assert [stage.outputs for stage in graph.stages] == [("latents",), ("image",)]
    assert run(graph)["image"].size == (64, 64)
    assert probe(graph, graph.for_planning({})).recording.values.keys() == {
        "make.latents",
        "again.image",
    }


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "strength: $strength",
            "strenght: $strength",
            r"with.strenght: .*Img2ImgPipeline.__call__ has no argument.*mean 'strength'",
        ),
        ("strength: $strength", "generator: $strength", r"with.generator: use seed: instead"),
        (
            "strength: $strength",
            "callback_on_step_end: $strength",
            r"has no argument 'callback_on_step_end'",
        ),
        ("$make.image}", "$make.images_embeds}", r"returns no images_embeds; known are 'image'"),
        (
            "$make.image}",
            "$make.image, l: $make.latents}",
            r"returns either latents or image: read only one of them",
        ),
        ("$make.image}", "$make.audio}", r"returns no audio"),
        (
            "strength: $strength",
            "strength: 7.0\n      eta: $strength",
            r"fails: ValueError: The value of strength should in",
        ),
        (
            "[text_encoder, text_encoder_2, unet, vae]",
            "[text_encoder, text_encoder_2, unet]",
            r"list vae: add it to stages.make.uses",
        ),
    ],
)
def test_unknown_arguments_and_outputs_are_refused_while_planning(
    edit_graph: Callable[..., Any], old: str, new: str, message: str
) -> None:
    if "vae]" in old:
        graph = edit_graph(
            (old, new), ("$make.image}", "$make.image, z: $other.image}"), ("outputs:", OTHER)
        )
    else:
        graph = edit_graph((old, new))
    with pytest.raises(GraphError, match=message) as error_info:
        probe(graph, graph.for_planning({}))
    assert "vae]" in old or "sdxl-img2img-tiny.yaml:" in str(error_info.value)


OTHER = """  other:
    op: call
    uses: [text_encoder, text_encoder_2, unet, vae]
    with: {prompt: $prompt, image: $image}

outputs:"""


def test_the_frame_rate_comes_from_the_graph_its_stage_or_its_pipeline(
    edit_graph: Callable[..., Any],
) -> None:
    ltx, wan = (graphrun.load(GRAPHS / f"{name}.yaml") for name in ("ltx-tiny", "wan-tiny"))
    assert (frames_per_second(ltx, {}), frames_per_second(wan, {})) == (25.0, None)
    assert frames_per_second(graphrun.load(GRAPHS / "cogvideox-5b.yaml"), {}) == 8.0
    speed = ("inputs:\n", "inputs:\n  speed: {type: int, default: 12}\n")
    graph = edit_graph(speed, ("      seed: $seed\n", "      seed: $seed\n      fps: $speed\n"))
    assert (frames_per_second(graph, {}), frames_per_second(graph, {"speed": 30})) == (12.0, 30.0)


@pytest.mark.sweep("more")
def test_a_mask_of_another_size_than_its_image_is_refused(edit_graph: Callable[..., Any]) -> None:
    graph = edit_graph(
        ("StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline"),
        ("  strength: {", "  mask: {type: mask}\n  strength: {"),
        (
            "      image: $image\n",
            "      image: $image\n      mask_image: $mask\n      height: 64\n      width: 64\n",
        ),
    )
    assert run(graph, mask=Image.new("L", (64, 64), 255))["image"].size == (64, 64)
    with pytest.raises(
        InputError, match="the mask is 32x64 and the image 64x64: make them the same size"
    ):
        run(graph, mask=Image.new("L", (32, 64)))


def test_an_array_is_no_sound_where_the_input_is_a_mask(
    edit_graph: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = edit_graph(("image: {type: image}", "image: {type: mask}"))
    arguments: list[Any] = []

    def preprocess(self: Any, image: Any, *_: Any, **__: Any) -> torch.Tensor:
        arguments.append(image)
        return torch.zeros(1, 3, 64, 64)

    monkeypatch.setattr(VaeImageProcessor, "preprocess", preprocess)
    run(graph, image=np.ones((64, 64), dtype=np.float32))
    assert isinstance(arguments[0], np.ndarray)


def test_a_mask_fits_the_picture_that_an_upscaler_keeps(edit_graph: Callable[..., Any]) -> None:
    graph = edit_graph()
    context = StageContext(graph.stages[0], None, torch.device("cpu"), None)
    masked = {
        "original_image": PICTURE,
        "mask_image": Image.new("L", (64, 64)),
        "image": PICTURE.resize((16, 16)),
    }
    _refuse_mask_size(context, masked)
    with pytest.raises(InputError, match="the mask is 64x64 and the image 16x16"):
        _refuse_mask_size(context, {**masked, "original_image": None})


def test_the_rate_of_sound_is_that_of_the_vocoder_the_vae_or_the_pipeline() -> None:
    def rate(**members: Any) -> int:
        return _rate(SimpleNamespace(pipeline=SimpleNamespace(**members)))  # type: ignore[arg-type]

    config = SimpleNamespace(config=SimpleNamespace(sample_rate=24000))
    assert rate(vae=config) == 24000
    assert (
        rate(
            vae=config, vocoder=SimpleNamespace(config=SimpleNamespace(output_sampling_rate=48000))
        )
        == 48000
    )
    assert rate(vae=SimpleNamespace(), sample_rate=44100) == 44100

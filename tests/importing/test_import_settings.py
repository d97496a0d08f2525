"""Settings of constructors: lists of numbers, a scheduler that the pipeline creates, settings that
a model adds itself."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from tiny_pipelines import Case, cases, picture, tiny

import graphrun
from graphrun.cli.importing import set_value
from graphrun.diffusers_.dry_call import ProbeError
from graphrun.diffusers_.importing.folder import of_folder
from graphrun.diffusers_.importing.signature import (
    call_parameters,
    media_kind,
    plain_inputs,
    set_inputs,
)
from graphrun.errors import GraphError, InputError

SD = cases()["StableDiffusionPipeline"]


class Own(diffusers.DiffusionPipeline):
    """Like Krea 2 it takes a list of numbers; like LongCat it creates a scheduler if it gets
    none."""

    def __init__(self, unet: Any, vae: Any, scheduler: Any = None, layers: Any = (1, 2)) -> None:
        super().__init__()
        self.register_modules(unet=unet, vae=vae, scheduler=scheduler or diffusers.DDIMScheduler())
        self.register_to_config(layers=layers)

    def __call__(
        self, num_images_per_prompt: int = 1, num_inference_steps: int = 2, generator: Any = None
    ) -> Any:
        sample = randn_tensor((num_images_per_prompt, 3, 8, 8), generator, self._execution_device)
        self.scheduler.set_timesteps(num_inference_steps)
        for step in self.scheduler.timesteps:
            sample = self.scheduler.step(self.unet(sample, step).sample, step, sample).prev_sample
        return ImagePipelineOutput(
            images=self.vae.decode(sample).sample.permute(0, 2, 3, 1).cpu().numpy()
        )


class Clip(Own):
    """Its parameters have names that graphs have for the length of a video and the rate of
    sound."""

    def __call__(self, frames: int = 81, rate: int = 16_000, num_inference_steps: int = 2) -> Any:
        raise NotImplementedError


class Late(diffusers.StableDiffusionPipeline):
    """Fails after its encoder without a picture, and at once with one, which the import tries
    next."""

    def __call__(self, prompt: Any = None, image: Any = None) -> Any:
        if image is not None:
            raise ValueError("no picture, please")
        self.encode_prompt(prompt, "cpu", 1, False)
        raise ValueError("this is the trouble")


class Edits(Own):
    """Like FLUX.2 it takes a picture before the prompt, and works without one."""

    def __call__(  # type: ignore[override]
        self,
        image: Any = None,
        prompt: Any = None,
        num_inference_steps: int = 2,
        generator: Any = None,
    ) -> Any:
        if not prompt.startswith(("a photo", "{")):
            raise ValueError(f"what is {prompt}?")
        start = randn_tensor((1, 3, 8, 8), generator, self._execution_device)
        if image is not None:
            pixels = torch.from_numpy(np.asarray(image.resize((8, 8)), dtype=np.float32)).permute(
                2, 0, 1
            )[None]
            start = start + self.vae.encode(pixels.to(start.device)).latents.mean()
        picture = self.vae.decode(self.unet(start, 1).sample).sample
        return ImagePipelineOutput(images=picture.permute(0, 2, 3, 1).cpu().numpy())


class Either(Edits):
    """Like Cosmos it takes a picture or a video before the prompt, and needs one of the two."""

    def __call__(  # type: ignore[override]
        self,
        image: Any = None,
        video: Any = None,
        prompt: Any = None,
        num_inference_steps: int = 2,
        generator: Any = None,
    ) -> Any:
        if image is None and video is None:
            raise ValueError("one of image and video")
        return super().__call__(image or video[0], prompt, num_inference_steps, generator)


def own(kind: type[Own] = Own, **options: Any) -> Any:
    sizes = {
        "encoder_block_out_channels": (8, 8),
        "decoder_block_out_channels": (8, 8),
        "latent_channels": 3,
    }
    vae = diffusers.AutoencoderTiny(**sizes, num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1))
    return kind(tiny("UNet2DModel"), vae, **options)


def test_settings_of_constructors_survive_an_import(tmp_path: Path) -> None:
    pipe = own(layers=[3, 1])
    graph = graphrun.from_pipeline(pipe).to_yaml(
        tmp_path / "own.yaml", inputs={"num_images_per_prompt": 2}
    )
    assert graph.pipeline_config == {"layers": [3, 1]}
    assert "scheduler" in graph.parts
    assert "block_out_channels" in pipe.vae.config
    assert "block_out_channels" not in graph.components["vae"].config
    assert graph.inputs["batch"].default == 2, "by the pipeline's own name"
    assert graphrun.from_pipeline(own()).graph.pipeline_config == {}


def test_a_picture_before_the_prompt_is_optional_where_the_call_runs_without_one() -> None:
    live = graphrun.from_pipeline(own(Edits))
    assert (live.graph.inputs["image"].type, live.graph.inputs["image"].required) == (
        "image",
        False,
    )
    assert {str(argument) for argument in live.graph.stages[0].arguments.values()} >= {
        "$image",
        "$prompt",
    }
    problems = [
        graphrun.estimate(
            live, vram="1G", ram="1G", hardware="sim", inputs={"prompt": "a photo", **extra_inputs}
        )
        for extra_inputs in ({}, {"image": picture(16)})
    ]
    phase_names = [
        [phase.name.partition(":")[2] for phase in problem.phases] for problem in problems
    ]
    assert phase_names == [["unet", "vae"], ["vae", "unet", "vae"]]


def test_of_two_media_before_the_prompt_one_is_needed_where_the_call_needs_one() -> None:
    inputs = graphrun.from_pipeline(own(Either)).graph.inputs
    assert (inputs["image"].required, inputs["video"].required) == (True, False)


def test_a_prompt_that_is_set_is_the_text_of_the_trial(tmp_path: Path) -> None:
    graph = graphrun.from_pipeline(own(Edits)).to_yaml(
        tmp_path / "own.yaml", inputs={"prompt": "{}"}
    )
    assert graph.inputs["prompt"].default == "{}"
    with pytest.raises(ProbeError, match=r"what is \["):
        graphrun.from_pipeline(own(Edits)).to_yaml(tmp_path / "other.yaml", inputs={"prompt": "["})


def test_frames_that_condition_a_video_are_media() -> None:
    names = (
        "conditioning_frames",
        "num_frames",
        "prev_segment_conditioning_frames",
        "video",
        "mask_image",
        "image_embeds",
    )
    assert [media_kind(name) for name in names] == ["video", None, None, "video", "mask", None]


def test_a_scheduler_that_a_folder_lacks_is_made_by_the_constructor(tmp_path: Path) -> None:
    index = {"scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"], "vae": [None, None]}
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": "LongCatAudioDiTPipeline", **index})
    )
    assert of_folder(tmp_path).parts == {}
    (tmp_path / "scheduler").mkdir()
    assert [*of_folder(tmp_path).parts] == ["scheduler"]


def test_an_infinite_default_that_diffusers_writes_is_read_and_left_out(tmp_path: Path) -> None:
    index = {"scheduler": ["diffusers", "DPMSolverMultistepScheduler"], "vae": [None, None]}
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": "StableDiffusionPipeline", **index})
    )
    diffusers.DPMSolverMultistepScheduler(solver_order=3).save_pretrained(tmp_path / "scheduler")
    file = tmp_path / "scheduler" / "scheduler_config.json"
    assert '"lambda_min_clipped": -Infinity' in file.read_text()
    config = of_folder(tmp_path).parts["scheduler"].config
    assert config["solver_order"] == 3
    assert "lambda_min_clipped" not in config
    file.write_text('{"beta_start": NaN}')
    with pytest.raises(GraphError, match="NaN is not a number"):
        of_folder(tmp_path)


def test_the_error_is_that_of_the_try_that_got_furthest() -> None:
    pipe = Case(Late, "", SD.parts, dict).build()
    with pytest.raises(ProbeError, match="after text_encoder was called, .* this is the trouble"):
        _ = graphrun.from_pipeline(pipe).graph


def test_components_that_share_weights_are_refused_for_a_graph_and_planned_live() -> None:
    live = graphrun.from_pipeline(cases()["ZImageControlNetPipeline"].build())
    assert "transformer_and_controlnet" in live.modules
    with pytest.raises(
        InputError, match="makes transformer and controlnet share weights.*graphrun.attach"
    ):
        _ = live.graph


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("512", 512),
        ("[1, 2]", [1, 2]),
        ("{scale: 2}", {"scale": 2}),
        ("[verse]\nby the sea", "[verse]\nby the sea"),
        ("[verse] by the sea", "[verse] by the sea"),
        ("Verse: by the sea", "Verse: by the sea"),
    ],
)
def test_a_set_value_that_is_no_yaml_is_a_text(text: str, value: object) -> None:
    assert set_value("lyrics", text) == value


def test_a_workflow_that_several_inputs_select_requires_the_first() -> None:
    pipe = diffusers.MiniMaxH3Blocks().init_pipeline()
    required = inspect.Parameter.empty
    defaults = {
        workflow: call_parameters(pipe, workflow)["image"].default for workflow in ("", "fl2va")
    }
    assert (defaults[""], defaults["fl2va"]) == (None, required)


def test_a_tokenizer_is_written_without_the_limits_of_its_last_call(tmp_path: Path) -> None:
    """transformers saves them, and a loaded tokenizer truncates to them."""
    pipe = cases()["FluxPipeline"].build()
    limits = {"truncation": True, "padding": "max_length", "max_length": 7}
    pipe.tokenizer("a lighthouse at dusk", **limits)
    graphrun.from_pipeline(pipe).to_yaml(tmp_path / "flux.yaml")
    written_files = sorted(tmp_path.glob("tokenizers/*/tokenizer.json"))
    assert len(written_files) == 2
    for file in written_files:
        content = json.loads(file.read_text())
        assert (content["truncation"], content["padding"]) == (None, None)
    assert pipe.tokenizer.backend_tokenizer.truncation["max_length"] == 7
    assert pipe.tokenizer_2.backend_tokenizer.truncation is None


@pytest.mark.parametrize(("name", "default"), [("frames", 81), ("rate", 16_000)])
def test_a_parameter_that_is_called_as_a_size_of_media_can_be_set(name: str, default: int) -> None:
    pipeline = object.__new__(Clip)
    parameters, inputs = call_parameters(pipeline), plain_inputs(Clip, pipeline, {})
    assert parameters[name].default == default
    inputs = set_inputs(Clip, parameters, inputs, {name: 9})
    assert (inputs[name].parameter, inputs[name].default) == (name, 9)


def test_the_length_of_a_video_is_an_input_by_either_name() -> None:
    pipeline = object.__new__(Clip)
    assert plain_inputs(Clip, pipeline, {})["frames"].default == 81

"""Settings of constructors: lists of numbers, a scheduler that the pipeline creates, settings that a model adds itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from tiny_pipelines import Case, cases, tiny

import graphrun
from graphrun.diffusers_.dry_call import ProbeError
from graphrun.errors import InputError

SD = cases()["StableDiffusionPipeline"]


class Own(diffusers.DiffusionPipeline):
    """Like Krea 2 it takes a list of numbers; like LongCat it creates a scheduler if it gets none."""

    def __init__(self, unet: Any, vae: Any, scheduler: Any = None, layers: Any = (1, 2)) -> None:
        super().__init__()
        self.register_modules(unet=unet, vae=vae, scheduler=scheduler or diffusers.DDIMScheduler())
        self.register_to_config(layers=layers)

    def __call__(self, num_images_per_prompt: int = 1, num_inference_steps: int = 2, generator: Any = None) -> Any:
        sample = randn_tensor((num_images_per_prompt, 3, 8, 8), generator, self._execution_device)
        self.scheduler.set_timesteps(num_inference_steps)
        for step in self.scheduler.timesteps:
            sample = self.scheduler.step(self.unet(sample, step).sample, step, sample).prev_sample
        return ImagePipelineOutput(images=self.vae.decode(sample).sample.permute(0, 2, 3, 1).cpu().numpy())


class Late(diffusers.StableDiffusionPipeline):
    """Fails after its encoder without a picture, and at once with one, which the import tries next."""

    def __call__(self, prompt: Any = None, image: Any = None) -> Any:
        if image is not None:
            raise ValueError("no picture, please")
        self.encode_prompt(prompt, "cpu", 1, False)
        raise ValueError("this is the trouble")


def own(**more: Any) -> Any:
    sizes = {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8), "latent_channels": 3}
    vae = diffusers.AutoencoderTiny(**sizes, num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1))
    return Own(tiny("UNet2DModel"), vae, **more)


def test_settings_of_constructors_survive_an_import(tmp_path: Path) -> None:
    pipe = own(layers=[3, 1])
    graph = graphrun.from_pipeline(pipe).to_yaml(tmp_path / "own.yaml", inputs={"num_images_per_prompt": 2})
    assert graph.pipeline_config == {"layers": [3, 1]}
    assert "scheduler" in graph.parts
    assert "block_out_channels" in pipe.vae.config
    assert "block_out_channels" not in graph.components["vae"].config
    assert graph.inputs["batch"].default == 2, "by the pipeline's own name"
    assert graphrun.from_pipeline(own()).graph.pipeline_config == {}


def test_the_error_is_that_of_the_try_that_got_furthest() -> None:
    pipe = Case(Late, "", SD.parts, dict).build()
    with pytest.raises(ProbeError, match="after text_encoder was entered, .* this is the trouble"):
        _ = graphrun.from_pipeline(pipe).graph


def test_components_that_share_weights_are_refused_for_a_graph_and_planned_live() -> None:
    live = graphrun.from_pipeline(cases()["ZImageControlNetPipeline"].build())
    assert "transformer_and_controlnet" in live.modules
    with pytest.raises(InputError, match="makes transformer and controlnet share weights.*graphrun.attach"):
        _ = live.graph

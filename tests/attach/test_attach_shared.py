"""Components that share weights: Z-Image's ControlNet runs layers of the transformer, and reads its
padding token."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoPipelineForImage2Image
from test_attach_pipelines import SHARE, equal, weight_bytes
from tiny_pipelines import cases, checked_peak_bytes, picture, tiny

import graphrun
from graphrun.errors import InputError
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine

CASE = cases()["ZImageControlNetPipeline"]


@pytest.mark.sweep("more")
def test_components_that_share_weights_are_one_component_with_each_weight_counted_once() -> None:
    pipe, device = CASE.build(), SimulatedDevice(Machine())
    want, cap_bytes = CASE.call(pipe), int(SHARE * weight_bytes(pipe))

    def put(tensor: torch.Tensor) -> torch.Tensor:
        with device.machine:
            return tensor.to("sim")

    with graphrun.attach(pipe, vram=cap_bytes, device=device) as attachment:
        peaks, solutions = [], []
        for _ in range(3):
            assert equal(CASE.call(pipe, put), want)
            peaks.append(checked_peak_bytes(attachment, device))
            solutions.append(attachment.solution)
        assert peaks[2] == peaks[1], "steady"
        assert 0 < max(peaks) <= cap_bytes
        assert solutions[1] is solutions[2], "nothing of the pipeline changed"
        components = {numbers.name: numbers for numbers in solutions[0].problem.components}
        assert set(components) == {"vae", "text_encoder", "transformer_and_controlnet"}
        pipe.vae = tiny("AutoencoderKL-flow").eval()
        assert not equal(CASE.call(pipe, put), want)
        assert checked_peak_bytes(attachment, device) == peaks[0], (
            "it begins with nothing, as the first"
        )
    assert pipe.controlnet.noise_refiner is pipe.transformer.noise_refiner
    assert pipe.controlnet.x_pad_token is pipe.transformer.x_pad_token


def test_a_pipeline_made_from_an_attached_one_says_that_it_must_be_attached_too() -> None:
    pipe, device = cases()["StableDiffusionPipeline"].build(), SimulatedDevice(Machine())
    arguments = {"image": picture(), "strength": 0.9, "num_inference_steps": 2, "output_type": "np"}
    with graphrun.attach(pipe, vram="1G", device=device):
        image_pipe = AutoPipelineForImage2Image.from_pipe(pipe)
        image_pipe.set_progress_bar_config(disable=True)
        assert image_pipe.device.type == "sim"
        with pytest.raises(
            InputError, match=r"graphrun\.attach\(StableDiffusionImg2ImgPipeline, \.\.\.\)"
        ):
            image_pipe("a cat", **arguments)
        with graphrun.attach(image_pipe, vram="1G", device=device):
            assert image_pipe("a cat", **arguments).images.shape == (1, 16, 16, 3)
    assert image_pipe("a cat", **arguments).images.shape == (1, 16, 16, 3)

"""`attach` on modular pipelines built from blocks and components: three calls, each with equal
results and within its plan."""

from __future__ import annotations

from typing import Any

import diffusers as d
import numpy as np
import pytest
import tiny_modular
import torch
from campaign import sampled
from tiny_modular import ltx_25_decoder
from tiny_pipelines import checked_peak_bytes, modular, noise

import graphrun
from graphrun.diffusers_.live import components_of, state_of
from graphrun.errors import InputError
from graphrun.modules.memos import attributes_of
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine
from graphrun.solve.infeasible import Infeasible

SHARE = 0.95  # cap as a share of the weights' bytes, so that not all fit at once
CALL = {
    "prompt": "a lighthouse at dusk",
    "height": 16,
    "width": 16,
    "num_inference_steps": 2,
    "output_type": "np",
}
SHORT = {"max_sequence_length": 16}  # else FLUX's text embeddings would be its largest tensors


def called(pipe: Any, **arguments: Any) -> Any:
    short = SHORT if "max_sequence_length" in pipe.blocks.input_names else {}
    return pipe(**CALL, **short, generator=torch.Generator().manual_seed(3), **arguments)


def weight_bytes(pipe: Any) -> int:
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    return sum(
        t.numel() * t.element_size() for m in modules for t in (*m.parameters(), *m.buffers())
    )


@pytest.mark.sweep("more")
@pytest.mark.parametrize("name", ["FluxPipeline", "StableDiffusionXLPipeline"])
def test_output_peak_and_baseline_of_a_modular_pipeline(name: str) -> None:
    pipe = modular(name)
    kind, want = type(pipe), called(pipe, output="images")
    assert np.isfinite(want).all()
    device = SimulatedDevice(Machine())
    cap_bytes = int(SHARE * weight_bytes(pipe))
    with graphrun.attach(pipe, vram=cap_bytes, device=device) as attachment:
        peaks = []
        for _ in range(3):
            assert np.array_equal(called(pipe, output="images"), want)
            peaks.append(checked_peak_bytes(attachment, device))
        assert peaks[2] == peaks[1], "steady"
        assert 0 < max(peaks) <= cap_bytes
        state = called(pipe)  # the whole pipeline state
        assert np.array_equal(state.images, want)
        assert state.latents.device.type == "sim"
    assert type(pipe) is kind
    assert np.array_equal(called(pipe, output="images"), want)


# Qwen-Image 2.1: tokens are repeated by a mask of image slots, tables of positions are in a list,
# steps share a cache of keys and values. Cosmos 3: token ids have special ones after them, and the
# dtypes of all weights are read. MiniMax-H3: indices on the device write to a tensor on the host.
NEW_MODELS = {
    "qwen_image_21": {"height": 64, "width": 64, "output": "images"},
    "cosmos3": {"height": 32, "width": 32, "num_frames": 5, "output": "videos"},
    "cosmos3_distilled": {
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "num_inference_steps": 4,
        "output": "videos",
    },
    "minimax_h3": {"height": 32, "width": 32, "num_frames": 124, "output": ["videos", "audio"]},
}


def parts_of(result: Any) -> list[Any]:
    """Return the outputs of a call on the host."""
    results = list(result.values()) if isinstance(result, dict) else [result]
    return [part.cpu() if isinstance(part, torch.Tensor) else part for part in results]


@pytest.mark.long
@pytest.mark.parametrize("name", sampled(NEW_MODELS, ["qwen_image_21", "cosmos3"], "pipelines"))
def test_a_model_of_blocks_only_within_its_least_budget(name: str) -> None:
    pipe, call = getattr(tiny_modular, name)(), CALL | NEW_MODELS[name]

    def made(**changes: Any) -> list[Any]:
        return parts_of(pipe(**call | changes, generator=torch.Generator().manual_seed(3)))

    texts = {"prompt": call["prompt"]}, {"prompt": "two ships"}
    expected = [made(**text) for text in texts]
    with (
        graphrun.attach(pipe, vram="1K", device=SimulatedDevice(Machine())),
        pytest.raises(Infeasible) as error_info,
    ):
        made()
    for budget_bytes in (1 << 40, error_info.value.smallest_budget_bytes):
        device = SimulatedDevice(Machine())
        with graphrun.attach(pipe, vram=budget_bytes, device=device) as attachment:
            for text, want in zip(texts * 2, expected * 2, strict=True):
                assert all(map(np.array_equal, made(**text), want))
                assert checked_peak_bytes(attachment, device) <= budget_bytes
                assert attachment.replans == ()


def decoded(pipe: Any, latents: torch.Tensor) -> Any:
    generator = torch.Generator().manual_seed(3)
    return pipe(latents, output_type="np", generator=generator, return_dict=False)[0]


@pytest.mark.sweep("more")
@pytest.mark.long
def test_flex_attention_within_its_least_budget() -> None:
    """LTX-2.5's diffusion decoder."""
    pipe, latents = ltx_25_decoder(), noise([1, 8, 1, 2, 2])
    want = decoded(pipe, latents)
    small, device = SimulatedDevice(Machine()), SimulatedDevice(Machine())
    with small.machine:
        small_latents = latents.to("sim")
    with (
        graphrun.attach(pipe, vram="1K", device=small),
        pytest.raises(Infeasible) as error_info,
    ):
        decoded(pipe, small_latents)
    with device.machine:
        device_latents = latents.to("sim")
    budget_bytes = error_info.value.smallest_budget_bytes
    with graphrun.attach(pipe, vram=budget_bytes, device=device) as attachment:
        assert np.array_equal(decoded(pipe, device_latents), want)
        assert attachment.trace is not None
        assert attachment.trace.overruns == ()
        assert attachment.trace.peak_bytes <= budget_bytes


@pytest.mark.long
def test_flex_attention_on_the_cpu() -> None:
    pipe, latents = ltx_25_decoder(), noise([1, 8, 1, 2, 2])
    want = decoded(pipe, latents)
    with graphrun.attach(pipe, device="cpu", memory="2G") as attachment:
        assert np.array_equal(decoded(pipe, latents), want)
        assert attachment.trace is not None
        assert attachment.trace.overruns == ()


def test_another_guider_is_another_state() -> None:
    """It needs another plan: without guidance the UNet is entered once a step."""
    pipe = modular("StableDiffusionXLPipeline")
    previous_state = state_of(pipe, attributes_of(components_of(pipe)))
    assert state_of(pipe, attributes_of(components_of(pipe))) == previous_state
    pipe.update_components(guider=d.ClassifierFreeGuidance(guidance_scale=1.0))
    assert state_of(pipe, attributes_of(components_of(pipe))) != previous_state


def test_a_components_manager_that_moves_weights_is_refused() -> None:
    pipe = modular("FluxPipeline")
    manager = d.ComponentsManager()
    # set by enable_auto_cpu_offload, which needs an accelerator
    manager._auto_offload_enabled = True
    pipe._components_manager = manager
    with pytest.raises(InputError, match="call disable_auto_cpu_offload"):
        graphrun.attach(pipe, vram="1G", device="sim")


def test_a_modular_pipeline_is_planned_as_it_is() -> None:
    live = graphrun.from_pipeline(modular("FluxPipeline"))
    problem = graphrun.estimate(live, vram="1G", hardware="sim", inputs={**CALL, **SHORT})
    assert [use.component for phase in problem.phases for use in phase.uses] == [
        "text_encoder",
        "text_encoder_2",
        "transformer",
        "vae",
    ]

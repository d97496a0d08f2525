"""Features of diffusers that are switched on while a pipeline is attached: the plain pipeline's
results, within a plan for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers as d
import pytest
import torch
from campaign import sampled
from test_attach_pipelines import equal, weight_bytes
from tiny_pipelines import PROMPT, cases, checked_peak_bytes

import graphrun
from graphrun.diffusers_.live import components_of, settings_of, state_of
from graphrun.modules.memos import attributes_of
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine

CASES = cases()
STEPS = 4
Switch = Callable[[Any], object]


def first_block_cache(pipe: Any) -> None:
    pipe.transformer.enable_cache(d.FirstBlockCacheConfig(threshold=2.0))


def mag_cache(pipe: Any) -> None:
    config = d.MagCacheConfig(
        num_inference_steps=STEPS,
        retention_ratio=0.1,
        mag_ratios=torch.linspace(1.0, 0.7, STEPS),
        threshold=0.3,
        max_skip_steps=3,
    )
    pipe.transformer.enable_cache(config)


def taylor_seer(pipe: Any) -> None:
    pipe.transformer.enable_cache(taylor_seer_config(1))


def taylor_seer_config(first_step: int) -> Any:
    """Return a configuration that finds the attention layers of all of these models, unlike
    diffusers' default patterns."""
    return d.TaylorSeerCacheConfig(
        cache_interval=2,
        disable_cache_before_step=first_step,
        max_order=1,
        cache_identifiers=[r"\w*blocks\.\d+\.attn\d?"],
    )


def pyramid_attention_broadcast(pipe: Any) -> None:
    config = d.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 1000),
        current_timestep_callback=lambda: pipe._current_timestep,
    )
    pipe.transformer.enable_cache(config)


def faster_cache(pipe: Any) -> None:
    is_distilled = not isinstance(pipe, d.CogVideoXPipeline)
    config = d.FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        # the first step, 1000, fills the cache
        spatial_attention_timestep_skip_range=(-1, 999 if is_distilled else 1001),
        current_timestep_callback=lambda: pipe._current_timestep,
        attention_weight_callback=lambda _: 0.3,
        tensor_format="BCHW" if is_distilled else "BFCHW",
        is_guidance_distilled=is_distilled,
    )
    pipe.transformer.enable_cache(config)


def forward_chunking(pipe: Any) -> None:
    pipe.transformer.enable_forward_chunking(2)


def fused_qkv_projections(pipe: Any) -> None:
    (pipe if hasattr(pipe, "fuse_qkv_projections") else pipe.transformer).fuse_qkv_projections()


def vae_tiling(pipe: Any) -> None:
    """Switch on tiles that are smaller than the pictures of the tests."""
    vae = pipe.vae
    vae.enable_tiling()
    for name in vars(vae).keys() & TILES.keys():
        setattr(vae, name, TILES[name])


def vae_slicing(pipe: Any) -> None:
    pipe.vae.enable_slicing()


def freeu(pipe: Any) -> None:
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)


def heun_scheduler(pipe: Any) -> None:
    is_flow = type(pipe.scheduler) is d.FlowMatchEulerDiscreteScheduler
    kind = d.FlowMatchHeunDiscreteScheduler if is_flow else d.HeunDiscreteScheduler
    pipe.scheduler = kind.from_config(pipe.scheduler.config)


def dpm_scheduler(pipe: Any) -> None:
    # FluxPipeline passes sigmas to schedulers that do not compute those of flow matching
    flow = {"use_flow_sigmas": True, "use_dynamic_shifting": True}
    pipe.scheduler = d.DPMSolverMultistepScheduler.from_config(
        pipe.scheduler.config, **(flow if isinstance(pipe, d.FluxPipeline) else {})
    )


TILES = {  # attributes of VAEs
    "tile_sample_min_size": 8,
    "tile_latent_min_size": 4,
    "tile_sample_min_height": 8,
    "tile_sample_min_width": 8,
    "tile_sample_stride_height": 8,
    "tile_sample_stride_width": 8,
    "tile_latent_min_height": 1,
    "tile_latent_min_width": 1,
    "tile_overlap_factor_height": 0.0,
    "tile_overlap_factor_width": 0.0,
}
DENOISERS = ("FluxPipeline", "WanPipeline", "CogVideoXPipeline")
FEATURES: dict[Switch, tuple[str, ...]] = {
    first_block_cache: DENOISERS,
    mag_cache: ("FluxPipeline", "WanPipeline"),
    taylor_seer: DENOISERS,
    pyramid_attention_broadcast: DENOISERS,
    faster_cache: DENOISERS,
    forward_chunking: ("StableDiffusion3Pipeline",),
    fused_qkv_projections: (
        "FluxPipeline",
        "StableDiffusion3Pipeline",
        "CogVideoXPipeline",
        "StableDiffusionXLPipeline",
    ),
    vae_tiling: ("FluxPipeline", "WanPipeline", "CogVideoXPipeline", "StableDiffusionXLPipeline"),
    vae_slicing: ("FluxPipeline", "WanPipeline", "StableDiffusionXLPipeline"),
    freeu: ("StableDiffusionXLPipeline",),
    heun_scheduler: (
        "StableDiffusion3Pipeline",
        "StableDiffusionXLPipeline",
    ),  # FluxPipeline refuses it
    dpm_scheduler: ("FluxPipeline", "StableDiffusionXLPipeline"),
}
SCHEDULERS = (heun_scheduler, dpm_scheduler)
UNPLANNED = (vae_tiling, vae_slicing, *SCHEDULERS)  # the plan may be the same
EACH = [(switch, name) for switch, names in FEATURES.items() for name in names]
ALWAYS = [(first_block_cache, "FluxPipeline")]


def output(name: str, pipe: Any, prompt: str = PROMPT) -> Any:
    torch.manual_seed(1)
    arguments = {**CASES[name].arguments(), "num_inference_steps": STEPS, "prompt": prompt}
    return pipe(**arguments, generator=torch.Generator().manual_seed(3))


def digest(attachment: Any) -> str:
    """Of the problem of the last call."""
    return str(attachment.solution.problem.digest)


@pytest.mark.long
@pytest.mark.parametrize(
    "feature", sampled(EACH, ALWAYS, "features"), ids=lambda pair: f"{pair[0].__name__}-{pair[1]}"
)
def test_a_feature_is_switched_on_while_attached(feature: tuple[Switch, str]) -> None:
    switch, name = feature
    pipe, plain = CASES[name].build(), CASES[name].build()
    switch(plain)
    want = [output(name, plain), output(name, plain, "two ships")]
    device = SimulatedDevice(Machine())
    with graphrun.attach(pipe, vram=int(0.95 * weight_bytes(pipe)), device=device) as attachment:
        output(name, pipe)
        previous_digest = digest(attachment)
        switch(pipe)
        for prompt, expected in ((PROMPT, want[0]), ("two ships", want[1]), (PROMPT, want[0])):
            assert equal(output(name, pipe, prompt), expected)
            checked_peak_bytes(attachment, device)
        new_digest = digest(attachment)
        assert new_digest != previous_digest or switch in UNPLANNED, "a plan of its own"
    assert equal(output(name, pipe), want[0])


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_cache_that_is_on_before_is_known_and_another_setting_is_a_change() -> None:
    pipe, device = CASES["FluxPipeline"].build(), SimulatedDevice(Machine())
    taylor_seer(pipe)
    want = output("FluxPipeline", pipe)
    with graphrun.attach(pipe, vram=int(0.95 * weight_bytes(pipe)), device=device) as attachment:
        assert equal(output("FluxPipeline", pipe), want)
        often = digest(attachment)
        pipe.transformer.disable_cache()
        pipe.transformer.enable_cache(taylor_seer_config(3))
        output("FluxPipeline", pipe)
        checked_peak_bytes(attachment, device)
        assert digest(attachment) != often


def test_what_modules_keep_in_private_attributes_is_a_setting() -> None:
    pipe = CASES["StableDiffusion3Pipeline"].build()
    modules = components_of(pipe)
    previous_state = (
        state_of(pipe, attributes_of(modules)),
        settings_of(pipe, attributes_of(modules)),
    )
    forward_chunking(pipe)
    assert (
        state_of(pipe, attributes_of(modules)),
        settings_of(pipe, attributes_of(modules)),
    ) != previous_state

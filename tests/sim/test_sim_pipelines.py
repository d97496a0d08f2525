"""Whole pipelines on the simulated device: FLUX and SDXL give the CPU's bits; injected faults leave
the counters consistent."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

from graphrun.sim import Machine, SimulatedCopyError, SimulatedOutOfMemory

Parts = dict[str, nn.Module]
TOKENS = 8


def _clip(width: int, projection: int = 16) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        projection_dim=projection,
        hidden_act="quick_gelu",
        bos_token_id=0,
        eos_token_id=1,
    )


def _vae(latent_channels: int) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=latent_channels,
        norm_num_groups=4,
        layers_per_block=1,
        shift_factor=0.1,
    )


def flux_parts(dtype: torch.dtype) -> Parts:
    """FLUX: CLIP, T5, transformer (2 double and 3 single blocks), VAE."""
    torch.manual_seed(0)
    parts: Parts = {
        "text_encoder": CLIPTextModel(_clip(16)),
        "text_encoder_2": T5EncoderModel(
            T5Config(
                vocab_size=64,
                d_model=24,
                d_kv=8,
                d_ff=48,
                num_layers=2,
                num_heads=3,
                feed_forward_proj="gated-gelu",
            )
        ),
        "transformer": FluxTransformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=24,
            pooled_projection_dim=16,
            guidance_embeds=True,
            axes_dims_rope=(4, 4, 8),
        ),
        "vae": _vae(4),
    }
    return {name: part.to(dtype).eval().requires_grad_(False) for name, part in parts.items()}


def sdxl_parts(dtype: torch.dtype) -> Parts:
    """SDXL: two CLIPs, UNet with cross attention, VAE."""
    torch.manual_seed(0)
    parts: Parts = {
        "text_encoder": CLIPTextModel(_clip(16)),
        "text_encoder_2": CLIPTextModelWithProjection(_clip(16, projection=16)),
        "unet": UNet2DConditionModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=2,
            attention_head_dim=(2, 4),
            use_linear_projection=True,
            cross_attention_dim=32,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=8 * 6 + 16,
            norm_num_groups=4,
        ),
        "vae": _vae(4),
    }
    return {name: part.to(dtype).eval().requires_grad_(False) for name, part in parts.items()}


def embed_ids(batch: int) -> torch.Tensor:
    """Token ids [batch TOKENS] that end with the end token."""
    ids = (torch.arange(TOKENS) * 7 % 60 + 2).repeat(batch, 1)
    ids[:, -1] = 1
    return ids


def run_flux(parts: Parts, device: str) -> torch.Tensor:
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), tokenizer=None, tokenizer_2=None, **parts
    )
    pipeline.set_progress_bar_config(disable=True)
    ids = embed_ids(1).to(device)
    with torch.no_grad():
        pooled, embeds = (
            pipeline.text_encoder(ids)["pooler_output"],
            pipeline.text_encoder_2(ids)[0],
        )
    return pipeline(
        prompt_embeds=embeds,
        pooled_prompt_embeds=pooled,
        height=32,
        width=32,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(1),
        output_type="pt",
    ).images


def run_sdxl(parts: Parts, device: str) -> torch.Tensor:
    pipeline = StableDiffusionXLPipeline(
        scheduler=EulerDiscreteScheduler(),
        tokenizer=None,
        tokenizer_2=None,
        add_watermarker=False,
        **parts,
    )
    pipeline.set_progress_bar_config(disable=True)
    ids = embed_ids(1).to(device)
    with torch.no_grad():
        first = pipeline.text_encoder(ids, output_hidden_states=True)
        second = pipeline.text_encoder_2(ids, output_hidden_states=True)
    embeds = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1)
    return pipeline(
        prompt_embeds=embeds,
        pooled_prompt_embeds=second[0],
        negative_prompt_embeds=embeds / 2,
        negative_pooled_prompt_embeds=second[0] / 2,
        height=16,
        width=16,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(1),
        output_type="pt",
    ).images


PIPELINES: dict[str, tuple[Callable[..., Parts], Callable[..., torch.Tensor]]] = {
    "flux": (flux_parts, run_flux),
    "sdxl": (sdxl_parts, run_sdxl),
}


def place(module: nn.Module) -> None:
    """Puts all of ``module`` on sim as views of one flat buffer."""
    entries = [
        (group, name)
        for child in module.modules()
        for group in (child._parameters, child._buffers)
        for name in group
    ]
    entries = [(group, name) for group, name in entries if group[name] is not None]
    distinct = {id(group[name]): group[name] for group, name in entries}
    offsets, end = {}, 0
    for key, tensor in distinct.items():
        offsets[key], end = end, end + -(-tensor.nbytes // 256) * 256
    buffer = torch.empty(end, dtype=torch.uint8, device="sim")
    parts = {}
    for key, tensor in distinct.items():
        view = (
            buffer[offsets[key] : offsets[key] + tensor.nbytes]
            .view(tensor.dtype)
            .view(tensor.shape)
        )
        view.copy_(tensor)
        parts[key] = (
            nn.Parameter(view, requires_grad=False) if isinstance(tensor, nn.Parameter) else view
        )
    for group, name in entries:
        group[name] = parts[id(group[name])]


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("flat", [False, True], ids=["moved", "flat"])
def test_pipelines_give_the_cpus_bits_and_leave_nothing(name, dtype, flat):
    make, run = PIPELINES[name]
    expected = run(make(dtype), "cpu")
    # FlopCounterMode does not count the CPU's fused attention.
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):
        run(make(dtype), "cpu")
    assert expected.isfinite().all()
    assert expected.std() > 0
    parts = make(dtype)
    with Machine() as machine:
        for part in parts.values():
            if flat:
                place(part)
            else:
                part.to("sim")
        result = run(parts, "sim")
        assert result.device.type == "sim"
        assert torch.equal(result.cpu(), expected)
        assert machine.charge_flops == counter.get_total_flops()
        weights = machine.allocated_bytes
        assert machine.peak_bytes > weights
    del parts, part, result
    gc.collect()  # pipelines and modules hold reference cycles of their own
    assert machine.allocated_bytes == 0
    assert machine.live() == []


@pytest.fixture(scope="module")
def placement():
    """A machine with a FLUX transformer on it, a call of it, the output, the bytes at rest, and how
    often a call allocates."""
    transformer = flux_parts(torch.bfloat16)["transformer"]
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(1, 16, 16, generator=generator).to(torch.bfloat16),
        "encoder_hidden_states": torch.randn(1, 8, 24, generator=generator).to(torch.bfloat16),
        "pooled_projections": torch.randn(1, 16, generator=generator).to(torch.bfloat16),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }
    machine = Machine()

    def call() -> torch.Tensor:
        with machine, torch.no_grad():
            return transformer(
                **{key: value.to("sim") for key, value in inputs.items()}, return_dict=False
            )[0].cpu()

    with machine:
        place(transformer)
    baseline, allocations = machine.allocated_bytes, machine.allocations
    expected = call()
    return machine, call, expected, baseline, machine.allocations - allocations


def fails(call: Callable[[], object], kind: type[Exception]) -> bool:
    """Whether ``call`` raises ``kind``; the error and its frames, which hold tensors, are gone
    afterwards."""
    try:
        call()
    except kind:
        return True
    return False


def test_a_call_leaves_the_books_as_they_were_without_the_collector(placement):
    machine, call, expected, baseline, _ = placement
    gc.disable()
    try:
        assert torch.equal(call(), expected)
        assert machine.allocated_bytes == baseline
    finally:
        gc.enable()


def test_an_allocation_may_fail_anywhere_and_the_next_run_works(placement):
    machine, call, expected, baseline, count = placement
    for number in [*range(1, count, max(1, count // 40)), count]:
        machine.fail_allocation = number
        assert fails(call, SimulatedOutOfMemory)
        assert (machine.allocated_bytes, machine.fail_allocation) == (baseline, None)
    assert torch.equal(call(), expected)


def test_any_copy_may_fail_and_the_next_run_works(placement):
    machine, call, expected, baseline, _ = placement
    copies = machine.copies_in + machine.copies_out
    call()
    for number in range(1, machine.copies_in + machine.copies_out - copies + 1):
        machine.fail_copy = number
        assert fails(call, SimulatedCopyError)
        assert machine.allocated_bytes == baseline
    assert torch.equal(call(), expected)


def test_the_peak_is_exactly_the_capacity_that_suffices(placement):
    machine, call, expected, baseline, _ = placement
    machine.reset_peak()
    call()
    peak = machine.peak_bytes
    try:
        machine.capacity_bytes = peak
        assert torch.equal(call(), expected)
        machine.capacity_bytes = peak - 1
        assert fails(call, SimulatedOutOfMemory)
    finally:
        machine.capacity_bytes = None
    assert machine.allocated_bytes == baseline


def test_diffusers_own_offloading_runs_on_it_unmodified():
    expected = run_flux(flux_parts(torch.float32), "cpu")
    parts = flux_parts(torch.float32)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with Machine() as machine:
            pipeline = FluxPipeline(
                scheduler=FlowMatchEulerDiscreteScheduler(),
                tokenizer=None,
                tokenizer_2=None,
                **parts,
            )
            pipeline.enable_model_cpu_offload(device="sim")
            result = run_flux(parts, "sim")
            assert torch.equal(result.cpu(), expected)
            assert machine.copies_in > 0
            pipeline.remove_all_hooks()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)

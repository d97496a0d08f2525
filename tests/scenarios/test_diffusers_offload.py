"""Pipelines under diffusers' own ``enable_model_cpu_offload`` on `sim`: which defects of S0, S1 and
S3 occur there.

Those of S0.1 and S0.2 are next to graphrun's tests. Tests with ``under`` in their name describe
another tool, good or bad.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import accelerate
import diffusers
import numpy as np
import pytest
import torch
from peers_tools import modules_of
from scenario_graphs import GRAPHS, Pages, nbytes, offloaded
from test_s1_quantized import build_again, quantized_by_bitsandbytes
from torch import nn
from whole_pipelines import TinyPipeline, pixels, planned, streamed

from graphrun import sim
from graphrun.graph.loading import load
from graphrun.modules.build import build, build_part
from graphrun.ops.pipeline import assemble
from graphrun.profile.quantized import layer_tensors


def pipeline(name: str, change: Callable[[dict[str, nn.Module]], None] = lambda _: None) -> Any:
    """diffusers' pipeline of the graph ``name``, over modules of its own."""
    graph = load(GRAPHS / f"{name}.yaml")
    modules = {n: build(component, graph) for n, component in graph.components.items()}
    change(modules)
    return assemble(
        graph,
        modules,
        {n: build_part(part, graph) for n, part in graph.parts.items()},
        torch.device("cpu"),
    )


def picture(pipe: Any, flux: TinyPipeline) -> Any:
    """The picture for the inputs of `whole_pipelines.plain_image`."""
    inputs = flux.inputs
    call = {
        name: inputs[name]
        for name in ("prompt", "height", "width", "guidance_scale", "max_sequence_length")
    }
    generator = torch.Generator("cpu").manual_seed(inputs["seed"])
    return pixels(pipe(**call, num_inference_steps=inputs["steps"], generator=generator).images[0])


def test_s0_2_under_diffusers_offloading_guidance_holds_the_largest_encoder_beside_another() -> (
    None
):
    """SD3: L, G, T5, L, G, T5. The first of the list has nobody before it, so that T5 stays for L
    and G of the second turn."""
    pipe = pipeline("sd3-tiny")
    with offloaded(pipe) as machine:
        pipe.encode_prompt("a", "a", "a", do_classifier_free_guidance=True)
    assert (
        nbytes(pipe.text_encoder_3, pipe.text_encoder_2)
        <= machine.peak_bytes
        < nbytes(*modules_of(pipe).values())
    )


def test_s0_3_under_diffusers_offloading_the_encoder_stays_while_the_vae_runs_early() -> None:
    """Image to image: te2, vae.encode, unet, vae.decode. diffusers' list says te2, unet, vae, and
    evicts by it."""
    base, host_bytes = pipeline("sdxl-tiny"), list[int]()
    parts = {
        name: getattr(base, name)
        for name in ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "unet")
    }
    pipe = assemble_plain(
        diffusers.StableDiffusionXLImg2ImgPipeline(**parts, scheduler=base.scheduler)
    )
    with offloaded(pipe) as machine:
        encode = pipe.vae.encoder.register_forward_pre_hook(
            lambda *_: host_bytes.append(machine.allocated_bytes)
        )
        pipe(
            "a",
            image=torch.zeros(1, 3, 64, 64),
            num_inference_steps=2,
            strength=0.9,
            output_type="latent",
        )
        encode.remove()
    assert (
        nbytes(pipe.vae, pipe.text_encoder_2) < host_bytes[0] < nbytes(*modules_of(pipe).values())
    ), "graphrun evicts by the next use (S0.3)"


def test_s0_4_and_s3_5_under_diffusers_offloading_every_run_copies_everything_again(
    flux: TinyPipeline,
) -> None:
    pipe = pipeline("flux-tiny")
    weights = nbytes(pipe.text_encoder, pipe.text_encoder_2, pipe.transformer, pipe.vae)
    with offloaded(pipe) as machine:
        copied_counts = []
        for _ in range(2):
            bytes_before = machine.bytes_in
            assert np.array_equal(picture(pipe, flux), flux.image)
            copied_counts.append(machine.bytes_in - bytes_before)
    assert min(copied_counts) >= weights, (
        "graphrun's sessions keep what fits (S0.4), and a prompt is encoded once (S3.5)"
    )


def test_s0_5_under_diffusers_offloading_reserved_memory_falls_when_the_next_component_comes(
    flux: TinyPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No defect where a next one comes. After an encoding alone none does (S0.1)."""
    pipe = pipeline("flux-tiny")
    with offloaded(pipe) as machine:
        pages = Pages(machine)
        monkeypatch.setattr(accelerate.hooks, "clear_device_cache", pages.trim)
        pipe.encode_prompt("a", "a", max_sequence_length=16)
        assert pages.allocator.used_bytes >= nbytes(pipe.text_encoder_2), "the last encoder stays"
        picture(pipe, flux)
    assert (
        max(used_before - used_after for used_before, used_after, _ in pages.trims)
        >= nbytes(pipe.transformer) / 2
    )


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_s1_1_under_diffusers_offloading_bitsandbytes_layers_do_not_get_to_sim(
    precision: str,
) -> None:
    """graphrun places them field by field; ``module.to`` has only bitsandbytes' own CUDA code for
    it."""

    def quantize(modules: dict[str, nn.Module]) -> None:
        modules["text_encoder_2"] = quantized_by_bitsandbytes(modules["text_encoder_2"], precision)

    pipe = pipeline("flux-tiny", quantize)
    with (
        pytest.raises(RuntimeError, match=r"Couldn't swap Linear(8bitLt|4bit)\.weight"),
        offloaded(pipe),
    ):
        pipe.encode_prompt("a", "a", max_sequence_length=16)


def test_s3_4_under_diffusers_offloading_a_component_larger_than_the_card_does_not_run(
    flux: TinyPipeline,
) -> None:
    smallest_problem = flux.smallest()
    plan = planned(smallest_problem)
    assert "transformer" in streamed(plan)
    assert np.array_equal(pixels(flux.run(smallest_problem, plan).outputs["image"]), flux.image)
    pipe = pipeline("flux-tiny")
    with offloaded(pipe) as machine:
        machine.capacity_bytes = smallest_problem.effective_bytes
        with pytest.raises(
            torch.OutOfMemoryError
        ):  # a hard cap is an error in both, and spills in neither
            picture(pipe, flux)
    assert machine.peak_bytes <= smallest_problem.effective_bytes


def test_s3_3_under_diffusers_offloading_later_runs_are_as_the_second_one(
    flux: TinyPipeline,
) -> None:
    """No defect on the device: hooks are reset at the end of a whole call, unlike after an encoding
    alone (S0.1)."""
    pipe, peaks, seconds = pipeline("flux-tiny"), [], []
    with offloaded(pipe) as machine:
        for _ in range(4):
            start = machine.seconds()
            machine.reset_peak()
            picture(pipe, flux)
            peaks.append(machine.peak_bytes)
            seconds.append(machine.seconds() - start)
            leftover_bytes = machine.allocated_bytes
    assert len(set(peaks[1:])) == 1
    assert max(seconds[1:]) <= 1.05 * min(seconds[1:])
    assert leftover_bytes <= nbytes(pipe.vae) + 512 * 1024


def test_s1_1_under_diffusers_offloading_an_8_bit_component_of_old_stays_beside_all_later_ones(
    flux: TinyPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bitsandbytes before 0.48, as diffusers asks for it: it gets no hook, is counted nowhere,
    and the log alone says so."""
    pipeline_utils, ask = (
        diffusers.pipelines.pipeline_utils,
        diffusers.pipelines.pipeline_utils._check_bnb_status,
    )
    pipe, host_bytes = pipeline("flux-tiny"), list[int]()
    monkeypatch.setattr(
        pipeline_utils,
        "_check_bnb_status",
        lambda m: (True, False, True) if m is pipe.text_encoder_2 else ask(m),
    )
    monkeypatch.setattr(
        pipeline_utils, "is_bitsandbytes_version", lambda operation, number: operation == "<"
    )
    with offloaded(pipe) as machine:
        assert not hasattr(pipe.text_encoder_2, "_hf_hook")
        pipe.text_encoder_2.to(sim.device)  # where bitsandbytes made it
        pipe.transformer.transformer_blocks[0].register_forward_pre_hook(
            lambda *_: host_bytes.append(machine.allocated_bytes)
        )
        assert np.array_equal(picture(pipe, flux), flux.image)
        assert machine.allocated_bytes >= nbytes(pipe.text_encoder_2)
    assert min(host_bytes) >= nbytes(pipe.text_encoder_2, pipe.transformer)
    assert max(host_bytes) < nbytes(*modules_of(pipe).values())


def test_s1_2_under_diffusers_offloading_a_second_owner_keeps_the_bytes_and_nobody_is_told(
    flux: TinyPipeline,
) -> None:
    pipe = pipeline("flux-tiny")
    layer = pipe.text_encoder_2.encoder.block[1].layer[0].SelfAttention.q
    with offloaded(pipe) as machine:
        hook = layer.register_forward_hook(
            lambda module, args, output: setattr(module, "kept", module.weight.detach())
        )
        assert np.array_equal(picture(pipe, flux), flux.image)
        hook.remove()
        pipe.maybe_free_model_hooks()
        leftover_bytes = machine.allocated_bytes
        assert leftover_bytes >= layer.weight.nbytes
        del layer.kept
        assert machine.allocated_bytes == leftover_bytes - layer.weight.nbytes


def test_s1_3_under_diffusers_offloading_tied_weights_are_copied_once(flux: TinyPipeline) -> None:
    """No defect: a module is moved whole, and its aliases with it. By leaf, to disk, they come
    apart (benchmarks/defects)."""
    pipe = pipeline("flux-tiny")
    encoder, tokens = pipe.text_encoder_2, torch.arange(16)[None]
    weight_bytes = sum(tensor.nbytes for tensor in encoder.state_dict().values())
    with offloaded(pipe) as machine:
        encoder(tokens.to(sim.device))
        assert machine.bytes_in == nbytes(encoder) + tokens.nbytes < weight_bytes


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_s1_3_and_s1_4_under_transformers_a_footprint_leaves_statistics_and_outliers_out(
    precision: str,
) -> None:
    """diffusers' offloading counts no bytes at all; what there is to ask is
    ``get_memory_footprint``, before or after a call."""
    module = quantized_by_bitsandbytes(build_again(), precision)
    layers = [
        layer
        for layer in module.modules()
        if type(layer).__name__ in ("Linear4bit", "Linear8bitLt")
    ]
    truly = sum(
        sum(layer_tensors(layer.out_features, layer.in_features, precision)) for layer in layers
    )
    footprint_bytes = module.get_memory_footprint()
    assert sum(layer.weight.nbytes for layer in layers) < truly
    assert footprint_bytes == nbytes(module), "codes alone"
    if precision == "int8":
        q = module.encoder.block[0].layer[0].SelfAttention.q
        q.register_forward_pre_hook(lambda layer, args: (args[0] * 100, *args[1:]))
        with torch.no_grad():
            module(torch.arange(32).reshape(1, 32))
        assert q.state.idx is not None, "the columns of its last call's outliers"
        assert q.state.idx.nbytes > 0
        assert module.get_memory_footprint() == footprint_bytes


def test_s3_1_under_diffusers_offloading_ram_has_no_budget_and_holds_everything(
    flux: TinyPipeline,
) -> None:
    """graphrun reads the same components from disk where RAM is half of the largest one's bytes."""
    parameters = {
        name
        for name in inspect.signature(
            diffusers.DiffusionPipeline.enable_model_cpu_offload
        ).parameters
        if name != "self"
    }
    assert parameters == {"gpu_id", "device"}
    pipe = pipeline("flux-tiny")
    with offloaded(pipe) as machine:
        assert machine.allocated_bytes == 0
        assert on_host(pipe) == nbytes(*modules_of(pipe).values())


def test_s3_2_under_diffusers_offloading_what_no_later_component_needs_goes_back_to_ram(
    flux: TinyPipeline,
) -> None:
    pipe, host_bytes = pipeline("flux-tiny"), list[int]()
    encoders = nbytes(pipe.text_encoder, pipe.text_encoder_2)
    with offloaded(pipe) as machine:
        hook = pipe.vae.decoder.register_forward_pre_hook(
            lambda *_: host_bytes.append(on_host(pipe))
        )
        assert np.array_equal(picture(pipe, flux), flux.image)
        hook.remove()
        assert machine.bytes_out >= encoders + nbytes(pipe.transformer), (
            "weights that nobody changed are copied back"
        )
    assert host_bytes == [encoders + nbytes(pipe.transformer)]


def on_host(pipe: Any) -> int:
    """Bytes of its components' tensors that are in RAM."""
    tensors = (
        t for module in modules_of(pipe).values() for t in (*module.parameters(), *module.buffers())
    )
    return sum(t.nbytes for t in tensors if t.device.type == "cpu")


def assemble_plain(pipe: Any) -> Any:
    """In a subclass, as `assemble` makes them, which `offloaded` takes off."""
    pipe.set_progress_bar_config(disable=True)
    pipe.__class__ = type(type(pipe).__name__, (type(pipe),), {})
    return pipe

"""The same pipelines under diffusers' own ``enable_model_cpu_offload`` on `sim`: which of the scenarios' defects they have there.

S0.1, S0.2, S2.1 and S4.1 have theirs beside graphrun's tests; here are the others that can be asked of whole components.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from executor_whole import Whole, pixels, planned, streamed
from scenario_graphs import GRAPHS, offloaded
from test_s1_quantized import quantized_by_bitsandbytes
from torch import nn

from graphrun.components.build import build, build_part
from graphrun.graph.load import load
from graphrun.ops.pipeline import assemble

SMALL = {"steps": 2, "height": 64, "width": 64}


@pytest.fixture(scope="module")
def whole() -> Whole:
    return Whole("flux-tiny", SMALL)


def pipeline(name: str, change: Callable[[dict[str, nn.Module]], None] = lambda _: None) -> Any:
    """diffusers' pipeline of the graph ``name``, over modules of its own."""
    graph = load(GRAPHS / f"{name}.yaml")
    modules = {n: build(component, graph) for n, component in graph.components.items()}
    change(modules)
    return assemble(graph, modules, {n: build_part(part, graph) for n, part in graph.parts.items()}, torch.device("cpu"))


def picture(pipe: Any, whole: Whole) -> Any:
    """As `executor_whole.plain_image` asks for it."""
    inputs = whole.inputs
    call = {name: inputs[name] for name in ("prompt", "height", "width", "guidance_scale", "max_sequence_length")}
    generator = torch.Generator("cpu").manual_seed(inputs["seed"])
    return pixels(pipe(**call, num_inference_steps=inputs["steps"], generator=generator).images[0])


def nbytes(*modules: nn.Module) -> int:
    return sum(tensor.nbytes for module in modules for tensor in (*module.parameters(), *module.buffers()))


def test_s0_3_the_encoder_stays_beside_the_vae_that_runs_before_its_turn_in_the_list() -> None:
    """Image to image: te2, vae.encode, unet, vae.decode. diffusers' list says te2, unet, vae, and evicts by it."""
    base, seen = pipeline("sdxl-tiny"), list[int]()
    parts = {name: getattr(base, name) for name in ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "unet")}
    pipe = assemble_plain(diffusers.StableDiffusionXLImg2ImgPipeline(**parts, scheduler=base.scheduler))
    with offloaded(pipe) as machine:
        encode = pipe.vae.encoder.register_forward_pre_hook(lambda *_: seen.append(machine.allocated_bytes))
        pipe("a", image=torch.zeros(1, 3, 64, 64), num_inference_steps=2, strength=0.9, output_type="latent")
        encode.remove()
    assert seen[0] > nbytes(pipe.vae) + nbytes(pipe.text_encoder_2), "graphrun evicts by the next use (S0.3)"


def test_s0_4_and_s3_5_every_run_copies_everything_again_however_much_memory_there_is(whole: Whole) -> None:
    pipe = pipeline("flux-tiny")
    weights = nbytes(pipe.text_encoder, pipe.text_encoder_2, pipe.transformer, pipe.vae)
    with offloaded(pipe) as machine:
        copied = []
        for _ in range(2):
            before = machine.bytes_in
            assert np.array_equal(picture(pipe, whole), whole.image)
            copied.append(machine.bytes_in - before)
    assert min(copied) >= weights, "graphrun's sessions keep what fits (S0.4), and a prompt is encoded once (S3.5)"


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_s1_quantized_layers_do_not_move(precision: str) -> None:
    """graphrun places them field by field; ``module.to`` has only bitsandbytes' own CUDA code for it."""

    def quantize(modules: dict[str, nn.Module]) -> None:
        modules["text_encoder_2"] = quantized_by_bitsandbytes(modules["text_encoder_2"], precision)

    pipe = pipeline("flux-tiny", quantize)
    with pytest.raises(RuntimeError, match=r"Couldn't swap Linear(8bitLt|4bit)\.weight"), offloaded(pipe):
        pipe.encode_prompt("a", "a", max_sequence_length=16)


def test_s2_and_s3_4_a_component_larger_than_the_card_does_not_run_there_and_streams_here(whole: Whole) -> None:
    least = whole.smallest()
    plan = planned(least)
    assert "transformer" in streamed(plan)
    assert np.array_equal(pixels(whole.run(least, plan).outputs["image"]), whole.image)
    pipe = pipeline("flux-tiny")
    with offloaded(pipe) as machine:
        machine.capacity_bytes = least.effective_bytes
        with pytest.raises(torch.OutOfMemoryError):  # a hard cap is an error in both, and spills in neither
            picture(pipe, whole)
    assert machine.peak_bytes <= least.effective_bytes


def test_s3_3_its_later_runs_are_as_its_second_one(whole: Whole) -> None:
    """No defect on the device: hooks are reset at the end of a whole call, unlike behind an encoding alone (S0.1)."""
    pipe, peaks, seconds = pipeline("flux-tiny"), [], []
    with offloaded(pipe) as machine:
        for _ in range(4):
            start = machine.seconds()
            machine.reset_peak()
            picture(pipe, whole)
            peaks.append(machine.peak_bytes)
            seconds.append(machine.seconds() - start)
            left = machine.allocated_bytes
    assert len(set(peaks[1:])) == 1
    assert max(seconds[1:]) <= 1.05 * min(seconds[1:])
    assert left <= nbytes(pipe.vae) + 512 * 1024


def test_s4_1_whole_components_have_their_inputs_where_they_are(whole: Whole) -> None:
    """No defect: a component is wholly on the device when it is entered. Under offloading by leaf its device is meta (S4.1)."""
    pipe, seen = pipeline("flux-tiny"), list[tuple[str, str]]()
    with offloaded(pipe):
        hook = pipe.text_encoder_2.encoder.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((next(module.parameters()).device.type, kwargs["input_ids"].device.type)),
            with_kwargs=True,
        )
        assert np.array_equal(picture(pipe, whole), whole.image)
        hook.remove()
    assert seen == [("sim", "sim")]


def assemble_plain(pipe: Any) -> Any:
    """In a subclass, as `assemble` makes them, which `offloaded` takes off."""
    pipe.set_progress_bar_config(disable=True)
    pipe.__class__ = type(type(pipe).__name__, (type(pipe),), {})
    return pipe

"""Pipelines under diffusers' own offloading on `sim`: which defects of S2 and S4 occur there.

Model offloading does not stream; for scenarios about streaming, diffusers' sequential and group
offloading are tested.
"""

from __future__ import annotations

import inspect
from typing import Any

import accelerate
import diffusers
import numpy as np
import pytest
import torch
from peers_machine import Sim
from scenario_graphs import GLM_ENCODE, Encoding, encode, graph_of, nbytes, offloaded
from test_diffusers_offload import picture, pipeline
from torch import nn
from whole_pipelines import TinyPipeline

from graphrun import sim

STREAMING = ["sequential offload", "group offload, block", "group offload, leaf"]


def leaves(module: nn.Module) -> list[nn.Module]:
    return [
        part for part in module.modules() if next(part.parameters(recurse=False), None) is not None
    ]


def test_s2_2_under_diffusers_offloading_a_second_mover_is_found_in_some_orders_only(
    flux: TinyPipeline,
) -> None:
    pipe = pipeline("flux-tiny")
    accelerate.cpu_offload(pipe.transformer, "cpu")
    with offloaded(pipe):  # takes accelerate's hooks off
        assert np.array_equal(picture(pipe, flux), flux.image)
    with Sim(None).open():
        pipe = pipeline("flux-tiny")
        pipe.transformer.enable_group_offload(onload_device=sim.device, offload_type="leaf_level")
        with pytest.raises(ValueError, match="group offloading enabled. This is not supported"):
            pipe.enable_model_cpu_offload(device=sim.device)
    pipe = pipeline("flux-tiny")
    with (  # noqa: PT012
        pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"),
        offloaded(pipe),
    ):
        accelerate.cpu_offload(pipe.transformer, sim.device)  # is accepted
        picture(pipe, flux)


@pytest.mark.parametrize("tool", STREAMING)
def test_s2_3_and_s2_6_under_diffusers_streaming_the_bits_and_the_clock_are_right(
    flux: TinyPipeline, tool: str
) -> None:
    """No defect. No mode predicts seconds, so none can predict too few: the measured ones are never
    below bytes over bandwidth."""
    assert not [
        name
        for name in dir(diffusers.DiffusionPipeline)
        if any(word in name for word in ("predict", "estimate", "seconds"))
    ]
    pipe = pipeline("flux-tiny")
    with offloaded(pipe, tool) as machine:
        assert np.array_equal(picture(pipe, flux), flux.image)
        machine.synchronize()
        assert machine.seconds() >= machine.bytes_in / machine.h2d_bytes_per_second
        double_bytes = nbytes(pipe.transformer) + 0.9 * nbytes(pipe.transformer)
        assert machine.bytes_in >= double_bytes, "two steps, and nothing stays resident"


def test_s2_4_under_diffusers_streaming_the_peak_is_the_largest_leafs_and_nobody_says_so_before(
    flux: TinyPipeline,
) -> None:
    peaks = {}
    for tool in ("model offload", "group offload, block", "group offload, leaf"):
        pipe = pipeline("flux-tiny")
        with offloaded(pipe, tool) as machine:
            pipe.encode_prompt("a", "a", max_sequence_length=16)
            peaks[tool] = machine.peak_bytes
    encoder = pipe.text_encoder_2
    largest = max(nbytes(leaf) for leaf in leaves(encoder))
    assert peaks["model offload"] >= nbytes(encoder)
    assert peaks["group offload, leaf"] < peaks["model offload"]
    assert peaks["group offload, block"] == peaks["model offload"], (
        "blocks are looked for in a module's own lists, not in T5's encoder"
    )
    assert peaks["group offload, leaf"] >= largest >= encoder.shared.weight.nbytes
    parameters = inspect.signature(diffusers.DiffusionPipeline.enable_group_offload).parameters
    assert not [
        name
        for name in parameters
        if "memory" in name.replace("low_cpu_mem_usage", "") or "budget" in name
    ]


def test_s4_1_under_diffusers_offloading_whole_components_have_their_inputs_where_they_are(
    flux: TinyPipeline,
) -> None:
    """No defect: a component is wholly on the device when it is entered. Under offloading by leaf
    its device is meta (S4.1)."""
    pipe, devices = pipeline("flux-tiny"), list[tuple[str, str]]()
    with offloaded(pipe) as machine:
        hook = pipe.text_encoder_2.encoder.register_forward_pre_hook(
            lambda module, args, kwargs: devices.append(
                (next(module.parameters()).device.type, kwargs["input_ids"].device.type)
            ),
            with_kwargs=True,
        )
        assert np.array_equal(picture(pipe, flux), flux.image)
        hook.remove()
        assert machine.peak_bytes < nbytes(*flux.modules.values()), "and it alone"
    assert devices == [("sim", "sim")]


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Encoding:
    return Encoding(graph_of(GLM_ENCODE, tmp_path_factory.mktemp("glm")))


@pytest.mark.parametrize("tool", ["model offload", *STREAMING])
def test_s4_2_under_diffusers_offloading_glm_gives_the_same_bits(glm: Encoding, tool: str) -> None:
    """No defect in diffusers 0.42, under sequential offloading neither, where
    ``text_encoder.device`` is still meta."""
    pipe = glm.pipeline(torch.device("cpu"))
    rest_device = "meta" if tool == "sequential offload" else "cpu"
    with offloaded(pipe, tool):
        assert pipe.text_encoder.device.type == rest_device
        outputs = encode(pipe, glm.inputs)
        assert pipe.text_encoder.device.type == ("sim" if tool == "model offload" else rest_device)
    assert all(torch.equal(output, other) for output, other in zip(outputs, glm.plain, strict=True))


@pytest.mark.parametrize(
    ("tool", "error", "message"),
    [
        ("model offload", RuntimeError, "at least two devices, sim:0 and cpu"),
        ("sequential offload", NotImplementedError, "Cannot copy out of meta tensor"),
    ],
)
def test_s4_4_under_diffusers_offloading_a_move_fails_in_torch_and_says_no_suggestion(
    flux: TinyPipeline, tool: str, error: type[Exception], message: str
) -> None:
    pipe = pipeline("flux-tiny")
    hook = pipe.transformer.transformer_blocks[0].register_forward_hook(
        lambda *_: move(pipe.transformer)
    )
    with pytest.raises(error, match=message) as error_info, offloaded(pipe, tool):  # noqa: PT012
        assert pipe.transformer.device.type in ("cpu", "meta")
        picture(pipe, flux)
    hook.remove()
    assert "offload" not in str(error_info.value)


def test_s4_4_under_diffusers_group_offloading_a_move_is_left_out_with_a_warning(
    flux: TinyPipeline, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No defect. transformers' modules have no such guard."""
    monkeypatch.setattr(diffusers.utils.logging.get_logger("diffusers"), "propagate", True)
    pipe = pipeline("flux-tiny")
    pipe.transformer.transformer_blocks[0].register_forward_hook(lambda *_: move(pipe.transformer))
    with offloaded(pipe, "group offload, leaf"):
        assert np.array_equal(picture(pipe, flux), flux.image)
    assert "is group offloaded and moving it using `.to()` is not supported" in caplog.text


def move(module: Any) -> None:
    module.to("cpu")

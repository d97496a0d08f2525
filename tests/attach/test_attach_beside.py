"""Attached pipelines compared with diffusers' own offloading, on the same simulated accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.quantizers.quantization_config import QuantizationMethod
from test_attach_pipelines import equal
from tiny_pipelines import Case, cases
from torch import nn

import graphrun
from graphrun import sim
from graphrun.model.plan import Stream
from graphrun.sim import Machine


def nbytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


@contextmanager
def offloaded(pipe: Any) -> Iterator[Machine]:
    """``pipe`` under its own ``enable_model_cpu_offload``."""
    swap_setting = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with Machine() as machine:
            pipe.enable_model_cpu_offload(device=sim.device)
            yield machine
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap_setting)


def test_cogview4_streams_its_glm_encoder_which_diffusers_holds_whole() -> None:
    case: Case = cases()["CogView4Pipeline"]
    pipe = case.build()
    want, glm_bytes = case.call(pipe), nbytes(pipe.text_encoder)
    with graphrun.attach(pipe, vram="1G", exclude=["text_encoder"], device="sim") as attachment:
        assert equal(case.call(pipe), want)
        assert attachment.solution is not None
        assert attachment.trace is not None
        streamed = {
            a.component
            for slot in attachment.solution.plan.slots
            for a in slot.actions
            if isinstance(a, Stream)
        }
        assert "text_encoder" in streamed
        phases = {
            phase.name
            for phase in attachment.solution.problem.phases
            if phase.uses[0].component == "text_encoder"
        }
        assert (
            max(slot.peak_bytes for slot in attachment.trace.slots if slot.phase in phases)
            < glm_bytes
        )
    with offloaded(pipe) as machine:
        case.call(pipe)
        assert machine.peak_bytes >= glm_bytes


def test_cogview4s_rotary_tables_are_copied_once_per_call_and_not_per_attention() -> None:
    case: Case = cases()["CogView4Pipeline"]
    pipe = case.build()
    want, devices = case.call(pipe), list[str]()

    def note(_: object, __: object, arguments: dict[str, Any]) -> None:
        devices.extend(table.device.type for table in arguments["image_rotary_emb"])

    hook = pipe.transformer.transformer_blocks[0].attn1.register_forward_pre_hook(
        note, with_kwargs=True
    )
    with graphrun.attach(pipe, vram="1G", exclude=["text_encoder"], device="sim"):
        assert equal(case.call(pipe), want)
    assert set(devices) == {"meta", "sim"}  # its dry run, and the call
    devices.clear()
    with offloaded(pipe):
        case.call(pipe)
    assert set(devices) == {"cpu"}
    hook.remove()


def test_diffusers_releases_an_8_bit_component_between_calls_and_holds_it_whole_in_one() -> None:
    """The attributes that the loader sets are all that diffusers checks; before bitsandbytes 0.48
    it skipped such a component."""
    case: Case = cases()["StableDiffusionXLPipeline"]
    pipe = case.build()
    pipe.unet.quantization_method, pipe.unet.is_loaded_in_8bit = (
        QuantizationMethod.BITS_AND_BYTES,
        True,
    )
    with offloaded(pipe) as machine:
        case.call(pipe)
        assert machine.peak_bytes >= nbytes(pipe.unet)
        assert machine.allocated_bytes < nbytes(pipe.unet)

"""LoRAs loaded, weighted, fused and unloaded while attached: the plain pipeline's results, each
with a plan of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_attach import SD, seeded
from test_attach_pipelines import equal, weight_bytes

import graphrun
from graphrun.errors import InputError
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine

pytest.importorskip("peft")

LAYERS = {"unet": r"attn\d\.to_(q|v)$", "text_encoder": r"self_attn\.q_proj$"}


def lora(pipe: Any, seed: int, rank: int) -> dict[str, torch.Tensor]:
    """A LoRA for ``pipe`` as diffusers saves it."""
    generator, factors = torch.Generator().manual_seed(seed), {}
    for part, pattern in LAYERS.items():
        for path, layer in getattr(pipe, part).named_modules():
            if isinstance(layer, torch.nn.Linear) and re.search(pattern, path):
                name = (
                    f"{part}.{path}"
                    if part == "unet" or path.startswith("text_model")
                    else f"{part}.text_model.{path}"
                )
                factors[f"{name}.lora_A.weight"] = torch.randn(
                    rank, layer.in_features, generator=generator
                )
                factors[f"{name}.lora_B.weight"] = torch.randn(
                    layer.out_features, rank, generator=generator
                )
    return factors


def test_loras_may_be_loaded_weighted_fused_and_unloaded_while_attached() -> None:
    plain, pipe, device = SD.build(), SD.build(), SimulatedDevice(Machine())
    first, second = lora(pipe, 1, 4), lora(pipe, 2, 8)
    changes: list[Callable[[Any], Any]] = [
        lambda pipe: pipe.load_lora_weights(dict(second), adapter_name="second"),
        lambda pipe: pipe.set_adapters(["first", "second"], [0.5, 0.7]),
        lambda pipe: pipe.fuse_lora(lora_scale=0.8),
        lambda pipe: pipe.unfuse_lora(),  # a fused LoRA takes no activation
        lambda pipe: pipe.unload_lora_weights(),
    ]
    for target in (plain, pipe):
        target.load_lora_weights(dict(first), adapter_name="first")
    bare, wants = seeded(SD.build()), []
    with graphrun.attach(pipe, vram=int(0.95 * weight_bytes(pipe)), device=device) as attachment:
        for change in changes:
            change(plain)
            change(pipe)
            wants.append(seeded(plain))
            assert equal(seeded(pipe), wants[-1])
            assert attachment.solution is not None
            assert attachment.trace is not None
            assert attachment.trace.overruns == ()
            assert attachment.replans == ()
            assert device.allocated_bytes == attachment.held_bytes
    assert not equal(wants[0], wants[1])
    assert not equal(wants[0], bare)


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda pipe: pipe.fuse_lora(), "fuse_lora"),
        (lambda pipe: pipe.unet.fuse_lora(), "fuse_lora"),
        (lambda pipe: pipe.unet.delete_adapters("first"), "delete_adapters"),
        (lambda pipe: pipe.text_encoder.delete_adapter("first"), "delete_adapter"),
        (lambda pipe: next(m for m in pipe.unet.modules() if hasattr(m, "merge")).merge(), "merge"),
        (lambda pipe: pipe.vae.load_state_dict(pipe.vae.state_dict()), "load_state_dict"),
    ],
    ids=["pipeline", "component", "adapters", "text encoder", "layer", "state dict"],
)
def test_weights_cannot_be_changed_inside_a_call(change: Callable[[Any], Any], name: str) -> None:
    pipe, device = SD.build(), SimulatedDevice(Machine())
    pipe.load_lora_weights(lora(pipe, 1, 4), adapter_name="first")
    want = seeded(pipe)

    def callback(_: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        change(pipe)
        return values

    with graphrun.attach(pipe, vram=int(0.95 * weight_bytes(pipe)), device=device) as attachment:
        with pytest.raises(
            InputError,
            match=rf"weights cannot change while .* runs: call {name}\(\) before or after it",
        ):
            seeded(pipe, callback_on_step_end=callback)
        assert device.allocated_bytes == attachment.held_bytes
        assert equal(seeded(pipe), want)

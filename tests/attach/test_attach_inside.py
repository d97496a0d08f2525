"""Calls that are changed from inside, and methods that change modules: `detach` restores a plain
pipeline and an empty device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import diffusers as d
import pytest
import torch
from campaign import sampled
from test_attach_pipelines import equal, weight_bytes
from tiny_pipelines import Case, cases

import graphrun
from graphrun.diffusers_.attach import Attachment
from graphrun.errors import InputError
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine

CASES = cases()
SD: Case = CASES["StableDiffusionPipeline"]


def attached(pipe: Any, share: float = 0.95) -> tuple[Attachment, SimulatedDevice]:
    """``pipe`` attached within ``share`` times the bytes of its weights."""
    device = SimulatedDevice(Machine())
    return graphrun.attach(pipe, vram=int(share * weight_bytes(pipe)), device=device), device


def stepping(action: Callable[[], Any]) -> Case:
    """The case with a callback that runs ``action`` after the first step."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            action()
        return values

    return replace(SD, arguments=lambda: {**SD.arguments(), "callback_on_step_end": callback})


def assert_detached(pipe: Any, device: SimulatedDevice, kind: type[Any]) -> None:
    """Fails unless ``pipe`` is of its own class, on the CPU, and without hooks or attributes of
    graphrun."""
    modules = [
        child
        for part in pipe.components.values()
        if isinstance(part, torch.nn.Module)
        for child in part.modules()
    ]
    assert type(pipe) is kind
    assert not hasattr(pipe, "graphrun")
    assert device.allocated_bytes == 0
    hooks = [
        hook
        for child in modules
        for hook in (*child._forward_hooks.values(), *child._forward_pre_hooks.values())
    ]
    # transformers has hooks of its own
    assert not [hook for hook in hooks if hook.__module__.startswith("graphrun")]
    assert not [
        name for child in modules for name in dir(child) if name.lstrip("_").startswith("graphrun")
    ]
    assert {
        t.device.type for child in modules for t in (*child.parameters(), *child.buffers())
    } == {"cpu"}


CHANGES: list[tuple[str, Callable[[Any], Any]]] = [
    ("CogVideoXPipeline", lambda pipe: pipe.fuse_qkv_projections()),
    (
        "CogVideoXPipeline",
        lambda pipe: (pipe.fuse_qkv_projections(), pipe.unfuse_qkv_projections()),
    ),
    ("CogVideoXPipeline", lambda pipe: pipe.vae.enable_tiling()),
    ("StableDiffusionXLPipeline", lambda pipe: pipe.fuse_qkv_projections()),
    (
        "StableDiffusionXLPipeline",
        lambda pipe: (pipe.enable_freeu(0.9, 0.2, 1.2, 1.4), pipe.enable_attention_slicing()),
    ),
    ("StableDiffusionXLPipeline", lambda pipe: (pipe.upcast_vae(), pipe.vae.enable_slicing())),
    ("StableDiffusionXLPAGPipeline", lambda pipe: pipe.set_pag_applied_layers(["mid"])),
    ("AnimateDiffPipeline", lambda pipe: pipe.enable_free_init(num_iters=2)),
    (
        "AnimateDiffPipeline",
        lambda pipe: pipe.enable_free_noise(context_length=2, context_stride=1),
    ),
]


@pytest.mark.parametrize(
    "moment_and_number",
    sampled(
        product(("before", "between"), range(len(CHANGES))),
        [("before", 7), ("between", 0)],
        "changes",
    ),
    ids=str,
)
def test_methods_that_change_modules_are_no_calls(moment_and_number: tuple[str, int]) -> None:
    """The sample has a change of parameters between calls, and one of the call before any."""
    moment, number = moment_and_number
    name, change = CHANGES[number]
    case = CASES[name]
    plain, pipe = case.build(), case.build()
    change(plain)
    want = case.call(plain)
    attachment, device = attached(pipe)
    if moment == "between":
        case.call(pipe)
    solution, held_bytes = attachment.solution, device.allocated_bytes
    change(pipe)
    assert attachment.solution is solution
    assert device.allocated_bytes <= held_bytes, "nothing is copied to the device"
    assert equal(case.call(pipe), want)
    attachment.detach()
    assert_detached(pipe, device, case.kind)
    assert equal(case.call(pipe), want)


def test_detaching_inside_a_call_is_done_when_it_ends() -> None:
    pipe = SD.build()
    want = SD.call(pipe)
    attachment, device = attached(pipe)
    errors: list[Any] = []
    got = stepping(lambda: (attachment.detach(), errors.append(pipe.graphrun))).call(pipe)
    assert errors == [attachment]
    assert equal(got, want)
    assert_detached(pipe, device, SD.kind)
    attachment.detach()
    assert equal(SD.call(pipe), want)
    with graphrun.attach(pipe, vram="1G", device="sim"):
        assert equal(SD.call(pipe), want)


@pytest.mark.parametrize(
    "error", sampled([ValueError, KeyboardInterrupt], [KeyboardInterrupt], "changes")
)
def test_detaching_inside_a_call_that_fails(error: type[BaseException]) -> None:
    pipe = SD.build()
    want = SD.call(pipe)
    attachment, device = attached(pipe)

    def detach_and_fail() -> None:
        attachment.detach()
        raise error("enough")

    with pytest.raises(error, match="enough"):
        stepping(detach_and_fail).call(pipe)
    assert_detached(pipe, device, SD.kind)
    assert equal(SD.call(pipe), want)


def test_another_thread_that_detaches_waits_for_the_call() -> None:
    pipe = SD.build()
    want = SD.call(pipe)
    attachment, device = attached(pipe)
    leaving = threading.Thread(target=attachment.detach)
    assert equal(stepping(leaving.start).call(pipe), want)
    leaving.join()
    assert_detached(pipe, device, SD.kind)


INNER_CHANGES: dict[str, Callable[[Any], Any]] = {
    "fused": lambda pipe: pipe.fuse_qkv_projections(),
    "tiled": lambda pipe: pipe.vae.enable_tiling(),
    "freeu": lambda pipe: pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4),
    "called": lambda pipe: pipe(prompt="b", height=16, width=16, num_inference_steps=1),
}


@pytest.mark.parametrize("name", sampled(INNER_CHANGES, ["fused", "called"], "changes"))
def test_a_change_in_a_callback_has_its_effect_and_leaves_nothing_on_the_device(
    name: str,
) -> None:
    change = INNER_CHANGES[name]
    plain, pipe = SD.build(), SD.build()
    want = stepping(lambda: change(plain)).call(plain)
    # fused projections are new weights, which the plan of the call does not count
    attachment, device = attached(pipe, 2.0)
    assert equal(stepping(lambda: change(pipe)).call(pipe), want)
    assert device.allocated_bytes == attachment.held_bytes
    next_output = SD.call(plain)
    assert equal(SD.call(pipe), next_output)
    attachment.detach()
    assert_detached(pipe, device, SD.kind)
    assert equal(SD.call(pipe), next_output)


def other(pipe: Any) -> Any:
    return d.StableDiffusionImg2ImgPipeline(**pipe.components)


MOVES: list[tuple[Callable[[Any, Any], Any], str]] = [
    (
        lambda pipe, other_attachment: graphrun.attach(pipe, vram="1G", device="sim"),
        r"attached to StableDiffusionPipeline already",
    ),
    (
        lambda pipe, other_attachment: graphrun.attach(other(pipe), vram="1G", device="sim"),
        r"another attached pipeline is using",
    ),
    (
        lambda pipe, other_attachment: other_attachment.pipe.encode_prompt("a", "cpu", 1, False),
        r"another attached pipeline is using",
    ),
    (
        lambda pipe, other_attachment: other_attachment.detach(),
        r"another attached pipeline is using",
    ),
    (lambda pipe, other_attachment: pipe.fuse_lora(), r"fuse_lora\(\) before or after it"),
]


def test_moving_the_weights_of_a_running_call_is_refused() -> None:
    pipe = SD.build()
    want = SD.call(pipe)
    other_attachment = graphrun.attach(other(pipe), vram="1G", device="sim")
    attachment, device = attached(pipe)
    for move, message in MOVES:
        with pytest.raises(InputError, match=message):
            stepping(lambda move=move: move(pipe, other_attachment)).call(pipe)  # type: ignore[misc]
        assert device.allocated_bytes == 0
    assert equal(SD.call(pipe), want)
    attachment.detach()
    other_attachment.detach()
    assert_detached(pipe, device, SD.kind)
    assert equal(SD.call(pipe), want)

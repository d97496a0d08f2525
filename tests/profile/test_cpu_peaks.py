"""The recorded peak of small versions of real components equals the CPU allocator's, to the
byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from graphrun.modules.build import build, meta_module
from graphrun.profile import recorder as recording
from graphrun.profile.fused_kernels import FusedKernels
from graphrun.profile.recorder import Recorder

TOKENS = 64


def encode(module: Any, device: str) -> Any:
    return module(torch.zeros(1, TOKENS, dtype=torch.long, device=device))


def denoise(module: Any, device: str) -> Any:
    options: dict[str, Any] = {"device": device, "dtype": module.dtype}
    config = module.config
    return module(
        hidden_states=torch.zeros(1, TOKENS, config.in_channels, **options),
        encoder_hidden_states=torch.zeros(1, TOKENS, config.joint_attention_dim, **options),
        pooled_projections=torch.zeros(1, config.pooled_projection_dim, **options),
        timestep=torch.zeros(1, **options),
        guidance=torch.zeros(1, **options),
        img_ids=torch.zeros(TOKENS, 3, **options),
        txt_ids=torch.zeros(TOKENS, 3, **options),
    )


def profiled_peak(module: Any, call: Callable[[Any, str], Any]) -> int:
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        result = call(module, "cpu")
    level = peak = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    del result
    return peak


@pytest.mark.parametrize(
    ("name", "dtype", "call"),
    [
        ("text_encoder", "float32", encode),
        ("text_encoder_2", "bfloat16", encode),
        ("transformer", "float32", denoise),
    ],
)
def test_clip_t5_and_flux_in_small_take_what_the_cpu_profiler_saw(
    dry: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: str,
    call: Callable[[Any, str], Any],
) -> None:
    monkeypatch.setattr(recording, "ROUND_BYTES", 1)  # the CPU's allocator does not round
    graph = dry("flux-tiny")[0].without_sources()
    component = replace(graph.components[name], dtype=dtype)
    graph = replace(graph, components={**graph.components, name: component})
    module = meta_module(component, graph.trust)
    recorder = Recorder(module, ())
    with torch.no_grad(), FusedKernels(recorder), recorder:
        result = call(module, "meta")
    del result
    recorder.close()
    assert recorder.record.peak_bytes == profiled_peak(build(component, graph), call)

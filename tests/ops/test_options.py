"""Run options of a stage: what they compute, and that the pipeline is restored afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stage_runs import stages_of

import graphrun
from graphrun.errors import GraphError
from graphrun.modules.build import build
from graphrun.modules.interceptor import CallInterceptor
from graphrun.ops import stage_options as run_options

GRAPHS = Path(__file__).parents[2] / "graphs"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sdxl() -> Any:
    """The tiny SDXL: graph, modules, inputs, and the pixels [height width 3] without an option."""
    graph = graphrun.load(GRAPHS / "sdxl-tiny.yaml")
    modules = {name: build(component, graph) for name, component in graph.components.items()}
    inputs = graph.for_planning({"steps": 2})
    return graph, modules, inputs, pixels(graph, modules, inputs)


def pixels(graph: Any, modules: Any, inputs: Any, **options: str) -> Any:
    image = stages_of(graph, modules, inputs, options=options or {}).run()["image"]
    return np.asarray(image).astype(int)


def settings(vae: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(vae).items() if key.startswith(("use_", "tile_"))}


@pytest.mark.sweep("more")
def test_split_calls_the_denoiser_once_per_sample_and_changes_last_bits_only(sdxl: Any) -> None:
    graph, modules, inputs, plain = sdxl
    batches: list[int] = []

    def around(component: str, entry: str, proceed: Any, args: Any, kwargs: Any) -> Any:
        batches.append(args[0].shape[0])
        return proceed(*args, **kwargs)

    with CallInterceptor({"unet": modules["unet"]}, CPU, handle_call=around):
        split = pixels(graph, modules, inputs, denoise="split")
    assert batches == [1, 1] * 2  # guidance makes two samples of a picture, for each of two steps
    assert np.abs(split - plain).max() <= 1


def test_slicing_changes_nothing(sdxl: Any) -> None:
    graph, modules, inputs, plain = sdxl
    assert np.array_equal(pixels(graph, modules, inputs, decode="slicing"), plain)


@pytest.mark.sweep("more")
def test_tiling_and_slicing_combine(sdxl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, modules, inputs, _ = sdxl
    monkeypatch.setattr(run_options, "TILE_PIXELS", 64)
    switches: list[tuple[bool, bool]] = []
    vae = modules["vae"]
    hook = vae.decoder.register_forward_pre_hook(
        lambda module, args: switches.append((vae.use_tiling, vae.use_slicing))
    )
    try:
        combined = pixels(graph, modules, inputs, decode="tiling+slicing")
    finally:
        hook.remove()
    assert set(switches) == {(True, True)}
    assert np.array_equal(combined, pixels(graph, modules, inputs, decode="tiling"))


def test_tiling_decodes_in_tiles_and_leaves_the_vae_as_it_was(
    sdxl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, modules, inputs, plain = sdxl
    monkeypatch.setattr(run_options, "TILE_PIXELS", 64)
    previous_settings, sizes = settings(modules["vae"]), set()
    hook = modules["vae"].decoder.register_forward_pre_hook(
        lambda module, args: sizes.add(tuple(args[0].shape[-2:]))
    )
    try:
        tiled = pixels(graph, modules, inputs, decode="tiling")
    finally:
        hook.remove()
    assert max(max(size) for size in sizes) <= 64 // 8
    assert tiled.shape == plain.shape
    assert settings(modules["vae"]) == previous_settings


def test_an_option_that_no_component_supports_is_refused(sdxl: Any) -> None:
    graph, modules, inputs, _ = sdxl
    with pytest.raises(
        GraphError, match="option tiling: none of text_encoder, text_encoder_2 supports it"
    ):
        pixels(graph, modules, inputs, encode="tiling")

"""Every public function and class that takes a path takes its text too."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from programs import Film

import graphrun

BUDGET: dict[str, Any] = {"vram": "6M", "ram": "8G", "hardware": "sim"}
SMALL = {"height": 32, "width": 32, "steps": 2, "max_sequence_length": 16, "prompt": "a cat"}
UNET = diffusers.UNet2DModel(
    sample_size=8,
    block_out_channels=(32,),
    down_block_types=("DownBlock2D",),
    up_block_types=("UpBlock2D",),
)


def files_in(folder: str) -> set[str]:
    return {Path(parent, name).name for parent, _, names in os.walk(folder) for name in names}


def test_every_parameter_that_takes_a_path_takes_a_text() -> None:
    def callables() -> Iterator[tuple[str, Any]]:
        for name in graphrun.__all__:
            value = getattr(graphrun, name)
            if inspect.isfunction(value) or name in ("Session", "LivePipeline"):
                yield name, value
        yield "LivePipeline.to_yaml", graphrun.LivePipeline.to_yaml

    annotations = {
        (name, parameter.name): str(parameter.annotation)
        for name, value in callables()
        for parameter in inspect.signature(value).parameters.values()
        if "Path" in str(parameter.annotation)
    }
    assert len(annotations) > 9
    assert [key for key, text in annotations.items() if not text.startswith("str | Path")] == []


@pytest.mark.sweep("more")
def test_a_live_pipeline_is_written_to_a_path_in_a_text(tmp_path: Path) -> None:
    pipe = diffusers.DDPMPipeline(UNET, diffusers.DDPMScheduler())
    graph = graphrun.from_pipeline(pipe).to_yaml(f"{tmp_path}/pipeline.yaml")
    assert graph.path == tmp_path / "pipeline.yaml"
    with pytest.raises(graphrun.InputError, match="already exists"):
        graphrun.from_pipeline(pipe).to_yaml(f"{tmp_path}/pipeline.yaml")


@pytest.mark.sweep("more")
def test_a_cache_folder_is_named_by_a_text(tmp_path: Path) -> None:
    folder, graph = f"{tmp_path}/cache", graphrun.load("flux-tiny")
    problem = graphrun.estimate(graph, inputs=SMALL, cache=folder, **BUDGET)
    graphrun.survey(graph, hardware="sim", inputs=SMALL, cache=folder)
    solution = graphrun.plan(problem, cache=folder)
    graphrun.run(solution, graph, inputs=SMALL, random_weights=True, cache=folder)
    assert "entries.sqlite" in files_in(folder)
    # outputs of random weights are cached by the graph without its sources
    values = graphrun.precomputed(graph.without_sources(), SMALL, hardware="sim", cache=folder)
    assert values.keys() == {"encode.embeds"}


@pytest.mark.sweep("more")
def test_a_session_and_a_batch_take_texts_as_folders(tmp_path: Path) -> None:
    folder, graph = f"{tmp_path}/cache", graphrun.load("flux-tiny")
    options = {"random_weights": True, "cache": folder, **BUDGET}
    with graphrun.Session(graph, runs=2, inputs=SMALL, **options) as session:
        session.run()
    batch = graphrun.run_many(graph, SMALL, resume=f"{tmp_path}/state", strict=True, **options)
    assert list(batch.outputs) == [1]
    assert files_in(f"{tmp_path}/state")


def test_calls_of_an_attached_program_are_cached_in_a_folder_named_by_a_text(
    tmp_path: Path,
) -> None:
    folder, film = f"{tmp_path}/cache", Film()
    parts = {"text": film.models["text"], "dit": film.dit, "vae": film.vae}
    options = {"vram": "1G", "device": "sim", "cache": folder}
    with graphrun.attach(film, components=parts, entries=["generate"], **options):
        film.generate("a lighthouse", generator=torch.Generator().manual_seed(3))
    assert "entries.sqlite" in files_in(folder)

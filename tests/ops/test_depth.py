"""The op `depth`: the picture that transformers' own pipeline for depth estimation makes, in the
smallest budget."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.pipelines import DepthEstimationPipeline

import graphrun
from graphrun.errors import GraphError
from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.modules.build import build, build_part
from graphrun.solve.infeasible import smallest_budget

GRAPHS = Path(__file__).parents[2] / "graphs"
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8))


def depth_alone(tmp_path: Path, old: str = "", new: str = "") -> Graph:
    """The first stage of sdxl-depth-tiny alone, with one text in it replaced."""
    text = f"""graphrun: 1
name: depth
pipeline: diffusers.StableDiffusionXLControlNetPipeline
inputs: {{image: {{type: image, height: 64, width: 96}}}}
components:
  depth_estimator:
    class: transformers.DepthAnythingForDepthEstimation
    config: {GRAPHS}/configs/tiny-depth-anything.json
    dtype: float32
parts:
  depth_processor: {{class: transformers.DPTImageProcessorPil,
                     config: {GRAPHS}/configs/tiny-depth-processor.json}}
stages:
  depth: {{op: depth, uses: [depth_estimator], with: {{image: $image}}}}
outputs: {{image: $depth.image}}
"""
    assert old in text
    (tmp_path / "depth.yaml").write_text(text.replace(old, new))
    return load(tmp_path / "depth.yaml")


@pytest.mark.sweep("more")
def test_it_makes_the_picture_of_transformers_own_pipeline_in_the_smallest_budget(
    tmp_path: Path,
) -> None:
    graph = depth_alone(tmp_path)
    ample = graphrun.estimate(graph, vram="64M", ram="8G", hardware="sim", cache=None)
    tight = graphrun.estimate(
        graph, vram=smallest_budget(ample), ram="8G", hardware="sim", cache=None
    )
    result = graphrun.run(graphrun.plan(tight, cache=None), graph, {"image": PICTURE})
    model, processor = (
        build(graph.components["depth_estimator"], graph),
        build_part(graph.parts["depth_processor"], graph),
    )
    expected = DepthEstimationPipeline(model=model, image_processor=processor)(PICTURE)["depth"]
    assert result.outputs["image"].tobytes() == expected.convert("RGB").tobytes()
    assert np.ptp(np.asarray(expected)) == 255
    assert 0 < result.peak_bytes <= tight.budget_bytes
    assert result.left_bytes == 0


def test_what_is_no_component_of_it_is_said_at_the_stage_when_it_is_planned(tmp_path: Path) -> None:
    graph = depth_alone(tmp_path, "depth_estimator", "estimator")
    with pytest.raises(
        GraphError,
        match=r"depth.yaml:14: stages.depth: uses estimator: depth has no parameter 'estimator'",
    ):
        graphrun.estimate(graph, vram="64M", ram="8G", hardware="sim", cache=None)

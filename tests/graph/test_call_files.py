"""Graph files with inputs that are files and stages that call a pipeline whole: what they mean, and
what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from graphrun.errors import GraphError, InputError, PlanError
from graphrun.graph.loading import load
from graphrun.graph.media import size_text
from graphrun.graph.parts import Reference
from graphrun.graph.settings import completed, settings_of

TEXT = """graphrun: 1
name: edit
pipeline: diffusers.StableDiffusionXLInpaintPipeline
inputs:
  prompt: {type: str, many: true}
  image: {type: image}
  mask: {type: mask}
  control: {type: image, height: 8, width: 16}
  height: {type: int, default: 64}
  width: {type: int, default: 32}
  seed: {type: int, default: 0}
components:
  unet: {class: diffusers.UNet2DConditionModel, config: {}, dtype: float32}
stages:
  make:
    op: call
    uses: [unet]
    with:
      prompt: $prompt
      image: [$image, $control]
      mask_image: $mask
      scales: [0.5, 1.0]
      extra: null
      seed: $seed
outputs: {image: $make.image, extra: $make.image_embeds}
"""


@pytest.fixture
def write_graph(tmp_path: Path) -> Callable[..., Any]:
    def write(*changes: tuple[str, str]) -> Any:
        text = TEXT
        for old, new in changes:
            assert old in text
            text = text.replace(old, new, 1)
        (tmp_path / "edit.yaml").write_text(text)
        return load(tmp_path / "edit.yaml")

    return write


def test_arguments_may_be_lists_and_outputs_are_what_is_read(
    write_graph: Callable[..., Any],
) -> None:
    stage = write_graph().stage("make")
    assert stage.arguments["image"] == [Reference("input", "image"), Reference("input", "control")]
    assert (stage.arguments["scales"], stage.arguments["extra"]) == ([0.5, 1.0], None)
    assert [reference.name for reference in stage.references] == [
        "prompt",
        "image",
        "control",
        "mask",
        "seed",
    ]
    assert stage.outputs == ("image", "image_embeds")


def test_a_plan_without_files_is_for_the_sizes_that_the_graph_has(
    write_graph: Callable[..., Any],
) -> None:
    graph = write_graph()
    values = graph.for_planning({"height": 48})
    assert {name: size_text(values[name]) for name in ("image", "mask", "control")} == {
        "image": "32x48",
        "mask": "32x48",
        "control": "16x8",
    }
    assert dict(settings_of(graph, values)) == {
        "image": "32x48",
        "mask": "32x48",
        "control": "16x8",
        "height": "48",
        "width": "32",
    }


def test_a_mask_that_is_not_given_has_the_size_of_the_image_that_is(
    write_graph: Callable[..., Any],
) -> None:
    values = write_graph().for_planning({"image": Image.new("RGB", (40, 24))})
    assert (
        size_text(values["image"]),
        size_text(values["mask"]),
        size_text(values["control"]),
    ) == (
        "40x24",
        "40x24",
        "16x8",
    )


def test_a_run_needs_them_and_they_must_be_what_was_planned(
    write_graph: Callable[..., Any],
) -> None:
    graph = write_graph()
    settings = settings_of(graph, graph.for_planning({}))
    with pytest.raises(InputError, match="'image' is missing; it is an image: give a file"):
        graph.resolve({"prompt": "a"})
    files = {
        "image": Image.new("RGB", (32, 64)),
        "mask": Image.new("L", (32, 64)),
        "control": Image.new("RGB", (16, 8)),
    }
    assert completed(graph, settings, {"prompt": "a", **files})["image"] is files["image"]
    with pytest.raises(
        PlanError, match="the plan is for image=32x64, this run has image=8x8: plan again"
    ):
        completed(graph, settings, {"prompt": "a", **files, "image": Image.new("RGB", (8, 8))})
    with pytest.raises(
        PlanError, match="the plan is for prompt=one text, this run has prompt=2 texts"
    ):
        completed(graph, settings, {"prompt": ["a", "b"], **files})


def test_a_list_may_be_written_as_json(write_graph: Callable[..., Any]) -> None:
    graph = write_graph()
    assert graph.for_planning({"prompt": '["a", "b"]'})["prompt"] == ["a", "b"]
    assert graph.for_planning({"prompt": "a"})["prompt"] == "a"
    for text, message in (
        ("[a", "not a JSON list"),
        ("[]", "an empty list"),
        ("[1]", "1 is not a str"),
    ):
        with pytest.raises(InputError, match=message):
            graph.for_planning({"prompt": text})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "image: {type: image}",
            "image: {type: image, default: a.png}",
            "edit.yaml:6: inputs.image.default: 'image' is an image",
        ),
        (
            "image: {type: image}",
            "image: {type: image, frames: 3}",
            "edit.yaml:6: .*which has no frames",
        ),
        (
            "mask: {type: mask}",
            "mask: {type: audio}",
            "edit.yaml:7: inputs.mask: has no rate, for plans without the file",
        ),
        (
            "mask: {type: mask}",
            "mask: {type: tensor}",
            "edit.yaml:7: inputs.mask: has no shape, for plans without the file",
        ),
        (
            "mask: {type: mask}",
            "mask: {type: tensor, shape: [1, 0]}",
            "edit.yaml:7: inputs.mask.shape.1: 0 is too small",
        ),
        ("seed: $seed", "seed: {a: 1}", "expected int, got a mapping"),
        ("height: 8, width: 16", "height: $hight, width: 16", "did you mean 'height'"),
        (
            "seed: {type: int, default: 0}",
            "seed: {type: int, default: 0, width: 3}",
            "'seed' is of type int, which has no width",
        ),
        (
            "[$image, $control]",
            "[$image, $controls]",
            "edit.yaml:20: stages.make.with.image.1: .*did you mean 'control'",
        ),
        ("seed: $seed", "seed: $image", "expected int, and \\$image is image"),
        (
            "outputs: {image: $make.image,",
            "outputs: {image: $make.,",
            "stage 'make' has no output ''",
        ),
        (
            "pipeline: diffusers.StableDiffusionXLInpaintPipeline",
            "pipeline: diffusers.A\npipeline_config: {nets: [$unit]}",
            "'unet'",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_line(
    write_graph: Callable[..., Any], old: str, new: str, message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        write_graph((old, new))


def test_an_input_that_only_gives_a_size_is_read(write_graph: Callable[..., Any]) -> None:
    assert write_graph().inputs["height"].default == 64
    with pytest.raises(GraphError, match="inputs.width: no stage reads it"):
        write_graph(
            ("image: {type: image}", "image: {type: image, height: 8, width: 8}"),
            ("mask: {type: mask}", "mask: {type: mask, width: 8}"),
        )

"""Requests become inputs of a graph, or are refused with the field at fault, before anything is
planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import graphrun
from graphrun.serve.bodies import PictureRequest, body_model, picture_inputs
from graphrun.serve.errors import Refused
from graphrun.serve.intake import graph_for
from graphrun.serve.settings import Bounds

BOUNDS = Bounds(characters=50, pixels=256 * 256, steps=10, pictures=3)


@pytest.fixture(scope="module")
def flux() -> Any:
    return graphrun.load("flux-tiny")


def request_of(graph: Any, **fields: Any) -> PictureRequest:
    return body_model(graph, BOUNDS).read(fields)


def test_a_request_is_a_run_per_picture_with_seeds_that_follow_each_other(flux: Any) -> None:
    picture_request = request_of(
        flux, prompt="a", n=2, size="64x32", seed=7, num_inference_steps=3, user="me", style=None
    )
    assert [
        (run["seed"], run["width"], run["height"], run["steps"]) for run in picture_request.runs
    ] == [
        (7, 64, 32, 3),
        (8, 64, 32, 3),
    ]
    assert picture_request.shape == request_of(flux, prompt="b", size="64x32", steps=3).shape, (
        "texts and seeds are free"
    )


def test_fields_of_forms_are_texts(flux: Any) -> None:
    fields = {"n": "2", "seed": "7", "stream": "true", "partial_images": "1", "steps": "3"}
    picture_request = request_of(flux, prompt="12", **fields)
    assert (picture_request.streams, picture_request.partial_images) == (True, 1)
    assert [(run["prompt"], run["seed"], run["steps"]) for run in picture_request.runs] == [
        ("12", 7, 3),
        ("12", 8, 3),
    ]


def test_without_a_seed_pictures_differ(flux: Any) -> None:
    assert len({request_of(flux, prompt="a").runs[0]["seed"] for _ in range(4)}) == 4


def test_seconds_are_frames_that_the_model_can_make() -> None:
    video = replace(graphrun.load("wan-tiny"), fps=8.0)
    assert [
        request_of(video, seconds=seconds).runs[0]["frames"] for seconds in ("0.1", 1, 1.3, "2")
    ] == [1, 9, 9, 17]
    for fields, text in (
        ({"seconds": 0}, "seconds: 0 is not above 0"),
        ({"seconds": "soon"}, "seconds: 'soon' is not a number"),
        ({"seconds": 1, "frames": 5}, "frames has the length too: leave one out"),
        ({"seconds": 1, "num_frames": 5}, "frames has the length too"),
    ):
        with pytest.raises(Refused, match=text) as refusal:
            request_of(video, **fields)
        assert refusal.value.param == "seconds"
    with pytest.raises(Refused, match="n: 2 is more than 1"):
        request_of(video, n=2)


def test_a_number_in_the_place_of_a_text_is_called_that(flux: Any) -> None:
    with pytest.raises(Refused, match="webhook: 7 is not a text"):
        request_of(flux, webhook=7)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": "x" * 51}, "prompt", "over_limit"),
        ({"size": "512x512"}, "pixels", "over_limit"),
        ({"steps": 11}, "steps", "over_limit"),
        ({"n": 4}, "n", "over_limit"),
        ({"n": 0}, "n", "over_limit"),
        ({"n": True}, "n", "invalid_value"),
        ({"n": "1e9"}, "n", "invalid_value"),
        ({"size": "64"}, "size", "invalid_value"),
        ({"size": "9999999x9999999"}, "size", "invalid_value"),
        ({"size": 64}, "size", "invalid_value"),
        ({"size": "33x32"}, None, "invalid_value"),
        ({"seed": 2**80}, "seed", "invalid_value"),
        ({"seed": -1}, "seed", "invalid_value"),
        ({"guidance_scale": "nan"}, "guidance_scale", "invalid_value"),
        ({"guidance": "nan"}, "guidance", "invalid_value"),
        ({"guidance": 1, "guidance_scale": 1}, "guidance", "invalid_value"),
        ({"prompt": ["a"] * 4}, "prompt", "over_limit"),
        ({"prompt": {"a": 1}}, "prompt", "invalid_value"),
        ({"prompt": ["a"]}, "prompt", "invalid_value"),
        ({"stepz": 3}, "stepz", "unknown_parameter"),
        ({"value_steps": 3}, "value_steps", "unknown_parameter"),
        ({"stream": "yes"}, "stream", "invalid_value"),
        ({"stream": 1}, "stream", "invalid_value"),
        ({"partial_images": 2}, "partial_images", "invalid_value"),
        ({"partial_images": 4, "stream": True}, "partial_images", "over_limit"),
        ({"../../etc/passwd": "x"}, "../../etc/passwd", "unknown_parameter"),
        ({"response_format": "file:///etc/passwd"}, "response_format", "invalid_value"),
        ({"output_format": "../a.png"}, "output_format", "invalid_value"),
        ({"webhook": 7}, "webhook", "invalid_value"),
    ],
)
def test_what_is_wrong_is_named(
    flux: Any, body: dict[str, Any], param: str | None, code: str
) -> None:
    with pytest.raises(Refused) as refusal:
        request_of(flux, **body)
    assert (refusal.value.status, refusal.value.code, refusal.value.param) == (422, code, param)


@pytest.mark.parametrize(
    "name",
    ["nope", "../flux-tiny", "/etc/passwd", "graphs/flux-tiny.yaml", "", 7, ["flux-tiny"], {}],
)
def test_an_unknown_model_is_404_with_those_that_are_there(flux: Any, name: Any) -> None:
    with pytest.raises(Refused, match="models are flux-tiny") as refusal:
        graph_for("generations", name, {"flux-tiny": flux})
    assert refusal.value.status == 404


def test_a_picture_cannot_be_named_by_its_path() -> None:
    graph = graphrun.load("sdxl-img2img-tiny")
    (name,) = picture_inputs(graph)
    for value in ("/etc/passwd", ["/etc/passwd"], {"path": "/etc/passwd"}):
        with pytest.raises(Refused, match="in a form") as refusal:
            request_of(graph, prompt="a", **{name: value})
        assert (refusal.value.status, refusal.value.param) == (422, name)
    with pytest.raises(Refused, match="takes a picture: send it") as refusal:
        request_of(graph, prompt="a")
    assert (refusal.value.code, refusal.value.param) == ("picture_needed", name)


def test_files_that_are_no_picture_are_refused_without_their_path(
    tmp_path: Path, flux: Any
) -> None:
    file = tmp_path / "upload-0"
    file.write_bytes(b"no picture")
    with pytest.raises(Refused, match="image: the file: is no image") as refusal:
        request_of(graphrun.load("sdxl-img2img-tiny"), prompt="a", image=file)
    assert str(tmp_path) not in str(refusal.value)
    with pytest.raises(Refused, match="flux-tiny takes no file 'image'") as refusal:
        request_of(flux, prompt="a", image=file)
    assert (refusal.value.code, refusal.value.param) == ("unknown_parameter", "image")


def test_the_schema_of_a_body_has_the_inputs_of_its_graph(flux: Any) -> None:
    schema = body_model(flux, BOUNDS).model_json_schema()
    properties = schema["properties"]
    assert properties["n"]["maximum"] == BOUNDS.pictures
    assert properties["model"]["default"] == "flux-tiny"
    assert (properties["height"]["type"], properties["height"]["multipleOf"]) == ("integer", 16)
    assert schema["additionalProperties"] is False
    image = body_model(graphrun.load("sdxl-img2img-tiny"), BOUNDS).model_json_schema()
    assert image["required"] == ["image"]
    assert image["properties"]["image"] == {"format": "binary", "title": "Image", "type": "string"}

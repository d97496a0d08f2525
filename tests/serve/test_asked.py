"""Requests become inputs of a graph, or are refused with the field at fault, before anything is
planned."""

from __future__ import annotations

from typing import Any

import pytest

import graphrun
from graphrun.serve.asked import asked_of, graph_of, picture_inputs
from graphrun.serve.errors import Refused
from graphrun.serve.settings import Bounds

BOUNDS = Bounds(characters=50, pixels=256 * 256, steps=10, pictures=3)


@pytest.fixture(scope="module")
def flux() -> Any:
    return graphrun.load("flux-tiny")


def test_a_request_is_a_run_per_picture_with_seeds_that_follow_each_other(flux: Any) -> None:
    picture_request = asked_of(
        {"prompt": "a", "n": 2, "size": "64x32", "seed": 7, "steps": 3, "user": "me"},
        flux,
        BOUNDS,
        {},
    )
    assert [
        (run["seed"], run["width"], run["height"], run["steps"]) for run in picture_request.runs
    ] == [
        (7, 64, 32, 3),
        (8, 64, 32, 3),
    ]
    assert (
        picture_request.shape
        == asked_of({"prompt": "b", "size": "64x32", "steps": 3}, flux, BOUNDS, {}).shape
    ), "texts and seeds are free"


def test_without_a_seed_pictures_differ(flux: Any) -> None:
    assert len({asked_of({"prompt": "a"}, flux, BOUNDS, {}).runs[0]["seed"] for _ in range(4)}) == 4


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
        ({"seed": -1}, None, "invalid_value"),
        ({"guidance_scale": "nan"}, None, "invalid_value"),
        ({"prompt": ["a"] * 4}, "prompt", "over_limit"),
        ({"prompt": {"a": 1}}, None, "invalid_value"),
        ({"stepz": 3}, "stepz", "unknown_parameter"),
        ({"../../etc/passwd": "x"}, "../../etc/passwd", "unknown_parameter"),
        ({"response_format": "file:///etc/passwd"}, "response_format", "invalid_value"),
        ({"output_format": "../a.png"}, "output_format", "invalid_value"),
    ],
)
def test_what_is_wrong_is_named(
    flux: Any, body: dict[str, Any], param: str | None, code: str
) -> None:
    with pytest.raises(Refused) as refusal:
        asked_of(body, flux, BOUNDS, {})
    assert (refusal.value.status, refusal.value.code, refusal.value.param) == (422, code, param)


@pytest.mark.parametrize(
    "name",
    ["nope", "../flux-tiny", "/etc/passwd", "graphs/flux-tiny.yaml", "", 7, ["flux-tiny"], {}],
)
def test_an_unknown_model_is_404_with_those_that_are_there(flux: Any, name: Any) -> None:
    with pytest.raises(Refused, match="models are flux-tiny") as refusal:
        graph_of({"model": name}, {"flux-tiny": flux})
    assert refusal.value.status == 404


def test_a_picture_cannot_be_named_by_its_path() -> None:
    graph = graphrun.load("sdxl-img2img-tiny")
    (name,) = picture_inputs(graph)
    with pytest.raises(Refused, match="part of a form"):
        asked_of({"prompt": "a", name: "/etc/passwd"}, graph, BOUNDS, {})

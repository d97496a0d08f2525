"""The rows of the tables of classes in `docs/pipelines.md` are what is seen; `make pipelines`
writes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from campaign import sampled
from class_rows import (
    CASES,
    CLASSES,
    DOCUMENT,
    FEATURES,
    HEADS,
    SWITCHES,
    attached_row,
    documented,
    feature_row,
)

# have tests of their own
OTHERS = {
    "FluxModularPipeline",
    "StableDiffusionXLModularPipeline",
    "LEditsPPPipelineStableDiffusion",
    "Cosmos3DistilledModularPipeline",
    "Cosmos3OmniModularPipeline",
    "LTX2VideoDiffusionDecodePipeline",
    "MiniMaxH3ModularPipeline",
    "QwenImage21ModularPipeline",
}
ROWS = {table: documented(head) for table, head in HEADS.items()}


@pytest.mark.parametrize(
    "name", sampled(ROWS["attached"], ["FluxPipeline", "ZImagePipeline"], "pipelines")
)
def test_a_class_is_attached_as_documented(name: str) -> None:
    assert attached_row(name) == ROWS["attached"][name]


@pytest.mark.parametrize(
    "switch", sampled(SWITCHES, [], "features"), ids=lambda switch: switch.__name__
)
def test_a_feature_does_what_is_documented(switch: Callable[[Any], object]) -> None:
    assert feature_row(switch) == ROWS["features"][switch.__name__.replace("_", " ")]


def test_every_class_and_feature_has_a_row_and_none_differs() -> None:
    works = re.findall(r"^\| (\S+) \| [^|]+ \| works \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert {*ROWS["attached"], *works} == {*CASES, *OTHERS}
    assert list(ROWS["features"]) == [switch.__name__.replace("_", " ") for switch in SWITCHES]
    cells = {
        name: dict(zip(CLASSES, row.split(" | ")[1:], strict=True))
        for name, row in ROWS["features"].items()
    }
    for switch, names in FEATURES.items():
        assert {
            cells[switch.__name__.replace("_", " ")][name].removesuffix(" |") for name in names
        } == {"right"}
    assert not [row for rows in ROWS.values() for row in rows.values() if "differs" in row]

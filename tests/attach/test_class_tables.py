"""The tables of classes in `docs/pipelines.md` have what is seen; `make pipelines` writes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import diffusers as d
import pytest
from campaign import sampled
from class_lists import DOCUMENT, classes_below, rows_below
from class_rows import (
    CASES,
    CLASSES,
    FEATURES,
    HEADS,
    SWITCHES,
    attached_cells,
    feature_row,
    feature_seen,
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
ATTACHED = classes_below(HEADS["attached"])
FEATURE_ROWS = {
    row.split(" | ")[0].removeprefix("| "): row for row in rows_below(HEADS["features"])
}


@pytest.mark.parametrize(
    "name", sampled(sorted(ATTACHED), ["FluxPipeline", "ZImagePipeline"], "pipelines")
)
def test_a_class_is_attached_as_documented(name: str) -> None:
    assert attached_cells(name) == ATTACHED[name]


@pytest.mark.parametrize(
    "switch", sampled(SWITCHES, [], "features"), ids=lambda switch: switch.__name__
)
def test_a_feature_does_what_is_documented(switch: Callable[[Any], object]) -> None:
    assert feature_row(switch) == FEATURE_ROWS[switch.__name__.replace("_", " ")]


def test_every_class_and_feature_has_a_row_and_none_differs() -> None:
    works = re.findall(r"^\| works \| (.+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert {*ATTACHED, *", ".join(works).split(", ")} == {*CASES, *OTHERS}
    assert list(FEATURE_ROWS) == [switch.__name__.replace("_", " ") for switch in SWITCHES]
    cells = {
        name: dict(zip(CLASSES, row.split(" | ")[1:], strict=True))
        for name, row in FEATURE_ROWS.items()
    }
    for switch, names in FEATURES.items():
        assert {
            cells[switch.__name__.replace("_", " ")][name].removesuffix(" |") for name in names
        } == {"right"}
    assert not [result for result, _ in ATTACHED.values() if "differs" in result]
    assert not [row for row in FEATURE_ROWS.values() if "differs" in row]


def test_a_setting_that_changes_nothing_is_not_called_right() -> None:
    def tiles_larger_than_the_picture(pipe: Any) -> None:
        pipe.vae.enable_tiling()

    def cache_that_finds_no_layer(pipe: Any) -> None:
        pipe.transformer.enable_cache(d.TaylorSeerCacheConfig())

    assert feature_seen(tiles_larger_than_the_picture, "WanPipeline") == "no effect"
    assert feature_seen(cache_that_finds_no_layer, "WanPipeline") == "no effect"

"""A graph without one of its components: the pipeline gets None, as diffusers' users give it."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphrun
from graphrun.errors import InputError
from graphrun.graph.parts import Directives

SD3 = Path(__file__).parents[2] / "graphs" / "sd3-tiny.yaml"


def test_the_component_leaves_its_stages_and_the_pipeline_gets_none() -> None:
    whole = graphrun.load(SD3)
    graph = graphrun.load(SD3, absent=["text_encoder_3"])
    assert set(whole.components) - set(graph.components) == {"text_encoder_3"}
    assert graph.stage("encode").uses == ("text_encoder", "text_encoder_2")
    assert graph.pipeline_config["text_encoder_3"] is None
    assert graph.digest != whole.digest
    assert whole.without([]).digest == whole.digest


def test_directives_for_the_component_go() -> None:
    graph = graphrun.load(SD3).directed(keep=["text_encoder_3", "vae"])
    assert graph.without(["text_encoder_3"]).directives == Directives(("vae",))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("text_encoder_4", "no such component; did you mean 'text_encoder_3'"),
        ("vae", "the stage decode uses nothing else"),
    ],
)
def test_what_cannot_be_left_out_is_refused(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        graphrun.load(SD3, absent=[name])

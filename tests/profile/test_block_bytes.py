"""The bytes of a component's blocks in every precision equal those of the module that the executor
lays out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import graphrun
from graphrun.modules.blocks import lay_out
from graphrun.modules.build import draft
from graphrun.profile.dry_run import probe
from graphrun.units import round_up

GRAPHS = Path(__file__).parents[2] / "graphs"


PRECISIONS = ["float32", "float16", "bfloat16", "int8", "nf4", "fp8"]


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The tiny FLUX with every component allowed in every precision, and the profiles of its dry
    run."""
    folder = tmp_path_factory.mktemp("graphs") / "graphs"
    shutil.copytree(GRAPHS, folder)
    path = folder / "flux-tiny.yaml"
    path.write_text(
        path.read_text().replace(
            "dtype: bfloat16}", f"dtype: bfloat16, precision: [bfloat16, {', '.join(PRECISIONS)}]}}"
        )
    )
    graph = graphrun.load(path)
    return graph, probe(graph, graph.for_planning({})).profiles


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_2", "transformer", "vae"])
def test_block_bytes_equal_the_executor_s_layout(
    profiles: tuple[Any, Any], name: str, precision: str
) -> None:
    graph, profiles_by_name = profiles
    layouts = lay_out(
        draft(graph.component(name), graph, precision)[0],
        [path for group in profiles_by_name[name].groups for path in group.blocks],
    )
    sizes = tuple(
        max(round_up(layouts[path].nbytes, 512) for path in group.blocks)
        for group in profiles_by_name[name].groups
    )
    assert profiles_by_name[name].precisions[precision] == sizes


def test_t5_keeps_its_wo_in_fp32_if_the_dtype_is_fp16(profiles: tuple[Any, Any]) -> None:
    graph, profiles_by_name = profiles
    config, sizes = (
        graph.component("text_encoder_2").config,
        profiles_by_name["text_encoder_2"].precisions,
    )
    assert sizes["float16"][-1] - sizes["bfloat16"][-1] == 2 * config["d_model"] * config["d_ff"]

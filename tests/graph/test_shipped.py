"""The graphs that come with graphrun are found by name, wherever a graph file is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import graphrun as package
from graphrun.errors import GraphError
from graphrun.graph.shipped import graph_file, graphs_folder, shipped_graphs

Cli = Callable[..., tuple[int, str, str]]
GRAPHS = Path(__file__).parents[2] / "graphs"


def test_every_file_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped_graphs() == tuple(sorted(path.stem for path in GRAPHS.glob("*.yaml")))
    assert {graph_file(name).resolve() for name in shipped_graphs()} == set(GRAPHS.glob("*.yaml"))
    assert package.load("flux-tiny").digest == package.load(GRAPHS / "flux-tiny.yaml").digest


def test_a_file_goes_before_a_name_and_a_folder_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sdxl").mkdir()
    assert graph_file("sdxl") == graphs_folder() / "sdxl.yaml"
    Path("flux-dev").write_text("graphrun: 1\n")
    assert graph_file("flux-dev") == Path("flux-dev")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("flux-dv", "did you mean flux-dev?"),
        ("lighthouse", "these are auraflow, chroma,"),
        ("graphs/flux-dev.yaml", "graphrun's own graph is called flux-dev"),
        ("flux-dev.yaml", "graphrun's own graph is called flux-dev"),
        ("mine.yaml", "mine.yaml: no such file"),
    ],
)
def test_what_is_not_there_is_refused_with_the_name_that_was_meant(
    asked: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GraphError, match=f"^{asked}: no such file") as caught:
        package.load(asked)
    assert told in str(caught.value)


@pytest.mark.long
def test_a_plan_names_a_shipped_graph_and_is_read_without_the_folder(graphrun: Cli, tmp_path: Path) -> None:
    budgets = ("--device", "sim", "--vram", "6M", "--ram", "8G")
    assert graphrun("plan", "flux-tiny", *budgets, "-o", "here/plan.json")[0] == 0
    assert json.loads(Path("here/plan.json").read_text())["graph_file"] == "flux-tiny"
    elsewhere = tmp_path / "elsewhere" / "plan.json"
    elsewhere.parent.mkdir()
    shutil.move("here/plan.json", elsewhere)
    code, out, _ = graphrun("export", str(elsewhere), "--as", "accelerate")
    assert (code, list(json.loads(out))) == (0, ["text_encoder", "text_encoder_2", "transformer", "vae"])

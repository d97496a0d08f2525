"""The graphs that come with graphrun are found by name, wherever a graph file is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import graphrun as package
from graphrun.errors import GraphError
from graphrun.graph import shipped
from graphrun.graph.shipped import graph_file, graphs_folder, shipped_graphs

Cli = Callable[..., tuple[int, str, str]]
GRAPHS = Path(__file__).parents[2] / "graphs"


@pytest.fixture(autouse=True, scope="module")
def sources_are_read_once() -> Iterator[None]:
    """The 80 shipped graphs are read once for all tests, not at each hint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped, "_sources", cache(shipped._sources))
        yield


def test_every_file_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped_graphs() == tuple(sorted(path.stem for path in GRAPHS.glob("*.yaml")))
    assert {graph_file(name).resolve() for name in shipped_graphs()} == set(GRAPHS.glob("*.yaml"))
    assert package.load("flux-tiny").digest == package.load(GRAPHS / "flux-tiny.yaml").digest


def test_a_file_goes_before_a_name_and_a_folder_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sdxl").mkdir()
    assert graph_file("sdxl") == graphs_folder() / "sdxl.yaml"
    Path("flux-dev").write_text("graphrun: 1\n")
    assert graph_file("flux-dev") == Path("flux-dev")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("flux-dv", "did you mean flux-dev?"),
        ("lighthouse", "these are ace-step, auraflow,"),
        ("graphs/flux-dev.yaml", "graphrun's own graph is called flux-dev"),
        ("flux-dev.yaml", "graphrun's own graph is called flux-dev"),
        ("mine.yaml", "mine.yaml: no such file"),
        ("FLUX.1-dev", "graphrun's own graph of black-forest-labs/FLUX.1-dev is called flux-dev"),
        ("flux1_DEV", "graphrun's own graph of black-forest-labs/FLUX.1-dev is called flux-dev"),
        ("Z-Image-Turbo", "graphrun's own graph of Tongyi-MAI/Z-Image-Turbo is called z-image"),
        (
            "stable-diffusion-xl",
            "did you mean stabilityai/stable-diffusion-xl-base-1.0, which is called sdxl?",
        ),
        (
            "black-forest-labs/FLUX.1-dev",
            "graphrun's own graph of black-forest-labs/FLUX.1-dev is called flux-dev",
        ),
        (
            "black-forest-labs/flux.1-dev",
            "is called flux-dev; others with its weights: flux-controlnet",
        ),
        ("black-forest-labs/FLUX.1-dev@main", "is called flux-dev"),
        ("https://huggingface.co/black-forest-labs/FLUX.1-dev", "is called flux-dev"),
        (
            "stabilityai/stable-diffusion-xl-base-1.0",
            "is called sdxl; others with its weights: sdxl-nf4, sdxl-int8,",
        ),
        (
            "someone/FLUX.1-dev-copy",
            "to make one: graphrun import someone/FLUX.1-dev-copy -o FLUX.1-dev-copy.yaml",
        ),
        ("a/b@v1", "to make one: graphrun import a/b --revision v1 -o b.yaml"),
        ("graphs/flux", "to make one: graphrun import graphs/flux -o flux.yaml"),
    ],
)
def test_what_is_not_there_is_refused_with_the_name_that_was_meant(
    name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GraphError, match=f"^{name.replace('//', '/')}: no such file") as error_info:
        package.load(name)
    assert hint in str(error_info.value)


def test_a_path_in_a_folder_that_exists_is_no_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("graphs").mkdir()
    with pytest.raises(GraphError, match="^graphs/flux: no such file$"):
        package.load("graphs/flux")


@pytest.mark.parametrize("name", ["pipe", "pipe.safetensors", "pipe.gguf"])
def test_a_pipeline_in_a_folder_or_a_checkpoint_is_refused_with_the_import(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pipe").mkdir()
    Path("pipe.safetensors").write_bytes(b"x")
    Path("pipe.gguf").write_bytes(b"x")
    with pytest.raises(
        GraphError,
        match=rf"^{name}: is a (folder|checkpoint), .* graphrun import (\./)?{name} -o pipe.yaml$",
    ):
        package.load(name)


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_plan_names_a_shipped_graph_and_is_read_without_the_folder(
    graphrun: Cli, tmp_path: Path
) -> None:
    budgets = ("--device", "sim", "--vram", "6M", "--ram", "8G")
    assert graphrun("plan", "flux-tiny", *budgets, "-o", "here/plan.json")[0] == 0
    assert json.loads(Path("here/plan.json").read_text())["graph_file"] == "flux-tiny"
    plan_file = tmp_path / "elsewhere" / "plan.json"
    plan_file.parent.mkdir()
    shutil.move("here/plan.json", plan_file)
    code, output, _ = graphrun("export", str(plan_file), "--as", "accelerate")
    assert (code, list(json.loads(output))) == (
        0,
        ["text_encoder", "text_encoder_2", "transformer", "vae"],
    )

"""Import of hub repositories: only small files are fetched, or taken from the cache without a
network."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects
from import_whole import saved

import graphrun
from graphrun.diffusers_.importing.folder import LARGE, SMALL
from graphrun.diffusers_.importing.imported import ImportOptions, import_source
from graphrun.errors import InputError

SIZES = {"height": 16, "width": 16}


def test_of_a_repository_configurations_and_vocabularies_are_fetched_and_never_weights() -> None:
    small = [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "tokenizer/merges.txt",
        "tokenizer/spiece.model",
        "tokenizer/tokenizer.json",
        "tokenizer_4/chat_template.jinja",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
    ]
    large = [
        "flux1-dev.safetensors",
        "model.ckpt",
        "text_encoder/flax_model.msgpack",
        "text_encoder/pytorch_model.bin",
        "transformer/diffusion_pytorch_model-00001-of-00003.safetensors",
        "unet/model.onnx",
        "unet/openvino_model.bin",
    ]
    file_names = filter_repo_objects(
        sorted(small + large), allow_patterns=list(SMALL), ignore_patterns=list(LARGE)
    )
    assert list(file_names) == sorted(small)


def test_a_repository_in_the_cache_is_imported_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved("StableDiffusionPipeline", tmp_path).folder
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    root = tmp_path / "cache" / "models--owner--tiny"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0123abcd")
    (root / "snapshots").mkdir()
    folder.rename(root / "snapshots" / "0123abcd")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    graph_import = import_source(
        "owner/tiny", ImportOptions({}, {"": "float16"}, input_defaults=SIZES)
    )
    graph = graph_import.write(tmp_path / "graph.yaml")
    assert [stage.op for stage in graph.stages] == ["encode_prompt", "denoise", "decode"]
    assert graph.source == "owner/tiny"
    assert graph.component("unet").source == "owner/tiny/unet"
    assert {c.dtype for c in graph.components.values()} == {"float16"}


def test_a_revision_is_pinned_as_the_commit_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the graph, in its components' sources and in the plan. None of them changes when the tag
    moves to another commit."""
    folder = saved("StableDiffusionPipeline", tmp_path).folder
    commits, root = {"main": "a" * 40, "v1": "b" * 40}, tmp_path / "cache" / "models--owner--tiny"
    (root / "refs").mkdir(parents=True)
    for name, commit in commits.items():
        (root / "refs" / name).write_text(commit)
        shutil.copytree(folder, root / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    graph_import = import_source(
        "owner/tiny", ImportOptions({}, {}, input_defaults=SIZES, revision="v1", whole=True)
    )
    graph = graph_import.write(tmp_path / "graph.yaml")
    text = (tmp_path / "graph.yaml").read_text()
    assert f"revision: {commits['v1']}" in text
    assert "# The revision is the commit that v1 was." in text
    assert graph.component("unet").source == f"owner/tiny@{commits['v1']}/unet"
    (root / "refs" / "v1").write_text("c" * 40)
    problem = graphrun.estimate(graph, vram="1G", ram="1G", hardware="sim", inputs={"steps": 1})
    assert set(dict(problem.commits).values()) == {commits["v1"]}
    with pytest.raises(InputError, match="cannot get the configurations of owner/tiny at v2"):
        import_source("owner/tiny", ImportOptions({}, {}, revision="v2"))


def test_an_unreachable_repository_is_an_error() -> None:
    with pytest.raises(
        InputError, match="cannot get the configurations of owner/none at v1 from the hub"
    ):
        import_source("owner/none", ImportOptions({}, {}, revision="v1"))

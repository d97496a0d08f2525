"""Code that comes with a checkpoint is never run, whatever stdin answers: neither for a part nor
inside a component."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphrun.errors import GraphError
from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.graph.parts import Component, Part
from graphrun.modules.build import build_part, meta_module

GRAPHS = Path(__file__).parents[2] / "graphs"
CODE = """
open({ran!r}, "w").close()
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
class Own(PreTrainedTokenizerFast):
    pass
class OwnConfig(PreTrainedConfig):
    model_type = "own"
"""
IMAGES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


@pytest.fixture
def flux() -> Graph:
    return load(GRAPHS / "flux-tiny.yaml")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer's folder that names its own classes, whose code would create the file ``ran``;
    stdin answers yes to everything.
    """
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 50))
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    shutil.copy(GRAPHS / "tokenizers" / "bytes.json", folder / "tokenizer.json")
    configs: dict[str, Any] = {
        "tokenizer_class": "Own",
        "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]},
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**configs, "model_max_length": 77, "pad_token": "<pad>"})
    )
    auto_map = {
        "AutoConfig": "own.OwnConfig",
        "AutoProcessor": "own.Own",
        "AutoImageProcessor": "own.Own",
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).write_text(
            json.dumps(
                {"auto_map": auto_map, "image_processor_type": "Own", "processor_class": "Own"}
            )
        )
    (folder / "own.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    return folder


@pytest.mark.parametrize("planning", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "AutoTokenizer",
        "AutoProcessor",
        "AutoImageProcessor",
        "AutoFeatureExtractor",
        "CLIPProcessor",
        "Qwen2VLProcessor",
    ],
)
def test_code_in_a_parts_folder_is_not_run(
    folder: Path, flux: Graph, name: str, planning: bool
) -> None:
    part = Part(
        "tokenizer", f"transformers.{name}", {}, source=str(folder), file_line="graph.yaml:9"
    )
    with pytest.raises(GraphError) as error_info:
        build_part(part, flux, planning=planning)
    assert not (folder.parent / "ran").exists()
    assert str(error_info.value).startswith("graph.yaml:9: parts.tokenizer: ")
    assert str(folder) in str(error_info.value)
    if name in ("AutoTokenizer", "AutoImageProcessor"):
        assert "needs its own code (auto_map)" in str(error_info.value)
        assert "--trust-package" in str(error_info.value)


def test_a_library_class_reads_the_same_folder(folder: Path, flux: Graph) -> None:
    part = Part(
        "tokenizer",
        "transformers.PreTrainedTokenizerFast",
        {},
        source=str(folder),
        file_line="graph.yaml:9",
    )
    assert build_part(part, flux).model_max_length == 77
    assert not (folder.parent / "ran").exists()


def test_code_named_by_a_nested_configuration_is_not_run(folder: Path) -> None:
    inner = {
        "model_type": "altclip_vision_model",
        "tie_word_embeddings": False,
        "auto_map": {"AutoModel": f"{folder}--own.Own"},
    }
    config = {
        "text_config": inner,
        "vision_config": {"model_type": "clip_vision_model", **IMAGES},
        "model_type": "llava",
    }
    component = Component(
        "encoder",
        "transformers.LlavaModel",
        None,
        config,
        True,
        "float32",
        ("float32",),
        file_line="graph.yaml:5",
    )
    for class_path in (
        component,
        replace(component, class_path="transformers.LlavaForConditionalGeneration"),
    ):
        with pytest.raises(
            GraphError,
            match=r"graph\.yaml:5: components\.encoder: .*needs its own code \(auto_map\)",
        ):
            meta_module(class_path, ())
        assert not (folder.parent / "ran").exists()

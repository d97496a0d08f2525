"""A number in a tokenizer's file or an input never makes the tokenizers library end the process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from graphrun.errors import GraphError
from graphrun.graph.graph import Graph, Part
from graphrun.graph.loading import load
from graphrun.modules.build import build_part
from graphrun.modules.texts import MOST_TOKENS

GRAPHS = Path(__file__).parents[2] / "graphs"
SCRIPT = """
import sys
from graphrun.modules.build import build_part
from graphrun.graph.graph import Part
from graphrun.graph.loading import load
part = Part("tokenizer", "transformers.PreTrainedTokenizerFast", {}, source=sys.argv[1], where="graph.yaml:9")
made = build_part(part, load(sys.argv[2]))
made("a", padding="max_length", max_length=made.model_max_length, truncation=True)
"""


@pytest.fixture
def flux() -> Graph:
    return load(GRAPHS / "flux-tiny.yaml")


def folder(place: Path, length: object) -> Path:
    """A byte tokenizer as a folder with this ``model_max_length``."""
    shutil.copy(GRAPHS / "tokenizers" / "bytes.json", place / "tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, "pad_token": "<pad>"}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return place


def test_the_process_survives_and_the_error_names_file_and_value(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(folder(tmp_path, 77_000_000_000_000)), str(GRAPHS / "flux-tiny.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    what = f"a text cannot be padded to 77000000000000 tokens (model_max_length in {tmp_path}/tokenizer_config.json)"
    assert f"graph.yaml:9: parts.tokenizer: {what}; give 1 to {MOST_TOKENS}" in done.stderr


@pytest.mark.parametrize("planning", [True, False])
@pytest.mark.parametrize("length", [-5, 0, MOST_TOKENS + 1, 2**63, 10**30])
def test_invalid_lengths_are_refused_from_files_graphs_and_inputs(tmp_path: Path, flux: Graph, length: int, planning: bool) -> None:
    config = {"model_max_length": length, "pad_token": "<pad>"}
    in_folder = Part("tokenizer", "transformers.PreTrainedTokenizerFast", {}, source=str(folder(tmp_path, length)), where="g:9")
    of_graph = Part(
        "tokenizer", "transformers.PreTrainedTokenizerFast", config, True, GRAPHS / "tokenizers/bytes.json", where="g:9"
    )
    for part, source in ((in_folder, "tokenizer_config.json"), (of_graph, "model_max_length in g:9")):
        made = build_part(part, flux, planning=planning)
        with pytest.raises(GraphError, match=rf"g:9: parts\.tokenizer: a text cannot be padded to {length} tokens") as caught:
            made("a", padding="max_length", max_length=made.model_max_length, truncation=True)
        assert source in str(caught.value)
        made.model_max_length = 77
        with pytest.raises(GraphError, match="an input such as max_sequence_length"):
            made(["a"], padding="max_length", max_length=length, truncation=True)
        assert len(made("a", padding="max_length", truncation=True)["input_ids"]) == 77


def test_texts_extended_while_planning_are_limited_too(tmp_path: Path, flux: Graph) -> None:
    part = Part("tokenizer", "transformers.PreTrainedTokenizerFast", {}, source=str(folder(tmp_path, 77)), where="g:9")
    made = build_part(part, flux, planning=True)
    with pytest.raises(GraphError, match="an input such as max_sequence_length"):
        made(["a"], padding=True, max_length=77_000_000_000_000, truncation=True)
    assert len(made(["a"], padding=True, max_length=9, truncation=True)["input_ids"][0]) == 9


def test_a_tokenizer_without_a_maximum_length_does_not_pad(tmp_path: Path, flux: Graph) -> None:
    part = Part("tokenizer", "transformers.PreTrainedTokenizerFast", {}, source=str(folder(tmp_path, int(1e30))), where="g:9")
    made = build_part(part, flux)
    assert len(made("a", padding="max_length", max_length=64, truncation=True)["input_ids"]) == 64
    assert len(made("abc", padding="max_length")["input_ids"]) == len(made("abc")["input_ids"])

"""A number in a tokenizer's file or an input never makes the tokenizers library end the process."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from forks import forked, forked_command

from graphrun.errors import GraphError
from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.graph.parts import Part
from graphrun.modules.build import build_part
from graphrun.modules.texts import MAX_TOKENS

GRAPHS = Path(__file__).parents[2] / "graphs"


@pytest.fixture
def flux() -> Graph:
    return load(GRAPHS / "flux-tiny.yaml")


def folder(place: Path, length: object) -> Path:
    """A byte tokenizer as a folder with this ``model_max_length``."""
    shutil.copy(GRAPHS / "tokenizers" / "bytes.json", place / "tokenizer.json")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "pad_token": "<pad>",
    }
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return place


def test_the_process_survives_and_the_error_names_file_and_value(
    flux: Graph, tmp_path: Path
) -> None:
    source = folder(tmp_path, 77_000_000_000_000)
    kind = "transformers.PreTrainedTokenizerFast"
    part = Part("tokenizer", kind, {}, source=str(source), file_line="graph.yaml:9")

    def encode() -> None:
        tokenizer = build_part(part, flux)
        length = tokenizer.model_max_length
        tokenizer("a", padding="max_length", max_length=length, truncation=True)

    process = forked(encode, tmp_path)
    assert process.returncode == 1, process.stderr
    message = (
        "a text cannot be padded to 77000000000000 tokens (model_max_length in "
        f"{tmp_path}/tokenizer_config.json)"
    )
    assert f"graph.yaml:9: parts.tokenizer: {message}; give 1 to {MAX_TOKENS}" in process.stderr


@pytest.mark.parametrize("planning", [True, False])
@pytest.mark.parametrize("length", [-5, 0, MAX_TOKENS + 1, 2**63, 10**30])
def test_invalid_lengths_are_refused_from_files_graphs_and_inputs(
    tmp_path: Path, flux: Graph, length: int, planning: bool
) -> None:
    config = {"model_max_length": length, "pad_token": "<pad>"}
    in_folder = Part(
        "tokenizer",
        "transformers.PreTrainedTokenizerFast",
        {},
        source=str(folder(tmp_path, length)),
        file_line="g:9",
    )
    of_graph = Part(
        "tokenizer",
        "transformers.PreTrainedTokenizerFast",
        config,
        True,
        GRAPHS / "tokenizers/bytes.json",
        file_line="g:9",
    )
    for part, source in (
        (in_folder, "tokenizer_config.json"),
        (of_graph, "model_max_length in g:9"),
    ):
        tokenizer = build_part(part, flux, planning=planning)
        with pytest.raises(
            GraphError, match=rf"g:9: parts\.tokenizer: a text cannot be padded to {length} tokens"
        ) as error_info:
            tokenizer(
                "a", padding="max_length", max_length=tokenizer.model_max_length, truncation=True
            )
        assert source in str(error_info.value)
        tokenizer.model_max_length = 77
        with pytest.raises(GraphError, match="an input such as max_sequence_length"):
            tokenizer(["a"], padding="max_length", max_length=length, truncation=True)
        assert len(tokenizer("a", padding="max_length", truncation=True)["input_ids"]) == 77


def test_texts_extended_while_planning_are_limited_too(tmp_path: Path, flux: Graph) -> None:
    part = Part(
        "tokenizer",
        "transformers.PreTrainedTokenizerFast",
        {},
        source=str(folder(tmp_path, 77)),
        file_line="g:9",
    )
    tokenizer = build_part(part, flux, planning=True)
    with pytest.raises(GraphError, match="an input such as max_sequence_length"):
        tokenizer(["a"], padding=True, max_length=77_000_000_000_000, truncation=True)
    assert len(tokenizer(["a"], padding=True, max_length=9, truncation=True)["input_ids"][0]) == 9


def test_a_tokenizer_without_a_maximum_length_does_not_pad(tmp_path: Path, flux: Graph) -> None:
    part = Part(
        "tokenizer",
        "transformers.PreTrainedTokenizerFast",
        {},
        source=str(folder(tmp_path, int(1e30))),
        file_line="g:9",
    )
    tokenizer = build_part(part, flux)
    assert (
        len(tokenizer("a", padding="max_length", max_length=64, truncation=True)["input_ids"]) == 64
    )
    assert len(tokenizer("abc", padding="max_length")["input_ids"]) == len(
        tokenizer("abc")["input_ids"]
    )


def edited(place: Path, **changes: Any) -> Path:
    """The byte tokenizer with other entries, as a file."""
    data = json.loads((GRAPHS / "tokenizers" / "bytes.json").read_text()) | changes
    (place / "tokenizer.json").write_text(json.dumps(data))
    return place / "tokenizer.json"


def charsmap(data: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def template(token: str) -> dict[str, Any]:
    single = [{"SpecialToken": {"id": token, "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}


# Entry of the file -> whether loading fails; otherwise encoding fails.
PANICS = {
    "a short charsmap": ({"normalizer": charsmap(b"ab")}, True),
    "a charsmap that points outside itself": (
        {"normalizer": charsmap(b"\4\0\0\0\xff\xff\xff\xff")},
        False,
    ),
    "an empty regular expression": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "x"}},
        False,
    ),
    "an unknown special token": ({"post_processor": template("z")}, False),
    "no token for an unknown letter": (
        {"model": {"type": "Unigram", "unk_id": None, "vocab": [["b", 0.0]]}},
        False,
    ),
}


@pytest.mark.parametrize("as_folder", [False, True])
@pytest.mark.parametrize(("changes", "at_once"), PANICS.values(), ids=PANICS)
def test_a_file_that_makes_the_library_panic_is_named(
    tmp_path: Path, flux: Graph, changes: dict[str, Any], at_once: bool, as_folder: bool
) -> None:
    """A panic of the tokenizers library is no Exception, and no ``except Exception`` catches it."""
    kind, config = "transformers.PreTrainedTokenizerFast", {"model_max_length": 9}
    if as_folder:
        part = Part("tokenizer", kind, {}, source=str(folder(tmp_path, 9)), file_line="g:9")
        edited(tmp_path, **changes)
    else:
        part = Part("tokenizer", kind, config, True, edited(tmp_path, **changes), file_line="g:9")
    if not at_once:
        tokenizer = build_part(part, flux)
        assert tokenizer.model_max_length == 9
    with pytest.raises(
        GraphError, match=rf"g:9: parts\.tokenizer: .*{tmp_path}.*(panics|unk_id)"
    ) as error_info:
        build_part(part, flux) if at_once else tokenizer.tokenize(
            "a lighthouse", add_special_tokens=True
        )
    assert "\n" not in str(error_info.value)
    if not at_once:
        for method in (tokenizer, tokenizer.encode):
            with pytest.raises(GraphError, match=f"{tmp_path}.* cannot encode a text"):
                method("a lighthouse")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_panic(
    flux: Graph, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    from transformers import PreTrainedTokenizerFast

    def interrupted(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", interrupted)
    part = Part(
        "tokenizer",
        "transformers.PreTrainedTokenizerFast",
        {},
        True,
        GRAPHS / "tokenizers/bytes.json",
        file_line="g:9",
    )
    tokenizer = build_part(part, flux)
    with pytest.raises(error):
        tokenizer("a")
    monkeypatch.setattr(PreTrainedTokenizerFast, "__init__", interrupted)
    with pytest.raises(error):
        build_part(part, flux)


@pytest.mark.sweep("more")
@pytest.mark.long
@pytest.mark.parametrize("command", ["plan", "run"])
def test_commands_refuse_such_a_file(tmp_path: Path, command: str, dry: Any) -> None:
    """The last line on stderr is a message with file and line, without a traceback of Python, and
    the exit status is 2."""
    dry("flux-tiny")  # imports the libraries, before the fork
    file = edited(
        tmp_path, normalizer={"type": "Replace", "pattern": {"Regex": ""}, "content": "x"}
    )
    text = (GRAPHS / "flux-tiny.yaml").read_text().replace("configs/", f"{GRAPHS}/configs/")
    (tmp_path / "graph.yaml").write_text(text.replace("tokenizers/bytes.json", str(file)))
    arguments = {
        "plan": ["--vram", "6M"],
        "run": ["--vram", "6M", "--device", "sim", "--prompt", "a"],
    }[command]
    process = forked_command(
        command,
        str(tmp_path / "graph.yaml"),
        *arguments,
        folder=tmp_path,
        environment={"RUST_BACKTRACE": "0", "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    last = process.stderr.splitlines()[-1]
    assert (process.returncode, "Traceback" in process.stderr) == (2, False), process.stderr
    assert last.startswith(f"graphrun: {tmp_path}/graph.yaml:")
    assert f"{file}" in last

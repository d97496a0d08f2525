"""Sizes from the headers of safetensors, compared with the graph, before any data is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import graphrun
from graphrun.disk_store import Store
from graphrun.errors import GraphError
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Component
from graphrun.modules.build import build, build_part, meta_module
from graphrun.modules.source_files import local_folder, stored_tensors
from graphrun.modules.stored import holding

GRAPHS = Path(__file__).parents[2] / "graphs"


@pytest.fixture(scope="module")
def flux() -> Graph:
    return graphrun.load(GRAPHS / "flux-tiny.yaml")


@pytest.fixture(scope="module")
def checkpoint(flux: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """flux-tiny as a folder in the layout of diffusers, the transformer in shards, T5 in fp32, the
    tokenizers and the scheduler."""
    folder = tmp_path_factory.mktemp("stored")
    for name, component in flux.components.items():
        module = build(component, flux)
        (module.float() if name == "text_encoder_2" else module).save_pretrained(
            folder / name, max_shard_size="4MB"
        )
    for name, part in flux.parts.items():
        build_part(part, flux).save_pretrained(folder / name)
    return folder


@pytest.fixture
def break_file(checkpoint: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one component's folder that a test may damage."""

    def copy(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in (checkpoint / name).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    return copy


def at(component: Component, folder: Path) -> Component:
    return replace(component, source=str(folder))


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("name", ["transformer", "text_encoder", "text_encoder_2", "vae"])
def test_headers_describe_the_files_tensors(checkpoint: Path, name: str) -> None:
    file_tensors = {tensor.name: tensor for tensor in stored_tensors(checkpoint / name, "")}
    real = {
        key: t
        for file in (checkpoint / name).glob("*.safetensors")
        for key, t in load_file(file).items()
    }
    described = {
        key: (str(t.dtype).removeprefix("torch."), tuple(t.shape), t.numel() * t.element_size())
        for key, t in real.items()
    }
    assert {key: (t.dtype, t.shape, t.nbytes) for key, t in file_tensors.items()} == described


@pytest.mark.parametrize("name", ["transformer", "text_encoder", "text_encoder_2", "vae"])
def test_no_tensor_of_the_module_is_missing(flux: Graph, checkpoint: Path, name: str) -> None:
    component = at(flux.component(name), checkpoint / name)
    module = meta_module(component, flux.trust)
    files = holding(component, module)
    assert files is not None
    assert files.absent_count == 0
    factor = 2 if name == "text_encoder_2" else 1
    saved_bytes = sum(
        t.numel() * t.element_size()
        for t in {id(t): t for t in module.state_dict(keep_vars=True).values()}.values()
    )
    assert (
        files.nbytes
        == files.used_bytes
        == factor * saved_bytes
        == sum(nbytes for _, nbytes in files.dtypes)
    )
    assert dict(files.dtypes).keys() == {"float32" if factor == 2 else "bfloat16"}


def test_sources_that_are_not_local_are_none(flux: Graph, checkpoint: Path, tmp_path: Path) -> None:
    vae = flux.component("vae")
    module = meta_module(vae, flux.trust)
    (tmp_path / "config.json").write_bytes((checkpoint / "vae" / "config.json").read_bytes())
    for source in (None, str(tmp_path), "nobody/nothing-of-this-name/vae"):
        assert holding(replace(vae, source=source), module) is None


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
]
DTYPES += [torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.complex64]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_that_safetensors_writes_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "scalar": torch.zeros(()).to(dtype),
        "none": torch.zeros(3, 0).to(dtype),
        "some": torch.zeros(3, 5).to(dtype),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    file_tensors = {tensor.name: tensor for tensor in stored_tensors(tmp_path, "")}
    for name, tensor in tensors.items():
        assert file_tensors[name].dtype == str(dtype).removeprefix("torch.")
        assert (file_tensors[name].shape, file_tensors[name].nbytes) == (
            tuple(tensor.shape),
            tensor.numel() * tensor.element_size(),
        )


def with_header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
FAULTS = {
    "no header": b"",
    "cut in its length": b"\x10\0\0",
    "a length beyond the file": (1 << 62).to_bytes(8, "little") + bytes(64),
    "cut in its header": with_header({"a": GOOD}, bytes(24))[:20],
    "cut in its data": with_header({"a": GOOD}, bytes(20)),
    "longer than it says": with_header({"a": GOOD}, bytes(25)),
    "not JSON": with_header(b"not json at all"),
    "not UTF-8": with_header(b'{"\xff": 1}'),
    "no object": with_header([GOOD], bytes(24)),
    "deeply nested": with_header(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "an unknown dtype": with_header({"a": {**GOOD, "dtype": "F33"}}, bytes(24)),
    "an unhashable dtype": with_header({"a": {**GOOD, "dtype": []}}, bytes(24)),
    "bytes that are not its shape's": with_header({"a": {**GOOD, "shape": [2, 4]}}, bytes(24)),
    "a negative size": with_header({"a": {**GOOD, "shape": [-2, -3]}}, bytes(24)),
    "half a size": with_header({"a": {**GOOD, "shape": [2.0, 3]}}, bytes(24)),
    "no offsets": with_header({"a": {"dtype": "F32", "shape": [2, 3]}}, bytes(24)),
    "offsets of text": with_header({"a": {**GOOD, "data_offsets": ["0", "24"]}}, bytes(24)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_file_is_named(tmp_path: Path, fault: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(FAULTS[fault])
    with pytest.raises(GraphError) as error_info:
        stored_tensors(tmp_path, "graph.yaml:7")
    text = str(error_info.value)
    assert text.startswith(
        (f"graph.yaml:7: {file} is truncated or corrupt: ", f"graph.yaml:7: {file} is corrupt: ")
    )
    assert text.endswith("; download it again")
    assert len(text) < 400


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": []}}'],
)
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(GraphError) as error_info:
        stored_tensors(tmp_path, "graph.yaml:7")
    assert str(error_info.value).startswith(f"graph.yaml:7: {index} is not a safetensors index")


def test_a_file_of_another_model_is_refused_while_planning(
    flux: Graph, break_file: Callable[[str], Path]
) -> None:
    folder = break_file("vae")
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["decoder.conv_in.bias"] = torch.zeros(7, dtype=torch.float16)
    save_file(tensors, file, {"format": "pt"})
    component = at(flux.component("vae"), folder)
    graph = replace(flux, components={**flux.components, "vae": component})
    with pytest.raises(GraphError) as error_info:
        graphrun.estimate(graph, vram="8M", ram="1G", hardware="sim")
    wide = flux.component("vae").config["block_out_channels"][-1]
    message = f"decoder.conv_in.bias is [7] float16, not [{wide}]"
    assert (
        str(error_info.value)
        == f"{component.file_line}: components.vae: {folder} does not match its config: {message}"
    )


def test_missing_tensors_are_counted(flux: Graph, break_file: Callable[[str], Path]) -> None:
    folder = break_file("vae")
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    left_out = ["decoder.conv_in.bias", "decoder.conv_in.weight"]
    extra_tensors = {"somebody.elses": torch.zeros(5)}
    save_file(
        {key: t for key, t in {**tensors, **extra_tensors}.items() if key not in left_out},
        file,
        {"format": "pt"},
    )
    component = at(flux.component("vae"), folder)
    files = holding(component, meta_module(component, flux.trust))
    assert files is not None
    assert files.absent_count == 2
    assert files.nbytes - files.used_bytes == 20
    assert files.tensors == len(tensors) - 1


def test_the_base_models_prefix_in_names_is_removed(flux: Graph, tmp_path: Path) -> None:
    """A checkpoint of a causal language model, read as its base model."""
    config = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 32,
    }
    whole = Component(
        "any", "transformers.LlamaForCausalLM", None, config, True, "float32", ("float32",)
    )
    build(whole, flux).save_pretrained(tmp_path)
    body = at(replace(whole, class_path="transformers.LlamaModel"), tmp_path)
    files = holding(body, meta_module(body, flux.trust))
    assert files is not None
    # except the output layer
    assert (files.absent_count, files.nbytes - files.used_bytes) == (
        0,
        4 * 16 * 32,
    )


def bare(graph: Graph, folder: str) -> str:
    """A graph file that names only the class of each component and part, and the pipeline's
    source."""
    components = "\n".join(
        f"  {c.name}: {{class: {c.class_path}, dtype: {c.dtype}}}"
        for c in graph.components.values()
    )
    parts = "\n".join(f"  {p.name}: {{class: {p.class_path}}}" for p in graph.parts.values())
    text = (GRAPHS / "flux-tiny.yaml").read_text()
    head, tail = text[: text.index("components:")], text[text.index("stages:") :]
    return f"{head}\nsource: {folder}\ncomponents:\n{components}\nparts:\n{parts}\n{tail}"


@pytest.mark.sweep("more")
@pytest.mark.parametrize("place", ["folder", "hub"])
def test_estimate_needs_no_config_where_the_source_is_local(
    flux: Graph, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    source = str(checkpoint)
    if place == "hub":
        source = "somebody/flux-tiny"
        repository = tmp_path / "hub" / "models--somebody--flux-tiny"
        (repository / "snapshots").mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0123abc")
        (repository / "snapshots" / "0123abc").symlink_to(checkpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    file = tmp_path / "bare.yaml"
    file.write_text(bare(flux, source))
    graph = graphrun.load(file)
    cache = tmp_path / "cache"
    survey = graphrun.survey(graph, hardware="sim", cache=cache)
    expected = graphrun.survey(flux, hardware="sim")
    assert sum(entry.key.startswith("trace-") for entry in Store(cache).entries()) == 1
    assert [row["weights"]["bfloat16"]["bytes"] for row in survey["components"]] == [
        row["weights"]["bfloat16"]["bytes"] for row in expected["components"]
    ]
    assert survey["phases"] == expected["phases"]
    t5 = next(row for row in survey["components"] if row["name"] == "text_encoder_2")
    assert t5["source"]["dtypes"] == {"float32": t5["source"]["nbytes"]}
    assert t5["source"]["read_as"] == "bfloat16"
    assert t5["weights"]["bfloat16"]["basis"] == "files"
    assert all(row["source"] is None for row in expected["components"])


def test_new_weights_invalidate_the_trace(
    flux: Graph, checkpoint: Path, break_file: Callable[[str], Path]
) -> None:
    from graphrun.store import trace_key

    folder = break_file("vae")
    graph = replace(flux, components={**flux.components, "vae": at(flux.component("vae"), folder)})
    inputs = graph.for_planning({})
    key = trace_key(graph, inputs)
    assert key == trace_key(graph, inputs) is not None
    file = next(folder.glob("*.safetensors"))
    save_file(load_file(file), file, {"format": "pt"})
    assert trace_key(graph, inputs) != key


def test_a_repositorys_folder_in_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flux: Graph
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert local_folder("somebody/something/vae") is None
    root = tmp_path / "models--somebody--something"
    (root / "snapshots" / "1f" / "vae").mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("1f\n")
    assert local_folder("somebody/something/vae") == root / "snapshots" / "1f" / "vae"
    assert local_folder("somebody/something") == root / "snapshots" / "1f"
    assert local_folder("somebody/something/unet") is None
    vae = replace(flux.component("vae"), source="somebody/something/vae")
    assert holding(vae, meta_module(vae, ())) is None

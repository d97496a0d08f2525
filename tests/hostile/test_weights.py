"""Malformed and hostile weight files, LoRAs and GGUF files are refused with an error that names the
file."""

from __future__ import annotations

import json
import math
import os
import struct
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from graphrun.errors import GraphError
from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.graph.parts import Adapter, Component, Part
from graphrun.modules.adapters import add_ip_adapters
from graphrun.modules.build import build_part
from graphrun.modules.contents import content_of, refuse_missing
from graphrun.modules.gguf import gguf_tensors
from graphrun.modules.lora import deltas_of
from graphrun.modules.source_files import stored_tensors


@pytest.fixture(scope="module")
def flux() -> Graph:
    return load(Path(__file__).parents[2] / "graphs/flux-tiny.yaml")


def f32(begin: int, end: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape or (2,)), "data_offsets": [begin, end]}


HEADERS: dict[str, tuple[Any, int]] = {
    "overlapping": ({"a": f32(0, 8), "b": f32(4, 12)}, 12),
    "the same bytes": ({"a": f32(0, 8), "b": f32(0, 8)}, 8),
    "unused bytes": ({"a": f32(0, 8), "b": f32(16, 24)}, 24),
    "unused bytes at the start": ({"a": f32(8, 16)}, 16),
    "no elements, 2^63 wide": ({"a": f32(0, 0, 0, 2**63)}, 0),
    "no elements, 2^62 x 2^62": ({"a": f32(0, 0, 0, 2**62, 2**62)}, 0),
    "nested": (b"[" * 100_000, 0),
    "digits": (b'{"a": %s}' % (b"9" * 5_000), 0),
    "half a pair": (b'{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', 8),
    "a list": ([1], 0),
}


@pytest.mark.parametrize(("header", "nbytes"), HEADERS.values(), ids=HEADERS)
def test_safetensors(header: Any, nbytes: int, tmp_path: Path) -> None:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes(nbytes))
    with pytest.raises(GraphError, match=r"a.safetensors is corrupt"):
        stored_tensors(tmp_path, "graph.yaml:1")


def test_a_long_header(tmp_path: Path) -> None:
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 2**25))
        file.truncate(2**26)
    with pytest.raises(GraphError, match=r"header of 33,554,432 bytes, and at most 16,777,216"):
        stored_tensors(tmp_path, "graph.yaml:1")


@pytest.mark.parametrize(
    "name",
    ["../a.safetensors", "/etc/passwd", "sub/../../a", "", ".", "a\0b", "x" * 5_000, 7, None],
)
def test_an_index_names_files_of_its_folder(name: Any, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(GraphError, match="is not a safetensors index"):
        stored_tensors(folder, "graph.yaml:1")


def test_weights_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(GraphError, match="not a regular file"):
        stored_tensors(tmp_path, "graph.yaml:1")
    with pytest.raises(GraphError, match="not a regular file"):
        gguf_tensors(tmp_path / "a.safetensors", "graph.yaml:1")


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = torch.nn.Linear(6, 4)
        self.conv = torch.nn.Conv2d(3, 5, 3)


@cache
def layer() -> Layer:
    return Layer()


def lora(
    path: Path, tensors: dict[str, torch.Tensor], settings: str | None = None
) -> dict[str, Any]:
    """The deltas of a file with ``tensors``, added to the weights."""
    save_file(
        tensors, path, metadata=None if settings is None else {"lora_adapter_metadata": settings}
    )
    component = Component(
        "part", "x.Layer", None, {}, True, "float32", ("float32",), loras=(Adapter(str(path), 1.0),)
    )
    deltas_by_name = deltas_of(component, layer())
    for name, deltas in deltas_by_name.items():
        for delta in deltas:
            delta.add_to(layer().get_parameter(name).detach().clone())
    return deltas_by_name


DOWN, UP = "part.to_q.lora_A.weight", "part.to_q.lora_B.weight"
FITTING = {DOWN: torch.zeros(2, 6), UP: torch.zeros(4, 2)}
BAD_LORAS: dict[str, tuple[dict[str, torch.Tensor], str | None]] = {
    "rank 0": ({DOWN: torch.zeros(0, 6), UP: torch.zeros(4, 0)}, None),
    "0 dimensions": ({DOWN: torch.zeros(()), UP: torch.zeros(())}, None),
    "1 dimension": ({DOWN: torch.zeros(6), UP: torch.zeros(4)}, None),
    "3 dimensions": ({DOWN: torch.zeros(2, 6, 3), UP: torch.zeros(4, 2)}, None),
    "differing ranks": ({DOWN: torch.zeros(2, 6), UP: torch.zeros(4, 3)}, None),
    "differing sizes": ({DOWN: torch.zeros(2, 5), UP: torch.zeros(4, 2)}, None),
    "one half": ({DOWN: torch.zeros(2, 6)}, None),
    "integers": ({DOWN: torch.zeros(2, 6, dtype=torch.int64), UP: torch.zeros(4, 2)}, None),
    "complex numbers": (
        {DOWN: torch.zeros(2, 6), UP: torch.zeros(4, 2, dtype=torch.complex64)},
        None,
    ),
    "three alphas": ({**FITTING, "part.to_q.alpha": torch.zeros(3)}, None),
    "alpha not a number": ({**FITTING, "part.to_q.alpha": torch.tensor(float("nan"))}, None),
    "metadata a list": (FITTING, "[]"),
    "metadata nested": (FITTING, "[" * 100_000),
    "metadata no JSON": (FITTING, "x"),
    "alpha a text": (FITTING, '{"part.lora_alpha": "8"}'),
    "alpha null": (FITTING, '{"part.lora_alpha": null}'),
    "alpha endless": (FITTING, '{"part.lora_alpha": 1e999}'),
    "alpha a list": (FITTING, '{"part.lora_alpha": [8]}'),
}


@pytest.mark.parametrize(("tensors", "settings"), BAD_LORAS.values(), ids=BAD_LORAS)
def test_loras(tensors: dict[str, torch.Tensor], settings: str | None, tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"components.part.loras: .*a.safetensors"):
        lora(tmp_path / "a.safetensors", tensors, settings)


def typed_file(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> Path:
    """A safetensors file of zeros: name -> type, shape, bits of an element."""
    header, end = {}, 0
    for name, (kind, shape, bits) in tensors.items():
        begin, end = end, end + bits * math.prod(shape) // 8
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return path


# types of the format that torch cannot read, or cannot cast
UNREADABLE = [
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("F4", 4),
]


@pytest.mark.parametrize(("kind", "bits"), UNREADABLE)
def test_loras_in_types_that_torch_cannot_compute_with(
    kind: str, bits: int, tmp_path: Path
) -> None:
    file = typed_file(
        tmp_path / "a.safetensors", {DOWN: (kind, [2, 8], bits), UP: ("F32", [4, 2], 32)}
    )
    part = Component(
        "part", "x.Layer", None, {}, True, "float32", ("float32",), loras=(Adapter(str(file), 1.0),)
    )
    module = torch.nn.Module()
    module.to_q = torch.nn.Linear(8, 4)
    with pytest.raises(
        GraphError,
        match=rf"components.part.loras: .*a.safetensors cannot be read: {DOWN} is {kind}",
    ):
        deltas_of(part, module)


@pytest.mark.parametrize(("kind", "bits"), UNREADABLE)
def test_ip_adapters_in_types_that_torch_cannot_compute_with(
    kind: str, bits: int, tmp_path: Path
) -> None:
    """Refused from the header, while planning."""
    file = typed_file(tmp_path / "a.safetensors", {"image_proj.proj.weight": (kind, [8, 8], bits)})
    part = Component(
        "unet",
        "x.Layer",
        None,
        {},
        True,
        "float32",
        ("float32",),
        ip_adapters=(Adapter(str(file)),),
    )
    unet = SimpleNamespace(_convert_ip_adapter_attn_to_diffusers=None)
    with pytest.raises(
        GraphError,
        match=r"components.unet.ip_adapters: .*a.safetensors cannot be read: image_proj.* is "
        rf"{kind}",
    ):
        add_ip_adapters(part, unet)


@pytest.mark.parametrize(("kind", "bits"), UNREADABLE)
def test_weights_in_types_that_torch_cannot_compute_with(
    kind: str, bits: int, tmp_path: Path
) -> None:
    file = typed_file(
        tmp_path / "a.safetensors", {"weight": (kind, [4, 8], bits), "bias": ("F32", [4], 32)}
    )
    part, layer = (
        Component("p", "x.Layer", str(file), {}, True, "float32", ("float32",)),
        torch.nn.Linear(8, 4),
    )
    with pytest.raises(
        GraphError,
        match=rf"components.p: {file} stores weight as float.*, which torch cannot compute with",
    ):
        refuse_missing(content_of(part, layer, file, "float32"), layer.state_dict(), part)


@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize("key", ["num_train_timesteps", "solver_order"])
def test_a_scheduler_that_would_take_all_memory(
    key: str, in_folder: bool, tmp_path: Path, flux: Graph
) -> None:
    config = {"_class_name": "UniPCMultistepScheduler", key: 3 * 10**9}
    (tmp_path / "scheduler_config.json").write_text(json.dumps(config))
    source = {"source": str(tmp_path)} if in_folder else {"config": config, "has_config": True}
    part = Part(
        "scheduler",
        "diffusers.UniPCMultistepScheduler",
        **{"config": {}, **source},
        file_line="g:9",
    )
    with pytest.raises(
        GraphError,
        match=rf"g:9: parts.scheduler.config: {key} is 3,000,000,000, .* --limit timesteps=",
    ):
        build_part(part, flux)


def test_loras_that_fit(tmp_path: Path) -> None:
    conv = {
        "part.conv.lora_A.weight": torch.zeros(2, 3, 3, 3),
        "part.conv.lora_B.weight": torch.zeros(5, 2, 1, 1),
    }
    deltas_by_name = lora(
        tmp_path / "a.safetensors",
        {**FITTING, **conv, "part.conv.alpha": torch.tensor(4)},
        '{"part.lora_alpha": 8}',
    )
    assert {name: deltas[0].factor for name, deltas in deltas_by_name.items()} == {
        "to_q.weight": 4.0,
        "conv.weight": 2.0,
    }


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(path: Path, keys: bytes, tensors: bytes, counts: tuple[int, int]) -> tuple[Any, ...]:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + keys + tensors + bytes(4096))
    return gguf_tensors(path, "graph.yaml:1")


PLAIN = text("a") + struct.pack("<IQIQ", 1, 32, 0, 0)
ALIGNMENT = text("general.alignment")
BAD_GGUF: dict[str, tuple[bytes, bytes, tuple[int, int]]] = {
    "alignment 0": (ALIGNMENT + struct.pack("<II", 4, 0), PLAIN, (1, 1)),
    "alignment negative": (ALIGNMENT + struct.pack("<Ii", 5, -32), PLAIN, (1, 1)),
    "alignment a number": (ALIGNMENT + struct.pack("<If", 6, 32.0), PLAIN, (1, 1)),
    "alignment a text": (ALIGNMENT + struct.pack("<I", 8) + text("32"), PLAIN, (1, 1)),
    "alignment an array": (ALIGNMENT + struct.pack("<IIQI", 9, 4, 1, 32), PLAIN, (1, 1)),
    "nested arrays": (
        text("k")
        + struct.pack("<I", 9)
        + struct.pack("<IQ", 9, 1) * 5_000
        + struct.pack("<IQI", 4, 1, 1),
        PLAIN,
        (1, 1),
    ),
    "no elements, 2^63 wide": (b"", text("a") + struct.pack("<IQQIQ", 2, 0, 2**63, 0, 0), (1, 0)),
    "many dimensions": (b"", text("a") + struct.pack("<I", 2**31), (1, 0)),
    "twice": (b"", PLAIN * 2, (2, 0)),
    "a long array": (text("k") + struct.pack("<IIQ", 9, 4, 2**60), PLAIN, (1, 1)),
}


@pytest.mark.parametrize(("keys", "tensors", "counts"), BAD_GGUF.values(), ids=BAD_GGUF)
def test_gguf(keys: bytes, tensors: bytes, counts: tuple[int, int], tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"a.gguf (is truncated or corrupt|cannot be read)"):
        gguf(tmp_path / "a.gguf", keys, tensors, counts)


def test_gguf_that_is_whole(tmp_path: Path) -> None:
    (tensor,) = gguf(tmp_path / "a.gguf", ALIGNMENT + struct.pack("<II", 4, 64), PLAIN, (1, 1))
    assert (tensor.shape, tensor.begin % 64) == ((32,), 0)

"""Stage outputs are read back bit for bit, and no file runs code."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from graphrun.batch.cache.pack import pack, unpack
from graphrun.errors import InputError


def test_nested_values_come_back_bit_for_bit() -> None:
    tensor = torch.randn(3, 4).to(torch.bfloat16)
    value = {
        "embeds": {
            "a": tensor,
            "again": tensor,
            "view": tensor[:, 1:3].t(),
            "ids": torch.arange(3),
        },
        "list": [1, 2.5, None, True, "text", (torch.zeros(0), 0.1)],
        "dtype": torch.bfloat16,
        "number": np.float64(2.5),
        "array": np.arange(6.0).reshape(2, 3),
        "picture": Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)),
    }
    unpacked = unpack(pack(value))
    assert torch.equal(unpacked["embeds"]["view"], tensor[:, 1:3].t())
    assert unpacked["embeds"]["a"].dtype == torch.bfloat16
    assert torch.equal(unpacked["embeds"]["a"], tensor)
    assert unpacked["embeds"]["again"] is unpacked["embeds"]["a"], "one tensor stays one"
    assert unpacked["list"][:5] == value["list"][:5]  # type: ignore[index]
    assert isinstance(unpacked["list"][5], tuple)
    assert unpacked["dtype"] is torch.bfloat16
    assert unpacked["number"] == 2.5
    assert np.array_equal(unpacked["array"], value["array"])  # type: ignore[arg-type]
    assert unpacked["picture"].tobytes() == value["picture"].tobytes()  # type: ignore[attr-defined]


def test_the_order_of_dimensions_in_memory_comes_back() -> None:
    """Kernels are chosen by it, and round differently."""
    pixels = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
    unpacked = unpack(
        pack({"half": pixels[:, :4], "whole": torch.randn(3, 1, 2), "number": torch.tensor(1.0)})
    )
    assert torch.equal(unpacked["half"], pixels[:, :4])
    assert unpacked["half"].is_contiguous(memory_format=torch.channels_last)
    assert unpacked["whole"].is_contiguous()
    assert unpacked["number"].shape == ()


def test_what_has_no_form_is_named() -> None:
    with pytest.raises(InputError, match="a Generator cannot be saved"):
        pack({"rng": torch.Generator()})


@pytest.mark.parametrize(
    "data",
    [b"", b"not safetensors at all", pickle.dumps({"embeds": 1}), pack({"a": torch.ones(4)})[:-3]],
)
def test_anything_else_is_refused_without_running_it(data: bytes) -> None:
    with pytest.raises(InputError, match="is not a saved value"):
        unpack(data)

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
    found = unpack(pack(value))
    assert torch.equal(found["embeds"]["view"], tensor[:, 1:3].t())
    assert found["embeds"]["a"].dtype == torch.bfloat16
    assert torch.equal(found["embeds"]["a"], tensor)
    assert found["embeds"]["again"] is found["embeds"]["a"], "one tensor stays one"
    assert found["list"][:5] == value["list"][:5]  # type: ignore[index]
    assert isinstance(found["list"][5], tuple)
    assert found["dtype"] is torch.bfloat16
    assert found["number"] == 2.5
    assert np.array_equal(found["array"], value["array"])  # type: ignore[arg-type]
    assert found["picture"].tobytes() == value["picture"].tobytes()  # type: ignore[attr-defined]


def test_the_order_of_dimensions_in_memory_comes_back() -> None:
    """Kernels are chosen by it, and round differently."""
    pixels = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
    found = unpack(
        pack({"half": pixels[:, :4], "whole": torch.randn(3, 1, 2), "number": torch.tensor(1.0)})
    )
    assert torch.equal(found["half"], pixels[:, :4])
    assert found["half"].is_contiguous(memory_format=torch.channels_last)
    assert found["whole"].is_contiguous()
    assert found["number"].shape == ()


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

"""Device memory beyond what the dispatcher sees, rule by rule."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrun.profile.corrections import (
    CORRECTIONS,
    Convolution,
    attention_scratch,
    convolution_scratch,
    cpu_int8_scratch,
    hopper_convolution_scratch,
    int8_scratch,
)
from graphrun.profile.operands import convolution_of
from graphrun.sim.attention import FLASH_FEATURES, attention_is_token_major
from graphrun.units import GIB, MIB


def convolution(
    source: int,
    result: int,
    weight: int,
    size: int,
    inputs: int = 128,
    outputs: int = 128,
    **options: Any,
) -> Convolution:
    return Convolution(source, result, weight, size, inputs, outputs, **options)


def scratch(*sizes: int, **options: Any) -> int:
    return convolution_scratch(convolution(*sizes, **options))


def test_a_convolution_in_16_bit_copies_its_tensors_and_in_32_bit_not_its_output() -> None:
    assert scratch(100, 50, 7, 2) == 157
    assert scratch(100, 50, 7, 4) == 107


def test_a_convolution_with_few_input_channels_copies_nothing() -> None:
    assert [scratch(100, 50, 7, size, channels) for size in (2, 4) for channels in (3, 7)] == [
        0
    ] * 4
    assert scratch(100, 50, 7, 2, 8) == 157


def test_a_strided_convolution_copies_nothing_in_32_bit() -> None:
    assert scratch(100, 25, 7, 4, strided=True) == 0
    assert scratch(100, 25, 7, 2, strided=True) == 132


def test_in_32_bit_many_channels_take_two_copies_the_second_in_parts_of_a_gib() -> None:
    unit = 512 * MIB  # 512 channels at 512 x 512: what upsampling to half of 1024 takes
    for times, parts in ((1, 1), (2.25, 0.75), (4, 0.5), (16, 0)):
        nbytes = int(times * unit)
        copies = int(2 * parts * nbytes) or 2 * GIB
        assert scratch(nbytes, nbytes, 9 * MIB, 4, 512, 512) == 2 * nbytes + 10 * MIB + copies
    assert scratch(unit, unit // 2, 4 * MIB, 4, 512, 256) == unit + 4 * MIB
    assert scratch(unit, unit, MIB, 4, 512, 512, taps=1) == unit + MIB
    assert scratch(unit, unit, 9 * MIB, 2, 512, 512) == 2 * unit + 9 * MIB


def test_from_2_gib_in_16_bits_hopper_does_not_copy_the_output() -> None:
    sizes = ((2 * GIB - 1, GIB), (2 * GIB, GIB), (GIB, 2 * GIB))
    halves = [hopper_convolution_scratch(convolution(*pair, 7, 2)) for pair in sizes]
    assert halves == [3 * GIB + 6, 2 * GIB + 7, GIB + 7]
    assert hopper_convolution_scratch(convolution(2 * GIB, GIB, 7, 4)) == 3 * GIB + 7


KERNELS = Path(__file__).parents[2] / "benchmarks/results/card-kernels.json.gz"
KERNELS_OF_CUDNNS_CHOICE = {
    # (graph, shape of the input, channels out): cuDNN takes at most so many MiB more than the
    # rule, or less
    ("cogvideox-5b", (5, 512, 60, 90), 512): 6.8,
    ("cogvideox-5b", (5, 512, 60, 36), 512): 10.5,
    ("cogvideox-5b", (8, 256, 40, 72), 256): 1.2,
    ("ltx2", (1, 512, 251, 32), 256): 12.2,
    ("sdxl", (1, 4, 128, 128), 512): -32.0,
    ("sana", (1, 3072, 64, 64), 3072): -20.0,
    ("sana", (1, 1536, 128, 128), 1536): -32.0,
}


def measured_kernels(kind: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The operands and the measurement of each different kernel of ``kind`` on an H100."""
    entries: dict[str, Any] = {}
    for entry in json.loads(gzip.decompress(KERNELS.read_bytes())):
        if entry["kernel"][1] == kind:
            entries.setdefault(json.dumps(entry["kernel"][2:-1]), entry)
    for entry in entries.values():
        yield entry["kernel"], entry


def empty(dtype: str, shape: list[int], stride: list[int]) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="meta")


def test_scratch_of_convolutions_is_what_an_h100_took() -> None:
    """Of 570, within what cuDNN chooses by shape, and the MiB by which the allocator rounds up."""
    count = 0
    for (graph, _, dtype, shape, stride, taps, result, step, _), entry in measured_kernels("conv"):
        source = empty(dtype, shape, stride)
        weight, output = (source.new_empty(sizes) for sizes in (taps, result))
        args = (source, weight, None, step, None, None, False, None, shape[1] // taps[1])
        rule = hopper_convolution_scratch(convolution_of(args, output))
        difference = (entry["scratch_bytes"] - rule) / MIB
        limit = KERNELS_OF_CUDNNS_CHOICE.get((graph, tuple(shape), result[1]), 0)
        if limit > 0:
            assert 1 < difference < limit, entry
        else:
            assert min(limit, -17) <= difference < 1.01, entry
        count += 1
    assert count == 570


def test_masks_wide_heads_and_layouts_of_attention_are_what_an_h100_had() -> None:
    for (_, _, query, key, value, mask, *_), entry in measured_kernels("attention"):
        tensors = [empty(*operand) for operand in (query, key, value)]
        mask_tensor = None if mask is None else empty(*mask)
        width, rows = value[1][-1], math.prod(query[1][:-1])
        wide = width > FLASH_FEATURES
        rule = attention_scratch(rows, 1, width, tensors[0].itemsize, fused=True, wide=wide)
        rule -= 4 * rows  # no logsumexp
        if mask is not None and mask[0] == "bool":
            rule += math.prod(mask[1]) * tensors[0].itemsize
        assert entry["scratch_bytes"] == pytest.approx(rule, abs=1.01 * MIB), entry
        if query[1][-3] > 1:  # of one head both orders are the same
            is_token_major = entry["strides"][-3] < entry["strides"][-2]
            assert attention_is_token_major(tensors[0], mask_tensor) == is_token_major, entry


def test_fused_attention_has_no_square_tensor_and_the_math_backend_has_two() -> None:
    assert attention_scratch(24 * 4608, 4608, 128, 2, fused=True) == 4 * 24 * 4608
    assert attention_scratch(24 * 4608, 4608, 128, 2, fused=False) == 2 * (
        2 * 24 * 4608 * 4608 + 2 * 24 * 4608 * 128
    )


def test_scratch_of_quantized_layers() -> None:
    assert int8_scratch(4608, 3072, 9216, half=True) == (
        4608 * (3072 * 4 + 4),
        4608 * (3072 + 4) + 4 * 4608 * 9216,
    )
    assert int8_scratch(4608, 3072, 9216) == (
        4608 * (3072 * 6 + 4),
        4608 * (3072 + 4) + 6 * 4608 * 9216,
    )


def test_scratch_of_int8_layers_on_a_cpu() -> None:
    """The result, of 2 bytes per element, is one of the tensors next to each other."""
    assert cpu_int8_scratch(768, 3072, 12288, 2) == (
        768 * 3072 * 11,
        768 * (3072 + 4) + 14 * 768 * 12288,
    )
    assert cpu_int8_scratch(768, 3072, 12288, 2, half=True)[0] == 768 * 3072 * 9


def test_every_rule_has_a_name_of_its_own_and_a_source() -> None:
    assert len({rule.name for rule in CORRECTIONS}) == len(CORRECTIONS)
    assert all(rule.adds and rule.source for rule in CORRECTIONS)

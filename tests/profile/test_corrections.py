"""Device memory beyond what the dispatcher sees, rule by rule."""

from __future__ import annotations

from typing import Any

from graphrun.profile.corrections import (
    CORRECTIONS,
    Convolution,
    attention_scratch,
    convolution_scratch,
    cpu_int8_scratch,
    int8_scratch,
)
from graphrun.units import GIB, MIB


def scratch(
    source: int,
    result: int,
    weight: int,
    size: int,
    inputs: int = 128,
    outputs: int = 128,
    **options: Any,
) -> tuple[int, int]:
    return convolution_scratch(
        Convolution(source, result, weight, size, inputs, outputs, **options)
    )


def test_a_convolution_in_16_bit_copies_its_tensors_and_in_32_bit_not_its_output() -> None:
    assert scratch(100, 50, 7, 2) == (157, 0)
    assert scratch(100, 50, 7, 4) == (107, 0)


def test_a_convolution_with_few_input_channels_copies_nothing() -> None:
    assert [scratch(100, 50, 7, size, channels) for size in (2, 4) for channels in (3, 7)] == [
        (0, 0)
    ] * 4
    assert scratch(100, 50, 7, 2, 8) == (157, 0)


def test_a_strided_convolution_copies_nothing_in_32_bit() -> None:
    assert scratch(100, 25, 7, 4, strided=True) == (0, 0)
    assert scratch(100, 25, 7, 2, strided=True) == (132, 0)


def test_in_32_bit_many_channels_take_two_copies_the_second_in_parts_of_a_gib() -> None:
    unit = 512 * MIB  # 512 channels at 512 x 512: what upsampling to half of 1024 takes
    for times, parts in ((1, 1), (2.25, 0.75), (4, 0.5), (16, 0)):
        nbytes = int(times * unit)
        copies = int(2 * parts * nbytes) or 2 * GIB
        assert scratch(nbytes, nbytes, 9 * MIB, 4, 512, 512) == (2 * nbytes + 10 * MIB + copies, 0)
    assert scratch(unit, unit // 2, 4 * MIB, 4, 512, 256) == (unit + 4 * MIB, 0)
    assert scratch(unit, unit, MIB, 4, 512, 512, taps=1) == (unit + MIB, 0)
    assert scratch(unit, unit, 9 * MIB, 2, 512, 512) == (2 * unit + 9 * MIB, 0)


def test_from_2_gib_on_some_cards_do_not_copy_the_output() -> None:
    assert scratch(2 * GIB - 1, GIB, 7, 2) == (3 * GIB + 6, 0)
    assert scratch(2 * GIB, GIB, 7, 2) == (3 * GIB + 7, GIB)
    assert scratch(GIB, 2 * GIB, 7, 2) == (3 * GIB + 7, 2 * GIB)


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

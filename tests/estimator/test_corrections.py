"""What a card takes beyond what the dispatcher sees, rule by rule."""

from __future__ import annotations

from graphrun.estimator.corrections import CORRECTIONS, attention_scratch, convolution_scratch, int8_scratch, nf4_scratch
from graphrun.units import GIB


def test_a_convolution_in_16_bit_copies_its_tensors_and_in_32_bit_not_its_output() -> None:
    assert convolution_scratch(100, 50, 7, 2) == (157, 0)
    assert convolution_scratch(100, 50, 7, 4) == (107, 0)


def test_from_2_gib_on_the_copy_of_the_output_is_one_that_some_cards_spare() -> None:
    assert convolution_scratch(2 * GIB - 1, GIB, 7, 2) == (3 * GIB + 6, 0)
    assert convolution_scratch(2 * GIB, GIB, 7, 2) == (3 * GIB + 7, GIB)
    assert convolution_scratch(GIB, 2 * GIB, 7, 2) == (3 * GIB + 7, 2 * GIB)


def test_fused_attention_has_no_square_and_the_math_backend_has_two() -> None:
    assert attention_scratch(24 * 4608, 4608, 128, 2, fused=True) == 4 * 24 * 4608
    assert attention_scratch(24 * 4608, 4608, 128, 2, fused=False) == 2 * (2 * 24 * 4608 * 4608 + 2 * 24 * 4608 * 128)


def test_quantized_layers_need_room_for_their_product() -> None:
    assert nf4_scratch(3072 * 12288, 2) == 72 * 2**20
    assert int8_scratch(4608, 3072, 3072) == 4608 * (3072 + 4) + 4 * 4608 * 3072


def test_every_rule_has_a_name_of_its_own_and_a_source() -> None:
    assert len({rule.name for rule in CORRECTIONS}) == len(CORRECTIONS)
    assert all(rule.adds and rule.source for rule in CORRECTIONS)

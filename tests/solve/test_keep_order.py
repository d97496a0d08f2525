"""`keep_order`: a permutation whose prefixes are spread evenly over the call order."""

from __future__ import annotations

import pytest

from graphrun.model.blocks import keep_order


@pytest.mark.parametrize("count", range(70))
def test_every_block_is_in_the_order_once(count: int) -> None:
    assert sorted(keep_order(count)) == list(range(count))


def test_bit_reversal_for_powers_of_two() -> None:
    assert keep_order(8) == (0, 4, 2, 6, 1, 5, 3, 7)


@pytest.mark.parametrize("count", [19, 24, 38, 57])
def test_prefixes_are_spread_evenly(count: int) -> None:
    order = keep_order(count)
    for keep_count in range(2, count):
        positions = sorted(order[:keep_count])
        distances = [
            next_position - position
            for position, next_position in zip(
                positions, [*positions[1:], positions[0] + count], strict=True
            )
        ]
        assert max(distances) <= 2 * count / keep_count + 1

"""Which blocks of a class are kept when only some of them are: a prefix of one fixed, spread-out order. Knows no bytes."""

from __future__ import annotations


def keep_order(count: int) -> tuple[int, ...]:
    """The blocks ``0 .. count - 1`` in the order in which they are worth keeping: the first K are kept, so sets nest as K changes.

    Bit reversal (the van der Corput sequence), stretched to ``count``: every prefix lies evenly in call order, so that copies of
    the blocks between have a kept block's compute to hide behind. Measured: at most 1.5 % slower than the best set for each K,
    where keeping the first K costs 6 to 17 %.

        keep_order(8)     0 4 2 6 1 5 3 7
        K = 3 of 8        # . # . # . . .      # kept   . streamed
    """
    bits = max(count - 1, 0).bit_length()
    order: dict[int, None] = {}
    for step in range(1 << bits):
        reverse = int(format(step, f"0{bits}b")[::-1], 2) if bits else 0
        order.setdefault((reverse * count) >> bits)
    return tuple(order)[:count]

"""The byte ring: blocks lie whole, and none is overwritten before it is released."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphrun.planner.ring import Ring


def test_two_largest_alternate() -> None:
    ring = Ring(200)
    assert [ring.place(100) for _ in range(4)] == [(0, ()), (100, ()), (0, (0,)), (100, (1,))]


def test_a_single_byte_is_not_shared() -> None:
    ring = Ring(2)
    assert [ring.place(1) for _ in range(3)] == [(0, ()), (1, ()), (0, (0,))]


def test_smaller_blocks_share_the_room_and_wrap_whole() -> None:
    #  0      40     80     120    160  200
    #  | 0    | 1    | 2    | 3    |free|      then 100 bytes from 0 on, over 0, 1 and 2
    ring = Ring(200)
    assert [ring.place(40).offset for _ in range(4)] == [0, 40, 80, 120]
    assert ring.place(100) == (0, (0, 1, 2))
    assert ring.place(100) == (100, (3,))


def test_a_block_larger_than_the_ring_is_refused() -> None:
    with pytest.raises(ValueError, match="a block of 201 bytes does not fit a ring of 200 bytes"):
        Ring(200).place(201)


@given(st.lists(st.integers(0, 64), min_size=1, max_size=80), st.integers(0, 40))
def test_what_is_not_released_is_not_overwritten(sizes: list[int], spare: int) -> None:
    ring, capacity = Ring(2 * max(sizes) + spare), 2 * max(sizes) + spare
    live: dict[int, tuple[int, int]] = {}
    seen: list[int] = []
    for number, nbytes in enumerate(sizes):
        offset, released = ring.place(nbytes)
        assert 0 <= offset <= offset + nbytes <= capacity
        for old in released:
            del live[old]
        seen += released
        assert all(end <= offset or offset + nbytes <= start for start, end in live.values())
        live[number] = (offset, offset + nbytes)
    assert seen == list(range(len(seen))), "first in, first out, each once"

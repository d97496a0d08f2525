"""The ring buffer: blocks are contiguous, and none is overwritten before it is released."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphrun.model.ring_buffer import RingBuffer, release_distances


def test_two_blocks_of_half_the_ring_buffer_alternate() -> None:
    ring_buffer = RingBuffer(200)
    assert [ring_buffer.place(100) for _ in range(4)] == [
        (0, ()),
        (100, ()),
        (0, (0,)),
        (100, (1,)),
    ]


def test_consecutive_one_byte_blocks_do_not_overlap() -> None:
    ring_buffer = RingBuffer(2)
    assert [ring_buffer.place(1) for _ in range(3)] == [(0, ()), (1, ()), (0, (0,))]


def test_several_smaller_blocks_fit_and_none_wraps_around_the_end() -> None:
    #  0      40     80     120    160  200
    #  | 0    | 1    | 2    | 3    |free|      then 100 bytes at offset 0, over blocks 0, 1 and 2
    ring_buffer = RingBuffer(200)
    assert [ring_buffer.place(40).offset for _ in range(4)] == [0, 40, 80, 120]
    assert ring_buffer.place(100) == (0, (0, 1, 2))
    assert ring_buffer.place(100) == (100, (3,))


def test_consecutive_blocks_never_overlap_in_a_ring_buffer_with_room_for_both() -> None:
    # | 0     |free|     1 |       then 110 bytes at offset 0: over block 0 and the free bytes, not
    # over block 1
    ring_buffer = RingBuffer(220)
    assert ring_buffer.place(90, 90) == (0, ())
    assert ring_buffer.place(90, 110) == (130, ())
    assert ring_buffer.place(110, 110) == (0, (0,))
    assert ring_buffer.place(110, 0) == (110, (1,))
    blind = RingBuffer(220)
    assert [blind.place(nbytes) for nbytes in (90, 90, 110)] == [(0, ()), (90, ()), (0, (0, 1))]


@given(st.lists(st.integers(1, 64), min_size=2, max_size=80))
def test_a_ring_buffer_with_room_for_any_two_consecutive_blocks_lets_them_coexist(
    sizes: list[int],
) -> None:
    ring_buffer = RingBuffer(max(a + b for a, b in pairwise(sizes)))
    for number, nbytes in enumerate(sizes):
        _, numbers = ring_buffer.place(nbytes, sizes[number + 1] if number + 1 < len(sizes) else 0)
        assert number - 1 not in numbers


def test_a_block_larger_than_the_ring_buffer_is_refused() -> None:
    with pytest.raises(
        ValueError, match="a block of 201 bytes does not fit a ring buffer of 200 bytes"
    ):
        RingBuffer(200).place(201)


@given(st.lists(st.integers(0, 64), min_size=1, max_size=80), st.integers(0, 40))
def test_a_block_is_not_overwritten_before_its_release(sizes: list[int], spare: int) -> None:
    ring_buffer, capacity = RingBuffer(2 * max(sizes) + spare), 2 * max(sizes) + spare
    live: dict[int, tuple[int, int]] = {}
    all_numbers: list[int] = []
    for number, nbytes in enumerate(sizes):
        next_is_known = number + 1 < len(sizes) and number % 3
        offset, numbers = ring_buffer.place(nbytes, sizes[number + 1] if next_is_known else 0)
        assert 0 <= offset <= offset + nbytes <= capacity
        for old in numbers:
            del live[old]
        all_numbers += numbers
        assert all(end <= offset or offset + nbytes <= start for start, end in live.values())
        live[number] = (offset, offset + nbytes)
    assert all_numbers == list(range(len(all_numbers))), "first in, first out, each once"


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(0, 60), st.integers(1, 40))
def test_distances_of_repeated_blocks_are_those_of_placing_each(
    sizes: list[int], spare: int, repeats: int
) -> None:
    capacity, blocks = max(sizes) + spare, sizes * repeats
    ring_buffer, distances = RingBuffer(capacity), list[int]()
    for number, sizes_of_two in enumerate(pairwise([*blocks, 0])):
        numbers = ring_buffer.place(*sizes_of_two).released_numbers
        distances.append(number - numbers[-1] if numbers else 0)
    assert release_distances(capacity, tuple(sizes), repeats) == tuple(distances)


def test_the_oldest_distance_is_that_of_the_last_block_not_yet_overwritten() -> None:
    ring_buffer = RingBuffer(200)
    assert ring_buffer.oldest_distance == 0
    distances = []
    for nbytes in (100, 60, 40, 200):
        ring_buffer.place(nbytes)
        distances.append(ring_buffer.oldest_distance)
    assert distances == [1, 2, 3, 1]
    ring_buffer.renumber(7)
    assert ring_buffer.oldest_distance == 1

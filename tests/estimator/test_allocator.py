"""The replay through an allocator: what is counted, what is reserved, and that no two live ranges ever overlap."""

from __future__ import annotations

import random

import pytest

from graphrun.estimator.allocator import LARGE_PAGE_BYTES, ROUND_BYTES, SMALL_PAGE_BYTES, Caching, Counting, Pool
from graphrun.units import MIB


def test_counting_rounds_every_allocation_to_512() -> None:
    allocator = Counting()
    allocator.allocate(1, 1)
    allocator.allocate(2, 513)
    assert allocator.used_bytes == 512 + 1024
    allocator.release(1)
    assert allocator.used_bytes == 1024


def test_small_and_large_blocks_come_from_pools_of_their_own() -> None:
    allocator = Caching()
    allocator.allocate(1, MIB)
    assert allocator.used_bytes == SMALL_PAGE_BYTES
    allocator.allocate(2, MIB + 1)
    assert allocator.used_bytes == SMALL_PAGE_BYTES + LARGE_PAGE_BYTES


def test_released_bytes_stay_reserved_until_trimmed_and_are_used_again() -> None:
    allocator = Caching()
    allocator.allocate(1, 40 * MIB)
    allocator.release(1)
    assert allocator.used_bytes == 40 * MIB
    allocator.allocate(2, 30 * MIB)
    assert allocator.used_bytes == 40 * MIB
    allocator.release(2)
    allocator.trim()
    assert allocator.used_bytes == 0


def test_the_smallest_hole_that_is_large_enough_is_taken() -> None:
    pool = Pool(2 * MIB)
    places = [pool.take(size * MIB)[0] for size in (4, 1, 2, 1, 8)]
    pool.give(places[0], 4 * MIB)
    pool.give(places[2], 2 * MIB)
    assert pool.take(2 * MIB)[0] == places[2]


def test_an_expandable_range_grows_at_its_end_from_a_free_tail() -> None:
    pool = Pool(2 * MIB)
    first, _ = pool.take(2 * MIB)
    tail, _ = pool.take(2 * MIB)
    pool.give(tail, 2 * MIB)
    offset, mapped = pool.take(6 * MIB)
    assert (offset, mapped) == (tail, 4 * MIB)
    assert first == 0


@pytest.mark.parametrize("seed", range(20))
def test_live_ranges_never_overlap_and_reserved_covers_what_is_live(seed: int) -> None:
    rng = random.Random(seed)
    allocator = Caching()
    live: dict[int, int] = {}
    for key in range(400):
        if live and rng.random() < 0.45:
            gone = rng.choice(list(live))
            allocator.release(gone)
            del live[gone]
        else:
            live[key] = rng.choice([100, 5000, MIB, 3 * MIB, 17 * MIB])
            allocator.allocate(key, live[key])
        if rng.random() < 0.05:
            allocator.trim()
        for pool in (allocator._small, allocator._large):
            ranges = sorted((offset, offset + size) for p, offset, size in allocator._live.values() if p is pool)
            assert all(end <= begin for (_, end), (begin, _) in zip(ranges, ranges[1:], strict=False))
            pages = {page for begin, end in ranges for page in range(begin // pool.page_bytes, (end - 1) // pool.page_bytes + 1)}
            assert all(pool.mapped[page] for page in pages)
        assert allocator.used_bytes == allocator._small.mapped_bytes + allocator._large.mapped_bytes
        assert allocator.used_bytes >= sum(-(-size // ROUND_BYTES) * ROUND_BYTES for size in live.values())

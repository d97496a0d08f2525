"""The allocator models: allocated and reserved bytes, and that no two live ranges overlap."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from graphrun.model.allocator import LARGE_PAGE_BYTES, ROUND_BYTES, SMALL_PAGE_BYTES, Caching, Counting, Native, Pool
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
    pool.give(*places[0])
    pool.give(*places[2])
    assert pool.take(2 * MIB)[0] == places[2]


def test_an_expandable_range_grows_at_its_end_from_a_free_tail() -> None:
    pool = Pool(2 * MIB)
    first, _ = pool.take(2 * MIB)
    tail, _ = pool.take(2 * MIB)
    pool.give(*tail)
    assert pool.take(6 * MIB) == ((tail[0], 6 * MIB), 4 * MIB)
    assert first == (0, 2 * MIB)


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
        if live:
            again = rng.choice(list(live))
            before, place = [allocator.state(small) for small in (True, False)], allocator.place(again)
            allocator.release(again)
            allocator.allocate_at(again, allocator.is_small(live[again]), place)
            assert [allocator.state(small) for small in (True, False)] == before
            assert allocator.place(again) == place
        for pool in (allocator._small, allocator._large):
            ranges = sorted((offset, offset + size) for p, (offset, size) in allocator._live.values() if p is pool)
            assert all(end <= begin for (_, end), (begin, _) in zip(ranges, ranges[1:], strict=False))
            pages = {page for begin, end in ranges for page in range(begin // pool.page_bytes, (end - 1) // pool.page_bytes + 1)}
            assert all(pool.mapped[page] for page in pages)
        assert allocator.used_bytes == allocator._small.mapped_bytes + allocator._large.mapped_bytes
        assert allocator.used_bytes >= sum(-(-size // ROUND_BYTES) * ROUND_BYTES for size in live.values())


def test_a_free_tail_is_taken_last_because_it_can_grow() -> None:
    pool = Pool(2 * MIB)
    hole, kept, tail = (pool.take(size * MIB)[0] for size in (4, 1, 2))
    pool.give(*hole)
    pool.give(*tail)
    assert pool.take(2 * MIB)[0] == (hole[0], 2 * MIB)
    assert kept[0] == 4 * MIB


@pytest.mark.parametrize(
    ("nbytes", "reserved"),
    [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB), (11 * MIB + 1, 12 * MIB)],
)
def test_size_of_a_native_segment(nbytes: int, reserved: int) -> None:
    allocator = Native()
    allocator.allocate(1, nbytes)
    assert allocator.used_bytes == reserved


def test_native_segments_do_not_grow_so_larger_requests_take_new_ones() -> None:
    allocator = Native()
    for key, size in enumerate((32, 34, 36)):
        allocator.allocate(key, size * MIB)
        allocator.release(key)
    assert allocator.used_bytes == (32 + 34 + 36) * MIB
    expandable = Caching()
    for key, size in enumerate((32, 34, 36)):
        expandable.allocate(key, size * MIB)
        expandable.release(key)
    assert expandable.used_bytes == 40 * MIB


def test_a_large_native_block_keeps_a_remainder_of_a_mebibyte() -> None:
    allocator = Native()
    allocator.allocate(1, 12 * MIB)
    allocator.release(1)
    allocator.allocate(2, 11 * MIB)
    allocator.allocate(3, MIB + 512)
    assert allocator.used_bytes == (12 + 20) * MIB
    allocator.release(2)
    allocator.allocate(4, 11 * MIB - 512)
    allocator.release(3)
    allocator.trim()
    assert allocator.used_bytes == 12 * MIB


@pytest.mark.parametrize("seed", range(20))
def test_native_blocks_never_overlap_tile_their_segments_and_are_merged(seed: int) -> None:
    rng = random.Random(seed)
    allocator = Native()
    live: dict[int, int] = {}
    for key in range(400):
        if live and rng.random() < 0.45:
            gone = rng.choice(list(live))
            allocator.release(gone)
            del live[gone]
        else:
            live[key] = rng.choice([100, 5000, MIB, 3 * MIB, 9 * MIB, 17 * MIB])
            allocator.allocate(key, live[key])
        if rng.random() < 0.05:
            allocator.trim()
        for pool in (allocator._small, allocator._large):
            for segment, nbytes in pool.sizes.items():
                used = [(o, o + size, True) for p, (s, o, size) in allocator._live.values() if p is pool and s == segment]
                free = [(o, o + size, False) for o, size in pool.free[segment].items()]
                blocks = sorted(used + free)
                assert [begin for begin, _, _ in blocks] == [0, *(end for _, end, _ in blocks[:-1])]
                assert blocks[-1][1] == nbytes
                assert not any(not a[2] and not b[2] for a, b in zip(blocks, blocks[1:], strict=False))
            assert sorted(pool.blocks) == pool.blocks
        assert allocator.used_bytes == sum(allocator._small.sizes.values()) + sum(allocator._large.sizes.values())
        assert allocator.used_bytes >= sum(-(-size // ROUND_BYTES) * ROUND_BYTES for size in live.values())


def replayed(trace: list[dict[str, Any]], allocator: Caching | Native) -> tuple[int, int]:
    """(peak that the model reserves, peak that the device reserved) over one device's entries of a memory snapshot."""
    reserved = ours = theirs = 0
    live = set()
    for entry in trace:
        if entry["action"] in ("segment_alloc", "segment_map"):
            reserved += entry["size"]
        elif entry["action"] in ("segment_free", "segment_unmap"):
            reserved -= entry["size"]
        elif entry["action"] == "alloc":
            live.add(entry["addr"])
            allocator.allocate(entry["addr"], entry["size"])
        elif entry["action"] == "free_completed" and entry["addr"] in live:
            live.remove(entry["addr"])
            allocator.release(entry["addr"])
        ours, theirs = max(ours, allocator.used_bytes), max(theirs, reserved)
    return ours, theirs


SNAPSHOT = Path(os.environ.get("GRAPHRUN_MEMORY_SNAPSHOT", "snapshot.pickle"))


@pytest.mark.skipif(not SNAPSHOT.is_file(), reason="no snapshot: torch.cuda.memory._record_memory_history, then _dump_snapshot")
def test_the_model_reserves_what_a_recorded_card_reserved() -> None:
    snapshot = pickle.loads(SNAPSHOT.read_bytes())
    expandable = any(segment.get("is_expandable") for segment in snapshot["segments"])
    for trace in filter(None, snapshot["device_traces"]):
        ours, theirs = replayed(trace, Caching() if expandable else Native())
        assert ours == pytest.approx(theirs, rel=0.08)


def test_the_replay_of_a_snapshot_follows_its_entries() -> None:
    trace = [
        {"action": "segment_alloc", "addr": 0, "size": 20 * MIB},
        {"action": "alloc", "addr": 0, "size": 3 * MIB},
        {"action": "free_requested", "addr": 0, "size": 3 * MIB},
        {"action": "free_completed", "addr": 0, "size": 3 * MIB},
        {"action": "alloc", "addr": 0, "size": 9 * MIB},
    ]
    assert replayed(trace, Native()) == (20 * MIB, 20 * MIB)

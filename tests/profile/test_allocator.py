"""The allocator models: reserved bytes and places, compared with a second model."""

from __future__ import annotations

import importlib
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from linked_blocks import LinkedBlocks

import graphrun
from graphrun.model.allocator import (
    LARGE_PAGE_BYTES,
    ROUND_BYTES,
    SMALL_PAGE_BYTES,
    Caching,
    Counting,
    Heap,
    Native,
    Pool,
)
from graphrun.model.plan import parse
from graphrun.solve.granularity import split_into_layers
from graphrun.units import MIB
from graphrun.verify.solution import solution_of

GRAPHS = Path(__file__).parents[2] / "graphs"


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
    pool = Pool(2 * MIB, MIB << 20)
    places = [pool.take(size * MIB)[0] for size in (4, 1, 2, 1, 8)]
    pool.give(*places[0])
    pool.give(*places[2])
    assert pool.take(2 * MIB)[0] == places[2]


def test_an_expandable_range_grows_at_its_end_from_a_free_tail() -> None:
    pool = Pool(2 * MIB, MIB << 20)
    first, _ = pool.take(2 * MIB)
    tail, _ = pool.take(2 * MIB)
    pool.give(*tail)
    assert pool.take(6 * MIB) == ((tail[0], 6 * MIB), 4 * MIB)
    assert first == (0, 2 * MIB)


def test_a_free_tail_is_taken_last_because_it_can_grow() -> None:
    pool = Pool(2 * MIB, MIB << 20)
    hole, middle, tail = (pool.take(size * MIB)[0] for size in (4, 1, 2))
    pool.give(*hole)
    pool.give(*tail)
    assert pool.take(2 * MIB)[0] == (hole[0], 2 * MIB)
    assert middle[0] == 4 * MIB


@pytest.mark.parametrize(
    ("nbytes", "reserved_bytes"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB),
    ],
)
def test_size_of_a_native_segment(nbytes: int, reserved_bytes: int) -> None:
    allocator = Native()
    allocator.allocate(1, nbytes)
    assert allocator.used_bytes == reserved_bytes


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


def test_a_small_native_block_is_split_where_512_bytes_remain() -> None:
    allocator = Native()
    allocator.allocate(1, 2 * ROUND_BYTES)
    allocator.allocate(2, ROUND_BYTES)
    allocator.release(1)
    allocator.allocate(3, ROUND_BYTES)
    allocator.allocate(4, ROUND_BYTES)
    segment, offset, _ = allocator.place(3)
    assert allocator.place(4) == (segment, offset + ROUND_BYTES, ROUND_BYTES)


def test_a_large_native_block_keeps_a_unblocked_of_a_mebibyte() -> None:
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


SEQUENCES = 2_000
KINDS = {  # size of pages over PyTorch's, memory of the card
    "pages": (1.0, 1 << 50),
    "KiB": (2**-10, 1 << 50),
    "odd": (3.27e-4, 1 << 50),
    "little address space": (1.0, 200 * MIB),
    "native": (1.0, 0),
}


def sizes_near_boundaries(rng: random.Random, scale: float) -> list[int]:
    """Sizes that one sequence draws from: multiples of pages and of the limits between size
    classes, give or take some bytes, and two sizes between."""
    boundaries = [scale * mib * MIB for mib in (1, 2, 10, 20, 40, 100, 0.25, 3, 7.5)]
    offsets = (0, 0, 1, -1, ROUND_BYTES, -ROUND_BYTES)
    sizes_at_boundaries = [int(size) + rng.choice(offsets) for size in rng.choices(boundaries, k=5)]
    random_sizes = (int(scale * rng.randrange(64 * MIB)), rng.choice((1, ROUND_BYTES, 5_000)))
    return [max(1, size) for size in (*sizes_at_boundaries, *random_sizes)]


def check_sequence(kind: str, seed: int) -> None:
    """Allocates, releases and trims at random. After every step the model has the bytes and the
    places of the linked blocks, and a range that is released and allocated again leaves no
    trace."""
    rng = random.Random(seed)
    native, (scale, card_bytes) = kind == "native", KINDS[kind]
    model = Native() if native else Caching(scale, card_bytes)
    blocks = LinkedBlocks(not native, scale, card_bytes=card_bytes)
    sizes, trims = sizes_near_boundaries(rng, scale), rng.choice((0.0, 0.05, 0.2))
    live = dict[int, int]()
    for key in range(rng.choice((20, 60, 200))):
        if rng.random() < trims:
            model.trim()
            blocks.trim()
        elif live and rng.random() < 0.2 + 0.01 * len(live):
            victim = rng.choice(list(live))
            del live[victim]
            model.release(victim)
            blocks.release(victim)
        else:
            live[key] = rng.choice(sizes)
            expected_bytes = used_bytes_with(model, live[key])
            model.allocate(key, live[key])
            blocks.allocate(key, live[key])
            assert expected_bytes in (None, model.used_bytes), (seed, key)
            assert place_of(model, key) == blocks.place(key)[not native :], (seed, key)
        assert model.used_bytes == blocks.used_bytes, (seed, key)
        if live and isinstance(model, Caching) and rng.random() < 0.1:
            moved_key = rng.choice(list(live))
            states, place = [model.state(small) for small in (True, False)], model.place(moved_key)
            model.release(moved_key)
            model.allocate_at(moved_key, model.is_small(live[moved_key]), place)
            assert [model.state(small) for small in (True, False)] == states, (seed, key)


def used_bytes_with(model: Caching | Native, nbytes: int) -> int | None:
    """What the model answers without changing its state; None: it is not asked."""
    if isinstance(model, Native):
        return None
    states = [model.state(small) for small in (True, False)]
    used_bytes = model.used_bytes_with([nbytes])
    assert [model.state(small) for small in (True, False)] == states
    return used_bytes


def place_of(model: Caching | Native, key: int) -> tuple[int, ...]:
    """As `LinkedBlocks.place`; without the segment, if these are expandable."""
    if isinstance(model, Native):
        return model.place(key)
    (begin, nbytes), pool = model.place(key), model._pools[not model.is_small(model.place(key)[1])]
    return begin % (2 * pool.space_bytes), nbytes


@pytest.mark.sweep("more", sample=1)
@pytest.mark.parametrize("kind", KINDS)
def test_random_sequences_with_trims_equal_the_linked_blocks_to_the_byte(kind: str) -> None:
    for seed in range(SEQUENCES // len(KINDS)):
        check_sequence(kind, seed)


def test_after_a_trim_the_mapped_pages_are_searched_first() -> None:
    """The 40 MiB go where the 100 were, which is mapped. Then only the end has room for the 100."""
    allocator, blocks = Caching(), LinkedBlocks(expandable=True)
    for model in (allocator, blocks):
        for key, size in enumerate((40, 20, 100, 20)):
            model.allocate(key, size * MIB)
        model.release(0)
        model.trim()
        model.release(2)
        model.allocate(4, 40 * MIB)
        model.allocate(5, 100 * MIB)
    assert allocator.used_bytes == blocks.used_bytes == 240 * MIB


RECORDS = Path(__file__).parents[2] / "benchmarks/results"


@pytest.mark.parametrize(
    ("name", "peak_bytes"),
    [
        ("card-flux-events.json.gz", 7_686_062_080),
        ("card-flux-events-minimum.json.gz", 3_003_121_664),
    ],
)
def test_the_model_reserves_what_a_card_reserved_at_every_allocation(
    name: str, peak_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events that an H100 recorded in runs of FLUX.1-dev, at 8 GiB and at minimum VRAM
    (`benchmarks/card.py`)."""
    monkeypatch.syspath_prepend(str(RECORDS.parent))
    card_memory = importlib.import_module("card_memory")
    events = card_memory.Events.read(RECORDS / name)
    kinds = ["", *(kind for kind, *_ in events.events)]
    trims = sum(kind == "unmap" != previous for previous, kind in pairwise(kinds))
    assert (len(events.events) > 29_000, trims > 3) == (True, True)
    figures = card_memory.compared(events)
    assert figures["model_over_at_most_bytes"] == figures["model_under_at_most_bytes"] == 0
    assert (figures["peak_reserved_bytes"], figures["model_peak_reserved_bytes"]) == (
        peak_bytes,
        peak_bytes,
    )


@pytest.mark.sweep("more")
@pytest.mark.parametrize(
    ("name", "in_layers"), [("8G", {"transformer"}), ("24G", set()), ("smallest", {"vae"})]
)
def test_plans_reserve_what_a_card_reserved_in_every_slot(name: str, in_layers: set[str]) -> None:
    """Plans of FLUX.1-dev that an H100 ran (`benchmarks/card.py`); the second run of each. In the
    first, a load slot had one or two pages of 2 MiB more."""
    flux = json.loads((RECORDS / "card-flux.json").read_text())["flux"]["results"]
    record = flux[f"flux-dev within {name}"]
    problem = graphrun.estimate(
        graphrun.load(GRAPHS / "flux-dev.yaml").without_sources(),
        vram=record["budget_bytes"],
        ram="64G",
        hardware="h100",
        inputs={"prompt": "a lighthouse at dusk, oil on canvas", "steps": 4, "seed": 3},
    )
    problem = split_into_layers(problem, in_layers)
    text = "\n".join([f"plan {problem.digest}", *record["plan"][1:]])
    slots = solution_of(problem, parse(text)).simulation.slots
    recorded = [slot["peak_bytes"] for slot in record["runs"][1]["slots"]]
    assert [slot.peak_bytes for slot in slots] == recorded


@pytest.mark.sweep("more")
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("sana", "budget"),
        ("z-image", "resident"),
        ("sd35-large", "resident"),
        ("auraflow", "resident"),
    ],
)
def test_plans_of_other_models_reserve_what_a_card_reserved_in_every_slot(
    name: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `benchmarks/card.py models` recorded; all of them are in docs/card-measured.md."""
    monkeypatch.syspath_prepend(str(RECORDS.parent))
    card_models = importlib.import_module("card_models")
    models = json.loads((RECORDS / "card-models.json").read_text())["models"]["results"]
    parts = models[name]
    budget = parts["prepare"]["budget_bytes"] if key == "budget" else card_models.RESIDENT_BYTES
    simulation = card_models.replayed(name, budget, parts[key])
    recorded = [slot["peak_bytes"] for slot in parts[key]["runs"][-1]["slots"]]
    assert [slot.peak_bytes for slot in simulation.slots] == recorded


@pytest.mark.parametrize(("count", "kept_count"), [(12, 12), (30, 7)])
def test_a_heap_returns_its_top_once_it_is_large(count: int, kept_count: int) -> None:
    """Kept bits part the first ranges that are freed; those after them merge with the top."""
    heap = Heap(most_kept=7)
    for key in range(count):
        heap.allocate(key, 8 * MIB)
    for key in range(count):
        heap.release(key)
    assert heap.used_bytes == pytest.approx(kept_count * 8 * MIB, rel=0.01)

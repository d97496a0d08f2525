"""Compute that copies and reads can overlap, and splitting into layers where host memory binds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphrun.model.choices import overlap_seconds, read_from_disk
from graphrun.model.hardware import Hardware
from graphrun.model.problem import BlockGroup, ComponentNumbers, Problem, Use, Variant
from graphrun.solve.granularity import finer

ORDER = ((0, 0, 3.0), (1, 0, 0.5), (0, 0, 3.0), (1, 1, 0.5))
PINNED = Variant("bfloat16", "pinned", "device", (1, 100), (0.0, 0.25), 201)
DISK = replace(PINNED, backing_store="disk", host_bytes=200, disk_seconds=(0.0, 0.5))


def test_compute_between_blocks_overlaps_two_copies_or_four_reads_and_none_of_it_is_lost() -> None:
    assert overlap_seconds(ORDER, PINNED) == [5.0, 2.0]
    assert overlap_seconds(ORDER, DISK) == [2.0, 5.0]
    use = Use("a", 3, (3, 3), (5.0, 1.0), ORDER)
    assert read_from_disk(use, PINNED, (1, 2)) is use
    assert read_from_disk(use, DISK, (1, 2)).seconds == pytest.approx((2.0, 2.5))


def test_where_the_host_binds_components_that_need_less_host_memory_are_split() -> None:
    blocks = (BlockGroup("unblocked", ("",), False), BlockGroup("b", ("b.0", "b.1"), True))
    layers = ComponentNumbers(
        "a", 201, blocks, (replace(DISK, host_bytes=20),), granularity="layers"
    )
    streamed_component = ComponentNumbers("a", 201, blocks, (DISK,), layers=layers)
    other = replace(
        streamed_component, name="c", layers=replace(layers, name="c", variants=(DISK,))
    )
    card = Hardware("card", "sim", 1000, 0, 0, 100.0, 50.0, 100.0, 1.0, 10.0, 100.0)
    instance = Problem("g", "0" * 16, (), card, 1000, 100, (streamed_component, other), (), ())
    split = finer(instance, ())
    assert split is not None
    assert [component.granularity for component in split.components] == ["layers", "blocks"]
    assert finer(split, ()) is None

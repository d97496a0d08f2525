"""Which compute copies of blocks can hide in: their own, and what of the rest computes between them. Decides nothing.

rest |  block  |  block  | rest |  block  | rest |      the ring, and the buffer for reads, fill while the rest computes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphrun.planner.problem import Use, Variant

COPIES = 2  # blocks that a ring has room for, and the buffer for reads of a home on disk: `Variant.host_bytes`


def hiding_seconds(order: Sequence[tuple[int, int, float]], variant: Variant) -> list[float]:
    """Seconds per class of one call that computes in ``order`` (`Use.order`), in which copies of the class can hide.

    While the rest (class 0) computes between two blocks, the ring fills for the block that follows: that hides two copies at most,
    and of a home on disk four reads, two of them into the buffer. What is longer hides nothing and stays with the rest. The stretch
    behind the last block joins the one before the next call's first.
    """
    found = [0.0] * len(variant.block_bytes)
    blocks = [number for number, (k, _, _) in enumerate(order) if k]
    if not blocks:
        found[0] = sum(seconds for _, _, seconds in order)
        return found
    reads = variant.disk_seconds if variant.home == "disk" and variant.disk_seconds else (0.0,) * len(found)
    waiting = sum(seconds for _, _, seconds in order[blocks[-1] + 1 :])
    for k, _, seconds in order[: blocks[-1] + 1]:
        if k:
            hidden = min(waiting, COPIES * max(variant.load_seconds[k], 2 * reads[k]))
            found[k] += seconds + hidden
            found[0] += waiting - hidden
            waiting = 0.0
        else:
            waiting += seconds
    return found


def read_from_disk(use: Use, variant: Variant, counts: Sequence[int]) -> Use:
    """``use`` with the seconds in which reads can hide too, where ``variant`` is read from disk and the order of compute is known.

    ``counts``: blocks per class.
    """
    if variant.home != "disk" or not use.order:
        return use
    shares = zip(hiding_seconds(use.order, variant), counts, use.class_calls, strict=True)
    seconds = tuple(use.calls * total / (count * max(1, calls)) for total, count, calls in shares)
    return replace(use, seconds=seconds)

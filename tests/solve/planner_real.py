"""Problems of real graphs, as `graphrun plan GRAPH --vram 24G --ram 64G --hardware rtx4090` makes
them, and with more variants."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from graphrun.model.hardware import Hardware
from graphrun.model.problem import ComponentNumbers, Problem
from graphrun.report.plan_files import problem_from

FILES = Path(__file__).parent / "problems"


def real(name: str, gib: int) -> Problem:
    """The problem of graph ``name`` with ``gib`` GiB of VRAM."""
    return replace(
        problem_from(json.loads((FILES / f"{name}.json").read_text())), budget_bytes=gib * 2**30
    )


def with_backing_stores(problem: Problem, ram_gib: int) -> Problem:
    """``of`` with variants whose backing store is read from disk into RAM or stays on disk, and a
    lower precision of large components."""
    return replace(
        problem,
        components=tuple(
            _backing_stores(component, problem.hardware) for component in problem.components
        ),
        ram_bytes=ram_gib * 2**30,
    )


def _backing_stores(component: ComponentNumbers, card: Hardware) -> ComponentNumbers:
    (plain,) = component.variants
    reads = tuple(nbytes / card.disk_bytes_per_second for nbytes in plain.block_bytes)
    bounce = 2 * max(plain.block_bytes)
    variants = [
        replace(plain, read_seconds=reads),
        replace(plain, backing_store="disk", host_bytes=bounce, disk_seconds=reads),
    ]
    if component.weight_bytes() > 2**32:
        half = replace(
            plain,
            precision="fp8",
            block_bytes=tuple(nbytes // 2 for nbytes in plain.block_bytes),
            load_seconds=tuple(seconds / 2 for seconds in plain.load_seconds),
            host_bytes=plain.host_bytes // 2,
            read_seconds=reads,
            block_seconds=tuple(nbytes / 4e11 for nbytes in plain.block_bytes),
            scratch_bytes=max(plain.block_bytes) // 4,
            stored_bytes=plain.host_bytes // 2,
            needs="fp8",
        )
        variants.append(half)
    return replace(component, variants=tuple(variants))

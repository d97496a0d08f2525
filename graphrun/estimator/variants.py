"""The ways a component may be held: precision x home x where it computes, each with its bytes and seconds.

Decides which of them a plan may choose from, and what must be allowed first. The first is what the graph says plainly: its first
precision in page-locked memory. Must not know budgets.

    precision   the graph's list; all but the first change the output and need to be allowed
    home        pinned, pageable (slower to copy from), disk where there is a file whose tensors can be read one by one
    cpu         computed where the weights lie: for what is small or hardly used; the output changes in its last bits
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from graphrun.estimator.events import Facts
from graphrun.graph.graph import Component
from graphrun.planner.problem import Hardware, Home, Variant

HOMES: tuple[Home, ...] = ("pinned", "pageable", "disk")
ON_CPU = "cpu"


def variants_of(
    component: Component, facts: Facts, hardware: Hardware, *, homes: Collection[str], allow: Collection[str]
) -> tuple[Variant, ...]:
    """Every variant of ``component``, the plain one first. ``homes``: those that make a difference here; ``allow`` decides only
    whether computing on the CPU is offered."""
    found = list(_variants(component, facts, hardware, homes))
    if ON_CPU in allow:
        found.append(_on_cpu(found[0], hardware))
    return tuple(found)


def _variants(component: Component, facts: Facts, hardware: Hardware, homes: Collection[str]) -> Iterator[Variant]:
    allowed = component.home or tuple(home for home in HOMES if home in homes)
    for home in (home for home in HOMES if home in allowed):
        if home != "disk" or component.source is not None:
            yield _variant(component, facts.block_bytes, facts, hardware, home)


def _variant(component: Component, block_bytes: tuple[int, ...], facts: Facts, hardware: Hardware, home: Home) -> Variant:
    whole = sum(len(k.blocks) * nbytes for k, nbytes in zip(facts.classes, block_bytes, strict=True))
    rate = hardware.pageable_bytes_per_second if home == "pageable" else hardware.h2d_bytes_per_second
    read = tuple(nbytes / hardware.disk_bytes_per_second for nbytes in block_bytes) if component.source is not None else ()
    return Variant(
        precision=component.precision[0],
        home=home,
        device="device",
        block_bytes=block_bytes,
        load_seconds=tuple(nbytes / rate for nbytes in block_bytes),
        host_bytes=2 * max(block_bytes) if home == "disk" else whole,
        fill_seconds=() if home == "disk" else read,
        disk_seconds=read if home == "disk" else (),
    )


def _on_cpu(variant: Variant, hardware: Hardware) -> Variant:
    """``variant`` computing where its weights lie, at the host's rate; nothing is copied, so its home is pageable."""
    return replace(
        variant,
        home="pageable",
        device="cpu",
        load_seconds=tuple(0.0 for _ in variant.load_seconds),
        streamable=False,
        slowdown=hardware.flops_per_second / hardware.cpu_flops_per_second,
        needs=ON_CPU,
    )

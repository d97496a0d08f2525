"""Lower bounds of stages for a cluster: no plan within a share of RAM is faster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planner_problems import component, problem
from planner_random import random_problem

from graphrun.cluster.columns import SHARES, DeviceClass, Planner
from graphrun.model.problem import PhaseNumbers, Problem, Use
from graphrun.solve.fastest import fastest


def planner_of(instance: Problem) -> tuple[Planner, DeviceClass]:
    graph: Any = None
    planner = Planner(graph, instance.runs, None, {})
    kind = DeviceClass(
        instance.hardware, instance.budget_bytes, instance.ram_bytes, instance.pinned_bytes
    )
    planner._problems[kind] = instance
    return planner, kind


def with_share(instance: Problem, share: float) -> Problem:
    pinned = None if instance.pinned_bytes is None else int(share * instance.pinned_bytes)
    return replace(instance, ram_bytes=int(share * instance.ram_bytes), pinned_bytes=pinned)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.sweep("more") if seed >= 8 else ())
        for seed in range(60)
    ],
)
def test_no_plan_within_a_share_of_memory_is_faster_than_the_bound(seed: int) -> None:
    instance = random_problem(seed)
    planner, kind = planner_of(instance)
    stages = {phase.stage for phase in instance.phases}
    for share in SHARES:
        bound = sum(planner.lower_bound_seconds(kind, stage, share) for stage in stages)
        solution = fastest(with_share(instance, share))
        if solution is not None:
            simulation = solution.simulation
            seconds = sum(slot.seconds for slot in simulation.further_slots or simulation.slots)
            assert bound <= seconds * (1 + 1e-9)


def test_the_bound_counts_reads_from_disk_where_weights_fit_neither_ram_nor_device() -> None:
    calls, blocks, nbytes = 5, 10, 1000
    plain = component("dit", ("blocks", blocks, nbytes), seconds_per_byte=1e-4)
    (pinned,) = plain.variants
    disk = replace(
        pinned, backing_store="disk", host_bytes=2 * nbytes, disk_seconds=(10 * nbytes * 1e-4,)
    )
    use = Use("dit", calls, (calls,), (0.01,))
    instance = problem(
        4500,
        (replace(plain, variants=(pinned, disk)),),
        (PhaseNumbers("denoise", 0, (use,), 0, 500, 500),),
        ram_bytes=16 * nbytes,
    )
    planner, kind = planner_of(instance)
    # from each call to the next, six of the ten blocks are copied from RAM, or read from disk
    assert planner.lower_bound_seconds(kind, "denoise") == pytest.approx((calls - 1) * 6 * 0.1)
    assert planner.lower_bound_seconds(kind, "denoise", 1 / 2) == pytest.approx((calls - 1) * 6)
    fast, slow = fastest(instance), fastest(with_share(instance, 1 / 2))
    assert fast is not None
    assert slow is not None
    assert fast.seconds < 6 < (calls - 1) * 6 <= slow.seconds

"""Items on the devices of a placement, in one process: bits, order and times; what is lost is made again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.placing import BUDGET, GRAPH, SMALL, Here, placed

import graphrun
from graphrun.batch.queue import Batch, BatchContext, run_requests
from graphrun.batch.requests import requests_from, resolved
from graphrun.batch.watch import Watcher
from graphrun.cluster.flow import Flow
from graphrun.cluster.placement import Placement

REQUESTS = [{"prompt": f"prompt {number}", "seed": number} for number in range(4)]


@pytest.fixture(scope="module")
def flux() -> Any:
    return graphrun.load(GRAPH)


@pytest.fixture(scope="module")
def cached(shared_folder: Path) -> Path:
    (folder := shared_folder / "dry-runs").mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def pipeline(flux: Any, cached: Path) -> Placement:
    return placed(flux, 4, cached)


@pytest.fixture(scope="module")
def single(flux: Any, cached: Path) -> Any:
    return graphrun.run_many(flux, REQUESTS, common=SMALL, cache=cached, reuse="none", **BUDGET)


@pytest.fixture
def run(flux: Any) -> Callable[..., tuple[Batch, Here]]:
    def flow(placement: Placement, requests: Sequence[Any] = REQUESTS, before: Any = None, **more: Any) -> tuple[Batch, Here]:
        crew = Here(flux, placement, before)

        def elsewhere(*of: Any) -> None:
            Flow(*of, placement, crew).run()

        given = {"reuse": None, "journal": None, "sink": None, "watcher": Watcher(), "strict": False, **more}
        nowhere: Any = None
        context = BatchContext(nowhere, nowhere, "sim sim", modules=None, device=None, elsewhere=elsewhere, **given)
        try:
            return run_requests(flux, resolved(requests_from(requests), flux, SMALL), context), crew
        finally:
            crew.close()

    return flow


def pictures(batch: Batch) -> list[tuple[int, bytes]]:
    return [(number, outputs["image"].tobytes()) for number, outputs in batch.outputs.items()]


def test_items_have_the_bits_of_one_device_in_order_at_the_planned_time(run: Any, pipeline: Placement, single: Batch) -> None:
    batch, crew = run(pipeline)
    assert pictures(batch) == pictures(single)
    assert sorted(crew.ran) == sorted([0, 1, 2] * 4), "each stage once for each item"
    print(batch.seconds, pipeline.seconds, single.seconds, [(l.device, l.request, round(l.start_seconds, 6), round(l.end_seconds, 6)) for l in batch.lanes])
    print([(a.stages, a.column.cold_seconds, a.column.ahead_seconds, a.column.steady_seconds) for a in pipeline.assignments])
    assert batch.seconds == pytest.approx(pipeline.seconds, rel=0.05)

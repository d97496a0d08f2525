"""Parts of a server without its processes: jobs that are kept, late plans, predicted waits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphrun.serve import records as records_module
from graphrun.serve.bodies import PictureRequest, RequestShape
from graphrun.serve.catalog import Catalog
from graphrun.serve.errors import Refused
from graphrun.serve.jobs import Job
from graphrun.serve.line import Cost, Line, QueueEntry
from graphrun.serve.metrics import Metrics
from graphrun.serve.planner import PlannedShape
from graphrun.serve.plans import Plans, ShapeKey
from graphrun.serve.records import KEPT_JOBS, JobRecords
from graphrun.serve.runs import RunQueue, _Running
from graphrun.serve.shares import WHOLE

KEY: ShapeKey = (RequestShape("flux", (("steps", "4"),)), WHOLE)
GRAPH: Any = SimpleNamespace(name="flux")
PLAN = PlannedShape(Cost(10.0, 2.0), 0, "fits", {})


def job(folder: Path, state: str = "waiting") -> Job:
    inputs = {"steps": 4}
    request = PictureRequest(
        "flux", KEY[0], (inputs, inputs), ".png", as_url=False, definition=GRAPH
    )
    return Job(request, "", folder, preview_wanted=False, state=state)


async def admitted(records: JobRecords, jobs: list[Job]) -> None:
    for admitted_job in jobs:
        with records.admission(admitted_job, is_stored=False):
            pass


def test_unfinished_jobs_take_no_places_of_ended_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, ended_jobs = JobRecords(None), [job(tmp_path, "done") for _ in range(KEPT_JOBS + 2)]
    waiting_jobs = [job(tmp_path) for _ in range(KEPT_JOBS)]
    asyncio.run(admitted(records, [*waiting_jobs, *ended_jobs]))
    assert list(records.jobs.values()) == [*waiting_jobs, *ended_jobs[2:]]
    monkeypatch.setattr(records_module, "KEPT_PICTURES_BYTES", 5)
    for number in (2, 3, 4):
        ended_jobs[number].pictures = [b"two"]
    asyncio.run(admitted(records, [last := job(tmp_path)]))
    assert list(records.jobs.values()) == [*waiting_jobs, *ended_jobs[4:], last]


def plans(line: Line | None = None) -> Plans:
    instance: Any = Plans(SimpleNamespace(), Catalog({}), Metrics(), line or Line())  # type: ignore[arg-type]
    instance.messages = []
    instance._planner = SimpleNamespace(send=lambda kind, **fields: instance.messages.append(kind))
    return instance


def test_a_batch_plan_for_a_shape_that_is_planned_again_is_ignored() -> None:
    async def heard() -> None:
        instance, parts = plans(), {("encode",): (1.0, 0.5)}
        future = instance.shapes[KEY] = asyncio.get_running_loop().create_future()
        instance.hear("batch_plan", KEY, parts=parts)
        assert not future.done()
        future.set_result(PLAN)
        instance.hear("batch_plan", KEY, parts=parts)
        assert instance.shapes[KEY].result().cost.stages == (("encode",),)

    asyncio.run(heard())


def test_no_batch_is_planned_for_a_shape_that_was_refused(tmp_path: Path) -> None:
    async def asked(is_refused: bool) -> list[str]:
        line = Line()
        instance: Any = plans(line)
        future = instance.shapes[KEY] = asyncio.get_running_loop().create_future()
        if is_refused:
            future.set_exception(Refused(422, "nothing fits", "unfit"))
            future.exception()
        else:
            future.set_result(PLAN)
        entry = QueueEntry(job(tmp_path), ("flux", WHOLE), KEY[0], PLAN.cost, runs=2)
        line.add(entry, 0.0, 0.0)
        instance.plan_batch(entry)
        return list(instance.messages)

    assert asyncio.run(asked(is_refused=False)) == ["plan_batch"]
    assert asyncio.run(asked(is_refused=True)) == []


def test_a_failed_run_says_when_to_try_again_in_wall_seconds(tmp_path: Path) -> None:
    """The rest of the job takes 10 + 2 predicted seconds, which last three times as long."""

    async def failed() -> float | None:
        settings: Any = SimpleNamespace()
        queue = RunQueue(
            settings, Metrics(), Line(), JobRecords(None), lambda _: None, lambda: None
        )
        failing_job = job(tmp_path / "job")
        entry = QueueEntry(failing_job, ("flux", WHOLE), KEY[0], PLAN.cost, runs=2)
        queue.pace = 3.0
        queue._active = _Running([entry], False, False, 10.0, 0.0)
        queue._hear_worker("failed", id=failing_job.id, status=503, message="out of memory")
        assert failing_job.error is not None
        return failing_job.error.retry_seconds

    assert asyncio.run(failed()) == 5 + 3 * 12

"""Parts of a server without its processes: jobs that are kept, late plans, predicted waits."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from graphrun.errors import InputError
from graphrun.serve import records as records_module
from graphrun.serve.bodies import PictureRequest, RequestShape
from graphrun.serve.catalog import Catalog
from graphrun.serve.errors import Refused
from graphrun.serve.jobs import Job
from graphrun.serve.keys import ApiKey
from graphrun.serve.line import Cost, Line, QueueEntry
from graphrun.serve.metrics import Metrics
from graphrun.serve.planner import PlannedShape
from graphrun.serve.plans import Plans, ShapeKey
from graphrun.serve.records import KEPT_JOBS, JobRecords
from graphrun.serve.runs import RunQueue, _Running
from graphrun.serve.service import Service
from graphrun.serve.settings import Settings
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


RESULT = {
    "seconds": (1.0, 1.0),
    "stages": {},
    "peak_bytes": (1, 1),
    "notes": (),
    "overruns": (),
    "plan": "a digest",
}


def stored(records: JobRecords, folder: Path, key: str = "", suffix: str = ".png") -> Job:
    """A job that is admitted and stored."""
    request = PictureRequest("flux", KEY[0], ({},), suffix, as_url=False, definition=GRAPH)
    stored_job = Job(request, "", folder, preview_wanted=False, key=key)
    with records.admission(stored_job, is_stored=True):
        records.add(stored_job)
    return stored_job


def set_writable(records: JobRecords, writable: bool) -> None:
    """Let the database refuse all changes, as on a full disk, or accept them again."""
    assert records.store is not None
    records.store._database.execute(f"PRAGMA query_only = {not writable}")


def running(records: JobRecords, running_job: Job) -> Any:
    """A queue whose worker runs ``running_job``, and ``messages`` to that worker."""
    queue: Any = RunQueue(
        SimpleNamespace(),  # type: ignore[arg-type]
        Metrics(),
        Line(),
        records,
        lambda _: None,
        lambda: None,
    )
    queue.messages = []
    queue._worker = SimpleNamespace(send=lambda kind, **_: queue.messages.append(kind))
    entry = QueueEntry(running_job, ("flux", WHOLE), KEY[0], PLAN.cost, runs=1)
    queue._active = _Running([entry], False, False, 10.0, 0.0)
    return queue


def test_what_a_full_disk_does_not_take_is_stored_later(tmp_path: Path) -> None:
    async def act() -> Job:
        records = JobRecords(tmp_path / "state")
        running_job = stored(records, tmp_path / "job")
        queue = running(records, running_job)
        set_writable(records, False)
        for _ in range(2):
            with pytest.raises(Refused) as refusal:
                stored(records, tmp_path / "other", key="once")
            assert (refusal.value.status, refusal.value.code) == (503, "state_not_written")
            assert await records.earlier_job("", "once", "") is None, "the key is free"
        (picture := tmp_path / "picture.png").write_bytes(b"picture")
        queue._hear_worker("done", id=running_job.id, files=[picture], **RESULT)
        assert (running_job.state, queue.is_empty) == ("done", True), "the queue goes on"
        set_writable(records, True)
        later_job = stored(records, tmp_path / "other", key="once")
        assert list(records.jobs.values()) == [running_job, later_job]
        records.close()
        return running_job

    running_job = asyncio.run(act())
    records = JobRecords(tmp_path / "state")
    assert records.store is not None
    first, second = records.store.jobs(Catalog({}))
    assert (first.id, first.state, first.pictures) == (running_job.id, "done", [b"picture"])
    assert len(first.results) == 1
    assert second.key == "once"
    records.close()


def test_a_job_that_cannot_be_stored_does_not_run(tmp_path: Path) -> None:
    async def act() -> None:
        settings = Settings(
            (Path("flux-tiny"),),
            (),
            {},
            (),
            tmp_path,
            "none",
            tmp_path,
            {},
            "1",
            state=tmp_path / "state",
        )
        service: Any = Service(settings)

        async def plan(_: Any) -> tuple[PlannedShape, float]:
            return PLAN, WHOLE

        service._plan = plan
        body = service.bodies["flux-tiny"].read({"prompt": "a"})
        set_writable(service.records, False)
        with pytest.raises(Refused, match="cannot write jobs to its disk now"):
            await service.submit_job(body, "")
        assert not service.line.entries
        assert not service.records.jobs
        set_writable(service.records, True)
        assert (await service.submit_job(body, "")).state == "waiting"
        assert len(service.line.entries) == 1
        service.close()

    asyncio.run(act())


def test_a_job_that_is_cancelled_while_it_runs_does_not_run_in_the_next_server(
    tmp_path: Path,
) -> None:
    async def act() -> None:
        records = JobRecords(tmp_path / "state")
        queue = running(records, running_job := stored(records, tmp_path / "job"))
        queue.cancel(running_job)
        queue.cancel_all()
        assert running_job.error is not None
        assert running_job.error.code == "cancelled", "also while the server stops"
        assert queue.messages == ["cancel", "cancel"]
        records.close()  # as a kill does, before the worker reports
        records = JobRecords(tmp_path / "state")
        assert records.restore(Catalog({"flux": GRAPH})) == []
        (restored_job,) = records.jobs.values()
        assert (restored_job.state, restored_job.id) == ("cancelled", running_job.id)
        records.close()

    asyncio.run(act())


def test_a_video_that_is_deleted_while_it_runs_is_forgotten(port_of: Any, tmp_path: Path) -> None:
    async def act() -> None:
        bearer = {"Authorization": "Bearer a key"}
        async with (
            port_of(tmp_path, state=tmp_path / "state") as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port.number}", headers=bearer) as client,
        ):
            records = port.service.records
            video = stored(records, tmp_path / "job", suffix=".mp4")
            video.owner = "tester"
            queue = port.service.queue = running(records, video)
            assert (await client.delete(f"/v1/videos/{video.id}")).json()["deleted"]
            assert queue.messages == ["cancel"]
            for address in (f"/v1/videos/{video.id}", f"/v1/jobs/{video.id}"):
                assert (await client.get(address)).status_code == 404
            for address in ("/v1/videos", "/v1/jobs"):
                assert (await client.get(address)).json()["data"] == []
            queue._hear_worker("cancelled", id=video.id)
            assert not records.jobs
            assert list(records.store.jobs(Catalog({}))) == []
            records.close()

    asyncio.run(act())


def test_a_restored_job_that_is_cancelled_while_it_is_planned_ends_once(tmp_path: Path) -> None:
    async def act() -> None:
        settings = Settings((Path("flux-tiny"),), (), {}, (), tmp_path, "none", tmp_path, {}, "1")
        service: Any = Service(settings)
        restored_job, ends = job(tmp_path / "job"), list[str]()
        service.records.end = lambda ended_job: ends.append(ended_job.state)

        async def plan(_: Any) -> None:
            service.queue.cancel(restored_job)
            raise Refused(422, "nothing fits", "does_not_fit")

        service._plan = plan
        await service._restore([restored_job])
        assert ends == ["cancelled"]

    asyncio.run(act())


def test_a_run_on_a_full_disk_goes_on_without_its_state_and_is_to_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphrun.batch.journal import RequestJournal
    from graphrun.serve.together import Keeper, RunRequest
    from graphrun.serve.worker import RequestWorker

    def refuse(*_: Any) -> Any:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise InputError(f"{tmp_path}: cannot be written") from error

    monkeypatch.setattr(RequestJournal, "save", refuse)
    run = RunRequest("1", 0, {}, tmp_path, ".png", preview=False)
    keeper: Any = Keeper(run, lambda **_: None)
    keeper.save("denoise", None)

    worker: Any = object.__new__(RequestWorker)
    messages = list[tuple[str, dict[str, Any]]]()
    worker._execute = refuse
    worker._notify = lambda kind, **content: messages.append((kind, content))
    worker._end_run = lambda *_: None
    budget: Any = SimpleNamespace(group=None, variant=SimpleNamespace(loras=()))
    fields = {name: getattr(run, name) for name in ("id", "number", "inputs", "folder", "suffix")}
    worker.run({**fields, "preview": False}, budget)
    ((kind, content),) = messages
    assert (kind, content["status"]) == ("failed", 503)
    assert content["message"] == "the disk of the server is full: try again"


def test_a_request_that_is_to_be_sent_again_takes_nothing_from_its_key(tmp_path: Path) -> None:
    async def act() -> None:
        keys = {"tester": ApiKey("", per_minute=1)}
        settings = Settings(
            (Path("flux-tiny"),), (), {}, (), tmp_path, "none", tmp_path, {}, "1", keys=keys
        )
        service: Any = Service(settings)
        body = service.bodies["flux-tiny"].read({"prompt": "a"})
        errors = [
            Refused(503, "the planner has ended", "interrupted", retry_seconds=1),
            Refused(422, "nothing fits", "does_not_fit"),
        ]

        async def plan(_: Any) -> None:
            raise errors.pop(0)

        service._plan = plan
        for code in ("interrupted", "does_not_fit", "rate_limited"):
            with pytest.raises(Refused) as refusal:
                await service.submit_job(body, "tester")
            assert refusal.value.code == code
        service.close()

    asyncio.run(act())

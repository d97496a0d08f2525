"""What the server keeps of jobs that have ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from graphrun.serve import records
from graphrun.serve.bodies import PictureRequest, RequestShape
from graphrun.serve.catalog import Catalog
from graphrun.serve.jobs import Job
from graphrun.serve.service import Service
from graphrun.serve.settings import Settings
from graphrun.serve.state import JobStore

SHAPE = RequestShape("flux-tiny", ())
REQUEST = PictureRequest(
    "flux-tiny", SHAPE, ({"prompt": "a"},), ".png", as_url=False, definition=None
)


@pytest.mark.parametrize("is_stored", [False, True])
def test_jobs_that_have_ended_are_kept_within_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_stored: bool
) -> None:
    monkeypatch.setattr(records, "KEPT_PICTURES_BYTES", 150)

    async def end_at_once(job: Job) -> Job:
        job.state, job.pictures = "done", [b"x" * 60]
        return job

    async def ids_of_jobs() -> tuple[list[str], list[str]]:
        state = tmp_path / "state" if is_stored else None
        settings = Settings(
            (Path("flux-tiny"),), (), {}, (), tmp_path, "none", tmp_path, {}, "1", state=state
        )
        service = Service(settings)
        monkeypatch.setattr(service, "_submit", end_at_once)
        ids = [(await service.submit_job(REQUEST, "", key=f"{n}")).id for n in range(4)]
        repeated_job = await service.submit_job(REQUEST, "", key="0")
        assert repeated_job.id not in ids, "the key of a forgotten job is free"
        service.close()
        return [*ids, repeated_job.id], list(service.records.jobs)

    ids, kept_ids = asyncio.run(ids_of_jobs())
    assert kept_ids == ids[-2:]
    if is_stored:
        store = JobStore(tmp_path / "state")
        assert [job.id for job in store.jobs(Catalog({}))] == kept_ids
        store.close()

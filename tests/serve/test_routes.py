"""What the server keeps of jobs that have ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from graphrun.errors import InputError
from graphrun.serve import records
from graphrun.serve.bodies import PictureRequest, RequestShape
from graphrun.serve.catalog import Catalog
from graphrun.serve.jobs import Job
from graphrun.serve.routes import digest_of
from graphrun.serve.service import Service
from graphrun.serve.settings import Settings
from graphrun.serve.state import JobStore
from graphrun.serve.webhooks import Delivery

SHAPE = RequestShape("flux-tiny", ())
REQUEST = PictureRequest(
    "flux-tiny", SHAPE, ({"prompt": "a"},), ".png", as_url=False, definition=None
)


@pytest.mark.parametrize("is_stored", [False, True])
def test_jobs_that_have_ended_are_kept_within_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_stored: bool
) -> None:
    monkeypatch.setattr(records, "KEPT_PICTURES_BYTES", 150)

    service: Any = None

    async def end_at_once(job: Job) -> Job:
        job.state, job.pictures = "done", [b"x" * 60]
        service.records.add(job)
        return job

    async def ids_of_jobs() -> tuple[list[str], list[str]]:
        nonlocal service
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


def test_a_form_that_is_sent_again_is_the_same_body() -> None:
    def digest(prompt: str) -> str:
        files = {"image": ("a.png", b"picture")}
        request = httpx.Request("POST", "http://a/", data={"prompt": prompt}, files=files)
        return digest_of(request.read(), request.headers["content-type"])

    assert digest("a boat") == digest("a boat") != digest("a ship")
    assert digest_of(b"{}", "application/json") != digest_of(b"{ }", "application/json")


def test_others_cannot_read_the_files_in_a_folder_that_they_can_read(tmp_path: Path) -> None:
    (folder := tmp_path / "state").mkdir(mode=0o755)
    store = JobStore(folder)
    store.put_delivery(Delivery("1", "http://a/", "{}"))
    paths = [path for path in folder.iterdir() if path.name != "lock"]
    assert {path.name for path in paths} >= {"jobs", "jobs.sqlite", "jobs.sqlite-wal"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in paths)
    store.close()


def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    store._database.execute(
        "INSERT INTO jobs (id, owner, created, key, body, request, state, error)"
        " VALUES ('1', '', 1, '', '', '{broken', 'waiting', '')"
    )
    store.close()
    store = JobStore(tmp_path)
    with pytest.raises(InputError, match=r"jobs.sqlite: .*; to start without its jobs, move"):
        list(store.jobs(Catalog({})))
    store.close()
    content = bytearray((tmp_path / "jobs.sqlite").read_bytes())
    content[4096:] = b"x" * (len(content) - 4096)
    (tmp_path / "jobs.sqlite").write_bytes(content)
    with pytest.raises(InputError, match=r"jobs.sqlite: .*; to start without its jobs, move"):
        list(JobStore(tmp_path).jobs(Catalog({})))

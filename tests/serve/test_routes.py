"""What the addresses keep."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

import graphrun
from graphrun.serve import routes
from graphrun.serve.answers import Pictures
from graphrun.serve.jobs import Job
from graphrun.serve.settings import Bounds


def test_jobs_that_have_ended_are_kept_within_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "KEPT_PICTURES_BYTES", 150)

    async def submit(request: Any, owner: str, folder: Path, *, preview: bool) -> Job:
        return Job(request, owner, folder, preview, state="done", pictures=[b"x" * 60])

    settings = SimpleNamespace(keys={}, bounds=Bounds(), folder=Path("none"))
    graphs = {"flux-tiny": graphrun.load("flux-tiny")}
    service: Any = SimpleNamespace(
        settings=settings, graphs=graphs, submit=submit, pace=1.0, predicted_wait=lambda job: 0.0
    )
    (app := FastAPI()).include_router(routes.jobs(service, Pictures()))
    # without the handler of Refused it is 500
    client = TestClient(app, raise_server_exceptions=False)
    names = [client.post("/v1/jobs", json={"prompt": "a"}).json()["id"] for _ in range(4)]
    assert [client.get(f"/v1/jobs/{name}").status_code for name in names] == [500, 500, 200, 200]

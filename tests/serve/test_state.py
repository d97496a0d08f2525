"""Jobs outlive the server: after SIGKILL and SIGTERM they go on, none twice."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long


def submitted(server: Any, key: str = "", **body: Any) -> Any:
    """The answer to a job of ``body``, with an Idempotency-Key where ``key`` is given."""
    headers = {"Idempotency-Key": key} if key else {}
    answer = server.client.post("/v1/jobs", json={"prompt": "a boat", **body}, headers=headers)
    return answer


def picture_of(server: Any, id: str) -> str:
    """The picture of job ``id``, when it has ended."""
    server.until(lambda: server.client.get(f"/v1/jobs/{id}").json()["state"] == "done")
    data: str = server.client.get(f"/v1/jobs/{id}/result").json()["data"][0]["b64_json"]
    return data


@pytest.mark.sweep("more")
def test_jobs_go_on_after_the_server_was_killed_and_after_it_stopped(
    serving: Any, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    with serving(tmp_path / "first", "--state", str(state)) as server:
        done_id = submitted(server, steps=2, seed=1).json()["id"]
        first_picture = picture_of(server, done_id)
        long = submitted(server, key="again", steps=30, seed=2).json()["id"]
        waiting_ids = [submitted(server, steps=2, seed=seed).json()["id"] for seed in (3, 4)]
        job = server.until(lambda: _after_step(server, long, 5))
        assert job["state"] == "running"
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    assert state.stat().st_mode & 0o077 == 0, "prompts are for the owner alone"
    with serving(tmp_path / "second", "--state", str(state), "--drain", "0s") as server:
        job_list = server.client.get("/v1/jobs").json()
        assert [entry["id"] for entry in job_list["data"]] == [
            waiting_ids[1],
            waiting_ids[0],
            long,
            done_id,
        ]
        assert not job_list["has_more"]
        assert picture_of(server, done_id) == first_picture, "ended jobs keep their pictures"
        assert submitted(server, key="again", steps=30, seed=2).json()["id"] == long
        server.until(lambda: _after_step(server, long, 8))
        assert server.stop() == 0, "SIGTERM leaves what runs and waits to the next server"
        assert "draining" in server.log.read_text()
        assert "stored=" in server.log.read_text()
    with serving(tmp_path / "third", "--state", str(state)) as server:
        pictures = [picture_of(server, id) for id in (long, *waiting_ids)]
        assert server.metric("pictures_total") == 3, "each once"
        for number, (seed, steps) in enumerate(((2, 30), (3, 2), (4, 2))):
            plain = submitted(server, steps=steps, seed=seed).json()["id"]
            assert picture_of(server, plain) == pictures[number], "as of an uninterrupted job"
        text = "another server uses this folder"
        with (
            pytest.raises(AssertionError, match=text),
            serving(tmp_path / "fourth", "--state", str(state)),
        ):
            pass
    assert not list((state / "jobs").iterdir()), "ended jobs leave no files"


def _after_step(server: Any, id: str, step: int) -> Any:
    job = server.client.get(f"/v1/jobs/{id}").json()
    return job if job["step"] >= step else None


@pytest.fixture
def idle_after(server: Any) -> Iterator[None]:
    """Leaves the shared server without requests: what waits may join those of the next test."""
    yield
    names = ("waiting_requests", "running_requests", "planning_requests")
    server.until(lambda: not any(server.metric(name) for name in names))


@pytest.mark.sweep("more")
@pytest.mark.usefixtures("idle_after")
def test_an_idempotency_key_makes_one_job(server: Any) -> None:
    first = submitted(server, key="one", steps=2)
    repeated = submitted(server, key="one", steps=2)
    assert (first.status_code, repeated.status_code) == (202, 202)
    assert first.json()["id"] == repeated.json()["id"]
    other = submitted(server, key="one", steps=3)
    assert other.status_code == 422
    assert other.json()["error"]["code"] == "idempotency_key_reused"
    assert submitted(server, key="two", steps=2).json()["id"] != first.json()["id"]
    assert submitted(server, key="k" * 256, steps=2).status_code == 422
    refusal = submitted(server, key="three", size="512x512")
    assert refusal.status_code == submitted(server, key="three", size="512x512").status_code
    assert submitted(server, key="three", steps=2).status_code == 202, "a refusal uses no key"


@pytest.mark.usefixtures("idle_after")
def test_jobs_are_listed_page_by_page(server: Any) -> None:
    ids = [submitted(server, steps=2, seed=seed).json()["id"] for seed in range(5)][::-1]
    first = server.client.get("/v1/jobs", params={"limit": 3}).json()
    assert [job["id"] for job in first["data"]] == ids[:3]
    assert first["has_more"]
    rest = server.client.get("/v1/jobs", params={"limit": 3, "after": ids[2]}).json()
    assert [job["id"] for job in rest["data"]][:2] == ids[3:], "before them, those of other tests"
    for query in ({"limit": "0"}, {"limit": "many"}, {"after": "nobody"}):
        assert server.client.get("/v1/jobs", params=query).status_code in (404, 422), query


@pytest.mark.sweep("more")
def test_a_warm_server_is_ready_when_it_has_made_a_picture(serving: Any, tmp_path: Path) -> None:
    with serving(tmp_path, "--warm") as server:
        server.until(lambda: server.client.get("/readyz").status_code == 200)
        assert server.metric("pictures_total") == 1
        assert server.client.get("/v1/jobs").json()["data"] == [], "it is nobody's job"


@pytest.mark.sweep("more")
def test_the_log_tells_of_answers_plans_and_deaths(serving: Any, tmp_path: Path) -> None:
    with serving(tmp_path, "--log", "json") as server:
        id = submitted(server, steps=40).json()["id"]
        server.until(lambda: _after_step(server, id, 3))
        server.worker.kill()
        picture_of(server, id)
        assert server.client.get("/nowhere?prompt=secret").status_code == 404
        lines = server.log.read_text().splitlines()
        entries = [json.loads(line) for line in lines if line.startswith("{")]
        assert server.metric("answers_total") >= 3
        assert 'key="tester"' in server.client.get("/metrics").text
    kinds = [entry["event"] for entry in entries]
    assert kinds.count("worker started") == 2
    (death,) = [entry for entry in entries if entry["event"] == "worker ended"]
    assert (death["exit_code"], death["request"]) == (-signal.SIGKILL, id)
    assert any(entry["event"] == "planned" and "fits" in entry["answer"] for entry in entries)
    (end,) = [entry for entry in entries if entry["event"] == "request"]
    assert (end["id"], end["state"], end["pictures"]) == (id, "done", 1)
    posted = [entry for entry in entries if entry.get("method") == "POST"]
    assert [(entry["path"], entry["status"], entry["job"]) for entry in posted] == [
        ("/v1/jobs", 202, id)
    ]
    assert any(entry.get("path") == "/nowhere" for entry in entries)
    assert not any("secret" in line or "a boat" in line for line in lines), "no texts of clients"

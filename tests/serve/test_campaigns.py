"""Long campaigns: a thousand requests of 32 clients, and a worker that is killed again and again under load."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

SERVE = pytest.mark.sweep("serve")
CLIENTS = 32


@contextlib.contextmanager
def asking(server: Any, folder: Path, requests: int) -> Iterator[Callable[[], bool]]:
    """Locust's clients; their results are in ``folder/results``. Yields whether requests are still to be answered."""
    own = {"KEY": "a key for tests", "REQUESTS": str(requests), "RESULTS": str(folder / "results")}
    options = ["--headless", "-u", str(CLIENTS), "-r", str(CLIENTS), "--host", server.url, "--only-summary"]
    command = [sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("load.py")), *options]
    (folder / "results").touch()
    clients = subprocess.Popen(command, env={**os.environ, **own}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield lambda: clients.poll() is None and len((folder / "results").read_text().splitlines()) < requests
    finally:
        clients.kill()  # locust itself does not end when its users do
        clients.wait()


def results(folder: Path, requests: int) -> list[dict[str, Any]]:
    """What each request got: none is lost, none came twice, and each is the picture that was asked for."""
    found = [json.loads(line) for line in (folder / "results").read_text().splitlines()]
    assert sorted(each["number"] for each in found) == list(range(requests))
    for each in found:
        assert each["statuses"][-1] == 200, each
        asked, made = each["asked"], each["made"]
        assert (made["prompt"], made["seed"], f"{made['width']}x{made['height']}") == (
            asked["prompt"],
            asked["seed"],
            asked["size"],
        )
    assert len({each["figures"]["job"] for each in found}) == requests
    return found


def late(found: list[dict[str, Any]]) -> list[float]:
    """How far each request's seconds in the queue are from those that were predicted, as a share of these; of those that waited."""
    queues = [each["figures"]["queue_seconds"] for each in found]
    return sorted(abs(of["measured"] - of["planned"]) / of["planned"] for of in queues if of["planned"] > 0)


@pytest.mark.parametrize("requests", [pytest.param(1000, marks=SERVE), pytest.param(2000, marks=SERVE)])
def test_clients_get_what_they_asked_for_when_it_was_predicted(serving: Any, tmp_path: Path, requests: int) -> None:
    with serving(tmp_path, "--reuse", "none", "--queue", "10h") as server:
        taken = []  # bytes of the server's processes, from a fifth of the requests on
        with asking(server, tmp_path, requests) as unanswered:
            while unanswered():
                if server.metric("pictures_total") > requests / 5:
                    processes = [psutil.Process(server.process.pid), server.worker]
                    taken.append(sum(process.memory_info().rss for process in processes))
                time.sleep(1)
        found = results(tmp_path, requests)
        assert server.metric("worker_restarts_total") == 0
    errors = late(found)
    assert len(errors) > requests / 2
    assert errors[int(0.95 * len(errors))] <= 0.2
    for each in found:
        assert each["figures"]["peak_bytes"]["measured"] <= each["figures"]["peak_bytes"]["planned"] <= 6 * 2**20
    half = len(taken) // 2
    assert sum(taken[half:]) / len(taken[half:]) <= 1.1 * sum(taken[:half]) / half, "memory is flat"


@SERVE
def test_a_worker_that_is_killed_thirty_times_under_load_loses_nothing(serving: Any, tmp_path: Path) -> None:
    """A request under which three workers died is answered with 503 and asked again by its client."""
    choose, kills = random.Random(1), 0
    with serving(tmp_path, "--reuse", "none", "--queue", "10h") as server:
        with asking(server, tmp_path, requests=300) as unanswered:
            while kills < 30 and unanswered():
                made = server.metric("pictures_total")
                server.until(lambda made=made: server.metric("ready") and server.metric("pictures_total") > made)
                time.sleep(choose.uniform(0, 1))
                server.worker.kill()
                kills += 1
                server.until(lambda kills=kills: server.metric("worker_restarts_total") == kills)
            server.until(lambda: not unanswered())
        results(tmp_path, 300)
        assert kills == 30
        asked = {"prompt": "request 0", "seed": 0, "size": "32x32"}
        whole = server.client.post("/v1/images/generations", json=asked).json()
        assert whole["graphrun"]["peak_bytes"]["measured"] <= 6 * 2**20


@SERVE
def test_sigterm_lets_what_was_admitted_end_and_then_cancels(serving: Any, tmp_path: Path) -> None:
    with serving(tmp_path, "--drain", "2s", "--max-steps", "1000") as server:
        url = f"/v1/jobs/{server.client.post('/v1/jobs', json={'prompt': 'a', 'steps': 300}).json()['id']}"
        server.until(lambda: server.client.get(url).json()["step"])
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.terminate()
        server.until(lambda: server.client.get("/readyz").status_code == 503)
        refused = server.client.post("/v1/images/generations", json={"prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        with server.client.stream("GET", f"{url}/events") as stream:
            last = "".join(stream.iter_text()).strip().split("\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"
        assert server.process.wait(120) == 0
        assert psutil.wait_procs(children, 10)[1] == []


@SERVE
def test_a_server_that_is_killed_leaves_no_process(serving: Any, tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        server.process.wait()
        assert psutil.wait_procs(children, 60)[1] == []


@SERVE
def test_a_long_queue_is_refused_with_the_seconds_until_it_is_shorter(serving: Any, tmp_path: Path) -> None:
    """And slow clients are cut off."""
    import socket

    import httpx
    import openai

    with serving(tmp_path, "--queue", "1ms", "--max-steps", "1000") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="a key for tests", max_retries=0, timeout=300)
        job = server.client.post("/v1/jobs", json={"prompt": "a", "steps": 300}).json()
        server.until(lambda: server.client.get(f"/v1/jobs/{job['id']}").json()["step"])
        with pytest.raises(openai.RateLimitError) as refused:
            client.images.generate(prompt="a")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        host, opened = httpx.URL(server.url), []
        for half in (b"", b"GET /healthz HT", b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer a key for tests\r\n"):
            opened.append(socket.create_connection((host.host, host.port), timeout=60))
            opened[-1].sendall(half)
        assert [connection.recv(100) for connection in opened] == [b"", b"", b""]
        server.client.delete(f"/v1/jobs/{job['id']}")


@SERVE
def test_pictures_are_edited_and_two_graphs_share_the_budget(serving: Any, tmp_path: Path) -> None:
    import base64
    import io

    import openai

    with serving(tmp_path, names=("flux-tiny", "sdxl-img2img-tiny")) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="a key for tests", max_retries=0, timeout=900)
        file = io.BytesIO()
        Image.new("RGB", (64, 64), "red").save(file, "PNG")
        with pytest.raises(openai.NotFoundError, match="models that do: sdxl-img2img-tiny"):
            client.images.edit(model="flux-tiny", prompt="a", image=file.getvalue())
        with pytest.raises(openai.UnprocessableEntityError, match="send it to /v1/images/edits"):
            client.images.generate(model="sdxl-img2img-tiny", prompt="a")
        with pytest.raises(openai.UnprocessableEntityError, match="the file: is no image"):
            client.images.edit(model="sdxl-img2img-tiny", prompt="a", image=b"no picture")
        for _ in range(2):
            assert client.images.generate(model="flux-tiny", prompt="a").data
            found = client.images.edit(model="sdxl-img2img-tiny", prompt="a", image=file.getvalue(), extra_body={"seed": 1})
            made = Image.open(io.BytesIO(base64.b64decode(found.data[0].b64_json)))
            assert made.size == (64, 64)
            assert found.graphrun["peak_bytes"]["measured"] <= 6 * 2**20

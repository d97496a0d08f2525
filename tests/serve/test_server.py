"""A server as its clients see it: the official `openai` client, jobs, a browser, and those that
mean harm."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import time
from typing import Any

import httpx
import openai
import psutil
import pytest
from PIL import Image

from graphrun.notices import DROPPED

KEY = "a key for tests"
pytestmark = pytest.mark.long


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=300)


def picture(data: Any) -> Any:
    return Image.open(io.BytesIO(base64.b64decode(data.b64_json)))


def job_of(server: Any, **body: Any) -> dict[str, Any]:
    answer = server.client.post("/v1/jobs", json={"prompt": "a", **body})
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


@pytest.mark.sweep("more")
def test_pictures_of_what_was_asked(client: openai.OpenAI) -> None:
    response = client.images.generate(
        model="flux-tiny", prompt="a", size="32x48", n=2, extra_body={"seed": 7, "steps": 2}
    )
    assert [picture(image).size for image in response.data or []] == [(32, 48)] * 2
    inputs = [
        json.loads(picture(image).info["graphrun"])["inputs"] for image in response.data or []
    ]
    assert [(values["prompt"], values["seed"], values["steps"]) for values in inputs] == [
        ("a", 7, 2),
        ("a", 8, 2),
    ]
    second = client.images.generate(
        model="flux-tiny", prompt="a", size="32x48", extra_body={"seed": 8, "steps": 2}
    )
    assert (
        picture(second.data[0]).tobytes()
        == picture(response.data[1]).tobytes()
        != picture(response.data[0]).tobytes()
    )


@pytest.mark.sweep("more")
def test_a_stream_has_previews_and_then_the_pictures_of_a_plain_answer(
    client: openai.OpenAI,
) -> None:
    fields: Any = {"prompt": "a", "size": "32x32", "n": 2}
    extra = {"seed": 5, "num_inference_steps": 40}
    events = list(client.images.generate(**fields, stream=True, partial_images=3, extra_body=extra))
    kinds = [event.type.removeprefix("image_generation.") for event in events]
    partial = kinds.count("partial_image")
    assert kinds == ["partial_image"] * partial + ["completed"] * 2
    assert 1 <= partial <= 3
    assert [event.partial_image_index for event in events[:partial]] == list(range(partial))
    plain = client.images.generate(**fields, extra_body=extra).data or []
    assert [picture(event).tobytes() for event in events[partial:]] == [
        picture(image).tobytes() for image in plain
    ]
    assert {(event.size, event.output_format) for event in events} == {("32x32", "png")}


def test_a_stream_that_is_refused_is_refused_before_it_begins(client: openai.OpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match="would fit"):
        client.images.generate(prompt="a", size="512x512", stream=True)
    for extra, text in (
        ({"partial_images": 2}, "partial_images"),
        ({"stream": "yes"}, "stream: 'yes' is neither true nor false"),
        ({"steps": 2, "num_inference_steps": 3}, "another name of steps"),
    ):
        with pytest.raises(openai.UnprocessableEntityError, match=text):
            client.images.generate(prompt="a", extra_body=extra)


def test_an_answer_says_what_was_planned_and_measured(server: Any, client: openai.OpenAI) -> None:
    raw = client.images.with_raw_response.generate(
        prompt="never encoded before", output_format="webp", response_format="url"
    )
    assert [part.partition(";")[0] for part in raw.headers["server-timing"].split(", ")] == [
        "plan",
        "queue",
        "encode",
        "denoise",
        "decode",
    ]
    url = raw.parse().data[0].url
    file_response = httpx.get(url)
    assert (
        file_response.headers["content-type"],
        Image.open(io.BytesIO(file_response.content)).format,
    ) == (
        "image/webp",
        "WEBP",
    )
    figures = raw.parse().graphrun
    for stage in figures["stages"]:
        assert stage["measured_seconds"] == pytest.approx(stage["planned_seconds"], rel=0.05)
    assert figures["peak_bytes"]["measured"] <= figures["peak_bytes"]["planned"] <= 6 * 2**20
    assert figures["verdict"] == "the run stayed within the planned memory"
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'graphrun_overruns_total{graph="flux-tiny"} 0.0' in metrics


def test_several_at_once_by_the_asyncio_client(server: Any) -> None:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=300
        ) as client:
            tasks = [
                client.images.generate(prompt=f"{n}", extra_body={"seed": n}) for n in range(3)
            ]
            return await asyncio.gather(*tasks)

    responses = asyncio.run(ask())
    inputs = [
        json.loads(picture(response.data[0]).info["graphrun"])["inputs"] for response in responses
    ]
    assert [(values["prompt"], values["seed"]) for values in inputs] == [
        ("0", 0),
        ("1", 1),
        ("2", 2),
    ]


def test_its_own_typed_errors(server: Any, client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").images.generate(prompt="a")
    with pytest.raises(openai.NotFoundError, match="models are flux-tiny"):
        client.images.generate(prompt="a", model="../graphs/flux-tiny.yaml")
    with pytest.raises(openai.NotFoundError, match="takes no picture"):
        client.images.edit(prompt="a", image=b"x")
    with pytest.raises(openai.UnprocessableEntityError, match="did you mean 'steps'"):
        client.images.generate(prompt="a", extra_body={"step": 3})
    with pytest.raises(openai.BadRequestError, match="not JSON"):
        client.post(
            "/images/generations",
            body=b"{",
            cast_to=object,
            options={"headers": {"Content-Type": "application/json"}},
        )
    assert server.metric("pictures_total") >= 0


def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    server: Any, client: openai.OpenAI
) -> None:
    picture_count = server.metric("pictures_total")
    text = r"flux-tiny: size=\d+x\d+.* would fit; for size=512x512.* nothing fits"
    with pytest.raises(openai.UnprocessableEntityError, match=text) as refusal:
        client.images.generate(prompt="a", size="512x512", extra_body={"steps": 2})
    assert refusal.value.code == "does_not_fit"
    assert {
        pair for suggestion in refusal.value.body["suggestions"] for pair in suggestion["change"]
    }, "with what to do"
    assert server.metric("pictures_total") == picture_count


def test_models_have_limits_and_predicted_seconds(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    while time.time() < model.created + 1:
        time.sleep(0.1)
    assert model == client.models.retrieve("flux-tiny"), "in another second too"
    assert model.plan["fits"]
    assert 0 < model.plan["again_seconds"] <= model.plan["first_seconds"]
    assert model.limits["steps"] == 200


@pytest.mark.sweep("more")
def test_a_job_tells_its_steps_and_previews_and_ends_with_the_picture(server: Any) -> None:
    job = job_of(server, steps=6, seed=3)
    with server.client.stream("GET", f"/v1/jobs/{job['id']}/events") as stream:
        text = "".join(stream.iter_text())
    events = [event.split("\n") for event in text.strip().split("\n\n")]
    states = [
        json.loads(data.removeprefix("data: ")) for kind, data in events if kind != "event: preview"
    ]
    assert {state["step"] for state in states} & {1, 2, 3, 4, 5}
    assert [state["step"] for state in states[:-1]] == sorted(
        state["step"] for state in states[:-1]
    )
    previews = [data for kind, data in events if kind == "event: preview"]
    assert (
        Image.open(io.BytesIO(base64.b64decode(previews[0].removeprefix("data: ")))).format == "PNG"
    )
    assert (events[-1][0], states[-1]["state"]) == ("event: end", "done")
    result = server.client.get(f"/v1/jobs/{job['id']}/result").json()
    assert result["data"][0]["seed"] == 3
    assert server.client.get("/v1/jobs/another").status_code == 404


@pytest.mark.sweep("more")
def test_a_cancelled_job_stops_at_a_step_and_the_next_one_runs(
    server: Any, client: openai.OpenAI
) -> None:
    job = job_of(server, steps=120)
    url = f"/v1/jobs/{job['id']}"
    assert server.client.get(f"{url}/result").status_code == 409
    server.until(lambda: server.client.get(url).json()["step"])
    server.client.delete(url)
    ended = server.until(
        lambda: (state := server.client.get(url).json())["state"] == "cancelled" and state
    )
    assert 0 < ended["step"] < 120
    assert client.images.generate(prompt="a").data


def test_a_client_that_leaves_cancels_its_request(server: Any) -> None:
    cancelled = 'graphrun_requests_total{graph="flux-tiny",status="409"}'
    first_pictures = [
        line
        for line in server.client.get("/metrics").text.splitlines()
        if line.startswith(cancelled)
    ]
    body = b'{"prompt": "a", "steps": 120}'
    head = (
        f"Host: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    host = httpx.URL(server.url)
    with socket.create_connection((host.host, host.port)) as connection:
        connection.sendall(b"POST /v1/images/generations HTTP/1.1\r\n" + head.encode() + body)
        server.until(lambda: server.metric("running_requests") == 1)
    server.until(lambda: server.metric("running_requests") == 0)
    second_pictures = [
        line
        for line in server.client.get("/metrics").text.splitlines()
        if line.startswith(cancelled)
    ]
    assert second_pictures != first_pictures


@pytest.mark.sweep("serve")
def test_a_planner_that_is_killed_is_replaced_and_nobody_waits_for_it_in_vain(server: Any) -> None:
    def planner() -> psutil.Process:
        children = (
            child
            for child in psutil.Process(server.process.pid).children()
            if child.pid != server.worker.pid
        )
        (planner_process,) = (
            child for child in children if "resource_tracker" not in " ".join(child.cmdline())
        )
        return planner_process

    first_planner = planner()
    first_planner.kill()
    server.until(
        lambda: not first_planner.is_running() or first_planner.status() == psutil.STATUS_ZOMBIE
    )
    body = {"prompt": "a", "size": "48x32", "steps": 1}
    answers = [server.client.post("/v1/images/generations", json=body, timeout=600)]
    while answers[-1].status_code == 503:
        assert answers[-1].headers["retry-after"]
        time.sleep(1)
        answers.append(server.client.post("/v1/images/generations", json=body, timeout=600))
    assert answers[-1].status_code == 200
    assert planner().pid != first_planner.pid


@pytest.mark.sweep("serve")
def test_a_worker_that_is_killed_is_replaced_and_its_request_goes_on(server: Any) -> None:
    """The picture is that of a request that nothing interrupted."""
    job = job_of(server, steps=120, seed=5)
    url = f"/v1/jobs/{job['id']}"
    server.until(lambda: server.client.get(url).json()["step"] > 2)
    server.worker.kill()
    server.until(lambda: server.client.get(url).json()["state"] == "done")
    assert server.metric("worker_restarts_total") == 1
    resumed_answer, whole = server.client.get(f"{url}/result").json(), None
    whole = server.client.post(
        "/v1/images/generations", json={"prompt": "a", "steps": 120, "seed": 5}
    ).json()
    assert picture_of(resumed_answer).tobytes() == picture_of(whole).tobytes()
    resumed = {
        stage["name"]: stage["measured_seconds"] for stage in resumed_answer["graphrun"]["stages"]
    }
    in_whole = {stage["name"]: stage["measured_seconds"] for stage in whole["graphrun"]["stages"]}
    assert resumed["denoise"] < in_whole["denoise"], "it went on at its last step"


def picture_of(answer: dict[str, Any]) -> Any:
    return Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"])))


def test_those_that_mean_harm_are_refused(server: Any) -> None:
    post = server.client.post
    statuses = {
        "10 MB prompt": post("/v1/images/generations", json={"prompt": "x" * 10**7}).status_code,
        "long prompt": post("/v1/images/generations", json={"prompt": "x" * 10**5}).status_code,
        "nested": post(
            "/v1/images/generations",
            content=b"[" * 10**5,
            headers={"Content-Type": "application/json"},
        ).status_code,
        "a form of another site": post(
            "/v1/images/generations", content=b"{}", headers={"Content-Type": "text/plain"}
        ).status_code,
        "path": server.client.get("/v1/images/files/..%2f..%2fetc%2fpasswd").status_code,
        "asset": server.client.get("/page/..%2fapp.py").status_code,
        "no key": httpx.get(f"{server.url}/v1/models").status_code,
        "another scheme": httpx.get(
            f"{server.url}/v1/models", headers={"Authorization": f"Basic {KEY}"}
        ).status_code,
    }
    expected = [413, 422, 400, 415, 404, 404, 401, 401]
    assert statuses == dict(zip(statuses, expected, strict=True))
    host = httpx.URL(server.url)
    for half in (
        b"",
        b"POST /v1/images/gen",
        b"POST /v1/images/generations HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{",
    ):
        with socket.create_connection((host.host, host.port)) as connection:
            connection.sendall(half)
            assert server.client.get("/healthz").status_code == 200
    assert server.client.get("/readyz").status_code == 200


def test_libraries_write_nothing_to_the_log_when_the_processes_import_them(
    server: Any, client: openai.OpenAI
) -> None:
    assert client.images.generate(prompt="a").data
    assert not [
        line
        for line in server.log.read_text().splitlines()
        for part in DROPPED.values()
        if part in line
    ]


def test_openapi_and_the_page_name_nothing_elsewhere(server: Any) -> None:
    assert {
        "/v1/images/generations",
        "/v1/images/edits",
        "/v1/jobs",
        "/v1/models",
    } <= server.client.get("/openapi.json").json()["paths"].keys()
    front = server.client.get("/")
    assert "default-src 'none'" in front.headers["content-security-policy"]
    for text in (
        front.text,
        server.client.get("/page/page.js").text,
        server.client.get("/page/page.css").text,
    ):
        assert "://" not in text

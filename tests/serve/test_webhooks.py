"""Webhooks: only origins that the operator allows are called, signed as OpenAI's client checks it,
again after failures, and by the next server."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from graphrun.errors import InputError
from graphrun.serve.bodies import VIDEO, PictureRequest, RequestShape
from graphrun.serve.errors import Refused
from graphrun.serve.jobs import Job
from graphrun.serve.records import JobRecords
from graphrun.serve.state import JobStore
from graphrun.serve.webhooks import (
    DELAYS,
    Delivery,
    Webhooks,
    origin_of_url,
    read_secrets,
    webhook_origin,
)

ORIGIN = "https://hooks.example.com"
URL = f"{ORIGIN}/done?job=1"
KEY = bytes(range(32))
SECRET = "whsec_" + base64.b64encode(KEY).decode()


def job_of(tmp_path: Path, state: str = "done", suffix: str = ".png") -> Job:
    request = PictureRequest(
        "flux-tiny",
        RequestShape("flux-tiny", ()),
        ({"prompt": "a"},),
        suffix,
        as_url=False,
        webhook=URL,
        definition=None,
    )
    return Job(request, "", tmp_path, preview_wanted=False, state=state)


class Receiver:
    """Answers with ``statuses``, the last one again and again; an error is raised."""

    def __init__(self, *statuses: int | Exception) -> None:
        self._statuses, self.calls = list(statuses), list[httpx.Request]()
        self.delays = list[float]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.calls.append(request)
        result = self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]
        if isinstance(result, Exception):
            raise result
        return httpx.Response(result, headers={"location": "http://127.0.0.1/secret"})

    async def sleep(self, seconds: float) -> None:
        self.delays.append(seconds)


def deliver(
    receiver: Receiver,
    delivery: Delivery,
    *,
    store: JobStore | None = None,
    origins: Sequence[str] = (ORIGIN,),
    start: Callable[[Webhooks], None] | None = None,
) -> None:
    async def act() -> None:
        transport = httpx.MockTransport(receiver)
        hooks = Webhooks(origins, (KEY,), store, transport=transport, sleep=receiver.sleep)
        if start is None:
            hooks.deliver(delivery)
        else:
            start(hooks)
        while hooks._tasks:
            await asyncio.sleep(0)

    asyncio.run(act())


def test_openais_client_accepts_the_call(tmp_path: Path) -> None:
    deliver(receiver := Receiver(200), Delivery.of(job := job_of(tmp_path, suffix=VIDEO)))
    (call,) = receiver.calls
    client = openai.OpenAI(api_key="key", webhook_secret=SECRET)
    event: Any = client.webhooks.unwrap(call.content, dict(call.headers))
    assert (event.type, event.data.id) == ("video.completed", job.id)
    assert (call.method, str(call.url), receiver.delays) == ("POST", URL, [])
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(call.content + b" ", dict(call.headers))
    other = "whsec_" + base64.b64encode(bytes(32)).decode()
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(call.content, dict(call.headers), secret=other)


@pytest.mark.parametrize(
    ("state", "suffix", "kind"),
    [
        ("done", ".png", "job.completed"),
        ("failed", ".png", "job.failed"),
        ("cancelled", ".png", "job.cancelled"),
        ("cancelled", VIDEO, "video.failed"),
    ],
)
def test_an_event_says_how_a_job_ended_and_nothing_of_the_request(
    tmp_path: Path, state: str, suffix: str, kind: str
) -> None:
    event = json.loads(Delivery.of(job := job_of(tmp_path, state, suffix)).body)
    assert (event["type"], event["data"]) == (kind, {"id": job.id})


def test_failures_are_tried_again_with_growing_delays_under_the_same_id(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failures = (503, httpx.ConnectError("no route"), 302)
    deliver(receiver := Receiver(*failures, 204), delivery := Delivery.of(job_of(tmp_path)))
    assert receiver.delays == list(DELAYS[:3])
    assert [str(call.url) for call in receiver.calls] == [URL] * 4, "no redirect is followed"
    assert {call.headers["webhook-id"] for call in receiver.calls} == {delivery.id}
    log = capfd.readouterr().err
    assert "reason=302" in log
    assert "reason=ConnectError" in log
    assert "job=1" not in log, "no texts of clients"


@pytest.mark.parametrize(("status", "count"), [(500, len(DELAYS) + 1), (410, 1)])
def test_a_webhook_is_given_up_at_last(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], status: int, count: int
) -> None:
    deliver(receiver := Receiver(status), Delivery.of(job_of(tmp_path)))
    assert len(receiver.calls) == count
    assert "webhook dropped id=evt_" in (log := capfd.readouterr().err)
    assert f"reason={status} tries={count}" in log


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com.evil.com/",
        "https://hooks.example.com@evil.com/",
        "https://hooks.example.com:pass@evil.com/",
        "https://evil.com/https://hooks.example.com/",
        "https://evil.com\\@hooks.example.com/",
        "https://evil.com#@hooks.example.com/",
        "https://evil.com?@hooks.example.com/",
        "https://hooks.example.com:8443/",
        "http://hooks.example.com/",
        "http://127.0.0.1:8000/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/",
        "http://0x7f000001/",
        "file:///etc/passwd",
        "gopher://hooks.example.com/",
        "//hooks.example.com/",
        "hooks.example.com",
        "https://hooks.example.com/\r\nHost: evil.com",
        "https://hooks.example.com/ x",
        "https://h\u043eoks.example.com/",
        "https://hooks.example.com/" + "x" * 2000,
        "https://",
        "https://hooks.example.com:99999/",
    ],
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(Refused) as refusal:
        Webhooks((ORIGIN,), (KEY,), None).check(url)
    assert (refusal.value.status, refusal.value.param) == (422, "webhook")


def test_allowed_addresses_pass_in_any_spelling() -> None:
    hooks = Webhooks((webhook_origin(f"{ORIGIN}:443/"), "http://10.0.0.1:9000"), (KEY,), None)
    for url in (URL, "HTTPS://HOOKS.example.com:443/x", ORIGIN, "http://10.0.0.1:9000/a?b=c"):
        hooks.check(url)
    with pytest.raises(Refused, match="calls no webhooks"):
        Webhooks((), (), None).check(URL)


@pytest.mark.parametrize("value", ["*", "hooks.example.com", f"{ORIGIN}/path", "ftp://a", "a b"])
def test_an_origin_in_another_form_is_refused(value: str) -> None:
    with pytest.raises(InputError, match="--allow-webhook"):
        webhook_origin(value)
    assert origin_of_url("https://u@h/") is None


def test_secrets_are_read_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"# since May\n{SECRET}\n\n{SECRET} # old\n")
    assert read_secrets(file) == (KEY, KEY)
    for text in ("", "whsec_", "whsec_short", SECRET.removeprefix("whsec_"), "whsec_" + "?" * 40):
        file.write_text(text)
        with pytest.raises(InputError, match="this prints one") as error:
            read_secrets(file)
        assert SECRET.removeprefix("whsec_") not in str(error.value), "secrets are not shown"


def test_deliveries_outlive_the_server_and_go_where_is_allowed_now(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = JobStore(tmp_path / "state")
    store.end(job_of(tmp_path), delivery := Delivery.of(job_of(tmp_path)))
    store.put_delivery(Delivery("evt_other", "https://old.example.com/", "{}"))
    store.close()
    assert b"prompt" not in delivery.body.encode()

    store = JobStore(tmp_path / "state")
    deliver(receiver := Receiver(500, 200), delivery, store=store, start=Webhooks.start)
    assert [call.headers["webhook-id"] for call in receiver.calls] == [delivery.id] * 2
    assert store.deliveries() == []
    assert "webhook dropped id=evt_other origin=https://old.example.com" in capfd.readouterr().err
    store.close()


def test_tries_are_counted_over_servers(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "state")
    delivery = Delivery.of(job_of(tmp_path))

    async def act() -> None:
        receiver = Receiver(500)

        async def wait(_: float) -> None:
            await asyncio.Event().wait()

        transport = httpx.MockTransport(receiver)
        hooks = Webhooks((ORIGIN,), (KEY,), store, transport=transport, sleep=wait)
        hooks.deliver(delivery)
        while not store.deliveries():
            await asyncio.sleep(0)
        hooks.close()

    asyncio.run(act())
    assert [record.tries for record in store.deliveries()] == [1]
    deliver(receiver := Receiver(500), delivery, store=store, start=Webhooks.start)
    assert len(receiver.calls) == len(DELAYS)
    store.close()


def test_a_job_that_ends_calls_its_webhook_once(tmp_path: Path) -> None:
    async def act() -> None:
        records = JobRecords(tmp_path / "state", (ORIGIN,), (KEY,))
        records.webhooks._transport = httpx.MockTransport(receiver := Receiver(200))
        job = job_of(tmp_path, "waiting")
        with records.admission(job, is_stored=True):
            records.add(job)
        assert not receiver.calls
        job.state = "done"
        records.end(job)
        while records.webhooks._tasks:
            await asyncio.sleep(0)
        assert len(receiver.calls) == 1
        assert records.store is not None
        assert records.store.deliveries() == []
        records.close()

    asyncio.run(act())


def test_requests_name_webhooks_for_jobs_only(port_of: Any, tmp_path: Path) -> None:
    async def ask() -> list[tuple[int, str]]:
        async with (
            port_of(tmp_path, webhooks=(ORIGIN,), webhook_keys=(KEY,)) as port,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port.number}",
                headers={"Authorization": "Bearer a key"},
            ) as client,
        ):
            answers = [
                await client.post(path, json={"prompt": "a", "webhook": url})
                for path, url in (
                    ("/v1/images/generations", URL),
                    ("/v1/jobs", "http://127.0.0.1/"),
                    ("/v1/jobs", 7),
                )
            ]
            return [(answer.status_code, answer.json()["error"]["message"]) for answer in answers]

    texts = asyncio.run(ask())
    assert [status for status, _ in texts] == [422] * 3
    assert "send it to /v1/jobs" in texts[0][1]
    assert "calls no webhooks at http://127.0.0.1" in texts[1][1]

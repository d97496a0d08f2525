"""Webhooks: tell an address that a job has ended.

    POST URL    {"id": "evt_...", "object": "event", "type": "job.completed", "data": {"id": JOB}}
    headers     webhook-id, webhook-timestamp, webhook-signature: v1,HMAC-SHA256

Signed as Standard Webhooks 1.0.0 and OpenAI do. Clients name the address, so only origins that the
operator allows are called, no redirect is followed, and nothing of the answer but its status is
read. A delivery without a 2xx is tried again; with a `DeliveryStore`, also by the next
server.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import httpx

from graphrun.errors import InputError
from graphrun.reading import read_text
from graphrun.serve.bodies import VIDEO, bad
from graphrun.serve.log import log

if TYPE_CHECKING:
    from graphrun.serve.jobs import Job

DELAYS = (5.0, 60.0, 600.0, 3600.0, 6 * 3600.0)  # seconds before each further try
TRY_SECONDS = 10.0  # of one try
MOST_CALLS = 8  # at a time
URL_CHARACTERS = 2000
SECRET_BYTES = range(24, 65)  # of Standard Webhooks
PREFIX = "whsec_"
MAKE = (
    "python -c 'import base64, secrets; "
    'print("whsec_" + base64.b64encode(secrets.token_bytes(32)).decode())\''
)
PORTS = {"http": 80, "https": 443}
GONE = 410  # the receiver wants no more
EVENTS = {"done": "completed", "failed": "failed", "cancelled": "cancelled"}


@dataclass(frozen=True, slots=True)
class Delivery:
    """A notification that has not arrived. ``tries``: that failed."""

    id: str
    url: str
    body: str
    tries: int = 0

    @classmethod
    def of(cls, job: Job) -> Delivery:
        """Return the notification that ``job`` has ended."""
        id, is_video = f"evt_{secrets.token_hex(16)}", job.request.suffix == VIDEO
        # OpenAI has no event for a cancelled video
        end = EVENTS[job.state] if not is_video or job.state == "done" else "failed"
        event = {
            "id": id,
            "object": "event",
            "created_at": int(time.time()),
            "type": f"{'video' if is_video else 'job'}.{end}",
            "data": {"id": job.id},
        }
        return cls(id, job.request.webhook, json.dumps(event))


class DeliveryStore(Protocol):
    """Where deliveries outlive the server (`graphrun.serve.state.JobStore`)."""

    def put_delivery(self, delivery: Delivery) -> None: ...

    def drop_delivery(self, delivery: Delivery) -> None: ...

    def deliveries(self) -> list[Delivery]: ...


class Webhooks:
    """Calls addresses of ``origins`` (`origin_of_url`), signed with each of ``keys``. ``store``:
    where deliveries outlive the server. ``transport`` and ``sleep``: for tests."""

    def __init__(
        self,
        origins: Sequence[str],
        keys: Sequence[bytes],
        store: DeliveryStore | None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._origins, self._keys, self._store = frozenset(origins), tuple(keys), store
        self._transport, self._sleep = transport, sleep
        self._calls = asyncio.Semaphore(MOST_CALLS)
        self._tasks = set[asyncio.Future[None]]()

    def check(self, url: str) -> None:
        """Raise Refused (422) unless ``url`` may be called."""
        origin = origin_of_url(url)
        if not self._origins:
            raise bad("webhook", "this server calls no webhooks")
        if origin is None:
            raise bad("webhook", "it is no address such as https://hooks.example.com/done")
        if origin not in self._origins:
            raise bad("webhook", f"this server calls no webhooks at {origin[:100]}")

    def start(self) -> None:
        """Deliver what an earlier server did not."""
        for delivery in self._store.deliveries() if self._store is not None else ():
            if origin_of_url(delivery.url) in self._origins:
                self.deliver(delivery)
            else:
                self._drop(delivery, "webhook dropped", reason="its origin is not allowed now")

    def deliver(self, delivery: Delivery) -> None:
        """Call the address until it answers with a 2xx."""
        task = asyncio.ensure_future(self._deliver(delivery))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _deliver(self, delivery: Delivery) -> None:
        while True:
            async with self._calls:
                result = await self._call(delivery)
            if 200 <= (result if isinstance(result, int) else 0) < 300:
                self._drop(delivery)
                return
            delivery = replace(delivery, tries=delivery.tries + 1)
            if result == GONE or delivery.tries > len(DELAYS):
                self._drop(delivery, "webhook dropped", reason=result, tries=delivery.tries)
                return
            if self._store is not None:
                self._store.put_delivery(delivery)
            self._log("webhook failed", delivery, reason=result, tries=delivery.tries)
            await self._sleep(DELAYS[delivery.tries - 1])

    async def _call(self, delivery: Delivery) -> int | str:
        """Return the status of the answer, or why there is none."""
        headers = {"content-type": "application/json", "user-agent": "graphrun"}
        headers |= signature(delivery.id, int(time.time()), delivery.body, self._keys)
        try:
            async with (
                asyncio.timeout(TRY_SECONDS),
                httpx.AsyncClient(transport=self._transport, trust_env=False) as client,
                client.stream(
                    "POST", delivery.url, content=delivery.body, headers=headers
                ) as answer,
            ):
                return answer.status_code
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
            return type(error).__name__

    def _drop(self, delivery: Delivery, event: str = "", **values: object) -> None:
        if self._store is not None:
            self._store.drop_delivery(delivery)
        if event:
            self._log(event, delivery, **values)

    def _log(self, event: str, delivery: Delivery, **values: object) -> None:
        log(event, id=delivery.id, origin=origin_of_url(delivery.url), **values)


def origin_of_url(url: str) -> str | None:
    """Return scheme, host and port of ``url`` in the form in which they are called; None if ``url``
    is no plain HTTP address. The HTTP client parses it here as it does for the call."""
    is_plain = url.isascii() and url.isprintable() and not {*url} & {*' \\"<>^`{|}'}
    if not is_plain or len(url) > URL_CHARACTERS:
        return None
    try:
        address = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        return None
    if address.scheme not in PORTS or not address.host or address.userinfo:
        return None
    host = address.raw_host.decode("ascii")
    port = address.port or PORTS[address.scheme]
    name = f"[{host}]" if ":" in host else host
    return f"{address.scheme}://{name}" + (f":{port}" if port != PORTS[address.scheme] else "")


def webhook_origin(value: str) -> str:
    """Check and return a value of ``--allow-webhook``. Raises InputError."""
    origin = origin_of_url(value)
    if origin is None or httpx.URL(value).raw_path != b"/" or httpx.URL(value).fragment:
        raise InputError(
            f"--allow-webhook {value}: type scheme and name, with the port where the address has "
            "one, such as https://hooks.example.com"
        )
    return origin


def read_secrets(path: Path) -> tuple[bytes, ...]:
    """Return the keys in the file of ``--webhook-secret``, one ``whsec_...`` a line. Raises
    InputError."""
    keys = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not (text := line.partition("#")[0].strip()):
            continue
        try:
            key = base64.b64decode(text.removeprefix(PREFIX), validate=True)
        except binascii.Error:
            key = b""
        if not text.startswith(PREFIX) or len(key) not in SECRET_BYTES:
            raise InputError(f"is no secret; this prints one: {MAKE}", f"{path}:{number}")
        keys.append(key)
    if not keys:
        raise InputError(f"has no secret; this prints one: {MAKE}", str(path))
    return tuple(keys)


def signature(id: str, second: int, body: str, keys: Sequence[bytes]) -> dict[str, str]:
    """Return the headers of a signed ``body``, with a signature by each of ``keys``."""
    content = f"{id}.{second}.{body}".encode()
    digests = (hmac.new(key, content, hashlib.sha256).digest() for key in keys)
    texts = (f"v1,{base64.b64encode(digest).decode()}" for digest in digests)
    return {
        "webhook-id": id,
        "webhook-timestamp": str(second),
        "webhook-signature": " ".join(texts),
    }

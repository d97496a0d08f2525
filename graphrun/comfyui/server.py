"""A client of `graphrun serve`, with the standard library alone (docs/serving.md).

A picture is a job: its events have steps and previews, and it can be cancelled.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

from graphrun.comfyui.progress import NodeProgress, ReportProgress, Stopped
from graphrun.errors import GraphrunError, InputError
from graphrun.units import show_seconds, show_size

DEFAULT_URL = "http://127.0.0.1:8000"
ANSWER_SECONDS = 600.0  # for an answer, which may wait for a plan
LIST_SECONDS = 2.0  # for the list of models
RETRY_SECONDS = 1.0  # until events are asked for again
MOST_RETRIES = 5
MOST_SUGGESTIONS = 3  # in an error
ESCAPES = str.maketrans({'"': "%22", "\r": "%0D", "\n": "%0A"})  # of names in a form, as in HTML


class ServerRefusal(GraphrunError):
    """The server refused a request, or did not answer."""


class ServerClient:
    """The server at ``url``. ``key``: its API key; "": none. Raises InputError for another URL."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url, self._key = url.strip().rstrip("/").removesuffix("/v1"), key.strip()
        parts = urlsplit(self.url)
        try:
            self._address = (parts.hostname or "", parts.port)
        except ValueError:
            self._address = ("", None)
        if parts.scheme not in ("http", "https") or not self._address[0]:
            raise InputError(f"url: {url!r} is not the address of a server; type {DEFAULT_URL}")
        self._is_secure, self._path = parts.scheme == "https", parts.path
        if any(not " " <= character < "\x7f" for character in self._key):
            raise InputError("key: it has characters that no key has; paste it again")

    def models(self, timeout_seconds: float = LIST_SECONDS) -> list[dict[str, Any]]:
        """Return the graphs of the server, as ``/v1/models`` shows them."""
        return list(self._json("GET", "/v1/models", timeout_seconds=timeout_seconds)["data"])

    def submit(self, fields: Mapping[str, Any], files: Mapping[str, bytes]) -> str:
        """Submit a job with ``files``, PNG by name, and return its id."""
        if files:
            kind, body = _form(fields, files)
        else:
            kind, body = "application/json", json.dumps(fields).encode()
        return str(self._json("POST", "/v1/jobs", body, kind)["id"])

    def state(self, id: str) -> dict[str, Any]:
        """Return a job as ``/v1/jobs/ID`` shows it."""
        return dict(self._json("GET", f"/v1/jobs/{id}"))

    def result(self, id: str) -> dict[str, Any]:
        """Return the answer of a job that has ended. Raises ServerRefusal: why it failed."""
        return dict(self._json("GET", f"/v1/jobs/{id}/result"))

    def cancel(self, id: str) -> None:
        """Cancel a job, at the end of its step. Does nothing if the server is gone."""
        with suppress(ServerRefusal):
            self._json("DELETE", f"/v1/jobs/{id}")

    def events(self, id: str) -> Iterator[tuple[str, str]]:
        """Yield the name and the data of each event of a job, until the connection ends."""
        with closing(self._connection(None)) as connection:
            answer = self._ask(connection, "GET", f"/v1/jobs/{id}/events")
            name = ""
            for raw_line in answer:
                field, _, value = raw_line.decode().rstrip("\r\n").partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield name, value

    def _connection(self, timeout_seconds: float | None) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(*self._address, timeout=timeout_seconds)

    def _json(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        kind: str = "",
        timeout_seconds: float = ANSWER_SECONDS,
    ) -> Any:
        with closing(self._connection(timeout_seconds)) as connection:
            answer = self._ask(connection, method, path, body, kind)
            try:
                return json.loads(answer.read())
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise self._unanswered(error) from None

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None = None,
        kind: str = "",
    ) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        headers |= {"Content-Type": kind} if kind else {}
        try:
            connection.request(method, self._path + path, body, headers)
            answer = connection.getresponse()
            if answer.status < 400:
                return answer
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._unanswered(error) from None
        raise ServerRefusal(self._refusal(answer.status, content))

    def _unanswered(self, error: Exception) -> ServerRefusal:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return ServerRefusal(
            f"{self.url}: no graphrun server answers ({reason}): start one with graphrun serve "
            "flux-dev --vram 8G, or type the address of another one in url"
        )

    def _refusal(self, status: int, content: bytes) -> str:
        """Return the text of an answer that refuses: the message, and what would help."""
        try:
            error = json.loads(content)["error"]
            message = str(error["message"])
        except (ValueError, KeyError, TypeError):
            return (
                f"{self.url} answers with status {status} and is no graphrun server: type the "
                "address that graphrun serve prints in url"
            )
        if status == 401:
            return f"{self.url}: {message}; paste a key of the server in key"
        texts = [str(item["text"]) for item in error.get("suggestions", ())][:MOST_SUGGESTIONS]
        helps = f". What helps on the server: {'; '.join(texts)}" if texts else ""
        return f"{message}{helps}"


class ServerJob:
    """A job of ``client``, which `run` submits and `stop` cancels, from another thread."""

    def __init__(
        self, client: ServerClient, fields: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> None:
        self._client, self._fields, self._files = client, fields, files
        self._is_stopped, self._id = threading.Event(), ""

    def stop(self) -> None:
        self._is_stopped.set()
        if self._id:
            self._client.cancel(self._id)

    def run(self, report: ReportProgress) -> dict[str, Any]:
        """Submit the job, report its progress, and return its answer.

        Raises ServerRefusal, and Stopped if it was stopped before it began.
        """
        client = self._client
        self._id = client.submit(self._fields, self._files)
        if self._is_stopped.is_set():
            client.cancel(self._id)
            raise Stopped("cancelled")
        retries = 0
        while not self._has_ended(report):
            retries += 1
            if retries > MOST_RETRIES:
                raise ServerRefusal(f"{client.url}: the events of job {self._id} end too early")
            time.sleep(RETRY_SECONDS)
        return client.result(self._id)

    def _has_ended(self, report: ReportProgress) -> bool:
        """Report the events of the job, and return whether it has ended."""
        value, total = 0, 1
        with suppress(OSError, http.client.HTTPException):
            for name, data in self._client.events(self._id):
                if name == "preview":
                    report(NodeProgress(value, total, _png(base64.b64decode(data))))
                    continue
                state = json.loads(data)
                steps = max(1, state["steps"])
                value, total = state["pictures"] * steps + state["step"], state["of"] * steps
                report(NodeProgress(min(value, total), total))
                if name == "end":
                    return True
        return self._client.state(self._id)["state"] in ("done", "failed", "cancelled")


def pictures_of(answer: Mapping[str, Any]) -> list[Any]:
    """Return the pictures of an answer as PIL pictures."""
    return [_png(base64.b64decode(item["b64_json"])) for item in answer["data"]]


def figures_text(answer: Mapping[str, Any]) -> str:
    """Return the planned and measured numbers of an answer, a line for each stage."""
    figures = answer["graphrun"]
    planned_bytes, measured_bytes = (figures["peak_bytes"][key] for key in ("planned", "measured"))
    rows = [
        f"{stage['name']}: {show_seconds(stage['measured_seconds'])} "
        f"(planned {show_seconds(stage['planned_seconds'])})"
        for stage in figures["stages"]
    ]
    seeds = [str(item["seed"]) for item in answer["data"] if "seed" in item]
    return "\n".join(
        [
            figures["verdict"],
            *rows,
            f"peak memory: {show_size(measured_bytes)} (planned {show_size(planned_bytes)})",
            *([f"seeds: {', '.join(seeds)}"] if seeds else []),
        ]
    )


def png_of(picture: Any) -> bytes:
    """Return a PIL picture as the bytes of a PNG file."""
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()


def _png(content: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(content)).convert("RGB")


def _form(fields: Mapping[str, Any], files: Mapping[str, bytes]) -> tuple[str, bytes]:
    """Return the content type and the body of a form (RFC 7578)."""
    boundary = secrets.token_hex(16)
    parts = [
        (
            f'name="{name.translate(ESCAPES)}"',
            "text/plain; charset=utf-8",
            str(value).encode(),
        )
        for name, value in fields.items()
    ]
    parts += [
        (f'name="{name}"; filename="{name}.png"', "image/png", content)
        for name, content in files.items()
    ]
    body = b"".join(
        f"--{boundary}\r\nContent-Disposition: form-data; {disposition}\r\n"
        f"Content-Type: {kind}\r\n\r\n".encode()
        + content
        + b"\r\n"
        for disposition, kind, content in parts
    )
    return f"multipart/form-data; boundary={boundary}", body + f"--{boundary}--\r\n".encode()


class ModelNames:
    """The names of a server's models, for a menu. Asking never waits: a thread asks the server.

    The server is the last one that answered a node, at first the one that the environment names.
    """

    def __init__(self) -> None:
        self._client: ServerClient | None = None
        self._names: tuple[str, ...] = ()
        self._thread: threading.Thread | None = None

    def refresh(self, client: ServerClient | None = None) -> tuple[str, ...]:
        """Ask the server in a thread, and return the names that it gave before.

        ``client``: of another server; None: of the same one.
        """
        self._client = client or self._client
        if self._client is not None and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._ask, args=[self._client], daemon=True)
            self._thread.start()
        return self._names

    def wait(self) -> tuple[str, ...]:
        """Wait until the server has answered, and return the names."""
        if self._thread is not None:
            self._thread.join()
        return self._names

    def _ask(self, client: ServerClient) -> None:
        with suppress(GraphrunError):
            self._names = tuple(str(model["id"]) for model in client.models())

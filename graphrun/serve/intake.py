"""Read requests: bound bodies before anything parses them, check keys, and parse."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphrun.errors import InputError
from graphrun.graph import media
from graphrun.graph.graph import Graph
from graphrun.reading import parse_json
from graphrun.serve.asked import (
    PictureRequest,
    asked_of,
    graph_of,
    picture_inputs,
)
from graphrun.serve.errors import Refused
from graphrun.serve.keys import ApiKey, owner_of
from graphrun.serve.settings import Bounds

T = TypeVar("T")


class Bounded:
    """ASGI middleware that bounds the body of a request, in bytes and in seconds.

    An answer sent before the end of the body closes the connection. The rest of the body is then
    read, up to the size limit, so that the client gets the answer instead of a reset (RFC 9112,
    9.6).
    """

    def __init__(self, app: ASGIApp, bounds: Bounds) -> None:
        self._app, self._bounds = app, bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive, self._bounds)
        started = early = False

        async def answer(message: Message) -> None:
            nonlocal started, early
            started = True
            if message["type"] == "http.response.start" and not body.ended:
                early = True
                message = {
                    **message,
                    "headers": [*message.get("headers", ()), (b"connection", b"close")],
                }
            elif early and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await body.discard()
                message = {"type": "http.response.body"}
            await send(message)

        try:
            await self._app(scope, body.receive, answer)
        # uvicorn is stopping; without this it would log a traceback and answer 500
        except asyncio.CancelledError:
            if not started:
                error = Refused.stopping()
                await JSONResponse(error.body, error.status, headers=error.headers)(
                    scope, receive, send
                )


class _Body:
    """The body of one request, as it arrives. ``ended``: all of it has arrived."""

    def __init__(self, scope: Scope, receive: Receive, bounds: Bounds) -> None:
        headers = dict(scope["headers"])
        self._length, self._got = int(headers.get(b"content-length", b"0")), 0
        form = headers.get(b"content-type", b"").lower().startswith(b"multipart/form-data")
        self._limit_bytes = bounds.upload_bytes if form else bounds.body_bytes
        self._receive, self._bounds = receive, bounds
        self._deadline = asyncio.get_running_loop().time() + bounds.body_seconds
        self.ended = self._length == 0 and b"transfer-encoding" not in headers

    async def receive(self) -> Message:
        """Return the next message. Raises Refused if the body is too large or slow, or the client
        left."""
        if self.ended:
            return await self._receive()
        self._refuse_large(self._length)
        message = await self._part()
        self._got += len(message.get("body", b""))
        self._refuse_large(self._got)
        return message

    async def discard(self) -> None:
        rest_bytes = self._limit_bytes
        with contextlib.suppress(Refused):
            while not self.ended and rest_bytes > 0:
                rest_bytes -= len((await self._part()).get("body", b""))

    async def _part(self) -> Message:
        start, idle = asyncio.get_running_loop().time(), self._bounds.idle_seconds
        try:
            async with asyncio.timeout_at(min(self._deadline, start + idle)):
                message = await self._receive()
        except TimeoutError:
            late = f"the body did not come within {self._bounds.body_seconds:g} s"
            text = (
                late
                if start + idle >= self._deadline
                else f"nothing came for {idle:g} s, and the body has not ended"
            )
            raise Refused(408, text, "timeout") from None
        if message["type"] == "http.disconnect":
            raise Refused(499, "the client has left", "client_left")  # nobody reads this answer
        self.ended = not message.get("more_body", False)
        return message

    def _refuse_large(self, nbytes: int) -> None:
        if nbytes > self._limit_bytes:
            raise Refused(413, f"the body has more than {self._limit_bytes:,} bytes", "too_large")


def owner_in(request: Request, keys: Mapping[str, ApiKey]) -> str:
    """Return the name whose key the request has; empty if the server has no keys. Raises Refused
    (401)."""
    if not keys:
        return ""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    owner = owner_of(key.strip(), keys) if scheme.lower() == "bearer" else None
    if owner is None:
        text = "the API key is wrong" if key else "an API key is needed: Authorization: Bearer KEY"
        raise Refused(401, text, "invalid_api_key")
    request.state.owner = owner
    return owner


async def generation_in(
    request: Request, graphs: Mapping[str, Graph], bounds: Bounds
) -> PictureRequest:
    """Return the request in a JSON body. Raises Refused."""
    body = await _json(request)
    graph = graph_of(body, graphs)
    _refuse_missing(graph, {}, "send it to /v1/images/edits")
    return asked_of(body, graph, bounds, {})


async def edit_in(
    request: Request, graphs: Mapping[str, Graph], bounds: Bounds, folder: Path
) -> PictureRequest:
    """Return the request in a form, and write its files to ``folder``. Raises Refused."""
    if not _is_form(request):
        raise Refused(415, "send a form, with Content-Type: multipart/form-data", "not_a_form")
    body, uploads = await _form(request, bounds)
    graph = graph_of(body, graphs)
    if not picture_inputs(graph):
        takers = [other.name for other in graphs.values() if picture_inputs(other)]
        message = (
            f"{graph.name} takes no picture; models that do: {', '.join(takers) or 'none here'}"
        )
        raise Refused(404, message, "model_not_found", param="model")
    files = await _files(uploads, graph, folder)
    return asked_of(body, graph, bounds, files)


async def job_in(
    request: Request, graphs: Mapping[str, Graph], bounds: Bounds, folder: Path
) -> PictureRequest:
    """Return the request in a JSON body, or in a form with or without pictures. Raises Refused."""
    if _is_form(request):
        body, uploads = await _form(request, bounds)
        graph = graph_of(body, graphs)
        files = await _files(uploads, graph, folder)
        _refuse_missing(graph, files, "send it as image")
        generation = asked_of(body, graph, bounds, files)
    else:
        generation = await generation_in(request, graphs, bounds)
    if generation.streams:
        text = "stream: a job is answered at once; its events are at /v1/jobs/ID/events"
        raise Refused(422, text, "invalid_value", param="stream")
    return generation


async def video_in(
    request: Request, graphs: Mapping[str, Graph], bounds: Bounds, folder: Path
) -> PictureRequest:
    """Return the request for a video in a form or a JSON body, and write its files to ``folder``.
    Raises Refused."""
    uploads: dict[str, list[bytes]] = {}
    if _is_form(request):
        body, uploads = await _form(request, bounds)
    else:
        body = await _json(request)
    graph = graph_of(body, graphs, video=True)
    if "input_reference" in uploads:  # the first picture, in OpenAI's API
        uploads["image"] = uploads.pop("input_reference")
    files = await _files(uploads, graph, folder)
    _refuse_missing(graph, files, "send it as input_reference in a form")
    return asked_of(body, graph, bounds, files, video=True)


def _refuse_missing(graph: Graph, files: Mapping[str, Any], instruction: str) -> None:
    names = [name for name in picture_inputs(graph) if graph.inputs[name].required]
    if missing_names := [name for name in names if name not in files]:
        text = f"{graph.name} takes a picture: {instruction}"
        raise Refused(422, text, "picture_needed", param=missing_names[0])


def _is_form(request: Request) -> bool:
    kind = request.headers.get("content-type", "").lower()
    return kind.startswith("multipart/form-data")


async def _form(request: Request, bounds: Bounds) -> tuple[dict[str, Any], dict[str, list[bytes]]]:
    """Return the fields and the files of a form."""
    body: dict[str, Any] = {}
    uploads: dict[str, list[bytes]] = {}
    async with request.form(max_files=8, max_fields=64, max_part_size=bounds.body_bytes) as form:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                uploads.setdefault(name.removesuffix("[]"), []).append(await value.read())
            else:
                body[name] = value
    return body, uploads


async def _files(uploads: Mapping[str, list[bytes]], graph: Graph, folder: Path) -> dict[str, Any]:
    """Write ``uploads`` to ``folder``, and return the values of the inputs of ``graph`` that they
    are for: ``image`` is the first picture input."""
    names = picture_inputs(graph)
    places = {
        **({"image": names[0]} if names else {}),
        **{
            spec.name: spec.name for spec in graph.inputs.values() if spec.type in ("image", "mask")
        },
    }
    if "mask" in uploads and "mask" not in places:
        places["mask"] = next(
            (spec.name for spec in graph.inputs.values() if spec.type == "mask"), "mask"
        )
    files: dict[str, Any] = {}
    if uploads:
        folder.mkdir(parents=True)
    for name, contents in uploads.items():
        target = graph.inputs.get(places.get(name, ""))
        if target is None:
            raise Refused(
                422,
                f"{graph.name} takes no file {name[:100]!r}",
                "unknown_parameter",
                param=name[:100],
            )
        if len(contents) > 1:
            raise Refused(
                422, f"{name}: {len(contents)} files, and one is taken", "invalid_value", param=name
            )
        path = folder / target.name
        path.write_bytes(contents[0])
        files[target.name] = await asyncio.to_thread(_picture, name, target.type, path)
    return files


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of ``work``; cancel ``work`` if the client leaves."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refused(499, "the client has left", "client_left")  # nobody reads this answer
        return task.result()
    finally:
        for future in (task, leaving):
            future.cancel()


async def _json(request: Request) -> dict[str, Any]:
    """Return the JSON object in the body. Refuse other content types: browsers send some of them
    across sites without a preflight request."""
    if (
        request.headers.get("content-type", "").partition(";")[0].strip().lower()
        != "application/json"
    ):
        raise Refused(415, "send JSON, with Content-Type: application/json", "not_json")
    try:
        body = parse_json(await request.body())
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {str(error)[:200]}", "not_json") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body is not a JSON object", "not_json")
    return body


def _picture(name: str, kind: str, path: Path) -> Any:
    """Return the picture in the file ``path``. Raises Refused (422); its message hides the path."""
    try:
        return media.accept(kind, path)
    except (InputError, ValueError) as error:
        raise Refused(
            422, f"{name}: {str(error).replace(str(path), 'the file')}", "invalid_value", param=name
        ) from None

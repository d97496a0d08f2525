"""Read requests: bound bodies before anything parses them, check keys, and parse."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Depends, Request
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import UploadFile
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphrun.graph.graph import Graph
from graphrun.reading import parse_json
from graphrun.serve.bodies import PictureRequest, makes_videos, picture_inputs
from graphrun.serve.errors import Refused
from graphrun.serve.keys import owner_of
from graphrun.serve.settings import Bounds

T = TypeVar("T")
Route = Literal["generations", "edits", "jobs", "videos"]
JSON, FORM = "application/json", "multipart/form-data"
NAMES = {JSON: "JSON", FORM: "a form"}
CONTENT_TYPES: Mapping[Route, tuple[str, ...]] = {
    "generations": (JSON,),
    "edits": (FORM,),
    "jobs": (JSON, FORM),
    "videos": (JSON, FORM),
}
BEARER = HTTPBearer(auto_error=False)


class Bounded:
    """ASGI middleware that bounds the body of a request, in bytes and in seconds.

    Starlette's limit has no seconds, one size for JSON and forms, and an answer in plain text.

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
            late = f"the body did not come within {self._bounds.body_seconds:g} s (--arrival)"
            text = (
                late
                if start + idle >= self._deadline
                else f"nothing came for {idle:g} s (--idle), and the body has not ended"
            )
            raise Refused(408, text, "timeout") from None
        if message["type"] == "http.disconnect":
            raise Refused(499, "the client has left", "client_left")  # nobody reads this answer
        self.ended = not message.get("more_body", False)
        return message

    def _refuse_large(self, nbytes: int) -> None:
        if nbytes > self._limit_bytes:
            text = (
                f"the body has {nbytes:,} bytes or more; this server accepts {self._limit_bytes:,}"
            )
            raise Refused(413, text, "too_large")


async def owner_in(
    request: Request,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)],
) -> str:
    """Return the name whose key the request has; empty if the server has no keys. Raises Refused
    (401)."""
    if not (keys := request.app.state.service.keys):
        return ""
    owner = owner_of(credentials.credentials.strip(), keys) if credentials else None
    if owner is None:
        text = "an API key is needed: Authorization: Bearer KEY"
        raise Refused(
            401, "the API key in Authorization is wrong" if credentials else text, "invalid_api_key"
        )
    request.state.owner = owner
    return owner


Owner = Annotated[str, Depends(owner_in)]


def graph_of(name: Any, graphs: Mapping[str, Graph]) -> Graph:
    """Return the graph called ``name``. Raises Refused (404)."""
    if not isinstance(name, str) or name not in graphs:
        label = str(name)[:100]
        text = f"there is no model {label!r}; models are {', '.join(graphs)}"
        raise Refused(404, text, "model_not_found", param="model")
    return graphs[name]


def graph_for(route: Route, name: Any, graphs: Mapping[str, Graph]) -> Graph:
    """Return the graph called ``name``; for None, the first one that makes what ``route`` is for.
    Raises Refused (404)."""
    video = route == "videos"
    if name is None:
        alike = (graph for graph in graphs.values() if makes_videos(graph) == video)
        name = next(alike, next(iter(graphs.values()))).name
    graph = graph_of(name, graphs)
    takers = [other.name for other in graphs.values() if picture_inputs(other)]
    if route == "edits" and graph.name not in takers:
        text = f"takes no picture; models that do: {', '.join(takers) or 'none here'}"
    elif makes_videos(graph) != video:
        address = "/v1/images/generations" if video else "/v1/videos"
        text = f"makes {'pictures' if video else 'videos'}: send it to {address}"
    else:
        return graph
    raise Refused(404, f"{graph.name} {text}", "model_not_found", param="model")


async def picture_request(request: Request, route: Route, folder: Path) -> PictureRequest:
    """Return the request in a body of one of the content types of ``route``, and write its files to
    ``folder``. Raises Refused."""
    service, kinds = request.app.state.service, CONTENT_TYPES[route]
    # browsers send other types across sites without a preflight request
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in kinds:
        texts = (f"{NAMES[name]}, with Content-Type: {name}" for name in kinds)
        code = "not_json" if JSON in kinds else "not_a_form"
        raise Refused(415, f"send {', or '.join(texts)}", code)
    bounds = service.settings.bounds
    fields = await (_json(request) if kind == JSON else _form(request, bounds, folder))
    graph = graph_for(route, fields.get("model"), service.graphs)
    return await asyncio.to_thread(service.bodies[graph.name].read, fields)


async def _form(request: Request, bounds: Bounds, folder: Path) -> dict[str, Any]:
    """Return the fields of a form. Its files are written to ``folder``."""
    fields: dict[str, Any] = {}
    async with request.form(max_files=8, max_fields=64, max_part_size=bounds.body_bytes) as form:
        for number, (name, value) in enumerate(form.multi_items()):
            if isinstance(value, UploadFile):
                folder.mkdir(parents=True, exist_ok=True)
                path, name = folder / f"upload-{number}", name.removesuffix("[]")
                path.write_bytes(await value.read())
                fields[name] = [fields[name], path] if name in fields else path
            else:
                fields[name] = value
    return fields


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
    """Return the JSON object in the body."""
    try:
        body = parse_json(await request.body())
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {str(error)[:200]}", "not_json") from None
    if not isinstance(body, dict):
        raise Refused(
            400, 'the body is not a JSON object such as {"prompt": "a lighthouse"}', "not_json"
        )
    return body

"""The HTTP interface: OpenAI's images API, jobs, health, metrics, the page. Handlers check and translate; `Service` decides.

Bodies are read here, bounded in bytes and seconds, before anything looks at them.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import shutil
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphrun.errors import InputError
from graphrun.graph import media
from graphrun.graph.graph import Graph
from graphrun.reading import parse_json
from graphrun.serve.asked import Asked, asked_of, graph_of, picture_inputs
from graphrun.serve.errors import Refused
from graphrun.serve.jobs import Job
from graphrun.serve.keys import owner_of
from graphrun.serve.page import ASSETS, POLICY, page
from graphrun.serve.schema import EDIT, GENERATION
from graphrun.serve.service import Service
from graphrun.serve.settings import Bounds, Settings

KEPT_JOBS = 100  # that have ended, with their pictures
KEPT_PICTURES_BYTES = 2**28  # of pictures that were answered as URLs
T = TypeVar("T")


class Bounded:
    """ASGI middleware that bounds the body of a request, in bytes and in seconds."""

    def __init__(self, app: ASGIApp, bounds: Bounds) -> None:
        self._app, self._bounds = app, bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        form = headers.get(b"content-type", b"").lower().startswith(b"multipart/form-data")
        most, got, ended = self._bounds.upload_bytes if form else self._bounds.body_bytes, 0, False
        deadline = asyncio.get_running_loop().time() + self._bounds.body_seconds

        async def bounded() -> Message:
            nonlocal got, ended
            if ended:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise Refused(408, f"the body did not come within {self._bounds.body_seconds:.0f} s", "timeout") from None
            if message["type"] == "http.disconnect":
                raise Refused(499, "the client has left", "client_left")  # nobody reads it
            got += len(message.get("body", b""))
            ended = not message.get("more_body", False)
            if got > most or int(headers.get(b"content-length", b"0")) > most:
                raise Refused(413, f"the body has more than {most:,} bytes", "too_large")
            return message

        await self._app(scope, bounded, send)


def create_app(service: Service) -> FastAPI:
    """The application. ``service`` is started and closed by the caller."""
    settings = service.settings
    app = FastAPI(title="graphrun", version=settings.version, docs_url=None, redoc_url=None)
    app.add_middleware(Bounded, bounds=settings.bounds)
    jobs: OrderedDict[str, Job] = OrderedDict()
    pictures: OrderedDict[str, tuple[bytes, str]] = OrderedDict()

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return _answer(error)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        text = "there is no such page; /openapi.json lists them" if error.status_code == 404 else str(error.detail)
        return _answer(Refused(error.status_code, f"{request.method} {request.url.path[:100]}: {text}", "unknown_url"))

    def owner(request: Request) -> str:
        """The name whose key the request has; with no keys, nobody's. Raises Refused (401)."""
        if not settings.keys:
            return ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        found = owner_of(key.strip(), settings.keys) if scheme.lower() == "bearer" else None
        if found is None:
            text = "the API key is wrong" if key else "an API key is needed: Authorization: Bearer KEY"
            raise Refused(401, text, "invalid_api_key")
        return found

    async def generation(request: Request) -> tuple[Asked, Path]:
        """The request in a JSON body, and its folder."""
        body = await _json(request)
        graph = graph_of(body, service.graphs)
        needed = [name for name in picture_inputs(graph) if graph.inputs[name].required]
        if needed:
            raise Refused(422, f"{graph.name} takes a picture: send it to /v1/images/edits", "picture_needed", param=needed[0])
        return asked_of(body, graph, settings.bounds, {}), settings.folder / secrets.token_hex(8)

    def told(job: Job, base: str) -> dict[str, Any]:
        """A job as ``/v1/jobs/{id}`` shows it."""
        found: dict[str, Any] = {
            "id": job.id,
            "object": "job",
            "created": job.created,
            "model": job.asked.graph,
            "state": job.state,
        }
        found |= {"stage": job.stage, "step": job.step, "steps": job.steps, "pictures": len(job.pictures)}
        found |= {
            "of": len(job.asked.runs),
            "waits_seconds": service.predicted_wait(job),
            "predicted_seconds": job.seconds * service.pace,
        }
        if job.ended:
            found |= {"result": f"{base}v1/jobs/{job.id}/result"} if job.error is None else job.error.body
        return found

    def result(job: Job, base: str) -> dict[str, Any]:
        """The answer of the images API, with what was planned and measured beside it."""
        data = []
        for number, picture in enumerate(job.pictures):
            if job.asked.as_url:
                data.append({"url": f"{base}v1/images/files/{keep(picture, job.asked.suffix)}"})
            else:
                data.append({"b64_json": base64.b64encode(picture).decode()})
            data[-1] |= _seed(job, number)
        first = job.asked.runs[0]
        size = {"size": f"{first['width']}x{first['height']}"} if {"width", "height"} <= first.keys() else {}
        kind = job.asked.suffix.removeprefix(".")
        return {"created": job.created, "data": data, "output_format": kind, **size, "graphrun": _figures(job)}

    def keep(picture: bytes, suffix: str) -> str:
        name = secrets.token_urlsafe(24) + suffix
        pictures[name] = picture, f"image/{suffix.removeprefix('.')}"
        while sum(len(data) for data, _ in pictures.values()) > KEPT_PICTURES_BYTES:
            pictures.popitem(last=False)
        return name

    async def answered(request: Request, asked: Asked, folder: Path, by: str) -> Response:
        """Runs a request to its end. It is cancelled when the client leaves."""
        job: Job | None = None

        async def run() -> Job:
            nonlocal job
            job = await service.submit(asked, by, folder)
            await job.end()
            return job

        try:
            done = await _unless_gone(request, run())
        finally:
            if job is not None:
                service.cancel(job)
            else:
                shutil.rmtree(folder, ignore_errors=True)
        return JSONResponse(result(done, str(request.base_url)), headers={"Server-Timing": _timing(done)})

    @app.post("/v1/images/generations", openapi_extra=GENERATION)
    async def generations(request: Request) -> Response:
        """Pictures from a text."""
        by = owner(request)
        asked, folder = await generation(request)
        return await answered(request, asked, folder, by)

    @app.post("/v1/images/edits", openapi_extra=EDIT)
    async def edits(request: Request) -> Response:
        """Pictures from a text and a picture."""
        by = owner(request)
        folder = settings.folder / secrets.token_hex(8)
        try:
            asked = await _edit(request, service.graphs, settings, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return await answered(request, asked, folder, by)

    @app.get("/v1/images/files/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in pictures:
            raise Refused(404, "there is no such picture; pictures are kept for a while only", "not_found")
        return Response(pictures[name][0], media_type=pictures[name][1], headers={"Cache-Control": "private, max-age=3600"})

    @app.get("/v1/models")
    async def models(request: Request) -> Any:
        """The graphs, with their inputs, limits and predicted seconds."""
        owner(request)
        return {"object": "list", "data": [_model(service, graph) for graph in service.graphs.values()]}

    @app.get("/v1/models/{name}")
    async def model(request: Request, name: str) -> Any:
        """One graph."""
        owner(request)
        return _model(service, graph_of({"model": name}, service.graphs))

    def found(request: Request, name: str) -> Job:
        by = owner(request)
        if name not in jobs or jobs[name].owner != by:
            raise Refused(404, f"there is no job {name[:100]!r}", "not_found")
        return jobs[name]

    @app.post("/v1/jobs", status_code=202, openapi_extra=GENERATION)
    async def submit(request: Request) -> Response:
        """Submits a request, as for /v1/images/generations, and answers at once."""
        by = owner(request)
        asked, folder = await generation(request)
        job = await service.submit(asked, by, folder, preview=True)
        jobs[job.id] = job
        for old in [name for name, of in jobs.items() if of.ended][: max(0, len(jobs) - KEPT_JOBS)]:
            del jobs[old]
        where = f"{request.base_url}v1/jobs/{job.id}"
        return JSONResponse(told(job, str(request.base_url)), 202, headers={"Location": where})

    @app.get("/v1/jobs/{name}")
    async def state(request: Request, name: str) -> Any:
        """The state of a job."""
        return told(found(request, name), str(request.base_url))

    @app.delete("/v1/jobs/{name}")
    async def cancel(request: Request, name: str) -> Any:
        """Cancels a job, at the end of its step where it runs."""
        job = found(request, name)
        service.cancel(job)
        return told(job, str(request.base_url))

    @app.get("/v1/jobs/{name}/result")
    async def pictures_of(request: Request, name: str) -> Response:
        """The pictures of a job that has ended."""
        job = found(request, name)
        if job.error is not None and job.ended:
            raise job.error
        if not job.ended:
            raise Refused(409, f"the job is {job.state}", "not_ended", retry_seconds=max(1.0, service.predicted_wait(job)))
        return JSONResponse(result(job, str(request.base_url)), headers={"Server-Timing": _timing(job)})

    @app.get("/v1/jobs/{name}/events")
    async def events(request: Request, name: str) -> Response:
        """Server-sent events: ``state`` after each change, ``preview`` (a PNG, base64) and at last ``end``."""
        job = found(request, name)

        async def stream() -> AsyncIterator[str]:
            shown = None
            async for _ in job.changes():
                if job.preview is not None and job.preview is not shown:
                    shown = job.preview
                    yield f"event: preview\ndata: {base64.b64encode(shown).decode()}\n\n"
                kind = "end" if job.ended else "state"
                yield f"event: {kind}\ndata: {json.dumps(told(job, str(request.base_url)))}\n\n"

        return StreamingResponse(
            stream(), media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )

    @app.get("/healthz")
    async def health() -> Any:
        """Whether the server answers."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readiness() -> Response:
        """Whether requests are run: 503 while the server starts or stops, and while the worker is started again."""
        return JSONResponse({"ready": service.ready}, 200 if service.ready else 503)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        service.metrics.ready.set(service.ready)
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def front() -> Response:
        shown = page([_model(service, graph) for graph in service.graphs.values()], settings)
        return HTMLResponse(shown, headers=POLICY)

    @app.get("/page/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        if name not in ASSETS:
            raise Refused(404, "there is no such file", "not_found")
        return Response(ASSETS[name][0], media_type=ASSETS[name][1])

    return app


def _answer(error: Refused) -> Response:
    return JSONResponse(error.body, error.status, headers=error.headers)


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refused(499, "the client has left", "client_left")  # nobody reads it
        return task.result()
    finally:
        for each in (task, leaving):
            each.cancel()


async def _json(request: Request) -> dict[str, Any]:
    """The JSON object in the body. Another content type is refused: a browser sends those to other sites without asking."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "send JSON, with Content-Type: application/json", "not_json")
    try:
        body = parse_json(await request.body())
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {str(error)[:200]}", "not_json") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body is not a JSON object", "not_json")
    return body


async def _edit(request: Request, graphs: Mapping[str, Graph], settings: Settings, folder: Path) -> Asked:
    """The request in a form, with its files written to ``folder``."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise Refused(415, "send a form, with Content-Type: multipart/form-data", "not_a_form")
    async with request.form(max_files=8, max_fields=64, max_part_size=settings.bounds.body_bytes) as form:
        body: dict[str, Any] = {}
        uploads: dict[str, list[bytes]] = {}
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                uploads.setdefault(name.removesuffix("[]"), []).append(await value.read())
            else:
                body[name] = value
    graph = graph_of(body, graphs)
    names = picture_inputs(graph)
    if not names:
        takers = [other.name for other in graphs.values() if picture_inputs(other)]
        message = f"{graph.name} takes no picture; models that do: {', '.join(takers) or 'none here'}"
        raise Refused(404, message, "model_not_found", param="model")
    places = {"image": names[0], **{of.name: of.name for of in graph.inputs.values() if of.type in ("image", "mask")}}
    if "mask" in uploads and "mask" not in places:
        places["mask"] = next((of.name for of in graph.inputs.values() if of.type == "mask"), "mask")
    files: dict[str, Any] = {}
    folder.mkdir(parents=True)
    for name, contents in uploads.items():
        target = graph.inputs.get(places.get(name, ""))
        if target is None:
            raise Refused(422, f"{graph.name} takes no file {name[:100]!r}", "unknown_parameter", param=name[:100])
        if len(contents) > 1:
            raise Refused(422, f"{name}: {len(contents)} files, and one is taken", "invalid_value", param=name)
        path = folder / target.name
        path.write_bytes(contents[0])
        files[target.name] = await asyncio.to_thread(_picture, name, target.type, path)
    return asked_of(body, graph, settings.bounds, files)


def _picture(name: str, kind: str, path: Path) -> Any:
    """The picture in the file ``path``. Raises Refused (422) without the path."""
    try:
        return media.accept(kind, path)
    except (InputError, ValueError) as error:
        raise Refused(422, f"{name}: {str(error).replace(str(path), 'the file')}", "invalid_value", param=name) from None


def _seed(job: Job, number: int) -> dict[str, Any]:
    runs = job.asked.runs
    return {"seed": runs[number]["seed"]} if number < len(runs) and "seed" in runs[number] else {}


def _figures(job: Job) -> dict[str, Any]:
    """Planned beside measured; seconds of the device's clock, and the peak as nvidia-smi would show it."""
    stages: dict[str, list[float]] = {}
    for measured in job.measured:
        for stage, pair in measured["stages"].items():
            both = stages.setdefault(stage, [0.0, 0.0])
            both[0], both[1] = both[0] + pair[0], both[1] + pair[1]
    queue = {"planned": job.promised_at - job.admitted_at, "measured": (job.begun_at or 0.0) - job.admitted_at}
    peaks = [max(of["peak_bytes"][kind] for of in job.measured) for kind in (0, 1)]
    return {
        "job": job.id,
        "plan": job.measured[-1]["plan"],
        "queue_seconds": queue,
        "stages": [{"name": name, "planned_seconds": pair[0], "measured_seconds": pair[1]} for name, pair in stages.items()],
        "peak_bytes": {"planned": peaks[0], "measured": peaks[1]},
        "notes": [note for of in job.measured for note in of["notes"]],
    }


def _timing(job: Job) -> str:
    """The Server-Timing header (W3C): milliseconds of planning and in the queue, and of each stage on the device's clock."""
    stages = {of["name"]: of["measured_seconds"] for of in _figures(job)["stages"]}
    return ", ".join(
        f"{name};dur={1000 * seconds:.1f}" for name, seconds in {"plan": job.planned, "queue": job.queued, **stages}.items()
    )


def _model(service: Service, graph: Graph) -> dict[str, Any]:
    """A graph as ``/v1/models`` shows it: with its inputs, the limits of a request, and its plan at the defaults."""
    bounds = service.settings.bounds
    found: dict[str, Any] = {"id": graph.name, "object": "model", "created": int(time.time()), "owned_by": "graphrun"}
    found["inputs"] = {
        of.name: {"type": of.type, "required": of.required, **({} if of.default is None else {"default": of.default})}
        for of in graph.inputs.values()
    }
    found["edits"] = bool(picture_inputs(graph))
    found["limits"] = {"n": bounds.pictures, "pixels": bounds.pixels, "steps": bounds.steps, "prompt": bounds.characters}
    planned = service.shapes[service.defaults[graph.name]]
    if not planned.done():
        return {**found, "plan": None}
    if (error := planned.exception()) is not None:
        return {**found, "plan": {"fits": False, "verdict": str(error)}}
    shape = planned.result()
    seconds = {"first_seconds": shape.cost.first_seconds, "again_seconds": shape.cost.again_seconds}
    return {**found, "plan": {"fits": True, "verdict": shape.verdict, **seconds, "peak_bytes": shape.peak_bytes}}

"""The routes of the server, one router for each part. Handlers check and translate requests;
`Service` decides."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from graphrun.graph.graph import Graph
from graphrun.serve.answers import (
    Pictures,
    job_json,
    model_of,
    picture_events,
    result,
    timing,
    video_json,
)
from graphrun.serve.asked import VIDEO, PictureRequest, graph_of
from graphrun.serve.errors import Refused
from graphrun.serve.intake import (
    edit_in,
    generation_in,
    job_in,
    owner_in,
    unless_gone,
    video_in,
)
from graphrun.serve.jobs import Job
from graphrun.serve.page import ASSETS, POLICY, page
from graphrun.serve.schema import EDIT, GENERATION
from graphrun.serve.service import Service
from graphrun.serve.settings import Bounds

LISTED = 100  # jobs in one answer, at most
EVENT_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
KEY_CHARACTERS = 255  # of an Idempotency-Key
JobKind = Literal["job", "video"]


def images(service: Service, pictures: Pictures) -> APIRouter:
    """``/v1/images``: answer requests with their pictures. A client that leaves cancels its
    request."""
    router, settings = APIRouter(prefix="/v1/images"), service.settings

    async def answer_pictures(
        request: Request, generation: PictureRequest, folder: Path, owner: str, kind: str
    ) -> Response:
        job: Job | None = None

        async def run() -> Job:
            nonlocal job
            job = await service.submit(
                generation, owner, folder, preview=bool(generation.partial_images)
            )
            if not generation.streams:
                await job.end()
            return job

        async def stream(started_job: Job) -> AsyncIterator[str]:
            try:
                async for event in picture_events(started_job, kind):
                    yield event
            finally:  # the client may have left
                service.cancel(started_job)

        is_streaming = False
        try:
            ended_job = await unless_gone(request, run())
            is_streaming = generation.streams
        finally:
            if job is None:
                shutil.rmtree(folder, ignore_errors=True)
            elif not is_streaming:
                service.cancel(job)
        request.state.job = ended_job.id
        if is_streaming:
            return StreamingResponse(
                stream(ended_job), media_type="text/event-stream", headers=EVENT_HEADERS
            )
        return JSONResponse(
            result(ended_job, pictures, str(request.base_url)),
            headers={"Server-Timing": timing(ended_job)},
        )

    @router.post("/generations", openapi_extra=GENERATION)
    async def generations(request: Request) -> Response:
        """Pictures from a text."""
        owner = owner_in(request, service.keys)
        generation = await generation_in(request, service.graphs, settings.bounds)
        return await answer_pictures(
            request, generation, _folder(service), owner, "image_generation"
        )

    @router.post("/edits", openapi_extra=EDIT)
    async def edits(request: Request) -> Response:
        """Pictures from a text and a picture."""
        owner, folder = owner_in(request, service.keys), _folder(service)
        try:
            generation = await edit_in(request, service.graphs, settings.bounds, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return await answer_pictures(request, generation, folder, owner, "image_edit")

    @router.get("/files/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if (picture := pictures.get(name)) is None:
            raise Refused(
                404, "there is no such picture; pictures are kept for a while only", "not_found"
            )
        return Response(
            picture[0], media_type=picture[1], headers={"Cache-Control": "private, max-age=3600"}
        )

    return router


def models(service: Service) -> APIRouter:
    """``/v1/models``: the graphs."""
    router = APIRouter(prefix="/v1/models")

    @router.get("")
    async def models(request: Request) -> Any:
        """The graphs, with their inputs, limits and predicted seconds."""
        owner_in(request, service.keys)
        return {
            "object": "list",
            "data": [model_of(graph, service) for graph in service.graphs.values()],
        }

    @router.get("/{name}")
    async def model(request: Request, name: str) -> Any:
        """One graph."""
        owner_in(request, service.keys)
        return model_of(graph_of({"model": name}, service.graphs), service)

    return router


def jobs(service: Service, pictures: Pictures) -> APIRouter:
    """``/v1/jobs``: requests answered at once and polled later. A key sees only its own jobs."""
    router = APIRouter(prefix="/v1/jobs")

    def state_of(job: Job, request: Request) -> dict[str, Any]:
        return job_json(job, service, str(request.base_url))

    @router.post("", status_code=202, openapi_extra=GENERATION)
    async def submit(request: Request) -> Response:
        """Submits a request, as for /v1/images/generations or, in a form, as for /v1/images/edits,
        and answers at once. With the header Idempotency-Key, sending it again returns the same
        job."""
        owner, key = owner_in(request, service.keys), request.headers.get("idempotency-key", "")
        if len(key) > KEY_CHARACTERS:
            text = f"the Idempotency-Key has {len(key)} characters, and {KEY_CHARACTERS} are taken"
            raise Refused(422, text, "invalid_value")
        body = hashlib.sha256(await request.body()).hexdigest() if key else ""
        job = await _submitted(request, service, job_in, owner, key=key, body=body)
        return JSONResponse(
            state_of(job, request), 202, headers={"Location": f"{request.base_url}v1/jobs/{job.id}"}
        )

    @router.get("")
    async def list_jobs(request: Request) -> Any:
        """The jobs of the key, the newest first: ``limit`` of them, older than job ``after``."""
        owner = owner_in(request, service.keys)
        own_jobs = [job for job in reversed(service.jobs.values()) if job.owner == owner]
        selection, has_more = page_of(own_jobs, request, service, "job")
        data = [state_of(job, request) for job in selection]
        return {"object": "list", "data": data, "has_more": has_more}

    @router.get("/{name}")
    async def state(request: Request, name: str) -> Any:
        """The state of a job."""
        return state_of(_own_job(request, service, name, "job"), request)

    @router.delete("/{name}")
    async def cancel(request: Request, name: str) -> Any:
        """Cancels a job, at the end of its step where it runs."""
        job = _own_job(request, service, name, "job")
        service.cancel(job)
        return state_of(job, request)

    @router.get("/{name}/result")
    async def pictures_of(request: Request, name: str) -> Response:
        """The pictures of a job that has ended."""
        job = _ended(_own_job(request, service, name, "job"), service, "job")
        return JSONResponse(
            result(job, pictures, str(request.base_url)), headers={"Server-Timing": timing(job)}
        )

    @router.get("/{name}/events")
    async def events(request: Request, name: str) -> Response:
        """Server-sent events: ``state`` after each change, ``preview`` (a PNG, base64) and at last
        ``end``."""
        job = _own_job(request, service, name, "job")

        async def stream() -> AsyncIterator[str]:
            last_preview = None
            async for _ in job.changes():
                if job.preview is not None and job.preview is not last_preview:
                    last_preview = job.preview
                    yield f"event: preview\ndata: {base64.b64encode(last_preview).decode()}\n\n"
                kind = "end" if job.ended else "state"
                yield f"event: {kind}\ndata: {json.dumps(state_of(job, request))}\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream", headers=EVENT_HEADERS)

    return router


def videos(service: Service) -> APIRouter:
    """``/v1/videos``: videos, made as jobs. A key sees only its own."""
    router = APIRouter(prefix="/v1/videos")

    @router.post("", openapi_extra=GENERATION)
    async def create(request: Request) -> Any:
        """Submits a request for a video, in JSON or a form with ``input_reference``, a picture."""
        owner = owner_in(request, service.keys)
        job = await _submitted(request, service, video_in, owner)
        return video_json(job, service)

    @router.get("")
    async def list_videos(request: Request) -> Any:
        """The videos of the key: ``limit``, ``order`` (asc, desc), and ``after``, an id."""
        owner = owner_in(request, service.keys)
        own_jobs = [
            job
            for job in reversed(service.jobs.values())
            if job.owner == owner and job.request.suffix == VIDEO
        ]
        if request.query_params.get("order") == "asc":
            own_jobs.reverse()
        selection, has_more = page_of(own_jobs, request, service, "video")
        ids = [job.id for job in selection]
        return {
            "object": "list",
            "data": [video_json(job, service) for job in selection],
            "has_more": has_more,
            **({"first_id": ids[0], "last_id": ids[-1]} if ids else {}),
        }

    @router.get("/{name}")
    async def state(request: Request, name: str) -> Any:
        """The state of a video."""
        return video_json(_own_job(request, service, name, "video"), service)

    @router.get("/{name}/content")
    async def content(request: Request, name: str) -> Response:
        """The file of a video that is completed: MP4."""
        job = _ended(_own_job(request, service, name, "video"), service, "video")
        return Response(job.pictures[0], media_type="video/mp4")

    @router.delete("/{name}")
    async def delete(request: Request, name: str) -> Any:
        """Deletes a video; one that is being made is cancelled, at the end of its step."""
        job = _own_job(request, service, name, "video")
        service.cancel(job)
        if job.ended:
            service.forget(job)
        return {"id": name, "object": "video.deleted", "deleted": True}

    return router


def page_of(
    jobs: Sequence[Job], request: Request, service: Service, kind: JobKind
) -> tuple[Sequence[Job], bool]:
    """Return the jobs that the query asks for by ``limit`` and ``after``, and whether there are
    more. Raises Refused."""
    query = request.query_params
    if not (limit := query.get("limit", "20")).isdecimal() or not 1 <= int(limit) <= LISTED:
        text = f"limit: it is a number from 1 to {LISTED}"
        raise Refused(422, text, "invalid_value", param="limit")
    start = 0
    if "after" in query:
        start = jobs.index(_own_job(request, service, query["after"], kind)) + 1
    end = start + int(limit)
    return jobs[start:end], len(jobs) > end


def health(service: Service) -> APIRouter:
    """Routes for liveness, readiness and metrics."""
    router = APIRouter()

    @router.get("/health", include_in_schema=False)
    @router.get("/healthz")
    async def health() -> Any:
        """Whether the server answers."""
        return {"status": "ok"}

    @router.get("/readyz")
    async def readiness() -> Response:
        """Whether requests are run: 503 while the server starts, warms up or stops, and while the
        worker is started again."""
        return JSONResponse({"ready": service.ready}, 200 if service.ready else 503)

    @router.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        service.metrics.ready.set(service.ready)
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return router


def pages(service: Service) -> APIRouter:
    """The web page."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def front() -> Response:
        models = [model_of(graph, service) for graph in service.graphs.values()]
        body = page(models, service.settings)
        return HTMLResponse(body, headers=POLICY)

    @router.get("/page/{name}")
    async def asset(name: str) -> Response:
        if name not in ASSETS:
            raise Refused(404, "there is no such file", "not_found")
        return Response(ASSETS[name][0], media_type=ASSETS[name][1])

    return router


def _folder(service: Service) -> Path:
    """Return a folder for one request, which does not exist yet."""
    return service.settings.folder / secrets.token_hex(8)


def _own_job(request: Request, service: Service, name: str, kind: JobKind) -> Job:
    """Return the job ``name`` of the request's key. Raises Refused (401, 404)."""
    owner, job = owner_in(request, service.keys), service.jobs.get(name)
    is_kind = job is not None and (kind == "job" or job.request.suffix == VIDEO)
    if job is None or job.owner != owner or not is_kind:
        raise Refused(404, f"there is no {kind} {name[:100]!r}", "not_found")
    request.state.job = name
    return job


def _ended(job: Job, service: Service, kind: JobKind) -> Job:
    """Return ``job``, which is done. Raises Refused: its error, or 409 if it has not ended."""
    if not job.ended:
        text, wait = f"the {kind} is {job.state}", max(1.0, service.predicted_wait(job))
        raise Refused(409, text, "not_ended", retry_seconds=wait)
    if job.error is not None:
        raise job.error
    return job


async def _submitted(
    request: Request,
    service: Service,
    reader: Callable[[Request, Mapping[str, Graph], Bounds, Path], Awaitable[PictureRequest]],
    owner: str,
    *,
    key: str = "",
    body: str = "",
) -> Job:
    """Admit the job that ``reader`` finds in the request. Its uploaded files are deleted if it is
    refused, or if it is the job of an earlier request with the same ``key``."""
    folder = _folder(service)
    try:
        generation = await reader(request, service.graphs, service.settings.bounds, folder)
        uploads = folder if folder.exists() else None
        job = await service.submit_job(generation, owner, key=key, body=body, folder=uploads)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if job.folder != folder:
        shutil.rmtree(folder, ignore_errors=True)
    request.state.job = job.id
    return job

"""The routes of the server, one router for each part. Handlers check and translate requests;
`Service` decides."""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from graphrun.serve.answers import (
    Pictures,
    job_events,
    job_json,
    model_of,
    picture_events,
    result,
    timing,
    video_json,
)
from graphrun.serve.bodies import VIDEO, bad, body_schema, makes_videos, picture_inputs
from graphrun.serve.errors import Refused
from graphrun.serve.intake import (
    CONTENT_TYPES,
    Owner,
    Route,
    graph_of,
    owner_in,
    picture_request,
    unless_gone,
)
from graphrun.serve.jobs import DELETED, Job
from graphrun.serve.page import ASSETS, POLICY, page
from graphrun.serve.service import Service

EVENT_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
PageLength = Annotated[int, Query(alias="limit", ge=1, le=100)]  # jobs in one answer
EarlierId = Annotated[str, Query(alias="after")]
IdempotencyKey = Annotated[str, Header(alias="Idempotency-Key", max_length=255)]


def absent(kind: str, id: str) -> Refused:
    """Return the refusal of a request for what does not exist."""
    text = f"there is no {kind} {id[:100]!r}; the server keeps the last jobs only"
    return Refused(404, text, "not_found")


async def own_job(request: Request, owner: Owner, name: str) -> Job:
    """Return the job ``name`` of ``owner``. Raises Refused (404)."""
    job: Job | None = request.app.state.service.records.jobs.get(name)
    if job is None or job.owner != owner or job.is_deleted:
        raise absent("job", name)
    request.state.job = name
    return job


def jobs_of(service: Service, owner: str) -> list[Job]:
    """Return the jobs of ``owner``, the newest first."""
    jobs = reversed(service.records.jobs.values())
    return [job for job in jobs if job.owner == owner and not job.is_deleted]


OwnJob = Annotated[Job, Depends(own_job)]


async def own_video(job: OwnJob) -> Job:
    """Return ``job``, which makes a video. Raises Refused (404)."""
    if job.request.suffix != VIDEO:
        raise absent("video", job.id)
    return job


OwnVideo = Annotated[Job, Depends(own_video)]


def refuse_unended(job: Job, service: Service) -> None:
    """Raise Refused: the error of ``job``, or 409 if it has not ended."""
    if not job.ended:
        wait = max(1.0, service.queue.predicted_wait(job))
        text = f"the job is {job.state}: wait for state ended at /v1/jobs/{job.id}/events"
        raise Refused(409, text, "not_ended", retry_seconds=wait)
    if job.error is not None:
        raise job.error


class JobStream(StreamingResponse):
    """Events for the client of a job. ``cancel`` is called at the end, also if the client leaves
    before the first event: then ``events`` never begins."""

    def __init__(self, events: AsyncIterator[str], cancel: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=EVENT_HEADERS)
        self._cancel = cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._cancel()


def images(service: Service, pictures: Pictures) -> APIRouter:
    """``/v1/images``: answer requests with their pictures. A client that leaves cancels its
    request."""
    router = APIRouter(prefix="/v1/images")

    async def answer(request: Request, route: Route, owner: str, kind: str) -> Response:
        folder, job = _folder(service), None
        try:
            generation = await picture_request(request, route, folder)
            if generation.webhook:
                raise bad("webhook", "this answer has the pictures: send it to /v1/jobs")
            preview = bool(generation.partial_images)
            submission = service.submit(generation, owner, folder, preview=preview)
            job = await unless_gone(request, submission)
            request.state.job = job.id
            if generation.streams:
                return JobStream(picture_events(job, kind), partial(service.queue.cancel, job))
            await unless_gone(request, job.end())
        except BaseException:
            if job is None:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                service.queue.cancel(job)
            raise
        return JSONResponse(
            result(job, pictures, str(request.base_url)), headers={"Server-Timing": timing(job)}
        )

    @router.post("/generations", openapi_extra=_schema(service, "generations"))
    async def generations(request: Request, owner: Owner) -> Response:
        """Pictures from a text."""
        return await answer(request, "generations", owner, "image_generation")

    @router.post("/edits", openapi_extra=_schema(service, "edits"))
    async def edits(request: Request, owner: Owner) -> Response:
        """Pictures from a text and a picture."""
        return await answer(request, "edits", owner, "image_edit")

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
    router = APIRouter(prefix="/v1/models", dependencies=[Depends(owner_in)])

    @router.get("")
    async def models() -> Any:
        """The graphs, with their inputs, limits and predicted seconds."""
        return {
            "object": "list",
            "data": [model_of(graph, service) for graph in service.graphs.values()],
        }

    @router.get("/{name}")
    async def model(name: str) -> Any:
        """One graph."""
        return model_of(graph_of(name, service.graphs), service)

    return router


def jobs(service: Service, pictures: Pictures) -> APIRouter:
    """``/v1/jobs``: requests answered at once and polled later. A key sees only its own jobs."""
    router = APIRouter(prefix="/v1/jobs")

    def state_of(job: Job, request: Request) -> dict[str, Any]:
        return job_json(job, service, str(request.base_url))

    @router.post("", status_code=202, openapi_extra=_schema(service, "jobs"))
    async def submit(request: Request, owner: Owner, key: IdempotencyKey = "") -> Response:
        """Submits a request, as for /v1/images/generations or, in a form, as for /v1/images/edits,
        and answers at once. With the header Idempotency-Key, sending it again returns the same
        job."""
        job = await _submitted(request, service, "jobs", owner, key=key)
        return JSONResponse(
            state_of(job, request), 202, headers={"Location": f"{request.base_url}v1/jobs/{job.id}"}
        )

    @router.get("")
    async def list_jobs(
        request: Request, owner: Owner, limit: PageLength = 20, earlier_id: EarlierId = ""
    ) -> Any:
        """The jobs of the key, the newest first: ``limit`` of them, older than job ``after``."""
        own_jobs = jobs_of(service, owner)
        selection, has_more = page_of(own_jobs, limit, earlier_id)
        data = [state_of(job, request) for job in selection]
        return {"object": "list", "data": data, "has_more": has_more}

    @router.get("/{name}")
    async def state(request: Request, job: OwnJob) -> Any:
        """The state of a job."""
        return state_of(job, request)

    @router.delete("/{name}")
    async def cancel(request: Request, job: OwnJob) -> Any:
        """Cancels a job, at the end of its step where it runs."""
        service.queue.cancel(job)
        return state_of(job, request)

    @router.get("/{name}/result")
    async def pictures_of(request: Request, job: OwnJob) -> Response:
        """The pictures of a job that has ended."""
        refuse_unended(job, service)
        return JSONResponse(
            result(job, pictures, str(request.base_url)), headers={"Server-Timing": timing(job)}
        )

    @router.get("/{name}/events")
    async def events(request: Request, job: OwnJob) -> Response:
        """Server-sent events: ``state`` after each change, ``preview`` (a PNG, base64) and at last
        ``end``."""
        stream = job_events(job, service, str(request.base_url))
        return StreamingResponse(stream, media_type="text/event-stream", headers=EVENT_HEADERS)

    return router


def videos(service: Service) -> APIRouter:
    """``/v1/videos``: videos, made as jobs. A key sees only its own."""
    router = APIRouter(prefix="/v1/videos")

    @router.post("", openapi_extra=_schema(service, "videos"))
    async def create(request: Request, owner: Owner) -> Any:
        """Submits a request for a video, in JSON or a form with ``input_reference``, a picture."""
        return video_json(await _submitted(request, service, "videos", owner), service)

    @router.get("")
    async def list_videos(
        request: Request,
        owner: Owner,
        limit: PageLength = 20,
        earlier_id: EarlierId = "",
        order: Literal["asc", "desc"] = "desc",
    ) -> Any:
        """The videos of the key: ``limit``, ``order`` (asc, desc), and ``after``, an id."""
        own_jobs = [job for job in jobs_of(service, owner) if job.request.suffix == VIDEO]
        if order == "asc":
            own_jobs.reverse()
        selection, has_more = page_of(own_jobs, limit, earlier_id)
        ids = [job.id for job in selection]
        return {
            "object": "list",
            "data": [video_json(job, service) for job in selection],
            "has_more": has_more,
            **({"first_id": ids[0], "last_id": ids[-1]} if ids else {}),
        }

    @router.get("/{name}")
    async def state(job: OwnVideo) -> Any:
        """The state of a video."""
        return video_json(job, service)

    @router.get("/{name}/content")
    async def content(job: OwnVideo) -> Response:
        """The file of a video that is completed: MP4."""
        refuse_unended(job, service)
        return Response(job.pictures[0], media_type="video/mp4")

    @router.delete("/{name}")
    async def delete(job: OwnVideo) -> Any:
        """Deletes a video; one that is being made is cancelled, at the end of its step."""
        if job.ended:
            service.records.forget(job)
        service.queue.cancel(job, Refused(409, "the video was deleted", DELETED))
        return {"id": job.id, "object": "video.deleted", "deleted": True}

    return router


def page_of(jobs: Sequence[Job], limit: int, earlier_id: str) -> tuple[Sequence[Job], bool]:
    """Return ``limit`` jobs after ``earlier_id``, and whether there are more. Raises Refused
    (404)."""
    ids = ["", *(job.id for job in jobs)]
    if earlier_id not in ids:
        raise absent("job", earlier_id)
    start = ids.index(earlier_id)
    return jobs[start : start + limit], len(jobs) > start + limit


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
        """Whether requests are run: 503 with the reasons while the server starts, warms up or
        stops, while the worker is started again, and if a graph has no plan."""
        if reasons := service.unready:
            return JSONResponse({"ready": False, "reasons": reasons}, 503)
        return JSONResponse({"ready": True})

    @router.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        service.metrics.ready.set(not service.unready)
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


async def _submitted(
    request: Request, service: Service, route: Route, owner: str, *, key: str = ""
) -> Job:
    """Admit the job in the request. Its uploaded files are deleted if it is refused, or if it is
    the job of an earlier request with the same ``key``."""
    folder, job = _folder(service), None
    kind = request.headers.get("content-type", "")
    body = digest_of(await request.body(), kind) if key else ""
    try:
        generation = await picture_request(request, route, folder)
        if generation.streams:
            text = "a job is answered at once; its events are at /v1/jobs/ID/events"
            raise bad("stream", text)
        uploads = folder if folder.exists() else None
        job = await service.submit_job(generation, owner, key=key, body=body, folder=uploads)
    finally:
        if job is None or job.folder != folder:
            shutil.rmtree(folder, ignore_errors=True)
    request.state.job = job.id
    return job


def digest_of(body: bytes, content_type: str) -> str:
    """Return the SHA-256 of ``body``, without the boundary of a form: clients draw another one each
    time."""
    boundary = content_type.partition("boundary=")[2].partition(";")[0].strip(' "')
    content = body.replace(boundary.encode("latin-1"), b"") if boundary else body
    return hashlib.sha256(content).hexdigest()


def _schema(service: Service, route: Route) -> dict[str, Any]:
    """Return the OpenAPI entries of the bodies of ``route``, which change when the server has read
    its graphs again."""
    entries = dict[str, Any]()

    def update() -> None:
        models = [
            model
            for model in service.bodies.values()
            if makes_videos(model.graph) == (route == "videos")
            and (route != "edits" or picture_inputs(model.graph))
        ]
        entries.update(body_schema(models, *CONTENT_TYPES[route]))

    update()
    service.on_reload.append(update)
    return entries

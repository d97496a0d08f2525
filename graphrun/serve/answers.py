"""Answers as JSON and headers: jobs with their pictures and numbers, and graphs."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from typing import Any

from graphrun.graph.graph import Graph
from graphrun.serve.bodies import frames_input, makes_videos, picture_inputs
from graphrun.serve.jobs import Job
from graphrun.serve.planner import PlannedShape
from graphrun.serve.records import KEPT_PICTURES_BYTES
from graphrun.serve.service import Service
from graphrun.serve.shares import WHOLE
from graphrun.trace import verdict

# of OpenAI's clients, which expect counts
NO_TOKENS = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
}


class Pictures:
    """Pictures answered as URLs: (bytes, content type) by unguessable name. The oldest are
    evicted."""

    def __init__(self) -> None:
        self._pictures: OrderedDict[str, tuple[bytes, str]] = OrderedDict()

    def keep(self, picture: bytes, suffix: str) -> str:
        name = secrets.token_urlsafe(24) + suffix
        self._pictures[name] = picture, f"image/{suffix.removeprefix('.')}"
        while sum(len(data) for data, _ in self._pictures.values()) > KEPT_PICTURES_BYTES:
            self._pictures.popitem(last=False)
        return name

    def get(self, name: str) -> tuple[bytes, str] | None:
        """Return the picture called ``name``; None if it was evicted."""
        return self._pictures.get(name)


def job_json(job: Job, service: Service, base: str) -> dict[str, Any]:
    """Return a job as ``/v1/jobs/{id}`` shows it."""
    answer = {
        "id": job.id,
        "object": "job",
        "created": job.created,
        "model": job.request.graph,
        "state": job.state,
        "stage": job.stage,
        "step": job.step,
        "steps": job.steps,
        "pictures": len(job.pictures),
        "of": len(job.request.runs),
        "waits_seconds": service.queue.predicted_wait(job),
        "predicted_seconds": job.seconds * service.queue.pace,
    }
    if not job.ended:
        return answer
    link = {"result": f"{base}v1/jobs/{job.id}/result"}
    return answer | (link if job.error is None else job.error.body)


STATUSES = {"waiting": "queued", "running": "in_progress", "done": "completed"}


def video_json(job: Job, service: Service) -> dict[str, Any]:
    """Return a job as OpenAI's ``/v1/videos`` shows it, with ``graphrun`` once it is done."""
    inputs, graph = job.request.runs[0], service.graphs.get(job.request.graph)
    frames = inputs.get(frames_input(graph)) if graph is not None else None
    rate = graph.fps if graph is not None else None
    progress = 100 if job.state == "done" else 100 * job.step // max(1, job.steps)
    answer: dict[str, Any] = {
        "id": job.id,
        "object": "video",
        "created_at": job.created,
        "status": STATUSES.get(job.state, "failed"),
        "model": job.request.graph,
        "prompt": inputs.get("prompt"),
        "progress": min(99, progress) if job.state != "done" else 100,
        "seconds": f"{frames / rate:g}" if frames and rate else "",
        "size": _size(inputs),
    }
    if job.error is not None:
        answer["error"] = {"code": job.error.code, "message": job.error.message}
    if job.state == "done":
        answer["graphrun"] = _figures(job)
    return answer


def result(job: Job, pictures: Pictures, base: str) -> dict[str, Any]:
    """Return the answer of the images API, with the planned and measured numbers."""
    data = []
    for number, picture in enumerate(job.pictures):
        if job.request.as_url:
            data.append(
                {"url": f"{base}v1/images/files/{pictures.keep(picture, job.request.suffix)}"}
            )
        else:
            data.append({"b64_json": base64.b64encode(picture).decode()})
        data[-1] |= _seed(job, number)
    size = _size(job.request.runs[0])
    kind = job.request.suffix.removeprefix(".")
    return {
        "created": job.created,
        "data": data,
        "output_format": kind,
        **({"size": size} if size else {}),
        "graphrun": _figures(job),
    }


def event(name: str, data: str) -> str:
    """Return a server-sent event."""
    return f"event: {name}\ndata: {data}\n\n"


async def job_events(job: Job, service: Service, base: str) -> AsyncIterator[str]:
    """Yield the events of ``/v1/jobs``: ``preview`` for previews, ``state`` after each change, and
    at last ``end``."""
    async for preview in job.changes():
        if preview is not None:
            yield event("preview", base64.b64encode(preview).decode())
        yield event("end" if job.ended else "state", json.dumps(job_json(job, service, base)))


async def picture_events(job: Job, kind: str) -> AsyncIterator[str]:
    """Yield server-sent events as OpenAI's images API does: ``KIND.partial_image`` for previews,
    then ``KIND.completed`` for each picture, or ``error``."""
    count = 0
    fields = {
        "created_at": job.created,
        "size": _size(job.request.runs[0]) or "auto",
        "quality": "auto",
        "background": "opaque",
    }

    def picture_event(name: str, picture: bytes, suffix: str, **values: Any) -> str:
        content = {
            "type": name,
            "b64_json": base64.b64encode(picture).decode(),
            "output_format": suffix.removeprefix("."),
            **fields,
            **values,
        }
        return event(name, json.dumps(content))

    async for preview in job.changes():
        if preview is not None and count < job.request.partial_images:
            yield picture_event(f"{kind}.partial_image", preview, ".png", partial_image_index=count)
            count += 1
    if job.error is not None:
        yield event("error", json.dumps(job.error.body))
        return
    for number, picture in enumerate(job.pictures):
        numbers = _seed(job, number) | ({"graphrun": _figures(job)} if not number else {})
        yield picture_event(
            f"{kind}.completed", picture, job.request.suffix, usage=NO_TOKENS, **numbers
        )


def timing(job: Job) -> str:
    """Return the Server-Timing header (W3C): milliseconds of planning, waiting and each stage."""
    stages = {stage["name"]: stage["measured_seconds"] for stage in _figures(job)["stages"]}
    return ", ".join(
        f"{name};dur={1000 * seconds:.1f}"
        for name, seconds in {"plan": job.planning_seconds, "queue": job.queued, **stages}.items()
    )


def model_of(graph: Graph, service: Service) -> dict[str, Any]:
    """Return a graph as ``/v1/models`` shows it."""
    bounds, plans = service.settings.bounds, service.plans
    return {
        "id": graph.name,
        "object": "model",
        "created": service.created,
        "owned_by": "graphrun",
        "inputs": {
            spec.name: {
                "type": spec.type,
                "required": spec.required,
                **({} if spec.default is None else {"default": spec.default}),
            }
            for spec in graph.inputs.values()
        },
        "loras": [*service.bodies[graph.name].available_loras],
        "edits": bool(picture_inputs(graph)) and not makes_videos(graph),
        "videos": makes_videos(graph),
        "fps": graph.fps,
        "limits": {
            "n": 1 if makes_videos(graph) else bounds.pictures,
            "pixels": bounds.pixels,
            "steps": bounds.steps,
            "prompt": bounds.characters,
        },
        "share": plans.shares.get(graph.name, WHOLE),
        "plan": _plan_json(plans.shapes.get((plans.defaults[graph.name], WHOLE))),
    }


def _plan_json(plan: asyncio.Future[PlannedShape] | None) -> dict[str, Any] | None:
    if plan is None or not plan.done():
        return None
    if (error := plan.exception()) is not None:
        return {"fits": False, "verdict": str(error)}
    shape = plan.result()
    return {
        "fits": True,
        "verdict": shape.verdict,
        "first_seconds": shape.cost.first_seconds,
        "again_seconds": shape.cost.again_seconds,
        "peak_bytes": shape.peak_bytes,
    }


def _size(inputs: Mapping[str, Any]) -> str:
    """Return width and height as in ``size`` of the OpenAI API, "" without them."""
    has_size = {"width", "height"} <= inputs.keys()
    return f"{inputs['width']}x{inputs['height']}" if has_size else ""


def _seed(job: Job, number: int) -> dict[str, Any]:
    runs = job.request.runs
    return {"seed": runs[number]["seed"]} if number < len(runs) and "seed" in runs[number] else {}


def _figures(job: Job) -> dict[str, Any]:
    """Return the planned and measured numbers, on the device's clock. Peaks are as nvidia-smi shows
    them."""
    stages: dict[str, list[float]] = {}
    for run in job.results:
        for stage, pair in run["stages"].items():
            sums = stages.setdefault(stage, [0.0, 0.0])
            sums[0], sums[1] = sums[0] + pair[0], sums[1] + pair[1]
    queue = {
        "planned": job.promised_at - job.admitted_at,
        "measured": (job.begun_at or 0.0) - job.admitted_at,
    }
    peaks = [max(run["peak_bytes"][kind] for run in job.results) for kind in (0, 1)]
    notes = [note for run in job.results for note in run["notes"]]
    overruns = [overrun for run in job.results for overrun in run["overruns"]]
    return {
        "job": job.id,
        "plan": job.results[-1]["plan"],
        "queue_seconds": queue,
        "together": job.batch_size,
        "stages": [
            {"name": name, "planned_seconds": pair[0], "measured_seconds": pair[1]}
            for name, pair in stages.items()
        ],
        "peak_bytes": {"planned": peaks[0], "measured": peaks[1]},
        "notes": notes,
        "verdict": verdict(overruns, len(notes)),
    }

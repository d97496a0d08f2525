"""What goes out: jobs, their pictures and figures, and graphs, as JSON and headers."""

from __future__ import annotations

import base64
import secrets
from collections import OrderedDict
from typing import Any

from graphrun.graph.graph import Graph
from graphrun.serve.asked import picture_inputs
from graphrun.serve.jobs import Job
from graphrun.serve.service import Service
from graphrun.serve.shares import WHOLE
from graphrun.trace import verdict

KEPT_PICTURES_BYTES = 2**28  # of pictures that were answered as URLs


class Pictures:
    """Pictures that were answered as URLs, by a name that cannot be guessed: (bytes, content type).
    The oldest ones go."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[bytes, str]] = OrderedDict()

    def keep(self, picture: bytes, suffix: str) -> str:
        """Keeps ``picture`` and returns its name."""
        name = secrets.token_urlsafe(24) + suffix
        self._kept[name] = picture, f"image/{suffix.removeprefix('.')}"
        while sum(len(data) for data, _ in self._kept.values()) > KEPT_PICTURES_BYTES:
            self._kept.popitem(last=False)
        return name

    def get(self, name: str) -> tuple[bytes, str] | None:
        """The picture called ``name``, if it is still there."""
        return self._kept.get(name)


def told(job: Job, service: Service, base: str) -> dict[str, Any]:
    """A job as ``/v1/jobs/{id}`` shows it."""
    found: dict[str, Any] = {
        "id": job.id,
        "object": "job",
        "created": job.created,
        "model": job.asked.graph,
        "state": job.state,
    }
    found |= {
        "stage": job.stage,
        "step": job.step,
        "steps": job.steps,
        "pictures": len(job.pictures),
    }
    found |= {
        "of": len(job.asked.runs),
        "waits_seconds": service.predicted_wait(job),
        "predicted_seconds": job.seconds * service.pace,
    }
    if job.ended:
        found |= (
            {"result": f"{base}v1/jobs/{job.id}/result"} if job.error is None else job.error.body
        )
    return found


def result(job: Job, pictures: Pictures, base: str) -> dict[str, Any]:
    """The answer of the images API, with what was planned and measured beside it."""
    data = []
    for number, picture in enumerate(job.pictures):
        if job.asked.as_url:
            data.append(
                {"url": f"{base}v1/images/files/{pictures.keep(picture, job.asked.suffix)}"}
            )
        else:
            data.append({"b64_json": base64.b64encode(picture).decode()})
        data[-1] |= _seed(job, number)
    first = job.asked.runs[0]
    size = (
        {"size": f"{first['width']}x{first['height']}"}
        if {"width", "height"} <= first.keys()
        else {}
    )
    kind = job.asked.suffix.removeprefix(".")
    return {
        "created": job.created,
        "data": data,
        "output_format": kind,
        **size,
        "graphrun": _figures(job),
    }


def timing(job: Job) -> str:
    """The Server-Timing header (W3C): milliseconds of planning and in the queue, and of each stage
    on the device's clock."""
    stages = {of["name"]: of["measured_seconds"] for of in _figures(job)["stages"]}
    return ", ".join(
        f"{name};dur={1000 * seconds:.1f}"
        for name, seconds in {"plan": job.planned, "queue": job.queued, **stages}.items()
    )


def model_of(graph: Graph, service: Service) -> dict[str, Any]:
    """A graph as ``/v1/models`` shows it: with its inputs, the limits of a request, and its plan at
    the defaults."""
    bounds = service.settings.bounds
    found: dict[str, Any] = {
        "id": graph.name,
        "object": "model",
        "created": service.created,
        "owned_by": "graphrun",
    }
    found["inputs"] = {
        of.name: {
            "type": of.type,
            "required": of.required,
            **({} if of.default is None else {"default": of.default}),
        }
        for of in graph.inputs.values()
    }
    found["edits"] = bool(picture_inputs(graph))
    found["limits"] = {
        "n": bounds.pictures,
        "pixels": bounds.pixels,
        "steps": bounds.steps,
        "prompt": bounds.characters,
    }
    found["share"] = service.shares.get(graph.name, WHOLE)
    planned = service.shapes.get((service.defaults[graph.name], WHOLE))
    if planned is None or not planned.done():
        return {**found, "plan": None}
    if (error := planned.exception()) is not None:
        return {**found, "plan": {"fits": False, "verdict": str(error)}}
    shape = planned.result()
    seconds = {"first_seconds": shape.cost.first_seconds, "again_seconds": shape.cost.again_seconds}
    return {
        **found,
        "plan": {"fits": True, "verdict": shape.verdict, **seconds, "peak_bytes": shape.peak_bytes},
    }


def _seed(job: Job, number: int) -> dict[str, Any]:
    runs = job.asked.runs
    return {"seed": runs[number]["seed"]} if number < len(runs) and "seed" in runs[number] else {}


def _figures(job: Job) -> dict[str, Any]:
    """Planned beside measured; seconds of the device's clock, and the peak as nvidia-smi would show
    it."""
    stages: dict[str, list[float]] = {}
    for measured in job.measured:
        for stage, pair in measured["stages"].items():
            both = stages.setdefault(stage, [0.0, 0.0])
            both[0], both[1] = both[0] + pair[0], both[1] + pair[1]
    queue = {
        "planned": job.promised_at - job.admitted_at,
        "measured": (job.begun_at or 0.0) - job.admitted_at,
    }
    peaks = [max(of["peak_bytes"][kind] for of in job.measured) for kind in (0, 1)]
    notes = [note for measured in job.measured for note in measured["notes"]]
    overruns = [overrun for measured in job.measured for overrun in measured["overruns"]]
    return {
        "job": job.id,
        "plan": job.measured[-1]["plan"],
        "queue_seconds": queue,
        "together": job.together,
        "stages": [
            {"name": name, "planned_seconds": pair[0], "measured_seconds": pair[1]}
            for name, pair in stages.items()
        ],
        "peak_bytes": {"planned": peaks[0], "measured": peaks[1]},
        "notes": notes,
        "verdict": verdict(overruns, len(notes)),
    }

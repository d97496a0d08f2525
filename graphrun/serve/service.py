"""Admits requests, keeps the queue, and hands one after another to the worker process. Runs in the event loop of the server.

submit -> plan of the shape (once) -> promised seconds, or 422 or 429 -> line -> worker -> pictures
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphrun import api
from graphrun.graph.graph import Graph
from graphrun.graph.settings import settings_of
from graphrun.serve.asked import Asked, Shape
from graphrun.serve.child import Child
from graphrun.serve.errors import Refused
from graphrun.serve.jobs import Job
from graphrun.serve.line import Entry, Line
from graphrun.serve.metrics import Metrics
from graphrun.serve.planner import PlannedShape, plan_forever
from graphrun.serve.settings import Settings
from graphrun.serve.worker import work_forever

KEPT_SHAPES = 256  # plans that are remembered; those asked for longest ago are read from the cache folder again
PLANNING = 8  # shapes that may wait to be planned
PLAN_SECONDS = 5.0  # of planning a shape, before one was timed
ATTEMPTS = 3  # workers that may die under one request; it may be what kills them
RESTART_SECONDS = 1.0  # from the end of the planner process to another one
PACE = 0.2  # weight of the last run in the mean of wall seconds per predicted second
DEVICE = "device"  # the group of the line: shapes whose weights replace each other


@dataclass
class _Running:
    job: Job
    entry: Entry
    sent: float  # wall seconds
    at: float  # seconds of the device's clock
    lone: float  # predicted seconds of the run under way


class Service:
    """The state of a server. Create it in the event loop; `start` it, and `close` it at the end."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.metrics, self.line = settings, Metrics(), Line()
        self.graphs: dict[str, Graph] = {g.name: g for g in (api.load(path, trust=settings.trust) for path in settings.graphs)}
        self.defaults: dict[str, Shape] = {g.name: (g.name, settings_of(g, g.for_planning({}))) for g in self.graphs.values()}
        self.shapes: OrderedDict[Shape, asyncio.Future[PlannedShape]] = OrderedDict()
        self.draining = False
        self.pace = 1.0  # wall seconds per predicted second: a prior may be wrong, and `sim` predicts virtual seconds
        self._plan_seconds, self._clock, self._past = PLAN_SECONDS, 0.0, 0.0
        self._running: _Running | None = None
        self._worker: Child | None = None
        self._planner: Child | None = None
        self._ready, self._closed, self._deaths = False, False, 0
        self._idle = asyncio.Event()
        self._idle.set()

    # -- life

    def start(self) -> None:
        """Starts the processes, and plans each graph at its defaults."""
        self._start_worker()
        self._start_planner()
        for graph in self.graphs.values():
            self.shape(self.defaults[graph.name], graph.for_planning({}))

    @property
    def ready(self) -> bool:
        """Whether a request that is sent now would be run."""
        return self._ready and not self.draining and all(self.shapes[key].done() for key in self.defaults.values())

    async def drain(self) -> None:
        """Refuses new requests, and waits for those that were admitted, up to ``drain_seconds``; then cancels them."""
        self.draining = True
        try:
            async with asyncio.timeout(self.settings.drain_seconds):
                await self._idle.wait()
        except TimeoutError:
            self.cancel_all()

    def cancel_all(self) -> None:
        """Cancels all requests: those that wait at once, the running one at the end of its step."""
        for entry in list(self.line.entries):
            self.cancel(entry.item, self._stopping())
        if self._running is not None:
            self.cancel(self._running.job, self._stopping())

    async def idle(self) -> None:
        """Waits until no request is left."""
        await self._idle.wait()

    def close(self) -> None:
        """Ends the processes."""
        self._closed = True
        for child in (self._worker, self._planner):
            if child is not None:
                child.stop()

    def _stopping(self) -> Refused:
        return Refused(503, "the server is stopping", "stopping", retry_seconds=10)

    # -- planning

    def shape(self, key: Shape, inputs: Any) -> asyncio.Future[PlannedShape]:
        """The plan of a shape, made once. ``inputs``: any of this shape. Raises Refused (429) where many wait to be planned."""
        if key not in self.shapes:
            waiting = sum(not of.done() for of in self.shapes.values())
            if waiting >= PLANNING + len(self.graphs):
                text = f"{waiting} sizes are being planned"
                raise Refused(429, text, "busy_planning", retry_seconds=waiting * self._plan_seconds)
            self.shapes[key] = asyncio.get_running_loop().create_future()
            self.shapes[key].add_done_callback(lambda future: future.exception())  # nobody may wait for it
            sizes = {name: inputs[name] for name, _ in key[1]}
            assert self._planner is not None
            self._planner.send("plan", key=key, graph=key[0], inputs=sizes)
        self.shapes.move_to_end(key)
        spare = [old for old, of in self.shapes.items() if of.done() and old not in self.defaults.values()]
        for old in spare[: max(0, len(self.shapes) - KEPT_SHAPES)]:
            del self.shapes[old]
        return self.shapes[key]

    def _start_planner(self) -> None:
        if self._closed:
            return
        self._planner = Child(plan_forever, self.settings, self._hear_planner, self._planner_died)

    def _hear_planner(self, kind: str, key: Shape, **content: Any) -> None:
        future = self.shapes.get(key)
        self.metrics.plans.labels("planned" if kind == "planned" else "refused").inc()
        if future is None or future.done():
            return
        if kind == "planned":
            future.set_result(content["shape"])
        else:
            code = "does_not_fit" if content["more"] else "invalid_value"
            future.set_exception(Refused(content["status"], content["message"], code, more=content["more"]))

    def _planner_died(self) -> None:
        for key, future in [(key, of) for key, of in self.shapes.items() if not of.done()]:
            if key not in self.defaults.values():
                del self.shapes[key]
            future.set_exception(Refused(503, "planning was interrupted", "interrupted", retry_seconds=self._plan_seconds))
        asyncio.get_running_loop().call_later(RESTART_SECONDS, self._start_planner)

    # -- admission

    async def submit(self, asked: Asked, owner: str, folder: Path, *, preview: bool = False) -> Job:
        """Admits a request. Raises Refused: 422 where no plan fits, 429 where the queue is too long, 503 while the server stops."""
        self._refuse_stopping()
        job = Job(asked, owner, folder, preview)
        planned = await asyncio.shield(self.shape(asked.shape, asked.runs[0]))
        self._refuse_stopping()
        job.planned = time.monotonic() - job.submitted
        if job.planned > 0.05:  # it was not there
            self._plan_seconds += 0.2 * (job.planned - self._plan_seconds)
        entry = Entry(job, DEVICE, asked.shape, planned.cost, len(asked.runs))
        begin = self._clock + self._left_seconds()
        _, start = self.line.place(entry, self._clock, begin)
        wait = (start - self._clock) * self.pace
        if wait > self.settings.queue_seconds:
            text = f"the queue takes {wait:.0f} s, and at most {self.settings.queue_seconds:.0f} s are accepted"
            raise Refused(429, text, "queue_full", retry_seconds=wait - self.settings.queue_seconds)
        self.line.add(entry, self._clock, begin)
        job.admitted_at, job.promised_at, job.seconds = self._clock, entry.start, self.line.seconds(entry, {})
        self._idle.clear()
        self._next()
        return job

    def predicted_wait(self, job: Job) -> float:
        """Predicted wall seconds until ``job`` begins."""
        begin = self._clock + self._left_seconds()
        starts = zip(self.line.entries, self.line.starts(self.line.entries, begin), strict=False)
        return next(((start - self._clock) * self.pace for entry, start in starts if entry.item is job), 0.0)

    def cancel(self, job: Job, why: Refused | None = None) -> None:
        """Cancels ``job``: at once where it waits, else when the worker says so."""
        if job.ended:
            return
        job.error = why or Refused(409, "the request was cancelled", "cancelled")
        if self._running is not None and self._running.job is job:
            assert self._worker is not None
            self._worker.send("cancel", id=job.id)
        else:
            self.line.remove(job)
            self._end(job, "cancelled")

    def _refuse_stopping(self) -> None:
        if self.draining:
            raise self._stopping()

    def _left_seconds(self) -> float:
        """Predicted seconds, on the device's clock, until what runs now has ended."""
        if self._running is None:
            return 0.0
        later = len(self._running.job.asked.runs) - len(self._running.job.measured) - 1
        left = self._running.lone - (self._clock - self._running.at)
        return max(0.0, left) + later * self._running.entry.cost.again_seconds

    # -- the worker

    def _start_worker(self) -> None:
        if self._closed:
            return
        self._worker = Child(work_forever, self.settings, self._hear_worker, self._worker_died)
        self.metrics.worker.set(self._worker.process.pid or 0)

    def _next(self) -> None:
        """Hands the next request to the worker, if it is free."""
        self.metrics.waiting.set(len(self.line.entries))
        self.metrics.waiting_seconds.set((self.line.end(self._clock + self._left_seconds()) - self._clock) * self.pace)
        if self._running is not None or not self._ready or not self.line.entries:
            return
        first = self.line.entries[0]
        warm = self.line.warm.get(first.group) == first.shape
        entry = self.line.pop()
        job = entry.item
        if job.begun_at is None:
            job.begun_at, job.queued = self._clock, time.monotonic() - job.submitted - job.planned
            self.metrics.queue_seconds.labels("predicted").observe(job.promised_at - job.admitted_at)
            self.metrics.queue_seconds.labels("measured").observe(job.begun_at - job.admitted_at)
        lone = entry.cost.again_seconds if warm else entry.cost.first_seconds
        self._running = _Running(job, entry, time.monotonic(), self._clock, lone)
        self._send_run()

    def _send_run(self) -> None:
        assert self._running is not None
        assert self._worker is not None
        job, self._running.sent, self._running.at = self._running.job, time.monotonic(), self._clock
        number = len(job.measured)
        folder = job.folder / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        job.change(state="running", stage="", step=0, steps=0)
        self.metrics.running.set(1)
        asked = job.asked
        self._worker.send(
            "run",
            id=job.id,
            graph=asked.graph,
            inputs=asked.runs[number],
            folder=folder,
            suffix=asked.suffix,
            preview=job.preview_wanted,
            alone=True,
        )

    def _hear_worker(self, kind: str, clock_seconds: float | None = None, **content: Any) -> None:
        if clock_seconds is not None:
            self._clock = self._past + clock_seconds
        if kind == "ready":
            self._ready = True
            self._next()
            return
        running = self._running
        if running is None or content["id"] != running.job.id:
            return
        job = running.job
        if kind == "step":
            self._deaths = 0
            job.change(stage=content["stage"], step=content["done"], steps=content["steps"])
            job.preview = content.get("preview") or job.preview
        elif kind == "done":
            self._took(running, content)
        elif kind == "cancelled":
            self.line.warm.clear()
            self._finish("cancelled")
        elif job.attempts and content["status"] == 500 and any(job.folder.rglob("*.steps")):  # the saved state is of no use
            shutil.rmtree(job.folder / str(len(job.measured)))
            self.line.warm.clear()
            self._send_run()
        else:
            self.line.warm.clear()
            retry = 5 + self._left_seconds() if content["status"] == 503 else None
            job.error = job.error or Refused(content["status"], content["message"], "run_failed", retry_seconds=retry)
            self._finish("failed")

    def _took(self, running: _Running, content: dict[str, Any]) -> None:
        """A run has ended with a picture."""
        job, (planned, _) = running.job, content["seconds"]
        if planned > 0 and not job.attempts:
            self.pace += PACE * ((time.monotonic() - running.sent) / planned - self.pace)
        for stage, pair in content["stages"].items():
            for kind, seconds in zip(("planned", "measured"), pair, strict=True):
                self.metrics.stage_seconds.labels(job.asked.graph, stage, kind).observe(seconds)
        for kind, nbytes in zip(("planned", "measured"), content["peak_bytes"], strict=True):
            self.metrics.peak_bytes.labels(job.asked.graph, kind).set(nbytes)
        self.metrics.pictures.labels(job.asked.graph).inc()
        job.pictures += [path.read_bytes() for path in content["files"]]
        job.measured.append(content)
        if job.error is not None:
            self._finish("cancelled")
        elif len(job.measured) == len(job.asked.runs):
            self._finish("done")
        else:
            running.lone = running.entry.cost.again_seconds
            self._send_run()

    def _finish(self, state: str) -> None:
        assert self._running is not None
        job, self._running = self._running.job, None
        self._end(job, state)
        self._next()

    def _end(self, job: Job, state: str) -> None:
        shutil.rmtree(job.folder, ignore_errors=True)
        status = 200 if job.error is None else job.error.status
        self.metrics.requests.labels(job.asked.graph, str(status)).inc()
        self.metrics.running.set(self._running is not None)
        job.change(state=state)
        if self._running is None and not self.line.entries:
            self._idle.set()

    def _worker_died(self) -> None:
        """Starts another worker. The request that ran goes on there, unless it may be what ends the workers."""
        self._ready, self._past = False, self._clock
        self._deaths += 1
        self.line.warm.clear()
        self.metrics.restarts.inc()
        if (running := self._running) is not None:
            self._running = None
            running.job.attempts += 1
            if running.job.error is not None:
                self._end(running.job, "cancelled")
            elif running.job.attempts >= ATTEMPTS:
                text = f"the worker process ended {ATTEMPTS} times under this request"
                running.job.error = Refused(503, text, "worker_died", retry_seconds=30)
                self._end(running.job, "failed")
            else:
                running.job.change(state="waiting")
                self.line.entries.insert(0, running.entry)
        wait = min(30.0, 2.0 ** (self._deaths - 2)) if self._deaths > 1 else 0.0  # the longer the more often it died
        asyncio.get_running_loop().call_later(wait, self._start_worker)

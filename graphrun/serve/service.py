"""Admits requests, keeps the queue, and hands one after another to the worker process. Runs in the
event loop of the server.

submit -> plan of the shape (once) -> promised seconds, or 422 or 429 -> line -> worker -> pictures

Where several runs of a shape wait, the planner is asked whether they take less together, stage by
stage.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphrun import api
from graphrun.graph.graph import Graph
from graphrun.graph.settings import settings_of
from graphrun.serve.asked import Asked, Shape
from graphrun.serve.child import Child
from graphrun.serve.clustered import work_on_a_cluster
from graphrun.serve.errors import Refused
from graphrun.serve.jobs import Job
from graphrun.serve.line import Entry, Line, go_together, is_warm
from graphrun.serve.metrics import Metrics
from graphrun.serve.planner import PlannedShape, plan_forever
from graphrun.serve.settings import Settings
from graphrun.serve.shares import RECENT, SHARES, WHOLE, Arrangement, best
from graphrun.serve.worker import work_forever

# plans that are remembered; those asked for longest ago are read from the cache folder again
KEPT_SHAPES = 256
PLANNING = 8  # shapes that may wait to be planned
PLAN_SECONDS = 5.0  # of planning a shape, before one was timed
ATTEMPTS = 3  # workers that may die under one request; it may be what kills them
RESTART_SECONDS = 1.0  # from the end of the planner process to another one
PACE = 0.2  # weight of the last run in the mean of wall seconds per predicted second


@dataclass
class _Running:
    """One entry, or those that go together: what is left of them. ``planned``: seconds of the runs
    that have ended."""

    entries: list[Entry]
    together: bool
    sent: float  # wall seconds
    at: float  # seconds of the device's clock
    lone: float  # predicted seconds of the run under way, or of all that go together
    stream: bool  # whether these run at once
    count: int  # of the entries at first
    planned: float = 0.0
    begun: str = ""  # the request that the worker is at

    @property
    def entry(self) -> Entry:
        """Of a run by itself."""
        return self.entries[0]

    @property
    def job(self) -> Job:
        """Of a run by itself."""
        job: Job = self.entry.item
        return job

    def of(self, id: str) -> Entry | None:
        """The entry of request ``id``."""
        return next((entry for entry in self.entries if entry.item.id == id), None)


class Service:
    """The state of a server. Create it in the event loop; `start` it, and `close` it at the end."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.metrics, self.line = settings, Metrics(), Line()
        self.created = int(time.time())
        self.graphs: dict[str, Graph] = {
            g.name: g for g in (api.load(path, trust=settings.trust) for path in settings.graphs)
        }
        self.defaults: dict[str, Shape] = {
            g.name: (g.name, settings_of(g, g.for_planning({}))) for g in self.graphs.values()
        }
        # by share of the budgets
        self.shapes: OrderedDict[tuple[Shape, float], asyncio.Future[PlannedShape]] = OrderedDict()
        self.shares: Arrangement = {}
        self._recent: deque[str] = deque(maxlen=RECENT)  # graphs of the runs of late
        self.draining = False
        # wall seconds per predicted second: a prior may be wrong, and `sim` predicts virtual
        # seconds
        self.pace = 1.0
        self._plan_seconds, self._clock, self._past = PLAN_SECONDS, 0.0, 0.0
        self._running: _Running | None = None
        self._worker: Child | None = None
        self._planner: Child | None = None
        # what the planner is asked whether it goes together
        self._looking: tuple[Shape, float] | None = None
        self._ready, self._closed, self._deaths = False, False, 0
        self._unplanned = 0  # requests that wait for a plan
        # done when all requests are cancelled
        self._stopped = asyncio.get_running_loop().create_future()
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
        planned = (
            of.done()
            for (key, share), of in self.shapes.items()
            if share == WHOLE and key in self.defaults.values()
        )
        return self._ready and not self.draining and all(planned)

    async def drain(self) -> None:
        """Refuses new requests, and waits for those that were admitted, up to ``drain_seconds``;
        then cancels them."""
        self.draining = True
        try:
            async with asyncio.timeout(self.settings.drain_seconds):
                await self._idle.wait()
        except TimeoutError:
            self.cancel_all()

    def cancel_all(self) -> None:
        """Cancels all requests: those that wait at once, for a plan too, the running one at the end
        of its step."""
        if not self._stopped.done():
            self._stopped.set_result(None)
        for entry in list(self.line.entries):
            self.cancel(entry.item, Refused.stopping())
        for entry in list(self._running.entries) if self._running is not None else ():
            self.cancel(entry.item, Refused.stopping())

    async def idle(self) -> None:
        """Waits until no request is left."""
        await self._idle.wait()

    def close(self) -> None:
        """Ends the processes."""
        self._closed = True
        for child in (self._worker, self._planner):
            if child is not None:
                child.stop()

    # -- planning

    def shape(
        self, shape: Shape, inputs: Any, share: float = WHOLE
    ) -> asyncio.Future[PlannedShape]:
        """The plan of a shape within ``share`` of the budgets, made once. ``inputs``: any of this
        shape. Raises Refused: 429 where many wait to be planned, 503 while the planner is started
        again."""
        key = shape, share
        if key not in self.shapes:
            waiting = sum(not of.done() for of in self.shapes.values())
            if waiting >= PLANNING + len(self.graphs):
                text = f"{waiting} sizes are being planned"
                raise Refused(
                    429, text, "busy_planning", retry_seconds=waiting * self._plan_seconds
                )
            if self._planner is None:
                raise Refused(
                    503,
                    "the planner is started again",
                    "interrupted",
                    retry_seconds=RESTART_SECONDS,
                )
            self.shapes[key] = asyncio.get_running_loop().create_future()
            # nobody may wait for it
            self.shapes[key].add_done_callback(lambda future: future.exception())
            sizes = {name: inputs[name] for name, _ in shape[1]}
            self._planner.send("plan", key=key, graph=shape[0], inputs=sizes, share=share)
        self.shapes.move_to_end(key)
        spare = [
            old
            for old, of in self.shapes.items()
            if of.done() and old[0] not in self.defaults.values()
        ]
        for old in spare[: max(0, len(self.shapes) - KEPT_SHAPES)]:
            del self.shapes[old]
        return self.shapes[key]

    def _plan_together(self, entry: Entry) -> None:
        """Has the planner look whether runs as those of ``entry`` take less together, if it has
        nothing else to do."""
        key = _key(entry)
        alike = sum(each.runs for each in self.line.entries if each.shape == entry.shape)
        if (
            self._planner is None
            or alike < 2
            or not all(of.done() for of in self.shapes.values())
            or self._looking is not None
        ):
            return
        planned = self.shapes[key].result() if key in self.shapes else None
        if planned is not None and not planned.looked:
            self._looking = key
            inputs = entry.item.asked.runs[0]
            sizes = {name: inputs[name] for name, _ in key[0][1]}
            self._planner.send(
                "plan_together", key=key, graph=key[0][0], inputs=sizes, budgets=planned.budgets
            )

    def _start_planner(self) -> None:
        if self._closed:
            return
        self._planner = Child(plan_forever, self.settings, self._hear_planner, self._planner_died)

    def _hear_planner(self, kind: str, key: tuple[Shape, float], **content: Any) -> None:
        future = self.shapes.get(key)
        if kind == "together":
            self._looking, parts = None, content["parts"]
            if future is not None and parts is not None:
                planned = future.result()
                cost = replace(planned.cost, segments=tuple(parts.values()), stages=tuple(parts))
                future = self.shapes[key] = asyncio.get_running_loop().create_future()
                future.set_result(replace(planned, cost=cost, looked=True))
                for entry in self.line.entries:
                    if _key(entry) == key:
                        entry.cost = cost
            return
        self.metrics.plans.labels("planned" if kind == "planned" else "refused").inc()
        if future is None or future.done():
            return
        if kind == "planned":
            future.set_result(content["shape"])
        else:
            future.set_exception(
                Refused(
                    content["status"], content["message"], content["code"], more=content["more"]
                )
            )

    def _planner_died(self) -> None:
        self._planner = self._looking = None
        for key in [
            key for key, of in self.shapes.items() if not of.done()
        ]:  # the next request of the shape asks again
            self.shapes.pop(key).set_exception(
                Refused(
                    503, "planning was interrupted", "interrupted", retry_seconds=self._plan_seconds
                )
            )
        asyncio.get_running_loop().call_later(RESTART_SECONDS, self._start_planner)

    # -- admission

    async def submit(self, asked: Asked, owner: str, folder: Path, *, preview: bool = False) -> Job:
        """Admits a request. Raises Refused: 422 where no plan fits, 429 where the queue is too
        long, 503 while the server stops."""
        self._refuse_if(self.draining)
        job = Job(asked, owner, folder, preview)
        with self._at_work():
            planned, share = await self._plan(asked)
            return self._admit(job, planned, share)

    async def _plan(self, asked: Asked) -> tuple[PlannedShape, float]:
        """The plan for ``asked``, and the share of the budgets that it is within."""
        planned = await self._unless_stopped(self.shape(asked.shape, asked.runs[0]))
        share = self.shares.get(asked.graph, WHOLE)
        if share == WHOLE:
            return planned, share
        try:
            return await self._unless_stopped(self.shape(asked.shape, asked.runs[0], share)), share
        except Refused:
            self._refuse_if(self._stopped.done())
            return planned, WHOLE  # it fits all of the budgets

    async def _unless_stopped(self, plan: asyncio.Future[PlannedShape]) -> PlannedShape:
        """``plan`` when it is made. Raises Refused where all requests are cancelled before."""
        await asyncio.wait({plan, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
        self._refuse_if(self._stopped.done())
        return plan.result()

    def _refuse_if(self, stops: bool) -> None:
        if stops:
            raise Refused.stopping() from None

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """A request that waits for its plan is work in progress, as those in the queue are."""
        self._unplanned += 1
        self.metrics.planning.set(self._unplanned)
        self._idle.clear()
        try:
            yield
        finally:
            self._unplanned -= 1
            self.metrics.planning.set(self._unplanned)
            self._idle_now()

    def _admit(self, job: Job, planned: PlannedShape, share: float) -> Job:
        """Puts ``job`` in the queue. Raises Refused (429) where that is too long."""
        asked = job.asked
        job.planned = time.monotonic() - job.submitted
        if job.planned > 0.05:  # it was not there
            self._plan_seconds += 0.2 * (job.planned - self._plan_seconds)
        job.budgets = planned.budgets
        together = self.shares.items() if self.shares.get(asked.graph) == share else ()
        group = asked.graph, share
        entry = Entry(
            job, group, asked.shape, planned.cost, len(asked.runs), beside=frozenset(together)
        )
        begin = self._clock + self._left_seconds()
        *_, start, _ = self.line.place(entry, self._clock, begin)
        wait = (start - self._clock) * self.pace
        if wait > self.settings.queue_seconds:
            text = f"the queue takes {wait:.0f} s, and at most {self.settings.queue_seconds:.0f} s are accepted"
            raise Refused(429, text, "queue_full", retry_seconds=wait - self.settings.queue_seconds)
        self.line.add(entry, self._clock, begin)
        job.admitted_at, job.promised_at, job.seconds = (
            self._clock,
            entry.start,
            entry.end - entry.start,
        )
        self._plan_together(entry)
        self._next()
        return job

    def _arrange(self, graph: str) -> None:
        """Notes a run of ``graph``, and decides which graphs stay together from now on. What waits
        is run as it was planned."""
        self._recent.append(graph)
        used = sorted(set(self._recent))
        keys = [(self.defaults[name], share) for name in used for share in (WHOLE, *SHARES)]
        missing = [key for key in keys if key not in self.shapes]
        if (
            missing
            and len(used) > 1
            and self._planner is not None
            and all(of.done() for of in self.shapes.values())
        ):
            shape, share = missing[0]  # one at a time: clients' shapes wait for one plan at most
            self.shape(shape, self.graphs[shape[0]].for_planning({}), share)
        plans = {
            key: self.shapes[key] for key in keys if key in self.shapes and self.shapes[key].done()
        }
        costs = {
            (of[0], share): plan.result().cost
            for (of, share), plan in plans.items()
            if plan.exception() is None
        }
        if all((name, WHOLE) in costs for name in used):
            self.shares = best(self.shares, tuple(self._recent), costs)
        for name in self.graphs:
            self.metrics.share.labels(name).set(self.shares.get(name, WHOLE))

    def predicted_wait(self, job: Job) -> float:
        """Predicted wall seconds until ``job`` begins."""
        begin = self._clock + self._left_seconds()
        times = zip(self.line.entries, self.line.times(self.line.entries, begin), strict=True)
        return next(
            ((start - self._clock) * self.pace for entry, (start, _) in times if entry.item is job),
            0.0,
        )

    def cancel(self, job: Job, why: Refused | None = None) -> None:
        """Cancels ``job``: at once where it waits, else when the worker says so."""
        if job.ended:
            return
        job.error = why or Refused(409, "the request was cancelled", "cancelled")
        if self._running is not None and self._running.of(job.id) is not None:
            assert self._worker is not None
            self._worker.send("cancel", id=job.id)
        else:
            self.line.remove(job)
            self._end(job, "cancelled")

    def _left_seconds(self) -> float:
        """Predicted seconds, on the device's clock, until what runs now has ended."""
        if self._running is None:
            return 0.0
        left = self._running.lone - (self._clock - self._running.at)
        if self._running.together:
            return max(0.0, left)
        later = len(self._running.job.asked.runs) - len(self._running.job.measured) - 1
        return max(0.0, left) + later * self._running.entry.cost.again_seconds

    # -- the worker

    def _start_worker(self) -> None:
        if self._closed:
            return
        main = work_forever if self.settings.cluster is None else work_on_a_cluster
        self._worker = Child(main, self.settings, self._hear_worker, self._worker_died)
        self.metrics.worker.set(self._worker.process.pid or 0)

    def _next(self) -> None:
        """Hands the next request to the worker, if it is free."""
        self.metrics.waiting.set(len(self.line.entries))
        self.metrics.waiting_seconds.set(
            (self.line.end(self._clock + self._left_seconds()) - self._clock) * self.pace
        )
        if self._running is not None or not self._ready or not self.line.entries:
            return
        warm = dict(self.line.warm)
        entries = self.line.pop()
        together = go_together(entries, warm)
        for job in (entry.item for entry in entries):
            job.together = len(entries)
            if job.begun_at is None:
                job.begun_at, job.queued = (
                    self._clock,
                    time.monotonic() - job.submitted - job.planned,
                )
        first = entries[0]
        cost, there = first.cost, is_warm(first, warm)
        lone = (
            cost.together(sum(entry.runs for entry in entries), there)[-1]
            if together
            else cost.once(there)
        )
        stream = together and cost.stream is not None
        self._running = _Running(
            entries, together, time.monotonic(), self._clock, lone, stream, len(entries)
        )
        self.metrics.running.set(len(entries))
        if together:
            self._send_together()
        else:
            self._send_run()

    def _send_together(self) -> None:
        assert self._running is not None
        assert self._worker is not None
        runs, entry = list[dict[str, Any]](), self._running.entry
        for job in (each.item for each in self._running.entries):
            job.change(state="running", stage="", step=0, steps=0)
            job.measured, job.pictures = [], []  # of runs before the worker died
            for number in range(len(job.asked.runs)):
                runs.append(self._run_of(job, number))
        self._worker.send(
            "run_together",
            runs=runs,
            group=entry.group,
            graph=entry.item.asked.graph,
            segments=entry.cost.stages,
            budgets=entry.item.budgets,
            beside=entry.beside,
        )

    def _run_of(self, job: Job, number: int) -> dict[str, Any]:
        """What the worker is told of the ``number``-th run of ``job``. Makes its folder."""
        folder = job.folder / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        own = {
            "inputs": job.asked.runs[number],
            "folder": folder,
            "suffix": job.asked.suffix,
            "preview": job.preview_wanted,
        }
        return {"id": job.id, "number": number, **own}

    def _send_run(self) -> None:
        assert self._running is not None
        assert self._worker is not None
        job, self._running.sent, self._running.at = self._running.job, time.monotonic(), self._clock
        job.change(state="running", stage="", step=0, steps=0)
        entry, run = self._running.entry, self._run_of(job, len(job.measured))
        del run["number"]
        own = {
            "graph": job.asked.graph,
            "budgets": job.budgets,
            "group": entry.group,
            "beside": entry.beside,
        }
        self._worker.send("run", **run, **own)

    def _hear_worker(self, kind: str, clock_seconds: float | None = None, **content: Any) -> None:
        if clock_seconds is not None:
            self._clock = self._past + clock_seconds
            self.metrics.clock.set(self._clock)
        if kind == "ready":
            self._ready = True
            self._next()
            return
        running = self._running
        if running is None:
            return
        if kind == "together":
            self._ended_together(running)
            return
        if (entry := running.of(content["id"])) is None:
            return
        job = entry.item
        running.begun = job.id
        if kind == "step":
            self._deaths = 0
            job.change(stage=content["stage"], step=content["done"], steps=content["steps"])
            job.preview = content.get("preview") or job.preview
        elif kind == "done":
            self._took(running, entry, content)
        elif kind == "apart":  # it runs by itself when the others have ended
            entry.batch = None
            job.measured, job.pictures = [], []
            shutil.rmtree(job.folder / str(content["number"]), ignore_errors=True)
        elif kind == "cancelled":
            if not running.together:
                self.line.warm.clear()
            self._finish(entry, "cancelled")
        elif (
            job.attempts and content["status"] == 500 and any(job.folder.rglob("*.steps"))
        ):  # the saved state is of no use
            shutil.rmtree(job.folder / str(len(job.measured)))
            self.line.warm.clear()
            self._send_run()
        elif kind == "failed":
            self.line.warm.clear()
            retry = 5 + self._left_seconds() if content["status"] == 503 else None
            job.error = job.error or Refused(
                content["status"], content["message"], "run_failed", retry_seconds=retry
            )
            self._finish(entry, "failed")

    def _took(self, running: _Running, entry: Entry, content: dict[str, Any]) -> None:
        """A run of ``entry`` has ended with a picture."""
        job: Job = entry.item
        if (
            running.together and entry.batch is None
        ):  # another run of it failed, and all of them run again
            return
        planned, _ = content["seconds"]
        running.planned += planned
        if planned > 0 and not job.attempts and not running.together:
            self._keep_pace(running)
        for stage, pair in content["stages"].items():
            for kind, seconds in zip(("planned", "measured"), pair, strict=True):
                self.metrics.stage_seconds.labels(job.asked.graph, stage, kind).observe(seconds)
        for kind, nbytes in zip(("planned", "measured"), content["peak_bytes"], strict=True):
            self.metrics.peak_bytes.labels(job.asked.graph, kind).set(nbytes)
        self.metrics.pictures.labels(job.asked.graph).inc()
        self.metrics.overruns.labels(job.asked.graph).inc(len(content["overruns"]))
        job.pictures += [path.read_bytes() for path in content["files"]]
        job.measured.append(content)
        self._arrange(job.asked.graph)
        whole = len(job.measured) == len(job.asked.runs)
        if running.together and whole and running.count > 1:
            took = sum(of["seconds"][1] for of in job.measured)
            # the seconds between its stages were in the queue too
            job.begun_at = max(job.admitted_at, self._clock - took)
            job.queued = max(
                job.queued, time.monotonic() - job.submitted - job.planned - took * self.pace
            )
        if job.error is not None and (whole or not running.together):
            self._finish(entry, "cancelled")
        elif whole:
            self._finish(entry, "done")
        elif not running.together:
            running.planned, running.lone = 0.0, entry.cost.again_seconds
            self._send_run()

    def _keep_pace(self, running: _Running) -> None:
        """Notes how long the runs of ``running`` took, on the wall."""
        self.pace += PACE * ((time.monotonic() - running.sent) / running.planned - self.pace)

    def _finish(self, entry: Entry, state: str) -> None:
        """``entry``, which ran, has ended; where others go with it, they go on."""
        assert self._running is not None
        job, running = entry.item, self._running
        if job.begun_at is not None and state == "done":
            self.metrics.queue_seconds.labels("predicted").observe(
                job.promised_at - job.admitted_at
            )
            self.metrics.queue_seconds.labels("measured").observe(job.begun_at - job.admitted_at)
        running.entries = [each for each in running.entries if each is not entry]
        if not running.together:
            self._running = None
        self._end(job, state)
        if not running.together:
            self._next()

    def _ended_together(self, running: _Running) -> None:
        """The worker is done with runs that went together. What is left of them runs next, each by
        itself."""
        if running.planned > 0 and not running.entries:
            if running.stream:
                running.planned = running.lone
            self._keep_pace(running)
        self._running = None
        self._put_back(running.entries, begun=False)
        self._next()

    def _put_back(self, entries: list[Entry], *, begun: bool) -> None:
        """Puts ``entries``, which ran, at the head of the queue, each by itself. ``begun``: the
        pictures they have are kept."""
        for entry in reversed(entries):
            job: Job = entry.item
            if job.error is not None:
                self._end(job, "cancelled")
                continue
            entry.batch = None
            if not begun:
                job.measured, job.pictures = [], []
            job.change(state="waiting")
            self.line.entries.insert(0, entry)
        self._idle_now()

    def _end(self, job: Job, state: str) -> None:
        shutil.rmtree(job.folder, ignore_errors=True)
        status = 200 if job.error is None else job.error.status
        self.metrics.requests.labels(job.asked.graph, str(status)).inc()
        self.metrics.running.set(0 if self._running is None else len(self._running.entries))
        job.change(state=state)
        self._idle_now()

    def _idle_now(self) -> None:
        if self._running is None and not self.line.entries and not self._unplanned:
            self._idle.set()

    def _worker_died(self) -> None:
        """Starts another worker. The request that ran goes on there, unless it may be what ends the
        workers."""
        self._ready, self._past = False, self._clock
        self._deaths += 1
        self.line.warm.clear()
        self.metrics.restarts.inc()
        if (running := self._running) is not None:
            self._running, left = None, list[Entry]()
            at = running.of(running.begun) or running.entry if running.entries else None
            for entry in running.entries:
                job: Job = entry.item
                job.attempts += entry is at
                if job.error is None and job.attempts >= ATTEMPTS:
                    text = f"the worker process ended {ATTEMPTS} times under this request"
                    job.error = Refused(503, text, "worker_died", retry_seconds=30)
                    self._end(job, "failed")
                else:
                    left.append(entry)
            self._put_back(left, begun=not running.together)
        # the longer the more often it died
        wait = min(30.0, 2.0 ** (self._deaths - 2)) if self._deaths > 1 else 0.0
        asyncio.get_running_loop().call_later(wait, self._start_worker)


def _key(entry: Entry) -> tuple[Shape, float]:
    """Of `Service.shapes`."""
    job, group = entry.item, entry.group
    assert isinstance(job, Job)
    assert isinstance(group, tuple)
    return job.asked.shape, group[1]

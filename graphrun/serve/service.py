"""Admit requests, queue them, and hand them to the worker process. Runs in the server's event loop.

    submit -> plan of the shape (once) -> promised seconds, or 422 or 429
           -> queue (`Line`) -> worker -> pictures

If several runs of a shape wait, the service asks the planner whether running them as a batch, stage
by stage, is faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphrun.errors import InputError
from graphrun.graph.settings import settings_of
from graphrun.serve.bodies import PictureRequest, RequestShape, body_model, picture_inputs
from graphrun.serve.child import Child
from graphrun.serve.clustered import work_on_a_cluster
from graphrun.serve.errors import Refused
from graphrun.serve.jobs import Job
from graphrun.serve.keys import Rates, read_keys
from graphrun.serve.line import Line, QueueEntry, go_together, is_warm
from graphrun.serve.log import log
from graphrun.serve.metrics import Metrics
from graphrun.serve.planner import PlannedShape, plan_forever
from graphrun.serve.settings import Settings
from graphrun.serve.shares import RECENT, SHARES, WHOLE, Arrangement, best
from graphrun.serve.state import JobStore
from graphrun.serve.worker import work_forever

# plans in memory; the least recently used ones are read from the cache folder again
KEPT_SHAPES = 256
KEPT_JOBS = 100  # ended jobs, as long as their pictures fit `KEPT_PICTURES_BYTES`
KEPT_PICTURES_BYTES = 2**28  # limit for all stored pictures together
PLANNING = 8  # shapes that may wait to be planned
PLAN_SECONDS = 5.0  # to plan a shape, until one is measured
# workers that may die while they run the same request; then it fails: it may be the cause
ATTEMPTS = 3
RESTART_SECONDS = 1.0  # until the planner process restarts
PACE = 0.2  # weight of the latest run in the mean of wall seconds per predicted second


@dataclass
class _Running:
    """The queue entry that runs now, or the entries of the batch that runs now.

    ``entries``: the unfinished ones; ``count``: their number at the start.
    ``finished_run_seconds``: planned seconds of the finished runs. ``predicted_seconds``: of the
    current run, or of the whole batch. ``is_concurrent``: the runs of the batch execute
    concurrently.
    """

    entries: list[QueueEntry]
    is_batch: bool
    sent_at: float  # wall seconds
    start_clock: float  # seconds of the device's clock
    predicted_seconds: float
    is_concurrent: bool
    count: int
    finished_run_seconds: float = 0.0
    active_id: str = ""  # the request that the worker is running

    @property
    def entry(self) -> QueueEntry:
        """The only entry. Not for a batch."""
        return self.entries[0]

    @property
    def job(self) -> Job:
        """The job of the only entry. Not for a batch."""
        job: Job = self.entry.item
        return job

    def entry_of(self, id: str) -> QueueEntry | None:
        """Return the entry of request ``id``; None if it is not running."""
        return next((entry for entry in self.entries if entry.item.id == id), None)


class Service:
    """The state of a server. Create it inside the event loop, `start` it, and `close` it at the
    end."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.metrics, self.line = settings, Metrics(), Line()
        self.created = int(time.time())
        self.graphs = settings.loaded_graphs()
        self.bodies = {
            graph.name: body_model(graph, settings.bounds) for graph in self.graphs.values()
        }
        self.defaults: dict[str, RequestShape] = {
            g.name: (g.name, settings_of(g, g.for_planning({}))) for g in self.graphs.values()
        }
        # by share of the budgets
        self.shapes: OrderedDict[tuple[RequestShape, float], asyncio.Future[PlannedShape]] = (
            OrderedDict()
        )
        # graph -> share of the budgets within which its weights stay on the device
        self.shares: Arrangement = {}
        self._recent: deque[str] = deque(maxlen=RECENT)  # graphs of the latest runs
        self.draining = False
        # wall seconds per predicted second: a data-sheet estimate may be wrong, and the seconds of
        # `sim` are virtual
        self.pace = 1.0
        self._plan_seconds, self._clock, self._earlier_clock_seconds = PLAN_SECONDS, 0.0, 0.0
        # ``_clock``: device clock over all workers; ``_earlier_clock_seconds``: its value when the
        # current worker started
        self._active: _Running | None = None
        self._worker: Child | None = None
        self._planner: Child | None = None
        # the shape for which the planner checks batches
        self._batch_key: tuple[RequestShape, float] | None = None
        self._ready, self._closed, self._deaths = False, False, 0
        self._unplanned = 0  # requests waiting for a plan
        self.keys, self._rates = settings.keys, Rates()
        self.store = JobStore(settings.state) if settings.state is not None else None
        self.jobs: OrderedDict[str, Job] = OrderedDict()  # of ``/v1/jobs``, the oldest first
        # (owner, Idempotency-Key) -> its job
        self._keys: dict[tuple[str, str], asyncio.Future[Job]] = {}
        self._warmed, self._tasks = not settings.warms, list[asyncio.Future[None]]()
        # done when all requests are cancelled
        self._stopped = asyncio.get_running_loop().create_future()
        self._idle = asyncio.Event()
        self._idle.set()

    # -- life

    def start(self) -> None:
        """Start the worker and planner processes, and plan each graph at its defaults."""
        self._start_worker()
        self._start_planner()
        for graph in self.graphs.values():
            self.shape(self.defaults[graph.name], graph.for_planning({}))
        for job in self.store.jobs(self.graphs) if self.store is not None else ():
            self._remember(job)
        waiting_jobs = [job for job in self.jobs.values() if not job.ended]
        if self.jobs:
            log("restored", waiting=len(waiting_jobs), ended=len(self.jobs) - len(waiting_jobs))
        self._tasks.append(asyncio.ensure_future(self._restore(waiting_jobs)))
        if self.settings.warms:
            self._tasks.append(asyncio.ensure_future(self._warm()))

    async def _restore(self, waiting_jobs: Sequence[Job]) -> None:
        """Admit stored jobs again, in their order and whatever the length of the queue."""
        for job in waiting_jobs:
            with self._at_work():
                try:
                    plan, share = await self._plan_patiently(job.request)
                except Refused as error:
                    if self.draining:
                        return  # the next server plans it
                    job.error = error
                    self._end(job, "failed")
                    continue
                if not self.draining and not job.ended:  # a client may have cancelled it
                    self._admit(job, plan, share, is_bounded=False)

    async def _warm(self) -> None:
        """Make a picture with every graph that needs none, at its defaults; then the server is
        ready."""
        for graph in self.graphs.values():
            if any(graph.inputs[name].required for name in picture_inputs(graph)):
                continue
            shape, inputs = self.defaults[graph.name], graph.for_planning({})
            request = PictureRequest(graph.name, shape, (inputs,), ".png", as_url=False)
            folder = self.settings.folder / f"warm-{graph.name}"
            try:
                plan, share = await self._plan_patiently(request)
                job = Job(request, "", folder, preview_wanted=False)
                await self._admit(job, plan, share, is_bounded=False).end()
            except Refused as error:
                log("warming failed", graph=graph.name, error=error.message)
        self._warmed = True

    @property
    def ready(self) -> bool:
        """Whether a request sent now would run; with ``warms``, without loading weights first."""
        plans_ready = (
            future.done()
            for (key, share), future in self.shapes.items()
            if share == WHOLE and key in self.defaults.values()
        )
        return self._ready and self._warmed and not self.draining and all(plans_ready)

    async def drain(self) -> None:
        """Refuse new requests; wait up to ``drain_seconds`` for admitted ones, then cancel them.

        Stored jobs that have not begun wait for the next server.
        """
        self.draining = True
        for entry in [entry for entry in self.line.entries if entry.item.is_stored]:
            self.line.remove(entry.item)
        log(
            "draining",
            running=0 if self._active is None else len(self._active.entries),
            waiting=len(self.line.entries),
            unplanned=self._unplanned,
            stored=sum(job.is_stored and job.state == "waiting" for job in self.jobs.values()),
        )
        self._idle_now()
        try:
            async with asyncio.timeout(self.settings.drain_seconds):
                await self._idle.wait()
        except TimeoutError:
            self.cancel_all()

    def cancel_all(self) -> None:
        """Cancel all requests: waiting ones at once, running ones after their current step."""
        if not self._stopped.done():
            self._stopped.set_result(None)
        for entry in list(self.line.entries):
            self.cancel(entry.item, Refused.stopping())
        for entry in list(self._active.entries) if self._active is not None else ():
            self.cancel(entry.item, Refused.stopping())

    def reload_keys(self) -> None:
        """Read the file of API keys again. If it is malformed, the present keys stay."""
        if self.settings.keys_file is None:
            return
        try:
            self.keys = read_keys(self.settings.keys_file)
            log("keys read", keys=len(self.keys))
        except InputError as error:
            log("keys refused", error=error)

    async def idle(self) -> None:
        await self._idle.wait()

    def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for child in (self._worker, self._planner):
            if child is not None:
                child.stop()
        if self.store is not None:
            self.store.close()

    # -- planning

    def shape(
        self, shape: RequestShape, inputs: Any, share: float = WHOLE
    ) -> asyncio.Future[PlannedShape]:
        """Return the plan of a shape within ``share`` of the budgets, cached.

        ``inputs``: of any request of this shape. Raises Refused: 429 if too many shapes wait for a
        plan, 503 while the planner restarts.
        """
        key = shape, share
        if key not in self.shapes:
            pending_count = sum(not future.done() for future in self.shapes.values())
            if pending_count >= PLANNING + len(self.graphs):
                text = f"{pending_count} shapes of requests are being planned"
                raise Refused(
                    429, text, "busy_planning", retry_seconds=pending_count * self._plan_seconds
                )
            if self._planner is None:
                raise Refused(
                    503,
                    "the planner is started again",
                    "interrupted",
                    retry_seconds=RESTART_SECONDS,
                )
            self.shapes[key] = asyncio.get_running_loop().create_future()
            self.shapes[key].add_done_callback(_ignore_error)
            sizes = {name: inputs[name] for name, _ in shape[1]}
            self._planner.send("plan", key=key, graph=shape[0], inputs=sizes, share=share)
        self.shapes.move_to_end(key)
        spare = [
            old
            for old, future in self.shapes.items()
            if future.done() and old[0] not in self.defaults.values()
        ]
        for old in spare[: max(0, len(self.shapes) - KEPT_SHAPES)]:
            del self.shapes[old]
        return self.shapes[key]

    def _plan_batch(self, entry: QueueEntry) -> None:
        """Ask an idle planner whether a batch of runs like ``entry`` is faster."""
        key = _key(entry)
        alike_runs = sum(other.runs for other in self.line.entries if other.shape == entry.shape)
        if (
            self._planner is None
            or alike_runs < 2
            or not all(future.done() for future in self.shapes.values())
            or self._batch_key is not None
        ):
            return
        plan = self.shapes[key].result() if key in self.shapes else None
        if plan is not None and not plan.has_batch_plan:
            self._batch_key = key
            inputs = entry.item.request.runs[0]
            sizes = {name: inputs[name] for name, _ in key[0][1]}
            self._planner.send(
                "plan_batch", key=key, graph=key[0][0], inputs=sizes, budgets=plan.budgets
            )

    def _start_planner(self) -> None:
        if self._closed:
            return
        self._planner = Child(plan_forever, self.settings, self._hear_planner, self._planner_died)

    def _hear_planner(self, kind: str, key: tuple[RequestShape, float], **content: Any) -> None:
        future = self.shapes.get(key)
        if kind == "batch_plan":
            self._batch_key, parts = None, content["parts"]
            if future is not None and parts is not None:
                plan = future.result()
                cost = replace(plan.cost, segments=tuple(parts.values()), stages=tuple(parts))
                future = self.shapes[key] = asyncio.get_running_loop().create_future()
                future.set_result(replace(plan, cost=cost, has_batch_plan=True))
                for entry in self.line.entries:
                    if _key(entry) == key:
                        entry.cost = cost
            return
        self.metrics.plans.labels("planned" if kind == "planned" else "refused").inc()
        (graph, shape_settings), share = key
        answer = content["shape"].verdict if kind == "planned" else content["message"]
        log(kind, graph=graph, **dict(shape_settings), share=share, answer=answer)
        if future is None or future.done():
            return
        if kind == "planned":
            future.set_result(content["shape"])
        else:
            future.set_exception(
                Refused(
                    content["status"],
                    content["message"],
                    content["code"],
                    details=content["details"],
                )
            )

    def _planner_died(self) -> None:
        exit_code = None if self._planner is None else self._planner.process.exitcode
        log("planner ended", exit_code=exit_code)
        self._planner = self._batch_key = None
        # the next request of each shape plans it again
        for key in [key for key, future in self.shapes.items() if not future.done()]:
            self.shapes.pop(key).set_exception(
                Refused(
                    503, "planning was interrupted", "interrupted", retry_seconds=self._plan_seconds
                )
            )
        asyncio.get_running_loop().call_later(RESTART_SECONDS, self._start_planner)

    # -- admission

    async def submit(
        self, request: PictureRequest, owner: str, folder: Path, *, preview: bool = False
    ) -> Job:
        """Admit a request. Raises Refused: 422 if no plan fits, 429 if the queue is too long, 503
        while the server stops."""
        return await self._submit(Job(request, owner, folder, preview))

    async def submit_job(
        self,
        request: PictureRequest,
        owner: str,
        *,
        key: str = "",
        body: str = "",
        folder: Path | None = None,
    ) -> Job:
        """Admit a job of ``/v1/jobs`` or ``/v1/videos``.

        It outlives the server if that has a store, unless its ``folder`` has uploaded files.

        ``key``: the client's Idempotency-Key. If ``owner`` sent it before, that job is returned.
        ``body``: the digest of the request's body. Raises Refused as `submit`, and 422 if the key
        came with another body.
        """
        if key and (owner, key) in self._keys:
            earlier_job = await asyncio.shield(self._keys[owner, key])
            if earlier_job.body != body:
                text = "this Idempotency-Key came with another request before"
                raise Refused(422, text, "idempotency_key_reused")
            return earlier_job
        id = secrets.token_urlsafe(16)
        store = self.store if folder is None else None
        if folder is None:
            folder = self.settings.folder / id if store is None else store.folder_of(id)
        job = Job(request, owner, folder, preview_wanted=True, id=id, key=key, body=body)
        if key:
            self._keys[owner, key] = asyncio.get_running_loop().create_future()
            self._keys[owner, key].add_done_callback(_ignore_error)
        try:
            await self._submit(job)
        except BaseException as error:
            if key:
                reason = error if isinstance(error, Refused) else Refused.stopping()
                self._keys.pop((owner, key)).set_exception(reason)
            raise
        if store is not None:
            job.is_stored = True
            store.add(job)
        self._remember(job)
        self._forget_old_jobs()
        return job

    def _remember(self, job: Job) -> None:
        self.jobs[job.id] = job
        if job.key:
            future = asyncio.get_running_loop().create_future()
            self._keys.setdefault((job.owner, job.key), future).set_result(job)

    def _forget_old_jobs(self) -> None:
        """Forget the oldest ended jobs beyond `KEPT_JOBS` and `KEPT_PICTURES_BYTES`."""
        for old in [job for job in self.jobs.values() if job.ended]:
            nbytes = sum(len(data) for job in self.jobs.values() for data in job.pictures)
            if len(self.jobs) <= KEPT_JOBS and nbytes <= KEPT_PICTURES_BYTES:
                break
            self.forget(old)

    def forget(self, job: Job) -> None:
        """Forget an ended job, with its pictures and its Idempotency-Key."""
        del self.jobs[job.id]
        self._keys.pop((job.owner, job.key), None)
        if self.store is not None and job.is_stored:
            self.store.remove(job)

    async def _submit(self, job: Job) -> Job:
        self._refuse_if(self.draining)
        if (key := self.keys.get(job.owner)) is not None:
            self._rates.take(job.owner, key.per_minute, len(job.request.runs))
        with self._at_work():
            plan, share = await self._plan(job.request)
            return self._admit(job, plan, share)

    async def _plan_patiently(self, request: PictureRequest) -> tuple[PlannedShape, float]:
        """Return what `_plan` returns, also if the planner is busy or starts again."""
        while True:
            try:
                return await self._plan(request)
            except Refused as error:
                if error.retry_seconds is None or self.draining:
                    raise
            await asyncio.sleep(RESTART_SECONDS)

    async def _plan(self, request: PictureRequest) -> tuple[PlannedShape, float]:
        """Return the plan for ``request``, and its share of the budgets."""
        plan = await self._unless_stopped(self.shape(request.shape, request.runs[0]))
        share = self.shares.get(request.graph, WHOLE)
        if share == WHOLE:
            return plan, share
        try:
            return await self._unless_stopped(
                self.shape(request.shape, request.runs[0], share)
            ), share
        except Refused:
            self._refuse_if(self._stopped.done())
            return plan, WHOLE  # the request fits the whole budgets

    async def _unless_stopped(self, plan: asyncio.Future[PlannedShape]) -> PlannedShape:
        """Wait for ``plan``. Raises Refused if all requests are cancelled first."""
        await asyncio.wait({plan, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
        self._refuse_if(self._stopped.done())
        return plan.result()

    def _refuse_if(self, stops: bool) -> None:
        if stops:
            raise Refused.stopping() from None

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Count a request that waits for its plan as work in progress, like one in the queue."""
        self._unplanned += 1
        self.metrics.planning.set(self._unplanned)
        self._idle.clear()
        try:
            yield
        finally:
            self._unplanned -= 1
            self.metrics.planning.set(self._unplanned)
            self._idle_now()

    def _admit(self, job: Job, plan: PlannedShape, share: float, *, is_bounded: bool = True) -> Job:
        """Put ``job`` into the queue. Raises Refused (429) if it is too long and ``is_bounded``."""
        request = job.request
        job.planning_seconds = time.monotonic() - job.submitted
        if job.planning_seconds > 0.05:  # otherwise the plan existed
            self._plan_seconds += 0.2 * (job.planning_seconds - self._plan_seconds)
        job.budgets = plan.budgets
        resident_groups = self.shares.items() if self.shares.get(request.graph) == share else ()
        group = request.graph, share  # a pair as in ``resident_groups``
        entry = QueueEntry(
            job,
            group,
            request.shape,
            plan.cost,
            len(request.runs),
            resident_groups=frozenset(resident_groups),
        )
        begin = self._clock + self._left_seconds()
        *_, start, _ = self.line.place(entry, self._clock, begin)
        wait = (start - self._clock) * self.pace
        if is_bounded and wait > self.settings.queue_seconds:
            text = (
                f"the queue takes {wait:.0f} s, "
                f"and at most {self.settings.queue_seconds:.0f} s are accepted"
            )
            raise Refused(429, text, "queue_full", retry_seconds=wait - self.settings.queue_seconds)
        self.line.add(entry, self._clock, begin)
        job.admitted_at, job.promised_at, job.seconds = (
            self._clock,
            entry.start,
            entry.end - entry.start,
        )
        self._plan_batch(entry)
        self._next()
        return job

    def _arrange(self, graph: str) -> None:
        """Record a run of ``graph``, and decide which graphs keep their weights on the device.
        Waiting requests keep their plans."""
        self._recent.append(graph)
        names = sorted(set(self._recent))
        keys = [(self.defaults[name], share) for name in names for share in (WHOLE, *SHARES)]
        unplanned_keys = [key for key in keys if key not in self.shapes]
        if (
            unplanned_keys
            and len(names) > 1
            and self._planner is not None
            and all(future.done() for future in self.shapes.values())
        ):
            # one at a time, so that requests wait for at most one such plan
            shape, share = unplanned_keys[0]
            self.shape(shape, self.graphs[shape[0]].for_planning({}), share)
        plans = {
            key: self.shapes[key] for key in keys if key in self.shapes and self.shapes[key].done()
        }
        costs = {
            (graph_shape[0], share): plan.result().cost
            for (graph_shape, share), plan in plans.items()
            if plan.exception() is None
        }
        if all((name, WHOLE) in costs for name in names):
            self.shares = best(self.shares, tuple(self._recent), costs)
        for name in self.graphs:
            self.metrics.share.labels(name).set(self.shares.get(name, WHOLE))

    def predicted_wait(self, job: Job) -> float:
        """Return the predicted wall seconds until ``job`` starts."""
        begin = self._clock + self._left_seconds()
        times = zip(self.line.entries, self.line.times(self.line.entries, begin), strict=True)
        return next(
            ((start - self._clock) * self.pace for entry, (start, _) in times if entry.item is job),
            0.0,
        )

    def cancel(self, job: Job, reason: Refused | None = None) -> None:
        """Cancel ``job``: at once if it waits, otherwise when the worker reports it."""
        if job.ended:
            return
        job.error = reason or Refused(409, "the request was cancelled", "cancelled")
        if self._active is not None and self._active.entry_of(job.id) is not None:
            assert self._worker is not None
            self._worker.send("cancel", id=job.id)
        else:
            self.line.remove(job)
            self._end(job, "cancelled")

    def _left_seconds(self) -> float:
        """Return the predicted device seconds until the current run or batch ends."""
        if self._active is None:
            return 0.0
        rest_seconds = self._active.predicted_seconds - (self._clock - self._active.start_clock)
        if self._active.is_batch:
            return max(0.0, rest_seconds)
        pending_runs = len(self._active.job.request.runs) - len(self._active.job.results) - 1
        return max(0.0, rest_seconds) + pending_runs * self._active.entry.cost.again_seconds

    # -- the worker

    def _start_worker(self) -> None:
        if self._closed:
            return
        main = work_forever if self.settings.cluster is None else work_on_a_cluster
        self._worker = Child(main, self.settings, self._hear_worker, self._worker_died)
        self.metrics.worker.set(self._worker.process.pid or 0)
        log("worker started", process=self._worker.process.pid)

    def _next(self) -> None:
        """Hand the next request to the worker if the worker is free."""
        self.metrics.queue_length.set(len(self.line.entries))
        self.metrics.waiting_seconds.set(
            (self.line.end(self._clock + self._left_seconds()) - self._clock) * self.pace
        )
        if self._active is not None or not self._ready or not self.line.entries:
            return
        # group -> shape whose weights are on the device now; `pop` changes the line's mapping
        warm_shapes = dict(self.line.warm_shapes)
        entries = self.line.pop()
        is_batch = go_together(entries, warm_shapes)
        for job in (entry.item for entry in entries):
            job.batch_size = len(entries)
            if job.begun_at is None:
                job.begun_at, job.queued = (
                    self._clock,
                    time.monotonic() - job.submitted - job.planning_seconds,
                )
        first = entries[0]
        cost, has_weights = first.cost, is_warm(first, warm_shapes)
        predicted_seconds = (
            cost.end_seconds(sum(entry.runs for entry in entries), has_weights)[-1]
            if is_batch
            else cost.run_seconds(has_weights)
        )
        is_concurrent = is_batch and cost.concurrent_end_seconds is not None
        self._active = _Running(
            entries,
            is_batch,
            time.monotonic(),
            self._clock,
            predicted_seconds,
            is_concurrent,
            len(entries),
        )
        self.metrics.active_requests.set(len(entries))
        if is_batch:
            self._send_batch()
        else:
            self._send_run()

    def _send_batch(self) -> None:
        assert self._active is not None
        assert self._worker is not None
        runs, entry = list[dict[str, Any]](), self._active.entry
        for job in (member.item for member in self._active.entries):
            job.change(state="running", stage="", step=0, steps=0)
            self._drop_results(job)  # from before the worker died
            for number in range(len(job.request.runs)):
                runs.append(self._run_of(job, number))
        self._worker.send(
            "run_together",
            runs=runs,
            group=entry.group,
            graph=entry.item.request.graph,
            segments=entry.cost.stages,
            budgets=entry.item.budgets,
            resident_groups=entry.resident_groups,
        )

    def _run_of(self, job: Job, number: int) -> dict[str, Any]:
        """Return the message fields for run ``number`` of ``job``, and create the run's folder."""
        folder = job.folder / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        fields = {
            "inputs": job.request.runs[number],
            "folder": folder,
            "suffix": job.request.suffix,
            "preview": job.preview_wanted,
        }
        return {"id": job.id, "number": number, **fields}

    def _send_run(self) -> None:
        assert self._active is not None
        assert self._worker is not None
        job, self._active.sent_at, self._active.start_clock = (
            self._active.job,
            time.monotonic(),
            self._clock,
        )
        job.change(state="running", stage="", step=0, steps=0)
        entry, run = self._active.entry, self._run_of(job, len(job.results))
        del run["number"]
        session_fields = {
            "graph": job.request.graph,
            "budgets": job.budgets,
            "group": entry.group,
            "resident_groups": entry.resident_groups,
        }
        self._worker.send("run", **run, **session_fields)

    def _hear_worker(self, kind: str, clock_seconds: float | None = None, **content: Any) -> None:
        if clock_seconds is not None:
            self._clock = self._earlier_clock_seconds + clock_seconds
            self.metrics.clock.set(self._clock)
        if kind == "ready":
            self._ready = True
            self._next()
            return
        active = self._active
        if active is None:
            return
        if kind == "together":
            self._end_batch(active)
            return
        if (entry := active.entry_of(content["id"])) is None:
            return
        job = entry.item
        active.active_id = job.id
        if kind == "step":
            self._deaths = 0
            job.change(stage=content["stage"], step=content["done"], steps=content["steps"])
            job.preview = content.get("preview") or job.preview
        elif kind == "done":
            self._record_run(active, entry, content)
        elif kind == "apart":
            entry.batch = None  # the entry runs by itself, after the batch
            self._drop_results(job)
            shutil.rmtree(job.folder / str(content["number"]), ignore_errors=True)
        elif kind == "cancelled":
            if not active.is_batch:
                self.line.warm_shapes.clear()
            self._finish(entry, "cancelled")
        elif job.attempts and content["status"] == 500 and any(job.folder.rglob("*.steps")):
            # the worker cannot continue from the saved state of the loop; run again without it
            shutil.rmtree(job.folder / str(len(job.results)))
            self.line.warm_shapes.clear()
            self._send_run()
        elif kind == "failed":
            self.line.warm_shapes.clear()
            retry = 5 + self._left_seconds() if content["status"] == 503 else None
            job.error = job.error or Refused(
                content["status"], content["message"], "run_failed", retry_seconds=retry
            )
            self._finish(entry, "failed")

    def _record_run(self, active: _Running, entry: QueueEntry, content: dict[str, Any]) -> None:
        """Record a run of ``entry`` that ended with a picture."""
        job: Job = entry.item
        # another run of the entry failed, so all of its runs are repeated
        if active.is_batch and entry.batch is None:
            return
        planned_seconds, _ = content["seconds"]
        active.finished_run_seconds += planned_seconds
        if planned_seconds > 0 and not job.attempts and not active.is_batch:
            self._keep_pace(active)
        for stage, pair in content["stages"].items():
            for kind, seconds in zip(("planned", "measured"), pair, strict=True):
                self.metrics.stage_seconds.labels(job.request.graph, stage, kind).observe(seconds)
        for kind, nbytes in zip(("planned", "measured"), content["peak_bytes"], strict=True):
            self.metrics.peak_bytes.labels(job.request.graph, kind).set(nbytes)
        self.metrics.pictures.labels(job.request.graph).inc()
        self.metrics.overruns.labels(job.request.graph).inc(len(content["overruns"]))
        job.pictures += [path.read_bytes() for path in content["files"]]
        job.results.append(content)
        if self.store is not None and job.is_stored:
            self.store.add_run(job, len(content["files"]))
        self._arrange(job.request.graph)
        has_all_runs = len(job.results) == len(job.request.runs)
        if active.is_batch and has_all_runs and active.count > 1:
            run_seconds = sum(result["seconds"][1] for result in job.results)
            # time between the stages of the job counts as waiting
            job.begun_at = max(job.admitted_at, self._clock - run_seconds)
            job.queued = max(
                job.queued,
                time.monotonic() - job.submitted - job.planning_seconds - run_seconds * self.pace,
            )
        if job.error is not None and (has_all_runs or not active.is_batch):
            self._finish(entry, "cancelled")
        elif has_all_runs:
            self._finish(entry, "done")
        elif not active.is_batch:
            active.finished_run_seconds, active.predicted_seconds = 0.0, entry.cost.again_seconds
            self._send_run()

    def _keep_pace(self, active: _Running) -> None:
        """Update ``pace``, a running mean, with the runs in ``active``."""
        self.pace += PACE * (
            (time.monotonic() - active.sent_at) / active.finished_run_seconds - self.pace
        )

    def _finish(self, entry: QueueEntry, state: str) -> None:
        """End ``entry``, which ran. The other entries of its batch continue."""
        assert self._active is not None
        job, active = entry.item, self._active
        if job.begun_at is not None and state == "done":
            self.metrics.queue_seconds.labels("predicted").observe(
                job.promised_at - job.admitted_at
            )
            self.metrics.queue_seconds.labels("measured").observe(job.begun_at - job.admitted_at)
        active.entries = [other for other in active.entries if other is not entry]
        if not active.is_batch:
            self._active = None
        self._end(job, state)
        if not active.is_batch:
            self._next()

    def _end_batch(self, active: _Running) -> None:
        """Handle the end of a batch. Its unfinished entries run next, each by itself."""
        if active.finished_run_seconds > 0 and not active.entries:
            if active.is_concurrent:
                active.finished_run_seconds = active.predicted_seconds
            self._keep_pace(active)
        self._active = None
        self._requeue(active.entries, keep_results=False)
        self._next()

    def _requeue(self, entries: list[QueueEntry], *, keep_results: bool) -> None:
        """Put ``entries``, which ran, back at the head of the queue, each to run by itself.
        ``keep_results``: keep the pictures that they already have."""
        for entry in reversed(entries):
            job: Job = entry.item
            if job.error is not None:
                self._end(job, "cancelled")
                continue
            entry.batch = None
            if not keep_results:
                self._drop_results(job)
            job.change(state="waiting")
            self.line.entries.insert(0, entry)
        self._idle_now()

    def _drop_results(self, job: Job) -> None:
        """Delete the pictures of ``job``, which starts again."""
        job.results, job.pictures = [], []
        if self.store is not None and job.is_stored:
            self.store.drop_runs(job)

    def _end(self, job: Job, state: str) -> None:
        self.metrics.active_requests.set(0 if self._active is None else len(self._active.entries))
        if job.is_stored and job.error is not None and job.error.code == "stopping":
            job.error = None  # the next server goes on with the files in the folder
            job.change(state="waiting")
        else:
            shutil.rmtree(job.folder, ignore_errors=True)
            status = 200 if job.error is None else job.error.status
            self.metrics.requests.labels(job.request.graph, str(status)).inc()
            job.change(state=state)
            if self.store is not None and job.is_stored:
                self.store.end(job)
            log(
                "request",
                id=job.id,
                state=state,
                graph=job.request.graph,
                key=job.owner,
                pictures=len(job.pictures),
                queued_seconds=round(job.queued, 3),
                seconds=round(time.monotonic() - job.submitted, 3),
                error="" if job.error is None else job.error.message,
            )
        self._idle_now()

    def _idle_now(self) -> None:
        if self._active is None and not self.line.entries and not self._unplanned:
            self._idle.set()

    def _worker_died(self) -> None:
        """Start another worker. The active request continues there, unless it may be what kills the
        workers."""
        self._ready, self._earlier_clock_seconds = False, self._clock
        self._deaths += 1
        self.line.warm_shapes.clear()
        self.metrics.restarts.inc()
        exit_code = None if self._worker is None else self._worker.process.exitcode
        active_id = "" if self._active is None else self._active.active_id
        log("worker ended", exit_code=exit_code, deaths=self._deaths, request=active_id)
        if (active := self._active) is not None:
            self._active, survivors = None, list[QueueEntry]()
            suspect = active.entry_of(active.active_id) or active.entry if active.entries else None
            for entry in active.entries:
                job: Job = entry.item
                job.attempts += entry is suspect
                if job.error is None and job.attempts >= ATTEMPTS:
                    text = f"the worker process ended {ATTEMPTS} times under this request"
                    job.error = Refused(503, text, "worker_died", retry_seconds=30)
                    self._end(job, "failed")
                else:
                    survivors.append(entry)
            self._requeue(survivors, keep_results=not active.is_batch)
        # wait longer after each death
        wait = min(30.0, 2.0 ** (self._deaths - 2)) if self._deaths > 1 else 0.0
        asyncio.get_running_loop().call_later(wait, self._start_worker)


def _ignore_error(future: asyncio.Future[Any]) -> None:
    """Without this, asyncio logs an exception that nobody awaits."""
    if not future.cancelled():
        future.exception()


def _key(entry: QueueEntry) -> tuple[RequestShape, float]:
    job, group = entry.item, entry.group
    assert isinstance(job, Job)
    assert isinstance(group, tuple)
    return job.request.shape, group[1]

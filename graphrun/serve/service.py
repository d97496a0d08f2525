"""Admit requests. Runs in the server's event loop.

    submit -> plan of the shape (once, `Plans`) -> promised seconds, or 422 or 429
           -> queue (`Line`) -> worker (`RunQueue`) -> pictures

A shape is a graph with the settings that its plan depends on, such as size and steps. If several
runs of a shape wait, the planner checks whether running them as a batch, stage by stage, is faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from graphrun.errors import GraphrunError, InputError
from graphrun.graph.graph import Graph
from graphrun.serve.bodies import VIDEO, Body, PictureRequest, makes_videos, picture_inputs
from graphrun.serve.catalog import Catalog, GraphVariant
from graphrun.serve.errors import Refused
from graphrun.serve.jobs import Job
from graphrun.serve.keys import Rates, read_keys
from graphrun.serve.line import Line, QueueEntry
from graphrun.serve.log import log
from graphrun.serve.metrics import Metrics
from graphrun.serve.planner import PlannedShape
from graphrun.serve.plans import RESTART_SECONDS, Plans, ignore_error
from graphrun.serve.records import JobRecords
from graphrun.serve.runs import RunQueue
from graphrun.serve.settings import Settings

T = TypeVar("T")
WARM_SECONDS = 30.0  # until a graph that could not be warmed is tried again


class Service:
    """The state of a server. Create it inside the event loop, `start` it, and `close` it at the
    end."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.metrics, self.line = settings, Metrics(), Line()
        self.created = int(time.time())
        self.catalog = Catalog.read(settings)
        self.records = JobRecords(settings.state, settings.webhooks, settings.webhook_keys)
        self.plans = Plans(settings, self.catalog, self.metrics, self.line)
        self.queue = RunQueue(
            settings, self.metrics, self.line, self.records, self.plans.arrange, self._note_idle
        )
        self.draining = False
        self._unplanned = 0  # requests waiting for a plan
        self.keys, self._rates = settings.keys, Rates()
        # graphs that are to make a picture before the server is ready
        self._cold = set(self.graphs if settings.warms else ())
        self._tasks = list[asyncio.Future[None]]()
        self._reloading = asyncio.Lock()
        self.on_reload = list[Callable[[], None]]()  # called when there is another catalog
        # done when all requests are cancelled
        self._stopped = asyncio.get_running_loop().create_future()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def graphs(self) -> Mapping[str, Graph]:
        """The graphs that are served, by name."""
        return self.catalog.graphs

    @property
    def bodies(self) -> Mapping[str, type[Body]]:
        """The models of requests, by graph."""
        return self.catalog.bodies

    # -- life

    def start(self) -> None:
        """Start the worker and planner processes, and plan each graph at its defaults. Raises
        InputError if stored jobs cannot be read."""
        waiting_jobs = self.records.restore(self.catalog)
        self.queue.start()
        self.plans.start()
        self._tasks.append(asyncio.ensure_future(self._restore(waiting_jobs)))
        self._tasks.append(asyncio.ensure_future(self.records.write()))
        if self.settings.warms:
            self._tasks.append(asyncio.ensure_future(self._warm()))

    async def _restore(self, waiting_jobs: Sequence[Job]) -> None:
        """Admit stored jobs again, in their order and whatever the length of the queue."""
        for job in waiting_jobs:
            with self._at_work():
                try:
                    plan, share = await self._patiently(partial(self._plan, job.request))
                except Refused as error:
                    if self.draining:
                        return  # the next server plans it
                    if job.ended:  # a client has cancelled it
                        continue
                    job.error = error
                    self.queue.end(job, "failed")
                    continue
                if not self.draining and not job.ended:  # a client may have cancelled it
                    self._admit(job, plan, share, is_new=False)

    async def _warm(self) -> None:
        """Make one picture at its defaults with every graph that requires no picture as input.

        Then the server is ready. What failed is tried again, unless the request was refused.
        """
        for graph in self.graphs.values():
            if any(graph.inputs[name].required for name in picture_inputs(graph)):
                self._cold.discard(graph.name)
        names = sorted(self._cold)
        while names and not self.draining:
            names = [name for name in names if await self._warm_fails(self.graphs[name])]
            await asyncio.sleep(WARM_SECONDS if names else 0)

    async def _warm_fails(self, graph: Graph) -> bool:
        """Make a picture with ``graph``; return whether to try again."""
        shape, inputs = self.plans.defaults[graph.name], graph.for_planning({})
        suffix = VIDEO if makes_videos(graph) else ".png"
        request = PictureRequest(
            graph.name, shape, (inputs,), suffix, as_url=False, definition=graph
        )
        folder = self.settings.folder / f"warm-{graph.name}"
        try:
            plan, share = await self._patiently(partial(self._plan, request))
            job = Job(request, "", folder, preview_wanted=False)
            await self._admit(job, plan, share, is_new=False).end()
        except Refused as error:
            log("warming failed", graph=graph.name, error=error.message)
            return error.status >= 500
        self._cold.discard(graph.name)
        return False

    @property
    def unready(self) -> list[str]:
        """Why a request sent now would not run, or with ``warms`` would load weights first; empty
        if it would."""
        return [
            *(["the server stops"] if self.draining else []),
            *([] if self.queue.ready else ["the worker starts"]),
            *self.plans.lacks,
            *(f"{name} has made no picture yet" for name in sorted(self._cold)),
        ]

    async def drain(self) -> None:
        """Refuse new requests; wait up to ``drain_seconds`` for admitted ones, then cancel them.

        Stored jobs that have not begun wait for the next server.
        """
        self.draining = True
        for entry in [entry for entry in self.line.entries if entry.item.is_stored]:
            self.line.remove(entry.item)
        log(
            "draining",
            running=self.queue.running_count,
            waiting=len(self.line.entries),
            unplanned=self._unplanned,
            stored=sum(
                job.is_stored and job.state == "waiting" for job in self.records.jobs.values()
            ),
        )
        self._note_idle()
        try:
            async with asyncio.timeout(self.settings.drain_seconds):
                await self._idle.wait()
        except TimeoutError:
            self.cancel_all()

    def cancel_all(self) -> None:
        """Cancel all requests: waiting ones at once, running ones after their current step."""
        if not self._stopped.done():
            self._stopped.set_result(None)
        self.queue.cancel_all()

    def reload(self) -> None:
        """Read the file of API keys, the graph files and the folder of LoRAs again. What is wrong
        stays as it is."""
        self._reload_keys()
        self._tasks.append(asyncio.ensure_future(self._reload_graphs()))

    def _reload_keys(self) -> None:
        if self.settings.keys_file is None:
            return
        try:
            self.keys = read_keys(self.settings.keys_file)
            log("keys read", keys=len(self.keys))
        except InputError as error:
            log("keys refused", error=error)

    async def _reload_graphs(self) -> None:
        """Read the graph files and the folder of LoRAs again, and use them once every graph that
        changed has a plan at its defaults. Admitted requests keep their graph."""
        async with self._reloading:
            previous = self.catalog
            try:
                catalog = await asyncio.to_thread(Catalog.read, self.settings, previous)
                names = [name for name in catalog.graphs if catalog.is_newer(name, previous)]
                for name in names:
                    await self._patiently(partial(self._plan_default, catalog.variants[name]))
            except (GraphrunError, Refused) as error:
                log("graphs refused", error=error)
                return
            self.plans.use(catalog)
            self.catalog = catalog
            for use in self.on_reload:
                use()
            log("graphs read", changed=", ".join(names), loras=len(catalog.loras))

    async def idle(self) -> None:
        await self._idle.wait()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for part in (self.queue, self.plans, self.records):
            part.close()

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
        if request.webhook:
            self.records.webhooks.check(request.webhook)
        if (earlier_job := await self.records.earlier_job(owner, key, body)) is not None:
            return earlier_job
        id = secrets.token_urlsafe(16)
        store, is_stored = self.records.store, folder is None
        if folder is None:
            folder = self.settings.folder / id if store is None else store.folder_of(id)
        job = Job(request, owner, folder, preview_wanted=True, id=id, key=key, body=body)
        with self.records.admission(job, is_stored=is_stored):
            return await self._submit(job)

    async def _submit(self, job: Job) -> Job:
        self._refuse_if(self.draining)
        if (key := self.keys.get(job.owner)) is not None:
            self._rates.take(job.owner, key.per_minute, len(job.request.runs))
        with self._at_work():
            try:
                plan, share = await self._plan(job.request)
                return self._admit(job, plan, share)
            except Refused as error:
                if error.retry_seconds is not None:  # the client sends it again
                    self._rates.give_back(job.owner, len(job.request.runs))
                raise

    async def _patiently(self, plan: Callable[[], Awaitable[T]]) -> T:
        """Return what ``plan`` returns, also if the planner is busy or starts again."""
        while True:
            try:
                return await plan()
            except Refused as error:
                if error.retry_seconds is None or self.draining:
                    raise
            await asyncio.sleep(RESTART_SECONDS)

    async def _plan_default(self, variant: GraphVariant) -> None:
        await asyncio.shield(self.plans.plan_default(variant))

    async def _plan(self, request: PictureRequest) -> tuple[PlannedShape, float]:
        """Return the plan for ``request``, and its share of the budgets. Raises Refused as
        `Plans.plan`, and if all requests are cancelled first."""
        planning = asyncio.ensure_future(self.plans.plan(request))
        planning.add_done_callback(ignore_error)
        try:
            await asyncio.wait({planning, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            self._refuse_if(self._stopped.done())
            return planning.result()
        finally:
            planning.cancel()

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
            self._note_idle()

    def _admit(self, job: Job, plan: PlannedShape, share: float, *, is_new: bool = True) -> Job:
        """Put ``job`` into the queue. If it ``is_new``, raises Refused: 429 if the queue is too
        long, 503 if the job cannot be stored."""
        graph, shares = job.request.graph, self.plans.shares
        job.planning_seconds = time.monotonic() - job.submitted
        self.plans.note_seconds(job.planning_seconds)
        job.budgets = plan.budgets
        # graphs whose weights stay on the device next to this run; none if the run was planned for
        # the whole budgets
        resident_groups = frozenset(shares.items() if shares.get(graph) == share else ())
        entry = QueueEntry(
            job,
            (graph, share),  # a pair as in ``resident_groups``
            job.request.shape,
            plan.cost,
            len(job.request.runs),
            resident_groups=resident_groups,
        )
        self.queue.add(entry, self.settings.queue_seconds if is_new else None)
        if is_new:
            try:
                self.records.add(job)
            except Refused:
                self.line.remove(job)
                raise
        self.plans.plan_batch(entry)
        self.queue.next()
        return job

    def _note_idle(self) -> None:
        if self.queue.is_empty and not self._unplanned:
            self._idle.set()

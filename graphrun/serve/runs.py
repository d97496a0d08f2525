"""The queue, and the worker process that runs one request, or one batch of requests, at a time."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from graphrun.serve.catalog import GraphVariant
from graphrun.serve.child import Child
from graphrun.serve.clustered import work_on_a_cluster
from graphrun.serve.errors import Refused
from graphrun.serve.jobs import Job
from graphrun.serve.line import Line, QueueEntry, go_together, is_warm
from graphrun.serve.log import log
from graphrun.serve.metrics import Metrics
from graphrun.serve.plans import LATEST_WEIGHT
from graphrun.serve.records import JobRecords
from graphrun.serve.settings import Settings
from graphrun.serve.worker import SessionBudget, work_forever

# workers that may die while they run the same request; then it fails: it may be the cause
ATTEMPTS = 3


@dataclass
class _Running:
    """The queue entry that runs now, or the entries of the batch that runs now.

    ``entries``: the unfinished ones. ``finished_run_seconds``: planned seconds of the finished
    runs. ``predicted_seconds``: of the current run, or of the whole batch. ``is_concurrent``: the
    runs of the batch execute concurrently.
    """

    entries: list[QueueEntry]
    is_batch: bool
    is_concurrent: bool
    predicted_seconds: float
    start_clock: float  # seconds of the device's clock
    sent_at: float = field(default_factory=time.monotonic)  # wall seconds
    finished_run_seconds: float = 0.0
    active_id: str = ""  # the request that the worker is running

    def entry_of(self, id: str) -> QueueEntry | None:
        """Return the entry of request ``id``; None if it is not running."""
        return next((entry for entry in self.entries if entry.item.id == id), None)


class RunQueue:
    """Runs the requests in ``line``. ``on_run`` gets the graph of each run. ``on_end`` is called
    when requests have ended."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        line: Line,
        records: JobRecords,
        on_run: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        self._settings, self._metrics, self._line, self._records = settings, metrics, line, records
        self._on_run, self._on_end = on_run, on_end
        # wall seconds per predicted second: a data-sheet estimate may be wrong, and the seconds of
        # `sim` are virtual
        self.pace = 1.0
        # device clock over all workers, and its value when the current worker started
        self._clock = self._earlier_clock_seconds = 0.0
        self._active: _Running | None = None
        self._worker: Child | None = None
        self.ready, self._closed, self._deaths = False, False, 0

    def close(self) -> None:
        self._closed = True
        if self._worker is not None:
            self._worker.stop()

    @property
    def running_count(self) -> int:
        """The number of requests that run."""
        return 0 if self._active is None else len(self._active.entries)

    @property
    def is_empty(self) -> bool:
        """Whether no request runs or waits."""
        return self._active is None and not self._line.entries

    def add(self, entry: QueueEntry, max_seconds: float | None) -> None:
        """Put ``entry`` into the queue. Raises Refused (429) if its predicted wait is longer than
        ``max_seconds``."""
        job: Job = entry.item
        self._line.add(entry, self._clock, self._free_at)
        wait = (entry.start - self._clock) * self.pace
        if max_seconds is not None and wait > max_seconds:
            self._line.remove(job)
            text = f"the queue takes {wait:.0f} s, more than the --queue of {max_seconds:.0f} s"
            raise Refused(429, text, "queue_full", retry_seconds=wait - max_seconds)
        job.admitted_at, job.promised_at = self._clock, entry.start
        job.seconds = entry.end - entry.start

    def predicted_wait(self, job: Job) -> float:
        """Return the predicted wall seconds until ``job`` starts."""
        entries = self._line.entries
        times = zip(entries, self._line.times(entries, self._free_at), strict=True)
        starts = (start for entry, (start, _) in times if entry.item is job)
        return (next(starts, self._clock) - self._clock) * self.pace

    def cancel(self, job: Job, reason: Refused | None = None) -> None:
        """Cancel ``job``: at once if it waits, otherwise when the worker reports it. What a client
        cancelled stays cancelled while the server stops."""
        if job.ended:
            return
        if reason is None or reason.code != "stopping" or job.error is None:
            job.error = reason or Refused(409, "the request was cancelled", "cancelled")
        if self._active is not None and self._active.entry_of(job.id) is not None:
            assert self._worker is not None
            if job.error is not reason or reason.code != "stopping":
                self._records.cancel(job)
            self._worker.send("cancel", id=job.id)
        else:
            self._line.remove(job)
            self.end(job, "cancelled")

    def cancel_all(self) -> None:
        """Cancel all requests: waiting ones at once, running ones after their current step."""
        active_entries = self._active.entries if self._active is not None else []
        for entry in [*self._line.entries, *active_entries]:
            self.cancel(entry.item, Refused.stopping())

    @property
    def _free_at(self) -> float:
        """When the current run or batch is predicted to end, on the device's clock."""
        if (active := self._active) is None:
            return self._clock
        end = max(self._clock, active.start_clock + active.predicted_seconds)
        if active.is_batch:
            return end
        entry = active.entries[0]
        pending_runs = entry.runs - len(entry.item.results) - 1
        return end + pending_runs * entry.cost.again_seconds

    def start(self) -> None:
        """Start a worker process."""
        if self._closed:
            return
        main = work_forever if self._settings.cluster is None else work_on_a_cluster
        self._worker = Child(main, self._settings, self._hear_worker, self._worker_died)
        self._metrics.worker.set(self._worker.process.pid or 0)
        log("worker started", process=self._worker.process.pid)

    def next(self) -> None:
        """Hand the next request to the worker if the worker is free."""
        self._metrics.queue_length.set(len(self._line.entries))
        seconds = self._line.end(self._free_at) - self._clock
        self._metrics.waiting_seconds.set(seconds * self.pace)
        if self._active is not None or not self.ready or not self._line.entries:
            return
        # group -> shape whose weights are on the device now; `pop` changes the line's mapping
        warm_shapes = dict(self._line.warm_shapes)
        entries = self._line.pop()
        first, is_batch = entries[0], go_together(entries, warm_shapes)
        cost, has_weights = first.cost, is_warm(first, warm_shapes)
        runs = sum(entry.runs for entry in entries)
        self._active = _Running(
            entries,
            is_batch,
            is_batch and cost.concurrent_end_seconds is not None,
            cost.end_seconds(runs, has_weights)[-1] if is_batch else cost.run_seconds(has_weights),
            self._clock,
        )
        self._metrics.active_requests.set(len(entries))
        for job in (entry.item for entry in entries):
            job.batch_size = len(entries)
            if job.begun_at is None:
                job.begun_at = self._clock
                job.queued = time.monotonic() - job.submitted - job.planning_seconds
            if is_batch:
                self._records.drop_runs(job)  # from before the worker died
        if is_batch:
            numbers = ((entry.item, number) for entry in entries for number in range(entry.runs))
            messages = [self._run_message(job, number) for job, number in numbers]
            self._send(first, "run_together", runs=messages, segments=cost.stages)
        else:
            self._send_run(self._active)

    def _send_run(self, active: _Running) -> None:
        """Send the next run of the only entry of ``active``."""
        entry = active.entries[0]
        active.sent_at, active.start_clock = time.monotonic(), self._clock
        message = self._run_message(entry.item, len(entry.item.results))
        self._send(entry, "run", run=message)

    def _run_message(self, job: Job, number: int) -> dict[str, Any]:
        """Return the fields of a `RunRequest` for run ``number`` of ``job``, which begins, and
        create the run's folder."""
        job.change(state="running", stage="", step=0, steps=0)
        folder = job.folder / str(number)
        with contextlib.suppress(OSError):  # the worker reports it
            folder.mkdir(parents=True, exist_ok=True)
        return {
            "id": job.id,
            "number": number,
            "inputs": job.request.runs[number],
            "folder": folder,
            "suffix": job.request.suffix,
            "preview": job.preview_wanted,
            "loras": tuple((use.name, use.scale) for use in job.request.shape.loras),
        }

    def _send(self, entry: QueueEntry, kind: str, **fields: Any) -> None:
        """Send a message about the session that runs ``entry`` to the worker."""
        assert self._worker is not None
        job: Job = entry.item
        variant = GraphVariant.of(job.request)
        budget = SessionBudget(entry.group, variant, job.budgets, entry.resident_groups)
        self._worker.send(kind, budget=budget, **fields)

    def _hear_worker(self, kind: str, clock_seconds: float | None = None, **content: Any) -> None:
        if clock_seconds is not None:
            self._clock = self._earlier_clock_seconds + clock_seconds
            self._metrics.clock.set(self._clock)
        if kind == "ready":
            self.ready = True
            self.next()
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
            self._records.drop_runs(job)
            shutil.rmtree(job.folder / str(content["number"]), ignore_errors=True)
        elif kind == "cancelled":
            if not active.is_batch:
                self._line.warm_shapes.clear()
            self._finish(entry, "cancelled")
        elif job.attempts and content["status"] == 500 and any(job.folder.rglob("*.steps")):
            # the worker cannot continue from the saved state of the loop; run again without it
            shutil.rmtree(job.folder / str(len(job.results)))
            self._line.warm_shapes.clear()
            self._send_run(active)
        elif kind == "failed":
            self._line.warm_shapes.clear()
            wait = 5 + (self._free_at - self._clock) * self.pace
            job.error = job.error or Refused(
                content["status"],
                content["message"],
                "run_failed",
                retry_seconds=wait if content["status"] == 503 else None,
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
        self._metrics.add_run(job.request.graph, content)
        job.pictures += [path.read_bytes() for path in content["files"]]
        job.results.append(content)
        self._records.add_run(job, len(content["files"]))
        self._on_run(job.request.graph)
        has_all_runs = len(job.results) == len(job.request.runs)
        if active.is_batch and has_all_runs and job.batch_size > 1:
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
            self._send_run(active)

    def _keep_pace(self, active: _Running) -> None:
        """Update ``pace``, a running mean, with the runs in ``active``."""
        pace = (time.monotonic() - active.sent_at) / active.finished_run_seconds
        self.pace += LATEST_WEIGHT * (pace - self.pace)

    def _finish(self, entry: QueueEntry, state: str) -> None:
        """End ``entry``, which ran. The other entries of its batch continue."""
        assert self._active is not None
        job, active = entry.item, self._active
        if job.begun_at is not None and state == "done":
            for kind, begin in (("predicted", job.promised_at), ("measured", job.begun_at)):
                self._metrics.queue_seconds.labels(kind).observe(begin - job.admitted_at)
        active.entries = [other for other in active.entries if other is not entry]
        if not active.is_batch:
            self._active = None
        self.end(job, state)
        if not active.is_batch:
            self.next()

    def _end_batch(self, active: _Running) -> None:
        """Handle the end of a batch. Its unfinished entries run next, each by itself."""
        if active.finished_run_seconds > 0 and not active.entries:
            if active.is_concurrent:
                active.finished_run_seconds = active.predicted_seconds
            self._keep_pace(active)
        self._active = None
        self._requeue(active.entries, keep_results=False)
        self.next()

    def _requeue(self, entries: list[QueueEntry], *, keep_results: bool) -> None:
        """Put ``entries``, which ran, back at the head of the queue, each to run by itself.
        ``keep_results``: keep the pictures that they already have."""
        for entry in reversed(entries):
            job: Job = entry.item
            if job.error is not None:
                self.end(job, "cancelled")
                continue
            entry.batch = None
            if not keep_results:
                self._records.drop_runs(job)
            job.change(state="waiting")
            self._line.entries.insert(0, entry)
        self._on_end()

    def end(self, job: Job, state: str) -> None:
        """Record that ``job`` has ended in ``state``."""
        self._metrics.active_requests.set(self.running_count)
        if job.is_stored and job.error is not None and job.error.code == "stopping":
            job.error = None  # the next server goes on with the files in the folder
            job.change(state="waiting")
        else:
            shutil.rmtree(job.folder, ignore_errors=True)
            status = 200 if job.error is None else job.error.status
            self._metrics.requests.labels(job.request.graph, str(status)).inc()
            job.change(state=state)
            self._records.end(job)
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
        self._on_end()

    def _worker_died(self) -> None:
        """Start another worker. The active request continues there, unless it may be what kills the
        workers."""
        self.ready, self._earlier_clock_seconds = False, self._clock
        self._deaths += 1
        self._line.warm_shapes.clear()
        self._metrics.restarts.inc()
        exit_code = None if self._worker is None else self._worker.process.exitcode
        active_id = "" if self._active is None else self._active.active_id
        log("worker ended", exit_code=exit_code, deaths=self._deaths, request=active_id)
        if (active := self._active) is not None:
            self._active, survivors = None, list[QueueEntry]()
            suspect = active.entry_of(active.active_id) or next(iter(active.entries), None)
            for entry in active.entries:
                job: Job = entry.item
                job.attempts += entry is suspect
                if job.error is None and job.attempts >= ATTEMPTS:
                    text = (
                        f"the worker process ended {ATTEMPTS} times during this request, last with "
                        f"exit code {exit_code}"
                    )
                    job.error = Refused(503, text, "worker_died")
                    self.end(job, "failed")
                else:
                    survivors.append(entry)
            self._requeue(survivors, keep_results=not active.is_batch)
        # wait longer after each death
        wait = min(30.0, 2.0 ** (self._deaths - 2)) if self._deaths > 1 else 0.0
        asyncio.get_running_loop().call_later(wait, self.start)

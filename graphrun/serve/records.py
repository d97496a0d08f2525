"""The jobs that clients ask for by id: the unfinished ones, and the latest ended ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from graphrun.serve.catalog import Catalog
from graphrun.serve.errors import Refused
from graphrun.serve.jobs import Job
from graphrun.serve.log import log
from graphrun.serve.plans import ignore_error
from graphrun.serve.state import RETRY_SECONDS, JobStore
from graphrun.serve.webhooks import Delivery, Webhooks

KEPT_JOBS = 100  # ended jobs, as long as all stored pictures fit `KEPT_PICTURES_BYTES`
KEPT_PICTURES_BYTES = 2**28


class JobRecords:
    """Jobs by id, the oldest first, and by their Idempotency-Key. ``folder``: of a `JobStore`, so
    that jobs outlive the server; None: none does. ``origins`` and ``keys``: as for `Webhooks`."""

    def __init__(
        self, folder: Path | None, origins: Sequence[str] = (), keys: Sequence[bytes] = ()
    ) -> None:
        self.store = JobStore(folder) if folder is not None else None
        self.webhooks = Webhooks(origins, keys, self.store)
        self.jobs: OrderedDict[str, Job] = OrderedDict()
        # (owner, Idempotency-Key) -> its job
        self._keys: dict[tuple[str, str], asyncio.Future[Job]] = {}

    def close(self) -> None:
        self.webhooks.close()
        if self.store is not None:
            self.store.close()

    def restore(self, catalog: Catalog) -> list[Job]:
        """Read the stored jobs, and return those that have not ended. Webhooks that have not
        arrived are called again."""
        self.webhooks.start()
        for job in self.store.jobs(catalog, self.end) if self.store is not None else ():
            if not job.is_deleted:
                self._remember(job)
        waiting_jobs = [job for job in self.jobs.values() if not job.ended]
        if self.jobs:
            log("restored", waiting=len(waiting_jobs), ended=len(self.jobs) - len(waiting_jobs))
        return waiting_jobs

    async def earlier_job(self, owner: str, key: str, body: str) -> Job | None:
        """Return the job that ``owner`` sent with the Idempotency-Key ``key``. Raises Refused if it
        came with another ``body``."""
        if not key or (owner, key) not in self._keys:
            return None
        job = await asyncio.shield(self._keys[owner, key])
        if job.body != body:
            text = "this Idempotency-Key came with another body before: use a new key"
            raise Refused(422, text, "idempotency_key_reused")
        return job

    @contextlib.contextmanager
    def admission(self, job: Job, *, is_stored: bool) -> Iterator[None]:
        """Record ``job``, which the body of the ``with`` admits, calling `add`. Its Idempotency-Key
        is taken meanwhile, and free again if the body raises."""
        job.is_stored = self.store is not None and is_stored
        key = job.owner, job.key
        if job.key:
            self._keys[key] = asyncio.get_running_loop().create_future()
            self._keys[key].add_done_callback(ignore_error)
        try:
            yield
        except BaseException as error:
            if job.key:
                reason = error if isinstance(error, Refused) else Refused.stopping()
                self._keys.pop(key).set_exception(reason)
            raise
        self._remember(job)
        self._forget_old_jobs()

    def add(self, job: Job) -> None:
        """Store ``job``, a new one, if it outlives the server. Raises Refused (503) if that is
        impossible now."""
        if self.store is not None and job.is_stored:
            self.store.add(job)

    def forget(self, job: Job) -> None:
        """Forget an ended job, with its pictures and its Idempotency-Key."""
        self.jobs.pop(job.id, None)
        self._keys.pop((job.owner, job.key), None)
        if self.store is not None:
            self.store.remove(job)

    def add_run(self, job: Job, pictures: int) -> None:
        """Store the latest run of ``job``, which made ``pictures``."""
        if self.store is not None and job.is_stored:
            self.store.add_run(job, pictures)

    def drop_runs(self, job: Job) -> None:
        """Delete the runs and pictures of ``job``, which starts again."""
        job.results, job.pictures = [], []
        if self.store is not None:
            self.store.drop_runs(job)

    def cancel(self, job: Job) -> None:
        """Store that ``job``, which runs, is cancelled."""
        if self.store is not None and job.is_stored:
            self.store.cancel(job)

    def end(self, job: Job) -> None:
        """Store how ``job`` ended, and call its webhook."""
        delivery = Delivery.of(job) if job.request.webhook else None
        if self.store is not None:
            self.store.end(job, delivery)
        if delivery is not None:
            self.webhooks.deliver(delivery)
        if job.is_deleted:
            self.forget(job)

    async def write(self) -> None:
        """Write what could not be written to the store, again and again."""
        while self.store is not None:
            await asyncio.sleep(RETRY_SECONDS)
            self.store.flush()

    def _remember(self, job: Job) -> None:
        self.jobs[job.id] = job
        if job.key:
            future = asyncio.get_running_loop().create_future()
            self._keys.setdefault((job.owner, job.key), future).set_result(job)

    def _forget_old_jobs(self) -> None:
        """Forget the oldest ended jobs beyond `KEPT_JOBS` and `KEPT_PICTURES_BYTES`."""
        ended_jobs = [job for job in self.jobs.values() if job.ended]
        nbytes = sum(map(_picture_bytes, self.jobs.values()))
        for count, old in zip(range(len(ended_jobs), 0, -1), ended_jobs, strict=True):
            if count <= KEPT_JOBS and nbytes <= KEPT_PICTURES_BYTES:
                break
            nbytes -= _picture_bytes(old)
            self.forget(old)


def _picture_bytes(job: Job) -> int:
    return sum(map(len, job.pictures))

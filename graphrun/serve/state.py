"""Jobs on disk, so that they outlive the server (``graphrun serve --state FOLDER``).

    FOLDER/jobs.sqlite    requests, results and pictures of jobs
    FOLDER/jobs/ID        files of a job that has not ended: saved states of its loop
    FOLDER/lock           of the server that uses the folder

A job is written when it is admitted, when a run ends, and when it ends. A server that starts with
the folder runs the jobs that have not ended, in the order of their admission: finished runs are not
repeated, and a loop continues from its last saved step. On a full disk no job is admitted, and
changes of admitted jobs stay in memory until there is room.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from graphrun import __version__
from graphrun.errors import InputError
from graphrun.serve.bodies import PictureRequest, RequestShape, lora_uses, shape_of
from graphrun.serve.catalog import Catalog
from graphrun.serve.errors import Refused
from graphrun.serve.jobs import ENDED, Job
from graphrun.serve.log import log
from graphrun.serve.webhooks import Delivery
from graphrun.systems import take_lock
from graphrun.trace import Overrun

VERSION = 1  # of the tables
FILE = "jobs.sqlite"
RETRY_SECONDS = 5.0  # until changes that could not be written are written again
Statement = tuple[str, Sequence[Any]]
"""An SQL statement and its parameters."""
TABLES = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    created INTEGER NOT NULL, key TEXT NOT NULL, body TEXT NOT NULL, request TEXT NOT NULL,
    state TEXT NOT NULL, error TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS runs (
    job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE, result TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS pictures (
    job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE, content BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS deliveries (
    id TEXT PRIMARY KEY, url TEXT NOT NULL, body TEXT NOT NULL, tries INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS runs_of_job ON runs (job);
CREATE INDEX IF NOT EXISTS pictures_of_job ON pictures (job);
"""


class JobStore:
    """The jobs in ``folder``. Raises InputError if another server uses it, or if it cannot be
    used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # transactions that could not be written, the oldest first
        self._unwritten = deque[Sequence[Statement]]()
        self._is_failing = False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts are in it
            (folder / "jobs").mkdir(mode=0o700, exist_ok=True)
            (folder / FILE).touch(mode=0o600)  # of the operator's folder, others may read
            self._lock = take_lock(folder / "lock")
        except OSError as error:
            raise InputError(
                f"--state {folder}: {error.strerror}; the user that runs the server must be "
                "able to write there"
            ) from error
        if self._lock is None:
            raise InputError(
                f"--state {folder}: another server uses this folder; stop it, or name another one"
            )
        file = folder / FILE
        try:
            self._database = sqlite3.connect(file, isolation_level=None)
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version > VERSION:
                raise InputError(
                    f"{file} is from a newer graphrun than {__version__}: update graphrun"
                )
            for statement in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                self._database.execute(f"PRAGMA {statement}")
            self._database.executescript(TABLES)
            self._database.execute(f"PRAGMA user_version = {VERSION}")
        except sqlite3.Error as error:
            self._lock.release()
            raise self.unreadable(error) from error

    def unreadable(self, error: Exception) -> InputError:
        """Return the error of a damaged database."""
        return InputError(
            f"{self.folder / FILE}: {error}; to start without its jobs, move the file away"
        )

    def close(self) -> None:
        """Close the database, and let another server use the folder."""
        self.flush()
        self._database.close()
        assert self._lock is not None
        self._lock.release()

    def folder_of(self, id: str) -> Path:
        """Return the folder for the files of job ``id``."""
        return self.folder / "jobs" / id

    # -- changes

    def flush(self) -> bool:
        """Write the changes that could not be written, in their order; return whether all are."""
        if not self._unwritten:
            return True
        try:
            while self._unwritten:
                with self._database:  # all of it, or nothing
                    self._database.execute("BEGIN IMMEDIATE")
                    for text, values in self._unwritten[0]:
                        self._database.execute(text, values)
                self._unwritten.popleft()
        except sqlite3.Error as error:
            if not self._is_failing:
                log("state not written", error=error)
            self._is_failing = True
            return False
        self._is_failing = False
        return True

    def _write(self, *statements: Statement) -> None:
        """Write ``statements`` in one transaction, later if that is impossible now."""
        self._unwritten.append(statements)
        self.flush()

    def add(self, job: Job) -> None:
        """Write an admitted job. Raises Refused (503) if that is impossible now."""
        request = {
            "graph": job.request.graph,
            "runs": job.request.runs,
            "suffix": job.request.suffix,
            "as_url": job.request.as_url,
            "webhook": job.request.webhook,
            "loras": [{"name": use.name, "scale": use.scale} for use in job.request.shape.loras],
        }
        insertion = (
            "INSERT INTO jobs (id, owner, created, key, body, request, state, error)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, '')",
            (job.id, job.owner, job.created, job.key, job.body, json.dumps(request), job.state),
        )
        self._unwritten.append((insertion,))
        if not self.flush():
            self._unwritten.pop()
            text = "the server cannot write jobs to its disk now: try again"
            raise Refused(503, text, "state_not_written", retry_seconds=RETRY_SECONDS)

    def add_run(self, job: Job, pictures: int) -> None:
        """Write the last run of ``job`` and its last ``pictures`` pictures."""
        result = {name: value for name, value in job.results[-1].items() if name != "files"}
        result["overruns"] = [asdict(overrun) for overrun in result["overruns"]]
        text = json.dumps(result)
        self._write(
            (
                "INSERT INTO runs SELECT number, ? FROM jobs WHERE id = ?",
                (text, job.id),
            ),
            *(
                ("INSERT INTO pictures SELECT number, ? FROM jobs WHERE id = ?", (picture, job.id))
                for picture in job.pictures[len(job.pictures) - pictures :]
            ),
        )

    def drop_runs(self, job: Job) -> None:
        """Delete the runs and pictures of ``job``, which starts again."""
        self._write(
            *(
                (
                    f"DELETE FROM {table} WHERE job IN (SELECT number FROM jobs WHERE id = ?)",
                    (job.id,),
                )
                for table in ("runs", "pictures")
            )
        )

    def cancel(self, job: Job) -> None:
        """Write that ``job``, which runs, is cancelled: no later server continues it."""
        assert job.error is not None
        error = json.dumps(_as_json(job.error))
        self._write(("UPDATE jobs SET error = ? WHERE id = ?", (error, job.id)))

    def end(self, job: Job, delivery: Delivery | None = None) -> None:
        """Write how ``job`` ended, and the ``delivery`` of its webhook."""
        error = "" if job.error is None else json.dumps(_as_json(job.error))
        statements: list[Statement] = [
            ("UPDATE jobs SET state = ?, error = ? WHERE id = ?", (job.state, error, job.id))
        ]
        if delivery is not None:
            statements.append(_insertion(delivery))
        self._write(*statements)

    def put_delivery(self, delivery: Delivery) -> None:
        """Write ``delivery``, or how often it has failed."""
        self._write(_insertion(delivery))

    def drop_delivery(self, delivery: Delivery) -> None:
        """Delete a delivery that arrived or is given up."""
        self._write(("DELETE FROM deliveries WHERE id = ?", (delivery.id,)))

    def deliveries(self) -> list[Delivery]:
        """Return the deliveries that have not arrived. Raises InputError for a damaged database."""
        try:
            rows = self._database.execute("SELECT id, url, body, tries FROM deliveries").fetchall()
        except sqlite3.Error as error:
            raise self.unreadable(error) from error
        return [Delivery(*row) for row in rows]

    def remove(self, job: Job) -> None:
        """Delete an ended job."""
        self._write(("DELETE FROM jobs WHERE id = ?", (job.id,)))

    # -- at the start of a server

    def jobs(self, catalog: Catalog, end: Callable[[Job], None] | None = None) -> Iterator[Job]:
        """Yield all jobs in the order of their admission, and delete files of no job.

        A job that has not ended is waiting. If it was cancelled while it ran, or if ``catalog`` no
        longer accepts it, it has ended, and ``end`` (None: `end`) is called. Raises InputError for
        a damaged database.
        """
        try:
            yield from self._jobs(catalog, end or self.end)
        except (sqlite3.Error, LookupError, TypeError, ValueError) as error:
            raise self.unreadable(error) from error

    def _jobs(self, catalog: Catalog, end: Callable[[Job], None]) -> Iterator[Job]:
        rows = self._database.execute(
            "SELECT number, id, owner, created, key, body, request, state, error FROM jobs"
            " ORDER BY number"
        ).fetchall()
        waiting_ids = {row[1] for row in rows if row[7] not in ENDED}
        for folder in (self.folder / "jobs").iterdir():
            if folder.name not in waiting_ids:
                shutil.rmtree(folder, ignore_errors=True)
        for number, id, owner, created, key, body, request, state, error in rows:
            fields = json.loads(request)
            refusal, graph = Refused(**json.loads(error)) if error else None, fields["graph"]
            shape, definition = RequestShape(graph, ()), catalog.graphs.get(graph)
            has_ended = state in ENDED
            if not has_ended and refusal is not None:
                state = "cancelled"  # while it ran, and the server ended first
            elif not has_ended:
                try:
                    shape = _accepted_shape(fields, catalog)
                except Refused as reason:
                    refusal = reason
                state = "waiting" if refusal is None else "failed"
            job = Job(
                PictureRequest(
                    graph,
                    shape,
                    tuple(fields["runs"]),
                    fields["suffix"],
                    fields["as_url"],
                    webhook=fields.get("webhook", ""),
                    definition=definition,
                ),
                owner,
                self.folder_of(id),
                preview_wanted=True,
                id=id,
                created=created,
                state=state,
                error=refusal,
                key=key,
                body=body,
                is_stored=True,
            )
            job.results = [
                _result_of(json.loads(text))
                for (text,) in self._database.execute(
                    "SELECT result FROM runs WHERE job = ? ORDER BY rowid", (number,)
                )
            ]
            job.pictures = [
                content
                for (content,) in self._database.execute(
                    "SELECT content FROM pictures WHERE job = ? ORDER BY rowid", (number,)
                )
            ]
            if refusal is not None and not has_ended:
                end(job)
            yield job


def _accepted_shape(fields: Mapping[str, Any], catalog: Catalog) -> RequestShape:
    """Return the shape of a stored request. Raises Refused if the server cannot run it."""
    name = fields["graph"]
    if name not in catalog.graphs:
        text = f"the server was started again without {name}"
        raise Refused(404, text, "model_not_found", param="model")
    graph = catalog.graphs[name]
    try:
        for inputs in fields["runs"]:
            graph.resolve(inputs)
        available = catalog.bodies[name].available_loras
        uses = lora_uses(graph, available, fields.get("loras", []))
    except (InputError, ValueError) as error:
        text = f"the server was started again with another {name}: {error}"
        raise Refused(422, text, "invalid") from None
    return shape_of(graph, fields["runs"][0], catalog.editions[name], uses)


def _result_of(entries: dict[str, Any]) -> dict[str, Any]:
    return {**entries, "overruns": tuple(Overrun(**overrun) for overrun in entries["overruns"])}


def _insertion(delivery: Delivery) -> Statement:
    return "INSERT OR REPLACE INTO deliveries VALUES (?, ?, ?, ?)", astuple(delivery)


def _as_json(error: Refused) -> dict[str, Any]:
    names = ("status", "message", "code", "param", "retry_seconds", "details")
    return {name: getattr(error, name) for name in names}

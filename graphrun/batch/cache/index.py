"""A folder of kept outputs that several processes use at once: an index in SQLite, a safetensors file to an entry.

Decides when an entry is there, is whole, and goes. Knows neither keys' meaning nor what the files hold.

    put    write .new-* | fsync | (lock) rename into place, then the row | the least recently used go while all are too large
    get    row -> file -> its SHA-256 is the row's? else the row goes and the entry is absent: it is computed again
    kill   at any moment: a .new-* file nobody names, or a file without a row; both are swept away later
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from graphrun.errors import InputError
from graphrun.units import GIB

# FLUX's embeddings take 4 MiB a prompt: some thousand prompts.
LIMIT_BYTES = 4 * GIB
BUSY_SECONDS = 30.0
# A temporary file as old as this was left by a process that died.
STALE_SECONDS = 3600.0

_TABLES = """
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, file TEXT NOT NULL, digest TEXT NOT NULL, nbytes INTEGER NOT NULL,
    graph TEXT NOT NULL, stage TEXT NOT NULL, about TEXT NOT NULL, made REAL NOT NULL, used REAL NOT NULL);
CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, stamp TEXT NOT NULL, digest TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One kept output: of which stage of which graph, for what (``about``: its inputs), how large, when made and last used."""

    key: str
    graph: str
    stage: str
    about: str
    nbytes: int
    made: float
    used: float


class Index:
    """Entries by key in ``folder``, which is made with the first one. InputError where the folder or its index will not do."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    def get(self, key: str) -> bytes | None:
        """The entry's bytes; None where it is absent. One that is cut or changed is taken out, and absent."""
        if not (self.folder / "index.sqlite").is_file():
            return None
        for _ in range(2):  # an entry may be replaced between its row and its file
            with self._open() as rows:
                found = rows.execute("SELECT file, digest FROM entries WHERE key = ?", (key,)).fetchone()
            if found is None:
                return None
            with contextlib.suppress(OSError):
                data: bytes = (self.folder / found[0]).read_bytes()
                if hashlib.sha256(data).hexdigest() == found[1]:
                    with self._open() as rows, _written(rows):
                        rows.execute("UPDATE entries SET used = ? WHERE key = ?", (time.time(), key))
                    return data
        self._drop([(key, *found)])
        return None

    def put(self, key: str, data: bytes, *, graph: str = "", stage: str = "", about: str = "") -> None:
        """Keep ``data`` under ``key``, in place of what is there. What is larger than the limit is not kept."""
        if len(data) > self.limit_bytes:
            return
        digest, now = hashlib.sha256(data).hexdigest(), time.time()
        name = f"{key}-{digest[:16]}.safetensors"
        with self._open() as rows, self._new_file(data) as temporary, _written(rows):
            before = rows.execute("SELECT file FROM entries WHERE key = ?", (key,)).fetchone()
            os.replace(temporary, self.folder / name)
            row = (key, name, digest, len(data), graph, stage, about, now, now)
            rows.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            if before is not None and before[0] != name:
                (self.folder / before[0]).unlink(missing_ok=True)
            self._prune(rows, key)

    def entries(self) -> list[Entry]:
        """All entries, the last used first."""
        if not (self.folder / "index.sqlite").is_file():
            return []
        with self._open() as rows:
            found = rows.execute(
                "SELECT key, graph, stage, about, nbytes, made, used FROM entries ORDER BY used DESC, key"
            ).fetchall()
        return [Entry(*row) for row in found]

    def remove(self, keys: list[str] | None = None) -> int:
        """Takes out the entries ``keys`` (None: all) with their files: how many there were."""
        if not (self.folder / "index.sqlite").is_file():
            return 0
        with self._open() as rows, _written(rows):
            found = rows.execute("SELECT key, file FROM entries").fetchall()
            chosen = [(key, file) for key, file in found if keys is None or key in keys]
            for key, file in chosen:
                rows.execute("DELETE FROM entries WHERE key = ?", (key,))
                (self.folder / file).unlink(missing_ok=True)
            self._sweep(rows)
        return len(chosen)

    def verify(self) -> list[Entry]:
        """Reads every entry and takes out those that are cut, changed or gone: these."""
        if not (self.folder / "index.sqlite").is_file():
            return []
        known = {entry.key: entry for entry in self.entries()}
        with self._open() as rows:
            found = rows.execute("SELECT key, file, digest FROM entries").fetchall()
        broken = [row for row in found if row[0] in known and not self._whole(row[1], row[2])]
        self._drop(broken)
        with self._open() as rows, _written(rows):
            self._sweep(rows)
        return [known[key] for key, _, _ in broken]

    def file_digest(self, path: Path) -> str:
        """SHA-256 of a file's content, read again only when its size or its time of change is another."""
        found = path.stat()
        stamp = f"{found.st_size} {found.st_mtime_ns} {found.st_ino}"
        with contextlib.suppress(InputError), self._open() as rows:
            row = rows.execute("SELECT digest FROM files WHERE path = ? AND stamp = ?", (str(path), stamp)).fetchone()
            if row is not None:
                return str(row[0])
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        with contextlib.suppress(InputError), self._open() as rows, _written(rows):
            rows.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", (str(path), stamp, digest))
        return digest

    def _whole(self, file: str, digest: str) -> bool:
        try:
            with (self.folder / file).open("rb") as opened:
                return hashlib.file_digest(opened, "sha256").hexdigest() == digest
        except OSError:
            return False

    def _drop(self, broken: list[tuple[str, str, str]]) -> None:
        """Takes out rows that are as they were when they were found broken; one that was written anew by then stays."""
        with self._open() as rows, _written(rows):
            for key, file, digest in broken:
                if rows.execute("DELETE FROM entries WHERE key = ? AND digest = ?", (key, digest)).rowcount:
                    (self.folder / file).unlink(missing_ok=True)

    def _prune(self, rows: sqlite3.Connection, newest: str) -> None:
        """The least recently used go while all together take more than the limit. Inside a write."""
        found = rows.execute("SELECT key, file, nbytes FROM entries ORDER BY used, key").fetchall()
        excess = sum(nbytes for _, _, nbytes in found) - self.limit_bytes
        for key, file, nbytes in found:
            if excess <= 0:
                break
            if key != newest:
                rows.execute("DELETE FROM entries WHERE key = ?", (key,))
                (self.folder / file).unlink(missing_ok=True)
                excess -= nbytes

    def _sweep(self, rows: sqlite3.Connection) -> None:
        """Files that no row names, and what dead processes left. Inside a write: nobody is between a file and its row."""
        named = {file for (file,) in rows.execute("SELECT file FROM entries")}
        for path in self.folder.glob("*.safetensors"):
            if path.name not in named:
                path.unlink(missing_ok=True)
        for path in self.folder.glob(".new-*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()

    @contextlib.contextmanager
    def _new_file(self, data: bytes) -> Iterator[str]:
        """A whole file under another name, on the disk for good; gone afterwards unless it was renamed."""
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield name
        finally:
            Path(name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self.folder / "index.sqlite", timeout=BUSY_SECONDS, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise InputError(f"{self.folder}: outputs cannot be kept there: {_reason(error)}") from error
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executescript(_TABLES)
            yield connection
        except (OSError, sqlite3.Error) as error:
            raise InputError(
                f"{self.folder}: outputs cannot be kept there: {_reason(error)}; remove the folder if its index is damaged"
            ) from error
        finally:
            connection.close()


@contextlib.contextmanager
def _written(rows: sqlite3.Connection) -> Iterator[None]:
    """All of it or nothing, and no other process writes meanwhile."""
    rows.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        rows.execute("ROLLBACK")
        raise
    rows.execute("COMMIT")


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).strip()

"""The folder of cached outputs: an SQLite index and one safetensors file per entry. Several processes may use it at once.

Knows neither what the keys mean nor what the files hold.

    put    write .new-*, fsync; in one transaction: rename into place, insert the row, evict the least recently used over the limit
    get    read row and file; where the file's SHA-256 is not the row's, delete the row: the entry is absent and computed again
    kill   at any moment leaves at most a .new-* file or a file without a row; `verify` and `remove` delete both
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

# The embeddings of a FLUX prompt take 4 MiB, so this holds about a thousand prompts.
LIMIT_BYTES = 4 * GIB
BUSY_SECONDS = 30.0
# Temporary files older than this were left by a process that was killed.
STALE_SECONDS = 3600.0

_TABLES = """
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, file TEXT NOT NULL, digest TEXT NOT NULL, nbytes INTEGER NOT NULL,
    graph TEXT NOT NULL, stage TEXT NOT NULL, about TEXT NOT NULL, made REAL NOT NULL, used REAL NOT NULL);
CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, stamp TEXT NOT NULL, digest TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One cached output. ``about``: the inputs it was made for, as text; ``made`` and ``used``: seconds since the epoch."""

    key: str
    graph: str
    stage: str
    about: str
    nbytes: int
    made: float
    used: float


class Index:
    """Entries by key in ``folder``, which is created with the first one.

    All methods raise InputError where the folder or its index cannot be read or written.
    """

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    def get(self, key: str) -> bytes | None:
        """The entry's bytes; None where it is absent. A damaged entry is removed, and absent."""
        if not (self.folder / "index.sqlite").is_file():
            return None
        for _ in range(2):  # another process may replace the entry between the reads of row and file
            with self._open() as rows:
                found = rows.execute("SELECT file, digest FROM entries WHERE key = ?", (key,)).fetchone()
            if found is None:
                return None
            with contextlib.suppress(OSError):
                data: bytes = (self.folder / found[0]).read_bytes()
                if hashlib.sha256(data).hexdigest() == found[1]:
                    with self._open() as rows, _transaction(rows):
                        rows.execute("UPDATE entries SET used = ? WHERE key = ?", (time.time(), key))
                    return data
        self._drop([(key, *found)])
        return None

    def put(self, key: str, data: bytes, *, graph: str = "", stage: str = "", about: str = "") -> None:
        """Stores ``data`` under ``key``, replacing an entry there. Data larger than the limit is not stored."""
        if len(data) > self.limit_bytes:
            return
        digest, now = hashlib.sha256(data).hexdigest(), time.time()
        name = f"{key}-{digest[:16]}.safetensors"
        with self._open() as rows, self._new_file(data) as temporary, _transaction(rows):
            before = rows.execute("SELECT file FROM entries WHERE key = ?", (key,)).fetchone()
            os.replace(temporary, self.folder / name)
            row = (key, name, digest, len(data), graph, stage, about, now, now)
            rows.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            if before is not None and before[0] != name:
                (self.folder / before[0]).unlink(missing_ok=True)
            self._prune(rows, key)

    def entries(self) -> list[Entry]:
        """All entries, the most recently used first."""
        if not (self.folder / "index.sqlite").is_file():
            return []
        with self._open() as rows:
            found = rows.execute(
                "SELECT key, graph, stage, about, nbytes, made, used FROM entries ORDER BY used DESC, key"
            ).fetchall()
        return [Entry(*row) for row in found]

    def remove(self, keys: list[str] | None = None) -> int:
        """Removes the entries ``keys`` (None: all) and their files. Returns how many were removed."""
        if not (self.folder / "index.sqlite").is_file():
            return 0
        with self._open() as rows, _transaction(rows):
            found = rows.execute("SELECT key, file FROM entries").fetchall()
            chosen = [(key, file) for key, file in found if keys is None or key in keys]
            for key, file in chosen:
                rows.execute("DELETE FROM entries WHERE key = ?", (key,))
                (self.folder / file).unlink(missing_ok=True)
            self._sweep(rows)
        return len(chosen)

    def verify(self) -> list[Entry]:
        """Reads every entry, and removes and returns those whose file is damaged or missing."""
        if not (self.folder / "index.sqlite").is_file():
            return []
        by_key = {entry.key: entry for entry in self.entries()}
        with self._open() as rows:
            found = rows.execute("SELECT key, file, digest FROM entries").fetchall()
        broken = [row for row in found if row[0] in by_key and not self._whole(row[1], row[2])]
        self._drop(broken)
        with self._open() as rows, _transaction(rows):
            self._sweep(rows)
        return [by_key[key] for key, _, _ in broken]

    def file_digest(self, path: Path) -> str:
        """SHA-256 of a file's content. The file is read again only where its size, mtime or inode changed."""
        found = path.stat()
        stamp = f"{found.st_size} {found.st_mtime_ns} {found.st_ino}"
        with contextlib.suppress(InputError), self._open() as rows:
            row = rows.execute("SELECT digest FROM files WHERE path = ? AND stamp = ?", (str(path), stamp)).fetchone()
            if row is not None:
                return str(row[0])
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        with contextlib.suppress(InputError), self._open() as rows, _transaction(rows):
            rows.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", (str(path), stamp, digest))
        return digest

    def _whole(self, file: str, digest: str) -> bool:
        try:
            with (self.folder / file).open("rb") as opened:
                return hashlib.file_digest(opened, "sha256").hexdigest() == digest
        except OSError:
            return False

    def _drop(self, broken: list[tuple[str, str, str]]) -> None:
        """Removes damaged entries (key, file, digest), unless another process has rewritten them since."""
        with self._open() as rows, _transaction(rows):
            for key, file, digest in broken:
                if rows.execute("DELETE FROM entries WHERE key = ? AND digest = ?", (key, digest)).rowcount:
                    (self.folder / file).unlink(missing_ok=True)

    def _prune(self, rows: sqlite3.Connection, newest: str) -> None:
        """Evicts the least recently used entries, but ``newest``, until the limit holds. Called within a transaction."""
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
        """Deletes files without a row and stale temporary files.

        Called within a transaction, so that no other process has renamed a file and not yet inserted its row.
        """
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
        """A synced temporary file with ``data``; deleted afterwards unless it was renamed."""
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
            raise InputError(f"{self.folder}: outputs cannot be cached there: {_reason(error)}") from error
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executescript(_TABLES)
            yield connection
        except (OSError, sqlite3.Error) as error:
            raise InputError(
                f"{self.folder}: outputs cannot be cached there: {_reason(error)}; remove the folder if its index is damaged"
            ) from error
        finally:
            connection.close()


@contextlib.contextmanager
def _transaction(rows: sqlite3.Connection) -> Iterator[None]:
    """A write transaction: rolled back on an exception, and exclusive among processes."""
    rows.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        rows.execute("ROLLBACK")
        raise
    rows.execute("COMMIT")


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).strip()

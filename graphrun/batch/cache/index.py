"""The folder of cached outputs: an SQLite index and one safetensors file per entry. Several processes may use it at once.

Knows neither what the keys mean nor what the files hold.

    put    in one transaction: write the file whole and synced, insert the row, evict the least recently used over the limit
    get    read row and file; where the file's SHA-256 is not the row's, delete the row: the entry is absent and computed again
    kill   at any moment leaves at most a temporary file or a file without a row; `verify` and `remove` delete both
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from graphrun.errors import InputError
from graphrun.files import write_whole
from graphrun.units import GIB

# The embeddings of a FLUX prompt take 4 MiB, so this holds about a thousand prompts.
LIMIT_BYTES = 4 * GIB
BUSY_SECONDS = 30.0

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
        if not self._exists():
            return None
        for _ in range(2):  # another process may replace the entry between the reads of row and file
            with self._open() as rows:
                found = rows.execute("SELECT key, file, digest FROM entries WHERE key = ?", (key,)).fetchone()
            if found is None:
                return None
            with contextlib.suppress(OSError):
                data: bytes = (self.folder / found[1]).read_bytes()
                if hashlib.sha256(data).hexdigest() == found[2]:
                    with self._change() as rows:
                        rows.execute("UPDATE entries SET used = ? WHERE key = ?", (time.time(), key))
                    return data
        with self._change() as rows:
            self._drop(rows, *found)
        return None

    def put(self, key: str, data: bytes, *, graph: str = "", stage: str = "", about: str = "") -> None:
        """Stores ``data`` under ``key``, replacing an entry there. Data larger than the limit is not stored."""
        if len(data) > self.limit_bytes:
            return
        digest, now = hashlib.sha256(data).hexdigest(), time.time()
        name = f"{key}-{digest[:16]}.safetensors"
        with self._change() as rows:
            before = rows.execute("SELECT key, file, digest FROM entries WHERE key = ? AND file != ?", (key, name)).fetchone()
            write_whole(self.folder / name, lambda temporary: temporary.write_bytes(data), lasting=True)
            if before is not None:
                self._drop(rows, *before)
            row = (key, name, digest, len(data), graph, stage, about, now, now)
            rows.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            found = rows.execute("SELECT key, file, digest, nbytes FROM entries ORDER BY key = ?, used, key", (key,)).fetchall()
            excess = sum(nbytes for *_, nbytes in found) - self.limit_bytes
            for *entry, nbytes in found[:-1]:  # the least recently used first
                if excess > 0:
                    self._drop(rows, *entry)
                    excess -= nbytes

    def entries(self) -> list[Entry]:
        """All entries, the most recently used first."""
        if not self._exists():
            return []
        with self._open() as rows:
            query = "SELECT key, graph, stage, about, nbytes, made, used FROM entries ORDER BY used DESC, key"
            return [Entry(*row) for row in rows.execute(query)]

    def remove(self, keys: list[str] | None = None) -> int:
        """Removes the entries ``keys`` (None: all) and their files. Returns how many were removed."""
        return len(self._remove(lambda key, file, digest: keys is None or key in keys))

    def verify(self) -> list[Entry]:
        """Reads every entry, and removes and returns those whose file is damaged or missing."""

        def damaged(key: str, file: str, digest: str) -> bool:
            with contextlib.suppress(OSError):
                return _digest(self.folder / file) != digest
            return True

        by_key = {entry.key: entry for entry in self.entries()}
        return [by_key[key] for key in self._remove(damaged) if key in by_key]

    def file_digest(self, path: Path) -> str:
        """SHA-256 of a file's content. The file is read again only where its size, mtime or inode changed."""
        found = path.stat()
        stamp = f"{found.st_size} {found.st_mtime_ns} {found.st_ino}"
        with contextlib.suppress(InputError), self._open() as rows:
            row = rows.execute("SELECT digest FROM files WHERE path = ? AND stamp = ?", (str(path), stamp)).fetchone()
            if row is not None:
                return str(row[0])
        digest = _digest(path)
        with contextlib.suppress(InputError), self._open() as rows:
            rows.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", (str(path), stamp, digest))
        return digest

    def _exists(self) -> bool:
        return (self.folder / "index.sqlite").is_file()

    def _remove(self, chosen: Callable[[str, str, str], bool]) -> list[str]:
        """Removes the entries (key, file, digest) that are ``chosen``, and files without a row. Returns the keys."""
        if not self._exists():
            return []
        with self._open() as rows:
            found = [row for row in rows.execute("SELECT key, file, digest FROM entries") if chosen(*row)]
        with self._change() as rows:
            for row in found:
                self._drop(rows, *row)
            named = {file for (file,) in rows.execute("SELECT file FROM entries")}
            for path in (*self.folder.glob("*.safetensors"), *self.folder.glob(".*.new-*")):
                if path.name not in named:
                    path.unlink(missing_ok=True)
        return [key for key, _, _ in found]

    def _drop(self, rows: sqlite3.Connection, key: str, file: str, digest: str) -> None:
        """Removes an entry, unless another process has rewritten it since."""
        if rows.execute("DELETE FROM entries WHERE key = ? AND digest = ?", (key, digest)).rowcount:
            (self.folder / file).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """A write transaction: rolled back on an exception, and exclusive among processes."""
        with self._open() as rows, rows:
            rows.execute("BEGIN IMMEDIATE")
            yield rows

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        advice = ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self.folder / "index.sqlite", timeout=BUSY_SECONDS, isolation_level=None)
            advice = "; remove the folder if its index is damaged"
            with contextlib.closing(connection):
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.executescript(_TABLES)
                yield connection
        except (OSError, sqlite3.Error) as error:
            reason = (getattr(error, "strerror", None) or str(error)).strip()
            raise InputError(f"{self.folder}: outputs cannot be cached there: {reason}{advice}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

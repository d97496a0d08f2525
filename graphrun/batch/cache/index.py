"""The cached outputs of a folder: an SQLite database, which several processes may use at once.

put    in one transaction: insert the entry and its bytes, and evict the least recently used
       entries beyond the limit
get    delete an entry whose bytes have another SHA-256: it counts as absent
kill   at any moment leaves each entry complete or absent: SQLite rolls back what was not
       committed
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from graphrun.errors import InputError
from graphrun.reading import open_regular
from graphrun.units import GIB

# embeddings of a FLUX prompt take 4 MiB, so this is enough for about a thousand prompts
LIMIT_BYTES = 4 * GIB
BUSY_SECONDS = 30.0
DATABASE = "outputs.sqlite"

# Bytes have their own table, so that updating the time of use does not rewrite them. auto_vacuum
# shrinks the file on deletion.
_TABLES = """
PRAGMA auto_vacuum = FULL; PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL; PRAGMA foreign_keys = ON;
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, graph TEXT NOT NULL, stage TEXT NOT NULL, about TEXT NOT NULL,
    nbytes INTEGER NOT NULL, made REAL NOT NULL, used REAL NOT NULL, digest TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS contents (
    key TEXT PRIMARY KEY REFERENCES entries ON DELETE CASCADE, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS files (
    path TEXT PRIMARY KEY, stamp TEXT NOT NULL, digest TEXT NOT NULL);
"""
_EVICT = """
WITH newest_first AS (
    SELECT key, SUM(nbytes) OVER (ORDER BY key = ? DESC, used DESC, key DESC) AS total FROM entries)
DELETE FROM entries WHERE key IN (SELECT key FROM newest_first WHERE total > ?)
"""
# SQLite's columns accept values of any type; rows of other types are deleted
_TYPES: Mapping[str, type] = {
    "key": str,
    "graph": str,
    "stage": str,
    "about": str,
    "nbytes": int,
    "made": float,
    "used": float,
}
_DELETE_ODD = "DELETE FROM entries WHERE " + " OR ".join(
    f"typeof({name}) != '{ {str: 'text', int: 'integer', float: 'real'}[kind] }'"
    for name, kind in _TYPES.items()
)


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A cached output. ``inputs_text``: the inputs that it depends on. Times are since the
    epoch."""

    key: str
    graph: str
    stage: str
    inputs_text: str
    nbytes: int
    created_seconds: float
    used_seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the fields by the names of their database columns."""
        return dict(zip(_TYPES, astuple(self), strict=True))


class Index:
    """Entries by key in ``folder``, which is created with the first entry. All methods raise
    InputError if the folder or its database cannot be read or written."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    def get(self, key: str) -> bytes | None:
        """Return the entry's bytes; None if absent. A damaged entry is removed and counts as
        absent."""
        if (data := self._read(key)) is not None:
            with self._open() as rows:
                rows.execute("UPDATE entries SET used = ? WHERE key = ?", (time.time(), key))
        return data

    def put(
        self, key: str, data: bytes, *, graph: str = "", stage: str = "", inputs_text: str = ""
    ) -> None:
        """Store ``data`` under ``key``, replacing an entry. Data above the limit is not stored."""
        if len(data) > self.limit_bytes:
            return
        now_seconds = time.time()
        entry = (
            key,
            graph,
            stage,
            inputs_text,
            len(data),
            now_seconds,
            now_seconds,
            hashlib.sha256(data).hexdigest(),
        )
        with self._open() as rows, rows:
            rows.execute("BEGIN IMMEDIATE")
            rows.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?)", entry)
            rows.execute("INSERT OR REPLACE INTO contents VALUES (?, ?)", (key, data))
            rows.execute(_EVICT, (key, self.limit_bytes))

    def entries(self) -> list[CacheEntry]:
        query = (
            "SELECT key, graph, stage, about, nbytes, made, used FROM entries "
            "ORDER BY used DESC, key"
        )
        entries = [CacheEntry(*row) for row in self._select(query)]
        if any(
            not isinstance(value, _TYPES[name])
            for entry in entries
            for name, value in entry.to_json().items()
        ):
            with self._open() as rows:
                rows.execute(_DELETE_ODD)
            entries = [CacheEntry(*row) for row in self._select(query)]
        return entries

    def remove(self, keys: list[str] | None = None) -> int:
        """Remove the entries ``keys`` (None: all). Return how many were removed."""
        parameters = [(entry.key,) for entry in self.entries() if keys is None or entry.key in keys]
        if not parameters:
            return 0
        with self._open() as rows:
            return rows.executemany("DELETE FROM entries WHERE key = ?", parameters).rowcount

    def verify(self) -> list[CacheEntry]:
        """Read every entry. Remove and return the damaged ones."""
        return [entry for entry in self.entries() if self._read(entry.key) is None]

    def file_digest(self, path: Path) -> str:
        """Return the SHA-256 of a file, read again only if its size, mtime or inode changed."""
        status = path.stat()
        stamp = f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"
        with contextlib.suppress(InputError):
            for (digest_text,) in self._select(
                "SELECT digest FROM files WHERE path = ? AND stamp = ?", str(path), stamp
            ):
                return str(digest_text)
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        with contextlib.suppress(InputError), self._open() as rows:
            rows.execute(
                "INSERT OR REPLACE INTO files VALUES (?, ?, ?)", (str(path), stamp, digest)
            )
        return digest

    def _read(self, key: str) -> bytes | None:
        query = "SELECT digest, data FROM entries LEFT JOIN contents USING (key) WHERE key = ?"
        for digest, data in self._select(query, key):
            if isinstance(data, bytes) and hashlib.sha256(data).hexdigest() == digest:
                return bytes(data)
            with self._open() as rows:  # unless another process has written it again
                rows.execute("DELETE FROM entries WHERE key = ? AND digest = ?", (key, digest))
        return None

    def _select(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        """Return the rows of ``query``; none if there is no database. Does not create one."""
        if not (self.folder / DATABASE).is_file():
            return []
        with self._open() as rows:
            return rows.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        suggestions = ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(
                self.folder / DATABASE, timeout=BUSY_SECONDS, isolation_level=None
            )
            suggestions = "; remove the folder if its index is damaged"
            with contextlib.closing(connection):
                connection.executescript(_TABLES)
                yield connection
        except (OSError, sqlite3.Error) as error:
            reason = (getattr(error, "strerror", None) or str(error)).strip()
            raise InputError(
                f"{self.folder}: outputs cannot be cached there: {reason}{suggestions}"
            ) from error

"""A store of entries by key in a folder: an SQLite database that several processes may use at once.

put    in one transaction: insert the entry and its bytes, and evict the least recently used
       entries beyond the limit
get    delete an entry whose bytes have another SHA-256: it counts as absent
kill   at any moment leaves each entry complete or absent: SQLite rolls back what was not
       committed

Readers of SQLite's rollback journal write nothing, so entries in a read-only folder can be read;
and unlike its write-ahead log, it works on network drives. Nothing waits for the disk. A database
that is damaged, as by a power failure, is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from graphrun.errors import InputError
from graphrun.limits import LIMITS
from graphrun.reading import open_regular, parse_json
from graphrun.units import MIB

# enough for a few hundred graphs and sizes: a FLUX dry run takes 1 MB, a problem 0.2 MB
LIMIT_BYTES = 128 * MIB
BUSY_SECONDS = 30.0
DATABASE = "entries.sqlite"

_SETTINGS = "PRAGMA synchronous = OFF; PRAGMA foreign_keys = ON;"
# Bytes have their own table, so that updating the time of use does not rewrite them. auto_vacuum
# shrinks the file on deletion.
_TABLES = """
PRAGMA auto_vacuum = FULL;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, graph TEXT NOT NULL, stage TEXT NOT NULL, about TEXT NOT NULL,
    nbytes INTEGER NOT NULL, made REAL NOT NULL, used REAL NOT NULL, digest TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS contents (
    key TEXT PRIMARY KEY REFERENCES entries ON DELETE CASCADE, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS files (
    path TEXT PRIMARY KEY, stamp TEXT NOT NULL, digest TEXT NOT NULL);
COMMIT;
"""
# Columns and SQLite's names of their types. A column accepts values of any type: rows of other
# types are not listed, and the next `put` removes them.
_TYPES = {
    "key": "text",
    "graph": "text",
    "stage": "text",
    "about": "text",
    "nbytes": "integer",
    "made": "real",
    "used": "real",
}
_HAS_TYPES = " AND ".join(f"typeof({name}) = '{kind}'" for name, kind in _TYPES.items())
_LIST = f"SELECT {', '.join(_TYPES)} FROM entries WHERE {_HAS_TYPES} ORDER BY used DESC, key"
_EVICT = f"""
WITH newest_first AS (
    SELECT key, SUM(nbytes) OVER (ORDER BY key = ? DESC, used DESC, key DESC) AS total FROM entries)
DELETE FROM entries
WHERE key IN (SELECT key FROM newest_first WHERE total > ?) OR NOT ({_HAS_TYPES})
"""
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry. ``graph``, ``stage`` and ``inputs_text``: of a stage output, its origin and the
    inputs that it depends on. Times are since the epoch."""

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


class Store:
    """Entries by key in ``folder``, which is created with the first entry.

    All methods but `get_json` and `put_json` raise InputError if the folder or its database cannot
    be read or written.
    """

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    def get_json(self, kind: str, key: str) -> Any | None:
        """Return the entry that `put_json` stored; None if it is absent, damaged or unreadable."""
        try:
            data = self.get(f"{kind}-{key}")
            return parse_json(data) if data and len(data) <= LIMITS.text_bytes else None
        except (InputError, ValueError):
            return None

    def put_json(self, kind: str, key: str, value: Any) -> None:
        """Store ``value``, which must be JSON-ready, if the folder can be written to."""
        with contextlib.suppress(InputError):
            self.put(f"{kind}-{key}", json.dumps(value, separators=(",", ":")).encode())

    def get(self, key: str) -> bytes | None:
        """Return the entry's bytes; None if absent. A damaged entry is removed and counts as
        absent."""
        if (data := self._read(key)) is not None:
            with contextlib.suppress(InputError), self._open() as rows:  # not in a read-only folder
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

    def entries(self) -> list[StoredEntry]:
        """Return all entries, the most recently used first."""
        return [StoredEntry(*row) for row in self._select(_LIST)]

    def remove(self, keys: list[str] | None = None) -> int:
        """Remove the entries ``keys`` (None: all). Return how many were removed."""
        parameters = [(entry.key,) for entry in self.entries() if keys is None or entry.key in keys]
        if not parameters:
            return 0
        with self._open() as rows:
            return rows.executemany("DELETE FROM entries WHERE key = ?", parameters).rowcount

    def verify(self) -> list[StoredEntry]:
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
            try:
                return rows.execute(query, values).fetchall()
            except sqlite3.OperationalError as error:
                # of a database that another process creates now, the tables may not be seen yet
                if "no such table" not in str(error):
                    raise
                return []

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        database = self.folder / DATABASE
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(database, timeout=BUSY_SECONDS, isolation_level=None)
            with contextlib.closing(connection):
                connection.executescript(_SETTINGS)
                if connection.execute("PRAGMA auto_vacuum").fetchone() == (0,):  # a new database
                    connection.executescript(_TABLES)
                yield connection
        except (OSError, sqlite3.Error) as error:
            reason = (getattr(error, "strerror", None) or str(error)).strip()
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
                with contextlib.suppress(OSError):
                    database.unlink()
                    reason += "; the damaged database is removed"
            raise InputError(f"{self.folder}: nothing can be cached there: {reason}") from error


def store_in(folder: Path | None) -> Store | None:
    """Return the store in the cache ``folder``; None without a cache."""
    return Store(folder) if folder is not None else None

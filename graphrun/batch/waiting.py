"""Stage outputs that wait between two segments of a schedule: in RAM up to a limit, then on disk."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from graphrun.batch.cache.pack import pack, unpack


class Values:
    """Stage outputs by request, on the host. A context manager.

    At most ``ram_bytes`` are held in RAM. The others are written to a temporary folder, which is deleted on exit.
    """

    def __init__(self, ram_bytes: int) -> None:
        self.ram_bytes = ram_bytes
        self.held_bytes = self.stored_bytes = self.highest_bytes = 0
        self._held: dict[tuple[int, str], tuple[Any, int]] = {}
        self._stored: dict[tuple[int, str], Path] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Values:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._held.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def put(self, request: int, name: str, value: Any) -> None:
        """Stores ``value`` as output ``name`` (as in ``encode.embeds``) of request number ``request``."""
        nbytes = _nbytes(value, set())
        if self.held_bytes + nbytes <= self.ram_bytes:
            self._held[request, name] = (value, nbytes)
            self.held_bytes += nbytes
            self.highest_bytes = max(self.highest_bytes, self.held_bytes)
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="graphrun-values-")
        path = Path(self._folder.name) / f"{request}-{name}"
        path.write_bytes(data := pack(value))
        self._stored[request, name] = path
        self.stored_bytes += len(data)

    def has(self, request: int, name: str) -> bool:
        """Whether output ``name`` of ``request`` is stored."""
        return (request, name) in self._held or (request, name) in self._stored

    def get(self, request: int, name: str) -> Any:
        """Output ``name`` of ``request``. Raises KeyError where it is not stored."""
        if (request, name) in self._held:
            return self._held[request, name][0]
        return unpack(self._stored[request, name].read_bytes())

    def drop(self, request: int) -> None:
        """Deletes all outputs of ``request``."""
        for key in [key for key in self._held if key[0] == request]:
            self.held_bytes -= self._held.pop(key)[1]
        for key in [key for key in self._stored if key[0] == request]:
            path = self._stored.pop(key)
            self.stored_bytes -= path.stat().st_size
            path.unlink()


def _nbytes(value: Any, seen: set[int]) -> int:
    """Bytes of the storages in ``value``, each counted once."""
    if hasattr(value, "untyped_storage"):
        storage = value.untyped_storage()
        counted = storage.data_ptr() in seen
        seen.add(storage.data_ptr())
        return 0 if counted else int(storage.nbytes())
    if isinstance(value, dict):
        return sum(_nbytes(item, seen) for item in value.values())
    return sum(_nbytes(item, seen) for item in value) if isinstance(value, (list, tuple)) else 0

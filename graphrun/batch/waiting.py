"""Values that wait between two legs of a course: in RAM while there is room, then on disk. Knows no plan."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from graphrun.batch.cache.pack import pack, unpack


class Values:
    """Outputs of stages by item, on the host. At most ``ram_bytes`` lie in RAM; others in a folder that goes with the context."""

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
        """``value`` waits as ``name`` (as in ``encode.embeds``) of ``request``."""
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
        """Whether it waits."""
        return (request, name) in self._held or (request, name) in self._stored

    def get(self, request: int, name: str) -> Any:
        """The value; KeyError where it does not wait."""
        if (request, name) in self._held:
            return self._held[request, name][0]
        return unpack(self._stored[request, name].read_bytes())

    def drop(self, request: int) -> None:
        """Nothing waits of ``request`` any more."""
        for key in [key for key in self._held if key[0] == request]:
            self.held_bytes -= self._held.pop(key)[1]
        for key in [key for key in self._stored if key[0] == request]:
            path = self._stored.pop(key)
            self.stored_bytes -= path.stat().st_size
            path.unlink()


def _nbytes(value: Any, seen: set[int]) -> int:
    if hasattr(value, "untyped_storage"):
        storage = value.untyped_storage()
        known = storage.data_ptr() in seen
        seen.add(storage.data_ptr())
        return 0 if known else int(storage.nbytes())
    if isinstance(value, dict):
        return sum(_nbytes(request, seen) for request in value.values())
    return sum(_nbytes(request, seen) for request in value) if isinstance(value, (list, tuple)) else 0

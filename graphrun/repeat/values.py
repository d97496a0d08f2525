"""Values that wait between two legs of a course: in RAM while there is room, then on disk. Knows no plan."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from graphrun.outputs.pack import pack, unpack


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

    def put(self, item: int, name: str, value: Any) -> None:
        """``value`` waits as ``name`` (as in ``encode.embeds``) of ``item``."""
        nbytes = _nbytes(value, set())
        if self.held_bytes + nbytes <= self.ram_bytes:
            self._held[item, name] = (value, nbytes)
            self.held_bytes += nbytes
            self.highest_bytes = max(self.highest_bytes, self.held_bytes)
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="graphrun-values-")
        path = Path(self._folder.name) / f"{item}-{name}"
        path.write_bytes(data := pack(value))
        self._stored[item, name] = path
        self.stored_bytes += len(data)

    def has(self, item: int, name: str) -> bool:
        """Whether it waits."""
        return (item, name) in self._held or (item, name) in self._stored

    def get(self, item: int, name: str) -> Any:
        """The value; KeyError where it does not wait."""
        if (item, name) in self._held:
            return self._held[item, name][0]
        return unpack(self._stored[item, name].read_bytes())

    def drop(self, item: int) -> None:
        """Nothing waits of ``item`` any more."""
        for key in [key for key in self._held if key[0] == item]:
            self.held_bytes -= self._held.pop(key)[1]
        for key in [key for key in self._stored if key[0] == item]:
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
        return sum(_nbytes(item, seen) for item in value.values())
    return sum(_nbytes(item, seen) for item in value) if isinstance(value, (list, tuple)) else 0

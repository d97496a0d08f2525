"""Stage outputs that wait between two segments: in RAM up to a limit, then on disk."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from graphrun.batch.cache.pack import pack, unpack


class WaitingValues(contextlib.ExitStack):
    """Stage outputs by request, on the host. A context manager. At most ``ram_bytes`` stay in RAM;
    the rest is in a temporary folder, deleted on exit."""

    def __init__(self, ram_bytes: int) -> None:
        super().__init__()
        self.ram_bytes = ram_bytes
        self._in_ram: dict[tuple[int, str], tuple[Any, int]] = {}
        self._on_disk: dict[tuple[int, str], Path] = {}
        self._folder: Path | None = None
        self.callback(self._in_ram.clear)

    @property
    def held_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self._in_ram.values())

    def put(self, request: int, name: str, value: Any) -> None:
        """Store ``value`` as output ``name``, such as ``encode.embeds``, of a request."""
        nbytes = _nbytes(value, set())
        if self.held_bytes + nbytes <= self.ram_bytes:
            self._in_ram[request, name] = (value, nbytes)
            return
        if self._folder is None:
            self._folder = Path(
                self.enter_context(tempfile.TemporaryDirectory(prefix="graphrun-values-"))
            )
        self._on_disk[request, name] = path = self._folder / f"{request}-{name}"
        path.write_bytes(pack(value))

    def has(self, request: int, name: str) -> bool:
        return (request, name) in self._in_ram or (request, name) in self._on_disk

    def get(self, request: int, name: str) -> Any:
        """Return output ``name`` of ``request``. Raises KeyError if it is not stored."""
        if (request, name) in self._in_ram:
            return self._in_ram[request, name][0]
        return unpack(self._on_disk[request, name].read_bytes())

    def drop(self, request: int) -> None:
        for key in [key for key in (*self._in_ram, *self._on_disk) if key[0] == request]:
            if self._in_ram.pop(key, None) is None:
                self._on_disk.pop(key).unlink()


def _nbytes(value: Any, counted_storages: set[int]) -> int:
    """Return the bytes of the storages in ``value``, each counted once."""
    if hasattr(value, "untyped_storage"):
        storage = value.untyped_storage()
        is_known = storage.data_ptr() in counted_storages
        counted_storages.add(storage.data_ptr())
        return 0 if is_known else int(storage.nbytes())
    if isinstance(value, dict):
        return sum(_nbytes(item, counted_storages) for item in value.values())
    return (
        sum(_nbytes(item, counted_storages) for item in value)
        if isinstance(value, (list, tuple))
        else 0
    )

"""Stage outputs that wait between two segments of a schedule: in RAM up to a limit, then on
disk."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from graphrun.batch.cache.pack import pack, unpack


class Values(contextlib.ExitStack):
    """Stage outputs by request, on the host. A context manager.

    At most ``ram_bytes`` are held in RAM. The others are written to a temporary folder, which is
    deleted on exit.
    """

    def __init__(self, ram_bytes: int) -> None:
        super().__init__()
        self.ram_bytes = ram_bytes
        self._held: dict[tuple[int, str], tuple[Any, int]] = {}
        self._stored: dict[tuple[int, str], Path] = {}
        self._folder: Path | None = None
        self.callback(self._held.clear)

    @property
    def held_bytes(self) -> int:
        """Bytes in RAM."""
        return sum(nbytes for _, nbytes in self._held.values())

    def put(self, request: int, name: str, value: Any) -> None:
        """Stores ``value`` as output ``name`` (as in ``encode.embeds``) of request number
        ``request``."""
        nbytes = _nbytes(value, set())
        if self.held_bytes + nbytes <= self.ram_bytes:
            self._held[request, name] = (value, nbytes)
            return
        if self._folder is None:
            self._folder = Path(
                self.enter_context(tempfile.TemporaryDirectory(prefix="graphrun-values-"))
            )
        self._stored[request, name] = path = self._folder / f"{request}-{name}"
        path.write_bytes(pack(value))

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
        for key in [key for key in (*self._held, *self._stored) if key[0] == request]:
            if self._held.pop(key, None) is None:
                self._stored.pop(key).unlink()


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

"""Digests of the files that a graph names, for the graph's own digest: it depends on their content, not on their paths."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

HEADER_BYTES = 100_000_000  # the longest header that safetensors reads (its MAX_HEADER_SIZE)


class HasFile(Protocol):
    """An object with a ``file``."""

    @property
    def file(self) -> str:
        """The path."""


def file_digest(file: Path) -> str:
    """SHA-256 of the whole file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def header_digest(adapter: HasFile) -> str:
    """SHA-256 of the header of a safetensors file: names, shapes and dtypes of its tensors."""
    with Path(adapter.file).open("rb") as file:
        return hashlib.sha256(file.read(min(HEADER_BYTES, int.from_bytes(file.read(8), "little")))).hexdigest()

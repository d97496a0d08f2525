"""Digests of the files that a graph names, for its own: what numbers depend on is their content, not where they lie."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

HEADER_BYTES = 100_000_000  # the longest that safetensors reads


class Named(Protocol):
    """Something with a file."""

    @property
    def file(self) -> str:
        """Its path."""


def file_digest(file: Path) -> str:
    """SHA-256 of the whole file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def header_digest(adapter: Named) -> str:
    """SHA-256 of the header of a safetensors file: names, shapes and dtypes of its tensors."""
    with Path(adapter.file).open("rb") as file:
        return hashlib.sha256(file.read(min(HEADER_BYTES, int.from_bytes(file.read(8), "little")))).hexdigest()

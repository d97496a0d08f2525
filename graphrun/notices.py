"""Log lines of libraries that graphrun imports and that mean nothing to its users."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

DROPPED = {
    # diffusers imports bitsandbytes, which looks for an optional package that multiplies 4-bit
    # weights faster on a CPU
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
    # diffusers imports image processors by the names of classes that need torchvision; without
    # torchvision these names stand for the older classes
    "transformers.utils.import_utils": "requires torchvision (not installed); falling back to",
}
"""Logger -> a part of the line."""


class _Without(logging.Filter):
    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def filter(self, record: logging.LogRecord) -> bool:
        return self._part not in record.getMessage()


@contextmanager
def without_notices() -> Iterator[None]:
    """Drop the lines of `DROPPED` in this context, where graphrun imports libraries."""
    filters = {name: _Without(part) for name, part in DROPPED.items()}
    for name, line_filter in filters.items():
        logging.getLogger(name).addFilter(line_filter)
    try:
        yield
    finally:
        for name, line_filter in filters.items():
            logging.getLogger(name).removeFilter(line_filter)

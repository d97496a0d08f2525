"""Lines that libraries log when graphrun imports them, and that tell a user of graphrun nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

DROPPED = {
    # diffusers imports bitsandbytes. That looks for an optional package, whose product of 4-bit
    # weights is faster on a CPU.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
    # diffusers imports image processors by the names of those that need torchvision. Without it
    # they are the former ones.
    "transformers.utils.import_utils": "requires torchvision (not installed); falling back to",
}
"""Logger -> a part of the line."""


class _Without(logging.Filter):
    """Drops lines with ``part``."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def filter(self, record: logging.LogRecord) -> bool:
        return self._part not in record.getMessage()


@contextmanager
def without_notices() -> Iterator[None]:
    """A context in which the lines of `DROPPED` are dropped: imports by graphrun, and processes of
    its own. The loggers are as before at its end."""
    filters = {name: _Without(part) for name, part in DROPPED.items()}
    for name, dropped in filters.items():
        logging.getLogger(name).addFilter(dropped)
    try:
        yield
    finally:
        for name, dropped in filters.items():
            logging.getLogger(name).removeFilter(dropped)

"""Lines that libraries log when they are imported, and that tell a user of graphrun nothing. Their loggers drop them."""

from __future__ import annotations

import logging

DROPPED = {
    # diffusers imports bitsandbytes. That looks for an optional package, whose product of 4-bit weights is faster on a CPU.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
    # diffusers imports image processors by the names of those that need torchvision. Without it they are the former ones.
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


def drop_notices() -> None:
    """Drops the lines of `DROPPED` in this process. Call it before diffusers is imported."""
    for name, part in DROPPED.items():
        logging.getLogger(name).addFilter(_Without(part))

"""A child's main function that computes until its process ends."""

from __future__ import annotations

from typing import Any


def busy(connection: Any, settings: Any) -> None:
    print("busy", flush=True)
    while True:
        pass

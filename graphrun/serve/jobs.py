"""One request from its admission to its pictures."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphrun.serve.asked import Asked
from graphrun.serve.errors import Refused

ENDED = ("done", "failed", "cancelled")


@dataclass(eq=False)
class Job:
    """``state``: waiting, running, or one of `ENDED`. ``stage``, ``step``, ``steps``, ``preview``
    (PNG) are of the run under way.

    Seconds of the device's clock: ``admitted_at``, ``promised_at`` (predicted to begin),
    ``begun_at``. Seconds of the wall: ``planned`` and ``queued``. ``together``: requests that went
    stage by stage with it, itself included. ``measured``: of each run that has ended, as the worker
    sends it. ``attempts``: workers that died.
    """

    asked: Asked
    owner: str
    folder: Path
    preview_wanted: bool
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    created: int = field(default_factory=lambda: int(time.time()))
    state: str = "waiting"
    stage: str = ""
    step: int = 0
    steps: int = 0
    preview: bytes | None = None
    pictures: list[bytes] = field(default_factory=list)
    measured: list[dict[str, Any]] = field(default_factory=list)
    error: Refused | None = None
    admitted_at: float = 0.0
    promised_at: float = 0.0
    begun_at: float | None = None
    submitted: float = field(default_factory=time.monotonic)
    planned: float = 0.0
    queued: float = 0.0
    attempts: int = 0
    together: int = 1
    budgets: Mapping[str, int] = field(default_factory=dict)  # of its share; empty: all
    seconds: float = 0.0  # predicted, of the runs
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        """Whether nothing more happens."""
        return self.state in ENDED

    def change(self, **values: Any) -> None:
        """Sets attributes, and wakes those that wait for a change."""
        for name, value in values.items():
            setattr(self, name, value)
        self._changed.set()
        self._changed = asyncio.Event()

    async def changes(self) -> AsyncIterator[None]:
        """Yields at once, after each change, and ends when the job has ended. Changes between two
        looks are one."""
        while True:
            changed = self._changed
            yield
            if self.ended:
                return
            await changed.wait()

    async def end(self) -> None:
        """Waits for the end. Raises Refused where the job failed or was cancelled."""
        async for _ in self.changes():
            pass
        if self.error is not None:
            raise self.error

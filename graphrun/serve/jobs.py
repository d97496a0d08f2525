"""One request, from its admission to its pictures."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphrun.serve.bodies import PictureRequest
from graphrun.serve.errors import Refused

ENDED = ("done", "failed", "cancelled")
DELETED = "deleted"  # code of the error of a deleted job


@dataclass(eq=False)
class Job:
    """A request and its state.

    ``state``: waiting, running, or one of `ENDED`. ``stage``, ``step``, ``steps`` and ``preview``
    (PNG): of the current run. On the device's clock: ``admitted_at``, ``promised_at`` (predicted
    start) and ``begun_at``. Wall seconds: ``planning_seconds`` and ``queued``. ``batch_size``:
    requests in the batch, this one included. ``results``: the worker's message for each finished
    run. ``attempts``: workers that died under this request. ``key``: the client's Idempotency-Key;
    ``body``: the digest of the body that came with it. ``is_stored``: the job outlives the server
    (`graphrun.serve.state.JobStore`).
    """

    request: PictureRequest
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
    results: list[dict[str, Any]] = field(default_factory=list)
    error: Refused | None = None
    admitted_at: float = 0.0
    promised_at: float = 0.0
    begun_at: float | None = None
    submitted: float = field(default_factory=time.monotonic)
    planning_seconds: float = 0.0
    queued: float = 0.0
    attempts: int = 0
    batch_size: int = 1
    # of the plan's share; empty: the whole budgets
    budgets: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0  # predicted, of all runs
    key: str = ""
    body: str = ""
    is_stored: bool = False
    _change: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def is_deleted(self) -> bool:
        """Whether its client deleted it."""
        return self.error is not None and self.error.code == DELETED

    def change(self, **values: Any) -> None:
        """Set attributes, and wake the coroutines that wait for a change."""
        for name, value in values.items():
            setattr(self, name, value)
        self._change.set()
        self._change = asyncio.Event()

    async def changes(self) -> AsyncIterator[bytes | None]:
        """Yield at once and after changes, several of which may merge: the preview if it is new,
        else None. Stop when the job has ended."""
        preview = None
        while True:
            event, previous, preview = self._change, preview, self.preview
            yield preview if preview is not previous else None
            if self.ended:
                return
            await event.wait()

    async def end(self) -> None:
        """Wait for the end. Raises Refused if the job failed or was cancelled."""
        async for _ in self.changes():
            pass
        if self.error is not None:
            raise self.error

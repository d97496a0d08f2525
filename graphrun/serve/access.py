"""The access log: one entry for each answer, without texts of clients."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphrun.serve.log import log
from graphrun.serve.metrics import Metrics

PROBES = ("/health", "/healthz", "/readyz", "/metrics")  # logged only if they fail
PATH_CHARACTERS = 200


class Logged:
    """ASGI middleware that logs every answer, and counts those under /v1 by API key.

    The name of the key and the id of a job are what handlers put into ``request.state``.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status, nbytes = time.monotonic(), 0, 0

        async def answer(message: Message) -> None:
            nonlocal status, nbytes
            status = message.get("status", status)
            nbytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, answer)
        finally:
            path, state = scope["path"], scope.get("state", {})
            if path.startswith("/v1/"):
                self._metrics.answers.labels(state.get("owner", ""), str(status)).inc()
            if path not in PROBES or status >= 400:
                log(
                    "answer",
                    method=scope["method"],
                    path=path[:PATH_CHARACTERS],
                    status=status or None,
                    seconds=round(time.monotonic() - start, 3),
                    bytes=nbytes,
                    key=state.get("owner", ""),
                    job=state.get("job", ""),
                )

"""Connections of the server: how long one may wait for its client, and which one ends where there
are too many."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from fastapi.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from graphrun.serve.errors import Refused
from graphrun.serve.settings import Settings


def protocol_within(settings: Settings) -> type[H11Protocol]:
    """Return uvicorn's HTTP/1.1 protocol with bounds: it waits for headers, and for clients that do
    not read, without end.

    Where more than ``settings.connections`` are open, the one that has waited longest for its
    client is cut off. Where the server works for all of them, the new one gets 503. uvicorn's own
    limit counts connections that wait, too.
    """
    bounds = settings.bounds
    busy = Refused(
        503, f"{settings.connections} connections have requests at work", "busy", retry_seconds=5
    )
    refusal = JSONResponse(busy.body, busy.status, headers={**busy.headers, "Connection": "close"})

    class Protocol(H11Protocol):
        _since = 0.0  # when the wait for the client began
        _headers: asyncio.TimerHandle | None = None
        _reader: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._since = self.loop.time()
            self._expect_headers()
            if len(self.connections) > settings.connections:
                others = [
                    each
                    for each in self.connections
                    if isinstance(each, Protocol) and each is not self
                ]
                if waiting := [each for each in others if each.waits_for_client]:
                    min(waiting, key=lambda each: each._since).cut_off()
                else:
                    self.app = refusal

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._expect_headers()

        def on_response_complete(self) -> None:
            self._since = self.loop.time()
            super().on_response_complete()
            self._expect_headers()
            self._expect_reader()

        def pause_writing(self) -> None:
            self._since = self.loop.time()
            super().pause_writing()
            self._expect_reader()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            for timer in (self._headers, self._reader):
                if timer is not None:
                    timer.cancel()

        @property
        def waits_for_client(self) -> bool:
            """Whether the client has to send or to read, and nothing is done for it meanwhile."""
            sends = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
            return sends or self.flow.write_paused or self.transport.is_closing()

        def cut_off(self) -> None:
            """Ends the connection at once. Bytes that the client has not read are lost."""
            self.connections.discard(self)
            self.transport.abort()

        def _expect_headers(self) -> None:
            """Starts the timer where headers are awaited, and stops it when they have come."""
            waits = self.conn.their_state is h11.IDLE
            if not waits and self._headers is not None:
                self._headers.cancel()
                self._headers = None
            elif waits and self._headers is None:
                self._headers = self.loop.call_later(bounds.body_seconds, self.transport.close)

        def _expect_reader(self) -> None:
            """Cuts off a client that reads no byte for a while, though there are some. Closing
            alone would wait for it."""
            if self._reader is None:
                self._look_for_reader(-1)

        def _look_for_reader(self, before: int) -> None:
            left = self.transport.get_write_buffer_size()
            self._reader = None
            if left == before:
                self.cut_off()
            elif left > 0:
                self._reader = self.loop.call_later(
                    bounds.idle_seconds, self._look_for_reader, left
                )

    return Protocol

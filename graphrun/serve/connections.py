"""Connections of the server: how long each may wait for its client, and which is closed first."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from fastapi.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from graphrun.serve.errors import Refused
from graphrun.serve.settings import Settings


def protocol_within(settings: Settings) -> type[H11Protocol]:
    """Return uvicorn's HTTP/1.1 protocol with timeouts. uvicorn has one, between requests.

    If more than ``settings.connections`` are open, the one that has waited longest for its client
    is cut off. If the server is working for all of them, the new one gets 503. uvicorn's own limit
    would count waiting connections too.
    """
    bounds = settings.bounds
    busy = Refused(
        503,
        f"all {settings.connections} connections of the server have requests at work: try again",
        "busy",
        retry_seconds=5,
    )
    refusal = JSONResponse(busy.body, busy.status, headers={**busy.headers, "Connection": "close"})

    class Protocol(H11Protocol):
        _wait_start = 0.0  # when the wait for the client began
        _headers: asyncio.TimerHandle | None = None
        _reader: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_start = self.loop.time()
            self._expect_headers()
            if len(self.connections) > settings.connections:
                peers = [
                    peer
                    for peer in self.connections
                    if isinstance(peer, Protocol) and peer is not self
                ]
                if idle_peers := [peer for peer in peers if peer.waits_for_client]:
                    min(idle_peers, key=lambda peer: peer._wait_start).cut_off()
                else:
                    self.app = refusal

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._expect_headers()

        def on_response_complete(self) -> None:
            self._wait_start = self.loop.time()
            super().on_response_complete()
            self._expect_headers()
            self._expect_reader()

        def pause_writing(self) -> None:
            self._wait_start = self.loop.time()
            super().pause_writing()
            self._expect_reader()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            for timer in (self._headers, self._reader):
                if timer is not None:
                    timer.cancel()

        @property
        def waits_for_client(self) -> bool:
            """Whether the server only waits for the client to send or to read."""
            sends = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
            return sends or self.flow.write_paused or self.transport.is_closing()

        def cut_off(self) -> None:
            """Close the connection at once. Bytes that the client has not read are lost."""
            self.connections.discard(self)
            self.transport.abort()

        def _expect_headers(self) -> None:
            """Run the timer for headers only while headers are awaited."""
            waits = self.conn.their_state is h11.IDLE
            if not waits and self._headers is not None:
                self._headers.cancel()
                self._headers = None
            elif waits and self._headers is None:
                self._headers = self.loop.call_later(bounds.body_seconds, self.transport.close)

        def _expect_reader(self) -> None:
            """Cut off a client that stops reading. Closing alone would wait for the client."""
            if self._reader is None:
                self._look_for_reader(-1)

        def _look_for_reader(self, previous_bytes: int) -> None:
            unsent_bytes = self.transport.get_write_buffer_size()
            self._reader = None
            if unsent_bytes == previous_bytes:
                self.cut_off()
            elif unsent_bytes > 0:
                self._reader = self.loop.call_later(
                    bounds.idle_seconds, self._look_for_reader, unsent_bytes
                )

    return Protocol

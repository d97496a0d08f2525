"""Runs the application on a port, until a signal: SIGTERM or SIGINT drains, a second one cancels what is left."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Generator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from graphrun.errors import InputError
from graphrun.serve.app import create_app
from graphrun.serve.service import Service
from graphrun.serve.settings import Settings

CONNECTIONS = 512  # at once; more are answered with 503


def serve(settings: Settings, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serves until a signal. ``say`` gets a line when the port is open. Raises InputError where it cannot be opened."""
    asyncio.run(_serve(settings, host, port, say))


async def _serve(settings: Settings, host: str, port: int, say: Callable[[str], None]) -> None:
    service = Service(settings)
    config = uvicorn.Config(
        create_app(service),
        host=host,
        port=port,
        http=_protocol(settings.bounds.body_seconds),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=5,
    )
    try:
        sockets = [config.bind_socket()]
    except SystemExit:  # uvicorn has logged the reason
        raise InputError(f"--port {port}: the port cannot be opened on {host}: choose another") from None
    server, signals = _Server(config), asyncio.Event()
    loop = asyncio.get_running_loop()
    seen = 0

    def stop() -> None:
        nonlocal seen
        seen += 1
        signals.set()
        if seen > 1:
            service.cancel_all()

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows
            loop.add_signal_handler(number, stop)
    service.start()
    running = asyncio.ensure_future(server.serve(sockets))
    port = sockets[0].getsockname()[1]
    say(f"serving {', '.join(service.graphs)} on http://{f'[{host}]' if ':' in host else host}:{port}")
    try:
        await asyncio.wait({running, asyncio.ensure_future(signals.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            say(f"stopping: requests may take {settings.drain_seconds:.0f} s more")
            await service.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(service.idle(), settings.drain_seconds + 10)
            server.should_exit = True
        await running
    finally:
        service.close()


class _Server(uvicorn.Server):
    """uvicorn's own handlers would close the port at once; here it answers 503 while requests are drained."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _protocol(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP/1.1, with the time for a request's headers bounded: it waits for them without end."""

    class Protocol(H11Protocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._late is not None:
                self._late.cancel()

        def _watch(self) -> None:
            """Starts the timer where headers are awaited, and stops it where they are there."""
            waits = self.conn.their_state is h11.IDLE
            if not waits and self._late is not None:
                self._late.cancel()
                self._late = None
            elif waits and self._late is None:
                self._late = self.loop.call_later(seconds, self.transport.close)

    return Protocol

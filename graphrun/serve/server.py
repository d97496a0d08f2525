"""Run the application on a port until a signal. The first SIGTERM or SIGINT drains the server; the
second cancels all requests."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import Callable, Generator

import uvicorn

from graphrun.errors import InputError
from graphrun.serve.app import create_app
from graphrun.serve.connections import protocol_within
from graphrun.serve.log import escape_log
from graphrun.serve.service import Service
from graphrun.serve.settings import Settings
from graphrun.systems import allow_open_files

FILES = 256  # open files besides two per connection


def serve(settings: Settings, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until a signal. ``say`` gets a line when the port is open. Raises InputError if it
    cannot be opened."""
    escape_log(as_json=settings.log_as_json)
    allow_open_files(FILES + 2 * settings.connections)
    asyncio.run(_serve(settings, host, port, say))


async def _serve(settings: Settings, host: str, port: int, say: Callable[[str], None]) -> None:
    service = Service(settings)
    server, listener = http_server(service, host, port)
    signals = asyncio.Event()
    loop = asyncio.get_running_loop()
    signal_count = 0

    def stop() -> None:
        nonlocal signal_count
        signal_count += 1
        signals.set()
        if signal_count > 1:
            service.cancel_all()

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows
            loop.add_signal_handler(number, stop)
    if hasattr(signal, "SIGHUP"):
        loop.add_signal_handler(signal.SIGHUP, service.reload)
    service.start()
    server_task = asyncio.ensure_future(server.serve([listener]))
    port = listener.getsockname()[1]
    say(
        f"serving {', '.join(service.graphs)} on "
        f"http://{f'[{host}]' if ':' in host else host}:{port}"
    )
    try:
        await asyncio.wait(
            {server_task, asyncio.ensure_future(signals.wait())},
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not server_task.done():
            say(f"stopping: requests may take {settings.drain_seconds:.0f} s more")
            await service.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(service.idle(), settings.drain_seconds + 10)
            server.should_exit = True
        await server_task
    finally:
        service.close()


def http_server(service: Service, host: str, port: int) -> tuple[uvicorn.Server, socket.socket]:
    """Return the HTTP side of ``service`` and its open port. Raises InputError if it cannot
    open."""
    config = uvicorn.Config(
        create_app(service, host),
        host=host,
        port=port,
        http=protocol_within(service.settings),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=math.ceil(service.settings.bounds.idle_seconds),
        timeout_graceful_shutdown=5,
    )
    try:
        return _Server(config), config.bind_socket()
    except SystemExit:  # uvicorn has logged the reason
        raise InputError(
            f"--host {host} --port {port} cannot be opened, see above: change one of them"
        ) from None


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers: those would close the port at once, while this
    server answers 503 until it is drained."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

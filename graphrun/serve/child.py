"""A child process that answers over a pipe and ends with the server, for whatever reason. Only the
server handles signals that a terminal or a service manager sends to all processes."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from graphrun.limits import raise_limits
from graphrun.notices import without_notices
from graphrun.serve.log import escape_log
from graphrun.serve.settings import Settings

STOP_SECONDS = 3.0
Message = tuple[str, dict[str, Any]]
Main = Callable[[Connection, Settings], None]


class Child:
    """A process that runs ``main(connection, settings)``.

    The event loop calls ``heard(kind, **content)`` with each message, and ``died()`` once if the
    process ends without `stop`.
    """

    def __init__(
        self, main: Main, settings: Settings, heard: Callable[..., None], died: Callable[[], None]
    ) -> None:
        # a process with CUDA or threads cannot be forked
        context = multiprocessing.get_context("spawn")
        self._loop, self._heard, self._died, self._stopped = (
            asyncio.get_running_loop(),
            heard,
            died,
            False,
        )
        self._connection, other = context.Pipe()
        self.process = context.Process(
            target=_begin, args=(main, other, settings), daemon=True, name=main.__name__
        )
        self.process.start()
        other.close()  # otherwise the pipe stays open when the process ends
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, kind: str, **content: Any) -> None:
        """Send a message. It is lost if the process has ended; ``died`` is called then."""
        with contextlib.suppress(OSError):
            self._connection.send((kind, content))

    def stop(self) -> None:
        """End the process; kill it after `STOP_SECONDS`."""
        self._stopped = True
        self.send("stop")
        self.process.join(STOP_SECONDS)
        self.process.kill()
        self.process.join()

    def _listen(self) -> None:
        # RuntimeError: the event loop is closed
        with contextlib.suppress(EOFError, OSError, RuntimeError):
            while True:
                kind, content = self._connection.recv()
                self._loop.call_soon_threadsafe(self._notify, kind, content)
        self.process.join()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)

    def _notify(self, kind: str, content: dict[str, Any]) -> None:
        if not self._stopped:
            self._heard(kind, **content)

    def _end(self) -> None:
        self._connection.close()
        if not self._stopped:
            self._died()


def leave_signals() -> None:
    """Ignore the signals that end a server: the server process handles them. Repeat after importing
    libraries that install handlers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _end_with_server() -> None:
    """End this process once the server has ended, even if it was killed while this process
    computes: the next server needs the device."""
    server = multiprocessing.parent_process()
    assert server is not None
    server.join()
    os._exit(1)


def _begin(main: Main, connection: Connection, settings: Settings) -> None:
    escape_log(as_json=settings.log_as_json)
    leave_signals()
    threading.Thread(target=_end_with_server, daemon=True).start()
    raise_limits(**settings.limits)
    # EOFError, BrokenPipeError: the server has ended
    with without_notices(), contextlib.suppress(EOFError, BrokenPipeError):
        main(connection, settings)

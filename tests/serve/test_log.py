"""The log of a server: texts of clients are in it as escapes."""

from __future__ import annotations

import asyncio
import logging
import sys
import warnings
from multiprocessing.connection import Connection
from typing import Any

import pytest

from graphrun.serve import server
from graphrun.serve.child import Child

HOSTILE = "\x1b]0;owned\x07 \u202etxt\u2069 \x9b31m\n2026-01-01T00:00:00Z answer forged"


def tells(connection: Connection, settings: Any) -> None:
    """The main function of a process that writes a client's text in each way there is, and ends
    with an error that has it."""
    print("print", HOSTILE)
    print("stderr", HOSTILE, file=sys.stderr)
    logging.getLogger("a library").warning("logging %s", HOSTILE)
    warnings.warn(f"warning {HOSTILE}", stacklevel=1)
    raise RuntimeError(f"error {HOSTILE}")


class Few:
    """Settings without limits of their own."""

    limits: dict[str, int] = {}
    connections = 512
    log_as_json = False


async def ended() -> None:
    """Starts a process of a server, and waits until it has ended."""
    died = asyncio.Event()
    Child(tells, Few(), lambda **_: None, died.set)  # type: ignore[arg-type]
    await asyncio.wait_for(died.wait(), 300)


@pytest.mark.long
def test_whatever_a_process_of_the_server_writes_has_escapes(capfd: Any) -> None:
    asyncio.run(ended())
    output = "".join(capfd.readouterr())
    for way in ("print", "stderr", "logging", "warning", "RuntimeError: error"):
        assert f"{way} \\x1b]0;owned\\x07 \\u202etxt" in output
    assert not {"\x1b", "\x07", "\u202e", "\u2069", "\x9b"} & set(output)
    assert not [line for line in output.splitlines() if line.startswith("2026-")], (
        "an entry that nobody wrote"
    )


def test_so_has_what_the_server_itself_writes(capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(*_: Any) -> None:
        logging.getLogger("uvicorn.error").addHandler(handler := logging.StreamHandler())
        logging.getLogger("uvicorn.error").error("%s", HOSTILE)
        logging.getLogger("uvicorn.error").removeHandler(handler)

    monkeypatch.setattr(server, "_serve", main)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))  # to have it again
    server.serve(Few(), "127.0.0.1", 0, print)  # type: ignore[arg-type]
    output = "".join(capfd.readouterr())
    assert "\\x1b]0;owned" in output
    assert not {"\x1b", "\x07", "\u202e", "\u2069", "\x9b"} & set(output)
    assert "31m\\n2026-01-01T00:00:00Z answer forged" in output

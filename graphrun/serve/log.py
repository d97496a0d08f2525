"""The log of a server: everything that its processes write to stdout and stderr. It can contain
texts of clients, for example in messages of libraries."""

from __future__ import annotations

import datetime
import io
import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import TextIO

from graphrun.reading import printable

# a line feed within a text; tracebacks indent their lines, and any other new line would look like a
# log entry of its own
_FORGED = re.compile(r"\n(?=[^\s])")
_PLAIN = re.compile(r'[^\s"=]+')  # a value that needs no quotes


def escape_log(*, as_json: bool = False) -> None:
    """Escape control characters in this process's stdout and stderr from now on. ``as_json``: write
    the entries of `log` as JSON, one object a line.

    Line feeds within a text are escaped too, unless the next line is indented. Call this before
    importing libraries whose log handlers store the stream.
    """
    sys.stdout, sys.stderr = _Escaped(sys.stdout), _Escaped(sys.stderr)
    if as_json:
        _FORM.append(_json)


def log(event: str, **values: object) -> None:
    """Write an entry of the log: a time, what happened, and its values. Empty values are left out.

    2026-11-27T13:05:11Z planned graph=flux-dev height=1024 answer="fits: yes"
    """
    time_text = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    entries = {name: value for name, value in values.items() if value not in ("", None)}
    sys.stderr.write(_FORM[-1](time_text, event, entries) + "\n")
    sys.stderr.flush()


def note(line: str) -> None:
    """Write a message to the log."""
    log("note", message=line)


def _text(time_text: str, event: str, values: Mapping[str, object]) -> str:
    texts = {name: str(value) for name, value in values.items()}
    pairs = (
        f"{name}={text if _PLAIN.fullmatch(text) else json.dumps(text)}"
        for name, text in texts.items()
    )
    return " ".join((time_text, event, *pairs))


def _json(time_text: str, event: str, values: Mapping[str, object]) -> str:
    return json.dumps({"time": time_text, "event": event, **values}, default=str)


_FORM: list[Callable[[str, str, Mapping[str, object]], str]] = [_text]


class _Escaped(io.TextIOBase):
    """A text stream to ``stream`` that is no terminal: libraries write no bars or colours."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(printable(_FORGED.sub("\\\\n", text)))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

"""The log of a server: everything that its processes write to stdout and stderr. It can contain
texts of clients, for example in messages of libraries."""

from __future__ import annotations

import io
import re
import sys
from typing import TextIO

from graphrun.reading import printable

# a line feed within a text; tracebacks indent their lines, and any other new line would look like a
# log entry of its own
_FORGED = re.compile(r"\n(?=[^\s])")


def escape_log() -> None:
    """Escape control characters in this process's stdout and stderr from now on.

    Line feeds within a text are escaped too, unless the next line is indented. Call this before
    importing libraries whose log handlers store the stream.
    """
    sys.stdout, sys.stderr = _Escaped(sys.stdout), _Escaped(sys.stderr)


def note(line: str) -> None:
    """Write an entry of the log."""
    sys.stderr.write(f"graphrun: {line}\n")
    sys.stderr.flush()


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

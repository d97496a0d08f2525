"""The log of a server: what its processes write, whoever writes it. Texts of clients are in it, in
messages of libraries too."""

from __future__ import annotations

import io
import re
import sys
from typing import TextIO

from graphrun.reading import printable

# Within a text. Lines of a traceback are indented; any other line would begin an entry of the log
# that nobody wrote.
_FORGED = re.compile(r"\n(?=[^\s])")


def escape_log() -> None:
    """From now on this process's stdout and stderr have escapes in place of characters that a
    terminal acts on, and of line feeds within a text but before indented lines.

    Call it before libraries are imported, whose handlers keep the stream that they find.
    """
    sys.stdout, sys.stderr = _Escaped(sys.stdout), _Escaped(sys.stderr)


def note(line: str) -> None:
    """Writes an entry of the log."""
    sys.stderr.write(f"graphrun: {line}\n")
    sys.stderr.flush()


class _Escaped(io.TextIOBase):
    """A text stream that writes to ``stream``. It is no terminal: nobody draws bars or colours into
    a log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(printable(_FORGED.sub("\\\\n", text)))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

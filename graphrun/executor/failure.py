"""What becomes of an exception that ended a run: a typed error that holds no device memory.

An exception keeps its traceback, a traceback its frames, and a frame its locals and its function's closure: activations of the
block that failed would stay on the device for as long as somebody holds the error (clearing frames does not empty closures).
Tracebacks are therefore let go of. What they said is kept as text where it matters, in errors that nobody foresaw.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from graphrun.errors import GraphrunError
from graphrun.executor.device import Device


def settled(error: BaseException, device: Device, where: str) -> BaseException:
    """The error to raise in place of ``error``, which happened ``where``: typed if it says something of the device, else itself.

    Neither it nor any exception it came from has a traceback any more; an error of other code has it as a note.
    """
    chain = list(_chain(error))
    told = _told(chain, device, where) if isinstance(error, Exception) else None
    if told is None:
        lines = "".join(traceback.format_tb(error.__traceback__))
        error.add_note(f"in {where}; raised at\n{lines.rstrip()}")
    for link in chain:
        link.__traceback__ = None
    return told or error


def _told(chain: list[BaseException], device: Device, where: str) -> GraphrunError | None:
    for link in chain:
        if isinstance(link, GraphrunError):
            return link
        if (told := device.explain(link)) is not None:
            return type(told)(f"{where}: {told}")
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and every exception it came from, each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        inside = link.exceptions if isinstance(link, BaseExceptionGroup) else ()
        waiting += [other for other in (link.__cause__, link.__context__, *inside) if other is not None]

"""What becomes of an exception that ended a run: a typed error that holds no device memory.

An exception keeps its traceback, a traceback its frames, and a frame its locals: activations of the block that failed would stay on
the device for as long as somebody holds the error. Frames are cleared, and errors of the device are told again in new ones.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from graphrun.errors import GraphrunError
from graphrun.executor.device import Device


def settled(error: BaseException, device: Device, where: str) -> BaseException:
    """The error to raise in place of ``error``, which happened ``where``: typed if it says something of the device, else itself.

    Its frames hold no locals any more. Frames that still run (the caller's own) are left alone.
    """
    chain = list(_chain(error))
    for link in chain:
        traceback.clear_frames(link.__traceback__)
    if not isinstance(error, Exception) or isinstance(error, GraphrunError):
        return error
    for link in chain:
        if isinstance(link, GraphrunError):
            return link
        if (told := device.explain(link)) is not None:
            return type(told)(f"{where}: {told}")
    return error


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

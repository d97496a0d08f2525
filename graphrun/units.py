"""Parse and format sizes and times.

Bytes are `int`, seconds are `float`. Sizes in text are binary: ``8G``, ``8 GB`` and ``8GiB`` all
mean 8 x 2**30 bytes, because GPUs are sold and reported that way.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence

from graphrun.errors import InputError

KIB, MIB, GIB = 2**10, 2**20, 2**30
# on x86-64 and on most arm64 systems
PAGE_BYTES = 4 * KIB

_NUMBER = re.compile(r"\s*[0-9]+(?:\.[0-9]+)?\s*")
_SIZE = re.compile(r"\s*(-?[0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?b?)\s*", re.IGNORECASE)
_MAX_BYTES = 2.0**62  # bytes; solvers compute with 64 bits
_SCALE = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 2**40}


def parse_size(
    text: str | float, *, whole_bytes: int | None = None, name: str = "size", minimum: int = 1
) -> int:
    """Return the bytes in ``text``: ``"8G"``, ``"7.5 GiB"``, ``"900M"``, ``"1048576"`` or 8e9.

    ``"50%"`` is a share of ``whole_bytes``. ``name``: what error messages call the value. Raises
    InputError if the text is not a size, is less than ``minimum``, is a percentage while
    ``whole_bytes`` is None, or is a number below 1024 without a unit, which was meant to have one.
    """
    if _NUMBER.fullmatch(str(text)) and 0 < float(text) < KIB:
        raise InputError(f"{name}: {text!r} has no unit: did you mean {float(text):g}G?")
    if isinstance(text, (int, float)) and not isinstance(text, bool) and math.isfinite(text):
        nbytes = int(text)
    elif percent := re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", str(text)):
        if whole_bytes is None:
            raise InputError(
                f"{name}: {text!r} is a percentage of a device's memory, but no device is known "
                "here; give bytes, such as 8G"
            )
        nbytes = int(min(whole_bytes * float(percent[1]) / 100, _MAX_BYTES))
    elif match := _SIZE.fullmatch(str(text)):
        nbytes = int(min(float(match[1]) * _SCALE[match[2].lower()], _MAX_BYTES))
    else:
        raise InputError(
            f"{name}: {text!r} is not a size; write it as 8G, 7.5GiB, 900M or a number of bytes"
        )
    if nbytes < minimum:
        raise InputError(f"{name}: {text!r} is not a {'positive ' if minimum else ''}size")
    return nbytes


def parse_seconds(text: str, *, name: str = "time") -> float:
    """Return the seconds in ``text``: ``"60s"``, ``"1.5 min"``, ``"2h"``, ``"500ms"`` or ``"60"``.

    Raises InputError that names ``name``.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|min|h|)\s*", text)
    if match is None:
        raise InputError(f"{name}: {text!r} is not a time; write it as 60s, 2min or 500ms")
    return float(match[1]) * {"ms": 1e-3, "s": 1, "": 1, "m": 60, "min": 60, "h": 3600}[match[2]]


def typed_size(nbytes: int, *, round_down: bool = False) -> str:
    """Return ``nbytes`` as typed, rounded up to two decimals: ``3.4G``, ``2.51M``, ``12B``."""
    for unit, scale in (("G", GIB), ("M", MIB), ("K", KIB)):
        if nbytes >= scale:
            hundredths = nbytes * 100 // scale if round_down else -(-nbytes * 100 // scale)
            return f"{hundredths / 100:.2f}".rstrip("0").rstrip(".") + unit
    return f"{nbytes}B"


def gib(nbytes: float) -> str:
    """Return ``nbytes`` in GiB with two decimals and no unit, for columns of the plan screen."""
    return f"{nbytes / GIB:.2f}"


def show_size(nbytes: float) -> str:
    """Return ``nbytes`` in the largest of GiB, MiB, KiB and B that gives at least 1."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} B"


def show_seconds(seconds: float) -> str:
    """Return ``seconds`` with a readable unit: ``24.1 s``, ``350 ms``, ``12 us``."""
    if seconds >= 0.9995 or seconds == 0:  # smaller values get at most three digits
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} us"


def roughly(seconds: float) -> str:
    """Return ``seconds`` for a sentence: ``40 ms``, ``3.4 s``, ``8 min 46 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    if whole >= 120:
        return f"{whole // 60} min {whole % 60} s"
    if seconds >= 9.95:
        return f"{whole} s"
    return (
        f"{seconds:.1f} s"
        if seconds >= 0.995
        else f"{1e3 * seconds:.0f} ms"
        if seconds >= 1e-3
        else "under 1 ms"
    )


def show_range(seconds: float, bounds: Sequence[float], reason: str) -> str:
    """Return ``seconds`` with its probable range ``bounds`` and the ``reason`` for its width:
    ``24.1 s (19.3 s to 30.1 s, host copies vary)``."""
    low, high = bounds
    return (
        show_seconds(seconds)
        if low == high
        else f"{show_seconds(seconds)} ({show_seconds(low)} to {show_seconds(high)}, {reason})"
    )


def round_up(nbytes: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is at least ``nbytes``."""
    return -(-nbytes // step) * step


def html_table(title: str, rows: Iterable[Iterable[str]]) -> str:
    """Return ``rows``, the head first, as an HTML table below the line ``title``."""
    head, *body = ([html.escape(cell) for cell in row] for row in rows)
    lines = [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in body]
    return (
        f"<p>{html.escape(title)}</p><table>"
        f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>{''.join(lines)}</table>"
    )

"""Parses and formats sizes and times.

Bytes are `int`, seconds are `float`. Sizes in text are binary: ``8G``, ``8 GB`` and ``8GiB`` all mean 8 x 2**30 bytes, because
GPUs are sold and reported that way (an "8 GB" card has 8 x 2**30 bytes).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from graphrun.errors import InputError

KIB, MIB, GIB = 2**10, 2**20, 2**30

_SIZE = re.compile(r"\s*(-?[0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?b?)\s*", re.IGNORECASE)
_SCALE = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 2**40}


def parse_size(text: str | int, *, whole_bytes: int | None = None, name: str = "size", least: int = 1) -> int:
    """Number of bytes in ``text``: ``"8G"``, ``"7.5 GiB"``, ``"900M"``, ``"1048576"``, or ``"50%"`` of ``whole_bytes``.

    ``name`` is what error messages call the value. Raises InputError when the text is not a size, is less than ``least``, or is a
    percentage while ``whole_bytes`` is None.
    """
    if isinstance(text, int):
        nbytes = text
    elif percent := re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", text):
        if whole_bytes is None:
            raise InputError(
                f"{name}: {text!r} is a percentage of a device's memory, but no device is known here; give bytes, such as 8G"
            )
        nbytes = int(whole_bytes * float(percent[1]) / 100)
    elif match := _SIZE.fullmatch(text):
        nbytes = int(float(match[1]) * _SCALE[match[2].lower()])
    else:
        raise InputError(f"{name}: {text!r} is not a size; write it as 8G, 7.5GiB, 900M or a number of bytes")
    if nbytes < least:
        raise InputError(f"{name}: {text!r} is not a {'positive ' if least else ''}size")
    return nbytes


def gib(nbytes: float) -> str:
    """``nbytes`` in GiB with two decimals and no unit, as in the columns of the plan screen."""
    return f"{nbytes / GIB:.2f}"


def show_size(nbytes: float) -> str:
    """``nbytes`` with the largest unit (GiB, MiB, KiB, B) in which the value is at least 1."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} B"


def show_seconds(seconds: float) -> str:
    """``seconds`` with a readable unit: ``24.1 s``, ``350 ms``, ``12 us``."""
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def show_range(seconds: float, within: Sequence[float]) -> str:
    """``seconds``, and the range ``within`` which they probably are: ``24.1 s (19.3 s to 30.1 s)``."""
    low, high = within
    return show_seconds(seconds) if low == high else f"{show_seconds(seconds)} ({show_seconds(low)} to {show_seconds(high)})"


def round_up(nbytes: int, step: int) -> int:
    """The smallest multiple of ``step`` that is at least ``nbytes``."""
    return -(-nbytes // step) * step

"""Read files that may be malformed or hostile. Errors are of the class ``kind`` and name the file.

Only regular files of limited size, and JSON of limited nesting and digits, are read. Everything
that graphrun parses itself is read here. Files that a library parses (pictures, safetensors) are
opened here first, so that a named pipe or a device is refused and never waited for.
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from graphrun.errors import InputError
from graphrun.limits import LIMITS, require

if TYPE_CHECKING:
    from pydantic import TypeAdapter

ErrorClass = type[InputError]

_SURROGATE = re.compile("[\ud800-\udfff]")
# Characters that move the cursor, change colours or reorder text: C0 and C1 controls without tab
# and line feed, and Unicode's bidirectional formatting characters (UAX 9, table 4) and line
# separators.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


# opening a named pipe would wait for its writer; Windows has neither flag
_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: Path, kind: ErrorClass = InputError) -> io.BufferedReader:
    """Return the regular file ``path``, open for reading in binary."""
    try:
        handle = os.open(path, os.O_RDONLY | _NO_WAIT)
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            os.close(handle)
            raise kind(
                "cannot be read: "
                f"{'Is a directory' if stat.S_ISDIR(mode) else 'it is not a regular file'}",
                str(path),
            )
        return os.fdopen(handle, "rb")
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        absent = isinstance(error, FileNotFoundError)
        reason = (
            "no such file"
            if absent
            else f"cannot be read: {getattr(error, 'strerror', None) or error}"
        )
        raise kind(reason, str(path)) from None


def read_bytes(path: Path, kind: ErrorClass = InputError, limit: str = "text_bytes") -> bytes:
    """Return the content of ``path``, up to the limit called ``limit``."""
    with open_regular(path, kind) as file:
        try:
            data = file.read(getattr(LIMITS, limit) + 1)
            size = max(len(data), os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise kind(f"cannot be read: {error.strerror}", str(path)) from None
    require(limit, size, f"it has {size:,} bytes", str(path), kind)
    return data


def read_text(path: Path, kind: ErrorClass = InputError, limit: str = "text_bytes") -> str:
    """Return the UTF-8 text in ``path``, up to the limit called ``limit``."""
    try:
        return read_bytes(path, kind, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise kind(f"not a text file: byte {error.start} is not UTF-8", str(path)) from None


def safetensors_header(file: BinaryIO, limit_bytes: int) -> tuple[int, bytes]:
    """Return the length of a safetensors header, and its first ``limit_bytes``, JSON.

    Read here and not by the library, which gives no offsets of tensors (direct reads need them),
    gives no metadata of a file in memory, and maps the file: this process would end with SIGBUS if
    another one truncated it.
    """
    length = int.from_bytes(file.read(8), "little")
    return length, file.read(min(length, limit_bytes))


def read_json(path: Path, kind: ErrorClass = InputError, *, infinite: bool = False) -> Any:
    """Return the JSON value in ``path``; see `parse_json`."""
    text = read_text(path, kind)
    try:
        return parse_json(text, infinite=infinite)
    except json.JSONDecodeError as error:
        raise kind(f"is not JSON: {error.msg}", f"{path}:{error.lineno}") from None
    except ValueError as error:
        raise kind(f"is not JSON: {error}", str(path)) from None


@functools.cache
def adapter_of(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's adapter of ``kind``, which takes up to 0.1 s to make."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def validated(kind: Any, data: Any) -> Any:
    """Return ``data``, such as JSON, as a ``kind``. Raises pydantic's ValidationError."""
    return adapter_of(kind).validate_python(data)


def parse_json(text: str | bytes, *, infinite: bool = False) -> Any:
    """Return the JSON value in ``text``.

    Raises ValueError if it is not JSON, nests too deeply, or has an unusable number or text: too
    many digits, not finite, half of a surrogate pair. ``infinite``: accept infinities, which
    diffusers writes.
    """
    constant = (
        (lambda name: float(name) if name != "NaN" else _refuse_constant(name))
        if infinite
        else _refuse_constant
    )
    long_integer = f"an integer has more than {LIMITS.digits} digits"
    try:
        data = json.loads(text, parse_constant=constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        # Python itself refuses to read more than 4,300 digits
        raise ValueError(long_integer) if "max_str_digits" in str(error) else error from None
    checked = {list, dict, float, int, str}
    if isinstance(text, str) and text.isascii() and "\\u" not in text:
        checked.remove(str)  # without escapes, ASCII has no half of a surrogate pair
    limit = 10**LIMITS.digits
    level, depth = [data], 0
    while level:
        depth += 1
        if depth > LIMITS.nesting:
            raise ValueError(f"nested more than {LIMITS.nesting} deep")
        next_level: list[Any] = []
        for item in level if checked.intersection(map(type, level)) else ():
            kind = type(item)
            if kind is int:
                if not -limit < item < limit:
                    raise ValueError(long_integer)
            elif kind is list:
                next_level += item
            elif kind is dict:
                next_level += item
                next_level += item.values()
            elif kind is str:
                refuse_surrogates(item)
            elif kind is float and item - item != 0 and not infinite:
                raise ValueError("a number is too large")
        level = next_level
    return data


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


class LibraryPanic(RuntimeError):
    """A Rust library (tokenizers, safetensors) panicked."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise LibraryPanic in place of pyo3's exception, which is not a subclass of Exception."""
    try:
        yield
    except BaseException as error:
        kind = type(error)
        if (kind.__module__, kind.__name__) != ("pyo3_runtime", "PanicException"):
            raise
        raise LibraryPanic(f"a Rust library panics (and reports that to stderr): {error}") from None


def refuse_surrogates(text: str) -> None:
    """Raise ValueError if ``text`` has half of a surrogate pair.

    It may come from an escape in a file, or from a byte of a command line.
    """
    if not text.isascii() and (match := _SURROGATE.search(text)):
        raise ValueError(
            f"character {match.start() + 1} is half of a surrogate pair or not UTF-8: {match[0]!r}"
        )


def is_url(source: str) -> bool:
    """Return whether ``source`` is a URL, such as ``s3://bucket/flux``."""
    return re.match(r"[a-z][a-z0-9+.-]*://", source) is not None


def path_inside(
    folder: Path, name: Any, problem: str, location: str = "", kind: ErrorClass = InputError
) -> Path:
    """Return ``folder``/``name`` for a file's ``name``. Raises ``kind`` if not below it."""
    parts = name.split("/") if isinstance(name, str) else [""]
    if "\0" in str(name) or any(part in ("", ".", "..") or len(part) > 255 for part in parts):
        raise kind(
            f"{problem} {str(name)[:100]!r}, which is not the name of a file below {folder}",
            location,
        )
    return folder.joinpath(*parts)


def shortened(text: str, max_characters: int = 1_000) -> str:
    """Return at most ``max_characters`` of ``text``, from its beginning and its end."""
    if len(text) <= max_characters:
        return text
    return (
        f"{text[: max_characters - max_characters // 4]} ... "
        f"{text[len(text) - max_characters // 4 :]}"
    )


def quoted(text: str) -> str:
    """Return ``text`` in quotes for an error, shortened to about a hundred characters."""
    return repr(shortened(text, 100))


def printable(text: str) -> str:
    """Return ``text`` with characters escaped that a terminal acts on, or that reorder text."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)

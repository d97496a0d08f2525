"""API keys: a file with a name and the SHA-256 of a key on each line, and optionally how many
pictures the key gets in a minute. Keys are long random texts, so one unsalted round of SHA-256
cannot be inverted. Passwords would need a slow hash.

    alice 9f86d081884c7d65...
    bob   60303ae22b998861... 30/min
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from graphrun.errors import InputError
from graphrun.reading import read_text
from graphrun.serve.errors import Refused

MAKE = (
    "python -c 'import hashlib, secrets; k = secrets.token_urlsafe(32); "
    "print(k, hashlib.sha256(k.encode()).hexdigest())'"
)
HINT = f"this prints a key and its SHA-256: {MAKE}"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The hexadecimal SHA-256 of a key, and its pictures per minute; 0: unlimited."""

    digest: str
    per_minute: int = 0


def read_keys(path: Path) -> dict[str, ApiKey]:
    """Return the keys by name. Raises InputError for a malformed line, with its number, and for a
    file without keys."""
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        rate = re.fullmatch(r"([1-9]\d{0,6})/min", words[2]) if len(words) == 3 else None
        if (
            len(words) not in (2, 3)
            or not re.fullmatch("[0-9a-f]{64}", words[1].lower())
            or (len(words) == 3 and rate is None)
        ):
            raise InputError(
                f"is not NAME SHA256 or NAME SHA256 30/min: {HINT}",
                f"{path}:{number}",
            )
        if words[0] in keys:
            raise InputError(
                f"{words[0]} has a key in an earlier line: remove one, or use another name",
                f"{path}:{number}",
            )
        keys[words[0]] = ApiKey(words[1].lower(), int(rate[1]) if rate is not None else 0)
    if not keys:
        raise InputError(f"has no keys; write a line NAME SHA256 for each: {HINT}", str(path))
    return keys


def owner_of(key: str, keys: Mapping[str, ApiKey]) -> str | None:
    """Return the name whose key is ``key``, or None, in a time that does not depend on the key."""
    digest, owner = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest(), None
    for name, candidate in keys.items():
        if hmac.compare_digest(digest, candidate.digest):
            owner = name
    return owner


class Rates:
    """How many pictures each key may still ask for: a minute's worth at once, then as they come
    back. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: dict[str, tuple[float, float]] = {}  # owner -> (pictures, at which second)

    def take(self, owner: str, per_minute: int, pictures: int) -> None:
        """Count ``pictures`` of ``owner``. Raises Refused (429) beyond ``per_minute``; 0:
        unlimited."""
        if not per_minute:
            return
        second = self._clock()
        spent, spent_second = self._spent.get(owner, (0.0, second))
        spent = max(0.0, spent - (second - spent_second) * per_minute / 60)
        if spent + pictures > per_minute:
            wait = (spent + pictures - per_minute) * 60 / per_minute
            never = pictures > per_minute
            text = f"the API key may ask for {per_minute} pictures a minute"
            text += f", and this request asks for {pictures}" if never else ": try again later"
            raise Refused(429, text, "rate_limited", retry_seconds=None if never else wait)
        self._spent[owner] = spent + pictures, second

    def give_back(self, owner: str, pictures: int) -> None:
        """Do not count ``pictures`` that were taken."""
        if owner in self._spent:
            spent, second = self._spent[owner]
            self._spent[owner] = max(0.0, spent - pictures), second

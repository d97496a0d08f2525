"""API keys: a file with a name and the SHA-256 of a key on each line. Keys are long random texts,
so one unsalted round of SHA-256 cannot be inverted. Passwords would need a slow hash."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path

from graphrun.errors import InputError
from graphrun.reading import read_text

MAKE = (
    "python -c 'import hashlib, secrets; k = secrets.token_urlsafe(32); "
    "print(k, hashlib.sha256(k.encode()).hexdigest())'"
)


def read_keys(path: Path) -> dict[str, str]:
    """Return the hexadecimal SHA-256 of each key, by name. Raises InputError for a malformed line,
    with its number, and for a file without keys."""
    digests: dict[str, str] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not re.fullmatch("[0-9a-f]{64}", words[1].lower()):
            raise InputError(
                f"is no name and SHA-256 of a key; this prints a key and its SHA-256: {MAKE}",
                f"{path}:{number}",
            )
        if words[0] in digests:
            raise InputError(f"{words[0]} has a key already", f"{path}:{number}")
        digests[words[0]] = words[1].lower()
    if not digests:
        raise InputError(f"has no keys; this prints a key and its SHA-256: {MAKE}", str(path))
    return digests


def owner_of(key: str, keys: Mapping[str, str]) -> str | None:
    """Return the name whose key is ``key``, or None, in a time that does not depend on the key."""
    digest, owner = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest(), None
    for name, candidate in keys.items():
        if hmac.compare_digest(digest, candidate):
            owner = name
    return owner

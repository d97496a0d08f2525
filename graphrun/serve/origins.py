"""Which web pages may use the server, and by which names browsers may call it.

A browser sends forms of any page to any server; the header ``Origin`` names the page. An attacker
can point the name of a page to this machine (DNS rebinding). The browser then sends requests for
the page's own server here, with the page's name as ``Host``.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from graphrun.errors import InputError
from graphrun.serve.errors import Refused
from graphrun.serve.log import note

NOTED = 20  # distinct refusals that are logged
_NAME = r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*"
_HOST = re.compile(rf"(?:({_NAME})|\[([0-9a-f:.]+)\])(?::\d{{1,5}})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@\\'\"]+")


class Guarded:
    """ASGI middleware that answers 403 to pages of other ``origins``, calls by other ``names``.

    A request without ``Origin`` passes: no page sent it. The server's own pages pass: their origin
    equals ``Host``.
    """

    def __init__(self, app: ASGIApp, names: ServerNames, origins: Collection[str]) -> None:
        self._app, self._names, self._origins = app, names, origins
        self._noted = set[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refusal(dict(scope["headers"]))) is not None:
            if len(self._noted) < NOTED and error.message not in self._noted:
                self._noted.add(error.message)
                note(f"refused: {error.message}")
            await JSONResponse(error.body, error.status)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, headers: dict[bytes, bytes]) -> Refused | None:
        host, origin = (
            headers[name].decode("latin-1") if name in headers else None
            for name in (b"host", b"origin")
        )
        if host is not None and not self._names.include(host):
            name = _name_in(host)
            suggestion = f": if it should be, start it with --allow-host {name}" if name else ""
            return Refused(
                403, f"this server is not called {host[:200]!r}{suggestion}", "host_refused"
            )
        if origin is None or self._allows(origin.lower(), (host or "").lower()):
            return None
        text = (
            "a page without an origin may not use this server: serve the page over HTTP, and name "
            "its origin by --allow-origin"
        )
        if _ORIGIN.fullmatch(origin.lower()):
            excerpt = origin[:200]
            text = (
                f"pages of {excerpt} may not use this server: if they should, start it with "
                f"--allow-origin {excerpt}"
            )
        return Refused(403, text, "origin_refused")

    def _allows(self, origin: str, host: str) -> bool:
        scheme, _, address = origin.partition("://")
        is_own_page = scheme in ("http", "https") and address == host
        return is_own_page or origin in self._origins or "*" in self._origins


class ServerNames:
    """Names and addresses of a server that listens on ``bound``.

    These are ``bound``, the loopback names, the name of the machine (also with ``.local``), and
    ``extra_names``: names, ``*.example.com``, or ``*`` for any. A server on all interfaces accepts
    any address, because nobody can redirect an address.
    """

    def __init__(self, bound: str, extra_names: Collection[str]) -> None:
        machine = socket.gethostname().lower()
        first = machine.partition(".")[0]
        names = [
            "localhost",
            "*.localhost",
            machine,
            first,
            f"{first}.local",
            bound.lower(),
            *extra_names,
        ]
        self._names = {_address(name) or name for name in names}
        self._allows_any = "*" in extra_names
        address = _address(bound)
        self._addresses = address is not None and address.is_unspecified

    def include(self, host: str) -> bool:
        if (name := _name_in(host)) is None:
            return False
        if (address := _address(name)) is not None:
            return (
                self._allows_any or self._addresses or address.is_loopback or address in self._names
            )
        parents = (f"*{name[position:]}" for position, letter in enumerate(name) if letter == ".")
        return self._allows_any or name in self._names or not self._names.isdisjoint(parents)


def host_of(value: str) -> str:
    """Check and return a value of ``--allow-host``. Raises InputError."""
    name = value.lower()
    if name != "*" and _address(name) is None and not re.fullmatch(rf"(?:\*\.)?{_NAME}", name):
        text = (
            "type the name alone, without scheme and port, such as images.example.com or "
            "*.example.com"
        )
        raise InputError(f"--allow-host {value}: {text}")
    return name


def origin_of(value: str) -> str:
    """Check and return a value of ``--allow-origin``. Raises InputError."""
    origin = value.lower()
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        scheme, _, address = origin.rpartition("://")
        example = f"{scheme or 'https'}://{address.partition('/')[0]}"
        raise InputError(
            f"--allow-origin {value}: type scheme and name, with the port where the page's address "
            f"has one, such as "
            f"{example if _ORIGIN.fullmatch(example) and origin != 'null' else 'https://images.example.com'}"
        )
    return re.sub(r"^(http://.*):80$|^(https://.*):443$", r"\1\2", origin)  # as browsers send it


def _name_in(host: str) -> str | None:
    """Return the name or address in a ``Host`` header, without its port; None if malformed."""
    match = _HOST.fullmatch(host.lower())
    return match and (match[1] or match[2])


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None

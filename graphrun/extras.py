"""The command that installs optional dependencies of graphrun (``serve``, ``cluster``)."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path

_PACKAGE = Path(__file__).parent


def install_command(extra: str = "") -> str:
    """Return the command for the optional dependencies ``extra``, or for graphrun alone.

    It is ``pip install 'graphrun[serve]'``; in a checkout ``pip install -e '.[serve]'``, elsewhere
    with the checkout's or the wheel's path in place of the dot.
    """
    checkout = _PACKAGE.parent
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e {_quoted(checkout, extra)}"
    return f"pip install {_quoted(_installed_from() or 'graphrun', extra)}"


def _quoted(source: Path | str, extra: str) -> str:
    place = "." if source == Path.cwd() else str(source)
    return shlex.quote(f"{place}[{extra}]" if extra else place)


def _installed_from() -> Path | None:
    """Return the folder or wheel that graphrun was installed from; None if gone, or an index."""
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    # direct_url.json (PEP 610) may be absent or malformed
    with suppress(PackageNotFoundError, ValueError, AttributeError, OSError):
        read_record = distribution("graphrun").read_text
        url = json.loads(read_record("direct_url.json") or "{}").get("url", "")
        path = Path(url2pathname(urlsplit(url).path))
        if url.startswith("file:") and path.exists():
            return path
    return None

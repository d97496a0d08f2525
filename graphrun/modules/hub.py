"""Repositories on the Hugging Face hub: their files, access to them, and their download.

Every failure of huggingface_hub's client becomes a GraphError that says what to do. The client
checks the size of what it downloads; `snapshot` also checks the SHA-256, by which the hub's cache
names large files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphrun.errors import GraphError, GraphrunError

# (activity such as "downloading" or "checking", bytes done, bytes in all)
DownloadCallback = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at a commit: bytes of its files by path, and its licence ("" if not stated)."""

    commit: str
    licence: str
    sizes: dict[str, int]


def look(repository: str, revision: str | None, file_line: str = "") -> Listing:
    """Return the listing of ``repository``.

    Takes one request, for a gated repository another to learn if this user may read it. Raises
    GraphError at ``file_line`` for a repository or revision that does not exist or may not be read,
    and without a network.
    """
    from huggingface_hub import HfApi

    with explained(repository, repository, revision, file_line):
        api = HfApi()
        info = api.model_info(repository, revision=revision, files_metadata=True)
        if info.gated:
            api.auth_check(repository)
    card: Any = info.card_data or {}
    licence = card.get("license_name") or card.get("license") or ""
    return Listing(
        info.sha or "",
        str(licence),
        {file.rfilename: file.size or 0 for file in info.siblings or ()},
    )


def snapshot(
    repository: str,
    revision: str | None,
    allow: Sequence[str],
    ignore: Sequence[str],
    *,
    subject: str = "",
    file_line: str = "",
    progress: DownloadCallback | None = None,
) -> Path:
    """Return the folder in the hub's cache with files of ``repository``, downloading missing ones.

    The files match ``allow`` and not ``ignore``. ``subject``: what errors name; "": the repository.
    ``progress``: replaces the client's own progress bars. Raises GraphError at ``file_line``;
    complete files stay, and the next call continues with the others.
    """
    from huggingface_hub import constants, snapshot_download

    blobs = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "blobs"
    existing_names = set(_names(blobs))
    bar: Any = {} if progress is None else {"tqdm_class": _bar(progress)}
    with explained(subject or repository, repository, revision, file_line):
        try:
            root = snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(allow),
                ignore_patterns=list(ignore),
                **bar,
            )
        finally:
            _check(
                [blobs / name for name in _names(blobs) if name not in existing_names],
                subject or repository,
                file_line,
                progress,
            )
    return Path(root)


def cached(repository: str, commit: str, file: str) -> bool:
    """Return whether the hub's cache has ``file`` of ``repository`` at ``commit``."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repository, file, revision=commit), str)


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _check(
    blobs: Sequence[Path], subject: str, file_line: str, progress: DownloadCallback | None
) -> None:
    """Delete ``blobs`` whose content does not match their name. Raises GraphError for these. Small
    files are named after a hash of git's own, and are not checked."""
    sizes = {blob: blob.stat().st_size for blob in blobs if len(blob.name) == 64}
    checked_bytes, wrong = 0, dict[str, str]()
    for blob, size in sizes.items():
        if progress is not None:
            progress("checking", checked_bytes, sum(sizes.values()))
        with blob.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != blob.name:
            blob.unlink()
            wrong[blob.name] = digest
        checked_bytes += size
    for expected, digest in wrong.items():
        text = (
            f"{len(wrong)} files of {subject} are not what the hub says, and are deleted: SHA-256 "
            f"is {digest} instead of {expected}"
        )
        raise GraphError(f"{text}; run the command again to download them again", file_line)


def _bar(progress: DownloadCallback) -> type[Any]:
    """Return a class with the part of tqdm's interface that `snapshot_download` uses. Of its three
    bars, only the one that counts bytes written reports progress."""

    class Bar:
        format_dict: Mapping[str, float] = {}

        def __init__(self, *_: object, desc: str = "", total: int | None = 0, **__: object) -> None:
            self.n, self.total, self._counts = 0, total or 0, desc.startswith("Reconstructing")

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, count: float | None = 1) -> None:
            self.n += int(count or 0)
            self.refresh()

        def refresh(self, *_: object, **__: object) -> None:
            if self._counts and self.total:
                progress("downloading", self.n, self.total)

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    return Bar


@contextmanager
def explained(
    subject: str, repository: str, revision: str | None, file_line: str = ""
) -> Iterator[None]:
    """Turn every exception of the hub's client into a GraphError that says what to do."""
    try:
        yield
    except GraphrunError:
        raise
    except Exception as error:
        raise GraphError(
            f"cannot get {subject} from the hub: {_why(error, repository, revision)}", file_line
        ) from error


def is_unreachable(error: BaseException | None) -> bool:
    """Return whether ``error`` of the hub's client says that no hub answers, or that none may be
    asked (HF_HUB_OFFLINE)."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    chain = _causes(error) if isinstance(error, Exception) else []
    if any(isinstance(link, OfflineModeIsEnabled) for link in chain):
        return True
    return bool(chain) and _status(chain) is None and not isinstance(error, ValueError)


def _causes(error: Exception) -> list[Exception]:
    """Return ``error`` and its causes."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and isinstance(cause, Exception):
        chain.append(cause)
    return chain


def _status(chain: Sequence[Exception]) -> int | None:
    """Return the first HTTP status in a chain of errors."""
    statuses = (getattr(getattr(link, "response", None), "status_code", None) for link in chain)
    return next(filter(None, statuses), None)


def _why(error: Exception, repository: str, revision: str | None) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    chain = _causes(error)
    page, login = f"{constants.ENDPOINT}/{repository}", "hf auth login"
    status = _status(chain)
    message = next(
        filter(None, (" ".join(str(link).split()) for link in reversed(chain))),
        type(error).__name__,
    )[:200].rstrip(".")
    if any(isinstance(link, OfflineModeIsEnabled) for link in chain):
        return (
            "HF_HUB_OFFLINE is set, and the hub's cache does not have it; unset it, or give a "
            "folder: none is here by this name"
        )
    if isinstance(error, GatedRepoError) and status == 403:
        return (
            f"it is gated, and the account in use has no access; ask for it on {page}, or take "
            f"another account: {login}"
        )
    if isinstance(error, GatedRepoError):
        return f"it is gated; accept its licence on {page}, then log in: {login}"
    if isinstance(error, RevisionNotFoundError):
        return f"it has no revision {revision}; {page}/commits has its commits"
    if isinstance(error, RepositoryNotFoundError):
        return (
            "there is no such repository, or it is private, and no such folder here; check the "
            f"name, or log in: {login}"
        )
    if status in (401, 403):
        tokens = f"{constants.ENDPOINT}/settings/tokens"
        return (
            f"it refused the token in use ({status}); make one that may read it on {tokens}, "
            f"then: {login}"
        )
    if status is None and not isinstance(error, ValueError):
        return (
            f"{message}; the same command continues with what is missing; without a network, "
            "give a folder"
        )
    return message

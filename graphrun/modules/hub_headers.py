"""Stand-ins for a hub repository: its small files, and of its weight files the headers.

    owner/name at a commit                          folder on disk
    transformer/config.json       --download----->  a link to the hub's cache
    transformer/x.safetensors     --byte ranges-->  a sparse file of the same size: the header
    transformer/x.gguf              the same        the same

A plan needs names, types and shapes of tensors, which are in the headers. bitsandbytes stores the
settings of each nf4 weight beside it, in a state that differs in the shape only. Of a file with
such states one is fetched, and stands for the others without its shape, which the configuration
has. Stand-ins are for planning: a run would read zeros. They are deleted when the process ends.

huggingface_hub's `parse_safetensors_file_metadata` is not used: its result has no length of the
header, and it reads no GGUF.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from graphrun.errors import GraphError, InputError
from graphrun.limits import LIMITS
from graphrun.modules import hub
from graphrun.modules.bitsandbytes_files import is_state, without_shape
from graphrun.modules.gguf import has_whole_header
from graphrun.modules.source_files import split_source, variant_of
from graphrun.reading import parse_json, path_inside

FIRST_BYTES = 1 << 15  # of the first request for a header: most have less
THREADS = 8  # requests at a time, as many as huggingface_hub's downloads
TIMEOUT_SECONDS = 10  # of the hub's answer, as in huggingface_hub


@dataclass(slots=True)
class _RemoteFile:
    """A file of a repository: its ``path``, its ``size`` in bytes, and the URL to read it from."""

    path: str
    size: int
    url: str

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from ``begin`` to ``end`` or the file's end. Raises the errors of
        huggingface_hub's client, and ValueError for another answer."""
        from huggingface_hub import constants
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
            http_stream_backoff,
        )

        count = min(end, self.size) - begin
        if count <= 0:
            return b""
        headers = {"Range": f"bytes={begin}-{begin + count - 1}", "Accept-Encoding": "identity"}
        if self.url.startswith(f"{constants.ENDPOINT}/"):  # the store gets no token
            headers |= build_hf_headers()
        content = bytearray()
        with http_stream_backoff(
            "GET", self.url, headers=headers, timeout=TIMEOUT_SECONDS
        ) as response:
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            if begin and response.status_code != 206:
                raise ValueError(f"the server of {self.path} sends no parts of files")
            self.url = str(response.url)
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) >= count:  # a server that ignores the range sends everything
                    break
        if len(content) < count:
            raise ValueError(f"{self.path} ends at {begin + len(content):,} bytes")
        return bytes(content[:count])


def stand_in(repository: str, snapshot: Path) -> Path:
    """Return a folder with the files of ``snapshot`` and the headers of its missing weight files.

    ``snapshot``: the folder of ``repository`` in the hub's cache, named after its commit; returned
    itself if no weight file is missing, and without a network. Raises GraphError if the hub
    refuses, InputError if the folder cannot be written.
    """
    from huggingface_hub import hf_hub_url

    commit = snapshot.name
    if (listing := _listing(repository, commit)) is None:
        return snapshot
    sizes = listing.sizes
    remotes = [
        _RemoteFile(name, sizes[name], hf_hub_url(repository, name, revision=commit))
        for name in weight_files(sizes)
        if not (snapshot / name).exists()
    ]
    if not remotes:
        return snapshot
    with (
        hub.explained(f"the headers of {repository}", repository, commit),
        ThreadPoolExecutor(THREADS) as pool,
    ):
        pieces = list(pool.map(_pieces, remotes))
    try:
        folder = Path(tempfile.mkdtemp(dir=_root().name), repository, commit)
        for path in (path for path in snapshot.rglob("*") if path.is_file()):
            _link(path.resolve(), folder / path.relative_to(snapshot))
        for remote, file_pieces in zip(remotes, pieces, strict=True):
            target = path_inside(folder, remote.path, f"{repository} lists")
            _write_sparse(target, file_pieces, remote.size)
    except OSError as error:
        raise InputError(f"{_root().name} cannot be written: {error.strerror or error}") from error
    return folder


@cache
def gguf_stand_in(source: str, file_line: str) -> Path | None:
    """Return a stand-in of the GGUF file ``source`` in a repository.

    None for a path, for a file that is not in its repository, and without a network. Raises
    GraphError at ``file_line`` if the hub refuses.
    """
    from huggingface_hub import hf_hub_url

    if Path(source).is_absolute():
        return None
    repository, revision, name = split_source(source)
    listing = _listing(repository, revision, file_line)
    if listing is None or name not in listing.sizes:
        return None
    url = hf_hub_url(repository, name, revision=listing.commit)
    remote = _RemoteFile(name, listing.sizes[name], url)
    with hub.explained(f"the header of {source}", repository, revision, file_line):
        header = _header(remote)
    target = path_inside(Path(tempfile.mkdtemp(dir=_root().name)), name, f"{repository} lists")
    _write_sparse(target, [(0, header)], remote.size)
    return target


def _listing(repository: str, revision: str | None, file_line: str = "") -> hub.Listing | None:
    """Return `hub.look`; None if the hub cannot be reached."""
    try:
        return hub.look(repository, revision, file_line)
    except GraphError as error:
        if hub.is_unreachable(error.__cause__):
            return None
        raise


def weight_files(names: Iterable[str]) -> list[str]:
    """Return the files among ``names`` that components are planned by.

    In each folder with a config.json: the safetensors, those without a variant if there are any;
    without safetensors the GGUF files.
    """
    by_folder: dict[str, list[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        by_folder.setdefault(folder, []).append(file)
    weight_paths = list[str]()
    for folder, files in by_folder.items():
        if "config.json" in files:
            safetensors = [file for file in files if file.endswith(".safetensors")]
            plain = [file for file in safetensors if not variant_of(file)]
            selection = plain or safetensors or [file for file in files if file.endswith(".gguf")]
            weight_paths += [f"{folder}/{file}" if folder else file for file in selection]
    return weight_paths


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of all stand-ins of this process, which is deleted at its end."""
    return tempfile.TemporaryDirectory(prefix="graphrun-headers-")


def _pieces(remote: _RemoteFile) -> list[tuple[int, bytes]]:
    """Return (offset, bytes) of the parts of a weight file that its stand-in has."""
    header = _header(remote)
    if not (ranges := _state_ranges(remote, header)):
        return [(0, header)]
    (begin, end), *other_ranges = ranges
    state = remote.read(begin, end)
    pieces, general = [(0, header), (begin, state)], without_shape(state)
    return pieces + [
        (begin, general.ljust(end - begin)[: end - begin]) for begin, end in other_ranges
    ]


def _header(remote: _RemoteFile) -> bytes:
    """Return the beginning of a weight file up to the end of its header, or more. What is wrong
    with a header is for its reader to report."""
    content = remote.read(0, FIRST_BYTES)
    if remote.path.endswith(".gguf"):
        while len(content) < LIMITS.text_bytes and not has_whole_header(content):
            if not (next_bytes := remote.read(len(content), 2 * len(content))):
                break
            content += next_bytes
        return content
    end = 8 + min(int.from_bytes(content[:8], "little"), LIMITS.text_bytes)
    return content[:end] + remote.read(len(content), end)


def _state_ranges(remote: _RemoteFile, content: bytes) -> list[tuple[int, int]]:
    """Return the range of each state of nf4 weights in a safetensors file with this header."""
    if remote.path.endswith(".gguf"):
        return []
    try:
        header = parse_json(content[8:])
        offsets = sorted(item["data_offsets"] for name, item in header.items() if is_state(name))
        return [(len(content) + begin, len(content) + end) for begin, end in offsets]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # not a safetensors header


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.symlink(source, target)
    except OSError:  # Windows without the right to make links
        shutil.copyfile(source, target)


def _write_sparse(target: Path, pieces: Iterable[tuple[int, bytes]], size: int) -> None:
    """Write ``pieces``, (offset, bytes), to a file of ``size`` bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        for begin, content in pieces:
            file.seek(begin)
            file.write(content)
        file.truncate(size)

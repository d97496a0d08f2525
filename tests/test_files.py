"""A file is complete or absent; the next write deletes what a killed process left, but not what a
running one writes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphrun.files import digest_of, sweep, write_whole


def apart(work: Callable[[], Any]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
    finally:
        os._exit(0)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_killed_between_writing_and_renaming_leaves_a_file_that_the_next_write_sweeps(
    tmp_path: Path,
) -> None:
    target = tmp_path / "0003.png"

    def killed(temporary: Path) -> None:
        temporary.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(apart(lambda: write_whole(target, killed)), 0)
    torn, lock = names(tmp_path)
    assert torn.startswith(".0003.png.new-")
    assert lock == f"{torn}.lock"
    write_whole(tmp_path / "0004.png", lambda temporary: temporary.write_bytes(b"another"))
    assert torn in names(tmp_path), "only who writes the same file knows that it was to be this one"
    write_whole(target, lambda temporary: temporary.write_bytes(b"whole"))
    assert names(tmp_path) == ["0003.png", "0004.png"]
    assert target.read_bytes() == b"whole"


def test_what_a_living_process_writes_is_not_swept(tmp_path: Path) -> None:
    target = tmp_path / "a.png"
    start_pipe, go_on = os.pipe(), os.pipe()

    def slow(temporary: Path) -> None:
        temporary.write_bytes(b"the other's")
        os.write(start_pipe[1], b".")
        os.read(go_on[0], 1)

    child = apart(lambda: write_whole(target, slow))
    os.read(start_pipe[0], 1)
    sweep(target)
    write_whole(target, lambda temporary: temporary.write_bytes(b"ours"))
    assert len(names(tmp_path)) == 3, "its file and its lock are still there"
    os.write(go_on[1], b".")
    os.waitpid(child, 0)
    assert names(tmp_path) == ["a.png"]
    assert target.read_bytes() == b"the other's"


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_text("before")

    def fails(temporary: Path) -> None:
        temporary.write_text("half")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        write_whole(target, fails)
    assert names(tmp_path) == ["a.json"]
    assert target.read_text() == "before"


def test_digests_do_not_depend_on_the_order_of_keys() -> None:
    assert (
        digest_of({"a": 1, "b": [2]})
        == digest_of({"b": [2], "a": 1})
        != digest_of({"a": 1, "b": [3]})
    )

"""Cached outputs in a folder that several processes use: complete or absent, and within the limit,
at any kill."""

from __future__ import annotations

import importlib
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphrun.batch.cache.index import DATABASE, Index
from graphrun.errors import InputError

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def change(folder: Path, statement: str, *values: Any) -> list[Any]:
    """Runs ``statement`` in the database behind the index's back."""
    with sqlite3.connect(folder / DATABASE) as rows:
        return rows.execute(statement, values).fetchall()


def test_an_entry_is_there_until_it_is_removed(tmp_path: Path) -> None:
    index = Index(tmp_path)
    assert index.get("a") is None
    index.put("a", b"one", graph="g", stage="encode", inputs_text="prompt='x'")
    index.put("b", b"two")
    assert Index(tmp_path).get("a") == b"one"
    assert {(entry.key, entry.stage, entry.nbytes) for entry in index.entries()} == {
        ("a", "encode", 3),
        ("b", "", 3),
    }
    index.put("a", b"other")
    assert index.get("a") == b"other"
    assert len(change(tmp_path, "SELECT key FROM contents")) == 2, "what was replaced is gone"
    assert index.remove(["a"]) == 1
    assert (index.get("a"), index.get("b")) == (None, b"two")
    assert index.remove() == 1
    assert change(tmp_path, "SELECT key FROM contents") == []


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"x" + data[1:], lambda data: b""]
)
def test_a_damaged_entry_is_absent_and_can_be_put_again(tmp_path: Path, damage: Any) -> None:
    index = Index(tmp_path)
    index.put("a", b"content")
    change(tmp_path, "UPDATE contents SET data = ?", damage(b"content"))
    assert index.get("a") is None
    assert index.entries() == []
    index.put("a", b"content")
    assert index.get("a") == b"content"


def test_verify_takes_out_what_is_damaged(tmp_path: Path) -> None:
    index = Index(tmp_path)
    for key in "abc":
        index.put(key, key.encode() * 9)
    change(tmp_path, "UPDATE contents SET data = ? WHERE key = 'a'", b"short")
    change(tmp_path, "DELETE FROM contents WHERE key = 'b'")
    assert sorted(entry.key for entry in index.verify()) == ["a", "b"]
    assert [entry.key for entry in index.entries()] == ["c"]
    assert change(tmp_path, "SELECT key FROM contents") == [("c",)]


def test_what_is_removed_takes_no_space_on_disk(tmp_path: Path) -> None:
    index = Index(tmp_path)
    index.put("a", bytes(1 << 20))
    index.put("b", b"two")
    assert (tmp_path / DATABASE).stat().st_size > 1 << 20
    index.remove(["a"])
    assert (tmp_path / DATABASE).stat().st_size < 1 << 17


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    index = Index(tmp_path, limit_bytes=30)
    for key in "abc":
        index.put(key, key.encode() * 10)
    assert index.get("a") is not None
    index.put("d", b"d" * 10)
    assert sorted(entry.key for entry in index.entries()) == ["a", "c", "d"]
    index.put("e", b"e" * 31)
    assert index.get("e") is None, "larger than the limit"


def test_a_folder_that_will_not_do_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="outputs cannot be cached there"):
        Index(tmp_path / "file" / "cache").put("a", b"x")
    (tmp_path / DATABASE).write_bytes(b"no database" * 100)
    with pytest.raises(InputError, match="remove the folder if its index is damaged"):
        Index(tmp_path).get("a")


def test_a_file_is_read_again_only_when_it_changed(tmp_path: Path) -> None:
    index, file = Index(tmp_path / "index"), tmp_path / "weights"
    file.write_bytes(b"one")
    first = index.file_digest(file)
    change(tmp_path / "index", "UPDATE files SET digest = 'remembered'")
    assert index.file_digest(file) == "remembered"
    file.write_bytes(b"four")
    assert index.file_digest(file) not in ("remembered", first)


PUTS = """
import itertools, pathlib, sys
from graphrun.batch.cache.index import Index
for number in itertools.count():
    Index(pathlib.Path(sys.argv[1])).put(str(number % 9), bytes(1 << 18) + str(number).encode())
"""


def test_a_process_that_is_killed_leaves_entries_complete_or_absent(tmp_path: Path) -> None:
    index = Index(tmp_path)
    with subprocess.Popen([sys.executable, "-c", PUTS, str(tmp_path)]) as child:
        while len(index.entries()) < 5:
            assert child.poll() is None
        child.kill()
    assert len(index.entries()) >= 5
    assert index.verify() == []
    assert index.remove() >= 5
    index.put("a", b"one")
    assert index.get("a") == b"one"


def test_two_processes_lose_and_tear_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    entries = importlib.import_module("repeated").two_on_one_cache(1.5, 5)
    assert entries["failed"] == entries["damaged"] == entries["lost"] == 0
    assert entries["entries"] > 0
    assert all(
        counts["torn"] == 0 and counts["hits"] and counts["puts"] for counts in entries["counts"]
    )

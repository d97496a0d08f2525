"""Cached outputs in a folder that several processes use: complete or absent, and within the limit,
at any kill."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from graphrun.disk_store import DATABASE, Store
from graphrun.errors import InputError

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def change(folder: Path, statement: str, *values: Any) -> list[Any]:
    """Runs ``statement`` in the database behind the index's back."""
    with sqlite3.connect(folder / DATABASE) as rows:
        return rows.execute(statement, values).fetchall()


def test_an_entry_is_there_until_it_is_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.get("a") is None
    store.put("a", b"one", graph="g", stage="encode", inputs_text="prompt='x'")
    store.put("b", b"two")
    assert Store(tmp_path).get("a") == b"one"
    assert {(entry.key, entry.stage, entry.nbytes) for entry in store.entries()} == {
        ("a", "encode", 3),
        ("b", "", 3),
    }
    store.put("a", b"other")
    assert store.get("a") == b"other"
    assert len(change(tmp_path, "SELECT key FROM contents")) == 2, "what was replaced is gone"
    assert store.remove(["a"]) == 1
    assert (store.get("a"), store.get("b")) == (None, b"two")
    assert store.remove() == 1
    assert change(tmp_path, "SELECT key FROM contents") == []


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"x" + data[1:], lambda data: b""]
)
def test_a_damaged_entry_is_absent_and_can_be_put_again(tmp_path: Path, damage: Any) -> None:
    store = Store(tmp_path)
    store.put("a", b"content")
    change(tmp_path, "UPDATE contents SET data = ?", damage(b"content"))
    assert store.get("a") is None
    assert store.entries() == []
    store.put("a", b"content")
    assert store.get("a") == b"content"


def test_verify_takes_out_what_is_damaged(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for key in "abc":
        store.put(key, key.encode() * 9)
    change(tmp_path, "UPDATE contents SET data = ? WHERE key = 'a'", b"short")
    change(tmp_path, "DELETE FROM contents WHERE key = 'b'")
    assert sorted(entry.key for entry in store.verify()) == ["a", "b"]
    assert [entry.key for entry in store.entries()] == ["c"]
    assert change(tmp_path, "SELECT key FROM contents") == [("c",)]


def test_what_is_removed_takes_no_space_on_disk(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("a", bytes(1 << 20))
    store.put("b", b"two")
    assert (tmp_path / DATABASE).stat().st_size > 1 << 20
    store.remove(["a"])
    assert (tmp_path / DATABASE).stat().st_size < 1 << 17


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    store = Store(tmp_path, limit_bytes=30)
    for key in "abc":
        store.put(key, key.encode() * 10)
    assert store.get("a") is not None
    store.put("d", b"d" * 10)
    assert sorted(entry.key for entry in store.entries()) == ["a", "c", "d"]
    store.put("e", b"e" * 31)
    assert store.get("e") is None, "larger than the limit"


def test_a_folder_that_will_not_do_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="nothing can be cached there"):
        Store(tmp_path / "file" / "cache").put("a", b"x")


def first_page_alone(database: bytes) -> bytes:
    return database[:4096].ljust(len(database), b"\0")


@pytest.mark.parametrize("damage", [lambda _: b"no database" * 100, first_page_alone])
def test_a_damaged_database_is_removed(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    store = Store(tmp_path)
    store.put("a", bytes(20_000))
    database = tmp_path / DATABASE
    database.write_bytes(damage(database.read_bytes()))
    with pytest.raises(InputError, match="the damaged database is removed"):
        store.get("a")
    assert store.get("a") is None
    store.put("a", b"x")
    assert store.get("a") == b"x"


def test_entries_of_a_read_only_folder_are_read(tmp_path: Path) -> None:
    script = """
import os, pathlib, sys
from graphrun.disk_store import Store
os.setgroups([]); os.setgid(65534); os.setuid(65534)  # root may write anywhere
store = Store(pathlib.Path(sys.argv[1]))
store.put_json("plan", "b", 2)
print(store.get_json("plan", "a"), store.get_json("plan", "b"))
"""
    if os.getuid():
        pytest.skip("only root can become a user who may not write")
    folder = Path(tempfile.mkdtemp())  # other users may not enter pytest's folders
    try:
        Store(folder).put_json("plan", "a", 1)
        folder.chmod(0o755)
        command = [sys.executable, "-c", script, str(folder)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert output == "1 None\n"
    finally:
        shutil.rmtree(folder)


def test_json_is_stored_by_kind(tmp_path: Path) -> None:
    store = Store(tmp_path / "made" / "when needed")
    assert store.get_json("plan", "a") is None
    store.put_json("plan", "a", {"x": [1, 2.5, None, "t"]})
    assert Store(store.folder).get_json("plan", "a") == {"x": [1, 2.5, None, "t"]}
    assert store.get_json("trace", "a") is None
    store.put("plan-b", b"[1")
    assert store.get_json("plan", "b") is None


def test_json_in_a_folder_that_cannot_be_created_or_read_is_absent(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "cache", tmp_path):
        (tmp_path / DATABASE).mkdir(exist_ok=True)
        Store(folder).put_json("plan", "a", 1)
        assert Store(folder).get_json("plan", "a") is None


def test_concurrent_readers_see_whole_entries_or_none(tmp_path: Path) -> None:
    def work(number: int) -> bool:
        store, whole = Store(tmp_path, limit_bytes=4000), True
        for turn in range(30):
            store.put_json("plan", str(turn % 3), {"writer": [number] * 100})
            entry = store.get_json("plan", str((turn + 1) % 3))
            whole &= entry is None or len(set(entry["writer"])) == 1
        return whole

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert [path.name for path in tmp_path.iterdir()] == [DATABASE]


def test_a_file_is_read_again_only_when_it_changed(tmp_path: Path) -> None:
    store, file = Store(tmp_path / "cache"), tmp_path / "weights"
    file.write_bytes(b"one")
    first = store.file_digest(file)
    change(tmp_path / "cache", "UPDATE files SET digest = 'remembered'")
    assert store.file_digest(file) == "remembered"
    file.write_bytes(b"four")
    assert store.file_digest(file) not in ("remembered", first)


PUTS = """
import itertools, pathlib, sys
from graphrun.disk_store import Store
for number in itertools.count():
    Store(pathlib.Path(sys.argv[1])).put(str(number % 9), bytes(1 << 18) + str(number).encode())
"""


def test_a_process_that_is_killed_leaves_entries_complete_or_absent(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with subprocess.Popen([sys.executable, "-c", PUTS, str(tmp_path)]) as child:
        try:
            while len(store.entries()) < 5:
                assert child.poll() is None
        finally:
            child.kill()  # else a failure waits for it without end
    assert len(store.entries()) >= 5
    assert store.verify() == []
    assert store.remove() >= 5
    store.put("a", b"one")
    assert store.get("a") == b"one"


def test_a_database_without_tables_yet_has_no_entries(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE)) as rows:
        rows.execute("PRAGMA auto_vacuum = FULL")
        rows.execute("CREATE TABLE other (number INTEGER)")
    store = Store(tmp_path)
    assert store.entries() == []
    assert store.get("a") is None


def test_two_processes_lose_and_tear_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    entries = importlib.import_module("repeated").two_on_one_cache(1.5, 5)
    assert entries["failed"] == entries["damaged"] == entries["lost"] == 0
    assert entries["entries"] > 0
    assert all(
        counts["torn"] == 0 and counts["hits"] and counts["puts"] for counts in entries["counts"]
    )

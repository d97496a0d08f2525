"""Stored entries are whole or absent under concurrent writes, crashes and damage, and their total
size is limited."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from graphrun.files import Store, digest_of
from graphrun.systems import take_lock


def test_get_returns_what_was_put(tmp_path: Path) -> None:
    store = Store(tmp_path / "made" / "when needed")
    assert store.get("plan", "a") is None
    store.put("plan", "a", {"x": [1, 2.5, None, "t"]})
    assert Store(store.folder).get("plan", "a") == {"x": [1, 2.5, None, "t"]}
    assert store.get("trace", "a") is None


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[:-3], lambda b: b"", lambda b: b.replace(b"1", b"2", 1), lambda b: b"{}" + b],
)
def test_a_damaged_entry_is_absent_until_it_is_written_again(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    store = Store(tmp_path)
    store.put("plan", "a", {"seconds": 1111})
    path = tmp_path / "plan-a.json"
    path.write_bytes(damage(path.read_bytes()))
    assert store.get("plan", "a") is None
    store.put("plan", "a", {"seconds": 2})
    assert store.get("plan", "a") == {"seconds": 2}


def test_concurrent_readers_see_whole_entries_or_none(tmp_path: Path) -> None:
    def work(number: int) -> bool:
        store, whole = Store(tmp_path, limit_bytes=4000), True
        for turn in range(30):
            store.put("plan", str(turn % 3), {"writer": [number] * 100})
            entry = store.get("plan", str((turn + 1) % 3))
            whole &= entry is None or len(set(entry["writer"])) == 1
        return whole

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert not list(tmp_path.glob(".*"))


def test_least_recently_used_entries_are_deleted_first(tmp_path: Path) -> None:
    store = Store(tmp_path, limit_bytes=3 * 700)
    for number, key in enumerate("abc"):
        store.put("plan", key, "x" * 600)
        os.utime(tmp_path / f"plan-{key}.json", (number, number))
    store.get("plan", "a")
    store.put("plan", "d", "x" * 600)
    assert [store.get("plan", key) is not None for key in "abcd"] == [True, False, True, True]


def test_an_entry_larger_than_the_limit_replaces_all_others(tmp_path: Path) -> None:
    store = Store(tmp_path, limit_bytes=10)
    store.put("plan", "a", "x")
    store.put("plan", "b", "x" * 100)
    assert (store.get("plan", "a"), store.get("plan", "b")) == (None, "x" * 100)


def test_temporary_files_of_killed_processes_are_deleted_and_those_being_written_are_not(
    tmp_path: Path,
) -> None:
    (tmp_path / ".plan-b.json.new-killed").write_text("half")
    (tmp_path / ".plan-c.json.new-written").touch()
    lock = take_lock(tmp_path / ".plan-c.json.new-written.lock")
    assert lock is not None
    Store(tmp_path).put("plan", "a", 1)
    assert sorted(path.name for path in tmp_path.glob(".*")) == [
        ".plan-c.json.new-written",
        ".plan-c.json.new-written.lock",
    ]
    lock.release()


def test_a_folder_that_cannot_be_created_stores_nothing_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "cache")
    store.put("plan", "a", 1)
    assert store.get("plan", "a") is None


def test_digests_do_not_depend_on_the_order_of_keys() -> None:
    assert (
        digest_of({"a": 1, "b": [2]})
        == digest_of({"b": [2], "a": 1})
        != digest_of({"a": 1, "b": [3]})
    )

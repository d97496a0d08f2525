"""API keys: found by their hashes, with rates, and read again on SIGHUP."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path
from typing import Any

import pytest

from graphrun.errors import InputError
from graphrun.serve.errors import Refused
from graphrun.serve.keys import Rates, owner_of, read_keys


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_keys_are_found_by_their_hash(tmp_path: Path) -> None:
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in ("one", "two")]
    (file := tmp_path / "keys").write_text(
        f"# people\nann {digests[0]}\nbob {digests[1]} # until May\n"
    )
    keys = read_keys(file)
    assert [owner_of(key, keys) for key in ("one", "two", "three", "", "\udcff", digests[0])] == [
        "ann",
        "bob",
        None,
        None,
        None,
        None,
    ]
    assert "one" not in repr(keys)


@pytest.mark.parametrize(
    "text", ["", "ann", "ann one", "ann " + "g" * 64, "ann " + "0" * 64 + "\nann " + "1" * 64]
)
def test_a_file_of_keys_in_another_form_is_refused(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "keys").write_text(text)
    with pytest.raises(InputError, match="keys"):
        read_keys(file)


def test_a_key_may_have_a_rate(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text(f"ann {digest('one')}\nbob {digest('two')} 30/min\n")
    assert [key.per_minute for key in read_keys(file).values()] == [0, 30]
    for rate in ("0/min", "30", "30/s", "30/min 3"):
        file.write_text(f"ann {digest('one')} {rate}\n")
        with pytest.raises(InputError, match="keys:1: is not NAME SHA256 or NAME SHA256 30/min"):
            read_keys(file)


def test_a_rate_is_a_minutes_worth_at_once_and_then_as_time_passes() -> None:
    clock = [0.0]
    rates = Rates(lambda: clock[0])
    for _ in range(6):
        rates.take("bob", 12, 2)
    with pytest.raises(Refused) as refusal:
        rates.take("bob", 12, 2)
    assert (refusal.value.status, refusal.value.retry_seconds) == (429, pytest.approx(10))
    rates.take("ann", 12, 12)
    clock[0] = 10.0
    rates.take("bob", 12, 2)
    clock[0] = 14.0
    with pytest.raises(Refused):
        rates.take("bob", 12, 1)
    clock[0] = 15.0
    rates.take("bob", 12, 1)
    clock[0] = 1e6
    with pytest.raises(Refused) as refusal:
        rates.take("bob", 12, 13)
    assert refusal.value.retry_seconds is None, "never"
    for _ in range(100):
        rates.take("free", 0, 4)


@pytest.mark.sweep("more")
@pytest.mark.long
def test_keys_are_read_again_on_sighup(serving: Any, tmp_path: Path) -> None:
    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return int(server.client.get("/v1/models", headers=headers).status_code)

    with serving(tmp_path) as server:
        assert [status(key) for key in ("a key for tests", "new")] == [200, 401]
        (tmp_path / "keys").write_text(f"new {digest('new')} 2/min\n")
        server.process.send_signal(signal.SIGHUP)
        server.until(lambda: "keys read" in server.log.read_text())
        assert [status(key) for key in ("a key for tests", "new")] == [401, 200]
        (tmp_path / "keys").write_text("nonsense\n")
        server.process.send_signal(signal.SIGHUP)
        server.until(lambda: "keys refused" in server.log.read_text())
        assert status("new") == 200
        body = {"prompt": "a", "n": 2, "steps": 2}
        headers = {"Authorization": "Bearer new"}
        answers = [server.client.post("/v1/jobs", json=body, headers=headers) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [202, 429]
        assert answers[1].json()["error"]["code"] == "rate_limited"
        assert 0 < int(answers[1].headers["Retry-After"]) <= 60

"""What of a batch is done, on disk, so that it can go on after it was killed at any moment.

Decides what is written when, and refuses to go on with another graph. Knows neither plans nor devices.

    facts.json            what the batch is of: graph, weights' files, versions, inputs of every item
    3/encode.value        outputs of a stage that later stages of item 3 read
    3/denoise.steps       latents, scheduler and random numbers after a step
    3/done.json           item 3's files, which are where they belong; the others of its files are gone

    lock                  whoever goes on holds it

Every file is whole under its name or absent, and on the disk for good. Each begins with its digest.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from graphrun.batch.cache.pack import pack, unpack
from graphrun.errors import InputError
from graphrun.files import write_whole
from graphrun.ops.steps import StepState

SHOWN = 6  # changes that a refusal names


class Journal:
    """The state of a batch in ``folder``, saved every ``every`` denoising steps. Raises InputError where it cannot be written."""

    def __init__(self, folder: Path, every: int = 1) -> None:
        self.folder, self.every = folder, every
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise InputError(f"{folder}: another process goes on with this run; wait for it, or give another output") from error
        except OSError as error:
            raise InputError(f"{folder}: the state of a run cannot be kept there: {error.strerror or error}") from error

    def close(self) -> None:
        """Others may go on with it."""
        self._lock.close()

    def require(self, facts: Mapping[str, str], kind: str = "facts") -> None:
        """Notes what the batch is of, or compares it with what was noted. More facts than before are noted too.

        Raises InputError naming each that is another now.
        """
        path = self.folder / f"{kind}.json"
        data = self._get(path)
        before: dict[str, str] = dict(json.loads(data)) if data is not None else {}
        changed = [
            f"  {name}: was {before[name]}, is {facts.get(name, 'gone')}" for name in before if facts.get(name) != before[name]
        ]
        if changed:
            said = f"{self.folder} holds a run that was of something else; undo the change, or remove the folder to begin anew"
            more = [f"  and {len(changed) - SHOWN} more"] if len(changed) > SHOWN else []
            raise InputError("\n".join([said, *changed[:SHOWN], *more]))
        if facts.keys() != before.keys():
            self._put(path, json.dumps(dict(facts), indent=0, sort_keys=True).encode())

    def request(self, number: int) -> RequestJournal:
        """The part of item ``number``."""
        return RequestJournal(self, self.folder / str(number))

    def _put(self, path: Path, data: bytes) -> None:
        try:
            path.parent.mkdir(exist_ok=True)
            checked = hashlib.sha256(data).hexdigest().encode() + b"\n" + data
            write_whole(path, lambda temporary: temporary.write_bytes(checked), lasting=True)
        except OSError as error:
            raise InputError(f"{path}: the state of the run cannot be kept: {error.strerror or error}") from error

    def _get(self, path: Path) -> bytes | None:
        try:
            check, _, data = path.read_bytes().partition(b"\n")
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest().encode() == check else None


class RequestJournal:
    """What of one item is done. A `graphrun.ops.steps.Journal` for its loops."""

    def __init__(self, journal: Journal, folder: Path) -> None:
        self._journal, self.folder = journal, folder

    @property
    def done(self) -> bool:
        """Whether its files are where they belong, as they were written."""
        data = self._journal._get(self.folder / "done.json")
        try:
            return data is not None and all(_digest(Path(path)) == digest for path, digest in json.loads(data))
        except OSError:
            return False

    def finish(self, files: Iterable[Path]) -> None:
        """The item is done, and these are its files; what it would have gone on from is gone."""
        found = [[str(path.resolve()), _digest(path)] for path in files]
        self._journal._put(self.folder / "done.json", json.dumps(found).encode())
        self.tidy()

    def tidy(self) -> None:
        """Of an item that is done nothing else is kept."""
        for path in self.folder.glob("*"):
            if path.name != "done.json":
                path.unlink(missing_ok=True)

    def values(self, stage: str) -> dict[str, Any] | None:
        """The outputs of ``stage``; None where they are not kept."""
        data = self._journal._get(self.folder / f"{stage}.value")
        with contextlib.suppress(InputError):
            return None if data is None else dict(unpack(data))
        return None

    def keep(self, stage: str, outputs: Mapping[str, Any]) -> None:
        """Keeps the ``outputs`` of ``stage``, which is done."""
        self._journal._put(self.folder / f"{stage}.value", pack(dict(outputs)))
        (self.folder / f"{stage}.steps").unlink(missing_ok=True)

    def state(self, stage: str) -> StepState | None:
        """Where the loop of ``stage`` stands."""
        data = self._journal._get(self.folder / f"{stage}.steps")
        with contextlib.suppress(InputError, TypeError):
            return None if data is None else StepState(**unpack(data))
        return None

    def wants(self, stage: str, done: int, steps: int) -> bool:
        """Every so many steps."""
        return done % self._journal.every == 0

    def save(self, stage: str, state: StepState) -> None:
        """Keeps where the loop of ``stage`` stands."""
        fields = ("done", "steps", "latents", "generator", "scheduler")
        self._journal._put(self.folder / f"{stage}.steps", pack({name: getattr(state, name) for name in fields}))

    def forget(self, stage: str) -> None:
        """The loop of ``stage`` begins at its first step."""
        (self.folder / f"{stage}.steps").unlink(missing_ok=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""The state of a batch on disk, from which the batch resumes after a kill at any moment.

A batch resumes only with the same graph, files, versions and inputs.

    dependencies.json     what the outputs depend on: graph, weight files, versions, inputs
    3/encode.value        outputs of a stage of request 3 that later stages read
    3/denoise.steps       latents, scheduler state and generator state after a step
    3/done.json           the output files of request 3; its other state files are deleted then
    lock                  locked by the process that runs the batch

Every file is complete or absent, and synced to disk. Each begins with its SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from graphrun.batch.cache.pack import pack, unpack
from graphrun.errors import InputError
from graphrun.files import write_whole
from graphrun.ops.steps import StepState
from graphrun.reading import open_regular, parse_json
from graphrun.systems import take_lock

DEPENDENCIES = "dependencies"
T = TypeVar("T")
SHOWN = 6  # the most changes that an error message lists


class Journal:
    """The state of a batch in ``folder``. Raises InputError if the folder cannot be written, or
    another process runs the same batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = take_lock(folder / "lock")
        if lock is None:
            raise InputError(
                f"{folder}: another process is running this batch; "
                "wait for it, or choose another output"
            )
        self._lock = lock

    def close(self) -> None:
        self._lock.release()

    def require(self, entries: Mapping[str, str], kind: str = DEPENDENCIES) -> None:
        """Save ``entries`` as ``<kind>.json``, or compare them with the saved ones.

        New entries are added. Raises InputError that lists each changed entry, and if requests have
        state but no dependencies.
        """
        path = self.folder / f"{kind}.json"
        data = _read(path)
        if (
            data is None
            and kind == DEPENDENCIES
            and any(child.name.isdigit() for child in self.folder.iterdir())
        ):
            raise InputError(
                f"{self.folder}: the state has no readable {path.name}; "
                "remove the folder to start over"
            )
        previous = _json(data, {})
        if not (
            isinstance(previous, dict)
            and all(isinstance(value, str) for value in previous.values())
        ):
            raise InputError(f"{path}: is damaged; remove the folder to start over")
        changes = [
            f"  {name}: was {previous[name]}, is {entries.get(name, 'gone')}"
            for name in previous
            if entries.get(name) != previous[name]
        ]
        if changes:
            message = (
                f"{self.folder} holds the state of a different batch; "
                "undo the change, or remove the folder to start over"
            )
            omitted = [f"  and {len(changes) - SHOWN} more"] if len(changes) > SHOWN else []
            raise InputError("\n".join([message, *changes[:SHOWN], *omitted]))
        if entries.keys() != previous.keys():
            _write(path, json.dumps(dict(entries), indent=0, sort_keys=True).encode())

    def request(self, number: int) -> RequestJournal:
        return RequestJournal(self.folder / str(number))


class RequestJournal:
    """The state of one request in ``folder``, a `graphrun.ops.steps.StepJournal` for its loops."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def done(self) -> bool:
        """Whether all output files exist with the content that was written."""
        data = _json(_read(self.folder / "done.json"), None)
        try:
            return data is not None and all(_digest(Path(path)) == digest for path, digest in data)
        except (InputError, OSError, TypeError, ValueError):
            return False

    def finish(self, files: Iterable[Path]) -> None:
        """Record ``files`` as the complete outputs of the request, and delete its other state."""
        digests = [[str(path.resolve()), _digest(path)] for path in files]
        _write(self.folder / "done.json", json.dumps(digests).encode())
        self.tidy()

    def tidy(self) -> None:
        """Delete everything but ``done.json``."""
        for path in self.folder.glob("*"):
            if path.name != "done.json":
                path.unlink(missing_ok=True)

    def values(self, stage: str) -> dict[str, Any] | None:
        """Return the saved outputs of ``stage``; None if absent or damaged."""
        return _unpack(self.folder / f"{stage}.value", dict)

    def keep(self, stage: str, outputs: Mapping[str, Any]) -> None:
        """Save the ``outputs`` of ``stage``, and delete the state of its loop."""
        _write(self.folder / f"{stage}.value", pack(dict(outputs)))
        self.forget(stage)

    def state(self, stage: str) -> StepState | None:
        """Return the saved state of the loop of ``stage``; None if absent or damaged."""
        return _unpack(self.folder / f"{stage}.steps", _step_state)

    def wants(self, stage: str, step: int, steps: int) -> bool:
        """Return True: save every step."""
        return True

    def save(self, stage: str, state: StepState) -> None:
        _write(
            self.folder / f"{stage}.steps",
            pack({attribute.name: getattr(state, attribute.name) for attribute in fields(state)}),
        )

    def forget(self, stage: str) -> None:
        """Delete the state of the loop of ``stage``, so that it starts at its first step."""
        (self.folder / f"{stage}.steps").unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{path}: the resume state cannot be written: {error.strerror or error}"
        ) from error


def _write(path: Path, data: bytes) -> None:
    checked = hashlib.sha256(data).hexdigest().encode() + b"\n" + data
    with _writing(path):
        path.parent.mkdir(exist_ok=True)
        write_whole(path, lambda temporary: temporary.write_bytes(checked), lasting=True)


def _read(path: Path) -> bytes | None:
    """Return the bytes that `_write` wrote; None if absent or damaged."""
    with contextlib.suppress(OSError, InputError):
        with open_regular(path) as file:
            check, _, data = file.read().partition(b"\n")
        return data if hashlib.sha256(data).hexdigest().encode() == check else None
    return None


def _json(data: bytes | None, absent: Any) -> Any:
    try:
        return absent if data is None else parse_json(data)
    except ValueError:
        return None


def _step_state(content: Any) -> StepState:
    state = StepState(**content)
    tensors, counts = (state.latents, state.generator), (state.finished_steps, state.steps)
    if not (
        all(isinstance(tensor, torch.Tensor) for tensor in tensors)
        and all(type(count) is int for count in counts)
    ):
        raise TypeError("not the state of a loop")
    state = replace(
        state,
        scheduler={
            name: (value, bool(on_device)) for name, (value, on_device) in state.scheduler.items()
        },
    )
    if not 0 < state.finished_steps <= state.steps:
        raise ValueError(f"{state.finished_steps} of {state.steps} steps are done")
    return state


def _unpack(path: Path, convert: Callable[[Any], T]) -> T | None:
    with contextlib.suppress(InputError, TypeError, ValueError, AttributeError):
        data = _read(path)
        return convert(unpack(data)) if data is not None else None
    return None


def _digest(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Batches of the small FLUX at its smallest, and runs in another process that are killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import graphrun
from graphrun.model.problem import Problem
from graphrun.report.outputs import save_outputs

GRAPHS = Path(__file__).parent.parent.parent / "graphs"
SMALL = {"height": 32, "width": 32, "steps": 3, "max_sequence_length": 16}
BUDGET = {"vram": "6M", "ram": "8G", "hardware": "sim"}


@pytest.fixture(scope="session")
def flux() -> Any:
    """The small FLUX."""
    return graphrun.load(GRAPHS / "flux-tiny.yaml")


@pytest.fixture
def planned_before(cached_dry_runs: Path, tmp_path: Path) -> Path:
    """A copy of `cached_dry_runs` for one test, in which outputs may be cached too."""
    return Path(
        shutil.copytree(
            cached_dry_runs, tmp_path / "cache", ignore=shutil.ignore_patterns(".new-*")
        )
    )


@pytest.fixture(scope="session")
def batch(flux: Any, cached_dry_runs: Path) -> Callable[..., Any]:
    """`graphrun.run_many` on the small FLUX."""

    def run(inputs: Sequence[Any], graph: Any = None, **options: Any) -> Any:
        arguments = {
            "cache": cached_dry_runs,
            "reuse": "none",
            "common": SMALL,
            **BUDGET,
            **options,
        }
        return graphrun.run_many(graph or flux, inputs, **arguments)

    return run


@pytest.fixture(scope="session")
def problem(flux: Any, cached_dry_runs: Path) -> Problem:
    """The problem of one run."""
    return graphrun.estimate(flux, inputs=SMALL, cache=cached_dry_runs, **BUDGET)


def sink_to(folder: Path) -> Callable[[Any, Mapping[str, Any]], list[Path]]:
    """A sink that writes the image of request 7 to ``folder/7.png``."""
    folder.mkdir(parents=True, exist_ok=True)

    def sink(request: Any, outputs: Mapping[str, Any]) -> list[Path]:
        return save_outputs(outputs, folder / f"{request.number}.png")

    return sink


@pytest.fixture(scope="session")
def sink() -> Callable[[Path], Any]:
    """`sink_to`, for tests that cannot import this file."""
    return sink_to


@pytest.fixture
def kill_run() -> Callable[[Callable[[], Any], int], bool]:
    """Runs work in another process that is killed at its n-th write to disk: after the fsync, or
    just before or after the rename.

    Returns whether the work was done before that.
    """

    def run(work: Callable[[], Any], moment: int) -> bool:
        code = _exit_code(lambda: _kill_at(moment), work)
        assert code in (0, -signal.SIGKILL), "it was neither killed nor done"
        return code == 0

    return run


@pytest.fixture
def killed_before() -> Callable[[Callable[[], Any], str], None]:
    """Runs work in another process that is killed just before the rename to a path with the given
    ending."""

    def run(work: Callable[[], Any], path: str) -> None:
        def prepare() -> None:
            replace = os.replace

            def renamed(source: Any, target: Any, **options: Any) -> None:
                if str(target).endswith(path):
                    os.kill(os.getpid(), signal.SIGKILL)
                replace(source, target, **options)

            os.replace = renamed  # type: ignore[assignment]

        assert _exit_code(prepare, work) == -signal.SIGKILL, "that file was not written"

    return run


def _exit_code(*work: Callable[[], Any]) -> int | None:
    """The exit code of another process that does all of ``work``."""
    child = get_context("fork").Process(target=lambda: [function() for function in work])
    child.start()
    child.join()
    return child.exitcode


def _kill_at(moment: int) -> None:
    count, kill_point = 0, random.Random(moment).choice(["synced", "before", "after"])
    fsync, replace = os.fsync, os.replace

    def die(point: str) -> None:
        nonlocal count
        count += point == "before"
        if count == moment and point == kill_point:
            os.kill(os.getpid(), signal.SIGKILL)

    def synced(handle: int) -> None:
        fsync(handle)
        if count + 1 == moment and kill_point == "synced":
            os.kill(os.getpid(), signal.SIGKILL)

    def renamed(source: Any, target: Any, **options: Any) -> None:
        die("before")
        replace(source, target, **options)
        die("after")

    os.fsync, os.replace = synced, renamed  # type: ignore[assignment]

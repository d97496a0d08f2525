"""Shared by all tests: no network, one thread, dry runs made once."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["OMP_NUM_THREADS"] = "1"  # of torch, which is imported later

# a busy machine must not fail a test: no test asserts seconds
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

GRAPHS = Path(__file__).parent.parent / "graphs"

# modules that tests share
sys.path[:0] = [
    str(Path(__file__).parent / name) for name in ("sweep", "docs", "ops", "runtime", "standins")
]
pytest_plugins = ["campaign"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="Write golden files again instead of comparing with them.",
    )


@pytest.fixture(scope="module", autouse=True)
def libraries_are_not_collected() -> None:
    """Exempts the million objects of imported libraries from garbage collection, which each failed
    run triggers."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def garbage_is_seldom_collected() -> Iterator[None]:
    """Collects garbage at a fiftieth of the usual rate. Each dry run asks whether objects are
    frozen, and to count those of all libraries takes a tenth of a second: here some always are."""
    thresholds, freeze_count = gc.get_threshold(), gc.get_freeze_count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", wraps(freeze_count)(lambda: 1))
        gc.set_threshold(50 * thresholds[0], *thresholds[1:])
        yield
    gc.set_threshold(*thresholds)


@pytest.fixture(scope="session", autouse=True)
def cache_home() -> Iterator[Path]:
    """Commands use a cache folder of this test session, not the user's."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        yield Path(folder)
    if cache_home is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = cache_home


@pytest.fixture(scope="session", autouse=True)
def free_ram() -> Iterator[None]:
    """The machine always has 16 GiB left: where a test gives no RAM budget, its plans do not depend
    on what else runs."""
    from graphrun import kernel_memory

    available_bytes = kernel_memory.available_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kernel_memory,
            "available_bytes",
            lambda path=kernel_memory.MEMINFO: (
                2**34 if path == kernel_memory.MEMINFO else available_bytes(path)
            ),
        )
        yield


@pytest.fixture(autouse=True)
def equal_programs_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that was solved in this process is not solved again. tests/solve solves it."""
    from answers import RememberingHighs

    monkeypatch.setattr("graphrun.solve.linear._Quiet", RememberingHighs)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder shared by all workers of a test session, for files that several processes may write
    at once."""
    base_folder = tmp_path_factory.getbasetemp()
    return base_folder.parent if "PYTEST_XDIST_WORKER" in os.environ else base_folder


@pytest.fixture(scope="session")
def cached_dry_runs(shared_folder: Path) -> Path:
    """A cache folder of dry runs and plans (not outputs) that tests share, in every process."""
    (folder := shared_folder / "dry-runs").mkdir(exist_ok=True)
    return folder


@cache
def dry_run(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """(graph, its dry run, the inputs) of ``graphs/<name>.yaml``, made once for all tests."""
    import graphrun
    from graphrun.profile.dry_run import probe

    graph = graphrun.load(GRAPHS / f"{name}.yaml")
    inputs = graph.for_planning({})
    return graph, probe(graph, inputs), inputs


def problem_for(name: str, vram: int, ram: int = 64 * 2**30, hardware: str = "sim") -> Any:
    """The problem of a reference graph within two budgets."""
    from graphrun.profile import hardware as devices
    from graphrun.profile.problems import ProblemLimits, problem_of

    graph, run, inputs = dry_run(name)
    return problem_of(graph, run, devices.hardware(hardware), ProblemLimits(vram, ram), inputs)


@pytest.fixture(scope="session")
def make_problem() -> Any:
    """`problem_for`, for tests that cannot import this file."""
    return problem_for


@pytest.fixture(scope="session")
def dry() -> Any:
    """`dry_run`, for tests that cannot import this file."""
    return dry_run


@pytest.fixture
def graphrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Runs ``graphrun ...`` in an empty folder; returns exit code, stdout, stderr."""
    from graphrun.cli import main as cli
    from graphrun.cli import terminal

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(terminal, "SOON_SECONDS", 3600.0)  # stderr is that of a quick machine
    # else a plan sets it for the tests after this one, too
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["graphrun", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        captured = capsys.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def edit_graph(tmp_path: Path) -> Callable[..., Any]:
    """The graph of a file of ``graphs/``, by name, loaded from a copy in which texts are replaced
    once each: (old, new)."""

    from graphrun.graph.loading import load

    def edit(name: str, *changes: tuple[str, str]) -> Any:
        shutil.copytree(GRAPHS, tmp_path / "graphs", dirs_exist_ok=True)
        path = tmp_path / "graphs" / f"{name}.yaml"
        text = path.read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new, 1)
        path.write_text(text)
        return load(path)

    return edit

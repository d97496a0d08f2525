"""The wheel alone, installed into an environment of its own, does in an empty folder what README
shows.

The environment sees the libraries of the one that runs the tests, and nothing of this checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import readme_commands

from graphrun.store import ship

ROOT = Path(__file__).parents[2]
# The environment without what this process was told of paths and caches.
OUTSIDE = {
    name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XDG_"))
}
BUILT_FROM = (
    "graphrun",
    "graphs",
    "packaging",
    ".gitignore",
    "CHANGELOG.md",
    "SECURITY.md",
    "constraints.txt",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
# Commands that end with an error on a machine without a CUDA device, and the error.
REFUSED = {
    'graphrun run flux-dev --vram 8G --prompt "a lighthouse"': "no CUDA device found to run on",
}

Shell = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that the package is made of, with a dry run of flux-tiny."""
    copy = tmp_path_factory.mktemp("tree")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    ship(["flux-tiny"], copy / "graphrun" / "dry_runs")
    return copy


def built_wheel(folder: Path, wheel_folder: Path) -> Path:
    """The wheel of the tree in ``folder``, built into ``wheel_folder``."""
    build = [
        "pip",
        "wheel",
        folder,
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        wheel_folder,
    ]
    subprocess.run([sys.executable, "-m", *map(str, build)], check=True)
    (built,) = wheel_folder.iterdir()
    return built


@pytest.fixture(scope="session")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with a dry run of flux-tiny."""
    return built_wheel(tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment with the wheel; its libraries are those of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run(pip, env=OUTSIDE, check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # the .pth files there are not followed
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return folder


@pytest.fixture
def shell(installed: Path, tmp_path: Path) -> Shell:
    """Runs a command line with the installed graphrun in an empty folder."""
    environment = {
        **OUTSIDE,
        "PATH": f"{installed / 'bin'}{os.pathsep}{OUTSIDE['PATH']}",
        "HOME": str(tmp_path / "home"),
    }
    (tmp_path / "empty").mkdir()

    def run(command: str) -> subprocess.CompletedProcess[str]:
        # a shell that stays: --install-completion looks for it
        command_line = [
            "bash",
            "-c",
            f"{command}; exit $?",
        ]
        return subprocess.run(
            command_line, cwd=tmp_path / "empty", env=environment, capture_output=True, text=True
        )

    return run


@pytest.mark.sweep("more")
def test_the_wheel_has_the_package_and_the_graphs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package_files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "graphrun").rglob("*.*")
        if "__pycache__" not in path.parts
    }
    (shipped,) = (name for name in names if name.startswith("graphrun/dry_runs/"))
    graphs = {
        f"graphrun/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "graphs").rglob("*.*")
    }
    assert names - {shipped} == package_files | graphs


@pytest.mark.sweep("installed")
def test_an_sdist_builds_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    code = "import build_backend, sys; print(build_backend.build_sdist(sys.argv[1]))"
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": "packaging"},
        capture_output=True,
        text=True,
        check=True,
    )
    name = process.stdout.split()[-1]
    with tarfile.open(tmp_path / name) as archive:
        archive.extractall(tmp_path, filter="data")
    sdist_wheel = built_wheel(tmp_path / name.removesuffix(".tar.gz"), tmp_path / "wheel")
    assert sdist_wheel.read_bytes() == wheel.read_bytes()


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_graph_is_planned_by_name_in_an_empty_folder_without_importing_torch(
    shell: Shell, installed: Path
) -> None:
    process = shell("python -c 'import graphrun; print(graphrun.__file__)'")
    assert process.stdout.startswith(str(installed)), process
    main = "import sys; sys.modules['torch'] = None; from graphrun.cli.main import main; main()"
    plan_process = shell(
        f'python -c "{main}" plan flux-tiny --device sim --vram 6M --ram 8G -o plan.json'
    )
    assert plan_process.returncode == 0, plan_process.stderr
    assert shell("graphrun check plan.json").stdout.startswith("ok: ")


@pytest.mark.sweep("installed")
def test_the_trained_pipeline_draws_from_the_wheel(shell: Shell, tmp_path: Path) -> None:
    process = shell(
        'graphrun run shapes --prompt "a red circle left of a blue square on white" '
        "--device sim --vram 4M -o picture.png"
    )
    assert "the run stayed within the planned memory" in process.stdout, process.stderr
    assert (tmp_path / "empty" / "picture.png").is_file()


@pytest.mark.sweep("installed")
def test_readme_as_printed(shell: Shell) -> None:
    """A minute: every command, one after the other in one folder."""
    for command in readme_commands():
        process = shell(command)
        expected = (2, REFUSED[command]) if command in REFUSED else (0, "")
        assert process.returncode == expected[0], f"{command}\n{process.stderr}"
        assert expected[1] in process.stderr
        assert "Traceback" not in process.stderr

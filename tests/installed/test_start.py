"""How one gets in: the help, the module, the shell's completion, and the interpreter that ``make``
takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import graphrun as package

ROOT = Path(__file__).parents[2]
Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("command", [(), ("plan",), ("cache", "rm")])
def test_help_has_a_short_name(graphrun: Cli, command: tuple[str, ...]) -> None:
    code, output, err = graphrun(*command, "-h")
    assert (code, err) == (0, "")
    assert output == graphrun(*command, "--help")[1] != ""


def module(folder: Path, *arguments: str, **environment: str) -> str:
    """What ``python -m graphrun`` prints in ``folder``."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "graphrun", *arguments]
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=True
    ).stdout


def test_the_module_is_the_command_and_the_shell_completes_graphs_and_files(tmp_path: Path) -> None:
    assert module(tmp_path, "--version") == f"graphrun {package.__version__}\n"
    (tmp_path / "flux-mine.yaml").touch()
    (tmp_path / "fluxes").mkdir()
    words = {
        "COMP_WORDS": "graphrun plan flux",
        "COMP_CWORD": "2",
        "_GRAPHRUN_COMPLETE": "complete_bash",
    }
    words_out = module(tmp_path, **words).split()
    graph_names = sorted(path.stem for path in (ROOT / "graphs").glob("flux*.yaml"))
    assert words_out == [*graph_names, "flux-mine.yaml", "fluxes/"]


@pytest.mark.parametrize(
    ("pythons", "made_by"),
    [
        ({"python3": 0, "python3.13": 0}, "python3.13 -m venv .venv"),
        ({"python3": 1, "python3.12": 1, "python": 0}, "python -m venv .venv"),
        ({"python3": 1}, "uv venv "),
        ({}, "uv venv "),
    ],
)
def test_make_takes_any_python_that_is_new_enough_and_uv_without_one(
    pythons: dict[str, int], made_by: str, tmp_path: Path
) -> None:
    """``pythons``: interpreters and how each answers whether it is 3.11 or newer, as an exit
    code."""
    make = shutil.which("make")
    assert make is not None
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name, code in pythons.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    process = subprocess.run(
        [make, "-n", "run"],
        cwd=tmp_path,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.startswith(made_by)


IMPORTED = """
import sys
from graphrun.cli.main import main
try:
    main()
finally:
    heavy = ("torch", "diffusers", "transformers", "scipy", "highspy", "numpy", "yaml")
    print(*(name for name in heavy if name in sys.modules), file=sys.stderr)
"""
PLAN = ("plan", "flux-tiny", "--device", "sim", "--vram", "6M", "--ram", "8G")


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize(
    ("command", "imported"),
    [(("--help",), ""), (("list",), "yaml"), (PLAN, "yaml")],
)
def test_commands_import_what_they_need(
    graphrun: Cli, command: tuple[str, ...], imported: str, tmp_path: Path
) -> None:
    """``PLAN`` is cached."""
    if command == PLAN:
        assert graphrun(*command)[0] == 0
    arguments = [sys.executable, "-c", IMPORTED, *command]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        arguments, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True
    )
    assert process.stderr.splitlines()[-1] == imported

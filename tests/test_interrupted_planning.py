"""Ctrl-C during planning: the best plan so far and how far it may be from optimal, or a sentence
that there is none."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forks import forked, forked_command

from graphrun.cli import main

FLUX = ("flux-tiny", "--device", "sim", "--vram", "6M", "--ram", "8G", "--no-cache")
# the first candidate is known when it is checked
SECOND_CANDIDATE = (
    "graphrun.solve.fastest.check",
    1,
)


@pytest.fixture(scope="module", autouse=True)
def libraries(dry: Any) -> None:
    """Those of a dry run are imported before processes are forked."""
    dry("flux-tiny")


def interrupted(
    breakpoint_line: tuple[str, int], *command: str, folder: Path
) -> subprocess.CompletedProcess[str]:
    """``graphrun COMMAND`` in a process that gets a SIGINT at the n-th call of a function."""

    def run() -> None:
        # a shell makes its background jobs ignore SIGINT
        signal.signal(signal.SIGINT, signal.default_int_handler)
        path, number = breakpoint_line
        module, _, name = path.rpartition(".")
        holder, calls = importlib.import_module(module), list[int]()
        plain = getattr(holder, name)

        def called(*arguments: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == number:
                os.kill(os.getpid(), signal.SIGINT)
            return plain(*arguments, **options)

        setattr(holder, name, called)
        sys.argv = ["graphrun", *command]
        main.main()

    process = forked(run, folder)
    assert "Traceback" not in process.stderr
    assert process.returncode == 130, process.stderr
    return process


@pytest.mark.sweep("more")
@pytest.mark.long
def test_the_best_plan_so_far_is_shown_with_its_bound_and_saved(tmp_path: Path) -> None:
    process = interrupted(SECOND_CANDIDATE, "plan", *FLUX, "-o", "plan.json", folder=tmp_path)
    assert process.stdout.startswith("fits: yes. ")
    message = (
        r"graphrun: interrupted while planning flux-tiny: this is the best plan so far, (at "
        r"most [\d.]+ % slower than the best possible plan)"
    )
    bound = re.search(rf"{message}; it is saved in plan.json\n$", process.stderr)
    assert bound is not None, process.stderr
    assert bound[1] in " ".join(process.stdout.split())
    check = forked_command("check", "plan.json", folder=tmp_path)
    assert check.stdout.startswith("ok: ")


@pytest.mark.sweep("more")
@pytest.mark.long
def test_json_says_that_planning_was_interrupted(tmp_path: Path) -> None:
    data = json.loads(
        interrupted(SECOND_CANDIDATE, "plan", *FLUX, "--json", folder=tmp_path).stdout
    )
    assert data["interrupted"]
    assert 0 < data["bound_seconds"] <= data["predicted_seconds"]


@pytest.mark.sweep("more")
@pytest.mark.long
@pytest.mark.parametrize(
    ("breakpoint_line", "command", "message"),
    [
        (
            ("graphrun.solve.solve.solved", 1),
            ("plan", *FLUX),
            "interrupted while planning flux-tiny: there is no plan yet",
        ),
        (
            ("graphrun.api.estimate", 1),
            ("plan", *FLUX),
            "interrupted (dry run of flux-tiny): there is no result yet",
        ),
        (
            ("graphrun.solve.solve.refusal", 1),
            ("plan", *FLUX, "--vram", "1M"),
            "interrupted while planning flux-tiny: no plan fits the budgets; the search for "
            "suggestions did not end",
        ),
        (
            SECOND_CANDIDATE,
            ("run", *FLUX),
            r"interrupted while planning flux-tiny: the best plan so far takes \d+ ms, at "
            r"most [\d.]+ % slower than the best possible plan; nothing was run\. "
            r"graphrun plan flux-tiny -o FILE saves such a plan",
        ),
        (
            ("graphrun.solve.pages.solved", 2),
            ("frontier", *FLUX[:3], "--vram", "3M:6M:1M", *FLUX[5:]),
            "interrupted (plans for 4 budgets): there is no result yet",
        ),
    ],
    ids=["no candidate", "dry run", "nothing fits", "run", "frontier"],
)
def test_a_sentence_says_what_was_interrupted(
    breakpoint_line: tuple[str, int], command: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    process = interrupted(breakpoint_line, *command, folder=tmp_path)
    assert process.stdout == ""
    last = process.stderr.splitlines()[-1]
    assert last == f"graphrun: {message}" or re.fullmatch(f"graphrun: {message}", last), (
        process.stderr
    )
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]

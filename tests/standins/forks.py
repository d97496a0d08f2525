"""Children of the test process: they have its libraries, whose imports take seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any


def forked(
    function: Callable[[], Any], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``function`` in a fork of this process.

    The fork's folder is ``folder``, and ``environment`` is added to its environment. Its output is
    what the process writes to its streams, not only what Python prints.
    """

    def child() -> None:
        os.chdir(folder)
        os.environ.update(environment or {})
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = (
            os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2)
        )
        function()

    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        files = (output, errors)
        process = get_context("fork").Process(target=child)
        process.start()
        process.join()
        texts = []
        for file in files:
            file.seek(0)
            texts.append(file.read().decode())
    assert process.exitcode is not None
    return subprocess.CompletedProcess((), process.exitcode, *texts)


def forked_command(
    *arguments: str, folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``graphrun ARGUMENTS`` in a fork of this process."""

    def command() -> None:
        from graphrun.cli import main

        sys.argv = ["graphrun", *arguments]
        main.main()

    return forked(command, folder, environment)

"""Lines that libraries log when they are imported, and that tell a user of graphrun nothing."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from graphrun.notices import DROPPED, without_notices

ROOT = Path(__file__).parents[1]


@pytest.mark.sweep("more")
@pytest.mark.long
def test_what_graphrun_imports_to_attach_writes_nothing() -> None:
    script = "import graphrun; graphrun.Attachment"
    process = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert (process.stdout, process.stderr) == ("", "")


@pytest.mark.parametrize("logger", DROPPED)
def test_the_line_is_dropped_and_others_of_the_same_logger_are_not(
    logger: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert DROPPED[logger] in inspect.getsource(import_module(logger)).replace(
        "{name}", ""
    ).replace("`", ""), "it is still there"
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger=logger), without_notices():
        caplog.handler.setLevel(0)
        logging.getLogger(logger).addHandler(caplog.handler)
        logging.getLogger(logger).warning(f"A: {DROPPED[logger]} B: %s", "c")
        logging.getLogger(logger).warning("another %s", "line")
        logging.getLogger(logger).removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records} == {"another line"}
    assert not logging.getLogger(logger).filters

"""Processes of the server: they end with it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

SERVER = """
import multiprocessing, time, types
from busy_child import busy
from graphrun.serve.child import _begin

if __name__ == "__main__":
    settings = types.SimpleNamespace(log_as_json=False, limits={})
    process = multiprocessing.get_context("spawn").Process(
        target=_begin, args=(busy, None, settings), daemon=True
    )
    process.start()
    print(process.pid, flush=True)
    time.sleep(600)
"""


def test_a_child_that_computes_ends_when_its_server_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        child = psutil.Process(int(server.stdout.readline()))
        assert server.stdout.readline() == "busy\n"
        assert child.is_running()
        server.kill()
        end = time.monotonic() + 60
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > end:
                child.kill()
                raise AssertionError("the child computes on without its server")
            time.sleep(0.05)

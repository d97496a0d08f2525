"""Folders of killed servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# `graphrun serve` with a server that prints its folder, and then waits
SERVE = """
import sys, time
from graphrun.cli.main import main
from graphrun.serve import server
server.serve = lambda settings, *_: (print(settings.folder, flush=True), time.sleep(600))
sys.argv = ["graphrun", "serve", "flux-tiny", "--vram", "6M", "--ram", "8G", "--device", "sim"]
main()
"""


def serve(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a server whose temporary folder is in ``folder``; return the process and it."""
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.sweep("more")
@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
def test_a_server_removes_the_folders_of_killed_servers_only(tmp_path: Path) -> None:
    names = ("graphrun-serve-note", "graphrun-other-1", "graphrun-serve-1-file", "elsewhere")
    for name in names[:2]:
        (tmp_path / name).mkdir()
    (tmp_path / names[2]).touch()
    (tmp_path / names[3]).mkdir()
    (tmp_path / "graphrun-serve-2-link").symlink_to(tmp_path / names[3])
    other_entries = {tmp_path / name for name in (*names, "graphrun-serve-2-link")}
    processes = []
    try:
        first_process, stale = serve(tmp_path)
        live_process, live = serve(tmp_path)
        processes += [first_process, live_process]
        (stale / "upload").write_text("a file of a client")
        first_process.send_signal(signal.SIGKILL)
        first_process.wait()
        assert stale.is_dir()
        next_process, next_folder = serve(tmp_path)
        processes.append(next_process)
        assert {*tmp_path.iterdir()} == other_entries | {live, next_folder}
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

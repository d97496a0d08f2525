"""Without rights for cgroups, a run on the CPU with ``--enforce`` says so and runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_without_rights_a_run_says_that_the_budget_is_not_enforced(tmp_path: Path) -> None:
    """A /proc without groups stands for a system on which none can be made."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom graphrun.cli import enforcing, main\n"
        "check = enforcing.enforceable\n"
        "proc = sys.argv.pop()\n"
        "enforcing.enforceable = lambda: check(Path(proc))\n"
        "main.main()\n"
    )
    arguments = ["run", "shapes", "--device", "cpu", "--memory", "1G", "--enforce"]
    process = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--set", "steps=1", tmp_path / "none"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("the memory budget is not enforced: no memory group can be") == 1
    assert "the kernel counted" not in process.stdout
    assert list((tmp_path / "out").glob("*.png"))

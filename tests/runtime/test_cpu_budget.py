"""Without rights for cgroups, a run on the CPU with ``--enforce`` says so and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphrun.cli import enforcing


@pytest.mark.long
def test_without_rights_a_run_says_that_the_budget_is_not_enforced(
    graphrun: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A /proc without groups stands for a system on which none can be made."""
    check = enforcing.enforceable
    monkeypatch.setattr(enforcing, "enforceable", lambda: check(tmp_path / "none"))
    code, screen, notes = graphrun(
        *("run", "shapes", "--device", "cpu", "--memory", "1G", "--enforce", "--set", "steps=1")
    )
    # 4: plans are for a new process, and this one takes more
    assert code in (0, 4), notes
    assert notes.count("the memory budget is not enforced: no memory group can be") == 1
    assert "the kernel counted" not in screen
    assert list((tmp_path / "out").glob("*.png"))

"""Every row of the table in docs/scenarios.md has a test of graphrun and one of another tool, and every such test has a row."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def numbers(text: str, pattern: str) -> set[str]:
    return {f"S{stage}.{number}" for stage, number in re.findall(pattern, text)}


def test_every_scenario_has_a_test_of_its_own_and_one_of_what_another_tool_does() -> None:
    listed = re.findall(r"^\| (S\d\.\d) ", (ROOT / "docs/scenarios.md").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed)) == 24
    own, others = set[str](), set[str]()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"^def (test_s\d_\d\w+)", path.read_text(), re.MULTILINE):
            found = numbers(name, r"(?<=_)s(\d)_(\d)(?=_)")
            if "_under_" in name:
                others |= found
            else:
                own |= found
    assert own == others == set(listed)

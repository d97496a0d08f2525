"""Every test that tests/PROMISES.md names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "tests" / "PROMISES.md"


@cache
def names_in(file: str) -> set[str]:
    path = ROOT / file
    tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_each_test_of_a_promise_exists() -> None:
    references = re.findall(r"`(tests/[^`:]+)::([^`]+)`", DOCUMENT.read_text())
    assert references
    assert [f"{file}::{name}" for file, name in references if name not in names_in(file)] == []


def test_each_promise_has_a_test() -> None:
    rows = DOCUMENT.read_text().partition("## Not tested")[0].splitlines()
    promises = [row for row in rows if row.startswith(("- ", "| ")) and row[:3] != "| |"]
    assert promises
    assert [row for row in promises if "::test_" not in row] == []

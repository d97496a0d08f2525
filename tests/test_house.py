"""Rules of the source that no linter checks. import-linter checks imports, ruff docstrings and prints (pyproject.toml)."""

from __future__ import annotations

import ast
from pathlib import Path

FILES = sorted((Path(__file__).parent.parent / "graphrun").rglob("*.py"))


def test_no_mutable_state_at_module_level() -> None:
    found = []
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, (ast.List, ast.Dict, ast.Set)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                found += [f"{path}:{node.lineno} {name}" for name in names if not name.isupper() and name != "__all__"]
    assert not found

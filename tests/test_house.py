"""Rules of the source that no linter checks. import-linter checks imports, ruff docstrings and
prints (pyproject.toml)."""

from __future__ import annotations

import ast
from pathlib import Path

FILES = sorted((Path(__file__).parent.parent / "graphrun").rglob("*.py"))


def test_no_mutable_state_at_module_level() -> None:
    faults = []
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(
                node.value, (ast.List, ast.Dict, ast.Set)
            ):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                faults += [
                    f"{path}:{node.lineno} {name}"
                    for name in names
                    if not name.isupper() and name != "__all__"
                ]
    assert not faults


def test_text_files_are_utf_8_by_name() -> None:
    """On Windows the default is another encoding, in which a page or a screen cannot be written."""
    faults, module_names = [], ("planfile", "reading")  # modules with functions of these names
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=value, attr="read_text" | "write_text"),
                    keywords=keywords,
                ):
                    if (
                        "encoding" not in {keyword.arg for keyword in keywords}
                        and getattr(value, "id", "") not in module_names
                    ):
                        faults.append(f"{path}:{node.lineno}")
    assert not faults

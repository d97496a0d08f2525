"""The house rules of the design, read from the source: which room may import which, and what no file may hold."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "graphrun"
FILES = sorted(ROOT.rglob("*.py"))
BASE = {"units", "errors", "trace"}
MAY_IMPORT = {
    "units": {"errors"},
    "errors": set(),
    "trace": set(),
    "files": set(),
    "planner": BASE,
    "graph": BASE,
    "sim": BASE,
    "components": BASE | {"graph", "planner"},
    "ops": BASE | {"graph", "planner", "components"},
    "estimator": BASE | {"graph", "planner", "components", "ops", "sim"},
    "executor": BASE | {"graph", "planner", "components", "ops", "sim"},
    "report": BASE | {"files", "planner"},
    "outputs": BASE | {"graph", "planner", "components"},
    "repeat": BASE | {"files", "graph", "planner", "components", "ops", "executor", "outputs"},
}
PURE = {
    "planner": {"torch", "pydantic", "yaml", "time", "os", "datetime", "random"},
    "graph": {"torch", "diffusers", "transformers", "time", "os"},
}


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else path.stem


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_import_runs_back(path: Path) -> None:
    allowed = MAY_IMPORT.get(room(path))
    if allowed is None:
        return  # cli, __init__, __main__, integrations see all
    inside = {name.split(".")[1] for name in imports(path) if name.startswith("graphrun.")}
    assert inside <= allowed | {room(path)}, f"{path}: {inside - allowed - {room(path)}}"


@pytest.mark.parametrize("path", [p for p in FILES if room(p) in PURE], ids=lambda p: str(p.relative_to(ROOT)))
def test_pure_rooms_import_nothing_from_outside_their_subject(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & PURE[room(path)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_are_short(path: Path) -> None:
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions(path) if f.end_lineno and f.end_lineno - f.lineno + 1 > 60}
    assert not long


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_public_definition_has_a_docstring(path: Path) -> None:
    module = tree(path)
    assert ast.get_docstring(module), "a file starts with what it decides and what it must not know"
    bare = [
        node.name
        for node in module.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert not bare


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_print_no_environment_no_bare_except_no_replaced_forward(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
            pytest.fail(f"{path}:{node.lineno}: print; only cli.py speaks, through typer.echo")
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"} and path.name not in ("cli.py", "cuda.py"):
            pytest.fail(f"{path}:{node.lineno}: the environment is read outside cli.py, and cuda.py for torch's own variables")
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            pytest.fail(f"{path}:{node.lineno}: bare except")
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Attribute) and t.attr == "forward" for t in node.targets):
            pytest.fail(f"{path}:{node.lineno}: a forward is replaced")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_mutable_state_at_module_level(path: Path) -> None:
    for node in tree(path).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, (ast.List, ast.Dict, ast.Set)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            assert all(name.isupper() or name == "__all__" for name in names), f"{path}:{node.lineno}: mutable state {names}"
    assert not [node for node in ast.walk(tree(path)) if isinstance(node, ast.Global)]

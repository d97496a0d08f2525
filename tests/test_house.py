"""Rules of the source that no linter checks. import-linter checks imports, ruff docstrings and
prints (pyproject.toml)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from graphrun import device_kinds

FILES = sorted((Path(__file__).parent.parent / "graphrun").rglob("*.py"))


@pytest.mark.sweep("more")
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


@pytest.mark.sweep("more")
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


KIND_NAMES = frozenset(kind.name for kind in device_kinds.built_in())
# The table itself; what is registered with PyTorch under a name; the module of each kind.
KIND_MODULES = ("device_kinds.py", "sim/", "runtime/devices/")


def _kinds_in(nodes: Iterable[ast.AST | None]) -> set[str]:
    return {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    } & KIND_NAMES


def kind_lists(source: str) -> list[int]:
    """The lines with a list of kinds of devices, or with a comparison with the name of one.

    "cpu" alone is also PyTorch's name of the host, with which tensors are compared.
    """
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                is_list = len(_kinds_in(items)) > 1
            case ast.Dict(keys=keys):
                is_list = len(_kinds_in(keys)) > 1
            case ast.Compare(left=first_side, comparators=sides):
                texts = [ast.unparse(side) for side in (first_side, *sides)]
                names = _kinds_in([first_side, *sides])
                is_list = bool(names - {"cpu"}) or (
                    bool(names)
                    and any(re.search(r"hardware|kind|card|\bdevice\.name", text) for text in texts)
                )
            case ast.MatchValue(value=value):
                is_list = bool(_kinds_in([value]))
            case _:
                is_list = False
        if is_list:
            lines.append(node.lineno)  # type: ignore[attr-defined]
    return lines


def test_kinds_of_devices_stand_in_one_table() -> None:
    package = Path(__file__).parent.parent / "graphrun"
    faults = [
        f"{path}:{line}"
        for path in FILES
        if not path.relative_to(package).as_posix().startswith(KIND_MODULES)
        for line in kind_lists(path.read_text(encoding="utf-8"))
    ]
    assert not faults


@pytest.mark.parametrize(
    "source",
    [
        'KINDS = ("cuda", "sim")',
        'Device = Literal["cuda", "cpu"]',
        'if hardware.device == "sim": pass',
        'if hardware["device"] == "cpu": pass',
        'if kind in ("xpu",) or kind == "mps": pass',
        'clock = {"sim": 1, "cpu": 2}[device]',
        'match kind:\n case "cuda": pass',
    ],
)
def test_lists_of_kinds_are_seen(source: str) -> None:
    assert kind_lists(source)
    assert not kind_lists('tensor.device.type != "cpu" or tensor.to("cuda")')

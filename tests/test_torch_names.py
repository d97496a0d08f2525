"""Private names of PyTorch that graphrun uses are there in the oldest version that it allows, or
asked for with a default.

``torch_2_11_private_names.txt`` lists the names with the file that defines each in that version's
wheel (torch-2.11.0-cp312-cp312-macosx_11_0_arm64.whl). A new name is looked up there before it is
listed.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from graphrun.runtime.devices import cuda

ROOT = Path(__file__).parent.parent
LISTED = Path(__file__).with_name("torch_2_11_private_names.txt")
OF_OBJECTS = (
    nn.Module(),
    torch.empty(0),
    torch.empty(0).untyped_storage(),
    torch.ops.aten.add.Tensor,
    torch.ops.aten,
)


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def names_in(source: str) -> Iterator[str]:
    """Dotted names below ``torch``, and ``*.name`` for a private attribute that PyTorch's objects
    have."""
    bound = {"torch": "torch"}
    nodes = list(ast.walk(ast.parse(source)))
    for node in nodes:
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "torch"
        ):
            for alias in node.names:
                bound[alias.asname or alias.name] = name = f"{node.module}.{alias.name}"
                yield name
    longer = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if not isinstance(node, ast.Attribute):
            continue
        path, base = [node.attr], node.value
        while isinstance(base, ast.Attribute):
            path.append(base.attr)
            base = base.value
        if isinstance(base, ast.Name) and base.id in bound:
            if id(node) not in longer:
                yield ".".join([bound[base.id], *reversed(path)])
        elif (
            is_private(node.attr)
            and any(hasattr(kind, node.attr) for kind in OF_OBJECTS)
            and not is_own(base)
        ):
            yield f"*.{node.attr}"


def is_own(base: ast.expr) -> bool:
    return isinstance(base, ast.Name) and base.id in ("self", "cls")


def used() -> set[str]:
    files = [
        path for folder in ("graphrun", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    ]
    return {name for path in files for name in names_in(path.read_text()) if is_private(name)}


def listed() -> set[str]:
    return {line.split()[0] for line in LISTED.read_text().splitlines() if line}


@pytest.mark.parametrize("oldest", [False, True])
def test_expandable_segments_are_added_to_the_settings_of_the_process(
    oldest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = torch._C._accelerator_getAllocatorSettings()
    read_settings = torch._C._accelerator_getAllocatorSettings
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:128")
    try:
        if oldest:  # torch 2.11 has no such function
            monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
            monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
        cuda._request_expandable_segments()
        assert read_settings() == "max_split_size_mb:128,expandable_segments:True"
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


@pytest.mark.sweep("more")
def test_every_private_name_of_torch_is_in_the_oldest_version_allowed() -> None:
    assert used() == listed()
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert "torch>=2.11,<3" in required, (
        "the list is of 2.11: make it again from the version that is the oldest now"
    )

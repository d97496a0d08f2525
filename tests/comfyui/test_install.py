"""``graphrun comfyui install``: a line in ComfyUI's folder, and nobody else's files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import comfy_standin
import pytest
from typer.testing import CliRunner

from graphrun.cli import main
from graphrun.comfyui.install import install, remove
from graphrun.errors import InputError


@pytest.fixture
def comfyui(tmp_path: Path) -> Path:
    """A folder like ComfyUI's."""
    folder = tmp_path / "ComfyUI"
    (folder / "comfy").mkdir(parents=True)
    (folder / "custom_nodes" / "another-pack").mkdir(parents=True)
    for name in ("main.py", "nodes.py"):
        (folder / name).touch()
    return folder


def run(*words: str) -> Any:
    return CliRunner().invoke(main.app, ["comfyui", "install", *words])


def test_one_line_loads_the_nodes(comfyui: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(str(comfyui))
    assert result.exit_code == 0
    init = comfyui / "custom_nodes" / "graphrun" / "__init__.py"
    assert f"wrote {init}" in result.stdout
    assert re.search(
        r"next: in ComfyUI's Python, pip install .*; then start ComfyUI again", result.stdout
    )
    (line,) = init.read_text().splitlines()
    assert "; from graphrun.comfyui.pack import *  #" in line
    comfy_standin.install(monkeypatch)
    monkeypatch.setenv("GRAPHRUN_URL", "http://127.0.0.1:9")
    monkeypatch.delitem(sys.modules, "graphrun.comfyui.pack", raising=False)
    names: dict[str, Any] = {}
    exec(init.read_text(), names)
    sys.modules.pop("graphrun.comfyui.pack", None)
    assert callable(names["comfy_entrypoint"])


def test_versions_that_call_the_folder_graphrun_find_the_package(comfyui: Path) -> None:
    """In a process of its own, where this module replaces the package."""
    install(comfyui)
    code = (
        "import importlib.util, sys\n"
        f"file = {str(comfyui / 'custom_nodes' / 'graphrun' / '__init__.py')!r}\n"
        "spec = importlib.util.spec_from_file_location('graphrun', file)\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['graphrun'] = module\n"
        "spec.loader.exec_module(module)\n"
        "print(*module.NODE_CLASS_MAPPINGS)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["GraphrunServer", "GraphrunLocal"]


def test_workflows_are_where_comfyui_looks_for_templates(comfyui: Path) -> None:
    paths = install(comfyui)
    folder = comfyui / "custom_nodes" / "graphrun" / "example_workflows"
    assert {path.name for path in folder.iterdir()} == {
        "graphrun-in-process.json",
        "graphrun-server.json",
    }
    assert set(folder.iterdir()) < set(paths)


def test_installing_again_writes_the_same(comfyui: Path) -> None:
    assert install(comfyui) == install(comfyui)
    assert len(list((comfyui / "custom_nodes" / "graphrun").iterdir())) == 2


@pytest.mark.parametrize(
    ("place", "hint"),
    [
        ("", "did you mean {comfyui}?"),
        ("ComfyUI/custom_nodes", "did you mean {comfyui}?"),
        ("elsewhere", "type the folder that you start ComfyUI in"),
    ],
)
def test_another_folder_is_refused(comfyui: Path, place: str, hint: str) -> None:
    folder = comfyui.parent / place
    with pytest.raises(InputError, match=re.escape(hint.format(comfyui=comfyui))) as refusal:
        install(folder)
    assert str(refusal.value).startswith(f"{folder} is not ComfyUI's folder, which has main.py")
    assert not (comfyui / "custom_nodes" / "graphrun").exists()


@pytest.mark.parametrize("name", ["__init__.py", "README.md"])
def test_files_of_another_pack_stay(comfyui: Path, name: str) -> None:
    file = comfyui / "custom_nodes" / "graphrun" / name
    file.parent.mkdir()
    file.write_text("NODE_CLASS_MAPPINGS = {}")
    for change in (install, remove):
        with pytest.raises(InputError, match="is not from graphrun comfyui install; move it away"):
            change(comfyui)
    assert file.read_text() == "NODE_CLASS_MAPPINGS = {}"
    assert list(file.parent.iterdir()) == [file]


def test_remove_leaves_what_it_did_not_write(comfyui: Path) -> None:
    paths = install(comfyui)
    target = comfyui / "custom_nodes" / "graphrun"
    (target / "__pycache__").mkdir()
    (target / "__pycache__" / "__init__.cpython-312.pyc").touch()
    note = target / "example_workflows" / "mine.json"
    note.touch()
    result = run(str(comfyui), "--remove")
    assert result.stdout.splitlines() == [
        *(f"removed {path}" for path in paths),
        "next: start ComfyUI again",
    ]
    assert [path for path in target.rglob("*") if path.is_file()] == [note]
    note.unlink()
    note.parent.rmdir()
    install(comfyui)
    remove(comfyui)
    assert not target.exists()
    with pytest.raises(InputError, match="the nodes are not installed here"):
        remove(comfyui)

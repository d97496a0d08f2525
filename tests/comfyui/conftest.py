"""Nodes in a process that has the stand-in of ComfyUI."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import comfy_standin
import pytest

from graphrun.comfyui.engine import LocalEngine
from graphrun.comfyui.nodes import LocalNode

GRAPHS = Path(__file__).parents[2] / "graphs"
# a small FLUX at its smallest, which is planned and drawn in a second
SMALL = (
    ("default: 128", "default: 32"),
    ("default: 4,", "default: 3,"),
    ("default: 64,", "default: 16,"),
)


@pytest.fixture
def comfy_ui(monkeypatch: pytest.MonkeyPatch) -> comfy_standin.ComfyUI:
    return comfy_standin.install(monkeypatch)


@pytest.fixture
def node(comfy_ui: comfy_standin.ComfyUI, tmp_path: Path) -> Iterator[LocalNode]:
    """The node of a new process."""
    engine = LocalEngine(tmp_path / "cache")
    yield LocalNode(engine)
    engine.close()


@pytest.fixture(scope="session")
def small_flux(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A graph file."""
    folder = tmp_path_factory.mktemp("graphs")
    shutil.copytree(GRAPHS, folder / "graphs")
    file = folder / "graphs" / "flux-tiny.yaml"
    text = file.read_text()
    for default, small_default in SMALL:
        assert default in text
        text = text.replace(default, small_default)
    file.write_text(text)
    return str(file)

"""docs/graphs.md is current: its components' sizes are those of the graphs, and it has every reference graph."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "graphs.md"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "standins"))
    return importlib.import_module("graph_table")


def test_every_graph_at_true_size_has_its_rows_and_nothing_else_stands_there(table: Any) -> None:
    graphs = {path.stem for path in (ROOT / "graphs").glob("*.yaml") if not path.stem.endswith("-tiny")}
    assert set(table.NAMES) == graphs
    rows = table.lines_of(DOCUMENT.read_text())
    assert set(rows) == graphs
    assert table.document(rows) == DOCUMENT.read_text()


@pytest.mark.parametrize("name", ["flux-dev", "sd3", "cogview4", "hunyuan-dit", "pyramid-flow"])
def test_its_sizes_are_those_of_the_components(table: Any, name: str) -> None:
    assert table.lines_of(DOCUMENT.read_text())[name][0] == table.component_line(name)

"""The table of docs/precision.md is that of the recorded results, and the quantized pipeline still
draws."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def precision(monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in ("benchmarks", "training"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module("precision")


def test_the_documented_table_is_that_of_the_results(precision: Any) -> None:
    results = json.loads(precision.RESULTS.read_text(encoding="utf-8"))
    assert precision.table(results) in precision.DOCS.read_text(encoding="utf-8")


@pytest.mark.sweep("shapes")
def test_the_results_are_those_of_the_pipeline(precision: Any) -> None:
    """Within two pictures of a kind: other versions of the libraries round differently."""
    recorded = json.loads(precision.RESULTS.read_text(encoding="utf-8"))["rows"]
    for row, actual in zip(recorded, precision.measured(None), strict=True):
        assert actual["name"] == row["name"]
        assert (actual["one"], actual["two"]) == pytest.approx(
            (row["one"], row["two"]), abs=0.011
        ), row["name"]

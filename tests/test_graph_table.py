"""docs/graphs.md has every reference graph, with the weights, times and peaks that graphrun
computes for it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from campaign import sampled

from graphrun.solve.linear import ROUGH_GAP

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "graphs.md").read_text()
LEFT_OUT = ("shapes", "pyramid-flow")  # trained here; code that is no package
GRAPHS = sorted(
    path.stem
    for path in (ROOT / "graphs").glob("*.yaml")
    if not path.stem.endswith("-tiny") and path.stem not in LEFT_OUT
)
SAMPLE = ("cogview4", "sd3")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("graph_table")


@pytest.mark.parametrize("name", sampled(GRAPHS, SAMPLE, "graphs"))
def test_the_documented_sizes_are_those_of_the_components(table: Any, name: str) -> None:
    assert table.weights_cell(name) == table.cells_of(TEXT)[name][-1]


@pytest.mark.parametrize("name", sampled(GRAPHS, ("sd3",), "graphs"))
def test_the_listed_figures_are_those_of_the_table(table: Any, name: str) -> None:
    assert json.loads((ROOT / "graphs" / "figures.json").read_text())[name] == table.figures(
        name, table.cells_of(TEXT)[name]
    )


@pytest.mark.sweep("graphs", of_all=18)
@pytest.mark.parametrize("name", GRAPHS)
def test_the_documented_times_and_peaks_are_predicted(table: Any, name: str) -> None:
    assert table.plan_cells(name) == table.cells_of(TEXT)[name][:-1]


def test_the_documented_choices_are_those_that_were_measured(table: Any) -> None:
    assert table.folded(table.fits_table()).strip() in TEXT


def test_no_choice_is_worse_with_more_memory_or_takes_the_systems(table: Any) -> None:
    """Seconds of the same format rise by no more than the gap of the search."""
    rows = json.loads(table.FITS.read_text())
    assert len(rows) == len(table.FIT_NAMES) * len(table.FIT_CARDS) * len(table.FIT_RAM)
    seconds: dict[tuple[str, str, str], float] = {}
    for row in rows:
        for best in row["choices"]:
            assert best["enough_ram_bytes"] <= (row["ram_gib"] - 4) * 2**30
            assert best["enough_vram_bytes"] <= table.FIT_CARDS[row["card"]] * 2**30
            assert best["download_bytes"] > 5e9
            key = row["graph"], row["card"], str(best["allow"])
            assert best["seconds"] <= (1 + ROUGH_GAP) * seconds.get(key, best["seconds"]), row
            seconds[key] = min(best["seconds"], seconds.get(key, best["seconds"]))


def test_the_page_of_small_cards_counts_the_graphs_and_machines_of_the_table(table: Any) -> None:
    page = (ROOT / "docs" / "howto" / "small-card.md").read_text()
    assert (len(table.FIT_NAMES), len(table.FIT_CARDS) * len(table.FIT_RAM)) == (9, 9)
    assert "[nine graphs on nine machines](../graphs.md#on-cards-that-people-have)" in page

"""The table of modular pipelines in `docs/pipelines.md` is that of the recorded results."""

from __future__ import annotations

from class_lists import DOCUMENT, MODULAR_HEAD, modular_counts, modular_rows, rows_below


def test_the_table_of_modular_pipelines_is_that_of_the_results() -> None:
    assert rows_below(MODULAR_HEAD) == list(modular_rows())


def test_the_counts_of_modular_pipelines_are_those_of_the_results() -> None:
    assert modular_counts() in DOCUMENT.read_text().replace("\n", " ")

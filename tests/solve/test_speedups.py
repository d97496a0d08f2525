"""Suggestions for plans that fit and mostly wait: each change is solved for."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from planner_problems import GIB, flux
from planner_real import with_backing_stores

from graphrun.model.problem import ComponentNumbers, Problem
from graphrun.report.precisions import MEASURED, PLAIN, precision_lines
from graphrun.report.screen import Look
from graphrun.report.whatif_screens import suggestions_screen
from graphrun.solve.solve import solve
from graphrun.solve.suggestions import Suggestion, leading, speedups, thorough, worthwhile

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "precision.json"


def from_disk(vram_gib: int, steps: int = 28) -> Problem:
    """FLUX with 8 GiB of RAM, which do not hold its weights, from files of 32 bits."""
    problem = with_backing_stores(flux(vram_gib * GIB, steps), 8)

    def wide(component: ComponentNumbers) -> ComponentNumbers:
        variants = [
            replace(
                variant,
                read_bytes=tuple(2 * nbytes for nbytes in component.variants[0].block_bytes),
                read_seconds=tuple(2 * seconds for seconds in variant.read_seconds),
                disk_seconds=tuple(2 * seconds for seconds in variant.disk_seconds),
            )
            for variant in component.variants
        ]
        return replace(component, variants=tuple(variants))

    return replace(problem, components=tuple(map(wide, problem.components)))


@pytest.mark.sweep("more")
@pytest.mark.long
def test_what_would_help_a_slow_plan_is_solved_for_and_can_be_typed() -> None:
    problem = from_disk(8, steps=8)
    solution = solve(problem)
    assert solution.slow
    suggestions = worthwhile(speedups(problem, ()), solution)
    suggestion_by_change = {
        " ".join(word for pair in suggestion.change for word in pair): suggestion
        for suggestion in suggestions
    }
    assert {"--ram 21G", "--allow fp8"} <= {
        name.replace(str(21 * GIB), "21G") for name in suggestion_by_change
    }
    assert [suggestion.changes_output for suggestion in suggestions] == sorted(
        suggestion.changes_output for suggestion in suggestions
    )
    assert all(
        suggestion.seconds <= 0.9 * solution.simulation.total_seconds for suggestion in suggestions
    )
    ample_seconds = solve(replace(problem, ram_bytes=21 * GIB)).simulation.total_seconds
    assert suggestion_by_change[f"--ram {21 * GIB}"].seconds == pytest.approx(
        ample_seconds, rel=0.02
    )
    screen = suggestions_screen(solution, suggestions, Look())
    assert "\n --ram 21G " in screen
    assert max(map(len, screen.splitlines())) <= 80
    assert re.search(r"--allow fp8 +[\d.]+ s  changes the output\n", screen)
    assert screen.endswith(" --explain more searches for further suggestions")
    best = leading(suggestions, problem.hardware.capacity_bytes)
    assert best is not None
    assert best.change == (("--allow", "fp8"),), "no RAM that the machine does not have"
    assert "in fp8 97.5% and 96.0%, PSNR 50.5 dB" in " ".join(screen.split())


@pytest.mark.sweep("more")
@pytest.mark.long
def test_suggestions_end_with_their_budget_of_work_unless_the_search_is_thorough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = from_disk(8, steps=8)
    everything = list(speedups(problem, ()))
    monkeypatch.setattr("graphrun.solve.suggestions.ATTEMPTS", 1)
    assert len(list(speedups(problem, ()))) < len(everything)
    with thorough():
        exact = list(speedups(problem, ()))
    assert [item.change for item in exact] == [item.change for item in everything]
    assert all(
        item.seconds <= rough.seconds <= 1.03 * item.seconds
        for item, rough in zip(exact, everything, strict=True)
    )


def test_the_leading_suggestion_needs_no_new_hardware_and_can_be_typed() -> None:
    suggestions = [
        Suggestion("more RAM", (("--ram", str(32 * GIB)),), 1.0),
        Suggestion("a larger card", (("--vram", str(48 * GIB)),), 1.0),
        Suggestion("apart", (("--until", "encode"),), 1.0),
        Suggestion("no directive", (("--keep", ""),), 1.0),
        Suggestion("nf4", (("--allow", "nf4"),), 10.0, changes_output=True),
        Suggestion("all of the card", (("--vram", str(12 * GIB)),), 11.0),
    ]
    best = leading(suggestions, 12 * GIB)
    assert best is not None
    assert best.text == "all of the card", "the output stays, for a tenth more time"
    assert leading(suggestions[:4], 12 * GIB) is None


def test_a_plan_that_mostly_computes_gets_no_suggestions() -> None:
    for steps in (4, 28):
        assert not solve(flux(24 * GIB, steps=steps)).slow


def test_the_figures_of_precisions_are_those_measured() -> None:
    rows = {row["name"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]}
    assert (rows["bf16"]["one"], rows["bf16"]["two"]) == PLAIN
    assert {
        name: (rows[name]["one"], rows[name]["two"], round(rows[name]["psnr"], 1))
        for name in MEASURED
    } == MEASURED
    assert precision_lines(("tiling", "cpu")) == []

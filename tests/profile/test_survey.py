"""The data of ``graphrun estimate``: every number has its basis and equals the problem's."""

from __future__ import annotations

from typing import Any

import pytest

from graphrun.profile.hardware import hardware
from graphrun.profile.problems import ProblemLimits, problem_of
from graphrun.profile.recording import DryRun
from graphrun.profile.survey import survey
from graphrun.report.estimate_screen import estimate_screen
from graphrun.report.screen import Look


@pytest.fixture(scope="module")
def flux(dry: Any) -> dict[str, Any]:
    graph, dry_run, inputs = dry("flux-dev")
    return survey(graph, dry_run, hardware("rtx4090"), inputs)


def test_weights_are_exact_in_the_declared_precision_and_by_formula_in_others(
    flux: dict[str, Any],
) -> None:
    transformer = next(row for row in flux["components"] if row["name"] == "transformer")
    assert transformer["parameters"] == 11_901_408_320
    assert transformer["weights"]["bfloat16"]["bytes"] == pytest.approx(
        2 * transformer["parameters"], rel=1e-4
    )
    assert transformer["weights"]["nf4"]["bytes"] == pytest.approx(
        0.5625 * transformer["parameters"], rel=2e-3
    )
    assert {p: w["basis"] for p, w in transformer["weights"].items()} == {
        "float32": "graph file",
        "bfloat16": "graph file",
        "float16": "graph file",
        "fp8": "formula",
        "int8": "formula",
        "nf4": "formula",
        "int8wo": "formula",
        "fp8wo": "formula",
    }
    assert [p for p, w in transformer["weights"].items() if w["allowed"]] == [
        "bfloat16",
        "int8",
        "nf4",
    ]


def test_a_phase_reserves_more_than_it_allocates_and_native_segments_most(
    flux: dict[str, Any],
) -> None:
    for phase in flux["phases"]:
        assert phase["allocated_bytes"] <= phase["reserved_bytes"]
    denoise = next(phase for phase in flux["phases"] if phase["stage"] == "denoise")
    assert denoise["reserved_native_bytes"] > 1.5 * denoise["reserved_bytes"]
    assert denoise["reserved_bytes"] < 1.3 * denoise["allocated_bytes"]
    assert (denoise["basis"], denoise["seconds_basis"]) == ("traced", "data sheet")
    assert denoise["flops"] / 28 == pytest.approx(59.5e12 + 14.9e12, rel=0.01)


def test_the_estimate_shows_the_numbers_of_the_problem(dry: Any, flux: dict[str, Any]) -> None:
    graph, dry_run, inputs = dry("flux-dev")
    problem = problem_of(
        graph, dry_run, hardware("rtx4090"), ProblemLimits(8 * 2**30, 2**36), inputs
    )
    for number, (phase, row) in enumerate(zip(problem.phases, flux["phases"], strict=True)):
        activation_bytes = (
            problem.value_bytes(number)
            + phase.input_bytes
            + max(phase.first_bytes, phase.steady_bytes)
        )
        assert row["allocated_bytes"] == activation_bytes
        assert row["phase"] == phase.name


def test_a_dry_run_read_back_gives_the_same_survey(dry: Any, flux: dict[str, Any]) -> None:
    graph, dry_run, inputs = dry("flux-dev")
    assert survey(graph, DryRun.from_json(dry_run.to_json()), hardware("rtx4090"), inputs) == flux


def test_the_screen_has_a_row_for_each_component_and_phase(flux: dict[str, Any]) -> None:
    lines = estimate_screen(flux, Look(verbose=True)).splitlines()
    assert lines[0].startswith(
        "needs 34.8 GiB with everything on the device: does not fit on rtx4090 (24 GiB);"
    )
    assert any(line.startswith("estimate flux-dev  ") for line in lines)
    assert any(
        line.startswith(" transformer ") and "22.17*" in line and "19 + 38" in line
        for line in lines
    )
    assert sum("traced, data sheet" in line for line in lines) == 4


def test_on_sim_reserved_bytes_equal_allocated_bytes(dry: Any) -> None:
    graph, dry_run, inputs = dry("sdxl-tiny")
    estimate = survey(graph, dry_run, hardware("sim"), inputs)
    assert estimate["corrections"] == []
    for phase in estimate["phases"]:
        assert phase["allocated_bytes"] == phase["reserved_bytes"] == phase["reserved_native_bytes"]


def test_pytorch_reserves_what_earlier_phases_left(flux: dict[str, Any]) -> None:
    """A pipeline returns nothing between its phases: VAE decoding comes on top of what denoising
    cached, in segments that it cannot use."""
    mode = flux["mode"]
    denoise, decode = flux["phases"][-2:]
    assert mode["reserved_bytes"] > mode["peak_bytes"] - flux["hardware"]["context_bytes"]
    assert decode["reserved_native_bytes"] > denoise["reserved_native_bytes"]
    workspace_bytes = flux["hardware"]["workspace_bytes"]
    assert mode["reserved_bytes"] == (
        mode["weights_bytes"] + workspace_bytes + decode["reserved_native_bytes"]
    )

"""The side-by-side runs tiny: cells are what they say, the report says who is behind, the
peers' defects still show."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrun.profile.hardware import hardware

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
DEFECTS = sorted(path.stem for path in (BENCHMARKS / "defects").glob("*.py") if path.stem != "show")


@pytest.fixture(scope="module")
def part() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for folder in (BENCHMARKS, BENCHMARKS / "defects"):
            patch.syspath_prepend(str(folder))
        yield importlib.import_module


TOOLS = [
    "diffusers model offload",
    "diffusers group offload, leaf, stream",
    "mmgp",
    "graphrun",
    "graphrun, session of 2",
]


@pytest.fixture(scope="module")
def bench(part: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of the command itself: one model, four tools, three caps, each cell in a process
    of its own."""
    peers = part("peers")
    results_file = tmp_path_factory.mktemp("peers") / "peers.json"
    new_bench = bench_of(peers, results_file)
    new_bench.model("hidream")
    return dict(json.loads(results_file.read_text()))


def bench_of(peers: Any, results_file: Path, *options: str) -> Any:
    new_bench = peers.Bench(
        peers.options(["--models", "hidream", "--jobs", "2", "--out", str(results_file), *options]),
        str(results_file.parent),
    )
    new_bench.tools = TOOLS
    new_bench.caps = lambda facts: [1 << 19, facts["graphrun_smallest_bytes"], 3 << 20]
    return new_bench


def cells(bench: dict[str, Any], tool: str, kind: str = "run") -> list[dict[str, Any]]:
    return [
        c
        for c in bench["cells"]
        if c["tool"] == tool and c["kind"] == kind and c["ram_bytes"] is None
    ]


@pytest.mark.sweep("peers")
def test_every_cell_that_finishes_keeps_its_cap_and_has_the_resident_output(
    bench: dict[str, Any],
) -> None:
    finished = [c for c in bench["cells"] if c["status"] == "finished"]
    assert len(finished) >= 6
    for cell in finished:
        assert cell["equal"] is True
        assert len(cell["runs"]) == 2
        assert cell["cap_bytes"] is None or all(
            run["peak_bytes"] <= cell["cap_bytes"] for run in cell["runs"]
        )


@pytest.mark.sweep("peers")
def test_what_does_not_look_at_the_cap_finishes_from_its_peak_on_and_runs_out_below_it(
    bench: dict[str, Any],
) -> None:
    free, *capped = cells(bench, "diffusers model offload")
    peak = max(run["peak_bytes"] for run in free["runs"])
    assert {cell["status"] for cell in capped if cell["cap_bytes"] < peak} == {"oom"}
    larger_cells = [cell for cell in capped if cell["cap_bytes"] >= peak]
    assert [cell["runs"] for cell in larger_cells] == [free["runs"]] * len(larger_cells)


@pytest.mark.sweep("peers")
def test_model_offload_leaves_an_encoder_and_peaks_higher_the_second_time_and_graphrun_does_neither(
    bench: dict[str, Any],
) -> None:
    offload, graphrun_runs = (
        cells(bench, "diffusers model offload")[0]["runs"],
        cells(bench, "graphrun")[0]["runs"],
    )
    assert offload[1]["peak_bytes"] > offload[0]["peak_bytes"]
    assert offload[0]["left_bytes"] > 0
    assert graphrun_runs[0] == graphrun_runs[1] | {"seconds": graphrun_runs[0]["seconds"]}
    assert graphrun_runs[1]["seconds"] == pytest.approx(graphrun_runs[0]["seconds"])
    assert graphrun_runs[1]["left_bytes"] == 0


@pytest.mark.sweep("peers")
def test_where_graphrun_fits_no_peer_makes_the_first_run_faster(bench: dict[str, Any]) -> None:
    fits = [
        cell
        for cell in cells(bench, "graphrun")
        if cell["status"] == "finished" and cell["cap_bytes"]
    ]
    assert fits
    for cell in fits:
        other_cells = [
            c
            for tool in TOOLS[:3]
            for c in cells(bench, tool)
            if c["cap_bytes"] == cell["cap_bytes"]
        ]
        finished = [c["runs"][0]["seconds"] for c in other_cells if c["status"] == "finished"]
        assert cell["runs"][0]["seconds"] <= min(finished, default=1.0)


@pytest.mark.sweep("peers")
def test_a_session_finds_in_its_second_run_what_the_first_left(bench: dict[str, Any]) -> None:
    first_run, second_run = max(
        cells(bench, "graphrun, session of 2"), key=lambda cell: cell["cap_bytes"] or 0
    )["runs"]
    assert second_run["seconds"] < first_run["seconds"]
    assert second_run["in_bytes"] < first_run["in_bytes"] / 10
    assert first_run["left_bytes"] == second_run["before_bytes"] == second_run["left_bytes"] > 0


@pytest.mark.sweep("peers")
def test_measured_is_planned(bench: dict[str, Any]) -> None:
    for cell in cells(bench, "graphrun"):
        if cell["status"] == "finished":
            run, plan_cell = cell["runs"][0], cell["planned"]
            assert run["peak_bytes"] <= plan_cell["peak_bytes"]
            # the plan ends with the last call
            handed_out = run["out_bytes"] / hardware("sim").pageable_bytes_per_second
            assert run["seconds"] - handed_out == pytest.approx(plan_cell["seconds"], rel=0.01)


@pytest.mark.sweep("peers")
def test_where_ram_is_tight_graphrun_reads_the_files_and_says_how_much(
    bench: dict[str, Any],
) -> None:
    facts = bench["models"]["hidream"]
    tight = [c for c in bench["cells"] if c["ram_bytes"] is not None and c["tool"] == "graphrun"]
    assert [(c["status"], c["equal"]) for c in tight] == [("finished", True)] * 2
    for cell in tight:
        assert cell["ram_bytes"] == facts["tight_ram_bytes"] < facts["weight_bytes"]
        assert cell["runs"][0]["read_bytes"] >= 0.99 * facts["weight_bytes"], (
            "from a file, once at least"
        )
    plain = cells(bench, "graphrun")[0]
    assert plain["runs"][0]["read_bytes"] == 0, (
        "elsewhere weights are in host memory, as the peers' are"
    )


@pytest.mark.sweep("peers")
def test_a_tool_that_cannot_run_is_reported_with_its_message(bench: dict[str, Any]) -> None:
    mmgp_cells = cells(bench, "mmgp")
    assert [c["status"] for c in mmgp_cells] == ["unavailable"]
    assert "CUDA alone" in mmgp_cells[0]["message"] or "not installed" in mmgp_cells[0]["message"]


@pytest.mark.sweep("peers")
def test_a_second_command_runs_only_what_is_missing(
    part: Any, bench: dict[str, Any], tmp_path: Path
) -> None:
    peers, results_file = part("peers"), tmp_path / "peers.json"
    results_file.write_text(json.dumps({**bench, "cells": bench["cells"][:-1]}))
    second_bench, ran = bench_of(peers, results_file, "--resume"), list[str]()
    second_bench.cell = lambda model, tool, kind, **options: ran.append(tool) or bench["cells"][-1]
    second_bench.model("hidream")
    assert ran == [bench["cells"][-1]["tool"]]


@pytest.mark.sweep("peers")
def test_the_report_names_the_smallest_budgets_and_says_where_graphrun_is_behind(
    part: Any, bench: dict[str, Any]
) -> None:
    report = part("peers_report")
    results = report.Results(bench)
    page = report.markdown(results, "peers")
    smallest = {tool: results.smallest("hidream", tool) for tool in results.tools()}
    assert smallest["mmgp"] is None
    assert smallest["graphrun"] == (bench["models"]["hidream"]["graphrun_smallest_bytes"], True)
    slower = json.loads(json.dumps(bench))
    for cell in slower["cells"]:
        if cell["tool"] == "graphrun":
            for run in cell["runs"]:
                run["seconds"] *= 100
    for pairs, run in ((report.ALIKE, "run 1"), (report.UNLIKE, "run 2")):
        new_lines = set(report.behind(report.Results(slower), pairs)) - set(
            report.behind(results, pairs)
        )
        assert new_lines
        assert all(f", graphrun, {run}: " in line for line in new_lines), (
            "a cold run is like a peer's first, unlike its second"
        )
    assert (
        page.index("beside graphrun's cold run")
        < page.index("The other way round")
        < page.index("Cells that graphrun alone")
    )
    assert page.count("| graphrun |") >= 4


@pytest.mark.sweep("more")
def test_a_plot_has_a_line_for_each_tool_that_finished(part: Any) -> None:
    figure = part("peers_plots").plot(
        "a < b",
        {"graphrun": [(1, 2), (2, 1)], "other": [(1, 3)], "none": []},
        "MiB",
        "ms",
        "graphrun",
    )
    (axes,) = figure.axes
    assert [(line.get_label(), line.get_xydata().tolist()) for line in axes.lines] == [
        ("other", [[1, 3]]),
        ("graphrun", [[1, 2], [2, 1]]),
    ]
    assert axes.get_title() == "a < b"
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"graphrun", "other"}


def test_a_parameters_data_moves_between_host_and_sim_and_stays_the_same_object(part: Any) -> None:
    machine = part("peers_machine").Sim(None)
    layer = torch.nn.Linear(4, 4).requires_grad_(False)
    weight, values = layer.weight, layer.weight.clone()
    with machine.open():
        backing_store = weight.data
        weight.data = weight.data.to("sim")
        assert layer.weight is weight
        assert (weight.device.type, machine.allocated_bytes()) == ("sim", 512)
        weight.data = backing_store
        assert (weight.device.type, machine.allocated_bytes()) == ("cpu", 0)
    assert torch.equal(layer.weight, values)
    assert "data" not in torch.Tensor.__dict__


@pytest.mark.sweep("more", sample=1)
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_a_peer_shows(part: Any, name: str) -> None:
    paths = list(sys.path)
    try:
        rows = part(name).reproduce()
    finally:
        sys.path[:] = paths
    assert rows["shown"], f"{name}: {rows}; fixed upstream? then say so in benchmarks/README.md"


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("model", ["flux", "sdxl", "cogview4", "hidream", "wan"])
def test_the_full_size_models_of_a_card_make_a_pipeline(part: Any, model: str) -> None:
    """On meta: what a card adds is the weights."""
    from graphrun.modules.build import meta_module

    subject = part("peers_cell").Subject(model, "cuda", 2)
    subject.modules = {
        name: meta_module(component, subject.graph.trust)
        for name, component in subject.graph.components.items()
    }
    pipeline = subject.pipeline()
    assert set(part("peers_tools").modules_of(pipeline)) == set(subject.modules)
    assert sum(p.numel() for module in subject.modules.values() for p in module.parameters()) > 2e9

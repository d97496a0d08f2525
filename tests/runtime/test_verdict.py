"""Measured peaks are compared with planned peaks in every run, and every report says the result.

Each problem here has lower figures than the pipeline takes; the plan for it passes all checks.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import graphrun as package
from graphrun import api
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.report import plan_files
from graphrun.report.page import trace_from_json
from graphrun.report.summary import summarize
from graphrun.runtime.devices import open as devices
from graphrun.serve.answers import Pictures, result
from graphrun.serve.bodies import PictureRequest, RequestShape
from graphrun.serve.jobs import Job
from graphrun.serve.together import RunFigures
from graphrun.trace import Overrun, SlotTrace, Trace, verdict
from graphrun.units import MIB

Cli = Callable[..., tuple[int, str, str]]
GRAPH = Path(__file__).parents[2] / "graphs" / "flux-tiny.yaml"
SMALL = {"height": 32, "width": 32, "steps": 2, "max_sequence_length": 16}
BUDGET = {"vram": "64M", "ram": "8G", "hardware": "sim"}
SLOT = "decode/0:vae first"
NUMBERS = rf"[0-9.]+ [KM]iB instead of [0-9.]+ [KM]iB in {SLOT}"
WARNING = rf"the run took more memory than planned: {NUMBERS}; plan again .* reserve=$"


def lowered(problem: Problem, stage: str = "decode", name: str = "first_bytes") -> Problem:
    """``problem`` with half of the bytes ``name`` in the phases of ``stage``."""
    phases = (
        replace(phase, **{name: getattr(phase, name) // 2}) if phase.stage == stage else phase
        for phase in problem.phases
    )
    return replace(problem, phases=tuple(phases))


@pytest.fixture(scope="module")
def graph() -> Any:
    return package.load(GRAPH)


@pytest.fixture(scope="module")
def problem(graph: Any, cached_dry_runs: Path) -> Problem:
    return package.estimate(graph, inputs=SMALL, cache=cached_dry_runs, **BUDGET)


@pytest.fixture(scope="module")
def solution(problem: Problem) -> Solution:
    return package.plan(lowered(problem))


@pytest.fixture
def low_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = api.estimate
    monkeypatch.setattr(api, "estimate", lambda *args, **kwargs: lowered(estimate(*args, **kwargs)))


def test_a_run_matches_its_plan_in_every_slot(graph: Any, problem: Problem) -> None:
    solution = package.plan(problem)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        trace = package.run(solution, graph, SMALL)
    assert (trace.overruns, trace.verdict) == ((), "the run stayed within the planned memory")
    assert [slot.planned_peaks for slot in trace.slots] == [
        (slot.peak_bytes,) for slot in solution.simulation.slots
    ]


@pytest.mark.parametrize(
    ("stage", "name", "slot"),
    [("decode", "first_bytes", SLOT), ("denoise", "input_bytes", "denoise/0:transformer load")],
)
def test_lowered_bytes_are_an_overrun_with_both_numbers(
    graph: Any, problem: Problem, stage: str, name: str, slot: str
) -> None:
    low = package.plan(lowered(problem, stage, name))
    with pytest.warns(
        RuntimeWarning, match="the run took more memory than planned"
    ) as warnings_info:
        trace = package.run(low, graph, SMALL)
    assert [warning.filename for warning in warnings_info] == [__file__]
    planned_bytes = {
        f"{report.phase} {report.part}": report.peak_bytes for report in low.simulation.slots
    }
    measured_bytes = {slot.name: slot.peak_bytes for slot in trace.slots}
    assert Overrun(slot, 0, planned_bytes[slot], measured_bytes[slot]) in trace.overruns
    assert measured_bytes[slot] > planned_bytes[slot]
    assert all(overrun.slot.startswith(stage) for overrun in trace.overruns)


def test_the_largest_overrun_is_named_and_equal_sizes_are_shown_in_bytes() -> None:
    rows = [Overrun("a first", 0, 10, 11), Overrun("a steady", 1, 2**30, 2**30 + 9)]
    largest = "1,073,741,833 B instead of 1,073,741,824 B in a steady on device1, and in 1 more"
    assert verdict(rows) == f"the run took more memory than planned: {largest}"
    assert verdict((), 2) == "planned again 2 times; the run stayed within the planned memory"


def test_runs_of_a_session_warn(graph: Any, low_estimates: None, cached_dry_runs: Path) -> None:
    arguments = {"inputs": SMALL, "cache": cached_dry_runs, "reuse": "none", **BUDGET}
    with package.Session(graph, **arguments) as session:
        for seed in range(2):  # a first run, and one that finds weights on the device
            with pytest.warns(RuntimeWarning, match=WARNING):
                trace = session.run({"seed": seed})
            assert [overrun.slot for overrun in trace.overruns] == [SLOT]


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_batch_warns(graph: Any, low_estimates: None, cached_dry_runs: Path) -> None:
    arguments = {"common": SMALL, "cache": cached_dry_runs, "reuse": "none", **BUDGET}
    with pytest.warns(RuntimeWarning, match=rf"{NUMBERS}, and in 1 more; plan again"):
        batch = package.run_many(graph, ["a", "b"], **arguments)
    assert [overrun.slot for overrun in batch.overruns] == [SLOT, SLOT]


@pytest.mark.sweep("more")
def test_a_run_planned_again_within_its_budget_is_compared_with_its_plans(
    graph: Any, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has less memory when the run reaches the denoising loop."""
    low, devices_opened, open_device = (
        package.plan(lowered(problem, "encode")),
        [],
        devices.open_device,
    )

    def shrinking(*args: Any, **kwargs: Any) -> Any:
        devices_opened.append(open_device(*args, **kwargs))
        return devices_opened[-1]

    def progress(slot: int, _call: int, _calls: int) -> None:
        if low.plan.slots[min(slot, len(low.plan.slots) - 1)].phase.startswith("denoise"):
            devices_opened[0].machine.capacity_bytes = 5 * 2**20

    monkeypatch.setattr(devices, "open_device", shrinking)
    with pytest.warns(RuntimeWarning, match="the run took more memory than planned: .* in encode/"):
        trace = package.run(low, graph, SMALL, progress=progress)
    assert trace.notes
    assert trace.peak_bytes < low.problem.effective_bytes
    assert {overrun.slot.partition("/")[0] for overrun in trace.overruns} == {"encode"}
    assert re.match(
        r"planned again once; the run took more memory than planned: .* in encode/", trace.verdict
    )


@pytest.mark.long
def test_the_command_says_it_on_the_screen_and_in_json(
    graphrun: Cli, solution: Solution, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    plan_files.save(path, GRAPH, solution, summarize(solution, None))
    assert graphrun("check", str(path))[0] == 0
    code, output, _ = graphrun("run", str(path), "-o", "a.png", "--reuse", "none")
    assert (code, (tmp_path / "a.png").exists()) == (4, True)
    assert re.search(
        rf"^the run took more memory than planned: {NUMBERS}; left on the device: 0 B$",
        output,
        re.M,
    )
    assert " on sim (more than planned) " in " ".join(output.split())
    code, output, _ = graphrun("run", str(path), "-o", "b.png", "--json", "--reuse", "none")
    figures = json.loads(output)["measured"]
    assert (code, figures["kept_plan"]) == (4, False)
    assert re.fullmatch(rf"the run took more memory than planned: {NUMBERS}", figures["verdict"])
    assert [row["slot"] for row in figures["overruns"]] == [SLOT]


@pytest.mark.sweep("more")
@pytest.mark.long
def test_the_command_for_a_list_says_it(graphrun: Cli, low_estimates: None, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    settings = [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")]
    budgets = ("--device", "sim", "--vram", "64M", "--ram", "8G")
    run = ("run", str(GRAPH), "--inputs", "p.jsonl", *budgets, "--reuse", "none", *settings)
    code, output, _ = graphrun(*run, "-o", "{line}.png")
    assert code == 4
    assert re.search(rf"^the run took more memory than planned: {NUMBERS}$", output, re.M)
    code, output, _ = graphrun(*run, "-o", "{line}.png", "--overwrite", "--json")
    figures = json.loads(output)["measured"]
    assert (code, [row["slot"] for row in figures["overruns"]]) == (4, [SLOT])


@pytest.mark.filterwarnings("ignore:the run took more memory than planned")
def test_a_server_answers_with_it(graph: Any, problem: Problem, solution: Solution) -> None:
    shape = RequestShape("flux-tiny", ())
    request = PictureRequest(
        "flux-tiny", shape, (SMALL, SMALL), ".png", as_url=False, definition=graph
    )
    job = Job(request, "", Path(), False)
    for run in (package.plan(problem), solution):
        figures = RunFigures()
        figures.add(package.run(run, graph, SMALL), run, False, 0)
        job.results.append(asdict(figures) | {"overruns": figures.overruns})
    answer = result(job, Pictures(), "")["graphrun"]
    assert re.fullmatch(rf"the run took more memory than planned: {NUMBERS}", answer["verdict"])


def test_a_slot_on_a_card_may_have_two_small_pages_more_below_the_plans_peak() -> None:
    def overruns(device: str, *excess_mib: int) -> int:
        slots = [
            SlotTrace("a", "load", 1, nbytes + more_mib * MIB, 0, 0.0, 1.0, planned_peaks=(nbytes,))
            for nbytes, more_mib in zip((20 * MIB, 102 * MIB, 100 * MIB), excess_mib, strict=True)
        ]
        return len(Trace("", device, tuple(slots), (), 0, 0).overruns)

    assert overruns("cuda", 4, 0, 2) == 0
    assert overruns("cuda", 5, 1, 3) == 3
    assert overruns("sim", 4, 0, 2) == 2


@pytest.mark.parametrize(("process_mib", "excess_mib"), [(0, 0), (400, 15)])
def test_a_process_matches_its_plan_up_to_three_percent(process_mib: int, excess_mib: int) -> None:
    """The plan's peak on a CPU is 400 MiB of the process and 100 MiB of tensors: 3 % are 15 MiB."""
    planned_bytes = {"a/0:x": 100 * MIB, "b/0:y": 20 * MIB}

    def trace_with(excess_bytes: int) -> Trace:
        slots = (
            SlotTrace(name, "", 1, nbytes + excess_bytes, 0, 0.0, 1.0, planned_peaks=(nbytes,))
            for name, nbytes in planned_bytes.items()
        )
        return Trace("", "", tuple(slots), (), 0, 0, process_bytes=process_mib * MIB)

    assert trace_with(excess_mib * MIB).verdict == "the run stayed within the planned memory"
    trace = trace_with((excess_mib + 1) * MIB)
    assert len(trace.overruns) == 2
    peak_mib = process_mib + 100
    numbers = f"{peak_mib + excess_mib + 1}.00 MiB instead of {peak_mib}.00 MiB in a/0:x"
    assert trace.verdict == f"the run took more memory than planned: {numbers}, and in 1 more"
    restored_trace = trace_from_json(trace.to_json())
    assert restored_trace.process_bytes == trace.process_bytes

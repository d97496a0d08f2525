"""S2.5: an autoregressive video with a growing history (units x steps), of a program that is no
pipeline of diffusers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload_with_hook
from programs import FILM, Staged
from scenario_graphs import AMPLE, nbytes
from whole_pipelines import planned, streamed

from graphrun import sim
from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.model.problem import Problem
from graphrun.modules.build import build
from graphrun.profile.dry_run import probe
from graphrun.profile.hardware import simulated
from graphrun.profile.problems import ProblemLimits, problem_of
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.executor import follow, stages_for
from graphrun.runtime.host import Host
from graphrun.solve.infeasible import smallest_budget
from graphrun.verify.simulate import simulate
from graphrun.verify.solution import solution_of

# rows of a unit and of the text, numbers of a row
UNITS, STEPS, ROWS, TEXT, WIDTH = (
    12,
    2,
    4,
    12,
    32,
)


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> tuple[Graph, dict[str, Any], Any]:
    """Its graph, the inputs, and the dry run."""
    path = tmp_path_factory.mktemp("film") / "film.yaml"
    path.write_text(FILM)
    graph = load(path, ["programs"])
    inputs = graph.resolve({"text": "a lighthouse", "units": UNITS})
    return graph, inputs, probe(graph, inputs)


def least(film: tuple[Graph, dict[str, Any], Any]) -> Problem:
    graph, inputs, dry_run = film
    ample = problem_of(graph, dry_run, simulated(), ProblemLimits(AMPLE, AMPLE), inputs)
    budget = smallest_budget(
        replace(
            ample,
            components=tuple(replace(component, layers=None) for component in ample.components),
        )
    )
    problem = problem_of(graph, dry_run, simulated(), ProblemLimits(budget, AMPLE), inputs)
    return replace(
        problem,
        components=tuple(replace(component, layers=None) for component in problem.components),
    )


def plain(modules: dict[str, Any], device: Any = "cpu") -> Staged:
    """The program over ``modules``, without graphrun."""
    program = Staged.__new__(Staged)
    vars(program).update(modules, steps=STEPS, device=torch.device(device))
    return program


def frames(program: Staged) -> torch.Tensor:
    frames_tensor: torch.Tensor = program.generate(
        "a lighthouse", units=UNITS, generator=torch.Generator().manual_seed(3)
    )
    return frames_tensor


def test_s2_5_the_history_grows_and_the_peak_is_that_of_the_longest(
    film: tuple[Graph, dict[str, Any], Any],
) -> None:
    calls = [call for _, call in film[2].recording.entries() if call.component == "dit"]
    assert len(calls) == UNITS * STEPS
    largest = [
        max(call.peak_bytes for call in calls[n * STEPS : (n + 1) * STEPS]) for n in range(UNITS)
    ]
    assert largest == sorted(largest)
    assert largest[-1] > 2 * largest[0]
    row_bytes = WIDTH * 4
    assert [call.input_bytes for call in calls[::STEPS]] == [
        (TEXT + ROWS * (unit + 2)) * row_bytes for unit in range(UNITS)
    ]
    (phase,) = (
        phase for phase in least(film).phases if any(use.component == "dit" for use in phase.uses)
    )
    assert max(phase.first_bytes, phase.steady_bytes) >= largest[-1]


def test_time_grows_with_the_history(film: tuple[Graph, dict[str, Any], Any]) -> None:
    """The last unit: four blocks of 8 width**2 for each row, and attention over all of them."""
    calls = [call for _, call in film[2].recording.entries() if call.component == "dit"]
    rows = TEXT + ROWS * (UNITS + 1)
    assert calls[-1].flops == pytest.approx(
        4 * (2 * rows * 8 * WIDTH**2 + 4 * rows**2 * WIDTH), rel=0.03
    )


def test_s2_5_streamed_it_makes_the_plain_programs_video_in_the_planned_bytes(
    film: tuple[Graph, dict[str, Any], Any],
) -> None:
    graph, inputs, _ = film
    modules = {name: build(component, graph) for name, component in graph.components.items()}
    want = frames(plain(modules))
    problem = least(film)
    plan, device = planned(problem), open_device(problem)
    assert "dit" in streamed(plan)
    host = Host.of_graph(graph, problem, device, modules)
    trace = follow(
        solution_of(problem, plan), host, device, stages_for(plan, graph, inputs, device, host)
    )
    assert torch.equal(trace.outputs["frames"], want)
    assert trace.peak_bytes == max(slot.peak_bytes for slot in simulate(problem, plan).slots)
    assert trace.left_bytes == 0


def test_s2_5_under_offloading_the_peak_grows_with_the_history_and_comes_with_the_last_unit(
    film: tuple[Graph, dict[str, Any], Any],
) -> None:
    """No defect but that a run finds out: the first unit's peak says nothing of the last one's."""
    graph, peaks = film[0], list[int]()
    modules = {name: build(component, graph) for name, component in graph.components.items()}
    want = frames(plain(modules))
    with sim.Machine() as machine:
        modules["vae"].to("sim")  # its entry is no forward, which is what hooks follow
        hook = None
        for name in ("text", "dit"):
            modules[name], hook = cpu_offload_with_hook(modules[name], "sim", hook)
        modules["dit"].register_forward_pre_hook(lambda *_: machine.reset_peak())
        modules["dit"].register_forward_hook(lambda *_: peaks.append(machine.peak_bytes))
        result = frames(plain(modules, "sim")).cpu()
    assert torch.equal(result, want)
    assert max(peaks) == max(peaks[-STEPS:]) > peaks[0] + nbytes(modules["dit"]) // 100

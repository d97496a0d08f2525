"""Measurements of runs are in the next plan for the same device, versions, graph and settings, and
that plan holds too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from campaign import sampled

import graphrun
from graphrun.disk_store import Store
from graphrun.model.choices import with_each_variant
from graphrun.profile import feedback
from graphrun.profile.feedback import _graph_key
from graphrun.profile.variants import streaming_code_seconds
from graphrun.report.estimate_screen import estimate_screen
from graphrun.report.screen import Look
from graphrun.trace import Event, SlotTrace, Trace
from graphrun.units import MIB
from graphrun.verify.simulate import simulate

GRAPHS = Path(__file__).parents[2] / "graphs"


@pytest.fixture(scope="module")
def solution(make_problem: Any) -> Any:
    """Without layers: measurements of layers do not apply to blocks."""
    problem = make_problem("flux-tiny", 6 * MIB)
    return graphrun.plan(
        replace(
            problem,
            components=tuple(replace(component, layers=None) for component in problem.components),
        )
    )


def trace_of(
    solution: Any,
    more_bytes: int = 0,
    slower: float = 1.0,
    only: str = "",
    read_seconds: float = 0.0,
) -> Trace:
    """A run that takes ``more_bytes`` and is ``slower`` than planned in the phases whose name
    contains ``only``. ``read_seconds``: what reads take of each block's seconds."""
    problem, plan = solution.problem, solution.plan
    slots, events = [], []
    for number, report in enumerate(simulate(problem, plan).slots):
        extra_bytes = (
            more_bytes if report.part in ("first", "steady") and only in report.phase else 0
        )
        slots.append(
            SlotTrace(report.phase, report.part, 1, report.peak_bytes + extra_bytes, 0, 0.0, 0.0)
        )
        phase = next((phase for phase in problem.phases if phase.name == report.phase), None)
        for use in phase.uses if phase is not None and report.part == "steady" else ():
            groups = problem.component(use.component).groups
            for group, block, seconds in use.order:
                if groups[group].streamable:
                    end = seconds * slower + read_seconds
                    events.append(
                        Event(
                            "block", use.component, number, groups[group].blocks[block], 0, 0.0, end
                        )
                    )
    return Trace("", "sim", tuple(slots), tuple(events), 0, 0)


def phase_of(problem: Any, name: str) -> Any:
    return next(phase for phase in problem.phases if name in phase.name)


def test_measured_activation_and_block_times_are_in_the_next_problem(
    solution: Any, tmp_path: Path
) -> None:
    problem, store = solution.problem, Store(tmp_path)
    feedback.remember(solution, trace_of(solution, 4096, 1.5, "denoise"), store)
    informed = feedback.with_measurements(problem, store)
    old_phase, new_phase = phase_of(problem, "denoise"), phase_of(informed, "denoise")
    assert (
        new_phase.first_bytes - old_phase.first_bytes,
        new_phase.steady_bytes - old_phase.steady_bytes,
    ) == (
        4096,
        4096,
    )
    assert (old_phase.basis, new_phase.basis) == ("traced", "measured")
    for number, group in enumerate(problem.component("transformer").groups):
        factor = 1.5 if group.streamable else 1.0
        assert new_phase.uses[0].seconds[number] == pytest.approx(
            factor * old_phase.uses[0].seconds[number], rel=0.05
        )
    assert informed.digest != problem.digest


def test_what_reads_took_of_a_block_on_a_cpu_is_not_in_its_measured_seconds(
    solution: Any, tmp_path: Path
) -> None:
    read_seconds, store = 0.01, Store(tmp_path)
    code_seconds = streaming_code_seconds(solution.problem.hardware)
    problem = with_each_variant(
        solution.problem,
        lambda variant: replace(
            variant, lost_seconds=(code_seconds + read_seconds,) * len(variant.block_bytes)
        ),
    )
    slow = graphrun.plan(problem)
    feedback.remember(slow, trace_of(slow, slower=1.5, read_seconds=read_seconds), store)
    old_use, new_use = (
        phase_of(p, "denoise").uses[0]
        for p in (problem, feedback.with_measurements(problem, store))
    )
    for number, group in enumerate(problem.component("transformer").groups):
        factor = 1.5 if group.streamable else 1.0
        assert new_use.seconds[number] == pytest.approx(factor * old_use.seconds[number], rel=0.05)


def test_measurements_apply_to_the_same_device_versions_graph_and_settings_only(
    solution: Any, tmp_path: Path
) -> None:
    problem, store = solution.problem, Store(tmp_path)
    feedback.remember(solution, trace_of(solution, 4096), store)
    problems = (
        replace(problem, hardware=replace(problem.hardware, name="other")),
        replace(problem, versions=(("torch", "9"),)),
        replace(problem, graph_digest="0"),
        replace(problem, settings=(*problem.settings, ("x", "1"))),
    )
    for other in problems:
        assert feedback.with_measurements(other, store) == other
    assert (
        feedback.with_measurements(replace(problem, budget_bytes=9 * MIB), store).phases
        == feedback.with_measurements(problem, store).phases
    )


def test_the_largest_activation_is_used_and_noise_changes_nothing(
    solution: Any, tmp_path: Path
) -> None:
    problem, store = solution.problem, Store(tmp_path)
    feedback.remember(solution, trace_of(solution, 4096, 2.0), store)
    first = feedback.with_measurements(problem, store)
    feedback.remember(solution, trace_of(solution, 1024, 2.01), store)
    assert feedback.with_measurements(problem, store) == first
    feedback.remember(solution, trace_of(solution, 8192, 3.0), store)
    third = feedback.with_measurements(problem, store)
    assert phase_of(third, "denoise").first_bytes == phase_of(problem, "denoise").first_bytes + 8192
    assert (
        phase_of(third, "denoise").uses[0].seconds[-1]
        > phase_of(first, "denoise").uses[0].seconds[-1]
    )


@pytest.mark.sweep("more")
@pytest.mark.parametrize(
    ("vram", "seconds"), [(6 * MIB, {}), (64 * MIB, {"transformer": 2.0})], ids=["waited", "stayed"]
)
def test_calls_give_seconds_if_their_component_was_resident(
    make_problem: Any, vram: int, seconds: dict[str, float]
) -> None:
    solution = graphrun.plan(make_problem("flux-tiny", vram))
    slots = solution.plan.slots
    number = next(n for n, slot in enumerate(slots) if slot.part == "steady")
    events = tuple(
        Event("run", "transformer", number, "forward", 0, 0.0, 1.0 + n) for n in range(3)
    )
    phases = feedback.measure_phases(solution, replace(trace_of(solution), events=events))
    assert phases[slots[number].phase].seconds == seconds


@pytest.mark.sweep("more")
def test_block_times_of_compiled_and_of_plain_blocks_are_kept_apart(
    edit_graph: Any, tmp_path: Path
) -> None:
    asking = "tiny-flux-transformer.json, dtype: bfloat16"
    graph, store = (
        edit_graph("flux-tiny", (asking, f"{asking}, compile: blocks")),
        Store(tmp_path / "cache"),
    )

    def seconds(*allow: str) -> Any:
        problem = graphrun.estimate(
            graph, vram="6M", ram="1G", hardware="sim", allow=allow, cache=store.folder
        )
        return problem, phase_of(problem, "denoise").uses[0].seconds

    (compiled_problem, planned_seconds), (_, plain_seconds) = seconds("compile"), seconds()
    solution = graphrun.plan(compiled_problem)
    feedback.remember(solution, trace_of(solution, slower=0.5, only="denoise"), store)
    assert seconds("compile")[1] != planned_seconds
    assert seconds()[1] == plain_seconds


DAMAGED = [
    None,
    3,
    [],
    {"": "x"},
    {"": -1.0},
    {"first_bytes": 1.5},
    {"first_bytes": -1, "steady_bytes": True},
]


@pytest.mark.parametrize("data", DAMAGED, ids=str)
@pytest.mark.parametrize("kind", ["activation", "seconds", "shapes"])
def test_damaged_measurements_are_ignored(
    solution: Any, tmp_path: Path, kind: str, data: Any
) -> None:
    problem, store = solution.problem, Store(tmp_path)
    feedback.remember(solution, trace_of(solution, 4096, 1.5), store)
    assert feedback.with_measurements(problem, store) != problem
    for entry in store.entries():
        entry_kind, _, key = entry.key.partition("-")
        if entry_kind != "shapes":
            store.put_json(entry_kind, key, data)
    if kind == "shapes":
        store.put_json("shapes", _graph_key(problem), {problem.phases[0].name: data})
    assert feedback.with_measurements(problem, store) == problem


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Folder with the measurements of a run of flux-tiny, each phase with 1 KiB more than it took;
    the graph; by how much each phase's activation exceeds the traced one."""
    folder = tmp_path_factory.mktemp("measured")
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    problem = graphrun.estimate(graph, vram=64 * MIB, hardware="sim", cache=folder)
    solution = graphrun.plan(problem)
    trace = graphrun.run(solution, graph)
    larger_trace = replace(
        trace, slots=tuple(replace(slot, peak_bytes=slot.peak_bytes + 1024) for slot in trace.slots)
    )
    feedback.remember(solution, larger_trace, Store(folder))
    measurements = feedback.measure_phases(solution, larger_trace)
    extra_bytes = {
        phase.name: measurements[phase.name].sizes["first_bytes"] - phase.first_bytes
        for phase in problem.phases
    }
    assert extra_bytes == dict.fromkeys(extra_bytes, 1024)
    return folder, graph, extra_bytes


def basis(problem: Any) -> dict[str, str]:
    return {phase.name: phase.basis for phase in problem.phases}


ENCODERS = ("encode/0:text_encoder", "encode/1:text_encoder_2")
OTHERS = ("denoise/0:transformer", "decode/0:vae")


def other_t5(graph: Any) -> Any:
    t5 = graph.components["text_encoder_2"]
    wider = replace(t5, config={**t5.config, "d_ff": 2 * t5.config["d_ff"]})
    return replace(graph, name="another", components={**graph.components, "text_encoder_2": wider})


@pytest.mark.sweep("more")
@pytest.mark.parametrize(
    ("change", "inputs", "shared"),
    [
        (lambda graph: replace(graph, name="another"), {}, {*ENCODERS, *OTHERS}),
        (other_t5, {}, {ENCODERS[0], *OTHERS}),
        (lambda graph: graph, {"steps": 7}, {*ENCODERS, *OTHERS}),
        (lambda graph: graph, {"height": 192}, set(ENCODERS)),
        (lambda graph: graph, {"max_sequence_length": 32}, {ENCODERS[0], OTHERS[1]}),
    ],
    ids=["same components", "another T5", "more steps", "higher", "shorter text"],
)
def test_another_graph_with_the_same_component_and_shapes_uses_the_measurements(
    ran: Any, change: Any, inputs: dict[str, Any], shared: set[str]
) -> None:
    folder, graph, extra_bytes = ran
    other = graphrun.estimate(
        change(graph), vram=64 * MIB, hardware="sim", inputs=inputs, cache=folder
    )
    plain = graphrun.estimate(change(graph), vram=64 * MIB, hardware="sim", inputs=inputs)
    assert {name for name, kind in basis(other).items() if kind == "measured"} == shared
    assert set(basis(plain).values()) == {"traced"}
    for phase, plain_phase in zip(other.phases, plain.phases, strict=True):
        assert phase.first_bytes - plain_phase.first_bytes == (
            extra_bytes[phase.name] if phase.name in shared else 0
        ), phase.name


@pytest.mark.sweep("more")
def test_the_estimate_shows_what_was_measured_beside_what_was_traced(ran: Any) -> None:
    folder, graph, extra_bytes = ran
    with_runs = graphrun.survey(graph, hardware="sim", cache=folder)
    plain_survey = graphrun.survey(graph, hardware="sim")
    for row, plain_row in zip(with_runs["phases"], plain_survey["phases"], strict=True):
        assert row["basis"] == "measured"
        assert row["reserved_bytes"] == plain_row["reserved_bytes"] + extra_bytes[row["phase"]]
        assert row["traced"] == {name: plain_row[name] for name in ("reserved_bytes", "seconds")}
        assert row["seconds"] == pytest.approx(plain_row["seconds"], rel=0.05)
    assert {row["stage"]: row["seconds_basis"] for row in with_runs["phases"]}[
        "denoise"
    ] == "measured"
    assert "measured" in estimate_screen(with_runs, Look(verbose=True))
    assert "measured" not in estimate_screen(plain_survey, Look(verbose=True))


@pytest.mark.parametrize("name", sampled(["flux-tiny", "sdxl-tiny"], ["flux-tiny"], "reference"))
def test_a_real_run_s_measurements_make_plans_that_hold_at_other_budgets(
    dry: Any, make_problem: Any, tmp_path: Path, name: str
) -> None:
    graph, _, _ = dry(name)
    budgets = (
        (6 * MIB, 9 * MIB, 64 * MIB) if name == "flux-tiny" else (13 * MIB, 20 * MIB, 64 * MIB)
    )
    store = Store(tmp_path)
    bases = set()
    for budget in budgets:
        problem = feedback.with_measurements(make_problem(name, budget), store)
        bases |= {phase.basis for phase in problem.phases}
        solution = graphrun.plan(problem)
        trace = graphrun.run(
            solution,
            graph,
            {"steps": problem.settings and dict(problem.settings)["steps"]},
            cache=tmp_path,
        )
        assert trace.overruns == ()
        image = trace.outputs["image"]  # made of 32-bit floats, whose copy to the host no plan has
        copied_seconds = (
            4 * 3 * image.width * image.height / problem.hardware.pageable_bytes_per_second
        )
        planned_seconds = simulate(solution.problem, solution.plan).seconds
        assert trace.seconds == pytest.approx(planned_seconds + copied_seconds, rel=0.01)
    assert bases == {"traced", "measured"}

"""S3 on the host: RAM is budgeted. Backing stores without later use are dropped; what does not fit
is read from disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from whole_pipelines import AMPLE, TinyPipeline, pixels

from graphrun.errors import OutOfMemory
from graphrun.graph.graph import Graph
from graphrun.model.plan import Drop, Read
from graphrun.model.problem import Problem
from graphrun.profile.dry_run import probe
from graphrun.profile.hardware import simulated
from graphrun.profile.problems import ProblemLimits, problem_of
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.recovery import execute
from graphrun.solve.infeasible import Infeasible
from graphrun.solve.solve import solve
from graphrun.trace import Trace
from graphrun.verify.simulate import simulate
from graphrun.verify.solution import solution_of


class Stored:
    """FLUX tiny with its weights in files."""

    def __init__(self, folder: Path) -> None:
        self.whole = TinyPipeline("flux-tiny", {"steps": 1, "height": 32, "width": 32})
        for name, module in self.whole.modules.items():
            module.save_pretrained(folder / name)  # type: ignore[operator]
        components = {
            name: replace(c, source=str(folder / name))
            for name, c in self.whole.graph.components.items()
        }
        self.graph: Graph = replace(self.whole.graph, components=components)
        self.dry_run = probe(self.graph, self.whole.inputs)

    def within(
        self,
        ram_bytes: int,
        backing_stores: tuple[str, ...] = ("pinned", "pageable", "disk"),
        budget_bytes: int = AMPLE,
    ) -> Problem:
        limits = ProblemLimits(budget_bytes, ram_bytes, pinned_bytes=AMPLE)
        problem = problem_of(self.graph, self.dry_run, simulated(), limits, self.whole.inputs)
        variants = {
            c.name: tuple(v for v in c.variants if v.backing_store in backing_stores)
            for c in problem.components
        }
        return replace(
            problem,
            components=tuple(
                replace(c, variants=variants[c.name], layers=None) for c in problem.components
            ),
        )

    def sizes(self) -> dict[str, int]:
        return {c.name: c.variants[0].host_bytes for c in self.within(AMPLE).components}

    def run(self, problem: Problem, plan: Any) -> Trace:
        device = open_device(problem)
        trace = execute(solution_of(problem, plan), self.graph, self.whole.inputs, device)
        assert np.array_equal(pixels(trace.outputs["image"]), self.whole.image)
        assert trace.host_bytes <= simulate(problem, plan).host_peak_bytes <= problem.ram_bytes
        assert device.arenas.nbytes("arenas") == 0
        return trace


@pytest.fixture(scope="module")
def stored_graph(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return Stored(tmp_path_factory.mktemp("flux"))


def test_s3_1_what_does_not_fit_in_ram_is_read_from_disk(stored_graph: Stored) -> None:
    sizes = stored_graph.sizes()
    problem = stored_graph.within(max(sizes.values()) // 2)
    plan = solve(problem).plan
    assert dict(plan.variants)["transformer"].split()[1] == "disk"
    trace = stored_graph.run(problem, plan)
    assert trace.host_bytes < sizes["transformer"]


def test_s3_1_without_a_disk_it_is_infeasible_and_says_what_binds(stored_graph: Stored) -> None:
    with pytest.raises(Infeasible, match="RAM"):
        solve(
            stored_graph.within(max(stored_graph.sizes().values()) // 2, backing_stores=("pinned",))
        )


def test_s3_2_a_component_without_a_later_use_is_dropped_when_ram_binds(
    stored_graph: Stored,
) -> None:
    sizes = stored_graph.sizes()
    problem = stored_graph.within(
        sizes["transformer"] + sizes["text_encoder_2"] // 2, backing_stores=("pinned",)
    )
    plan = solve(problem).plan
    drop_names = [a.component for slot in plan.slots for a in slot.actions if isinstance(a, Drop)]
    read_names = [a.component for slot in plan.slots for a in slot.actions if isinstance(a, Read)]
    assert "text_encoder_2" in drop_names
    assert set(read_names) == set(sizes)
    trace = stored_graph.run(problem, plan)
    assert trace.host_bytes < sum(sizes.values())
    assert (
        sum(event.nbytes for event in trace.events if event.kind == "drop")
        >= sizes["text_encoder_2"]
    )


def test_s3_2_with_ram_to_spare_nothing_is_dropped_before_the_end(stored_graph: Stored) -> None:
    problem = stored_graph.within(AMPLE, backing_stores=("pinned",))
    plan = solve(problem).plan
    assert not [a for slot in plan.slots[:-1] for a in slot.actions if isinstance(a, Drop)]
    stored_graph.run(problem, plan)


def test_s3_4_what_the_plan_did_not_count_on_is_refused_and_not_spilled(flux: TinyPipeline) -> None:
    """Another program's memory, or a low estimate: the device has the budget and no more, and a run
    that meets it stops there."""
    problem = flux.smallest()
    plan, budget_bytes = solve(problem).plan, problem.effective_bytes
    hook = flux.modules["transformer"].register_forward_pre_hook(
        lambda *_: setattr(flux, "more", flux.device.allocate(budget_bytes))
    )
    try:
        with pytest.raises(OutOfMemory, match="denoise/0:transformer first"):
            flux.run(problem, plan)
    finally:
        hook.remove()
    assert not hasattr(flux, "more")
    assert flux.device.allocated_bytes == 0
    assert np.array_equal(pixels(flux.run(problem, plan).outputs["image"]), flux.image)

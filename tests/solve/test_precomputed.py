"""Problems with precomputed stages or finished steps: what is left out, and plans for the
remainder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planner_problems import GIB, flux

import graphrun
from graphrun.errors import InputError
from graphrun.model.precomputed import with_fewer_steps, without
from graphrun.verify.check import check
from graphrun.verify.simulate import simulate


@pytest.fixture(scope="module")
def flux_tiny(make_problem: Any, dry: Any) -> Any:
    return dry("flux-tiny")[0], make_problem("flux-tiny", 6 << 20)


@pytest.mark.long
def test_a_precomputed_stage_is_not_planned_and_its_value_is_live_from_the_start(
    flux_tiny: Any,
) -> None:
    graph, problem = flux_tiny
    reduced = graph.with_precomputed(["encode"])
    reduced_problem = without(problem, ["denoise", "decode"], ["encode"], reduced.digest)
    assert [phase.name for phase in reduced_problem.phases] == [
        "denoise/0:transformer",
        "decode/0:vae",
    ]
    assert [component.name for component in reduced_problem.components] == ["transformer", "vae"]
    assert {
        value.name: (value.first_phase, value.last_phase) for value in reduced_problem.values
    } == {
        "encode.embeds": (0, 0),
        "denoise.latents": (1, 1),
    }
    assert reduced_problem.digest != problem.digest
    solution = graphrun.plan(reduced_problem)
    assert not check(solution.problem, solution.plan)
    assert "text_encoder" not in str(solution.plan)
    assert solution.problem.precomputed == ("encode",)
    full = graphrun.plan(problem)
    assert (
        simulate(solution.problem, solution.plan).seconds
        < simulate(full.problem, full.plan).seconds
    )


@pytest.mark.long
def test_finished_steps_are_not_planned(flux_tiny: Any) -> None:
    problem = flux_tiny[1]
    reduced_problem = with_fewer_steps(problem, {"denoise": (3, 4)})
    assert [max(use.calls for use in phase.uses) for phase in reduced_problem.phases] == [
        1,
        1,
        1,
        1,
    ]
    assert all(slot.part != "steady" for slot in graphrun.plan(reduced_problem).plan.slots)
    with pytest.raises(InputError, match="4 calls of transformer cannot be divided into 3 steps"):
        with_fewer_steps(problem, {"denoise": (1, 3)})


def test_a_graph_with_precomputed_stages(flux_tiny: Any) -> None:
    graph = flux_tiny[0]
    reduced = graph.with_precomputed(["denoise"])
    assert [stage.name for stage in reduced.stages] == ["encode", "decode"], (
        "the decoder reads embeddings too"
    )
    assert [str(reference) for reference in reduced.precomputed] == ["$denoise.latents"]
    assert [stage.name for stage in graph.with_precomputed(["encode", "denoise"]).stages] == [
        "decode"
    ]
    assert graph.with_precomputed([]) == graph
    assert reduced.digest != graph.digest
    with pytest.raises(InputError, match="did you mean 'encode'"):
        graph.with_precomputed(["encod"])
    with pytest.raises(InputError, match="no stage is left"):
        graph.with_precomputed(["encode", "denoise", "decode"])


def test_a_part_of_a_graph_outputs_all_values_that_other_parts_read(flux_tiny: Any) -> None:
    graph = flux_tiny[0]
    part = graph.part(["encode", "denoise"])
    assert {name: str(reference) for name, reference in part.outputs.items()} == {
        "encode.embeds": "$encode.embeds",
        "denoise.latents": "$denoise.latents",
    }
    assert part.precomputed == ()
    last = graph.part(["decode"])
    assert [str(reference) for reference in last.precomputed] == [
        "$denoise.latents",
        "$encode.embeds",
    ]
    assert list(last.outputs) == ["image"]


def test_the_order_of_the_remaining_stages_is_as_free_as_before() -> None:
    fixed = flux(8 * GIB)
    free = replace(fixed, precedence=(("encode", "denoise"), ("denoise", "decode")))
    remainders = (
        without(whole, ["denoise", "decode"], ["encode"], "0" * 16) for whole in (fixed, free)
    )
    assert [remainder.precedence for remainder in remainders] == [None, (("denoise", "decode"),)]

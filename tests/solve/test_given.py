"""Problems of which some is done: what is left out, and what plans of the rest look like."""

from __future__ import annotations

from typing import Any

import pytest

import graphrun
from graphrun.errors import InputError
from graphrun.model.precomputed import shortened, without
from graphrun.verify.check import check
from graphrun.verify.simulate import simulate


@pytest.fixture(scope="module")
def whole(make_problem: Any, dry: Any) -> Any:
    return dry("flux-tiny")[0], make_problem("flux-tiny", 6 << 20)


def test_a_given_stage_is_neither_planned_nor_loaded_and_its_value_lives_from_the_start(whole: Any) -> None:
    graph, problem = whole
    cut = graph.with_precomputed(["encode"])
    left = without(problem, ["denoise", "decode"], ["encode"], cut.digest)
    assert [phase.name for phase in left.phases] == ["denoise/0:transformer", "decode/0:vae"]
    assert [component.name for component in left.components] == ["transformer", "vae"]
    assert {value.name: (value.first_phase, value.last_phase) for value in left.values} == {
        "encode.embeds": (0, 0),
        "denoise.latents": (1, 1),
    }
    assert left.digest != problem.digest
    solution = graphrun.plan(left)
    assert not check(solution.problem, solution.plan)
    assert "text_encoder" not in str(solution.plan)
    assert solution.problem.precomputed == ("encode",)
    every = graphrun.plan(problem)
    assert simulate(solution.problem, solution.plan).seconds < simulate(every.problem, every.plan).seconds


def test_steps_that_are_behind_are_not_planned(whole: Any) -> None:
    problem = whole[1]
    left = shortened(problem, {"denoise": (3, 4)})
    assert [max(use.calls for use in phase.uses) for phase in left.phases] == [1, 1, 1, 1]
    assert all(slot.part != "steady" for slot in graphrun.plan(left).plan.slots)
    with pytest.raises(InputError, match="4 calls of transformer cannot be divided into 3 steps"):
        shortened(problem, {"denoise": (1, 3)})


def test_a_graph_cut_at_given_stages(whole: Any) -> None:
    graph = whole[0]
    cut = graph.with_precomputed(["denoise"])
    assert [stage.name for stage in cut.stages] == ["encode", "decode"], "the decoder reads embeddings too"
    assert [str(reference) for reference in cut.precomputed] == ["$denoise.latents"]
    assert [stage.name for stage in graph.with_precomputed(["encode", "denoise"]).stages] == ["decode"]
    assert graph.with_precomputed([]) == graph
    assert cut.digest != graph.digest
    with pytest.raises(InputError, match="did you mean 'encode'"):
        graph.with_precomputed(["encod"])
    with pytest.raises(InputError, match="no stage is left"):
        graph.with_precomputed(["encode", "denoise", "decode"])


def test_a_part_of_a_graph_has_what_others_read_among_its_outputs(whole: Any) -> None:
    graph = whole[0]
    part = graph.part(["encode", "denoise"])
    assert {name: str(reference) for name, reference in part.outputs.items()} == {
        "encode.embeds": "$encode.embeds",
        "denoise.latents": "$denoise.latents",
    }
    assert part.precomputed == ()
    last = graph.part(["decode"])
    assert [str(reference) for reference in last.precomputed] == ["$denoise.latents", "$encode.embeds"]
    assert list(last.outputs) == ["image"]

"""S2.5: an autoregressive video with a growing history (stages x units x steps), planned at true size and run tiny."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from scenario_graphs import nbytes, offloaded
from test_diffusers_offload import pipeline
from whole_pipelines import GRAPHS, TinyPipeline, pixels, planned, streamed

from graphrun.graph.loading import load
from graphrun.model.directives import directed
from graphrun.model.problem import Directive
from graphrun.modules.build import meta_module
from graphrun.profile.dry_run import probe
from graphrun.profile.hardware import hardware
from graphrun.profile.problems import Limits, problem_of
from graphrun.verify.simulate import simulate

STAGES, HIDDEN = 3, 1920


@pytest.fixture(scope="module")
def true_size() -> tuple[Any, Any]:
    """Encoders and transformer at true size, for a fifth of the steps: the calls of one kind are alike."""
    graph = load(GRAPHS / "pyramid-flow.yaml", trust=["pyramid_flow"]).until("denoise")
    return graph, probe(graph, graph.for_planning({"steps": 4, "frames": 97}))


def test_its_parameters_are_the_checkpoints() -> None:
    graph = load(GRAPHS / "pyramid-flow.yaml", trust=["pyramid_flow"])
    counts = {
        name: sum(p.numel() for p in meta_module(component, graph.trust).parameters())
        for name, component in graph.components.items()
    }
    assert counts == {
        "text_encoder": 123_060_480,
        "text_encoder_2": 4_762_310_656,
        "transformer": 1_972_059_200,
        "vae": 335_402_067,
    }


def test_s2_5_the_history_grows_from_7680_to_15360_tokens_and_the_peak_is_that_of_the_longest(true_size: tuple[Any, Any]) -> None:
    graph, probed = true_size
    calls = [call for _, call in probed.recording.entries() if call.component == "transformer"]
    units = (97 - 1) // 8 + 1
    assert len(calls) == STAGES * (4 + (units - 1) * 2)
    largest = [max(call.peak_bytes for call in calls[STAGES * (4 + 2 * n) : STAGES * (6 + 2 * n)]) for n in range(units - 1)]
    assert largest == sorted(largest)
    assert largest[-1] == pytest.approx(2 * largest[0], rel=0.02)
    inside = {call.input_bytes // (2 * 64 * 2) for call in calls}  # a batch of two, 64 numbers of two bytes to a token
    assert any(15_360 <= tokens < 17_000 for tokens in inside)
    limits = Limits(16 << 30, 64 << 30)
    problem = problem_of(graph, probed, hardware("rtx4090"), limits, graph.for_planning({"steps": 4, "frames": 97}))
    (phase,) = (phase for phase in problem.phases if phase.stage == "denoise")
    assert max(phase.first_bytes, phase.steady_bytes) >= largest[-1] + calls[-1].input_bytes


def test_time_grows_with_the_history(true_size: tuple[Any, Any]) -> None:
    """The last unit's last step: 24 blocks of 12 width**2 for each token, and attention over all of them."""
    calls = [call for _, call in true_size[1].recording.entries() if call.component == "transformer"]
    tokens = 15_360 + 128
    expected = 2 * 24 * (2 * tokens * 12 * HIDDEN**2 + 4 * tokens**2 * HIDDEN)
    assert calls[-1].flops == pytest.approx(expected, rel=0.03)


@pytest.fixture(scope="module")
def small() -> TinyPipeline:
    return TinyPipeline("pyramid-flow-tiny", {})


def test_s2_5_it_makes_the_plain_pipelines_video_in_the_planned_bytes(small: TinyPipeline) -> None:
    problem = small.smallest()
    plan = planned(problem)
    trace = small.run(problem, plan)
    assert np.array_equal(pixels(trace.outputs["image"]), small.image)
    assert trace.peak_bytes == max(slot.peak_bytes for slot in simulate(problem, plan).slots)
    assert trace.left_bytes == 0


def test_streamed_it_makes_the_same_video(small: TinyPipeline) -> None:
    problem = directed(small.smallest(), [Directive("exclude", "transformer")])
    plan = planned(problem)
    assert "transformer" in streamed(plan)
    trace = small.run(problem, plan)
    assert np.array_equal(pixels(trace.outputs["image"]), small.image)
    assert all(m.peak_bytes <= p.peak_bytes for m, p in zip(trace.slots, simulate(problem, plan).slots, strict=True))


def test_s2_5_under_diffusers_offloading_the_peak_grows_with_the_history_and_comes_with_the_last_unit(small: TinyPipeline) -> None:
    """No defect but that a run finds out: the first unit's peak says nothing of the last one's."""
    pipe, peaks = pipeline("pyramid-flow-tiny"), list[int]()
    accepted = inspect.signature(type(pipe).__call__).parameters
    names = {"steps": "num_inference_steps", "frames": "num_frames"}
    call = {names.get(name, name): value for name, value in small.inputs.items() if name != "seed"}
    with offloaded(pipe) as machine:
        pipe.transformer.register_forward_pre_hook(lambda *_: machine.reset_peak())
        pipe.transformer.register_forward_hook(lambda *_: peaks.append(machine.peak_bytes))
        made = pipe(
            **{name: value for name, value in call.items() if name in accepted},
            generator=torch.Generator("cpu").manual_seed(small.inputs["seed"]),
            output_type="pil",
            return_dict=False,
        )[0]
    assert np.array_equal(pixels(made[0] if len(made) == 1 else made), small.image)
    first = 3 * small.inputs["steps"]
    assert peaks[0] < nbytes(pipe.transformer, pipe.text_encoder_2), "the encoders are gone"
    assert max(peaks) == peaks[-1] > 1.1 * max(peaks[:first])

"""Graphs whose one stage calls a pipeline whole, under the least budget: the pipeline's bits, the planned bytes, nothing left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from call_graphs import called, pixels

from graphrun.planner.infeasible import smallest_budget
from graphrun.planner.plan import Stream
from graphrun.planner.solve import solve

CASES = {
    "StableDiffusionInpaintPipeline": "image",
    "StableDiffusionControlNetPipeline-two": "image",
    "StableDiffusionXLImg2ImgPipeline": "image",
    "StableDiffusionXLControlNetImg2ImgPipeline": "image",
    "FluxControlNetPipeline": "image",
    "SanaPipeline": "image",
    "WanImageToVideoPipeline": "video",
    "StableVideoDiffusionPipeline": "video",
    "CogVideoXVideoToVideoPipeline": "video",
    "StableAudioPipeline": "audio",
    "KandinskyV22CombinedPipeline": "image",
    "KandinskyV22PriorPipeline": "image_embeds",
    "MarigoldDepthPipeline": "prediction",
}


@pytest.mark.parametrize("name", CASES)
def test_a_whole_call_is_the_pipelines_own_in_the_planned_bytes(name: str, tmp_path: Path) -> None:
    case = called(name, tmp_path, CASES[name])
    problem = case.problem()
    made, expected = pixels(case.run(problem).outputs[CASES[name]]), pixels(case.expected)
    assert np.array_equal(made, expected.reshape(made.shape))
    assert {phase.stage for phase in problem.phases} == {"make"}
    assert {use.component for phase in problem.phases for use in phase.uses} == set(case.modules)


def test_what_is_entered_one_after_another_is_a_phase_each_and_streamed(tmp_path: Path) -> None:
    case = called("StableDiffusionXLImg2ImgPipeline", tmp_path)
    problem = case.problem()
    names = [use.component for phase in problem.phases for use in phase.uses]
    assert names == ["text_encoder", "text_encoder_2", "vae", "unet", "vae"]
    tight = case.problem(smallest_budget(problem))
    assert any(isinstance(action, Stream) for slot in solve(tight).plan.slots for action in slot.actions)

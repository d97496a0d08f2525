"""Two pipelines in one graph: components shared by name, one plan over all stages, the pictures of
the two by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline
from whole_pipelines import TinyPipeline, planned, streamed

from graphrun.errors import GraphError
from graphrun.modules.build import build_part

INPUTS = {
    "prompt": "a lighthouse",
    "negative_prompt": "",
    "height": 64,
    "width": 64,
    "steps": 4,
    "seed": 3,
}


class Refined(TinyPipeline):
    """SDXL's base and refiner tiny."""

    def by_hand(self) -> Any:
        """The picture of diffusers' two pipelines."""
        modules, parts = (
            self.modules,
            {name: build_part(part, self.graph) for name, part in self.graph.parts.items()},
        )
        outputs = {
            "text_encoder_2": modules["text_encoder_2"],
            "vae": modules["vae"],
            "tokenizer_2": parts["tokenizer_2"],
            "add_watermarker": False,
        }
        base = StableDiffusionXLPipeline(
            **outputs,
            text_encoder=modules["text_encoder"],
            tokenizer=parts["tokenizer"],
            unet=modules["unet"],
            scheduler=type(parts["scheduler"]).from_config(parts["scheduler"].config),
        )
        refiner = StableDiffusionXLImg2ImgPipeline(
            **outputs,
            text_encoder=None,
            tokenizer=None,
            unet=modules["refiner"],
            scheduler=parts["scheduler"],
            requires_aesthetics_score=True,
            force_zeros_for_empty_prompt=False,
        )
        for pipe in (base, refiner):
            pipe.set_progress_bar_config(disable=True)
        arguments = {
            key: self.inputs[key] for key in ("prompt", "negative_prompt", "guidance_scale")
        }
        arguments["num_inference_steps"] = self.inputs["steps"]
        size = {"height": self.inputs["height"], "width": self.inputs["width"]}
        first = {
            "generator": torch.Generator().manual_seed(3),
            "denoising_end": 0.8,
            "output_type": "latent",
        }
        latents = base(**arguments, **size, **first).images
        second = {
            "generator": torch.Generator().manual_seed(3),
            "denoising_start": 0.8,
            "image": latents,
        }
        return refiner(**arguments, **second).images[0]


@pytest.mark.long
def test_base_and_refiner_run_where_neither_fits_beside_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("whole_pipelines.plain_image", lambda *_: [])
    monkeypatch.setattr("whole_pipelines.pixels", lambda _: None)
    whole = Refined("sdxl-refined-tiny", INPUTS)
    weights = {component.name: component.weight_bytes() for component in whole.problem.components}
    # neither network fits, not to speak of both
    problem = whole.within(min(weights["unet"], weights["refiner"]) - 1)
    plan = planned(problem)
    assert {"unet", "refiner"} <= streamed(plan)
    trace = whole.run(problem, plan)
    assert trace.outputs["image"].tobytes() == whole.by_hand().tobytes()
    assert trace.peak_bytes <= problem.budget_bytes
    assert trace.left_bytes == whole.device.allocated_bytes == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "    pipeline: refiner",
            "    pipeline: refine",
            r":\d+: stages.refine.pipeline: no such pipeline 'refine'; did you mean",
        ),
        (
            "{unet: refiner,",
            "{unet: refinr,",
            r":\d+: pipelines.refiner.members.unet: no such component or part 'refinr'; did you",
        ),
        ("    pipeline: refiner\n", "", r":\d+: pipelines.refiner: no stage belongs to it"),
    ],
)
def test_a_wrong_pipeline_is_said_with_its_line(
    edit_graph: Callable[..., Any], old: str, new: str, message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        edit_graph("sdxl-refined-tiny", (old, new))


def test_a_further_pipeline_is_in_the_graphs_digest(edit_graph: Callable[..., Any]) -> None:
    digest = edit_graph("sdxl-refined-tiny").digest
    assert edit_graph("sdxl-refined-tiny").digest == digest
    assert (
        edit_graph(
            "sdxl-refined-tiny",
            ("requires_aesthetics_score: true", "requires_aesthetics_score: false"),
        ).digest
        != digest
    )

"""A denoising loop begun in its middle ends with the same bits as one that was never broken, whatever its scheduler remembers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch

from graphrun.components.build import build
from graphrun.ops import run_stages
from graphrun.ops.steps import StepState, resumable
from graphrun.outputs.pack import pack, unpack

STEPS = 5


class Killed(Exception):
    """Stands for whatever ends a run."""


class Notes:
    """Keeps each state as a file would, and ends the run once step ``end`` is kept (0: never)."""

    def __init__(self, begin: StepState | None = None, end: int = 0) -> None:
        self.begin, self.end, self.found = begin, end, dict[int, bytes]()

    def state(self, stage: str) -> StepState | None:
        return self.begin

    def wants(self, stage: str, done: int, steps: int) -> bool:
        return True

    def save(self, stage: str, state: StepState) -> None:
        self.found[state.done] = pack(
            {name: getattr(state, name) for name in ("done", "steps", "latents", "generator", "scheduler")}
        )
        if state.done == self.end:
            raise Killed

    def after(self, done: int) -> StepState:
        return StepState(**unpack(self.found[done]))


@pytest.fixture(scope="module")
def loops(dry: Any) -> Any:
    built: dict[str, Any] = {}

    def latents(name: str, scheduler: str, notes: Notes) -> torch.Tensor:
        graph = dry(name)[0]
        if scheduler:
            part = replace(graph.parts["scheduler"], class_path=f"diffusers.{scheduler}")
            if name == "sdxl-tiny":
                part = replace(part, config={"beta_schedule": "scaled_linear", "steps_offset": 1})
            graph = replace(graph, parts={**graph.parts, "scheduler": part})
        graph = graph.until("denoise")
        if name not in built:
            built[name] = {c: build(graph.components[c], graph) for stage in graph.stages for c in stage.uses}
        inputs = graph.resolve({"steps": STEPS, "height": 64, "width": 64})
        found: torch.Tensor = run_stages(graph, built[name], torch.device("cpu"), inputs, journal=notes)["latents"]
        return found

    return latents


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        ("flux-tiny", ""),
        ("sdxl-tiny", ""),
        ("sdxl-tiny", "EulerAncestralDiscreteScheduler"),  # draws a number in every step
        ("sdxl-tiny", "DPMSolverMultistepScheduler"),  # remembers what the model said before, and does the last steps otherwise
        ("sdxl-tiny", "UniPCMultistepScheduler"),
        ("sdxl-tiny", "DDIMScheduler"),
        ("cogview4-tiny", ""),
    ],
)
def test_a_loop_begun_behind_any_step_ends_with_the_same_bits(loops: Any, name: str, scheduler: str) -> None:
    whole = Notes()
    expected = loops(name, scheduler, whole)
    assert sorted(whole.found) == list(range(1, STEPS)), "a state for every step but the last"
    for done in (1, 3, STEPS - 1):
        broken = Notes(end=done)
        with pytest.raises(Killed):
            loops(name, scheduler, broken)
        rest = Notes(begin=broken.after(done))
        assert torch.equal(loops(name, scheduler, rest), expected)
        assert sorted(rest.found) == list(range(done + 1, STEPS)), "and not one step twice"


def test_a_pipeline_whose_steps_know_their_number_is_not_begun_in_its_middle() -> None:
    assert resumable(diffusers.FluxPipeline)
    assert not resumable(diffusers.StableDiffusion3Pipeline), "skips layers from a certain step on"
    assert not resumable(diffusers.WanPipeline), "tells its caches the step"

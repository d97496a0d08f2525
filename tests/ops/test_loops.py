"""A loop can be resumed in the middle if latents are the only loop-carried values in its source."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import diffusers
import pytest

from graphrun.ops.loops import _resume_obstacle, resume_obstacle


class Plain:
    def __call__(
        self,
        timesteps: Any,
        latents: Any,
        embeds: Any,
        generator: Any = None,
        callback_on_step_end: Any = None,
    ) -> Any:
        for i, t in enumerate(timesteps):
            if t > 3:
                noise = self.model(latents, i)
            else:
                noise = self.model([part * i for part in latents])
                noise = noise[0]
            if self.rescale:
                noise = noise * 2
            latents = self.scheduler.step(noise, t, latents)
            if callback_on_step_end is not None:
                embeds = callback_on_step_end(self, i, t, {}).pop("embeds", embeds)
        return latents, embeds


class ReadsNoiseOfLastStep:
    def __call__(
        self, timesteps: Any, latents: Any, generator: Any = None, callback_on_step_end: Any = None
    ) -> Any:
        old = None
        for _, t in enumerate(timesteps):
            noise = self.model(latents, old)
            latents = self.scheduler.step(noise, t, latents)
            old = noise
        return latents


class AssignsInSomeSteps:
    def __call__(
        self, timesteps: Any, latents: Any, generator: Any = None, callback_on_step_end: Any = None
    ) -> Any:
        for i, t in enumerate(timesteps):
            if i % 2 == 0:
                noise = self.model(latents)
            latents = self.scheduler.step(noise, t, latents)
        return latents


class AppendsToList:
    def __call__(
        self, timesteps: Any, latents: Any, generator: Any = None, callback_on_step_end: Any = None
    ) -> Any:
        latents_seen: list[Any] = []
        for _, t in enumerate(timesteps):
            latents = self.scheduler.step(latents, t, latents, latents_seen)
            latents_seen.append(latents)
        return latents


class SetsOwnAttribute:
    def __call__(
        self, timesteps: Any, latents: Any, generator: Any = None, callback_on_step_end: Any = None
    ) -> Any:
        for _, t in enumerate(timesteps):
            latents = self.scheduler.step(self.scale, t, latents)
            self._scale = self.scale * 2
        return latents


class Accumulates:
    def __call__(
        self, timesteps: Any, latents: Any, generator: Any = None, callback_on_step_end: Any = None
    ) -> Any:
        number = 0
        for _, t in enumerate(timesteps):
            number += t
            latents = self.scheduler.step(number, t, latents)
        return latents


class BranchesOnConstant:
    def __call__(
        self,
        timesteps: Any,
        latents: Any,
        big: bool,
        generator: Any = None,
        callback_on_step_end: Any = None,
    ) -> Any:
        scale = 1
        for _, t in enumerate(timesteps):
            if big:
                scale = t
            latents = self.scheduler.step(latents * scale, t, latents)
        return latents


def test_a_loop_that_carries_latents_only() -> None:
    assert resume_obstacle(Plain) == ""
    assert resume_obstacle(BranchesOnConstant) == "", "the branch is the same in every step"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ReadsNoiseOfLastStep, "old"),
        (AssignsInSomeSteps, "noise"),
        (AppendsToList, "latents_seen"),
        (SetsOwnAttribute, "self.scale"),
        (Accumulates, "number"),
    ],
)
def test_other_loop_carried_values_are_named(kind: Any, name: str) -> None:
    assert (
        resume_obstacle(kind)
        == f"its pipeline's steps also read {name} of the step before, which is not saved"
    )


def test_pipelines_of_diffusers() -> None:
    assert "audio_latents" in resume_obstacle(diffusers.LTX2Pipeline)
    assert "loops over timesteps" in resume_obstacle(diffusers.StableCascadeDecoderPipeline)
    assert "has no callback for the latents" in resume_obstacle(diffusers.LongCatImagePipeline)
    assert not resume_obstacle(diffusers.Lumina2Pipeline)
    assert not resume_obstacle(diffusers.WanImageToVideoPipeline)


def test_it_is_read_once_and_keeps_no_class() -> None:
    """Each run has a class of its own, with the same `__call__`."""
    resume_obstacle(Plain)
    previous_misses = _resume_obstacle.cache_info().misses
    of_a_run = type("Plain", (Plain,), {})
    assert resume_obstacle(of_a_run) == ""
    assert _resume_obstacle.cache_info().misses == previous_misses
    reference = weakref.ref(of_a_run)
    del of_a_run
    gc.collect()
    assert reference() is None

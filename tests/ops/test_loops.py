"""Whether a loop can be begun in its middle is read from its source: not if a step hands on more than latents."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest

from graphrun.ops.loops import why_not


class Plain:
    def __call__(self, timesteps: Any, latents: Any, embeds: Any, generator: Any = None, callback_on_step_end: Any = None) -> Any:
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


class HandsOn:
    def __call__(self, timesteps: Any, latents: Any, generator: Any = None, callback_on_step_end: Any = None) -> Any:
        old = None
        for _, t in enumerate(timesteps):
            noise = self.model(latents, old)
            latents = self.scheduler.step(noise, t, latents)
            old = noise
        return latents


class Sometimes:
    def __call__(self, timesteps: Any, latents: Any, generator: Any = None, callback_on_step_end: Any = None) -> Any:
        for i, t in enumerate(timesteps):
            if i % 2 == 0:
                noise = self.model(latents)
            latents = self.scheduler.step(noise, t, latents)
        return latents


class Collects:
    def __call__(self, timesteps: Any, latents: Any, generator: Any = None, callback_on_step_end: Any = None) -> Any:
        seen: list[Any] = []
        for _, t in enumerate(timesteps):
            latents = self.scheduler.step(latents, t, latents, seen)
            seen.append(latents)
        return latents


class OnItself:
    def __call__(self, timesteps: Any, latents: Any, generator: Any = None, callback_on_step_end: Any = None) -> Any:
        for _, t in enumerate(timesteps):
            latents = self.scheduler.step(self.scale, t, latents)
            self._scale = self.scale * 2
        return latents


class Counts:
    def __call__(self, timesteps: Any, latents: Any, generator: Any = None, callback_on_step_end: Any = None) -> Any:
        number = 0
        for _, t in enumerate(timesteps):
            number += t
            latents = self.scheduler.step(number, t, latents)
        return latents


class Sized:
    def __call__(self, timesteps: Any, latents: Any, big: bool, generator: Any = None, callback_on_step_end: Any = None) -> Any:
        scale = 1
        for _, t in enumerate(timesteps):
            if big:
                scale = t
            latents = self.scheduler.step(latents * scale, t, latents)
        return latents


def test_a_step_that_hands_nothing_on_but_latents() -> None:
    assert why_not(Plain) == ""
    assert why_not(Sized) == "", "in every step, or in none"


@pytest.mark.parametrize(
    ("kind", "what"), [(HandsOn, "old"), (Sometimes, "noise"), (Collects, "seen"), (OnItself, "self.scale"), (Counts, "number")]
)
def test_what_else_is_handed_on_is_named(kind: Any, what: str) -> None:
    assert why_not(kind) == f"its pipeline's steps hand on {what}, which nothing keeps"


def test_pipelines_of_many_kinds() -> None:
    assert "audio_latents" in why_not(diffusers.LTX2Pipeline)
    assert "loops over timesteps" in why_not(diffusers.StableCascadeDecoderPipeline)
    assert "tells nobody" in why_not(diffusers.LongCatImagePipeline)
    assert not why_not(diffusers.Lumina2Pipeline)
    assert not why_not(diffusers.WanImageToVideoPipeline)

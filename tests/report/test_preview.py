"""Previews of a picture from its latents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from graphrun.report.preview import Preview, preview_of

TINY = str(Path(__file__).parents[2] / "graphs" / "flux-tiny.yaml")


@pytest.mark.parametrize(
    ("shape", "aspect"), [((1, 4, 8, 16), 1.0), ((2, 16, 3, 8, 16), 1.0), ((1, 128, 64), 0.5)]
)
def test_edges_of_the_latents_are_edges_of_the_preview(
    shape: tuple[int, ...], aspect: float
) -> None:
    torch.manual_seed(0)
    latents = 0.1 * torch.randn(shape)
    if len(shape) == 3:
        latents.view(1, 8, 16, 64)[:, :, 8:] += 2.0
    else:
        latents[..., 8:] += 2.0
    image = preview_of(latents, aspect)
    assert image.size == (512, 256)
    red = [image.getpixel((x, 128))[0] for x in (64, 448)]
    assert abs(red[0] - red[1]) > 100, "the right half differs"


def test_there_are_about_eight_previews() -> None:
    preview = Preview(Path("p.png"), {})
    assert [
        sum(preview.wants("denoise", step, steps) for step in range(1, steps))
        for steps in (2, 8, 28, 50)
    ] == [1, 7, 9, 8]


@pytest.mark.sweep("more")
def test_a_run_leaves_its_last_preview(graphrun: Callable[..., tuple[int, str, str]]) -> None:
    options = ("--device", "sim", "--vram", "6M", "--set", "steps=2", "--no-cache")
    assert graphrun("run", TINY, *options, "--preview", "p.png", "-o", "a.png")[0] == 0
    assert graphrun("run", TINY, *options, "-o", "b.png")[0] == 0
    assert Image.open("p.png").size == (512, 512)
    assert Image.open("a.png").tobytes() == Image.open("b.png").tobytes()
    code, _, err = graphrun("run", TINY, *options, "--preview", "p.png", "--resume")
    assert (
        code,
        "leave out --preview: for a single run, not for --inputs, --resume and --cluster" in err,
    ) == (2, True)

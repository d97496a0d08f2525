"""Tensors of ComfyUI and pictures; texts and inputs."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from graphrun.comfyui.values import (
    further_inputs,
    images_of,
    mask_of,
    picture_of,
    pictures_in,
)
from graphrun.errors import InputError


def test_pictures_come_back_as_they_were() -> None:
    pictures = [
        Image.effect_noise((24, 16), 90).convert("RGB"),
        Image.new("RGB", (24, 16), (1, 128, 254)),
    ]
    images = images_of(pictures)
    assert (images.shape, images.dtype) == ((2, 16, 24, 3), torch.float32)
    assert images.min() >= 0
    assert images.max() <= 1
    for number, picture in enumerate(pictures):
        assert picture_of(images[number : number + 1], "image").tobytes() == picture.tobytes()
        assert picture_of(images[number], "image").tobytes() == picture.tobytes()


def test_pictures_with_alpha_and_grey_ones_are_taken() -> None:
    assert picture_of(torch.full((1, 2, 3, 4), 0.5), "image").mode == "RGB"
    assert picture_of(torch.full((1, 2, 3, 1), 0.5), "image").getpixel((0, 0)) == (128,) * 3


def test_a_mask_is_white_where_it_selects() -> None:
    mask = torch.zeros(1, 4, 6)
    mask[0, 1, 2] = 1
    picture = mask_of(mask, "mask")
    assert (picture.mode, picture.size) == ("L", (6, 4))
    assert [picture.getpixel(place) for place in ((2, 1), (0, 0))] == [255, 0]


def test_several_pictures_are_refused() -> None:
    with pytest.raises(InputError, match='image has 2 pictures, .* "Get Image from Batch"'):
        picture_of(torch.zeros(2, 4, 4, 3), "image")


def test_outputs_of_any_form_are_flattened() -> None:
    picture = Image.new("RGB", (2, 2))
    assert list(pictures_in([picture, [picture, picture], "text"])) == [picture] * 3
    with pytest.raises(InputError, match="makes no picture or video: choose one that does"):
        images_of([])


def test_further_inputs_are_a_line_each() -> None:
    text = "guidance_scale=3.5\n\n style = a=b \n"
    assert further_inputs(text) == {"guidance_scale": "3.5", "style": "a=b"}
    for wrong in ("guidance_scale 3.5", "=3"):
        with pytest.raises(InputError, match="inputs, line 2: .* is not NAME=VALUE; type guid"):
            further_inputs(f"a=1\n{wrong}")

"""Images, masks, videos and audio as inputs: files and objects, what is refused, what a plan and a
key see of them."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from graphrun.errors import InputError
from graphrun.graph import media


def picture(path: Path, size: tuple[int, int] = (6, 4), mode: str = "RGB", seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    Image.fromarray(pixels, "RGBA").convert(mode).save(path)
    return path


def sound(path: Path, rate: int = 8000, samples: tuple[int, ...] = (0, 16384, -32768)) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.array(samples, dtype="<i2").tobytes())
    return path


def film(path: Path, frames: int = 3) -> Path:
    pictures = [Image.new("RGB", (32, 16), (80 * number, 0, 0)) for number in range(frames)]
    if path.suffix == ".gif":
        pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=50)
        return path
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for image in pictures:
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_a_picture_is_rgb_and_a_mask_is_grey(tmp_path: Path, mode: str) -> None:
    file = picture(tmp_path / "a.png", mode=mode)
    image, mask = media.accept("image", str(file)), media.accept("mask", file)
    assert (media.size_text(image), image.open().mode, mask.open().mode) == ("6x4", "RGB", "L")
    with Image.open(file) as whole:
        assert image.open().tobytes() == whole.convert("RGB").tobytes()


def test_a_picture_stands_as_its_camera_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.new("RGB", (6, 4)).save(tmp_path / "a.jpg", exif=exif)
    assert media.size_text(media.accept("image", tmp_path / "a.jpg")) == "4x6"


@pytest.mark.parametrize("name", ["a.gif", "a.mp4"])
def test_a_video_is_a_list_of_frames(tmp_path: Path, name: str) -> None:
    video = media.accept("video", film(tmp_path / name))
    assert (media.size_text(video), len(video.open())) == ("3 of 32x16", 3)
    assert [frame.mode for frame in video.open()] == ["RGB"] * 3


def test_a_video_may_be_a_folder_or_a_list_of_frames(tmp_path: Path) -> None:
    files = [picture(tmp_path / f"{number}.png", seed=number) for number in range(3)]
    folder, paths = (
        media.accept("video", tmp_path),
        media.accept("video", [str(file) for file in files]),
    )
    assert media.size_text(folder) == media.size_text(paths) == "3 of 6x4"
    assert (
        media.fingerprint(folder)
        == media.fingerprint(paths)
        != media.fingerprint(media.accept("video", files[::-1]))
    )


def test_sound_is_samples_by_channel_between_minus_one_and_one(tmp_path: Path) -> None:
    audio = media.accept("audio", sound(tmp_path / "a.wav"), rate=8000)
    assert media.size_text(audio) == "float32[1, 3]"
    assert audio.open().tolist() == [[0.0, 0.5, -1.0]]


def test_what_is_no_file_of_its_kind_is_said(tmp_path: Path) -> None:
    text = tmp_path / "a.png"
    text.write_text("no picture")
    whole = picture(tmp_path / "b.png", (64, 64)).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    Image.fromarray(np.zeros((2, 2), dtype=np.uint16)).save(tmp_path / "deep.png")
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    (tmp_path / "a.mp4").write_text("no film")
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    picture(tmp_path / "two" / "0.png")
    picture(tmp_path / "two" / "1.png", (8, 8))
    wrong = {
        ("image", "none.png"): "no such file",
        ("image", "a.png"): "is no image that can be read",
        ("image", "cut.png"): "is no image that can be read: .*truncated",
        ("image", "deep.png"): "pixels of mode I;16: save it with 8 bits",
        ("image", "empty"): "cannot be read: Is a directory",
        ("mask", "a.wav"): "is no image",
        ("audio", "a.wav"): "is no wav file",
        ("video", "a.mp4"): "is no video that can be read",
        ("video", "empty"): "has no frames",
        ("video", "two"): "frames are of several sizes: 6x4, 8x8",
    }
    with pytest.raises(ValueError, match="has no file name"):
        media.accept("image", "")
    for (kind, name), message in wrong.items():
        with pytest.raises(ValueError, match=message):
            media.accept(kind, tmp_path / name)


def test_sound_of_another_rate_is_refused_and_says_both(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 8000 samples per second, and 44100 are needed"):
        media.accept("audio", sound(tmp_path / "a.wav"), rate=44100)


def test_a_tensor_is_alone_in_its_file(tmp_path: Path) -> None:
    file, value = tmp_path / "a.safetensors", torch.arange(6.0).reshape(1, 2, 3)
    save_file({"x": value}, file)
    tensor_file = media.accept("tensor", str(file))
    assert torch.equal(tensor_file.open(), value)
    assert (
        tensor_file.size_text
        == media.size_text(media.blank("tensor", {"shape": (1, 2, 3)}))
        == "float32[1, 2, 3]"
    )
    save_file({"x": value, "y": value + 1}, file)
    with pytest.raises(InputError, match=r"a\.safetensors: has changed"):
        tensor_file.open()
    with pytest.raises(ValueError, match="has 2 tensors: give a file with one"):
        media.accept("tensor", file)
    file.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"a\.safetensors: is no safetensors file"):
        media.accept("tensor", file)
    with pytest.raises(InputError, match="samples="):
        media.blank("tensor", {"shape": (2**40,)})


@pytest.mark.parametrize(
    ("kind", "value"),
    [("image", 3), ("image", np.zeros(5)), ("video", []), ("audio", None), ("mask", [1])],
)
def test_objects_of_another_kind_are_refused(kind: str, value: Any) -> None:
    with pytest.raises(ValueError, match="is not (an image|a mask|a video|audio)"):
        media.accept(kind, value)


def test_objects_are_passed_on_as_they_are() -> None:
    image, tensor = Image.new("RGB", (3, 2)), torch.zeros(1, 3, 8, 8)
    assert media.accept("image", image) is image
    assert media.accept("image", tensor) is tensor
    assert media.size_text(tensor) == "float32[1, 3, 8, 8]"
    assert media.size_text([image] * 4) == "4 of 3x2"


def test_equal_content_has_equal_names_whatever_the_file_is_called(tmp_path: Path) -> None:
    first, copy = picture(tmp_path / "a.png"), picture(tmp_path / "b.png")
    other = picture(tmp_path / "c.png", seed=1)
    fingerprints = [media.fingerprint(media.accept("image", file)) for file in (first, copy, other)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    tensors = [media.fingerprint(torch.full((2, 2), value)) for value in (1.0, 1.0, 2.0)]
    assert tensors[0] == tensors[1] != tensors[2]


def test_a_file_that_changes_before_it_is_taken_is_refused(tmp_path: Path) -> None:
    image = media.accept("image", picture(tmp_path / "a.png"))
    picture(tmp_path / "a.png", seed=1)
    with pytest.raises(InputError, match="has changed since the run was planned"):
        image.open()

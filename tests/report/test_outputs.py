"""What a run makes as files: which output goes where in which format, and what is refused before
anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from graphrun.errors import InputError
from graphrun.graph import media
from graphrun.report.outputs import output_files, request_files, save_outputs

KINDS = {"image": "image", "film": "video", "sound": "audio", "latents": "latents"}


@dataclass(frozen=True)
class Sound:
    samples: Any
    rate: int


def frames(count: int, size: tuple[int, int] = (8, 8)) -> list[Image.Image]:
    return [Image.new("RGB", size, (20 * n, 0, 0)) for n in range(count)]


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_several_pictures_sort_as_they_follow(tmp_path: Path) -> None:
    paths = save_outputs({"image": frames(12)}, tmp_path / "a.png")
    assert names(paths)[:3] == ["a-00.png", "a-01.png", "a-02.png"]
    assert names(paths) == sorted(names(paths))
    assert Image.open(paths[11]).getpixel((0, 0)) == (220, 0, 0)
    assert names(save_outputs({"image": frames(1)}, tmp_path / "b.png")) == ["b.png"]


def test_several_videos_are_all_written(tmp_path: Path) -> None:
    assert len(save_outputs({"image": [frames(2), frames(3)]}, tmp_path / "a.png")) == 5


def test_a_gif_holds_a_whole_video(tmp_path: Path) -> None:
    (path,) = save_outputs({"image": frames(5)}, tmp_path / "a.gif", fps=8)
    with Image.open(path) as moving:
        assert (moving.n_frames, moving.info["duration"]) == (5, 120)
    assert names(save_outputs({"image": [frames(2), frames(3)]}, tmp_path / "b.gif")) == [
        "b-0.gif",
        "b-1.gif",
    ]
    (image_path,) = save_outputs({"image": frames(1)[0]}, tmp_path / "c.gif")
    assert Image.open(image_path).size == (8, 8)


@pytest.mark.parametrize("size", [(32, 16), (31, 17)])
def test_an_mp4_holds_every_frame_at_its_rate(tmp_path: Path, size: tuple[int, int]) -> None:
    import av

    (path,) = save_outputs({"film": frames(9, size)}, tmp_path / "a.mp4", fps=12.5)
    with av.open(str(path)) as container:
        assert float(container.streams.video[0].average_rate) == 12.5
    frames_read = media.accept("video", path).open()
    assert (len(frames_read), frames_read[0].size) == (9, size)
    assert abs(frames_read[8].getpixel((3, 3))[0] - 160) <= 4, "compressed, and still this frame"


def test_formats_are_what_their_names_say(tmp_path: Path) -> None:
    for suffix, kind in ((".png", "PNG"), (".jpg", "JPEG"), (".webp", "WEBP")):
        (path,) = save_outputs({"image": Image.new("RGBA", (8, 8))}, tmp_path / f"a{suffix}")
        assert Image.open(path).format == kind


def test_sound_is_as_it_was_made(tmp_path: Path) -> None:
    samples = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    (path,) = save_outputs({"sound": Sound(samples, 16000)}, tmp_path / "a.wav")
    assert media.accept("audio", path, rate=16000).open().tolist() == samples.tolist()
    pytest.importorskip("soundfile")
    (path,) = save_outputs({"sound": Sound(samples, 16000)}, tmp_path / "a.flac")
    assert np.abs(media.accept("audio", path, rate=16000).open() - samples).max() < 2**-14


def test_what_a_path_does_not_suit_goes_beside_it(tmp_path: Path) -> None:
    outputs = {
        "image": frames(1)[0],
        "sound": [Sound(np.zeros((1, 2), np.float32), 8)] * 2,
        "latents": torch.ones(2),
    }
    paths = save_outputs(outputs, tmp_path / "a.png")
    assert names(paths) == ["a.png", "a-0.wav", "a-1.wav", "a.safetensors"]


def test_named_outputs_go_where_each_is_sent_and_others_nowhere(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    target = output_files(
        [f"latents={tmp_path}/l.safetensors", f"film={tmp_path}/film"], KINDS, tmp_path / "x"
    )
    outputs = {
        "image": frames(1)[0],
        "film": frames(3),
        "latents": torch.ones(2),
        "sound": Sound(np.zeros((1, 2)), 8),
    }
    paths = save_outputs(outputs, target)
    assert [str(path.relative_to(tmp_path)) for path in paths] == [
        "l.safetensors",
        *(f"film/000{n}.png" for n in range(3)),
    ]
    assert load_file(paths[0])["latents"].tolist() == [1.0, 1.0]
    assert names(sorted(tmp_path.iterdir())) == ["film", "l.safetensors"]


def test_a_folder_of_frames_is_replaced_as_a_whole_and_no_other_folder_is(tmp_path: Path) -> None:
    save_outputs({"film": frames(5)}, tmp_path / "film")
    assert (
        len(save_outputs({"film": frames(2)}, tmp_path / "film"))
        == len(list((tmp_path / "film").iterdir()))
        == 2
    )
    (tmp_path / "film" / "mine.txt").write_text("kept")
    for call in (
        lambda: output_files([f"film={tmp_path}/film"], KINDS, tmp_path / "x"),
        lambda: save_outputs({"a": frames(2)}, tmp_path / "film"),
    ):
        with pytest.raises(InputError, match="is not a folder of frames"):
            call()
    assert len(list((tmp_path / "film").iterdir())) == 3
    assert output_files([f"{tmp_path}/film"], KINDS, tmp_path / "x", of_list=True), (
        "a folder of each request's files is only added to"
    )


def test_the_default_is_by_what_there_is(tmp_path: Path) -> None:
    for kinds, name in (
        ({"a": "image"}, "g.png"),
        ({"a": "video"}, "g.mp4"),
        ({"a": "audio"}, "g.wav"),
        ({"a": "embeds"}, "g.png"),
    ):
        assert output_files([], kinds, tmp_path / "g") == {"": tmp_path / name}
    target = output_files([], {"a": "image", "b": "video"}, tmp_path / "g")
    assert target == {"a": tmp_path / "g-a.png", "b": tmp_path / "g-b.mp4"}
    assert request_files(target, 3, {}, {"a": "image", "b": "video"}) == {
        "a": tmp_path / "g-a-0003.png",
        "b": tmp_path / "g-b-0003.mp4",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["imgae=a.png"], "no such output 'imgae'; outputs are film, image, latents, sound"),
        (["image="], "has no file name"),
        (["image=a.xyz"], "a.xyz: .xyz is not known; output files are .png"),
        (["a.xyz"], ".xyz is not known"),
        (["image=a.wav"], "image is image, which is not saved as .wav but as .png"),
        (["film=a.wav"], "film is video, which is not saved as .wav but as .mp4"),
        (["sound=a.png"], "sound is audio, which is not saved as .png but as .wav"),
        (["latents=a"], "latents is latents, which is not saved as a folder but as .safetensors"),
        (["a.png", "b.png"], "say for which output"),
        (["image=a.png", "b.png"], "say for which output"),
        (["image=a.png", "film=a.png"], "two outputs have the same file"),
        (["image=/proc/none/a.png"], "cannot be written"),
    ],
)
def test_what_will_not_do_is_refused_before_anything_is_loaded(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        output_files(arguments, KINDS, Path("x"))


def test_files_say_what_they_were_made_of(tmp_path: Path) -> None:
    import json

    import av
    from safetensors import safe_open

    origin = {
        "graph": "g",
        "inputs": {"prompt": "ein Käse", "seed": 3},
        "plan": "0123",
        "versions": {"graphrun": "1"},
    }
    outputs = {
        "image": frames(1)[0],
        "film": frames(2),
        "sound": Sound(np.zeros((1, 3), np.float32), 8000),
        "latents": torch.ones(2),
    }

    def written(name: str, suffix: str) -> Path:
        return save_outputs({name: outputs[name]}, tmp_path / f"a{suffix}", source=origin)[0]

    assert json.loads(Image.open(written("image", ".png")).text["graphrun"]) == origin
    for suffix in (".jpg", ".webp", ".tif"):
        assert json.loads(Image.open(written("image", suffix)).getexif()[0x010E]) == origin
    assert json.loads(Image.open(written("film", ".gif")).info["comment"]) == origin
    assert json.loads(Image.open(written("film", "")).text["graphrun"]) == origin
    with av.open(str(written("film", ".mp4"))) as container:
        assert json.loads(container.metadata["comment"]) == origin
    sound = written("sound", ".wav")
    assert media.accept("audio", sound, rate=8000).open().shape == (1, 3)
    data = sound.read_bytes()
    assert int.from_bytes(data[4:8], "little") == len(data) - 8
    assert json.loads(data[data.index(b"ICMT") + 8 :].rstrip(b"\0")) == origin
    with safe_open(written("latents", ".safetensors"), "pt") as tensors:
        assert json.loads(tensors.metadata()["graphrun"]) == origin


@pytest.mark.parametrize(
    ("file_name", "arguments", "existing"),
    [
        ("a.png", ["a.png"], "a.png"),
        ("a-07.png", ["a.png"], "a-07.png"),
        ("a-0001-2.png", ["a.png"], "a-0001-2.png"),
        ("a.wav", ["a.png"], "a.wav"),
        ("b.gif", ["film=b.gif"], "b.gif"),
        ("a/0000.png", ["image=a"], "a"),
        ("a-b.png", ["a.png"], ""),
        ("a.txt", ["a.png"], ""),
        ("a.wav", ["image=a.png"], ""),
    ],
)
def test_what_is_there_is_not_overwritten(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file_name: str,
    arguments: list[str],
    existing: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file_name).parent.mkdir(exist_ok=True)
    Path(file_name).touch()
    kinds = {"image": "image", "sound": "audio", "film": "video"}
    assert output_files(arguments, kinds, Path("a"), overwrite=True)
    if existing:
        with pytest.raises(InputError, match=f"^{existing} already exists; add --overwrite$"):
            output_files(arguments, kinds, Path("a"), overwrite=False)
    else:
        assert output_files(arguments, kinds, Path("a"), overwrite=False)


@pytest.mark.parametrize(
    ("file_names", "expected"),
    [
        ([], "a.png"),
        (["a-b.png", "a.txt"], "a.png"),
        (["a.png"], "a-2.png"),
        (["a.wav"], "a-2.png"),
        (["a.png", "a-2.png", "a-4.png"], "a-3.png"),
        (["a-0.png", "a-1.png"], "a-2.png"),
        (["a.png", "a-2-0.png", "a-2-1.png"], "a-3.png"),
    ],
)
def test_the_default_name_is_numbered_where_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_names: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in file_names:
        Path(name).touch()
    kinds = {"image": "image", "sound": "audio"}
    assert output_files([], kinds, Path("a"), overwrite=False) == {"": Path(expected)}
    assert output_files([], kinds, Path("a"), overwrite=True) == {"": Path("a.png")}
    film = {"image": "image", "film": "video"}
    for name in ("a-image.png", "a-film.mp4"):
        Path(name).touch()
    assert output_files([], film, Path("a"), overwrite=False) == {
        "image": Path("a-2-image.png"),
        "film": Path("a-2-film.mp4"),
    }


@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        (["a.png"], {"": "a-0007.png"}),
        (["a"], {"": "a/0007.png"}),
        (["image=a", "sound=b.wav"], {"image": "a/0007.png", "sound": "b-0007.wav"}),
        (["b/{line:04d}-{seed}.png"], {"": "b/0007-3.png"}),
        (["b/{prompt}.png"], {"": "b/A-harbour-at-dusk-etc-x.png"}),
        (["{scale:.1f}-{line}.png"], {"": "0.5-7.png"}),
    ],
)
def test_files_of_a_list_lie_in_a_folder_or_are_named_by_a_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], files: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = {"image": "image", "sound": "audio"}
    inputs = {
        "seed": 3,
        "prompt": "../A harbour / at dusk: etc\\x",
        "scale": 0.5,
        "image": object(),
    }
    target = output_files(arguments, kinds, Path("a"))
    assert request_files(target, 7, inputs, kinds) == {
        name: Path(path) for name, path in files.items()
    }


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "a-{sed}.png",
            r"-o a-{sed}.png: {sed} is neither the line nor a plain input; did you mean 'seed'",
        ),
        ("a-{image}.png", "{image} is neither the line nor a plain input"),
        ("a-{prompt:04d}.png", "{prompt:04d}: Unknown format code 'd'"),
    ],
)
def test_a_wrong_pattern_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        request_files(
            {"": Path(pattern)},
            1,
            {"seed": 3, "prompt": "x", "image": object()},
            {"image": "image"},
        )


def test_the_bytes_of_a_video_do_not_depend_on_the_number_of_cpus(tmp_path: Path) -> None:
    code = "\n".join(
        (
            "import os, sys, hashlib, pathlib",
            "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))} if sys.argv[1] == 'one' else"
            " os.sched_getaffinity(0))",
            "from PIL import Image",
            "from graphrun.report.outputs import save_outputs",
            "import random; rng = random.Random(0)",
            "frames = [Image.frombytes('RGB', (320, 192), rng.randbytes(3 * 320 * 192))"
            " for _ in range(12)]",
            "path = pathlib.Path(sys.argv[1] + '.mp4')",
            "save_outputs({'film': frames}, path)",
            "print(hashlib.sha256(path.read_bytes()).hexdigest())",
        )
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code, name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for name in ("one", "all")
    }
    assert len(digests) == 1

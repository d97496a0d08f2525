"""Writes the outputs of a run: images, videos, audio, tensors. File names and formats are checked before anything is loaded.

Files are written to a temporary name and renamed, so that they are complete or absent. Knows neither graphs nor ops.

    image     png jpg webp ..., several as a-0.png a-1.png; a folder
    video     mp4 gif; a folder, or pictures, of its frames
    audio     wav; flac where the package soundfile is installed
    tensors   safetensors
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from graphrun.errors import InputError
from graphrun.report.plan_files import require_writable, write_with

PICTURES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP", ".bmp": "BMP", ".tif": "TIFF", ".tiff": "TIFF"}
VIDEOS = (".mp4", ".gif")
SOUNDS = (".wav", ".flac")
TENSORS = ".safetensors"
# The suffixes that each kind of output may be saved with, the default first. "": a folder.
SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "image": (*PICTURES, "", *VIDEOS),
    "video": (*VIDEOS, "", *PICTURES),
    "audio": SOUNDS,
}
FPS = 16.0  # default frame rate: that of Wan's videos


@dataclass(frozen=True, slots=True)
class OutputFile:
    """The output files of a run: a path for each output in ``named``, and no other output; without any, ``base`` for all.

    A path without suffix is a folder.
    """

    base: Path
    named: Mapping[str, Path] = field(default_factory=dict)

    @property
    def first(self) -> Path:
        """The first path, which names the set."""
        return next(iter(self.named.values()), self.base)

    def numbered(self, number: int) -> OutputFile:
        """The output files of request ``number`` of a list: ``a-0007.png``."""

        def of(path: Path) -> Path:
            return path.with_stem(f"{path.stem}-{number:04d}")

        return replace(self, base=of(self.base), named={name: of(path) for name, path in self.named.items()})


def output_file_of(asked: Sequence[str], kinds: Mapping[str, str], default: Path) -> OutputFile:
    """The output files for outputs of ``kinds`` (name -> kind).

    ``asked``: a path, or ``name=path`` for each output; empty: ``default`` with the kinds' suffix. Raises InputError for an unknown
    name or suffix, a suffix that does not fit the kind, and a path that cannot be written.
    """
    named: dict[str, Path] = {}
    bare: list[Path] = []
    for text in asked:
        name, equals, path = text.partition("=")
        if equals and (name in kinds or "/" not in name):
            if name not in kinds:
                raise InputError(f"-o {text}: no such output {name!r}; outputs are {', '.join(sorted(kinds))}")
            if not path:
                raise InputError(f"-o {text}: names no file")
            named[name] = _suited(name, kinds[name], Path(path))
        else:
            bare.append(_known(Path(text)))
    if len(bare) > 1 or (bare and named):
        raise InputError(f"-o {bare[-1]}: say for which output, such as -o {next(iter(kinds))}={bare[-1]}")
    if len(set(named.values())) < len(named):
        raise InputError("-o: two outputs have the same file")
    if not asked and {"image", "video"} <= set(kinds.values()):
        named = {
            name: default.with_name(f"{default.name}-{name}{SUFFIXES.get(kind, (TENSORS,))[0]}") for name, kind in kinds.items()
        }
    first = next((SUFFIXES[kind][0] for wanted in SUFFIXES for kind in kinds.values() if kind == wanted), ".png")
    target = OutputFile(bare[0] if bare else default.with_name(default.name + first), named)
    require_writable(*(named.values() if named else [target.base]))
    return target


def _known(path: Path) -> Path:
    suffix = path.suffix.lower()
    suffixes = (*PICTURES, *VIDEOS, *SOUNDS, TENSORS)
    if suffix and suffix not in suffixes:
        raise InputError(f"{path}: {suffix} is not known; output files are {', '.join(suffixes)}")
    if suffix == ".flac" and find_spec("soundfile") is None:
        raise InputError(f"{path}: writing flac needs the package soundfile: install it, or use .wav")
    if not suffix:
        _refuse_foreign(path)
    return path


def _suited(name: str, kind: str, path: Path) -> Path:
    _known(path)
    allowed = SUFFIXES.get(kind, (TENSORS,))
    if path.suffix.lower() not in allowed:
        shown = ", ".join(suffix or "a folder" for suffix in allowed)
        what = kind if kind != "any" else "a tensor"
        raise InputError(f"{path}: {name} is {what}, which is not saved as {path.suffix or 'a folder'} but as {shown}")
    return path


def save_outputs(outputs: Mapping[str, Any], where: OutputFile | Path, fps: float = FPS) -> list[Path]:
    """Writes ``outputs`` and returns the paths, in order. Raises InputError where a file cannot be written.

    Several images are numbered with leading zeros. Where one path is for all outputs, those that do not fit its suffix are written
    beside it with another one: audio, and all tensors (embeddings, latents) in one file under names such as
    ``embeds.prompt_embeds``.
    """
    target = where if isinstance(where, OutputFile) else OutputFile(where)
    if target.named:
        return [path for name, to in target.named.items() for path in _saved({name: outputs[name]}, to, fps)]
    return _saved(outputs, target.base, fps)


def _saved(outputs: Mapping[str, Any], path: Path, fps: float) -> list[Path]:
    pictures, sounds = list(_pictures(list(outputs.values()), videos=path.suffix.lower() in VIDEOS)), list(_sounds(outputs))
    tensors = dict(_tensors("", dict(outputs)))
    written: list[Path] = []
    if pictures and not path.suffix:
        written += _folder(path, pictures)
    else:
        written += [_picture(to, picture, fps) for to, picture in _numbered(path, pictures)]
    sounding = path if path.suffix.lower() in SOUNDS else path.with_suffix(SOUNDS[0])
    written += [_sound(to, sound) for to, sound in _numbered(sounding, sounds)]
    if tensors:
        from safetensors.torch import save as packed

        data = packed({name: tensor.clone().contiguous() for name, tensor in tensors.items()})
        to = path.with_suffix(TENSORS)
        write_with(to, lambda temporary: temporary.write_bytes(data))
        written.append(to)
    return written


def _numbered(path: Path, things: Sequence[Any]) -> Iterator[tuple[Path, Any]]:
    """Each of ``things`` with its path: ``a.png`` for one, ``a-00.png`` and so on for several."""
    digits = len(str(len(things) - 1))
    for number, thing in enumerate(things):
        yield path if len(things) == 1 else path.with_stem(f"{path.stem}-{number:0{digits}}"), thing


def _picture(path: Path, picture: Any, fps: float) -> Path:
    if path.suffix.lower() == ".mp4":
        write_with(path, lambda to: _video(to, picture if isinstance(picture, list) else [picture], fps))
        return path
    kind = "GIF" if path.suffix.lower() == ".gif" else PICTURES.get(path.suffix.lower(), "PNG")
    if isinstance(picture, list):
        milliseconds, others = round(1000 / fps), picture[1:]
        write_with(path, lambda to: picture[0].save(to, kind, save_all=True, append_images=others, duration=milliseconds, loop=0))
    else:
        picture = picture.convert("RGB") if kind == "JPEG" and picture.mode not in ("RGB", "L") else picture
        write_with(path, lambda to: picture.save(to, format=kind))
    return path


def _video(path: Path, frames: Sequence[Any], fps: float) -> None:
    """H.264 in yuv420p, which every player supports; in yuv444p for odd sizes, since yuv420p needs even ones."""
    import av

    width, height = frames[0].size
    with av.open(str(path), "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options={"crf": "17"})
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv420p" if width % 2 == height % 2 == 0 else "yuv444p"
        of_picture: Any = av.VideoFrame.from_image
        for frame in frames:
            container.mux(stream.encode(of_picture(frame)))
        container.mux(stream.encode())


def _sound(path: Path, sound: Any) -> Path:
    def write(to: Path) -> None:
        if path.suffix.lower() == ".flac":
            import soundfile

            soundfile.write(str(to), sound.samples.T, sound.rate, format="FLAC")
            return
        from scipy.io import wavfile

        with to.open("wb") as file:
            wavfile.write(file, sound.rate, sound.samples.T)

    write_with(path, write)
    return path


def _folder(path: Path, pictures: Sequence[Any]) -> list[Path]:
    """Writes numbered ``pictures`` to the folder ``path``, which is renamed into place and replaces an earlier one."""
    _refuse_foreign(path)
    digits = max(4, len(str(len(pictures) - 1)))
    names = [f"{number:0{digits}}.png" for number in range(len(pictures))]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as name:
            made = Path(name) / "made"
            made.mkdir()
            for picture, each in zip(pictures, names, strict=True):
                picture.save(made / each, format="PNG")
            if path.is_dir():
                shutil.move(path, Path(name) / "before")
            made.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
    return [path / each for each in names]


def _refuse_foreign(path: Path) -> None:
    """Raises InputError where ``path`` exists and is anything but a folder of numbered images."""
    if path.exists() and (not path.is_dir() or any(not (f.suffix == ".png" and f.stem.isdigit()) for f in path.iterdir())):
        raise InputError(f"{path}: exists, and is not a folder of frames: choose another name")


def _pictures(values: list[Any], *, videos: bool) -> Iterator[Any]:
    """Every image in ``values`` and in nested lists; with ``videos`` a list of images is yielded as one video."""
    for value in values:
        if hasattr(value, "save") or (videos and isinstance(value, list) and value and hasattr(value[0], "save")):
            yield value
        elif isinstance(value, list):
            yield from _pictures(value, videos=videos)


def _sounds(outputs: Mapping[str, Any]) -> Iterator[Any]:
    for value in outputs.values():
        yield from (item for item in (value if isinstance(value, list) else [value]) if hasattr(item, "samples"))


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor or array in ``value``, as a tensor with its path."""
    if hasattr(value, "untyped_storage"):
        yield name, value
    elif hasattr(value, "__array_interface__") and hasattr(value, "dtype"):
        import torch

        yield name, torch.from_numpy(value)
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _tensors(f"{name}.{key}" if name else str(key), item)

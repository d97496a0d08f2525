"""What a run makes, as files: pictures, videos, sound, tensors. Where each goes is decided, and refused, before anything is loaded.

Decides formats and names. Nothing is half-written: a file appears under its name when it is complete. Knows neither graphs nor ops.

    image     png jpg webp ..., several as a-0.png a-1.png; a folder
    video     mp4 gif; a folder, or pictures, of its frames
    audio     wav; flac where the package soundfile is
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
from graphrun.report.plan_files import _whole, require_writable

PICTURES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP", ".bmp": "BMP", ".tif": "TIFF", ".tiff": "TIFF"}
FILMS = (".mp4", ".gif")
SOUNDS = (".wav", ".flac")
TENSORS = ".safetensors"
# What each kind of output may be saved as, what it is saved as by default first. "": a folder.
SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "image": (*PICTURES, "", *FILMS),
    "video": (*FILMS, "", *PICTURES),
    "audio": SOUNDS,
}
FPS = 16.0  # where nothing says how fast a video is; Wan's are made for it


@dataclass(frozen=True, slots=True)
class OutputFile:
    """Where outputs go: those that are ``named`` to a path each, and nothing else; where none is, all of them to ``base``.

    A folder's path has no suffix.
    """

    base: Path
    named: Mapping[str, Path] = field(default_factory=dict)

    @property
    def first(self) -> Path:
        """What stands for all of them."""
        return next(iter(self.named.values()), self.base)

    def numbered(self, number: int) -> OutputFile:
        """The place of item ``number`` of a list."""

        def of(path: Path) -> Path:
            return path.with_stem(f"{path.stem}-{number:04d}")

        return replace(self, base=of(self.base), named={name: of(path) for name, path in self.named.items()})


def output_file_of(asked: Sequence[str], kinds: Mapping[str, str], default: Path) -> OutputFile:
    """Where outputs of ``kinds`` go: ``asked`` has paths, or ``name=path``; where it is empty, ``default`` with a suffix for them.

    Raises InputError for a name that is none, a suffix that means nothing, and where nothing can be written.
    """
    named: dict[str, Path] = {}
    bare: list[Path] = []
    for text in asked:
        name, equals, path = text.partition("=")
        if equals and (name in kinds or "/" not in name):
            if name not in kinds:
                raise InputError(f"-o {text}: there is no output {name!r}; there are {', '.join(sorted(kinds))}")
            if not path:
                raise InputError(f"-o {text}: names no file")
            named[name] = _suited(name, kinds[name], Path(path))
        else:
            bare.append(_known(Path(text)))
    if len(bare) > 1 or (bare and named):
        raise InputError(f"-o {bare[-1]}: say of which output it is, such as -o {next(iter(kinds))}={bare[-1]}")
    if len(set(named.values())) < len(named):
        raise InputError("-o: two outputs go to one file")
    if not asked and {"image", "video"} <= set(kinds.values()):
        named = {
            name: default.with_name(f"{default.name}-{name}{SUFFIXES.get(kind, (TENSORS,))[0]}") for name, kind in kinds.items()
        }
    first = next((SUFFIXES[kind][0] for wanted in SUFFIXES for kind in kinds.values() if kind == wanted), ".png")
    place = OutputFile(bare[0] if bare else default.with_name(default.name + first), named)
    require_writable(*(named.values() if named else [place.base]))
    return place


def _known(path: Path) -> Path:
    suffix = path.suffix.lower()
    known = (*PICTURES, *FILMS, *SOUNDS, TENSORS)
    if suffix and suffix not in known:
        raise InputError(f"{path}: {suffix} is not known; files are {', '.join(known)}")
    if suffix == ".flac" and find_spec("soundfile") is None:
        raise InputError(f"{path}: flac is written where the package soundfile is installed: use .wav")
    if not suffix:
        _refuse_foreign(path)
    return path


def _suited(name: str, kind: str, path: Path) -> Path:
    _known(path)
    able = SUFFIXES.get(kind, (TENSORS,))
    if path.suffix.lower() not in able:
        shown = ", ".join(suffix or "a folder" for suffix in able)
        raise InputError(
            f"{path}: {name} is {kind if kind != 'any' else 'a tensor'}, and {path.suffix or 'a folder'} is not; {shown}"
        )
    return path


def save_outputs(outputs: Mapping[str, Any], where: OutputFile | Path, fps: float = FPS) -> list[Path]:
    """Writes ``outputs`` and returns the paths, in order. Raises InputError where something cannot be written.

    Several pictures get a number each, so that they sort as they follow. Of a path for all, what it does not suit goes beside it
    with another suffix: sound, and tensors (embeddings, latents), all into one file under names such as ``embeds.prompt_embeds``.
    """
    place = where if isinstance(where, OutputFile) else OutputFile(where)
    if place.named:
        return [path for name, to in place.named.items() for path in _saved({name: outputs[name]}, to, fps)]
    return _saved(outputs, place.base, fps)


def _saved(outputs: Mapping[str, Any], path: Path, fps: float) -> list[Path]:
    pictures, sounds = list(_pictures(list(outputs.values()), videos=path.suffix.lower() in FILMS)), list(_sounds(outputs))
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
        _whole(to, lambda temporary: temporary.write_bytes(data))
        written.append(to)
    return written


def _numbered(path: Path, things: Sequence[Any]) -> Iterator[tuple[Path, Any]]:
    """Each of ``things`` with its path: ``a.png`` for one, ``a-00.png`` and so on for several."""
    digits = len(str(len(things) - 1))
    for number, thing in enumerate(things):
        yield path if len(things) == 1 else path.with_stem(f"{path.stem}-{number:0{digits}}"), thing


def _picture(path: Path, picture: Any, fps: float) -> Path:
    if path.suffix.lower() == ".mp4":
        _whole(path, lambda to: _film(to, picture if isinstance(picture, list) else [picture], fps))
        return path
    kind = "GIF" if path.suffix.lower() == ".gif" else PICTURES.get(path.suffix.lower(), "PNG")
    if isinstance(picture, list):
        milliseconds, rest = round(1000 / fps), picture[1:]
        _whole(path, lambda to: picture[0].save(to, kind, save_all=True, append_images=rest, duration=milliseconds, loop=0))
    else:
        picture = picture.convert("RGB") if kind == "JPEG" and picture.mode not in ("RGB", "L") else picture
        _whole(path, lambda to: picture.save(to, format=kind))
    return path


def _film(path: Path, frames: Sequence[Any], fps: float) -> None:
    """H.264 with every player's colours; of an odd number of pixels those that few know, since the others are shared by two."""
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

    _whole(path, write)
    return path


def _folder(path: Path, pictures: Sequence[Any]) -> list[Path]:
    """``pictures`` numbered in the folder ``path``, which appears when it is complete, in place of one that was written so."""
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
    """A folder of something else than numbered pictures is not replaced."""
    if path.exists() and (not path.is_dir() or any(not (f.suffix == ".png" and f.stem.isdigit()) for f in path.iterdir())):
        raise InputError(f"{path}: is there, and is no folder of frames: give another name")


def _pictures(values: list[Any], *, videos: bool) -> Iterator[Any]:
    """Every picture in ``values`` and the lists in it; for ``videos`` a list of pictures is one thing."""
    for value in values:
        if hasattr(value, "save") or (videos and isinstance(value, list) and value and hasattr(value[0], "save")):
            yield value
        elif isinstance(value, list):
            yield from _pictures(value, videos=videos)


def _sounds(outputs: Mapping[str, Any]) -> Iterator[Any]:
    for value in outputs.values():
        yield from (item for item in (value if isinstance(value, list) else [value]) if hasattr(item, "samples"))


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor in ``value`` with its path in it, arrays as tensors."""
    if hasattr(value, "untyped_storage"):
        yield name, value
    elif hasattr(value, "__array_interface__") and hasattr(value, "dtype"):
        import torch

        yield name, torch.from_numpy(value)
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _tensors(f"{name}.{key}" if name else str(key), item)

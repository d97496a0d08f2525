"""Images, masks, videos, audio and tensors as inputs of a run: read, checked, described, digested.

A file is read when its input is resolved, and again when a stage uses it; in between only its path,
size and digest are stored. Arrays and tensors from Python pass unchanged. Imports neither pipelines
nor devices.

    kind           files                                  objects in Python
    image, mask    png jpg webp ...                       PIL, RGB or L
    video          mp4 gif ..., a folder or list of       a list of PIL pictures
                   frames
    audio          wav, flac                              an array [channels samples], float32
                                                          in [-1, 1]
    tensor         safetensors with one tensor            a tensor
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphrun.errors import InputError
from graphrun.limits import require
from graphrun.reading import open_regular as opened_file
from graphrun.reading import parse_json

# frame rates that both kinds of video files can store: a GIF's delay is 0.01 to 655.35 s, mp4's
# rates here are fractions up to 1001
SLOWEST_FPS, FASTEST_FPS = 0.01, 1000.0
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
# PIL's modes with 8 bits a channel, which it converts
MODES = (
    "1",
    "L",
    "LA",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "CMYK",
    "YCbCr",
    "HSV",
    "LAB",
)
# placeholders for planning without the file: a grey image, a mask that selects everything
GREY, FULL = (127, 127, 127), 255
AN = {
    "image": "an image",
    "mask": "a mask",
    "video": "a video",
    "audio": "audio",
    "tensor": "a tensor",
}


@dataclass(frozen=True, slots=True)
class File:
    """The files of an input. ``size_text``: from `size_text`. ``digest``: SHA-256 of the
    content."""

    kind: str
    paths: tuple[Path, ...]
    size_text: str
    digest: str

    def open(self) -> Any:
        """Return the content. Raises InputError if the file has changed since planning."""
        if _digest(self.paths) != self.digest:
            raise InputError(
                f"{self.paths[0]}: has changed since the run was planned: start it again"
            )
        return _content(self.kind, self.paths)


def accept(kind: str, value: Any, rate: int | None = None) -> Any:
    """Return ``value`` as an input of ``kind``: a `File` for a path, an object unchanged.

    A video may also be a folder or a list of paths. ``rate``: samples per second that audio must
    have. Raises ValueError saying what is wrong with the value.
    """
    if isinstance(value, File) and value.kind == kind:
        return value
    if isinstance(value, str) and not value:
        raise ValueError("has no file name")
    if isinstance(value, (str, Path)):
        return _file(
            kind,
            _frames(Path(value)) if kind == "video" and Path(value).is_dir() else (Path(value),),
            rate,
        )
    if (
        kind == "video"
        and isinstance(value, (list, tuple))
        and value
        and all(isinstance(item, (str, Path)) for item in value)
    ):
        return _file(kind, tuple(Path(item) for item in value), rate)
    if kind == "video" and isinstance(value, (list, tuple)) and value:
        return [_object("image", item, AN[kind]) for item in value]
    return _object(kind, value, AN[kind])


def opened(value: Any) -> Any:
    """Return ``value`` with every `File` in it replaced by its content."""
    if isinstance(value, list):
        return [opened(item) for item in value]
    return value.open() if isinstance(value, File) else value


def blank(kind: str, sizes: Mapping[str, Any]) -> Any:
    """Return a placeholder for planning. ``sizes``: height and width in pixels, frames, rate and
    seconds, or a shape."""
    from PIL import Image

    if kind == "tensor":
        import numpy as np

        require("samples", math.prod(sizes["shape"]), f"a tensor of shape {list(sizes['shape'])}")
        return np.zeros(sizes["shape"], dtype=np.float32)

    if kind == "audio":
        import numpy as np

        length = sizes["rate"] * sizes["seconds"]
        require(
            "samples",
            math.ceil(length) if math.isfinite(length) else 2**62,
            f"audio of {length:g} samples",
        )
        return np.zeros((1, max(1, round(length))), dtype=np.float32)
    size = int(sizes["width"]), int(sizes["height"])
    require("pixels", math.prod(size), f"{AN[kind]} of {size[0]} x {size[1]} pixels")
    if kind == "mask":
        return Image.new("L", size, FULL)
    picture = Image.new("RGB", size, GREY)
    return [picture] * int(sizes["frames"]) if kind == "video" else picture


def size_text(value: Any) -> str:
    """Describe as text what a plan depends on: a number, or the size of an image, array or list."""
    if isinstance(value, File):
        return value.size_text
    if isinstance(value, (list, tuple)):
        if all(isinstance(item, str) for item in value):
            return f"{len(value)} texts"
        sizes = [size_text(item) for item in value]
        return f"{len(sizes)} of {sizes[0]}" if len(set(sizes)) == 1 else ", ".join(sizes)
    if _is_picture(value):
        mode = "" if value.mode in ("RGB", "L") else f" {value.mode}"
        return f"{value.size[0]}x{value.size[1]}{mode}"
    if hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return str(value)


def fingerprint(value: Any) -> Any:
    """Return ``value`` as plain data that is equal for equal content: images, arrays and files
    become their SHA-256."""
    if isinstance(value, File):
        return [value.kind, value.size_text, value.digest]
    if isinstance(value, (list, tuple)):
        return [fingerprint(item) for item in value]
    if _is_picture(value):
        return [
            "picture",
            value.mode,
            list(value.size),
            hashlib.sha256(value.tobytes()).hexdigest(),
        ]
    if hasattr(value, "shape"):
        array = value.detach().cpu().float().numpy() if hasattr(value, "untyped_storage") else value
        return ["array", size_text(value), hashlib.sha256(array.tobytes()).hexdigest()]
    return value


def size_of(value: Any) -> tuple[int, int] | None:
    """Return width and height of an image, a mask or their file, in pixels; None for others."""
    if isinstance(value, File) and value.kind in ("image", "mask"):
        width, _, height = value.size_text.partition("x")
        return int(width), int(height)
    return (value.size[0], value.size[1]) if _is_picture(value) else None


def _is_picture(value: Any) -> bool:
    return hasattr(value, "mode") and hasattr(value, "size") and hasattr(value, "tobytes")


def _object(kind: str, value: Any, noun: str) -> Any:
    if _is_picture(value) and kind in ("image", "mask"):
        return value
    dimensions = {"image": (2, 3, 4), "mask": (2, 3, 4), "video": (4, 5), "audio": (1, 2, 3)}.get(
        kind
    )
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if (dimensions is not None and len(value.shape) not in dimensions) or 0 in value.shape:
            raise ValueError(f"an array of shape {list(value.shape)} is not {noun}")
        return value
    raise ValueError(
        f"{_short(value)} is not {noun}: give a file, or in Python a PIL image, an array or a "
        "tensor"
    )


def _short(value: Any) -> str:
    return (
        repr(value) if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
    )


def _frames(folder: Path) -> tuple[Path, ...]:
    try:
        frames = tuple(sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES))
    except OSError as error:
        raise ValueError(f"{folder}: cannot be read: {error.strerror}") from None
    if not frames:
        raise ValueError(f"{folder}: has no frames: {', '.join(PICTURES)}")
    return frames


def _file(kind: str, paths: tuple[Path, ...], rate: int | None) -> File:
    try:
        digest = _digest(paths)
        content = _content(kind, paths)
    except InputError as error:
        raise ValueError(str(error)) from None
    if kind == "audio":
        file_rate, _ = _sound(paths[0])
        if rate is not None and file_rate != rate:
            raise ValueError(
                f"{paths[0]}: has {file_rate} samples per second, and {rate} are needed: convert it"
            )
    return File(kind, paths, size_text(content), digest)


def _digest(paths: tuple[Path, ...]) -> str:
    total = hashlib.sha256()
    for path in paths:
        try:
            with opened_file(path) as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return total.hexdigest()


def _content(kind: str, paths: tuple[Path, ...]) -> Any:
    """Return the content of the files. Raises InputError if they are not of this kind."""
    if kind == "audio":
        return _sound(paths[0])[1]
    if kind == "tensor":
        return _tensor(paths[0])
    if kind != "video":
        return _picture(paths[0], "L" if kind == "mask" else "RGB")
    single = len(paths) > 1 or paths[0].suffix.lower() in PICTURES
    frames = (
        _bounded(paths[0], (_picture(path, "RGB") for path in paths)) if single else _film(paths[0])
    )
    if len({frame.size for frame in frames}) > 1:
        raise InputError(
            f"{paths[0]}: the frames are of several sizes: "
            f"{', '.join(sorted({size_text(frame) for frame in frames}))}"
        )
    return frames


@contextmanager
def _reading(path: Path, noun: str, *further_errors: type[Exception]) -> Iterator[None]:
    """Turn OSError, ValueError and ``further_errors`` into an InputError that names ``path``."""
    errors: tuple[type[Exception], ...] = (OSError, ValueError, *further_errors)
    try:
        yield
    except errors as error:
        raise InputError(f"{path}: is no {noun} that can be read: {error}") from None


def _picture(path: Path, mode: str) -> Any:
    from PIL import Image, ImageOps

    with (
        _reading(path, "image", SyntaxError, Image.DecompressionBombError),
        Image.open(path) as image,
    ):
        require(
            "pixels",
            math.prod(image.size),
            f"it has {image.size[0]} x {image.size[1]} pixels",
            str(path),
        )
        if image.mode not in MODES:
            raise InputError(
                f"{path}: has pixels of mode {image.mode}: save it with 8 bits a channel"
            )
        return ImageOps.exif_transpose(image).convert(mode)


def _film(path: Path) -> list[Any]:
    if path.suffix.lower() == ".gif":
        from PIL import Image, ImageSequence

        with (
            _reading(path, "animation", SyntaxError, Image.DecompressionBombError),
            Image.open(path) as image,
        ):
            return _bounded(path, (frame.convert("RGB") for frame in ImageSequence.Iterator(image)))
    import av

    with _reading(path, "video", av.FFmpegError), av.open(str(path)) as container:
        decoded: Iterable[Any] = container.decode(video=0) if container.streams.video else ()
        frames = _bounded(path, (frame.to_image() for frame in decoded))
    if not frames:
        raise InputError(f"{path}: has no pictures")
    return frames


def _tensor(path: Path) -> Any:
    """Return the one tensor in the file ``path``."""
    from safetensors import SafetensorError, safe_open

    with (
        _reading(path, "safetensors file", SafetensorError),
        safe_open(path, framework="pt") as file,
    ):
        names = list(file.keys())
        if len(names) != 1:
            raise InputError(f"{path}: has {len(names)} tensors: give a file with one")
        return file.get_tensor(names[0])


def _bounded(path: Path, frames: Iterable[Any]) -> list[Any]:
    """Return ``frames`` as a list, decoded one by one up to the limit."""
    pictures, pixels = list[Any](), 0
    for frame in frames:
        pixels += math.prod(frame.size)
        require(
            "film_pixels",
            pixels,
            f"its first {len(pictures) + 1} frames have {pixels:,} pixels",
            str(path),
        )
        pictures.append(frame)
    return pictures


def _sound(path: Path) -> tuple[int, Any]:
    """Return samples per second, and the samples as float32 [channels samples]."""
    import numpy as np

    if path.suffix.lower() == ".wav":
        from scipy.io import wavfile

        with _reading(path, "wav file", EOFError, TypeError, struct.error):
            rate, samples = wavfile.read(path)
        samples = samples if samples.ndim == 2 else samples[:, None]
        if samples.dtype.kind == "u":
            samples = (samples.astype(np.float32) - 128) / 128
        elif samples.dtype.kind == "i":
            samples = samples.astype(np.float64) / -float(np.iinfo(samples.dtype).min)
        if samples.size == 0:
            raise InputError(f"{path}: has no samples")
    else:
        try:
            import soundfile
        except ImportError:
            raise InputError(
                f"{path}: only wav is read where the package soundfile is not installed"
            ) from None
        with _reading(path, "sound", RuntimeError, TypeError):
            samples, rate = soundfile.read(str(path), dtype="float32", always_2d=True)
    require("samples", samples.size, f"it has {samples.size:,} samples", str(path))
    return int(rate), np.ascontiguousarray(samples.T, dtype=np.float32)


def parse_list(text: str) -> Any:
    """Return the JSON list in ``text``; ``text`` itself if it does not start with ``[``. Raises
    ValueError for invalid JSON."""
    if not text.lstrip().startswith("["):
        return text
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a JSON list: {error}") from None

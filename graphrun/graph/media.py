"""Images, masks, videos, audio and tensors as inputs of a run: reading, checking, describing by
size, digesting by content.

A file is read when its input is resolved, and again when a stage takes it; in between only its
path, size and digest are kept. Arrays and tensors from Python are passed on as they are. Knows
neither pipelines nor devices.

    image  mask    png jpg webp ...                       PIL, RGB or L video          mp4 gif ...,
    a folder or list of frames    a list of PIL pictures audio          wav, flac
    an array [channels samples], float32 in [-1, 1] tensor         safetensors, of one tensor
    a tensor
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
from graphrun.reading import opened as opened_file
from graphrun.reading import parse_json

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
# of 8 bits a channel, which PIL converts
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
# Placeholders for plans without the file: an image of one colour, a mask that selects everything.
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
    """The file or files of an input. ``told``: the size as `told` describes it; ``digest``: SHA-256
    of the content."""

    kind: str
    paths: tuple[Path, ...]
    told: str
    digest: str

    def open(self) -> Any:
        """The content. Raises InputError where the file has changed since the run was planned."""
        if _digest(self.paths) != self.digest:
            raise InputError(
                f"{self.paths[0]}: has changed since the run was planned: start it again"
            )
        return _content(self.kind, self.paths)


def accept(kind: str, value: Any, rate: int | None = None) -> Any:
    """``value`` as an input of ``kind``: a `File` for a path (for a video also a folder, or a list
    of paths), an object as it is.

    ``rate``: samples per second that audio must have. Raises ValueError saying what is wrong with
    the value.
    """
    if isinstance(value, File) and value.kind == kind:
        return value
    if isinstance(value, str) and not value:
        raise ValueError("names no file")
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
    """``value`` with every `File` in it replaced by its content."""
    if isinstance(value, list):
        return [opened(item) for item in value]
    return value.open() if isinstance(value, File) else value


def blank(kind: str, sizes: Mapping[str, Any]) -> Any:
    """A placeholder for planning with ``sizes``: height and width in pixels, frames, rate and
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


def told(value: Any) -> str:
    """What a plan depends on of an input, as text: a number itself, the size of an image, array or
    list."""
    if isinstance(value, File):
        return value.told
    if isinstance(value, (list, tuple)):
        if all(isinstance(item, str) for item in value):
            return f"{len(value)} texts"
        each = [told(item) for item in value]
        return f"{len(each)} of {each[0]}" if len(set(each)) == 1 else ", ".join(each)
    if _is_picture(value):
        mode = "" if value.mode in ("RGB", "L") else f" {value.mode}"
        return f"{value.size[0]}x{value.size[1]}{mode}"
    if hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return str(value)


def fingerprint(value: Any) -> Any:
    """``value`` as plain data that is equal for equal content: images, arrays and files by their
    SHA-256."""
    if isinstance(value, File):
        return [value.kind, value.told, value.digest]
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
        return ["array", told(value), hashlib.sha256(array.tobytes()).hexdigest()]
    return value


def size_of(value: Any) -> tuple[int, int] | None:
    """Width and height in pixels of an image, a mask or their file; None for anything else."""
    if isinstance(value, File) and value.kind in ("image", "mask"):
        width, _, height = value.told.partition("x")
        return int(width), int(height)
    return (value.size[0], value.size[1]) if _is_picture(value) else None


def _is_picture(value: Any) -> bool:
    return hasattr(value, "mode") and hasattr(value, "size") and hasattr(value, "tobytes")


def _object(kind: str, value: Any, what: str) -> Any:
    if _is_picture(value) and kind in ("image", "mask"):
        return value
    dimensions = {"image": (2, 3, 4), "mask": (2, 3, 4), "video": (4, 5), "audio": (1, 2, 3)}.get(
        kind
    )
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if (dimensions is not None and len(value.shape) not in dimensions) or 0 in value.shape:
            raise ValueError(f"an array of shape {list(value.shape)} is not {what}")
        return value
    raise ValueError(
        f"{_short(value)} is not {what}: give a file, or in Python a PIL image, an array or a tensor"
    )


def _short(value: Any) -> str:
    return (
        repr(value) if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
    )


def _frames(folder: Path) -> tuple[Path, ...]:
    try:
        found = tuple(sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES))
    except OSError as error:
        raise ValueError(f"{folder}: cannot be read: {error.strerror}") from None
    if not found:
        raise ValueError(f"{folder}: holds no frames: {', '.join(PICTURES)}")
    return found


def _file(kind: str, paths: tuple[Path, ...], rate: int | None) -> File:
    try:
        digest = _digest(paths)
        content = _content(kind, paths)
    except InputError as error:
        raise ValueError(str(error)) from None
    if kind == "audio":
        found, _ = _sound(paths[0])
        if rate is not None and found != rate:
            raise ValueError(
                f"{paths[0]}: has {found} samples per second, and {rate} are needed: convert it"
            )
    return File(kind, paths, told(content), digest)


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
    """The content of the files. Raises InputError where they are not of this kind."""
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
            f"{paths[0]}: the frames are of several sizes: {', '.join(sorted({told(frame) for frame in frames}))}"
        )
    return frames


@contextmanager
def _reading(path: Path, what: str, *more: type[Exception]) -> Iterator[None]:
    """Turns OSError, ValueError and ``more`` into an InputError that says what ``path`` is not."""
    errors: tuple[type[Exception], ...] = (OSError, ValueError, *more)
    try:
        yield
    except errors as error:
        raise InputError(f"{path}: is no {what} that can be read: {error}") from None


def _picture(path: Path, mode: str) -> Any:
    from PIL import Image, ImageOps

    with (
        _reading(path, "image", SyntaxError, Image.DecompressionBombError),
        Image.open(path) as found,
    ):
        require(
            "pixels",
            math.prod(found.size),
            f"it has {found.size[0]} x {found.size[1]} pixels",
            str(path),
        )
        if found.mode not in MODES:
            raise InputError(
                f"{path}: has pixels of mode {found.mode}: save it with 8 bits a channel"
            )
        return ImageOps.exif_transpose(found).convert(mode)


def _film(path: Path) -> list[Any]:
    if path.suffix.lower() == ".gif":
        from PIL import Image, ImageSequence

        with (
            _reading(path, "animation", SyntaxError, Image.DecompressionBombError),
            Image.open(path) as found,
        ):
            return _bounded(path, (frame.convert("RGB") for frame in ImageSequence.Iterator(found)))
    import av

    with _reading(path, "video", av.FFmpegError), av.open(str(path)) as container:
        decoded: Iterable[Any] = container.decode(video=0) if container.streams.video else ()
        frames = _bounded(path, (frame.to_image() for frame in decoded))
    if not frames:
        raise InputError(f"{path}: holds no pictures")
    return frames


def _tensor(path: Path) -> Any:
    """The one tensor in the file ``path``."""
    from safetensors import SafetensorError, safe_open

    with (
        _reading(path, "safetensors file", SafetensorError),
        safe_open(path, framework="pt") as found,
    ):
        names = list(found.keys())
        if len(names) != 1:
            raise InputError(f"{path}: holds {len(names)} tensors: give a file with one")
        return found.get_tensor(names[0])


def _bounded(path: Path, frames: Iterable[Any]) -> list[Any]:
    """``frames`` as a list, decoded one by one up to the limit."""
    found, pixels = list[Any](), 0
    for frame in frames:
        pixels += math.prod(frame.size)
        require(
            "film_pixels",
            pixels,
            f"its first {len(found) + 1} frames have {pixels:,} pixels",
            str(path),
        )
        found.append(frame)
    return found


def _sound(path: Path) -> tuple[int, Any]:
    """Samples per second, and the samples, float32 [channels samples]."""
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
            raise InputError(f"{path}: holds no samples")
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
    """The JSON list in ``text``; ``text`` itself where it does not start with ``[``. Raises
    ValueError for invalid JSON."""
    if not text.lstrip().startswith("["):
        return text
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a JSON list: {error}") from None

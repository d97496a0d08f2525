"""Writes the outputs of a run: images, videos, audio, tensors. File names and formats are checked
before anything is loaded.

Files are written to a temporary name and renamed, so that they are complete or absent. Knows
neither graphs nor ops.

    image     png jpg webp ..., several as a-0.png a-1.png; a folder
    video     mp4 gif; a folder, or pictures, of its frames
    audio     wav; flac where the package soundfile is installed
    tensors   safetensors

Files say in their metadata what they were made of (`made_of`), but for flac and bmp.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from graphrun.errors import InputError
from graphrun.graph.media import told
from graphrun.graph.schema import FASTEST_FPS, SLOWEST_FPS
from graphrun.graph.values import did_you_mean
from graphrun.report.plan_files import require_writable, write_with, writing

PICTURES = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".webp": "WEBP",
    ".bmp": "BMP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
}
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
# A field of a name's pattern, with its format: {seed}, {line:04d}. A text is cut: most file systems
# limit a name to 255 bytes.
FIELD, LONGEST_TEXT = re.compile(r"\{(\w+)(?::([^{}]*))?\}"), 48


# The output files of a run: a path for each output that is written, or one for all under the name
# "". Without suffix: a folder.
Files = Mapping[str, Path]


def made_of(graph: str, inputs: Mapping[str, Any], plan: str, version: str) -> dict[str, Any]:
    """What an output is made of, for its metadata: the graph's name, all inputs (media by their
    size), digest of the plan, and versions: graphrun's ``version`` and those of the libraries."""
    import diffusers
    import torch
    import transformers

    plain = {
        name: value if isinstance(value, str | int | float) else told(value)
        for name, value in inputs.items()
    }
    libraries = {of.__name__: of.__version__ for of in (torch, diffusers, transformers)}
    return {
        "graph": graph,
        "inputs": plain,
        "plan": plan,
        "versions": {"graphrun": version, **libraries},
    }


def named(files: Files, number: int, inputs: Mapping[str, Any], kinds: Mapping[str, str]) -> Files:
    """The output files of the request on line ``number`` of a list: ``a-0007.png`` for a.png,
    ``a/0007.png`` for the folder a, with the suffix of the output's kind. Those of a pattern
    (``a-{line:04d}-{seed}.png``) are named by the line and plain inputs.

    Raises InputError for a field that is no input, or a format that its value does not have.
    """

    def place(name: str, path: Path) -> Path:
        if FIELD.search(path.name):
            return path.with_name(
                FIELD.sub(lambda field: _filled(path, field, {"line": number, **inputs}), path.name)
            )
        own = {name: kinds[name]} if name else kinds
        return (
            path.with_stem(f"{path.stem}-{number:04d}")
            if path.suffix
            else path / f"{number:04d}{_first_suffix(own)}"
        )

    return {name: place(name, path) for name, path in files.items()}


def _filled(path: Path, field: re.Match[str], values: Mapping[str, Any]) -> str:
    """The text of a ``field`` of the pattern ``path``; of a text input, its letters, digits, dots
    and dashes."""
    value = values.get(field[1])
    if not isinstance(value, str | int | float):
        raise InputError(
            f"-o {path}: {field[0]} is neither the line nor a plain input{did_you_mean(field[1], values)}"
        )
    try:
        text = format(value, field[2] or "")
    except ValueError as error:
        raise InputError(f"-o {path}: {field[0]}: {error}") from None
    return (
        text
        if not isinstance(value, str)
        else re.sub(r"[^\w.-]+", "-", text).strip("-.")[:LONGEST_TEXT]
    )


def refuse_existing(files: Files, kinds: Mapping[str, str]) -> None:
    """Raises InputError where a run that writes ``files`` would overwrite something."""
    if (path := next(_existing(files, kinds), None)) is not None:
        raise InputError(f"{path} already exists; add --overwrite")


def output_files(
    asked: Sequence[str],
    kinds: Mapping[str, str],
    default: Path,
    *,
    overwrite: bool = True,
    of_list: bool = False,
    resumes: Callable[[Files], bool] = lambda files: False,
) -> Files:
    """The output files for outputs of ``kinds`` (name -> kind). ``of_list``: a folder gets files of
    each request (`named`).

    ``asked``: a path, or ``name=path`` for each output; empty: ``default`` with the kinds' suffix,
    numbered from 2 where it exists (``a.png``, ``a-2.png``). ``resumes``: whether a run that writes
    these files resumes one, and so may overwrite them.

    Raises InputError for an unknown name or suffix, a suffix that does not fit the kind, a path
    that cannot be written, and unless ``overwrite`` one in ``asked`` that exists.
    """

    def is_free(files: Files) -> bool:
        return overwrite or resumes(files) or next(_existing(files, kinds), None) is None

    files: dict[str, Path] = {}
    for text in asked:
        name, equals, path = text.partition("=")
        if not equals or (name not in kinds and "/" in name):
            name, path = "", text
        elif name not in kinds:
            raise InputError(
                f"-o {text}: no such output {name!r}; outputs are {', '.join(sorted(kinds))}"
            )
        elif not path:
            raise InputError(f"-o {text}: names no file")
        if files and (not name or "" in files):
            bare = files[""] if name else path
            raise InputError(
                f"-o {bare}: say for which output, such as -o {next(iter(kinds))}={bare}"
            )
        files[name] = _suited(name, kinds[name], Path(path)) if name else _known(Path(path))
    if len(set(files.values())) < len(files):
        raise InputError("-o: two outputs have the same file")
    if not files:
        names = (f"{default.name}-{number}" if number > 1 else default.name for number in count(1))
        files = next(
            filter(is_free, (_default_files(kinds, default.with_name(name)) for name in names))
        )
    for to in () if of_list else files.values():
        _refuse_foreign(to)
    require_writable(*files.values())
    if not is_free(files):
        refuse_existing(files, kinds)
    return files


def _default_files(kinds: Mapping[str, str], path: Path) -> dict[str, Path]:
    """One file for all outputs, ``path`` with a suffix; a file for each output where pictures and
    videos are among them."""
    if {"image", "video"} <= set(kinds.values()):
        return {
            name: path.with_name(f"{path.name}-{name}{_suffixes(kind)[0]}")
            for name, kind in kinds.items()
        }
    return {"": path.with_name(path.name + _first_suffix(kinds))}


def require_rate(files: Files, fps: float | None) -> None:
    """Raises InputError where ``files`` has a video and no video file can have ``fps`` frames per
    second."""
    video = next((path for path in files.values() if path.suffix.lower() in VIDEOS), None)
    if video is not None and fps is not None and not SLOWEST_FPS <= fps <= FASTEST_FPS:
        raise InputError(
            f"{video}: {fps:g} frames per second; a video file holds {SLOWEST_FPS:g} to {FASTEST_FPS:g}"
        )


def _existing(files: Files, kinds: Mapping[str, str]) -> Iterator[Path]:
    """What a run could overwrite: the files, numbered ones such as ``a-3.png``, and what is saved
    beside a file for all outputs."""
    for name, path in files.items():
        beside = (
            [path]
            if name
            else [
                path,
                *(
                    path.with_suffix(suffix)
                    for kind in kinds.values()
                    if (suffix := _suffixes(kind)[0])
                ),
            ]
        )
        for each in dict.fromkeys(beside):
            if each.is_file() or (each.is_dir() and any(each.iterdir())):
                yield each
            yield from sorted(
                of
                for of in each.parent.glob(f"*{each.suffix}")
                if each.suffix and re.fullmatch(rf"{re.escape(each.stem)}(-\d+)+", of.stem)
            )


def _suffixes(kind: str) -> tuple[str, ...]:
    return SUFFIXES.get(kind, (TENSORS,))


def _first_suffix(kinds: Mapping[str, str]) -> str:
    """The suffix of the file for outputs of ``kinds`` (name -> kind), by the first kind of
    `SUFFIXES` among them."""
    return next(
        (suffixes[0] for kind, suffixes in SUFFIXES.items() if kind in kinds.values()), ".png"
    )


def _known(path: Path) -> Path:
    suffix, suffixes = path.suffix.lower(), (*PICTURES, *VIDEOS, *SOUNDS, TENSORS)
    if suffix and suffix not in suffixes:
        raise InputError(f"{path}: {suffix} is not known; output files are {', '.join(suffixes)}")
    elif suffix == ".flac" and find_spec("soundfile") is None:
        raise InputError(
            f"{path}: writing flac needs the package soundfile: install it, or use .wav"
        )
    return path


def _suited(name: str, kind: str, path: Path) -> Path:
    allowed = _suffixes(kind)
    if _known(path).suffix.lower() not in allowed:
        shown = ", ".join(suffix or "a folder" for suffix in allowed)
        what = kind if kind != "any" else "a tensor"
        raise InputError(
            f"{path}: {name} is {what}, which is not saved as {path.suffix or 'a folder'} but as {shown}"
        )
    return path


def save_outputs(
    outputs: Mapping[str, Any],
    where: Files | Path,
    fps: float = FPS,
    made_of: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Writes ``outputs`` and returns the paths, in order. Where a file cannot be written, all
    outputs are kept as tensors beside it or in a temporary folder, and an InputError says where.

    Several images are numbered with leading zeros. Where one path is for all outputs, those that do
    not fit its suffix are written beside it with another one: audio, and all tensors (embeddings,
    latents) in one file under names such as ``embeds.prompt_embeds``. ``made_of`` goes into the
    metadata of each file.
    """
    files, about = (
        {"": where} if isinstance(where, Path) else where,
        json.dumps(made_of) if made_of else "",
    )
    try:
        return [
            path
            for name, to in files.items()
            for path in _saved({name: outputs[name]} if name else outputs, to, fps, about)
        ]
    except Exception as error:
        # whatever the encoders raise for pictures, sizes or rates that their format does not hold
        path = next(iter(files.values()))
        text = (
            error
            if isinstance(error, InputError)
            else f"{path}: cannot be written: {type(error).__name__}: {error}"
        )
        raise InputError(
            f"{text}; the outputs are kept as tensors in {_kept(outputs, path, about)}"
        ) from error


def _kept(outputs: Mapping[str, Any], path: Path, about: str) -> Path:
    """Writes ``outputs`` as tensors to a safetensors file beside ``path``, or where that fails to
    one in a new temporary folder."""
    import numpy as np
    import torch
    from safetensors.torch import save as packed

    found = {}
    for kind, name, thing in _parts("", outputs, videos=True):
        of = thing.samples if kind == "sound" else thing
        pictures = np.stack([np.array(each) for each in of]) if isinstance(of, list) else of
        found[name] = (
            of.clone().contiguous() if kind == "tensor" else torch.from_numpy(np.array(pictures))
        )
    data = packed(found, {KEY: about} if about else None)
    try:
        return write_with(
            path.with_name(f"{path.stem}-kept{TENSORS}"), lambda to: to.write_bytes(data)
        )
    except InputError:
        return write_with(
            Path(tempfile.mkdtemp(prefix="graphrun-kept-")) / f"kept{TENSORS}",
            lambda to: to.write_bytes(data),
        )


def _saved(outputs: Mapping[str, Any], path: Path, fps: float, about: str) -> list[Path]:
    found = list(_parts("", outputs, videos=path.suffix.lower() in VIDEOS))
    pictures, sounds = (
        [thing for each, _, thing in found if each == kind] for kind in ("picture", "sound")
    )
    if pictures and not path.suffix:
        written = _folder(path, pictures, about)
    else:
        written = [_picture(to, picture, fps, about) for to, picture in _each(path, pictures)]
    sounding = path if path.suffix.lower() in SOUNDS else path.with_suffix(SOUNDS[0])
    written += [_sound(to, sound, about) for to, sound in _each(sounding, sounds)]
    if tensors := {
        name: tensor.clone().contiguous() for each, name, tensor in found if each == "tensor"
    }:
        from safetensors.torch import save as packed

        data = packed(tensors, {KEY: about} if about else None)
        written.append(write_with(path.with_suffix(TENSORS), lambda to: to.write_bytes(data)))
    return written


def _each(path: Path, things: Sequence[Any]) -> Iterator[tuple[Path, Any]]:
    """Each of ``things`` with its path: ``a.png`` for one, ``a-00.png`` and so on for several."""
    digits = len(str(len(things) - 1))
    for number, thing in enumerate(things):
        yield path if len(things) == 1 else path.with_stem(f"{path.stem}-{number:0{digits}}"), thing


def _picture(path: Path, picture: Any, fps: float, about: str) -> Path:
    """Writes an image, or a list of images as a video."""
    suffix, (first, *others) = (
        path.suffix.lower(),
        picture if isinstance(picture, list) else [picture],
    )
    if suffix == ".mp4":
        return write_with(path, lambda to: _video(to, [first, *others], fps, about))
    kind = "GIF" if suffix == ".gif" else PICTURES.get(suffix, "PNG")
    more = _metadata(kind, about)
    if suffix == ".gif" and isinstance(picture, list):
        more |= {
            "save_all": True,
            "append_images": others,
            "duration": round(1000 / fps),
            "loop": 0,
        }
    image = first.convert("RGB") if kind == "JPEG" and first.mode not in ("RGB", "L") else first
    return write_with(path, lambda to: image.save(to, format=kind, **more))


KEY = "graphrun"  # of the metadata in PNG and safetensors files
IMAGE_DESCRIPTION = 0x010E  # tag of Exif 2.3


def _metadata(kind: str, about: str) -> dict[str, Any]:
    """The arguments of PIL's ``save`` that put ``about``, which is ASCII, into a picture of this
    kind."""
    from PIL import Image, PngImagePlugin

    if not about or kind == "BMP":
        return {}
    if kind == "PNG":
        text = PngImagePlugin.PngInfo()
        text.add_text(KEY, about)
        return {"pnginfo": text}
    if kind == "GIF":
        return {"comment": about.encode()}
    exif = Image.Exif()
    exif[IMAGE_DESCRIPTION] = about
    return {"exif": exif}


def _video(path: Path, frames: Sequence[Any], fps: float, about: str) -> None:
    """H.264 in yuv420p, which every player supports; in yuv444p for odd sizes, since yuv420p needs
    even ones."""
    import av

    width, height = frames[0].size
    with av.open(str(path), "w", format="mp4") as container:
        container.metadata["comment"] = about
        stream: Any = container.add_stream(
            "libx264", rate=Fraction(fps).limit_denominator(1001), options={"crf": "17"}
        )
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv420p" if width % 2 == height % 2 == 0 else "yuv444p"
        of_picture: Any = av.VideoFrame.from_image
        for frame in frames:
            container.mux(stream.encode(of_picture(frame)))
        container.mux(stream.encode())


def _sound(path: Path, sound: Any, about: str) -> Path:
    def write(to: Path) -> None:
        if path.suffix.lower() == ".flac":
            import soundfile

            soundfile.write(str(to), sound.samples.T, sound.rate, format="FLAC")
        else:
            from scipy.io import wavfile

            wavfile.write(to, sound.rate, sound.samples.T)
            to.write_bytes(_with_comment(to.read_bytes(), about.encode()))

    return write_with(path, write)


def _with_comment(wav: bytes, comment: bytes) -> bytes:
    """A RIFF file with a LIST chunk of type INFO that has ``comment`` (ICMT); chunks have an even
    number of bytes."""
    text = comment + b"\0" * (2 - len(comment) % 2)
    info = b"INFOICMT" + len(text).to_bytes(4, "little") + text
    whole = wav[8:] + b"LIST" + len(info).to_bytes(4, "little") + info
    return b"RIFF" + len(whole).to_bytes(4, "little") + whole if comment else wav


def _folder(path: Path, pictures: Sequence[Any], about: str) -> list[Path]:
    """Writes numbered ``pictures`` to the folder ``path``, which is renamed into place and replaces
    an earlier one."""
    _refuse_foreign(path)
    digits = max(4, len(str(len(pictures) - 1)))
    names = [f"{number:0{digits}}.png" for number in range(len(pictures))]
    with (
        writing(path),
        tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as name,
    ):
        made = Path(name) / "made"
        made.mkdir()
        for picture, each in zip(pictures, names, strict=True):
            picture.save(made / each, format="PNG", **_metadata("PNG", about))
        if path.is_dir():
            shutil.move(path, Path(name) / "before")
        made.replace(path)
    return [path / each for each in names]


def _refuse_foreign(path: Path) -> None:
    """Raises InputError where ``path`` is to be a folder, and exists as anything but a folder of
    numbered images."""
    if (
        not path.suffix
        and path.exists()
        and (
            not path.is_dir()
            or any(not (f.suffix == ".png" and f.stem.isdigit()) for f in path.iterdir())
        )
    ):
        raise InputError(f"{path}: exists, and is not a folder of frames: choose another name")


def _parts(name: str, value: Any, *, videos: bool) -> Iterator[tuple[str, str, Any]]:
    """(``picture``, ``sound`` or ``tensor``; its path; it) for all in ``value``. ``videos``: a list
    of images is one picture."""
    if hasattr(value, "save") or (
        videos and isinstance(value, list) and value and hasattr(value[0], "save")
    ):
        yield "picture", name, value
    elif hasattr(value, "samples"):
        yield "sound", name, value
    elif hasattr(value, "untyped_storage"):
        yield "tensor", name, value
    elif hasattr(value, "__array_interface__") and hasattr(value, "dtype"):
        import torch

        yield "tensor", name, torch.from_numpy(value)
    elif isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _parts(f"{name}.{key}" if name else str(key), item, videos=videos)

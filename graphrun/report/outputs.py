"""Write the outputs of a run: images, videos, audio, tensors.

    image     png jpg webp ..., several as a-0.png a-1.png; a folder
    video     mp4 gif; a folder, or pictures, of its frames
    audio     wav; flac if the package soundfile is installed
    tensors   safetensors

File names and formats are checked before anything is loaded. Files are written to a temporary name
and renamed, so that they are complete or absent. Their metadata records their inputs, plan and
versions (`provenance`), except in flac and bmp files.
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
from graphrun.graph.media import FASTEST_FPS, SLOWEST_FPS, size_text
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
VIDEO_THREADS = 4
# With AVX-512, x264 handles 16 macroblocks of 16 pixels at once in mbtree. In narrower frames the
# bytes then depended on other contents of memory: 180 files of one video of 32 x 48 pixels came in
# four versions, with mbtree=0 or AVX2 in one.
MBTREE_WIDTH = 256
SOUNDS = (".wav", ".flac")
TENSORS = ".safetensors"
# the allowed suffixes of each kind of output, the default first. "": a folder
SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "image": (*PICTURES, "", *VIDEOS),
    "video": (*VIDEOS, "", *PICTURES),
    "audio": SOUNDS,
}
FPS = 16.0  # default frame rate, as in Wan's videos
# a field of a name pattern, with its format: {seed}, {line:04d}. Texts are cut, because most file
# systems limit a name to 255 bytes
FIELD, LONGEST_TEXT = re.compile(r"\{(\w+)(?::([^{}]*))?\}"), 48


# the output files of a run: a path for each output, or one path for all outputs under the name "".
# A path without a suffix is a folder
Files = Mapping[str, Path]


def provenance(graph: str, inputs: Mapping[str, Any], plan: str, version: str) -> dict[str, Any]:
    """Return the metadata of an output: the graph's name, all inputs (media by their size), the
    digest of the plan, graphrun's ``version`` and the versions of the libraries."""
    import diffusers
    import torch
    import transformers

    plain = {
        name: value if isinstance(value, str | int | float) else size_text(value)
        for name, value in inputs.items()
    }
    libraries = {
        library.__name__: library.__version__ for library in (torch, diffusers, transformers)
    }
    return {
        "graph": graph,
        "inputs": plain,
        "plan": plan,
        "versions": {"graphrun": version, **libraries},
    }


def request_files(
    files: Files, number: int, inputs: Mapping[str, Any], kinds: Mapping[str, str]
) -> Files:
    """Return the output files of the request on line ``number`` of a list.

    ``a.png`` becomes ``a-0007.png``. The folder ``a`` becomes ``a/0007.png``, with the suffix of
    the output's kind. Fields of a pattern, such as ``a-{line:04d}-{seed}.png``, are filled with the
    line and plain inputs. Raises InputError for a field that is not an input, or a format that its
    value does not have.
    """

    def place(name: str, path: Path) -> Path:
        if FIELD.search(path.name):
            return path.with_name(
                FIELD.sub(lambda field: _fill(path, field, {"line": number, **inputs}), path.name)
            )
        suffix_kinds = {name: kinds[name]} if name else kinds
        return (
            path.with_stem(f"{path.stem}-{number:04d}")
            if path.suffix
            else path / f"{number:04d}{_first_suffix(suffix_kinds)}"
        )

    return {name: place(name, path) for name, path in files.items()}


def _fill(path: Path, field: re.Match[str], values: Mapping[str, Any]) -> str:
    """Return the text for a ``field`` of the pattern ``path``. A text input is reduced to its
    letters, digits, dots and dashes."""
    value = values.get(field[1])
    if not isinstance(value, str | int | float):
        raise InputError(
            f"-o {path}: {field[0]} is neither the line nor a plain "
            f"input{did_you_mean(field[1], values)}"
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
    """Raise InputError if a run that writes ``files`` would overwrite something."""
    if (path := next(_existing_paths(files, kinds), None)) is not None:
        raise InputError(f"{path} already exists; add --overwrite")


def output_files(
    arguments: Sequence[str],
    kinds: Mapping[str, str],
    default: Path,
    *,
    overwrite: bool = True,
    of_list: bool = False,
    resumes: Callable[[Files], bool] = lambda files: False,
) -> Files:
    """Return the output files for outputs of ``kinds`` (name -> kind).

    ``arguments``: a path, or ``name=path`` for each output. If empty, the path is ``default`` with
    the suffix of the kinds, numbered from 2 if that file exists (``a.png``, ``a-2.png``).
    ``of_list``: a folder gets the files of each request (`request_files`). ``resumes``: whether a
    run that writes these files resumes an earlier one, and so may overwrite them.

    Raises InputError for an unknown name or suffix, a suffix that does not fit the kind, a path
    that cannot be written, and, unless ``overwrite``, a path in ``arguments`` that exists.
    """

    def is_free(files: Files) -> bool:
        return overwrite or resumes(files) or next(_existing_paths(files, kinds), None) is None

    files: dict[str, Path] = {}
    for text in arguments:
        name, equals, path = text.partition("=")
        if not equals or (name not in kinds and "/" in name):
            name, path = "", text
        elif name not in kinds:
            raise InputError(
                f"-o {text}: no such output {name!r}; outputs are {', '.join(sorted(kinds))}"
            )
        elif not path:
            raise InputError(f"-o {text}: has no file name")
        if files and (not name or "" in files):
            bare = files[""] if name else path
            raise InputError(
                f"-o {bare}: say for which output, such as -o {next(iter(kinds))}={bare}"
            )
        files[name] = (
            _require_suited_suffix(name, kinds[name], Path(path))
            if name
            else _require_known_suffix(Path(path))
        )
    if len(set(files.values())) < len(files):
        raise InputError("-o: two outputs have the same file")
    if not files:
        names = (f"{default.name}-{number}" if number > 1 else default.name for number in count(1))
        files = next(
            filter(is_free, (_default_files(kinds, default.with_name(name)) for name in names))
        )
    for target in () if of_list else files.values():
        _refuse_foreign(target)
    require_writable(*files.values())
    if not is_free(files):
        refuse_existing(files, kinds)
    return files


def _default_files(kinds: Mapping[str, str], path: Path) -> dict[str, Path]:
    """Return one file for all outputs: ``path`` with a suffix. If both pictures and videos are
    among the outputs, each output gets a file."""
    if {"image", "video"} <= set(kinds.values()):
        return {
            name: path.with_name(f"{path.name}-{name}{_suffixes(kind)[0]}")
            for name, kind in kinds.items()
        }
    return {"": path.with_name(path.name + _first_suffix(kinds))}


def require_rate(files: Files, fps: float | None) -> None:
    """Raise InputError if ``files`` has a video and no video file supports ``fps``."""
    video = next((path for path in files.values() if path.suffix.lower() in VIDEOS), None)
    if video is not None and fps is not None and not SLOWEST_FPS <= fps <= FASTEST_FPS:
        raise InputError(
            f"{video}: {fps:g} frames per second; a video file has {SLOWEST_FPS:g} to "
            f"{FASTEST_FPS:g}"
        )


def _existing_paths(files: Files, kinds: Mapping[str, str]) -> Iterator[Path]:
    """Yield the existing files that a run could overwrite: the files, numbered ones such as
    ``a-3.png``, and files with another suffix that are saved next to a file for all outputs."""
    for name, path in files.items():
        candidates = (
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
        for candidate in dict.fromkeys(candidates):
            if candidate.is_file() or (candidate.is_dir() and any(candidate.iterdir())):
                yield candidate
            yield from sorted(
                sibling
                for sibling in candidate.parent.glob(f"*{candidate.suffix}")
                if candidate.suffix
                and re.fullmatch(rf"{re.escape(candidate.stem)}(-\d+)+", sibling.stem)
            )


def _suffixes(kind: str) -> tuple[str, ...]:
    return SUFFIXES.get(kind, (TENSORS,))


def _first_suffix(kinds: Mapping[str, str]) -> str:
    """Return the suffix of the first kind in `SUFFIXES` that is in ``kinds`` (name -> kind)."""
    return next(
        (suffixes[0] for kind, suffixes in SUFFIXES.items() if kind in kinds.values()), ".png"
    )


def _require_known_suffix(path: Path) -> Path:
    suffix, suffixes = path.suffix.lower(), (*PICTURES, *VIDEOS, *SOUNDS, TENSORS)
    if suffix and suffix not in suffixes:
        raise InputError(f"{path}: {suffix} is not known; output files are {', '.join(suffixes)}")
    elif suffix == ".flac" and find_spec("soundfile") is None:
        raise InputError(
            f"{path}: writing flac needs the package soundfile: install it, or use .wav"
        )
    return path


def _require_suited_suffix(name: str, kind: str, path: Path) -> Path:
    suffixes = _suffixes(kind)
    if _require_known_suffix(path).suffix.lower() not in suffixes:
        choices = ", ".join(suffix or "a folder" for suffix in suffixes)
        kind_name = kind if kind != "any" else "a tensor"
        raise InputError(
            f"{path}: {name} is {kind_name}, which is not saved as "
            f"{path.suffix or 'a folder'} but as {choices}"
        )
    return path


def save_outputs(
    outputs: Mapping[str, Any],
    destination: Files | Path,
    fps: float = FPS,
    source: Mapping[str, Any] | None = None,
    *,
    rescues: bool = True,
) -> list[Path]:
    """Write ``outputs`` and return the paths, in order.

    Several images are numbered with leading zeros. If one path is for all outputs, outputs that do
    not fit its suffix are written next to it with another suffix: audio, and all tensors
    (embeddings, latents) in one file under names such as ``embeds.prompt_embeds``. ``source`` goes
    into the metadata of each file.

    If a file cannot be written, InputError is raised. With ``rescues``, all outputs are then saved
    as tensors next to it or in a temporary folder, and the error names that file.
    """
    files, metadata = (
        {"": destination} if isinstance(destination, Path) else destination,
        json.dumps(source) if source else "",
    )
    try:
        return [
            path
            for name, target in files.items()
            for path in _save({name: outputs[name]} if name else outputs, target, fps, metadata)
        ]
    except Exception as error:
        # encoders raise various errors for pictures, sizes or rates beyond their format
        path = next(iter(files.values()))
        text = (
            error
            if isinstance(error, InputError)
            else f"{path}: cannot be written: {type(error).__name__}: {error}"
        )
        if not rescues:
            raise InputError(str(text)) from error
        raise InputError(
            f"{text}; the outputs are kept as tensors in "
            f"{_save_as_tensors(outputs, path, metadata)}"
        ) from error


def _save_as_tensors(outputs: Mapping[str, Any], path: Path, metadata: str) -> Path:
    """Write ``outputs`` to a safetensors file next to ``path``, else in a new temporary folder."""
    import numpy as np
    import torch
    from safetensors.torch import save as packed

    tensors = {}
    for kind, name, part in _parts("", outputs, videos=True):
        content = part.samples if kind == "sound" else part
        pictures = (
            np.stack([np.array(image) for image in content])
            if isinstance(content, list)
            else content
        )
        tensors[name] = (
            content.clone().contiguous()
            if kind == "tensor"
            else torch.from_numpy(np.array(pictures))
        )
    data = packed(tensors, {KEY: metadata} if metadata else None)
    try:
        return write_with(
            path.with_name(f"{path.stem}-kept{TENSORS}"), lambda target: target.write_bytes(data)
        )
    except InputError:
        return write_with(
            Path(tempfile.mkdtemp(prefix="graphrun-kept-")) / f"kept{TENSORS}",
            lambda target: target.write_bytes(data),
        )


def _save(outputs: Mapping[str, Any], path: Path, fps: float, metadata: str) -> list[Path]:
    parts = list(_parts("", outputs, videos=path.suffix.lower() in VIDEOS))
    pictures, sounds = (
        [part for part_kind, _, part in parts if part_kind == kind] for kind in ("picture", "sound")
    )
    if pictures and not path.suffix:
        paths = _folder(path, pictures, metadata)
    else:
        paths = [
            _picture(target, picture, fps, metadata)
            for target, picture in _numbered_paths(path, pictures)
        ]
    sounding = path if path.suffix.lower() in SOUNDS else path.with_suffix(SOUNDS[0])
    paths += [
        _sound(target, sound, metadata) for target, sound in _numbered_paths(sounding, sounds)
    ]
    if tensors := {
        name: tensor.clone().contiguous()
        for part_kind, name, tensor in parts
        if part_kind == "tensor"
    }:
        from safetensors.torch import save as packed

        data = packed(tensors, {KEY: metadata} if metadata else None)
        paths.append(write_with(path.with_suffix(TENSORS), lambda target: target.write_bytes(data)))
    return paths


def _numbered_paths(path: Path, contents: Sequence[Any]) -> Iterator[tuple[Path, Any]]:
    """Yield each of ``contents`` with its path: ``a.png`` for one, else ``a-00.png`` and so on."""
    digits = len(str(len(contents) - 1))
    for number, content in enumerate(contents):
        yield (
            path if len(contents) == 1 else path.with_stem(f"{path.stem}-{number:0{digits}}"),
            content,
        )


def _picture(path: Path, picture: Any, fps: float, metadata: str) -> Path:
    """Write an image, or a list of images as a video."""
    suffix, (first, *next_frames) = (
        path.suffix.lower(),
        picture if isinstance(picture, list) else [picture],
    )
    if suffix == ".mp4":
        return write_with(path, lambda target: _video(target, [first, *next_frames], fps, metadata))
    kind = "GIF" if suffix == ".gif" else PICTURES.get(suffix, "PNG")
    options = _metadata(kind, metadata)
    if suffix == ".gif" and isinstance(picture, list):
        options |= {
            "save_all": True,
            "append_images": next_frames,
            "duration": round(1000 / fps),
            "loop": 0,
        }
    image = first.convert("RGB") if kind == "JPEG" and first.mode not in ("RGB", "L") else first
    return write_with(path, lambda target: image.save(target, format=kind, **options))


KEY = "graphrun"  # key of the metadata in PNG and safetensors files
IMAGE_DESCRIPTION = 0x010E  # tag of Exif 2.3


def _metadata(kind: str, metadata: str) -> dict[str, Any]:
    """Return the arguments of PIL's ``save`` that store ``metadata`` (ASCII) in the picture."""
    from PIL import Image, PngImagePlugin

    if not metadata or kind == "BMP":
        return {}
    if kind == "PNG":
        text = PngImagePlugin.PngInfo()
        text.add_text(KEY, metadata)
        return {"pnginfo": text}
    if kind == "GIF":
        return {"comment": metadata.encode()}
    exif = Image.Exif()
    exif[IMAGE_DESCRIPTION] = metadata
    return {"exif": exif}


def _video(path: Path, frames: Sequence[Any], fps: float, metadata: str) -> None:
    """Write H.264 in yuv420p, which every player supports; odd sizes in yuv444p, since yuv420p
    needs even sizes."""
    import av

    width, height = frames[0].size
    with av.open(str(path), "w", format="mp4") as container:
        container.metadata["comment"] = metadata
        options = {"crf": "17"}
        if width < MBTREE_WIDTH:
            options["x264-params"] = "mbtree=0"
        stream: Any = container.add_stream(
            "libx264", rate=Fraction(fps).limit_denominator(1001), options=options
        )
        stream.width, stream.height = width, height
        # the bytes depend on both, and by default on the number of CPUs
        stream.codec_context.thread_count, stream.codec_context.thread_type = VIDEO_THREADS, "FRAME"
        stream.pix_fmt = "yuv420p" if width % 2 == height % 2 == 0 else "yuv444p"
        of_picture: Any = av.VideoFrame.from_image
        for frame in frames:
            container.mux(stream.encode(of_picture(frame)))
        container.mux(stream.encode())


def _sound(path: Path, sound: Any, metadata: str) -> Path:
    def write(target: Path) -> None:
        if path.suffix.lower() == ".flac":
            import soundfile

            soundfile.write(str(target), sound.samples.T, sound.rate, format="FLAC")
        else:
            from scipy.io import wavfile

            wavfile.write(target, sound.rate, sound.samples.T)
            target.write_bytes(_with_comment(target.read_bytes(), metadata.encode()))

    return write_with(path, write)


def _with_comment(wav: bytes, comment: bytes) -> bytes:
    """Return a RIFF file with a LIST chunk of type INFO that has ``comment`` (ICMT). Chunks have an
    even number of bytes."""
    text = comment + b"\0" * (2 - len(comment) % 2)
    info = b"INFOICMT" + len(text).to_bytes(4, "little") + text
    whole = wav[8:] + b"LIST" + len(info).to_bytes(4, "little") + info
    return b"RIFF" + len(whole).to_bytes(4, "little") + whole if comment else wav


def _folder(path: Path, pictures: Sequence[Any], metadata: str) -> list[Path]:
    """Write numbered ``pictures`` to the folder ``path``, replacing an earlier one whole."""
    _refuse_foreign(path)
    digits = max(4, len(str(len(pictures) - 1)))
    names = [f"{number:0{digits}}.png" for number in range(len(pictures))]
    with (
        writing(path),
        tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as name,
    ):
        new_folder = Path(name) / "made"
        new_folder.mkdir()
        for picture, file_name in zip(pictures, names, strict=True):
            picture.save(new_folder / file_name, format="PNG", **_metadata("PNG", metadata))
        if path.is_dir():
            shutil.move(path, Path(name) / "before")
        new_folder.replace(path)
    return [path / file_name for file_name in names]


def _refuse_foreign(path: Path) -> None:
    """Raise InputError if ``path`` is to be a folder but exists as something else. Only a folder of
    numbered images may be replaced."""
    if (
        not path.suffix
        and path.exists()
        and (
            not path.is_dir()
            or any(not (f.suffix == ".png" and f.stem.isdigit()) for f in path.iterdir())
        )
    ):
        raise InputError(
            f"{path}: already exists and is not a folder of frames; choose another name"
        )


def _parts(name: str, value: Any, *, videos: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield the kind, the path and the content of all parts of ``value``. The kind is ``picture``,
    ``sound`` or ``tensor``. ``videos``: a list of images is one picture."""
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

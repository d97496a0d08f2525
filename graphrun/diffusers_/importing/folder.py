"""Pipelines from folders in diffusers' layout and from hub repositories.

Only small files and headers of weight files are fetched from the hub, never weights. Of weights,
only headers are read: for dtypes, and for the precision of quantized files.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers

from graphrun.diffusers_.importing.found import (
    PipelineDescription,
    SavedWeights,
    class_in,
    common_dtype,
    dtype_of,
    existing_kind,
    is_module,
    plain_settings,
    slug,
)
from graphrun.diffusers_.importing.modular_spec import add_default, own_code, pipeline_of
from graphrun.errors import GraphError, InputError
from graphrun.graph.document import read_json
from graphrun.modules import hub
from graphrun.modules.bitsandbytes_files import packed_weights
from graphrun.modules.classes import resolve_class
from graphrun.modules.contents import FP8
from graphrun.modules.hub_headers import stand_in
from graphrun.modules.quantize import THRESHOLD
from graphrun.modules.source_files import (
    Stored,
    complete,
    has_weights,
    only_variant,
    stored_tensors,
)
from graphrun.modules.torchao_files import CONFIGS as TORCHAO_CONFIGS
from graphrun.modules.torchao_files import torchao_weights
from graphrun.ops.modular import BLOCKS, is_modular_class

INDEX = "model_index.json"
MODULAR_INDEX, OWN_BLOCKS = "modular_model_index.json", "modular_config.json"
# files to fetch: configurations, tokenizers, processors, schedulers. `LARGE` files are never
# fetched: weights, and exports for other frameworks
SMALL = ("*.json", "*.txt", "*.model", "*.jinja")
LARGE = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*onnx*",
    "*.msgpack",
    "*.h5",
    "*openvino*",
    "*.pb",
)
CONFIGS = ("config.json", "scheduler_config.json")


def of_folder(
    folder: Path,
    excluded_names: Collection[str] = (),
    origin: str = "",
    trust: tuple[str, ...] = (),
) -> PipelineDescription:
    """Return the description of the pipeline saved in ``folder``, without ``excluded_names``.
    Raises InputError if there is no pipeline, or if the pipeline needs code from the folder."""
    if folder.is_file():
        raise InputError(existing_kind(folder))
    return _read(
        folder, folder.resolve().as_posix(), None, excluded_names, origin or str(folder), trust
    )


def of_hub(
    repository: str,
    revision: str | None = None,
    excluded_names: Collection[str] = (),
    trust: tuple[str, ...] = (),
) -> PipelineDescription:
    """Return the description of the pipeline in the hub's ``repository``.

    Small files and headers of weights are fetched or taken from the hub's cache. A ``revision``
    (branch, tag or commit) is pinned: the description names its present commit, which the
    configurations belong to. Raises InputError if the repository does not exist, or cannot be
    reached and is not in the cache.
    """
    folder = _fetch(repository, revision, SMALL)
    # named as in the hub's cache: .../COMMIT
    commit = folder.name if revision is not None else None
    description = _read(folder, repository, commit, excluded_names, repository, trust)
    if commit != revision:
        description.notes = (f"The revision is the commit that {revision} was.",)
    return description


def _fetch(repository: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Return a folder with the matching small files and the headers of weight files. Raises
    InputError."""
    text = f"the configurations of {repository}{f' at {revision}' if revision else ''}"
    folder = hub.snapshot(repository, revision, patterns, LARGE, subject=text)
    if not folder.is_dir():  # no file of the repository is a small one
        raise InputError(f"{repository} has no {INDEX}: it is no pipeline of diffusers")
    return stand_in(repository, folder)


def _read(
    folder: Path,
    source: str,
    revision: str | None,
    excluded_names: Collection[str],
    origin: str,
    trust: tuple[str, ...],
) -> PipelineDescription:
    is_modular = (folder / MODULAR_INDEX).is_file() and not any(
        (folder / name).is_file() for name in (INDEX, OWN_BLOCKS)
    )
    index = read_json(folder / MODULAR_INDEX) if is_modular else _index(folder, origin)
    path = _pipeline(index.get("_class_name"), origin, trust)
    description = PipelineDescription(
        origin, path, slug(source), source, folder.resolve(), revision, trust
    )
    if not Path(source).is_absolute():
        description.stand_ins[source] = folder
    (_add_blocks if is_modular else _add_members)(description, index, excluded_names)
    return description


def _add_members(
    description: PipelineDescription, index: Mapping[str, Any], excluded_names: Collection[str]
) -> None:
    entries = {name: entry for name, entry in index.items() if not name.startswith("_")}
    if wrong := [name for name in entries if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name)]:
        raise InputError(
            f"{INDEX}: {wrong[0]!r} cannot be a part's name, which is that of its folder: rename "
            "it",
            description.origin,
        )
    class_entries = {name: entry for name, entry in entries.items() if _is_pair(entry)}
    _refuse_unknown(excluded_names, class_entries, description.origin)
    absent = [
        n
        for n, pair in class_entries.items()
        if pair[0] is None or n in excluded_names or _has_default_scheduler(description, n, pair)
    ]
    settings = {name: entry for name, entry in entries.items() if name not in class_entries}
    for name in (name for name in class_entries if name not in absent):
        if list_entries := _list_entries(description, name, class_entries[name]):
            settings[name] = [f"${name}_{number}" for number in range(len(list_entries))]
            for number, (subfolder, entry) in enumerate(list_entries.items()):
                _add(
                    description,
                    f"{name}_{number}",
                    _folder(description),
                    subfolder,
                    entry,
                    f"{description.source}/{subfolder}",
                )
        else:
            _add(description, name, _folder(description), name, class_entries[name])
    description.settings = plain_settings(description.kind, settings, absent)


def _has_default_scheduler(description: PipelineDescription, name: str, entry: list[str]) -> bool:
    """Return whether member ``name`` is a scheduler that was not saved. The pipeline's constructor
    then creates it with fixed settings."""
    parameter = inspect.signature(description.kind.__init__).parameters.get(name)
    if (_folder(description) / name).exists() or parameter is None or parameter.default is not None:
        return False
    path = class_in(
        entry[0], entry[1], description.kind, f"{description.origin}/{name}", description.trust
    )
    return hasattr(resolve_class(path, description.trust), "set_timesteps")


def _folder(description: PipelineDescription) -> Path:
    assert description.folder is not None
    return description.folder


def _refuse_unknown(excluded_names: Collection[str], parts: Collection[str], origin: str) -> None:
    if unknown := sorted(set(excluded_names) - set(parts)):
        raise InputError(
            f"without {unknown[0]}: {origin} has no such part; it has {', '.join(parts)}"
        )


def _add_blocks(
    description: PipelineDescription, index: Mapping[str, Any], excluded_names: Collection[str]
) -> None:
    """Add the members of a modular pipeline, each possibly from another folder or repository."""
    kind, origin = description.kind, description.origin
    if not is_modular_class(kind):
        raise InputError(
            f"{origin}/{MODULAR_INDEX} is of {description.pipeline}, which is not modular: it "
            f"belongs into {INDEX}"
        )
    blocks_name = str(index.get("_blocks_class_name"))
    classes = getattr(getattr(diffusers, blocks_name, None), "block_classes", None)
    if classes is None:
        raise InputError(f"{origin}: {own_code(blocks_name)}")
    blocks_path = (
        f"diffusers.{blocks_name}" if classes and blocks_name != kind.default_blocks_name else None
    )
    pipeline = pipeline_of(kind, blocks_path)
    _refuse_unknown(excluded_names, pipeline._component_specs, origin)
    for name in (name for name in pipeline._component_specs if name not in excluded_names):
        entry = index.get(name)
        if not isinstance(entry, list) or len(entry) != 3:
            add_default(description, pipeline, name)
        elif isinstance(specification := entry[2], dict) and specification.get(
            "pretrained_model_name_or_path"
        ):
            subfolder = str(specification.get("subfolder") or "")
            is_local = bool(subfolder) and (_folder(description) / subfolder).is_dir()
            location, source = (
                (_folder(description), description.source)
                if is_local
                else _locate(specification, subfolder, f"{origin}/{name}")
            )
            if source is not None and not Path(source).is_absolute():
                description.stand_ins[source] = location
            class_entry = [
                str(text)
                for text in (entry[:2] if entry[0] else specification.get("type_hint", entry))[:2]
            ]
            _add(
                description,
                name,
                location,
                subfolder,
                class_entry,
                None if is_local and subfolder == name else f"{source}/{subfolder}".rstrip("/"),
            )
    description.settings = {
        name: index[name]
        for name, spec in pipeline._config_specs.items()
        if name in index and index[name] != spec.default
    } | ({BLOCKS: blocks_path} if blocks_path else {})


def _locate(specification: Mapping[str, Any], subfolder: str, origin: str) -> tuple[Path, str]:
    """Return (folder with the small files, source) of a component outside its pipeline's folder.
    Raises InputError."""
    location, revision = (
        str(specification["pretrained_model_name_or_path"]),
        specification.get("revision"),
    )
    if (folder := Path(location).expanduser()).is_dir():
        return folder, str(folder.resolve())
    if location.startswith((".", "/", "~")) or location.count("/") != 1:
        raise InputError(
            f"{origin}: there is no folder {location}: move the component to {subfolder}/ next to "
            f"{MODULAR_INDEX}"
        )
    files = tuple(f"{subfolder}/{kind}" for kind in SMALL) if subfolder else SMALL
    return _fetch(
        location, revision, files
    ), f"{location}@{revision.replace('/', '%2F')}" if revision else location


def _index(folder: Path, origin: str) -> Mapping[str, Any]:
    if not folder.is_dir():
        raise InputError(f"no such folder: {folder}")
    if not (folder / INDEX).is_file():
        if (folder / OWN_BLOCKS).is_file():
            raise InputError(f"{origin}: {own_code(OWN_BLOCKS)}")
        kind_text = (
            "a component's folder: give the one above it"
            if (folder / "config.json").is_file()
            else f"no pipeline of diffusers{_single_file(folder, origin)}"
        )
        raise InputError(f"{origin} has no {INDEX}: it is {kind_text}")
    return read_json(folder / INDEX)


def _single_file(folder: Path, origin: str) -> str:
    """Return what to type for a file with weights in ``folder``, or in the repository ``origin``,
    which is no pipeline; "" if there is none."""
    if not Path(origin).expanduser().exists():
        return (
            f"; for one file of it: hf download {origin} FILE, and give the path that this prints"
        )
    files = sorted(path for path in folder.iterdir() if path.suffix in (".gguf", ".safetensors"))
    return f"; for {files[0].name} in it, type its path: {files[0]}" if files else ""


def _pipeline(name: Any, origin: str, trust: tuple[str, ...]) -> str:
    """Return the class path of the pipeline ``name``, from diffusers or a trusted package."""
    if not isinstance(name, str):
        raise InputError(
            f"{origin} names {name} as its pipeline, code that comes with it: such code is never "
            "run. Install it as a package, and "
            "write the graph with pipeline: and allow: by hand (docs/howto/import.md)"
        )
    for path in (f"{package}.{name}" for package in (*trust, "diffusers")):
        try:
            resolve_class(path, trust, origin, "pipeline")
            return path
        except GraphError as error:
            last = error
    text = (
        "; a pipeline that is not part of diffusers is never run from a checkpoint: install its "
        "package, and write the graph"
    )
    raise GraphError(
        f"{last}{text} with pipeline: and allow: by hand (docs/howto/import.md)"
    ) from last


def _is_pair(entry: Any) -> bool:
    """Return whether an entry of the index names a library and a class, or nothing."""
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and all(item is None or isinstance(item, str) for item in entry)
    )


def _list_entries(
    description: PipelineDescription, name: str, entry: list[str]
) -> dict[str, list[str]]:
    """Return index entries for the folders NAME, NAME_1, ... of a member that is a list, such as
    several ControlNets; empty for other members."""
    path = class_in(
        entry[0], entry[1], description.kind, f"{description.origin}/{name}", description.trust
    )
    kind: Any = resolve_class(path, description.trust)
    has_config = hasattr(kind, "load_config") or getattr(kind, "config_class", None) is not None
    entries = dict[str, list[str]]()
    if not has_config and is_module(path, description.trust, description.origin):
        while (
            file := _folder(description)
            / (subfolder := f"{name}_{len(entries)}" if entries else name)
            / CONFIGS[0]
        ).is_file():
            entries[subfolder] = ["diffusers", str(read_json(file).get("_class_name"))]
    return entries


def _add(
    description: PipelineDescription,
    name: str,
    folder: Path,
    subfolder: str,
    entry: list[str],
    source: str | None = None,
) -> None:
    """Add the member saved in ``folder`` / ``subfolder``, of the class in the index ``entry``."""
    member_folder, location = folder / subfolder, f"{description.origin}/{subfolder}"
    if any(member_folder.glob("*.py")):
        raise InputError(
            f"{location} brings code of its own ({next(member_folder.glob('*.py')).name}): code "
            "that comes with a checkpoint is never run. "
            "Install it as a package, and write the graph with class: and allow: by hand "
            "(docs/howto/import.md)"
        )
    path = class_in(entry[0], entry[1], description.kind, location, description.trust)
    file = next(
        (member_folder / file for file in CONFIGS if (member_folder / file).is_file()), None
    )
    config = read_json(file, infinite=True) if file is not None else None
    if not is_module(path, description.trust, location):
        description.add(name, path, config, source=source)
        return
    if config is None:
        raise InputError(f"{location} has no config.json: without it {entry[1]} has no sizes")
    tensors, weights = _saved_weights(member_folder, config, location, description.source or "")
    if weights.gguf:
        base = source or f"{description.source}/{name}"
        weights = replace(weights, gguf=f"{base}/{weights.gguf}")
    description.add(
        name,
        path,
        {key: value for key, value in config.items() if key != "quantization_config"},
        dtype_of(config, [(tensor.dtype, tensor.nbytes) for tensor in tensors]),
        source=source,
        weights=weights,
    )


def _saved_weights(
    folder: Path, config: Mapping[str, Any], location: str, source: str
) -> tuple[list[Stored], SavedWeights]:
    """Return (tensors that are not quantized, how the weights are saved) of a component's folder.

    ``source``: of the pipeline. Raises InputError for quantized weights that cannot be read.
    """
    method = _quantization(config, location)
    variant = only_variant(folder)
    # of a repository, the index of shards may be here without them
    is_here = has_weights(folder, variant) and (
        Path(source).is_absolute() or complete(str(folder), location, variant)
    )
    if not is_here:
        files = sorted(path.name for path in folder.glob("*.gguf"))
        if len(files) > 1:
            raise InputError(
                f"{location} has no safetensors, and {len(files)} GGUF files, such as {files[0]}: "
                "leave one there"
            )
        if files:
            return [], SavedWeights(("gguf",), gguf=files[0])
        return [], SavedWeights((method,) if method else ())
    tensors = {tensor.name: tensor for tensor in stored_tensors(folder, location, variant)}
    try:
        packed = packed_weights(tensors) | torchao_weights(tensors)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{location} cannot be imported: {error}") from error
    precisions = {weight.precision for weight in packed.values()}
    if method and precisions - {method}:
        other = min(precisions - {method})
        raise InputError(f"{location} has weights in {other}, and its config says {method}")
    names = {name for weight in packed.values() for name in weight.names}
    plain = [tensor for name, tensor in tensors.items() if name not in names]
    if common_dtype((tensor.dtype, tensor.nbytes) for tensor in plain) == FP8:
        precisions = {"fp8"}
        plain = [tensor for tensor in plain if tensor.dtype != FP8]
    return plain, SavedWeights(tuple(precisions), variant)


def _quantization(config: Mapping[str, Any], location: str) -> str:
    """Return the precision in which a component was saved by bitsandbytes or torchao; "" for 16
    bits or more. Raises InputError for other quantizations."""
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping) or not settings:
        return ""
    method = str(settings.get("quant_method"))
    is_int8 = bool(settings.get("load_in_8bit"))
    kind = "int8" if is_int8 else str(settings.get("bnb_4bit_quant_type", "fp4"))
    threshold = settings.get("llm_int8_threshold", THRESHOLD)
    if method == "bitsandbytes" and (kind == "nf4" or (is_int8 and threshold == THRESHOLD)):
        return kind
    if method == "torchao":
        kinds = settings.get("quant_type")
        config_class = kinds.get("default") if isinstance(kinds, Mapping) else None
        name = config_class.get("_type") if isinstance(config_class, Mapping) else kinds
        if name in TORCHAO_CONFIGS:
            return TORCHAO_CONFIGS[str(name)]
        method += f" as {name}"
    attaching = ""  # weights of torchao and quanto are made of several tensors
    if method == "bitsandbytes":
        method += f" in {kind}" + (f" with llm_int8_threshold {threshold}" if is_int8 else "")
        attaching = ", or load this one with diffusers and type graphrun.attach(pipe, vram=...)"
    raise InputError(
        f"{location} was quantized by {method}, and graphrun reads nf4, int8, fp8, and of torchao "
        f"{' and '.join(TORCHAO_CONFIGS)}: take a folder in 16 bits and plan it with --allow nf4"
        f"{attaching}"
    )

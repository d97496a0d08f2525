"""Pipelines from folders in diffusers' layout and from hub repositories.

From the hub only small files are fetched, never weights. Of weights in a local folder the headers
are read, for their dtypes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers

from graphrun.diffusers_.importing.found import (
    Found,
    class_in,
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
from graphrun.modules.classes import resolve_class
from graphrun.modules.source_files import has_weights, stored_tensors
from graphrun.ops.modular import BLOCKS, is_modular_class

INDEX = "model_index.json"
MODULAR_INDEX, OWN_BLOCKS = "modular_model_index.json", "modular_config.json"
# Files to fetch: configurations, tokenizers, processors, schedulers. `LARGE`: weights and exports
# for other frameworks, never fetched.
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
    folder: Path, without: Collection[str] = (), origin: str = "", trust: tuple[str, ...] = ()
) -> Found:
    """The pipeline saved in ``folder``. Raises InputError where there is none, or where it needs
    code of its own."""
    if folder.is_file():
        raise InputError(existing_kind(folder))
    return _read(folder, folder.resolve().as_posix(), None, without, origin or str(folder), trust)


def of_hub(
    repository: str,
    revision: str | None = None,
    without: Collection[str] = (),
    trust: tuple[str, ...] = (),
) -> Found:
    """The pipeline in the hub's ``repository``. Its small files are fetched, or taken from the
    hub's cache.

    A ``revision`` (branch, tag or commit) is pinned: what is found names the commit that it is now,
    since the configurations are of that commit. Raises InputError where there is no such
    repository, or where it cannot be reached and is not in the cache.
    """
    folder = _fetched(repository, revision, SMALL)
    # of the hub's cache: models--owner--name/snapshots/COMMIT
    commit = folder.name if revision is not None else None
    found = _read(folder, repository, commit, without, repository, trust)
    if commit != revision:
        found.notes = (f"The revision is the commit that {revision} was.",)
    return found


def _fetched(repository: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The folder in the hub's cache with those files of ``repository`` that match ``patterns``, no
    weights. Raises InputError."""
    what = f"the configurations of {repository}{f' at {revision}' if revision else ''}"
    return hub.snapshot(repository, revision, patterns, LARGE, what=what)


def _read(
    folder: Path,
    source: str,
    revision: str | None,
    without: Collection[str],
    origin: str,
    trust: tuple[str, ...],
) -> Found:
    modular = (folder / MODULAR_INDEX).is_file() and not any(
        (folder / name).is_file() for name in (INDEX, OWN_BLOCKS)
    )
    index = read_json(folder / MODULAR_INDEX) if modular else _index(folder, origin)
    path = _pipeline(index.get("_class_name"), origin, trust)
    found = Found(origin, path, slug(source), source, folder.resolve(), revision, trust)
    (_add_blocks if modular else _add_members)(found, index, without)
    return found


def _add_members(found: Found, index: Mapping[str, Any], without: Collection[str]) -> None:
    listed = {name: entry for name, entry in index.items() if not name.startswith("_")}
    if wrong := [name for name in listed if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name)]:
        raise InputError(
            f"{INDEX}: {wrong[0]!r} cannot be a part's name, which is that of its folder: rename it",
            found.origin,
        )
    pairs = {name: entry for name, entry in listed.items() if _is_pair(entry)}
    _refuse_unknown(without, pairs, found.origin)
    absent = [
        n
        for n, pair in pairs.items()
        if pair[0] is None or n in without or _made_by_constructor(found, n, pair)
    ]
    plain = {name: entry for name, entry in listed.items() if name not in pairs}
    for name in (name for name in pairs if name not in absent):
        if several := _several(found, name, pairs[name]):
            plain[name] = [f"${name}_{number}" for number in range(len(several))]
            for number, (own, entry) in enumerate(several.items()):
                _add(found, f"{name}_{number}", _folder(found), own, entry, f"{found.source}/{own}")
        else:
            _add(found, name, _folder(found), name, pairs[name])
    found.settings = plain_settings(found.kind, plain, absent)


def _made_by_constructor(found: Found, name: str, entry: list[str]) -> bool:
    """Whether the member ``name`` is a scheduler that was not saved: its constructor makes one of
    fixed settings where none is given."""
    parameter = inspect.signature(found.kind.__init__).parameters.get(name)
    if (_folder(found) / name).exists() or parameter is None or parameter.default is not None:
        return False
    path = class_in(entry[0], entry[1], found.kind, f"{found.origin}/{name}", found.trust)
    return hasattr(resolve_class(path, found.trust), "set_timesteps")


def _folder(found: Found) -> Path:
    assert found.folder is not None
    return found.folder


def _refuse_unknown(without: Collection[str], parts: Collection[str], origin: str) -> None:
    if unknown := sorted(set(without) - set(parts)):
        raise InputError(
            f"without {unknown[0]}: {origin} has no such part; it has {', '.join(parts)}"
        )


def _add_blocks(found: Found, index: Mapping[str, Any], without: Collection[str]) -> None:
    """Adds the members of a modular pipeline, which may each be in another folder or repository."""
    kind, origin = found.kind, found.origin
    if not is_modular_class(kind):
        raise InputError(
            f"{origin}/{MODULAR_INDEX} is of {found.pipeline}, which is not modular: it belongs into {INDEX}"
        )
    named = str(index.get("_blocks_class_name"))
    classes = getattr(getattr(diffusers, named, None), "block_classes", None)
    if classes is None:
        raise InputError(f"{origin}: {own_code(named)}")
    own = f"diffusers.{named}" if classes and named != kind.default_blocks_name else None
    pipeline = pipeline_of(kind, own)
    _refuse_unknown(without, pipeline._component_specs, origin)
    for name in (name for name in pipeline._component_specs if name not in without):
        entry = index.get(name)
        if not isinstance(entry, list) or len(entry) != 3:
            add_default(found, pipeline, name)
        elif isinstance(said := entry[2], dict) and said.get("pretrained_model_name_or_path"):
            at = str(said.get("subfolder") or "")
            here = bool(at) and (_folder(found) / at).is_dir()
            location, source = (
                (_folder(found), found.source) if here else _elsewhere(said, at, f"{origin}/{name}")
            )
            named_class = [
                str(text) for text in (entry[:2] if entry[0] else said.get("type_hint", entry))[:2]
            ]
            _add(
                found,
                name,
                location,
                at,
                named_class,
                None if here and at == name else f"{source}/{at}".rstrip("/"),
            )
    found.settings = {
        name: index[name]
        for name, spec in pipeline._config_specs.items()
        if name in index and index[name] != spec.default
    } | ({BLOCKS: own} if own else {})


def _elsewhere(said: Mapping[str, Any], subfolder: str, origin: str) -> tuple[Path, str]:
    """(folder with the small files, source) of a component that is not in its pipeline's folder.
    Raises InputError."""
    location, revision = str(said["pretrained_model_name_or_path"]), said.get("revision")
    if (folder := Path(location).expanduser()).is_dir():
        return folder, str(folder.resolve())
    if location.startswith((".", "/", "~")) or location.count("/") != 1:
        raise InputError(
            f"{origin}: there is no folder {location}: move the component to {subfolder}/ beside {MODULAR_INDEX}"
        )
    files = tuple(f"{subfolder}/{kind}" for kind in SMALL) if subfolder else SMALL
    return _fetched(
        location, revision, files
    ), f"{location}@{revision.replace('/', '%2F')}" if revision else location


def _index(folder: Path, origin: str) -> Mapping[str, Any]:
    if not folder.is_dir():
        raise InputError(f"no such folder: {folder}")
    if not (folder / INDEX).is_file():
        if (folder / OWN_BLOCKS).is_file():
            raise InputError(f"{origin}: {own_code(OWN_BLOCKS)}")
        what = (
            "a component's folder: give the one above it"
            if (folder / "config.json").is_file()
            else "no pipeline of diffusers"
        )
        raise InputError(f"{origin} has no {INDEX}: it is {what}")
    return read_json(folder / INDEX)


def _pipeline(name: Any, origin: str, trust: tuple[str, ...]) -> str:
    """The class path of the pipeline called ``name``, of diffusers or a trusted package."""
    if not isinstance(name, str):
        raise InputError(
            f"{origin} names {name} as its pipeline, code that comes with it: such code is never run. Install it as a package, and "
            "write the graph with pipeline: and allow: by hand (docs/howto/import.md)"
        )
    for path in (f"{package}.{name}" for package in (*trust, "diffusers")):
        try:
            resolve_class(path, trust, origin, "pipeline")
            return path
        except GraphError as error:
            last = error
    text = "; a pipeline that is not part of diffusers is never run from a checkpoint: install its package, and write the graph"
    raise GraphError(
        f"{last}{text} with pipeline: and allow: by hand (docs/howto/import.md)"
    ) from last


def _is_pair(entry: Any) -> bool:
    """Whether an entry of the index names a library and a class, or nothing."""
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and all(item is None or isinstance(item, str) for item in entry)
    )


def _several(found: Found, name: str, entry: list[str]) -> dict[str, list[str]]:
    """The entries of the folders NAME, NAME_1, ... of a member that is a list, such as several
    ControlNets; else empty."""
    path = class_in(entry[0], entry[1], found.kind, f"{found.origin}/{name}", found.trust)
    whole: Any = resolve_class(path, found.trust)
    configured = hasattr(whole, "load_config") or getattr(whole, "config_class", None) is not None
    entries = dict[str, list[str]]()
    if not configured and is_module(path, found.trust, found.origin):
        while (
            file := _folder(found)
            / (own := f"{name}_{len(entries)}" if entries else name)
            / CONFIGS[0]
        ).is_file():
            entries[own] = ["diffusers", str(read_json(file).get("_class_name"))]
    return entries


def _add(
    found: Found, name: str, folder: Path, at: str, entry: list[str], source: str | None = None
) -> None:
    """Adds the member saved in ``folder`` at ``at``, of the class that ``entry`` of the index
    names."""
    own, where = folder / at, f"{found.origin}/{at}"
    if any(own.glob("*.py")):
        raise InputError(
            f"{where} brings code of its own ({next(own.glob('*.py')).name}): code that comes with a checkpoint is never run. "
            "Install it as a package, and write the graph with class: and allow: by hand (docs/howto/import.md)"
        )
    path = class_in(entry[0], entry[1], found.kind, where, found.trust)
    file = next((own / file for file in CONFIGS if (own / file).is_file()), None)
    config = read_json(file, infinite=True) if file is not None else None
    if not is_module(path, found.trust, where):
        found.add(name, path, config, source=source)
        return
    if config is None:
        raise InputError(f"{where} has no config.json: without it {entry[1]} has no sizes")
    stored = stored_tensors(own, where) if has_weights(own) else ()
    found.add(
        name,
        path,
        config,
        dtype_of(config, [(tensor.dtype, tensor.nbytes) for tensor in stored]),
        source=source,
    )

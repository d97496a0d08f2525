"""Import of a source as a graph file: identifies the source, splits its call into stages and writes the file.

Also decides each component's dtype. Nothing is written unless the whole graph loads.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphrun.diffusers_.dry_call import ProbeError
from graphrun.diffusers_.importing.by_class import of_class
from graphrun.diffusers_.importing.folder import of_folder, of_hub
from graphrun.diffusers_.importing.layout import Layout
from graphrun.diffusers_.importing.modular_spec import WORKFLOW, with_workflow
from graphrun.diffusers_.importing.single import ONE_FILE, of_file
from graphrun.diffusers_.importing.spec import DTYPES, OF_FILES, PipelineSpec, accepted, slug
from graphrun.diffusers_.importing.split import lay_out
from graphrun.diffusers_.importing.trial import build_trial, in_one_dtype
from graphrun.diffusers_.importing.written import document_of
from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.graph.values import did_you_mean

DEFAULT_DTYPE = "bfloat16"  # where neither files nor configurations name one: large pipelines are usually run in it


@dataclass(frozen=True, slots=True)
class Asked:
    """The user's options for an import.

    ``configs``: constructor argument -> configuration, for a class; for one file the folder or repository, under ``""``. ``dtypes``
    by component (``""``: all). ``without``: members to leave out. ``sets``: defaults of inputs. ``revision`` of a hub repository.
    ``whole``: one stage, without trying to split the call.
    """

    configs: Mapping[str, str]
    dtypes: Mapping[str, str]
    without: Collection[str] = ()
    sets: Mapping[str, Any] | None = None
    revision: str | None = None
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Imported:
    """A pipeline spec with its stages, ready to be written as a graph file."""

    spec: PipelineSpec
    layout: Layout

    def write(self, path: Path, *, force: bool = False) -> Graph:
        """Writes the graph file ``path`` and its configurations and tokenizers, and returns the graph loaded from there.

        Raises InputError, and writes nothing, where a file exists that ``force`` does not allow to overwrite, or on an OS error.
        """
        refuse_existing(path, force)
        name = path.stem if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", path.stem) else slug(path.stem)
        trial = document_of(self.spec, self.layout, name)
        seen = document_of(_as_seen_from(self.spec, path.parent), self.layout, name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".graphrun-import-") as made:
                for name, content in {**trial.files, path.name: trial.text}.items():
                    target = Path(made, name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    if callable(content):
                        content(target)
                    else:
                        target.write_text(content, encoding="utf-8")
                load(Path(made, path.name), self.spec.trust)
                Path(made, path.name).write_text(seen.text, encoding="utf-8")
                _move(Path(made), path, list(trial.files), force)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
        return load(path, self.spec.trust)


def import_source(source: str, asked: Asked) -> Imported:
    """``source`` as a graph: a folder, a hub id (only small files are fetched), a checkpoint in one file, or a pipeline's class.

    Raises InputError where it is none of these, ProbeError where the dry run of the pipeline's call fails.
    """
    spec = spec_of(source, asked)
    return stage(with_dtypes(spec, asked.dtypes), asked.sets or {}, whole=asked.whole)


def spec_of(source: str, asked: Asked) -> PipelineSpec:
    """The spec of ``source``, which is recognized by its form. Raises InputError."""
    path = Path(source).expanduser()
    looks_local = source.startswith((".", "/", "~")) or path.exists()
    if looks_local and path.suffix in ONE_FILE and not path.is_dir():
        if unknown := sorted(asked.configs.keys() - {""}):
            raise InputError(f"--config {unknown[0]}=...: for a file it is --config FOLDER, in the layout of diffusers")
        plain = replace(asked, configs={})
        return of_file(path, asked.configs.get(""), lambda config: _configurations(config, path, plain))
    named = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+", source)
    if asked.configs and (looks_local or not named):
        raise InputError(
            "--config is for a pipeline's class and for one file; a folder and a repository have their own configurations"
        )
    if "" in asked.configs:
        raise InputError("--config FOLDER is for a checkpoint in one file; for a class it is --config NAME=FILE")
    if asked.revision is not None and (looks_local or named):
        raise InputError(f"--revision is for a repository on the hub, and {source} is not one")
    if looks_local:
        return of_folder(path, asked.without, source)
    if named:
        return of_class(source, asked.configs, asked.without, str((asked.sets or {}).get(WORKFLOW, "")))
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
        return of_hub(source, asked.revision, asked.without)
    raise InputError(f"{source} is not a folder, a hub id (owner/name) or a class (diffusers.FluxPipeline)")


def _configurations(source: str, file: Path, asked: Asked) -> PipelineSpec:
    """The spec that a checkpoint in one file takes its configurations from. Raises InputError."""
    try:
        return spec_of(source, asked)
    except InputError as error:
        advice = "--config FOLDER names a folder in the layout of diffusers with the configurations of its pipeline"
        raise InputError(f"{file} has no configurations of its own: {error}. {advice}") from error


def with_dtypes(spec: PipelineSpec, asked: Mapping[str, str]) -> PipelineSpec:
    """``spec`` with a dtype for every component: the one asked for, else its own, else that of most components.

    A VAE that its pipeline casts up for decoding is declared in fp32, since a component's dtype is fixed during a run. Raises
    InputError for an unknown component or dtype.
    """
    if unknown := sorted(asked.keys() - {"", *spec.components}):
        raise InputError(f"--dtype {unknown[0]}: there is no such component{did_you_mean(unknown[0], spec.components)}")
    if wrong := sorted(set(asked.values()) - set(DTYPES)):
        raise InputError(f"--dtype {wrong[0]}: it is {', '.join(DTYPES)}")
    held = [member for member in spec.components.values() if member.dtype_reason == OF_FILES]
    known = Counter(member.dtype for member in held or spec.components.values() if member.dtype_reason)
    usual, of = (known.most_common(1)[0][0], "as the other components") if known else (DEFAULT_DTYPE, "assumed: nothing says it")
    members = []
    for member in spec.members:
        if member.is_component:
            if said := asked.get(member.name) or asked.get(""):
                member = replace(member, dtype=said, dtype_reason=OF_FILES)
            elif not member.dtype_reason:
                member = replace(member, dtype=usual, dtype_reason=of)
            if member.dtype == "float16" and member.name not in asked and _is_cast(spec, member.name, member.config or {}):
                member = replace(member, dtype="float32", dtype_reason="decodes in fp32: in fp16 it overflows")
        members.append(member)
    return replace(spec, members=tuple(members))


def _is_cast(spec: PipelineSpec, name: str, config: Mapping[str, Any]) -> bool:
    return name == "vae" and hasattr(spec.kind, "upcast_vae") and bool(config.get("force_upcast", True))


def stage(spec: PipelineSpec, sets: Mapping[str, Any], *, whole: bool = False) -> Imported:
    """``spec`` with its stages. Raises ProbeError where the dry run of its call fails."""
    spec, sets = with_workflow(accepted(spec), sets)
    try:
        return Imported(spec, lay_out(build_trial(spec), sets, whole=whole))
    except ProbeError:
        if len({member.dtype for member in spec.components.values()}) == 1:
            raise
        layout = _in_fp32(spec, sets) if not whole else None
        if layout is None:  # stages may have several dtypes where one call may not, since the ops cast latents
            raise
        return Imported(spec, layout)


def _in_fp32(spec: PipelineSpec, sets: Mapping[str, Any]) -> Layout | None:
    try:
        layout = lay_out(build_trial(in_one_dtype(spec)), sets)
    except ProbeError:
        return None
    return layout if not layout.why else None


def refuse_existing(path: Path, force: bool) -> None:
    """Raises InputError where ``path`` is a folder, or an existing file without ``force``."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file, such as {path / 'graph.yaml'}")
    if path.exists() and not force:
        raise InputError(f"{path} is there already: add --force to overwrite it, or choose another -o")


def _move(made: Path, path: Path, files: list[str], force: bool) -> None:
    """Moves the written files from ``made`` to their final paths, the graph file last. Raises InputError before moving any."""
    root = path.parent
    for name in files:
        there, new = root / name, made / name
        if there.is_file() and not force and there.read_bytes() != new.read_bytes():
            raise InputError(f"{there} is there already and is another: add --force to overwrite it, or choose another -o")
    for name in files:
        there = root / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if there.is_dir():
            shutil.rmtree(there)
        os.replace(made / name, there)
    os.replace(made / path.name, path)


def _as_seen_from(spec: PipelineSpec, folder: Path) -> PipelineSpec:
    """``spec`` with paths relative to ``folder``, where the graph file will be."""
    members = (replace(t, source=_near(t.source, folder), gguf=_near(t.gguf, folder)) for t in spec.members)
    return replace(spec, source=_near(spec.source, folder), members=tuple(members))


def _near(source: str | None, folder: Path) -> str | None:
    """``source`` relative to ``folder`` where that needs at most one ``..``; other folders and repositories unchanged."""
    if source is None or not Path(source).is_absolute():
        return source
    relative = os.path.relpath(source, folder.resolve())
    if relative.count("..") > 1:
        return source
    return relative if relative.startswith(".") else f"./{relative}"

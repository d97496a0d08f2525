"""Import of a source as a graph file: identifies the source, splits its call into stages and writes
the file.

Also decides each component's dtype. Nothing is written unless the whole graph loads.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graphrun.diffusers_.dry_call import ProbeError
from graphrun.diffusers_.importing.by_class import of_class
from graphrun.diffusers_.importing.folder import of_folder, of_hub
from graphrun.diffusers_.importing.found import DTYPES, OF_FILES, Found, slug
from graphrun.diffusers_.importing.layout import Layout
from graphrun.diffusers_.importing.modular_spec import WORKFLOW, set_workflow
from graphrun.diffusers_.importing.single import ONE_FILE, of_file
from graphrun.diffusers_.importing.split import lay_out
from graphrun.diffusers_.importing.trial import build_trial
from graphrun.diffusers_.importing.written import document_of
from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.graph.values import did_you_mean

# where neither files nor configurations name one: large pipelines are usually run in it
DEFAULT_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class Asked:
    """The user's options for an import.

    ``configs``: constructor argument -> configuration, for a class; for one file the folder or
    repository, under ``""``. ``dtypes`` by component (``""``: all). ``without``: members to leave
    out. ``sets``: defaults of inputs. ``revision`` of a hub repository. ``whole``: one stage,
    without trying to split the call. ``trust``: packages of which it may name any class, and so run
    code.
    """

    configs: Mapping[str, str]
    dtypes: Mapping[str, str]
    without: Collection[str] = ()
    sets: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None
    whole: bool = False
    trust: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Imported:
    """A pipeline with its stages, ready to be written as a graph file."""

    found: Found
    layout: Layout

    def write(self, path: Path, *, force: bool = False) -> Graph:
        """Writes the graph file ``path`` and its configurations and tokenizers, and returns the
        graph loaded from there.

        Raises InputError, and writes nothing, where a file exists that ``force`` does not allow to
        overwrite, or on an OS error.
        """
        refuse_existing(path, force)
        name = (
            path.stem
            if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", path.stem)
            else slug(path.stem)
        )
        trial, seen = (
            document_of(self.found, self.layout, name, folder) for folder in (None, path.parent)
        )
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
                load(Path(made, path.name), self.found.trust)
                Path(made, path.name).write_text(seen.text, encoding="utf-8")
                _move(Path(made), path, list(trial.files), force)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
        return load(path, self.found.trust)


def import_source(source: str, asked: Asked) -> Imported:
    """``source`` as a graph: a folder, a hub id (only small files are fetched), a checkpoint in one
    file, or a pipeline's class.

    Raises InputError where it is none of these, ProbeError where the dry run of the pipeline's call
    fails.
    """
    return stage(with_dtypes(find(source, asked), asked.dtypes), asked.sets, whole=asked.whole)


def find(source: str, asked: Asked) -> Found:
    """The pipeline in ``source``, which is recognized by its form. Raises InputError."""
    path = Path(source).expanduser()
    looks_local = source.startswith((".", "/", "~")) or path.exists()
    if looks_local and path.suffix in ONE_FILE and not path.is_dir():
        if unknown := sorted(asked.configs.keys() - {""}):
            raise InputError(
                f"--config {unknown[0]}=...: for a file it is --config FOLDER, in the layout of diffusers"
            )
        plain = replace(asked, configs={})
        return of_file(
            path, asked.configs.get(""), lambda config: _configurations(config, path, plain)
        )
    named = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+", source)
    if asked.configs and (looks_local or not named):
        raise InputError(
            "--config is for a pipeline's class and for one file; a folder and a repository have their own configurations"
        )
    if "" in asked.configs:
        raise InputError(
            "--config FOLDER is for a checkpoint in one file; for a class it is --config NAME=FILE"
        )
    if asked.revision is not None and (looks_local or named):
        raise InputError(f"--revision is for a repository on the hub, and {source} is not one")
    if looks_local:
        return of_folder(path, asked.without, source, asked.trust)
    if named:
        return of_class(
            source, asked.configs, asked.without, str(asked.sets.get(WORKFLOW, "")), asked.trust
        )
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
        return of_hub(source, asked.revision, asked.without, asked.trust)
    raise InputError(
        f"{source} is not a folder, a hub id (owner/name) or a class (diffusers.FluxPipeline)"
    )


def _configurations(source: str, file: Path, asked: Asked) -> Found:
    """The pipeline that a checkpoint in one file takes its configurations from. Raises
    InputError."""
    try:
        return find(source, asked)
    except InputError as error:
        advice = "--config FOLDER names a folder in the layout of diffusers with the configurations of its pipeline"
        raise InputError(f"{file} has no configurations of its own: {error}. {advice}") from error


def with_dtypes(found: Found, asked: Mapping[str, str]) -> Found:
    """``found``, with a dtype for every component: the one asked for, else its own, else that of
    most components.

    A VAE that its pipeline casts up for decoding is declared in fp32, since a component's dtype is
    fixed during a run. Raises InputError for an unknown component or dtype.
    """
    components, reasons = found.components, found.reasons
    if unknown := sorted(asked.keys() - {"", *components}):
        raise InputError(
            f"--dtype {unknown[0]}: there is no such component{did_you_mean(unknown[0], components)}"
        )
    if wrong := sorted(set(asked.values()) - set(DTYPES)):
        raise InputError(f"--dtype {wrong[0]}: it is {', '.join(DTYPES)}")
    held = [name for name, reason in reasons.items() if reason == OF_FILES and name in components]
    known = Counter(components[name].dtype for name in held or components if reasons[name])
    usual, of = (
        (known.most_common(1)[0][0], "as the other components")
        if known
        else (DEFAULT_DTYPE, "assumed: nothing says it")
    )
    for name, component in components.items():
        dtype = component.dtype
        if said := asked.get(name) or asked.get(""):
            dtype, reasons[name] = said, OF_FILES
        elif not reasons[name]:
            dtype, reasons[name] = usual, of
        cast = (
            name == "vae"
            and hasattr(found.kind, "upcast_vae")
            and component.config.get("force_upcast", True)
        )
        if dtype == "float16" and name not in asked and cast:
            dtype, reasons[name] = "float32", "decodes in fp32: in fp16 it overflows"
        components[name] = replace(component, dtype=dtype)
    return found


def stage(found: Found, sets: Mapping[str, Any], *, whole: bool = False) -> Imported:
    """``found`` with its stages. Raises ProbeError where the dry run of its call fails."""
    sets = set_workflow(found, sets)
    try:
        return Imported(found, lay_out(build_trial(found), sets, whole=whole))
    except ProbeError:
        if len({component.dtype for component in found.components.values()}) == 1 or whole:
            raise
        with suppress(
            ProbeError
        ):  # stages may have several dtypes where one call may not, since the ops cast latents
            layout = lay_out(build_trial(found, dtype="float32"), sets)
            if not layout.why:
                return Imported(found, layout)
        raise


def refuse_existing(path: Path, force: bool) -> None:
    """Raises InputError where ``path`` is a folder, or an existing file without ``force``."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file, such as {path / 'graph.yaml'}")
    if path.exists() and not force:
        raise InputError(f"{path} already exists; add --force, or name another file with -o")


def _move(made: Path, path: Path, files: list[str], force: bool) -> None:
    """Moves the written files from ``made`` to their final paths, the graph file last. Raises
    InputError before moving any."""
    root = path.parent
    for name in files:
        there, new = root / name, made / name
        if there.is_file() and not force and there.read_bytes() != new.read_bytes():
            raise InputError(
                f"{there} already exists and differs; add --force, or name another file with -o"
            )
    for name in files:
        there = root / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if there.is_dir():
            shutil.rmtree(there)
        os.replace(made / name, there)
    os.replace(made / path.name, path)

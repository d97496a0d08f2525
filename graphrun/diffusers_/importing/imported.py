"""Import of a source as a graph file: identify the source, split its call into stages, write. Also
decides each component's dtype. Nothing is written unless the whole graph loads."""

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
from graphrun.diffusers_.importing.found import DTYPES, OF_FILES, PipelineDescription, slug
from graphrun.diffusers_.importing.layout import GraphLayout
from graphrun.diffusers_.importing.modular_spec import WORKFLOW, set_settings
from graphrun.diffusers_.importing.single import ONE_FILE, of_file
from graphrun.diffusers_.importing.split import lay_out
from graphrun.diffusers_.importing.trial import build_trial
from graphrun.diffusers_.importing.written import document_of
from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.graph.shipped import hint_for_name
from graphrun.graph.values import did_you_mean

# usual for large pipelines; used if neither files nor configurations name a dtype
DEFAULT_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """The user's options for an import.

    ``configs``: for a class, the configuration of each constructor argument; for one file, the
    folder or repository under ``""``. ``dtypes``: by component (``""``: all). ``excluded_names``:
    members to omit. ``input_defaults``: defaults of inputs. ``revision``: of a hub repository.
    ``whole``: one stage, without trying to split the call. ``trust``: packages whose classes the
    graph may name, and so run.
    """

    configs: Mapping[str, str]
    dtypes: Mapping[str, str]
    excluded_names: Collection[str] = ()
    input_defaults: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None
    whole: bool = False
    trust: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Imported:
    """A pipeline with its stages, ready to be written as a graph file."""

    description: PipelineDescription
    layout: GraphLayout

    def write(self, path: Path, *, overwrite: bool = False) -> Graph:
        """Write the graph file ``path`` with its configurations and tokenizers; return the graph.

        Raises InputError, and writes nothing, on an OS error or if a file exists without
        ``overwrite``.
        """
        refuse_existing(path, overwrite)
        name = (
            path.stem
            if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", path.stem)
            else slug(path.stem)
        )
        trial_document, document = (
            document_of(self.description, self.layout, name, folder)
            for folder in (None, path.parent)
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(
                dir=path.parent, prefix=".graphrun-import-"
            ) as folder_path:
                for name, content in {
                    **trial_document.files,
                    path.name: trial_document.text,
                }.items():
                    target = Path(folder_path, name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    if callable(content):
                        content(target)
                    else:
                        target.write_text(content, encoding="utf-8")
                load(Path(folder_path, path.name), self.description.trust)
                Path(folder_path, path.name).write_text(document.text, encoding="utf-8")
                _move(Path(folder_path), path, list(trial_document.files), overwrite)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
        return load(path, self.description.trust)


def import_source(source: str, options: ImportOptions) -> Imported:
    """Import ``source`` as a graph.

    ``source``: a folder, a hub id (only small files are fetched), a checkpoint in one file, or a
    pipeline's class. Raises InputError for anything else, ProbeError if the dry run of the
    pipeline's call fails.
    """
    return stage(
        with_dtypes(find(source, options), options.dtypes),
        options.input_defaults,
        whole=options.whole,
    )


def find(source: str, options: ImportOptions) -> PipelineDescription:
    """Return the description of ``source``, whose form shows its kind. Raises InputError."""
    path = Path(source).expanduser()
    looks_local = source.startswith((".", "/", "~")) or path.exists()
    if looks_local and path.suffix in ONE_FILE and not path.is_dir():
        if unknown := sorted(options.configs.keys() - {""}):
            raise InputError(
                f"--config {unknown[0]}=...: for a file it is --config FOLDER, in the layout of "
                "diffusers"
            )
        plain_options = replace(options, configs={})
        return of_file(
            path,
            options.configs.get(""),
            lambda config: _configurations(config, path, plain_options),
        )
    is_class_path = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+", source)
    if options.configs and (looks_local or not is_class_path):
        raise InputError(
            "--config is for a pipeline's class and for one file; a folder and a repository have "
            "their own configurations"
        )
    if "" in options.configs:
        raise InputError(
            "--config FOLDER is for a checkpoint in one file; for a class it is --config NAME=FILE"
        )
    if options.revision is not None and (looks_local or is_class_path):
        raise InputError(f"--revision is for a repository on the hub, and {source} is not one")
    if looks_local:
        return of_folder(path, options.excluded_names, source, options.trust)
    if is_class_path:
        return of_class(
            source,
            options.configs,
            options.excluded_names,
            str(options.input_defaults.get(WORKFLOW, "")),
            options.trust,
        )
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
        return of_hub(source, options.revision, options.excluded_names, options.trust)
    raise InputError(
        f"{source} is not a folder, a hub id (owner/name) or a class (diffusers.FluxPipeline)"
        f"{hint_for_name(source)}"
    )


def _configurations(source: str, file: Path, options: ImportOptions) -> PipelineDescription:
    """Return the pipeline with the configurations for a checkpoint in one file. Raises
    InputError."""
    try:
        return find(source, options)
    except InputError as error:
        suggestion = (
            "--config FOLDER names a folder in the layout of diffusers with the configurations "
            "of its pipeline"
        )
        raise InputError(
            f"{file} has no configurations of its own: {error}. {suggestion}"
        ) from error


def with_dtypes(description: PipelineDescription, dtypes: Mapping[str, str]) -> PipelineDescription:
    """Set a dtype for every component: from ``dtypes``, else its own, else the most common dtype.

    A VAE that its pipeline casts up for decoding gets fp32, since a component's dtype is fixed
    during a run. Raises InputError for an unknown component or dtype.
    """
    components, reasons = description.components, description.reasons
    if unknown := sorted(dtypes.keys() - {"", *components}):
        raise InputError(
            f"--dtype {unknown[0]}: there is no such "
            f"component{did_you_mean(unknown[0], components)}"
        )
    if wrong := sorted(set(dtypes.values()) - set(DTYPES)):
        raise InputError(f"--dtype {wrong[0]}: it is {', '.join(DTYPES)}")
    stored_names = [
        name for name, reason in reasons.items() if reason == OF_FILES and name in components
    ]
    dtype_counts = Counter(
        components[name].dtype for name in stored_names or components if reasons[name]
    )
    common, common_reason = (
        (dtype_counts.most_common(1)[0][0], "as the other components")
        if dtype_counts
        else (DEFAULT_DTYPE, "assumed: nothing says it")
    )
    for name, component in components.items():
        dtype = component.dtype
        if dtype_option := dtypes.get(name) or dtypes.get(""):
            dtype, reasons[name] = dtype_option, OF_FILES
        elif not reasons[name]:
            dtype, reasons[name] = common, common_reason
        is_upcast = (
            name == "vae"
            and hasattr(description.kind, "upcast_vae")
            and component.config.get("force_upcast", True)
        )
        if dtype == "float16" and name not in dtypes and is_upcast:
            dtype, reasons[name] = "float32", "decodes in fp32: in fp16 it overflows"
        components[name] = replace(component, dtype=dtype)
    return description


def stage(
    description: PipelineDescription, input_defaults: Mapping[str, Any], *, whole: bool = False
) -> Imported:
    """Return the pipeline with its stages. Raises ProbeError if the dry run of its call fails."""
    input_defaults = set_settings(description, input_defaults)
    try:
        return Imported(description, lay_out(build_trial(description), input_defaults, whole=whole))
    except ProbeError:
        if len({component.dtype for component in description.components.values()}) == 1 or whole:
            raise
        # stages may have several dtypes even if one call may not, since the ops cast latents
        with suppress(ProbeError):
            layout = lay_out(build_trial(description, dtype="float32"), input_defaults)
            if not layout.reason:
                return Imported(description, layout)
        raise


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raise InputError if ``path`` is a folder, or an existing file without ``overwrite``."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file, such as {path / 'graph.yaml'}")
    if path.exists() and not overwrite:
        raise InputError(f"{path} already exists; add --overwrite, or name another file with -o")


def _move(folder: Path, path: Path, files: list[str], overwrite: bool) -> None:
    """Move the written files from ``folder`` to their final paths, the graph file last.

    Raises InputError before the first move.
    """
    root = path.parent
    for name in files:
        target, source = root / name, folder / name
        if target.is_file() and not overwrite and target.read_bytes() != source.read_bytes():
            raise InputError(
                f"{target} already exists and differs; add --overwrite, or name another file "
                "with -o"
            )
    for name in files:
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(folder / name, target)
    os.replace(folder / path.name, path)

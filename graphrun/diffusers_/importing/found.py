"""Description of a pipeline from any source: its class, components, parts and settings.

This module decides the class, configuration and dtype of each member. It reads no weights and runs
no code from a checkpoint.

    source           origin of the members
    folder, hub id   model_index.json (name -> class) and NAME/config.json; tokenizers and
                     processors are loaded from the source
    class            names and annotations of its constructor; configurations from files
    one file         the components with tensors in it; everything else from a folder or repository
    live object      classes, configurations and dtypes of its modules
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphrun.errors import GraphError, InputError
from graphrun.graph.graph import DEFAULT_ALLOW, Graph
from graphrun.graph.loading import PICKLED
from graphrun.graph.parts import Component, Part
from graphrun.modules.classes import resolve_class
from graphrun.modules.source_files import WEIGHT_FILES

DTYPES = ("bfloat16", "float16", "float32")
OF_FILES, OF_CONFIG = "of its files", "of its configuration"  # reasons for a component's dtype


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """How a component is stored, where it is not the usual way: its ``precision`` if quantized,
    the ``variant`` of its files, and its ``gguf`` file, a path or hub path."""

    precision: tuple[str, ...] = ()
    variant: str = ""
    gguf: str = ""


@dataclass(slots=True)
class PipelineDescription:
    """A pipeline as its source describes it: content for a `Graph` and for its graph file.

    ``origin``: the source as the user named it. ``pipeline``: the class path. ``source``: an
    absolute folder or a repository; None without weights. ``folder``: the present place of its
    small files. ``trust``: packages whose code it may run. ``workflow``: of a modular pipeline.
    ``notes``: comments for the head of the graph file. ``settings``: plain constructor arguments.

    ``components`` and ``parts`` are as in the graph file: a member has a source only if it is not
    the member's folder in ``source``; an empty precision is the dtype; a part with a ``file`` is a
    tokenizer of which only the settings are known. ``reasons``: for each component's dtype; dtype
    and reason are empty if the source does not specify them. ``live``: members in memory.
    ``stand_ins``: by repository, the folder with its small files and headers (`hub_headers`).
    """

    origin: str
    pipeline: str
    name: str
    source: str | None = None
    folder: Path | None = None
    revision: str | None = None
    trust: tuple[str, ...] = ()
    workflow: str = ""
    notes: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    components: dict[str, Component] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    live: dict[str, Any] = field(default_factory=dict)
    stand_ins: dict[str, Path] = field(default_factory=dict)

    @property
    def kind(self) -> type[Any]:
        return resolve_class(self.pipeline, self.trust, self.origin, "pipeline")

    def add(
        self,
        name: str,
        class_path: str,
        config: Mapping[str, Any] | None,
        dtype: tuple[str, str] = ("", ""),
        *,
        source: str | None = None,
        file: Path | None = None,
        live: Any = None,
        weights: SavedWeights | None = None,
    ) -> None:
        """Add a component if the class is a module, else a part.

        ``dtype``: (dtype, reason for it). ``weights``: of a component. The configuration omits keys
        that diffusers ignores when it loads a saved or live model; constructors themselves write
        such keys (AutoencoderTiny's ``block_out_channels``). It also omits infinite defaults, which
        a graph file cannot contain (``lambda_min_clipped`` of DPMSolverMultistepScheduler).
        """
        kind: Any = resolve_class(class_path, self.trust, self.origin)
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(kind.__init__).parameters.items()
        }
        settings = {
            name: item
            for name, item in (config or {}).items()
            if item not in (math.inf, -math.inf) or defaults.get(name) != item
        }
        if live is not None:
            self.live[name] = live
        if not issubclass(kind, nn.Module):
            self.parts[name] = Part(name, class_path, settings, config is not None, file, source)
            return
        if hasattr(kind, "load_config") and (self.folder is not None or live is not None):
            parameters = inspect.signature(kind.__init__).parameters
            settings = {
                key: value for key, value in settings.items() if key in parameters or key[0] == "_"
            }
        weights = weights or SavedWeights()
        self.components[name] = Component(
            name,
            class_path,
            source,
            settings,
            True,
            dtype[0],
            weights.precision,
            variant=weights.variant,
            gguf=weights.gguf,
        )
        self.reasons[name] = dtype[1]

    def from_headers(self) -> PipelineDescription:
        """Return the pipeline with the stand-ins of repositories as its sources: for plans without
        weights, never for runs."""

        def place(source: str | None) -> str | None:
            for repository, folder in self.stand_ins.items():
                if source is not None and f"{source}/".startswith(f"{repository}/"):
                    return f"{folder}{source.removeprefix(repository)}"
            return source

        components = {
            name: replace(item, source=place(item.source), gguf=place(item.gguf) or "")
            for name, item in self.components.items()
        }
        parts = {n: replace(item, source=place(item.source)) for n, item in self.parts.items()}
        source = place(self.source)
        return replace(self, source=source, revision=None, components=components, parts=parts)

    def without_headers(self) -> list[str]:
        """Return the components with no header of weights here: in pickles, or on a hub that cannot
        be reached. Their dtypes and precisions are those of the configurations."""
        located = self.from_headers()
        places = {
            name: Path(item.gguf or item.source or f"{located.source}/{name}")
            for name, item in located.components.items()
            if item.gguf or item.source or located.source
        }
        return [
            name
            for name, place in places.items()
            if not any(file.suffix in WEIGHT_FILES for file in (place, *place.glob("*")))
        ]

    def graph(self) -> Graph:
        """Return the pipeline as a graph without stages or weights, for dry runs. Parts are loaded
        from their present place."""
        sources = {
            name: f"{self.folder}/{name}" if self.folder and not part.file else None
            for name, part in self.parts.items()
        }
        return Graph(
            name=self.name,
            path=None,
            pipeline=self.pipeline,
            source=self.source,
            pipeline_config=dict(self.settings),
            trust=self.trust,
            inputs={},
            components={
                n: replace(c, source=None, file_line=f"{self.origin}: {n}")
                for n, c in self.components.items()
            },
            parts={
                n: replace(p, source=p.source or sources[n], file_line=self.origin)
                for n, p in self.parts.items()
            },
            stages=(),
            outputs={},
        )


def name_of(kind: type[Any]) -> str:
    """Return a graph's name for a pipeline class: ``flux`` for ``FluxPipeline`` and
    ``FluxModularPipeline``."""
    return slug(kind.__name__.removesuffix("Pipeline").removesuffix("Modular"))


def plain_settings(
    kind: type[Any], values: Mapping[str, Any], absent: Sequence[str]
) -> dict[str, Any]:
    """Return the ``values`` that differ from the defaults of the constructor of ``kind``.
    ``absent``: members that the pipeline does not have; required ones are added as None."""
    parameters = inspect.signature(kind.__init__).parameters
    optional = getattr(kind, "_optional_components", ())
    settings = {
        name: value
        for name, value in values.items()
        if name in parameters and plain(parameters[name].default) != value
    }
    required = (
        name
        for name in absent
        if name in parameters and parameters[name].default is inspect.Parameter.empty
    )
    return settings | {name: None for name in required if name not in optional}


def common_dtype(tensor_sizes: Iterable[tuple[str, int]]) -> str:
    """Return the dtype of most bytes in ``tensor_sizes``, (dtype, bytes) pairs; empty if none."""
    sizes = Counter[str]()
    for dtype, nbytes in tensor_sizes:
        sizes[dtype] += nbytes
    return next((dtype for dtype, _ in sizes.most_common(1)), "")


def dtype_of(config: Mapping[str, Any], tensor_sizes: Iterable[tuple[str, int]]) -> tuple[str, str]:
    """Return (dtype, reason) of a component; ("", "") if unknown. It is the dtype of most bytes in
    its files, by ``tensor_sizes`` (dtype, bytes), else the dtype in ``config``. Of nf4 weights
    it is also the dtype to compute in."""
    if (common := common_dtype(tensor_sizes)) in DTYPES:
        return common, OF_FILES
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        quantization = {}
    config_dtypes = (
        str(settings.get(key) or "").removeprefix("torch.")
        for settings, key in (
            (config, "dtype"),
            (config, "torch_dtype"),
            (quantization, "bnb_4bit_compute_dtype"),
        )
    )
    return next(((dtype, OF_CONFIG) for dtype in config_dtypes if dtype in DTYPES), ("", ""))


def class_in(
    library: str, name: str, pipeline: type[Any], origin: str, trust: Sequence[str] = ()
) -> str:
    """Return the class path for an entry ``[library, name]`` of a model_index.

    ``library`` may be a subpackage of diffusers' pipelines. Raises InputError if no installed and
    allowed library has the class: code that comes with a checkpoint is never run.
    """
    if not all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]*", text) for text in (library, name)):
        raise InputError(f"{library!r}, {name!r} do not name a class", origin)
    hints = (
        parameter.annotation
        for parameter in inspect.signature(pipeline.__init__).parameters.values()
    )
    annotation_paths = [
        f"{hint.__module__}.{name}"
        for hint in hints
        if isinstance(hint, type) and hint.__name__ == name
    ]
    qualified_name, package = f"{library}.{name}", pipeline.__module__.rpartition(".")[0]
    is_allowed = library.split(".")[0] in (*DEFAULT_ALLOW, *trust)
    paths = (
        [qualified_name]
        if is_allowed
        else [
            f"diffusers.pipelines.{qualified_name}",
            f"{package}.{name}",
            f"{package}.{qualified_name}",
        ]
    )
    for path in paths + annotation_paths:
        try:
            resolve_class(path, trust, origin, "component", "part")
        except InputError:
            continue
        return path
    if is_allowed:
        resolve_class(qualified_name, trust, origin, "component", "part")
    raise InputError(
        f"{name} comes from {library!r}, which is no library that is installed and allowed: code "
        "that comes with a checkpoint is "
        "never run. Install its package, and write the graph with class: and allow: by hand "
        "(docs/howto/import.md)",
        origin,
    )


def is_module(class_path: str, trust: Sequence[str], origin: str) -> bool:
    """Return whether the class is an ``nn.Module``, so a component and not a part."""
    return issubclass(resolve_class(class_path, trust, origin), nn.Module)


def path_of(kind: type[Any]) -> str:
    """Return the class path of ``kind``, the short one if its package exports it. Raises InputError
    if the class cannot be imported by its path."""
    package = kind.__module__.split(".")[0]
    for path in (f"{package}.{kind.__name__}", f"{kind.__module__}.{kind.__qualname__}"):
        try:
            if resolve_class(path, (package,)) is kind:
                return path
        except GraphError:
            continue
    raise InputError(
        f"{kind.__module__}.{kind.__qualname__} cannot be imported by its name: a graph file "
        "could not name it"
    )


def plain_config(config: Any) -> dict[str, Any]:
    """Return a live object's configuration as JSON-ready data, without diffusers' own keys."""
    content: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    settings: dict[str, Any] = json.loads(
        json.dumps(plain(dict(content)), default=str, sort_keys=True)
    )
    return {
        key: value
        for key, value in settings.items()
        if key not in ("_name_or_path", "_use_default_values")
    }


def plain(value: Any) -> Any:
    """Return ``value`` with dtypes as names and tuples as lists."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def slug(text: str) -> str:
    """Return a graph name from the name of a folder, repository or class: ``flux.1-dev`` for
    ``FLUX.1-dev``."""
    return (
        re.sub(r"[^a-z0-9._-]+", "-", text.rstrip("/").rpartition("/")[2].lower()).strip("-.")[:64]
        or "pipeline"
    )


def existing_kind(path: Path) -> str:
    """Return the error text for a file in place of a folder."""
    if path.name == "model_index.json":
        return f"{path} is the index of a pipeline's folder: give the folder, {path.parent}"
    if path.suffix in PICKLED:
        return f"{path} is a pickle, and nothing is unpickled: convert it to safetensors"
    if path.suffix == ".sft":
        return f"{path} is a safetensors file: rename it to {path.stem}.safetensors"
    return (
        f"{path} is a file; give a folder with a model_index.json, a hub id or a pipeline's class"
    )

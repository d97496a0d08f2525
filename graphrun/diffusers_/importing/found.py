"""What a source says about a pipeline: its class, components, parts and settings, whatever source
they come from.

Decides the class, configuration and dtype of each. Reads no weights, runs no code that came with a
checkpoint, knows no stages.

    source           where the members come from folder, hub id   model_index.json (name -> class)
    and NAME/config.json; tokenizers and processors are loaded from the source class            the
    names and annotations of its constructor; configurations from files one file         the
    components whose tensors are in it; everything else from a folder or repository live object
    its modules' own classes, configurations and dtypes
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
from graphrun.graph.graph import DEFAULT_ALLOW, Component, Graph, Part
from graphrun.graph.loading import PICKLED
from graphrun.modules.classes import resolve_class

DTYPES = ("bfloat16", "float16", "float32")
OF_FILES, OF_CONFIG = "of its files", "of its configuration"  # reasons for a component's dtype


@dataclass(slots=True)
class Found:
    """A pipeline that a source describes: what becomes a `Graph`, and what only the text of the
    graph file says.

    ``origin``: the source as the user named it. ``pipeline``: its class path. ``source``: an
    absolute folder or a repository; None where there are no weights. ``folder``: where its small
    files are now. ``trust``: packages whose code it may run. ``workflow``: that of a modular
    pipeline. ``notes``: comments for the head of the graph file. ``settings``: plain constructor
    arguments. ``components`` and ``parts`` are as the graph file has them: a source is named where
    it is not the member's folder in ``source``, an empty precision is the dtype, and a part with a
    ``file`` is a tokenizer of which only the settings are known. ``reasons``: the reason for each
    component's dtype; both are empty where nothing says it. ``live``: members in memory.
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

    @property
    def kind(self) -> type[Any]:
        """The pipeline's class."""
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
    ) -> None:
        """Adds a component, with its ``dtype`` and the reason for it, where the class is a module;
        else a part.

        Keys that diffusers ignores when it loads a saved or live model are left out of its
        configuration: constructors themselves write such keys (AutoencoderTiny's
        ``block_out_channels``). Infinite defaults are left out too, which a graph file cannot hold
        (``lambda_min_clipped`` of DPMSolverMultistepScheduler).
        """
        kind: Any = resolve_class(class_path, self.trust, self.origin)
        usual = {
            name: parameter.default
            for name, parameter in inspect.signature(kind.__init__).parameters.items()
        }
        kept = {
            name: v
            for name, v in (config or {}).items()
            if v not in (math.inf, -math.inf) or usual.get(name) != v
        }
        if live is not None:
            self.live[name] = live
        if not issubclass(kind, nn.Module):
            self.parts[name] = Part(name, class_path, kept, config is not None, file, source)
            return
        if hasattr(kind, "load_config") and (self.folder is not None or live is not None):
            known = inspect.signature(kind.__init__).parameters
            kept = {key: value for key, value in kept.items() if key in known or key[0] == "_"}
        self.components[name] = Component(name, class_path, source, kept, True, dtype[0], ())
        self.reasons[name] = dtype[1]

    def graph(self) -> Graph:
        """The pipeline as a graph without stages, for dry runs: components without weights, parts
        from where they are now."""
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
                n: replace(c, source=None, where=f"{self.origin}: {n}")
                for n, c in self.components.items()
            },
            parts={
                n: replace(p, source=p.source or sources[n], where=self.origin)
                for n, p in self.parts.items()
            },
            stages=(),
            outputs={},
        )


def name_of(kind: type[Any]) -> str:
    """A graph's name for a pipeline of class ``kind``: ``flux`` for ``FluxPipeline`` and
    ``FluxModularPipeline``."""
    return slug(kind.__name__.removesuffix("Pipeline").removesuffix("Modular"))


def plain_settings(
    kind: type[Any], given: Mapping[str, Any], absent: Sequence[str]
) -> dict[str, Any]:
    """The settings among ``given`` that the constructor of ``kind`` takes and that differ from its
    defaults.

    Members that are ``absent`` but required by the constructor are added as None.
    """
    parameters = inspect.signature(kind.__init__).parameters
    optional = getattr(kind, "_optional_components", ())
    found = {
        name: value
        for name, value in given.items()
        if name in parameters and plain(parameters[name].default) != value
    }
    required = (
        name
        for name in absent
        if name in parameters and parameters[name].default is inspect.Parameter.empty
    )
    return found | {name: None for name in required if name not in optional}


def common_dtype(stored: Iterable[tuple[str, int]]) -> str:
    """The dtype of most bytes among ``stored``, (dtype, bytes) of tensors; empty where there is
    none."""
    sizes = Counter[str]()
    for dtype, nbytes in stored:
        sizes[dtype] += nbytes
    return next((dtype for dtype, _ in sizes.most_common(1)), "")


def dtype_of(declared: Mapping[str, Any], stored: Iterable[tuple[str, int]]) -> tuple[str, str]:
    """(dtype, reason) of a component: the dtype of most bytes in its files, else the one in its
    configuration, else ("", "").

    ``stored``: (dtype, bytes) of the tensors in its files.
    """
    if (common := common_dtype(stored)) in DTYPES:
        return common, OF_FILES
    said = (str(declared.get(key) or "").removeprefix("torch.") for key in ("dtype", "torch_dtype"))
    return next(((dtype, OF_CONFIG) for dtype in said if dtype in DTYPES), ("", ""))


def class_in(
    library: str, name: str, pipeline: type[Any], origin: str, trust: Sequence[str] = ()
) -> str:
    """The class path for an entry ``[library, name]`` of a model_index. ``library`` may be a
    subpackage of diffusers' pipelines.

    Raises InputError where no installed and allowed library has the class: code that comes with a
    checkpoint is never run.
    """
    if not all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]*", text) for text in (library, name)):
        raise InputError(f"{library!r}, {name!r} do not name a class", origin)
    hints = (
        parameter.annotation
        for parameter in inspect.signature(pipeline.__init__).parameters.values()
    )
    near = [
        f"{hint.__module__}.{name}"
        for hint in hints
        if isinstance(hint, type) and hint.__name__ == name
    ]
    own, beside = f"{library}.{name}", pipeline.__module__.rpartition(".")[0]
    allowed = library.split(".")[0] in (*DEFAULT_ALLOW, *trust)
    paths = (
        [own] if allowed else [f"diffusers.pipelines.{own}", f"{beside}.{name}", f"{beside}.{own}"]
    )
    for path in paths + near:
        try:
            resolve_class(path, trust, origin, "component", "part")
        except InputError:
            continue
        return path
    if allowed:
        resolve_class(own, trust, origin, "component", "part")
    raise InputError(
        f"{name} comes from {library!r}, which is no library that is installed and allowed: code that comes with a checkpoint is "
        "never run. Install its package, and write the graph with class: and allow: by hand (docs/howto/import.md)",
        origin,
    )


def is_module(class_path: str, trust: Sequence[str], origin: str) -> bool:
    """Whether the class is an ``nn.Module``. Modules are components; anything else is a part."""
    return issubclass(resolve_class(class_path, trust, origin), nn.Module)


def path_of(kind: type[Any]) -> str:
    """The class path of ``kind``: the short one where its package exports it. Raises InputError
    where it cannot be imported."""
    package = kind.__module__.split(".")[0]
    for path in (f"{package}.{kind.__name__}", f"{kind.__module__}.{kind.__qualname__}"):
        try:
            if resolve_class(path, (package,)) is kind:
                return path
        except GraphError:
            continue
    raise InputError(
        f"{kind.__module__}.{kind.__qualname__} cannot be imported by its name: a graph file could not name it"
    )


def plain_config(config: Any) -> dict[str, Any]:
    """A live object's configuration as JSON-ready data, without diffusers' bookkeeping keys."""
    own: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    found: dict[str, Any] = json.loads(json.dumps(plain(dict(own)), default=str, sort_keys=True))
    return {
        key: value
        for key, value in found.items()
        if key not in ("_name_or_path", "_use_default_values")
    }


def plain(value: Any) -> Any:
    """``value`` with dtypes as their names and tuples as lists."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def slug(text: str) -> str:
    """A graph name from the name of a folder, repository or class: ``flux.1-dev`` for
    ``FLUX.1-dev``."""
    return (
        re.sub(r"[^a-z0-9._-]+", "-", text.rstrip("/").rpartition("/")[2].lower()).strip("-.")[:64]
        or "pipeline"
    )


def existing_kind(path: Path) -> str:
    """The error text for a file where a folder is expected."""
    if path.name == "model_index.json":
        return f"{path} is the index of a pipeline's folder: give the folder, {path.parent}"
    if path.suffix in PICKLED:
        return f"{path} is a pickle, and nothing is unpickled: convert it to safetensors"
    if path.suffix == ".sft":
        return f"{path} is a safetensors file: rename it to {path.stem}.safetensors"
    return (
        f"{path} is a file; give a folder with a model_index.json, a hub id or a pipeline's class"
    )

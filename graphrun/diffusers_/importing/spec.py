"""Pipeline spec: a pipeline's class, its components and parts, and its settings, whatever source they come from.

Decides the class, configuration and dtype of each. Reads no weights, runs no code that came with a checkpoint, knows no stages.

    source           where the members come from
    folder, hub id   model_index.json (name -> class) and NAME/config.json; tokenizers and processors are loaded from the source
    class            the names and annotations of its constructor; configurations from files
    one file         the components whose tensors are in it; everything else from a folder or repository
    live object      its modules' own classes, configurations and dtypes
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """A member of a pipeline: a component (with a ``dtype``, and the ``dtype_reason`` for it) or a part.

    ``source``: where it is loaded from if that is not the pipeline's source and the member's name. ``stand_in``: a tokenizer
    without its vocabulary, of which only the settings are known. ``live``: the object in memory. ``gguf``: the file of that
    precision. ``extra``: further keys of its entry in the graph file.
    """

    name: str
    class_path: str
    config: Mapping[str, Any] | None
    source: str | None = None
    dtype: str = ""
    dtype_reason: str = ""
    stand_in: bool = False
    live: Any = None
    gguf: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_component(self) -> bool:
        """Whether it has weights."""
        return bool(self.dtype)


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """A pipeline as a source describes it.

    ``origin``: the source as the user named it. ``pipeline``: its class path. ``source``: an absolute folder or a repository; None
    where there are no weights. ``settings``: plain constructor arguments. ``folder``: where its small files are now. ``trust``:
    packages of the user's own classes. ``notes``: comments for the head of the graph file. ``workflow``: that of a modular
    pipeline.
    """

    origin: str
    name: str
    pipeline: str
    source: str | None
    members: tuple[MemberSpec, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    folder: str | None = None
    revision: str | None = None
    trust: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    workflow: str = ""

    @property
    def kind(self) -> type[Any]:
        """The pipeline's class."""
        return resolve_class(self.pipeline, self.trust, self.origin, "pipeline")

    @property
    def components(self) -> dict[str, MemberSpec]:
        """The members with weights, by name."""
        return {member.name: member for member in self.members if member.is_component}

    def graph(self) -> Graph:
        """The spec as a graph without stages."""
        folder = self.folder
        sources = {t.name: t.source or (f"{folder}/{t.name}" if folder and not t.stand_in else None) for t in self.members}
        return Graph(
            name=self.name,
            path=None,
            pipeline=self.pipeline,
            source=self.source,
            pipeline_config=dict(self.settings),
            trust=self.trust,
            inputs={},
            components={
                t.name: Component(
                    t.name, t.class_path, None, dict(t.config or {}), True, t.dtype, (t.dtype,), where=f"{self.origin}: {t.name}"
                )
                for t in self.members
                if t.is_component
            },
            parts={
                t.name: Part(t.name, t.class_path, dict(t.config or {}), t.config is not None, None, sources[t.name], self.origin)
                for t in self.members
                if not t.is_component
            },
            stages=(),
            outputs={},
        )


def plain_settings(kind: type[Any], given: Mapping[str, Any], absent: Sequence[str]) -> dict[str, Any]:
    """The settings among ``given`` that the constructor of ``kind`` takes and that differ from its defaults.

    Members that are ``absent`` but required by the constructor are added as None.
    """
    parameters = inspect.signature(kind.__init__).parameters
    optional = getattr(kind, "_optional_components", ())
    found = {name: value for name, value in given.items() if name in parameters and plain(parameters[name].default) != value}
    required = (name for name in absent if name in parameters and parameters[name].default is inspect.Parameter.empty)
    return found | {name: None for name in required if name not in optional}


def dtype_of(declared: Mapping[str, Any], stored: Sequence[tuple[str, int]]) -> tuple[str, str]:
    """(dtype, reason) of a component: the dtype of most bytes in its files, else the one in its configuration, else ("", "").

    ``stored``: (dtype, bytes) of the tensors in its files.
    """
    sizes = Counter[str]()
    for dtype, nbytes in stored:
        sizes[dtype] += nbytes
    common = sizes.most_common(1)
    if common and common[0][0] in DTYPES:
        return common[0][0], OF_FILES
    for key in ("dtype", "torch_dtype"):
        said = str(declared.get(key) or "").removeprefix("torch.")
        if said in DTYPES:
            return said, OF_CONFIG
    return "", ""


def class_in(library: str, name: str, pipeline: type[Any], origin: str) -> str:
    """The class path for an entry ``[library, name]`` of a model_index. ``library`` may be a subpackage of diffusers' pipelines.

    Raises InputError where no installed and allowed library has the class: code that comes with a checkpoint is never run.
    """
    if not all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]*", text) for text in (library, name)):
        raise InputError(f"{library!r}, {name!r} do not name a class", origin)
    near = _annotated(pipeline, name)
    paths = [f"{library}.{name}", *near]
    if library.split(".")[0] not in DEFAULT_ALLOW:
        beside = pipeline.__module__.rpartition(".")[0]
        paths = [f"diffusers.pipelines.{library}.{name}", f"{beside}.{name}", f"{beside}.{library}.{name}", *near]
    for path in paths:
        try:
            resolve_class(path, (), origin, "component", "part")
        except InputError:
            continue
        return path
    if library.split(".")[0] in DEFAULT_ALLOW:
        resolve_class(paths[0], (), origin, "component", "part")
    raise InputError(
        f"{name} comes from {library!r}, which is no library that is installed and allowed: code that comes with a checkpoint is "
        "never run. Install its package, and write the graph with class: and allow: by hand (docs/pipelines.md)",
        origin,
    )


def _annotated(pipeline: type[Any], name: str) -> list[str]:
    """The class paths of classes called ``name`` in the annotations of the pipeline's constructor."""
    hints = (parameter.annotation for parameter in inspect.signature(pipeline.__init__).parameters.values())
    return [f"{hint.__module__}.{name}" for hint in hints if isinstance(hint, type) and hint.__name__ == name]


def is_module(class_path: str, trust: Sequence[str], origin: str) -> bool:
    """Whether the class is an ``nn.Module``. Modules are components; anything else is a part."""
    return issubclass(resolve_class(class_path, trust, origin), nn.Module)


def path_of(kind: type[Any]) -> tuple[str, tuple[str, ...]]:
    """(class path of ``kind``, packages that a graph with it needs in ``allow:`` besides the default ones).

    Raises InputError where the class cannot be imported by its name.
    """
    package = kind.__module__.split(".")[0]
    for path in (f"{package}.{kind.__name__}", f"{kind.__module__}.{kind.__qualname__}"):
        try:
            if resolve_class(path, (package,)) is kind:
                return path, () if package in DEFAULT_ALLOW else (package,)
        except GraphError:
            continue
    raise InputError(f"{kind.__module__}.{kind.__qualname__} cannot be imported by its name: a graph file could not name it")


def plain_config(config: Any) -> dict[str, Any]:
    """A live object's configuration as JSON-ready data, without diffusers' bookkeeping keys."""
    own: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    found: dict[str, Any] = json.loads(json.dumps(plain(dict(own)), default=str, sort_keys=True))
    return {key: value for key, value in found.items() if key not in ("_name_or_path", "_use_default_values")}


def accepted(spec: PipelineSpec) -> PipelineSpec:
    """``spec`` without configuration keys that diffusers ignores when it loads a saved or live model.

    Such keys are written by constructors themselves (AutoencoderTiny's ``block_out_channels``).
    """

    def of(member: MemberSpec) -> MemberSpec:
        kind: Any = resolve_class(member.class_path, spec.trust, spec.origin) if member.is_component else None
        if not hasattr(kind, "load_config") or (spec.folder is None and member.live is None):
            return member
        known = inspect.signature(kind.__init__).parameters
        return replace(member, config={key: value for key, value in (member.config or {}).items() if key in known or key[0] == "_"})

    return replace(spec, members=tuple(map(of, spec.members)))


def plain(value: Any) -> Any:
    """``value`` with dtypes as their names and tuples as lists."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def slug(text: str) -> str:
    """A graph name from the name of a folder, repository or class: ``flux.1-dev`` for ``FLUX.1-dev``."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.rstrip("/").rpartition("/")[2].lower()).strip("-.")[:64] or "pipeline"


def existing_kind(path: Path) -> str:
    """The error text for a file where a folder is expected."""
    if path.name == "model_index.json":
        return f"{path} is the index of a pipeline's folder: give the folder, {path.parent}"
    if path.suffix in PICKLED:
        return f"{path} is a pickle, and nothing is unpickled: convert it to safetensors"
    if path.suffix == ".sft":
        return f"{path} is a safetensors file: rename it to {path.stem}.safetensors"
    return f"{path} is a file; give a folder with a model_index.json, a hub id or a pipeline's class"

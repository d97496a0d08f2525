"""What a pipeline is made of, wherever it was found: its class, its components and parts, its settings.

Decides which class, configuration and dtype each has. Reads no weights, runs no code that came with a checkpoint, knows no stages.

    folder, hub id    model_index.json: names -> classes; NAME/config.json; tokenizers and processors stay in the source
    class             its constructor's names and annotations; configurations from files
    one file          the components whose tensors are in it; all else of a folder or repository
    live object       its modules' own classes, configurations and dtypes
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
OF_FILES, OF_CONFIG = "of its files", "of its configuration"  # why a component has its dtype


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """A component (it has a ``dtype``, and ``why`` it has that one) or a part of a pipeline. ``source``: where it is not the
    pipeline's source and its name. ``stand_in``: a tokenizer of which nothing is known but its settings. ``live``: the object.
    ``gguf``: the file of that precision, ``more``: what else its entry says."""

    name: str
    class_path: str
    config: Mapping[str, Any] | None
    source: str | None = None
    dtype: str = ""
    why: str = ""
    stand_in: bool = False
    live: Any = None
    gguf: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_component(self) -> bool:
        """Whether it has weights."""
        return bool(self.dtype)


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """``pipeline`` is a class path, ``source`` a folder (absolute) or a repository, None where there are no weights. ``place`` is
    the folder where its small files are now. ``settings`` are constructor arguments that are plain. ``origin`` is how the user
    called it, ``notes`` what else a reader of the file should know, ``workflow`` the way through a modular pipeline's blocks,
    ``trust`` packages of the user's own classes."""

    origin: str
    name: str
    pipeline: str
    source: str | None
    members: tuple[MemberSpec, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    place: str | None = None
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
        """What has weights, by name."""
        return {member.name: member for member in self.members if member.is_component}

    def graph(self) -> Graph:
        """The same as a graph without stages."""
        place = self.place
        sources = {t.name: t.source or (f"{place}/{t.name}" if place and not t.stand_in else None) for t in self.members}
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
    """Those of ``given`` that the constructor of ``kind`` takes and would not have by itself; None for what is ``absent`` and has
    to be handed in all the same."""
    parameters = inspect.signature(kind.__init__).parameters
    optional = getattr(kind, "_optional_components", ())
    found = {name: value for name, value in given.items() if name in parameters and plain(parameters[name].default) != value}
    required = (name for name in absent if name in parameters and parameters[name].default is inspect.Parameter.empty)
    return found | {name: None for name in required if name not in optional}


def dtype_of(declared: Mapping[str, Any], stored: Sequence[tuple[str, int]]) -> tuple[str, str]:
    """(dtype, why) of a component: what most bytes of its files are in, else what its configuration says; empty where neither
    does. ``stored``: (dtype, bytes) of its tensors."""
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
    """The class path for an entry ``[library, name]`` of a model_index. ``library`` may be a folder of diffusers' pipelines.

    Raises InputError for what is not part of an installed library: code that comes with a checkpoint is never run.
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
    """The path of a class called ``name`` in the annotations of the pipeline's constructor."""
    hints = (parameter.annotation for parameter in inspect.signature(pipeline.__init__).parameters.values())
    return [f"{hint.__module__}.{name}" for hint in hints if isinstance(hint, type) and hint.__name__ == name]


def is_module(class_path: str, trust: Sequence[str], origin: str) -> bool:
    """Whether the class is one of modules, which have weights."""
    return issubclass(resolve_class(class_path, trust, origin), nn.Module)


def path_of(kind: type[Any]) -> tuple[str, tuple[str, ...]]:
    """The class path of ``kind``, of which there is an object, and the package that a graph of it has to be trusted with.

    Raises InputError where it cannot be imported by its name.
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
    """A live object's configuration as JSON has it."""
    own: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    found: dict[str, Any] = json.loads(json.dumps(plain(dict(own)), default=str, sort_keys=True))
    return {key: value for key, value in found.items() if key not in ("_name_or_path", "_use_default_values")}


def accepted(spec: PipelineSpec) -> PipelineSpec:
    """``spec`` without what diffusers ignores in the configuration of a saved or live model, such as what its constructor notes
    there itself (AutoencoderTiny's ``block_out_channels``)."""

    def of(member: MemberSpec) -> MemberSpec:
        kind: Any = resolve_class(member.class_path, spec.trust, spec.origin) if member.is_component else None
        if not hasattr(kind, "load_config") or (spec.place is None and member.live is None):
            return member
        known = inspect.signature(kind.__init__).parameters
        return replace(member, config={key: value for key, value in (member.config or {}).items() if key in known or key[0] == "_"})

    return replace(spec, members=tuple(map(of, spec.members)))


def plain(value: Any) -> Any:
    """``value`` with dtypes by their names, and lists for tuples."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def slug(text: str) -> str:
    """A name for a graph out of a folder's, a repository's or a class's: ``FLUX.1-dev`` is ``flux.1-dev``."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.rstrip("/").rpartition("/")[2].lower()).strip("-.")[:64] or "pipeline"


def existing_kind(path: Path) -> str:
    """What to say of a file where a folder is expected."""
    if path.name == "model_index.json":
        return f"{path} is the list of a pipeline's folder: give the folder, {path.parent}"
    if path.suffix in PICKLED:
        return f"{path} is pickled, and nothing is unpickled: convert it to safetensors"
    if path.suffix == ".sft":
        return f"{path} is to be called {path.stem}.safetensors, which it is"
    return f"{path} is a file; give a folder with a model_index.json, a hub id or a pipeline's class"

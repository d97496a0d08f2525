"""Cache keys: a digest of everything that a stage's outputs depend on.

Equal keys mean equal bits; in doubt, the key differs.

    key(stage) = code of the op + versions + device
               + arguments (resolved inputs, keys of the stages before it)
               + components it uses (content, precision, compute device)
               + configuration of all components + parts

Of a plan, only its choices count (precision, compute device, stage options).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from graphrun.errors import GraphError
from graphrun.files import package_digest, python_digest
from graphrun.graph.graph import Graph
from graphrun.graph.media import fingerprint, size_text
from graphrun.graph.ops import MEDIA_KINDS
from graphrun.graph.parts import Adapter, Component, Part, Reference, Stage
from graphrun.graph.precisions import PLANNED_ONLY, is_gguf
from graphrun.model.solution import Solution
from graphrun.modules.source_files import (
    OF_COMPONENT,
    OF_PART,
    blob,
    find_folder,
    local_place,
    remote_files,
)
from graphrun.reading import is_url

# libraries whose code computes stage outputs
LIBRARIES = (
    "torch",
    "diffusers",
    "transformers",
    "tokenizers",
    "accelerate",
    "bitsandbytes",
    "numpy",
)
# packages of graphrun whose code computes stage outputs
PACKAGES = ("modules", "ops")
# the most combinations of allowed precisions and compute devices that a lookup tries
MOST_CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of a plan that outputs depend on.

    ``variants``: (precision, "device" or "cpu") of each component. ``options``: of each stage.
    ``compiled``: whether blocks are compiled if the graph asks for it.
    """

    variants: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    compiled: bool = False


def choices_of(solution: Solution) -> Choices:
    """Return the choices of a plan that outputs depend on."""
    first_variants = {component.name: component.variants[0] for component in solution.components}
    variants = {
        name: (variant.precision, variant.device) for name, variant in first_variants.items()
    }
    return Choices(variants, dict(solution.plan.options), "compile" in solution.problem.allow)


class StageKeys:
    """Keys of the stages of ``graph`` for resolved ``inputs`` on ``device`` (its name).
    ``digest_of`` returns a digest of a file's content."""

    def __init__(
        self, graph: Graph, inputs: Mapping[str, Any], device: str, digest_of: Callable[[Path], str]
    ) -> None:
        self.graph, self.inputs, self.device, self._digest_of = graph, inputs, device, digest_of
        self._content = functools.cache(self._read)  # of a component

    def key(self, stage: str, choices: Choices | None = None) -> str | None:
        """Return 64 hexadecimal digits; None if a dependency, such as a source, is missing.

        ``choices``: how the stage and the stages before it run. Default: the first precision of
        each component, on the device.
        """
        try:
            return self._key(self.graph.stage(stage), choices or Choices())
        except (GraphError, OSError):
            return None

    def candidates(self, stage: str, allow: Collection[str]) -> Iterator[Choices]:
        """Yield the choices that ``allow`` permits up to ``stage``, the default first."""
        components = [
            self.graph.components[name]
            for name in dict.fromkeys(self._uses(self.graph.stage(stage)))
        ]
        devices = ("device", "cpu") if "cpu" in allow else ("device",)
        variants = [
            [
                (precision, device)
                for device in devices
                for precision in (c.precision[0], *(p for p in c.precision[1:] if p in allow))
            ]
            for c in components
        ]
        for selection in itertools.islice(itertools.product(*variants), MOST_CANDIDATES):
            for compiled in sorted({False, "compile" in allow}):
                yield Choices(
                    {
                        component.name: variant
                        for component, variant in zip(components, selection, strict=True)
                    },
                    compiled=compiled,
                )

    def about(self, stage: str) -> str:
        """Return the inputs that ``stage`` itself reads, as ``prompt='a lighthouse' steps=28``."""
        names = [
            value.name for value in self.graph.stage(stage).references if value.kind == "input"
        ]
        inputs = ((name, self.inputs[name]) for name in dict.fromkeys(names))
        return " ".join(
            f"{name}={repr(value) if isinstance(value, str) else size_text(value)}"
            for name, value in inputs
        )

    def _uses(self, stage: Stage) -> list[str]:
        producer_uses = (
            self._uses(self.graph.stage(name)) for name in self.graph.producers(stage.name)
        )
        return [*itertools.chain(*producer_uses), *stage.uses]

    def _key(self, stage: Stage, choices: Choices) -> str:
        def argument(value: Any) -> Any:
            match value:
                case list():
                    return ["list", *map(argument, value)]
                case Reference(kind="input"):
                    return ["input", fingerprint(self.inputs[value.name])]
                case Reference():
                    return [
                        "output",
                        self._key(self.graph.stage(value.name), choices),
                        value.output,
                    ]
            return ["literal", value]

        def component(name: str) -> list[Any]:
            component_spec = self.graph.components[name]
            compiled = (
                [component_spec.compile] if component_spec.compile and choices.compiled else []
            )
            return [
                self._content(name),
                *choices.variants.get(name, (component_spec.precision[0], "device")),
                *compiled,
            ]

        return _digest(
            [
                self._common,
                [
                    stage.op,
                    stage.pipeline,
                    stage.method,
                    *(stage.outputs if stage.operation.open else ()),
                ],
                {name: argument(value) for name, value in stage.arguments.items()},
                choices.options.get(stage.name, ""),
                {name: component(name) for name in stage.uses},
            ]
        )

    @functools.cached_property
    def _common(self) -> str:
        """A digest of what every stage depends on: class, configurations, parts, versions, code,
        device."""
        graph = self.graph
        return _digest(
            [
                [
                    graph.pipeline,
                    graph.pipeline_config,
                    *([name, pipeline.content] for name, pipeline in graph.pipelines.items()),
                ],
                {name: _graph_settings(component) for name, component in graph.components.items()},
                {name: self._part(part) for name, part in graph.parts.items()},
                [
                    *((name, _version(name)) for name in LIBRARIES),
                    *_code(graph).items(),
                    list(sys.version_info[:3]),
                ],
                code_digest(),
                self.device,
            ]
        )

    def _read(self, name: str) -> list[Any]:
        component = self.graph.components[name]
        content: Any = ["random", name, component.seed]
        if component.source is not None:
            content = self._folder(
                component.source, OF_COMPONENT, component.file_line, component.variant
            )
        if component.gguf:
            content = [content, *self._folder(component.gguf, (), component.file_line)]
        for checkpoint in component.checkpoints:
            if checkpoint.format in PLANNED_ONLY:
                continue  # no run reads it
            if local_place(checkpoint.source) is not None:
                patterns = () if is_gguf(checkpoint.format) else OF_COMPONENT
                content = [
                    content,
                    *self._folder(checkpoint.source, patterns, component.file_line),
                ]
        adapters = [
            (kind, adapter)
            for kind in ("loras", "ip_adapters")
            for adapter in getattr(component, kind)
        ]
        return [
            content,
            *(self._adapter_content(kind, adapter, component) for kind, adapter in adapters),
        ]

    def _adapter_content(self, kind: str, adapter: Adapter, component: Component) -> list[Any]:
        if not (file := Path(adapter.file)).is_file():
            raise GraphError(
                f"components.{component.name}.{kind}: no such file: {file}", component.file_line
            )
        return [kind, blob(file) or self._digest_of(file), adapter.scale]

    def _part(self, part: Part) -> Any:
        content: list[Any] = [part.class_path, part.config]
        if part.file is not None:
            content.append(self._digest_of(part.file))
        if part.source is not None and not (part.has_config and part.file is None):
            content.append(self._folder(part.source, OF_PART, part.file_line))
        return content

    def _folder(
        self, source: str, patterns: tuple[str, ...], place: str, variant: str = ""
    ) -> list[list[str]]:
        if is_url(source):
            listing = remote_files(source, patterns, place, variant)
            return [[file.name, file.version] for file in listing.files]
        folder = find_folder(source, patterns, place, variant)
        files = (
            [folder]
            if folder.is_file()
            else sorted({path for pattern in patterns for path in folder.glob(pattern)})
        )
        return [[path.name, blob(path) or self._digest_of(path)] for path in files]


def cacheable(stage: Stage) -> bool:
    """Whether outputs of ``stage`` may be cached. Runs save images, videos and audio as files."""
    operation = stage.operation
    return not any(operation.output(name) in MEDIA_KINDS for name in stage.outputs)


def code_digest() -> str:
    """Return the SHA-256 of graphrun's own source that computes outputs (`PACKAGES`). Any change
    there changes every key."""
    root = Path(__file__).parents[2]
    return python_digest(*(root / package for package in PACKAGES))


def _graph_settings(component: Component) -> dict[str, Any]:
    """Return a component's settings in the graph file, without source, backing store and line."""
    left_out = (
        "source",
        "file_line",
        "backing_store",
        "precision",
        "loras",
        "ip_adapters",
        "gguf",
        "checkpoints",
        "compile",
    )
    return {
        spec.name: getattr(component, spec.name)
        for spec in fields(component)
        if spec.name not in left_out
    }


def _code(graph: Graph) -> dict[str, str]:
    """Return a digest of each trusted package's code, which may change without its version."""
    return {name: package_digest(name) for name in graph.trust}


@functools.cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digest(content: Any) -> str:
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":"), default=str).encode()
    ).hexdigest()


def dependencies(graph: Graph, device: str) -> dict[str, str]:
    """Return the dependencies of ``graph``'s outputs besides its inputs, by name, as text. Files
    count by size and mtime."""

    def stamp(path: Path) -> str:
        status = path.stat()
        return f"{status.st_size} bytes, {status.st_mtime_ns}"

    def each(
        prefix: str, values: Mapping[str, Any], show: Callable[[Any], str] = str
    ) -> dict[str, str]:
        return {f"{prefix}.{name}": show(value) for name, value in values.items()}

    keys = StageKeys(graph, {}, device, stamp)
    entries = {"device": device, "graphrun's code": code_digest()[:12], "pipeline": graph.pipeline}
    entries |= each("pipeline_config", graph.pipeline_config, repr) | each(
        "pipelines", graph.pipelines, lambda pipeline: repr(pipeline.content)
    )
    entries |= {f"version of {name}": _version(name) for name in LIBRARIES}
    entries |= {f"code of {name}": digest[:12] for name, digest in _code(graph).items()}
    for stage in graph.stages:
        entries[f"stages.{stage.name}.op"] = (
            f"{stage.op} {stage.method}" if stage.method != "__call__" else stage.op
        )
        entries |= each(f"stages.{stage.name}.with", stage.arguments)
    used_components = {name for stage in graph.stages for name in stage.uses}
    for component in graph.components.values():
        prefix, settings = f"components.{component.name}", _graph_settings(component)
        config = settings.pop("config")
        entries |= each(prefix, settings) | each(f"{prefix}.config", config)
        if component.name in used_components:
            entries[f"{prefix}: weights"] = _digest(keys._content(component.name))[:12]
    return entries | each("parts", graph.parts, lambda part: _digest(keys._part(part))[:12])

"""Cache keys: a digest of everything a stage's outputs depend on. Equal keys mean equal bits; in
doubt the key differs.

    key(stage) = code of the op + versions + device + arguments (resolved inputs, keys of the stages
    before it)
               + components it uses (content, precision, compute device) + configuration of all
               components + parts

Of a plan only its choices count (precision, compute device, stage options). Knows nothing of where
outputs are stored.
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
from graphrun.graph.graph import Adapter, Component, Graph, Part, Reference, Stage
from graphrun.graph.media import fingerprint, told
from graphrun.graph.ops import MEDIA_KINDS
from graphrun.model.solution import Solution
from graphrun.modules.source_files import OF_COMPONENT, OF_PART, blob, find_folder

# Libraries whose code computes stage outputs.
LIBRARIES = (
    "torch",
    "diffusers",
    "transformers",
    "tokenizers",
    "accelerate",
    "bitsandbytes",
    "numpy",
)
# Packages of graphrun whose code does.
PACKAGES = ("modules", "ops")
# The most combinations of allowed precisions and compute devices that a lookup tries.
MOST_CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of a plan that outputs depend on: component -> (precision, "device" or "cpu"),
    stage -> option, and whether the blocks are compiled for which the graph asks that."""

    variants: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    compiled: bool = False


def choices_of(solution: Solution) -> Choices:
    """The choices of a plan that outputs depend on."""
    chosen = {component.name: component.variants[0] for component in solution.chosen.components}
    variants = {name: (variant.precision, variant.device) for name, variant in chosen.items()}
    return Choices(variants, dict(solution.plan.options), "compile" in solution.problem.allow)


class Keys:
    """Keys of the stages of ``graph`` for resolved ``inputs`` on ``device`` (its name).

    ``digest_of`` returns a digest of a file's content.
    """

    def __init__(
        self, graph: Graph, inputs: Mapping[str, Any], device: str, digest_of: Callable[[Path], str]
    ) -> None:
        self.graph, self.inputs, self.device, self._digest_of = graph, inputs, device, digest_of
        self._content = functools.cache(self._read)  # of a component

    def key(self, stage: str, choices: Choices | None = None) -> str | None:
        """64 hexadecimal digits; None where something that ``stage`` depends on has no digest, such
        as a missing source.

        ``choices``: how the stage and those before it are run; default: the first precision of each
        component, on the device.
        """
        try:
            return self._key(self.graph.stage(stage), choices or Choices())
        except (GraphError, OSError):
            return None

    def candidates(self, stage: str, allow: Collection[str]) -> Iterator[Choices]:
        """The choices with which ``stage`` and those before it may be run where ``allow`` is
        allowed, the default first."""
        used = [
            self.graph.components[name]
            for name in dict.fromkeys(self._uses(self.graph.stage(stage)))
        ]
        devices = ("device", "cpu") if "cpu" in allow else ("device",)
        variants = [
            [
                (precision, at)
                for at in devices
                for precision in (c.precision[0], *(p for p in c.precision[1:] if p in allow))
            ]
            for c in used
        ]
        for chosen in itertools.islice(itertools.product(*variants), MOST_CANDIDATES):
            for compiled in sorted({False, "compile" in allow}):
                yield Choices(
                    {
                        component.name: variant
                        for component, variant in zip(used, chosen, strict=True)
                    },
                    compiled=compiled,
                )

    def about(self, stage: str) -> str:
        """The inputs that ``stage`` itself reads, as text for people: ``prompt='a lighthouse'
        steps=28``."""
        read = [value.name for value in self.graph.stage(stage).references if value.kind == "input"]
        shown = ((name, self.inputs[name]) for name in dict.fromkeys(read))
        return " ".join(
            f"{name}={repr(value) if isinstance(value, str) else told(value)}"
            for name, value in shown
        )

    def _uses(self, stage: Stage) -> list[str]:
        before = (self._uses(self.graph.stage(name)) for name in self.graph.producers(stage.name))
        return [*itertools.chain(*before), *stage.uses]

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
            own = self.graph.components[name]
            compiled = [own.compile] if own.compile and choices.compiled else []
            return [
                self._content(name),
                *choices.variants.get(name, (own.precision[0], "device")),
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
        """What every stage depends on: pipeline class, configuration of all components, parts,
        versions, code, device."""
        graph = self.graph
        return _digest(
            [
                [
                    graph.pipeline,
                    graph.pipeline_config,
                    *([name, of.content] for name, of in graph.pipelines.items()),
                ],
                {name: _declared(component) for name, component in graph.components.items()},
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
                component.source, OF_COMPONENT, component.where, component.variant
            )
        if component.gguf:
            content = [content, *self._folder(component.gguf, (), component.where)]
        added = [
            (kind, each) for kind in ("loras", "ip_adapters") for each in getattr(component, kind)
        ]
        return [content, *(self._added(kind, each, component) for kind, each in added)]

    def _added(self, kind: str, added: Adapter, component: Component) -> list[Any]:
        if not (file := Path(added.file)).is_file():
            raise GraphError(
                f"components.{component.name}.{kind}: no such file: {file}", component.where
            )
        return [kind, blob(file) or self._digest_of(file), added.scale]

    def _part(self, part: Part) -> Any:
        content: list[Any] = [part.class_path, part.config]
        if part.file is not None:
            content.append(self._digest_of(part.file))
        if part.source is not None and not (part.has_config and part.file is None):
            content.append(self._folder(part.source, OF_PART, part.where))
        return content

    def _folder(
        self, source: str, patterns: tuple[str, ...], where: str, variant: str = ""
    ) -> list[list[str]]:
        found = find_folder(source, patterns, where, variant)
        files = (
            [found]
            if found.is_file()
            else sorted({path for pattern in patterns for path in found.glob(pattern)})
        )
        return [[path.name, blob(path) or self._digest_of(path)] for path in files]


def cacheable(stage: Stage) -> bool:
    """Whether outputs of ``stage`` may be cached: images, videos and audio are not, since runs save
    them as files."""
    operation = stage.operation
    return not any(operation.output(name) in MEDIA_KINDS for name in stage.outputs)


def code_digest() -> str:
    """SHA-256 of graphrun's own source that computes outputs (`PACKAGES`): any change there changes
    every key."""
    root = Path(__file__).parents[2]
    return python_digest(*(root / package for package in PACKAGES))


def _declared(component: Component) -> dict[str, Any]:
    """All that the graph declares of a component, except its source files, its backing store and
    where it is declared."""
    left_out = (
        "source",
        "where",
        "backing_store",
        "precision",
        "loras",
        "ip_adapters",
        "gguf",
        "compile",
    )
    return {
        each.name: getattr(component, each.name)
        for each in fields(component)
        if each.name not in left_out
    }


def _code(graph: Graph) -> dict[str, str]:
    """A digest of the code of each trusted package, whose version may not change with it."""
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
    """What the outputs of ``graph`` depend on besides its inputs, by name, to be compared and
    shown; files by size and mtime."""

    def stamp(path: Path) -> str:
        found = path.stat()
        return f"{found.st_size} bytes, {found.st_mtime_ns}"

    def each(
        prefix: str, values: Mapping[str, Any], show: Callable[[Any], str] = str
    ) -> dict[str, str]:
        return {f"{prefix}.{name}": show(value) for name, value in values.items()}

    keys = Keys(graph, {}, device, stamp)
    found = {"device": device, "graphrun's code": code_digest()[:12], "pipeline": graph.pipeline}
    found |= each("pipeline_config", graph.pipeline_config, repr) | each(
        "pipelines", graph.pipelines, lambda of: repr(of.content)
    )
    found |= {f"version of {name}": _version(name) for name in LIBRARIES}
    found |= {f"code of {name}": digest[:12] for name, digest in _code(graph).items()}
    for stage in graph.stages:
        found[f"stages.{stage.name}.op"] = (
            f"{stage.op} {stage.method}" if stage.method != "__call__" else stage.op
        )
        found |= each(f"stages.{stage.name}.with", stage.arguments)
    used = {name for stage in graph.stages for name in stage.uses}
    for component in graph.components.values():
        prefix, declared = f"components.{component.name}", _declared(component)
        config = declared.pop("config")
        found |= each(prefix, declared) | each(f"{prefix}.config", config)
        if component.name in used:
            found[f"{prefix}: weights"] = _digest(keys._content(component.name))[:12]
    return found | each("parts", graph.parts, lambda part: _digest(keys._part(part))[:12])

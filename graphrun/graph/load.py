"""Reads a graph file into a `Graph`: shape first, then whether the pieces fit together. Every problem is found, with its line.

Decides what a graph file may say. Must not import torch, nor the packages whose classes it names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from graphrun.errors import GraphError, InputError
from graphrun.graph.document import Document, Location, Problems, read_document, read_json
from graphrun.graph.graph import DEFAULT_ALLOW, Component, Directives, Graph, Input, IpAdapter, Lora, Part, Stage
from graphrun.graph.media import AN
from graphrun.graph.order import find_cycle, order_stages
from graphrun.graph.shape import note_shape
from graphrun.graph.sizes import read_sizes
from graphrun.graph.spec import ComponentSpec, GraphSpec, InputSpec, IpAdapterSpec, LoraSpec, PartSpec
from graphrun.graph.stages import check_uses, read_outputs, read_stages
from graphrun.graph.values import did_you_mean, fit, outside, to_trust
from graphrun.units import parse_size

# What a file of weights is called, and what one is that is not read.
WEIGHTS = ".safetensors"
FILES = (WEIGHTS, ".gguf")
PICKLED = (".ckpt", ".bin", ".pt", ".pth", ".pkl")

# Where libraries keep the configuration of a component or part in its folder.
_CONFIG_FILES = ("config.json", "scheduler_config.json")


def load(path: str | Path, trust: Iterable[str] = ()) -> Graph:
    """The graph in the YAML file ``path``. ``trust``: packages whose code it may run; its own ``allow:`` only asks for them.

    Raises GraphError; its text has one line per problem, each ``file:line: place: what is wrong``.
    """
    document = read_document(Path(path))
    problems = Problems(document)
    try:
        spec = GraphSpec.model_validate(document.data)
    except ValidationError as error:
        note_shape(error, document.data, problems)
        problems.raise_if_any()
        raise  # pydantic found something and nothing was noted: a bug here
    reader = _Reader(document, spec, problems, tuple(sorted(set(trust))))
    graph = reader.read()
    problems.raise_if_any()
    return graph


class _Reader:
    """Turns a spec of the right shape into a graph, noting what does not fit."""

    def __init__(self, document: Document, spec: GraphSpec, problems: Problems, trust: tuple[str, ...]) -> None:
        self.document, self.spec, self.problems = document, spec, problems
        self.folder = document.path.parent
        self.trust = trust
        asked = spec.allow if spec.allow is not None else DEFAULT_ALLOW
        self.allow = dict.fromkeys((*(name for name in asked if name in DEFAULT_ALLOW), *trust))

    def read(self) -> Graph:
        spec, problems = self.spec, self.problems
        for index, package in enumerate(spec.allow or ()):
            if package not in self.allow:
                problems.add(("allow", index), f"a file may ask for {package}, and only you can trust it; {to_trust(package)}")
        self._check_class(("pipeline",), spec.pipeline)
        inputs = {name: self._input(name, item) for name, item in spec.inputs.items()}
        components = {name: self._component(name, item) for name, item in spec.components.items()}
        parts = {name: self._part(name, item) for name, item in spec.parts.items()}
        for name in components.keys() & parts.keys():
            problems.add(("parts", name), "a component has this name too")
        for name in inputs.keys() & spec.stages.keys():
            problems.add(("stages", name), "an input has this name too")
        stages = read_stages(spec, inputs, self.document, problems)
        outputs = read_outputs(spec, problems)
        check_uses(spec, inputs, stages, outputs, problems)
        return Graph(
            name=spec.name,
            path=self.document.path,
            pipeline=spec.pipeline,
            source=self._source(("source",), spec.source, spec.revision) if spec.source else None,
            pipeline_config=self._pipeline_config(),
            trust=self.trust,
            inputs=inputs,
            components=components,
            parts=parts,
            stages=self._ordered(stages),
            outputs=outputs,
            directives=self._directives(),
            fps=spec.fps,
            where=self.document.where(("pipeline",)),
        )

    def _pipeline_config(self) -> dict[str, Any]:
        for key, value in self.spec.pipeline_config.items():
            for index, text in enumerate(value if isinstance(value, list) else ()):
                name = str(text).removeprefix("$")
                if (name in self.spec.components) != str(text).startswith("$"):
                    what = f"{text!r} is not a component such as $controlnet{did_you_mean(name, self.spec.components)}"
                    self.problems.add(("pipeline_config", key, index), what)
        return dict(self.spec.pipeline_config)

    def _directives(self) -> Directives:
        spec, at = self.spec.directives, ("directives",)
        for key, names in (("keep", spec.keep), ("exclude", spec.exclude), ("pin", spec.pin)):
            for index, name in enumerate(names):
                if name not in self.spec.components:
                    what = f"unknown component {name!r}{did_you_mean(name, self.spec.components)}"
                    self.problems.add((*at, key, index), what)
        for name in set(spec.keep) & set(spec.exclude):
            self.problems.add((*at, "exclude"), f"{name!r} is to be kept too; do without one of them")
        reserve_bytes = 0
        if spec.reserve is not None:
            try:
                reserve_bytes = parse_size(spec.reserve, name="reserve")
            except InputError as error:
                self.problems.add((*at, "reserve"), str(error).removeprefix("reserve: "))
        return Directives(tuple(spec.keep), tuple(spec.exclude), reserve_bytes, tuple(spec.pin))

    def _ordered(self, stages: Mapping[str, Stage]) -> tuple[Stage, ...]:
        if cycle := find_cycle(stages):
            around = " -> ".join([*cycle, cycle[0]])
            self.problems.add(("stages", cycle[0]), f"stages form a cycle: {around}; one of them must do without the one before")
            return ()
        return order_stages(stages)

    def _input(self, name: str, spec: InputSpec) -> Input:
        at = ("inputs", name)
        numeric = {"multiple_of": ("int",), "minimum": ("int", "float"), "maximum": ("int", "float")}
        wrong = {key: types for key, types in numeric.items() if getattr(spec, key) is not None and spec.type not in types}
        for key, types in wrong.items():
            self.problems.add((*at, key), f"only for {' and '.join(types)}, and {name!r} is a {spec.type}")
        without_default = "default" not in spec.model_fields_set
        required = without_default and not spec.optional
        # A size that must be a multiple of 16 is at least 16.
        minimum = spec.minimum if spec.minimum is not None else spec.multiple_of
        sizes = read_sizes(name, spec, self.spec, self.problems)
        declared = Input(name, spec.type, spec.default, required, spec.multiple_of, minimum, spec.maximum, spec.many, sizes)
        if spec.optional and not without_default:
            self.problems.add((*at, "optional"), f"{name!r} has a default, so it may be left out anyway: do without one of them")
        elif spec.optional:
            return declared
        elif not required and sizes:
            self.problems.add((*at, "default"), f"{name!r} is {AN[spec.type]}, which a run is given: leave the default out")
        elif not required and not wrong:
            try:
                return replace(declared, default=fit(declared, spec.default))
            except InputError as error:
                self.problems.add((*at, "default"), str(error).removeprefix(f"input {name!r}: "))
        return declared

    def _component(self, name: str, spec: ComponentSpec) -> Component:
        at = ("components", name)
        self._check_class((*at, "class"), spec.class_path)
        source = self._own_source(at, spec.source, spec.revision)
        config = self._config((*at, "config"), spec.config, source)
        if config is None and source is None:
            self.problems.add(at, "neither config nor source; give config: {} for the defaults of its class")
        elif config is None and source is not None and source.endswith(WEIGHTS):
            self.problems.add(at, "no config, and a single file has none: give config:")
        elif config is None and source is not None and Path(source).is_absolute():
            self.problems.add(at, f"no config, and no {source}/config.json; give config: or another source:")
        return Component(
            name=name,
            class_path=spec.class_path,
            source=source,
            config=config or {},
            has_config=config is not None,
            dtype=spec.dtype,
            precision=tuple(spec.precision or (spec.dtype,)),
            seed=spec.seed,
            home=tuple(spec.home or ()),
            loras=tuple(Lora(self._file((*at, "loras", i), item), item.scale) for i, item in enumerate(spec.loras)),
            ip_adapters=tuple(
                IpAdapter(self._file((*at, "ip_adapters", i), item), item.scale) for i, item in enumerate(spec.ip_adapters)
            ),
            variant=spec.variant or (self.spec.variant or "" if spec.source is None else ""),
            gguf=self._gguf(at, spec),
            where=self.document.where(at),
        )

    def _gguf(self, at: Location, spec: ComponentSpec) -> str:
        """The GGUF file of a component, which a plan of that precision reads the header of."""
        wanted = "gguf" in (spec.precision or ())
        if spec.gguf is None:
            if wanted:
                self.problems.add((*at, "precision"), "gguf needs a file: add gguf: with the path of one")
            return ""
        if not wanted:
            self.problems.add((*at, "gguf"), "is not used: add gguf to precision:, or leave it out")
        file = self._source((*at, "gguf"), spec.gguf, None)
        if Path(file).is_absolute() and not Path(file).is_file():
            what = f"no such file: {file}; its header is needed to plan: get it, or leave gguf out of precision:"
            self.problems.add((*at, "gguf"), what)
        return file

    def _file(self, at: Location, spec: LoraSpec | IpAdapterSpec) -> str:
        file = self.folder / spec.file
        if not file.is_file():
            self.problems.add((*at, "file"), f"no such file: {file}")
        return str(file.resolve())

    def _part(self, name: str, spec: PartSpec) -> Part:
        at = ("parts", name)
        self._check_class((*at, "class"), spec.class_path)
        source = self._own_source(at, spec.source, None)
        config = self._config((*at, "config"), spec.config, source)
        file = self.folder / spec.file if spec.file else None
        if file is not None and not file.is_file():
            self.problems.add((*at, "file"), f"no such file: {file}")
            file = None
        elif config is None and source is None and file is None:
            self.problems.add(at, "no config, file or source; give config: {} for the defaults of its class")
        return Part(name, spec.class_path, config or {}, config is not None, file, source, self.document.where(at))

    def _check_class(self, at: Location, class_path: str) -> None:
        package = class_path.split(".")[0]
        if package not in self.allow:
            meant = did_you_mean(package, self.allow)
            advice = meant if "did you mean" in meant else ""
            if package in DEFAULT_ALLOW:
                advice = f"; allow: leaves {package} out: add it there"
            what = f"outside the trusted packages ({', '.join(self.allow)}){advice}" if advice else outside(package, self.allow)
            self.problems.add(at, f"{class_path} is {what}")

    def _config(self, at: Location, given: str | dict[str, Any] | None, source: str | None) -> dict[str, Any] | None:
        """The configuration given, or the one in a local source's folder; None when the hub has it, or nobody."""
        if isinstance(given, dict):
            try:
                return dict(json.loads(json.dumps(given, sort_keys=True, allow_nan=False)))
            except (TypeError, ValueError) as error:
                self.problems.add(at, f"holds something that JSON cannot: {error}")
                return {}
        files = [self.folder / given] if given else _config_files(source)
        for file in files:
            if given or file.is_file():
                try:
                    return read_json(file)
                except GraphError as error:
                    self.problems.add(at, str(error))
                    return {}
        return None

    def _own_source(self, at: Location, own: str | None, revision: str | None) -> str | None:
        """The source of the component or part ``at``; a single file is that of every component, and of no part."""
        if own is not None:
            return self._source((*at, "source"), own, revision)
        if revision is not None:
            self.problems.add((*at, "revision"), "is that of a source: give source: too")
        if not self.spec.source:
            return None
        whole = self._source((), self.spec.source, self.spec.revision)
        if whole.endswith(WEIGHTS):
            return whole if at[0] == "components" else None
        return f"{whole}/{at[1]}"

    def _source(self, at: Location, text: str, revision: str | None) -> str:
        """A hub path, with its revision; a folder or file, taken relative to the graph file, as an absolute path. What is wrong is
        noted ``at`` its place, if that is not ()."""
        text = text.rstrip("/") or text
        place = self.folder / Path(text).expanduser()
        parts = text.split("/")
        local = text.startswith((".", "/", "~")) or len(parts) < 2 or (len(parts) == 2 and text.endswith(FILES)) or place.exists()
        problem = ""
        if text.endswith(PICKLED):
            problem = "is pickled, and nothing is unpickled: convert it to safetensors"
        elif local and revision is not None:
            problem = f"{place} is on this machine, and a revision is that of a repository: leave revision: out"
        elif not local and revision is not None and "@" in text:
            problem = "has a revision of its own: leave revision: out"
        if problem and at:
            self.problems.add(at, problem)
        if local:
            return str(place.resolve())
        owner, repository, *inside = parts
        pinned = f"{repository}@{revision.replace('/', '%2F')}" if revision is not None else repository
        return "/".join((owner, pinned, *inside))


def _config_files(source: str | None) -> list[Path]:
    return [Path(source) / name for name in _CONFIG_FILES] if source is not None and Path(source).is_absolute() else []

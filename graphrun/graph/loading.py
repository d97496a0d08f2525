"""Read a graph file into a `Graph`, and report every problem in it with file and line.

Three passes, each skipping what an earlier one found wrong:

    1  shape         pydantic models (`schema`), read by `shape`
    2  entries       inputs and their sizes, components, parts, sources, trusted packages
    3  connections   ops and their arguments, references and their kinds, cycles, unused entries

Imports neither torch nor the packages whose classes the file names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphrun.errors import GraphError, InputError
from graphrun.graph.document import Location, read_document, read_json
from graphrun.graph.graph import Graph
from graphrun.graph.media import AN
from graphrun.graph.ops import operation
from graphrun.graph.parts import Adapter, Checkpoint, Component, Directives, Part, Pipeline
from graphrun.graph.precisions import is_gguf
from graphrun.graph.schema import ComponentSpec, InputSpec, IpAdapterSpec, LoraSpec, PartSpec
from graphrun.graph.shape import graph_spec_of
from graphrun.graph.shipped import graph_file
from graphrun.graph.stages import StageReader
from graphrun.graph.values import Input, did_you_mean, fit, strings, to_trust
from graphrun.limits import require
from graphrun.reading import is_url, path_inside
from graphrun.units import parse_size

# the sizes of each kind of media, and the inputs that they come from by default
_SIZES: dict[str, dict[str, tuple[str, ...]]] = {
    "image": {"height": ("height",), "width": ("width",)},
    "mask": {"height": ("height",), "width": ("width",)},
    "video": {"height": ("height",), "width": ("width",), "frames": ("frames", "num_frames")},
    "audio": {"rate": (), "seconds": ("seconds",)},
    "tensor": {"shape": ()},
}
_SIZE_KEYS = ("height", "width", "frames", "rate", "seconds", "shape")
_NUMBERS = ("int", "float")
# suffixes of weight files, and of pickled weights, which are refused
WEIGHTS = ".safetensors"
FILES = (WEIGHTS, ".gguf")
PICKLED = (".ckpt", ".bin", ".pt", ".pth", ".pkl")
# file names of the configuration of a component or part in its folder
_CONFIG_FILES = ("config.json", "scheduler_config.json")


def load(
    path: str | Path,
    trust: Iterable[str] = (),
    source: str | None = None,
    dtype: str | None = None,
    absent: Iterable[str] = (),
) -> Graph:
    """Return the graph in the YAML file ``path``, or the shipped graph of that name.

    ``trust``: packages whose code the graph may run; the file's ``allow:`` only requests them.
    ``source`` replaces the graph's own ``source:``; a relative path is relative to the current
    folder, and only here may it be a URL. ``dtype``: see `Graph.in_dtype`. ``absent``: see
    `Graph.without`. Raises GraphError with one line per problem: ``file:line: entry: what is
    wrong``.
    """
    document = read_document(graph_file(path))
    if source is not None and isinstance(document.data, dict):
        absolute_path = os.path.abspath(os.path.expanduser(source))
        graph_source = (
            absolute_path
            if source.startswith((".", "~")) or os.path.exists(absolute_path)
            else source
        )
        document.data.pop("revision", None)
        document.data["source"] = graph_source
        # published checkpoints belong to the graph's own weights
        for entry in (document.data.get("components") or {}).values():
            if isinstance(entry, dict):
                entry.pop("checkpoints", None)
    spec = graph_spec_of(document)
    reader = _GraphReader(document, spec, tuple(sorted(set(strings(trust)))))
    reader.url = source if source is not None and is_url(source) else ""
    graph = reader.read()
    document.raise_if_any()
    graph = graph.without(absent) if absent else graph
    return graph if dtype is None else graph.in_dtype(dtype)


class _GraphReader(StageReader):
    """Turns a spec of the right shape into a graph, and adds problems to its document. ``url``: the
    URL that the caller gave as the source, if any."""

    url = ""

    def read(self) -> Graph:
        spec = self.spec
        require(
            "stages",
            len(spec.stages),
            f"it has {len(spec.stages):,} stages",
            self.document.file_line(("stages",)),
            GraphError,
        )
        for index, package in enumerate(spec.allow or ()):
            if package not in self.allow:
                self.add(
                    ("allow", index),
                    f"a file may ask for {package}, and only you can trust it; {to_trust(package)}",
                )
        self.check_class(("pipeline",), spec.pipeline)
        inputs = {name: self._input(name, item) for name, item in spec.inputs.items()}
        components = {name: self._component(name, item) for name, item in spec.components.items()}
        parts = {name: self._part(name, item) for name, item in spec.parts.items()}
        for name in components.keys() & parts.keys():
            self.add(("parts", name), "a component has this name too")
        for name in inputs.keys() & spec.stages.keys():
            self.add(("stages", name), "an input has this name too")
        stages = {name: self.stage(name, item, inputs) for name, item in spec.stages.items()}
        outputs = self.outputs()
        references = [
            *(r for stage in stages.values() for r in stage.references),
            *outputs.values(),
        ]
        for name, stage in stages.items():
            if (signature := operation(stage.op)) is not None and signature.open:
                output_names = dict.fromkeys(
                    r.output for r in references if r.kind == "stage" and r.name == name
                )
                stages[name] = replace(stage, outputs=tuple(output_names))
        self.check_uses(inputs, stages, references)
        if not self.misspelled:
            self.check_lists(inputs, stages)
        return Graph(
            name=spec.name,
            path=self.document.path,
            pipeline=spec.pipeline,
            source=self._source(("source",), spec.source, spec.revision) if spec.source else None,
            pipeline_config=self._pipeline_config(("pipeline_config",), spec.pipeline_config),
            pipelines=self._pipelines(),
            trust=self.trust,
            inputs=inputs,
            components=components,
            parts=parts,
            stages=self.ordered(stages),
            outputs=outputs,
            directives=self._directives(),
            fps=spec.fps,
            code=spec.code or "",
            file_line=self.document.file_line(("pipeline",)),
        )

    def _pipelines(self) -> dict[str, Pipeline]:
        pipelines, stage_pipelines = (
            dict[str, Pipeline](),
            {stage.pipeline for stage in self.spec.stages.values()},
        )
        config_pipelines = {
            str(value)[1:]
            for value in self.spec.pipeline_config.values()
            if str(value).startswith("$")
        }
        programs = config_pipelines | {
            stage.pipeline for stage in self.spec.stages.values() if stage.method is not None
        }
        member_names = [*self.spec.components, *self.spec.parts]
        for name, spec in self.spec.pipelines.items():
            location = ("pipelines", name)
            self.check_class((*location, "class"), spec.class_path)
            for key, member in spec.members.items():
                if member is not None and member not in member_names:
                    self.add(
                        (*location, "members", key),
                        f"no such component or part {member!r}{did_you_mean(member, member_names)}",
                    )
            if self.complete and name not in stage_pipelines | config_pipelines:
                self.add(location, "no stage belongs to it; add pipeline: to a stage, or remove it")
            config = self._pipeline_config((*location, "config"), spec.config)
            file_line = self.document.file_line((*location, "class"))
            pipelines[name] = Pipeline(
                spec.class_path, config, dict(spec.members), file_line, name in programs
            )
        return pipelines

    def _pipeline_config(self, location: Location, config: Mapping[str, Any]) -> dict[str, Any]:
        pipelines = self.spec.pipelines if location == ("pipeline_config",) else {}
        for key, value in config.items():
            if isinstance(value, str) and value.startswith("$") and value[1:] not in pipelines:
                self.add(
                    (*location, key),
                    f"{value!r} is not one of pipelines:{did_you_mean(value[1:], pipelines)}",
                )
            for index, text in enumerate(value if isinstance(value, list) else ()):
                name = str(text).removeprefix("$")
                if (name in self.spec.components) != str(text).startswith("$"):
                    problem = (
                        f"{text!r} is not a component such as "
                        f"$controlnet{did_you_mean(name, self.spec.components)}"
                    )
                    self.add((*location, key, index), problem)
        return dict(config)

    def _directives(self) -> Directives:
        spec, location = self.spec.directives, ("directives",)
        for key, names in (("keep", spec.keep), ("exclude", spec.exclude), ("pin", spec.pin)):
            self.check_components((*location, key), names)
        for name in set(spec.keep) & set(spec.exclude):
            self.add((*location, "exclude"), f"{name!r} is in keep too; leave one of them out")
        reserve_bytes = 0
        if spec.reserve is not None:
            try:
                reserve_bytes = parse_size(spec.reserve, name="reserve")
            except InputError as error:
                self.add((*location, "reserve"), str(error).removeprefix("reserve: "))
        return Directives(tuple(spec.keep), tuple(spec.exclude), reserve_bytes, tuple(spec.pin))

    def _input(self, name: str, spec: InputSpec) -> Input:
        location = ("inputs", name)
        numeric = {"multiple_of": ("int",), "minimum": _NUMBERS, "maximum": _NUMBERS}
        wrong = {
            key: types
            for key, types in numeric.items()
            if getattr(spec, key) is not None and spec.type not in types
        }
        for key, types in wrong.items():
            self.add(
                (*location, key), f"only for {' and '.join(types)}, and {name!r} is a {spec.type}"
            )
        has_default = "default" in spec.model_fields_set
        definition = Input(
            name,
            spec.type,
            spec.default,
            required=not (has_default or spec.optional),
            multiple_of=spec.multiple_of,
            minimum=spec.minimum
            if spec.minimum is not None
            else spec.multiple_of,  # a multiple of 16 is at least 16
            maximum=spec.maximum,
            accepts_list=spec.accepts_list,
            sizes=self._sizes(name, spec),
        )
        if has_default and spec.optional:
            self.add(
                (*location, "optional"),
                f"{name!r} has a default, so it may be left out anyway: remove one of them",
            )
        elif has_default and definition.sizes:
            self.add(
                (*location, "default"),
                f"{name!r} is {AN[spec.type]}, which every run passes: leave the default out",
            )
        elif has_default and not wrong:
            try:
                return replace(definition, default=fit(definition, spec.default))
            except ValueError as error:
                self.add((*location, "default"), str(error))
        return definition

    def _sizes(self, name: str, spec: InputSpec) -> dict[str, float | str | tuple[int, ...]]:
        """Return the sizes of the input ``name``, by `_SIZE_KEYS`; empty for a number or a text."""
        default_inputs, sizes = (
            _SIZES.get(spec.type, {}),
            dict[str, float | str | tuple[int, ...]](),
        )
        numbers = [
            input_name
            for input_name, input_spec in self.spec.inputs.items()
            if input_spec.type in (*_NUMBERS, "any")
        ]
        for key in _SIZE_KEYS:
            location, value = ("inputs", name, key), getattr(spec, key)
            if key not in default_inputs:
                if value is not None:
                    self.add(
                        location,
                        f"{name!r} is {AN.get(spec.type, f'of type {spec.type}')}, which has no "
                        f"{key}",
                    )
            elif isinstance(value, str) and value not in {f"${number}" for number in numbers}:
                meant = did_you_mean(value.removeprefix("$"), numbers)
                self.add(
                    location, f"{value!r} is neither a number nor an input that has one{meant}"
                )
            elif value is None and not any(
                candidate in numbers for candidate in default_inputs[key]
            ):
                self.add(
                    ("inputs", name), f"has no {key}, for plans without the file: add {key}: to it"
                )
            elif value is None:
                sizes[key] = next(name for name in default_inputs[key] if name in numbers)
            elif isinstance(value, list):
                sizes[key] = tuple(value)
            else:
                sizes[key] = value.removeprefix("$") if isinstance(value, str) else value
        return sizes

    def _component(self, name: str, spec: ComponentSpec) -> Component:
        location = ("components", name)
        self.check_class((*location, "class"), spec.class_path)
        source = self._own_source(location, spec.source, spec.revision)
        config = self._config((*location, "config"), spec.config, source)
        if config is None and source is None:
            self.add(
                location, "neither config nor source; give config: {} for the defaults of its class"
            )
        elif config is None and source is not None and source.endswith(WEIGHTS):
            self.add(location, "no config, and a single file has none: give config:")
        elif config is None and source is not None and Path(source).is_absolute():
            self.add(
                location, f"no config, and no {source}/config.json; give config: or another source:"
            )
        checkpoints = self._checkpoints(location, spec)
        formats = (checkpoint.format for checkpoint in checkpoints)
        return Component(
            name=name,
            class_path=spec.class_path,
            source=source,
            config=config or {},
            has_config=config is not None,
            dtype=spec.dtype,
            precision=tuple(dict.fromkeys((*(spec.precision or (spec.dtype,)), *formats))),
            checkpoints=checkpoints,
            seed=spec.seed,
            backing_store=tuple(spec.backing_store or ()),
            loras=self._adapters((*location, "loras"), spec.loras),
            ip_adapters=self._adapters((*location, "ip_adapters"), spec.ip_adapters),
            compile=spec.compile or "",
            keep_fp32=spec.keep_fp32,
            variant=spec.variant or (self.spec.variant or "" if spec.source is None else ""),
            gguf=self._gguf(location, spec),
            file_line=self.document.file_line(location),
        )

    def _checkpoints(self, location: Location, spec: ComponentSpec) -> tuple[Checkpoint, ...]:
        """Return the published checkpoints of a component; none with LoRAs, which are fused into
        the weights of the source before these are quantized."""
        checkpoints = []
        for name, item in spec.checkpoints.items():
            place = (*location, "checkpoints", name)
            source = self._source((*place, "source"), item.source, item.revision)
            if is_gguf(name) != source.endswith(".gguf"):
                self.add(
                    (*place, "source"),
                    f"{item.source} is {'no' if is_gguf(name) else 'a'} GGUF file, and the format "
                    f"is {name}",
                )
            checkpoints.append(
                Checkpoint(name, source, item.bytes or 0, tuple(item.plain), item.license or "")
            )
        return () if spec.loras else tuple(checkpoints)

    def _gguf(self, location: Location, spec: ComponentSpec) -> str:
        """Return the GGUF file of a component, whose header planning reads; "" if there is none."""
        lists_gguf = "gguf" in (spec.precision or ())
        if spec.gguf is None:
            if lists_gguf:
                self.add(
                    (*location, "precision"), "gguf needs a file: add gguf: with the path of one"
                )
            return ""
        if not lists_gguf:
            self.add((*location, "gguf"), "is not used: add gguf to precision:, or leave it out")
        file = self._source((*location, "gguf"), spec.gguf, None)
        if Path(file).is_absolute() and not os.path.isfile(file):
            problem = (
                f"no such file: {file}; its header is needed to plan: get it, or leave gguf out "
                "of precision:"
            )
            self.add((*location, "gguf"), problem)
        return file

    def _adapters(
        self, location: Location, specs: Iterable[LoraSpec | IpAdapterSpec]
    ) -> tuple[Adapter, ...]:
        return tuple(
            Adapter(str(self._file((*location, n), spec.file).resolve()), spec.scale)
            for n, spec in enumerate(specs)
        )

    def _file(self, location: Location, name: str) -> Path:
        file = self.folder / name
        if not os.path.isfile(file):
            self.add((*location, "file"), f"no such file: {file}")
        return file

    def _part(self, name: str, spec: PartSpec) -> Part:
        location = ("parts", name)
        self.check_class((*location, "class"), spec.class_path)
        source = self._own_source(location, spec.source, None)
        config = self._config((*location, "config"), spec.config, source)
        file = self._file(location, spec.file) if spec.file else None
        if config is None and source is None and file is None:
            self.add(
                location, "no config, file or source; give config: {} for the defaults of its class"
            )
        return Part(
            name,
            spec.class_path,
            config or {},
            config is not None,
            file,
            source,
            self.document.file_line(location),
        )

    def _config(
        self, location: Location, config: str | dict[str, Any] | None, source: str | None
    ) -> dict[str, Any] | None:
        """Return the configuration in ``config``, else in a local source's folder; None if not
        here."""
        try:
            if isinstance(config, dict):
                return dict(json.loads(json.dumps(config, sort_keys=True, allow_nan=False)))
            if config:
                return read_json(self.folder / config, infinite=True)
            folder = Path(source or "")
            files = (
                file
                for name in _CONFIG_FILES
                if folder.is_absolute() and os.path.isfile(file := folder / name)
            )
            return next((read_json(file, infinite=True) for file in files), None)
        except GraphError as error:
            self.add(location, str(error))
        except (TypeError, ValueError) as error:
            self.add(location, f"has a value that is not JSON: {error}")
        return {}

    def _own_source(
        self, location: Location, source: str | None, revision: str | None
    ) -> str | None:
        """Return the source of the component or part at ``location``: ``source``, or a default.

        The default is its folder in the graph's source. A graph's source that is a single file is
        the source of every component and no part.
        """
        if source is not None:
            return self._source((*location, "source"), source, revision)
        if revision is not None:
            self.add((*location, "revision"), "needs a source: give source: too")
        if not self.spec.source:
            return None
        whole = self._source((), self.spec.source, self.spec.revision)
        if whole.endswith(WEIGHTS):
            return whole if location[0] == "components" else None
        return f"{whole}/{location[1]}"

    def _source(self, location: Location, text: str, revision: str | None) -> str:
        """Return a hub path with its revision, a URL, or the absolute path of a folder or file.

        Relative paths are relative to the graph file. Problems are added for the entry at
        ``location``, unless that is ().
        """
        text = text.rstrip("/") or text
        if is_url(text):
            if text != self.url.rstrip("/"):
                self.add(location, "is a URL, which only you can trust: give it with --source")
            elif {".", ".."} & {*text.split("/")}:
                self.add(location, "is not a URL of a folder or file: it has . or ..")
            return text
        path = self.folder / os.path.expanduser(text)
        parts = text.split("/")
        local = (
            text.startswith((".", "/", "~"))
            or len(parts) < 2
            or (len(parts) == 2 and text.endswith(FILES))
            or os.path.exists(path)
        )
        problem = ""
        if text.endswith(PICKLED):
            problem = "is pickled, and nothing is unpickled: convert it to safetensors"
        elif local and revision is not None:
            problem = (
                f"{path} is on this machine, and only a repository has revisions: leave revision: "
                "out"
            )
        elif not local and revision is not None and "@" in text:
            problem = "has a revision of its own: leave revision: out"
        elif not local:
            try:
                for name in re.split("[@/]", f"{text}/{revision or 'main'}".replace("%2F", "/")):
                    path_inside(Path(), name, "is not a repository: it has")
            except InputError as error:
                problem = str(error)
        if problem and location:
            self.add(location, problem)
        if local:
            return str(path.resolve())
        owner, repository, *subpath = parts
        pinned = (
            f"{repository}@{revision.replace('/', '%2F')}" if revision is not None else repository
        )
        return "/".join((owner, pinned, *subpath))

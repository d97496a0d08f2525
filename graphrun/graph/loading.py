"""Reads a graph file into a `Graph`, and reports every problem in it with file and line.

    1  shape         pydantic models (`schema`), read by `shape`; what is wrong is left out in 2 and
    3 2  entries       inputs and their sizes, components, parts, sources, trusted packages 3
    connections   ops and their arguments, references and their kinds, cycles, and whether
    everything declared is used

Imports neither torch nor the packages whose classes the file names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from graphlib import CycleError
from pathlib import Path
from typing import Any

from graphrun.errors import GraphError, InputError
from graphrun.graph.document import Document, Location, read_document, read_json
from graphrun.graph.graph import (
    DEFAULT_ALLOW,
    Adapter,
    Component,
    Directives,
    Graph,
    Part,
    Pipeline,
    Reference,
    Stage,
)
from graphrun.graph.media import AN
from graphrun.graph.ops import OPERATIONS, PLAIN_KINDS, Kind, operation
from graphrun.graph.order import order_stages
from graphrun.graph.schema import (
    ComponentSpec,
    GraphSpec,
    InputSpec,
    IpAdapterSpec,
    LoraSpec,
    PartSpec,
    StageSpec,
)
from graphrun.graph.shape import graph_spec_of
from graphrun.graph.shipped import graph_file
from graphrun.graph.values import Input, did_you_mean, fit, of_type, outside, strings, to_trust
from graphrun.limits import require
from graphrun.reading import inside
from graphrun.units import parse_size

# The sizes of each kind of media, and the inputs that hold them by default.
_SIZES: dict[str, dict[str, tuple[str, ...]]] = {
    "image": {"height": ("height",), "width": ("width",)},
    "mask": {"height": ("height",), "width": ("width",)},
    "video": {"height": ("height",), "width": ("width",), "frames": ("frames", "num_frames")},
    "audio": {"rate": (), "seconds": ("seconds",)},
    "tensor": {"shape": ()},
}
_SIZE_KEYS = ("height", "width", "frames", "rate", "seconds", "shape")
_NUMBERS = ("int", "float")
# Suffixes of weight files, and of pickled ones, which are refused.
WEIGHTS = ".safetensors"
FILES = (WEIGHTS, ".gguf")
PICKLED = (".ckpt", ".bin", ".pt", ".pth", ".pkl")
# Entries of an item (() is the item itself) whose problem may be that another entry was left out.
_DEPENDENT = ((), ("revision",), ("gguf",), ("precision",), ("for_each",))
# File names of the configuration of a component or part in its folder.
_CONFIG_FILES = ("config.json", "scheduler_config.json")


def load(path: str | Path, trust: Iterable[str] = (), source: str | None = None) -> Graph:
    """The graph in the YAML file ``path``, or the shipped one of that name
    (`graphrun.graph.shipped`). ``trust``: packages whose code it may run; the file's ``allow:``
    only requests them. ``source`` takes the place of the graph's own, as if it were written in the
    file, but for a path that is relative to the current folder.

    Raises GraphError with one line per problem: ``file:line: entry: what is wrong``.
    """
    document = read_document(graph_file(path))
    if source is not None and isinstance(document.data, dict):
        here = os.path.abspath(os.path.expanduser(source))
        given = here if source.startswith((".", "~")) or os.path.exists(here) else source
        document.data.pop("revision", None)
        document.data["source"] = given
    spec = graph_spec_of(document)
    graph = _Reader(document, spec, tuple(sorted(set(strings(trust))))).read()
    document.raise_if_any()
    return graph


class _Reader:
    """Turns a spec of the right shape into a graph, and adds the problems to its document."""

    def __init__(self, document: Document, spec: GraphSpec, trust: tuple[str, ...]) -> None:
        self.document, self.spec, self.trust = document, spec, trust
        self.folder = document.path.parent
        asked = spec.allow if spec.allow is not None else DEFAULT_ALLOW
        self.allow = dict.fromkeys((*(name for name in asked if name in DEFAULT_ALLOW), *trust))
        self.complete = not document.problems  # whether ``spec`` has all entries of the file
        # or whether a reference names nothing, or its stage no known op
        self.misspelled = not self.complete

    def add(self, location: Location, text: str) -> None:
        """Add a problem, unless an entry of a wrong shape was left out there, or that may be
        why."""
        for at in self.document.wrong:
            if location[: len(at)] == at or (location[:2] == at[:2] and location[2:] in _DEPENDENT):
                return
        self.document.add(location, text)

    def read(self) -> Graph:
        spec = self.spec
        require(
            "stages",
            len(spec.stages),
            f"it has {len(spec.stages):,} stages",
            self.document.where(("stages",)),
            GraphError,
        )
        for index, package in enumerate(spec.allow or ()):
            if package not in self.allow:
                self.add(
                    ("allow", index),
                    f"a file may ask for {package}, and only you can trust it; {to_trust(package)}",
                )
        self._check_class(("pipeline",), spec.pipeline)
        inputs = {name: self._input(name, item) for name, item in spec.inputs.items()}
        components = {name: self._component(name, item) for name, item in spec.components.items()}
        parts = {name: self._part(name, item) for name, item in spec.parts.items()}
        for name in components.keys() & parts.keys():
            self.add(("parts", name), "a component has this name too")
        for name in inputs.keys() & spec.stages.keys():
            self.add(("stages", name), "an input has this name too")
        stages = {name: self._stage(name, item, inputs) for name, item in spec.stages.items()}
        outputs = self._outputs()
        references = [
            *(r for stage in stages.values() for r in stage.references),
            *outputs.values(),
        ]
        for name, stage in stages.items():
            if (of := operation(stage.op)) is not None and of.open:
                read = dict.fromkeys(
                    r.output for r in references if r.kind == "stage" and r.name == name
                )
                stages[name] = replace(stage, outputs=tuple(read))
        self._check_uses(inputs, stages, references)
        if not self.misspelled:
            self._check_lists(inputs, stages)
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
            stages=self._ordered(stages),
            outputs=outputs,
            directives=self._directives(),
            fps=spec.fps,
            code=spec.code or "",
            where=self.document.where(("pipeline",)),
        )

    def _pipelines(self) -> dict[str, Pipeline]:
        found, named = (
            dict[str, Pipeline](),
            {stage.pipeline for stage in self.spec.stages.values()},
        )
        held = {
            str(value)[1:]
            for value in self.spec.pipeline_config.values()
            if str(value).startswith("$")
        }
        programs = held | {
            stage.pipeline for stage in self.spec.stages.values() if stage.method is not None
        }
        known = [*self.spec.components, *self.spec.parts]
        for name, spec in self.spec.pipelines.items():
            at = ("pipelines", name)
            self._check_class((*at, "class"), spec.class_path)
            for key, member in spec.members.items():
                if member is not None and member not in known:
                    self.add(
                        (*at, "members", key),
                        f"no such component or part {member!r}{did_you_mean(member, known)}",
                    )
            if self.complete and name not in named | held:
                self.add(at, "no stage belongs to it; add pipeline: to a stage, or remove it")
            config = self._pipeline_config((*at, "config"), spec.config)
            where = self.document.where((*at, "class"))
            found[name] = Pipeline(
                spec.class_path, config, dict(spec.members), where, name in programs
            )
        return found

    def _pipeline_config(self, at: Location, config: Mapping[str, Any]) -> dict[str, Any]:
        known = self.spec.pipelines if at == ("pipeline_config",) else {}
        for key, value in config.items():
            if isinstance(value, str) and value.startswith("$") and value[1:] not in known:
                self.add(
                    (*at, key),
                    f"{value!r} is not one of pipelines:{did_you_mean(value[1:], known)}",
                )
            for index, text in enumerate(value if isinstance(value, list) else ()):
                name = str(text).removeprefix("$")
                if (name in self.spec.components) != str(text).startswith("$"):
                    what = f"{text!r} is not a component such as $controlnet{did_you_mean(name, self.spec.components)}"
                    self.add((*at, key, index), what)
        return dict(config)

    def _directives(self) -> Directives:
        spec, at = self.spec.directives, ("directives",)
        for key, names in (("keep", spec.keep), ("exclude", spec.exclude), ("pin", spec.pin)):
            self._check_components((*at, key), names)
        for name in set(spec.keep) & set(spec.exclude):
            self.add((*at, "exclude"), f"{name!r} is in keep too; leave one of them out")
        reserve_bytes = 0
        if spec.reserve is not None:
            try:
                reserve_bytes = parse_size(spec.reserve, name="reserve")
            except InputError as error:
                self.add((*at, "reserve"), str(error).removeprefix("reserve: "))
        return Directives(tuple(spec.keep), tuple(spec.exclude), reserve_bytes, tuple(spec.pin))

    def _check_components(self, at: Location, names: Iterable[str]) -> None:
        for index, name in enumerate(names):
            if name not in self.spec.components:
                self.add(
                    (*at, index),
                    f"unknown component {name!r}{did_you_mean(name, self.spec.components)}",
                )

    def _ordered(self, stages: Mapping[str, Stage]) -> tuple[Stage, ...]:
        try:
            return order_stages(stages)
        except CycleError as error:
            members = error.args[1][:-1]
            first = min(range(len(members)), key=lambda number: list(stages).index(members[number]))
            cycle = [*members[first:], *members[: first + 1]]
            self.add(
                ("stages", cycle[0]),
                f"stages form a cycle: {' -> '.join(cycle)}; remove one of these references",
            )
            return ()

    def _input(self, name: str, spec: InputSpec) -> Input:
        at = ("inputs", name)
        numeric = {"multiple_of": ("int",), "minimum": _NUMBERS, "maximum": _NUMBERS}
        wrong = {
            key: types
            for key, types in numeric.items()
            if getattr(spec, key) is not None and spec.type not in types
        }
        for key, types in wrong.items():
            self.add((*at, key), f"only for {' and '.join(types)}, and {name!r} is a {spec.type}")
        has_default = "default" in spec.model_fields_set
        declared = Input(
            name,
            spec.type,
            spec.default,
            required=not (has_default or spec.optional),
            multiple_of=spec.multiple_of,
            minimum=spec.minimum
            if spec.minimum is not None
            else spec.multiple_of,  # a multiple of 16 is at least 16
            maximum=spec.maximum,
            many=spec.many,
            sizes=self._sizes(name, spec),
        )
        if has_default and spec.optional:
            self.add(
                (*at, "optional"),
                f"{name!r} has a default, so it may be left out anyway: remove one of them",
            )
        elif has_default and declared.sizes:
            self.add(
                (*at, "default"),
                f"{name!r} is {AN[spec.type]}, which every run passes: leave the default out",
            )
        elif has_default and not wrong:
            try:
                return replace(declared, default=fit(declared, spec.default))
            except ValueError as error:
                self.add((*at, "default"), str(error))
        return declared

    def _sizes(self, name: str, spec: InputSpec) -> dict[str, float | str | tuple[int, ...]]:
        """The sizes of the input ``name``, by `_SIZE_KEYS`; empty for a number or a text."""
        wanted, found = _SIZES.get(spec.type, {}), dict[str, float | str | tuple[int, ...]]()
        numbers = [
            each for each, other in self.spec.inputs.items() if other.type in (*_NUMBERS, "any")
        ]
        for key in _SIZE_KEYS:
            at, value = ("inputs", name, key), getattr(spec, key)
            if key not in wanted:
                if value is not None:
                    self.add(
                        at,
                        f"{name!r} is {AN.get(spec.type, f'of type {spec.type}')}, which has no {key}",
                    )
            elif isinstance(value, str) and value not in {f"${each}" for each in numbers}:
                meant = did_you_mean(value.removeprefix("$"), numbers)
                self.add(at, f"{value!r} is neither a number nor an input that holds one{meant}")
            elif value is None and not any(each in numbers for each in wanted[key]):
                self.add(
                    ("inputs", name), f"has no {key}, for plans without the file: add {key}: to it"
                )
            elif value is None:
                found[key] = next(each for each in wanted[key] if each in numbers)
            elif isinstance(value, list):
                found[key] = tuple(value)
            else:
                found[key] = value.removeprefix("$") if isinstance(value, str) else value
        return found

    def _component(self, name: str, spec: ComponentSpec) -> Component:
        at = ("components", name)
        self._check_class((*at, "class"), spec.class_path)
        source = self._own_source(at, spec.source, spec.revision)
        config = self._config((*at, "config"), spec.config, source)
        if config is None and source is None:
            self.add(at, "neither config nor source; give config: {} for the defaults of its class")
        elif config is None and source is not None and source.endswith(WEIGHTS):
            self.add(at, "no config, and a single file has none: give config:")
        elif config is None and source is not None and Path(source).is_absolute():
            self.add(at, f"no config, and no {source}/config.json; give config: or another source:")
        return Component(
            name=name,
            class_path=spec.class_path,
            source=source,
            config=config or {},
            has_config=config is not None,
            dtype=spec.dtype,
            precision=tuple(spec.precision or (spec.dtype,)),
            seed=spec.seed,
            backing_store=tuple(spec.backing_store or ()),
            loras=self._adapters((*at, "loras"), spec.loras),
            ip_adapters=self._adapters((*at, "ip_adapters"), spec.ip_adapters),
            compile=spec.compile or "",
            variant=spec.variant or (self.spec.variant or "" if spec.source is None else ""),
            gguf=self._gguf(at, spec),
            where=self.document.where(at),
        )

    def _gguf(self, at: Location, spec: ComponentSpec) -> str:
        """The GGUF file of a component, whose header is read for planning; empty where there is
        none."""
        wanted = "gguf" in (spec.precision or ())
        if spec.gguf is None:
            if wanted:
                self.add((*at, "precision"), "gguf needs a file: add gguf: with the path of one")
            return ""
        if not wanted:
            self.add((*at, "gguf"), "is not used: add gguf to precision:, or leave it out")
        file = self._source((*at, "gguf"), spec.gguf, None)
        if Path(file).is_absolute() and not os.path.isfile(file):
            what = f"no such file: {file}; its header is needed to plan: get it, or leave gguf out of precision:"
            self.add((*at, "gguf"), what)
        return file

    def _adapters(
        self, at: Location, specs: Iterable[LoraSpec | IpAdapterSpec]
    ) -> tuple[Adapter, ...]:
        return tuple(
            Adapter(str(self._file((*at, n), spec.file).resolve()), spec.scale)
            for n, spec in enumerate(specs)
        )

    def _file(self, at: Location, name: str) -> Path:
        file = self.folder / name
        if not os.path.isfile(file):
            self.add((*at, "file"), f"no such file: {file}")
        return file

    def _part(self, name: str, spec: PartSpec) -> Part:
        at = ("parts", name)
        self._check_class((*at, "class"), spec.class_path)
        source = self._own_source(at, spec.source, None)
        config = self._config((*at, "config"), spec.config, source)
        file = self._file(at, spec.file) if spec.file else None
        if config is None and source is None and file is None:
            self.add(at, "no config, file or source; give config: {} for the defaults of its class")
        return Part(
            name,
            spec.class_path,
            config or {},
            config is not None,
            file,
            source,
            self.document.where(at),
        )

    def _check_class(self, at: Location, class_path: str) -> None:
        package = re.split("[.:]", class_path)[0]
        if package not in self.allow:
            meant = did_you_mean(package, self.allow)
            advice = meant if "did you mean" in meant else ""
            if package in DEFAULT_ALLOW:
                advice = f"; allow: leaves {package} out: add it there"
            what = (
                f"outside the trusted packages ({', '.join(self.allow)}){advice}"
                if advice
                else outside(package, self.allow)
            )
            self.add(at, f"{class_path} is {what}")

    def _config(
        self, at: Location, config: str | dict[str, Any] | None, source: str | None
    ) -> dict[str, Any] | None:
        """The configuration in ``config``, or else in the folder of a local source; None where
        there is none on this machine."""
        try:
            if isinstance(config, dict):
                return dict(json.loads(json.dumps(config, sort_keys=True, allow_nan=False)))
            if config:
                return read_json(self.folder / config, infinite=True)
            folder = Path(source or "")
            found = (
                file
                for name in _CONFIG_FILES
                if folder.is_absolute() and os.path.isfile(file := folder / name)
            )
            return next((read_json(file, infinite=True) for file in found), None)
        except GraphError as error:
            self.add(at, str(error))
        except (TypeError, ValueError) as error:
            self.add(at, f"holds a value that is not JSON: {error}")
        return {}

    def _own_source(self, at: Location, own: str | None, revision: str | None) -> str | None:
        """The source of the component or part ``at``: its own, else its folder in the graph's
        source.

        A graph's source that is a single file is the source of all components and of no part.
        """
        if own is not None:
            return self._source((*at, "source"), own, revision)
        if revision is not None:
            self.add((*at, "revision"), "needs a source: give source: too")
        if not self.spec.source:
            return None
        whole = self._source((), self.spec.source, self.spec.revision)
        if whole.endswith(WEIGHTS):
            return whole if at[0] == "components" else None
        return f"{whole}/{at[1]}"

    def _source(self, at: Location, text: str, revision: str | None) -> str:
        """A hub path with its revision, or the absolute path of a folder or file, which is relative
        to the graph file.

        Problems are added for the entry ``at``, unless that is ().
        """
        text = text.rstrip("/") or text
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
            problem = f"{path} is on this machine, and only a repository has revisions: leave revision: out"
        elif not local and revision is not None and "@" in text:
            problem = "has a revision of its own: leave revision: out"
        elif not local:
            try:
                for name in re.split("[@/]", f"{text}/{revision or 'main'}".replace("%2F", "/")):
                    inside(Path(), name, "is not a repository: it has")
            except InputError as error:
                problem = str(error)
        if problem and at:
            self.add(at, problem)
        if local:
            return str(path.resolve())
        owner, repository, *below = parts
        pinned = (
            f"{repository}@{revision.replace('/', '%2F')}" if revision is not None else repository
        )
        return "/".join((owner, pinned, *below))

    def _stage(self, name: str, spec: StageSpec, inputs: Mapping[str, Input]) -> Stage:
        at = ("stages", name)
        self._check_components((*at, "uses"), spec.uses)
        for index, component in enumerate(spec.uses):
            if component in spec.uses[:index] and component in self.spec.components:
                self.add((*at, "uses", index), f"{component!r} is given twice")
        arguments = {
            key: self._argument(value, (*at, "with", key)) for key, value in spec.arguments.items()
        }
        of = operation(spec.op)
        if of is not None and of.own:
            self._check_class((*at, "op"), spec.op)
        if of is None:
            self.add((*at, "op"), f"unknown op {spec.op!r}{did_you_mean(spec.op, OPERATIONS)}")
            return Stage(name, spec.op, tuple(spec.uses), arguments)
        for key in of.required:
            if key not in arguments:
                self.add(at, f"{spec.op} needs {key!r}; add it to with:")
        for key, value in arguments.items():
            wanted = of.argument(key)
            if wanted is None:
                self.add(
                    (*at, "with", key),
                    f"{spec.op} has no argument {key!r}{did_you_mean(key, of.arguments)}",
                )
                continue
            try:
                given = (
                    {name: of.item for name, of in inputs.items()}
                    if spec.for_each is not None
                    else inputs
                )
                arguments[key] = self._fitted(wanted, value, given)
            except ValueError as error:
                self.add((*at, "with", key), str(error))
        for index, option in enumerate(spec.options):
            if option not in of.options:
                known = ", ".join(of.options) or "none"
                self.add(
                    (*at, "options", index), f"{spec.op} has no option {option!r}; it has {known}"
                )
        outputs, pipeline = tuple(of.outputs), spec.pipeline or ""
        if pipeline and of.own:
            self.add((*at, "pipeline"), "a function belongs to no pipeline: leave it out")
        elif pipeline and pipeline not in self.spec.pipelines:
            self.add(
                (*at, "pipeline"),
                f"no such pipeline {pipeline!r}{did_you_mean(pipeline, self.spec.pipelines)}",
            )
        if spec.method is not None and spec.op != "call":
            self.add((*at, "method"), "only op: call calls a method: leave it out")
        where, method, each = (
            self.document.where(at),
            spec.method or "__call__",
            spec.for_each or "",
        )
        if each and not isinstance(arguments.get(each), Reference):
            what = (
                "with: has no"
                if each not in arguments
                else "is no list: name an input, or an output of a stage with for_each, in"
            )
            self.add(
                (*at, "for_each"),
                f"{what} {each}{did_you_mean(each, arguments) if each not in arguments else ''}",
            )
            each = ""
        return Stage(
            name,
            spec.op,
            tuple(spec.uses),
            arguments,
            where,
            tuple(spec.options),
            outputs,
            pipeline,
            method,
            each,
        )

    def _check_lists(self, inputs: Mapping[str, Input], stages: Mapping[str, Stage]) -> None:
        """Adds a problem for every stage whose ``for_each`` names no list, and for every one that
        reads a list without it."""
        lists = [
            (name, stage.arguments[stage.for_each])
            for name, stage in stages.items()
            if stage.for_each
        ]
        roots = [of.name for _, of in lists if of.kind == "input"]
        for name, of in lists:
            at = ("stages", name, "for_each")
            if of.kind == "stage" and of.name in stages and not stages[of.name].for_each:
                self.add(
                    at,
                    f"{of} is made once: for_each takes the items of an input, or what a stage with for_each made of them",
                )
            elif (
                of.kind == "input" and not inputs[of.name].many and inputs[of.name].type != "video"
            ):
                self.add(at, f"{of} is no list: add many: true to inputs.{of.name}")
            elif of.kind == "input" and of.name != roots[0]:
                self.add(
                    at,
                    f"another stage takes the items of ${roots[0]}, and a graph has one list: make it a graph of its own",
                )
        for name, stage in stages.items() if roots else ():
            for of in stage.references if not stage.for_each else ():
                if of.name == roots[0] or (
                    of.kind == "stage" and of.name in stages and stages[of.name].for_each
                ):
                    self.add(
                        ("stages", name),
                        f"{of} is a list, whose items are taken one by one: add for_each: to this stage too",
                    )

    def _argument(self, value: Any, at: Location) -> Any:
        """``value`` with `Reference` objects in place of texts such as ``$prompt``.

        A text that names nothing stays, in place of the list that it is in.
        """
        if isinstance(value, list):
            found = [self._argument(item, (*at, index)) for index, item in enumerate(value)]
            return next(
                (item for item in found if isinstance(item, str) and item.startswith("$")), found
            )
        return (
            self._reference(value, at)
            if isinstance(value, str) and value.startswith("$")
            else value
        )

    def _reference(self, text: str, at: Location) -> Reference | str:
        """What ``text`` names; ``text`` itself, with a problem, where that is nothing."""
        name, dot, output = text[1:].partition(".")
        stage = self.spec.stages.get(name)
        of = operation(stage.op) if stage else None
        self.misspelled |= dot != "" and of is None
        if not dot and name in self.spec.inputs:
            return Reference("input", name)
        if dot and stage and (of is None or of.output(output) is not None):
            return Reference("stage", name, output)
        self.misspelled = True
        if dot and of:
            self.add(
                at, f"stage {name!r} has no output {output!r}{did_you_mean(output, of.outputs)}"
            )
        elif dot:
            self.add(at, f"no such stage {name!r}{did_you_mean(name, self.spec.stages)}")
        elif stage:
            such = next(iter(of.outputs)) if of else "output"
            self.add(at, f"{text} is a stage; say which of its outputs, such as {text}.{such}")
        else:
            self.add(at, f"no such input {name!r}{did_you_mean(name, self.spec.inputs)}")
        return text

    def _fitted(self, wanted: Kind, value: Any, inputs: Mapping[str, Input]) -> Any:
        """``value`` as an argument of kind ``wanted``. Raises ValueError where it cannot be one."""
        if wanted == "any" or (
            isinstance(value, str) and value.startswith("$")
        ):  # such a text is a problem already
            return value
        if isinstance(value, Reference):
            of = operation(self.spec.stages[value.name].op) if value.kind == "stage" else None
            got: Kind | None = of.output(value.output) if of else None
            if value.kind == "input":
                got = inputs[value.name].type
                if inputs[value.name].many and wanted != "str":
                    raise ValueError(f"expected {wanted}, and {value} may be a list")
            if got not in (None, "any", wanted) and (got, wanted) != ("int", "float"):
                raise ValueError(f"expected {wanted}, and {value} is {got}")
            return value
        if isinstance(value, (list, dict)):
            raise ValueError(
                f"expected {wanted}, got a {'list' if isinstance(value, list) else 'mapping'}"
            )
        if wanted not in PLAIN_KINDS:
            raise ValueError(
                f"expected {wanted}, a stage's output such as $stage.{wanted}; got {value!r}"
            )
        return of_type(wanted, value)

    def _outputs(self) -> dict[str, Reference]:
        found: dict[str, Reference] = {}
        for name, text in self.spec.outputs.items():
            at = ("outputs", name)
            if not text.startswith("$"):
                self.misspelled = True
                self.add(at, f"{text!r} is not a reference such as $decode.image")
            elif isinstance(reference := self._reference(text, at), Reference):
                found[name] = reference
                if reference.kind == "input":
                    self.add(
                        at,
                        f"{text} is an input; an output comes from a stage, such as $decode.image",
                    )
        return found

    def _check_uses(
        self,
        inputs: Mapping[str, Input],
        stages: Mapping[str, Stage],
        references: Iterable[Reference],
    ) -> None:
        """Adds a problem for every component and input that no stage uses, and every stage whose
        outputs nothing reads.

        Not where something is misspelled: that is reported already, and what was meant is used.
        """
        used = {component for stage in stages.values() for component in stage.uses}
        for name in self.spec.components:
            if self.complete and name not in used and used <= self.spec.components.keys():
                self.add(
                    ("components", name),
                    "no stage uses it; add it to uses: of a stage, or remove it",
                )
        if self.misspelled:
            return
        read = {(r.kind, r.name) for r in references}
        sizes = [
            size
            for name, declared in inputs.items()
            if ("input", name) in read
            for size in declared.sizes.values()
        ]
        for name in inputs:
            if ("input", name) not in read and name not in sizes:
                self.add(("inputs", name), "no stage reads it; remove it, or use it")
        for name in stages:
            if ("stage", name) not in read:
                self.add(("stages", name), "nothing reads its outputs; remove it, or use it")

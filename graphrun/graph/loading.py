"""Reads a graph file into a `Graph`, and reports every problem in it with file and line.

    1  shape         pydantic models (`schema`); their errors are translated to messages about the file's entries
    2  entries       inputs and their sizes, components, parts, sources, trusted packages
    3  connections   ops and their arguments, references and their kinds, cycles, and whether everything declared is used

Imports neither torch nor the packages whose classes the file names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from graphrun.errors import GraphError, InputError
from graphrun.graph.document import Document, Location, Problems, read_document, read_json
from graphrun.graph.graph import DEFAULT_ALLOW, Component, Directives, Graph, IpAdapter, Lora, Part, Reference, Stage
from graphrun.graph.media import AN
from graphrun.graph.ops import OPERATIONS, PLAIN_KINDS, Kind
from graphrun.graph.order import find_cycle, order_stages
from graphrun.graph.schema import (
    ComponentSpec,
    DirectivesSpec,
    GraphSpec,
    InputSpec,
    IpAdapterSpec,
    LoraSpec,
    PartSpec,
    Spec,
    StageSpec,
)
from graphrun.graph.values import Input, did_you_mean, fit, of_type, outside, to_trust
from graphrun.units import parse_size

_SECTIONS: dict[str, type[Spec]] = {
    "inputs": InputSpec,
    "components": ComponentSpec,
    "parts": PartSpec,
    "stages": StageSpec,
    "directives": DirectivesSpec,
}
_EXPECTED = {
    "string_type": "a text",
    "int_type": "an int",
    "int_from_float": "an int",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "list_type": "a list",
}


def note_shape(error: ValidationError, data: Any, problems: Problems) -> None:
    """Adds the problems that ``error`` reports about ``data``; the branches of a union become one problem."""
    expected: dict[tuple[str | int, ...], list[str]] = {}
    for details in error.errors(include_url=False):
        location = tuple(_existing(details["loc"], data))
        key, above = (location[-1], location[:-1]) if location else ("", ())
        if details["type"] in _EXPECTED:
            expected.setdefault(location, []).append(_EXPECTED[details["type"]])
        elif details["type"] == "extra_forbidden":
            problems.add(above, f"unknown key {key!r}{did_you_mean(str(key), _known_keys(above))}", line_of=location)
        elif details["type"] == "missing":
            problems.add(location, f"{details['loc'][-1]!r} is missing")
        else:
            problems.add(location, _sentence(details, str(key)))
    for location, kinds in expected.items():
        names = [kind for kind in dict.fromkeys(kinds) if not (kind == "an int" and "a number" in kinds)]
        problems.add(location, f"expected {' or '.join(names)}, got {_shown(_at(location, data))}")


def _existing(location: tuple[str | int, ...], data: Any) -> Iterator[str | int]:
    """``location`` without the steps that pydantic adds for the branch of a union or a missing key."""
    for step in location:
        if (isinstance(data, dict) and step in data) or (isinstance(data, list) and step in range(len(data))):
            yield step
            data = _at((step,), data)


def _at(location: tuple[str | int, ...], data: Any) -> Any:
    for step in location:
        data = data[step]
    return data


def _known_keys(location: tuple[str | int, ...]) -> list[str]:
    model = GraphSpec if not location else _SECTIONS[str(location[0])]
    return [field.alias or name for name, field in model.model_fields.items()]


def _sentence(details: ErrorDetails, key: str) -> str:
    context, value = details.get("ctx", {}), details["input"]
    match details["type"]:
        case "literal_error":
            if key == "graphrun":
                return f"this graphrun reads files of version 1, not {value!r}"
            choices = [choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")]
            return f"unknown {key if not key.isdigit() else 'value'} {value!r}{did_you_mean(str(value), choices)}"
        case "string_pattern_mismatch" if key in ("class", "pipeline"):
            return f"{value!r} is not a class path such as diffusers.AutoencoderKL"
        case "string_pattern_mismatch" if "._-" in context["pattern"]:
            what = "letters, digits, dots, dashes and underscores, at most 64, no dot or dash first"
            return f"{value!r} cannot be a graph's name, since output files are named by it: {what}"
        case "string_pattern_mismatch" if "A-Z" in context["pattern"]:
            return f"{value!r} is not a name: letters, digits and underscores, at most 64, no digit first"
        case "string_pattern_mismatch":
            return f"{value!r} holds control characters"
        case "too_short" | "string_too_short":
            return "must not be empty"
        case "invalid_key":
            return f"{value!r} is not a name: write it as text"
        case "greater_than" | "greater_than_equal":
            return f"{value} is too small; {details['msg'].lower().removeprefix('input ')}"
    return details["msg"]


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return repr(value) if isinstance(value, (str, bool, int, float)) else f"a {type(value).__name__}"


# The sizes of each kind, and the inputs that hold them by default.
SIZES: dict[str, dict[str, tuple[str, ...]]] = {
    "image": {"height": ("height",), "width": ("width",)},
    "mask": {"height": ("height",), "width": ("width",)},
    "video": {"height": ("height",), "width": ("width",), "frames": ("frames", "num_frames")},
    "audio": {"rate": (), "seconds": ("seconds",)},
}
NAMES = ("height", "width", "frames", "rate", "seconds")


def read_sizes(name: str, item: InputSpec, spec: GraphSpec, problems: Problems) -> dict[str, float | str]:
    """The sizes of the input ``name``, by `NAMES`; empty for a number or a text. Problems are added to ``problems``."""
    wanted, found = SIZES.get(item.type, {}), dict[str, float | str]()
    for key in NAMES:
        at, value = ("inputs", name, key), getattr(item, key)
        if key not in wanted:
            if value is not None:
                problems.add(at, f"{name!r} is {AN.get(item.type, f'of type {item.type}')}, which has no {key}")
            continue
        if isinstance(value, str):
            of = value.removeprefix("$")
            if of not in spec.inputs or spec.inputs[of].type not in ("int", "float") or not value.startswith("$"):
                known = [each for each, other in spec.inputs.items() if other.type in ("int", "float")]
                problems.add(at, f"{value!r} is neither a number nor an input that holds one{did_you_mean(of, known)}")
                continue
            value = of
        elif value is None:
            held = [each for each in wanted[key] if each in spec.inputs and spec.inputs[each].type in ("int", "float")]
            if not held:
                problems.add(("inputs", name), f"has no {key}, for plans without the file: add {key}: to it")
                continue
            value = held[0]
        found[key] = value
    return found


UNRESOLVED = object()  # in place of a reference to something that does not exist


def read_stages(spec: GraphSpec, inputs: Mapping[str, Input], document: Document, problems: Problems) -> dict[str, Stage]:
    """The stages of ``spec`` in the order of the file. Problems are added to ``problems``."""
    read = [text for item in spec.stages.values() for text in _written(item)] + list(spec.outputs.values())
    return {name: _stage(name, item, spec, inputs, document, problems, read) for name, item in spec.stages.items()}


def read_outputs(spec: GraphSpec, problems: Problems) -> dict[str, Reference]:
    """The outputs of the graph, each a reference to a stage's output. Problems are added to ``problems``."""
    outputs: dict[str, Reference] = {}
    for name, text in spec.outputs.items():
        at = ("outputs", name)
        if not text.startswith("$"):
            problems.add(at, f"{text!r} is not a reference such as $decode.image")
        elif (reference := _reference(text, at, spec, problems)) is not None:
            if reference.kind == "input":
                problems.add(at, f"{text} is an input; an output comes from a stage, such as $decode.image")
            outputs[name] = reference
    return outputs


def check_uses(
    spec: GraphSpec, inputs: Mapping[str, Input], stages: Mapping[str, Stage], outputs: Mapping[str, Reference], problems: Problems
) -> None:
    """Adds a problem for every component and input that no stage uses, and every stage whose outputs nothing reads.

    Does nothing where a reference is misspelled: that is reported already, and what was meant is used.
    """
    used = {component for stage in stages.values() for component in stage.uses}
    for name in spec.components:
        if name not in used and used <= spec.components.keys():
            problems.add(("components", name), "no stage uses it; add it to uses: of a stage, or remove it")
    references = {r for stage in stages.values() for r in stage.references} | set(outputs.values())
    read = {(r.kind, r.name) for r in references}
    sizes = [size for name, declared in inputs.items() if ("input", name) in read for size in declared.sizes.values()]
    read |= {("input", size) for size in sizes if isinstance(size, str)}
    written = [text for item in spec.stages.values() for text in _written(item)]
    if not all(_resolves(str(text), spec) for text in (*written, *spec.outputs.values())):
        return
    for section, kind, unused in (("inputs", "input", "no stage reads it"), ("stages", "stage", "nothing reads its outputs")):
        for name in getattr(spec, section):
            if (kind, name) not in read:
                problems.add((section, name), f"{unused}; remove it, or use it")


def _stage(
    name: str,
    item: StageSpec,
    spec: GraphSpec,
    inputs: Mapping[str, Input],
    document: Document,
    problems: Problems,
    read: Sequence[str],
) -> Stage:
    at = ("stages", name)
    for index, component in enumerate(item.uses):
        if component not in spec.components:
            problems.add((*at, "uses", index), f"unknown component {component!r}{did_you_mean(component, spec.components)}")
        elif component in item.uses[:index]:
            problems.add((*at, "uses", index), f"{component!r} is given twice")
    arguments: dict[str, Any] = {}
    for key, value in item.arguments.items():
        argument = _argument(value, (*at, "with", key), spec, problems)
        if argument is not UNRESOLVED:
            arguments[key] = argument
    operation = OPERATIONS.get(item.op)
    if operation is None:
        problems.add((*at, "op"), f"unknown op {item.op!r}{did_you_mean(item.op, OPERATIONS)}")
        return Stage(name, item.op, tuple(item.uses), arguments, document.where(at))
    for key in operation.required:
        if key not in item.arguments:
            problems.add(at, f"{item.op} needs {key!r}; add it to with:")
    for key, value in arguments.items():
        wanted = operation.argument(key)
        if wanted is None:
            problems.add((*at, "with", key), f"{item.op} has no argument {key!r}{did_you_mean(key, operation.arguments)}")
        elif wanted == "any":
            continue
        elif text := _misfit(wanted, value, spec, inputs):
            problems.add((*at, "with", key), text)
        elif not isinstance(value, Reference):
            arguments[key] = of_type(wanted, value)
    for index, option in enumerate(item.options):
        if option not in operation.options:
            known = ", ".join(operation.options) or "none"
            problems.add((*at, "options", index), f"{item.op} has no option {option!r}; it has {known}")
    outputs = tuple(operation.outputs)
    if operation.open:
        outputs = tuple(dict.fromkeys(text.partition(".")[2] for text in read if text.startswith(f"${name}.")))
    return Stage(name, item.op, tuple(item.uses), arguments, document.where(at), tuple(item.options), outputs)


def _argument(value: Any, at: Location, spec: GraphSpec, problems: Problems) -> Any:
    """``value`` with `Reference` objects in place of texts such as ``$prompt``; UNRESOLVED where one does not exist."""
    if isinstance(value, list):
        found = [_argument(item, (*at, index), spec, problems) for index, item in enumerate(value)]
        return UNRESOLVED if any(item is UNRESOLVED for item in found) else found
    if not (isinstance(value, str) and value.startswith("$")):
        return value
    reference = _reference(value, at, spec, problems)
    return UNRESOLVED if reference is None else reference


def _written(item: StageSpec) -> list[str]:
    """The references in a stage's arguments, as texts."""

    def of(value: Any) -> list[str]:
        if isinstance(value, list):
            return [text for each in value for text in of(each)]
        return [value] if isinstance(value, str) and value.startswith("$") else []

    return of(list(item.arguments.values()))


def _reference(text: str, at: Location, spec: GraphSpec, problems: Problems) -> Reference | None:
    name, dot, output = text[1:].partition(".")
    if not dot:
        if name in spec.inputs:
            return Reference("input", name)
        if name in spec.stages:
            problems.add(at, f"{text} is a stage; say which of its outputs, such as {text}.{_an_output(spec.stages[name])}")
        else:
            problems.add(at, f"no such input {name!r}{did_you_mean(name, spec.inputs)}")
        return None
    if name not in spec.stages:
        problems.add(at, f"no such stage {name!r}{did_you_mean(name, spec.stages)}")
        return None
    operation = OPERATIONS.get(spec.stages[name].op)
    if operation is not None and operation.output(output) is None:
        problems.add(at, f"stage {name!r} has no output {output!r}{did_you_mean(output, operation.outputs)}")
        return None
    return Reference("stage", name, output)


def _resolves(text: str, spec: GraphSpec) -> bool:
    name, _, output = text[1:].partition(".")
    operation = OPERATIONS.get(spec.stages[name].op) if name in spec.stages else None
    return operation.output(output) is not None if operation else not output and name in spec.inputs


def _an_output(stage: StageSpec) -> str:
    operation = OPERATIONS.get(stage.op)
    return next(iter(operation.outputs)) if operation else "output"


def _misfit(wanted: Kind, value: Any, spec: GraphSpec, inputs: Mapping[str, Input]) -> str:
    """Why ``value`` cannot be passed as an argument of kind ``wanted``; empty where it can."""
    if isinstance(value, Reference):
        if value.kind == "input":
            got: Kind | None = inputs[value.name].type
        else:
            operation = OPERATIONS.get(spec.stages[value.name].op)
            got = operation.output(value.output) if operation else None
        if value.kind == "input" and inputs[value.name].many and wanted not in ("any", "str"):
            return f"expected {wanted}, and {value} may be a list"
        if got in (None, "any", wanted) or (got, wanted) == ("int", "float"):
            return ""
        return f"expected {wanted}, and {value} is {got}"
    if isinstance(value, list):
        return f"expected {wanted}, got a list"
    if wanted not in PLAIN_KINDS:
        return f"expected {wanted}, a stage's output such as $stage.{wanted}; got {value!r}"
    try:
        of_type(wanted, value)
    except ValueError as error:
        return str(error)
    return ""


# Suffixes of weight files, and of pickled ones, which are refused.
WEIGHTS = ".safetensors"
FILES = (WEIGHTS, ".gguf")
PICKLED = (".ckpt", ".bin", ".pt", ".pth", ".pkl")

# File names of the configuration of a component or part in its folder.
_CONFIG_FILES = ("config.json", "scheduler_config.json")


def load(path: str | Path, trust: Iterable[str] = ()) -> Graph:
    """The graph in the YAML file ``path``. ``trust``: packages whose code it may run; the file's ``allow:`` only requests them.

    Raises GraphError with one line per problem: ``file:line: entry: what is wrong``.
    """
    document = read_document(Path(path))
    problems = Problems(document)
    try:
        spec = GraphSpec.model_validate(document.data)
    except ValidationError as error:
        note_shape(error, document.data, problems)
        problems.raise_if_any()
        raise  # pydantic reported a problem that `note_shape` did not add: a bug
    reader = _Reader(document, spec, problems, tuple(sorted(set(trust))))
    graph = reader.read()
    problems.raise_if_any()
    return graph


class _Reader:
    """Turns a spec of the right shape into a graph, and collects problems."""

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
            self.problems.add((*at, "exclude"), f"{name!r} is in keep too; leave one of them out")
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
            self.problems.add(("stages", cycle[0]), f"stages form a cycle: {around}; remove one of these references")
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
            self.problems.add((*at, "optional"), f"{name!r} has a default, so it may be left out anyway: remove one of them")
        elif spec.optional:
            return declared
        elif not required and sizes:
            self.problems.add((*at, "default"), f"{name!r} is {AN[spec.type]}, which every run passes: leave the default out")
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
            backing_store=tuple(spec.backing_store or ()),
            loras=tuple(Lora(self._file((*at, "loras", i), item), item.scale) for i, item in enumerate(spec.loras)),
            ip_adapters=tuple(
                IpAdapter(self._file((*at, "ip_adapters", i), item), item.scale) for i, item in enumerate(spec.ip_adapters)
            ),
            variant=spec.variant or (self.spec.variant or "" if spec.source is None else ""),
            gguf=self._gguf(at, spec),
            where=self.document.where(at),
        )

    def _gguf(self, at: Location, spec: ComponentSpec) -> str:
        """The GGUF file of a component, whose header is read for planning; empty where there is none."""
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

    def _config(self, at: Location, config: str | dict[str, Any] | None, source: str | None) -> dict[str, Any] | None:
        """The configuration in ``config``, or else in the folder of a local source; None where there is none on this machine."""
        if isinstance(config, dict):
            try:
                return dict(json.loads(json.dumps(config, sort_keys=True, allow_nan=False)))
            except (TypeError, ValueError) as error:
                self.problems.add(at, f"holds a value that is not JSON: {error}")
                return {}
        files = [self.folder / config] if config else _config_files(source)
        for file in files:
            if config or file.is_file():
                try:
                    return read_json(file)
                except GraphError as error:
                    self.problems.add(at, str(error))
                    return {}
        return None

    def _own_source(self, at: Location, own: str | None, revision: str | None) -> str | None:
        """The source of the component or part ``at``: its own, else its folder in the graph's source.

        A graph's source that is a single file is the source of all components and of no part.
        """
        if own is not None:
            return self._source((*at, "source"), own, revision)
        if revision is not None:
            self.problems.add((*at, "revision"), "needs a source: give source: too")
        if not self.spec.source:
            return None
        whole = self._source((), self.spec.source, self.spec.revision)
        if whole.endswith(WEIGHTS):
            return whole if at[0] == "components" else None
        return f"{whole}/{at[1]}"

    def _source(self, at: Location, text: str, revision: str | None) -> str:
        """A hub path with its revision, or the absolute path of a folder or file, which is relative to the graph file.

        Problems are added for the entry ``at``, unless that is ().
        """
        text = text.rstrip("/") or text
        path = self.folder / Path(text).expanduser()
        parts = text.split("/")
        local = text.startswith((".", "/", "~")) or len(parts) < 2 or (len(parts) == 2 and text.endswith(FILES)) or path.exists()
        problem = ""
        if text.endswith(PICKLED):
            problem = "is pickled, and nothing is unpickled: convert it to safetensors"
        elif local and revision is not None:
            problem = f"{path} is on this machine, and only a repository has revisions: leave revision: out"
        elif not local and revision is not None and "@" in text:
            problem = "has a revision of its own: leave revision: out"
        if problem and at:
            self.problems.add(at, problem)
        if local:
            return str(path.resolve())
        owner, repository, *inside = parts
        pinned = f"{repository}@{revision.replace('/', '%2F')}" if revision is not None else repository
        return "/".join((owner, pinned, *inside))


def _config_files(source: str | None) -> list[Path]:
    return [Path(source) / name for name in _CONFIG_FILES] if source is not None and Path(source).is_absolute() else []

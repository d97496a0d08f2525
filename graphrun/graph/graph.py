"""A pipeline as a DAG of stages, with inputs, components (modules with weights), parts (without
weights) and outputs.

Declares what is computed, not where or when. Pure: no YAML, no torch, no devices.

    inputs --> encode --embeds--> denoise --latents--> decode --> outputs
                 |                   |                   |
              text_encoder       transformer            vae        components
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graphrun.errors import InputError
from graphrun.graph import media
from graphrun.graph.ops import Operation, operation
from graphrun.graph.values import Input, did_you_mean, fit, strings
from graphrun.limits import require
from graphrun.reading import opened

if TYPE_CHECKING:
    import networkx

DEFAULT_ALLOW = ("diffusers", "transformers")
HEADER_BYTES = 100_000_000  # the longest header that safetensors reads (its MAX_HEADER_SIZE)

# The prompt of plans without one: texts are padded to a fixed length, so that no size depends on
# it.
PLANNING_TEXT = "a photo"


@dataclass(frozen=True, slots=True)
class Reference:
    """``$prompt`` is ``Reference("input", "prompt", "")``, ``$encode.embeds`` is
    ``Reference("stage", "encode", "embeds")``."""

    kind: Literal["input", "stage"]
    name: str
    output: str = ""

    def __str__(self) -> str:
        return f"${self.name}.{self.output}" if self.output else f"${self.name}"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA or an IP-Adapter: the absolute path of its file, and the factor of its weight
    difference or of its image prompts."""

    file: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Component:
    """A module with weights.

    ``source`` is the folder, safetensors file or hub path (``owner/repo@revision/subfolder``) of
    this component; None: random weights made from ``seed``. ``variant`` selects among a folder's
    files (``fp16``); ``gguf`` is the file of precision gguf. ``loras`` are fused into the weights
    of both. ``config`` is the class's configuration if ``has_config``; ``{}`` means the
    constructor's defaults. ``precision``: the first is the default, the others must be allowed.
    ``backing_store``: the kinds that may hold the master copy; empty: any that can. ``compile``:
    ``blocks`` asks for compiled blocks. ``where`` is ``file:line``.
    """

    name: str
    class_path: str
    source: str | None
    config: dict[str, Any]
    has_config: bool
    dtype: str
    precision: tuple[str, ...]
    seed: int = 0
    backing_store: tuple[str, ...] = ()
    loras: tuple[Adapter, ...] = ()
    variant: str = ""
    gguf: str = ""
    ip_adapters: tuple[Adapter, ...] = ()
    compile: str = ""
    where: str = field(default="", compare=False)

    def source_in(self, precision: str) -> str | None:
        """The source of its weights in ``precision``; None: they are random."""
        return self.gguf or None if precision == "gguf" else self.source

    def permission(self, precision: str, device: str = "device") -> str | None:
        """What a caller must allow before a plan holds the component in ``precision`` and computes
        on ``device`` (``device``, ``cpu``): a precision, ``cpu``, or "" for nothing. None: the
        graph does not list it."""
        if precision not in self.precision or (device == "cpu" and precision != self.precision[0]):
            return None
        return "cpu" if device == "cpu" else "" if precision == self.precision[0] else precision

    def is_compiled(self, allow: Collection[str]) -> bool:
        """Whether a run compiles its blocks: the graph asks for it, and it is in ``allow``."""
        return bool(self.compile) and "compile" in allow


@dataclass(frozen=True, slots=True)
class Part:
    """An object without weights that the pipeline's code needs: a tokenizer, a scheduler.
    ``source`` as for a `Component`."""

    name: str
    class_path: str
    config: dict[str, Any]
    has_config: bool = False
    file: Path | None = None
    source: str | None = None
    where: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline class with constructor arguments. ``members``: its name for a component or part ->
    the graph's, None for none. ``program``: any class of a trusted package, whose objects are made
    of attributes."""

    class_path: str
    config: Mapping[str, Any]
    members: Mapping[str, str | None] = field(default_factory=dict)
    where: str = field(default="", compare=False)
    program: bool = False

    @property
    def content(self) -> list[Any]:
        """All of it but where it is declared."""
        return [self.class_path, self.config, self.members]

    def named(self, things: Mapping[str, Any]) -> dict[str, Any]:
        """``things`` of the graph (components or parts) under the pipeline's names too."""
        own = {
            name: things[of] for name, of in self.members.items() if of is not None and of in things
        }
        return {
            **{name: thing for name, thing in things.items() if name not in self.members},
            **own,
        }


@dataclass(frozen=True, slots=True)
class Stage:
    """One op with its arguments (literals, references, lists of them) and the components it uses.

    ``options``: alternatives that a plan may choose, such as ``tiling``. ``outputs``: the names of
    its outputs; of an op that is ``open``, those that the graph reads. ``pipeline``: which of the
    graph's further pipelines it belongs to; "": the graph's own. ``method``: what of the pipeline a
    call stage calls. ``for_each``: the argument whose list it takes item by item; "": none.
    """

    name: str
    op: str
    uses: tuple[str, ...]
    arguments: Mapping[str, Any]
    where: str = field(default="", compare=False)
    options: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    pipeline: str = ""
    method: str = "__call__"
    for_each: str = ""

    @property
    def operation(self) -> Operation:
        """The signature of its op."""
        found = operation(self.op)
        assert found is not None
        return found

    @property
    def references(self) -> tuple[Reference, ...]:
        """The references among the arguments, in the order of the file."""
        return tuple(_references(list(self.arguments.values())))

    def refuse_large(self, inputs: Mapping[str, Any]) -> None:
        """Raises InputError for sizes and steps above the limits: pipelines compute tables of their
        sizes on the host, or loop."""
        given = {
            name: inputs.get(value.name)
            if isinstance(value, Reference) and value.kind == "input"
            else value
            for name, value in self.arguments.items()
        }
        numbers = {name: value for name, value in given.items() if isinstance(value, int)}
        for name, value in numbers.items():
            if name.endswith("steps"):
                require("steps", value, f"stages.{self.name}: {name} is {value:,}", self.where)
        height, width = numbers.get("height", 1), numbers.get("width", 1)
        require(
            "pixels",
            height * width,
            f"stages.{self.name}: {width} x {height} are {height * width:,} pixels",
            self.where,
        )

    def permission(self, option: str) -> str | None:
        """What a caller must allow before a plan runs the stage with ``option``; "": nothing. None:
        the graph does not list it."""
        return self.operation.options[option] if option in self.options else None


@dataclass(frozen=True, slots=True)
class Directives:
    """Placement that the user demands of every plan.

    ``keep``: components that stay on the device from their first use to the end; ``exclude``:
    components that are always streamed, with no block kept on the device; ``pin``: components whose
    backing store is page-locked; ``reserve_bytes``: bytes of the VRAM budget left to other
    programs.
    """

    keep: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    reserve_bytes: int = 0
    pin: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """A pipeline ready to be planned. ``stages`` are in topological order, ties in the order of the
    file.

    ``trust``: packages of which it may name any class; only the caller sets it, never the file.
    ``where`` is the ``file:line`` of its pipeline.
    """

    name: str
    path: Path | None
    pipeline: str
    source: str | None
    pipeline_config: dict[str, Any]
    trust: tuple[str, ...]
    inputs: Mapping[str, Input]
    components: Mapping[str, Component]
    parts: Mapping[str, Part]
    stages: tuple[Stage, ...]
    outputs: Mapping[str, Reference]
    directives: Directives = Directives()
    precomputed: tuple[
        Reference, ...
    ] = ()  # stage outputs that a run gets ready-made, in place of these stages
    # further ones, which stages name
    pipelines: Mapping[str, Pipeline] = field(default_factory=dict)
    fps: float | None = None  # frame rate of video files; None: from the pipeline's arguments
    code: str = field(default="", compare=False)  # where its packages are to be got, for people
    where: str = field(default="", compare=False)
    # Meta modules that nothing uses now, for the next run (`graphrun.modules.build`); a graph and
    # its parts share them.
    spare: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def pipeline_called(self, name: str) -> Pipeline:
        """The further pipeline called ``name``; "": its own."""
        if name:
            return self.pipelines[name]
        program = any(stage.method != "__call__" for stage in self.stages if not stage.pipeline)
        return Pipeline(self.pipeline, self.pipeline_config, where=self.where, program=program)

    def component(self, name: str) -> Component:
        """The component called ``name``. Raises KeyError."""
        return self.components[name]

    def stage(self, name: str) -> Stage:
        """The stage called ``name``. Raises KeyError."""
        return {s.name: s for s in self.stages}[name]

    def kinds(self) -> dict[str, str]:
        """The kind of each output: ``image``, ``video``, ``audio``, ``latents``, ``embeds``, or
        ``any``. Pictures that are made of the frames of a video are a video."""
        found: dict[str, str] = {
            name: self.stage(of.name).operation.output(of.output) or "any"
            for name, of in self.outputs.items()
        }
        if self.list_input and self.inputs[self.list_input].type == "video":
            found |= {
                name: "video"
                for name, of in self.outputs.items()
                if found[name] == "image" and self.stage(of.name).for_each
            }
        return found

    @property
    def list_input(self) -> str:
        """The input whose items stages take one by one (``for_each``); "" where there is none."""
        lists = (stage.arguments[stage.for_each] for stage in self.stages if stage.for_each)
        return next((of.name for of in lists if of.kind == "input"), "")

    def per_item(self) -> Graph:
        """The graph for one item of its `list_input`, which then is the input's value; itself where
        there is none."""
        if not (name := self.list_input):
            return self
        stages = tuple(replace(stage, for_each="") for stage in self.stages)
        return replace(self, inputs={**self.inputs, name: self.inputs[name].item}, stages=stages)

    def for_first(self, inputs: Mapping[str, Any]) -> tuple[Graph, Mapping[str, Any]]:
        """The graph `per_item`, and ``inputs`` with the first item of the list. Raises InputError
        for a list that the graph refuses."""
        name = self.list_input
        if name and name in inputs:
            try:
                given = fit(self.inputs[name], inputs[name], text=True)
            except ValueError as error:
                raise InputError(f"input {name!r}: {error}") from error
            inputs = {**inputs, name: self.inputs[name].items(given)[0]}
        return self.per_item(), inputs

    def refuse_list(self) -> None:
        """Raises InputError where stages take the items of a list one by one, for what runs a graph
        once."""
        if name := self.list_input:
            what = (
                f"stages take the items of ${name} one by one (for_each), each in a run of its own"
            )
            raise InputError(
                f"{self.name}: {what}: use run_many, or graph.per_item() for the graph of one item"
            )

    def producers(self, name: str) -> tuple[str, ...]:
        """Names of the stages whose outputs the stage ``name`` reads, each once."""
        return tuple(
            dict.fromkeys(r.name for r in self.stage(name).references if r.kind == "stage")
        )

    def to_networkx(self, estimate: Mapping[str, Any] | None = None) -> networkx.DiGraph:
        """The graph as a `networkx.DiGraph`; nodes, edges and attributes are as `graphrun.graph.nx`
        lists them.

        ``estimate``, as `graphrun.survey` returns it, adds bytes, parameters and seconds.
        """
        from graphrun.graph.nx import to_networkx

        return to_networkx(self, estimate)

    def resolve(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A value of the declared type for every input of the graph: from ``inputs``, else the
        default.

        Strings are converted, so that values may come from a command line. Raises InputError with
        one line per problem: an unknown name, a missing required input, a wrong type, a value out
        of range.
        """
        return self._resolve(inputs, planning=False)

    def for_planning(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Like `resolve`, with placeholders for missing required inputs.

        A text becomes ``"a photo"``: sizes do not depend on it. An image, mask, video or audio
        becomes a blank one of the declared size; a mask takes the size of an image input that is
        present.
        """
        return self._resolve(inputs, planning=True)

    def _resolve(self, inputs: Mapping[str, Any], *, planning: bool) -> dict[str, Any]:
        problems = [
            f"unknown input {name!r}{did_you_mean(name, self.inputs)}"
            for name in inputs
            if name not in self.inputs
        ]
        values: dict[str, Any] = dict.fromkeys(self.inputs)
        blank: list[Input] = []
        for name, declared in self.inputs.items():
            if name in inputs:
                try:
                    values[name] = fit(declared, inputs[name], text=True)
                except ValueError as error:
                    problems.append(f"input {name!r}: {error}")
            elif not declared.required:
                values[name] = declared.default
            elif planning and declared.sizes:
                blank.append(declared)
            elif planning and declared.type == "str":
                values[name] = PLANNING_TEXT
            elif declared.type in media.AN:
                problems.append(
                    f"input {name!r} is missing; it is {media.AN[declared.type]}: give a file"
                )
            else:
                problems.append(
                    f"input {name!r} is missing; it is a {declared.type} and has no default"
                )
        if problems:
            raise InputError("\n".join(problems))
        for stage in self.stages:
            stage.refuse_large(values)
        images = (
            media.size_of(values[name])
            for name, declared in self.inputs.items()
            if declared.type == "image"
        )
        size = next(filter(None, images), None)
        for declared in blank:
            sizes = {
                name: values[of] if isinstance(of, str) else of
                for name, of in declared.sizes.items()
            }
            if declared.type == "mask" and size is not None:
                sizes |= {"width": size[0], "height": size[1]}
            values[declared.name] = media.blank(declared.type, sizes)
        return values

    def directed(
        self,
        keep: Iterable[str] = (),
        exclude: Iterable[str] = (),
        reserve_bytes: int | None = None,
        pin: Iterable[str] = (),
    ) -> Graph:
        """The same graph with more directives; ``reserve_bytes`` takes the place of the graph's
        own.

        Raises InputError for unknown components, and for one that is in both ``keep`` and
        ``exclude``.
        """
        own = self.directives
        pairs = ((own.keep, keep), (own.exclude, exclude), (own.pin, pin))
        kept, excluded, pinned = (
            tuple(dict.fromkeys((*mine, *strings(more)))) for mine, more in pairs
        )
        problems = [
            f"{verb} {name}: no such component{did_you_mean(name, self.components)}"
            for verb, names in (("keep", kept), ("exclude", excluded), ("pin", pinned))
            for name in names
            if name not in self.components
        ]
        problems += [
            f"keep and exclude {name}: leave one of them out" for name in kept if name in excluded
        ]
        if problems:
            raise InputError("\n".join(problems))
        reserve = own.reserve_bytes if reserve_bytes is None else reserve_bytes
        return replace(self, directives=Directives(kept, excluded, reserve, pinned))

    def allowed(self, names: Iterable[str]) -> tuple[str, ...]:
        """``names`` of allowed changes of the output, sorted; ``precision`` means every further
        precision that the graph lists.

        Raises InputError for a name that means nothing in this graph.
        """
        precisions = {
            precision
            for component in self.components.values()
            for precision in component.precision[1:]
        }
        options = {
            stage.permission(option) or "" for stage in self.stages for option in stage.options
        } - {""}
        compiled = (
            {"compile"}
            if any(component.compile for component in self.components.values())
            else set[str]()
        )
        known = sorted({*precisions, *options, *compiled, "cpu"})
        asked = [name.strip() for text in strings(names) for name in text.split(",")]
        if unknown := [name for name in asked if name not in known and name != "precision"]:
            raise InputError(
                f"allow {', '.join(unknown)}: this graph knows {', '.join((*known, 'precision'))}"
            )
        return tuple(
            sorted({*asked, *(precisions if "precision" in asked else ())} - {"precision"})
        )

    def until(self, name: str | None) -> Graph:
        """The graph that ends with the stage ``name``: the stages it needs, the inputs these read,
        and all outputs of ``name``. Without a name, the graph itself.

        Components and parts stay, since pipelines read sizes even from those that they do not call.
        Directives stay for components that are used. Raises InputError where there is no such
        stage.
        """
        if not name:
            return self
        stages = {stage.name: stage for stage in self.stages}
        if name not in stages:
            raise InputError(f"until {name}: no such stage{did_you_mean(name, stages)}")
        kept = self._needed({name})
        read = {
            reference.name
            for stage in kept
            for reference in stage.references
            if reference.kind == "input"
        }
        read |= {of for i in read for of in self.inputs[i].sizes.values() if isinstance(of, str)}
        made = {Reference("stage", name, output) for output in stages[name].outputs}
        outputs = {key: reference for key, reference in self.outputs.items() if reference in made}
        outputs |= {of.output: of for of in sorted(made - set(outputs.values()), key=str)}
        return replace(
            self._of(kept),
            inputs={key: value for key, value in self.inputs.items() if key in read},
            outputs=outputs,
        )

    def with_precomputed(self, names: Iterable[str]) -> Graph:
        """The graph in which outputs of the stages ``names`` are precomputed: without these stages
        and those only they need.

        All inputs stay. Raises InputError where there is no such stage, or no stage would remain.
        """
        stages, done = {stage.name: stage for stage in self.stages}, set(strings(names))
        if unknown := sorted(done - stages.keys()):
            raise InputError(
                f"precomputed {unknown[0]}: no such stage{did_you_mean(unknown[0], stages)}"
            )
        if not done:
            return self
        kept = self._needed({reference.name for reference in self.outputs.values()}, done)
        if not kept:
            raise InputError(f"precomputed {', '.join(sorted(done))}: no stage is left to run")
        read = dict.fromkeys(
            reference for stage in kept for reference in stage.references if reference.name in done
        )
        asked = (reference for reference in self.outputs.values() if reference.name in done)
        return replace(
            self._of(kept), precomputed=tuple(sorted({*self.precomputed, *read, *asked}, key=str))
        )

    def part(self, names: Iterable[str]) -> Graph:
        """The graph with only the stages ``names``: what they read of others is precomputed, what
        others read is an output."""
        chosen = set(names)
        kept = tuple(stage for stage in self.stages if stage.name in chosen)
        read = {
            r
            for stage in kept
            for r in stage.references
            if r.kind == "stage" and r.name not in chosen
        }
        wanted = {
            r
            for stage in self.stages
            if stage.name not in chosen
            for r in stage.references
            if r.name in chosen
        }
        outputs = {
            name: reference for name, reference in self.outputs.items() if reference.name in chosen
        }
        outputs |= {str(reference)[1:]: reference for reference in sorted(wanted, key=str)}
        return replace(self._of(kept), precomputed=tuple(sorted(read, key=str)), outputs=outputs)

    def _needed(self, wanted: set[str], done: Collection[str] = ()) -> tuple[Stage, ...]:
        """The stages ``wanted`` and those whose outputs they need, without those in ``done`` and
        what only these need."""
        needed = wanted.difference(done)
        for stage in reversed(self.stages):  # consumers before producers
            if stage.name in needed:
                needed.update(name for name in self.producers(stage.name) if name not in done)
        return tuple(stage for stage in self.stages if stage.name in needed)

    def _of(self, kept: tuple[Stage, ...]) -> Graph:
        """The graph with only the stages ``kept``, and the directives for components they use."""
        used, own = {component for stage in kept for component in stage.uses}, self.directives
        keep, exclude, pin = (
            tuple(c for c in names if c in used) for names in (own.keep, own.exclude, own.pin)
        )
        return replace(
            self, stages=kept, directives=Directives(keep, exclude, own.reserve_bytes, pin)
        )

    def without_sources(self) -> Graph:
        """The same graph with random weights, to be run without a checkpoint.

        Raises InputError naming a component whose config is only in its source.
        """
        for component in self.components.values():
            if not component.has_config:
                raise InputError(
                    f"components.{component.name}: random weights need a config", component.where
                )
        return replace(
            self,
            source=None,
            components={
                name: replace(component, source=None, gguf="")
                for name, component in self.components.items()
            },
            parts={
                name: replace(part, source=None) if part.file or part.has_config else part
                for name, part in self.parts.items()
            },
        )

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of SHA-256 over what sizes and times depend on.

        These are classes, configurations, dtypes, stages and arguments; not paths, comments, key
        order, seeds or sources of weights, and not directives, which are part of the problem.
        """
        content = {
            "pipeline": [self.pipeline, self.pipeline_config],
            **(
                {"pipelines": {name: of.content for name, of in self.pipelines.items()}}
                if self.pipelines
                else {}
            ),
            "inputs": {
                i.name: [
                    i.type,
                    i.default,
                    i.required,
                    i.multiple_of,
                    i.minimum,
                    i.maximum,
                    *([i.many, i.sizes] if i.sizes else []),
                ]
                for i in self.inputs.values()
            },
            "components": {
                c.name: [
                    c.class_path,
                    c.config if c.has_config else c.source,
                    c.dtype,
                    *c.precision,
                    *([c.backing_store] if c.backing_store else []),
                    *([c.compile] if c.compile else []),
                    *(_header_digest(Path(adapter.file)) for adapter in c.ip_adapters),
                ]
                for c in self.components.values()
            },
            "parts": {
                p.name: [p.class_path, p.config, p.file and _content_digest(p.file)]
                for p in self.parts.values()
            },
            "stages": {
                s.name: [
                    s.op,
                    s.uses,
                    {k: _plain(v) for k, v in s.arguments.items()},
                    *([s.options] if s.options else []),
                    *([s.pipeline] if s.pipeline else []),
                    *([s.method] if s.method != "__call__" else []),
                    *([["for_each", s.for_each]] if s.for_each else []),
                ]
                for s in self.stages
            },
            "outputs": {name: str(reference) for name, reference in self.outputs.items()},
            **(
                {"precomputed": [str(reference) for reference in self.precomputed]}
                if self.precomputed
                else {}
            ),
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _content_digest(path: Path) -> str:
    """SHA-256 of the file's content."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _header_digest(path: Path) -> str:
    """SHA-256 of the header of a safetensors file: names, shapes and dtypes of its tensors."""
    with opened(path) as file:
        return hashlib.sha256(
            file.read(min(HEADER_BYTES, int.from_bytes(file.read(8), "little")))
        ).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return {"$": str(value)} if isinstance(value, Reference) else value


def _references(value: Any) -> Iterator[Reference]:
    if isinstance(value, list):
        for item in value:
            yield from _references(item)
    elif isinstance(value, Reference):
        yield value

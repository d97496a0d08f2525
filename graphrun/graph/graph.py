"""A pipeline as a DAG of stages: what is computed, not where or when.

A graph has inputs, components (modules with weights), parts (objects without weights), stages and
outputs. This module reads no YAML and imports neither torch nor devices.

    inputs --> encode --embeds--> denoise --latents--> decode --> outputs
                 |                   |                   |
              text_encoder       transformer            vae        components
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrun.errors import InputError
from graphrun.graph import media
from graphrun.graph.parts import Component, Directives, Part, Pipeline, Reference, Stage
from graphrun.graph.precisions import CLASSES, PLANNED_ONLY
from graphrun.graph.values import Input, did_you_mean, fit, listed_names, strings
from graphrun.reading import open_regular, safetensors_header

if TYPE_CHECKING:
    import networkx

DEFAULT_ALLOW = ("diffusers", "transformers")
HALF_DTYPES = ("bfloat16", "float16")
FLOAT_DTYPES = (*HALF_DTYPES, "float32")
HEADER_BYTES = 100_000_000  # the longest header that safetensors reads (its MAX_HEADER_SIZE)

# the prompt for planning without one; texts are padded, so no size depends on it
PLANNING_TEXT = "a photo"


@dataclass(frozen=True, slots=True)
class Graph:
    """A pipeline ready to be planned.

    ``stages``: in topological order, ties in the order of the file. ``trust``: packages whose
    classes the graph may name; only the caller sets this, never the file. ``file_line``:
    ``file:line`` of the pipeline.
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
    # stage outputs that a run gets ready-made, in place of these stages
    precomputed: tuple[Reference, ...] = ()
    # further pipelines, which stages name
    pipelines: Mapping[str, Pipeline] = field(default_factory=dict)
    fps: float | None = None  # of video files; None: from the pipeline's arguments
    # (dtype of components in the file, dtype in its place)
    dtypes: tuple[tuple[str, str], ...] = ()
    absent: tuple[str, ...] = ()  # components of the file that are left out
    processes: int = 1  # that divide the sequence of transformers; each runs the whole graph
    code: str = field(default="", compare=False)  # for people: where to get the packages
    file_line: str = field(default="", compare=False)
    # unused meta modules, for the next run (`graphrun.modules.build`); a graph and its parts share
    # them
    spare: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def pipeline_called(self, name: str) -> Pipeline:
        """Return the further pipeline called ``name``; for "", the graph's own pipeline."""
        if name:
            return self.pipelines[name]
        program = any(stage.method != "__call__" for stage in self.stages if not stage.pipeline)
        return Pipeline(
            self.pipeline, self.pipeline_config, file_line=self.file_line, program=program
        )

    def component(self, name: str) -> Component:
        return self.components[name]

    def stage(self, name: str) -> Stage:
        return {s.name: s for s in self.stages}[name]

    def kinds(self) -> dict[str, str]:
        """Return the kind of each output: ``image``, ``video``, ``audio``, ``latents``, ``embeds``
        or ``any``. Images that stages make from the frames of a video are a video."""
        kinds: dict[str, str] = {
            name: self.stage(reference.name).operation.output(reference.output) or "any"
            for name, reference in self.outputs.items()
        }
        if self.list_input and self.inputs[self.list_input].type == "video":
            kinds |= {
                name: "video"
                for name, reference in self.outputs.items()
                if kinds[name] == "image" and self.stage(reference.name).for_each
            }
        return kinds

    @property
    def list_input(self) -> str:
        """The input whose items stages process one by one (``for_each``); "" if there is none."""
        lists = (stage.arguments[stage.for_each] for stage in self.stages if stage.for_each)
        return next((reference.name for reference in lists if reference.kind == "input"), "")

    def per_item(self) -> Graph:
        """Return the graph whose `list_input`, if any, takes one item instead of the list."""
        if not (name := self.list_input):
            return self
        stages = tuple(replace(stage, for_each="") for stage in self.stages)
        return replace(self, inputs={**self.inputs, name: self.inputs[name].item}, stages=stages)

    def for_first(self, inputs: Mapping[str, Any]) -> tuple[Graph, Mapping[str, Any]]:
        """Return the graph `per_item`, and ``inputs`` with only the first item of the list. Raises
        InputError for a list that the graph refuses."""
        name = self.list_input
        if name and name in inputs:
            try:
                value = fit(self.inputs[name], inputs[name], text=True)
            except ValueError as error:
                raise InputError(f"input {name!r}: {error}") from error
            inputs = {**inputs, name: self.inputs[name].items(value)[0]}
        return self.per_item(), inputs

    def refuse_list(self) -> None:
        """Raise InputError if stages process a list item by item, which takes one run per item."""
        if name := self.list_input:
            problem = (
                f"stages take the items of ${name} one by one (for_each), each in a run of its own"
            )
            raise InputError(
                f"{self.name}: {problem}: use run_many, or graph.per_item() for the graph of one "
                "item"
            )

    def divided(self, processes: int) -> Graph:
        """Return the graph as each of ``processes`` runs it, which divide the sequence."""
        return replace(self, processes=processes, spare={})

    def producers(self, name: str) -> tuple[str, ...]:
        """Return the names of the stages whose outputs the stage ``name`` reads, each once."""
        return tuple(
            dict.fromkeys(r.name for r in self.stage(name).references if r.kind == "stage")
        )

    def to_networkx(self, estimate: Mapping[str, Any] | None = None) -> networkx.DiGraph:
        """Return the graph as a `networkx.DiGraph` (nodes and attributes: `graphrun.graph.nx`).
        ``estimate``, as `graphrun.survey` returns it, adds bytes, parameters and seconds."""
        from graphrun.graph.nx import to_networkx

        return to_networkx(self, estimate)

    def resolve(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a value for every input of the graph: from ``inputs``, else the default.

        Strings are converted to the input's type, so values may come from a command line. None
        omits an optional input, so the result may be resolved again. Raises InputError with one
        line per problem: an unknown name, a missing required input, a wrong type, a value out of
        range.
        """
        return self._resolve(inputs, planning=False)

    def for_planning(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of `resolve`, with placeholders for missing required inputs.

        A text becomes ``"a photo"``, because sizes do not depend on the text. An image, mask, video
        or audio becomes a blank one of the size in the graph file; a mask takes the size of an
        image input that is present.
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
        for name, definition in self.inputs.items():
            optional = not definition.required and definition.default is None
            if name in inputs and not (optional and inputs[name] is None):
                try:
                    values[name] = fit(definition, inputs[name], text=True)
                except ValueError as error:
                    problems.append(f"input {name!r}: {error}")
            elif not definition.required:
                values[name] = definition.default
            elif planning and definition.sizes:
                blank.append(definition)
            elif planning and definition.type == "str":
                values[name] = PLANNING_TEXT
            elif definition.type in media.AN:
                problems.append(
                    f"input {name!r} is missing; it is {media.AN[definition.type]}: give a file"
                )
            else:
                problems.append(
                    f"input {name!r} is missing; it is a {definition.type} and has no default"
                )
        if problems:
            raise InputError("\n".join(problems))
        for stage in self.stages:
            stage.refuse_large(values)
        images = (
            media.size_of(values[name])
            for name, definition in self.inputs.items()
            if definition.type == "image"
        )
        size = next(filter(None, images), None)
        for definition in blank:
            sizes = {
                name: values[measure] if isinstance(measure, str) else measure
                for name, measure in definition.sizes.items()
            }
            if definition.type == "mask" and size is not None:
                sizes |= {"width": size[0], "height": size[1]}
            values[definition.name] = media.blank(definition.type, sizes)
        return values

    def directed(
        self,
        keep: Iterable[str] = (),
        exclude: Iterable[str] = (),
        reserve_bytes: int | None = None,
        pin: Iterable[str] = (),
    ) -> Graph:
        """Return the graph with more directives; ``reserve_bytes`` replaces the graph's reserve.

        Raises InputError for unknown components, and for a component in both ``keep`` and
        ``exclude``.
        """
        directives = self.directives
        pairs = ((directives.keep, keep), (directives.exclude, exclude), (directives.pin, pin))
        keep_names, excluded, pinned = (
            tuple(dict.fromkeys((*graph_names, *strings(further_names))))
            for graph_names, further_names in pairs
        )
        problems = [
            f"{verb} {name}: no such component{did_you_mean(name, self.components)}"
            for verb, names in (("keep", keep_names), ("exclude", excluded), ("pin", pinned))
            for name in names
            if name not in self.components
        ]
        problems += [
            f"keep and exclude {name}: leave one of them out"
            for name in keep_names
            if name in excluded
        ]
        if problems:
            raise InputError("\n".join(problems))
        reserve = directives.reserve_bytes if reserve_bytes is None else reserve_bytes
        return replace(self, directives=Directives(keep_names, excluded, reserve, pinned))

    @property
    def permissions(self) -> tuple[str, ...]:
        """The changes of the output that a caller may allow, sorted: precisions, options of stages,
        ``compile`` and ``cpu``."""
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
        return tuple(sorted({*precisions, *options, *compiled, "cpu"}))

    def allowed(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return ``names`` of allowed changes of the output, sorted.

        ``precision`` stands for every further precision that the graph lists and graphrun runs,
        ``4bit`` to ``8bit`` for those of about so many bits. Raises InputError for a name without a
        meaning in this graph.
        """
        precisions = {
            precision
            for component in self.components.values()
            for precision in component.precision[1:]
        }
        valid_names = self.permissions
        classes = {
            name: members
            for name, formats in CLASSES.items()
            if (members := precisions.intersection(formats))
        } | {"precision": precisions.difference(PLANNED_ONLY)}
        requests = listed_names(names)
        if unknown := [name for name in requests if name not in (*valid_names, *classes)]:
            raise InputError(
                f"allow {', '.join(unknown)}: this graph knows "
                f"{', '.join((*valid_names, *classes))}"
            )
        members = {member for name in requests for member in classes.get(name, {name})}
        return tuple(sorted(members))

    def until(self, name: str | None) -> Graph:
        """Return the graph that ends with the stage ``name``; without a name, the graph itself.

        The result has the stages that ``name`` needs, the inputs they read, and all outputs of
        ``name``. Components and parts stay, because pipelines read sizes even from components that
        they do not call. Directives stay for used components. Raises InputError if there is no such
        stage.
        """
        if not name:
            return self
        stages = {stage.name: stage for stage in self.stages}
        if name not in stages:
            raise InputError(f"until {name}: no such stage{did_you_mean(name, stages)}")
        kept_stages = self._stages_for({name})
        input_names = {
            reference.name
            for stage in kept_stages
            for reference in stage.references
            if reference.kind == "input"
        }
        input_names |= {
            size
            for i in input_names
            for size in self.inputs[i].sizes.values()
            if isinstance(size, str)
        }
        stage_outputs = {Reference("stage", name, output) for output in stages[name].outputs}
        outputs = {
            key: reference for key, reference in self.outputs.items() if reference in stage_outputs
        }
        outputs |= {
            new.output: new for new in sorted(stage_outputs - set(outputs.values()), key=str)
        }
        return replace(
            self._with_stages(kept_stages),
            inputs={key: value for key, value in self.inputs.items() if key in input_names},
            outputs=outputs,
        )

    def without(self, names: Iterable[str]) -> Graph:
        """Return the graph without the components ``names``, for which pipelines get None.

        As with ``from_pretrained(text_encoder_3=None)``; the pipeline's code decides whether it
        works. Raises InputError for an unknown component, or if a stage uses no other one.
        """
        absent = set(strings(names))
        for name in sorted(absent):
            if name not in self.components:
                raise InputError(
                    f"without {name}: no such component{did_you_mean(name, self.components)}"
                )
        for stage in self.stages:
            if absent and absent.issuperset(stage.uses):
                raise InputError(
                    f"without {', '.join(stage.uses)}: the stage {stage.name} uses nothing else"
                )
        nones = dict.fromkeys(sorted(absent))
        graph = replace(
            self,
            absent=tuple(sorted({*self.absent, *absent})),
            components={n: item for n, item in self.components.items() if n not in absent},
            pipeline_config={**self.pipeline_config, **nones},
            pipelines={
                key: replace(
                    pipeline,
                    config={
                        **pipeline.config,
                        **{n: None for n, item in pipeline.members.items() if item in absent},
                        **{n: None for n in nones if n not in pipeline.members},
                    },
                )
                for key, pipeline in self.pipelines.items()
            },
        )
        stages = tuple(
            replace(stage, uses=tuple(n for n in stage.uses if n not in absent))
            for stage in self.stages
        )
        return graph._with_stages(stages)

    def with_precomputed(self, names: Iterable[str]) -> Graph:
        """Return the graph in which the outputs of the stages ``names`` are precomputed.

        These stages, and stages that only they need, are removed. All inputs stay. Raises
        InputError if there is no such stage, or if no stage would be left.
        """
        stages, precomputed_names = (
            {stage.name: stage for stage in self.stages},
            set(strings(names)),
        )
        if unknown := sorted(precomputed_names - stages.keys()):
            raise InputError(
                f"precomputed {unknown[0]}: no such stage{did_you_mean(unknown[0], stages)}"
            )
        if not precomputed_names:
            return self
        kept_stages = self._stages_for(
            {reference.name for reference in self.outputs.values()}, precomputed_names
        )
        if not kept_stages:
            raise InputError(
                f"precomputed {', '.join(sorted(precomputed_names))}: no stage is left to run"
            )
        stage_references = dict.fromkeys(
            reference
            for stage in kept_stages
            for reference in stage.references
            if reference.name in precomputed_names
        )
        output_references = (
            reference for reference in self.outputs.values() if reference.name in precomputed_names
        )
        return replace(
            self._with_stages(kept_stages),
            precomputed=tuple(
                sorted({*self.precomputed, *stage_references, *output_references}, key=str)
            ),
        )

    def part(self, names: Iterable[str]) -> Graph:
        """Return the graph with only the stages ``names``. Outputs of other stages that they read
        are precomputed; outputs that other stages read become outputs of the graph."""
        stage_names = set(names)
        stages = tuple(stage for stage in self.stages if stage.name in stage_names)
        input_references = {
            r
            for stage in stages
            for r in stage.references
            if r.kind == "stage" and r.name not in stage_names
        }
        output_references = {
            r
            for stage in self.stages
            if stage.name not in stage_names
            for r in stage.references
            if r.name in stage_names
        }
        outputs = {
            name: reference
            for name, reference in self.outputs.items()
            if reference.name in stage_names
        }
        outputs |= {
            str(reference)[1:]: reference for reference in sorted(output_references, key=str)
        }
        return replace(
            self._with_stages(stages),
            precomputed=tuple(sorted(input_references, key=str)),
            outputs=outputs,
        )

    def _stages_for(
        self, targets: set[str], precomputed_names: Collection[str] = ()
    ) -> tuple[Stage, ...]:
        """Return the stages ``targets`` and all stages that they need. Stages in
        ``precomputed_names``, and stages that only these need, are omitted."""
        stage_names = targets.difference(precomputed_names)
        for stage in reversed(self.stages):  # consumers before producers
            if stage.name in stage_names:
                stage_names.update(
                    name for name in self.producers(stage.name) if name not in precomputed_names
                )
        return tuple(stage for stage in self.stages if stage.name in stage_names)

    def _with_stages(self, stages: tuple[Stage, ...]) -> Graph:
        """Return the graph with only ``stages`` and the directives for their components."""
        component_names, directives = (
            {component for stage in stages for component in stage.uses},
            self.directives,
        )
        keep, exclude, pin = (
            tuple(c for c in names if c in component_names)
            for names in (directives.keep, directives.exclude, directives.pin)
        )
        return replace(
            self, stages=stages, directives=Directives(keep, exclude, directives.reserve_bytes, pin)
        )

    def in_dtype(self, dtype: str, replaced: Collection[str] = HALF_DTYPES) -> Graph:
        """Return the graph whose components compute in ``dtype`` where they did in ``replaced``.

        Like ``torch_dtype`` of diffusers' `from_pretrained`, but components in fp32 stay in fp32.
        Raises InputError for a dtype that components cannot have.
        """
        if dtype not in FLOAT_DTYPES:
            raise InputError(f"dtype {dtype!r} is not known; it is {', '.join(FLOAT_DTYPES)}")
        return self.in_dtypes({name: dtype for name in replaced if name != dtype})

    def in_dtypes(self, dtypes: Mapping[str, str]) -> Graph:
        """Return the graph whose components compute in ``dtypes[dtype]`` in place of a dtype."""
        names = dtypes.keys() & {component.dtype for component in self.components.values()}
        replacements = {name: dtypes.get(other, other) for name, other in self.dtypes}
        replacements |= {name: dtypes[name] for name in names}
        return replace(
            self,
            dtypes=tuple(sorted(replacements.items())),
            components={
                name: component.in_dtype(dtypes.get(component.dtype, component.dtype))
                for name, component in self.components.items()
            },
        )

    def without_sources(self) -> Graph:
        """Return the graph with random weights, which runs without a checkpoint. Raises InputError
        naming a component whose config exists only in its source."""
        for component in self.components.values():
            if not component.has_config:
                raise InputError(
                    f"components.{component.name}: random weights need a config",
                    component.file_line,
                )
        return replace(
            self,
            source=None,
            components={
                name: replace(component.without_checkpoints(), source=None, gguf="")
                for name, component in self.components.items()
            },
            parts={
                name: replace(part, source=None) if part.file or part.has_config else part
                for name, part in self.parts.items()
            },
        )

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of SHA-256 over everything that sizes and times depend on.

        Included: classes, configurations, dtypes, stages and arguments. Not included: paths,
        comments, key order, seeds, sources of weights with published checkpoints, and directives,
        which are part of the problem.
        """
        content = {
            "pipeline": [self.pipeline, self.pipeline_config],
            **(
                {"pipelines": {name: pipeline.content for name, pipeline in self.pipelines.items()}}
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
                    *([i.accepts_list, i.sizes] if i.sizes else []),
                ]
                for i in self.inputs.values()
            },
            "components": {
                c.name: [
                    c.class_path,
                    c.config if c.has_config else c.source,
                    c.dtype,
                    *c.without_checkpoints().precision,
                    *([c.backing_store] if c.backing_store else []),
                    *([c.compile] if c.compile else []),
                    *([] if c.keep_fp32 else ["no fp32"]),
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
            **({"processes": self.processes} if self.processes > 1 else {}),
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def require_graph(value: object, function: str, *other_types: type) -> None:
    """Raise InputError, which says what to type, if ``value`` is not a `Graph`.

    ``function``: the function that takes it. ``other_types``: what it takes, too.
    """
    if isinstance(value, (Graph, *other_types)):
        return
    if isinstance(value, (str, Path)):
        use = f"use graphrun.load({str(value)!r})"
    else:
        wrapper = "graphrun.from_pipeline(pipe)" if other_types else "graphrun.attach(pipe)"
        use = f"use graphrun.load; for a diffusers pipeline, {wrapper}"
    raise InputError(f"{function} takes a graph, not {type(value).__name__}: {use}")


def _content_digest(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _header_digest(path: Path) -> str:
    """Return the SHA-256 of a safetensors header: names, shapes and dtypes of its tensors."""
    with open_regular(path) as file:
        return hashlib.sha256(safetensors_header(file, HEADER_BYTES)[1]).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return {"$": str(value)} if isinstance(value, Reference) else value

"""Read the stages and outputs of a graph file, and how they are connected."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from graphlib import CycleError
from typing import Any

from graphrun.graph.document import Document, Location
from graphrun.graph.graph import DEFAULT_ALLOW
from graphrun.graph.ops import OPERATIONS, PLAIN_KINDS, ValueKind, operation
from graphrun.graph.order import order_stages
from graphrun.graph.parts import Reference, Stage
from graphrun.graph.schema import GraphSpec, StageSpec
from graphrun.graph.values import Input, did_you_mean, of_type, outside

# entries of an item (() is the item itself) that may be wrong because another was dropped
_DEPENDENT = ((), ("revision",), ("gguf",), ("precision",), ("for_each",))


class StageReader:
    """Turns the stages of a spec into those of a graph, and adds problems to its document."""

    def __init__(self, document: Document, spec: GraphSpec, trust: tuple[str, ...]) -> None:
        self.document, self.spec, self.trust = document, spec, trust
        self.folder = document.path.parent
        packages = spec.allow if spec.allow is not None else DEFAULT_ALLOW
        self.allow = dict.fromkeys((*(name for name in packages if name in DEFAULT_ALLOW), *trust))
        self.complete = not document.problems  # whether ``spec`` has all entries of the file
        # an entry was dropped, a reference names nothing, or a stage has an unknown op
        self.misspelled = not self.complete

    def add(self, location: Location, text: str) -> None:
        """Add a problem, unless it may follow from an entry that was dropped for its shape."""
        for wrong_location in self.document.wrong:
            if location[: len(wrong_location)] == wrong_location or (
                location[:2] == wrong_location[:2] and location[2:] in _DEPENDENT
            ):
                return
        self.document.add(location, text)

    def stage(self, name: str, spec: StageSpec, inputs: Mapping[str, Input]) -> Stage:
        location = ("stages", name)
        self.check_components((*location, "uses"), spec.uses)
        for index, component in enumerate(spec.uses):
            if component in spec.uses[:index] and component in self.spec.components:
                self.add((*location, "uses", index), f"{component!r} is given twice")
        arguments = {
            key: self._argument(value, (*location, "with", key))
            for key, value in spec.arguments.items()
        }
        signature = operation(spec.op)
        if signature is not None and signature.is_function:
            self.check_class((*location, "op"), spec.op)
        if signature is None:
            self.add(
                (*location, "op"), f"unknown op {spec.op!r}{did_you_mean(spec.op, OPERATIONS)}"
            )
            return Stage(name, spec.op, tuple(spec.uses), arguments)
        for key in signature.required:
            if key not in arguments:
                self.add(location, f"{spec.op} needs {key!r}; add it to with:")
        for key, value in arguments.items():
            kind = signature.argument(key)
            if kind is None:
                self.add(
                    (*location, "with", key),
                    f"{spec.op} has no argument {key!r}{did_you_mean(key, signature.arguments)}",
                )
                continue
            try:
                input_definitions = (
                    {name: definition.item for name, definition in inputs.items()}
                    if spec.for_each is not None
                    else inputs
                )
                arguments[key] = self._fitted(kind, value, input_definitions)
            except ValueError as error:
                self.add((*location, "with", key), str(error))
        for index, option in enumerate(spec.options):
            if option not in signature.options:
                option_names = ", ".join(signature.options) or "none"
                self.add(
                    (*location, "options", index),
                    f"{spec.op} has no option {option!r}; it has {option_names}",
                )
        outputs, pipeline = tuple(signature.outputs), spec.pipeline or ""
        if pipeline and signature.is_function:
            self.add((*location, "pipeline"), "a function belongs to no pipeline: leave it out")
        elif pipeline and pipeline not in self.spec.pipelines:
            self.add(
                (*location, "pipeline"),
                f"no such pipeline {pipeline!r}{did_you_mean(pipeline, self.spec.pipelines)}",
            )
        if spec.method is not None and spec.op != "call":
            self.add((*location, "method"), "only op: call calls a method: leave it out")
        file_line, method, list_name = (
            self.document.file_line(location),
            spec.method or "__call__",
            spec.for_each or "",
        )
        if list_name and not isinstance(arguments.get(list_name), Reference):
            problem = (
                "with: has no"
                if list_name not in arguments
                else "is no list: name an input, or an output of a stage with for_each, in"
            )
            self.add(
                (*location, "for_each"),
                f"{problem} {list_name}"
                f"{did_you_mean(list_name, arguments) if list_name not in arguments else ''}",
            )
            list_name = ""
        return Stage(
            name,
            spec.op,
            tuple(spec.uses),
            arguments,
            file_line,
            tuple(spec.options),
            outputs,
            pipeline,
            method,
            list_name,
        )

    def check_lists(self, inputs: Mapping[str, Input], stages: Mapping[str, Stage]) -> None:
        """Add problems for ``for_each`` without a list, and for lists read without ``for_each``."""
        lists = [
            (name, stage.arguments[stage.for_each])
            for name, stage in stages.items()
            if stage.for_each
        ]
        roots = [reference.name for _, reference in lists if reference.kind == "input"]
        for name, reference in lists:
            location = ("stages", name, "for_each")
            if (
                reference.kind == "stage"
                and reference.name in stages
                and not stages[reference.name].for_each
            ):
                self.add(
                    location,
                    f"{reference} is made once: for_each takes the items of an input, or what a "
                    "stage with for_each made of them",
                )
            elif (
                reference.kind == "input"
                and not inputs[reference.name].accepts_list
                and inputs[reference.name].type != "video"
            ):
                self.add(
                    location, f"{reference} is no list: add many: true to inputs.{reference.name}"
                )
            elif reference.kind == "input" and reference.name != roots[0]:
                self.add(
                    location,
                    f"another stage takes the items of ${roots[0]}, and a graph has one list: "
                    "make it a graph of its own",
                )
        for name, stage in stages.items() if roots else ():
            for reference in stage.references if not stage.for_each else ():
                if reference.name == roots[0] or (
                    reference.kind == "stage"
                    and reference.name in stages
                    and stages[reference.name].for_each
                ):
                    self.add(
                        ("stages", name),
                        f"{reference} is a list, whose items are taken one by one: add for_each: "
                        "to this stage too",
                    )

    def _argument(self, value: Any, location: Location) -> Any:
        """Return ``value`` with `Reference` objects in place of texts such as ``$prompt``. A text
        that names nothing stays, and replaces the list that it is in."""
        if isinstance(value, list):
            items = [self._argument(item, (*location, index)) for index, item in enumerate(value)]
            return next(
                (item for item in items if isinstance(item, str) and item.startswith("$")), items
            )
        return (
            self._reference(value, location)
            if isinstance(value, str) and value.startswith("$")
            else value
        )

    def _reference(self, text: str, location: Location) -> Reference | str:
        """Return the reference in ``text``; if it names nothing, add a problem, return ``text``."""
        name, dot, output = text[1:].partition(".")
        stage = self.spec.stages.get(name)
        signature = operation(stage.op) if stage else None
        self.misspelled |= dot != "" and signature is None
        if not dot and name in self.spec.inputs:
            return Reference("input", name)
        if dot and stage and (signature is None or signature.output(output) is not None):
            return Reference("stage", name, output)
        self.misspelled = True
        if dot and signature:
            self.add(
                location,
                f"stage {name!r} has no output {output!r}{did_you_mean(output, signature.outputs)}",
            )
        elif dot:
            self.add(location, f"no such stage {name!r}{did_you_mean(name, self.spec.stages)}")
        elif stage:
            example = next(iter(signature.outputs)) if signature else "output"
            self.add(
                location, f"{text} is a stage; say which of its outputs, such as {text}.{example}"
            )
        else:
            self.add(location, f"no such input {name!r}{did_you_mean(name, self.spec.inputs)}")
        return text

    def _fitted(self, kind: ValueKind, value: Any, inputs: Mapping[str, Input]) -> Any:
        """Return ``value`` as an argument of ``kind``. Raises ValueError if it cannot be one."""
        # a text with $ is already reported
        if kind == "any" or (isinstance(value, str) and value.startswith("$")):
            return value
        if isinstance(value, Reference):
            signature = (
                operation(self.spec.stages[value.name].op) if value.kind == "stage" else None
            )
            actual_kind: ValueKind | None = signature.output(value.output) if signature else None
            if value.kind == "input":
                actual_kind = inputs[value.name].type
                if inputs[value.name].accepts_list and kind != "str":
                    raise ValueError(f"expected {kind}, and {value} may be a list")
            if actual_kind not in (None, "any", kind) and (actual_kind, kind) != ("int", "float"):
                raise ValueError(f"expected {kind}, and {value} is {actual_kind}")
            return value
        if isinstance(value, (list, dict)):
            raise ValueError(
                f"expected {kind}, got a {'list' if isinstance(value, list) else 'mapping'}"
            )
        if kind not in PLAIN_KINDS:
            raise ValueError(
                f"expected {kind}, a stage's output such as $stage.{kind}; got {value!r}"
            )
        return of_type(kind, value)

    def outputs(self) -> dict[str, Reference]:
        outputs: dict[str, Reference] = {}
        for name, text in self.spec.outputs.items():
            location = ("outputs", name)
            if not text.startswith("$"):
                self.misspelled = True
                self.add(location, f"{text!r} is not a reference such as $decode.image")
            elif isinstance(reference := self._reference(text, location), Reference):
                outputs[name] = reference
                if reference.kind == "input":
                    self.add(
                        location,
                        f"{text} is an input; an output comes from a stage, such as $decode.image",
                    )
        return outputs

    def check_uses(
        self,
        inputs: Mapping[str, Input],
        stages: Mapping[str, Stage],
        references: Iterable[Reference],
    ) -> None:
        """Add a problem for every unused component and input, and every stage with unused outputs.

        Skipped if something is misspelled: that is reported already, and the intended entry may be
        in use.
        """
        component_names = {component for stage in stages.values() for component in stage.uses}
        for name in self.spec.components:
            if (
                self.complete
                and name not in component_names
                and component_names <= self.spec.components.keys()
            ):
                self.add(
                    ("components", name),
                    "no stage uses it; add it to uses: of a stage, or remove it",
                )
        if self.misspelled:
            return
        read_keys = {(r.kind, r.name) for r in references}
        sizes = [
            size
            for name, definition in inputs.items()
            if ("input", name) in read_keys
            for size in definition.sizes.values()
        ]
        for name in inputs:
            if ("input", name) not in read_keys and name not in sizes:
                self.add(("inputs", name), "no stage reads it; remove it, or use it")
        for name in stages:
            if ("stage", name) not in read_keys:
                self.add(("stages", name), "nothing reads its outputs; remove it, or use it")

    def ordered(self, stages: Mapping[str, Stage]) -> tuple[Stage, ...]:
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

    def check_components(self, location: Location, names: Iterable[str]) -> None:
        for index, name in enumerate(names):
            if name not in self.spec.components:
                self.add(
                    (*location, index),
                    f"unknown component {name!r}{did_you_mean(name, self.spec.components)}",
                )

    def check_class(self, location: Location, class_path: str) -> None:
        package = re.split("[.:]", class_path)[0]
        if package not in self.allow:
            meant = did_you_mean(package, self.allow)
            suggestion = meant if "did you mean" in meant else ""
            if package in DEFAULT_ALLOW:
                suggestion = f"; allow: leaves {package} out: add it there"
            problem = (
                f"outside the trusted packages ({', '.join(self.allow)}){suggestion}"
                if suggestion
                else outside(package, self.allow)
            )
            self.add(location, f"{class_path} is {problem}")

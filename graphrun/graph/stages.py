"""How stages fit together: ops and their arguments, references, kinds, and whether everything declared is used.

Decides what may be passed where. Must not know files or classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphrun.graph.document import Document, Location, Problems
from graphrun.graph.graph import Input, Reference, Stage
from graphrun.graph.ops import OPERATIONS, PLAIN_KINDS, Kind
from graphrun.graph.spec import GraphSpec, StageSpec
from graphrun.graph.values import did_you_mean, of_type

NOTHING = object()  # in place of a reference that names nothing


def read_stages(spec: GraphSpec, inputs: Mapping[str, Input], document: Document, problems: Problems) -> dict[str, Stage]:
    """The stages of ``spec`` in the order of the file; what does not fit is added to ``problems``."""
    read = [text for item in spec.stages.values() for text in _written(item)] + list(spec.outputs.values())
    return {name: _stage(name, item, spec, inputs, document, problems, read) for name, item in spec.stages.items()}


def read_outputs(spec: GraphSpec, problems: Problems) -> dict[str, Reference]:
    """The graph's outputs, each a stage's output."""
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
    """Everything declared must be used: components and inputs by stages, stages by stages or outputs.

    Silent where a name was misspelled: that is a problem already, and what was meant is used.
    """
    used = {component for stage in stages.values() for component in stage.uses}
    for name in spec.components:
        if name not in used and used <= spec.components.keys():
            problems.add(("components", name), "no stage uses it; add it to a stage's uses, or remove it")
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
                problems.add((section, name), f"{unused}; remove it, or pass it on")


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
            problems.add((*at, "uses", index), f"{component!r} stands twice")
    arguments: dict[str, Any] = {}
    for key, value in item.arguments.items():
        argument = _argument(value, (*at, "with", key), spec, problems)
        if argument is not NOTHING:
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
    """``value`` with references in place of what names them; NOTHING where one names nothing."""
    if isinstance(value, list):
        found = [_argument(item, (*at, index), spec, problems) for index, item in enumerate(value)]
        return NOTHING if any(item is NOTHING for item in found) else found
    if not (isinstance(value, str) and value.startswith("$")):
        return value
    reference = _reference(value, at, spec, problems)
    return NOTHING if reference is None else reference


def _written(item: StageSpec) -> list[str]:
    """The references in a stage's arguments, as they are written."""

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
            problems.add(at, f"there is no input {name!r}{did_you_mean(name, spec.inputs)}")
        return None
    if name not in spec.stages:
        problems.add(at, f"there is no stage {name!r}{did_you_mean(name, spec.stages)}")
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
    """Why ``value`` cannot be passed where ``wanted`` is expected; empty when it can."""
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

"""Inputs, stage options and outputs of an imported graph, shared by all ways to split a pipeline
into stages.

Decides which inputs a call gets. Knows no YAML.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphrun.diffusers_.importing.fingerprint import EntryRecord
from graphrun.diffusers_.importing.signature import InputSpec, further_inputs, media_kind
from graphrun.diffusers_.importing.trial import TrialPipeline
from graphrun.errors import GraphrunError
from graphrun.graph.graph import Reference, Stage
from graphrun.graph.ops import OPERATIONS
from graphrun.ops.call import FIELDS


@dataclass(frozen=True, slots=True)
class Layout:
    """The part of a graph file that is not classes and configurations.

    ``inputs``: name -> entry. ``entered``: the component entries of each stage, in order.
    ``unused``: components that no stage enters. ``why``: the reason why the pipeline is one stage;
    empty where there are several.
    """

    inputs: Mapping[str, Mapping[str, Any]]
    stages: tuple[Stage, ...]
    outputs: Mapping[str, str]
    entered: Mapping[str, tuple[EntryRecord, ...]]
    unused: tuple[str, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class CallInputs:
    """Inputs and arguments of a pipeline call.

    ``inputs``: name -> entry in the graph file. ``passed``: parameter -> reference to an input or
    literal, with ``seed`` in place of ``generator``. ``arguments``: values with which the call
    runs. ``parameters``: input name -> parameter that it is passed as.
    """

    inputs: Mapping[str, Mapping[str, Any]]
    passed: dict[str, Any]
    arguments: dict[str, Any]
    parameters: Mapping[str, str]


def call_inputs(
    trial: TrialPipeline,
    plain: Mapping[str, InputSpec],
    arguments: Mapping[str, Any],
    sizes: Mapping[str, Any],
) -> CallInputs:
    """The inputs of a call with ``arguments``: the ``plain`` ones, and media with the ``sizes``
    given."""
    more = {*arguments, *further_inputs(trial.parameters, {})}
    always = ("seed", "steps", "negative_prompt")
    kept = {
        name: input_spec
        for name, input_spec in plain.items()
        if input_spec.parameter in more or name in always
    }
    inputs: dict[str, Mapping[str, Any]] = {
        name: kept[name].entry for name in plain if name in kept
    }
    inputs |= {name: _media_entry(name, inputs, sizes) for name in trial.media}
    inputs |= {
        name: _media_entry(name, inputs, sizes) | {"optional": True} for name in trial.offered
    }
    inputs |= {name: {"type": "tensor", "shape": shape} for name, shape in trial.tensors.items()}
    passed: dict[str, Any] = {}
    for name in inputs:
        parameter = kept[name].parameter if name in kept else name
        passed["seed" if parameter == "generator" else parameter] = Reference("input", name)
    for name in (
        name
        for name in trial.media
        if isinstance(arguments[name], list) and media_kind(name) != "video"
    ):
        # one for each of several ControlNets
        own = [f"{name}_{number}" for number in range(len(arguments[name]))]
        inputs |= dict.fromkeys(own, inputs.pop(name))
        passed[name] = [Reference("input", each) for each in own]
    passed |= {
        name: value
        for name, value in arguments.items()
        if isinstance(value, (list, dict)) and name not in trial.media
    }
    parameters = {name: input_spec.parameter for name, input_spec in kept.items()}
    return CallInputs(inputs, passed, dict(arguments), parameters)


class NotSplit(Exception):
    """The reason why a call is not split into stages."""


def tried(
    trial: TrialPipeline,
    call: CallInputs,
    stages: Sequence[Stage],
    outputs: Sequence[str],
    trials: Iterable[tuple[Mapping[str, Any], Collection[str]]],
    how: tuple[str, str],
    home: Callable[[str], str],
) -> Layout:
    """``stages``, if they enter the same components with the same values as the whole call does, in
    each of ``trials``: (inputs of the call, names of inputs that are left out where it differs).

    ``how``: how the call was split, and what differs, in words; ``home`` is as in `laid_out`.
    Raises NotSplit where a trial differs and there is nothing to leave out.
    """
    referred = {name: Reference("stage", stages[-1].name, name) for name in outputs}
    first, entered = dict[str, tuple[EntryRecord, ...]](), dict[str, tuple[EntryRecord, ...]]()
    stages, left_out = list(stages), set[str]()
    for changed, blamed in trials:
        values = {name: value for name, value in changed.items() if name not in left_out}
        free = tuple(replace(stage, uses=tuple(trial.meta_modules)) for stage in stages)
        given = call.arguments | {
            call.parameters.get(name, name): value
            for name, value in values.items()
            if value is not None
        }
        seed = given.pop("generator", 0)
        try:
            found = trial.run_staged(replace(trial.graph, stages=free, outputs=referred), values)
            same = tuple(
                entry for entries in found.values() for entry in entries
            ) == trial.run_whole(given, seed)
            why = "" if same else f"{how[0]} it enters its components with other {how[1]}"
        except (GraphrunError, *PIPELINE_ERRORS) as error:
            why = f"{how[0]} its own code fails: {error_line(error)}"
        if why and not blamed:
            raise NotSplit(why)
        if why:
            left_out |= set(blamed)
            gone = [Reference("input", name) for name in blamed]
            stages = [
                replace(s, arguments={k: v for k, v in s.arguments.items() if v not in gone})
                for s in stages
            ]
            continue
        first = first or found
        entered = {stage: (*entered.get(stage, ()), *entries) for stage, entries in found.items()}
    return laid_out(trial, call, stages, outputs, first, entered, home)


def laid_out(
    trial: TrialPipeline,
    call: CallInputs,
    stages: Sequence[Stage],
    outputs: Sequence[str],
    first: Mapping[str, tuple[EntryRecord, ...]],
    entered: Mapping[str, tuple[EntryRecord, ...]],
    home: Callable[[str], str],
    why: str = "",
) -> Layout:
    """``stages`` with the components that they enter, the run options that these support, and the
    inputs that they read.

    ``home``: the stage of a component that no stage enters. The last stage makes ``outputs``.
    """
    uses = {
        stage.name: list(dict.fromkeys(entry.component for entry in entered[stage.name]))
        for stage in stages
    }
    tiling = {
        name
        for name, names in uses.items()
        if any(hasattr(trial.meta_modules[of], "enable_tiling") for of in names)
    }
    unused = tuple(
        name for name in trial.meta_modules if not any(name in names for names in uses.values())
    )
    for name in unused:
        uses[home(name)].append(name)
    tiled = {
        s.name: {"tiling": True} if trial.tiled and "tiling" in OPERATIONS[s.op].optional else {}
        for s in stages
    }
    may_tile = {
        s.name
        for s in stages
        if s.name in tiling and "tiling" in OPERATIONS[s.op].options and not tiled[s.name]
    }
    made = tuple(
        replace(
            stage,
            uses=tuple(uses[stage.name]),
            options=("tiling",) if stage.name in may_tile else (),
            arguments={**stage.arguments, **tiled[stage.name]},
        )
        for stage in stages
    )
    read = {r.name for stage in stages for r in stage.references if r.kind == "input"}
    read |= {
        str(size)[1:]
        for name in read
        for size in call.inputs[name].values()
        if str(size).startswith("$")
    }
    inputs = {name: entry for name, entry in call.inputs.items() if name in read}
    return Layout(
        inputs, made, {name: f"${stages[-1].name}.{name}" for name in outputs}, first, unused, why
    )


def _media_entry(name: str, inputs: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a media input. Its sizes refer to inputs of the call where there are such, and
    are numbers otherwise."""
    kind = media_kind(name) or "image"
    names = {"audio": ("rate", "seconds"), "video": ("height", "width", "frames")}.get(
        kind, ("height", "width")
    )
    return {"type": kind, **{size: f"${size}" if size in inputs else sizes[size] for size in names}}


def outputs_in(made: Any) -> tuple[str, ...]:
    """Names of a call's outputs as the op has them: image, video, audio; else its fields that hold
    tensors or arrays."""
    fields = (
        dict(made)
        if isinstance(made, Mapping)
        else dict(vars(made))
        if hasattr(made, "__dict__")
        else {}
    )
    if usual := [
        ours
        for ours, names in FIELDS.items()
        if any(fields.get(name) is not None for name in names)
    ]:
        return tuple(usual)
    return tuple(name for name, value in fields.items() if hasattr(value, "shape")) or ("image",)


# What a pipeline's own code may raise when it is run in parts.
PIPELINE_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    NameError,
    AssertionError,
    ArithmeticError,
)


def error_line(error: Exception) -> str:
    """The type and message of ``error`` in one line; the message has at most 80 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text if len(text) <= 80 else text[:77] + '...'}"

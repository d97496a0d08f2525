"""Inputs, stage options and outputs of an imported graph, for all ways to split a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphrun.diffusers_.importing.fingerprint import ComponentCall
from graphrun.diffusers_.importing.signature import InputParameter, further_inputs, media_kind
from graphrun.diffusers_.importing.trial import TrialPipeline
from graphrun.errors import GraphrunError
from graphrun.graph.ops import OPERATIONS
from graphrun.graph.parts import Reference, Stage
from graphrun.ops.call import FIELDS


@dataclass(frozen=True, slots=True)
class GraphLayout:
    """The parts of a graph file other than classes and configurations.

    ``inputs``: by name, the entry in the graph file. ``component_calls``: by stage, its calls into
    components, in order. ``unused``: components that no stage calls. ``reason``: why the pipeline
    is one stage; empty for several stages.
    """

    inputs: Mapping[str, Mapping[str, Any]]
    stages: tuple[Stage, ...]
    outputs: Mapping[str, str]
    component_calls: Mapping[str, tuple[ComponentCall, ...]]
    unused: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CallInputs:
    """Inputs and arguments of a pipeline call.

    ``inputs``: by name, the entry in the graph file. ``references``: by parameter, the reference to
    an input or the literal; ``seed`` replaces ``generator``. ``arguments``: values with which the
    call runs. ``parameters``: by input name, the parameter of the call.
    """

    inputs: Mapping[str, Mapping[str, Any]]
    references: dict[str, Any]
    arguments: dict[str, Any]
    parameters: Mapping[str, str]


def call_inputs(
    trial: TrialPipeline,
    plain: Mapping[str, InputParameter],
    arguments: Mapping[str, Any],
    sizes: Mapping[str, Any],
) -> CallInputs:
    """Return the inputs of a call: the ``plain`` ones, and media of the given ``sizes``."""
    names = {*arguments, *further_inputs(trial.parameters, {})}
    fixed_names = ("seed", "steps", "negative_prompt")
    input_specs = {
        name: input_spec
        for name, input_spec in plain.items()
        if input_spec.parameter in names or name in fixed_names
    }
    inputs: dict[str, Mapping[str, Any]] = {
        name: input_specs[name].entry for name in plain if name in input_specs
    }
    inputs |= {name: _media_input(name, inputs, sizes) for name in trial.media}
    inputs |= {
        name: _media_input(name, inputs, sizes) | {"optional": True}
        for name in trial.optional_media
    }
    inputs |= {name: {"type": "tensor", "shape": shape} for name, shape in trial.tensors.items()}
    references: dict[str, Any] = {}
    for name in inputs:
        parameter = input_specs[name].parameter if name in input_specs else name
        references["seed" if parameter == "generator" else parameter] = Reference("input", name)
    for name in (
        name
        for name in trial.media
        if isinstance(arguments[name], list) and media_kind(name) != "video"
    ):
        # one input per ControlNet
        numbered_names = [f"{name}_{number}" for number in range(len(arguments[name]))]
        inputs |= dict.fromkeys(numbered_names, inputs.pop(name))
        references[name] = [Reference("input", numbered_name) for numbered_name in numbered_names]
    references |= {
        name: value
        for name, value in arguments.items()
        if isinstance(value, (list, dict)) and name not in trial.media
    }
    parameters = {name: input_spec.parameter for name, input_spec in input_specs.items()}
    return CallInputs(inputs, references, dict(arguments), parameters)


class NotSplit(Exception):
    """The call is not split into stages; the message is the reason."""


def checked_layout(
    trial: TrialPipeline,
    call: CallInputs,
    stages: Sequence[Stage],
    outputs: Sequence[str],
    trials: Iterable[tuple[Mapping[str, Any], Collection[str]]],
    texts: tuple[str, str],
    home: Callable[[str], str],
) -> GraphLayout:
    """Return the layout of ``stages`` if they compute the same as the whole call in all ``trials``.

    Both must make the same calls into components with the same values. ``trials``: (inputs of the
    call, names of inputs that the stages omit if the trial differs). ``texts``: how the call was
    split and what differs, in words. ``home``: as in `layout_of`. Raises NotSplit if a trial
    differs and there is no input to omit.
    """
    output_references = {name: Reference("stage", stages[-1].name, name) for name in outputs}
    first_calls, component_calls = (
        dict[str, tuple[ComponentCall, ...]](),
        dict[str, tuple[ComponentCall, ...]](),
    )
    stages, excluded_names = list(stages), set[str]()
    for inputs, suspect_names in trials:
        values = {name: value for name, value in inputs.items() if name not in excluded_names}
        open_stages = tuple(replace(stage, uses=tuple(trial.meta_modules)) for stage in stages)
        arguments = call.arguments | {
            call.parameters.get(name, name): value
            for name, value in values.items()
            if value is not None
        }
        seed = arguments.pop("generator", 0)
        try:
            stage_calls = trial.run_staged(
                replace(trial.graph, stages=open_stages, outputs=output_references), values
            )
            is_same = tuple(
                component_call
                for stage_records in stage_calls.values()
                for component_call in stage_records
            ) == trial.run_whole(arguments, seed)
            reason = "" if is_same else f"{texts[0]}, it calls its components with other {texts[1]}"
        except (GraphrunError, *PIPELINE_ERRORS) as error:
            reason = f"{texts[0]}, its own code fails: {error_line(error)}"
        if reason and not suspect_names:
            raise NotSplit(reason)
        if reason:
            excluded_names |= set(suspect_names)
            removed_references = [Reference("input", name) for name in suspect_names]
            stages = [
                replace(
                    stage,
                    arguments={
                        key: value
                        for key, value in stage.arguments.items()
                        if value not in removed_references
                    },
                )
                for stage in stages
            ]
            continue
        first_calls = first_calls or stage_calls
        component_calls = {
            stage: (*component_calls.get(stage, ()), *records)
            for stage, records in stage_calls.items()
        }
    return layout_of(trial, call, stages, outputs, first_calls, component_calls, home)


def layout_of(
    trial: TrialPipeline,
    call: CallInputs,
    stages: Sequence[Stage],
    outputs: Sequence[str],
    first_calls: Mapping[str, tuple[ComponentCall, ...]],
    component_calls: Mapping[str, tuple[ComponentCall, ...]],
    home: Callable[[str], str],
    reason: str = "",
) -> GraphLayout:
    """Return the layout of ``stages``, of which the last computes ``outputs``. ``home``: returns
    the stage for a component that no stage calls."""
    uses = {
        stage.name: list(
            dict.fromkeys(
                component_call.component for component_call in component_calls[stage.name]
            )
        )
        for stage in stages
    }
    tiling_stages = {
        name
        for name, names in uses.items()
        if any(hasattr(trial.meta_modules[component], "enable_tiling") for component in names)
    }
    unused = tuple(
        name for name in trial.meta_modules if not any(name in names for names in uses.values())
    )
    for name in unused:
        uses[home(name)].append(name)
    tiling_arguments = {
        stage.name: {"tiling": True}
        if trial.is_tiled and "tiling" in OPERATIONS[stage.op].optional
        else {}
        for stage in stages
    }
    may_tile = {
        stage.name
        for stage in stages
        if stage.name in tiling_stages
        and "tiling" in OPERATIONS[stage.op].options
        and not tiling_arguments[stage.name]
    }
    used_stages = tuple(
        replace(
            stage,
            uses=tuple(uses[stage.name]),
            options=("tiling",) if stage.name in may_tile else (),
            arguments={**stage.arguments, **tiling_arguments[stage.name]},
        )
        for stage in stages
    )
    input_names = {
        reference.name
        for stage in stages
        for reference in stage.references
        if reference.kind == "input"
    }
    input_names |= {
        str(size)[1:]
        for name in input_names
        for size in call.inputs[name].values()
        if str(size).startswith("$")
    }
    inputs = {name: entry for name, entry in call.inputs.items() if name in input_names}
    return GraphLayout(
        inputs,
        used_stages,
        {name: f"${stages[-1].name}.{name}" for name in outputs},
        first_calls,
        unused,
        reason,
    )


def _media_input(name: str, inputs: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the graph file's entry for a media input. Its sizes are references to inputs of the
    call if there are such inputs, else numbers."""
    kind = media_kind(name) or "image"
    names = {"audio": ("rate", "seconds"), "video": ("height", "width", "frames")}.get(
        kind, ("height", "width")
    )
    return {"type": kind, **{size: f"${size}" if size in inputs else sizes[size] for size in names}}


def outputs_in(result: Any) -> tuple[str, ...]:
    """Return the op's names of a call's outputs: image, video and audio, else the fields with
    tensors or arrays."""
    fields = (
        dict(result)
        if isinstance(result, Mapping)
        else dict(vars(result))
        if hasattr(result, "__dict__")
        else {}
    )
    if media_names := [
        output
        for output, names in FIELDS.items()
        if any(fields.get(name) is not None for name in names)
    ]:
        return tuple(media_names)
    return tuple(name for name, value in fields.items() if hasattr(value, "shape")) or ("image",)


# errors that a pipeline's own code may raise when it runs in parts
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
    """Return the type of ``error`` and at most 80 characters of its message, in one line."""
    text = " ".join(str(error).split())
    return (
        f"{type(error).__name__}{': ' if text else ''}"
        f"{text if len(text) <= 80 else text[:77] + '...'}"
    )

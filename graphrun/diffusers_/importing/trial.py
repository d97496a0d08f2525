"""Trial runs of an imported pipeline on meta, as one call or in stages.

A trial records the calls into components. This module decides the arguments of the call (which
media it needs) and the text of its errors.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch

from graphrun.diffusers_.dry_call import DRAWS_ON_DEVICE, OF_ANOTHER_DEVICE, ProbeError
from graphrun.diffusers_.importing.fingerprint import ComponentCall, FingerprintRun, digest_of
from graphrun.diffusers_.importing.found import PipelineDescription
from graphrun.diffusers_.importing.signature import (
    TENSOR,
    InputParameter,
    call_parameters,
    media_kind,
)
from graphrun.diffusers_.importing.standin import stand_in
from graphrun.errors import InputError
from graphrun.graph.graph import PLANNING_TEXT, Graph
from graphrun.graph.media import blank
from graphrun.graph.parts import Part
from graphrun.modules.build import build_part, meta_module
from graphrun.modules.texts import with_length_limit
from graphrun.ops import Stages
from graphrun.ops.diffusion import without_pictures
from graphrun.ops.modular import is_modular_class, silence_diffusers
from graphrun.ops.pipeline import assemble
from graphrun.sim.dry import PLANNED

STEPS = 2  # denoising steps of a trial
HAND_WRITTEN = (
    "If arguments are missing, add them with --set, or write the stage by hand: op: call "
    "(docs/howto/call.md)"
)


@dataclass
class TrialPipeline:
    """A pipeline with components on meta and real parts, and the prober of its fingerprint runs.

    ``media``: parameters with media in the last successful `find_arguments`. ``optional_media``:
    parameters that may have media too. ``tensors``: shapes of tensor arguments, by parameter.
    ``is_tiled``: whether the VAE must work tile by tile. ``fixed_steps``: the number of steps of a
    call that refuses few (0: it decides itself); else None. ``whole_runs``: calls into components
    by digest of the arguments.
    """

    description: PipelineDescription
    graph: Graph
    meta_modules: dict[str, Any]
    parts: dict[str, Any]
    fingerprint: FingerprintRun
    media: tuple[str, ...] = ()
    optional_media: tuple[str, ...] = ()
    tensors: dict[str, list[int]] = field(default_factory=dict)
    is_tiled: bool = False
    fixed_steps: int | None = None
    output: Any = None  # what the last whole call returned
    whole_runs: dict[Any, tuple[ComponentCall, ...]] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the pipeline's call."""
        return call_parameters(self.pipeline, self.description.workflow)

    @property
    def is_modular(self) -> bool:
        return is_modular_class(self.description.kind)

    @property
    def pipeline(self) -> Any:
        """The pipeline, assembled again for each run because schedulers have state."""
        return assemble(self.graph, self.meta_modules, self.parts, PLANNED)

    def run_whole(self, arguments: Mapping[str, Any], seed: int = 0) -> tuple[ComponentCall, ...]:
        """Return the calls into components of the whole call. Raises ProbeError."""
        key = digest_of((dict(arguments), seed))
        if key not in self.whole_runs:
            call_arguments = self.few_steps(arguments.get("strength")) | dict(arguments)
            if "generator" in self.parameters:
                call_arguments["generator"] = torch.Generator("cpu").manual_seed(seed)
            with self.as_probe_errors(call_arguments), self.fingerprint.record_run():
                pipeline = self.pipeline
                if "padding_mask_crop" not in call_arguments:
                    without_pictures(pipeline)
                self.output = pipeline(**call_arguments)
            if self.is_modular:
                self.output = self.output.values
                self.fingerprint.call_locals = {
                    name: value
                    for name, value in self.output.items()
                    if isinstance(value, (int, float))
                }
            self.whole_runs[key] = tuple(self.fingerprint.component_calls)
        return self.whole_runs[key]

    def few_steps(self, strength: float | None) -> dict[str, int]:
        """Return the argument of a call with few steps: two, unless the call refuses them.

        A call with ``strength`` below 1 runs only this share of the steps (None: all).
        """
        steps = math.ceil(STEPS / (strength or 1)) if self.fixed_steps is None else self.fixed_steps
        return (
            {"num_inference_steps": steps}
            if "num_inference_steps" in self.parameters and steps
            else {}
        )

    @contextmanager
    def as_probe_errors(self, argument_names: Iterable[str]) -> Iterator[None]:
        """Turn errors of the call into a ProbeError that names the last call into a component.
        InputError passes. Log messages of diffusers are silenced."""
        try:
            with silence_diffusers():
                yield
        except ProbeError as error:
            raise ProbeError(f"{error}. {self._suggestions()}") from error
        except InputError:
            raise
        except Exception as error:
            entries = self.fingerprint.component_calls
            moment = (
                f"after {entries[-1]} was called" if entries else "before any component was called"
            )
            text = " ".join(str(error).split())[:400]
            suggestions = (
                f"{DRAWS_ON_DEVICE}, and a graph's generator is on the CPU: attach to it "
                "(graphrun.attach) and pass a generator of the device"
                if OF_ANOTHER_DEVICE in text
                else self._suggestions()
            )
            raise ProbeError(
                f"the dry run of {self.description.pipeline}({', '.join(argument_names)}) failed "
                f"{moment}, in the pipeline's own code: "
                f"{type(error).__name__}: {text}. {suggestions}"
            ) from error

    def run_staged(
        self, graph: Graph, values: Mapping[str, Any]
    ) -> dict[str, tuple[ComponentCall, ...]]:
        """Return the calls into components of each stage of ``graph``, for the inputs ``values``.
        Errors of the ops pass."""
        stage_calls: dict[str, tuple[ComponentCall, ...]] = {}

        def after_stage(stage: str, _: Mapping[str, Any]) -> None:
            stage_calls[stage] = tuple(
                self.fingerprint.component_calls[sum(map(len, stage_calls.values())) :]
            )

        with silence_diffusers(), self.fingerprint.record_run():
            stages = Stages(
                graph,
                self.meta_modules,
                PLANNED,
                values,
                self.parts,
                self.meta_modules,
                planning=True,
            )
            stages.after_stage = after_stage
            stages.run()
        return stage_calls

    def _suggestions(self) -> str:
        member_names = {
            "self",
            *self.description.components,
            *self.description.parts,
            *self.description.settings,
        }
        if self.is_modular:
            absent = self.pipeline.null_component_names
        else:
            constructor = inspect.signature(self.description.kind.__init__).parameters
            absent = [
                name
                for name, p in constructor.items()
                if name not in member_names and not isinstance(p.default, (bool, int, float))
            ]
        absence_text = f"; without {', '.join(absent)}" if absent else ""
        return (
            f"It was called with {', '.join(self.description.components)}{absence_text}. "
            f"{HAND_WRITTEN}"
        )


def build_trial(description: PipelineDescription, *, dtype: str = "") -> TrialPipeline:
    """Build the trial pipeline of ``description``, with components on meta.

    ``dtype``: replaces the dtypes of all components; whether a split changes results does not
    depend on dtypes. Raises GraphError naming the component or part that cannot be built.
    """
    graph = description.graph()
    components = (
        replace(component, dtype=dtype or component.dtype)
        for component in graph.components.values()
    )
    meta_modules = {component.name: meta_module(component, graph.trust) for component in components}
    parts = {
        name: _part(part, graph, description.live.get(name)) for name, part in graph.parts.items()
    }
    return TrialPipeline(
        description,
        graph,
        meta_modules,
        parts,
        FingerprintRun(graph, meta_modules, description.kind.__call__),
    )


def _part(part: Part, graph: Graph, live: Any) -> Any:
    if part.file is not None:
        return with_length_limit(
            stand_in(part.config), f"parts.{part.name}", part.file_line, part.file_line, part.file
        )
    return build_part(part, graph) if live is None or hasattr(live, "set_timesteps") else live


def find_arguments(
    trial: TrialPipeline,
    plain: Mapping[str, InputParameter],
    sizes: Mapping[str, Any],
    literals: Mapping[str, Any],
) -> dict[str, Any]:
    """Return arguments with which the call runs: required ones, and as few media as possible.

    Sets ``trial.media`` and ``trial.optional_media``. Media before the prompt are a pipeline's main
    input; if the call also runs without them, they are optional. ``sizes``: of the media.
    ``literals``: arguments to pass unchanged. A call that fails with two steps is tried with its
    own number (Cosmos 3, distilled). Raises ProbeError if no choice of media works: the error of
    the first attempt with the most calls into components.
    """
    parameters = trial.parameters
    excluded_names = ("generator", "num_inference_steps")
    default_inputs = (
        item
        for item in plain.values()
        if item.default is not None and item.parameter not in excluded_names
    )
    arguments = {item.parameter: item.default for item in default_inputs}
    if "prompt" in parameters and "prompt_embeds" not in trial.tensors:
        arguments.setdefault("prompt", PLANNING_TEXT)
    arguments |= {
        **literals,
        **{name: torch.zeros(shape, device="cpu") for name, shape in trial.tensors.items()},
    }
    candidates = {
        name: kind
        for name in parameters
        if name not in literals and (kind := media_kind(name)) is not None
    }
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    names = list(parameters)
    early_names = (
        names[: names.index("prompt")] if "prompt" in names and not trial.is_modular else []
    )
    required_media = [name for name in candidates if name in required]
    leading_media = [name for name in candidates if name in early_names and name not in required]
    absent_names = [name for name in required if name not in {*arguments, *candidates, "self"}]
    if absent_names:
        tensor_names = [
            name for name in absent_names if TENSOR.search(str(parameters[name].annotation))
        ]
        suggestion = (
            f" give the shape of each tensor (--set {tensor_names[0]}=[1,768]),"
            if tensor_names
            else ""
        )
        raise ProbeError(
            f"{trial.description.pipeline} needs {', '.join(absent_names)}, which no file "
            f"has:{suggestion} import the pipeline that makes it too "
            f"(a combined one), or attach to it (graphrun.attach). {HAND_WRITTEN}"
        )
    optional_media = [name for name in candidates if name not in (*required_media, *leading_media)]
    choices = [required_media] if leading_media else []
    # a picture or a video, but not both
    choices += [[*required_media, name] for name in leading_media] if len(leading_media) > 1 else []
    choices += _media_choices([*required_media, *leading_media], optional_media)
    failure: ProbeError | None = None
    best_count = -1
    steps = plain["steps"].default if "steps" in plain else 0
    lists = (value for value in trial.description.settings.values() if isinstance(value, list))
    list_length = max(
        (len(value) for value in lists if str(value[:1]).startswith("['$")), default=1
    )
    step_numbers = (trial.fixed_steps,) if trial.fixed_steps is not None else (None, steps or 0)
    for trial.fixed_steps, count in product(step_numbers, sorted({1, list_length})):
        for choice in choices:
            call_arguments = arguments | _blanks(choice, candidates, sizes, count)
            try:
                trial.run_whole(call_arguments)
            except ProbeError as error:
                if len(trial.fingerprint.component_calls) > best_count:
                    failure, best_count = error, len(trial.fingerprint.component_calls)
                continue
            trial.media, trial.optional_media = tuple(choice), ()
            for media_name in (name for name in leading_media if name not in choice):
                with suppress(ProbeError):
                    trial.run_whole(
                        call_arguments | _blanks([media_name], candidates, sizes, count)
                    )
                    trial.optional_media += (media_name,)
            return call_arguments
    assert failure is not None
    trial.fixed_steps = step_numbers[0]
    raise failure


def _blanks(
    names: Iterable[str], kinds: Mapping[str, str], sizes: Mapping[str, Any], count: int
) -> dict[str, Any]:
    """Return placeholders for the media ``names``; for several ControlNets, ``count`` of each."""
    placeholders = {name: blank(kinds[name], sizes) for name in names}
    return {
        name: placeholder if count == 1 or isinstance(placeholder, list) else [placeholder] * count
        for name, placeholder in placeholders.items()
    }


def _media_choices(
    required_names: Sequence[str], optional_names: Sequence[str]
) -> Iterator[list[str]]:
    """Yield the choices of media to try: the required media alone, then with each optional one,
    then with the first two, three, ... optional ones."""
    yield list(required_names)
    for name in optional_names:
        yield [*required_names, name]
    for count in range(2, len(optional_names) + 1):
        yield [*required_names, *optional_names[:count]]

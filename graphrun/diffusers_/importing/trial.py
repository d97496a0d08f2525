"""Trial runs of an imported pipeline on meta: its own code runs as one call or in stages, and its
component entries are recorded.

Decides the arguments of the call (which media it needs) and the text of its errors. Does not know
how the call is split.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from graphrun.diffusers_.dry_call import ProbeError
from graphrun.diffusers_.importing.fingerprint import EntryRecord, FingerprintRun, digest_of
from graphrun.diffusers_.importing.found import Found
from graphrun.diffusers_.importing.signature import TENSOR, InputSpec, call_parameters, media_kind
from graphrun.diffusers_.importing.standin import stand_in
from graphrun.errors import InputError
from graphrun.graph.graph import PLANNING_TEXT, Graph, Part
from graphrun.graph.media import blank
from graphrun.modules.build import build_part, meta_module
from graphrun.modules.texts import measured
from graphrun.ops import Stages
from graphrun.ops.diffusion import without_pictures
from graphrun.ops.modular import is_modular_class, quietly
from graphrun.ops.pipeline import assemble
from graphrun.sim.dry import PLANNED

STEPS = 2  # denoising steps of a trial
HAND_WRITTEN = "Where it lacks arguments, give them with --set, or write the stage by hand: op: call (docs/howto/call.md)"


@dataclass
class TrialPipeline:
    """A pipeline with components on meta and real parts, and the prober that all its fingerprint
    runs share.

    ``media``: parameters that got media in the last successful `find_arguments`, ``offered``: those
    that may get some besides. ``tensors``: shapes of the tensors that it gets, by parameter.
    ``tiled``: its VAE works tile by tile, since it can do nothing else. ``whole_runs``: entries by
    digest of the arguments.
    """

    found: Found
    graph: Graph
    meta_modules: dict[str, Any]
    parts: dict[str, Any]
    fingerprint: FingerprintRun
    media: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()
    tensors: dict[str, list[int]] = field(default_factory=dict)
    tiled: bool = False
    output: Any = None  # what the last whole call returned
    whole_runs: dict[Any, tuple[EntryRecord, ...]] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the pipeline's call."""
        return call_parameters(self.pipeline, self.found.workflow)

    @property
    def modular(self) -> bool:
        """Whether the pipeline is modular, that is, made of blocks."""
        return is_modular_class(self.found.kind)

    @property
    def pipeline(self) -> Any:
        """The pipeline, assembled again for each run because schedulers keep state."""
        return assemble(self.graph, self.meta_modules, self.parts, PLANNED)

    def run_whole(self, arguments: Mapping[str, Any], seed: int = 0) -> tuple[EntryRecord, ...]:
        """The component entries of the whole call with ``arguments``. Raises ProbeError."""
        key = digest_of((dict(arguments), seed))
        if key not in self.whole_runs:
            given = dict(arguments)
            if (
                "num_inference_steps" in self.parameters
            ):  # a strength below 1 runs only a share of them
                given.setdefault("num_inference_steps", few_steps(given.get("strength")))
            if "generator" in self.parameters:
                given["generator"] = torch.Generator("cpu").manual_seed(seed)
            with self.as_probe_errors(given), self.fingerprint.running():
                pipeline = self.pipeline
                if "padding_mask_crop" not in given:
                    without_pictures(pipeline)
                self.output = pipeline(**given)
            if self.modular:
                self.output = self.output.values
                self.fingerprint.call_locals = {
                    name: value
                    for name, value in self.output.items()
                    if isinstance(value, (int, float))
                }
            self.whole_runs[key] = tuple(self.fingerprint.entries)
        return self.whole_runs[key]

    @contextmanager
    def as_probe_errors(self, given: Iterable[str]) -> Iterator[None]:
        """Turns whatever the call with the arguments ``given`` raises into a ProbeError that names
        the entry before it, and silences what diffusers logs. InputError passes."""
        try:
            with quietly():
                yield
        except ProbeError as error:
            raise ProbeError(f"{error}. {self._advice()}") from error
        except InputError:
            raise
        except Exception as error:
            entries = self.fingerprint.entries
            after = (
                f"after {entries[-1]} was entered"
                if entries
                else "before any component was entered"
            )
            text = " ".join(str(error).split())[:400]
            raise ProbeError(
                f"the dry run of {self.found.pipeline}({', '.join(given)}) failed {after}, in the pipeline's own code: "
                f"{type(error).__name__}: {text}. {self._advice()}"
            ) from error

    def run_staged(
        self, graph: Graph, values: Mapping[str, Any]
    ) -> dict[str, tuple[EntryRecord, ...]]:
        """The component entries of each stage of ``graph`` for the inputs ``values``. Raises
        whatever the ops raise."""
        found: dict[str, tuple[EntryRecord, ...]] = {}

        def after_stage(stage: str, _: Mapping[str, Any]) -> None:
            found[stage] = tuple(self.fingerprint.entries[sum(map(len, found.values())) :])

        with quietly(), self.fingerprint.running():
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
        return found

    def _advice(self) -> str:
        there = {"self", *self.found.components, *self.found.parts, *self.found.settings}
        if self.modular:
            absent = self.pipeline.null_component_names
        else:
            constructor = inspect.signature(self.found.kind.__init__).parameters
            absent = [
                name
                for name, p in constructor.items()
                if name not in there and not isinstance(p.default, (bool, int, float))
            ]
        without = f"; without {', '.join(absent)}" if absent else ""
        return f"It was called with {', '.join(self.found.components)}{without}. {HAND_WRITTEN}"


def few_steps(strength: float | None) -> int:
    """The number of steps of which a call with ``strength`` (None: 1) runs two."""
    return math.ceil(STEPS / (strength or 1))


def build_trial(found: Found, *, dtype: str = "") -> TrialPipeline:
    """``found`` with its components built on meta. Raises GraphError naming the component or part
    that cannot be built.

    ``dtype``: of all components, in place of their own: whether splitting changes something does
    not depend on dtypes.
    """
    graph = found.graph()
    components = (
        replace(component, dtype=dtype or component.dtype)
        for component in graph.components.values()
    )
    meta_modules = {component.name: meta_module(component, graph.trust) for component in components}
    parts = {name: _part(part, graph, found.live.get(name)) for name, part in graph.parts.items()}
    return TrialPipeline(
        found, graph, meta_modules, parts, FingerprintRun(graph, meta_modules, found.kind.__call__)
    )


def _part(part: Part, graph: Graph, live: Any) -> Any:
    if part.file is not None:
        return measured(
            stand_in(part.config), f"parts.{part.name}", part.where, part.where, part.file
        )
    return build_part(part, graph) if live is None or hasattr(live, "set_timesteps") else live


def find_arguments(
    trial: TrialPipeline,
    plain: Mapping[str, InputSpec],
    sizes: Mapping[str, Any],
    literals: Mapping[str, Any],
) -> dict[str, Any]:
    """Arguments with which the call runs: the required ones, and as few media as it needs (noted in
    ``trial.media``).

    Media before the prompt are a pipeline's main input. Where the call runs without them too, they
    are in ``trial.offered``. ``sizes`` are those of the media; ``literals`` are passed as they are.
    Raises ProbeError where no choice of media works: the error of the try that entered most
    components, the first of these.
    """
    parameters = trial.parameters
    left_out = ("generator", "num_inference_steps")
    inputs = (
        each
        for each in plain.values()
        if each.default is not None and each.parameter not in left_out
    )
    arguments = {each.parameter: each.default for each in inputs}
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
    before = names[: names.index("prompt")] if "prompt" in names and not trial.modular else []
    needed = [name for name in candidates if name in required]
    first = [name for name in candidates if name in before and name not in required]
    lacking = [name for name in required if name not in {*arguments, *candidates, "self"}]
    if lacking:
        shapes = [name for name in lacking if TENSOR.search(str(parameters[name].annotation))]
        give = f" give the shape of each tensor (--set {shapes[0]}=[1,768])," if shapes else ""
        raise ProbeError(
            f"{trial.found.pipeline} needs {', '.join(lacking)}, which no file holds:{give} import the pipeline that makes it too "
            f"(a combined one), or attach to it (graphrun.attach). {HAND_WRITTEN}"
        )
    optional = [name for name in candidates if name not in (*needed, *first)]
    choices = [needed] if first else []
    # a picture or a video, not both
    choices += [[*needed, name] for name in first] if len(first) > 1 else []
    choices += _media_choices([*needed, *first], optional)
    failed: ProbeError | None = None
    furthest = -1
    lists = (value for value in trial.found.settings.values() if isinstance(value, list))
    several = max((len(value) for value in lists if str(value[:1]).startswith("['$")), default=1)
    for count in sorted({1, several}):
        for chosen in choices:
            given = arguments | _blanks(chosen, candidates, sizes, count)
            try:
                trial.run_whole(given)
            except ProbeError as error:
                if len(trial.fingerprint.entries) > furthest:
                    failed, furthest = error, len(trial.fingerprint.entries)
                continue
            trial.media, trial.offered = tuple(chosen), ()
            for name in (name for name in first if name not in chosen):
                with suppress(ProbeError):
                    trial.run_whole(given | _blanks([name], candidates, sizes, count))
                    trial.offered += (name,)
            return given
    assert failed is not None
    raise failed


def _blanks(
    names: Iterable[str], kinds: Mapping[str, str], sizes: Mapping[str, Any], count: int
) -> dict[str, Any]:
    """Placeholders for the media ``names``: of several ControlNets, one for each of ``count``."""
    made = {name: blank(kinds[name], sizes) for name in names}
    return {
        name: one if count == 1 or isinstance(one, list) else [one] * count
        for name, one in made.items()
    }


def _media_choices(needed: Sequence[str], optional: Sequence[str]) -> Iterator[list[str]]:
    """The choices of media to try: the needed ones, these with each optional one, then with the
    first two, three, ... of them."""
    yield list(needed)
    for name in optional:
        yield [*needed, name]
    for count in range(2, len(optional) + 1):
        yield [*needed, *optional[:count]]

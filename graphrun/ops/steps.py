"""A denoising loop that goes on where another one stopped: its state after each step, and a pipeline's own loop begun behind it.

Decides what the state is (latents, scheduler, random numbers) and puts it in its place. Knows no file: whoever keeps states is a
`Journal`.

    unbroken   set_timesteps, noise   for i, t in enumerate(timesteps):  0,t0  1,t1  2,t2  3,t3  4,t4     state after 2: latents,
    resumed    set_timesteps, noise   for i, t in enumerate(timesteps):                    3,t3  4,t4     scheduler, generator
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from graphrun.errors import BrokenPlan
from graphrun.ops.loops import CALLBACKS, REMEMBERED, why_not


@dataclass(frozen=True, slots=True)
class StepState:
    """A loop after ``done`` of its ``steps`` steps, on the host. ``scheduler``: name -> (value, whether it was on the device)."""

    done: int
    steps: int
    latents: torch.Tensor
    generator: torch.Tensor
    scheduler: Mapping[str, tuple[Any, bool]]


class Journal(Protocol):
    """Whoever keeps the states of loops, by stage."""

    def state(self, stage: str) -> StepState | None:
        """Where the loop of ``stage`` is to begin; None: at its first step."""

    def wants(self, stage: str, done: int, steps: int) -> bool:
        """Whether the state after step ``done`` is to be saved."""

    def save(self, stage: str, state: StepState) -> None:
        """Keeps ``state`` in place of earlier ones."""


def journaled(pipeline: Any, stage: str, generator: torch.Generator, journal: Journal | None) -> dict[str, Any]:
    """More arguments for ``pipeline``'s call, so that ``journal`` hears of each step and the loop begins where it says.

    Empty where there is no journal, or the pipeline's loop cannot be begun in its middle: then nothing is kept either.
    """
    if journal is None or why_not(type(pipeline)):
        return {}
    pipeline.scheduler = _remembering(pipeline.scheduler)
    loop = _Loop(pipeline, stage, generator, journal)
    takes = inspect.signature(type(pipeline).__call__).parameters
    _count_with(pipeline, loop.counted)
    hears = {"callback_on_step_end": loop.on_step_end, "callback": loop.on_step}
    name = next(name for name in CALLBACKS if name in takes)
    return {name: hears[name]}


class _Loop:
    """A pipeline's loop over timesteps: begun where the journal says, and told to it step by step."""

    def __init__(self, pipeline: Any, stage: str, generator: torch.Generator, journal: Journal) -> None:
        self.pipeline, self.stage, self.generator, self.journal = pipeline, stage, generator, journal
        self.steps = 0
        self.shape: torch.Size | None = None  # of latents whose place others can take

    def counted(self, values: Any, start: int = 0) -> Any:
        """What ``enumerate`` is to the pipeline's call: the loop begins. All before it has run as ever.

        What the scheduler knew, the latents and the generator's state are set as they were. Everybody sees the whole schedule,
        since the last steps of multistep methods, and of some pipelines, are told by their number.
        """
        if not isinstance(values, torch.Tensor):
            return enumerate(values, start)
        latents = _latents_of(sys._getframe(1))
        self.steps, self.shape = len(values), latents.shape if latents is not None else None
        state = self.journal.state(self.stage)
        if state is None:
            return enumerate(values, start)
        before, now = (state.steps, state.latents.shape), (self.steps, self.shape)
        if latents is None or now != before:
            raise BrokenPlan(f"{self.stage}: steps and latents are {now}, and were {before}: remove the state, and begin anew")
        place = latents.device
        # They may be of another precision than the noise.
        torch.utils.swap_tensors(latents, state.latents.to(place, copy=True))  # type: ignore[no-untyped-call]
        for name, (value, there) in state.scheduler.items():
            setattr(self.pipeline.scheduler, name, _moved(value, place if there else torch.device("cpu")))
        self.generator.set_state(state.generator)
        return itertools.islice(enumerate(values, start), state.done, None)

    def on_step_end(self, _: Any, index: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
        """As pipelines call it today."""
        latents = values["latents"]
        values.clear()  # what it refers to would live on the device until the next step's end
        self._keep(index + 1, latents)
        return values

    def on_step(self, index: int, _: Any, latents: torch.Tensor) -> None:
        """As older ones do, which count the steps of a picture: a scheduler of second order takes two for one."""
        self._keep((index + 1) * getattr(self.pipeline.scheduler, "order", 1), latents)

    def _keep(self, done: int, latents: torch.Tensor) -> None:
        if done >= self.steps or latents.shape != self.shape:
            return
        if self.journal.wants(self.stage, done, self.steps) and (known := _known(self.pipeline.scheduler)) is not None:
            self.journal.save(self.stage, StepState(done, self.steps, latents.cpu(), self.generator.get_state(), known))


def _count_with(pipeline: Any, counted: Callable[..., Any]) -> None:
    """``pipeline``'s own call from now on: the same code, whose ``enumerate`` is ``counted``. No other pipeline's is."""
    kind = type(pipeline)
    plain = inspect.unwrap(kind.__call__)
    names = {**plain.__globals__, "enumerate": counted}
    call = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    call.__kwdefaults__ = plain.__kwdefaults__
    members = {"__module__": kind.__module__, "__call__": functools.wraps(plain)(torch.no_grad()(call))}
    pipeline.__class__ = type(kind.__name__, (kind,), members)


def _latents_of(frame: Any) -> torch.Tensor | None:
    """The loop's latents before its first step; None where there are none, or they have another name too."""
    names = frame.f_locals
    latents = names.get("latents")
    known = [value for value in names.values() if value is latents or isinstance(value, (list, tuple)) and _holds(value, latents)]
    if isinstance(names, dict):
        names.clear()  # a copy, which would hold what it refers to on the device
    return latents if isinstance(latents, torch.Tensor) and len(known) == 1 else None


def _holds(values: Any, latents: Any) -> bool:
    return any(value is latents for value in values)


def _remembering(scheduler: Any) -> Any:
    """A scheduler like ``scheduler`` that holds what its steps hand to the next through the pipeline's hands."""
    kind, signature = type(scheduler), inspect.signature(type(scheduler).step)
    if REMEMBERED not in signature.parameters:
        return scheduler

    @functools.wraps(kind.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        if bound.arguments[REMEMBERED] is None:
            bound.arguments[REMEMBERED] = vars(self).get(REMEMBERED)
        found = kind.step(*bound.args, **bound.kwargs)
        setattr(self, REMEMBERED, found[1])
        return found

    made: Any = type(kind.__name__, (kind,), {"__module__": kind.__module__, "step": step})
    return made.from_config(scheduler.config)


def _known(scheduler: Any) -> dict[str, tuple[Any, bool]] | None:
    """Everything that ``scheduler`` holds, on the host; None where it holds something that is not plain data."""
    found = {}
    for name, value in vars(scheduler).items():
        if name in ("_internal_dict", "timesteps"):  # its configuration; what `set_timesteps` makes
            continue
        tensors: list[torch.Tensor] = []
        if not _plain(value, tensors):
            return None
        there = any(tensor.device.type != "cpu" for tensor in tensors)
        found[name] = (_moved(value, torch.device("cpu")), there)
    return found


def _plain(value: Any, tensors: list[torch.Tensor]) -> bool:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return True
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(_plain(item, tensors) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(item, tensors) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, float, str)) or type(value).__module__ == "numpy"


def _moved(value: Any, place: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(place, copy=True)
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, place) for item in value)
    return {key: _moved(item, place) for key, item in value.items()} if isinstance(value, dict) else value

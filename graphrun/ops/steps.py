"""A denoising loop that goes on where another one stopped: its state after each step, and a pipeline's loop begun behind it.

Decides what the state is (latents, scheduler, random numbers) and puts it in its place. Knows no file: whoever keeps states beyond
a run is a `Journal`.

    unbroken   set_timesteps, noise   for i, t in enumerate(timesteps):  0,t0  1,t1  2,t2  3,t3  4,t4     state after 2: latents,
    resumed    set_timesteps, noise   for i, t in enumerate(timesteps):                    3,t3  4,t4     scheduler, generator

The state of the last step is always at hand (`Steps`), and takes nothing: the loop itself holds it until its next step ends.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from graphrun.errors import BrokenPlan
from graphrun.modules.trees import tensors_in
from graphrun.ops.loops import CALLBACKS, REMEMBERED, why_not


@dataclass(frozen=True, slots=True)
class StepState:
    """A loop after ``done`` of its ``steps`` steps. ``scheduler``: name -> (value, whether it was on the device)."""

    done: int
    steps: int
    latents: torch.Tensor
    generator: torch.Tensor
    scheduler: Mapping[str, tuple[Any, bool]]

    def on_host(self) -> StepState:
        """A copy of it that nothing else changes."""
        host = torch.device("cpu")
        scheduler = {name: (_moved(value, host), there) for name, (value, there) in self.scheduler.items()}
        return replace(self, latents=_moved(self.latents, host), scheduler=scheduler)


class Journal(Protocol):
    """Whoever keeps the states of loops, by stage."""

    def state(self, stage: str) -> StepState | None:
        """Where the loop of ``stage`` is to begin; None: at its first step."""

    def wants(self, stage: str, done: int, steps: int) -> bool:
        """Whether the state after step ``done`` is to be saved."""

    def save(self, stage: str, state: StepState) -> None:
        """Keeps ``state``, which is on the host, in place of earlier ones."""


class Steps:
    """The state of a loop after its last finished step; ``journal`` is told of it, and says where a loop begins that has none here.

    The state consists of the loop's own tensors, so that keeping it copies nothing and takes no memory while a component computes.
    `leave` takes it to the host when a run ends in the middle of a step.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal
        self._last: dict[str, tuple[StepState, list[tuple[torch.Tensor, int]]]] = {}  # and the versions of its tensors

    def state(self, stage: str) -> StepState | None:
        """Where the loop of ``stage`` is to begin; None: at its first step."""
        if stage in self._last:
            return self._last[stage][0]
        return self._journal.state(stage) if self._journal is not None else None

    def finish(self, stage: str, state: StepState) -> None:
        """A step of ``stage`` is done, and not the last one."""
        tensors = tensors_in([state.latents, *(value for value, _ in state.scheduler.values())])
        self._last = {stage: (state, [(tensor, tensor._version) for tensor in tensors])}
        if self._journal is not None and self._journal.wants(stage, state.done, state.steps):
            self._journal.save(stage, state.on_host())

    def forget(self, stage: str) -> None:
        """The loop of ``stage`` is done, or begins at its first step."""
        self._last.pop(stage, None)

    def leave(self) -> None:
        """The state is on the host from now on. One that the broken step has changed, or that cannot be copied, is none."""
        for stage, (state, versions) in list(self._last.items()):
            del self._last[stage]
            if all(tensor._version == version for tensor, version in versions):
                with contextlib.suppress(RuntimeError):
                    self._last[stage] = state.on_host(), []


@contextlib.contextmanager
def journaled(pipeline: Any, stage: str, generator: torch.Generator, keeper: Steps | None) -> Iterator[dict[str, Any]]:
    """In this context ``pipeline``'s call, with more arguments, tells ``keeper`` of each step and begins its loop where that says.

    None where there is no keeper, or the pipeline's loop cannot be begun in its middle: then nothing is kept either.
    """
    kind = type(pipeline)
    if keeper is None or why_not(kind):
        yield {}
        return
    pipeline.scheduler = _remembering(pipeline.scheduler)
    loop = _Loop(pipeline, stage, generator, keeper)
    takes = inspect.signature(kind.__call__).parameters
    _count_with(pipeline, loop.counted)
    hears = {"callback_on_step_end": loop.on_step_end, "callback": loop.on_step}
    name = next(name for name in CALLBACKS if name in takes)
    try:
        yield {name: hears[name]}
    finally:  # what refers to itself would live on, and the pipeline's tensors with it
        pipeline.__class__ = kind
        del loop.pipeline


class _Loop:
    """A pipeline's loop over timesteps: begun where the keeper says, and told to it step by step."""

    def __init__(self, pipeline: Any, stage: str, generator: torch.Generator, keeper: Steps) -> None:
        self.pipeline, self.stage, self.generator, self.keeper = pipeline, stage, generator, keeper
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
        state = self.keeper.state(self.stage)
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
        _let_go(sys._getframe(1).f_locals)
        self._keep(index + 1, latents)
        return values

    def on_step(self, index: int, _: Any, latents: torch.Tensor) -> None:
        """As older ones do, which count the steps of a picture: a scheduler of second order takes two for one."""
        self._keep((index + 1) * getattr(self.pipeline.scheduler, "order", 1), latents)

    def _keep(self, done: int, latents: torch.Tensor) -> None:
        known = _known(self.pipeline.scheduler)
        if done < self.steps and latents.shape == self.shape and known is not None:
            self.keeper.finish(self.stage, StepState(done, self.steps, latents, self.generator.get_state(), known))
        else:
            self.keeper.forget(self.stage)


def _let_go(seen: Any) -> None:
    """The pipeline's loop asked for its ``locals()`` to make its callback's arguments, and before Python 3.13 (PEP 667) its frame
    keeps what it was given: all of this step's tensors, beside those of the next. That copy is emptied, not the variables."""
    if type(seen) is dict:
        seen.clear()


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
    """Everything that ``scheduler`` holds, its own tensors in containers of ours; None where something of it is not plain data."""
    found = {}
    for name, value in vars(scheduler).items():
        if name in ("_internal_dict", "timesteps"):  # its configuration; what `set_timesteps` makes
            continue
        tensors: list[torch.Tensor] = []
        if not _plain(value, tensors):
            return None
        found[name] = (_shell(value), any(tensor.device.type != "cpu" for tensor in tensors))
    return found


def _shell(value: Any) -> Any:
    """``value`` with its containers copied, and arrays of numpy, which the scheduler may change; tensors are the same."""
    if isinstance(value, (list, tuple)):
        return type(value)(_shell(item) for item in value)
    if isinstance(value, dict):
        return {key: _shell(item) for key, item in value.items()}
    return value.copy() if type(value).__module__ == "numpy" else value


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

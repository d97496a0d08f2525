"""Saves the state of a denoising loop after each step, and resumes a pipeline's loop from such a
state.

The state is latents, scheduler and random numbers. A `Journal` keeps states beyond a run.

    unbroken   set_timesteps, noise   for i, t in enumerate(timesteps):  0,t0  1,t1  2,t2  3,t3
    4,t4     state after 2: latents, resumed    set_timesteps, noise   for i, t in
    enumerate(timesteps):                    3,t3  4,t4     scheduler, generator

`Steps` always has the state of the last step. It takes no memory: the loop itself holds these
tensors until its next step ends.
"""

from __future__ import annotations

import contextlib
import copy
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
from graphrun.modules.trees import tensors_in, walk
from graphrun.ops.loops import CALLBACKS, REMEMBERED, why_not
from graphrun.ops.pipeline import changed_scheduler


@dataclass(frozen=True, slots=True)
class StepState:
    """A loop after ``done`` of its ``steps`` steps. ``scheduler``: attribute -> (value, whether it
    was on the device)."""

    done: int
    steps: int
    latents: torch.Tensor
    generator: torch.Tensor
    scheduler: Mapping[str, tuple[Any, bool]]

    def on_host(self) -> StepState:
        """A copy on the host."""
        return replace(
            self, latents=_copied(self.latents, "cpu"), scheduler=_copied(self.scheduler, "cpu")
        )


class Journal(Protocol):
    """Saves the states of loops, by stage."""

    def state(self, stage: str) -> StepState | None:
        """The state from which the loop of ``stage`` resumes; None to start at its first step."""

    def wants(self, stage: str, done: int, steps: int) -> bool:
        """Whether to save the state after step ``done``."""

    def save(self, stage: str, state: StepState) -> None:
        """Saves ``state``, which is on the host, in place of earlier ones."""


class Steps:
    """The state of a loop after its last finished step. Passes states on to ``journal``, and takes
    the first one from it.

    The state refers to the loop's own tensors, so keeping it copies nothing and takes no memory
    while a component computes. `leave` copies it to the host when a run ends in the middle of a
    step.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal
        self._stage = ""  # the stage whose loop ``_last`` is the state of
        self._last: StepState | None = None
        self._versions: list[
            tuple[torch.Tensor, int]
        ] = []  # of the state's tensors: their version counters

    def state(self, stage: str) -> StepState | None:
        """The state from which the loop of ``stage`` resumes; None to start at its first step."""
        if stage == self._stage and self._last is not None:
            return self._last
        return self._journal.state(stage) if self._journal is not None else None

    def finish(self, stage: str, state: StepState) -> None:
        """Stores the state of ``stage`` after a step that is not its last."""
        tensors = tensors_in([state.latents, state.scheduler])
        self._stage, self._last, self._versions = (
            stage,
            state,
            [(tensor, tensor._version) for tensor in tensors],
        )
        if self._journal is not None and self._journal.wants(stage, state.done, state.steps):
            self._journal.save(stage, state.on_host())

    def forget(self, stage: str) -> None:
        """Drops the state of ``stage``, whose loop is done or starts at its first step."""
        if stage == self._stage:
            self._last, self._versions = None, []

    def leave(self) -> None:
        """Copies the state to the host. Drops it if the unfinished step has changed it in place, or
        if it cannot be copied."""
        state, versions = self._last, self._versions
        self._last, self._versions = None, []
        if state is not None and all(tensor._version == version for tensor, version in versions):
            with contextlib.suppress(RuntimeError):
                self._last = state.on_host()


@contextlib.contextmanager
def journaled(
    pipeline: Any, stage: str, generator: torch.Generator, keeper: Steps | None
) -> Iterator[dict[str, Any]]:
    """A context in which ``pipeline``'s call reports each step to ``keeper`` and resumes its loop
    from the keeper's state.

    Yields arguments to add to the call. They are empty where there is no keeper or the pipeline's
    loop cannot be resumed; then nothing is saved.
    """
    kind = type(pipeline)
    if keeper is None or why_not(kind):
        yield {}
        return
    pipeline.scheduler = _storing_scheduler(pipeline.scheduler)
    loop = _Loop(pipeline, stage, generator, keeper)
    takes = inspect.signature(kind.__call__).parameters
    _replace_enumerate(pipeline, loop.resumed_enumerate)
    callbacks = {"callback_on_step_end": loop.on_step_end, "callback": loop.on_step}
    name = next(name for name in CALLBACKS if name in takes)
    try:
        yield {name: callbacks[name]}
    finally:  # breaks reference cycles, which would keep the pipeline's tensors alive
        pipeline.__class__ = kind
        del loop.pipeline


@dataclass
class _Loop:
    """A pipeline's loop over timesteps, resumed from ``keeper``'s state and reported to it step by
    step."""

    pipeline: Any
    stage: str
    generator: torch.Generator
    keeper: Steps
    steps: int = 0
    shape: torch.Size | None = None  # of the latents at the start; only these can be replaced

    def resumed_enumerate(self, values: Any, start: int = 0) -> Any:
        """Replaces ``enumerate`` in the pipeline's call. It is called where the loop begins, after
        the code before the loop has run as usual.

        Restores the scheduler's attributes, the latents and the generator. The timesteps stay
        complete, since the last steps of multistep methods, and of some pipelines, are recognized
        by their number.
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
            raise BrokenPlan(
                f"{self.stage}: steps and shape of latents are {now}, but {before} in the saved state: remove it and start again"
            )
        device = latents.device
        # The state's dtype may differ from that of the noise, so the tensors are swapped instead of
        # copied.
        torch.utils.swap_tensors(latents, state.latents.to(device, copy=True))  # type: ignore[no-untyped-call]
        for name, (value, on_device) in state.scheduler.items():
            setattr(self.pipeline.scheduler, name, _copied(value, device if on_device else "cpu"))
        self.generator.set_state(state.generator)
        return itertools.islice(enumerate(values, start), state.done, None)

    def on_step_end(self, _: Any, index: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
        """The current form of the step callback."""
        latents = values["latents"]
        values.clear()  # else its tensors stay on the device until the end of the next step
        _clear_locals(sys._getframe(1).f_locals)
        self._keep(index + 1, latents)
        return values

    def on_step(self, index: int, _: Any, latents: torch.Tensor) -> None:
        """The older form, which counts steps of the picture: a scheduler of second order takes two
        for one."""
        self._keep((index + 1) * getattr(self.pipeline.scheduler, "order", 1), latents)

    def _keep(self, done: int, latents: torch.Tensor) -> None:
        """Passes the state after step ``done`` to the keeper, unless it was the last one or cannot
        be saved."""
        scheduler = _scheduler_state(self.pipeline.scheduler)
        if done < self.steps and latents.shape == self.shape and scheduler is not None:
            self.keeper.finish(
                self.stage,
                StepState(done, self.steps, latents, self.generator.get_state(), scheduler),
            )
        else:
            self.keeper.forget(self.stage)


def _clear_locals(seen: Any) -> None:
    """Clears a frame's copy of its local variables.

    The pipeline's loop calls ``locals()`` for its callback's arguments. Before Python 3.13 (PEP
    667) the frame keeps that dict: all tensors of this step, beside those of the next. The
    variables themselves stay.
    """
    if type(seen) is dict:
        seen.clear()


def _replace_enumerate(pipeline: Any, resumed_enumerate: Callable[..., Any]) -> None:
    """Gives ``pipeline`` a class whose `__call__` has the same code but ``resumed_enumerate`` for
    ``enumerate``.

    Other pipelines are not affected.
    """
    kind = type(pipeline)
    plain = inspect.unwrap(kind.__call__)
    names = {**plain.__globals__, "enumerate": resumed_enumerate}
    call = types.FunctionType(
        plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__
    )
    call.__kwdefaults__ = plain.__kwdefaults__
    members = {
        "__module__": kind.__module__,
        "__call__": functools.wraps(plain)(torch.no_grad()(call)),
    }
    pipeline.__class__ = type(kind.__name__, (kind,), members)


def _latents_of(frame: Any) -> torch.Tensor | None:
    """The loop's latents before its first step; None where there are none, or another variable
    refers to them too."""
    names = frame.f_locals
    latents = names.get("latents")
    references = [
        v
        for v in names.values()
        if any(one is latents for one in (v if isinstance(v, (list, tuple)) else (v,)))
    ]
    _clear_locals(names)
    return latents if isinstance(latents, torch.Tensor) and len(references) == 1 else None


def _storing_scheduler(scheduler: Any) -> Any:
    """A scheduler like ``scheduler`` that stores the value its `step` returns for the next `step`,
    which the pipeline otherwise passes on.
    """
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

    return changed_scheduler(scheduler, step=step)


def _scheduler_state(scheduler: Any) -> dict[str, tuple[Any, bool]] | None:
    """All attributes of ``scheduler``, as (copy of the containers with the same tensors, whether on
    the device); None where one is not plain data.
    """
    found = {}
    for name, value in vars(scheduler).items():
        if name in (
            "_internal_dict",
            "timesteps",
        ):  # the configuration; the result of `set_timesteps`
            continue
        if not _is_plain(value):
            return None
        tensors = tensors_in(value)
        copied = copy.deepcopy(value, {id(tensor): tensor for tensor in tensors})
        found[name] = copied, any(tensor.device.type != "cpu" for tensor in tensors)
    return found


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is plain data: numbers, texts, numpy arrays, tensors and containers of
    these."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return (
        value is None
        or isinstance(value, (bool, int, float, str, torch.Tensor))
        or type(value).__module__ == "numpy"
    )


def _copied(value: Any, device: torch.device | str) -> Any:
    """A copy of ``value`` with its tensors copied to ``device``."""
    return walk(value, lambda tensor: tensor.to(device, copy=True))

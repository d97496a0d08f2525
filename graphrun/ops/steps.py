"""Save the state of a denoising loop after each step, and resume a pipeline's loop from a state.

The state is latents, scheduler and random numbers. A `StepJournal` stores states beyond a run.

    unbroken   set_timesteps, noise   for i, t in enumerate(timesteps): 0,t0 1,t1 2,t2 3,t3 4,t4
    resumed    set_timesteps, noise   for i, t in enumerate(timesteps):                3,t3 4,t4

Here the loop resumes from the state after step 2.
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
from graphrun.ops.loops import CALLBACKS, PREVIOUS_PREDICTION, resume_obstacle
from graphrun.ops.pipeline import derive_scheduler


@dataclass(frozen=True, slots=True)
class StepState:
    """A loop after ``finished_steps``. ``scheduler``: by attribute, (value, whether on the
    device)."""

    finished_steps: int
    steps: int
    latents: torch.Tensor
    generator: torch.Tensor
    scheduler: Mapping[str, tuple[Any, bool]]

    def on_host(self) -> StepState:
        return replace(
            self,
            latents=_copy_tensors(self.latents, "cpu"),
            scheduler=_copy_tensors(self.scheduler, "cpu"),
        )


class StepJournal(Protocol):
    """Saves the states of loops, by stage."""

    def state(self, stage: str) -> StepState | None:
        """Return the state from which the loop of ``stage`` resumes; None to start at its first
        step."""

    def wants(self, stage: str, step: int, steps: int) -> bool:
        """Return whether to save the state after ``step``."""

    def save(self, stage: str, state: StepState) -> None:
        """Save ``state``, which is on the host, in place of earlier states."""


class Steps:
    """The state of a loop after its last finished step.

    The first state comes from ``journal``; each new state goes to it. A state refers to the loop's
    own tensors, which live until the next step ends, so it takes no memory. `move_to_host` copies
    it when a run ends in the middle of a step.
    """

    def __init__(self, journal: StepJournal | None = None) -> None:
        self._journal = journal
        self._stage = ""  # of ``_last``
        self._last: StepState | None = None
        # version counters of the state's tensors
        self._versions: list[tuple[torch.Tensor, int]] = []

    def state(self, stage: str) -> StepState | None:
        if stage == self._stage and self._last is not None:
            return self._last
        return self._journal.state(stage) if self._journal is not None else None

    def finish(self, stage: str, state: StepState) -> None:
        """Store the state of ``stage`` after a step that is not its last."""
        tensors = tensors_in([state.latents, state.scheduler])
        self._stage, self._last, self._versions = (
            stage,
            state,
            [(tensor, tensor._version) for tensor in tensors],
        )
        if self._journal is not None and self._journal.wants(
            stage, state.finished_steps, state.steps
        ):
            self._journal.save(stage, state.on_host())

    def forget(self, stage: str) -> None:
        """Drop the state of ``stage``, whose loop is finished or starts at its first step."""
        if stage == self._stage:
            self._last, self._versions = None, []

    def move_to_host(self) -> None:
        """Copy the state to the host; drop it if that fails or the unfinished step changed it."""
        state, versions = self._last, self._versions
        self._last, self._versions = None, []
        if state is not None and all(tensor._version == version for tensor, version in versions):
            with contextlib.suppress(RuntimeError):
                self._last = state.on_host()


@contextlib.contextmanager
def journal_steps(
    pipeline: Any, stage: str, generator: torch.Generator, keeper: Steps | None
) -> Iterator[dict[str, Any]]:
    """Resume ``pipeline``'s loop from the state in ``keeper``, and report each step to it.

    Yields arguments to add to the call. They are empty, and nothing is saved, without a keeper or
    if the pipeline's loop cannot resume.
    """
    kind = type(pipeline)
    if keeper is None or resume_obstacle(kind):
        yield {}
        return
    pipeline.scheduler = _storing_scheduler(pipeline.scheduler)
    loop = _Loop(pipeline, stage, generator, keeper)
    parameters = inspect.signature(kind.__call__).parameters
    _replace_enumerate(pipeline, loop.resumed_enumerate)
    callbacks = {"callback_on_step_end": loop.on_step_end, "callback": loop.on_step}
    name = next(name for name in CALLBACKS if name in parameters)
    try:
        yield {name: callbacks[name]}
    finally:  # breaks reference cycles, which would keep the pipeline's tensors alive
        pipeline.__class__ = kind
        del loop.pipeline


@dataclass
class _Loop:
    """A pipeline's loop over timesteps: resumes from ``keeper``'s state, reports each step."""

    pipeline: Any
    stage: str
    generator: torch.Generator
    keeper: Steps
    steps: int = 0
    shape: torch.Size | None = None  # of the initial latents; only this shape can resume

    def resumed_enumerate(self, values: Any, start: int = 0) -> Any:
        """Replacement for ``enumerate`` in the pipeline's call, called where the loop begins.

        It restores the scheduler's attributes, the latents and the generator. The code before the
        loop has run as usual. The timesteps stay complete, since multistep methods and some
        pipelines recognize the last steps by their number.
        """
        if not isinstance(values, torch.Tensor):
            return enumerate(values, start)
        latents = _latents_of(sys._getframe(1))
        self.steps, self.shape = len(values), latents.shape if latents is not None else None
        state = self.keeper.state(self.stage)
        if state is None:
            return enumerate(values, start)
        saved_state, loop_state = (state.steps, state.latents.shape), (self.steps, self.shape)
        if latents is None or loop_state != saved_state:
            raise BrokenPlan(
                f"{self.stage}: steps and shape of latents are {loop_state}, but {saved_state} "
                "in the saved state: remove it and start again"
            )
        device = latents.device
        # swap instead of copy, since state and noise may differ in dtype
        torch.utils.swap_tensors(latents, state.latents.to(device, copy=True))  # type: ignore[no-untyped-call]
        for name, (value, on_device) in state.scheduler.items():
            setattr(
                self.pipeline.scheduler, name, _copy_tensors(value, device if on_device else "cpu")
            )
        self.generator.set_state(state.generator)
        return itertools.islice(enumerate(values, start), state.finished_steps, None)

    def on_step_end(self, _: Any, index: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
        """Step callback of diffusers, current form."""
        latents = values["latents"]
        values.clear()  # otherwise the tensors stay on the device until the next step ends
        _clear_locals(sys._getframe(1).f_locals)
        self._report(index + 1, latents)
        return values

    def on_step(self, index: int, _: Any, latents: torch.Tensor) -> None:
        """Step callback of diffusers, older form. It counts steps of the picture: a second-order
        scheduler takes two steps per count."""
        self._report((index + 1) * getattr(self.pipeline.scheduler, "order", 1), latents)

    def _report(self, step: int, latents: torch.Tensor) -> None:
        """Pass the state after ``step`` to the keeper, unless it is the last or cannot be saved."""
        scheduler = _scheduler_state(self.pipeline.scheduler)
        if step < self.steps and latents.shape == self.shape and scheduler is not None:
            self.keeper.finish(
                self.stage,
                StepState(step, self.steps, latents, self.generator.get_state(), scheduler),
            )
        else:
            self.keeper.forget(self.stage)


def _clear_locals(local_values: Any) -> None:
    """Clear a frame's copy of its local variables.

    The pipeline's loop calls ``locals()`` for its callback's arguments. Before Python 3.13 (PEP
    667) the frame keeps that dict, and so all tensors of this step during the next. The variables
    themselves are not changed.
    """
    if type(local_values) is dict:
        local_values.clear()


def _replace_enumerate(pipeline: Any, resumed_enumerate: Callable[..., Any]) -> None:
    """Replace ``enumerate`` in the `__call__` of ``pipeline`` by ``resumed_enumerate``.
    ``pipeline`` gets its own class with the same code; other pipelines are not affected."""
    kind = type(pipeline)
    function = inspect.unwrap(kind.__call__)
    names = {**function.__globals__, "enumerate": resumed_enumerate}
    call = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    call.__kwdefaults__ = function.__kwdefaults__
    members = {
        "__module__": kind.__module__,
        "__call__": functools.wraps(function)(torch.no_grad()(call)),
    }
    pipeline.__class__ = type(kind.__name__, (kind,), members)


def _latents_of(frame: Any) -> torch.Tensor | None:
    """Return the latents before the loop's first step; None if another variable refers to them."""
    names = frame.f_locals
    latents = names.get("latents")
    references = [
        value
        for value in names.values()
        if any(
            item is latents for item in (value if isinstance(value, (list, tuple)) else (value,))
        )
    ]
    _clear_locals(names)
    return latents if isinstance(latents, torch.Tensor) and len(references) == 1 else None


def _storing_scheduler(scheduler: Any) -> Any:
    """Return a copy of ``scheduler`` that stores the value that `step` returns for the next `step`.
    Otherwise the pipeline passes this value on, outside the scheduler's state."""
    kind, signature = type(scheduler), inspect.signature(type(scheduler).step)
    if PREVIOUS_PREDICTION not in signature.parameters:
        return scheduler

    @functools.wraps(kind.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        if bound.arguments[PREVIOUS_PREDICTION] is None:
            bound.arguments[PREVIOUS_PREDICTION] = vars(self).get(PREVIOUS_PREDICTION)
        result = kind.step(*bound.args, **bound.kwargs)
        setattr(self, PREVIOUS_PREDICTION, result[1])
        return result

    return derive_scheduler(scheduler, step=step)


def _scheduler_state(scheduler: Any) -> dict[str, tuple[Any, bool]] | None:
    """Return the attributes of ``scheduler`` as (value, whether on the device); None if any is not
    plain. Containers are copied, tensors are not."""
    attributes = {}
    for name, value in vars(scheduler).items():
        # the configuration; the result of `set_timesteps`
        if name in ("_internal_dict", "timesteps"):
            continue
        if not _is_plain(value):
            return None
        tensors = tensors_in(value)
        copied_value = copy.deepcopy(value, {id(tensor): tensor for tensor in tensors})
        attributes[name] = copied_value, any(tensor.device.type != "cpu" for tensor in tensors)
    return attributes


def _is_plain(value: Any) -> bool:
    """Return whether ``value`` is numbers, texts, numpy arrays, tensors or containers of these."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return (
        value is None
        or isinstance(value, (bool, int, float, str, torch.Tensor))
        or type(value).__module__ == "numpy"
    )


def _copy_tensors(value: Any, device: torch.device | str) -> Any:
    """Return a copy of ``value`` with its tensors copied to ``device``."""
    return walk(value, lambda tensor: tensor.to(device, copy=True))

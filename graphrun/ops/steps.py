"""A denoising loop that goes on where another one stopped: its state after each step, and a pipeline's own loop begun behind it.

Decides what the state is (latents, scheduler, random numbers) and when a pipeline's loop can be begun in its middle. Knows no file:
whoever keeps states beyond a run is a `Journal`.

    unbroken   set_timesteps  t0  t1  t2  t3  t4     state after t2 = latents, what the scheduler knows, the generator's state
    resumed    set_timesteps              t3  t4     the same code with the same numbers from there on

The state of the last step is always at hand (`Steps`), and takes nothing: the loop itself holds it until its next step ends.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from graphrun.components.trees import tensors_in
from graphrun.errors import BrokenPlan

# What may depend on a step's number without harm; where anything else does, a loop begun in its middle is another one.
_HARMLESS = frozenset({"callback_on_step_end", "num_warmup_steps", "callback"})


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


def journaled(pipeline: Any, stage: str, generator: torch.Generator, keeper: Steps | None) -> dict[str, Any]:
    """More arguments for ``pipeline``'s call, so that ``keeper`` hears of each step and the loop begins where it says.

    Empty where there is none, or the pipeline's loop cannot be begun in its middle: then nothing is kept either.
    """
    if keeper is None or not resumable(type(pipeline)):
        return {}
    state, arguments = keeper.state(stage), {}
    begin = 0
    if state is not None:
        begin = state.done
        pipeline.scheduler = _continued(pipeline.scheduler, state, generator, pipeline.device)
        arguments["latents"] = state.latents  # on the host: the pipeline takes it to the device and holds the only copy there

    def on_step_end(_: Any, index: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
        latents, done, steps = values["latents"], begin + index + 1, len(pipeline.scheduler.timesteps)
        values.clear()  # what it refers to would live on the device until the next step's end
        _let_go(sys._getframe(1).f_locals)
        if done < steps and (known := _known(pipeline.scheduler)) is not None:
            keeper.finish(stage, StepState(done, steps, latents, generator.get_state(), known))
        else:
            keeper.forget(stage)
        return values

    return {**arguments, "callback_on_step_end": on_step_end}


def _let_go(seen: Any) -> None:
    """The pipeline's loop asked for its ``locals()`` to make its callback's arguments, and before Python 3.13 (PEP 667) its frame
    keeps what it was given: all of this step's tensors, beside those of the next. That copy is emptied, not the variables."""
    if type(seen) is dict:
        seen.clear()


def resumable(kind: Any) -> bool:
    """Whether the loop of the pipeline class ``kind`` takes callbacks, and does the same whatever number a step has in it."""
    return _resumable(inspect.unwrap(kind.__call__))


@functools.cache
def _resumable(call: Any) -> bool:
    if not {"callback_on_step_end", "latents", "generator"} <= inspect.signature(call).parameters.keys():
        return False
    tree = ast.parse(textwrap.dedent(inspect.getsource(call)))
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and _counted(node)]
    return len(loops) == 1 and not any(_depends(loops[0].target.elts[0].id, node) for node in loops[0].body)  # type: ignore[attr-defined]


def _counted(loop: ast.For) -> bool:
    """Whether this is ``for i, t in enumerate(timesteps)``."""
    call, target = loop.iter, loop.target
    return (
        isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "enumerate"
        and "timesteps" in ast.unparse(call)
        and isinstance(target, ast.Tuple)
        and isinstance(target.elts[0], ast.Name)
    )


def _depends(index: str, node: ast.AST) -> bool:
    """Whether ``node`` reads the variable ``index`` anywhere but for callbacks and progress."""
    if isinstance(node, ast.If) and _HARMLESS & {name.id for name in ast.walk(node.test) if isinstance(name, ast.Name)}:
        return any(_depends(index, child) for child in node.orelse)
    if isinstance(node, ast.Name):
        return node.id == index
    return any(_depends(index, child) for child in ast.iter_child_nodes(node))


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


def _continued(scheduler: Any, state: StepState, generator: torch.Generator, device: torch.device) -> Any:
    """A scheduler like ``scheduler`` whose loop begins behind ``state``.

    The pipeline sees the steps that are left; the scheduler's own code sees all of them, since the last ones of multistep methods
    are told by their number. The generator is set when the first of them is taken: what a pipeline draws before its loop is drawn.
    """
    kind = type(scheduler)

    @functools.wraps(kind.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.set_timesteps(self, *args, **kwargs)
        if len(self.timesteps) != state.steps:
            raise BrokenPlan(f"the loop has {len(self.timesteps)} steps, and the state that was kept is of one with {state.steps}")
        for name, (value, there) in state.scheduler.items():
            setattr(self, name, _moved(value, device if there else torch.device("cpu")))
        self.all_timesteps = self.timesteps
        self.timesteps = self.timesteps[state.done :]

    @functools.wraps(kind.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "all_timesteps" in vars(self):
            self.timesteps = vars(self).pop("all_timesteps")
            generator.set_state(state.generator)
        return kind.step(self, *args, **kwargs)

    members = {"__module__": kind.__module__, "set_timesteps": set_timesteps, "step": step, "init_noise_sigma": 1.0}
    begun: Any = type(kind.__name__, (kind,), members)
    return begun.from_config(scheduler.config)

"""A denoising loop that goes on where another one stopped: its state after each step, and a pipeline's own loop begun behind it.

Decides what the state is (latents, scheduler, random numbers) and when a pipeline's loop can be begun in its middle. Knows no file:
whoever keeps states is a `Journal`.

    unbroken   set_timesteps  t0  t1  t2  t3  t4     state after t2 = latents, what the scheduler knows, the generator's state
    resumed    set_timesteps              t3  t4     the same code with the same numbers from there on
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from graphrun.errors import BrokenPlan

# What may depend on a step's number without harm; where anything else does, a loop begun in its middle is another one.
_HARMLESS = frozenset({"callback_on_step_end", "num_warmup_steps", "callback"})


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
    if journal is None or not resumable(type(pipeline)):
        return {}
    state, arguments = journal.state(stage), {}
    begin = 0
    if state is not None:
        begin = state.done
        pipeline.scheduler = _continued(pipeline.scheduler, state, generator, pipeline.device)
        arguments["latents"] = state.latents  # on the host: the pipeline takes it to the device and holds the only copy there

    def on_step_end(_: Any, index: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
        latents, done, steps = values["latents"], begin + index + 1, len(pipeline.scheduler.timesteps)
        values.clear()  # what it refers to would live on the device until the next step's end
        if done < steps and journal.wants(stage, done, steps) and (known := _known(pipeline.scheduler)) is not None:
            journal.save(stage, StepState(done, steps, latents.cpu(), generator.get_state(), known))
        return values

    return {**arguments, "callback_on_step_end": on_step_end}


def resumable(kind: Any) -> bool:
    """Whether the loop of the pipeline class ``kind`` takes callbacks, and does the same whatever number a step has in it."""
    parameters = inspect.signature(kind.__call__).parameters
    if not {"callback_on_step_end", "latents", "generator"} <= parameters.keys():
        return False
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.__call__))))
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

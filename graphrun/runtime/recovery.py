"""Recovers from running out of memory: undoes the failed stage, plans the remaining stages with the
measured bytes, and continues.

    encode | denoise t0 t1 t2 | -- out of memory --> copy values and the state after t1 to the host
    | plan t2 .., decode | t2 ..
                                                     | no plan fits: save them to a file, and stop

Components keep their backing stores and precisions. A denoising loop resumes after its last
finished step; one that cannot be resumed (`graphrun.ops.steps`) restarts from its first step.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from graphrun.errors import BrokenPlan, InputError, OutOfMemory, PlanError
from graphrun.files import write_whole
from graphrun.graph.graph import Graph
from graphrun.model.choices import reorder, stages_of
from graphrun.model.plan import Plan
from graphrun.model.precomputed import shortened
from graphrun.model.problem import PhaseNumbers, Problem, Secondary
from graphrun.model.solution import Solution
from graphrun.ops import Stages
from graphrun.runtime.devices.device import Device
from graphrun.runtime.executor import Session, refuse_broken, stages_for
from graphrun.runtime.host import Host
from graphrun.runtime.run import Progress
from graphrun.solve.infeasible import Infeasible
from graphrun.solve.solve import solve
from graphrun.trace import Event, SlotTrace, Trace
from graphrun.units import parse_size, show_size

MAX_REPLANS = 8  # in one run
MIN_INCREASE_FRACTION = 64  # a phase's bytes are raised by at least 1/64 of the budget

Tell = Callable[[str], None]


def execute(
    solution: Solution,
    graph: Graph,
    inputs: Mapping[str, Any],
    device: Device,
    modules: Mapping[str, nn.Module] | None = None,
    progress: Progress | None = None,
    *,
    host: Host | None = None,
    tell: Tell | None = None,
    keep: Path | None = None,
    ram_bytes: int | None = None,
    **more: Any,
) -> Trace:
    """Runs ``graph`` on resolved ``inputs`` by ``solution``, which fits it (`refuse_unfit`).
    Returns the trace, with the graph's outputs on the host.

    ``modules``: components that were built before. ``host``: backing stores of an earlier run, in
    place of ``modules``; without it they are created for this run and dropped at its end. ``tell``,
    ``keep``: as for `run_to_the_end`; ``more``: as for `Stages`. ``ram_bytes``: RAM that this
    machine, or this process's cgroup, has left.

    Raises PlanError before anything is loaded, when the plan needs more RAM than ``ram_bytes``;
    OutOfMemory when no plan fits the memory of the device; TransferFailed when a copy fails;
    BrokenPlan when the run deviates from its plan. After any error the device is back at its
    baseline, and the next run is unaffected.
    """
    if ram_bytes is not None and (held := solution.simulation.host_peak_bytes) > ram_bytes:
        raise PlanError(
            f"the plan holds {show_size(held)} in RAM, and this machine, or this process's cgroup, has {show_size(ram_bytes)} "
            f"left: plan again with --ram {ram_bytes}"
        )
    own = Host.of_graph(graph, solution.chosen, device, modules) if host is None else host
    try:
        stages = stages_for(solution.plan, graph, inputs, device, own, **more)
        return run_to_the_end(solution, stages, own, device, progress, tell=tell, keep=keep)
    finally:
        if host is None:
            own.close()


def run_to_the_end(
    solution: Solution,
    stages: Stages,
    host: Host,
    device: Device,
    progress: Progress | None = None,
    *,
    tell: Tell | None = None,
    keep: Path | None = None,
    session: Session | None = None,
) -> Trace:
    """Runs ``stages`` by ``solution``. When the device has less memory than planned, or a stage
    needs more, plans the remaining stages again and continues.

    ``session``: an open session of ``solution``, of which this is the next run. After a replan, the
    session's next run is a first run. ``tell`` is called with one line per replan. Raises
    OutOfMemory when no plan fits; the outputs of finished stages are then saved in the folder
    ``keep`` (default: a new temporary one), which the error names. The trace has the slots of the
    finished stages, and the lines as ``notes``.
    """
    traces: list[Trace] = []
    notes: list[str] = []
    done = _steps_done(stages)
    while True:
        try:
            with (
                nullcontext(session)
                if session is not None
                else Session(solution, host, device) as running
            ):
                traces.append(running.run(stages, progress))
            return _joined(traces, notes)
        except OutOfMemory as error:
            if error.partial is not None:
                traces.append(error.partial)
            try:
                if len(notes) == MAX_REPLANS:
                    raise BrokenPlan(f"planned again {MAX_REPLANS} times")
                if lost := stages.lost:
                    raise BrokenPlan(f"{', '.join(lost)} could not be copied from the device")
                stage = next(
                    (phase.stage for phase in solution.chosen.phases if phase.name == error.phase),
                    "",
                )
                begun = stage == stages.todo[0].name
                problem = remaining_problem(
                    solution.problem, solution.plan, [stage.name for stage in stages.todo], error
                )
                problem, done = _without_done_steps(problem, stages, done)
                solution, session = solve(problem), None
                refuse_broken(solution)
            except (Infeasible, BrokenPlan) as reason:
                raise _no_plan_fits(error, reason, stages, keep) from None
            stages.todo = [
                stages.graph.stage(name)
                for name in solution.plan.order or stages_of(solution.problem)
            ]
            stages.options = dict(solution.plan.options)
            notes.append(_note(error, solution.problem, stages, begun=begun))
            if tell is not None:
                tell(notes[-1])


def _steps_done(stages: Stages) -> dict[str, tuple[int, int]]:
    """Stage -> (finished steps, all steps), for each stage whose loop can resume in the middle."""
    states = {stage.name: stages.steps.state(stage.name) for stage in stages.todo}
    return {name: (state.done, state.steps) for name, state in states.items() if state is not None}


def _without_done_steps(
    problem: Problem, stages: Stages, before: Mapping[str, tuple[int, int]]
) -> tuple[Problem, dict[str, tuple[int, int]]]:
    """``problem``, which lacks the steps that were done ``before``, without all steps done by now;
    and these, as `_steps_done`.

    A loop whose calls cannot be assigned to steps restarts from its first step.
    """
    steps_done = _steps_done(stages)
    for name, (done, steps) in list(steps_done.items()):
        earlier = before.get(name, (0, steps))[0]
        try:
            problem = shortened(problem, {name: (done - earlier, steps - earlier)})
        except InputError:
            stages.steps.forget(name)
            del steps_done[name]
    return problem, steps_done


def remaining_problem(
    problem: Problem, plan: Plan, todo: Sequence[str], error: OutOfMemory
) -> Problem:
    """The problem of the stages ``todo``, with the variants that ``plan`` chose, corrected by what
    ``error`` measured: a smaller budget if the device has less memory than planned, else a larger
    activation in the phase that ran out of memory."""
    names, left = dict(plan.variants), set(todo)
    components = tuple(
        c.stored_as(names[c.name], anywhere=True) if c.name in names else c
        for c in problem.components
    )
    budget_bytes, increase, secondaries = (
        problem.budget_bytes,
        dict[str, tuple[str, int]](),
        list(problem.secondaries),
    )
    if error.secondary:
        secondaries[error.secondary - 1] = _less_of(secondaries[error.secondary - 1], error)
    elif error.available_bytes < problem.effective_bytes:
        budget_bytes = error.available_bytes + problem.overhead_bytes
    else:
        increase = _increase(problem, error)
    remaining = replace(
        problem,
        components=components,
        budget_bytes=max(1, budget_bytes),
        phases=tuple(
            _increased(phase, increase) for phase in problem.phases if phase.stage in left
        ),
        options=tuple(
            replace(option, phases=tuple(_increased(phase, increase) for phase in option.phases))
            for option in problem.options
            if option.stage in left
        ),
        values=tuple(value for value in problem.values if left & set(value.consumers)),
        precedence=None
        if problem.precedence is None
        else tuple(p for p in problem.precedence if left >= set(p)),
        runs=1,
        secondaries=tuple(secondaries),
    )
    return replace(remaining, values=reorder(remaining).values)


def _increase(problem: Problem, error: OutOfMemory) -> dict[str, tuple[str, int]]:
    """Phase -> (part, additional bytes): its measured peak plus the refused allocation, beyond the
    planned bytes. The minimum is 1/MIN_INCREASE_FRACTION of the budget."""
    if not error.phase:
        return {}
    return {
        error.phase: (
            error.part,
            max(_missing_bytes(error), problem.effective_bytes // MIN_INCREASE_FRACTION, 1),
        )
    }


def _missing_bytes(error: OutOfMemory) -> int:
    # the wording of torch and of sim
    wanted = re.search(r"[Tt]ried to allocate ([0-9.]+ ?[KMGT]?i?B)", str(error))
    return error.peak_bytes + (parse_size(wanted[1]) if wanted else 0) - error.planned_bytes


def _less_of(secondary: Secondary, error: OutOfMemory) -> Secondary:
    """``secondary`` with the memory that it was found to have, or where it has what was planned,
    less what a call needed beyond that: its components go elsewhere where they do not fit."""
    missing = max(_missing_bytes(error), secondary.effective_bytes // MIN_INCREASE_FRACTION, 1)
    least = min(error.available_bytes, secondary.effective_bytes - missing)
    return replace(
        secondary, budget_bytes=max(0, secondary.budget_bytes - secondary.effective_bytes + least)
    )


def _increased(phase: PhaseNumbers, increase: Mapping[str, tuple[str, int]]) -> PhaseNumbers:
    part, more = increase.get(phase.name, ("", 0))
    fields = {
        "load": ["input_bytes"],
        "first": ["first_bytes", "pipeline_code_bytes"],
        "steady": ["steady_bytes", "pipeline_code_bytes"],
    }
    if part not in fields:
        return phase
    more_bytes: dict[str, Any] = {
        name: held + more
        for name in fields[part]
        if (held := getattr(phase, name)) or name != "pipeline_code_bytes"
    }
    return replace(phase, basis="measured", **more_bytes)


def _note(error: OutOfMemory, problem: Problem, stages: Stages, *, begun: bool) -> str:
    """One line on a replan. ``begun``: whether the first remaining stage had started."""
    stage = next(iter(stages_of(problem)), "the end")
    state = stages.steps.state(stage)
    where = (
        f", after step {state.done} of {state.steps}"
        if state is not None
        else ", from its start"
        if begun
        else ""
    )
    return f"{str(error).splitlines()[0]}: planned again with {show_size(problem.effective_bytes)}, continuing from {stage}{where}"


def _no_plan_fits(
    error: OutOfMemory, reason: Exception, stages: Stages, keep: Path | None
) -> OutOfMemory:
    """The error that ends the run, after saving the values of finished stages and the latents of
    finished steps."""
    values = dict(stages.named)
    for name, (done, steps) in _steps_done(stages).items():
        state = stages.steps.state(name)
        values[f"{name}.latents after step {done} of {steps}"] = (
            state.latents if state is not None else None
        )
    named = _flat(values)
    saved = ""
    if named:
        try:
            made = sorted(name for name, value in values.items() if _flat(value))
            saved = f"; finished values are saved in {_saved(named, keep)}: {', '.join(made)}"
        except (OSError, SafetensorError) as refused:
            saved = f"; finished values could not be saved: {refused}"
    return OutOfMemory(
        f"{error}; no plan fits the remaining stages ({str(reason).splitlines()[0]}){saved}"
    )


def _saved(named: Mapping[str, torch.Tensor], keep: Path | None) -> Path:
    """Writes ``named`` to a file in ``keep`` and returns its path. The file is complete or
    absent."""
    file = (keep or Path(tempfile.mkdtemp(prefix="graphrun-values-"))) / "values.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(
        file,
        lambda part: save_file({name: tensor.contiguous() for name, tensor in named.items()}, part),
    )
    return file


def _flat(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """The tensors in ``value``, nested in mappings and sequences, by dotted name."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, Mapping):
        items: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        return {}
    return {
        key: tensor
        for k, item in items
        for key, tensor in _flat(item, f"{name}.{k}" if name else str(k)).items()
    }


def _joined(traces: Sequence[Trace], notes: Sequence[str]) -> Trace:
    """One trace of several consecutive ones, with times and slot numbers continued."""
    if len(traces) == 1:
        return replace(traces[0], notes=tuple(notes))
    slots: list[SlotTrace] = []
    events: list[Event] = []
    for trace in traces:
        offset, first = slots[-1].end_seconds if slots else 0.0, len(slots)
        events += [
            replace(_later(event, offset), slot=event.slot + first) for event in trace.events
        ]
        slots += [_later(slot, offset) for slot in trace.slots]
    return replace(traces[-1], slots=tuple(slots), events=tuple(events), notes=tuple(notes))


Timed = TypeVar("Timed", Event, SlotTrace)


def _later(timed: Timed, seconds: float) -> Timed:
    return replace(
        timed, start_seconds=timed.start_seconds + seconds, end_seconds=timed.end_seconds + seconds
    )

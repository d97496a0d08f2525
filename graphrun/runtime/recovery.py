"""Recover from running out of memory: plan the remaining stages with measured bytes, and continue.

    encode | denoise t0 t1 t2 | -- out of memory --> | copy values and the state after t1 to the
                                                     | host, plan t2 .. and decode, run t2 ..
                                                     | no plan fits: save them to a file, and stop

Components keep their backing stores and precisions. A denoising loop resumes after its last
finished step. A loop that cannot be resumed (`graphrun.ops.steps`) restarts from its first step.
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
from graphrun.hook import ProgressCallback
from graphrun.model.choices import reorder, stages_of, with_variants_of
from graphrun.model.plan import Plan
from graphrun.model.precomputed import with_fewer_steps
from graphrun.model.problem import PhaseNumbers, Problem, Secondary
from graphrun.model.solution import Solution
from graphrun.ops import Stages
from graphrun.ops.runner import in_order
from graphrun.runtime.devices.device import Device
from graphrun.runtime.executor import PlanSession, refuse_broken, stages_for
from graphrun.runtime.host import Host
from graphrun.runtime.spool import Spool
from graphrun.solve.infeasible import Infeasible
from graphrun.solve.solve import solve
from graphrun.trace import Event, SlotTrace, Trace
from graphrun.units import parse_size, show_size

MAX_REPLANS = 8  # in one run
MIN_INCREASE_DIVISOR = 64  # a phase's bytes are raised by at least the budget divided by this

Tell = Callable[[str], None]


def execute(
    solution: Solution,
    graph: Graph,
    inputs: Mapping[str, Any],
    device: Device,
    modules: Mapping[str, nn.Module] | None = None,
    progress: ProgressCallback | None = None,
    *,
    host: Host | None = None,
    tell: Tell | None = None,
    keep: Path | None = None,
    ram_bytes: int | None = None,
    spool: Spool | None = None,
    **stages_arguments: Any,
) -> Trace:
    """Run ``graph`` on ``inputs`` by ``solution``, which fits it (`refuse_unfit`).

    ``inputs``: from `Graph.resolve`. Return the trace, with the graph's outputs on the host.

    ``modules``: components that already exist. ``host``: backing stores of an earlier run, in place
    of ``modules``; otherwise backing stores are created for this run and dropped at its end.
    ``tell``, ``keep``: see `run_to_the_end`. ``stages_arguments``: further arguments of `Stages`.
    ``ram_bytes``: free RAM of this machine or this process's cgroup. ``spool``: writes files of
    weights; default: temporary ones.

    Raises PlanError before anything is loaded, if the plan needs more RAM than ``ram_bytes``;
    OutOfMemory if no plan fits the memory of the device; TransferFailed if a copy fails; BrokenPlan
    if the run deviates from its plan. After any error, the device is back at its baseline and the
    next run is unaffected.
    """
    if ram_bytes is not None and (host_bytes := solution.simulation.host_peak_bytes) > ram_bytes:
        raise PlanError(
            f"the plan needs {show_size(host_bytes)} of RAM, and this machine, or this process's "
            f"cgroup, has {show_size(ram_bytes)} "
            f"left: plan again with --ram {ram_bytes}"
        )
    run_host = (
        Host.of_graph(graph, solution.chosen, device, modules, spool) if host is None else host
    )
    try:
        stages = stages_for(solution.plan, graph, inputs, device, run_host, **stages_arguments)
        return run_to_the_end(solution, stages, run_host, device, progress, tell=tell, keep=keep)
    finally:
        if host is None:
            run_host.close()


def run_to_the_end(
    solution: Solution,
    stages: Stages,
    host: Host,
    device: Device,
    progress: ProgressCallback | None = None,
    *,
    tell: Tell | None = None,
    keep: Path | None = None,
    session: PlanSession | None = None,
) -> Trace:
    """Run ``stages`` by ``solution``, planning the remaining stages again when memory runs out.

    ``session``: an open session of ``solution``; this is its next run. After a replan, the
    session's next run is a first run. ``tell`` is called with one line per replan, which the trace
    has as ``notes``. The trace has the slots of all attempts; of a failed attempt only those of the
    stages that it finished.

    Raises OutOfMemory if no plan fits. The outputs of finished stages are then saved in the folder
    ``keep`` (default: a new temporary folder), which the error names.
    """
    traces: list[Trace] = []
    notes: list[str] = []
    steps_done = _steps_done(stages)
    while True:
        try:
            with (
                nullcontext(session)
                if session is not None
                else PlanSession(solution, host, device) as open_session
            ):
                traces.append(open_session.run(stages, progress))
            return _joined(traces, notes)
        except OutOfMemory as error:
            if error.partial is not None:
                traces.append(error.partial)
            try:
                if len(notes) == MAX_REPLANS:
                    raise BrokenPlan(f"planned again {MAX_REPLANS} times")
                if error.available_bytes < 0 and not error.secondary:
                    raise BrokenPlan(
                        "free other tensors of this process, or raise its memory budget by more "
                        f"than {show_size(-error.available_bytes)}"
                    )
                if lost_values := stages.lost_values:
                    raise BrokenPlan(
                        f"{', '.join(lost_values)} could not be copied from the device"
                    )
                stage = next(
                    (phase.stage for phase in solution.chosen.phases if phase.name == error.phase),
                    "",
                )
                has_begun = stage == stages.remaining_stages[0].name
                problem = remaining_problem(
                    solution.problem,
                    solution.plan,
                    [stage.name for stage in stages.remaining_stages],
                    error,
                )
                problem, steps_done = _without_done_steps(problem, stages, steps_done)
                solution, session = solve(problem), None
                refuse_broken(solution)
            except (Infeasible, BrokenPlan) as reason:
                raise _no_plan_fits(error, reason, stages, keep) from None
            names = [stage.name for stage in stages.remaining_stages]
            order = solution.plan.order or stages_of(solution.problem)
            stages.remaining_stages = [
                stages.graph.stage(name) for name in in_order(stages.graph, names, order)
            ]
            stages.options = dict(solution.plan.options)
            notes.append(_note(error, solution.problem, stages, has_begun=has_begun))
            if tell is not None:
                tell(notes[-1])


def _steps_done(stages: Stages) -> dict[str, tuple[int, int]]:
    """Return stage -> (finished steps, all steps) for each stage whose loop can resume midway."""
    states = {stage.name: stages.steps.state(stage.name) for stage in stages.remaining_stages}
    return {
        name: (state.finished_steps, state.steps)
        for name, state in states.items()
        if state is not None
    }


def _without_done_steps(
    problem: Problem, stages: Stages, previous: Mapping[str, tuple[int, int]]
) -> tuple[Problem, dict[str, tuple[int, int]]]:
    """Return ``problem`` without the steps that are done, and the result of `_steps_done`.

    ``previous``: that result of an earlier call, which removed its steps from ``problem``. A loop
    whose calls cannot be assigned to steps restarts from its first step.
    """
    steps_done = _steps_done(stages)
    for name, (done_steps, steps) in list(steps_done.items()):
        previous_steps = previous.get(name, (0, steps))[0]
        try:
            problem = with_fewer_steps(
                problem, {name: (done_steps - previous_steps, steps - previous_steps)}
            )
        except InputError:
            stages.steps.forget(name)
            del steps_done[name]
    return problem, steps_done


def remaining_problem(
    problem: Problem, plan: Plan, todo: Sequence[str], error: OutOfMemory
) -> Problem:
    """Return the problem of the stages ``todo``, corrected by the measurements in ``error``.

    Components keep the variants of ``plan``. The budget shrinks if the device has less memory than
    planned. Otherwise the activation grows in the phase that ran out of memory.
    """
    remaining_stages = set(todo)
    budget_bytes, increase, secondaries = (
        problem.budget_bytes,
        dict[str, tuple[str, int]](),
        list(problem.secondaries),
    )
    if error.secondary:
        secondaries[error.secondary - 1] = _less_of(secondaries[error.secondary - 1], error)
    elif error.available_bytes < problem.effective_bytes:
        budget_bytes = problem.budget_for(error.available_bytes)
    else:
        increase = _increase(problem, error)
    new_problem = replace(
        with_variants_of(problem, plan),
        budget_bytes=max(1, budget_bytes),
        phases=tuple(
            _increased(phase, increase)
            for phase in problem.phases
            if phase.stage in remaining_stages
        ),
        options=tuple(
            replace(option, phases=tuple(_increased(phase, increase) for phase in option.phases))
            for option in problem.options
            if option.stage in remaining_stages
        ),
        values=tuple(value for value in problem.values if remaining_stages & set(value.consumers)),
        precedence=None
        if problem.precedence is None
        else tuple(p for p in problem.precedence if remaining_stages >= set(p)),
        runs=1,
        secondaries=tuple(secondaries),
    )
    # `reorder` also recomputes in which of the remaining phases each value is live
    return replace(new_problem, values=reorder(new_problem).values)


def _increase(problem: Problem, error: OutOfMemory) -> dict[str, tuple[str, int]]:
    """Return phase -> (part, additional bytes) for the phase that ran out of memory.

    Its measured peak plus the refused allocation minus the planned bytes, and at least
    1/MIN_INCREASE_DIVISOR of the budget.
    """
    if not error.phase:
        return {}
    return {
        error.phase: (
            error.part,
            max(_missing_bytes(error), problem.effective_bytes // MIN_INCREASE_DIVISOR, 1),
        )
    }


def _missing_bytes(error: OutOfMemory) -> int:
    # matches the messages of torch and of the simulated accelerator
    request = re.search(r"[Tt]ried to allocate ([0-9.]+ ?[KMGT]?i?B)", str(error))
    return error.peak_bytes + (parse_size(request[1]) if request else 0) - error.planned_bytes


def _less_of(secondary: Secondary, error: OutOfMemory) -> Secondary:
    """Return ``secondary`` with less memory, so that components move elsewhere if they do not fit.

    At most the memory that ``error`` measured as available, and the planned memory minus the bytes
    that a call needed beyond the plan.
    """
    missing_bytes = max(_missing_bytes(error), secondary.effective_bytes // MIN_INCREASE_DIVISOR, 1)
    limit_bytes = min(error.available_bytes, secondary.effective_bytes - missing_bytes)
    return replace(
        secondary,
        budget_bytes=max(1, secondary.budget_bytes - secondary.effective_bytes + limit_bytes),
    )


def _increased(phase: PhaseNumbers, increase: Mapping[str, tuple[str, int]]) -> PhaseNumbers:
    part, extra_bytes = increase.get(phase.name, ("", 0))
    fields = {
        "load": ["input_bytes"],
        "first": ["first_bytes", "pipeline_code_bytes"],
        "steady": ["steady_bytes", "pipeline_code_bytes"],
    }
    if part not in fields:
        return phase
    corrected_fields: dict[str, Any] = {
        name: current_bytes + extra_bytes
        for name in fields[part]
        if (current_bytes := getattr(phase, name)) or name != "pipeline_code_bytes"
    }
    return replace(phase, basis="measured", **corrected_fields)


def _note(error: OutOfMemory, problem: Problem, stages: Stages, *, has_begun: bool) -> str:
    """Return one line on a replan. ``has_begun``: the first remaining stage had started."""
    stage = next(iter(stages_of(problem)), "the end")
    state = stages.steps.state(stage)
    progress = (
        f", after step {state.finished_steps} of {state.steps}"
        if state is not None
        else ", from its start"
        if has_begun
        else ""
    )
    return (
        f"{str(error).splitlines()[0]}: planned again with {show_size(problem.effective_bytes)}, "
        f"continuing from {stage}{progress}"
    )


def _no_plan_fits(
    error: OutOfMemory, reason: Exception, stages: Stages, keep: Path | None
) -> OutOfMemory:
    """Return the error that ends the run, after saving finished values and latents."""
    values = dict(stages.values)
    for name, (done_steps, steps) in _steps_done(stages).items():
        state = stages.steps.state(name)
        values[f"{name}.latents after step {done_steps} of {steps}"] = (
            state.latents if state is not None else None
        )
    tensors = _flat(values)
    save_note = ""
    if tensors:
        try:
            value_names = sorted(name for name, value in values.items() if _flat(value))
            save_note = (
                f"; finished values are saved in {_save(tensors, keep)}: {', '.join(value_names)}"
            )
        except (OSError, SafetensorError) as save_error:
            save_note = f"; finished values could not be saved: {save_error}"
    return OutOfMemory(
        f"{error}; no plan fits the remaining stages ({str(reason).splitlines()[0]}){save_note}"
    )


def _save(tensors: Mapping[str, torch.Tensor], keep: Path | None) -> Path:
    """Write ``tensors`` to a file in ``keep``, complete or not at all, and return its path."""
    file = (keep or Path(tempfile.mkdtemp(prefix="graphrun-values-"))) / "values.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(
        file,
        lambda part: save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, part
        ),
    )
    return file


def _flat(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors in ``value``, nested in mappings and sequences, by dotted name."""
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
    """Join consecutive traces to one, with continuous times and slot numbers."""
    if len(traces) == 1:
        return replace(traces[0], notes=tuple(notes))
    slots: list[SlotTrace] = []
    events: list[Event] = []
    for trace in traces:
        offset, first = slots[-1].end_seconds if slots else 0.0, len(slots)
        events += [
            replace(_shifted(event, offset), slot=event.slot + first) for event in trace.events
        ]
        slots += [_shifted(slot, offset) for slot in trace.slots]
    return replace(traces[-1], slots=tuple(slots), events=tuple(events), notes=tuple(notes))


Timed = TypeVar("Timed", Event, SlotTrace)


def _shifted(item: Timed, seconds: float) -> Timed:
    return replace(
        item, start_seconds=item.start_seconds + seconds, end_seconds=item.end_seconds + seconds
    )

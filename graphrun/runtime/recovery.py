"""When reality differs from the plan: what ran out of memory is undone, the rest is planned again with what was seen, and goes on.

    encode | denoise t0 t1 t2 | -- out of memory --> values and t1's state to the host | plan(t2 .., decode; what was seen) | t2 ..
                                                     | no plan fits: they are saved, and the run stops

Decides when to plan again and with which numbers; how is the solver's to say. Components keep their backing stores and precisions. A loop
that cannot be begun in its middle (`graphrun.ops.steps`) is begun again.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from graphrun.errors import BrokenPlan, InputError, OutOfMemory, PlanError
from graphrun.graph.graph import Graph
from graphrun.model.choices import apply_choices, reorder, stages_of
from graphrun.model.plan import Plan
from graphrun.model.precomputed import shortened
from graphrun.model.problem import PhaseNumbers, Problem
from graphrun.ops import Stages
from graphrun.runtime.devices.device import Device
from graphrun.runtime.executor import Session, refuse_unfit, stages_for
from graphrun.runtime.host import Host
from graphrun.runtime.slots import Progress
from graphrun.solve.infeasible import Infeasible
from graphrun.solve.solve import solve
from graphrun.trace import Event, SlotTrace, Trace
from graphrun.units import parse_size, show_size
from graphrun.verify.simulate import simulate

MOST = 8  # times that a run is planned again
STEP = 64  # of the budget: the least by which a phase's bytes are raised

Tell = Callable[[str], None]


def execute(
    problem: Problem,
    plan: Plan,
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
    """Runs ``graph`` on resolved ``inputs`` by ``plan`` and returns what was measured, with the graph's outputs on the host.

    ``modules``: components built before. ``host``: backing stores of an earlier run, in place of ``modules``; without it they are made for
    this run and dropped with it. ``tell``, ``keep``: as for `run_to_the_end`; ``more`` as for `Stages`. ``ram_bytes``: what this
    machine, or this process's cgroup, has left. Raises PlanError before anything is loaded when the plan may not be run, or holds
    more than that in RAM; OutOfMemory when no plan fits what the device has, TransferFailed when a copy fails, BrokenPlan when
    reality leaves the plan. After any error the device is back at its baseline and the next run starts as if there had been none.
    """
    refuse_unfit(problem, plan, graph)
    if ram_bytes is not None and (held := simulate(problem, plan).host_peak_bytes) > ram_bytes:
        raise PlanError(
            f"the plan holds {show_size(held)} in RAM, and this machine, or this process's cgroup, has {show_size(ram_bytes)} "
            f"left: plan again with --ram {ram_bytes}"
        )
    own = Host.of_graph(graph, apply_choices(problem, plan), device, modules) if host is None else host
    try:
        stages = stages_for(plan, graph, inputs, device, own, **more)
        return run_to_the_end(problem, plan, stages, own, device, progress, tell=tell, keep=keep)
    finally:
        if host is None:
            own.close()


def run_to_the_end(
    problem: Problem,
    plan: Plan,
    stages: Stages,
    host: Host,
    device: Device,
    progress: Progress | None = None,
    *,
    tell: Tell | None = None,
    keep: Path | None = None,
    session: Session | None = None,
) -> Trace:
    """``stages`` run by ``plan``; where the device has less than planned, or a stage takes more, by plans for what is left.

    ``session``: of ``plan``, open, whose next run this is; after a run that was planned again the one behind it is a first one.
    ``tell`` gets one line each time. Raises OutOfMemory when no plan fits, with the values that finished stages made saved in the
    folder ``keep`` (a new one by default) and named. The trace has the slots of stages as they were finished, and the lines.
    """
    legs: list[Trace] = []
    notes: list[str] = []
    behind = _behind(stages)
    while True:
        try:
            with nullcontext(session) if session is not None else Session(problem, plan, host, device) as running:
                legs.append(running.run(stages, progress))
            return _joined(legs, notes)
        except OutOfMemory as error:
            if error.partial is not None:
                legs.append(error.partial)
            try:
                if len(notes) == MOST:
                    raise BrokenPlan(f"planned again {MOST} times")
                if lost := stages.lost:
                    raise BrokenPlan(f"{', '.join(lost)} could not be copied from the device")
                stage = next((phase.stage for phase in apply_choices(problem, plan).phases if phase.name == error.phase), "")
                begun = stage == stages.todo[0].name
                problem = rest_of(problem, plan, [stage.name for stage in stages.todo], error)
                problem, behind = _without_steps(problem, stages, behind)
                solution = solve(problem)
                problem, plan, session = solution.problem, solution.plan, None
            except (Infeasible, BrokenPlan) as reason:
                raise _given_up(error, reason, stages, keep) from None
            stages.todo = [stages.graph.stage(name) for name in plan.order or stages_of(problem)]
            stages.options = dict(plan.options)
            notes.append(_line(error, problem, stages, begun=begun))
            if tell is not None:
                tell(notes[-1])


def _behind(stages: Stages) -> dict[str, tuple[int, int]]:
    """Of each stage whose loop is begun in its middle: how many steps of how many are done."""
    states = {stage.name: stages.steps.state(stage.name) for stage in stages.todo}
    return {name: (state.done, state.steps) for name, state in states.items() if state is not None}


def _without_steps(
    problem: Problem, stages: Stages, before: Mapping[str, tuple[int, int]]
) -> tuple[Problem, dict[str, tuple[int, int]]]:
    """``problem``, which has no steps that were done ``before``, without those that are done now; and these.

    Where calls cannot be told apart by steps, the loop begins at its first.
    """
    behind = _behind(stages)
    for name, (done, steps) in list(behind.items()):
        earlier = before.get(name, (0, steps))[0]
        try:
            problem = shortened(problem, {name: (done - earlier, steps - earlier)})
        except InputError:
            stages.steps.forget(name)
            del behind[name]
    return problem, behind


def rest_of(problem: Problem, plan: Plan, todo: Sequence[str], error: OutOfMemory) -> Problem:
    """The problem of the stages ``todo``, with the variants that ``plan`` chose and with what ``error`` saw: less memory where the
    device has less than planned, else more activation in the phase that ran out."""
    names, left = dict(plan.variants), set(todo)
    components = tuple(c.held_as(names[c.name]) if c.name in names else c for c in problem.components)
    budget_bytes, raised = problem.budget_bytes, dict[str, tuple[str, int]]()
    if error.available_bytes < problem.effective_bytes:
        budget_bytes = error.available_bytes + problem.overhead_bytes
    else:
        raised = _raised(problem, error)
    rest = replace(
        problem,
        components=components,
        budget_bytes=max(1, budget_bytes),
        phases=tuple(_more(phase, raised) for phase in problem.phases if phase.stage in left),
        options=tuple(
            replace(option, phases=tuple(_more(phase, raised) for phase in option.phases))
            for option in problem.options
            if option.stage in left
        ),
        values=tuple(value for value in problem.values if left & set(value.consumers)),
        precedence=None if problem.precedence is None else tuple(p for p in problem.precedence if left >= set(p)),
        runs=1,
    )
    return replace(rest, values=reorder(rest).values)


def _raised(problem: Problem, error: OutOfMemory) -> dict[str, tuple[str, int]]:
    """Phase -> (part, bytes that it is to have more): what it held and then wanted beyond the plan, and no less than a step."""
    if not error.phase:
        return {}
    wanted = re.search(r"[Tt]ried to allocate ([0-9.]+ ?[KMGT]?i?B)", str(error))  # as torch says it, and sim
    missing = error.peak_bytes + (parse_size(wanted[1]) if wanted else 0) - error.planned_bytes
    return {error.phase: (error.part, max(missing, problem.effective_bytes // STEP, 1))}


def _more(phase: PhaseNumbers, raised: Mapping[str, tuple[str, int]]) -> PhaseNumbers:
    part, more = raised.get(phase.name, ("", 0))
    handed = phase.glue_bytes + more if phase.glue_bytes else 0
    if part == "load":
        return replace(phase, live_in_bytes=phase.live_in_bytes + more, basis="measured")
    if part == "first":
        return replace(phase, first_bytes=phase.first_bytes + more, glue_bytes=handed, basis="measured")
    return (
        replace(phase, steady_bytes=phase.steady_bytes + more, glue_bytes=handed, basis="measured") if part == "steady" else phase
    )


def _line(error: OutOfMemory, problem: Problem, stages: Stages, *, begun: bool) -> str:
    """``begun``: whether the first stage that is left was under way."""
    stage = next(iter(stages_of(problem)), "the end")
    state = stages.steps.state(stage)
    where = f", behind step {state.done} of {state.steps}" if state is not None else ", from its begin" if begun else ""
    return f"{str(error).splitlines()[0]}: planned again with {show_size(problem.effective_bytes)}, going on from {stage}{where}"


def _given_up(error: OutOfMemory, reason: Exception, stages: Stages, keep: Path | None) -> OutOfMemory:
    values = dict(stages.named)
    for name, (done, steps) in _behind(stages).items():
        state = stages.steps.state(name)
        values[f"{name}.latents behind step {done} of {steps}"] = state.latents if state is not None else None
    named = _flat(values)
    saved = ""
    if named:
        try:
            made = sorted(name for name, value in values.items() if _flat(value))
            saved = f"; what was made is in {_saved(named, keep)}: {', '.join(made)}"
        except (OSError, SafetensorError) as refused:
            saved = f"; what was made could not be saved: {refused}"
    return OutOfMemory(f"{error}; no plan fits what is left ({str(reason).splitlines()[0]}){saved}")


def _saved(named: Mapping[str, torch.Tensor], keep: Path | None) -> Path:
    """The file, which is whole or absent."""
    folder = keep or Path(tempfile.mkdtemp(prefix="graphrun-values-"))
    folder.mkdir(parents=True, exist_ok=True)
    file, partial = folder / "values.safetensors", folder / ".values.safetensors.part"
    try:
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, partial)
        return partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _flat(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Tensors by dotted names."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, Mapping):
        items: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        return {}
    return {key: tensor for k, item in items for key, tensor in _flat(item, f"{name}.{k}" if name else str(k)).items()}


def _joined(legs: Sequence[Trace], notes: Sequence[str]) -> Trace:
    """One trace of several, one after another in time; slots are numbered on."""
    if len(legs) == 1:
        return replace(legs[0], notes=tuple(notes))
    slots: list[SlotTrace] = []
    events: list[Event] = []
    later = 0.0
    for leg in legs:
        events += [
            replace(
                event,
                slot=event.slot + len(slots),
                start_seconds=event.start_seconds + later,
                end_seconds=event.end_seconds + later,
            )
            for event in leg.events
        ]
        slots += [replace(s, start_seconds=s.start_seconds + later, end_seconds=s.end_seconds + later) for s in leg.slots]
        later = slots[-1].end_seconds if slots else later
    return replace(legs[-1], slots=tuple(slots), events=tuple(events), notes=tuple(notes))

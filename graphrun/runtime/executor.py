"""Executes a plan, exactly as written. A run that deviates from its plan stops with an error, or is
planned again.

The code of the stages runs unchanged. Each call into a component is intercepted and advances the
plan:

    op's code         ... | text_encoder(...) | ... | transformer(...) | ... transformer(...) ... |
    vae.decode(...) | ... CallInterceptor       v entry             .     v entry                  v
    entry              v entry SlotCursor            slots 0, 1          .     slots 2, 3
    slot 4               slots 5, 6 OpenSlot              close - open        .     close - open
    close - open         close - open

After a run, successful or not, hooks and interceptors are removed, modules have their host tensors
back, and the device holds what it held before.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphrun.errors import OutOfMemory, PlanError
from graphrun.graph.graph import Graph
from graphrun.model.plan import Drop, Plan
from graphrun.model.problem import Problem
from graphrun.model.simulation import SlotReport
from graphrun.model.solution import Solution
from graphrun.modules.build import on_host
from graphrun.modules.source_files import commits_of
from graphrun.ops import Stages
from graphrun.runtime.devices.device import Device
from graphrun.runtime.host import Host
from graphrun.runtime.leftovers import error_to_raise, leftovers
from graphrun.runtime.run import HandedOut, Progress, Replan, Run, Setting, Work, planned_peaks
from graphrun.trace import Trace
from graphrun.units import show_size
from graphrun.verify.pages import limit_bytes
from graphrun.verify.solution import broken_rules


def stages_for(
    plan: Plan, graph: Graph, inputs: Mapping[str, Any], device: Device, host: Host, **more: Any
) -> Stages:
    """The stages of ``graph`` in the order and with the options of ``plan``, over the components in
    ``host``; ``more`` as for `Stages`."""
    order, options = plan.order, dict(plan.options)
    place = device.torch_device
    return Stages(
        graph,
        host.modules,
        place,
        inputs,
        host.parts,
        host.meta_modules,
        order=order,
        options=options,
        **more,
    )


def follow(
    solution: Solution,
    host: Host,
    device: Device,
    work: Work | Stages,
    progress: Progress | None = None,
    *,
    replan: Replan | None = None,
    handed_out: HandedOut | None = None,
    checked: bool = False,
) -> Trace:
    """Runs ``work`` once by ``solution`` and returns the trace. Its calls into ``host.modules``
    advance the plan.

    ``work`` computes on ``device.torch_device``. When it makes a call that the plan does not have,
    ``replan`` supplies the next plan; without ``replan``, or when the run ends before the plan,
    BrokenPlan is raised. ``handed_out`` returns the bytes of those outputs that the caller receives
    on the device. ``checked``: the caller has checked the solution (`refuse_broken`). What the plan
    of a session keeps stays on the device, for a plan that finds it there; after an error, nothing
    does. Other errors as for `graphrun.runtime.recovery.execute`; an error of ``work``'s own code
    is raised unchanged.
    """
    if not checked:
        refuse_broken(solution)
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(
            Session(solution, host, device, replan=replan, handed_out=handed_out)
        )
        trace = session.run(work, progress)
        if solution.plan.again:
            stack.pop_all()
    return trace


class Session:
    """Runs of one plan, one after another: the first executes the plan's ``slots``, each later one
    its ``again`` slots.

    What the plan keeps on the device, and the backing stores that it has read, stay from run to
    run. Leaving the context returns the device and the host to their baselines. So does a failed
    run; the run after it is a first run again. The caller has checked the plan (`refuse_unfit`,
    `refuse_broken`).

        with Session(solution, host, device) as session:
            for prompt in prompts:
                trace = session.run(work(prompt))
    """

    def __init__(
        self,
        solution: Solution,
        host: Host,
        device: Device,
        *,
        replan: Replan | None = None,
        handed_out: HandedOut | None = None,
    ) -> None:
        names, problem, plan = dict(solution.plan.variants), solution.problem, solution.plan
        chosen = {
            c.name: v
            for c in problem.components
            for v in c.variants
            if names.get(c.name, v.name) == v.name
        }
        slowdowns = {
            name: variant.slowdown for name, variant in chosen.items() if variant.device == "cpu"
        }
        if len(device.secondaries) < len(problem.secondaries):
            raise PlanError(
                f"the plan is for {len(problem.secondaries) + 1} devices, and {len(device.every)} were opened: plan again"
            )
        self._simulation = solution.simulation
        limits = [
            limit_bytes(solution.chosen, plan, n) for n in range(len(problem.secondaries) + 1)
        ]
        self._setting = Setting(
            solution.chosen, plan, host, device, slowdowns, replan, handed_out, limits
        )
        _refuse_drop(plan, host)
        self._begun = False
        self._ahead: Run | None = None  # the next run, whose first slot is done
        self._baseline_bytes = self._allocated_bytes

    @property
    def _allocated_bytes(self) -> int:
        return sum(device.allocated_bytes for device in self._setting.device.every)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def begun(self) -> bool:
        """Whether the next run finds what an earlier one left."""
        return self._begun

    @property
    def loaded_ahead(self) -> bool:
        """Whether the next run finds what `load_ahead` loaded."""
        return self._ahead is not None

    @on_host()
    def load_ahead(self) -> None:
        """Performs the first slot of the next run, if that is a first run and the slot loads,
        before the run has its inputs.

        Raises as `run` does; the device is then empty."""
        if self._begun or self._ahead is not None:
            return
        run = self._first()
        try:
            run.load_ahead()
        except BaseException as error:
            failure = self._emptied(run, error)
            if failure is error:
                raise
            raise failure from None
        self._ahead = run

    @on_host()
    def run(self, work: Work | Stages, progress: Progress | None = None) -> Trace:
        """One run. Raises PlanError when the plan is for one run and this is not the first."""
        plan = self._setting.plan
        if self._begun and not plan.again:
            raise PlanError(
                "the plan is for one run: plan a session (runs above 1), or close this session and open a new one"
            )
        again = (
            self._run(replace(plan, slots=plan.again), self._simulation.again)
            if self._begun
            else None
        )
        run = again or self._ahead or self._first()
        self._begun, self._ahead, run.progress = True, None, progress
        try:
            return run.execute(work, keep=bool(plan.again))
        except BaseException as error:  # KeyboardInterrupt too must leave the device empty
            failure = self._emptied(run, error, work if isinstance(work, Stages) else None)
            if failure is error:
                raise
            raise failure from None

    def _first(self) -> Run:
        """A first run, before which the host gets ready."""
        problem, host = self._setting.problem, self._setting.host
        self._baseline_bytes = self._allocated_bytes
        host.match_layout(problem)
        host.prepare({use.component for phase in problem.phases for use in phase.uses})
        return self._run(self._setting.plan, self._simulation.slots)

    def _run(self, plan: Plan, reports: Sequence[SlotReport]) -> Run:
        return Run(self._setting, plan, planned_peaks(reports), None)

    def _emptied(self, run: Run, error: BaseException, work: Stages | None = None) -> BaseException:
        """Leaves the device empty after ``error`` in ``run``, and returns what the caller gets."""
        device, modules = self._setting.device, self._setting.host.modules
        if work is not None:
            work.leave()
        self.close()
        failure = error_to_raise(error, device, run.where)
        gc.collect()
        self._release_cached()
        if (left_bytes := self._allocated_bytes - self._baseline_bytes) > 0:
            failure.add_note(
                f"{show_size(left_bytes)} stayed on the device: {leftovers(device, modules)}"
            )
        if isinstance(failure, OutOfMemory):
            run.annotate(failure)
            failure.partial = (
                run.finished([stage.name for stage in work.todo]) if work is not None else None
            )
        return failure

    def close(self) -> None:
        """Evicts all weights from the device and drops the backing stores that the plan has
        read."""
        self._setting.host.evict()
        self._setting.host.finish()
        self._begun, self._ahead = False, None
        self._release_cached()

    def _release_cached(self) -> None:
        for device in self._setting.device.every:
            with contextlib.suppress(RuntimeError):
                device.release_cached()


def refuse_unfit(solution: Solution, graph: Graph) -> None:
    """Raises PlanError when the plan is for another problem, graph or commit of the weights, claims
    that a choice needs another permission than by the graph, or violates a rule of
    `verify.check`."""
    problem = solution.problem
    if problem.graph_digest != graph.digest:
        raise PlanError(
            f"the plan is for a graph {problem.graph!r} with digest {problem.graph_digest}, this one has {graph.digest}: plan again"
        )
    here = dict(commits_of(graph.components.values()))
    for repository, commit in problem.commits:
        if here.get(repository, commit) != commit:
            name = repository.partition("@")[0]
            raise PlanError(
                f"the plan was made at commit {commit} of {repository}, which is at {here[repository]} now: plan again, "
                f"or name the commit, as in source: {name}@{commit}"
            )
    for choice, needs, own in _permissions(problem, graph):
        if needs != own:
            listed = (
                "the graph does not list it"
                if own is None
                else f"by the graph, it needs {own or 'nothing'}"
            )
            raise PlanError(
                f"by the plan, {choice} needs {needs or 'nothing'}; {listed}: plan again"
            )
    refuse_broken(solution)


def _permissions(problem: Problem, graph: Graph) -> Iterator[tuple[str, str, str | None]]:
    """Every choice of ``problem``, with the permission it needs by ``problem`` and by ``graph``
    (None: not listed there)."""
    for component in problem.components:
        own = graph.components.get(component.name)
        for of in component.variants:
            yield (
                f"{component.name} {of.name}",
                of.needs,
                own.permission(of.precision, of.device) if own else None,
            )
    stages = {stage.name: stage for stage in graph.stages}
    for option in problem.options:
        stage = stages.get(option.stage)
        yield (
            f"{option.stage} with {option.name}",
            option.needs,
            stage.permission(option.name) if stage else None,
        )


def refuse_broken(solution: Solution) -> None:
    """Raises PlanError when the plan is for another problem, or violates a rule."""
    problem, plan = solution.problem, solution.plan
    if plan.problem != problem.digest:
        raise PlanError(
            f"the plan is for the problem with digest {plan.problem}, this one has {problem.digest}: plan again"
        )
    if broken := broken_rules(problem, plan):
        lines = [
            f"{v.rule}, slot {v.slot}{f', action {v.action}' if v.action >= 0 else ''}: {v.detail}"
            for v in broken
        ]
        raise PlanError("\n".join(["the plan may not be run:", *lines]))


def _refuse_drop(plan: Plan, host: Host) -> None:
    for name in (
        action.component
        for slot in plan.slots
        for action in slot.actions
        if isinstance(action, Drop)
    ):
        if name in host.residencies and host.residencies[name].caller_owned:
            raise PlanError(
                f"the plan drops the backing store of {name}, which was passed in and stays the caller's: leave it out of modules="
            )

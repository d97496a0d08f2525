"""Execute a plan exactly as written. A run that deviates stops with an error or is planned again.

The code of the stages runs unchanged. Each call into a component is intercepted and advances the
plan:

    stage's code      text_encoder(...)   transformer(...)   transformer(...)   vae.decode(...)
    CallInterceptor   v                   v                  v                  v
    SlotCursor        slots 0, 1          slots 2, 3         slot 4             slots 5, 6
    OpenSlot          close - open        close - open       close - open       close - open

After a run, successful or not, hooks and interceptors are removed, modules have their host tensors
back, and the device has the same allocations as before.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphrun.errors import OutOfMemory, PlanError
from graphrun.graph.graph import Graph
from graphrun.graph.precisions import planned_only_reason
from graphrun.hook import ProgressCallback, hook_of
from graphrun.model.plan import Drop, Plan, marked_text
from graphrun.model.problem import Problem
from graphrun.model.simulation import SlotReport
from graphrun.model.solution import Solution
from graphrun.modules.build import on_host
from graphrun.modules.source_files import commits_of
from graphrun.ops import Stages
from graphrun.runtime.devices.device import Device
from graphrun.runtime.host import Host
from graphrun.runtime.leftovers import error_to_raise, leftovers
from graphrun.runtime.run import (
    HandedOut,
    PipelineCode,
    PlanRun,
    Replan,
    Setting,
    planned_peaks,
)
from graphrun.trace import Trace
from graphrun.units import show_size
from graphrun.verify.pages import limit_bytes
from graphrun.verify.solution import broken_rules


def stages_for(
    plan: Plan,
    graph: Graph,
    inputs: Mapping[str, Any],
    device: Device,
    host: Host,
    **stages_arguments: Any,
) -> Stages:
    """Return the stages of ``graph`` on ``host``, with the plan's order and options."""
    return Stages(
        graph,
        host.modules,
        device.torch_device,
        inputs,
        host.parts,
        host.meta_modules,
        order=plan.order,
        options=dict(plan.options),
        **stages_arguments,
    )


def follow(
    solution: Solution,
    host: Host,
    device: Device,
    work: PipelineCode | Stages,
    progress: ProgressCallback | None = None,
    *,
    replan: Replan | None = None,
    handed_out: HandedOut | None = None,
    checked: bool = False,
) -> Trace:
    """Run ``work`` once by ``solution`` and return the trace.

    Calls of ``work`` into ``host.modules`` advance the plan. ``work`` computes on
    ``device.torch_device``. For a call that the plan does not have, ``replan`` supplies the next
    plan. Without ``replan``, or if the run ends before the plan, BrokenPlan is raised.
    ``handed_out`` returns the bytes of the outputs that the caller receives on the device.
    ``checked``: the caller has checked the solution (`refuse_broken`).

    If the plan is for several runs (it has ``further_slots``), the blocks that it leaves on the
    device stay there for the next call of `follow`. After an error, no block stays. Errors of
    ``work`` are raised unchanged; for other errors see `graphrun.runtime.recovery.execute`.
    """
    if not checked:
        refuse_broken(solution)
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(
            PlanSession(solution, host, device, replan=replan, handed_out=handed_out)
        )
        trace = session.run(work, progress)
        if solution.plan.further_slots:
            stack.pop_all()
    return trace


class PlanSession:
    """Consecutive runs of one plan: first its ``slots``, then its further slots in each later run.

    Blocks that the plan keeps on the device, and backing stores that it has read, stay from run to
    run. Leaving the context, or a failed run, returns the device and the host to their baselines;
    the next run is a first run. The caller has checked the plan (`refuse_unfit`, `refuse_broken`).

        with PlanSession(solution, host, device) as session:
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
        variants = {
            c.name: v
            for c in problem.components
            for v in c.variants
            if names.get(c.name, v.name) == v.name
        }
        slowdowns = {
            name: variant.slowdown for name, variant in variants.items() if variant.device == "cpu"
        }
        if len(device.secondaries) < len(problem.secondaries):
            raise PlanError(
                f"the plan is for {len(problem.secondaries) + 1} devices, and "
                f"{len(device.all_devices)} were opened: plan again"
            )
        self._simulation = solution.simulation
        # `Solution.chosen`: the problem with the choices of its plan applied
        limits = [
            limit_bytes(solution.chosen, plan, n) for n in range(len(problem.secondaries) + 1)
        ]
        self._setting = Setting(
            solution.chosen, plan, host, device, slowdowns, replan, handed_out, limits
        )
        _refuse_drop(plan, host)
        self._has_begun = False
        self._next_run: PlanRun | None = None  # whose first slot is done
        self._baseline_bytes = self._allocated_bytes

    @property
    def _allocated_bytes(self) -> int:
        return sum(device.allocated_bytes for device in self._setting.device.all_devices)

    def __enter__(self) -> PlanSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def begun(self) -> bool:
        """Whether the next run finds blocks and backing stores of an earlier run."""
        return self._has_begun

    @property
    def loaded_ahead(self) -> bool:
        """Whether the next run finds blocks that `load_ahead` loaded."""
        return self._next_run is not None

    @on_host()
    def load_ahead(self) -> None:
        """Perform the first slot of the next run before the run has its inputs.

        Does nothing unless the next run is a first run and its first slot loads. Raises the errors
        of `run`; the device is then empty.
        """
        if self._has_begun or self._next_run is not None:
            return
        run = self._first()
        try:
            run.load_ahead()
        except BaseException as error:
            failure = self._empty_and_explain(run, error)
            if failure is error:
                raise
            raise failure from None
        self._next_run = run

    @on_host()
    def run(self, work: PipelineCode | Stages, progress: ProgressCallback | None = None) -> Trace:
        """Execute a run; return its trace. Raises PlanError for a second run of a one-run plan."""
        plan = self._setting.plan
        if self._has_begun and not plan.further_slots:
            raise PlanError(
                "the plan is for one run: plan a session (runs above 1), or close this session and "
                "open a new one"
            )
        further_run = (
            self._run(replace(plan, slots=plan.further_slots), self._simulation.further_slots)
            if self._has_begun
            else None
        )
        run = further_run or self._next_run or self._first()
        self._has_begun, self._next_run, run.hook = True, None, hook_of(progress)
        try:
            return run.execute(work, keep=bool(plan.further_slots))
        except BaseException as error:  # KeyboardInterrupt too must leave the device empty
            failure = self._empty_and_explain(
                run, error, work if isinstance(work, Stages) else None
            )
            if failure is error:
                raise
            raise failure from None

    def _first(self) -> PlanRun:
        problem, host = self._setting.problem, self._setting.host
        self._baseline_bytes = self._allocated_bytes
        host.match_layout(problem)
        host.prepare({use.component for phase in problem.phases for use in phase.uses})
        return self._run(self._setting.plan, self._simulation.slots)

    def _run(self, plan: Plan, reports: Sequence[SlotReport]) -> PlanRun:
        return PlanRun(self._setting, plan, planned_peaks(reports))

    def _empty_and_explain(
        self, run: PlanRun, error: BaseException, work: Stages | None = None
    ) -> BaseException:
        """Empty the device after ``error`` in ``run``, and return the error for the caller."""
        device, modules = self._setting.device, self._setting.host.modules
        if work is not None:
            work.move_to_host()
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
                run.partial_trace([stage.name for stage in work.remaining_stages])
                if work is not None
                else None
            )
        return failure

    def close(self) -> None:
        """Evict all weights from the device, and drop the backing stores that the plan has read."""
        self._setting.host.evict()
        self._setting.host.finish()
        self._has_begun, self._next_run = False, None
        self._release_cached()

    def _release_cached(self) -> None:
        for device in self._setting.device.all_devices:
            with contextlib.suppress(RuntimeError):
                device.release_cached()


def refuse_unfit(solution: Solution, graph: Graph) -> None:
    """Raise PlanError if the plan does not fit ``graph``, or violates a rule of `verify.check`, or
    has a format that is planned only.

    The plan must be for this problem, graph and commit of the weights. The graph must list each
    variant and option of the problem, chosen or not, with the same permission (``--allow``).
    """
    problem = solution.problem
    precisions = {item.name: item.variants[0].precision for item in solution.components}
    if reason := planned_only_reason(precisions):
        raise PlanError(reason)
    if problem.graph_digest != graph.digest:
        raise PlanError(
            f"the plan is for a graph {problem.graph!r} with digest {problem.graph_digest}, this "
            f"one has {graph.digest}: plan again"
        )
    commits = dict(commits_of(graph.components.values()))
    for repository, commit in problem.commits:
        if commits.get(repository, commit) != commit:
            name = repository.partition("@")[0]
            raise PlanError(
                f"the plan was made at commit {commit} of {repository}, which is at "
                f"{commits[repository]} now: plan again, "
                f"or name the commit, as in source: {name}@{commit}"
            )
    for choice, needs, graph_needs in _permissions(problem, graph):
        if needs != graph_needs:
            graph_text = (
                "the graph does not list it"
                if graph_needs is None
                else f"by the graph, it needs {graph_needs or 'nothing'}"
            )
            raise PlanError(
                f"by the plan, {choice} needs {needs or 'nothing'}; {graph_text}: plan again"
            )
    refuse_broken(solution)


def _permissions(problem: Problem, graph: Graph) -> Iterator[tuple[str, str, str | None]]:
    """Yield each choice with its permission by ``problem`` and ``graph`` (None: not listed)."""
    for component in problem.components:
        graph_component = graph.components.get(component.name)
        for variant in component.variants:
            yield (
                f"{component.name} {variant.name}",
                variant.needs,
                graph_component.permission(variant.precision, variant.device)
                if graph_component
                else None,
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
    """Raise PlanError if the plan is for another problem or violates a rule."""
    problem, plan = solution.problem, solution.plan
    if plan.problem != problem.digest:
        raise PlanError(
            f"the plan is for the problem with digest {plan.problem}, this one has "
            f"{problem.digest}: plan again"
        )
    if violations := broken_rules(problem, plan):
        raise PlanError(f"the plan may not be run:\n{marked_text(plan, violations)}")


def _refuse_drop(plan: Plan, host: Host) -> None:
    for name in (
        action.component
        for slot in plan.slots
        for action in slot.actions
        if isinstance(action, Drop)
    ):
        if name in host.residencies and host.residencies[name].caller_owned:
            raise PlanError(
                f"the plan drops the backing store of {name}, which was passed in and stays the "
                "caller's: leave it out of modules="
            )

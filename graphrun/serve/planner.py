"""The process that makes plans, so that a slow or failing plan delays no running request. It loads
no weights. Plans go to the cache folder, where the worker finds them."""

from __future__ import annotations

import contextlib
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from graphrun import api
from graphrun.errors import GraphError, GraphrunError, InputError
from graphrun.graph.graph import Graph
from graphrun.graph.loras import without_paths
from graphrun.graph.parts import Adapter
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.serve.catalog import GraphVariant, Variants
from graphrun.serve.line import MOST_TOGETHER, Cost
from graphrun.serve.settings import Settings
from graphrun.serve.shares import WHOLE
from graphrun.serve.sizes import Inputs, Sizes, changed, shown
from graphrun.solve.bounds import surely_short
from graphrun.store import import_code
from graphrun.units import show_seconds

if TYPE_CHECKING:
    from graphrun.cluster.machines import Cluster
    from graphrun.solve.infeasible import Infeasible


@dataclass(frozen=True, slots=True)
class PlannedShape:
    """The server's summary of a plan.

    ``peak_bytes``: as nvidia-smi shows it. ``verdict``: the first line on a screen. ``budgets``:
    arguments of `graphrun.estimate` for the plan's share; empty: the whole budgets.
    ``has_batch_plan``: the planner has checked whether batches are faster.
    """

    cost: Cost
    peak_bytes: int
    verdict: str
    budgets: Mapping[str, int]
    has_batch_plan: bool = False


def plan_forever(connection: Connection, settings: Settings) -> None:
    """Answer messages until ``stop``.

    ``plan`` (key, variant, inputs, share) is answered with ``planned`` (key, shape) or ``unfit``
    (key, status, ...); ``plan_batch`` (the same fields) with ``batch_plan`` (key, parts). While no
    message waits, the planner prepares for new sizes of the last graph: it imports code, which a
    stored plan does not need, and finds a size that does not fit.
    """
    variants, server_settings = Variants(), settings
    known_sizes = defaultdict[Any, Sizes](Sizes)
    prepared = set[Any]()
    while (message := connection.recv())[0] != "stop":
        kind, request = message
        variant, key = request["variant"], request["key"]
        graph = variants.graph_of(variant)
        settings = variant.settings_of(server_settings, graph)
        if kind == "plan_batch":
            parts: dict[tuple[str, ...], tuple[float, float]] | None = {}
            try:
                parts = _plan_batch(graph, request, settings, connection.poll)
            except Exception:  # noqa: BLE001 (the runs do not become a batch)
                traceback.print_exc()
            connection.send(("batch_plan", {"key": key, "parts": parts}))
            continue
        sizes = known_sizes[variant.weights]
        try:
            _refuse_unfit_loras(graph, variant)
            shape = _plan_shape(graph, request, settings, sizes)
            if request["share"] == WHOLE:
                sizes.feasible.append((request["inputs"], shape.cost.first_seconds))
            connection.send(("planned", {"key": key, "shape": shape}))
        except GraphrunError as error:
            refusal = _refusal(graph, request, settings, error, sizes)
            connection.send(("unfit", {"key": key, **refusal}))
        except Exception:  # noqa: BLE001 (one failure must not end the planner)
            traceback.print_exc()
            message = f"planning {graph.name} failed; the server's log has the reason"
            connection.send(
                (
                    "unfit",
                    {
                        "key": key,
                        "status": 500,
                        "code": "plan_failed",
                        "message": message,
                        "details": {},
                    },
                )
            )
        if variant.weights not in prepared and not connection.poll():
            prepared.add(variant.weights)
            with contextlib.suppress(Exception):  # a dry run reports it
                import_code(graph)
                _find_unfit(graph, request["inputs"], settings, sizes, connection.poll)


def _refuse_unfit_loras(graph: Graph, variant: GraphVariant) -> None:
    """Raise InputError for a LoRA of ``variant`` that is for another model."""
    if not variant.loras:
        return
    from graphrun.modules.build import meta_modules
    from graphrun.modules.lora import deltas_of

    with meta_modules(graph) as modules:
        for use in variant.loras:
            for name in use.components:
                component = replace(
                    graph.component(name), loras=(Adapter(use.file, use.scale),), file_line=""
                )
                try:
                    deltas_of(component, modules[name])
                except GraphError as error:
                    text = without_paths(str(error), variant.loras)
                    raise InputError(f"the LoRA {use.name} does not fit: {text}") from None


def _estimate(graph: Any, inputs: Any, settings: Settings, **overrides: Any) -> Any:
    arguments = {
        **settings.budgets,
        "runs": api.RUNS,
        "hardware": settings.hardware,
        "cache": settings.cache,
        **overrides,
    }
    return api.estimate(graph, inputs=inputs, **arguments)


def _plan_shape(
    graph: Any, request: dict[str, Any], settings: Settings, sizes: Sizes
) -> PlannedShape:
    """Return the plan's summary.

    Raises Infeasible: without a dry run if ``sizes`` has the reason, without a solve if lower
    bounds show that nothing fits.
    """
    from graphrun.report.verdicts import plan_verdict, product_name

    if settings.cluster is not None:
        return _plan_on_cluster(graph, request, settings, settings.cluster)
    inputs, is_whole = request["inputs"], request["share"] == WHOLE
    if is_whole and (unfit := sizes.refusal(inputs)) is not None:
        raise unfit[1]
    problem = _estimate(graph, inputs, settings)
    if problem.secondaries and not is_whole:
        raise InputError("a graph has all devices at once: shares are for one device")
    budgets = {} if is_whole else share_of(problem, request["share"])
    if budgets:
        problem = _estimate(graph, inputs, settings, **budgets)
    if needs := surely_short(problem):
        from graphrun.solve.infeasible import short_of  # imports highspy

        raise short_of(problem, needs)
    solution = api.plan(problem, cache=settings.cache)
    problem, simulation = solution.problem, solution.simulation
    cost = Cost(
        simulation.seconds,
        simulation.further_seconds if simulation.further_slots else simulation.seconds,
    )
    overhead_bytes = problem.overhead_bytes - problem.reserve_bytes
    verdict = plan_verdict(solution, product_name(graph.kinds(), dict(problem.settings)))
    return PlannedShape(cost, overhead_bytes + simulation.peak_bytes, verdict, budgets)


def _plan_on_cluster(
    graph: Any, request: dict[str, Any], settings: Settings, cluster: Cluster
) -> PlannedShape:
    """Plan ``request`` for a cluster, where the runs of a batch execute concurrently."""
    from graphrun.cluster.place import place
    from graphrun.cluster.stream import finish_seconds

    if request["share"] != WHOLE:
        raise InputError("a graph has all devices at once: shares are for one device")
    budgets = {**settings.budgets, "inputs": request["inputs"], "cache": settings.cache}
    placement = place(graph, cluster, items=api.RUNS, gains=False, **budgets).placement
    assignments, max_runs = placement.assignments, max(MOST_TOGETHER, settings.bounds.pictures)
    cold, warm = (tuple(finish_seconds(placement, max_runs, warm=warm)) for warm in (False, True))
    device_count = sum(len(assignment.devices) for assignment in assignments)
    verdict = (
        f"fits: {placement.items_per_second:.3g} a second, "
        f"one by itself takes {show_seconds(warm[0])}, "
        f"on {device_count} of {len(cluster.devices)} devices"
    )
    solutions = [
        assignment.column.solution
        for assignment in assignments
        if assignment.column.solution is not None
    ]
    peak_bytes = max(
        solution.problem.overhead_bytes
        - solution.problem.reserve_bytes
        + solution.simulation.peak_bytes
        for solution in solutions
    )
    return PlannedShape(
        Cost(cold[0], warm[0], concurrent_end_seconds=(cold, warm)),
        peak_bytes,
        verdict,
        {},
        has_batch_plan=True,
    )


class _Interrupted(Exception):
    """Planning a batch was interrupted by a request that waits for a plan."""


def _plan_batch(
    graph: Any, request: dict[str, Any], settings: Settings, interrupted: Callable[[], bool]
) -> dict[tuple[str, ...], tuple[float, float]] | None:
    """Return the seconds of each segment of a batch, by its stages: first run and each further run.

    Empty if no such schedule is faster, or if it would store components differently from a run by
    itself: a picture must depend on its request alone, and weights are read once. Most of the
    seconds must be in the last segment, so that pictures arrive one after another. None if
    ``interrupted``; the plans made until then are in the cache folder.
    """
    from graphrun.batch.schedule import schedules
    from graphrun.runtime.host import layout_of
    from graphrun.serve.together import session_of

    def choices(solution: Solution) -> set[Any]:
        return {
            *((component.name, layout_of(component)) for component in solution.components),
            *solution.plan.options,
        }

    problem = _estimate(graph, request["inputs"], settings, **request["budgets"])
    whole = choices(api.plan(problem, cache=settings.cache))
    counts = {stage.name: MOST_TOGETHER for stage in graph.stages}

    def solve(part: Problem) -> Solution:
        if interrupted():
            raise _Interrupted
        return api.plan(session_of(part), cache=settings.cache)

    try:
        candidates = schedules(graph, problem, counts, MOST_TOGETHER, solve)
    except _Interrupted:
        return None
    for schedule in candidates:
        totals = [segment.total(MOST_TOGETHER)[0] for segment in schedule.segments]
        is_alike = all(choices(segment.solution) <= whole for segment in schedule.segments)
        if (
            is_alike
            and schedule.group == MOST_TOGETHER
            and 2 * totals[-1] >= sum(totals)
            and len(totals) > 1
        ):
            # seconds for moving values between the segments
            transfer = (schedule.seconds - sum(totals)) / MOST_TOGETHER / len(totals)
            pairs = ((segment.total(1)[0], segment.total(2)[0]) for segment in schedule.segments)
            seconds = [(first + transfer, total - first + transfer) for first, total in pairs]
            return {
                segment.stages: pair
                for segment, pair in zip(schedule.segments, seconds, strict=True)
            }
    return {}


def share_of(problem: Problem, share: float) -> dict[str, int]:
    """Return ``share`` of the budgets of ``problem``, as arguments of `graphrun.estimate`. The rest
    of the device's memory is a reserve for weights of other graphs."""
    others_bytes = problem.effective_bytes - int(share * problem.effective_bytes)
    budgets = {"reserve": problem.reserve_bytes + others_bytes}
    if not problem.hardware.unified:
        budgets["ram"] = int(share * problem.ram_bytes)
    for name, nbytes in {"pinned": problem.pinned_bytes, "disk": problem.disk_bytes}.items():
        if nbytes is not None:
            budgets[name] = int(share * nbytes)
    return budgets


def _refusal(
    graph: Any,
    request: dict[str, Any],
    settings: Settings,
    error: GraphrunError,
    sizes: Sizes,
) -> dict[str, Any]:
    """Return why there is no plan, and inputs for which there is one.

    These are the largest of ``sizes``. If none fit, inputs are searched, once, which takes a dry
    run for each trial.
    """
    from graphrun.report.whatif_screens import infeasible_json, suggestions_json
    from graphrun.solve.infeasible import Infeasible
    from graphrun.solve.suggestions import best_first, setting_suggestions

    code = "does_not_fit" if error.exit_code == Infeasible.exit_code else "invalid_value"
    # a graph that does not fit its share runs with the whole budgets
    if not isinstance(error, Infeasible) or request["share"] != WHOLE:
        return {"status": 422, "code": code, "message": str(error), "details": {}}
    inputs, suggestions = request["inputs"], error.suggestions
    if error.needs and sizes.refusal(inputs) is None:
        sizes.infeasible.append((inputs, error))
    if sizes.largest is None and not sizes.searched:
        sizes.searched = True

        def estimate(inputs: Any, allow: tuple[str, ...]) -> Any:
            return _estimate(graph, inputs, settings, allow=allow)

        permissions = tuple(settings.budgets.get("allow", ()))
        trials = setting_suggestions(graph, inputs, permissions, estimate)
        suggestions = best_first((*suggestions, *trials))
        for trial in trials:
            if all(option == "--set" for option, _ in trial.change):
                pairs = (text.split("=", 1) for _, text in trial.change)
                smaller = {**inputs, **{name: int(value) for name, value in pairs}}
                sizes.feasible.append((smaller, trial.seconds))
    elif (smaller_size := sizes.suggestion(inputs)) is not None:
        suggestions = best_first((*suggestions, smaller_size))
    details = {**infeasible_json(error), "suggestions": suggestions_json(suggestions)}
    message = f"{graph.name}: {_verdict(error, inputs, sizes)}"
    return {"status": 422, "code": code, "message": message, "details": details}


def _find_unfit(
    graph: Graph,
    inputs: Inputs,
    settings: Settings,
    sizes: Sizes,
    interrupted: Callable[[], bool],
) -> None:
    """Double height and width of ``inputs`` until lower bounds show that nothing fits.

    Requests of that size or more then take no dry run. At most the pixels of a request are tried.
    """
    from graphrun.solve.infeasible import short_of

    while settings.cluster is None and not sizes.infeasible and not interrupted():
        inputs = {**inputs, **{name: 2 * int(inputs[name]) for name in ("height", "width")}}
        if inputs["height"] * inputs["width"] > settings.bounds.pixels:
            break
        problem = _estimate(graph, inputs, settings)
        if needs := surely_short(problem):
            sizes.infeasible.append((inputs, short_of(problem, needs)))


def _verdict(error: Infeasible, inputs: Inputs, sizes: Sizes) -> str:
    """Return the first sentence of ``error``, after inputs that fit."""
    verdict = str(error).partition(". Do one of: ")[0]
    unfit_inputs, _ = sizes.refusal(inputs) or (inputs, error)
    if smaller_names := changed(unfit_inputs, inputs):
        reason = verdict.removeprefix("nothing fits: ")
        verdict = f"nothing fits: even with {shown(unfit_inputs, smaller_names)}, {reason}"
    names = changed(sizes.largest[0], inputs) if sizes.largest is not None else []
    if sizes.largest is not None and names:
        size = shown(sizes.largest[0], names)
        return f"{size} would fit; for {shown(inputs, names)} {verdict}"
    return verdict

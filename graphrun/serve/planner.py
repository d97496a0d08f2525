"""The process that plans: it loads no weights, and a plan that takes long or fails delays no
request that runs.

Plans go to the cache folder, where the worker finds them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from graphrun import api
from graphrun.errors import GraphrunError, InputError
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.serve.line import MOST_TOGETHER, Cost
from graphrun.serve.settings import Settings
from graphrun.serve.shares import WHOLE
from graphrun.units import show_seconds

if TYPE_CHECKING:
    from graphrun.cluster.machines import Cluster


@dataclass(frozen=True, slots=True)
class PlannedShape:
    """What the server knows of a plan. ``peak_bytes``: as nvidia-smi would show it. ``verdict``:
    its first line on a screen. ``budgets``: those of its share, arguments of `graphrun.estimate`;
    empty: all that there is. ``looked``: whether it is known if runs go together."""

    cost: Cost
    peak_bytes: int
    verdict: str
    budgets: Mapping[str, int]
    looked: bool = False


def plan_forever(connection: Connection, settings: Settings) -> None:
    """Until ``stop``: answers ``plan`` (key, graph, inputs, share) with ``planned`` (key, shape) or
    ``unfit`` (key, status ...), and ``plan_together`` (the same) with ``together`` (key, parts)."""
    graphs = {
        graph.name: graph
        for graph in (api.load(path, trust=settings.trust) for path in settings.graphs)
    }
    while (message := connection.recv())[0] != "stop":
        kind, asked = message
        graph, key = graphs[asked["graph"]], asked["key"]
        if kind == "plan_together":
            parts: dict[tuple[str, ...], tuple[float, float]] | None = {}
            try:
                parts = _together(graph, asked, settings, connection.poll)
            except Exception:  # noqa: BLE001 (each runs by itself then)
                traceback.print_exc()
            connection.send(("together", {"key": key, "parts": parts}))
            continue
        try:
            connection.send(("planned", {"key": key, "shape": _planned(graph, asked, settings)}))
        except GraphrunError as error:
            connection.send(("unfit", {"key": key, **_refusal(graph, asked, settings, error)}))
        except Exception:  # noqa: BLE001 (one size that cannot be planned must not end the others)
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
                        "more": {},
                    },
                )
            )


def _estimate(graph: Any, inputs: Any, settings: Settings, **changed: Any) -> Any:
    arguments = {
        **settings.budgets,
        "runs": api.RUNS,
        "hardware": settings.hardware,
        "cache": settings.cache,
        **changed,
    }
    return api.estimate(graph, inputs=inputs, **arguments)


def _planned(graph: Any, asked: dict[str, Any], settings: Settings) -> PlannedShape:
    from graphrun.report.verdicts import fits, made_by

    if settings.cluster is not None:
        return _placed(graph, asked, settings, settings.cluster)
    problem = _estimate(graph, asked["inputs"], settings)
    if problem.secondaries and asked["share"] != WHOLE:
        raise InputError("graphs have several devices in turn, not in shares")
    budgets = {} if asked["share"] == WHOLE else share_of(problem, asked["share"])
    if budgets:
        problem = _estimate(graph, asked["inputs"], settings, **budgets)
    solution = api.plan(problem, cache=settings.cache)
    problem, simulation = solution.problem, solution.simulation
    cost = Cost(
        simulation.seconds, simulation.again_seconds if simulation.again else simulation.seconds
    )
    overhead_bytes = problem.overhead_bytes - problem.reserve_bytes
    verdict = fits(solution, made_by(graph.kinds(), dict(problem.settings)))
    return PlannedShape(cost, overhead_bytes + simulation.peak_bytes, verdict, budgets)


def _placed(
    graph: Any, asked: dict[str, Any], settings: Settings, cluster: Cluster
) -> PlannedShape:
    """On a cluster runs that go together are a stream: the devices work at once."""
    from graphrun.cluster.place import place
    from graphrun.cluster.stream import finish_seconds

    if asked["share"] != WHOLE:
        raise InputError("graphs have the devices of a cluster in turn, not in shares")
    budgets = {**settings.budgets, "inputs": asked["inputs"], "cache": settings.cache}
    placement = place(graph, cluster, items=api.RUNS, gains=False, **budgets).placement
    assignments, most = placement.assignments, max(MOST_TOGETHER, settings.bounds.pictures)
    cold, warm = (tuple(finish_seconds(placement, most, warm=warm)) for warm in (False, True))
    verdict = (
        f"fits: {placement.items_per_second:.3g} a second, one by itself takes {show_seconds(warm[0])}, "
        f"on {sum(len(of.devices) for of in assignments)} of {len(cluster.devices)} devices"
    )
    solutions = [of.column.solution for of in assignments if of.column.solution is not None]
    peak_bytes = max(
        of.problem.overhead_bytes - of.problem.reserve_bytes + of.simulation.peak_bytes
        for of in solutions
    )
    return PlannedShape(
        Cost(cold[0], warm[0], stream=(cold, warm)), peak_bytes, verdict, {}, looked=True
    )


class _Interrupted(Exception):
    """Somebody waits for a plan."""


def _together(
    graph: Any, asked: dict[str, Any], settings: Settings, interrupted: Callable[[], bool]
) -> dict[tuple[str, ...], tuple[float, float]] | None:
    """Stages of each segment by which runs go together -> its predicted seconds: of the first run,
    and of one after it.

    Empty where no such schedule takes less, or none holds the components as a run by itself does: a
    picture depends on its request alone, and weights are read once. Most of the seconds are in the
    last segment, so that pictures come one after another. None where it was ``interrupted``: what
    was planned by then is in the cache folder.
    """
    from graphrun.batch.schedule import schedules
    from graphrun.runtime.host import layout_of
    from graphrun.serve.together import session_of

    def choices(of: Solution) -> set[Any]:
        return {*((each.name, layout_of(each)) for each in of.chosen.components), *of.plan.options}

    problem = _estimate(graph, asked["inputs"], settings, **asked["budgets"])
    whole = choices(api.plan(problem, cache=settings.cache))
    counts = {stage.name: MOST_TOGETHER for stage in graph.stages}

    def solve(part: Problem) -> Solution:
        if interrupted():
            raise _Interrupted
        return api.plan(session_of(part), cache=settings.cache)

    try:
        found = schedules(graph, problem, counts, MOST_TOGETHER, solve)
    except _Interrupted:
        return None
    for schedule in found:
        totals = [segment.total(MOST_TOGETHER)[0] for segment in schedule.segments]
        alike = all(choices(segment.solution) <= whole for segment in schedule.segments)
        if (
            alike
            and schedule.group == MOST_TOGETHER
            and 2 * totals[-1] >= sum(totals)
            and len(totals) > 1
        ):
            # of values between the segments
            transfer = (schedule.seconds - sum(totals)) / MOST_TOGETHER / len(totals)
            pairs = ((segment.total(1)[0], segment.total(2)[0]) for segment in schedule.segments)
            seconds = [(first + transfer, both - first + transfer) for first, both in pairs]
            return {
                segment.stages: pair
                for segment, pair in zip(schedule.segments, seconds, strict=True)
            }
    return {}


def share_of(problem: Problem, share: float) -> dict[str, int]:
    """``share`` of the budgets of ``problem``, as arguments of `graphrun.estimate`. The remainder
    of the VRAM is a reserve: other graphs' weights are there, as those of other programs may be."""
    others_bytes = problem.effective_bytes - int(share * problem.effective_bytes)
    found = {"reserve": problem.reserve_bytes + others_bytes, "ram": int(share * problem.ram_bytes)}
    for name, nbytes in {"pinned": problem.pinned_bytes, "disk": problem.disk_bytes}.items():
        if nbytes is not None:
            found[name] = int(share * nbytes)
    return found


def _refusal(
    graph: Any, asked: dict[str, Any], settings: Settings, error: GraphrunError
) -> dict[str, Any]:
    """Why there is no plan, and with which inputs there is one."""
    from graphrun.report.whatif_screens import infeasible_json
    from graphrun.solve.infeasible import Infeasible
    from graphrun.solve.remedies import remedies

    code = "does_not_fit" if error.exit_code == Infeasible.exit_code else "invalid_value"
    if (
        not isinstance(error, Infeasible) or asked["share"] != WHOLE
    ):  # in a share nothing need fit: it is run with all
        return {"status": 422, "code": code, "message": str(error), "more": {}}

    def estimate(inputs: Any, allow: tuple[str, ...]) -> Any:
        return _estimate(graph, inputs, settings, allow=allow)

    further = remedies(graph, asked["inputs"], tuple(settings.budgets.get("allow", ())), estimate)
    error.repairs = tuple(
        sorted(
            (*error.repairs, *further), key=lambda repair: (repair.changes_output, repair.seconds)
        )
    )
    sizes = (
        dict(pair[1].split("=") for pair in repair.change if pair[0] == "--set")
        for repair in error.repairs
    )
    fitting = next(
        (
            f"; size={of['width']}x{of['height']} would fit"
            for of in sizes
            if {"height", "width"} <= of.keys()
        ),
        "",
    )
    verdict = str(error).partition(". Do one of: ")[0]
    return {
        "status": 422,
        "code": code,
        "message": f"{graph.name}: {verdict}{fitting}",
        "more": infeasible_json(error),
    }

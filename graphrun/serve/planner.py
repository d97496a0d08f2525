"""The process that plans: it loads no weights, and a plan that takes long or fails delays no request that runs.

Plans go to the cache folder, where the worker finds them.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from graphrun import api
from graphrun.errors import GraphrunError, InputError
from graphrun.model.problem import Problem
from graphrun.serve.line import Cost
from graphrun.serve.settings import Settings
from graphrun.serve.shares import WHOLE


@dataclass(frozen=True, slots=True)
class PlannedShape:
    """What the server knows of a plan. ``peak_bytes``: as nvidia-smi would show it. ``verdict``: its first line on a screen.
    ``budgets``: those of its share, arguments of `graphrun.estimate`; empty: all that there is."""

    cost: Cost
    peak_bytes: int
    verdict: str
    budgets: Mapping[str, int]


def plan_forever(connection: Connection, settings: Settings) -> None:
    """Until ``stop``: answers ``plan`` (key, graph, inputs, share) with ``planned`` (key, shape) or ``unfit`` (key, status ...)."""
    graphs = {graph.name: graph for graph in (api.load(path, trust=settings.trust) for path in settings.graphs)}
    while (message := connection.recv())[0] != "stop":
        asked = message[1]
        try:
            connection.send(("planned", {"key": asked["key"], "shape": _planned(graphs[asked["graph"]], asked, settings)}))
        except GraphrunError as error:
            connection.send(("unfit", {"key": asked["key"], **_refusal(graphs[asked["graph"]], asked, settings, error)}))
        except Exception:  # noqa: BLE001 (one size that cannot be planned must not end the others)
            traceback.print_exc()
            failure = {"status": 500, "message": f"planning {asked['graph']} failed; the server's log has the reason", "more": {}}
            connection.send(("unfit", {"key": asked["key"], **failure}))


def _estimate(graph: Any, inputs: Any, settings: Settings, **changed: Any) -> Any:
    arguments = {**settings.budgets, "runs": api.RUNS, "hardware": settings.hardware, "cache": settings.cache, **changed}
    return api.estimate(graph, inputs=inputs, **arguments)


def _planned(graph: Any, asked: dict[str, Any], settings: Settings) -> PlannedShape:
    from graphrun.report.verdicts import fits, made_by

    problem = _estimate(graph, asked["inputs"], settings)
    if problem.helpers and asked["share"] != WHOLE:
        raise InputError("graphs have several devices in turn, not in shares")
    budgets = {} if asked["share"] == WHOLE else share_of(problem, asked["share"])
    if budgets:
        problem = _estimate(graph, asked["inputs"], settings, **budgets)
    solution = api.plan(problem, cache=settings.cache)
    problem, simulation = solution.problem, solution.simulation
    cost = Cost(simulation.seconds, simulation.again_seconds if simulation.again else simulation.seconds)
    overhead_bytes = problem.overhead_bytes - problem.reserve_bytes
    verdict = fits(solution, made_by(graph.kinds(), dict(problem.settings)))
    return PlannedShape(cost, overhead_bytes + simulation.peak_bytes, verdict, budgets)


def share_of(problem: Problem, share: float) -> dict[str, int]:
    """``share`` of the budgets of ``problem``, as arguments of `graphrun.estimate`. The remainder of the VRAM is a reserve: other
    graphs' weights are there, as those of other programs may be."""
    others_bytes = problem.effective_bytes - int(share * problem.effective_bytes)
    found = {"reserve": problem.reserve_bytes + others_bytes, "ram": int(share * problem.ram_bytes)}
    for name, nbytes in {"pinned": problem.pinned_bytes, "disk": problem.disk_bytes}.items():
        if nbytes is not None:
            found[name] = int(share * nbytes)
    return found


def _refusal(graph: Any, asked: dict[str, Any], settings: Settings, error: GraphrunError) -> dict[str, Any]:
    """Why there is no plan, and with which inputs there is one."""
    from graphrun.report.whatif_screens import infeasible_json
    from graphrun.solve.infeasible import Infeasible
    from graphrun.solve.remedies import remedies

    if not isinstance(error, Infeasible) or asked["share"] != WHOLE:  # in a share nothing need fit: it is run with all
        return {"status": 422, "message": str(error), "more": {}}

    def estimate(inputs: Any, allow: tuple[str, ...]) -> Any:
        return _estimate(graph, inputs, settings, allow=allow)

    further = remedies(graph, asked["inputs"], tuple(settings.budgets.get("allow", ())), estimate)
    error.repairs = tuple(sorted((*error.repairs, *further), key=lambda repair: (repair.changes_output, repair.seconds)))
    sizes = (dict(pair[1].split("=") for pair in repair.change if pair[0] == "--set") for repair in error.repairs)
    fitting = next((f"; size={of['width']}x{of['height']} would fit" for of in sizes if {"height", "width"} <= of.keys()), "")
    verdict = str(error).partition(". Do one of: ")[0]
    return {"status": 422, "message": f"{graph.name}: {verdict}{fitting}", "more": infeasible_json(error)}

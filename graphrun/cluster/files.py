"""Plan files of placements: one section per device, each checked and simulated as a plan by itself.

{"graphrun": 3, "graph_file": ..., "cluster": {...}, "actions": [the placement's text],
 "problems": {digest: problem}, ...figures}
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from graphrun.cluster.machines import Cluster, refuse_large
from graphrun.cluster.placement import (
    Assignment,
    Column,
    Placement,
    column_of,
    parse_placement,
    violations,
)
from graphrun.cluster.stream import with_figures
from graphrun.errors import PlanError
from graphrun.limits import require
from graphrun.model.plan import Plan
from graphrun.model.problem import ValueNumbers
from graphrun.reading import read_json
from graphrun.report import plan_files
from graphrun.verify.solution import solution_of


def is_placement(data: Any) -> bool:
    """Whether ``data``, the content of a plan file, is a placement."""
    return isinstance(data, dict) and "cluster" in data


def save(path: Path, graph: Path, placement: Placement, summary: dict[str, Any]) -> None:
    """Write ``placement`` of the graph file ``graph`` to ``path``. Raises InputError."""
    problems = {  # equal devices share one
        assignment.column.solution.plan.problem: assignment.column.solution.problem
        for assignment in placement.assignments
        if assignment.column.solution is not None
    }
    plan_files.write_json(
        path,
        {
            "graphrun": plan_files.VERSION,
            "graph_file": plan_files.graph_name(path, graph),
            **summary,
            "cluster": asdict(placement.cluster),
            "actions": str(placement).splitlines(),
            "stages": placement.stages,
            "values": [asdict(value) for value in placement.values],
            "problems": {digest: problem.to_json() for digest, problem in problems.items()},
        },
    )


def read(path: Path) -> tuple[Placement, dict[str, Any]]:
    """Return the placement in ``path``, checked and simulated, and all entries of the file. Raises
    PlanError, and InputError for a cluster beyond a limit."""
    data = read_json(path, PlanError)
    hint = "plan again: graphrun plan GRAPH --cluster FILE -o FILE"
    if not is_placement(data) or data.get("graphrun") != plan_files.VERSION:
        raise PlanError(f"is not a plan for a cluster; {hint}", str(path))
    try:
        cluster = plan_files.validator(Cluster).validate_python(data["cluster"])
        refuse_large(cluster, str(path))
        objective, items, sections = parse_placement("\n".join(data["actions"]))
        require("requests", items, f"it is for {items:,} items", kind=PlanError)
        problems = {
            digest: plan_files.problem_from(entry) for digest, entry in data["problems"].items()
        }
        stages, values = (
            tuple(data["stages"]),
            plan_files.validator(tuple[ValueNumbers, ...]).validate_python(data["values"]),
        )
        require("stages", len(stages), f"it has {len(stages):,} stages", kind=PlanError)
        require("entries", len(values), f"it has {len(values):,} values", kind=PlanError)
        plans = {plan: problems[plan.problem] for _, _, plan in sections}  # of several devices each
        plan_files.refuse_large([(problem, plan) for plan, problem in plans.items()])
        devices = {device.name: device for device in cluster.devices}
        columns = dict[Plan, Column]()
        for plan, problem in plans.items():
            plan_files.refuse_violations(path, problem, plan)
            columns[plan] = column_of(stages, values, solution_of(problem, plan))
        assignments = []
        for name, section_stages, plan in sections:
            for device_name in name.split("+"):
                if device_name not in devices:
                    raise PlanError(f"there is no device {device_name}")
            main, *secondaries = (devices[device_name] for device_name in name.split("+"))
            assignments.append(Assignment(main, columns[plan], tuple(secondaries)))
            if assignments[-1].stages != section_stages:
                raise PlanError(
                    f"the plan of {name} is for {' '.join(assignments[-1].stages)}, "
                    f"not {' '.join(section_stages)}"
                )
        placement = Placement(objective, items, stages, values, cluster, tuple(assignments))
    except plan_files.BrokenRules:
        raise
    except PlanError as error:
        raise PlanError(f"{error}; {hint}", str(path)) from error
    except (ValidationError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"is damaged: {type(error).__name__} {error}; {hint}", str(path)) from error
    if faults := violations(placement):
        raise PlanError("\n".join(["the placement may not be run:", *faults]), str(path))
    return with_figures(placement), data

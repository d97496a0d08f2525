"""Reads and writes plan and trace files. A plan file is the JSON summary plus the whole problem, so
it runs on any machine.

Files are written to a temporary name and renamed, so that they are complete or absent.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaValidator

from graphrun.errors import InputError, PlanError
from graphrun.files import write_whole
from graphrun.graph.shipped import shipped_graphs, shipped_name
from graphrun.limits import LIMITS, require
from graphrun.model.plan import Plan, Violation, parse
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.reading import read_json, shortened
from graphrun.verify.solution import broken_rules, solution_of

# of plan files; others are refused: 1 had other names for backing stores, block groups and actions
VERSION = 2


def save(path: Path, graph: Path, solution: Solution, summary: Mapping[str, Any]) -> None:
    """Writes ``solution`` to ``path``, with the name of a shipped graph, or the path of the graph
    file relative to it. Raises InputError."""
    write_json(path, content(path, graph, solution, summary))


def content(
    path: Path, graph: Path, solution: Solution, summary: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of a plan file at ``path``; a trace file has the same under ``plan``."""
    return {
        "graphrun": VERSION,
        "graph_file": graph_name(path, graph),
        **summary,
        "problem": solution.problem.to_json(),
    }


def graph_name(path: Path, graph: Path) -> str:
    """How a plan file at ``path`` names the graph file ``graph``; `graph_path` reads it."""
    file, folder = graph.resolve(), path.resolve().parent
    # drives are of Windows
    relative = Path(os.path.relpath(file, folder)) if file.drive == folder.drive else file
    return shipped_name(graph) or relative.as_posix()


def read(path: Path) -> tuple[Problem, Plan, dict[str, Any]]:
    """The problem, the plan and all entries of the plan file at ``path``. Raises PlanError saying
    what is wrong with it."""
    return plan_in(read_json(path, PlanError), path)


def plan_in(data: Any, path: Path) -> tuple[Problem, Plan, dict[str, Any]]:
    """The problem, the plan and all entries of ``data``, the content of the plan file ``path``.

    Raises PlanError where it is not a plan file, is one of another version, is damaged, or is
    beyond a limit.
    """
    again = "plan again: graphrun plan GRAPH -o FILE"
    if not isinstance(data, dict) or "graphrun" not in data:
        raise PlanError(f"is not a plan; {again}", str(path))
    if data["graphrun"] != VERSION:
        raise PlanError(
            f"is a plan of version {data['graphrun']!r}, and this graphrun reads version {VERSION}; {again}",
            str(path),
        )
    try:
        text = "\n".join(data["actions"])
        problem, plan = problem_from(data["problem"]), parse(text)
    except PlanError as error:
        raise PlanError(f"actions: {error}", str(path)) from error
    except ValidationError as error:
        wrong = "; ".join(
            f"problem.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3]
        )
        raise PlanError(f"is damaged: {wrong}; {again}", str(path)) from error
    except (KeyError, TypeError) as error:
        raise PlanError(
            f"is damaged: {type(error).__name__} {error}; {again}", str(path)
        ) from error
    refuse_large([(problem, plan)], str(path))
    return problem, plan, data


def problem_from(data: Any) -> Problem:
    """The problem that `Problem.to_json` wrote. Raises pydantic's ValidationError, which names
    wrong fields."""
    return cast(Problem, validator(Problem).validate_python(data))


@cache
def validator(kind: Any) -> SchemaValidator:
    """Validate data of a plan file as ``kind``. A list is read up to its first wrong entry: an
    error takes 500 bytes, and a file may have millions."""
    return SchemaValidator(_up_to_errors(TypeAdapter(kind).core_schema))


def _up_to_errors(schema: Any) -> Any:
    if isinstance(schema, list | tuple):
        return [_up_to_errors(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    ends = {"fail_fast": True} if schema.get("type") == "tuple" else {}
    return {
        name: part if name in ("metadata", "default") else _up_to_errors(part)
        for name, part in schema.items()
    } | ends


def refuse_large(sections: Sequence[tuple[Problem, Plan]], where: str = "") -> None:
    """Raises PlanError if the plan file ``where`` with these problems and plans is beyond the limit
    ``entries``, ``placements`` or ``block_calls``."""
    placements = block_calls = 0
    for problem, plan in sections:
        phases = (
            *problem.phases,
            *(phase for option in problem.options for phase in option.phases),
        )
        components = [of for c in problem.components for of in (c, c.layers) if of is not None]
        calls = [call for phase in phases for call in phase.trace.calls]
        short: dict[str, Sequence[Sequence[Any]]] = {
            "components": [problem.components],
            "block groups": [[group for of in components for group in of.groups]],
            "variants of one component": [of.variants for of in components],
            "phases": [phases],
            "values": [problem.values],
            "consumers of one value": [of.consumers for of in problem.values],
            "results and kept tensors of one call": [(*call.results, *call.kept) for call in calls],
            "options": [problem.options],
            "directives": [problem.directives],
            "permissions": [problem.allow],
            "pairs of ordered stages": [problem.precedence or ()],
            "actions in one slot": [slot.actions for slot in (*plan.slots, *plan.again)],
        }
        for what, lists in short.items():
            count = max((len(entries) for entries in lists), default=0)
            require("entries", count, f"it has {count:,} {what}", where, PlanError)
        blocks = {id(of): sum(len(group.blocks) for group in of.groups) for of in components}
        slots = max(len(plan.slots) + len(plan.again), 3 * len(phases))
        placements += slots * sum(blocks.values())
        most = {
            of.name: max(blocks[id(of)], blocks.get(id(of.layers), 0)) for of in problem.components
        }
        for phase in phases:
            uses = [use for of in phase.uses for use in (of, of.layers) if use is not None]
            lengths = [max(1, len(use.order), most.get(use.component, 0)) for use in uses]
            block_calls += max((use.calls for use in uses), default=0) * sum(lengths)
    for limit, count, what in (
        ("placements", placements, "its slots times its problem's blocks are {:,}"),
        ("block_calls", block_calls, "its calls compute {:,} blocks"),
    ):
        require(limit, count, what.format(count), where, PlanError)


def graph_path(path: Path, saved: Mapping[str, Any]) -> Path:
    """The path, or a shipped graph's name, of the graph file of the plan file at ``path``. Raises
    PlanError where it names none."""
    if not isinstance(name := saved.get("graph_file"), str):
        raise PlanError('names no graph: add "graph_file"', str(path))
    return Path(name) if name in shipped_graphs() else path.parent / name


class BrokenRules(PlanError):
    """A saved plan breaks rules; ``violations`` are these."""

    violations: tuple[Violation, ...] = ()


def refuse_violations(path: Path, problem: Problem, plan: Plan) -> None:
    """Raises BrokenRules listing every rule that ``plan`` breaks, with slot, action and bytes."""
    broken = broken_rules(problem, plan)
    more = " or more" if len(broken) == LIMITS.problems else ""
    lines = [
        f"{path}: {len(broken)}{more} {'rule is' if len(broken) == 1 else 'rules are'} broken; the plan is refused"
    ]
    names = [shortened(f"{slot.phase} {slot.part}".strip(), 200) for slot in plan.slots]
    for violation in broken:
        where = (
            f" in slot {violation.slot} ({names[violation.slot]})"
            if 0 <= violation.slot < len(names)
            else ""
        )
        action = f", action {violation.action}" if violation.action >= 0 else ""
        lines.append(f"  {violation.rule}{where}{action}: {violation.detail}")
    if broken:
        error = BrokenRules("\n".join(lines))
        error.violations = broken
        raise error


def read_solution(path: Path) -> tuple[Solution, dict[str, Any]]:
    """The solution in the plan file at ``path``, checked and simulated, and all entries of the
    file. Raises PlanError."""
    return solution_in(read_json(path, PlanError), path)


def solution_in(data: Any, path: Path) -> tuple[Solution, dict[str, Any]]:
    """As `read_solution` for ``data``, the content of ``path``. The proof is taken from it
    unchecked."""
    problem, plan, saved = plan_in(data, path)
    refuse_violations(path, problem, plan)
    bound, objective = (saved.get(name) or 0.0 for name in ("bound_seconds", "objective_seconds"))
    if not (isinstance(bound, int | float) and isinstance(objective, int | float)):
        raise PlanError(
            "is damaged: bound_seconds and objective_seconds are numbers; plan again", str(path)
        )
    solution = solution_of(problem, plan, float(bound), float(objective))
    return (
        solution
        if objective
        else replace(solution, objective_seconds=solution.simulation.total_seconds)
    ), saved


def write_json(path: Path, data: Any) -> None:
    """Writes ``data`` as JSON to ``path``, completely or not at all. Raises InputError."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes ``text`` to ``path``, completely or not at all. Raises InputError."""
    write_with(path, lambda target: target.write_text(text, encoding="utf-8"))


def require_writable(*paths: Path | None) -> None:
    """Raises InputError unless a file can be written at each of ``paths``. Called before a run, not
    after it."""
    for path in paths:
        if path is not None:
            with writing(path):
                tempfile.TemporaryFile(dir=path.parent).close()


def write_with(path: Path, write: Callable[[Path], Any]) -> Path:
    """``write(temporary)`` writes the file, which is then renamed to ``path``. Returns ``path``.
    Raises InputError."""
    with writing(path):
        write_whole(path, write)
    return path


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context in which ``path`` is written: its folder exists, and an OSError becomes an
    InputError about it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error

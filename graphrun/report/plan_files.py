"""Read and write plan and trace files.

A plan file is the JSON summary and the whole problem, so it can be read on any machine. Files are
written to a temporary name and renamed, so that they are complete or absent.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any, cast

from graphrun.errors import InputError, PlanError
from graphrun.files import write_whole
from graphrun.graph.shipped import shipped_graphs, shipped_name
from graphrun.limits import LIMITS, require
from graphrun.reading import read_json

if TYPE_CHECKING:
    from pydantic_core import SchemaValidator

    from graphrun.model.plan import Plan, Violation
    from graphrun.model.problem import Problem
    from graphrun.model.solution import Solution

# The version of plan files; other versions are refused. Version 2 had other names for unblocked
# weights, ring buffers, secondary devices and the inputs of phases.
VERSION = 3
# a list of numbers in indented JSON, a number per line
_NUMBERS = re.compile(r"\[\n\s*((?:-?[\d.eE+-]+,\n\s*)*-?[\d.eE+-]+)\n\s*\]")


def save(path: Path, graph: Path, solution: Solution, summary: Mapping[str, Any]) -> None:
    """Write ``solution`` to ``path``. Raises InputError. The file has the name of a shipped graph,
    or the path of the graph file relative to ``path``."""
    write_json(path, content(path, graph, solution, summary))


def content(
    path: Path, graph: Path, solution: Solution, summary: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of a plan file at ``path``; a trace file has the same under ``plan``."""
    return {
        "graphrun": VERSION,
        "graph_file": graph_name(path, graph),
        **summary,
        "problem": solution.problem.to_json(),
    }


def graph_name(path: Path, graph: Path) -> str:
    """Return the name of the graph file ``graph`` in a plan file at ``path``, for `graph_path`."""
    file, folder = graph.resolve(), path.resolve().parent
    # drives exist on Windows only; there is no relative path between two drives
    relative = Path(os.path.relpath(file, folder)) if file.drive == folder.drive else file
    return shipped_name(graph) or relative.as_posix()


def read(path: Path) -> tuple[Problem, Plan, dict[str, Any]]:
    """Return the problem, the plan and all keys of the plan file at ``path``. Raises PlanError,
    which says what is wrong with the file."""
    return plan_in(read_json(path, PlanError), path)


def plan_in(data: Any, path: Path) -> tuple[Problem, Plan, dict[str, Any]]:
    """Return the problem, the plan and all keys of ``data``, the content of the plan file ``path``.

    Raises PlanError if the data is not a plan of one machine, has another version, is damaged, or
    is beyond a limit.
    """
    suggestion = "plan again: graphrun plan GRAPH -o FILE"
    if not isinstance(data, dict) or "graphrun" not in data:
        raise PlanError(f"is not a plan; {suggestion}", str(path))
    if "cluster" in data:
        raise PlanError(
            "is a plan for a cluster: graphrun check reads it; to run its graph, type "
            "graphrun run GRAPH --cluster FILE, which plans again",
            str(path),
        )
    if data["graphrun"] != VERSION:
        raise PlanError(
            f"is a plan of version {data['graphrun']!r}, and this graphrun reads version "
            f"{VERSION}; {suggestion}",
            str(path),
        )
    from pydantic import ValidationError

    from graphrun.model.plan import parse

    try:
        text = "\n".join(data["actions"])
        problem, plan = problem_from(data["problem"]), parse(text)
    except PlanError as error:
        raise PlanError(f"actions: {error}", str(path)) from error
    except ValidationError as error:
        problems = "; ".join(
            f"problem.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3]
        )
        raise PlanError(f"is damaged: {problems}; {suggestion}", str(path)) from error
    except (KeyError, TypeError) as error:
        raise PlanError(
            f"is damaged: {type(error).__name__} {error}; {suggestion}", str(path)
        ) from error
    refuse_large([(problem, plan)], str(path))
    return problem, plan, data


def problem_from(data: Any) -> Problem:
    """Return the problem that `Problem.to_json` wrote. Raises pydantic's ValidationError, which
    names the wrong fields."""
    from graphrun.model.problem import Problem

    return cast(Problem, validator(Problem).validate_python(data))


@cache
def validator(kind: Any) -> SchemaValidator:
    """Return a validator of plan-file data for ``kind``. A list is read up to its first wrong item:
    an error takes 500 bytes, and a file may have millions."""
    from pydantic import TypeAdapter
    from pydantic_core import SchemaValidator

    return SchemaValidator(_up_to_errors(TypeAdapter(kind).core_schema))


def _up_to_errors(schema: Any) -> Any:
    if isinstance(schema, list | tuple):
        return [_up_to_errors(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    options = {"fail_fast": True} if schema.get("type") == "tuple" else {}
    return {
        name: part if name in ("metadata", "default") else _up_to_errors(part)
        for name, part in schema.items()
    } | options


def refuse_large(sections: Sequence[tuple[Problem, Plan]], source: str = "") -> None:
    """Raise PlanError if the plan file ``source`` is beyond a limit. The limits are ``entries``,
    ``placements`` and ``block_calls`` of all ``sections``."""
    placements = block_calls = 0
    for problem, plan in sections:
        phases = (
            *problem.phases,
            *(phase for option in problem.options for phase in option.phases),
        )
        components = [
            component
            for c in problem.components
            for component in (c, c.layers)
            if component is not None
        ]
        calls = [call for phase in phases for call in phase.trace.calls]
        short: dict[str, Sequence[Sequence[Any]]] = {
            "components": [problem.components],
            "block groups": [[group for component in components for group in component.groups]],
            "variants of one component": [component.variants for component in components],
            "phases": [phases],
            "values": [problem.values],
            "consumers of one value": [value.consumers for value in problem.values],
            "results and kept tensors of one call": [
                (*call.results, *call.persistent_keys) for call in calls
            ],
            "options": [problem.options],
            "directives": [problem.directives],
            "permissions": [problem.allow],
            "pairs of ordered stages": [problem.precedence or ()],
            "actions in one slot": [slot.actions for slot in plan.all_slots],
        }
        for description, lists in short.items():
            count = max((len(entries) for entries in lists), default=0)
            require("entries", count, f"it has {count:,} {description}", source, PlanError)
        blocks = {
            id(component): sum(len(group.blocks) for group in component.groups)
            for component in components
        }
        slots = max(len(plan.slots) + len(plan.further_slots), 3 * len(phases))
        placements += slots * sum(blocks.values())
        block_maxima = {
            component.name: max(blocks[id(component)], blocks.get(id(component.layers), 0))
            for component in problem.components
        }
        for phase in phases:
            uses = [
                use
                for phase_use in phase.uses
                for use in (phase_use, phase_use.layers)
                if use is not None
            ]
            lengths = [max(1, len(use.order), block_maxima.get(use.component, 0)) for use in uses]
            block_calls += max((use.calls for use in uses), default=0) * sum(lengths)
    for limit, count, description in (
        ("placements", placements, "its slots times its problem's blocks are {:,}"),
        ("block_calls", block_calls, "its calls compute {:,} blocks"),
    ):
        require(limit, count, description.format(count), source, PlanError)


def graph_path(path: Path, entries: Mapping[str, Any]) -> Path:
    """Return the path, or a shipped graph's name, of the graph file of the plan file at ``path``.
    Raises PlanError if the plan file names no graph."""
    if not isinstance(name := entries.get("graph_file"), str):
        raise PlanError('names no graph: add "graph_file"', str(path))
    return Path(name) if name in shipped_graphs() else path.parent / name


class BrokenRules(PlanError):
    """A saved plan breaks the rules in ``violations``."""

    violations: tuple[Violation, ...] = ()


def refuse_violations(path: Path, problem: Problem, plan: Plan) -> None:
    """Raise BrokenRules if ``plan`` breaks rules, with the lines that do."""
    from graphrun.model.plan import marked_text
    from graphrun.verify.solution import broken_rules

    if not (violations := broken_rules(problem, plan)):
        return
    suffix = " or more" if len(violations) == LIMITS.problems else ""
    verb = "rule is" if len(violations) == 1 else "rules are"
    error = BrokenRules(
        f"{path}: {len(violations)}{suffix} {verb} broken; the plan is refused\n"
        + indent(marked_text(plan, violations), "  ")
    )
    error.violations = violations
    raise error


def read_solution(path: Path) -> tuple[Solution, dict[str, Any]]:
    """Return the solution in the plan file, checked and simulated, and all keys of the file. Raises
    PlanError."""
    return solution_in(read_json(path, PlanError), path)


def solution_in(data: Any, path: Path) -> tuple[Solution, dict[str, Any]]:
    """Return `read_solution` of ``data``, the content of ``path``. The proof in the file is
    trusted."""
    from graphrun.verify.solution import solution_of

    problem, plan, entries = plan_in(data, path)
    refuse_violations(path, problem, plan)
    bound, objective = (entries.get(name) or 0.0 for name in ("bound_seconds", "objective_seconds"))
    if not (isinstance(bound, int | float) and isinstance(objective, int | float)):
        raise PlanError(
            "is damaged: bound_seconds and objective_seconds are numbers; plan again", str(path)
        )
    solution = solution_of(problem, plan, float(bound), float(objective))
    return (
        solution if objective else replace(solution, objective_seconds=solution.seconds)
    ), entries


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` as JSON to ``path``, completely or not at all. Raises InputError.

    A list of numbers takes one line: plans of videos have half a million numbers, and would exceed
    the limit of their own files (`graphrun.limits`).
    """
    indented = json.dumps(data, indent=1)
    write_text(path, _NUMBERS.sub(lambda numbers: "".join(numbers[0].split()), indented) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, completely or not at all. Raises InputError."""
    write_with(path, lambda target: target.write_text(text, encoding="utf-8"))


def require_writable(*paths: Path | None) -> None:
    """Raise InputError unless a file can be written at each of ``paths``. Call it before a run, so
    that no run is lost."""
    for path in paths:
        if path is not None:
            with writing(path):
                tempfile.TemporaryFile(dir=path.parent).close()


def write_with(path: Path, write: Callable[[Path], Any]) -> Path:
    """Write a temporary file with ``write(temporary)``, rename it to ``path``, and return ``path``.
    Raises InputError."""
    with writing(path):
        write_whole(path, write)
    return path


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Create the folder of ``path``, and turn an OSError inside the context into an InputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error

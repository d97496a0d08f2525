"""Plans, traces and pictures as files. A plan file is the JSON summary with the whole problem beside it: it replays anywhere.

Nothing is half-written: a file appears under its name when it is complete.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from graphrun.errors import InputError, PlanError
from graphrun.files import write_whole
from graphrun.planner.check import check
from graphrun.planner.parse import parse
from graphrun.planner.plan import Plan
from graphrun.planner.problem import Problem
from graphrun.planner.simulate import simulate
from graphrun.planner.solution import Solution

VERSION = 1
FRAME_MILLISECONDS = 60  # of a moving picture: some 16 frames a second, as Wan's videos are made for


def save(path: Path, graph: Path, solution: Solution, summary: Mapping[str, Any]) -> None:
    """Write ``solution`` to ``path``, naming the graph file relative to it."""
    write_json(path, content(path, graph, solution, summary))


def content(path: Path, graph: Path, solution: Solution, summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan file at ``path`` holds: a trace's file holds the same under ``plan``."""
    where = os.path.relpath(graph.resolve(), path.resolve().parent)
    return {"graphrun": VERSION, "graph_file": where, **summary, "problem": solution.problem.to_json()}


def read(path: Path) -> tuple[Problem, Plan, dict[str, Any]]:
    """The problem and the plan in the file, and the file's other entries. Raises PlanError naming what is wrong with it."""
    return plan_in(read_json(path), path)


def read_json(path: Path) -> Any:
    """What the JSON file at ``path`` holds. Raises InputError where it cannot be read, PlanError where it is no JSON."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"is not JSON: {error}", str(path)) from error


def plan_in(data: Any, path: Path) -> tuple[Problem, Plan, dict[str, Any]]:
    """The problem and the plan in ``data``, as read from ``path``, and its other entries. Raises PlanError."""
    if not isinstance(data, dict) or data.get("graphrun") != VERSION:
        raise PlanError(
            f'is not a plan of this version (no "graphrun": {VERSION}); make one with graphrun plan GRAPH -o', str(path)
        )
    try:
        text = "\n".join(data["actions"])
        return problem_from(data["problem"]), parse(text), data
    except PlanError as error:
        raise PlanError(f"actions: {error}", str(path)) from error
    except ValidationError as error:
        wrong = "; ".join(f"problem.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
        raise PlanError(f"is damaged: {wrong}", str(path)) from error
    except (KeyError, TypeError) as error:
        raise PlanError(f"is damaged: {type(error).__name__} {error}", str(path)) from error


def problem_from(data: Any) -> Problem:
    """The problem that `Problem.to_json` wrote. Raises pydantic's ValidationError, which names every wrong field."""
    return TypeAdapter(Problem).validate_python(data)


def graph_path(path: Path, saved: Mapping[str, Any]) -> Path:
    """The graph file that the plan file at ``path`` names in ``saved``; PlanError where it names none."""
    if not isinstance(name := saved.get("graph_file"), str):
        raise PlanError('names no graph: add "graph_file"', str(path))
    return path.parent / name


def refuse_violations(path: Path, problem: Problem, plan: Plan) -> None:
    """Raises PlanError listing every rule that ``plan`` breaks, with place and bytes."""
    violations = check(problem, plan)
    if violations:
        lines = [f"{path}: {len(violations)} {'rule is' if len(violations) == 1 else 'rules are'} broken; the plan is refused"]
        for violation in violations:
            place = ""
            if 0 <= violation.slot < len(plan.slots):
                slot = plan.slots[violation.slot]
                place = f" in slot {violation.slot} ({f'{slot.phase} {slot.part}'.strip()})"
            action = f", action {violation.action}" if violation.action >= 0 else ""
            lines.append(f"  {violation.rule}{place}{action}: {violation.detail}")
        raise PlanError("\n".join(lines))


def solution_of(problem: Problem, plan: Plan, saved: Mapping[str, Any]) -> Solution:
    """The solution as it was saved. Its proof is the file's word; its time and bytes come from `simulate` as always."""
    simulated = simulate(problem, plan)
    bound = float(saved.get("bound_seconds") or 0.0)
    objective = float(saved.get("objective_seconds") or simulated.total_seconds)
    gap = max(0.0, objective - bound) / max(objective, 1e-12)
    return Solution(problem, plan, bool(saved.get("proven_optimal")), bound, objective, gap, simulated.again_seconds)


def write_json(path: Path, data: Any) -> None:
    """``data`` as JSON in ``path``, whole or not at all."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """``text`` in ``path``, whole or not at all."""
    _whole(path, lambda target: target.write_text(text))


def save_outputs(outputs: Mapping[str, Any], path: Path) -> list[Path]:
    """Write every picture among ``outputs``: the first to ``path``, others beside it with a number, so that frames sort as they
    follow. With the suffix ``.gif`` each video becomes one moving picture instead. Returns the paths.

    Tensors (embeddings, latents) go together into ``path`` with the suffix ``.safetensors``, under names such as
    ``embeds.prompt_embeds``.
    """
    kind = path.suffix.lstrip(".") or "png"
    pictures = list(_pictures(list(outputs.values()), videos=kind == "gif"))
    digits = len(str(len(pictures) - 1))
    written = []
    for number, picture in enumerate(pictures):
        target = path if number == 0 else path.with_stem(f"{path.stem}-{number:0{digits}}")

        def write(temporary: Path, picture: Any = picture, kind: str = kind) -> None:
            if isinstance(picture, list):
                picture[0].save(temporary, kind, save_all=True, append_images=picture[1:], duration=FRAME_MILLISECONDS, loop=0)
            else:
                picture.save(temporary, format=kind)

        _whole(target, write)
        written.append(target)
    if tensors := dict(_tensors("", dict(outputs))):
        from safetensors.torch import save as packed

        target, data = (
            path.with_suffix(".safetensors"),
            packed({name: tensor.clone().contiguous() for name, tensor in tensors.items()}),
        )
        _whole(target, lambda temporary: temporary.write_bytes(data))
        written.append(target)
    return written


def _pictures(values: list[Any], *, videos: bool) -> Iterator[Any]:
    """Every picture in ``values`` and the lists in it; for ``videos`` a list of pictures is one thing."""
    for value in values:
        if hasattr(value, "save") or (videos and isinstance(value, list) and value and hasattr(value[0], "save")):
            yield value
        elif isinstance(value, list):
            yield from _pictures(value, videos=videos)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor in ``value`` with its path in it."""
    if hasattr(value, "untyped_storage"):
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _tensors(f"{name}.{key}" if name else str(key), item)


def require_writable(*paths: Path | None) -> None:
    """Raises InputError unless a file can be written at each of ``paths``: better said before a run than after it."""
    for path in paths:
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error


def _whole(path: Path, write: Callable[[Path], Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, write)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error

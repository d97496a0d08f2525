"""Shared by the commands: the typer app, planning or reading a plan, the cache folder, the hardware, printing."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphrun import api
from graphrun.cli.options import Asked
from graphrun.errors import GraphrunError, InputError
from graphrun.report import plan_files as planfile

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph


app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

GraphFile = Annotated[Path, typer.Argument(help="A graph (YAML), or a plan saved with -o (JSON).", show_default=False)]
OnlyGraph = Annotated[Path, typer.Argument(help="A graph (YAML).", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of the screen.")]


@dataclass(frozen=True, slots=True)
class Planned:
    """A graph with its solution.

    ``source`` is the graph's file; ``solve_seconds`` is None where the plan was found in the cache, or read from a file without it.
    ``precomputed``: cached stage outputs by name, whose stages are not planned.
    """

    graph: Any
    source: Path
    solution: Any
    inputs: dict[str, str]
    solve_seconds: float | None
    precomputed: dict[str, Any] = field(default_factory=dict)


def planned(path: Path, asked: Asked, *, to_run: bool = False, reuse: str = "none", random_weights: bool = False) -> Planned:
    """Plans the graph at ``path``, or reads the saved plan there. Bad input is refused first, since planning takes seconds.

    ``to_run``: the plan is about to be run, so inputs and device are checked too. ``reuse``: which cached stage outputs take the
    place of their stages (``encoded``, ``all``, ``none``).
    """
    inputs, cache = asked.inputs, cache_folder(asked.no_cache)
    if path.suffix == ".json":
        asked.refuse_for_plan(path)
        return _read_plan(path, asked, cache, to_run, random_weights)
    graph = load(path, asked)
    if to_run:
        graph.resolve(inputs)
    if asked.vram is None:
        raise InputError("a graph needs a budget: add --vram, such as --vram 8G")
    hardware = hardware_for(asked.hardware, asked.device, to_run, cache)
    if not to_run:  # planning compiles nothing; without dynamo the libraries import a second faster
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    precomputed = precomputed_for(graph, inputs, hardware, cache, reuse, random_weights, asked.allow or ())

    def estimate(inputs: Mapping[str, Any], allow: tuple[str, ...]) -> Any:
        arguments = {**asked.estimate_arguments, "allow": allow, "precomputed": precomputed}
        return api.estimate(graph, vram=asked.vram or "", hardware=hardware, inputs=inputs, cache=cache, **arguments)

    problem, seconds = estimate(inputs, asked.estimate_arguments["allow"]), list[float]()
    with native_stdout_to_stderr(), _with_remedies(functools.partial(_remedies, graph, inputs, asked, estimate)):
        solution = api.plan(problem, cache=cache, solved=seconds.append)
    return Planned(graph, path, solution, inputs, seconds[0] if seconds else None, precomputed)


def say(line: str) -> None:
    """Prints ``line`` to stderr."""
    typer.echo(line, err=True)


def cache_folder(off: bool) -> Path | None:
    """The cache folder of the commands: ``$XDG_CACHE_HOME/graphrun``, else ``~/.cache/graphrun``; None if ``off``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return None if off else (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "graphrun"


def hardware_for(name: str | None, device: str | None, to_run: bool, cache: Path | None) -> Any:
    """The hardware to plan for, or to run on if ``to_run``.

    It is the profile or prior called ``name``; else the simulated device for ``--device sim``, the card found, or the default
    prior. Raises InputError where options contradict each other, and for a run without a CUDA device.
    """
    from graphrun.profile import hardware as devices
    from graphrun.profile import hardware_profiles as profiles

    if device not in (None, "cuda", "sim"):
        raise InputError(f"device {device!r} is not known; it is cuda or sim")
    chosen = profiles.hardware(name, cache) if name else devices.hardware("sim") if device == "sim" else None
    if chosen is not None and device not in (None, chosen.device):
        raise InputError(f"hardware {chosen.name} is a {chosen.device} device, but --device is {device}; leave one of them out")
    if chosen is None or (to_run and chosen.device == "cuda"):
        found = profiles.found(cache)
        if found is None and to_run:
            raise InputError("no CUDA device found to run on; add --device sim to run on the simulated accelerator")
        chosen = chosen or found or devices.hardware(devices.DEFAULT)
    return chosen


def _read_plan(path: Path, asked: Asked, cache: Path | None, to_run: bool, random_weights: bool) -> Planned:
    problem, candidate, saved = planfile.read(path)
    planfile.refuse_violations(path, problem, candidate)
    source, inputs = planfile.graph_path(path, saved), asked.inputs
    graph = load(source, asked)
    precomputed: dict[str, Any] = {}
    if to_run:
        values = api.planned_inputs(problem, graph, inputs)
        until = graph.until(problem.until) if problem.until else graph
        reuse = reuse_of(until, problem.precomputed)
        precomputed = precomputed_for(until, values, problem.hardware, cache, reuse, random_weights, problem.allow)
    return Planned(graph, source, planfile.solution_of(problem, candidate, saved), inputs, saved.get("solve_seconds"), precomputed)


def load(path: Path, asked: Asked) -> Any:
    """The graph in the file at ``path``, with the options ``--trust-package`` and ``--until``. Raises InputError for a plan."""
    if path.suffix == ".json":
        raise InputError(f"{path} is a plan; give the graph (YAML) that it was made from")
    graph = api.load(path, trust=asked.trust_package or ())
    return graph if asked.until is None else graph.until(asked.until)


def summary_of(made: Planned, trace: Any = None) -> dict[str, Any]:
    """The JSON form of a plan, and of a run beside it."""
    from graphrun.report.summary import summarize

    return summarize(made.solution, made.solve_seconds, trace)


def checked_reuse(reuse: str) -> Any:
    """The value of ``--reuse``. Raises InputError for an unknown one."""
    if reuse not in ("encoded", "all", "none"):
        raise InputError(f"--reuse {reuse!r} is not known; it is encoded, all or none")
    return reuse


def precomputed_for(
    graph: Graph, inputs: Mapping[str, Any], hardware: Any, cache: Path | None, reuse: str, random: bool, allow: Sequence[str]
) -> dict[str, Any]:
    """Stage outputs that earlier runs cached for these inputs, by name. ``random``: those of random weights."""
    if checked_reuse(reuse) == "none" or cache is None:
        return {}
    graph = graph.without_sources() if random else graph
    return api.precomputed(graph, inputs, hardware=hardware, cache=cache, what=checked_reuse(reuse), allow=allow)


def reuse_of(graph: Graph, precomputed: Sequence[str]) -> str:
    """The value of ``--reuse`` that finds the outputs of the stages ``precomputed``."""
    encoded = all(graph.stage(name).op == "encode_prompt" for name in precomputed)
    return "none" if not precomputed else "encoded" if encoded else "all"


def plan_screen_of(made: Planned) -> str:
    """The screen of a plan."""
    from graphrun.report.screen import plan_screen

    return plan_screen(made.solution, made.solve_seconds)


def show(summary: dict[str, Any], as_json: bool, screen: str) -> None:
    """Prints ``summary`` as JSON, or ``screen``."""
    typer.echo(json.dumps(summary, indent=1) if as_json else screen)


def _remedies(graph: Any, inputs: Mapping[str, Any], asked: Asked, estimate: Any) -> tuple[Any, ...]:
    from graphrun.solve.remedies import remedies

    typer.echo("nothing fits; looking for changes that would", err=True)
    return remedies(graph, inputs, asked.estimate_arguments["allow"], estimate)


@contextlib.contextmanager
def _with_remedies(found: Callable[[], tuple[Any, ...]]) -> Iterator[None]:
    """Adds to an `Infeasible` error the repairs that need further dry runs."""
    try:
        yield
    except GraphrunError as error:
        repairs = getattr(error, "repairs", None)
        if repairs is not None:
            ranked = sorted((*repairs, *found()), key=lambda repair: (repair.changes_output, repair.seconds))
            error.repairs = tuple(ranked)  # type: ignore[attr-defined]
        raise


@contextlib.contextmanager
def native_stdout_to_stderr() -> Iterator[None]:
    """Redirects file descriptor 1 to stderr: the solver's native code may print, and stdout of --json must stay JSON."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)

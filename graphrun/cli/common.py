"""What the commands share: the typer app, planning or reading a plan, the cache folder, the hardware, printing."""

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
    """A graph with its solution, and how long solving took (None where it was read from a file)."""

    graph: Any
    source: Path
    solution: Any
    inputs: dict[str, str]
    solve_seconds: float | None
    precomputed: dict[str, Any] = field(default_factory=dict)  # outputs of stages that are kept, and so not planned


def planned(path: Path, asked: Asked, *, to_run: bool = False, reuse: str = "none", random_weights: bool = False) -> Planned:
    """The graph at ``path`` planned, or the plan there read. What can be refused early is: planning takes seconds.

    ``reuse``: which outputs of stages, where they are kept from earlier runs, are not planned.
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
    place = hardware_for(asked.hardware, asked.device, to_run, cache)
    if not to_run:  # nothing is compiled while planning; a second of the libraries' imports prepares for it
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    precomputed = precomputed_for(graph, inputs, place, cache, reuse, random_weights, asked.allow or ())

    def estimate(inputs: Mapping[str, Any], allow: tuple[str, ...]) -> Any:
        demands = {**asked.demands, "allow": allow}
        return api.estimate(
            graph, vram=asked.vram or "", hardware=place, inputs=inputs, cache=cache, precomputed=precomputed, **demands
        )

    problem, took = estimate(inputs, asked.demands["allow"]), list[float]()
    with stdout_kept_clean(), _more_repairs(functools.partial(_remedies, graph, inputs, asked, estimate)):
        solution = api.plan(problem, cache=cache, solved=took.append)
    return Planned(graph, path, solution, inputs, took[0] if took else None, precomputed)


def say(line: str) -> None:
    """What a user should know while a run goes on."""
    typer.echo(line, err=True)


def cache_folder(off: bool) -> Path | None:
    """The folder for what is kept between commands: ``$XDG_CACHE_HOME/graphrun``, else ``~/.cache/graphrun``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return None if off else (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "graphrun"


def hardware_for(name: str | None, device: str | None, to_run: bool, cache: Path | None) -> Any:
    """The hardware named, a profile or a prior; else the simulated one for ``--device sim``, the card found, or a prior."""
    from graphrun.profile import hardware as devices
    from graphrun.profile import hardware_profiles as profiles

    if device not in (None, "cuda", "sim"):
        raise InputError(f"device {device!r} is not known; it is cuda or sim")
    chosen = profiles.hardware(name, cache) if name else devices.hardware("sim") if device == "sim" else None
    if chosen is not None and device not in (None, chosen.device):
        raise InputError(f"hardware {chosen.name} is a {chosen.device} device, and --device is {device}; leave one of them out")
    if chosen is None or (to_run and chosen.device == "cuda"):
        found = profiles.found(cache)
        if found is None and to_run:
            raise InputError("there is no CUDA device here to run on; add --device sim to run on the simulated accelerator")
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
        cut = graph.until(problem.until) if problem.until else graph
        precomputed = precomputed_for(
            cut, values, problem.hardware, cache, kind_of(cut, problem.precomputed), random_weights, problem.allow
        )
    return Planned(graph, source, planfile.solution_of(problem, candidate, saved), inputs, saved.get("solve_seconds"), precomputed)


def load(path: Path, asked: Asked) -> Any:
    """The graph in the file at ``path``, trusted and cut as ``asked``. Raises InputError for a plan (JSON)."""
    if path.suffix == ".json":
        raise InputError(f"{path} is a plan; name the graph (YAML) that it is of")
    graph = api.load(path, trust=asked.trust_package or ())
    return graph if asked.until is None else graph.until(asked.until)


def summary_of(made: Planned, trace: Any = None) -> dict[str, Any]:
    from graphrun.report.summary import summarize

    return summarize(made.solution, made.solve_seconds, trace)


def reused(reuse: str) -> Any:
    """``--reuse`` as it is meant. Raises InputError for anything else."""
    if reuse not in ("encoded", "all", "none"):
        raise InputError(f"--reuse {reuse!r} is not known; it is encoded, all or none")
    return reuse


def precomputed_for(
    graph: Graph, inputs: Mapping[str, Any], place: Any, cache: Path | None, reuse: str, random: bool, allow: Sequence[str]
) -> dict[str, Any]:
    """Outputs of stages that earlier runs kept for these inputs. ``random``: those of random weights."""
    if reused(reuse) == "none" or cache is None:
        return {}
    graph = graph.without_sources() if random else graph
    return api.precomputed(graph, inputs, hardware=place, cache=cache, what=reused(reuse), allow=allow)


def kind_of(graph: Graph, given: Sequence[str]) -> str:
    """The ``--reuse`` that finds outputs of the stages ``given``."""
    encoded = all(graph.stage(name).op == "encode_prompt" for name in given)
    return "none" if not given else "encoded" if encoded else "all"


def plan_screen_of(made: Planned) -> str:
    from graphrun.report.screen import plan_screen

    return plan_screen(made.solution, made.solve_seconds)


def show(summary: dict[str, Any], as_json: bool, screen: str) -> None:
    typer.echo(json.dumps(summary, indent=1) if as_json else screen)


def _remedies(graph: Any, inputs: Mapping[str, Any], asked: Asked, estimate: Any) -> tuple[Any, ...]:
    from graphrun.solve.remedies import remedies

    typer.echo("nothing fits; looking for what would help", err=True)
    return remedies(graph, inputs, asked.demands["allow"], estimate)


@contextlib.contextmanager
def _more_repairs(found: Callable[[], tuple[Any, ...]]) -> Iterator[None]:
    """An infeasible budget leaves with what other dry runs say would help, too."""
    try:
        yield
    except GraphrunError as error:
        repairs = getattr(error, "repairs", None)
        if repairs is not None:
            ranked = sorted((*repairs, *found()), key=lambda repair: (repair.changes_output, repair.seconds))
            error.repairs = tuple(ranked)  # type: ignore[attr-defined]
        raise


@contextlib.contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """The solver's native code may write to stdout past Python; what it writes goes to stderr, so that --json stays JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)

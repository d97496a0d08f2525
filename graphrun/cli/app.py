"""The command line: parses, calls, prints. The only place that prints, and the only one that knows a terminal.

Exit codes: 0 done, 2 bad input, 3 infeasible, 4 the run broke its plan.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import graphrun
from graphrun.errors import GraphrunError, InputError
from graphrun.options import Asked, DeviceName, HardwareName, NoCache, Outputs, Reuse, Sets, Trust, shared
from graphrun.report import plan_files as planfile

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


@app.callback()
def about(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    """Run diffusion pipelines on cards too small for them: plan ahead what lives where, prove it, then do exactly that.

    Exit codes: 0 done, 2 bad input, 3 infeasible, 4 the run broke its plan.
    """
    if version:
        typer.echo(f"graphrun {graphrun.__version__}")
        raise typer.Exit


@app.command()
@shared
def plan(
    graph: GraphFile,
    asked: Asked,
    out: Annotated[Path | None, typer.Option("-o", help="Save the plan to this file.", show_default=False)] = None,
    reuse: Reuse = "none",
    as_json: AsJson = False,
) -> None:
    """Plan a graph within a VRAM and a RAM budget, and show the plan. Needs no weights and no GPU."""
    made = _planned(graph, asked, reuse=reuse)
    summary = _summary(made)
    if out is not None:
        planfile.save(out, made.source, made.solution, summary)
    _show(summary, as_json, _plan_screen(made))


@app.command()
@shared
def run(
    graph: GraphFile,
    asked: Asked,
    prompt: Annotated[str | None, typer.Option(help="Short for --set prompt=...", show_default=False)] = None,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Random weights instead of the graph's source.")] = False,
    output: Outputs = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Save the plan to this file.", show_default=False)] = None,
    trace_file: Annotated[
        Path | None, typer.Option("--trace", help="Save the trace here; for a viewer: *.perfetto.json.", show_default=False)
    ] = None,
    inputs: Annotated[
        Path | None, typer.Option(help="Run for every line of this file: JSON lines or CSV.", show_default=False)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the run's state beside its output; the same command again goes on from there.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="A broken line of --inputs stops everything.")] = False,
    reuse: Reuse = "encoded",
    as_json: AsJson = False,
) -> None:
    """Run a graph, or a saved plan, and show what was planned beside what was measured; or run it for every line of a file."""
    from graphrun.cli import batches

    if prompt is not None:
        asked = replace(asked, set_=[*(asked.set_ or []), f"prompt={prompt}"])
    if inputs is not None or resume:
        if plan_file is not None or trace_file is not None:
            raise InputError("--plan and --trace are of one run; leave them out with --inputs and --resume")
        batches.run_with(batches.RunOptions(graph, random_weights, inputs, resume, strict, reuse, output, as_json), asked)
        return
    planfile.require_writable(plan_file, trace_file)
    place = batches.place_for(graph, asked, output)
    made = _planned(graph, asked, to_run=True, reuse=reuse, random_weights=random_weights)
    _run_once(made, asked, random_weights, reuse, (place, plan_file, trace_file), as_json)


def _run_once(
    made: Planned,
    asked: Asked,
    random_weights: bool,
    reuse: str,
    files: tuple[Any, Path | None, Path | None],
    as_json: bool,
) -> None:
    from graphrun.cli import batches
    from graphrun.report.perfetto import trace_json
    from graphrun.report.progress import Progress
    from graphrun.report.screen import measured_screen
    from graphrun.report.summary import broken_caps
    from graphrun.verify.simulate import simulate

    place, plan_file, trace_file = files
    if not as_json:
        typer.echo(_plan_screen(made))
    solution, say = made.solution, None if as_json else functools.partial(typer.echo, err=True)
    simulation = simulate(solution.problem, solution.plan)
    with Progress(solution.plan, simulation, say) as progress, batches.stopping(say) as stop:
        trace = graphrun.run(
            solution,
            made.graph,
            made.inputs,
            random_weights=random_weights,
            progress=stop.watched(progress),
            tell=_say,
            cache=_cache(asked.no_cache),
            precomputed=made.precomputed,
            reuse=batches.reused(reuse),
            note=_say,
        )
    summary = _summary(made, trace)
    if plan_file is not None:
        planfile.save(plan_file, made.source, made.solution, summary)
    if trace_file is not None:
        whole = planfile.content(trace_file, made.source, made.solution, summary)
        planfile.write_json(trace_file, trace_json(trace_file.name, trace, whole))
    written = batches.saved(trace.outputs, place, made.graph, made.inputs)
    _show(summary, as_json, measured_screen(made.solution, trace, [str(path) for path in written]))
    if broken_caps(made.solution, trace):
        raise typer.Exit(4)


@app.command()
@shared
def explain(
    graph: GraphFile,
    asked: Asked,
    component: Annotated[
        str | None, typer.Argument(help="Show what other placements of this one would cost.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show every slot of a plan: what it does, what it holds, and where its time goes. Or why a component is where it is."""
    from graphrun.report.screen import explain_screen

    made = _planned(graph, asked)
    if component is not None:
        data, screen = _alternatives(made, component)
        _show(data, as_json, screen)
    else:
        _show(_summary(made), as_json, explain_screen(made.solution))


@app.command()
def check(
    plan: Annotated[Path, typer.Argument(help="A plan saved with -o.", show_default=False)],
) -> None:
    """Check a saved plan against its own numbers: every rule that it breaks, with the place and the bytes."""
    from graphrun.report.screen import check_screen
    from graphrun.verify.simulate import simulate

    problem, candidate, _ = planfile.read(plan)
    planfile.refuse_violations(plan, problem, candidate)
    typer.echo(check_screen(problem, candidate, simulate(problem, candidate)))


@app.command()
def estimate(
    graph: OnlyGraph,
    hardware: HardwareName = None,
    device: DeviceName = None,
    set_: Sets = None,
    trust_package: Trust = None,
    as_json: AsJson = False,
    no_cache: NoCache = False,
) -> None:
    """Show what a graph takes, part by part, without a budget: weights, activations, values, FLOPs, seconds. No weights, no GPU."""
    from graphrun.report.estimate import estimate_screen

    asked = Asked(hardware=hardware, device=device, set_=set_, trust_package=trust_package)
    loaded, cache = load(graph, asked), _cache(no_cache)
    found = graphrun.survey(loaded, hardware=_hardware(hardware, device, False, cache), inputs=asked.inputs, cache=cache)
    _show(found, as_json, estimate_screen(found))


@app.command()
def schema() -> None:
    """Print the JSON Schema of graph files, for editors."""
    from graphrun.graph.schema import schema_text

    typer.echo(schema_text(), nl=False)


def main() -> NoReturn:
    """Entry point of the ``graphrun`` command. Errors that graphrun raises on purpose become one message and an exit code."""
    warnings.filterwarnings("ignore")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for library in ("DIFFUSERS", "TRANSFORMERS"):  # both configure their loggers anew when they are imported
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    from graphrun.cli import batches  # noqa: F401  (further commands of this app)
    from graphrun.cli import importing as command  # noqa: F401

    try:
        app()
    except GraphrunError as error:
        typer.echo(_error_text(error), err=True)
        if "--json" in sys.argv:
            _error_json(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
    sys.exit(0)


def _error_text(error: GraphrunError) -> str:
    from graphrun.solve.whatif.infeasible import Infeasible

    if isinstance(error, Infeasible):
        from graphrun.report.infeasible import infeasible_screen

        return infeasible_screen(error)
    return f"graphrun: {error}"


def _error_json(error: GraphrunError) -> None:
    """For ``--json`` an infeasible budget is an answer too: the screen goes to stderr, the data to stdout."""
    from graphrun.solve.whatif.infeasible import Infeasible

    if isinstance(error, Infeasible):
        from graphrun.report.infeasible import infeasible_json

        typer.echo(json.dumps(infeasible_json(error), indent=1))


def _planned(path: Path, asked: Asked, *, to_run: bool = False, reuse: str = "none", random_weights: bool = False) -> Planned:
    """The graph at ``path`` planned, or the plan there read. What can be refused early is: planning takes seconds.

    ``reuse``: which outputs of stages, where they are kept from earlier runs, are not planned.
    """
    from graphrun.cli import batches

    inputs, cache = asked.inputs, _cache(asked.no_cache)
    if path.suffix == ".json":
        asked.refuse_for_plan(path)
        return _read_plan(path, asked, cache, to_run, random_weights)
    graph = load(path, asked)
    if to_run:
        graph.resolve(inputs)
    if asked.vram is None:
        raise InputError("a graph needs a budget: add --vram, such as --vram 8G")
    place = _hardware(asked.hardware, asked.device, to_run, cache)
    if not to_run:  # nothing is compiled while planning; a second of the libraries' imports prepares for it
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    precomputed = batches.kept_for(graph, inputs, place, cache, reuse, random_weights, asked.allow or ())

    def estimate(inputs: Mapping[str, Any], allow: tuple[str, ...]) -> Any:
        demands = {**asked.demands, "allow": allow}
        return graphrun.estimate(
            graph, vram=asked.vram or "", hardware=place, inputs=inputs, cache=cache, precomputed=precomputed, **demands
        )

    problem, took = estimate(inputs, asked.demands["allow"]), list[float]()
    with _stdout_kept_clean(), _more_repairs(functools.partial(_remedies, graph, inputs, asked, estimate)):
        solution = graphrun.plan(problem, cache=cache, solved=took.append)
    return Planned(graph, path, solution, inputs, took[0] if took else None, precomputed)


def _say(line: str) -> None:
    """What a user should know while a run goes on."""
    typer.echo(line, err=True)


def _cache(off: bool) -> Path | None:
    """The folder for what is kept between commands: ``$XDG_CACHE_HOME/graphrun``, else ``~/.cache/graphrun``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return None if off else (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "graphrun"


def _hardware(name: str | None, device: str | None, to_run: bool, cache: Path | None) -> Any:
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
    from graphrun.cli import batches

    problem, candidate, saved = planfile.read(path)
    planfile.refuse_violations(path, problem, candidate)
    source, inputs = planfile.graph_path(path, saved), asked.inputs
    graph = load(source, asked)
    precomputed: dict[str, Any] = {}
    if to_run:
        values = graphrun.planned_inputs(problem, graph, inputs)
        cut = graph.until(problem.until) if problem.until else graph
        precomputed = batches.kept_for(
            cut, values, problem.hardware, cache, batches.kind_of(cut, problem.precomputed), random_weights, problem.allow
        )
    return Planned(graph, source, planfile.solution_of(problem, candidate, saved), inputs, saved.get("solve_seconds"), precomputed)


def load(path: Path, asked: Asked) -> Any:
    """The graph in the file at ``path``, trusted and cut as ``asked``."""
    graph = graphrun.load(path, trust=asked.trust_package or ())
    return graph if asked.until is None else graph.until(asked.until)


def _summary(made: Planned, trace: Any = None) -> dict[str, Any]:
    from graphrun.report.summary import summarize

    return summarize(made.solution, made.solve_seconds, trace)


def _alternatives(made: Planned, component: str) -> tuple[dict[str, Any], str]:
    from graphrun.report.alternatives import alternatives_json, alternatives_screen
    from graphrun.solve.whatif.alternatives import alternatives

    with _stdout_kept_clean():
        found = alternatives(made.solution, component)
    return alternatives_json(made.solution, component, found), alternatives_screen(made.solution, component, found)


def _plan_screen(made: Planned) -> str:
    from graphrun.report.screen import plan_screen

    return plan_screen(made.solution, made.solve_seconds)


def _show(summary: dict[str, Any], as_json: bool, screen: str) -> None:
    typer.echo(json.dumps(summary, indent=1) if as_json else screen)


def _remedies(graph: Any, inputs: Mapping[str, Any], asked: Asked, estimate: Any) -> tuple[Any, ...]:
    from graphrun.solve.whatif.remedies import remedies

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
def _stdout_kept_clean() -> Iterator[None]:
    """The solver's native code may write to stdout past Python; what it writes goes to stderr, so that --json stays JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)

"""Shared by the commands: the typer app, planning or reading a plan, the cache folder, the
hardware, printing."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from graphrun import api
from graphrun.cli.downloads import Told, asked_for
from graphrun.cli.options import Asked
from graphrun.cli.terminal import alive, coloured, width
from graphrun.errors import GraphrunError, InputError, Interrupted, PlanError, PlanningInterrupted
from graphrun.graph.shipped import shipped_graphs
from graphrun.reading import printable
from graphrun.report import plan_files as planfile
from graphrun.report.screen import Look
from graphrun.report.verdicts import made_by
from graphrun.systems import spills_vram
from graphrun.units import GIB, parse_size, roughly, show_size

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph
    from graphrun.model.problem import Problem
    from graphrun.model.solution import Solution
    from graphrun.modules.needs import Download


JSON_VERSION = 1


class _Commands(TyperGroup):
    """The commands. An interrupt that a command does not explain itself ends it with exit code 130
    too."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _graphs(typed: str) -> list[str]:
    """What the shell completes ``typed`` to: names of graphrun's own graphs, and files and
    folders."""
    files = [
        f"{path}{os.sep}" if os.path.isdir(path) else path
        for path in sorted(glob.glob(f"{glob.escape(typed)}*"))
    ]
    return [*(name for name in shipped_graphs() if name.startswith(typed)), *files]


GraphFile = Annotated[
    Path,
    typer.Argument(
        help="A graph (YAML), the name of one of graphrun's own, or a plan saved with -o (JSON).",
        show_default=False,
        autocompletion=_graphs,
    ),
]
OnlyGraph = Annotated[
    Path,
    typer.Argument(
        help="A graph (YAML), or the name of one of graphrun's own.",
        show_default=False,
        autocompletion=_graphs,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of the screen.")]


@dataclass(frozen=True, slots=True)
class Planned:
    """A graph with its solution.

    ``source`` is the graph's file, ``saved`` that of a plan that was read. ``solution`` is None
    until the graph is planned. ``solve_seconds`` is None where the plan was found in the cache, or
    read from a file without it. ``precomputed``: cached stage outputs by name, whose stages are not
    planned. ``downloads``: what a run of it takes from the hub and is not here. ``problem``: what
    was solved, None where a saved plan was read. ``advice``: `Repair`s that would make a slow plan
    faster. ``interrupted``: at what Ctrl-C stopped planning, empty where it did not.
    """

    graph: Graph
    source: Path
    solution: Any = None
    solve_seconds: float | None = None
    saved: Path | None = None
    precomputed: dict[str, Any] = field(default_factory=dict)
    downloads: list[Download] = field(default_factory=list)
    problem: Any = None
    advice: tuple[Any, ...] = ()
    interrupted: str = ""


def named(path: Path, asked: Asked, *, to_run: bool = False) -> Planned:
    """The graph at ``path``, or the saved plan there with its graph; a plan is checked and
    simulated. ``to_run``: what it may choose must be allowed by ``asked``, since a file allows
    nothing by itself."""
    if path.suffix != ".json":
        return Planned(load(path, asked), path)
    asked.refuse_for_plan(path, to_run=to_run)
    solution, saved = planfile.read_solution(path)
    source = planfile.graph_path(path, saved)
    graph, needed = load(source, asked), set(solution.problem.allow)
    if to_run and not needed <= set(graph.allowed(asked.allow or ())):
        flags = _allowing(solution.problem)
        what = f"was made with {flags}, which may change the output, and a plan file allows nothing by itself: add {flags}"
        raise PlanError(f"{what}, or plan again without", str(path))
    return Planned(graph, source, solution, saved.get("solve_seconds"), path)


def _allowing(problem: Problem) -> str:
    """The options that allow what ``problem`` may choose."""
    return shlex.join(word for name in problem.allow for word in ("--allow", name))


def planned(
    made: Planned,
    asked: Asked,
    reuse: str,
    *,
    to_run: bool = False,
    random_weights: bool = False,
    told: Told = None,
    advise: bool = False,
) -> Planned:
    """Plans the graph of ``made``, unless it has a plan. Bad input is refused first, since planning
    takes seconds.

    ``to_run``: the plan is about to be run, so inputs, device and sources are checked too; ``told``
    gets a line for each repository that something is to be downloaded from. ``reuse``: which cached
    stage outputs take the place of their stages (``encoded``, ``all``, ``none``); none where
    weights are missing, since outputs are cached by their content. ``advise``: whether to look for
    what would make a slow plan faster; then Ctrl-C leaves the best plan so far. Raises Interrupted
    where that is not asked for, or there is none.
    """
    graph, inputs, cache = made.graph, asked.inputs, cache_folder(asked.no_cache)

    def sources_of(of: Graph) -> list[Download]:
        return asked_for(of.without_sources() if random_weights else of, told) if to_run else []

    def cached(
        of: Graph, values: Mapping[str, Any], hardware: Any, what: Any, allow: Any
    ) -> dict[str, Any]:
        """The stage outputs that earlier runs cached for these inputs, by name."""
        if what == "none" or cache is None:
            return {}
        of = of.without_sources() if random_weights else of
        return api.precomputed(of, values, hardware=hardware, cache=cache, what=what, allow=allow)

    if made.solution is not None:
        if not to_run:
            return made
        from graphrun.profile import hardware as devices

        problem = made.solution.problem
        values = api.planned_inputs(problem, graph, inputs)
        graph = graph.until(problem.until)
        if problem.hardware.device == "cuda" and devices.found() is None:
            raise InputError(
                "no CUDA device found to run on, and the plan is for one; plan with --device sim to run it there"
            )
        downloads = sources_of(graph.with_precomputed(problem.precomputed))
        encoded = all(graph.stage(name).op == "encode_prompt" for name in problem.precomputed)
        what = "none" if not problem.precomputed else "encoded" if encoded else "all"
        return replace(
            made,
            precomputed=cached(graph, values, problem.hardware, what, problem.allow),
            downloads=downloads,
        )
    if to_run:
        graph.resolve(inputs)
    from graphrun.profile.several import per_device

    several = per_device(asked.vram, asked.hardware, asked.device)
    each = [hardware_for(of.hardware, of.device, to_run, cache) for of in several]
    hardware = each[0]
    asked = budgeted(asked, hardware)
    if downloads := sources_of(graph):
        reuse = "none"
    if not to_run:  # planning compiles nothing; without dynamo the libraries import a second faster
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    precomputed = cached(graph, inputs, hardware, reuse, asked.allow or ())
    arguments = {
        **asked.estimate_arguments,
        "vram": asked.vram,
        "hardware": each,
        "cache": cache,
        "precomputed": precomputed,
    }

    def estimate(inputs: Mapping[str, Any], allow: tuple[str, ...]) -> Any:
        return api.estimate(graph, **{**arguments, "inputs": inputs, "allow": allow})

    with alive(f"dry run of {graph.name}"):
        problem, seconds = estimate(inputs, arguments["allow"]), list[float]()
    with native_stdout_to_stderr(), alive(f"planning {graph.name}"):
        try:
            solution = api.plan(problem, cache=cache, solved=seconds.append)
        except PlanningInterrupted as interrupt:
            solution = _best_so_far(interrupt, graph.name, wanted=advise)
            return replace(
                made, solution=solution, problem=problem, interrupted=f"while planning {graph.name}"
            )
        except GraphrunError as error:
            from graphrun.solve.infeasible import Infeasible
            from graphrun.solve.remedies import remedies

            if isinstance(error, Infeasible):  # some repairs need further dry runs
                found = (*error.repairs, *remedies(graph, inputs, arguments["allow"], estimate))
                error.repairs = tuple(
                    sorted(found, key=lambda repair: (repair.changes_output, repair.seconds))
                )
            raise
    made = replace(
        made, solution=solution, solve_seconds=seconds[0] if seconds else None, problem=problem
    )
    if advise and solution.slow:
        from graphrun.files import Store
        from graphrun.solve.remedies import options_of
        from graphrun.store import advice_for

        store = Store(cache) if cache is not None else None
        with native_stdout_to_stderr(), alive(what := f"what would make {graph.name} faster"):
            try:
                found = advice_for(
                    problem,
                    solution,
                    lambda: options_of(graph, inputs, problem.allow, estimate),
                    store,
                )
            except KeyboardInterrupt:
                return replace(made, interrupted=f"while looking for {what}")
        made = replace(made, advice=found)
    return replace(made, precomputed=precomputed, downloads=downloads)


def _best_so_far(interrupt: PlanningInterrupted, name: str, *, wanted: bool) -> Solution:
    """The best plan for the graph ``name`` when planning was interrupted. Raises Interrupted where
    there is none, or it is not ``wanted``."""
    what = f"interrupted while planning {name}"
    if interrupt.infeasible:
        raise Interrupted(
            f"{what}: no plan fits the budgets, and what would help was being searched"
        ) from None
    solution: Solution | None = interrupt.best()
    if solution is None:
        raise Interrupted(f"{what}: there is no plan yet") from None
    if not wanted:
        from graphrun.report.screen import proof

        seconds = roughly(solution.simulation.seconds)
        raise Interrupted(
            f"{what}: the best plan so far takes {seconds}, {proof(solution)}; nothing was run"
        ) from None
    return solution


def echo(text: str, *, nl: bool = True, err: bool = False) -> None:
    """Prints ``text``, with characters that a terminal would act on as escapes: names in it may
    come from a file."""
    typer.echo(printable(text), nl=nl, err=err)


def budgeted(asked: Asked, hardware: Any) -> Asked:
    """``asked`` with a VRAM budget: without ``--vram``, or with ``--vram auto``, what the card here
    has free less a margin, else all of the one that is planned for. Warns of a budget that is more
    than that.

    Raises InputError for the simulated device, which has no memory of its own.
    """
    from graphrun.profile import hardware as devices

    given = asked.vram not in (None, "auto")
    if given and (asked.hardware is not None or hardware.device == "sim" or "," in str(asked.vram)):
        return asked
    if hardware.device == "sim":
        raise InputError(
            "the simulated device has no memory of its own: add --vram, such as --vram 8G"
        )
    free_bytes = devices.free_bytes() if asked.hardware is None else None
    nbytes = hardware.capacity_bytes if free_bytes is None else devices.budget_of(free_bytes)
    has = f"{show_size(nbytes)}, what the {hardware.name} has"
    if free_bytes is not None:
        has += f" free ({show_size(free_bytes)}) less a twentieth for other programs"
    if given:
        if (
            free_bytes is not None
            and parse_size(str(asked.vram), whole_bytes=hardware.capacity_bytes, name="vram")
            > nbytes
        ):
            beyond = (
                "there Windows spills into RAM and becomes slow"
                if spills_vram()
                else "there what is left is planned again"
            )
            say(f"--vram {asked.vram} is more than {has}: {beyond}; --vram auto is safe")
        return asked
    if free_bytes is None and asked.hardware is None:
        say(f"no CUDA device here: this is for an {hardware.name}; --hardware names another card")
    say(f"--vram auto: {has}")
    return replace(asked, vram=str(nbytes))


def look(made: Planned, asked: Asked, verbose: bool = False, out: Path | None = None) -> Look:
    """How the screen of ``made`` is shown, with the command that runs the plan: that saved at
    ``out``, or planned again."""
    from graphrun.profile import hardware as devices

    problem = made.solution.problem
    graph, saved = made.graph.until(problem.until), out or made.saved
    command = f"graphrun run {f'{saved} {_allowing(problem)}' if saved else f'{made.source} {asked.flags}'}".strip()
    missing = [
        name for name, of in graph.inputs.items() if of.required and name not in asked.inputs
    ]
    command += "".join(
        f' --set {name}="..."' if name != "prompt" else ' --prompt "..."' for name in missing
    )
    elsewhere = problem.hardware.device == "cuda" and devices.found() is None
    then = f"next{', on that card' if elsewhere else ''}: {command}"
    note = ""
    if (free := devices.free_beside_a_desktop(problem.hardware, problem.budget_bytes)) is not None:
        least, most = (f"{nbytes / GIB:g}" for nbytes in free)
        note = (
            f"a desktop leaves {least} to {most} GiB free; beyond it Windows spills into slow RAM"
        )
    return Look(width(), verbose, made_by(graph.kinds(), dict(problem.settings)), then, note)


def say(line: str) -> None:
    """Prints ``line`` to stderr as `echo` does, above a bar that is there: `typer.echo` would write
    to the stream behind the one that rich puts in its place."""
    sys.stderr.write(f"{printable(line)}\n")
    sys.stderr.flush()


def cache_folder(off: bool) -> Path | None:
    """The cache folder of the commands: ``$XDG_CACHE_HOME/graphrun``, else ``~/.cache/graphrun``;
    None if ``off``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (
        None
        if off
        else (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "graphrun"
    )


def hardware_for(name: str | None, device: str | None, to_run: bool, cache: Path | None) -> Any:
    """The hardware to plan for, or to run on if ``to_run``.

    It is the profile or prior called ``name``; else the simulated device for ``--device sim``, the
    card found, or the default prior. Raises InputError where options contradict each other, and for
    a run without a CUDA device.
    """
    from graphrun.profile import hardware as devices
    from graphrun.profile import hardware_profiles as profiles

    if device not in (None, "cuda", "sim"):
        raise InputError(f"device {device!r} is not known; it is cuda or sim")
    chosen = (
        profiles.hardware(name, cache)
        if name
        else devices.hardware("sim")
        if device == "sim"
        else None
    )
    if chosen is not None and device not in (None, chosen.device):
        raise InputError(
            f"hardware {chosen.name} is a {chosen.device} device, but --device is {device}; leave one of them out"
        )
    if chosen is None or (to_run and chosen.device == "cuda"):
        found = profiles.found(cache)
        if found is None and to_run:
            raise InputError(
                "no CUDA device found to run on; add --device sim to run on the simulated accelerator"
            )
        chosen = chosen or found or devices.hardware(devices.DEFAULT)
    return chosen


def load(path: Path, asked: Asked) -> Graph:
    """The graph in the file at ``path``, with the options ``--trust-package`` and ``--until``.
    Raises InputError for a plan."""
    if path.suffix == ".json":
        raise InputError(f"{path} is a plan; give the graph (YAML) that it was made from")
    return api.load(path, trust=asked.trust_package or (), source=asked.source).until(asked.until)


def checked_reuse(reuse: str) -> Any:
    """The value of ``--reuse``. Raises InputError for an unknown one."""
    if reuse not in ("encoded", "all", "none"):
        raise InputError(f"--reuse {reuse!r} is not known; it is encoded, all or none")
    return reuse


def show(summary: Any, as_json: bool, screen: str) -> None:
    """Prints ``summary`` as JSON, or ``screen``."""
    if as_json:
        echo(json_text(summary))
    else:
        coloured(screen)


def json_text(summary: Mapping[str, Any]) -> str:
    """What a command prints with ``--json``. docs/json.md has the keys; the version grows when one
    goes or means something else."""
    return json.dumps({"version": JSON_VERSION, **summary}, indent=1)


def write_or_print(text: str, out: Path | None) -> None:
    """Writes ``text`` to ``out`` and says so; None: prints it."""
    if out is None:
        echo(text, nl=False)
    else:
        planfile.write_text(out, text)
        echo(f"wrote {out}")


@contextlib.contextmanager
def native_stdout_to_stderr() -> Iterator[None]:
    """Redirects file descriptor 1 to stderr: the solver's native code may print, and stdout of
    --json must stay JSON."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)

"""Shared code of the commands: the typer app, planning, the cache folder, hardware, printing."""

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

from graphrun import api, devices
from graphrun.cli.downloads import Told, required_downloads
from graphrun.cli.options import PlanOptions, merge_options
from graphrun.cli.terminal import alive, print_coloured, width
from graphrun.errors import GraphrunError, InputError, Interrupted, PlanError, PlanningInterrupted
from graphrun.files import user_cache
from graphrun.garbage import collected_seldom
from graphrun.graph.shipped import shipped_graphs
from graphrun.reading import printable
from graphrun.report import plan_files as planfile
from graphrun.systems import spills_vram
from graphrun.units import GIB, parse_size, roughly, show_size

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph
    from graphrun.model.problem import Hardware, Problem
    from graphrun.model.solution import Solution
    from graphrun.modules.needs import Download
    from graphrun.report.screen import Look


JSON_VERSION = 1


class _Commands(TyperGroup):
    """The commands. An interrupt that a command does not handle ends it with exit code 130."""

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


def _graphs(prefix: str) -> list[str]:
    """Return the shell completions of ``prefix``: graphrun's own graphs, files and folders."""
    files = [
        f"{path}{os.sep}" if os.path.isdir(path) else path
        for path in sorted(glob.glob(f"{glob.escape(prefix)}*"))
    ]
    return [*(name for name in shipped_graphs() if name.startswith(prefix)), *files]


GraphFile = Annotated[
    Path,
    typer.Argument(
        help="Graph file, name of a graph (graphrun list), or plan saved with -o.",
        show_default=False,
        autocompletion=_graphs,
    ),
]
OnlyGraph = Annotated[
    Path,
    typer.Argument(
        help="Graph file, or name of a graph (graphrun list).",
        show_default=False,
        autocompletion=_graphs,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON (docs/json.md).")]


@dataclass(frozen=True, slots=True)
class Planned:
    """A graph with its solution.

    ``source``: the graph's file. ``plan_file``: the file of a plan that was read. ``solution``:
    None until the graph is planned. ``solve_seconds``: None if the plan came from the cache, or
    from a file without this number. ``precomputed``: cached stage outputs by name; their stages are
    not planned. ``downloads``: files from the hub that a run needs and that are missing here.
    ``problem``: the solved problem; None if a saved plan was read. ``suggestions``: that would make
    a slow plan faster. ``interrupted``: the step at which Ctrl-C stopped planning; "": none.
    ``gain``: what secondary devices save, as text.
    """

    graph: Graph
    source: Path
    solution: Any = None
    solve_seconds: float | None = None
    plan_file: Path | None = None
    precomputed: dict[str, Any] = field(default_factory=dict)
    downloads: list[Download] = field(default_factory=list)
    problem: Any = None
    suggestions: tuple[Any, ...] = ()
    interrupted: str = ""
    gain: str = ""


def open_graph(path: Path, options: PlanOptions, *, to_run: bool = False) -> Planned:
    """Return the graph at ``path``, or the saved plan, checked and simulated, with its graph.

    ``to_run``: ``options`` must allow what the plan may choose, since a file allows nothing by
    itself.
    """
    if path.suffix != ".json":
        return Planned(load(path, options), path)
    options.refuse_for_plan(path, to_run=to_run)
    solution, entries = planfile.read_solution(path)
    source = planfile.graph_path(path, entries)
    graph = _loaded(source, options).in_dtypes(dict(solution.problem.dtypes))
    graph, permissions = graph.until(options.until), set(solution.problem.allow)
    if to_run and not permissions <= set(graph.allowed(options.allow or ())):
        flags = _allowing(solution.problem)
        problem_text = (
            f"was made with {flags}, which may change the output, and a plan file allows "
            f"nothing by itself; add {flags}"
        )
        raise PlanError(f"{problem_text}, or plan again without", str(path))
    return Planned(graph, source, solution, entries.get("solve_seconds"), path)


def _allowing(problem: Problem) -> str:
    """Return the options that allow what ``problem`` may choose."""
    return shlex.join(word for name in problem.allow for word in ("--allow", name))


def plan_graph(
    graph_plan: Planned,
    options: PlanOptions,
    reuse: str,
    *,
    to_run: bool = False,
    random_weights: bool = False,
    notify: Told = None,
    advise: bool = False,
    thorough: bool = False,
) -> Planned:
    """Plan the graph of ``graph_plan``, unless it has a plan.

    Bad input is refused first, since planning takes seconds. ``to_run``: the plan is about to be
    run, so inputs, device and sources are checked too. ``notify`` gets a line for each repository
    to download from.

    ``reuse``: which cached stage outputs replace their stages (``encoded``, ``all``, ``none``). If
    weights are missing it is ``none``, since outputs are cached by the content of the weights.
    ``advise``: search for suggestions for a slow plan; Ctrl-C then returns the best plan so far.
    ``thorough``: search for suggestions without a limit, with dry runs. Raises Interrupted if
    ``advise`` is false, or there is no plan yet.
    """
    if thorough:
        from graphrun.solve.suggestions import thorough as thorough_search

        with thorough_search():
            return plan_graph(
                graph_plan,
                options,
                reuse,
                to_run=to_run,
                random_weights=random_weights,
                notify=notify,
                advise=advise,
            )
    from graphrun.profile import hardware as estimates

    graph, inputs, cache = graph_plan.graph, options.inputs, cache_folder(options.no_cache)

    def missing_sources(graph_version: Graph, solution: Solution | None = None) -> list[Download]:
        """The files to download: for the precisions of ``solution``, else for the first ones."""
        if not to_run:
            return []
        return required_downloads(
            graph_version.without_sources() if random_weights else graph_version,
            notify,
            precisions_of(solution) if solution is not None else None,
        )

    def cached_outputs(
        pipeline_graph: Graph, values: Mapping[str, Any], hardware: Any, reuse_mode: Any, allow: Any
    ) -> dict[str, Any]:
        """The stage outputs that earlier runs cached for these inputs, by name."""
        if reuse_mode == "none" or cache is None:
            return {}
        pipeline_graph = pipeline_graph.without_sources() if random_weights else pipeline_graph
        return api.precomputed(
            pipeline_graph, values, hardware=hardware, cache=cache, reuse=reuse_mode, allow=allow
        )

    if graph_plan.solution is not None:
        if not to_run:
            return graph_plan
        problem = graph_plan.solution.problem
        values = api.planned_inputs(problem, graph, inputs)
        graph = graph.until(problem.until)
        if not estimates.is_present(problem.hardware):
            raise InputError(
                f"no {problem.hardware.kind.label} found to run on, and the plan is for one; plan "
                "with --device sim to run it there"
            )
        downloads = missing_sources(
            graph.with_precomputed(problem.precomputed), graph_plan.solution
        )
        encoded = all(graph.stage(name).op == "encode_prompt" for name in problem.precomputed)
        reuse_mode = "none" if not problem.precomputed else "encoded" if encoded else "all"
        return replace(
            graph_plan,
            precomputed=cached_outputs(graph, values, problem.hardware, reuse_mode, problem.allow),
            downloads=downloads,
        )
    if to_run:
        graph.resolve(inputs)
    hardware, *_ = cards = cards_for(options, cache, to_run=to_run)
    options = with_budget(options, hardware)
    # the files are known before planning, unless a plan may choose checkpoints
    chooses_files = chooses_checkpoints(graph, options)
    downloads = [] if chooses_files else missing_sources(graph)
    if downloads or (chooses_files and to_run):
        reuse = "none"
    # planning compiles nothing; without dynamo the libraries import a second faster
    if not to_run:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    precomputed = cached_outputs(graph, inputs, hardware, reuse, options.allow or ())
    arguments = {
        **options.estimate_arguments,
        "vram": options.vram,
        "hardware": cards,
        "cache": cache,
        "precomputed": precomputed,
    }

    def estimate(inputs: Mapping[str, Any], allow: tuple[str, ...]) -> Any:
        return api.estimate(graph, **{**arguments, "inputs": inputs, "allow": allow})

    with alive(f"dry run of {graph.name}"):
        problem, seconds = estimate(inputs, arguments["allow"]), list[float]()
    with solving(), alive(f"planning {graph.name}"):
        try:
            solution = api.plan(problem, cache=cache, on_solved=seconds.append)
        except PlanningInterrupted as interrupt:
            solution = _best_so_far(interrupt, graph.name, is_accepted=advise)
            return replace(
                graph_plan,
                solution=solution,
                problem=problem,
                interrupted=f"while planning {graph.name}",
            )
        except GraphrunError as error:
            from graphrun.solve.infeasible import Infeasible
            from graphrun.solve.suggestions import (
                best_first,
                is_thorough,
                leading,
                setting_suggestions,
            )

            # other suggestions need further dry runs, which take longer than a plan
            if isinstance(error, Infeasible) and (
                is_thorough() or leading(error.suggestions, error.capacity_bytes) is None
            ):
                settings = setting_suggestions(graph, inputs, arguments["allow"], estimate)
                error.suggestions = best_first((*error.suggestions, *settings))
            raise
    if chooses_files:
        downloads = missing_sources(graph, solution)
    graph_plan = replace(
        graph_plan,
        solution=solution,
        solve_seconds=seconds[0] if seconds else None,
        problem=problem,
    )
    if advise and problem.secondaries:
        from graphrun.disk_store import Store
        from graphrun.report.verdicts import gain_text
        from graphrun.store import fitting_for

        budget = str(options.vram).partition(",")[0]
        with solving(), alive(f"planning {graph.name} for {hardware.name} alone"):
            single_problem = api.estimate(
                graph,
                **{**arguments, "vram": budget, "hardware": hardware, "inputs": inputs},
            )
            single = fitting_for(single_problem, Store(cache) if cache is not None else None)
        seconds_alone = None if single is None else single.seconds
        graph_plan = replace(graph_plan, gain=gain_text(solution, seconds_alone))
    if advise and solution.slow:
        from graphrun.disk_store import Store
        from graphrun.solve.suggestions import options_of
        from graphrun.store import suggestions_for

        store = Store(cache) if cache is not None else None
        with solving(), alive(activity := f"what would make {graph.name} faster"):
            try:
                suggestions = suggestions_for(
                    problem,
                    solution,
                    lambda: options_of(graph, inputs, problem.allow, estimate),
                    store,
                )
            except KeyboardInterrupt:
                return replace(graph_plan, interrupted=f"while looking for {activity}")
        graph_plan = replace(graph_plan, suggestions=suggestions)
    return replace(graph_plan, precomputed=precomputed, downloads=downloads)


def _best_so_far(interrupt: PlanningInterrupted, name: str, *, is_accepted: bool) -> Solution:
    """Return the best plan for the graph ``name`` when planning was interrupted. Raises Interrupted
    if there is none yet, or ``is_accepted`` is false."""
    activity = f"interrupted while planning {name}"
    if interrupt.infeasible:
        raise Interrupted(
            f"{activity}: no plan fits the budgets; the search for suggestions did not end"
        ) from None
    solution: Solution | None = interrupt.best()
    if solution is None:
        raise Interrupted(f"{activity}: there is no plan yet") from None
    if not is_accepted:
        from graphrun.report.screen import proof

        seconds = roughly(solution.simulation.seconds)
        raise Interrupted(
            f"{activity}: the best plan so far takes {seconds}, {proof(solution)}; nothing was run"
        ) from None
    return solution


def echo(text: str, *, nl: bool = True, err: bool = False) -> None:
    """Print ``text`` with control characters escaped: names in it may come from a file."""
    typer.echo(printable(text), nl=nl, err=err)


def with_budget(options: PlanOptions, hardware: Hardware) -> PlanOptions:
    """Return ``options`` with a budget for ``hardware``, the main device.

    Without one, or with ``auto``, it is the free memory of this machine's card or, on a CPU, of
    this machine, less a margin. For other hardware it is the whole capacity. A larger budget gets a
    warning.

    Raises InputError for a budget that the hardware does not have, and for the simulated device,
    which has no memory of its own.
    """
    from graphrun.profile import hardware as estimates

    devices.refuse_wrong_budgets(hardware, options)
    if hardware.unified:
        return _with_memory(options, hardware)
    has_budget = options.vram not in (None, "auto")
    if has_budget and (
        options.hardware is not None
        or hardware.kind.free_memory == "none"
        or "," in str(options.vram)
    ):
        return options
    if hardware.kind.free_memory == "none":
        raise InputError(
            "the simulated device has no memory of its own: add --vram, such as --vram 8G"
        )
    free_bytes = estimates.free_bytes(hardware.kind) if options.hardware is None else None
    nbytes = hardware.capacity_bytes if free_bytes is None else estimates.budget_of(free_bytes)
    budget_text = f"{show_size(nbytes)}, what the {hardware.name} has"
    if free_bytes is not None:
        budget_text += f" free ({show_size(free_bytes)}) less 5 % for other programs"
    if has_budget:
        if (
            free_bytes is not None
            and parse_size(str(options.vram), whole_bytes=hardware.capacity_bytes, name="vram")
            > nbytes
        ):
            consequence = (
                "a run that takes more becomes slow on Windows"
                if spills_vram()
                else "a run that finds less memory is planned again"
            )
            say(
                f"--vram {options.vram} is more than {budget_text}: {consequence}; "
                "--vram auto is safe"
            )
        return options
    if free_bytes is None and options.hardware is None:
        say(
            f"no {hardware.kind.label} here: this is for an {hardware.name}; --hardware names "
            "another card"
        )
    say(f"--vram auto: {budget_text}")
    return replace(options, vram=str(nbytes))


def _with_memory(options: PlanOptions, hardware: Hardware) -> PlanOptions:
    from graphrun.profile.hardware import is_present

    nbytes = devices.memory_budget(options.memory, hardware)
    if not is_present(hardware):
        if options.memory in (None, "auto"):
            whole = show_size(hardware.capacity_bytes)
            say(
                f"--memory auto: {show_size(nbytes)}, the {whole} of {hardware.name} less "
                "5 % for other programs"
            )
    elif options.memory in (None, "auto"):
        say(
            f"--memory auto: {show_size(nbytes)}, what this process takes and what this machine "
            "has left, less 5 % for other programs"
        )
    elif nbytes > (safe_bytes := devices.memory_budget("auto", hardware)):
        say(
            f"--memory {options.memory} is more than {show_size(safe_bytes)}, what this machine "
            "has left less 5 % for other programs: the system may swap or end the run; "
            "--memory auto is safe"
        )
    return replace(options, memory=str(nbytes))


def look(
    graph_plan: Planned,
    options: PlanOptions,
    verbose: bool = False,
    output_file: Path | None = None,
    reuse: str = "none",
) -> Look:
    """Return how the screen of ``graph_plan`` is shown, with the command that runs the plan.

    The command runs the plan file, which is ``output_file`` if the plan is saved there. Without a
    plan file, it plans again with the given options and ``reuse``. For a slow plan, the command
    that plans its best suggestion comes first.
    """
    from graphrun.profile import hardware as estimates
    from graphrun.report.screen import Look
    from graphrun.report.verdicts import product_name

    problem = graph_plan.solution.problem
    graph, plan_file = graph_plan.graph.until(problem.until), output_file or graph_plan.plan_file
    arguments = [f"{graph_plan.source}", options.flags]
    if plan_file:
        fixed_names = dict(problem.settings)
        inputs = [text for text in options.set_ or [] if text.partition("=")[0] not in fixed_names]
        flags = replace(options, set_=inputs or None).flags_with_plan
        arguments = [str(plan_file), _allowing(problem), flags]
    arguments += [f"--reuse {reuse}"] if reuse not in ("none", "encoded") else []
    command = " ".join(("graphrun run", *filter(None, arguments)))
    missing_inputs = [
        name
        for name, graph_input in graph.inputs.items()
        if graph_input.required and name not in options.inputs
    ]
    command += "".join(
        f' --set {name}="..."' if name != "prompt" else ' --prompt "..."' for name in missing_inputs
    )
    is_other_machine = not estimates.is_present(problem.hardware)
    place = "machine" if problem.hardware.unified else "card"
    next_command = f"next{f', on that {place}' if is_other_machine else ''}: {command}"
    note = ""
    if (
        free_range := estimates.free_range_with_desktop(problem.hardware, problem.budget_bytes)
    ) is not None:
        minimum, maximum = (f"{nbytes / GIB:g}" for nbytes in free_range)
        note = (
            f"a desktop leaves {minimum} to {maximum} GiB free; a run that takes more is slow on "
            "Windows"
        )
    product = product_name(graph.kinds(), dict(problem.settings))
    suggestion_text, suggestion_command = "", ""
    if graph_plan.suggestions:
        from graphrun.report.whatif_screens import options_text, suggestion_sentence
        from graphrun.solve.suggestions import leading

        capacity_bytes = problem.hardware.capacity_bytes
        if (suggestion := leading(graph_plan.suggestions, capacity_bytes)) is not None:
            words = ["plan", str(graph_plan.source), *shlex.split(options.flags)]
            change = options_text(suggestion, capacity_bytes).split()
            suggestion_text = suggestion_sentence(suggestion, product)
            suggestion_command = f"graphrun {merge_options(words, change)}"
    files = checkpoint_lines(graph, precisions_of(graph_plan.solution))
    return Look(
        width(),
        verbose,
        product,
        next_command,
        note,
        suggestion_text,
        suggestion_command,
        files,
        graph_plan.gain,
    )


def chooses_checkpoints(graph: Graph, options: PlanOptions) -> bool:
    """Return whether a plan of ``graph`` may choose among published checkpoints."""
    allow = graph.allowed(options.allow or ())
    return any(
        checkpoint.format in allow
        for component in graph.components.values()
        for checkpoint in component.checkpoints
    )


def precisions_of(solution: Solution) -> dict[str, str]:
    """Return the precision of each component in the plan ``solution``."""
    return {
        component.name: component.variants[0].precision for component in solution.chosen.components
    }


def checkpoint_lines(graph: Graph, precisions: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line for each component that a plan reads from a published checkpoint.
    ``precisions``: of each component. Bytes are as the checkpoint's page states them."""
    lines = []
    for name, precision in precisions.items():
        if (checkpoint := graph.components[name].checkpoint(precision)) is not None:
            size = f", {show_size(checkpoint.nbytes)}" if checkpoint.nbytes else ""
            licence = f"; {checkpoint.license}" if checkpoint.license else ""
            lines.append(f"{name} in {precision} from {checkpoint.source}{size}{licence}")
    return tuple(lines)


def say(line: str) -> None:
    """Print ``line`` to stderr as `echo` does, above a progress bar. `typer.echo` would write to
    the stream behind the stream that rich puts in its place."""
    sys.stderr.write(f"{printable(line)}\n")
    sys.stderr.flush()


def cache_folder(is_off: bool) -> Path | None:
    """Return the cache folder (`graphrun.files.user_cache`); None if ``is_off``."""
    return None if is_off else user_cache(os.environ)


def cards_for(options: PlanOptions, cache: Path | None, *, to_run: bool = False) -> list[Hardware]:
    """Return the hardware of each device that ``options`` name, the main device first."""
    return devices.cards_for(
        options.vram, options.memory, options.hardware, options.device, cache, to_run=to_run
    )


def load(path: Path, options: PlanOptions) -> Graph:
    """Load the graph at ``path`` with the options that change graphs, such as ``--until``. Raises
    InputError for a plan."""
    if path.suffix == ".json":
        raise InputError(f"{path} is a plan; give the graph (YAML) that it was made from")
    hardware = cards_for(options, cache_folder(options.no_cache))[0]
    graph = devices.in_dtype(_loaded(path, options), options.dtype, hardware)
    if options.dtype is None and graph.dtypes:
        slow_dtypes = " and ".join(slow_dtype for slow_dtype, _ in graph.dtypes)
        say(f"float32 in place of {slow_dtypes}, which is slower here; --dtype graph keeps it")
    return graph.until(options.until)


def _loaded(path: Path, options: PlanOptions) -> Graph:
    return api.load(path, trust=options.trust_package or (), source=options.source)


def parse_reuse(reuse: str) -> Any:
    """Return the value of ``--reuse``. Raises InputError for an unknown value."""
    if reuse not in ("encoded", "all", "none"):
        raise InputError(f"--reuse {reuse!r} is not known; it is encoded, all or none")
    return reuse


def show(summary: Any, as_json: bool, screen: str) -> None:
    """Print ``summary`` as JSON, or ``screen``."""
    if as_json:
        echo(json_text(summary))
    else:
        print_coloured(screen)


def json_text(summary: Mapping[str, Any]) -> str:
    """Return the text of ``--json`` (keys: docs/json.md). The version grows when a key is removed
    or changes its meaning."""
    return json.dumps({"version": JSON_VERSION, **summary}, indent=1)


def write_or_print(text: str, output_file: Path | None) -> None:
    """Write ``text`` to ``output_file`` and print its name; print ``text`` if it is None."""
    if output_file is None:
        echo(text, nl=False)
    else:
        planfile.write_text(output_file, text)
        echo(f"wrote {output_file}")


@contextlib.contextmanager
def native_stdout_to_stderr() -> Iterator[None]:
    """Redirect file descriptor 1 to stderr: the solver's native code may print, and stdout of
    --json must stay JSON."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


@contextlib.contextmanager
def solving() -> Iterator[None]:
    """Context of the solver: what its native code prints goes to stderr, and garbage is collected
    seldom."""
    with collected_seldom(), native_stdout_to_stderr():
        yield

"""From a graph or a saved plan to a plan: files and cached outputs, solving, suggestions."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrun import api
from graphrun.cli.common import (
    cache_folder,
    cards_for,
    load,
    load_as_typed,
    prepare_to_plan,
    solving,
    system_bytes,
    with_budget,
)
from graphrun.cli.downloads import Told, required_downloads
from graphrun.cli.options import PlanOptions, merge_options
from graphrun.cli.terminal import alive, width
from graphrun.disk_store import store_in
from graphrun.errors import GraphrunError, InputError, Interrupted, PlanError, PlanningInterrupted
from graphrun.graph.precisions import PLANNED_ONLY, planned_only_reason
from graphrun.graph.values import listed_names
from graphrun.report import plan_files as planfile
from graphrun.units import GIB, roughly, show_size

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph
    from graphrun.model.hardware import Hardware
    from graphrun.model.problem import Problem
    from graphrun.model.solution import Solution
    from graphrun.modules.needs import Download
    from graphrun.profile.quantizing import QuantizingCost
    from graphrun.report.screen import Look


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
    graph = load_as_typed(source, options).without(solution.problem.absent)
    graph = graph.in_dtypes(dict(solution.problem.dtypes))
    graph, permissions = graph.until(options.until), set(solution.problem.allow)
    if to_run and not permissions <= set(graph.allowed(options.allow or ())):
        flags = _allowing(solution.problem)
        raise PlanError(
            f"was made with {flags}, which may change the output, and a plan file allows "
            f"nothing by itself; add {flags}, or plan again without",
            str(path),
        )
    return Planned(graph, source, solution, entries.get("solve_seconds"), path)


def _allowing(problem: Problem) -> str:
    """Return the options that allow what ``problem`` may choose."""
    return shlex.join(word for name in problem.allow for word in ("--allow", name))


@dataclass(frozen=True, slots=True)
class GraphPlanner:
    """Plans graphs with the ``options`` of a command.

    ``reuse``: which cached stage outputs replace their stages (``encoded``, ``all``, ``none``).
    ``to_run``: the plan is about to be run, so inputs, device and sources are checked too; with
    ``random_weights`` no sources. ``notify`` gets a line for each repository to download from.
    ``advise``: search for suggestions for a slow plan; Ctrl-C then returns the best plan so far.
    """

    options: PlanOptions
    reuse: str = "none"
    to_run: bool = False
    random_weights: bool = False
    notify: Told = None
    advise: bool = False

    def plan(self, graph_plan: Planned) -> Planned:
        """Plan the graph of ``graph_plan``, unless it has a plan.

        Bad input is refused first, since planning takes seconds. Raises Interrupted if ``advise``
        is false, or there is no plan yet.
        """
        if graph_plan.solution is not None:
            return self._with_files(graph_plan) if self.to_run else graph_plan
        graph, inputs = graph_plan.graph, self.options.inputs
        if self.to_run:
            graph.resolve(inputs)
        cards = cards_for(self.options, self._cache, to_run=self.to_run)
        options = with_budget(self.options, cards[0])
        # the files are known before planning, unless a plan may choose checkpoints
        chooses_files = chooses_checkpoints(graph, options)
        downloads = [] if chooses_files else self._missing(graph)
        # outputs are cached by the content of the weights
        reuse = "none" if downloads or (chooses_files and self.to_run) else self.reuse
        if not self.to_run:
            prepare_to_plan()
        precomputed = self._cached(graph, inputs, cards[0], reuse, options.allow or ())
        arguments = {
            **options.estimate_arguments,
            "hardware": cards,
            "inputs": inputs,
            "precomputed": precomputed,
            "cache": self._cache,
        }
        graph_plan = self._solved(graph_plan, arguments)
        if self.to_run:
            _refuse_planned_only(graph_plan.solution)
        if chooses_files:
            downloads = self._missing(graph, graph_plan.solution)
        if self.advise and not graph_plan.interrupted:
            graph_plan = self._advised(graph_plan, arguments)
        return replace(graph_plan, precomputed=precomputed, downloads=downloads)

    def _with_files(self, graph_plan: Planned) -> Planned:
        """Return a saved plan with the cached outputs and the downloads that its run needs."""
        from graphrun.profile.hardware import is_present

        problem, graph = graph_plan.solution.problem, graph_plan.graph
        _refuse_planned_only(graph_plan.solution)
        values = api.planned_inputs(problem, graph, self.options.inputs)
        graph = graph.until(problem.until)
        if not is_present(problem.hardware):
            raise InputError(
                f"no {problem.hardware.kind.label} found to run on, and the plan is for one: "
                "graphrun doctor shows why; to simulate it, plan with --device sim"
            )
        shorter_graph = graph.with_precomputed(problem.precomputed)
        downloads = self._missing(shorter_graph, graph_plan.solution)
        encoded = all(graph.stage(name).op == "encode_prompt" for name in problem.precomputed)
        reuse = "none" if not problem.precomputed else "encoded" if encoded else "all"
        precomputed = self._cached(graph, values, problem.hardware, reuse, problem.allow)
        return replace(graph_plan, precomputed=precomputed, downloads=downloads)

    @property
    def _cache(self) -> Path | None:
        return cache_folder(self.options.no_cache)

    def _missing(self, graph: Graph, solution: Solution | None = None) -> list[Download]:
        """Return the files to download: for the precisions of ``solution``, else for the first
        ones."""
        if not self.to_run:
            return []
        precisions = precisions_of(solution) if solution is not None else None
        return required_downloads(self._weighted(graph), self.notify, precisions)

    def _cached(
        self, graph: Graph, values: Mapping[str, Any], hardware: Hardware, reuse: Any, allow: Any
    ) -> dict[str, Any]:
        """Return the stage outputs that earlier runs cached for ``values``, by name."""
        cache = self._cache
        if reuse == "none" or cache is None:
            return {}
        return api.precomputed(
            self._weighted(graph), values, hardware=hardware, cache=cache, reuse=reuse, allow=allow
        )

    def _weighted(self, graph: Graph) -> Graph:
        return graph.without_sources() if self.random_weights else graph

    def _solved(self, graph_plan: Planned, arguments: Mapping[str, Any]) -> Planned:
        """Plan with the ``arguments`` of `graphrun.estimate`. If nothing fits, the error gets
        suggestions that need further dry runs."""
        graph, seconds, interrupted = graph_plan.graph, list[float](), ""
        with alive(f"dry run of {graph.name}"):
            problem = api.estimate(graph, **arguments)
        with solving(), alive(activity := f"planning {graph.name}"):
            try:
                solution = api.plan(problem, cache=self._cache, on_solved=seconds.append)
            except PlanningInterrupted as interrupt:
                solution = _best_so_far(interrupt, graph.name, is_accepted=self.advise)
                interrupted = f"while {activity}"
            except GraphrunError as error:
                _add_settings(error, graph, arguments)
                self._add_own_dtype(error, graph_plan, arguments)
                raise
        return replace(
            graph_plan,
            solution=solution,
            solve_seconds=seconds[0] if seconds else None,
            problem=problem,
            interrupted=interrupted,
        )

    def _add_own_dtype(
        self, error: GraphrunError, graph_plan: Planned, arguments: Mapping[str, Any]
    ) -> None:
        """Add the graph's own dtype to the suggestions of an `Infeasible` error, if it fits and the
        command computes in another one, which is faster on this CPU but takes twice the memory."""
        from graphrun.solve.infeasible import Infeasible
        from graphrun.solve.suggestions import Suggestion, best_first, seconds_or_none

        graph, options = graph_plan.graph, self.options
        if not isinstance(error, Infeasible) or options.dtype is not None or not graph.dtypes:
            return
        own_graph = load_as_typed(graph_plan.source, options).until(options.until)
        seconds = seconds_or_none(lambda: api.estimate(own_graph, **arguments))
        if seconds is not None:
            text = f"compute in {' and '.join(name for name, _ in graph.dtypes)}, as the graph says"
            suggestion = Suggestion(text, (("--dtype", "graph"),), seconds, changes_output=True)
            error.suggestions = best_first((*error.suggestions, suggestion))

    def _advised(self, graph_plan: Planned, arguments: Mapping[str, Any]) -> Planned:
        """Add what secondary devices save, and the suggestions for a slow plan."""
        from graphrun.report.verdicts import divided_text, gain_text
        from graphrun.sequence import divided_run
        from graphrun.store import fitting_for, suggestions_for

        graph, problem, solution = graph_plan.graph, graph_plan.problem, graph_plan.solution
        store = store_in(self._cache)
        if problem.secondaries:
            single = {
                "vram": arguments["vram"].partition(",")[0],
                "hardware": arguments["hardware"][0],
            }
            with solving(), alive(f"planning {graph.name} for {single['hardware'].name} alone"):
                alternative = fitting_for(api.estimate(graph, **{**arguments, **single}), store)
            seconds = None if alternative is None else alternative.seconds
            may_split = "split" in graph.permissions and "split" not in problem.allow
            gain = gain_text(solution, seconds, may_split=may_split)
            with solving(), alive(f"planning {graph.name} with its sequence divided"):
                divided = divided_run(graph, problem, arguments, store)
            if divided is not None:
                gain += f". {divided_text(divided)}"
            graph_plan = replace(graph_plan, gain=gain)
        if not solution.slow:
            return graph_plan
        from graphrun.solve.suggestions import options_of

        estimate = _estimate_function(graph, arguments)
        options = partial(options_of, graph, arguments["inputs"], problem.allow, estimate)
        with solving(), alive(activity := f"what would make {graph.name} faster"):
            try:
                suggestions = suggestions_for(problem, solution, options, store)
            except KeyboardInterrupt:
                return replace(graph_plan, interrupted=f"while looking for {activity}")
        return replace(graph_plan, suggestions=suggestions)


def _estimate_function(graph: Graph, arguments: Mapping[str, Any]) -> Any:
    """Return `graphrun.solve.suggestions.EstimateFunction` for ``graph``."""
    return lambda inputs, allow: api.estimate(
        graph, **{**arguments, "inputs": inputs, "allow": allow}
    )


def _add_settings(error: GraphrunError, graph: Graph, arguments: Mapping[str, Any]) -> None:
    """Add suggestions that need further dry runs to an `Infeasible` error, if it has none that can
    be typed. The dry runs take longer than a plan."""
    from graphrun.solve.infeasible import Infeasible
    from graphrun.solve.suggestions import best_first, is_thorough, leading, setting_suggestions

    if isinstance(error, Infeasible) and (
        is_thorough() or leading(error.suggestions, error.capacity_bytes) is None
    ):
        settings = setting_suggestions(
            graph, arguments["inputs"], arguments["allow"], _estimate_function(graph, arguments)
        )
        error.suggestions = best_first((*error.suggestions, *settings))


def _best_so_far(interrupt: PlanningInterrupted, name: str, *, is_accepted: bool) -> Solution:
    """Return the best plan for the graph ``name`` when planning was interrupted. Raises Interrupted
    if there is none yet, or ``is_accepted`` is false."""
    solution: Solution | None = None if interrupt.infeasible else interrupt.best()
    if solution is not None and is_accepted:
        return solution
    if interrupt.infeasible:
        state = "no plan fits the budgets; the search for suggestions did not end"
    elif solution is None:
        state = "there is no plan yet"
    else:
        from graphrun.report.screen import proof

        seconds = roughly(solution.simulation.seconds)
        state = (
            f"the best plan so far takes {seconds}, {proof(solution)}; nothing was run. "
            f"graphrun plan {name} -o FILE saves such a plan"
        )
    raise Interrupted(f"interrupted while planning {name}: {state}") from None


def look(
    graph_plan: Planned,
    options: PlanOptions,
    verbose: bool = False,
    output_file: Path | None = None,
    reuse: str = "none",
    costs: Iterable[QuantizingCost] = (),
) -> Look:
    """Return how the screen of ``graph_plan`` is shown, with the command that runs the plan.

    For a slow plan, the command that plans its best suggestion comes first. ``costs``: those of
    `quantizing_of`. Other arguments are as for `_run_command`.
    """
    from graphrun.report.screen import Look
    from graphrun.report.verdicts import product_name

    problem = graph_plan.solution.problem
    graph = graph_plan.graph.until(problem.until)
    product = product_name(graph.kinds(), dict(problem.settings))
    suggestion, suggestion_command = _suggestion(graph_plan, options, product)
    return Look(
        width(),
        verbose,
        product,
        _run_command(graph_plan, graph, options, output_file or graph_plan.plan_file, reuse),
        "; ".join(
            filter(
                None,
                (
                    desktop_note(problem.hardware, problem.budget_bytes),
                    ram_note(graph_plan.solution),
                ),
            )
        ),
        suggestion,
        suggestion_command,
        (
            *checkpoint_lines(graph, precisions_of(graph_plan.solution)),
            *quantizing_lines(costs),
        ),
        graph_plan.gain,
    )


def _run_command(
    graph_plan: Planned, graph: Graph, options: PlanOptions, plan_file: Path | None, reuse: str
) -> str:
    """Return the line with the command that runs the plan for ``graph`` in ``plan_file``. Without a
    file, it plans again with the given options and ``reuse``."""
    from graphrun.profile.hardware import is_present

    problem = graph_plan.solution.problem
    arguments = [f"{graph_plan.source}", options.flags]
    if planned_only_reason(precisions_of(graph_plan.solution)):
        names = listed_names(options.allow or ())
        allow = [name for name in names if name not in PLANNED_ONLY]
        flags = replace(options, allow=allow or None).flags
        words = ("graphrun plan", *filter(None, (f"{graph_plan.source}", flags)))
        return f"next, for a plan that runs: {' '.join(words)}"
    if plan_file:
        fixed_names = dict(problem.settings)
        inputs = [text for text in options.set_ or [] if text.partition("=")[0] not in fixed_names]
        flags = replace(options, set_=inputs or None).flags_with_plan
        arguments = [str(plan_file), _allowing(problem), flags]
    arguments += [f"--reuse {reuse}"] if reuse not in ("none", "encoded") else []
    arguments += [
        '--prompt "..."' if name == "prompt" else f'--set {name}="..."'
        for name, graph_input in graph.inputs.items()
        if graph_input.required and name not in options.inputs
    ]
    place = f", on that {'machine' if problem.hardware.unified else 'card'}"
    return (
        f"next{'' if is_present(problem.hardware) else place}: "
        f"{' '.join(('graphrun run', *filter(None, arguments)))}"
    )


def desktop_note(hardware: Hardware, budget_bytes: int) -> str:
    """Return what a desktop leaves of the budget's card; "" if it is not known, or enough."""
    from graphrun.profile.hardware import free_range_with_desktop

    if (free_range := free_range_with_desktop(hardware, budget_bytes)) is None:
        return ""
    minimum, maximum = (f"{nbytes / GIB:g}" for nbytes in free_range)
    return (
        f"a desktop leaves {minimum} to {maximum} GiB free; a run that takes more is slow on "
        "Windows"
    )


MACHINES_GIB = (8, 16, 24, 32, 48, 64, 96, 128)  # of RAM, as machines are sold


def ram_note(solution: Solution) -> str:
    """Return what to type for a plan that takes all RAM of another machine; "" for other plans.

    People type the size of their machine, and ``--ram`` is what weights may take of it.
    """
    from graphrun.profile.hardware import is_present

    problem = solution.problem
    free_bytes = problem.ram_bytes - system_bytes(problem.ram_bytes)
    if (
        problem.ram_bytes not in [size * GIB for size in MACHINES_GIB]
        or solution.simulation.host_peak_bytes <= free_bytes
        or is_present(problem.hardware)
    ):
        return ""
    return (
        f"a machine with {problem.ram_bytes // GIB} GiB of RAM has some {free_bytes // GIB} free: "
        f"plan with --ram {free_bytes // GIB}G"
    )


def _suggestion(graph_plan: Planned, options: PlanOptions, product: str) -> tuple[str, str]:
    """Return the best suggestion for a slow plan as a sentence, and its command; "" without one."""
    if not graph_plan.suggestions:
        return "", ""
    from graphrun.report.whatif_screens import options_text, suggestion_sentence
    from graphrun.solve.suggestions import leading

    capacity_bytes = graph_plan.solution.problem.hardware.capacity_bytes
    if (suggestion := leading(graph_plan.suggestions, capacity_bytes)) is None:
        return "", ""
    words = ["plan", str(graph_plan.source), *shlex.split(options.flags)]
    change = options_text(suggestion, capacity_bytes).split()
    return suggestion_sentence(suggestion, product), f"graphrun {merge_options(words, change)}"


def chooses_checkpoints(graph: Graph, options: PlanOptions) -> bool:
    """Return whether a plan of ``graph`` may choose among published checkpoints."""
    allow = graph.allowed(options.allow or ())
    return any(
        checkpoint.format in allow
        for component in graph.components.values()
        for checkpoint in component.checkpoints
    )


def _refuse_planned_only(solution: Solution) -> None:
    """Raise InputError for a plan with a format that graphrun does not run."""
    if reason := planned_only_reason(precisions_of(solution)):
        raise InputError(reason)


def precisions_of(solution: Solution) -> dict[str, str]:
    """Return the precision of each component in the plan ``solution``."""
    return {component.name: component.variants[0].precision for component in solution.components}


def quantizing_of(graph_plan: Planned, cache: Path | None) -> tuple[QuantizingCost, ...]:
    """Return the costs of the weights that a run of the plan quantizes first, and keeps."""
    from graphrun.profile.quantizing import quantizing_costs

    solution, graph = graph_plan.solution, graph_plan.graph
    hardware = solution.problem.hardware
    costs = quantizing_costs(solution.components, hardware)
    costs = tuple(cost for cost in costs if graph.components[cost.component].source is not None)
    if cache is None or not costs:
        return ()
    from graphrun.runtime.spool import has_file  # imports torch

    return tuple(
        cost
        for cost in costs
        if not has_file(cache, graph.components[cost.component], cost.precision, hardware)
    )


def quantizing_lines(costs: Iterable[QuantizingCost]) -> tuple[str, ...]:
    """Return a line for each component that the first run quantizes."""
    return tuple(
        f"first run only: quantizes {cost.component} to {cost.precision} on {cost.place}, about "
        f"{roughly(cost.seconds)} before the picture; reads {show_size(cost.read_bytes)}, later "
        f"runs {show_size(cost.written_bytes)}"
        for cost in costs
    )


def checkpoint_lines(graph: Graph, precisions: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line for each component that a plan reads from a published checkpoint.
    ``precisions``: of each component. Bytes are as the checkpoint's page states them."""
    lines = []
    for name, precision in precisions.items():
        if (checkpoint := graph.components[name].checkpoint(precision)) is not None:
            size = f", {show_size(checkpoint.nbytes)}" if checkpoint.nbytes else ""
            licence = f"; {checkpoint.license}" if checkpoint.license else ""
            mark = "; planned only, not run" if planned_only_reason({name: precision}) else ""
            lines.append(f"{name} in {precision} from {checkpoint.source}{size}{licence}{mark}")
    return tuple(lines)

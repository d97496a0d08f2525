"""Cache dry runs, problems and plans on disk: keys of entries, and when an entry is ignored.

    entry      key                                                    use
    dry run    graph, inputs, versions of the libraries, graphrun's   any hardware, any budget
               own source
    problem    dry run + hardware + budgets                           read without importing torch
    call       state of an attached pipeline, signature of the        its dry run
               call, versions
    plan,      the problem's digest + graphrun's own source           read without importing highspy
    fits
    quick      the same                                               its quickly found plan
    measured   device, versions, component, shapes                    applied to a problem when it
               (`graphrun.profile.feedback`)                          is read

Without a folder everything works the same and nothing is stored. Torch is imported only to make a
dry run. The wheel contains dry runs of graphrun's own graphs at their defaults (`ship`), valid for
the versions of the libraries that they were made with.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from graphrun.disk_store import Store
from graphrun.errors import GraphError, InputError, StageError
from graphrun.files import digest_of, package_digest, python_digest
from graphrun.garbage import not_collected
from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.graph.media import size_text
from graphrun.graph.parts import Reference
from graphrun.graph.precisions import CLASSES
from graphrun.graph.shipped import graphs_folder
from graphrun.model.fit import Fit
from graphrun.model.hardware import Hardware
from graphrun.model.plan import parse
from graphrun.model.problem import Problem, ProblemLimits
from graphrun.model.solution import Solution
from graphrun.modules.source_files import (
    commits_of,
    config_file,
    file_stamp,
    file_stamps,
    local_folder,
    local_place,
)
from graphrun.profile.feedback import store_measurement_keys, with_measurements
from graphrun.reading import read_json, read_text, validated
from graphrun.solve.granularity import split_into_layers
from graphrun.units import show_size
from graphrun.verify.solution import checked_solution

if TYPE_CHECKING:
    from graphrun.profile.recording import DryRun
    from graphrun.solve.frontier import Frontier

# entries of dry runs that come with graphrun; a checkout has none, or those of its last wheel
SHIPPED = Path(__file__).parent / "dry_runs"

# packages whose code a dry run of a diffusers pipeline executes, or whose presence changes the code
LIBRARIES = ("torch", "diffusers", "transformers", "tokenizers", "accelerate", "bitsandbytes")

# raised if an entry is damaged or was not written by graphrun
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, IndexError, InputError)


_Entry = TypeVar("_Entry")


def problem_for(
    graph: Graph,
    inputs: Mapping[str, Any],
    hardware: Hardware,
    limits: ProblemLimits,
    store: Store | None,
) -> Problem:
    """Return the problem of ``graph`` with resolved ``inputs``, from ``store`` or made.

    Measurements of earlier runs in ``store`` replace traced numbers.
    """
    traced = trace_key(graph, inputs) if store is not None else None
    key = ""
    if traced is not None:
        sources = [
            sorted(c.name for c in graph.components.values() if c.source is not None),
            commits_of(graph.components.values()),
        ]
        settings = {
            name: size_text(value) for name, value in inputs.items() if not isinstance(value, str)
        }
        key = digest_of(
            [
                traced,
                graph.name,
                settings,
                asdict(hardware),
                asdict(limits),
                asdict(graph.directives),
                sources,
            ]
        )
    problem = _stored(store, "problem", key, partial(validated, Problem))
    if problem is None:
        from graphrun.profile.problems import option_phases_of, problem_of

        option_phases = option_phases_of(graph, limits.allow)
        with_options = [
            (stage, name, _dry_run(graph, inputs, store, traced, {stage: name}))
            for stage, name in option_phases
        ]
        run = _dry_run(graph, inputs, store, traced)
        problem = problem_of(
            graph, run, hardware, limits, inputs, with_options, copyable=graph.components
        )
        if store is not None:
            if key:
                store.put_json("problem", key, problem.to_json())
            store_measurement_keys(graph, run, problem, store)
    return with_measurements(problem, store)


def dry_run(
    graph: Graph,
    inputs: Mapping[str, Any],
    store: Store | None,
    options: Mapping[str, str] | None = None,
) -> DryRun:
    """Return the dry run of ``graph`` with resolved ``inputs`` and the stage ``options``.

    ``options``: stage -> name. It is read from ``store``, else made, which takes seconds, and
    stored.
    """
    return _dry_run(
        graph, inputs, store, trace_key(graph, inputs) if store is not None else None, options
    )


def dry_run_or_refusal(
    graph: Graph, inputs: Mapping[str, Any], store: Store | None
) -> DryRun | str:
    """Return the `dry_run`, or the error with which a stage fails in it, in one line.

    The error is stored too, unless it may come from this machine.
    """
    key = (trace_key(graph, inputs) or "") if store is not None else ""
    if (stored_refusal := _stored(store, "refusal", key, str)) is not None:
        return stored_refusal
    try:
        return dry_run(graph, inputs, store)
    except StageError as error:
        refusal = (str(error.__cause__).splitlines() or [str(error)])[0]
        if store is not None and key and not isinstance(error.__cause__, (MemoryError, OSError)):
            store.put_json("refusal", key, refusal)
        return refusal


def _dry_run(
    graph: Graph,
    inputs: Mapping[str, Any],
    store: Store | None,
    traced: str | None,
    options: Mapping[str, str] | None = None,
) -> DryRun:
    """Return the `dry_run` whose `trace_key` without options is ``traced``."""
    from graphrun.profile.recording import DryRun

    key = _with_options(traced, options)
    if (entry := _stored(store, "trace", key, DryRun.from_json)) is not None:
        return entry
    if SHIPPED.is_dir():
        with contextlib.suppress(*UNREADABLE):
            ship_key = _with_options(shipped_key(graph, inputs), options)
            return DryRun.from_json(read_json(SHIPPED / f"{ship_key}.json"))
    run = _probe(graph, inputs, options)
    if store is not None and key:
        store.put_json("trace", key, run.to_json())
    return run


def _with_options(traced: str | None, options: Mapping[str, str] | None) -> str:
    return digest_of([traced, sorted(options.items())]) if traced and options else traced or ""


def ship(names: Iterable[str], folder: Path = SHIPPED) -> None:
    """Make dry runs of graphrun's own graphs called ``names``, at their defaults, for a wheel.

    Replaces the content of ``folder`` by JSON files: a wheel's files are read-only, and do not
    change. Graphs that name classes of other packages are left out: only a caller may trust these.
    """
    from graphrun.profile.problems import option_phases_of

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in names:
        try:
            graph = load(name)
        except GraphError:
            continue
        inputs = graph.for_planning({})
        for options in ({}, *({stage: option} for stage, option in option_phases_of(graph, ()))):
            ship_key = _with_options(shipped_key(graph, inputs), options)
            run = _probe(graph, inputs, options)
            (folder / f"{ship_key}.json").write_text(json.dumps(run.to_json()), encoding="utf-8")


def _stored(
    store: Store | None, kind: str, key: str, decode: Callable[[Any], _Entry]
) -> _Entry | None:
    """Return the decoded entry of ``store``; None if absent or damaged, or without a key."""
    entry = store.get_json(kind, key) if store is not None and key else None
    try:
        return decode(entry) if entry is not None else None
    except UNREADABLE:
        return None


def solution_for(
    problem: Problem, store: Store | None, on_solved: Callable[[float], None] | None = None
) -> Solution:
    """Return the best plan for ``problem``, from ``store`` or solved.

    A stored plan is checked; a solved plan is stored. ``on_solved`` is called with the seconds that
    solving took, and not for a stored plan. Raises Infeasible.
    """
    if (cached_plan := _stored_plan(problem, store)) is not None:
        return cached_plan
    from graphrun.solve.solve import solve  # imports highspy

    start = time.perf_counter()
    solution = solve(problem)
    if on_solved is not None:
        on_solved(time.perf_counter() - start)
    keep_plan(problem, solution, store)
    return solution


def fitting_for(
    problem: Problem, store: Store | None, step: Callable[[str], None] | None = None
) -> Solution | None:
    """Return the plan of `solution_for`, or None; ``step``: called with a budget to solve."""
    if (cached_plan := _stored_plan(problem, store)) is not None:
        return cached_plan
    from graphrun.solve.copying import fastest_with_copies
    from graphrun.solve.pages import solved

    if step is not None:
        step(show_size(problem.budget_bytes))
    if (solution := solved(problem)) is not None:
        solution = fastest_with_copies(problem, solution)
        keep_plan(problem, solution, store)
    return solution


def quick_for(
    problem: Problem, store: Store | None, step: Callable[[str], None] | None = None
) -> Solution | None:
    """Return the plan of ``problem`` from ``store``, else a quickly found one, which is stored too.

    ``step``: as for `fitting_for`.
    """
    for kind in ("plan", "quick"):
        if (stored_plan := _stored_plan(problem, store, kind)) is not None:
            return stored_plan
    from graphrun.solve.frontier import quickly_solved  # imports highspy

    if step is not None:
        step(show_size(problem.budget_bytes))
    if (solution := quickly_solved(problem)) is not None:
        keep_plan(problem, solution, store, "quick")
    return solution


def suggestions_for(
    problem: Problem, solution: Solution, options: Callable[[], Iterable[Any]], store: Store | None
) -> tuple[Any, ...]:
    """Return `speedups` for the plan ``solution``, from ``store`` or solved for.

    ``options``: suggestions that take dry runs, which are made only in the context
    `graphrun.solve.suggestions.thorough`.
    """
    from graphrun.solve.suggestions import (  # imports highspy
        Suggestion,
        is_thorough,
        speedups,
        worthwhile,
    )

    key = digest_of([_plan_key(problem), is_thorough()])
    speedup_list = _stored(store, "suggestions", key, partial(validated, list[Suggestion]))
    if speedup_list is None:
        speedup_list = list(speedups(problem, options() if is_thorough() else ()))
        if store is not None:
            store.put_json("suggestions", key, [asdict(suggestion) for suggestion in speedup_list])
    return worthwhile(speedup_list, solution)


def fits_for(
    problem: Problem, store: Store | None, classes: Collection[str] = tuple(CLASSES)
) -> tuple[Fit, ...]:
    """Return `graphrun.solve.fits.fits_of`, from ``store`` or solved for."""
    key = _plan_key(problem) if store is not None else ""
    if key and set(classes) != set(CLASSES):
        key = f"{key}-{'-'.join(classes) or 'unchanged'}"
    fits = _stored(store, "fits", key, partial(validated, tuple[Fit, ...]))
    if fits is None:
        from graphrun.solve.fits import fits_of  # imports highspy

        fits = fits_of(problem, classes)
        if store is not None:
            store.put_json("fits", key, [asdict(fit) for fit in fits])
    return fits


def frontier_for(
    problem: Problem,
    budgets: Iterable[int],
    store: Store | None,
    device: int = 0,
    step: Callable[[str], None] | None = None,
) -> Frontier:
    """Return `graphrun.solve.frontier.frontier`, with plans read from ``store`` and kept there.

    If the plan of a smaller budget is faster, it is kept for the larger budget too. ``step``: as
    for `fitting_for`.
    """
    from graphrun.solve.frontier import at_budget, frontier  # imports highspy

    points = frontier(problem, budgets, lambda variant: fitting_for(variant, store, step), device)
    for point in points:
        if point.solution is not None:
            keep_plan(at_budget(problem, point.budget_bytes, device), point.solution, store)
    return points


def curve_for(
    problem: Problem, solution: Solution, store: Store | None, step: Callable[[str], None]
) -> Frontier:
    """Return `graphrun.solve.frontier.curve` through ``solution``, the plan of ``problem``.

    Other plans are those of `quick_for`. ``step``: as for `fitting_for`.
    """
    from graphrun.solve.frontier import curve  # imports highspy

    return curve(problem, solution, lambda variant: quick_for(variant, store, step))


def _stored_plan(problem: Problem, store: Store | None, kind: str = "plan") -> Solution | None:
    def read(entry: Any) -> Solution | None:
        return checked_solution(
            split_into_layers(problem, entry["layers"]), parse(entry["plan"]), *entry["proof"]
        )

    return _stored(store, kind, _plan_key(problem), read) if store is not None else None


def keep_plan(
    problem: Problem, solution: Solution, store: Store | None, kind: str = "plan"
) -> None:
    """Store ``solution`` as the best plan for ``problem``, with components before any split.

    ``kind``: ``quick`` for a quickly found plan.
    """
    if store is not None:
        proof = [getattr(solution, field.name) for field in fields(Solution)[3:]]
        layers = [
            component.name
            for component in solution.problem.components
            if component.granularity == "layers"
        ]
        store.put_json(
            kind,
            _plan_key(problem),
            {"plan": str(solution.plan), "layers": layers, "proof": proof},
        )


class CallStore:
    """Dry runs of the calls of attached pipelines, and their plans, in ``store``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def solve(self, problem: Problem) -> Solution:
        return solution_for(problem, self._store)

    def find(self, packages: Iterable[str], content: Any) -> Any:
        """Return what `keep` stored for equal ``content`` and the same code, or None."""
        return _stored(self._store, "call", self._key(packages, content), lambda data: data)

    def keep(self, packages: Iterable[str], content: Any, data: Any) -> None:
        """Store ``data`` for a call described by ``content``, with classes of ``packages``.

        Nothing is stored if a package is not one of the libraries: the key has only their versions.
        """
        if key := self._key(packages, content):
            self._store.put_json("call", key, data)

    def _key(self, packages: Iterable[str], content: Any) -> str:
        if not set(packages) <= {*LIBRARIES, "graphrun"}:
            return ""
        versions = {name: _installed_version(name) for name in LIBRARIES}
        return digest_of([versions, list(sys.version_info[:3]), own_source(), content])


def _plan_key(problem: Problem) -> str:
    return digest_of([problem.digest, own_source()])


def trace_key(graph: Graph, inputs: Mapping[str, Any]) -> str | None:
    """Return the key of everything that a dry run depends on.

    None if the code of a trusted package is not found. The key does not depend on hardware, on a
    seed, or on the text of a prompt, because pipelines pad it; no prompt and an empty prompt do
    differ. Local weight files count by name, size and modification time.
    """
    trusted = {name: package_digest(name) for name in graph.trust}
    if not all(trusted.values()):
        return None
    versions = {name: _installed_version(name) for name in LIBRARIES}
    return _key(graph, inputs, [versions, trusted, list(sys.version_info[:3])])


def shipped_key(graph: Graph, inputs: Mapping[str, Any]) -> str | None:
    """Return the `trace_key` for a dry run made on another machine.

    Libraries count by their release only, not by when they were installed or for which device they
    were built (``2.13.0`` of ``2.13.0+cpu``). So do the weights in a wheel, by name and size.
    """
    versions = {name: _installed_version(name) for name in LIBRARIES}
    return _key(
        graph,
        inputs,
        {name: release and release[0].partition("+")[0] for name, release in versions.items()},
        shipped=True,
    )


def _key(
    graph: Graph, inputs: Mapping[str, Any], versions: Any, *, shipped: bool = False
) -> str | None:
    if (sources := _sources(graph, shipped=shipped)) is None:
        return None
    return digest_of(
        [
            graph.digest,
            list(graph.trust),
            _settings(graph, inputs),
            [versions, own_source()],
            sources,
        ]
    )


def _sources(graph: Graph, *, shipped: bool) -> list[Any] | None:
    """Return the state of a graph's local sources; None if a required configuration or GGUF file is
    not here.

    It has contents of configurations, and sizes and modification times of weights. ``shipped``:
    without the times of files that graphrun ships, which differ from machine to machine.
    """

    def states_of(place: Path, stamps: Iterable[Sequence[Any]]) -> list[list[Any]]:
        is_shipped = shipped and place.resolve().is_relative_to(graphs_folder().resolve())
        return [[*stamp[:2]] if is_shipped else [*stamp] for stamp in stamps]

    states: list[Any] = []
    for c in graph.components.values():
        paths = [path for source in c.sources if (path := local_place(source)) is not None]
        config = None if c.has_config else config_file(c.source)
        if (not c.has_config and config is None) or (c.gguf and local_place(c.gguf) is None):
            return None
        text = read_text(config) if config is not None else ""
        states.append(
            [
                c.name,
                text,
                c.variant,
                *([[asdict(item) for item in c.checkpoints]] if c.checkpoints else []),
                *(states_of(path, file_stamps(path, c.file_line, c.variant)) for path in paths),
            ]
        )
    for p in graph.parts.values():
        if not (p.has_config or p.file):
            folder = local_folder(p.source)
            if folder is None:
                return None
            files = sorted(path for path in folder.iterdir() if path.is_file())
            stamps = ([path.name, *file_stamp(path)] for path in files)
            states.append([p.name, states_of(folder, stamps)])
    return states


def _settings(graph: Graph, inputs: Mapping[str, Any]) -> dict[str, str]:
    """Return the inputs that stages use, as text; no seeds, and only whether there are prompts."""
    uses = [
        (name, value.name)
        for stage in graph.stages
        for name, argument in stage.arguments.items()
        for value in (argument if isinstance(argument, list) else [argument])
        if isinstance(value, Reference) and value.kind == "input"
    ]
    plain = {input_name for name, input_name in uses if "prompt" not in name and name != "seed"}
    settings = {name: size_text(inputs[name]) for name in sorted(plain)}
    texts = sorted({input_name for name, input_name in uses if "prompt" in name} - plain)
    return settings | {
        name: "text" if inputs[name] and isinstance(inputs[name], str) else size_text(inputs[name])
        for name in texts
    }


def _installed_version(package: str) -> tuple[str, int] | None:
    """Return a package's version and first file's time, which changes if reinstalled."""
    try:
        number, spec = version(package), find_spec(package)
        return number, Path(
            spec.origin
        ).stat().st_mtime_ns if spec is not None and spec.origin else 0
    except (PackageNotFoundError, OSError, ValueError):
        return None


@functools.cache
def own_source() -> str:
    """Return the digest of graphrun's Python files, any change of which voids all entries."""
    return python_digest(Path(__file__).parent)[:32]


def _probe(graph: Graph, inputs: Mapping[str, Any], options: Mapping[str, str] | None) -> DryRun:
    with not_collected() as resume:
        import_code(graph)
        from graphrun.profile.dry_run import probe

        return probe(graph, inputs, options, on_built=resume)


def import_code(graph: Graph) -> None:
    """Import what a dry run of ``graph`` needs, torch and its classes, which takes seconds. Raises
    GraphError."""
    import graphrun.profile.dry_run  # noqa: F401
    from graphrun.modules.classes import (
        pipeline_class,
        require_code,
        resolve_class,
        resolve_function,
    )

    require_code(graph)
    for component in graph.components.values():
        resolve_class(component.class_path, graph.trust, component.file_line, "component")
    for part in graph.parts.values():
        resolve_class(part.class_path, graph.trust, part.file_line, "part")
    for pipeline in map(graph.pipeline_called, ("", *graph.pipelines)):
        pipeline_class(pipeline, graph.trust)
    for stage in graph.stages:
        if stage.operation.is_function:
            resolve_function(stage.op, graph.trust, stage.file_line)

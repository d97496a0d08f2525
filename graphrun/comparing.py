"""Compare a plan with other engines, for ``graphrun export`` and ``graphrun compare``."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrun.api import RUNS
from graphrun.disk_store import Store, store_in
from graphrun.entry_points import EXPORTERS, entry_point, load
from graphrun.errors import GraphrunError, InputError
from graphrun.graph.values import did_you_mean
from graphrun.model.ranges import probable_range

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph
    from graphrun.model.solution import Solution
    from graphrun.profile.engines import Engine, EngineSetting
    from graphrun.profile.placements import Scene, WeightPlacement

    Exporter = Callable[[Graph, Solution], str]


def engines_called(names: Iterable[str]) -> list[Engine]:
    """Return the engines called ``names``; ``all``: every one. Raises InputError for others."""
    from graphrun.profile.engines import ENGINES

    engines: list[Engine] = []
    for name in names:
        if name != "all" and name not in ENGINES:
            raise InputError(f"engine {name!r} is not known{did_you_mean(name, ENGINES)}")
        engines += ENGINES.values() if name == "all" else [ENGINES[name]]
    return list(dict.fromkeys(engines))


def exporter_called(name: str) -> Exporter | None:
    """Return the exporter that an installed package adds by ``name``; None if none does, or if the
    name is an engine of graphrun's. Raises InputError if it does not load."""
    from graphrun.profile.engines import ENGINES

    point = entry_point(EXPORTERS, name) if name not in ENGINES else None
    if point is None:
        return None
    function = load(point)

    def export(graph: Graph, solution: Solution) -> str:
        try:
            text = function(graph, solution)
        except Exception as error:  # another package's code
            raise InputError(
                f"exporter {name}: {point.value} fails: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(text, str):
            raise InputError(
                f"exporter {name}: {point.value} returns a {type(text).__name__} instead of text"
            )
        return text

    return export


class EngineComparison:
    """What other engines would do within the budgets of the plan ``solution`` of ``graph``.

    Raises InputError for a plan of a device that shares its memory with the host.
    """

    def __init__(self, graph: Graph, solution: Solution, cache: Path | None = None) -> None:
        problem = solution.problem
        if problem.hardware.unified:
            raise InputError(
                f"{graph.name}: other engines are compared on cards, and {problem.hardware.name} "
                "shares its memory with the host: plan with --vram 8G --hardware rtx4090"
            )
        store = store_in(cache)
        self.graph, self.solution = graph, solution
        self.scene = _scene(graph, solution, store)
        self.budget_bytes = (
            min(problem.budget_bytes, problem.hardware.capacity_bytes) - problem.reserve_bytes
        )
        self._warm_seconds = _session(solution, store)

    @property
    def _budgets(self) -> tuple[int, int]:
        return self.budget_bytes, self.solution.problem.ram_bytes

    def best(self, engine: Engine) -> EngineSetting:
        """Return the fastest setting of ``engine`` that fits; if none does, that of least
        memory."""
        from graphrun.profile.engines import best_setting

        return best_setting(engine, self.scene, self._budgets)

    def setting(self, placements: Mapping[str, WeightPlacement]) -> EngineSetting:
        """Return ``placements`` of all components with their estimate."""
        from graphrun.profile.engines import setting_of

        return setting_of(self.scene, placements, self._budgets)

    def row(self, engine: Engine, setting: EngineSetting) -> dict[str, Any]:
        """Return the JSON-ready row of ``engine`` with ``setting``.

        ``engine``; ``command``, what to type; ``seconds``, ``seconds_range``, ``peak_bytes`` and
        ``ram_bytes`` of a warm run, by simulation; ``ratio`` of its seconds to graphrun's;
        ``fits``, within the budgets; ``reason``, why it does not fit; ``caveat``, what the
        simulation leaves out; ``lost``, what the plan has and the engine cannot be asked for.
        """
        from graphrun.profile.engines import Wish

        solution = self.solution
        components = solution.components
        wish = Wish(
            self.graph,
            solution.problem.hardware,
            self.budget_bytes,
            self.scene.kinds,
            setting,
            [item.name for item in components if item.variants[0].device == "cpu"],
            any(name == "tiling" for _, name in solution.plan.options),
        )
        return {
            "engine": engine.name,
            "command": _command(engine.command(wish)),
            **_figures(setting, solution, self._warm_seconds),
            "reason": _misfit(setting, solution),
            "caveat": engine.caveat,
            "lost": losses(engine, self.graph, solution),
        }

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the comparison with the engines of ``rows``, JSON-ready.

        ``seconds``, ``seconds_range`` and ``peak_bytes`` are of a warm run of graphrun, one of a
        session. ``fastest``: the fastest engine that fits and has no caveat, if it is faster; else
        graphrun.
        """
        problem, warm_seconds = self.solution.problem, self._warm_seconds
        overhead_bytes = self.budget_bytes - problem.effective_bytes
        faster_rows = [
            row for row in rows if row["fits"] and (row["ratio"] or 1) < 1 and not row["caveat"]
        ]
        fastest = min(faster_rows, key=lambda row: row["seconds"], default={"engine": "graphrun"})
        return {
            "graph": self.graph.name,
            "settings": dict(problem.settings),
            "hardware": problem.hardware.name,
            "basis": problem.hardware.basis,
            "budget_bytes": problem.budget_bytes,
            "seconds": warm_seconds,
            **_range(self.solution, warm_seconds),
            "peak_bytes": self.solution.simulation.peak_bytes + max(0, overhead_bytes),
            "engines": list(rows),
            "fastest": fastest["engine"],
        }


def _session(solution: Solution, store: Store | None) -> float | None:
    """Return the seconds of a further run of a session within the budgets of ``solution``; None if
    no session fits them."""
    from graphrun.store import solution_for

    if solution.problem.runs == 1:
        try:
            solution = solution_for(replace(solution.problem, runs=RUNS), store)
        except GraphrunError:
            return None
    return solution.simulation.further_seconds


def _scene(graph: Graph, solution: Solution, store: Store | None) -> Scene:
    """Return the scene of other engines: the graph's first precisions, the options of the plan."""
    from graphrun.model.problem import ProblemLimits
    from graphrun.modules.build import meta_modules
    from graphrun.profile.engines import kind_of
    from graphrun.profile.modes import weight_bytes
    from graphrun.profile.placements import Scene
    from graphrun.profile.problems import problem_of
    from graphrun.profile.survey import phase_rows
    from graphrun.store import dry_run

    problem = solution.problem
    values = graph.for_planning(dict(problem.settings))
    options = {stage: name for stage, name in solution.plan.options if name == "tiling"}
    recording = dry_run(graph, values, store, options)
    limits = ProblemLimits(problem.hardware.capacity_bytes, 1)
    whole = problem_of(graph, recording, problem.hardware, limits, values)
    with meta_modules(graph) as modules:
        weights = {name: weight_bytes(graph, name, modules[name]) for name in recording.profiles}
    return Scene(
        graph,
        recording,
        problem.hardware,
        weights,
        {name: kind_of(name) for name in weights},
        phase_rows(whole, recording, problem.hardware),
    )


def _range(solution: Solution, seconds: float | None) -> dict[str, Any]:
    """Return the probable range of a run that computes what ``solution`` does, and its reason."""
    if seconds is None:
        return {"seconds_range": [], "range_reason": ""}
    waiting_seconds = seconds - solution.simulation.compute_seconds
    likely = probable_range(solution.problem.hardware, seconds, waiting_seconds)
    return {"seconds_range": likely.bounds, "range_reason": likely.reason}


def _figures(
    setting: EngineSetting, solution: Solution, warm_seconds: float | None
) -> dict[str, Any]:
    return {
        "seconds": setting.seconds,
        **_range(solution, setting.seconds),
        "peak_bytes": setting.peak_bytes,
        "ram_bytes": setting.ram_bytes,
        "ratio": setting.seconds / warm_seconds if warm_seconds else None,
        "fits": setting.fits,
    }


def _misfit(setting: EngineSetting, solution: Solution) -> str:
    """Return why ``setting`` does not fit the budgets; "" if it fits."""
    from graphrun.units import show_size, typed_size

    if setting.fits:
        return ""
    if setting.ram_bytes > solution.problem.ram_bytes:
        return (
            f"needs {show_size(setting.ram_bytes)} of RAM for weights, and the plan has "
            f"{show_size(solution.problem.ram_bytes)}"
        )
    return (
        f"needs {show_size(setting.peak_bytes)}, and the budget is "
        f"{show_size(solution.problem.budget_bytes)}: plan with --vram "
        f"{typed_size(setting.peak_bytes)}"
    )


def _command(words: list[str]) -> str:
    """Return ``words`` as a command line; a line of Python stays as it is."""
    is_python = words[0].startswith(("pipe.", "dispatch_model"))
    return " ".join(words) if is_python else shlex.join(words)


def losses(engine: Engine, graph: Graph, solution: Solution) -> list[str]:
    """Return what the plan ``solution`` has and ``engine`` cannot be asked for, as sentences."""
    from graphrun.model.plan import Stream
    from graphrun.profile.engines import FEATURES

    problem, plan = solution.problem, solution.plan
    variants = {item.name: item.variants[0] for item in solution.components}
    streams = {
        action.component: dict(action.keep or ())
        for slot in plan.slots
        for action in slot.actions
        if isinstance(action, Stream)
    }
    resident_counts = {
        name: f"{sum(map(len, counts.values()))} of "
        f"{sum(len(group.blocks) for group in problem.component(name).groups)} of {name}"
        for name, counts in streams.items()
        if counts
    }
    of_plan = {
        "budget": [""],
        "blocks": list(resident_counts.values()),
        "precision": [
            f"{name} in {variant.precision}"
            for name, variant in variants.items()
            if variant.precision != graph.components[name].precision[0]
        ],
        "disk": ["" for variant in variants.values() if variant.backing_store == "disk"][:1],
        "devices": [name for name, variant in variants.items() if variant.secondary]
        + [name for name, *_ in plan.splits]
        + [name for name, _ in plan.copies],
        "cpu": [name for name, variant in variants.items() if variant.device == "cpu"],
        "tiling": ["" for _, name in plan.options if name == "tiling"][:1],
        "options": [
            f"{stage}={name}" for stage, name in plan.options if name not in ("tiling", "plain")
        ],
        "session": [""] if plan.further_slots else [],
    }
    return [
        FEATURES[feature].format(", ".join(items))
        for feature, items in of_plan.items()
        if items and feature not in engine.expresses
    ]

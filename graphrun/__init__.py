"""graphrun: plans where every component of a diffusion pipeline lives, before anything is loaded, then does exactly that.

    graph    = graphrun.load("graphs/flux-dev.yaml")
    problem  = graphrun.estimate(graph, vram="8G", ram="64G", hardware="rtx4090")
    solution = graphrun.plan(problem)                        # raises Infeasible, which explains itself
    trace    = graphrun.run(solution, graph, inputs={"prompt": "a lighthouse"})

Importing this package imports no torch; each function imports what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrun.errors import BrokenPlan, GraphError, GraphrunError, InputError, OutOfMemory, PlanError, TransferFailed
from graphrun.units import parse_size

if TYPE_CHECKING:
    from graphrun.executor.device import Device
    from graphrun.graph.graph import Graph
    from graphrun.integrations.attach import Attachment
    from graphrun.integrations.description import LivePipeline
    from graphrun.planner.problem import Hardware, Problem
    from graphrun.planner.solution import Solution
    from graphrun.trace import Trace

__version__ = "0.1.0"
__all__ = [
    "BrokenPlan",
    "GraphError",
    "GraphrunError",
    "InputError",
    "OutOfMemory",
    "PlanError",
    "TransferFailed",
    "attach",
    "estimate",
    "from_pipeline",
    "load",
    "plan",
    "run",
    "survey",
]


def load(path: str | Path) -> Graph:
    """The graph in the YAML file at ``path``. Raises GraphError with file and line."""
    from graphrun.graph.load import load as read

    return read(path)


def estimate(
    graph: Graph | LivePipeline,
    *,
    vram: str | int,
    ram: str | int = "auto",
    hardware: str | Hardware | None = None,
    inputs: Mapping[str, Any] | None = None,
    keep: Iterable[str] = (),
    exclude: Iterable[str] = (),
    reserve: str | int | None = None,
    until: str | None = None,
    cache: Path | None = None,
) -> Problem:
    """The numbers of running ``graph`` once within two budgets, from a dry run: no weights, no GPU.

    ``vram`` and ``ram`` are sizes such as ``"8G"`` or bytes; ``vram="50%"`` is a share of the device. ``ram="auto"`` is what this
    machine (its cgroup) has. ``hardware`` is a name from `graphrun.estimator.hardware.priors`, or of a profile that
    `graphrun calibrate` left in ``cache``; None takes the CUDA device that is found, else rtx4090. ``keep``: components that stay
    from their first use to the end; ``exclude``: components of which nothing stays that can be streamed; ``reserve``: a part of the
    budget left to other programs. All three add to the graph's own. ``until``: a stage; only what its outputs need is planned, and
    a run ends behind it, with these outputs. Of a pipeline (`from_pipeline`) ``inputs`` are a call's arguments. ``cache`` is a
    folder where dry runs and problems of graphs are kept: with one found there, no torch is imported.
    """
    from graphrun.estimator.machine import host_ram_bytes
    from graphrun.graph.graph import Graph as Declared

    hardware = _hardware(hardware, cache)
    known_bytes = hardware.capacity_bytes if hardware.device != "sim" else None
    budget_bytes = parse_size(vram, whole_bytes=known_bytes, name="vram")
    ram_bytes = host_ram_bytes() if ram == "auto" else parse_size(ram, whole_bytes=host_ram_bytes(), name="ram")
    reserve_bytes = None if reserve is None else parse_size(reserve, name="reserve")
    if not isinstance(graph, Declared):
        if until is not None:
            raise InputError("until names a stage of a graph; a pipeline's call has none: leave it out")
        return graph.problem(inputs or {}, hardware, budget_bytes, ram_bytes, (tuple(keep), tuple(exclude), reserve_bytes))
    graph = graph if until is None else graph.until(until)
    graph = graph.directed(keep, exclude, reserve_bytes)
    values = graph.for_planning(inputs or {})

    from graphrun.estimator.cache import problem_for
    from graphrun.estimator.store import Store

    problem = problem_for(graph, values, hardware, budget_bytes, ram_bytes, Store(cache) if cache is not None else None)
    return replace(problem, until=until or "")


def survey(
    graph: Graph,
    *,
    hardware: str | Hardware | None = None,
    inputs: Mapping[str, Any] | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """What ``graph`` takes, part by part and without a budget, as JSON-ready data: weights by precision, activations, values,
    FLOPs and seconds, each with its basis. Arguments as for `estimate`.
    """

    hardware = _hardware(hardware, cache)
    values = graph.for_planning(inputs or {})

    from graphrun.estimator.cache import dry_run
    from graphrun.estimator.store import Store
    from graphrun.estimator.survey import survey as look

    return look(graph, dry_run(graph, values, Store(cache) if cache is not None else None), hardware, values)


def plan(problem: Problem, *, cache: Path | None = None) -> Solution:
    """The fastest schedule that fits, with its proof. Raises Infeasible, which names what does not fit and what would.

    ``cache`` is a folder where plans are kept; one found there is checked before it counts.
    """
    from graphrun.estimator.cache import solution_for
    from graphrun.estimator.store import Store

    return solution_for(problem, Store(cache) if cache is not None else None)


def run(
    solution: Solution,
    graph: Graph,
    inputs: Mapping[str, Any] | None = None,
    *,
    modules: Mapping[str, Any] | None = None,
    random_weights: bool = False,
    progress: Callable[[int, int, int], None] | None = None,
    cache: Path | None = None,
) -> Trace:
    """Runs ``graph`` by ``solution`` and returns the trace; ``trace.outputs`` holds the pictures.

    ``inputs`` may differ from the planned ones in texts and seeds only. ``modules`` are components built before (to run several
    times without loading twice). ``random_weights`` ignores the graph's source. What is measured is kept in the folder ``cache``,
    for the next `estimate` with it. Raises PlanError before anything is loaded when the plan is not for this graph or breaks a
    rule; OutOfMemory, TransferFailed or BrokenPlan when reality differs, with the device back at its baseline.
    """
    from graphrun.executor.executor import execute, refuse_unfit
    from graphrun.executor.open import open_device

    graph = graph.until(solution.problem.until) if solution.problem.until else graph
    values = planned_inputs(solution.problem, graph, inputs or {})
    refuse_unfit(solution.problem, solution.plan, graph)
    device = open_device(solution.problem)
    graph = graph.without_sources() if random_weights else graph
    trace = execute(solution.problem, solution.plan, graph, values, device, modules, progress)
    if cache is not None:
        from graphrun.estimator.feedback import remember
        from graphrun.estimator.store import Store

        remember(solution.problem, solution.plan, trace, Store(cache))
    return trace


def from_pipeline(pipe: Any) -> LivePipeline:
    """``pipe``, a diffusers pipeline, as something that `estimate` plans: its weights may be on the CPU or on meta, and stay there.

    ``estimate(from_pipeline(pipe), vram="8G", inputs={"prompt": "a lighthouse", "height": 1024})``. Raises InputError.
    """
    from graphrun.integrations.description import LivePipeline

    return LivePipeline(pipe)


def attach(
    pipe: Any,
    *,
    vram: str | int,
    ram: str | int = "auto",
    hardware: str | Hardware | None = None,
    device: str | Device | None = None,
    keep: Iterable[str] = (),
    exclude: Iterable[str] = (),
    reserve: str | int | None = None,
) -> Attachment:
    """Takes over where the weights of ``pipe``, a diffusers pipeline on the CPU, are: in place of ``enable_model_cpu_offload()``.

    Each call of it (and of its methods and components) is planned within the budgets from a dry run of that very call, then runs by
    the plan, with the results of a pipeline that is wholly on the device. ``attached.report()`` shows planned beside measured,
    ``attached.detach()`` undoes it; so does leaving it as a context manager. ``device`` is ``cuda``, ``sim`` or a device of
    `graphrun.executor`; budgets, ``hardware`` and directives are as for `estimate`. Raises InputError where something else moves
    the weights already; a call raises ProbeError or Infeasible where it cannot be planned.
    """
    from graphrun.estimator.machine import host_ram_bytes
    from graphrun.executor.open import open_hardware
    from graphrun.integrations.attach import Attachment, demands_of, hardware_of, refuse_placed

    refuse_placed(pipe)
    place = hardware_of(device, hardware)
    opened = open_hardware(place) if device is None or isinstance(device, str) else device
    budget_bytes = parse_size(vram, whole_bytes=place.capacity_bytes if place.device != "sim" else None, name="vram")
    ram_bytes = host_ram_bytes() if ram == "auto" else parse_size(ram, whole_bytes=host_ram_bytes(), name="ram")
    reserve_bytes = None if reserve is None else parse_size(reserve, name="reserve")
    return Attachment(pipe, opened, place, budget_bytes, ram_bytes, demands_of(keep, exclude, reserve_bytes))


def planned_inputs(problem: Problem, graph: Graph, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """``inputs`` completed from the plan's settings and the graph's defaults.

    Raises PlanError when one that the plan depends on differs from what was planned.
    """
    planned = dict(problem.settings)
    graph = graph.until(problem.until) if problem.until else graph
    values = graph.resolve({**planned, **inputs})
    for name, text in planned.items():
        if str(values[name]) != text:
            raise PlanError(f"the plan is for {name}={text}, this run has {name}={values[name]}: plan again, or leave {name} out")
    return values


def _hardware(given: str | Hardware | None, cache: Path | None) -> Hardware:
    """The hardware meant: as it is, by name (a profile or a prior), or where nothing is given the card found, else a prior."""
    from graphrun.estimator import hardware as devices
    from graphrun.estimator import profiles

    if given is None:
        return profiles.found(cache) or devices.hardware(devices.DEFAULT)
    return profiles.hardware(given, cache) if isinstance(given, str) else given

"""The functions that `graphrun` exports. Each imports what it needs when it is called, so that importing this stays fast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrun.errors import InputError, PlanError
from graphrun.units import parse_size

if TYPE_CHECKING:
    from graphrun.batch.cache.reuse import Reuse, What
    from graphrun.batch.queue import Batch, Sink
    from graphrun.batch.requests import Request
    from graphrun.batch.watch import Watcher
    from graphrun.diffusers_.attach import Attachment
    from graphrun.diffusers_.description import LivePipeline
    from graphrun.graph.graph import Graph
    from graphrun.model.problem import Hardware, Problem
    from graphrun.model.solution import Solution
    from graphrun.runtime.devices.device import Device
    from graphrun.trace import Trace


def load(path: str | Path, *, trust: Iterable[str] = ()) -> Graph:
    """The graph in the YAML file at ``path``. Raises GraphError with file and line.

    ``trust``: packages of which it may name any class, and so run code, beside modules, schedulers, tokenizers, processors and
    pipelines of diffusers and transformers. Its own ``allow:`` only asks for them.
    """
    from graphrun.graph.loading import load as read

    return read(path, trust)


def estimate(
    graph: Graph | LivePipeline,
    *,
    vram: str | int,
    ram: str | int = "auto",
    pinned: str | int | None = None,
    disk: str | int | None = None,
    runs: int = 1,
    allow: Iterable[str] = (),
    hardware: str | Hardware | None = None,
    inputs: Mapping[str, Any] | None = None,
    keep: Iterable[str] = (),
    exclude: Iterable[str] = (),
    pin: Iterable[str] = (),
    reserve: str | int | None = None,
    until: str | None = None,
    precomputed: Iterable[str] = (),
    cache: Path | None = None,
) -> Problem:
    """The numbers of running ``graph`` within its budgets, from a dry run: no weights, no GPU.

    ``vram`` and ``ram`` are sizes such as ``"8G"`` or bytes; ``vram="50%"`` is a share of the device. ``ram="auto"`` is what this
    machine (its cgroup) has left, and what components handed in take; ``pinned`` limits what of it is page-locked, ``disk`` what is
    written. ``runs`` above 1: a session, a first run and others that find what it left. ``allow`` names what may change outputs:
    ``precision`` (those that the graph lists) or one of them, ``cpu``, ``tiling``, ``split``. ``hardware`` is a name from
    `graphrun.profile.hardware.priors`, or of a profile that `graphrun calibrate` left in ``cache``; None takes the CUDA device
    that is found, else rtx4090. ``keep``: components that stay from their first use to the end; ``exclude``: components of which
    nothing stays that can be streamed; ``pin``: components whose backing store is page-locked; ``reserve``: a part of the budget left to
    other programs. They add to the graph's own. ``until``: a stage; only what its outputs need is planned, and a run ends behind
    it, with these outputs. ``precomputed``: names of values (or of their stages) that a run is handed, such as those that `precomputed` finds:
    these stages are not planned, and what only they use is not loaded. ``cache`` is a folder where dry runs and problems are kept:
    with one found there, no torch is imported. Of a pipeline (`from_pipeline`) ``inputs`` are a call's arguments.
    """
    from graphrun.graph.graph import Graph as Declared
    from graphrun.profile.machine import ram_budget

    hardware = _hardware(hardware, cache)
    known_bytes = hardware.capacity_bytes if hardware.device != "sim" else None
    budget_bytes = parse_size(vram, whole_bytes=known_bytes, name="vram")
    ram_bytes = ram_budget(ram, () if isinstance(graph, Declared) else graph.modules.values())
    reserve_bytes = None if reserve is None else parse_size(reserve, name="reserve")
    if not isinstance(graph, Declared):
        if until is not None:
            raise InputError("until names a stage of a graph; a pipeline's call has none: leave it out")
        return graph.problem(inputs or {}, hardware, budget_bytes, ram_bytes, (tuple(keep), tuple(exclude), reserve_bytes))
    graph = graph if until is None else graph.until(until)
    graph = graph.directed(keep, exclude, reserve_bytes, pin)
    values = graph.for_planning(inputs or {})

    from graphrun.files import Store
    from graphrun.profile.problems import Limits
    from graphrun.store import problem_for

    host = _host_limits(ram_bytes, pinned, disk, runs)
    limits = Limits(budget_bytes, ram_bytes, *host, runs, graph.allowed(allow))
    problem = problem_for(graph, values, hardware, limits, Store(cache) if cache is not None else None)
    problem = replace(problem, until=until or "")
    handed = tuple(dict.fromkeys(name.partition(".")[0] for name in precomputed))
    return _handed_in(problem, graph, handed) if handed else problem


def _host_limits(ram_bytes: int, pinned: str | int | None, disk: str | int | None, runs: int) -> tuple[int | None, int | None]:
    """Budgets of page-locked RAM and disk in bytes; InputError for what is none, or for a session without a run."""
    if runs < 1:
        raise InputError(f"runs {runs}: a session has one run at least")
    pinned_bytes = None if pinned is None else parse_size(pinned, whole_bytes=ram_bytes, name="pinned")
    return pinned_bytes, None if disk is None else parse_size(disk, name="disk")


def precomputed(
    graph: Graph,
    inputs: Mapping[str, Any] | None = None,
    *,
    hardware: str | Hardware | None = None,
    cache: Path,
    what: What = "encoded",
    allow: Iterable[str] = (),
    until: str | None = None,
) -> dict[str, Any]:
    """Values that earlier runs left in the folder ``cache`` for these very ``inputs``, by name as in ``encode.embeds``.

    Hand them to `estimate` and `run` as ``precomputed``: what only made them is then neither planned nor loaded. ``what``: ``encoded``,
    the outputs of `encode_prompt`; ``all``, latents too. A value counts where everything that made it is the same: weights,
    precision, code, versions, device, inputs.
    """
    from graphrun.batch.cache.reuse import reuse_for

    graph = graph if until is None else graph.until(until)
    return reuse_for(graph, graph.resolve(inputs or {}), _hardware(hardware, cache), cache, what, graph.allowed(allow)).find()


def survey(
    graph: Graph,
    *,
    hardware: str | Hardware | None = None,
    inputs: Mapping[str, Any] | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """What ``graph`` takes, part by part and without a budget, as JSON-ready data: weights by precision, activations, values,
    FLOPs and seconds, each with its basis: what earlier runs measured, as ``cache`` knows it, before what was traced. Arguments as
    for `estimate`.
    """
    hardware = _hardware(hardware, cache)
    values = graph.for_planning(inputs or {})

    from graphrun.files import Store
    from graphrun.profile.survey import survey as look
    from graphrun.store import dry_run

    store = Store(cache) if cache is not None else None
    return look(graph, dry_run(graph, values, store), hardware, values, store)


def plan(problem: Problem, *, cache: Path | None = None, solved: Callable[[float], None] | None = None) -> Solution:
    """The fastest schedule that fits, with its proof. Raises Infeasible, which names what does not fit and what would.

    ``cache`` is a folder where plans are kept; one found there is checked before it counts. ``solved`` is called with the seconds
    that solving took, where it was solved.
    """
    from graphrun.files import Store
    from graphrun.store import solution_for

    return solution_for(problem, Store(cache) if cache is not None else None, solved)


def run(
    solution: Solution,
    graph: Graph,
    inputs: Mapping[str, Any] | None = None,
    *,
    modules: Mapping[str, Any] | None = None,
    random_weights: bool = False,
    progress: Callable[[int, int, int], None] | None = None,
    tell: Callable[[str], None] | None = None,
    cache: Path | None = None,
    precomputed: Mapping[str, Any] | None = None,
    reuse: What = "encoded",
    note: Callable[[str], None] | None = None,
) -> Trace:
    """Runs ``graph`` by ``solution`` and returns the trace; ``trace.outputs`` holds the pictures.

    ``inputs`` may differ from the planned ones in texts and seeds only. ``modules`` are components built before (to run several
    times without loading twice). ``random_weights`` ignores the graph's source. What is measured is kept in the folder ``cache``,
    for the next `estimate` with it, and so are outputs of stages, for `precomputed`: those that ``reuse`` names (``encoded``, ``all``,
    ``none``). ``precomputed``: the values that the plan counts on. ``note`` is told why outputs are not kept where the folder will not
    do. Where the device has less memory than planned, or a stage takes more, the rest is planned again and the run goes on;
    ``tell`` gets one line each time. Raises PlanError before anything is loaded when the plan is not for this graph or breaks a
    rule; OutOfMemory when no plan fits what is left, with what finished stages made saved and named; TransferFailed or BrokenPlan
    when reality differs otherwise. The device is back at its baseline then.
    """
    from graphrun.batch.cache.reuse import reuse_for
    from graphrun.profile.machine import host_ram_bytes, taken_bytes
    from graphrun.runtime.devices.open import open_device
    from graphrun.runtime.executor import refuse_unfit
    from graphrun.runtime.recovery import execute

    problem = solution.problem
    graph = graph.until(problem.until) if problem.until else graph
    graph = graph.without_sources() if random_weights else graph
    values, left = planned_inputs(problem, graph, inputs or {}), graph.with_precomputed(problem.precomputed)
    refuse_unfit(problem, solution.plan, left)
    stages: dict[str, Any] = {"precomputed": _handed(left, precomputed or {})}
    if cache is not None and not modules and reuse != "none":
        from graphrun.batch.cache.keys import way_of

        way, keeper = way_of(problem, solution.plan), reuse_for(graph, values, problem.hardware, cache, reuse, (), note)
        stages["after_stage"] = lambda stage, outputs: keeper.keep(stage, outputs, way)
    stages["ram_bytes"] = host_ram_bytes() + taken_bytes((modules or {}).values())
    trace = execute(problem, solution.plan, left, values, open_device(problem), modules, progress, tell=tell, **stages)
    if cache is not None:
        from graphrun.files import Store
        from graphrun.profile.feedback import remember

        remember(problem, solution.plan, trace, Store(cache))
    return trace


def from_pipeline(pipe: Any) -> LivePipeline:
    """``pipe``, a diffusers pipeline, as something that `estimate` plans: its weights may be on the CPU or on meta, and stay there.

    ``estimate(from_pipeline(pipe), vram="8G", inputs={"prompt": "a lighthouse", "height": 1024})``. Raises InputError.
    """
    from graphrun.diffusers_.description import LivePipeline

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
    from graphrun.diffusers_.attach import Attachment, demands_of, hardware_of
    from graphrun.diffusers_.live import components_of
    from graphrun.diffusers_.proxy import refuse_placed
    from graphrun.profile.machine import ram_budget
    from graphrun.runtime.devices.open import open_hardware

    refuse_placed(pipe)
    place = hardware_of(device, hardware)
    opened = open_hardware(place) if device is None or isinstance(device, str) else device
    budget_bytes = parse_size(vram, whole_bytes=place.capacity_bytes if place.device != "sim" else None, name="vram")
    ram_bytes = ram_budget(ram, components_of(pipe).values())
    reserve_bytes = None if reserve is None else parse_size(reserve, name="reserve")
    return Attachment(pipe, opened, place, budget_bytes, ram_bytes, demands_of(keep, exclude, reserve_bytes))


def run_many(
    graph: Graph,
    inputs: Iterable[Mapping[str, Any] | str | Request],
    *,
    common: Mapping[str, Any] | None = None,
    modules: Mapping[str, Any] | None = None,
    random_weights: bool = False,
    cache: Path | None = None,
    reuse: What = "encoded",
    resume: Path | None = None,
    strict: bool = False,
    sink: Sink | None = None,
    watcher: Watcher | None = None,
    device: Device | None = None,
    note: Callable[[str], None] | None = None,
    **budgets: Any,
) -> Batch:
    """What came of each of ``inputs``: mappings of inputs, or texts, each a prompt. ``common`` holds inputs of all.

    Item by item or stage by stage, in groups that fit, as is predicted fastest; loaded weights stay from run to run where the plan
    says so, and equal stages run once. ``budgets`` and what else is demanded are `estimate`'s arguments. ``resume`` is a folder for
    the state of the batch: called again with it, the batch goes on from its last finished item, stage or denoising step, with the
    same bits in the end. ``sink`` takes each item's outputs as they come and returns their files, else they are in the result.
    An item whose run fails is in the result's ``errors``; with ``strict`` it is raised at once. Others are as for `run`.
    """
    from graphrun.batch import queue as many
    from graphrun.batch.cache.reuse import reuse_for
    from graphrun.batch.journal import Journal
    from graphrun.batch.requests import listed, refuse_broken, resolved
    from graphrun.batch.watch import Watcher as Watching
    from graphrun.profile.machine import ram_budget

    until, hardware = budgets.pop("until", None), _hardware(budgets.pop("hardware", None), cache)
    graph = graph if until is None else graph.until(until)
    graph = graph.without_sources() if random_weights else graph
    requests = resolved(listed(inputs), graph, common or {})
    if strict:
        refuse_broken(requests)
    allow = graph.allowed(budgets.get("allow", ()))
    budgets["ram"] = ram_budget(budgets.get("ram", "auto"), (modules or {}).values())  # what is left changes meanwhile

    def estimated(values: Mapping[str, Any]) -> Problem:
        return estimate(graph, inputs=values, hardware=hardware, cache=cache, **budgets)

    def keeper(values: Mapping[str, Any]) -> Reuse:
        assert cache is not None
        return reuse_for(graph, values, hardware, cache, reuse, allow, note)

    means = many.Means(
        estimate=estimated,
        solve=lambda problem: plan(problem, cache=cache),
        device_name=f"{hardware.device} {hardware.name}",
        reuse=keeper if cache is not None and not modules and reuse != "none" else None,
        modules=modules,
        journal=Journal(resume) if resume is not None else None,
        device=device,
        sink=sink,
        watcher=watcher or Watching(),
        strict=strict,
    )
    return many.run_requests(graph, requests, means)


def planned_inputs(problem: Problem, graph: Graph, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """``inputs`` completed from the plan's settings and the graph's defaults.

    Raises PlanError when one that the plan depends on differs from what was planned.
    """
    from graphrun.graph.settings import completed

    return completed(graph.until(problem.until) if problem.until else graph, problem.settings, inputs)


def _handed_in(problem: Problem, graph: Graph, precomputed: tuple[str, ...]) -> Problem:
    from graphrun.model.precomputed import without

    left = graph.with_precomputed(precomputed)
    return without(problem, [stage.name for stage in left.stages], precomputed, left.digest)


def _handed(graph: Graph, precomputed: Mapping[str, Any]) -> dict[str, Any]:
    """The values of ``precomputed`` that ``graph`` counts on. Raises PlanError naming one that is not there."""
    wanted = [str(reference).removeprefix("$") for reference in graph.precomputed]
    if missing := [name for name in wanted if name not in precomputed]:
        raise PlanError(f"the plan counts on {', '.join(missing)}, made before: hand it in as given=, or plan without")
    return {name: precomputed[name] for name in wanted}


def _hardware(asked: str | Hardware | None, cache: Path | None) -> Hardware:
    """The hardware meant: as it is, by name (a profile or a prior), or where nothing is given the card found, else a prior."""
    from graphrun.profile.hardware_profiles import chosen

    return chosen(asked, cache)

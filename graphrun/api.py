"""The public functions of `graphrun`. They import on call: ``import graphrun`` stays fast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graphrun.devices import Budget
from graphrun.disk_store import Store, store_in
from graphrun.errors import InputError, PlanError
from graphrun.graph.values import as_path, strings
from graphrun.notices import without_notices
from graphrun.trace import warn_of

RUNS = 100  # of a session by default: the first run, which loads, counts little


if TYPE_CHECKING:
    from graphrun.batch.cache.reuse import What
    from graphrun.diffusers_.attach import Attachment
    from graphrun.diffusers_.description import LivePipeline
    from graphrun.diffusers_.strategy import OffloadStrategy
    from graphrun.graph.graph import Graph
    from graphrun.graph.parts import Directives
    from graphrun.hook import Hook, ProgressCallback
    from graphrun.model.hardware import Hardware
    from graphrun.model.problem import Problem, ProblemLimits
    from graphrun.model.solution import Solution
    from graphrun.ops.steps import StepJournal
    from graphrun.runtime.devices.device import Device
    from graphrun.trace import Trace


def load(
    path: str | Path,
    *,
    trust: Iterable[str] = (),
    source: str | None = None,
    dtype: str | None = None,
    absent: Iterable[str] = (),
) -> Graph:
    """Return the graph in the YAML file ``path``, or graphrun's own of that name: ``"flux-dev"``.

    By default the file may name modules, schedulers, tokenizers, processors and pipelines of
    diffusers and transformers. ``trust``: packages of which it may name any class, and so run code.
    The file's own ``allow:`` only requests them. ``source``: a folder, file or repository
    (``owner/name@revision``) in place of the graph's own ``source:``. ``dtype``: ``"float32"``,
    ``"bfloat16"`` or ``"float16"``, in place of the graph's 16-bit dtypes, as ``torch_dtype`` in
    diffusers' `from_pretrained`. ``absent``: components to leave out; the pipeline gets None, as
    with ``from_pretrained(text_encoder_3=None)``. Raises GraphError with file and line.

    Example:

        graph = graphrun.load("flux-dev")
        graph = graphrun.load("graphs/flux-dev.yaml", dtype="float16")
    """
    from graphrun.graph.loading import load as read

    return read(path, trust, source, dtype, absent)


def estimate(
    graph: Graph | LivePipeline,
    *,
    vram: str | int | Sequence[str | int] | None = None,
    ram: str | int = "auto",
    memory: str | int | None = None,
    pinned: str | int | None = None,
    disk: str | int | None = None,
    runs: int = 1,
    allow: Iterable[str] = (),
    hardware: str | Hardware | Sequence[str | Hardware] | None = None,
    inputs: Mapping[str, Any] | None = None,
    keep: Iterable[str] = (),
    exclude: Iterable[str] = (),
    pin: Iterable[str] = (),
    reserve: str | int | None = None,
    until: str | None = None,
    precomputed: Iterable[str] = (),
    cache: str | Path | None = None,
) -> Problem:
    """Return the planning problem of running ``graph`` within its budgets.

    It comes from a dry run, which needs no weights and no GPU.

    ``vram``, ``ram``  sizes such as ``"8G"``, or bytes; ``vram="50%"`` is a share of the device;
                       ``ram="auto"`` is what the machine (or its cgroup) has left, plus the memory
                       of modules passed in. For several devices, ``vram="24G,12G"`` or a list: the
                       first computes and streams, on the others whole components may compute
    ``memory``         on a CPU or a GPU that shares memory, in place of both: what the process may
                       take in total, such as ``"8G"``; ``"50%"`` is a share of the machine's
                       memory; ``"auto"`` is what the process takes and what the machine has left,
                       less 5 %. Without ``hardware`` it means this machine's GPU if that shares
                       its memory, else its CPU
    ``pinned``         limit of page-locked RAM
    ``disk``           limit of bytes written to disk
    ``runs``           above 1: a session of one cold first run and ``runs - 1`` warm runs
    ``allow``          what may change outputs, as ``--allow`` takes it: ``precision``, ``4bit``,
                       ``nf4``, ``cpu``, ``tiling``, ``split``, ``compile``, ...
    ``hardware``       a card or CPU (docs/estimating.md has the names), or a profile that
                       ``graphrun calibrate`` saved in ``cache``; None: the CUDA device found, else
                       rtx4090. For several devices one for each, or one for all
    ``inputs``         inputs of the graph; of a pipeline (`from_pipeline`) the arguments of a call
    ``keep``           components that stay on the device from their first use to the end
    ``exclude``        components that are always streamed, with no block kept on the device
    ``pin``            components whose backing store is page-locked
    ``reserve``        part of the VRAM budget left to other programs. ``keep``, ``exclude``,
                       ``pin`` and ``reserve`` add to the graph's own directives
    ``until``          a stage: plan only what its outputs need; a run returns these outputs
    ``precomputed``    names of values (or of their stages) that a run gets ready-made, such as the
                       results of `precomputed`: their stages are not planned, and components that
                       only they use are not loaded
    ``cache``          a folder of dry runs and problems; a problem found there is returned without
                       importing torch

    Raises InputError for arguments that mean nothing.

    Example:

        graph = graphrun.load("flux-dev")
        problem = graphrun.estimate(graph, vram="8G", ram="64G", hardware="rtx4090")
    """
    from graphrun.devices import cards_for, limits_for, parse_limit, share_of
    from graphrun.graph.graph import Graph as Declared
    from graphrun.graph.graph import require_graph
    from graphrun.graph.parts import Directives

    if not isinstance(graph, Declared):
        from graphrun.diffusers_.description import LivePipeline

        require_graph(graph, "estimate", LivePipeline)
    cache = as_path(cache)
    card, *_ = cards = cards_for(vram, memory, hardware, cache=cache)
    if card.unified and strings(pin):
        raise InputError(
            f"pin {', '.join(strings(pin))}: {'a CPU' if card.kind.is_host else card.name} has no "
            "page-locked copies of weights: leave it out, or keep the component in memory with keep"
        )
    modules = () if isinstance(graph, Declared) else graph.modules.values()
    limits = limits_for(Budget(vram, ram, pinned, disk, memory), cards, modules)
    reserve_bytes = parse_limit(reserve, "reserve")
    if isinstance(graph, Declared) and graph.processes > 1:
        card, limits, group_bytes = share_of(graph.processes, card, limits)
        reserve_bytes = (reserve_bytes or 0) + group_bytes
    if not isinstance(graph, Declared):
        demands = Directives(strings(keep), strings(exclude), reserve_bytes or 0)
        return _live_problem(graph, inputs or {}, card, limits, demands, until)
    graph, inputs = (
        graph.until(until).directed(keep, exclude, reserve_bytes, pin).for_first(inputs or {})
    )
    values = graph.for_planning(inputs)

    from graphrun.model.precomputed import without
    from graphrun.profile.four_bits import refuse_other_formats
    from graphrun.store import problem_for

    if runs < 1:
        raise InputError(f"runs {runs}: a session has at least one run")
    permissions = graph.allowed(allow)
    refuse_other_formats(permissions, card)
    limits = replace(limits, runs=runs, allow=permissions, keeps_quantized=cache is not None)
    problem = replace(problem_for(graph, values, card, limits, store_in(cache)), until=until or "")
    stages = tuple(dict.fromkeys(name.partition(".")[0] for name in strings(precomputed)))
    if not stages:
        return problem
    graph = graph.with_precomputed(stages)
    return without(problem, [stage.name for stage in graph.stages], stages, graph.digest)


def _live_problem(
    pipeline: LivePipeline,
    inputs: Mapping[str, Any],
    card: Hardware,
    limits: ProblemLimits,
    demands: Directives,
    until: str | None,
) -> Problem:
    """Return the problem of a call of ``pipeline``. Raises InputError with ``until``."""
    if until is not None:
        raise InputError("until names a stage of a graph; a pipeline's call has none: leave it out")
    if card.kind.is_host:
        from graphrun.runtime.devices.cpu import CpuDevice

        card = replace(card, context_bytes=CpuDevice(card).measured_context())
    limits = replace(limits, pinned_bytes=None, disk_bytes=None)
    return pipeline.problem(inputs, card, limits, demands)


def precomputed(
    graph: Graph,
    inputs: Mapping[str, Any] | None = None,
    *,
    hardware: str | Hardware | None = None,
    cache: str | Path,
    reuse: What = "encoded",
    allow: Iterable[str] = (),
    until: str | None = None,
) -> dict[str, Any]:
    """Return stage outputs that earlier runs with the same ``inputs`` cached, by name.

    Names are like ``encode.embeds``. Pass the outputs to `estimate` and `run` as ``precomputed``.
    ``cache``: the folder. ``reuse``: ``encoded`` for the outputs of `encode_prompt`, ``all`` for
    latents too. A value is found only if everything it depends on is equal: weights, precision,
    code, versions, device, inputs.

    Example:

        values = graphrun.precomputed(graph, {"prompt": "a cat"}, hardware="rtx4090", cache=folder)
        problem = graphrun.estimate(graph, vram="8G", hardware="rtx4090", precomputed=values)
    """
    from graphrun.batch.cache.reuse import reuse_for
    from graphrun.devices import hardware_for
    from graphrun.graph.graph import require_graph

    require_graph(graph, "precomputed")
    cache = Path(cache)
    graph, inputs = graph.until(until).for_first(inputs or {})
    return reuse_for(
        graph,
        graph.resolve(inputs),
        hardware_for(hardware, cache=cache).label,
        cache,
        reuse,
        graph.allowed(allow),
    ).find()


def survey(
    graph: Graph,
    *,
    hardware: str | Hardware | None = None,
    memory: str | int | None = None,
    ram: str | int | None = None,
    inputs: Mapping[str, Any] | None = None,
    mode: str = "resident",
    precision: Iterable[str] = (),
    batch: int | None = None,
    option: Iterable[str] = (),
    keep: Iterable[str] = (),
    cpu: Iterable[str] = (),
    pinned: bool = True,
    library: Iterable[str] = (),
    attention: str | None = None,
    cache: str | Path | None = None,
) -> dict[str, Any]:
    """Return what ``graph`` needs without a budget, as JSON-ready data.

    These are weights by precision, activations, values, FLOPs and seconds.

    ``memory``     on a CPU or a GPU that shares memory: the memory in which it has to fit; None:
                   all of this machine's
    ``ram``        host memory for the weights that diffusers offloads; weights beyond it are read
                   from disk whenever they are copied; ``"auto"``: what this machine has left;
                   None: all weights
    ``mode``       how diffusers would place it: ``resident``, ``model``, ``sequential``, ``group``
                   or ``leaf`` (`profile.modes`)
    ``precision``  ``nf4`` or ``transformer=nf4``: replaces the graph's own
    ``batch``      pictures per prompt
    ``option``     ``decode=tiling``: a stage option to run a stage with
    ``keep``       components that stay on the device in ``group`` and ``leaf``
    ``cpu``        components that compute on the CPU
    ``pinned``     whether blocks of ``group`` and ``leaf`` are page-locked
    ``library``    ``bitsandbytes=0.45``: as this version places weights, not the installed one
    ``attention``  seconds with the rate of this kernel, ``sage`` or ``fa3``, not PyTorch's

    Each number has its basis; measurements of earlier runs in ``cache`` replace traced numbers.
    Other arguments are as for `estimate`. Raises InputError for arguments that mean nothing.

    Example:

        needs = graphrun.survey(graph, hardware="rtx4090", precision=["transformer=nf4"])
        print(needs["all_resident"]["peak_bytes"], needs["mode"]["seconds"])
    """
    from graphrun.devices import cards_for, limits_for, memory_budget, refuse_wrong_budgets
    from graphrun.graph.graph import require_graph
    from graphrun.profile.asked import (
        ATTENTION,
        options_by_stage,
        pictures_input,
        with_attention,
        with_precisions,
    )

    require_graph(graph, "survey")
    cache = as_path(cache)
    card, *_ = cards_for(None, memory, hardware, cache=cache)
    if memory is not None:
        refuse_wrong_budgets(card, Budget(memory=memory))
        card = replace(card, capacity_bytes=memory_budget(memory, card))
    if attention is not None:
        card = with_attention(card, attention)
    graph, formats = with_precisions(graph, precision)
    options = options_by_stage(graph, option)
    graph, inputs = graph.for_first(inputs or {})
    planning_inputs = dict(inputs) | ({pictures_input(graph): batch} if batch is not None else {})
    values = graph.for_planning(planning_inputs)

    from graphrun.profile.modes import parse_mode as mode_called
    from graphrun.profile.survey import survey as look
    from graphrun.store import dry_run

    ram_bytes = (
        limits_for(Budget(vram=card.capacity_bytes, ram=ram), [card]).ram_bytes
        if ram is not None and not card.unified
        else None
    )
    placement = mode_called(
        mode, graph, formats, keep, cpu, pinned=pinned, ram_bytes=ram_bytes, libraries=library
    )
    store = store_in(cache)
    recording = dry_run(graph, values, store, options)
    kernel = f"{attention}: {ATTENTION[attention]}" if attention is not None else ""
    return look(graph, recording, card, values, store, placement) | {"attention": kernel}


def plan(
    problem: Problem,
    *,
    cache: str | Path | None = None,
    on_solved: Callable[[float], None] | None = None,
) -> Solution:
    """Return the fastest plan that fits, with its proof.

    ``cache``: a folder of plans; a plan found there is checked before it is used. ``on_solved`` is
    called with the seconds that solving took, unless the plan was found. Raises Infeasible, which
    names what does not fit and which budgets are enough. Ctrl-C raises PlanningInterrupted, a
    KeyboardInterrupt whose ``best()`` is the best plan so far, or None.

    Example:

        try:
            solution = graphrun.plan(problem)
        except graphrun.Infeasible as error:
            print(error)  # the minimum VRAM, and what helps
    """
    from graphrun.model.problem import Problem as Estimated
    from graphrun.store import solution_for

    if not isinstance(problem, Estimated):
        raise InputError(
            f"plan takes a problem, not {type(problem).__name__}: use graphrun.estimate"
        )
    return solution_for(problem, store_in(as_path(cache)), on_solved)


def run(
    solution: Solution,
    graph: Graph,
    inputs: Mapping[str, Any] | None = None,
    *,
    modules: Mapping[str, Any] | None = None,
    random_weights: bool = False,
    progress: ProgressCallback | None = None,
    tell: Callable[[str], None] | None = None,
    cache: str | Path | None = None,
    precomputed: Mapping[str, Any] | None = None,
    reuse: What = "encoded",
    note: Callable[[str], None] | None = None,
    check_ordering: bool = False,
    journal: StepJournal | None = None,
) -> Trace:
    """Run ``graph`` by ``solution``. Returns the trace; ``trace.outputs`` are the images.

    ``inputs``          may differ from the planned inputs in texts and seeds only
    ``modules``         components that are already built, to run several times without reading
                        weights again
    ``random_weights``  random weights instead of the weights of the graph's source
    ``progress``        a `Hook`; or a function, called with (slot, call, calls) at the start of
                        every call into a component
    ``cache``           a folder: measurements are saved there for the next `estimate`, stage
                        outputs for `precomputed`, and weights that the run quantizes
    ``reuse``           which stage outputs are cached: ``encoded``, ``all`` or ``none``
    ``precomputed``     the values that the plan needs ready-made
    ``tell``            called with one line for each replan, and for each component that is
                        quantized
    ``note``            called with the reason if outputs cannot be cached
    ``check_ordering``  on the simulated accelerator: look for data races, and raise the first
                        (graphrun/sim/ordering.py)
    ``journal``         gets the states of denoising loops after their steps, and may resume them
                        (`graphrun.ops.steps.Journal`)

    If copies do not overlap compute on the device, the run is planned again (`without_overlap`). If
    the device has less memory than planned, or a stage takes more, the remaining stages are planned
    again and the run continues. Raises PlanError before anything is loaded if the plan is not for
    this graph or breaks a rule; OutOfMemory if no plan fits the memory left (outputs of finished
    stages are saved, and named in the message); TransferFailed or BrokenPlan if execution differs
    from the plan otherwise. The device is back at its baseline in every case. Warns
    (RuntimeWarning) if a slot takes more than planned; ``trace.overruns`` has the slots.

    Example:

        trace = graphrun.run(solution, graph, {"prompt": "a lighthouse", "seed": 7})
        trace.outputs["image"].save("lighthouse.png")
    """
    from graphrun.batch.cache.keys import choices_of
    from graphrun.batch.cache.reuse import reuse_for
    from graphrun.graph.graph import require_graph
    from graphrun.host_ram import host_ram_bytes, taken_bytes
    from graphrun.model.solution import Solution as Planned
    from graphrun.profile.feedback import remember
    from graphrun.runtime.devices.open import open_device
    from graphrun.runtime.executor import refuse_unfit
    from graphrun.runtime.recovery import execute
    from graphrun.runtime.spool import spool_in

    cache = as_path(cache)
    if not isinstance(solution, Planned):
        raise InputError(f"run takes a solution, not {type(solution).__name__}: use graphrun.plan")
    require_graph(graph, "run")
    problem = solution.problem
    graph.refuse_list()
    graph = graph.until(problem.until)
    graph = graph.without_sources() if random_weights else graph
    values = planned_inputs(problem, graph, inputs or {})
    shorter_graph = graph.with_precomputed(problem.precomputed)
    refuse_unfit(solution, shorter_graph)
    options: dict[str, Any] = {
        "precomputed": _required_values(shorter_graph, precomputed or {}),
        "journal": journal,
    }
    device = open_device(problem, check_ordering=check_ordering)
    notes: list[str] = []
    solution = without_overlap(solution, device, cache=cache, tell=notes.append)
    if tell is not None and notes:
        tell(notes[0])
    if cache is not None and not modules and reuse != "none":
        choices = choices_of(solution)  # of the plan that runs: outputs depend on them
        outputs_cache = reuse_for(graph, values, problem.hardware.label, cache, reuse, (), note)
        options["after_stage"] = lambda stage, outputs: outputs_cache.keep(stage, outputs, choices)
    options["ram_bytes"] = host_ram_bytes() + taken_bytes((modules or {}).values())
    options["spool"] = spool_in(cache, tell)
    trace = execute(
        solution, shorter_graph, values, device, modules, progress, tell=tell, **options
    )
    trace = replace(trace, notes=(*notes, *trace.notes))
    if cache is not None and graph.processes == 1:  # else seconds are also those of other devices
        remember(solution, trace, Store(cache))
    warn_of(trace.overruns, stacklevel=2)
    return trace


def without_overlap(
    solution: Solution,
    device: Device,
    *,
    cache: str | Path | None = None,
    tell: Callable[[str], None] | None = None,
) -> Solution:
    """Return ``solution``, planned again if copies do not overlap compute as planned.

    Components keep precisions and backing stores. ``device``: opened for ``solution``.
    ``cache``: as for `plan`. ``tell``: called with one line if there is another plan. Raises
    Infeasible.
    """
    from graphrun.devices import as_opened
    from graphrun.model.choices import with_variants_of
    from graphrun.units import show_seconds

    problem = solution.problem
    hardware = as_opened(problem.hardware, device)
    if hardware == problem.hardware:
        return solution
    serial_problem = replace(with_variants_of(problem, solution.plan), hardware=hardware)
    serial_solution = plan(serial_problem, cache=cache)
    if tell is not None:
        tell(
            f"copies do not overlap compute on {hardware.name}: planned again, "
            f"{show_seconds(serial_solution.simulation.seconds)} instead of "
            f"{show_seconds(solution.simulation.seconds)}"
        )
    return serial_solution


def from_pipeline(pipe: Any) -> LivePipeline:
    """Wrap ``pipe``, a diffusers pipeline with weights on the CPU or on meta, for `estimate`.

    Its weights are not moved. Raises InputError.

    Example:

        inputs = {"prompt": "a lighthouse", "height": 1024}
        problem = graphrun.estimate(graphrun.from_pipeline(pipe), vram="8G", inputs=inputs)
        print(graphrun.plan(problem))
    """
    from graphrun.diffusers_.description import LivePipeline

    return LivePipeline(pipe)


def attach(
    pipe: Any,
    *,
    components: Mapping[str, Any] | None = None,
    entries: Iterable[str] = (),
    vram: str | int | Sequence[str | int] | None = None,
    ram: str | int = "auto",
    pinned: str | int | None = None,
    disk: str | int | None = None,
    memory: str | int | None = None,
    budget: Budget | None = None,
    allow: Iterable[str] = (),
    hardware: str | Hardware | Sequence[str | Hardware] | None = None,
    device: str | Sequence[str] | Device | None = None,
    keep: Iterable[str] = (),
    exclude: Iterable[str] = (),
    pin: Iterable[str] = (),
    reserve: str | int | None = None,
    between_calls: Literal["warm", "empty"] = "warm",
    cache: str | Path | None = None,
    tell: Callable[[str], None] | None = None,
    hook: Hook | None = None,
) -> Attachment:
    """Manage where the weights of ``pipe`` are, a diffusers pipeline on the CPU.

    Replaces ``pipe.to("cuda")`` and ``enable_model_cpu_offload()``. With ``device="cpu"`` the
    pipeline computes on the CPU within ``memory``. ``pipe`` may also be any object that owns
    modules and computes on its ``device``.

    Each call of the pipeline (and of its methods and components) is planned within the budgets from
    a dry run of that call, then executed by the plan. Results equal those of a pipeline that is
    entirely on the device. ``attached.report()`` shows planned and measured numbers of the last
    call. ``attached.detach()``, or leaving it as a context manager, undoes it.

    ``components``     of an object that is no pipeline of diffusers: all of its modules with
                       weights, by names for the plan
    ``entries``        the methods of such an object that are planned; its other methods run
                       unchanged
    ``between_calls``  ``warm``: a call is planned as one of many similar ones, and weights stay on
                       the device as its plan says; ``empty``: nothing stays. `Attachment.release`
                       empties the device on demand, and so does an error
    ``budget``         replaces ``vram``, ``ram``, ``pinned``, ``disk`` and ``memory``: pipelines
                       attached with one `Budget` share it. The called pipeline gets all of it; the
                       weights of the others are evicted, least recently called first
    ``vram``           None or ``auto``: the free memory of the device now, less 5 %; ``["24G",
                       "12G"]`` for several devices. On a GPU that shares memory, ``ram="auto"`` is
                       what ``vram`` leaves of it
    ``memory``         on a CPU, in place of ``vram`` and ``ram``: what this process may take in
                       total, such as ``"8G"``; None or ``auto``: what it takes and what this
                       machine has left, less 5 %. Weights that are mapped from files, as
                       `from_pretrained` loads them, are read from these files, which must not
                       change; all others stay in memory
    ``allow``          ``cpu``: components may compute there, which changes outputs
    ``device``         ``cuda``, ``sim``, ``cpu``, ``["cuda:0", "cuda:1"]``, or a
                       `graphrun.runtime.devices.device.Device`
    ``cache``          a folder of dry runs and plans: a call of a kind that was planned there
                       before is not planned again
    ``tell``           called with one line when a call is planned, which takes seconds; the line is
                       logged too (``logging``, INFO)
    ``hook``           sees each run of a plan while it happens

    Other arguments are as for `estimate`. Raises InputError for arguments that mean nothing, and if
    something else moves the weights already. A call raises ProbeError or Infeasible if it cannot be
    planned.

    Example:

        with graphrun.attach(pipe, vram="8G") as attached:
            image = pipe("a lighthouse").images[0]
            print(attached.report())
    """
    with without_notices():
        from graphrun.diffusers_.attach import Attachment
    from graphrun.devices import devices_for, parse_limit
    from graphrun.diffusers_.live import components_of
    from graphrun.diffusers_.proxy import refuse_placed, refuse_unnamed
    from graphrun.graph.parts import Directives
    from graphrun.store import CallStore

    cache, methods = as_path(cache), strings(entries)
    refuse_unnamed(pipe, components, methods)
    refuse_placed(pipe)
    if "split" in strings(allow):
        raise InputError(
            "allow split: the calls of an attached pipeline are not split into samples; type "
            "graphrun import FOLDER -o NAME.yaml, then graphrun run NAME.yaml --allow split"
        )
    arguments = Budget(vram, ram, pinned, disk, memory)
    if budget is not None and vars(arguments) != vars(Budget()):
        raise InputError("budget has vram, ram, pinned, disk and memory already: leave those out")
    if between_calls not in ("warm", "empty"):
        raise InputError(f"between_calls {between_calls!r} is not known; use warm or empty")
    budget = budget or arguments
    main_device, cards, limits = devices_for(
        budget, hardware, device, components_of(pipe, components).values(), cache
    )
    limits = replace(limits, runs=RUNS if between_calls == "warm" else 1, allow=strings(allow))
    demands = Directives(
        strings(keep), strings(exclude), parse_limit(reserve, "reserve") or 0, strings(pin)
    )
    store = CallStore(Store(cache)) if cache is not None else None
    return Attachment(
        pipe, main_device, cards[0], limits, demands, budget, tell, store, components, methods, hook
    )


def strategy(vram: str | int, *, reserve: str | int | None = None) -> OffloadStrategy:
    """Return an offload strategy with a budget, for diffusers' `ComponentsManager`.

    diffusers' default decides by the free memory. This strategy decides by a plan. It notes the
    bytes of the components and the order of their uses. When an order comes back, it evicts the
    components whose eviction moves the fewest bytes over the next uses. Before that, it evicts the
    fewest bytes, and among equal ones the least recently used.

    ``vram``     budget of the components on the device and all other tensors of the program, in
                 bytes, or a size such as ``"8G"``
    ``reserve``  part of ``vram`` that weights leave free for activations, in bytes or as a size.
                 None: a quarter of ``vram``; where the device reports its peak memory (CUDA), after
                 the first use of a component what it was seen to need. Fragments of the allocator
                 are not counted

    A strategy serves one manager on one device. ``strategy.report()`` returns a line about its
    copies, in bytes. Components move as a whole: `attach` streams one that is too large. Raises
    InputError for a text that is not a size, and for a reserve that is not below the budget.

    Example:

        manager.enable_auto_cpu_offload("cuda", offload_strategy=graphrun.strategy("8G"))
    """
    from graphrun.devices import parse_limit
    from graphrun.units import parse_size

    budget_bytes, reserve_bytes = parse_size(vram, name="vram"), parse_limit(reserve, "reserve")
    if reserve_bytes is not None and reserve_bytes >= budget_bytes:
        raise InputError(
            f"reserve {reserve}: is no less than vram {vram}, which leaves nothing for components: "
            "give a smaller one"
        )
    with without_notices():
        from graphrun.diffusers_.strategy import OffloadStrategy
    return OffloadStrategy(budget_bytes, reserve_bytes)


def planned_inputs(problem: Problem, graph: Graph, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``inputs`` completed from the plan's settings and the graph's defaults.

    Raises PlanError if an input that the plan depends on differs from the planned value.
    """
    from graphrun.graph.settings import completed

    return completed(graph.until(problem.until), problem.settings, inputs)


def _required_values(graph: Graph, precomputed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``precomputed`` values that ``graph`` reads. Raises PlanError."""
    names = [str(reference).removeprefix("$") for reference in graph.precomputed]
    if absent_names := [name for name in names if name not in precomputed]:
        raise PlanError(
            f"the plan needs precomputed values: pass {', '.join(absent_names)} in precomputed=, "
            "or plan again without them"
        )
    return {name: precomputed[name] for name in names}

"""The public functions of `graphrun`.

Each imports what it needs when it is called, so that ``import graphrun`` stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graphrun.errors import InputError, PlanError
from graphrun.files import Store
from graphrun.graph.values import strings
from graphrun.notices import without_notices
from graphrun.trace import warn_of
from graphrun.units import parse_size

RUNS = 100  # of a session by default: enough that the first run, which loads, counts little


@dataclass(frozen=True, eq=False)
class Budget:
    """Memory limits for attached pipelines, each alone or several together.

    ``budget = graphrun.Budget("12G")``, then ``graphrun.attach(pipe, budget=budget)`` for each
    pipeline. Sizes are as for `estimate`; ``vram`` None: the free memory of the device when a
    pipeline is attached, less a twentieth. ``memory`` is the budget of a CPU in place of both.
    Raises InputError for a text that is not a size.
    """

    vram: str | int | Sequence[str | int] | None = None
    ram: str | int = "auto"
    pinned: str | int | None = None
    disk: str | int | None = None
    memory: str | int | None = None

    def __post_init__(self) -> None:
        devices = self.vram.split(",") if isinstance(self.vram, str) else self.vram
        devices = devices if isinstance(devices, (list, tuple)) else (devices,)
        sizes = [("vram", size) for size in devices] + [
            (name, getattr(self, name)) for name in ("ram", "pinned", "disk", "memory")
        ]
        for name, size in sizes:
            if size not in (None, "auto"):
                is_positive = name in ("vram", "memory")
                parse_size(size, whole_bytes=1 << 62, name=name, minimum=int(is_positive))


if TYPE_CHECKING:
    from graphrun.batch.cache.reuse import What
    from graphrun.diffusers_.attach import Attachment
    from graphrun.diffusers_.description import LivePipeline
    from graphrun.graph.graph import Graph
    from graphrun.model.problem import Hardware, Problem
    from graphrun.model.solution import Solution
    from graphrun.ops.steps import StepJournal
    from graphrun.runtime.devices.device import Device
    from graphrun.trace import Trace


def load(path: str | Path, *, trust: Iterable[str] = (), source: str | None = None) -> Graph:
    """Return the graph in the YAML file ``path``, or graphrun's own of that name: ``"flux-dev"``.

    By default the file may name modules, schedulers, tokenizers, processors and pipelines of
    diffusers and transformers. ``trust``: packages of which it may name any class, and so run code.
    The file's own ``allow:`` only requests them. ``source``: a folder, file or repository
    (``owner/name@revision``) in place of the graph's own ``source:``. Raises GraphError with file
    and line.
    """
    from graphrun.graph.loading import load as read

    return read(path, trust, source)


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
    cache: Path | None = None,
) -> Problem:
    """Return the planning problem of running ``graph`` within its budgets.

    It comes from a dry run, which needs no weights and no GPU.

    ``vram``, ``ram``  sizes such as ``"8G"``, or bytes; ``vram="50%"`` is a share of the device;
                       ``ram="auto"`` is what the machine (or its cgroup) has left, plus the memory
                       of modules passed in. For several devices, ``vram="24G,12G"`` or a list: the
                       first computes and streams, on the others whole components may compute
    ``memory``         on a CPU, in place of both: what the process may take in total, such as
                       ``"8G"``; ``"auto"`` is what this machine has left, less a twentieth
    ``pinned``         limit of page-locked RAM
    ``disk``           limit of bytes written to disk
    ``runs``           above 1: a session of one cold first run and ``runs - 1`` warm runs
    ``allow``          what may change outputs: ``precision`` (all that the graph lists) or one of
                       them, ``cpu``, ``tiling``, ``split``
    ``hardware``       a name from `graphrun.profile.hardware.data_sheet_estimates`, or of a profile
                       that ``graphrun calibrate`` saved in ``cache``; None: the CUDA device found,
                       else rtx4090. For several devices one for each, or one for all
    ``inputs``         inputs of the graph; of a pipeline (`from_pipeline`) the arguments of a call
    ``keep``           components that stay on the device from their first use to the end
    ``exclude``        components that are always streamed, with no block kept on the device
    ``pin``            components whose backing store is page-locked
    ``reserve``        part of the VRAM budget left to other programs. ``keep``, ``exclude``,
                       ``pin`` and ``reserve`` add to the graph's own directives
    ``until``          a stage: only what its outputs need is planned, and a run returns these
                       outputs
    ``precomputed``    names of values (or of their stages) that a run gets ready-made, such as the
                       results of `precomputed`: their stages are not planned, and components that
                       only they use are not loaded
    ``cache``          a folder of dry runs and problems; a problem found there is returned without
                       importing torch

    Raises InputError for arguments that mean nothing.
    """
    from graphrun.graph.graph import Directives
    from graphrun.graph.graph import Graph as Declared
    from graphrun.host_ram import ram_budget
    from graphrun.model.problem import Secondary
    from graphrun.profile.problems import ProblemLimits

    (hardware, budget_bytes), *other_devices = _devices(vram, ram, memory, hardware, cache)
    secondaries = tuple(Secondary(card, nbytes) for card, nbytes in other_devices)
    ram_bytes = (
        budget_bytes
        if hardware.unified
        else ram_budget(ram, () if isinstance(graph, Declared) else graph.modules.values())
    )
    reserve_bytes = _size(reserve, "reserve")
    if not isinstance(graph, Declared):
        if hardware.unified:
            from graphrun.runtime.devices.cpu import CpuDevice

            context_bytes = CpuDevice(hardware).measured_context()
            hardware = replace(hardware, context_bytes=context_bytes)
        if until is not None:
            raise InputError(
                "until names a stage of a graph; a pipeline's call has none: leave it out"
            )
        demands = Directives(strings(keep), strings(exclude), reserve_bytes or 0)
        return graph.problem(
            inputs or {},
            hardware,
            ProblemLimits(budget_bytes, ram_bytes, secondaries=secondaries),
            demands,
        )
    graph, inputs = (
        graph.until(until).directed(keep, exclude, reserve_bytes, pin).for_first(inputs or {})
    )
    values = graph.for_planning(inputs)

    from graphrun.model.precomputed import without
    from graphrun.store import problem_for

    if runs < 1:
        raise InputError(f"runs {runs}: a session has at least one run")
    host = _size(pinned, "pinned", ram_bytes), _size(disk, "disk")
    limits = ProblemLimits(budget_bytes, ram_bytes, *host, runs, graph.allowed(allow), secondaries)
    problem = replace(
        problem_for(graph, values, hardware, limits, _store(cache)), until=until or ""
    )
    if not (
        stages := tuple(dict.fromkeys(name.partition(".")[0] for name in strings(precomputed)))
    ):
        return problem
    shorter_graph = graph.with_precomputed(stages)
    return without(
        problem, [stage.name for stage in shorter_graph.stages], stages, shorter_graph.digest
    )


def precomputed(
    graph: Graph,
    inputs: Mapping[str, Any] | None = None,
    *,
    hardware: str | Hardware | None = None,
    cache: Path,
    reuse: What = "encoded",
    allow: Iterable[str] = (),
    until: str | None = None,
) -> dict[str, Any]:
    """Return stage outputs that earlier runs with the same ``inputs`` cached, by name.

    A name is like ``encode.embeds``; ``cache`` is the folder. Pass the outputs to `estimate` and
    `run` as ``precomputed``: their stages are then neither planned nor run, and components that
    only they use are not loaded. ``reuse``: ``encoded`` for the outputs of `encode_prompt`, ``all``
    for latents too. A value is found only if everything it depends on is equal: weights, precision,
    code, versions, device, inputs.
    """
    from graphrun.batch.cache.reuse import reuse_for

    graph, inputs = graph.until(until).for_first(inputs or {})
    return reuse_for(
        graph,
        graph.resolve(inputs),
        _hardware(hardware, cache).label,
        cache,
        reuse,
        graph.allowed(allow),
    ).find()


def survey(
    graph: Graph,
    *,
    hardware: str | Hardware | None = None,
    inputs: Mapping[str, Any] | None = None,
    mode: str = "resident",
    precision: Iterable[str] = (),
    batch: int | None = None,
    option: Iterable[str] = (),
    keep: Iterable[str] = (),
    cpu: Iterable[str] = (),
    pinned: bool = True,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Return what ``graph`` needs without a budget, as JSON-ready data.

    These are weights by precision, activations, values, FLOPs and seconds.

    ``mode``       how diffusers would place it: ``resident``, ``model``, ``sequential``, ``group``
                   or ``leaf`` (`profile.modes`)
    ``precision``  ``nf4`` or ``transformer=nf4``: replaces the graph's own
    ``batch``      pictures per prompt
    ``option``     ``decode=tiling``: a stage option to run a stage with
    ``keep``       components that stay on the device in ``group`` and ``leaf``
    ``cpu``        components that compute on the CPU
    ``pinned``     whether blocks of ``group`` and ``leaf`` are page-locked

    Each number has its basis; measurements of earlier runs in ``cache`` replace traced numbers.
    Other arguments are as for `estimate`. Raises InputError for arguments that mean nothing.
    """
    from graphrun.profile.asked import options_by_stage, pictures_input, with_precisions

    hardware = _hardware(hardware, cache)
    graph, formats = with_precisions(graph, precision)
    options = options_by_stage(graph, option)
    graph, inputs = graph.for_first(inputs or {})
    planning_inputs = dict(inputs) | ({pictures_input(graph): batch} if batch is not None else {})
    values = graph.for_planning(planning_inputs)

    from graphrun.profile.modes import parse_mode as mode_called
    from graphrun.profile.survey import survey as look
    from graphrun.store import dry_run

    placement = mode_called(mode, graph, formats, keep, cpu, pinned=pinned)
    store = _store(cache)
    return look(graph, dry_run(graph, values, store, options), hardware, values, store, placement)


def plan(
    problem: Problem, *, cache: Path | None = None, on_solved: Callable[[float], None] | None = None
) -> Solution:
    """Return the fastest plan that fits, with its proof.

    ``cache``: a folder of plans; a plan found there is checked before it is used. ``on_solved`` is
    called with the seconds that solving took, unless the plan was found. Raises Infeasible, which
    names what does not fit and which budgets are enough.

    Ctrl-C raises PlanningInterrupted, a KeyboardInterrupt whose ``best()`` is the best plan so far,
    or None.
    """
    from graphrun.store import solution_for

    return solution_for(problem, _store(cache), on_solved)


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
    check_ordering: bool = False,
    journal: StepJournal | None = None,
) -> Trace:
    """Run ``graph`` by ``solution``. Returns the trace; ``trace.outputs`` are the images.

    ``inputs``          may differ from the planned inputs in texts and seeds only
    ``modules``         components that are already built, to run several times without reading
                        weights again
    ``random_weights``  random weights instead of the weights of the graph's source
    ``progress``        called with (slot, call, calls) at the start of every call into a component
    ``cache``           a folder: measurements are saved there for the next `estimate`, and stage
                        outputs for `precomputed`
    ``reuse``           which stage outputs are cached: ``encoded``, ``all`` or ``none``
    ``precomputed``     the values that the plan needs ready-made
    ``tell``, ``note``  called with one line for each replan; with the reason if outputs cannot be
                        cached
    ``check_ordering``  on the simulated accelerator: look for data races, and raise the first
                        (graphrun/sim/ordering.py)
    ``journal``         gets the states of denoising loops after their steps, and may resume them
                        (`graphrun.ops.steps.Journal`)

    If the device has less memory than planned, or a stage takes more, the remaining stages are
    planned again and the run continues. Raises PlanError before anything is loaded if the plan is
    not for this graph or breaks a rule; OutOfMemory if no plan fits the memory left (outputs of
    finished stages are saved, and named in the message); TransferFailed or BrokenPlan if execution
    differs from the plan otherwise. The device is back at its baseline in every case. Warns
    (RuntimeWarning) if a slot takes more than planned; ``trace.overruns`` has the slots.
    """
    from graphrun.batch.cache.keys import choices_of
    from graphrun.batch.cache.reuse import reuse_for
    from graphrun.host_ram import host_ram_bytes, taken_bytes
    from graphrun.profile.feedback import remember
    from graphrun.runtime.devices.open import open_device
    from graphrun.runtime.executor import refuse_unfit
    from graphrun.runtime.recovery import execute

    problem = solution.problem
    graph.refuse_list()
    graph = graph.until(problem.until)
    graph = graph.without_sources() if random_weights else graph
    values, shorter_graph = (
        planned_inputs(problem, graph, inputs or {}),
        graph.with_precomputed(problem.precomputed),
    )
    refuse_unfit(solution, shorter_graph)
    options: dict[str, Any] = {
        "precomputed": _required_values(shorter_graph, precomputed or {}),
        "journal": journal,
    }
    if cache is not None and not modules and reuse != "none":
        choices, outputs_cache = (
            choices_of(solution),
            reuse_for(graph, values, problem.hardware.label, cache, reuse, (), note),
        )
        options["after_stage"] = lambda stage, outputs: outputs_cache.keep(stage, outputs, choices)
    options["ram_bytes"] = host_ram_bytes() + taken_bytes((modules or {}).values())
    device = open_device(problem, check_ordering=check_ordering)
    trace = execute(
        solution, shorter_graph, values, device, modules, progress, tell=tell, **options
    )
    if cache is not None:
        remember(solution, trace, Store(cache))
    warn_of(trace.overruns, stacklevel=2)
    return trace


def from_pipeline(pipe: Any) -> LivePipeline:
    """Wrap ``pipe``, a diffusers pipeline with weights on the CPU or on meta, for `estimate`.

    Its weights are not moved. ``estimate(from_pipeline(pipe), vram="8G", inputs={"prompt": "a
    lighthouse", "height": 1024})``. Raises InputError.
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
    cache: Path | None = None,
    tell: Callable[[str], None] | None = None,
) -> Attachment:
    """Manage where the weights of ``pipe`` are, a diffusers pipeline on the CPU.

    Replaces ``pipe.to("cuda")`` and ``enable_model_cpu_offload()``. ``pipe`` may also be any object
    that owns modules and computes on its ``device``.

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
                       "12G"]`` for several devices
    ``memory``         on a CPU, in place of ``vram`` and ``ram``: what this process may take in
                       total, such as ``"8G"``; None or ``auto``: what it takes and what this
                       machine has left, less a twentieth. Weights that are mapped from files, as
                       `from_pretrained` loads them, are read from these files
    ``allow``          ``cpu``: components may compute there, which changes outputs
    ``device``         ``cuda``, ``sim``, ``cpu``, ``["cuda:0", "cuda:1"]``, or a
                       `graphrun.runtime.devices.device.Device`
    ``cache``          a folder of dry runs and plans: a call of a kind that was planned there
                       before is not planned again
    ``tell``           called with one line when a call is planned, which takes seconds; the line is
                       logged too (``logging``, INFO)

    Other arguments are as for `estimate`. Raises InputError for arguments that mean nothing, and if
    something else moves the weights already. A call raises ProbeError or Infeasible if it cannot be
    planned.
    """
    with without_notices():
        from graphrun.diffusers_.attach import Attachment, hardware_of
    from graphrun.diffusers_.live import components_of
    from graphrun.diffusers_.proxy import refuse_placed, refuse_unnamed
    from graphrun.graph.graph import Directives
    from graphrun.host_ram import ram_budget
    from graphrun.model.problem import Secondary
    from graphrun.profile.problems import ProblemLimits
    from graphrun.profile.several import per_device
    from graphrun.runtime.devices.cpu import CpuDevice
    from graphrun.runtime.devices.device import Device as Opened
    from graphrun.runtime.devices.open import open_devices
    from graphrun.store import CallStore

    methods = strings(entries)
    refuse_unnamed(pipe, components, methods)
    refuse_placed(pipe)
    arguments = Budget(vram, ram, pinned, disk, memory)
    if budget is not None and vars(arguments) != vars(Budget()):
        raise InputError(
            "budget says what vram, ram, pinned, disk and memory would: leave those out"
        )
    if between_calls not in ("warm", "empty"):
        raise InputError(f"between_calls {between_calls!r}: it is warm or empty")
    budget = budget or arguments
    device_object = device if isinstance(device, Opened) else None
    if budget.memory is not None and device is None and hardware is None:
        device = "cpu"
    device_options = per_device(
        budget.vram, hardware, None if device_object is not None else device
    )
    cards = [
        hardware_of(device_object or options.device, options.hardware, cache)
        for options in device_options
    ]
    _require_one_kind(cards)
    memory_bytes = (
        _memory_bytes(cards[0], budget.vram, budget.ram, budget.memory)
        if cards[0].unified or budget.memory is not None
        else None
    )
    if device_object is None:
        main_device = open_devices(cards)
    elif len(device_object.all_devices) != len(cards):
        raise InputError(
            f"vram has budgets of {len(cards)} devices, and device is "
            f"{len(device_object.all_devices)}: give a budget for each"
        )
    else:
        main_device = device_object
    if isinstance(main_device, CpuDevice):
        cards = [replace(cards[0], context_bytes=main_device.measured_context())]
    rows = zip(device_options, cards, main_device.all_devices, strict=True)
    vram_bytes, *secondary_bytes = [
        memory_bytes
        if memory_bytes is not None
        else _free_bytes(target, card)
        if row.vram in (None, "auto")
        else _vram_bytes(row.vram, card)
        for row, card, target in rows
    ]
    secondaries = tuple(
        Secondary(card, nbytes) for card, nbytes in zip(cards[1:], secondary_bytes, strict=True)
    )
    ram_bytes = (
        ram_budget(budget.ram, components_of(pipe, components).values())
        if memory_bytes is None
        else memory_bytes
    )
    host = _size(budget.pinned, "pinned", ram_bytes), _size(budget.disk, "disk")
    demands = Directives(
        strings(keep), strings(exclude), _size(reserve, "reserve") or 0, strings(pin)
    )
    limits = ProblemLimits(
        vram_bytes,
        ram_bytes,
        *host,
        RUNS if between_calls == "warm" else 1,
        strings(allow),
        secondaries,
    )
    store = CallStore(Store(cache)) if cache is not None else None
    return Attachment(
        pipe, main_device, cards[0], limits, demands, budget, tell, store, components, methods
    )


def planned_inputs(problem: Problem, graph: Graph, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``inputs`` completed from the plan's settings and the graph's defaults.

    Raises PlanError if an input that the plan depends on differs from the planned value.
    """
    from graphrun.graph.settings import completed

    return completed(graph.until(problem.until), problem.settings, inputs)


def _required_values(graph: Graph, precomputed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ``precomputed`` that ``graph`` reads.

    Raises PlanError naming missing values.
    """
    names = [str(reference).removeprefix("$") for reference in graph.precomputed]
    if absent_names := [name for name in names if name not in precomputed]:
        raise PlanError(
            f"the plan needs precomputed values: pass {', '.join(absent_names)} in precomputed=, "
            "or plan again without them"
        )
    return {name: precomputed[name] for name in names}


def _hardware(hardware: str | Hardware | None, cache: Path | None) -> Hardware:
    """Return the hardware for an object or a name (of a profile or a data-sheet estimate).

    By default it is the card found, else a data-sheet estimate.
    """
    from graphrun.profile.hardware_profiles import resolve_hardware

    return resolve_hardware(hardware, cache)


def _devices(
    vram: Any, ram: Any, memory: Any, hardware: Any, cache: Path | None
) -> list[tuple[Hardware, int]]:
    """Return the hardware and the budget of each device.

    Raises InputError if they are not of one kind, or for a budget that the hardware does not have.
    """
    from graphrun.profile.several import per_device

    if hardware is None and memory is not None:
        from graphrun.profile.hardware_profiles import detect_cpu

        hardware = detect_cpu(cache)
    if isinstance(hardware, Sequence) and not isinstance(hardware, str) and len(hardware) == 1:
        (hardware,) = hardware
    if isinstance(hardware, str) and "," not in hardware:
        hardware = _hardware(hardware, cache)
    if memory is not None or getattr(hardware, "unified", False):
        return [(hardware, _memory_bytes(hardware, vram, ram, memory))]
    if vram is None:
        raise InputError("vram: give the budget of the device, such as vram='8G'")
    pairs = [
        (_hardware(options.hardware, cache), options.vram) for options in per_device(vram, hardware)
    ]
    _require_one_kind([card for card, _ in pairs])
    return [(card, _vram_bytes(nbytes, card)) for card, nbytes in pairs]


def _require_one_kind(cards: Sequence[Hardware]) -> None:
    if len({card.device for card in cards}) > 1:
        kinds = ", ".join(f"{card.name} is a {card.device} device" for card in cards)
        raise InputError(f"hardware: devices of one run are of one kind, and {kinds}")


def _memory_bytes(hardware: Any, vram: Any, ram: Any, memory: Any) -> int:
    """Return the bytes of a memory budget, which a CPU has in place of VRAM and RAM."""
    if not getattr(hardware, "unified", False):
        raise InputError(
            f"memory {memory} is the budget of a CPU, whose programs and weights share one memory: "
            "add --device cpu, or give --vram and --ram for a card"
        )
    if vram is not None or ram != "auto":
        raise InputError(
            "a CPU has one memory, and vram and ram are the two of a card: give --memory "
            f"{vram if vram is not None else ram} instead"
        )
    if memory in (None, "auto"):
        from graphrun.host_ram import host_ram_bytes
        from graphrun.profile.hardware import budget_of

        return budget_of(host_ram_bytes())
    return parse_size(memory, whole_bytes=hardware.capacity_bytes, name="memory")


def _vram_bytes(vram: str | int, hardware: Hardware) -> int:
    """Return the bytes of a VRAM budget.

    A share of the simulated device means nothing, because it has no memory of its own.
    """
    return parse_size(
        vram, whole_bytes=hardware.capacity_bytes if hardware.device != "sim" else None, name="vram"
    )


def _free_bytes(device: Device, hardware: Hardware) -> int:
    """Return the default budget (`graphrun.profile.hardware.budget_of`) of ``device``.

    It is based on the smaller of the device's memory and its free memory, context and workspace
    included. Raises InputError for a simulated device without a limit.
    """
    from graphrun.profile.hardware import budget_of

    available_bytes = device.available_bytes + hardware.context_bytes + hardware.workspace_bytes
    if hardware.device == "sim" and available_bytes >= hardware.capacity_bytes:
        raise InputError(
            "the simulated device has no memory of its own: give vram, such as vram='8G'"
        )
    return budget_of(min(available_bytes, hardware.capacity_bytes))


def _size(text: str | int | None, name: str, whole_bytes: int | None = None) -> int | None:
    """Return the bytes of a limit or a reserve, which may be 0."""
    return None if text is None else parse_size(text, whole_bytes=whole_bytes, name=name, minimum=0)


def _store(cache: Path | None) -> Store | None:
    return Store(cache) if cache is not None else None

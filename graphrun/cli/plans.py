"""The commands ``plan``, ``explain``, ``estimate``, ``frontier``, ``report`` and ``schema``.

None of them runs a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphrun import api
from graphrun.cli.common import (
    AsJson,
    GraphFile,
    OnlyGraph,
    app,
    cache_folder,
    cards_for,
    echo,
    load,
    parse_reuse,
    say,
    show,
    solving,
    with_budget,
    write_or_print,
)
from graphrun.cli.options import (
    PlanFile,
    PlanOptions,
    ReuseOption,
    Verbose,
    option,
    shared,
    with_typed_budget,
)
from graphrun.cli.placing import ClusterFile, ItemsOption, ObjectiveOption, plan_cluster
from graphrun.cli.planning import GraphPlanner, look, open_graph, quantizing_of
from graphrun.cli.teams import FailLimits, FailOver, FailPeak
from graphrun.cli.terminal import alive, width
from graphrun.devices import per_device, refuse_wrong_budgets
from graphrun.disk_store import store_in
from graphrun.errors import InputError, Interrupted, PlanError
from graphrun.reading import read_json
from graphrun.report import plan_files as planfile
from graphrun.units import parse_size, show_size, typed_size

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph
    from graphrun.model.hardware import Hardware
    from graphrun.model.problem import Problem


@app.command()
@shared()
def plan(
    graph: GraphFile,
    options: PlanOptions,
    output_file: PlanFile = None,
    reuse: ReuseOption = "none",
    fail_over: FailOver = None,
    fail_peak: FailPeak = None,
    cluster: ClusterFile = None,
    objective: ObjectiveOption = None,
    items: ItemsOption = None,
    explanation: Annotated[
        str | None,
        option(
            "If no plan fits or the plan is slow, search for all suggestions. Slower.",
            "more",
            "--explain",
        ),
    ] = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Plan a graph within VRAM and RAM budgets.

    Needs no weights and no GPU.
    """
    if cluster is not None:
        if reuse != "none" or fail_over is not None or fail_peak is not None:
            raise InputError(
                "--reuse, --fail-over and --fail-peak are for plans of one machine: leave "
                "them out with --cluster"
            )
        plan_cluster(graph, options, cluster, objective, items, output_file, as_json)
        return
    if objective is not None or items is not None:
        raise InputError("--objective and --items are for several machines: add --cluster FILE")
    if explanation not in (None, "more"):
        raise InputError(f"--explain {explanation!r} is not known; its only value is more")
    limits = FailLimits(fail_over, fail_peak)
    from graphrun.report.screen import plan_screen, proof
    from graphrun.report.summary import summarize

    planner = GraphPlanner(options, parse_reuse(reuse), advise=True)
    with contextlib.ExitStack() as stack:
        if explanation is not None:
            from graphrun.solve.suggestions import thorough

            stack.enter_context(thorough())
        graph_plan = planner.plan(open_graph(graph, options))
        summary = summarize(graph_plan.solution, graph_plan.solve_seconds)
        if output_file is not None:
            planfile.save(output_file, graph_plan.source, graph_plan.solution, summary)
        costs = quantizing_of(graph_plan, cache_folder(options.no_cache))
        style = look(graph_plan, options, verbose, output_file, reuse, costs)
        screen = plan_screen(graph_plan.solution, graph_plan.solve_seconds, style)
        suggestions = list[Any]()
        if graph_plan.suggestions:
            # imported only here, since it imports highspy
            from graphrun.report.whatif_screens import suggestions_json, suggestions_screen

            screen += (
                f"\n\n{suggestions_screen(graph_plan.solution, graph_plan.suggestions, style)}"
            )
            suggestions = suggestions_json(graph_plan.suggestions)
        is_interrupted = bool(graph_plan.interrupted)
        show(
            {
                **summary,
                "quantizing": [asdict(cost) for cost in costs],
                "suggestions": suggestions,
                "interrupted": is_interrupted,
            },
            as_json,
            screen,
        )
    if graph_plan.interrupted:
        saved_text = f"; it is saved in {output_file}" if output_file is not None else ""
        raise Interrupted(
            f"interrupted {graph_plan.interrupted}: this is the best plan so far, "
            f"{proof(graph_plan.solution)}{saved_text}"
        )
    limits.check(graph_plan.solution)


@app.command()
@shared()
def explain(
    graph: GraphFile,
    options: PlanOptions,
    component: Annotated[
        str | None,
        typer.Argument(
            help="Show what other placements of this component would cost.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show every slot of a plan: actions, bytes, seconds.

    With COMPONENT: why it is where it is, and what other placements would cost.
    """
    from graphrun.report.screen import explain_screen
    from graphrun.report.summary import summarize
    from graphrun.report.whatif_screens import alternatives_json, alternatives_screen, faster_than

    graph_plan = GraphPlanner(options).plan(open_graph(graph, options))
    solution = graph_plan.solution
    if component is None:
        show(summarize(solution, graph_plan.solve_seconds), as_json, explain_screen(solution))
        return
    from graphrun.solve.alternatives import alternatives
    from graphrun.store import fitting_for, keep_plan, quick_for

    store = store_in(cache_folder(options.no_cache))
    with solving(), alive(f"other placements of {component}") as step:
        best, rows = alternatives(
            solution,
            component,
            lambda variant: fitting_for(variant, store),
            lambda variant: quick_for(variant, store),
            step,
        )
    screen = alternatives_screen(best, component, rows)
    if best is not solution:
        target_store = store if graph_plan.problem is not None else None
        keep_plan(graph_plan.problem, best, target_store)
        screen += f"\n{faster_than(solution, target_store is not None)}"
    show(alternatives_json(best, component, rows), as_json, screen)


@app.command()
@shared(
    "ram",
    "memory",
    "hardware",
    "device",
    "set_",
    "keep",
    "pinned",
    "until",
    "trust_package",
    "source",
    "absent",
    "dtype",
    "no_cache",
)
def estimate(
    graph: OnlyGraph,
    options: PlanOptions,
    mode: Annotated[
        str,
        typer.Option(
            help="How diffusers places weights: resident, or its offloading: model, sequential, "
            "group (by block) or leaf; these two with use_stream=True.",
            metavar="MODE",
        ),
    ] = "resident",
    precision: Annotated[
        list[str] | None,
        option(
            "bf16, fp16, fp32, int8, nf4, fp8, layerwise; COMPONENT=nf4 for one component. "
            "Repeatable.",
            "FORMAT",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        option("Pictures per prompt.", "N", min=1),
    ] = None,
    option: Annotated[
        list[str] | None,
        option("Use an option of a stage: decode=tiling. Repeatable.", "STAGE=NAME"),
    ] = None,
    cpu: Annotated[
        list[str] | None,
        option("Compute this component on the CPU. Repeatable.", "NAME"),
    ] = None,
    library: Annotated[
        list[str] | None,
        option(
            "Place weights as this version does: bitsandbytes=0.45. Repeatable.",
            "NAME=VERSION",
        ),
    ] = None,
    attention: Annotated[
        str | None,
        option("Seconds with this kernel of attention: sage, fa3.", "NAME"),
    ] = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Show memory and time of a graph, or of diffusers' offloading.

    Needs no budget, no weights and no GPU. With --mode, weights beyond --ram
    are read from disk again, --pinned 0 copies from pageable RAM, and --keep
    does not offload the component.
    """
    from graphrun.report.estimate_screen import estimate_screen
    from graphrun.report.screen import Look

    pipeline_graph, cache = load(graph, options), cache_folder(options.no_cache)
    hardware, *_ = cards_for(options, cache)
    with alive(f"dry run of {pipeline_graph.name}"):
        survey = api.survey(
            pipeline_graph,
            hardware=hardware,
            memory=options.memory,
            ram=options.ram,
            inputs=options.inputs,
            mode=mode,
            precision=precision or (),
            batch=batch,
            option=option or (),
            keep=options.keep or (),
            cpu=cpu or (),
            pinned=options.pinned is None
            or parse_size(options.pinned, name="pinned", minimum=0) > 0,
            library=library or (),
            attention=attention,
            cache=cache,
        )
    next_options = _plan_options(pipeline_graph, options, precision, batch, option, cpu)
    next_command = f"next: graphrun plan {graph} {next_options.flags}".rstrip() + (
        " --vram 8M" if hardware.kind.free_memory == "none" else ""
    )
    show(
        survey, as_json, estimate_screen(survey, Look(width(), verbose, next_command=next_command))
    )


def _plan_options(
    graph: Graph,
    options: PlanOptions,
    precisions: Sequence[str] | None,
    batch: int | None,
    stage_options: Sequence[str] | None,
    cpu: Sequence[str] | None,
) -> PlanOptions:
    """Return ``options`` of ``estimate`` with its other options as ``plan`` takes them.

    A precision that the graph lists, a stage option and the CPU become what is allowed; the number
    of pictures becomes an input; a dtype for all components becomes ``--dtype``.
    """
    from graphrun.profile.asked import DTYPES, pictures_input

    sets, allow, dtype = list(options.set_ or []), list(options.allow or []), options.dtype
    if batch is not None:
        sets.append(f"{pictures_input(graph)}={batch}")
    valid_names = graph.permissions
    for text in precisions or ():
        component, _, name = text.rpartition("=")
        if name in valid_names:
            allow.append(name)
        elif name in DTYPES and not component:
            dtype = DTYPES[name]
    stages = {stage.name: stage for stage in graph.stages}
    for text in stage_options or ():
        stage, _, name = text.partition("=")
        if (needs := stages[stage].permission(name)) is not None and needs:
            allow.append(needs)
    allow += ["cpu"] if cpu else []
    return replace(
        options, set_=sets or None, allow=list(dict.fromkeys(allow)) or None, dtype=dtype
    )


@app.command()
@shared()
def frontier(
    graph: OnlyGraph,
    options: PlanOptions,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="Find the largest value of an input that fits each budget: height=512:2048:256.",
            metavar="NAME=FROM:TO:STEP",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        option("Draw the curve to this file, .svg or .png.", "FILE"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show predicted time for a range of budgets.

    Ranges: --vram 4G:48G (usual card sizes), --vram 4G:48G:4G (a step), for
    one of two cards --vram 24G,4G:12G, on a CPU --memory 2G:12G.
    """
    from graphrun.report.screen import Look
    from graphrun.report.whatif_screens import fastest, frontier_json, frontier_screen
    from graphrun.solve.frontier import values_between
    from graphrun.store import frontier_for

    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise InputError(f"--plot {plot}: the name must end in .svg or .png")
    planfile.require_writable(plot)
    pipeline_graph, cache = load(graph, options), cache_folder(options.no_cache)
    name, values = values_between(sweep) if sweep is not None else ("", ())
    sweep_inputs = [(str(value), {**options.inputs, name: str(value)}) for value in values] or [
        ("", options.inputs)
    ]
    for _, inputs in sweep_inputs:
        # refuse bad values before minutes of planning; each value needs its own dry run
        pipeline_graph.for_planning(inputs)
    cards = cards_for(options, cache)
    device, sizes, budgets = _budgets(options, cards)
    option, rows, problems = cards[0].budget_option, [], []
    sizes[device] = budgets[0]
    arguments = {
        **options.estimate_arguments,
        option.removeprefix("--"): budgets[0] if cards[0].unified else sizes,
        "hardware": cards,
        "cache": cache,
    }
    for value, inputs in sweep_inputs:
        activity = f"{name}={value}" if name else f"plans for {len(budgets)} budgets"
        with solving(), alive(activity) as step:
            problems.append(api.estimate(pipeline_graph, **arguments, inputs=inputs))
            rows.append((value, frontier_for(problems[-1], budgets, store_in(cache), device, step)))
    if plot is not None:
        _draw(plot, problems[0], rows, name)
    next_command = ""
    if not name and (best := fastest(rows[0][1])) is not None:
        sizes[device] = typed_size(best.budget_bytes)
        next_options = with_typed_budget(options, option, ",".join(map(str, sizes)))
        next_command = f"next: graphrun plan {graph} {next_options.flags}"
    screen = frontier_screen(problems[0], rows, name, Look(width(), next_command=next_command))
    show(frontier_json(problems[0], rows, name), as_json, screen)
    if not any(point.fits for _, points in rows for point in points):
        raise typer.Exit(3)


def _budgets(
    options: PlanOptions, cards: Sequence[Hardware]
) -> tuple[int, list[Any], tuple[int, ...]]:
    """Return the number of the device whose budget is varied, the budget of each device as typed,
    and the budgets of the varied one in bytes. Raises InputError without a range of budgets."""
    from graphrun.solve.frontier import sizes_between

    refuse_wrong_budgets(cards[0], options)
    option, is_unified = cards[0].budget_option, cards[0].unified
    name, text = option.removeprefix("--"), options.memory if is_unified else options.vram
    if text is None:
        example = "2G:12G" if is_unified else "4G:48G"
        raise InputError(f"a frontier needs budgets: add {option}, such as {option} {example}")
    sizes: list[Any] = [request.vram for request in per_device(text)]
    varied = [number for number, size in enumerate(sizes) if ":" in size] or [0]
    if len(varied) > 1:
        raise InputError(
            f"--vram {options.vram}: one device is varied at a time: give the others a "
            "budget, as in 24G,4G:12G"
        )
    device = varied[0]
    card = cards[device]
    budgets = sizes_between(
        getattr(with_budget(options, card), name) if text == "auto" else sizes[device],
        whole_bytes=card.capacity_bytes if card.kind.free_memory != "none" else None,
        name=name,
    )
    if budgets[-1] > card.capacity_bytes:
        say(f"the {card.name} has {show_size(card.capacity_bytes)}: larger budgets are left out")
        budgets = tuple(sorted({min(budget, card.capacity_bytes) for budget in budgets}))
    return device, sizes, budgets


def _draw(file: Path, problem: Problem, rows: Sequence[Any], name: str) -> None:
    """Write the curve through ``rows`` to an SVG or PNG file."""
    from graphrun.report.svg import rasterized
    from graphrun.report.whatif_screens import frontier_svg

    drawing = frontier_svg(problem, rows, name)
    if file.suffix == ".svg":
        planfile.write_text(file, drawing)
    else:
        planfile.write_with(file, lambda target: rasterized(drawing).save(target, format="PNG"))


@app.command()
def report(
    trace: Annotated[
        Path,
        typer.Argument(
            help="Trace saved with run --trace, or plan saved with -o.", show_default=False
        ),
    ],
    output_file: Annotated[Path, typer.Option("-o", help="HTML file.", metavar="FILE")] = Path(
        "report.html"
    ),
) -> None:
    """Write an HTML page about a run or a plan.

    Has the timeline, the plan, planned and measured numbers, and time against
    budget. The page loads nothing from elsewhere.
    """
    data = read_json(trace, PlanError)
    if isinstance(data, dict) and "lanes" in data:
        from graphrun.report.lanes import lanes_from_json, lanes_page

        with _intact(trace):
            page = lanes_page(lanes_from_json(data))
        write_or_print(page, output_file)
        return
    from graphrun.report.page import product_from_trace, report_page, trace_from_json
    from graphrun.store import curve_for

    run_trace = product = None
    is_trace = isinstance(data, dict) and "events" in data
    solution, _ = planfile.solution_in(data.get("plan") if is_trace else data, trace)
    planfile.require_writable(output_file)
    if is_trace:
        with _intact(trace):
            run_trace, product = trace_from_json(data), product_from_trace(data, trace.parent)
    with solving(), alive("plans for other budgets") as step:
        points = curve_for(solution.problem, solution, store_in(cache_folder(False)), step)
    write_or_print(report_page(solution, run_trace, points, product), output_file)


@contextlib.contextmanager
def _intact(trace: Path) -> Iterator[None]:
    """Raise PlanError for content of another form in the file ``trace``."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(
            f"is a damaged trace ({type(error).__name__} {error}): write it again with graphrun "
            "run --trace FILE",
            str(trace),
        ) from error


@app.command()
def schema() -> None:
    """Print the JSON Schema of graph files, for editors."""
    from graphrun.graph.schema import schema_text

    echo(schema_text(), nl=False)

"""The commands ``plan``, ``explain``, ``estimate``, ``frontier``, ``report`` and ``schema``.

None of them runs a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
    look,
    open_graph,
    parse_reuse,
    plan_graph,
    say,
    show,
    solving,
    with_budget,
)
from graphrun.cli.options import PlanOptions, ReuseOption, Verbose, shared, with_typed_budget
from graphrun.cli.placing import ClusterFile, ItemsOption, ObjectiveOption, plan_cluster
from graphrun.cli.teams import FailLimits, FailOver, FailPeak
from graphrun.cli.terminal import alive, width
from graphrun.devices import per_device, refuse_wrong_budgets
from graphrun.disk_store import Store
from graphrun.errors import InputError, Interrupted, PlanError
from graphrun.reading import read_json
from graphrun.report import plan_files as planfile
from graphrun.units import parse_size, show_size, typed_size

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph


@app.command()
@shared()
def plan(
    graph: GraphFile,
    options: PlanOptions,
    output_file: Annotated[
        Path | None,
        typer.Option("-o", help="Save the plan to this file.", metavar="FILE", show_default=False),
    ] = None,
    reuse: ReuseOption = "none",
    fail_over: FailOver = None,
    fail_peak: FailPeak = None,
    cluster: ClusterFile = None,
    objective: ObjectiveOption = None,
    items: ItemsOption = None,
    explanation: Annotated[
        str | None,
        typer.Option(
            "--explain",
            metavar="more",
            help="If no plan fits or the plan is slow, search for all suggestions. Slower.",
            show_default=False,
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
    from graphrun.report.screen import plan_screen, proof
    from graphrun.report.summary import summarize

    if explanation not in (None, "more"):
        raise InputError(f"--explain {explanation!r} is not known; it is more")
    limits = FailLimits(fail_over, fail_peak)
    graph_plan = plan_graph(
        open_graph(graph, options),
        options,
        parse_reuse(reuse),
        advise=True,
        thorough=explanation is not None,
    )
    summary = summarize(graph_plan.solution, graph_plan.solve_seconds)
    if output_file is not None:
        planfile.save(output_file, graph_plan.source, graph_plan.solution, summary)
    style = look(graph_plan, options, verbose, output_file, reuse)
    screen = plan_screen(graph_plan.solution, graph_plan.solve_seconds, style)
    suggestions = list[Any]()
    if graph_plan.suggestions:
        # imported only here, since it imports highspy
        from graphrun.report.whatif_screens import suggestions_json, suggestions_screen

        screen += f"\n\n{suggestions_screen(graph_plan.solution, graph_plan.suggestions, style)}"
        suggestions = suggestions_json(graph_plan.suggestions)
    show(
        {**summary, "suggestions": suggestions, "interrupted": bool(graph_plan.interrupted)},
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

    graph_plan = plan_graph(open_graph(graph, options), options, "none")
    solution = graph_plan.solution
    if component is None:
        show(summarize(solution, graph_plan.solve_seconds), as_json, explain_screen(solution))
        return
    from graphrun.solve.alternatives import alternatives
    from graphrun.store import fitting_for, keep_plan

    store = _store(cache_folder(options.no_cache))
    with solving(), alive(f"other placements of {component}") as step:
        best, rows = alternatives(
            solution, component, lambda variant: fitting_for(variant, store), step
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
    "dtype",
    "no_cache",
)
def estimate(
    graph: OnlyGraph,
    options: PlanOptions,
    mode: Annotated[
        str,
        typer.Option(
            help="How diffusers places weights: resident, or an offload mode (model, sequential, "
            "group, leaf).",
            metavar="MODE",
        ),
    ] = "resident",
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="bf16, fp16, fp32, int8, nf4, fp8; COMPONENT=nf4 for one component. Repeatable.",
            metavar="FORMAT",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Pictures per prompt.", metavar="N", min=1, show_default=False),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="Use an option of a stage: decode=tiling. Repeatable.",
            metavar="STAGE=NAME",
            show_default=False,
        ),
    ] = None,
    cpu: Annotated[
        list[str] | None,
        typer.Option(
            help="Compute this component on the CPU. Repeatable.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Show memory and time of a graph, or of diffusers' offloading.

    Needs no budget, no weights and no GPU. With --mode, some options mean:
    --ram: weights that do not fit are read from disk again; --pinned 0: copy
    from pageable RAM; --keep: do not offload.
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
        typer.Option(
            help="Draw the curve to this file, .svg or .png.", metavar="FILE", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show predicted time for a range of budgets.

    Ranges: --vram 4G:48G, with a step --vram 4G:48G:4G, for one of two cards
    --vram 24G,4G:12G, on a CPU --memory 2G:12G.
    """
    from graphrun.report.screen import Look
    from graphrun.report.svg import rasterized
    from graphrun.report.whatif_screens import fastest, frontier_json, frontier_screen, frontier_svg
    from graphrun.solve.frontier import sizes_between, values_between
    from graphrun.store import frontier_for

    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise InputError(f"--plot {plot}: ends in .svg or .png")
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
    refuse_wrong_budgets(cards[0], options)
    option = cards[0].budget_option
    text = options.memory if cards[0].unified else options.vram
    if text is None:
        example = "2G:12G" if cards[0].unified else "4G:48G"
        raise InputError(f"a frontier needs budgets: add {option}, such as {option} {example}")
    vram: list[Any] = [request.vram for request in per_device(text)]
    varied = [number for number, size in enumerate(vram) if ":" in size] or [0]
    if len(varied) > 1:
        raise InputError(
            f"--vram {options.vram}: one device is varied at a time: give the others a "
            "budget, as in 24G,4G:12G"
        )
    device, name_of_budget = varied[0], option.removeprefix("--")
    card = cards[device]
    if text == "auto":
        vram[device] = getattr(with_budget(options, card), name_of_budget)
    budgets = sizes_between(
        vram[device],
        whole_bytes=card.capacity_bytes if card.kind.free_memory != "none" else None,
        name=name_of_budget,
    )
    if budgets[-1] > card.capacity_bytes:
        say(f"the {card.name} has {show_size(card.capacity_bytes)}: larger budgets are left out")
        budgets = tuple(sorted({min(budget, card.capacity_bytes) for budget in budgets}))
    rows, problems = [], []
    for value, inputs in sweep_inputs:
        vram[device] = budgets[0]
        arguments = {
            **options.estimate_arguments,
            "hardware": cards,
            name_of_budget: budgets[0] if card.unified else vram,
            "inputs": inputs,
            "cache": cache,
        }
        activity = f"{name}={value}" if name else f"plans for {len(budgets)} budgets"
        with solving(), alive(activity) as step:
            problems.append(api.estimate(pipeline_graph, **arguments))
            rows.append((value, frontier_for(problems[-1], budgets, _store(cache), device, step)))
    if plot is not None:
        drawing = frontier_svg(problems[0], rows, name)
        if plot.suffix == ".svg":
            planfile.write_text(plot, drawing)
        else:
            planfile.write_with(plot, lambda target: rasterized(drawing).save(target, format="PNG"))
    best = fastest(rows[0][1])
    if best is not None:
        vram[device] = typed_size(best.budget_bytes)
    next_command = (
        f"next: graphrun plan {graph} "
        + with_typed_budget(options, option, ",".join(map(str, vram))).flags
        if best and not name
        else ""
    )
    screen = frontier_screen(problems[0], rows, name, Look(width(), next_command=next_command))
    show(frontier_json(problems[0], rows, name), as_json, screen)
    if not any(point.fits for _, points in rows for point in points):
        raise typer.Exit(3)


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
    from graphrun.report.page import product_from_trace, report_page, trace_from_json
    from graphrun.store import curve_for

    data = read_json(trace, PlanError)
    if isinstance(data, dict) and "lanes" in data:
        from graphrun.report.lanes import lanes_from_json, lanes_page

        try:
            page = lanes_page(lanes_from_json(data))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(
                f"is a damaged trace: {type(error).__name__} {error}", str(trace)
            ) from error
        planfile.write_text(output_file, page)
        echo(f"wrote {output_file}")
        return
    is_trace = isinstance(data, dict) and "events" in data
    solution, _ = planfile.solution_in(data.get("plan") if is_trace else data, trace)
    planfile.require_writable(output_file)
    try:
        run_trace = trace_from_json(data) if is_trace else None
        product = product_from_trace(data, trace.parent) if is_trace else None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(
            f"is a damaged trace: {type(error).__name__} {error}", str(trace)
        ) from error
    with solving(), alive("plans for other budgets") as step:
        points = curve_for(solution.problem, solution, _store(cache_folder(False)), step)
    planfile.write_text(output_file, report_page(solution, run_trace, points, product))
    echo(f"wrote {output_file}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of graph files, for editors."""
    from graphrun.graph.schema import schema_text

    echo(schema_text(), nl=False)


def _store(cache: Path | None) -> Store | None:
    return Store(cache) if cache is not None else None

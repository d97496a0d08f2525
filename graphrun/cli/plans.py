"""The commands ``plan``, ``explain``, ``estimate``, ``frontier``, ``report`` and ``schema``. None
runs a graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from graphrun import api
from graphrun.cli.common import (
    AsJson,
    GraphFile,
    OnlyGraph,
    app,
    budgeted,
    cache_folder,
    checked_reuse,
    echo,
    hardware_for,
    load,
    look,
    named,
    native_stdout_to_stderr,
    planned,
    say,
    show,
)
from graphrun.cli.options import Asked, Reuse, Verbose, shared
from graphrun.cli.placing import ClusterFile, Items, Objective, plan_cluster
from graphrun.cli.teams import FailOver, FailPeak, Limits
from graphrun.cli.terminal import alive, width
from graphrun.errors import InputError, Interrupted, PlanError
from graphrun.files import Store
from graphrun.reading import read_json
from graphrun.report import plan_files as planfile
from graphrun.report.screen import Look
from graphrun.units import parse_size, show_size, typed_size


@app.command()
@shared()
def plan(
    graph: GraphFile,
    asked: Asked,
    out: Annotated[
        Path | None, typer.Option("-o", help="Save the plan to this file.", show_default=False)
    ] = None,
    reuse: Reuse = "none",
    fail_over: FailOver = None,
    fail_peak: FailPeak = None,
    cluster: ClusterFile = None,
    objective: Objective = None,
    items: Items = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Plan a graph within a VRAM and a RAM budget, and show the plan. Needs no weights and no
    GPU."""
    if cluster is not None:
        if reuse != "none" or fail_over is not None or fail_peak is not None:
            raise InputError(
                "--reuse, --fail-over and --fail-peak are for plans of one machine: leave them out with --cluster"
            )
        plan_cluster(graph, asked, cluster, objective, items, out, as_json)
        return
    if objective is not None or items is not None:
        raise InputError("--objective and --items are for several machines: add --cluster FILE")
    from graphrun.report.screen import plan_screen, proof
    from graphrun.report.summary import summarize

    limits = Limits(fail_over, fail_peak)
    made = planned(named(graph, asked), asked, checked_reuse(reuse), advise=True)
    summary = summarize(made.solution, made.solve_seconds)
    if out is not None:
        planfile.save(out, made.source, made.solution, summary)
    shown = look(made, asked, verbose, out)
    screen, advice = plan_screen(made.solution, made.solve_seconds, shown), list[Any]()
    if made.advice:
        from graphrun.report.whatif_screens import advice_screen, repairs_json  # imports highspy

        screen += f"\n\n{advice_screen(made.solution, made.advice, shown)}"
        advice = repairs_json(made.advice)
    show({**summary, "advice": advice, "interrupted": bool(made.interrupted)}, as_json, screen)
    if made.interrupted:
        saved = f"; it is saved in {out}" if out is not None else ""
        raise Interrupted(
            f"interrupted {made.interrupted}: this is the best plan so far, {proof(made.solution)}{saved}"
        )
    limits.hold(made.solution)


@app.command()
@shared()
def explain(
    graph: GraphFile,
    asked: Asked,
    component: Annotated[
        str | None,
        typer.Argument(
            help="Show the cost of other placements of this component.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show every slot of a plan: actions, bytes, seconds. With COMPONENT: why it is placed as it
    is, and what others would cost."""
    from graphrun.report.screen import explain_screen
    from graphrun.report.summary import summarize
    from graphrun.report.whatif_screens import alternatives_json, alternatives_screen, faster_than

    made = planned(named(graph, asked), asked, "none")
    solution = made.solution
    if component is None:
        show(summarize(solution, made.solve_seconds), as_json, explain_screen(solution))
        return
    from graphrun.solve.alternatives import alternatives
    from graphrun.store import fitting_for, keep_plan

    store = _store(cache_folder(asked.no_cache))
    with native_stdout_to_stderr(), alive(f"other placements of {component}") as step:
        best, found = alternatives(
            solution, component, lambda changed: fitting_for(changed, store), step
        )
    screen = alternatives_screen(best, component, found)
    if best is not solution:
        kept = store if made.problem is not None else None
        keep_plan(made.problem, best, kept)
        screen += f"\n{faster_than(solution, kept is not None)}"
    show(alternatives_json(best, component, found), as_json, screen)


@app.command()
@shared(
    "hardware", "device", "set_", "keep", "pinned", "until", "trust_package", "source", "no_cache"
)
def estimate(
    graph: OnlyGraph,
    asked: Asked,
    mode: Annotated[
        str,
        typer.Option(
            help="How diffusers would place it: resident, model, sequential, group or leaf (offloading)."
        ),
    ] = "resident",
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="bf16, fp16, fp32, int8, nf4, fp8, or COMPONENT=nf4. Repeatable.",
            metavar="P",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Pictures per prompt.", min=1, show_default=False)
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="A stage option: decode=tiling. Repeatable.",
            metavar="STAGE=NAME",
            show_default=False,
        ),
    ] = None,
    cpu: Annotated[
        list[str] | None,
        typer.Option(help="A component that computes on the CPU. Repeatable.", show_default=False),
    ] = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Show what a graph needs, without a budget: weights, activations, values, FLOPs, seconds; and
    what diffusers' own offloading takes (--mode; --pinned 0: from pageable memory; --keep: what is
    not offloaded). Needs no weights and no GPU."""
    from graphrun.report.estimate_screen import estimate_screen

    loaded, cache = load(graph, asked), cache_folder(asked.no_cache)
    hardware = hardware_for(asked.hardware, asked.device, False, cache)
    with alive(f"dry run of {loaded.name}"):
        found = api.survey(
            loaded,
            hardware=hardware,
            inputs=asked.inputs,
            mode=mode,
            precision=precision or (),
            batch=batch,
            option=option or (),
            keep=asked.keep or (),
            cpu=cpu or (),
            pinned=asked.pinned is None or parse_size(asked.pinned, name="pinned", least=0) > 0,
            cache=cache,
        )
    then = f"next: graphrun plan {graph} {asked.flags}".rstrip() + (
        " --vram 8M" if hardware.device == "sim" else ""
    )
    show(found, as_json, estimate_screen(found, Look(width(), verbose, then=then)))


@app.command()
@shared()
def frontier(
    graph: OnlyGraph,
    asked: Asked,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="Values of an input to try: height=512:2048:256.", metavar="NAME=FROM:TO:STEP"
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the curve to this file: .svg or .png.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show predicted time against VRAM budget (--vram 4G:48G, 4G:48G:4G, or a single one; of
    several devices that of one, as in 24G,4G:12G), and with --sweep the largest value of an input
    that fits each budget."""
    from graphrun.profile.several import per_device
    from graphrun.report.svg import rasterized
    from graphrun.report.whatif_screens import fastest, frontier_json, frontier_screen, frontier_svg
    from graphrun.solve.frontier import sizes_between, values_between
    from graphrun.store import frontier_for

    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise InputError(f"--plot {plot}: ends in .svg or .png")
    planfile.require_writable(plot)
    loaded, cache = load(graph, asked), cache_folder(asked.no_cache)
    name, values = values_between(sweep) if sweep is not None else ("", ())
    if asked.vram is None:
        raise InputError("a frontier needs budgets: add --vram, such as --vram 4G:48G")
    swept = [(str(value), {**asked.inputs, name: str(value)}) for value in values] or [
        ("", asked.inputs)
    ]
    for _, own in swept:
        # refuse bad values before minutes of planning: each needs a dry run of its own
        loaded.for_planning(own)
    several = per_device(asked.vram, asked.hardware, asked.device)
    each = [hardware_for(of.hardware, of.device, False, cache) for of in several]
    varied = [number for number, of in enumerate(several) if ":" in of.vram] or [0]
    if len(varied) > 1:
        raise InputError(
            f"--vram {asked.vram}: one device is varied at a time: give the others a budget, as in 24G,4G:12G"
        )
    device, vram = varied[0], [of.vram for of in several]
    vram[device] = (budgeted(asked, each[0]).vram if asked.vram == "auto" else vram[device]) or ""
    card = each[device]
    budgets = sizes_between(
        vram[device], whole_bytes=card.capacity_bytes if card.device != "sim" else None
    )
    if budgets[-1] > card.capacity_bytes:
        say(f"the {card.name} has {show_size(card.capacity_bytes)}: larger budgets are left out")
        budgets = tuple(sorted({min(budget, card.capacity_bytes) for budget in budgets}))
    rows, problems = [], []
    for value, own in swept:
        vram[device] = budgets[0]
        arguments = {
            **asked.estimate_arguments,
            "hardware": each,
            "vram": vram,
            "inputs": own,
            "cache": cache,
        }
        what = f"{name}={value}" if name else f"plans for {len(budgets)} budgets"
        with native_stdout_to_stderr(), alive(what) as step:
            problems.append(api.estimate(loaded, **arguments))
            rows.append((value, frontier_for(problems[-1], budgets, _store(cache), device, step)))
    if plot is not None:
        drawn = frontier_svg(problems[0], rows, name)
        if plot.suffix == ".svg":
            planfile.write_text(plot, drawn)
        else:
            planfile.write_with(plot, lambda to: rasterized(drawn).save(to, format="PNG"))
    best = fastest(rows[0][1])
    if best is not None:
        vram[device] = typed_size(best.budget_bytes)
    then = (
        f"next: graphrun plan {graph} {replace(asked, vram=','.join(map(str, vram))).flags}"
        if best and not name
        else ""
    )
    shown = frontier_screen(problems[0], rows, name, Look(width(), then=then))
    show(frontier_json(problems[0], rows, name), as_json, shown)
    if not any(point.fits for _, points in rows for point in points):
        raise typer.Exit(3)


@app.command()
def report(
    trace: Annotated[
        Path,
        typer.Argument(
            help="A trace saved with run --trace, or a plan saved with -o.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option("-o", help="The HTML file.")] = Path("report.html"),
) -> None:
    """Write a self-contained HTML page about a run: timeline, plan, planned and measured numbers,
    time against budget."""
    from graphrun.report.page import made_in, measured_in, report_page
    from graphrun.store import curve_for

    data = read_json(trace, PlanError)
    if isinstance(data, dict) and "lanes" in data:
        from graphrun.report.lanes import lanes_in, lanes_page

        try:
            page = lanes_page(lanes_in(data))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(
                f"is a damaged trace: {type(error).__name__} {error}", str(trace)
            ) from error
        planfile.write_text(out, page)
        echo(f"wrote {out}")
        return
    traced = isinstance(data, dict) and "events" in data
    solution, _ = planfile.solution_in(data.get("plan") if traced else data, trace)
    planfile.require_writable(out)
    try:
        measured = measured_in(data) if traced else None
        made = made_in(data, trace.parent) if traced else None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(
            f"is a damaged trace: {type(error).__name__} {error}", str(trace)
        ) from error
    with native_stdout_to_stderr(), alive("plans for other budgets") as step:
        points = curve_for(solution.problem, solution, _store(cache_folder(False)), step)
    planfile.write_text(out, report_page(solution, measured, points, made))
    echo(f"wrote {out}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of graph files, for editors."""
    from graphrun.graph.schema import schema_text

    echo(schema_text(), nl=False)


def _store(cache: Path | None) -> Store | None:
    return Store(cache) if cache is not None else None

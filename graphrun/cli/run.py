"""The command ``run``: run a graph or a saved plan once, or a graph for every line of a file."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import graphrun
from graphrun import api
from graphrun.cli.common import GraphFile, app, cache_folder, load, parse_reuse, show
from graphrun.cli.dividing import process_group, rank_of, run_processes, take_device
from graphrun.cli.downloads import download_all
from graphrun.cli.enforcing import enforced, kernel_line
from graphrun.cli.options import PlanOptions, shared
from graphrun.cli.planning import GraphPlanner, Planned, look, open_graph, quantizing_of
from graphrun.cli.running import RunOptions, files_for, save, stop_on_interrupt
from graphrun.cli.terminal import print_coloured
from graphrun.errors import InputError, Interrupted
from graphrun.garbage import not_collected
from graphrun.graph.precisions import GGUF_MIXES
from graphrun.memory_group import MemoryGroup
from graphrun.report import plan_files as planfile
from graphrun.trace import Trace

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph
    from graphrun.model.solution import Solution
    from graphrun.report.screen import Look


@app.command()
@shared()
def run(graph: GraphFile, options: PlanOptions, run_options: RunOptions) -> None:
    """Run a graph or a saved plan.

    Shows planned next to measured numbers. With --inputs: one run for each line
    of a file.
    """
    with contextlib.ExitStack() as stack:
        group: MemoryGroup | None = None
        if run_options.enforce:
            options, group = stack.enter_context(enforced(graph, options))
        options = run_options.with_inputs(options)
        parse_reuse(run_options.reuse)
        if run_options.objective is not None and run_options.cluster is None:
            raise InputError("--objective is for several machines: add --cluster FILE")
        if run_options.divide > 1:
            _start_processes(graph, options, run_options)
        pipeline_graph = load(graph, options) if graph.suffix != ".json" else None
        if pipeline_graph is not None and run_options.divide > 1:
            pipeline_graph = pipeline_graph.divided(run_options.divide)
        if run_options.has_many_runs or (pipeline_graph is not None and pipeline_graph.list_input):
            _run_many(graph, pipeline_graph, options, run_options)
        else:
            _run_once(graph, pipeline_graph, options, run_options, group)


def _start_processes(file: Path, options: PlanOptions, run_options: RunOptions) -> None:
    """Start the processes that divide the sequence of the graph in ``file``, and exit with their
    code. In such a process, take its device and return."""
    exclusions = {
        "a saved plan": file.suffix == ".json",
        "--inputs, --resume and --cluster": run_options.has_many_runs,
        "--preview": run_options.preview,
        "--reuse all": run_options.reuse == "all",
        "--enforce": run_options.enforce,
    }
    if names := [name for name, is_set in exclusions.items() if is_set]:
        raise InputError(f"--divide is for one run of a graph, without {names[0]}")
    for name, value in (("vram", options.vram), ("device", options.device)):
        if value is not None and "," in value:
            raise InputError(
                f"--{name} {value}: with --divide, all devices are equal; name one, "
                f"--{name} {value.partition(',')[0]}"
            )
    rank = rank_of(run_options.divide)
    if rank is None:
        raise typer.Exit(run_processes(run_options.divide))
    take_device(rank)


def _run_many(
    file: Path, graph: Graph | None, options: PlanOptions, run_options: RunOptions
) -> None:
    """Run the graph in ``file`` for each request. Raises InputError for a plan, and for options of
    a single run."""
    lists = graph.list_input if graph is not None else ""
    trace_file = run_options.trace_file if run_options.cluster is None else None
    single_options = {
        "--plan": run_options.plan_file,
        "--trace": trace_file,
        "--preview": run_options.preview,
        "--check-ordering": run_options.check_ordering,
    }
    if forbidden_options := [name for name, value in single_options.items() if value]:
        many_runs = (
            f"a graph that runs for each of ${lists}"
            if lists
            else "--inputs, --resume and --cluster"
        )
        raise InputError(
            f"leave out {', '.join(forbidden_options)}: for a single run, not for {many_runs}"
        )
    if graph is None:
        raise InputError(
            f"{file} is a plan for one run, and --inputs and --resume make their own plans: name "
            f"the graph, {planfile.graph_path(file, planfile.read_solution(file)[1])}"
        )
    from graphrun.cli.batches import run_batch

    run_batch(graph, options, run_options)


def _run_once(
    file: Path,
    graph: Graph | None,
    options: PlanOptions,
    run_options: RunOptions,
    group: MemoryGroup | None,
) -> None:
    """Run ``graph``, or the plan in ``file``, and show and save what was measured. Exits with 4 if
    the run took more memory than planned."""
    from graphrun.report.screen import measured_screen
    from graphrun.report.summary import summarize

    planfile.require_writable(run_options.plan_file, run_options.trace_file, run_options.preview)
    graph_plan = (
        Planned(graph, file) if graph is not None else open_graph(file, options, to_run=True)
    )
    last_stage = graph_plan.solution.problem.until if graph_plan.solution is not None else ""
    target = files_for(
        graph_plan.graph.until(last_stage),
        run_options.output,
        options.inputs,
        overwrite=run_options.overwrite,
    )
    graph_plan, style = _ready(graph_plan, options, run_options)
    solution = graph_plan.solution
    values = api.planned_inputs(solution.problem, graph_plan.graph, options.inputs)
    with contextlib.ExitStack() as stack:
        if run_options.divide > 1:
            stack.enter_context(process_group(solution.problem.hardware))
        trace = _trace(graph_plan, options, run_options, values)
    if run_options.divide > 1 and rank_of(run_options.divide):
        return  # the first process writes the results
    summary = summarize(solution, graph_plan.solve_seconds, trace)
    if run_options.plan_file is not None:
        planfile.save(run_options.plan_file, graph_plan.source, solution, summary)
    paths = save(trace.outputs, target, graph_plan.graph, values, solution.problem.digest)
    if run_options.trace_file is not None:
        _save_trace(run_options.trace_file, trace, graph_plan, summary, values, paths)
    screen = measured_screen(solution, trace, [str(path) for path in paths], style)
    if group is not None:
        summary["kernel"] = {"limit_bytes": group.limit_bytes, "peak_bytes": group.peak_bytes}
        screen = f"{screen}\n{kernel_line(group)}"
    show(summary, run_options.as_json, screen)
    if trace.overruns:
        raise typer.Exit(4)


def _ready(
    graph_plan: Planned, options: PlanOptions, run_options: RunOptions
) -> tuple[Planned, Look]:
    """Plan, show the plan, and download what the run needs."""
    from graphrun.report.screen import plan_screen

    notify = run_options.notify
    planner = GraphPlanner(
        options,
        run_options.reuse,
        to_run=True,
        random_weights=run_options.random_weights,
        notify=notify,
    )
    is_saved = graph_plan.solution is not None
    graph_plan = _as_opened(planner.plan(graph_plan), options, notify)
    costs = quantizing_of(graph_plan, cache_folder(options.no_cache))
    style = replace(look(graph_plan, options, run_options.verbose, costs=costs), next_command="")
    screen = (
        plan_screen(graph_plan.solution, graph_plan.solve_seconds, style)
        if run_options.verbose
        else _verdict(graph_plan.solution, style)
    )
    while True:
        if notify is not None:
            print_coloured(screen)
            sys.stdout.flush()  # before the progress on stderr
        download_all(graph_plan.downloads, notify)
        if is_saved or not _is_expected(graph_plan):
            return graph_plan, style
        # only the header of a GGUF file tells the type of each tensor: plan for its content
        graph_plan = planner.plan(replace(graph_plan, solution=None, downloads=[]))
        graph_plan = _as_opened(graph_plan, options, None)
        screen = _verdict(graph_plan.solution, style)


def _as_opened(
    graph_plan: Planned, options: PlanOptions, notify: Callable[[str], None] | None
) -> Planned:
    """Open the device, show what it does not promise, and plan again if copies do not overlap
    compute. Where that is known from the kind of device, it is opened by the run."""
    problem = graph_plan.solution.problem
    if problem.hardware.kind.overlap != "proved":
        return graph_plan
    from graphrun.runtime.devices.open import open_device

    tell = notify or (lambda line: None)
    device = open_device(problem)
    for notice in device.notices:
        tell(f"  {notice}")
    solution = api.without_overlap(
        graph_plan.solution,
        device,
        cache=cache_folder(options.no_cache),
        tell=lambda line: tell(f"  {line}"),
    )
    return replace(graph_plan, solution=solution)


def _verdict(solution: Solution, style: Look) -> str:
    """Return the verdict on a plan, and the stages whose outputs are cached."""
    from graphrun.report.screen import listed
    from graphrun.report.verdicts import plan_verdict

    precomputed = listed(
        "precomputed",
        solution.problem.precomputed,
        ": outputs of earlier runs, neither planned nor loaded",
    )
    return "\n".join((style.first(plan_verdict(solution, style.product)), *precomputed))


def _is_expected(graph_plan: Planned) -> bool:
    """Return whether the plan has a published GGUF file that is still to be downloaded. Its bytes
    are then expected from the graph and not read from its header."""
    return bool(graph_plan.downloads) and any(
        component.variants[0].precision in GGUF_MIXES
        for component in graph_plan.solution.chosen.components
    )


def _trace(
    graph_plan: Planned, options: PlanOptions, run_options: RunOptions, values: Mapping[str, Any]
) -> Trace:
    """Run by the plan, and show the progress. Raises Interrupted, which says what is kept."""
    from graphrun.report.preview import Preview
    from graphrun.report.progress import Progress

    solution, notify = graph_plan.solution, run_options.notify
    cache, preview = cache_folder(options.no_cache), run_options.preview
    progress = Progress(solution.plan, solution.simulation, notify)
    try:
        # else a collection that searches a million objects of the libraries stops the first stages
        with progress, stop_on_interrupt(notify) as stop, not_collected() as resume_collection:
            return api.run(
                solution,
                graph_plan.graph,
                options.inputs,
                random_weights=run_options.random_weights,
                progress=stop.watch(progress, resume_collection),
                tell=notify,
                cache=cache,
                precomputed=graph_plan.precomputed,
                reuse=parse_reuse(run_options.reuse),
                note=notify,
                check_ordering=run_options.check_ordering,
                journal=Preview(preview, values) if preview is not None else None,
            )
    except KeyboardInterrupt:
        keeps_prompt = cache is not None and run_options.reuse != "none"
        raise Interrupted(
            f"interrupted at {progress.last or 'loading'}: nothing is written"
            f"{'; an encoded prompt is kept' if keeps_prompt else ''}; with --resume from the "
            "start, the run could continue at its last step"
        ) from None


def _save_trace(
    file: Path,
    trace: Trace,
    graph_plan: Planned,
    summary: Mapping[str, Any],
    values: Mapping[str, Any],
    paths: list[Path],
) -> None:
    """Write the trace of a run, with its plan, its output files ``paths`` and their source."""
    from graphrun.report.outputs import provenance
    from graphrun.report.perfetto import trace_json

    solution, folder = graph_plan.solution, file.resolve().parent
    record = {
        "date": datetime.now().astimezone().isoformat(" ", "minutes"),
        "files": [os.path.relpath(path.resolve(), folder) for path in paths],
        **provenance(graph_plan.graph.name, values, solution.problem.digest, graphrun.__version__),
    }
    plan = planfile.content(file, graph_plan.source, solution, summary)
    planfile.write_json(file, trace_json(file.name, trace, plan, record))

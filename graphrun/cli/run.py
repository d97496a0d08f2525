"""The command ``run``: run a graph or a saved plan once, or a graph for every line of a file."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

import graphrun
from graphrun import api
from graphrun.cli.common import (
    AsJson,
    GraphFile,
    Planned,
    app,
    cache_folder,
    load,
    look,
    open_graph,
    parse_reuse,
    plan_graph,
    say,
    show,
)
from graphrun.cli.downloads import download_all
from graphrun.cli.enforcing import enforced, kernel_line
from graphrun.cli.options import Outputs, Overwrite, PlanOptions, ReuseOption, Verbose, shared
from graphrun.cli.placing import ClusterFile, ObjectiveOption
from graphrun.cli.running import files_for, save, stop_on_interrupt
from graphrun.cli.terminal import print_coloured
from graphrun.errors import InputError, Interrupted
from graphrun.graph.precisions import GGUF_MIXES
from graphrun.memory_group import MemoryGroup
from graphrun.report import plan_files as planfile
from graphrun.trace import Trace


@app.command()
@shared()
def run(
    graph: GraphFile,
    options: PlanOptions,
    prompt: Annotated[
        str | None,
        typer.Option(help="Short for --set prompt=TEXT.", metavar="TEXT", show_default=False),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Short for --set seed=N. Equal seeds give equal outputs.",
            metavar="N",
            show_default=False,
        ),
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Use random weights instead of the source's.")
    ] = False,
    output: Outputs = None,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan", help="Save the plan to this file.", metavar="FILE", show_default=False
        ),
    ] = None,
    trace_file: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="Save the trace to this file. *.perfetto.json opens in Perfetto.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="Run once for each line of this file, JSON lines or CSV.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Save the run's state next to its output. The same command resumes from it.",
        ),
    ] = False,
    cluster: ClusterFile = None,
    objective: ObjectiveOption = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="If a line of --inputs is invalid, run nothing."),
    ] = False,
    overwrite: Overwrite = False,
    preview: Annotated[
        Path | None,
        typer.Option(
            help="Write a preview to this PNG every few steps, from the latents without the VAE.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    reuse: ReuseOption = "encoded",
    enforce: Annotated[
        bool,
        typer.Option(
            "--enforce",
            help="With --memory: the kernel kills a run that takes more (Linux cgroups).",
        ),
    ] = False,
    check_ordering: Annotated[
        bool,
        typer.Option(
            "--check-ordering",
            help="With --device sim: search for data races between copies and compute.",
        ),
    ] = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Run a graph or a saved plan.

    Shows planned next to measured numbers. With --inputs: one run for each line
    of a file.
    """
    contexts = ExitStack()
    group: MemoryGroup | None = None
    if enforce:
        options, group = contexts.enter_context(enforced(graph, options))
    for name, value in (("prompt", prompt), ("seed", seed)):
        if value is not None:
            if name in options.inputs:
                raise InputError(
                    f"--{name} {value} and --set {name}={options.inputs[name]}: leave one "
                    "of them out"
                )
            options = replace(options, set_=[*(options.set_ or []), f"{name}={value}"])
    notify, reuse_mode = None if as_json else say, parse_reuse(reuse)
    cache = cache_folder(options.no_cache)
    if objective is not None and cluster is None:
        raise InputError("--objective is for several machines: add --cluster FILE")
    pipeline_graph = load(graph, options) if graph.suffix != ".json" else None
    lists = pipeline_graph.list_input if pipeline_graph is not None else ""
    if inputs is not None or resume or cluster is not None or lists:
        has_trace = trace_file is not None and cluster is None
        if plan_file is not None or has_trace or preview is not None or check_ordering:
            single = "--plan, --trace, --preview and --check-ordering"
            many_runs = (
                f"a graph that runs for each of ${lists}"
                if lists
                else "--inputs, --resume and --cluster"
            )
            raise InputError(f"{single} are for a single run; leave them out with {many_runs}")
        if pipeline_graph is None:
            raise InputError(
                f"{graph} is a plan for one run, and --inputs and --resume make their own "
                "plans: name the graph"
            )
        from graphrun.cli.batches import run_batch

        batch_options = {
            "random_weights": random_weights,
            "cache": cache,
            "reuse": reuse_mode,
            "cluster": cluster,
            "trace_file": trace_file,
        }
        batch_options |= {"objective": objective} if objective is not None else {}
        run_batch(
            pipeline_graph,
            options,
            inputs,
            output,
            as_json=as_json,
            resume=resume,
            strict=strict,
            overwrite=overwrite,
            **batch_options,
        )
        return
    from graphrun.report.outputs import provenance
    from graphrun.report.preview import Preview
    from graphrun.report.progress import Progress
    from graphrun.report.screen import listed, measured_screen, plan_screen
    from graphrun.report.summary import summarize
    from graphrun.report.verdicts import plan_verdict

    planfile.require_writable(plan_file, trace_file, preview)
    graph_plan = (
        Planned(pipeline_graph, graph)
        if pipeline_graph is not None
        else open_graph(graph, options, to_run=True)
    )
    last_stage = graph_plan.solution.problem.until if graph_plan.solution is not None else ""
    target = files_for(
        graph_plan.graph.until(last_stage), output, options.inputs, overwrite=overwrite
    )
    graph_plan = plan_graph(
        graph_plan, options, reuse_mode, to_run=True, random_weights=random_weights, notify=notify
    )
    solution, style = (
        graph_plan.solution,
        replace(look(graph_plan, options, verbose), next_command=""),
    )
    values = api.planned_inputs(solution.problem, graph_plan.graph, options.inputs)
    if notify is not None:
        precomputed = listed(
            "precomputed",
            solution.problem.precomputed,
            ": outputs of earlier runs, neither planned nor loaded",
        )
        verdict = "\n".join((style.first(plan_verdict(solution, style.product)), *precomputed))
        print_coloured(
            plan_screen(solution, graph_plan.solve_seconds, style) if verbose else verdict
        )
        sys.stdout.flush()  # before the progress on stderr
    download_all(graph_plan.downloads, notify)
    while pipeline_graph is not None and _is_expected(graph_plan):
        # only the header of a GGUF file tells the type of each tensor: plan for its content
        graph_plan = plan_graph(
            replace(graph_plan, solution=None, downloads=[]),
            options,
            reuse_mode,
            to_run=True,
            random_weights=random_weights,
            notify=notify,
        )
        download_all(graph_plan.downloads, notify)
        solution = graph_plan.solution
        if notify is not None:
            print_coloured(style.first(plan_verdict(solution, style.product)))
            sys.stdout.flush()
    progress = Progress(solution.plan, solution.simulation, notify)
    try:
        with progress, stop_on_interrupt(notify) as stop:
            trace = api.run(
                solution,
                graph_plan.graph,
                options.inputs,
                random_weights=random_weights,
                progress=stop.watch(progress),
                tell=notify,
                cache=cache,
                precomputed=graph_plan.precomputed,
                reuse=reuse_mode,
                note=notify,
                check_ordering=check_ordering,
                journal=Preview(preview, values) if preview is not None else None,
            )
    except KeyboardInterrupt:
        encoded = (
            "; an encoded prompt is kept" if cache is not None and reuse_mode != "none" else ""
        )
        hint = "add --resume, and an interrupted run continues at its last step"
        raise Interrupted(
            f"interrupted at {progress.last or 'loading'}: nothing is written{encoded}; {hint}"
        ) from None
    summary = summarize(solution, graph_plan.solve_seconds, trace)
    if plan_file is not None:
        planfile.save(plan_file, graph_plan.source, solution, summary)
    paths = [
        str(path)
        for path in save(trace.outputs, target, graph_plan.graph, values, solution.problem.digest)
    ]
    if trace_file is not None:
        source = provenance(
            graph_plan.graph.name, values, solution.problem.digest, graphrun.__version__
        )
        _save_trace(
            trace_file,
            trace,
            planfile.content(trace_file, graph_plan.source, solution, summary),
            paths,
            source,
        )
    screen = measured_screen(solution, trace, paths, style)
    if group is not None:
        summary["kernel"] = {"limit_bytes": group.limit_bytes, "peak_bytes": group.peak_bytes}
        screen = f"{screen}\n{kernel_line(group)}"
    contexts.close()
    show(summary, as_json, screen)
    if trace.overruns:
        raise typer.Exit(4)


def _is_expected(graph_plan: Planned) -> bool:
    """Return whether the plan has a published GGUF file that is still to be downloaded. Its bytes
    are then expected from the graph and not read from its header."""
    return bool(graph_plan.downloads) and any(
        component.variants[0].precision in GGUF_MIXES
        for component in graph_plan.solution.chosen.components
    )


def _save_trace(
    file: Path, trace: Trace, plan: dict[str, Any], paths: list[str], source: dict[str, Any]
) -> None:
    """Write the trace of a run, with its plan, its output files and their ``source``."""
    from graphrun.report.perfetto import trace_json

    folder = file.resolve().parent
    files = [os.path.relpath(Path(path).resolve(), folder) for path in paths]
    record = {
        "date": datetime.now().astimezone().isoformat(" ", "minutes"),
        "files": files,
        **source,
    }
    planfile.write_json(file, trace_json(file.name, trace, plan, record))

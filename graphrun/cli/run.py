"""The command ``run``: runs a graph or a saved plan once, or a graph for every line of a file, and
shows planned and measured."""

from __future__ import annotations

import os
import sys
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
    checked_reuse,
    load,
    look,
    named,
    planned,
    say,
    show,
)
from graphrun.cli.downloads import downloaded
from graphrun.cli.options import Asked, Outputs, Overwrite, Reuse, Verbose, shared
from graphrun.cli.placing import ClusterFile, Objective
from graphrun.cli.running import files_for, saved, stopping
from graphrun.cli.terminal import coloured
from graphrun.errors import InputError, Interrupted
from graphrun.report import plan_files as planfile
from graphrun.trace import Trace


@app.command()
@shared()
def run(
    graph: GraphFile,
    asked: Asked,
    prompt: Annotated[
        str | None, typer.Option(help="Short for --set prompt=...", show_default=False)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Short for --set seed=...; one seed, one output.", show_default=False),
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Random weights instead of the graph's source.")
    ] = False,
    output: Outputs = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Save the plan to this file.", show_default=False)
    ] = None,
    trace_file: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="Save the trace to this file; *.perfetto.json for a trace viewer.",
            show_default=False,
        ),
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="Run once for every line of this file: JSON lines or CSV.", show_default=False
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Save the run's state beside its output; the same command resumes from it.",
        ),
    ] = False,
    cluster: ClusterFile = None,
    objective: Objective = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Stop at the first broken line of --inputs, before anything runs."
        ),
    ] = False,
    overwrite: Overwrite = False,
    preview: Annotated[
        Path | None,
        typer.Option(
            help="Write a preview to this PNG every few steps, made from latents without the VAE.",
            show_default=False,
        ),
    ] = None,
    reuse: Reuse = "encoded",
    check_ordering: Annotated[
        bool,
        typer.Option(
            "--check-ordering",
            help="With --device sim: look for data races between copies and compute.",
        ),
    ] = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Run a graph or a saved plan and show planned and measured numbers; or run a graph for every
    line of a file."""
    for name, value in (("prompt", prompt), ("seed", seed)):
        if value is not None:
            if name in asked.inputs:
                raise InputError(
                    f"--{name} {value} and --set {name}={asked.inputs[name]}: leave one of them out"
                )
            asked = replace(asked, set_=[*(asked.set_ or []), f"{name}={value}"])
    told, what = None if as_json else say, checked_reuse(reuse)
    cache = cache_folder(asked.no_cache)
    if objective is not None and cluster is None:
        raise InputError("--objective is for several machines: add --cluster FILE")
    loaded = load(graph, asked) if graph.suffix != ".json" else None
    lists = loaded.list_input if loaded is not None else ""
    if inputs is not None or resume or cluster is not None or lists:
        traced = trace_file is not None and cluster is None
        if plan_file is not None or traced or preview is not None or check_ordering:
            single = "--plan, --trace, --preview and --check-ordering"
            which = (
                f"a graph that runs for each of ${lists}"
                if lists
                else "--inputs, --resume and --cluster"
            )
            raise InputError(f"{single} are for a single run; leave them out with {which}")
        if loaded is None:
            raise InputError(
                f"{graph} is a plan for one run, and --inputs and --resume make their own plans: name the graph"
            )
        from graphrun.cli.batches import run_batch

        many = {
            "random_weights": random_weights,
            "cache": cache,
            "reuse": what,
            "cluster": cluster,
            "trace_file": trace_file,
        }
        many |= {"objective": objective} if objective is not None else {}
        run_batch(
            loaded,
            asked,
            inputs,
            output,
            as_json=as_json,
            resume=resume,
            strict=strict,
            overwrite=overwrite,
            **many,
        )
        return
    from graphrun.report.outputs import made_of
    from graphrun.report.preview import Preview
    from graphrun.report.progress import Progress
    from graphrun.report.screen import listed, measured_screen, plan_screen
    from graphrun.report.summary import summarize
    from graphrun.report.verdicts import fits

    planfile.require_writable(plan_file, trace_file, preview)
    made = Planned(loaded, graph) if loaded is not None else named(graph, asked, to_run=True)
    until = made.solution.problem.until if made.solution is not None else ""
    target = files_for(made.graph.until(until), output, asked.inputs, overwrite=overwrite)
    made = planned(made, asked, what, to_run=True, random_weights=random_weights, told=told)
    solution, shown = made.solution, replace(look(made, asked, verbose), then="")
    values = api.planned_inputs(solution.problem, made.graph, asked.inputs)
    if told is not None:
        precomputed = listed(
            "precomputed",
            solution.problem.precomputed,
            ": outputs of earlier runs, neither planned nor loaded",
        )
        verdict = "\n".join((shown.first(fits(solution, shown.made)), *precomputed))
        coloured(plan_screen(solution, made.solve_seconds, shown) if verbose else verdict)
        sys.stdout.flush()  # before the progress on stderr
    downloaded(made.downloads, told)
    progress = Progress(solution.plan, solution.simulation, told)
    try:
        with progress, stopping(told) as stop:
            trace = api.run(
                solution,
                made.graph,
                asked.inputs,
                random_weights=random_weights,
                progress=stop.watched(progress),
                tell=told,
                cache=cache,
                precomputed=made.precomputed,
                reuse=what,
                note=told,
                check_ordering=check_ordering,
                journal=Preview(preview, values) if preview is not None else None,
            )
    except KeyboardInterrupt:
        encoded = "; an encoded prompt is kept" if cache is not None and what != "none" else ""
        advice = "add --resume to a run that can go on at its last step"
        raise Interrupted(
            f"interrupted at {progress.last or 'loading'}: nothing is written{encoded}; {advice}"
        ) from None
    summary = summarize(solution, made.solve_seconds, trace)
    if plan_file is not None:
        planfile.save(plan_file, made.source, solution, summary)
    written = [
        str(path)
        for path in saved(trace.outputs, target, made.graph, values, solution.problem.digest)
    ]
    if trace_file is not None:
        about = made_of(made.graph.name, values, solution.problem.digest, graphrun.__version__)
        _save_trace(
            trace_file,
            trace,
            planfile.content(trace_file, made.source, solution, summary),
            written,
            about,
        )
    show(summary, as_json, measured_screen(solution, trace, written, shown))
    if trace.overruns:
        raise typer.Exit(4)


def _save_trace(
    file: Path, trace: Trace, plan: dict[str, Any], written: list[str], made: dict[str, Any]
) -> None:
    """Writes the trace of a run with its ``plan``, the paths of the files that it wrote, and what
    these were ``made`` of."""
    from graphrun.report.perfetto import trace_json

    folder = file.resolve().parent
    files = [os.path.relpath(Path(path).resolve(), folder) for path in written]
    about = {"date": datetime.now().astimezone().isoformat(" ", "minutes"), "files": files, **made}
    planfile.write_json(file, trace_json(file.name, trace, plan, about))

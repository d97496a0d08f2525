"""The entry point of the ``graphrun`` command. Exit codes: 0 done, 1 over a limit, 2 bad input, 3
no plan fits, 4 the run broke its plan, 130 interrupted."""

from __future__ import annotations

import _thread
import atexit
import gc
import io
import logging
import os
import sys
import threading
import warnings
from typing import Annotated, NoReturn

import typer

import graphrun
from graphrun.cli import (
    fitting,
    graphs,
    importing,
    interop,
    maintenance,
    nodes,
    plans,
    run,
    serving,
    teams,
)
from graphrun.cli.common import app, json_text, say
from graphrun.cli.options import merge_options, pair
from graphrun.cli.terminal import print_coloured, width
from graphrun.errors import GraphrunError, InputError
from graphrun.limits import LIMITS, raise_limits
from graphrun.systems import request_huge_pages

# The order of --help. Commands join the app when their module is imported, perhaps before this one.
_MODULES = (plans, teams, run, serving, graphs, importing, fitting, interop, nodes, maintenance)
_ORDER = [module.__name__ for module in _MODULES]
app.registered_commands.sort(
    key=lambda command: _ORDER.index(command.callback.__module__) if command.callback else 0
)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"graphrun {graphrun.__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_show_version
        ),
    ] = False,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            help="Raise a limit for files and inputs, such as steps=20000 (docs/security.md). "
            "Repeatable.",
            metavar="NAME=N",
        ),
    ] = None,
) -> None:
    """Run large diffusion models on small GPUs.

    graphrun plans what is on the GPU and when, and follows that plan exactly.

    Exit codes: 0 done, 1 over a limit, 2 bad input, 3 no plan fits, 4 the run
    broke its plan, 130 interrupted.
    """
    for name, value in (pair("--limit", text) for text in limit or ()):
        if not value.isdecimal() or len(value) > LIMITS.digits:
            raise InputError(
                f"--limit {name}={value[:40]}: give a number, such as --limit steps=20000"
            )
        raise_limits(**{name: int(value)})


def main() -> NoReturn:
    """Run the ``graphrun`` command. A `GraphrunError` becomes a message and an exit code."""
    # a pipe is UTF-8 on Windows too; other terminals may have no block characters: replace them
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="replace")
    warnings.filterwarnings("ignore")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    request_huge_pages(os.environ)
    for library in ("DIFFUSERS", "TRANSFORMERS"):  # both configure their loggers on import
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    sys.unraisablehook = _interrupt_again
    # else Python searches a million objects of the libraries for reference cycles as it ends, which
    # takes a second and frees nothing that the process still needs
    atexit.register(gc.freeze)
    try:
        app(prog_name="graphrun")
    except GraphrunError as error:
        _show_error(error)
        sys.exit(error.exit_code)
    sys.exit(0)


def _interrupt_again(dropped_error: sys.UnraisableHookArgs) -> None:
    """Repeat an interrupt that Python dropped inside ``__del__``. Example: the ``__del__`` of the
    tokenizers' regular expressions."""
    if isinstance(dropped_error.exc_value, KeyboardInterrupt):
        threading.Timer(0.1, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(dropped_error)


def _show_error(error: GraphrunError) -> None:
    """Print the message to stderr; with --json, print an infeasible budget to stdout."""
    from graphrun.solve.infeasible import Infeasible

    if not isinstance(error, Infeasible):
        say(f"graphrun: {error}")
        return
    from graphrun.report.screen import Look
    from graphrun.report.whatif_screens import (
        infeasible_json,
        infeasible_screen,
        options_text,
        suggestion_sentence,
    )
    from graphrun.solve.suggestions import leading

    best = leading(error.suggestions, error.capacity_bytes)
    first = [best] if best is not None else []
    options, suggestion = next(
        (
            (text, suggestion)
            for suggestion in (*first, *error.suggestions)
            if (text := options_text(suggestion, error.capacity_bytes))
        ),
        ("", None),
    )
    next_command = (
        f"next: graphrun {merge_options(sys.argv[1:], options.split())}" if options else ""
    )
    sentence = (
        suggestion_sentence(suggestion, "a run", fits=False) if suggestion is not None else ""
    )
    look = Look(width(), next_command=next_command, suggestion=sentence)
    print_coloured(infeasible_screen(error, look), err=True)
    if "--json" in sys.argv:
        typer.echo(json_text(infeasible_json(error)))

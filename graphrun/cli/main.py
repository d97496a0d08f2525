"""The entry point of the ``graphrun`` command: its commands, and errors as messages with an exit code.

Exit codes: 0 done, 2 bad input, 3 infeasible, 4 the run broke its plan.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from typing import Annotated, NoReturn

import typer

import graphrun
from graphrun.cli.common import app
from graphrun.errors import GraphrunError

# Commands join the app when they are imported: in the order of --help.
# isort: off
from graphrun.cli import plans, run, graphs, importing, interop, maintenance  # noqa: F401

# isort: on


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"graphrun {graphrun.__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Run diffusion pipelines on GPUs that are too small for them: plan the placement of all weights, then execute that plan.

    Exit codes: 0 done, 2 bad input, 3 infeasible, 4 the run broke its plan.
    """


def main() -> NoReturn:
    """Entry point of the ``graphrun`` command. A `GraphrunError` becomes a message and an exit code, without a traceback."""
    warnings.filterwarnings("ignore")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for library in ("DIFFUSERS", "TRANSFORMERS"):  # both configure their loggers on import
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    try:
        app()
    except GraphrunError as error:
        typer.echo(_error_text(error), err=True)
        if "--json" in sys.argv:
            _error_json(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
    sys.exit(0)


def _error_text(error: GraphrunError) -> str:
    from graphrun.solve.infeasible import Infeasible

    if isinstance(error, Infeasible):
        from graphrun.report.whatif_screens import infeasible_screen

        return infeasible_screen(error)
    return f"graphrun: {error}"


def _error_json(error: GraphrunError) -> None:
    """With ``--json`` the data of an infeasible budget go to stdout; the screen has gone to stderr."""
    from graphrun.solve.infeasible import Infeasible

    if isinstance(error, Infeasible):
        from graphrun.report.whatif_screens import infeasible_json

        typer.echo(json.dumps(infeasible_json(error), indent=1))

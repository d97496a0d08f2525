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
from graphrun.cli import cache, graphs, importing, interop, machine, plans, run  # noqa: F401  (each adds its commands to the app)
from graphrun.cli.common import app
from graphrun.errors import GraphrunError


@app.callback()
def about(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    """Run diffusion pipelines on cards too small for them: plan ahead what lives where, prove it, then do exactly that.

    Exit codes: 0 done, 2 bad input, 3 infeasible, 4 the run broke its plan.
    """
    if version:
        typer.echo(f"graphrun {graphrun.__version__}")
        raise typer.Exit


def main() -> NoReturn:
    """Entry point of the ``graphrun`` command. Errors that graphrun raises on purpose become one message and an exit code."""
    warnings.filterwarnings("ignore")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for library in ("DIFFUSERS", "TRANSFORMERS"):  # both configure their loggers anew when they are imported
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
        from graphrun.report.infeasible import infeasible_screen

        return infeasible_screen(error)
    return f"graphrun: {error}"


def _error_json(error: GraphrunError) -> None:
    """For ``--json`` an infeasible budget is an answer too: the screen goes to stderr, the data to stdout."""
    from graphrun.solve.infeasible import Infeasible

    if isinstance(error, Infeasible):
        from graphrun.report.infeasible import infeasible_json

        typer.echo(json.dumps(infeasible_json(error), indent=1))

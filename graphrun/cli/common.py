"""Shared code of the commands: the typer app, graphs, the cache folder, budgets, printing."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from graphrun import api, devices
from graphrun.cli.options import PlanOptions
from graphrun.cli.terminal import print_coloured
from graphrun.errors import InputError, Interrupted
from graphrun.files import user_cache
from graphrun.garbage import rare_garbage_collection
from graphrun.graph.shipped import shipped_graphs
from graphrun.reading import printable
from graphrun.report import plan_files as planfile
from graphrun.systems import spills_vram
from graphrun.units import GIB, parse_size, show_size

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph
    from graphrun.model.hardware import Hardware


JSON_VERSION = 1


class _Commands(TyperGroup):
    """The commands. An interrupt that a command does not handle ends it with exit code 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; the same command starts again") from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _graphs(prefix: str) -> list[str]:
    """Return the shell completions of ``prefix``: graphrun's own graphs, files and folders."""
    files = [
        f"{path}{os.sep}" if os.path.isdir(path) else path
        for path in sorted(glob.glob(f"{glob.escape(prefix)}*"))
    ]
    return [*(name for name in shipped_graphs() if name.startswith(prefix)), *files]


GraphFile = Annotated[
    Path,
    typer.Argument(
        help="Graph file, name of a graph (graphrun list), or plan saved with -o.",
        show_default=False,
        autocompletion=_graphs,
    ),
]
OnlyGraph = Annotated[
    Path,
    typer.Argument(
        help="Graph file, or name of a graph (graphrun list).",
        show_default=False,
        autocompletion=_graphs,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON (docs/json.md).")]


def echo(text: str, *, nl: bool = True, err: bool = False) -> None:
    """Print ``text`` with control characters escaped: names in it may come from a file."""
    typer.echo(printable(text), nl=nl, err=err)


def with_budget(options: PlanOptions, hardware: Hardware) -> PlanOptions:
    """Return ``options`` with a budget for ``hardware``, the main device.

    Without one, or with ``auto``, it is the free memory of this machine's card or, on a CPU, of
    this machine, less a margin. For other hardware it is the whole capacity. A larger budget gets a
    warning.

    Raises InputError for a budget that the hardware does not have, and for the simulated device,
    which has no memory of its own.
    """
    from graphrun.profile import hardware as estimates

    devices.refuse_wrong_budgets(hardware, options)
    if hardware.unified:
        return _with_memory(options, hardware)
    has_budget = options.vram not in (None, "auto")
    if has_budget and (
        options.hardware is not None
        or hardware.kind.free_memory == "none"
        or "," in str(options.vram)
    ):
        return options
    if hardware.kind.free_memory == "none":
        raise InputError(
            "the simulated device has no memory of its own: add --vram, such as --vram 8G"
        )
    free_bytes = estimates.free_bytes(hardware.kind) if options.hardware is None else None
    nbytes = hardware.capacity_bytes if free_bytes is None else estimates.budget_of(free_bytes)
    budget_text = f"{show_size(nbytes)}, what the {hardware.name} has"
    if free_bytes is not None:
        budget_text += f" free ({show_size(free_bytes)}) less 5 % for other programs"
    if has_budget:
        if (
            free_bytes is not None
            and parse_size(str(options.vram), whole_bytes=hardware.capacity_bytes, name="vram")
            > nbytes
        ):
            consequence = (
                "a run that takes more becomes slow on Windows"
                if spills_vram()
                else "a run that finds less memory is planned again"
            )
            say(
                f"--vram {options.vram} is more than {budget_text}: {consequence}; "
                "--vram auto is safe"
            )
        return options
    if free_bytes is None and options.hardware is None:
        say(
            f"no {hardware.kind.label} here: this is for an {hardware.name}; --hardware names "
            "another card"
        )
    say(f"--vram auto: {budget_text}")
    return replace(options, vram=str(nbytes))


def _with_memory(options: PlanOptions, hardware: Hardware) -> PlanOptions:
    from graphrun.profile.hardware import is_present

    nbytes = devices.memory_budget(options.memory, hardware)
    if not is_present(hardware):
        if options.memory in (None, "auto"):
            whole = show_size(hardware.capacity_bytes)
            say(
                f"--memory auto: {show_size(nbytes)}, the {whole} of {hardware.name} less "
                "5 % for other programs"
            )
    elif options.memory in (None, "auto"):
        say(
            f"--memory auto: {show_size(nbytes)}, what this process takes and what this machine "
            "has left, less 5 % for other programs"
        )
    elif nbytes > (safe_bytes := devices.memory_budget("auto", hardware)):
        say(
            f"--memory {options.memory} is more than {show_size(safe_bytes)}, what this machine "
            "has left less 5 % for other programs: the system may swap or end the run; "
            "--memory auto is safe"
        )
    return replace(options, memory=str(nbytes))


def say(line: str) -> None:
    """Print ``line`` to stderr as `echo` does, above a progress bar. `typer.echo` would write to
    the stream behind the stream that rich puts in its place."""
    sys.stderr.write(f"{printable(line)}\n")
    sys.stderr.flush()


def cache_folder(is_off: bool) -> Path | None:
    """Return the cache folder (`graphrun.files.user_cache`); None if ``is_off``."""
    return None if is_off else user_cache(os.environ)


def cards_for(options: PlanOptions, cache: Path | None, *, to_run: bool = False) -> list[Hardware]:
    """Return the hardware of each device that ``options`` name, the main device first."""
    return devices.cards_for(
        options.vram, options.memory, options.hardware, options.device, cache, to_run=to_run
    )


SYSTEM_BYTES = 4 * GIB  # of RAM, for the system, a browser, and what a run takes beside weights


def system_bytes(ram_bytes: int) -> int:
    """Return the bytes of RAM that weights leave to the system on a machine with ``ram_bytes``."""
    return min(SYSTEM_BYTES, ram_bytes // 4)


def load(path: Path, options: PlanOptions) -> Graph:
    """Load the graph at ``path`` with the options that change graphs, such as ``--until``. Raises
    InputError for a plan."""
    if path.suffix == ".json":
        raise InputError(
            f"{path} is JSON, and this command takes a graph: name a YAML file, or a graph that "
            "graphrun list shows"
        )
    hardware = cards_for(options, cache_folder(options.no_cache))[0]
    graph = devices.in_dtype(load_as_typed(path, options), options.dtype, hardware)
    if options.dtype is None and graph.dtypes:
        slow_dtypes = " and ".join(slow_dtype for slow_dtype, _ in graph.dtypes)
        say(f"float32 in place of {slow_dtypes}, which is slower here; --dtype graph keeps it")
    return graph.until(options.until)


def load_as_typed(path: Path, options: PlanOptions) -> Graph:
    """Load the graph at ``path`` with the packages, source and components in ``options``. Raises
    InputError for a local source that lacks a component: nothing could run a plan for it."""
    source = options.source
    is_local = source is not None and (source.startswith((".", "~", "/")) or "/" not in source)
    if source is not None and is_local and not Path(source).expanduser().exists():
        raise InputError(
            f"--source {source}: there is no such folder or file; give the path of one, or a "
            "repository (owner/name)"
        )
    graph = api.load(
        path,
        trust=options.trust_package or (),
        source=source,
        absent=options.absent or (),
    )
    if source is not None and (folder := Path(source).expanduser()).is_dir():
        _refuse_without_components(graph, folder.resolve(), source)
    return graph


def _refuse_without_components(graph: Graph, folder: Path, source: str) -> None:
    """Raise InputError if ``folder``, the ``source`` as typed, lacks a component of ``graph``."""
    for component in graph.components.values():
        place = Path(component.source or "")
        if not place.is_absolute() or not place.is_relative_to(folder) or place.exists():
            continue
        files = sorted(path for path in folder.iterdir() if path.suffix == ".gguf")
        text = (
            f"--source {source}: it has no folder {place.name}: give a folder in the layout of "
            "diffusers, or leave --source out"
        )
        if files:
            text += (
                f"; for the GGUF file: graphrun import {files[0]} -o {graph.name}.yaml "
                "--config OWNER/NAME, the repository of the model"
            )
        raise InputError(text)


def parse_reuse(reuse: str) -> Any:
    """Return the value of ``--reuse``. Raises InputError for an unknown value."""
    if reuse not in ("encoded", "all", "none"):
        raise InputError(f"--reuse {reuse!r} is not known; use encoded, all or none")
    return reuse


def show(summary: Any, as_json: bool, screen: str) -> None:
    """Print ``summary`` as JSON, or ``screen``."""
    if as_json:
        echo(json_text(summary))
    else:
        print_coloured(screen)


def json_text(summary: Mapping[str, Any]) -> str:
    """Return the text of ``--json`` (keys: docs/json.md). The version grows when a key is removed
    or changes its meaning."""
    return json.dumps({"version": JSON_VERSION, **summary}, indent=1)


def write_or_print(text: str, output_file: Path | None) -> None:
    """Write ``text`` to ``output_file`` and print its name; print ``text`` if it is None."""
    if output_file is None:
        echo(text, nl=False)
    else:
        planfile.write_text(output_file, text)
        echo(f"wrote {output_file}")


@contextlib.contextmanager
def native_stdout_to_stderr() -> Iterator[None]:
    """Redirect file descriptor 1 to stderr: the solver's native code may print, and stdout of
    --json must stay JSON."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def prepare_to_plan() -> None:
    """Set the environment of a process that plans, before it imports torch.

    Planning compiles nothing: without dynamo, libraries import a second faster. It hardly computes
    on the CPU: passive OpenMP threads sleep between operators, and do not spin.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@contextlib.contextmanager
def solving() -> Iterator[None]:
    """Context of the solver: what its native code prints goes to stderr, and garbage is collected
    seldom."""
    with rare_garbage_collection(), native_stdout_to_stderr():
        yield

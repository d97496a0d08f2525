"""Options, interrupts and output files of a single run and of a batch. The first interrupt (Ctrl-C)
stops a run at the end of the current step, a second one immediately."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

import graphrun
from graphrun.cli.common import AsJson, say
from graphrun.cli.options import (
    Outputs,
    Overwrite,
    PlanOptions,
    ReuseOption,
    Verbose,
    option,
)
from graphrun.cli.placing import ClusterFile, ObjectiveOption
from graphrun.errors import InputError
from graphrun.report.outputs import (
    FPS,
    VIDEOS,
    Files,
    output_files,
    provenance,
    require_rate,
    save_outputs,
)

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The values of the options of ``run``, next to `PlanOptions`, as typed."""

    prompt: Annotated[
        str | None,
        option("Short for --set prompt=TEXT.", "TEXT"),
    ] = None
    seed: Annotated[
        int | None,
        option("Short for --set seed=N. Equal seeds give equal outputs.", "N"),
    ] = None
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Use random weights instead of the source's.")
    ] = False
    output: Outputs = None
    plan_file: Annotated[
        Path | None,
        option("Save the plan to this file.", "FILE", "--plan"),
    ] = None
    trace_file: Annotated[
        Path | None,
        option(
            "Save the trace to this file. *.perfetto.json opens in Perfetto.", "FILE", "--trace"
        ),
    ] = None
    inputs: Annotated[
        Path | None,
        option("Run once for each line of this file, JSON lines or CSV.", "FILE"),
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Save the run's state next to its output. The same command resumes from it.",
        ),
    ] = False
    cluster: ClusterFile = None
    objective: ObjectiveOption = None
    strict: Annotated[
        bool, typer.Option("--strict", help="If a line of --inputs is invalid, run nothing.")
    ] = False
    overwrite: Overwrite = False
    preview: Annotated[
        Path | None,
        option(
            "Write a preview to this PNG every few steps, from the latents without the VAE.", "FILE"
        ),
    ] = None
    reuse: ReuseOption = "encoded"
    divide: Annotated[
        int,
        option(
            "Divide the sequence of the transformer over this many equal devices, with a process "
            "for each. --vram is for each; RAM and --memory are for all together.",
            "N",
            min=1,
        ),
    ] = 1
    enforce: Annotated[
        bool,
        typer.Option(
            "--enforce",
            help="With --memory: the kernel kills a run that takes more (Linux cgroups).",
        ),
    ] = False
    check_ordering: Annotated[
        bool,
        typer.Option(
            "--check-ordering",
            help="With --device sim: search for data races between copies and compute.",
        ),
    ] = False
    verbose: Verbose = False
    as_json: AsJson = False

    @property
    def has_many_runs(self) -> bool:
        """Whether options are set for which a batch runs."""
        return self.inputs is not None or self.resume or self.cluster is not None

    @property
    def notify(self) -> Callable[[str], None] | None:
        """The function that prints remarks on a run; None with ``--json``."""
        return None if self.as_json else say

    def with_inputs(self, options: PlanOptions) -> PlanOptions:
        """Return ``options`` with the inputs ``--prompt`` and ``--seed``. Raises InputError if
        ``--set`` has them too."""
        sets = list(options.set_ or [])
        for name, value in (("prompt", self.prompt), ("seed", self.seed)):
            if value is not None:
                if name in options.inputs:
                    raise InputError(
                        f"--{name} {value} and --set {name}={options.inputs[name]}: leave one "
                        "of them out"
                    )
                sets.append(f"{name}={value}")
        return replace(options, set_=sets or options.set_)


class Stop:
    """Whether an interrupt was received."""

    def __init__(self) -> None:
        self.requested = False

    def watch(
        self,
        progress: Callable[[int, int, int], None] | None,
        at_start: Callable[[], None] | None = None,
    ) -> Callable[[int, int, int], None]:
        """Return ``progress``, extended to raise KeyboardInterrupt after an interrupt. The error is
        raised at the start of a call, which is the end of a step. ``at_start`` is called once,
        before the first call."""
        starting = [at_start] if at_start is not None else []

        def called(slot: int, call: int, calls: int) -> None:
            if self.requested:
                raise KeyboardInterrupt
            while starting:
                starting.pop()()
            if progress is not None:
                progress(slot, call, calls)

        return called


@contextlib.contextmanager
def stop_on_interrupt(notify: Callable[[str], None] | None) -> Iterator[Stop]:
    """Set a flag at the first SIGINT, and raise KeyboardInterrupt at the second."""
    stop = Stop()

    def interrupted(_: int, __: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        if notify is not None:
            notify("  stopping at the end of this step; interrupt again to stop now")

    try:
        previous_handler = signal.signal(signal.SIGINT, interrupted)
    except ValueError:  # not the main thread, which alone may set handlers
        yield stop
        return
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def files_for(
    graph: Graph,
    output: list[str] | None,
    inputs: Mapping[str, Any],
    *,
    overwrite: bool,
    of_list: bool = False,
    resume: bool = False,
) -> Files:
    """Return the files for the outputs of ``graph``, or of a list of requests (`output_files`).

    ``resume``: files whose `state_folder` exists may be overwritten. Raises InputError if files
    cannot be written, or if files named by ``output`` exist and may not be overwritten.
    """

    def resumes(files: Files) -> bool:
        return resume and state_folder(files).exists()

    default = Path("out") / graph.name
    files = output_files(
        output or (), graph.kinds(), default, overwrite=overwrite, of_list=of_list, resumes=resumes
    )
    refuse_rate(files, graph, inputs)
    return files


def state_folder(files: Files) -> Path:
    """Return the folder, next to the first of ``files``, for the state that ``--resume`` saves."""
    first = next(iter(files.values()))
    return first.parent / f".{first.stem}.resume"


def refuse_rate(files: Files, graph: Graph, inputs: Mapping[str, Any]) -> None:
    """Raise InputError if ``files`` has a video and no video file supports its frame rate."""
    # an input that is not a number is refused later, with the other inputs
    with contextlib.suppress(TypeError, ValueError):
        require_rate(files, _rate(files, graph, inputs))


def save(
    outputs: Mapping[str, Any], target: Files, graph: Graph, inputs: Mapping[str, Any], plan: str
) -> list[Path]:
    """Write ``outputs`` and return the files.

    Videos have the frame rate of ``graph`` or of its pipeline. All ``inputs``, and ``plan``, the
    digest of the plan, go into the metadata of the files.
    """
    return save_outputs(
        outputs,
        target,
        _rate(target, graph, inputs) or FPS,
        provenance(graph.name, inputs, plan, graphrun.__version__),
    )


def _rate(files: Files, graph: Graph, inputs: Mapping[str, Any]) -> float | None:
    """Return the frame rate of the videos among ``files``; None without videos or a rate."""
    if not any(path.suffix.lower() in VIDEOS for path in files.values()):
        return None
    from graphrun.ops.pipeline import frames_per_second

    return frames_per_second(graph, inputs)

"""Runs of graphs in ComfyUI's process: one `Session` at a time, planned again for other sizes.

prepare   node's thread      load or import the graph, plan                 -> PreparedRun
reserve   ComfyUI's thread   ComfyUI unloads models (`graphrun.comfyui.memory`)
run       node's thread      the session's next run
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrun.comfyui.memory import free_bytes, patcher_of, reserve
from graphrun.comfyui.progress import NodeProgress, ReportProgress, Stopped
from graphrun.comfyui.values import joined, pictures_in
from graphrun.errors import GraphError, GraphrunError, InputError
from graphrun.files import user_cache
from graphrun.graph.graph import Graph
from graphrun.graph.settings import seeds_of
from graphrun.graph.shipped import shipped_graphs
from graphrun.graph.values import did_you_mean
from graphrun.serve.bodies import picture_inputs
from graphrun.units import parse_size, roughly, show_size

if TYPE_CHECKING:
    from graphrun.model.hardware import Hardware
    from graphrun.model.solution import Solution
    from graphrun.session import Session
    from graphrun.solve.infeasible import Infeasible

AUTO = "auto"
PREVIEWS = 8  # about the largest number of previews in a run
BAR = 100  # of ComfyUI's progress bar
SCREEN_COLUMNS = 80
MOST_SUGGESTIONS = 3  # in an error
STEPS = ("steps", "num_inference_steps")  # names of the input with the number of steps


class DoesNotFit(GraphrunError):
    """No plan fits the node's budget. The message says what to type instead."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """What a node asks for.

    ``graph``: a name, a graph file or a folder of a diffusers pipeline. ``device``: a kind of
    device; `AUTO`: ComfyUI's. ``budget``, ``ram``: sizes as typed; "": what is free. ``allow``:
    what may change the picture. ``values``: inputs by the node's names; None or "" is not passed
    on. ``extra_inputs``: inputs by the graph's names.
    """

    graph: str
    device: str
    budget: str
    ram: str
    allow: tuple[str, ...]
    values: Mapping[str, Any]
    extra_inputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A planned run. ``weights_bytes``, ``working_bytes``: as for `memory.reserve`."""

    inputs: Mapping[str, Any]
    solution: Solution
    weights_bytes: int
    working_bytes: int


class LocalEngine:
    """The session of this process, and ComfyUI's patcher for its weights. One node uses it at a
    time. ``cache``: a folder of dry runs and plans; None: the user's."""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache
        self._key: tuple[Any, ...] = ()
        self._session: Session | None = None
        self._patcher: Any = None
        self._is_stopped = threading.Event()

    @property
    def session(self) -> Session | None:
        """The session; None before the first run."""
        return self._session

    @property
    def patcher(self) -> Any:
        """ComfyUI's patcher for the weights; None without a session."""
        return self._patcher

    def stop(self) -> None:
        """Stop the run at its next call into a component."""
        self._is_stopped.set()

    def close(self) -> None:
        """Free everything."""
        session, self._session, self._patcher, self._key = self._session, None, None, ()
        if session is not None:
            session.close()

    def prepare(self, request: LocalRequest, comfy_device: Any) -> PreparedRun:
        """Plan the run of ``request``. ``comfy_device``: ComfyUI's torch device.

        Raises DoesNotFit, and the errors of graphs and inputs.
        """
        from graphrun import devices
        from graphrun.solve.infeasible import Infeasible

        self._is_stopped.clear()
        cache = self._cache or user_cache(os.environ)
        kind = comfy_device.type if request.device == AUTO else request.device
        cards = devices.cards_for(None, None, None, kind, cache, to_run=True)
        graph = devices.in_dtype(open_graph(request.graph, cache), None, cards[0])
        graph.refuse_list()
        inputs = inputs_for(graph, request)
        key = (graph.path, graph.digest, kind, request.budget, request.ram, request.allow)
        try:
            if self._session is None or key != self._key:
                self.close()
                self._session = self._opened(graph, cards, request, inputs, cache, comfy_device)
                self._key = key
            solution = self._session.plan(inputs)
        except Infeasible as error:
            raise DoesNotFit(refusal_text(error)) from None
        simulation = solution.simulation
        weights_bytes = max(slot.resident_bytes for slot in simulation.all_slots)
        workspace_bytes = solution.problem.hardware.workspace_bytes
        working_bytes = max(0, simulation.peak_bytes - weights_bytes) + workspace_bytes
        return PreparedRun(inputs, solution, weights_bytes, working_bytes)

    def _opened(
        self,
        graph: Graph,
        cards: list[Hardware],
        request: LocalRequest,
        inputs: Mapping[str, Any],
        cache: Path,
        comfy_device: Any,
    ) -> Session:
        from graphrun.session import Session

        budgets = budgets_for(cards[0], request, lambda: free_bytes(comfy_device))
        return Session(
            graph, inputs=inputs, hardware=cards, cache=cache, allow=request.allow, **budgets
        )

    def reserve(self, run: PreparedRun, comfy_device: Any) -> None:
        """Have ComfyUI make room for ``run``. Call from ComfyUI's thread."""
        assert self._session is not None
        if self._patcher is None:
            device = self._session.device.torch_device
            # a simulated device stands for ComfyUI's own
            is_simulated = run.solution.problem.hardware.kind.has_virtual_clock
            if is_simulated or device.type == comfy_device.type:
                device = comfy_device
            self._patcher = patcher_of(self._session, device)
        reserve(self._patcher, run.weights_bytes, run.working_bytes)

    def run(self, run: PreparedRun, report: ReportProgress) -> tuple[list[Any], str]:
        """Do ``run``. Returns the pictures, and the plan with its verdict as text.

        Raises the errors of `graphrun.run`, and Stopped after `stop`.
        """
        session = self._session
        assert session is not None
        device = session.device
        # ComfyUI's tensors on the device are outside of the budget
        device.foreign_bytes = (
            0 if device.unified else max(0, device.allocated_bytes - session.held_bytes)
        )
        watcher = RunWatcher(session, run, report, self._is_stopped)
        trace = session.run(run.inputs, progress=watcher.called, journal=watcher)
        solution = session.active or run.solution
        kinds = session.graph.kinds()
        pictures = [
            picture
            for name, value in trace.outputs.items()
            if kinds.get(name) in ("image", "video")
            for picture in pictures_in(value)
        ]
        note = allocator_note(solution.problem.hardware, allocator_backend())
        return pictures, "\n".join(filter(None, (plan_text(solution, session.graph, trace), note)))


class RunWatcher:
    """Reports progress and previews of a run, and stops it.

    A journal of loops (`graphrun.ops.steps.StepJournal`) that saves nothing.
    """

    def __init__(
        self,
        session: Session,
        run: PreparedRun,
        report: ReportProgress,
        is_stopped: threading.Event,
    ) -> None:
        self._session, self._warm_plan = session, session.current
        self._seconds: list[float] = []  # predicted, of each slot
        self._aspect = float(run.inputs.get("height") or 1) / float(run.inputs.get("width") or 1)
        self._report, self._is_stopped, self._value = report, is_stopped, 0

    def called(self, slot: int, call: int, calls: int) -> None:
        """Report the share of the predicted seconds that is over. Raises Stopped."""
        from graphrun.report.progress import seconds_before

        if self._is_stopped.is_set():
            raise Stopped("cancelled")
        if not self._seconds:
            # a run without stages whose outputs are cached has a plan of its own
            solution = self._session.active
            assert solution is not None
            simulation, is_warm = solution.simulation, solution is self._warm_plan
            slots = (simulation.further_slots if is_warm else ()) or simulation.slots
            self._seconds = [slot_report.seconds for slot_report in slots]
        slot = min(slot, len(self._seconds) - 1)  # a replan may have more slots
        done_seconds = seconds_before(self._seconds, slot, call, calls)
        self._value = int(BAR * done_seconds / max(sum(self._seconds), 1e-12))
        self._report(NodeProgress(min(self._value, BAR), BAR))

    def state(self, _: str) -> None:
        """Return None: no loop is resumed."""

    def wants(self, _: str, step: int, steps: int) -> bool:
        """Return whether there is a preview after ``step``."""
        return step % max(1, steps // PREVIEWS) == 0

    def save(self, _: str, state: Any) -> None:
        """Report a preview of the latents in ``state``."""
        from graphrun.report.preview import preview_of

        picture = preview_of(state.latents, self._aspect)
        self._report(NodeProgress(min(self._value, BAR), BAR, picture))


def open_graph(name: str, cache: Path) -> Graph:
    """Return the graph called ``name``, in the file, or of the diffusers pipeline in the folder.

    A folder is imported once, into ``cache``. Raises GraphError, and the errors of the import.
    """
    from graphrun import api

    if not name.strip():
        raise InputError(
            "graph: type the name of a graph (graphrun list shows them), a graph file, or a folder "
            "of a diffusers pipeline"
        )
    path = Path(name.strip()).expanduser()
    if str(path) in shipped_graphs() or not path.is_dir():
        return api.load(path)
    return _imported(path.resolve(), cache)


def _imported(folder: Path, cache: Path) -> Graph:
    from graphrun import api
    from graphrun.diffusers_.importing.imported import ImportOptions, import_source

    state = hashlib.sha256(str(folder).encode())
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        status = path.stat()
        state.update(f"\0{path}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", folder.name).strip("-") or "pipeline"
    target = cache / "comfyui" / state.hexdigest()[:16] / f"{name}.yaml"
    if target.is_file():
        with suppress(GraphError):
            return api.load(target)
    return import_source(str(folder), ImportOptions({}, {})).write(target, overwrite=True)


def inputs_for(graph: Graph, request: LocalRequest) -> dict[str, Any]:
    """Return a value for every input of ``graph``. Raises InputError for what it does not take."""
    values, pictures = request.values, picture_inputs(graph)
    masks = [spec.name for spec in graph.inputs.values() if spec.type == "mask"]
    names: dict[str, tuple[str, ...]] = {
        "prompt": ("prompt",),
        "negative_prompt": ("negative_prompt",),
        "width": ("width",),
        "height": ("height",),
        "steps": STEPS,
        "image": tuple(pictures),
        "mask": tuple(masks),
    }
    inputs: dict[str, Any] = {}
    for name, candidates in names.items():
        if (value := values.get(name)) is None or (value in ("", 0) and name != "prompt"):
            continue
        target = next((candidate for candidate in candidates if candidate in graph.inputs), None)
        if target is None and name != "prompt":
            raise InputError(
                f"{name}: {graph.name} has no such input; {_leave_out(name)}"
                f"{did_you_mean(name, graph.inputs)}"
            )
        if target is not None:
            inputs[target] = value
    inputs |= dict.fromkeys(seeds_of(graph), values["seed"])
    return graph.resolve(joined(inputs, request.extra_inputs))


def _leave_out(name: str) -> str:
    return {
        "negative_prompt": "empty it",
        "image": "disconnect it",
        "mask": "disconnect it",
    }.get(name, "set it to 0")


def budgets_for(card: Hardware, request: LocalRequest, free: Callable[[], int]) -> dict[str, Any]:
    """Return the budgets of ``request`` as arguments of `graphrun.estimate`.

    ``free``: returns the bytes that the device has free for an empty budget. Raises InputError for
    what is not a size, for a device without memory of its own, and for a ``ram`` that the device
    does not have.
    """
    from graphrun.profile.hardware import budget_of

    budget, ram = request.budget.strip(), request.ram.strip()
    for name, size in (("budget", budget), ("ram", ram)):
        if size:
            parse_size(size, whole_bytes=card.capacity_bytes, name=name)
    if card.unified:
        if ram:
            raise InputError(
                f"ram: {card.name} has one pool of memory, which budget is for; empty ram"
            )
        return {"memory": budget or AUTO}
    if not budget and card.kind.free_memory == "none":
        raise InputError(f"budget: {card.name} has no memory of its own; type a size, such as 8G")
    free_budget = 0 if budget else budget_of(free() + card.context_bytes + card.workspace_bytes)
    return {"vram": budget or min(free_budget, card.capacity_bytes), "ram": ram or AUTO}


def refusal_text(error: Infeasible) -> str:
    """Return why nothing fits and what to type in the node, the fastest change first."""
    names = {"--vram": "budget", "--memory": "budget", "--ram": "ram", "--allow": "allow"}
    lines = []
    for suggestion in error.suggestions:
        changes = [
            f"{names[option]} {_typed(option, value, error)}"
            for option, value in suggestion.change
            if option in names and value
        ]
        if changes and len(changes) == len(suggestion.change):
            output = ", and the picture changes" if suggestion.changes_output else ""
            lines.append(f"{', '.join(changes)} ({roughly(suggestion.seconds)} a run{output})")
    reason = str(error).partition(". Do one of: ")[0]
    helps = f". What helps: {'; '.join(lines[:MOST_SUGGESTIONS])}" if lines else ""
    smallest = f"the smallest budget is {show_size(error.smallest_budget_bytes)}"
    return f"{error.graph} on {error.hardware}: {reason}; {smallest}{helps}"


def _typed(option: str, value: str, error: Infeasible) -> str:
    """Return ``value`` as typed in the node; permissions with those that the node has already."""
    from graphrun.solve.suggestions import typed_value

    return (
        ", ".join((*error.problem.allow, value))
        if option == "--allow"
        else typed_value(option, value)
    )


def allocator_backend() -> str:
    """Return the name of PyTorch's allocator for CUDA; "native" without CUDA."""
    import torch

    return str(getattr(torch._C, "_cuda_getAllocatorBackend", lambda: "native")())


def allocator_note(hardware: Hardware, backend: str) -> str:
    """Return what to do if plans for ``hardware`` count another allocator's pages; "": nothing.

    ComfyUI chooses CUDA's own allocator on most NVIDIA cards.
    """
    if backend == "native" or not hardware.caching_allocator:
        return ""
    return (
        f"ComfyUI's allocator is {backend}, and plans count the pages of PyTorch's own: start "
        "ComfyUI with --disable-cuda-malloc for exact figures"
    )


def plan_text(solution: Solution, graph: Graph, trace: Any) -> str:
    """Return the screen of the plan, which begins with its verdict, and what the run measured."""
    from graphrun.report.screen import Look, plan_screen
    from graphrun.report.verdicts import clock_text, product_name

    product = product_name(graph.kinds(), dict(solution.problem.settings))
    screen = plan_screen(solution, look=Look(SCREEN_COLUMNS, product=product))
    screen = screen.rpartition("\n\n")[0]  # without the option of the command line
    return (
        f"{screen}\n\nthis run: {roughly(trace.seconds)} {clock_text(trace.device)}, peak "
        f"{show_size(trace.peak_bytes)} of tensors; {trace.verdict}"
    )

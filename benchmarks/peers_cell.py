"""One cell of the comparison with other tools: one tool, model and cap, in a process of its own.

    weights in host memory -> tool applied to the pipeline -> run 1 -> run 2
                              memory counters before, between and after

Every tool gets the same weights (random, from the graph's seeds), inputs, seed and precision. What
a tool does when it is applied to a pipeline (moving everything to the device, say) belongs to run
1. The result is plain data.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import inspect
import io
import logging
import os
import resource
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from peers_machine import Instrument, instrument
from peers_tools import ATTACH, OWN, SESSION, TOOLS, Cell, Unavailable

ROOT = Path(__file__).resolve().parent.parent
GRAPHS = {
    "flux": ("flux-tiny", "flux-dev"),
    "sdxl": ("sdxl-tiny", "sdxl"),
    "cogview4": ("cogview4-tiny", "cogview4"),
    "hidream": ("hidream-encode-tiny", "hidream"),
    "wan": ("wan-tiny", "wan-14b"),
    "wan22": ("wan22-t2v-tiny", "wan22-t2v"),
}
"""Model -> its tiny graph, for sim, and its full-size one, for CUDA."""

PAGES = {
    "flux": 3.27e-4,
    "sdxl": 3.53e-3,
    "cogview4": 3.64e-4,
    "hidream": 8.31e-5,
    "wan": 2.78e-4,
    "wan22": 3.12e-4,
}
"""Model -> weights of its small graph over those of the full one: the ratio of their pages.
Components that both have, by `graphrun estimate`; sim's pages over a card's."""

NAMES = {"steps": "num_inference_steps", "frames": "num_frames"}
SEED = 3


def graph_file(model: str, device: str) -> Path:
    return ROOT / "graphs" / f"{GRAPHS[model][device != 'sim']}.yaml"


def hardware_for(model: str, device: str) -> str | None:
    """Return the hardware that graphrun plans for: ``sim`` with pages; None: the card."""
    return f"sim:pages={PAGES[model]:g}" if device == "sim" else None


class Subject:
    """A model: its graph, inputs and weights, and the pipeline with them."""

    def __init__(self, model: str, device: str, steps: int) -> None:
        import graphrun

        self.model, graph = model, graphrun.load(graph_file(model, device))
        self.graph = _unrounded(graph.without_sources() if graph.source is not None else graph)
        self.settings = {
            key: value
            for key, value in {"seed": SEED, "steps": steps}.items()
            if key in graph.inputs
        }
        self.inputs = self.graph.resolve(
            self.settings | {k: "a lighthouse" for k, i in graph.inputs.items() if i.required}
        )
        self.full_size = device != "sim"

    @functools.cached_property
    def modules(self) -> dict[str, Any]:
        """The modules, built in host memory."""
        from graphrun.modules.build import build

        make = build
        if self.full_size:
            from gpu_lab import woven

            make = woven
        modules = {
            name: make(component, self.graph) for name, component in self.graph.components.items()
        }
        if self.full_size:  # in memory of their own, like loaded weights
            for tensor in {id(p): p for m in modules.values() for p in m.parameters()}.values():
                tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
        return modules

    def stored(self, cache: Path) -> Path:
        """Return the folder with every component as a checkpoint, writing it once."""
        folder = cache / "weights" / self.graph.name
        for name, module in self.modules.items():
            if not (folder / name).exists():
                module.save_pretrained(folder / name)
        return folder

    def read(self, folder: Path) -> None:
        """Use the weights in ``folder`` from now on, read as the libraries read them; it becomes
        the graph's source."""
        from dataclasses import replace

        names = {"diffusers": "torch_dtype", "transformers": "dtype"}
        for name, module in self.modules.items():
            dtype = {names[type(module).__module__.split(".")[0]]: next(module.parameters()).dtype}
            self.modules[name] = type(module).from_pretrained(folder / name, **dtype).eval()
        parts = {
            name: replace(c, source=str(folder / name)) for name, c in self.graph.components.items()
        }
        self.graph = replace(self.graph, components=parts)

    @functools.cached_property
    def encodes_only(self) -> bool:
        return all(stage.op == "encode_prompt" for stage in self.graph.stages)

    def pipeline(self) -> Any:
        """Return diffusers' pipeline as its users make it; members missing in the graph are
        None."""
        from graphrun.modules.build import build_part, resolve_class

        kind = resolve_class(self.graph.pipeline, self.graph.trust)
        parameters = inspect.signature(kind.__init__).parameters
        absent = {
            name: None
            for name, p in parameters.items()
            if name != "self" and p.default is inspect.Parameter.empty
        }
        parts = {name: build_part(part, self.graph) for name, part in self.graph.parts.items()}
        parts_by_name = {**absent, **self.graph.pipeline_config, **self.modules, **parts}
        pipeline = kind(
            **{name: thing for name, thing in parts_by_name.items() if name in parameters}
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def call(self, pipeline: Any) -> Any:
        """Return the output of the pipeline, called as its users do."""
        from graphrun.modules.build import resolve_class

        if self.encodes_only:
            return self.encode(pipeline)
        parameters = inspect.signature(
            resolve_class(self.graph.pipeline, self.graph.trust).__call__
        ).parameters
        arguments = {
            NAMES.get(key, key): value for key, value in self.inputs.items() if value is not None
        }
        arguments = {key: value for key, value in arguments.items() if key in parameters}
        generator = torch.Generator("cpu").manual_seed(self.inputs["seed"])
        return pipeline(generator=generator, output_type="np", return_dict=False, **arguments)[0]

    def encode(self, pipeline: Any) -> Any:
        """Return the output of its ``encode_prompt``, with guidance if possible."""
        parameters = inspect.signature(pipeline.encode_prompt).parameters
        arguments = {
            "do_classifier_free_guidance": True,
            **self.inputs,
            "prompt_2": None,
            "device": None,
        }
        return [
            t
            for t in pipeline.encode_prompt(
                **{k: v for k, v in arguments.items() if k in parameters}
            )
            if t is not None
        ]


def _unrounded(graph: Any) -> Any:
    """Return ``graph`` with pictures as floating-point numbers, to compare to the last bit."""
    from dataclasses import replace

    stages = [
        replace(s, arguments={**s.arguments, "output_type": "np"}) if s.op == "decode" else s
        for s in graph.stages
    ]
    return replace(graph, stages=tuple(stages))


@functools.cache
def subject(model: str, device: str, steps: int) -> Subject:
    """Return this process's subject; made before cells are forked, its weights are shared."""
    return Subject(model, device, steps)


def fingerprint(value: Any) -> list[str]:
    """Return digests of every tensor's and array's bytes, in order."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [digest for item in value for digest in fingerprint(item)]
    array = (
        value.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
        if isinstance(value, torch.Tensor)
        else value
    )
    return [hashlib.sha256(array.tobytes()).hexdigest()[:16]]


def host_bytes(modules: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of all tensors in host memory, and of pinned ones. ``modules``: included.
    Memory that represents a simulated device is not counted."""
    tensors = [
        item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)
    ]
    owned = [
        tensor
        for module in modules.values()
        for group in (module.parameters(), module.buffers())
        for tensor in group
    ]
    storages: dict[int, tuple[int, bool]] = {}
    for tensor in (*tensors, *owned):
        if tensor.device.type == "cpu":
            storage: Any = tensor.untyped_storage()
            if getattr(storage, "graphrun_allocation", None) is None:
                storages[storage.data_ptr()] = (
                    storage.nbytes(),
                    getattr(storage, "graphrun_page_locked", False),
                )
    return {
        "held": sum(n for n, _ in storages.values()),
        "pinned": sum(n for n, pinned in storages.values() if pinned),
    }


class Books:
    """Records the use of ``instrument`` by a tool's runs; entries of ``runs`` are complete runs."""

    def __init__(self, instrument: Instrument) -> None:
        self.instrument = instrument
        self.modules: Mapping[str, Any] = {}
        self.runs: list[dict[str, Any]] = []
        self.host: dict[str, int] = {}
        self.outputs: list[list[str]] = []

    @contextmanager
    def run(self) -> Iterator[None]:
        """Record one run: seconds, peak, bytes moved and left."""
        gc.collect()
        self.instrument.reset_peak()
        moved_bytes, start, start_bytes = (
            self.instrument.moved(),
            self.instrument.seconds(),
            self.instrument.allocated_bytes(),
        )
        yield
        seconds = self.instrument.seconds() - start
        peak, reserved_bytes = self.instrument.peak_bytes(), self.instrument.reserved_peak_bytes()
        gc.collect()
        entry: dict[str, Any] = {
            "seconds": seconds,
            "peak_bytes": peak,
            "before_bytes": start_bytes,
        }
        entry["left_bytes"] = self.instrument.allocated_bytes()
        entry |= {
            f"{way}_bytes": n - moved_bytes[way] for way, n in self.instrument.moved().items()
        }
        if reserved_bytes is not None:
            entry["reserved_peak_bytes"] = reserved_bytes
        self.runs.append(entry)
        held_bytes = host_bytes(self.modules)
        self.host = {key: max(n, self.host.get(key, 0)) for key, n in held_bytes.items()}


def _peer(
    books: Books, model_subject: Subject, request: Mapping[str, Any], encode: bool
) -> dict[str, Any]:
    """Run a tool on diffusers' pipeline."""
    tool = TOOLS[request["tool"]]
    versions = tool.versions()
    pipeline = model_subject.pipeline()
    cell = Cell(
        books.instrument.device,
        request["cap_bytes"],
        request["ram_bytes"],
        request["activation_bytes"],
    )
    call = model_subject.encode if encode else model_subject.call
    with books.instrument.open(), torch.no_grad():
        for number in range(2):
            with books.run():
                if not number:
                    tool.put(pipeline, cell)
                books.outputs.append(fingerprint(call(pipeline)))
    return {"versions": versions}


def _graphrun(
    books: Books, model_subject: Subject, request: Mapping[str, Any], encode: bool
) -> dict[str, Any]:
    """Run the same graph twice, planned for the cap and the RAM. The executor opens the device.

    Weights are in host memory, as the peers' are. With tight RAM graphrun reads their files by its
    plan.
    """
    import graphrun
    from graphrun.model.choices import apply_choices
    from graphrun.runtime.executor import PlanSession, stages_for
    from graphrun.runtime.host import Host
    from graphrun.verify.solution import solution_of

    graph = (
        model_subject.graph.until("encode")
        if encode and not model_subject.encodes_only
        else model_subject.graph
    )
    problem = _problem(model_subject, graph, request, books.instrument.name)
    solution = graphrun.plan(problem)
    problem = solution.problem
    plan, simulation = solution.plan, solution.simulation
    modules = model_subject.modules if request["folder"] is None else {}
    books.modules, device = modules, books.instrument.executor()
    host = Host.of_graph(
        graph,
        apply_choices(problem, plan),
        device,
        {c.name: modules[c.name] for c in problem.components if modules},
    )
    inputs = graph.resolve(
        {key: value for key, value in model_subject.inputs.items() if key in graph.inputs}
    )

    def once(session: PlanSession) -> None:
        books.outputs.append(
            fingerprint(session.run(stages_for(plan, graph, inputs, device, host)).outputs)
        )

    if request["tool"] == SESSION:
        with PlanSession(solution_of(problem, plan), host, device) as session:
            for _ in range(2):
                with books.run():
                    once(session)
    else:
        for _ in range(2):
            with books.run(), PlanSession(solution_of(problem, plan), host, device) as session:
                once(session)
    books.host["pinned"] = device.arenas.nbytes("pinned")
    return {
        "planned": {
            "seconds": simulation.seconds,
            "peak_bytes": simulation.peak_bytes,
            "moved_bytes": simulation.moved_bytes,
        },
        "proven_optimal": solution.proven_optimal,
        "bound_seconds": solution.bound_seconds,
        "versions": {"graphrun": graphrun.__version__},
    }


def _attached(
    books: Books, model_subject: Subject, request: Mapping[str, Any], encode: bool
) -> dict[str, Any]:
    """Run diffusers' pipeline after `graphrun.attach`, within the cap."""
    import graphrun

    pipeline = model_subject.pipeline()
    hardware = hardware_for(request["model"], request["device"])
    vram = request["cap_bytes"] + _context_bytes(request["device"])
    graphrun.attach(pipeline, vram=vram, hardware=hardware)
    call = model_subject.encode if encode else model_subject.call
    for _ in range(2):
        with books.run():
            books.outputs.append(fingerprint(call(pipeline)))
    return {"versions": {"graphrun": graphrun.__version__}}


def _problem(model_subject: Subject, graph: Any, request: Mapping[str, Any], device: str) -> Any:
    """Return graphrun's problem: the cap is for tensors, and on a card a budget includes the
    context."""
    import graphrun

    cap = request["cap_bytes"]
    overhead_bytes = _context_bytes(device)
    ample = 1 << 40 if device == "sim" else "90%"
    return graphrun.estimate(
        graph,
        vram=ample if cap is None else cap + overhead_bytes,
        ram=request["ram_bytes"] or 1 << 40,
        runs=2 if request["tool"] == SESSION else 1,
        hardware=hardware_for(request["model"], device),
        inputs={key: value for key, value in model_subject.settings.items() if key in graph.inputs},
        cache=Path(request["cache"], "stored" if request["folder"] else "")
        if request.get("cache")
        else None,
    )


def _context_bytes(device: str) -> int:
    from graphrun.profile.hardware import detect_card

    card = None if device == "sim" else detect_card()
    return 0 if card is None else card.context_bytes


def cell(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of the cell ``request`` as plain data.

    ``request``: model, tool, kind ("run", "encode"), device, steps, cap_bytes, ram_bytes,
    activation_bytes, folder (of weights to read from files). ``status``: finished, oom, refused
    (before anything was loaded), unavailable, failed. ``runs``: one entry per complete run.
    """
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    # on the simulated accelerator cells run in parallel
    torch.set_num_threads(1 if request["device"] == "sim" else os.cpu_count() or 1)
    device_instrument = instrument(
        request["device"], request["cap_bytes"], hardware_for(request["model"], request["device"])
    )
    books, output = Books(device_instrument), io.StringIO()
    result: dict[str, Any] = {"status": "finished", "message": ""}
    works = {**dict.fromkeys(OWN, _graphrun), ATTACH: _attached}
    work: Callable[..., dict[str, Any]] = works.get(request["tool"], _peer)
    try:
        with redirect_stdout(output), redirect_stderr(output):
            model_subject = subject(request["model"], request["device"], request["steps"])
            if request["folder"] is not None:
                model_subject.read(Path(request["folder"]))
            books.modules = model_subject.modules
            result |= work(books, model_subject, request, request["kind"] == "encode")
    except Exception as error:  # noqa: BLE001 - what a tool raises is a result
        result["status"], result["message"] = _status(error), _first_lines(error)
        if result["status"] == "failed":
            result["failed_at"] = traceback.format_exc().strip().splitlines()[-6:]
    result |= {"runs": books.runs, "outputs": books.outputs, "host": books.host}
    if request["device"] != "sim":
        result["host"]["resident_set_peak"] = (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
    return result


def _status(error: Exception) -> str:
    from graphrun.errors import GraphrunError, OutOfMemory
    from graphrun.solve.infeasible import Infeasible

    if isinstance(error, (torch.OutOfMemoryError, OutOfMemory)):
        return "oom"
    if isinstance(error, Unavailable):
        return "unavailable"
    if isinstance(error, Infeasible) or (
        isinstance(error, GraphrunError) and "not supported by this version" in str(error)
    ):
        return "refused"
    return "failed"


def _first_lines(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip()[:400]


def process(request: Mapping[str, Any], sender: Any) -> None:
    """Run `cell` in a process of its own; send the result through ``sender``."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sender.send(cell(request))
    sender.close()

"""Tiny pipelines saved to folders and imported, and each pipeline's own output for the same
arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny_pipelines import Case, cases, film, picture

import graphrun
from graphrun.diffusers_.importing.imported import Imported, ImportOptions, import_source
from graphrun.diffusers_.importing.signature import media_kind
from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.model.solution import Solution
from graphrun.modules.build import build, build_part, resolve_class
from graphrun.ops.call import Sound
from graphrun.solve.infeasible import smallest_budget
from graphrun.trace import Trace

AMPLE = 1 << 40
SEED = 3
NAMES = {"num_inference_steps": "steps", "num_frames": "frames"}


@dataclass(frozen=True)
class Saved:
    """The case ``name`` in a folder, with its pipeline and the arguments of its call except
    ``generator`` and ``output_type``."""

    name: str
    folder: Path
    pipe: Any
    arguments: Mapping[str, Any]

    @property
    def sets(self) -> dict[str, Any]:
        """Defaults of inputs for that call, as a user would set them."""
        sizes = {
            NAMES.get(k, k): v
            for k, v in self.arguments.items()
            if plain(v) and k not in ("prompt", "output_type")
        }
        pictures = [v for v in self.arguments.values() if isinstance(v, Image.Image)]
        films = [v for v in self.arguments.values() if is_film(v)]
        sized = "height" in inspect.signature(type(self.pipe).__call__).parameters
        for media in [*pictures[:1], *(frames[0] for frames in films[:1])]:
            sizes |= {} if sized else {"height": media.height, "width": media.width}
        tensors = {
            k: list(v.shape)
            for k, v in self.arguments.items()
            if isinstance(v, torch.Tensor) and media_kind(k) is None
        }
        return (
            sizes | tensors | ({"frames": len(films[0])} if films and "frames" not in sizes else {})
        )

    @property
    def inputs(self) -> dict[str, Any]:
        """The inputs of a run of the graph."""
        inputs = {k: v for k, v in self.arguments.items() if k == "prompt" or not plain(v)} | {
            "seed": SEED
        }
        if self.name.endswith("-two"):
            inputs |= {
                f"image_{number}": picture for number, picture in enumerate(inputs.pop("image"))
            }
        return inputs

    @property
    def pictured(self) -> bool:
        """Whether its outputs are compared as PIL pictures."""
        return not self.name.startswith(("StableAudio", "Marigold", "KandinskyV22Prior"))

    def imported(self, **changes: Any) -> Imported:
        options = {"configs": {}, "dtypes": {}, "input_defaults": self.sets, **changes}
        return import_source(str(self.folder), ImportOptions(**options))

    def expected(self, **arguments: Any) -> Any:
        """The pipeline's own output: the first field of what it returns."""
        parameters = inspect.signature(type(self.pipe).__call__).parameters
        generator = (
            {"generator": torch.Generator().manual_seed(SEED)} if "generator" in parameters else {}
        )
        torch.manual_seed(1)
        output_type = (
            {"output_type": "pil"} if "output_type" in parameters and self.pictured else {}
        )
        result = self.pipe(**{**self.arguments, **generator, **output_type, **arguments})
        return next(iter(vars(result).values())) if hasattr(result, "__dict__") else result[0]


def plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str)) or (
        isinstance(value, list) and all(plain(item) for item in value)
    )


def is_film(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Image.Image)


def saved(name: str, folder: Path) -> Saved:
    """The case ``name`` as `save_pretrained` leaves it in ``folder``."""
    case: Case = cases()[name]
    pipe = case.build()
    pipe.save_pretrained(folder / name)
    arguments = {k: v for k, v in case.arguments().items() if k != "output_type" and v is not None}
    if isinstance(arguments.get("image"), torch.Tensor):
        arguments["image"] = picture(arguments["image"].shape[-1])
    if name.endswith("-two"):  # a graph has one input for each
        arguments |= {"image": film(2)}
    return Saved(
        name,
        folder / name,
        pipe,
        arguments | ({"num_inference_steps": case.steps} if case.steps else {}),
    )


GRAPHS = Path(__file__).parent.parent.parent / "graphs"


def of_graph(name: str, folder: Path) -> Saved:
    """The pipeline of the reference graph ``name``, with its random weights, as `save_pretrained`
    leaves it in ``folder``."""
    graph = load(GRAPHS / f"{name}.yaml")
    modules = {key: build(component, graph) for key, component in graph.components.items()}
    parts = {key: build_part(part, graph) for key, part in graph.parts.items()}
    pipe = resolve_class(graph.pipeline, graph.trust)(**modules, **parts)
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder / name)
    arguments = {
        "prompt": "a lighthouse",
        "height": 64,
        "width": 64,
        "num_inference_steps": 2,
        "max_sequence_length": 16,
    }
    return Saved(name, folder / name, pipe, arguments)


def planned(
    graph: Graph,
    inputs: Mapping[str, Any] | None = None,
    *,
    pinned: bool = False,
    at_minimum: bool = False,
    cache: Path | None = None,
) -> Solution:
    """A plan for ``graph`` on the simulated accelerator, with an ample budget or the ``least``
    one."""
    pin = tuple(graph.components) if pinned else ()
    ample = graphrun.estimate(
        graph, vram=AMPLE, ram=AMPLE, hardware="sim", inputs=inputs or {}, pin=pin, cache=cache
    )
    return graphrun.plan(
        replace(ample, budget_bytes=smallest_budget(ample)) if at_minimum else ample, cache=cache
    )


def run(
    graph: Graph,
    solution: Solution,
    inputs: Mapping[str, Any],
    modules: Mapping[str, Any] | None = None,
) -> Trace:
    """Runs ``graph`` by its plan, with ``modules`` or the weights of its source. Asserts that
    nothing is left on the device."""
    trace = graphrun.run(solution, graph, inputs, modules=modules)
    assert trace.left_bytes == 0
    return trace


def pixels(value: Any) -> np.ndarray[Any, Any]:
    """Whatever a pipeline returns as one array."""
    if isinstance(value, Sound):
        return value.samples
    if isinstance(value, Image.Image):
        return np.asarray(value)
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().float().numpy()
    return (
        np.stack([pixels(item) for item in value]) if isinstance(value, list) else np.asarray(value)
    )


def equal(result: Any, expected: Any) -> bool:
    actual, wanted_pixels = pixels(result), pixels(expected)
    return actual.size == wanted_pixels.size and bool(
        np.array_equal(actual, wanted_pixels.reshape(actual.shape))
    )

"""Runs a graph's ops with no weights and no GPU, and returns the tape of what they would do.

The ops' own code runs for real on an unlimited simulated accelerator, where every allocation is heard; schedulers, tokenizers and
image processors work as always. A component is a ghost on meta: a call into it is traced there once for each signature of
argument shapes, and zeros of the right shape come back. The 28 denoising steps of an image therefore cost one traced call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from graphrun import sim
from graphrun.components.blocks import lay_out
from graphrun.components.build import build_part, ghost
from graphrun.components.entry import Boundary
from graphrun.components.memos import forget
from graphrun.components.precisions import QUANTIZED
from graphrun.components.stored import holding
from graphrun.components.trees import tensors_in, walk
from graphrun.estimator.events import Call, Cut, Facts, Mark, Probed, Tape
from graphrun.estimator.quantized import block_bytes_by_precision, quantized_shapes
from graphrun.estimator.recorder import META, ROUND_BYTES, FusedAttention, Recorder
from graphrun.estimator.repeats import Repeats
from graphrun.estimator.weights import choices_among, classify, classify_layers, unit_paths
from graphrun.graph.graph import Graph
from graphrun.ops import run_stages
from graphrun.planner.problem import BlockClass
from graphrun.sim.tensor import SimTensor
from graphrun.units import MIB, round_up

# What is larger is a picture or a video on its way out, whose values decide nothing.
HOLLOW_BYTES = 64 * MIB


def probe(graph: Graph, inputs: Mapping[str, Any], options: Mapping[str, str] | None = None) -> Probed:
    """The dry run of ``graph`` for resolved ``inputs``, its stages run by ``options`` (stage -> name).

    Raises what the pipeline's own code raises for them, and GraphError where a component's files are on this machine and are broken
    or another model's.
    """
    ghosts = {name: ghost(component, graph.allow) for name, component in graph.components.items()}
    for name, component in graph.components.items():
        holding(component, ghosts[name])
    parts = {part.name: build_part(part, graph, planning=True) for part in graph.parts.values()}
    prober = Prober(ghosts)
    with sim.Machine() as machine, prober.boundary:
        machine.listener = prober.tape
        machine.hollow_bytes = HOLLOW_BYTES

        def after_stage(stage: str, outputs: Mapping[str, Any]) -> None:
            for name, value in outputs.items():
                keys = (tensor.allocation.key for tensor in tensors_in(value) if isinstance(tensor, SimTensor))
                prober.tape.values[f"{stage}.{name}"] = frozenset(keys)
            prober.tape.items.append(Mark("stage", stage))

        observed = {"after_stage": after_stage, "parts": parts, "ghosts": ghosts, "options": options, "planning": True}
        run_stages(graph, ghosts, sim.device, inputs, **observed)
    return Probed(prober.tape, prober.facts(graph), ghosts)


class Prober:
    """Answers entries into ``ghosts`` from traces on meta, and writes them on ``tape``. A trace serves every later probe too."""

    def __init__(self, ghosts: Mapping[str, nn.Module]) -> None:
        self.ghosts = ghosts
        self.tape = Tape()
        self.entered: dict[str, dict[str, None]] = {name: {} for name in ghosts}
        self.repeated: dict[str, set[str]] = {name: set() for name in ghosts}  # entered more than once in one call
        self.boundary = Boundary(ghosts, sim.device, around=self.answer, reads=_blank)
        self.kept_bytes = 0  # what the component that was traced last keeps of its call: tables, caches
        self.choices: dict[str, set[str]] = {name: set() for name in ghosts}  # lists of which data picks elements
        self._known: dict[Any, tuple[Call, Any]] = {}

    def signature(self, component: str, entry: str, args: Any, kwargs: Any) -> Any:
        """What two calls have in common that one trace serves: the shapes of what they are handed."""
        return component, entry, _signature(args), _signature(kwargs)

    def trace(self, component: str, entry: str, proceed: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Call, Any]:
        """The call as it is traced for its signature, and what it returns, on meta."""
        signature = self.signature(component, entry, args, kwargs)
        if signature not in self._known:
            self._known[signature] = self._trace(component, entry, proceed, args, kwargs)
        return self._known[signature]

    def once(self, component: str) -> tuple[str, ...]:
        """Blocks in the order in which they ran, but for those that run several times in one call (a video's frames go through its
        decoder one by one): they cannot pass in one order, so they stay with the rest."""
        return tuple(path for path in self.entered[component] if path not in self.repeated[component])

    def answer(self, component: str, entry: str, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In the place of an entry: a mark on the tape, and zeros on `sim` in the shape of what it returns."""
        call, template = self.trace(component, entry, proceed, args, kwargs)
        self.tape.items.append(Mark("enter", component, call))
        return walk(template, lambda t: torch.zeros(t.shape, dtype=t.dtype, device=sim.device) if t.is_meta else t)

    def facts(self, graph: Graph | None = None) -> dict[str, Facts]:
        """The facts of every component, with the classes of its blocks in the order in which they were entered; with ``graph``, in
        every precision."""
        found = {}
        for name, module in self.ghosts.items():
            calls = [call for call, _ in self._known.values() if call.component == name]
            classes = classify(module, self.once(name), [call.touched for call in calls], self.choices[name])
            blocks, layers = self._cut(graph, name, classes), classify_layers(module, calls, self.choices[name])
            found[name] = Facts(
                parameters=sum(p.numel() for p in module.parameters()),
                classes=blocks.classes,
                block_bytes=blocks.block_bytes,
                precisions=blocks.precisions,
                layers=quantized_shapes(module, graph.components[name].dtype) if graph else {},
                by_layer=self._cut(graph, name, layers, by_layer=True) if layers else None,
            )
        return found

    def _cut(self, graph: Graph | None, name: str, classes: tuple[BlockClass, ...], *, by_layer: bool = False) -> Cut:
        layouts = lay_out(self.ghosts[name], [path for k in classes for path in k.blocks], by_layer=by_layer)
        nbytes = tuple(max(round_up(layouts[path].nbytes, ROUND_BYTES) for path in k.blocks) for k in classes)
        return Cut(classes, nbytes, self._precisions(graph, name, classes, by_layer) if graph else {})

    def _precisions(self, graph: Graph, name: str, classes: Sequence[BlockClass], by_layer: bool) -> dict[str, tuple[int, ...]]:
        """Bytes of the blocks in every precision. What a class keeps in fp32 depends on the dtype it is made in."""
        component = graph.components[name]
        found = block_bytes_by_precision(self.ghosts[name], classes, component.dtype, by_layer=by_layer)
        for dtype in set(component.precision) - {component.dtype, *QUANTIZED}:
            module = ghost(replace(component, dtype=dtype), graph.allow)
            found[dtype] = block_bytes_by_precision(module, classes, dtype, by_layer=by_layer)[dtype]
        return found

    def _trace(
        self, component: str, entry: str, proceed: Callable[..., Any], args: Any, kwargs: Any, place: torch.device = META
    ) -> tuple[Call, Any]:
        """The call on ``place``: on meta, or on the CPU, where ``component`` has its weights."""
        module = self.ghosts[component]
        units = unit_paths(module, self.choices[component])
        recorder, template = self._record(module, units, proceed, args, kwargs, place)
        if picked := choices_among(units, set(recorder.entered)):
            self.choices[component] |= picked
            recorder, template = self._record(module, unit_paths(module, self.choices[component]), proceed, args, kwargs, place)
        self.entered[component].update(dict.fromkeys(recorder.entered))
        self.repeated[component] |= {path for path, times in Counter(recorder.entered).items() if times > 1}
        input_bytes = sum(
            round_up(t.untyped_storage().nbytes(), ROUND_BYTES) for t in {id(t): t for t in tensors_in((args, kwargs))}.values()
        )
        events, flops, products = tuple(recorder.events), tuple(recorder.flops), tuple(recorder.products)
        peak_bytes, touched = recorder.peak_bytes, frozenset(recorder.touched)
        spans, outside = tuple(recorder.spans), frozenset(recorder.outside)
        return Call(component, entry, events, peak_bytes, input_bytes, touched, flops, products, spans, outside), template

    def _record(
        self, module: nn.Module, units: list[str], proceed: Callable[..., Any], args: Any, kwargs: Any, place: torch.device
    ) -> tuple[Recorder, Any]:
        on_meta = place == META
        self.boundary.device = place
        recorder = Recorder(module, units, place)
        try:
            with _disable_current_modes():
                handed = walk((args, kwargs), _blank_like if on_meta else torch.Tensor.cpu)
                recorder.ignore(tensors_in(handed))
                repeats = Repeats(module, recorder) if on_meta else nullcontext()
                fused = FusedAttention(recorder) if on_meta else nullcontext()
                with torch.no_grad(), repeats, fused, recorder:
                    out = proceed(*handed[0], **handed[1])
                template = walk(out, lambda t: torch.empty_like(t, device=META))
                del out
                self.kept_bytes = recorder.live_bytes
        finally:
            self.boundary.device = sim.device
            recorder.close()
            forget([module])
        return recorder, template


def _blank(component: str, path: str, tensor: torch.Tensor) -> torch.Tensor:
    """A weight that the pipeline's own code looks at: it is copied to the device, where it is one more tensor of that code."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=sim.device)


def _blank_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return tuple((key, _signature(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_signature(item) for item in value)
    return value if isinstance(value, (bool, int, str, type(None))) else type(value)

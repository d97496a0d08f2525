"""Runs a graph's ops with no weights and no GPU, and returns the tape of what they would do.

The ops' own code runs for real on an unlimited simulated accelerator, where every allocation is heard; schedulers, tokenizers and
image processors work as always. A component is a meta module on meta: a call into it is traced there once for each signature of
argument shapes, and zeros of the right shape come back. The 28 denoising steps of an image therefore cost one traced call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from graphrun import sim
from graphrun.graph.graph import Component, Graph
from graphrun.modules.build import build_part, held_meta_module, meta_module, on_host
from graphrun.modules.contents import as_stored
from graphrun.modules.interceptor import CallInterceptor, Casts
from graphrun.modules.memos import forget
from graphrun.modules.precisions import QUANTIZED
from graphrun.modules.stored import holding
from graphrun.modules.trees import computing_on, tensors_in, walk
from graphrun.ops import run_stages
from graphrun.profile.block_groups import choices_among, group_blocks, group_layers, unit_paths
from graphrun.profile.meta_ops import autocast_off_on_meta
from graphrun.profile.quantized import block_bytes_by_precision, laid_out_bytes, quantized_shapes, widened
from graphrun.profile.recorder import META, ROUND_BYTES, FusedAttention, Recorder
from graphrun.profile.recording import Call, ComponentProfile, Cut, Mark, Probed, Recording
from graphrun.profile.repeats import Repeats
from graphrun.profile.returned import Returned, returned
from graphrun.sim.tensor import SimTensor
from graphrun.units import MIB, round_up

# What is larger is a picture or a video on its way out, whose values decide nothing.
HOLLOW_BYTES = 64 * MIB


@on_host()
def probe(graph: Graph, inputs: Mapping[str, Any], options: Mapping[str, str] | None = None) -> Probed:
    """The dry run of ``graph`` for resolved ``inputs``, its stages run by ``options`` (stage -> name).

    Raises what the pipeline's own code raises for them, and GraphError where a component's files are on this machine and are broken
    or another model's.
    """
    meta_modules = {name: meta_module(component, graph.trust) for name, component in graph.components.items()}
    for name, component in graph.components.items():
        holding(component, meta_modules[name])
    parts = {part.name: build_part(part, graph, planning=True) for part in graph.parts.values()}
    prober = Prober(meta_modules)
    with sim.Machine() as machine, prober.interceptor:
        machine.listener = prober.recording
        machine.hollow_bytes = HOLLOW_BYTES

        def after_stage(stage: str, outputs: Mapping[str, Any]) -> None:
            for name, value in outputs.items():
                keys = (tensor.allocation.key for tensor in tensors_in(value) if isinstance(tensor, SimTensor))
                prober.recording.values[f"{stage}.{name}"] = frozenset(keys)
            prober.recording.items.append(Mark("stage", stage))

        observed = {"after_stage": after_stage, "parts": parts, "meta_modules": meta_modules, "options": options, "planning": True}
        run_stages(graph, meta_modules, sim.device, inputs, **observed)
    return Probed(prober.recording, prober.profiles(graph), meta_modules)


class Prober:
    """Answers entries into ``meta_modules`` from traces on meta, and writes them on ``recording``. A trace serves every later probe too."""

    def __init__(self, meta_modules: Mapping[str, nn.Module], casts: Casts | None = None) -> None:
        self.meta_modules = dict(meta_modules)
        self.recording = Recording()
        self.entered: dict[str, dict[str, None]] = {name: {} for name in meta_modules}
        self.repeated: dict[str, set[str]] = {name: set() for name in meta_modules}  # entered more than once in one call
        self.interceptor = CallInterceptor(meta_modules, sim.device, around=self.answer, reads=_blank, casts=casts)
        self.choices: dict[str, set[str]] = {name: set() for name in meta_modules}  # lists of which data picks elements
        self._known: dict[Any, tuple[Call, Returned]] = {}

    def signature(self, component: str, entry: str, args: Any, kwargs: Any) -> Any:
        """What two calls have in common that one trace serves: the shapes of what they are handed."""
        return component, entry, _signature(args), _signature(kwargs)

    def trace(self, component: str, entry: str, proceed: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Call, Returned]:
        """The call as it is traced for its signature, and what it returns."""
        signature = self.signature(component, entry, args, kwargs)
        if signature not in self._known:
            self._known[signature] = self._trace(component, entry, proceed, args, kwargs)
        return self._known[signature]

    def once(self, component: str) -> tuple[str, ...]:
        """Blocks in the order in which they ran, but for those that run several times in one call (a video's frames go through its
        decoder one by one): they cannot pass in one order, so they stay with the rest."""
        return tuple(path for path in self.entered[component] if path not in self.repeated[component])

    def answer(self, component: str, entry: str, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In the place of an entry: a mark on the tape, and zeros on `sim` as what it returns."""
        call, made = self.trace(component, entry, proceed, args, kwargs)
        self.recording.items.append(Mark("enter", component, call))
        return made.made((args, kwargs), sim.device)

    def profiles(self, graph: Graph | None = None) -> dict[str, ComponentProfile]:
        """The facts of every component, with the classes of its blocks in the order in which they were entered; with ``graph``, in
        every precision."""
        found = {}
        for name in self.meta_modules:
            with self.formed(name):
                found[name] = self._facts_of(name, graph)
        return found

    def formed(self, name: str) -> AbstractContextManager[None]:
        """For as long as this lasts, the meta module ``name`` is what its traces were made of."""
        return nullcontext()

    def _facts_of(self, name: str, graph: Graph | None) -> ComponentProfile:
        module = self.meta_modules[name]
        calls = [call for call, _ in self._known.values() if call.component == name]
        loose = frozenset().union(*(call.loose for call in calls))
        groups = group_blocks(module, self.once(name), [call.touched for call in calls], self.choices[name], loose)
        layers = group_layers(module, calls, self.choices[name])
        by_layer = Cut(layers, laid_out_bytes(module, layers, by_layer=True)) if layers else None
        parameters = sum(p.numel() for p in module.parameters())
        profiles = ComponentProfile(parameters, groups, laid_out_bytes(module, groups), by_layer=by_layer)
        return _in_every_precision(profiles, graph, graph.components[name], module) if graph else profiles

    def _trace(
        self, component: str, entry: str, proceed: Callable[..., Any], args: Any, kwargs: Any, place: torch.device = META
    ) -> tuple[Call, Returned]:
        """The call on ``place``: on meta, or on the CPU, where ``component`` has its weights."""
        module = self.meta_modules[component]
        units = unit_paths(module, self.choices[component])
        recorder, made = self._record(module, units, proceed, args, kwargs, place)
        if picked := choices_among(units, set(recorder.entered)):
            self.choices[component] |= picked
            recorder, made = self._record(module, unit_paths(module, self.choices[component]), proceed, args, kwargs, place)
        self.entered[component].update(dict.fromkeys(recorder.entered))
        self.repeated[component] |= {path for path, times in Counter(recorder.entered).items() if times > 1}
        input_bytes = sum(
            round_up(t.untyped_storage().nbytes(), ROUND_BYTES)
            for t in {id(t): t for t in tensors_in((args, kwargs))}.values()
            if t.device.type != "cpu"
        )
        events, flops, products = tuple(recorder.events), tuple(recorder.flops), tuple(recorder.products)
        peak_bytes, touched = recorder.peak_bytes, frozenset(recorder.touched)
        spans, outside, loose = tuple(recorder.spans), frozenset(recorder.outside), frozenset(recorder.loose)
        made_of = (events, peak_bytes, input_bytes, touched, flops, products, spans, outside, loose, recorder.kept)
        return Call(component, entry, *made_of), made

    def _record(
        self, module: nn.Module, units: list[str], proceed: Callable[..., Any], args: Any, kwargs: Any, place: torch.device
    ) -> tuple[Recorder, Returned]:
        on_meta = place == META
        self.interceptor.device = place
        recorder = Recorder(module, units, place)
        try:
            with _disable_current_modes():
                handed = computing_on(place, *walk((args, kwargs), _blank_like if on_meta else torch.Tensor.cpu))
                recorder.ignore(tensors_in(handed))
                repeats = Repeats(module, recorder) if on_meta else nullcontext()
                fused = FusedAttention(recorder) if on_meta else nullcontext()
                with torch.no_grad(), autocast_off_on_meta(), repeats, fused, recorder:
                    out = proceed(*handed[0], **handed[1])
                made = returned(out, handed, recorder.weights, place)
                del out
                recorder.end()
        finally:
            self.interceptor.device = sim.device
            recorder.close()
            forget([module])
        return recorder, made


def _in_every_precision(profiles: ComponentProfile, graph: Graph, component: Component, module: nn.Module) -> ComponentProfile:
    """``profiles`` of ``component`` with bytes of its blocks in every precision. What a class keeps in fp32 depends on the dtype it is
    made in; what its files hold quantized is as it is there."""
    layers = quantized_shapes(module, component.dtype)
    cuts = [(profiles.groups, False), *([(profiles.by_layer.groups, True)] if profiles.by_layer is not None else [])]
    sizes = [block_bytes_by_precision(module, groups, component.dtype, by_layer=by_layer) for groups, by_layer in cuts]
    as_they_are: tuple[str, ...] = ()
    kinds: dict[str, tuple[str, int, tuple[int, int]]] = {}
    for precision in dict.fromkeys(component.precision):
        if precision in ("fp8", "gguf"):
            held, content = held_meta_module(component, graph.trust, precision)
            if content is not None and precision in as_stored(content, layers):
                as_they_are = (*as_they_are, precision)
                for (groups, by_layer), found in zip(cuts, sizes, strict=True):
                    found[precision] = laid_out_bytes(held, groups, by_layer=by_layer)
            if content is not None and precision == "gguf":
                named = {name: held.get_parameter(name).shape[1] for name in layers if content.kind(name)}
                kinds = {name: (content.kind(name), row_bytes, layers[name]) for name, row_bytes in named.items()}
        elif precision not in (component.dtype, *QUANTIZED):
            other = meta_module(replace(component, dtype=precision), graph.trust)
            for (groups, by_layer), found in zip(cuts, sizes, strict=True):
                found[precision] = block_bytes_by_precision(other, groups, precision, by_layer=by_layer)[precision]
    return replace(
        profiles,
        precisions=sizes[0],
        layers=layers,
        widened=widened(kinds, component.dtype),
        as_stored=as_they_are,
        by_layer=replace(profiles.by_layer, precisions=sizes[1]) if profiles.by_layer is not None else None,
    )


def _blank(component: str, path: str, tensor: torch.Tensor) -> torch.Tensor:
    """A weight that the pipeline's own code looks at: it is copied to the device, where it is one more tensor of that code."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=sim.device)


def _blank_like(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` of the device on meta; what the host hands in stays there: bringing it to the device takes memory of its own."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.device.type == "cpu"
    if isinstance(value, dict):
        return tuple((key, _signature(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_signature(item) for item in value)
    return value if isinstance(value, (bool, int, str, type(None))) else type(value)

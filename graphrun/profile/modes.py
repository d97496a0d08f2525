"""What diffusers' own ways of placing a pipeline take: bytes on the device, bytes copied, seconds
of a warm call.

    resident     ``pipe.to("cuda")`` model        ``enable_model_cpu_offload()``: a component is
    copied to the device when it is called, and back when the next one
                 in ``model_cpu_offload_seq`` is called, or at the end; from and to pageable memory,
                 before computing goes on
    sequential   ``enable_sequential_cpu_offload()``: every layer's tensors are copied from pageable
    memory before it computes group        ``enable_group_offload(offload_type="block_level",
    use_stream=True)``: a block is copied while the one before it
                 computes; tensors outside of blocks are copied from pageable memory before the
                 component computes
    leaf         the same with ``"leaf_level"``: layers in place of blocks

In the last two, blocks lie in page-locked memory; with ``pinned=False`` in pageable memory. Hooks
are those of accelerate 1.15 and diffusers 0.42.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import nn

from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.graph.values import did_you_mean, strings
from graphrun.model.problem import Hardware
from graphrun.modules.classes import pipeline_class
from graphrun.profile.asked import FORMATS
from graphrun.profile.costs import extra_seconds, work_seconds
from graphrun.profile.quantized import weights_by_precision
from graphrun.profile.recording import Call, ComponentProfile, DryRun

ModeName = Literal["resident", "model", "sequential", "group", "leaf"]
MODES: tuple[ModeName, ...] = get_args(ModeName)

# accelerate's hooks place every tensor of a layer by itself, in Python: seconds for each. Fitted
# (`hardware`).
TENSOR_SECONDS = 0.569e-3


@dataclass(frozen=True, slots=True)
class Mode:
    """A way of placing a pipeline: ``formats`` of other libraries by component, components that
    stay on the device (``keep``, as ``exclude_modules``) or compute on the CPU (``cpu``), and
    whether group offloading's blocks are page-locked."""

    name: ModeName = "resident"
    formats: Mapping[str, str] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    cpu: tuple[str, ...] = ()
    pinned: bool = True


def mode(
    name: str,
    graph: Graph,
    formats: Mapping[str, str],
    keep: Iterable[str],
    cpu: Iterable[str],
    *,
    pinned: bool = True,
) -> Mode:
    """The mode called ``name``. Raises InputError for an unknown one, and for components that
    ``graph`` does not have."""
    if name not in MODES:
        raise InputError(
            f"mode {name!r} is not known{did_you_mean(name, MODES)}: it is one of {', '.join(MODES)}"
        )
    for option, names in (("keep", strings(keep)), ("cpu", strings(cpu))):
        for component in names:
            if component not in graph.components:
                raise InputError(
                    f"{option} {component}: no such component{did_you_mean(component, graph.components)}"
                )
    return Mode(name, dict(formats), strings(keep), strings(cpu), pinned)


def weight_bytes(graph: Graph, name: str, module: nn.Module, formats: Mapping[str, str]) -> int:
    """Bytes that a component's weights are allocated with, in its first precision or in a format of
    another library."""
    component = graph.components[name]
    sizes = weights_by_precision(module, component.dtype, allocated=True)
    if name not in formats:
        return sizes.get(component.precision[0], sizes[component.dtype])
    weights = {
        id(layer.weight): layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)
    }.values()
    scales = FORMATS[formats[name]] * sum(weight.shape[0] for weight in weights)
    return (
        sizes[component.dtype] - sum(weight.nbytes - weight.numel() for weight in weights) + scales
    )


@dataclass(slots=True)
class Estimate:
    """Seconds by stage, bytes copied to the device and back, and for each call in order the bytes
    of weights on the device."""

    seconds: dict[str, float] = field(default_factory=dict)
    copied_in_bytes: float = 0
    copied_out_bytes: float = 0
    on_device: list[float] = field(default_factory=list)


def estimated(
    graph: Graph, probed: DryRun, hardware: Hardware, chosen: Mode, weights: Mapping[str, int]
) -> Estimate:
    """A warm call of ``graph``'s pipeline, as recorded in ``probed``, with components of
    ``weights`` bytes placed as ``chosen`` says."""
    return _Walk(graph, probed, hardware, chosen, weights).walked()


class _Walk:
    """Walks through the calls of a recording with the state of the device."""

    def __init__(
        self,
        graph: Graph,
        probed: DryRun,
        hardware: Hardware,
        chosen: Mode,
        weights: Mapping[str, int],
    ) -> None:
        self.graph, self.probed, self.hardware, self.mode = graph, probed, hardware, chosen
        self.weights = {name: nbytes for name, nbytes in weights.items() if name not in chosen.cpu}
        pipeline = pipeline_class(graph.pipeline_called(""), graph.trust)
        order = str(getattr(pipeline, "model_cpu_offload_seq", None) or "").split("->")
        chain = [name for name in order if name in self.weights and name not in chosen.keep]
        # component -> the one that leaves when it is called
        self.before = dict(zip(chain[1:], chain, strict=False))
        self.loaded = dict.fromkeys(self.weights if chosen.name == "resident" else chosen.keep)
        self.found = Estimate()
        # by the id of a call, which a loop repeats
        self._computing: dict[int, float] = {}
        self._read: dict[int, tuple[list[float], float, float]] = {}

    def walked(self) -> Estimate:
        seconds: dict[str, float] = defaultdict(float)
        for stage, call in self.probed.recording.entries():
            seconds[stage] += self._call(call)
        if self.mode.name == "model":  # the pipeline puts all of them back at its end
            seconds[next(reversed(seconds))] += sum(
                self._moved_out(name) for name in self.loaded if name not in self.mode.keep
            )
        self.found.seconds = dict(seconds)
        return self.found

    def _call(self, call: Call) -> float:
        """Seconds of one call with its copies."""
        name = call.component
        resident = sum(self.weights[other] for other in self.loaded)
        if name in self.mode.cpu:
            self.found.on_device.append(resident)
            return call.flops / self.hardware.cpu_flops_per_second
        computing = self._compute_seconds(call)
        if name in self.loaded and self.mode.name != "model":
            self.found.on_device.append(resident)
            return computing
        if self.mode.name == "model":
            moved = 0.0
            if (last := self.before.get(name)) in self.loaded and last is not None:
                del self.loaded[last]
                moved += self._moved_out(last)
            if name not in self.loaded:
                self.loaded[name] = None
                moved += self._moved_in(self.weights[name], self.hardware.pageable_bytes_per_second)
            self.found.on_device.append(sum(self.weights[other] for other in self.loaded))
            return computing + moved
        profile = self.probed.profiles[name]
        split = (
            profile.layer_split
            if self.mode.name != "group" and profile.layer_split is not None
            else profile
        )
        if id(call) not in self._read:
            self._read[id(call)] = _touched(call, split, self.weights[name])
        pieces, unblocked, largest = self._read[id(call)]
        if self.mode.name == "sequential":
            self.found.on_device.append(resident + largest)
            moved = self._moved_in(sum(pieces) + unblocked, self.hardware.pageable_bytes_per_second)
            return computing + moved + TENSOR_SECONDS * len(call.touched)
        self.found.on_device.append(
            resident + (unblocked if self.mode.name == "group" else 0) + 2 * largest
        )
        rate = (
            self.hardware.h2d_bytes_per_second
            if self.mode.pinned
            else self.hardware.pageable_bytes_per_second
        )
        moved = self._moved_in(sum(pieces), rate) + len(pieces) * self.hardware.copy_start_seconds
        first = pieces[0] / rate if pieces else 0.0
        return (
            max(computing, moved)
            + first
            + self._moved_in(unblocked, self.hardware.pageable_bytes_per_second)
        )

    def _compute_seconds(self, call: Call) -> float:
        if id(call) not in self._computing:
            name = call.component
            precision = self.mode.formats.get(name, self.graph.components[name].precision[0])
            shapes = self.probed.profiles[name].layers
            extra = extra_seconds(call, shapes, precision, self.hardware)
            self._computing[id(call)] = sum(work_seconds(call, self.hardware)) + sum(extra.values())
        return self._computing[id(call)]

    def _moved_in(self, nbytes: float, rate: float) -> float:
        self.found.copied_in_bytes += nbytes
        return nbytes / rate

    def _moved_out(self, name: str) -> float:
        self.found.copied_out_bytes += self.weights[name]
        return self.weights[name] / self.hardware.d2h_pageable_bytes_per_second


def _touched(
    call: Call, profile: ComponentProfile, weights: int
) -> tuple[list[float], float, float]:
    """Bytes of each block that ``call`` reads, in order; of the tensors outside of blocks; and of
    the largest block.

    Scaled so that all blocks together have ``weights`` bytes, which depend on the precision.
    """
    sizes: dict[str, int] = {}
    total = 0
    for group, nbytes in zip(profile.groups, profile.block_bytes, strict=True):
        sizes |= dict.fromkeys(group.blocks, nbytes)
        total += nbytes * len(group.blocks)
    share = weights / total if total else 0.0
    owners = [_owner(name, sizes) for name in call.touched]
    read = dict.fromkeys(path for path in owners if path)
    unblocked = sizes.get("", 0) * share if "" in owners else 0.0
    pieces = [sizes[path] * share for path in read]
    return pieces, unblocked, max(pieces, default=0.0)


def _owner(name: str, paths: Mapping[str, int]) -> str:
    """The path among ``paths`` of the block that holds the tensor ``name``; "" if there is none."""
    while name and name not in paths:
        name = name.rpartition(".")[0]
    return name

"""Estimate diffusers' own ways of placing a pipeline: bytes, and seconds of a warm call.

    resident     ``pipe.to("cuda")``
    model        ``enable_model_cpu_offload()``: a component is copied to the device when it is
                 called, and back when the next one in ``model_cpu_offload_seq`` is called, or at
                 the end. Copies use pageable memory, and computing waits for them.
    sequential   ``enable_sequential_cpu_offload()``: every layer's tensors are copied from pageable
                 memory before the layer computes.
    group        ``enable_group_offload(offload_type="block_level", use_stream=True)``: a block is
                 copied while the block before it computes. Tensors outside of blocks are copied
                 from pageable memory before the component computes.
    leaf         the same with ``"leaf_level"``: layers in place of blocks

In group and leaf, blocks are in page-locked memory; with ``pinned=False`` in pageable memory. Hooks
are those of accelerate 1.15 and diffusers 0.42.

All modes but resident keep all weights in host memory. Where RAM is too small for them, the page
cache evicts the least recently used ones, and a copy waits until they are read from their files
again. A component larger than RAM is read whole in every call, since a cyclic scan of a
least-recently-used cache never hits. Page-locked blocks beyond RAM are counted in the same
way, though such a run may fail.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Literal, get_args

from packaging.version import InvalidVersion, Version
from torch import nn

from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.graph.values import did_you_mean, strings
from graphrun.model.hardware import Hardware
from graphrun.modules.classes import pipeline_class
from graphrun.profile.asked import FORMATS, LAYERWISE
from graphrun.profile.costs import extra_seconds, work_seconds
from graphrun.profile.precision import ELEMENT_BYTES, MOVES, new_enough
from graphrun.profile.quantized import kept_elements, layerwise_bytes, weights_by_precision
from graphrun.profile.recording import Call, ComponentProfile, DryRun

ModeName = Literal["resident", "model", "sequential", "group", "leaf"]
MODES: tuple[ModeName, ...] = get_args(ModeName)

# Seconds per tensor, assumed: accelerate's hooks place a layer's tensors one by one, in Python.
TENSOR_SECONDS = 0.5e-3


@dataclass(frozen=True, slots=True)
class Mode:
    """A way of placing a pipeline.

    ``formats``: component -> format of another library. ``keep``: components that stay on the
    device, as ``exclude_modules``. ``cpu``: components that compute on the CPU. ``pinned``: blocks
    of group offloading are page-locked. ``ram_bytes``: host memory for weights; None: enough for
    all. ``libraries``: versions of packages, in place of the installed ones.
    """

    name: ModeName = "resident"
    formats: Mapping[str, str] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    cpu: tuple[str, ...] = ()
    pinned: bool = True
    ram_bytes: int | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)

    def has(self, package: str, first: str) -> bool:
        """Return whether ``package`` has version ``first`` or later, or is not installed."""
        if (version := self.libraries.get(package)) is None:
            try:
                version = installed_version(package)
            except PackageNotFoundError:
                return True
        return new_enough(version, first)


# Packages whose older versions place weights differently
LIBRARIES = ("accelerate", "bitsandbytes", "transformers")
# From this version of transformers on, bitsandbytes leaves `_keep_in_fp32_modules` in bf16. Before,
# its quantizers set `use_keep_in_fp32_modules` (modeling_utils.py, `_get_dtype_plan`).
PLAIN_MODULES = "transformers", "5"


def parse_libraries(texts: Iterable[str]) -> dict[str, str]:
    """Return the versions in ``texts`` (``NAME=VERSION``). Raises InputError."""
    versions = {}
    for text in strings(texts):
        name, _, number = text.partition("=")
        if name not in LIBRARIES:
            raise InputError(
                f"library {text}: {name!r} is not known{did_you_mean(name, LIBRARIES)}: it is one "
                f"of {', '.join(LIBRARIES)}"
            )
        try:
            versions[name] = str(Version(number))
        except InvalidVersion:
            raise InputError(f"library {text}: write NAME=VERSION, {name}=1.2") from None
    return versions


def parse_mode(
    name: str,
    graph: Graph,
    formats: Mapping[str, str],
    keep: Iterable[str],
    cpu: Iterable[str],
    *,
    pinned: bool = True,
    ram_bytes: int | None = None,
    libraries: Iterable[str] = (),
) -> Mode:
    """Return the mode called ``name``. Raises InputError for unknown modes and components."""
    if name not in MODES:
        raise InputError(f"mode {name!r} is not known{did_you_mean(name, MODES)}")
    for option, names in (("keep", strings(keep)), ("cpu", strings(cpu))):
        for component in names:
            if component not in graph.components:
                raise InputError(
                    f"{option} {component}: no such "
                    f"component{did_you_mean(component, graph.components)}"
                )
    versions = parse_libraries(libraries)
    return Mode(name, dict(formats), strings(keep), strings(cpu), pinned, ram_bytes, versions)


def weight_bytes(graph: Graph, name: str, module: nn.Module, mode: Mode | None = None) -> int:
    """Return the allocated bytes of a component's weights, in its precision or format."""
    mode, component = mode or Mode(), graph.components[name]
    sizes, formats = weights_by_precision(module, component.dtype, allocated=True), mode.formats
    if name not in formats:
        precision = component.precision[0]
        nbytes = sizes.get(precision, sizes[component.dtype])
        if precision in MOVES and not mode.has(*PLAIN_MODULES):
            nbytes += (4 - ELEMENT_BYTES[component.dtype]) * kept_elements(module)
        return nbytes
    if formats[name] == LAYERWISE:
        return layerwise_bytes(module, component.dtype)
    weights = {
        id(layer.weight): layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)
    }.values()
    scales = FORMATS[formats[name]] * sum(weight.shape[0] for weight in weights)
    return (
        sizes[component.dtype] - sum(weight.nbytes - weight.numel() for weight in weights) + scales
    )


@dataclass(slots=True)
class Estimate:
    """Estimate of a warm call; ``on_device``: weight bytes there for each call, in order.

    ``seconds``: by stage; ``compute_seconds``: what they are without copies.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    compute_seconds: float = 0
    copied_in_bytes: float = 0
    copied_out_bytes: float = 0
    read_bytes: float = 0
    on_device: list[float] = field(default_factory=list)


def estimate_mode(
    graph: Graph, dry_run: DryRun, hardware: Hardware, mode: Mode, weights: Mapping[str, int]
) -> Estimate:
    """Estimate a warm call of ``graph``'s pipeline in ``mode``. ``weights``: component -> bytes."""
    return _Walk(graph, dry_run, hardware, mode, weights).walk()


class _Walk:
    """Walk through the calls of a recording with the state of the device and of host memory."""

    def __init__(
        self,
        graph: Graph,
        dry_run: DryRun,
        hardware: Hardware,
        mode: Mode,
        weights: Mapping[str, int],
    ) -> None:
        self.graph, self.dry_run, self.hardware, self.mode = graph, dry_run, hardware, mode
        self.weights = {name: nbytes for name, nbytes in weights.items() if name not in mode.cpu}
        pipeline = pipeline_class(graph.pipeline_called(""), graph.trust)
        order = str(getattr(pipeline, "model_cpu_offload_seq", None) or "").split("->")
        self.keep = (*mode.keep, *(name for name in self.weights if self._is_bound(name)))
        chain = [name for name in order if name in self.weights and name not in self.keep]
        # component -> component that leaves the device when this one is called
        self.predecessors = dict(zip(chain[1:], chain, strict=False))
        self.resident = dict.fromkeys(self.weights if mode.name == "resident" else self.keep)
        # components whose weights are in host memory, least recently used first
        self.in_ram = dict.fromkeys(self.weights)
        self.estimate = Estimate()
        # by the id of a call, since a loop repeats calls
        self._call_seconds: dict[int, float] = {}
        self._read_sizes: dict[int, tuple[list[float], float, float]] = {}

    def _is_bound(self, name: str) -> bool:
        """Return whether the quantized modules of ``name`` stay where they are made.

        ``enable_model_cpu_offload`` then places no hook on the component.
        """
        moves = MOVES.get(self.graph.components[name].precision[0], ())
        return not all(self.mode.has(package, first) for package, first in moves)

    def walk(self) -> Estimate:
        """Return the estimate of a warm call: one call before it leaves its state in RAM."""
        if self.mode.ram_bytes is not None and self.mode.name != "resident":
            for _, call in self.dry_run.recording.entries():
                self._host_seconds(call.component)
            self.estimate.read_bytes = 0
        seconds: dict[str, float] = defaultdict(float)
        for stage, call in self.dry_run.recording.entries():
            seconds[stage] += self._call(call)
        if self.mode.name == "model":  # the pipeline copies all back at its end
            seconds[next(reversed(seconds))] += sum(
                self._copy_out(name) for name in self.resident if name not in self.keep
            )
        self.estimate.seconds = dict(seconds)
        self.estimate.compute_seconds = sum(
            self._compute_seconds(call) for _, call in self.dry_run.recording.entries()
        )
        return self.estimate

    def _call(self, call: Call) -> float:
        name = call.component
        resident_bytes = sum(self.weights[other] for other in self.resident)
        if name in self.mode.cpu:
            self.estimate.on_device.append(resident_bytes)
            return self._compute_seconds(call)
        compute_seconds = self._compute_seconds(call)
        if name in self.resident and self.mode.name != "model":
            self.estimate.on_device.append(resident_bytes)
            return compute_seconds
        if self.mode.name == "model":
            copy_seconds = 0.0
            if (
                predecessor := self.predecessors.get(name)
            ) in self.resident and predecessor is not None:
                del self.resident[predecessor]
                copy_seconds += self._copy_out(predecessor)
            if name not in self.resident:
                self.resident[name] = None
                copy_seconds += self._host_seconds(name) + self._copy_in(
                    self.weights[name], self.hardware.pageable_bytes_per_second
                )
            self.estimate.on_device.append(sum(self.weights[other] for other in self.resident))
            return compute_seconds + copy_seconds
        read_seconds = self._host_seconds(name)
        profile = self.dry_run.profiles[name]
        split = (
            profile.layer_split
            if self.mode.name != "group" and profile.layer_split is not None
            else profile
        )
        if id(call) not in self._read_sizes:
            self._read_sizes[id(call)] = _block_sizes_read(call, split, self.weights[name])
        pieces, unblocked, largest = self._read_sizes[id(call)]
        if self.mode.name == "sequential":
            self.estimate.on_device.append(resident_bytes + largest)
            copy_seconds = self._copy_in(
                sum(pieces) + unblocked, self.hardware.pageable_bytes_per_second
            )
            hook_seconds = TENSOR_SECONDS * len(call.read_weights)
            return compute_seconds + copy_seconds + read_seconds + hook_seconds
        self.estimate.on_device.append(
            resident_bytes + (unblocked if self.mode.name == "group" else 0) + 2 * largest
        )
        rate = (
            self.hardware.h2d_bytes_per_second
            if self.mode.pinned
            else self.hardware.pageable_bytes_per_second
        )
        copy_seconds = (
            self._copy_in(sum(pieces), rate) + len(pieces) * self.hardware.copy_start_seconds
        )
        first = pieces[0] / rate if pieces else 0.0
        return (
            max(compute_seconds, copy_seconds + read_seconds)
            + first
            + self._copy_in(unblocked, self.hardware.pageable_bytes_per_second)
        )

    def _compute_seconds(self, call: Call) -> float:
        if id(call) not in self._call_seconds:
            name = call.component
            if name in self.mode.cpu:
                return call.flops / self.hardware.cpu_flops_per_second
            precision = self.mode.formats.get(name, self.graph.components[name].precision[0])
            shapes = self.dry_run.profiles[name].layers
            extra = extra_seconds(call, shapes, precision, self.hardware)
            self._call_seconds[id(call)] = sum(work_seconds(call, self.hardware)) + sum(
                extra.values()
            )
        return self._call_seconds[id(call)]

    def _host_seconds(self, name: str) -> float:
        """Return the seconds to read ``name``'s weights from disk; 0 if they are in RAM."""
        if self.mode.ram_bytes is None:
            return 0.0
        nbytes = self.weights[name]
        is_held = self.in_ram.pop(name, 0) is None and nbytes <= self.mode.ram_bytes
        self.in_ram[name] = None
        held_bytes = sum(self.weights[other] for other in self.in_ram)
        while held_bytes > self.mode.ram_bytes and len(self.in_ram) > 1:
            oldest = next(iter(self.in_ram))
            del self.in_ram[oldest]
            held_bytes -= self.weights[oldest]
        if is_held:
            return 0.0
        self.estimate.read_bytes += nbytes
        return nbytes / self.hardware.disk_bytes_per_second

    def _copy_in(self, nbytes: float, rate: float) -> float:
        self.estimate.copied_in_bytes += nbytes
        return nbytes / rate

    def _copy_out(self, name: str) -> float:
        self.estimate.copied_out_bytes += self.weights[name]
        return self.weights[name] / self.hardware.d2h_pageable_bytes_per_second


def _block_sizes_read(
    call: Call, profile: ComponentProfile, weights: int
) -> tuple[list[float], float, float]:
    """Return bytes of each block that ``call`` reads, of unblocked tensors, of the largest block.

    Sizes are scaled so that all blocks together have ``weights`` bytes, which depend on the
    precision.
    """
    sizes: dict[str, int] = {}
    total = 0
    for group, nbytes in zip(profile.groups, profile.block_bytes, strict=True):
        sizes |= dict.fromkeys(group.blocks, nbytes)
        total += nbytes * len(group.blocks)
    share = weights / total if total else 0.0
    owners = [owner(name, sizes) for name in call.read_weights]
    read_blocks = dict.fromkeys(path for path in owners if path)
    unblocked = sizes.get("", 0) * share if "" in owners else 0.0
    pieces = [sizes[path] * share for path in read_blocks]
    return pieces, unblocked, max(pieces, default=0.0)


def owner(name: str, paths: Mapping[str, float]) -> str:
    """Return which of ``paths`` is the block with the tensor ``name``; "" if none is."""
    while name and name not in paths:
        name = name.rpartition(".")[0]
    return name

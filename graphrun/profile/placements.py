"""Estimate a warm call with a placement for each component: how other engines hold weights.

    resident   on the device all the time
    swapped    copied to the device as a whole when it is called, and back when it leaves
    streamed   the first blocks stay on the device; each of the others is copied in every call,
               from when the block before it starts to compute, to a buffer of the two largest
    segmented  the same blocks stay, and nothing overlaps: each of the others is copied before it
               computes
    hooked     the same, and the tensors of a block are copied when their layer computes
               (accelerate's hooks)

    leaves     a swapped component leaves after its ``stage`` (calls of components of its kind),
               when one of the other ``group`` (denoisers, or all others) is called, or at the
               ``end`` of the call. Of several denoisers, one is on the device
    rest       of a streamed component, the blocks that stay and the weights outside of blocks are
               on the device ``always``, or during its ``stage``, or from their first ``use`` in it;
               or weights outside of blocks are copied in each ``call``, and no block stays

Swapped weights are in pageable memory, streamed blocks in page-locked memory, as with diffusers'
modes (`graphrun.profile.modes`). Seconds of compute are those of PyTorch's kernels, for every
engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from graphrun.graph.graph import Graph
from graphrun.model.hardware import Hardware
from graphrun.profile.costs import extra_seconds, work_seconds
from graphrun.profile.modes import TENSOR_SECONDS, Estimate, owner
from graphrun.profile.problems import phase_spans
from graphrun.profile.recording import Call, DryRun

PARTIAL_KINDS = ("streamed", "segmented", "hooked")
"""Placements in which blocks may stay while others are copied."""


@dataclass(frozen=True, slots=True)
class WeightPlacement:
    """How an engine holds a component. ``blocks``: of each block group, how many stay, from the
    first one on; empty: none. ``copies_back``: a component that leaves is copied, not dropped."""

    kind: Literal["resident", "swapped", "streamed", "segmented", "hooked"] = "resident"
    blocks: tuple[int, ...] = ()
    leaves: Literal["stage", "group", "end"] = "stage"
    rest: Literal["always", "stage", "use", "call"] = "always"
    copies_back: bool = True


@dataclass(frozen=True, slots=True)
class Scene:
    """What an estimate is of: a dry run on hardware.

    ``weights``: component -> bytes. ``kinds``: component -> its kind, such as ``dit``. ``phases``:
    rows of `graphrun.profile.survey.phase_rows`.
    """

    graph: Graph
    dry_run: DryRun
    hardware: Hardware
    weights: Mapping[str, int]
    kinds: Mapping[str, str]
    phases: Sequence[Mapping[str, Any]]

    def estimate(self, placements: Mapping[str, WeightPlacement]) -> Estimate:
        """Estimate a warm call with ``placements`` of all components."""
        walk = _PlacementWalk(self, placements)
        walk.pass_through()  # leaves what a call finds
        walk.estimate = Estimate()
        walk.pass_through()
        return walk.estimate

    def peak_bytes(self, estimate: Estimate) -> int:
        """Return the peak of ``estimate`` as nvidia-smi counts, context and workspace included."""
        spans = phase_spans(self.dry_run.recording.entries())
        weights = [max(map(int, estimate.on_device[begin:end])) for begin, end in spans]
        phase_bytes: list[int] = [
            row["reserved_bytes"] + nbytes for row, nbytes in zip(self.phases, weights, strict=True)
        ]
        return self.hardware.context_bytes + self.hardware.workspace_bytes + max(phase_bytes)


@dataclass(frozen=True, slots=True)
class _Parts:
    """A component's bytes: of each block that may be copied, in order, and of all other weights.

    ``staying``: paths of the blocks that stay. ``largest_bytes``: of its largest block, or layer if
    hooks copy it layer by layer.
    """

    blocks: Mapping[str, float]
    staying: frozenset[str]
    rest_bytes: float
    largest_bytes: float

    @property
    def kept_bytes(self) -> float:
        return sum(self.blocks[path] for path in self.staying)


def parts_of(scene: Scene, name: str, placement: WeightPlacement) -> _Parts:
    """Return the parts of the component ``name`` with ``placement``."""
    profile, weights = scene.dry_run.profiles[name], scene.weights[name]
    sizes = list(zip(profile.groups, profile.block_bytes, strict=True))
    total = sum(nbytes * len(group.blocks) for group, nbytes in sizes)
    share = weights / total if total else 0.0
    blocks, staying, counts = dict[str, float](), set[str](), iter(placement.blocks)
    for group, nbytes in sizes:
        if group.streamable:
            blocks |= dict.fromkeys(group.blocks, nbytes * share)
            staying |= set(group.blocks[: next(counts, 0)])
    layers = profile.layer_split if placement.kind == "hooked" else None
    pieces = list(blocks.values()) if layers is None else [n * share for n in layers.block_bytes]
    rest_bytes = max(0.0, weights - sum(blocks.values()))
    return _Parts(blocks, frozenset(staying), rest_bytes, max(pieces, default=0.0))


class _PlacementWalk:
    """Walk through the calls of a recording with the state of the device."""

    def __init__(self, scene: Scene, placements: Mapping[str, WeightPlacement]) -> None:
        self.scene, self.placements, self.hardware = scene, placements, scene.hardware
        self.estimate = Estimate()
        self.parts = {name: parts_of(scene, name, item) for name, item in placements.items()}
        # component -> its bytes on the device, beyond those that are there always
        self.present = dict[str, float]()
        self.always_bytes = sum(map(self._always_bytes, placements))
        # by the id of a call, since a loop repeats calls
        self._seconds, self._reads = dict[int, float](), dict[int, tuple[list[float], int]]()
        self._wait_seconds = dict[tuple[int, bool, bool], float]()

    def pass_through(self) -> None:
        seconds: dict[str, float] = defaultdict(float)
        stage, kind = "", ""
        for next_stage, call in self.scene.dry_run.recording.entries():
            next_kind = self.scene.kinds[call.component]
            next_kind = kind if next_kind == "other" else next_kind
            if stage and (next_stage, next_kind) != (stage, kind):
                seconds[stage] += self._leave("stage")
            stage, kind = next_stage, next_kind
            seconds[stage] += self._call(call)
        seconds[stage] += self._leave("stage") + self._leave("end")
        self.estimate.seconds = dict(seconds)

    def _always_bytes(self, name: str) -> float:
        placement, parts = self.placements[name], self.parts[name]
        if placement.kind == "resident":
            return self.scene.weights[name]
        is_partial = placement.kind != "swapped" and placement.rest == "always"
        return parts.kept_bytes + parts.rest_bytes if is_partial else 0.0

    def _leave(self, occasion: str) -> float:
        """Remove what leaves on ``occasion``; return the seconds of its copies."""
        return sum(
            self._remove(name)
            for name in list(self.present)
            if occasion == (self.placements[name].leaves if self._is_swapped(name) else "stage")
        )

    def _leave_for(self, user: str) -> float:
        """Remove what leaves because ``user`` is called; return the seconds of its copies."""
        kinds, seconds = self.scene.kinds, 0.0
        for name in list(self.present):
            leaves = self.placements[name].leaves
            is_other_dit = kinds[name] == kinds[user] == "dit" and name != user
            is_other_group = (kinds[name] == "dit") != (kinds[user] == "dit")
            by_group = self._is_swapped(name) and leaves == "group" and is_other_group
            if by_group or (is_other_dit and leaves != "end"):
                seconds += self._remove(name)
        return seconds

    def _is_swapped(self, name: str) -> bool:
        return self.placements[name].kind == "swapped"

    def _remove(self, name: str) -> float:
        nbytes = self.present.pop(name)
        if not self._is_swapped(name) or not self.placements[name].copies_back:
            return 0.0
        self.estimate.copied_out_bytes += nbytes
        return nbytes / self.hardware.d2h_pageable_bytes_per_second

    def _call(self, call: Call) -> float:
        name, placement = call.component, self.placements[call.component]
        parts, is_first = self.parts[name], call.component not in self.present
        pageable, pinned = (
            self.hardware.pageable_bytes_per_second,
            self.hardware.h2d_bytes_per_second,
        )
        compute_seconds = self._compute_seconds(call)
        seconds = compute_seconds + self._leave_for(name)
        buffer_bytes = 0.0
        if placement.kind == "swapped" and is_first:
            self.present[name] = self.scene.weights[name]
            seconds += self._copy_in(self.scene.weights[name], pageable)
        elif placement.kind in PARTIAL_KINDS:
            sizes, tensors = self._read(call)
            if placement.rest == "call":
                seconds += self._copy_in(parts.rest_bytes, pageable)
            elif placement.rest in ("stage", "use") and is_first:
                if placement.rest == "stage":
                    rate = pinned if placement.kind == "streamed" else pageable
                    seconds += self._copy_in(parts.kept_bytes, rate)
                seconds += self._copy_in(parts.rest_bytes, pageable)
                self.present[name] = parts.kept_bytes + parts.rest_bytes
            if placement.kind != "streamed":
                buffer_bytes = parts.largest_bytes
                seconds += self._copy_in(sum(sizes), pageable)
                seconds += TENSOR_SECONDS * tensors if placement.kind == "hooked" else 0.0
            else:
                buffer_bytes = 2 * parts.largest_bytes if sizes else 0.0
                buffer_bytes += parts.rest_bytes if placement.rest == "call" else 0.0
                is_first_use = placement.rest == "use" and is_first
                self._copy_in(sum(sizes) + (parts.kept_bytes if is_first_use else 0.0), pinned)
                is_prefetched = placement.rest != "call" and not is_first
                seconds += self._waits(call, is_prefetched, is_first_use)
                self.present.setdefault(name, 0.0)
        self.estimate.on_device.append(
            self.always_bytes + sum(self.present.values()) + buffer_bytes
        )
        return seconds

    def _waits(self, call: Call, is_prefetched: bool, is_first_use: bool) -> float:
        """Return the seconds in which ``call`` waits for blocks.

        The copy of a block starts when the block before it starts to compute, after the copy
        before. ``is_prefetched``: that of the first block started in the last block of the call
        before. ``is_first_use``: blocks that stay are copied too.
        """
        key = (id(call), is_prefetched, is_first_use)
        if key not in self._wait_seconds:
            parts = self.parts[call.component]
            segments = [
                (owner(path, parts.blocks), seconds)
                for (path, _), seconds in zip(
                    call.work, work_seconds(call, self.hardware), strict=True
                )
            ]
            order = list(dict.fromkeys(path for path, _ in segments if path))
            copies = {
                path: 0.0
                if path in parts.staying and not is_first_use
                else parts.blocks[path] / self.hardware.h2d_bytes_per_second
                + self.hardware.copy_start_seconds
                for path in order
            }
            following_blocks = dict(zip(order, order[1:], strict=False))
            last_seconds = sum(seconds for path, seconds in segments if path in order[-1:])
            head_start = last_seconds if is_prefetched else 0.0
            copied_at = max(0.0, copies[order[0]] - head_start) if order else 0.0
            ready, clock, waits = {path: copied_at for path in order[:1]}, 0.0, 0.0
            for path, seconds in segments:
                wait = max(0.0, ready.get(path, 0.0) - clock)
                clock, waits = clock + wait, waits + wait
                if (block := following_blocks.get(path, "")) and block not in ready:
                    copied_at = max(copied_at, clock) + copies[block]
                    ready[block] = copied_at if copies[block] else clock
                clock += seconds
            self._wait_seconds[key] = waits
        return self._wait_seconds[key]

    def _copy_in(self, nbytes: float, rate: float) -> float:
        self.estimate.copied_in_bytes += nbytes
        return nbytes / rate

    def _compute_seconds(self, call: Call) -> float:
        if id(call) not in self._seconds:
            name, scene = call.component, self.scene
            precision = scene.graph.components[name].precision[0]
            shapes = scene.dry_run.profiles[name].layers
            extra = extra_seconds(call, shapes, precision, self.hardware)
            self._seconds[id(call)] = sum(work_seconds(call, self.hardware)) + sum(extra.values())
        return self._seconds[id(call)]

    def _read(self, call: Call) -> tuple[list[float], int]:
        """Return the bytes of each block that ``call`` reads and that is copied, in order, and the
        number of tensors that hooks place."""
        if id(call) not in self._reads:
            parts, placement = self.parts[call.component], self.placements[call.component]
            owners = [owner(tensor, parts.blocks) for tensor in call.read_weights]
            read_paths = set(owners) - parts.staying
            has_hooks_on_rest = placement.rest == "call"
            self._reads[id(call)] = (
                [nbytes for path, nbytes in parts.blocks.items() if path in read_paths],
                sum(path not in parts.staying if path else has_hooks_on_rest for path in owners),
            )
        return self._reads[id(call)]

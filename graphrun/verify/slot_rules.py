"""Rules of `graphrun.verify.check` about the actions and the memory of one slot."""

from __future__ import annotations

from collections.abc import Iterator

from graphrun.errors import PlanError
from graphrun.model.blocks import Blocks, all_blocks, named
from graphrun.model.plan import (
    BlockNames,
    Drop,
    Evict,
    Load,
    Read,
    Restore,
    Run,
    Slot,
    Spill,
    Stream,
    Violation,
    blocks_text,
)
from graphrun.model.problem import ALLOCATION_BYTES, ComponentNumbers, PhaseNumbers, Problem, Use
from graphrun.units import round_up

# types of actions, in the order that a slot must follow
KINDS = (Drop, Evict, Spill, Restore, Read, Stream, Load, Run)


class SlotRules:
    """The rules about one slot; ``resident``: blocks on the device when it begins."""

    def __init__(
        self, problem: Problem, index: int, slot: Slot, resident: dict[str, Blocks]
    ) -> None:
        self.problem, self.index, self.slot = problem, index, slot
        self.components = {component.name: component for component in problem.components}
        self.resident = dict(resident)
        self.loaded_blocks = {name: blocks - blocks for name, blocks in resident.items()}
        self.streams: dict[str, tuple[int, Stream]] = {}
        # component -> first action that copies its blocks to the device
        self.copies: dict[str, int] = {}

    def violation(self, rule: str, action: int, detail: str) -> Violation:
        return Violation(rule, self.index, action, detail)

    def blocks_after(self) -> dict[str, Blocks]:
        return {name: blocks | self.loaded_blocks[name] for name, blocks in self.resident.items()}

    def actions(self) -> Iterator[Violation]:
        """Check each action and their order. Evicted blocks leave ``resident``."""
        runs = [
            number for number, action in enumerate(self.slot.actions) if isinstance(action, Run)
        ]
        computes = self.slot.part in ("first", "steady")
        if len(runs) != computes:
            yield self.violation(
                "order",
                -1,
                f"a {self.slot.part} slot must have {int(computes)} run actions; found {len(runs)}",
            )
        elif runs and runs[0] != len(self.slot.actions) - 1:
            yield self.violation("order", runs[0], "run must be the last action of its slot")
        latest = 0
        for number, action in enumerate(self.slot.actions):
            kind = KINDS.index(type(action))
            if kind < latest:
                names = [action_type.__name__.lower() for action_type in KINDS]
                yield self.violation(
                    "order",
                    number,
                    f"{names[kind]} after {names[latest]}; the order must be {', '.join(names)}",
                )
            latest = max(latest, kind)
            if isinstance(action, (Load, Evict, Stream)):
                yield from self.action(number, action)

    def action(self, number: int, action: Load | Evict | Stream) -> Iterator[Violation]:
        name = action.component
        component = self.components.get(name)
        if component is None:
            yield self.violation("unknown", number, f"no component {name!r}")
            return
        blocks = action.keep if isinstance(action, Stream) else action.blocks
        if unknown := unknown_blocks(component, blocks):
            yield self.violation("unknown", number, unknown)
            return
        block_set = named(component, blocks)
        if component.variants[0].device == "cpu":
            yield self.violation("cpu", number, f"{name} computes on the CPU")
        elif isinstance(action, Load):
            yield from self.load(number, action, component, block_set)
        elif isinstance(action, Evict):
            if absent := block_set - self.resident[name]:
                yield self.violation(
                    "evict-absent", number, f"not on the device: {listing(absent)}"
                )
            if not component.variants[0].movable and (
                self.slot.part != "end" or self.problem.runs > 1
            ):
                period = "until the end" if self.problem.runs == 1 else "in all runs"
                yield self.violation(
                    "immovable", number, f"{name} must stay on the device {period}"
                )
            self.resident[name] -= block_set
        elif name in self.streams or self.slot.part not in ("first", "steady"):
            yield self.violation(
                "stream", number, f"{name} may be streamed once per slot, in first and steady slots"
            )
        else:
            self.streams[name] = (number, action)

    def load(
        self, number: int, action: Load, component: ComponentNumbers, block_set: Blocks
    ) -> Iterator[Violation]:
        name = component.name
        if present := block_set & (self.resident[name] | self.loaded_blocks[name]):
            yield self.violation(
                "load-present", number, f"on the device already: {listing(present)}"
            )
        if action.backing_store != component.variants[0].backing_store:
            store = component.variants[0].backing_store
            yield self.violation(
                "backing-store",
                number,
                f"the backing store of {name} is {store}, not {action.backing_store}",
            )
        if self.slot.part == "end":
            yield self.violation("order", number, "the end slot must not load")
        self.loaded_blocks[name] |= block_set
        self.copies.setdefault(name, number)

    def required_blocks(self, phase: PhaseNumbers | None) -> Iterator[Violation]:
        """Check that all blocks that the calls need are available; ``phase`` None: no calls."""
        used_groups = {use.component: self.groups(use) for use in phase.uses} if phase else {}
        for name, (number, stream) in self.streams.items():
            component = self.problem.component(name)
            if not used_groups.get(name):
                yield self.violation("stream", number, f"the slot does not use {name}")
            device_blocks = self.resident[name] | self.loaded_blocks[name]
            if odd := named(component, stream.keep) ^ device_blocks:
                yield self.violation(
                    "stream",
                    number,
                    f"keep and the blocks on the device differ in {listing(odd)}",
                )
        for name, groups in used_groups.items():
            component = self.problem.component(name)
            if component.variants[0].device == "cpu":
                continue
            needed_blocks = all_blocks(component, groups)
            if self.slot.part == "steady" and groups and self.loaded_blocks[name]:
                yield self.violation(
                    "steady-load",
                    -1,
                    f"loaded in a steady slot that uses it: {listing(self.loaded_blocks[name])}",
                )
            yield from self.streaming(component, needed_blocks - self.resident[name])

    def streaming(self, component: ComponentNumbers, absent: Blocks) -> Iterator[Violation]:
        """Check that needed but ``absent`` blocks are loaded or can be streamed."""
        variant, name = component.variants[0], component.name
        streamable = {
            k
            for k, group in enumerate(component.groups)
            if group.streamable and variant.streamable and variant.movable
        }
        if fixed := absent - absent.in_groups(streamable):
            yield self.violation(
                "not-streamable",
                -1,
                f"must be on the device when the slot starts: {listing(fixed)}",
            )
        streamed = (absent - self.loaded_blocks[name]).in_groups(streamable)
        if not streamed:
            return
        if name not in self.streams:
            yield self.violation(
                "missing",
                -1,
                f"needed, but neither resident, loaded nor streamed: {listing(streamed)}",
            )
            return
        number, stream = self.streams[name]
        self.copies.setdefault(name, number)
        minimum_bytes = max(variant.block_bytes[k] for k, _ in streamed)
        if stream.ring_buffer_bytes < minimum_bytes:
            yield self.violation(
                "ring_buffer",
                number,
                f"{len(streamed)} blocks are streamed through a ring buffer of "
                f"{stream.ring_buffer_bytes} bytes; it needs {minimum_bytes}",
            )

    def groups(self, use: Use) -> set[int]:
        return {k for k, calls in enumerate(use.group_calls_in(self.slot.part)) if calls}

    def directives(self, phase: PhaseNumbers, groups: dict[str, set[int]]) -> Iterator[Violation]:
        """Check that the slot follows directives; add its groups to ``groups``, used so far."""
        uses = {use.component: use for use in phase.uses}
        for component in self.problem.components:
            name, demanded = component.name, self.problem.demanded(component.name)
            device_blocks = self.resident[name] | self.loaded_blocks[name]
            if "keep" in demanded:
                used_blocks = all_blocks(component, groups[name])
                if absent := used_blocks - self.resident[name]:
                    yield self.violation(
                        "keep",
                        -1,
                        f"kept from its first use on, but not on the device: {listing(absent)}",
                    )
            for rule in sorted(demanded & {"keep", "whole"})[:1]:
                if name in self.streams:
                    yield self.violation(
                        rule,
                        self.streams[name][0],
                        f"{name} is streamed, which the directive {rule} forbids",
                    )
                if name in uses and component.variants[0].device == "cpu":
                    yield self.violation(
                        rule, -1, f"{name} computes on the CPU, which the directive {rule} forbids"
                    )
            staying = device_blocks.in_groups(
                {k for k, group in enumerate(component.groups) if group.streamable}
            )
            if "exclude" in demanded and staying:
                yield self.violation(
                    "exclude", -1, f"on the device, though excluded: {listing(staying)}"
                )
            misplaced_blocks = (
                (self.resident[name] if self.slot.part == "load" else named(component, ()))
                if name in uses
                else device_blocks
            )
            if "drop" in demanded and misplaced_blocks:
                yield self.violation(
                    "drop",
                    -1,
                    f"on the device outside its own phases: {listing(misplaced_blocks)}",
                )
            if name in uses:
                groups[name] |= self.groups(uses[name])

    def weight_bytes(self) -> list[int]:
        weights = [0] * (1 + len(self.problem.secondaries))
        for component in self.problem.components:
            variant = component.variants[0]
            blocks = self.resident[component.name] | self.loaded_blocks[component.name]
            for group, count, nbytes in zip(
                component.groups, blocks.counts, variant.block_bytes, strict=True
            ):
                device = variant.secondary or group.secondary
                weights[device] += count * round_up(nbytes, ALLOCATION_BYTES)
        return weights

    def vram(
        self, number: int, phase: PhaseNumbers | None, spilled_bytes: int
    ) -> Iterator[Violation]:
        weights, *secondary_weights = self.weight_bytes()
        ring_buffers = sum(
            round_up(stream.ring_buffer_bytes, ALLOCATION_BYTES)
            for _, stream in self.streams.values()
        )
        values = (
            self.problem.value_bytes(number) - spilled_bytes + phase.input_bytes if phase else 0
        )
        activation = phase.activation_bytes(self.slot.part) if phase else 0
        total, limit = weights + ring_buffers + activation + values, self.problem.effective_bytes
        if total > limit:
            terms = (
                f"{weights} weights + {ring_buffers} ring buffers + {activation} activation + "
                f"{values} values and inputs"
            )
            yield self.violation("vram", -1, f"{terms} = {total} > {limit} bytes")
        for secondary, (nbytes, secondary_device) in enumerate(
            zip(secondary_weights, self.problem.secondaries, strict=True), 1
        ):
            compute_bytes = (
                phase.secondary_bytes[secondary - 1][self.slot.part == "steady"]
                if phase and self.slot.part != "load"
                else 0
            )
            if nbytes + compute_bytes > secondary_device.effective_bytes:
                terms = f"{nbytes} weights + {compute_bytes} activation and transfers"
                yield self.violation(
                    "secondary",
                    -1,
                    f"device{secondary}: {terms} = {nbytes + compute_bytes} > "
                    f"{secondary_device.effective_bytes} bytes",
                )


def unknown_blocks(component: ComponentNumbers, blocks: BlockNames) -> str:
    """Return which of ``blocks`` do not exist; "" if all do."""
    try:
        named(component, blocks)
    except PlanError as error:
        return str(error)
    return ""


def listing(blocks: Blocks) -> str:
    """Return the component, its blocks and their bytes."""
    component = blocks.component
    nbytes = sum(component.variants[0].block_bytes[k] for k, _ in blocks)
    return f"{component.name} {blocks_text(blocks.groups)} ({nbytes} bytes)"

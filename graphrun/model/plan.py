"""A `Plan`: slots with actions, its text form, and the parser of that text.

A plan has no peak and no time (see `simulate`), and may be invalid (see `check`).

    finds vae all                            on the device when the first slot begins, if not empty
    leaves vae all                           on the device when a run of a session ends
    variant transformer nf4 pinned device    chosen variant of a component that has several
    variant vae bfloat16 pinned device1      the same, on the first secondary device
    split transformer device1 double[12-18]  consecutive blocks on the first secondary device: the
                                             group ``double@1``; both groups are numbered from 0
    copy transformer device1                 its copy ``transformer@1`` there makes the first call
                                             of each step, while the component makes the second
    option decode tiling                     chosen option of a stage, if any
    order encode denoise decode              order of the stages, if not the problem's
    slot denoise/0:transformer steady x27
      stream transformer keep double[0,8,16] single[0,12,24,36] ring buffer 680 MiB
      load vae all from pinned
      run
"""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, cast

from graphrun.errors import PlanError
from graphrun.limits import require
from graphrun.reading import quoted, shortened
from graphrun.units import GIB, KIB, MIB

SlotPart = Literal["load", "first", "steady", "end"]

# Blocks of a component; None: all. Otherwise (group, ascending block indices), in group order.
BlockNames = tuple[tuple[str, tuple[int, ...]], ...] | None

# component, number of a secondary device, blocks that compute there
Split = tuple[str, int, BlockNames]


@dataclass(frozen=True, slots=True)
class Load:
    """Copy blocks from the component's backing store to the device, on the copy stream.

    The barrier at the slot's end waits for the copies. Compute in the same slot waits only for the
    copies of its own blocks.
    """

    component: str
    blocks: BlockNames
    backing_store: str = "pinned"


@dataclass(frozen=True, slots=True)
class Evict:
    """Free the device copy of blocks. Weights are read-only, so nothing is copied back."""

    component: str
    blocks: BlockNames


@dataclass(frozen=True, slots=True)
class Stream:
    """Run the component with the blocks ``keep`` resident, and stream the others.

    In each call, the other blocks are copied through a ring buffer of SIZE.
    ``keep`` includes the blocks that the same slot loads.
    """

    component: str
    keep: BlockNames
    ring_buffer_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """Run the op's code until the slot's calls are done."""


@dataclass(frozen=True, slots=True)
class Spill:
    """Copy a value to the host and free its device copy."""

    value: str


@dataclass(frozen=True, slots=True)
class Restore:
    """Copy a spilled value back to the device."""

    value: str


@dataclass(frozen=True, slots=True)
class Read:
    """Read the component from disk into its backing store, while the slot does its other actions.

    A block may be copied to the device as soon as it has been read.
    """

    component: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Free the component's backing store."""

    component: str


Action = Load | Evict | Stream | Run | Spill | Restore | Read | Drop


@dataclass(frozen=True, slots=True)
class Slot:
    """One part of a phase; it ends with a barrier.

    ``phase``: `PhaseNumbers.name`; "" for the last slot, whose part is ``end``. ``calls``: rounds
    in the slot; in each, every component with calls left is called once. 0 in load and end, 1 in
    first, all other rounds in steady.
    """

    phase: str
    part: SlotPart
    calls: int
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """Slots in order, for the problem whose digest is ``problem``.

    ``variants``: (component, `Variant.name`) for each component that has several. ``options``:
    (stage, `StageOption.name`). ``order``: stages; empty if it is the problem's order.
    ``further_slots``: slots of every run of a session after the first. ``finds``: blocks on the
    device when ``slots`` begin. ``leaves``: blocks on the device when any run of a session ends.
    ``splits``: blocks on secondary devices. ``copies``: (component, number of the secondary device
    with its copy).
    """

    problem: str
    slots: tuple[Slot, ...]
    variants: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    order: tuple[str, ...] = ()
    further_slots: tuple[Slot, ...] = ()
    finds: tuple[tuple[str, BlockNames], ...] = ()
    leaves: tuple[tuple[str, BlockNames], ...] = ()
    splits: tuple[Split, ...] = ()
    copies: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return plan_text(self)

    def __repr__(self) -> str:
        further_text = (
            f", {len(self.further_slots)} in every further run" if self.further_slots else ""
        )
        return f"<Plan {self.digest}: {len(self.slots)} slots{further_text}; str() is its text>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    @property
    def all_slots(self) -> tuple[Slot, ...]:
        """The slots of the first run, then those of a further run."""
        return (*self.slots, *self.further_slots)

    @property
    def digest(self) -> str:
        """SHA-256 of the text form, first 16 hexadecimal digits."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule of `check` that a plan breaks.

    ``slot``, ``action``: indices; -1: the whole plan, the whole slot. ``detail``: what was expected
    and found, with bytes.
    """

    rule: str
    slot: int
    action: int
    detail: str


# parts with a fixed number of calls
PART_CALLS: dict[str, int] = {"load": 0, "first": 1, "end": 0}
# units of sizes in a plan's text
UNITS = {"GiB": GIB, "MiB": MIB, "KiB": KIB, "B": 1}


def blocks_text(blocks: BlockNames) -> str:
    """Return ``all``, ``none``, or ``double[0,8] single[0-11]``: a range from three indices on."""
    if blocks is None:
        return "all"
    return " ".join(f"{name}[{_indices_text(indices)}]" for name, indices in blocks) or "none"


def _indices_text(indices: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs
    )


def action_text(action: Action) -> str:
    """Return one line of a plan's text, without indentation; `parse` reads it back."""
    match action:
        case Load(component, blocks, backing_store):
            return f"load {component} {blocks_text(blocks)} from {backing_store}"
        case Evict(component, blocks):
            return f"evict {component} {blocks_text(blocks)}"
        case Stream(component, keep, ring_buffer_bytes):
            unit = next(
                unit for unit in ("MiB", "KiB", "B") if ring_buffer_bytes % UNITS[unit] == 0
            )
            return (
                f"stream {component} keep {blocks_text(keep)} ring buffer"
                f" {ring_buffer_bytes // UNITS[unit]} {unit}"
            )
        case Run():
            return "run"
        case Spill(name) | Restore(name) | Read(name) | Drop(name):
            return f"{type(action).__name__.lower()} {name}"


def slot_text(slot: Slot) -> str:
    """Return a slot's first line, such as ``slot denoise/0:transformer steady x27``."""
    calls = "" if PART_CALLS.get(slot.part) == slot.calls else f" x{slot.calls}"
    return f"slot {slot.phase}{' ' if slot.phase else ''}{slot.part}{calls}"


def slot_lines(slot: Slot) -> list[str]:
    """Return the lines of ``slot`` in a plan's text."""
    return [slot_text(slot), *(f"  {action_text(action)}" for action in slot.actions)]


def marked_text(plan: Plan, violations: Iterable[Violation]) -> str:
    """Return the slots of ``plan`` that break rules, with the reason below each line that does.

        slot denoise/0:transformer steady x27
          stream transformer keep double[0,8] ring buffer 68 MiB
          ^ ring_buffer: 17 blocks are streamed through a ring buffer of 71303168 bytes; ...
          run

    Violations of the whole plan come first.
    """
    reasons: dict[tuple[int, int], list[str]] = {}
    for violation in violations:
        reason = f"{violation.rule}: {violation.detail}"
        reasons.setdefault((violation.slot, violation.action), []).append(reason)
    lines = reasons.pop((-1, -1), [])
    for number, slot in enumerate(plan.all_slots):
        if not any(place[0] == number for place in reasons):
            continue
        for action, line in enumerate(slot_lines(slot), -1):
            indent = "" if action < 0 else "  "
            lines.append(indent + shortened(line.removeprefix(indent), 200))
            lines += [f"{indent}^ {reason}" for reason in reasons.get((number, action), ())]
    return "\n".join(lines)


def plan_text(plan: Plan) -> str:
    """Return the text form of ``plan``, without a final newline."""
    lines = [f"plan {plan.problem}"]
    lines += [f"finds {component} {blocks_text(blocks)}" for component, blocks in plan.finds]
    lines += [f"leaves {component} {blocks_text(blocks)}" for component, blocks in plan.leaves]
    lines += [f"variant {component} {name}" for component, name in plan.variants]
    lines += [
        f"split {component} device{secondary} {blocks_text(blocks)}"
        for component, secondary, blocks in plan.splits
    ]
    lines += [f"copy {component} device{secondary}" for component, secondary in plan.copies]
    lines += [f"option {stage} {name}" for stage, name in plan.options]
    lines += [f"order {' '.join(plan.order)}"] if plan.order else []
    for number, slot in enumerate(plan.all_slots):
        lines += ["again"] if number == len(plan.slots) else []
        lines += slot_lines(slot)
    return "\n".join(lines)


def parse(text: str, name: str = "plan", lists: BlockLists | None = None) -> Plan:
    """Parse a plan's text form: ``parse(str(plan)) == plan``.

    ``#`` starts a comment; blank lines and indentation are ignored. Checks syntax only; `check`
    validates the plan. Raises PlanError with ``name:line`` and the expected text, and for more
    blocks than the limit ``placements``, which all plans with the same ``lists`` share.
    """
    digest: str | None = None
    lists = lists or BlockLists()
    choices: dict[str, list[str]] = {verb: [] for verb in CHOICE_LINES}
    runs: list[list[tuple[str, SlotPart, int, list[Action]]]] = [[]]
    for number, raw in enumerate(text.splitlines(), start=1):
        line, position = " ".join(raw.split("#", 1)[0].split()), f"{name}:{number}"
        if not line:
            continue
        if digest is None:
            if not (match := re.fullmatch(r"plan (\S+)", line)):
                raise PlanError(
                    "expected 'plan DIGEST', the digest of the plan's problem,"
                    f" found {quoted(line)}",
                    position,
                )
            digest = match[1]
        elif not runs[0] and (verb := line.split()[0]) in choices:
            choices[verb].append(_choice(verb, line, position))
        elif line == "again" and len(runs) == 1 and runs[0]:
            runs.append([])
        elif line.split()[0] == "slot":
            runs[-1].append((*_parse_slot(line, position), []))
        elif not runs[-1]:
            raise PlanError(
                f"expected a slot, as in 'slot encode/0:text_encoder load', found {quoted(line)}",
                position,
            )
        else:
            runs[-1][-1][3].append(_parse_action(line, position, lists))
    if digest is None:
        raise PlanError("expected 'plan DIGEST' as the first line, found no text", f"{name}:1")
    first_slots, further_slots = (
        tuple(Slot(phase, part, calls, tuple(actions)) for phase, part, calls, actions in run)
        for run in (runs[0], runs[1] if len(runs) > 1 else [])
    )
    variants, options = (
        tuple(_pair(line) for line in choices[verb]) for verb in ("variant", "option")
    )
    finds, leaves = (
        tuple(
            (component, lists.parse(blocks, name))
            for component, blocks in map(_pair, choices[verb])
        )
        for verb in ("finds", "leaves")
    )
    splits = tuple(_split(line, name, lists) for line in choices["split"])
    copies = tuple(
        (component, int(device.removeprefix("device")))
        for component, device in map(_pair, choices["copy"])
    )
    return Plan(
        digest,
        first_slots,
        variants,
        options,
        tuple(" ".join(choices["order"]).split()),
        further_slots,
        finds,
        leaves,
        splits,
        copies,
    )


def _choice(verb: str, line: str, position: str) -> str:
    pattern, shape = CHOICE_LINES[verb]
    if not (match := re.fullmatch(pattern, line)):
        raise PlanError(f"expected '{shape}', found {quoted(line)}", position)
    return match[1]


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition(" ")
    return name, value


def _split(text: str, position: str, lists: BlockLists) -> Split:
    component, device, blocks = text.split(" ", 2)
    return component, int(device.removeprefix("device")), lists.parse(blocks, position)


# first word of a line before the slots -> its pattern, and the form shown in errors
CHOICE_LINES: Mapping[str, tuple[str, str]] = {
    "finds": (r"finds (\S+ .+)", "finds COMPONENT BLOCKS"),
    "leaves": (r"leaves (\S+ .+)", "leaves COMPONENT BLOCKS"),
    "variant": (
        r"variant (\S+ \S+ (?:pinned|pageable|disk|file) (?:device[1-9]?|cpu))",
        "variant COMPONENT PRECISION pinned|pageable|disk|file device|device1|cpu",
    ),
    "split": (r"split (\S+ device[1-9] .+)", "split COMPONENT device1 BLOCKS"),
    "copy": (r"copy (\S+ device[1-9])", "copy COMPONENT device1"),
    "option": (r"option (\S+ \S+)", "option STAGE NAME"),
    "order": (r"order (.+)", "order STAGE STAGE ..."),
}


def _parse_slot(line: str, position: str) -> tuple[str, SlotPart, int]:
    match = re.fullmatch(r"slot (?:(\S+) (load|first|steady)|(end))(?: x([0-9]{1,20}))?", line)
    if not match:
        raise PlanError(
            f"expected 'slot PHASE load|first|steady [xCALLS]' or 'slot end', found {quoted(line)}",
            position,
        )
    phase, part, calls = match[1] or "", match[2] or match[3], match[4]
    if calls is None and part == "steady":
        raise PlanError(
            f"expected the calls of a steady slot, as in 'slot {phase[:100]} steady x27',"
            f" found {quoted(line)}",
            position,
        )
    return phase, cast(SlotPart, part), int(calls) if calls else PART_CALLS[part]


# first word of an action's line -> its type, its pattern, and the form shown in errors
ACTION_LINES: Mapping[str, tuple[type[Action], str, str]] = {
    "load": (
        Load,
        r"load (\S+) (.+) from (pinned|pageable|disk|file)",
        "load COMPONENT BLOCKS from pinned|pageable|disk|file",
    ),
    "evict": (Evict, r"evict (\S+) (.+)", "evict COMPONENT BLOCKS"),
    "stream": (
        Stream,
        r"stream (\S+) keep (.+) ring buffer ([0-9]{1,20}) (GiB|MiB|KiB|B)",
        "stream COMPONENT keep BLOCKS ring buffer SIZE GiB|MiB|KiB|B",
    ),
    "run": (Run, r"run", "run"),
    "spill": (Spill, r"spill (\S+)", "spill VALUE"),
    "restore": (Restore, r"restore (\S+)", "restore VALUE"),
    "read": (Read, r"read (\S+)", "read COMPONENT"),
    "drop": (Drop, r"drop (\S+)", "drop COMPONENT"),
}


def _parse_action(line: str, position: str, lists: BlockLists) -> Action:
    verb = line.split()[0]
    if verb not in ACTION_LINES:
        raise PlanError(
            f"expected slot or one of {', '.join(ACTION_LINES)}, found {quoted(verb)}", position
        )
    kind, pattern, shape = ACTION_LINES[verb]
    if not (match := re.fullmatch(pattern, line)):
        raise PlanError(f"expected '{shape}', found {quoted(line)}", position)
    arguments: list[Any] = list(match.groups())
    if len(arguments) > 1:
        arguments[1] = lists.parse(arguments[1], position)
    if kind is Stream:
        arguments[2:] = [int(arguments[2]) * UNITS[arguments[3]]]
    return kind(*arguments)


class BlockLists:
    """Parser of the block lists in one file. Counts all blocks before it expands a range."""

    def __init__(self) -> None:
        self._count = 0

    def parse(self, text: str, position: str) -> BlockNames:
        """Return the blocks that ``text`` lists. Raises PlanError."""
        if text in ("all", "none"):
            return None if text == "all" else ()
        groups: dict[str, tuple[int, ...]] = {}
        for item in text.split():
            match = re.fullmatch(
                r"([^\s\[\]]+)\[(\d{1,6}(?:-\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?)*)\]", item
            )
            if not match:
                expected = "blocks as 'all', 'none' or 'double[0,8,16] single[0-11,24]'"
                raise PlanError(f"expected {expected}, found {quoted(item)}", position)
            ends = [[int(end) for end in run.split("-")] for run in match[2].split(",")]
            ascending = all(run[0] <= run[-1] for run in ends) and all(
                a[-1] < b[0] for a, b in pairwise(ends)
            )
            if match[1] in groups or not ascending:
                expected = "each block group once and its blocks in ascending order"
                raise PlanError(f"expected {expected}, found {quoted(item)}", position)
            self._count += sum(run[-1] - run[0] + 1 for run in ends)
            require(
                "placements",
                self._count,
                f"the plan names {self._count:,} blocks up to here",
                position,
                PlanError,
            )
            groups[match[1]] = tuple(index for run in ends for index in range(run[0], run[-1] + 1))
        return tuple(groups.items())

"""What a plan says: slots of actions, and the text form that parses back. A plan stores no peak and no time.

variant transformer nf4 pinned device        where there is a choice: how the component is held
option decode tiling                         how the stage is run, if not plainly
order encode denoise decode                  of the stages, if not the problem's
slot denoise/0:transformer rest x27
  stream transformer keep double[0,8,16] single[0,12,24,36] ring 680 MiB
  load vae all from pinned
  run
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from graphrun.units import GIB, KIB, MIB

Part = Literal["load", "first", "rest", "end"]

# Blocks of a component: None means all of them; else (class name, indices into the class in ascending order), in class order.
Blocks = tuple[tuple[str, tuple[int, ...]], ...] | None


@dataclass(frozen=True, slots=True)
class Load:
    """Copy blocks in from the component's home. Before `run`: issued on the copy stream; the slot's barrier waits for it, and a
    block that the slot computes with waits for its own copy."""

    component: str
    blocks: Blocks
    home: str = "pinned"


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop the device copy of blocks. Weights are read-only: no bytes move."""

    component: str
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Stream:
    """Run the component with ``keep`` present and every other block that the slot's calls need passing through a staging ring of
    ``ring_bytes``. ``keep`` includes blocks that the same slot loads and keeps."""

    component: str
    keep: Blocks
    ring_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """Let the op's own code run on until the slot's calls are done."""


@dataclass(frozen=True, slots=True)
class Spill:
    """Copy a value out to the host."""

    value: str


@dataclass(frozen=True, slots=True)
class Restore:
    """Copy a spilled value back."""

    value: str


@dataclass(frozen=True, slots=True)
class Fill:
    """Read the component from disk into its home, beside what else the slot does; its blocks are copied on as they come in."""

    component: str


@dataclass(frozen=True, slots=True)
class Free:
    """Drop the host copy too: nothing later needs it."""

    component: str


Action = Load | Evict | Stream | Run | Spill | Restore | Fill | Free


@dataclass(frozen=True, slots=True)
class Slot:
    """One interval of planned time. ``phase`` is `PhaseNumbers.name` ("" for the last slot, part ``end``, which returns the
    device to its baseline); ``calls`` is the number of rounds in it: 0 for load and end, 1 for first, the other calls for rest."""

    phase: str
    part: Part
    calls: int
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Slots in order, for the problem with digest ``problem``.

    ``variants``: (component, `Variant.name`) for each component that has more than one; ``options``: (stage, `StageOption.name`);
    ``order``: stages, empty where it is the problem's. ``again``: the slots of every further run of a session.
    """

    problem: str
    slots: tuple[Slot, ...]
    variants: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    order: tuple[str, ...] = ()
    again: tuple[Slot, ...] = ()

    def __str__(self) -> str:
        return plan_text(self)

    @property
    def digest(self) -> str:
        """SHA-256 over the text form, first 16 hexadecimal digits."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a plan breaks: which, in which slot and action (index -1: the slot as a whole), and the bytes or facts."""

    rule: str
    slot: int
    action: int
    detail: str


# Calls of the parts that have a fixed number of them.
PART_CALLS: dict[str, int] = {"load": 0, "first": 1, "end": 0}
# What sizes in a plan's text are written in.
UNITS = {"GiB": GIB, "MiB": MIB, "KiB": KIB, "B": 1}


def blocks_text(blocks: Blocks) -> str:
    """``all``, ``none``, or every class with its indices, three or more in a row as a range: ``double[0,8,16] single[0-11,24]``."""
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
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def action_text(action: Action) -> str:
    """One line of a plan's text, without indentation; `parse` reads it back."""
    match action:
        case Load(component, blocks, home):
            return f"load {component} {blocks_text(blocks)} from {home}"
        case Evict(component, blocks):
            return f"evict {component} {blocks_text(blocks)}"
        case Stream(component, keep, ring_bytes):
            unit = next(unit for unit in ("MiB", "KiB", "B") if ring_bytes % UNITS[unit] == 0)
            return f"stream {component} keep {blocks_text(keep)} ring {ring_bytes // UNITS[unit]} {unit}"
        case Run():
            return "run"
        case Spill(value):
            return f"spill {value}"
        case Restore(value):
            return f"restore {value}"
        case Fill(component):
            return f"fill {component}"
        case Free(component):
            return f"free {component}"


def slot_text(slot: Slot) -> str:
    """A slot's first line: ``slot denoise/0:transformer rest x27``, ``slot end``."""
    calls = "" if PART_CALLS.get(slot.part) == slot.calls else f" x{slot.calls}"
    return f"slot {slot.phase}{' ' if slot.phase else ''}{slot.part}{calls}"


def plan_text(plan: Plan) -> str:
    """The text form, no newline at its end: the problem's digest, choices, then each slot with its actions two spaces in."""
    lines = [f"plan {plan.problem}"]
    lines += [f"variant {component} {name}" for component, name in plan.variants]
    lines += [f"option {stage} {name}" for stage, name in plan.options]
    lines += [f"order {' '.join(plan.order)}"] if plan.order else []
    for slot in plan.slots:
        lines += [slot_text(slot), *(f"  {action_text(action)}" for action in slot.actions)]
    lines += ["again"] if plan.again else []
    for slot in plan.again:
        lines += [slot_text(slot), *(f"  {action_text(action)}" for action in slot.actions)]
    return "\n".join(lines)

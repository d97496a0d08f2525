"""Reads a plan's text back: what each line must look like, and what to say where it does not. Judges no plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

from graphrun.errors import PlanError
from graphrun.planner.plan import (
    PART_CALLS,
    UNITS,
    Action,
    Blocks,
    Evict,
    Fill,
    Free,
    Load,
    Part,
    Plan,
    Restore,
    Run,
    Slot,
    Spill,
    Stream,
)


def parse(text: str, name: str = "plan") -> Plan:
    """The plan that ``text`` says: ``parse(str(plan)) == plan``. ``#`` starts a comment; blank lines and indentation mean nothing.

    Raises PlanError at ``name:line`` with what was expected there. Whether the plan may be run is for `check` to say.
    """
    digest: str | None = None
    choices: dict[str, list[str]] = {"variant": [], "option": [], "order": []}
    runs: list[list[tuple[str, Part, int, list[Action]]]] = [[]]
    for number, raw in enumerate(text.splitlines(), start=1):
        line, where = " ".join(raw.split("#", 1)[0].split()), f"{name}:{number}"
        if not line:
            continue
        if digest is None:
            if not (match := re.fullmatch(r"plan (\S+)", line)):
                raise PlanError(f"expected 'plan DIGEST', the digest of the plan's problem, found {line!r}", where)
            digest = match[1]
        elif not runs[0] and (verb := line.split()[0]) in choices:
            choices[verb].append(_choice(verb, line, where))
        elif line == "again" and len(runs) == 1 and runs[0]:
            runs.append([])
        elif line.split()[0] == "slot":
            runs[-1].append((*_parse_slot(line, where), []))
        elif not runs[-1]:
            raise PlanError(f"expected a slot, as in 'slot encode/0:text_encoder load', found {line!r}", where)
        else:
            runs[-1][-1][3].append(_parse_action(line, where))
    if digest is None:
        raise PlanError("expected 'plan DIGEST' as the first line, found no text", f"{name}:1")
    first, again = (
        tuple(Slot(phase, part, calls, tuple(actions)) for phase, part, calls, actions in run)
        for run in (runs[0], runs[1] if len(runs) > 1 else [])
    )
    variants, options = (tuple(_pair(line) for line in choices[verb]) for verb in ("variant", "option"))
    return Plan(digest, first, variants, options, tuple(" ".join(choices["order"]).split()), again)


def _choice(verb: str, line: str, where: str) -> str:
    pattern, shape = _CHOICES[verb]
    if not (match := re.fullmatch(pattern, line)):
        raise PlanError(f"expected '{shape}', found {line!r}", where)
    return match[1]


def _pair(text: str) -> tuple[str, str]:
    name, _, chosen = text.partition(" ")
    return name, chosen


# What stands before the slots -> how its line must look, and how to say so.
_CHOICES: Mapping[str, tuple[str, str]] = {
    "variant": (r"variant (\S+ \S+ (?:pinned|pageable|disk) (?:device|cpu))", "variant COMPONENT PRECISION HOME device|cpu"),
    "option": (r"option (\S+ \S+)", "option STAGE NAME"),
    "order": (r"order (.+)", "order STAGE STAGE ..."),
}


def _parse_slot(line: str, where: str) -> tuple[str, Part, int]:
    match = re.fullmatch(r"slot (?:(\S+) (load|first|rest)|(end))(?: x([0-9]+))?", line)
    if not match:
        raise PlanError(f"expected 'slot PHASE load|first|rest [xCALLS]' or 'slot end', found {line!r}", where)
    phase, part, calls = match[1] or "", match[2] or match[3], match[4]
    if calls is None and part == "rest":
        raise PlanError(f"expected the calls of a rest slot, as in 'slot {phase} rest x27', found {line!r}", where)
    return phase, cast(Part, part), int(calls) if calls else PART_CALLS[part]


def _parse_action(line: str, where: str) -> Action:
    verb = line.split()[0]
    if verb not in _ACTIONS:
        raise PlanError(f"expected slot or one of {', '.join(_ACTIONS)}, found {verb!r}", where)
    pattern, shape = _ACTIONS[verb]
    if not (match := re.fullmatch(pattern, line)):
        raise PlanError(f"expected '{shape}', found {line!r}", where)
    if verb == "load":
        return Load(match[1], _parse_blocks(match[2], where), match[3])
    if verb == "evict":
        return Evict(match[1], _parse_blocks(match[2], where))
    if verb == "stream":
        return Stream(match[1], _parse_blocks(match[2], where), int(match[3]) * UNITS[match[4]])
    if verb == "spill":
        return Spill(match[1])
    if verb == "restore":
        return Restore(match[1])
    if verb == "fill":
        return Fill(match[1])
    return Free(match[1]) if verb == "free" else Run()


# Verb -> how its line must look, and how to say so.
_ACTIONS: Mapping[str, tuple[str, str]] = {
    "load": (r"load (\S+) (.+) from (pinned|pageable|disk)", "load COMPONENT BLOCKS from pinned|pageable|disk"),
    "evict": (r"evict (\S+) (.+)", "evict COMPONENT BLOCKS"),
    "stream": (r"stream (\S+) keep (.+) ring ([0-9]+) (GiB|MiB|KiB|B)", "stream COMPONENT keep BLOCKS ring SIZE GiB|MiB|KiB|B"),
    "run": (r"run", "run"),
    "spill": (r"spill (\S+)", "spill VALUE"),
    "restore": (r"restore (\S+)", "restore VALUE"),
    "fill": (r"fill (\S+)", "fill COMPONENT"),
    "free": (r"free (\S+)", "free COMPONENT"),
}


def _parse_blocks(text: str, where: str) -> Blocks:
    if text in ("all", "none"):
        return None if text == "all" else ()
    found: dict[str, tuple[int, ...]] = {}
    for item in text.split():
        match = re.fullmatch(r"([^\s\[\]]+)\[(\d{1,6}(?:-\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?)*)\]", item)
        if not match:
            raise PlanError(f"expected blocks as 'all', 'none' or 'double[0,8,16] single[0-11,24]', found {item!r}", where)
        ends = [[int(end) for end in run.split("-")] for run in match[2].split(",")]
        indices = tuple(index for run in ends for index in range(run[0], run[-1] + 1))
        if match[1] in found or list(indices) != sorted(set(indices)) or any(run[0] > run[-1] for run in ends):
            raise PlanError(f"expected each class once and its blocks in ascending order, found {item!r}", where)
        found[match[1]] = indices
    return tuple(found.items())

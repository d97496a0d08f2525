"""The host's side of the program: which way of each component is taken, when its home is filled and freed, what RAM that takes.

    y[w]          way w is taken; one of each component
    F[w,t]        its home is filled in interval t: at most once, no later than its first use
    h[w,t]        its home is held, where RAM may bind: h[t] <= h[t-1] + F[t]; else it is held from its fill on
    RAM(t)        sum host_bytes*h + transient_bytes*F + spilled values + activation on the CPU <= RAM; page-locked bytes likewise

Rows that cannot bind are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from graphrun.planner.model import Model, Sum, plus
from graphrun.planner.program import Choice, Program, Way

NOTHING: Sum = ({}, 0.0)
ONE: Sum = ({}, 1.0)


class Homes:
    """Columns for ``program``'s ways. ``tight``: whether homes may have to be freed."""

    def __init__(self, model: Model, program: Program, tight: bool) -> None:
        self.program = program
        self.taken: list[Sum] = []
        self.fills: list[Mapping[int, int]] = []
        self._held: list[list[int] | None] = []
        of = [[way for way in program.ways if way.component == c] for c in range(len(program.problem.components))]
        for ways in of:
            columns = [model.column(0.0, 1.0, True) for _ in ways] if len(ways) > 1 else []
            if columns:
                model.row(dict.fromkeys(columns, 1.0), 1.0, 1.0)
            self.taken += [({column: 1.0}, 0.0) for column in columns] or [ONE for _ in ways]
        for number, way in enumerate(program.ways):
            self.fills.append(self._filled(model, number, way))
            self._held.append(self._holding(model, number, way) if tight and way.used and not program.session else None)

    def _filled(self, model: Model, number: int, way: Way) -> Mapping[int, int]:
        """F of a way that has to be filled: its columns by interval, up to its first use."""
        first = first_use(self.program, number)
        if way.fill_seconds is None or first < 0:
            return {}
        columns = {t: model.column(0.0, 1.0, True) for t in range(first + 1)}
        terms, constant = self.taken[number]
        model.row(
            {**dict.fromkeys(columns.values(), 1.0), **{column: -value for column, value in terms.items()}}, constant, constant
        )
        return columns

    def _holding(self, model: Model, number: int, way: Way) -> list[int]:
        """h of a way in every interval."""
        columns = [model.column(0.0, 1.0, True) for _ in self.program.intervals]
        for t, column in enumerate(columns):
            before = ({columns[t - 1]: 1.0}, 0.0) if t else self.taken[number] if way.fill_seconds is None else NOTHING
            fill = self.fills[number].get(t)
            terms, constant = plus(
                (1.0, ({column: 1.0}, 0.0)), (-1.0, before), (-1.0, NOTHING if fill is None else ({fill: 1.0}, 0.0))
            )
            model.row(terms, -np.inf, -constant)
            if fill is not None:
                model.row({column: 1.0, fill: -1.0}, 0.0, np.inf)
        return columns

    def held(self, number: int, t: int) -> Sum:
        """Whether the home of way ``number`` is held in interval ``t``."""
        if (columns := self._held[number]) is not None:
            return {columns[t]: 1.0}, 0.0
        if self.fills[number]:
            return {column: 1.0 for at, column in self.fills[number].items() if at <= t}, 0.0
        return self.taken[number] if self.program.ways[number].fill_seconds is None else NOTHING

    def always_held(self, number: int, t: int) -> bool:
        """Whether it is held in interval ``t`` wherever the way is taken at all."""
        if self._held[number] is not None:
            return False
        return not self.fills[number] or t >= max(self.fills[number])

    def host(self, t: int, locked: bool) -> Sum:
        """Bytes of homes in interval ``t``: in RAM, or page-locked ones only."""
        parts: list[tuple[float, Sum]] = []
        for number, way in enumerate(self.program.ways):
            nbytes = way.of.locked_bytes if locked else way.of.host_bytes
            if way.used and nbytes:
                parts.append((float(nbytes), self.held(number, t)))
            if not locked and way.of.transient_bytes and (fill := self.fills[number].get(t)) is not None:
                parts.append((float(way.of.transient_bytes), ({fill: 1.0}, 0.0)))
        return plus(*parts)


def first_use(program: Program, number: int) -> int:
    """The first interval that needs something of way ``number``; -1: none does."""
    way = program.ways[number]
    cells = [j for j, cell in enumerate(program.cells) if cell.way == number]
    for t, interval in enumerate(program.intervals):
        if (not way.computes and way.component in interval.around) or any(interval.calls[j] for j in cells):
            return t
    return -1


def most_host_bytes(program: Program, locked: bool) -> int:
    """More RAM than any choice takes in any interval."""
    total = 0
    for component in range(len(program.problem.components)):
        ways = [way for way in program.ways if way.component == component and way.used]
        total += max((way.of.locked_bytes if locked else way.of.host_bytes + way.of.transient_bytes for way in ways), default=0)
    if locked:
        return total
    if any(not way.computes for way in program.ways):
        total += max((interval.activation_bytes for interval in program.intervals), default=0)
    return total + sum(gap.nbytes for gap in program.gaps)


def freed(program: Program, choice: Choice, *, always: bool = False) -> Choice:
    """``choice`` with every home freed when nothing needs it any more, where RAM would not hold them all to the end."""
    problem, host = program.problem, program.host_bytes(choice)
    limits = (problem.ram_bytes, problem.pinned_bytes)
    fits = all(limit is None or taken <= limit for slot in host for taken, limit in zip(slot, limits, strict=True))
    if (fits and not always) or program.session:
        return choice
    after = [need + 1 for need in program.last_need(choice)]
    end = len(program.intervals)
    held = [way.used and (way.fill_seconds is None or fill >= 0) for way, fill in zip(program.ways, choice.fills, strict=True)]
    frees = tuple(at if at < end and is_held else -1 for at, is_held in zip(after, held, strict=True))
    return replace(choice, frees=frees)

"""A device map as integers: so many blocks of each component stay for good, the others pass. Knows no solver.

kept     # # # # # # # #      from the first slot to the last
others     ~ ~       ~ ~      through the ring, in every call; loaded for a phase where they cannot be streamed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphrun.planner.homes import freed
from graphrun.planner.program import Choice, Program


def mapped(program: Program, kept: Mapping[str, Sequence[int]]) -> Choice:
    """The choice that keeps ``kept`` (component -> blocks of each class); what is not in it is loaded for its phases. ``program``:
    one way each."""
    components = [component.name for component in program.problem.components]
    stay = [kept[name][c.index] if (name := components[c.component]) in kept else 0 for c in program.cells]
    present, loaded = list[tuple[int, ...]](), list[tuple[int, ...]]()
    held, fills = [0] * len(program.cells), [-1] * len(program.ways)
    for t, interval in enumerate(program.intervals):
        uses = {use.component: use for use in program.problem.phases[interval.phase].uses}
        goal = []
        for number, cell in enumerate(program.cells):
            name = components[cell.component]
            needed = name in uses and uses[name].class_calls[cell.index] > 0
            passes = cell.streamable and name in kept
            goal.append(max(stay[number], cell.count if needed and not passes else 0))
        stays = [min(h, g) for h, g in zip(held, goal, strict=True)]
        more = [g - s if interval.part == "load" else 0 for g, s in zip(goal, stays, strict=True)]
        present.append(tuple(stays))
        loaded.append(tuple(more))
        held = [s + m for s, m in zip(stays, more, strict=True)]
        for way in program.ways:
            begins = components[way.component] in uses or any(
                more[n] for n, cell in enumerate(program.cells) if cell.component == way.component
            )
            if way.fill_seconds is not None and fills[way.component] < 0 and begins and t < program.turn:
                fills[way.component] = t
    return freed(
        program, Choice(tuple(present), tuple(loaded), tuple(fills), (-1,) * len(program.ways), (False,) * len(program.gaps))
    )

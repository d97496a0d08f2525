"""Brute force: every number of blocks, in every slot, by dynamic programming, from the rules alone.

State: blocks of every class on the device when a slot ends. Between slots anything may be dropped, so the least cost of a state is
also that of every smaller one.
"""

from __future__ import annotations

from itertools import product

from graphrun.planner.problem import Problem

State = tuple[int, ...]


def up(nbytes: int) -> int:
    return (nbytes + 511) // 512 * 512


class Oracle:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.cells = [(c, k) for c, numbers in enumerate(problem.components) for k in range(len(numbers.classes))]
        self.counts = [len(problem.components[c].classes[k].blocks) for c, k in self.cells]
        self.slots: list[tuple[int, str]] = []
        for index, phase in enumerate(problem.phases):
            if phase.uses:
                self.slots.append((index, "load"))
            self.slots.append((index, "first"))
            if phase.rest_calls:
                self.slots.append((index, "rest"))
        self.steps = self._steps()

    def calls(self, index: int, part: str) -> list[tuple[int, float]]:
        found = []
        for c, k in self.cells:
            use = next((u for u in self.problem.phases[index].uses if u.component == self.problem.components[c].name), None)
            total = use.class_calls[k] if use else 0
            here = {"load": 0, "first": min(total, 1), "rest": max(total - 1, 0)}[part]
            found.append((here, use.seconds[k] if use else 0.0))
        return found

    def weigh(
        self, index: int, part: str, calls: list[tuple[int, float]], present: State, after: State
    ) -> tuple[float, int, int] | None:
        """Seconds, bytes moved and bytes held of a slot that starts with ``present`` and ends with ``after``; None: not allowed."""
        phase = self.problem.phases[index]
        used = {c for (c, _), (n, _) in zip(self.cells, calls, strict=True) if n}
        transfer = own = 0.0
        moved = held = 0
        passing: dict[int, list[int]] = {}
        for (c, k), nb, (n, seconds), here, there in zip(self.cells, self.counts, calls, present, after, strict=True):
            variant, of = self.problem.components[c].variants[0], self.problem.components[c].classes[k]
            nbytes, loaded = variant.block_bytes[k], there - here
            held += up(nbytes) * there
            copies = loaded
            if self.disobeys(index, part, c, k, (n, nb), here, there):
                return None
            if part == "rest" and c in used and loaded:
                return None
            if n:
                if not (of.streamable and variant.streamable and variant.movable):
                    if here < nb:
                        return None
                    copies = 0
                else:
                    passing.setdefault(c, []).extend([nbytes] * (nb - there))
                    copies = nb - here if part == "first" else n * (nb - here)
                own += max(n * nb * seconds, copies * variant.load_seconds[k])
            transfer += copies * variant.load_seconds[k]
            moved += copies * nbytes
        for sizes in passing.values():
            held += up(min(2, len(sizes)) * max(sizes, default=0))
        held += {"load": 0, "first": phase.first_bytes, "rest": phase.rest_bytes}[part] + phase.carry_bytes
        held += sum(v.nbytes for v in self.problem.values if v.first_phase <= index <= v.last_phase)
        return max(own, transfer), moved, held

    def disobeys(self, index: int, part: str, c: int, k: int, of: tuple[int, int], here: int, there: int) -> bool:
        """Whether ``here`` blocks of a class at a slot's start and ``there`` at its end are against a directive."""
        numbers, (calls, nb) = self.problem.components[c], of
        variant, may = numbers.variants[0], numbers.classes[k].streamable
        for directive in self.problem.directives:
            if directive.component != numbers.name:
                continue
            own = any(use.component == numbers.name for use in self.problem.phases[index].uses)
            uses = [self.calls(*slot)[self.cells.index((c, k))][0] for slot in self.slots[: self.slots.index((index, part))]]
            match directive.placement:
                case "keep" if (any(uses) and here < nb) or (calls and there < nb):
                    return True
                case "exclude" if there and may and variant.streamable:
                    return True
                case "whole" if calls and there < nb:
                    return True
                case "drop" if there if not own else here if part == "load" else 0:
                    return True
        return False

    def _steps(self) -> list[list[tuple[State, State, float, int, int]]]:
        pairs = [[(here, there) for there in range(nb + 1) for here in range(there + 1)] for nb in self.counts]
        found = []
        for index, part in self.slots:
            steps, calls = [], self.calls(index, part)
            for pair in product(*pairs):
                present, after = tuple(p[0] for p in pair), tuple(p[1] for p in pair)
                if (weight := self.weigh(index, part, calls, present, after)) is not None:
                    steps.append((present, after, *weight))
            found.append(steps)
        return found

    def _reach(self, values: dict[State, tuple[float, ...]]) -> dict[State, tuple[float, ...]]:
        """Least value of every state from which blocks may be dropped to get here; blocks that cannot be moved stay."""
        for j, nb in enumerate(self.counts):
            if not self.problem.components[self.cells[j][0]].variants[0].movable:
                continue
            for have in range(nb, 0, -1):
                for state in [s for s in values if s[j] == have]:
                    less = (*state[:j], have - 1, *state[j + 1 :])
                    values[less] = min(values.get(less, values[state]), values[state])
        return values

    def smallest_effective(self) -> int:
        """The least effective budget for which anything fits."""
        best: dict[State, tuple[float, ...]] = {(0,) * len(self.cells): (0,)}
        for steps in self.steps:
            reach, best = self._reach(best), {}
            for present, after, _, _, held in steps:
                if present in reach:
                    value = (max(reach[present][0], held),)
                    best[after] = min(best.get(after, value), value)
        return int(min(best.values())[0])

    def best(self, effective_bytes: int) -> tuple[float, float] | None:
        """Least seconds, and least bytes moved in that time; None: nothing fits."""
        best: dict[State, tuple[float, ...]] = {(0,) * len(self.cells): (0.0, 0.0)}
        for steps in self.steps:
            reach, best = self._reach(best), {}
            for present, after, seconds, moved, held in steps:
                if present in reach and held <= effective_bytes:
                    value = (reach[present][0] + seconds, reach[present][1] + moved)
                    best[after] = min(best.get(after, value), value)
        return min(((v[0], v[1]) for v in best.values()), default=None)

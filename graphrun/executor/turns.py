"""Whose turn it is: which slots of a plan an entry into a component opens.

    plan     a load | a first | a rest x3 | b load | b first | end
    entry    a                  a a a       b                  finish
    opens    0 1                2 . .       3 4                5

Knows names and counts, and neither device nor bytes.
"""

from __future__ import annotations

from collections import Counter

from graphrun.errors import BrokenPlan
from graphrun.planner.plan import Plan, Restore, slot_text
from graphrun.planner.problem import PhaseNumbers, Problem

AGAIN = "plan again with the inputs of this run"


class Turns:
    """A cursor over the slots of ``plan``, moved by entries."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self._phases = {phase.name: phase for phase in problem.phases}
        self._slots = plan.slots
        self._slot = -1
        self._entered: Counter[str] = Counter()

    def enter(self, component: str) -> list[int]:
        """The slots to open now, in order; none when the entry belongs to the slot that is open.

        ``first`` lasts until every component of the phase was entered. An entry stays in its phase unless the next phase uses the
        same component and this one has had its planned calls of it. Raises BrokenPlan when the plan has no place for the entry.
        """
        phase = self._current()
        if phase is not None and self._slots[self._slot].part == "load":
            opened = self._first_of(phase, component)
        elif phase is None or not self._stays(phase, component):
            opened = self._next_phase(component)
        elif self._slots[self._slot].part == "first" and all(self._entered[use.component] for use in phase.uses):
            opened = [self._slot + 1]
            if self._slots[opened[0]].part != "rest":
                raise BrokenPlan(f"{component} was entered again in {phase.name}, for which the plan has one call; {AGAIN}")
        else:
            opened = []
        if opened:
            self._slot = opened[-1]
        self._entered[component] += 1
        return opened

    def begin(self, stage: str) -> list[int]:
        """The slots to open when ``stage`` begins, before its op sees a value: its load slot, where this restores one."""
        after = self._slot + 1
        if after >= len(self._slots) or not any(isinstance(action, Restore) for action in self._slots[after].actions):
            return []
        phase = self._phases.get(self._slots[after].phase)
        if phase is None or phase.stage != stage or self._slots[after].part != "load":
            return []
        self._slot = after
        self._entered.clear()
        return [after]

    def finish(self) -> list[int]:
        """The slots to open when all stages are done. Raises BrokenPlan when the plan expects more entries."""
        left = list(range(self._slot + 1, len(self._slots)))
        if any(self._slots[i].part == "rest" or self._uses(self._slots[i].phase) for i in left):
            raise BrokenPlan(f"the run ended {self._where()}, before the plan did; {AGAIN}")
        self._slot += len(left)
        return left

    def _first_of(self, phase: PhaseNumbers, component: str) -> list[int]:
        """Behind a load slot that was opened when its stage began."""
        if component not in self._uses(phase.name):
            names = " or ".join(self._uses(phase.name))
            raise BrokenPlan(f"{component} was entered out of turn {self._where()}: the plan expects {names} next; {AGAIN}")
        return [self._slot + 1]

    def _next_phase(self, component: str) -> list[int]:
        following = self._following()
        if component not in (expected := self._uses(following)):
            names = " or ".join(expected) or "nothing more"
            raise BrokenPlan(f"{component} was entered out of turn {self._where()}: the plan expects {names} next; {AGAIN}")
        last = next(i for i, slot in enumerate(self._slots) if slot.phase == following and slot.part == "first")
        opened = list(range(self._slot + 1, last + 1))
        if any(self._slots[i].part == "rest" for i in opened):
            raise BrokenPlan(f"{component} was entered {self._where()}, before that phase had its planned calls; {AGAIN}")
        self._entered.clear()
        return opened

    def _stays(self, phase: PhaseNumbers, component: str) -> bool:
        use = next((use for use in phase.uses if use.component == component), None)
        if use is None:
            return False
        return component not in self._uses(self._following()) or self._entered[component] < use.calls

    def _current(self) -> PhaseNumbers | None:
        return self._phases.get(self._slots[self._slot].phase) if self._slot >= 0 else None

    def _following(self) -> str:
        """The name of the next phase that uses a component; "" if there is none."""
        current = self._slots[self._slot].phase if self._slot >= 0 else ""
        later = (slot.phase for slot in self._slots[self._slot + 1 :] if slot.phase != current)
        return next((name for name in later if self._uses(name)), "")

    def _uses(self, phase: str) -> list[str]:
        return [use.component for use in self._phases[phase].uses] if phase in self._phases else []

    def _where(self) -> str:
        return f"in {slot_text(self._slots[self._slot])}" if self._slot >= 0 else "at the start"

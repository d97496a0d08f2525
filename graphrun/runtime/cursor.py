"""Finds which slots of a plan a call into a component opens.

The slots that calls into the components a and b open:

    plan     a load | a first | a steady x3 | b load | b first | end
    call     a                  a a a         b                  end of run
    opens    0 1                2 . .         3 4                5
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from graphrun.errors import BrokenPlan
from graphrun.model.plan import Plan, Restore, Slot, slot_text
from graphrun.model.problem import Problem

AGAIN = "plan again with the inputs of this run"  # advice at the end of the errors of `SlotCursor`


class SlotCursor:
    """The position in ``plan``: which slots a call into a component opens. Only counts calls; uses
    no device and no bytes."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self._stages = {phase.name: phase.stage for phase in problem.phases}
        self._uses = {
            phase.name: {use.component: use.calls for use in phase.uses} for phase in problem.phases
        }
        self._slots = plan.slots
        self._slot = -1
        self._entered: Counter[str] = Counter()
        self._left_out: frozenset[str] = frozenset()

    def leave_out(self, stages: Collection[str]) -> None:
        """The run makes no call of ``stages``: their slots are opened on the way to others, and
        only move weights."""
        self._left_out = frozenset(stages)
        self._uses |= {phase: {} for phase, stage in self._stages.items() if stage in stages}

    def enter(self, component: str) -> list[int]:
        """Indices of the slots that a call into ``component`` opens, in order; empty when the call
        belongs to the open slot.

        The first slot lasts until every component of the phase has been called. The call belongs to
        the current phase if that uses ``component``; but if the next phase uses it too, only as
        long as the current phase has planned calls of it left. Raises BrokenPlan when the plan does
        not have this call.
        """
        uses, part = self._uses.get(self._at.phase, {}), self._at.part
        if part == "load" and uses:  # opened by `begin`
            self._expect(component, uses)
            opened = [self._slot + 1]
        elif component not in uses or (
            component in self._following()[1] and self._entered[component] >= uses[component]
        ):
            opened = self._next_phase(component)
        elif part == "first" and all(self._entered[name] for name in uses):
            opened = [self._slot + 1]
            if self._slots[opened[0]].part != "steady":
                raise BrokenPlan(
                    f"{component} was called again in {self._at.phase}, for which the plan has one call; {AGAIN}"
                )
        else:
            opened = []
        if opened:
            self._slot = opened[-1]
        self._entered[component] += 1
        return opened

    def ahead(self) -> list[int]:
        """Indices of the slots to open before the run has its inputs: the first one, if it loads
        and restores no value."""
        first = next(iter(self._slots), None)
        if (
            first is None
            or first.part != "load"
            or any(isinstance(action, Restore) for action in first.actions)
        ):
            return []
        self._slot = 0
        return [0]

    def begin(self, stage: str) -> list[int]:
        """Indices of the slots to open when ``stage`` starts, before its op reads values: its load
        slot, if that restores a value. Empty otherwise: the stage's first call opens the load slot
        then."""
        left = range(self._slot + 1, len(self._slots))
        at = next(
            (i for i in left if self._stages.get(self._slots[i].phase) not in self._left_out), None
        )
        if (
            at is None
            or self._slots[at].part != "load"
            or self._stages[self._slots[at].phase] != stage
        ):
            return []
        if not any(isinstance(action, Restore) for action in self._slots[at].actions):
            return []
        opened = list(range(self._slot + 1, at + 1))
        self._slot = at
        self._entered.clear()
        return opened

    def finish(self) -> list[int]:
        """Indices of the slots to open when all stages are done. Raises BrokenPlan when the plan
        expects more calls."""
        left = list(range(self._slot + 1, len(self._slots)))
        if any(self._uses.get(self._slots[i].phase) for i in left):
            raise BrokenPlan(f"the run ended {self._where()}, before the plan did; {AGAIN}")
        self._slot += len(left)
        return left

    @property
    def _at(self) -> Slot:
        return self._slots[self._slot] if self._slot >= 0 else Slot("", "end", 0, ())

    def _next_phase(self, component: str) -> list[int]:
        """The slots to open up to the first slot of the next phase that uses a component."""
        following, uses = self._following()
        self._expect(component, uses)
        last = next(
            i
            for i, slot in enumerate(self._slots)
            if slot.phase == following and slot.part == "first"
        )
        opened = list(range(self._slot + 1, last + 1))
        if any(
            self._slots[i].part == "steady" and self._uses[self._slots[i].phase] for i in opened
        ):
            raise BrokenPlan(
                f"{component} was called {self._where()}, before that phase had its planned calls; {AGAIN}"
            )
        self._entered.clear()
        return opened

    def _following(self) -> tuple[str, Mapping[str, int]]:
        """The next phase that uses a component, and its uses; nothing if there is none."""
        later = (
            slot.phase for slot in self._slots[self._slot + 1 :] if slot.phase != self._at.phase
        )
        return next(((name, uses) for name in later if (uses := self._uses.get(name))), ("", {}))

    def _expect(self, component: str, uses: Mapping[str, int]) -> None:
        if component not in uses:
            names = " or ".join(uses) or "nothing more"
            raise BrokenPlan(
                f"{component} was called out of order {self._where()}: the plan expects {names} next; {AGAIN}"
            )

    def _where(self) -> str:
        return f"in {slot_text(self._at)}" if self._slot >= 0 else "at the start"

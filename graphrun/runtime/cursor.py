"""Find which slots of a plan a call into a component opens.

The slots that calls into the components a and b open:

    plan     a load | a first | a steady x3 | b load | b first | end
    call     a                  a a a         b                  end of run
    opens    0 1                2 . .         3 4                5

A stage has phases, in which calls go to the same components. A phase has up to three slots: load,
first and steady.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from graphrun.errors import BrokenPlan
from graphrun.model.plan import Plan, Restore, Slot, slot_lines, slot_text
from graphrun.model.problem import Problem

# suggestion at the end of errors
AGAIN = "plan again with the inputs of this run"


class SlotCursor:
    """The position in ``plan``. Only counts calls; uses neither device nor bytes."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self._stages = {phase.name: phase.stage for phase in problem.phases}
        self._uses = {
            phase.name: {use.component: use.calls for use in phase.uses} for phase in problem.phases
        }
        self._slots = plan.slots
        self._slot = -1
        self._call_counts: Counter[str] = Counter()
        self._excluded_stages: frozenset[str] = frozenset()
        # component -> its copy, which makes every other call (`graphrun.model.copies`)
        self._copies = {c.copy_of: c.name for c in problem.components if c.copy_of}

    def leave_out(self, stages: Collection[str]) -> None:
        """Declare that the run makes no call of ``stages``. Their slots then only move weights."""
        self._excluded_stages = frozenset(stages)
        self._uses |= {phase: {} for phase, stage in self._stages.items() if stage in stages}

    def caller(self, component: str) -> str:
        """Return who makes the next call into ``component``: itself, or its copy."""
        copy = self._copies.get(component, component)
        uses, counts = self._uses.get(self._open_slot.phase, {}), self._call_counts
        if copy in uses and any(counts[name] < uses[name] for name in (copy, component)):
            return copy if counts[copy] <= counts[component] else component
        return copy if copy in self._next_uses()[1] else component

    def enter(self, component: str) -> list[int]:
        """Return the indices of the slots that a call into ``component`` opens, in order.

        Empty if the call belongs to the open slot. A phase's slot of part ``first`` lasts until
        every component of the phase has been called. If two consecutive phases use ``component``,
        the call belongs to the second once ``component`` has had all planned calls of the first.
        Raises BrokenPlan if the plan does not have this call.
        """
        uses, part = self._uses.get(self._open_slot.phase, {}), self._open_slot.part
        if part == "load" and uses:  # opened by `begin` or `open_ahead`
            self._expect(component, uses)
            slot_indices = [self._slot + 1]
        elif component not in uses or (
            component in self._next_uses()[1] and self._call_counts[component] >= uses[component]
        ):
            slot_indices = self._next_phase(component)
        elif part == "first" and all(self._call_counts[name] for name in uses):
            slot_indices = [self._slot + 1]
            if self._slots[self._slot + 1].part != "steady":
                raise self._broken(
                    f"{component} was called again in {self._open_slot.phase}, for which the plan "
                    "has one call"
                )
        else:
            slot_indices = []
        if slot_indices:
            self._slot = slot_indices[-1]
        self._call_counts[component] += 1
        return slot_indices

    def open_ahead(self) -> list[int]:
        """Return the indices of the slots to open before the run has its inputs.

        The plan's first slot, if it is a load slot that restores no value. A restored value is an
        output of an earlier stage, spilled to the host: it does not exist yet.
        """
        first = self._slots[0]
        if first.part != "load" or any(isinstance(action, Restore) for action in first.actions):
            return []
        self._slot = 0
        return [0]

    def begin(self, stage: str) -> list[int]:
        """Return the indices of the slots to open when ``stage`` starts, before it reads values.

        If the load slot of ``stage`` restores a value: all slots up to that one. Otherwise none:
        the stage's first call opens the load slot.
        """
        indices = range(self._slot + 1, len(self._slots))
        load_index = next(
            (
                i
                for i in indices
                if self._stages.get(self._slots[i].phase) not in self._excluded_stages
            ),
            None,
        )
        if load_index is None:
            return []
        slot = self._slots[load_index]
        if self._stages.get(slot.phase) != stage or not any(
            isinstance(action, Restore) for action in slot.actions
        ):
            return []
        slot_indices = list(range(self._slot + 1, load_index + 1))
        self._slot = load_index
        self._call_counts.clear()
        return slot_indices

    def finish(self) -> list[int]:
        """Return the slots to open when all stages are done. Raises BrokenPlan if too early."""
        slot_indices = list(range(self._slot + 1, len(self._slots)))
        if any(self._uses.get(self._slots[i].phase) for i in slot_indices):
            raise self._broken(f"the run ended {self._where()}, before the plan did")
        self._slot += len(slot_indices)
        return slot_indices

    @property
    def _open_slot(self) -> Slot:
        # before the first slot: the last one, which has no phase either
        return self._slots[self._slot]

    def _next_phase(self, component: str) -> list[int]:
        """Return the indices of the slots up to the next phase's first call."""
        next_phase, uses = self._next_uses()
        self._expect(component, uses)
        last = next(
            i
            for i, slot in enumerate(self._slots)
            if slot.phase == next_phase and slot.part == "first"
        )
        slot_indices = list(range(self._slot + 1, last + 1))
        if any(
            self._slots[i].part == "steady" and self._uses[self._slots[i].phase]
            for i in slot_indices
        ):
            raise self._broken(
                f"{component} was called {self._where()}, before that phase had its planned calls"
            )
        self._call_counts.clear()
        return slot_indices

    def _next_uses(self) -> tuple[str, Mapping[str, int]]:
        """Return the next phase that uses a component, and its uses; empty if there is none."""
        phase_names = (
            slot.phase
            for slot in self._slots[self._slot + 1 :]
            if slot.phase != self._open_slot.phase
        )
        return next(
            ((name, uses) for name in phase_names if (uses := self._uses.get(name))), ("", {})
        )

    def _expect(self, component: str, uses: Mapping[str, int]) -> None:
        if component not in uses:
            names = " or ".join(uses) or "nothing more"
            raise self._broken(
                f"{component} was called out of order {self._where()}: the plan expects {names} "
                "next"
            )

    def _where(self) -> str:
        return f"in {slot_text(self._open_slot)}" if self._slot >= 0 else "at the start"

    def _broken(self, text: str) -> BrokenPlan:
        """Return the error ``text``, with the plan's text of the open slot and the next one."""
        slots = self._slots[max(0, self._slot) : self._slot + 2]
        lines = [line for slot in slots for line in slot_lines(slot)]
        end = 1 + len(slots[0].actions) if slots and self._slot >= 0 else 0
        lines.insert(end, "^ here")
        return BrokenPlan("\n".join([f"{text}; {AGAIN}", *(f"  {line}" for line in lines)]))

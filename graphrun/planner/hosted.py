"""What lies on the host while a plan is followed: homes, what is being filled, spilled values. Bytes per slot; knows no time.

slot      0       1       2       3
te        ####    ####    free                  its home was filled before the run
dit                T###   ####    ####          T  transient, while the home is filled
embeds                    ####    ####          spilled in 2, restored in 3
"""

from __future__ import annotations

from graphrun.planner.plan import Fill, Free, Restore, Slot, Spill
from graphrun.planner.problem import PhaseNumbers, Problem, Variant


class Hosted:
    """The host before the first slot of ``settled``; ``arranged`` is the problem before its variants were settled."""

    def __init__(self, settled: Problem, arranged: Problem) -> None:
        self._variants = {component.name: component.variants[0] for component in settled.components}
        self._values = {value.name: value.nbytes for value in settled.values}
        used = {use.component for phase in settled.phases for use in phase.uses}
        self._held = {name for name, variant in self._variants.items() if name in used and _there_before(variant)}
        self._spilled: set[str] = set()
        self._on_cpu = {phase.name: phase for phase in arranged.phases if self._computes_on_cpu(phase)}

    def slot(self, slot: Slot) -> tuple[int, int]:
        """Bytes in RAM and page-locked bytes at the slot's most, once its actions are taken."""
        actions = slot.actions
        self._held -= {action.component for action in actions if isinstance(action, Free)}
        filling = {action.component for action in actions if isinstance(action, Fill)}
        self._held |= filling
        self._spilled |= {action.value for action in actions if isinstance(action, Spill)}
        nbytes = sum(self._variants[name].host_bytes for name in self._held)
        nbytes += sum(self._variants[name].transient_bytes for name in filling)
        nbytes += sum(self._values[name] for name in self._spilled)
        if slot.phase in self._on_cpu:
            phase = self._on_cpu[slot.phase]
            nbytes += {"first": phase.first_bytes, "rest": phase.rest_bytes}.get(slot.part, 0)
        self._spilled -= {action.value for action in actions if isinstance(action, Restore)}
        return nbytes, sum(self._variants[name].locked_bytes for name in self._held)

    def spilled_bytes(self, slot: Slot) -> int:
        """Bytes of spilled values that are on the host alone throughout ``slot``, which is about to begin."""
        moving = {action.value for action in slot.actions if isinstance(action, Restore)}
        return sum(self._values[name] for name in self._spilled - moving)

    def _computes_on_cpu(self, phase: PhaseNumbers) -> bool:
        return bool(phase.uses) and all(self._variants[use.component].device == "cpu" for use in phase.uses)


def _there_before(variant: Variant) -> bool:
    return variant.home == "disk" or not variant.fill_seconds

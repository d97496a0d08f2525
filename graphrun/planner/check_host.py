"""The rules of the host: which homes are held, what is filled, freed, spilled and restored, and whether RAM suffices. Knows nothing
of blocks on the device but that they were copied from a home.

    phase         encode/0   encode/1   upscale/0   denoise/0   decode/0        value: encode -> denoise, decode
    lives                               x           x           x
    gap                                 ^ spill                                 restore in denoise/0, which consumes it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from graphrun.planner.check_choices import chosen_phases
from graphrun.planner.plan import Fill, Free, Plan, Restore, Slot, Spill, Violation
from graphrun.planner.problem import PhaseNumbers, Problem, ValueNumbers


class HostRules:
    """The host before the first slot. ``problem`` as it is given, ``settled`` as ``plan`` chose."""

    def __init__(self, problem: Problem, settled: Problem, plan: Plan) -> None:
        self.settled, self.variants = settled, {c.name: c.variants[0] for c in settled.components}
        self.values = {value.name: value for value in settled.values}
        self.counted = {use.component for phase in settled.phases for use in phase.uses}  # what nothing uses takes no RAM
        self.held = {name for name, v in self.variants.items() if v.home == "disk" or v.fill_seconds == ()}
        self.filled = set(self.held)
        self.spilled: dict[str, int] = {}  # value -> the phase in whose load slot it has to come back
        self.returning: set[str] = set()  # values that the slot restores
        self.gaps = {value.name: dict(_gaps(value, settled.phases)) for value in settled.values}
        self.numbers = {phase.name: number for number, phase in enumerate(settled.phases)}
        plain = {phase.name: phase for phase in chosen_phases(problem, plan)}
        self.on_cpu = {phase.name: plain[phase.name] for phase in settled.phases if phase.uses and not self._on_device(phase)}
        self.before = [0, 0]  # RAM and page-locked bytes of the slot before

    def away_bytes(self, slot: Slot) -> int:
        """Bytes of values that are not on the device in ``slot``, which is about to begin."""
        back = {action.value for action in slot.actions if isinstance(action, Restore)}
        return sum(self.values[name].nbytes for name in self.spilled if name not in back)

    def actions(self, index: int, slot: Slot, again: bool) -> Iterator[Violation]:
        """Rules of what the slot does on the host; holds from then on what it says."""
        for number, action in enumerate(slot.actions):
            broken = None
            if isinstance(action, Free):
                broken = self._free(action.component)
            elif isinstance(action, Fill):
                broken = self._fill(action.component, slot, again)
            elif isinstance(action, Spill | Restore):
                broken = self._crossing(action, slot)
            if broken:
                yield Violation(broken[0], index, number, broken[1])
        for name, back in self.spilled.items():
            if slot.part == "load" and back == self.numbers[slot.phase]:
                yield Violation("restore", index, -1, f"{name} is on the host, and {slot.phase} consumes it")

    def needed(self, index: int, copies: Mapping[str, int], phase: PhaseNumbers | None) -> Iterator[Violation]:
        """Whether homes are held: of what is copied (component -> action), and of what ``phase`` enters on the CPU."""
        entered = [use.component for use in phase.uses if self.variants[use.component].device == "cpu"] if phase else []
        for name, number in (*copies.items(), *((name, -1) for name in entered)):
            variant = self.variants[name]
            if name in self.held and (variant.home != "disk" or name not in entered):
                continue
            why = "not filled yet" if name not in self.filled else "freed already" if variant.home != "disk" else "on disk"
            yield Violation("held", index, number, f"the home of {name} is needed, and is {why}")

    def budgets(self, index: int, slot: Slot) -> Iterator[Violation]:
        """RAM and page-locked RAM; told where they rise, not again in every slot that follows. Ends the slot."""
        filling = [action.component for action in slot.actions if isinstance(action, Fill) and action.component in self.held]
        terms = {name: self.variants[name].host_bytes for name in self.variants if name in self.held & self.counted}
        locked = {name: terms[name] for name in terms if self.variants[name].home != "pageable"}
        terms |= {f"{name} (transient)": n for name in filling if (n := self.variants[name].transient_bytes)}
        terms |= {name: value.nbytes for name, value in self.values.items() if name in self.returning or name in self.spilled}
        if (phase := self.on_cpu.get(slot.phase)) and slot.part != "load":
            terms["activation"] = phase.first_bytes if slot.part == "first" else phase.rest_bytes
        pinned = self.settled.pinned_bytes
        for which, (rule, found, limit) in enumerate((("ram", terms, self.settled.ram_bytes), ("pinned", locked, pinned))):
            total = sum(found.values())
            if limit is not None and total > max(limit, self.before[which]):
                sums = " + ".join(f"{nbytes} {name}" for name, nbytes in found.items())
                kind = "on the host" if rule == "ram" else "page-locked"
                yield Violation(rule, index, -1, f"{sums} = {total} bytes {kind} > {limit}")
            self.before[which] = total
        self.returning = set()

    def _free(self, name: str) -> tuple[str, str] | None:
        if name not in self.variants:
            return "unknown", f"no component {name!r}"
        if self.settled.runs > 1:
            return "free", f"{name} is needed in the next run of the session"
        if name not in self.held:
            return "free", f"the home of {name} is not held"
        self.held.discard(name)
        return None

    def _fill(self, name: str, slot: Slot, again: bool) -> tuple[str, str] | None:
        if name not in self.variants:
            return "unknown", f"no component {name!r}"
        if again or slot.part == "end":
            return "fill", f"{name} is filled in the first run of a session, before its end"
        if name in self.filled:
            lies = "lies on disk" if self.variants[name].home == "disk" else "was filled before"
            return "fill", f"{name} {lies}"
        for names in (self.filled, self.held, self.counted):
            names.add(name)
        return None

    def _crossing(self, action: Spill | Restore, slot: Slot) -> tuple[str, str] | None:
        name, verb = action.value, "spill" if isinstance(action, Spill) else "restore"
        if name not in self.values:
            return "unknown", f"no value {name!r}"
        if slot.part != "load":
            return verb, f"{name} moves in a {slot.part} slot, and values move in load slots"
        here = self.numbers[slot.phase]
        if isinstance(action, Restore):
            if self.spilled.get(name) != here:
                return verb, f"{name} is not to come back here"
            del self.spilled[name]
            self.returning.add(name)
            return None
        if name in self.spilled or here not in self.gaps[name]:
            return verb, f"no gap between consumers of {name} begins at {slot.phase}"
        self.spilled[name] = self.gaps[name][here]
        return None

    def _on_device(self, phase: PhaseNumbers) -> bool:
        return any(self.variants[use.component].device != "cpu" for use in phase.uses)


def _gaps(value: ValueNumbers, phases: tuple[PhaseNumbers, ...]) -> Iterator[tuple[int, int]]:
    """The phases in whose load slots ``value`` may leave and has to come back: around each stretch in which it only waits."""
    first = None
    for number in range(max(0, value.first_phase), min(value.last_phase + 1, len(phases))):
        waits = phases[number].stage not in (*value.consumers, value.producer)
        if not waits and first is not None:
            if phases[first].uses and phases[number].uses:
                yield first, number
            first = None
        elif waits and first is None:
            first = number

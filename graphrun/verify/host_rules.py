"""Rules of `graphrun.verify.check` about backing stores, values and RAM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from graphrun.model.plan import Drop, Plan, Read, Restore, Slot, Spill, Violation
from graphrun.model.problem import PhaseNumbers, Problem, ValueNumbers
from graphrun.verify.choice_rules import chosen_phases, terms_text


class HostRules:
    """The host's state during a run, and its rules; ``applied``: with all choices."""

    def __init__(self, problem: Problem, applied: Problem, plan: Plan) -> None:
        self.applied, self.variants = applied, {c.name: c.variants[0] for c in applied.components}
        self.values = {value.name: value for value in applied.values}
        # unused components take no RAM
        self.used_components = {use.component for phase in applied.phases for use in phase.uses}
        self.available_stores = {
            name
            for name, v in self.variants.items()
            if v.backing_store == "disk" or v.read_seconds == ()
        }
        # on disk, in RAM before the run, or already read
        self.stores_not_to_read = set(self.available_stores)
        # a copy has the backing store of its original
        self.store_names = {c.name: c.copy_of or c.name for c in applied.components}
        # value -> phase in whose load slot the value must be restored
        self.spilled_values: dict[str, int] = {}
        self.restored_values: set[str] = set()  # in this slot
        self.spill_gaps = {
            value.name: dict(_spill_gaps(value, applied.phases)) for value in applied.values
        }
        self.numbers = {phase.name: number for number, phase in enumerate(applied.phases)}
        # The activation in ``applied`` is on the device, where a phase on the CPU has only tensors
        # of the pipeline's code. In RAM, it has the whole activation, as the dry run measured it.
        dry_run_phases = {phase.name: phase for phase in chosen_phases(problem, plan)}
        self.on_cpu = {
            phase.name: dry_run_phases[phase.name]
            for phase in applied.phases
            if phase.uses and not self._on_device(phase)
        }
        self.previous = [0, 0]  # RAM and page-locked bytes of the previous slot

    def spilled_bytes(self, slot: Slot) -> int:
        """Return the bytes that stay spilled throughout ``slot``. Call before `actions`."""
        restored_values = {action.value for action in slot.actions if isinstance(action, Restore)}
        return sum(
            self.values[name].nbytes for name in self.spilled_values if name not in restored_values
        )

    def actions(self, index: int, slot: Slot, is_further_run: bool) -> Iterator[Violation]:
        """Check the slot's host actions and apply them."""
        for number, action in enumerate(slot.actions):
            fault = None
            if isinstance(action, Drop):
                fault = self._drop(action.component)
            elif isinstance(action, Read):
                fault = self._read(action.component, slot, is_further_run)
            elif isinstance(action, Spill | Restore):
                fault = self._spill_or_restore(action, slot)
            if fault:
                yield Violation(fault[0], index, number, fault[1])
        for name, restore_phase in self.spilled_values.items():
            if slot.part == "load" and restore_phase == self.numbers[slot.phase]:
                yield Violation(
                    "restore",
                    index,
                    -1,
                    f"{name} is still on the host, but {slot.phase} consumes it",
                )

    def backing_stores(
        self, index: int, copies: Mapping[str, int], phase: PhaseNumbers | None
    ) -> Iterator[Violation]:
        """Check that every backing store needed in the slot is available.

        ``copies``: component -> first action that copies its blocks. ``phase``: components that it
        calls on the CPU need backing stores in RAM; None if the slot computes nothing.
        """
        cpu_components = (
            [use.component for use in phase.uses if self.variants[use.component].device == "cpu"]
            if phase
            else []
        )
        for name, number in (*copies.items(), *((name, -1) for name in cpu_components)):
            variant, store = self.variants[name], self.store_names[name]
            if store in self.available_stores and (
                variant.backing_store != "disk" or name not in cpu_components
            ):
                continue
            if store not in self.stores_not_to_read:
                state = "not read yet"
            else:
                state = "on disk" if variant.backing_store == "disk" else "dropped already"
            yield Violation(
                "host-missing",
                index,
                number,
                f"the backing store of {store} is needed, but it is {state}",
            )

    def budgets(self, index: int, slot: Slot) -> Iterator[Violation]:
        """Check RAM and page-locked RAM where the use rises. Call last for a slot."""
        reading = [
            action.component
            for action in slot.actions
            if isinstance(action, Read) and action.component in self.available_stores
        ]
        terms = {
            name: self.variants[name].host_bytes
            for name in self.variants
            if name in self.available_stores & self.used_components
        }
        pinned_terms = {
            name: nbytes for name in terms if (nbytes := self.variants[name].locked_bytes)
        }
        terms |= {
            f"{name} (transient)": n
            for name in reading
            if (n := self.variants[name].transient_bytes)
        }
        terms |= {
            name: value.nbytes
            for name, value in self.values.items()
            if name in self.restored_values or name in self.spilled_values
        }
        if (phase := self.on_cpu.get(slot.phase)) and slot.part != "load":
            terms["activation"] = phase.activation_bytes(slot.part)
        pinned = self.applied.pinned_bytes
        for position, (rule, bytes_by_name, limit) in enumerate(
            (("ram", terms, self.applied.ram_bytes), ("pinned", pinned_terms, pinned))
        ):
            total = sum(bytes_by_name.values())
            if limit is not None and total > max(limit, self.previous[position]):
                kind = "on the host" if rule == "ram" else "page-locked"
                yield Violation(
                    rule, index, -1, f"{terms_text(bytes_by_name)} = {total} bytes {kind} > {limit}"
                )
            self.previous[position] = total
        self.restored_values = set()

    def _drop(self, name: str) -> tuple[str, str] | None:
        if name not in self.variants:
            return "unknown", f"no component {name!r}"
        if self.applied.runs > 1:
            return "drop", f"the next run of the session needs the backing store of {name}"
        if name not in self.available_stores:
            return "drop", f"the backing store of {name} is not in RAM"
        self.available_stores.discard(name)
        return None

    def _read(self, name: str, slot: Slot, is_further_run: bool) -> tuple[str, str] | None:
        if name not in self.variants:
            return "unknown", f"no component {name!r}"
        if is_further_run or slot.part == "end":
            return "read", f"{name} is read in a further run, or in the end slot of the first run"
        if name in self.stores_not_to_read:
            reason = (
                "has its backing store on disk"
                if self.variants[name].backing_store == "disk"
                else "was read before"
            )
            return "read", f"{name} {reason}"
        # the store takes RAM even if no phase uses the component
        for names in (self.stores_not_to_read, self.available_stores, self.used_components):
            names.add(name)
        return None

    def _spill_or_restore(self, action: Spill | Restore, slot: Slot) -> tuple[str, str] | None:
        name, verb = action.value, "spill" if isinstance(action, Spill) else "restore"
        if name not in self.values:
            return "unknown", f"no value {name!r}"
        if self.applied.hardware.unified:
            return verb, f"{name} cannot leave the device, which shares its memory with the host"
        if slot.part != "load":
            return (
                verb,
                f"{name} is moved in a {slot.part} slot; values are moved in load slots only",
            )
        phase_number = self.numbers[slot.phase]
        if isinstance(action, Restore):
            if self.spilled_values.get(name) != phase_number:
                return verb, f"{name} must not be restored in this slot"
            del self.spilled_values[name]
            self.restored_values.add(name)
            return None
        if name in self.spilled_values or phase_number not in self.spill_gaps[name]:
            return verb, f"no gap between consumers of {name} begins at {slot.phase}"
        self.spilled_values[name] = self.spill_gaps[name][phase_number]
        return None

    def _on_device(self, phase: PhaseNumbers) -> bool:
        return any(self.variants[use.component].device != "cpu" for use in phase.uses)


def _spill_gaps(value: ValueNumbers, phases: tuple[PhaseNumbers, ...]) -> Iterator[tuple[int, int]]:
    """Yield (phase to spill, phase to restore) for each gap of ``value``."""
    first = None
    for number in range(max(0, value.first_phase), min(value.last_phase + 1, len(phases))):
        unused = phases[number].stage not in (*value.consumers, value.producer)
        if not unused and first is not None:
            if phases[first].uses and phases[number].uses:
                yield first, number
            first = None
        elif unused and first is None:
            first = number

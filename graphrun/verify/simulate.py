"""Simulate a plan: bytes and seconds of every slot and block. The only source of its peak and time.

Three channels run concurrently: copies, compute and the disk. Each processes one block after
another, and a barrier ends every slot. With `Hardware.serial_copies`, copies to the main device and
compute take turns. The peak of a slot is the highest sum of weights (resident or loaded by the
slot), ring buffers, activation, values and inputs.

Each secondary device has its own copy channel. The slot's loads are issued in one order for all
devices, but a copy waits only for earlier copies to the same device. All devices share the compute
channel, because one of them computes at a time; only a copy of a component
(`graphrun.model.copies`) computes while the component does. A call on a secondary device begins and
ends with transfers between the devices. If a component is split, each of its blocks on a secondary
device begins and ends with transfers.

`graphrun.verify.timeline` has the order of copies, compute and reads in a slot.

RAM (`HostMemory`), in bytes per slot:

    slot      0       1       2       3
    te        ####    ####    drop                  read before the run
    dit                T###   ####    ####          T  transient bytes while the store is read
    embeds                    ####    ####          spilled in 2, restored in 3
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter

from graphrun.errors import PlanError
from graphrun.model.blocks import named
from graphrun.model.choices import apply_choices, reorder
from graphrun.model.plan import (
    BlockNames,
    Drop,
    Evict,
    Load,
    Plan,
    Read,
    Restore,
    Slot,
    Spill,
    Stream,
)
from graphrun.model.problem import (
    ALLOCATION_BYTES,
    ComponentNumbers,
    PhaseNumbers,
    Problem,
    Use,
    Variant,
)
from graphrun.model.simulation import RepeatedSpans, Simulation, SlotReport, TimeSpan
from graphrun.model.splits import transfers
from graphrun.trace import Event
from graphrun.units import round_up
from graphrun.verify.timeline import (
    BlockOrigin,
    BlockSize,
    BlockWork,
    DiskChannel,
    Key,
    SlotCall,
    Timeline,
)


class HostMemory:
    """RAM in use, starting before the run.

    ``applied``: the problem with all choices applied; its activation is on the device.
    ``reordered``: the problem with only the order and options applied. It still has the whole
    activation of phases on the CPU, which is in RAM.
    """

    def __init__(self, applied: Problem, reordered: Problem) -> None:
        self._variants = {component.name: component.variants[0] for component in applied.components}
        self._values = {value.name: value.nbytes for value in applied.values}
        used_components = {use.component for phase in applied.phases for use in phase.uses}
        self._stores_in_ram = {
            name
            for name, variant in self._variants.items()
            if name in used_components and _exists_before_run(variant)
        }
        self._spilled_values: set[str] = set()
        self._on_cpu = {
            phase.name: phase for phase in reordered.phases if self._computes_on_cpu(phase)
        }

    def slot(self, slot: Slot) -> tuple[int, int]:
        """Apply the slot's actions. Return its peak bytes in RAM and its page-locked bytes."""
        actions = slot.actions
        self._stores_in_ram -= {action.component for action in actions if isinstance(action, Drop)}
        slot_reads = {action.component for action in actions if isinstance(action, Read)}
        self._stores_in_ram |= slot_reads
        self._spilled_values |= {action.value for action in actions if isinstance(action, Spill)}
        nbytes = sum(self._variants[name].host_bytes for name in self._stores_in_ram)
        nbytes += sum(self._variants[name].transient_bytes for name in slot_reads)
        nbytes += sum(self._values[name] for name in self._spilled_values)
        if slot.phase in self._on_cpu:
            phase = self._on_cpu[slot.phase]
            nbytes += phase.activation_bytes(slot.part)
        self._spilled_values -= {action.value for action in actions if isinstance(action, Restore)}
        return nbytes, sum(self._variants[name].locked_bytes for name in self._stores_in_ram)

    def spilled_bytes(self, slot: Slot) -> int:
        """Return the bytes of values that stay spilled throughout ``slot``. Call before `slot`."""
        restored_values = {action.value for action in slot.actions if isinstance(action, Restore)}
        return sum(self._values[name] for name in self._spilled_values - restored_values)

    def _computes_on_cpu(self, phase: PhaseNumbers) -> bool:
        return bool(phase.uses) and all(
            self._variants[use.component].device == "cpu" for use in phase.uses
        )


def _exists_before_run(variant: Variant) -> bool:
    """Whether the backing store needs no `Read` action: it is on disk, or in RAM before the run."""
    return variant.backing_store == "disk" or not variant.read_seconds


@functools.lru_cache(maxsize=8)
def simulate(problem: Problem, plan: Plan) -> Simulation:
    """Return the bytes and seconds of ``plan``, which should be valid by `check`.

    Raises PlanError if the plan cannot be executed: a needed block is unavailable or does not fit
    its ring buffer, a name is unknown, or a choice does not exist or is not allowed.
    """
    applied = apply_choices(problem, plan)
    state = _State(
        applied, HostMemory(applied, reorder(problem, plan.order, dict(plan.options))), plan.finds
    )
    first_slots = tuple(state.slot(index, slot) for index, slot in enumerate(plan.slots))
    seconds = state.now_seconds
    # one further run of a session
    further_slots = tuple(
        state.slot(index, slot)
        for index, slot in enumerate(plan.further_slots, start=len(plan.slots))
    )
    return Simulation(
        applied,
        first_slots,
        tuple(state.spans),
        seconds,
        further_slots,
        state.now_seconds - seconds,
    )


class _State:
    """Blocks on the device, host memory and time; `slot` advances them by one slot."""

    def __init__(
        self, problem: Problem, host: HostMemory, start_blocks: Iterable[tuple[str, BlockNames]]
    ) -> None:
        self.problem, self.host = problem, host
        self.components = {component.name: component for component in problem.components}
        self.phases = {phase.name: (index, phase) for index, phase in enumerate(problem.phases)}
        self.values = {value.name: value for value in problem.values}
        self.sizes: dict[Key, BlockSize] = {}
        for component in problem.components:
            variant = component.variants[0]
            read_seconds = (
                variant.disk_seconds or variant.read_seconds or (0.0,) * len(variant.block_bytes)
            )
            read_bytes = variant.read_bytes or variant.block_bytes
            for key in self._keys(component.name, None):
                k = key[1]
                self.sizes[key] = BlockSize(
                    variant.block_bytes[k], variant.load_seconds[k], read_seconds[k], read_bytes[k]
                )
        self.pageable = {
            component.name
            for component in problem.components
            if component.variants[0].backing_store == "pageable"
        }
        self.secondaries = {
            (component.name, k): secondary
            for component in problem.components
            for k, group in enumerate(component.groups)
            if (secondary := component.variants[0].secondary or group.secondary)
        }
        self.originals = {c.name: c.copy_of for c in problem.components if c.copy_of}
        self.resident = {key for name, blocks in start_blocks for key in self._keys(name, blocks)}
        self.now_seconds, self.touched_bytes = 0.0, self._device_bytes(self.resident)
        self.spans: list[tuple[TimeSpan | RepeatedSpans | Event, ...]] = []

    def slot(self, index: int, slot: Slot) -> SlotReport:
        start = self.now_seconds
        evicted, loads = self._moved(slot, Evict), self._moved(slot, Load)
        ring_buffers = {
            action.component: action.ring_buffer_bytes
            for action in slot.actions
            if isinstance(action, Stream)
        }
        self.resident -= set(evicted)
        calls, activation, values = self._works(index, slot, set(loads), ring_buffers)
        # calls that run the same blocks share their works: by id, so that each is read once
        work_lists = {id(call.works): call.works for call in calls}
        call_counts = Counter(id(call.works) for call in calls)
        used_keys = {work.key for works in work_lists.values() for work in works}
        prefetch_keys = (key for key in loads if key not in used_keys)
        weight_bytes = self._device_bytes(self.resident | set(loads))
        ring_buffer = sum(round_up(nbytes, ALLOCATION_BYTES) for nbytes in ring_buffers.values())
        peak_bytes = weight_bytes + ring_buffer + activation + values
        first_touch_seconds = self._first_touch_seconds(peak_bytes)
        self.now_seconds += first_touch_seconds
        value_copies, copies_from = self._value_copies(index, slot)
        streams = Counter[Key]()
        for number, works in work_lists.items():
            for work in works:
                if work.source == "stream":
                    streams[work.key] += call_counts[number]
        copies = streams + Counter(loads)
        disk = self._disk(slot, copies)
        transfers, hops = self._transfers(slot)
        line = Timeline(
            self.now_seconds,
            calls,
            prefetch_keys,
            self.sizes,
            ring_buffers,
            disk,
            copies_from,
            self.pageable,
            self.secondaries,
            transfers,
            hops,
            copied_components=self.originals.keys(),
            serial_copies=self.problem.hardware.serial_copies,
        )
        self.now_seconds = line.end_seconds
        host, pinned = self.host.slot(slot)
        report = SlotReport(
            phase=slot.phase,
            part=slot.part,
            peak_bytes=peak_bytes,
            resident_bytes=weight_bytes,
            ring_buffer_bytes=ring_buffer,
            activation_bytes=activation,
            values_bytes=values,
            streamed_bytes=sum(count * self.sizes[key].nbytes for key, count in streams.items()),
            loaded_bytes=sum(self.sizes[key].nbytes for key in loads),
            seconds=self.now_seconds - start,
            first_touch_seconds=first_touch_seconds,
            compute_seconds=self._compute_seconds(calls),
            restored_bytes=sum(event.nbytes for event in value_copies if event.kind == "restore"),
            host_bytes=host,
            pinned_bytes=pinned,
            disk_bytes_read=sum(self.sizes[span.key].read_bytes for span in disk.spans)
            + sum(
                repeated.times * sum(self.sizes[span.key].read_bytes for span in repeated.spans)
                for repeated in disk.repeated_spans
            )
            + sum(count * self.sizes[key].read_bytes for key, count in self._mapped(copies)),
            secondary_peaks=self._secondary_peaks(slot, self.resident | set(loads)),
        )
        self.spans.append(
            (
                *(TimeSpan("evict", key, 0, start, start) for key in evicted),
                *value_copies,
                *disk.spans,
                *disk.repeated_spans,
                *line.copies,
                *line.calls.values(),
            )
        )
        self.resident |= set(loads)
        return report

    def _compute_seconds(self, calls: Sequence[SlotCall]) -> float:
        """Return the seconds in which a device computes: of a copy, those beyond its original's."""
        seconds, works = Counter[str](), {id(call.works): call.works for call in calls}
        seconds_by_works = {
            key: sum(work.seconds for work in call_works) for key, call_works in works.items()
        }
        for call in calls:
            seconds[call.component] += seconds_by_works[id(call.works)]  # type: ignore[assignment]
        return sum(
            max(0.0, total - seconds[self.originals[name]]) if name in self.originals else total
            for name, total in seconds.items()
        )

    def _mapped(self, copies: Mapping[Key, int]) -> Iterator[tuple[Key, int]]:
        """Yield the ``copies`` that read their file, without a channel of their own."""
        for key, count in copies.items():
            if self.components[key[0]].variants[0].backing_store == "file":
                yield key, count

    def _first_touch_seconds(self, peak_bytes: int) -> float:
        """Return the seconds in which a slot with ``peak_bytes`` writes new memory."""
        new_bytes = max(0, peak_bytes - self.touched_bytes)
        self.touched_bytes += new_bytes
        return new_bytes * self.problem.hardware.first_touch_seconds

    def _value_copies(self, index: int, slot: Slot) -> tuple[list[Event], float]:
        """Return spills and restores, one after another, and their end."""
        copies = list[Event]()
        clock_seconds, hardware = self.now_seconds, self.problem.hardware
        for action in slot.actions:
            if isinstance(action, Spill | Restore):
                if action.value not in self.values:
                    raise PlanError(f"slot {index}: the problem has no value {action.value!r}")
                value, spill = self.values[action.value], isinstance(action, Spill)
                end = clock_seconds + value.copy_seconds(hardware, to_host=spill)
                kind = "spill" if spill else "restore"
                copies.append(
                    Event(kind, "", index, action.value, value.nbytes, clock_seconds, end)
                )
                clock_seconds = end
        return copies, clock_seconds

    def _disk(self, slot: Slot, copies: Mapping[Key, int]) -> DiskChannel:
        """Return the slot's disk channel: `Read` actions, and fetches for copies.

        ``copies``: how often each block is copied.
        """
        reads = [
            key
            for action in slot.actions
            if isinstance(action, Read)
            for key in self._keys(action.component, None)
        ]
        variants = {name: component.variants[0] for name, component in self.components.items()}
        bounce_bytes = {
            name: variant.host_bytes
            for name, variant in variants.items()
            if variant.backing_store == "disk"
        }
        fetch_bytes = sum(
            count * self.sizes[key].nbytes
            for key, count in copies.items()
            if key[0] in bounce_bytes
        )
        lock_end_seconds, clock_seconds = dict[str, float](), self.now_seconds
        for name in dict.fromkeys(key[0] for key in reads):
            if variants[name].locked_bytes:
                clock_seconds = lock_end_seconds[name] = (
                    clock_seconds
                    + variants[name].locked_bytes * self.problem.hardware.page_lock_seconds
                )
        return DiskChannel(
            self.now_seconds,
            reads,
            self.sizes,
            bounce_bytes,
            fetch_bytes,
            lock_end_seconds,
            self.originals,
        )

    def _works(
        self, index: int, slot: Slot, loads: set[Key], ring_buffers: dict[str, int]
    ) -> tuple[list[SlotCall], int, int]:
        """Return all calls in order, activation bytes, and the bytes of values and inputs."""
        if slot.part == "end":
            return [], 0, 0
        if slot.phase not in self.phases:
            raise PlanError(f"slot {index}: the problem has no phase {slot.phase!r}")
        number, phase = self.phases[slot.phase]
        sources = dict[Key, BlockOrigin]()
        for use in phase.uses:
            on_cpu = self._component(use.component).variants[0].device == "cpu"
            for key in self._keys(use.component, None):
                source: BlockOrigin = (
                    "resident" if key in self.resident else "load" if key in loads else "stream"
                )
                sources[key] = "host" if on_cpu else source
        calls = list(self._calls(phase, slot, sources))
        if unavailable_key := next(
            (
                work.key
                for call in calls
                if call.component not in ring_buffers
                for work in call.works
                if work.source == "stream"
            ),
            None,
        ):
            raise PlanError(
                f"slot {index}: {self._path(unavailable_key)} of {unavailable_key[0]} is needed, "
                "but neither resident, loaded nor streamed"
            )
        activation = phase.activation_bytes(slot.part)
        values = self.problem.value_bytes(number) - self.host.spilled_bytes(slot)
        return calls, activation, values + phase.input_bytes

    def _calls(
        self, phase: PhaseNumbers, slot: Slot, sources: Mapping[Key, BlockOrigin]
    ) -> Iterator[SlotCall]:
        """Yield the calls of ``slot``: the first of each component, then the second of each, ...

        A group with fewer calls than its component runs in the first calls of the component. Calls
        that run the same blocks share their works.
        """
        turns = [
            (name, list(uses), dict[tuple[bool, ...], list[BlockWork]]())
            for name, uses in groupby(phase.uses, key=attrgetter("component"))
        ]
        for call in range(slot.calls):
            for name, uses, shared_works in turns:
                runs = [[call < n for n in use.group_calls_in(slot.part)] for use in uses]
                pattern = tuple(chain.from_iterable(runs))
                if pattern not in shared_works:
                    shared_works[pattern] = [
                        self._block_work((name, k, i), seconds, sources[name, k, i])
                        for use, does_run in zip(uses, runs, strict=True)
                        for k, i, seconds in use.order or self._in_group_order(use)
                        if does_run[k]
                    ]
                if works := shared_works[pattern]:
                    yield SlotCall(name, call, works)

    def _block_work(self, key: Key, seconds: float, source: BlockOrigin) -> BlockWork:
        lost_seconds = self._component(key[0]).variants[0].lost_seconds
        if source == "stream" and lost_seconds:
            seconds += lost_seconds[key[1]]
        return BlockWork(key, seconds, source)

    def _in_group_order(self, use: Use) -> list[tuple[int, int, float]]:
        groups = self._component(use.component).groups
        return [
            (k, i, use.seconds[k])
            for k, group in enumerate(groups)
            for i in range(len(group.blocks))
        ]

    def _component(self, name: str) -> ComponentNumbers:
        if component := self.components.get(name):
            return component
        raise PlanError(f"the problem has no component {name!r}")

    def _keys(self, component: str, blocks: BlockNames) -> list[Key]:
        return [(component, k, i) for k, i in named(self._component(component), blocks)]

    def _moved(self, slot: Slot, kind: type[Load] | type[Evict]) -> list[Key]:
        """Return the blocks that the slot loads or evicts."""
        actions = (action for action in slot.actions if isinstance(action, kind))
        return [key for action in actions for key in self._keys(action.component, action.blocks)]

    def _device_bytes(self, keys: Iterable[Key], secondary: int = 0) -> int:
        """Return the bytes of ``keys`` that belong on device ``secondary``."""
        device_keys = (key for key in keys if self.secondaries.get(key[:2], 0) == secondary)
        return sum(round_up(self.sizes[key].nbytes, ALLOCATION_BYTES) for key in device_keys)

    def _secondary_peaks(self, slot: Slot, keys: Collection[Key]) -> tuple[int, ...]:
        compute_bytes = [0] * len(self.problem.secondaries)
        if slot.part in ("first", "steady"):
            compute_bytes = [
                part_bytes[slot.part == "steady"]
                for part_bytes in self.phases[slot.phase][1].secondary_bytes
            ]
        return tuple(
            self._device_bytes(keys, number) + nbytes
            for number, nbytes in enumerate(compute_bytes, 1)
        )

    def _transfers(
        self, slot: Slot
    ) -> tuple[dict[str, tuple[float, float, int]], dict[Key, tuple[float, float]]]:
        """Return the transfers of the slot, as `Timeline` takes them.

        Per component that computes on a secondary device as a whole, and per block there of split
        components.
        """
        call_transfers, hops = (
            dict[str, tuple[float, float, int]](),
            dict[Key, tuple[float, float]](),
        )
        for use in self.phases[slot.phase][1].uses if slot.part in ("first", "steady") else ():
            component = self._component(use.component)
            if secondary := component.variants[0].secondary:
                call_transfers[use.component] = (
                    *self.problem.transfer_seconds(secondary, use.transfer),
                    use.calls_in(slot.part),
                )
            for (k, i), transfer in transfers(use, component).items():
                hops[use.component, k, i] = self.problem.tensor_transfer_seconds(
                    transfer.secondary, transfer.to_bytes, transfer.back_bytes
                )
        return call_transfers, hops

    def _path(self, key: Key) -> str:
        return self.components[key[0]].groups[key[1]].blocks[key[2]]

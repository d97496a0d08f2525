"""Replay a whole plan through a model of the device's allocator.

A GPU must have room for the pages that its allocator reserves. `simulate` adds up bytes of tensors;
the replay also counts pages and fragmentation.

    slot     load           first                steady
             evict, trim    load, ring buffer    load, ring buffer    in the executor's order
             load blocks    calls                calls                `PhaseTrace`: allocations and
                                                                      releases of the dry run
    result   most bytes that the allocator reserves in the slot

Restored values are allocated before blocks, and blocks before ring buffers. Spilled values and ring
buffers are released at the slot's end. The allocator returns no memory to the device within a slot,
so the bytes reserved at its end are its peak.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain

from graphrun.errors import PlanError
from graphrun.limits import LIMITS, require
from graphrun.model.allocator import Caching, segment_bytes
from graphrun.model.blocks import named
from graphrun.model.hardware import LT_WORKSPACE_BYTES
from graphrun.model.phase_trace import CALL, CallTrace, Item, repeats_in
from graphrun.model.plan import BlockNames, Evict, Load, Plan, Restore, Slot, Spill, Stream
from graphrun.model.problem import Problem
from graphrun.model.splits import arguments_bytes

# of each small matrix in the two matrix products by which `CudaDevice.before_call` makes cuBLAS and
# cuBLASLt allocate their workspaces
MATRIX_BYTES = 512
POOLS = (True, False)  # pools of the allocator: small, large


def reserved_bytes(problem: Problem, plan: Plan, secondary: int = 0) -> tuple[int, ...]:
    """Return the most bytes that the allocator reserves in each slot of ``plan``.

    First the slots of the first run, then of a session's further run, which begins with the
    pages of the run before. ``problem``: with the plan's choices applied, and with a trace for each
    phase. ``secondary``: number of a device (0: the main device). A secondary device has the blocks
    and calls of its components and the arguments of each call, but no values.

    Raises KeyError for a plan that `check` refuses, and PlanError for more steps than
    ``replay_steps``.
    """
    return _replayed(problem, plan, secondary)[0]


def limit_bytes(problem: Problem, plan: Plan, secondary: int = 0) -> int:
    """Return the smallest limit, in bytes, with which PyTorch's allocator can serve ``plan``.

    Before the allocator maps pages, it compares the limit with the reserved bytes plus the segment
    that it would request from `cudaMalloc` without page mapping (`segment_bytes`), though it may
    map fewer bytes (`alloc_block`). The workspace of cuBLAS does not count. 0 where memory is not
    counted in pages. Arguments and errors as in `reserved_bytes`.
    """
    return _replayed(problem, plan, secondary)[1] if problem.counts_pages else 0


def _replayed(problem: Problem, plan: Plan, secondary: int) -> tuple[tuple[int, ...], int]:
    replay = _PlanReplay(problem, secondary)
    for component, blocks in plan.finds:
        replay.load(component, blocks)
    peaks = [replay.slot(slot) for slot in plan.slots]
    if plan.further_slots:
        replay.end_run()
        peaks += [replay.slot(slot) for slot in plan.further_slots]
    return tuple(peaks), replay.limit_bytes


class _PlanReplay:
    def __init__(self, problem: Problem, secondary: int) -> None:
        self._hardware = (
            problem.secondaries[secondary - 1].hardware if secondary else problem.hardware
        )
        self._problem, self._secondary = problem, secondary
        self._allocator = Caching(self._hardware.page_scale, self._hardware.capacity_bytes)
        # component -> its groups on this device
        self._device_groups = {
            component.name: {
                k
                for k, group in enumerate(component.groups)
                if (component.variants[0].secondary or group.secondary) == secondary
            }
            for component in problem.components
            if component.variants[0].device != "cpu"
        }
        self._device_groups = {
            name: groups for name, groups in self._device_groups.items() if groups
        }
        self._phases = {phase.name: (number, phase) for number, phase in enumerate(problem.phases)}
        self._components = {component.name: component for component in problem.components}
        self._storages = {value.name: value.storages for value in problem.values}
        self._nbytes = {value.name: value.nbytes for value in problem.values}
        # (component, group, index) -> the allocator's key
        self._blocks: dict[tuple[str, int, int], int] = {}
        self._live: dict[int, int] = {}  # key of the recording -> the allocator's key
        # the allocator's key -> bytes of the allocation
        self._bytes: dict[int, int] = {}
        # tensors of `CallTrace.persistent_keys`: (index in `PhaseTrace.calls`, key of the
        # recording) -> the allocator's key
        self._kept_keys: dict[tuple[int, int], int] = {}
        self._spilled_bytes: dict[str, int] = {}  # by value
        self._filler: int | None = None
        # id of a call's trace -> its events in each pool
        self._events_in: dict[int, tuple[tuple[Item, ...], ...]] = {}
        # (id of a call's events, state of the pool) -> key of each result -> its bytes and its
        # place in the pool. Only for calls of `_replay_temporary_call` that leave the pool in that
        # state.
        self._cached_results: dict[
            tuple[int, Hashable], dict[int, tuple[int, tuple[int, ...]]]
        ] = {}
        # the allocator's keys; empty until the first call after a trim
        self._workspaces: list[int] = []
        self.limit_bytes = 0
        self._last_key = self._steps = 0
        self._phase: str | None = None
        # component -> bytes of the arguments of a call on a secondary device
        self._arguments: dict[str, int] = {}

    def slot(self, slot: Slot) -> int:
        """Apply ``slot``, and return the most bytes reserved in it."""
        if slot.phase != self._phase:
            self._begin_phase(slot.phase)
        for action in slot.actions:
            for block in (
                self._blocks_on_device(action.component, action.blocks)
                if isinstance(action, Evict)
                else ()
            ):
                self._allocator.release(self._blocks.pop(block))
        if slot.part == "load":
            self._trim()
        for action in slot.actions:
            if isinstance(action, Restore) and not self._secondary:
                # one allocation, under the first of the value's keys in the recording
                key = self._allocate(self._spilled_bytes.pop(action.value))
                self._live |= dict.fromkeys(self._storages[action.value][:1], key)
        for action in slot.actions:
            if isinstance(action, Load):
                self.load(action.component, action.blocks)
        streams = (
            action for action in slot.actions if isinstance(action, Stream) and not self._secondary
        )
        ring_buffers = [self._allocate(action.ring_buffer_bytes) for action in streams]
        if slot.part in ("first", "steady"):
            trace = self._phases[slot.phase][1].trace
            self._items(trace.first if slot.part == "first" else trace.steady, trace.calls)
        for ring_buffer in ring_buffers:
            self._release(ring_buffer)
        for action in slot.actions:
            if isinstance(action, Spill) and not self._secondary:
                self._spilled_bytes[action.value] = self._nbytes[action.value]
                for key in self._storages[action.value]:
                    if key in self._live:
                        self._release(self._live.pop(key))
        return self._allocator.used_bytes - sum(self._bytes[key] for key in self._workspaces)

    def load(self, component: str, blocks: BlockNames) -> None:
        """Allocate those of ``blocks`` that belong on this device."""
        sizes = self._components[component].variants[0].block_bytes
        self._blocks |= {
            block: self._allocate(sizes[block[1]])
            for block in self._blocks_on_device(component, blocks)
        }

    def end_run(self) -> None:
        """Release all tensors except weights, and return empty pages."""
        self._begin_phase(None)
        for key in self._live.values():
            self._release(key)
        self._live.clear()
        self._spilled_bytes.clear()
        self._trim()

    def _begin_phase(self, name: str | None) -> None:
        """Release the tensors that calls of the previous phase kept, and begin phase ``name``.

        The recording may have no inputs of the phase, because the stages before it did not run. One
        tensor of the missing size then stands for all of them.
        """
        self._phase = name
        uses = self._phases[name][1].uses if name in self._phases else ()
        arguments = {
            use.component: arguments_bytes(use, self._components[use.component]) for use in uses
        }
        self._arguments = {
            component: nbytes.get(self._secondary, 0) for component, nbytes in arguments.items()
        }
        for key in (*self._kept_keys.values(), *(() if self._filler is None else (self._filler,))):
            self._release(key)
        self._kept_keys.clear()
        self._filler = None
        if name in self._phases:
            number, phase = self._phases[name]
            trace = phase.trace
            self._items(trace.prelude, trace.calls)
            expected = (
                self._problem.value_bytes(number)
                - sum(self._spilled_bytes.values())
                + phase.input_bytes
            )
            missing_bytes = expected - sum(self._bytes[key] for key in self._live.values())
            self._filler = (
                self._allocate(missing_bytes) if missing_bytes > 0 and not self._secondary else None
            )

    def _items(self, items: Iterable[Item], calls: tuple[CallTrace, ...]) -> None:
        """Replay ``items`` of a phase.

        The recording has each result of a call twice: in the call's trace (`CallTrace.results`),
        and as an item after the call. They are one tensor, so the item takes over the memory.
        """
        # bytes -> results of the last call whose memory no item has yet
        results = dict[int, deque[int]]()
        for key, nbytes in items:
            if nbytes > 0 and results.get(nbytes):
                self._live[key] = results[nbytes].popleft()
                continue
            if nbytes <= 0:
                for result in chain(*results.values()):
                    self._release(result)
                results = {}
            if nbytes == CALL:
                for result in self._call(key, calls[key]):
                    results.setdefault(self._bytes[result], deque()).append(result)
            elif self._secondary:
                continue
            elif nbytes:
                self._live[key] = self._allocate(nbytes)
            elif key in self._live:
                self._release(self._live.pop(key))
        for result in chain(*results.values()):
            self._release(result)

    def _call(self, number: int, call: CallTrace) -> list[int]:
        """Replay a call; return the allocator's keys of its results (secondary device: none)."""
        if not self._workspaces:
            self._allocate_workspaces()
        if call.component not in self._device_groups:
            return []
        arguments = (
            self._allocate(nbytes)
            if self._secondary and (nbytes := self._arguments[call.component])
            else None
        )
        results = self._events(number, call)
        if arguments is not None:
            self._release(arguments)
        for key in results if self._secondary else ():
            self._release(key)
        return [] if self._secondary else results

    def _events(self, number: int, call: CallTrace) -> list[int]:
        if call.persistent_keys:
            return self._replay_persistent_call(number, call)
        if id(call) not in self._events_in:
            sizes = {key: nbytes for key, nbytes in call.events if nbytes}
            small = {key for key, nbytes in sizes.items() if self._allocator.is_small(nbytes)}
            self._events_in[id(call)] = tuple(
                tuple(item for item in call.events if (item[0] in small) is is_small)
                for is_small in POOLS
            )
        results = dict[int, int]()
        for is_small, events in zip(POOLS, self._events_in[id(call)], strict=True):
            results |= self._replay_temporary_call(events, is_small, call.results)
        return [results[key] for key in call.results]

    def _replay_persistent_call(self, number: int, call: CallTrace) -> list[int]:
        """Replay a call that keeps tensors; return the allocator's keys of its results."""
        allocations = {
            key: allocator_key
            for (call_number, key), allocator_key in self._kept_keys.items()
            if call_number == number
        }
        keys_before, lasting_keys = frozenset(allocations), {*call.persistent_keys, *call.results}
        for key, nbytes in call.events:
            if key in keys_before:
                continue
            if nbytes:
                allocations[key] = self._allocate(nbytes)
            elif key not in lasting_keys:
                self._release(allocations.pop(key))
        results = [allocations.pop(key) for key in call.results]
        self._kept_keys |= {
            (number, key): allocator_key for key, allocator_key in allocations.items()
        }
        return results

    def _replay_temporary_call(
        self, events: tuple[Item, ...], small: bool, results: tuple[int, ...]
    ) -> dict[int, int]:
        """Replay the events in one pool of a call that keeps no tensor after it returns.

        Return the allocator's keys of its ``results`` there. If an earlier call with the same
        events found and left the pool in this state, only the results are placed.
        """
        # `state` goes over all free ranges: about a step per live tensor other than weights
        self._count(1 + len(self._bytes) - len(self._blocks))
        state_key = id(events), self._allocator.state(small)
        if (placements := self._cached_results.get(state_key)) is None:
            live = self._replayed_pool_events(events, small, results)
            placements = {
                key: (self._bytes[allocator_key], self._allocator.place(allocator_key))
                for key, allocator_key in live.items()
            }
            for allocator_key in live.values():
                self._release(allocator_key)
            if state_key[1] == self._allocator.state(small):
                self._cached_results[state_key] = placements
        result_keys = dict[int, int]()
        for key, (nbytes, place) in placements.items():
            self._last_key += 1
            result_keys[key] = self._last_key
            self._bytes[self._last_key] = nbytes
            self._allocator.allocate_at(self._last_key, small, place)
        return result_keys

    def _replayed_pool_events(
        self, events: tuple[Item, ...], small: bool, results: tuple[int, ...]
    ) -> dict[int, int]:
        """Replay ``events`` except releases of ``results``.

        Repetitions are replayed until the pool and its tensors are as at the start of an earlier
        repetition. From there on they would only repeat, and are skipped.
        """
        # number of each event -> number of the event that allocated its tensor
        allocation_numbers, repeats = repeats_in(events)
        lasting_keys = {*results}
        live = dict[int, int]()  # number of the event that allocated -> the allocator's key

        def replay(begin: int, end: int) -> None:
            for number in range(begin, end):
                key, nbytes = events[number]
                if nbytes:
                    live[number] = self._allocate(nbytes)
                elif key not in lasting_keys:
                    self._release(live.pop(allocation_numbers[number]))

        position = 0
        for repeat in repeats:
            replay(position, repeat.begin)
            position = repeat.begin
            positions = dict[Hashable, int]()
            while position < repeat.end:
                offset = position - repeat.begin
                self._count(len(live))
                places = {
                    (
                        event_number >= repeat.begin,
                        event_number - offset * (event_number >= repeat.begin),
                        self._allocator.place(live[event_number]),
                    )
                    for event_number in live
                }
                cycle = position - positions.setdefault(
                    (self._allocator.state(small), frozenset(places)), position
                )
                if cycle and (skipped := (repeat.end - position) // cycle * cycle):
                    live = {
                        event_number + skipped * (event_number >= repeat.begin): key
                        for event_number, key in live.items()
                    }
                    position += skipped
                else:
                    replay(position, position + repeat.period)
                    position += repeat.period
        replay(position, len(events))
        return {events[number][0]: key for number, key in live.items()}

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > LIMITS.replay_steps:
            text = f"the replay of the plan's traces was ended after {self._steps:,} steps"
            require("replay_steps", 2 * self._steps, text, kind=PlanError)

    def _allocate(self, nbytes: int) -> int:
        self._count(1)
        self._last_key += 1
        self._bytes[self._last_key] = nbytes
        bytes_before = self._allocator.used_bytes
        self._allocator.allocate(self._last_key, nbytes)
        if self._allocator.used_bytes > bytes_before:
            limit = bytes_before + segment_bytes(nbytes) - self._hardware.workspace_bytes
            self.limit_bytes = max(self.limit_bytes, limit)
        return self._last_key

    def _allocate_workspaces(self) -> None:
        """Replay the matrix products of `CudaDevice.before_call`; then release their matrices."""
        total_bytes = self._hardware.workspace_bytes
        if not total_bytes:
            return
        matrix = self._allocate(MATRIX_BYTES)
        for nbytes in (total_bytes - LT_WORKSPACE_BYTES, LT_WORKSPACE_BYTES):
            result = self._allocate(MATRIX_BYTES)
            self._workspaces.append(self._allocate(nbytes))
            self._release(result)
        self._release(matrix)

    def _trim(self) -> None:
        """Return empty pages and release the workspaces, like `CudaDevice.release_cached`."""
        for key in self._workspaces:
            self._release(key)
        self._workspaces.clear()
        self._allocator.trim()

    def _release(self, key: int) -> None:
        del self._bytes[key]
        self._allocator.release(key)

    def _blocks_on_device(
        self, component: str, blocks: BlockNames
    ) -> Iterator[tuple[str, int, int]]:
        device_groups = self._device_groups.get(component, set())
        numbers = named(self._components[component], blocks).in_groups(device_groups)
        return ((component, k, i) for k, i in numbers)

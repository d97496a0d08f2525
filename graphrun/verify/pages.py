"""Replays a whole plan through a model of the device's allocator: weights, ring buffers, values and
activations together.

A card has to hold the pages that its allocator reserved. `simulate` adds bytes of tensors; here
pages and fragmentation count too.

    slot     load              first             steady
             evict, trim       load, ring buffer        load, ring buffer          in the executor's
             order load blocks       calls             calls               `PhaseTrace`: allocations
             and releases of the dry run
    result   most bytes that the allocator has reserved in the slot

Restored values are allocated before blocks, blocks before ring buffers. Spilled values and ring
buffers are released at the slot's end. Nothing is returned to the device within a slot, so what is
reserved at its end is its peak.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain

from graphrun.errors import PlanError
from graphrun.limits import LIMITS, require
from graphrun.model.allocator import Caching, segment_bytes
from graphrun.model.phase_trace import CALL, CallTrace, Item, repeats_in
from graphrun.model.plan import Blocks, Evict, Load, Plan, Restore, Slot, Spill, Stream
from graphrun.model.problem import Problem
from graphrun.model.splits import arguments_bytes

POOLS = (True, False)  # of the allocator: the small one, the large one


def reserved_bytes(problem: Problem, plan: Plan, secondary: int = 0) -> tuple[int, ...]:
    """Most bytes reserved in each slot of ``plan``: those of the first run, then, in a session,
    those of a further run. On the device, or on ``secondary``, a number: that has its components'
    blocks and calls, with the arguments of each call, and no values.

    ``problem``: with the plan's choices applied; every phase has its `PhaseNumbers.trace`. A
    further run begins with the pages that the run before it left. Raises KeyError for a plan that
    `check` refuses, and PlanError for more steps than the limit ``replay_steps``.
    """
    return _replayed(problem, plan, secondary)[0]


def limit_bytes(problem: Problem, plan: Plan, secondary: int = 0) -> int:
    """Return the least limit, in bytes, under which PyTorch's allocator refuses nothing of
    ``plan``.

    To map pages for a request, it compares the limit with the reserved bytes and those of a native
    segment for the request, though fewer may be mapped (`alloc_block`). cuBLAS's workspace does not
    count. 0 where memory is not counted in pages. Arguments and errors as for `reserved_bytes`.
    """
    return _replayed(problem, plan, secondary)[1] if problem.counts_pages else 0


def _replayed(problem: Problem, plan: Plan, secondary: int) -> tuple[tuple[int, ...], int]:
    """`reserved_bytes` and `limit_bytes`."""
    replay = _Replay(problem, secondary)
    for component, blocks in plan.finds:
        replay.load(component, blocks)
    found = [replay.slot(slot) for slot in plan.slots]
    if plan.again:
        replay.end_run()
        found += [replay.slot(slot) for slot in plan.again]
    return tuple(found), replay.limit_bytes


class _Replay:
    """The allocator, and what is live in it."""

    def __init__(self, problem: Problem, secondary: int) -> None:
        self._hardware = (
            problem.secondaries[secondary - 1].hardware if secondary else problem.hardware
        )
        self._problem, self._secondary = problem, secondary
        self._allocator = Caching(self._hardware.page_scale, self._hardware.capacity_bytes)
        self._own = {  # component -> its groups on this device
            of.name: {
                k
                for k, group in enumerate(of.groups)
                if (of.variants[0].secondary or group.secondary) == secondary
            }
            for of in problem.components
            if of.variants[0].device != "cpu"
        }
        self._own = {name: groups for name, groups in self._own.items() if groups}
        self._phases = {phase.name: (number, phase) for number, phase in enumerate(problem.phases)}
        self._components = {component.name: component for component in problem.components}
        self._storages = {value.name: value.storages for value in problem.values}
        self._nbytes = {value.name: value.nbytes for value in problem.values}
        self._blocks: dict[
            tuple[str, int, int], int
        ] = {}  # component, group, index -> the allocator's key
        self._live: dict[int, int] = {}  # key of the recording -> the allocator's key
        self._bytes: dict[
            int, int
        ] = {}  # the allocator's key -> bytes, of tensors that are no weights
        self._kept: dict[tuple[int, int], int] = {}  # (kind of call, key) -> the allocator's key
        self._spilled: dict[str, int] = {}  # value -> bytes
        self._filler: int | None = None
        self._events_in: dict[
            int, tuple[tuple[Item, ...], ...]
        ] = {}  # id of a call's trace -> its events in each pool
        self._restored: dict[
            tuple[int, Hashable], dict[int, tuple[int, tuple[int, ...]]]
        ] = {}  # (id of events, state of a pool
        # that they leave as it was) -> key of each result -> its bytes, and its place
        self._workspace: int | None = None  # the allocator's key of cuBLAS's workspace
        self._workspace_bytes = 0  # of it, if a call has allocated it since the last trim
        self.limit_bytes = 0
        self._last_key = self._steps = 0
        self._phase: str | None = None
        self._arguments: dict[
            str, int
        ] = {}  # bytes that a call on a secondary device gets, by component

    def slot(self, slot: Slot) -> int:
        """Applies ``slot``; returns the most bytes reserved in it."""
        if slot.phase != self._phase:
            self._begin_phase(slot.phase)
        for action in slot.actions:
            for block in (
                self._named(action.component, action.blocks) if isinstance(action, Evict) else ()
            ):
                self._allocator.release(self._blocks.pop(block))
        if slot.part == "load":
            self._trim()
        for action in slot.actions:
            if isinstance(action, Restore) and not self._secondary:
                key = self._allocate(self._spilled.pop(action.value))
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
                self._spilled[action.value] = self._nbytes[action.value]
                for key in self._storages[action.value]:
                    if key in self._live:
                        self._release(self._live.pop(key))
        self._measure_workspace()
        return self._allocator.used_bytes - self._workspace_bytes

    def load(self, component: str, blocks: Blocks) -> None:
        """Allocates those of ``blocks`` that are for this device."""
        sizes = self._components[component].variants[0].block_bytes
        self._blocks |= {
            block: self._allocate(sizes[block[1]]) for block in self._named(component, blocks)
        }

    def end_run(self) -> None:
        """All tensors that are no weights are gone, and empty pages are returned."""
        self._begin_phase(None)
        for key in self._live.values():
            self._release(key)
        self._live.clear()
        self._spilled.clear()
        self._trim()

    def _begin_phase(self, name: str | None) -> None:
        """Releases what the phase before kept. Allocates what ``name`` finds at its entry and the
        recording does not have, because stages before it are not run: one tensor of that size
        stands for all."""
        self._phase = name
        uses = self._phases[name][1].uses if name in self._phases else ()
        arguments = {
            use.component: arguments_bytes(use, self._components[use.component]) for use in uses
        }
        self._arguments = {of: nbytes.get(self._secondary, 0) for of, nbytes in arguments.items()}
        for key in (*self._kept.values(), *(() if self._filler is None else (self._filler,))):
            self._release(key)
        self._kept.clear()
        self._filler = None
        if name in self._phases:
            number, phase = self._phases[name]
            trace = phase.trace
            self._items(trace.prelude, trace.calls)
            expected = (
                self._problem.value_bytes(number) - sum(self._spilled.values()) + phase.input_bytes
            )
            missing = expected - sum(self._bytes[key] for key in self._live.values())
            self._filler = self._allocate(missing) if missing > 0 and not self._secondary else None

    def _items(self, items: Iterable[Item], calls: tuple[CallTrace, ...]) -> None:
        results = dict[
            int, deque[int]
        ]()  # of the last call, that nothing has taken over yet, by their bytes
        for key, nbytes in items:
            if nbytes > 0 and results.get(nbytes):
                self._live[key] = results[nbytes].popleft()
                continue
            if nbytes <= 0:
                for of in chain(*results.values()):
                    self._release(of)
                results = {}
            if nbytes == CALL:
                for of in self._call(key, calls[key]):
                    results.setdefault(self._bytes[of], deque()).append(of)
            elif self._secondary:
                continue
            elif nbytes:
                self._live[key] = self._allocate(nbytes)
            elif key in self._live:
                self._release(self._live.pop(key))
        for of in chain(*results.values()):
            self._release(of)

    def _call(self, number: int, call: CallTrace) -> list[int]:
        """The allocator's keys of the call's results; of one on a secondary device, they are
        gone."""
        if call.component not in self._own:
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
        if self._workspace is None and (nbytes := self._hardware.workspace_bytes):
            self._workspace = self._allocate(nbytes)
        if call.kept:
            return self._kept_events(number, call)
        if id(call) not in self._events_in:
            sizes = {key: nbytes for key, nbytes in call.events if nbytes}
            small = {key for key, nbytes in sizes.items() if self._allocator.is_small(nbytes)}
            self._events_in[id(call)] = tuple(
                tuple(item for item in call.events if (item[0] in small) is of) for of in POOLS
            )
        results = dict[int, int]()
        for of, events in zip(POOLS, self._events_in[id(call)], strict=True):
            results |= self._released_events(events, of, call.results)
        return [results[key] for key in call.results]

    def _kept_events(self, number: int, call: CallTrace) -> list[int]:
        own = {key: kept for (of, key), kept in self._kept.items() if of == number}
        already, staying = frozenset(own), {*call.kept, *call.results}
        for key, nbytes in call.events:
            if key in already:
                continue
            if nbytes:
                own[key] = self._allocate(nbytes)
            elif key not in staying:
                self._release(own.pop(key))
        results = [own.pop(key) for key in call.results]
        self._kept |= {(number, key): kept for key, kept in own.items()}
        return results

    def _released_events(
        self, events: tuple[Item, ...], small: bool, results: tuple[int, ...]
    ) -> dict[int, int]:
        """Events in one pool of a call that keeps nothing, but for those of its ``results`` that
        lie there: the allocator's keys of these are returned. Where the pool was the same before an
        earlier call, and as before behind it, only its results are placed."""
        self._count(1 + len(self._bytes) - len(self._blocks))  # ranges that the state may have
        before = id(events), self._allocator.state(small)
        if (found := self._restored.get(before)) is None:
            live = self._replayed_events(events, small, results)
            found = {
                key: (self._bytes[own], self._allocator.place(own)) for key, own in live.items()
            }
            for own in live.values():
                self._release(own)
            if before[1] == self._allocator.state(small):
                self._restored[before] = found
        placed = dict[int, int]()
        for key, (nbytes, place) in found.items():
            self._last_key += 1
            placed[key] = self._last_key
            self._bytes[self._last_key] = nbytes
            self._allocator.allocate_at(self._last_key, small, place)
        return placed

    def _replayed_events(
        self, events: tuple[Item, ...], small: bool, results: tuple[int, ...]
    ) -> dict[int, int]:
        """Replays ``events`` but for releases of ``results``. Of what repeats, only as much is
        replayed as it takes until the pool and the tensors in it are again as before an earlier
        repetition: the others do the same."""
        numbers, repeats = repeats_in(events)
        staying = {*results}
        live = dict[int, int]()  # number of the event that allocated -> the allocator's key

        def replay(begin: int, end: int) -> None:
            for number in range(begin, end):
                key, nbytes = events[number]
                if nbytes:
                    live[number] = self._allocate(nbytes)
                elif key not in staying:
                    self._release(live.pop(numbers[number]))

        done = 0
        for repeat in repeats:
            replay(done, repeat.begin)
            done = repeat.begin
            seen = dict[Hashable, int]()
            while done < repeat.end:
                begun = done - repeat.begin
                self._count(len(live))
                places = {
                    (
                        of >= repeat.begin,
                        of - begun * (of >= repeat.begin),
                        self._allocator.place(live[of]),
                    )
                    for of in live
                }
                since = done - seen.setdefault(
                    (self._allocator.state(small), frozenset(places)), done
                )
                if since and (skipped := (repeat.end - done) // since * since):
                    live = {of + skipped * (of >= repeat.begin): key for of, key in live.items()}
                    done += skipped
                else:
                    replay(done, done + repeat.period)
                    done += repeat.period
        replay(done, len(events))
        return {events[number][0]: key for number, key in live.items()}

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > LIMITS.replay_steps:
            what = f"the replay of the plan's traces was ended after {self._steps:,} steps"
            require("replay_steps", 2 * self._steps, what, kind=PlanError)

    def _allocate(self, nbytes: int) -> int:
        self._count(1)
        self._last_key += 1
        self._bytes[self._last_key] = nbytes
        before = self._allocator.used_bytes
        self._allocator.allocate(self._last_key, nbytes)
        if self._allocator.used_bytes > before:
            limit = before + segment_bytes(nbytes) - self._hardware.workspace_bytes
            self.limit_bytes = max(self.limit_bytes, limit)
        return self._last_key

    def _measure_workspace(self) -> None:
        """As `CudaDevice.peak_bytes`: the workspace is released where a slot is the first with it
        since the last trim, and allocated again at its next use."""
        if self._workspace is not None and not self._workspace_bytes:
            self._workspace_bytes = self._bytes[self._workspace]
            self._release(self._workspace)
            self._workspace = None

    def _trim(self) -> None:
        """As `Device.release_cached`: returns empty pages; cuBLAS's workspace is released too."""
        if self._workspace is not None:
            self._release(self._workspace)
            self._workspace = None
        self._workspace_bytes = 0
        self._allocator.trim()

    def _release(self, key: int) -> None:
        del self._bytes[key]
        self._allocator.release(key)

    def _named(self, component: str, blocks: Blocks) -> Iterator[tuple[str, int, int]]:
        groups = self._components[component].groups
        number_of = {group.name: k for k, group in enumerate(groups)}
        named = (
            [(group.name, range(len(group.blocks))) for group in groups]
            if blocks is None
            else blocks
        )
        own = self._own.get(component, set())
        return (
            (component, number_of[name], i)
            for name, indices in named
            for i in indices
            if number_of[name] in own
        )

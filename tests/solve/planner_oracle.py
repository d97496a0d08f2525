"""Brute force: enumerates every stage order, option, variant and spill; blocks, reads and drops by
dynamic programming.

Written from the meaning of plans, without any of the planner's code. For one such choice, the state
at the end of a slot is how many blocks of every group are on the device, and the state of every
backing store. Blocks may be evicted between slots, so the least cost of a state is at most that of
any larger one. A cost is seconds and then bytes moved in one integer, so that ties are exact: all
seconds have to be multiples of 1 / SCALE.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

import numpy as np

from graphrun.model.problem import PhaseNumbers, Problem, Use, ValueNumbers, Variant

SCALE = 16
SECONDS, NEVER = 2**34, 2**61
UNREAD, HELD, DROPPED = range(3)
BackingStores = tuple[int, ...]  # the state of each used component's backing store


def up(nbytes: int) -> int:
    return (nbytes + 511) // 512 * 512


def transfer_of(use: Use, secondary_blocks: set[int]) -> tuple[int, int, int]:
    """Bytes that cross in a call to the device with the blocks ``there``, and back; and the most
    that are there for one of them, of what it gets, and what was given to the call and an earlier
    block got."""
    to_bytes = sum(
        tensor.nbytes
        for tensor in use.live_tensors
        if tensor.maker not in secondary_blocks and secondary_blocks & {*tensor.users}
    )
    back_bytes = sum(
        tensor.nbytes
        for tensor in use.live_tensors
        if tensor.maker in secondary_blocks and {*tensor.users} - secondary_blocks
    )
    held_bytes = (
        sum(
            up(tensor.nbytes)
            for tensor in use.live_tensors
            if n in tensor.users or (tensor.is_input and any(0 < user < n for user in tensor.users))
        )
        for n in secondary_blocks
    )
    return to_bytes, back_bytes, max(held_bytes)


class Choice:
    """One stage order, one option per stage, one variant per component."""

    def __init__(
        self,
        problem: Problem,
        order: tuple[str, ...],
        phases: list[PhaseNumbers],
        variants: list[Variant],
    ) -> None:
        self.problem, self.phases = problem, phases
        self.names = [component.name for component in problem.components]
        self.variants = dict(zip(self.names, variants, strict=True))
        self.groups = {component.name: component.groups for component in problem.components}
        self.used_names = [
            name
            for name in self.names
            if any(use.component == name for phase in phases for use in phase.uses)
        ]
        self.cells = [
            (c.name, k, len(group.blocks), group.streamable and v.streamable and v.movable)
            for c, v in zip(problem.components, variants, strict=True)
            for k, group in enumerate(c.groups)
            if v.device != "cpu"
        ]
        self.shape = tuple(count + 1 for _, _, count, _ in self.cells)
        self.slots = [
            (number, part) for number, phase in enumerate(phases) for part in self.parts(phase)
        ]
        self.lives = [
            [n for n, phase in enumerate(phases) if self.alive(value, order, phase.stage)]
            for value in problem.values
        ]
        self.spill_gaps = [
            (v, *gap)
            for v, value in enumerate(problem.values)
            for gap in self.spill_gaps_of(value, self.lives[v])
        ]
        self.pairs()
        self.tables = [self.table(t) for t in range(len(self.slots))]

    @staticmethod
    def parts(phase: PhaseNumbers) -> list[str]:
        return (
            ["load"] * bool(phase.uses)
            + ["first"]
            + ["steady"] * (max((use.calls for use in phase.uses), default=0) > 1)
        )

    @staticmethod
    def alive(value: ValueNumbers, order: tuple[str, ...], stage: str) -> bool:
        is_produced = value.producer not in order or order.index(stage) > order.index(
            value.producer
        )
        return is_produced and any(
            order.index(stage) <= order.index(consumer)
            for consumer in value.consumers
            if consumer in order
        )

    def spill_gaps_of(self, value: ValueNumbers, lives: list[int]) -> Iterator[tuple[int, int]]:
        """(first phase, phase after) of each series of phases in which the value is not read, where
        both have a load slot."""
        unread = [n for n in lives if self.phases[n].stage not in value.consumers]
        for first in unread:
            if first - 1 not in unread:
                reader = next(n for n in lives if n > first and n not in unread)
                if self.phases[first].uses and self.phases[reader].uses:
                    yield first, reader

    def pairs(self) -> None:
        """All pairs of states at the start and end of a slot (``here`` <= ``there``), sorted by the
        second."""
        pairs_by_cell = [[(h, t) for t in range(nb) for h in range(t + 1)] for nb in self.shape]
        state_pairs = list(product(*pairs_by_cell))
        grid = np.array(state_pairs, dtype=np.int64).reshape(len(state_pairs), len(self.cells), 2)
        stride = np.array(
            [int(np.prod(self.shape[j + 1 :])) for j in range(len(self.cells))], dtype=np.int64
        )
        order = np.argsort(grid[:, :, 1] @ stride, kind="stable")
        self.start_counts, self.end_counts = grid[order, :, 0], grid[order, :, 1]
        self.begin, self.end = self.start_counts @ stride, self.end_counts @ stride
        self.states = int(np.prod(self.shape))

    def calls(self, t: int, name: str, k: int) -> tuple[int, float]:
        """Calls of a block group in slot ``t``, and seconds of one block in one of them."""
        number, part = self.slots[t]
        use = self.use(number, name)
        if use is None:
            return 0, 0.0
        variant = self.variants[name]
        seconds = variant.slowdown * use.seconds[k] + (
            variant.block_seconds[k] if variant.block_seconds else 0.0
        )
        total = use.group_calls[k]
        return {"load": 0, "first": min(total, 1), "steady": max(total - 1, 0)}[part], seconds

    def secondary(self, name: str, k: int) -> int:
        """The secondary device that a block group lies on, of the component or of the blocks that
        were cut off it; 0: none."""
        return int(
            self.variants[name].device.removeprefix("device") or self.groups[name][k].secondary
        )

    def transfer(self, n: int, use: Use) -> tuple[int, int, int] | None:
        """Bytes that cross to secondary device ``n`` and back in a call, and that are there beside
        weights and activation. None: nothing computes there."""
        if self.variants[use.component].device == f"device{n}":
            return use.transfer[0], use.transfer[1], use.transfer[0]
        blocks = {
            number
            for number, (k, _, _) in enumerate(use.order, 1)
            if self.groups[use.component][k].secondary == n
        }
        return transfer_of(use, blocks) if blocks else None

    def transfer_seconds(
        self, n: int, use: Use, part: str, to_bytes: int, back_bytes: int
    ) -> float:
        """Of all calls in the slot: through the host, at the rate of the slower card."""
        main, secondary = self.problem.hardware, self.problem.secondaries[n - 1].hardware
        calls = 1 if part == "first" else use.calls - 1
        return calls * (
            to_bytes / min(main.d2h_bytes_per_second, secondary.h2d_bytes_per_second)
            + back_bytes / min(secondary.d2h_bytes_per_second, main.h2d_bytes_per_second)
        )

    def use(self, number: int, name: str) -> Use | None:
        return next((use for use in self.phases[number].uses if use.component == name), None)

    def table(self, t: int) -> dict[str, np.ndarray]:
        """Per allowed pair of states and ring buffer sizes: seconds of compute, copies and reads;
        bytes moved and held; which components copy."""
        sizes = []
        for name in self.names:
            blocks = [
                self.variants[name].block_bytes[k]
                for cell_name, k, _, may in self.cells
                if cell_name == name and self.calls(t, name, k)[0] and may
            ]
            sizes.append(sorted({(-1, 0), *product(blocks, {0, *blocks})}))
        tables = [
            self.with_ring_buffers(t, dict(zip(self.names, ring_buffers, strict=True)))
            for ring_buffers in product(*sizes)
        ]
        joint_table = {key: np.concatenate([table[key] for table in tables]) for key in tables[0]}
        order = np.argsort(joint_table["end"], kind="stable")
        return {key: values[order] for key, values in joint_table.items()}

    def with_ring_buffers(
        self, t: int, ring_buffers: dict[str, tuple[int, int]]
    ) -> dict[str, np.ndarray]:
        """`table` for given ring buffers: per component the bytes of the largest streamed block
        (-1: nothing is streamed) and of a second one. Groups with blocks larger than the second are
        single-buffered. Ring buffer sizes that no group needs are left out."""
        number, part = self.slots[t]
        phase = self.phases[number]
        is_allowed = np.ones(len(self.begin), dtype=bool)
        own_seconds, transfer, disk = (np.zeros(len(self.begin)) for _ in range(3))
        moved_bytes, held_bytes = (
            np.zeros(len(self.begin), dtype=np.int64),
            np.zeros(len(self.begin), dtype=np.int64),
        )
        secondaries = range(1, len(self.problem.secondaries) + 1)
        secondary_sums = {
            n: (np.zeros(len(self.begin)), np.zeros(len(self.begin), dtype=np.int64))
            for n in secondaries
        }
        copying = {name: np.zeros(len(self.begin), dtype=bool) for name in self.names}
        is_needed = {
            name: np.full((2, len(self.begin)), [[first < 0], [second == 0]])
            for name, (first, second) in ring_buffers.items()
        }
        busy = {name for name, k, _, _ in self.cells if self.calls(t, name, k)[0]}
        for j, (name, k, nb, may) in enumerate(self.cells):
            start_count, end_count = self.start_counts[:, j], self.end_counts[:, j]
            variant, (n, seconds) = self.variants[name], self.calls(t, name, k)
            nbytes = variant.block_bytes[k]
            copies = end_count - start_count
            is_allowed &= self.obeys(t, j, n, start_count, end_count)
            if part == "steady" and name in busy:
                is_allowed &= copies == 0
            if n and not may:
                is_allowed &= start_count == nb
            elif n:
                copies = (1 if part == "first" else n) * (nb - start_count)
                is_allowed &= (end_count == nb) | (nbytes <= ring_buffers[name][0])
                for index, room in enumerate(ring_buffers[name]):
                    is_needed[name][index] |= (end_count < nb) & (room == nbytes)
            read_seconds = copies * (
                variant.disk_seconds[k] if variant.backing_store == "disk" else 0.0
            )
            if n:
                serial = (
                    n * nb * seconds * (end_count < nb)
                    if may and up(ring_buffers[name][1]) < up(nbytes)
                    else 0.0
                )
                lost_seconds = variant.lost_seconds[k] if variant.lost_seconds and may else 0.0
                own_seconds += np.maximum(
                    n * nb * seconds + lost_seconds * (copies - (end_count - start_count)),
                    np.maximum(copies * variant.load_seconds[k] + serial, read_seconds),
                )
            disk, moved_bytes = disk + read_seconds, moved_bytes + copies * nbytes
            secondary = self.secondary(name, k)
            if not secondary:
                transfer = transfer + copies * variant.load_seconds[k]
                held_bytes += up(nbytes) * end_count
            else:
                seconds_there, bytes_there = secondary_sums[secondary]
                seconds_there += copies * variant.load_seconds[k]
                bytes_there += up(nbytes) * end_count
            copying[name] |= copies > 0
        for name, (first, second) in ring_buffers.items():
            held_bytes += up(max(0, first)) + up(second)
            is_allowed &= is_needed[name].all(axis=0)
        for name in self.names:
            if self.variants[name].device == "cpu" and self.use(number, name):
                for k, group in enumerate(self.groups[name]):
                    n, seconds = self.calls(t, name, k)
                    own_seconds += n * len(group.blocks) * seconds
        variants = [self.variants[use.component] for use in phase.uses]
        activation = {"load": 0, "first": phase.first_bytes, "steady": phase.steady_bytes}[part]
        for n, (_, bytes_there) in secondary_sums.items():
            transfers = [
                (use, use_transfer)
                for use in phase.uses
                if (use_transfer := self.transfer(n, use)) is not None
            ]
            if transfers and part != "load":
                arguments = (
                    use_transfer[2] + self.variants[use.component].scratch_bytes
                    for use, use_transfer in transfers
                )
                bytes_there += activation + max(arguments)
                own_seconds += sum(
                    self.transfer_seconds(n, use, part, *use_transfer[:2])
                    for use, use_transfer in transfers
                )
        if variants and all(variant.device != "device" for variant in variants):
            activation = min(activation, phase.pipeline_code_bytes)
        elif part != "load":
            activation += max((variant.scratch_bytes for variant in variants), default=0)
        held_bytes += activation + phase.input_bytes
        held_bytes += sum(
            value.nbytes
            for value, lives in zip(self.problem.values, self.lives, strict=True)
            if number in lives
        )
        table = {
            "begin": self.begin,
            "end": self.end,
            "own": own_seconds,
            "transfer": transfer,
            "disk": disk,
            "moved": moved_bytes,
            "held": held_bytes,
        }
        table |= {f"copies {name}": copying[name] for name in self.used_names}
        table |= {
            f"{prefix} {n}": values
            for n, sums in secondary_sums.items()
            for prefix, values in zip(("to", "on"), sums, strict=True)
        }
        return {key: values[is_allowed] for key, values in table.items()}

    def obeys(
        self, t: int, j: int, n: int, start_count: np.ndarray, end_count: np.ndarray
    ) -> np.ndarray:
        """Whether ``here`` blocks at the start of a slot and ``there`` at its end obey the
        directives."""
        (name, k, nb, _), (number, part) = self.cells[j], self.slots[t]
        demanded = {
            directive.placement
            for directive in self.problem.directives
            if directive.component == name
        }
        fine = np.ones(len(start_count), dtype=bool)
        if "keep" in demanded and any(self.calls(slot, name, k)[0] for slot in range(t)):
            fine &= start_count == nb
        if demanded & {"keep", "whole"} and n:
            fine &= end_count == nb
        if "exclude" in demanded and self.groups[name][k].streamable:
            fine &= end_count == 0
        if "drop" in demanded:
            fine &= (
                (end_count == 0)
                if self.use(number, name) is None
                else (start_count == 0)
                if part == "load"
                else fine
            )
        return fine

    def evict(self, values: np.ndarray) -> np.ndarray:
        """``values`` [..., states] after evictions: each the least of all states from which
        evictions lead there."""
        grid = values.reshape(*values.shape[:-1], *self.shape)
        first = grid.ndim - len(self.shape)
        for j, (name, _, _, _) in enumerate(self.cells):
            if self.variants[name].movable:
                grid = np.flip(
                    np.minimum.accumulate(np.flip(grid, first + j), first + j), first + j
                )
        return grid.reshape(values.shape)

    def held_at_start(self, name: str) -> bool:
        return self.variants[name].backing_store == "disk" or not self.variants[name].read_seconds

    def steps(self, states: BackingStores, first: bool) -> Iterator[BackingStores]:
        """States of the backing stores that may follow ``before`` in one slot."""
        drops = self.problem.runs == 1
        next_states = {
            UNREAD: (UNREAD, HELD) if first else (UNREAD,),
            HELD: (HELD, DROPPED) if drops else (HELD,),
            DROPPED: (DROPPED,),
        }
        yield from product(*(next_states[state] for state in states))

    def weigh(
        self,
        t: int,
        effective: int,
        is_spilled: tuple[bool, ...],
        old_stores: BackingStores,
        new_stores: BackingStores,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Start states, end states and costs of slot ``t`` where backing stores go from ``before``
        to ``after``; None: exceeds a host budget, or a component on the CPU has no backing
        store."""
        number, part = self.slots[t]
        table, hardware = self.tables[t], self.problem.hardware
        ram = pinned = 0
        read_seconds = spill_seconds = 0.0
        absent_bytes = restored_bytes = 0
        for name, old, new in zip(self.used_names, old_stores, new_stores, strict=True):
            variant = self.variants[name]
            if new == HELD:
                ram += variant.host_bytes
                pinned += variant.host_bytes if variant.backing_store in ("pinned", "disk") else 0
            if (old, new) == (UNREAD, HELD):
                ram += variant.transient_bytes
                counts = [len(group.blocks) for group in self.groups[name]]
                read_seconds += sum(
                    count * seconds
                    for count, seconds in zip(counts, variant.read_seconds, strict=True)
                )
            if (
                new != HELD
                and variant.device == "cpu"
                and part != "load"
                and self.use(number, name)
            ):
                return None
        for (v, first, last), is_absent in zip(self.spill_gaps, is_spilled, strict=True):
            nbytes = self.problem.values[v].nbytes
            if is_absent and first <= number <= last:
                leaves, comes = (number, part) == (first, "load"), (number, part) == (last, "load")
                ram += nbytes if number < last or comes else 0
                absent_bytes += nbytes if number < last and not leaves else 0
                spill_seconds += nbytes / hardware.d2h_bytes_per_second if leaves else 0.0
                spill_seconds += nbytes / hardware.h2d_bytes_per_second if comes else 0.0
                restored_bytes += nbytes if comes else 0
        phase = self.phases[number]
        if phase.uses and all(self.variants[use.component].device == "cpu" for use in phase.uses):
            ram += {"load": 0, "first": phase.first_bytes, "steady": phase.steady_bytes}[part]
        if ram > self.problem.ram_bytes or (
            self.problem.pinned_bytes is not None and pinned > self.problem.pinned_bytes
        ):
            return None
        fits = table["held"] - absent_bytes <= effective
        own_seconds = table["own"]
        for n, secondary in enumerate(self.problem.secondaries, 1):
            fits &= table[f"on {n}"] <= secondary.budget_bytes
            own_seconds = np.maximum(own_seconds, table[f"to {n}"])
        for name, new in zip(self.used_names, new_stores, strict=True):
            if new != HELD:
                fits &= ~table[f"copies {name}"]
        seconds = np.maximum(
            own_seconds, np.maximum(table["transfer"] + spill_seconds, table["disk"] + read_seconds)
        )[fits]
        units = np.rint(seconds * SCALE).astype(np.int64)
        assert np.abs(units / SCALE - seconds).max(initial=0.0) <= 1e-9, (
            "seconds must be multiples of 1 / SCALE"
        )
        return (
            table["begin"][fits],
            table["end"][fits],
            units * SECONDS + table["moved"][fits] + restored_bytes,
        )

    def run(
        self,
        effective: int,
        is_spilled: tuple[bool, ...],
        values: np.ndarray,
        backing_stores: BackingStores | None,
    ) -> dict[BackingStores, np.ndarray]:
        """Least costs [starts, states] after a run that started with costs ``values`` [starts,
        states], evictions at its end included, by the final state of the backing stores.
        ``backing_stores``: their state at the start; None: first run."""
        costs_by_stores = {
            backing_stores
            or tuple(
                HELD if self.held_at_start(name) else UNREAD for name in self.used_names
            ): values
        }
        for t in range(len(self.slots)):
            next_costs: dict[BackingStores, np.ndarray] = {}
            for old_stores, costs in costs_by_stores.items():
                evicted = self.evict(costs)
                for new_stores in self.steps(old_stores, first=backing_stores is None):
                    if (
                        weighed := self.weigh(t, effective, is_spilled, old_stores, new_stores)
                    ) is None or not len(weighed[0]):
                        continue
                    begin, end, cost = weighed
                    reached = np.full(values.shape, NEVER, dtype=np.int64)
                    ends, first_index = np.unique(end, return_index=True)
                    reached[:, ends] = np.minimum.reduceat(
                        np.minimum(evicted[:, begin] + cost, NEVER), first_index, axis=1
                    )
                    next_costs[new_stores] = np.minimum(
                        next_costs.get(new_stores, reached), reached
                    )
            costs_by_stores = {
                backing_stores: costs
                for backing_stores, costs in next_costs.items()
                if (costs < NEVER).any()
            }
        return {
            backing_stores: self.evict(costs) for backing_stores, costs in costs_by_stores.items()
        }

    def over_spills(
        self, effective: int, values: np.ndarray, backing_stores: BackingStores | None
    ) -> dict[BackingStores, np.ndarray]:
        """`run` over every set of spills."""
        best: dict[BackingStores, np.ndarray] = {}
        for is_spilled in product((False, True), repeat=len(self.spill_gaps)):
            for stores, costs in self.run(effective, is_spilled, values, backing_stores).items():
                best[stores] = np.minimum(best.get(stores, costs), costs)
        return best

    def best(self, effective: int) -> int:
        """Least cost of all runs; NEVER where nothing fits."""
        empty = np.full((1, self.states), NEVER, dtype=np.int64)
        empty[0, 0] = 0
        cold = {
            backing_stores: costs[0]
            for backing_stores, costs in self.over_spills(effective, empty, None).items()
        }
        if self.problem.runs == 1:
            return min((int(costs.min()) for costs in cold.values()), default=NEVER)
        return min(
            (
                self.session(effective, backing_stores, costs)
                for backing_stores, costs in cold.items()
            ),
            default=NEVER,
        )

    def session(self, effective: int, backing_stores: BackingStores, cold: np.ndarray) -> int:
        """Least cost of a session whose first run costs ``cold`` [states] and ends with
        ``backing_stores``."""
        starts = np.flatnonzero(cold < NEVER)
        start_costs = np.full((len(starts), self.states), NEVER, dtype=np.int64)
        start_costs[np.arange(len(starts)), starts] = 0
        loop_costs = self.over_spills(effective, start_costs, backing_stores).get(
            backing_stores, np.full(start_costs.shape, NEVER)
        )
        loop = loop_costs[np.arange(len(starts)), starts]
        fine = loop < NEVER
        return int(min(cold[starts][fine] + (self.problem.runs - 1) * loop[fine], default=NEVER))


class Oracle:
    """All choices for ``problem``. The device budget is an argument; the other budgets are the
    problem's."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.choices = [Choice(problem, *choice) for choice in self.every()]

    def every(self) -> Iterator[tuple[tuple[str, ...], list[PhaseNumbers], list[Variant]]]:
        problem = self.problem
        stages = tuple(dict.fromkeys(phase.stage for phase in problem.phases))
        orders = [stages] if problem.precedence is None else list(permutations(stages))
        plain = {
            stage: tuple(phase for phase in problem.phases if phase.stage == stage)
            for stage in stages
        }
        runs = [
            [
                plain[stage],
                *(
                    o.phases
                    for o in problem.options
                    if o.stage == stage and (not o.needs or o.needs in problem.allow)
                ),
            ]
            for stage in stages
        ]
        for order in orders:
            if any(order.index(a) > order.index(b) for a, b in problem.precedence or ()):
                continue
            for stage_phases in product(*runs):
                run = dict(zip(stages, stage_phases, strict=True))
                phases = [phase for stage in order for phase in run[stage]]
                used_names = {use.component for phase in phases for use in phase.uses}
                for variants in product(
                    *(
                        self.usable(component.name, component.variants)
                        for component in problem.components
                    )
                ):
                    pairs = zip(problem.components, variants, strict=True)
                    stored_bytes = sum(
                        variant.stored_bytes
                        for component, variant in pairs
                        if component.name in used_names
                    )
                    if problem.disk_bytes is None or stored_bytes <= problem.disk_bytes:
                        yield order, phases, list(variants)

    def usable(self, name: str, variants: tuple[Variant, ...]) -> list[Variant]:
        demanded = {
            directive.placement
            for directive in self.problem.directives
            if directive.component == name
        }
        return [
            variant
            for variant in variants
            if (not variant.needs or variant.needs in self.problem.allow)
            and not ("pin" in demanded and variant.backing_store != "pinned")
            and not (demanded & {"keep", "whole"} and variant.device == "cpu")
        ]

    def best(self, effective_bytes: int) -> tuple[float, int] | None:
        """Least seconds, and the fewest bytes moved in that time; None: nothing fits."""
        cost = min((choice.best(effective_bytes) for choice in self.choices), default=NEVER)
        return None if cost >= NEVER else (cost // SECONDS / SCALE, cost % SECONDS)

    def smallest_effective(self) -> int | None:
        """The least effective budget for which a plan exists; None: no device budget is enough."""
        sums = sorted(
            {
                int(held_bytes)
                for choice in self.choices
                for table in choice.tables
                for held_bytes in table["held"]
            }
            | {0}
        )
        if self.best(sums[-1]) is None:
            return None
        low, high = 0, sums[-1]
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.best(middle) is not None else (middle + 1, high)
        return low

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


def transfer_of(use: Use, there: set[int]) -> tuple[int, int, int]:
    """Bytes that cross in a call to the device with the blocks ``there``, and back; and the most
    that are there for one of them, of what it gets, and what was given to the call and an earlier
    block got."""
    to = sum(of.nbytes for of in use.live_tensors if of.maker not in there and there & {*of.users})
    back = sum(of.nbytes for of in use.live_tensors if of.maker in there and {*of.users} - there)
    held = (
        sum(
            up(of.nbytes)
            for of in use.live_tensors
            if n in of.users or (of.given and any(0 < user < n for user in of.users))
        )
        for n in there
    )
    return to, back, max(held)


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
        self.used = [
            name
            for name in self.names
            if any(use.component == name for phase in phases for use in phase.uses)
        ]
        self.cells = [
            (c.name, k, len(of.blocks), of.streamable and v.streamable and v.movable)
            for c, v in zip(problem.components, variants, strict=True)
            for k, of in enumerate(c.groups)
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
        after = value.producer not in order or order.index(stage) > order.index(value.producer)
        return after and any(
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
                after = next(n for n in lives if n > first and n not in unread)
                if self.phases[first].uses and self.phases[after].uses:
                    yield first, after

    def pairs(self) -> None:
        """All pairs of states at the start and end of a slot (``here`` <= ``there``), sorted by the
        second."""
        each = [[(h, t) for t in range(nb) for h in range(t + 1)] for nb in self.shape]
        every = list(product(*each))
        grid = np.array(every, dtype=np.int64).reshape(len(every), len(self.cells), 2)
        stride = np.array(
            [int(np.prod(self.shape[j + 1 :])) for j in range(len(self.cells))], dtype=np.int64
        )
        order = np.argsort(grid[:, :, 1] @ stride, kind="stable")
        self.here, self.there = grid[order, :, 0], grid[order, :, 1]
        self.begin, self.end = self.here @ stride, self.there @ stride
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
        there = {
            number
            for number, (k, _, _) in enumerate(use.order, 1)
            if self.groups[use.component][k].secondary == n
        }
        return transfer_of(use, there) if there else None

    def transfer_seconds(self, n: int, use: Use, part: str, to: int, back: int) -> float:
        """Of all calls in the slot: through the host, at the rate of the slower card."""
        one, other = self.problem.hardware, self.problem.secondaries[n - 1].hardware
        calls = 1 if part == "first" else use.calls - 1
        return calls * (
            to / min(one.d2h_bytes_per_second, other.h2d_bytes_per_second)
            + back / min(other.d2h_bytes_per_second, one.h2d_bytes_per_second)
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
                for of, k, _, may in self.cells
                if of == name and self.calls(t, name, k)[0] and may
            ]
            sizes.append(sorted({(-1, 0), *product(blocks, {0, *blocks})}))
        found = [
            self.with_ring_buffers(t, dict(zip(self.names, ring_buffers, strict=True)))
            for ring_buffers in product(*sizes)
        ]
        joined = {key: np.concatenate([of[key] for of in found]) for key in found[0]}
        order = np.argsort(joined["end"], kind="stable")
        return {key: of[order] for key, of in joined.items()}

    def with_ring_buffers(
        self, t: int, ring_buffers: dict[str, tuple[int, int]]
    ) -> dict[str, np.ndarray]:
        """`table` for given ring buffers: per component the bytes of the largest streamed block
        (-1: nothing is streamed) and of a second one. Groups with blocks larger than the second are
        single-buffered. Ring buffer sizes that no group needs are left out."""
        number, part = self.slots[t]
        phase = self.phases[number]
        allowed = np.ones(len(self.begin), dtype=bool)
        own, transfer, disk = (np.zeros(len(self.begin)) for _ in range(3))
        moved, held = (
            np.zeros(len(self.begin), dtype=np.int64),
            np.zeros(len(self.begin), dtype=np.int64),
        )
        secondaries = range(1, len(self.problem.secondaries) + 1)
        away = {
            n: (np.zeros(len(self.begin)), np.zeros(len(self.begin), dtype=np.int64))
            for n in secondaries
        }
        copying = {name: np.zeros(len(self.begin), dtype=bool) for name in self.names}
        asked = {
            name: np.full((2, len(self.begin)), [[first < 0], [second == 0]])
            for name, (first, second) in ring_buffers.items()
        }
        busy = {name for name, k, _, _ in self.cells if self.calls(t, name, k)[0]}
        for j, (name, k, nb, may) in enumerate(self.cells):
            here, there = self.here[:, j], self.there[:, j]
            variant, (n, seconds) = self.variants[name], self.calls(t, name, k)
            nbytes = variant.block_bytes[k]
            copies = there - here
            allowed &= self.obeys(t, j, n, here, there)
            if part == "steady" and name in busy:
                allowed &= copies == 0
            if n and not may:
                allowed &= here == nb
            elif n:
                copies = (1 if part == "first" else n) * (nb - here)
                allowed &= (there == nb) | (nbytes <= ring_buffers[name][0])
                for which, room in enumerate(ring_buffers[name]):
                    asked[name][which] |= (there < nb) & (room == nbytes)
            read = copies * (variant.disk_seconds[k] if variant.backing_store == "disk" else 0.0)
            if n:
                serial = (
                    n * nb * seconds * (there < nb)
                    if may and up(ring_buffers[name][1]) < up(nbytes)
                    else 0.0
                )
                own += np.maximum(
                    n * nb * seconds, np.maximum(copies * variant.load_seconds[k] + serial, read)
                )
            disk, moved = disk + read, moved + copies * nbytes
            away_on = self.secondary(name, k)
            if not away_on:
                transfer = transfer + copies * variant.load_seconds[k]
                held += up(nbytes) * there
            else:
                seconds_there, bytes_there = away[away_on]
                seconds_there += copies * variant.load_seconds[k]
                bytes_there += up(nbytes) * there
            copying[name] |= copies > 0
        for name, (first, second) in ring_buffers.items():
            held += up(max(0, first)) + up(second)
            allowed &= asked[name].all(axis=0)
        for name in self.names:
            if self.variants[name].device == "cpu" and self.use(number, name):
                for k, of in enumerate(self.groups[name]):
                    n, seconds = self.calls(t, name, k)
                    own += n * len(of.blocks) * seconds
        variants = [self.variants[use.component] for use in phase.uses]
        activation = {"load": 0, "first": phase.first_bytes, "steady": phase.steady_bytes}[part]
        for n, (_, bytes_there) in away.items():
            there = [
                (use, use_transfer)
                for use in phase.uses
                if (use_transfer := self.transfer(n, use)) is not None
            ]
            if there and part != "load":
                arguments = (
                    use_transfer[2] + self.variants[use.component].scratch_bytes
                    for use, use_transfer in there
                )
                bytes_there += activation + max(arguments)
                own += sum(
                    self.transfer_seconds(n, use, part, *use_transfer[:2])
                    for use, use_transfer in there
                )
        if variants and all(variant.device != "device" for variant in variants):
            activation = min(activation, phase.pipeline_code_bytes)
        elif part != "load":
            activation += max((variant.scratch_bytes for variant in variants), default=0)
        held += activation + phase.input_bytes
        held += sum(
            value.nbytes
            for value, lives in zip(self.problem.values, self.lives, strict=True)
            if number in lives
        )
        found = {
            "begin": self.begin,
            "end": self.end,
            "own": own,
            "transfer": transfer,
            "disk": disk,
            "moved": moved,
            "held": held,
        }
        found |= {f"copies {name}": copying[name] for name in self.used}
        found |= {
            f"{what} {n}": of
            for n, both in away.items()
            for what, of in zip(("to", "on"), both, strict=True)
        }
        return {key: of[allowed] for key, of in found.items()}

    def obeys(self, t: int, j: int, n: int, here: np.ndarray, there: np.ndarray) -> np.ndarray:
        """Whether ``here`` blocks at the start of a slot and ``there`` at its end obey the
        directives."""
        (name, k, nb, _), (number, part) = self.cells[j], self.slots[t]
        demanded = {
            directive.placement
            for directive in self.problem.directives
            if directive.component == name
        }
        fine = np.ones(len(here), dtype=bool)
        if "keep" in demanded and any(self.calls(earlier, name, k)[0] for earlier in range(t)):
            fine &= here == nb
        if demanded & {"keep", "whole"} and n:
            fine &= there == nb
        if "exclude" in demanded and self.groups[name][k].streamable:
            fine &= there == 0
        if "drop" in demanded:
            fine &= (
                (there == 0)
                if self.use(number, name) is None
                else (here == 0)
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

    def steps(self, before: BackingStores, first: bool) -> Iterator[BackingStores]:
        """States of the backing stores that may follow ``before`` in one slot."""
        drops = self.problem.runs == 1
        following = {
            UNREAD: (UNREAD, HELD) if first else (UNREAD,),
            HELD: (HELD, DROPPED) if drops else (HELD,),
            DROPPED: (DROPPED,),
        }
        yield from product(*(following[state] for state in before))

    def weigh(
        self,
        t: int,
        effective: int,
        spilled: tuple[bool, ...],
        before: BackingStores,
        after: BackingStores,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Start states, end states and costs of slot ``t`` where backing stores go from ``before``
        to ``after``; None: exceeds a host budget, or a component on the CPU has no backing
        store."""
        number, part = self.slots[t]
        table, hardware = self.tables[t], self.problem.hardware
        ram = pinned = 0
        read_seconds = spill_seconds = 0.0
        away = restored = 0
        for name, old, new in zip(self.used, before, after, strict=True):
            variant = self.variants[name]
            if new == HELD:
                ram += variant.host_bytes
                pinned += variant.host_bytes if variant.backing_store in ("pinned", "disk") else 0
            if (old, new) == (UNREAD, HELD):
                ram += variant.transient_bytes
                counts = [len(of.blocks) for of in self.groups[name]]
                read_seconds += sum(
                    count * each for count, each in zip(counts, variant.read_seconds, strict=True)
                )
            if (
                new != HELD
                and variant.device == "cpu"
                and part != "load"
                and self.use(number, name)
            ):
                return None
        for (v, first, last), gone in zip(self.spill_gaps, spilled, strict=True):
            nbytes = self.problem.values[v].nbytes
            if gone and first <= number <= last:
                leaves, comes = (number, part) == (first, "load"), (number, part) == (last, "load")
                ram += nbytes if number < last or comes else 0
                away += nbytes if number < last and not leaves else 0
                spill_seconds += nbytes / hardware.d2h_bytes_per_second if leaves else 0.0
                spill_seconds += nbytes / hardware.h2d_bytes_per_second if comes else 0.0
                restored += nbytes if comes else 0
        phase = self.phases[number]
        if phase.uses and all(self.variants[use.component].device == "cpu" for use in phase.uses):
            ram += {"load": 0, "first": phase.first_bytes, "steady": phase.steady_bytes}[part]
        if ram > self.problem.ram_bytes or (
            self.problem.pinned_bytes is not None and pinned > self.problem.pinned_bytes
        ):
            return None
        fits = table["held"] - away <= effective
        own = table["own"]
        for n, secondary in enumerate(self.problem.secondaries, 1):
            fits &= table[f"on {n}"] <= secondary.budget_bytes
            own = np.maximum(own, table[f"to {n}"])
        for name, new in zip(self.used, after, strict=True):
            if new != HELD:
                fits &= ~table[f"copies {name}"]
        seconds = np.maximum(
            own, np.maximum(table["transfer"] + spill_seconds, table["disk"] + read_seconds)
        )[fits]
        units = np.rint(seconds * SCALE).astype(np.int64)
        assert np.abs(units / SCALE - seconds).max(initial=0.0) <= 1e-9, (
            "seconds must be multiples of 1 / SCALE"
        )
        return (
            table["begin"][fits],
            table["end"][fits],
            units * SECONDS + table["moved"][fits] + restored,
        )

    def run(
        self,
        effective: int,
        spilled: tuple[bool, ...],
        values: np.ndarray,
        backing_stores: BackingStores | None,
    ) -> dict[BackingStores, np.ndarray]:
        """Least costs [starts, states] after a run that started with costs ``values`` [starts,
        states], evictions at its end included, by the final state of the backing stores.
        ``backing_stores``: their state at the start; None: first run."""
        now = {
            backing_stores
            or tuple(HELD if self.held_at_start(name) else UNREAD for name in self.used): values
        }
        for t in range(len(self.slots)):
            following: dict[BackingStores, np.ndarray] = {}
            for before, costs in now.items():
                least = self.evict(costs)
                for after in self.steps(before, first=backing_stores is None):
                    if (
                        found := self.weigh(t, effective, spilled, before, after)
                    ) is None or not len(found[0]):
                        continue
                    begin, end, cost = found
                    reached = np.full(values.shape, NEVER, dtype=np.int64)
                    ends, where = np.unique(end, return_index=True)
                    reached[:, ends] = np.minimum.reduceat(
                        np.minimum(least[:, begin] + cost, NEVER), where, axis=1
                    )
                    following[after] = np.minimum(following.get(after, reached), reached)
            now = {
                backing_stores: costs
                for backing_stores, costs in following.items()
                if (costs < NEVER).any()
            }
        return {backing_stores: self.evict(costs) for backing_stores, costs in now.items()}

    def over_spills(
        self, effective: int, values: np.ndarray, backing_stores: BackingStores | None
    ) -> dict[BackingStores, np.ndarray]:
        """`run` over every set of spills."""
        best: dict[BackingStores, np.ndarray] = {}
        for spilled in product((False, True), repeat=len(self.spill_gaps)):
            for after, costs in self.run(effective, spilled, values, backing_stores).items():
                best[after] = np.minimum(best.get(after, costs), costs)
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
        begun = np.full((len(starts), self.states), NEVER, dtype=np.int64)
        begun[np.arange(len(starts)), starts] = 0
        again = self.over_spills(effective, begun, backing_stores).get(
            backing_stores, np.full(begun.shape, NEVER)
        )
        loop = again[np.arange(len(starts)), starts]
        fine = loop < NEVER
        return int(min(cold[starts][fine] + (self.problem.runs - 1) * loop[fine], default=NEVER))


class Oracle:
    """All choices for ``problem``. The device budget is an argument; the other budgets are the
    problem's."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.choices = [Choice(problem, *chosen) for chosen in self.every()]

    def every(self) -> Iterator[tuple[tuple[str, ...], list[PhaseNumbers], list[Variant]]]:
        of = self.problem
        stages = tuple(dict.fromkeys(phase.stage for phase in of.phases))
        orders = [stages] if of.precedence is None else list(permutations(stages))
        plain = {
            stage: tuple(phase for phase in of.phases if phase.stage == stage) for stage in stages
        }
        runs = [
            [
                plain[stage],
                *(
                    o.phases
                    for o in of.options
                    if o.stage == stage and (not o.needs or o.needs in of.allow)
                ),
            ]
            for stage in stages
        ]
        for order in orders:
            if any(order.index(a) > order.index(b) for a, b in of.precedence or ()):
                continue
            for picked in product(*runs):
                run = dict(zip(stages, picked, strict=True))
                phases = [phase for stage in order for phase in run[stage]]
                used = {use.component for phase in phases for use in phase.uses}
                for variants in product(
                    *(
                        self.usable(component.name, component.variants)
                        for component in of.components
                    )
                ):
                    named = zip(of.components, variants, strict=True)
                    stored = sum(
                        variant.stored_bytes
                        for component, variant in named
                        if component.name in used
                    )
                    if of.disk_bytes is None or stored <= of.disk_bytes:
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
                int(held)
                for choice in self.choices
                for table in choice.tables
                for held in table["held"]
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

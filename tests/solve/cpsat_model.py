"""An independent formulation of the planning problem for OR-tools' CP-SAT, in integers throughout.
Runs in a process of its own.

    python cpsat_model.py SECONDS FILE ...     one line of JSON per problem: {"seconds": least or
    null, "bound": ..., "proven": ...}

Files are problems as `Problem.to_json` writes them. Stage orders and options are enumerated.
Variants, backing stores, spills, blocks of every slot and both runs of a session are one model.
Bytes are counted in allocations of 512, times in 1e-9 of the time to copy and compute everything
once per call. On further devices ("secondary devices") lie whole components, or blocks in a row of
the largest one whose blocks may: a bool per block and secondary device.
"""

from __future__ import annotations

import json
import sys
from itertools import permutations, product
from pathlib import Path
from typing import Any

from ortools.sat.python import cp_model

UNIT = 512


def up(nbytes: int) -> int:
    return (nbytes + UNIT - 1) // UNIT


class Run:
    """Variables and constraints of one run. ``first``: the run before it; None: it is the first."""

    def __init__(self, model: Model, name: str, first: Run | None) -> None:
        self.of, self.name, self.first = model, name, first
        self.slots = model.slots
        self.held: dict[
            tuple[int, int, int, int, int], tuple[Any, Any]
        ] = {}  # c, m, k, secondary device, t -> K, d
        self.backing_stores: dict[tuple[int, int, int], Any] = {}
        self.reads: dict[tuple[int, int, int], Any] = {}
        self.spills = {gap: self.yes(f"spill {gap}") for gap in model.gaps}
        self.blocks()
        self.hosts()
        self.seconds = [self.slot(t) for t in range(len(self.slots))]

    def yes(self, name: str) -> Any:
        return self.of.sat.new_bool_var(f"{self.name} {name}")

    def number(self, most: int, name: str) -> Any:
        return self.of.sat.new_int_var(0, most, f"{self.name} {name}")

    def blocks(self) -> None:
        """K and d of every block group, the transitions between slots, and directives."""
        sat, last = self.of.sat, len(self.slots) - 1
        for c, m, k, nb, at in self.of.groups():
            variant = self.of.variant(c, m)
            for t in range(len(self.slots)):
                present, loaded = (
                    self.number(nb, f"K {c} {m} {k} {at} {t}"),
                    self.number(nb, f"d {c} {m} {k} {at} {t}"),
                )
                self.held[c, m, k, at, t] = present, loaded
                sat.add(present + loaded <= self.of.count(c, m, k, at))
                if t:
                    before = sum(self.held[c, m, k, at, t - 1])
                    sat.add(present <= before) if variant["movable"] else sat.add(present == before)
                self.demands(c, m, k, at, t)
            begin, end = self.held[c, m, k, at, 0][0], sum(self.held[c, m, k, at, last])
            if self.first is None:
                sat.add(begin == 0)
            else:
                for left in (sum(self.first.held[c, m, k, at, last]), end):
                    sat.add(begin <= left) if variant["movable"] else sat.add(begin == left)

    def demands(self, c: int, m: int, k: int, at: int, t: int) -> None:
        sat, every, demanded = self.of.sat, self.of.count(c, m, k, at), self.of.demanded(c)
        present, loaded = self.held[c, m, k, at, t]
        used = self.of.calls(t, c, k)
        number, part = self.slots[t]
        if "keep" in demanded and any(self.of.calls(earlier, c, k) for earlier in range(t)):
            sat.add(present == every)
        if demanded & {"keep", "whole"} and used:
            sat.add(present + loaded == every)
        if "exclude" in demanded and self.of.components[c]["groups"][k]["streamable"]:
            sat.add(present + loaded == 0)
        if "drop" in demanded:
            own = self.of.use(number, c) is not None
            if not own:
                sat.add(present + loaded == 0)
            elif part == "load":
                sat.add(present == 0)

    def hosts(self) -> None:
        """Which backing stores are held, read and dropped; copies and compute on the CPU need
        them."""
        sat = self.of.sat
        for c, m in self.of.chosen:
            if c not in self.of.used:
                continue
            variant, y = self.of.variant(c, m), self.of.chosen[c, m]
            early = variant["backing_store"] == "disk" or not variant["read_seconds"]
            before = (
                (y if early else 0)
                if self.first is None
                else self.first.backing_stores[c, m, len(self.slots) - 1]
            )
            for t in range(len(self.slots)):
                backing_store, read = (
                    self.yes(f"backing store {c} {m} {t}"),
                    self.yes(f"read {c} {m} {t}"),
                )
                self.backing_stores[c, m, t], self.reads[c, m, t] = backing_store, read
                if early or self.first is not None:
                    sat.add(read == 0)
                sat.add(backing_store <= before + read)
                sat.add(backing_store >= read)
                sat.add(backing_store <= y)
                if self.of.problem["runs"] > 1:
                    sat.add(backing_store >= before)
                before = backing_store
                if (
                    variant["device"] == "cpu"
                    and self.slots[t][1] != "load"
                    and self.of.use(self.slots[t][0], c)
                ):
                    sat.add(backing_store >= y)
            sat.add(sum(self.reads[c, m, t] for t in range(len(self.slots))) <= 1)

    def slot(self, t: int) -> Any:
        """Seconds of the slot: the longest of compute, copies and reads."""
        of, sat, (number, part) = self.of, self.of.sat, self.slots[t]
        most = of.horizon
        busy = {c for c, m, k, nb, at in of.groups() if of.calls(t, c, k)}
        copies_to: list[list[Any]] = [[] for _ in range(1 + len(of.secondaries))]
        on: list[list[Any]] = [[] for _ in range(1 + len(of.secondaries))]
        copies, bytes_held = copies_to[0], on[0]
        reads, moved, single_buffered, ring_buffers = [], {}, {}, {}
        for c, m, k, nb, at in of.groups():
            variant, every, n = of.variant(c, m), of.count(c, m, k, at), of.calls(t, c, k)
            present, loaded = self.held[c, m, k, at, t]
            streamable = (
                of.components[c]["groups"][k]["streamable"]
                and variant["streamable"]
                and variant["movable"]
                and not at
            )
            x = loaded
            if part == "steady" and c in busy:
                sat.add(loaded == 0)
            if n and not streamable:
                sat.add(present == every)
                x = 0
            elif n:
                streamed = self.yes(f"streamed {c} {m} {k} {t}")
                sat.add(every - present - loaded <= nb * streamed)
                single = self.yes(f"single-buffered {c} {m} {k} {t}")
                ring_buffers.setdefault((c, m), []).append(
                    (variant["block_bytes"][k], streamed, single)
                )
                single_buffered[c, m, k] = single
                x = (n if part == "steady" else 1) * (every - present)
            if c in of.used:
                sat.add(x <= max(1, n) * nb * self.backing_stores[c, m, t])
            if not at:
                moved[c, m, k] = x
            copies_to[at].append(of.units(of.there(c, m, at)["load_seconds"][k]) * x)
            if variant["backing_store"] == "disk":
                reads.append(of.units(variant["disk_seconds"][k]) * x)
            on[at].append(up(variant["block_bytes"][k]) * (present + loaded))
        bytes_held += [self.ring_buffer(t, c, m, blocks) for (c, m), blocks in ring_buffers.items()]
        self.budgets(t, bytes_held)
        for secondary in range(1, len(on)):
            self.secondary_budget(t, secondary, on[secondary])
        own = [
            self.own(t, c, k, moved, single_buffered, most)
            for c in sorted(busy)
            for k in range(len(of.components[c]["groups"]))
        ]
        for c, m in of.chosen:
            if of.variant(c, m)["device"] == "cpu":
                for k, blocks in enumerate(of.components[c]["groups"]):
                    own.append(
                        of.units(of.calls(t, c, k) * len(blocks["blocks"]) * of.seconds(t, c, m, k))
                        * of.chosen[c, m]
                    )
        own += [each for secondary in range(1, len(on)) for each in self.away(t, secondary)]
        hardware = of.problem["hardware"]
        for (v, begin, end), gone in self.spills.items():
            nbytes = of.problem["values"][v]["nbytes"]
            if part == "load" and number == begin:
                copies.append(of.units(nbytes / hardware["d2h_bytes_per_second"]) * gone)
            if part == "load" and number == end:
                copies.append(of.units(nbytes / hardware["h2d_bytes_per_second"]) * gone)
        for (c, m, at), read in self.reads.items():
            if at == t and of.variant(c, m)["read_seconds"]:
                counts = [len(blocks["blocks"]) for blocks in of.components[c]["groups"]]
                each = of.variant(c, m)["read_seconds"]
                reads.append(of.units(sum(n * s for n, s in zip(counts, each, strict=True))) * read)
        seconds = self.number(most, f"D {t}")
        for channel in (own, reads, *copies_to):
            sat.add(seconds >= sum(channel))
        return seconds

    def own(
        self,
        t: int,
        c: int,
        k: int,
        moved: dict[tuple[int, int, int], Any],
        single_buffered: dict[Any, Any],
        most: int,
    ) -> Any:
        """Seconds of a block group: the longest of its compute, its copies (plus its compute where
        single-buffered), and its reads."""
        of, n = self.of, self.of.calls(t, c, k)
        variants = [
            (m, of.variant(c, m))
            for at, m in of.chosen
            if at == c and of.variant(c, m)["device"] != "cpu"
        ]
        if not n or not variants:
            return 0
        nb = len(of.components[c]["groups"][k]["blocks"])
        longest = self.number(most, f"E {t} {c} {k}")
        compute = sum(
            of.units(n * nb * of.seconds(t, c, m, k)) * of.chosen[c, m] for m, _ in variants
        )
        fewer = sum(
            of.units(n * of.seconds(t, c, m, k, alone=True)) * of.elsewhere(c, m, k)
            for m, _ in variants
        )
        of.sat.add(longest >= compute - fewer)
        variants = [(m, variant) for m, variant in variants if (c, m, k) in moved]
        of.sat.add(
            longest
            >= sum(of.units(variant["load_seconds"][k]) * moved[c, m, k] for m, variant in variants)
        )
        for m, variant in variants:
            if (c, m, k) in single_buffered:
                each = of.units(n * nb * of.seconds(t, c, m, k))
                alone = of.units(n * of.seconds(t, c, m, k, alone=True)) * of.elsewhere(c, m, k)
                of.sat.add(
                    longest
                    >= of.units(variant["load_seconds"][k]) * moved[c, m, k]
                    + each * single_buffered[c, m, k]
                    - alone
                )
        reads = [
            (m, variant["disk_seconds"][k])
            for m, variant in variants
            if variant["backing_store"] == "disk"
        ]
        of.sat.add(longest >= sum(of.units(seconds) * moved[c, m, k] for m, seconds in reads))
        return longest

    def away(self, t: int, secondary: int) -> list[Any]:
        """Seconds of blocks of a split component on ``secondary``, and of what crosses to it and
        back."""
        of, (number, part), found = self.of, self.slots[t], []
        for c, m in of.chosen if part != "load" else ():
            if (use := of.use(number, c)) is None:
                continue
            calls = {"first": min(use["calls"], 1), "steady": use["calls"] - 1}[part]
            if of.variant(c, m)["device"] == f"device{secondary}":
                found.append(
                    of.units(calls * sum(of.transfer_seconds(secondary, use["transfer"])))
                    * of.chosen[c, m]
                )
            for (k, _), here in zip(
                of.blocks_of(c), of.blocks_on.get((c, m, secondary), ()), strict=False
            ):
                found.append(
                    of.units(
                        of.calls(t, c, k) * of.seconds(t, c, m, k, alone=True, secondary=secondary)
                    )
                    * here
                )
            for to, back, nbytes in of.transfers(c, m, secondary, use):
                seconds = of.transfer_seconds(secondary, (nbytes, nbytes))
                found += [
                    of.units(calls * each) * crosses
                    for each, crosses in zip(seconds, (to, back), strict=True)
                ]
        return found

    def secondary_budget(self, t: int, secondary: int, held: list[Any]) -> None:
        """The budget of ``secondary``: weights, and of what computes there activation as traced,
        scratch, and what crosses to it."""
        of, sat, (number, part) = self.of, self.of.sat, self.slots[t]
        phase, effective = of.phases[number], effective_bytes(of.secondaries[secondary - 1])
        sat.add(UNIT * sum(held) <= effective)
        activation = {"load": 0, "first": phase["first_bytes"], "steady": phase["steady_bytes"]}[
            part
        ]
        for c, m in of.chosen if part != "load" else ():
            if (use := of.use(number, c)) is None:
                continue
            nbytes = activation + of.variant(c, m)["scratch_bytes"]
            if of.variant(c, m)["device"] == f"device{secondary}":
                sat.add(
                    UNIT * sum(held) + (nbytes + use["transfer"][0]) * of.chosen[c, m] <= effective
                )
            for b, here in enumerate(of.blocks_on.get((c, m, secondary), ()), 1):
                got = [
                    up(n)
                    for n, _, users, given in use["live_tensors"]
                    if b in users or (given and any(0 < u < b for u in users))
                ]
                sat.add(UNIT * sum(held) + (nbytes + UNIT * sum(got)) * here <= effective)

    def ring_buffer(self, t: int, c: int, m: int, blocks: list[tuple[int, Any, Any]]) -> Any:
        """Size of the ring buffer: the largest streamed block, and a second block of every group
        that is not single-buffered."""
        most = max(up(nbytes) for nbytes, _, _ in blocks)
        largest, beside = (
            self.number(most, f"largest {t} {c} {m}"),
            self.number(most, f"beside {t} {c} {m}"),
        )
        for nbytes, streamed, single in blocks:
            self.of.sat.add(largest >= up(nbytes) * streamed)
            self.of.sat.add(beside >= up(nbytes) * streamed - up(nbytes) * single)
        return largest + beside

    def budgets(self, t: int, bytes_held: list[Any]) -> None:
        """Budgets of the device, of RAM and of page-locked RAM."""
        of, sat, (number, part) = self.of, self.of.sat, self.slots[t]
        phase, values = of.phases[number], of.problem["values"]
        activation = {"load": 0, "first": phase["first_bytes"], "steady": phase["steady_bytes"]}[
            part
        ]
        variants = [
            (m, of.variant(c, m), of.chosen[c, m])
            for use in phase["uses"]
            for c, m in of.chosen
            if of.name(c) == use["component"]
        ]
        on_cpu, off_device, pipeline_code = (
            self.yes(f"cpu {t}"),
            self.yes(f"not here {t}"),
            min(activation, phase["pipeline_code_bytes"]),
        )
        for flag, devices in (
            (on_cpu, lambda device: device != "cpu"),
            (off_device, lambda device: device == "device"),
        ):
            off = [y for _, variant, y in variants if devices(variant["device"])]
            for y in off:
                sat.add(flag + y <= 1)
            sat.add(sum(off) >= 1 - flag) if variants else sat.add(flag == 0)
        scratches = (
            [variant["scratch_bytes"] * y for _, variant, y in variants] if part != "load" else []
        )
        away, host = [], []
        for (v, begin, end), gone in self.spills.items():
            if begin <= number <= end:
                leaves, comes = (number, part) == (begin, "load"), (number, part) == (end, "load")
                away += [values[v]["nbytes"] * gone] if number < end and not leaves else []
                host += [values[v]["nbytes"] * gone] if number < end or comes else []
        fixed = phase["input_bytes"] + sum(
            value["nbytes"] for v, value in enumerate(values) if number in of.lives[v]
        )
        for scratch in scratches or [0]:
            every = (
                activation * (1 - off_device)
                + pipeline_code * off_device
                + scratch
                + fixed
                - sum(away)
            )
            ceiling = sum(variant["scratch_bytes"] for _, variant, _ in variants)
            sat.add(UNIT * sum(bytes_held) + every <= of.effective + ceiling * off_device)
        sat.add(
            UNIT * sum(bytes_held)
            + activation * (1 - off_device)
            + pipeline_code * off_device
            + fixed
            - sum(away)
            <= of.effective
        )
        locked = []
        for (c, m, at), backing_store in self.backing_stores.items():
            if at == t:
                variant = of.variant(c, m)
                host.append(
                    variant["host_bytes"] * backing_store
                    + variant["transient_bytes"] * self.reads[c, m, t]
                )
                locked += (
                    [variant["host_bytes"] * backing_store]
                    if variant["backing_store"] != "pageable"
                    else []
                )
        sat.add(sum(host) + activation * on_cpu <= of.problem["ram_bytes"])
        if of.problem["pinned_bytes"] is not None:
            sat.add(sum(locked) <= of.problem["pinned_bytes"])


class Model:
    """One stage order, with one option per stage."""

    def __init__(
        self,
        problem: dict[str, Any],
        order: list[str],
        phases: list[dict[str, Any]],
        horizon: float,
    ) -> None:
        self.problem, self.order, self.phases = problem, order, phases
        self.components, self.secondaries = problem["components"], problem.get("secondaries", [])
        self.sat = cp_model.CpModel()
        self.unit = horizon / 1e9
        self.horizon = 2 * 10**9
        self.effective = effective_bytes(problem)
        self.slots = [
            (number, part) for number, phase in enumerate(phases) for part in parts(phase)
        ]
        self.used = {
            c
            for c in range(len(self.components))
            if any(self.use(n, c) for n in range(len(phases)))
        }
        self.lives = [self.living(value) for value in problem["values"]]
        self.gaps = [(v, *gap) for v in range(len(self.lives)) for gap in self.spill_gaps_of(v)]
        self.chosen: dict[tuple[int, int], Any] = {}
        for c, component in enumerate(self.components):
            usable = [
                m for m, variant in enumerate(component["variants"]) if self.usable(c, variant)
            ]
            self.chosen |= {(c, m): self.sat.new_bool_var(f"y {c} {m}") for m in usable}
            self.sat.add_exactly_one([self.chosen[c, m] for m in usable])
        self.blocks_on: dict[
            tuple[int, int, int], list[Any]
        ] = {}  # c, m, secondary device -> per block in call order, whether it is there
        for c, m in list(self.chosen):
            self.split(c, m)
        if problem["disk_bytes"] is not None:
            stored = (
                self.variant(c, m)["stored_bytes"] * y
                for (c, m), y in self.chosen.items()
                if c in self.used
            )
            self.sat.add(sum(stored) <= problem["disk_bytes"])
        first = Run(self, "first", None)
        seconds = sum(first.seconds)
        if problem["runs"] > 1:
            seconds += (problem["runs"] - 1) * sum(Run(self, "again", first).seconds)
        self.sat.minimize(seconds)
        self.total = seconds

    def units(self, seconds: float) -> int:
        return round(seconds / self.unit)

    def name(self, c: int) -> str:
        return str(self.components[c]["name"])

    def variant(self, c: int, m: int) -> dict[str, Any]:
        return dict(self.components[c]["variants"][m])

    def demanded(self, c: int) -> set[str]:
        return {
            of["placement"] for of in self.problem["directives"] if of["component"] == self.name(c)
        }

    def usable(self, c: int, variant: dict[str, Any]) -> bool:
        demanded = self.demanded(c)
        return (
            (not variant["needs"] or variant["needs"] in self.problem["allow"])
            and not ("pin" in demanded and variant["backing_store"] != "pinned")
            and not (demanded & {"keep", "whole"} and variant["device"] == "cpu" and c in self.used)
        )

    def split(self, c: int, m: int) -> None:
        """Bools of the blocks of variant m that lie on secondary devices, an interval on each; only
        of the largest component of which every use says what passes between blocks."""
        uses = [use for phase in self.phases for use in phase["uses"]]
        able = [
            n
            for n in range(len(self.components))
            if all(u.get("live_tensors") for u in uses if u["component"] == self.name(n))
        ]
        largest = max(able, key=self.weight_bytes, default=-1)
        if (
            c != largest
            or self.variant(c, m)["device"] != "device"
            or self.demanded(c) & {"exclude", "drop"}
        ):
            return
        for secondary in range(1, 1 + len(self.secondaries)):
            if self.there(c, m, secondary) is None:
                continue
            on = [
                self.sat.new_bool_var(f"on {c} {m} {secondary} {b}")
                for b in range(len(self.blocks_of(c)))
            ]
            begins = [
                self.sat.new_bool_var(f"begins {c} {m} {secondary} {b}") for b in range(len(on))
            ]
            for before, here, begin in zip([0, *on], on, begins, strict=False):
                self.sat.add(here - before <= begin)
                self.sat.add(here <= self.chosen[c, m])
            self.sat.add(sum(begins) <= 1)
            self.blocks_on[c, m, secondary] = on
        every = [on for (of, at, _), on in self.blocks_on.items() if (of, at) == (c, m)]
        for each in zip(*every, strict=True):
            self.sat.add(sum(each) <= 1)

    def weight_bytes(self, c: int) -> int:
        groups, sizes = self.components[c]["groups"], self.variant(c, 0)["block_bytes"]
        return sum(len(of["blocks"]) * nbytes for of, nbytes in zip(groups, sizes, strict=True))

    def blocks_of(self, c: int) -> list[tuple[int, int]]:
        """(group, block) in call order, without the remainder."""
        groups = enumerate(self.components[c]["groups"])
        return [
            (k, i) for k, of in groups if "" not in of["blocks"] for i in range(len(of["blocks"]))
        ]

    def there(self, c: int, m: int, secondary: int) -> dict[str, Any] | None:
        """Variant m on ``secondary``; None where there is none, or its blocks cannot be there. 0:
        variant m itself."""
        here = self.variant(c, m)
        if not secondary or here["device"] == f"device{secondary}":
            return here
        if here["device"] != "device" or here["backing_store"] == "disk":
            return None
        wanted = (here["precision"], here["backing_store"], f"device{secondary}")
        return next(
            (
                v
                for v in self.components[c]["variants"]
                if (v["precision"], v["backing_store"], v["device"]) == wanted
            ),
            None,
        )

    def elsewhere(self, c: int, m: int, k: int, secondary: int = 0) -> Any:
        """Blocks of the group on ``secondary``, or on any."""
        own = [
            (at, on)
            for (of, which, at), on in self.blocks_on.items()
            if (of, which) == (c, m) and secondary in (0, at)
        ]
        return sum(
            here
            for _, on in own
            for (group, _), here in zip(self.blocks_of(c), on, strict=True)
            if group == k
        )

    def count(self, c: int, m: int, k: int, at: int) -> Any:
        """Blocks of the group at ``at``, a secondary device or the device of the variant (0), if
        the variant is chosen."""
        if at and self.variant(c, m)["device"] == "device":
            return self.elsewhere(c, m, k, at)
        return len(self.components[c]["groups"][k]["blocks"]) * self.chosen[c, m] - self.elsewhere(
            c, m, k
        )

    def transfer_seconds(self, secondary: int, nbytes: Any) -> tuple[float, float]:
        one, other = self.problem["hardware"], self.secondaries[secondary - 1]["hardware"]
        ways = ((nbytes[0], one, other), (nbytes[1], other, one))
        found = [
            n
            and a["copy_start_seconds"]
            + n / min(a["d2h_bytes_per_second"], b["h2d_bytes_per_second"])
            for n, a, b in ways
        ]
        return found[0], found[1]

    def transfers(
        self, c: int, m: int, secondary: int, use: dict[str, Any]
    ) -> list[tuple[Any, Any, int]]:
        """For each tensor that passes: whether it crosses to ``secondary``, and back; and its
        bytes."""
        on, found = [0, *self.blocks_on.get((c, m, secondary), ())], []
        for n, (nbytes, maker, users, _) in enumerate(use["live_tensors"] if len(on) > 1 else ()):
            to, back = (
                self.sat.new_bool_var(f"{way} {c} {m} {secondary} {n}") for way in ("to", "back")
            )
            for user in users:
                self.sat.add(to >= on[user] - on[maker])
                self.sat.add(back >= on[maker] - on[user])
            found.append((to, back, nbytes))
        return found

    def groups(self) -> list[tuple[int, int, int, int, int]]:
        """(component, variant, group, blocks in it, secondary device) of all variants that do not
        compute on the CPU, and of their blocks that may lie on secondary devices."""
        found = []
        for c, m in self.chosen:
            device = self.variant(c, m)["device"]
            secondaries = [int(device.removeprefix("device") or 0)] if device != "cpu" else []
            for k, blocks in enumerate(self.components[c]["groups"]):
                more = [
                    at
                    for of, which, at in self.blocks_on
                    if (of, which) == (c, m) and "" not in blocks["blocks"]
                ]
                found += [(c, m, k, len(blocks["blocks"]), at) for at in (*secondaries, *more)]
        return found

    def use(self, number: int, c: int) -> dict[str, Any] | None:
        return next(
            (use for use in self.phases[number]["uses"] if use["component"] == self.name(c)), None
        )

    def calls(self, t: int, c: int, k: int) -> int:
        number, part = self.slots[t]
        use = self.use(number, c)
        total = use["group_calls"][k] if use else 0
        return int({"load": 0, "first": min(total, 1), "steady": max(total - 1, 0)}[part])

    def seconds(
        self, t: int, c: int, m: int, k: int, *, alone: bool = False, secondary: int = 0
    ) -> float:
        """Of one block of the group in one call; ``alone``: without the compute of other code that
        its copies overlap."""
        use, variant = self.use(self.slots[t][0], c), self.there(c, m, secondary)
        if use is None or variant is None:
            return 0.0
        seconds = use["seconds"][k]
        if alone and use["order"]:
            seconds = sum(each for of, _, each in use["order"] if of == k) / len(
                self.components[c]["groups"][k]["blocks"]
            )
        return float(
            variant["slowdown"] * seconds
            + (variant["block_seconds"][k] if variant["block_seconds"] else 0.0)
        )

    def living(self, value: dict[str, Any]) -> list[int]:
        position = {stage: number for number, stage in enumerate(self.order)}
        last = max(
            (position[stage] for stage in value["consumers"] if stage in position), default=-1
        )
        begin = position.get(value["producer"], -1)
        return [
            n for n, phase in enumerate(self.phases) if begin < position[phase["stage"]] <= last
        ]

    def spill_gaps_of(self, v: int) -> list[tuple[int, int]]:
        lives, consumers = self.lives[v], self.problem["values"][v]["consumers"]
        found = []
        for n in lives:
            if self.phases[n]["stage"] in consumers:
                continue
            if n == lives[0] or self.phases[n - 1]["stage"] in consumers:
                end = next(
                    after
                    for after in lives
                    if after > n and self.phases[after]["stage"] in consumers
                )
                if self.phases[n]["uses"] and self.phases[end]["uses"]:
                    found.append((n, end))
        return found


def parts(phase: dict[str, Any]) -> list[str]:
    calls = max((use["calls"] for use in phase["uses"]), default=0)
    return ["load"] * bool(phase["uses"]) + ["first"] + ["steady"] * (calls > 1)


def effective_bytes(problem: dict[str, Any]) -> int:
    """Of a problem, or of a secondary device."""
    hardware = problem["hardware"]
    budget = min(problem["budget_bytes"], hardware["capacity_bytes"])
    return max(
        0,
        int(
            budget
            - hardware["context_bytes"]
            - hardware["workspace_bytes"]
            - problem.get("reserve_bytes", 0)
        ),
    )


def models(problem: dict[str, Any]) -> list[tuple[list[str], list[dict[str, Any]]]]:
    """Every stage order that precedence allows, with every combination of options."""
    stages = list(dict.fromkeys(phase["stage"] for phase in problem["phases"]))
    orders = (
        [stages]
        if problem["precedence"] is None
        else [list(order) for order in permutations(stages)]
    )
    orders = [
        o for o in orders if all(o.index(a) < o.index(b) for a, b in problem["precedence"] or ())
    ]
    plain = {
        stage: [phase for phase in problem["phases"] if phase["stage"] == stage] for stage in stages
    }
    allowed = [
        option
        for option in problem["options"]
        if not option["needs"] or option["needs"] in problem["allow"]
    ]
    runs = [
        [plain[stage], *(list(o["phases"]) for o in allowed if o["stage"] == stage)]
        for stage in stages
    ]
    found = []
    for order in orders:
        for picked in product(*runs):
            run = dict(zip(stages, picked, strict=True))
            found.append((order, [phase for stage in order for phase in run[stage]]))
    return found


def horizon(problem: dict[str, Any]) -> float:
    """Upper bound on the seconds of a sensible run: everything is copied, read and computed
    serially in every call."""
    total, components = 1e-3, {component["name"]: component for component in problem["components"]}
    for component in components.values():
        total += max(
            sum(map(sum, _copies(component, variant))) for variant in component["variants"]
        )
    for phase in (
        *problem["phases"],
        *(phase for option in problem["options"] for phase in option["phases"]),
    ):
        for use in phase["uses"]:
            component = components[use["component"]]
            for k, (calls, seconds) in enumerate(
                zip(use["group_calls"], use["seconds"], strict=True)
            ):
                nb = len(component["groups"][k]["blocks"])
                total += calls * max(
                    sum(_copies(component, v)[k])
                    + nb * (v["slowdown"] * seconds + (v["block_seconds"] or [0.0] * (k + 1))[k])
                    for v in component["variants"]
                )
    for value in problem["values"]:
        total += (
            2
            * value["nbytes"]
            / min(
                problem["hardware"][rate]
                for rate in ("h2d_bytes_per_second", "d2h_bytes_per_second")
            )
        )
    return float(total)


def _copies(component: dict[str, Any], variant: dict[str, Any]) -> list[list[float]]:
    """Per block group: seconds to copy all of its blocks, to read them from disk for a copy, and to
    read them into RAM."""
    none = [0.0] * len(component["groups"])
    seconds = [
        variant["load_seconds"],
        variant["disk_seconds"] or none,
        variant["read_seconds"] or none,
    ]
    return [
        [len(of["blocks"]) * each[k] for each in seconds]
        for k, of in enumerate(component["groups"])
    ]


def least(problem: dict[str, Any], limit: float) -> dict[str, Any]:
    """The least seconds over all stage orders and options. ``limit``: CP-SAT's deterministic time
    for each, a count of its work, so that the answer is the same on a busy machine."""
    best, bound, proven = None, None, True
    for order, phases in models(problem):
        model = Model(problem, order, phases, horizon(problem))
        if best is not None:
            model.sat.add(model.total <= int(best / model.unit))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 2
        solver.parameters.max_deterministic_time = limit
        solver.parameters.relative_gap_limit = 1e-4
        status = solver.solve(model.sat)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            best = min(
                best if best is not None else float("inf"), solver.objective_value * model.unit
            )
        proven = proven and status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
        if status != cp_model.INFEASIBLE:
            found = solver.best_objective_bound * model.unit
            bound = found if bound is None else min(bound, found)
    return {"seconds": best, "bound": bound, "proven": proven}


if __name__ == "__main__":
    for name in sys.argv[2:]:
        sys.stdout.write(
            json.dumps(least(json.loads(Path(name).read_text()), float(sys.argv[1]))) + "\n"
        )
        sys.stdout.flush()

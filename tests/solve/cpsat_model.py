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
        self.model, self.name, self.first = model, name, first
        self.slots = model.slots
        self.counts: dict[
            tuple[int, int, int, int, int], tuple[Any, Any]
        ] = {}  # c, m, k, secondary device, t -> K, d
        self.backing_stores: dict[tuple[int, int, int], Any] = {}
        self.reads: dict[tuple[int, int, int], Any] = {}
        self.spills = {gap: self.yes(f"spill {gap}") for gap in model.gaps}
        self.blocks()
        self.hosts()
        self.seconds = [self.slot(t) for t in range(len(self.slots))]

    def yes(self, name: str) -> Any:
        return self.model.sat.new_bool_var(f"{self.name} {name}")

    def number(self, maximum: int, name: str) -> Any:
        return self.model.sat.new_int_var(0, maximum, f"{self.name} {name}")

    def blocks(self) -> None:
        """K and d of every block group, the transitions between slots, and directives."""
        sat, last = self.model.sat, len(self.slots) - 1
        for c, m, k, nb, device in self.model.groups():
            variant = self.model.variant(c, m)
            for t in range(len(self.slots)):
                present, loads = (
                    self.number(nb, f"K {c} {m} {k} {device} {t}"),
                    self.number(nb, f"d {c} {m} {k} {device} {t}"),
                )
                self.counts[c, m, k, device, t] = present, loads
                sat.add(present + loads <= self.model.count(c, m, k, device))
                if t:
                    previous = sum(self.counts[c, m, k, device, t - 1])
                    sat.add(present <= previous) if variant["movable"] else sat.add(
                        present == previous
                    )
                self.demands(c, m, k, device, t)
            begin, end = self.counts[c, m, k, device, 0][0], sum(self.counts[c, m, k, device, last])
            if self.first is None:
                sat.add(begin == 0)
            else:
                for end_blocks in (sum(self.first.counts[c, m, k, device, last]), end):
                    sat.add(begin <= end_blocks) if variant["movable"] else sat.add(
                        begin == end_blocks
                    )

    def demands(self, c: int, m: int, k: int, device: int, t: int) -> None:
        sat, count, demanded = (
            self.model.sat,
            self.model.count(c, m, k, device),
            self.model.demanded(c),
        )
        present, loads = self.counts[c, m, k, device, t]
        runs_blocks = self.model.calls(t, c, k)
        number, part = self.slots[t]
        if "keep" in demanded and any(self.model.calls(slot, c, k) for slot in range(t)):
            sat.add(present == count)
        if demanded & {"keep", "whole"} and runs_blocks:
            sat.add(present + loads == count)
        if "exclude" in demanded and self.model.components[c]["groups"][k]["streamable"]:
            sat.add(present + loads == 0)
        if "drop" in demanded:
            has_use = self.model.use(number, c) is not None
            if not has_use:
                sat.add(present + loads == 0)
            elif part == "load":
                sat.add(present == 0)

    def hosts(self) -> None:
        """Which backing stores are held, read and dropped; copies and compute on the CPU need
        them."""
        sat = self.model.sat
        for c, m in self.model.selections:
            if c not in self.model.used_components:
                continue
            variant, y = self.model.variant(c, m), self.model.selections[c, m]
            early = variant["backing_store"] == "disk" or not variant["read_seconds"]
            previous = (
                (y if early else 0)
                if self.first is None
                else self.first.backing_stores[c, m, len(self.slots) - 1]
            )
            for t in range(len(self.slots)):
                backing_store, is_read = (
                    self.yes(f"backing store {c} {m} {t}"),
                    self.yes(f"read {c} {m} {t}"),
                )
                self.backing_stores[c, m, t], self.reads[c, m, t] = backing_store, is_read
                if early or self.first is not None:
                    sat.add(is_read == 0)
                sat.add(backing_store <= previous + is_read)
                sat.add(backing_store >= is_read)
                sat.add(backing_store <= y)
                if self.model.problem["runs"] > 1:
                    sat.add(backing_store >= previous)
                previous = backing_store
                if (
                    variant["device"] == "cpu"
                    and self.slots[t][1] != "load"
                    and self.model.use(self.slots[t][0], c)
                ):
                    sat.add(backing_store >= y)
            sat.add(sum(self.reads[c, m, t] for t in range(len(self.slots))) <= 1)

    def slot(self, t: int) -> Any:
        """Seconds of the slot: the longest of compute, copies and reads."""
        model, sat, (number, part) = self.model, self.model.sat, self.slots[t]
        horizon = model.horizon
        busy = {c for c, m, k, nb, device in model.groups() if model.calls(t, c, k)}
        copies_to: list[list[Any]] = [[] for _ in range(1 + len(model.secondaries))]
        bytes_on: list[list[Any]] = [[] for _ in range(1 + len(model.secondaries))]
        copies, bytes_held = copies_to[0], bytes_on[0]
        reads, copies_of, single_buffered, ring_buffers = [], {}, {}, {}
        streamed_of: dict[tuple[int, int, int], Any] = {}
        for c, m, k, nb, device in model.groups():
            variant, count, n = (
                model.variant(c, m),
                model.count(c, m, k, device),
                model.calls(t, c, k),
            )
            present, loads = self.counts[c, m, k, device, t]
            streamable = (
                model.components[c]["groups"][k]["streamable"]
                and variant["streamable"]
                and variant["movable"]
                and not device
            )
            x = loads
            if part == "steady" and c in busy:
                sat.add(loads == 0)
            if n and not streamable:
                sat.add(present == count)
                x = 0
            elif n:
                streamed = self.yes(f"streamed {c} {m} {k} {t}")
                sat.add(count - present - loads <= nb * streamed)
                single = self.yes(f"single-buffered {c} {m} {k} {t}")
                ring_buffers.setdefault((c, m), []).append(
                    (variant["block_bytes"][k], streamed, single)
                )
                single_buffered[c, m, k] = single
                x = (n if part == "steady" else 1) * (count - present)
                streamed_of[c, m, k] = x - loads
            if c in model.used_components:
                sat.add(x <= max(1, n) * nb * self.backing_stores[c, m, t])
            if not device:
                copies_of[c, m, k] = x
            copies_to[device].append(
                model.units(model.variant_on(c, m, device)["load_seconds"][k]) * x
            )
            if variant["backing_store"] == "disk":
                reads.append(model.units(variant["disk_seconds"][k]) * x)
            bytes_on[device].append(up(variant["block_bytes"][k]) * (present + loads))
        bytes_held += [self.ring_buffer(t, c, m, blocks) for (c, m), blocks in ring_buffers.items()]
        self.budgets(t, bytes_held)
        for secondary in range(1, len(bytes_on)):
            self.secondary_budget(t, secondary, bytes_on[secondary])
        group_seconds = [
            self.group_seconds(t, c, k, copies_of, streamed_of, single_buffered, horizon)
            for c in sorted(busy)
            for k in range(len(model.components[c]["groups"]))
        ]
        for c, m in model.selections:
            if model.variant(c, m)["device"] == "cpu":
                for k, blocks in enumerate(model.components[c]["groups"]):
                    group_seconds.append(
                        model.units(
                            model.calls(t, c, k) * len(blocks["blocks"]) * model.seconds(t, c, m, k)
                        )
                        * model.selections[c, m]
                    )
        group_seconds += [
            seconds
            for secondary in range(1, len(bytes_on))
            for seconds in self.secondary_seconds(t, secondary)
        ]
        hardware = model.problem["hardware"]
        for (v, begin, end), is_spilled in self.spills.items():
            nbytes = model.problem["values"][v]["nbytes"]
            if part == "load" and number == begin:
                copies.append(model.units(nbytes / hardware["d2h_bytes_per_second"]) * is_spilled)
            if part == "load" and number == end:
                copies.append(model.units(nbytes / hardware["h2d_bytes_per_second"]) * is_spilled)
        for (c, m, slot), is_read in self.reads.items():
            if slot == t and model.variant(c, m)["read_seconds"]:
                counts = [len(blocks["blocks"]) for blocks in model.components[c]["groups"]]
                read_seconds = model.variant(c, m)["read_seconds"]
                reads.append(
                    model.units(sum(n * s for n, s in zip(counts, read_seconds, strict=True)))
                    * is_read
                )
        seconds = self.number(horizon, f"D {t}")
        for channel in (group_seconds, reads, *copies_to):
            sat.add(seconds >= sum(channel))
        return seconds

    def group_seconds(
        self,
        t: int,
        c: int,
        k: int,
        copies_of: dict[tuple[int, int, int], Any],
        streamed_of: dict[tuple[int, int, int], Any],
        single_buffered: dict[Any, Any],
        horizon: int,
    ) -> Any:
        """Seconds of a block group: the longest of its compute with what reads take from it, its
        copies (plus its compute where single-buffered), and its reads."""
        model, n = self.model, self.model.calls(t, c, k)
        variants = [
            (m, model.variant(c, m))
            for index, m in model.selections
            if index == c and model.variant(c, m)["device"] != "cpu"
        ]
        if not n or not variants:
            return 0
        nb = len(model.components[c]["groups"][k]["blocks"])
        longest = self.number(horizon, f"E {t} {c} {k}")
        compute = sum(
            model.units(n * nb * model.seconds(t, c, m, k)) * model.selections[c, m]
            for m, _ in variants
        )
        fewer = sum(
            model.units(n * model.seconds(t, c, m, k, without_other_code=True))
            * model.secondary_blocks(c, m, k)
            for m, _ in variants
        )
        lost_seconds = sum(
            model.units(variant["lost_seconds"][k]) * streamed_of[c, m, k]
            for m, variant in variants
            if (c, m, k) in streamed_of and variant.get("lost_seconds")
        )
        model.sat.add(longest >= compute - fewer + lost_seconds)
        variants = [(m, variant) for m, variant in variants if (c, m, k) in copies_of]
        model.sat.add(
            longest
            >= sum(
                model.units(variant["load_seconds"][k]) * copies_of[c, m, k]
                for m, variant in variants
            )
        )
        for m, variant in variants:
            if (c, m, k) in single_buffered:
                block_seconds = model.units(n * nb * model.seconds(t, c, m, k))
                saved_seconds = model.units(
                    n * model.seconds(t, c, m, k, without_other_code=True)
                ) * model.secondary_blocks(c, m, k)
                model.sat.add(
                    longest
                    >= model.units(variant["load_seconds"][k]) * copies_of[c, m, k]
                    + block_seconds * single_buffered[c, m, k]
                    - saved_seconds
                )
        reads = [
            (m, variant["disk_seconds"][k])
            for m, variant in variants
            if variant["backing_store"] == "disk"
        ]
        model.sat.add(
            longest >= sum(model.units(seconds) * copies_of[c, m, k] for m, seconds in reads)
        )
        return longest

    def secondary_seconds(self, t: int, secondary: int) -> list[Any]:
        """Seconds of blocks of a split component on ``secondary``, and of what crosses to it and
        back."""
        model, (number, part), terms = self.model, self.slots[t], []
        for c, m in model.selections if part != "load" else ():
            if (use := model.use(number, c)) is None:
                continue
            calls = {"first": min(use["calls"], 1), "steady": use["calls"] - 1}[part]
            if model.variant(c, m)["device"] == f"device{secondary}":
                terms.append(
                    model.units(calls * sum(model.transfer_seconds(secondary, use["transfer"])))
                    * model.selections[c, m]
                )
            for (k, _), is_there in zip(
                model.blocks_of(c), model.blocks_on.get((c, m, secondary), ()), strict=False
            ):
                terms.append(
                    model.units(
                        model.calls(t, c, k)
                        * model.seconds(t, c, m, k, without_other_code=True, secondary=secondary)
                    )
                    * is_there
                )
            for is_to, is_back, nbytes in model.transfers(c, m, secondary, use):
                seconds = model.transfer_seconds(secondary, (nbytes, nbytes))
                terms += [
                    model.units(calls * seconds_of_way) * is_transferred
                    for seconds_of_way, is_transferred in zip(
                        seconds, (is_to, is_back), strict=True
                    )
                ]
        return terms

    def secondary_budget(self, t: int, secondary: int, weights: list[Any]) -> None:
        """The budget of ``secondary``: weights, and of what computes there activation as traced,
        scratch, and what crosses to it."""
        model, sat, (number, part) = self.model, self.model.sat, self.slots[t]
        phase, effective = model.phases[number], effective_bytes(model.secondaries[secondary - 1])
        sat.add(UNIT * sum(weights) <= effective)
        activation = {"load": 0, "first": phase["first_bytes"], "steady": phase["steady_bytes"]}[
            part
        ]
        for c, m in model.selections if part != "load" else ():
            if (use := model.use(number, c)) is None:
                continue
            nbytes = activation + model.variant(c, m)["scratch_bytes"]
            if model.variant(c, m)["device"] == f"device{secondary}":
                sat.add(
                    UNIT * sum(weights) + (nbytes + use["transfer"][0]) * model.selections[c, m]
                    <= effective
                )
            for b, is_there in enumerate(model.blocks_on.get((c, m, secondary), ()), 1):
                arguments = [
                    up(n)
                    for n, _, users, is_input in use["live_tensors"]
                    if b in users or (is_input and any(0 < u < b for u in users))
                ]
                sat.add(
                    UNIT * sum(weights) + (nbytes + UNIT * sum(arguments)) * is_there <= effective
                )

    def ring_buffer(self, t: int, c: int, m: int, blocks: list[tuple[int, Any, Any]]) -> Any:
        """Size of the ring buffer: the largest streamed block, and a second block of every group
        that is not single-buffered."""
        maximum = max(up(nbytes) for nbytes, _, _ in blocks)
        largest, extra = (
            self.number(maximum, f"largest {t} {c} {m}"),
            self.number(maximum, f"beside {t} {c} {m}"),
        )
        for nbytes, streamed, single in blocks:
            self.model.sat.add(largest >= up(nbytes) * streamed)
            self.model.sat.add(extra >= up(nbytes) * streamed - up(nbytes) * single)
        return largest + extra

    def budgets(self, t: int, bytes_held: list[Any]) -> None:
        """Budgets of the device, of RAM and of page-locked RAM."""
        model, sat, (number, part) = self.model, self.model.sat, self.slots[t]
        phase, values = model.phases[number], model.problem["values"]
        activation = {"load": 0, "first": phase["first_bytes"], "steady": phase["steady_bytes"]}[
            part
        ]
        variants = [
            (m, model.variant(c, m), model.selections[c, m])
            for use in phase["uses"]
            for c, m in model.selections
            if model.name(c) == use["component"]
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
            selections = [y for _, variant, y in variants if devices(variant["device"])]
            for y in selections:
                sat.add(flag + y <= 1)
            sat.add(sum(selections) >= 1 - flag) if variants else sat.add(flag == 0)
        scratches = (
            [variant["scratch_bytes"] * y for _, variant, y in variants] if part != "load" else []
        )
        absent, host = [], []
        for (v, begin, end), is_spilled in self.spills.items():
            if begin <= number <= end:
                leaves, comes = (number, part) == (begin, "load"), (number, part) == (end, "load")
                absent += [values[v]["nbytes"] * is_spilled] if number < end and not leaves else []
                host += [values[v]["nbytes"] * is_spilled] if number < end or comes else []
        fixed = phase["input_bytes"] + sum(
            value["nbytes"] for v, value in enumerate(values) if number in model.lives[v]
        )
        for scratch in scratches or [0]:
            total = (
                activation * (1 - off_device)
                + pipeline_code * off_device
                + scratch
                + fixed
                - sum(absent)
            )
            ceiling = sum(variant["scratch_bytes"] for _, variant, _ in variants)
            sat.add(UNIT * sum(bytes_held) + total <= model.effective + ceiling * off_device)
        sat.add(
            UNIT * sum(bytes_held)
            + activation * (1 - off_device)
            + pipeline_code * off_device
            + fixed
            - sum(absent)
            <= model.effective
        )
        locked_bytes = []
        for (c, m, slot), backing_store in self.backing_stores.items():
            if slot == t:
                variant = model.variant(c, m)
                host.append(
                    variant["host_bytes"] * backing_store
                    + variant["transient_bytes"] * self.reads[c, m, t]
                )
                locked_bytes += (
                    [variant["host_bytes"] * backing_store]
                    if variant["backing_store"] != "pageable"
                    else []
                )
        sat.add(sum(host) + activation * on_cpu <= model.problem["ram_bytes"])
        if model.problem["pinned_bytes"] is not None:
            sat.add(sum(locked_bytes) <= model.problem["pinned_bytes"])


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
        self.used_components = {
            c
            for c in range(len(self.components))
            if any(self.use(n, c) for n in range(len(phases)))
        }
        self.lives = [self.living(value) for value in problem["values"]]
        self.gaps = [(v, *gap) for v in range(len(self.lives)) for gap in self.spill_gaps_of(v)]
        self.selections: dict[tuple[int, int], Any] = {}
        for c, component in enumerate(self.components):
            usable = [
                m for m, variant in enumerate(component["variants"]) if self.usable(c, variant)
            ]
            self.selections |= {(c, m): self.sat.new_bool_var(f"y {c} {m}") for m in usable}
            self.sat.add_exactly_one([self.selections[c, m] for m in usable])
        self.blocks_on: dict[
            tuple[int, int, int], list[Any]
        ] = {}  # c, m, secondary device -> per block in call order, whether it is there
        for c, m in list(self.selections):
            self.split(c, m)
        if problem["disk_bytes"] is not None:
            stored_bytes = (
                self.variant(c, m)["stored_bytes"] * y
                for (c, m), y in self.selections.items()
                if c in self.used_components
            )
            self.sat.add(sum(stored_bytes) <= problem["disk_bytes"])
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
            directive["placement"]
            for directive in self.problem["directives"]
            if directive["component"] == self.name(c)
        }

    def usable(self, c: int, variant: dict[str, Any]) -> bool:
        demanded = self.demanded(c)
        return (
            (not variant["needs"] or variant["needs"] in self.problem["allow"])
            and not ("pin" in demanded and variant["backing_store"] != "pinned")
            and not (
                demanded & {"keep", "whole"}
                and variant["device"] == "cpu"
                and c in self.used_components
            )
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
            if self.variant_on(c, m, secondary) is None:
                continue
            is_there = [
                self.sat.new_bool_var(f"on {c} {m} {secondary} {b}")
                for b in range(len(self.blocks_of(c)))
            ]
            begins = [
                self.sat.new_bool_var(f"begins {c} {m} {secondary} {b}")
                for b in range(len(is_there))
            ]
            for previous, current, begin in zip([0, *is_there], is_there, begins, strict=False):
                self.sat.add(current - previous <= begin)
                self.sat.add(current <= self.selections[c, m])
            self.sat.add(sum(begins) <= 1)
            self.blocks_on[c, m, secondary] = is_there
        columns = [
            column for (index, n, _), column in self.blocks_on.items() if (index, n) == (c, m)
        ]
        for row in zip(*columns, strict=True):
            self.sat.add(sum(row) <= 1)

    def weight_bytes(self, c: int) -> int:
        groups, sizes = self.components[c]["groups"], self.variant(c, 0)["block_bytes"]
        return sum(
            len(group["blocks"]) * nbytes for group, nbytes in zip(groups, sizes, strict=True)
        )

    def blocks_of(self, c: int) -> list[tuple[int, int]]:
        """(group, block) in call order, without the remainder."""
        groups = enumerate(self.components[c]["groups"])
        return [
            (k, i)
            for k, group in groups
            if "" not in group["blocks"]
            for i in range(len(group["blocks"]))
        ]

    def variant_on(self, c: int, m: int, secondary: int) -> dict[str, Any] | None:
        """Variant m on ``secondary``; None where there is none, or its blocks cannot be there. 0:
        variant m itself."""
        main_variant = self.variant(c, m)
        if not secondary or main_variant["device"] == f"device{secondary}":
            return main_variant
        if main_variant["device"] != "device" or main_variant["backing_store"] == "disk":
            return None
        key = (main_variant["precision"], main_variant["backing_store"], f"device{secondary}")
        return next(
            (
                v
                for v in self.components[c]["variants"]
                if (v["precision"], v["backing_store"], v["device"]) == key
            ),
            None,
        )

    def secondary_blocks(self, c: int, m: int, k: int, secondary: int = 0) -> Any:
        """Blocks of the group on ``secondary``, or on any."""
        pairs = [
            (device, column)
            for (index, number, device), column in self.blocks_on.items()
            if (index, number) == (c, m) and secondary in (0, device)
        ]
        return sum(
            is_there
            for _, column in pairs
            for (group, _), is_there in zip(self.blocks_of(c), column, strict=True)
            if group == k
        )

    def count(self, c: int, m: int, k: int, device: int) -> Any:
        """Blocks of the group at ``at``, a secondary device or the device of the variant (0), if
        the variant is chosen."""
        if device and self.variant(c, m)["device"] == "device":
            return self.secondary_blocks(c, m, k, device)
        return len(self.components[c]["groups"][k]["blocks"]) * self.selections[
            c, m
        ] - self.secondary_blocks(c, m, k)

    def transfer_seconds(self, secondary: int, nbytes: Any) -> tuple[float, float]:
        main, secondary_hardware = (
            self.problem["hardware"],
            self.secondaries[secondary - 1]["hardware"],
        )
        ways = ((nbytes[0], main, secondary_hardware), (nbytes[1], secondary_hardware, main))
        seconds = [
            n
            and a["copy_start_seconds"]
            + n / min(a["d2h_bytes_per_second"], b["h2d_bytes_per_second"])
            for n, a, b in ways
        ]
        return seconds[0], seconds[1]

    def transfers(
        self, c: int, m: int, secondary: int, use: dict[str, Any]
    ) -> list[tuple[Any, Any, int]]:
        """For each tensor that passes: whether it crosses to ``secondary``, and back; and its
        bytes."""
        is_there, rows = [0, *self.blocks_on.get((c, m, secondary), ())], []
        for n, (nbytes, maker, users, _) in enumerate(
            use["live_tensors"] if len(is_there) > 1 else ()
        ):
            is_to, is_back = (
                self.sat.new_bool_var(f"{way} {c} {m} {secondary} {n}") for way in ("to", "back")
            )
            for user in users:
                self.sat.add(is_to >= is_there[user] - is_there[maker])
                self.sat.add(is_back >= is_there[maker] - is_there[user])
            rows.append((is_to, is_back, nbytes))
        return rows

    def groups(self) -> list[tuple[int, int, int, int, int]]:
        """(component, variant, group, blocks in it, secondary device) of all variants that do not
        compute on the CPU, and of their blocks that may lie on secondary devices."""
        rows = []
        for c, m in self.selections:
            device = self.variant(c, m)["device"]
            secondaries = [int(device.removeprefix("device") or 0)] if device != "cpu" else []
            for k, blocks in enumerate(self.components[c]["groups"]):
                mirror_devices = [
                    device
                    for index, number, device in self.blocks_on
                    if (index, number) == (c, m) and "" not in blocks["blocks"]
                ]
                rows += [
                    (c, m, k, len(blocks["blocks"]), place)
                    for place in (*secondaries, *mirror_devices)
                ]
        return rows

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
        self,
        t: int,
        c: int,
        m: int,
        k: int,
        *,
        without_other_code: bool = False,
        secondary: int = 0,
    ) -> float:
        """Of one block of the group in one call; ``alone``: without the compute of other code that
        its copies overlap."""
        use, variant = self.use(self.slots[t][0], c), self.variant_on(c, m, secondary)
        if use is None or variant is None:
            return 0.0
        seconds = use["seconds"][k]
        if without_other_code and use["order"]:
            seconds = sum(
                block_seconds for group, _, block_seconds in use["order"] if group == k
            ) / len(self.components[c]["groups"][k]["blocks"])
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
        gaps = []
        for n in lives:
            if self.phases[n]["stage"] in consumers:
                continue
            if n == lives[0] or self.phases[n - 1]["stage"] in consumers:
                end = next(
                    phase
                    for phase in lives
                    if phase > n and self.phases[phase]["stage"] in consumers
                )
                if self.phases[n]["uses"] and self.phases[end]["uses"]:
                    gaps.append((n, end))
        return gaps


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
    options = [
        option
        for option in problem["options"]
        if not option["needs"] or option["needs"] in problem["allow"]
    ]
    runs = [
        [plain[stage], *(list(o["phases"]) for o in options if o["stage"] == stage)]
        for stage in stages
    ]
    choices = []
    for order in orders:
        for stage_phases in product(*runs):
            run = dict(zip(stages, stage_phases, strict=True))
            choices.append((order, [phase for stage in order for phase in run[stage]]))
    return choices


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
    """Per block group: seconds to copy all of its blocks, to read them from disk for a copy and
    into RAM, and of compute lost to reads."""
    none = [0.0] * len(component["groups"])
    seconds = [
        variant["load_seconds"],
        variant["disk_seconds"] or none,
        variant["read_seconds"] or none,
        variant.get("lost_seconds") or none,
    ]
    return [
        [len(group["blocks"]) * seconds_of_kind[k] for seconds_of_kind in seconds]
        for k, group in enumerate(component["groups"])
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
            solver_bound = solver.best_objective_bound * model.unit
            bound = solver_bound if bound is None else min(bound, solver_bound)
    return {"seconds": best, "bound": bound, "proven": proven}


if __name__ == "__main__":
    for name in sys.argv[2:]:
        sys.stdout.write(
            json.dumps(least(json.loads(Path(name).read_text()), float(sys.argv[1]))) + "\n"
        )
        sys.stdout.flush()

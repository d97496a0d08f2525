"""Memory of each phase from hand-written recordings, by device. Sizes are in units of 512 bytes
where nothing is reserved."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from graphrun.model.allocator import Counting
from graphrun.model.hardware import ProcessorRates
from graphrun.profile.hardware import hardware
from graphrun.profile.phase_memory import PhaseMemory, phase_memories_of
from graphrun.profile.problems import phase_spans
from graphrun.profile.processor import cpu_estimate
from graphrun.profile.recording import Call, Kernel, MemoryEvent, Recording, StageEnd
from graphrun.units import MIB

UNIT = 512


def recording(*items: Any) -> Recording:
    """``(key, units)`` allocates, ``(key, 0)`` releases, ``"a"`` enters component a, ``("a", units,
    scratch)`` does so and allocates inside, ``"."`` ends the stage."""
    recorded_items: list[Any] = []
    for item in items:
        if item == ".":
            recorded_items.append(StageEnd("stage"))
        elif isinstance(item, str):
            recorded_items.append(Call(item))
        elif isinstance(item[0], str):
            scratch = [MemoryEvent(0, item[2] * UNIT, scratch=True)] if item[2] else []
            recorded_items.append(
                Call(item[0], events=[MemoryEvent(1, item[1] * UNIT), *scratch, MemoryEvent(1, 0)])
            )
        else:
            recorded_items.append(MemoryEvent(item[0], item[1] * UNIT))
    return Recording(recorded_items)


def phase_memories(*items: Any, device: str = "sim") -> list[PhaseMemory]:
    record = recording(*items)
    return phase_memories_of(record, phase_spans(record.entries()), hardware(device))


def test_a_phase_lasts_until_the_next_phase_s_first_entry() -> None:
    first, second = phase_memories((1, 2), "a", (2, 5), (2, 0), ".", (3, 4), "b", ".")
    assert (first.entry_bytes, first.first_bytes) == (2 * UNIT, 7 * UNIT)
    assert second.entry_bytes == 6 * UNIT


def test_the_peak_before_the_first_entry_counts_as_entry_bytes() -> None:
    (phase_memory,) = phase_memories((1, 9), (1, 0), (2, 1), "a", ".")
    assert phase_memory.entry_bytes == 9 * UNIT


def test_the_first_call_and_later_calls_have_separate_peaks() -> None:
    (phase_memory,) = phase_memories("a", (1, 3), "a", (2, 4), "a", ".")
    assert (phase_memory.first_bytes, phase_memory.steady_bytes) == (3 * UNIT, 7 * UNIT)


def test_the_first_part_lasts_until_every_component_of_a_loop_was_entered() -> None:
    (phase_memory,) = phase_memories("a", (1, 1), "b", (2, 1), *("a", "b") * 3, (3, 5), ".")
    assert (phase_memory.first_bytes, phase_memory.steady_bytes) == (2 * UNIT, 7 * UNIT)


def test_memory_inside_a_call_adds_to_memory_outside() -> None:
    (phase_memory,) = phase_memories((1, 2), ("a", 6, 0), ".")
    assert phase_memory.first_bytes == 8 * UNIT


def test_scratch_counts_on_a_card_and_not_on_sim() -> None:
    units = 4 * MIB // UNIT
    assert phase_memories(("a", units, units), ".")[0].first_bytes == 4 * MIB
    assert (
        phase_memories(("a", units, 10 * units), ".", device="rtx4090")[0].first_bytes >= 44 * MIB
    )


@pytest.mark.parametrize("device", ["sim", "rtx4090"])
def test_empty_pages_are_released_when_a_phase_is_entered(device: str) -> None:
    units = 64 * MIB // UNIT
    first, second = phase_memories(("a", units, 0), ".", ("b", 1, 0), ".", device=device)
    assert first.first_bytes >= 64 * MIB
    assert second.entry_bytes == 0
    assert second.first_bytes <= 2 * MIB


class Summing:
    """Counts as `Counting` does, but is unknown to the replay, which then repeats every call."""

    def __init__(self) -> None:
        self.counting = Counting()
        self.allocate, self.release = self.counting.allocate, self.counting.release
        self.trim = self.counting.trim

    @property
    def used_bytes(self) -> int:
        return self.counting.used_bytes


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_calls_that_are_not_repeated_count_as_if_they_were(seed: int, keeps: bool) -> None:
    random = Random(seed)

    def call(name: str) -> Call:
        keys, events = range(1, random.randint(2, 6)), list[MemoryEvent]()
        for key in keys:
            events.append(MemoryEvent(key, random.randint(1, 9) * UNIT))
            if key % 2:
                events.append(MemoryEvent(key, 0))
        table = [key for key in keys if not key % 2]
        keeps_table = bool(table) and random.random() < 0.5
        events += [] if keeps_table else [MemoryEvent(key, 0) for key in table]
        return Call(name, events=events, persistent_keys=table if keeps_table else [])

    calls, items, live, key = [call("a"), call("a"), call("b")], list[Any](), list[int](), 0
    for _ in range(60):
        choice = random.random()
        if choice < 0.4:
            items.append(random.choice(calls))
        elif choice < 0.7:
            key += 1
            live.append(key)
            items.append(MemoryEvent(key, random.randint(1, 9) * UNIT))
        elif live:
            items.append(MemoryEvent(live.pop(random.randrange(len(live))), 0))
        elif items:
            items.append(StageEnd("stage"))
    record = Recording([calls[0], *items, StageEnd("stage")], keeps_tensors=keeps)
    spans = phase_spans(record.entries())
    assert phase_memories_of(record, spans, hardware("sim")) == phase_memories_of(
        record, spans, hardware("sim"), Summing
    )


def test_a_kernel_generated_for_amx_counts_in_the_first_phase_that_needs_it() -> None:
    estimate = cpu_estimate()
    assert isinstance(estimate.kernels, ProcessorRates)
    small, large = (Kernel("matmul", "bfloat16", 1.0, 1, shape=(1, rows, 8, 8)) for rows in (8, 16))
    record = Recording(
        [
            Call("a", kernels=[small, small]),
            *[Call("b", kernels=[small, large]) for _ in range(2)],
            StageEnd("stage"),
            Call("a", kernels=[Kernel("matmul", "float32", 1.0, 1, shape=(1, 8, 8, 8)), small]),
            StageEnd("stage"),
        ]
    )
    for amx, generated in ((True, [1, 1, 0]), (False, [0, 0, 0])):
        cpu = replace(estimate, kernels=replace(estimate.kernels, amx=amx))
        memories = phase_memories_of(record, phase_spans(record.entries()), cpu)
        assert [memory.first_bytes for memory in memories] == [count * MIB for count in generated]
        assert all(memory.steady_bytes == 0 for memory in memories)

"""Memory of each phase from hand-written recordings, by device. Sizes are in units of 512 bytes
where nothing is reserved."""

from __future__ import annotations

from typing import Any

import pytest

from graphrun.profile.hardware import hardware
from graphrun.profile.phase_memory import PhaseMemory, phase_memories_of
from graphrun.profile.problems import phase_spans
from graphrun.profile.recording import Call, MemoryEvent, Recording, StageEnd
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

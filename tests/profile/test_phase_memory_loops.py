"""Phase memory over a loop: the peak of all iterations, including a growing history and alternating
components."""

from __future__ import annotations

import pytest

from graphrun.profile.hardware import hardware
from graphrun.profile.phase_memory import PhaseMemory, phase_memories_of
from graphrun.profile.problems import phase_spans
from graphrun.profile.recording import Call, MemoryEvent, Recording, StageEnd
from graphrun.units import MIB

SIM = hardware("sim")


def call(component: str, mib: int, scratch: tuple[int, int] | None = None) -> Call:
    """One call that allocates ``mib`` MiB, and scratch (bytes, bytes on compute capability 9.0)
    beside it."""
    events = [MemoryEvent(0, scratch[0], True, scratch[1])] if scratch else []
    return Call(component, events=[MemoryEvent(1, mib * MIB), *events, MemoryEvent(1, 0)])


def phase_memories(recording: Recording, card: str = "sim") -> list[PhaseMemory]:
    return phase_memories_of(recording, phase_spans(recording.entries()), hardware(card))


def test_a_growing_history_makes_the_last_iteration_the_peak() -> None:
    items: list[MemoryEvent | Call | StageEnd] = []
    for step in range(6):
        items.append(MemoryEvent(step + 1, 8 * MIB))  # the history that the op keeps
        items.append(call("dit", 10 * (step + 1)))
    (phase_memory,) = phase_memories(Recording([*items, StageEnd("denoise")]))
    assert (phase_memory.entry_bytes, phase_memory.first_bytes) == (8 * MIB, (8 + 10) * MIB)
    assert phase_memory.steady_bytes == (6 * 8 + 60) * MIB


def test_the_peak_of_a_loop_is_that_of_its_largest_iteration() -> None:
    items = [call("dit", mib) for mib in (10, 70, 20)]
    (phase_memory,) = phase_memories(Recording([*items, StageEnd("denoise")]))
    assert (phase_memory.first_bytes, phase_memory.steady_bytes) == (10 * MIB, 70 * MIB)


def test_alternating_components_share_a_phase_and_its_first_part_ends_when_each_was_entered() -> (
    None
):
    items = [call(name, mib) for _ in range(5) for name, mib in (("controlnet", 30), ("unet", 50))]
    recording = Recording([*items, StageEnd("denoise")])
    assert phase_spans(recording.entries()) == [(0, 10)]
    (phase_memory,) = phase_memories(recording)
    assert (phase_memory.first_bytes, phase_memory.steady_bytes) == (50 * MIB, 50 * MIB)


@pytest.mark.parametrize("keeps", [False, True])
def test_tables_that_a_component_keeps_are_allocated_once_and_live_in_later_calls(
    keeps: bool,
) -> None:
    """A component of a live pipeline (``keeps``) has its table in later phases too."""
    steps = ((1, 3 * MIB), (1, 0), (2, 8 * MIB), (3, 20 * MIB), (3, 0), (2, 0))
    dit = Call("dit", events=[MemoryEvent(*step) for step in steps], persistent_keys=[2])
    items = [dit, dit, MemoryEvent(9, 30 * MIB), call("vae", 10)]
    denoise, decode = phase_memories(Recording([*items, StageEnd("make")], keeps_tensors=keeps))
    assert (denoise.first_bytes, denoise.steady_bytes) == (28 * MIB, (8 + 30) * MIB)
    table_bytes = 8 * MIB if keeps else 0
    assert (decode.entry_bytes, decode.first_bytes) == (
        table_bytes + 30 * MIB,
        table_bytes + (30 + 10) * MIB,
    )


@pytest.mark.parametrize("stages", [("make",), ("denoise", "decode")])
def test_tables_in_attributes_stay_until_the_stage_ends(stages: tuple[str, ...]) -> None:
    steps = ((1, 8 * MIB), (2, 3 * MIB))  # an attribute, and a result in `functools.lru_cache`
    events = [MemoryEvent(*step) for step in steps]
    dit = Call("dit", events=events, persistent_keys=[1, 2], lasting_keys=[1])
    ends = [StageEnd(stage) for stage in stages]
    items = [dit, *ends[:-1], call("vae", 10), ends[-1]]
    _, decode = phase_memories(Recording(items))
    table_bytes = 8 * MIB if len(stages) == 1 else 0
    assert (decode.entry_bytes, decode.first_bytes) == (table_bytes, table_bytes + 10 * MIB)


def test_two_experts_one_after_another_are_two_phases() -> None:
    items = [call(name, 10) for name in ("high", "high", "high", "low", "low")]
    assert phase_spans(Recording([*items, StageEnd("denoise")]).entries()) == [(0, 3), (3, 5)]


def test_scratch_counts_on_cards_only_and_differs_on_hopper() -> None:
    recording = Recording([call("vae", 10, (6 * MIB, 4 * MIB)), StageEnd("decode")])
    peaks = {
        card: phase_memories(recording, card)[0].first_bytes // MIB
        for card in ("sim", "rtx4090", "h100")
    }
    assert peaks == {"sim": 10, "rtx4090": 16, "h100": 14}

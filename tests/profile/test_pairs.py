"""Which calls come in pairs, of which neither needs the result of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from graphrun.profile.pairs import spans_with_pairs
from graphrun.profile.recording import Call, MemoryEvent, Recording, StageEnd

PREDICTION = 4096
CALL = Call(
    "transformer",
    "forward",
    [MemoryEvent(1, PREDICTION), MemoryEvent(1, 0)],
    output_bytes=PREDICTION,
    results=[1],
)
NOTHING, TIME_STEP, LATENTS = (), (512,), (PREDICTION, PREDICTION)


def recording_of(
    calls: Sequence[Call], *gaps: Sequence[int], stage: Sequence[int] = LATENTS
) -> Recording:
    """``calls``; after each, its result and the allocations of one of ``gaps``."""
    items: list[MemoryEvent | Call | StageEnd] = [MemoryEvent(5, PREDICTION)]
    for number, (call, sizes) in enumerate(zip(calls, (*gaps, stage), strict=True), 1):
        items += [call, MemoryEvent(100 * number, PREDICTION)]
        items += [MemoryEvent(100 * number + n, nbytes) for n, nbytes in enumerate(sizes, 1)]
    return Recording([*items, StageEnd("denoise"), MemoryEvent(7, PREDICTION)])


@pytest.mark.parametrize("sizes", [NOTHING, TIME_STEP])
def test_calls_with_guidance_after_every_second_one_are_pairs(sizes: Sequence[int]) -> None:
    recording = recording_of([CALL] * 4, sizes, LATENTS, sizes)
    assert spans_with_pairs(recording, [(0, 4)]) == {(0, 4)}


@pytest.mark.parametrize(
    ("gaps", "stage"),
    [
        ((LATENTS, LATENTS, LATENTS), LATENTS),  # one call a step
        ((NOTHING, NOTHING, NOTHING), LATENTS),  # a chain of calls
        ((NOTHING, LATENTS, LATENTS), LATENTS),  # code reads a first prediction
        ((NOTHING, LATENTS, NOTHING), NOTHING),
    ],
)
def test_other_calls_are_no_pairs(gaps: Sequence[Sequence[int]], stage: Sequence[int]) -> None:
    assert not spans_with_pairs(recording_of([CALL] * 4, *gaps, stage=stage), [(0, 4)])


def test_two_calls_or_kept_tensors_or_two_entries_are_no_pairs() -> None:
    assert not spans_with_pairs(recording_of([CALL] * 2, NOTHING), [(0, 2)])
    for other in (replace(CALL, persistent_keys=[1]), replace(CALL, entry="encode")):
        calls = [CALL, other] * 2
        recording = recording_of(calls, NOTHING, LATENTS, NOTHING)
        assert not spans_with_pairs(recording, [(0, 4)])
